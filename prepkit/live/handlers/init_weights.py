"""The modules' own initialisers, run on whole tensors one unit at a time; each rank keeps its part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from prepkit.live.handlers import messages
from prepkit.live.handlers.optimizer_state import shard
from prepkit.live.interpreter import Handler
from prepkit.live.model import names
from prepkit.live.model.names import Site
from prepkit.live.model.state import local
from prepkit.live.model.target import Target
from prepkit.steps import InitializeTensors

RESETS = ("reset_parameters", "_reset_parameters")
INITS = "_init_weights"


class NotInitialised(RuntimeError):
    """An initialiser ran and left tensors unwritten, or there was none; names them."""


def initialise_ready(step: InitializeTensors, target: Target) -> tuple[str, ...]:
    """Every named parameter, and every named buffer on meta, must be in a module that something initialises."""
    places = names.sites(target.model)
    there = _owned(places)
    found = messages.absent("parameter", step.params, there) + messages.absent("buffer", step.buffers, there)
    wanted = [n for n in step.params if n in there] + [n for n in step.buffers if n in there and there[n][1].is_meta]
    authors = _authors(places)
    alone = [n for n in wanted if not _resets(there[n][0].module) and authors[there[n][0].path] is None]
    if alone:
        what = f"{messages.listed(alone)}: without values, and nothing initialises it"
        found += (f"{what}; give its module a reset_parameters()",)
    return found


def initialise_do(step: InitializeTensors, target: Target) -> tuple[str, ...]:
    """Unit by unit: whole tensors in the place of the shards, the modules' initialisers from the leaves up, parts back.

    A unit is whole at one time because initialisers of a module may write what its children hold (GPT-2's residual
    projections). Every module has a seed of its own, so that the values depend on neither ranks nor units.
    What is not to be initialised stays as it is. Returns the names of what had values before. Raises
    ``NotInitialised``.
    """
    places = [site for site in names.sites(target.model) if site.first]
    wanted = {*step.params, *(name for name in step.buffers if name in target.unfilled)}
    authors, chosen = _authors(places), set(step.units)
    owner: dict[str, str] = {}
    for site in places:
        up = site.path.rpartition(".")[0]
        owner[site.path] = site.path if not site.path or site.path in chosen else owner[up]
    device = next((local(param).device for param in target.model.parameters()), torch.device("cpu"))
    forked = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    lost = tuple(name for name in step.params if name not in target.unfilled)
    with torch.random.fork_rng(**forked), torch.no_grad(), messages.half_done(lost):
        for unit in step.units:
            inside = [site for site in places if owner[site.path] == unit]
            with _out_of_reach([site for site in places if owner[site.path] != unit]):
                _unit(inside, wanted, authors, step.seed)
        target.unfilled -= wanted
        return lost


def initialise_undo(step: InitializeTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """What had no values before has none again: no more than a note, as its storage goes with ``AllocateTensors``."""
    target.unfilled |= set(step.params) - set(memo)
    return messages.overwritten(memo)


@frozen(eq=False)
class Held:
    """One place of a tensor in a unit."""

    name: str
    """First name of the tensor."""
    slots: dict[str, Any]
    """The dictionary of the module that holds it."""
    key: str
    own: Tensor
    """What stood there, and stands there afterwards."""
    whole: Tensor
    """What the initialisers write: whole and real if the tensor is wanted, else on meta, where writing does nothing."""


def _unit(inside: Sequence[Site], wanted: set[str], authors: dict[str, Module | None], seed: int) -> None:
    held = tuple(_held(inside, wanted))
    chosen = {one.name: one for one in held if one.name in wanted}
    if not chosen:
        return
    whole_unit = any(isinstance(one.own, Parameter) for one in chosen.values())
    holders = {id(one.slots) for one in chosen.values()}
    runs = [
        site
        for site in reversed(inside)  # children before their parents, which may write what they hold
        if whole_unit or not holders.isdisjoint((id(site.module._parameters), id(site.module._buffers)))
    ]
    seen: list[dict[str, Tensor]] = []
    with _in_place(held):
        for fill in range(1 if all(_signals(one.whole) for one in chosen.values()) else 2):
            for one in chosen.values():
                _blank(one.whole, fill)
            for site in runs:
                torch.manual_seed(_seed(seed, site.path))
                _run(site.module, authors[site.path])
            seen.append({name: one.whole.detach().clone() for name, one in chosen.items() if not _signals(one.whole)})
    if unwritten := [name for name, one in chosen.items() if _unwritten(name, one.whole, seen)]:
        raise NotInitialised(
            f"{messages.listed(unwritten)}: still without values after reset_parameters() and _init_weights(); write "
            "them there, or load the weights: LoadWeights(path)"
        )
    for one in chosen.values():
        part = shard(one.whole.detach(), one.own) if isinstance(one.own, DTensor) else one.whole
        local(one.own).copy_(local(part))


def _held(inside: Sequence[Site], wanted: set[str]) -> Iterator[Held]:
    """Every tensor of a unit with its twin; a tied one has one twin."""
    twins: dict[int, tuple[str, Tensor]] = {}
    for site in inside:
        for slots in (site.module._parameters, site.module._buffers):
            for key, own in slots.items():
                if own is not None:
                    name = f"{site.path}.{key}" if site.path else key
                    if id(own) not in twins:
                        twins[id(own)] = name, _twin(own, name in wanted)
                    yield Held(twins[id(own)][0], slots, key, own, twins[id(own)][1])


def _twin(own: Tensor, real: bool) -> Tensor:
    """A new object, without flags of the past such as transformers' ``_is_hf_initialized``.

    On meta unless ``real``; a plain tensor's has its storage, so that nothing is there twice.
    """
    whole = own.detach()
    if not real or isinstance(own, DTensor):
        whole = torch.empty(own.shape, dtype=own.dtype, device=local(own).device if real else "meta")
    return Parameter(whole, own.requires_grad) if isinstance(own, Parameter) else whole


@contextmanager
def _in_place(held: Sequence[Held]) -> Iterator[None]:
    try:
        for one in held:
            one.slots[one.key] = one.whole
        yield
    finally:
        for one in held:
            one.slots[one.key] = one.own


# --- initialisers --------------------------------------------------------------------------------------------------


def _resets(module: Module) -> Any:
    return next((method for name in RESETS if callable(method := getattr(module, name, None))), None)


def _authors(places: Sequence[Site]) -> dict[str, Module | None]:
    """Path to the nearest module at or above it that has ``_init_weights``."""
    found: dict[str, Module | None] = {}
    for site in places:
        above = found[site.path.rpartition(".")[0]] if site.path else None
        found[site.path] = site.module if callable(getattr(site.module, INITS, None)) else above
    return found


def _run(module: Module, author: Any) -> None:
    """As a constructor does: the module's own initialiser, then the model's, which has the last word."""
    if (reset := _resets(module)) is not None:
        reset()
    if author is not None:
        getattr(author, INITS)(module)


def _seed(seed: int, path: str) -> int:
    """63 bits that depend on both, the same in every process."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little") >> 1


class Elsewhere(Tensor):
    """A parameter of another unit: has a shape, and refuses to be written or read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Properties and sizes pass; anything else raises ``NotInitialised``."""
        if func.__name__ in {"__get__", "dim", "size", "numel", "detach", "is_floating_point", "__len__"}:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch
        raise NotInitialised(
            f"an initialiser calls {func.__name__} on a parameter of shape {tuple(args[0].shape)} that another unit "
            "holds; initialise it in a module of that unit, or load the weights: LoadWeights(path)"
        )


@contextmanager
def _out_of_reach(others: Sequence[Site]) -> Iterator[None]:
    """Meanwhile an initialiser that reaches into other units fails, where it would write only this rank's part."""
    own = [
        (site.module._parameters, key, param)
        for site in others
        for key, param in site.module._parameters.items()
        if param is not None
    ]
    try:
        for slots, key, param in own:
            bare: Any = torch.empty(param.shape, dtype=param.dtype, device="meta")
            slots[key] = bare.as_subclass(Elsewhere)
        yield
    finally:
        for slots, key, param in own:
            slots[key] = param


# --- was it written? -----------------------------------------------------------------------------------------------


def _signals(tensor: Tensor) -> bool:
    """Whether a value that no initialiser writes can be put into it; others are written twice and compared."""
    return tensor.is_floating_point() or tensor.is_complex()


def _blank(tensor: Tensor, fill: int) -> None:
    tensor.fill_(float("nan") if _signals(tensor) else fill)


def _unwritten(name: str, tensor: Tensor, seen: Sequence[dict[str, Tensor]]) -> bool:
    if _signals(tensor):
        return bool(tensor.isnan().any())
    return not torch.equal(seen[0][name], seen[1][name])


def _owned(places: Sequence[Site]) -> dict[str, tuple[Site, Tensor]]:
    """Canonical name to tensor and the place that holds it."""
    return {
        f"{site.path}.{name}" if site.path else name: (site, tensor)
        for site in places
        for slots in (site.module._parameters, site.module._buffers)
        for name, tensor in slots.items()
        if tensor is not None
    }


INITIALISE: Handler[InitializeTensors, Target, tuple[str, ...]] = Handler(
    ready=initialise_ready, do=initialise_do, undo=initialise_undo
)
