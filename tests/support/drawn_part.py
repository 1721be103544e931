"""A part of many cases for each run of the suite, and all of them under ``HYPOTHESIS_PROFILE=nightly``.

Under ``ci`` it is the same part each time, so that a change is refused for what it does; else another one each time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from typing import TypeVar

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
THOROUGH = PROFILE == "nightly"

Case = TypeVar("Case")


def one_in(few: int, cases: Iterable[Case]) -> Iterator[Case]:
    """Of each so many cases about one."""
    draw = random.Random(0 if PROFILE == "ci" else None)
    return (case for case in cases if THOROUGH or draw.randrange(few) == 0)
