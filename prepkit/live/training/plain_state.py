"""What an unsharded model or optimizer has saved, loaded into a sharded one: said at once, with what to type.

torch takes an optimizer's whole state, and fails in the next step; of a model's it says that tensors are mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from prepkit.findings.text import count, some


def refuse_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for state tensors that are whole where the parameter is sharded."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    held = [index for group in state.get("param_groups", ()) for index in group["params"]]
    whole = [
        index
        for index, param in zip(held, params, strict=False)
        if isinstance(param, DTensor) and any(map(_is_whole, state.get("state", {}).get(index, {}).values()))
    ]
    if whole:
        raise ValueError(
            f"this state of {count(len(whole), 'parameter')} is of an optimizer that was not sharded. Write "
            "ready.resume(folder), from what ready.save(folder) has written under any engine, or "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with "
            "StateDictOptions(full_state_dict=True), which takes names in the place of numbers"
        )


def refuse_weights(model: Module, state: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for weights that are whole where the parameter is sharded."""
    whole = [
        name for name, param in model.named_parameters() if isinstance(param, DTensor) and _is_whole(state.get(name))
    ]
    if whole:
        raise ValueError(
            f"{count(len(whole), 'weight')} of this state lie whole, and the model is sharded: {some(whole)}. Load "
            "them before build_plan, or write torch.distributed.checkpoint.state_dict.set_model_state_dict("
            "ready.model, state, options=StateDictOptions(full_state_dict=True)); what ready.save(folder) has written "
            "is read by ready.resume(folder, only_model=True)"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() > 0
