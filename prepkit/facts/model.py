"""What a model is: its modules, parameters, buffers and ties."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

WELL_KNOWN = (
    *("generate", "encode", "decode", "encode_image", "encode_text", "features", "forward_features", "sample"),
    *("get_text_features", "get_image_features", "get_audio_features", "get_video_features"),
)
"""Methods that compute from tensors to tensors as a forward does, under the names that libraries have for them."""

Mark = Literal[
    "compiled", "checkpointed", "reentrant", "ddp", "fsdp1", "fsdp2", "deepspeed", "fabric", "autocast", "prepared"
]
"""What a module already carries."""


ParamHook = Literal["register_hook", "register_post_accumulate_grad_hook"]
"""Who was called to put a hook on a parameter: torch runs the first with the gradient, the second once it is added."""


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
class UnitFact:
    """One module that ``fully_shard`` has made a unit before prepkit saw it, and what it was asked for."""

    path: str
    ranks: int
    """Number of ranks that its parameters are sharded over; 0 where smaller units hold them all."""
    copies: int = 1
    """Number of replicas of those shards."""
    reshard_after_forward: bool | int = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    offload: bool = False
    """Whether the shards lie in host memory."""
    cast_forward_inputs: bool = True
    """Whether it casts its floating inputs to ``param_dtype``."""
    reduce_unused: bool = False
    """Whether zeros are reduced for a parameter without a gradient."""


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
    units: tuple[UnitFact, ...] = ()
    """Units of FSDP2 that the model arrives with, children before parents; empty: it is not sharded so."""
    methods: tuple[str, ...] = ()
    """Methods of the root besides ``forward``, sorted: the public ones of its own classes, and the well-known ones that
    it has from a library (``WELL_KNOWN``)."""
    param_attributes: tuple[tuple[str, str], ...] = ()
    """Name of a parameter and of an attribute that somebody has set on it, such as ``_no_weight_decay``."""
    param_hooks: tuple[tuple[str, ParamHook], ...] = ()
    """Name of a parameter and a kind of hook that it has."""
    strided: tuple[str, ...] = ()
    """Names of the parameters whose elements do not lie in the order of their indices, as those of ``w.t()``."""
    self_written: tuple[tuple[str, str], ...] = ()
    """Name of a parameter that its module's own forward changes, and by what, such as ``max_norm=1.0``."""
    prepared: str = ""
    """What prepkit has made of the model already; empty: nothing."""
