"""What Lightning, and Fabric, have put around objects, told by class names: it need not be installed.

``Fabric.setup`` gives ``_FabricModule`` (the wrapped module in ``_forward_module``, precision in ``_strategy``) and a
class made on the spot from ``_FabricOptimizer`` (``_optimizer``); ``setup_dataloaders`` gives ``_FabricDataLoader``
(``_dataloader``). Source: ``lightning/fabric/wrappers.py``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from prepkit.facts.preparation import AutocastOptions

LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning")
DTYPES = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
"""Precisions of Fabric under which the forward runs in autocast and returns torch's default dtype."""


def _is(thing: object, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.partition(".")[0] in LIBRARIES for base in type(thing).__mro__)


def module_of(model: nn.Module) -> nn.Module:
    """Return what Fabric's wrapper calls, the strategy's own wrapper included; any other module itself."""
    while _is(model, "_FabricModule"):
        model = model._modules["_forward_module"] or model
    return model


def optimizer_of(optimizer: Any) -> Any:
    """The optimizer inside Fabric's, or inside that of a LightningModule; any other itself."""
    while _is(optimizer, "_FabricOptimizer") or _is(optimizer, "LightningOptimizer"):
        optimizer = vars(optimizer)["_optimizer"]
    return optimizer


def loader_of(loader: Any) -> Any:
    """The loader inside Fabric's; any other itself."""
    while _is(loader, "_FabricDataLoader"):
        loader = vars(loader)["_dataloader"]
    return loader


def autocast_of(model: nn.Module) -> AutocastOptions | None:
    """The autocast that Fabric's wrapper runs the forward under; None without one."""
    if not _is(model, "_FabricModule"):
        return None
    own = vars(model)
    plugin = getattr(own.get("_strategy"), "precision", None) or own.get("_precision")  # older Fabrics have the second
    dtype = DTYPES.get(str(getattr(plugin, "precision", "")))
    return None if dtype is None else AutocastOptions(dtype=dtype, output_dtype="float32", by="Fabric")
