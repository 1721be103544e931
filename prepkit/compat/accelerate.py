"""The ``Accelerator`` of accelerate over ``build_plan``, ``apply`` and the loop: one changed import.

``from prepkit.compat.accelerate import Accelerator``. What is not offered raises ``NotOffered``, with what to type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from prepkit.api import apply, build_plan
from prepkit.compat.accelerate_arguments import config_of
from prepkit.compat.accelerate_loop import Loop, SteppedOptimizer, SteppedScheduler
from prepkit.compat.accelerate_objects import only, place_of
from prepkit.compat.accelerate_ranks import gathered, reduced, start_group
from prepkit.compat.not_offered import OTHERWISE, NotOffered
from prepkit.config import ClipNorm, ClipValue, Config, ShardLoaders
from prepkit.findings import PlanRejected
from prepkit.live.observe.env import observe_env
from prepkit.live.ranks import end_groups, launcher
from prepkit.live.training.prepared import Prepared
from prepkit.plan import Plan

__all__ = ["OTHERWISE", "Accelerator", "NotOffered", "PlanRejected"]


class Accelerator:
    """The arguments that scripts give; ``config`` stands in the place of the launcher's variables, and says the rest.

    Raises ``PlanRejected`` for variables that contradict each other, ``NotOffered`` for arguments without a place.
    """

    def __init__(
        self,
        *,
        config: Config | None = None,
        device_placement: bool = True,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        kwargs_handlers: Any = None,
        step_scheduler_with_optimizer: bool = True,
        **others: Any,
    ) -> None:
        for name in (name for name, value in others.items() if value is not None):
            raise NotOffered(f"Accelerator({name}=...)", "give Accelerator(config=pk.Config(...))")
        if not step_scheduler_with_optimizer:
            raise NotOffered("step_scheduler_with_optimizer=False", "leave the scheduler out of prepare, and step it")
        self.config = config_of(
            {
                "config": config,
                "device_placement": device_placement,
                "mixed_precision": mixed_precision,
                "gradient_accumulation_steps": gradient_accumulation_steps,
                "cpu": cpu,
                "dataloader_config": dataloader_config,
                "gradient_accumulation_plugin": gradient_accumulation_plugin,
                "kwargs_handlers": kwargs_handlers,
            }
        )
        self._loop: Loop | None = None
        self._started = False
        self._ended: list[Any] = []  # groups, which a thread of gloo may still use

    def __getattr__(self, name: str) -> Any:
        if name in OTHERWISE:
            raise NotOffered(f"accelerator.{name}", OTHERWISE[name])
        raise AttributeError(str(NotOffered(f"accelerator.{name}", "use prepkit's own calls")))

    # --- the plan ---

    @property
    def plan(self) -> Plan:
        """What ``prepare`` has done, with the reasons."""
        return self.ready.plan

    @property
    def ready(self) -> Prepared:
        """What ``apply`` has returned."""
        return self._running.ready

    @property
    def _running(self) -> Loop:
        if self._loop is None:
            raise NotOffered("this before prepare", "call accelerator.prepare(model, ...) first")
        return self._loop

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """The objects, prepared, in the order in which they are given; all of them in one call.

        Raises ``PlanRejected`` with every finding before anything is touched.
        """
        if device_placement is not None:
            raise NotOffered("prepare(device_placement=...)", "give Accelerator(device_placement=...)")
        if self._loop is not None:
            raise NotOffered("a second prepare", "give all objects to one call; another model has its Accelerator")
        places = [place_of(given) for given in objects]
        model, optimizer, scheduler = (only(objects, places, kind) for kind in ("model", "optimizer", "scheduler"))
        loaders = [given for given, place in zip(objects, places, strict=True) if place == "loader"]
        if model is None:
            raise NotOffered("prepare without a model", "give model, optimizer, scheduler and loaders to one call")
        ready = apply(build_plan(self.config, model, optimizer=optimizer, scheduler=scheduler, loaders=loaders))
        loop = self._loop = Loop(ready, ready.plan.owners.clip)
        split = isinstance(self.config.loaders, ShardLoaders) and self.config.loaders.split_batches
        prepared = iter(ready.loaders)
        made: dict[str, Callable[[], Any]] = {
            "model": lambda: ready.model,
            "optimizer": lambda: SteppedOptimizer(loop),
            "scheduler": lambda: SteppedScheduler(loop, 1 if split else self.num_processes),
            "loader": prepared.__next__,
        }
        outcome = tuple(made[place]() for place in places)
        return outcome[0] if len(outcome) == 1 else outcome

    # --- the loop ---

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """One micro-batch."""
        del models
        return self._running.accumulate()

    def backward(self, loss: torch.Tensor) -> None:
        """``ready.backward``."""
        self._running.backward(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Lets the step of this window clip, all that is trained; returns the norm of the last step, None at first."""
        self._running.clip(parameters, ClipNorm(float(max_norm), float(norm_type)))
        return self.ready.grad_norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Lets the step of this window clip, all that is trained."""
        self._running.clip(parameters, ClipValue(float(clip_value)))

    @property
    def sync_gradients(self) -> bool:
        """Whether the present micro-batch ends its window."""
        return self._loop is None or self._loop.boundary

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """``ready.skipped``."""
        return self.ready.skipped

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a window."""
        return self.config.accumulation or 1

    # --- processes ---

    @property
    def num_processes(self) -> int:
        """Processes in all."""
        return launcher.from_launcher(launcher.WORLD_SIZE, 1) or 1

    @property
    def process_index(self) -> int:
        """Rank among all."""
        return launcher.from_launcher(launcher.RANK, 0) or 0

    @property
    def local_process_index(self) -> int:
        """Rank on its machine."""
        return launcher.from_launcher(launcher.LOCAL_RANK, 0) or 0

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    @property
    def device(self) -> torch.device:
        """Where batches and the model are."""
        kind = self.config.device or observe_env().device
        return torch.device(kind) if kind in ("cpu", "mps") else torch.device(kind, self.local_process_index)

    def wait_for_everyone(self) -> None:
        """A barrier; starts the process group where ``prepare`` has not yet."""
        if self.num_processes == 1:
            return
        if not dist.is_initialized():
            start_group(self.device, self.config.timeout_s)
            self._started = True
        dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process goes through the block before the others."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201  # which is what it is for

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, called on the main process alone."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return called

    # --- all ranks ---

    def gather(self, value: Any) -> Any:
        """Tensors of equal shape of all ranks, one after the other in their first dimension."""
        return tree_map(gathered, value)

    def gather_for_metrics(self, value: Any) -> Any:
        """``ready.gather_for_metrics``: each sample once."""
        return self.ready.gather_for_metrics(value)

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors, summed or averaged over the ranks."""
        return tree_map(lambda inner: reduced(inner, reduction, scale), value)

    # --- files ---

    def save_state(self, output_dir: str) -> str:
        """``ready.save``: all that another run needs to go on. Collective."""
        self.ready.save(str(output_dir))
        return str(output_dir)

    def load_state(self, input_dir: str) -> None:
        """``ready.resume``. Collective."""
        self.ready.resume(str(input_dir))

    def save_model(self, model: Any, save_directory: str) -> None:
        """``ready.export``: the whole model as safetensors. Collective."""
        del model
        self.ready.export(str(save_directory))

    def save(self, obj: Any, f: Any) -> None:
        """``torch.save`` on the main process."""
        if self.is_main_process:
            torch.save(obj, f)

    def unwrap_model(self, model: Any, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """``ready.unwrap``."""
        if model is not self.ready.model:
            return model
        return self.ready.unwrap(keep_autocast=keep_fp32_wrapper, keep_compiled=keep_torch_compile)

    def end_training(self) -> None:
        """``ready.close``; ends a process group that ``wait_for_everyone`` has started."""
        if self._loop is not None:
            self.ready.close()
        if self._started and dist.is_initialized():
            dist.barrier()
            self._ended += end_groups.end()
        self._started = False

    def free_memory(self, *objects: Any) -> Any:
        """``ready.close``, for another ``prepare``."""
        self.end_training()
        self._loop = None
        return [None for _ in objects]
