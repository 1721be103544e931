"""A run as facts that its checkpoints keep, and that are held against those of the run that goes on from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from prepkit.facts.saved_run import Said, SavedFacts, SavedModule, SavedTensor, SavedWindows
from prepkit.objects import names
from prepkit.objects.joint_optimizer import members
from prepkit.objects.unwrap import unwrap
from prepkit.observe.prepared.optimizers import as_rate
from prepkit.plan import Plan

UNIMPORTANT = frozenset(
    {
        *("transformers_version", "name_or_path", "architectures", "base_model_tp_plan", "dtype", "torch_dtype"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        *("gradient_checkpointing", "training"),
    }
)
"""Entries of a model's config, and attributes of modules, that change nothing that is trained."""

_SETTINGS = ("weight_decay", "betas", "momentum", "eps")
CYCLED = ("betas", "momentum")
"""Options that a scheduler sets if it cycles momentum."""
_COUNTED = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "mode_worse", "T_cur"})
"""Counts of a scheduler, which a resume is to put back."""


def modules_of(model: Module) -> tuple[SavedModule, ...]:
    """Describe each module of the user's by its plain attributes, if it has any. Reads no tensor.

    For a model that is new: some modules count their calls in an attribute.
    """
    found = (
        SavedModule(path=site.path, cls=type(site.module).__name__, values=tuple(_scalars(vars(site.module))))
        for site in names.sites(model)
        if site.first
    )
    return tuple(module for module in found if module.values)


def config_of(model: Module) -> Said:
    """The model's own ``config`` (Hugging Face style), nested entries under their paths; empty without one."""
    config: Any = getattr(unwrap(model), "config", None)
    whole = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    return tuple(_flat(whole, "")) if isinstance(whole, Mapping) else ()


def saved_facts(
    *,
    engine: str,
    world: int,
    tensors: Mapping[str, Any],
    modules: tuple[SavedModule, ...],
    config: Said,
    optimizer: Any,
    groups: tuple[tuple[str, ...], ...],
    scheduler: Any,
    scaler: bool,
    loaders: int,
) -> SavedFacts:
    """Describe one run; ``tensors`` are those of the model by name, ``world`` is the number of ranks."""
    return SavedFacts(
        engine=engine,
        world_size=world,
        tensors=tuple(
            SavedTensor(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        ),
        modules=modules,
        config=config,
        optimizer=" + ".join(type(one).__name__ for one in members(optimizer)),
        groups=groups,
        scheduler="" if scheduler is None else type(scheduler).__name__,
        scaler=scaler,
        loaders=loaders,
    )


def windows_of(plan: Plan) -> SavedWindows:
    """Describe the optimizer steps of a plan."""
    return SavedWindows(
        micro_batches=plan.owners.accumulation_steps,
        ranks=plan.data_parallel_size,
        clip="" if plan.owners.clip is None else str(plan.owners.clip),
        global_batch=plan.owners.global_batch or plan.run.global_batch,
        total_steps=plan.run.total_steps,
    )


def settings(optimizers: Sequence[Any], scheduler: Any) -> dict[str, Any]:
    """Name to value of each setting that optimizers and scheduler were built with.

    The state of both has the settings in it, so that a resume replaces them. The rate of a group is the one that a
    scheduler starts from.
    """
    groups = [group for one in optimizers for group in one.param_groups]
    cycled = CYCLED if cycles_momentum(scheduler) else ()
    found = {
        f"{name} of group {at}": value
        for at, group in enumerate(groups)
        for name, value in _of(group).items()
        if name not in cycled
    }
    if type(scheduler).__module__.partition(".")[0] in ("torch", "transformers"):
        state = scheduler.state_dict()
        found |= {f"the scheduler's {name}": value for name, value in state.items() if _is_setting(name, value)}
    return found


def cycles_momentum(scheduler: Any) -> bool:
    """True where a step of it, or of one inside it, sets momentum or betas (torch ``OneCycleLR``, ``CyclicLR``)."""
    inside = [one for name in ("_schedulers", "schedulers", "members") for one in getattr(scheduler, name, ())]
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(map(cycles_momentum, inside))


def _of(group: Mapping[str, Any]) -> dict[str, Any]:
    rate = as_rate(group.get("initial_lr", group.get("lr")))
    kept = {name: group[name] for name in _SETTINGS if name in group}
    return kept if rate is None else {"lr": rate, **kept}


def _is_setting(name: str, value: Any) -> bool:
    return not name.startswith("_") and name not in _COUNTED and isinstance(value, int | float | str)


def replaced(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that are no longer as before, with both values."""
    return tuple(f"{name}: {now[name]} for {old}" for name, old in before.items() if name in now and now[name] != old)


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if not name.startswith(("_", "ds_")) and name not in UNIMPORTANT and _is_scalar(value):
            yield name, repr(value)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = str(key)
        if name.startswith("_") or name in UNIMPORTANT:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif _is_scalar(value) or (isinstance(value, list | tuple) and all(map(_is_scalar, value))):
            yield f"{prefix}{name}", repr(list(value) if isinstance(value, tuple) else value)


def _is_scalar(value: object) -> bool:
    return isinstance(value, bool | int | float | str)
