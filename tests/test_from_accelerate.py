"""``examples/from_accelerate``: a script with accelerate, one changed import, or prepkit; what each prints."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.gang import Gang

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "from_accelerate"


def printed(rank: int, world: int, script: str, folder: str) -> list[dict[str, float]]:
    """What a script prints as JSON on this rank."""
    del rank, world
    sys.path.insert(0, str(FOLDER.parent))
    sys.argv = [script, folder]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(script, run_name="__main__")
    if "accelerate.state" in sys.modules:  # it keeps what it saw of the launcher for the life of a process
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    return [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]


def one_import_changed(folder: Path) -> Path:
    """accelerate's form of the script, with prepkit's face of it."""
    theirs, ours = "from accelerate import Accelerator\n", "from prepkit.compat.accelerate import Accelerator\n"
    text = (FOLDER / "before.py").read_text()
    assert text.count(theirs) == 1
    (folder / "changed.py").write_text(text.replace(theirs, ours))
    return folder / "changed.py"


def test_the_script_with_one_changed_import_and_with_prepkit_prints_the_same_losses_also_where_it_goes_on(
    gang2: Gang, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    for steps in ([1, 2, 3, 4, 4, 5, 6, 7, 8, 8], [7, 8, 8]):  # then it goes on from step 6, inside the second epoch
        before, after, changed = (
            gang2.run_fresh(printed, str(script), str(tmp_path / script.stem))
            for script in (FOLDER / "before.py", FOLDER / "after.py", one_import_changed(tmp_path))
        )
        assert changed == before  # to the bit
        assert [line["step"] for line in after[0]] == steps
        assert [line.keys() for line in after[0]] == [line.keys() for line in before[0]]
        values = [[value for line in lines for value in line.values()] for lines in (after[0], before[0])]
        assert values[0] == pytest.approx(values[1], rel=1e-6)
        assert after[1] == before[1] == []
    lines = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert lines["after"] < 0.75 * lines["before"], lines
