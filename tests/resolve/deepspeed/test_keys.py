"""The table of DeepSpeed's keys is that of the DeepSpeed that is installed."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, cast

import pytest
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from pydantic import ValidationError

from prepkit.resolve.deepspeed import keys as deepspeed_keys
from prepkit.resolve.deepspeed.schema import PARSED
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


def test_deepspeed_reads_text_in_these_sections_and_its_callers_do_not() -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="the extra prepkit[deepspeed] is not installed")
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    words = {"bool": ("true", "perhaps"), "int": ("1", "1e3"), "float": ("0.5", "half")}
    beside = "zero_optimization.offload_optimizer"  # which asks more of what it has read
    for section, keys in deepspeed_keys.SECTIONS.items():
        if section.partition(".")[0] not in PARSED or section == beside:
            continue
        for key, kinds in keys.items():
            if kinds not in words or "master_weights" in key or "optimizer_states" in key:
                continue
            for word, taken in zip(words[kinds], (True, False), strict=True):
                path = [*section.split("."), key]
                data = functools.reduce(lambda inner, name: {name: inner}, reversed(path), cast("Any", word))
                with nullcontext() if taken else pytest.raises(ValidationError):
                    runtime.DeepSpeedConfig(sizes | data)
    stage = {"zero_optimization": {"stage": "3"}}
    assert (runtime.DeepSpeedConfig(sizes | stage).zero_config.stage, HfDeepSpeedConfig(stage).is_zero3()) == (3, False)
