"""What has to hold of every prepared model, whatever its steps: tensors, ties, buffers, optimizer, scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from prepkit.applying.checks import fsdp1, optimizer
from prepkit.objects.local_part import local
from prepkit.objects.state import LiveModel, actual_layout, planned_layout
from prepkit.plan import Plan
from prepkit.plan.attestation import Check, each
from prepkit.steps import InitializeDeepSpeed

CASTS_BUFFERS: tuple[type, ...] = (InitializeDeepSpeed,)
"""Step kinds that change the dtype of buffers."""


def checks(plan: Plan, live: LiveModel, rank: int) -> Iterator[Check]:
    """Parameters, master weights, ties, buffers, optimizer and scheduler of this rank; reads no tensor's data."""
    yield from _parameters(plan, live, rank)
    yield from _masters(plan, live)
    yield from _attributes(plan, live)
    yield from _ties(plan, live)
    yield from _buffers(plan, live)
    if not any(isinstance(planned.step, InitializeDeepSpeed) for planned in plan.steps):
        yield from optimizer.slots(plan, live)  # DeepSpeed's optimizer has slots of its own, and a check of its own
        yield from optimizer.coverage(plan, live)
    yield from optimizer.scheduler(plan, live)


def _parameters(plan: Plan, live: LiveModel, rank: int) -> Iterator[Check]:
    for layout in plan.layout:
        if layout.flat is not None or "split" in layout.placements:
            continue  # flat parts are looked at below; DeepSpeed decides which way it splits which layer
        param = live.params.get(layout.name)
        if param is None:
            yield Check(subject=layout.name, what="exists", holds=False, detail="the model has no such parameter")
        else:
            bad = planned_layout(layout, plan.mesh, rank).against(actual_layout(param))
            yield Check(subject=layout.name, what="layout", holds=not bad, detail="; ".join(bad))
    for name, wrong in fsdp1.wrong_parts(plan, live, rank):
        yield Check(subject=name, what="layout", holds=not wrong, detail="; ".join(wrong))
    known = {layout.name for layout in plan.layout} | {name for group in plan.facts.model.ties for name in group}
    known |= fsdp1.flat_names(plan)
    tied = {id(live.params[name]) for name in known if name in live.params}  # also where a module is shared
    unknown = [name for name, param in live.params.items() if name not in known and id(param) not in tied]
    yield each("model", "no parameter that the plan does not know", unknown)


def _attributes(plan: Plan, live: LiveModel) -> Iterator[Check]:
    """What somebody has set on parameters is on those that took their place."""
    wanted = [(name, key) for name, key in plan.facts.model.param_attributes if name in live.params]
    if wanted:
        bad = [f"{name}.{key} is gone" for name, key in wanted if not hasattr(live.params[name], key)]
        yield each("model", "attributes set on parameters are there", bad)


def _ties(plan: Plan, live: LiveModel) -> Iterator[Check]:
    gone = {layout.name for layout in plan.layout if layout.flat is not None and not layout.flat.original}
    for group in plan.facts.model.ties:
        if gone.intersection(group):
            continue  # one flat parameter holds it, once
        params = {id(live.params.get(name)) for name in group}
        detail = f"{' and '.join(group)} are no longer one parameter" if len(params) > 1 else ""
        yield Check(subject=group[0], what="tied", holds=not detail, detail=detail)


def meta(live: LiveModel) -> Iterator[Check]:
    """Every tensor has data."""
    tensors = {**live.params, **live.buffers}
    left = [name for name, tensor in tensors.items() if local(tensor).device.type == "meta"]  # MS-AMP knows no is_meta
    yield each("model", "nothing is left on meta", left)


def _masters(plan: Plan, live: LiveModel) -> Iterator[Check]:
    """Float32 where the plan's owner of master weights says so; pain 2."""
    if not plan.run.master_weights_in_place:
        return
    bad = [
        f"{name} is {actual_layout(param).dtype}"
        for name, param in live.params.items()
        if param.requires_grad and param.is_floating_point() and param.element_size() < 4
    ]
    yield each("model", "trainable parameters are their own master weights", bad)


def _buffers(plan: Plan, live: LiveModel) -> Iterator[Check]:
    casts = any(isinstance(planned.step, CASTS_BUFFERS) for planned in plan.steps)
    bad = []
    for fact in plan.facts.model.buffers:
        buffer = live.buffers.get(fact.name)
        if buffer is None:
            bad.append(f"{fact.name} is gone")
            continue
        shape, dtype = tuple(buffer.shape), fact.dtype if casts else _dtype(buffer)
        if (shape, dtype) != (fact.shape, fact.dtype):
            bad.append(f"{fact.name} planned {fact.dtype}{list(fact.shape)}, found {dtype}{list(shape)}")
    known = {fact.name for fact in plan.facts.model.buffers}
    bad += [f"{name} was not planned" for name in live.buffers if name not in known and not _alias(name, live, known)]
    yield each("model", "buffers are those of the plan", bad)


def _alias(name: str, live: LiveModel, known: set[str]) -> bool:
    """Whether it is a second way to a planned buffer, as a shared module has."""
    return any(live.buffers[name] is live.buffers.get(other) for other in known)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
