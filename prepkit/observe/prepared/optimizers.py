"""Optimizers with their state, and schedulers, as a library has left them, out of its wrappers."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, field
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.weak import TensorWeakRef

from prepkit.facts.run import EngineFacts, PreparedOptimizer, PreparedScheduler, Unlike
from prepkit.facts.window import Groups
from prepkit.findings.text import spans
from prepkit.objects.deepspeed import stepped
from prepkit.objects.joint_optimizer import held
from prepkit.objects.local_part import local
from prepkit.objects.names import known_bases, named_parameters
from prepkit.observe.fingerprints.tensor import fingerprint
from prepkit.observe.optimizer import horizon
from prepkit.observe.prepared import fabric
from prepkit.observe.prepared.around import own_frames, reads_gradients
from prepkit.ranks.world import world

MASTERS = ("bf16_stochastic_round", "master_weights", "use_master_weights")
"""Options and attributes of optimizers of torchao, apex and others that make low-precision weights safe."""

BY_BATCH = ("WarmupDecayLR", "WarmupCosineLR")
"""Schedulers of DeepSpeed that an engine ticks with each of its steps until their end."""

RATES = ("lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "name")
"""Options of a group that a schedule sets, or that change nothing of what is to come."""

KEEP_STATE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adafactor", "Adadelta")
"""Optimizers of torch that have state of every parameter from their first step on, and none before; SGD with momentum
is another."""


_Seen = tuple[Any, int, Tensor, Tensor]
CHOSEN, ELEMENTS = 8, 16
"""Gradients of an optimizer by which they are known again, and elements of each."""


@define(eq=False)
class LastSteps:
    """What optimizers have stepped last, so that a step over the same gradients is seen."""

    _seen: WeakKeyDictionary[Any, list[_Seen]] = field(factory=WeakKeyDictionary)

    def again(self, optimizer: Any) -> bool:
        """Before a step: whether nothing has made, written or cleared its gradients since this optimizer's last one."""
        before, self._seen[optimizer] = self._seen.get(optimizer, []), [*_chosen(optimizer)]
        now = self._seen[optimizer]
        same = bool(now) and len(now) == len(before) and all(map(_same, before, now))
        return same and any(not torch.equal(one[3], other[3]) for one, other in zip(before, now, strict=True))


def _same(one: _Seen, other: _Seen) -> bool:
    """Waits for the device only where it is the same tensor, unwritten."""
    return one[0]() is other[0]() and one[1] == other[1] and torch.equal(one[2], other[2])


def _chosen(optimizer: Any) -> Iterator[_Seen]:
    """Yield some gradients, how often each was written, and elements: what CUDA's graphs write nobody counts.

    And elements of the weight: a class whose step calls its parent's is asked twice before either has acted.
    """
    params = [param for param in held(optimizer) if param.grad is not None and param.grad.layout is torch.strided]
    for param in params[:: len(params) // CHOSEN + 1]:
        grad = param.grad
        assert grad is not None, "chosen by it"
        yield TensorWeakRef(grad), grad._version + local(grad)._version, _elements(grad), _elements(param)


def _elements(tensor: Tensor) -> Tensor:
    part = local(tensor.detach())
    row = part[(0,) * (part.dim() - 1)][:ELEMENTS] if part.dim() and part.numel() else part
    return row.clone()


def inner(wrapped: Any) -> Any:
    """What stands inside accelerate's or Fabric's wrapper of an optimizer or a scheduler, or the thing itself."""
    wrapped = fabric.optimizer_of(wrapped)
    while type(wrapped).__module__.startswith("accelerate."):
        name = "optimizer" if hasattr(wrapped, "param_groups") else "scheduler"
        if (inside := vars(wrapped).get(name)) is None:
            break
        wrapped = inside
    return wrapped


def engines(model: nn.Module) -> list[Any]:
    """The DeepSpeed engines around or in a model."""
    return [module for module in model.modules() if "DeepSpeedEngine" in known_bases(type(module))]


def optimizer_of(engine: Any, optimizer: Any) -> bool:
    """Return whether the optimizer is the engine's own, or the one inside it."""
    own = getattr(engine, "optimizer", None)
    chain = (own, getattr(own, "optimizer", None), getattr(engine, "basic_optimizer", None))
    return any(one is not None and one is optimizer for one in chain)


def past_engine(optimizers: Any, model: nn.Module) -> bool:
    """Return whether what is about to step is inside a DeepSpeed optimizer, and its caller is not the engine.

    It steps master weights, to which the engine alone hands gradients.
    """
    first = inner(optimizers[0] if isinstance(optimizers, list | tuple) and optimizers else optimizers)
    around = [(one, one.optimizer) for one in engines(model) if getattr(one.optimizer, "optimizer", None) is first]
    frame = sys._getframe(1)
    while around and frame is not None:
        if any(frame.f_locals.get("self") is one for one in around[0]):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return first is not None and bool(around)


def prepared_optimizer(given: Any, model: nn.Module, first: dict[int, str], *, state: bool = True) -> PreparedOptimizer:
    """Facts of one optimizer; ``first`` gives each parameter's name by ``id``. ``state``: look at its state too."""
    optimizer = inner(given)
    engine = next((one for one in engines(model) if optimizer_of(one, optimizer)), None)
    if engine is not None:
        params: Iterable[Any] = stepped(engine.optimizer)
        held = tuple(dict.fromkeys(first[id(param)] for param in params if id(param) in first))
        return PreparedOptimizer(name=type(optimizer).__name__, held=held, engine=True, **_rates(optimizer))
    slots = [param for group in optimizer.param_groups for param in group["params"]]
    here = {id(param) for param in slots}
    beneath = [name for slot in slots if id(slot) not in first for name in lent(slot, model)]
    known = getattr(optimizer, "state", {}) if state else {}
    return PreparedOptimizer(
        name=type(optimizer).__name__,
        held=tuple(dict.fromkeys((*(first[id(param)] for param in slots if id(param) in first), *beneath))),
        orphans=tuple(
            tuple(param.shape)
            for param in slots
            if id(param) not in first and param.requires_grad and not lent(param, model)
        ),
        lost=sum(bool(value) and isinstance(key, nn.Parameter) and id(key) not in here for key, value in known.items()),
        misfits=misfits(optimizer, first) if state else (),
        spoiled=spoiled(optimizer, first) if state else (),
        rounds=any(_says(source, name) for name in MASTERS for source in (*optimizer.param_groups, vars(optimizer))),
        **_rates(optimizer),
    )


def lent(slot: Any, model: nn.Module) -> list[str]:
    """Names of the model's parameters whose memory a tensor steps that has a gradient, and is none of them itself.

    As a piece of a flat buffer of which the parameters are views. One without a gradient was replaced, and steps none.
    """
    if getattr(slot, "grad", None) is None or type(slot.data) is not torch.Tensor:
        return []
    begin, end = slot.data_ptr(), slot.data_ptr() + slot.numel() * slot.element_size()
    named = [(name, one) for name, one in named_parameters(model).items() if type(one.data) is torch.Tensor]
    return [
        name
        for name, one in named
        if one.data_ptr() < end and begin < one.data_ptr() + one.numel() * one.element_size()
    ]


def _says(source: Any, name: str) -> bool:
    return source.get(name) is True


def _rates(optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    rates = tuple(rate for group in groups if (rate := as_rate(group.get("lr"))) is not None)
    name = type(optimizer).__name__
    keeps = name in KEEP_STATE or (name == "SGD" and all(group.get("momentum") for group in groups))
    kept = keeps and not getattr(optimizer, "state", None)
    scheduled = any("initial_lr" in group for group in groups)
    found = {"fresh": kept, "counted": counted(optimizer), "rates": rates, "scheduled": scheduled}
    return found | {"idle_decay": _idle_decay(groups)}


def _idle_decay(groups: list[dict[str, Any]]) -> float:
    known = [(bool(group["params"]), as_rate(group.get("weight_decay")) or 0.0) for group in groups]
    if not any(holds for holds, _ in known) or any(holds and decay for holds, decay in known):
        return 0.0
    return max(decay for _, decay in known)


def counted(optimizer: Any) -> int | None:
    """The highest count of steps in its state that stands on the CPU, where reading one waits for nobody; else None."""
    found = -1
    for state in getattr(optimizer, "state", {}).values():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, int | float) or (isinstance(step, Tensor) and step.device.type == "cpu"):
            found = max(found, int(step))
    return None if found < 0 else found


def as_rate(rate: Any) -> float | None:
    """A learning rate as a number; None where it is none, as of an Adafactor that finds its own."""
    if isinstance(rate, Tensor):
        known = rate.numel() == 1 and rate.device.type != "meta" and not isinstance(rate, FakeTensor)
        return float(rate) if known else None
    return float(rate) if isinstance(rate, Real) else None


def options(optimizers: Iterable[Any]) -> dict[str, object]:
    """Return what every rank should step with alike: classes, and the options of all groups that are words or numbers.

    Numbers to seven digits, as float32 holds them; a rate that is a tensor is read, which waits for its device.
    """
    known = [inner(one) for one in optimizers]
    found: dict[str, object] = {f"class of optimizer {at}": type(one).__name__ for at, one in enumerate(known)}
    for at, group in enumerate(group for one in known for group in one.param_groups):
        for key, value in sorted(group.items()):
            plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if _is_plain(plain):
                found[f"{key} of group {at}"] = float(f"{plain:.7g}") if isinstance(plain, float) else plain
    return found


def grouped(optimizers: Iterable[Any], first: Mapping[int, str]) -> Groups:
    """Each group with its parameters and its options but for rates; ``first``: names by identity, of others none."""
    found = []
    for group in (
        group for one in optimizers for group in getattr(inner(one), "param_groups", ())
    ):  # what offloads without an optimizer has none
        held = tuple(first[id(param)] for param in group["params"] if id(param) in first)
        said = {key: value for key, value in group.items() if key not in RATES and _is_plain(value)}
        found.append((held, tuple((key, str(value)) for key, value in sorted(said.items()))))
    return tuple(found)


def _is_plain(value: object) -> bool:
    """True for an option: a word, a number, or some, as betas are."""
    if isinstance(value, tuple):
        return all(isinstance(one, bool | int | float | str) for one in value)
    return isinstance(value, bool | int | float | str)


def unlike(everyone: Sequence[dict[str, object]]) -> tuple[Unlike, ...]:
    """The first options that differ between these ranks, with who has which."""
    called = dict.fromkeys(name for own in everyone for name in own)
    apart = [name for name in called if len({own.get(name) for own in everyone}) > 1]
    return tuple(Unlike(name=name, held=_holders([own.get(name, "absent") for own in everyone])) for name in apart[:3])


def _holders(values: Sequence[object]) -> str:
    """Values with the ranks that hold them, as ``0.1 on rank 0, 0.2 on ranks 1-3``; the first few."""
    holders: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    shown = [f"{value} on rank{'s' * (len(at) > 1)} {spans(tuple(at))}" for value, at in list(holders.items())[:4]]
    return ", ".join(shown) + ", ..." * (len(holders) > 4)


def short_digest(value: object) -> float:
    """A number below 2**24, which float32 holds, that is the same for values of the same ``repr``."""
    return float(zlib.crc32(value if isinstance(value, bytes) else repr(value).encode()) & 0xFFFFFF)


def prepared_scheduler(given: Any, optimizers: list[Any]) -> PreparedScheduler:
    """Facts of one scheduler, and whether it drives one of the optimizers."""
    scheduler = inner(given)
    driven = inner(getattr(scheduler, "optimizer", None))
    groups = getattr(driven, "param_groups", None)
    drives = any(
        one is driven or (groups is not None and getattr(one, "param_groups", None) is groups)
        for given_one in optimizers
        for one in (inner(given_one), getattr(inner(given_one), "optimizer", None))
        if one is not None
    )
    return PreparedScheduler(
        name=type(scheduler).__name__,
        drives_optimizer=drives or driven is None,
        horizon=horizon(scheduler),
        early=_early(scheduler),
        ticked=last if isinstance(last := getattr(scheduler, "last_epoch", None), int) else None,
        ticks=ticks_of(given),
        by_batch=isinstance(scheduler, OneCycleLR) or type(scheduler).__name__ in BY_BATCH,
        factor=_factor(scheduler),
        end=end_of_factors(scheduler),
        warm=_warm(scheduler),
    )


TICKS = (0, *(1 << at for at in range(0, 24, 2)))
"""At which a factor is asked for."""


def _factor(scheduler: Any) -> tuple[float, float] | None:
    """As of ``PreparedScheduler``. A function may know no more than its ticks."""
    if not isinstance(scheduler, LambdaLR):
        return None
    rates, functions = scheduler.base_lrs, scheduler.lr_lambdas
    if not all(isinstance(one, FunctionType) for one in functions):
        return None
    found = []
    with suppress(Exception):  # of the program's own function, past its end
        found += [float(functions[0](at)) for at in TICKS]
    return (float(rates[0]), max(found)) if found else None


WARMS = 2048
"""Ticks that a warm-up may have."""


def _warm(scheduler: Any) -> int:
    """As of ``PreparedScheduler``. A function may know no more than its ticks."""
    functions = scheduler.lr_lambdas if isinstance(scheduler, LambdaLR) else ()
    if not functions or not isinstance(functions[0], FunctionType):
        return 0
    found = list[float]()
    with suppress(Exception):  # of the program's own function, past its end
        for at in range(WARMS):
            found.append(float(functions[0](at)))
    most = max(found, default=0.0)
    return next((at for at, one in enumerate(found) if one * 2 >= most), 0)


def end_of_factors(scheduler: Any) -> int | None:
    """The tick from which the function of a LambdaLR gives one factor, less than half of its largest; None: none is.

    Of a schedule whose ``horizon`` is in its function, and cannot be read.
    """
    functions = scheduler.lr_lambdas if isinstance(scheduler, LambdaLR) else ()
    if not functions or not all(isinstance(one, FunctionType) for one in functions):
        return None
    with suppress(Exception):  # of the program's own function, past its end
        given = [float(functions[0](at)) for at in TICKS]
        last, end, begin = given[-1], TICKS[-1], 0
        if len(given) < 2 or given[-2] != last or last * 2 > max(given):
            return None
        while end - begin > 1:
            middle = (begin + end) // 2
            begin, end = (begin, middle) if float(functions[0](middle)) == last else (middle, end)
        return end if float(functions[0](end - end // 10)) > max(given) / 1000 else None  # rounding ends an exponential
    return None


def _early(scheduler: Any) -> int:
    """Ticks since it was made: torch counts them, the one of its construction as the first."""
    count = getattr(scheduler, "_step_count", 1)
    return max(0, count - 1) if isinstance(count, int) else 0


def ticks_of(given: Any) -> int:
    """Ticks for each step: accelerate's wrapper makes one per process, unless batches are split."""
    if not type(given).__module__.startswith("accelerate.") or not hasattr(given, "step_with_optimizer"):
        return 1
    state: Any = sys.modules["accelerate.state"]  # the wrapper has imported it
    told = given.step_with_optimizer and not given.split_batches and bool(state.AcceleratorState._shared_state)
    return int(state.AcceleratorState().num_processes) if told else 1


def engine_facts(model: nn.Module) -> EngineFacts | None:
    """Return what the first DeepSpeed engine was told; None without one."""
    for engine in engines(model):
        scheduler = engine.lr_scheduler
        return EngineFacts(
            stage=int(engine.zero_optimization_stage()),
            micro_batch=int(engine.train_micro_batch_size_per_gpu()),
            accumulation=int(engine.gradient_accumulation_steps()),
            scheduler=type(scheduler).__name__ if scheduler is not None else None,
            clipping=float(engine.gradient_clipping() or 0.0),
        )
    return None


def accumulation(*given: Any) -> int | None:
    """Micro-batches per step that accelerate counts in this process; None where it has prepared none of what is given.

    An ``Accelerator`` that was made for something else in the process leaves its count behind.
    """
    state: Any = sys.modules.get("accelerate.state")
    if state is None or not any(getattr(one, "_is_accelerate_prepared", False) for one in given):
        return None
    shared = state.GradientState._shared_state
    plugin = shared.get("plugin_kwargs") or {}
    return int(plugin["num_steps"]) if "num_steps" in plugin else None


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum")
"""State of torch's own optimizers that has the shape of its parameter."""


def _states(optimizer: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    state = getattr(optimizer, "state", None) or {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in state and isinstance(held := state[param], dict):
                yield param, held


def misfits(optimizer: Any, first: dict[int, str]) -> tuple[str, ...]:
    """Names of parameters whose moments have another shape; of torch's own classes, which are known to share it."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ()
    return tuple(
        first[id(param)]
        for param, held in _states(optimizer)
        if id(param) in first
        and any(isinstance(held.get(name), Tensor) and held[name].shape != param.shape for name in MOMENTS)
    )


def spoiled(optimizer: Any, first: dict[int, str]) -> tuple[str, ...]:
    """Names of parameters with state that is not finite on this rank."""
    return tuple(
        first[id(param)]
        for param, held in _states(optimizer)
        if id(param) in first and any(map(_is_spoiled, held.values()))
    )


def _is_spoiled(value: Any) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.device.type == "meta":
        return False
    part = local(value).detach()
    if type(part) is not Tensor or not part.is_floating_point() or part.element_size() < 2 or not part.numel():
        return False  # of eight bits: what its bytes mean is known to its class alone
    return not torch.isfinite(part.sum(dtype=torch.float64)).item()


def held_alike(optimizer: Any, names: dict[int, str]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return what it keeps for the parameters that are named, in numbers that are equal where the state is."""
    return [
        (names[id(param)], [(key, _number(value)) for key, value in sorted(held.items())])
        for param, held in _states(optimizer)
        if id(param) in names and held
    ]


def kept_of(optimizer: Any, names: dict[int, str]) -> Iterator[str]:
    """Yield those of the named parameters for which it keeps a tensor that is not all zeros."""
    for param, kept in _states(optimizer):
        tensors = (one for one in kept.values() if isinstance(one, Tensor) and one.numel() > 1 and not one.is_meta)
        if id(param) in names and any(bool(local(one).any()) for one in tensors):
            yield names[id(param)]


def _number(value: Any) -> Any:
    if isinstance(value, DTensor) or (isinstance(value, Tensor) and type(value) is not Tensor):
        return "a part"
    if isinstance(value, Tensor):
        return fingerprint(value) if value.device.type != "meta" else "meta"
    return value if isinstance(value, bool | int | float | str) else ""


def steps_copies(model: nn.Module, optimizer: Any) -> bool:
    """Return whether it steps what seem to be copies of the model's parameters, to which the program hands gradients.

    One for each, as masters of other precision; or flat ones, of all or of the part of one rank.
    """
    mine = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    rest = [param for param in model.parameters() if param.requires_grad and id(param) not in mine]
    given = [param for param in mine.values() if param.grad is not None]
    if not rest or not given or not reads_gradients():
        return False
    if [param.shape for param in rest] == [param.shape for param in mine.values()]:
        return True
    whole, flat = (sum(param.numel() for param in each) for each in (rest, mine.values()))
    padded = any(whole <= flat * ranks < whole + SLACK * ranks for ranks in (1, world().size))
    return padded and all(param.dim() == 1 for param in mine.values())


SLACK = 64
"""Elements for each rank by which what is flat may be longer than all that lies in it."""


def named_as_program(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Each under the name that the program has for it, the innermost function first; else under its number."""
    scopes = [held for one in own_frames() for held in (one.f_locals, one.f_globals)]
    found: dict[str, Any] = {}
    for at, tensor in enumerate(tensors):
        said = (name for held in scopes for name, value in held.items() if value is tensor and "." not in name)
        found[next((name for name in said if name not in found), str(at))] = tensor
    return found
