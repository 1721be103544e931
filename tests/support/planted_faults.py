"""Every way in which an executor could do something else than the plan says, and what has to be said about it.

``make faults`` prints them as a table. A fault of a new engine or step kind is a row in ``FAULTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from returns.unsafe import unsafe_perform_io
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from prepkit import steps as s
from prepkit.applying.apply import run
from prepkit.applying.step_kinds import KINDS
from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    MSAMP,
    SGD,
    XLA,
    AdamW,
    BroadcastWeights,
    CheckpointBlocks,
    CompileBlocks,
    CompressHook,
    Config,
    DeepSpeed,
    InitWeights,
    KeepLoaders,
    Single,
    TensorParallel,
    TorchAO,
    TPLayer,
    TPPlan,
    TransformerEngine,
)
from prepkit.objects import deepspeed
from prepkit.objects.target import Target
from prepkit.plan import Plan
from tests.support import fp8_model, library_doubles
from tests.support.deepspeed_cpu import lean
from tests.support.faulty_handlers import (
    FaultyDo,
    afterwards,
    another_optimizer,
    average_but_one,
    bind_old,
    cast_buffer,
    changed,
    compile_twin,
    create_over_clones,
    drop_slot,
    exchange_parts,
    exchange_sources,
    forget_values,
    freeze,
    keep_stashed,
    leave_on_meta,
    long_state,
    lose_buffer,
    lose_state,
    nothing,
    own_buffer,
    parallelize_but_one,
    read_but_a_part,
    read_but_one,
    replace_block,
    same_rank,
    send_but_one,
    shard_but_one,
    stash_but_one,
    transpose,
    ungrouped,
    unhook,
    unhook_layer,
    uninitialize,
    untie,
    unwrap_checkpoint,
    unwrapped_loader,
    upcast_but_one,
    whole_state,
    write_kept,
    write_passing,
    zero_one,
)
from tests.support.fragile_model import STORED, Tiny, planned, stepped, tiny_on_meta
from tests.support.gang import Gang
from tests.support.handled import handled_by

FULL = Config(precision=BF16(), compile=CompileBlocks(backend="eager"), checkpointing=CheckpointBlocks())
SINGLE, WHOLE, SHARDED = evolve(FULL, engine=Single()), evolve(FULL, engine=DDP()), evolve(FULL, engine=FSDP2())
WHOLE_PARTS = Config(engine=FSDP2(ignored=("layers.*.outer",)))
STRIDED = Config(engine=FSDP2(), checkpointing=CheckpointBlocks())
"""For a model with transposed weights."""
FLAT = evolve(FULL, engine=FSDP1())
LAID = Config(engine=FSDP1(use_orig_params=False), precision=BF16())
HALF = Config(precision=FP16(), overrides=("precision.fp16-unsupported",))
CUT = Config(
    engine=TensorParallel(),
    precision=BF16(),
    tp_plan=TPPlan((TPLayer("layers.*.inner", "colwise"), TPLayer("layers.*.outer", "rowwise"))),
)
ZERO = Config(
    engine=DeepSpeed(stage=3, micro_batch=2, leaf_modules=("Block",)),
    precision=BF16(),
    checkpointing=CheckpointBlocks(),
)
PARTS = evolve(ZERO, weights=InitWeights(0))
FILLED = Config(weights=InitWeights(0))
FILES = Config(weights=STORED, overrides=("weights.missing-keys",))
SENT = Config(engine=FSDP2(), weights=BroadcastWeights())
EIGHT = Config(precision=FP8(backend=TorchAO(emulate=True)))
NORMED = Config(engine=DDP(sync_batchnorm=True), optimizer=SGD(), overrides=("ddp.sync-batchnorm-on-cpu",))


def eight_bits(backend: Any) -> Config:
    """Float8 on a CPU, where the rule rightly refuses the real library."""
    return Config(precision=FP8(backend=backend), overrides=("fp8.unsupported-device",))


def bare(patches: pytest.MonkeyPatch) -> None:
    """DeepSpeed itself, on the CPU, with no memory of groups that have ended."""
    patches.setenv("LOCAL_RANK", "0")  # it sets it otherwise
    lean()
    deepspeed.forget_groups()


@frozen(kw_only=True)
class Planted:
    """A defect of an executor: what goes wrong in which step, and what has to be said about it."""

    what: str
    kind: type
    cfg: Config
    do: FaultyDo
    caught: str
    """Part of the text of a finding."""
    world: int = 1
    without: tuple[type, ...] = ()
    """Step kinds that are left out of the plan, because torch cannot do them here."""
    double: Callable[[pytest.MonkeyPatch], object] | None = None
    """Puts a stand-in for a library in place that needs another device."""


def faults(kind: type, cfg: Config, *rows: tuple[str, FaultyDo, str], **more: Any) -> tuple[Planted, ...]:
    """Faults of one step kind: what goes wrong, how, and how it is caught."""
    return tuple(Planted(what=what, kind=kind, cfg=cfg, do=do, caught=caught, **more) for what, do, caught in rows)


class WithNorm(Tiny):
    """Has a batch norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.norm(super().forward(tokens))
        return logits


# --- the list ---

FAULTS: tuple[Planted, ...] = (
    *faults(s.AllocateTensors, FILLED, ("no storage is given", nothing, "cannot be called on meta tensors")),
    *faults(s.InitializeTensors, FILLED, ("no initialiser runs", nothing, "everything that was on meta has values")),
    *faults(
        s.ReadTensors,
        FILES,
        ("nothing is read", nothing, "everything that was on meta has values: embed.weight"),
        ("a tensor is not read", read_but_one, "everything that was on meta has values: embed.weight"),
        ("a part is not read", read_but_a_part, "everything that was on meta has values: layers.1.outer.weight"),
        ("a part is read into another", exchange_parts, "everything that was on meta has values: layers.1.outer.w"),
        ("a tensor is read into another", exchange_sources, "this rank holds 6 elements, the plan reads 30"),
        (
            "a buffer with values is read anew",
            afterwards(write_passing),
            "run.values-changed at model.passing",
        ),
    ),
    *faults(
        s.StashTensors,
        SENT,
        ("rank 0 keeps its values in the model", nothing, "plan.no-weights at embed.weight"),
        ("a parameter stays in the model", stash_but_one, "plan.no-weights at embed.weight"),
        world=2,
    ),
    *faults(
        s.SendTensors,
        SENT,
        ("nothing is sent", nothing, "everything that was on meta has values: embed.weight"),
        ("a tensor is not sent", send_but_one, "everything that was on meta has values: embed.weight"),
        ("what was sent is kept", afterwards(keep_stashed), "all that was set aside is sent: embed.weight"),
        (
            "a buffer is sent with other values",
            afterwards(write_kept),
            "run.values-changed at model.kept",
        ),
        world=2,
    ),
    *faults(
        s.UpcastParameters,
        SINGLE,
        (
            "upcast does nothing",
            nothing,
            "run.no-master-weights at model",
        ),
        ("upcast forgets a parameter", upcast_but_one, "parameters are float32: embed.weight is bfloat16"),
        ("upcast freezes a parameter", afterwards(freeze), "requires_grad planned True, found False"),
        (
            "a tie is lost",
            afterwards(untie),
            "run.tie-broken at model.embed.weight: `embed.weight` and",
        ),
        ("a buffer is cast", afterwards(cast_buffer), "model.kept: planned bfloat16[3], found float16[3]"),
    ),
    *faults(
        s.CheckpointModules,
        SHARDED,
        (
            "a tie is lost before sharding",
            afterwards(untie),
            "`embed.weight` and `head.weight` are no longer one parameter",
        ),
        ("one block is not checkpointed", unwrap_checkpoint, "run.step-undone at CheckpointModules: wrapped: layers.2"),
    ),
    *faults(
        s.MoveModel,
        SINGLE,
        (
            "a buffer is left uninitialized",
            afterwards(uninitialize),
            "run.values-changed at model.passing",
        ),
        (
            "a buffer is left on meta",
            afterwards(leave_on_meta),
            "run.left-on-meta at model.passing: No data",
        ),
        ("a non-persistent buffer is lost", afterwards(lose_buffer), "run.other-layout at model.passing: it is gone"),
    ),
    *faults(
        s.AutocastForward,
        SINGLE,
        ("autocast is not installed", nothing, "Tiny has its own forward"),
        (
            "autocast in another dtype",
            changed(dtype="float16"),
            "planned ('cpu', 'bfloat16', 'float32'), found ('cpu', 'float16', 'float32')",
        ),
    ),
    *faults(
        s.CheckpointModules,
        SINGLE,
        ("nothing is checkpointed", nothing, "CheckpointModules: wrapped: layers.0; layers.1; layers.2"),
        ("inputs leave the device", changed(offload=True), "layers.0 calls another function than torch's checkpoint"),
        ("what is recomputed is kept", changed(keep_ops=("aten.mm",)), "layers.0 keeps the outputs of aten.mm"),
        ("dropout is not replayed", changed(preserve_rng_state=False), "layers.0 replays dropout: False"),
    ),
    *faults(
        s.CompileModules,
        SINGLE,
        ("nothing is compiled", nothing, "compiled code is bound: layers.0; layers.1; layers.2"),
        ("a compiled twin never runs", compile_twin, "compiled code is bound: layers.0; layers.1; layers.2"),
    ),
    *faults(
        s.BuildMesh,
        SHARDED,
        ("the mesh has other axes", changed(axes=(s.Axis(name="shards", size=1),)), "BuildMesh: device and axes"),
    ),
    *faults(
        s.ShardUnits,
        SHARDED,
        ("nothing is sharded", nothing, "cls planned DTensor, found Parameter"),
        ("a unit is not sharded", shard_but_one, "ShardUnits: units: layers.0 is none"),
        ("a unit's hook is not registered", afterwards(unhook), "a hook gathers each unit: layers.0 has none"),
        (
            "mixed precision is lost in sharding",
            changed(param_dtype=None),
            "planned ('bfloat16', 'float32', None), found (None, 'float32', None)",
        ),
        ("parameters are offloaded unasked", changed(offload=True), "offload planned False, found True"),
        ("a block is replaced by a fresh one after sharding", afterwards(replace_block), "found Parameter"),
    ),
    *faults(
        s.MakeContiguous,
        STRIDED,
        ("transposed weights stay so", nothing, "lie in the order of their indices: layers.0.outer.weight"),
        ("one of them stays so", afterwards(transpose), "lie in the order of their indices: layers.1.outer.weight"),
        without=(s.ShardUnits,),
    ),
    *faults(
        s.AverageGradients,
        WHOLE_PARTS,
        ("nobody averages what stays whole", nothing, "what every rank holds whole is averaged: layers.0.outer.weight"),
        ("a parameter is not averaged", average_but_one, "is averaged: layers.0.outer.weight"),
        ("it is averaged over no ranks", afterwards(ungrouped), "sizes of the groups: planned [2], found []"),
        world=2,
    ),
    *faults(
        s.WrapDDP,
        WHOLE,
        ("DDP does not wrap", nothing, "WrapDDP: wrapped: the model is a Tiny"),
        (
            "DDP gets another option",
            changed(find_unused_parameters=True),
            "find_unused_parameters: planned False, found True",
        ),
        ("DDP gets another bucket size", changed(bucket_cap_mb=1.0), "bytes of a bucket"),
    ),
    *faults(
        s.RebindOptimizer,
        SHARDED,
        ("the optimizer is left on old parameters", nothing, "It no longer steps `embed.weight`"),
        ("the optimizer is bound to copies", bind_old, "and steps 3 tensors that the model does not have"),
        (
            "a slot is dropped",
            afterwards(drop_slot),
            "run.orphans at optimizer.param_groups[0]: It no longer",
        ),
        ("optimizer state is lost", afterwards(lose_state), "run.state-lost at optimizer: The state of 13 parameters"),
        ("optimizer state stays whole", afterwards(whole_state), "state lies as its parameter does"),
        (
            "the scheduler drives another optimizer",
            afterwards(another_optimizer),
            "run.scheduler-elsewhere at",
        ),
    ),
    *faults(
        s.CreateOptimizer,
        evolve(SINGLE, optimizer=AdamW()),
        (
            "the optimizer is created over copies",
            create_over_clones,
            "It no longer steps `embed.weight`",
        ),
    ),
    *faults(
        s.CreateOptimizer,
        evolve(SINGLE, optimizer=SGD(lr=0.5, momentum=0.9)),
        ("the optimizer is created without its options", changed(options=()), "lr planned 0.5, found 0.001"),
    ),
    *faults(
        s.ShardLoader,
        WHOLE,
        ("a loader is not split", nothing, "found (1, 0, 'own', None, None)"),
        ("both ranks read the same part", same_rank, "parts, part, order and seed of loader 0"),
        ("a loader has another order", changed(seed=8), "parts, part, order and seed of loader 0"),
        world=2,
    ),
    *faults(
        s.WrapLoader,
        WHOLE,
        ("a loader is not wrapped", unwrapped_loader, "loader 0: planned Loader, found DataLoader"),
        ("batches stay on the host", changed(device=None), "device of loader 0: planned cpu, found None"),
        ("the last batch does not end the window", changed(ends_window=False), "ends windows, evaluation and part"),
        world=2,
    ),
    *faults(
        s.CheckpointModules,
        SHARDED,
        (
            "each rank has a buffer of its own",
            afterwards(own_buffer),
            "run.ranks-values at model.kept: Beside rank 0, rank 1 holds 1 tensor with values of its own: `kept`",
        ),
        world=2,
    ),
    *faults(
        s.WrapDDP,
        evolve(WHOLE, engine=DDP(hook=CompressHook(dtype="float16"))),
        ("DDP forgets the communication hook", changed(hook=None), "communication hooks: planned 1, found 0"),
    ),
    *faults(
        s.RegisterEntryPoints,
        evolve(SHARDED, entry_points=("embedded",)),
        ("a method stays outside the units", nothing, "methods run as forward does: embedded runs as the class has it"),
    ),
    *faults(
        s.RegisterEntryPoints,
        evolve(WHOLE, entry_points=("embedded",)),
        ("a method is not run by the wrapper", changed(through="forward"), "embedded runs as the class has it"),
    ),
    *faults(
        s.RegisterEntryPoints,
        evolve(SINGLE, entry_points=("embedded",)),
        ("a method runs outside autocast", nothing, "embedded runs as the class has it"),
    ),
    *faults(
        s.ConvertSyncBatchNorm, NORMED, ("batch norms stay apart", nothing, "synchronised: norm"), without=(s.WrapDDP,)
    ),
    *faults(
        s.CreateGradScaler,
        HALF,
        ("the loss is not scaled", nothing, "scale of an enabled scaler: planned 65536.0, found None"),
        ("the loss is scaled by another factor", changed(init_scale=2.0), "planned 65536.0, found 2.0"),
    ),
    *faults(
        s.WrapFSDP1,
        FLAT,
        ("FSDP1 does not wrap", nothing, "it is in no flat parameter"),
        ("FSDP1 forgets a unit", shard_but_one, "WrapFSDP1: units: layers.0 is none"),
        ("FSDP1 shards in another way", changed(sharding="NO_SHARD"), "layers.0 is NO_SHARD"),
        ("FSDP1 computes in another dtype", changed(param_dtype=None), "computes in None"),
        ("FSDP1 reduces in another dtype", changed(reduce_dtype="bfloat16"), "reduces in bfloat16"),
        (
            "FSDP1 gathers in another order",
            changed(backward_prefetch="BACKWARD_POST"),
            "backward_prefetch planned BACKWARD_PRE, found BACKWARD_POST",
        ),
        world=2,
    ),
    *faults(
        s.CheckpointModules,
        FLAT,
        ("FSDP1 loses a tie", afterwards(untie), "`embed.weight` and `head.weight` are no longer one parameter"),
        world=2,
    ),
    *faults(
        s.RegroupOptimizer,
        LAID,
        ("flat parameters never reach the optimizer", nothing, "groups hold what they held: group 0 does not hold"),
        ("the optimizer loses state to flat parameters", afterwards(lose_state), "The state of"),
        ("state stays as long as the whole", afterwards(long_state), "state lies as its parameter does"),
        world=2,
    ),
    *faults(
        s.ParallelizeModules,
        CUT,
        ("no layer is cut", nothing, "layers.0.inner.weight: cls planned DTensor, found Parameter"),
        ("layers of one kind are not cut", parallelize_but_one, "layers.0.inner.weight: cls planned DTensor"),
        ("a cut layer has no hooks", afterwards(unhook_layer), "input and output are laid out: layers.1.inner"),
        ("cutting tears a tie", afterwards(untie), "`embed.weight` and `head.weight` are no longer one parameter"),
        world=2,
    ),
    *faults(
        s.PartitionParameters,
        PARTS,
        ("nothing is divided", nothing, "cannot be called on meta tensors"),
        ("a part stays without values", afterwards(forget_values), "everything that was on meta has values: a part"),
        world=2,
        double=bare,
    ),
    *faults(s.CastForward, ZERO, ("inputs are not cast", nothing, "Wide has its own forward"), world=2, double=bare),
    *faults(
        s.MarkLeafModules, ZERO, ("no module is a leaf", nothing, "gathered whole: layers.0"), world=2, double=bare
    ),
    *faults(
        s.InitializeDeepSpeed,
        ZERO,
        ("DeepSpeed gets nothing", nothing, "wrapped: planned DeepSpeedEngine, found Wide"),
        ("ZeRO shards less", zero_one, "ZeRO stage: planned 3, found 1"),
        world=2,
        double=bare,
    ),
    *faults(
        s.ConvertFP8Linears,
        EIGHT,
        ("layers stay wide", nothing, "layers compute in float8: layers.0.outer is Linear"),
        ("layers compute as on a GPU", changed(emulate=False), "has emulate, all_gather (False, False)"),
    ),
    *faults(
        s.PrecomputeFloat8Scales,
        evolve(EIGHT, engine=FSDP2()),
        ("scales are never computed", nothing, "scales are computed after each step"),
        world=2,
    ),
    *faults(
        s.ConvertTransformerEngine,
        eight_bits(TransformerEngine()),
        ("TransformerEngine replaces nothing", nothing, "layers are TransformerEngine's: "),
        double=library_doubles.transformer_engine,
    ),
    *faults(
        s.AutocastFP8Forward,
        eight_bits(TransformerEngine()),
        ("the float8 autocast is not installed", nothing, "Wide has its own forward"),
        double=library_doubles.transformer_engine,
    ),
    *faults(
        s.InitializeMSAMP,
        eight_bits(MSAMP()),
        ("MS-AMP leaves the optimizer", nothing, "the optimizer is MS-AMP's: it is AdamW"),
        double=library_doubles.msamp,
    ),
    *faults(
        s.ReduceXLAGradients,
        Config(engine=XLA(), loaders=KeepLoaders()),
        ("nobody averages over XLA devices", nothing, "gradients are averaged before each step"),
        double=library_doubles.torch_xla,
    ),
)


def planted(fault: Planted) -> AbstractContextManager[None]:
    """Steps of the kind are done with the fault meanwhile."""
    real = KINDS[fault.kind].handler
    return handled_by(fault.kind, evolve(real, do=lambda step, target: fault.do(step, target, real)))


def transposed(model: nn.Module) -> None:
    """Every block's last weight lies as a transposed one."""
    for index in range(3):
        outer = model.get_parameter(f"layers.{index}.outer.weight")
        outer.data = outer.data.t().contiguous().t()


def case(cfg: Config, world: int) -> tuple[Plan, Target]:
    """A model in bfloat16 with an optimizer that has stepped, and its plan."""
    if isinstance(cfg.precision, FP8) or isinstance(cfg.engine, XLA | TensorParallel | DeepSpeed):
        return wide_case(cfg, world)
    torch.manual_seed(0)
    if cfg is FILES:
        bare = tiny_on_meta()
        return planned(cfg, bare), Target(model=bare)
    if cfg is SENT:
        some = tiny_on_meta() if dist.is_initialized() and dist.get_rank() else Tiny(torch.bfloat16)
        return planned(cfg, some, world=world), Target(model=some)
    if cfg is FILLED:
        with torch.device("meta"):
            model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return planned(cfg, model, None), Target(model=model)
    make = WithNorm if cfg is NORMED else Tiny
    model = make(torch.bfloat16 if isinstance(cfg.precision, BF16) else torch.float32)
    if cfg is LAID:  # units of one flat parameter, which is trained as a whole and in one group
        model.requires_grad_()
    if cfg is STRIDED:
        transposed(model)
    optimizer = None if cfg.optimizer else stepped(model, groups=1 if cfg is LAID else 2)
    scheduler = None if optimizer is None else StepLR(optimizer, 1)
    loader: Any = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)
    plan = planned(cfg, model, optimizer, world=world, loaders=(loader,), scheduler=scheduler)
    return plan, Target(model=model, optimizer=optimizer, scheduler=scheduler, loaders=[loader])


def wide_case(cfg: Config, world: int) -> tuple[Plan, Target]:
    """A model whose layers fit float8, with an optimizer that has not stepped, and its plan."""
    with torch.device("meta") if cfg is PARTS else nullcontext():
        model = fp8_model.seeded()
    optimizer = torch.optim.AdamW(model.parameters())
    ranks = 2 if isinstance(cfg.engine, XLA) else world  # of one process there is nothing to average
    return fp8_model.planned(cfg, model, optimizer, world_size=ranks), Target(model=model, optimizer=optimizer)


def said(rank: int, world: int, index: int | None) -> list[str]:
    """The findings after an apply with the fault of this index; with None, after applies without any."""
    if index is None:
        lean()
        return [
            text
            for cfg in (
                (SINGLE, HALF, EIGHT, FILES)
                if world == 1
                else (WHOLE, SHARDED, WHOLE_PARTS, FLAT, LAID, CUT, ZERO, PARTS, SENT)
            )
            for text in outcome_of(cfg, world)
        ]
    one = FAULTS[index]
    with planted(one), pytest.MonkeyPatch.context() as patches:
        if one.double is not None:
            one.double(patches)
        return outcome_of(one.cfg, world, one.without)


def outcome_of(cfg: Config, world: int, without: tuple[type, ...] = ()) -> list[str]:
    """The findings of one apply, or why it halted."""
    plan, target = case(cfg, world)
    plan = evolve(plan, steps=tuple(one for one in plan.steps if not isinstance(one.step, without)))
    outcome = run(plan, target)
    if world == 1 and dist.is_initialized():
        dist.destroy_process_group()
    failure: Any = unsafe_perform_io(outcome.swap().value_or(None))  # type: ignore[arg-type]
    return [] if failure is None else list(map(str, getattr(failure, "failed", (failure,))))


def table(pool: Gang) -> str:
    """Step kind, fault, and the check that caught it."""
    lines = [("step", "fault", "caught by")]
    for number, one in enumerate(FAULTS):
        texts = [text for rank in pool.run(said, number) for text in rank] if one.world == 2 else said(0, 1, number)
        found = sorted((text for text in texts if one.caught in text), key=lambda text: "\n" in text)  # a check first
        caught = found[0] if found else "NOT CAUGHT"
        lines.append((one.kind.__name__, one.what, caught))
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join(f"{kind:{widths[0]}}  {what:{widths[1]}}  {caught[:110]}" for kind, what, caught in lines)
