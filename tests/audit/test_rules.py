"""Audit rules as a table: each message is the one that was read and agreed to, on facts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from prepkit.auditing import AUDIT_RULES, findings_of
from prepkit.codec import from_data, to_data
from prepkit.facts.prepared import (
    DDPFacts,
    EngineFacts,
    GradientFacts,
    PreparedFacts,
    PreparedLoader,
    PreparedOptimizer,
    PreparedParam,
    PreparedScheduler,
    RankFacts,
    WrappedModule,
)
from prepkit.facts.running import RunningFacts, RunningParam
from prepkit.findings import Finding, Severity
from prepkit.testing.tiny import tiny_loader, tiny_model
from tests.support.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
MODEL = tiny_model()
NAMES = tuple(param.name for param in MODEL.params)
FINE = PreparedFacts(
    model=MODEL,
    params=tuple(PreparedParam(name=name, dtype="float32", averaged_by=("ddp",), ranks=2) for name in NAMES),
    optimizers=(PreparedOptimizer(name="AdamW", held=NAMES, rates=(0.1,)),),
    world_size=2,
    backend="cpu:gloo",
)
RANK = RankFacts(rank=0, names="a", model="a", optimizer="a", values="a", generator="a", tensor_ranks=(0,))


def with_params(**changes: object) -> PreparedFacts:
    first, *rest = FINE.params
    return evolve(FINE, params=(evolve(first, **changes), *rest))


def with_optimizer(**changes: object) -> PreparedFacts:
    return evolve(FINE, optimizers=(evolve(FINE.optimizers[0], **changes),))


def with_ranks(**changes: object) -> PreparedFacts:
    return evolve(FINE, ranks=(RANK, evolve(RANK, **{"rank": 1, "tensor_ranks": (1,), "generator": "b", **changes})))


RUNNING = RunningFacts(
    params=tuple(RunningParam(name=name, dtype="float32", device="cpu", requires_grad=True) for name in NAMES),
    ties=((NAMES[0], NAMES[1]),),
    hooks=(("", "forward_hooks: DDP.hook"),),
    held=(NAMES,),
    orphans=(0,),
    stateful=(NAMES,),
    rates=(0.1,),
    scheduled=(0.1,),
)


def later(**changed: Any) -> PreparedFacts:
    """What a look at a later step finds where this has changed since."""
    return evolve(FINE, running=((RUNNING, evolve(RUNNING, **changed)),))


BROKEN: dict[str, PreparedFacts] = {
    "audit.orphans": with_optimizer(held=NAMES[1:], orphans=((4, 4),)),
    "audit.missed": with_optimizer(held=NAMES[1:]),
    "audit.state-lost": with_optimizer(lost=3),
    "audit.rate-zero": with_optimizer(rates=(0.0, 0.0)),
    "audit.stepped-twice": evolve(FINE, optimizers=(*FINE.optimizers, PreparedOptimizer(name="SGD", held=NAMES[:1]))),
    "audit.float16-weights": with_params(dtype="float16"),
    "audit.bfloat16-weights": with_params(dtype="bfloat16"),
    "audit.nan": evolve(FINE, nan=NAMES[:1]),
    "audit.left-on-meta": with_params(device="meta"),
    "audit.forward-elsewhere": evolve(FINE, elsewhere=("layers.0",)),
    "audit.eval-mode": evolve(FINE, training=False, dropout=("drop",)),
    "audit.part-in-eval": evolve(FINE, evaluating=("layers.0",), dropout=("layers.0.drop",)),
    "audit.wrapped-twice": evolve(FINE, wrapped=(WrappedModule(path="", wrappers=("ddp", "ddp")),)),
    "audit.checkpointed-whole": evolve(FINE, wrapped=(WrappedModule(path="", wrappers=("checkpointed",)),)),
    "audit.checkpoint-outside": evolve(FINE, wrapped=(WrappedModule(path="a", wrappers=("checkpointed", "fsdp1")),)),
    "audit.not-averaged": with_params(averaged_by=(), ranks=1),
    "audit.averaged-over-part": with_params(averaged_by=("fsdp2",), ranks=1),
    "audit.ddp-frozen": evolve(FINE, ddp=(DDPFacts(path="", reduced=4, known=3, frozen=NAMES[:1]),)),
    "audit.backend": with_params(device="cuda"),
    "audit.ranks-models": with_ranks(model="b"),
    "audit.ranks-optimizers": with_ranks(optimizer="b"),
    "audit.ranks-values": evolve(FINE, parted=NAMES[:2]),
    "audit.dropout-alike": evolve(with_ranks(generator="a"), dropout=("drop",)),
    "audit.dropout-unlike": evolve(
        FINE,
        ranks=tuple(evolve(RANK, rank=rank, tensor_ranks=(0, 1), generator=str(rank)) for rank in (0, 1)),
        dropout=("drop",),
    ),
    "audit.steps-nothing": evolve(FINE, gradients=GradientFacts(stepped=2, missing=NAMES[:2])),
    "audit.gradients-part": evolve(with_ranks(), gradients=GradientFacts(stepped=2, compared=NAMES, parted=NAMES[:1])),
    "audit.gradients-not-finite": evolve(FINE, gradients=GradientFacts(stepped=2, spoiled=NAMES[:1])),
    "audit.without-gradient": evolve(FINE, gradients=GradientFacts(stepped=2, missing=NAMES[:1])),
    "audit.unread-samples": evolve(FINE, loaders=(PreparedLoader(seen=tiny_loader(), division="sampler", replicas=4),)),
    "audit.same-samples": evolve(FINE, loaders=(PreparedLoader(seen=tiny_loader()),)),
    "audit.tensor-samples": evolve(
        FINE,
        loaders=(PreparedLoader(seen=tiny_loader(), division="sampler", replicas=2),),
        ranks=tuple(
            evolve(RANK, rank=rank, tensor_ranks=(0, 1), loaders=((2, rank, "sampler", "a"),)) for rank in (0, 1)
        ),
    ),
    "audit.scheduler-elsewhere": evolve(
        FINE, scheduler=PreparedScheduler(name="CosineAnnealingLR", drives_optimizer=False)
    ),
    "audit.two-schedulers": evolve(
        FINE,
        engine=EngineFacts(stage=1, micro_batch=4, accumulation=1, scheduler="WarmupLR"),
        optimizers=(evolve(FINE.optimizers[0], engine=True),),
        scheduler=PreparedScheduler(name="CosineAnnealingLR", drives_optimizer=True),
    ),
    "audit.past-engine": evolve(FINE, engine=EngineFacts(stage=1, micro_batch=4, accumulation=1)),
    "audit.drift-params": later(params=(evolve(RUNNING.params[0], dtype="float16"), *RUNNING.params[1:])),
    "audit.drift-trained": later(params=(evolve(RUNNING.params[0], requires_grad=False), *RUNNING.params[1:])),
    "audit.drift-ties": later(ties=()),
    "audit.drift-slots": later(held=(NAMES[1:],), orphans=(1,)),
    "audit.drift-state": later(stateful=((),)),
    "audit.drift-hooks": later(hooks=()),
    "audit.drift-rate": later(rates=(0.5,)),
    "audit.drift-ranks": later(parted=NAMES[:1], rates_parted=True),
}


def test_facts_with_nothing_wrong_give_no_finding() -> None:
    assert findings_of(FINE) == ()
    assert findings_of(with_ranks()) == ()


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_says_what_its_facts_break_and_no_other_does(rule: str) -> None:
    assert {finding.rule for finding in findings_of(BROKEN[rule])} == {rule}


def test_messages_are_those_that_were_agreed_to() -> None:
    text = "\n\n".join(str(finding) for facts in BROKEN.values() for finding in findings_of(facts)) + "\n"
    assert_golden(GOLDEN, text)


def test_ids_are_of_one_subject_and_fixes_are_sentences() -> None:
    assert len({rule.id for rule in AUDIT_RULES}) == len(AUDIT_RULES)
    for rule in AUDIT_RULES:
        assert rule.id.startswith("audit.")
        assert rule.summary.endswith("."), rule.id
        assert rule.fix.endswith("."), rule.id
    assert {rule.severity for rule in AUDIT_RULES} == set(Severity)


def test_a_finding_of_every_severity_is_written_and_read_back() -> None:
    for severity in Severity:
        finding = Finding(rule="audit.nan", severity=severity, where="model", what="x", fix="y")
        assert from_data(to_data(finding), Finding, "finding", "python") == finding


@given(
    trained=st.lists(st.booleans(), min_size=len(NAMES), max_size=len(NAMES)),
    held=st.lists(st.booleans(), min_size=len(NAMES), max_size=len(NAMES)),
    orphans=st.integers(0, 3),
)
def test_every_trained_parameter_that_nobody_steps_is_counted_once(
    trained: list[bool], held: list[bool], orphans: int
) -> None:
    params = tuple(evolve(param, requires_grad=yes) for param, yes in zip(FINE.params, trained, strict=True))
    names = tuple(name for name, yes in zip(NAMES, held, strict=True) if yes)
    optimizer = PreparedOptimizer(name="AdamW", held=names, rates=(0.1,), orphans=((2,),) * orphans)
    rules = [finding.rule for finding in findings_of(evolve(FINE, params=params, optimizers=(optimizer,)))]
    missed = {name for name, yes in zip(NAMES, trained, strict=True) if yes} - set(names)
    assert rules.count("audit.orphans") == (bool(missed) and bool(orphans))
    assert rules.count("audit.missed") == (bool(missed) and not orphans)
    assert rules.count("audit.nothing-trains") == (not any(trained))


@pytest.mark.parametrize(
    ("horizon", "found"),
    [(32, True), (96, True), (48, True), (63, True), (64, False), (24, False), (80, False)],
)
def test_a_schedule_that_accelerate_ticks_twice_a_step_is_early_where_it_ends_inside_a_pass(
    horizon: int, found: bool
) -> None:
    """A pass has 32 steps. Made for two passes it ends with the first, as for whoever counts its ticks."""
    scheduler = PreparedScheduler(name="CosineAnnealingLR", drives_optimizer=True, horizon=horizon, ticks=2)
    loader = PreparedLoader(seen=tiny_loader(), division="sampler", replicas=2, batches=32)
    rules = [finding.rule for finding in findings_of(evolve(FINE, scheduler=scheduler, loaders=(loader,)))]
    assert ("audit.scheduler-early" in rules) is found
