"""What changed between two revisions of a git repository: of each config, script and plan, in numbers and words."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import click
from attrs import evolve, field, frozen

from prepkit import codec
from prepkit.cli import import_and_export as cli_import
from prepkit.cli import plan_files as cli_files
from prepkit.cli.examined import examined
from prepkit.cli.options import Cluster
from prepkit.config import Config
from prepkit.facts import Env, Facts
from prepkit.findings import Finding, PlanRejected, errors
from prepkit.findings.text import in_bytes
from prepkit.formats.found import SCRIPTS, found
from prepkit.formats.importers.source import Imported
from prepkit.formats.launches import Script, read_script
from prepkit.formats.started import started
from prepkit.plan import Plan
from prepkit.predict.said import at, said

MARK = "<!-- prepkit diff -->"
"""First line of the comment, by which the next run finds it and writes it anew."""
LARGEST = 2**28
"""Bytes of the configs of one revision."""
_MOST = 100
"""Shares above this, ten thousand percent, say nothing."""
_SUFFIXES = (".yaml", ".yml", ".json", ".toml", *SCRIPTS, "")
_NUMBERS = (
    ("memory for certain", "memory.for_certain"),
    ("memory at most", "memory.at_most"),
    ("host memory", "memory.host"),
    ("sent per step", "traffic.sent"),
    ("between nodes per step", "traffic.between_nodes"),
    ("global batch", "global_batch"),
    ("micro-batches per step", "accumulation"),
    ("processes", "world_size"),
)
_STARTED = ("processes", "processes of a node", "nodes")
"""What a config of another library says of the cluster that it starts, with or without a plan."""
TRAINS = (
    *("precision", "clip", "optimizer", "accumulation", "global_batch", "scheduler_ticks", "total_steps", "weights"),
    *("loaders", "intent", "model"),
    # as DeepSpeed's JSON has them
    *("fp16", "bf16", "data_types", "scheduler", "gradient_clipping", "gradient_accumulation_steps"),
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
)
"""Settings that change what is computed; others change where and how."""

Plans = Callable[[str, Config, Imported | None], Plan | PlanRejected | None]
"""Makes the plan of a config in a file; None where no model is given."""


@frozen(kw_only=True)
class Side:
    """A file at one revision."""

    config: Config | None = None
    plan: Plan | None = None
    started: Mapping[str, Any] = field(factory=dict)
    """What a config of another library says of the processes that train, by the names of ``_STARTED``."""
    script: Mapping[str, Any] | None = None
    """What the lines of a script that start a training say; None of any other file."""
    refused: tuple[str, ...] = ()
    """Findings against it."""
    unplanned: str = ""
    """Why there is no plan of it, and what to do; empty where there is one, or no model."""


@frozen(kw_only=True)
class Number:
    """A value before and after; None: it is not known, or there is no file."""

    name: str
    before: Any
    after: Any
    bytes: bool = False

    @property
    def share(self) -> str:
        """The change in percent, where both are numbers, and it is no leap from next to nothing."""
        if not isinstance(self.before, int) or not isinstance(self.after, int) or not self.before:
            return ""
        share = (self.after - self.before) / self.before
        return f"{100 * share:+.0f} %" if share < _MOST else ""

    def texts(self) -> tuple[str, str]:
        """Both values as people read them."""
        return self._text(self.before), self._text(self.after)

    def _text(self, value: Any) -> str:
        return "not known" if value is None else in_bytes(value) if self.bytes else str(value)


@frozen(kw_only=True)
class Changed:
    """What changed in one file."""

    file: str
    what: str
    """``added``, ``removed`` or ``changed``."""
    rows: tuple[Number, ...] = ()
    trains: tuple[tuple[str, Any, Any], ...] = ()
    """Settings that change what is computed, before and after."""
    settings: tuple[tuple[str, Any, Any], ...] = ()
    """The other settings."""
    refused: tuple[str, ...] = ()
    """Why the new file is refused."""
    notes: tuple[str, ...] = ()
    """What is not in the numbers, or what they are of."""

    @property
    def empty(self) -> bool:
        """Whether the file says the same as before."""
        return not (self.rows or self.trains or self.settings or self.refused) and self.what == "changed"


def is_range(words: tuple[str, ...]) -> bool:
    """Return whether the first word is two revisions, and no file."""
    return bool(words) and ".." in words[0] and not Path(words[0]).exists()


def changed(words: tuple[str, ...], plans: Plans, cluster: Cluster) -> tuple[Changed, ...]:
    """What changed of the configs and plans below the paths, without any in the whole repository.

    Ends the command where git knows no such revisions.
    """
    base, dots, head = re.fullmatch(r"(.*?)(\.{2,3})(.*)", words[0]).groups()  # type: ignore[union-attr]
    base, head = base or "HEAD", head or "HEAD"
    if dots == "...":
        base = _git("merge-base", "--", base, head).decode().strip()
    base, head = (
        _git("rev-parse", "--verify", "--end-of-options", f"{one}^{{commit}}").decode().strip() for one in (base, head)
    )
    for path in words[1:]:
        _demand(path, base, head)
    names = _git("diff", "--name-only", "--no-relative", "-z", "--no-renames", base, head, "--", *words[1:])
    files = [
        name
        for name in names.decode(errors="replace").split("\0")
        if name and PurePosixPath(name).suffix.lower() in _SUFFIXES
    ]
    if not files:
        return ()
    with tempfile.TemporaryDirectory() as folder:
        bare = frozenset(name for name in files if not PurePosixPath(name).suffix)
        sides = [
            _checked_out(revision, Path(folder, name), bare) for revision, name in ((base, "base"), (head, "head"))
        ]
        top = _git("rev-parse", "--show-toplevel").decode(errors="replace").rstrip("\n")
        every = [
            _compared(_from_here(top, file), *(_side(side, file, plans, cluster) for side in sides)) for file in files
        ]
    return tuple(one for one in every if one is not None and not one.empty)


def _from_here(top: str, file: str) -> str:
    """The path of a file of the repository as one types it in the folder where the command runs."""
    return Path(os.path.relpath(Path(top, file))).as_posix()


def _demand(path: str, *revisions: str) -> None:
    """Ends the command where no revision has anything there: nothing would be compared, and that is no agreement."""
    nothing = _git("hash-object", "-t", "tree", os.devnull).decode().strip()
    if not any(_git("diff", "--name-only", "-z", nothing, one, "--", path) for one in revisions):
        raise click.UsageError(f"neither revision has a file at {path}")


def _git(*words: str) -> bytes:
    try:
        done = subprocess.run(("git", *words), capture_output=True, check=False)
    except OSError as error:
        raise click.UsageError(f"git cannot be run: {error.strerror}") from None
    if done.returncode:
        said_ = done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise click.UsageError(f"git {words[2] if words[0] == '-C' else words[0]}: {said_[0]}")
    return done.stdout


def _checked_out(revision: str, folder: Path, bare: frozenset[str]) -> Path:
    """The configs of a revision, all of them, as one may name another; links are not followed, nor written.

    ``bare``: files without an extension, which may be scripts.
    """
    folder.mkdir()
    names = _git("ls-tree", "-r", "-z", "--full-tree", "--name-only", revision).decode(errors="replace").split("\0")
    endings = {suffix for name in names if (suffix := PurePosixPath(name).suffix).lower() in _SUFFIXES}
    sought = [*(f"*{suffix}" for suffix in sorted(endings - {""})), *sorted(bare & {*names})]
    if not sought:
        return folder
    size = 0
    top = _git("rev-parse", "--show-toplevel").decode(errors="replace").rstrip("\n")
    archive = _git("-C", top, "archive", "--format=tar", revision, "--", *sought)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            size += member.size
            if size > LARGEST:
                raise click.UsageError(f"the configs of {revision:.12} have more than {LARGEST:,} bytes")
            path = folder / member.name
            read = tar.extractfile(member) if member.isfile() else None
            if read is not None and ".." not in path.parts and path.is_relative_to(folder):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(read.read())
    return folder


def _side(folder: Path, name: str, plans: Plans, cluster: Cluster) -> Side | None:
    """Return what the file is there; None where there is none, or nothing tells it to be of any concern."""
    path = folder / name
    one = found(str(path)) if path.is_file() else None
    if one is None:
        return None
    wrong = tuple(
        finding if path.name in finding.where else evolve(finding, where=str(place))
        for checked in examined((str(path),), cluster, one.kind if one.sort == "config" and one.kind else None)
        for place, finding in checked.findings
        if checked.found.path == str(path)
    )
    refused = _lines(wrong, folder)
    if one.sort == "script":
        return Side(script=_lines_of(read_script(str(path))), refused=refused)
    if one.sort == "plan":
        loaded = cli_files.attempt(lambda: codec.load_plan(str(path)))
        if isinstance(loaded, PlanRejected):
            return Side(refused=refused)
        return Side(config=loaded.config, plan=loaded, refused=refused)
    read = cli_import.read(str(path), one.kind or None)
    if isinstance(read, PlanRejected):
        return Side(refused=refused or _lines(read.findings, folder))
    env, starts = cluster.envs(read)[0], _started(read, cluster)
    config = evolve(read.for_size(None if env is None else env.world_size), origins=())
    made = plans(name, config, read)
    if isinstance(made, PlanRejected):
        told = {finding.rule for finding in wrong}
        more = tuple(finding for finding in made.findings if finding.rule not in told)
        against = next(iter(errors(made.findings)), made.findings[0])
        why = f"{against.rule} at {against.where}: {against.what} {against.fix}".replace(f"{folder}/", "").strip()
        return Side(config=config, started=starts, refused=(*refused, *_lines(more, folder)), unplanned=why)
    return Side(config=config, started=starts, plan=made, refused=refused)


def _lines_of(script: Script) -> dict[str, Any]:
    """What a script asks Slurm for, and what each of its launches says, as single values."""
    values: dict[str, Any] = {f"#SBATCH {name}": value for name, value in script.slurm.items()}
    seen: Counter[str] = Counter()
    for launch in script.launches:
        seen[launch.launcher] += 1
        name = launch.launcher if seen[launch.launcher] == 1 else f"{launch.launcher} {seen[launch.launcher]}"
        starts = started(launch)
        asked = {"processes": starts.processes, "nodes": starts.nodes, "processes of a node": starts.per_node}
        values |= {f"{name}: {what}": value for what, value in asked.items() if value is not None}
        values |= {f"{name}: config {at}": named.path for at, named in enumerate(launch.configs, start=1)}
        values |= {f"{name}: --{one.name}": one.value for one in launch.arguments}
    return values


def _started(read: Imported, cluster: Cluster) -> dict[str, Any]:
    """What the file says of processes and machines, and of the model that it trains; what is declared is no news."""
    size, each = read.world_size, read.per_node or cluster.per_node
    nodes = -(-size // each) if size and each else None
    said_ = {"processes": size, "processes of a node": each, "nodes": nodes, "device": read.device, "model": read.model}
    return {name: value for name, value in said_.items() if value is not None}


def _lines(findings: tuple[Finding, ...], folder: Path) -> tuple[str, ...]:
    said_ = (f"{one.rule} at {one.where}: {one.what}" for one in errors(findings))
    return tuple(dict.fromkeys(line.replace(f"{folder}/", "") for line in said_))


def _without_lines(line: str) -> str:
    """A finding wherever it stands: lines above it may be more or fewer."""
    return re.sub(r":\d+:\d+", "", line)


def _compared(file: str, before: Side | None, after: Side | None) -> Changed | None:
    if before is None and after is None:
        return None
    if after is None:
        return Changed(file=file, what="removed")
    old = before or Side()
    known = {_without_lines(line) for line in old.refused}
    refused = tuple(line for line in after.refused if _without_lines(line) not in known)
    both = (old.config and after.config) or (old.script is not None and after.script is not None)
    changes = tuple(_settings(old, after)) if both else ()
    return Changed(
        file=file,
        what="changed" if before else "added",
        rows=tuple(_rows(old, after)),
        trains=tuple(one for one in changes if one[0].partition(".")[0] in TRAINS),
        settings=tuple(one for one in changes if one[0].partition(".")[0] not in TRAINS),
        refused=refused,
        notes=tuple(_notes(old, after)),
    )


def _notes(before: Side, after: Side) -> Iterator[str]:
    """Why memory, traffic and batches are not told; or of how many processes they are, where the file starts others."""
    same = bool(before.unplanned) and bool(after.unplanned)
    if after.unplanned or before.unplanned:
        which = "neither revision can" if same else f"the {'new' if after.unplanned else 'old'} revision cannot"
        why = after.unplanned or before.unplanned
        yield f"no change of memory, traffic or batch is told, as {which} be planned: {why}"
    starts = after.started.get("processes")
    if after.plan is not None and starts is not None and starts != (ranks := after.plan.facts.env.world_size):
        yield f"memory, traffic and batch are of the {ranks} processes that are declared, and the file starts {starts}"


def _rows(before: Side, after: Side) -> Iterator[Number]:
    old, new = (said(side.plan) if side.plan else None for side in (before, after))
    for name, path in _NUMBERS if new else ():
        was, now = at(old, path) if old else None, at(new, path)
        if was != now:
            yield Number(name=name, before=was, after=now, bytes=path.startswith(("memory", "traffic")))
    for name in _STARTED if before.config and after.config else ():
        was, now = before.started.get(name), after.started.get(name)
        told = name == "processes" and new and at(new, "world_size") == now  # with the plan's numbers
        if was != now and not told:
            yield Number(name=name, before=was, after=now)


def _settings(before: Side, after: Side) -> Iterator[tuple[str, Any, Any]]:
    old, new = ({**_values(side.config), **_beside(side), **(side.script or {})} for side in (before, after))
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def _beside(side: Side) -> dict[str, Any]:
    return {name: side.started[name] for name in ("device", "model") if name in side.started}


def _values(config: Config | None) -> dict[str, Any]:
    """Single values under the names that a file has for them; DeepSpeed's own JSON is gone into."""
    own = codec.flat(codec.to_data(config))
    values: dict[str, Any] = {}
    for name, value in own.items():
        inside = _inside(value)
        more = {} if inside is None else codec.flat(inside)
        values |= {name: value} if inside is None else {f"{name}.{k}" if k in own else k: v for k, v in more.items()}
    return values


def _inside(value: Any) -> dict[str, Any] | None:
    """What a value says that is a mapping in JSON; None of any other."""
    if not isinstance(value, str) or not value.startswith("{"):
        return None
    try:
        data = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def planner(model: str | None, cluster: Cluster) -> Plans:
    """Makes plans for the model, which is looked at once; without one, none."""
    from prepkit.cli.verdict import judge

    seen: list[Facts | PlanRejected] = []

    def plan(_: str, config: Config, imported: Imported | None) -> Plan | PlanRejected | None:
        if model is None:
            return None
        there = cluster if imported is None else cluster.filled_by(imported)
        env: Env | None = there.envs(imported)[0]
        if not seen:
            seen.append(cli_files.attempt(lambda: cli_files.facts(model, env)))
        facts = seen[0]
        if isinstance(facts, PlanRejected):
            cli_files.refuse((facts,), as_json=False)
        facts = evolve(facts, env=env or facts.env, loaders=there.declared_loaders)
        verdict = judge(there.with_optimizer(config), facts)
        return verdict.plan if verdict.plan is not None else PlanRejected(verdict.findings)

    return plan


# --- telling ---------------------------------------------------------------------------------------------------------


def data_of(every: tuple[Changed, ...]) -> list[dict[str, Any]]:
    """Everything as JSON data."""
    return [
        {
            "file": one.file,
            "what": one.what,
            "numbers": [{"name": row.name, "before": row.before, "after": row.after} for row in one.rows],
            "trains_differently": [dict(zip(("setting", "before", "after"), pair, strict=True)) for pair in one.trains],
            "settings": [dict(zip(("setting", "before", "after"), pair, strict=True)) for pair in one.settings],
            "refused": list(one.refused),
            "notes": list(one.notes),
        }
        for one in every
    ]


def text_of(every: tuple[Changed, ...]) -> str:
    """Everything as plain text."""
    return (
        "\n".join(line for one in every for line in _text(one))
        or "no config, script or plan says anything else than before"
    )


def _text(one: Changed) -> Iterator[str]:
    yield f"{one.file}: {one.what}"
    for row in one.rows:
        yield f"  {row.name}: {' -> '.join(row.texts())}{f' ({row.share})' if row.share else ''}"
    for title, pairs in (("trains differently", one.trains), ("settings", one.settings)):
        yield from (f"  {title}: {name}: {_value(old)} -> {_value(new)}" for name, old, new in pairs)
    yield from (f"  refused: {line}" for line in one.refused)
    yield from (f"  note: {line}" for line in one.notes)


def comment_of(every: tuple[Changed, ...], revisions: str) -> str:
    """Everything as a comment on a pull request, in Markdown; what files say stands in it as code."""
    lines = [MARK, f"**prepkit** {_code(revisions)}"]
    if not every:
        lines += ["", "No config, script or plan says anything else than before."]
    for one in every:
        lines += ["", f"### {_code(one.file)} {one.what}"]
        if one.rows:
            lines += ["", "| of a rank | before | after | |", "|---|--:|--:|--:|"]
            lines += (f"| {row.name} | {' | '.join(row.texts())} | {row.share} |" for row in one.rows)
        for title, pairs in (("Trains differently", one.trains), ("Other settings", one.settings)):
            if pairs:
                lines += ["", f"{title}:", ""]
                lines += (f"- {_code(name)}: {_code(_value(old))} → {_code(_value(new))}" for name, old, new in pairs)
        if one.refused:
            lines += ["", "Refused:", "", *(f"- {_code(line)}" for line in one.refused)]
        lines += ["", *(f"Note: {_code(line)}" for line in one.notes)] if one.notes else []
    return "\n".join(lines)[:60_000]


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def _code(text: str) -> str:
    """Text that Markdown shows as it is: no link, no mention, no HTML, on one line."""
    plain = re.sub(r"[\x00-\x1f\x7f`|]", " ", text)[:300]
    return f"`{plain}`" if plain.strip() else "` `"
