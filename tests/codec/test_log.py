"""The log of what was applied: whatever is done to a line of it is found, with the line."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from prepkit.codec import log
from prepkit.codec.log import append, check_end, read
from prepkit.codec.text import canonical, digest_text
from prepkit.config import AdamW, Config
from prepkit.findings import PlanRejected
from prepkit.plan.attestation import Attestation
from tests.plan.test_attestation import TORN
from tests.support.command_line import run
from tests.support.sample_plan import sample_plan

HELD = Attestation(plan="sha256:12")
RATES = (1e-3, 1e-3, 2e-3, 1e-3, 1e-3)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of five plans, of which the third has another rate, and the last did not hold."""
    monkeypatch.chdir(tmp_path)
    for number, rate in enumerate(RATES):
        plan = evolve(sample_plan(), config=Config(optimizer=AdamW(lr=rate)))
        append(
            "runs.log", plan, evolve(HELD, asked=(TORN,)) if number == 4 else HELD, f"2026-11-0{number + 1}T00:00:00Z"
        )
    return tmp_path / "runs.log"


def torn(file: Path) -> tuple[int, str]:
    """How many lines hold, and what is said of the next; no line is believed that was not read."""
    held = 0
    try:
        for held, _ in enumerate(read(file), 1):  # noqa: B007  # counted
            pass
    except PlanRejected as refused:
        (finding,) = refused.findings
        assert finding.rule == "log.torn"
        return held, finding.where.rpartition(":")[2]
    return held, ""


def test_a_whole_log_is_read_as_it_was_written(file: Path) -> None:
    entries = list(read(file))
    assert [one.said["optimizer"]["lr"] for one in entries] == list(RATES)
    assert [one.holds for one in entries] == [True] * 4 + [False]
    assert entries[2].at == "2026-11-03T00:00:00Z"
    assert [one.line for one in entries] == [1, 2, 3, 4, 5]
    assert len({one.digest for one in entries}) == 5


def test_every_way_to_tear_it_is_found_at_its_line(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    ways = {
        "changed": ([*lines[:2], lines[2].replace(b"0.002", b"0.003"), *lines[3:]], (2, "3")),
        "left out": ([*lines[:2], *lines[3:]], (2, "3")),
        "first left out": (lines[1:], (0, "1")),
        "moved": ([lines[0], lines[2], lines[1], *lines[3:]], (1, "2")),
        "twice": ([*lines, lines[4]], (5, "6")),
        "cut in half": ([*lines[:4], lines[4][:100]], (4, "5")),
        "joined": ([lines[0].rstrip() + b" " + lines[1], *lines[2:]], (0, "1")),
        "no text": ([lines[0], b"\xff\n"], (1, "2")),
        "empty line": ([lines[0], b"\n", *lines[1:]], (1, "2")),
        "another's": ([lines[0], b'{"a": 1}\n'], (1, "2")),
        "deep": ([lines[0], b"[" * 100_000 + b"\n"], (1, "2")),
        "long": ([lines[0], b'"' + b"x" * log.LONGEST + b'"\n'], (1, "2")),
    }
    for how, (bent, expected) in ways.items():
        file.write_bytes(b"".join(bent))
        assert torn(file) == expected, how
        if how not in ("changed", "left out", "first left out", "moved", "joined", "empty line"):  # its end is torn
            before = file.read_bytes()
            if how != "twice":
                with pytest.raises(PlanRejected, match=r"log\.torn"):
                    append(file, sample_plan(), HELD, "2026")
                assert file.read_bytes() == before


def test_a_line_that_is_no_json_is_told_by_its_own_number_alone(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], lines[3][:50] + b"\n", lines[4]]))
    with pytest.raises(PlanRejected) as refused:
        list(read(file))
    (found,) = refused.value.findings
    assert found.where.endswith(":4")
    assert found.what.startswith("not JSON at column ")
    assert "line" not in found.what


def test_a_line_that_was_sealed_anew_breaks_the_next_one(file: Path) -> None:
    lines = file.read_text().splitlines()
    data = json.loads(lines[2])
    del data["digest"]
    data["holds"] = False
    lines[2] = canonical(data | {"digest": digest_text(canonical(data))})
    file.write_text("\n".join((*lines, "")))
    assert torn(file) == (3, "4")


def test_one_flipped_byte_anywhere_is_found(file: Path) -> None:
    whole, draw = file.read_bytes(), random.Random(0)
    for _ in range(200):
        at, by = draw.randrange(len(whole)), draw.randrange(1, 256)
        file.write_bytes(whole[:at] + bytes((whole[at] ^ by,)) + whole[at + 1 :])
        held, where = torn(file)
        assert where, at
        assert held <= whole[:at].count(b"\n")


@pytest.mark.parametrize("value", [None, 7, [], {}, "x", True, 1e308, 2**70])
def test_a_line_of_the_right_digest_and_wrong_types_is_refused(file: Path, value: Any) -> None:
    first = json.loads(file.read_text().splitlines()[0])
    for key in first.keys() - {"digest"}:
        data = {name: part for name, part in first.items() if name != "digest"} | {key: value}
        file.write_text(canonical(data | {"digest": digest_text(canonical(data))}) + "\n")
        refused = torn(file) == (0, "1")
        assert refused or type(value) is type(first[key])
        assert run("log", str(file)).exit_code == (1 if refused else 0)


def test_lines_that_were_cut_off_at_the_end_are_found_by_a_digest_that_was_kept(file: Path) -> None:
    last = json.loads(run("log", "runs.log", "--json").stdout)["last"]
    assert run("log", "runs.log", "--has", last).exit_code == 0
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:4]))
    assert run("log", "runs.log").exit_code == 0
    done = run("log", "runs.log", "--has", last)
    assert (done.exit_code, "log.cut" in done.stderr) == (1, True)


def test_a_part_of_a_digest_is_used_wrongly_and_the_whole_one_is_told(file: Path) -> None:
    second = json.loads(run("log", "runs.log", "--json").stdout)["entries"][1]["digest"]
    for part in (second[:19], second.removeprefix("sha256:")[:12]):
        done = run("log", "runs.log", "--has", part)
        assert (done.exit_code, "cut" in done.stderr) == (2, False)
        assert f"that of line 2 begins so: {second}" in done.stderr
    assert "that of the last line is: sha256:" in run("log", "runs.log", "--has", "zz").stderr


@pytest.mark.parametrize(("old", "new"), [(b"\n", b"\r\n"), (b'{"', b'{ "'), (b",", b", "), (b"\n", b" \n")])
def test_a_line_whose_values_are_whole_is_torn_where_a_byte_between_them_is_another(
    file: Path, old: bytes, new: bytes
) -> None:
    first, *others = file.read_bytes().splitlines(keepends=True)
    second = others[0].replace(old, new, 1)
    file.write_bytes(b"".join((first, second, *others[1:])))
    done = run("log", "runs.log")
    assert done.exit_code == 1
    assert "log.torn at runs.log:2" in done.stderr


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", "/dev/zero", tmp_path / "no" / "log", "a\0b"):
        for call in (lambda place=place: list(read(place)), lambda place=place: check_end(place)):
            with pytest.raises(PlanRejected, match=r"log\.unreadable"):
                call()


def test_a_log_that_is_too_large_is_neither_read_nor_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = file.stat().st_size
    monkeypatch.setattr(log, "LARGEST", size)
    assert torn(file) == (5, "")
    with pytest.raises(PlanRejected, match=r"log\.unreadable.*begin another"):
        append(file, sample_plan(), HELD, "2026")
    assert file.stat().st_size == size
    monkeypatch.setattr(log, "LARGEST", size - 1)
    with pytest.raises(PlanRejected, match=r"log\.unreadable.*more than"):
        list(read(file))
    done = run("log", "runs.log")
    assert (done.exit_code, "log.unreadable" in done.stderr) == (1, True)


def _append(file: str, number: int) -> None:
    for _ in range(10):
        append(file, sample_plan(), HELD, f"{number}")


def test_processes_that_append_at_once_wait_for_each_other_and_leave_one_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    file = tmp_path / "runs.log"
    workers = [context.Process(target=_append, args=(str(file), number)) for number in range(4)]
    with file.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for worker in workers:
            worker.start()
        time.sleep(1)
        assert all(worker.is_alive() for worker in workers)
        assert file.stat().st_size == 0
        fcntl.flock(held, fcntl.LOCK_UN)  # closing would not do: the workers have this file open as well
    for worker in workers:
        worker.join(60)
    assert torn(file) == (40, "")


def test_the_command_shows_what_holds_and_ends_with_1_where_it_is_torn(file: Path) -> None:
    done = run("log", "runs.log")
    lines = done.stdout.splitlines()
    assert (done.exit_code, len(lines)) == (0, 6)
    digests = [one["digest"] for one in json.loads(run("log", "runs.log", "--json").stdout)["entries"]]
    assert lines[0].startswith(f"1  {digests[0].removeprefix('sha256:')[:12]}  2026-11-01T00:00:00Z  ")
    assert lines[4].endswith("does not hold")
    assert lines[5].startswith("5 whole; the last is sha256:")
    file.write_bytes(file.read_bytes().replace(b"0.002", b"0.003"))
    done = run("log", "runs.log")
    assert (done.exit_code, len(done.stdout.splitlines())) == (1, 2)
    assert "log.torn at runs.log:3" in done.stderr
    assert run("blame", "runs.log", "optimizer.lr").exit_code == 1


def test_blame_names_the_plan_that_first_had_the_value_of_today(file: Path) -> None:
    done = run("blame", "runs.log", "optimizer.lr")
    plans = [one.plan.removeprefix("sha256:")[:12] for one in read(file)]
    assert done.stdout.splitlines() == [
        f"optimizer.lr = 0.001  since 2026-11-04T00:00:00Z, plan {plans[3]} (runs.log:4)",
        f"0.002  since 2026-11-03T00:00:00Z, plan {plans[2]} (runs.log:3)",
        f"0.001  since 2026-11-01T00:00:00Z, plan {plans[0]} (runs.log:1)",
    ]
    told = json.loads(run("blame", "runs.log", "config.optimizer.betas.1", "--json").stdout)
    assert [(one["line"], one["value"]) for one in told["values"]] == [(1, 0.999)]
    assert run("blame", "runs.log", "env.world_size").exit_code == 0
    wrong = run("blame", "runs.log", "optimizer.lrr")
    assert (wrong.exit_code, "did you mean 'optimizer.lr'?" in wrong.stderr) == (2, True)
    (file.parent / "empty.log").write_text("")
    assert run("blame", "empty.log", "optimizer.lr").exit_code == 2
    assert run("log", "empty.log").stdout == "nothing was written yet\n"
