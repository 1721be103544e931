"""One place refuses and warns while a model is prepared, trained, saved and audited."""

from __future__ import annotations

import warnings

import pytest
import torch

from prepkit.court import HOME, Court
from prepkit.findings import Finding, FindingWarning, RunRefused, Severity
from prepkit.rules import LAW, by_id, due
from prepkit.rules.rule import Moment


def _finding(rule: str, severity: Severity, where: str = "model") -> Finding:
    return Finding(rule=rule, severity=severity, where=where, what="It is odd.", fix="Mend it.")


ERROR = next(rule.id for rule in LAW if rule.severity is Severity.ERROR and rule.overridable)
HARD = next(rule.id for rule in LAW if rule.severity is Severity.ERROR and not rule.overridable)


def test_every_rule_is_due_at_its_moments_and_found_by_its_id() -> None:
    assert {rule.id for moment in Moment for rule in due(moment)} == set(by_id()) == {rule.id for rule in LAW}
    assert len(by_id()) == len(LAW)


def test_an_error_refuses_with_every_error_of_the_moment() -> None:
    with pytest.raises(RunRefused) as refused:
        Court().hear((_finding(ERROR, Severity.ERROR), _finding(HARD, Severity.ERROR)))
    assert [finding.rule for finding in refused.value.findings] == [ERROR, HARD]


def test_an_error_that_is_overridden_passes_and_is_recorded_once() -> None:
    court = Court(accepted=(ERROR,))
    for _ in range(2):
        court.hear((_finding(ERROR, Severity.ERROR),))
    assert court.overridden == [ERROR]


@pytest.mark.parametrize("rule", [HARD, "no.such-rule"])
def test_an_error_that_cannot_be_overridden_refuses_all_the_same(rule: str) -> None:
    with pytest.raises(RunRefused, match=rule):
        Court(accepted=(rule,)).hear((_finding(rule, Severity.ERROR),))


def test_a_warning_is_reported_once_per_place_at_the_line_of_the_caller() -> None:
    court = Court()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for where in ("model", "model", "optimizer"):
            court.hear((_finding(ERROR, Severity.WARNING, where),))
    assert [(one.category, one.filename) for one in caught] == [(FindingWarning, __file__)] * 2
    assert str(caught[0].message).startswith(f"warning {ERROR} at model: It is odd.")


def test_rank_1_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Court().hear((_finding(ERROR, Severity.WARNING),))


def test_a_warning_from_a_hook_of_torch_s_points_at_what_called_torch() -> None:
    model = torch.nn.Linear(2, 2)
    namespace = {"hear": Court().hear, "finding": _finding(ERROR, Severity.WARNING)}
    hear = eval(compile("lambda *_: hear((finding,))", HOME + "/hook.py", "eval"), namespace)
    model.register_forward_pre_hook(hear)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(1, 2))
    assert [one.filename for one in caught] == [__file__]
