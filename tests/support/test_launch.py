"""What starts scripts under torchrun: they meet on this machine whatever its name is, and none is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.support.launch import launch, torchrun

SLEEPS = "import time\ndef naps():\n    time.sleep(600)\nnaps()\n"
LAUNCHES = (
    "import subprocess, sys\n"
    "started = [subprocess.Popen([sys.executable, sys.argv[1]], start_new_session=True) for _ in range(2)]\n"
    "[one.wait() for one in started]\n"
)
"""Two workers in sessions of their own, as torchrun starts them, without the seconds that it takes to import torch."""


def test_workers_meet_at_this_machines_own_address(tmp_path: Path) -> None:
    script = tmp_path / "told.py"
    script.write_text("import os\nos.write(1, f\"meet at {os.environ['MASTER_ADDR']}\\n\".encode())\n")  # in one piece
    assert launch([*torchrun(2), str(script)], {}, timeout=100).count("meet at 127.0.0.1") == 2


def test_what_hangs_shows_its_stacks_and_is_gone(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(SLEEPS)
    with pytest.raises(AssertionError, match="still running after 2 s:") as refused:
        launch([sys.executable, "-c", LAUNCHES, str(script)], {}, timeout=2)
    assert str(refused.value).count("in naps") == 2
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(script) in (process.info["cmdline"] or ())
    ]


def test_a_failure_says_what_was_written() -> None:
    with pytest.raises(AssertionError, match="exit status 3:\nno such luck"):
        launch([sys.executable, "-c", "print('no such luck'); raise SystemExit(3)"], {}, timeout=60)
