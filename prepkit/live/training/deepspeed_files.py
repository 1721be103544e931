"""What a DeepSpeed run leaves on disk: checkpoints to go on from, and the whole model as one safetensors file.

Checkpoints are DeepSpeed's own. All functions are collective: every rank calls them, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from prepkit.live.model import names
from prepkit.live.training.prepared import Prepared

OURS = "prepkit"
"""Key of DeepSpeed's client state under which prepkit keeps what DeepSpeed does not know of."""


def save(ready: Prepared, folder: str, tag: str | None = None) -> None:
    """Writes a checkpoint: parameters, master weights, optimizer and scheduler, one file per rank and kind.

    ``tag`` names it inside the folder; None: after the number of steps. Raises ``RuntimeError`` inside an accumulation
    window, whose gradients no checkpoint holds.
    """
    engine = _engine(ready)
    if ready.pending:
        raise RuntimeError(
            f"{ready.pending} of {ready.plan.owners.accumulation_steps} micro-batches of this window have run, and a "
            "checkpoint holds no gradients; save after a step() that returned True"
        )
    steps = ready.scheduler is not None and ready.plan.owners.scheduler == "prepkit"
    kept = {"scheduler": ready.scheduler.state_dict() if steps else None}
    engine.save_checkpoint(folder, tag=tag, client_state={OURS: kept})


def resume(ready: Prepared, folder: str, tag: str | None = None) -> None:
    """Goes on from a checkpoint of the same plan; None: from the latest. For a freshly prepared model.

    Raises ``FileNotFoundError`` where there is none.
    """
    engine = _engine(ready)
    path, state = engine.load_checkpoint(folder, tag=tag)
    if path is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint{f' {tag!r}' if tag else ''}; give the folder of save()")
    kept = (state or {}).get(OURS, {}).get("scheduler")
    if kept is not None and ready.scheduler is not None:
        ready.scheduler.load_state_dict(kept)


def export(ready: Prepared, path: str) -> None:
    """Writes every parameter and persistent buffer, whole and under its own name, to one safetensors file.

    Trained parameters are the float32 master weights. One parameter at a time is gathered; rank 0 holds them all in
    host memory, and writes. A tied one is there once, under its first name. Raises ``OSError`` on every rank where the
    file cannot be written, and ``RuntimeError`` where DeepSpeed has split the layers themselves.
    """
    engine = _engine(ready)
    if any("split" in one.placements for one in ready.plan.layout):
        raise RuntimeError("DeepSpeed has split the layers over ranks; write ready.model.save_16bit_model(folder)")
    writes = not dist.is_initialized() or dist.get_rank() == 0
    whole = {}
    for name, tensor in _tensors(engine):
        value = _gathered(tensor)
        if writes:
            whole[name] = value.detach().to("cpu", copy=True).contiguous()
    said = [_write(whole, path) if writes else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    if said[0]:
        raise OSError(f"{path} cannot be written: {said[0]}")


def _engine(ready: Prepared) -> Any:
    if "DeepSpeedEngine" not in names.known_bases(type(ready.model)):
        raise TypeError(f"the model is a {type(ready.model).__name__}; these files are for engine=DeepSpeed()")
    return ready.model


def _tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    yield from names.named_parameters(model).items()
    for site in names.sites(model):
        for name, buffer in site.module._buffers.items() if site.first else ():
            if buffer is not None and name not in site.module._non_persistent_buffers_set:
                yield f"{site.path}.{name}" if site.path else name, buffer


def _gathered(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank: the master weights where DeepSpeed keeps some."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if (hasattr(tensor, "_z3_optimizer") and tensor.requires_grad) or hasattr(tensor, "_hp_mapping"):
        master: Tensor | None = safe_get_full_fp32_param(tensor)
        if master is not None:
            return master
    if isinstance(tensor, Parameter) and hasattr(tensor, "ds_id"):
        with GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


def _write(whole: dict[str, torch.Tensor], path: str) -> str:
    """Puts the file there once it is complete; says what went wrong, if anything."""
    from safetensors.torch import save_file

    part = Path(f"{path}.part")
    try:
        save_file(whole, part, metadata={"format": "pt"})
        part.rename(path)
    except Exception as error:  # safetensors raises classes of its own, and the other ranks have to hear of any
        return f"{type(error).__name__}: {error}"
    return ""
