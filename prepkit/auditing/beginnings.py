"""How the layers of a model began: units that are alike, the momentum of norms, one layer for several."""

from __future__ import annotations

import ast
import linecache
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from prepkit.auditing.carried import Carried
from prepkit.facts.values import BeginningFacts
from prepkit.objects.names import unwrap_root
from prepkit.observe.prepared.around import frames_above, is_of_library, nodes, parsed
from prepkit.observe.prepared.instead import around_calls

KEPT = (0.9, 1.0)
"""From the first to below the second a momentum is what Keras calls so; 1.0 takes the last batch alone, on purpose."""

_MEANT = re.compile(r"shar|tie[ds_]|recurr|univers|albert", re.IGNORECASE)
"""Words of a program that shares a layer on purpose."""


@define(eq=False)
class Beginnings:
    """Listens inside ``on()``."""

    _lists: list[tuple[weakref.ref[nn.Module], str]] = field(factory=list)
    """Lists of layers that a multiplied list was given to, and the line."""

    carried: Carried = field(factory=Carried)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            for kind, name in ((nn.ModuleList, "extend"), (nn.Sequential, "__init__")):
                stack.enter_context(around_calls(kind, name, self._holds))
            stack.enter_context(self.carried.on())
            yield

    def told(self) -> dict[str, Any]:
        """What later steps may have as well, as fields of ``WindowFacts``."""
        return {"carried": tuple(self.carried.found)}

    def facts(self, model: nn.Module | None) -> BeginningFacts:
        """How this one began, whose gradients are there."""
        if model is None:
            return BeginningFacts()
        root = unwrap_root(model)[-1]
        return BeginningFacts(
            alike=tuple(_alike(root)), keeps=tuple(_keeps(root)), repeated=tuple(self._repeated(root))
        )

    def _holds(self, plain: Callable[..., Any], holder: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = plain(holder, *args, **kwargs)
        if not torch.compiler.is_compiling() and _repeats(holder)[0] is not None:
            frame = next((one for one in frames_above(__file__) if not is_of_library(one)), None)
            if line := "" if frame is None else _multiplies(frame):
                self._lists.append((weakref.ref(holder), line))
        return result

    def _repeated(self, root: nn.Module) -> Iterator[tuple[str, str, int, str]]:
        """Yield lists that hold one layer several times, as a line of the program has multiplied it."""
        lines = {id(holder): line for one, line in self._lists if (holder := one()) is not None}
        for path, holder in root.named_modules() if lines else ():
            layer, times = _repeats(holder) if id(holder) in lines else (None, 0)
            if layer is not None and not _MEANT.search(f"{path} {type(root).__name__} {type(layer).__name__}"):
                yield path, type(layer).__name__, times, lines[id(holder)]


def _alike(root: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield weights whose units are all one, and go on as one: so do their biases and gradients say."""
    for path, layer in root.named_modules():
        if isinstance(layer, nn.Linear | _ConvNd) and not isinstance(layer, nn.LazyLinear):
            weight, bias, grad = layer.weight, layer.bias, layer.weight.grad if layer.weight.is_leaf else None
            empty = bias is not None and not bias.numel()  # of a rank that holds none of it
            apart = empty or getattr(layer, "groups", 1) > 1 or isinstance(weight, DTensor)
            if grad is None or apart or not weight.requires_grad:
                continue
            turned = isinstance(layer, _ConvTransposeNd)
            units, moves = (one.transpose(0, 1) if turned else one for one in (weight.detach(), grad))
            one = bias is None or bool((bias.detach() == bias.detach().flatten()[0]).all())
            if one and _one_row(units, 0.0) and _one_row(moves, torch.finfo(moves.dtype).eps ** 0.5):
                yield f"{path}.weight" if path else "weight", len(units)


def _one_row(rows: Tensor, apart: float) -> bool:
    """Return whether there are several rows, all the same up to this part of the greatest, and none is zero."""
    if rows.dim() < 2 or len(rows) < 2 or not rows[0].numel() or rows.is_sparse:
        return False
    for some in (rows[:2], rows):  # most are told apart by their first two
        if not bool(((some - some[:1]).abs().amax() <= apart * some.abs().amax()).item()):
            return False
    return bool(rows[0].any())


def _keeps(root: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield batch norms that average what they see, and hardly keep any of it."""
    for path, layer in root.named_modules():
        averages = isinstance(layer, _BatchNorm) and layer.training and layer.track_running_stats
        if averages and layer.momentum is not None and KEPT[0] <= layer.momentum < KEPT[1]:
            yield path, float(layer.momentum)


def _repeats(holder: nn.Module) -> tuple[nn.Module | None, int]:
    """The layer with weights that a list has several times, and how often."""
    times = Counter(map(id, holder._modules.values()))
    layers = (one for one in holder._modules.values() if one is not None and times[id(one)] > 1)
    layer = next((one for one in layers if next(one.parameters(), None) is not None), None)
    return layer, times[id(layer)]


def _multiplies(frame: FrameType) -> str:
    """The line of a program that multiplies a list of new layers, where it gives that to what it calls now."""
    file, now = frame.f_code.co_filename, frame.f_lineno
    every = nodes(parsed(file))
    named = dict(_names_in(every))
    for call in (one for one in every if isinstance(one, ast.Call) and one.lineno <= now <= (one.end_lineno or 0)):
        for product in (one for given in call.args for one in _products(given, named)):
            shown = (linecache.getline(file, at) for at in range(product.lineno - 1, (product.end_lineno or 0) + 1))
            if _makes_layers(product) and not any(map(_MEANT.search, shown)):
                return f"{Path(file).name}:{product.lineno}"
    return ""


def _names_in(every: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for one in every:
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            yield one.targets[0].id, one.value


def _products(given: ast.expr, named: dict[str, ast.expr]) -> Iterator[ast.BinOp]:
    """Yield the lists times a number that something is made of; ``named``: what names stand for."""
    match given:
        case ast.Starred(value):
            yield from _products(value, named)
        case ast.Name(name) if name in named:
            yield from _products(named[name], {})
        case ast.BinOp(left, ast.Add(), right):
            yield from _products(left, named)
            yield from _products(right, named)
        case ast.BinOp(ast.List() | ast.Tuple(), ast.Mult(), _) | ast.BinOp(_, ast.Mult(), ast.List() | ast.Tuple()):
            yield given


def _makes_layers(product: ast.BinOp) -> bool:
    lists = (one for one in (product.left, product.right) if isinstance(one, ast.List | ast.Tuple))
    return any(isinstance(made, ast.Call) for one in lists for made in one.elts)
