"""One meta model filled under any engine: its values, its loss and its next step, against the full model's."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import prepkit as pk
from tests.support.fragile_model import applied, planned
from tests.support.meta_models import held, on_meta, step_of, together
from tests.support.transformers_models import build

FROM = ("files", "initialisers", "rank 0")


def weights_of(source: str, path: str) -> pk.Weights:
    """The config of that source of values."""
    return {"files": pk.LoadWeights(path), "initialisers": pk.InitWeights(3), "rank 0": pk.BroadcastWeights()}[source]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Canonical name to a copy of every parameter and buffer, whole. Collective."""
    with ExitStack() as stack:
        if isinstance(model, FullyShardedDataParallel):
            stack.enter_context(FullyShardedDataParallel.summon_full_params(model, writeback=False))
        if any(hasattr(param, "ds_id") for param in model.parameters()):
            from deepspeed.runtime.zero.partition_parameters import GatheredParameters

            stack.enter_context(GatheredParameters(list(model.parameters())))
        return {name: tensor.clone() for name, tensor in held(model).items()}


def expected_model(family: str, source: str) -> tuple[Any, Any]:
    """The full model in one process, and its batch."""
    if source != "initialisers":
        return build(family)
    model, batch = on_meta(family)
    return applied(planned(pk.Config(weights=pk.InitWeights(3)), model), model).model, batch


def filled(
    rank: int, world: int, cfg: pk.Config, family: str, source: str, path: str, readers: int
) -> dict[str, float]:
    """Largest differences from the full model: of all tensors at first, of the loss, of all tensors after a step."""
    full, batch = expected_model(family, source)
    at_first = {name: tensor.clone() for name, tensor in held(full).items()}
    has_values = source == "rank 0" and rank == 0
    model = build(family)[0] if has_values else on_meta(family)[0]
    ready = pk.apply(
        pk.build_plan(evolve(cfg, weights=weights_of(source, path), optimizer=pk.optim.SGD(lr=0.1)), model)
    )
    found = {"values": _difference(values(ready.model), at_first)}
    found["loss"] = abs(together(ready, batch, rank, world, readers) - step_of(full, batch))
    found["step"] = _difference(values(ready.model), held(full))
    ready.close()
    return found


def _difference(there: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert set(there) == set(expected)
    return max(float((there[name].reshape(t.shape) - t).abs().max()) for name, t in expected.items())
