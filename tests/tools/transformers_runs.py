"""Trains a tiny model of every language-model type of transformers under DDP and, saved and resumed, under FSDP2.

``python -m tests.tools.transformers_runs`` takes each type with a causal or a sequence-to-sequence language model, on
two gloo processes: 20 steps of AdamW under DDP; 10 under FSDP2, saved, built, planned and applied anew from other
weights, resumed, 10 more. Losses, gradient norms and whole weights have to be equal to 1e-5 of their scale. Prints a
row per type and a summary; ends with 1 where something is unexplained. ``--only NAME``, again for more, chooses types.
``--into FOLDER`` keeps a file per type there and takes what is there as done; ``--part 0/2`` does the first of two.
``--page docs/transformers-runs.md`` writes the tables of that page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import cattrs
from attrs import frozen

from tests.support import transformers_tiny as tiny
from tests.support.gang import Gang, GangError, gang_of
from tests.support.resumed_runs import EQUAL, EQUAL_64, FAILED, compare
from tests.tools import transformers_runs_page as page
from tests.tools.transformers_runs_known import EXCEPTIONS

LIMIT_S = 240.0
"""Seconds for one type."""


@frozen(kw_only=True)
class Row:
    """What came of one type. Differences are relative to the largest value; ``nan`` where it did not come so far."""

    kind: str
    outcome: str
    """``equal``, ``differs``, ``refused``, ``failed`` or ``not built``."""
    detail: str = ""
    loss: float = float("nan")
    norm: float = float("nan")
    weights: float = float("nan")
    seconds: float = 0.0

    @property
    def why(self) -> str:
        """What explains it; empty where nothing does."""
        if self.outcome == EQUAL:
            return "nothing differs"
        parts = (self.outcome, self.kind, self.detail)
        return next((why for outcome, kind, part, why in EXCEPTIONS if _fits(parts, (outcome, kind, part))), "")

    def __str__(self) -> str:
        """A row of a table."""
        numbers = " | ".join("" if value != value else f"{value:.1e}" for value in (self.loss, self.norm, self.weights))
        explained = self.why or self.detail
        if self.outcome in {EQUAL, EQUAL_64}:
            explained, _, _ = self.detail.partition(";")
        outcome = f"{self.outcome}: {explained}" if explained else self.outcome
        return f"| `{self.kind}` | {outcome} | {numbers} | {self.seconds:.1f} |"


def _fits(row: tuple[str, str, str], known: tuple[str, str, str]) -> bool:
    return row[0] == known[0] and known[1] in ("", row[1]) and known[2] in row[2]


def rows(gang: Gang, asked: Sequence[str]) -> Iterator[Row]:
    """A row per type."""
    for kind in asked:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="runs-") as folder:
            try:
                outcome, detail, gaps = gang.run(compare, kind, folder, timeout=LIMIT_S)[0]
            except GangError as error:
                outcome, detail, gaps = FAILED, _last_lines(str(error)), (float("nan"),) * 3
        loss, norm, weights = gaps
        seconds = time.monotonic() - begun
        yield Row(kind=kind, outcome=outcome, detail=detail, loss=loss, norm=norm, weights=weights, seconds=seconds)


def _last_lines(text: str) -> str:
    """What the first rank that failed says at the end."""
    if "did not return within" in text:
        return "took longer than its limit"
    before, _, _ = text.partition("--- rank 1")
    first = before if "raised" in before else text
    return " / ".join(line.strip() for line in first.strip().splitlines()[-4:])[-500:]


def summary(found: Sequence[Row]) -> str:
    """Counts by outcome and reason, the largest differences of equal rows, and what nothing explains."""
    counted = Counter((row.outcome, row.why) for row in found)
    lines = [f"| {outcome} | {number} | {why} |" for (outcome, why), number in sorted(counted.items())]
    equal = [row for row in found if row.outcome == EQUAL]
    most = [f"{max((getattr(row, name) for row in equal), default=0.0):.1e}" for name in ("loss", "norm", "weights")]
    bad = [f"{row.kind}: {row.outcome}: {row.detail}" for row in found if not row.why]
    told = f"{len(found)} types, {len(equal)} equal (loss, norm, weights at most {', '.join(most)})"
    told += f", unexplained: {len(bad)}"
    return "\n".join(("| outcome | types | why |", "| --- | --- | --- |", *lines, "", told, *bad))


def main(words: Sequence[str]) -> int:
    """Prints rows and summary; 1 where something is unexplained, 2 for a type without such a model."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.transformers_runs", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="a type, such as llama")
    parser.add_argument("--into", type=Path, help="folder that keeps a line per type")
    parser.add_argument("--part", default="0/1", help="such as 0/2: each second type, from the first")
    parser.add_argument("--page", type=Path, help="Markdown page whose tables are written")
    chosen = parser.parse_args(words)
    asked = chosen.only or list(tiny.kinds())
    if unknown := sorted(set(asked) - set(tiny.kinds())):
        print(f"transformers has no language model of type {', '.join(unknown)}", file=sys.stderr)
        return 2
    number, parts = map(int, chosen.part.split("/"))
    asked = asked[number::parts]
    done = _kept(chosen.into)
    with gang_of(2) as gang:
        for row in rows(gang, [kind for kind in asked if kind not in done]):
            done[row.kind] = row
            print(row, flush=True)
            if chosen.into:
                chosen.into.mkdir(parents=True, exist_ok=True)
                (chosen.into / f"{row.kind}.json").write_text(json.dumps(cattrs.unstructure(row)))
    found = [done[kind] for kind in asked]
    print(f"\n{summary(found)}")
    if chosen.page:
        page.write(chosen.page, found)
    return 1 if any(not row.why for row in found) else 0


def _kept(folder: Path | None) -> dict[str, Row]:
    files = sorted(folder.glob("*.json")) if folder and folder.exists() else []
    return {file.stem: Row(**json.loads(file.read_text())) for file in files}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
