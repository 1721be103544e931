"""The scenarios of ``tests.tools.gpu``, one test each."""

from __future__ import annotations

import pytest
import torch

from tests.tools import gpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", gpu.SCENARIOS)
def test_what_only_a_gpu_can_show(name: str) -> None:
    try:
        assert gpu.run(name)
    except gpu.Skipped as why:
        pytest.skip(str(why))


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_without_a_gpu_the_script_says_that_it_skips(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main() == 0
    assert capsys.readouterr().out == "skipped: torch sees no CUDA device\n"


def test_the_scenarios_train_on_the_cpu_as_far_as_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the script is not run for the first time where a GPU is lent for minutes."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module: module)
    monkeypatch.setattr(gpu, "tokens", lambda: torch.arange(16).reshape(2, 8))  # bfloat16 is slow on a CPU
    for name in ("bf16 autocast", "fsdp2 over nccl", "fsdp2 with sent weights"):
        assert "loss" in gpu.run(name)
    assert gpu.run("fsdp2 for inference") == "all on cpu"
