"""Stand-ins for libraries that need a GPU or a TPU. Each takes the calls of the real one, and records them.

Signatures: TransformerEngine 1.x and 2.x (``pytorch/module/linear.py``, ``module/layernorm.py``, ``fp8.py``,
``common/recipe``), MS-AMP 0.4 (``msamp/__init__.py``, ``nn/linear.py``), torch_xla 2.x (``core/xla_model.py``,
``distributed/xla_multiprocessing.py``, ``runtime.py``).
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prepkit.observe import env

Calls = list[tuple[Any, ...]]


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A module of that dotted name, with its parents, for as long as the test runs."""
    parent, _, leaf = name.rpartition(".")
    made = ModuleType(name)
    vars(made).update(members)
    for member in members.values():
        if isinstance(member, type):
            member.__module__ = name
    monkeypatch.setitem(sys.modules, name, made)
    if parent:
        above = sys.modules.get(parent)
        if not isinstance(above, ModuleType):
            above = install(monkeypatch, parent)
        setattr(above, leaf, made)
    return made


# --- TransformerEngine ---------------------------------------------------------------------------------------------


class Format(enum.Enum):
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


OLDER = frozenset({"interval", "override_linear_precision"})
"""Options that TransformerEngine has dropped since."""


class DelayedScaling:
    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: str = "max",
        **older: Any,
    ) -> None:
        if unknown := set(older) - OLDER:
            raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
        self.said = {"margin": margin, "fp8_format": fp8_format.name, "amax_history_len": amax_history_len}
        self.said |= {"amax_compute_algo": amax_compute_algo, **older}


class MXFP8BlockScaling:
    def __init__(self, margin: int = 0, fp8_format: Format = Format.E4M3) -> None:
        self.said = {"margin": margin, "fp8_format": fp8_format.name}


class Linear(nn.Module):
    """As TransformerEngine's: a module of its own, not a subclass of torch's."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else torch.empty(0)
        )

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.bias.numel() else None
        return nn.functional.linear(x, self.weight, bias)


class LayerNorm(nn.Module):
    """As TransformerEngine's, which always has a bias."""

    def __init__(
        self,
        normalized_shape: int,
        *,
        eps: float = 1e-5,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(normalized_shape, dtype=params_dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps)


def _seems_installed(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """The environment has the library, as it would have the real one."""
    real = env._libraries
    monkeypatch.setattr(env, "_libraries", lambda: (*real(), (library, "2.0")))


def transformer_engine(monkeypatch: pytest.MonkeyPatch, *, older: bool = False) -> Calls:
    """Puts the double in place; the calls are ``("autocast", enabled, recipe, whether bfloat16 autocast runs)``."""
    _seems_installed(monkeypatch, "transformer_engine")
    calls: Calls = []

    @contextmanager
    def autocast(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
        calls.append(("autocast", enabled, recipe.said, torch.is_autocast_enabled("cpu")))
        yield

    @contextmanager
    def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None) -> Iterator[None]:
        calls.append(("fp8_autocast", enabled, fp8_recipe.said, torch.is_autocast_enabled("cpu")))
        yield

    scope = {"fp8_autocast": fp8_autocast} if older else {"autocast": autocast, "fp8_autocast": fp8_autocast}
    install(monkeypatch, "transformer_engine.pytorch", Linear=Linear, LayerNorm=LayerNorm, **scope)
    recipes = {"Format": Format, "DelayedScaling": DelayedScaling, "MXFP8BlockScaling": MXFP8BlockScaling}
    install(monkeypatch, "transformer_engine.common.recipe", **recipes)
    return calls


# --- MS-AMP --------------------------------------------------------------------------------------------------------


class ScalingParameter:
    """As MS-AMP's: no tensor, though it stands among the parameters, and with few of a tensor's attributes."""

    pretends = False
    is_leaf = True
    grad = None

    @property
    def __class__(self) -> Any:
        return Tensor if ScalingParameter.pretends else ScalingParameter

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("MS-AMP's has no setter")

    def __init__(self, value: Tensor) -> None:
        self.value, self.requires_grad = value, True
        self.is_floating_point = lambda: False  # or Module.float() would cast it
        self.shape, self.dtype, self.device, self.numel = value.shape, value.dtype, value.device, value.numel


class FP8Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight: Any = ScalingParameter(linear.weight.detach().to(torch.float16))
        self._parameters["weight"] = weight
        bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return nn.functional.linear(x, weight.value.to(x.dtype), self.bias)


class LBAdamW(torch.optim.AdamW):
    def __init__(self, groups: Any) -> None:
        ScalingParameter.pretends = True  # as MS-AMP does, so that torch takes what is no tensor
        try:
            super().__init__(groups)
        finally:
            ScalingParameter.pretends = False


def msamp(monkeypatch: pytest.MonkeyPatch, *, own_ddp: bool = True, fails: bool = False) -> Calls:
    """Puts the double in place; the calls are ``("initialize", optimizer class, opt_level)``.

    Those under DeepSpeed are ``("deepspeed.initialize", optimizer class, section)``, around DeepSpeed's own for real.
    """
    _seems_installed(monkeypatch, "msamp")
    calls: Calls = []

    def replace(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear):
            return module if getattr(module, "use_fp32_linear", False) else FP8Linear(module)
        for name, child in list(module.named_children()):
            setattr(module, name, replace(child))
        return module

    def initialize(model: nn.Module, optimizer: Any = None, opt_level: str = "O1") -> tuple[nn.Module, Any]:
        calls.append(("initialize", type(optimizer).__name__, opt_level))
        order = [id(param) for param in model.parameters()]
        places = [[order.index(id(param)) for param in group["params"]] for group in optimizer.param_groups]
        cast = replace(model)
        now = list(cast.parameters())
        for group, held in zip(optimizer.param_groups, places, strict=True):
            group["params"] = [now[place] for place in held]
        if fails:
            raise RuntimeError("no float8 kernel")
        for name in ("foreach", "capturable", "differentiable", "fused"):
            optimizer.defaults.pop(name, None)
        scaled = [name for name, param in cast.named_parameters() if isinstance(param, ScalingParameter)]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(cast, scaled)
        return cast, LBAdamW(optimizer.param_groups)

    def initialize_deepspeed(*, config: dict[str, Any], **given: Any) -> tuple[Any, Any, Any, Any]:
        import deepspeed

        calls.append(("deepspeed.initialize", type(given["optimizer"]).__name__, config.pop("msamp")))
        made = deepspeed.initialize(config=config, **given)
        engine, zero = made[0], made[1]
        engine.__class__ = type("MSAMPDeepSpeedEngine", (deepspeed.DeepSpeedEngine,), {})
        before = {id(param): name for name, param in engine.module.named_parameters()}
        now = dict(replace(engine.module).named_parameters())
        zero.bit16_groups = [[now[before[id(param)]] for param in group] for group in zero.bit16_groups]
        return made

    install(monkeypatch, "msamp", initialize=initialize)
    install(monkeypatch, "msamp.deepspeed", initialize=initialize_deepspeed)
    install(monkeypatch, "msamp.nn.linear", FP8Linear=FP8Linear)
    install(monkeypatch, "msamp.optim.adamw", LBAdamW=LBAdamW)
    if own_ddp:
        wrapper = type("DistributedDataParallel", (nn.parallel.DistributedDataParallel,), {"__module__": "msamp.nn"})
        monkeypatch.setattr(nn.parallel, "DistributedDataParallel", wrapper)
    return calls


# --- torch_xla -----------------------------------------------------------------------------------------------------


def torch_xla(monkeypatch: pytest.MonkeyPatch, *, replaces: bool = True, world: int = 2, started: bool = True) -> Calls:
    """Puts the double in place. The device is the CPU; ``replaces``: moving gives the model other parameters.

    ``started``: torch_xla has started the processes of which this is one.
    """
    calls: Calls = []

    def xla_device() -> torch.device:
        calls.append(("xla_device",))
        return torch.device("cpu")

    def all_reduce(reduce_type: str, inputs: list[Tensor], scale: float = 1.0) -> None:
        calls.append(("all_reduce", reduce_type, len(inputs), scale))
        for tensor in inputs:
            tensor.mul_(world * scale)

    class MpModelWrapper:
        def __init__(self, model: nn.Module) -> None:
            self._model = model

        def to(self, device: torch.device) -> nn.Module:
            calls.append(("MpModelWrapper.to", str(device)))
            return self._model.to(device)

    if replaces:
        monkeypatch.setattr(nn.Module, "to", _replaced)
    core = SimpleNamespace(_xla_get_replication_devices_count=_said(world if started else 0))
    install(monkeypatch, "torch_xla", _XLAC=core)
    install(monkeypatch, "torch_xla.core.xla_model", xla_device=xla_device, all_reduce=all_reduce)
    install(monkeypatch, "torch_xla.distributed.xla_multiprocessing", MpModelWrapper=MpModelWrapper)

    def world_size() -> int:
        calls.append(("world_size",))
        return world

    install(monkeypatch, "torch_xla.runtime", world_size=world_size)
    return calls


def _said(world: int) -> Callable[[], int]:
    return lambda: world


def _replaced(self: nn.Module, *_: Any) -> nn.Module:
    """What ``Module.to`` does where torch cannot exchange the data of a parameter (``Module._apply``)."""
    made: dict[int, nn.Parameter] = {}
    for module in self.modules():
        for name, param in module._parameters.items():
            if param is not None:
                new = made.setdefault(id(param), nn.Parameter(param.detach().clone(), param.requires_grad))
                module._parameters[name] = new
    return self
