"""What losses are given while a script runs, against what each of them is defined for: by values, shapes and graphs."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from itertools import zip_longest
from math import prod
from typing import Any, Literal

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from prepkit.auditing.in_order import is_sorted, read_in_order
from prepkit.auditing.shapes import SHAPES, all_with_all, kind_of, meant, meets_all, near, past, shape_of
from prepkit.facts.window import Misgiven
from prepkit.observe.prepared.around import called_by_program, frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls

SQUASHED = {
    "cross_entropy": ("Softmax",),
    "nll_loss": ("Softmax", "Addmm", "Mm", "Bmm"),
    "binary_cross_entropy_with_logits": ("Sigmoid", "Softmax"),
}
"""Losses of ``torch.nn.functional``, and what they must not be given."""
BOUNDS = {"Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Relu": (0.0, float("inf"))}
"""The range of what an operation computes."""
DIFFERENCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
SIGNS = ("margin_ranking_loss", "cosine_embedding_loss", "hinge_embedding_loss", "soft_margin_loss")
"""Losses whose targets are 1 and -1."""
CLASSES = ("cross_entropy", "nll_loss")
PLACES = (*CLASSES, *DIFFERENCES)
"""What compares outputs with targets of each place."""
MOST = 8
"""Comparisons that are kept."""
NEAR = 1e-2
"""How far a sum of probabilities may be from 1, in whatever precision they are computed."""
EQUAL = 1e-3
"""How far numbers that are the same may be apart, as a part of them."""
MOST_LOOKED_AT = 1 << 18
"""Elements that are looked at of what may be large; of fewer rows than two, no matter how long."""
ENOUGH = 48
"""Targets that are hardly of one class by chance, be it a frequent one."""
FEW = 16
"""Those that are not where samples lie class by class, and are read so."""
SMOOTH = 0.5
"""How far labels are moved on purpose, as those of a discriminator are."""
WHOLE = 1024
"""Nodes of a graph that is looked at whole."""
SUMS = ("Add", "Sub", "Rsub")
ENTROPIES = ("NllLoss", "NllLoss2D", "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy")
"""Losses that are minus the logarithm of a probability."""
MEETS = ("__add__", "__sub__", "__mul__", "__truediv__")
"""Operations in which two tensors may meet as all pairs."""


@frozen(kw_only=True, eq=False)
class LossCompared:
    """What a loss has compared, without graphs."""

    outputs: Tensor
    targets: Tensor
    left_out: int
    """The target that does not count."""
    counts_all: bool
    """Whether every other one counts: none is weighed, and the loss is no longer that of each place."""


@define(eq=False)
class Losses:
    """Listens inside ``on()`` to the losses of ``torch.nn.functional``, which those of ``torch.nn`` call."""

    squashed: dict[tuple[str, str], None] = field(factory=dict)
    misgiven: dict[Misgiven, None] = field(factory=dict)
    compared: list[LossCompared] = field(factory=list)
    """The last ones of ``PLACES``."""
    _noise: list[tuple[weakref.ref[Tensor], int]] = field(factory=list)
    """What was drawn since the last backward, and how many models had been called before."""
    _calls: int = 0
    _met: bool = False
    """Whether outputs were held against all targets since the last backward."""
    _totals: dict[tuple[float, float], float] = field(factory=lambda: defaultdict(float))
    """What the targets of a sample sum to, over all divergences of the same outputs, as from parts of a mixture."""
    _classes: tuple[int | None, int] = (None, 0)
    """The class of which all targets were until now, and how many; None: there were none yet, -1: they are mixed."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            for name in dict.fromkeys((*PLACES, *SQUASHED, *TAKES)):
                stack.enter_context(around_calls(nn.functional, name, partial(self._hears, name)))
            for name in ("randn_like", "rand_like", "randn", "rand"):
                stack.enter_context(around_calls(torch, name, self._draws))
            for name in MEETS:
                stack.enter_context(around_calls(Tensor, name, self._meets))
            stack.enter_context(around_calls(Tensor, "__sub__", self._apart))
            for home, name in ((nn.functional, "softmax"), (torch, "softmax"), (Tensor, "softmax")):
                stack.enter_context(around_calls(home, name, self._softmax))
            yield

    def enters(self) -> None:
        """Hears that a model is called."""
        self._calls += 1

    def _draws(self, plain: Any, *given: Any, **named: Any) -> Any:
        drawn = plain(*given, **named)
        if not torch.compiler.is_compiling():
            self._noise = [*self._noise, (weakref.ref(drawn), self._calls)][-MOST:]
        return drawn

    def _softmax(self, plain: Any, *given: Any, **named: Any) -> Any:
        values: Any = given[0] if given else named.get("input")
        dim = named.get("dim", given[1] if len(given) > 1 else None)
        places = isinstance(dim, int) and dim % 4 > 1 and getattr(values, "dim", int)() == 4
        compiles = torch.compiler.is_compiling()
        if places and not compiles and _before(values) == "Convolution" and called_by_program(frames_above(__file__)):
            what = f"what a convolution gives, of shape {[*values.shape]}, with dim={dim}: its places"
            self._misgiven("softmax", what, "Write softmax(dim=1), which are the classes.", "bounded")
        return plain(*given, **named)

    def _is_fresh_noise(self, target: Tensor) -> bool:
        """Whether it was drawn behind the last call of a model, and noise of its shape before that call."""
        drawn = [(noise, at) for one, at in self._noise if (noise := one()) is not None]
        fresh = any(noise is target and at == self._calls for noise, at in drawn)
        return fresh and any(noise.shape == target.shape and at < self._calls for noise, at in drawn)

    def _hears_classes(self, known: Mapping[str, Any]) -> None:
        """Of targets of one dimension, which are few enough to be of one class by mistake."""
        outputs, target = known["input"], known["target"].detach()
        if outputs.dim() != 2 or outputs.shape[1] < 3 or target.dim() != 1 or target.is_floating_point():
            self._classes = (-1, 0)
        elif self._classes[0] != -1 and (seen := target[target != known["ignore_index"]]).numel():
            least, most = (int(one) for one in seen.aminmax())
            same = least == most and self._classes[0] in (None, most)
            self._classes = (most, self._classes[1] + seen.numel()) if same else (-1, 0)

    def _targets_alike(self) -> None:
        """By class 0 alone nothing is told: of several candidates the first is often the right one."""
        one, count = self._classes
        if one in (None, -1) or count < FEW:
            return
        what = f"{count} targets that are all {one}"
        if any(map(is_sorted, read_in_order())):
            what = f"{what}, of samples that lie class by class and are read in this order"
            self._misgiven("cross_entropy", what, "Write shuffle=True where the loader is made.", "alike")
        elif one and count >= ENOUGH:
            self._misgiven("cross_entropy", what, _CLONE, "alike")

    def told(self) -> tuple[Misgiven, ...]:
        """What losses were given that they are not defined for."""
        totals = [one for one in self._totals.values() if abs(one - 1) > 5 * NEAR]
        if totals:
            what = f"targets that are no probabilities: those of each sample sum to {totals[0]:.3g}"
            self._misgiven("kl_div", what, _PARTS)
        self._targets_alike()
        return tuple(self.misgiven)

    def backward(self, loss: Any) -> None:
        """Hears of what goes backward, be it computed by a loss of torch's or by hand."""
        self._noise = []
        met, self._met = self._met, False
        for what, fix in all_with_all(loss) if met else ():
            self._misgiven("loss", what, fix)
        for what, fix in _of_graph(loss):
            self._misgiven("loss", what, fix)

    def _meets(self, plain: Any, *given: Any) -> Any:
        """Of an operation that gives a square, whether it holds each output against all targets."""
        if torch._C._get_tracing_state() is not None:  # which calls values what frames that it comes through do
            return plain(*given)
        result = plain(*given)
        if type(result) is Tensor and result.dim() == 2 and result.grad_fn is not None:
            alike = result.shape[0] == result.shape[1] and not torch.compiler.is_compiling()
            if alike and torch._C._functorch.maybe_current_level() is None:
                if meets_all(given, result):
                    self._met = True
                elif self._met:
                    meant(given, result)
        return result

    def _apart(self, plain: Any, *given: Any) -> Any:
        """Of a difference, as of a penalty for leaving an anchor, whether a parameter meets its own memory."""
        result = plain(*given)
        trains = nn.Parameter in map(type, given) and type(result) is Tensor and result.requires_grad
        if trains and not torch.compiler.is_compiling() and _is_one(*given):
            line = line_of_program(frames_above(__file__))
            what = "the difference of a parameter and a tensor in the same memory, which is 0 wherever it is trained to"
            self._misgiven("loss", f"{what} ({line})", _ANCHOR)
        return result

    def _hears(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        inside = torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None
        if not inside and torch.is_grad_enabled():  # inside a transform of torch.func, tensors have no values
            known = _arguments(plain, given, named)
            if known and all(type(one) in (Tensor, nn.Parameter) for one in known.values() if isinstance(one, Tensor)):
                self._looks(name, known)
        return plain(*given, **named)

    def _looks(self, name: str, known: Mapping[str, Any]) -> None:
        before = _before(known.get("input"))
        if before in SQUASHED.get(name, ()):
            self.squashed[name, before.lower()] = None
        elif name in CLASSES and (values := _no_logits(name, known["input"].detach())):
            self.squashed[name, values] = None
        elif (bounds := BOUNDS.get(before)) is not None:
            self._bounded(name, before, bounds, known)
        for what, fix in TAKES[name](known) if name in TAKES else ():
            self._misgiven(name, what, fix)
        if name in DIFFERENCES and self._is_fresh_noise(known["target"]):
            what = "noise as targets that was drawn behind the call of the model, which was given other noise"
            self._misgiven(name, what, "Give it the noise that was added to what the model was given.")
        if name == "cross_entropy":
            self._hears_classes(known)
        if name == "kl_div" and not known["log_target"]:
            outputs, total = known["input"].detach(), _total(known["input"].detach(), known["target"].detach())
            if total:
                self._totals[float(outputs[0].float().sum()), float(outputs[-1].float().sum())] += total
        if name in PLACES:
            self.compared = [*self.compared, _compared(known)][-MOST:]

    def _bounded(self, name: str, before: str, bounds: tuple[float, float], known: Mapping[str, Any]) -> None:
        """Of outputs that cannot be everywhere, whether targets are where they cannot be."""
        if name in ("cross_entropy", "binary_cross_entropy_with_logits") and before == "Relu":
            self._misgiven(name, "logits that cannot be below 0, as a ReLU has made them", _LOGITS, "bounded")
        elif name in DIFFERENCES and (target := known["target"].detach()).numel():
            least, most = (float(one) for one in target.aminmax())
            if least < bounds[0] - NEAR or most > bounds[1] + NEAR:
                what = f"targets from {least:.3g} to {most:.3g}, which what a {before.lower()} gives cannot reach"
                self._misgiven(name, what, _REACH, "bounded")

    def _misgiven(self, loss: str, what: str, fix: str, kind: Literal["", "bounded", "alike"] = "") -> None:
        if not any(one.loss == loss and one.kind == kind for one in self.misgiven):
            self.misgiven[Misgiven(loss=loss, what=what, fix=fix, kind=kind)] = None


_LOGITS = "Leave the last activation out: it takes logits."
_REACH = "Scale the targets into its range, or leave the activation out."
_SHAPE = "Give both one shape: outputs.squeeze(-1), or targets.unsqueeze(-1)."
_PARTS = "Divide before the softmax, softmax(targets / T, dim), and scale the loss, not its targets."
_ANCHOR = "Keep copies: {name: param.detach().clone() for name, param in model.named_parameters()}."
_CLONE = "Clone them before inputs are changed in place, or look where they come from."
_LOGS = "Give it log_softmax(outputs, dim) in the place of outputs."
Hits = Iterator[tuple[str, str]]


def _of_classes(known: Mapping[str, Any]) -> Hits:
    outputs, target = known["input"].detach(), known["target"].detach()
    dim = 1 if outputs.dim() > 1 else 0
    if outputs.shape[dim] == 1:
        fix = "Give it an output for each class, or write binary_cross_entropy_with_logits."
        yield "outputs of one class alone, so that it is 0 whatever the model says", fix
    elif not target.is_floating_point() and _finds_itself(outputs, target):
        what = "similarities of samples with themselves among the others, which are the largest and never the target"
        yield what, "Leave them out before it: logits.fill_diagonal_(float('-inf'))."
    elif target.is_floating_point() and not _is_distribution(target, dim):
        fix = "Where a sample may be of several classes, write binary_cross_entropy_with_logits."
        yield f"targets that are no probabilities: those of a sample sum to {_least_sum(target, dim):.3g}", fix


def _of_logits(known: Mapping[str, Any]) -> Hits:
    target = known["target"].detach()
    if target.numel() and not -SMOOTH <= float(target.min()) <= float(target.max()) <= 1 + SMOOTH:
        yield f"targets from {float(target.min()):.3g} to {float(target.max()):.3g}", "Give it targets from 0 to 1."


def _of_divergence(known: Mapping[str, Any]) -> Hits:
    outputs, target = known["input"].detach(), known["target"].detach()
    if outputs.numel() and float(outputs.max()) > NEAR:
        yield "values above 0 in the place of log-probabilities", _LOGS
    if known["log_target"] and target.numel() and float(target.max()) > NEAR:
        yield "targets above 0 in the place of log-probabilities", "Leave log_target=True out, or take their logarithm."
    if not known["log_target"] and target.numel() and float(target.min()) < 0:
        yield (
            "targets below 0 in the place of probabilities",
            "Give it softmax(targets, dim), or write log_target=True.",
        )


def _of_signs(known: Mapping[str, Any]) -> Hits:
    target = known["target"].detach()
    if target.numel() and not bool((target.abs() == 1).all()):
        yield f"targets from {float(target.min()):.3g} to {float(target.max()):.3g}", "Its targets are 1 and -1."


def _of_alignment(known: Mapping[str, Any]) -> Hits:
    outputs, targets, blank = known["log_probs"].detach(), known["targets"], known["blank"]
    if outputs.numel() and float(outputs.float().logsumexp(-1).abs().max()) > 10 * NEAR:
        yield "outputs that are no log-probabilities", _LOGS
    lengths = torch.as_tensor(known["target_lengths"], device=targets.device)
    if targets.dim() == 2:
        targets = targets[torch.arange(targets.shape[1], device=targets.device) < lengths.reshape(-1, 1)]
    if bool((targets == blank).any()):
        yield f"targets that are {blank}, which is its blank", "Number classes from 1, or give it another blank=."


def _of_counts(known: Mapping[str, Any]) -> Hits:
    before = _before(known["input"])
    if known["log_input"] and before in ("Exp", "Softplus", "Relu"):
        yield f"what an {before.lower()} gives, and takes its exponential", "Write log_input=False."


def _of_difference(known: Mapping[str, Any]) -> Hits:
    one, other = tuple(known["input"].shape), tuple(known["target"].shape)
    if isinstance(known["input"], nn.Parameter) and _is_one(known["input"], known["target"]):
        yield "a parameter, and as targets a tensor in the same memory, so that it is always 0", _ANCHOR
    whole = _together(one, other)
    if whole is not None and prod(whole) > max(prod(one), prod(other)):
        yield f"outputs of {[*one]} and targets of {[*other]}, and compares each with all others", _SHAPE


def _is_one(tensor: Tensor, other: Any) -> bool:
    """Return whether two tensors are one in memory."""
    alike = isinstance(other, Tensor) and tensor.shape == other.shape and tensor.stride() == other.stride()
    return alike and tensor.numel() > 0 and tensor.data_ptr() == other.data_ptr() != 0


def _together(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of both, broadcast; None: torch will refuse them."""
    sizes = [*zip_longest(reversed(one), reversed(other), fillvalue=1)]
    fit = all(a == b or 1 in (a, b) for a, b in sizes)
    return tuple(max(pair) for pair in reversed(sizes)) if fit else None


TAKES: dict[str, Callable[[Mapping[str, Any]], Hits]] = {
    "cross_entropy": _of_classes,
    "binary_cross_entropy_with_logits": _of_logits,
    "kl_div": _of_divergence,
    "ctc_loss": _of_alignment,
    "poisson_nll_loss": _of_counts,
    **dict.fromkeys(DIFFERENCES, _of_difference),
    **dict.fromkeys(SIGNS, _of_signs),
}
"""What is wrong in the arguments of a loss, and what to do."""


def _arguments(plain: Any, given: Any, named: Any) -> Mapping[str, Any]:
    """The arguments of a call by name, with defaults; nothing where torch will refuse them."""
    try:
        bound = signature(plain).bind(*given, **named)
    except TypeError:
        return {}
    bound.apply_defaults()
    return bound.arguments


def _no_logits(name: str, values: Tensor) -> str:
    """What these are by their values, in the place of what the loss takes; empty: they may be that."""
    dim = 1 if values.dim() > 1 else 0
    if values.shape[dim] < 2 or not values.numel():
        return ""
    if _is_distribution(values, dim):
        return "softmax"
    return "mm" if name == "nll_loss" and float(values.max()) > NEAR else ""


def _is_distribution(values: Tensor, dim: int) -> bool:
    """Return whether they are probabilities along it; rows of zeros, which count for nothing, may be among them."""
    sums = values.float().sum(dim)
    return (
        bool((values >= 0).all()) and bool(sums.any()) and bool(((sums - 1).abs() < NEAR).logical_or(sums == 0).all())
    )


def _least_sum(values: Tensor, dim: int) -> float:
    """Of the sums the one that is furthest from 1."""
    sums = values.float().sum(dim).flatten()
    return float(sums[(sums - 1).abs().argmax()])


def _total(outputs: Tensor, target: Tensor) -> float:
    """What the targets of every sample sum to, along the dimension in which outputs sum to 1.

    0: each to another number, as where samples are weighed, or no such dimension is known.
    """
    if target.shape != outputs.shape or target.dim() < 2 or not target.numel():
        return 0.0
    rows = max(2, MOST_LOOKED_AT * len(target) // target.numel())
    outputs, target = outputs[:rows].float(), target[:rows].float()
    for dim in dict.fromkeys((target.dim() - 1, 1)):
        if target.shape[dim] > 1 and bool((outputs.logsumexp(dim).abs() < NEAR).all()):
            sums = target.sum(dim)
            sums = sums[sums != 0]
            alike = sums.numel() > 1 and float(sums.max() - sums.min()) <= NEAR * float(sums.max())
            return float(sums.mean()) if alike else 0.0
    return 0.0


def _finds_itself(outputs: Tensor, target: Tensor) -> bool:
    """Return whether rows compare samples with all of them, themselves among these, and have another as the target."""
    count = len(outputs)
    if outputs.dim() != 2 or outputs.shape[1] != count or count < 4 or target.shape != (count,):
        return False
    diagonal, own = outputs.diagonal().float(), torch.arange(count, device=target.device)
    least, most = (float(one) for one in diagonal.aminmax())
    if not (bool((target != own).all()) and abs(most) < float("inf") and most - least <= EQUAL * abs(most)):
        return False
    rows = outputs[: max(4, MOST_LOOKED_AT // count)].float()
    largest = rows.topk(2).values
    alone = largest[:, 0] - largest[:, 1] > EQUAL * abs(most)
    return bool((rows.argmax(1) == own[: len(rows)].to(rows.device)).logical_or(~alone).all()) and bool(alone.any())


def _compared(known: Mapping[str, Any]) -> LossCompared:
    counts_all = known.get("reduction", "mean") != "none" and known.get("weight") is None
    outputs, targets = known["input"].detach(), known["target"].detach()
    return LossCompared(
        outputs=outputs, targets=targets, left_out=int(known.get("ignore_index", -100)), counts_all=counts_all
    )


def _before(values: Any) -> str:
    """Return what has made these values, past what changes none: ``Softmax`` of ``SoftmaxBackward0``."""
    node: Any = getattr(values, "grad_fn", None)
    for _ in range(6):
        name = type(node).__name__.partition("Backward")[0]
        if name not in SHAPES or not node.next_functions:
            return name
        node = node.next_functions[0][0]
    return ""


def _of_graph(loss: Any) -> Hits:
    """What the graph of a loss says it is made of."""
    node = getattr(loss, "grad_fn", None)
    every = [] if node is None else [*near(node, WHOLE, lambda _: True)]
    exponentials = [one for one in every if kind_of(one) == "Exp"]
    if any(map(_of_mean, exponentials)):
        what = "one weight for all samples, of their mean: exp(-loss) is no probability of a sample"
        yield what, 'Write reduction="none" in the loss that is weighed, and .mean() behind it.'
    users = defaultdict[Any, list[Any]](list)
    for one in every if exponentials else ():
        for source in one.next_functions:
            users[source].append(one)
    if any(_is_scale(one, users) for one in exponentials):
        what = "exp(x) as the variance of what is drawn, and what is drawn has it as its deviation"
        yield what, "Scale the noise by exp(0.5 * x) where x is the logarithm of a variance."


def _of_mean(exponential: Any) -> bool:
    """Return whether it is the probability that a mean over samples of its logarithm stands for, exp(-mean)."""
    negative = past(exponential) if shape_of(exponential) == () else None
    mean = past(negative) if negative is not None and kind_of(negative) == "Neg" else None
    mean = past(mean) if mean is not None and kind_of(mean) == "Mean" else mean
    return mean is not None and kind_of(mean) in ENTROPIES


def _is_scale(one: Any, users: Mapping[Any, list[Any]]) -> bool:
    """Return whether exp(x) scales the noise that is added to a mean whose divergence has 1 + x - mean^2 - exp(x)."""
    source = one.next_functions[0]
    noisy = [(use, 0) for use in users[one, 0] if kind_of(use) == "Mul" and (None, 0) in use.next_functions]
    drawn = [use for noise in noisy for use in users[noise] if kind_of(use) == "Add"]
    means = [mean for use in drawn for mean in use.next_functions if mean not in noisy and mean[0] is not None]
    squared = any(kind_of(use) == "Pow" for mean in means for use in users[mean])
    alike = [other for other in users[source] if kind_of(other) == "Exp"]
    counted = any(kind_of(use) in SUMS for other in alike for use in users[other, 0])
    return squared and counted and any(kind_of(use) in SUMS for use in users[source])


MOST_NODES = 64
"""Of a graph in which no parameter is looked for any longer."""


def leads_to_parameter(loss: Any) -> bool:
    """Return whether the graph of a loss leads to a parameter; a large one is taken to."""
    node = getattr(loss, "grad_fn", None)
    waiting, seen = [node], {node}
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        leaf = loss if node is None else getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            return True
        after = {one for one, _ in getattr(node, "next_functions", ()) if one is not None} - seen
        seen |= after
        waiting += after
    return bool(waiting)
