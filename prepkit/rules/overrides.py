"""Which rules a config may override."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.findings.text import did_you_mean
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

ID = "overrides.unknown"

RENAMED = {
    "first-step.no-gradient": "run.without-gradient",
    "first-step.not-finite": "run.gradients-not-finite",
    "first-step.replicas-differ": "run.gradients-part",
    "first-step.misplaced": "run.gradients-misplaced",
}
"""Ids that rules once had, to those that they have."""


def about_overrides(rules: tuple[Rule, ...]) -> Rule:
    """The rule that has to know all the others: every override names one of them that can be overridden."""
    able = {rule.id: rule.overridable for rule in rules} | {ID: False}

    def check(resolved: Resolved) -> Iterator[Hit]:
        for name in dict.fromkeys(resolved.cfg.overrides):
            if name not in able:
                now = RENAMED.get(name)
                hint = f" It is called `{now}` now." if now else did_you_mean(name, able)
                yield Hit("config.overrides", f"There is no rule `{name}`.", f"Leave it out.{hint}")
            elif not able[name]:
                what = f"`{name}` cannot be overridden: nothing can go on without it."
                yield Hit("config.overrides", what, "Leave it out, and mend what the rule finds.")

    def repair(cfg: Config, _: Facts) -> Config:
        return evolve(cfg, overrides=tuple(name for name in cfg.overrides if able.get(name)))

    return Rule(
        id=ID,
        summary="Every override names a rule that can be overridden.",
        check=check,
        fix="Leave it out.",
        overridable=False,
        source=("pain 24",),
        repair=repair,
    )
