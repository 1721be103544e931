"""How a model was prepared, read from what stands there. Reads attributes only; no tensor's data."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from prepkit.facts import Env, ModelFacts, ParamFact
from prepkit.facts.preparation import (
    AutocastOptions,
    DDPOptions,
    FlatUnitOptions,
    HeldBytes,
    HowPrepared,
    NamedValues,
    OptimizerOptions,
    SteppedGroup,
)
from prepkit.objects import fsdp1_flat
from prepkit.objects.deepspeed import HELD
from prepkit.objects.forward import FP8_MARK
from prepkit.objects.fsdp2_units import is_unit
from prepkit.objects.local_part import local
from prepkit.objects.names import Site, canonical
from prepkit.observe.model import dtype_name
from prepkit.observe.prepared.optimizers import engines, inner, optimizer_of
from prepkit.observe.prepared.preparation.blocks import autocast, compiled, recomputed
from prepkit.observe.prepared.preparation.tensor_parallel import tensor_parallel, tensor_ranks
from prepkit.ranks.world import ranks_of

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


WRAPPERS = ("fp16_compress_wrapper", "bf16_compress_wrapper")
"""Communication hooks of torch around another hook."""


def ddp_options(places: list[Site]) -> DDPOptions | None:
    """Of the DDP around the whole model; None where none is there."""
    found = next((module for module in places[0].stack if isinstance(module, DistributedDataParallel)), None)
    if found is None:
        return None
    ddp: Any = found
    return DDPOptions(
        ranks=ranks_of(ddp.process_group).size,
        broadcast_buffers=bool(ddp.broadcast_buffers),
        bucket_cap_mb=ddp.bucket_bytes_cap / 2**20,
        find_unused_parameters=bool(ddp.find_unused_parameters),
        gradient_as_bucket_view=bool(ddp.gradient_as_bucket_view),
        static_graph=bool(ddp.static_graph),
        hooks=tuple((_hook_name(hook), _state(state)) for hook, state in ddp._comm_hooks),
        mixed=getattr(ddp, "mixed_precision", None) is not None,
    )


def _hook_name(hook: Any) -> str:
    """``powerSGD_hook``, or ``fp16_compress_wrapper powerSGD_hook`` where one stands around the other."""
    outer = getattr(hook, "__qualname__", type(hook).__name__).partition(".")[0]
    if outer not in WRAPPERS:
        return outer if getattr(hook, "__module__", "").startswith("torch.") else f"a hook of its own, {outer}"
    inside = [cell.cell_contents for cell in hook.__closure__ or () if callable(cell.cell_contents)]
    return " ".join((outer, *map(_hook_name, inside)))


def _state(state: Any) -> NamedValues:
    names = {*getattr(type(state), "__slots__", ()), *getattr(state, "__dict__", ())}
    values = ((name, getattr(state, name, None)) for name in sorted(names))
    return tuple((name, value) for name, value in values if isinstance(value, bool | int | float | str))


def flat_units(places: list[Site]) -> tuple[FlatUnitOptions, ...]:
    """Of every unit of FSDP1, in module order."""
    return tuple(
        _flat_unit(site.path, module)
        for site in places
        if site.first
        for module in site.stack
        if isinstance(module, FullyShardedDataParallel)
    )


def _flat_unit(path: str, unit: Any) -> FlatUnitOptions:
    mixed, prefetch = unit.mixed_precision, unit.backward_prefetch
    between = getattr(unit, "_inter_node_pg", None)
    hybrid = "HYBRID" in unit.sharding_strategy.name
    return FlatUnitOptions(
        path=path,
        ranks=ranks_of(unit.process_group).size,
        copies=ranks_of(between).size if hybrid and between is not None else 1,
        sharding=unit.sharding_strategy.name.removeprefix("_"),
        param_dtype=_dtype(mixed.param_dtype),
        reduce_dtype=_dtype(mixed.reduce_dtype),
        buffer_dtype=_dtype(mixed.buffer_dtype),
        offload=bool(unit.cpu_offload.offload_params),
        backward_prefetch=None if prefetch is None else prefetch.name,
        forward_prefetch=bool(unit.forward_prefetch),
        limit_all_gathers=bool(unit.limit_all_gathers),
        use_orig_params=bool(unit._use_orig_params),
        cast_forward_inputs=bool(mixed.cast_forward_inputs),
        cast_root_forward_inputs=bool(mixed.cast_root_forward_inputs),
    )


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)


def bare_model(seen: ModelFacts, model: nn.Module) -> ModelFacts:
    """Without marks, units, placements and what wrappers have hung on parameters; shapes and names are the model's own.

    ``seen`` are the facts of the prepared model. Dtypes are those in which parameters are stored now.
    """
    flat = fsdp1_flat.flat_shards(model)
    params = [_whole(param, flat) for param in seen.params if not (flat and _is_flat(param.name))]
    there = {param.name for param in params}
    params += [_flattened(name, one) for name, one in flat.items() if name not in there]
    order = {module.path: index for index, module in enumerate(seen.modules)}
    if len(params) > len(there):
        params.sort(key=lambda param: order.get(param.name.rpartition(".")[0], -1))  # stable: as torch flattens them
    prepared = bool(seen.units or flat or any(param.cls in REPLACED for param in seen.params))
    return evolve(
        seen,
        modules=tuple(evolve(module, marks=()) for module in seen.modules),
        params=tuple(params),
        ties=_ties(seen, flat, model) if flat else seen.ties,
        units=(),
        forward="bound",
        param_hooks=() if prepared else seen.param_hooks,
        strided=() if prepared else seen.strided,
        prepared="",
    )


REPLACED = ("DTensor", "ZeroParameter")
"""Classes of parameters that sharding puts in the place of the model's own."""


def _is_flat(name: str) -> bool:
    """Return whether it is the name that FSDP1 gives a unit's flat parameter (torch ``_flat_param.FLAT_PARAM``)."""
    return name.rpartition(".")[2] == "_flat_param"


def _whole(param: ParamFact, flat: dict[str, fsdp1_flat.FlatShard]) -> ParamFact:
    shape = tuple(flat[param.name].shape) if param.name in flat else param.shape
    return evolve(param, shape=shape, placements=(), cls="Parameter" if param.cls in REPLACED else param.cls)


def _flattened(name: str, part: fsdp1_flat.FlatShard) -> ParamFact:
    return ParamFact(
        name=name,
        shape=tuple(part.shape),
        dtype=dtype_name(part.flat.dtype),
        requires_grad=part.flat.requires_grad,
    )


def _ties(seen: ModelFacts, flat: dict[str, fsdp1_flat.FlatShard], model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """As ``seen``; where a flat parameter stands in several places, all that lie in it do."""
    ties = [group for group in seen.ties if not any(map(_is_flat, group))]
    for group in seen.ties:
        places = [name.rpartition(".")[0] for name in group if _is_flat(name)]
        inside = [name for name, part in flat.items() if places and part.unit == places[0]]
        ties += [tuple(f"{place}{name.removeprefix(places[0])}" for place in places) for name in inside]
    return (*ties, *_flat_ties(model))


def _flat_ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names that were one parameter, where the flat one has taken its place (torch ``_shared_param_infos``)."""
    groups: dict[str, list[str]] = {}
    for path, unit in fsdp1_flat.units(model).items():
        handle: Any = unit._handle
        for tied in handle.flat_param._shared_param_infos if handle is not None else ():
            pairs = ((tied.prim_module_name, tied.prim_param_name), (tied.module_name, tied.param_name))
            first, other = (_joined(path, module, name) for module, name in pairs)
            groups.setdefault(first, [first]).append(other)
    return tuple(map(tuple, groups.values()))


def _joined(unit: str, module: str, name: str) -> str:
    return ".".join(part for part in (unit, canonical(module), name) if part)


Names = dict[int, tuple[str, ...]]
"""``id`` of a parameter to the names of what it holds: its own, or those of all that lie in a flat one."""


def optimizer_options(model: nn.Module, given: list[Any], first: dict[int, str]) -> tuple[OptimizerOptions, ...]:
    """Return what each optimizer steps, and how; of DeepSpeed's own that which it steps with."""
    flat: Names = {}
    for name, part in fsdp1_flat.flat_shards(model).items():
        if not part.original:
            flat[id(part.flat)] = (*flat.get(id(part.flat), ()), name)
    names = {key: (name,) for key, name in first.items()} | flat
    return tuple(_options(model, inner(one), names) for one in given)


def _options(model: nn.Module, optimizer: Any, names: Names) -> OptimizerOptions:
    engine = next((one for one in engines(model) if optimizer_of(one, optimizer)), None)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if engine is not None:
        groups, optimizer = _of_engine(engine)
    name, module = _computes_as(optimizer)
    return OptimizerOptions(
        name=name,
        module=module,
        groups=tuple(
            SteppedGroup(
                slots=tuple(name for param in params for name in names.get(id(param), (None,))),
                options=tuple((key, value) for key, value in sorted(group.items()) if _is_plain(value)),
            )
            for params, group in zip(groups, optimizer.param_groups, strict=True)
        ),
    )


def _of_engine(engine: Any) -> tuple[list[list[Any]], Any]:
    """The model's parameters by group, and the plain optimizer inside ZeRO's, which holds parts laid end to end."""
    outer = engine.optimizer
    plain = outer if engine.basic_optimizer is None else engine.basic_optimizer
    count = len(plain.param_groups)
    held = next((getattr(outer, name) for name in HELD if hasattr(outer, name)), None)
    if held is None:
        return [list(group["params"]) for group in plain.param_groups], plain
    if len(held) == count:
        return [list(group) for group in held], plain
    if count == 1:  # ZeRO-3 divides a group into several
        return [[param for group in held for param in group]], plain
    return [[None] for _ in range(count)], plain


def _computes_as(optimizer: Any) -> tuple[str, str]:
    """Class and module; of DeepSpeed's Adam for CPUs and its fused one, the class of torch that computes the same."""
    name, module = type(optimizer).__name__, type(optimizer).__module__
    if name in ("DeepSpeedCPUAdam", "FusedAdam") and module.startswith("deepspeed."):
        decoupled = getattr(optimizer, "adam_w_mode", True)
        return ("AdamW" if decoupled else "Adam"), "torch.optim"
    return name, module


def _is_plain(value: Any) -> bool:
    pairs = isinstance(value, tuple) and all(isinstance(one, int | float) or one is None for one in value)
    return value is None or isinstance(value, bool | int | float | str) or pairs


def held_bytes(model: nn.Module, optimizers: list[Any]) -> tuple[HeldBytes, ...]:
    """Bytes that this rank holds now of each kind of tensor, by kind of device; a flat parameter without its views."""
    units = fsdp1_flat.units(model).values()
    flat = [unit._handle.flat_param for unit in units if unit._handle is not None]
    views = {id(view) for one in flat for view in (one, *(one._params or ()))}
    params = [*flat, *(param for param in model.parameters() if id(param) not in views)]
    states = [
        value
        for one in optimizers
        for state in getattr(inner(one), "state", {}).values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    kinds: dict[str, list[Any]] = {
        "parameters": params,
        "gradients": [param.grad for param in params if param.grad is not None],
        "buffers": list(model.buffers()),
        "optimizer state": states,
    }
    counted: dict[tuple[Any, str], int] = {}
    for what, tensors in kinds.items():
        for tensor in map(local, (one for one in tensors if not is_lazy(one))):
            key = (what, tensor.device.type)
            counted[key] = counted.get(key, 0) + tensor.numel() * tensor.element_size()
    return tuple(HeldBytes(what=what, device=device, bytes=size) for (what, device), size in counted.items() if size)
