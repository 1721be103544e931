"""For each rule a pair of config and facts on which it fires, by subject."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prepkit.facts import Facts
from prepkit.provoke import copies, deepspeed, fp8, optimizers, places, running, tensor, units, weights
from prepkit.tiny import Pair, tiny_facts


def _healthy(make: Callable[[Facts], Pair]) -> Pair:
    return make(tiny_facts())


PROVOKE: dict[str, Callable[[], Pair]] = {
    **places.PAIRS,
    **units.PAIRS,
    **tensor.PAIRS,
    **optimizers.PAIRS,
    **fp8.PAIRS,
    **copies.PAIRS,
    **deepspeed.PAIRS,
    **running.PAIRS,
    **{rule: partial(_healthy, make) for rule, make in weights.PAIRS.items()},
}
"""Rule id to a pair on which the rule fires."""
