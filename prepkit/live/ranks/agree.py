"""Do all ranks hold the same plan and the same facts? One small collective answers, on every rank alike."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from itertools import groupby

import torch
import torch.distributed as dist
from attrs import frozen

Digests = tuple[tuple[str, str], ...]

Explain = Callable[[], tuple[str, Callable[[str], tuple[str, ...]]]]
"""This rank's plan as text, and what differs from another rank's: one line per difference, the first ones first."""

COMPARE = "save the plan on two of these ranks, pk.save(plan, f'plan-{rank}.json'), and run prepkit diff on the files"
FIXES = {
    "values": (
        "give every rank the same values first: torch.manual_seed(0) before the model is built, or one checkpoint for "
        "all; or plan with weights=SendWeights() for those of rank 0, or InitWeights() for new ones"
    ),
    "training modes": "call model.train(), or model.eval(), for the same modules on every rank",
}
"""What to do where nothing but this differs; else the plans are to be compared."""

SHOWN = 10
"""Differences of one rank that are told; the rest is counted."""


@frozen(kw_only=True)
class Difference:
    """One digest that is not the same everywhere."""

    name: str
    """What was digested, such as ``plan``."""
    holders: tuple[tuple[str, tuple[int, ...]], ...]
    """Every digest with the ranks that hold it, the most common first; ``""`` for ranks that have none."""

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks outside the majority; every rank where no digest is held by more ranks than each other one."""
        first, second = len(self.holders[0][1]), len(self.holders[1][1])
        return tuple(sorted(rank for _, ranks in self.holders[first > second :] for rank in ranks))

    def __str__(self) -> str:
        shown = ((value.rpartition(":")[2][:12] or "none", at) for value, at in self.holders)  # without ``sha256:``
        texts = (f"{value} on rank{'s' * (len(at) > 1)} {spans(at)}" for value, at in shown)
        return f"{self.name}: {' | '.join(texts)}"


Details = tuple[tuple[int, tuple[str, ...]], ...]
"""Rank, and how it differs from the rank that stands for the others."""


class Disagreement(RuntimeError):
    """Raised on every rank when any two hold different digests. Nothing has been changed yet.

    ``odd`` are the ranks outside the majority; ``details`` says of each how it differs, name by name.
    """

    def __init__(self, differences: tuple[Difference, ...], world: int, details: Details = ()) -> None:
        self.differences = differences
        self.details = details
        self.odd = tuple(sorted({rank for difference in differences for rank in difference.odd}))
        if len(self.odd) == world:
            what = f"the {world} ranks do not hold the same plan and model, and none is in the majority"
        else:
            who, verb = ("rank", "differs") if len(self.odd) == 1 else ("ranks", "differ")
            what = f"{who} {spans(self.odd)} of {world} {verb} from the others"
        unlike = {difference.name for difference in differences}
        fix = next((text for name, text in FIXES.items() if unlike == {name}), COMPARE)
        lines = (
            *(f"  {difference}" for difference in differences),
            *_detail_lines(details, _stands_for_most(differences, world)),
        )
        super().__init__("\n".join((what, *lines, f"  fix: {fix}")))


def agree(digests: Digests, explain: Explain | None = None) -> None:
    """Returns when every rank of the default group holds the same names and digests; else raises ``Disagreement``.

    Costs one all-gather of 32 bytes per rank; digests and the plan of one rank travel only when something differs.
    Every rank sees the same gathered bytes, so either all return or all raise. Waits no longer than the group's
    time-out. Returns at once without a group, with one rank, and on the fake group, which carries no data.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    if alike(hashlib.sha256(repr(digests).encode()).digest()):
        return
    world = dist.get_world_size()
    answers: list[tuple[Digests, bool]] = [((), False)] * world
    dist.all_gather_object(answers, (digests, explain is not None))
    differences = compare(tuple(theirs for theirs, _ in answers))
    details = _details(explain, differences) if explain and all(explains for _, explains in answers) else ()
    raise Disagreement(differences, world, details)


def alike(summary: bytes) -> bool:
    """Whether every rank of the default group gives the same 32 bytes. Collective; the same answer on every rank."""
    mine = torch.frombuffer(bytearray(summary), dtype=torch.uint8).to(wire())
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return len({bytes(row.tolist()) for row in gathered}) == 1


def _details(explain: Explain, differences: tuple[Difference, ...]) -> Details:
    """How each rank differs from the first one of the majority. Collective: that one's plan travels to all."""
    text, against = explain()
    majority = [text]
    dist.broadcast_object_list(majority, src=_stands_for_most(differences, dist.get_world_size()))
    mine = against(majority[0]) if text != majority[0] else ()
    by_rank: list[tuple[str, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(by_rank, (*mine[:SHOWN], *((f"and {len(mine) - SHOWN} more",) if len(mine) > SHOWN else ())))
    return tuple((rank, lines) for rank, lines in enumerate(by_rank) if lines)


def _stands_for_most(differences: tuple[Difference, ...], world: int) -> int:
    """The first rank of the majority; 0 where there is none."""
    odd = {rank for difference in differences for rank in difference.odd}
    return min(set(range(world)) - odd, default=0)


def _detail_lines(details: Details, there: int) -> list[str]:
    """Ranks that differ in the same way, together; ``there`` is the rank that they were compared with."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in details:
        ranks_of.setdefault(lines, []).append(rank)
    return [
        text
        for lines, ranks in ranks_of.items()
        for text in (
            f"  here on rank{'s' * (len(ranks) > 1)} {spans(tuple(ranks))}, there on rank {there}:",
            *(f"    {line}" for line in lines),
        )
    ]


def compare(by_rank: tuple[Digests, ...]) -> tuple[Difference, ...]:
    """What differs among the digests that each rank holds, in rank order; names in the order of their first holder."""
    names = dict.fromkeys(name for digests in by_rank for name, _ in digests)
    differences = []
    for name in names:
        values = [dict(digests).get(name, "") for digests in by_rank]
        if len(counted := Counter(values).most_common()) > 1:
            holders = tuple(
                (value, tuple(rank for rank, other in enumerate(values) if other == value)) for value, _ in counted
            )
            differences.append(Difference(name=name, holders=holders))
    return tuple(differences)


def spans(ranks: tuple[int, ...]) -> str:
    """Sorted ranks as text, runs drawn together.

    >>> spans((0, 1, 2, 5, 7, 8))
    '0-2, 5, 7-8'
    """
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def wire(near: torch.device | None = None) -> torch.device:
    """A device that the default group's backend can communicate on.

    ``near`` where it can; else the host where it can; else the current accelerator.
    """
    served = [pair.partition(":")[0] for pair in str(dist.get_backend_config()).split(",")]
    if near is not None and near.type in served:
        return near
    return torch.device("cpu" if "cpu" in served else served[0])
