"""Ranges of a file that end within what is read at a time, and go on behind it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from prepkit.applying.handlers import read_weights
from prepkit.plan.byte_ranges import Range


def test_a_range_that_is_read_in_two_goes_on_where_it_stopped_and_no_further(tmp_path: Path) -> None:
    """Bytes 2 to 6, then 20 to 25, three at a time: what lies between them is nobody's."""
    file = tmp_path / "bytes"
    file.write_bytes(bytes(range(64)))
    descriptor = os.open(file, os.O_RDONLY)
    ahead = [Range(start=20, length=6), Range(start=2, length=5)]  # the next one last
    read = []
    try:
        for size in (3, 3, 5):
            into = torch.zeros(size, dtype=torch.uint8)
            read_weights._read(ahead, into, descriptor)
            read += into.tolist()
        assert ahead == []
        with pytest.raises(read_weights.Misread, match="the plan reads 0 bytes of 1"):
            read_weights._read(ahead, torch.zeros(1, dtype=torch.uint8), descriptor)
    finally:
        os.close(descriptor)
    assert read == [2, 3, 4, 5, 6, *range(20, 26)]
