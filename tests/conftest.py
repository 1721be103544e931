"""Fixtures for tests that need more than one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.deepspeed_cpu import own_extensions
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang
from tests.support.script import Ran, fork_torchrun


def pytest_configure() -> None:
    """Before anything is collected: some tests ask which kernels are compiled."""
    own_extensions()


@pytest.fixture(autouse=True)
def launcher_variables() -> Iterator[None]:
    """What DeepSpeed is told of this process by ``LOCAL_RANK`` is told to nobody after the test."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[ForkServers]:
    """What the workers of all gangs are forked from."""
    servers = ForkServers()
    yield servers
    servers.close()


@pytest.fixture
def forked_torchrun(fork_servers: ForkServers, monkeypatch: pytest.MonkeyPatch) -> list[Ran]:
    """``prepkit audit --torchrun 2`` in this process forks what torchrun would start; how each of them has ended."""
    return fork_torchrun(fork_servers, monkeypatch)


@pytest.fixture(scope="session")
def gang2(fork_servers: ForkServers) -> Iterator[Gang]:
    """Two workers with a gloo process group; started by the first test that runs something on them."""
    gang = Gang(2, fork_servers)
    yield gang
    gang.close()


@pytest.fixture(scope="session")
def gang4(fork_servers: ForkServers) -> Iterator[Gang]:
    """Four workers."""
    gang = Gang(4, fork_servers)
    yield gang
    gang.close()
