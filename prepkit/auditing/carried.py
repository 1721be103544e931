"""States of recurrent layers that a program hands from one batch of a loader that shuffles to the next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls

LAYERS = (nn.RNN, nn.LSTM, nn.GRU)
CELLS = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)


@define(eq=False)
class _Ended:
    """How a layer has ended its last call."""

    layer: weakref.ref[nn.Module]
    batches: int
    """Batches of loaders that shuffle which had been read then."""
    states: frozenset[StorageWeakRef]


@define(eq=False)
class Carried:
    """Listens inside ``on()``, to layers in training; a state that is cloned on its way is not followed."""

    found: dict[tuple[str, str, str], None] = field(factory=dict)
    """As in ``WindowFacts``."""
    _batches: int = 0
    _sampler: str = ""
    """What has drawn the last batch; empty: it was read in order."""
    _samples: int = 0
    """How many it has."""
    _ended: dict[int, _Ended] = field(factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(_BaseDataLoaderIter, "__next__", self._reads))
            for kind in (*LAYERS, *CELLS):
                stack.enter_context(around_calls(kind, "forward", self._runs))
            yield

    def _reads(self, plain: Callable[..., Any], reading: Any) -> Any:
        batch = plain(reading)
        if threading.current_thread() is threading.main_thread():  # others read ahead
            self._sampler = shuffles_by(reading)
            self._batches += bool(self._sampler)
            first = next((one for one in tree_leaves(batch) if isinstance(one, Tensor) and one.dim()), None)
            self._samples = 0 if first is None else len(first)
        return batch

    def _runs(self, plain: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (layer.training and torch.is_grad_enabled()):
            return plain(layer, *args, **kwargs)
        state = args[1] if len(args) > 1 else kwargs.get("hx")
        before = self._ended.get(id(layer))
        if state is not None and before is not None and before.layer() is layer and self._goes_on(before, state):
            line = line_of_program(frames_above(__file__))
            self.found.setdefault((type(layer).__name__, line, self._sampler))
        result = plain(layer, *args, **kwargs)
        ends = result[1] if isinstance(layer, LAYERS) else result
        self._ended[id(layer)] = _Ended(weakref.ref(layer), self._batches, frozenset(_memory(ends)))
        return result

    def _goes_on(self, before: _Ended, state: Any) -> bool:
        """Return whether a state is that of an earlier batch, though another was drawn since."""
        if not self._sampler or self._batches == before.batches:
            return False
        fits = any(self._samples in one.shape[:-1] for one in tree_leaves(state) if isinstance(one, Tensor))
        return fits and not before.states.isdisjoint(_memory(state))


def _memory(state: Any) -> Iterator[StorageWeakRef]:
    """Yield where the tensors of a state lie, without keeping them."""
    for one in tree_leaves(state):
        if isinstance(one, Tensor) and not isinstance(one, DTensor) and one.layout is torch.strided:
            yield StorageWeakRef(one.untyped_storage())  # type: ignore[no-untyped-call]  # torch


def shuffles_by(reading: Any) -> str:
    """The class of what draws the samples of a loader at random; empty: nothing is known to."""
    sampler = getattr(reading._index_sampler, "sampler", reading._index_sampler)
    drawn = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    shuffles = isinstance(sampler, DistributedSampler) and sampler.shuffle
    return type(sampler).__name__ if drawn or shuffles else ""
