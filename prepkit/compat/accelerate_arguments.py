"""What an ``Accelerator`` is given, and its launcher's variables, as a ``Config``. accelerate is not imported."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from prepkit.compat.not_offered import NotOffered
from prepkit.config import (
    BF16,
    DDP,
    FP16,
    FSDP1,
    FSDP2,
    AsStored,
    Config,
    Precision,
    ShardLoaders,
)
from prepkit.importers.launcher_variables import read_variables

_DDP = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
_SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def config_of(arguments: Mapping[str, Any]) -> Config:
    """The config. Raises ``PlanRejected`` for the variables, and ``NotOffered`` for an argument that has no place."""
    config = arguments["config"]
    if config is None:
        config = read_variables(os.environ).config
    if arguments["cpu"]:
        config = evolve(config, device="cpu")
    if arguments["mixed_precision"] is not None:
        config = evolve(config, precision=_precision(str(arguments["mixed_precision"]), config))
    config = _accumulating(config, arguments)
    config = evolve(config, loaders=_loaders(arguments), scheduler_ticks=0)
    return _handled(config, arguments["kwargs_handlers"] or ())


def _precision(word: str, config: Config) -> Precision:
    word = word.rpartition(".")[2].lower()
    sharded = isinstance(config.engine, FSDP1 | FSDP2)  # where accelerate reduces in the compute dtype (H-10c)
    match word:
        case "no":
            return AsStored()
        case "bf16":
            return BF16(reduce_dtype="bfloat16" if sharded else "float32")
        case "fp16":
            return FP16(reduce_dtype="float16" if sharded else "float32")
    raise NotOffered(f"mixed_precision={word!r}", "give Accelerator(config=pk.Config(precision=pk.FP8(...)))")


def _accumulating(config: Config, arguments: Mapping[str, Any]) -> Config:
    plugin, steps = arguments["gradient_accumulation_plugin"], arguments["gradient_accumulation_steps"]
    if plugin is None:
        return evolve(config, accumulation=steps) if steps != 1 else config
    if not getattr(plugin, "adjust_scheduler", True):
        raise NotOffered("adjust_scheduler=False", "let the scheduler be stepped with the optimizer")
    return evolve(config, accumulation=plugin.num_steps or 1, average_each=bool(plugin.sync_each_batch))


def _loaders(arguments: Mapping[str, Any]) -> ShardLoaders:
    given, plugin = arguments["dataloader_config"], arguments["gradient_accumulation_plugin"]
    said: dict[str, Any] = {"to_device": arguments["device_placement"]}
    if given is not None:
        if not given.even_batches:
            raise NotOffered("even_batches=False", "give Accelerator(config=...) loaders for evaluation, or keep True")
        said |= {"split_batches": bool(given.split_batches), "dispatch": bool(given.dispatch_batches)}
        said["seed"] = given.data_seed or 0
    if plugin is not None:
        said["ends_window"] = bool(plugin.sync_with_dataloader)
    return ShardLoaders(**said)


def _handled(config: Config, handlers: Iterable[Any]) -> Config:
    """Accelerate's ``KwargsHandler`` objects, told by the names of their classes."""
    for handler in handlers:
        name = type(handler).__name__
        if name == "DistributedDataParallelKwargs" and isinstance(config.engine, DDP):
            if str(getattr(handler, "comm_hook", "no")).rpartition(".")[2].lower() != "no":
                raise NotOffered("comm_hook", "give Accelerator(config=pk.Config(engine=pk.DDP(hook=...)))")
            config = evolve(config, engine=evolve(config.engine, **{key: getattr(handler, key) for key in _DDP}))
        elif name == "GradScalerKwargs" and isinstance(config.precision, FP16):
            said = {key: getattr(handler, key) for key in _SCALER}
            config = evolve(config, precision=evolve(config.precision, **said))
        elif name == "InitProcessGroupKwargs":
            waited = handler.timeout
            config = evolve(config, timeout_s=waited.total_seconds() if waited else config.timeout_s)
        elif name not in ("DistributedDataParallelKwargs", "GradScalerKwargs"):  # which do nothing elsewhere there too
            raise NotOffered(name, "give Accelerator(config=pk.Config(...)), which has the same as fields")
    return config
