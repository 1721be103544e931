"""Who has ended is seen from signs that every rank leaves, and named where the connection to it was lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, but not in __all__

import prepkit as pk
from prepkit import config as c
from prepkit.applying.step_kinds import KINDS
from prepkit.facts import Env
from prepkit.interpreter import Handler
from prepkit.ranks import peers
from prepkit.ranks.all_or_none import RankGuard
from prepkit.ranks.peers import Peers, RankFailed, Sign, has_ended, lost_connection, named, own_sign
from prepkit.ranks.together import rank_guard
from prepkit.ranks.within import NoAnswer, PatientStore, within
from prepkit.steps import ShardLoader, Step, WrapDDP
from tests.ranks.test_all_or_none import SOON_S, Heard, heard
from tests.support.fragile_model import TOKENS, Tiny
from tests.support.gang import Gang, GangError
from tests.support.handled import handled_by

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are not seen")


@linux
def test_a_process_that_was_killed_has_ended_also_before_its_parent_looks_and_no_other_takes_its_number() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert other.stdout is not None
    other.stdout.readline()
    here = own_sign()
    theirs = Sign(place=here.place, pid=other.pid, started=peers._stat(other.pid)[1])
    assert not has_ended(theirs, here)
    assert has_ended(evolve(theirs, started="1"), here), "the number belongs to another process by now"
    assert not has_ended(evolve(theirs, place="elsewhere", started="1"), here), "nobody sees another machine"
    other.kill()
    while peers._stat(other.pid)[0] != "Z":
        time.sleep(0.01)
    assert has_ended(theirs, here)
    other.wait()
    other.stdout.close()
    assert has_ended(theirs, here)
    assert not has_ended(here, here)


def test_a_rank_elsewhere_that_no_longer_beats_is_named_and_one_that_beats_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = PatientStore(HashStore(), 5.0)
    mine, theirs = Peers(store, 0, 2), Peers(store, 1, 2)
    theirs.here = evolve(theirs.here, place="elsewhere")
    theirs.sign()
    now = [100.0]
    monkeypatch.setattr(peers.time, "monotonic", lambda: now[0])
    assert list(mine.ended([0, 1])) == [], "it has not begun to beat"
    for beat in range(20):
        store.set("beat/1", str(beat))
        assert list(mine.ended([1])) == []
        now[0] += 25
    now[0] += 6
    ((rank, how),) = mine.ended([1])
    assert rank == 1
    assert how.startswith("it has given no sign of life for 31 s")
    mine.settle()
    assert list(mine.ended([1])) == [], "the apply is over, and nobody beats"


def test_a_guard_beats_while_its_apply_goes_on_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BEAT_S", 0.01)
    guard = RankGuard(store=HashStore(), rank=0, world=1, timeout_s=5.0)

    def beats() -> int:
        return int(guard.keys.get("beat/0")) if guard.keys.check(["beat/0"]) else 0

    until = time.monotonic() + 20
    while beats() < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert beats() >= 3
    guard.report_success()
    time.sleep(0.1)
    seen = beats()
    time.sleep(0.1)
    assert beats() == seen
    later = Peers(guard.keys, 1, 2)
    later.here = evolve(later.here, place="elsewhere")
    later.sign()
    guard.keys.set("beat/1", "1")
    assert list(guard.peers.ended([1])) == []
    monkeypatch.setattr(peers, "SILENT_S", 0.05)
    time.sleep(0.1)
    assert list(guard.peers.ended([1])) == [], "who no longer beats is not taken for dead"


def test_an_answer_that_does_not_come_is_waited_for_once_and_no_longer_than_the_limit() -> None:
    class Stopped:
        asked = 0

        def check(self, _: list[str]) -> bool:
            self.asked += 1
            time.sleep(60)
            return True

    stopped: Any = Stopped()
    store = PatientStore(stopped, 0.2)
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(NoAnswer):
            store.check(["key"])
    assert time.monotonic() - began < SOON_S
    assert stopped.asked == 1
    assert within(5.0, lambda: 3, "three") == 3
    with pytest.raises(KeyError):
        within(5.0, lambda: {}["there is none"], "nothing")


def test_only_what_a_backend_says_of_a_connection_is_a_lost_rank() -> None:
    assert lost_connection(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"))
    assert not lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_connection(ValueError("Connection closed by peer"))
    alone = Peers(PatientStore(HashStore(), 5.0), 0, 1)
    with pytest.raises(RuntimeError, match=r"^mat1") as raised, named(alone):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(raised.value, RankFailed)


# --- killed ranks ----------------------------------------------------------------------------------------------------


def killing(kind: type[Step], *, met: bool) -> Handler[Any, Any, Any]:
    """The handler of a step in which the process is killed, before it meets the others or after."""

    def do(step: Any, target: Any) -> None:
        del step
        if met:
            target.together()
        os.kill(os.getpid(), signal.SIGKILL)

    return evolve(KINDS[kind].handler, do=do)


def loses_one(rank: int, world: int, when: str, folder: str) -> None:
    """Rank 2 is killed; the others write what they hear, in apply or in training, and end as a script does."""
    cfg = c.Config(engine=c.DDP(), optimizer=c.AdamW(), timeout_s=60.0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8.0)), batch_size=2)
    plan = pk.build_plan(cfg, Tiny(), env=Env(world_size=world), loaders=[loader])
    kind: type[Step] = {"between meetings": ShardLoader}.get(when, WrapDDP)
    ready = pk.apply(plan) if when == "training" else None

    def act() -> None:
        if ready is None:
            with handled_by(kind, killing(kind, met=when == "inside a collective")) if rank == 2 else nullcontext():
                pk.apply(plan)
            return
        for number in range(2):
            if (rank, number) == (2, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            with ready.accumulate():  # around the forward, in which a rank may be missed first
                ready.backward(ready.model(TOKENS).float().square().mean())
                ready.step()

    found = heard(act)
    (Path(folder) / str(rank)).write_text(json.dumps(found), encoding="utf-8")
    os.kill(
        os.getpid(), signal.SIGKILL
    )  # those that wait for this rank hear that it has gone; it is not the one to be named


@linux
@pytest.mark.parametrize("when", ["between meetings", "inside a collective", "training"])
def test_of_four_ranks_every_one_names_the_rank_that_was_killed_within_seconds(
    gang4: Gang, when: str, tmp_path: Path
) -> None:
    with pytest.raises(GangError):
        gang4.run_fresh(loses_one, when, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "3"]
    for path in tmp_path.iterdir():
        kind, text, seconds = json.loads(path.read_text(encoding="utf-8"))
        assert kind == ("RankFailed" if when == "training" else "ApplyHalted"), text
        assert re.search(r"rank 2 of 4 (failed|was lost): its process \d+ has ended; its log says why", text) or (
            when == "training" and re.search(r"ranks [\d, ]*2[\d, ]* of 4 were lost", text)
        ), text
        assert seconds < SOON_S


def stops(rank: int, world: int, note: str) -> Heard:
    """Rank 0, which serves the store, is stopped while rank 1 waits; afterwards it goes on."""
    guard = rank_guard(2.0)
    assert guard is not None
    other = Path(f"{note} of the other's guard")
    if rank == 0:
        while not other.exists():
            time.sleep(0.01)
        Path(note).write_text(str(os.getpid()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGSTOP)
        return "", "", 0.0
    other.touch()
    while not (Path(note).exists() and peers._stat(int(Path(note).read_text(encoding="utf-8") or "0"))[0] == "T"):
        time.sleep(0.01)
    found = heard(guard.barrier)
    os.kill(int(Path(note).read_text(encoding="utf-8")), signal.SIGCONT)
    return found


@linux
def test_a_stopped_process_that_serves_the_store_is_waited_for_no_longer_than_the_plan_says(
    gang2: Gang, tmp_path: Path
) -> None:
    kind, text, seconds = gang2.run_fresh(stops, str(tmp_path / "pid"))[1]
    assert kind == "RankFailed"
    assert "the process that serves it, often rank 0, has ended or stopped" in text
    assert 1.5 < seconds < SOON_S


def limits(rank: int, world: int) -> tuple[list[float], float]:
    """Time-outs of the groups of a two-dimensional mesh, and how long a collective on one waits for a rank."""
    cfg = c.Config(engine=c.FSDP2(), mesh=pk.Mesh(replicate=2, shard=2), timeout_s=4.0)
    ready = pk.apply(pk.build_plan(cfg, Tiny(), env=Env(world_size=world)))
    mesh = next(ready.model.parameters()).device_mesh  # type: ignore[attr-defined]  # of a DTensor
    groups: list[Any] = [mesh[axis].get_group() for axis in mesh.mesh_dim_names]
    kept = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=groups[1])
    waited = time.monotonic() - began
    return kept, waited


def test_a_two_dimensional_mesh_keeps_the_time_out_of_the_plan(gang4: Gang) -> None:
    found = gang4.run_fresh(limits)
    assert all(kept == [4.0, 4.0] for kept, _ in found)
    assert found[0][1] < SOON_S


LEAVES = """
import sys
import torch
import prepkit as pk
ready = pk.apply(pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=pk.optim.AdamW()), torch.nn.Linear(2, 2)))
assert ready.ranks.reduce(1.0) == 1.0
if sys.argv[1] == "1":
    raise ValueError("no such batch")
try:
    ready.ranks.reduce(1.0)
except pk.errors.RankFailed as failed:
    print(failed.rank, failed)
"""


@linux
def test_a_rank_that_raises_is_named_with_what_it_raised_and_called_last() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, rank],
            env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        (heard_by_zero, errors), (_, raised) = (process.communicate(timeout=60) for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    assert raised.rstrip().endswith("ValueError: no such batch"), raised
    assert heard_by_zero.startswith("1 rank 1 of 2"), (heard_by_zero, errors)
    words = (
        "it raised ValueError: no such batch; the last call of its run was ready.ranks.reduce(), before ready.close()"
    )
    assert f"({words})" in heard_by_zero


def test_ranks_that_wait_for_each_other_in_vain_say_what_each_called_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOOK_S", 0.0)
    store = PatientStore(HashStore(), 5.0)
    ranks = [Peers(store, rank, 4) for rank in range(4)]
    for rank, call in zip(ranks, ("ready.save()", "ready.step()", "", "ready.step()"), strict=True):
        rank.last_call = call
    said = [str(rank.lost(RuntimeError("gloo: timed out"))) for rank in ranks]
    assert "let every rank make the same calls. Their last calls were: rank 0 in ready.save(). torch" in said[0]
    assert "Their last calls were: rank 0 in ready.save(); ranks 1, 3 in ready.step(). torch says: gloo" in said[3]
    for rank in ranks:
        rank.last_call = "ready.backward()"
    alike = [str(rank.lost(RuntimeError("gloo: timed out"))) for rank in ranks][-1]
    assert "ranks 0, 1, 2, 3 in ready.backward(), where each may have run other layers: run the same on all" in alike
    with named(ranks[2], "ready.evaluating()"):
        assert ranks[2].last_call == "ready.evaluating()"


ABORTS = """
import os
from torch.distributed import HashStore
from prepkit.ranks.peers import Peers
from prepkit.ranks.within import PatientStore

def saves_alone():
    os.abort()

Peers(PatientStore(HashStore(), 5.0), 0, 2).report_end()
saves_alone()
"""


def test_a_rank_that_gloo_aborts_leaves_the_line_that_it_was_at_in_its_log(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ABORTS)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGABRT
    assert f'File "{script}", line 8 in saves_alone' in ended.stderr
