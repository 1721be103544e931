"""What another library says while the user's model is imported."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from prepkit.cli.plan_files import build

MODULE = """
import logging
import torch

def model():
    log = logging.getLogger("torchao")
    log.warning("Failed to load _C_mxfp8.so: no such kernel")
    log.warning("something else")
    other = logging.getLogger("torch.utils._pytree")
    other.warning("%s is an Enum subclass and is now natively supported", "<enum 'Kind'>")
    other.warning("something else")
    return torch.nn.Linear(2, 2)
"""


def test_kernels_that_torchao_does_not_find_are_no_news_and_all_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers imports torchao, which would say it of every kernel and in every process."""
    (tmp_path / "logging_model.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    torchs = logging.getLogger("torch.utils._pytree")  # torch's loggers hand nothing on to the root
    torchs.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING):
            build("logging_model:model")
    finally:
        torchs.removeHandler(caplog.handler)
    told = {(record.name, record.getMessage()) for record in caplog.records}
    assert told == {("torchao", "something else"), ("torch.utils._pytree", "something else")}
