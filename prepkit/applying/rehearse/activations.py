"""One step without data: what it keeps beside parameters and gradients, and what it uses while a unit is sharded."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from prepkit.applying.rehearse.meta import fake_twin, meta_copy
from prepkit.applying.step_kinds import handlers
from prepkit.config import Intent
from prepkit.court import found, report
from prepkit.findings import Finding
from prepkit.findings.text import count, some
from prepkit.interpreter import Halted, interpret
from prepkit.objects import names
from prepkit.objects.names import named_modules, named_parameters
from prepkit.objects.target import Target
from prepkit.plan import Plan
from prepkit.rules.forward import FORWARD_RULES, Use
from prepkit.rules.rule import findings_of
from prepkit.steps import AutocastForward, CheckpointModules, InitializeDeepSpeed, ShardUnits, Step, WrapFSDP1


class NeedsValues(RuntimeError):
    """The forward looks at values, and a copy without data has none."""


def activations(plan: Plan, model: Module, *args: Any, **kwargs: Any) -> int:
    """Bytes at the highest moment of one micro-batch on one rank: activations, and what backward makes in passing.

    Runs ``model(*args, **kwargs)`` and its backward on a copy without data, with what the plan does to the forward:
    dtypes, autocast, checkpointing. Compilation and the allocator are not in it, and kernels of an accelerator may keep
    more or less than those of the CPU. Inputs of blocks that ``offload`` sends to host memory are counted as if they
    stayed. Neither the model nor the arguments are touched.

    Raises ``RuntimeError`` where the forward needs values, as a model that branches on them does, or fails.
    """
    with without_data(plan, model, (args, kwargs)) as (twin, inputs):
        most, without = _tracked(twin, inputs, trains=plan.run.intent is Intent.TRAINING)
    _tell(without)
    return most


@contextmanager
def without_data(plan: Plan, model: Module, given: tuple[Any, Any]) -> Iterator[tuple[Module, tuple[Any, Any]]]:
    """A copy of the model and of what it is ``given``, as the plan computes with them on a rank, without data.

    Raises ``NeedsValues`` where what is done inside needs values, and ``RuntimeError`` where it fails.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dtypes = computed(plan)
    named = {id(param): dtypes[name] for name, param in named_parameters(model).items() if name in dtypes}
    twin, _ = meta_copy(model, None, _twins(mode, named))
    target = Target(model=twin)
    with mode:
        outcome = interpret(tuple(_local(plan)), handlers(), target)
        if isinstance(outcome, Halted):
            raise RuntimeError(str(outcome))  # noqa: TRY004  # a failed step is no wrong type
        cast_as_units(plan, target.model)
        try:
            yield target.model, tree_map_only(Tensor, _fake, given)
        except (torch._subclasses.fake_tensor.DataDependentOutputException, NotImplementedError) as error:
            raise NeedsValues(f"{type(model).__name__} cannot be run without data: {error}") from error
        except (RuntimeError, TypeError, ValueError) as error:
            raise RuntimeError(_failed(plan, model, dtypes.values(), error)) from error


def _failed(plan: Plan, model: Module, dtypes: Iterable[torch.dtype], error: Exception) -> str:
    kinds = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
    what = f"the forward of {type(model).__name__} fails on what it is given, with parameters in {kinds} as the plan "
    first = next(iter(str(error).strip().splitlines()), "")
    told = f"{what}computes: {type(error).__name__}: {first}"
    if plan.run.engine_steps and "dtype" in str(error):
        told += (
            " DeepSpeed casts parameters and, from 0.19 on, no buffers: cast what meets them in the forward, or write "
            '"data_types": {"buffer_dtype": "bf16"} into the JSON of DeepSpeed(config=...)'
        )
    return told


def _tell(without: tuple[str, ...]) -> None:
    """The prediction counts optimizer state for what never gets a gradient, and an optimizer makes none for it."""
    if without:
        what = (
            f"{count(len(without), 'trained parameter')} got no gradient from this micro-batch: {some(without)}; the "
            "predicted optimizer state counts what an optimizer would keep for them, and it keeps nothing"
        )
        report((found("forward.no-gradient", without[0], what),))


def _local(plan: Plan) -> Iterator[Step]:
    """The steps that change what forward computes, for the CPU; sharding changes where weights come from, not what."""
    for planned in plan.steps:
        match planned.step:
            case AutocastForward():
                yield evolve(planned.step, device="cpu")
            case CheckpointModules():
                yield evolve(planned.step, offload=False)  # a tensor without data is on no device


def _twins(mode: FakeTensorMode, dtypes: dict[int, torch.dtype]) -> Callable[[Tensor], Tensor]:
    """Tensors without data; parameters in the dtype in which they are computed with."""
    plain = fake_twin(mode)

    def make(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Parameter) or not tensor.is_floating_point():
            return plain(tensor)
        dtype = dtypes.get(id(tensor), tensor.dtype)
        with mode:
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
            return Parameter(bare, tensor.requires_grad)

    return make


def _fake(given: Tensor) -> Tensor:
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cpu")


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations make, while they live; torch calls a mode by its class.

    As torch's ``MemTracker`` counts activations and what backward makes in passing; that one asks every module at every
    operation, which takes minutes for a model of some hundred modules.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.most = 0
        self._seen = WeakIdKeyDictionary()
        for tensor in given:
            self._seen[tensor.untyped_storage()] = None  # the user's, not counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        return made

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = weakref.finalize(storage, self._drop, size)
        self.now += size
        self.most = max(self.most, self.now)

    def _drop(self, size: int) -> None:
        self.now -= size


def _tracked(model: Module, inputs: tuple[Any, Any], *, trains: bool) -> tuple[int, tuple[str, ...]]:
    """Bytes at the highest moment, and the trained parameters that got no gradient."""
    args, kwargs = inputs
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    live = Live((*model.parameters(), *model.buffers(), *given))
    without = {id(param): name for name, param in named_parameters(model).items() if param.requires_grad}

    def forget(param: Tensor) -> None:
        """Gradients of parameters are counted elsewhere."""
        param.grad = None
        without.pop(id(param), None)

    trained = [param for param in model.parameters() if param.requires_grad]
    hooks = [param.register_post_accumulate_grad_hook(forget) for param in trained]  # type: ignore[no-untyped-call]
    with live, torch.set_grad_enabled(trains):
        made = model(*args, **kwargs)
        if trains:
            _loss(made).backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return live.most, tuple(without.values()) if trains else ()


def _loss(made: Any) -> Tensor:
    """Its own loss where it has one; else something that every floating output has a part in."""
    loss = getattr(made, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    parts = [leaf.float().sum() for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not parts:
        raise RuntimeError("the model's output holds no tensor that a gradient could come from")
    return torch.stack(parts).sum()


_DEEPSPEED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What DeepSpeed's JSON calls them."""


def computed(plan: Plan) -> Mapping[str, torch.dtype]:
    """Canonical name to the dtype in which a parameter is computed with, gathered where it is in a unit."""
    found = {layout.name: dtype_of(layout.dtype) for layout in plan.layout}
    for one in plan.steps:
        match one.step:
            case ShardUnits(param_dtype=name, ignored=left) | WrapFSDP1(param_dtype=name, ignored=left) if name:
                whole = {unit.path for unit in one.step.units if unit.full_precision}
                for layout in plan.layout:
                    if not _left_out(layout.name, left):
                        found[layout.name] = torch.float32 if layout.unit in whole else dtype_of(name)
    return found


def _left_out(name: str, ignored: tuple[str, ...]) -> bool:
    """True if it is named, as for FSDP2, or in a module that is, as for FSDP1."""
    return any(name == one or name.startswith(f"{one}.") for one in ignored)


def cast_as_units(plan: Plan, model: Module) -> None:
    """From here on modules that are units cast what goes in and out, and their buffers, as their wrappers would."""
    modules = named_modules(model)
    for one in plan.steps:
        match one.step:
            case ShardUnits(param_dtype=name, cast_forward_inputs=casts):
                for unit in one.step.units:
                    if name and casts and not unit.full_precision:
                        _cast_inputs(modules[unit.path], dtype_of(name))
                    if unit.output_dtype:
                        _cast_outputs(modules[unit.path], dtype_of(unit.output_dtype))
            case WrapFSDP1(param_dtype=name, cast_forward_inputs=casts, cast_root_forward_inputs=at_root):
                for flat in one.step.units:
                    if name and (casts if flat.path else at_root) and not flat.full_precision:
                        _cast_inputs(modules[flat.path], dtype_of(name))
                if one.step.buffer_dtype:
                    _cast_buffers(model, dtype_of(one.step.buffer_dtype))
            case InitializeDeepSpeed(settings=settings):
                said = {setting.path: json.loads(setting.value) for setting in settings}
                if (short := said.get(("data_types", "buffer_dtype"))) in _DEEPSPEED:
                    _cast_buffers(model, _DEEPSPEED[short])


def _cast_inputs(module: Module, dtype: torch.dtype) -> None:
    def before(_: Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), dtype)

    module.register_forward_pre_hook(before, with_kwargs=True)


def _cast_outputs(module: Module, dtype: torch.dtype) -> None:
    module.register_forward_hook(lambda _, __, output: _cast(output, dtype))


def _cast_buffers(model: Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _cast(given: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, given)


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def foreign_uses(plan: Plan, model: Module, *args: Any, **kwargs: Any) -> tuple[Finding, ...]:
    """One finding per parameter of a unit that something outside the unit's forward computes with.

    Runs ``model(*args, **kwargs)`` on a copy without data, as the plan computes. Nothing under an engine without units.
    Raises ``RuntimeError`` for a forward that fails, and where there are units for one that needs values.
    """
    keeps = _units(plan)
    try:
        return _uses(plan, model, (args, kwargs), keeps)
    except NeedsValues:
        if keeps:
            raise
        return ()


def _uses(plan: Plan, model: Module, given: tuple[Any, Any], keeps: dict[str, bool]) -> tuple[Finding, ...]:
    unit_of = {layout.name: layout.unit for layout in plan.layout}
    with without_data(plan, model, given) as (twin, inputs):
        owners = {
            id(param): (name, unit_of[name])
            for name, param in names.named_parameters(twin).items()
            if unit_of.get(name) in keeps
        }
        watch = Watch(owners, keeps)
        with _followed(twin, watch), watch, torch.no_grad():
            twin(*inputs[0], **inputs[1])
    return findings_of(FORWARD_RULES, tuple(Use(name, unit, user) for (name, unit), user in watch.uses.items()))


def _units(plan: Plan) -> dict[str, bool]:
    """Path of every unit below the root to whether it stays gathered after its forward."""
    for one in plan.steps:
        match one.step:
            case ShardUnits(units=units):
                return {unit.path: unit.reshard_after_forward is False for unit in units if unit.path}
            case WrapFSDP1(units=flat, sharding=sharding):
                stays = sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD")
                return {unit.path: stays for unit in flat if unit.path} if sharding != "NO_SHARD" else {}
    return {}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every parameter that an operation gets while its unit is not gathered."""

    def __init__(self, owners: dict[int, tuple[str, str]], keeps: dict[str, bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owners, self.keeps = owners, keeps
        self.open: list[str] = []
        """Paths of the modules whose forward runs, outermost first."""
        self.gathered: set[str] = set()
        """Units that have run and stay gathered."""
        self.uses: dict[tuple[str, str], str] = {}
        """Parameter and unit to the module whose forward has used it first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def note(self, leaves: Iterable[Any]) -> None:
        """Holds what an operation gets against the units that are gathered now."""
        for leaf in leaves:
            name, unit = self.owners.get(id(leaf), ("", ""))
            if unit and unit not in self.open and unit not in self.gathered:
                self.uses.setdefault((name, unit), self.open[-1] if self.open else "")

    def enter(self, path: str) -> None:
        """A module's forward begins."""
        self.open.append(path)

    def leave(self, path: str) -> None:
        """A module's forward ends."""
        self.open.pop()
        if self.keeps.get(path):
            self.gathered.add(path)


@contextmanager
def _followed(model: Module, watch: Watch) -> Iterator[None]:
    hooks = []
    for path, module in names.named_modules(model).items():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: watch.enter(path)))
        hooks.append(module.register_forward_hook(lambda *_, path=path: watch.leave(path), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
