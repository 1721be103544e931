"""Hypothesis strategies for configs, facts and plans: for our laws, and for rules and tools of your own.

``configs()`` and ``facts()`` draw anything that the types allow within small bounds, right or wrong. ``legal()`` draws
a config and facts without an error, by construction: facts first, then a config that suits them. ``plans()`` gives
their plans::

    @given(legal())
    def test_my_rule_is_silent_where_nothing_is_wrong(drawn):
        assert not [finding for finding in check(*drawn, rules=(MY_RULE,)) if finding.severity is Severity.ERROR]

``tiny_model`` and the others make facts by hand.
"""

from __future__ import annotations

from prepkit.testing.strategies.configs import configs
from prepkit.testing.strategies.facts import facts, model_facts
from prepkit.testing.strategies.legal import fitting, legal, plans
from prepkit.testing.tiny import marked, tiny_facts, tiny_loader, tiny_model, tiny_optimizer

__all__ = [
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
