"""Entry points: methods that are left out although they will not work, and names that the model has not."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import BF16, DDP, FSDP1, FSDP2, Config, DeepSpeed, Intent
from prepkit.rules import check
from prepkit.testing.tiny import tiny_facts, tiny_model
from tests.support.rule_findings import finding_of, mended, rule_ids

FACTS = tiny_facts(evolve(tiny_model(), methods=("encode", "generate")), world=2)


@pytest.mark.parametrize(
    ("cfg", "why"),
    [
        (Config(), None),
        (Config(engine=DDP(), intent=Intent.INFERENCE), None),
        (Config(precision=BF16()), "it runs outside the precision of the forward"),
        (Config(engine=DDP()), "the wrapper neither gathers nor averages for it"),
        (Config(engine=FSDP1()), "the wrapper neither gathers nor averages for it"),
        (Config(engine=DeepSpeed(stage=2, micro_batch=2)), "the wrapper neither gathers nor averages for it"),
        (Config(engine=FSDP2()), "its own parameters are sharded outside a forward"),
    ],
    ids=str,
)
def test_a_method_that_is_left_out_is_told_what_stands_in_its_way(cfg: Config, why: str | None) -> None:
    for asked in (None, ("encode", "generate")):
        assert "entry-points.left-out" not in rule_ids(evolve(cfg, entry_points=asked), FACTS)
    found = [f.what for f in check(evolve(cfg, entry_points=("encode",)), FACTS) if f.rule == "entry-points.left-out"]
    assert found == ([f"`generate` will not work as forward does on the prepared model: {why}."] if why else [])


@pytest.mark.parametrize(
    ("methods", "what"),
    [
        ((), "The model has no method `score` of its own."),
        (("encode",), "The model has no method `score` of its own; it has `encode`."),
    ],
)
def test_a_method_that_is_not_there_is_named_with_those_that_are(methods: tuple[str, ...], what: str) -> None:
    facts = tiny_facts(evolve(tiny_model(), methods=methods))
    assert finding_of("entry-points.unknown", Config(entry_points=("score",)), facts).what == what


@pytest.mark.parametrize(
    ("asked", "kept"), [(("encode", "score", "forward"), ("encode",)), (("score",), None), (None, None)]
)
def test_mending_leaves_out_the_methods_that_are_not_there(
    asked: tuple[str, ...] | None, kept: tuple[str, ...] | None
) -> None:
    assert mended("entry-points.unknown", Config(entry_points=asked), FACTS).entry_points == kept
