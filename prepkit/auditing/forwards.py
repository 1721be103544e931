"""What a model makes of the batch that it was given last: it is asked once more, with something of the batch changed.

Of one sample others must hear nothing, of a token nothing that comes before it and predicts it, of pads nobody. None of
that needs to know how the model computes. Nothing is left of the asking.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.auditing.asking import Asking, ModelCall, apart, digest_of_calls, far, inside_of, tensors
from prepkit.auditing.losses import LossCompared
from prepkit.auditing.others import drawn_samples, is_placed, mixed_samples, shown_classes, views_apart
from prepkit.auditing.terms import compares
from prepkit.facts.window import ForwardFacts
from prepkit.objects.bare_tree import is_sharded
from prepkit.objects.names import unwrap_root
from prepkit.observe.prepared.around import frames_above, line_of_program, own_frames
from prepkit.observe.prepared.modules import drops
from prepkit.ranks.world import world

SLOW_S = 5.0
"""A model whose forward takes longer is asked nothing."""
MOST = 8
"""Calls that are kept."""
SURE = 0.99
"""Share of the targets that have to be tokens of the input."""
LARGE = 1 << 22
"""Elements up to which what two calls were given is compared."""
FEW = 8  # samples from which on it is no chance that all targets stand in an input


@define(eq=False)
class Forwards:
    """Calls of models that train, from outside of any other."""

    _calls: dict[int, ModelCall] = field(factory=dict)
    """The last one of each."""
    _firsts: dict[int, ModelCall] = field(factory=dict)
    """The first one of each since the last look."""
    _rests: dict[int, weakref.ref[nn.Module]] = field(factory=dict)
    """Models that were called without gradients."""
    alike: dict[tuple[str, str], None] = field(factory=dict)
    """As in ``WindowFacts``."""
    _twins: list[tuple[int, Any, Any, str, str]] = field(factory=list)
    """Nodes of graphs of two calls with the same that gave the same, since the last backward."""
    _roots: dict[int, tuple[ModelCall, Any]] = field(factory=dict)
    """The last call of each module since then that was given no tensor with a graph, and a node of its outputs."""
    _asked: Counter[int] = field(factory=Counter)
    """How many calls of each module there were since then."""
    _paired: defaultdict[int, set[int]] = field(factory=partial(defaultdict, set))
    """Which of them are of twins."""

    def knows(self, module: nn.Module) -> bool:
        """Whether it was called before."""
        return id(module) in self._calls

    def backward(self, loss: Any) -> None:
        """Takes down which calls that say the same this loss is made of."""
        for key, one, other, name, line in self._twins:
            if len(self._paired[key]) == self._asked[key] and compares(loss, one, other):
                self.alike[name, line] = None
        self._twins, self._roots = [], {}
        self._asked.clear()
        self._paired.clear()

    def _compares(self, module: nn.Module, call: ModelCall, outputs: Any) -> None:
        """Whether the last call of this module was the same. Reads what both were given, and have returned."""
        node = next((one.grad_fn for one in tensors(outputs) if one.grad_fn is not None), None)
        key, at = id(module), self._asked[id(module)]
        before, self._roots[key] = self._roots.get(key), (call, node)
        self._asked[key] += 1
        if before is not None and node is not None and before[1] is not None and _same_call(before[0], call):
            line = line_of_program(frames_above(__file__))
            self._paired[key] |= {at - 1, at}
            self._twins.append((key, before[1], node, type(unwrap_root(module)[-1]).__name__, line))

    def enters(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Callable[[Any], None]:
        """Keeps a call that trains, and returns what is to hear of its outputs."""
        kind = next((one.device.type for one in module.parameters()), "cpu")
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        call = ModelCall(weakref.ref(module), apart(args), apart(kwargs), autocast)
        self._calls.pop(id(module), None)
        self._calls[id(module)] = call
        self._firsts.setdefault(id(module), call)
        while len(self._calls) > MOST:
            oldest = next(iter(self._calls))
            del self._calls[oldest]
            self._firsts.pop(oldest, None)

        spread = world().size > 1
        from_outside = not any(one.requires_grad for one in tensors((args, kwargs)))

        def leaves(outputs: Any) -> None:
            call.outputs = apart(outputs)
            call.drawn = drawn_samples(tensors((args, kwargs)), own_frames()) if from_outside else 0
            first = next((one for one in tensors(outputs) if one.grad_fn is not None), None) if spread else None
            if first is not None:
                first.register_hook(call.asks_for)  # type: ignore[no-untyped-call]
            if from_outside:
                self._compares(module, call, outputs)

        return leaves

    def given(self) -> str:
        """A digest of what models were given first and last: one of both may be a check of the program's own."""
        return digest_of_calls([*self._firsts.values(), *self._calls.values()])

    def rests(self, module: nn.Module) -> None:
        """Notes a model that was called without gradients."""
        self._rests[id(module)] = weakref.ref(module)

    def drop_at_rest(self, alive: list[Any], model: nn.Module | None) -> Iterator[str]:
        """Yield classes of teachers that drop, but not of averages of what trains, which may drop as it does."""
        groups = [each for one in alive if isinstance(one, torch.optim.Optimizer) for each in one.param_groups]
        held = {id(param) for each in groups for param in each["params"]}
        trained = [] if model is None else [one.shape for one in model.parameters()]
        for module in [one() for one in self._rests.values()]:
            if module is not None and module.training and drops(module):
                params = [*module.parameters()]
                if params and not any(id(one) in held for one in params) and [one.shape for one in params] != trained:
                    yield type(module).__name__

    def facts(
        self, sizes: Collection[int], trained: Collection[int], losses: list[LossCompared]
    ) -> Iterator[ForwardFacts]:
        """What each model makes of its last batch that has something to say of it.

        ``sizes``: of the batches that loaders give; ``trained``: the ``id``s of what is about to be stepped;
        ``losses``: what they have compared.
        """
        returned = [one for call in self._calls.values() for one in tensors(call.outputs)]
        for call in [*self._calls.values()]:
            module = call.module()
            if module is None or not any(id(param) in trained for param in module.parameters()):
                continue
            inside = unwrap_root(module)[-1]
            if _can_be_asked(inside):
                yield from _asked(call, inside, sizes, losses, returned)
        self._calls.clear()
        self._firsts.clear()


def _same_call(one: ModelCall, other: ModelCall) -> bool:
    """Return whether both got, and gave, the same; of few tensors that are not large."""
    pairs = [*tensors((one.args, one.kwargs, one.outputs))], [*tensors((other.args, other.kwargs, other.outputs))]
    small = all(0 < each.numel() <= LARGE for each in pairs[0])
    one_object = any(a.data_ptr() == b.data_ptr() for a, b in zip(*pairs, strict=False))  # asked again, on purpose
    return small and not one_object and len(pairs[0]) == len(pairs[1]) > 1 and all(map(_identical, *pairs))


def _identical(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def sizes_of(alive: list[Any]) -> set[int]:
    """Of the batches that living loaders give, or those that are iterated."""
    samplers = (
        getattr(one, "_index_sampler", None) for one in alive if isinstance(one, DataLoader | _BaseDataLoaderIter)
    )
    return {size for one in samplers if isinstance(size := getattr(one, "batch_size", None), int)}


def _can_be_asked(module: nn.Module) -> bool:
    """Return whether all of it is here, and it is Python that computes."""
    here = not is_sharded(module) and not any(one.is_meta for one in module.parameters())
    return here and not isinstance(module, torch.jit.ScriptModule)


def _asked(
    call: ModelCall, module: nn.Module, sizes: Collection[int], losses: list[LossCompared], returned: list[Tensor]
) -> Iterator[ForwardFacts]:
    asking, sizes = Asking(call=call, module=module), {*sizes, call.drawn} - {0}
    with asking.aside():
        begun = time.perf_counter()
        first = asking.outputs()
        if first is None or time.perf_counter() - begun > SLOW_S:
            return
        told = ForwardFacts(model=type(inside_of(module)).__name__, drops=tuple(asking.drops))
        again = asking.outputs()
        if again is not None and all(map(_equal, first, again)):  # else it draws, or remembers
            mixed = mixed_samples(asking, first, sizes, losses)
            placed = mixed is None and is_placed(asking, first, sizes)
            told = evolve(told, mixed=mixed, placed=placed, **_ahead(asking, first, losses, returned))
            told = evolve(told, **_padded(asking, losses), shown=shown_classes(asking, first, losses))
        told = evolve(told, views_apart=views_apart(asking, losses))
        told = evolve(told, holds=next((one for loss in losses if (one := _held(asking, loss))), ""))
    yield told


# --- a place, and what comes after it ---


def _ahead(asking: Asking, first: list[Tensor], losses: list[LossCompared], returned: list[Tensor]) -> dict[str, Any]:
    """Of sequences whose places predict others: what is wrong between the two."""
    found = []
    for name, tokens in asking.call.given.items():
        distances = [one for loss in losses if (one := _distance(tokens, loss, returned)) is not None]
        for dim, distance in distances:
            if (looks := _looks_ahead(asking, first, tokens, dim)) is not None:
                if distance == 0 and not _reads_itself(asking, first, tokens, dim):
                    continue  # the model moves them by one itself
                found.append((name, distance, looks, tokens.is_floating_point()))
    next_ones = [(name, looks) for name, distance, looks, _ in found if distance == 1]
    masks = "MaskedLM" in type(asking.module).__name__  # which sees both ways, and is to say what it does not see
    copied = [name for name, distance, looks, floats in found if distance < 1 and not floats and (masks or not looks)]
    return {
        "ahead": next_ones[-1][0] if next_ones and all(looks for _, looks in next_ones) else "",
        "copies": copied[0] if copied and not next_ones else "",
        "skips": bool(found) and all(distance > 1 for _, distance, _, _ in found),
    }


def _distance(tokens: Tensor, loss: LossCompared, returned: list[Tensor]) -> tuple[int, int] | None:
    """The dimension of the places, and how many of them an output lies before what it predicts; None: none predict."""
    if tokens.dim() < 2 or tokens.is_floating_point() != loss.targets.is_floating_point() or tokens.dtype == torch.bool:
        return None
    for dim in (1, 0):
        rows = tokens.transpose(0, dim)
        for less in (0, 1):
            goal = _by_place(loss.targets, rows, dim, less)
            began = None if goal is None else _begins(loss.outputs, returned, dim, len(rows), less)
            for shift in (1, 0, -1, 2):
                if goal is not None and began is not None and _is_shifted(rows, goal, shift, loss.left_out):
                    return dim, shift - began
    return None


def _by_place(targets: Tensor, rows: Tensor, dim: int, less: int) -> Tensor | None:
    """Targets by place, then by row; None: they are not as many as the places but so many."""
    length, rest = rows.shape[0] - less, rows.shape[1:]
    if length < 4 or targets.numel() != length * rest.numel():
        return None
    return targets.reshape(rest[0], length, *rest[1:]).transpose(0, 1) if dim else targets.reshape(length, *rest)


def _begins(outputs: Tensor, returned: list[Tensor], dim: int, length: int, less: int) -> int | None:
    """The place of the first output that a loss was given; None: they are none of what a model returned."""
    if not less:
        return 0
    orders = [outputs.reshape(-1), outputs.transpose(1, 2).reshape(-1)] if outputs.dim() == 3 else [outputs.reshape(-1)]
    for one in returned:
        if one.dim() > 1 and one.shape[dim] == length and one.numel() // length * (length - less) == outputs.numel():
            for begin in (0, less):
                cut = one.narrow(dim, begin, length - less).reshape(-1).to(outputs.dtype)
                if any(torch.equal(cut, order) for order in orders):
                    return begin
    return None


def _is_shifted(rows: Tensor, goal: Tensor, shift: int, left_out: int) -> bool:
    """Return whether the targets are the tokens so many places on; and not those at any other, as constants are."""
    most = min(rows.shape[0] - max(shift, 0), goal.shape[0])
    begin = max(-shift, 0)
    there, here = rows[begin + shift : most + shift], goal[begin:most]
    counted = here != left_out
    if there.shape != here.shape or int(counted.sum()) < 4:
        return False
    if _different(here[counted]) < 3:  # or all places of one token, as of a mask, and no others, learn that token
        return shift == 0 and not bool(counted.all()) and torch.equal(there == here[counted][0], counted)
    return float((there == here)[counted].float().mean()) > SURE


def _looks_ahead(asking: Asking, first: list[Tensor], tokens: Tensor, dim: int) -> bool | None:
    """Whether outputs of the first half change with tokens of the second; None: nothing changes."""
    middle = tokens.shape[dim] // 2
    later = tokens.narrow(dim, middle, tokens.shape[dim] - middle)
    others = later.roll(1, 1 - dim).flip(dim)  # another row's, and in another order
    changed = torch.cat([tokens.narrow(dim, 0, middle), others], dim)
    after = asking.outputs(lambda one: changed if one is tokens else one)
    shapes = [one.shape == other.shape for one, other in zip(first, after or (), strict=False)]
    if after is None or not all(shapes) or len(after) != len(first):
        return None
    by_place = [pair for pair in zip(first, after, strict=True) if _has_places(pair[0], tokens)]
    if not any(far(*pair) for pair in by_place):
        return None
    return any(far(a.narrow(dim, 0, middle), b.narrow(dim, 0, middle)) for a, b in by_place)


def _reads_itself(asking: Asking, first: list[Tensor], tokens: Tensor, dim: int) -> bool:
    """Whether outputs of a place change with the token of that place."""
    at = tokens.shape[dim] // 2
    others = tokens.clone()
    others.select(dim, at).copy_(tokens.select(dim, at).roll(1, 0))
    after = asking.outputs(lambda one: others if one is tokens else one)
    pairs = [*zip(first, after or (), strict=False)]
    by_place = [(a, b) for a, b in pairs if a.shape == b.shape and _has_places(a, tokens)]
    return not by_place or any(far(a.select(dim, at), b.select(dim, at)) for a, b in by_place)


def _has_places(one: Tensor, tokens: Tensor) -> bool:
    return one.dim() > 1 and one.shape[:2] == tokens.shape[:2]


def _held(asking: Asking, loss: LossCompared) -> str:
    """The name of an input that holds the number which each sample is to give, and where; empty: none does."""
    goal = loss.targets.reshape(-1)
    one_each = loss.targets.dim() == 1 or loss.targets.shape[1:].numel() == 1
    if not (goal.is_floating_point() and one_each and len(goal) >= FEW and bool((goal != goal[0]).any())):
        return ""
    for name, given in asking.call.given.items():
        if not given.is_floating_point() or given.dim() not in (2, 3) or len(given) != len(goal):
            continue
        if given.numel() > LARGE or given.device != goal.device:
            continue
        rows = given if given.dim() == 3 else given[:, -1:, None]  # of a table the last column alone, as of a window
        same = (rows == goal[:, None, None]).all(0).nonzero()
        if len(same):
            place = int(same[0][0]) if given.dim() == 3 else given.shape[1] - 1
            return f"{name}[:, {place}]"
    return ""


# --- pads ---


def _padded(asking: Asking, losses: list[LossCompared]) -> dict[str, Any]:
    """Names of tokens whose pads change what the model says of a sample, and of those whose pads are learned."""
    told = {}
    for name, tokens in asking.call.given.items():
        if tokens.dim() != 2 or not _are_tokens(tokens):
            continue
        if (lengths := _lengths(asking, tokens)) is not None:
            if _changes_with_pads(asking, tokens, lengths):
                told["padded"] = name
            if any(_learned(tokens, lengths, loss) for loss in losses):
                told["learned"] = name
    return told


def _are_tokens(one: Tensor) -> bool:
    """Return whether these may be; masks and targets are none."""
    whole = not one.is_floating_point() and one.dtype != torch.bool
    return whole and one.numel() > 0 and int(one.min()) >= 0 and _different(one) > 2


def _learned(tokens: Tensor, lengths: Tensor, loss: LossCompared) -> bool:
    """Return whether a loss counts places behind the first pad of a row, which may be the end of a text."""
    if not loss.counts_all or loss.targets.is_floating_point():
        return False
    for less in (0, 1):
        goal = _by_place(loss.targets, tokens.transpose(0, 1), 1, less)
        if goal is not None:
            behind = torch.arange(len(goal), device=goal.device)[:, None] > lengths + 1 - less
            return bool(((goal != loss.left_out) & behind).any())
    return False


def _lengths(asking: Asking, tokens: Tensor) -> Tensor | None:
    """How many tokens each row has before its pads, by what knows of pads; None: nothing does, or there are none."""
    runs = (tokens == tokens[:, -1:]).flip(1).long().cumprod(1).sum(1)
    ends = tokens[runs > 1, -1]
    if _different(ends) != 1 or tokens.shape[1] < 4:
        return None
    pad = int(ends[0])
    lengths = tokens.shape[1] - torch.where(tokens[:, -1] == pad, runs, torch.zeros_like(runs))
    known = {getattr(one, "padding_idx", None) for one in asking.module.modules()}
    known.add(getattr(getattr(asking.module, "config", None), "pad_token_id", None))
    places, masked = _places(tokens, lengths), _is_masked(asking, tokens, lengths)
    alone = _different(lengths) > 2 and not bool(((tokens == pad) & places).any())  # it stands behind texts only
    return lengths if int(lengths.min()) > 0 and (pad in known or masked or alone) else None


def _places(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Which tokens are none of the pads."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def _is_masked(asking: Asking, tokens: Tensor, lengths: Tensor) -> bool:
    """Return whether something that was given beside the tokens says which are pads."""
    places = _places(tokens, lengths)
    masks = [one.bool() for one in asking.call.given.values() if one.shape == tokens.shape and one is not tokens]
    return any(bool((one == places).all()) or bool((one != places).all()) for one in masks)


def _changes_with_pads(asking: Asking, tokens: Tensor, lengths: Tensor) -> bool:
    """Return whether rows say something else of themselves where their pads are cut off.

    Where a model takes texts of one length alone, and a mask: where other tokens stand in the place of the pads.
    """
    size, length = tokens.shape
    rows = (lengths < length).nonzero().flatten()
    longest = int(lengths[rows].max())
    if any(isinstance(one, nn.Conv1d | nn.Conv2d) for one in asking.module.modules()):
        return False  # which look over the edge of a text by what they are
    if size == length and any(one.dim() > 1 and one is not tokens for one in asking.call.given.values()):
        return False  # nobody knows which dimension of these is which

    def chosen(one: Tensor) -> Tensor:
        return one[rows] if one.dim() and one.shape[0] == size else one

    def cut(one: Tensor) -> Tensor:
        one = chosen(one)
        wide = one.dim() > 1 and one.shape[1] == length
        other = wide and _are_tokens(rest := one[:, longest:]) and bool((rest != rest[:1]).any())  # another text's
        return one[:, :longest] if wide and not other else one

    def refilled(one: Tensor) -> Tensor:
        again = torch.arange(length, device=tokens.device) % lengths[:, None]
        return chosen(tokens.gather(1, again) if one is tokens else one)

    before, after = asking.outputs(chosen), asking.outputs(cut)
    if after is None and _is_masked(asking, tokens, lengths):
        after, longest = asking.outputs(refilled), length
    if before is None or after is None or len(before) != len(after):
        return False
    return any(far(*_real(a, b, lengths[rows], length, longest)) for a, b in zip(before, after, strict=True))


def _real(one: Tensor, cut: Tensor, lengths: Tensor, length: int, longest: int) -> tuple[Tensor, Tensor]:
    """What both say of the tokens, where they say something of each; else all of it. Nothing, where they do not fit."""
    rows = len(lengths)
    if one.dim() > 1 and one.shape[:2] == (rows, length) and cut.shape[:2] == (rows, longest):
        places = torch.arange(longest, device=one.device) < lengths[:, None]
        return one[:, :longest][places], cut[places]
    if one.shape == cut.shape and one.dim() and one.shape[0] == rows:
        return one, cut
    return one.flatten()[:0], cut.flatten()[:0]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not far(one, other, 1e-6)


def _different(one: Tensor) -> int:
    return int(torch.unique(one).numel())
