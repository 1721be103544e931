"""Agreement of all ranks on plan and facts: one small collective, with the same answer on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import assert_never

from attrs import frozen

from prepkit.codec import plan_from_text, plan_to_text
from prepkit.codec.diff import Change, Set, Splice, diff, place
from prepkit.findings import Finding, RunRefused
from prepkit.findings.text import spans
from prepkit.plan import Plan
from prepkit.plan.drift import drift
from prepkit.ranks.world import world
from prepkit.render.changes import value_text
from prepkit.rules import found

Digests = tuple[tuple[str, str], ...]

Explain = Callable[[], tuple[str, Callable[[str], tuple[str, ...]]]]
"""This rank's plan as text, and what differs from another rank's: one line per difference, the first ones first."""

RULES = {"values": "run.ranks-values", "training modes": "run.ranks-modes"}
"""Name of a digest to the rule that all ranks hold the same; of the others it is ``plan.ranks-differ``."""

Judge = Callable[[tuple[Finding, ...]], tuple[Finding, ...]]

SHOWN = 10
"""Number of differences of one rank that are listed; the rest is counted."""


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
"""Rank, and its differences from the rank that is taken for the majority."""


class Disagreement(RunRefused):
    """Raised on every rank when any two hold different digests. Nothing has been changed yet.

    ``odd`` are the ranks outside the majority; ``details`` says of each how it differs, name by name.
    """

    def __init__(
        self, findings: tuple[Finding, ...], differences: tuple[Difference, ...], ranks: int, details: Details = ()
    ) -> None:
        self.differences = differences
        self.details = details
        self.odd = _odd(differences)
        super().__init__(findings)
        lines = (f"  {line}" for line in (*differences, *_detail_lines(details, _majority(differences, ranks))))
        self.args = ("\n".join((str(self), *lines)),)


def _odd(differences: Iterable[Difference]) -> tuple[int, ...]:
    return tuple(sorted({rank for difference in differences for rank in difference.odd}))


def _told(differences: tuple[Difference, ...], ranks: int) -> Iterator[Finding]:
    """One finding for each rule that does not hold."""
    rule_of = {difference.name: RULES.get(difference.name, "plan.ranks-differ") for difference in differences}
    for rule in dict.fromkeys(rule_of.values()):
        unlike = tuple(difference for difference in differences if rule_of[difference.name] == rule)
        odd, names = _odd(unlike), " and ".join(difference.name for difference in unlike)
        if len(odd) == ranks:
            what = f"the {ranks} ranks do not hold the same {names}, and none is in the majority"
        else:
            who, verb = ("rank", "differs") if len(odd) == 1 else ("ranks", "differ")
            what = f"{who} {spans(odd)} of {ranks} {verb} from the others"
        yield found(rule, names, what)


def agree(digests: Digests, explain: Explain | None = None, judge: Judge = lambda findings: findings) -> None:
    """Return when every rank of the default group holds the same names and digests; else raise ``Disagreement``.

    ``judge`` returns those of the findings that refuse, alike on every rank: a config may accept some.

    Costs one all-gather of 32 bytes per rank; digests and one rank's plan are sent only when something differs.
    Every rank sees the same gathered bytes, so either all return or all raise. Waits no longer than the group's
    time-out. Returns at once without a group, with one rank, and on the fake group, which carries no data.
    """
    ranks = world()
    if ranks.same(digests):
        return
    answers = ranks.gather((digests, explain is not None))
    differences = compare(tuple(theirs for theirs, _ in answers))
    refused = judge(tuple(_told(differences, ranks.size)))
    if not refused:
        return
    details = _details(explain, differences) if explain and all(explains for _, explains in answers) else ()
    raise Disagreement(refused, differences, ranks.size, details)


def _details(explain: Explain, differences: tuple[Difference, ...]) -> Details:
    """Compare each rank with the first one of the majority. Collective: that one's plan is sent to all."""
    text, against = explain()
    ranks = world()
    majority = ranks.sent_by(_majority(differences, ranks.size), text)
    mine = against(majority) if text != majority else ()
    shown = (*mine[:SHOWN], *((f"and {len(mine) - SHOWN} more",) if len(mine) > SHOWN else ()))
    return tuple((rank, lines) for rank, lines in enumerate(ranks.gather(shown)) if lines)


def _majority(differences: tuple[Difference, ...], ranks: int) -> int:
    """The first rank of the majority; 0 where there is none."""
    odd = {rank for difference in differences for rank in difference.odd}
    return min(set(range(ranks)) - odd, default=0)


def _detail_lines(details: Details, there: int) -> list[str]:
    """Ranks that differ in the same way, together; ``there`` is the rank that they were compared with."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in details:
        ranks_of.setdefault(lines, []).append(rank)
    return [
        text
        for lines, ranks in ranks_of.items()
        for text in (
            f"here on rank{'s' * (len(ranks) > 1)} {spans(tuple(ranks))}, there on rank {there}:",
            *(f"  {line}" for line in lines),
        )
    ]


def compare(by_rank: tuple[Digests, ...]) -> tuple[Difference, ...]:
    """Differences among the digests of each rank, given in rank order; names in the order of their first holder."""
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


def plan_differences(plan: Plan) -> tuple[str, Callable[[str], tuple[str, ...]]]:
    """The text of this rank's plan, and a function from another rank's text to the lines in which the two differ.

    The text is that of a plan file, so that a rank with another version of prepkit refuses it rather than misreads it:
    the function raises ``PlanRejected`` as ``codec.plan_from_text`` does.
    """
    return plan_to_text(plan), lambda text: differences(plan_from_text(text), plan)


def differences(theirs: Plan, mine: Plan) -> tuple[str, ...]:
    """One line per difference, such as ``config.accumulation: 1 there, 4 here``: ``theirs`` is there, ``mine`` is here.

    Config first, then facts parameter by parameter: what else differs in the plans follows from these two. Only where
    both are equal, as with two versions of prepkit, steps and layouts are compared.
    """
    changes = diff(theirs, mine)
    config = _lines(tuple(change for change in changes if change.path[0] == "config"))
    facts = tuple(f"{fact.where}: {fact.planned} there, {fact.now} here" for fact in drift(theirs.facts, mine.facts))
    return (*config, *facts) or _lines(changes)


def _lines(changes: tuple[Change, ...]) -> tuple[str, ...]:
    return tuple(_line(change) for change in changes)


def _line(change: Change) -> str:
    match change:
        case Set(path=path, before=before, after=after):
            return f"{place(path)}: {value_text(before)} there, {value_text(after)} here"
        case Splice(path=path, index=index, removed=removed, added=added):
            return f"{place((*path, index))}: {value_text(removed)} there, {value_text(added)} here"
        case _:
            assert_never(change)
