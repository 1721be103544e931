"""Adapters of peft's LoRA, which their layer initializes as a whole.

An adapter is made of plain Linears, and a model's own ``_init_weights`` fills those like all others. But a LoRA adapter
begins as nothing: one of its two halves is zero, so that the model first computes what its base does. The layer's
``reset_lora_parameters`` writes that, and therefore has the last word (peft ``tuners/lora/layer.py``).

What is made from the values of the base (PiSSA, OLoRA, LoftQ ...) cannot be made here, as those may come later.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.nn import Module

from prepkit.live.model.names import Site

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


def adapter_problems(sites: Sequence[Site], wanted: Sequence[str]) -> tuple[str, ...]:
    """One text for the adapters that would have to be made from the values of the base."""
    configs, problems = adapter_configs(sites), []
    for site in sites:
        for name, how in _adapters(site.module, configs[site.path]):
            inside = [param for param in wanted if param.startswith(f"{site.path}.lora_") and f".{name}" in param]
            if inside and how not in FROM_SHAPES:
                problems.append(f"{inside[0]}: init_lora_weights={how!r} is made from the values of the base")
    fix = "; prepare the adapter with values, and write weights=SendWeights(), or init_lora_weights=True"
    return (problems[0] + (f", and {len(problems) - 1} more" if problems[1:] else "") + fix,) if problems else ()


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
