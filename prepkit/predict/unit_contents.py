"""What the units of a model hold, without saying twice what is equal.

A model of many equal blocks has few kinds of units, and a unit has few kinds of parameters. So the formulas run over
kinds with their numbers: a prediction for 405 billion parameters takes milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from typing import assert_never

from attrs import frozen

from prepkit.plan import Plan
from prepkit.plan.layout import ParamLayout, chunk_rows, frees_after_forward, itemsize, sharded_dim
from prepkit.steps import (
    Axis,
    CheckpointModules,
    CreateOptimizer,
    OptimizerOption,
    ParallelizeModules,
    ShardUnits,
    WrapFSDP1,
)


@frozen
class ParamKind:
    """Parameters of one unit that are equal in everything that bytes depend on."""

    shape: tuple[int, ...]
    """Global shape; of a parameter that tensor parallelism cuts, the shape of the largest part."""
    size: int
    """Bytes of one element as stored."""
    floating: bool
    """Whether mixed precision casts it: its dtype is a floating one."""
    trains: bool
    """Whether it gets a gradient (``requires_grad``)."""
    group: int | None
    """Index of the optimizer's ``param_groups`` entry that steps it; None: no optimizer does."""
    grad_factor: int = 1
    """Elements of its gradient as autograd makes it, in multiples of its own elements.

    More than 1 for an embedding that tensor parallelism cuts by rows: torch makes its gradient with the rows of all
    ranks, and only then shards it.
    """
    start: int | None = None
    """Its first element in the flat parameter of its FSDP1 unit; None: it is in none."""

    @property
    def numel(self) -> int:
        """Elements of one, before the shard axis divides it."""
        return prod(self.shape)


@frozen
class UnitContent:
    """The parameters of a unit: each kind with how many there are of it."""

    params: tuple[tuple[ParamKind, int], ...]
    full: bool
    """Whether it is gathered and reduced in float32 whatever the others are: a batch norm."""

    def bytes(self, *, trained: bool = False) -> int:
        """Bytes of all parameters as stored; with ``trained`` of those that get a gradient."""
        return sum(param.numel * param.size * count for param, count in self.params if param.trains or not trained)

    def trains(self) -> bool:
        """Return whether any parameter gets a gradient."""
        return any(param.trains for param, _ in self.params)


@frozen
class UnitInstance:
    """One unit that owns parameters: where it is, what it holds, how long it stays gathered."""

    path: str
    """Module path; ``""`` is the root."""
    content: int
    """Index into ``Inputs.contents``."""
    reshard: bool | int
    """After forward: True, it is freed; False, it stays gathered until backward; a number, it is sharded over so many
    ranks (``reshard_after_forward`` of ``fully_shard``)."""
    stays: bool = False
    """Whether it stays gathered from one micro-batch to the next, until gradients are averaged (FSDP1
    ``SHARD_GRAD_OP``)."""


# --- units of a plan -------------------------------------------------------------------------------------------------


ShardingStep = ShardUnits | WrapFSDP1
"""The steps that shard a model."""


def units_of(plan: Plan, step: ShardingStep | None) -> tuple[tuple[UnitContent, ...], tuple[UnitInstance, ...]]:
    """The distinct contents of the plan's units, and the units themselves, as indices into those contents.

    ``step`` is the plan's step that shards; None: none does, and each unit of the layout counts as never freed.
    Units come in the step's order. A unit without parameters of its own, because smaller units inside it own them
    all, gathers nothing and is left out, and so are the parameters that the step ignores. Linear in the parameters.
    """
    groups = _groups(plan)
    full_grads = _full_gradients(plan)
    ignored = set(step.ignored) if isinstance(step, ShardUnits) else set()
    kinds: dict[str, Counter[ParamKind]] = {}
    for layout in plan.layout:
        if layout.name not in ignored:
            kinds.setdefault(layout.unit, Counter())[_kind(layout, groups, plan.mesh, full_grads)] += 1
    indices: dict[UnitContent, int] = {}
    units: list[UnitInstance] = []
    for path, (reshard, stays, full) in _gathering(step, kinds).items():
        if path in kinds:
            content = UnitContent(tuple(kinds[path].items()), full)
            units.append(UnitInstance(path, indices.setdefault(content, len(indices)), reshard, stays))
    return tuple(indices), tuple(units)


def whole_of(plan: Plan, step: ShardingStep | None) -> tuple[tuple[ParamKind, int], ...]:
    """Return what FSDP2 leaves whole on every rank: each kind of parameter with how many there are of it."""
    names = set(step.ignored) if isinstance(step, ShardUnits) else set()
    groups = _groups(plan) if names else {}
    kinds = Counter(_kind(layout, groups, plan.mesh, set()) for layout in plan.layout if layout.name in names)
    return tuple(kinds.items())


def _full_gradients(plan: Plan) -> set[str]:
    """Paths of the modules whose weight is cut by rows and gets a gradient of all rows: rowwise embeddings.

    Where such a weight is tied to a module that is cut otherwise, that one's gradient is a part already when the two
    are added, so the sum is one too.
    """
    styles = next((p.step.styles for p in plan.steps if isinstance(p.step, ParallelizeModules)), ())
    rowwise = {path for style in styles if style.style == "rowwise" for path in style.paths}
    for tie in plan.facts.model.ties:
        modules = {name.rpartition(".")[0] for name in tie}
        rowwise -= modules if modules - rowwise else set()
    return rowwise


def _gathering(step: ShardingStep | None, paths: Iterable[str]) -> dict[str, tuple[bool | int, bool, bool]]:
    """Unit path to ``UnitInstance.reshard``, ``UnitInstance.stays`` and ``UnitContent.full``.

    FSDP1 keeps its root gathered until backward, and under ``SHARD_GRAD_OP`` every unit until gradients are averaged
    (torch ``_post_forward_reshard``, ``_should_free_in_backward``).
    """
    match step:
        case ShardUnits(units=units):
            return {unit.path: (unit.reshard_after_forward, False, unit.full_precision) for unit in units}
        case WrapFSDP1(units=flat, sharding=sharding):
            frees = frees_after_forward(sharding)
            return {unit.path: (frees and bool(unit.path), not frees, unit.full_precision) for unit in flat}
        case None:
            return dict.fromkeys(paths, (False, False, False))
        case _:
            assert_never(step)


def tensor_cuts(layout: ParamLayout, mesh: tuple[Axis, ...]) -> Iterator[tuple[int, int]]:
    """The dim of a parameter that the tensor axis cuts, and over how many ranks; nothing for what it does not cut."""
    for placement, axis in zip(layout.placements, mesh, strict=False):
        if axis.name == "tensor" and (dim := sharded_dim(placement)) is not None:
            yield dim, axis.size


def _kind(layout: ParamLayout, groups: dict[str, int], mesh: tuple[Axis, ...], full_grads: set[str]) -> ParamKind:
    shape, grad_factor = list(layout.shape), 1
    for dim, ranks in tensor_cuts(layout, mesh):
        shape[dim] = chunk_rows(shape[dim], ranks)
        if dim == 0 and layout.name.rpartition(".")[0] in full_grads:  # a rowwise linear layer is cut in dim 1
            grad_factor = ranks
    return ParamKind(
        shape=tuple(shape),
        size=itemsize(layout.dtype),
        floating="float" in layout.dtype,
        trains=layout.requires_grad,
        group=groups.get(layout.name) if layout.requires_grad else None,
        grad_factor=grad_factor,
        start=layout.flat.start if layout.flat else None,
    )


def _groups(plan: Plan) -> dict[str, int]:
    """Parameter name to the index of the optimizer group that steps it."""
    created = [p.step for p in plan.steps if isinstance(p.step, CreateOptimizer)]
    if created:
        groups = (names for step in created for names, _ in created_groups(step))
        return {name: index for index, names in enumerate(groups) for name in names}
    seen = plan.facts.optimizer
    return {name: i for i, group in enumerate(seen.groups) for name in group.slots if name} if seen else {}


def created_groups(step: CreateOptimizer) -> tuple[tuple[tuple[str, ...], tuple[OptimizerOption, ...]], ...]:
    """Names and options of each group that the step makes; of an option that is said twice the last one counts."""
    groups = ((step.names, step.options), *((group.names, (*step.options, *group.options)) for group in step.groups))
    return tuple((names, options) for names, options in groups if names)


def splits(step: object, units: tuple[UnitInstance, ...]) -> bool:
    """Return whether a checkpointed module has a unit inside it: recomputing the module gathers that unit once more.

    ``step`` is the plan's ``CheckpointModules``; anything else: nothing is checkpointed.
    """
    paths = set(step.paths) if isinstance(step, CheckpointModules) else set()
    return any(below(unit.path, paths) for unit in units)


def below(path: str, paths: set[str]) -> bool:
    """Return whether one of ``paths`` is that of a module around the one at ``path``."""
    return any(outer in paths for outer in above(path))


def above(path: str) -> Iterator[str]:
    """The paths of the modules around it, innermost first; the root, ``""``, comes last."""
    while path:
        path = path.rpartition(".")[0]
        yield path
