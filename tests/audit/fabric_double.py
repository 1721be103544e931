"""Lightning Fabric's three wrappers, recorded: class names, attributes and bases as its source has them (2.6).

Source: ``lightning/fabric/wrappers.py`` (``_FabricModule``, ``_FabricOptimizer``, ``_FabricDataLoader``) and
``lightning/fabric/plugins/precision/amp.py`` (``MixedPrecision.precision``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn


class _FabricModule(nn.Module):
    def __init__(self, forward_module: nn.Module, strategy: Any, original_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module
        self._strategy = strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module(*args, **kwargs)


class _FabricOptimizer:
    def __init__(self, optimizer: Any) -> None:
        self.__dict__ = {key: value for key, value in vars(optimizer).items() if key not in ("state_dict", "step")}
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self._optimizer = optimizer


class _FabricDataLoader:
    def __init__(self, dataloader: Any) -> None:
        self.__dict__.update(vars(dataloader))
        self._dataloader = dataloader

    def __iter__(self) -> Any:
        yield from self._dataloader


for _wrapper in (_FabricModule, _FabricOptimizer, _FabricDataLoader):
    _wrapper.__module__ = "lightning.fabric.wrappers"


def set_up(model: nn.Module, wrapped: nn.Module, optimizer: Any, loader: Any, precision: str) -> tuple[Any, Any, Any]:
    """As ``Fabric.setup`` and ``setup_dataloaders`` return them; ``wrapped`` is what the strategy has made."""
    module = _FabricModule(wrapped, SimpleNamespace(precision=SimpleNamespace(precision=precision)), model)
    return module, _FabricOptimizer(optimizer), _FabricDataLoader(loader)
