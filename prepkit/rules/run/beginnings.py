"""How the layers of a model that trains began, and what they go on with from batch to batch."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.values import BeginningFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, some
from prepkit.rules.rule import Hit, Moment, Rule


def _begun(facts: RunFacts) -> BeginningFacts:
    return facts.window.beginnings if facts.window is not None else BeginningFacts()


def _alike(facts: RunFacts) -> Iterator[Hit]:
    if alike := _begun(facts).alike:
        name, units = alike[0]
        others = f" So have those of {some([one for one, _ in alike[1:]])}." if alike[1:] else ""
        what = f"All {units} units have the same weights and the same gradient, so that they stay one unit."
        yield Hit(at(name), f"{what}{others}")


def _keeps(facts: RunFacts) -> Iterator[Hit]:
    if keeps := _begun(facts).keeps:
        name, momentum = keeps[0]
        others = f" (and in {len(keeps) - 1} more)" if keeps[1:] else ""
        share = f"its running statistics are those of the last batch to {momentum:.0%}"
        what = f"momentum={momentum:g}{others}: in torch it is the part of the new batch, so that {share}."
        fix = f"Write momentum={1 - momentum:.3g}: torch's momentum is 1 minus that of Keras or TensorFlow."
        yield Hit(at(name), what, fix)


def _repeated(facts: RunFacts) -> Iterator[Hit]:
    for name, layer, times, line in _begun(facts).repeated:
        what = f"It holds one {layer} {times} times, with the same weights: {line} multiplies a list of one layer."
        yield Hit(at(name), what, f"Write [{layer}(...) for _ in range({times})], which makes one for each place.")


def _carried(facts: RunFacts) -> Iterator[Hit]:
    for name, line, sampler in facts.window.carried if facts.window is not None else ():
        what = f"It begins with the state that it has ended the last batch with ({line}), and {sampler} draws"
        yield Hit(name, f"{what} the samples of each batch at random: they do not go on where the last ended.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.units-alike",
        summary="The units of a layer begin unlike, so that they can learn unlike things.",
        check=_alike,
        at=(Moment.AUDIT,),
        fix="Draw the weights: nn.init.xavier_uniform_(layer.weight), or leave them as torch has made them.",
        severity=Severity.WARNING,
        source=("torch nn.init",),
    ),
    Rule(
        id="run.norm-momentum",
        summary="A batch norm averages over many batches.",
        check=_keeps,
        at=(Moment.AUDIT,),
        fix="Write 1 minus that momentum: torch's is the part of the new batch.",
        severity=Severity.WARNING,
        source=("torch BatchNorm2d: momentum",),
    ),
    Rule(
        id="run.layer-repeated",
        summary="A list of layers holds a layer for each place.",
        check=_repeated,
        at=(Moment.AUDIT,),
        fix="Write [Layer(...) for _ in range(n)], which makes one for each place.",
        severity=Severity.WARNING,
        source=("torch ModuleList",),
    ),
    Rule(
        id="run.state-carried",
        summary="A state goes from batch to batch only where each batch goes on where the last has ended.",
        check=_carried,
        at=(Moment.AUDIT,),
        fix="Set the state to None for each batch, or read streams in order (shuffle=False), one in each row.",
        severity=Severity.WARNING,
        source=("torch LSTM: hx", "torch DataLoader: shuffle"),
    ),
)
"""Reporting order."""
