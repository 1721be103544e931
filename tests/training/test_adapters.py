"""Adapters of peft are exported under the names that peft reads, whatever is checkpointed, and never as nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import prepkit as pk
from prepkit.objects import names
from prepkit.saving.failures import CheckpointFailed
from prepkit.training import export
from tests.support.gang import Gang

TOKENS = torch.arange(8)[None]


def with_adapters() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, use_cache=False))
    return get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))


def trained(engine: Any) -> Any:
    model = with_adapters()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    cfg = pk.Config(engine=engine, checkpointing=pk.CheckpointBlocks())
    ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer))
    ready.backward(ready.model(input_ids=TOKENS, labels=TOKENS).loss)
    assert ready.step()
    return ready


def whole(ready: Any) -> dict[str, torch.Tensor]:
    params = {
        name: param.detach() for name, param in names.named_parameters(ready.model).items() if param.requires_grad
    }
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in params.items()}


def exported(rank: int, world: int, engine: Any, folder: str) -> str:
    """Exports, checks the adapter's values on rank 0; what ``save_pretrained`` of the unwrapped one says."""
    del world
    ready = trained(engine)
    values = whole(ready)
    ready.export(f"{folder}/exported")
    if rank == 0:
        file = load_file(f"{folder}/exported/adapter_model.safetensors")
        assert len(file) == len(values) == 9
        for name, value in values.items():
            short = name.replace(".modules_to_save.default", "").replace(".default", "")
            torch.testing.assert_close(file[short], value, rtol=0, atol=0)
    try:
        ready.unwrap().save_pretrained(f"{folder}/unwrapped-{rank}")
    except RuntimeError as error:
        return str(error)
    assert len(load_file(f"{folder}/unwrapped-{rank}/adapter_model.safetensors")) == 9
    return ""


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP2()], ids=["ddp", "fsdp2"])
def test_an_adapter_over_checkpointed_blocks_is_written_whole(gang2: Gang, tmp_path: Path, engine: Any) -> None:
    pytest.importorskip("peft")
    for told in gang2.run(exported, engine, str(tmp_path), timeout=90):
        assert ("Call ready.export(folder) on every rank" in told) is isinstance(engine, pk.FSDP2)


class Forgetful(nn.Linear):
    """Writes some of what it is given."""

    def __init__(self, keeps: int) -> None:
        super().__init__(2, 2)
        self.keeps = keeps

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        save_file(dict(list(state_dict.items())[: self.keeps]), f"{folder}/model.safetensors")


def test_a_file_that_lacks_what_was_trained_is_refused(tmp_path: Path) -> None:
    model = Forgetful(2)
    export.write(tmp_path, model, model.state_dict())
    for keeps, text in (
        (1, "holds 1 tensor of 2 tensors that were to be written, and not `bias`"),
        (0, "holds 0 tensors"),
    ):
        with pytest.raises(CheckpointFailed, match=text):
            export.write(tmp_path, Forgetful(keeps), model.state_dict())
