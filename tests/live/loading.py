"""Models without values, their training in one process, and what of it is compared: for the tests of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from prepkit.live.names import canonical
from tests.models import FAMILIES, MORE, build

EVERY = {**FAMILIES, **MORE}


def on_meta(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model of that family without values, and a batch for it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model, _ = EVERY[family]()
    finally:
        torch.set_default_dtype(before)
    with torch.device("cpu"):
        return model.train(), EVERY[family]()[1]


def saved(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, size: str = "30KB") -> str:
    """The path of a checkpoint of that family, in several files where it is larger."""
    model, _ = build(family)
    model.to(dtype).save_pretrained(str(folder), max_shard_size=size)
    return str(folder)


def saved_as_held(folder: Path, family: str) -> str:
    """The path of a file with the keys that the model has, which transformers renames and splits for some families."""
    model, _ = build(family)
    own = {id(value): (name, value) for name, value in reversed(model.state_dict(keep_vars=True).items())}
    save_file({name: value.detach() for name, value in own.values()}, folder / "model.safetensors")
    return str(folder)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, on every rank."""
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach()


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Canonical name to every parameter and buffer, whole."""
    inner = getattr(model, "module", model)
    return {canonical(name): whole(t) for name, t in (*inner.named_parameters(), *inner.named_buffers())}
