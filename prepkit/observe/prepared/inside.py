"""What stands inside a model and trains otherwise than it seems: frozen parts, checkpoints, adapters, losses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from prepkit.facts.run import AdapterFacts, RunFacts, WrappedModule
from prepkit.objects.names import Site
from prepkit.observe.prepared.modules import rate

HEADS = re.compile(r"(^|\.)(score|classifier|qa_outputs)(\.|$)")
"""Layers that transformers puts anew on a body for a task."""
TASKS = re.compile(r"For(Sequence|Token|Image|Audio\w*)Classification|ForQuestionAnswering|ForMultipleChoice")


def frozen_parts(places: list[Site]) -> tuple[Site, ...]:
    """Outermost modules of which no parameter trains, beside others that do."""
    if not any(param.requires_grad for param in places[0].module.parameters()):
        return ()
    found: list[Site] = []
    for site in places:
        inside = any(site.path.startswith(f"{one.path}.") for one in found)
        params = [] if inside or not site.first or not site.path else [*site.module.parameters()]
        if params and not any(param.requires_grad for param in params):
            found.append(site)
    return tuple(found)


def frozen_drops(places: list[Site], frozen: Iterable[Site]) -> tuple[str, ...]:
    """Those that stand beside what trains, as a teacher or a body under a head does, and drop elements.

    Layers between adapters drop as their model does, and are none of them.
    """
    beside = _beside(places)
    return tuple(
        site.path
        for site in frozen
        if site.path in beside and any(one.training and rate(one) > 0 for one in site.module.modules())
    )


def _beside(places: list[Site]) -> set[str]:
    """Paths of the modules at which the model first branches."""
    module, path = places[0].module, ""
    while len(children := [pair for pair in module.named_children() if any(True for _ in pair[1].parameters())]) == 1:
        module, path = children[0][1], ".".join(filter(None, (path, children[0][0])))
    return {".".join(filter(None, (path, name))) for name, _ in children}


def frozen_norms(frozen: Iterable[Site]) -> tuple[str, ...]:
    """Those with weights beside a batch norm that goes on to average what it sees."""
    return tuple(
        site.path
        for site in frozen
        if any(_averages(one) for one in site.module.modules())
        and any(param.ndim > 1 for param in site.module.parameters())
    )


def _averages(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.running_mean is not None


def forgetful(places: list[Site]) -> tuple[str, ...]:
    """Checkpoints over dropout that keep no random numbers for their second forward."""
    found = []
    for site in places:
        for module in site.stack if site.first else ():
            told = (value for value in vars(module).values() if isinstance(value, partial))
            if any(one.keywords.get("preserve_rng_state") is False for one in told) and _drops(module):
                found.append(site.path)
    return tuple(dict.fromkeys(found))


def _drops(module: nn.Module) -> bool:
    return any(rate(one) > 0 for one in module.modules())


def renormalised(places: list[Site], wrapped: Iterable[WrappedModule]) -> tuple[str, ...]:
    """Checkpoints over batch norms, which average each batch twice."""
    paths = {one.path for one in wrapped if "checkpointed" in one.wrappers}
    return tuple(
        site.path for site in places if site.first and site.path in paths and any(map(_averages, site.module.modules()))
    )


def softmax_before_loss(places: list[Site]) -> str:
    """The softmax at a model's end, where the model holds the cross-entropy that takes another; empty: none."""
    losses = [one for site in places for one in vars(site.module).values() if isinstance(one, nn.CrossEntropyLoss)]
    losses += [site.module for site in places if isinstance(site.module, nn.CrossEntropyLoss)]
    others = [site for site in places if not isinstance(site.module, nn.CrossEntropyLoss)]
    last = others[-1] if others else None
    ends = last is not None and isinstance(last.module, nn.Softmax | nn.Sigmoid)
    return last.path if losses and ends and last is not None else ""


def adapters(places: list[Site]) -> AdapterFacts | None:
    """Adapters of peft; None without one."""
    layers = [
        site for site in places if site.first and "lora_A" in site.module._modules and hasattr(site.module, "scaling")
    ]
    if not layers:
        return None
    live = [site for site in layers if any(p.requires_grad for n, p in site.module.named_parameters() if "lora_" in n)]
    bases = [(site, getattr(site.module, "base_layer", None)) for site in layers]
    root = type(getattr(places[0].module, "base_model", places[0].module))
    inner: Any = getattr(getattr(places[0].module, "base_model", None), "model", None)
    tasked = TASKS.search(type(inner).__name__ if inner is not None else root.__name__)
    return AdapterFacts(
        off=tuple(site.path for site in live if _is_off(site.module)),
        zero=tuple(site.path for site in live if not any(site.module.scaling.values())),  # type: ignore[operator]
        base=tuple(site.path for site, base in bases if isinstance(base, nn.Module) and _weight_trains(base)),
        heads=tuple(_frozen_heads(places)) if tasked else (),
    )


def _is_off(layer: Any) -> bool:
    return bool(getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False))


def _weight_trains(base: nn.Module) -> bool:
    weight = getattr(base, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.requires_grad


def _frozen_heads(places: list[Site]) -> Iterator[str]:
    for site in places:
        params = [*site.module.parameters()] if site.first and HEADS.search(site.path) else []
        saved = "modules_to_save" in site.path or "original_module" in site.path
        if params and not saved and not site.module._modules and not any(param.requires_grad for param in params):
            yield site.path


def with_inside(facts: RunFacts, places: list[Site]) -> dict[str, Any]:
    """All of it, by field of ``RunFacts``."""
    frozen = frozen_parts(places)
    return {
        "frozen_drops": frozen_drops(places, frozen) if places[0].module.training else (),
        "frozen_norms": frozen_norms(frozen),
        "forgetful": forgetful(places),
        "renormalised": renormalised(places, facts.wrapped),
        "softmax": softmax_before_loss(places),
        "adapters": adapters(places),
    }
