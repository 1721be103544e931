"""Number formats against the device, the engine and what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from attrs import evolve

from prepkit.config import BF16, FP8, FP16, FSDP1, FSDP2, Config, Intent, Mixed
from prepkit.config.precision import PRECISIONS, as_typed
from prepkit.facts import Facts, ParamFact
from prepkit.findings import Severity
from prepkit.findings.text import count, some
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def _unsupported(resolved: Resolved) -> Iterator[Hit]:
    traits = PRECISIONS[type(resolved.cfg.precision)]
    if traits.compute_dtype != "bfloat16" or resolved.compute_device != resolved.facts.env.device:
        return
    env = resolved.facts.env
    if env.capability is not None and env.capability < (8, 0):
        major, minor = env.capability
        what = f"The {env.device} device has compute capability {major}.{minor}; bfloat16 needs 8.0."
        yield Hit("config.precision", what)
    elif env.bf16 is False:
        yield Hit("config.precision", f"The {env.device} device does not compute in bfloat16.")


SCALED = ("cuda", "xpu", "npu", "hpu", "mlu", "musa", "sdaa", "mps")
"""Device types for which torch's gradient scaler is made (ST-23)."""


def _no_float16(resolved: Resolved) -> Iterator[Hit]:
    device = resolved.compute_device
    if PRECISIONS[type(resolved.cfg.precision)].scales_loss and device not in SCALED:
        yield Hit(
            "config.precision", f"{device} trains nothing in float16: torch scales losses on {', '.join(SCALED)}."
        )


def _unscalable(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if not isinstance(cfg.precision, FP16) or cfg.precision.master_weights or cfg.intent is Intent.INFERENCE:
        return
    if low := [p.name for p in resolved.facts.model.params if p.requires_grad and p.dtype == "float16"]:
        what = f"{count(len(low), 'parameter')} stored and trained in float16 ({some(low)}): torch unscales no gradient"
        yield Hit("config.precision.master_weights", what + " of such a one.")


def _scale(resolved: Resolved) -> Iterator[Hit]:
    if not isinstance(how := resolved.cfg.precision, FP16):
        return
    wrong = (
        ("init_scale", not 0 < how.init_scale < inf, "above 0 and finite"),
        ("growth_factor", not 1 < how.growth_factor < inf, "above 1"),
        ("backoff_factor", not 0 < how.backoff_factor < 1, "between 0 and 1"),
        ("growth_interval", how.growth_interval < 1, "at least 1"),
    )
    for name, is_wrong, bound in wrong:
        if is_wrong:
            yield Hit(f"config.precision.{name}", f"{name}={getattr(how, name):g} has to be {bound}.")


def _float16(resolved: Resolved) -> Iterator[Hit]:
    dtypes = resolved.compute_dtypes
    if dtypes is not None and dtypes.param == "bfloat16":
        for name in ("reduce_dtype", "output_dtype"):
            if getattr(resolved.cfg.precision, name) == "float16":
                yield Hit(f"config.precision.{name}", "float16 ends at 65504, bfloat16 at 3e38: values become inf.")


def _reduce_ignored(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if (
        isinstance(cfg.precision, Mixed)
        and not resolved.engine_traits.takes_reduce_dtype
        and cfg.precision.reduce_dtype != "float32"
    ):
        asked, engine = cfg.precision.reduce_dtype, type(cfg.engine).__name__
        averages = resolved.engine_traits.averages
        does = "reduces in the dtype of the parameters" if averages else "reduces nothing"
        yield Hit("config.precision.reduce_dtype", f"{asked} has no effect: {engine} {does}.")


def _stored(resolved: Resolved) -> Iterator[Hit]:
    low = resolved.low_precision_params
    if resolved.cfg.precision is None and resolved.cfg.intent is Intent.TRAINING and low:
        yield Hit("config.precision", f"{_trained(low)}, so that small updates are rounded away.")


def _no_masters(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    low = resolved.low_precision_params
    unkept = isinstance(cfg.precision, Mixed) and not cfg.precision.master_weights
    if unkept and cfg.intent is Intent.TRAINING and low:
        yield Hit("config.precision.master_weights", f"{_trained(low)} without a float32 copy.")


def _trained(low: tuple[ParamFact, ...]) -> str:
    return f"{count(len(low), 'parameter')} would be stepped in {low[0].dtype} ({some([p.name for p in low])})"


def _as_float32(cfg: Config, _: Facts) -> Config:
    assert isinstance(cfg.precision, BF16 | FP8), "None names no dtypes"
    asked = cfg.precision
    return evolve(
        cfg,
        precision=evolve(
            asked,
            reduce_dtype="float32" if asked.reduce_dtype == "float16" else asked.reduce_dtype,
            output_dtype="float32" if asked.output_dtype == "float16" else asked.output_dtype,
        ),
    )


def _reduce_float32(cfg: Config, _: Facts) -> Config:
    assert isinstance(cfg.precision, Mixed), "the others name no reduce_dtype"
    return evolve(cfg, precision=evolve(cfg.precision, reduce_dtype="float32"))


def _masters(cfg: Config, _: Facts) -> Config:
    assert isinstance(cfg.precision, Mixed), "the others have no master weights"
    return evolve(cfg, precision=evolve(cfg.precision, master_weights=True))


def _usual_scale(cfg: Config, _: Facts) -> Config:
    usual = FP16()
    assert isinstance(cfg.precision, FP16), "only FP16 scales the loss"
    return evolve(
        cfg,
        precision=evolve(
            cfg.precision,
            init_scale=usual.init_scale,
            growth_factor=usual.growth_factor,
            backoff_factor=usual.backoff_factor,
            growth_interval=usual.growth_interval,
        ),
    )


def _usual_casts(cfg: Config, _: Facts) -> Config:
    match cfg.engine:
        case FSDP2():
            return evolve(cfg, engine=evolve(cfg.engine, cast_forward_inputs=True))
        case FSDP1():
            usual = evolve(cfg.engine, cast_forward_inputs=False, cast_root_forward_inputs=True)
            return evolve(cfg, engine=usual)
    return cfg


def _casts_nothing(resolved: Resolved) -> Iterator[Hit]:
    cfg, engine = resolved.cfg, resolved.cfg.engine
    casts = isinstance(engine, FSDP1) and (engine.cast_forward_inputs or not engine.cast_root_forward_inputs)
    keeps = isinstance(engine, FSDP2) and not engine.cast_forward_inputs
    if resolved.compute_dtypes is None and (casts or keeps):
        what = f"precision={as_typed(cfg.precision)} casts nothing: inputs come as they are whatever this says."
        yield Hit("config.engine.cast_forward_inputs", what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="precision.bf16-unsupported",
        summary="BF16 runs on a device that computes in bfloat16.",
        check=_unsupported,
        fix="Write precision=None, or use a device that computes in bfloat16.",
        source=("pain 35", "ST-25"),
    ),
    Rule(
        id="precision.fp16-unsupported",
        summary="FP16 runs on an accelerator whose losses torch can scale.",
        check=_no_float16,
        fix="Write precision=BF16() or precision=None.",
        source=("ST-23", "ST-24", "G-44"),
    ),
    Rule(
        id="precision.fp16-trains-fp16",
        summary="FP16 trains parameters whose gradients can be unscaled.",
        check=_unscalable,
        fix="Leave master_weights at True, which stores what is trained in float32.",
        source=("pain 29", "torch GradScaler.unscale_"),
        repair=_masters,
    ),
    Rule(
        id="precision.loss-scale",
        summary="The loss scale is positive, grows and shrinks.",
        check=_scale,
        fix="Write a number in that range, or leave the field out.",
        source=("K-H3", "torch.amp.GradScaler"),
        repair=_usual_scale,
    ),
    Rule(
        id="precision.float16",
        summary="Nothing that is computed in bfloat16 is squeezed into float16.",
        check=_float16,
        fix='Write "float32" or "bfloat16".',
        source=("pain 29", "G-65"),
        repair=_as_float32,
    ),
    Rule(
        id="precision.casts-nothing",
        summary="Casting of inputs is asked for where there is a dtype to cast to.",
        check=_casts_nothing,
        fix="Leave cast_forward_inputs and cast_root_forward_inputs out, or write precision=BF16().",
        severity=Severity.WARNING,
        source=("torch MixedPrecisionPolicy", "torch MixedPrecision"),
        repair=_usual_casts,
    ),
    Rule(
        id="precision.reduce-dtype-ignored",
        summary="A reduce_dtype is asked for where gradients are reduced in it.",
        check=_reduce_ignored,
        fix='Leave reduce_dtype="float32", and write hook=CompressHook() to send 16 bits under DDP; or engine=FSDP2().',
        severity=Severity.WARNING,
        source=("pain 24", "DDP-7"),
        repair=_reduce_float32,
    ),
    Rule(
        id="precision.steps-in-16-bit",
        summary="Without a precision, trained parameters are stored in at least 32 bits.",
        check=_stored,
        fix="Write precision=BF16(), which keeps float32 master weights, or load the model in float32.",
        severity=Severity.WARNING,
        source=("pain 2", "F1-22", "M2-16"),
    ),
    Rule(
        id="precision.no-master-weights",
        summary="BF16 and FP16 keep float32 master weights of what it trains in 16 bits.",
        check=_no_masters,
        fix="Leave master_weights at True unless the optimizer rounds stochastically.",
        severity=Severity.WARNING,
        source=("pain 2", "M2-16"),
        repair=_masters,
    ),
)
"""Reporting order: what cannot run, what would overflow, what would be lost."""
