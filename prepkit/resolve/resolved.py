"""What a config means for these facts, worked out once and handed to rules and planner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from attrs import frozen

from prepkit.config import (
    FP8,
    FSDP1,
    FSDP2,
    CheckpointBlocks,
    CompileBlocks,
    Config,
    Intent,
    OffloadToCPU,
    Wrap,
)
from prepkit.config.engines import SAME_DATA
from prepkit.facts import Facts, ParamFact
from prepkit.facts.checkpoint import CheckpointFacts
from prepkit.plan.layout import FlatPart, ParamLayout, Placement
from prepkit.resolve import checkpoint, entry_points, fp8, loaders, mesh, modules, placements, precision, units
from prepkit.resolve.checkpoint import CheckpointMatch
from prepkit.resolve.created_optimizers import CreatedOptimizer, created_optimizers
from prepkit.resolve.deepspeed.flaws import Flaw
from prepkit.resolve.deepspeed.working import WorkingConfig, as_written, working_config
from prepkit.resolve.engines import EngineTraits, traits, wrap_of
from prepkit.resolve.tensor_parallel import ShardedLayers
from prepkit.steps import Axis


@frozen(kw_only=True)
class Resolved:
    """A config and facts, with all that follows from the two. Made once per build; equal where the two are.

    Each property is worked out when it is first asked for, and kept: none is linear in the model more than once.
    """

    cfg: Config
    facts: Facts

    # --- engine, devices and ranks ---------------------------------------------------------------------------------

    @property
    def engine_traits(self) -> EngineTraits:
        """What is asked of an engine whatever its options are."""
        return traits(self.cfg)

    @property
    def trains(self) -> bool:
        """Whether gradients are wanted."""
        return self.cfg.intent is Intent.TRAINING

    @property
    def zero_stage(self) -> int | None:
        """ZeRO stage of DeepSpeed, 0 to 3; None under another engine."""
        return self.deepspeed.stage if self.engine_traits.own_layout else None

    @property
    def one_process(self) -> bool:
        """True for an engine that knows no other ranks."""
        return self.engine_traits.main_axis is None

    @property
    def compute_device(self) -> str:
        """Device type: the environment's, unless XLA or the CPU is asked for. Asking for another has its own rule."""
        if self.engine_traits.device:
            return self.engine_traits.device
        return "cpu" if self.cfg.device == "cpu" else self.facts.env.device

    @property
    def offloads(self) -> bool:
        """Whether shards and their gradients stay in the memory of the host (FSDP1, FSDP2)."""
        match self.cfg.engine:
            case FSDP2(offload=offload):
                return isinstance(offload, OffloadToCPU)
            case FSDP1(offload=offloaded):
                return offloaded
            case _:
                return False

    @cached_property
    def mesh(self) -> tuple[Axis, ...] | None:
        """Axes of the device mesh with their sizes; None where they do not multiply to the world size."""
        return mesh.axes(self.cfg, self.facts.env)

    @property
    def planned_mesh(self) -> tuple[Axis, ...]:
        """The same where there is a plan: the mesh rules refuse all else, and cannot be overridden."""
        assert self.mesh is not None, "the mesh rules refuse a mesh that does not multiply to the world size"
        return self.mesh

    def axis_size(self, name: str) -> int:
        """Size of the mesh axis with this name; 1 where there is none."""
        return mesh.size_of(name, self.mesh or ())

    @property
    def data_parallel_size(self) -> int:
        """Number of shares that the data is divided into: ranks that differ on the tensor axis only read the same."""
        size = self.facts.env.world_size
        for name in SAME_DATA:
            size //= max(1, self.axis_size(name))  # 0 in a world without ranks
        return size

    @cached_property
    def batch(self) -> loaders.Batch:
        """How many samples a rank reads at once, and how many ranks read."""
        return loaders.batch(self.cfg, self.facts, self.data_parallel_size)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step: as asked, or what the global batch gives."""
        return loaders.accumulation(self.cfg, self.batch)

    @property
    def samples_per_step(self) -> int | None:
        """Samples per optimizer step over all data ranks; None: nobody says how many a rank reads at once."""
        return loaders.samples(self.cfg, self.batch)

    @property
    def data_axes(self) -> tuple[str, ...] | None:
        """Axes of the mesh whose ranks read different data; None where all of them do."""
        names = tuple(axis.name for axis in self.mesh or ())
        different = tuple(name for name in names if name not in SAME_DATA)
        return different if len(different) < len(names) else None

    @cached_property
    def deepspeed_text(self) -> tuple[Flaw, ...]:
        """What the text of the DeepSpeed config shows to be wrong, whatever the model and the cluster are."""
        return tuple(as_written(self.cfg, self.facts)[0].flaws)

    @cached_property
    def deepspeed(self) -> WorkingConfig:
        """The complete DeepSpeed config, or what stands against it. Only for the engine ``DeepSpeed``."""
        return working_config(self.cfg, self.facts)

    @cached_property
    def created_optimizers(self) -> tuple[CreatedOptimizer, ...]:
        """The optimizers of the config, each with the parameters that it will step."""
        return created_optimizers(self.cfg, self.facts.model)

    # --- modules and units -----------------------------------------------------------------------------------------

    @cached_property
    def selected(self) -> Mapping[Wrap, tuple[str, ...]]:
        """Each selection of the config to the paths of the modules that it means, children before parents."""
        wraps: dict[Wrap, None] = {}
        if (units := wrap_of(self.cfg)) is not None:
            wraps[units] = None
        if isinstance(self.cfg.checkpointing, CheckpointBlocks):
            wraps[self.cfg.checkpointing.blocks] = None
        if isinstance(self.cfg.compile, CompileBlocks):
            wraps[self.cfg.compile.blocks] = None
        return {wrap: modules.select(wrap, self.facts.model) for wrap in wraps}

    @cached_property
    def checkpointed(self) -> tuple[str, ...]:
        """Paths of the modules whose activations are recomputed: each ``every``-th in the order of the model."""
        how = self.cfg.checkpointing
        if not isinstance(how, CheckpointBlocks):
            return ()
        chosen = frozenset(self.selected[how.blocks])
        if how.every == 1:
            return self.selected[how.blocks]
        ordered = tuple(module.path for module in self.facts.model.modules if module.path in chosen)
        return ordered[how.every - 1 :: how.every] if how.every > 1 else ()

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Paths of the units below the root, children before parents; none where the engine makes none."""
        wrap = wrap_of(self.cfg)
        if wrap is None:
            return ()
        if self.arrives_sharded:
            return units.standing_units(self.facts.model)
        return units.sharded_units(self.cfg, self.facts.model, self.selected[wrap])

    @cached_property
    def unit_of(self) -> Mapping[str, str]:
        """Parameter name, also of ties, to the path of its unit, "" for the root; empty under engines without units."""
        return modules.unit_of(self.units, self.facts.model) if self.engine_traits.has_units else {}

    @property
    def arrives_sharded(self) -> bool:
        """Whether ``fully_shard`` has made units of the model before, so that FSDP2 only verifies them (M2-1)."""
        return self.engine_traits.takes_sharded and bool(self.facts.model.units)

    @cached_property
    def packed_params(self) -> tuple[str, ...]:
        """Names of the frozen packed weights, whose bytes mean nothing apart from each other."""
        return modules.packed_params(self.facts.model)

    @cached_property
    def unsharded_params(self) -> tuple[str, ...]:
        """Names of the parameters that FSDP2 leaves whole on every rank; none under another engine."""
        engine, dtypes = self.cfg.engine, self.compute_dtypes
        if not isinstance(engine, FSDP2):
            return ()
        return units.unsharded_params(engine, self.facts.model, dtypes.param if dtypes else None)

    @cached_property
    def entry_points(self) -> tuple[str, ...]:
        """Methods besides ``forward`` that run as it does: those that are asked for, or well-known."""
        return entry_points.named(self.cfg, self.facts.model)

    @cached_property
    def ignored_params(self) -> frozenset[str]:
        """Names of the parameters of modules that FSDP1 or FSDP2 ignores; none under another engine."""
        engine = self.cfg.engine
        return units.ignored_params(engine, self.facts.model) if isinstance(engine, FSDP1 | FSDP2) else frozenset()

    # --- FSDP1 -----------------------------------------------------------------------------------------------------

    @cached_property
    def flat_params(self) -> Mapping[str, tuple[ParamFact, ...]]:
        """Path of every FSDP1 unit that holds a parameter to its parameters in order; empty under another engine."""
        if not self.engine_traits.flattens:
            return {}
        return units.flat_params(self.unit_of, self.ignored_params, self.facts.model)

    @cached_property
    def flat_shards(self) -> Mapping[str, FlatPart]:
        """Parameter name to its place in the flat parameter of its FSDP1 unit; empty without a mesh, or without it."""
        if not self.engine_traits.flattens or not self.mesh:
            return {}
        return units.flat_shards(self.cfg, self.facts.model, self.mesh, self.flat_params, self.stored_dtypes)

    # --- dtypes ----------------------------------------------------------------------------------------------------

    @property
    def compute_dtypes(self) -> precision.ComputeDtypes | None:
        """Dtypes of parameters, reduction and outputs while computing; None: as stored."""
        return precision.compute_dtypes(self.cfg.precision)

    @cached_property
    def low_precision_params(self) -> tuple[ParamFact, ...]:
        """Trainable parameters that arrive in a 16-bit floating dtype."""
        return precision.low_precision_params(self.facts)

    @cached_property
    def master_weights(self) -> tuple[ParamFact, ...]:
        """Parameters that are stored in float32 before they are prepared, though they came in 16 bits."""
        return precision.master_weights(self.cfg, self.facts, self.flat_params)

    @cached_property
    def stored_dtypes(self) -> Mapping[str, str]:
        """Parameter name to the dtype in which prepkit stores it, before DeepSpeed or MS-AMP cast it."""
        return precision.stored_dtypes(self.facts, self.master_weights)

    @cached_property
    def linears(self) -> tuple[fp8.Linear, ...]:
        """Every plain Linear below the root."""
        return fp8.linears(self.facts.model)

    @cached_property
    def fp8_linears(self) -> tuple[str, ...]:
        """Paths of the Linears that the float8 library replaces; none without ``FP8``."""
        every = self.linears if isinstance(self.cfg.precision, FP8) else ()
        return fp8.fp8_linears(self.cfg, self.facts.model, every)

    # --- tensor parallelism ----------------------------------------------------------------------------------------

    @cached_property
    def tp(self) -> ShardedLayers:
        """The layers that lie in parts over the tensor-parallel ranks."""
        return ShardedLayers(cfg=self.cfg, facts=self.facts, mesh=self.mesh or ())

    # --- values ----------------------------------------------------------------------------------------------------

    @cached_property
    def values(self) -> WeightSources:
        """Where parameters and buffers get their values."""
        return WeightSources(cfg=self.cfg, facts=self.facts)

    # --- the outcome -----------------------------------------------------------------------------------------------

    @cached_property
    def placements(self) -> Mapping[str, tuple[Placement, ...]]:
        """Parameter name to one word per axis of the mesh; none where every rank holds all of it."""
        axes = self.mesh or ()
        return placements.placements(self.cfg, self.facts.model, axes, self.tp.placements, self.unsharded_params)

    @cached_property
    def layout(self) -> tuple[ParamLayout, ...]:
        """One layout per parameter once prepared, in the order of the facts."""
        return placements.layout(
            self.cfg,
            self.facts.model,
            stored=self.stored_dtypes,
            low=self.compute_dtypes.param if self.compute_dtypes else None,
            scaled=placements.scaled_weights(self.cfg, self.fp8_linears),
            placed=self.placements,
            unit_of=self.unit_of,
            flat=self.flat_shards,
        )


@frozen(kw_only=True)
class WeightSources:
    """Each property is worked out when it is first asked for, and kept."""

    cfg: Config
    facts: Facts

    @cached_property
    def checkpoint(self) -> CheckpointFacts | None:
        """The checkpoint that is loaded, with its keys renamed; None where none is, or it was not seen."""
        return checkpoint.requested_checkpoint(self.cfg, self.facts)

    @cached_property
    def match(self) -> CheckpointMatch | None:
        """That checkpoint held against the model."""
        return checkpoint.match(self.facts.model, self.checkpoint) if self.checkpoint else None

    @cached_property
    def initialized_params(self) -> tuple[str, ...]:
        """Names of the parameters that get their values from initializers."""
        return checkpoint.initialized_params(self.cfg, self.facts.model, self.match)

    @cached_property
    def computed_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that the model has to compute where they are on meta."""
        return checkpoint.computed_buffers(self.cfg, self.facts.model, self.match)
