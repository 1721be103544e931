"""The fp16 and bf16 sections of a DeepSpeed config: one owner, which is ``config.precision`` (DP-30 … DP-34, G-35)."""

from __future__ import annotations

from math import frexp

from prepkit.config import FP8, FP16, MSAMP, Intent, Mixed
from prepkit.config.precision import PRECISIONS
from prepkit.resolve.deepspeed.data import look
from prepkit.resolve.deepspeed.flaws import Draft

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""torch's names to DeepSpeed's (deepspeed/runtime/config.py ``DtypeEnum``)."""


def precision(draft: Draft, stage: int) -> None:
    """Switches the sections on and off, and says where the user's JSON asks for another precision."""
    asked = draft.cfg.precision
    if "bfloat16" in draft.data:
        draft.data.setdefault("bf16", draft.data.pop("bfloat16"))
    section = PRECISIONS[type(asked)].deepspeed_section
    for name in ("bf16", "fp16", "torch_autocast"):
        _switch(draft, f"{name}.enabled", on=name == section)
    if isinstance(asked, Mixed):
        _masters(draft, asked)
        _sums(draft, asked, stage)
    if isinstance(asked, FP16):
        _scale(draft, asked)
    if isinstance(asked, FP8) and isinstance(asked.backend, MSAMP):
        _msamp(draft, asked.backend, stage)


def _switch(draft: Draft, path: str, *, on: bool) -> None:
    """A section that is there is filled in, and one that is wanted made."""
    named = f"{type(draft.cfg.precision).__name__}()"
    said = look(draft.data, path)
    if draft.says(path) and said is not on:
        what = f"`{path}` is {str(said).lower()} in config.engine.config, and config.precision is {named}."
        fix = f'Say it in config.precision alone, and remove `{path}` or write "auto" there.'
        draft.flaw("precision", what, fix, "config.precision")
    elif on or draft.is_auto(path):
        draft.fill(path, on, f"config.precision is {named}")


def _masters(draft: Draft, asked: Mixed) -> None:
    low, section = PRECISIONS[type(asked)].compute_dtype, PRECISIONS[type(asked)].deepspeed_section
    path = f"{section}.{section}_master_weights_and_grads"
    if draft.says(path):
        draft.settle(path, not asked.master_weights, "config.precision.master_weights")
    elif not asked.master_weights:
        what = f"DeepSpeed keeps float32 copies of what it trains in {low}, unless `{path}` is true."
        fix = f"Leave master_weights at True, or write `{path}`: true as well."
        draft.flaw("master-weights", what, fix, "config.precision.master_weights")


def _sums(draft: Draft, asked: Mixed, stage: int) -> None:
    """Dtypes in which gradients travel and add up."""
    if stage == 0 and draft.cfg.intent is Intent.TRAINING:
        low = PRECISIONS[type(asked)].compute_dtype
        what = f"At stage 0 in {low} DeepSpeed takes a step with zero gradients first: decay and bias correction drift."
        draft.flaw("stage-0-16-bit", what, where="config.engine.stage")
    reduce = DTYPES[asked.reduce_dtype]
    draft.settle("communication_data_type", reduce, "config.precision.reduce_dtype")
    if asked.reduce_dtype == "float32" and stage > 0:
        draft.fill("data_types.grad_accum_dtype", reduce, "micro-batches add up as they are reduced")


def _msamp(draft: Draft, asked: MSAMP, stage: int) -> None:
    """MS-AMP's own section (msamp/deepspeed/runtime/config.py), which DeepSpeed itself does not know (DP-12, DP-31)."""
    if stage == 3:
        what = "MS-AMP shards optimizer state and gradients, and cannot shard parameters (ZeRO stage 3)."
        draft.flaw("msamp", what, "Write DeepSpeed(stage=2), or backend=TorchAO().", "config.engine.stage")
    device = draft.get("zero_optimization.offload_optimizer.device", "none")
    if device != "none":
        what = f"MS-AMP steps its optimizer where the parameters are, and optimizer state is offloaded to {device}."
        fix = "Leave offload_optimizer out, or write backend=TorchAO()."
        draft.flaw("msamp", what, fix, "config.engine.offload_optimizer")
    draft.settle("msamp.enabled", ours=True, place="config.precision")
    draft.settle("msamp.opt_level", asked.opt_level, "config.precision.backend.opt_level")


def _scale(draft: Draft, asked: FP16) -> None:
    """The loss scale, which DeepSpeed holds: powers of two, doubled and halved (deepspeed/runtime/fp16)."""
    if (asked.growth_factor, asked.backoff_factor) != (2.0, 0.5):
        what = (
            f"DeepSpeed doubles and halves the loss scale, not by {asked.growth_factor:g} and {asked.backoff_factor:g}."
        )
        draft.flaw("loss-scale", what, "Leave growth_factor and backoff_factor out.", "config.precision")
    half, power = frexp(asked.init_scale)
    if half != 0.5 or power < 1:
        what = f"DeepSpeed begins with a power of two, and init_scale is {asked.init_scale:g}."
        draft.flaw("loss-scale", what, "Write init_scale=65536.0.", "config.precision.init_scale")
        return
    draft.settle("fp16.loss_scale", 0, "config.precision", "scaled as overflows ask for")
    draft.settle("fp16.initial_scale_power", power - 1, "config.precision.init_scale")
    draft.settle("fp16.loss_scale_window", asked.growth_interval, "config.precision.growth_interval")
    draft.fill("fp16.hysteresis", 1, "each overflow lowers the scale, as under every other engine")
