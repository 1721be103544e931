"""The face of accelerate over ``build_plan``, ``apply`` and the loop: a script for accelerate after one changed import.

``from prepkit.compat.accelerate import Accelerator``, and what else scripts take from accelerate. What is not offered
raises ``NotOffered``, with what to type. Values and helpers that prepare nothing, such as ``DistributedType``, are
accelerate's own (``theirs``).
"""

from typing import Any

from prepkit.compat.accelerate import theirs
from prepkit.compat.accelerate.accelerator import Accelerator
from prepkit.compat.accelerate.loaders import prepare_data_loader, skip_first_batches
from prepkit.compat.accelerate.loop import GradientState
from prepkit.compat.accelerate.not_offered import OTHERWISE, NotOffered
from prepkit.compat.accelerate.operations import (
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    synchronize_rng_states,
)
from prepkit.compat.accelerate.state import AcceleratorState, PartialState
from prepkit.findings import PlanRejected

__all__ = [
    "OTHERWISE",
    "Accelerator",
    "AcceleratorState",
    "DistributedOperationException",
    "GradientState",
    "NotOffered",
    "PartialState",
    "PlanRejected",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "prepare_data_loader",
    "reduce",
    "skip_first_batches",
    "synchronize_rng_states",
]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return theirs.name(name)
