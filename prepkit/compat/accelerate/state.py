"""Who this process is among all, and what it was asked for: accelerate's ``PartialState`` and ``AcceleratorState``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist

from prepkit.compat.accelerate import group, theirs
from prepkit.compat.accelerate.arguments import launched_config
from prepkit.config import BF16, FP16, FSDP1, FSDP2, XLA, Config, DeepSpeed
from prepkit.observe.env import observe_env
from prepkit.ranks import launcher
from prepkit.ranks.together import main_process_first
from prepkit.ranks.world import world

_ENGINES: tuple[tuple[type, str], ...] = (
    (FSDP1, "FSDP"),
    (FSDP2, "FSDP"),
    (DeepSpeed, "DEEPSPEED"),
    (XLA, "XLA"),
)
"""Engines to the values of accelerate's ``DistributedType``; the others are named after their device."""
_PRECISIONS = {NoneType: "no", BF16: "bf16", FP16: "fp16"}


class State:
    """One for each ``Accelerator``; nothing is shared between them but the process group and the launcher's words."""

    def __init__(self, cpu: bool = False, *, config: Config | None = None) -> None:
        if config is None:
            config = launched_config()
        kind = "cpu" if cpu else config.device or observe_env().device
        self.config = config
        self.num_processes = launcher.from_launcher(launcher.WORLD_SIZE, 1) or 1
        self.process_index = launcher.from_launcher(launcher.RANK, 0) or 0
        self.local_process_index = launcher.from_launcher(launcher.LOCAL_RANK, 0) or 0
        self.device = torch.device(kind) if kind in ("cpu", "mps") else torch.device(kind, self.local_process_index)
        by_device = {"cuda": "MULTI_GPU"}.get(kind, f"MULTI_{kind.upper()}") if self.num_processes > 1 else "NO"
        word = next((word for one, word in _ENGINES if isinstance(config.engine, one)), by_device)
        self.distributed_type = theirs.kind_of(word)
        self.debug = False  # without effect: the ranks compare the shapes of what they send in any case
        if self.device.type in group.BACKENDS:
            group.join(self.device, config.timeout_s)  # as accelerate does: a script may talk before it prepares
        theirs.tell(self)

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: DistributedType.{getattr(self.distributed_type, 'value', self.distributed_type)}"
            f"{backend}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n\n"
            f"Mixed precision type: {self.mixed_precision}\n"
        )

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Nothing: there is no state that accelerators share."""

    @property
    def initialized(self) -> bool:
        """Always."""
        return True

    @property
    def mixed_precision(self) -> str:
        """In accelerate's word."""
        return _PRECISIONS.get(type(self.config.precision), "fp8")

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with an accelerator, and no engine that shards."""
        word = str(getattr(self.distributed_type, "value", self.distributed_type))
        return word.startswith("MULTI_") and word != "MULTI_CPU"

    @property
    def deepspeed_plugin(self) -> None:
        """Nothing: what DeepSpeed is asked for stands in ``config``."""

    fsdp_plugin = deepspeed_plugin

    @property
    def backend(self) -> str | None:
        """Of the process group; None where there is none yet."""
        return dist.get_backend() if world().running else None

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    should_save_model = is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    # --- together ---

    def wait_for_everyone(self) -> None:
        """A barrier; starts the process group where ``prepare`` has not yet."""
        group.join(self.device, self.config.timeout_s)
        world().meet()

    def destroy_process_group(self) -> None:
        """Ends the process group, when all ranks are here."""
        group.leave()
        theirs.forget()

    def main_process_first(self) -> AbstractContextManager[None]:
        """The main process goes through the block before the others, which hear where it fails."""
        return main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Likewise on each machine."""
        return main_process_first(per_node=True)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """A rank's part of the inputs (``shares``)."""
        yield share(inputs, self.process_index, self.num_processes, padded=apply_padding)

    # --- on some ---

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201  # which is what it is for

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, called on the main process alone; None elsewhere."""
        return _called_if(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """On the first process of each machine."""
        return _called_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """On the last process."""
        return _called_if(self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Callable[..., Any]:
        """On the process of that rank; without a function a decorator."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _called_if(self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int = 0
    ) -> Callable[..., Any]:
        """On that process of each machine; without a function a decorator."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _called_if(self.local_process_index == local_process_index, function)


def _called_if(here: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here else None

    return called


PartialState = AcceleratorState = State


def share(inputs: Any, rank: int, ranks: int, *, padded: bool) -> Any:
    """A rank's part of a sequence, a tensor's first dimension, a data set with ``select``, or a dict of these.

    Parts are as equal as can be, the first ones longer by one item. Where ``padded`` all are as long as the first: the
    last item of the inputs is repeated. Raises ``ValueError`` for a dict whose values differ in length.
    """
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"split_between_processes was given values of different length: {lengths}")
        return {key: share(value, rank, ranks, padded=padded) for key, value in inputs.items()}
    each, longer = divmod(len(inputs), ranks)
    start = each * rank + min(rank, longer)
    chosen = list(range(start, start + each + (rank < longer)))
    if padded and len(inputs):
        chosen += [len(inputs) - 1] * (each + (longer > 0) - len(chosen))
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(chosen, dtype=torch.int64, device=inputs.device)]
    if hasattr(inputs, "select"):
        return inputs.select(chosen)
    items = [inputs[at] for at in chosen]
    return tuple(items) if isinstance(inputs, tuple) else items
