"""Whether modules that ``parallelize_module`` has cut compute what they computed whole, and parts are parts of one.

A copy of each is kept, as it was before, and called once with what the cut one is called with first: a projection to
queries, keys and values in one is cut across all three, heads are counted that other ranks hold, a sum is left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed.tensor.parallel as tensor_parallel
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import api
from torch.utils._pytree import tree_leaves

from prepkit.auditing.asking import TOO_FAR, far, tensors
from prepkit.observe.fingerprints.tensor import fingerprint
from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.modules import drops
from prepkit.observe.prepared.reading import generators_kept
from prepkit.ranks.world import world

MOST = 1 << 25
"""Elements of what is copied."""
DRAWS = ("normal_", "uniform_")
FEWEST = 16
"""Numbers of a part that are alike by no chance."""
FAR = 0.1
"""Of the largest output, in half precision, where a sum of parts is rounded otherwise than one of all."""


@frozen(eq=False)
class _Cut:
    """A module that was cut."""

    line: str
    whole: nn.Module
    """As it was."""


@define(eq=False)
class Cuts:
    """Listens inside ``on()``."""

    otherwise: dict[tuple[str, str], float] = field(factory=dict)
    """Lines, and classes of modules that compute otherwise since: by which part of the largest output."""
    _cut: weakref.WeakKeyDictionary[nn.Module, _Cut] = field(factory=weakref.WeakKeyDictionary)
    """Those that were not called yet."""
    _inside: bool = False
    draws: bool = False
    """Whether torch has drawn the numbers of shards itself, which it does alike on CPUs that were seeded alike."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            for name in DRAWS:
                stack.enter_context(around_calls(Tensor, name, self._draws))
            stack.enter_context(around_calls(api, "parallelize_module", self._parallelizes, also=tensor_parallel))
            yield

    def told(self) -> dict[str, Any]:
        """As a field of ``WindowFacts``."""
        return {"cut_otherwise": tuple((line, name, apart) for (line, name), apart in self.otherwise.items())}

    def _draws(self, plain: Any, tensor: Any, *given: Any, **named: Any) -> Any:
        self.draws = self.draws or isinstance(tensor, DTensor)
        return plain(tensor, *given, **named)

    def _parallelizes(self, plain: Any, module: Any, *given: Any, **named: Any) -> Any:
        if self._inside:  # which does so with each part that is named by a pattern
            return plain(module, *given, **named)
        line, plan = (
            line_of_program(frames_above(__file__)),
            given[1] if len(given) > 1 else named.get("parallelize_plan"),
        )
        whole = _copied(module) if module not in self._cut and _takes_whole(plan) else None
        self._inside = True
        try:
            cut = plain(module, *given, **named)
        finally:
            self._inside = False
        if whole is not None and line:
            self._cut[module] = _Cut(line, whole)
            handle = module.register_forward_hook(self._called, with_kwargs=True)
            weakref.finalize(self, handle.remove)
        return cut

    def _called(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        cut = self._cut.pop(module, None)
        if cut is None or torch.compiler.is_compiling() or not _holds_the_same(module, cut.whole):
            return
        every = tree_leaves((args, kwargs, outputs))
        if any(isinstance(one, DTensor) for one in every) or (module.training and drops(module)):
            return
        for copied, inside in zip(cut.whole.modules(), module.modules(), strict=True):
            copied.training = inside.training
        with torch.no_grad(), generators_kept():
            made = cut.whole(*args, **kwargs)
        for one, other in zip(tensors(outputs), tensors(made), strict=True):
            limit = TOO_FAR if one.dtype.itemsize > 2 else FAR
            if one.is_floating_point() and one.shape == other.shape and far(other, one.detach(), limit):
                apart = float((one.detach() - other).abs().max() / other.abs().max())
                self.otherwise[cut.line, type(module).__name__] = apart


def parts_alike(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Matrices of which ranks hold parts that are one and the same, though they are not of one place; and which ranks.

    Collective.
    """
    mine: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and param.dim() > 1 and not param.is_meta:
            part = param._local_tensor.detach()
            if part.numel() >= FEWEST and bool((part != part.flatten()[0]).any()):
                _, begins = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
                mine[name] = tuple(begins), fingerprint(part)
    found: dict[str, tuple[int, ...]] = {}
    every = world().gather(mine)
    for name, (begins, numbers) in mine.items():
        others = (rank for rank, told in enumerate(every) if name in told and told[name][1] == numbers)
        alike = tuple(rank for rank in others if every[rank][name][0] != begins)
        if alike:
            found[name] = tuple(sorted((world().rank, *alike)))
    return found


def _takes_whole(plan: Any) -> bool:
    """Return whether each style of a plan is given, and gives, what ranks hold whole: no part of a sequence."""
    styles = [*plan.values()] if isinstance(plan, dict) else [plan]
    columns = (one.input_layouts for one in styles if type(one) is tensor_parallel.ColwiseParallel)
    rows = (one.output_layouts for one in styles if type(one) is tensor_parallel.RowwiseParallel)
    layouts = [*columns, *rows]
    return len(layouts) == len(styles) and all(one.is_replicate() for each in layouts for one in each)


def _copied(module: nn.Module) -> nn.Module | None:
    """A copy of a module that holds plain tensors; None: it holds others, too much, or what cannot be copied."""
    held = [*module.parameters(), *module.buffers()]
    plain = all(not isinstance(one, DTensor) and not one.is_meta for one in held)
    if not plain or not held or sum(one.numel() for one in held) > MOST:
        return None
    try:
        return deepcopy(module)
    except Exception:  # of the program's own classes
        return None


def _holds_the_same(module: nn.Module, whole: nn.Module) -> bool:
    """Return whether each rank's part is that of the copy still, and nothing was loaded or stepped since."""
    named = dict(whole.named_parameters())
    return all(name in named and _is_part(param, named[name]) for name, param in module.named_parameters())


def _is_part(param: Tensor, whole: Tensor) -> bool:
    if not isinstance(param, DTensor):
        return torch.equal(param, whole)
    shape, begins = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    part = whole
    for dim, (size, begin) in enumerate(zip(shape, begins, strict=True)):
        part = part.narrow(dim, min(begin, part.shape[dim] - size), size)
    return torch.equal(param.to_local(), part)
