"""Pictures of 0 to 255 that a first convolution is given as they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from prepkit.observe.prepared.instead import around_calls

MOST = 4
"""Convolutions that are kept."""
SAMPLE = 4096
"""Values of the first picture that are looked at."""
LEVELS = 16
"""Different values that a picture has at least."""
CHANNELS = (1, 3)


@define(eq=False)
class Pixels:
    """Listens inside ``on()``."""

    _raw: list[tuple[weakref.ref[nn.Module], float]] = field(factory=list)
    """Convolutions that were given such pictures, with the largest value of one."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with around_calls(nn.Conv2d, "forward", self._convolves):
            yield

    def facts(self, roots: Iterable[nn.Module]) -> Iterator[tuple[str, float]]:
        """Yield where such a convolution stands in a model that trains without a norm that would scale them."""
        known = {id(conv()): most for conv, most in self._raw if conv() is not None}
        for root in roots if known else ():
            for path, module in root.named_modules():
                if id(module) in known and not _normed(root, path):
                    yield f"{type(root).__name__}.{path}" if path else type(root).__name__, known[id(module)]

    def _convolves(self, plain: Any, conv: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and len(self._raw) < MOST and given:
            images = given[0]
            if conv.in_channels in CHANNELS and type(images) is Tensor and conv.weight.requires_grad:
                self._looks(conv, images)
        return plain(conv, *given, **named)

    def _looks(self, conv: nn.Module, images: Tensor) -> None:
        if images.dim() != 4 or not images.is_floating_point() or images.requires_grad or not images.numel():
            return
        if torch._C._functorch.maybe_current_level() is not None or any(one() is conv for one, _ in self._raw):
            return
        values = images.detach()[0].reshape(-1)[:SAMPLE].float()
        least, most = (float(one) for one in values.aminmax())
        whole = least >= 0 and 100 < most <= 255 and bool((values == values.round()).all())
        if whole and len(set(values.tolist())) >= LEVELS:
            self._raw.append((weakref.ref(conv), most))


def _normed(root: nn.Module, path: str) -> bool:
    """Whether a norm makes the size of values go away: some anywhere, or any beside the convolution."""
    parent = root.get_submodule(path.rpartition(".")[0])
    kinds = [type(one).__name__ for one in root.modules()]
    beside = [type(one).__name__ for one in parent.children()]
    return any(one.startswith(("BatchNorm", "SyncBatchNorm", "GroupNorm", "InstanceNorm")) for one in kinds) or any(
        "Norm" in one for one in beside
    )
