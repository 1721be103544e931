"""What was written where nobody reads it: settings under names that nothing has, and modules that no module knows."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, DistributedSampler

from prepkit.facts.run import Unread
from prepkit.formats.models.architecture import peek
from prepkit.objects.names import Site
from prepkit.observe.prepared.optimizers import inner

NEAR = 0.85
"""From which likeness on (``SequenceMatcher.ratio``) a name is taken for another that was mistyped."""
OTHER_WORDS = {"learning_rate": "lr", "wd": "weight_decay", "beta": "betas"}
"""Options of optimizers by the names that other libraries give them."""
_PARAMETER = tuple(
    name for name in dir(nn.Parameter) if name in ("requires_grad", "retains_grad", "grad_fn", "is_leaf")
)
_OWN = frozenset(vars(nn.Module()))


def unread(places: list[Site], optimizers: Iterable[Any], loaders: Iterable[Any]) -> tuple[Unread, ...]:
    """Attributes and options that nobody reads, with the name that was meant."""
    found: list[Unread] = []
    for site in places:
        if site.first:
            found += _of_module(site)
    for at, given in enumerate(optimizers):
        found += _of_optimizer(inner(given), f"optimizer[{at}]" if at else "optimizer")
    for at, loader in enumerate(loaders):
        found += _of_loader(loader, f"loaders[{at}]")
    return tuple(found)


def _near(name: str, known: Iterable[str]) -> str:
    """The known name that it was taken for; empty where it is one, or like none."""
    known = tuple(known)
    if name in known:
        return ""
    alike = ((SequenceMatcher(None, name.lower(), one.lower()).ratio(), one) for one in known)
    ratio, best = max(alike, default=(0.0, ""))
    return best if ratio >= NEAR else ""


def _of_module(site: Site) -> Iterator[Unread]:
    module, where = site.module, f"model.{site.path}" if site.path else "model"
    own = vars(module)
    trained = own.get("requires_grad") is False and any(param.requires_grad for param in module.parameters())
    if trained:
        yield Unread(where=where, name="requires_grad", meant="requires_grad_(False)", sure=True)
    for name, value in own.items():
        if isinstance(value, bool) and name not in _OWN and (meant := _near(name, ("training",))):
            yield Unread(where=where, name=name, meant=meant)
    if type(module).__module__.startswith("torch.nn."):
        settings = [name for name in inspect.signature(type(module)).parameters if len(name) > 3]
        for name in own.keys() - _OWN - set(getattr(type(module), "__constants__", ())):
            if not name.startswith("_") and name not in settings and (meant := _near(name, settings)):
                yield Unread(where=where, name=name, meant=meant)
    for key, param in module._parameters.items():
        for name in getattr(param, "__dict__", {}):
            if not name.startswith("_") and (meant := _near(name, _PARAMETER)):
                yield Unread(where=f"{where}.{key}", name=name, meant=meant)
    if not site.path:
        yield from _of_config(peek(module, "config"), f"{where}.config")


def _of_config(config: Any, where: str) -> Iterator[Unread]:
    """Those of transformers take any name, and keep it."""
    if "PreTrainedConfig" not in {base.__name__.replace("Pretrained", "PreTrained") for base in type(config).__mro__}:
        return
    try:
        usual = {*vars(type(config)()), *getattr(config, "attribute_map", {})}
    except Exception:  # one that cannot be made without its arguments
        return
    for name in vars(config).keys() - usual:
        if not name.startswith("_") and (meant := _near(name, usual)):
            yield Unread(where=where, name=name, meant=meant)


def _of_optimizer(optimizer: Any, where: str) -> Iterator[Unread]:
    defaults = getattr(optimizer, "defaults", None)
    if not isinstance(defaults, dict):
        return
    for at, group in enumerate(optimizer.param_groups):
        for name in group.keys() - defaults.keys() - {"params"}:
            meant = OTHER_WORDS.get(name, "") or _near(name, defaults)
            if meant in defaults:
                yield Unread(where=f"{where}.param_groups[{at}]", name=name, meant=meant)
    if type(optimizer).__module__.startswith("torch.optim."):
        for name in vars(optimizer).keys() & defaults.keys():
            yield Unread(where=where, name=name, meant=f"param_groups[0]['{name}']")


def _of_loader(loader: Any, where: str) -> Iterator[Unread]:
    if isinstance(loader, DataLoader) and "shuffle" in vars(loader):
        yield Unread(where=where, name="shuffle", meant="DataLoader(..., shuffle=True)")
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        known = (
            "epoch",
            "shuffle",
            "seed",
            "drop_last",
            "num_replicas",
            "rank",
            "dataset",
            "num_samples",
            "total_size",
        )
        for name in vars(sampler):
            if meant := _near(name, known):
                yield Unread(where=f"{where}.sampler", name=name, meant=meant)


def hidden(places: list[Site], optimizers: Iterable[Any]) -> tuple[str, ...]:
    """Places of trained modules and parameters in plain lists, tuples and dicts, which no model knows and nobody steps.

    Not of a copy, such as an average of weights, which has the names and shapes of a module that the model has.
    """
    groups = (group for one in optimizers for group in inner(one).param_groups)
    known = {id(param) for site in places for param in site.module._parameters.values()}
    known |= {id(param) for group in groups for param in group["params"]}
    shapes = {_shape(site.module) for site in places if site.first and site.module._modules}
    found: list[str] = []
    for site in places:
        for name, value in vars(site.module).items() if site.first else ():
            if name in _OWN or not isinstance(value, list | tuple | dict):
                continue
            for key, thing in _inside(value, 2):
                if _shape(thing) not in shapes and any(
                    param.requires_grad and id(param) not in known for param in _params(thing)
                ):
                    found.append(".".join(filter(None, (site.path, f"{name}{key}"))))
    return tuple(found)


def _inside(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in [*items][:256]:
        if isinstance(one, nn.Module | nn.Parameter):
            yield f"[{key!r}]", one
        elif depth > 1 and isinstance(one, list | tuple | dict):
            yield from ((f"[{key!r}]{rest}", thing) for rest, thing in _inside(one, depth - 1))


def _params(thing: Any) -> list[torch.Tensor]:
    return [thing] if isinstance(thing, nn.Parameter) else [*thing.parameters()]


def _shape(thing: Any) -> Any:
    """Names and shapes, of what ``AveragedModel`` holds as well."""
    if isinstance(thing, nn.Parameter):
        return None
    inside = thing.module if type(thing).__name__ == "AveragedModel" else thing
    return tuple((name, () if is_lazy(param) else tuple(param.shape)) for name, param in inside.named_parameters())
