"""The harness that runs test functions in several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support import gang
from tests.support.fork_server import ROOT, ForkServers
from tests.support.gang import MOST_THREADS, Gang, GangError
from tests.support.gang_worker import COLLECTIVE_S, Died, Hung, Raised, Returned
from tests.support.patience import MOST, Patience


def add_up(rank: int, world: int, weight: float) -> tuple[int, int, float]:
    total = torch.full((), weight * (rank + 1))
    dist.all_reduce(total)
    return rank, world, total.item()


def launcher(rank: int, world: int) -> tuple[bool, str, float]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    return before, os.environ["LOCAL_RANK"], total.item()


def launched(rank: int, world: int) -> list[str]:
    return sorted({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys())


def fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def fail_everywhere(rank: int, world: int) -> None:
    raise ValueError(f"rank {rank} as well")


def hang_in_collective(rank: int, world: int) -> str:
    if rank == 0:
        dist.all_reduce(torch.ones(()))
    return "away"


def abort(rank: int, world: int) -> None:
    if rank == 0:
        os.write(2, b"terminate called: the reason\n")
        os.abort()


def die(rank: int, world: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def unpicklable(rank: int, world: int) -> object:
    return lambda: rank


def last_words(rank: int, world: int) -> float:
    """A broadcast whose sender has nothing left to do: it must not tear the group down under the receiver."""
    if rank:
        time.sleep(0.3)
    data = torch.full((1 << 20,), float(rank))
    dist.broadcast(data, 0)
    return data.sum().item()


def test_every_rank_runs_the_function_with_the_group_up(gang2: Gang) -> None:
    assert gang2.run(add_up, 10.0) == [(0, 2, 30.0), (1, 2, 30.0)]


def test_four_ranks_run_too(gang4: Gang) -> None:
    assert [total for _, _, total in gang4.run(add_up, 1.0)] == [10.0] * 4


def test_runs_share_the_workers_but_not_the_group(gang2: Gang) -> None:
    gang2.run(add_up, 1.0)
    before = gang2.starts
    for _ in range(5):
        assert gang2.run(last_words) == [0.0, 0.0]
    assert gang2.starts == before


def test_a_fresh_run_has_a_launcher_s_environment_and_no_group(gang2: Gang) -> None:
    assert gang2.run_fresh(launcher) == [(False, "0", 2.0), (False, "1", 2.0)]
    assert gang2.run(launched) == [[], []], "the next run is not launched"


def hash_of(rank: int, world: int) -> int:
    return hash("a name that a set might hold")


def test_ranks_next_to_each_other_iterate_over_sets_in_orders_of_their_own(gang2: Gang, gang4: Gang) -> None:
    one, other = gang2.run(hash_of)
    assert one != other
    assert gang4.run(hash_of) == [one, other, one, other]


def test_closed_gangs_leave_no_process_and_no_folder_and_keep_it_until_then() -> None:
    servers = ForkServers(imports=("torch.distributed",))
    gang = Gang(2, servers)
    gang.run(hash_of)
    processes = [psutil.Process(server.process.pid) for server in servers.servers]
    workers = [child for process in processes for child in process.children()]
    assert len(workers) == 2
    assert [path.name for path in Path(gang.meetings.name).iterdir()] == ["1"]
    gang.close()
    assert not Path(gang.meetings.name).exists()
    servers.close()
    assert not any(process.is_running() for process in (*workers, *processes))


@pytest.fixture
def hurt(gang2: Gang) -> Iterator[Gang]:
    """The common gang, with new workers, proven to work again after the test has done it harm."""
    gang2.close()
    yield gang2
    assert gang2.run(add_up, 1.0)[1][2] == 3.0


def test_one_rank_s_exception_stops_the_others_within_seconds(hurt: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    hurt.run(add_up, 1.0)
    monkeypatch.setattr(gang, "GRACE_S", 2.0)  # a moment of load may multiply it, up to eight times
    began = time.monotonic()
    told = r"(?s)rank 0 did not return.*barrier.*rank 1 raised.*ValueError: only here"
    with pytest.raises(GangError, match=told) as e:
        hurt.run(fail_on_one, timeout=60)
    assert time.monotonic() - began < COLLECTIVE_S  # the other's own time-out
    assert [type(outcome) for outcome in e.value.outcomes] in ([Hung, Raised], [Raised, Raised])


def test_exceptions_on_every_rank_are_all_told_and_the_workers_stay(hurt: Gang) -> None:
    hurt.run(add_up, 1.0)
    before = hurt.starts
    with pytest.raises(GangError, match=r"(?s)rank 0 as well.*rank 1 as well"):
        hurt.run(fail_everywhere)
    hurt.run(add_up, 1.0)
    assert hurt.starts == before


def leave_threads(rank: int, world: int) -> None:
    for _ in range(MOST_THREADS):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def test_workers_that_a_task_leaves_full_of_threads_are_forked_anew(hurt: Gang) -> None:
    hurt.run(add_up, 1.0)
    before = hurt.starts
    hurt.run(leave_threads)
    hurt.run(add_up, 1.0)
    assert hurt.starts == before + 1


def test_a_hang_shows_the_stacks_and_the_gang_starts_afresh(hurt: Gang) -> None:
    hurt.run(add_up, 1.0)
    before, began = hurt.starts, time.monotonic()
    told = r"(?s)rank 0 did not return within \d+ s.*in all_reduce.*in hang_in_collective"
    with pytest.raises(GangError, match=told) as e:
        hurt.run(hang_in_collective, timeout=2)
    assert time.monotonic() - began < COLLECTIVE_S
    assert e.value.outcomes[1] == Returned("away")
    hurt.run(add_up, 1.0)
    assert hurt.starts == before + 1


def test_a_worker_that_aborts_is_shown_with_what_it_wrote_before_and_with_its_stacks(hurt: Gang) -> None:
    with pytest.raises(GangError, match=r"terminate called: the reason(?s:.*)Fatal Python error(?s:.*) in abort") as e:
        hurt.run(abort)
    assert "Extension modules" not in str(e.value)


def test_a_death_is_told_with_its_exit_code(hurt: Gang) -> None:
    with pytest.raises(GangError, match="rank 0 died with exit code -9") as e:
        hurt.run(die)
    assert isinstance(e.value.outcomes[0], Died)


def test_a_result_that_cannot_travel_is_an_error_of_its_rank(hurt: Gang) -> None:
    with pytest.raises(GangError, match="the result cannot be pickled"):
        hurt.run(unpicklable)


ABANDON = """
import os, signal
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang
from tests.support.test_gang import add_up, stay
gang = Gang(2, ForkServers(imports=("torch.distributed",)))
gang.run(add_up, 1.0)
servers = (server.process for server in gang.servers.servers)
print(*(process.pid for process in (*servers, *(worker.process for worker in gang.workers))), flush=True)
import threading
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
gang.run(stay)
"""


def stay(rank: int, world: int) -> None:
    time.sleep(600)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see whether a process is alive")
def test_workers_busy_or_not_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = [sys.executable, "-c", ABANDON]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # who is killed tidies nothing up
    parent = subprocess.run(
        script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60 * MOST, check=False
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 4
    patience = Patience(10)
    while any(map(alive, pids)) and patience.left() > 0:
        time.sleep(0.1)
    assert not any(map(alive, pids))
