"""The ``Accelerator`` of accelerate over ``build_plan``, ``apply`` and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from attrs import define, evolve, field
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from prepkit.compat.accelerate import group, loaders, operations, theirs
from prepkit.compat.accelerate.arguments import config_of, loaders_of, says_loaders
from prepkit.compat.accelerate.loop import AcceleratedLoop, GradientState, averaged_in_backward
from prepkit.compat.accelerate.not_offered import OTHERWISE, NotOffered, no_options, refuse_arguments
from prepkit.compat.accelerate.preparation import Preparation
from prepkit.compat.accelerate.saved_state import SavedState, write_weights
from prepkit.compat.accelerate.state import State
from prepkit.config import ClipNorm, ClipValue, Config, ShardLoaders
from prepkit.objects.unwrap import unwrap
from prepkit.plan import Plan
from prepkit.training import export
from prepkit.training.prepared import Prepared

_ASKED: dict[str, Any] = {
    "device_placement": True,
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
}
_ASKED |= dict.fromkeys(("use_seedable_sampler", "non_blocking", "use_stateful_dataloader"), False)
_ASKED |= {"rng_types": ["generator"]}
"""What was asked of loaders, under the names that accelerate's ``Accelerator`` has for it; where it was not asked."""
_MADE = {"_models": "model", "_optimizers": "optimizer", "_schedulers": "scheduler", "_dataloaders": "loader"}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Accelerator:
    """The arguments that scripts give; ``config`` stands in the place of the launcher's variables, and says the rest.

    Members that are not here are those of ``state``: ranks, devices, printing, who runs what. Raises ``PlanRejected``
    for variables that contradict each other, ``NotOffered`` for arguments without a place.
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
        split_batches: bool = False,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: Any = None,
        **others: Any,
    ) -> None:
        refuse_arguments(others, tuple(signature(type(self)).parameters))
        self._arguments = {
            "config": config,
            "device_placement": device_placement,
            "mixed_precision": mixed_precision,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "cpu": cpu,
            "gradient_accumulation_plugin": gradient_accumulation_plugin,
            "kwargs_handlers": kwargs_handlers,
            "split_batches": split_batches,
            "step_scheduler_with_optimizer": step_scheduler_with_optimizer,
        }
        self.dataloader_config = dataloader_config
        """A ``DataLoaderConfiguration`` of accelerate's; read by every ``prepare``."""
        self._config = config_of(self._arguments)
        self.project_configuration = project_config
        if project_config is not None and project_dir is not None and project_config.project_dir is None:
            project_config.set_directories(str(project_dir))
        self.project_dir = project_dir if project_config is None else project_config.project_dir
        self.state = State(config=self.config)
        self.log_with = log_with
        self._tracked = Tracked.of(log_with, self.logging_dir)
        self._forget_prepared()

    def _forget_prepared(self) -> None:
        self._let_go: WeakSet[torch.nn.Module] = WeakSet()
        self._prepared = Preparation(self._ticks)
        self._saved = SavedState(self.state, self.project_configuration)
        self._trigger = False

    @property
    def _ticks(self) -> int | None:
        if not self._arguments["step_scheduler_with_optimizer"]:
            return None
        return 1 if getattr(self.config.loaders, "split_batches", False) else self.state.num_processes

    @property
    def config(self) -> Config:
        """What is asked of the next ``prepare``. Raises ``NotOffered`` for loaders without a place."""
        if self.dataloader_config is None and says_loaders(self._arguments):
            return self._config
        return evolve(self._config, loaders=loaders_of(self.dataloader_config, self._arguments))

    def __getstate__(self) -> dict[str, Any]:
        """Return what the script has asked for; nothing that is prepared goes to another process."""
        asked = ("_arguments", "dataloader_config", "_config", "project_configuration", "state", "project_dir")
        return {name: vars(self)[name] for name in (*asked, "log_with")}

    def __setstate__(self, asked: dict[str, Any]) -> None:
        vars(self).update(asked)
        self._tracked = Tracked([], self.logging_dir)  # which are the other process's
        self._forget_prepared()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and "state" in vars(self) and hasattr(self.state, name):
            return getattr(self.state, name)
        if name in _ASKED and "dataloader_config" in vars(self):
            return getattr(self.dataloader_config, name, self._arguments.get(name, _ASKED[name]))
        if name in _MADE and "_prepared" in vars(self):
            return self._prepared.made[_MADE[name]]
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
        """What ``apply`` has returned for the model; for loaders as long as only these are prepared."""
        return self._prepared.ready

    @property
    def _loop(self) -> AcceleratedLoop:
        return self._prepared.loop

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """The objects, prepared, in the order in which they are given; what is none of them stays as it is.

        Raises ``PlanRejected`` with every finding before anything is touched.
        """
        if device_placement is not None and not all(device_placement):
            raise NotOffered("prepare(device_placement=...)", "give Accelerator(device_placement=False)")
        return self._added(self.config, objects)

    def _added(self, config: Config, objects: tuple[Any, ...]) -> Any:
        outcome = self._prepared.add(loaders.by_loader(config, objects, self.dataloader_config), objects)
        return outcome[0] if len(outcome) == 1 else outcome

    def _prepare_one(self, given: Any, **options: Any) -> Any:
        """One object of a script that prepares each by itself."""
        config = self.config
        if isinstance(given, DataLoader) and options.get("device_placement") is False:
            how = config.loaders if isinstance(config.loaders, ShardLoaders) else ShardLoaders()
            return self._added(evolve(config, loaders=evolve(how, to_device=False)), (given,))
        for name in (name for name, value in options.items() if value not in (None, True)):
            if name != "evaluation_mode":  # a model without trained parameters is prepared so by itself
                raise NotOffered(f"prepare of one object with {name}=...", "leave it out")
        return self.prepare(given)

    # --- the loop ---

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """One micro-batch."""
        del models
        return self._loop.accumulate()

    def no_sync(self, model: Any = None) -> AbstractContextManager[None]:
        """Forwards and backwards inside leave each rank its own gradients."""
        return self._loop.no_sync(model)

    def trigger_sync_in_backward(self, model: Any) -> AbstractContextManager[None]:
        """The backward inside averages, though its forward ran under ``no_sync``."""
        return averaged_in_backward(self._prepared.of(model) or self.ready)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[None]:
        """Nothing: every rank has as many batches. Raises ``NotOffered`` where they are to be uneven inside alone."""
        del joinables
        if even_batches is False:
            what = "give Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))"
            raise NotOffered("join_uneven_inputs(even_batches=False)", what)
        return nullcontext()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Adds gradients: any number of times before a step, under every engine but DeepSpeed."""
        self._loop.backward(loss, **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Lets the step of this window clip, all that is trained; returns the norm that it will find. Collective."""
        return self._loop.clip_norm(parameters, ClipNorm(float(max_norm), float(norm_type)))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Lets the step of this window clip, all that is trained."""
        self._loop.clip_value(parameters, ClipValue(float(clip_value)))

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Computes inside in the precision of the model; outside, the prepared model does so by itself."""
        handler = autocast_handler or self._handler("AutocastKwargs")
        dtype, said = _AUTOCAST.get(self.state.mixed_precision), {} if handler is None else vars(handler)
        enabled = dtype is not None and said.get("enabled", True)
        with torch.autocast(self.state.device.type, dtype, enabled, cache_enabled=said.get("cache_enabled", True)):
            yield

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[Any]:
        """Torch's profiler as a ``ProfileKwargs`` of accelerate's wants it, whose trace goes where that says."""
        handler = profile_handler or self._handler("ProfileKwargs") or theirs.name("ProfileKwargs")()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            Path(handler.output_trace_dir).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(
                str(Path(handler.output_trace_dir, f"profile_{self.state.process_index}.json"))
            )
            self.state.wait_for_everyone()

    def _handler(self, kind: str) -> Any:
        handlers = self._arguments["kwargs_handlers"] or ()
        return next((one for one in handlers if type(one).__name__ == kind), None)

    @property
    def scaler(self) -> Any:
        """Of float16 training; None for every other precision."""
        return self.ready.scaler if self._prepared.all_ready else None

    @property
    def sync_gradients(self) -> bool:
        """Whether the present micro-batch ends its window."""
        loop = self._prepared.started_loop
        return loop is None or loop.boundary

    @sync_gradients.setter
    def sync_gradients(self, ends: bool) -> None:
        self._loop.boundary = bool(ends)

    @property
    def gradient_state(self) -> GradientState:
        """Where the script is in its window and its loader."""
        return GradientState(self.gradient_accumulation_steps, lambda: self.sync_gradients, self._prepared.passes)

    @property
    def step(self) -> int:
        """Micro-batches of ``accumulate``, since the last pass ended where windows end with it."""
        loop = self._prepared.started_loop
        return 0 if loop is None else loop.micro_batches

    @step.setter
    def step(self, micro_batches: int) -> None:
        self._loop.micro_batches = int(micro_batches)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last window ended without a step, because a gradient overflowed."""
        return self._loop.skipped

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a window."""
        loop = self._prepared.started_loop
        return (self._config.accumulation or 1) if loop is None else loop.accumulation

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._config = evolve(self._config, accumulation=int(steps))
        if self._prepared.started_loop is not None:
            self._loop.accumulate_over(int(steps))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader, whose next pass begins after so many batches of the epoch."""
        return loaders.skip_first_batches(dataloader, num_batches)

    # --- all ranks ---

    def gather(self, value: Any) -> Any:
        """Tensors of equal shape of all ranks, one after the other in their first dimension."""
        return operations.gather(value)

    def gather_for_metrics(self, value: Any, use_gather_object: bool = False) -> Any:
        """Return what all ranks have made of the batch in use, each sample once; outside a loop all of it.

        One row for a batch of several samples, such as ``loss[None]``, is one row per rank.
        """
        return self._prepared.gather(value, pickled=use_gather_object)

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors, summed or averaged over the ranks, or their greatest."""
        return operations.reduce(value, reduction, scale)

    def pad_across_processes(self, value: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors as long in ``dim`` as the longest of all ranks."""
        return operations.pad_across_processes(value, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """``check_trigger`` is true on every rank, once."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any rank has set the trigger since the last look. Collective."""
        here, self._trigger = self._trigger, False
        return bool(operations.reduce(torch.tensor(int(here)), "max"))

    # --- files ---

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> str:
        """All that another run needs to go on, in prepkit's format whatever ``safe_serialization`` says; the folder."""
        del safe_serialization
        no_options("save_state", options)
        return self._saved_state.save(self._saved_models, output_dir)

    def load_state(self, input_dir: Any = None, **options: Any) -> None:
        """``ready.resume``. Collective."""
        no_options("load_state", options)
        self._saved_state.load(self._saved_models, input_dir)

    @property
    def _saved_models(self) -> tuple[Prepared, ...]:
        return self._prepared.models or (self.ready,)

    @property
    def _saved_state(self) -> SavedState:
        self._saved.project, self._saved.beside = self.project_configuration, self._prepared.beside
        return self._saved

    @property
    def save_iteration(self) -> int:
        """The number of the next folder that is named by itself."""
        return 0 if self.project_configuration is None else int(self.project_configuration.iteration)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with ``state_dict`` and ``load_state_dict`` that ``save_state`` saves as well."""
        self._saved.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook(models, weights, folder)`` is called before ``save_state``; the weights are not gathered."""
        return self._saved.hook(self._saved.before_save, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook(models, folder)`` is called before ``load_state``."""
        return self._saved.hook(self._saved.before_load, hook)

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True
    ) -> None:
        """``ready.export``, or in files of another size or kind as accelerate makes them. Collective."""
        ready = self._prepared.of(model) or self.ready
        if safe_serialization and max_shard_size == "10GB":
            ready.export(str(save_directory))
        elif (weights := whole_weights(ready, model)) and self.state.is_main_process:
            write_weights(weights, save_directory, max_shard_size, safe=safe_serialization)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """All weights, whole, under the author's names, whatever ``unwrap`` says (``whole_weights``). Collective."""
        del unwrap
        return whole_weights(self._prepared.of(model), model)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """``torch.save`` on the main process; tensors by name as safetensors where wanted."""
        if self.state.is_main_process:
            save_file(obj, f, metadata={"format": "pt"}) if safe_serialization else torch.save(obj, f)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """``ready.unwrap``."""
        ready = self._prepared.of(model)
        if ready is None:
            return unwrap(model, keep_autocast=keep_fp32_wrapper, keep_compiled=keep_torch_compile)
        return ready.unwrap(keep_autocast=keep_fp32_wrapper, keep_compiled=keep_torch_compile)

    # --- the log ---

    @property
    def logging_dir(self) -> Any:
        """Where trackers write that write files."""
        return self.project_dir if self.project_configuration is None else self.project_configuration.logging_dir

    @property
    def trackers(self) -> list[Any]:
        """Those that ``init_trackers`` has started."""
        return self._tracked.trackers

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Starts accelerate's own trackers, as ``log_with`` names them, on the main process alone."""
        if self.state.is_main_process:
            self._tracked.start(project_name, config, init_kwargs or {})

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Told to all trackers, on the main process."""
        if self.state.is_main_process:
            self._tracked.log(values, step, log_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name; off the main process one that does nothing."""
        return self._tracked.named(name, unwrap=unwrap, main=self.state.is_main_process)

    def end_training(self) -> None:
        """``ready.close``; ends the trackers and the process group."""
        self._tracked.finish()
        for ready in self._prepared.all_ready:
            group.hold(ready.close())
        self.state.destroy_process_group()

    def free_memory(self, *objects: Any) -> Any:
        """Lets go of what was prepared, for another ``prepare``; the process group stays."""
        for ready in self._prepared.all_ready:
            ready.close(keep_group=True)
            self._let_go.add(ready.unwrap())
        self._prepared = self._prepared.anew(self._ticks, self._let_go)
        return [None for _ in objects]

    clear = free_memory
    prepare_model = prepare_optimizer = prepare_scheduler = prepare_data_loader = _prepare_one


def whole_weights(ready: Prepared | None, model: Any) -> dict[str, Any]:
    """Name to tensor, tied ones under each name; of a module that was not prepared its own ``state_dict``.

    Where the engine shards it is collective: in host memory on the main process, empty on the others, as accelerate has
    it under FSDP. Where master weights are kept, as under DeepSpeed, it is these.
    """
    if ready is None:
        own: dict[str, Any] = model.state_dict()
        return own
    weights = dict(export.whole(ready.model))
    for first, *others in ready.plan.facts.model.ties:
        if first in weights:
            weights.update(dict.fromkeys(others, weights[first]))
    return weights


@define
class Tracked:
    """The trackers of one ``Accelerator``: named by ``log_with``, started by ``init_trackers``."""

    log_with: list[Any]
    """Names, accelerate's ``LoggerType`` values, and trackers of the script's own."""
    logging_dir: Any
    trackers: list[Any] = field(factory=list)

    @classmethod
    def of(cls, log_with: Any, logging_dir: Any) -> Tracked:
        """Those that can be used here, as accelerate has it. Raises ``ValueError`` as accelerate does."""
        if log_with is None:
            return cls([], logging_dir)
        return cls(list(_tracking().filter_trackers(log_with, logging_dir)), logging_dir)

    def start(self, project: str, config: Any, options: dict[str, Any]) -> None:
        """Makes and starts each of them, and tells it the script's config."""
        tracking = _tracking() if self.log_with else None
        for one in self.log_with:
            if tracking is None or isinstance(one, tracking.GeneralTracker):
                self.trackers.append(one)
                continue
            kind, given = tracking.LOGGER_TYPE_TO_CLASS[str(one)], options.get(str(one), {})
            where = (self.logging_dir,) if kind.requires_logging_directory else ()
            self.trackers.append(kind(project, *where, **given))
        for one in self.trackers:
            one.start()
        for one in self.trackers if config is not None else ():
            one.store_init_configuration(config)

    def log(self, values: dict[str, Any], step: int | None, options: dict[str, Any]) -> None:
        """Each of them hears it; they write on the main process alone."""
        for one in self.trackers:
            one.log(values, step=step, **options.get(one.name, {}))

    def named(self, name: str, *, unwrap: bool, main: bool) -> Any:
        """One of them, or what is inside it. Off the main process one that does nothing. Raises ``ValueError``."""
        if not main:
            return _tracking().GeneralTracker(_blank=True)
        for one in self.trackers:
            if one.name == name:
                return one.tracker if unwrap else one
        raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`.")

    def finish(self) -> None:
        """Ends each of them."""
        for one in self.trackers:
            one.finish()


def _tracking() -> Any:
    if find_spec("accelerate") is None:
        what = "type pip install accelerate, or write accelerator.ready.log.to(pk.track.TensorBoard(folder))"
        raise NotOffered("log_with without accelerate", what, "accelerate.not-installed")
    return import_module("accelerate.tracking")
