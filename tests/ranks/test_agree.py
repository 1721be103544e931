"""Ranks that hold different plans or models are named, on every rank, within seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.court import Court
from prepkit.ranks.agree import Difference, Disagreement, agree, compare, spans
from tests.support.gang import Gang

PLAN, MODEL = "sha256:9f8e7d6c5b4a39281706", "sha256:1a2b3c4d5e6f7a8b9c0d"


def ask(rank: int, world: int, odd: tuple[int, ...], name: str) -> tuple[str, tuple[int, ...], float]:
    """What one rank hears, which ranks it calls odd, and after how many seconds."""
    value = "sha256:0dd0dd0dd0dd0dd0" if rank in odd else None
    digests = (
        ("plan", value if value and name == "plan" else PLAN),
        ("model", value if value and name == "model" else MODEL),
    )
    began = time.monotonic()
    try:
        agree(digests)
    except Disagreement as said:
        return str(said), said.odd, time.monotonic() - began
    return "", (), time.monotonic() - began


def ask_then_work(rank: int, world: int) -> float:
    """The group is still good after a disagreement."""
    ask(rank, world, (1,), "plan")
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def test_equal_digests_pass_on_every_rank(gang2: Gang) -> None:
    assert [text for text, _, _ in gang2.run(ask, (), "plan")] == ["", ""]


@pytest.mark.parametrize("name", ["plan", "model"])
@pytest.mark.parametrize("odd", [0, 1, 3])
def test_one_odd_rank_of_four_is_named_on_every_rank(gang4: Gang, odd: int, name: str) -> None:
    heard = gang4.run(ask, (odd,), name)
    assert len({text for text, _, _ in heard}) == 1, "every rank hears the same"
    text, named, _ = heard[0]
    assert named == (odd,)
    assert f"rank {odd} of 4 differs from the others" in text
    assert text.startswith(f"error plan.ranks-differ at {name}: ")
    assert [line.split(":")[0].strip() for line in text.splitlines()] == [
        f"error plan.ranks-differ at {name}",
        "fix",
        name,
    ]
    assert max(seconds for _, _, seconds in heard) < 5


def test_two_ranks_that_differ_are_both_named_because_neither_is_the_majority(gang2: Gang) -> None:
    heard = gang2.run(ask, (1,), "plan")
    assert [named for _, named, _ in heard] == [(0, 1), (0, 1)]
    assert (
        heard[0][0]
        == heard[1][0]
        == (
            "error plan.ranks-differ at plan: the 2 ranks do not hold the same plan, and none is in the majority\n"
            "  fix: Run pk.save(plan, f'plan-{rank}.json') on two of these ranks, and prepkit diff on the files.\n"
            "  plan: 9f8e7d6c5b4a on rank 0 | 0dd0dd0dd0dd on rank 1"
        )
    )


def accepting(
    rank: int, world: int, digests: tuple[str, ...], accepted: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Rules of the findings that refuse, and of those that were accepted, where each rank has digests of its own."""
    del world
    court = Court(accepted=accepted)
    try:
        agree(tuple((name, f"sha256:{rank}") for name in digests), judge=court.judged)
    except Disagreement as said:
        return [finding.rule for finding in said.findings], court.overridden
    return [], court.overridden


@pytest.mark.parametrize(
    ("digests", "accepted", "refused", "overridden"),
    [
        (("values",), (), ["run.ranks-values"], []),
        (("training modes", "values"), (), ["run.ranks-modes", "run.ranks-values"], []),
        (("values",), ("run.ranks-values",), [], ["run.ranks-values"]),
        (("plan", "values", "model"), ("run.ranks-values",), ["plan.ranks-differ"], ["run.ranks-values"]),
        (("plan",), ("plan.ranks-differ",), ["plan.ranks-differ"], []),
    ],
)
def test_each_rule_that_does_not_hold_is_told_once_and_gives_way_to_its_override(
    gang2: Gang, digests: Any, accepted: Any, refused: list[str], overridden: list[str]
) -> None:
    assert gang2.run(accepting, digests, accepted) == [(refused, overridden)] * 2


def test_a_disagreement_leaves_the_group_usable(gang2: Gang) -> None:
    assert gang2.run(ask_then_work) == [2.0, 2.0]


def test_without_a_group_there_is_nobody_to_disagree_with() -> None:
    assert not dist.is_initialized()
    agree((("plan", PLAN),))


def test_the_fake_group_carries_no_data_and_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_gather", lambda *_: pytest.fail("a collective on the fake group proves nothing"))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        agree((("plan", PLAN),))
    finally:
        dist.destroy_process_group()


def test_a_digest_that_a_rank_lacks_is_a_difference() -> None:
    found = compare(((("plan", "a"), ("model", "m")), (("plan", "a"),), (("plan", "a"), ("model", "m"))))
    assert found == (Difference(name="model", holders=(("m", (0, 2)), ("", (1,)))),)
    assert str(found[0]) == "model: m on ranks 0, 2 | none on rank 1"


def test_runs_of_ranks_are_drawn_together() -> None:
    assert spans((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert spans(tuple(range(512))) == "0-511"
