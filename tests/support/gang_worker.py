"""The far end of the gang: what runs inside each worker process, and what can become of a rank."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from attrs import frozen

from tests.support.patience import slowdown

COLLECTIVE_S = 60.0
"""Time-out of the process group, on an idle machine."""


@frozen
class Returned:
    """The rank's function came back with this value."""

    value: Any


@frozen
class Raised:
    """The rank's function raised."""

    traceback: str


@frozen
class Died:
    """The rank's process ended."""

    code: int | None
    log: str


@frozen
class Hung:
    """The rank did not come back in time."""

    waited_s: float
    stacks: str


Outcome = Returned | Raised | Died | Hung


def work(rank: int, world: int, descriptor: int) -> None:
    """Main function of a worker, after the fork: runs tasks until the wire or stdin ends."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    wire = Connection(descriptor)
    modules = len(sys.modules)
    with suppress(EOFError, ConnectionError):
        _report(wire, Returned("ready"))
        while True:
            path, task = wire.recv()
            sys.path.extend(entry for entry in path if entry not in sys.path)
            _report(wire, _attempt(rank, world, task))
            del task
            wire.recv()  # a rank that tears its group down early would break the others' last collective
            _tidy()
            if len(sys.modules) > modules:  # looking through what was imported takes a third of a second each time
                modules = len(sys.modules)
                gc.freeze()


RETIRED: deque[list[Any]] = deque(maxlen=2)
"""The groups of the last two tasks. A thread of gloo may still hold the last work of a group when the main thread has
its result; were it also the last to hold the group, it would have to join itself, and the process aborts."""


def _retire(world: Any) -> None:
    RETIRED.append(list(world.pg_map))


def _die_with_parent() -> None:
    while os.read(0, 1):  # the server's stdin, whose other end our parent alone holds
        pass
    os._exit(1)


def _attempt(rank: int, world: int, task: bytes) -> Outcome:
    import torch

    try:
        function, args, meeting, grouped = pickle.loads(task)
        random.seed(0)
        torch.manual_seed(0)
        if grouped:
            store = torch.distributed.FileStore(meeting, world)  # type: ignore[attr-defined]  # exported, but not in __all__
            limit = timedelta(seconds=COLLECTIVE_S * slowdown())
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        else:
            os.environ.update(_launched(rank, world, meeting))
        return Returned(function(rank, world, *args))
    except BaseException:
        return Raised(traceback.format_exc())
    finally:
        if "deepspeed" in sys.modules:  # a run of ZeRO-3 that nobody closed leaves its own linear to the next one
            from prepkit.objects.deepspeed import give_back_linear

            give_back_linear()


def _launched(rank: int, world: int, port: str) -> dict[str, str]:
    """What torchrun would set."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _report(wire: Connection, outcome: Outcome) -> None:
    try:
        data = pickle.dumps(outcome)
    except Exception:
        data = pickle.dumps(Raised(f"the result cannot be pickled:\n{traceback.format_exc()}"))
    wire.send_bytes(data)


def _tidy() -> None:
    import torch

    from prepkit.ranks import end_groups
    from prepkit.ranks.end_groups import until_threads_rest

    until_threads_rest()
    gc.collect()  # a wrapper that outlives its group frees it at a moment nobody chose
    if torch.distributed.is_initialized():
        _retire(torch.distributed.distributed_c10d._world)
        torch.distributed.destroy_process_group()
        end_groups.forget_meshes()
    for name in _launched(0, 1, ""):
        os.environ.pop(name, None)
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
