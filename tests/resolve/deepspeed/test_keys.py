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


def test_every_section_is_known_or_open() -> None:
    maps = {
        f"{path}.{key}".strip(".")
        for path, keys in deepspeed_keys.SECTIONS.items()
        for key, kind in keys.items()
        if "map" in kind.split("|")
    }
    known = {*deepspeed_keys.SECTIONS, *deepspeed_keys.OPEN}
    assert maps - known == {"tensor_parallel.partition_config"}
    assert set(deepspeed_keys.OPEN) <= maps


def test_what_deepspeed_has_removed_is_what_it_refuses() -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="the extra prepkit[deepspeed] is not installed")
    refused = {f"zero_optimization.{key}" for key in runtime._REMOVED_ZERO_CONFIG_KEYS}
    assert set(deepspeed_keys.REMOVED) == refused | set(runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS)
