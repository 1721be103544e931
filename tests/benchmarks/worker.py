"""One measured run on one rank: prepares a 162M-parameter Llama by hand or with prepkit, then steps it.

Started by the tables in this folder, once per rank and per measurement, so that every run begins with clean memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import prepkit as pk
from tests.benchmarks.rivals import accelerator
from tests.support.deepspeed_cpu import lean

STEPS = 3
"""Steps of each way that are timed, after one that is not."""


def llama() -> Any:
    """A Llama with 162 million float32 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 32000}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def memory(field: str) -> float:
    """MiB of ``VmRSS`` (now) or ``VmHWM`` (peak since ``reset_peak``) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise LookupError(field)


def reset_peak() -> None:
    """Sets the peak back to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def layers() -> dict[str, ParallelStyle]:
    """A plan for the Llama, as torch's tutorial has it."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"model.layers.*.{name}": ColwiseParallel() for name in columns},
        **{f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")},
    }


ZERO = {"zero1": 1, "zero3": 3}
"""Engine of the tables to ZeRO stage."""


def zero_by_hand(stage: int, model: Any) -> tuple[Any, torch.optim.Optimizer]:
    """What prepkit plans for the stage, as a user writes it."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine, optimizer


def by_hand(engine: str, model: Any) -> tuple[Any, torch.optim.Optimizer]:
    """The calls that a careful user writes: shard or wrap, then make the optimizer."""
    if engine in ZERO:
        return zero_by_hand(ZERO[engine], model)
    if engine == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif engine == "fsdp1":
        kinds = {type(model.model.layers[0])}
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(kinds),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    elif engine == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), layers())
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def measure(engine: str, way: str) -> dict[str, float]:
    """Seconds and MiB above the start of preparing, the first in this process and once more, and of a step.

    The first pays for what it imports, as it does for a user who has a plan in hand. Of the second also per cent of
    apply that verify; of what prepkit prepared also the median seconds of a step by hand around the same objects.
    """
    model = llama()
    plan, helper = None, accelerator(ram_efficient=False) if way == "accelerate" else None
    if way == "prepkit":
        plan = planned(engine, model)
    init_device_mesh("cpu", (dist.get_world_size(),))  # what the first mesh of a process costs is nobody's
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # likewise the first optimizer, which imports much of torch
    if engine in ZERO:
        import deepspeed

        lean()
        deepspeed.init_distributed(dist_init_required=False)  # likewise
    gc.collect()
    dist.barrier()
    reset_peak()
    before, began, busy = memory("VmRSS"), time.perf_counter(), time.process_time()
    if plan is not None:
        ready = pk.apply(plan)
        seconds = time.perf_counter() - began
        del plan
        inner = _engine_step(ready.model) if engine in ZERO else _hand_step_inside(ready)
        steps = {"step": _prepared_step(ready), "step by hand": inner}
    elif helper is not None:
        model, optimizer = helper.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        seconds = time.perf_counter() - began
        steps = {"step": _hand_step(model, optimizer)}
    else:
        model, optimizer = by_hand(engine, model)
        seconds = time.perf_counter() - began
        steps = {"step": _engine_step(model) if engine in ZERO else _hand_step(model, optimizer)}
    busy = time.process_time() - busy
    figures = [(0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(figures, (seconds, memory("VmHWM") - before))
    return {
        "seconds": max(taken for taken, _ in figures),  # until no rank has to wait for another
        "busy": busy,
        "peak": figures[0][1],
        "other peak": figures[-1][1],
        **_in_turn(steps, alike=engine == "tensor"),
        **(_again(engine, way) if engine not in ZERO and helper is None else {}),
    }


def planned(engine: str, model: Any) -> pk.Plan:
    """The plan of an engine of the tables."""
    engines = {"ddp": pk.DDP(), "fsdp1": pk.FSDP1(), "fsdp2": pk.FSDP2(), "tensor": pk.TensorParallel()}
    zero = {name: pk.DeepSpeed(stage=stage, micro_batch=1) for name, stage in ZERO.items()}
    cfg = pk.Config(engine=(engines | zero)[engine])
    return pk.build_plan(cfg, model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def _again(engine: str, way: str) -> dict[str, float]:
    """Seconds of preparing a second model, and per cent of them that verify it."""
    model = llama()
    plan = planned(engine, model) if way == "prepkit" else None
    dist.barrier()
    began = time.perf_counter()
    if plan is None:
        by_hand(engine, model)
        return {"again": time.perf_counter() - began}
    with _timed_verification() as spent:
        pk.apply(plan)
        taken = time.perf_counter() - began
    return {"again": taken, "verified": 100 * sum(spent) / taken}


@contextmanager
def _timed_verification() -> Iterator[list[float]]:
    """What ``apply`` spends on verification meanwhile, in seconds, the waiting for other ranks included."""
    from prepkit.applying import apply

    spent: list[float] = []
    real = vars(apply)["verify"]

    def verify(*args: Any, **given: Any) -> Any:
        began = time.perf_counter()
        found = real(*args, **given)
        spent.append(time.perf_counter() - began)
        return found

    vars(apply)["verify"] = verify
    try:
        yield spent
    finally:
        vars(apply)["verify"] = real


def _batch(*, alike: bool) -> torch.Tensor:
    seed = 0 if alike else dist.get_rank()  # ranks that share a layer read the same
    return torch.randint(32000, (1, 64), generator=torch.Generator().manual_seed(seed))


def _prepared_step(ready: Any) -> Any:
    def step(tokens: torch.Tensor) -> None:
        ready.backward(ready.model(input_ids=tokens, labels=tokens).loss)
        ready.step()

    return step


def _engine_step(engine: Any) -> Any:
    def step(tokens: torch.Tensor) -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    return step


def _hand_step(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    def step(tokens: torch.Tensor) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _hand_step_inside(ready: Any) -> Any:
    """The step by hand on prepared objects, whose optimizer refuses to step outside ``ready.step``."""
    by_hand = _hand_step(ready.model, ready.optimizer)

    def step(tokens: torch.Tensor) -> None:
        with ready.loop.allowed():
            by_hand(tokens)

    return step


def _in_turn(steps: dict[str, Any], *, alike: bool) -> dict[str, float]:
    """Median seconds of each way to make a step. In turn, so that what else the machine does falls on all alike."""
    tokens = _batch(alike=alike)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(tokens)
    for _ in range(STEPS):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step(tokens)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("fsdp2", "ddp", "fsdp1", "tensor", *ZERO))
    parser.add_argument("way", choices=("hand", "prepkit", "accelerate"))
    parser.add_argument("out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    result = measure(args.engine, args.way)
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps(result))
    dist.destroy_process_group()
