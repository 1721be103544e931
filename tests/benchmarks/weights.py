"""From a checkpoint on disk to a sharded model in which every element was written once: time and memory of every rank.

One run on one rank is ``python -m tests.benchmarks.weights WAY FOLDER OUT`` under torchrun; ``loading`` is the table.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.benchmarks.rivals import accelerator, has_accelerate, transformers_native
from tests.support.launch import torchrun

ROUNDS = 5
WAYS = {
    "planned": "prepkit: every rank reads its own bytes",
    "sent": "prepkit: rank 0 loads all, then sends the parts",
    "everything": "by hand: every rank loads all, then shards",
    "broadcast": "torch: rank 0 loads all, then broadcasts",
    "transformers": "transformers: from_pretrained with a distributed config",
    "accelerate": "accelerate: rank 0 loads all, cpu_ram_efficient_loading",
}


def loading() -> Table:
    """Two processes, 162M float32 parameters in several files, warm page cache."""
    title = (
        f"checkpoint to shards, two processes, 162M-parameter Llama (649 MB), median of {ROUNDS} runs in turn (minimum)"
    )
    table = Table(title=title)
    for column in ("way", "s", "against by hand", "rank 0, MiB above its shard", "rank 1"):
        table.add_column(column, justify="left" if column == "way" else "right")
    ways = [way for way in WAYS if way != "accelerate" or has_accelerate()]
    runs: dict[str, list[dict[str, list[float]]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        _save(folder)
        for _ in range(ROUNDS):
            for way, results in runs.items():
                results.append(_launch(way, folder))
    times = {way: [max(run["seconds"]) for run in results] for way, results in runs.items()}
    for way, results in runs.items():
        ratio = statistics.median(a / b for a, b in zip(times[way], times["everything"], strict=True))
        above = (f"{statistics.median(run['above'][rank] for run in results):.0f}" for rank in (0, 1))
        table.add_row(WAYS[way], f"{statistics.median(times[way]):.2f} ({min(times[way]):.2f})", f"{ratio:.2f}", *above)
    return table


def _save(folder: str) -> None:
    from tests.benchmarks.worker import llama

    llama().save_pretrained(folder, max_shard_size="200MB")


def _launch(way: str, folder: str) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as results:
        script = ["-m", "tests.benchmarks.weights", way, folder, results]
        subprocess.run([*torchrun(2), *script], check=True, timeout=300)
        ranks = [json.loads((Path(results) / f"{rank}.json").read_text()) for rank in (0, 1)]
        return {key: [rank[key] for rank in ranks] for key in ranks[0]}


def measure(way: str, folder: str) -> dict[str, float]:
    """Seconds until every element of every shard has been written, and the peak above the start less the shard."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import prepkit as pk
    import prepkit.applying.apply  # paid once per process, like the imports of torch
    from tests.benchmarks.worker import memory, reset_peak

    importlib.import_module("transformers.distributed")  # likewise
    with torch.device("meta"):
        model: Any = _bare()
    source = pk.BroadcastWeights() if way == "sent" else pk.LoadWeights(folder)
    cfg = pk.Config(engine=pk.FSDP2(), weights=source, intent=pk.Intent.INFERENCE)
    plan = pk.build_plan(cfg, model)
    init_device_mesh("cpu", (dist.get_world_size(),))
    helper = accelerator(ram_efficient=True) if way == "accelerate" else None
    gc.collect()
    dist.barrier()
    reset_peak()
    before, began = memory("VmRSS"), time.perf_counter()
    if way == "planned":
        model = pk.apply(plan).model
    elif way == "sent":
        model = pk.apply(plan, model=_on_rank_0(folder)).model
    elif way == "transformers":
        model = transformers_native(folder, dist.get_world_size())
    elif helper is not None:
        whole = _on_rank_0(folder)
        model, _ = helper.prepare(whole, torch.optim.SGD(whole.parameters()))  # which it wants, and which holds nothing
    else:
        _by_hand(model, folder, way)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().mul_(1)
    seconds = time.perf_counter() - began
    shard = sum(param.to_local().numel() * param.element_size() for param in model.parameters()) / 2**20
    return {"seconds": seconds, "above": memory("VmHWM") - before - shard}


def _bare() -> Any:
    from tests.benchmarks.worker import llama

    return llama()


def _on_rank_0(folder: str) -> Any:
    """The whole model there, and parameters without data elsewhere; buffers everywhere."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    with _parameters_on_meta():
        model = _bare()
    if dist.get_rank() == 0:
        files = sorted(Path(folder).glob("*.safetensors"))
        model.load_state_dict({k: v for file in files for k, v in load_file(str(file)).items()}, assign=True)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    from torch.nn import Module, Parameter

    own = Module.register_parameter

    def register(self: Module, name: str, param: Parameter | None) -> None:
        own(self, name, param if param is None else Parameter(param.to("meta"), param.requires_grad))

    Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module.register_parameter = own  # type: ignore[method-assign]


def _by_hand(model: Any, folder: str, way: str) -> None:
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.to_empty(device="cpu")
    values: dict[str, Any] = {}
    if way == "everything" or dist.get_rank() == 0:
        for file in sorted(Path(folder).glob("*.safetensors")):
            values |= load_file(str(file))
    if way == "broadcast":
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        return
    for name, param in model.named_parameters():
        part = distribute_tensor(values[name], mesh, param.placements, src_data_rank=None)
        param.data.to_local().copy_(part.to_local())


if __name__ == "__main__":
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    chosen, where, out = sys.argv[1:]
    found = measure(chosen, where)
    (Path(out) / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
