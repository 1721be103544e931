"""The table of DeepSpeed's keys is that of the DeepSpeed that is installed."""

from __future__ import annotations

import pytest

from prepkit.resolve.deepspeed import keys as deepspeed_keys
from tests.tools.deepspeed_keys import FILE, sections, text


def test_the_table_is_what_the_installed_deepspeed_gives() -> None:
    deepspeed = pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
    if deepspeed.__version__ != deepspeed_keys.VERSION:
        pytest.skip(f"DeepSpeed {deepspeed.__version__} is here, the table is of {deepspeed_keys.VERSION}")
    assert sections() == deepspeed_keys.SECTIONS
    assert text() == FILE.read_text(), "type: python -m tests.tools.deepspeed_keys"


def test_the_table_knows_sections_keys_and_types() -> None:
    table = deepspeed_keys.SECTIONS
    assert table[""]["gradient_clipping"] == "float"
    assert table["zero_optimization"]["stage3_prefetch_bucket_size"] == "int"
    assert table["zero_optimization.offload_optimizer"]["device"] == "text"
    kinds = {part for keys in table.values() for kind in keys.values() for part in kind.split("|")}
    assert kinds == {"bool", "int", "float", "text", "list", "map", "any"}
