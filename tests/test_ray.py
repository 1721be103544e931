"""``examples/ray_train.py``, where Ray is installed: it takes a minute, most of which is Ray's start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "ray_train.py"


@pytest.mark.timeout(400)
def test_ray_starts_the_workers_and_prepkit_prepares_in_each(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    command = [sys.executable, str(EXAMPLE), "--steps", "8", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"8 steps on 2 workers; the last loss is [34]\.", done.stdout)
    (saved,) = (tmp_path / "checkpoint").glob("*-step-8-*")
    assert len(list(saved.glob("rank-*.pt"))) == 2
