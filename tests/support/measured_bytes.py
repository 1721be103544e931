"""Bytes that real torch objects hold and send after one optimizer step of a plan, beside what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._flat_param as flat_collectives
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._runtime_utils as flat_reductions
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES as RESHARDING
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from prepkit.applying.step_kinds import handlers
from prepkit.config import DDP, TensorParallel
from prepkit.facts import Env
from prepkit.interpreter import Done, interpret
from prepkit.objects import fsdp1_flat
from prepkit.objects.target import Target
from prepkit.observe import observe
from prepkit.plan import Plan
from prepkit.planner import plan
from prepkit.predict import predict
from prepkit.predict.prediction import Label
from prepkit.steps import Agree, StartProcessGroup
from prepkit.training import drivers
from tests.support.drawn_models import Case

TOKENS = torch.arange(12).reshape(2, 6)


@frozen(kw_only=True)
class Row:
    """One number of one rank."""

    case: str
    world: int
    rank: int
    what: str
    predicted: int
    measured: int
    exact: bool

    @property
    def holds(self) -> bool:
        return self.predicted == self.measured if self.exact else self.predicted >= self.measured


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors."""
    seen: dict[object, int] = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        seen[storage.data_ptr() or id(local)] = storage.nbytes()
    return sum(seen.values())


def made_plan(case: Case, model: nn.Module, optimizer: Any, world: int) -> Plan:
    env = Env(world_size=world, device="cpu", torch=torch.__version__)
    made = plan(case.cfg, observe(model, optimizer=optimizer, env=env).facts)
    assert made.value_or(None) is not None, f"{case}: {made.failure()}"
    return made.unwrap()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes of the whole buffers of the collectives of FSDP1 and FSDP2, by kind."""
    sent: Counter[str] = Counter()

    def watched(name: str, kind: str, which: str, place: int) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            buffers = kwargs[which] if which in kwargs else args[place]
            some = buffers if isinstance(buffers, list) else [buffers]
            sent[kind] += sum(buffer.numel() * buffer.element_size() for buffer in some)
            sent[f"{kind} calls"] += 1
            return real(*args, **kwargs)

        return staticmethod(call)

    names = {n: staticmethod(v) if callable(v) and not isinstance(v, type) else v for n, v in vars(dist).items()}
    names["all_gather_single"] = watched("all_gather_single", "all-gather", "output_tensor", 0)
    names["all_gather"] = watched("all_gather", "all-gather", "tensor_list", 0)  # of FSDP1 on a CPU
    names["reduce_scatter_single"] = watched("reduce_scatter_single", "reduce-scatter", "input", 1)
    names["all_reduce"] = watched("all_reduce", "all-reduce", "tensor", 0)
    watchers = (collectives, flat_collectives, flat_reductions)
    for module in watchers:
        module.dist = type("Counted", (), names)  # type: ignore[attr-defined]
    try:
        yield sent
    finally:
        for module in watchers:
            module.dist = dist  # type: ignore[attr-defined]


def measure(case: Case, rank: int, world: int) -> list[Row]:
    """Applies the case's plan under the group that runs, trains one optimizer step, and compares."""
    model = case.model()
    optimizer = case.make_optimizer(model)
    planned = made_plan(case, model, optimizer, world)
    target = Target(model=model, optimizer=optimizer)
    skipped = (StartProcessGroup, Agree)
    outcome = interpret(tuple(p.step for p in planned.steps if not isinstance(p.step, skipped)), handlers(), target)
    assert isinstance(outcome, Done), str(outcome)
    if isinstance(target.model, DistributedDataParallel):
        found = _ddp(target, planned)
    elif isinstance(target.model, FullyShardedDataParallel):
        found = _fsdp1(target, planned)
    elif isinstance(planned.config.engine, TensorParallel):
        _backward(target.model)
        target.optimizer.step()
        found = _at_rest(target)
    else:
        found = _fsdp2(target, planned)
    return _compare(case, planned, found, rank, world)


def _backward(model: nn.Module) -> None:
    model(TOKENS).float().square().mean().backward()


def _at_rest(target: Target) -> dict[str, int]:
    params = list(target.model.parameters())
    state = [value for entry in target.optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return {
        "parameters": held(params),
        "gradients": held(p.grad for p in params if p.grad is not None),
        "module buffers": held(target.model.buffers()),
        "optimizer state": held(state),
    }


def _fsdp2(target: Target, planned: Plan) -> dict[str, int]:
    model = target.model
    assert isinstance(model, FSDPModule)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    found: dict[str, int] = {}
    micro = planned.owners.accumulation_steps
    with counted() as sent:
        for index in range(micro):
            model.set_requires_gradient_sync(index == micro - 1)
            _backward(model)
            if index == 0 and micro > 1:
                found["whole gradients"] = held(_waiting(units))
    target.optimizer.step()
    found |= dict(sent)
    return found | _at_rest(target) | {"gathered units": _gathered(model, units)}


def _groups(unit: nn.Module) -> list[Any]:
    return list(unit._get_fsdp_state()._fsdp_param_groups)  # type: ignore[operator]


def _waiting(units: list[Any]) -> Iterator[Tensor]:
    for unit in units:
        for group in _groups(unit):
            for param in group.fsdp_params:
                grad = param.unsharded_accumulated_grad
                grad = grad if grad is not None else getattr(param, "_unsharded_param", torch.zeros(0)).grad
                if grad is not None:
                    yield grad


def _gathered(model: nn.Module, units: list[Any]) -> int:
    """The root, and the most that a unit with the units around it holds; all of them where none is freed."""
    paths = {module: path for path, module in model.named_modules()}
    own: dict[str, int] = {}
    for unit in units:
        unit.unshard()
        own[paths[unit]] = held(t for g in _groups(unit) for p in g.fsdp_params for t in p.all_gather_outputs)
        unit.reshard()
    root = own.pop("")
    if all(not g.post_forward_mesh_info for unit in units for g in _groups(unit)):
        return root + sum(own.values())
    return root + _chains(own)


def _fsdp1(target: Target, planned: Plan) -> dict[str, int]:
    model = target.model
    handles = {path: unit._handle for path, unit in fsdp1_flat.units(model).items() if unit._handle is not None}
    found: dict[str, int] = {}
    micro = planned.owners.accumulation_steps
    with counted() as sent:
        for index in range(micro):
            drivers.sync_fsdp1(fsdp1_flat.units(model).values(), index == micro - 1)
            _backward(model)
            if index == 0 and micro > 1 and any(handle.uses_sharded_strategy for handle in handles.values()):
                found["whole gradients"] = held(
                    h.flat_param.grad for h in handles.values() if h.flat_param.grad is not None
                )
    target.optimizer.step()
    kept = [h.flat_param._local_shard if h.uses_sharded_strategy else h.flat_param for h in handles.values()]
    flats = [handle.flat_param.grad for handle in handles.values() if handle.flat_param.grad is not None]
    ignored = [p for p in model.parameters() if id(p) in {id(q) for q in model._ignored_params}]
    found |= dict(sent) | _at_rest(target)
    found["parameters"] = held([*kept, *ignored])
    found["gradients"] = held([*flats, *(p.grad for p in model.parameters() if p.grad is not None)])
    return found | {"gathered units": _unsharded(model, handles)}


def _unsharded(model: nn.Module, handles: dict[str, Any]) -> int:
    """As ``_gathered``, of flat parameters."""
    own: dict[str, int] = {}
    for path, handle in handles.items():
        if handle.uses_sharded_strategy:
            handle.pre_unshard()
            handle.unshard()
            own[path] = held([handle._get_padded_unsharded_flat_param()])
            handle.reshard(free_unsharded_flat_param=True)
    keeps = not any(handle._sharding_strategy in RESHARDING for handle in handles.values())
    root = own.pop("", 0)
    return root + (sum(own.values()) if keeps else _chains(own))


def _chains(own: dict[str, int]) -> int:
    return max(
        (sum(size for around, size in own.items() if path == around or path.startswith(f"{around}.")) for path in own),
        default=0,
    )


def _ddp(target: Target, planned: Plan) -> dict[str, int]:
    model = target.model
    buckets: list[Tensor] = []

    def watch(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    watch.__annotations__.clear()  # torch compares them with classes, and they are text here
    model.register_comm_hook(None, watch)
    for _ in range(2):  # buckets are built anew after the first iteration
        buckets.clear()
        target.optimizer.zero_grad()
        _backward(model)
    target.optimizer.step()
    found = _at_rest(target)
    sizes = sum(b.numel() * b.element_size() for b in buckets)
    found |= {"all-reduce": sizes, "buckets": held(buckets)}
    if planned.config.engine.gradient_as_bucket_view:  # type: ignore[union-attr]
        found["buckets"] = held([*buckets, *(p.grad for p in model.parameters() if p.grad is not None)])
        found["gradients"] = 0
    return found


def _compare(case: Case, planned: Plan, found: dict[str, int], rank: int, world: int) -> list[Row]:
    made = predict(planned)
    mine = made.at(rank)
    expected = {category: mine.category(category) for category in found if not _is_traffic(category)}  # type: ignore[arg-type]
    expected["whole gradients"] = sum(t.bytes for t in mine.terms if t.what.startswith("whole gradients"))
    bounded: set[str] = set()
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        some = [one for one in made.traffic if one.collective == kind]
        expected[kind] = sum(one.bytes for one in some)
        expected[f"{kind} calls"] = sum(one.calls for one in some)
        if any(one.label is not Label.EXACT for one in some):
            bounded |= {kind, f"{kind} calls"}
    if isinstance(planned.config.engine, DDP):
        del expected["all-reduce calls"]  # the order in which gradients become ready moves the borders of buckets
    return [
        Row(
            case=f"{case.seed} {case}",
            world=world,
            rank=rank,
            what=what,
            predicted=value,
            measured=found.get(what, 0),
            exact=what not in bounded,
        )
        for what, value in expected.items()
        if what in found or value
    ]


def _is_traffic(what: str) -> bool:
    return what.startswith(("all-", "reduce-"))


def shrunk(rows: list[Row]) -> list[Row]:
    """Rows without the seed, for tables."""
    return [evolve(row, case=row.case.partition(" ")[2]) for row in rows]
