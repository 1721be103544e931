"""Which layers tensor parallelism cuts, and how: sums on config and facts that rules and planner share.

The tensor axis is the fastest of the mesh. Where it and FSDP2 both cut dim 0 of a parameter, it cuts first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, assert_never

from attrs import frozen

from prepkit.config import ActivationLayout, Config, DeepSpeed, TensorParallel, TPLayer, TPPlan, TPPlanFromModel
from prepkit.facts import ClassFact, Env, ModelFacts, ParamFact
from prepkit.plan.layout import sharded_dim
from prepkit.resolve.mesh import axes, size_of
from prepkit.resolve.modules import matcher, parent
from prepkit.steps import ParallelStyle

Kind = Literal["linear", "embedding", "leaf", "other"]
Held = Literal["shard(0)", "shard(1)", "replicate"]
"""How a parameter lies on the tensor axis."""

SERVED: dict[
    str, tuple[Literal["colwise", "rowwise", "sequence", "replicate"], ActivationLayout | None, ActivationLayout | None]
] = {
    "colwise": ("colwise", None, None),
    "colwise_rep": ("colwise", None, "replicate"),
    "colwise_gather_output": ("colwise", None, "replicate"),
    "embedding_colwise": ("colwise", None, "replicate"),
    "rowwise": ("rowwise", None, None),
    "rowwise_rep": ("rowwise", "replicate", None),
    "rowwise_split_input": ("rowwise", "replicate", None),
    "embedding_rowwise": ("rowwise", None, None),
    "sequence_parallel": ("sequence", None, None),
    "replicated_with_grad_allreduce": ("replicate", "heads", "heads"),
}
"""Styles of transformers that torch's styles serve (transformers ``ALL_PARALLEL_STYLES``, 5.23)."""

UNTOUCHED = frozenset({"replicate"})
"""Styles of transformers that leave a module as it is."""


def degree(cfg: Config, env: Env) -> int:
    """Number of ranks that a layer is cut over. ``TensorParallel`` uses them all, whatever else its mesh says."""
    if isinstance(cfg.engine, TensorParallel):
        return env.world_size
    if isinstance(cfg.engine, DeepSpeed):
        return 1  # it cuts layers by itself, where its own config says so
    return size_of("tensor", axes(cfg, env) or ())


def is_parallel(model: ModelFacts) -> bool:
    """Whether the model arrives cut already: it has a DTensor parameter (H-2)."""
    return any(param.cls == "DTensor" for param in model.params)


def is_cut(cfg: Config, model: ModelFacts, env: Env) -> bool:
    """Whether the plan cuts layers. A model that arrives parallel is only verified (TP-5)."""
    if isinstance(cfg.engine, TensorParallel):
        return not is_parallel(model)
    return degree(cfg, env) > 1


def rows(cfg: Config, model: ModelFacts) -> tuple[TPLayer, ...]:
    """The rows that the config means; rows of the model in a style that torch does not serve are left out."""
    match cfg.tp_plan:
        case TPPlan(layers=given):
            return given
        case TPPlanFromModel():
            return tuple(TPLayer(path, *SERVED[style]) for path, style in model.tensor_plan if style in SERVED)
        case _:
            assert_never(cfg.tp_plan)


def kind(path: str, cls: ClassFact, parents: frozenset[str]) -> Kind:
    """What torch's styles can do with a module: they know linear layers and embeddings, by class."""
    bases = {cls.name, *cls.mro}
    if "Linear" in bases:
        return "linear"
    if "Embedding" in bases:
        return "embedding"
    return "other" if path in parents else "leaf"


@frozen(kw_only=True)
class Cut:
    """One module that a row names."""

    path: str
    kind: Kind
    row: TPLayer


def cut_modules(cfg: Config, model: ModelFacts) -> tuple[Cut, ...]:
    """Every module that a row names, in the order of rows and modules; once per row that names it."""
    parents = frozenset(parent(module.path) for module in model.modules if module.path)
    kinds = {m.path: kind(m.path, model.classes[m.cls], parents) for m in model.modules}
    return tuple(
        Cut(path=path, kind=kinds[path], row=row)
        for row in rows(cfg, model)
        for path in filter(matcher((row.pattern,)), kinds)
    )


def held_as(cut: Cut, param: str) -> Held:
    """How a parameter of the module lies, by its bare name (torch ``ColwiseParallel``, ``RowwiseParallel``)."""
    match cut.row.style:
        case "colwise":
            return "shard(1)" if cut.kind == "embedding" else "shard(0)"
        case "rowwise" if cut.kind == "embedding":
            return "shard(0)"
        case "rowwise":
            return "shard(1)" if param == "weight" else "replicate"
        case "sequence" | "replicate":
            return "replicate"
        case _:
            assert_never(cut.row.style)


def held(cfg: Config, model: ModelFacts) -> dict[str, Held]:
    """Parameter name, those of ties included, to how it lies on the tensor axis. Not there: no row names its module."""
    by_path = {cut.path: cut for cut in cut_modules(cfg, model)}
    names = [param.name for param in model.params] + [name for group in model.ties for name in group[1:]]
    return {name: held_as(by_path[parent(name)], name.rpartition(".")[2]) for name in names if parent(name) in by_path}


def cut_sizes(cfg: Config, model: ModelFacts) -> Iterator[tuple[ParamFact, int]]:
    """Every parameter that is cut, with the dimension in which it is."""
    how = held(cfg, model)
    for param in model.params:
        dim = sharded_dim(how.get(param.name, "replicate"))
        if dim is not None and dim < len(param.shape):
            yield param, dim


def attention_rows(cfg: Config, model: ModelFacts) -> tuple[TPLayer, ...]:
    """Rows that cut the outputs of a linear layer inside a module whose class calls itself an attention."""
    classes = {module.path: model.classes[module.cls].name for module in model.modules}
    found = (
        cut.row
        for cut in cut_modules(cfg, model)
        if cut.row.style == "colwise"
        and cut.row.output_layout in (None, "features")
        and cut.kind == "linear"
        and "attention" in classes.get(parent(cut.path), "").lower()
    )
    return tuple(dict.fromkeys(found))


def step_cuts(cfg: Config, model: ModelFacts) -> tuple[ParallelStyle, ...]:
    """The rows as the step wants them: with paths for patterns, and every layout said."""
    grouped: dict[tuple[TPLayer, Kind], list[str]] = {}
    for cut in cut_modules(cfg, model):
        grouped.setdefault((cut.row, cut.kind), []).append(cut.path)
    return tuple(
        ParallelStyle(paths=tuple(paths), style=row.style, input_layout=_takes(row, what), output_layout=_gives(row))
        for (row, what), paths in grouped.items()
    )


def _takes(row: TPLayer, what: Kind) -> ActivationLayout:
    if row.input_layout is not None:
        return row.input_layout
    if row.style == "sequence":
        return "sequence"
    return "features" if row.style == "rowwise" and what == "linear" else "replicate"


def _gives(row: TPLayer) -> ActivationLayout:
    usual: dict[str, ActivationLayout] = {"colwise": "features", "sequence": "sequence"}
    return row.output_layout or usual.get(row.style, "replicate")
