"""A live model as ``ModelFacts``: structure, tensors, ties, and what it says of itself. Reads attributes only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal, get_args

import torch
from attrs import define, field
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.nn.parameter import is_lazy

from prepkit.facts import ArchitectureFacts, BufferFact, ClassFact, Mark, ModelFacts, ModuleFact, ParamFact
from prepkit.facts.model import WELL_KNOWN, ParamHook
from prepkit.formats.models.architecture import PARTS, peek, said, said_by
from prepkit.objects.fsdp2_units import unit_facts
from prepkit.objects.names import Site, known_bases
from prepkit.objects.param_extras import attributes, hooks
from prepkit.objects.state import placements
from prepkit.objects.unwrap import PREPARED
from prepkit.ranks import launcher

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods that initialise what a module itself holds; torch's attention has the second."""

INITS = "_init_weights"
"""Method that initialises any module inside the one that has it (transformers, and many who learned from it)."""

Named = Sequence[tuple[str, nn.Parameter]]

CLASS_MARKS: tuple[tuple[str, Mark], ...] = (
    ("OptimizedModule", "compiled"),
    ("CheckpointWrapper", "checkpointed"),
    ("DistributedDataParallel", "ddp"),
    ("FullyShardedDataParallel", "fsdp1"),
    ("FSDPModule", "fsdp2"),
    ("DeepSpeedEngine", "deepspeed"),
    ("_FabricModule", "fabric"),
)
"""Class of torch, DeepSpeed or Lightning, and the mark that its instances carry."""

ATTRIBUTE_MARKS: tuple[tuple[str, Mark], ...] = (
    ("_compiled_call_impl", "compiled"),  # nn.Module.compile()
    ("gradient_checkpointing", "checkpointed"),  # transformers
    ("_original_forward", "autocast"),  # accelerate
    ("_prepkit_autocast", "autocast"),
    ("_prepkit_fp8", "autocast"),
    ("_is_accelerate_prepared", "prepared"),
    (PREPARED, "prepared"),
)
"""Attribute that is set and true on the instance, and the mark that it stands for."""


def model_facts(places: Sequence[Site], named: Named, first: Mapping[int, str]) -> ModelFacts:
    """Facts of the model with these places and parameters; ``named`` and ``first`` as ``names`` gives them."""
    core = places[0].module
    classes = _Classes()
    modules = tuple(
        ModuleFact(path=site.path, cls=classes.index(type(site.module)), marks=classes.marks(site.stack))
        for site in places
        if site.first
    )
    return ModelFacts(
        classes=tuple(classes.facts),
        modules=modules,
        params=_params(named, first),
        buffers=_buffers(places),
        ties=_ties(named, first),
        declared_blocks=_names(peek(core, "_no_split_modules")),
        tied_keys=_names(peek(core, "_tied_weights_keys")),
        has_tie_weights=callable(peek(core, "tie_weights")),
        input_embedding=_path_of(ask(core, "get_input_embeddings"), places),
        output_embedding=_path_of(ask(core, "get_output_embeddings"), places),
        forward="bound" if hasattr(core.forward, "__func__") else "plain",
        device_map=device_map(places),
        quantised=_quantised(core),
        architecture=architecture(core),
        tensor_plan=tensor_plan(core),
        grad_inputs=any(_passes_gradients(site.module) for site in places),
        units=unit_facts(places),
        methods=methods(core),
        **extras(places, named, first),
        prepared=str(core.__dict__.get(PREPARED, "")),
    )


@define
class _Classes:
    """What is read of a class is read once, however many modules have it."""

    facts: dict[ClassFact, int] = field(factory=dict)
    """Each distinct fact and its index. Classes that look the same, as each parametrised module's own, are one."""
    _indices: dict[type, int] = field(factory=dict)
    _marks: dict[type, frozenset[Mark]] = field(factory=dict)

    def index(self, cls: type) -> int:
        known = self._indices.get(cls)
        if known is None:
            known = self._indices[cls] = self.facts.setdefault(_class_fact(cls), len(self.facts))
        return known

    def marks(self, stack: tuple[nn.Module, ...]) -> tuple[Mark, ...]:
        found: set[Mark] = set()
        for module in stack:
            cls, own = type(module), module.__dict__
            if cls not in self._marks:
                bases = known_bases(cls)
                self._marks[cls] = frozenset(mark for name, mark in CLASS_MARKS if name in bases)
            found |= self._marks[cls]
            for name, mark in ATTRIBUTE_MARKS:
                if own.get(name):
                    found.add(mark)
            if "checkpointed" in found and _is_reentrant(own):
                found.add("reentrant")
        return tuple(mark for mark in get_args(Mark) if mark in found) if found else ()


def _is_reentrant(own: Mapping[str, Any]) -> bool:
    """True if a module's own checkpointing is torch's reentrant one: transformers', or ``CheckpointWrapper``'s."""
    chosen = getattr(own.get("_gradient_checkpointing_func"), "keywords", {})
    return bool(chosen.get("use_reentrant")) or own.get("checkpoint_impl") is CheckpointImpl.REENTRANT


def _passes_gradients(module: nn.Module) -> bool:
    """True if transformers' ``enable_input_require_grads()`` has left its hook on the module."""
    own = module.__dict__
    return bool(own.get("_require_grads_hook") or own.get("_require_grads_hooks"))


def _class_fact(cls: type) -> ClassFact:
    # fully_shard gives the module a class made on the spot, ``FSDPLinear(FSDPModule, Linear)``.
    if "FSDPModule" in known_bases(cls):
        cls = next(base for base in cls.__bases__ if issubclass(base, nn.Module))
    mro = cls.__mro__[1 : cls.__mro__.index(nn.Module)]
    return ClassFact(
        name=cls.__name__,
        module=cls.__module__,
        mro=tuple(base.__name__ for base in mro),
        has_forward=getattr(cls, "forward", None) is not nn.Module.forward,
        resets=any(callable(getattr(cls, name, None)) for name in RESETS),
        inits=callable(getattr(cls, INITS, None)),
    )


def _params(named: Named, first: Mapping[int, str]) -> tuple[ParamFact, ...]:
    return tuple(
        ParamFact(
            name=name,
            shape=_shape(param),
            dtype=dtype_name(param.dtype),
            requires_grad=param.requires_grad,
            cls="ZeroParameter" if hasattr(param, "ds_shape") else type(param).__name__,
            placements=placements(param),
        )
        for name, param in named
        if first[id(param)] == name
    )


def _buffers(places: Iterable[Site]) -> tuple[BufferFact, ...]:
    seen: set[int] = set()
    out: list[BufferFact] = []
    for site in places:
        hidden = site.module._non_persistent_buffers_set
        for name, buffer in site.module._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            path = f"{site.path}.{name}" if site.path else name
            out.append(
                BufferFact(
                    name=path, shape=_shape(buffer), dtype=dtype_name(buffer.dtype), persistent=name not in hidden
                )
            )
    return tuple(out)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``, as configs write it, of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Global shape; ``()`` for a lazy tensor, which has none yet. A packed 4-bit tensor's is that of its storage."""
    if is_lazy(tensor):
        return ()
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _ties(named: Named, first: Mapping[int, str]) -> tuple[tuple[str, ...], ...]:
    """Groups of names with one parameter, by identity: parameters that only share storage are not tied."""
    if len(named) == len(first):
        return ()
    groups: dict[int, list[str]] = defaultdict(list)
    for name, param in named:
        groups[id(param)].append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _names(declared: Any) -> tuple[str, ...]:
    """A declared list, set, mapping (its keys) or single name, sorted; anything else is no declaration."""
    if isinstance(declared, str):
        return (declared,)
    if not isinstance(declared, Iterable):
        return ()
    return tuple(sorted({name for name in declared if isinstance(name, str)}))


def _path_of(module: Any, places: Iterable[Site]) -> str | None:
    if not isinstance(module, nn.Module):
        return None
    return next((site.path for site in places if any(module is part for part in site.stack)), None)


def _quantised(core: nn.Module) -> Literal["", "4bit", "8bit"]:
    if peek(core, "is_loaded_in_4bit"):
        return "4bit"
    return "8bit" if peek(core, "is_loaded_in_8bit") else ""


LOCAL = "local"
"""Stands for the index of this rank's own device: ``cuda:local``; alone where no type is known."""


def device_map(places: Iterable[Site]) -> tuple[tuple[str, str], ...]:
    """``hf_device_map`` of the first module that carries one with more than one entry, else of the first with one.

    Ranks hold different devices, and their facts must be alike: a map to this rank's own device alone says
    ``cuda:local``, and in a map of several devices indices count from the lowest one.
    """
    held = (site.module.__dict__.get("hf_device_map") for site in places)
    maps = [one for one in held if isinstance(one, dict) and one]
    chosen = next((one for one in maps if len(one) > 1), maps[0] if maps else {})
    return tuple(zip(map(str, chosen), alike(list(chosen.values())), strict=True))


def alike(devices: Sequence[object]) -> tuple[str, ...]:
    """The devices of one map, by type and index, without the part that depends on the rank.

    >>> alike([torch.device("meta", 2), "meta:3", "cpu", "disk"])
    ('meta:0', 'meta:1', 'cpu', 'disk')
    """
    named = [_named(device) for device in devices]
    found = [_INDEXED(name) for name in named]
    indices = [int(one[2]) for one in found if one]
    if not indices:
        return tuple(named)
    if len(set(named)) == 1:
        kind = found[0][1] if found[0] else ""
        return (f"{kind}{LOCAL}" if indices[0] == _own(kind) else named[0],) * len(named)
    least = min(indices)
    return tuple(f"{one[1]}{int(one[2]) - least}" if one else name for one, name in zip(found, named, strict=True))


_INDEXED = re.compile(r"(\w+:|)(\d+)").fullmatch
"""``cuda:1``, or ``1`` where it is not known of what."""


def _named(device: object) -> str:
    """``cuda:1`` of an index, a text or a torch device; a type without an index is its first (Q-3, Q-7)."""
    text, kind = str(device), _accelerator()
    if text.isdecimal():  # counts the accelerators that are visible
        return f"{kind}:{text}" if kind else text
    return text if ":" in text or text in ("", "cpu", "disk", "meta") else f"{text}:0"


def _own(kind: str) -> int:
    """Index of the device that a step would bind here; the local rank where this machine has none of the type."""
    here = _accelerator()
    alone = kind == f"{here}:" and torch.get_device_module(here).device_count() < 2
    return 0 if alone else launcher.local_rank()


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else ""


LIBRARIES = frozenset({"accelerate", "deepspeed", "diffusers", "peft", "timm", "torch", "transformers"})
"""Packages whose base classes have many methods that compute nothing, such as ``push_to_hub``."""

MODELS = "transformers.models."
"""Where a library keeps classes of single models, whose methods are the model's own."""


def methods(model: nn.Module) -> tuple[str, ...]:
    """Public methods besides ``forward``, sorted; of a library's base classes the well-known ones alone.

    ``generate`` is left out where the model itself says that it cannot (transformers' ``can_generate``).
    """
    found: set[str] = set()
    for cls in set(type(model).__mro__) - {nn.Module, object}:
        own = cls.__module__.partition(".")[0] not in LIBRARIES or cls.__module__.startswith(MODELS)
        public = {name for name, value in vars(cls).items() if isinstance(value, FunctionType) and name[0] != "_"}
        found |= public if own else public & set(WELL_KNOWN)
    if ask(model, "can_generate") is False:
        found.discard("generate")
    return tuple(sorted(found - {"forward"}))


_Named = Sequence[tuple[str, nn.Parameter]]


def extras(places: Sequence[Site], named: _Named, first: Mapping[int, str]) -> dict[str, Any]:
    """Fields of ``ModelFacts``; each parameter under its first name."""
    once = [(name, param) for name, param in named if first[id(param)] == name]
    return {
        "param_attributes": tuple((name, key) for name, param in once for key in sorted(attributes(param))),
        "param_hooks": tuple(_hooks(once)),
        "strided": tuple(name for name, param in once if _is_strided(param)),
        "self_written": tuple(_self_written(places, first)),
    }


def _hooks(once: _Named) -> Iterator[tuple[str, ParamHook]]:
    for name, param in once:
        for kind in hooks(param):
            yield name, kind


def _is_strided(param: nn.Parameter) -> bool:
    """Of a sharded parameter not asked: torch has put it into order."""
    return type(param) is nn.Parameter and not is_lazy(param) and not param.is_contiguous()


def _self_written(places: Sequence[Site], first: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Embeddings with ``max_norm`` shorten the rows that they look up, in place (torch ``F.embedding``)."""
    for site in places:
        module = site.module
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and site.first and module.max_norm is not None:
            yield first[id(module.weight)], f"max_norm={float(module.max_norm):g}"


# --- what its config says of the architecture; asking never raises -----------------------------------------------


def ask(owner: object, method: str) -> Any:
    """What the method without arguments returns; None if it is missing or raises, as ``get_input_embeddings`` may."""
    try:
        return getattr(owner, method)()
    except Exception:  # as above
        return None


def architecture(model: nn.Module) -> ArchitectureFacts:
    """Facts of ``model.config``, and of its text config where it says nothing itself (multimodal models)."""
    config = peek(model, "config")
    parts = (peek(config, name) for name in PARTS)
    sources = tuple(source for source in (config, ask(config, "get_text_config"), *parts) if source is not None)
    return said_by(sources, _tp_size(model, config))


def _tp_size(model: nn.Module, config: object) -> int | None:
    """``model.tp_size``, else that of ``config.distributed_config``, a mapping or an object (H-3)."""
    return said((model, peek(config, "distributed_config")), int, "tp_size")


def tensor_plan(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """The model's own tensor-parallel plan. What its config says of the base model comes under the base's prefix."""
    own = peek(model, "tp_plan") or peek(model, "_tp_plan")
    if isinstance(own, Mapping) and own:
        return _pairs(own, "")
    base = peek(peek(model, "config"), "base_model_tp_plan")
    prefix = peek(model, "base_model_prefix")
    inside = isinstance(prefix, str) and isinstance(peek(model, prefix), nn.Module)
    return _pairs(base, f"{prefix}." if inside else "") if isinstance(base, Mapping) else ()


def _pairs(plan: Mapping[Any, Any], prefix: str) -> tuple[tuple[str, str], ...]:
    return tuple((prefix + path, style) for path, style in plan.items() if isinstance(path, str) and type(style) is str)
