"""The whole model as safetensors, out of whatever holds it, for everybody else.

It is gathered on rank 0, written as ``from_pretrained`` reads it, and read again before anybody relies on it. torch's
full state dict of FSDP1 ends the process by a segmentation fault where the shards are on a CPU (torch 2.13); here the
flat parameters are gathered by one collective each, and cut where ``fsdp1_flat`` says that the parameters are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from prepkit.findings.text import count, some
from prepkit.objects import fsdp1_flat, names
from prepkit.objects.bare_tree import bare_tree
from prepkit.objects.fsdp1_flat import FlatShard
from prepkit.objects.unwrap import unwrap
from prepkit.ranks.world import ranks_of, world
from prepkit.saving.failures import failed, on_every_rank
from prepkit.saving.state import is_deepspeed

SINGLE = "model.safetensors"
CONFIG = "config.json"


def export(folder: str, model: Module, *, masters: bool = True) -> None:
    """Write the whole model as safetensors, tied parameters once. Collective; rank 0 holds all of it in host memory.

    A model of transformers writes its config and index beside it (``save_pretrained``), as ``from_pretrained`` expects;
    trained parameters are the master weights, where an engine keeps some and ``masters`` says so. Of a peft model the
    adapters alone are written. Raises ``CheckpointFailed`` on every rank where it cannot be written, and where it
    does not hold something that was trained.
    """
    by_unit = is_deepspeed(model) or bool(fsdp1_flat.units(model))
    tensors = _gathered(model, masters) if by_unit else _adapters(model) or _whole(model)

    def act() -> None:
        if world().is_first:
            write(Path(folder), unwrap(model), tensors)

    on_every_rank(act, "export.not-written", folder)


def whole(model: Module) -> dict[str, Tensor]:
    """Gather every parameter and persistent buffer under its canonical name, the adapters' base as well.

    Where the engine shards it is collective, and gives copies in host memory on rank 0 and nothing on the others;
    elsewhere it is the model's own tensors, on every rank.
    """
    if is_deepspeed(model) or fsdp1_flat.units(model):
        return gathered(model)
    if any(isinstance(param, DTensor) for param in model.parameters()):
        return dict(_whole(model))
    own: dict[str, Any] = get_model_state_dict(model)
    return own


def _gathered(model: Module, masters: bool) -> Mapping[str, Tensor]:
    """Unit by unit; torch's own way for FSDP1 ends the process on a CPU (2.13)."""
    whole = gathered(model, masters=masters)
    wanted = adapters(model, whole) if whole else None
    return whole if wanted is None else {name: whole[name] for name in whole if name in wanted}


def _whole(model: Module) -> Mapping[str, Tensor]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: dict[str, Any] = get_model_state_dict(model, options=options)
    return whole


def _adapters(model: Module) -> Mapping[str, Tensor] | None:
    """Tensors that peft writes of a model with adapters, whole and on the host; None for any other model."""
    if not hasattr(unwrap(model), "peft_config"):
        return None
    state: dict[str, Any] = get_model_state_dict(model)
    wanted = adapters(model, state) or ()
    return {name: _host(state[name]) for name in state if name in wanted}


def _host(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def gathered(model: Module, *, masters: bool = True) -> dict[str, Tensor]:
    """Gather the whole tensors in host memory by canonical name, on rank 0; the others get nothing. Collective.

    Trained parameters are the master weights, where an engine keeps some, unless ``masters`` is False. A tied one is
    there under its first name, buffers are those of rank 0.
    """
    keeps = world().is_first
    tensors: dict[str, Tensor] = {}
    for name, tensor in _parameters(model, masters):
        if keeps:
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    for name, buffer in _buffers(model):
        if keeps:
            tensors[name] = buffer.detach().to("cpu", copy=True).contiguous()
    return tensors


def _parameters(model: Module, masters: bool) -> Iterator[tuple[str, Tensor]]:
    """In the order of the units; the same on every rank, as each takes a collective."""
    if is_deepspeed(model):
        if any(hasattr(param, "ds_autotp_universal_checkpoint_meta") for param in model.parameters()):
            raise failed("export.split-layers", "model", "DeepSpeed has split its layers over the ranks")
        for name, param in names.named_parameters(model).items():
            yield name, _of_deepspeed(param, masters)
        return
    shards = fsdp1_flat.flat_shards(model)
    for name, param in names.named_parameters(model).items():
        if name not in shards and not any(param is shard.flat for shard in shards.values()):
            yield name, param
    units = fsdp1_flat.units(model)
    for path, group in groupby(shards.items(), key=lambda item: item[1].unit):
        places = list(group)
        row = _flat(units[path], places[0][1])
        for name, shard in places:
            yield name, row.as_strided(shard.shape, shard.stride, shard.start)


def _flat(unit: Any, shard: FlatShard) -> Tensor:
    """The whole flat parameter of a unit, in the dtype of the master weights. Collective over the unit's shards."""
    local = shard.flat.detach()
    if not shard.cut:
        return local
    device = unit.compute_device
    part = local.to(device)
    ranks = ranks_of(unit.process_group)
    row = torch.empty(shard.shard * ranks.size, dtype=part.dtype, device=device)
    ranks.parts(part, into=list(row.chunk(ranks.size)))
    return row


def _buffers(model: Module) -> Iterator[tuple[str, Tensor]]:
    for site in names.sites(model):
        for name, buffer in site.module._buffers.items() if site.first else ():
            if buffer is not None and name not in site.module._non_persistent_buffers_set:
                yield f"{site.path}.{name}" if site.path else name, buffer


def _of_deepspeed(tensor: Tensor, masters: bool = True) -> Tensor:
    """The whole tensor on every rank: the master weights where DeepSpeed keeps some, if ``masters``."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    kept = (hasattr(tensor, "_z3_optimizer") and tensor.requires_grad) or hasattr(tensor, "_hp_mapping")
    if masters and kept:
        master: Tensor | None = safe_get_full_fp32_param(tensor)
        if master is not None:
            return master
    if isinstance(tensor, Parameter) and hasattr(tensor, "ds_id"):
        with GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


def adapters(model: Module, whole: Mapping[str, Any]) -> frozenset[str] | None:
    """Names in ``whole`` that peft asks for, and those of what is trained; None for a model without adapters.

    ``whole`` maps every name of the state dict to anything. Asks peft with tensors without data, on any rank alone.
    """
    if not isinstance(given := getattr(names.unwrap_root(model)[-1], "peft_config", None), Mapping):
        return None
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(1, device="meta") for name in whole}
    chosen: set[int] = set()
    with bare_tree(model) as root:
        for adapter in given:
            asked = get_peft_model_state_dict(root, stand_ins, adapter_name=adapter, save_embedding_layers=False)
            chosen |= {id(tensor) for tensor in asked.values()}
        ends = _embeddings(root)
        trained = {name for name, param in root.named_parameters() if param.requires_grad}
    return frozenset(
        name for name, stand_in in stand_ins.items() if id(stand_in) in chosen or name in trained or name.endswith(ends)
    )


def _embeddings(root: Any) -> tuple[str, ...]:
    """Names of the parameters of both embeddings, which peft writes along where the vocabulary has grown."""
    held = (getattr(root, f"get_{end}_embeddings")() for end in ("input", "output") if hasattr(root, "get_base_model"))
    ids = {id(param) for module in held if isinstance(module, Module) for param in module.parameters()}
    return tuple(name for name, param in root.named_parameters(remove_duplicate=False) if id(param) in ids)


def write(folder: Path, model: Module, whole: Mapping[str, Tensor]) -> None:
    """Write tied parameters once, then read the headers of the files. Raises ``CheckpointFailed``.

    ``model`` is the user's module. Its own ``save_pretrained`` writes, where it has one, with the names of its author.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = {path: _stamp(path) for path in folder.rglob("*.safetensors")}
    with bare_tree(model) as root:
        once = _once(root, whole)
        trained = {
            name: once[name].shape for name, param in root.named_parameters() if param.requires_grad and name in once
        }
        if (writes := getattr(root, "save_pretrained", None)) is not None:
            writes(str(folder), state_dict=dict(once))  # which transformers empties
            _say_dtype(folder / CONFIG, once)
        else:
            from safetensors.torch import save_file

            save_file(once, str(folder / SINGLE), metadata={"format": "pt"})
    files = [path for path in folder.rglob("*.safetensors") if before.get(path) != _stamp(path)]
    _hold(folder, files, once, trained)


def _say_dtype(config: Path, written: Mapping[str, Tensor]) -> None:
    """Set the dtype in the config to that of most of the weights, in which ``from_pretrained`` loads them.

    transformers asks the model, which DeepSpeed has cast; what is written are the master weights.
    """
    sizes: Counter[torch.dtype] = Counter()
    for tensor in written.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    said = json.loads(config.read_text()) if config.is_file() and sizes else {}
    key = next((key for key in ("dtype", "torch_dtype") if isinstance(said.get(key), str)), None)
    most = str(sizes.most_common(1)[0][0]).removeprefix("torch.") if sizes else ""
    if key is not None and said[key] != most:
        config.write_text(json.dumps({**said, key: most}, indent=2, sort_keys=True) + "\n")


def _once(root: Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor under the first of its names."""
    first: dict[int, str] = {}
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    known = {name: id(tensor) for name, tensor in tensors}
    for name in whole:
        first.setdefault(known.get(name, id(name)), name)
    return {name: tensor.contiguous() for name, tensor in whole.items() if name in set(first.values())}


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _hold(folder: Path, files: list[Path], once: Mapping[str, Any], trained: Mapping[str, torch.Size]) -> None:
    """Look for what is trained in the files: by name, also without the adapter's; where all are renamed, by size."""
    there = {name: shape for path in files for name, shape in _tensors(path)}
    lost = [name for name in trained if not any(form in there for form in _forms(name))]
    enough = sum(map(prod, there.values())) >= sum(map(prod, trained.values()))
    if once and (not there or (lost and not enough)):
        held = count(len(there), "tensor")
        what = f", and not {some(lost)}" if lost else ""
        told = f"it holds {held} of {count(len(once), 'tensor')} that were to be written{what}"
        raise failed("export.incomplete", folder, told)


def _tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            yield name, tuple(file.get_slice(name).get_shape())


def _forms(name: str) -> Iterator[str]:
    """The name, and as peft writes it: without one segment, or two, such as ``modules_to_save.default``."""
    parts = name.split(".")
    yield name
    for at in range(len(parts)):
        yield ".".join(parts[:at] + parts[at + 1 :])
        yield ".".join(parts[:at] + parts[at + 2 :])
