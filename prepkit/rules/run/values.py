"""Values that a program has changed on the way, and how its weights began."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.values import ValueFacts
from prepkit.findings import Severity
from prepkit.findings.text import some
from prepkit.rules.rule import Hit, Moment, Rule


def _values(facts: RunFacts) -> ValueFacts:
    return facts.window.values if facts.window is not None else ValueFacts()


def _permutes(facts: RunFacts) -> Iterator[Hit]:
    for one in _values(facts).permuted:
        what = f"{one.function} makes {[*one.after]} of {[*one.before]}: it moves no dimension, it cuts the same row of"
        then = "" if len(one.after) == len(one.before) else f".reshape({', '.join(map(str, one.after))})"
        fix = f"Write permute({', '.join(map(str, one.order))}){then} in its place." if one.order else ""
        yield Hit(one.line, f"{what} numbers anew, so that values of different places get mixed.", fix)


def _empties(facts: RunFacts) -> Iterator[Hit]:
    for line, method in _values(facts).emptied:
        yield Hit(line, f"{method} makes whole numbers of fractions between -1 and 1: all of them are 0 then.")


def _reseeds(facts: RunFacts) -> Iterator[Hit]:
    for line, seed in _values(facts).reseeded:
        what = f"torch.manual_seed({seed}) runs in each step: each draws the same noise, masks and samples as the last."
        yield Hit(line, what)
    for one in _values(facts).repeated:
        what = f"It seeds torch with {one.seed} every {one.every} steps, and the steps behind it draw the same noise,"
        fix = (
            "Put it, and what draws from it, inside `with torch.random.fork_rng():`, which gives the state back behind"
        )
        fix += f" it, or draw there from torch.Generator().manual_seed({one.seed})."
        yield Hit(one.line, f"{what} masks and samples each time.", fix)


def _not_called(facts: RunFacts) -> Iterator[Hit]:
    for line, said in _values(facts).not_called:
        yield Hit(line, f"`{said}` names the method, and does not call it.", f"Write {said}().")


def _none_given(facts: RunFacts) -> Iterator[Hit]:
    for line, taker, said in _values(facts).none_given:
        what = f"`{said}` changes what it is called on, and returns None"
        yield Hit(line, f"{what}: that is what {f'`{taker}`' if taker else 'the name'} gets.")


def _unused(facts: RunFacts) -> Iterator[Hit]:
    for line, said in _values(facts).unused:
        yield Hit(line, f"`{said}` changes nothing, and nobody takes what it gives.")


def _ranked(facts: RunFacts) -> Iterator[Hit]:
    for line, name, sorts in _values(facts).ranked:
        what = f"`{name}` says which element stands at each place ({sorts}), and is counted with as if it said"
        yield Hit(line, f"{what} at which place each element stands.", f"Write {name}.argsort() for the places.")


def _inverts(facts: RunFacts) -> Iterator[Hit]:
    for line in _values(facts).inverted:
        what = "~ is given whole numbers that are 0 or 1, and makes -1 and -2 of them (255 and 254 of uint8)"
        yield Hit(line, f"{what}: no mask.")


def _blends(facts: RunFacts) -> Iterator[Hit]:
    for line in _values(facts).blended:
        what = "Whole numbers, as of classes, were interpolated, and what it makes whole again are means of them"
        yield Hit(line, f"{what}: between two classes stand others that are neither.")


def _lost(facts: RunFacts) -> Iterator[Hit]:
    for one in _values(facts).lost_sums:
        what = f"`{one.said}` writes to some places more than once: of the sums for one place the last is kept, and"
        yield Hit(one.line, f"{what} {one.repeats} are lost.", f"Write {one.instead}." if one.instead else "")


def _away(facts: RunFacts) -> Iterator[Hit]:
    for line, said, copy in _values(facts).written_away:
        rest = said.removeprefix(copy)
        fix = f"Write it by one index: {copy[:-1]}, {rest[4:]} = ..." if rest.startswith("[:, ") else ""
        fix = f"Write what the method gives back: {copy} = {said}(...)." if rest.endswith("_") else fix
        what = f"`{said}` is written in a copy that `{copy}` makes and nobody keeps: what it was taken from stays as it"
        yield Hit(line, f"{what} was.", fix)
    for line, names in _values(facts).unkept:
        were = f"{some(names)} {'was' if len(names) == 1 else 'were'} written inside of"
        what = f"{were} summon_full_params(..., writeback=False), which throws that away"
        fix = "Write writeback=True, as it is where nothing is said."
        yield Hit(line, f"{what}: the weights stay as they were.", fix)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.view-permutes",
        summary="No view stands where dimensions are to be moved.",
        check=_permutes,
        at=(Moment.AUDIT,),
        fix="Write permute or transpose in its place; to merge dimensions, permute first and reshape then.",
        severity=Severity.WARNING,
        source=("torch Tensor.view", "torch Tensor.permute"),
    ),
    Rule(
        id="run.cast-to-nothing",
        summary="A cast to whole numbers leaves something of the numbers.",
        check=_empties,
        at=(Moment.AUDIT,),
        fix="Leave the cast out; for classes, cast the column of classes, before anything is normalised.",
        severity=Severity.WARNING,
        source=("torch Tensor.long",),
    ),
    Rule(
        id="run.reseeded-steps",
        summary="Each step draws other random numbers.",
        check=_reseeds,
        at=(Moment.AUDIT,),
        fix="Seed once, before the loop.",
        severity=Severity.WARNING,
        source=("torch.manual_seed",),
    ),
    Rule(
        id="run.not-called",
        summary="A method that is named in a line of its own is called.",
        check=_not_called,
        at=(Moment.AUDIT,),
        fix="Write the brackets.",
        severity=Severity.WARNING,
        source=("Python",),
    ),
    Rule(
        id="run.result-unused",
        summary="What a call gives is taken, where it changes nothing.",
        check=_unused,
        at=(Moment.AUDIT,),
        fix="Give the result its name: data = data.shuffle(seed=0), or write the method that ends with _.",
        severity=Severity.WARNING,
        source=("datasets Dataset", "torch Tensor"),
    ),
    Rule(
        id="run.order-ranked",
        summary="Places are those of elements, and no order of them.",
        check=_ranked,
        at=(Moment.AUDIT,),
        fix="Sort twice: x.argsort(descending=True).argsort().",
        severity=Severity.WARNING,
        source=("torch argsort",),
    ),
    Rule(
        id="run.mask-inverted",
        summary="What ~ inverts is true or false.",
        check=_inverts,
        at=(Moment.AUDIT,),
        fix="Write mask.bool() first, or 1 - mask.",
        severity=Severity.WARNING,
        source=("torch bitwise_not",),
    ),
    Rule(
        id="run.none-given",
        summary="What a list, a set or a table is changed by is not given on in its place.",
        check=_none_given,
        at=(Moment.AUDIT,),
        fix="Change it in a line of its own, and give it by its name; or give a new one, as [*names, name].",
        severity=Severity.WARNING,
        source=("Python",),
    ),
    Rule(
        id="run.classes-blended",
        summary="Classes of places are resized without a mean of them.",
        check=_blends,
        at=(Moment.AUDIT,),
        fix='Write mode="nearest" for what holds classes.',
        severity=Severity.WARNING,
        source=("torch interpolate",),
    ),
    Rule(
        id="run.sums-lost",
        summary="What is added to places that are named more than once is added each time.",
        check=_lost,
        at=(Moment.AUDIT,),
        fix="Write index_add_, or index_put_((i, j), values, accumulate=True); to count, torch.bincount.",
        severity=Severity.WARNING,
        source=("torch Tensor.index_put_", "torch Tensor.index_add_"),
    ),
    Rule(
        id="run.written-away",
        summary="What is written by an index is kept.",
        check=_away,
        at=(Moment.AUDIT,),
        fix="Write it by one index: x[rows, :2] = ... in the place of x[rows][:, :2] = ...",
        severity=Severity.WARNING,
        source=("torch: indexing by tensors copies",),
    ),
)
"""Reporting order."""
