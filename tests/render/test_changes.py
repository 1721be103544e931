"""The changes between two plans as text."""

from __future__ import annotations

from attrs import evolve

from prepkit.codec.diff import diff
from prepkit.config import (
    DDP,
)
from prepkit.plan import Planned
from prepkit.render.changes import diff_text
from prepkit.steps import (
    CheckpointModules,
)
from tests.support.plans import assert_rendered, ddp_plan, fsdp2_plan, make


def test_a_diff_reads_as_its_golden_text() -> None:
    made = fsdp2_plan()
    other = evolve(made.config, engine=DDP(), mesh=None, accumulation=1)
    assert_rendered("diff", diff_text(diff(made, make(other, made.facts))))


def test_a_diff_of_the_same_change_everywhere_is_one_line() -> None:
    made = ddp_plan()
    lower = evolve(made, layout=tuple(evolve(one, dtype="bfloat16") for one in made.layout))
    assert diff_text(diff(made, lower)) == ("layout.0..7.dtype (8 places): 'float32' -> 'bfloat16'\n8 differences")


def test_changes_of_other_values_at_like_places_stay_apart() -> None:
    made = ddp_plan()
    dtypes = ("float16", "bfloat16", "float16", *["float32"] * 5)
    other = evolve(made, layout=tuple(evolve(p, dtype=d) for p, d in zip(made.layout, dtypes, strict=True)))
    assert diff_text(diff(made, other)) == (
        "layout.0,2.dtype (2 places): 'float32' -> 'float16'\nlayout[1].dtype: 'float32' -> 'bfloat16'\n3 differences"
    )


def test_a_diff_of_an_inserted_step_shows_what_the_step_does() -> None:
    made = ddp_plan()
    step = Planned(step=CheckpointModules(paths=("blocks.0", "blocks.1"), preserve_rng_state=True), reason="why not")
    longer = evolve(made, steps=(*made.steps[:2], step, *made.steps[2:]))
    assert diff_text(diff(made, longer)) == ("steps[2]:\n  + CheckpointModules  blocks.0..1 (2 modules)\n1 difference")
    assert diff_text(diff(longer, made)).splitlines()[1].startswith("  - CheckpointModules")


def test_equal_plans_have_no_difference_to_show() -> None:
    assert diff_text(diff(ddp_plan(), ddp_plan())) == "the plans are equal"
