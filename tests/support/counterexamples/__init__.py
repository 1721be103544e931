"""For each rule a config and facts on which it fires, by subject."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prepkit.facts import Facts
from prepkit.rules import RULES
from prepkit.testing.tiny import tiny_facts
from tests.support.counterexamples import (
    compile,  # noqa: A004  # the subject is called what the config calls it
    ddp_fsdp1,
    deepspeed,
    environment,
    fp8,
    global_batch,
    optimizer,
    optimizer_specs,
    tensor_parallel,
    weights,
    wrap,
)
from tests.support.counterexamples.build import Counterexample


def _healthy(make: Callable[[Facts], Counterexample]) -> Counterexample:
    return make(tiny_facts())


_BY_SUBJECT: dict[str, Callable[[], Counterexample]] = {
    **environment.COUNTEREXAMPLES,
    **wrap.COUNTEREXAMPLES,
    **tensor_parallel.COUNTEREXAMPLES,
    **optimizer_specs.COUNTEREXAMPLES,
    **optimizer.COUNTEREXAMPLES,
    **fp8.COUNTEREXAMPLES,
    **ddp_fsdp1.COUNTEREXAMPLES,
    **deepspeed.COUNTEREXAMPLES,
    **compile.COUNTEREXAMPLES,
    **global_batch.COUNTEREXAMPLES,
    **{rule: partial(_healthy, make) for rule, make in weights.COUNTEREXAMPLES.items()},
}

if _missing := [rule.id for rule in RULES if rule.id not in _BY_SUBJECT]:
    raise LookupError(
        f"{', '.join(_missing)}: no counterexample; add one to COUNTEREXAMPLES in the file of its subject in "
        "tests/support/counterexamples"
    )
COUNTEREXAMPLES = {rule.id: _BY_SUBJECT[rule.id] for rule in RULES}
"""Rule id to a config and facts on which the rule fires, in the order of the rules."""
