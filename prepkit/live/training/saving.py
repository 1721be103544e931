"""Saving what is prepared, and going on from it: torch's distributed checkpoints, which fit any number of ranks.

Every rank writes and reads its own shards (``torch.distributed.checkpoint``). Names are those of the user's model, so
that a checkpoint of one mesh or engine fits another. ``export`` writes the whole model, for ``from_pretrained``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.nn import Module
from torch.optim import Optimizer

from prepkit.live.model.unwrap import unwrap

SINGLE = "model.safetensors"


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read; says on which ranks, and why."""


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Torch's own error is no ``Exception``, and shows a stack trace of every rank."""
    try:
        yield
    except CheckpointException as error:
        texts: dict[str, list[int]] = {}
        for rank, (raised, _) in error.failures.items():
            texts.setdefault(f"{type(raised).__name__}: {raised}", []).append(rank)
        ranks = (f"{text} (ranks {', '.join(map(str, at))})" for text, at in texts.items())
        raise CheckpointFailed(f"{what}: {'; '.join(ranks)}") from None


def save(folder: str, model: Module, optimizer: Optimizer | None, more: Mapping[str, Any]) -> None:
    """Writes parameters, buffers, optimizer state, and the ``state_dict()`` of each of ``more``. Collective.

    ``more`` are objects that are the same on every rank, such as a scheduler; None among them are left out. Raises
    ``CheckpointFailed`` on every rank.
    """
    with _told(f"{folder} could not be written"):
        write(_state(model, optimizer, more), checkpoint_id=folder, no_dist=not dist.is_initialized())


def resume(folder: str, model: Module, optimizer: Optimizer | None, more: Mapping[str, Any]) -> None:
    """Reads what ``save`` has written into the objects that stand here, whatever their mesh is. Collective.

    Raises ``CheckpointFailed`` on every rank for a folder that is no checkpoint, or lacks something that stands here,
    before anything is read. A failure while it is read leaves some tensors read, and others not.
    """
    state = _state(model, optimizer, more)
    with _told(f"{folder} could not be read"):
        load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(
        model,
        optimizer if optimizer is not None else (),
        model_state_dict=state["model"],
        optim_state_dict=state.get("optimizer", {}),
    )
    for name, one in more.items():
        if one is not None:
            one.load_state_dict(state[name])


def _state(model: Module, optimizer: Optimizer | None, more: Mapping[str, Any]) -> dict[str, Any]:
    held, stepped = get_state_dict(model, optimizer if optimizer is not None else ())
    state: dict[str, Any] = {"model": held, **({"optimizer": stepped} if optimizer is not None else {})}
    return state | {name: one.state_dict() for name, one in more.items() if one is not None}


def export(folder: str, model: Module) -> None:
    """Writes the whole model as safetensors, tied parameters once. Collective; rank 0 holds all of it in host memory.

    A model of transformers writes its config and index beside it (``save_pretrained``), as ``from_pretrained`` expects.
    Raises what writing raises, on rank 0, and ``RuntimeError`` on the others.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: dict[str, Any] = get_model_state_dict(model, options=options)
    error: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            _write(Path(folder), unwrap(model), whole)
        except Exception as raised:  # the others wait to hear how it went
            error = raised
    said = [None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        dist.broadcast_object_list(said)
    if error is not None:
        raise error
    if said[0] is not None:
        raise RuntimeError(f"rank 0 could not write {folder}: {said[0]}")


def _write(folder: Path, model: Module, whole: Mapping[str, torch.Tensor]) -> None:
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name.replace("_checkpoint_wrapped_module.", ""): id(tensor) for name, tensor in tensors}
    for name in whole:
        first.setdefault(names.get(name, id(name)), name)
    once = {name: tensor.contiguous() for name, tensor in whole.items() if name in set(first.values())}
    folder.mkdir(parents=True, exist_ok=True)
    if (writes := getattr(model, "save_pretrained", None)) is not None:
        writes(str(folder), state_dict=once)
        return
    from safetensors.torch import save_file

    save_file(once, str(folder / SINGLE), metadata={"format": "pt"})
