"""Whether the parts of a plan in a file fit each other, as those of every plan do that prepkit makes.

Digests find edits and damage; a file whose digests were made anew may still hold an index that leads nowhere. What
reads a plan (its text, its bytes, its rules) trusts these places, so they are looked at once, when the file is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from math import prod

from prepkit.codec.text import inside, refusal, shown
from prepkit.facts import Facts
from prepkit.findings import Finding
from prepkit.plan import Plan
from prepkit.plan.layout import ParamLayout, sharded_dim
from prepkit.steps import Axis, InitializeDeepSpeed, ShardUnits, Step, WrapDDP, WrapFSDP1

DIMS = 64
"""Dimensions of a tensor, as torch has them at most."""
MOST = 100
"""Findings of one plan; a hostile file has no say over how many there are."""
_LARGEST_BUCKET = 2.0**42


def inconsistencies(plan: Plan, where: str) -> tuple[Finding, ...]:
    """What does not fit, at most ``MOST`` places. Linear in the plan."""
    facts = inside(where, "facts")
    return tuple(islice((*_facts(plan.facts, facts), *_outcome(plan, where), *_steps(plan, where)), MOST))


def _facts(facts: Facts, where: str) -> Iterator[Finding]:
    env, model = facts.env, inside(where, "model")
    if env.world_size < 1:
        yield _wrong(inside(inside(where, "env"), "world_size"), f"{env.world_size} processes hold no plan")
    for index, loader in enumerate(facts.loaders):
        if loader.batch_size is not None and loader.batch_size < 1:
            place = inside(inside(inside(where, "loaders"), index), "batch_size")
            yield _wrong(place, f"batches of {loader.batch_size} samples")
    modules, classes = facts.model.modules, len(facts.model.classes)
    if not modules or modules[0].path:
        yield _wrong(inside(model, "modules"), "the first module is not the root, whose path is empty")
    known: set[str] = set()
    for index, module in enumerate(modules):
        place = inside(inside(model, "modules"), index)
        if not 0 <= module.cls < classes:
            yield _wrong(inside(place, "cls"), f"there is no class {module.cls}, only {classes} of them")
        if module.path in known:
            yield _wrong(inside(place, "path"), f"{shown(module.path)} appears twice")
        known.add(module.path)
    for index, param in enumerate(facts.model.params):
        if not _is_shape(param.shape):
            yield _wrong(inside(inside(inside(model, "params"), index), "shape"), f"{shown(param.shape)} is no shape")


def _is_shape(shape: tuple[int, ...]) -> bool:
    return len(shape) <= DIMS and all(0 <= size < 2**62 for size in shape)


def _outcome(plan: Plan, where: str) -> Iterator[Finding]:
    """Mesh and layout: every axis has ranks, and every parameter lies on axes that there are."""
    place = inside(where, "mesh")
    for index, axis in enumerate(plan.mesh):
        if axis.size < 1:
            yield _wrong(inside(inside(place, index), "size"), f"an axis of {axis.size} ranks")
    if plan.mesh and prod(axis.size for axis in plan.mesh) != plan.world_size:
        yield _wrong(place, f"the axes do not multiply to the world size, {plan.world_size}")
    place = inside(where, "layout")
    params = plan.facts.model.params
    if len(plan.layout) != len(params):
        yield _wrong(place, f"{len(plan.layout)} layouts of {len(params)} parameters")
    for index, (layout, param) in enumerate(zip(plan.layout, params, strict=False)):
        if layout.name != param.name:
            what = f"{shown(layout.name)} stands where the facts have {shown(param.name)}"
            yield _wrong(inside(inside(place, index), "name"), what)
        for field, what in _layout(layout, plan.mesh):
            yield _wrong(inside(inside(place, index), field), what)


def _layout(layout: ParamLayout, mesh: tuple[Axis, ...]) -> Iterator[tuple[str, str]]:
    dims = [dim for dim in map(sharded_dim, layout.placements) if dim is not None]
    if not _is_shape(layout.shape) or any(dim >= len(layout.shape) for dim in dims):
        yield "shape", f"{shown(layout.shape)} cannot be placed as {', '.join(layout.placements) or 'it is'}"
    if len(layout.placements) > len(mesh):
        yield "placements", f"{len(layout.placements)} placements on {len(mesh)} axes"
    flat = layout.flat
    if flat is not None and not (
        0 <= flat.start <= flat.size < 2**62 and flat.shards >= 1 and (mesh or flat.shards == 1)
    ):
        yield "flat", f"{shown(flat)} is no place in a flat parameter"


def _steps(plan: Plan, where: str) -> Iterator[Finding]:
    for index, planned in enumerate(plan.steps):
        place = inside(inside(inside(where, "steps"), index), "step")
        yield from _step(planned.step, plan, place)


def _step(step: Step, plan: Plan, where: str) -> Iterator[Finding]:
    match step:
        case ShardUnits(units=units):
            if not units:
                yield _wrong(inside(where, "units"), "nothing is sharded")
            for unit in units:
                if not isinstance(unit.reshard_after_forward, bool) and unit.reshard_after_forward < 1:
                    yield _wrong(
                        inside(where, "units"), f"{shown(unit.path)} is resharded to {unit.reshard_after_forward} ranks"
                    )
        case WrapFSDP1(units=()):
            yield _wrong(inside(where, "units"), "nothing is sharded")
        case WrapDDP(bucket_cap_mb=size) if not 0 < size < _LARGEST_BUCKET:
            yield _wrong(inside(where, "bucket_cap_mb"), f"{size:g} MiB is no size of a bucket")
        case InitializeDeepSpeed(data_parallel=ranks):
            if ranks < 1 or plan.world_size % ranks:
                yield _wrong(inside(where, "data_parallel"), f"{ranks} does not divide {plan.world_size} ranks")
            if not plan.layout:
                yield _wrong(inside(where, "names"), "there is no parameter to train")
            for number, setting in enumerate(step.settings):
                if not _is_json(setting.value):
                    place = inside(inside(inside(where, "settings"), number), "value")
                    yield _wrong(place, f"{shown(setting.value)} is not JSON")
        case _:
            pass


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _wrong(where: str, what: str) -> Finding:
    return refusal("inconsistent", where, what, "plan again; a plan is not edited by hand")
