"""The objects of a run as facts that are kept in its checkpoints, and held against those of a run that goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from prepkit.facts.saved_run import RunFacts, Said, SavedModule, SavedTensor
from prepkit.live.model import names
from prepkit.live.model.joint_optimizer import members
from prepkit.live.model.unwrap import unwrap

UNIMPORTANT = frozenset(
    {
        *("transformers_version", "name_or_path", "architectures", "base_model_tp_plan", "dtype", "torch_dtype"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        *("gradient_checkpointing", "training"),
    }
)
"""Entries of a model's config, and attributes of modules, that change nothing that is trained."""


def said_by_modules(model: Module) -> tuple[SavedModule, ...]:
    """What every module of the user's says of itself; those that say nothing are left out. Reads no tensor.

    To be asked when the model is new: some modules count their calls in an attribute.
    """
    found = (
        SavedModule(path=site.path, cls=type(site.module).__name__, values=tuple(_scalars(vars(site.module))))
        for site in names.sites(model)
        if site.first
    )
    return tuple(module for module in found if module.values)


def said_by_config(model: Module) -> Said:
    """The model's own ``config`` (Hugging Face style), nested entries under their paths; empty without one."""
    config: Any = getattr(unwrap(model), "config", None)
    whole = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    return tuple(_flat(whole, "")) if isinstance(whole, Mapping) else ()


def run_facts(
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
) -> RunFacts:
    """The facts of one run; ``tensors`` are those of the model, by name, whatever holds them."""
    return RunFacts(
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
