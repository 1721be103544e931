"""The whole model as safetensors, out of whatever holds it, for everybody else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Module

from prepkit.live.checkpoints import gathered
from prepkit.live.checkpoints.state import is_deepspeed
from prepkit.live.model import fsdp1_flat
from prepkit.live.model.unwrap import unwrap
from prepkit.live.ranks.rank_zero import on_rank_zero
from prepkit.live.training import pretrained


def export(folder: str, model: Module, *, masters: bool = True) -> None:
    """Writes the whole model as safetensors, tied parameters once. Collective; rank 0 holds all of it in host memory.

    A model of transformers writes its config and index beside it (``save_pretrained``), as ``from_pretrained`` expects;
    trained parameters are the master weights, where an engine keeps some and ``masters`` says so. Of a peft model the
    adapters alone are written. What was written is read again: ``ExportFailed`` where something that was trained is not
    in it. Raises that, or what writing raises, on rank 0, and ``RankZeroFailed`` on the others.
    """
    by_unit = is_deepspeed(model) or bool(fsdp1_flat.units(model))
    whole = _gathered(model, masters) if by_unit else _adapters(model) or _whole(model)
    on_rank_zero(lambda: pretrained.write(Path(folder), unwrap(model), whole), f"{folder} could not be written")


def whole(model: Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer under its canonical name, the adapters' base as well.

    Where the engine shards it is collective, and gives copies in host memory on rank 0 and nothing on the others;
    elsewhere it is the model's own tensors, on every rank.
    """
    if is_deepspeed(model) or fsdp1_flat.units(model):
        return gathered.whole(model)
    if any(isinstance(param, DTensor) for param in model.parameters()):
        return dict(_whole(model))
    own: dict[str, Any] = get_model_state_dict(model)
    return own


def _gathered(model: Module, masters: bool) -> Mapping[str, torch.Tensor]:
    """Unit by unit; torch's own way for FSDP1 ends the process on a CPU (2.13)."""
    whole = gathered.whole(model, masters=masters)
    wanted = pretrained.adapters(model, whole) if whole else None
    return whole if wanted is None else {name: whole[name] for name in whole if name in wanted}


def _whole(model: Module) -> Mapping[str, torch.Tensor]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: dict[str, Any] = get_model_state_dict(model, options=options)
    return whole


def _adapters(model: Module) -> Mapping[str, torch.Tensor] | None:
    """What peft writes of a model with adapters, whole and on the host; None for any other model."""
    if not hasattr(unwrap(model), "peft_config"):
        return None
    state: dict[str, Any] = get_model_state_dict(model)
    wanted = pretrained.adapters(model, state) or ()
    return {name: _host(state[name]) for name in state if name in wanted}


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
