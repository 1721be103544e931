"""What an optimizer has made of weights, beside the same step taken plainly."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from prepkit.facts.proof import ProofFacts, StepProof
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit
from prepkit.rules.run.proof_causes import MARGIN

IN_16_BIT = ("bfloat16", "float16")


def rounded_away(facts: ProofFacts) -> Iterator[Hit]:
    """Yield where weights of few bits have stayed where the step moves them."""
    low = [one for one in facts.steps if one.dtype in IN_16_BIT and one.meant]
    lost, meant = sum(one.lost for one in low), sum(one.meant for one in low)
    if lost > meant / 2:
        said = f"{lost / meant:.0%} of the {meant:,} elements that the step moves in float64 have stayed as they were"
        yield Hit("optimizer", f"{said}: in {low[0].dtype} the weights round what is added to them away.")


def not_held(facts: ProofFacts) -> Iterator[Hit]:
    """Yield what trains and is not stepped, or was put back."""
    if names := [one.name for one in facts.steps if not one.held]:
        yield Hit(at(names[0]), f"The optimizer does not hold {count(len(names), 'trained parameter')}: {some(names)}.")
    still = [one.name for one in facts.steps if one.held and one.moved == 0 and one.expected > _step_allowed(one) ** 2]
    if still:
        what = f"The optimizer holds {count(len(still), 'parameter')} that its step has not changed: {some(still)}."
        yield Hit(
            at(still[0]), what, "Look at what stands between the optimizer and the model: a skipped or a patched step."
        )
    if facts.undone:
        names, rank = [name for name, _ in facts.undone], facts.undone[0][1]
        what = f"Rank {rank} has stepped {count(len(names), 'parameter')} that are behind the step as they were before"
        fix = "Let the rank that steps a parameter send it: dist.broadcast(param, src=owner)."
        yield Hit(at(names[0]), f"{what}: {some(names)}. Something has put them back.", fix)


def _step_allowed(one: StepProof) -> float:
    return MARGIN * one.noise + 1e-4 * sqrt(one.expected)


def _off(one: StepProof) -> bool:
    """Return whether the weight has moved otherwise than plainly, beyond rounding."""
    return sqrt(max(one.moved - 2 * one.along + one.expected, 0.0)) > _step_allowed(one)


def step_size(facts: ProofFacts) -> Iterator[Hit]:
    """Yield weights that have moved otherwise than their optimizer takes a step."""
    found: dict[str, list[str]] = {}
    for one in facts.steps if not (facts.options_apart or facts.state_apart) else ():
        if one.held and one.moved and _off(one) and not one.by_parts:
            ratio = one.along / one.expected if one.expected else float("inf")
            length = sqrt(one.moved * one.expected)
            turned = length and one.along / length < 0.99
            said = "another direction" if turned else f"{ratio:.3f} x"
            found.setdefault(said, []).append(one.name)
    every = [name for names in found.values() for name in names]
    if len(found) == 1:
        (said,) = found
        how = "in another direction than" if said == "another direction" else f"by {said} of what"
        what = f"{count(len(every), 'parameter')} moved {how} the optimizer's options and these gradients give"
        yield Hit(at(every[0]), f"{what}: {some(every)}.")
    elif found:  # one cause, as a hook that scales all weights
        hows = [
            f"{'in ' if said.startswith('another') else 'by '}{said} ({some(names)})" for said, names in found.items()
        ]
        what = f"{count(len(every), 'parameter')} moved otherwise than the optimizer's options and these gradients give"
        more = f" and {len(hows) - 3} more ways" if len(hows) > 3 else ""
        yield Hit(at(every[0]), f"{what}: {', '.join(hows[:3])}{more}.")


def step_in_parts(facts: ProofFacts) -> Iterator[Hit]:
    """Yield what an optimizer of the program's own has stepped part by part, and would have stepped otherwise whole."""
    off: dict[str, list[str]] = {}
    for one in facts.steps if not (facts.options_apart or facts.state_apart) else ():
        if one.by_parts and _off(one):
            off.setdefault(one.by_parts, []).append(one.name)
    for kind, names in off.items():
        what = f"{kind} has stepped {count(len(names), 'parameter')} by the part that each rank holds: {some(names)}"
        yield Hit(at(names[0]), f"{what}. Over whole weights and gradients the same class takes another step.")
