"""That the table of transformers' types would show what is wrong, and a few of its rows."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.applying.rehearse import Rehearsal
from prepkit.findings import Finding, Severity
from tests.support import transformers_small as small
from tests.tools import transformers_types as types
from tests.tools.transformers_types import Row

pytestmark = pytest.mark.filterwarnings("ignore")

DRAWN = {
    "luke": ("as planned", "as planned"),
    "t5gemma": ("as planned", "as planned", "as planned"),
    "pop2piano": ("as planned", "as planned"),
    "gemma4_text": ("as planned", "as planned", "as planned"),
    "mixtral": ("as planned", "as planned", "refused"),
    "clip": ("as planned", "as planned"),
    "mamba": ("as planned", "as planned"),
    "sam_mask_decoder": ("not built",),
}


def test_some_types_are_planned_and_as_planned_or_refused_for_a_reason() -> None:
    found = list(types.rows(DRAWN))
    for kind, outcomes in DRAWN.items():
        mine = [row for row in found if row.kind == kind]
        assert tuple(row.outcome for row in mine) == outcomes, "\n".join(map(str, mine))
        assert all(row.why for row in mine)


def test_what_differs_crashes_or_is_refused_without_a_known_reason_is_unexplained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = types.rehearse_here

    def otherwise(*args: object, **kwargs: object) -> Rehearsal:
        seen = real(*args, **kwargs)  # type: ignore[arg-type]
        fault = Finding(rule="run.other-layout", severity=Severity.ERROR, where="model", what="planted", fix="again")
        return evolve(seen, differences=(fault,))

    monkeypatch.setattr(types, "rehearse_here", otherwise)
    assert types.main(["--only", "clip"]) == 1
    assert "clip | CLIPForImageClassification | DDP | differs" in (told := capsys.readouterr().out)
    assert "1 types, unexplained: 2" in told
    monkeypatch.setattr(types, "rehearse_here", lambda *_args, **_kwargs: 1 / 0)
    assert types.main(["--only", "clip"]) == 1
    assert "crashed | ZeroDivisionError" in capsys.readouterr().out
    assert not Row("llama", "", "", "not built", "KeyError: 'x'").why
    assert not Row("llama", "LlamaForCausalLM", "FSDP2", "refused", "tensor.tie-broken, units.empty").why
    assert types.main(["--only", "nosuchtype"]) == 2


def test_a_type_that_takes_too_long_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(kind: str) -> object:
        while True:
            pass

    monkeypatch.setattr(types, "LIMIT_S", 1)
    monkeypatch.setattr(types, "build", forever)
    (row,) = types.rows(["llama"])
    assert row.outcome == "not built"
    assert "TooLong" in row.detail
    assert not row.why


def test_a_small_model_has_few_layers_and_otherwise_its_own_sizes() -> None:
    model = small.build("llama")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.num_hidden_layers == 2
    assert model.config.hidden_size == 4096
    assert all(param.is_meta for param in model.parameters())
