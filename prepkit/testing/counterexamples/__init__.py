"""For each rule a pair of config and facts on which it fires, by subject."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prepkit.facts import Facts
from prepkit.testing.counterexamples import (
    compile,  # noqa: A004  # the subject is called what the config calls it
    ddp_fsdp1,
    deepspeed,
    environment,
    fp8,
    optimizer,
    tensor_parallel,
    weights,
    wrap,
)
from prepkit.testing.tiny import Pair, tiny_facts


def _healthy(make: Callable[[Facts], Pair]) -> Pair:
    return make(tiny_facts())


COUNTEREXAMPLES: dict[str, Callable[[], Pair]] = {
    **environment.PAIRS,
    **wrap.PAIRS,
    **tensor_parallel.PAIRS,
    **optimizer.PAIRS,
    **fp8.PAIRS,
    **ddp_fsdp1.PAIRS,
    **deepspeed.PAIRS,
    **compile.PAIRS,
    **{rule: partial(_healthy, make) for rule, make in weights.PAIRS.items()},
}
"""Rule id to a pair on which the rule fires."""
