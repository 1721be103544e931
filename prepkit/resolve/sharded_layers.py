"""The tensor-parallel part of ``Resolved``: which layers lie in parts over the ranks, and how."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from attrs import frozen

from prepkit.config import Config, TPLayer
from prepkit.facts import Facts, ParamFact
from prepkit.resolve import tensor_parallel
from prepkit.steps import Axis, ParallelStyle


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
        return tensor_parallel.tensor_parallel_size(self.cfg, self.facts.env, self.mesh)

    @cached_property
    def planned(self) -> bool:
        """Whether the plan shards layers. A model that arrives parallel is only verified (TP-5)."""
        return tensor_parallel.parallelizes(self.cfg, self.facts.model, self.size)

    @cached_property
    def layers(self) -> tuple[TPLayer, ...]:
        """The layers of the tensor-parallel plan, whether or not anything is sharded by it."""
        return tensor_parallel.tp_layers(self.cfg, self.facts.model)

    @cached_property
    def modules(self) -> tuple[tensor_parallel.TPModule, ...]:
        """Every module that the plan names, once per layer that names it; none where no layer is sharded."""
        return tensor_parallel.tp_modules(self.layers, self.facts.model) if self.planned else ()

    @cached_property
    def placements(self) -> Mapping[str, tensor_parallel.TPPlacement]:
        """Parameter name, also of ties, to how it lies on the tensor axis; empty where no layer is sharded."""
        return tensor_parallel.tp_placements(self.modules, self.facts.model)

    @cached_property
    def sharded_params(self) -> tuple[tuple[ParamFact, int], ...]:
        """Every parameter that is sharded on the tensor axis, with the dimension in which it is."""
        return tensor_parallel.tp_shards(self.placements, self.facts.model)

    @cached_property
    def styles(self) -> tuple[ParallelStyle, ...]:
        """What the step ``ParallelizeModules`` does; empty where no layer is sharded."""
        return tensor_parallel.parallel_styles(self.modules)
