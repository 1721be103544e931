"""Gradients beside the slopes of what all ranks lose, where a forward sends to other ranks what trains.

One process cannot do such a forward again. All ranks can: each calls its own model with its own inputs, over the same
collectives, while weights are moved a little, and says what its outputs change by along the gradients that had arrived
at them. How the program brings a gradient back from another rank has no part in that, so that it can be wrong. Nothing
is done backward.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from math import prod, sqrt
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prepkit.facts.proof import ProofFacts, Slope, as_written, own_clip
from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.reading import digest_of
from prepkit.proving import again
from prepkit.proving.apart import disturbed_of, loss_shares, shrunk
from prepkit.proving.draws import as_before
from prepkit.proving.outputs import Outputs, compared, from_outside
from prepkit.proving.parts_of import CannotReplay, numbers
from prepkit.proving.proof import Proof, found_in
from prepkit.proving.record_file import Record
from prepkit.proving.replay import MEMORY, Replay
from prepkit.proving.stepped import steps_of
from prepkit.proving.streamed import DETACHES, Streamed, default_dtype
from prepkit.ranks.world import world

STEP = 1e-5
"""By this part of its size a weight is moved."""
WAYS = 2
"""Directions in which a weight is moved that is wrong; all together are moved in one."""
SCALED_WAYS = 3
"""Those in which all are moved together, where the program may have scaled all gradients by one number."""
MARGIN = 8.0
"""How much further off than a step of twice the length a slope may be."""
SECONDS = 120.0
"""That all calls may take."""
ORDER = 1e-4
"""Part of a gradient up to which another order of a sum may change it."""
TURNED = 0.05
"""Part of a slope from which on what is beside it is another direction."""
TOO_LONG = f"its slopes were not measured within {SECONDS:.0f} s"


@frozen
class Moved:
    """What is moved at once: a parameter of one rank, or the replicas of one."""

    name: str
    rank: int | None = None
    """None: of all ranks, which hold it alike."""


@frozen(kw_only=True)
class _Held:
    """One parameter on one rank."""

    shape: tuple[int, ...]
    digest: str
    size: float
    """Root of the mean square of its elements."""
    gradient: float
    """Norm of the gradient that is stepped."""
    along: float
    """That gradient along one direction, which tells it from others of its norm."""
    constant: bool = False
    """Whether all of its elements are one number."""


class _Cuts(TorchFunctionMode):
    """Hears what a forward cuts off its graph, so that a slope is no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        del types
        if func in DETACHES and args[0].requires_grad and torch.is_grad_enabled():
            self.lines.setdefault(line_of_program(frames_above(__file__)))
        return func(*args, **(kwargs or {}))


@define(eq=False)
class _Window:
    """A rank's model, and where its weights have been moved to."""

    plain: nn.Module
    streamed: Streamed
    record: Record
    by: dict[str, Tensor] = field(factory=dict)
    """What is added to a weight."""
    factor: float = 0.0
    """By which that is multiplied."""
    cuts: _Cuts = field(factory=_Cuts)
    outputs: Outputs = field(factory=lambda: Outputs("float64"))
    seeds: dict[int, list[Tensor]] = field(factory=dict)
    """By call, what arrived at each of its outputs from outside of it."""

    def fetch(self, name: str) -> Tensor:
        """A weight, as far as it is moved."""
        whole = self.streamed.fetch(name)
        return whole + self.factor * self.by[name] if name in self.by else whole

    def lost(self, by: dict[str, Tensor] | None = None, factor: float = 0.0) -> float:
        """What all ranks lose on average, up to a constant. Collective."""
        self.by, self.factor = by or {}, factor
        weights = Streamed(self.streamed.params, self.fetch, self.streamed.limit, default=torch.get_default_dtype())
        each = world().parts(torch.tensor([self._mine(weights)], dtype=torch.float64))
        return float(torch.cat(each).sum()) / world().size

    def _mine(self, weights: Streamed) -> float:
        record, total = self.record, 0.0
        for number, call in enumerate(record.head.calls):
            again.begin(self.plain, weights.params, record, number)
            entered = self.plain if call.entry == "forward" else getattr(self.plain, call.entry)
            with ExitStack() as stack:
                for context in weights.on(lambda *_: None):
                    stack.enter_context(context)
                with self.cuts, default_dtype(torch.float64):  # buffers for what others send are made without one
                    outputs, _ = again.called(entered, weights.params, record, number)
                pairs = [*again.arrived(record, number, outputs)]
                if number not in self.seeds:
                    self.seeds[number] = _seeds(pairs, apart=call.apart)
            self.outputs.take(record.head.rank, number, outputs)
            for (end, _), seed in zip(pairs, self.seeds[number], strict=True):
                total += float(numbers(seed).double() @ numbers(end).double())
        return total / record.head.scale

    def begins(self) -> str:
        """Calls the model as it was; why it cannot be called so, if that is so. Collective."""
        try:
            self.lost()
        except CannotReplay as why:
            return str(why)
        except Exception as error:
            return f"it does not run in float64: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
        return ""


def _seeds(pairs: list[tuple[Tensor, Tensor]], *, apart: bool) -> list[Tensor]:
    """What came to outputs from outside: logits get a gradient of a loss that is returned beside them too."""
    at = [number for number, (end, _) in enumerate(pairs) if end.requires_grad]
    found = [torch.zeros_like(end) for end, _ in pairs]  # of an input that is returned
    ends, grads = [pairs[number][0] for number in at], [pairs[number][1].to(pairs[number][0].dtype) for number in at]
    for number, grad in zip(at, grads if apart else from_outside(ends, grads), strict=True):
        found[number] = grad.detach()
    return found


def by_slopes(proof: Proof, root: nn.Module, record: Record, late: tuple[int, ...] = ()) -> Proof:
    """The same proof, or that by slopes where one process could not do again what the forward sends. Collective.

    ``root`` and ``record``: this rank's; ``late``: as in ``replay.Replay``.
    """
    if not proof.facts.sends or not world().carries_data:
        return proof
    begun = time.perf_counter()
    try:
        with as_before():
            facts = _measured(Replay(model=root, records=(record,), limit=MEMORY, late=late), record)
    except CannotReplay as why:
        return found_in(evolve(proof.facts, unproven=f"{proof.facts.unproven}; {why}"))
    return evolve(found_in(facts), seconds=proof.seconds + time.perf_counter() - begun)


def _measured(replay: Replay, record: Record) -> ProofFacts:
    ranks, head = world(), record.head
    _agreed(_unfit(record))
    calls = ranks.gather(len(head.calls))
    _agreed("" if min(calls) == max(calls) else f"ranks have called it {min(calls)} to {max(calls)} times")
    plain, streamed = replay.streamed(torch.float64)
    window, held = _Window(plain, streamed, record), ranks.gather(dict(_held(record)))
    _agreed(window.begins())
    again_differs = compared((record,), (window.outputs, window.outputs), torch.finfo(getattr(torch, head.dtype)).eps)
    _agreed(again_differs.unrepeated and f"the forward does not repeat: {again_differs.unrepeated}")
    measures = _Measures(window, held, coarsest(ranks.gather(head.dtype)))
    every = tuple(moved(held))
    found = measures.apart(every)
    cuts = sorted({line for lines in ranks.gather([*window.cuts.lines]) for line in lines})
    if found and cuts:
        _agreed(f"the forward cuts a graph ({', '.join(cuts[:3])}), so that slopes are no gradients")
    steps, no_step = steps_of((record,), replay.weight)
    shares = tuple(share for each in ranks.gather(loss_shares((record,))) for share in each)
    return ProofFacts(
        world=ranks.size,
        shares=shares,
        steps=steps,
        dtype=head.dtype,
        scale=head.scale,
        accumulation=head.accumulation,
        clip=head.clip,
        lines=head.lines,
        uses=disturbed_of((record,)).uses,
        raw=disturbed_of((record,)).raw,
        wrapper=disturbed_of((record,)).wrapper,
        measured=len(every),
        slopes=tuple(found),
        limits=(*head.limits, *((no_step,) if no_step else ()), *map(own_clip, measures.clipped_to)),
    )


def coarsest(dtypes: Sequence[str]) -> float:
    """Of the coarsest one."""
    return max(torch.finfo(getattr(torch, one)).eps for one in dtypes)


def _agreed(why: str) -> None:
    """Raise ``CannotReplay`` on every rank where one has a reason. Collective."""
    every = world().gather(why)
    if said := next(filter(None, every), ""):
        raise CannotReplay(said)


def _unfit(record: Record) -> str:
    """Why nothing can be measured on this rank; empty: it can."""
    disturbed = disturbed_of((record,))
    if disturbed.unproven:
        return disturbed.unproven
    if disturbed.moved or disturbed.left or disturbed.swung or disturbed.faded or disturbed.idle:
        return "what is recorded does not explain its gradients"
    if record.head.value is not None:
        return "elements of its gradients are clipped"
    if world().wire(torch.device("cpu")).type != "cpu":
        return "its ranks reach each other by accelerators alone, and slopes are measured on the host"
    if any(one.here != prod(one.shape) for one in record.head.params):
        return "a rank holds parts of its weights"
    if not all(call.inputs for call in record.head.calls):
        return record.head.limits[0]
    clip = record.head.clip
    if clip is not None and not (clip.empty or clip.late) and (clip.seen is None or clip.parts):
        return "its gradients were clipped by a norm that nobody has shown"
    return ""


def _held(record: Record) -> Iterator[tuple[str, _Held]]:
    for one in record.head.params:
        if one.trained and one.group is not None:
            weight = record.tensors[f"weight/{one.name}"]
            row, grad = (numbers(of).double() for of in (weight, record.tensors.get(f"grad/{one.name}", weight * 0)))
            some = torch.randn(grad.shape, dtype=grad.dtype, generator=torch.Generator().manual_seed(0))
            yield (
                one.name,
                _Held(
                    shape=tuple(one.shape),
                    digest=digest_of(weight),
                    size=float(row.square().mean().sqrt()) if row.numel() else 0.0,
                    gradient=float(grad.norm()),
                    along=float(grad @ some),
                    constant=row.numel() > 0 and bool((row == row[0]).all()),
                ),
            )


def moved(held: Sequence[dict[str, _Held]]) -> Iterator[Moved]:
    """Yield what there is to move: what ranks hold alike together, and what is a rank's own by itself. Pure.

    What begins alike, as a bias of zeros, and has another gradient on each rank, is a rank's own where it lies in a
    module of which nothing is alike. One number everywhere says nothing of whose it is, beside weights of a rank's own.
    """
    names = dict.fromkeys(name for each in held for name in each)
    own = {name for name in names if len({each[name].digest if name in each else "" for each in held}) > 1}
    unlike = {name for name in names if name not in own and _unlike([each[name] for each in held])}
    for name in names:
        parent = name.rpartition(".")[0]
        beside = {one for one in own if parent and one.rpartition(".")[0] == parent}
        blank = bool(beside) and all(each[name].constant for each in held if name in each)
        if name in own or (name in unlike and (blank or _in_own_module(name, own, unlike, names))):
            yield from (Moved(name, rank) for rank, each in enumerate(held) if name in each)
        else:
            yield Moved(name)


def _unlike(every: Sequence[_Held]) -> bool:
    """Return whether the gradients of ranks are further apart than what adding up in another order does."""
    return max(one.along for one in every) - min(one.along for one in every) > ORDER * max(
        one.gradient for one in every
    )


def _in_own_module(name: str, own: Collection[str], unlike: Collection[str], names: Collection[str]) -> bool:
    """Return whether a module that it lies in, other than the root, holds weights of the rank's own, and none alike."""
    path = name.split(".")[:-1]
    for depth in range(len(path)):
        beside = {one for one in names if one.startswith(".".join(path[: depth + 1]) + ".")}
        if not beside.isdisjoint(own) and beside <= {*own, *unlike}:
            return True
    return False


@define(eq=False)
class _Beside:
    """Slopes along some directions, and what gradients say of each."""

    size: float
    """What a slope is about as large as, where gradients are right."""
    eps: float
    """The part of that which is rounding of gradients."""
    slopes: list[float] = field(factory=list)
    said: list[list[dict[Moved, float]]] = field(factory=list)
    """Of each direction and rank."""
    noise: float = 0.0

    def add(self, slope: float, noise: float, said: list[dict[Moved, float]]) -> None:
        """One direction."""
        self.slopes.append(slope)
        self.said.append(said)
        self.noise = max(self.noise, noise)

    def allowed(self, part: float = 1.0) -> float:
        """How far off rounding may be, and the bend of the loss."""
        return self.eps * self.size / part + MARGIN * self.noise

    def agree(self, part: float = 1.0) -> bool:
        """Whether the mean over the ranks, with what is a rank's own, is this part of the slope; of one, each's."""
        every, allowed = zip(self.slopes, self.said, strict=True), self.allowed(part)
        return all(abs(slope - mean / part) <= allowed for slope, said in every for mean in _means(said))

    def agree_by_one_part(self) -> bool:
        """Whether they are one and the same part of the slopes in whatever direction."""
        part = next(_means(self.said[0])) / self.slopes[0] if self.slopes[0] else 0.0
        return 0.0 < part < 1.0 and self.agree(part)

    def told(self, one: Moved) -> Slope:
        """Of one parameter."""
        ranks = tuple(rank for rank, mine in enumerate(self.said[0]) if one in mine)
        rows = [torch.tensor([said[rank][one] for said in self.said], dtype=torch.float64) for rank in ranks]
        slope = torch.tensor(self.slopes, dtype=torch.float64)
        square = float(slope @ slope)
        if sqrt(square) <= self.allowed():
            return Slope(name=one.name, ranks=ranks, ratios=())
        ratios = tuple(float(row @ slope) / square for row in rows)
        off = max(float((row - by * slope).norm()) for row, by in zip(rows, ratios, strict=True))
        turned = off > max(self.allowed(), TURNED * sqrt(square))
        return Slope(name=one.name, ranks=ranks, ratios=ratios, turned=turned)


def _means(said: list[dict[Moved, float]]) -> Iterator[float]:
    """Yield the mean of what ranks hold alike, and the sum of what is a rank's own; of one alone what each says."""
    every = {one for mine in said for one in mine}
    if len(every) == 1:
        yield from (value for mine in said for value in mine.values())
        return
    yield sum(value / (len(said) if one.rank is None else 1) for mine in said for one, value in mine.items())


@define(eq=False)
class _Measures:
    """Slopes of one window."""

    window: _Window
    held: list[dict[str, _Held]]
    eps: float
    begun: float = field(factory=time.perf_counter)
    clipped_to: tuple[float, ...] = ()
    """The norm to which the program has scaled all gradients itself; empty: to none."""

    def apart(self, every: Sequence[Moved]) -> list[Slope]:
        """Those whose gradients are not the slopes; all at once first, then by halves. Collective.

        What ranks hold alike and step by unlike gradients is looked at one by one: their mean may be the slope.
        """
        found: list[Slope] = []
        unlike = [one for one in every if one.rank is None and _unlike([*self._of(one)])]
        norm = None if unlike else as_written(self._norm(every))
        if norm is not None and self._beside(every, SCALED_WAYS).agree_by_one_part():
            self.clipped_to = (norm,)
            return []
        rest = tuple(one for one in every if one not in unlike)
        waiting = [rest] * bool(rest) + [(one,) for one in reversed(unlike)]
        while waiting and not self._ends(found):
            several = waiting.pop()
            beside = self._beside(several, WAYS if len(several) == 1 else 1)
            if beside.agree():
                continue
            if len(several) == 1:
                found.append(evolve(beside.told(several[0]), averaged=self._averaged(several[0])))
            else:
                half = len(several) // 2
                waiting += (several[half:], several[:half])
        return found

    def _norm(self, every: Sequence[Moved]) -> float:
        """Of all gradients that are stepped."""
        return sqrt(sum(next(self._of(one)).gradient ** 2 for one in every))

    def _averaged(self, one: Moved) -> bool:
        """Whether all ranks step one gradient of weights that are each rank's own."""
        there = [each[one.name] for each in self.held if one.name in each]
        return one.rank is not None and len(there) == len(self.held) and not _unlike(there)

    def _ends(self, found: list[Slope]) -> bool:
        """Whether it has taken long enough, as rank 0 says. Raises ``CannotReplay`` where nothing is known by then."""
        late = world().from_first(time.perf_counter() - self.begun > SECONDS)
        _agreed(TOO_LONG if late and not found else "")
        return late

    def _beside(self, several: Sequence[Moved], ways: int = 1) -> _Beside:
        """The slopes of these together in so many directions, beside their gradients. Collective."""
        found = _Beside(size=self._size(several), eps=sqrt(self.eps))
        for way in range(ways):
            every = {one: self._way(one, way) for one in several if one.rank in (None, self._rank)}
            by = {one.name: to for one, to in every.items()}
            mine = {one: self._along(one.name, to) for one, to in every.items()}
            slope = self._along_way(by, 1.0)
            found.add(slope, abs(slope - self._along_way(by, 2.0)) if way == 0 else 0.0, world().gather(mine))
        return found

    def _along_way(self, by: dict[str, Tensor], to: float) -> float:
        return (self.window.lost(by, to) - self.window.lost(by, -to)) / (2 * to)

    @property
    def _rank(self) -> int:
        return world().rank

    def _of(self, one: Moved) -> Iterator[_Held]:
        holders = self.held if one.rank is None else [self.held[one.rank]]
        yield from (each[one.name] for each in holders if one.name in each)

    def _length(self, one: Moved) -> float:
        """By how much each element is moved: less where the gradient is large, so that none hides the others."""
        held = next(self._of(one))
        by = [each.size * each.gradient for rank in self.held for each in rank.values() if each.size * each.gradient]
        middle = sorted(by)[len(by) // 2] if by else 0.0
        size = held.size or 1.0
        return STEP * size * (min(1.0, middle / (size * held.gradient)) if held.gradient else 1.0)

    def _way(self, one: Moved, way: int) -> Tensor:
        """A direction, the same on all ranks."""
        seed = int(digest_of([one.name, way]), 16) % 2**63
        weight = self.window.streamed.fetch(one.name)
        generator = torch.Generator().manual_seed(seed)
        return self._length(one) * torch.randn(weight.shape, dtype=weight.dtype, generator=generator)

    def _along(self, name: str, by: Tensor) -> float:
        grad = self.window.record.tensors.get(f"grad/{name}")
        clip = self.window.record.head.clip
        clipped = 1.0 if clip is None or clip.empty or clip.late else shrunk((self.window.record,))[0]
        return 0.0 if grad is None else float(numbers(grad).double() @ numbers(by).double()) / clipped

    def _size(self, several: Sequence[Moved]) -> float:
        """What the slope is about as large as."""
        return sqrt(sum((self._length(one) * next(self._of(one)).gradient) ** 2 for one in several))
