"""``prepkit check``: finds by itself what lies there, and says of each file what is wrong, fine, or not to be known."""

from __future__ import annotations

import difflib
import functools
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import evolve, field, fields_dict, frozen

from prepkit import rules
from prepkit.cli import import_and_export as cli_import
from prepkit.cli import plan_files as cli_refusal
from prepkit.cli.options import Cluster
from prepkit.cli.terminal import say, say_json
from prepkit.config import AdamW, LoadWeights, Origin
from prepkit.config.origin import origin_of
from prepkit.facts import Env, Facts, ModelFacts
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.formats.found import SCRIPTS, Found, below, found
from prepkit.formats.importers import IMPORTERS
from prepkit.formats.importers.source import READERS, Imported
from prepkit.formats.importers.source import read as read_source
from prepkit.formats.launches import NamedFile, Script, read_script, script_findings
from prepkit.formats.places import FilePlace, place_of

if TYPE_CHECKING:
    from prepkit.plan import Plan
    from prepkit.planner.budget import Costs

_RATE = 1e-3
"""A rate of learning, which costs nothing."""
_COSTS = 3
"""Plans whose memory is told."""
_SHOWN = 12
"""Findings, and names of files, on one screen; those of a kind count as one."""
_TELLS = {
    "the model": "add --model FOLDER, with its config.json, or --model PKG.MOD:FACTORY, a function that returns it",
    "the number of processes": "add --world-size N",
    "the device type": "add --device cuda",
    "the version of torch": "add --torch VERSION",
    "the optimizer": "run prepkit audit SCRIPT, where it trains",
}
"""What a rule would have to know, and what tells it."""
_MISSING = "import.missing-file"
_ELSEWHERE = "run prepkit audit SCRIPT, where it trains"


def tells(what: str) -> str:
    """Return what would tell what is not known here."""
    return _TELLS.get(what, _ELSEWHERE)


@frozen(kw_only=True)
class Checked:
    """One file, and the three verdicts about it: what is wrong, how many rules found it fine, what they cannot know."""

    found: Found
    findings: tuple[tuple[FilePlace, Finding], ...] = ()
    fine: int = 0
    """Rules that were asked to the end and said nothing."""
    unknown: Mapping[str, int] = field(factory=dict)
    """What is not known here, and how many rules would have to know it."""
    beyond: tuple[tuple[FilePlace, Finding], ...] = ()
    """What prepkit does not do or see itself, and is right for the library whose file it is."""
    model: str = ""
    """The model that the file names; its facts were read unless ``absent`` says why not."""
    absent: str = ""
    supposed: str = ""
    """What the costs suppose that the file does not say."""
    costs: Costs | None = None
    """What a rank of its plan holds and sends, where model and number of processes are known."""

    @property
    def wrong(self) -> bool:
        """Whether it has an error."""
        return any(finding.severity is Severity.ERROR for _, finding in self.findings)


def check_files(paths: tuple[str, ...], cluster: Cluster, kind: str | None, as_json: bool) -> NoReturn:
    """The command without a model: findings as they are made, then what is fine, and what cannot be known here."""
    told, checked = _Told(), []
    for one in examined(paths, cluster, kind):
        checked.append(one)
        if not as_json:
            told.say(one)
    if as_json:
        say_json(data_of(checked))
    else:
        say("\n".join(_summary(checked, told, paths)))
    sys.exit(1 if any(one.wrong for one in checked) else 0)


def mend_files(paths: tuple[str, ...], cluster: Cluster, kind: str | None, as_diff: bool) -> None:
    """Mend what is safe in every config; or show it, and end the command, with 1 where there is something to mend.

    What is found and not mended is told beside it: a file that stays as it is need not be fine.
    """
    from prepkit.formats.edits import mended, said_of

    changed, ended = 0, set()
    for one in _found(paths, kind):
        if one.sort != "config" or one.kind not in IMPORTERS:
            continue
        source = cli_refusal.attempt(functools.partial(read_source, one.path))
        if isinstance(source, PlanRejected):
            continue
        after, gone = mended(source, one.kind)
        changed += bool(gone)
        ended |= {(one.path, *said_of(finding)) for finding in gone}
        if gone and as_diff:
            before, now = (text.splitlines(keepends=True) for text in (source.text, after.text))
            say("".join(difflib.unified_diff(before, now, one.path, one.path)).rstrip())
        elif gone:
            cli_refusal.write(after.text, one.path)
            say(f"mended {one.path}: {', '.join(finding.where.rpartition(' ')[2] for finding in gone)}", err=True)
    left = [
        f"{place} {finding.rule}"
        for one in examined(paths, cluster, kind)
        for place, finding in one.findings
        if (one.found.path, *said_of(finding)) not in ended
    ]
    if left:
        are = "finding is" if len(left) == 1 else "findings are"
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        say(f"{len(left)} {are} not mended: {', '.join(left[:_SHOWN])}{more}", err=True)
    if as_diff:
        sys.exit(1 if changed else 0)


# --- examining -------------------------------------------------------------------------------------------------------


def examined(paths: tuple[str, ...], cluster: Cluster, kind: str | None = None) -> Iterator[Checked]:
    """Every file that is found, one after the other; a single file that is named is read whatever it is."""
    founds = _found(paths, kind)
    scripts = {one.path: read_script(one.path) for one in founds if one.sort == "script"}
    sizes, missing, more = _started(scripts.values())
    known = {_real(one.path) for one in founds}
    founds += [one for path in more if _real(path) not in known and (one := found(path)) is not None]
    for one in founds:
        if one.path in scripts:
            yield _script(one, scripts[one.path], missing.get(one.path, ()))
        elif one.sort == "plan":
            yield _plan(one)
        else:
            yield _config(one, cluster, sizes.get(_real(one.path), ()), kind)


def _real(path: str) -> str:
    return str(Path(path).resolve())


def _found(paths: tuple[str, ...], kind: str | None) -> list[Found]:
    every = [file for path in paths for file in (below(path) if Path(path).is_dir() else (path,))]
    founds = [one for path in dict.fromkeys(every) if (one := found(path)) is not None]
    if len(paths) == 1 and not founds and not Path(paths[0]).is_dir():
        script = Path(paths[0]).suffix.lower() in SCRIPTS
        founds = [Found(path=paths[0], sort="script" if script else "config", kind=kind or "", why="it was named")]
    if kind is not None:
        founds = [evolve(one, sort="config", kind=kind, why="--from says so") for one in founds]
    return founds


def _started(
    scripts: Iterable[Script],
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[NamedFile, ...]], tuple[str, ...]]:
    """World sizes that scripts start a config with; the configs that are not there; and those that are."""
    sizes: dict[str, tuple[int, ...]] = {}
    missing: dict[str, tuple[NamedFile, ...]] = {}
    there: dict[str, None] = {}
    for script in scripts:
        for launch in script.launches:
            for named in launch.configs:
                place = _resolved(named.path, Path(script.path).parent)
                if place is None:
                    missing[script.path] = (*missing.get(script.path, ()), named)
                    continue
                there[place] = None
                if launch.processes:
                    sizes[_real(place)] = tuple(dict.fromkeys((*sizes.get(_real(place), ()), launch.processes)))
    return sizes, missing, tuple(there)


def _resolved(named: str, folder: Path) -> str | None:
    """The file from where the script is, from here, or from a folder above the script: nobody knows where it runs."""
    if "$" in named:
        return None
    absolute = folder.resolve()
    for base in (folder, Path(), *absolute.parents[:6]):
        try:
            if (base / named).is_file():
                return str(base / named)
        except (OSError, ValueError):
            return None
    return None


def _script(one: Found, script: Script, missing: tuple[NamedFile, ...]) -> Checked:
    findings = tuple((place_of(finding, one.path, "", ""), finding) for finding in script_findings(script))
    beyond = tuple(
        (
            FilePlace(one.path, named.line, named.column),
            evolve(_not_here(f"{one.path}:{named.line}:{named.column}", named.path), severity=Severity.NOTE),
        )
        for named in missing
    )
    return Checked(found=one, findings=findings, fine=_SCRIPT_RULES, beyond=beyond)


def _not_here(where: str, named: str) -> Finding:
    what = f"{named} is known when it runs" if "$" in named else f"{named} is not here"
    return rules.found(_MISSING, where, what, f"Check it where it is: prepkit check {named}")


_SCRIPT_RULES = 4


def _plan(one: Found) -> Checked:
    from prepkit import codec
    from prepkit.cli.verdict import judge

    loaded = cli_refusal.attempt(lambda: codec.load_plan(one.path))
    findings = loaded.findings if isinstance(loaded, PlanRejected) else judge(loaded.config, loaded.facts).findings
    inside = {finding: evolve(finding, where=_in_plan(one.path, finding.where), origin="") for finding in findings}
    placed = zip(_placed(one, tuple(inside.values())), inside, strict=True)  # what it was imported from lies elsewhere
    return Checked(found=one, findings=tuple((place, finding) for (place, _), finding in placed))


def _in_plan(file: str, where: str) -> str:
    """The path in a plan file of what a rule names in the config, or in the environment, of the plan."""
    above = {"config": "plan", "env": "plan.facts"}.get(where.partition(".")[0])
    return where if above is None else f"{file}:$.{above}.{where}"


def _config(one: Found, cluster: Cluster, sizes: tuple[int, ...], kind: str | None) -> Checked:
    read = cli_import.read(one.path, kind or one.kind or None)
    said = read.findings if isinstance(read, PlanRejected) else read.notes
    imported = read.rest if isinstance(read, PlanRejected) else read
    if not isinstance(imported, Imported):
        one = one if one.kind else evolve(one, kind="nothing known")
        return _sorted(Checked(found=one), _placed(one, said))
    one = evolve(one, kind=imported.kind)
    wheres = [finding.where.partition(":$")[2] for finding in said]
    unread = tuple(f"config{where}" for where in wheres if where)
    asked = _asked(one, cluster, imported, sizes)
    found = [f for f in asked.said if not f"{f.where}.".startswith(unread or ("\n",))]
    written = (_with_origin(finding, imported.written) for finding in dict.fromkeys((*said, *found)))
    every = tuple(map(imported.worded, written))
    return _sorted(evolve(asked.checked, found=one), _placed(one, every))


@frozen
class _Asked:
    checked: Checked
    said: tuple[Finding, ...]


def _asked(one: Found, cluster: Cluster, imported: Imported, sizes: tuple[int, ...]) -> _Asked:
    """Return what every rule says that can be asked: with the model that the file names, or without one."""
    from prepkit.rules.without_model import ask

    envs = _environments(cluster, imported, sizes)
    model, absent = _named_model(one, imported)
    checked = Checked(found=one, model=imported.model or "", absent=absent)
    asked = cluster.with_optimizer(imported.config)
    every = tuple(ask(asked, *known, model) for known in envs)
    said = tuple(finding for answers in every for finding in answers.findings)
    fine = every[0].asked - len({finding.rule for finding in every[0].findings})
    unknown = Counter(what for _, what in every[0].unasked)
    costs = None
    if model is not None and "world_size" in envs[0][1]:
        from prepkit import planner

        facts = Facts(model=model, env=envs[0][0], loaders=cluster.declared_loaders)
        supposed = asked if asked.optimizer is not None else evolve(asked, optimizer=AdamW(lr=_RATE))
        checked = evolve(checked, supposed="" if supposed == asked else ", and supposing AdamW")
        costs = planner.plan(supposed, facts).map(planner.costs).value_or(None)
    return _Asked(evolve(checked, fine=fine, unknown=unknown, costs=costs), said)


def _named_model(one: Found, imported: Imported) -> tuple[ModelFacts | None, str]:
    """Facts of the model that a file names, from a folder beside it or the hub's cache; or why there are none."""
    from prepkit.formats.models import folder

    name = imported.model
    if name is None:
        return None, ""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return None, f"it names {name}, which lies elsewhere; add --model {name}"
    beside = Path(one.path).parent / name
    try:
        return folder.read(beside if beside.is_dir() else cli_refusal.place(name)).model, ""
    except folder.NotKnown as error:
        return None, f"it names {name}: {error}"


def _sorted(checked: Checked, placed: tuple[tuple[FilePlace, Finding], ...]) -> Checked:
    """Return what is wrong, and what is right for the library whose file it is."""
    from prepkit.rules import LAW

    if checked.found.kind == "prepkit":
        return evolve(checked, findings=placed)
    lawful = {rule.id for rule in LAW if rule.lawful}
    return evolve(
        checked,
        findings=tuple(pair for pair in placed if pair[1].rule not in lawful),
        beyond=tuple(pair for pair in placed if pair[1].rule in lawful),
    )


def _with_origin(finding: Finding, written: tuple[Origin, ...]) -> Finding:
    if finding.origin or not finding.where.startswith("config."):
        return finding
    return evolve(finding, origin=str(origin_of(written, finding.where, finding.what) or ""))


def _environments(
    cluster: Cluster, imported: Imported, sizes: tuple[int, ...]
) -> tuple[tuple[Env, frozenset[str]], ...]:
    """What is declared of the cluster, by the command line, the scripts that start it and the file, in this order."""
    given: dict[str, Any] = {
        "device": cluster.device or imported.device,
        "per_node": cluster.per_node or imported.per_node,
        "memory": cluster.memory,
        "host_memory": cluster.host_memory,
        "torch": cluster.torch,
    }
    given = {name: value for name, value in given.items() if value is not None}
    every = cluster.sizes or sizes or ((imported.world_size,) if imported.world_size else ())
    if not every:
        return ((Env.declare(world_size=1, **given), frozenset(given)),)
    return tuple((Env.declare(world_size=size, **given), frozenset({"world_size", *given})) for size in every)


def _placed(one: Found, findings: tuple[Finding, ...]) -> tuple[tuple[FilePlace, Finding], ...]:
    if not findings:
        return ()
    suffix = Path(one.path).suffix.lower()
    try:
        text = Path(one.path).read_text(encoding="utf-8-sig") if Path(one.path).is_file() and suffix in READERS else ""
    except (OSError, UnicodeDecodeError):
        text = ""
    return tuple((place_of(finding, one.path, text, suffix), finding) for finding in findings)


# --- telling ---------------------------------------------------------------------------------------------------------


class _Told:
    """Findings as they are printed: of those of a kind the first, with the number of the others at the end."""

    def __init__(self) -> None:
        self.again: Counter[tuple[str, str]] = Counter()
        self.hidden = 0

    def say(self, one: Checked) -> None:
        """Print what is new in the findings of a file."""
        for place, finding in one.findings:
            kind = (finding.rule, finding.what)
            self.again[kind] += 1
            if self.again[kind] > 1:
                continue
            if len(self.again) > _SHOWN:
                self.hidden += 1
                continue
            say(line_of(place, finding), err=True)


def line_of(place: FilePlace, finding: Finding) -> str:
    """A finding in two lines, the place first, as editors and terminals follow it."""
    what = f"{finding.severity.value} {finding.rule}: {finding.what}"
    elsewhere = [finding.where] if str(place) not in finding.where else []
    elsewhere += [f"from {finding.origin}"] if finding.origin and f"{place.file}:" not in finding.origin else []
    also = f" ({', '.join(elsewhere)})" if elsewhere else ""
    return f"{place}: {what}{also}\n  fix: {finding.fix}"


def _summary(checked: list[Checked], told: _Told, paths: tuple[str, ...]) -> Iterator[str]:
    repeated = sum(told.again.values()) - len(told.again)
    if repeated or told.hidden:
        rest = f"{told.hidden} more kinds of findings, and " if told.hidden else ""
        yield f"{rest}{repeated} more findings of the kinds above: prepkit check --json {' '.join(paths)}"
    if not checked:
        yield f"nothing here that prepkit knows: {', '.join(paths)}"
        return
    yield from _taken(checked)
    bad = [one for one in checked if one.wrong]
    warned = [one for one in checked if one.findings and not one.wrong]
    counts = (("wrong", len(bad)), ("with warnings", len(warned)), ("fine", len(checked) - len(bad) - len(warned)))
    yield ", ".join(f"{count} {'file' if count == 1 else 'files'} {name}" for name, count in counts if count) + (
        f": up to {max(one.fine for one in checked)} rules of a file hold"
    )
    for one in [one for one in checked if one.costs is not None][:_COSTS]:
        yield f"{one.found.path}, with {one.model}{one.supposed}:"
        yield textwrap.indent(str(one.costs), "  ")
    yield from _not_known(checked)


def _taken(checked: list[Checked]) -> Iterator[str]:
    if len(checked) <= _SHOWN:
        for one in checked:
            yield f"took {one.found.path} for {one.found.kind} ({one.found.why})"
        return
    for kind, count in Counter(one.found.kind for one in checked).most_common():
        first = next(one.found for one in checked if one.found.kind == kind)
        yield f"took {count} {'file' if count == 1 else 'files'} for {kind}, such as {first.path} ({first.why})"


def _not_known(checked: list[Checked]) -> Iterator[str]:
    most: dict[str, int] = {}
    for one in checked:
        for what, count in one.unknown.items():
            most[what] = max(most.get(what, 0), count)
    absent = {one.absent: one for one in checked if one.absent}
    if most or absent or any(one.beyond for one in checked):
        yield "cannot know here:"
    for why, one in list(absent.items())[:_SHOWN]:
        yield f"  {one.found.path}: {why}"
    yield from unknown_lines(most)
    beyond = [pair for one in checked for pair in one.beyond]
    kinds: dict[str, list[tuple[FilePlace, Finding]]] = {}
    for place, finding in beyond:
        kinds.setdefault(finding.what if finding.rule != _MISSING else finding.rule, []).append((place, finding))
    for pairs in list(kinds.values())[:_SHOWN]:
        (place, finding), more = pairs[0], len(pairs) - 1
        yield f"  {place}: {finding.what}{f' (and {more} more)' if more else ''}"


def unknown_lines(unknown: Mapping[str, int]) -> Iterator[str]:
    """Yield what is not known, the number of rules that ask for it, and what tells it; what most ask for first."""
    for what, count in sorted(unknown.items(), key=lambda pair: -pair[1]):
        yield f"  {what}: {count} {'rule asks' if count == 1 else 'rules ask'} for it; {tells(what)}"


def unknown_in(plan: Plan) -> Mapping[str, int]:
    """Return what rules would have to know beside the model and the cluster of a plan, and how many would."""
    from prepkit.rules.without_model import ask

    facts = plan.facts
    known = frozenset(facts.env.assumed) or frozenset(fields_dict(Env))  # declared, or looked at
    answers = ask(plan.config, facts.env, known, facts.model)
    seen = {
        "the optimizer": facts.optimizer is not None or plan.config.optimizer is not None,
        "the scheduler": facts.scheduler is not None,
        "the loaders": bool(facts.loaders),
        "the checkpoint": facts.checkpoint is not None or not isinstance(plan.config.weights, LoadWeights),
    }
    return Counter(what for _, what in answers.unasked if not seen.get(what))


def data_of(checked: Iterable[Checked]) -> dict[str, Any]:
    """Everything as JSON data: each finding with its place, each file with what it was taken for."""
    from prepkit import codec

    def told(place: FilePlace, finding: Finding) -> dict[str, Any]:
        return {**codec.to_data(finding), "file": place.file, "line": place.line, "column": place.column}

    every = tuple(checked)
    return {
        "findings": [told(*pair) for one in every for pair in one.findings],
        "cannot_know": [told(*pair) for one in every for pair in one.beyond],
        "files": [
            {"file": one.found.path, "kind": one.found.kind, "why": one.found.why}
            | {"rules_that_hold": one.fine, "not_known": dict(one.unknown), "model": one.model, "absent": one.absent}
            | ({} if one.costs is None else {"costs": one.costs.data()})
            for one in every
        ],
    }
