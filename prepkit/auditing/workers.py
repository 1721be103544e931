"""Workers of a loader that draw, or give, the same."""

from __future__ import annotations

import copy
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch.utils.data import IterableDataset, get_worker_info

from prepkit.facts.window import WorkersAlike
from prepkit.observe.prepared.reading import digest_of, generators_kept

LONGEST = 5.0
"""Seconds to wait for what workers tell, or for a batch of a stream."""


@define
class Telling:
    """A ``worker_init_fn`` that runs the user's, and then writes down what the worker draws with."""

    folder: str
    plain: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        """Do both, in the worker of this number."""
        if self.plain is not None:
            self.plain(worker)
        info = get_worker_info()
        drawn = {"torch": _digest(torch.initial_seed()), "random": _digest(random.getstate())}
        if numpy := sys.modules.get("numpy"):
            drawn["numpy"] = _digest(numpy.random.get_state())
        if info is not None:
            drawn |= {f"dataset.{name}": state for name, (_, state) in own_generators(info.dataset).items()}
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        text = "\n".join(f"{name} {state}" for name, state in drawn.items())
        place = Path(self.folder) / f"{worker}"
        place.with_suffix(".part").write_text(text)
        place.with_suffix(".part").rename(place)


def own_generators(dataset: Any) -> dict[str, tuple[Any, str]]:
    """Generators among the attributes of a data set, by name, and a digest of the state of each."""
    found: dict[str, tuple[Any, str]] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, random.Random):
            found[name] = value, _digest(value.getstate())
        elif isinstance(value, torch.Generator):
            found[name] = value, _digest(value.get_state().tolist())
        elif type(value).__module__.startswith("numpy.random"):
            state = value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state()
            found[name] = value, _digest(state)
    return found


def _digest(state: Any) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()


def alike(readings: list[Any]) -> Iterator[WorkersAlike]:
    """Yield what is alike in workers of loaders that are being read; of a stream, its next batches are read."""
    for reading in readings:
        data, count = reading._dataset, reading._num_workers
        if count < 2:
            continue
        if isinstance(data, IterableDataset):
            what, sure, anew = "give the same samples" if _gives_alike(reading, count) else "", True, ""
        else:
            what, sure, anew = _draws_alike(_told(Path(reading._prepkit_told), count), data)
        if what:
            yield WorkersAlike(loader=type(data).__name__, workers=count, what=what, sure=sure, anew=anew)


def _told(folder: Path, count: int) -> list[dict[str, str]]:
    """Return what each worker has written; empty where one has not within the time."""
    until = time.monotonic() + LONGEST
    while len(done := [one for one in folder.glob("*") if not one.suffix]) < count and time.monotonic() < until:
        time.sleep(0.02)
    if len(done) < count:
        return []
    return [dict(line.split(" ", 1) for line in one.read_text().splitlines()) for one in done]


def _draws_alike(told: list[dict[str, str]], data: Any) -> tuple[str, bool, str]:
    """Return what they draw alike, whether that is sure, and what makes a generator of the data set anew in each."""
    same = {name for one, other in combinations(told, 2) for name in one if one[name] == other.get(name)}
    own = {name for name in same if name.startswith("dataset.")}
    if drawn := own & _drawn_from(data):
        anew = "; ".join(_anew(name, data) for name in sorted(drawn))
        return f"draw the same from `{min(drawn)}`, of which each has a copy", True, anew
    if same - own:
        draws = _draws(data)
        names = ", ".join(sorted(same - own))
        return ("", True, "") if draws is False else (f"have one seed, and draw the same ({names})", bool(draws), "")
    return "", True, ""


def _anew(name: str, data: Any) -> str:
    """Return the line of a ``worker_init_fn`` that gives a worker's copy another state."""
    at, kept = f"torch.utils.data.get_worker_info().{name}", getattr(data, name.removeprefix("dataset."))
    match kept:
        case torch.Generator():
            return f"{at}.manual_seed(torch.initial_seed())"
        case random.Random():
            return f"{at}.seed(torch.initial_seed())"
        case _ if hasattr(kept, "bit_generator"):
            return f"{at} = numpy.random.default_rng(torch.initial_seed())"
        case _:
            return f"{at}.seed(torch.initial_seed() % 2**32)"


def _drawn_from(data: Any) -> set[str]:
    """Own generators that move when a copy gives its first sample."""
    found = own_generators(data)
    mine = copy.copy(data)
    for name, (generator, _) in found.items():
        kept = copy.deepcopy(generator) if not isinstance(generator, torch.Generator) else generator.clone_state()
        setattr(mine, name, kept)
    with suppress(Exception), generators_kept():  # code of the user, which may not stand being asked
        mine[0]
    return {f"dataset.{name}" for name, (_, state) in own_generators(mine).items() if state != found[name][1]}


def _draws(data: Any) -> bool | None:
    """Return whether its first sample depends on the process's generators; None: nobody can tell."""
    try:
        seen = []
        for seed in (0, 1, 2):
            with generators_kept(seed=seed):
                seen.append(digest_of(data[0]))
    except Exception:  # code of the user, which may not stand being asked
        return None
    return len(set(seen)) > 1


def _gives_alike(reading: Any, count: int) -> bool:
    """Return whether workers give the same batch in one round, and others in the next."""
    before, reading._timeout = reading._timeout, LONGEST
    try:
        for _ in range(-reading._rcvd_idx % count):
            next(reading)
        rounds = [[digest_of(next(reading)) for _ in range(count)] for _ in range(2)]
    except Exception:  # the stream has ended, takes too long, or raises by itself
        return False
    finally:
        reading._timeout = before
    first, second = rounds
    return len(set(first)) < count and first != second
