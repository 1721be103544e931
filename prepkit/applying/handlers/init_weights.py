"""Values from the modules' own initializers: ``reset_parameters`` and ``_init_weights``.

The parameters are already sharded when this runs, but an initializer is written for whole tensors: what it draws
depends on the shape, and a rank that ran it on its shard would draw something else. So, unit by unit:

1. Every parameter and buffer of the unit is replaced, in its module, by a *twin* of the whole shape. The twin of a
   tensor that is to get values is real; all others are on meta, where writing has no effect, so that what has values
   keeps them. The parameters of all other units are replaced by stand-ins that refuse to be written or read.
2. The twins are filled with NaN, which no initializer writes. The initializers run in the order in which a constructor
   would: children before parents, for each module its own before the model's, and that of an adapter last. Each module
   starts from a seed made of the step's seed and its path, so that every rank draws the same values, whatever the units
   and the ranks are.
3. Where a NaN is left, an initializer forgot an element: an error. Integers have no NaN, so those twins are filled with
   0 and then, in a second run, with 1: what differs between the runs was not written.
4. Every rank copies its own shard out of the twin, the old tensors come back into their modules, and the twins go.

Memory: the whole tensors of one unit at a time. Nothing is sent, since all ranks draw the same; nobody waits.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.optimizer_state import shard
from prepkit.court import refused
from prepkit.interpreter import Handler
from prepkit.objects import fsdp1_flat, names, zero3
from prepkit.objects.fsdp1_flat import FlatShard
from prepkit.objects.local_part import local
from prepkit.objects.names import Site
from prepkit.objects.target import Target
from prepkit.steps import InitializeTensors

RESET_METHODS = ("reset_parameters", "_reset_parameters")
"""By which a module initializes its own parameters, as torch's do."""
INIT_METHOD = "_init_weights"
"""By which a model initializes each module inside it, as those of transformers do."""


def initialize_ready(step: InitializeTensors, target: Target) -> problems.Problems:
    """Every named parameter, and every named buffer on meta, must be in a module that something initializes."""
    sites = names.sites(target.model)
    tensors = _sites_of_tensors(sites)
    wanted = [name for name in step.params if name in tensors]
    wanted += [name for name in step.buffers if name in tensors and tensors[name][1].is_meta]
    models = _initializing_models(sites)
    orphans = (n for n in wanted if not _reset_method(tensors[n][0].module) and models[tensors[n][0].path] is None)
    return (
        *problems.absent("parameter", step.params, tensors),
        *problems.absent("buffer", step.buffers, tensors),
        *problems.told("weights.no-initialiser", orphans, "without values, and nothing initialises it"),
        *adapter_problems(sites, wanted),
    )


def initialize_do(step: InitializeTensors, target: Target) -> tuple[str, ...]:
    """Unit by unit, as the docstring of this module tells.

    A unit is whole at one time because initializers of a module may write what its children hold (GPT-2's residual
    projections). What is not to be initialized stays as it is. Returns the names of what had values before. Raises
    ``RunRefused``.
    """
    sites = [site for site in names.sites(target.model) if site.first]
    wanted = {*step.params, *(name for name in step.buffers if name in target.unfilled)}
    models, unit_of = _initializing_models(sites), _unit_of_each(sites, frozenset(step.units))
    device = next((local(param).device for param in target.model.parameters()), torch.device("cpu"))
    forked = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    lost = tuple(name for name in step.params if name not in target.unfilled)
    with torch.random.fork_rng(**forked), torch.no_grad(), problems.half_done(lost):
        flat, adapters = flattened(target.model), adapter_configs(sites)
        for unit in step.units:
            inside = [site for site in sites if unit_of[site.path] == unit]
            with _out_of_reach([site for site in sites if unit_of[site.path] != unit], flat):
                _initialize_unit(inside, wanted, models, step.seed, flat, adapters)
        target.unfilled -= wanted
        return lost


def initialize_undo(step: InitializeTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """What had no values before has none again: no more than a note, as its storage goes with ``AllocateTensors``."""
    target.unfilled |= set(step.params) - set(memo)
    return problems.overwritten(memo)


def _unit_of_each(sites: Sequence[Site], units: frozenset[str]) -> dict[str, str]:
    """Path of every module to that of the unit that holds it: itself, or the nearest one above; the root holds all."""
    unit_of: dict[str, str] = {}
    for site in sites:  # parents before their children
        parent = site.path.rpartition(".")[0]
        unit_of[site.path] = site.path if not site.path or site.path in units else unit_of[parent]
    return unit_of


def _initialize_unit(
    inside: Sequence[Site],
    wanted: set[str],
    models: dict[str, Module | None],
    seed: int,
    flat: Flattened,
    adapters: dict[str, Configs],
) -> None:
    """Steps 1 to 4 for the modules of one unit. Does nothing where none of its tensors is wanted."""
    there = tuple(slots(inside, wanted, flat))
    filled = {slot.name: slot for slot in there if slot.name in wanted}
    if not filled:
        return
    runs = _modules_to_run(inside, tuple(filled.values()))
    passes = 1 if all(_takes_nan(slot.twin) for slot in filled.values()) else 2
    written: list[dict[str, Tensor]] = []
    with instead([(slot.place, slot.twin) for slot in there], inside, flat):
        for fill in range(passes):
            for slot in filled.values():
                _blank(slot.twin, fill)
            for site in runs:
                torch.manual_seed(_module_seed(seed, site.path))
                _run_initializers(site.module, models[site.path])
                reset_adapters(site.module, adapters[site.path])
            written.append({n: slot.twin.detach().clone() for n, slot in filled.items() if not _takes_nan(slot.twin)})
    if unwritten := [name for name, slot in filled.items() if _unwritten(name, slot.twin, written)]:
        listed = problems.listed(unwritten)
        what = "still without values after reset_parameters() and _init_weights()"
        raise refused("weights.not-initialised", listed, what)
    for slot in filled.values():
        slot.keep()


def _modules_to_run(inside: Sequence[Site], filled: Sequence[Slot]) -> list[Site]:
    """Children before their parents, which may write what those hold.

    All modules of the unit; where only buffers are wanted, those alone that hold one of them, since an initializer of
    another module would draw numbers for nothing.
    """
    any_param = any(isinstance(slot.twin, Parameter) for slot in filled)
    holders = {id(slot.place.holder) for slot in filled}
    return [
        site
        for site in reversed(inside)
        if any_param or not holders.isdisjoint((id(site.module._parameters), id(site.module._buffers)))
    ]


# --- initializers --------------------------------------------------------------------------------------------------


def _reset_method(module: Module) -> Any:
    return next((method for name in RESET_METHODS if callable(method := getattr(module, name, None))), None)


def _initializing_models(sites: Sequence[Site]) -> dict[str, Module | None]:
    """Path of every module to the nearest one, itself or above it, that has ``_init_weights``; None: there is none."""
    models: dict[str, Module | None] = {}
    for site in sites:  # parents before their children
        above = models[site.path.rpartition(".")[0]] if site.path else None
        models[site.path] = site.module if callable(getattr(site.module, INIT_METHOD, None)) else above
    return models


def _run_initializers(module: Module, model: Any) -> None:
    """As a constructor does: the module's own initializer, then the model's, which has the last word."""
    if (reset := _reset_method(module)) is not None:
        reset()
    if model is not None:
        getattr(model, INIT_METHOD)(module)


def _module_seed(seed: int, path: str) -> int:
    """63 bits that depend on both, the same in every process."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little") >> 1


class OtherUnitsParameter(Tensor):
    """A parameter of another unit: has a shape, and refuses to be written or read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Properties and sizes pass; anything else raises ``RunRefused``."""
        if func.__name__ in {"__get__", "dim", "size", "numel", "detach", "is_floating_point", "__len__"}:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch
        what = f"an initialiser calls {func.__name__} on a parameter of shape {tuple(args[0].shape)} of another unit"
        fix = "Initialise it in a module of that unit, or load the weights: LoadWeights(path)."
        raise refused("weights.not-initialised", "model", what, fix)


@contextmanager
def _out_of_reach(others: Sequence[Site], flat: Flattened) -> Iterator[None]:
    """Meanwhile an initializer that reaches into other units fails, where it would write only this rank's part."""
    params = [place for site in others for place in places(site, flat) if place.holder is site.module._parameters]
    with instead(((place, _stand_in(place, flat)) for place in params), others, flat):
        yield


def _stand_in(place: TensorPlace, flat: Flattened) -> Tensor:
    """As large as the whole, without memory."""
    empty: Any = torch.empty(whole_shape(place, flat), dtype=getattr(place.tensor, "dtype", None), device="meta")
    stand_in: Tensor = empty.as_subclass(OtherUnitsParameter)
    return stand_in


# --- was it written? -----------------------------------------------------------------------------------------------


def _takes_nan(tensor: Tensor) -> bool:
    """True if a value that no initializer writes can be put into it; others are written twice and compared."""
    return tensor.is_floating_point() or tensor.is_complex()


def _blank(tensor: Tensor, fill: int) -> None:
    tensor.fill_(float("nan") if _takes_nan(tensor) else fill)


def _unwritten(name: str, tensor: Tensor, written: Sequence[dict[str, Tensor]]) -> bool:
    if _takes_nan(tensor):
        return bool(tensor.isnan().any())
    return not torch.equal(written[0][name], written[1][name])


def _sites_of_tensors(sites: Sequence[Site]) -> dict[str, tuple[Site, Tensor]]:
    """Canonical name to tensor and the place that holds it."""
    return {
        f"{site.path}.{name}" if site.path else name: (site, tensor)
        for site in sites
        for holder in (site.module._parameters, site.module._buffers)
        for name, tensor in holder.items()
        if tensor is not None
    }


INITIALIZE: Handler[InitializeTensors, Target, tuple[str, ...]] = Handler(
    ready=initialize_ready, do=initialize_do, undo=initialize_undo
)


# --- adapters ---
#
# An adapter is made of plain Linears, and a model's own ``_init_weights`` fills those like all others. But a LoRA
# adapter starts at zero: one of its two halves is zero, so that the model first computes what its base does. The
# layer's ``reset_lora_parameters`` writes that, and therefore runs last (peft ``tuners/lora/layer.py``). What is made
# from the values of the base (PiSSA, OLoRA, LoftQ ...) cannot be made here, as those may come later.

RESET = "reset_lora_parameters"
"""By which a LoRA layer initializes one of its adapters."""
FROM_SHAPES = (True, False, "gaussian")
"""``init_lora_weights`` that needs no values of the base; False leaves both halves as a Linear begins."""

Configs = Mapping[str, Any]
"""Name of an adapter to its ``LoraConfig``."""


def adapter_configs(sites: Sequence[Site]) -> dict[str, Configs]:
    """Path of every module to the configs of the adapters in it: those of the nearest model of peft's above it."""
    configs: dict[str, Configs] = {}
    for site in sites:  # parents before their children
        above = configs[site.path.rpartition(".")[0]] if site.path else {}
        own = getattr(site.module, "peft_config", None)
        configs[site.path] = own if isinstance(own, Mapping) else above
    return configs


def adapter_problems(sites: Sequence[Site], wanted: Sequence[str]) -> problems.Problems:
    """One text for the adapters that would have to be made from the values of the base."""
    configs, met = adapter_configs(sites), []
    for site in sites:
        for name, how in _adapters(site.module, configs[site.path]):
            inside = [param for param in wanted if param.startswith(f"{site.path}.lora_") and f".{name}" in param]
            if inside and how not in FROM_SHAPES:
                met.append((inside[0], f"init_lora_weights={how!r} is made from the values of the base"))
    fix = "Prepare the adapter with values, and write weights=BroadcastWeights(), or init_lora_weights=True."
    what = met[0][1] + f", and {len(met) - 1} more" * (len(met) > 1) if met else ""
    return problems.told("weights.not-initialised", [name for name, _ in met[:1]], what, fix)


def reset_adapters(module: Module, configs: Configs) -> None:
    """Initializes the adapters of a LoRA layer; does nothing to another module."""
    for name, how in _adapters(module, configs):
        if how in FROM_SHAPES and how is not False:
            reset: Any = getattr(module, RESET)
            reset(*(name, how)[: len(inspect.signature(reset).parameters)])  # AdaLoRA's takes the name alone


def _adapters(module: Module, configs: Configs) -> Iterator[tuple[str, Any]]:
    """Names of the adapters that a layer has, and how each is to be initialized."""
    if callable(getattr(module, RESET, None)):
        ranks = getattr(module, "r", {})
        for name, config in configs.items():
            if name in ranks:
                yield name, getattr(config, "init_lora_weights", True)


ABSENT = object()
"""Stands for a name that a module does not hold."""


@frozen(eq=False)
class Flattened:
    """What FSDP1 has laid into flat parameters; nothing of it under another engine."""

    shards: Mapping[str, FlatShard]
    """Canonical name to place."""
    absent: Mapping[int, tuple[tuple[str, str], ...]]
    """Identity of a module to the keys that it has lost, each with the name of its parameter."""
    flat: frozenset[int]
    """Identities of the flat parameters."""


def flattened(model: Module) -> Flattened:
    """Looks through a model for flat parameters."""
    shards = fsdp1_flat.flat_shards(model)
    absent = fsdp1_flat.absent_keys(model)
    flat = frozenset(id(place.flat) for place in shards.values())
    return Flattened(shards=shards, absent=absent, flat=flat)


@frozen(eq=False)
class TensorPlace:
    """A name in a module, and what stands there."""

    name: str
    """Canonical name of the tensor, by this path."""
    holder: dict[str, Any]
    """``_parameters`` or ``_buffers`` of the module."""
    key: str
    """Its name in the holder."""
    tensor: Tensor | None
    """What stands there; None: FSDP1 has taken it away."""
    attributes: dict[str, Any]
    """Of the module: FSDP1 leaves a plain tensor under the key, which would hide the parameter."""

    def stands_there(self) -> tuple[Any, Any]:
        """In the holder and among the attributes."""
        return self.holder.get(self.key, ABSENT), self.attributes.get(self.key, ABSENT)


def places(site: Site, flat: Flattened) -> Iterator[TensorPlace]:
    """Those of one module, parameters first, flat ones left out."""
    attributes = vars(site.module)
    for holder in (site.module._parameters, site.module._buffers):
        for key, tensor in holder.items():
            if tensor is not None and id(tensor) not in flat.flat:
                yield TensorPlace(_join(site.path, key), holder, key, tensor, attributes)
    for key, name in flat.absent.get(id(site.module), ()):
        yield TensorPlace(name, site.module._parameters, key, None, attributes)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@frozen(eq=False)
class Slot:
    """A place, and what stands there while initializers run."""

    name: str
    """First name of the tensor; tied ones have several slots and one name."""
    place: TensorPlace
    twin: Tensor
    """What the initializers write: whole and real if the tensor is wanted, else on meta, where writing does nothing."""
    shard: FlatShard | None
    """Where its elements lie in a flat parameter."""

    def keep(self) -> None:
        """Copies what this rank holds of the twin to where it lies."""
        twin, tensor = self.twin.detach(), self.place.tensor
        if self.shard is not None:
            self.shard.held().copy_(self.shard.part(twin))
        elif zero3.is_partitioned(tensor):
            zero3.held(tensor).copy_(zero3.part(tensor, twin))
        elif tensor is not None:
            values = shard(twin, tensor) if isinstance(tensor, DTensor) else twin
            local(tensor).copy_(local(values))


def slots(inside: Sequence[Site], wanted: set[str], flat: Flattened) -> Iterator[Slot]:
    """Every slot of a unit with its twin; a tied tensor has several slots and one twin."""
    twins: dict[object, tuple[str, Tensor]] = {}
    for site in inside:
        for place in places(site, flat):
            key: object = place.name if place.tensor is None else id(place.tensor)
            if key not in twins:
                real = place.name in wanted
                twins[key] = place.name, _twin(place.tensor, flat.shards.get(place.name), real=real)
            name, twin = twins[key]
            yield Slot(name, place, twin, flat.shards.get(name))


def whole_shape(place: TensorPlace, flat: Flattened) -> torch.Size:
    """Of the tensor as its author wrote it."""
    if (there := flat.shards.get(place.name)) is not None:
        return there.shape
    shape: torch.Size = getattr(place.tensor, "ds_shape", None) or torch.Size(getattr(place.tensor, "shape", ()))
    return shape


def _twin(tensor: Tensor | None, there: FlatShard | None, *, real: bool) -> Tensor:
    """A new object, without flags of the past such as transformers' ``_is_hf_initialized``.

    On meta unless ``real``; a plain tensor's has its storage, so that nothing is there twice.
    """
    if there is not None:
        flat = there.flat
        return _made(there.shape, flat, flat.device, real=real, trains=flat if tensor is None else tensor)
    assert tensor is not None, "only what lies in a flat parameter has left its module"
    if zero3.is_partitioned(tensor):
        return _made(tensor.ds_shape, tensor, local(tensor).device, real=real, trains=tensor)  # type: ignore[attr-defined]  # DeepSpeed's
    if not real or isinstance(tensor, DTensor):
        return _made(tensor.shape, tensor, local(tensor).device, real=real, trains=tensor)
    twin = tensor.detach()
    return Parameter(twin, tensor.requires_grad) if isinstance(tensor, Parameter) else twin


def _made(shape: torch.Size, like: Tensor, device: torch.device, *, real: bool, trains: Tensor) -> Tensor:
    twin = torch.empty(shape, dtype=like.dtype, device=device if real else "meta")
    return Parameter(twin, trains.requires_grad) if isinstance(trains, Parameter) else twin


@contextmanager
def instead(pairs: Iterable[tuple[TensorPlace, Tensor]], sites: Sequence[Site], flat: Flattened) -> Iterator[None]:
    """Meanwhile the modules hold these tensors under their own names, and no flat parameter."""
    with _without_flat(sites, flat):
        before: list[tuple[TensorPlace, tuple[Any, Any]]] = []
        try:
            for place, tensor in pairs:
                before.append((place, place.stands_there()))
                place.attributes.pop(place.key, None)
                place.holder[place.key] = tensor
            yield
        finally:
            for place, (held, attribute) in reversed(before):
                _put(place.holder, place.key, held)
                _put(place.attributes, place.key, attribute)


@contextmanager
def _without_flat(sites: Sequence[Site], flat: Flattened) -> Iterator[None]:
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for site in sites if flat.flat else ():
            holder = site.module._parameters
            taken.append((holder, dict(holder)))
            for key in [key for key, param in holder.items() if id(param) in flat.flat]:
                del holder[key]
        yield
    finally:
        for holder, everything in taken:
            holder.clear()  # or what was taken out would come last
            holder.update(everything)


def _put(into: dict[str, Any], key: str, what: Any) -> None:
    if what is ABSENT:
        into.pop(key, None)
    else:
        into[key] = what
