"""What is raised for a part of another library's face that is not offered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prepkit.findings.text import near

PAGE = "docs/from-accelerate.md"
"""The page that has accelerate's calls beside prepkit's."""

OTHERWISE = {
    "profile": "write torch.profiler.profile",
    "log": "write accelerator.ready.log(values)",
    "init_trackers": "write accelerator.ready.log.to(pk.track.TensorBoard(folder)) after prepare",
    "get_tracker": "keep your tracker in a variable, and write accelerator.ready.log.to(lambda: tracker)",
    "trackers": "write accelerator.ready.log.to(...) behind prepare",
    "unscale_gradients": "the step unscales before it clips; write accelerator.clip_grad_norm_(...)",
    "prepare_model": "write accelerator.prepare(model, optimizer, scheduler, loader)",
    "prepare_optimizer": "write accelerator.prepare(model, optimizer, scheduler, loader)",
    "prepare_scheduler": "write accelerator.prepare(model, optimizer, scheduler, loader)",
    "prepare_data_loader": "write accelerator.prepare(loader)",
}
"""Members that scripts use, and what to write in their place."""


_AS_FIELDS = "give Accelerator(config=pk.Config(...)), which says it as a field"
ARGUMENTS = {
    "log_with": OTHERWISE["init_trackers"],
    "split_batches": "give Accelerator(config=pk.Config(loaders=pk.data.ShardLoaders(split_batches=True)))",
    "rng_types": "leave it out: every rank draws the order of the data alike",
    "megatron_lm_plugin": "leave it out: Megatron-LM has a loop of its own",
    **dict.fromkeys(
        (
            "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin", "dynamo_backend",
            "dynamo_plugin", "parallelism_config",
        ),
        _AS_FIELDS,
    ),
}  # fmt: skip
"""Arguments of accelerate's ``Accelerator`` that have no place here, and what to write."""


class NotOffered(RuntimeError):
    """Something that the script asks of accelerate, and that this face does not do; the text says what to type."""

    def __init__(self, name: str, otherwise: str) -> None:
        super().__init__(f"prepkit.compat.accelerate does not offer {name}: {otherwise}. See {PAGE}")


def no_options(call: str, options: dict[str, Any]) -> None:
    """Raises ``NotOffered`` for the first of the options that ``call`` was given beside its own."""
    for name in options:
        raise NotOffered(f"{call}({name}=...)", f"call accelerator.ready, or leave {name} out")


def refuse_arguments(given: Mapping[str, Any], taken: Sequence[str]) -> None:
    """For what ``Accelerator`` was given beside the arguments that are ``taken``, None apart.

    Raises ``NotOffered`` for one of accelerate's, and ``TypeError`` with near spellings for one that is nobody's.
    """
    for name in (name for name, value in given.items() if value is not None):
        if name in ARGUMENTS:
            raise NotOffered(f"Accelerator({name}=...)", ARGUMENTS[name])
        meant = " or ".join(near(name, (*taken, *ARGUMENTS)))
        raise TypeError(f"Accelerator knows no argument {name!r}{f'; did you mean {meant}?' if meant else ''}")
