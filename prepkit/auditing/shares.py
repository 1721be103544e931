"""How a loop shares its work over micro-batches, ranks and steps: divisors, gathered outputs, waits and totals."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d
from torch.nn.functional import normalize
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.facts.loops import ShareFacts
from prepkit.objects.local_part import local
from prepkit.observe.prepared.around import (
    called_by_program,
    frames_above,
    innermost,
    is_of_library,
    line_of_program,
    name_of,
    nodes_of,
    parsed,
    texts_of_program,
)
from prepkit.observe.prepared.instead import around_calls

GATHERS = ("all_gather", "all_gather_into_tensor")
REDUCES = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
WAITS = ("wait", "is_completed", "get_future", "synchronize")
CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_gradients")
COUNTS = ("gradient_accumulation_steps", "accumulate_grad_batches")
"""Where a library keeps by how much it divides a loss."""
SAVED = ("_saved_mat2", "_saved_self", "_saved_other", "_saved_tensors", "_saved_batch2", "_saved_tensor1")
"""Where a node of a graph keeps what it was given."""
SUMS = ("Sum", "Add", "Stack", "Cat", "Sub")
"""What a mean that is taken by hand divides, as well as a micro-batch's loss."""
MOST_PARTS = 8
"""Gathered parts that are remembered."""
EQUAL = 1e-5
MOST_NUMBERS = 1 << 20
"""Of those of one part."""
SAMPLE = 64
"""Numbers of a gathered tensor that are compared."""
MOST_NODES = 400
"""Nodes of a graph that are looked at."""
NEAREST = 64
"""Those in which the loss of an earlier step is looked for."""
LIBRARIES = ("accelerate", "lightning", "lightning_utilities", "pytorch_lightning", "transformers", "deepspeed")
AGO = 3
"""Steps after which no loop uses the graph of a loss that went backward."""
KEEPS = 6
"""So many steps whose graphs are alive say that somebody keeps them."""
MOST_NORM = 1e3
"""Who clips by more wants to know the norm."""
OF_TORCH = ("torch", "prepkit")
MARK = "prepkit"


class _Mark:
    """Lies at the node of a loss, and lives as long as its graph does."""


@frozen(eq=False)
class _Gathered:
    """What an ``all_gather`` of outputs has given, by some of its numbers."""

    line: str
    ranks: int
    numel: int
    places: Tensor
    numbers: Tensor


@frozen(eq=False)
class _Begun:
    """A collective that was begun, and not waited for."""

    line: str
    name: str
    work: weakref.ref[Any]
    place: tuple[int, int]
    """Where the storage is of what it writes."""


@define(eq=False)
class _Cut:
    """A clip that has made gradients smaller."""

    line: str
    param: weakref.ref[Tensor]
    """One of what was clipped."""
    left: Tensor
    """Some numbers of its gradient behind the clip."""
    grows: bool = False
    """Whether something goes backward while that gradient is still there."""

    def goes_backward(self) -> None:
        one = self.param()
        self.grows = one is not None and one.grad is not None and torch.equal(_some(one), self.left)


def _some(param: Tensor) -> Tensor:
    """The first numbers of this rank's part of a gradient."""
    grad = param.grad
    if grad is None or grad.layout is not torch.strided:
        return torch.empty(0)
    return local(grad).detach().reshape(-1)[:SAMPLE].clone()


@define(eq=False)
class SharedWork:
    """Listens inside ``on()``."""

    _twice: tuple[str, str, int] = ("", "", 0)
    _clipped: bool = True
    """Whether something was clipped since the last backward, or there was none."""
    _cut: _Cut | None = None
    """The last clip since a step."""
    _between: dict[str, None] = field(factory=dict)
    _hooked: bool = False
    """Whether graphs may keep something else than what they were given, as checkpoints do, which compute anew."""
    _gathers: list[_Gathered] = field(factory=list)
    """Since the last backward."""
    _parts: list[Tensor] = field(factory=list)
    """What this rank has last given to be gathered, a row for each sample."""
    _misplaced: dict[tuple[str, int, int], None] = field(factory=dict)
    _apart: dict[tuple[str, int], None] = field(factory=dict)
    _begun: list[_Begun] = field(factory=list)
    _marks: list[tuple[int, weakref.ref[_Mark]]] = field(factory=list)
    """Of each backward behind how many steps it ran."""
    _turns: weakref.WeakKeyDictionary[Any, int] = field(factory=weakref.WeakKeyDictionary)
    """Steps that each optimizer has begun."""
    _grads: frozenset[tuple[int, int]] = frozenset()
    """Where the storages are of the gradients that are stepped now."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(torch.autograd, "backward", self._backward))
            for name in GATHERS:
                stack.enter_context(around_calls(distributed_c10d, name, self._gathered, also=dist))
            stack.enter_context(around_calls(torch.nn.functional, "cross_entropy", self._compares))
            for name in REDUCES:
                stack.enter_context(around_calls(distributed_c10d, name, partial(self._reduces, name), also=dist))
            stack.enter_context(around_calls(torch.autograd.graph.saved_tensors_hooks, "__enter__", self._hooks))
            for name in WAITS:
                stack.enter_context(around_calls(Work, name, self._waits))
            stack.enter_context(around_calls(torch.cuda, "synchronize", self._waits_for_all))
            stack.callback(register_optimizer_step_pre_hook(self._begins).remove)
            yield

    def told(self) -> ShareFacts:
        """What was heard before the step that begins."""
        frames = list(frames_above(__file__))
        return ShareFacts(
            twice=self._twice,
            clipped_late=("", "") if self._clipped else _clips_behind(frames),
            clipped_between=tuple(self._between),
            gathered=tuple(self._apart),
            misplaced=tuple(self._misplaced),
            unwaited=tuple(self._unwaited()),
            kept=tuple(self._kept(frames)),
        )

    def _hooks(self, plain: Any, *given: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._hooked = True
        return plain(*given)

    @property
    def _steps(self) -> int:
        return max(self._turns.values(), default=0)

    def _begins(self, optimizer: Any, *_: Any) -> None:
        self._turns[optimizer] = self._turns.get(optimizer, 0) + 1
        self._cut = None
        held = [param for group in optimizer.param_groups for param in group["params"]] if self._begun else []
        self._grads = frozenset(_begins(param.grad) for param in held if param.grad is not None)

    def clips(self, params: Iterable[Tensor], plain: Callable[[], Any]) -> Any:
        """Hears of gradients that ``plain`` clips."""
        first = next((one for one in islice(params, MOST_PARTS) if bool(_some(one).any())), None)
        before = None if first is None else _some(first)
        result = plain()
        line, last = line_of_program(frames_above(__file__)), self._cut
        if first is None or before is None:
            return result
        if last is not None and last.line == line and last.param() is first and last.grows:
            self._between |= {} if torch.equal(last.left, before) else {line: None}
        left = _some(first)
        self._cut = None if torch.equal(before, left) else _Cut(line, weakref.ref(first), left)
        self._clipped = True
        return result

    def _backward(self, plain: Any, tensors: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
            self._clipped, self._begun = False, []
            if self._cut is not None:
                self._cut.goes_backward()
            loss = tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors
            if isinstance(loss, Tensor) and loss.grad_fn is not None:
                frames = list(frames_above(__file__))
                self._twice = _divided_twice(loss.grad_fn, frames) if not self._twice[2] else self._twice
                self._looks_for_gathered(loss.grad_fn)
                kept: Any = loss.grad_fn.metadata
                mark = kept.setdefault(MARK, _Mark())
                self._marks.append((self._steps, weakref.ref(mark)))
            self._gathers = []
        return plain(tensors, *given, **named)

    def _gathered(self, plain: Any, *given: Any, **named: Any) -> Any:
        result = plain(*given, **named)
        into = given[0] if given else next(iter(named.values()))
        part: Any = given[1] if len(given) > 1 else named.get("tensor", named.get("input_tensor"))
        inside = torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1
        if result is None and not inside and _is_plain(part):
            if part.dim() > 1 and part.numel() <= MOST_NUMBERS:
                self._parts = [*self._parts, part.detach().flatten(1).clone()][-MOST_PARTS:]
            if torch.is_grad_enabled() or part.grad_fn is not None:  # as where a library gathers
                self._takes_down(into, part)
        return result

    def _compares(self, plain: Any, *given: Any, **named: Any) -> Any:
        if self._parts and not torch.compiler.is_compiling():
            outputs: Any = given[0] if given else named.get("input")
            targets: Any = given[1] if len(given) > 1 else named.get("target")
            if type(outputs) is Tensor and outputs.grad_fn is not None and outputs.dim() == 2:
                for told, own in _columns(outputs, targets, self._parts):
                    self._misplaced[line_of_program(frames_above(__file__)), told, own] = None
        return plain(*given, **named)

    def _takes_down(self, into: Any, part: Tensor) -> None:
        frames = list(frames_above(__file__))
        while frames and is_of_library(frames[0]) and _home(frames[0]) in (*OF_TORCH, *LIBRARIES):
            frames.pop(0)
        if not (frames and called_by_program(frames) and _has_graph(part, frames)):
            return
        parts = [one.detach() for one in into] if isinstance(into, list) else [into.detach()]
        ranks = sum(one.numel() for one in parts) // part.numel()
        whole = parts[0].flatten() if len(parts) == 1 else None
        places = torch.linspace(0, ranks * part.numel() - 1, SAMPLE, dtype=torch.float64).long()
        with torch.no_grad():
            if whole is not None:
                numbers = whole[places.to(whole.device)]
            else:
                rows = [(int(one) // part.numel(), int(one) % part.numel()) for one in places]
                numbers = torch.stack([parts[row].flatten()[at] for row, at in rows])
        if ranks > 1 and float(numbers.float().abs().sum()):
            self._gathers.append(_Gathered(line_of_program(frames), ranks, ranks * part.numel(), places, numbers))

    def _looks_for_gathered(self, node: Any) -> None:
        for one in _saved(node) if self._gathers and not self._hooked else ():
            for gathered in self._gathers:
                if (gathered.line, gathered.ranks) not in self._apart and _holds(one, gathered):
                    self._apart[gathered.line, gathered.ranks] = None

    def _reduces(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        work = plain(*given, **named)
        if work is not None and not torch.compiler.is_compiling():
            frames = [one for one in frames_above(__file__) if _home(one) not in OF_TORCH]
            into = given[0] if given else next(iter(named.values()))
            if called_by_program(frames) and isinstance(into, Tensor):
                begun = _Begun(line_of_program(frames), name, weakref.ref(work), _begins(into))
                self._begun = [*self._begun, begun][-MOST_NODES:]
        return work

    def _waits(self, plain: Any, work: Any, *given: Any, **named: Any) -> Any:
        self._begun = [one for one in self._begun if one.work() is not work]
        return plain(work, *given, **named)

    def _waits_for_all(self, plain: Any, *given: Any, **named: Any) -> Any:
        self._begun = []
        return plain(*given, **named)

    def _unwaited(self) -> Iterator[tuple[str, str]]:
        """Those over gradients of the optimizer that is about to step."""
        yield from dict.fromkeys((one.line, one.name) for one in self._begun if one.place in self._grads)

    def _kept(self, frames: Iterable[FrameType]) -> Iterator[tuple[str, str, int]]:
        """Names that hold the graphs of losses which went backward at least so many steps ago."""
        old = {id(mark) for step, one in self._marks if step <= self._steps - AGO and (mark := one()) is not None}
        self._marks = [(step, one) for step, one in self._marks if one() is not None]
        if len(old) < KEEPS:
            return
        for frame in (one for one in frames if not is_of_library(one)):
            for name, value in [*frame.f_locals.items()]:
                found = {mark for node in _held_graphs(value) for mark in _marks_of(node)} & old
                if len(found) >= KEEPS:
                    yield name, line_of_program([frame]).partition(":")[0], len(found)


def _held_graphs(value: Any) -> list[Any]:
    """The graphs that a value of a program holds: that of a sum, or of each of a list that grows."""
    if type(value) is Tensor and value.grad_fn is not None:
        return [value.grad_fn]
    if type(value) is list:
        return [one.grad_fn for one in value[:NEAREST] if type(one) is Tensor and one.grad_fn is not None]
    if type(value) is dict and len(value) <= NEAREST:
        return [node for one in value.values() if not isinstance(one, dict) for node in _held_graphs(one)]
    return []


def _marks_of(node: Any) -> Iterator[int]:
    """Losses that went backward before, among the nearest nodes of a graph."""
    for one in _graph(node, NEAREST):
        if (mark := one.metadata.get(MARK)) is not None:
            yield id(mark)


def _graph(node: Any, most: int) -> Iterator[Any]:
    """The nodes of a graph, the nearest first."""
    waiting, known = [node], {node}
    while waiting and len(known) <= most:
        one = waiting.pop(0)
        yield one
        for below, _ in one.next_functions:
            if below is not None and below not in known:
                known.add(below)
                waiting.append(below)


def _divided_twice(node: Any, frames: list[FrameType]) -> tuple[str, str, int]:
    """The line, the library and the number where a library divides by its count what the program has divided by it."""
    if called_by_program(one for one in frames if _home(one) not in OF_TORCH):
        return "", "", 0
    counts = dict(_counts(frames))
    first, under = _divisor(node)
    if first not in counts:
        first, under = _divisor(under) if under is not None else (0, None)  # behind the scale of a scaler
    second, below = _divisor(under) if first in counts and under is not None else (0, None)
    if first < 2 or second != first:
        return "", "", 0
    by_hand = type(below).__name__.startswith(SUMS) and not _says_count(frames)
    return ("", "", 0) if by_hand else (line_of_program(frames), counts[first], first)


def _divisor(node: Any) -> tuple[int, Any]:
    """The whole number by which a node divides, and what it divides; 0: it does something else."""
    while type(node).__name__ == "ToCopyBackward0":
        node = node.next_functions[0][0]
    name = type(node).__name__
    other = getattr(node, "_saved_other", None) if name in ("DivBackward0", "MulBackward0") else None
    if not isinstance(other, Tensor) or other.numel() != 1 or not float(other):
        return 0, node
    by = float(other) if name == "DivBackward0" else 1 / float(other)
    below = next((one for one, _ in node.next_functions if one is not None), None)
    return (round(by), below) if abs(by - round(by)) < 1e-4 * by else (0, below)


def _counts(frames: list[FrameType]) -> Iterator[tuple[int, str]]:
    """By how much the libraries that go backward divide a loss."""
    for frame in frames:
        library = _home(frame)
        if library in LIBRARIES:
            owner = frame.f_locals.get("self")
            for one in (owner, *(getattr(owner, name, None) for name in ("trainer", "args"))):
                for name in COUNTS:
                    count = getattr(one, name, None)
                    count = count() if callable(count) else count
                    if isinstance(count, int) and count > 1:
                        yield count, library


def _says_count(frames: list[FrameType]) -> bool:
    """Whether the loop divides by the library's own count, or the name or attribute that the program gives for it."""
    frame = next((one for one in frames if not is_of_library(one)), None)
    if frame is None:
        return False
    calls = [one for file in texts_of_program() for one in nodes_of(parsed(file), ast.Call)]
    given = [key.value for one in calls for key in one.keywords if key.arg in (*COUNTS, "num_steps")]
    said = {ast.unparse(one) for one in given if not isinstance(one, ast.Constant)}
    begin, end = innermost(frame.f_code, frame.f_lineno)
    divided = nodes_of(parsed(frame.f_code.co_filename), ast.BinOp, ast.AugAssign)
    inside = [one for one in divided if begin <= one.lineno <= end and isinstance(one.op, ast.Div)]
    by = [ast.unparse(one.right if isinstance(one, ast.BinOp) else one.value) for one in inside]
    return any(one in said or one.rpartition(".")[2] in COUNTS for one in by)


def _clips_behind(frames: list[FrameType]) -> tuple[str, str]:
    """The line that clips behind the step of the innermost loop, where nothing goes backward or steps behind it."""
    frame = next((one for one in frames if not is_of_library(one)), None)
    if frame is None:
        return "", ""
    begin, end = innermost(frame.f_code, frame.f_lineno)
    calls = nodes_of(parsed(frame.f_code.co_filename), ast.Call)
    inside = [one for one in calls if begin and begin <= one.lineno <= end]
    later = (one for one in inside if one.lineno > frame.f_lineno)
    behind = [(one.lineno, name_of(one), one) for one in sorted(later, key=lambda one: one.lineno)]
    late = next(((line, call) for line, name, call in behind if name in CLIPS), None)
    if late is None or any(name in CLIPS and one.lineno <= frame.f_lineno for one in inside for name in [name_of(one)]):
        return "", ""
    between = [name for line, name, _ in behind if line != late[0] and name in ("backward", "manual_backward", "step")]
    between += [name for line, name, call in behind if name == "step" and line > late[0]]
    most = [one.value for one in ast.walk(late[1]) if isinstance(one, ast.Constant)]
    unbounded = any(isinstance(one, int | float) and one > MOST_NORM for one in most)
    if between or unbounded or "inf" in ast.unparse(late[1]):
        return "", ""
    place = line_of_program([frame])
    return f"{place.partition(':')[0]}:{late[0]}", place


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is Tensor and tensor.is_floating_point() and tensor.numel() > 1 and not tensor.is_meta


def _has_graph(part: Tensor, frames: list[FrameType]) -> bool:
    """Whether what is gathered has a graph, or is an output of the program's without it."""
    named = [one for frame in frames[:2] for one in frame.f_locals.values() if type(one) is Tensor]
    alike = (one for one in (part, *named) if one.shape == part.shape and one.grad_fn is not None)
    return any(one.data_ptr() == part.data_ptr() for one in alike)


def _saved(node: Any) -> Iterator[Tensor]:
    """What the nodes of a graph keep that has no graph itself."""
    return (held for one in _graph(node, MOST_NODES) for held in _kept_by(one) if not held.requires_grad)


def _kept_by(node: Any) -> Iterator[Tensor]:
    for name in SAVED:
        try:
            held = getattr(node, name, None)
        except RuntimeError:  # it was freed
            continue
        if type(held) is Tensor and held.is_floating_point():
            yield held


def _columns(outputs: Tensor, targets: Any, parts: list[Tensor]) -> Iterator[tuple[int, int]]:
    """The column at which targets begin and that at which the rank's own samples do, where these are not the same."""
    rows, columns = outputs.shape
    told = targets[0].item() if type(targets) is Tensor and targets.dim() == 1 and len(targets) == rows > 1 else None
    if not isinstance(told, int) or told % rows or columns % rows or columns == rows:
        return
    if not bool((targets == torch.arange(told, told + rows, device=targets.device)).all()):
        return
    parts = [part for part in parts if len(part) == rows and part.device == outputs.device]
    for held in (one for node in _graph(outputs.grad_fn, NEAREST) for one in _kept_by(node) if one.dim() == 2):
        for whole in (one for one in (held, held.mT) if len(one) == columns):
            own = [at for at in range(0, columns, rows) if any(_stands_in(whole[at : at + rows], one) for one in parts)]
            if own and told not in own:
                yield told, own[0]
                return


def _stands_in(block: Tensor, part: Tensor) -> bool:
    """Whether some columns of a part, one beside the other, are a block, or all are, but for the lengths of rows."""
    width = block.shape[1]
    if width == part.shape[1] > 1:
        return torch.allclose(normalize(part.float()), normalize(block.float()), atol=EQUAL)
    begins = (part[0] == block[0, 0]).nonzero().flatten().tolist() if width < part.shape[1] else []
    return any(torch.equal(part[:, at : at + width], block) for at in begins)


def _holds(tensor: Tensor, gathered: _Gathered) -> bool:
    """Whether the storage of a tensor holds what was gathered, the own part included."""
    if tensor.numel() != gathered.numel or tensor.dtype != gathered.numbers.dtype:
        return False
    flat = _in_storage(tensor)
    return flat is not None and bool((flat[gathered.places.to(flat.device)] == gathered.numbers.to(flat.device)).all())


def _in_storage(tensor: Tensor) -> Tensor | None:
    """As many numbers as it has, as they lie in its storage; None: there are fewer, as where it was expanded."""
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + tensor.numel()) * tensor.element_size():
        return None
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _begins(tensor: Tensor) -> tuple[int, int]:
    """Where the storage of a tensor begins, and how long it is."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _home(frame: FrameType) -> str:
    """The package of its code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
