"""What a loss is made of: its terms, and what each of them trains."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import or_
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from prepkit.auditing.bare_slopes import BareSlopes
from prepkit.auditing.given_back import GivenBack
from prepkit.auditing.leftovers import dropped, half_mixed, overwritten
from prepkit.auditing.own_backwards import OwnBackwards
from prepkit.auditing.shapes import SHAPES
from prepkit.auditing.term_texts import Text, constants, divergences, text_of
from prepkit.auditing.untrained import trains_of, untrained
from prepkit.facts.terms import (
    Cancelled,
    ConstantTerm,
    Dropped,
    FlatWay,
    HalfMixed,
    OddDivergence,
    Overwritten,
    TermFacts,
)
from prepkit.objects.local_part import local
from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls
from prepkit.ranks.world import world

MOST_LINES = 8
"""Lines that go backward whose first loss is looked into."""
MOST_NODES = 4000
"""Of a graph that is looked into."""
MOST_TOPS = 64
"""Nodes at the top of it, between the loss and what it compares."""
MOST_ELEMENTS = 1 << 26
"""Of parameters whose gradients are computed to ask what a term trains."""
MOST_ASKED = 4
"""Differences of a term that are asked."""
FEWEST_ROWS = 4
"""In which what is masked is chosen."""
NOTHING = 1e-5
"""What is left of a gradient by rounding where it cancels, as a part of it."""
SPREAD = frozenset({"Mean", "Sum", "Pow", "Abs", "Sqrt", "Expand", "Neg", "Add", "Mul", "Div", *SHAPES})
"""What stands between a loss and differences that are compared."""
COMPARED = frozenset({"Sub", "MseLoss", "SmoothL1Loss", "HuberLoss"})
CHOSEN = frozenset({"Max", "Min", "Amax", "Amin", "Gather", "Minimum", "Maximum"})
"""What chooses one value of several for a sample."""


@define(eq=False)
class AskedTerms:
    """Whether gradients are computed to ask what they are: nobody is taught by them."""

    now: bool = False

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, *_: object) -> None:
        self.now = False


ASKS = AskedTerms()


@define(eq=False)
class Terms:
    """Listens inside ``on()`` to what goes backward, and looks into the first loss of each line, before it does."""

    given_back: GivenBack = field(factory=GivenBack)
    own_backwards: OwnBackwards = field(factory=OwnBackwards)
    bare_slopes: BareSlopes = field(factory=BareSlopes)
    _lines: set[str] = field(factory=set)
    _hooked: bool = False
    """Whether hooks hang on tensors, or on what graphs save, which must not run twice."""
    targets: dict[str, None] = field(factory=dict)
    cancelled: dict[Cancelled, None] = field(factory=dict)
    constants: dict[ConstantTerm, None] = field(factory=dict)
    divergences: dict[OddDivergence, None] = field(factory=dict)
    masked: dict[tuple[str, tuple[int, ...]], None] = field(factory=dict)
    undone: dict[tuple[str, tuple[int, ...]], None] = field(factory=dict)
    dropped: dict[Dropped, None] = field(factory=dict)
    half_mixed: dict[HalfMixed, None] = field(factory=dict)
    overwritten: dict[Overwritten, None] = field(factory=dict)
    _flat: dict[tuple[str, str], list[weakref.ref[Tensor]]] = field(factory=dict)
    """Lines that go backward, and steps that have no slope, with the weights to which no other way leads."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(torch.autograd, "backward", self._backward))
            stack.enter_context(self.given_back.on())
            stack.enter_context(self.own_backwards.on())
            stack.enter_context(self.bare_slopes.on())
            for home, name in ((Tensor, "register_hook"), (Tensor, "retain_grad"), (saved_tensors_hooks, "__enter__")):
                stack.enter_context(around_calls(home, name, self._hooks))
            yield

    def facts(self, first: Mapping[int, str]) -> TermFacts:
        """What was heard so far; ``first``: names of parameters by their ``id``."""
        return TermFacts(
            flat=tuple(self._resting(first)),
            targets=tuple(self.targets),
            cancelled=tuple(self.cancelled),
            constants=(*self.constants, *self.bare_slopes.found),
            divergences=tuple(self.divergences),
            masked=tuple(self.masked),
            undone=tuple(self.undone),
            dropped=tuple(self.dropped),
            half_mixed=tuple(self.half_mixed),
            overwritten=tuple(self.overwritten),
            backwards=self.own_backwards.found(),
        )

    def _resting(self, first: Mapping[int, str]) -> Iterator[FlatWay]:
        """Yield the steps behind which weights have gradients of nothing but zeros."""
        for (line, step), refs in self._flat.items():
            held = [one for ref in refs if (one := ref()) is not None and id(one) in first]
            if held and not any(one.grad is not None and bool(local(one.grad).to_dense().any()) for one in held):
                yield FlatWay(line=line, step=step, weights=tuple(first[id(one)] for one in held))

    def _hooks(self, plain: Any, *given: Any, **named: Any) -> Any:
        own = any(getattr(getattr(one, "func", None), "__module__", "").startswith("prepkit.") for one in given[1:])
        if not torch.compiler.is_compiling() and not own:
            self._hooked = True
        return plain(*given, **named)

    def _backward(self, plain: Any, tensors: Any, *given: Any, **named: Any) -> Any:
        nested = torch._C._current_graph_task_id() != -1 or named.get("create_graph")
        if not torch.compiler.is_compiling() and not nested:
            loss = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
            line = line_of_program(frames_above(__file__))
            is_new = line and line not in self._lines and len(self._lines) < MOST_LINES
            if is_new and type(loss) is Tensor and loss.numel() == 1 and loss.grad_fn is not None:
                self._lines.add(line)
                self._looks(loss, line)
                self.overwritten |= dict.fromkeys(overwritten(loss, [*self.given_back.terms()]))
            self.given_back.ends()
        return plain(tensors, *given, **named)

    def _looks(self, loss: Tensor, line: str) -> None:
        every = graph(loss.grad_fn)
        if not every or any("BackwardBackward" in type(one).__name__ for one in every):
            return
        terms = [*split(loss.grad_fn)]
        if any(_bootstraps(one) for term in terms for one in _compared(term)):
            self.targets[line] = None
        text = text_of(frames_above(__file__))
        trained = {id(one.variable) for one in every if hasattr(one, "variable")}
        if text is not None:
            self._reads(text, loss, trained)
        for one in self.given_back.texts(every[:MOST_TOPS]):
            self._reads(one, one.value, trained)
        if not self._hooked:
            shapes = (_shape(one) for one in every if name_of(one) in ("Min", "Max") and _takes_masked(one))
            self.masked |= {(line, shape): None for shape in shapes}
        for leaf, step in flat(loss.grad_fn) if any(name_of(one) in FLAT for one in every) else ():
            self._flat.setdefault((line, step), []).append(weakref.ref(leaf))
        self.undone |= {(line, _shape(one)): None for one in every if name_of(one) == "Add" and _takes_off(one)}
        spread = world().size > 1
        if not (self._hooked or spread or any(isinstance(one, BackwardCFunction) for one in every)):
            for term in terms:
                if (found := _cancels(term)) is not None:
                    shape = _shape(found)
                    of = "quotient" if name_of(found) == "Div" else "difference"
                    self.cancelled[Cancelled(line=line, of=of, shape=shape, terms=len(terms))] = None

    def _reads(self, text: Text, loss: Tensor, trained: set[int]) -> None:
        """Looks into a loss by what the function that has it says of it."""
        self.dropped |= dict.fromkeys(dropped(text, loss, trained, graph))
        self.half_mixed |= dict.fromkeys(half_mixed(text))
        if summands := text.terms():
            self.constants |= dict.fromkeys(constants(text, summands, trained))
            self.divergences |= dict.fromkeys(divergences(text, summands))
            told = {one.name for one in self.constants}
            lost = untrained(text, loss, trains_of(trained, graph))
            self.constants |= dict.fromkeys(one for one in lost if one.name not in told)


LINEAR = frozenset(
    {"Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Stack", "Cat", "ToCopy", "Select", "Slice", "Index", "Split", *SHAPES}
)
"""What adds up, or picks, what it is given."""
FLAT = frozenset({"Round", "Floor", "Ceil", "Trunc", "Sign", "Sgn"})
"""What has a graph, and a slope of zero wherever it has one."""
BOTH = 1 | 2


def name_of(node: Any) -> str:
    """Of ``AddBackward0`` ``Add``."""
    return type(node).__name__.partition("Backward")[0]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape)


def taken_from(node: Any) -> list[Any]:
    """The nodes that one takes from, without those of what needs no gradient."""
    return [one for one, _ in node.next_functions if one is not None]


def graph(node: Any) -> list[Any]:
    """Every node of a graph, the last computed first; nothing: there are too many."""
    found, waiting = {node: None}, [node]
    while waiting:
        new = [one for one in taken_from(waiting.pop()) if one not in found]
        found |= dict.fromkeys(new)
        waiting += new
        if len(found) > MOST_NODES:
            return []
    return [*found]


def flat(node: Any) -> Iterator[tuple[Tensor, str]]:
    """Yield the weights that a loss comes to by way of steps alone, whose slope is zero, each with a step's name."""
    live, waiting, steps = {node: None}, [node], dict[Any, None]()
    while waiting:
        new = [one for one in taken_from(waiting.pop()) if one not in live]
        steps |= {one: None for one in new if name_of(one) in FLAT}
        new = [one for one in new if name_of(one) not in FLAT]
        live |= dict.fromkeys(new)
        waiting += new
    told: dict[Any, None] = {}
    for step in steps:
        leaves = [one for one in graph(step) if hasattr(one, "variable") and one not in live and one not in told]
        told |= dict.fromkeys(leaves)
        yield from ((one.variable, name_of(step).lower()) for one in leaves)


def compares(loss: Any, one: Any, other: Any) -> bool:
    """Return whether a loss holds both of these nodes, and lets one act on the other.

    Where it adds up what is made of each, as of the steps of a policy in one state, it compares nothing.
    """
    roots = loss if isinstance(loss, tuple | list) else (loss,)
    sides: dict[Any, int] = {one: 1, other: 2}
    waiting = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
    while waiting and len(sides) <= MOST_NODES:
        node, before = waiting[-1], taken_from(waiting[-1])
        if node in sides or not (new := [each for each in before if each not in sides]):
            waiting.pop()
            found = [side for each in before if (side := sides.get(each, 0))]
            sides.setdefault(node, reduce(or_, found, 0))
            linear = name_of(node) in LINEAR or (name_of(node) in ("Mul", "Div") and len(found) == 1)
            if sides[node] == BOTH and not linear:
                return True
        waiting += new if node not in sides else []
    return False


def split(node: Any) -> Iterator[Any]:
    """Yield the terms that a loss of one number is the sum of, whatever they are multiplied by."""
    waiting, seen = [node], 0
    while waiting:
        node, seen = waiting.pop(), seen + 1
        name, before = name_of(node), taken_from(node)
        through = name in ("Add", "Sub", "Rsub", "Neg", *SHAPES) or (name in ("Mul", "Div") and len(before) == 1)
        if through and before and seen < MOST_TOPS and all(_numbers(one) == 1 for one in before):
            waiting += before
        else:
            yield node


def _numbers(node: Any) -> int:
    """How many a node has computed; 0: nobody knows."""
    return torch.Size(_shape(node)).numel() if getattr(node, "_input_metadata", None) else 0


def _past(node: Any) -> Any:
    """The node that has made these values, past those that change none."""
    for _ in range(6):
        if node is None or name_of(node) not in {*SHAPES, "Expand"} or not taken_from(node):
            break
        node = taken_from(node)[0]
    return node


# --- a target that trains ---


def _compared(term: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what an error is taken of, both with a gradient, near the top of a term: a mere difference is none."""
    waiting, seen = [(term, False)], {term}
    while waiting and len(seen) < MOST_TOPS:
        node, measures = waiting.pop()
        name, before = name_of(node), list(dict.fromkeys(taken_from(node)))
        measures = measures or name in ("Pow", "Abs") or _is_square(node)
        if name in COMPARED and len(before) == 2 and (measures or name != "Sub"):
            yield before[0], before[1]
        elif name in SPREAD or name in COMPARED:
            into = before if name not in ("Mul", "Div") or len(before) == 1 else []
            waiting += [(one, measures) for one in into if one not in seen]
            seen |= {*into}


def _is_square(node: Any) -> bool:
    """Return whether it multiplies something with itself."""
    factors = [one for one, _ in node.next_functions] if name_of(node) == "Mul" else []
    return len(factors) == 2 and factors[0] is factors[1] is not None


def _bootstraps(pair: tuple[Any, Any]) -> bool:
    """Return whether one of the two is a reward and a part of outputs of what the other comes from."""
    sums = [_added(one) for one in pair]
    if sums.count(None) != 1:
        return False
    (output,) = (one for one in sums if one is not None)
    shape = _shape(_past(pair[0]))
    each = len(shape) > 0 and shape[0] > 1 and torch.Size(shape).numel() == shape[0]
    if not each and name_of(output) not in CHOSEN:
        return False
    target, prediction = (_leaves(one) for one in (output, next(a for a, b in zip(pair, sums, strict=True) if not b)))
    return bool(target & prediction)


def _added(node: Any) -> Any:
    """The node of outputs of which a part is added to what needs no gradient; None: this is something else."""
    node = _past(node)
    if name_of(node) != "Add" or len(taken_from(node)) != 1:
        return None
    node = _past(taken_from(node)[0])
    parts = 0
    while name_of(node) == "Mul" and len(taken_from(node)) == 1:
        node, parts = _past(taken_from(node)[0]), parts + 1
    return node if parts else None


def _leaves(node: Any) -> set[int]:
    """The parameters that a graph leads to; nothing where it leads to other tensors too, such as coordinates."""
    leaves = [one.variable for one in graph(node) if hasattr(one, "variable")]
    return {id(one) for one in leaves} if all(isinstance(one, nn.Parameter) for one in leaves) else set()


# --- a choice among what is masked ---


def _takes_masked(node: Any) -> bool:
    """Return whether a minimum or maximum along a dimension takes, in each of its rows, what a mask has put there."""
    indices = getattr(node, "_saved_indices", None)
    masked = _masked(taken_from(node)[0]) if indices is not None and taken_from(node) else None
    if masked is None or indices is None or indices.numel() < FEWEST_ROWS:
        return False
    dim: int = node._saved_dim
    chosen: Tensor = indices if node._saved_keepdim else indices.unsqueeze(dim)
    shape = [*chosen.shape]
    shape[dim] = -1
    return masked.dim() == chosen.dim() and bool(masked.expand(shape).gather(dim, chosen).all())


def _masked(node: Any) -> Tensor | None:
    """Where a mask has put another number; None: there is no mask."""
    match name_of(node):
        case "Mul" if len(taken_from(node)) == 1:
            mask = node._saved_other if node._saved_other is not None else node._saved_self
            is_mask = isinstance(mask, Tensor) and mask.dim() and bool(((mask == 0) | (mask == 1)).all())
            return mask == 0 if is_mask else None
        case "MaskedFill":
            mask = node._saved_mask
            return mask if isinstance(mask, Tensor) else None
    return None


# --- a value in the place of another ---


def _takes_off(node: Any) -> bool:
    """Return whether it is ``x + (y - x)``, of which ``x`` gets no gradient."""
    edges = node.next_functions
    whole = getattr(node, "_saved_alpha", 1) == 1
    return whole and len(edges) == 2 and any(_less(other, added) for added, (other, _) in (edges, edges[::-1]))


def _less(node: Any, edge: tuple[Any, int]) -> bool:
    """Return whether it is something less what comes from an edge."""
    whole = name_of(node) == "Sub" and getattr(node, "_saved_alpha", 1) == 1
    return whole and edge[0] is not None and node.next_functions[1] == edge


# --- a term that cancels ---


def _cancels(term: Any) -> Any:
    """The node of a term in which what arrives cancels, so that nothing trains; None: there is none."""
    every = graph(term)
    asked = [one for one in every if name_of(one) in ("Sub", "Div") and _same(one)][:MOST_ASKED]
    leaves = [one for one in every if hasattr(one, "variable")]
    if not asked or sum(one.variable.numel() for one in leaves) > MOST_ELEMENTS:
        return None
    try:
        return next((one for one in asked if _is_undone(term, one, leaves)), None)
    except (AttributeError, RuntimeError, TypeError):  # as where the program's own backward will raise
        return None


def _is_undone(term: Any, node: Any, leaves: list[Any]) -> bool:
    """Return whether one side of a difference trains, and the whole term nothing."""
    known = term._input_metadata[0]
    one = torch.ones(tuple(known.shape), dtype=known.dtype, device=known.device)
    sides = [GradientEdge(*edge) for edge in node.next_functions]
    into = [GradientEdge(leaf, 0) for leaf in leaves]
    found = _gradients(GradientEdge(term, 0), [*sides, *into], one)
    whole, arrived = _largest(found[2:]), found[0]
    if arrived is None or not bool(arrived.any()):
        return False
    return whole <= NOTHING * _largest(_gradients(sides[0], into, arrived))


def _gradients(of: Any, to: list[Any], arrives: Tensor) -> tuple[Tensor | None, ...]:
    with ASKS:
        return tuple(grad([of], to, [arrives], retain_graph=True, allow_unused=True))


def _largest(gradients: Iterable[Tensor | None]) -> float:
    """0 where there is none; NaN counts as infinite."""
    sizes = [float(one.abs().max()) for one in gradients if one is not None and one.numel()]
    return max((one if one == one else float("inf") for one in sizes), default=0.0)


def _same(node: Any) -> bool:
    """Return whether both sides of a difference are computed by the same operations from the same parameters."""
    pairs = [tuple(node.next_functions)]
    known = set()
    while pairs:
        pair = pairs.pop()
        if len(pair) != 2:
            return False
        (one, at), (other, there) = pair
        if at != there or (one is None) != (other is None) or type(one) is not type(other):
            return False
        if one is None or one is other or (one, other) in known:
            continue
        known.add((one, other))
        leaf = getattr(one, "variable", None)
        if len(known) > MOST_NODES or (leaf is not None and leaf is not other.variable):
            return False
        if len(one.next_functions) != len(other.next_functions):
            return False
        pairs += [*zip(one.next_functions, other.next_functions, strict=True)]
    return any(one is not None for one, _ in node.next_functions)
