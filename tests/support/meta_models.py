"""Models without values, their training in one process, and what of it is compared: for the tests of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from safetensors.torch import save_file
from torch import nn

import prepkit as pk
from prepkit.objects.names import canonical
from tests.support.transformers_models import FAMILIES, MORE, build

EVERY = {**FAMILIES, **MORE}
EAGER = "aot_eager"
CASES: dict[str, pk.Config] = {
    "shards": pk.Config(),
    "checkpointed": pk.Config(checkpointing=pk.CheckpointBlocks()),
    "compiled whole": pk.Config(compile=pk.CompileModel(backend=EAGER)),
    "compiled blocks": pk.Config(compile=pk.CompileBlocks(backend=EAGER)),
    "checkpointed, compiled blocks": pk.Config(
        checkpointing=pk.CheckpointBlocks(), compile=pk.CompileBlocks(backend=EAGER)
    ),
    "replicas of shards": pk.Config(mesh=pk.Mesh(replicate=2, shard=2)),
    "replicas of compiled shards": pk.Config(
        mesh=pk.Mesh(replicate=2, shard=2), compile=pk.CompileBlocks(backend=EAGER)
    ),
    "parallelized layers": pk.Config(mesh=pk.Mesh(shard=2, tensor=2)),
    "checkpointed parallelized layers": pk.Config(mesh=pk.Mesh(shard=2, tensor=2), checkpointing=pk.CheckpointBlocks()),
}
ON_TWO, ON_FOUR = list(CASES)[:5], list(CASES)[5:]


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


def step_of(model: nn.Module, batch: Any) -> float:
    """Loss before, after one step of SGD."""
    loss = model(**batch).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return float(loss.detach())


def together(ready: pk.Prepared, batch: Any, rank: int, world: int, readers: int) -> float:
    """Mean loss over the ranks of one step, for which the batch is divided among so many readers."""
    share = {key: value.chunk(readers)[rank * readers // world] for key, value in batch.items()}
    loss = ready.model(**share).loss
    ready.backward(loss)
    ready.step()
    total = loss.detach()
    dist.all_reduce(total)
    return float(total) / world


def trained(rank: int, world: int, family: str, runs: list[tuple[str, str]]) -> dict[str, float]:
    """Of each path and case the largest differences from the full model: of loss, of all tensors after a step."""
    full, batch = build(family)
    loss = step_of(full, batch)
    expected = held(full)
    found = {}
    for path, case in runs:
        model, _ = on_meta(family)
        cfg = evolve(CASES[case], engine=pk.FSDP2(), weights=pk.LoadWeights(path), optimizer=pk.optim.SGD(lr=0.1))
        ready = pk.apply(pk.build_plan(cfg, model))
        mine = together(ready, batch, rank, world, readers=world // 2 if "parallelized" in case else world)
        there = held(ready.model)
        assert list(there) == list(expected)
        assert {name: t.dtype for name, t in there.items()} == {name: t.dtype for name, t in expected.items()}
        key = f"{Path(path).name}, {case}"
        found[f"{key}: loss"] = abs(mine - loss)
        found[f"{key}: step"] = max(float((there[name] - t).abs().max()) for name, t in expected.items())
        ready.close()
    return found


def close(found: list[dict[str, float]], runs: int, limit: float) -> None:
    for one in found:
        assert len(one) == 2 * runs
        assert all(value < limit for value in one.values()), one
