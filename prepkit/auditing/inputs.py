"""What a program hands to its layers and losses: samples in an order, samples that are alike, noise."""

from __future__ import annotations

import ast
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.auditing.asking import tensors
from prepkit.auditing.carried import shuffles_by
from prepkit.auditing.fetches import Fetches, SharedSettings
from prepkit.auditing.pads import PadsRead
from prepkit.auditing.shapes import SHAPES
from prepkit.auditing.terms import graph, name_of
from prepkit.facts.inputs import InputFacts
from prepkit.observe.prepared.around import (
    Line,
    called_by_program,
    frames_above,
    in_one_loop,
    line_of_program,
    lines_of_program,
    nodes_of,
    own_frames,
    parsed,
)
from prepkit.observe.prepared.around import name_of as called_as
from prepkit.observe.prepared.instead import around_calls

FEW = 4
"""Samples of which nothing is told."""
MOST_ROWS = 1 << 14
"""Samples of a batch that are looked at."""
MOST_NUMBERS = 1 << 20
"""Numbers of an input that are looked at."""
MOST = 16
"""Draws and lookups that are remembered between two backwards."""
SOME = 1 << 14
"""Numbers of a draw that are compared."""
CUMULATIVE = {"Cumsum": "cumsum", "Logcumsumexp": "logcumsumexp", "Cumprod": "cumprod"}
MOVES = frozenset({"Index", "IndexSelect", "Gather", "Sort", "Take", "Topk", "TakeAlongDim"})
"""Nodes of a graph that may put samples in order."""
WIDENS = frozenset({"Exp", "Softplus"})
"""What makes a standard deviation of an output."""
SEVERAL = 8
"""Samples of which numbers go with each other by no chance."""
MOST_TOLD = 512
"""Numbers of a sample that may be made of its time."""
EXACT = 1e-6
"""Of the squares what is left by rounding where noise and data are all that is in a sample."""
MOST_COLUMNS = 8
"""Of a table that may say in which order samples are."""


@frozen(kw_only=True, eq=False)
class _Draw:
    """Some numbers that were drawn."""

    line: str
    shape: torch.Size
    at: int
    """Where the first of them lies."""
    some: Tensor
    bounds: tuple[Any, ...] = ()
    """The function, and between which numbers."""


@frozen(kw_only=True, eq=False)
class _Noised:
    """What a model was called with: data and noise, each times a number of each sample."""

    output: Tensor
    """Some of it."""
    shape: torch.Size
    used: tuple[_Draw, ...]
    """Draws that are in it."""


@define(eq=False)
class InputCalls:
    """Listens inside ``on()``."""

    _fetches: Fetches = field(factory=Fetches)
    _shared: SharedSettings = field(factory=SharedSettings)
    _pads: PadsRead = field(factory=PadsRead)
    _ordered: dict[tuple[str, str, str], None] = field(factory=dict)
    _uniform: dict[str, None] = field(factory=dict)
    _batch: list[weakref.ref[Tensor]] = field(factory=list)
    """Tensors of the last batch that a loader gave."""
    _sampler: str = ""
    """What has drawn that at random; empty: it was read in order."""
    _samples: int = 0
    """Those of it that a model was called with, as they came, since the last backward; 0: none was."""
    _hooked: bool = False
    """Whether hooks hang on what graphs save, which compute it anew."""
    _draws: list[_Draw] = field(factory=list)
    """Numbers in [0, 1) since then."""
    _normal: list[_Draw] = field(factory=list)
    _times: list[_Draw] = field(factory=list)
    """One number for each sample that was drawn evenly since then."""
    _noised: list[_Noised] = field(factory=list)
    _others: dict[tuple[str, str], None] = field(factory=dict)
    _untold: dict[tuple[str, str], None] = field(factory=dict)
    _rows: list[tuple[str, str, int]] = field(factory=list)
    """Calls of models since then whose samples were all the same: the line, the class, and how many."""
    _differ: bool = False
    """Whether those of another call were not, of which one is enough."""
    _alike: dict[tuple[str, str, int], None] = field(factory=dict)
    _own: dict[_Draw, list[Line]] = field(factory=dict)
    """Those since then that the program itself has made by torch's common generator, and where they stand."""
    noise: str = ""
    """Such a line that has drawn something for each sample of a batch, and no seed for it; empty: there was none."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(self._fetches.on())
            stack.enter_context(self._shared.on())
            stack.enter_context(self._pads.on())
            stack.enter_context(around_calls(_BaseDataLoaderIter, "__next__", self._reads))
            stack.enter_context(around_calls(torch.autograd, "backward", self._backward))
            stack.enter_context(around_calls(saved_tensors_hooks, "__enter__", self._hooks))
            for name in ("rand", "rand_like", "randn", "randn_like", "randint"):
                stack.enter_context(around_calls(torch, name, partial(self._drawn, name)))
            yield

    def facts(self) -> InputFacts:
        """What was heard so far."""
        return InputFacts(
            padding=tuple(self._pads.told.values()),
            ordered=tuple(self._ordered),
            uniform=tuple(self._uniform),
            noises=tuple(self._others),
            times=tuple(self._untold),
            alike=tuple(self._alike),
            rewritten=tuple(self._fetches.rewritten.values()),
            wrapped=tuple(self._fetches.wrapped.values()),
            mispaired=tuple(self._fetches.mispaired),
            lost=tuple(self._shared.lost),
        )

    def looked_up(self) -> frozenset[int]:
        """The ``id``s of living tables in which ids were looked up."""
        return frozenset(map(id, self._pads.tables))

    def leaves(self, module: nn.Module, given: Any, outputs: Any) -> None:
        """Hears what a model that trains was called with from outside of any other, and what it gave."""
        inputs = [one for one in tensors(given) if type(one) is Tensor and one.dim() and not one.is_meta]
        self._pads.leaves(module, inputs, outputs)
        self.noise = self.noise or self._beside_data(inputs)
        if not self._differ:
            count = _alike(inputs)
            self._differ = not count
            self._rows += [(line_of_program(frames_above(__file__)), type(module).__name__, count)] if count else []
        batch = [one for known in self._batch if (one := known()) is not None]
        if self._sampler and any(_is_same(one, other) for one in inputs for other in batch):
            self._samples = len(batch[0])
        if self._normal:
            self._hears_noised(inputs, outputs, batch)

    def _reads(self, plain: Callable[..., Any], reading: Any) -> Any:
        batch = plain(reading)
        if threading.current_thread() is threading.main_thread():  # others read ahead
            found = [one for one in tree_leaves(batch) if _is_plain(one) and one.dim()]
            self._sampler, self._batch = shuffles_by(reading), [weakref.ref(one) for one in found]
        return batch

    def _hooks(self, plain: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._hooked = True
        return plain(*given, **named)

    def _drawn(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        drawn = plain(*given, **named)
        if not torch.compiler.is_compiling() and _is_plain(drawn) and drawn.numel() > FEW:
            line, whole = line_of_program(frames_above(__file__)), [one for one in given if isinstance(one, int)]
            bounds = (name, *([0] if len(whole) == 1 else []), *whole) if name == "randint" else (name,)
            draw = _Draw(line=line, shape=drawn.shape, at=drawn.data_ptr(), some=_some_of(drawn), bounds=bounds)
            own = name != "randint" and named.get("generator") is None and called_by_program(frames_above(__file__))
            if own and not _is_made_of_it(frames_above(__file__)):
                self._own[draw] = lines_of_program(frames_above(__file__))
                self._own = dict([*self._own.items()][-MOST:])
            if name.startswith("randn"):
                self._normal = [*self._normal, draw][-MOST:]
            elif drawn.numel() == len(drawn):
                self._times = [*self._times, draw][-MOST:]
            if name in ("rand", "rand_like") and drawn.numel() >= MOST:
                self._draws = [*self._draws, draw][-MOST:]
        return drawn

    def _beside_data(self, inputs: list[Tensor]) -> str:
        """The line of a draw for each sample of something that was not drawn so, and which is no input itself."""
        inputs, now = [one for one in inputs if _is_plain(one)], lines_of_program(frames_above(__file__))
        own = [draw for draw, stands in self._own.items() if not _is_before_loop(stands, now)]
        drawn = {id(one): draw for one in inputs for draw in own if draw.shape == one.shape and _holds(one, draw)}
        sizes = {len(one) for one in inputs if id(one) not in drawn}
        used = [*drawn.values()]
        return next((one.line for one in own if one.shape[0] in sizes and one not in used), "")

    def _hears_noised(self, inputs: list[Tensor], outputs: Any, batch: list[Tensor]) -> None:
        """Looks for noise in what a model is given, which says noise of each number, and is told of something else."""
        made = next((one.detach() for one in tensors(outputs) if one.dim() > 1), None)
        given = next((one.detach() for one in inputs if made is not None and one.shape == made.shape), None)
        if made is None or given is None or not SEVERAL <= len(given) <= MOST_ROWS:
            return
        told = [one.detach() for one in inputs if len(one) == len(given) and one.numel() <= MOST_TOLD * len(one)]
        told = [one for one in told if one.shape != given.shape]
        held = (value for one in own_frames() for value in [*one.f_locals.values()] if isinstance(value, Tensor))
        data = [one for one in (*batch, *held) if _is_plain(one) and one.shape == given.shape]
        others = [_some_of(one) for one in data if one.is_floating_point() and not _is_same(one, given)][:MOST]
        normal = [one for one in self._normal if one.shape == given.shape][-FEW:]
        used: dict[_Draw, None] = {}
        for draw in normal:
            rests = [one for one in others if not torch.equal(one, draw.some)]
            for other in (*rests, *(one.some for one in normal if one is not draw)):
                if (found := _share(_some_of(given), other, draw.some, given.shape)) is not None:
                    time = next((one for one in self._times if _goes_with(one.some, found[0])), None)
                    hears = any(_goes_with(one, found[0]) for one in told)
                    if found[1] or hears or time is not None:
                        also = (one for one in normal if one.some is other)
                        used |= {draw: None, **dict.fromkeys(also)}
                    if time is not None and not hears:
                        self._misses(time, told)
        if used and told:
            self._noised.append(_Noised(output=_some_of(made), shape=made.shape, used=tuple(used)))

    def _misses(self, time: _Draw, told: list[Tensor]) -> None:
        """A model hears of another draw of the same kind."""
        others = [one for one in self._times if one.bounds == time.bounds and not torch.equal(one.some, time.some)]
        other = next((one for one in others if any(_is_drawn(each, one) for each in told)), None)
        if other is not None and other.line:
            self._untold[other.line, time.line] = None

    def _backward(self, plain: Any, losses: Any, *given: Any, **named: Any) -> Any:
        nested = torch._C._current_graph_task_id() != -1
        if not torch.compiler.is_compiling() and not nested:
            loss = losses[0] if isinstance(losses, tuple | list) and losses else losses
            node = getattr(loss, "grad_fn", None)
            if (self._samples or self._draws or self._noised) and node is not None:
                self._looks(graph(node))
            self._alike |= dict.fromkeys(self._rows if not self._differ else ())
            self._samples, self._draws, self._normal, self._times, self._noised = 0, [], [], [], []
            self._rows, self._differ, self._own = [], False, {}
        return plain(losses, *given, **named)

    def _looks(self, every: list[Any]) -> None:
        if self._samples > FEW:
            found = (one for one in every if name_of(one) in CUMULATIVE and _is_over(one, self._samples))
            if (one := next(found, None)) is not None and not self._in_order(one):
                function = CUMULATIVE[name_of(one)]
                self._ordered[_line_of(function), function, self._sampler] = None
        for draw in self._draws if not self._hooked else ():
            if draw.line and any(_spreads(one, draw) for one in every if name_of(one) == "Add"):
                self._uniform[draw.line] = None
        for noised in self._noised if not self._hooked else ():
            others = [one for one in self._normal if one.shape == noised.shape and one not in noised.used]
            for one in others:
                if one.line and any(_aims_at(node, noised, one) for node in every):
                    self._others[one.line, noised.used[0].line] = None

    def _in_order(self, node: Any) -> bool:
        """Whether something has put the samples in order that this node accumulates over, or they lie in one."""
        if any(name_of(one) in MOVES for one in graph(node)) or not graph(node):
            return True
        held = (value for one in own_frames() for value in [*one.f_locals.values()])
        leaves = [one for value in held for one in (value if isinstance(value, list | tuple) else (value,))]
        leaves += [one for known in self._batch if (one := known()) is not None]
        return any(_has_order(one, self._samples) for one in leaves)


def _is_plain(one: Any) -> bool:
    """Return whether it is a tensor that can be read, and no transform of torch.func or of a compiler is on."""
    return type(one) is Tensor and not one.is_meta and torch._C._functorch.maybe_current_level() is None


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.layout == torch.strided and one.data_ptr() == other.data_ptr()


def _some_of(drawn: Tensor) -> Tensor:
    return drawn.detach().flatten()[:: drawn.numel() // SOME + 1].clone()


# --- samples that are alike ---


def _alike(inputs: list[Tensor]) -> int:
    """How many samples are all the same, and not one that was expanded; 0: they differ, or are few."""
    count = len(inputs[0]) if inputs else 0
    if count < MOST or any(len(one) != count or one.numel() > MOST_NUMBERS for one in inputs):
        return 0
    told = [one for one in inputs if one.is_floating_point() and one.stride(0) and _differ(one[0].flatten())]
    return 0 if not told or any(_differ(one[:2]) or _differ(one) for one in inputs) else count


def _differ(rows: Tensor) -> bool:
    return bool((rows != rows[:1]).any())


# --- an order of samples ---


def _is_over(node: Any, samples: int) -> bool:
    """Return whether a node accumulates one number of each sample over all of them."""
    shape, dim = tuple(node._input_metadata[0].shape), int(node._saved_dim)
    dim = dim - (1 << 64) if dim >= 1 << 63 else dim
    return sorted(shape)[-1:] == [samples] and torch.Size(shape).numel() == samples == shape[dim]


def _has_order(one: Any, samples: int) -> bool:
    """Return whether a tensor, or a column of one, has its numbers in order."""
    if not _is_plain(one) or not 0 < one.dim() < 3 or len(one) != samples or one.numel() > samples * MOST_COLUMNS:
        return False
    columns = one.detach().reshape(samples, -1).double()
    steps = columns[1:] - columns[:-1]
    return bool((((steps >= 0).all(0) | (steps <= 0).all(0)) & (steps != 0).any(0)).any())


def _line_of(function: str) -> str:
    """The only line of the program that calls it; else the line that goes backward."""
    files = dict.fromkeys(one.f_code.co_filename for one in own_frames())
    calls = [(file, one) for file in files for one in nodes_of(parsed(file), ast.Call)]
    lines = {f"{Path(file).name}:{one.lineno}" for file, one in calls if called_as(one) == function}
    return lines.pop() if len(lines) == 1 else line_of_program(frames_above(__file__))


# --- noise ---


def _is_before_loop(stands: list[Line], now: list[Line]) -> bool:
    """Return whether this line goes around in a loop in which those are not, in the innermost function of both."""
    codes = {code for code, _ in stands}
    shared = [one for one in now if one[0] in codes]
    return in_one_loop(shared, shared) and not in_one_loop(shared, stands)


def _is_made_of_it(frames: Iterable[FrameType]) -> bool:
    """Return whether a model is being made, which begins with what is drawn."""
    made = (one.f_locals.get("self") for one in frames if one.f_code.co_name == "__init__")
    return any(isinstance(one, nn.Module) for one in made)


def _spreads(node: Any, draw: _Draw) -> bool:
    """Return whether it adds something that trains to this draw times a standard deviation, each of one shape."""
    inside = [one for one, _ in node.next_functions]
    if tuple(node._input_metadata[0].shape) != tuple(draw.shape) or None in inside:
        return False
    products = [one for one in inside if name_of(one) == "Mul"]  # of two it is a mixture
    return len(products) == 1 and _is_widened(products[0], draw)


def _is_widened(node: Any, draw: _Draw) -> bool:
    factors = [one for one, _ in node.next_functions]
    saved = [_saved(node, name) for name in ("_saved_self", "_saved_other")]
    drawn = (one for one in saved if isinstance(one, Tensor) and one.shape == draw.shape)
    if factors.count(None) != 1 or not any(one.data_ptr() == draw.at and _holds(one, draw) for one in drawn):
        return False
    (deviation,) = (one for one in factors if one is not None)
    while name_of(deviation) in ("Sqrt", "Add", *SHAPES) and deviation.next_functions[0][0] is not None:
        deviation = deviation.next_functions[0][0]
    return name_of(deviation) in WIDENS


def _saved(node: Any, name: str) -> Any:
    try:
        return getattr(node, name, None)
    except RuntimeError:  # freed, or written over since
        return None


def _holds(one: Tensor, draw: _Draw) -> bool:
    return torch.equal(_some_of(one), draw.some)


def _share(given: Tensor, data: Tensor, noise: Tensor, shape: torch.Size) -> tuple[Tensor, bool] | None:
    """By which number noise is multiplied in each sample, where that and data are all there is; None: they are not.

    And whether a sample has enough numbers to say so.
    """
    rows, step = shape[0], shape.numel() // SOME + 1
    row = torch.arange(0, shape.numel(), step) // (shape.numel() // rows)
    x, one, other = (each.double().cpu() for each in (given, data, noise))
    sums = torch.stack([x * x, x * one, x * other, one * one, other * other, one * other, torch.ones_like(x)])
    xx, xo, xn, oo, nn_, on, count = sums.new_zeros(len(sums), rows).index_add_(1, row, sums)
    base = oo * nn_ - on * on
    if float(count.min()) < 2 or not bool((base > EXACT * oo * nn_).all()):
        return None
    of_data, of_noise = (xo * nn_ - xn * on) / base, (xn * oo - xo * on) / base
    left = xx - of_data * xo - of_noise * xn
    is_all = float(left.sum()) < EXACT * float(xx.sum()) and float(of_noise.abs().min()) > 0
    return (of_noise, float(count.min()) > FEW) if is_all else None


def _goes_with(times: Tensor, share: Tensor) -> bool:
    """Return whether numbers of samples rise, or fall, wherever some others do."""
    if len(times) != len(share) or times.dtype == torch.bool or times.is_complex():
        return False
    columns = times.detach().reshape(len(times), -1).double().cpu()
    spread = float(share.max() - share.min())
    several = torch.tensor([one.unique().numel() >= SEVERAL // 2 for one in columns.T])
    steps = share[columns.argsort(0)].diff(dim=0) / (spread or 1.0)
    against = torch.minimum((steps < -SLIGHT).double().mean(0), (steps > SLIGHT).double().mean(0))
    return spread > SLIGHT and bool(((against < RARE) & several).any())


SLIGHT, RARE = 1e-2, 0.05


def _is_drawn(one: Tensor, draw: _Draw) -> bool:
    return one.numel() == len(draw.some) == draw.shape.numel() and torch.equal(one.flatten().to(draw.some), draw.some)


def _aims_at(node: Any, noised: _Noised, draw: _Draw) -> bool:
    """Return whether it compares what a model gave with a draw."""
    if name_of(node) in ("MseLoss", "SmoothL1Loss", "HuberLoss"):
        target = _saved(node, "_saved_target")
        return isinstance(target, Tensor) and target.shape == draw.shape and _holds(target, draw)
    difference = _saved(node, "_saved_self") if name_of(node) in ("Pow", "Abs") else None
    if not isinstance(difference, Tensor) or difference.shape != draw.shape:
        return False
    some = _some_of(difference)
    return any(torch.allclose(noised.output + sign * some, draw.some, atol=1e-4) for sign in (1, -1))
