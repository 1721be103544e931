"""accelerate and prepkit over the same file and model: a part of ``python -m tests.tools.differential``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import evolve

from tests.differential.case import Case
from tests.differential.deviations import CHANGES, OURS, ROUNDING, THEIRS, judged
from tests.differential.grid import ENGINES, drawn, grid
from tests.differential.seen import Seen
from tests.support.gang import Gang
from tests.tools.differential import verdicts

pytestmark = pytest.mark.differential
PART = (
    *(Case(engine="ddp", compiled="whole"), *drawn("ddp", 1, 1)),
    *(Case(engine="fsdp2", wrap="class", precision="bf16", checkpointing=True), *drawn("fsdp2", 1, 1)),
    *(Case(engine="fsdp1", wrap="class", precision="bf16", optimizer="SGD"), *drawn("fsdp1", 1, 1)),
    Case(engine="fsdp2", wrap="size"),
)
"""Cases that take seconds together. DeepSpeed is in the command alone: importing it takes as long as all of these."""


def test_each_difference_of_a_part_of_the_grid_has_a_row_of_the_deviations(gang2: Gang, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = {str(case): verdict for case, verdict in verdicts(PART, {2: gang2}, tmp_path)}
    assert {name: verdict.unexplained for name, verdict in found.items()} == dict.fromkeys(found, ())
    assert found["ddp whole"].rows == ("K-H1",)
    assert set(found[str(PART[2])].rows) == {"M2-11", "G-52", "H-16", "G-29"}
    assert found["fsdp2 size"].rows == ("H-12b, G-8",)


# --- the judge -------------------------------------------------------------------------------------------------------

_DDP = {
    "DistributedDataParallel of": [""],
    "DistributedDataParallel[].gradient_as_bucket_view": False,
    "DistributedDataParallel[].static_graph": False,
    "loss[0]": 2.5,
}


def _with(**changes: object) -> Seen:
    return Seen(table={**_DDP, **{f"DistributedDataParallel[].{key}": value for key, value in changes.items()}})


def test_a_row_explains_its_own_values_and_no_others() -> None:
    theirs, case = Seen(table=dict(_DDP)), Case(engine="ddp")
    assert judged(case, theirs, _with(gradient_as_bucket_view=True)).rows == ("K-H1",)
    assert judged(case, theirs, _with(gradient_as_bucket_view=True)).unexplained == ()
    lines = judged(case, theirs, _with(gradient_as_bucket_view=True, static_graph=True)).unexplained
    assert lines == ("DistributedDataParallel[].static_graph: False | True",)
    assert judged(case, theirs, _with(gradient_as_bucket_view=False)).unexplained  # the row says what has to be there
    assert judged(case, _with(gradient_as_bucket_view=None), _with(gradient_as_bucket_view=True)).unexplained


def test_a_loss_that_is_apart_or_a_call_that_is_missing_is_told() -> None:
    theirs, case = Seen(table={"compile of": ["head"], "loss[1]": 2.0}), Case()
    assert judged(case, theirs, evolve(theirs, table={"compile of": ["head"], "loss[1]": 2.0 + 1e-7})).unexplained == ()
    assert judged(case, theirs, evolve(theirs, table={"compile of": ["head"], "loss[1]": 2.0001})).unexplained
    assert judged(case, theirs, evolve(theirs, table={"loss[1]": 2.0})).unexplained == ("compile of: ['head'] | none",)


def test_a_loss_after_rounded_gradients_is_near_and_no_more() -> None:
    case = Case(engine="zero2", precision="bf16")
    theirs = Seen(table={"loss[0]": 2.0, "loss[1]": 2.0, "loss[2]": 2.0})
    fp32 = {"deepspeed.initialize.config.communication_data_type": "fp32"}
    fp32["deepspeed.initialize.config.data_types.grad_accum_dtype"] = "fp32"
    for apart, number in ((2.0 * (1 + ROUNDING / 2), 0), (2.0 * (1 + 2 * ROUNDING), 1)):
        assert len(judged(case, theirs, Seen(table={**theirs.table, **fp32, "loss[2]": apart})).unexplained) == number
    assert judged(case, theirs, Seen(table={**theirs.table, **fp32, "loss[0]": 2.001})).unexplained


def test_a_refusal_of_one_alone_needs_a_row_for_this_case_and_this_reason() -> None:
    trains = Seen(table={})
    assert judged(Case(precision="fp16"), trains, Seen(refused="precision.fp16-unsupported")).rows == ("ST-24, G-44",)
    assert judged(Case(precision="bf16"), trains, Seen(refused="precision.fp16-unsupported")).unexplained
    assert judged(Case(precision="fp16"), trains, Seen(refused="model.no-weights")).unexplained
    assert judged(
        Case(engine="fsdp2"), Seen(refused="TypeError: 'NoneType' object is not callable"), trains
    ).unexplained
    fails, rule = Seen(refused="RuntimeError: x"), Seen(refused="fp8.unsupported-device")
    assert judged(Case(engine="zero2", precision="fp8"), fails, rule).both_refuse
    assert judged(Case(engine="zero2"), fails, fails).unexplained  # that both end in an error of torch is no agreement


def test_the_rows_that_explain_stand_in_the_page_of_deviations() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "deviations.md").read_text()
    rows = {
        cell for line in page.splitlines() if line.startswith("| ") for cell in re.split(r", ", line.split(" | ")[0])
    }
    rows = {cell.strip("| ") for cell in rows}
    named = {name for one in (*CHANGES, *THEIRS, *OURS) for name in one.row.split(", ")}
    assert named <= rows, named - rows


def test_the_grid_has_every_two_settings_of_each_engine_once() -> None:
    for engine in ENGINES:
        cases = grid(engine) + drawn(engine, 3, 0)
        assert len(cases) == len(set(cases)) > 30
        assert {case.engine for case in cases} == {engine}
    assert Case(engine="fsdp1", wrap="class", checkpointing=True) in grid("fsdp1")
