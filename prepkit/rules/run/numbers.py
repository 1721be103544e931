"""Numbers that no training can come from: weights, rates, states and loaders that are as they should never be."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule

_LORA = ("lora_A", "lora_B")


def _rates(facts: RunFacts) -> Iterator[Hit]:
    for optimizer in facts.optimizers:
        if bad := [rate for rate in optimizer.rates if not isfinite(rate)]:
            yield Hit("optimizer", f"`{optimizer.name}` has learning rate {bad[0]}, and so every weight after a step.")


def _infinite(facts: RunFacts) -> Iterator[Hit]:
    if facts.infinite:
        what = f"{count(len(facts.infinite), 'parameter')} with infinite elements: {some(facts.infinite)}."
        yield Hit(at(facts.infinite[0]), what)


def _negative(facts: RunFacts) -> Iterator[Hit]:
    if facts.negative:
        what = f"{count(len(facts.negative), 'running variance')} below zero, of which the root is NaN: "
        yield Hit(at(facts.negative[0]), f"{what}{some(facts.negative)}.")


def _dead(facts: RunFacts) -> Iterator[Hit]:
    """Yield where both factors are zero, each one's gradient is: neither ever moves."""
    zeros = set(facts.zeros)
    pairs = [name for name in facts.zeros if _LORA[0] in name and name.replace(*_LORA) in zeros]
    if pairs:
        what = f"Both matrices of {count(len(pairs), 'adapter')} are zero, so that neither gets a gradient: "
        yield Hit(at(pairs[0]), f"{what}{some(pairs)}.")
        return
    matrices = [param.name for param in facts.params if param.requires_grad and param.matrix]
    if len(matrices) > 1 and zeros >= set(matrices):
        yield Hit("model", f"All {len(matrices)} trained matrices are zero: only the last bias gets a gradient.")


def _drops(facts: RunFacts) -> Iterator[Hit]:
    if facts.drops_all:
        what = f"{count(len(facts.drops_all), 'module')} with p=1: {some(facts.drops_all)}. Nothing passes in training."
        yield Hit(at(facts.drops_all[0]), what)


def _misfits(facts: RunFacts) -> Iterator[Hit]:
    for optimizer in facts.optimizers:
        if optimizer.misfits:
            what = f"`{optimizer.name}` has state of another shape than its parameter: {some(optimizer.misfits)}."
            yield Hit("optimizer", what)


def _spoiled(facts: RunFacts) -> Iterator[Hit]:
    for optimizer in facts.optimizers:
        if optimizer.spoiled:
            what = f"`{optimizer.name}` has state with elements that are not finite: {some(optimizer.spoiled)}."
            yield Hit("optimizer", what)


def _batches(facts: RunFacts) -> Iterator[Hit]:
    for index, loader in enumerate(facts.loaders):
        if loader.batches == 0:
            what = "A pass over it has no batch"
            seen = loader.seen
            if seen.drop_last and seen.length and seen.batch_size:
                what += f": of {seen.length} samples it has fewer than a batch of {seen.batch_size}, and drop_last"
            yield Hit(f"loaders[{index}]", f"{what}.", milder=index > 0)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.rate-not-finite",
        summary="Learning rates are numbers.",
        check=_rates,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Give lr a finite value, such as 1e-3.",
    ),
    Rule(
        id="run.infinite",
        summary="No parameter holds an infinite element.",
        check=_infinite,
        at=(Moment.AUDIT,),
        needs=(Need.VALUES,),
        cost="a pass over all weights",
        fix="Read the weights again, in a dtype with their range: float16 ends at 65504.",
    ),
    Rule(
        id="run.negative-variance",
        summary="Running variances are not below zero.",
        check=_negative,
        at=(Moment.AUDIT,),
        needs=(Need.VALUES,),
        cost="a pass over all weights",
        fix="Read the buffers again, or call module.reset_running_stats().",
    ),
    Rule(
        id="run.never-moves",
        summary="Of two matrices that multiply each other one at most is zero.",
        check=_dead,
        at=(Moment.AUDIT,),
        needs=(Need.VALUES,),
        cost="a pass over all weights",
        fix="Initialise one of them: torch.nn.init.kaiming_uniform_(layer.weight), or peft's reset_lora_parameters.",
        source=("peft LoraLayer.reset_lora_parameters",),
    ),
    Rule(
        id="run.drops-all",
        summary="Dropout leaves something.",
        check=_drops,
        at=(Moment.AUDIT,),
        fix="Give p as the share that is dropped, such as 0.1; nothing, where a branch is to be switched off.",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.state-misfit",
        summary="The optimizer's state has the shapes of its parameters.",
        check=_misfits,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS, Need.STATE),
        cost="a pass over the optimizers' state",
        fix="Load the state that was saved with this model and these groups, in their order.",
        source=("torch Optimizer.load_state_dict",),
    ),
    Rule(
        id="run.state-not-finite",
        summary="The optimizer's state is finite.",
        check=_spoiled,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS, Need.STATE),
        cost="a pass over the optimizers' state",
        fix="Load an earlier checkpoint, or begin with a new optimizer.",
    ),
    Rule(
        id="run.no-batches",
        summary="A pass over each loader has batches.",
        check=_batches,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS,),
        fix="Give the loader more samples, a smaller batch_size, or drop_last=False.",
        milder="of a loader after the first, as one of an evaluation may be empty",
    ),
)
"""Reporting order: rates, weights, what computes with them, state, data."""
