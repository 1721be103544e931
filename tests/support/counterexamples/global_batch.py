"""Configs with facts on which rules fire: the global batch."""

from __future__ import annotations

from collections.abc import Callable

from prepkit.config import DDP, Config
from prepkit.testing.tiny import tiny_loader
from tests.support.counterexamples.build import Counterexample, loaded, ranks

COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "global-batch.unknown": lambda: ranks(Config(engine=DDP(), global_batch=256)),
    "global-batch.loaders-differ": lambda: ranks(
        Config(engine=DDP(), global_batch=256), 2, loaders=(tiny_loader(), tiny_loader(batch_size=8))
    ),
    "global-batch.two-places": lambda: loaded(Config(engine=DDP(), accumulation=3, global_batch=32)),
    "global-batch.unreachable": lambda: ranks(
        Config(engine=DDP(), global_batch=256), 7, loaders=(tiny_loader(batch_size=2),)
    ),
}
"""Rule id to a config and facts on which the rule fires."""
