"""What an ``Accelerator`` is given, and its launcher's variables, as a ``Config``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from prepkit.compat.accelerate.not_offered import NotOffered
from prepkit.config import (
    BF16,
    DDP,
    FP16,
    FSDP1,
    FSDP2,
    CommHook,
    CompressHook,
    Config,
    PowerSGDHook,
    Precision,
    ShardLoaders,
)
from prepkit.formats.importers.accelerate import read_variables
from prepkit.formats.importers.deepspeed import with_own_dtypes

_DDP = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
_SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


HELD = ("DistributedDataParallelKwargs", "GradScalerKwargs", "AutocastKwargs", "ProfileKwargs")
"""Handlers that do nothing under other engines, there too, and those that the ``Accelerator`` itself reads."""


def launched_config() -> Config:
    """Return what the launcher's variables ask for. Raises ``PlanRejected`` where they contradict each other."""
    return read_variables(os.environ).config


def config_of(arguments: Mapping[str, Any]) -> Config:
    """The config. Raises ``PlanRejected`` for the variables, and ``NotOffered`` for an argument that has no place."""
    config = arguments["config"]
    if config is None:
        config = launched_config()
    if arguments["cpu"]:
        config = evolve(config, device="cpu")
    if arguments["mixed_precision"] is not None:
        config = with_own_dtypes(evolve(config, precision=_precision(str(arguments["mixed_precision"]), config)))
    config = evolve(_accumulating(config, arguments), scheduler_ticks=0)
    return _handled(config, arguments["kwargs_handlers"] or ())


def _precision(word: str, config: Config) -> Precision:
    word = word.rpartition(".")[2].lower()
    sharded = isinstance(config.engine, FSDP1 | FSDP2)  # where accelerate reduces in the compute dtype (H-10c)
    match word:
        case "no":
            return None
        case "bf16":
            return BF16(reduce_dtype="bfloat16" if sharded else "float32")
        case "fp16":
            return FP16(reduce_dtype="float16" if sharded else "float32")
    raise NotOffered(f"mixed_precision={word!r}", "give Accelerator(config=pk.Config(precision=pk.FP8()))")


def _accumulating(config: Config, arguments: Mapping[str, Any]) -> Config:
    plugin, steps = arguments["gradient_accumulation_plugin"], arguments["gradient_accumulation_steps"]
    if plugin is None:
        return evolve(config, accumulation=steps) if steps != 1 else config
    return evolve(config, accumulation=plugin.num_steps or 1, average_each=bool(plugin.sync_each_batch))


def says_loaders(arguments: Mapping[str, Any]) -> bool:
    """Return whether ``config`` alone says what becomes of loaders."""
    beside = arguments["gradient_accumulation_plugin"] is not None or not arguments["device_placement"]
    beside = beside or arguments["split_batches"]
    return arguments["config"] is not None and not beside


def loaders_of(given: Any, arguments: Mapping[str, Any]) -> ShardLoaders:
    """What a ``DataLoaderConfiguration`` says of loaders; uneven batches become every sample once, on equal terms."""
    plugin = arguments["gradient_accumulation_plugin"]
    said: dict[str, Any] = {"to_device": arguments["device_placement"], "whole_batches": True, "draws": "sampler"}
    if given is not None:
        said |= {"split_batches": bool(given.split_batches), "dispatch": bool(given.dispatch_batches)}
        if getattr(given, "use_seedable_sampler", False):
            said |= {"seed": given.data_seed or 0, "draws": "seed"}
        said |= {"purpose": "training" if given.even_batches else "evaluation"}
    if arguments["split_batches"]:
        said["split_batches"] = True
    if plugin is not None:
        said["ends_window"] = bool(plugin.sync_with_dataloader)
    return ShardLoaders(**said)


def _handled(config: Config, handlers: Iterable[Any]) -> Config:
    """Accelerate's ``KwargsHandler`` objects, told by the names of their classes."""
    for handler in handlers:
        name = type(handler).__name__
        if name == "DistributedDataParallelKwargs" and isinstance(config.engine, DDP):
            said = {key: getattr(handler, key) for key in _DDP} | {"hook": _hook(handler)}
            config = evolve(config, engine=evolve(config.engine, **said))
        elif name == "GradScalerKwargs" and isinstance(config.precision, FP16):
            said = {key: getattr(handler, key) for key in _SCALER}
            config = evolve(config, precision=evolve(config.precision, **said))
        elif name == "InitProcessGroupKwargs":
            waited = handler.timeout
            config = evolve(config, timeout_s=waited.total_seconds() if waited else config.timeout_s)
        elif name not in HELD:
            raise NotOffered(name, "leave it out; for FP8 give Accelerator(config=pk.Config(precision=pk.FP8()))")
    return config


def _hook(handler: Any) -> CommHook:
    """Return what DDP does to gradients on their way."""
    hook, wrapper = (_word(getattr(handler, name, "no")) for name in ("comm_hook", "comm_wrapper"))
    options = dict(getattr(handler, "comm_state_option", None) or {})
    if hook == "no" and wrapper == "no":
        return None
    if hook in _DTYPES and wrapper == "no":
        return CompressHook(dtype=_DTYPES[hook])
    if hook == "power_sgd" and options.keys() <= _POWER_SGD.keys():
        said = {_POWER_SGD[name]: value for name, value in options.items()}
        return PowerSGDHook(wrapper=_DTYPES.get(wrapper, "none"), **said)
    what = f"comm_hook={hook!r}, comm_wrapper={wrapper!r}, comm_state_option={options!r}"
    otherwise = "Accelerator(config=pk.Config(engine=pk.DDP(hook=pk.ddp.PowerSGDHook(rank=2))))"
    raise NotOffered(what, f"write fp16, bf16 or power_sgd, or give {otherwise}")


def _word(value: Any) -> str:
    return str(getattr(value, "value", value)).lower()


_DTYPES: dict[str, Any] = {"fp16": "float16", "bf16": "bfloat16"}
_POWER_SGD = {
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "start_iter",
} | {
    name: name
    for name in (
        *("min_compression_rate", "use_error_feedback", "warm_start", "orthogonalization_epsilon", "random_seed"),
        "batch_tensors_with_same_shape",
    )
}
"""Options of torch's ``PowerSGDState`` to fields of ``PowerSGDHook``."""
