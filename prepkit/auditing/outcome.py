"""What an audit comes to, and what a prepared model costs and which config it is, told with the tables of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from attrs import field, frozen

from prepkit.config import Config
from prepkit.facts.run import RunFacts
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.findings.text import aligned, count, in_bytes, short
from prepkit.plan import Plan

if TYPE_CHECKING:  # what only a question needs is imported with it
    from prepkit.auditing.reconstruction import Reconstruction
    from prepkit.auditing.running import RunningLook


@frozen(kw_only=True)
class Audit:
    """What stands there, and everything that is wrong with it."""

    facts: RunFacts
    findings: tuple[Finding, ...]
    """Every finding: errors, warnings and notes, in the order of the rules."""
    unasked: tuple[tuple[str, str], ...] = ()
    """Id of each rule that could not be asked to the end, and what was not there to be seen."""
    seconds: float = field(default=0.0, eq=False)
    """How long it took to look."""
    proven: bool = False
    """Whether the window that ends with this step is proven beside it."""
    steps: int = 1
    """The step before which it looked last: behind the first, a watch has looked before each."""
    beside: tuple[str, ...] = ()
    """Models that are trained behind the first one, each with what trains it, and up to which step it was looked at."""
    live: RunningLook | None = field(default=None, eq=False, repr=False)
    """What ``drift`` looks at again; None where nothing live was looked at."""

    def drift(self) -> tuple[Finding, ...]:
        """Return what has changed since the audit, or since the last call: for any step of the loop, on every rank.

        Parameters, ties, slots and state of optimizers, hooks, learning rates, and ranks that part: one all-reduce of
        24 bytes per parameter. Raises ``ValueError`` for an audit of facts alone.
        """
        if self.live is None:
            raise ValueError(
                "this audit holds no live model; call pk.audit(model, optimizer) in the program that trains"
            )
        return self.live.look()

    @property
    def fine(self) -> bool:
        """Whether nothing above a note was found."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    @property
    def _last_step(self) -> str:
        return "the first step" if self.steps == 1 else f"step {self.steps}"

    def config(self) -> Config:
        """The config that would have made what stands there. Raises ``PlanRejected`` with every reason against one.

        What leaves no trace keeps its default: where the weights came from, clipping and accumulation that a loop does
        by itself, how loaders are divided.
        """
        return _told(self.facts).config

    def plan(self) -> Plan:
        """Its plan, for the model as it was before; ``pk.diff`` of it and another shows what that would do otherwise.

        Raises ``PlanRejected`` where there is no config, or prepkit has no plan for it.
        """
        return _planned(_told(self.facts))

    def explain(self) -> str:
        """Return what this rank holds now, and structure, memory and traffic as on a plan's page (``pk.show``)."""
        return _explained(self.facts)

    def __str__(self) -> str:
        said = [str(finding) for finding in self.findings]
        gradients = "" if self.proven else "how gradients are averaged and scaled (prepkit audit --prove), and "
        fine = (
            f"nothing {'else ' if self.proven else ''}is wrong that can be told before {self._last_step}",
            f"not asked: {gradients}later steps ({'' if self.steps > 1 else 'prepkit audit --steps 20, or '}pk.watch)",
        )
        counts = Counter(why for _, why in self.unasked)
        unknown = [f"  {count(rules, 'rule')}: {why}" for why, rules in counts.items()]
        beside = [f"looked at too: {one}" for one in self.beside]
        return "\n".join(
            (_head(self.facts), *(said or fine), *beside, *(["cannot know here:"] if unknown else ()), *unknown)
        )


def _head(facts: RunFacts) -> str:
    """Return what stands there, in one line."""
    root = facts.model.classes[facts.model.modules[0].cls].name
    elements = sum(param.numel for param in facts.model.params)
    trained = sum(param.numel for param in facts.model.params if param.requires_grad)
    ways = sorted({way for param in facts.params for way in param.averaged_by})
    parts = (
        f"{root}, {short(elements)} parameters, {short(trained)} trained",
        f"{', '.join(ways) or 'no wrapper'} over {count(facts.world_size, 'rank')}",
        *((f"{count(len(facts.units), 'unit')}",) if facts.units else ()),
        *(one.name for one in facts.optimizers),
        *((facts.scheduler.name,) if facts.scheduler else ()),
        *((count(len(facts.loaders), "loader"),) if facts.loaders else ()),
        *(() if facts.ranks or facts.world_size == 1 else ("the other ranks were not asked",)),
    )
    return f"audit of {'; '.join(parts)}"


def _explained(facts: RunFacts) -> str:
    """What this rank holds now; then structure, memory and traffic as on the page of the nearest config's plan."""
    from prepkit.auditing.reconstruction import reconstruct
    from prepkit.render.plan import tables

    found = reconstruct(facts)
    try:
        costs = tables(_planned(found))
    except PlanRejected as refused:
        costs = "\n".join(("no tables, because prepkit has no plan for it", *map(str, refused.findings)))
    return "\n\n".join(("\n".join(_held(facts)), "\n".join(_which(found)), costs))


def _held(facts: RunFacts) -> Iterator[str]:
    yield f"rank {facts.rank} of {facts.world_size} holds now"
    held = facts.preparation.held if facts.preparation else ()
    rows = tuple((one.what, in_bytes(one.bytes), one.device) for one in held)
    yield from aligned(rows, indent=2)


def _which(found: Reconstruction) -> Iterator[str]:
    from prepkit.formats.exporters.exported import config_text

    if not found.reasons:
        yield f"prepared as by this config, with the engine {type(found.config.engine).__name__}"
        yield from (f"  {line}" for line in config_text(found.config, "config.yaml").splitlines())
        return
    yield "no config of prepkit asks for it; the tables are those of the nearest one, which does not say that"
    yield from (f"  {reason.where}: {reason.what}" for reason in found.reasons)


def _told(facts: RunFacts) -> Reconstruction:
    from prepkit.auditing.reconstruction import reconstruct

    found = reconstruct(facts)
    if found.reasons:
        raise PlanRejected(found.reasons)
    return found


def _planned(found: Reconstruction) -> Plan:
    from prepkit import planner

    return planner.plan(found.config, found.facts).lash(_reject).unwrap()


def _reject(findings: tuple[Finding, ...]) -> NoReturn:
    raise PlanRejected(findings)
