"""What is raised for a part of another library's face that is not offered."""

from __future__ import annotations

PAGE = "docs/from-accelerate.md"
"""The page that has accelerate's calls beside prepkit's."""

OTHERWISE = {
    "no_sync": "a window's gradients are averaged once anyway; write `with accelerator.accumulate(model):`",
    "trigger_sync_in_backward": "each forward has its backward; write `with accelerator.accumulate(model):`",
    "join_uneven_inputs": "every rank has as many batches",
    "autocast": "the prepared model computes in its precision by itself; write torch.autocast for anything else",
    "profile": "write torch.profiler.profile",
    "log": "call your tracker on the main process",
    "init_trackers": "make your tracker on the main process",
    "get_tracker": "keep your tracker in a variable",
    "trackers": "keep your trackers in a variable",
    "register_for_checkpointing": "save your objects beside the checkpoint",
    "register_save_state_pre_hook": "call your function before save_state",
    "register_load_state_pre_hook": "call your function before load_state",
    "skip_first_batches": "load_state puts the loaders back; or write loader.load_state_dict(state)",
    "get_state_dict": "save_model writes the whole model as safetensors",
    "pad_across_processes": "gather_for_metrics takes tensors of any first dimension",
    "split_between_processes": "slice by accelerator.process_index",
    "state": "write accelerator.num_processes, accelerator.device and the like",
    "gradient_state": "write accelerator.sync_gradients",
    "set_trigger": "write torch.distributed.all_reduce of a flag",
    "check_trigger": "write torch.distributed.all_reduce of a flag",
}
"""Members that scripts use, and what to write in their place."""


class NotOffered(RuntimeError):
    """Something that the script asks of accelerate, and that this face does not do; the text says what to type."""

    def __init__(self, name: str, otherwise: str) -> None:
        super().__init__(f"prepkit.compat.accelerate does not offer {name}: {otherwise}. See {PAGE}")
