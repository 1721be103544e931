"""Hypothesis strategies for configs, facts and plans: for our laws, and for rules and tools of your own.

``configs()`` and ``facts()`` draw anything that the types allow within small bounds, right or wrong. ``legal()`` draws
a config and facts without an error, by construction: facts first, then a config that suits them. ``plans()`` gives
their plans::

    @given(legal())
    def test_my_rule_is_silent_where_nothing_is_wrong(drawn):
        assert not [finding for finding in check(*drawn, rules=(MY_RULE,)) if finding.severity is Severity.ERROR]

For each rule ``COUNTEREXAMPLES`` has a config and facts on which it fires; ``tiny_model`` and the others make facts by
hand.
"""

from __future__ import annotations

from prepkit.rules import RULES
from prepkit.testing.counterexamples import COUNTEREXAMPLES as _COUNTEREXAMPLES
from prepkit.testing.strategies.configs import configs
from prepkit.testing.strategies.facts import facts, model_facts
from prepkit.testing.strategies.legal import fitting, legal, plans
from prepkit.testing.tiny import marked, tiny_facts, tiny_loader, tiny_model, tiny_optimizer

__all__ = [
    "COUNTEREXAMPLES",
    "configs",
    "facts",
    "fitting",
    "legal",
    "marked",
    "model_facts",
    "plans",
    "tiny_facts",
    "tiny_loader",
    "tiny_model",
    "tiny_optimizer",
]

_ORDER = {rule.id: place for place, rule in enumerate(RULES)}
COUNTEREXAMPLES = dict(sorted(_COUNTEREXAMPLES.items(), key=lambda item: _ORDER.get(item[0], -1)))
"""Rule id to a config and facts on which the rule fires, in the order of the rules."""
