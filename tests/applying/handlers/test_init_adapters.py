"""An adapter that the files lack begins as peft begins it: the model computes what its base does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import prepkit as pk
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang
from tests.support.meta_models import on_meta, saved
from tests.support.transformers_models import build

pytest.importorskip("peft", reason="peft is not installed")

RENAME = (("^", "base_model.model."), (r"(q_proj|v_proj)[.]weight$", r"\1.base_layer.weight"))


def adapted(**how: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        return get_peft_model(on_meta("llama")[0], LoraConfig(target_modules=["q_proj", "v_proj"], **how))


def config(path: str, engine: pk.Engine) -> pk.Config:
    loads = pk.LoadWeights(path, rename=RENAME)
    return pk.Config(engine=engine, weights=loads, optimizer=pk.optim.AdamW(), overrides=("weights.missing-keys",))


def moved(rank: int, world: int, cfg: pk.Config, how: dict[str, Any]) -> tuple[float, float]:
    """How far the loss is from that of the base before the first step, and after it."""
    if isinstance(cfg.engine, pk.DeepSpeed):
        lean()
    base, batch = build("llama")
    share = {key: value.chunk(world)[rank] for key, value in batch.items()}
    expected = float(base(**share).loss.detach())
    ready = pk.apply(pk.build_plan(evolve(cfg, optimizer=pk.optim.AdamW(lr=0.1)), adapted(**how)))
    before = ready.model(**share).loss
    ready.backward(before)
    assert ready.step()
    return abs(float(before.detach()) - expected), abs(float(ready.model(**share).loss.detach()) - expected)


@pytest.mark.parametrize("how", [{}, {"init_lora_weights": "gaussian"}], ids=str)
def test_a_new_adapter_changes_nothing_until_it_is_trained(tmp_path: Path, how: dict[str, Any]) -> None:
    before, after = moved(0, 1, config(saved(tmp_path, "llama"), pk.Single()), how)
    assert before < 1e-6 < 1e-3 < after


@pytest.mark.parametrize("engine", [pk.FSDP1(), pk.FSDP2(), pk.DeepSpeed(stage=3, micro_batch=2)], ids=str)
def test_a_new_adapter_changes_nothing_when_its_base_is_sharded(gang2: Gang, tmp_path: Path, engine: pk.Engine) -> None:
    if isinstance(engine, pk.DeepSpeed):
        pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
    for before, after in gang2.run(moved, config(saved(tmp_path, "llama"), engine), {}, timeout=60):
        assert before < 1e-5 < 1e-3 < after


def test_an_adapter_that_is_made_from_its_base_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    model = adapted(init_lora_weights=True)
    model.peft_config["default"].init_lora_weights = "pissa"  # peft itself would look for the values
    with pytest.raises(pk.errors.ApplyHalted) as halted:
        pk.apply(pk.build_plan(config(saved(tmp_path, "llama"), pk.Single()), model))
    assert "q_proj.lora_A.default.weight: init_lora_weights='pissa' is made from the values of the base" in str(
        halted.value
    )
    assert "nothing was changed" in str(halted.value)
