"""A plain copy of a model, whatever it was wrapped in: its author's classes, whole weights, no library's hooks."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn.utils import stateless

from prepkit.objects import names
from prepkit.objects.alive import alive_of
from prepkit.objects.forward import FP8_MARK, MARK
from prepkit.objects.fsdp1_flat import absent_keys
from prepkit.objects.local_part import local
from prepkit.objects.names import Site, first_names, parameters_at, sites
from prepkit.proving import draws

PREPARERS = ("torch.distributed", "torch._dynamo", "deepspeed", "accelerate", "lightning", "prepkit")
"""Packages whose hooks and attributes a plain model has none of."""
WRAPPERS = frozenset({"DistributedDataParallel", "DeepSpeedEngine", "_FabricModule"})
"""Classes that keep what they call as their first child."""
Tables = tuple[tuple[str, tuple[str, ...]], ...]
HOOKS: Tables = (
    ("_forward_pre_hooks", ("_forward_pre_hooks_with_kwargs",)),
    ("_forward_hooks", ("_forward_hooks_with_kwargs", "_forward_hooks_always_called")),
)
"""Where a module keeps the hooks of its forward, and what it knows of each."""

TOOLS = (
    (("torch", "DistributedDataParallel"), "DDP"),
    (("torch", "FullyShardedDataParallel"), "FSDP1"),
    (("torch", "FSDPModule"), "FSDP2"),
    (("torch", "DataLoader"), "loaders"),
    (("torch", "GradScaler"), "GradScaler"),
    (("accelerate", "Accelerator"), "accelerate"),
    (("transformers", "Trainer"), "Trainer"),
    (("lightning", "Trainer"), "Lightning"),
    (("pytorch_lightning", "Trainer"), "Lightning"),
    (("lightning", "Fabric"), "Fabric"),
    (("deepspeed", "DeepSpeedEngine"), "DeepSpeed"),
    (("prepkit", "Prepared"), "prepkit"),
)
"""Package and class of what a program makes, with its short name."""
LOGS = ("log", "log_dict", "print")
"""Methods of a library's module that compute nothing."""


def bare_copy(model: nn.Module, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """A module of the classes that its author wrote, with these weights by canonical name. ``model`` stays as it is.

    A parameter that is not among the weights is copied as it lies, frozen. Ties, shared modules, modes, attributes and
    the author's own hooks are as they were.
    """
    places = [site for site in sites(model) if site.first]
    making = _Making(weights=weights, buffers=buffers, absent=absent_keys(model), first=_first(model))
    making.copied.update(draws.copies(model))
    for site in places:
        making.shell(site)
    for site in places:
        making.fill(site)
    for site in places:
        making.attributes(site.module)
    making.entrance(places[0])
    root: nn.Module = making.copied[id(places[0].module)]
    return root


def _first(model: nn.Module) -> dict[int, str]:
    return first_names(parameters_at(sites(model)))


@frozen(kw_only=True, eq=False)
class _Making:
    """A copy that is being made."""

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    absent: Mapping[int, tuple[tuple[str, str], ...]]
    """Keys that FSDP1 has taken from modules, each with its parameter's name."""
    first: Mapping[int, str]
    """Identity of a parameter to its name."""
    copied: dict[int, Any] = field(factory=dict)
    """Identity of a module, parameter, buffer or generator to its copy."""
    made: dict[str, nn.Parameter] = field(factory=dict)

    def shell(self, site: Site) -> None:
        """An empty module in the place of one and its wrappers."""
        shell: nn.Module = object.__new__(_plain_class(type(site.module)))
        nn.Module.__init__(shell)
        self.copied.update({id(wrapper): shell for wrapper in site.stack})

    def fill(self, site: Site) -> None:
        """Its parameters, buffers and children."""
        shell, module = self.copied[id(site.module)], site.module
        gone = dict(self.absent.get(id(module), ()))
        for key, param in module._parameters.items():
            if key not in gone:
                shell._parameters[key] = None if param is None else self._param(self.first[id(param)], param)
                self.copied[id(param)] = shell._parameters[key]
        for key, name in gone.items():
            shell._parameters[key] = self._param(name, None)
        for key, buffer in module._buffers.items():
            path = f"{site.path}.{key}" if site.path else key
            shell._buffers[key] = None if buffer is None else self.buffers.get(path, buffer).detach().clone()
            self.copied[id(buffer)] = shell._buffers[key]
        shell._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for key, child in module._modules.items():
            shell._modules[key] = None if child is None else self.copied[id(names.unwrap(child)[-1])]

    def attributes(self, module: nn.Module) -> None:
        """What else stands in it; nothing of a wrapper."""
        shell = self.copied[id(module)]
        if not isinstance(shell, Through):
            _attributes(module, shell, dict(self.absent.get(id(module), ())), self.copied)

    def entrance(self, root: Site) -> None:
        """What the author has put before the forward of the root's wrappers: it changes what the root is given."""
        shell = self.copied[id(root.module)]
        vars(shell)["_forward_pre_hooks"].clear()
        for one in root.stack:
            _hooks(one, shell, HOOKS[:1], self.copied)

    def _param(self, name: str, param: nn.Parameter | None) -> nn.Parameter:
        if name not in self.made:
            whole = self.weights[name] if name in self.weights else copy.deepcopy(param)
            assert whole is not None, "every parameter that FSDP1 has taken is among the weights"
            self.made[name] = nn.Parameter(whole, requires_grad=False)
        return self.made[name]


class Through(nn.Module):
    """Stands where a wrapper stood inside of a model, so that names stay."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module inside returns."""
        return next(iter(self._modules.values()))(*args, **kwargs)  # type: ignore[misc]  # a wrapper has one


def _plain_class(cls: type) -> type:
    """The class behind the one that ``fully_shard`` or ``replicate`` has put in its place."""
    if not WRAPPERS.isdisjoint(names.known_bases(cls)):
        return Through
    while len(cls.__bases__) > 1 and cls.__bases__[0].__module__.startswith("torch.distributed"):
        cls = cls.__bases__[-1]
    return cls


def _attributes(module: nn.Module, shell: nn.Module, absent: Mapping[str, str], copied: dict[int, Any]) -> None:
    """Everything else that stands in the instance, but for what a library has put in the place of the class's own."""
    internal = vars(nn.Module())
    stood = vars(module)
    ours = {"forward", "_original_forward"} if {MARK, FP8_MARK, "_original_forward"} & stood.keys() else set()
    for key, value in stood.items():
        if key in internal and key != "training":
            continue
        if (
            key in absent
            or key in ours
            or key.startswith(("_prepkit", "_fsdp", "__composable", "ds_", "_ds_", "_hf_hook"))
        ):
            continue
        if key == "_compiled_call_impl" or (_foreign(value) and hasattr(type(module), key)):  # as a ``forward``
            continue
        vars(shell)[key] = _lent(value) if _foreign(value) else _copied(value, copied)
    vars(shell).update((key, _nothing) for key in LOGS if _foreign(getattr(type(module), key, None)))
    _hooks(module, shell, HOOKS, copied)


def _hooks(module: nn.Module, shell: nn.Module, kinds: Tables, copied: dict[int, Any]) -> None:
    stood = vars(module)
    for hooks, known in kinds:
        for number, hook in stood[hooks].items():
            if not _foreign(hook):
                vars(shell)[hooks][number] = _copied(hook, copied)
                for table in known:
                    if number in stood[table]:
                        vars(shell)[table][number] = stood[table][number]


def _copied(value: Any, copied: dict[int, Any]) -> Any:
    """A deep copy in which modules and tensors of the model are those of its copy; what has no copy is shared."""
    if isinstance(value, torch.Generator):  # which knows no deepcopy, and must not draw for the replay
        return copied.get(id(value)) or value.clone_state()
    try:
        return copy.deepcopy(value, dict(copied))
    except (TypeError, RuntimeError, NotImplementedError):  # a lock, a file, a graph, a process group
        return value


class Quiet:
    """A logger that takes everything and writes nothing."""

    def __getattr__(self, name: str) -> Quiet:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Quiet:
        """Return itself, for whatever is done with what a logger returns."""
        return self


def _nothing(*_: Any, **__: Any) -> None:
    """Logs nothing: what was logged in the run is not logged again."""


def _lent(value: Any) -> Any:
    """What a library keeps in a module, as a Trainer, which the forward may ask: the same object, without loggers."""
    value = getattr(getattr(value, "__repr__", None), "__self__", value)  # Lightning keeps a weak proxy of a Fabric
    if "_loggers" not in getattr(value, "__dict__", ()):
        return value
    lent = copy.copy(value)
    lent._loggers = [Quiet() for _ in value._loggers]
    return lent


def _foreign(value: Any) -> bool:
    while isinstance(value, partial):
        value = value.func
    value = getattr(value, "__func__", value)
    homes = (getattr(value, "__module__", None), type(value).__module__)
    return any(str(home).startswith(PREPARERS) for home in homes)


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Canonical name and buffer, each once."""
    for site in sites(model):
        for name, buffer in site.module._buffers.items():
            if buffer is not None and site.first:
                yield (f"{site.path}.{name}" if site.path else name), buffer


def standing(module: nn.Module) -> nn.Module:
    """The module; while ``torch.func.functional_call`` lends it tensors, one that keeps what stands in it now."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is stateless._functional_call.__code__ and module in set(frame.f_locals["module"].modules()):
            return _keeping(module, {})
    return module


def _keeping(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """The same modules with tables of parameters, buffers and children of their own."""
    if id(module) not in made:
        made[id(module)] = kept = object.__new__(type(module))
        tables = {key: dict(vars(module)[key]) for key in ("_parameters", "_buffers")}
        vars(kept).update(vars(module) | tables)
        children = module._modules.items()
        vars(kept)["_modules"] = {key: None if one is None else _keeping(one, made) for key, one in children}
    return made[id(module)]


def wrapped_by(root: nn.Module) -> str:
    """The class of a wrapper that is alive around a model, or around what it is a part of; empty: there is none."""
    *around, inner = names.unwrap(root)
    for one in alive_of(lambda kind: issubclass(kind, nn.Module) and not WRAPPERS.isdisjoint(names.known_bases(kind))):
        if one not in (*around, inner) and inner in set(one.modules()):
            return type(one).__name__
    return ""


def uses() -> tuple[str, ...]:
    """Tools that are alive in this process, and ``torch``: what wraps or drives a model, loaders, a scaler."""
    bases = {base for kind in set(map(type, gc.get_objects())) for base in kind.__mro__}
    there = {(str(base.__module__).partition(".")[0], base.__name__) for base in bases}
    found = dict.fromkeys(said for key, said in TOOLS if key in there)
    return ("torch", *found)


def is_raw(root: nn.Module) -> bool:
    """Return whether no class of it, or of a module in it, comes from what wraps or shards models."""
    bases = {base for one in root.modules() for base in type(one).__mro__}
    return not any(base.__module__.startswith((*PREPARERS, "torch.nn.parallel")) for base in bases)


def evaluate(model: nn.Module, paths: tuple[str, ...]) -> None:
    """Puts exactly these modules into evaluation mode, and everything else into training mode."""
    still = set(paths)
    for path, module in names.named_modules(model).items():
        module.training = path not in still


def drops(model: nn.Module) -> bool:
    """Return whether a forward of it draws random numbers, as far as its classes tell."""
    return any(isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0 and one.training for one in model.modules())


def normalises_over_ranks(model: nn.Module) -> bool:
    """Return whether it has layers whose output depends on what other ranks read."""
    return any(isinstance(one, nn.SyncBatchNorm) and one.training for one in model.modules())


def settings(root: nn.Module) -> Iterator[str]:
    """Yield numbers that layers of torch's were made with, as ``2.p=0.1`` of a dropout."""
    for path, module in names.named_modules(root).items():
        for key, value in vars(module).items() if type(module).__module__.startswith("torch.nn.modules") else ():
            if isinstance(value, float):
                yield f"{path}.{key}={value:g}"


def in_the_same_place(params: Iterable[tuple[str, nn.Parameter]], others: Iterable[nn.Module]) -> Iterator[str]:
    """Yield other modules that were called whose weights lie where those of the model lie, though they are others."""
    trained = [(local(param), id(param)) for _, param in params if param.requires_grad]
    places = {part.data_ptr(): its for part, its in trained if part.numel() and part.data_ptr()}
    for one in others:
        here = [(name, places.get(local(param).data_ptr()), id(param)) for name, param in one.named_parameters()]
        if same := [f"`{name}`" for name, mine, its in here if mine is not None and mine != its]:
            said = f"weights of `{type(one).__name__}` lie where the model's lie ({', '.join(same[:3])})"
            yield f"{said}, and move with each step: copy a teacher or a target (copy.deepcopy, no assign=True)"


def stands_around(root: nn.Module, wrapper: str) -> dict[str, Any]:
    """What stands around the root, as ``Disturbed`` has it; ``wrapper``: as a call has shown it; empty: none has."""
    return {"wrapper": wrapper or wrapped_by(root), "raw": is_raw(root), "uses": uses()}


def sums_low(root: nn.Module) -> bool:
    """Return whether gradients are added up, or sent, in 16 bits."""
    low = any(one.requires_grad and one.dtype in (torch.bfloat16, torch.float16) for one in root.parameters())
    return low or any(getattr(one, "_comm_hooks", None) for one in root.modules())
