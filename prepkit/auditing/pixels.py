"""Pictures of 0 to 255 that a first convolution is given as they are, and what is moved otherwise than its picture."""

from __future__ import annotations

import ast
import copy
import re
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.observe.prepared.around import is_foreign, nodes_of, parsed
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.reading import generators_kept

MOST = 4
"""Convolutions that are kept."""
SAMPLE = 4096
"""Values of the first picture that are looked at."""
LEVELS = 16
"""Different values that a picture has at least."""
CHANNELS = (1, 3)
OF_PLACES = re.compile(r"mask|seg|label|annot|depth|heat|\bgt\b|ground_?truth")
"""Of names of what says something of each place of a picture."""
TOGETHER = re.compile(r"seed|state|generator|replay")
"""What a program writes that makes two draws one."""
TRIES = 8
"""Of a transform, of which one has to be other than the first."""


@define(eq=False)
class Pixels:
    """Listens inside ``on()``."""

    _raw: list[tuple[weakref.ref[nn.Module], float]] = field(factory=list)
    """Convolutions that were given such pictures, with the largest value of one."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with around_calls(nn.Conv2d, "forward", self._convolves):
            yield

    def facts(self, roots: Iterable[nn.Module]) -> Iterator[tuple[str, float]]:
        """Yield where such a convolution stands in a model that trains without a norm that would scale them."""
        known = {id(conv()): most for conv, most in self._raw if conv() is not None}
        for root in roots if known else ():
            for path, module in root.named_modules():
                if id(module) in known and not _normed(root, path):
                    yield f"{type(root).__name__}.{path}" if path else type(root).__name__, known[id(module)]

    def _convolves(self, plain: Any, conv: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and len(self._raw) < MOST and given:
            images = given[0]
            if conv.in_channels in CHANNELS and type(images) is Tensor and conv.weight.requires_grad:
                self._looks(conv, images)
        return plain(conv, *given, **named)

    def _looks(self, conv: nn.Module, images: Tensor) -> None:
        if images.dim() != 4 or not images.is_floating_point() or images.requires_grad or not images.numel():
            return
        if torch._C._functorch.maybe_current_level() is not None or any(one() is conv for one, _ in self._raw):
            return
        values = images.detach()[0].reshape(-1)[:SAMPLE].float()
        least, most = (float(one) for one in values.aminmax())
        whole = least >= 0 and 100 < most <= 255 and bool((values == values.round()).all())
        if whole and len(set(values.tolist())) >= LEVELS:
            self._raw.append((weakref.ref(conv), most))


def _normed(root: nn.Module, path: str) -> bool:
    """Whether a norm makes the size of values go away: some anywhere, or any beside the convolution."""
    parent = root.get_submodule(path.rpartition(".")[0])
    kinds = [type(one).__name__ for one in root.modules()]
    beside = [type(one).__name__ for one in parent.children()]
    return any(one.startswith(("BatchNorm", "SyncBatchNorm", "GroupNorm", "InstanceNorm")) for one in kinds) or any(
        "Norm" in one for one in beside
    )


def moved_apart(alive: Iterable[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what a data set moves at random, apart from what says something of each of its places.

    The line, the picture, and what is moved by draws of its own.
    """
    for data in {id(one): one for one in map(_inside, alive) if one is not None}.values():
        code = getattr(getattr(type(data), "__getitem__", None), "__code__", None)
        if code is None or is_foreign(code.co_filename):
            continue
        every = (one for one in nodes_of(parsed(code.co_filename), ast.FunctionDef) if isinstance(one, ast.FunctionDef))
        read = next((one for one in every if one.name == "__getitem__" and _begins(one) == code.co_firstlineno), None)
        if read is None or TOGETHER.search(ast.unparse(read)):
            continue
        for name, given in _transforms(read).items():
            of_places = [node for node in given if OF_PLACES.search(ast.unparse(node).lower())]
            rest = [node for node in given if node not in of_places]
            if of_places and rest and _moves_at_random(_apart(data, name)):
                line = f"{Path(code.co_filename).name}:{of_places[0].lineno}"
                yield line, ast.unparse(rest[0]), ast.unparse(of_places[0])


def _inside(loader: Any) -> Any:
    """The data set of a loader, or of one that is being read; None: it is neither."""
    known = isinstance(loader, DataLoader | _BaseDataLoaderIter)
    data = getattr(loader, "dataset", getattr(loader, "_dataset", None)) if known else None
    while isinstance(data, Subset):
        data = data.dataset
    return data


def _begins(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(one.lineno for one in function.decorator_list)])


def _transforms(read: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """What a method gives to each ``self.name(...)`` of one argument."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for one in ast.walk(read):
        match one:
            case ast.Call(func=ast.Attribute(value=ast.Name("self"), attr=name), args=[given], keywords=[]):
                found[name].append(given)
    return found


def _apart(data: Any, name: str) -> Any:
    """A transform of a data set that can be called with nothing left of it; None: it cannot."""
    draws = any(
        hasattr(one, name) for one in vars(data).values() for name in ("get_state", "getstate", "bit_generator")
    )
    if name in vars(data):
        try:
            return copy.deepcopy(vars(data)[name])
        except Exception:  # of the program's own class
            return None
    return None if draws else getattr(data, name, None)


@torch.no_grad()
def _moves_at_random(transform: Any) -> bool:
    """Return whether it gives a picture its pixels in other places, and not always in the same."""
    if not callable(transform):
        return False
    picture, seen = torch.arange(1.0, 257.0).view(1, 16, 16), list[Tensor]()
    with generators_kept(seed=0):
        for _ in range(TRIES):
            try:
                moved = transform(picture.clone())
            except Exception:  # of the program's own code, for a picture that it never gave
                return False
            if type(moved) is not Tensor or not moved.numel() or not bool(torch.isin(moved, picture).all()):
                return False
            seen.append(moved)
    return any(one.shape != seen[0].shape or not torch.equal(one, seen[0]) for one in seen)
