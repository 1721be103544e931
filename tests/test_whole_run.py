"""``examples/whole_run.py``, killed and gone on with; all engines and moments: ``tests.tools.killed_and_resumed``."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

import prepkit as pk
from tests.support.gang import Gang
from tests.support.launch import torchrun
from tests.support.patience import MOST, Patience
from tests.support.whole_run import EXAMPLES, STEPS, Kill, curve, difference, kill, train

CLOSE = 1e-5


def test_a_run_that_is_killed_goes_on_to_the_bit_and_under_another_engine_as_close_as_engines_are(
    gang2: Gang, tmp_path: Path
) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    gang2.run_fresh(train, "fsdp2", str(calm), None)
    assert {step for name, step in curve(calm) if name == "loss"} == set(range(1, STEPS + 1))
    kill(gang2, "fsdp2", killed, Kill(victims=(1,), when="saving", at=2, after_s=0.0))
    kill(gang2, "fsdp2", killed, Kill(victims=(0, 1), when="training", at=10, after_s=0.0))
    gang2.run_fresh(train, "fsdp2", str(killed), None)
    assert difference(curve(calm), curve(killed)) == 0.0
    elsewhere = tmp_path / "elsewhere"
    kill(gang2, "fsdp2", elsewhere, Kill(victims=(0,), when="training", at=10, after_s=0.0))
    gang2.run_fresh(train, "ddp", str(elsewhere), None)
    assert 0.0 < difference(curve(calm), curve(elsewhere)) < CLOSE


SLOW = f"""
import runpy, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import gpt

def get(self, index, get=gpt.StandardLibrary.__getitem__):
    time.sleep(0.02)
    return get(self, index)

gpt.StandardLibrary.__getitem__ = get
runpy.run_path({str(EXAMPLES / "whole_run.py")!r}, run_name="__main__")
"""
"""The script, with time to be killed in."""


def await_step(folder: Path, step: int, launched: psutil.Popen) -> None:
    log = folder / "log.jsonl"
    patience = Patience(180)
    while not (log.exists() and f'{{"step": {step}, ' in log.read_text()):
        assert launched.poll() is None, "it ended too early"
        assert patience.left() > 0, "it takes too long"
        time.sleep(0.002)


def launched(folder: Path, script: Path, act: Callable[[psutil.Popen], None]) -> tuple[int, str]:
    """Exit code and output of torchrun with one restart, to which ``act`` happens."""
    config = str(EXAMPLES / "engines" / "ddp.toml")
    command = [*torchrun(2), "--max-restarts", "1", "--monitor-interval", "0.1", str(script), config, str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES.parent}"}
    with (
        (folder.parent / "said").open("w+", errors="replace") as said,
        psutil.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT) as launcher,
    ):
        try:
            act(launcher)
            code = launcher.wait(90 * MOST)
        finally:
            for process in (*launcher.children(recursive=True), launcher) if launcher.is_running() else ():
                process.kill()
        said.seek(0)
        return code, said.read()


def test_torchrun_starts_a_killed_run_again_and_its_sigterm_saves_and_leaves(gang2: Gang, tmp_path: Path) -> None:
    script, folder = tmp_path / "slow.py", tmp_path / "run"
    script.write_text(SLOW)

    def act(launcher: psutil.Popen) -> None:
        await_step(folder, 7, launcher)
        workers = launcher.children()
        workers[1].kill()
        psutil.wait_procs(workers, 60)
        lines = (folder / "log.jsonl").read_text().count("\n")
        while (folder / "log.jsonl").read_text().count("\n") < lines + 2:
            assert launcher.poll() is None
            time.sleep(0.002)
        launcher.send_signal(signal.SIGTERM)

    code, said = launched(folder, script, act)
    assert (code, "exported" in said) == (1, False), said
    reached = max(step for _, step in curve(folder))
    saved = max(int(path.name.split("-")[2]) for path in folder.glob("*-step-*") if path.suffix != ".partial")
    assert saved == reached < STEPS, said
    gang2.run_fresh(train, "ddp", str(folder), None)
    gang2.run_fresh(train, "ddp", str(tmp_path / "calm"), None)
    assert difference(curve(tmp_path / "calm"), curve(folder)) == 0.0
    with pytest.raises(AssertionError):
        difference(curve(tmp_path / "calm"), {})


def test_a_run_goes_on_only_where_something_was_saved(tmp_path: Path) -> None:
    def prepared() -> pk.Prepared:
        return pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), torch.nn.Linear(2, 2)))

    folder = tmp_path / "run"
    ready = prepared()
    assert not ready.resume(str(folder), missing_ok=True)
    with pytest.raises(RuntimeError, match="there is no such folder"):
        ready.resume(str(folder))
    (folder / "000001-step-3-abcdef.partial").mkdir(parents=True)
    (folder / "log.jsonl").touch()
    assert not ready.resume(str(folder), missing_ok=True), "one that was never finished is nothing"
    ready.loop.steps = 5
    ready.save(str(folder))
    again = prepared()
    assert again.resume(str(folder), missing_ok=True)
    assert again.steps == 5
    (whole,) = folder.glob("*-step-5-*")
    (whole / "shared.pt").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"shared\.pt: it has 0 bytes"):
        again.resume(str(folder), missing_ok=True)
    for file in whole.iterdir():
        file.unlink()
    (folder / "latest").unlink()
    with pytest.raises(RuntimeError, match="holds no whole checkpoint"):
        again.resume(str(folder), missing_ok=True)
