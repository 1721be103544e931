"""Each setting of a config arrives in the call of torch, torchao or DeepSpeed that does it, from the config on.

The plan is made from a config; the handler of the step is run on a real model; what the library is given is looked at,
or what the objects are afterwards. A planner that drops a setting fails the test of that setting: that is tried here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from returns.result import Failure
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DistributedSampler

import prepkit as pk
from prepkit import planner, steps
from prepkit.applying.handlers import checkpointing
from prepkit.config import DDP, FP8, ClipNorm, Config, DeepSpeed, LoadWeights, TorchAO
from prepkit.steps import Step
from tests.support import library_doubles
from tests.support.behaviour_rows import ROWS
from tests.support.behaviour_rows.answers import REACHED
from tests.support.behaviour_rows.settings import SETTINGS_OF
from tests.support.dropped_setting import NotPlannedError, Setting, dropping
from tests.support.library_calls import at, done, given
from tests.support.settings import FLOAT8, SETTINGS, ZERO
from tests.support.single_step import gloo_alone

# --- what is seen otherwise than in the arguments of one call ---


def paths(kind: type[Step]) -> Callable[[Setting], Any]:
    """Modules for which the library is called; none where the plan has no such step."""

    def look(setting: Setting) -> list[str]:
        with suppress(NotPlannedError):
            return [call["module"] for call in given(setting, kind)]
        return []

    return look


def after(place: str, *kinds: type[Step]) -> Callable[[Setting], Any]:
    """What the target holds at a place once the steps are done."""
    return lambda setting: at(done(setting, *kinds), place)


def loaders(look: Callable[[Any], Any]) -> Callable[[Setting], Any]:
    """What can be seen of the loader as it is handed out."""
    return lambda setting: look(done(setting, steps.ShardLoader, steps.WrapLoader).loaders[0])


def first(loader: Any) -> list[float]:
    """The first batch of rank 0."""
    return list(next(iter(loader))[0].tolist())


def source(setting: Setting) -> str:
    """What a loader reads from; the fake group of these tests has no groups beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "new_group", lambda **_: None)
        return loaders(lambda loader: type(loader.source).__name__)(setting)  # type: ignore[no-any-return]  # a name


def scales(setting: Setting) -> int:
    """Hooks after a step of the optimizer that compute scales."""
    pytest.importorskip("torchao")
    return len(done(setting, steps.PrecomputeFloat8Scales).optimizer._optimizer_step_post_hooks)  # type: ignore[union-attr]  # given


def powersgd_draw(setting: Setting) -> int:
    """The first number that PowerSGD draws."""
    return int(given(setting, steps.WrapDDP)[1]["state"].rng.randint(1 << 30))


def autocasted(place: str) -> Callable[[Setting], Any]:
    """What TransformerEngine's recipe was made of, and when it is on."""

    def look(setting: Setting) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            library_doubles.transformer_engine(patch)
            forward = vars(done(setting, steps.AutocastFP8Forward).model)["forward"]
        return at(
            {"recipe": type(forward.recipe).__name__, "during": forward.during_eval, **forward.recipe.said}, place
        )

    return look


def norm(setting: Setting) -> str:
    """Library of the norm after the conversion."""
    with pytest.MonkeyPatch.context() as patch:
        library_doubles.transformer_engine(patch)
        model = done(setting, steps.ConvertTransformerEngine).model
    return type(model.get_submodule("norm")).__module__.partition(".")[0]


def moved_by_xla(setting: Setting) -> list[Any]:
    """What torch_xla is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        calls = library_doubles.torch_xla(patch)
        done(setting, steps.MoveToXLA)
    return [call[0] for call in calls]


def leaves(setting: Setting) -> list[str]:
    """Modules that DeepSpeed gathers whole."""
    model = done(setting, steps.MarkLeafModules).model
    return [name for name, module in model.named_modules() if getattr(module, "_z3_leaf", False)]


def refusals(setting: Setting) -> tuple[str, ...]:
    """Ids of the findings that refuse the config."""
    made = planner.plan(setting.asked, setting.facts)
    return tuple(one.rule for one in made.failure()) if isinstance(made, Failure) else ()


# --- what is seen in training, in one process ---


def prepared(cfg: Config) -> Any:
    """A model of one weight of 1.0 in one process, its optimizer with a rate of 1, and a schedule by tenths."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 0.1**tick)
    return pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, scheduler=schedule))


def forward(ready: Any) -> Any:
    ready.backward(ready.model(torch.full((1, 1), 8.0)).sum())
    return ready


def window(setting: Setting) -> int:
    """Micro-batches until the optimizer has stepped."""
    ready = prepared(setting.asked)
    return next((micro for micro in range(1, 9) if forward(ready).step()), 0)


def weight(setting: Setting) -> float:
    """The weight after a step with a gradient of 8."""
    ready = forward(prepared(setting.asked))
    ready.step()
    return round(float(ready.model.weight), 6)


def rate(setting: Setting) -> float:
    """The rate after a step."""
    ready = forward(prepared(setting.asked))
    ready.step()
    return round(float(ready.optimizer.param_groups[0]["lr"]), 6)


def averages(setting: Setting) -> list[bool]:
    """Whether DDP averages, in each of the two micro-batches of a window."""
    with gloo_alone():
        ready, seen = prepared(setting.asked), []
        for _ in range(2):
            forward(ready)
            seen.append(bool(ready.model.reducer is not None and ready.model.require_backward_grad_sync))
            ready.step()
    return seen


def loaded(setting: Setting) -> float:
    """The weight where a file has 5.0."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.safetensors")
        save_file({"weight": torch.full((1, 1), 5.0)}, path)
        return float(prepared(evolve(setting.asked, weights=LoadWeights(path))).model.weight)


# --- the table ---


@frozen
class Reach:
    """A setting, where the library has to see it, and as what."""

    setting: str
    look: Callable[[Setting], Any]
    value: Any
    asked: Setting | None = None
    """None: that of ``SETTINGS``."""

    def seen(self) -> Any:
        return self.look(self.asked or ASKED[self.setting])


def call(kind: type[Step], **seen: tuple[str, Any]) -> Iterable[Reach]:
    """``Class__field=(place, value)`` of settings that the library of a kind of step is given."""
    for name, (place, value) in seen.items():
        yield Reach(name.replace("__", "."), lambda asked, place=place: at(given(asked, kind), place), value)


def own(name: str, cfg: Config, facts: Any = FLOAT8) -> Setting:
    """A config other than that of ``SETTINGS``."""
    return Setting(name, cfg, facts, "", None)


ASKED = {one.name: one for one in reversed(SETTINGS)}
SHUFFLED = [float(at) for at in DistributedSampler(range(63), 1, 0, shuffle=True, seed=7)]  # type: ignore[arg-type]  # a sequence
ROWWISE = Config(engine=DDP(), precision=FP8(backend=TorchAO(recipe="rowwise")))

REACHES: tuple[Reach, ...] = (
    *call(
        steps.ShardUnits,
        FSDP2__reshard_after_forward=("0.reshard_after_forward", 2),
        FSDP2__offload=("0.offload_policy.__class__", CPUOffloadPolicy),
        OffloadToCPU__pin_memory=("0.offload_policy.pin_memory", False),
        FSDP2__cast_forward_inputs=("0.mp_policy.cast_forward_inputs", False),
        FSDP2__wrap=("0.module", "head"),
        FSDP2__ignored=("0.ignored_params", ["head.weight"]),
        WrapClasses__names=("1.module", "layers.1"),
        WrapClasses__paths=("2.module", "head"),
        WrapPaths__patterns=("0.module", "layers.0"),
        WrapSize__min_params=("0.module", "layers.0"),
        BF16__reduce_dtype=("0.mp_policy.reduce_dtype", torch.bfloat16),
        FP16__reduce_dtype=("0.mp_policy.reduce_dtype", torch.float16),
        BF16__output_dtype=("2.mp_policy.output_dtype", torch.bfloat16),
        FP16__output_dtype=("2.mp_policy.output_dtype", torch.float16),
        FP8__output_dtype=("2.mp_policy.output_dtype", torch.bfloat16),
        Config__precision=("0.mp_policy.param_dtype", torch.bfloat16),
    ),
    *call(
        steps.WrapFSDP1,
        FSDP1__sharding=("0.sharding_strategy", ShardingStrategy.SHARD_GRAD_OP),
        FSDP1__offload=("0.cpu_offload.offload_params", True),
        FSDP1__backward_prefetch=("0.backward_prefetch", None),
        FSDP1__forward_prefetch=("0.forward_prefetch", True),
        FSDP1__limit_all_gathers=("0.limit_all_gathers", False),
        FSDP1__use_orig_params=("0.use_orig_params", False),
        FSDP1__sync_module_states=("0.sync_module_states", True),
        FSDP1__cast_forward_inputs=("0.mixed_precision.cast_forward_inputs", True),
        FSDP1__cast_root_forward_inputs=("0.mixed_precision.cast_root_forward_inputs", False),
        FSDP1__buffer_dtype=("0.mixed_precision.buffer_dtype", torch.bfloat16),
        FSDP1__wrap=("1.module", ""),
        FSDP1__ignored=("0.ignored_states", ["head"]),
    ),
    *call(
        steps.WrapDDP,
        Config__engine=("0.static_graph", False),
        DDP__broadcast_buffers=("0.broadcast_buffers", False),
        DDP__bucket_cap_mb=("0.bucket_cap_mb", 5.0),
        DDP__find_unused_parameters=("0.find_unused_parameters", True),
        DDP__gradient_as_bucket_view=("0.gradient_as_bucket_view", False),
        DDP__static_graph=("0.static_graph", True),
        DDP__hook=("1.hook.__name__", "fp16_compress_hook"),
        CompressHook__dtype=("1.hook.__name__", "fp16_compress_hook"),
        PowerSGDHook__rank=("1.state.matrix_approximation_rank", 4),
        PowerSGDHook__start_iter=("1.state.start_powerSGD_iter", 10),
        PowerSGDHook__min_compression_rate=("1.state.min_compression_rate", 3.0),
        PowerSGDHook__use_error_feedback=("1.state.use_error_feedback", False),
        PowerSGDHook__warm_start=("1.state.warm_start", False),
        PowerSGDHook__orthogonalization_epsilon=("1.state.orthogonalization_epsilon", 1e-8),
        PowerSGDHook__batch_tensors_with_same_shape=("1.state.batch_tensors_with_same_shape", True),
        PowerSGDHook__wrapper=("1.hook.__name__", "fp16_compress_wrapper_hook"),
    ),
    *call(
        steps.CreateGradScaler,
        FP16__init_scale=("0.init_scale", 128.0),
        FP16__growth_factor=("0.growth_factor", 3.0),
        FP16__backoff_factor=("0.backoff_factor", 0.25),
        FP16__growth_interval=("0.growth_interval", 5),
    ),
    *call(
        steps.CompileModules,
        **{
            f"{kind}__{name}": (f"0.{place}", value)
            for kind in ("CompileModel", "CompileBlocks")
            for name, place, value in (
                ("backend", "backend", "eager"),
                ("mode", "mode", "max-autotune"),
                ("fullgraph", "fullgraph", True),
                ("dynamic", "dynamic", True),
                ("options", "options.max_autotune", True),
                ("recompile_limit", "recompile_limit", 3),
                ("isolate_recompiles", "isolate_recompiles", True),
            )
        },
        Config__compile=("0.module", ""),
        CompileOption__name=("0.options.max_autotune", True),
        CompileOption__value=("0.options.max_autotune", True),
    ),
    *call(
        steps.CheckpointModules,
        Config__checkpointing=("1.module", "layers.1"),
        CheckpointBlocks__preserve_rng_state=("0.preserve_rng_state", False),
        CheckpointBlocks__offload=("0.checkpoint_fn", checkpointing.offloaded),
        CheckpointBlocks__every=("0.module", "layers.1"),
    ),
    *call(
        steps.ConvertFP8Linears,
        TorchAO__recipe=("0.config.cast_config_input.scaling_granularity.name", "AXISWISE"),
        TorchAO__pad_inner_dim=("0.config.pad_inner_dim", False),
        TorchAO__emulate=("0.config.emulate", True),
        TorchAO__float8_all_gather=("0.config.enable_fsdp_float8_all_gather", False),
        TorchAO__keep_first_and_last=("0.module", "layers.0.attn"),
        TorchAO__skip=("0.module", "layers.1.attn"),
    ),
    Reach("TorchAO.precompute_scales", scales, 0),
    *call(
        steps.ParallelizeModules,
        Config__tp_plan=("1.module", "layers.1.attn"),
        TPPlan__layers=("1.module", "layers.1.attn"),
        TPLayer__pattern=("1.module", "layers.1.attn"),
        TPLayer__style=("0.style.__class__", ColwiseParallel),
        TPLayer__input_layout=("0.style.input_layouts.0", Shard(1)),
        TPLayer__output_layout=("0.style.output_layouts.0", Replicate()),
    ),
    *call(
        steps.BuildMesh,
        Config__mesh=("0.sizes.1", 2),
        Mesh__replicate=("0.sizes.0", 2),
        Mesh__shard=("0.sizes.1", 2),
        Mesh__tensor=("0.sizes.1", 2),
    ),
    *call(
        steps.StartProcessGroup,
        Config__backend=("0.backend", "gloo"),
        Config__timeout_s=("0.timeout", timedelta(seconds=7.0)),
    ),
    *call(steps.MoveModel, Config__device=("0.device.type", "cpu")),
    *call(
        steps.InitializeDeepSpeed,
        DeepSpeed__stage=("0.config.zero_optimization.stage", 3),
        DeepSpeed__offload_optimizer=("0.config.zero_optimization.offload_optimizer.device", "cpu"),
        DeepSpeed__offload_param=("0.config.zero_optimization.offload_param.device", "cpu"),
        DeepSpeed__micro_batch=("0.config.train_micro_batch_size_per_gpu", 2),
        DeepSpeed__micro_batch_of=("0.config.train_micro_batch_size_per_gpu", 8),
        DeepSpeed__config=("0.config.steps_per_print", 7),
        DeepSpeed__schedule=("0.config.scheduler.params.warmup_num_steps", 3),
        Schedule__warmup_steps=("0.config.scheduler.params.warmup_num_steps", 3),
        Schedule__total_steps=("0.config.scheduler.params.total_num_steps", 11),
        Schedule__min_lr=("0.config.scheduler.params.warmup_min_lr", 0.25),
        Schedule__max_lr=("0.config.scheduler.params.warmup_max_lr", 0.5),
    ),
    *call(steps.InitializeMSAMP, MSAMP__opt_level=("0.opt_level", "O1")),
    Reach(
        "FP8.backend",
        lambda asked: at(given(asked, steps.ConvertFP8Linears), "0.config.cast_config_input.scaling_granularity.name"),
        *("AXISWISE", own("FP8.backend", ROWWISE)),
    ),
    *(
        Reach(f"{name}.{key}", autocasted(at), value)
        for name, key, at, value in (
            ("TransformerEngine", "recipe", "recipe", "MXFP8BlockScaling"),
            ("TransformerEngine", "autocast_during_eval", "during", True),
            ("DelayedScaling", "margin", "margin", 2),
            ("DelayedScaling", "fp8_format", "fp8_format", "E4M3"),
            ("DelayedScaling", "interval", "interval", 2),
            ("DelayedScaling", "amax_history_len", "amax_history_len", 16),
            ("DelayedScaling", "amax_compute_algo", "amax_compute_algo", "most_recent"),
            ("DelayedScaling", "override_linear_precision", "override_linear_precision", (True, False, False)),
            ("MXFP8BlockScaling", "margin", "margin", 2),
            ("MXFP8BlockScaling", "fp8_format", "fp8_format", "HYBRID"),
        )
    ),
    Reach("TransformerEngine.convert_norms", norm, "torch"),
    Reach("TransformerEngine.skip", norm, "torch"),
    Reach("PowerSGDHook.random_seed", powersgd_draw, int(np.random.RandomState(7).randint(1 << 30))),
    Reach("CheckpointBlocks.blocks", paths(steps.CheckpointModules), ["layers.0"]),
    Reach("CompileBlocks.blocks", paths(steps.CompileModules), ["layers.0"]),
    Reach("Config.intent", paths(steps.WrapDDP), []),
    *call(steps.WrapDDP, Config__keep_device_map=("0.device_ids", None)),
    *(
        Reach(f"{kind}.master_weights", after("model.embed.weight.dtype", steps.UpcastParameters), torch.bfloat16)
        for kind in ("BF16", "FP16", "FP8")
    ),
    Reach("XLA.forked", moved_by_xla, ["xla_device", "MpModelWrapper.to"]),
    Reach("DeepSpeed.leaf_modules", leaves, ["layers.0", "layers.1"]),
    Reach(
        "Config.clip",
        lambda asked: at(given(asked, steps.InitializeDeepSpeed), "0.config.gradient_clipping"),
        *(0.5, own("Config.clip", Config(engine=DeepSpeed(stage=2), clip=ClipNorm(0.5)), ZERO)),
    ),
    Reach(
        "Config.accumulation",
        lambda asked: at(given(asked, steps.InitializeDeepSpeed), "0.config.gradient_accumulation_steps"),
        *(3, own("Config.accumulation", Config(engine=DeepSpeed(stage=2), accumulation=3), ZERO)),
    ),
    # --- loaders ---
    Reach("ShardLoaders.split_batches", loaders(lambda loader: len(first(loader))), 2),
    Reach("ShardLoaders.drop_last", loaders(lambda loader: sum(len(batch) for (batch,) in loader)), 31),
    Reach("ShardLoaders.dispatch", source, "DispatchedSource"),
    *(
        Reach(name, loaders(first), SHUFFLED[:4])
        for name in ("ShardLoaders.seed", "Config.loaders", "EachLoader.choices")
    ),
    *(
        Reach(f"{kind}.{name}", loaders(lambda loader, at=at: getattr(loader, at)), value)
        for kind in ("ShardLoaders", "KeepLoaders")
        for name, at, value in (
            ("purpose", "evaluation", True),
            ("to_device", "device", None),
            ("ends_window", "ends_window", False),
        )
    ),
    # --- training ---
    Reach("Config.accumulation", window, 3),
    Reach("Config.clip", weight, 0.5),
    Reach("Config.scheduler_ticks", rate, 0.001),
    Reach("Config.total_steps", refusals, ("scheduler.runs-out",)),
    Reach(
        "Config.average_each",
        averages,
        [True, True],
        own("Config.average_each", Config(engine=DDP(), accumulation=2, average_each=True)),
    ),
    Reach("Config.weights", loaded, 5.0, own("Config.weights", Config())),
    Reach("LoadWeights.path", loaded, 5.0, own("LoadWeights.path", Config())),
)


def label(reach: Reach) -> str:
    return reach.setting


@pytest.mark.parametrize("reach", REACHES, ids=label)
def test_a_setting_reaches_what_the_library_is_given(reach: Reach) -> None:
    assert reach.seen() == reach.value


@pytest.mark.parametrize("reach", REACHES, ids=label)
def test_a_planner_that_drops_the_setting_gives_the_library_another(reach: Reach) -> None:
    with dropping(reach.setting) as met:
        try:
            seen = reach.seen()
        except (NotPlannedError, pk.errors.PlanRejected):
            seen = NotPlannedError
    assert met[reach.setting], f"the config leaves {reach.setting} at its default"
    assert seen != reach.value


def test_every_setting_of_a_row_is_proven_from_the_config() -> None:
    proven = {reach.setting for reach in REACHES}
    assert {row: left for row, names in SETTINGS_OF.items() if (left := set(names) - proven)} == {}
    assert [row for row in SETTINGS_OF if REACHED not in ROWS[row]] == []
