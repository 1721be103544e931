"""What scripts take from accelerate itself: its own state, told the truth about this process, and names that act alone.

``accelerate.utils.gather`` and its like, ``accelerate.logging.get_logger`` and ``set_seed(device_specific=True)`` ask
the state that accelerate's own ``Accelerator`` sets up. Left alone it says that there is one process.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from prepkit.compat.accelerate.not_offered import NotOffered

NAMES = frozenset({
    "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin",
    "DistributedDataParallelKwargs", "DistributedType", "FullyShardedDataParallelPlugin", "GradScalerKwargs",
    "GradientAccumulationPlugin", "InitProcessGroupKwargs", "ProfileKwargs", "ProjectConfiguration",
    "cpu_offload", "cpu_offload_with_hook", "debug_launcher", "disk_offload", "dispatch_model",
    "find_executable_batch_size", "infer_auto_device_map", "init_empty_weights", "init_on_device", "is_rich_available",
    "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "notebook_launcher", "ParallelismConfig",
    "prepare_pippy",
})  # fmt: skip
"""Values to be read, launchers, and helpers for big models: none of them asks what ``Accelerator`` has prepared."""


def name(wanted: str) -> Any:
    """One of ``NAMES``, from accelerate. Raises ``AttributeError`` for others, and where it is not installed."""
    if wanted not in NAMES:
        raise AttributeError(str(NotOffered(wanted, "import it from accelerate where it prepares nothing")))
    if find_spec("accelerate") is None:
        raise AttributeError(
            str(NotOffered(f"{wanted} without accelerate", "type pip install accelerate", "accelerate.not-installed"))
        )
    module = import_module("accelerate")
    return getattr(module, wanted) if hasattr(module, wanted) else getattr(import_module("accelerate.utils"), wanted)


def kind_of(word: str) -> Any:
    """The member of accelerate's ``DistributedType``, which is a text too; the text alone where it is not installed."""
    return word if find_spec("accelerate") is None else import_module("accelerate.state").DistributedType(word)


def tell(state: Any) -> None:
    """Put who this process is, and what was asked for, into accelerate's own state, where it is installed."""
    if find_spec("accelerate") is None:
        return
    theirs = import_module("accelerate.state")
    told = {
        "_cpu": state.device.type == "cpu",
        "backend": state.backend,
        "debug": False,
        "device": state.device,
        "distributed_type": state.distributed_type,
        "fork_launched": False,
        "local_process_index": state.local_process_index,
        "num_processes": state.num_processes,
        "process_index": state.process_index,
    }
    whole = dict.fromkeys(("deepspeed_plugins", "torch_tp_plugin", "parallelism_config", "device_mesh"))
    for kind, values in (
        (theirs.PartialState, told),
        (theirs.AcceleratorState, told | whole | {"_mixed_precision": state.mixed_precision}),
    ):
        kind._shared_state.clear()  # in place: each instance shares it
        kind._shared_state.update(values)


def forget() -> None:
    """Let another ``Accelerator`` of accelerate's own ask for something else; loggers know this process still."""
    if find_spec("accelerate") is not None:
        import_module("accelerate.state").AcceleratorState._shared_state.clear()
