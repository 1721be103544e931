"""Every configuration of torch's own optimizer tests under DDP and FSDP2 on two processes, as a table.

``python -m tests.tools.torch_optimizers`` takes a minute or two; it ends with 1 where one neither trains, saves and
goes on as alone, nor is refused. Words after it choose classes: ``python -m tests.tools.torch_optimizers AdamW``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from tempfile import TemporaryDirectory

from tests.support.fork_server import ForkServers
from tests.support.gang import Gang
from tests.torch_suites.optimizers import Outcome, configurations, every


def table(found: Sequence[Outcome]) -> str:
    """Outcomes by class and engine; then what is wrong, each by itself."""
    lines = [
        "| optimizer | engine | configurations | outcome | bytes of its state |",
        "| --- | --- | --- | --- | --- |",
    ]
    counted = Counter((one.case.name, one.engine, "wrong" if one.wrong else one.text, one.state) for one in found)
    for (name, engine, text, state), number in sorted(counted.items()):
        lines.append(f"| {name} | {engine} | {number} | {text} | {bytes_of(state)} |")
    bad = [f"{one.case} under {one.engine}: {one.text}" for one in found if one.wrong]
    return "\n".join((*lines, "", f"{len(found)} runs, wrong: {len(bad)}", *bad))


def bytes_of(state: str) -> str:
    """The cell of the table."""
    return {"0": "as predicted", "": ""}.get(state, state)


def main(words: Sequence[str]) -> int:
    """Prints the table; 1 where something is wrong, 2 for a class that torch does not test."""
    cases = [case for case in configurations() if not words or case.name in words]
    if unknown := sorted(set(words) - {case.name for case in cases}):
        print(f"torch tests no optimizer {', '.join(unknown)}", file=sys.stderr)
        return 2
    with TemporaryDirectory() as folder, closing(ForkServers()) as servers, closing(Gang(2, servers)) as gang:
        ranks = gang.run(every, cases, folder, timeout=570)
    found = [
        one for outcomes in zip(*ranks, strict=True) for one in sorted(outcomes, key=lambda one: not one.wrong)[:1]
    ]
    print(table(found))
    return 1 if any(one.wrong for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
