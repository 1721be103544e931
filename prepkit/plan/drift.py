"""Facts at plan time against facts at apply time; those of an audit against a later step are in ``auditing.drift``.

Three kinds, three answers: another model, or a model that has changed since, is refused with two different messages;
the rest is shown and let through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from attrs import frozen

from prepkit.facts import Env, Facts, ModelFacts, OptimizerFacts

DriftKind = Literal["identity", "state", "environment", "note"]


@frozen
class Drift:
    """One fact that differs between plan time and apply time, with both values as text."""

    nature: DriftKind
    """``identity``: another model; ``state``: the same, changed; ``environment``: another launch; ``note``: no harm."""
    where: str
    planned: str
    now: str

    def __str__(self) -> str:
        return f"{self.where}: planned {self.planned}, now {self.now}"


def drift(planned: Facts, now: Facts) -> tuple[Drift, ...]:
    """Every fact that differs, identity first. Facts that the plan only assumed are held to all the same.

    A fact that was open when the plan was made differs from nothing: ``planner.since`` asks the rules again with it.
    """
    return (
        *_identity(planned.model, now.model),
        *_state(planned, now),
        *_environment(planned.env, now.env),
    )


def _identity(planned: ModelFacts, now: ModelFacts) -> Iterator[Drift]:
    for noun, before, after in (
        ("parameter", _tensors(planned), _tensors(now)),
        ("buffer", _buffers(planned), _buffers(now)),
        ("module", _classes(planned), _classes(now)),
    ):
        for name in dict.fromkeys((*before, *after)):
            if before.get(name) != after.get(name):
                yield Drift(
                    "identity", f"{noun} {name or '(root)'}", before.get(name, "absent"), after.get(name, "absent")
                )
    if planned.ties != now.ties:
        yield Drift("identity", "tied parameters", str(planned.ties or "none"), str(now.ties or "none"))


def _tensors(model: ModelFacts) -> dict[str, str]:
    return {p.name: f"{p.dtype}{list(p.shape)}" for p in model.params}


def _buffers(model: ModelFacts) -> dict[str, str]:
    return {b.name: f"{b.dtype}{list(b.shape)}" + ("" if b.persistent else " non-persistent") for b in model.buffers}


def _classes(model: ModelFacts) -> dict[str, str]:
    return {m.path: model.classes[m.cls].name for m in model.modules}


def _state(planned: Facts, now: Facts) -> Iterator[Drift]:
    old, new = planned.model, now.model
    was = {p.name: (p.requires_grad, p.cls) for p in old.params}
    for param in new.params:
        grad, cls = was.get(param.name, (param.requires_grad, param.cls))
        if grad != param.requires_grad:
            yield Drift("state", f"{param.name}.requires_grad", str(grad), str(param.requires_grad))
        if cls != param.cls:
            yield Drift("state", f"class of {param.name}", cls, param.cls)
    marks = {m.path: m.marks for m in old.modules}
    for module in new.modules:
        before = marks.get(module.path, module.marks)
        if before != module.marks:
            yield Drift("state", f"module {module.path or '(root)'}", _said(before), _said(module.marks))
    units = {unit.path: unit for unit in old.units}
    for unit in new.units:  # one that is gone, or is new, has another mark
        if (was_unit := units.get(unit.path, unit)) != unit:
            yield Drift("state", f"unit {unit.path or '(root)'}", str(was_unit), str(unit))
    if old.param_attributes != new.param_attributes:
        yield Drift("note", "attributes of parameters", str(old.param_attributes), str(new.param_attributes))
    for field in ("device_map", "quantised", "forward", "grad_inputs", "prepared", *_OF_PARAMS):
        if getattr(old, field) != getattr(new, field):
            yield Drift("state", f"model.{field}", str(getattr(old, field)), str(getattr(new, field)))
    yield from _objects(planned, now)


_OF_PARAMS = ("param_hooks", "strided", "self_written")


def _said(marks: tuple[str, ...]) -> str:
    return ", ".join(marks) or "untouched"


def _objects(planned: Facts, now: Facts) -> Iterator[Drift]:
    yield from _optimizer(planned.optimizer, now.optimizer)
    if planned.scheduler != now.scheduler:
        yield Drift("state", "scheduler", str(planned.scheduler or "none"), str(now.scheduler or "none"))
    if len(planned.loaders) != len(now.loaders):
        yield Drift("state", "number of loaders", str(len(planned.loaders)), str(len(now.loaders)))
    for index, (before, after) in enumerate(zip(planned.loaders, now.loaders, strict=False)):
        # How a loader draws decides how it is split; how much it draws does not.
        same = (before.sampler, before.iterable, before.custom_batches) == (
            after.sampler,
            after.iterable,
            after.custom_batches,
        )
        if before != after:
            yield Drift("note" if same else "state", f"loader {index}", str(before), str(after))


def _optimizer(planned: OptimizerFacts | None, now: OptimizerFacts | None) -> Iterator[Drift]:
    if planned is None or now is None:
        if planned is not now:
            yield Drift("state", "optimizer", planned.name if planned else "none", now.name if now else "none")
        return
    if (planned.module, planned.name) != (now.module, now.name):
        yield Drift("state", "optimizer", f"{planned.module}.{planned.name}", f"{now.module}.{now.name}")
    if [g.slots for g in planned.groups] != [g.slots for g in now.groups]:
        yield Drift("state", "optimizer's parameters", _groups(planned), _groups(now))
    if planned.stateful != now.stateful:
        before, after = len(planned.stateful), len(now.stateful)
        yield Drift("state", "optimizer state", f"{before} parameters have some", f"{after} have")
    for index, (before_, after_) in enumerate(zip(planned.groups, now.groups, strict=False)):
        if before_.options != after_.options:
            yield Drift("note", f"options of optimizer group {index}", str(before_.options), str(after_.options))


def _groups(optimizer: OptimizerFacts) -> str:
    return " + ".join(f"{len(group.slots)} in group {index}" for index, group in enumerate(optimizer.groups))


def _environment(planned: Env, now: Env) -> Iterator[Drift]:
    for field, kind in _ENVIRONMENT.items():
        before, after = getattr(planned, field), getattr(now, field)
        if before != after and before not in (None, ""):
            yield Drift(kind, f"env.{field}", str(before), str(after))


_ENVIRONMENT: dict[str, DriftKind] = {
    "world_size": "environment",
    "device": "environment",
    "per_node": "note",
    "memory": "note",
    "host_memory": "note",
    "capability": "note",
    "bf16": "note",
    "torch": "note",
    "python": "note",
    "libraries": "note",
    "variables": "note",
}
