"""What the terms of a loss are, and what they train."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.terms import TermFacts
from prepkit.findings import Severity
from prepkit.findings.text import some
from prepkit.rules.rule import Hit, Moment, Rule


def _terms(facts: RunFacts) -> TermFacts:
    return facts.window.terms if facts.window is not None else TermFacts()


def _targets(facts: RunFacts) -> Iterator[Hit]:
    for line in _terms(facts).targets:
        what = "The target, a reward and a part of the model's own outputs, requires a gradient: the loss moves it"
        yield Hit(line, f"{what} towards what is predicted.")
    for line in facts.window.advantages if facts.window is not None else ():
        what = "A log-probability is multiplied with a constant less what trains, as an advantage is, and both require"
        yield Hit(line, f"{what} a gradient: the loss of the policy moves the critic too.", _ADVANTAGE)


def _cancelled(facts: RunFacts) -> Iterator[Hit]:
    for one in _terms(facts).cancelled:
        which = f"One of {one.terms} terms of the loss" if one.terms > 1 else "The loss"
        what = f"{which} trains nothing: both sides of a {one.of} in it, of shape {[*one.shape]}, are computed alike"
        yield Hit(one.line, f"{what}, and their gradients cancel.")


def _constants(facts: RunFacts) -> Iterator[Hit]:
    for one in _terms(facts).constants:
        what = f"{one.name} is added to the loss and trains nothing, though it is made of what trains: {one.made} has"
        yield Hit(one.line, f"{what} taken its graph away.")


def _divergences(facts: RunFacts) -> Iterator[Hit]:
    for one in _terms(facts).divergences:
        how = "subtracted from" if one.subtracted else "added to"
        what = f"{one.name} is {one.value:.3g} and {how} the loss, which can make it as small as it likes by moving"
        yield Hit(one.line, f"{what} both distributions apart: the sign is turned.")


def _masked(facts: RunFacts) -> Iterator[Hit]:
    for line, shape in _terms(facts).masked:
        what = f"A minimum or maximum of shape {[*shape]} in the loss takes, in each of its rows, what a mask has put"
        yield Hit(line, f"{what} there: it says nothing of the model, and trains nothing.")


def _undone(facts: RunFacts) -> Iterator[Hit]:
    for line, shape in _terms(facts).undone:
        what = f"A sum x + (y - x) of shape {[*shape]} goes into the loss, and its gradient goes to y alone"
        yield Hit(line, f"{what}: that of x is added and taken off, and what has computed x learns nothing by it.")


def _flat(facts: RunFacts) -> Iterator[Hit]:
    for one in _terms(facts).flat:
        what = f"{one.step} stands between the loss and {some(one.weights)}, and its slope is zero: their gradients are"
        yield Hit(one.line, f"{what} zeros, and they are not trained.")


def _backwards(facts: RunFacts) -> Iterator[Hit]:
    for one in _terms(facts).backwards:
        how = f"{one.ratio:.3g} x the slope" if one.ratio is not None else "something else than the slope"
        what = (
            f"The backward of {one.name} gives {how} of its forward for {one.argument}, measured at what it was given"
        )
        yield Hit(one.line, f"{what}: what has computed {one.argument} is trained by that.")


def _ratios(facts: RunFacts) -> Iterator[Hit]:
    for line in facts.window.ratios if facts.window is not None else ():
        what = "The ratio of the new policy to the old one is 1 for every sample, though it has stepped since it drew"
        yield Hit(line, f"{what} them: the old log-probabilities are computed anew, and clipping never acts.")


def _cut_draws(facts: RunFacts) -> Iterator[Hit]:
    for line, kind in facts.window.cut_draws if facts.window is not None else ():
        what = f"{kind}.sample() has no graph: layers that train are given what it draws, and what makes its parameters"
        yield Hit(line, f"{what} learns nothing of what comes of it, though it is trained by the same loss.")


def _dropped(facts: RunFacts) -> Iterator[Hit]:
    for one in _terms(facts).dropped:
        if one.weights:
            what = f"`{one.name}`, {one.weights} weights that were computed from those of the model, is read by nobody"
            yield Hit(one.line, f"{what}: the loss is that of the weights before.", _USED)
        else:
            what = f"`{one.name}`, of shape {[*one.shape]}, was computed from what trains, and nobody reads it"
            yield Hit(one.line, f"{what}: the loss goes without it.")


def _overwritten(facts: RunFacts) -> Iterator[Hit]:
    for one in _terms(facts).overwritten:
        shape = f"a tensor of shape {[*one.shape]}" if one.shape else "a number"
        what = f"{one.kind}.{one.method} of each of {len(one.before) + 1} modules gives {shape} with a graph, bound to"
        what = f"{what} `{one.name}`, and the loss has that of {one.last} alone: those of {some(one.before)} were"
        yield Hit(f"{one.model}, {one.line}", f"{what} written over, and train nothing.")


def _half_mixed(facts: RunFacts) -> Iterator[Hit]:
    for one in _terms(facts).half_mixed:
        left = f"; `{one.left}` is read by nobody" if one.left else ""
        what = f"`{one.name}` is mixed with other samples, and the loss has the labels `{one.labels}` of one of the two"
        yield Hit(one.line, f"{what}{left}.")


def _alike(facts: RunFacts) -> Iterator[Hit]:
    for one in facts.window.misgiven if facts.window is not None else ():
        if one.kind == "alike":
            yield Hit(one.loss, f"It is given {one.what}.", one.fix)


_ADVANTAGE = "Write -(log_prob * advantage.detach()).mean() in the loss of the policy."
_USED = "Give the new weights to the second call: torch.func.functional_call(model, fast, (x,))."

RULES: tuple[Rule, ...] = (
    Rule(
        id="run.target-trains",
        summary="What a model is to predict does not train where it is made of its own outputs.",
        check=_targets,
        at=(Moment.AUDIT,),
        fix="Compute the target under torch.no_grad(), or give the loss target.detach().",
        severity=Severity.WARNING,
        source=("torch Tensor.detach",),
    ),
    Rule(
        id="run.drawn-without-graph",
        summary="What layers of a loss are given, drawn from what the loss trains, has a graph.",
        check=_cut_draws,
        at=(Moment.AUDIT,),
        fix="Write rsample() in its place.",
        severity=Severity.WARNING,
        source=("torch.distributions: Pathwise derivative",),
    ),
    Rule(
        id="run.term-cancels",
        summary="Each term of a loss trains something.",
        check=_cancelled,
        at=(Moment.AUDIT,),
        fix="Compute the one that is compared with before the update, and detach it: old = logp.detach().",
        severity=Severity.WARNING,
        source=("torch Tensor.detach",),
    ),
    Rule(
        id="run.term-constant",
        summary="A term of a loss that is made of what trains has a graph.",
        check=_constants,
        at=(Moment.AUDIT,),
        fix="Leave .data, .item(), .detach() and no_grad() out of what is added to the loss; gather with the graph; "
        "give autograd.grad create_graph=True, and the loss probabilities in place of what a threshold makes of them.",
        severity=Severity.WARNING,
        source=("torch Tensor.detach", "torch.no_grad"),
    ),
    Rule(
        id="run.divergence-negative",
        summary="A divergence that goes into a loss is not below 0.",
        check=_divergences,
        at=(Moment.AUDIT,),
        fix="Write kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean(), and add it.",
        severity=Severity.WARNING,
        source=("Kingma and Welling 2014, appendix B",),
    ),
    Rule(
        id="run.result-dropped",
        summary="What is computed for a loss is in it.",
        check=_dropped,
        at=(Moment.AUDIT,),
        fix="Add it to the loss (a log-determinant is subtracted from it), or name it _ where it is not meant to be.",
        severity=Severity.WARNING,
        source=("torch Tensor.backward",),
    ),
    Rule(
        id="run.term-overwritten",
        summary="What each of several modules adds to a loss is in it.",
        check=_overwritten,
        at=(Moment.AUDIT,),
        fix="Add them up: total = 0 before the loop, in it x, one = layer(x) and total = total + one, and total in the "
        "loss. Nothing, where that of the last alone is meant.",
        severity=Severity.WARNING,
        source=("torch Tensor.backward", "Dinh et al. 2017, Real NVP, equation 6"),
    ),
    Rule(
        id="run.mixed-half",
        summary="Of samples that are mixed the labels of both are learned.",
        check=_half_mixed,
        at=(Moment.AUDIT,),
        fix="Write loss = lam * criterion(output, y) + (1 - lam) * criterion(output, y[order]).",
        severity=Severity.WARNING,
        source=("Zhang et al. 2018, mixup",),
    ),
    Rule(
        id="run.targets-alike",
        summary="The targets of a batch are of several classes.",
        check=_alike,
        at=(Moment.AUDIT,),
        fix="Shuffle samples, shuffle=True; clone targets before inputs are changed in place.",
        severity=Severity.WARNING,
        source=("torch DataLoader: shuffle",),
    ),
    Rule(
        id="run.masked-chosen",
        summary="A minimum or maximum takes what its mask leaves.",
        check=_masked,
        at=(Moment.AUDIT,),
        fix='Write masked_fill(mask, float("inf")) before a minimum, and float("-inf") before a maximum.',
        severity=Severity.WARNING,
        source=("torch Tensor.masked_fill",),
    ),
    Rule(
        id="run.straight-through",
        summary="A straight-through estimate gives its gradient to what it stands for.",
        check=_undone,
        at=(Moment.AUDIT,),
        fix="Write x + (y - x).detach(), as of a vector quantizer.",
        severity=Severity.WARNING,
        source=("arXiv 1308.3432", "arXiv 1711.00937"),
    ),
    Rule(
        id="run.slope-zero",
        summary="No step without a slope stands between a loss and what it is to train.",
        check=_flat,
        at=(Moment.AUDIT,),
        fix="Write x + (x.round() - x).detach(), a straight-through estimate.",
        severity=Severity.WARNING,
        source=("arXiv 1308.3432",),
    ),
    Rule(
        id="run.backward-other",
        summary="A backward of the program's own gives the slope of its forward.",
        check=_backwards,
        at=(Moment.AUDIT,),
        fix="Ask torch.autograd.gradcheck(Function.apply, inputs in float64), and mend what backward returns; nothing, "
        "where another gradient is meant.",
        severity=Severity.WARNING,
        source=("torch.autograd.gradcheck",),
    ),
    Rule(
        id="run.ratio-one",
        summary="A ratio of policies leaves 1 once the policy has stepped.",
        check=_ratios,
        at=(Moment.AUDIT,),
        fix="Keep the log-probabilities of the time when the samples were drawn, before the first step on them.",
        severity=Severity.WARNING,
        source=("Schulman et al. 2017, Proximal Policy Optimization, equation 6",),
    ),
)
"""Reporting order."""
