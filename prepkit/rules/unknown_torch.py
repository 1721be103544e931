"""What a torch whose version is not known might refuse: it passes for the newest, and that is said where it matters."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.findings import Severity
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

ID = "environment.torch-unknown"

BY_RELEASE = (
    "optimizer.newer-torch",
    "environment.fsdp2-on-cpu",
    "tensor.uneven-shards",
    "units.left-whole",
    "units.mixed-dtypes",
    "units.packed",
    "units.unused-on-old-torch",
    "units.experts-on-old-torch",
)
"""Rules that say something of an old torch which they do not say of a new one."""

OLDEST = "2.6.0"
"""The first torch that prepkit takes."""


def about_unknown_torch(rules: tuple[Rule, ...]) -> Rule:
    """The rule that asks others what they would say of the oldest torch."""
    by_release = tuple(rule for rule in rules if rule.id in BY_RELEASE)

    def check(resolved: Resolved) -> Iterator[Hit]:
        facts = resolved.facts
        if facts.env.knows_release:
            return
        oldest = Resolved(cfg=resolved.cfg, facts=evolve(facts, env=evolve(facts.env, torch=OLDEST)))
        for rule in by_release:
            places = {hit.where for hit in rule.check(resolved)}
            for hit in rule.check(oldest):
                if hit.where not in places:
                    said = f"`{facts.env.torch}` names no release" if facts.env.torch else "is not known"
                    what = f"The version of torch {said}. Under torch 2.6 `{rule.id}` would say: {hit.what}"
                    yield Hit("env.torch", what)

    return Rule(
        id=ID,
        summary="The version of torch is known where an old one would be refused.",
        check=check,
        fix='Declare it, such as Env.declare(torch="2.9"); apply asks again with the torch that is there.',
        severity=Severity.WARNING,
        source=("pain 35", "ST-46"),
    )
