"""Errors that show while a script runs are found by name, and in loops of unusual shape nothing is above a note."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.audit.loops import Loop, heard
from tests.audit.wrong_loops import LOOPS, WRONG
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang
from tests.support.launch import launched

Heard = dict[str, list[tuple[str, str, str]]]


def all_heard(rank: int, world: int, names: list[str], folder: str = ".") -> Heard:
    """What an audit says of each, one after the other."""
    os.chdir(folder)
    found = {}
    for loop in LOOPS:
        if loop.id in names:
            gc.collect()
            torch._dynamo.reset()
            torch._dynamo.utils.guard_failures.clear()
            with launched(rank, world):
                found[loop.id] = heard(loop, rank, world)
    return found


def test_no_two_loops_have_one_name() -> None:
    assert len({loop.id for loop in LOOPS}) == len(LOOPS)


@pytest.fixture(scope="module")
def pair(gang2: Gang) -> list[Heard]:
    """What both ranks hear of each loop of two ranks."""
    pytest.importorskip("deepspeed")
    return gang2.run(all_heard, [one.id for one in LOOPS if one.ranks == 2], timeout=120.0)


@pytest.fixture(scope="module")
def alone(fork_servers: ForkServers) -> Iterator[Gang]:
    """A process in which no other test has left a model that an audit would find."""
    gang = Gang(1, fork_servers)
    yield gang
    gang.close()


@pytest.mark.parametrize("loop", [one for one in LOOPS if one.ranks == 1 and not one.rule], ids=lambda one: one.id)
def test_a_right_loop_has_no_finding_above_a_note(alone: Gang, loop: Loop, tmp_path: Path) -> None:
    pytest.importorskip(loop.library)
    (found,) = alone.run_fresh(all_heard, [loop.id], str(tmp_path))[0].values()
    assert [text for _, severity, text in found if severity != "note"] == []


@pytest.mark.parametrize("name", [one.id for one in LOOPS if one.ranks == 2 and not one.rule])
def test_a_right_loop_of_two_ranks_has_no_finding_above_a_note(pair: list[Heard], name: str) -> None:
    for found in pair:
        assert [text for _, severity, text in found[name] if severity != "note"] == []


@pytest.mark.parametrize("loop", [one for one in WRONG if one.ranks == 2], ids=lambda one: one.id)
def test_an_error_of_a_loop_of_two_ranks_is_found_by_its_rule(pair: list[Heard], loop: Loop) -> None:
    for found in pair:
        assert loop.rule in {rule for rule, _, _ in found[loop.id]}, found[loop.id]


@pytest.mark.parametrize("loop", [one for one in WRONG if one.ranks == 1], ids=lambda one: one.id)
def test_an_error_of_a_loop_is_found_by_its_rule(alone: Gang, loop: Loop, tmp_path: Path) -> None:
    pytest.importorskip(loop.library)
    (found,) = alone.run_fresh(all_heard, [loop.id], str(tmp_path))[0].values()
    assert loop.rule in {rule for rule, _, _ in found}, found


def test_gradients_that_a_backward_has_yet_to_make_are_not_missed(alone: Gang, tmp_path: Path) -> None:
    (found,) = alone.run_fresh(all_heard, ["step_in_the_backward"], str(tmp_path))[0].values()
    assert "run.left-out" not in {rule for rule, _, _ in found}, found
