"""DeepSpeed: what is done to the model and the optimizer before it gets them, and its one call.

DeepSpeed is an extra. Importing it takes about half a second, and reads the accelerator; so that happens in here only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.allocate import allocate_inside, swap_content
from prepkit.applying.handlers.fp8 import WIDE
from prepkit.applying.handlers.named_tensors import named_tensors
from prepkit.applying.handlers.swap_layers import library_problems
from prepkit.court import found
from prepkit.findings import RunRefused
from prepkit.interpreter import Handler
from prepkit.objects import names, zero3
from prepkit.objects.deepspeed import DataRanks, forget_groups, without_shared_memory
from prepkit.objects.forward import MARK, CastedForward
from prepkit.objects.joint_optimizer import unstepped
from prepkit.objects.target import Target
from prepkit.ranks import group_limits, launcher
from prepkit.ranks.world import world
from prepkit.steps import (
    CastForward,
    ConvertOptimizer,
    InitializeDeepSpeed,
    MarkLeafModules,
    PartitionParameters,
    Setting,
)

CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What is cast to the dtype that DeepSpeed computes in; packed weights are left as they are."""
LEAF = "_z3_leaf"
"""Attribute of a module that ZeRO-3 gathers whole (deepspeed/utils/z3_leaf_module.py)."""
TORCH_ONLY = frozenset(
    ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
)
"""Options of torch's optimizers that mean nothing to DeepSpeed's kernels, and are off where a plan converts."""

# --- cast ----------------------------------------------------------------------------------------------------------


def cast_ready(step: CastForward, target: Target) -> problems.Problems:
    """A second layer would cast twice (G-20)."""
    del step
    marked = ["model.forward"] if hasattr(target.model, MARK) else []
    return problems.told("model.already-wrapped", marked, "cast by prepkit already", problems.PLAIN)


def cast_do(step: CastForward, target: Target) -> Any:
    """Puts a ``CastedForward`` into the instance; returns what stood there, None for the class's own."""
    own = vars(target.model).get("forward")
    casted = CastedForward(target.model.forward, getattr(torch, step.dtype), getattr(torch, step.output_dtype))
    try:
        vars(target.model).update({"forward": casted, MARK: True})
        return own
    except BaseException:
        cast_undo(step, target, own)
        raise


def cast_undo(step: CastForward, target: Target, memo: Any) -> None:
    """Leaves the instance with exactly the forward that it had, or with none."""
    del step
    vars(target.model).pop(MARK, None)
    vars(target.model).pop("forward", None)
    if memo is not None:
        vars(target.model)["forward"] = memo


CAST: Handler[CastForward, Target, Any] = Handler(ready=cast_ready, do=cast_do, undo=cast_undo)

# --- leaf modules --------------------------------------------------------------------------------------------------


def leaves_ready(step: MarkLeafModules, target: Target) -> problems.Problems:
    """Every path must be a module."""
    return problems.absent("module", step.paths, names.named_modules(target.model))


def leaves_do(step: MarkLeafModules, target: Target) -> dict[str, Any]:
    """Marks each module as DeepSpeed's ``set_z3_leaf_module`` does; returns the marks that were there."""
    modules = names.named_modules(target.model)
    before = {path: vars(modules[path]).get(LEAF) for path in step.paths}
    try:
        for path in step.paths:
            setattr(modules[path], LEAF, True)
        return before
    except BaseException:
        leaves_undo(step, target, before)
        raise


def leaves_undo(step: MarkLeafModules, target: Target, memo: dict[str, Any]) -> None:
    """Puts back the marks that were there."""
    del step
    modules = names.named_modules(target.model)
    for path, mark in memo.items():
        vars(modules[path]).pop(LEAF, None)
        if mark is not None:
            setattr(modules[path], LEAF, mark)


LEAVES: Handler[MarkLeafModules, Target, dict[str, Any]] = Handler(ready=leaves_ready, do=leaves_do, undo=leaves_undo)

# --- CPU optimizer -------------------------------------------------------------------------------------------------


CPU_KERNELS = {"DeepSpeedCPUAdam": "cpu_adam", "DeepSpeedCPUAdagrad": "cpu_adagrad", "DeepSpeedCPULion": "cpu_lion"}
"""The kernel that each of DeepSpeed's CPU optimizers compiles (deepspeed ``ops/op_builder``)."""


def convert_ready(step: ConvertOptimizer, target: Target) -> problems.Problems:
    """The optimizer must have no state yet, and nobody have left a lock on the kernel that is compiled for it.

    It may not be there yet either: an earlier step can create it.
    """
    if target.optimizer is not None and not all(map(unstepped, target.optimizer.state.values())):
        what = f"{type(target.optimizer).__name__} has state, which DeepSpeed's CPU form would not take"
        return problems.told("deepspeed.optimizer-state", ["optimizer"], what, "Pass a fresh one.")
    return missing() or lock_problems((CPU_KERNELS[step.algorithm],))


def convert_do(step: ConvertOptimizer, target: Target) -> Optimizer:
    """DeepSpeed's optimizer over the same groups, to which the scheduler is bound; returns the one that was there."""
    old = target.optimizer
    if old is None:
        raise RunRefused(problems.no_optimizer(target))
    groups = [{key: value for key, value in g.items() if key not in TORCH_ONLY} for g in old.param_groups]
    options = {"adamw_mode": step.decoupled} if step.algorithm == "DeepSpeedCPUAdam" else {}
    # The first group's numbers are the defaults too: the kernel is created with them.
    known = {key: groups[0][key] for key in ("lr", "betas", "eps", "weight_decay") if key in groups[0]}
    new = _cpu_class(step.algorithm)(groups, **known, **options)
    new._optimizer_step_pre_hooks.update(old._optimizer_step_pre_hooks)
    new._optimizer_step_post_hooks.update(old._optimizer_step_post_hooks)
    try:
        target.optimizer = new
        _bind(target.scheduler, old, new)
        return old
    except BaseException:
        convert_undo(step, target, old)
        raise


def _cpu_class(algorithm: str) -> Any:
    match algorithm:
        case "DeepSpeedCPUAdagrad":
            from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad as Found
        case "DeepSpeedCPULion":
            from deepspeed.ops.lion import DeepSpeedCPULion as Found
        case _:
            from deepspeed.ops.adam import DeepSpeedCPUAdam as Found
    return Found


def _bind(scheduler: Any, old: Optimizer, new: Optimizer) -> None:
    """The scheduler, and those inside a compound one, go on to the new optimizer: it sets rates in ``param_groups``."""
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
    for inner in getattr(scheduler, "_schedulers", ()):
        _bind(inner, old, new)


def convert_undo(step: ConvertOptimizer, target: Target, memo: Optimizer) -> None:
    """Puts the optimizer back, and the scheduler to it."""
    del step
    if target.optimizer is not None:
        _bind(target.scheduler, target.optimizer, memo)
    target.optimizer = memo


CONVERT: Handler[ConvertOptimizer, Target, Optimizer] = Handler(ready=convert_ready, do=convert_do, undo=convert_undo)

# --- initialize ----------------------------------------------------------------------------------------------------


def missing() -> problems.Problems:
    """One text where DeepSpeed is not installed."""
    lacking = ["deepspeed"] if importlib.util.find_spec("deepspeed") is None else []
    return problems.told("deepspeed.installed", lacking, "DeepSpeed is not installed")


def initialize_ready(step: InitializeDeepSpeed, target: Target) -> problems.Problems:
    """Everything that can be known before a call that has no way back."""
    if met := missing() + _msamp_problems(step):
        return met
    modules, params = names.named_slots(target.model), names.named_parameters(target.model)
    if isinstance(target.model, engine_class()):
        fix = "Give the module inside it, built again."
        met += problems.told("model.already-wrapped", ["model"], "a DeepSpeed engine already", fix)
    else:
        wrapped = (path for path, m in modules.items() if isinstance(m, FSDPModule) or names.is_root_wrapper(m))
        met += problems.told("model.already-wrapped", wrapped, "wrapped already")
    met += problems.sharded(params, "DeepSpeed shards whole parameters")
    met += () if step.filled else problems.on_meta(params)
    met += problems.absent("module", step.kept, modules)
    met += problems.absent("parameter", step.names, params) + problems.with_gradient(params, params)
    two = ["optimizer"] if step.optimizer == "section" and target.optimizer is not None else []
    met += problems.told("deepspeed.two-optimizers", two, "DeepSpeed makes one from its config, and one was given")
    kernels = _kernels(step)
    devices = device_problems(step.device, compiles=bool(kernels)) + launcher.device_problems(step.device)
    return met + devices + lock_problems(kernels)


def _msamp_problems(step: InitializeDeepSpeed) -> problems.Problems:
    return library_problems("msamp.deepspeed", "msamp") if step.library == "msamp" else ()


def engine_class() -> type:
    """``DeepSpeedEngine``."""
    from deepspeed import DeepSpeedEngine

    engine: type = DeepSpeedEngine
    return engine


def device_problems(device: str, *, compiles: bool) -> problems.Problems:
    """One text where DeepSpeed works on another device, or cannot compile for it."""
    from deepspeed.accelerator import get_accelerator

    works_on = get_accelerator().device_name()
    if works_on == device:
        return launcher.compiler_problems() if device == "cpu" and compiles else ()
    fix = f"Type export DS_ACCELERATOR={device}, which it reads when it is first imported."
    what = f"DeepSpeed works on {works_on}, and the plan computes on {device}"
    return problems.told("deepspeed.accelerator", ["env.variables.DS_ACCELERATOR"], what, fix)


def _kernels(step: InitializeDeepSpeed) -> tuple[str, ...]:
    """Return what DeepSpeed compiles, or loads compiled, while it initializes."""
    if step.optimizer != "section":
        return ()
    config = config_of(step.settings)
    offloaded = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none") != "none"
    kind = str(config.get("optimizer", {}).get("type", "")).lower().removesuffix("w")
    return (f"cpu_{kind}" if offloaded else f"fused_{kind}",)  # such as cpu_adam, fused_lion


def config_of(settings: tuple[Setting, ...]) -> dict[str, Any]:
    """The nested config that DeepSpeed takes, new with every call: it writes into what it gets."""
    config: dict[str, Any] = {}
    for setting in settings:
        section = config
        for key in setting.path[:-1]:
            section = section.setdefault(key, {})
        section[setting.path[-1]] = json.loads(setting.value)
    return config


def initialize_do(step: InitializeDeepSpeed, target: Target) -> None:
    """Collective. Puts the engine in the place of the model, and ZeRO's optimizer in that of the optimizer.

    Raises ``RunRefused`` with what DeepSpeed said.
    """
    library = importlib.import_module("deepspeed" if step.library == "deepspeed" else "msamp.deepspeed")
    forget_groups()
    launcher.name_local_rank()
    params = names.named_parameters(target.model)
    count = step.data_parallel
    split = DataRanks(count, dist.group.WORLD) if count != world().size else None
    for path in step.kept:
        vars(names.named_modules(target.model)[path])[WIDE] = True
    target.together()
    if step.dtype is not None:
        _cast_parts(params.values(), getattr(torch, step.dtype))
    try:
        with group_limits.as_default_group(), without_shared_memory():
            engine, optimizer, _, scheduler = library.initialize(
                model=target.model,
                optimizer=target.optimizer,
                model_parameters=[params[name] for name in step.names] or None,
                lr_scheduler=target.scheduler if step.scheduler == "handed over" else None,
                mpu=split,
                config=config_of(step.settings),
                dist_init_required=False,
            )
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise problems.step_refused(f"{library.__name__}.initialize", type(error).__name__, error) from error
    target.model, target.optimizer = engine, optimizer
    if step.scheduler != "outside":
        target.scheduler = scheduler


def _cast_parts(params: Iterable[Any], dtype: torch.dtype) -> None:
    """DeepSpeed takes parameters that are divided already for cast; its float32 copies come from the parts."""
    for param in params:
        if zero3.is_partitioned(param) and param.dtype in CASTABLE:
            param.data = param.data.to(dtype)
            part = param.ds_tensor.data.to(dtype)
            param.ds_tensor.data = part.pin_memory() if param.ds_tensor.is_pinned() else part


INITIALIZE: Handler[InitializeDeepSpeed, Target, None] = Handler(ready=initialize_ready, do=initialize_do)


# --- the lock of a killed compilation ---
#
# DeepSpeed compiles its kernels when they are first needed, through torch's ``cpp_extension.load``. Whoever compiles
# creates a file ``lock`` in the kernel's folder and removes it at the end; every other process waits until the file is
# gone, even if the kernel was compiled long ago (torch ``utils/file_baton.py``). A builder that is killed never removes
# it, and the wait holds the interpreter, so that no time-out of Python's ends it either.

PROCESSES = Path("/proc")
"""Where Linux shows which process has which files open."""

LONGEST_BUILD_S = 600.0
"""Seconds after which a lock is taken for a stale one where nobody can tell who holds it. A kernel takes one or two
minutes to compile."""


def stale_locks(kernels: Iterable[str]) -> tuple[Path, ...]:
    """The lock files of these kernels that no living process holds."""
    locks = [launcher.extensions_root() / kernel / "lock" for kernel in dict.fromkeys(kernels)]
    return tuple(lock for lock in locks if _is_stale(lock))


def lock_problems(kernels: Iterable[str]) -> problems.Problems:
    """One text for every stale lock, with what to type."""
    left = "left by a compilation that was killed: DeepSpeed would wait for it for ever"
    unless = "unless another machine compiles in this folder now"
    return tuple(
        found(
            "deepspeed.stale-lock",
            str(lock),
            left,
            f"Type rm {lock}, {unless}.",
        )
        for lock in stale_locks(kernels)
    )


def _is_stale(lock: Path) -> bool:
    try:
        created = lock.stat().st_mtime
    except OSError:  # there is none, or its builder has just removed it
        return False
    if (PROCESSES / "self" / "fd").is_dir():
        return not _is_open(lock) and lock.exists()  # its builder may have ended while we looked
    return time.time() - created > LONGEST_BUILD_S


def _is_open(file: Path) -> bool:
    """True if a process of this machine has the file open, as the builder has its lock."""
    file = file.resolve()
    for descriptor in PROCESSES.glob("[0-9]*/fd/*"):
        try:
            if descriptor.readlink() == file:
                return True
        except OSError:  # it has ended, or belongs to somebody else, who does not write into our folder
            continue
    return False


# --- parameters divided before they have values ---
#
# ``zero.Init`` as a context divides what is constructed inside it, and given a module it first sends each parameter
# whole from rank 0. A model on meta is constructed already, and has nothing to send. So the two halves of ``zero.Init``
# are called here for one parameter after the other, without the broadcast between them:
# ``_convert_to_deepspeed_param`` makes it one of ZeRO-3's, ``partition`` keeps this rank's elements and frees the rest.
# ``deepspeed.initialize`` then finds every parameter divided, and goes on with the parts.
#
# The ``Init`` stays alive in the parameters: they are gathered as *its* config says. So the step has the whole config.


def partition_ready(step: PartitionParameters, target: Target) -> problems.Problems:
    """DeepSpeed must be there and work on the device, and the parameters be plain ones."""
    if met := missing():
        return met
    params = names.named_parameters(target.model)
    return problems.partitioned(params.items()) + device_problems(step.device.type, compiles=False)


def partition_do(step: PartitionParameters, target: Target) -> None:
    """Notes in ``target.unfilled`` what has no values yet; all other parameters keep theirs, in parts.

    Raises ``RunRefused`` with the parameter at which it ended.
    """
    device = launcher.bind(step.device)
    target.together()
    target.unfilled |= {name for name, tensor in named_tensors(target).items() if tensor.is_meta}
    with group_limits.as_default_group(), without_shared_memory(), torch.no_grad():
        init = _init(step)
        for name, param in names.named_parameters(target.model).items():
            _partition(name, param, init, device)
    _move_buffers(target.model, device)


def _init(step: PartitionParameters) -> Any:
    """DeepSpeed's own object, as ``deepspeed.initialize`` would make it, for a module without parameters."""
    from deepspeed import init_distributed
    from deepspeed.runtime.zero.partition_parameters import Init

    forget_groups()
    launcher.name_local_rank()
    init_distributed(dist_init_required=False, verbose=False)
    return Init(module=Module(), config_dict_or_path=config_of(step.settings))


def _partition(name: str, param: Parameter, init: Any, device: torch.device) -> None:
    try:
        _divide(param, init, device)
    except Exception as error:
        raise problems.step_refused(name, "could not be divided, those before it are", error) from error


def _divide(param: Any, init: Any, device: torch.device) -> None:
    """Whole on the device for a moment; what pads the last part is zeros, where DeepSpeed leaves anything."""
    if param.is_meta:
        swap_content(param, torch.empty_like(param, device=device, requires_grad=False))
    else:
        param.data = param.data.to(device)
    init._convert_to_deepspeed_param(param)
    param.partition()
    param.ds_tensor[zero3.held(param).numel() :].zero_()


def _move_buffers(model: Module, device: torch.device) -> None:
    """DeepSpeed leaves them where they are once it finds a parameter divided; one that modules share stays one."""
    allocate_inside(model, device)
    moved: dict[int, tuple[Any, Any]] = {}
    for site in names.sites(model):
        for key, buffer in site.module._buffers.items():
            if buffer is not None:
                site.module._buffers[key] = moved.setdefault(id(buffer), (buffer, buffer.to(device)))[1]


PARTITION: Handler[PartitionParameters, Target, None] = Handler(ready=partition_ready, do=partition_do)
