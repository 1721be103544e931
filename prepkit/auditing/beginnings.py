"""How the layers of a model began: units that are all alike, norms with the momentum of another library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from attrs import define
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from prepkit.facts.values import BeginningFacts
from prepkit.objects.names import unwrap_root

KEPT = (0.9, 1.0)
"""From the first to below the second a momentum is what Keras calls so; 1.0 takes the last batch alone, on purpose."""


@define(eq=False)
class Beginnings:
    """Listens inside ``on()``."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        yield

    def facts(self, model: nn.Module | None) -> BeginningFacts:
        """How this one began, whose gradients are there."""
        if model is None:
            return BeginningFacts()
        root = unwrap_root(model)[-1]
        return BeginningFacts(alike=tuple(_alike(root)), keeps=tuple(_keeps(root)))


def _alike(root: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield weights whose units are all one, and go on as one: so do their biases and gradients say."""
    for path, layer in root.named_modules():
        if isinstance(layer, nn.Linear | _ConvNd) and not isinstance(layer, nn.LazyLinear):
            weight, bias, grad = layer.weight, layer.bias, layer.weight.grad
            grouped = getattr(layer, "groups", 1) > 1
            if grad is None or grouped or not weight.requires_grad or isinstance(weight, DTensor):
                continue
            turned = isinstance(layer, _ConvTransposeNd)
            units, moves = (one.transpose(0, 1) if turned else one for one in (weight.detach(), grad))
            one = bias is None or bool((bias.detach() == bias.detach().flatten()[0]).all())
            if one and _one_row(units, 0.0) and _one_row(moves, torch.finfo(moves.dtype).eps ** 0.5):
                yield f"{path}.weight" if path else "weight", len(units)


def _one_row(rows: Tensor, apart: float) -> bool:
    """Return whether there are several rows, all the same up to this part of the greatest, and none is zero."""
    if rows.dim() < 2 or len(rows) < 2 or not rows[0].numel() or rows.is_sparse:
        return False
    for some in (rows[:2], rows):  # most are told apart by their first two
        if not bool(((some - some[:1]).abs().amax() <= apart * some.abs().amax()).item()):
            return False
    return bool(rows[0].any())


def _keeps(root: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield batch norms that average what they see, and hardly keep any of it."""
    for path, layer in root.named_modules():
        averages = isinstance(layer, _BatchNorm) and layer.training and layer.track_running_stats
        if averages and layer.momentum is not None and KEPT[0] <= layer.momentum < KEPT[1]:
            yield path, float(layer.momentum)
