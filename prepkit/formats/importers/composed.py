"""The nodes of a YAML text, within bounds: its values are made from them, and its places are looked up in them."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import ReusedAnchorWarning, YAMLError
from ruamel.yaml.events import CollectionStartEvent
from ruamel.yaml.nodes import Node

VALUES = 20_000
"""Values of the largest config in YAML, with every alias written out."""

DEEPEST = 100
"""Collections inside each other."""


def composed(text: str) -> Node | None:
    """The nodes of a YAML text; None where it holds comments only. An anchor may be given anew, as YAML 1.2 has it.

    Raises ``RecursionError`` above ``DEEPEST``, before ruamel.yaml spends time that grows with the square of the depth,
    and a ``ValueError`` above ``VALUES``, before it spends seconds.
    """
    node = _composed(text)
    if isinstance(node, Exception):
        raise node.with_traceback(None)
    return node


@lru_cache(maxsize=4)
def _composed(text: str) -> Node | Exception | None:
    """Kept, also what it fails with, as a file is composed for its values and for its places: that is what it takes."""
    reader = YAML(typ="safe", pure=True)
    reader.Composer = _Composer
    try:
        with warnings.catch_warnings(action="ignore", category=ReusedAnchorWarning):
            node: Node | None = reader.compose(text)
    except (YAMLError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        return error
    return node


class TooManyValues(ValueError):
    """More values than any config has."""


class _Composer(Composer):
    inside = 0
    """Collections that the next node is in."""
    nodes = 0
    """Keys and values that were made."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > 2 * VALUES:
            raise TooManyValues(f"it has more than {VALUES:,} values")
        collection = self.parser.check_event(CollectionStartEvent)
        self.inside += collection
        if self.inside > DEEPEST:
            raise RecursionError(f"more than {DEEPEST} collections inside each other")
        node = super().compose_node(parent, index)
        self.inside -= collection
        return node
