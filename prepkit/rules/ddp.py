"""Options of ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from prepkit.config import DDP, CompressHook, Config, Intent, PowerSGDHook
from prepkit.facts import ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, some
from prepkit.resolve.modules import parent, unsynchronized_batch_norms
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule, options, with_engine


def _bucket(_: Resolved, engine: DDP) -> Iterator[Hit]:
    if not 0 < engine.bucket_cap_mb < _LARGEST_BUCKET:
        yield Hit("config.engine.bucket_cap_mb", f"{engine.bucket_cap_mb} MiB is no size of a bucket.")


_LARGEST_BUCKET = 2.0**42
"""MiB from which a number of bytes is none that torch takes."""


def _compiled_bucket(resolved: Resolved, engine: DDP) -> Iterator[Hit]:
    cfg = resolved.cfg
    if cfg.compile is None or not _trains(cfg):
        return
    if 0 < engine.bucket_cap_mb < _FIRST_BUCKET:
        what = f"{engine.bucket_cap_mb} MiB: torch.compile cuts the graph at the buckets, and the first has 1 MiB."
        yield Hit("config.engine.bucket_cap_mb", what)


_FIRST_BUCKET = 1.0
"""MiB of DDP's first bucket (torch ``_DEFAULT_FIRST_BUCKET_BYTES``)."""


def _unused(_: Resolved, engine: DDP) -> Iterator[Hit]:
    if engine.static_graph and engine.find_unused_parameters:
        what = "static_graph=True finds unused parameters by itself; find_unused_parameters=True adds nothing."
        yield Hit("config.engine.find_unused_parameters", what)


def _reentrant(resolved: Resolved, engine: DDP) -> Iterator[Hit]:
    blocks = [module.path for module in resolved.facts.model.modules if "reentrant" in module.marks]
    if engine.find_unused_parameters and blocks:
        what = f"Reentrant checkpointing of {some([at(path) for path in blocks])} runs a backward of its own"
        yield Hit("config.engine.find_unused_parameters", f"{what}, which marks parameters ready a second time.")


def _hook_dtype(resolved: Resolved, engine: DDP) -> Iterator[Hit]:
    if (device := resolved.compute_device) in ("cuda", "xpu"):
        return
    asked = {CompressHook: "dtype", PowerSGDHook: "wrapper"}.get(type(engine.hook), "")
    if asked and getattr(engine.hook, asked) == "bfloat16":
        yield Hit(f"config.engine.hook.{asked}", f"torch reduces bfloat16 over NCCL and XCCL only, not on {device}.")


def _powersgd(_: Resolved, engine: DDP) -> Iterator[Hit]:
    if not isinstance(hook := engine.hook, PowerSGDHook):
        return
    if hook.rank < 1:
        yield Hit("config.engine.hook.rank", f"A matrix of rank {hook.rank} carries no gradient.")
    least = 2 if hook.use_error_feedback or hook.warm_start else 0
    if hook.start_iter < least:
        why = f"at least {least} with error feedback or warm start" if least else "at least 0"
        yield Hit("config.engine.hook.start_iter", f"start_iter={hook.start_iter} has to be {why}.")
    for name in ("min_compression_rate", "orthogonalization_epsilon"):
        value = getattr(hook, name)
        if not isfinite(value) or value < 0 or (value == 0 and name == "min_compression_rate"):
            yield Hit(f"config.engine.hook.{name}", f"{name}={value:g} is out of range.")


def _sync_on_cpu(resolved: Resolved, engine: DDP) -> Iterator[Hit]:
    cfg = resolved.cfg
    paths = unsynchronized_batch_norms(resolved.facts.model)
    on_cpu = resolved.compute_device == "cpu"
    if engine.sync_batchnorm and paths and on_cpu and _trains(cfg):
        what = (
            f"The model is trained on the CPU, and SyncBatchNorm on accelerators only; it would replace {some(paths)}."
        )
        yield Hit("config.engine.sync_batchnorm", what)


def _nothing_to_sync(resolved: Resolved, engine: DDP) -> Iterator[Hit]:
    facts = resolved.facts
    if engine.sync_batchnorm and not unsynchronized_batch_norms(facts.model):
        yield Hit("config.engine.sync_batchnorm", "The model has no batch norm that is not synchronised yet.")


OF_A_BATCH_NORM = frozenset({"weight", "bias", "running_mean", "running_var", "num_batches_tracked"})
"""What torch takes over into a ``SyncBatchNorm``."""


def lost_in_sync(model: ModelFacts) -> tuple[str, ...]:
    """Parameters and buffers of batch norms that a ``SyncBatchNorm`` made from them would not have."""
    norms = set(unsynchronized_batch_norms(model))
    names = (*(param.name for param in model.params), *(buffer.name for buffer in model.buffers))
    return tuple(name for name in names if parent(name) in norms and name.rpartition(".")[2] not in OF_A_BATCH_NORM)


def _loses(resolved: Resolved, engine: DDP) -> Iterator[Hit]:
    if engine.sync_batchnorm and (lost := lost_in_sync(resolved.facts.model)):
        what = f"torch makes SyncBatchNorm anew, from weight, bias and statistics alone; {some(lost)} would be lost."
        yield Hit("config.engine.sync_batchnorm", what)


def _trains(cfg: Config) -> bool:
    return cfg.intent is Intent.TRAINING


RULES: tuple[Rule, ...] = (
    Rule(
        id="ddp.bucket-size",
        summary="A gradient bucket has a size above 0.",
        check=with_engine(DDP, _bucket),
        fix="Write a number of MiB, such as bucket_cap_mb=25.0.",
        source=("torch DistributedDataParallel", "pain 24"),
        repair=options(DDP, bucket_cap_mb=DDP().bucket_cap_mb),
    ),
    Rule(
        id="ddp.compiled-bucket",
        summary="Under torch.compile no gradient bucket is smaller than the first.",
        check=with_engine(DDP, _compiled_bucket),
        fix="Write bucket_cap_mb=1.0 or more, or compile=None.",
        source=("torch DDPOptimizer",),
        repair=options(DDP, bucket_cap_mb=DDP().bucket_cap_mb),
    ),
    Rule(
        id="ddp.unused-in-static-graph",
        summary="Unused parameters are not searched for in a static graph.",
        check=with_engine(DDP, _unused),
        fix="Leave find_unused_parameters at False.",
        severity=Severity.WARNING,
        source=("torch DistributedDataParallel._set_static_graph", "pain 26"),
        repair=options(DDP, find_unused_parameters=False),
    ),
    Rule(
        id="ddp.reentrant-unused",
        summary="Unused parameters are not searched for where checkpointing is reentrant.",
        check=with_engine(DDP, _reentrant),
        fix='Leave find_unused_parameters at False, or call gradient_checkpointing_enable({"use_reentrant": False}).',
        source=("pain 26", "torch DistributedDataParallel"),
        repair=options(DDP, find_unused_parameters=False),
    ),
    Rule(
        id="ddp.hook-dtype",
        summary="Gradients are compressed to bfloat16 where the backend reduces it.",
        check=with_engine(DDP, _hook_dtype),
        fix='Write "float16", or leave the hook out.',
        source=("H-30", "torch DistributedDataParallel._check_comm_hook"),
        repair=options(DDP, hook=None),
    ),
    Rule(
        id="ddp.powersgd",
        summary="The numbers of PowerSGD lie where torch takes them.",
        check=with_engine(DDP, _powersgd),
        fix="Write a number in that range, or leave the field out.",
        source=("H-30", "torch PowerSGDState"),
        repair=options(DDP, hook=None),
    ),
    Rule(
        id="ddp.sync-batchnorm-on-cpu",
        summary="Batch norms are synchronised on accelerators.",
        check=with_engine(DDP, _sync_on_cpu),
        fix="Leave sync_batchnorm at False.",
        source=("torch SyncBatchNorm.forward",),
        repair=options(DDP, sync_batchnorm=False),
    ),
    Rule(
        id="ddp.sync-batchnorm-loses",
        summary="A batch norm that is to be synchronised has no parameters or buffers of its own.",
        check=with_engine(DDP, _loses),
        fix="Leave sync_batchnorm at False, or move them out of the batch norm.",
        source=("torch SyncBatchNorm.convert_sync_batchnorm",),
        overridable=False,
        repair=options(DDP, sync_batchnorm=False),
    ),
    Rule(
        id="ddp.no-batchnorm",
        summary="There is a batch norm where they are to be synchronised.",
        check=with_engine(DDP, _nothing_to_sync),
        fix="Leave sync_batchnorm at False.",
        severity=Severity.WARNING,
        source=("torch SyncBatchNorm.convert_sync_batchnorm",),
        repair=options(DDP, sync_batchnorm=False),
    ),
)
"""Reporting order: buckets, unused parameters, hooks, batch norms. torch takes any bucket size without a word."""
