"""Runs every optimizer under every engine, and says which do not train there as they do alone.

``python -m tests.tools.optimizers`` takes some minutes on two cores, and ends with 1 where the outcome is not that of
``prepkit/resolve/optimizer_table.py``. Words after it choose classes: ``python -m tests.tools.optimizers torch.Muon``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec

from prepkit.resolve.optimizer_table import DTENSORS, FAILS, RAISES
from tests.support.deepspeed_cpu import own_extensions
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang, GangError
from tests.support.optimizer_runs import CLASSES, DTYPES, ENGINES, alone, together, verdict


def pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Library and class of everything that is installed and asked for."""
    for library, classes in CLASSES.items():
        if find_spec(library.partition(".")[0]):
            for name in classes:
                if not words or f"{library.partition('.')[0]}.{name}" in words:
                    yield library, name


def measured(words: list[str], say: Callable[[str], None]) -> dict[str, dict[str, str]]:
    """Class to the engines under which it does not train as alone, and what happens there."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    own_extensions()
    table: dict[str, dict[str, str]] = {}
    with closing(ForkServers()) as servers, closing(Gang(2, servers)) as gang:
        for library, name in pairs(words):
            key = f"{library.partition('.')[0]}.{name}"
            table[key] = {}
            for dtype in DTYPES:
                begun = time.monotonic()
                try:
                    expected = alone(library, name, dtype)
                except Exception as error:
                    say(f"{key} {dtype} alone: {type(error).__name__}: {error}")
                    continue
                for engine in ENGINES:
                    try:
                        raised, losses = gang.run(together, library, name, engine, dtype)[0]
                    except GangError as error:
                        raised, losses = str(error)[-600:], []
                    found = verdict(library, name, raised, losses, expected, dtype)
                    if found:
                        table[key][f"{engine}{', ' * bool(dtype)}{dtype}"] = found
                        say(f"{key} | {engine} {dtype} | {found} | {raised or (losses, expected)}")
                say(f"{key} {dtype or 'float32'} done in {time.monotonic() - begun:.0f} s")
    return table


def differences(found: dict[str, dict[str, str]]) -> Iterator[str]:
    """Where what was seen is not what the table says, a line each. bfloat16 has to do as float32 does."""
    for key, row in found.items():
        known = expected(key)
        for engine in ENGINES:
            for suffix in ("", ", bfloat16"):
                seen, said = row.get(f"{engine}{suffix}", ""), known.get(engine, "")
                if seen != said and not (said and suffix):  # a small difference drowns in bfloat16
                    yield f"{key} under {engine}{suffix}: {seen or 'trains'}, and the table says {said or 'trains'}"


def expected(key: str) -> dict[str, str]:
    """What the table says of a class; rules that know more by themselves included."""
    row = dict(FAILS.get(key, {}))
    if key.startswith("bitsandbytes."):  # rule optimizer.cannot-shard
        row |= dict.fromkeys(DTENSORS, RAISES)
    if key == "torch.LBFGS":  # rules optimizer.keeps-own-list and optimizer.closure
        row |= {engine: "" for engine in ENGINES if engine != "DDP"}
    return row


def main() -> None:
    """Prints what differs from the table; then ends with 1."""
    found = measured(sys.argv[1:], lambda text: print(text, flush=True))
    told = [line for line in differences(found) if not line.startswith("torch.LBFGS") or " DDP" in line]
    print("\n".join(told) or "everything is as the table says")
    sys.exit(bool(told))


if __name__ == "__main__":
    main()
