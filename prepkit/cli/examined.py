"""Configs, scripts and plan files that lie somewhere, each with what is wrong with it, fine, or not to be known."""

from __future__ import annotations

import functools
import json
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve, field, frozen

from prepkit import rules
from prepkit.cli import import_and_export as cli_import
from prepkit.cli import plan_files as cli_refusal
from prepkit.cli.options import Cluster
from prepkit.cli.terminal import say
from prepkit.codec import LARGEST
from prepkit.config import AdamW, Origin
from prepkit.config.origin import origin_of
from prepkit.facts import Env, Facts, ModelFacts
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.formats.found import Found, files_found, found
from prepkit.formats.importers import IMPORTERS
from prepkit.formats.importers.source import JSON, READERS, Imported, Source
from prepkit.formats.importers.source import read as read_source
from prepkit.formats.importers.training_arguments import read_options
from prepkit.formats.launch_findings import file_findings, script_findings, supposed
from prepkit.formats.launched_config import trained, two_places, with_options
from prepkit.formats.launches import Argument, LaunchLine, NamedFile, Script, makes, read_script
from prepkit.formats.places import FilePlace, place_of
from prepkit.formats.started import processes_said, started

if TYPE_CHECKING:
    from prepkit.planner.budget import Costs

MISSING = "import.missing-file"
"""The rule of files that others name, and that are not here."""
_RATE = 1e-3
"""A rate of learning, which costs nothing."""


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
    named: tuple[str, ...] = ()
    """Files that it names, and that were checked as a part of it."""
    model: str = ""
    """The model that the file names; its facts were read unless ``absent`` says why not."""
    absent: str = ""
    supposed: str = ""
    """What the costs suppose that the file does not say."""
    sizes: Mapping[int, int | None] = field(factory=dict)
    """Processes that scripts start with it, in all, to those of a node; empty where no script says."""
    costs: Costs | None = None
    """What a rank of its plan holds and sends, where model and number of processes are known."""

    @property
    def wrong(self) -> bool:
        """Whether it has an error."""
        return any(finding.severity is Severity.ERROR for _, finding in self.findings)


def examined(paths: tuple[str, ...], cluster: Cluster, kind: str | None = None) -> Iterator[Checked]:
    """Every file that is found, one after the other; a single file that is named is read whatever it is.

    DeepSpeed's JSON comes last, as what another file names is checked as a part of that one, with what it fills in;
    what is wrong with the JSON itself is told of the JSON, once.
    """
    founds = files_found(paths, kind)
    scripts = {one.path: read_script(one.path) for one in founds if one.sort == "script"}
    sizes, nodes, missing, more = _started(scripts.values())
    known = {_real(one.path) for one in founds}
    theirs = {_real(one.path): one for one in more if one.kind == "accelerate"}  # whatever else its keys would tell
    founds = [evolve(theirs.get(_real(one.path), one), path=one.path) for one in founds]
    founds += [theirs.get(_real(one.path)) or found(one.path) or one for one in more if _real(one.path) not in known]
    named = _Named.of(one for one in founds if one.kind == "deepspeed")

    def of(one: Found) -> Checked:
        if one.path in scripts:
            script = _script(one, scripts[one.path], missing.get(one.path, ()))
            script = _with_options(script, scripts[one.path], cluster)
            return named.held(_with_arguments(script, scripts[one.path], cluster))
        if one.sort == "plan":
            return _plan(one)
        if one.kind == "deepspeed":
            real = _real(one.path)
            alone = real not in named.by or real in sizes
            return named.told(_config(one, cluster, sizes.get(real, {}), kind) if alone else Checked(found=one))
        return named.held(_config(one, cluster, sizes.get(_real(one.path), {}), kind))

    for one in sorted(founds, key=lambda one: one.kind == "deepspeed"):
        try:
            checked = evolve(of(one), sizes=nodes.get(_real(one.path), {}))
            yield _made_before(checked, tuple(scripts.values()))
        except click.ClickException:
            raise
        except Exception as error:  # which loses no other file's findings
            yield Checked(found=one, findings=(_crashed(one.path, error),))


def _made_before(checked: Checked, scripts: tuple[Script, ...]) -> Checked:
    """The file without errors about others that are not here and that a script makes: whether it has, its run tells.

    Where no other error is left, what was not asked is told as that one thing, of which nothing is to be corrected.
    """
    made: dict[_Placed, _Placed] = {}
    for place, finding in checked.findings:
        name = _NO_FILE.match(finding.what) if finding.rule == MISSING else None
        by = next((script.path for script in scripts if name and makes(script, name[1])), None)
        if name and by:
            later = f"{name[1]} is not here, and {by} may make it before it is read"
            note = evolve(_not_here(finding.where, name[1]), what=later, severity=Severity.NOTE)
            made[place, finding] = place, note
    rest = evolve(checked, findings=tuple(pair for pair in checked.findings if pair not in made))
    told = tuple(made.values())
    if told and not rest.wrong and any(finding.rule == cli_refusal.UNASKED for _, finding in rest.beyond):
        known = tuple(pair for pair in rest.beyond if pair[1].rule != cli_refusal.UNASKED)
        (place, note), fix = told[0], f"Check it where it is made: prepkit check {checked.found.path}"
        what = f"{note.what}, so that no rule was asked about it"
        return evolve(
            rest, beyond=(*known, (place, rules.found(cli_refusal.UNASKED, note.where, what, fix)), *told[1:])
        )
    return evolve(rest, beyond=(*rest.beyond, *told))


_NO_FILE = re.compile(r"there is no file (\S+),")


def _crashed(file: str, error: Exception) -> _Placed:
    say("".join(traceback.format_exception(error)).rstrip(), err=True)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    failed = f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
    return FilePlace(file, 1, 1), rules.found("check.crashed", file, f"prepkit itself fails here: {failed}")


_Placed = tuple[FilePlace, Finding]


@frozen
class _Named:
    """Files that others name: what was found in them while those were checked, and which those are."""

    paths: Mapping[str, str]
    """Where each of them is to its path as it was found."""
    by: dict[str, list[str]] = field(factory=dict)
    findings: dict[str, list[_Placed]] = field(factory=dict)
    beyond: dict[str, list[_Placed]] = field(factory=dict)

    @classmethod
    def of(cls, founds: Iterable[Found]) -> _Named:
        """Return that nothing is known yet of these files."""
        return cls({_real(one.path): one.path for one in founds})

    def held(self, checked: Checked) -> Checked:
        """Return what is to be told of the file itself, and keep what lies in those that it names."""
        for name in checked.named:
            if (real := _real(name)) in self.paths:
                self.by.setdefault(real, []).append(checked.found.path)
        own, beyond = self._kept(checked.findings, self.findings), self._kept(checked.beyond, self.beyond)
        return evolve(checked, findings=own, beyond=beyond)

    def _kept(self, pairs: tuple[_Placed, ...], there: dict[str, list[_Placed]]) -> tuple[_Placed, ...]:
        own = []
        for place, finding in pairs:
            if (real := _real(place.file)) in self.paths:
                there.setdefault(real, []).append((evolve(place, file=self.paths[real]), finding))
            else:
                own.append((place, finding))
        return tuple(own)

    def told(self, checked: Checked) -> Checked:
        """Return the file with what was found in it already, every mistake once."""
        one, real = checked.found, _real(checked.found.path)
        if by := self.by.get(real):
            one = evolve(one, why=f"{', '.join(dict.fromkeys(by))} {'names' if len(by) == 1 else 'name'} it")
        found, beyond = self.findings.get(real, ()), self.beyond.get(real, ())
        return evolve(
            checked, found=one, findings=_once((*found, *checked.findings)), beyond=_once((*beyond, *checked.beyond))
        )


def _once(pairs: Iterable[_Placed]) -> tuple[_Placed, ...]:
    kept: dict[tuple[FilePlace, str, str], _Placed] = {}
    for place, finding in pairs:
        kept.setdefault((place, finding.rule, finding.what), (place, finding))
    return tuple(kept.values())


def _real(path: str) -> str:
    return str(Path(path).resolve())


def _started(
    scripts: Iterable[Script],
) -> tuple[
    dict[str, dict[int, str]], dict[str, dict[int, int | None]], dict[str, tuple[NamedFile, ...]], tuple[Found, ...]
]:
    """World sizes that scripts start a config with, and where; of each the processes of a node.

    Beside them the configs that are not there, and those that are.
    """
    sizes: dict[str, dict[int, str]] = {}
    nodes: dict[str, dict[int, int | None]] = {}
    missing: dict[str, tuple[NamedFile, ...]] = {}
    there: dict[str, Found] = {}
    for script in scripts:
        for launch in script.launches:
            begun = started(launch)
            processes = begun.processes
            for named in launch.configs:
                place = named.place
                if place is None:
                    if named.kind:  # others may be data, or written later
                        missing[script.path] = (*missing.get(script.path, ()), named)
                    continue
                why = "; ".join(filter(None, (f"{script.path} starts it", supposed(launch))))
                one = Found(path=place, sort="config", kind=named.kind, why=why) if named.kind else found(place)
                if one is None or one.sort != "config":
                    continue
                there.setdefault(place, evolve(one, why=why))
                if processes and not (place.endswith(".json") and trained(launch)):
                    sizes.setdefault(_real(place), {}).setdefault(processes, processes_said(script.path, launch))
                    nodes.setdefault(_real(place), {}).setdefault(processes, begun.per_node)
    return sizes, nodes, missing, tuple(there.values())


def _script(one: Found, script: Script, missing: tuple[NamedFile, ...]) -> Checked:
    said = (*script_findings(script), *two_places(script))
    findings = tuple((place_of(finding, one.path, "", ""), finding) for finding in said)
    beyond = tuple(
        (
            FilePlace(one.path, named.line, named.column),
            evolve(_not_here(f"{one.path}:{named.line}:{named.column}", named.path), severity=Severity.NOTE),
        )
        for named in missing
    )
    assumed = dict.fromkeys(filter(None, map(supposed, script.launches)))
    one = evolve(one, why="; ".join((one.why, *assumed)))
    return Checked(found=one, findings=findings, fine=_SCRIPT_RULES, beyond=beyond)


def _with_arguments(checked: Checked, script: Script, cluster: Cluster) -> Checked:
    """The script with what is wrong with the ``TrainingArguments`` that its lines give."""
    one = checked.found
    for launch in script.launches:
        if options := trained(launch):
            read = cli_refusal.attempt(functools.partial(read_options, one.path, options))
            processes = started(launch).processes
            found = _judged(one, cluster, read, {processes: processes_said(script.path, launch)} if processes else {})
            checked = evolve(
                checked,
                findings=_once((*checked.findings, *found.findings)),
                beyond=_once((*checked.beyond, *found.beyond)),
                fine=max(checked.fine, _SCRIPT_RULES + found.fine),
                unknown=dict(found.unknown) | dict(checked.unknown),
                named=(*checked.named, *found.named),
            )
    return checked


def _with_options(checked: Checked, script: Script, cluster: Cluster) -> Checked:
    """The script with what is wrong with a config of accelerate once options of a line have changed it.

    It is told of the option, as the file is right as it is.
    """
    for launch in script.launches:
        *configs, over = with_options(launch)
        named, processes = launch.config_file, started(launch).processes
        if not over or (named is not None and named.place is None):
            continue
        path = script.path if named is None or named.place is None else named.place
        file = Found(path=path, sort="config", kind="accelerate", why="")
        sizes = {processes: processes_said(script.path, launch)} if processes else {}
        sources = (Source(path, json.dumps(one, default=str), JSON) for one in configs)
        reads = (cli_refusal.attempt(functools.partial(_accelerate, source, launch)) for source in sources)
        before, after = (_judged(file, cluster, read, sizes) for read in reads)
        known = {(finding.rule, finding.what) for _, finding in (*before.findings, *before.beyond)}
        new = [finding for _, finding in after.findings if (finding.rule, finding.what) not in known]
        checked = evolve(checked, findings=_once((*checked.findings, *(_of_option(script, one, over) for one in new))))
    return checked


def _accelerate(source: Source, launch: LaunchLine) -> Imported:
    """A config of accelerate, with the model that the line gives to its script, where it lies beside."""
    model = next((str(one.value) for one in launch.arguments if one.name == "model_name_or_path"), None)
    imported = IMPORTERS["accelerate"].read(source)
    beside = model is not None and "$" not in model and (Path(source.path).parent / model).is_dir()
    return evolve(imported, model=model) if beside else imported


def _of_option(script: Script, finding: Finding, over: tuple[Argument, ...]) -> _Placed:
    """A finding as one about the option whose name, or value, it says."""
    said = f"{finding.where} {finding.what} {finding.fix}"
    option = next((one for one in over if one.name in said or str(one.value) in finding.what), over[0])
    where = f"{script.path}:{option.line}:{option.column} {option.typed}"
    here = "" if finding.rule.startswith("import.") else f" Here {option.typed} says it."
    placed = evolve(finding, where=where, origin="", fix=finding.fix.partition(" Here ")[0] + here)
    return FilePlace(script.path, option.line, option.column), placed


def _not_here(where: str, named: str) -> Finding:
    what = f"{named} is known when it runs" if re.search(r"[$`]", named) else f"{named} is not here"
    return rules.found(MISSING, where, what, f"Check it where it is: prepkit check {named}")


_SCRIPT_RULES = 8


def _plan(one: Found) -> Checked:
    from prepkit import codec
    from prepkit.cli.verdict import judge

    loaded = cli_refusal.attempt(lambda: codec.load_plan(one.path))
    if isinstance(loaded, PlanRejected):
        return _unread(one, loaded.findings)
    findings = judge(loaded.config, loaded.facts).findings
    inside = {finding: evolve(finding, where=_in_plan(one.path, finding.where), origin="") for finding in findings}
    placed = zip(_placed(one, tuple(inside.values())), inside, strict=True)  # what it was imported from lies elsewhere
    return Checked(found=one, findings=tuple((place, finding) for (place, _), finding in placed))


def _in_plan(file: str, where: str) -> str:
    """The path in a plan file of what a rule names in the config, or in the environment, of the plan."""
    above = {"config": "plan", "env": "plan.facts"}.get(where.partition(".")[0])
    return where if above is None else f"{file}:$.{above}.{where}"


def _config(one: Found, cluster: Cluster, sizes: Mapping[int, str], kind: str | None) -> Checked:
    read = cli_import.read(one.path, kind or one.kind or None)
    kind = read.kind if isinstance(read, Imported) else read.rest.kind if isinstance(read.rest, Imported) else one.kind
    checked = _judged(evolve(one, kind=kind or "nothing known"), cluster, read, sizes)
    if kind != "accelerate" or sizes or isinstance(read, PlanRejected):
        return checked
    alone = file_findings(one.path, read_source(one.path).data())
    return evolve(checked, findings=(*checked.findings, *_placed(one, alone)))


def _judged(one: Found, cluster: Cluster, read: Imported | PlanRejected, sizes: Mapping[int, str]) -> Checked:
    said = read.findings if isinstance(read, PlanRejected) else read.notes
    imported = read.rest if isinstance(read, PlanRejected) else read
    if not isinstance(imported, Imported):
        return _unread(one, said)
    wheres = [finding.where.partition(":$")[2] for finding in said]
    unread = tuple(f"config{where}" for where in wheres if where)
    asked = _asked(one, cluster, imported, sizes)
    theirs = (finding for finding in asked.said if finding.rule not in imported.seen_to)
    found = [finding for finding in theirs if not f"{finding.where}.".startswith(unread or ("\n",))]
    written = (_with_origin(finding, imported.written) for finding in dict.fromkeys((*said, *found)))
    ranks = {} if cluster.sizes else sizes
    if imported.world_size and not sizes and not cluster.sizes:  # a line of a script has said it otherwise
        ranks = {imported.world_size: processes_said(one.path)}
    every = tuple(_with_ranks(imported.worded(finding), ranks) for finding in written)
    return _sorted(evolve(asked.checked, found=one), _placed(one, every))


def _unread(one: Found, said: tuple[Finding, ...]) -> Checked:
    placed = _placed(one, said)
    checked = _sorted(Checked(found=one), placed)
    wrong = (place for place, finding in placed if finding.severity is Severity.ERROR and place.file == one.path)
    note = cli_refusal.unasked(one.path, told=checked.wrong)
    return evolve(checked, beyond=(*checked.beyond, (next(wrong, FilePlace(one.path, 1, 1)), note)))


@frozen
class _Asked:
    checked: Checked
    said: tuple[Finding, ...]


def _asked(one: Found, cluster: Cluster, imported: Imported, sizes: Mapping[int, str]) -> _Asked:
    """Return what every rule says that can be asked: with the model that the file names, or without one."""
    from prepkit.rules.without_model import ask

    envs = _environments(cluster, imported, sizes)
    model, absent, wrong = _named_model(one, imported)
    checked = Checked(found=one, named=imported.named, model=imported.model or "", absent=absent)
    configs = (imported.for_size(env.world_size if "world_size" in known else None) for env, known in envs)
    meant = tuple(map(cluster.with_optimizer, configs))
    every = tuple(ask(config, *known, model) for config, known in zip(meant, envs, strict=True))
    asked = meant[0]
    said = (*wrong, *(finding for answers in every for finding in answers.findings))
    fine = every[0].asked - len({finding.rule for finding in every[0].findings})
    unknown = Counter(what for _, what in every[0].unasked)
    costs = None
    if model is not None and "world_size" in envs[0][1]:
        from prepkit import planner

        filled = cluster.filled_by(imported)
        facts, made = Facts(model=model, env=envs[0][0]), filled.with_optimizer(asked)
        supposed = made if made.optimizer is not None else evolve(made, optimizer=AdamW(lr=_RATE))
        checked = evolve(checked, supposed="" if supposed == made else ", and supposing AdamW")
        facts = evolve(facts, loaders=filled.declared_loaders)
        costs = planner.plan(supposed, facts).map(planner.costs).value_or(None)
    return _Asked(evolve(checked, fine=fine, unknown=unknown, costs=costs), said)


def _named_model(one: Found, imported: Imported) -> tuple[ModelFacts | None, str, tuple[Finding, ...]]:
    """Facts of the model that a file names, from a folder beside it or the hub's cache; or why there are none.

    Beside it what is wrong with the model's own config.
    """
    from prepkit.formats.models import folder

    name = imported.model
    if name is None:
        return None, "", ()
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return None, f"it names {name}, which lies elsewhere; add --model {name}", ()
    beside = Path(one.path).parent / name
    try:
        return folder.read(beside if beside.is_dir() else cli_refusal.place(name)).model, "", ()
    except folder.Impossible as error:
        wrong = rules.found("model.sizes", error.where, error.what, error.fix)
        return None, f"it names {name}, whose sizes are wrong; correct them", (wrong,)
    except folder.NotKnown as error:
        return None, f"it names {name}: {error}", ()


def _sorted(checked: Checked, placed: tuple[tuple[FilePlace, Finding], ...]) -> Checked:
    """Return what is wrong, and what is right for the library whose file it is."""
    from prepkit.rules import LAW

    if checked.found.kind == "prepkit":
        return evolve(checked, findings=placed)
    lawful = {rule.id for rule in LAW if rule.lawful}
    return evolve(
        checked,
        findings=tuple(pair for pair in placed if pair[1].rule not in lawful),
        beyond=(*checked.beyond, *(pair for pair in placed if pair[1].rule in lawful)),
    )


def _with_origin(finding: Finding, written: tuple[Origin, ...]) -> Finding:
    if finding.origin or not finding.where.startswith("config."):
        return finding
    return evolve(finding, origin=str(origin_of(written, finding.where, finding.what) or ""))


def _with_ranks(finding: Finding, ranks: Mapping[int, str]) -> Finding:
    """The finding with the place that says how many ranks there are, where it counts them and lies elsewhere itself."""
    told = re.search(r"\b(\d{1,9}) ranks\b", finding.what)
    if told is None or (by := ranks.get(int(told[1]))) is None or by in f"{finding.where} {finding.origin}":
        return finding
    return evolve(finding, what=f"{finding.what.rstrip('.')}; {told[0]} by {by}.")


def _environments(
    cluster: Cluster, imported: Imported, sizes: Mapping[int, str]
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
    every = cluster.sizes or tuple(sizes) or ((imported.world_size,) if imported.world_size else ())
    if not every:
        return ((Env.declare(world_size=1, **given), frozenset(given)),)
    return tuple((Env.declare(world_size=size, **given), frozenset({"world_size", *given})) for size in every)


def _placed(one: Found, findings: tuple[Finding, ...]) -> tuple[tuple[FilePlace, Finding], ...]:
    if not findings:
        return ()
    here = _text(one.path)

    def placed(finding: Finding) -> FilePlace:
        place = place_of(finding, one.path, *here)
        return place if place.file == one.path else place_of(finding, place.file, *_text(place.file))

    return tuple((placed(finding), finding) for finding in findings)


def _text(path: str) -> tuple[str, str]:
    """The text of a config, and what it is read as; none where it cannot be read."""
    suffix = Path(path).suffix.lower()
    try:
        readable = suffix in READERS and Path(path).is_file() and Path(path).stat().st_size <= LARGEST
        return Path(path).read_text(encoding="utf-8-sig") if readable else "", suffix
    except (OSError, UnicodeDecodeError):
        return "", suffix
