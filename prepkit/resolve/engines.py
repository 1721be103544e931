"""What the rest of prepkit asks of an engine, one row for each, so that nobody else has to list them."""

from __future__ import annotations

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
    """What it does to whole parameters, so that it takes no parts of a layer; empty: it does, or says so by itself."""
    fp8_backends: tuple[type, ...] = ()
    """Libraries with which it trains in float8."""
    root_wrapper: str = ""
    """Class that keeps the model in its attribute ``module``; empty: the model itself stays the root."""
    predicted: bool = True
    """``predict`` has formulas for it; else a plan says that it is not predicted."""


ENGINES: dict[type[Engine], EngineTraits] = {
    Single: EngineTraits(
        main_axis=None,
        starts_group=False,
        gives_values=True,
        fp8_backends=(TorchAO, TransformerEngine, MSAMP),
    ),
    DDP: EngineTraits(
        main_axis="replicate",
        gives_values=True,
        averages=True,
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
        fp8_backends=(TorchAO, TransformerEngine),
    ),
    TensorParallel: EngineTraits(main_axis="tensor", replaces_params=True, makes_dtensors=True, gives_values=True),
    XLA: EngineTraits(
        main_axis="replicate",
        reads_mesh=False,
        starts_group=False,
        averages=True,
        refuses_tensor_axis="averages",
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
        fp8_backends=(TorchAO, TransformerEngine, MSAMP),
    ),
}
"""One row for each member of ``Engine``; ``tests/test_completeness.py`` sees that none is missing."""


def traits(cfg: Config) -> EngineTraits:
    """The row of the config's engine."""
    return ENGINES[type(cfg.engine)]


def wrap_of(cfg: Config) -> Wrap | None:
    """The selection of modules that become units; None under engines without units."""
    wrap: Wrap | None = getattr(cfg.engine, "wrap", None)
    return wrap
