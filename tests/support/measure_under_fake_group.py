"""Many cases under a fake process group: ``python -m tests.support.measure_under_fake_group FSDP2 12``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator

import torch.distributed as dist
from attrs import asdict
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.config import DDP, FSDP1, FSDP2, TensorParallel
from tests.support.drawn_models import Case, case, cut
from tests.support.measured_bytes import Row, measure

WORLDS = (3, 7, 8, 64, 512)
FAR = 4096
"""Wrapping takes torch half a second per model at this size, so that fewer seeds go there."""


ENGINES = {engine.__name__: engine for engine in (DDP, FSDP1, FSDP2)}


def cases(engine: type, seeds: int) -> Iterator[tuple[Case, int, int]]:
    """Case, world size and rank: every seed at every size, on the first, the middle and the last rank."""
    for seed in range(seeds):
        worlds = (*WORLDS, FAR) if seed % 6 == 0 else WORLDS
        for world in worlds:
            copies = 2 if world % 2 == 0 and seed % 3 == 1 and engine is not DDP else 1
            one = case(seed, engine, copies=copies, accumulation=1 + seed % 2 if engine is not DDP else 1)
            if one.optimizer == "Adagrad" and one.cfg.mesh:
                continue  # moves state while it is built, for which torch keeps the groups of the case before
            for rank in dict.fromkeys((0, world // 2, world - 1)):
                yield one, world, rank


def under_fake_group(one: Case, world: int, rank: int) -> list[Row]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        return measure(one, rank, world)
    finally:
        dist.destroy_process_group()


def cut_cases(which: int, seeds: int) -> Iterator[tuple[Case, int, int]]:
    """Layers that are cut, alone and under shards and copies; ``which`` is the first, the middle or the last rank."""
    for seed in range(seeds):
        alone, under = case(seed, TensorParallel), case(seed, FSDP2, accumulation=1 + seed % 2)
        laid = [(cut(alone, 2), 2), (cut(alone, 4), 4), (cut(under, 2), 6), (cut(under, 2, copies=2), 8)]
        laid += [(cut(under, 8, copies=4), 512)] if seed % 4 == 0 else []
        for one, world in laid:
            yield one, world, (0, world // 2, world - 1)[which]


def forked(seeds: int) -> None:
    """A process for each rank: torch keeps the groups of a mesh that it has seen."""
    for which in range(3):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            say(cut_cases(which, seeds))
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, "a rank failed; what it wrote to stderr says why"


def main(engine: str, seeds: int) -> None:
    if engine == TensorParallel.__name__:
        forked(seeds)
    else:
        say(cases(ENGINES[engine], seeds))


def say(found: Iterable[tuple[Case, int, int]]) -> None:
    """Every row as one line."""
    for one, world, rank in found:
        for row in under_fake_group(one, world, rank):
            print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
