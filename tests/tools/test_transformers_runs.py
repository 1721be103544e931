"""A few rows of the table of language models that train, and that the table would show what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prepkit.training.prepared import Prepared
from tests.support import resumed_runs
from tests.support.gang import Gang
from tests.support.resumed_runs import CLOSE, DIFFERS, EQUAL, Run, compare, differences
from tests.tools import transformers_runs as runs
from tests.tools.transformers_runs import Row

pytestmark = pytest.mark.filterwarnings("ignore")

DRAWN = ("gpt2", "mixtral", "t5")


def test_some_types_saved_and_resumed_under_fsdp2_train_as_they_do_under_ddp(gang2: Gang) -> None:
    found = list(runs.rows(gang2, DRAWN))
    assert [(row.kind, row.outcome) for row in found] == [(kind, EQUAL) for kind in DRAWN], "\n".join(map(str, found))
    assert all(0 <= gap <= CLOSE for row in found for gap in (row.loss, row.norm, row.weights))
    assert "3 types, 3 equal" in (told := runs.summary(found))
    assert "unexplained: 0" in told


def with_the_weights_alone(rank: int, world: int, kind: str, folder: str) -> Any:
    """``compare`` with a resume that forgets the state of the optimizer."""
    whole = Prepared.resume

    def resume(ready: Prepared, place: str) -> bool:
        return whole(ready, place, only_model=True)

    resumed_runs.SAVED_AFTER, Prepared.resume = 2, resume  # type: ignore[method-assign, assignment]
    try:
        return compare(rank, world, kind, folder)
    finally:
        resumed_runs.SAVED_AFTER, Prepared.resume = 10, whole  # type: ignore[method-assign]


def test_a_resume_that_forgets_the_optimizer_differs_from_the_first_step_after_it(gang2: Gang, tmp_path: Path) -> None:
    (outcome, detail, (loss, _, weights)), _ = gang2.run(with_the_weights_alone, "gpt2", str(tmp_path / "saved"))
    assert outcome == DIFFERS
    assert "loss from step [3]" in detail
    assert loss > CLOSE
    assert weights > CLOSE
    assert not Row(kind="gpt2", outcome=outcome, detail=detail).why


def test_what_is_not_a_number_on_one_side_alone_is_a_difference() -> None:
    def run(loss: float, weight: float) -> Run:
        return Run(torch.tensor([1.0, loss]), torch.ones(2), {"weight": torch.tensor([weight, 2.0])})

    assert differences(run(2.0, 1.0), run(2.0, 1.0)) == (0.0, 0.0, 0.0)
    assert differences(run(2.0, 1.0), run(float("nan"), 3.0)) == (float("inf"), 0.0, 1.0)
    with pytest.raises(AssertionError, match="names differ"):
        differences(run(2.0, 1.0), Run(torch.ones(2), torch.ones(2), {}))


def test_what_fails_for_no_known_reason_is_unexplained_and_ends_the_command_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert runs.main(["--only", "nosuchtype"]) == 2
    failed = Row(kind="llama", outcome="failed", detail="ZeroDivisionError")
    monkeypatch.setattr(runs, "rows", lambda _gang, asked: (failed for _ in asked))
    assert runs.main(["--only", "llama", "--into", str(tmp_path)]) == 1
    assert "unexplained: 1\nllama: failed: ZeroDivisionError" in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} of a run -->\nold\n<!-- end of {name} -->\n" for name in ("counts", "rows")))
    monkeypatch.setattr(runs, "rows", lambda _gang, asked: [1 / 0 for _ in asked])
    kept = runs.main(["--only", "llama", "--into", str(tmp_path), "--page", str(page)])
    assert kept == 1, "the row that is kept is not done again"
    assert "old" not in page.read_text()
    assert "| failed | 1 | `llama` |" in page.read_text()
    assert "| `llama` | failed: ZeroDivisionError |" in page.read_text()
