"""``prepkit check``: finds by itself what lies there, and says of each file what is wrong, fine, or not to be known."""

from __future__ import annotations

import difflib
import functools
import os
import re
import stat
import sys
import textwrap
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import fields_dict

from prepkit.cli import plan_files as cli_refusal
from prepkit.cli.examined import MISSING, Checked, examined
from prepkit.cli.options import Cluster
from prepkit.cli.terminal import say, say_as_it_is, say_json
from prepkit.config import LoadWeights
from prepkit.facts import Env
from prepkit.findings import Finding, PlanRejected, Severity, errors
from prepkit.findings.text import with_names
from prepkit.formats.found import files_found
from prepkit.formats.importers import IMPORTERS
from prepkit.formats.importers.source import READERS
from prepkit.formats.importers.source import read as read_source
from prepkit.formats.places import FilePlace, place_of

if TYPE_CHECKING:
    from prepkit.plan import Plan

_COSTS = 3
"""Plans whose memory is told."""
_SHOWN = 12
"""Findings, and names of files, on one screen; those of a kind count as one."""
_TELLS = {
    "the model": "add --model FOLDER, with its config.json, or --model PKG.MOD:FACTORY, a function that returns it",
    "the number of processes": "add --world-size N",
    "the processes of a node": "add --per-node N",
    "the device type": "add --device cuda",
    "the version of torch": "add --torch VERSION",
    "the optimizer": "add --optimizer adamw, or run prepkit audit SCRIPT, where it trains",
    "the samples that a rank reads at once": "add --batch-size N",
}
"""What a rule would have to know, and what tells it."""
_ELSEWHERE = "run prepkit audit SCRIPT, where it trains"


def tells(what: str) -> str:
    """Return what would tell what is not known here."""
    return _TELLS.get(what, _ELSEWHERE)


def check_files(paths: tuple[str, ...], cluster: Cluster, kind: str | None, as_json: bool) -> NoReturn:
    """The command without a model: findings as they are made, then what is fine, and what cannot be known here."""
    told, checked = _Told(), []
    for one in examined(paths, cluster, kind):
        checked.append(one)
        if not as_json:
            told.say(one)
    if as_json:
        say_json({**data_of(checked), "passed_by": _passed_by(checked, paths)})
    else:
        say(with_names("\n".join(_summary(checked, told, paths)), (*(one.found.path for one in checked), *paths)))
    sys.exit(1 if any(one.wrong for one in checked) else 0)


def mend_files(paths: tuple[str, ...], cluster: Cluster, kind: str | None, as_diff: bool) -> None:
    """Mend what is safe in every config; or show it, and end the command, with 1 where there is something to mend.

    What is found and not mended is told beside it: a file that stays as it is need not be fine.
    """
    from prepkit.formats.edits import key_of, mended, said_of

    wrong = {
        one.found.path: errors(tuple(finding for _, finding in one.findings)) for one in examined(paths, cluster, kind)
    }
    changed, ended, seen = 0, set(), set[str]()
    for one in sorted(files_found(paths, kind), key=lambda one: Path(one.path).is_symlink()):
        real = os.path.realpath(one.path)
        if one.sort != "config" or one.kind not in IMPORTERS or real in seen:
            continue
        seen.add(real)
        source = cli_refusal.attempt(functools.partial(read_source, one.path))
        if isinstance(source, PlanRejected):
            continue
        after, gone = mended(source, one.kind, wrong.get(one.path, ()))
        name, keys = with_names(one.path, (one.path,)), ", ".join(map(key_of, gone))
        if gone and not _within(one.path, paths):
            there = with_names(os.path.relpath(real), (os.path.relpath(real),))
            say(f"{name} is a link to {there}, which is not in {_given(paths)}, and is left as it is: {keys}", err=True)
            continue
        if gone and not _writable(one.path):
            say(f"{name} may not be written, and is left as it is: {keys}", err=True)
            continue
        changed += bool(gone)
        mark = "\ufeff" if gone and Path(one.path).read_bytes().startswith(BOM_UTF8) else ""
        if gone and as_diff:
            say_as_it_is("".join(_patch(one.path, mark + source.text, mark + after.text)))
        elif gone:
            cli_refusal.write(mark + after.text, one.path)
            say(f"mended {name}: {keys}", err=True)
        ended |= {(real, *said_of(finding)) for finding in gone}
    left = [
        with_names(f"{place} {finding.rule}", (place.file,))
        for one in examined(paths, cluster, kind)
        for place, finding in one.findings
        if (os.path.realpath(one.found.path), *said_of(finding)) not in ended
    ]
    if left:
        are = "finding is" if len(left) == 1 else "findings are"
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        say(f"{len(left)} {are} not mended: {', '.join(left[:_SHOWN])}{more}", err=True)
    if as_diff:
        sys.exit(1 if changed else 0)


def _within(path: str, paths: tuple[str, ...]) -> bool:
    """Whether the file was named itself, or lies in one of the folders that were, wherever links lead."""
    roots = [Path(one).resolve() for one in paths if Path(one).is_dir()]
    return path in paths or any(Path(path).resolve().is_relative_to(root) for root in roots)


def _given(paths: tuple[str, ...]) -> str:
    return ", ".join(with_names(path, (path,)) for path in paths)


def _writable(path: str) -> bool:
    """Whether its owner lets the file be written; root could write any."""
    return bool(Path(path).stat().st_mode & stat.S_IWUSR) and os.access(path, os.W_OK)


def _patch(path: str, before: str, after: str) -> Iterator[str]:
    """Lines that ``patch -p1`` and ``git apply`` take, from the folder in which the command ran."""
    named = os.path.relpath(os.path.realpath(path) if Path(path).is_symlink() else path)
    named = Path(path).resolve().as_posix().lstrip("/") if named.startswith("..") else Path(named).as_posix()
    one, other = (_header_name(f"{side}/{named}") for side in "ab")
    was, now = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (before, after))
    for line in difflib.unified_diff(was, now, one, other):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _header_name(name: str) -> str:
    """A file's name as git writes it: in quotes where it has odd letters, and ended by a tab where it has spaces."""
    if re.search(r'[\x00-\x1f\x7f"\\]', name):
        odd = {"\n": "\\n", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
        spelt = re.sub(r'[\x00-\x1f\x7f"\\]', lambda one: odd.get(one[0]) or f"\\{ord(one[0]):03o}", name)
        return f'"{spelt}"'
    return f"{name}\t" if " " in name else name


# --- telling ---------------------------------------------------------------------------------------------------------


class _Told:
    """Findings as they are printed: of those of a kind the first, with the number of the others at the end."""

    def __init__(self) -> None:
        self.again: Counter[tuple[str, str]] = Counter()
        self.hidden = 0

    def say(self, one: Checked) -> None:
        """Print what is new in the findings of a file."""
        for place, finding in one.findings:
            kind = (finding.rule, about(finding))
            self.again[kind] += 1
            if self.again[kind] > 1:
                continue
            if len(self.again) > _SHOWN:
                self.hidden += 1
                continue
            say(line_of(place, finding))


def line_of(place: FilePlace, finding: Finding) -> str:
    """A finding in two lines, the place first, as editors and terminals follow it."""
    what = f"{finding.severity.value} {finding.rule}: {about(finding)}"
    elsewhere = [finding.where] if str(place) not in finding.where else []
    elsewhere += [f"from {finding.origin}"] if finding.origin and f"{place.file}:" not in finding.origin else []
    also = f" ({', '.join(elsewhere)})" if elsewhere else ""
    return with_names(f"{place}: {what}{also}\n  fix: {finding.fix}", (place.file,))


def lines_in(file: str) -> Callable[[Finding], str]:
    """Return what writes a finding about a config as ``line_of`` does, at its place in the file."""
    placed = places_in(file)
    return lambda finding: line_of(placed(finding), finding)


def places_in(file: str) -> Callable[[Finding], FilePlace]:
    """Return what knows where in a config the thing is that a finding is about."""
    suffix = Path(file).suffix.lower()
    readable = suffix in READERS and Path(file).is_file()
    text = Path(file).read_text(encoding="utf-8-sig", errors="replace") if readable else ""
    return lambda finding: place_of(finding, file, text, suffix)


def data_in(file: str) -> Callable[[Finding], dict[str, Any]]:
    """Return what makes data of a finding about a config, with its place in the file."""
    placed = places_in(file)
    return lambda finding: placed_data(placed(finding), finding)


def placed_data(place: FilePlace, finding: Finding) -> dict[str, Any]:
    """A finding with its place as JSON data."""
    from prepkit import codec

    return {**codec.to_data(finding), "file": place.file, "line": place.line, "column": place.column}


def about(finding: Finding) -> str:
    """What is wrong, and with which key, where the finding is about one of another library's file."""
    _, _, key = finding.where.rpartition(" ")
    named = _PLACED.match(finding.where) and key and not finding.what.startswith(key)
    return f"{key}: {finding.what}" if named else finding.what


_PLACED = re.compile(r".*:\d+:\d+ ")


def _summary(checked: list[Checked], told: _Told, paths: tuple[str, ...]) -> Iterator[str]:
    repeated = sum(told.again.values()) - len(told.again)
    if repeated or told.hidden:
        rest = f"{told.hidden} more kinds of findings, and " if told.hidden else ""
        yield f"{rest}{repeated} more findings of the kinds above: prepkit check --json {' '.join(paths)}"
    if not checked:
        yield f"nothing here that prepkit knows: {', '.join(paths)}"
        return
    yield from _taken(checked)
    if passed := _passed_by(checked, paths):
        more = f" and {len(passed) - _SHOWN} more" if len(passed) > _SHOWN else ""
        which = "whose config it is; name it" if len(passed) == 1 else "whose configs they are; name one"
        yield f"passed by {', '.join(passed[:_SHOWN])}{more}: nothing tells {which} alone, with --from LIBRARY"
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


def _passed_by(checked: Iterable[Checked], paths: tuple[str, ...]) -> list[str]:
    """Files that were named, and that nothing tells to be of any concern."""
    taken = {one.found.path for one in checked}
    return [path for path in paths if path not in taken and not Path(path).is_dir()]


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
        kinds.setdefault(finding.what if finding.rule != MISSING else finding.rule, []).append((place, finding))
    for pairs in list(kinds.values())[:_SHOWN]:
        (place, finding), more = pairs[0], len(pairs) - 1
        tells = f"; {finding.fix[:1].lower()}{finding.fix[1:]}" if finding.severity is Severity.NOTE else ""
        yield f"  {place}: {finding.what}{f' (and {more} more)' if more else ''}{tells}"


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
        "the loaders": any(one.length is not None or one.sampler != "sequential" for one in facts.loaders),
        "the checkpoint": facts.checkpoint is not None or not isinstance(plan.config.weights, LoadWeights),
    }
    return Counter(what for _, what in answers.unasked if not seen.get(what))


def data_of(checked: Iterable[Checked]) -> dict[str, Any]:
    """Everything as JSON data: each finding with its place, each file with what it was taken for."""
    every = tuple(checked)
    return {
        "findings": [placed_data(*pair) for one in every for pair in one.findings],
        "cannot_know": [placed_data(*pair) for one in every for pair in one.beyond],
        "files": [
            {"file": one.found.path, "kind": one.found.kind, "why": one.found.why}
            | {"rules_that_hold": one.fine, "not_known": dict(one.unknown), "model": one.model, "absent": one.absent}
            | ({} if one.costs is None else {"costs": one.costs.data()})
            for one in every
        ],
    }
