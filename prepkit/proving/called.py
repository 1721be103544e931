"""A call of the model while a window is recorded, and what is noted of the loss that is made of it."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from prepkit.objects import names
from prepkit.objects.local_part import local, whole
from prepkit.proving import draws, tree
from prepkit.proving.collectives import AnswersInCall, own_count
from prepkit.proving.hooks import evaluating, in_place_of, line_of
from prepkit.proving.loss_graph import Factor, edges_outside, factor_of, made_of, operators_of
from prepkit.proving.outputs import RETURNED, is_compared, returned
from prepkit.proving.parts_of import numbers, parameters
from prepkit.proving.record_file import Micro, RecordedCall, Returned
from prepkit.proving.trace import sketch
from prepkit.ranks.world import world

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")
"""In the arguments of a call."""
Adding = Callable[[dict[int, Tensor], int], Callable[[Tensor | None], None]]
"""Makes the hook that keeps the gradient of an output, by its place."""


@define(eq=False)
class Called:
    """One call of the root, and what came back to it."""

    inputs: str
    tensors: dict[str, Tensor]
    ends: tuple[Any, ...] = ()
    """Nodes of the graph at which its outputs begin."""
    leaves: dict[int, Tensor] = field(factory=dict)
    """Outputs that are leaves, as a weight that the model returns: what it uses of it itself comes back to it too."""
    arrived: dict[int, Tensor] = field(factory=dict)
    seen: dict[int, Tensor] = field(factory=dict)
    """A sketch of each output that is kept."""
    returned: list[Returned] = field(factory=list)
    buffers: dict[str, Tensor] = field(factory=dict)
    """Those that are not as they were at the first call of the window."""
    draws: dict[str, Tensor] = field(factory=dict)
    """Where generators beside torch's own stood when it began."""
    back: dict[str, Tensor] = field(factory=dict)
    """A sketch of what came back to a leaf that it was given, as a stage of a pipeline is, by its key."""
    micro: int = -1
    entry: str = "forward"
    evaluating: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    """Parameters that trained nothing in it."""
    own_total: bool = False
    """Whether the model was told to divide a sum by a number that the window gives it."""
    asked: AnswersInCall = field(factory=AnswersInCall)
    """What its own collectives gave."""

    @classmethod
    def of(cls, root: nn.Module, args: Any, kwargs: Any, tell: Callable[[str], None]) -> Called:
        """A call that begins now; ``tell`` hears why its inputs cannot be kept."""
        tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
        back: dict[str, Tensor] = {}

        def keep(tensor: Tensor) -> str:
            key = f"{len(tensors)}"
            tensors[key] = local(tensor).detach().cpu().clone().resolve_conj()
            if tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, nn.Parameter):
                tensor.register_hook(partial(_came_back, back, key))  # type: ignore[no-untyped-call]
            return key

        try:
            inputs = json.dumps(tree.written([args, kwargs], keep))
        except tree.NotPlain as error:
            tell(f"{error}, which a record does not hold: nothing was replayed")
            inputs = ""
        own = "num_items_in_batch" in kwargs
        still = tuple(name for name, param in parameters(root) if not param.requires_grad)
        stood = draws.states(root)
        return cls(
            inputs,
            tensors,
            back=back,
            draws=stood,
            entry=entry_of(root),
            evaluating=evaluating(root),
            own_total=own,
            frozen=still,
        )

    def ended(self, output: Any, adding: Adding) -> None:
        """Takes what came of it; ``adding`` makes the hook that keeps the gradient of an output."""
        self.asked.ended()
        found = list(tree.tensors_of(output))
        self.ends = tuple(tensor.grad_fn for tensor in found if tensor.grad_fn is not None)
        for place, tensor in enumerate(found):
            if place < RETURNED and is_compared(tensor):
                self.seen[place] = sketch(numbers(whole(tensor)))
                self.returned.append(returned(place, tensor))
            if not tensor.requires_grad or any(tensor is earlier for earlier in found[:place]):
                continue
            if tensor.is_leaf:
                self.leaves[place] = tensor
            else:
                tensor.register_hook(adding(self.arrived, place))  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes of what it was given, of buffers and of generators."""
        held = (*self.tensors.values(), *self.buffers.values(), *self.draws.values())
        return sum(one.nbytes for one in held) + self.asked.nbytes

    def held(self, at: int) -> Iterator[tuple[str, Tensor]]:
        """Yield its tensors by their keys in a record, where it is the call of this number."""
        yield from ((f"asked/{at}/{key}", one) for key, one in self.asked.held())
        of = (("input", self.tensors), ("output", self.arrived), ("seen", self.seen))
        for kind, tensors in (*of, ("back", self.back), ("before", self.buffers), ("draw", self.draws)):
            yield from ((f"{kind}/{at}/{key}", tensor) for key, tensor in tensors.items())

    def recorded(self, trains: Collection[str]) -> RecordedCall:
        """As the file has it; ``trains``: parameters that the window trains."""
        ends, kept = tuple(sorted(self.arrived)), digest(self.tensors)
        return RecordedCall(
            inputs=self.inputs,
            micro=self.micro,
            entry=self.entry,
            outputs=ends,
            digest=kept,
            returned=tuple(self.returned),
            evaluating=self.evaluating,
            frozen=tuple(name for name in self.frozen if name in trains),
            apart=len(set(self.ends)) == 1,
            asked=self.asked.recorded(),
        )


def _came_back(back: dict[str, Tensor], key: str, grad: Tensor) -> None:
    """A hook of a tensor."""
    back[key] = sketch(numbers(local(grad)))


def ends_of(calls: Iterable[Called]) -> set[int]:
    """Identities of the nodes at which outputs of these calls begin."""
    return {id(end) for call in calls for end in call.ends}


def leaves_of(calls: Iterable[Called]) -> set[int]:
    """Identities of the outputs of these calls that are leaves."""
    return {id(leaf) for call in calls for leaf in call.leaves.values()}


@contextmanager
def leaves_listened(loss: Tensor, calls: Sequence[Called], adding: Adding) -> Iterator[None]:
    """Inside, what comes to leaves that calls have returned is kept, as far as the loss itself brings it there.

    Of several calls that have returned one leaf, it is kept with the last that has a part in the loss.
    """
    used = [call for call in calls if made_of(loss, ends_of([call]))] or calls
    hooks = {id(leaf): adding(call.arrived, place) for call in used for place, leaf in call.leaves.items()}
    with ExitStack() as stack:
        for node, leaf, at in edges_outside(loss, ends_of(calls)) if hooks else ():
            if (keep := hooks.get(id(leaf))) is not None:
                stack.callback(node.register_hook(partial(_kept, keep, at)).remove)
        yield


def _kept(keep: Callable[[Tensor | None], None], at: int, inputs: tuple[Tensor | None, ...], _: Any) -> None:
    """A hook of a node, whose gradient by one of its inputs is kept."""
    keep(inputs[at])


def added_up(terms: Sequence[tuple[Any, float]], calls: Sequence[Called]) -> int:
    """Of how many losses of one kind a loss is the sum, each of a call over other samples; 1: nobody can tell."""
    used = [call for call in calls if call.ends]
    shapes = {(call.inputs, *(one.shape for key, one in call.tensors.items() if key != "rng")) for call in used}
    others = {digest(call.tensors) for call in used}
    alike = len({one.name() for one, _ in terms}) == len(shapes) == 1 and all(by == 1 for _, by in terms)
    return len(terms) if alike and len(terms) == len(used) == len(others) else 1


def micro_of(
    loss: Tensor, seed: float | None, ends: Collection[int], calls: Sequence[Called], tokens: float | None
) -> Micro:
    """What is noted of a loss that is about to go backward; ``tokens``: over how many it is a mean.

    ``seed`` None: it is an output, which is given its gradient.
    """
    line, operators = next(line_of("backward"), ""), operators_of(loss, ends)
    if seed is None:
        return Micro(
            loss=0.0, factor=1.0, given=True, total=tokens is None, tokens=tokens, line=line, operators=operators
        )
    factor, each = factor_of(loss, ends), loss.numel() > 1
    value = float(loss.detach().sum())
    if not isfinite(value) and tokens == 0:  # a mean over nothing, which counts as nothing
        value = 0.0
    return Micro(
        loss=value / factor.value if factor.value else value,
        factor=factor.value * seed,
        total=(each or factor.total or any(call.own_total for call in calls)) and tokens is None,
        tokens=tokens,
        count=float(loss.numel()) if each else factor.count or _own_count(factor, calls),
        summed=factor.summed,
        divisors=tuple(by for by, _ in factor.divisors),
        meant=(*factor.meant, *([float(world().size)] if any(call.asked.mixes for call in calls) else [])),
        added=added_up(factor.terms, calls),
        line=line,
        operators=operators,
    )


def _own_count(factor: Factor, calls: Sequence[Called]) -> float | None:
    """Of the samples in a loss, as the model's own collectives tell."""
    given = {float(one) for call in calls for one in call.tensors.values() if one.numel() == 1 and not one.is_complex()}
    given |= {float(one) for call in calls for one in NUMBER.findall(call.inputs)}
    return own_count(factor, [call.asked for call in calls], given)


def place_in(known: list[Any], one: Any) -> int:
    """Its place among those that are known, to which it is added."""
    if one not in known:
        known.append(one)
    return known.index(one)


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


def by_each(first: Any, places: Collection[tuple[Any, str, str]]) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What stands for functions while a family records: each hears them that is of it when they are called.

    A model that is first called in the arguments of a backward is of it by then, and what stands there was looked up.
    """

    def heard_by(name: str) -> Callable[..., Any]:
        def calls(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            for one in [*first.family]:
                plain = partial(in_place_of(getattr(one, name), one.fails), plain)
            return plain(*args, **kwargs)

        return calls

    return [(home, place, heard_by(name)) for home, place, name in places] if first is first.family[0] else []


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
        if "transformers.Trainer" in {
            f"{one.__module__.partition('.')[0]}.{one.__name__}" for one in type(owner).__mro__
        }:
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
