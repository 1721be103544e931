"""Objects after ``deepspeed.initialize``, and their rehearsal. DeepSpeed is imported when called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from prepkit.objects.names import known_bases
from prepkit.objects.state import LiveModel
from prepkit.ranks.world import world
from prepkit.steps import InitializeDeepSpeed, Setting

HELD = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Where DeepSpeed's optimizers keep the model's own parameters: ZeRO 1 and 2; bfloat16 at stage 1; ZeRO 3."""

Compared = tuple[str, object, object]
"""What was looked at, what was planned, and what was found."""


def keeps_masters(optimizer: Any) -> bool:
    """True if it is DeepSpeed's, with master weights and an optimizer inside, and not one of torch that steps alone."""
    inside = getattr(optimizer, "optimizer", None)
    return not isinstance(optimizer, torch.optim.Optimizer) and isinstance(inside, torch.optim.Optimizer)


def zero_stage(model: Any) -> int | None:
    """The stage of ZeRO of an engine; None: it is none of DeepSpeed's."""
    return int(model.zero_optimization_stage()) if "DeepSpeedEngine" in known_bases(type(model)) else None


def initialised(step: InitializeDeepSpeed, live: LiveModel) -> Iterator[Compared]:
    """Compares the engine's own numbers, and the parameters that its optimizer steps, with the step."""
    engine: Any = live.target.model
    planned = "MSAMPDeepSpeedEngine" if step.library == "msamp" else "DeepSpeedEngine"
    found = type(engine).__name__
    yield "wrapped", planned, found
    if found != planned:
        return
    said = {".".join(one.path): json.loads(one.value) for one in step.settings}
    yield "ZeRO stage", step.stage, int(engine.zero_optimization_stage())
    numbers = {
        "train_batch_size": engine.train_batch_size,
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": engine.gradient_accumulation_steps,
        "gradient_clipping": engine.gradient_clipping,
        "bf16.enabled": engine.bfloat16_enabled,
    }
    for name, read in numbers.items():
        if name in said:
            yield name, said[name], read()
    if step.optimizer != "none":
        trained = {name for name, param in live.params.items() if param.requires_grad}
        held = {id(param) for param in stepped(live.target.optimizer)}
        missed = sorted(name for name in trained if id(live.params[name]) not in held)
        yield "trainable parameters that the optimizer does not step", [], missed


def stepped(optimizer: Any) -> list[Tensor]:
    """The model's parameters behind an optimizer of DeepSpeed's; those of a plain one are in its groups."""
    groups = next((getattr(optimizer, name) for name in HELD if hasattr(optimizer, name)), None)
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    return [param for group in groups for param in group]


def rehearsable_settings(step: InitializeDeepSpeed) -> tuple[InitializeDeepSpeed, str]:
    """The step as a rehearsal runs it: on the CPU, and with buckets that fit a laptop."""
    why = "zeros on the CPU stand in for the parameters, small buckets for large ones, and any optimizer will do"
    return evolve(step, device="cpu", settings=rehearsable(step.settings)), why


def rehearsable(settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """The settings with small buckets, under which any optimizer will do."""
    other = {("zero_optimization", "reduce_bucket_size"): "100000", ("zero_allow_untested_optimizer",): "true"}
    kept = tuple(one for one in settings if one.path not in other)
    return (*kept, *(Setting(path=path, value=value) for path, value in other.items()))


SHARED_MEMORY = "deepspeed_shm_comm"
"""DeepSpeed's name of its collectives over shared memory (``op_builder/cpu/comm.py``)."""


@contextmanager
def without_shared_memory() -> Iterator[None]:
    """Inside, DeepSpeed meets the process group without its own collectives for CPUs (``comm/torch.py``).

    They serve inference alone, take minutes to compile, and wait in shared memory for the other ranks without a limit.
    The group's own collectives do the same (``inference_all_reduce``).
    """
    from deepspeed import ops

    before = ops.__compatible_ops__.get(SHARED_MEMORY)
    ops.__compatible_ops__[SHARED_MEMORY] = False
    try:
        yield
    finally:
        if before is None:
            del ops.__compatible_ops__[SHARED_MEMORY]
        else:
            ops.__compatible_ops__[SHARED_MEMORY] = before


def give_back_linear() -> None:
    """Puts torch's ``linear`` back, for which ZeRO-3 has put one of its own that saves no gathered weight.

    It would stay for all models of the process, and compute wrong gradients where a block keeps outputs of operators.
    """
    if replaced_linear():
        torch.nn.functional.linear = torch._C._nn.linear


def replaced_linear() -> bool:
    """True if ZeRO-3's stands there."""
    return getattr(torch.nn.functional.linear, "__module__", None) == "deepspeed.runtime.zero.linear"


def forget_groups() -> None:
    """Makes DeepSpeed forget process groups that have ended; those of a default group that runs are kept.

    It keeps what it has seen in globals, and would go on with them under the next default group
    (``deepspeed.utils.groups._release_process_group_references`` clears them only where DeepSpeed ended the groups).
    """
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    running = dist.group.WORLD if world().running else None
    made_under = getattr(groups.mpu, "world", running)  # of DataRanks, below
    alive = dist.distributed_c10d._world.pg_map
    if running is not None and made_under is running and all(group in alive for group in _seen(groups)):
        return
    comm.cdb = None
    for name, value in vars(groups).items():
        if name.startswith("_") and name.isupper():
            if isinstance(value, dict):
                value.clear()
            elif "GROUP" in name:
                setattr(groups, name, None)
    groups.mesh_device = groups.mpu = None


@frozen(eq=False, repr=False)
class DataRanks:
    """Tells DeepSpeed how many ranks see different data. By itself it counts all of them, also those of one model."""

    count: int
    world: Any
    """The default process group that it speaks of."""

    def get_data_parallel_world_size(self) -> int:
        """Return what ``DeepSpeedConfig`` multiplies the batch with."""
        return self.count


def _seen(groups: Any) -> list[Any]:
    """The process groups in DeepSpeed's globals."""
    held = [value for name, value in vars(groups).items() if name.startswith("_") and name.isupper()]
    flat = [inner for value in held for inner in (value.values() if isinstance(value, dict) else (value,))]
    return [value for value in flat if isinstance(value, dist.ProcessGroup)]
