"""The time-out of a test, as a pytest plugin: pytest-timeout's, counted in seconds of an idle machine.

What hangs fails its test with the stacks of all threads. What does not even answer the signal, because it waits inside
C, ends the run ``MARGIN_S`` later, with the stacks as well.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from pytest_timeout import timeout_sigalrm

from tests.support.patience import Patience

MARGIN_S = 100.0
LIBRARY = 50
"""Modules more than before, from which on a test has imported a library."""


@pytest.hookimpl
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Starts to wait, and waits on where the machine was busy meanwhile."""
    patience = Patience(settings.timeout)

    def lapse(_number: int, _frame: FrameType | None) -> None:
        if (left := patience.left()) > 0:
            _arm(item, left)
        else:
            timeout_sigalrm(item, settings)

    signal.signal(signal.SIGALRM, lapse)
    _arm(item, settings.timeout)
    return True


@pytest.hookimpl
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    """The test is over."""
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True


def _arm(item: pytest.Item, seconds: float) -> None:
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(seconds + MARGIN_S, file=stderr, exit=True)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def pytest_collection_finish() -> None:
    """From here on no garbage collection looks at what was imported: that takes a third of a second each time."""
    _set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Nor at what a test has imported, or left in caches, nor does an audit, which asks for all objects many times."""
    modules = len(sys.modules)
    done = yield
    if nextitem is not None and (nextitem.path != item.path or len(sys.modules) >= modules + LIBRARY):
        _set_aside()
    return done


def _set_aside() -> None:
    gc.collect()
    gc.freeze()
