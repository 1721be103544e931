"""Plans and rehearses a model of every type that the installed transformers knows, and says what came of it.

``python -m tests.tools.transformers_types`` prints a row per type and engine, and a summary; it ends with 1 where
something is unexplained. ``--only NAME``, again for more, chooses types. All of them take five minutes.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen
from torch.nn import Module

import prepkit as pk
from prepkit.applying.rehearse import rehearse_here
from tests.support.transformers_small import build, model_types
from tests.tools.transformers_known import NOT_BUILT, REFUSED

WORLD = 4
LIMIT_S = 60
"""Seconds for one type under one engine."""
CONFIGS = {
    "FSDP2": pk.Config(engine=pk.FSDP2(), optimizer=pk.optim.AdamW(lr=1e-3)),
    "DDP": pk.Config(engine=pk.DDP(), optimizer=pk.optim.AdamW(lr=1e-3)),
    "TensorParallel": pk.Config(engine=pk.TensorParallel(), optimizer=pk.optim.AdamW(lr=1e-3)),
}
AS_PLANNED, REFUSAL, NO_MODEL = "as planned", "refused", "not built"


class TooLong(Exception):
    """One type took longer than its limit."""


@frozen
class Row:
    """What came of one type under one engine."""

    kind: str
    cls: str
    engine: str
    outcome: str
    """``as planned``, ``refused``, ``not built``, ``differs``, ``halted`` or ``crashed``."""
    detail: str = ""
    """Ids of the rules; or the reason."""

    @property
    def why(self) -> str:
        """What explains it; empty where nothing does."""
        if self.outcome == AS_PLANNED:
            return "nothing differs"
        if self.outcome == NO_MODEL:
            return next((why for part, why in NOT_BUILT if part in f"{self.kind}: {self.detail}"), "")
        rules = self.detail.split(", ")
        known = [REFUSED.get((rule, self.kind), REFUSED.get((rule, ""), "")) for rule in rules]
        return "; ".join(known) if self.outcome == REFUSAL and all(known) else ""

    def __str__(self) -> str:
        return f"{self.kind} | {self.cls} | {self.engine} | {self.outcome} | {self.detail}"


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises ``TooLong`` inside after so many seconds."""

    def ring(*_: object) -> None:
        raise TooLong(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rows(kinds: Iterable[str]) -> Iterator[Row]:
    """Every type under every engine that it has a plan for."""
    for kind in kinds:
        try:
            with limited(LIMIT_S):
                model = build(kind)
        except Exception as error:  # whatever transformers raises; held against the table of known reasons
            yield Row(kind, "", "", NO_MODEL, one_line(error))
            continue
        for engine, cfg in CONFIGS.items():
            if engine != "TensorParallel" or model.tp_plan:
                yield tried(kind, model, engine, cfg)
        del model
        gc.collect()


def tried(kind: str, model: Module, engine: str, cfg: pk.Config) -> Row:
    """Plans for ranks that are not here, and rehearses as the last of them."""

    def row(outcome: str, detail: str = "") -> Row:
        return Row(kind, type(model).__name__, engine, outcome, detail)

    world = 2 if engine == "TensorParallel" else WORLD
    env = pk.Env.declare(world_size=world, device="cpu", torch="2.13")
    try:
        with limited(LIMIT_S):
            plan = pk.build_plan(cfg, model, env=env)
            seen = rehearse_here(plan, model, rank=world - 1)
    except pk.PlanRejected as refused:
        errors = {finding.rule for finding in refused.findings if finding.severity is pk.Severity.ERROR}
        return row(REFUSAL, ", ".join(sorted(errors)))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return row("crashed", f"{one_line(error)} at {Path(where.filename).name}:{where.lineno}")
    if seen.halted:
        return row("halted", " ".join(seen.halted.split())[:400])
    if seen.differences:
        return row("differs", "; ".join(str(check) for check in seen.differences[:3])[:400])
    return row(AS_PLANNED)


def one_line(error: BaseException) -> str:
    """Class and text of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def summary(found: Sequence[Row]) -> str:
    """Rows by engine and outcome, each refusal and its reason, and what nothing explains."""
    lines = ["| engine | outcome | types | why |", "| --- | --- | --- | --- |"]
    counted = Counter(
        (row.engine or "any", row.outcome, row.detail if row.outcome == REFUSAL else "", row.why) for row in found
    )
    for (engine, outcome, rules, why), number in sorted(counted.items()):
        lines.append(f"| {engine} | {outcome} {rules}".rstrip() + f" | {number} | {why} |")
    bad = [str(row) for row in found if not row.why]
    return "\n".join((*lines, "", f"{len({row.kind for row in found})} types, unexplained: {len(bad)}", *bad))


def main(words: Sequence[str]) -> int:
    """Prints rows and summary; 1 where something is unexplained, 2 for a type that transformers does not know."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.transformers_types", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="a type, such as llama")
    asked = parser.parse_args(words).only or list(model_types())
    if unknown := sorted(set(asked) - set(model_types())):
        print(f"transformers has no type {', '.join(unknown)}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    begun = time.monotonic()
    found = [shown(row, print) for row in rows(asked)]
    print(f"\n{summary(found)}\n{time.monotonic() - begun:.0f} s")
    return 1 if any(not row.why for row in found) else 0


def shown(row: Row, say: Callable[..., None]) -> Row:
    """The row, once it is printed."""
    say(row, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
