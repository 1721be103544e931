"""``make mutants``: how many small changes of the source the tests notice."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from attrs import define, evolve, field

from tests.mutants import reach as reaches
from tests.mutants import report
from tests.mutants.areas import GROUPS, NAMED, Group, named
from tests.mutants.host import Host, Killed, Verdict, collect, settle, survey
from tests.mutants.ledger import Entry, Ledger, equivalents, source_digest
from tests.mutants.mutant import Mutant, digest, drawn
from tests.mutants.operators import mutants
from tests.mutants.patch import PACKAGE, ROOT
from tests.mutants.score import Score, start_cold

HEAVY = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.testing._internal.distributed.fake_pg",
    "hypothesis.strategies",
    "hypothesis.extra.numpy",
    "transformers",
    "cattrs.strategies",
    "rich.tree",
    "click.testing",
    "ruamel.yaml",
    "safetensors.torch",
    "returns.io",
)
"""Imported once, before anything is forked. None of them may import the package."""


@define(kw_only=True)
class Job:
    """What was asked for."""

    group: Group
    sample: int
    seed: int
    workers: int
    budget_s: float
    examples: int
    only: tuple[str, ...]
    fresh: bool
    fresh_map: bool
    folder: Path
    verdicts: dict[Mutant, Verdict] = field(factory=dict)
    named: dict[str, Mutant] = field(factory=dict)
    drawn: tuple[Mutant, ...] = ()


def main() -> int:
    """The exit code: 0 if enough are killed in every group."""
    asked = _arguments()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    tell = partial(print, file=out)
    codes = []
    for group in GROUPS:
        if asked.group in ("all", group.name):
            job = _job(asked, evolve(group, tests=tuple(asked.tests)) if asked.tests else group)
            if (pid := os.fork()) == 0:  # each group imports other tests
                os._exit(_guarded(job, tell))
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return max(codes)


def _guarded(job: Job, tell: Callable[[str], None]) -> int:
    try:
        return _run(job, tell)
    except BaseException:
        tell(traceback.format_exc())
        return 3


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--group", choices=("all", *(group.name for group in GROUPS)), default="all")
    parser.add_argument("--sample", type=int, help="mutants to draw; 0 for the named ones only")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for one mutant")
    parser.add_argument("--examples", type=int, default=10, help="examples that each law draws")
    parser.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="mutants whose id holds one of these")
    parser.add_argument("--tests", nargs="*", metavar="PATH", help="collect these tests only")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--fresh-map", action="store_true", help="measure anew which test runs which line")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutants", help="results of earlier runs")
    return parser.parse_args()


def _job(asked: argparse.Namespace, group: Group) -> Job:
    files = sorted(file for area in group.areas for file in (ROOT / area.folder).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants(str(file.relative_to(ROOT)), file.read_bytes())]
    wanted = tuple(m for m in every if not asked.only or any(text in m.id for text in asked.only))
    sample = group.sample if asked.sample is None else asked.sample
    asked.folder.mkdir(exist_ok=True)
    return Job(
        group=group,
        sample=sample,
        seed=asked.seed,
        workers=asked.workers,
        budget_s=asked.budget,
        examples=asked.examples,
        only=tuple(asked.only),
        fresh=asked.fresh,
        fresh_map=asked.fresh_map,
        folder=asked.folder,
        drawn=drawn(wanted, sample, asked.seed),
        named={row.name: named(row.folder, row.old, row.new) for row in NAMED[group.name]},
    )


def _run(job: Job, tell: Callable[[str], None]) -> int:
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # pytest's own words; ours go to ``tell``
    settle(job.examples)
    for name in HEAVY:
        import_module(name)
    assert PACKAGE not in sys.modules, f"{PACKAGE} is imported before it can be mutated"
    control = start_cold()
    code = 3

    def act(host: Host, session: pytest.Session) -> None:
        nonlocal code
        code = _scored(job, host, control, tracer, tell)

    tracer = reaches.Tracer()
    with tracer:
        ended = collect(job.group.tests, Host(act))
    if code == 3:
        tell(f"pytest collected nothing and ended with {ended}; python -m pytest --collect-only says why")
    return code


def _scored(job: Job, host: Host, control: Connection, tracer: reaches.Tracer, tell: Callable[[str], None]) -> int:
    tracer.__exit__()
    if host.failed is not None:
        tell(f"the tests cannot be collected: {host.failed}")
        return 2
    reach = _reach(job, host, tracer, tell)
    tests = digest(reaches.sources(*job.group.tests, "tests/support") + f"{job.budget_s} {job.examples}")
    ledger = Ledger(job.folder / f"{job.group.name}.jsonl")
    if not job.fresh:
        ledger.read()
    wanted = (*job.named.values(), *job.drawn)
    for mutant in wanted:
        if entry := ledger.known(mutant, tests, reach.runs.keys()):
            job.verdicts[mutant] = entry.verdict
    todo = [mutant for mutant in wanted if mutant not in job.verdicts]
    tell(f"{job.group.name}: {len(wanted)} mutants, {len(wanted) - len(todo)} known from earlier runs")

    def heard(mutant: Mutant, verdict: Verdict, seconds: float) -> None:
        job.verdicts[mutant] = verdict
        test, how = (verdict.test, verdict.how) if isinstance(verdict, Killed) else ("", "")
        entry = Entry(id=mutant.id, source=source_digest(mutant), tests=tests, seconds=seconds, test=test, how=how)
        ledger.add(entry)
        tell(f"{len(job.verdicts):5} {'killed  ' if test else 'SURVIVED'} {seconds:6.1f} s  {mutant.id}  {test}")

    score = Score(
        host=host, group=job.group, reach=reach, control=control, workers=job.workers, budget_s=job.budget_s, tell=heard
    )
    for mutant in wanted:  # what killed before kills again
        verdict = job.verdicts.get(mutant)
        if isinstance(verdict, Killed):
            score.kills[mutant.path][verdict.test] += 1
    began = time.monotonic()
    score.run(todo)
    count = max(1, len(todo))
    each = (time.monotonic() - began) / count
    tell(f"{len(todo)} tried: {each:.2f} s each, {score.nursery.cpu_s / count:.2f} s of CPU")
    return _told(job, tell)


def _reach(job: Job, host: Host, tracer: reaches.Tracer, tell: Callable[[str], None]) -> reaches.Reach:
    """What each test runs: as measured before, and measured now for the tests of files that are new or changed."""
    file = job.folder / f"{job.group.name}-reach.pickle"
    names = {test.partition("::")[0] for test in host.items}
    files = {name: digest((ROOT / name).read_bytes()) for name in names}
    nothing = job.fresh_map or not file.exists()
    known_files, known, seen = ({}, {}, reaches.standing()) if nothing else pickle.loads(file.read_bytes())
    same = {name for name in names if known_files.get(name) == files[name]}
    runs = {
        test: run
        for test, run in known.items()
        if test in host.items and test.partition("::")[0] in same and run.passed  # what failed may pass by now
    }
    if todo := [test for test in host.items if test not in runs]:

        def keep(found: dict[str, reaches.Run]) -> None:
            file.write_bytes(pickle.dumps((files, runs | found, seen)))

        found = survey(host, todo, job.workers, tell, keep)
        runs |= found
        for run in found.values():
            if not run.passed:
                tell(f"not used, because it does not pass here without a mutant: {run.test}")
    return reaches.Reach(imports=reaches.by_scope(tracer.lines()), runs=runs, seen=seen)


def _told(job: Job, tell: Callable[[str], None]) -> int:
    same = equivalents()
    tell("")
    for name, mutant in job.named.items():
        tell(f"{'killed  ' if isinstance(job.verdicts[mutant], Killed) else 'SURVIVED'} {name} ({mutant.place})")
    sample = {mutant: job.verdicts[mutant] for mutant in job.drawn}
    tell(f"\n{report.HEAD}")
    table = report.rows(sample, same)
    for row in table:
        tell(str(row))
    total = table[-1]
    tell(f"\n{total.equivalent} of {total.tried} called equivalent")
    for line in report.survivors(sample, same):
        tell(line)
    for line in report.wrong(sample, same):
        tell(f"equivalent.toml is wrong, a test kills: {line}")
    few = total.share < job.group.share or total.equivalent > 0.02 * total.tried
    alive = any(not isinstance(job.verdicts[mutant], Killed) for mutant in job.named.values())
    return int(few or alive or bool(report.wrong(sample, same)))


if __name__ == "__main__":
    sys.exit(main())
