"""Model and optimizer under DeepSpeed, parameter by parameter, under the names that torch's engines have.

Every rank writes and reads the runs of master weights and optimizer state that it holds: nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from prepkit.objects import names, zero_masters
from prepkit.objects.flat_range import FlatRange
from prepkit.objects.zero_masters import Master
from prepkit.ranks.world import ranks_of
from prepkit.saving.contents import MODEL, STATE, Contents

COUNTED = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""Counts of the engine."""
SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of its loss scaler."""

EXTRA = "_extra_state"
"""The name of ``Module.get_extra_state`` in a state dict."""


def held(engine: Any, optimizer: Any) -> Contents:
    """The run as it is now; without ``optimizer`` the model alone. Raises ``RunRefused`` for what cannot be read."""
    zero_masters.refuse_unreadable(engine)
    runs = zero_masters.masters(engine)
    tensors, plain = _model(engine, runs)
    if optimizer is None:
        return Contents(tensors=tensors, plain=plain, groups=[])
    state = zero_masters.base(engine).state
    for name, one in runs.items():
        for key, value in state.get(one.flat, {}).items():
            tensors[f"{STATE}{name}.{key}"] = one.part(value) if _lies_as(value, one.flat) else _scalar(value)
    return Contents(tensors=tensors, plain=plain, groups=_groups(engine))


@contextmanager
def filled(
    engine: Any, optimizer: Any, stored: Mapping[str, tuple[int, ...] | None], groups: list[dict[str, Any]]
) -> Iterator[Contents]:
    """Yield what is to be filled, with room for all state; put it in place afterwards. ``groups`` are those stored.

    DeepSpeed steps the parameters of a group as one: those of which the checkpoint holds no state get zeros, and where
    their steps differ the largest counts.
    """
    runs = zero_masters.masters(engine)
    state = {} if optimizer is None else zero_masters.base(engine).state
    before = {flat: dict(entries) for flat, entries in state.items()}
    if optimizer is not None:
        _make_room(engine, runs, state, stored)
    try:
        contents = held(engine, optimizer)
        _leave_out(contents, stored)
        if optimizer is not None:
            contents.tensors.update(_elsewhere(engine, contents, stored))
        yield contents
    except BaseException:
        state.clear()
        state.update(before)
        raise
    for one in runs.values() if optimizer is not None else ():
        _set_scalars(state.get(one.flat, {}), runs, one.flat, contents)
    if optimizer is not None:
        _set_options(zero_masters.base(engine), groups)
    _settle(engine, contents, bool(state))


def engine_state(engine: Any) -> dict[str, Any]:
    """Counts of the engine, and its loss scale."""
    scaler = _scaler(engine)
    scale = {name: vars(scaler)[name] for name in SCALING if name in vars(scaler)} if scaler is not None else {}
    return {"counted": {name: getattr(engine, name) for name in COUNTED}, "scale": scale}


def set_engine_state(engine: Any, counted: Mapping[str, Any]) -> None:
    """Put back what ``engine_state`` gave."""
    for name in COUNTED:
        setattr(engine, name, counted["counted"][name])
    scaler = _scaler(engine)
    for name in SCALING if scaler is not None else ():
        if name in counted["scale"] and name in vars(scaler):
            setattr(scaler, name, counted["scale"][name])


def _scaler(engine: Any) -> Any:
    found = getattr(engine.optimizer, "loss_scale_config", None)
    return found if found is not None else getattr(engine.optimizer, "loss_scaler", None)


def _model(engine: Any, runs: Mapping[str, Master]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters under each of their names, persistent buffers, and the extra state of modules."""
    by_id = {id(one.param): one for one in runs.values()}
    stepped = {id(param) for group in zero_masters.groups(engine) for param in group}
    tensors: dict[str, Any] = {}
    for name, param in names.all_parameter_names(engine).items():
        if id(param) in by_id:
            tensors[f"{MODEL}{name}"] = by_id[id(param)].part(by_id[id(param)].flat)
        elif id(param) in stepped:  # all of it is on other ranks
            tensors[f"{MODEL}{name}"] = FlatRange(param.detach().reshape(-1)[:0].float(), 0, _shape(param))
        else:
            tensors[f"{MODEL}{name}"] = _frozen(param)
    plain: dict[str, Any] = {}
    for site in names.sites(engine):
        path = f"{site.path}." if site.path else ""
        for name, buffer in site.module._buffers.items():
            if buffer is not None and name not in site.module._non_persistent_buffers_set:
                tensors[f"{MODEL}{path}{name}"] = buffer
        if type(site.module).get_extra_state is not nn.Module.get_extra_state:
            extra = site.module.get_extra_state()
            (tensors if isinstance(extra, Tensor) else plain)[f"{MODEL}{path}{EXTRA}"] = extra
    return tensors, plain


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def _frozen(param: Any) -> Any:
    """A parameter that nobody steps: whole, or under ZeRO-3 the part that this rank has."""
    if not hasattr(param, "ds_tensor"):
        return param.detach()
    part = param.ds_tensor.detach().reshape(-1)
    start = _partition(param) * part.numel()
    return FlatRange(part[: max(0, min(part.numel(), param.ds_numel - start))], start, tuple(param.ds_shape))


def _partition(param: Any) -> int:
    """Number of the part that is on this rank."""
    return ranks_of(param.ds_process_group).rank


def _lies_as(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _scalar(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device="cpu").clone()


def _groups(engine: Any) -> list[dict[str, Any]]:
    first = {id(param): name for name, param in names.named_parameters(engine).items()}
    options = ({k: v for k, v in group.items() if k != "params"} for group in zero_masters.base(engine).param_groups)
    members = ([first[id(param)] for param in group if id(param) in first] for group in zero_masters.groups(engine))
    return [{**own, "params": params} for own, params in zip(options, members, strict=True)]


def _make_room(
    engine: Any, runs: Mapping[str, Master], state: Any, stored: Mapping[str, tuple[int, ...] | None]
) -> None:
    """State of the kinds that the checkpoint holds for each flat tensor, and no other."""
    wanted: dict[Tensor, dict[str, bool]] = {one.flat: {} for one in runs.values()}
    for name, one in runs.items():
        prefix = f"{STATE}{name}."
        for key in (text.removeprefix(prefix) for text in stored if text.startswith(prefix)):
            shape = stored[f"{prefix}{key}"]
            wanted[one.flat][key] = key != "step" and shape is not None and tuple(shape) == one.shape
    for flat, kinds in wanted.items():
        old = state.pop(flat, {})
        if kinds:
            state[flat] = {key: _room(engine, old.get(key), flat, lies=lies) for key, lies in kinds.items()}


def _room(engine: Any, old: Any, flat: Tensor, *, lies: bool) -> Any:
    if lies:
        return torch.zeros_like(flat, requires_grad=False)
    if old is not None:
        return old
    # torch's optimizers count in a tensor, DeepSpeed's kernels take an int
    counts = type(zero_masters.base(engine)).__module__.startswith("torch.")
    return torch.zeros((), dtype=torch.float32) if counts else 0


def _leave_out(contents: Contents, stored: Mapping[str, Any]) -> None:
    """Leave out state of parameters that never had a gradient: it is zeros, which are there already."""
    for name in [name for name in contents.tensors if name.startswith(STATE) and name not in stored]:
        del contents.tensors[name]


def _elsewhere(engine: Any, contents: Contents, stored: Mapping[str, tuple[int, ...] | None]) -> dict[str, Any]:
    """State of parameters of which this rank has no part: it is known, and nothing of it is read here."""
    first = {id(param): name for name, param in names.named_parameters(engine).items()}
    stepped = [first[id(param)] for group in zero_masters.groups(engine) for param in group if id(param) in first]
    prefixes = tuple(f"{STATE}{name}." for name in stepped)
    missing = [name for name in stored if name.startswith(prefixes) and name not in contents.tensors]
    return {
        name: FlatRange(torch.zeros(0, dtype=torch.float32, device="cpu"), 0, tuple(stored[name] or ()))
        for name in missing
    }


def _set_scalars(entries: dict[str, Any], runs: Mapping[str, Master], flat: Tensor, contents: Contents) -> None:
    """Set what a flat tensor has one of, such as its count of steps; the largest of its parameters counts."""
    members = [name for name, one in runs.items() if one.flat is flat]
    for key, value in entries.items():
        if _lies_as(value, flat):
            continue
        read = (contents.tensors.get(f"{STATE}{name}.{key}") for name in members)
        found = {float(one) for one in read if isinstance(one, Tensor)}
        if len(found) > 1:
            contents.joined.append(f"{key} of {', '.join(members)} differs")
        if found and isinstance(value, Tensor):
            value.fill_(max(found))
        elif found:
            entries[key] = type(value)(max(found))


def _set_options(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    for group, before in zip(optimizer.param_groups, groups, strict=False):
        known = {key: value for key, value in before.items() if key in group or key == "initial_lr"}
        group.update({key: value for key, value in known.items() if key != "params"})


def _settle(engine: Any, contents: Contents, has_state: bool) -> None:
    """Make copies of master weights follow them, and renew DeepSpeed's references into the state."""
    for site in names.sites(engine):
        name = f"{MODEL}{site.path}.{EXTRA}" if site.path else f"{MODEL}{EXTRA}"
        if (extra := contents.tensors.get(name, contents.plain.get(name))) is not None:
            site.module.set_extra_state(extra)
    wrapper = engine.optimizer
    zero_masters.refresh(engine)
    if hasattr(wrapper, "_hp_optimizer_states_linked"):
        wrapper._hp_optimizer_states_linked = False
        if has_state:
            wrapper._lazy_init_hp_params_optimizer_state()
