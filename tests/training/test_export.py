"""What is exported is loaded again in the dtype in which it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from prepkit.training.export import write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_master_weights_of_a_model_that_computes_in_bfloat16_are_loaded_as_they_are(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)).to(torch.bfloat16)
    masters = {name: value.to(dtype) + torch.rand(value.shape).to(dtype) for name, value in model.state_dict().items()}
    masters["lm_head.weight"] = masters["transformer.wte.weight"]
    write(tmp_path, model, masters)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == dtype
    assert all(torch.equal(value, masters[name]) for name, value in again.state_dict().items())
