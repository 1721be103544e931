"""DeepSpeed's own JSON: kept as it is, with what it says of precision, clipping and accumulation beside it."""

from __future__ import annotations

import json
from typing import Any

from attrs import evolve

from prepkit.config import BF16, FP16, ClipNorm, Config, DeepSpeed, Mixed, Precision
from prepkit.config.precision import PRECISIONS
from prepkit.formats.importers.argument_keys import strange_keys
from prepkit.formats.importers.foreign import Foreign, foreign
from prepkit.formats.importers.source import Imported, Source
from prepkit.resolve.deepspeed.data import AUTO, OWN_CLIP, look, said, stage, with_key
from prepkit.resolve.deepspeed.working import DTYPES

_KNOWN_BY = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "fp16", "bf16")


def read_deepspeed(source: Source, asked: Precision | None = None) -> Imported:
    """The file as prepkit's config; which keys and types DeepSpeed knows is said by rules when a plan is made.

    ``asked``: the precision that a file which names this one asks for, and which fills in ``"enabled": "auto"``.

    Raises ``PlanRejected`` for a file that cannot be read.
    """
    file = foreign("deepspeed", source)
    if not any(file.has(name) for name in _KNOWN_BY):
        what = f"it has none of {', '.join(_KNOWN_BY)}"
        file.error("wrong-value", "", what, "Give a config of DeepSpeed, or say whose file it is with --from.")
        return file.imported(Config())
    for key in strange_keys("deepspeed", file.data):  # of the program that hands the rest on
        file.launching(key)
        del file.data[key]
    return file.imported(from_json(file, asked))


def from_json(file: Foreign, asked: Precision | None = None) -> Config:
    """The config; every key of the file is one that DeepSpeed is handed. ``asked`` as above."""
    file.raw("", "engine.config")
    for key in tuple(file.keys()):
        file.raw(key, *((f"engine.config.{key}",) if "." not in key else ()))
    if file.raw("activation_checkpointing.cpu_checkpointing") is True:
        what = "DeepSpeed does it in models that call deepspeed.checkpointing.checkpoint by themselves, and in no other"
        fix = "Write checkpointing=CheckpointBlocks(offload=True) beside the engine, or leave it to such a model."
        file.warn("not-supported", "activation_checkpointing.cpu_checkpointing", what, fix)
    _schedule(file)
    for setting, key in _KEYS.items():
        file.means(key, setting)
    clip = _number(file, "gradient_clipping", "clip")
    steps = _number(file, "gradient_accumulation_steps", "accumulation")
    config = with_own_dtypes(
        Config(
            engine=DeepSpeed(config=json.dumps(file.data)),
            precision=_precision(file, asked),
            clip=ClipNorm(float(clip)) if clip else None if file.has("gradient_clipping") else ClipNorm(OWN_CLIP),
        )
    )
    for key, setting in _OF_DTYPES:
        file.means(key, setting)
        if file.raw(key) not in (None, AUTO) and isinstance(config.precision or asked, Mixed):
            file.raw(key, setting)
    if steps and float(steps).is_integer():
        return evolve(config, accumulation=int(steps))
    return config if steps is not None else evolve(config, global_batch=_global_batch(file))


def with_own_dtypes(config: Config) -> Config:
    """The config with the dtypes that DeepSpeed takes for gradients and master weights, said or not; others stay.

    Gradients are reduced in ``communication_data_type``, else in the compute dtype, and add up in ``grad_accum_dtype``,
    else in the compute dtype (``DeepSpeedEngine.communication_data_type`` and ``get_data_types``).
    """
    engine, precision = config.engine, config.precision
    if not isinstance(engine, DeepSpeed) or not isinstance(precision, Mixed):
        return config
    low, section = PRECISIONS[type(precision)].compute_dtype, PRECISIONS[type(precision)].deepspeed_section
    data = said(engine)
    data.setdefault("bf16", data.get("bfloat16"))  # its old name
    sent = str(look(data, "communication_data_type", "")).lower()
    assert low is not None, "those in Mixed compute in one"
    dtype = next((ours for ours, theirs in DTYPES.items() if theirs == sent), low)
    summed = data.get("data_types", {})
    unsaid = isinstance(summed, dict) and summed.get("grad_accum_dtype") is None
    if dtype == "float32" and stage(engine) > 0 and unsaid:
        engine = with_key(engine, "data_types.grad_accum_dtype", DTYPES[low])  # where prepkit would take float32
    masters = look(data, f"{section}.{section}_master_weights_and_grads") is not True and precision.master_weights
    return evolve(config, engine=engine, precision=evolve(precision, reduce_dtype=dtype, master_weights=masters))


def _schedule(file: Foreign) -> None:
    """Says of a schedule that falls to 0 as it has risen; DeepSpeed logs a warning, and trains on with no rate."""
    here = "scheduler.params."
    rise, whole = file.raw(f"{here}warmup_num_steps"), file.raw(f"{here}total_num_steps")
    rise = 1000 if rise is None else rise  # DeepSpeed's own
    decays = file.raw("scheduler.type") == "WarmupDecayLR"
    if decays and type(rise) is int and type(whole) is int and whole <= rise:
        what = f"the rate rises for {rise} steps, and is 0 from step {rise} on, as {whole} are not more"
        file.warn("contradiction", f"{here}total_num_steps", what, "Write the steps of the whole run.")


_KEYS = {
    "engine.stage": "zero_optimization.stage",
    "engine.offload_optimizer": "zero_optimization.offload_optimizer.device",
    "engine.offload_param": "zero_optimization.offload_param.device",
    "engine.micro_batch": "train_micro_batch_size_per_gpu",
    "precision": "bf16.enabled",
    "precision.init_scale": "fp16.initial_scale_power",
    "accumulation": "gradient_accumulation_steps",
    "clip": "gradient_clipping",
    "optimizer": "optimizer",
    "global_batch": "train_batch_size",
}
"""Setting to the key that says it, be it there or not."""
_OF_DTYPES = (
    ("communication_data_type", "precision.reduce_dtype"),
    *((f"{of}.{of}_master_weights_and_grads", "precision.master_weights") for of in ("bf16", "fp16")),
)
"""Keys with the settings of a precision that they say."""


def _global_batch(file: Foreign) -> int | None:
    """``train_batch_size`` where the micro batch stands beside it, so that the accumulation follows from the ranks.

    As DeepSpeed does it (``DeepSpeedConfig._set_batch_related_parameters``); of the global batch alone it makes the
    micro batch, which needs nothing of prepkit.
    """
    whole, micro = file.raw("train_batch_size"), file.raw("train_micro_batch_size_per_gpu")
    if type(whole) is not int or type(micro) is not int or whole < 1 or micro < 1 or whole % micro:
        return None
    file.raw("train_batch_size", "global_batch")
    return whole


def _precision(file: Foreign, asked: Precision | None) -> Precision:
    if _on(file, "bf16") or _on(file, "bfloat16"):
        if _on(file, "fp16"):
            what = "bf16 and fp16 are both enabled, which DeepSpeed refuses"
            file.error("contradiction", "fp16.enabled", what, "Write false here, or in bf16.", misread=False)
        return BF16()
    if _on(file, "fp16") or (isinstance(asked, FP16) and file.raw("fp16.enabled") == AUTO):
        power = _number(file, "fp16.initial_scale_power", "precision.init_scale")
        window = _number(file, "fp16.loss_scale_window", "precision.growth_interval")
        scaled = FP16(growth_interval=_WINDOW if window is None else int(window))
        return scaled if power is None or not 0 <= power < _MOST else evolve(scaled, init_scale=2.0**power)
    return None


_WINDOW = 1000
"""DeepSpeed's own ``loss_scale_window`` (``runtime/fp16/loss_scaler``)."""
_MOST = 128
"""Powers of two that a float32 no longer holds; a rule refuses what is left."""


def _on(file: Foreign, section: str) -> bool:
    value: Any = file.raw(f"{section}.enabled")
    if value is True:
        file.raw(f"{section}.enabled", "precision")
    return value is True


def _number(file: Foreign, name: str, setting: str) -> int | float | None:
    value = file.raw(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None  # auto, or of a wrong type, which a rule says
    file.raw(name, setting)
    return value
