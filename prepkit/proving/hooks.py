"""What a recorder hangs into a program and reads off it: gradients of outputs, clipping, lines, options, digests."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from prepkit.facts.proof import ClipProof
from prepkit.objects import names
from prepkit.objects.fsdp1_flat import flat_shards, holders
from prepkit.objects.local_part import local
from prepkit.observe.fingerprints.parts import Part, parts
from prepkit.proving import bare
from prepkit.proving.loss_graph import made_of, used_outside
from prepkit.proving.record_file import Disturbed, HeldPart, Micro, RecordedCall, Returned
from prepkit.rules.run.proof_causes import near

HOME = str(Path(__file__).parents[1])
"""The folder of prepkit's own frames."""
LIBRARIES = frozenset({"site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}"})
"""Folders of what a program has not written itself."""


def parameters(root: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    """Every parameter, or the flat one of FSDP1 that trains in its place."""
    return list(holders(root).items()) if root is not None else []


def shapes(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of every parameter as a whole."""
    whole = {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in parameters(root)}
    return whole | {name: tuple(shard.shape) for name, shard in flat_shards(root).items()}


def held_parts(
    root: nn.Module, held: Mapping[str, Part], shapes: Mapping[str, tuple[int, ...]], groups: Mapping[str, int]
) -> Iterator[HeldPart]:
    """Yield what a record says of each parameter; ``groups``: that of the optimizer that has stepped it."""
    trained = {name for name, param in parameters(root) if param.requires_grad}
    for name, part in held.items():
        yield HeldPart(
            name=name,
            shape=shapes[name],
            start=part.start,
            dims=part.dims,
            here=part.values.numel(),
            trained=name in trained,
            group=groups.get(name),
        )


Size = tuple[int, float, float]
"""Number, sum and norm of the elements that a rank holds, which tell whether anything has changed them meanwhile."""


def sizes(root: nn.Module | None) -> dict[str, Size]:
    """Of every parameter."""
    found: dict[str, Size] = {}
    for name, part in (parts(root, masters=True) if root is not None else {}).items():
        row = part.values.detach().reshape(-1)
        norm = float(torch.linalg.vector_norm(row, dtype=torch.float64))
        found[name] = (row.numel(), float(row.sum(dtype=torch.float64)), norm)
    return found


def same_size(one: Size, other: Size) -> bool:
    """Return whether two of them may be those of the same values, in whatever order they were added.

    Where the numbers of elements differ nobody can tell: FSDP2 leaves weights whole between two micro-batches.
    """
    return one[0] != other[0] or max(abs(a - b) for a, b in zip(one[1:], other[1:], strict=True)) <= 1e-9 * one[2]


def with_gradients(root: nn.Module | None) -> tuple[str, ...]:
    """Parameters that have a gradient, and not of zeros alone."""
    grads = {name: param.grad for name, param in parameters(root) if param.requires_grad}
    return tuple(name for name, one in grads.items() if one is not None and bool(local(one).to_dense().any()))


def with_closure(args: Sequence[Any], kwargs: Mapping[str, Any], then: Callable[[], None]) -> Any:
    """The arguments of a step, whose closure does ``then`` when it has made the gradients; None where it has none."""
    given = (*args, *kwargs.values())
    made = next((one for one in given if callable(one) and not isinstance(one, torch.optim.Optimizer)), None)
    if made is None:
        return None

    def closure() -> Any:
        result = made()
        then()
        return result

    def instead(one: Any) -> Any:
        return closure if one is made else one

    return tuple(map(instead, args)), {key: instead(one) for key, one in kwargs.items()}


@define(eq=False)
class Called:
    """One call of the root, and what came back to it."""

    inputs: str
    tensors: dict[str, Tensor]
    ends: tuple[Any, ...] = ()
    """Nodes of the graph at which its outputs begin."""
    arrived: dict[int, Tensor] = field(factory=dict)
    seen: dict[int, Tensor] = field(factory=dict)
    """A sketch of each output that is kept."""
    returned: list[Returned] = field(factory=list)
    buffers: dict[str, Tensor] = field(factory=dict)
    """Those that are not as they were at the first call of the window."""
    micro: int = -1
    entry: str = "forward"
    evaluating: tuple[str, ...] = ()
    own_total: bool = False
    """Whether the model was told to divide a sum by a number that the window gives it."""

    @classmethod
    def of(cls, root: nn.Module, inputs: str, tensors: dict[str, Tensor], **more: Any) -> Called:
        """A call that begins now."""
        return cls(inputs, tensors, entry=entry_of(root), evaluating=evaluating(root), **more)

    def held(self, at: int) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors by their keys in a record, where it is the call of this number."""
        of = (("input", self.tensors), ("output", self.arrived), ("seen", self.seen), ("before", self.buffers))
        for kind, tensors in of:
            yield from ((f"{kind}/{at}/{key}", tensor) for key, tensor in tensors.items())

    def recorded(self) -> RecordedCall:
        """As the file has it."""
        ends, kept = tuple(sorted(self.arrived)), digest(self.tensors)
        return RecordedCall(
            inputs=self.inputs,
            micro=self.micro,
            entry=self.entry,
            outputs=ends,
            digest=kept,
            returned=tuple(self.returned),
            evaluating=self.evaluating,
        )


CLIPS = {"_clip_grads_with_norm_": "clipped", "_get_total_norm": "measured", "clip_grad_value_": "clamped"}
"""Functions of torch's that clip, and what takes note of each."""


@define(eq=False)
class Clipping:
    """How the gradients of a model are clipped while a window is recorded."""

    clip: ClipProof | None
    """As a plan has it, or the last one that was seen; the norm that a plan allows stays."""
    value: float | None
    """To which each element is clipped, likewise."""
    at: list[int] = field(factory=list, init=False)
    """Micro-batches before each clipping that has shrunk something."""
    _asked: ClipProof | None = field(init=False)
    _power: float = field(default=2.0, init=False)
    _norms: dict[int, float | None] = field(factory=dict, init=False)
    """The norm by which each parameter was clipped last, which parts of one clipping have in common."""
    _mine: Callable[[], dict[int, nn.Parameter] | None] = field(init=False)
    _micros: Sized = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._asked = self.clip

    def places(
        self, mine: Callable[[], dict[int, nn.Parameter] | None], micros: Sized
    ) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Home and name of each function, and what is to be called in its place.

        ``mine``: the parameters that are meant, by identity; None: nothing is noted now.
        """
        self._mine, self._micros = mine, micros
        yield FullyShardedDataParallel, "clip_grad_norm_", self.clipped_fsdp1
        clips = {
            known: (vars(clip_grad)[name], getattr(self, how))
            for name, how in CLIPS.items()
            for known in (name, name.removeprefix("_"))  # also where it was imported by its public name
        }
        for home in list(sys.modules.values()):
            there: Mapping[str, Any] = getattr(home, "__dict__", {})
            for known in clips.keys() & there.keys():
                plain, instead = clips[known]
                if there[known] is plain:
                    yield home, known, instead

    def seen(self, micros: int) -> ClipProof | None:
        """The last clipping of a window with so many micro-batches."""
        return evolve(self.clip, early=any(at < micros for at in self.at)) if self.clip else None

    def clipped(self, plain: Callable[..., Any], params: Any, most: float, norm: Any, *args: Any, **kw: Any) -> Any:
        """Of gradients whose norm is known."""
        given = [params] if isinstance(params, Tensor) else list(params)
        mine = self._mine()
        others = [] if mine is None else [param for param in given if id(param) not in mine]
        if mine is not None and not given and self.clip is None and isfinite(most):
            self.clip = ClipProof(most=float(most), empty=True)
        if mine is not None and len(others) < len(given):  # else another model is clipped
            joint = None if isinstance(norm, DTensor) else float(norm)
            self._note(most, joint, beyond=bool(others))
            self._norms |= {id(param): joint for param in given}
            held = {key for key, one in mine.items() if one.requires_grad and one.grad is not None}
            alike = held <= self._norms.keys() and len({self._norms[key] for key in held}) < 2
            if self.clip is not None and not alike:
                self.clip = evolve(self.clip, parts=True)
        return plain(given, most, norm, *args, **kw)

    def measured(self, plain: Callable[..., Any], grads: Any, norm_type: float = 2.0, *args: Any, **kw: Any) -> Any:
        """A norm of gradients."""
        self._power = float(norm_type)
        return plain(grads, norm_type, *args, **kw)

    def clamped(self, plain: Callable[..., Any], params: Any, clip_value: float, *args: Any, **kw: Any) -> Any:
        """Each element by itself."""
        if self.value is None and self._mine() is not None:
            self.value = float(clip_value)
        return plain(params, clip_value, *args, **kw)

    def clipped_fsdp1(self, plain: Callable[..., Any], unit: Any, most: float, norm_type: float = 2.0) -> Any:
        """By FSDP1's own method, which knows the norm of all shards."""
        norm, self._power = plain(unit, most, norm_type), float(norm_type)
        if self._mine() is not None:
            self._note(most, float(norm), beyond=False)
        return norm

    def _note(self, most: float, norm: float | None, *, beyond: bool) -> None:
        if not isfinite(most):  # as the Trainer of transformers measures a norm
            return
        seen = norm if norm is None or isfinite(norm) else None
        allowed = float(most) if self._asked is None else self._asked.most
        self.clip = ClipProof(most=allowed, seen=seen, power=self._power, beyond=beyond)
        if seen is not None and seen > most:
            self.at.append(len(self._micros))


def evaluating(root: nn.Module) -> tuple[str, ...]:
    """Paths of the modules that are in evaluation."""
    return tuple(path for path, module in names.named_modules(root).items() if not module.training)


def _used(root: nn.Module | None, loss: Tensor, ends: set[int]) -> Iterator[str]:
    """Yield parameters that a loss uses itself, beside the outputs that begin at ``ends``."""
    known = {id(param): name for name, param in parameters(root)}
    yield from (known[id(leaf)] for leaf in used_outside(loss, ends) if id(leaf) in known)


def keep_changed(parts: Mapping[str, Part], tensors: dict[str, Tensor], keep: Callable[[str, Tensor], None]) -> None:
    """Keeps weights that something has changed since they were stepped; ``tensors`` are those of a record."""
    for name, part in parts.items():
        after = tensors.get(f"after/{name}")
        if after is not None and not torch.equal(after, part.values.detach().reshape(-1).cpu()):
            keep(f"later/{name}", part.values)


TRAINER = "transformers.Trainer"
COPIES = "an optimizer has stepped copies of the weights, which were put into the model behind it"


@define(eq=False)
class Around:
    """Listens to what a program does to a model beside forward, backward and step."""

    unproven: str = field(default="", init=False)
    averages: str = field(default="", init=False)
    """As in ``Disturbed``."""
    moved: tuple[str, ...] = field(default=(), init=False)
    swung: bool = field(default=False, init=False)
    outside: dict[str, None] = field(factory=dict, init=False)
    beside: dict[str, None] = field(factory=dict, init=False)
    """Lines that went backward over weights of the model, and over no output of it."""
    wrapper: str = field(default="", init=False)
    """The class of what wraps the model there."""
    kept: tuple[str, ...] = field(default=(), init=False)
    twice: bool = field(default=False, init=False)
    idle: int = field(default=0, init=False)
    """Steps over gradients that were cleared after the last backward, one after the other."""
    _cleared: int = field(default=0, init=False)
    _thrown: list[Micro] = field(factory=list, init=False)
    """Micro-batches that were cleared since anything has stepped, or has tried to."""
    _tried: bool = field(default=False, init=False)
    _going: int = field(default=0, init=False)
    """Backwards that run now, one inside the other."""
    _left: tuple[str, ...] = field(default=(), init=False)
    _began: dict[str, Size] = field(factory=dict, init=False)

    def forward(self, root: nn.Module, *, first: bool) -> None:
        """Before a forward of the window."""
        if first:
            self._began = sizes(root)
        elif self.changed(root):
            self.swung = True

    def backward(self, root: nn.Module | None, loss: Tensor, ends: set[int], *, first: bool) -> None:
        """Before a backward; ``ends``: identities of nodes at which the model's own outputs begin."""
        self._left = with_gradients(root) if first and not self.beside else self._left
        self.outside |= dict.fromkeys(_used(root, loss, ends))

    def again(self, root: nn.Module | None, loss: Tensor, calls: Collection[Called]) -> bool:
        """Before a backward over no new call: whether it goes over outputs of earlier ones, whose gradients add up."""
        ends = {id(end) for call in calls for end in call.ends}
        if not made_of(loss, ends):
            return False
        self.outside |= dict.fromkeys(_used(root, loss, ends))
        return True

    def past(self, root: nn.Module | None, loss: Tensor, ends: set[int], *, first: bool) -> None:
        """Before, or behind, a backward that no output of the model takes part in; ``first``: of all."""
        if root is not None and next(_used(root, loss, ends), None) is not None:
            self._left = with_gradients(root) if first and not self.beside else self._left
            self.beside |= dict.fromkeys(line_of("backward"))
            self.wrapper = type(root).__name__ if root is not names.unwrap_root(root)[-1] else ""

    def changed(self, root: nn.Module | None) -> tuple[str, ...]:
        """Parameters that are not as they were at the first forward."""
        now = sizes(root)
        return tuple(name for name, one in self._began.items() if name in now and not same_size(one, now[name]))

    def goes(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A backward, which ``torch.autograd.grad`` is none of: what that asks for is not what trains."""
        self._going += 1
        try:
            return plain(*args, **kwargs)
        finally:
            self._going -= 1

    def adding(self, arrived: dict[int, Tensor], place: int) -> Callable[[Tensor], None]:
        """A hook that keeps the gradient of an output; one that arrives again adds up."""

        def hook(grad: Tensor | None) -> None:
            if grad is None or not self._going:  # DDP gives none to outputs that no loss has used
                return
            kept = local(grad).detach().cpu().clone()
            arrived[place] = arrived[place] + kept if place in arrived else kept

        return hook

    def cleared(self, micros: list[Micro]) -> None:
        """The gradients of these micro-batches were cleared."""
        self._thrown += [] if self._tried else micros
        self._cleared += 0 if self._tried else len(micros)
        self._tried, self.unproven = False, ""

    def tried(self) -> None:
        """Something else has stepped, or a scaler has refused to: what is cleared behind it is cleared on purpose."""
        self._thrown.clear()
        self._tried = True

    def wasted(self, kept: tuple[Micro, ...], scale: float, known: int | None) -> int:
        """Return how many of the cleared micro-batches belong to the step over those that are kept.

        A loop that skips a batch, or measures before it trains, clears on purpose. An accumulation clears too early
        where all went backward in the same line, and a plan or accelerate knows of so many (``known``), or each loss
        is divided by their number, from three on.
        """
        lines = {one.line for one in kept}
        same = [one for one in self._thrown if {one.line} == lines and one.line]
        number = len(same) + len(kept)
        divided = number > 2 and all(near(abs(one.factor) * number, scale) for one in (*same, *kept))
        return len(same) if divided or number == known else 0

    def stepped_nothing(self, root: nn.Module) -> bool:
        """An optimizer steps, and nothing went backward: whether it is the second time that it was cleared before."""
        self.idle = self.idle + 1 if self._thrown and not with_gradients(root) else 0
        self._thrown.clear()
        return self.idle > 1

    def told(
        self, root: nn.Module, kept: tuple[Micro, ...], scale: float, known: int | None, *, copies: bool
    ) -> Disturbed:
        """All of it. ``copies``: whether it has to be asked if weights came from somewhere else."""
        why = self.unproven or (COPIES if copies and self.changed(root) else "")
        return Disturbed(
            unproven=why,
            moved=self.moved,
            swung=self.swung,
            left=self._left,
            outside=tuple(self.outside),
            beside=tuple(self.beside),
            wrapper=self.wrapper,
            kept=self.kept,
            twice=self.twice,
            cleared=self._cleared,
            wasted=self.wasted(kept, scale, known),
            idle=self.idle > 1,
            averages=self.averages,
        )


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values."""
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def other_buffers(root: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers that are not as the first call of the window found them, by their paths."""
    for path, buffer in bare.named_buffers(root):
        now, first = local(buffer).detach().cpu(), tensors.get(f"buffer/{path}")
        if first is None or not alike(now, first):
            yield path, now.clone()


def line_of(what: str) -> Iterator[str]:
    """The line of the program, outside of installed packages and of prepkit, that has led here."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((HOME, "<")) or LIBRARIES.intersection(Path(file).parts)):
            yield f"{what} at {Path(file).name}:{frame.f_lineno}"
            return
        frame = frame.f_back  # type: ignore[assignment]  # the last one has none


def engine_of(root: nn.Module | None) -> Any:
    """DeepSpeed's engine, at the root or in it."""
    found = (
        one for one in (root.modules() if root is not None else ()) if "DeepSpeedEngine" in names.known_bases(type(one))
    )
    return next(found, None)


def clip_of(engine: Any) -> ClipProof:
    """Return how DeepSpeed clips, which it does by itself."""
    norm = getattr(engine.optimizer, "_global_grad_norm", None)
    return ClipProof(most=float(engine.gradient_clipping()), seen=float(norm) if norm and isfinite(norm) else None)


def entry_of(root: nn.Module) -> str:
    """The method that a call of the wrapper leads to: Lightning puts ``training_step`` in the place of ``forward``."""
    inner = names.unwrap_root(root)[-1]
    instead = vars(inner).get("forward")
    closure = inspect.getclosurevars(instead).nonlocals if inspect.isfunction(instead) else {}
    said = [one for one in closure.values() if isinstance(one, str) and callable(getattr(inner, one, None))]
    return said[0] if said else "forward"


def digest(tensors: dict[str, Tensor]) -> str:
    """Of keys, kinds and bytes of everything that a call was given; of a generator nothing."""
    found = hashlib.sha256()
    for key, one in sorted(tensors.items()):
        if key != "rng":
            found.update(repr((key, one.dtype, tuple(one.shape))).encode())
            found.update(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def said_accumulation() -> int | None:
    """Micro-batches of a step as accelerate was told; None: it was not, or is not there."""
    state = sys.modules.get("accelerate.state")
    shared = getattr(getattr(state, "GradientState", None), "_shared_state", {})
    return _several(shared.get("plugin_kwargs", {}).get("num_steps"))


def trainer_accumulation() -> int | None:
    """The same of the Trainer of transformers whose code steps now; it divides by itself, and tells accelerate 1."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if any(f"{one.__module__.partition('.')[0]}.{one.__name__}" == TRAINER for one in type(owner).__mro__):
            return _several(getattr(getattr(owner, "args", None), "gradient_accumulation_steps", None))
        frame = frame.f_back  # type: ignore[assignment]  # the last one has none
    return None


def known_accumulation(trainer: int | None, engine: Any, micros: Collection[Micro]) -> int | None:
    """Micro-batches of a step as accelerate, a Trainer or DeepSpeed has been told; None: nobody was.

    Where backwards stand in several lines, a micro-batch may have several of them: an engine's number counts none.
    """
    if (said := said_accumulation()) is not None:
        return said
    steps = trainer if engine is None else trainer or _several(engine.gradient_accumulation_steps())
    return steps if len({one.line for one in micros}) < 2 else None


def _several(steps: Any) -> int | None:
    return steps if isinstance(steps, int) and steps > 1 else None
