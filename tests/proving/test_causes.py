"""What the rules of a proof say of numbers alone, where a real window of that kind would take a library."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from attrs import evolve
from torch.utils.data import DataLoader

from prepkit.facts.proof import GradientProof, LossShare, ProofFacts, StepProof
from prepkit.findings import Finding, Severity
from prepkit.proving.bare import uses
from prepkit.proving.proof import found_in
from prepkit.proving.script import untold
from prepkit.rules import due
from prepkit.rules.rule import Moment, Rule
from prepkit.rules.run.proof_fixes import fix_of

APART = ProofFacts(
    world=2,
    shares=(LossShare(rank=0, micro=0), LossShare(rank=1, micro=0)),
    gradients=(
        GradientProof(
            name="weight",
            numel=100,
            gram=((1.0, 0.0), (0.0, 1.0)),
            dots=((1.0, 0.0), (0.0, 1.0)),
            squares=(1.0, 1.0),
            holders=(0, 1),
        ),
    ),
)
"""Each rank is about to step the gradient of its own micro-batch."""


def test_a_step_before_its_last_micro_batch_is_named_with_what_to_do() -> None:
    (alone,) = found_in(APART).findings
    (early,) = found_in(evolve(APART, accumulation=4)).findings
    assert alone.rule == early.rule == "prove.not-averaged"
    assert "stepped after" not in alone.what
    assert "stepped after 1 of the 4 micro-batches of a step" in early.what
    assert "accelerator.prepare()" in early.fix
    assert "accelerator.prepare()" not in alone.fix


def test_what_the_optimizer_does_not_hold_is_no_gradient_that_nobody_clears() -> None:
    steps = (StepProof(name="unheld", held=False), StepProof(name="held", expected=1.0, moved=1.0, along=1.0))
    facts = ProofFacts(world=1, shares=(LossShare(rank=0, micro=0),), steps=steps, kept=("unheld", "held"))
    left, unheld = found_in(facts).findings
    assert (left.rule, unheld.rule) == ("prove.left-over", "prove.not-stepped")
    assert "1 parameter still had" in left.what
    assert "`held`" in left.what
    assert [one.rule for one in found_in(evolve(facts, kept=("unheld",))).findings] == ["prove.not-stepped"]


def test_a_direction_that_is_nearly_right_is_laid_to_what_changes_a_little_of_each_gradient() -> None:
    whole = evolve(APART.gradients[0], dots=((0.48, 0.48),), squares=(0.5,), holders=(0,))
    (nearly,) = found_in(evolve(APART, gradients=(whole,))).findings
    (far,) = found_in(evolve(APART, gradients=(evolve(whole, dots=((0.1, -0.3),)),))).findings
    assert nearly.rule == far.rule == "prove.direction"
    assert "off by 0.28 of it" in nearly.what
    assert "autocast around the backward" in nearly.fix
    assert "autocast around the backward" not in far.fix


def test_parts_that_ranks_have_scaled_by_numbers_of_their_own_are_told_with_the_numbers() -> None:
    def part(rank: int, by: float) -> GradientProof:
        """Half of the gradient, whose shares are alike."""
        gram = ((1.0, 1.0), (1.0, 1.0))
        return GradientProof(name="weight", numel=50, gram=gram, dots=((by, by),), squares=(by * by,), holders=(rank,))

    parts = (part(0, 0.5), part(1, 0.8))
    whole = evolve(parts[0], numel=100, gram=((2.0, 2.0), (2.0, 2.0)), dots=((1.3, 1.3),), squares=(0.89,))
    (scaled,) = found_in(evolve(APART, gradients=(evolve(whole, parts=parts),))).findings
    assert scaled.rule == "prove.clipped-scaled"
    assert "0.5 x on rank 0, 0.8 x on rank 1" in scaled.what
    assert "model.clip_grad_norm_ of FSDP1" in scaled.fix
    none = evolve(whole, dots=((0.5, 0.5),), squares=(0.25,), parts=(parts[0], part(1, 0.0)))
    (zeros,) = found_in(evolve(APART, gradients=(none,))).findings  # which no clipping makes
    assert zeros.rule == "prove.no-gradient"
    assert "had a gradient of zeros in the part of rank 1" in zeros.what
    (other,) = found_in(
        evolve(APART, gradients=(evolve(whole, parts=(parts[0], evolve(parts[1], squares=(9.0,)))),))
    ).findings
    assert other.rule == "prove.direction"


def test_ranks_that_clip_before_the_average_are_told_to_clip_behind_it() -> None:
    averaged = evolve(APART.gradients[0], dots=((0.25, 0.05), (0.25, 0.05)), squares=(0.065, 0.065))
    (found,) = found_in(evolve(APART, gradients=(averaged,), shrunk=(0.5, 0.1))).findings
    assert found.rule == "prove.clipped-scaled"
    assert found.fix == "Clip once the gradients are averaged, by one norm of all of them."
    assert "before they were averaged: to a norm of 1 from 2 on rank 0, from 10 on rank 1" in found.what
    assert " x what they should be" not in found.what  # which is no multiple of that


@pytest.mark.parametrize("numel", [1, 8], ids=["one element", "a bias before a layer of one output"])
def test_a_gradient_whose_shares_lie_on_one_line_has_the_cause_of_the_others(numel: int) -> None:
    """Whatever is made of them is a multiple of what it should be."""
    averaged = evolve(APART.gradients[0], dots=((0.25, 0.05), (0.25, 0.05)), squares=(0.065, 0.065))
    gram = ((1.0, 1.0), (1.0, 1.0))
    tiny = GradientProof(
        name="bias", numel=numel, gram=gram, dots=((0.31, 0.31),) * 2, squares=(0.0961,) * 2, holders=(0, 1)
    )
    (found,) = found_in(evolve(APART, gradients=(averaged, tiny), shrunk=(0.5, 0.1))).findings
    assert found.what.startswith("All gradients are clipped by each rank before they were averaged")
    opposed = evolve(tiny, gram=((1.0, -2.0), (-2.0, 4.0)), dots=((1.0, -2.0), (-2.0, 4.0)), squares=(1.0, 4.0))
    (found,) = found_in(evolve(APART, gradients=(*APART.gradients, opposed))).findings
    assert found.what.startswith("All gradients are each rank's own")
    crossed = evolve(tiny, gram=((1.0, 0.5), (0.5, 1.0)), dots=((0.225, 0.225),) * 2, squares=(0.0675,) * 2)
    assert len(found_in(evolve(APART, gradients=(averaged, crossed), shrunk=(0.5, 0.1))).findings) == 2
    (alone,) = found_in(evolve(APART, gradients=(tiny,))).findings
    assert alone.rule == "prove.ratio"


def test_gradients_of_a_norm_that_somebody_would_write_are_clipped_by_the_program() -> None:
    """All of them by one factor: no error, and said."""
    says = "the program has scaled all gradients to a norm of"

    def of(norm: float, other: float = 1.0) -> list[str]:
        by = norm / sqrt(0.5 + 0.5 * other**2)
        made = [
            evolve(APART.gradients[0], name=name, dots=((by / 2, by / 2),) * 2, squares=(by**2 / 2,) * 2)
            for name, by in (("a", by), ("b", by * other))
        ]
        return [f"{one.rule}: {one.what}" for one in found_in(evolve(APART, gradients=tuple(made))).findings]

    assert of(0.8) == [f"prove.limit: {says} 0.8: taken for a clip of its own."]
    assert of(0.57)[0].startswith("prove.ratio: All gradients are 0.570 x")
    assert any(one.startswith("prove.ratio") for one in of(0.8, other=1.3))


def test_a_sum_at_each_micro_batch_is_mended_by_one_behind_the_last() -> None:
    shares = tuple(LossShare(rank=rank, micro=micro) for rank in range(2) for micro in range(2))
    gram = tuple(tuple(float(one == other) for one in range(4)) for other in range(4))
    dots = ((1.0, 0.5, 1.0, 0.5),) * 2
    gradient = GradientProof(name="weight", numel=100, gram=gram, dots=dots, squares=(2.5,) * 2, holders=(0, 1))
    (found,) = found_in(ProofFacts(world=2, shares=shares, gradients=(gradient,))).findings
    assert found.rule == "prove.summed"
    assert "All gradients are summed over the 2 ranks at each micro-batch" in found.what
    assert found.fix.startswith("Reduce gradients once, behind the last backward of the step")


def test_a_loss_that_one_rank_makes_otherwise_is_noted_where_it_always_does() -> None:
    plain, smooth = "LogSoftmaxBackward0, NllLossBackward0", "LogSoftmaxBackward0, NllLossBackward0, SumBackward1"
    for operators, told in (((smooth, plain), True), ((plain, plain), False)):
        shares = tuple(evolve(share, operators=said) for share, said in zip(APART.shares, operators, strict=True))
        findings = found_in(evolve(APART, shares=shares, gradients=())).findings
        assert [one.rule for one in findings] == ["prove.limit"] * told
        assert all(one.what.endswith("other operators than rank 1: Sum on rank 0 alone.") for one in findings)
    both = (evolve(APART.shares[0], operators=plain), evolve(APART.shares[0], micro=1, operators=smooth))
    assert not found_in(evolve(APART, world=1, shares=both, gradients=())).findings


def test_weights_that_moved_otherwise_in_several_ways_are_told_in_one_finding() -> None:
    """As where one hook scales all weights behind the step."""
    plain = StepProof(name="", along=1.0, expected=1.0, moved=1.0)
    steps = tuple(evolve(plain, name=f"w{by}", along=float(by), moved=float(by * by)) for by in range(2, 7))
    turned = evolve(plain, name="turned", along=0.0)
    (found,) = found_in(ProofFacts(world=1, shares=(LossShare(rank=0, micro=0),), steps=(turned, *steps))).findings
    assert found.rule == "prove.step-size"
    ways = "in another direction (`turned`), by 2.000 x (`w2`), by 3.000 x (`w3`) and 3 more ways"
    assert found.what == f"6 parameters moved otherwise than the optimizer's options and these gradients give: {ways}."


def test_a_sum_of_shares_that_only_some_ranks_have_is_told_once_with_every_group() -> None:
    """Of four ranks: each two have averaged."""
    shares = tuple(LossShare(rank=rank, micro=0) for rank in range(4))
    gram = tuple(tuple(float(one == other) for one in range(4)) for other in range(4))
    dots = tuple(tuple(0.5 * (rank // 2 == one // 2) for one in range(4)) for rank in range(4))
    gradient = GradientProof(name="weight", numel=9, gram=gram, dots=dots, squares=(0.5,) * 4, holders=(0, 1, 2, 3))
    (found,) = found_in(ProofFacts(world=4, shares=shares, gradients=(gradient,))).findings
    assert found.rule == "prove.part-of-ranks"
    assert "averaged over ranks 0-1 and over ranks 2-3 alone, 2 of 4" in found.what


def test_what_an_audit_says_of_averaging_is_told_once_by_the_proof_that_has_measured_it() -> None:
    said = [
        Finding(rule=rule, severity=Severity.ERROR, where="model", what="", fix="")
        for rule in ("run.not-averaged", "run.nan")
    ]
    assert [one.rule for one in untold(said, found_in(APART).findings)] == ["run.nan"]
    assert list(untold(said, ())) == said


MADE_TWICE = evolve(APART, gradients=(evolve(APART.gradients[0], dots=((1.0, 1.0),), squares=(2.0,), holders=(0,)),))
TOOLS: dict[str, tuple[tuple[str, ...], bool, str, str]] = {
    "by hand": (("torch",), True, "dist.get_world_size() behind the dist.all_reduce", "hook"),
    "DDP": (("torch", "DDP"), False, "in the communication hook", "set_gradient_divide_factor"),
    "FSDP2": (("torch", "FSDP2"), False, "set_gradient_divide_factor", "hook"),
}
FOREIGN = (
    "scaler",
    "accelerat",
    "fabric",
    "DeepSpeed",
    "loader",
    "Config(",
    "no_sync",
    "wrapper",
    "mean_over",
)
"""What a program that does all by hand has not."""


@pytest.mark.parametrize("name", TOOLS)
def test_what_to_type_against_a_sum_names_what_this_program_has(name: str) -> None:
    uses, raw, says, other = TOOLS[name]
    (found,) = found_in(evolve(MADE_TWICE, uses=uses, raw=raw)).findings
    assert found.rule == "prove.summed"
    assert says in found.fix
    assert other not in found.fix


TOLD = {"prove.scaled", "prove.past-wrapper", "prove.outputs", "prove.limit"}
"""Rules that are told of programs with a scaler or a wrapper alone, or that say what to look for."""


@pytest.mark.parametrize("rule", [one for one in due(Moment.PROVE) if one.id not in TOLD], ids=lambda one: one.id)
def test_no_fix_for_a_program_that_does_all_by_hand_names_a_tool_that_it_has_not(rule: Rule) -> None:
    facts = ProofFacts(world=2, shares=(), uses=("torch",), raw=True)
    said = fix_of(rule.id, "", facts) or rule.fix
    assert [word for word in FOREIGN if word in said] == [], said


@pytest.mark.parametrize(
    ("uses", "raw", "says"),
    [
        (("torch",), True, "torch.nn.utils.clip_grad_norm_(model.parameters(), most)"),
        (("torch", "DDP", "accelerate"), False, "accelerator.clip_grad_norm_"),
        (("torch", "DDP", "Fabric"), False, "fabric.clip_gradients"),
        (("torch", "DDP", "Trainer", "accelerate"), False, "max_grad_norm"),
        (("torch", "DDP", "Lightning"), False, "gradient_clip_val"),
        (("torch", "DeepSpeed"), False, "gradient_clipping in DeepSpeed's config"),
        (("torch", "FSDP1"), False, "model.clip_grad_norm_(most)"),
        (("torch", "DDP", "prepkit"), False, "pk.ClipNorm"),
    ],
)
def test_clipping_is_told_as_the_call_of_what_drives_the_loop(uses: tuple[str, ...], raw: bool, says: str) -> None:
    facts = ProofFacts(world=2, shares=(), uses=uses, raw=raw)
    assert all(says in fix_of(rule, "", facts) for rule in ("prove.clipped-scaled", "prove.not-clipped"))


def test_weights_that_part_where_no_gradient_was_compared_are_not_told_of_the_same_gradients() -> None:
    facts = ProofFacts(world=2, shares=(), uses=("torch",), after_apart=(("weight", (1,)),))
    (found,) = found_in(facts).findings
    assert (found.rule, "over the same gradients" in found.what) == ("prove.after-apart", False)


def test_what_nobody_steps_is_told_once_by_the_proof() -> None:
    steps = (StepProof(name="weight", held=False),)
    proof = found_in(ProofFacts(world=1, shares=(), steps=steps))

    def missed(name: str) -> Finding:
        return Finding(rule="run.missed", severity=Severity.ERROR, where="x", what=f"Nobody steps `{name}`.", fix="Do.")

    assert list(untold([missed("weight"), missed("other")], proof.findings)) == [missed("other")]


def test_tools_are_those_that_are_alive_whatever_else_is() -> None:
    class Odd:
        __module__ = property(lambda self: "odd")  # type: ignore[assignment]  # as a class in C may have it

    kept = [Odd(), DataLoader(torch.zeros(2))]  # type: ignore[arg-type]  # it takes what has a length
    assert {"torch", "loaders"} <= set(uses())
    del kept
