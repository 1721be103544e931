"""What was seen of model, optimizer, scheduler, loaders and environment, as plain data.

``Facts`` holds only what is the same on every rank, so that all ranks plan alike; what may differ from rank to
rank (devices, meta or real, host memory) is in ``LocalFacts``, which the planner never reads.
Names are canonical: without the segments that compile and checkpoint wrappers put into them.
"""

from __future__ import annotations

import re
from typing import Literal

from attrs import field, frozen

from prepkit.checkpoint import CheckpointFacts

Mark = Literal["compiled", "checkpointed", "reentrant", "ddp", "fsdp1", "fsdp2", "deepspeed", "autocast", "prepared"]
"""What a module already carries."""

Scalar = bool | int | float | str | None


# --- model ---------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ParamFact:
    """One parameter, under the first of its names (a tied one appears once; see ``ModelFacts.ties``)."""

    name: str
    shape: tuple[int, ...]
    """Global shape; of a zero.Init parameter its ``ds_shape``, of a DTensor its full shape."""
    dtype: str
    requires_grad: bool = True
    cls: str = "Parameter"
    """Class name: ``Parameter``, ``DTensor``, ``Params4bit`` …"""
    placements: tuple[str, ...] = ()
    """How a DTensor lies on its own mesh, one word per axis, such as ``shard(0)``; empty for others."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@frozen(kw_only=True)
class BufferFact:
    """One buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = True
    """Whether it is in the state dict."""


@frozen(kw_only=True)
class ClassFact:
    """One module class that occurs in the model."""

    name: str
    """Bare class name, as users write it in a wrap list."""
    module: str
    """Python module that defines it."""
    mro: tuple[str, ...] = ()
    """Bare names of its bases up to and without ``Module``."""
    has_forward: bool = True
    """False for containers such as ``ModuleList``, which torch refuses as a unit (G-8)."""
    resets: bool = False
    """Whether it has a ``reset_parameters()``, as torch's modules do: it initialises what the module holds."""
    inits: bool = False
    """Whether it has an ``_init_weights(module)``, as transformers' models do: it initialises any module inside it."""


@frozen(kw_only=True)
class ModuleFact:
    """One module. The root has the path ``""``. A module that is reachable twice appears under its first path."""

    path: str
    cls: int
    """Index into ``ModelFacts.classes``."""
    marks: tuple[Mark, ...] = ()


@frozen(kw_only=True)
class ArchitectureFacts:
    """What the model's own ``config`` says, where it has one (Hugging Face style). None: not said."""

    tie_word_embeddings: bool | None = None
    hidden_sizes: tuple[int, ...] = ()
    heads: int | None = None
    kv_heads: int | None = None
    vocab_size: int | None = None
    experts: int | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    use_cache: bool | None = None
    """Whether attention fills a key-value cache unless a call says otherwise."""
    tp_size: int | None = None


@frozen(kw_only=True)
class ModelFacts:
    """Structure and tensors of one model."""

    classes: tuple[ClassFact, ...]
    modules: tuple[ModuleFact, ...]
    """In ``named_modules`` order: the root first, parents before children."""
    params: tuple[ParamFact, ...]
    """In ``named_parameters`` order, without repeats."""
    buffers: tuple[BufferFact, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one and the same parameter, by identity; the first name is the one in ``params``."""
    declared_blocks: tuple[str, ...] = ()
    """The model's ``_no_split_modules``, sorted, also those that the model does not contain."""
    tied_keys: tuple[str, ...] = ()
    """Names that the model declares as tied (``_tied_weights_keys``)."""
    has_tie_weights: bool = False
    """Whether the model has a ``tie_weights()`` method."""
    input_embedding: str | None = None
    """Path of ``get_input_embeddings()``."""
    output_embedding: str | None = None
    """Path of ``get_output_embeddings()``."""
    forward: Literal["bound", "plain"] = "bound"
    """Whether ``forward`` is a bound method or a plain function set on the instance."""
    device_map: tuple[tuple[str, str], ...] = ()
    """``hf_device_map`` of the first module with one of more than one entry (H-1), else of the first that has one.

    The same on ranks that hold other devices: a map to this rank's own device alone says ``cuda:local``, and
    indices count from the lowest one in a map of several."""
    quantised: Literal["", "4bit", "8bit"] = ""
    """``is_loaded_in_4bit`` / ``is_loaded_in_8bit``."""
    architecture: ArchitectureFacts = ArchitectureFacts()
    tensor_plan: tuple[tuple[str, str], ...] = ()
    """The model's own tensor-parallel plan: path pattern and style, in its order and its words."""
    grad_inputs: bool = False
    """Whether ``enable_input_require_grads()`` was called, so that frozen embeddings pass gradients on."""
    prepared: str = ""
    """What prepkit has made of the model already; empty: nothing."""


# --- optimizer, scheduler, loaders ---------------------------------------------------------------------------------


@frozen(kw_only=True)
class GroupFact:
    """One parameter group of an optimizer."""

    slots: tuple[str | None, ...]
    """Per slot the name of the model parameter that it holds, by identity; None: not a parameter of the model."""
    options: tuple[tuple[str, Scalar], ...] = ()
    """The group's scalar options, sorted by name."""


@frozen(kw_only=True)
class OptimizerFacts:
    """One live optimizer."""

    name: str
    """Class name."""
    module: str
    """Python module that defines the class."""
    groups: tuple[GroupFact, ...]
    stateful: tuple[str, ...] = ()
    """Names of the parameters that already have state."""
    keeps_own_list: bool = False
    """Whether it holds parameters outside its groups and state, as LBFGS does: those cannot be rebound."""


@frozen(kw_only=True)
class SchedulerFacts:
    """One learning-rate scheduler."""

    name: str
    drives_optimizer: bool
    """Whether its ``optimizer`` is the one that was given."""
    factory: bool = False
    """Whether it is a function that makes the scheduler from an optimizer."""


@frozen(kw_only=True)
class LoaderFacts:
    """One data loader."""

    batch_size: int | None
    length: int | None
    """Number of samples; None where the dataset has no length."""
    sampler: Literal["sequential", "random", "distributed", "custom"]
    iterable: bool = False
    """Whether the dataset is an ``IterableDataset``."""
    custom_batches: bool = False
    """Whether it was built with a batch sampler of the user's own."""
    drop_last: bool = False


# --- environment ---------------------------------------------------------------------------------------------------


_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"80GiB"``, ``"80GB"`` or a plain number. Raises ``ValueError`` on anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size in bytes; write a number with a unit, such as '80GiB' or '512MB'")
    return int(float(match.group(1)) * unit)


@frozen(kw_only=True)
class Env:
    """The environment that the plan is for: observed here, or declared for a cluster that is not here."""

    world_size: int = 1
    """Number of processes, all nodes together."""
    per_node: int | None = None
    """Processes on one node; None: not known."""
    device: str = "cpu"
    """Device type of the accelerator, or ``cpu``."""
    memory: int | None = None
    """Bytes of one device; None: not known."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None: not CUDA, or not known."""
    bf16: bool | None = None
    """Whether the device computes in bfloat16; None: not known."""
    torch: str = ""
    """torch version; empty: not known."""
    python: str = ""
    """Python version; empty: not known."""
    libraries: tuple[tuple[str, str], ...] = ()
    """Versions of the optional libraries that are installed, sorted by name."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables that change what torch, transformers or a launcher do, sorted by name (pain 25)."""
    assumed: tuple[str, ...] = field(default=())
    """Names of the fields that were declared and not seen."""

    @classmethod
    def declare(
        cls,
        *,
        world_size: int,
        device: str = "cuda",
        per_node: int | None = None,
        memory: str | int | None = None,
        capability: tuple[int, int] | None = None,
        bf16: bool | None = None,
        torch: str = "",
        libraries: tuple[tuple[str, str], ...] = (),
    ) -> Env:
        """Facts of a cluster that is not here. Every field that is given is marked as assumed.

        Without ``libraries``, which of them are installed there is not known.

        >>> Env.declare(world_size=512, per_node=8, memory="80GiB").memory
        85899345920
        """
        given = {
            "world_size": world_size,
            "device": device,
            "per_node": per_node,
            "memory": None if memory is None else parse_bytes(memory),
            "capability": capability,
            "bf16": bf16,
            "torch": torch,
            "libraries": libraries,
        }
        said = {name: value for name, value in given.items() if value not in (None, "", ())}
        return cls(**said, assumed=tuple(sorted(said)))  # type: ignore[arg-type]  # values checked by the signature


# --- the whole -----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Facts:
    """Everything that the rules and the planner read. The same value on every rank."""

    model: ModelFacts
    optimizer: OptimizerFacts | None = None
    scheduler: SchedulerFacts | None = None
    loaders: tuple[LoaderFacts, ...] = ()
    checkpoint: CheckpointFacts | None = None
    """The checkpoint that ``config.weights`` names; None: not asked for, or not seen."""
    env: Env = Env()


@frozen(kw_only=True)
class LocalFacts:
    """What may differ from rank to rank. Shown to people, read by no rule and no planner."""

    rank: int = 0
    local_rank: int = 0
    param_devices: tuple[tuple[str, int], ...] = ()
    """Device and number of parameters on it, such as ``(("meta", 291),)``."""
    buffer_devices: tuple[tuple[str, int], ...] = ()
    host_memory: int | None = None
    """Bytes of host memory that are available; None: not known."""


@frozen(kw_only=True)
class Observation:
    """What ``live.observe`` returns."""

    facts: Facts
    local: LocalFacts
