"""Every error that a running program meets is shown to do harm, or says why no test shows it."""

from __future__ import annotations

import ast
from pathlib import Path

from prepkit.findings import Severity
from prepkit.rules import LAW
from prepkit.rules.rule import Moment
from tests.audit.harms import HARMS
from tests.audit.harms_in_torch import SLIPS
from tests.audit.harms_of_ranks import HARMS_OF_RANKS
from tests.audit.slips_of_ranks import SLIPS_OF_RANKS
from tests.proving.test_harms import PROOF_HARMS
from tests.saving.test_harms import RESUME_HARMS
from tests.training.loop_harms import LOOP_HARMS
from tests.training.loop_harms_of_ranks import DEEPSPEED_HARMS, LOOP_HARMS_OF_RANKS

ROOT = Path(__file__).resolve().parent
EARLY = {Moment.PLAN, Moment.PLANNED, Moment.FORWARD}

TABLES = (
    *(HARMS, HARMS_OF_RANKS, SLIPS, SLIPS_OF_RANKS),
    *(LOOP_HARMS, LOOP_HARMS_OF_RANKS, RESUME_HARMS, PROOF_HARMS),
)

ELSEWHERE = {
    "checkpoint.folders-differ": "saving/test_harms.py::test_what_ranks_write_to_folders_of_their_own_cannot_be_read",
    "run.gradients-waited-for": (
        "training/test_first_step.py::test_ddp_waits_for_what_trains_also_where_nobody_steps_it"
    ),
}
"""Shown by a test of another kind."""

_APPLY = "what apply has left is not what the plan says; tests/support/planted_faults.py makes it wrong for real"
UNSHOWN = {
    "loop.weighed-on-some-ranks": "a hang: ranks that weigh wait for the tokens of those that do not",
    "run.gradients-misplaced": "torch takes no such gradient from Python",
    "run.other-layout": _APPLY,
    "run.values-changed": _APPLY,
    "run.other-owners": _APPLY,
    "run.step-undone": _APPLY,
}
"""Errors without a number here, and why."""


def errors() -> set[str]:
    """The errors of the moments after a plan that a look asks."""
    asked = (rule for rule in LAW if not rule.told_by and not set(rule.at) & EARLY)
    return {rule.id for rule in asked if rule.severity is Severity.ERROR}


def test_every_error_of_a_running_program_is_shown_to_do_harm_or_says_why_not() -> None:
    shown = ({harm.rule for table in TABLES for harm in table} | DEEPSPEED_HARMS.keys()) & errors()
    assert shown | set(ELSEWHERE) | set(UNSHOWN) == errors()
    assert not shown & (set(ELSEWHERE) | set(UNSHOWN))
    assert len(UNSHOWN) <= 6, "an error without harm is a warning"


def test_what_is_shown_elsewhere_is_there() -> None:
    for cited in ELSEWHERE.values():
        file, _, test = cited.partition("::")
        names = {one.name for one in ast.parse((ROOT / file).read_text()).body if isinstance(one, ast.FunctionDef)}
        assert test in names, cited
