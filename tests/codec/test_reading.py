"""What is named as a file may be a pipe: it is read where somebody writes, and waited for no longer than a limit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import prepkit as pk
from prepkit import codec
from prepkit.codec import text as reading
from prepkit.findings import PlanRejected
from prepkit.formats.importers import native
from prepkit.formats.stored_weights import observe_checkpoint


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reading, "PIPE_S", 0.3)
    path = tmp_path / "pipe.toml"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("read", [codec.load_plan, native.read_config, pk.load], ids=["plan", "config", "either"])
def test_a_pipe_that_nobody_writes_to_is_refused_after_a_while(pipe: Path, read: Callable[[str], object]) -> None:
    began = time.monotonic()
    with pytest.raises(PlanRejected, match="it is a pipe, and whoever writes to it was not done"):
        read(str(pipe))
    assert time.monotonic() - began < 60


def test_a_checkpoint_that_is_a_pipe_is_refused_at_once(pipe: Path) -> None:
    (problem,) = observe_checkpoint(str(pipe)).problems
    assert "no regular file" in problem.what


def test_a_pipe_with_a_writer_is_read_to_its_end_and_no_further_than_asked(pipe: Path) -> None:
    text = b"engine = { kind = 'DDP' }\n"
    for most in (len(text) + 1, 10):
        writer = threading.Thread(target=pipe.write_bytes, args=(text,), daemon=True)
        writer.start()
        assert reading.read_bytes(pipe, most) == text[:most]
        writer.join()


def test_a_pipe_that_has_delivered_what_was_asked_for_is_not_waited_for(pipe: Path) -> None:
    with pipe.open("w+b", buffering=0) as writer:
        writer.write(b"0123456789")
        assert reading.read_bytes(pipe, 10) == b"0123456789"
