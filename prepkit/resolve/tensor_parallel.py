"""Layers that tensor parallelism shards, and how: sums on config and facts that rules and planner share.

The tensor axis is the fastest of the mesh. Where it and FSDP2 both shard dim 0 of a parameter, it does so first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal, assert_never

from attrs import frozen

from prepkit.config import ActivationLayout, Config, TPLayer, TPPlan, TPPlanFromModel
from prepkit.facts import ClassFact, Env, Facts, ModelFacts, ParamFact
from prepkit.plan.layout import sharded_dim
from prepkit.resolve.engines import traits
from prepkit.resolve.mesh import size_of
from prepkit.resolve.modules import matcher, parent
from prepkit.steps import Axis, ParallelStyle

Kind = Literal["linear", "embedding", "leaf", "other"]
"""What torch's styles make of a module: a Linear, an Embedding, another without modules inside, or none of these."""
TPPlacement = Literal["shard(0)", "shard(1)", "replicate"]
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


def tensor_parallel_size(cfg: Config, env: Env, mesh: tuple[Axis, ...]) -> int:
    """Number of ranks that a layer is sharded over. ``TensorParallel`` uses them all, whatever else its mesh says."""
    if traits(cfg).cuts_all_ranks:
        return env.world_size
    if traits(cfg).own_layout:
        return 1  # it splits layers by itself, where its own config says so
    return size_of("tensor", mesh)


def is_parallel(model: ModelFacts) -> bool:
    """Return whether the model arrives parallel already: it has a DTensor parameter (H-2)."""
    return any(param.cls == "DTensor" for param in model.params)


def parallelizes(cfg: Config, model: ModelFacts, size: int) -> bool:
    """Whether the plan shards layers over ``size`` ranks. A model that arrives parallel is only verified (TP-5)."""
    if traits(cfg).cuts_all_ranks:
        return not is_parallel(model)
    return size > 1


def tp_layers(cfg: Config, model: ModelFacts) -> tuple[TPLayer, ...]:
    """The layers of the config's plan, or of the model's own; those in a style that torch does not serve are left out.

    Empty where neither names any.
    """
    match cfg.tp_plan:
        case TPPlan(layers=layers):
            return layers
        case TPPlanFromModel():
            return tuple(TPLayer(path, *SERVED[style]) for path, style in model.tensor_plan if style in SERVED)
        case _:
            assert_never(cfg.tp_plan)


def kind_of(path: str, cls: ClassFact, parents: frozenset[str]) -> Kind:
    """Return what torch's styles can do with a module: they know linear layers and embeddings, by class."""
    bases = {cls.name, *cls.mro}
    if "Linear" in bases:
        return "linear"
    if "Embedding" in bases:
        return "embedding"
    return "other" if path in parents else "leaf"


@frozen(kw_only=True)
class TPModule:
    """One module that a layer of the tensor-parallel plan names."""

    path: str
    kind: Kind
    layer: TPLayer


def tp_modules(layers: tuple[TPLayer, ...], model: ModelFacts) -> tuple[TPModule, ...]:
    """Every module that a layer names, in the order of layers and modules; once per layer that names it."""
    if not layers:
        return ()
    parents = frozenset(parent(module.path) for module in model.modules if module.path)
    kinds = {m.path: kind_of(m.path, model.classes[m.cls], parents) for m in model.modules}
    return tuple(
        TPModule(path=path, kind=kinds[path], layer=layer)
        for layer in layers
        for path in filter(matcher((layer.pattern,)), kinds)
    )


def placement_of(module: TPModule, param: str) -> TPPlacement:
    """Return how a parameter of the module lies, by its bare name (torch ``ColwiseParallel``, ``RowwiseParallel``)."""
    match module.layer.style:
        case "colwise":
            return "shard(1)" if module.kind == "embedding" else "shard(0)"
        case "rowwise" if module.kind == "embedding":
            return "shard(0)"
        case "rowwise":
            return "shard(1)" if param == "weight" else "replicate"
        case "sequence" | "replicate":
            return "replicate"
        case _:
            assert_never(module.layer.style)


def tp_placements(modules: tuple[TPModule, ...], model: ModelFacts) -> dict[str, TPPlacement]:
    """Parameter name, also of ties, to how it lies on the tensor axis; without those whose module no layer names."""
    if not modules:
        return {}
    by_path = {module.path: module for module in modules}
    names = [param.name for param in model.params] + [name for group in model.ties for name in group[1:]]
    return {
        name: placement_of(by_path[parent(name)], name.rpartition(".")[2]) for name in names if parent(name) in by_path
    }


def tp_shards(placements: Mapping[str, TPPlacement], model: ModelFacts) -> tuple[tuple[ParamFact, int], ...]:
    """Every parameter that is sharded on the tensor axis, with the dimension in which it is."""
    params = (param for param in model.params if param.name in placements)
    dims = ((param, sharded_dim(placements[param.name])) for param in params)
    return tuple((param, dim) for param, dim in dims if dim is not None and dim < len(param.shape))


def attention_layers(modules: tuple[TPModule, ...], model: ModelFacts) -> tuple[TPLayer, ...]:
    """Layers of the plan that shard the outputs of a Linear inside a module whose class calls itself an attention."""
    classes = {module.path: model.classes[module.cls].name for module in model.modules}
    layers = (
        module.layer
        for module in modules
        if module.layer.style == "colwise"
        and module.layer.output_layout in (None, "features")
        and module.kind == "linear"
        and "attention" in classes.get(parent(module.path), "").lower()
    )
    return tuple(dict.fromkeys(layers))


def parallel_styles(modules: tuple[TPModule, ...]) -> tuple[ParallelStyle, ...]:
    """The layers as the step wants them: with paths for patterns, and every layout said."""
    grouped: dict[tuple[TPLayer, Kind], list[str]] = {}
    for module in modules:
        grouped.setdefault((module.layer, module.kind), []).append(module.path)
    return tuple(
        ParallelStyle(
            paths=tuple(paths),
            style=layer.style,
            input_layout=_input_layout(layer, kind),
            output_layout=_output_layout(layer),
        )
        for (layer, kind), paths in grouped.items()
    )


def _input_layout(layer: TPLayer, kind: Kind) -> ActivationLayout:
    if layer.input_layout is not None:
        return layer.input_layout
    if layer.style == "sequence":
        return "sequence"
    return "features" if layer.style == "rowwise" and kind == "linear" else "replicate"


def _output_layout(layer: TPLayer) -> ActivationLayout:
    usual: dict[str, ActivationLayout] = {"colwise": "features", "sequence": "sequence"}
    return layer.output_layout or usual.get(layer.style, "replicate")


# --- layers that are cut ---------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ShardedLayers:
    """Each property is worked out when it is first asked for, and kept."""

    cfg: Config
    facts: Facts
    mesh: tuple[Axis, ...]
    """Axes of the device mesh; empty where none can be made."""

    @property
    def size(self) -> int:
        """Number of ranks that a layer is sharded over."""
        return tensor_parallel_size(self.cfg, self.facts.env, self.mesh)

    @cached_property
    def planned(self) -> bool:
        """Whether the plan shards layers. A model that arrives parallel is only verified (TP-5)."""
        return parallelizes(self.cfg, self.facts.model, self.size)

    @cached_property
    def layers(self) -> tuple[TPLayer, ...]:
        """The layers of the tensor-parallel plan, whether or not anything is sharded by it."""
        return tp_layers(self.cfg, self.facts.model)

    @cached_property
    def modules(self) -> tuple[TPModule, ...]:
        """Every module that the plan names, once per layer that names it; none where no layer is sharded."""
        return tp_modules(self.layers, self.facts.model) if self.planned else ()

    @cached_property
    def placements(self) -> Mapping[str, TPPlacement]:
        """Parameter name, also of ties, to how it lies on the tensor axis; empty where no layer is sharded."""
        return tp_placements(self.modules, self.facts.model)

    @cached_property
    def sharded_params(self) -> tuple[tuple[ParamFact, int], ...]:
        """Every parameter that is sharded on the tensor axis, with the dimension in which it is."""
        return tp_shards(self.placements, self.facts.model)

    @cached_property
    def styles(self) -> tuple[ParallelStyle, ...]:
        """What the step ``ParallelizeModules`` does; empty where no layer is sharded."""
        return parallel_styles(self.modules)
