"""Each kind of step in one line."""

from __future__ import annotations

from typing import get_args

import pytest
from attrs import evolve

from prepkit.plan.step_text import effect
from prepkit.steps import (
    Agree,
    AllocateTensors,
    AutocastForward,
    AutocastFP8Forward,
    AverageGradients,
    Axis,
    BackendOption,
    BuildMesh,
    CastForward,
    CheckFiles,
    CheckpointModules,
    Chunk,
    CompileModules,
    ConvertFP8Linears,
    ConvertOptimizer,
    ConvertSyncBatchNorm,
    ConvertTransformerEngine,
    CreateGradScaler,
    CreateOptimizer,
    DDPCommHook,
    File,
    FileSlice,
    FlatUnit,
    InitializeDeepSpeed,
    InitializeMSAMP,
    InitializeTensors,
    LocalDevice,
    MakeContiguous,
    MarkLeafModules,
    MoveModel,
    MoveToXLA,
    OptimizerOption,
    ParallelizeModules,
    ParallelStyle,
    PartitionParameters,
    PowerSGDOptions,
    PrecomputeFloat8Scales,
    ReadTensors,
    RebindOptimizer,
    ReduceXLAGradients,
    RegisterEntryPoints,
    RegroupOptimizer,
    ReleaseOptimizer,
    SendTensors,
    Setting,
    ShardLoader,
    ShardUnits,
    StartProcessGroup,
    StashTensors,
    Step,
    Transfer,
    Unit,
    UpcastParameters,
    WrapDDP,
    WrapFSDP1,
    WrapLoader,
)

POWERSGD = PowerSGDOptions(
    matrix_approximation_rank=2,
    start_powerSGD_iter=10,
    min_compression_rate=2.0,
    use_error_feedback=True,
    warm_start=True,
    orthogonalization_epsilon=0.0,
    random_seed=0,
    batch_tensors_with_same_shape=False,
)
SLOTS = (("a.weight", ""), ("a.bias",))
FILE = File(path="/models/m.safetensors", size=1024, header="sha256:0", data=100)
SOURCE = FileSlice(name="w", key="w", file=0, start=100, dtype="float32", shape=(3, 3), placements=("shard(0)",))
STEPS: tuple[tuple[Step, str], ...] = (
    (
        StartProcessGroup(backend="nccl", world_size=1024, timeout_s=600.0),
        "nccl over 1,024 ranks, time-out 600 s",
    ),
    (Agree(), "all ranks compare the digests of plan and model"),
    (
        BuildMesh(device="cuda", axes=(Axis(name="replicate", size=2), Axis(name="shard", size=8))),
        "replicate=2 x shard=8 on cuda",
    ),
    (ReleaseOptimizer(slots=SLOTS), "parameters taken out of 2 slots in 2 groups (1 not the model's, left alone)"),
    (
        UpcastParameters(names=("h.0.w", "h.1.w", "z", "y", "x"), dtype="float32"),
        "5 parameters to float32: h.0..1.w, z and 2 more",
    ),
    (MoveModel(device=LocalDevice(type="cuda")), "parameters and buffers to cuda:<local rank>"),
    (MoveModel(device=LocalDevice(type="cpu")), "parameters and buffers to the CPU"),
    (
        AutocastForward(device="cuda", dtype="bfloat16", output_dtype="float32"),
        "forward in bfloat16 on cuda, outputs in float32",
    ),
    (
        ParallelizeModules(
            styles=(
                ParallelStyle(
                    paths=("h.0.up", "h.1.up"), style="colwise", input_layout="whole", output_layout="features"
                ),
                ParallelStyle(paths=("norm",), style="sequence", input_layout="sequence", output_layout="whole"),
            ),
            axis="tensor",
        ),
        "3 modules over tensor: h.0..1.up colwise (whole to features); norm sequence (sequence to whole)",
    ),
    (CheckpointModules(paths=("h.0", "h.1"), preserve_rng_state=True), "h.0..1 (2 modules)"),
    (CheckpointModules(paths=("h.0",), preserve_rng_state=False), "h.0 (1 module); dropout is not replayed"),
    (
        CheckpointModules(paths=("h.0",), preserve_rng_state=True, keep_ops=("aten.mm",), offload=True),
        "h.0 (1 module); outputs of aten.mm kept; inputs in host memory",
    ),
    (
        CompileModules(
            paths=("",),
            backend="inductor",
            mode="default",
            fullgraph=False,
            dynamic=None,
            options=(BackendOption(name="max_autotune", value=True),),
            recompile_limit=4,
            isolate_recompiles=True,
        ),
        "the whole model with inductor, mode default, max_autotune=True, at most 4 compilations, counted apart",
    ),
    (
        CompileModules(paths=("",), backend="inductor", mode="default", fullgraph=False, dynamic=None),
        "the whole model with inductor, mode default",
    ),
    (
        CompileModules(paths=("h.0", "h.1"), backend="eager", mode="max-autotune", fullgraph=True, dynamic=False),
        "h.0..1 (2 modules) with eager, mode max-autotune, no graph breaks, static shapes",
    ),
    (
        WrapFSDP1(
            units=(FlatUnit(path="h.0.norm", full_precision=True), FlatUnit(path="h.0"), FlatUnit(path="")),
            sharding="HYBRID_SHARD",
            device=LocalDevice(type="cuda"),
            param_dtype="bfloat16",
            reduce_dtype="float32",
            buffer_dtype=None,
            offload=True,
            backward_prefetch=None,
            forward_prefetch=False,
            limit_all_gathers=True,
            use_orig_params=False,
            sync_module_states=True,
            ignored=("head",),
        ),
        (
            "h.0.norm, h.0 (2 units) then the root on cuda:<local rank>, HYBRID_SHARD, gathered in bfloat16, reduced "
            "in float32; 1 unit in float32; one flat parameter per unit; kept in host memory; rank 0 is "
            "broadcast first; gathered when needed in backward; left whole: head"
        ),
    ),
    (
        RegroupOptimizer(slots=SLOTS),
        "flat parameters put into the place of 2 slots in 2 groups (1 not the model's, left alone)",
    ),
    (
        ShardUnits(
            units=(
                Unit(path="h.0", reshard_after_forward=True),
                Unit(path="h.1", reshard_after_forward=True),
                Unit(path="", reshard_after_forward=False, output_dtype="float32"),
            ),
            param_dtype="bfloat16",
            reduce_dtype="float32",
            offload=True,
            pin_memory=True,
        ),
        (
            "h.0..1 (2 units) then the root, gathered in bfloat16, reduced in float32, outputs in float32; "
            "freed after forward; kept in pinned host memory"
        ),
    ),
    (
        ShardUnits(
            units=(Unit(path="", reshard_after_forward=False),),
            param_dtype=None,
            reduce_dtype=None,
            offload=False,
            pin_memory=False,
            axes=("replicate", "shard"),
        ),
        "the root, over replicate x shard; kept gathered until backward",
    ),
    (
        ShardUnits(
            units=(
                Unit(path="norm", reshard_after_forward=True, full_precision=True),
                Unit(path="", reshard_after_forward=False),
            ),
            param_dtype="bfloat16",
            reduce_dtype=None,
            offload=False,
            pin_memory=False,
            ignored=("scale", "h.0.w"),
        ),
        (
            "norm (1 unit) then the root, gathered in bfloat16; freed after forward; 1 unit in float32; "
            "2 parameters whole on every rank"
        ),
    ),
    (MakeContiguous(names=("h.0.w", "h.1.w", "z", "y")), "4 parameters laid in order: h.0..1.w, z and 1 more"),
    (AverageGradients(names=("scale", "h.0.w")), "of scale, h.0.w over all ranks, once per window"),
    (
        AverageGradients(names=("scale",), axes=("replicate", "shard")),
        "of scale over replicate x shard, once per window",
    ),
    (
        WrapDDP(
            device=LocalDevice(type="cuda"),
            broadcast_buffers=True,
            bucket_cap_mb=25.0,
            find_unused_parameters=True,
            gradient_as_bucket_view=False,
            static_graph=False,
        ),
        "the model on cuda:<local rank>, buckets of 25 MiB, buffers broadcast, unused parameters searched",
    ),
    (
        WrapDDP(
            device=None,
            broadcast_buffers=False,
            bucket_cap_mb=1.0,
            find_unused_parameters=False,
            gradient_as_bucket_view=False,
            static_graph=False,
            hook=DDPCommHook(hook="fp16_compress_hook"),
        ),
        "the model, buckets of 1 MiB, gradients through fp16_compress_hook",
    ),
    (
        WrapDDP(
            device=None,
            broadcast_buffers=False,
            bucket_cap_mb=1.0,
            find_unused_parameters=False,
            gradient_as_bucket_view=False,
            static_graph=False,
            hook=DDPCommHook(hook="powerSGD_hook", wrapper="bf16_compress_wrapper", options=POWERSGD),
        ),
        ("the model, buckets of 1 MiB, gradients through bf16_compress_wrapper(powerSGD_hook) of rank 2 from step 10"),
    ),
    (
        RegisterEntryPoints(names=("generate", "embed"), through="units", in_step=True),
        "generate, embed: around each call the units gather as around forward, all ranks in step",
    ),
    (RegisterEntryPoints(names=("embed",), through="wrapper"), "embed: inside the wrapper's forward"),
    (RegisterEntryPoints(names=("embed",), through="forward"), "embed: patched as forward is"),
    (ConvertSyncBatchNorm(paths=("h.0.norm", "h.1.norm")), "h.0..1.norm (2 modules)"),
    (
        CreateGradScaler(
            device="cuda",
            sharded=True,
            init_scale=65536.0,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=2000,
        ),
        "sharded, on cuda, from 65536, x 2 after 2,000 steps, x 0.5 on overflow",
    ),
    (RebindOptimizer(slots=SLOTS[1:]), "parameters put back by name into 1 slot in 1 group"),
    (
        CreateOptimizer(algorithm="SGD", names=("a", "b"), options=(OptimizerOption(name="lr", value=0.1),)),
        "SGD(lr=0.1) over 2 parameters",
    ),
    (
        ShardLoader(index=0, shuffle=True, seed=7, drop_last=False),
        "loader 0, shuffled with seed 7, the tail filled up from the start",
    ),
    (
        ShardLoader(index=1, shuffle=False, seed=7, drop_last=True, axes=("shard",)),
        "loader 1, divided over shard, in order, the tail dropped",
    ),
    (
        ShardLoader(index=2, shuffle=False, seed=7, drop_last=True, axes=()),
        "loader 2, undivided, in order, the tail dropped",
    ),
    (
        ShardLoader(index=0, shuffle=False, seed=7, drop_last=False, same_data=2, split="stream", batch_size=3),
        (
            "loader 0, 2 neighbours read the same, a stream that every rank reads, with seed 7, batches of 3, "
            "the tail filled up from the start"
        ),
    ),
    (
        ShardLoader(index=0, shuffle=False, seed=7, drop_last=False, split="batches", spread=True, dispatch=True),
        "loader 0, in batches of its own sampler with seed 7, each sample once, read by rank 0 for all",
    ),
    (
        ShardLoader(index=0, shuffle=False, seed=7, drop_last=False, split="sampler"),
        "loader 0, by its own sampler with seed 7, the tail filled up from the start",
    ),
    (
        ShardLoader(index=0, shuffle=False, seed=7, drop_last=True, split="shards"),
        "loader 0, a stream in shards, each read by one rank, the tail dropped",
    ),
    (
        WrapLoader(index=1, device=LocalDevice(type="cuda"), ends_window=True, evaluation=False),
        "loader 1 for training, batches to cuda:<local rank>, its end ends the window",
    ),
    (
        WrapLoader(index=1, device=None, ends_window=False, evaluation=True),
        "loader 1 for evaluation, batches unmoved",
    ),
    (
        ConvertFP8Linears(
            paths=("h.0.q", "h.1.q"), recipe="tensorwise", pad_inner_dim=True, all_gather=True, emulate=False
        ),
        "h.0..1.q (2 Linears), tensorwise, inner dimensions padded, weights gathered in float8",
    ),
    (
        ConvertFP8Linears(paths=("q",), recipe="rowwise", pad_inner_dim=False, all_gather=False, emulate=True),
        "q (1 Linear), rowwise, emulated",
    ),
    (ConvertTransformerEngine(linears=("a", "b"), norms=("n",)), "a, b (2 Linears) and n (1 LayerNorm)"),
    (ConvertTransformerEngine(linears=("a",), norms=()), "a (1 Linear)"),
    (
        AutocastFP8Forward(
            recipe="DelayedScaling",
            fp8_format="HYBRID",
            margin=1,
            during_eval=False,
            amax_history_len=16,
            amax_compute_algo="max",
            override_linear_precision=(False, False, True),
        ),
        (
            "forward in float8 in training, DelayedScaling HYBRID, margin 1, max of 16 steps, "
            "some products in the wider dtype"
        ),
    ),
    (
        AutocastFP8Forward(recipe="MXFP8BlockScaling", fp8_format="E4M3", margin=0, during_eval=True),
        "forward in float8 in training and evaluation, MXFP8BlockScaling E4M3, margin 0",
    ),
    (
        InitializeMSAMP(opt_level="O2", linears=("a", "b"), kept=(), reduced=False),
        "a, b (2 Linears), the optimizer, O2",
    ),
    (
        InitializeMSAMP(opt_level="O1", linears=("a",), kept=("head",), reduced=True),
        "a (1 Linear), the optimizer, O1; head left, tied or packed",
    ),
    (PrecomputeFloat8Scales(), "scales of all float8 weights, after every optimizer step"),
    (MoveToXLA(forked=False), "parameters and buffers to this process's XLA device"),
    (MoveToXLA(forked=True), "parameters and buffers to this process's XLA device, one process at a time"),
    (CheckFiles(files=(FILE,)), "1 file of 1.00 KiB: size and header as planned, on every rank"),
    (
        AllocateTensors(device=LocalDevice(type="cuda")),
        "storage on cuda:<local rank> for what is on meta, the rest moved there",
    ),
    (
        AllocateTensors(device=LocalDevice(type="cpu"), buffers=LocalDevice(type="cuda")),
        "storage on the CPU for what is on meta, the rest moved there; buffers on cuda:<local rank>",
    ),
    (
        InitializeTensors(params=("a", "b"), buffers=("c",), units=("",), seed=7),
        "2 parameters with seed 7 and 1 buffer where on meta, by the modules' own initialisers",
    ),
    (
        StashTensors(params=("embed.weight", "head.bias"), buffers=("table",)),
        "2 parameters to meta, their values kept on the host where there are any",
    ),
    (
        SendTensors(
            tensors=(Transfer(name="w", dtype="bfloat16", shape=(512, 2)), Transfer(name="n", dtype="int64", shape=())),
            axes=(),
        ),
        "2 tensors, 2.01 KiB in all, from rank 0 to every rank's own part",
    ),
    (
        ReadTensors(files=(FILE,), sources=(SOURCE,), axes=(Axis(name="shard", size=2),)),
        "1 tensor from 1 file of 1.00 KiB; at most 24 B on a rank",
    ),
    (
        ReadTensors(
            files=(FILE,),
            sources=(
                evolve(SOURCE, name="v"),
                evolve(SOURCE, key="w.0", chunk=Chunk(offsets=(0, 0), sizes=(2, 3))),
                evolve(SOURCE, key="w.1", chunk=Chunk(offsets=(2, 0), sizes=(1, 3))),
            ),
            axes=(Axis(name="shard", size=2),),
        ),
        "2 tensors, 1 of them from 2 parts, from 1 file of 1.00 KiB; at most 48 B on a rank",
    ),
    (ReduceXLAGradients(), "gradients averaged over all processes, before every optimizer step"),
    (CastForward(dtype="bfloat16", output_dtype="float32"), "floating inputs to bfloat16, outputs to float32"),
    (MarkLeafModules(paths=("h.0.moe", "h.1.moe")), "h.0..1.moe (2 modules) gathered whole by ZeRO-3"),
    (
        ConvertOptimizer(algorithm="DeepSpeedCPUAdam", decoupled=True),
        "DeepSpeedCPUAdam takes the optimizer's place, decoupled decay",
    ),
    (
        PartitionParameters(device=LocalDevice(type="cuda"), settings=()),
        "each rank holds its part of every parameter, and the buffers on cuda:<local rank>, without values yet",
    ),
    (
        InitializeDeepSpeed(
            device="cuda",
            data_parallel=8,
            stage=3,
            dtype=None,
            optimizer="section",
            names=("a", "b"),
            scheduler="section",
            settings=(
                Setting(path=("gradient_clipping",), value="1.0"),
                Setting(path=("train_batch_size",), value="64"),
            ),
        ),
        (
            "ZeRO stage 3 on cuda with an optimizer of its config, batch 64, clipped to 1.0; 2 settings; "
            "steps the scheduler too"
        ),
    ),
)


@pytest.mark.parametrize(("step", "text"), STEPS, ids=lambda value: type(value).__name__)
def test_a_step_says_what_it_does(step: Step, text: str) -> None:
    assert effect(step) == text


def test_every_kind_of_step_has_its_line() -> None:
    lacking = sorted(kind.__name__ for kind in set(get_args(Step)) - {type(step) for step, _ in STEPS})
    assert not lacking, f"{__file__}: STEPS has no line for {', '.join(lacking)}"
