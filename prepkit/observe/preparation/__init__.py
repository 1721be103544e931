"""How a model was prepared, read from what stands there. Reads attributes only; no tensor's data."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn
from torch.distributed.fsdp._flat_param import FlatParameter

from prepkit.facts import Env, ModelFacts
from prepkit.facts.preparation import AutocastOptions, HowPrepared
from prepkit.objects import fsdp1_flat
from prepkit.objects.forward import FP8_MARK
from prepkit.objects.fsdp2_units import is_unit
from prepkit.objects.names import Site
from prepkit.observe.preparation.bare_model import bare_model
from prepkit.observe.preparation.blocks import autocast, compiled, recomputed
from prepkit.observe.preparation.optimizers import held_bytes, optimizer_options
from prepkit.observe.preparation.tensor_parallel import tensor_parallel, tensor_ranks
from prepkit.observe.preparation.wrappers import ddp_options, flat_units
from prepkit.observe.prepared.optimizers import engines

FLOAT8 = {"Float8Linear": "float8 layers of torchao", "FP8LinearLayer": "float8 layers"}
LIBRARIES = {"transformer_engine": "layers of TransformerEngine", "msamp": "layers of MS-AMP"}


def preparation(
    model: nn.Module,
    places: list[Site],
    seen: ModelFacts,
    first: dict[int, str],
    optimizers: list[Any],
    env: Env,
    around: AutocastOptions | None = None,
) -> HowPrepared:
    """Return how ``model`` was prepared. ``seen`` are its facts, ``first`` each parameter's name by ``id``.

    ``around``: an autocast of a wrapper that was taken off before, as Fabric's.
    """
    cut = tensor_parallel(places)
    bare = bare_model(seen, model)
    return HowPrepared(
        model=bare,
        env=env,
        optimizers=optimizer_options(model, optimizers, first),
        ddp=ddp_options(places),
        flat_units=flat_units(places),
        pin_memory=_pins(places),
        recomputed=recomputed(places),
        compiled=compiled(places),
        autocast=around or autocast(places),
        tensor_parallel=cut,
        tensor_ranks=tensor_ranks(places, cut),
        unsharded=_unsharded(model, places, first),
        unknown=tuple(dict.fromkeys(_unknown(places))),
        held=held_bytes(model, optimizers),
        **_engine(model),
    )


def _groups(places: list[Site]) -> list[Any]:
    """Parameter groups of the units of FSDP2: one for each, or several in newer torch."""
    units: list[Any] = [module for site in places if site.first for module in site.stack if is_unit(module)]
    states = [unit._get_fsdp_state() for unit in units]
    found = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for groups in found for group in groups if group is not None]


def _pins(places: list[Site]) -> bool:
    return any(getattr(group.offload_policy, "pin_memory", False) for group in _groups(places))


def _unsharded(model: nn.Module, places: list[Site], first: dict[int, str]) -> tuple[str, ...]:
    """Parameters that are in no unit; none where there are no units."""
    flat = fsdp1_flat.flat_shards(model)
    if not (fsdp1_flat.units(model) or any(is_unit(module) for site in places for module in site.stack)):
        return ()
    taken = {id(one.sharded_param) for group in _groups(places) for one in group.fsdp_params}
    params = (param for site in places for param in site.module._parameters.values() if param is not None)
    left = (first[id(param)] for param in params if id(param) not in taken and not isinstance(param, FlatParameter))
    return tuple(name for name in dict.fromkeys(left) if name not in flat)


def _engine(model: nn.Module) -> dict[str, Any]:
    """The first DeepSpeed engine's JSON, and the classes that ZeRO-3 gathers whole."""
    for engine in engines(model):
        told: dict[str, Any] = dict(engine._config._param_dict)
        leaves = {type(one).__name__ for one in engine.module.modules() if vars(one).get("_z3_leaf")}
        return {"deepspeed": json.dumps(told, sort_keys=True, default=str), "leaf_modules": tuple(sorted(leaves))}
    return {}


def _unknown(places: list[Site]) -> Any:
    for site in places:
        for module in site.stack:
            cls = type(module)
            if cls.__name__ in FLOAT8 or FP8_MARK in vars(module):
                yield FLOAT8.get(cls.__name__, "a forward in float8")
            library = cls.__module__.partition(".")[0]
            if library in LIBRARIES:
                yield LIBRARIES[library]
            if cls.__name__ == "DataParallel":
                yield "torch's DataParallel, one process for several devices"
    if "torch_xla" in sys.modules and any(
        param is not None and param.device.type == "xla"
        for site in places
        for param in site.module._parameters.values()
    ):
        yield "parameters on an XLA device"
