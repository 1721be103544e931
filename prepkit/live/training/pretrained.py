"""The files of a whole model, as ``from_pretrained`` reads them: written, and read again before anybody relies on them.

Of a peft model they are the adapters alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from prepkit.findings.text import count, some
from prepkit.live.model import names
from prepkit.live.model.bare_tree import bare_tree

SINGLE = "model.safetensors"
CONFIG = "config.json"


class ExportFailed(RuntimeError):
    """What was written does not hold what was trained."""


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


def write(folder: Path, model: Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Writes tied parameters once, then reads the headers of what is there. Raises ``ExportFailed``.

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


def _say_dtype(config: Path, written: Mapping[str, torch.Tensor]) -> None:
    """The config says in which dtype most of the weights lie, which ``from_pretrained`` loads them in.

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


def _once(root: Module, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
    """What is trained is in the files: by name, also without the adapter's; or, where all are renamed, by size."""
    there = {name: shape for path in files for name, shape in _tensors(path)}
    lost = [name for name in trained if not any(form in there for form in _forms(name))]
    enough = sum(map(prod, there.values())) >= sum(map(prod, trained.values()))
    if once and (not there or (lost and not enough)):
        held = count(len(there), "tensor")
        what = f", and not {some(lost)}" if lost else ""
        raise ExportFailed(
            f"{folder} holds {held} of {count(len(once), 'tensor')} that were to be written{what}; keep the run: "
            "ready.save has everything, and what it wrote can be resumed and exported"
        )


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
