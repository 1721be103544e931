"""Methods that run as the forward does: averaged, gathered and in its precision, under every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import prepkit as pk
from prepkit.objects import names
from prepkit.plan import Plan
from prepkit.steps import RegisterEntryPoints
from tests.support.gang import Gang


class Towers(nn.Module):
    """Two ways in, and parameters that belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = nn.functional.linear(x, self.head.weight)  # past the head's own forward
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).tanh()


ENGINES: dict[str, Any] = {
    "Single": pk.Single(),
    "DDP": pk.DDP(),
    "FSDP1": pk.FSDP1(wrap=pk.wrap.WrapPaths(("layers.*",))),
    "FSDP2": pk.FSDP2(wrap=pk.wrap.WrapPaths(("layers.*",))),
    "ZeRO 2": pk.DeepSpeed(stage=2, micro_batch=2),
    "ZeRO 3": pk.DeepSpeed(stage=3, micro_batch=2),
}


def trained(rank: int, world: int, engine: str) -> tuple[list[float], Any, bool]:
    """Outputs of the forward after two steps on ``features`` of this rank's half of the batch."""
    torch.manual_seed(0)
    if engine.startswith("ZeRO"):
        from tests.support.deepspeed_cpu import lean

        lean()
    cfg = pk.Config(engine=ENGINES[engine], optimizer=pk.optim.SGD(lr=0.1), entry_points=("features",))
    ready = pk.apply(pk.build_plan(cfg, Towers()))
    batch = torch.arange(16.0).reshape(4, 4) / 16
    for _ in range(2):
        with torch.no_grad():
            ready.model.features(batch)  # an evaluation in between
        ready.backward(ready.model.features(batch.chunk(world)[rank]).square().mean())
        assert ready.step()
    with torch.no_grad():
        out = ready.model(batch)
        inside: Any = names.unwrap_root(ready.model)[-1]
        own = "forward" in vars(inside)
    return out.flatten().tolist(), ready.model.features(batch).shape, own


@pytest.mark.parametrize("engine", ["DDP", "FSDP1", "FSDP2", "ZeRO 2", "ZeRO 3"])
def test_training_through_another_method_equals_one_process(gang2: Gang, engine: str) -> None:
    expected, shape, _ = trained(0, 1, "Single")
    for found, found_shape, patched in gang2.run(trained, engine, timeout=90):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert found_shape == shape
        assert not patched or engine.startswith("ZeRO")


def planned(model: nn.Module, engine: Any, **options: Any) -> tuple[RegisterEntryPoints, ...]:
    env = pk.Env.declare(world_size=2, device="cpu", torch=torch.__version__)
    plan: Plan = pk.build_plan(pk.Config(engine=engine, intent=pk.Intent.INFERENCE, **options), model, env=env)
    return tuple(one.step for one in plan.steps if isinstance(one.step, RegisterEntryPoints))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, eos_token_id=None, pad_token_id=0))


def test_well_known_methods_are_entry_points_unless_others_are_named() -> None:
    (step,) = planned(llama(), pk.FSDP2())
    assert (step.names, step.through, step.in_step) == (("generate",), "units", True)
    assert planned(llama(), pk.FSDP2(), entry_points=()) == ()
    assert planned(llama(), pk.DDP()) == ()  # inference has no wrapper
    assert [step.through for step in planned(llama(), pk.DDP(), precision=pk.BF16())] == ["forward"]
    assert [step.names for step in planned(Towers(), pk.FSDP2())] == [("features",)]


def generated(rank: int, world: int, engine: Any) -> tuple[list[int], list[int], float]:
    """Tokens of prompts of this rank's own length, those of the model before, and the loss of a step afterwards."""
    del world
    model = llama()
    prompt, more = torch.arange(1, 4)[None], 2 + 3 * rank
    expected = model.generate(prompt, max_new_tokens=more, do_sample=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ready: Any = pk.apply(pk.build_plan(pk.Config(engine=engine), model, optimizer=optimizer))
    made = ready.model.generate(prompt, max_new_tokens=more, do_sample=False)
    loss = ready.model(input_ids=prompt, labels=prompt).loss
    ready.backward(loss)
    assert ready.step()
    return made[0].tolist(), expected[0].tolist(), float(loss)


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP1(), pk.FSDP2()], ids=["ddp", "fsdp1", "fsdp2"])
def test_generate_runs_on_ranks_with_other_lengths_and_training_goes_on(gang2: Gang, engine: Any) -> None:
    for made, expected, loss in gang2.run(generated, engine, timeout=60):
        assert made == expected
        assert loss > 0


def test_a_method_runs_in_the_precision_of_the_forward_and_unwrap_gives_it_back() -> None:
    model = Towers()
    cfg = pk.Config(precision=pk.BF16(), intent=pk.Intent.INFERENCE, entry_points=("features",))
    ready: Any = pk.apply(pk.build_plan(cfg, model))
    batch = torch.rand(4, 4)
    assert torch.equal(ready.model.features(batch).tanh(), ready.model(batch))
    bare: Any = ready.unwrap(keep_autocast=False, keep_compiled=False)
    assert not torch.equal(bare.features(batch).tanh(), torch.zeros(4, 4))
    assert "features" not in vars(bare)
