"""What the lessons of a loop miss: batches left out in each pass, new tokens that rest, a maker that wants to lose."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.auditing.terms import ASKS
from prepkit.facts.loops import LessonFacts
from prepkit.objects.names import unwrap_root
from prepkit.observe.prepared.around import (
    frames_above,
    is_of_library,
    known,
    line_of_program,
    nodes_of,
    parsed,
    reads_gradients,
)
from prepkit.observe.prepared.instead import around_calls

SAMPLE = 32
"""Numbers of a tensor, or of a row, by which it is known again."""
MOST_IDS = 1 << 18
"""Tokens of a batch that are looked at."""
MOST_PLACES = 1 << 16
"""Numbers that a judge may give for a batch."""
MOST_NODES = 400
"""Nodes of a graph that are looked at."""
MOST_CALLS = 64
"""Calls of modules that are remembered."""
FEW = 4
"""Samples of a batch of which it says nothing that they are all taught the same."""
PLAIN = ("deepspeed.",)
"""Libraries whose own functions give the gradient of what they compute."""
INSERTS = ("masked_scatter", "masked_scatter_", "index_put", "index_put_", "where", "scatter", "index_copy")
"""Methods that put something else in the place of some embeddings, such as those of an image."""


@frozen(eq=False)
class _Grown:
    """An embedding that was made in a function that had a smaller one."""

    before: int
    rows: int
    first: Tensor
    last: Tensor
    """Some numbers of the first and the last row of the smaller one."""

    def is_in(self, weight: Tensor) -> bool:
        """Whether these rows stand there, and behind them are others."""
        if weight.dim() != 2 or len(weight) != self.rows or weight.dtype != self.first.dtype:
            return False
        return _same(_some(weight[0]), self.first) and _same(_some(weight[self.before - 1]), self.last)


@define(eq=False)
class _Read:
    """Ids for which a frozen embedding was asked, new ones among them."""

    line: str
    grown: _Grown
    new: int
    ids: tuple[tuple[int, ...], int]
    """Shape and place of the ids."""
    given: weakref.ref[Tensor]
    shape: tuple[int, ...]


@define(eq=False)
class _Judged:
    """A call of a module with something that it says of each sample, and what it was taught by it."""

    module: weakref.ref[nn.Module]
    given: Tensor
    """Some numbers of what it was given."""
    maker: str
    """Class of the module that has given it these; empty: none has."""
    through: bool
    """Whether a graph leads through it to what has made them, as it is."""
    taught: Tensor | None = None
    """Signs of the gradient of what it says, where all samples have the same; else None."""
    times: int = 0
    line: str = ""
    """The backward that has taught it."""


@define(eq=False)
class Lessons:
    """Listens inside ``on()``; is told of calls of modules."""

    _grown: list[_Grown] = field(factory=list)
    _read: list[_Read] = field(factory=list)
    _learned: list[tuple[tuple[int, ...], int]] = field(factory=list)
    """Ids for which an embedding was asked that trains, as an adapter of a frozen one."""
    _made: list[tuple[Tensor, str]] = field(factory=list)
    """Some numbers of what modules have given, and their classes."""
    _judged: list[_Judged] = field(factory=list)
    """Since the last step of any optimizer."""
    _labels: weakref.WeakKeyDictionary[nn.Module, list[_Judged]] = field(factory=weakref.WeakKeyDictionary)
    """What each judge was taught last in a turn of its own."""
    _reverses: weakref.WeakKeyDictionary[nn.Module, bool] = field(factory=weakref.WeakKeyDictionary)
    _alike: dict[tuple[str, str, str], None] = field(factory=dict)
    _line: str = ""
    """Where it went backward last."""
    _backwards: int = 0
    """Those that run now."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(nn.Embedding, "__init__", self._makes))
            stack.enter_context(around_calls(nn.functional, "embedding", self._looks_up))
            for name in INSERTS:
                stack.enter_context(around_calls(Tensor, name, self._inserts))
            stack.enter_context(around_calls(torch, "where", self._inserts))
            stack.enter_context(around_calls(Tensor, "__setitem__", self._inserts))
            stack.enter_context(around_calls(torch.autograd, "backward", self._backward))
            stack.callback(register_optimizer_step_pre_hook(self._steps).remove)
            yield

    def told(self) -> LessonFacts:
        """What was heard before the step that begins."""
        return LessonFacts(
            skips=tuple(_skips(list(frames_above(__file__)))),
            new_tokens=tuple(self._new_tokens()),
            judged_alike=tuple(self._alike),
        )

    # --- tokens ---

    def _makes(self, plain: Any, module: Any, *given: Any, **named: Any) -> None:
        plain(module, *given, **named)
        frame = next(frames_above(__file__), None)
        while frame is not None and frame.f_locals.get("self") is module:
            frame = frame.f_back  # of a class that is derived from it
        for one in () if frame is None or torch.compiler.is_compiling() else [*frame.f_locals.values()]:
            if isinstance(one, nn.Embedding) and "weight" in vars(one)["_parameters"]:
                self._grows(one.weight, module.weight)

    def _grows(self, old: Any, new: Any) -> None:
        plain = type(old) is nn.Parameter and type(new) is nn.Parameter and old.dim() == 2 and not old.is_meta
        if plain and 0 < len(old) < len(new) and old.shape[1:] == new.shape[1:]:
            grown = _Grown(len(old), len(new), _some(old[0]), _some(old[-1]))
            self._grown = [*self._grown, grown][-FEW:]

    def _looks_up(self, plain: Any, *given: Any, **named: Any) -> Any:
        result = plain(*given, **named)
        inside = torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
        if self._grown and not inside and torch.is_grad_enabled():
            ids: Any = given[0] if given else named.get("input")
            weight: Any = given[1] if len(given) > 1 else named.get("weight")
            if type(ids) is Tensor and isinstance(weight, Tensor) and ids.numel() <= MOST_IDS:
                place = (tuple(ids.shape), ids.data_ptr())
                if weight.requires_grad:
                    self._learned = [*self._learned, place][-MOST_CALLS:]
                else:
                    self._reads(ids, weight.detach(), result, place)
        return result

    def _reads(self, ids: Tensor, weight: Tensor, result: Any, place: tuple[tuple[int, ...], int]) -> None:
        grown = next((one for one in self._grown if one.is_in(weight)), None)
        frames = list(frames_above(__file__))
        if grown is None or not _trains(frames):
            return
        new = (ids >= grown.before) & _counted(ids, frames)
        seen = sorted({*ids[new].tolist()})
        if not seen or (len(seen) == 1 and _at_the_ends(new)):
            return  # a pad, or the end of a text, of which nobody says which it is
        line = line_of_program(frames)
        one = _Read(line, grown, seen[0], place, weakref.ref(result), tuple(result.shape))
        self._read = [*self._read, one][-FEW:]

    def _inserts(self, plain: Any, *given: Any, **named: Any) -> Any:
        """What was put in the place of embeddings, or in a copy of them, may be in that of all new tokens."""
        if self._read and not torch.compiler.is_compiling():
            shapes = [tuple(one.shape) for one in given if isinstance(one, Tensor) and one.is_floating_point()]
            self._read = [one for one in self._read if one.shape not in shapes]
        return plain(*given, **named)

    def _new_tokens(self) -> Iterator[tuple[str, int, int, int]]:
        for one in self._read:
            if one.ids not in self._learned and ((given := one.given()) is None or given._version == 0):
                yield one.line, one.grown.rows - one.grown.before, one.grown.before, one.new

    # --- judges ---

    def enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        """Hears of a call from outside of any other, and of what it gives."""
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        if given is None or torch._C._functorch.maybe_current_level() is not None:
            return None
        root = unwrap_root(module)[-1]

        def left(outputs: Any) -> None:
            if type(outputs) is Tensor and outputs.is_floating_point() and outputs.numel() and not outputs.is_meta:
                if outputs.requires_grad and outputs.dim() and outputs.numel() <= MOST_PLACES:
                    self._says(root, given, outputs)
                self._made = [*self._made, (_some(outputs), type(root).__name__)][-MOST_CALLS:]

        return left

    def _says(self, module: nn.Module, given: Tensor, outputs: Tensor) -> None:
        if len(outputs) < FEW or not given.is_floating_point() or not given.numel():
            return
        numbers = _some(given)
        maker = next((name for made, name in reversed(self._made) if _same(made, numbers)), "")
        hooks: Any = [*(given._backward_hooks or {}).values()]
        others = [one for one in hooks if getattr(one, "func", None) != self._taught] or module._backward_hooks
        through = given.grad_fn is not None and not others
        if through and module not in self._reverses:
            self._reverses[module] = _is_by_hand(outputs.grad_fn)
        judged = _Judged(weakref.ref(module), numbers, maker, through and not self._reverses[module])
        self._judged = [*self._judged, judged][-MOST_CALLS:]
        outputs.register_hook(partial(self._taught, judged))  # type: ignore[no-untyped-call]

    def _taught(self, judged: _Judged, gradient: Tensor) -> None:
        """Of what goes backward by itself, and not of a penalty on gradients."""
        if self._backwards and isinstance(gradient, Tensor) and not ASKS.now:
            signs = gradient.detach().flatten(1).sign() if gradient.dim() > 1 else gradient.detach()[:, None].sign()
            total = signs.sum(0).sign()
            alike = bool((signs * total >= 0).all()) and bool(total.any())
            judged.times, judged.line = judged.times + 1, self._line
            judged.taught = total if alike and judged.times == 1 else None

    def _backward(self, plain: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*given, **named)
        if not self._backwards:
            self._line = line_of_program(frames_above(__file__))
        self._backwards += 1
        try:
            return plain(*given, **named)
        finally:
            self._backwards -= 1

    def _steps(self, optimizer: Any, *_: Any) -> None:
        groups = optimizer.param_groups
        held = {id(param) for group in groups for param in group["params"]}
        turned = [one for one in self._judged if one.times]
        self._judged = [one for one in self._judged if not one.times]
        for module in dict.fromkeys(module for one in turned if (module := one.module()) is not None):
            calls = [one for one in turned if one.module() is module]
            if not held.isdisjoint(map(id, module.parameters())):
                self._labels[module] = [one for one in calls if any(map(partial(_against, one), calls))]
            elif not any(group.get("maximize") for group in groups) and not reads_gradients():
                known_labels, made = self._labels.get(module, ()), [one for one in calls if one.through]
                if made and all(any(map(partial(_agrees, one), known_labels)) for one in made):
                    self._alike[made[0].line, made[0].maker, type(module).__name__] = None


def _against(one: _Judged, other: _Judged) -> bool:
    """Whether a module was taught the opposite of something else."""
    if one.taught is None or other.taught is None:
        return False
    return _same(one.taught, -other.taught) and not _same(one.given, other.given)


def _agrees(one: _Judged, other: _Judged) -> bool:
    """Whether both are about what one maker has made, and teach the same of it."""
    if one.taught is None or other.taught is None or not _same(one.taught, other.taught):
        return False
    return _same(one.given, other.given) or one.maker == other.maker != ""


def _is_by_hand(node: Any) -> bool:
    """Whether a graph goes through a function whose gradient somebody has written, as one that reverses it."""
    waiting, found = [node], {node}
    while waiting and len(found) <= MOST_NODES:
        one = waiting.pop(0)
        home = getattr(type(one), "_forward_cls", BackwardCFunction).__module__
        if isinstance(one, BackwardCFunction) and not home.startswith(PLAIN):
            return True
        below = {node for node, _ in one.next_functions if node is not None} - found
        found |= below
        waiting += below
    return False


def _some(tensor: Tensor) -> Tensor:
    """Some of the numbers, from all over it."""
    with torch.no_grad():
        flat = tensor.detach().flatten()
        return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.device == other.device and bool((one == other).all())


def _trains(frames: Iterable[FrameType]) -> bool:
    """Whether the module that looks up is in training mode."""
    owners = (one.f_locals.get("self") for one in frames)
    return next((one.training for one in owners if isinstance(one, nn.Module)), False)


def _counted(ids: Tensor, frames: Iterable[FrameType]) -> Tensor:
    """Places that a mask of the same shape, of a function that is running, does not hide."""
    counted = torch.ones_like(ids, dtype=torch.bool)
    for frame in frames:
        for name, value in frame.f_locals.items():
            if "mask" in name and type(value) is Tensor and value.shape == ids.shape and value.device == ids.device:
                counted &= value != 0
    return counted


def _at_the_ends(new: Tensor) -> bool:
    """Whether what is new stands before or behind all else in each row."""
    rows = new.reshape(-1, new.shape[-1]) if new.dim() else new.reshape(1, 1)
    turns = (rows[:, 1:] != rows[:, :-1]).sum(1)
    return bool((turns <= 1).all())


# --- batches ---


def _skips(frames: list[FrameType]) -> Iterator[tuple[str, str, int]]:
    """Loops over passes, around the line that runs, that read a loader whose first batches are left out each time."""
    loaders: dict[int, int] = {}
    for frame in (one for one in frames if not is_of_library(one)):
        inside = [one for one in _loops_around(frame) if isinstance(one, ast.For | ast.AsyncFor)]
        for loop in inside:
            for name in _names(loop.iter):
                if skipped := _skipped(known(frame, name)):
                    loaders.setdefault(id(known(frame, name)), skipped)
        for passes in _loops_around(frame) if loaders else []:
            for name, line in _read_in(passes, frame.f_lineno):
                value = known(frame, name)
                if id(value) in loaders and _goes_on(frame, passes) and not _is_given(passes, ast.unparse(name)):
                    place = line_of_program([frame]).partition(":")[0]
                    yield f"{place}:{line}", ast.unparse(name), loaders[id(value)]
                    return


def _loops_around(frame: FrameType) -> list[ast.For | ast.AsyncFor | ast.While]:
    """The loops around the line that a frame runs, of its own function, the innermost first."""
    code, line = frame.f_code, frame.f_lineno
    every = nodes_of(parsed(code.co_filename), ast.For, ast.AsyncFor, ast.While)
    around = [one for one in every if code.co_firstlineno <= one.lineno <= line <= (one.end_lineno or 0)]
    return sorted(around, key=lambda one: -one.lineno)


def _names(node: ast.expr) -> Iterator[ast.expr]:
    """Names and attributes that an iterable is made of: ``loader``, and that in ``enumerate(loader)``."""
    if isinstance(node, ast.Name | ast.Attribute):
        yield node
    for one in node.args if isinstance(node, ast.Call) else ():
        yield from _names(one)


def _read_in(passes: ast.stmt, line: int) -> Iterator[tuple[ast.expr, int]]:
    """What the statement of a loop's body that runs now reads, or gives away to be read, where nothing asks before."""
    now = (one for one in getattr(passes, "body", ()) if one.lineno <= line <= (one.end_lineno or 0))
    for node in now:
        if isinstance(node, ast.For | ast.AsyncFor):
            yield from ((one, node.lineno) for one in _names(node.iter))
        elif isinstance(node, ast.With | ast.AsyncWith):
            yield from _read_in(node, line)
        elif isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return):
            calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
            given = [arg for one in calls for arg in (*one.args, *(key.value for key in one.keywords))]
            yield from ((one, node.lineno) for one in given if isinstance(one, ast.Name | ast.Attribute))


def _goes_on(frame: FrameType, passes: ast.stmt) -> bool:
    """Whether another pass may come behind this one."""
    if isinstance(getattr(passes, "body", [None])[-1], ast.Break | ast.Return):
        return False
    over = passes.iter if isinstance(passes, ast.For) else None
    if not (isinstance(over, ast.Call) and ast.unparse(over.func) == "range"):
        return True
    values: list[Any] = [one.value if isinstance(one, ast.Constant) else known(frame, one) for one in over.args]
    ends = [one for one in values if isinstance(one, int)]
    return len(ends) < len(values) or len(range(*ends)) > 1


def _is_given(passes: ast.stmt, name: str) -> bool:
    """Whether the loop gives a name another value, or something of it; but for the skipping itself."""
    skips = [one for one in ast.walk(passes) if isinstance(one, ast.Assign) and "skip_first" in ast.unparse(one.value)]
    own = {id(target) for one in skips for target in one.targets}
    stored = [one for one in ast.walk(passes) if isinstance(getattr(one, "ctx", None), ast.Store | ast.Del)]
    texts = [ast.unparse(one) for one in stored if id(one) not in own]
    return any(one == name or one.startswith((f"{name}.", f"{name}[")) for one in texts)


def _skipped(loader: Any, depth: int = 4) -> int:
    """Batches that a loader of accelerate's leaves out at the begin of each pass."""
    if loader is None or isinstance(loader, Tensor | nn.Module) or not depth:
        return 0
    held = getattr(loader, "__dict__", {})
    count = held.get("skip_batches", 0) if type(loader).__module__.startswith("accelerate.") else 0
    inside = (held.get(name) for name in ("base_dataloader", "batch_sampler", "sampler"))
    return count if isinstance(count, int) and count > 0 else max(_skipped(one, depth - 1) for one in inside)
