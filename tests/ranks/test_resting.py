"""Threads that work, and when they are found at rest."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest
import torch.distributed as dist

from prepkit.ranks import end_groups
from prepkit.ranks.end_groups import until_threads_rest

pytestmark = pytest.mark.skipif(not end_groups.THREADS.is_dir(), reason="only Linux says what a thread does")


class Busy:
    """A thread that computes without the interpreter until it is told to end, under a name of torch's for gloo's."""

    def __init__(self, name: str = "pt_gloo_runloop") -> None:
        self.name = name
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        (end_groups.THREADS / str(threading.get_native_id()) / "comm").write_text(self.name)
        while not self.over.is_set():
            hashlib.sha256(bytes(1 << 24)).digest()

    def __enter__(self) -> Busy:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


def test_a_thread_that_waits_is_at_rest() -> None:
    end = threading.Event()
    waiting = threading.Thread(target=end.wait)
    waiting.start()
    try:
        assert until_threads_rest(60.0)
    finally:
        end.set()
        waiting.join()


def test_a_thread_that_works_is_waited_for() -> None:
    with Busy() as busy:
        threading.Timer(0.3, busy.over.set).start()
        assert until_threads_rest(60.0)
        assert busy.over.is_set()


def test_a_thread_that_goes_on_working_is_not_waited_for_longer_than_asked() -> None:
    with Busy():
        began = time.monotonic()
        assert not until_threads_rest(0.2)
        assert 0.2 <= time.monotonic() - began < 30.0


def test_a_thread_of_the_script_is_not_waited_for() -> None:
    with Busy("prefetch") as busy:
        assert until_threads_rest(60.0)
        assert not busy.over.is_set()


def test_where_nothing_says_what_threads_do_a_while_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_groups, "THREADS", end_groups.THREADS / "none")
    began = time.monotonic()
    assert not until_threads_rest()
    assert time.monotonic() - began >= end_groups.ELSEWHERE_S


def test_a_group_ends_once_its_threads_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(end_groups, "until_threads_rest", lambda: ran.append(dist.is_initialized()))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    held = end_groups.end()
    assert (ran, len(held)) == ([False], 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    end_groups.disconnect(None)
    assert ran == [False, True], "after a failure before the end, which frees the group at once"
