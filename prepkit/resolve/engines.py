"""What the rest of prepkit asks of an engine, one row for each, so that nobody else has to list them."""

from __future__ import annotations

from typing import TypeVar

from attrs import frozen

from prepkit.config import (
    DDP,
    FSDP1,
    FSDP2,
    MSAMP,
    XLA,
    Config,
    DeepSpeed,
    Engine,
    Single,
    TensorParallel,
    TorchAO,
    TransformerEngine,
    Wrap,
)


@frozen(kw_only=True)
class EngineTraits:
    """Answers about an engine that do not depend on its options. What does is asked of the engine itself."""

    main_axis: str | None
    """The axis that takes all ranks where no mesh is given, and is in the mesh also with size 1; None: no mesh."""
    other_axes: tuple[str, ...] = ()
    """Axes that a mesh of the config may add; they are left out where their size is 1."""
    reads_mesh: bool = True
    """``config.mesh`` is read; a rule refuses one that is not."""
    starts_group: bool = True
    """The plan starts torch's process group, which needs a backend."""
    has_units: bool = False
    """Selected modules become units that are gathered one by one: the engine has a field ``wrap``."""
    replaces_params: bool = False
    """Parameters become others, and an optimizer has to follow them."""
    makes_dtensors: bool = False
    """What it shards are ``DTensor`` parameters."""
    gives_values: bool = False
    """The plan can initialize, read or send the values of a model on meta."""
    averages: bool = False
    """Gradients are averaged in the dtype of the parameters."""
    takes_reduce_dtype: bool = False
    """Gradients are reduced in the dtype that ``config.precision`` names."""
    refuses_tensor_axis: str = ""
    """Why it takes no layer that is cut over ranks: what it does to whole parameters. Empty: it takes them, or a rule
    that is the engine's refuses them."""
    fp8_backends: tuple[type, ...] = ()
    """Libraries with which it trains in float8."""
    root_wrapper: str = ""
    """Class that keeps the model in its attribute ``module``; empty: the model itself stays the root."""
    flattens: bool = False
    """Parameters of a unit become one flat parameter."""
    takes_sharded: bool = False
    """It takes a model that it has sharded before, and verifies it."""
    cuts_all_ranks: bool = False
    """It cuts layers over all ranks, whatever the mesh says, and takes a model that is cut already."""
    own_layout: bool = False
    """It lays out its ranks by itself, in no mesh of torch."""
    device: str = ""
    """Type of the device that it computes on, whatever the facts say; empty: that of config or facts."""
    takes_closures: bool = True
    """``optimizer.step(closure)`` reaches the optimizer."""
    engine_steps: bool = False
    """The engine itself runs backward, clips, steps and clears."""
    copies_masters: bool = False
    """Its float32 master weights are copies, beside parameters of a lower dtype."""
    shows_gradients: bool = True
    """Gradients are in ``.grad`` between the micro-batches of a window."""
    averages_known_params: bool = False
    """Only parameters that were trained when it wrapped the model are averaged."""
    follows_new_params: bool = False
    """It trains a parameter that enters the model later, as soon as an optimizer has it."""
    follows_unfrozen: bool = False
    """It trains a parameter that is unfrozen later, as soon as an optimizer has it."""
    steps_frozen: bool = False
    """It goes on training a parameter that is frozen later."""
    predicted: bool = True
    """``predict`` has formulas for it; else a plan says that it is not predicted."""


ENGINES: dict[type[Engine], EngineTraits] = {
    Single: EngineTraits(
        main_axis=None,
        starts_group=False,
        gives_values=True,
        follows_new_params=True,
        follows_unfrozen=True,
        fp8_backends=(TorchAO, TransformerEngine, MSAMP),
    ),
    DDP: EngineTraits(
        main_axis="replicate",
        gives_values=True,
        averages=True,
        averages_known_params=True,
        refuses_tensor_axis="averages",
        root_wrapper="DistributedDataParallel",
        fp8_backends=(TorchAO, TransformerEngine, MSAMP),
    ),
    FSDP1: EngineTraits(
        main_axis="shard",
        other_axes=("replicate", "tensor"),  # the tensor axis is refused by a rule, which wants to see it
        has_units=True,
        replaces_params=True,
        gives_values=True,
        takes_reduce_dtype=True,
        refuses_tensor_axis="flattens",
        flattens=True,
        shows_gradients=False,
        steps_frozen=True,
        fp8_backends=(TorchAO, TransformerEngine),
    ),
    FSDP2: EngineTraits(
        main_axis="shard",
        other_axes=("replicate", "tensor"),
        has_units=True,
        replaces_params=True,
        makes_dtensors=True,
        gives_values=True,
        takes_reduce_dtype=True,
        takes_sharded=True,
        follows_unfrozen=True,
        fp8_backends=(TorchAO, TransformerEngine),
    ),
    TensorParallel: EngineTraits(
        main_axis="tensor",
        replaces_params=True,
        makes_dtensors=True,
        gives_values=True,
        cuts_all_ranks=True,
    ),
    XLA: EngineTraits(
        main_axis="replicate",
        reads_mesh=False,
        starts_group=False,
        averages=True,
        refuses_tensor_axis="averages",
        device="xla",
        takes_closures=False,
        predicted=False,
    ),
    DeepSpeed: EngineTraits(
        main_axis="replicate",  # at ZeRO-3 the shard axis
        other_axes=("tensor",),
        reads_mesh=False,
        replaces_params=True,
        gives_values=True,
        takes_reduce_dtype=True,
        root_wrapper="DeepSpeedEngine",
        own_layout=True,
        takes_closures=False,
        engine_steps=True,
        copies_masters=True,
        shows_gradients=False,
        fp8_backends=(TorchAO, TransformerEngine, MSAMP),
    ),
}
"""One row for each member of ``Engine``; ``tests/test_completeness.py`` sees that none is missing."""


def traits(cfg: Config) -> EngineTraits:
    """The row of the config's engine."""
    return ENGINES[type(cfg.engine)]


E = TypeVar("E")


def engine_of(cfg: Config, kind: type[E]) -> E:
    """The config's engine, where a table gives the caller configs of one engine only."""
    engine = cfg.engine
    assert isinstance(engine, kind), f"this is for {kind.__name__}, and the engine is {type(engine).__name__}"
    return engine


def wrap_of(cfg: Config) -> Wrap | None:
    """The selection of modules that become units; None under engines without units."""
    wrap: Wrap | None = getattr(cfg.engine, "wrap", None)
    return wrap
