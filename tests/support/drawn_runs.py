"""Configs with facts, drawn from a number: the same on every machine, release and worker, unlike hypothesis' draws.

Each begins as the plain run of its engine and takes a few changes, so that about half of them have a plan and most of
the others one or two things that are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import count
from random import Random
from typing import Any, TypeVar

from attrs import evolve
from returns.result import Success

from prepkit import config as c
from prepkit import planner
from prepkit.facts import (
    ArchitectureFacts,
    BufferFact,
    CheckpointFacts,
    Env,
    Facts,
    GroupFact,
    LoaderFacts,
    ModelFacts,
    OptimizerFacts,
    ParamFact,
    SchedulerFacts,
)
from prepkit.plan import Plan
from prepkit.resolve.deepspeed.data import put
from prepkit.resolve.deepspeed.keys import OPEN, REMOVED, SECTIONS
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.tensor_parallel import SERVED
from prepkit.testing import tiny_model
from prepkit.testing.strategies.facts import sharded_for
from prepkit.testing.tiny import LIBRARIES, PATH, in_parts, marked, tiny_checkpoint, with_batchnorm
from tests.support.llama_facts import llama

T = TypeVar("T")
Change = tuple[str, Sequence[Any]]
"""Path of a field below the config, and values to choose from."""

ENGINES: dict[str, c.Engine] = {
    "single": c.Single(),
    "ddp": c.DDP(),
    "fsdp1": c.FSDP1(),
    "fsdp2": c.FSDP2(),
    "tensor": c.TensorParallel(),
    "zero": c.DeepSpeed(stage=2),
    "xla": c.XLA(),
}
WRAPS = (
    *(c.WrapClasses(("Block",)), c.WrapPaths(("layers.*",)), c.WrapSize(40), c.WrapRoot()),
    *(c.WrapClasses(("Block", "Embedding"), paths=("head",)), c.WrapClasses(("Blok",)), c.WrapPaths(("layers.0.*",))),
)
TP_LAYERS = (
    c.TPLayer("layers.*.attn", "colwise"),
    c.TPLayer("layers.*.mlp", "rowwise"),
    c.TPLayer("norm", "sequence"),
    c.TPLayer("head", "colwise"),
    c.TPLayer("embed", "rowwise"),
)
ANYWHERE: tuple[Change, ...] = (
    ("precision", (c.BF16(), c.BF16(), c.BF16(master_weights=False), c.BF16(reduce_dtype="bfloat16"), c.FP16())),
    ("precision", (c.BF16(output_dtype="bfloat16"), c.FP8(), c.FP8(backend=c.TorchAO(recipe="rowwise", emulate=True)))),
    (
        "precision",
        (c.FP8(backend=c.TransformerEngine()), c.FP8(backend=c.MSAMP()), c.FP16(init_scale=1024.0, growth_interval=10)),
    ),
    ("compile", (c.CompileModel(), c.CompileBlocks(), c.CompileBlocks(blocks=c.WrapRoot()))),
    ("compile", (c.CompileModel(mode="max-autotune"), c.CompileModel(fullgraph=True, recompile_limit=3, dynamic=True))),
    ("checkpointing", (c.CheckpointBlocks(), c.CheckpointBlocks(every=2), c.CheckpointBlocks(offload=True))),
    ("checkpointing", tuple(c.CheckpointBlocks(blocks=wrap, preserve_rng_state=False) for wrap in WRAPS)),
    ("weights", (c.InitWeights(seed=3), c.BroadcastWeights(), c.InitWeights())),
    ("weights", (c.LoadWeights(PATH), c.LoadWeights(PATH), c.LoadWeights(PATH, rename=(("model.", ""),)))),
    ("intent", (c.Intent.INFERENCE,)),
    ("device", ("cpu", "cuda", "xpu")),
    ("keep_device_map", (True,)),
    ("backend", ("gloo", "nccl", "cpu:gloo,cuda:nccl")),
    ("timeout_s", (30.0, 7200.0, 0.0)),
    (
        "optimizer",
        (c.AdamW(), c.AdamW(lr=3e-4, groups=(c.Group(names=("*norm*",), weight_decay=0.0),)), c.SGD(momentum=0.9)),
    ),
    ("optimizer", (c.Adafactor(), c.Muon(names=("layers.*",)), c.RMSprop(centered=True, momentum=0.5), c.Adagrad())),
    ("optimizer", (c.Adam(amsgrad=True), (c.Muon(names=("layers.*",)), c.AdamW()), c.SGD(), c.RMSprop())),
    ("accumulation", (1, 2, 4, 8)),
    ("global_batch", (32, 64, 60)),
    ("average_each", (True,)),
    ("clip", (c.ClipNorm(1.0), c.ClipNorm(0.5, norm_type=1.0), c.ClipValue(0.1))),
    ("scheduler_ticks", (0, 2)),
    ("total_steps", (10, 1000)),
    ("loaders", (c.ShardLoaders(seed=7, drop_last=True), c.KeepLoaders(), c.ShardLoaders(split_batches=True))),
    ("loaders", (c.ShardLoaders(dispatch=True), c.ShardLoaders(purpose="evaluation", to_device=False))),
    ("loaders", (c.EachLoader((c.ShardLoaders(), c.KeepLoaders(purpose="evaluation"))),)),
    ("entry_points", ((), ("generate",), ("encode", "forward"))),
    ("overrides", (("model.nothing-trainable",), ("no.such-rule",))),
)
"""What any engine may be asked for."""
MESHES = (
    *(c.Mesh(), c.Mesh(shard=2), c.Mesh(replicate=2), c.Mesh(replicate=2, shard=2), c.Mesh(replicate=-1, shard=4)),
    *(c.Mesh(tensor=2), c.Mesh(shard=2, tensor=2), c.Mesh(replicate=2, shard=2, tensor=2), c.Mesh(shard=3)),
    *(c.Mesh(replicate=-1, shard=1), c.Mesh(replicate=-1, shard=1, tensor=2)),
)
OWN: dict[str, tuple[Change, ...]] = {
    "single": (),
    "xla": (("engine.forked", (True,)),),
    "ddp": (
        ("engine.broadcast_buffers", (False,)),
        ("engine.bucket_cap_mb", (1.0, 0.0001, 100.0)),
        ("engine.find_unused_parameters", (True,)),
        ("engine.gradient_as_bucket_view", (False,)),
        ("engine.static_graph", (True,)),
        ("engine.hook", (c.CompressHook(), c.CompressHook(dtype="float16"), c.PowerSGDHook(), c.PowerSGDHook(rank=4))),
        ("engine.sync_batchnorm", (True,)),
    ),
    "fsdp1": (
        ("engine.wrap", WRAPS),
        ("engine.sharding", ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")),
        ("engine.offload", (True,)),
        ("engine.backward_prefetch", ("NO_PREFETCH", "BACKWARD_POST")),
        ("engine.forward_prefetch", (True,)),
        ("engine.limit_all_gathers", (False,)),
        ("engine.use_orig_params", (False,)),
        ("engine.sync_module_states", (True,)),
        ("engine.ignored", (("head",), ("embed",))),
        ("engine.cast_forward_inputs", (True,)),
        ("engine.buffer_dtype", ("float32", "bfloat16")),
    ),
    "fsdp2": (
        ("engine.wrap", WRAPS),
        ("engine.reshard_after_forward", (False, 2, 4, 3)),
        ("engine.offload", (c.OffloadToCPU(), c.OffloadToCPU(pin_memory=False))),
        ("engine.ignored", (("head",), ("layers.0",))),
        ("engine.cast_forward_inputs", (False,)),
        ("engine.reduce_unused", (True,)),
        ("mesh", MESHES),
        ("mesh", MESHES),
    ),
    "tensor": (
        ("tp_plan", (c.TPPlan(TP_LAYERS), c.TPPlan(TP_LAYERS[:2]), c.TPPlan((c.TPLayer("nowhere", "colwise"),)))),
        ("tp_plan", (c.TPPlan(TP_LAYERS[1:3]), c.TPPlan((c.TPLayer("layers.*.attn", "replicate"),)))),
    ),
    "zero": (
        ("engine.stage", (None, 0, 1, 3, 3)),
        ("engine.offload_optimizer", ("cpu", "cpu", "none", "nvme")),
        ("engine.offload_param", ("cpu", "none", "nvme")),
        ("engine.micro_batch", (1, 4)),
        ("engine.micro_batch_of", ("largest",)),
        ("engine.leaf_modules", (("Block",), ("Bloc",))),
        ("engine.schedule", (c.Schedule(), c.Schedule(warmup_steps=3, total_steps=20, min_lr=1e-5, max_lr=1e-2))),
    ),
}
"""What one engine may be asked for."""
ZERO = "zero_optimization"
JSON: tuple[Change, ...] = (
    ("zero_optimization.reduce_bucket_size", (64, 1000, "auto", 5e8)),
    ("zero_optimization.allgather_bucket_size", (64, 1e3)),
    ("zero_optimization.overlap_comm", (True, False)),
    ("zero_optimization.contiguous_gradients", (False,)),
    ("zero_optimization.reduce_scatter", (False,)),
    ("zero_optimization.round_robin_gradients", (True,)),
    ("zero_optimization.sub_group_size", (32, 1e9)),
    ("zero_optimization.stage3_param_persistence_threshold", (0, 20, "auto")),
    ("zero_optimization.stage3_max_live_parameters", (10, 1e9)),
    ("zero_optimization.stage3_prefetch_bucket_size", (10, "auto")),
    ("zero_optimization", ({"zero_hpz_partition_size": 2}, {"zero_quantized_weights": True})),
    ("zero_optimization.offload_optimizer", ({"device": "cpu", "pin_memory": True}, {"device": "cpu", "ratio": 0.5})),
    ("zero_optimization.offload_param", ({"device": "cpu", "buffer_count": 3}, {"device": "nvme", "nvme_path": "/x"})),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", (True, "auto")),
    ("optimizer", ({"type": "AdamW", "params": {"lr": 1e-3}}, {"type": "Adam", "params": {"lr": "auto"}})),
    ("optimizer", ({"type": "Lion", "params": {}}, {"type": "adagrad"}, {"type": "OneBitAdam"}, {"type": "Admw"})),
    ("scheduler", ({"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 5}},)),
    ("scheduler", ({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}, {"type": "OneCycle"})),
    ("bf16", ({"enabled": True}, {"enabled": "auto"}, {"enabled": True, "immediate_grad_update": True})),
    ("fp16", ({"enabled": True, "loss_scale": 0, "initial_scale_power": 8}, {"enabled": "auto"}, {"enabled": False})),
    ("data_types", ({"grad_accum_dtype": "fp32"}, {"grad_accum_dtype": "bf16"})),
    ("communication_data_type", ("fp32", "bf16")),
    ("train_batch_size", (32, "auto", 30)),
    ("train_micro_batch_size_per_gpu", (2, "auto")),
    ("gradient_accumulation_steps", (2, "auto")),
    ("gradient_clipping", (1.0, "auto", 0)),
    ("zero_allow_untested_optimizer", (True,)),
    ("zero_force_ds_cpu_optimizer", (False,)),
    ("torch_autocast", ({"enabled": True, "dtype": "bfloat16"},)),
    ("activation_checkpointing", ({"partition_activations": True},)),
    ("fp16", ({"enabled": True, "initial_scale_power": 0, "hysteresis": 4}, {"enabled": True, "min_loss_scale": 2})),
    ("tensor_parallel", ({"autotp_size": 2}, {"autotp_size": 1})),
    ("zero_optimization", (True, False, {"stage": 3}, {"stage": 1, "cpu_offload": True})),
)
"""Settings of a DeepSpeed file as people write them; others are drawn by type."""
OPTIMIZERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *((name, "torch.optim", {}) for name in ("AdamW", "AdamW", "Adam", "Adafactor", "NAdam", "RAdam", "Adamax")),
    *((name, "torch.optim", {}) for name in ("Adadelta", "Adagrad", "Rprop", "Muon", "SGD", "RMSprop", "LBFGS")),
    *(("SGD", "torch.optim.sgd", {"momentum": 0.9}), ("RMSprop", "torch.optim", {"centered": True, "momentum": 0.1})),
    *(("AdamW", "torch.optim", {"amsgrad": True}), ("AdamW", "torch.optim", {"fused": True})),
    *((name, "bitsandbytes.optim.adamw", {}) for name in ("AdamW8bit", "PagedAdamW32bit", "Lion8bit", "SGD")),
    *((name, "torchao.optim", {}) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    *(("Lion", "lion_pytorch", {}), ("MyOptimizer", "mine", {}), ("FusedAdam", "deepspeed.ops.adam", {})),
    *(("DeepSpeedCPUAdam", "deepspeed.ops.adam", {}), ("Adam", "torch.optim", {"capturable": True})),
)
"""Class, its module and options of the group."""


class Draws:
    """Choices that a seed decides; only ``random()`` is used, whose sequence Python promises to keep."""

    def __init__(self, seed: str) -> None:
        self._next: Callable[[], float] = Random(seed).random

    def one(self, options: Sequence[T]) -> T:
        return options[int(self._next() * len(options))]

    def seldom(self, of: int = 4) -> bool:
        return self._next() * of < 1


def run(engine: str, number: int) -> tuple[c.Config, Facts]:
    """The config and the facts of that number."""
    draws = Draws(f"{engine} {number}")
    cfg = c.Config(engine=ENGINES[engine], precision=draws.one((None, None, c.BF16())))
    if engine == "xla":
        cfg = evolve(cfg, loaders=c.KeepLoaders())
    if draws.seldom(8):
        cfg = evolve(cfg, weights=c.LoadWeights(PATH))
    calm = draws.seldom(2)
    changes = OWN[engine] if calm and OWN[engine] else (*OWN[engine], *OWN[engine], *ANYWHERE)
    for _ in range(draws.one((0, 1, 1, 2, 2, 3, 4))):
        path, values = draws.one(changes)
        cfg = changed(cfg, path, draws.one(values))
    if engine == "zero":
        cfg = changed(cfg, "engine.config", json.dumps(settings(draws, calm=calm)))
    if engine == "tensor" and not draws.seldom() and cfg.tp_plan == c.TPPlanFromModel():
        cfg = evolve(cfg, tp_plan=c.TPPlan(TP_LAYERS[:2]))
    if engine == "fsdp2" and cfg.mesh and cfg.mesh.tensor > 1:
        ignored = draws.one(((), (), ("layers.0",), ("layers.0.attn", "head"), ("norm",)))
        cfg = changed(evolve(cfg, tp_plan=c.TPPlan(TP_LAYERS[: draws.one((2, 2, 4))])), "engine.ignored", ignored)
    found = facts(draws, engine, cfg)
    if engine == "fsdp2" and draws.seldom(8) and Resolved(cfg=cfg, facts=found).mesh:
        found = sharded_for(cfg, found)
        cfg = changed(cfg, "precision", c.BF16()) if draws.seldom(3) else cfg
    return cfg, found


def changed(cfg: c.Config, path: str, value: Any) -> c.Config:
    """The config with another value in one field, of itself or of its engine."""
    head, _, inner = path.partition(".")
    return evolve(cfg, **{head: evolve(getattr(cfg, head), **{inner: value}) if inner else value})


def settings(draws: Draws, *, calm: bool) -> dict[str, Any]:
    """What stands in a DeepSpeed file. ``calm``: in its section about ZeRO."""
    data: dict[str, Any] = {}
    for _ in range(draws.one((0, 0, 1, 1, 2, 3))):
        path, values = draws.one(tuple(one for one in JSON if one[0].startswith(f"{ZERO}.") or not calm))
        value = deepcopy(draws.one(values))  # another setting may be put into it
        if isinstance(data.get(path.partition(".")[0], {}), dict) and not data.get(path):
            put(data, path, value)
    if not calm and draws.seldom(6):
        section = draws.one(tuple(SECTIONS))
        path = draws.one((f"{section}.{draws.one(tuple(SECTIONS[section]))}".strip("."), draws.one((*OPEN, *REMOVED))))
        value = draws.one((True, 3, 0.5, "auto", "text", [], {}, {"stages": "auto"}))
        if isinstance(data.get(path.partition(".")[0], {}), dict):
            put(data, path, value)
    return data


def facts(draws: Draws, engine: str, cfg: c.Config) -> Facts:
    """A model, what stands beside it, and where it is to run."""
    seen = model(draws, engine)
    zero, xla = engine == "zero", engine == "xla"
    world = 1 if engine == "single" else draws.one((2, 4, 4, 8) if engine == "tensor" else (2, 4, 8, 8, 16, 512))
    env = Env(
        world_size=world,
        per_node=draws.one((None, 8, 4)),
        device=draws.one(("cuda", "cuda", "cpu", "xpu")) if not xla else "cpu",
        memory=draws.one((None, None, None, 4096, 1 << 20)),
        capability=draws.one((None, (8, 0), (9, 0))),
        bf16=draws.one((True,) * 12 + (None, False)),
        torch=draws.one(("2.13.0", "2.13.0", "2.13.0", "2.6.0", "2.9.1", "")),
        libraries=LIBRARIES if zero or xla or draws.seldom(2) else (),
        variables=draws.one(((), (), (), (("ACCELERATE_USE_FSDP", "true"),), (("OMP_NUM_THREADS", "1"),))),
    )
    own = cfg.optimizer is None and cfg.intent is c.Intent.TRAINING and not draws.seldom(16)
    loader = LoaderFacts(
        batch_size=draws.one((4,) * 9 + (8, 8, None)),
        length=draws.one((4096, 4096, 4096, 64, 30, None)),
        sampler=draws.one(("random",) * 8 + ("sequential", "sequential", "distributed", "custom")),
        iterable=draws.seldom(16),
        custom_batches=draws.seldom(20),
        drop_last=draws.seldom(3),
        workers=draws.one((0, 2)),
    )
    ticks = SchedulerFacts(name="OneCycleLR", drives_optimizer=not draws.seldom(8), horizon=draws.one((None, 100, 10)))
    return Facts(
        model=seen,
        optimizer=optimizer(draws, seen) if own else None,
        scheduler=ticks if own and draws.seldom(4) else None,
        loaders=(loader,) * draws.one((1, 1, 1, 2) if zero else (0, 0, 1, 2)),
        checkpoint=checkpoint(draws, seen) if isinstance(cfg.weights, c.LoadWeights) else None,
        env=env,
    )


def model(draws: Draws, engine: str) -> ModelFacts:
    """A language model of a few blocks, with its oddities; seldom one of eight billions."""
    if draws.seldom(40):
        return llama("8B", draws.one(("float32", "bfloat16")))
    dtype = draws.one(("float32", "float32", "float32" if engine == "zero" else "bfloat16"))
    extra = (
        ParamFact(name="layers.0.attn.bias", shape=(7,), dtype=dtype),
        ParamFact(name="head.bias", shape=(5,), dtype=draws.one(("float32", dtype)), requires_grad=not draws.seldom()),
        ParamFact(name="scale", shape=(), dtype=dtype),
        ParamFact(
            name="layers.1.mlp.packed",
            shape=(64, 1),
            dtype=draws.one(("uint8", "bfloat16", "float32", "int8")),
            requires_grad=False,
            cls=draws.one(("Params4bit", "Params4bit", "Int8Params")),
        ),
    )
    found = tiny_model(
        blocks=draws.one((2, 3, 5)),
        width=draws.one((4, 8, 16, 64) if engine == "tensor" else (4, 6, 16, 64)),
        vocab=draws.one((8, 32, 304) if engine == "tensor" else (8, 30, 301, 1000)),
        dtype=dtype,
        tied=draws.seldom(3),
        frozen=draws.one(((), (), ("embed.weight",), ("norm.weight", "layers.0.attn.weight"))),
        extra=tuple(one for one in extra if draws.seldom(12)),
    )
    if draws.seldom(6):
        found = with_batchnorm(found)
    if draws.seldom(2):
        found = evolve(found, buffers=())
    if draws.seldom(5):
        buffers = (
            BufferFact(name="norm.mean", shape=(9,), dtype="float32"),
            BufferFact(name="s", shape=(), dtype="int64"),
        )
        found = evolve(found, buffers=(*found.buffers, *buffers))
    if draws.seldom(5):
        styles = tuple((path, draws.one(tuple(SERVED))) for path in ("layers.*.attn", "layers.*.mlp", "head", "norm"))
        shape = ArchitectureFacts(heads=4, kv_heads=draws.one((1, 2, 4)), hidden_sizes=(16,))
        found = evolve(found, tensor_plan=styles[: draws.one((2, 3, 4))], architecture=shape)
    if draws.seldom(5):
        attention = (evolve(one, name="SelfAttention") if one.name == "Block" else one for one in found.classes)
        found = evolve(found, classes=tuple(attention))
    if draws.seldom(5):
        found = evolve(found, declared_blocks=("Block",), methods=("generate", "encode"))
    if draws.seldom(16):
        found = marked(found, draws.one(("ddp", "compiled")), draws.one(("", "layers.0")))
    if draws.seldom(16):
        found = evolve(found, device_map=draws.one(((("", "cpu"),), (("embed", "0"), ("layers", "1")))))
    return found


def optimizer(draws: Draws, seen: ModelFacts) -> OptimizerFacts:
    """One that holds what is trained, in one group or two."""
    name, module, options = draws.one(OPTIMIZERS[: draws.one((2, 2, len(OPTIMIZERS)))])
    trained = tuple(param.name for param in seen.params if param.requires_grad)
    held = trained[:-1] if draws.seldom(12) else trained
    cut = len(held) // 2 if draws.seldom(4) else 0
    given = tuple(sorted({"lr": 1e-3, "weight_decay": 0.0, **options}.items()))
    first = tuple(
        sorted({**dict(given), **draws.one(({}, {"fused": True}, {"amsgrad": True}, {"momentum": 0.5}))}.items())
    )
    groups = tuple(
        GroupFact(slots=slots, options=options)
        for slots, options in ((held[:cut], first), (held[cut:], given))
        if slots
    )
    return OptimizerFacts(name=name, module=module, groups=groups, stateful=held[:1] if draws.seldom(12) else ())


def planned(engine: str, least: int = 0) -> Plan:
    """The plan of the first run from that number on that has one, of a small model in as much memory as it takes."""
    runs = (run(engine, number) for number in count(least))
    outcomes = (planner.plan(cfg, seen) for cfg, seen in runs if is_small(seen))
    return next(outcome.unwrap() for outcome in outcomes if isinstance(outcome, Success))


def is_small(seen: Facts) -> bool:
    """Whether a plan of it takes about a millisecond: no large model, and no memory to fit into."""
    return len(seen.model.params) < 60 and seen.env.memory is None


def checkpoint(draws: Draws, seen: ModelFacts) -> CheckpointFacts:
    """One that fits the model in one file or two, as it is or in parts; seldom without one of its tensors."""
    name = draws.one(seen.params).name
    found = tiny_checkpoint(seen, files=draws.one((1, 2)), drop=(name,) if draws.seldom(8) else ())
    if draws.seldom(6):
        other = (evolve(one, dtype="float16") if one.dtype == "bfloat16" else one for one in found.tensors)
        found = evolve(found, tensors=tuple(other))
    return in_parts(found) if draws.seldom(3) and len(found.tensors) < 60 else found
