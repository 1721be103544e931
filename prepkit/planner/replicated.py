"""Steps of engines whose ranks hold the whole model: DDP, one process, torch_xla."""

from __future__ import annotations

from typing import Literal, assert_never

from prepkit.config import DDP, XLA, CommHook, CompressHook, PowerSGDHook
from prepkit.plan import because
from prepkit.planner import fp8, pieces, weights
from prepkit.planner.pieces import Piece, entry_points
from prepkit.planner.weights import prepare_loaders
from prepkit.resolve.engines import engine_of
from prepkit.resolve.modules import unsynchronized_batch_norms
from prepkit.resolve.resolved import Resolved
from prepkit.steps import (
    ConvertSyncBatchNorm,
    DDPCommHook,
    LocalDevice,
    MoveToXLA,
    PowerSGDOptions,
    ReduceXLAGradients,
    WrapDDP,
)


def plan_ddp(resolved: Resolved) -> Piece:
    """Steps of the ``DDP`` engine (behaviour DDP-1 … DDP-8, MC-1)."""
    return (
        pieces.start_group(resolved)
        + weights.check_files(resolved)  # while nothing has been changed
        + fp8.convert(resolved)  # before anything is wrapped around the layers that it replaces
        + weights.move(resolved)
        + pieces.upcast(resolved)
        + sync_batchnorm(resolved)  # replaces modules: before anything is wrapped around them
        + fp8.initialize(resolved)
        + pieces.autocast(resolved)  # patches the user's model, not the wrapper
        + pieces.checkpoint(resolved)
        + pieces.compile_blocks(resolved)
        + weights.fill(resolved)  # in the dtypes that the cast has given; the wrapper compares what stands there
        + wrap(resolved)  # sees the parameters in the dtype and on the device in which they train
        + fp8.autocast(resolved)  # around the wrapper, whose forward is what the user calls
        + pieces.compile_model(resolved)  # outermost: torch splits the graph at DDP's buckets
        + entry_points(resolved)  # of the wrapper
        + pieces.move_state(resolved)
        + pieces.create_optimizer(resolved)
        + pieces.grad_scaler(resolved)
        + prepare_loaders(resolved)
    )


def wrap(resolved: Resolved) -> Piece:
    """The wrapper; none for inference, which reduces no gradients (EV-1)."""
    if not isinstance(resolved.cfg.engine, DDP) or not resolved.trains:
        return ()
    engine = resolved.cfg.engine
    step = WrapDDP(
        device=None if pieces.is_spread(resolved) else LocalDevice(type=resolved.compute_device),
        broadcast_buffers=engine.broadcast_buffers,
        bucket_cap_mb=engine.bucket_cap_mb,
        find_unused_parameters=engine.find_unused_parameters,
        gradient_as_bucket_view=engine.gradient_as_bucket_view,
        static_graph=engine.static_graph,
        hook=communication(engine.hook),
    )
    ranks = resolved.facts.env.world_size
    return because(step, f"averages gradients over {ranks} rank{'s' if ranks > 1 else ''}", "DDP-1", "DDP-5", "MC-1")


def sync_batchnorm(resolved: Resolved) -> Piece:
    """Batch norms over all ranks, where that is asked for and there are any."""
    paths = unsynchronized_batch_norms(resolved.facts.model)
    if not (isinstance(resolved.cfg.engine, DDP) and resolved.cfg.engine.sync_batchnorm and paths and resolved.trains):
        return ()
    return because(ConvertSyncBatchNorm(paths=paths), "statistics are taken over the batches of all ranks", "DDP-1")


_COMPRESS: dict[str, Literal["fp16_compress_hook", "bf16_compress_hook"]] = {
    "float16": "fp16_compress_hook",
    "bfloat16": "bf16_compress_hook",
}
_WRAPPERS: dict[str, Literal["fp16_compress_wrapper", "bf16_compress_wrapper"] | None] = {
    "none": None,
    "float16": "fp16_compress_wrapper",
    "bfloat16": "bf16_compress_wrapper",
}


def communication(hook: CommHook) -> DDPCommHook | None:
    """Torch's names for what is asked for (H-30)."""
    match hook:
        case None:
            return None
        case CompressHook(dtype=dtype):
            return DDPCommHook(hook=_COMPRESS[dtype])
        case PowerSGDHook():
            options = PowerSGDOptions(
                matrix_approximation_rank=hook.rank,
                start_powerSGD_iter=hook.start_iter,
                min_compression_rate=hook.min_compression_rate,
                use_error_feedback=hook.use_error_feedback,
                warm_start=hook.warm_start,
                orthogonalization_epsilon=hook.orthogonalization_epsilon,
                random_seed=hook.random_seed,
                batch_tensors_with_same_shape=hook.batch_tensors_with_same_shape,
            )
            return DDPCommHook(hook="powerSGD_hook", wrapper=_WRAPPERS[hook.wrapper], options=options)
        case _:
            assert_never(hook)


def plan_single(resolved: Resolved) -> Piece:
    """Steps of the ``Single`` engine."""
    return (
        weights.check_files(resolved)  # while nothing has been changed
        + fp8.convert(resolved)  # before anything is wrapped around the layers that it replaces
        + weights.move(resolved)  # before the cast, which then happens where the model will live
        + pieces.upcast(resolved)
        + fp8.initialize(resolved)
        + pieces.autocast(resolved)  # inside whatever compiles the model
        + fp8.autocast(resolved)  # around it: what TransformerEngine calls is the bfloat16 forward
        + pieces.checkpoint(resolved)
        + pieces.compile_blocks(resolved)  # a block is compiled as it will run: checkpointed
        + entry_points(resolved)  # patched as the forward is by now
        + pieces.compile_model(resolved)  # last: it takes in everything above
        + weights.fill(resolved)  # after all that can be refused, in the dtypes that the cast has given
        + pieces.move_state(resolved)
        + pieces.create_optimizer(resolved)
        + pieces.grad_scaler(resolved)
        + prepare_loaders(resolved)
    )


def plan_xla(resolved: Resolved) -> Piece:
    """Steps of the ``XLA`` engine (behaviour XL-1, XL-2, PR-11). torch_xla starts and joins its processes itself."""
    return (
        pieces.upcast(resolved)
        + move(resolved)  # may replace every parameter: torch cannot always change a tensor's device in place
        + pieces.autocast(resolved)
        + pieces.checkpoint(resolved)
        + pieces.compile_blocks(resolved)
        + entry_points(resolved)  # patched as the forward is by now
        + pieces.compile_model(resolved)
        + pieces.rebind_optimizer(resolved)
        + pieces.create_optimizer(resolved)
        + reduce(resolved)  # watches the optimizer that is there by now
    )


def move(resolved: Resolved) -> Piece:
    """The model to the device of this process."""
    engine = engine_of(resolved.cfg, XLA)
    how = "through torch_xla's wrapper for forked processes" if engine.forked else "each process by itself"
    return because(MoveToXLA(forked=engine.forked), f"the model computes on XLA; {how}", "XL-1", "XL-2", "PR-6")


def reduce(resolved: Resolved) -> Piece:
    """Gradients averaged where there are several processes and an optimizer."""
    facts = resolved.facts
    if facts.env.world_size == 1 or (facts.optimizer is None and not resolved.cfg.optimizer):
        return ()
    return because(ReduceXLAGradients(), f"averages gradients over {facts.env.world_size} processes", "W-5")
