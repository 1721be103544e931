"""A mutant in a running process, and the children that try it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import patch
from tests.mutants.mutant import Mutant
from tests.mutants.nursery import Ended, Nursery
from tests.mutants.operators import mutants

TEXT = "prepkit/codec/text.py"


def the(path: str, scope: str, old: str, new: str) -> Mutant:
    found = mutants(path, (patch.ROOT / path).read_bytes())
    return next(mutant for mutant in found if (mutant.scope, mutant.old, mutant.new) == (scope, old, new))


def child(act: Any, wall_s: float = 60.0) -> Any:
    nursery = Nursery()
    nursery.start("key", act, wall_s)
    while not (ended := nursery.ended()):
        wait(nursery.wires, nursery.patience_s)
    ((key, value),) = ended
    assert key == "key"
    assert not nursery.children
    return value


def test_a_function_is_mutated_for_those_who_imported_it_before() -> None:
    from prepkit.codec.text import inside

    def act(note: Any) -> Any:
        mutant = the(TEXT, "inside", "isinstance(key, str) and key.isidentifier()", "(key.isidentifier())")
        assert patch.put_in_place(mutant)
        try:
            return inside("$", 2)
        except AttributeError:
            return "mutated"

    assert child(act) == "mutated"
    assert inside("$", 2) == "$[2]"


def test_properties_and_cached_functions_are_found_behind_their_wrappers() -> None:
    import prepkit.codec.field_types
    from prepkit import interpreter

    clean = patch.function_at(sys.modules["prepkit.interpreter"], "Halted.clean")
    assert clean is interpreter.Halted.clean.fget
    assert patch.function_at(prepkit.codec.field_types, "no.such") is None
    names = [name for name, value in vars(prepkit.codec.field_types).items() if hasattr(value, "cache_clear")]
    assert names
    for name in names:
        assert patch.function_at(prepkit.codec.field_types, name).__name__ == name


def test_results_that_were_cached_before_the_mutant_are_forgotten() -> None:
    from prepkit.codec import field_types

    field_types.types()
    assert field_types.types.cache_info().currsize
    patch.forget_results()
    sizes = [value.cache_info().currsize for value in vars(field_types).values() if hasattr(value, "cache_info")]
    assert sizes
    assert set(sizes) == {0}


def test_a_module_is_imported_with_its_mutant() -> None:
    mutant = the(TEXT, "", "120", "121")

    def act(note: Any) -> Any:
        for name in [name for name in sys.modules if name.partition(".")[0] == "prepkit"]:
            del sys.modules[name]
        patch.hook(mutant)
        from prepkit.codec import text

        return text._WIDTH

    assert child(act) == 121


def test_a_module_that_is_imported_already_is_refused() -> None:
    import prepkit.codec.text  # noqa: F401

    with pytest.raises(RuntimeError, match="imported already"):
        patch.hook(the(TEXT, "", "120", "121"))


def test_a_child_that_raises_shows_its_traceback() -> None:
    ended = child(lambda note: 1 / 0)
    assert isinstance(ended, Ended)
    assert "ZeroDivisionError" in ended.how


def test_a_child_that_uses_up_its_cpu_seconds_is_ended_with_what_it_noted() -> None:
    def act(note: Any) -> Any:
        note("busy")
        signal.setitimer(signal.ITIMER_PROF, 0.1)
        while True:
            pass

    assert child(act) == Ended("SIGPROF", ("busy",))


def test_a_child_that_fills_the_memory_fails_before_the_machine_does() -> None:
    assert "MemoryError" in child(lambda note: bytearray(2**40)).how


def test_a_child_that_waits_for_ever_is_ended() -> None:
    assert child(lambda note: time.sleep(600), wall_s=0.5).how == "time-out"


def test_what_a_child_writes_and_starts_goes_with_it() -> None:
    def act(note: Any) -> Any:
        Path(tempfile.gettempdir(), "left").write_text("over")
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        return tempfile.gettempdir(), pid

    folder, pid = child(act)
    assert not Path(folder).exists()
    until = time.monotonic() + 10
    while time.monotonic() < until and _runs(pid):
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
