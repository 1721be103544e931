"""What a proof comes to, and how records become one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, field, frozen
from torch import nn

from prepkit.auditing.outcome import Audit
from prepkit.facts.proof import ProofFacts
from prepkit.findings import Finding, Severity, errors
from prepkit.findings.text import count
from prepkit.plan.attestation import Attestation
from prepkit.proving.apart import counted
from prepkit.proving.draws import as_before
from prepkit.proving.parts_of import CannotReplay
from prepkit.proving.record_file import Record, read
from prepkit.proving.replay import MEMORY, Replay, replayed
from prepkit.rules import due
from prepkit.rules.rule import Moment, findings_of
from prepkit.rules.run.proof_causes import steps_apart
from prepkit.rules.run.proof_gradients import by_hand

STAND_IN = "the model returns no loss, and none was given: the mean of its squared outputs stood in for one"


@frozen(kw_only=True)
class Proof:
    """One window beside its replay, and everything that is wrong with it."""

    facts: ProofFacts
    findings: tuple[Finding, ...]
    """In the order of the rules: errors, warnings, and what the proof cannot see as notes."""
    attestation: Attestation | None = None
    """Of the plan that was applied, these rules among those that were asked; None: nobody applied one."""
    seconds: float = field(default=0.0, eq=False)
    held: int = field(default=0, eq=False)
    """The most bytes of weights, and of what backward keeps, that the replay held at once."""

    name: str = ""
    """The class of the model, where several were trained."""
    beside: tuple[Proof, ...] = ()
    """Proofs of the other models; their findings are among these."""
    audit: Audit | None = field(default=None, eq=False, repr=False)
    """What stood there at the first step of a script, with findings of its own; None: this is no script's."""

    @property
    def fine(self) -> bool:
        """Whether the window was replayed, and nothing above a note was found."""
        return not any(one.facts.unproven for one in (self, *self.beside)) and all(
            one.severity is Severity.NOTE for one in self.findings
        )

    @property
    def unproven(self) -> bool:
        """Whether the window of a model could not be replayed, or nothing is known of its gradients."""
        blind = any(one.facts.unproven or one._knows_no_gradients() for one in (self, *self.beside))
        return blind or any(one.rule == "prove.unproven" for one in self.findings)

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The errors."""
        return errors(self.findings)

    def __str__(self) -> str:
        heads = (one._head() for one in (self, *self.beside))
        audit = () if self.audit is None else (str(self.audit),)
        return "\n".join((*heads, *map(str, self.findings), *audit))

    def _knows_no_gradients(self) -> bool:
        facts = self.facts
        return not (facts.idle or facts.measured) and (not facts.gradients or by_hand(facts) or steps_apart(facts))

    def _head(self) -> str:
        facts, of = self.facts, f"{self.name}: " if self.name else ""
        if facts.unproven or facts.idle:
            return f"{of}nothing was {'proven' if facts.unproven else 'trained'}"
        micros = len(facts.shares) // max(facts.world, 1)
        number = f"{facts.measured or len(facts.gradients)} gradients{' by their slopes' * bool(facts.measured)}"
        seen = f"{facts.world} x {micros} micro-batches in {facts.dtype}, {number}"
        failed = [one for one in self.failed if not self.beside or one.where.startswith(f"{self.name}: ")]
        said = "trained as plain torch trains it" if not failed else "trained not as plain torch trains it"
        if not failed and self._knows_no_gradients():
            said = "nothing is known of its gradients"
        elif facts.cleared and not facts.wasted:
            said += f"; before it {count(facts.cleared, 'micro-batch')} cleared that train nothing"
        made_up = " of a loss that prepkit has made up" if STAND_IN in facts.limits else ""
        return f"{of}proof of {seen}, {len(facts.steps)} steps{made_up}: {said}"


def prove_records(model: nn.Module, folder: Path, hooked: tuple[str, ...] = ()) -> Proof:
    """The proof of the records in a folder; ``model`` is the root that ran, as it is now or as it was before.

    ``hooked``: as in ``replay.Replay``.

    Raises ``PlanRejected`` where a record cannot be read.
    """
    return prove_record(model, read(folder), hooked=hooked)


def prove_record(
    model: nn.Module,
    records: tuple[Record, ...],
    limit: int = MEMORY,
    hooked: tuple[str, ...] = (),
    late: tuple[int, ...] = (),
) -> Proof:
    """The same of records of all ranks, whose tensors may lie anywhere; the rest as in ``replay.Replay``."""
    begun = time.perf_counter()
    window = Replay(model=model, records=counted(records), limit=limit, hooked=hooked, late=late)
    try:
        with as_before():
            facts = replayed(window)
    except CannotReplay as why:
        facts = ProofFacts(world=len(records), shares=(), unproven=str(why), sends=why.sends)
    return evolve(found_in(facts), seconds=time.perf_counter() - begun, held=window.held)


def found_in(facts: ProofFacts) -> Proof:
    """Return what the rules say of these facts. Pure."""
    return Proof(facts=facts, findings=findings_of(due(Moment.PROVE), facts))


def joined(every: Sequence[tuple[str, Proof]]) -> Proof:
    """One proof of all models of a window, which have names; each finding says whose it is."""
    if len(every) == 1:
        return every[0][1]
    names = [name for name, _ in every]
    named = [f"{name} {at}" if names.count(name) > 1 else name for at, name in enumerate(names)]
    each = [
        evolve(one, name=name, findings=tuple(evolve(f, where=f"{name}: {f.where}") for f in one.findings))
        for name, (_, one) in zip(named, every, strict=True)
    ]
    findings = tuple(finding for one in each for finding in one.findings)
    return evolve(each[0], findings=findings, beside=tuple(each[1:]), seconds=sum(one.seconds for one in each))
