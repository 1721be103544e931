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
from torch.distributed.checkpoint.filesystem import FileSystemReader
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

from prepkit.live.model import names
from prepkit.live.model.unwrap import unwrap
from prepkit.live.ranks.rank_zero import on_rank_zero
from prepkit.live.training import checkpoint_folder, checkpoint_names, untouched

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

    The checkpoint that lay in the folder stays until the new one is whole (``checkpoint_folder``). ``more`` are objects
    that are the same on every rank, such as a scheduler; None among them are left out. Nothing that is saved is
    changed. Raises ``CheckpointFailed`` on every rank.
    """
    draft = checkpoint_folder.begin(folder)
    with untouched.as_it_stands(optimizer):
        state = _state(model, optimizer, more)
    try:
        with _told(f"{folder} could not be written"):
            write(state, checkpoint_id=draft, no_dist=not dist.is_initialized())
    except CheckpointFailed:
        checkpoint_folder.discard(draft)
        raise
    checkpoint_folder.publish(draft)


def resume(folder: str, model: Module, optimizer: Optimizer | None, more: Mapping[str, Any]) -> None:
    """Reads what ``save`` has written into the objects that stand here, whatever their mesh is. Collective.

    A parameter that had no optimizer state when it was saved, because it never had a gradient, has none afterwards.
    Raises ``CheckpointFailed`` on every rank, before anything is read, for a folder that holds no whole checkpoint,
    lacks something that stands here, or holds something that does not. A failure while it is read leaves some of the
    model's tensors read and others not, and the optimizer as it was.
    """
    source, stored = _stored(folder)
    with untouched.emptied(optimizer):
        state = _state(model, optimizer, more)
        stateless = checkpoint_names.stateless(state, stored)
        wanted = checkpoint_names.without_state_of(state, stateless)
        if bad := checkpoint_names.problems(wanted, stored):
            raise CheckpointFailed(f"{folder} does not fit what stands here: {bad}")
        with _told(f"{folder} could not be read"):
            load(wanted, checkpoint_id=source, no_dist=not dist.is_initialized())  # fills the tensors of ``state``
        set_state_dict(
            model,
            optimizer if optimizer is not None else (),
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
        )
        _forget(model, optimizer, stateless)
    for name, one in more.items():
        if one is not None:
            one.load_state_dict(state[name])


def _stored(folder: str) -> tuple[Path, frozenset[str]]:
    """Where the latest checkpoint lies, and the names of all that it holds."""
    try:
        source = checkpoint_folder.latest(folder)
        return source, frozenset(FileSystemReader(source).read_metadata().state_dict_metadata)
    except Exception as error:  # whatever torch's reader makes of a damaged file
        raise CheckpointFailed(f"{folder} could not be read: {type(error).__name__}: {error}") from error


def _forget(model: Module, optimizer: Optimizer | None, stateless: frozenset[str]) -> None:
    """Takes out the state that torch has made room for, of parameters that had none when they were saved."""
    params = names.named_parameters(model) if stateless else {}
    for name in stateless:
        if optimizer is not None and (param := params.get(name)) is not None:
            optimizer.state.pop(param, None)


def _state(model: Module, optimizer: Optimizer | None, more: Mapping[str, Any]) -> dict[str, Any]:
    params, stepped = get_state_dict(model, optimizer if optimizer is not None else ())
    state: dict[str, Any] = {"model": params, **({"optimizer": stepped} if optimizer is not None else {})}
    return state | {name: one.state_dict() for name, one in more.items() if one is not None}


def export(folder: str, model: Module) -> None:
    """Writes the whole model as safetensors, tied parameters once. Collective; rank 0 holds all of it in host memory.

    A model of transformers writes its config and index beside it (``save_pretrained``), as ``from_pretrained`` expects.
    Raises what writing raises, on rank 0, and ``RankZeroFailed`` on the others.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: dict[str, Any] = get_model_state_dict(model, options=options)
    on_rank_zero(lambda: _write(Path(folder), unwrap(model), whole), f"{folder} could not be written")


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
