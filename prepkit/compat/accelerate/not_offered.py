"""What is raised for a part of another library's face that is not offered."""

from __future__ import annotations

from typing import Any

PAGE = "docs/from-accelerate.md"
"""The page that has accelerate's calls beside prepkit's."""

OTHERWISE = {
    "profile": "write torch.profiler.profile",
    "log": "call your tracker on the main process",
    "init_trackers": "make your tracker on the main process",
    "get_tracker": "keep your tracker in a variable",
    "trackers": "keep your trackers in a variable",
    "unscale_gradients": "the step unscales before it clips; write accelerator.clip_grad_norm_(...)",
    "prepare_model": "write accelerator.prepare(model, optimizer, scheduler, loader)",
    "prepare_optimizer": "write accelerator.prepare(model, optimizer, scheduler, loader)",
    "prepare_scheduler": "write accelerator.prepare(model, optimizer, scheduler, loader)",
    "prepare_data_loader": "write accelerator.prepare(loader)",
}
"""Members that scripts use, and what to write in their place."""


class NotOffered(RuntimeError):
    """Something that the script asks of accelerate, and that this face does not do; the text says what to type."""

    def __init__(self, name: str, otherwise: str) -> None:
        super().__init__(f"prepkit.compat.accelerate does not offer {name}: {otherwise}. See {PAGE}")


def no_options(call: str, options: dict[str, Any]) -> None:
    """Raises ``NotOffered`` for the first of the options that ``call`` was given beside its own."""
    for name in options:
        raise NotOffered(f"{call}({name}=...)", f"call accelerator.ready, or leave {name} out")
