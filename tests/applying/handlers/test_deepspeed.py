"""DeepSpeed for real on two CPU processes: what it learns is what plain torch learns, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from prepkit import config
from prepkit.api import apply
from prepkit.applying.handlers.deepspeed import _cast_parts
from prepkit.config import (
    BF16,
    DDP,
    CheckpointBlocks,
    ClipNorm,
    CompileBlocks,
    CompileModel,
    Config,
    DeepSpeed,
    Intent,
    Schedule,
)
from prepkit.objects import names
from prepkit.observe import observe
from prepkit.plan import Plan
from prepkit.planner import plan
from prepkit.training.prepared import Prepared
from tests.support.deepspeed_cpu import kernel_built, lean
from tests.support.drawn_training import found_by_proof
from tests.support.fragile_model import WORDS, Tiny
from tests.support.gang import Gang

pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.int64])
def test_parts_are_cast_where_they_hold_numbers_and_the_parameter_is_divided(dtype: torch.dtype) -> None:
    divided, whole = (nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False) for _ in range(2))
    divided.ds_tensor = torch.zeros(4, dtype=dtype)  # type: ignore[attr-defined]  # as DeepSpeed does
    _cast_parts((divided, whole), torch.bfloat16)
    cast = torch.bfloat16 if dtype.is_floating_point else dtype
    assert (divided.dtype, divided.ds_tensor.dtype, whole.dtype) == (cast, cast, dtype)  # type: ignore[attr-defined]


WINDOWS, MICRO = 4, 2
BASE = Config(engine=DeepSpeed(micro_batch=2), accumulation=MICRO, clip=ClipNorm(0.05))


def batches() -> Tensor:
    """Token ids of shape (windows, micro-batches, samples of both ranks, length)."""
    return torch.randint(WORDS, (WINDOWS, MICRO, 4, 5), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tools(cfg: Config, model: nn.Module, *, scheduled: bool) -> dict[str, Any]:
    """An optimizer in two groups and its scheduler, unless the config makes them."""
    if cfg.optimizer is not None or cfg.intent is Intent.INFERENCE:
        return {}
    held = [param for param in model.parameters() if param.requires_grad]
    # A large eps: with a small one, gradients that are zero but for rounding become full-sized updates.
    optimizer = AdamW([{"params": held[:3]}, {"params": held[3:], "lr": 2e-2}], lr=1e-2, eps=1e-4)
    return {"optimizer": optimizer} | ({"scheduler": StepLR(optimizer, 1, 0.5)} if scheduled else {})


def prepare(
    cfg: Config, dtype: torch.dtype = torch.float32, *, scheduled: bool = True, prove: int = 0, **more: Any
) -> Prepared:
    lean()
    torch.manual_seed(7)
    model = Tiny(dtype)
    given = tools(cfg, model, scheduled=scheduled) | more
    made: Plan = plan(cfg, observe(model, **given).facts).unwrap()
    return apply(made, model=model, prove=prove, **given)


def mean(loss: Tensor) -> float:
    value = loss.detach().clone().float()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


Curve = tuple[list[float], list[float], list[bool], list[float], list[float] | None]


def curve(rank: int, world: int, cfg: Config, **how: Any) -> Curve:
    """Losses and norms of a short training, which micro-batches stepped, rates, and those of the scheduler."""
    ready = prepare(cfg, **how)
    losses, norms, stepped = [], [], []
    for window in batches():
        for tokens in window:
            loss = loss_of(ready.model, tokens.chunk(world)[rank])
            ready.backward(loss)
            stepped.append(ready.step())
            losses.append(mean(loss))
        norms.append(float("nan") if ready.grad_norm is None else float(ready.grad_norm))
    assert ready.optimizer is not None
    rates = [group["lr"] for group in ready.optimizer.param_groups]
    said = None if ready.scheduler is None else list(ready.scheduler.get_last_lr())
    return losses, norms, stepped, rates, said


def engine(cfg: Config, **changes: Any) -> Config:
    assert isinstance(cfg.engine, DeepSpeed)
    return evolve(cfg, engine=evolve(cfg.engine, **changes))


def proven(rank: int, world: int, cfg: Config, **how: Any) -> tuple[list[str], list[bool], list[float], Any]:
    """What proofs of two windows find, which micro-batches stepped, rates, and those of the scheduler."""
    ready = prepare(cfg, prove=2, **how)
    stepped = []
    for tokens in batches()[:2].flatten(0, 1):
        ready.backward(loss_of(ready.model, tokens.chunk(world)[rank]))
        stepped.append(ready.step())
    assert ready.optimizer is not None
    rates = [group["lr"] for group in ready.optimizer.param_groups]
    return found_by_proof(ready), stepped, rates, None if ready.scheduler is None else ready.scheduler.get_last_lr()


STEPS = [False, True] * 2
RATES = [1e-2 / 4, 2e-2 / 4]
"""After two steps of a scheduler that halves."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_learns_what_torch_learns_with_accumulation_clipping_and_a_scheduler(
    gang2: Gang, stage: int
) -> None:
    assert gang2.run(proven, engine(BASE, stage=stage), timeout=120) == [([], STEPS, RATES, RATES)] * 2


def overflowed(rank: int, world: int) -> tuple[list[bool], bool, int]:
    """Which micro-batches of a window stepped, whether it was skipped, and all steps, where the engine applied none."""
    ready: Any = prepare(engine(BASE, stage=1))
    ready.model.was_step_applied = lambda: False  # as after an overflow, which float16 alone has
    stepped = []
    for tokens in batches()[0]:
        ready.backward(loss_of(ready.model, tokens.chunk(world)[rank]))
        stepped.append(ready.step())
    return stepped, ready.skipped, ready.steps


def test_a_window_whose_step_the_engine_skips_is_told_as_skipped(gang2: Gang) -> None:
    assert gang2.run(overflowed, timeout=120) == [([False, False], True, 0)] * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_in_bfloat16_is_that_of_torch_but_for_rounding(gang2: Gang, stage: int) -> None:
    cfg = evolve(engine(BASE, stage=stage), precision=BF16())
    assert gang2.run(proven, cfg, timeout=120) == [([], STEPS, RATES, RATES)] * 2


def test_offloaded_state_is_stepped_by_torch_where_the_user_wants_so(gang2: Gang) -> None:
    cfg = engine(BASE, stage=2, offload_optimizer="cpu", config={"zero_force_ds_cpu_optimizer": False})
    assert gang2.run(proven, cfg, timeout=120) == [([], STEPS, RATES, RATES)] * 2


@pytest.mark.skipif(not kernel_built("cpu_adam"), reason="cpu_adam is not compiled; PREPKIT_BUILD_OPS=1 lets it")
@pytest.mark.parametrize("stage", [1, 3])
def test_offloaded_state_is_stepped_by_deepspeeds_own_adam(gang2: Gang, stage: int) -> None:
    """Against DDP's losses: its kernel rounds otherwise than torch's step, by which a proof compares."""
    wanted = gang2.run(curve, evolve(BASE, engine=DDP()))[0]
    for found in gang2.run(curve, engine(BASE, stage=stage, offload_optimizer="cpu"), timeout=280):
        assert found[0] == pytest.approx(wanted[0], rel=1e-4)
        assert found[1] == pytest.approx(wanted[1], rel=1e-4)
        assert found[2:] == wanted[2:]


def one_rate(cfg: Config) -> Config:
    return evolve(cfg, optimizer=config.AdamW(lr=1e-2, eps=1e-4, weight_decay=0.01))


SECTIONS = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto", "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_optimizer_and_scheduler_of_the_config_are_made_and_stepped_by_deepspeed(gang2: Gang, stage: int) -> None:
    cfg = engine(one_rate(BASE), stage=stage, config=SECTIONS, schedule=Schedule(warmup_steps=3))
    found = gang2.run(curve, cfg, timeout=120)
    assert found[0] == found[1]
    losses, _, stepped, rates, said = found[0]
    assert losses[-1] < losses[0]
    assert stepped == [False, True] * WINDOWS
    assert rates == said == [pytest.approx(1e-2)]


def test_an_optimizer_that_the_config_specifies_is_created_and_handed_over(gang2: Gang) -> None:
    for found, stepped, rates, _ in gang2.run(proven, engine(one_rate(BASE), stage=1), timeout=120):
        assert (found, stepped, rates) == ([], STEPS, [1e-2])


def made(rank: int, world: int, cfg: Config) -> tuple[int, list[float]]:
    """How often a scheduler that a function makes was stepped, and the rates then."""
    ready = prepare(cfg, scheduled=False, scheduler=halving)
    for window in batches():
        for tokens in window:
            ready.backward(loss_of(ready.model, tokens.chunk(world)[rank]))
            ready.step()
    assert ready.optimizer is not None
    return ready.scheduler.last_epoch, [group["lr"] for group in ready.optimizer.param_groups]


def halving(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1, 0.5)


def test_a_function_makes_the_scheduler_which_deepspeed_then_steps(gang2: Gang) -> None:
    for found in gang2.run(made, engine(BASE, stage=2), timeout=120):
        assert found == (WINDOWS, [1e-2 * 0.5**WINDOWS, 2e-2 * 0.5**WINDOWS])


# --- windows, compilation, inference -------------------------------------------------------------------------------


def cut_short(rank: int, world: int, cfg: Config) -> tuple[list[bool], list[str]]:
    """A window of three micro-batches that ends after two, then a full one; what their proofs find."""
    ready = prepare(cfg, prove=2)
    stepped = []
    for index, tokens in enumerate(batches().flatten(0, 1)[:5]):
        with ready.accumulate(last=index == 1):
            ready.backward(loss_of(ready.model, tokens.chunk(world)[rank]))
            stepped.append(ready.step())
    return stepped, found_by_proof(ready)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_window_that_ends_early_loses_no_micro_batch(gang2: Gang, stage: int) -> None:
    cfg = engine(evolve(BASE, accumulation=3), stage=stage)
    assert gang2.run(cut_short, cfg, timeout=120) == [([False, True, False, False, True], [])] * 2


@pytest.mark.parametrize("compiled", [CompileModel(backend="eager"), CompileBlocks(backend="eager")])
def test_checkpointed_blocks_and_compilation_after_initialising_change_nothing(
    gang2: Gang, compiled: config.Compile
) -> None:
    cfg = evolve(engine(BASE, stage=2), compile=compiled, checkpointing=CheckpointBlocks())
    assert gang2.run(proven, cfg, timeout=120) == [([], STEPS, RATES, RATES)] * 2


def looked_at(rank: int, world: int, cfg: Config) -> tuple[str, list[float]]:
    torch.manual_seed(7)
    plain = Tiny()(batches()[0, 0])
    ready = prepare(cfg)
    with torch.no_grad():
        return type(ready.model).__name__, (ready.model(batches()[0, 0]) - plain).abs().amax().reshape(1).tolist()


@pytest.mark.parametrize("stage", [0, 3])
def test_inference_shards_the_parameters_without_an_optimizer(gang2: Gang, stage: int) -> None:
    cfg = evolve(engine(BASE, stage=stage), intent=Intent.INFERENCE, clip=None)
    for name, gap in gang2.run(looked_at, cfg, timeout=120):
        assert name == "DeepSpeedEngine"
        assert gap == [pytest.approx(0.0, abs=1e-6)]


def loaded(rank: int, world: int) -> tuple[int, int, int, int]:
    """Micro and global batch that DeepSpeed has, and what the loader gives to a rank."""
    loader = DataLoader(list(range(24)), batch_size=3)
    ready = prepare(engine(BASE, micro_batch=None), loaders=(loader,))
    model: Any = ready.model
    batch = next(iter(ready.loaders[0]))
    return model.train_micro_batch_size_per_gpu(), model.train_batch_size(), len(batch), len(ready.loaders[0])


def test_the_micro_batch_is_that_of_the_loader(gang2: Gang) -> None:
    assert gang2.run(loaded, timeout=120) == [(3, 3 * MICRO * 2, 3, 4)] * 2


def again(rank: int, world: int) -> tuple[str, ...]:
    ready = prepare(engine(BASE, stage=1))
    seen = observe(ready.model, env=None).facts
    return tuple(finding.rule for finding in plan(BASE, seen).failure())


def test_preparing_an_engine_again_is_refused(gang2: Gang) -> None:
    for found in gang2.run(again, timeout=120):
        assert "model.already-wrapped" in found


# --- models of transformers ----------------------------------------------------------------------------------------


def tensor_parallel(rank: int, world: int, stage: int) -> tuple[int, list[float]]:
    """The global batch, and the losses of a Llama whose layers DeepSpeed splits over both ranks."""
    from tests.support.transformers_models import build

    lean()
    torch.manual_seed(1)
    model, batch = build("llama")
    asked = {"tensor_parallel": {"autotp_size": 2}}
    cfg = Config(engine=DeepSpeed(stage=stage, micro_batch=4, config=asked), clip=ClipNorm(1.0))
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    made = plan(cfg, observe(model, optimizer=optimizer).facts).unwrap()
    ready = apply(made, model=model, optimizer=optimizer)
    assert "model.layers.0.mlp.gate_proj.weight" in names.named_parameters(ready.model)
    return ready.model.train_batch_size(), steps(ready, batch)


def steps(ready: Prepared, batch: dict[str, Tensor]) -> list[float]:
    losses = []
    for _ in range(3):
        loss = ready.model(**batch).loss
        ready.backward(loss)
        ready.step()
        losses.append(float(loss.detach()))
    return losses


def with_a_small_group(rank: int, world: int, stage: int) -> list[float]:
    """Losses where one group of the optimizer is the bias of the head alone, of which DeepSpeed writes in its steps."""
    lean()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    *most, last = model.parameters()
    given = AdamW([{"params": most}, {"params": [last], "lr": 1e-3}], lr=1e-2)
    cfg = Config(engine=DeepSpeed(stage=stage, micro_batch=2) if stage else DDP())
    ready = apply(plan(cfg, observe(model, optimizer=given).facts).unwrap(), model=model, optimizer=given)
    return small_steps(ready, rank, world)


def small_steps(ready: Prepared, rank: int, world: int) -> list[float]:
    losses = []
    for rows in torch.randn(4, 2 * world, 8, generator=torch.Generator().manual_seed(1)):
        loss = ready.model(rows.chunk(world)[rank]).square().mean()
        ready.backward(loss)
        ready.step()
        losses.append(mean(loss))
    return losses


@pytest.mark.parametrize("stage", [1, 2])
def test_a_group_whose_elements_the_engine_writes_anew_trains_as_under_ddp(gang2: Gang, stage: int) -> None:
    found = gang2.run(with_a_small_group, stage, timeout=60)
    assert found == [pytest.approx(one, rel=1e-5) for one in gang2.run(with_a_small_group, 0, timeout=60)]


def alone() -> list[float]:
    """The same Llama in one process."""
    from tests.support.transformers_models import build

    torch.manual_seed(1)
    model, batch = build("llama")
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    made = plan(Config(clip=ClipNorm(1.0)), observe(model, optimizer=optimizer).facts).unwrap()
    return steps(apply(made, model=model, optimizer=optimizer), batch)


def test_a_model_that_deepspeed_splits_learns_what_one_process_learns(gang2: Gang) -> None:
    wanted = alone()
    for batch, losses in gang2.run(tensor_parallel, 1, timeout=180):
        assert batch == 4, "both ranks hold one model, so they see the same samples"
        assert losses == pytest.approx(wanted, rel=1e-4)


def told(rank: int, world: int) -> tuple[int, bool]:
    """The stage of a prepared model, and whether transformers has heard of it: then it divides what it loads next."""
    del rank, world
    from transformers.integrations import is_deepspeed_zero3_enabled

    ready = prepare(engine(BASE, stage=3))
    return ready.model.zero_optimization_stage(), is_deepspeed_zero3_enabled()


def test_transformers_is_told_nothing_of_the_engine_and_goes_on_building_whole_models(gang2: Gang) -> None:
    assert gang2.run(told, timeout=120) == [(3, False)] * 2


def with_experts(rank: int, world: int) -> tuple[bool, list[float]]:
    """A mixture of experts under ZeRO-3 whose blocks are gathered whole; ranks see different data."""
    from tests.support.transformers_models import build

    lean()
    model, batch = build("mixtral")
    engine_ = DeepSpeed(stage=3, micro_batch=2, leaf_modules=("MixtralSparseMoeBlock",))
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    made = plan(Config(engine=engine_), observe(model, optimizer=optimizer).facts).unwrap()
    ready = apply(made, model=model, optimizer=optimizer)
    part = {name: tensor.chunk(world)[rank] for name, tensor in batch.items()}
    leaves = [m for m in ready.model.modules() if getattr(m, "_z3_leaf", False)]
    return len(leaves) == 2, steps(ready, part)


def test_blocks_of_experts_are_gathered_whole(gang2: Gang) -> None:
    for marked, losses in gang2.run(with_experts, timeout=180):
        assert marked
        assert losses[-1] < losses[0]


def under_zero_init(rank: int, world: int) -> tuple[tuple[int, ...], list[str], list[float]]:
    """A model whose parameters were never whole: its facts, its findings under DDP, and its losses."""
    lean()
    import deepspeed

    from prepkit.objects.deepspeed import forget_groups
    from prepkit.ranks.launcher import name_local_rank

    forget_groups()
    asked = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    torch.manual_seed(7)
    name_local_rank()
    deepspeed.init_distributed(dist_init_required=False)
    with deepspeed.zero.Init(config_dict_or_path=asked):
        model = Tiny()
    cfg = Config(engine=DeepSpeed(config=asked))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    facts = observe(model, optimizer=optimizer).facts
    (embedding,) = (param for param in facts.model.params if param.name == "embed.weight")
    refused = [finding.rule for finding in plan(Config(engine=DDP()), facts).failure()]
    ready = apply(plan(cfg, facts).unwrap(), model=model, optimizer=optimizer)
    losses = []
    for tokens in batches().flatten(0, 1):
        loss = loss_of(ready.model, tokens.chunk(world)[rank])
        ready.backward(loss)
        ready.step()
        losses.append(mean(loss))
    return embedding.shape, refused, losses


def test_a_model_built_under_zero_init_is_planned_by_its_real_sizes_and_trained(gang2: Gang) -> None:
    for shape, refused, losses in gang2.run(under_zero_init, timeout=180):
        assert shape == (WORDS, 6)
        assert "deepspeed.zero-init" in refused
        assert losses[-1] < losses[0]
