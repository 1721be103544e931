"""What ranks hold alike though they should not, or unlike."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prepkit.auditing.rule import AuditRule
from prepkit.facts.prepared import PreparedFacts, RankFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit


def _odd(ranks: tuple[RankFacts, ...], digest: Callable[[RankFacts], str]) -> str:
    """Which ranks hold something else than the first, as text; empty where none does."""
    others = [str(rank.rank) for rank in ranks if digest(rank) != digest(ranks[0])] if ranks else []
    return f"rank{'s' * (len(others) > 1)} {', '.join(others[:5])}{', …' * (len(others) > 5)}" if others else ""


def _models(facts: PreparedFacts) -> Iterator[Hit]:
    pipeline = len({rank.names for rank in facts.ranks}) == len(facts.ranks) and not any(
        param.averaged_by for param in facts.params
    )
    if (odd := _odd(facts.ranks, lambda rank: rank.model)) and not pipeline:
        what = f"Names, shapes, dtypes or requires_grad of parameters on {odd} are not those of rank 0."
        yield Hit("model", what)


def _optimizers(facts: PreparedFacts) -> Iterator[Hit]:
    if odd := _odd(facts.ranks, lambda rank: rank.optimizer):
        yield Hit("optimizer", f"Class, groups or options on {odd} are not those of rank 0, such as lr.")


def _values(facts: PreparedFacts) -> Iterator[Hit]:
    if facts.parted:
        what = f"Every rank holds {count(len(facts.parted), 'tensor')} with values of its own: {some(facts.parted)}."
        yield Hit(at(facts.parted[0]), what)


def _pipeline(facts: PreparedFacts) -> bool:
    """Whether each rank has modules of its own."""
    return len({rank.names for rank in facts.ranks}) > 1


def _modes(facts: PreparedFacts) -> Iterator[Hit]:
    if not _pipeline(facts) and (odd := _odd(facts.ranks, lambda rank: rank.modes)):
        yield Hit("model", f"Which modules are in training mode on {odd} is not as on rank 0.")


def _state(facts: PreparedFacts) -> Iterator[Hit]:
    if not _pipeline(facts) and (odd := _odd(facts.ranks, lambda rank: rank.state)):
        what = f"The state of parameters that all ranks step alike, its count of steps too, on {odd} is not rank 0's."
        yield Hit("optimizer", what)


def _schedulers(facts: PreparedFacts) -> Iterator[Hit]:
    if odd := _odd(facts.ranks, lambda rank: rank.scheduler):
        yield Hit("scheduler", f"Class, horizon or position on {odd} is not that of rank 0.")


def _alike(facts: PreparedFacts) -> Iterator[Hit]:
    groups = {rank.tensor_ranks: rank.generator for rank in facts.ranks}
    active = facts.dropout and facts.training
    if active and len(groups) > 1 and len(set(groups.values())) == 1:
        what = (
            f"All ranks' generators are in one state: the same elements drop in {count(len(facts.dropout), 'module')}."
        )
        yield Hit("env", what)


def _unlike(facts: PreparedFacts) -> Iterator[Hit]:
    if not (facts.dropout and facts.training):
        return
    state = {rank.rank: rank.generator for rank in facts.ranks}
    for rank in facts.ranks:
        if len({state[other] for other in rank.tensor_ranks if other in state}) > 1:
            ranks = ", ".join(map(str, rank.tensor_ranks))
            what = (
                f"Ranks {ranks} hold parts of one layer, and their generators part: {some(facts.dropout)} drop unlike."
            )
            yield Hit("env", what)
            return


RULES: tuple[AuditRule, ...] = (
    AuditRule(
        id="audit.ranks-models",
        summary="Every rank has the same parameters, and trains the same ones.",
        look=_models,
        fix="Build and freeze the model from the same config on every rank.",
        source=("pain 11",),
    ),
    AuditRule(
        id="audit.ranks-optimizers",
        summary="Every rank steps with the same options.",
        look=_optimizers,
        fix="Give every rank the same lr, weight_decay and groups.",
        source=("pain 11",),
    ),
    AuditRule(
        id="audit.ranks-values",
        summary="What every rank holds whole has one value.",
        look=_values,
        fix="Load weights on every rank before the model is wrapped, or broadcast them: dist.broadcast(tensor, src=0).",
        source=("pain 11", "pain 17"),
    ),
    AuditRule(
        id="audit.ranks-modes",
        summary="Every rank has the same modules in training mode.",
        look=_modes,
        fix="Call model.train() on every rank, behind what one rank alone evaluates.",
    ),
    AuditRule(
        id="audit.ranks-state",
        summary="What replicas have of optimizer state is the same.",
        look=_state,
        fix="Load the optimizer's state on every rank, before its first step.",
        source=("pain 13",),
    ),
    AuditRule(
        id="audit.ranks-schedulers",
        summary="Schedulers stand at the same step on every rank.",
        look=_schedulers,
        fix="Load the scheduler's state on every rank, and tick it as often.",
    ),
    AuditRule(
        id="audit.dropout-unlike",
        summary="Ranks that hold parts of one layer drop the same elements.",
        look=_unlike,
        fix="Call torch.manual_seed with one seed on the ranks of a tensor-parallel group.",
    ),
    AuditRule(
        id="audit.dropout-alike",
        summary="Ranks with other samples drop other elements.",
        look=_alike,
        fix="Call torch.manual_seed(seed + rank) once the model is built; set_seed(seed, device_specific=True).",
        severity=Severity.NOTE,
    ),
)
"""Reporting order: another model, another optimizer, other values, modes and state, other random numbers."""
