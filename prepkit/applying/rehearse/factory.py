"""A model from an import path, for the command line: ``pkg.mod:name``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from prepkit.observe.given import said


def build(factory: str, device: str = "meta") -> nn.Module:
    """The model that ``factory`` names or makes.

    ``pkg.mod:name`` names an ``nn.Module``, or something to call without arguments that returns one. It is called with
    ``device`` as the default device, so that on ``meta`` no memory is taken; importing is left as it is. The current
    directory is put in front of ``sys.path``, as ``python -m`` does.

    Raises ``ValueError`` that says what is wrong with the text; what the code behind it raises passes through.
    """
    named = _attribute(*_parts(factory))
    if isinstance(named, nn.Module):
        return named
    if not callable(named):
        raise ValueError(f"{factory} is {said(named)}; name a function that returns a torch.nn.Module")  # noqa: TRY004  # as below
    if needed := _arguments(named):
        raise ValueError(f"{factory} needs arguments ({needed}); name a function without: def make(): return ...")
    with torch.device(device):
        model = named()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{factory}() returned {said(model)}, not a torch.nn.Module; end it with: return model")  # noqa: TRY004  # the text that was given is wrong
    return model


def named(path: str) -> Any:
    """Return what ``pkg.mod:name`` names. Raises ``ValueError`` as ``build`` does."""
    return _attribute(*_parts(path))


def _parts(factory: str) -> tuple[str, str]:
    path, colon, name = factory.partition(":")
    if path.endswith(".py") or "/" in path:
        module = path.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ValueError(f"{path!r} is a file, not a module; write {module}:{name or 'make_model'}")
    if not (colon and all(part.isidentifier() for part in (*path.split("."), *name.split(".")))):
        raise ValueError(f"{factory!r} is not an import path; write package.module:name, such as train:make_model")
    return path, name


def _attribute(path: str, name: str) -> object:
    value: object = _module(path)
    where = path + ":"
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{where.rstrip(':')} has no {part!r}{_near(part, dir(value)) or '; check the spelling'}")
        value = getattr(value, part)
        where = f"{where}{part}" if where.endswith(":") else f"{where}.{part}"
    return value


def _module(path: str) -> ModuleType:
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        # Where the module is there but imports one that is not, its own message is the right one.
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        near = _near(path, (file.stem for file in Path.cwd().glob("*.py")))
        fix = near or f"; run this from the directory that holds {path.partition('.')[0]}, or install it"
        raise ValueError(f"there is no module {error.name!r}{fix}") from None


def _arguments(function: Callable[..., Any]) -> str:
    """Names of the parameters that have no default; empty where Python cannot tell, as for some built-ins."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ""
    return ", ".join(
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def _near(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
