"""Fixtures for tests that need more than one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.deepspeed_cpu import own_extensions
from tests.support.gang import Gang


def pytest_configure() -> None:
    """Before anything is collected: some tests ask which kernels are compiled."""
    own_extensions()


@pytest.fixture(scope="session")
def gang2() -> Iterator[Gang]:
    """Two workers with a gloo process group; started by the first test that runs something on them."""
    gang = Gang(2)
    yield gang
    gang.close()


@pytest.fixture(scope="session")
def gang4() -> Iterator[Gang]:
    """Four workers."""
    gang = Gang(4)
    yield gang
    gang.close()
