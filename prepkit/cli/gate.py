"""``prepkit gate``: what ``prepkit check`` finds, in the formats of CI, with a baseline, exceptions and policies."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections import Counter
from datetime import date, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import click

from prepkit import codec, rules
from prepkit.cli import plan_files as cli_files
from prepkit.cli.check import about, line_of, placed_data
from prepkit.cli.examined import examined
from prepkit.cli.options import Cluster, cluster_options, kind_option, policy_option
from prepkit.cli.terminal import say, say_json
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.findings.text import shorter
from prepkit.formats import exceptions
from prepkit.formats.found import found
from prepkit.formats.places import FilePlace

MOST_RESULTS = 5_000
"""Results of one run that code scanning of GitHub shows; it refuses more than 25,000."""
LONGEST_MESSAGE = 1_000
"""Letters of a result's message, so that the most results, compressed, are within the 10 MB that it takes."""
MOST_ANNOTATIONS = 10
"""Annotations of each level that GitHub shows of one step."""
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
CRASHED = "check.crashed"
"""The rule of files at which prepkit itself fails."""
_NEVER_KNOWN = ("policy.broken", "policy.unasked")
"""Rules that no baseline takes: what was not asked has not passed."""
_Placed = tuple[FilePlace, Finding]


@click.command(short_help="Check for CI: SARIF, JUnit, annotations, a baseline.")
@click.argument("paths", metavar="[PATH ...]", type=click.Path(exists=True), nargs=-1)
@cluster_options
@kind_option
@policy_option
@click.option("--format", "form", type=click.Choice(("text", "json", "junit", "sarif", "github")), default="text")
@click.option("--strict", is_flag=True, help="End with 1 where there is an error; without it findings are advice.")
@click.option("--baseline", type=click.Path(dir_okay=False), help="File of findings that are known already.")
@click.option("--write-baseline", is_flag=True, help="Write what is found now into the baseline.")
@click.option("--on", "day", type=click.DateTime(["%Y-%m-%d"]), help="Judge exceptions as of this day; else today.")
def gate(
    paths: tuple[str, ...],
    cluster: Cluster,
    kind: str | None,
    policies: tuple[str, ...],
    form: str,
    strict: bool,  # as click calls it
    baseline: str | None,
    write_baseline: bool,
    day: datetime | None,
) -> None:
    """Check what lies at each PATH, as prepkit check does without a model, for CI.

    A finding is excepted until a day by a comment beside it: # prepkit: ignore[RULE] until 2027-01-01 by WHO because
    REASON. Policies are asked of the plan files among the paths. Exit codes: 0 fine, or findings without --strict; 1 an
    error that neither the baseline nor an exception knows, with --strict; a policy that cannot be read, or a file at
    which prepkit itself fails; 2 used wrongly.
    """
    if write_baseline and baseline is None:
        raise click.UsageError("--write-baseline needs --baseline FILE")
    asked = _told_by_something(paths or (".",), kind)
    today = day.date() if day else date.today()
    result, stopped = _gathered(asked, cluster, kind, policies, today)
    every, excepted = result.standing, result.excepted
    if write_baseline and baseline is not None and not stopped:
        known = sorted(print_of(*pair, _folder_of(baseline)) for pair in every if pair[1].rule not in _NEVER_KNOWN)
        cli_files.write(json.dumps({"known": known}, indent=1) + "\n", baseline)
        say(f"wrote {baseline}, which knows {len(known)} finding{'s' * (len(known) != 1)}", err=True)
        sys.exit(0)
    new = (*stopped, *_new(every, baseline))
    _tell(form, new, len(stopped) + len(every) - len(new), excepted)
    sys.exit(1 if stopped or (strict and any(finding.severity is Severity.ERROR for _, finding in new)) else 0)


def _told_by_something(paths: tuple[str, ...], kind: str | None) -> tuple[str, ...]:
    """Return the paths that are checked: of several files those that something tells to be a config, or a script."""
    if kind or len(paths) == 1:
        return paths
    passed_by = [path for path in paths if not Path(path).is_dir() and found(path) is None]
    if passed_by:
        say(f"passed by, since nothing tells what they are: {', '.join(passed_by)}; --from KIND says it", err=True)
    return tuple(path for path in paths if path not in passed_by)


def _gathered(
    asked: tuple[str, ...], cluster: Cluster, kind: str | None, policies: tuple[str, ...], today: date
) -> tuple[exceptions.Sorted, tuple[_Placed, ...]]:
    """Every finding of the files and, of plan files, of the policies, sorted by the exceptions that there are.

    Beside it what nothing excepts and no baseline knows: policies that cannot be read, and files where prepkit fails.
    """
    from prepkit.formats.policy import Policy, read_policies, refusals_of
    from prepkit.rules import by_id

    read = cli_files.attempt(lambda: read_policies(policies))
    policy = Policy() if isinstance(read, PlanRejected) else read
    stopped = [(_place_in(finding), finding) for finding in read.findings] if isinstance(read, PlanRejected) else []
    every: list[_Placed] = []
    exempt: list[exceptions.Exempt] = []
    judged = 0
    checked = tuple(examined(asked, cluster, kind)) if asked else ()
    for one in checked:
        crashed = [pair for pair in one.findings if pair[1].rule == CRASHED]
        stopped += crashed
        every += () if crashed else one.findings
        every += (pair for pair in one.beyond if pair[1].rule == cli_files.UNASKED)
        own, wrong = exceptions.comments(one.found.path, _text(one.found.path))
        exempt += own
        every += wrong
        if one.found.sort == "plan" and policy.asks:
            said = cli_files.attempt(functools.partial(refusals_of, policy, one.found.path))
            judged += not isinstance(said, PlanRejected)
            every += () if isinstance(said, PlanRejected) else said  # why it cannot be read is told already
    if policy.asks and not judged:
        every.append(_unjudged(policies, tuple(one.found.path for one in checked if one.found.sort == "config")))
    # those of a policy are about every file of a repository, and not about these alone
    ids = (*by_id(), *policy.asks)
    exempt += (one for one in policy.exempt if one.rule not in ids or any(one.covers(*pair) for pair in every))
    return exceptions.sort(tuple(dict.fromkeys(every)), tuple(exempt), today, ids), tuple(stopped)


def _place_in(finding: Finding) -> FilePlace:
    """Where a finding is that names its file, and line and column where they are known."""
    told = re.fullmatch(r"(.+?):(\d+):(\d+)", finding.where)
    return FilePlace(told[1], int(told[2]), int(told[3])) if told else FilePlace(finding.where, 1, 1)


def _unjudged(policies: tuple[str, ...], configs: tuple[str, ...]) -> _Placed:
    """That no plan was there to be asked: a policy says nothing of a config."""
    place = FilePlace(policies[0], 1, 1)
    words = " ".join(f"--policy {file}" for file in policies)
    what = "no plan was judged: a policy is asked of plans, and there is no plan file here that can be read"
    make = f"prepkit plan {configs[0] if configs else 'CONFIG'} --model PKG.MOD:FACTORY -o plan.json {words}"
    return place, rules.found(
        "policy.unasked", str(place), what, f"Make one: {make}, then: prepkit gate plan.json {words}"
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig", errors="replace")
    except OSError:
        return ""


def _tell(form: str, new: tuple[_Placed, ...], known: int, excepted: tuple[_Placed, ...]) -> None:
    match form:
        case "json":
            data = {"findings": [placed_data(*pair) for pair in new], "known": known}
            say_json(data | {"excepted": [placed_data(*pair) for pair in excepted]})
        case "sarif":
            say_json(sarif(new, excepted))
        case "junit":
            say(junit(new, excepted))
        case "github":
            if text := workflow_commands(new):
                say(text)
        case _:
            also = f", {len(excepted)} excepted" if excepted else ""
            accepted = (f"{place}: {finding.rule} {finding.origin}" for place, finding in excepted)
            say("\n".join((*(line_of(*pair) for pair in new), *accepted, f"{len(new)} new, {known} known{also}")))


# --- the baseline ----------------------------------------------------------------------------------------------------


def print_of(place: FilePlace, finding: Finding, root: Path | None = None) -> str:
    """Return what stays of a finding when lines are added above it: file, rule, key and what is wrong.

    Below ``root``, however the command line spells the file; without one, as it is spelt.
    """
    file = Path(place.file).as_posix() if root is None else _below(place.file, root)
    where, what = re.sub(r":\d+:\d+", "", finding.where), finding.what
    if root is not None:
        named = _spelt(place.file, root)
        where, what = (named.sub(lambda found: "" if found[0].endswith("/") else file, text) for text in (where, what))
        what = re.sub(r"\b(lines?|column) \d+", r"\1", what)
    return sha256("\0".join((file, finding.rule, where, what)).encode()).hexdigest()[:32]


@functools.cache
def _spelt(file: str, root: Path) -> re.Pattern[str]:
    """The file as it was spelt, and the beginning of paths below the root."""
    return re.compile(rf"(?<![\w./-]){re.escape(file)}(?![\w/-])|{re.escape(str(root))}/")


def _below(file: str, root: Path) -> str:
    """The file from the root, by a path that names no folder twice; links of its folders are followed, not its own."""
    real = Path(file).parent.resolve() / Path(file).name
    return Path(os.path.relpath(real, root)).as_posix()


def _folder_of(baseline: str) -> Path:
    return Path(baseline).resolve().parent


def _new(every: tuple[_Placed, ...], baseline: str | None) -> tuple[_Placed, ...]:
    """Return the findings that the baseline does not know: of those that are alike it knows as many as it holds."""
    if baseline is None:
        return every
    left = _known(baseline)
    new: list[_Placed] = []
    for pair in every:
        # a baseline that was written before paths began at its folder has them as they were spelt
        prints = (print_of(*pair, _folder_of(baseline)), print_of(*pair))
        known = next((one for one in prints if left[one]), None)
        if known is None:
            new.append(pair)
        else:
            left[known] -= 1
    return tuple(new)


def _known(baseline: str) -> Counter[str]:
    if not Path(baseline).exists():
        say(f"there is no {baseline}, so that nothing is known; --write-baseline writes it", err=True)
        return Counter()
    try:
        known = json.loads(codec.read_text(baseline))["known"]
        if isinstance(known, list):
            return Counter(map(str, known))
    except (PlanRejected, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise click.UsageError(f"{baseline} is no baseline: write it anew with --write-baseline")


# --- SARIF -----------------------------------------------------------------------------------------------------------


def sarif(findings: tuple[_Placed, ...], excepted: tuple[_Placed, ...] = ()) -> dict[str, Any]:
    """SARIF 2.1.0, within what code scanning takes; the errors come first where there are too many."""
    order = [Severity.ERROR, Severity.WARNING, Severity.NOTE]
    first = sorted(findings, key=lambda pair: order.index(pair[1].severity))
    kept = [*((pair, False) for pair in first), *((pair, True) for pair in excepted)][:MOST_RESULTS]
    ids = sorted({finding.rule for (_, finding), _ in kept})
    driver = {"name": "prepkit", "rules": [_rule(rule) for rule in ids]}
    results = [_result(*pair, ids.index(pair[1].rule), accepted) for pair, accepted in kept]
    run: dict[str, Any] = {"tool": {"driver": driver}, "results": results}
    if left_out := len(findings) + len(excepted) - len(kept):
        text = f"{left_out:,} more findings than code scanning shows are left out: prepkit gate --format json has all"
        note = {"level": "warning", "message": {"text": text}}
        run["invocations"] = [{"executionSuccessful": True, "toolExecutionNotifications": [note]}]
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _rule(name: str) -> dict[str, Any]:
    from prepkit.rules import by_id

    known = by_id().get(name)
    said = {"id": name, "properties": {"tags": ["training"]}}
    if known is None:
        return said
    return said | {"shortDescription": {"text": known.summary}, "help": {"text": known.fix}}


def _result(place: FilePlace, finding: Finding, index: int, accepted: bool) -> dict[str, Any]:
    region = {"startLine": place.line, "startColumn": place.column}
    where = {"artifactLocation": {"uri": _uri(place.file)}, "region": region}
    result = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": _message(finding)},
        "locations": [{"physicalLocation": where}],
        "partialFingerprints": {"prepkit/v1": print_of(place, finding)},
    }
    if accepted:
        result["suppressions"] = [{"kind": "inSource", "justification": finding.origin}]
    return result


def _message(finding: Finding) -> str:
    fix = shorter(f" Fix: {finding.fix}", LONGEST_MESSAGE // 2)
    return shorter(_sentence(finding), LONGEST_MESSAGE - len(fix)) + fix


def _sentence(finding: Finding) -> str:
    said = about(finding)
    return said if said.endswith((".", "!", "?", ":")) else f"{said}."


def _with_fix(finding: Finding) -> str:
    return f"{_sentence(finding)} Fix: {finding.fix}"


def _uri(file: str) -> str:
    """A file's name as a reference of RFC 3986, relative to where the command runs."""
    from urllib.parse import quote

    return quote(Path(file).as_posix(), safe="/,")


# --- JUnit and annotations -------------------------------------------------------------------------------------------


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(findings: tuple[_Placed, ...], excepted: tuple[_Placed, ...] = ()) -> str:
    """JUnit's XML: a test case per finding, which failed where it is an error.

    It was skipped where the error is excepted, and where it says that nothing could be asked.
    """
    failed = sum(finding.severity is Severity.ERROR for _, finding in findings)
    skipped = len(excepted) + sum(finding.rule == cli_files.UNASKED for _, finding in findings)
    count = len(findings) + len(excepted)
    lines = [f'<testsuite name="prepkit" tests="{count}" failures="{failed}" skipped="{skipped}">']
    for place, finding in findings:
        kind = (
            "failure" if finding.severity is Severity.ERROR else "skipped" if finding.rule == cli_files.UNASKED else ""
        )
        message = _quoted(_with_fix(finding))
        lines.append(_case(place, finding, f"<{kind} message={message}/>" if kind else ""))
    lines += (_case(place, finding, f"<skipped message={_quoted(finding.origin)}/>") for place, finding in excepted)
    return "\n".join(('<?xml version="1.0" encoding="UTF-8"?>', *lines, "</testsuite>"))


def _case(place: FilePlace, finding: Finding, inside: str) -> str:
    head = f"  <testcase classname={_quoted(finding.rule)} name={_quoted(str(place))}"
    return f"{head}>{inside}</testcase>" if inside else f"{head}/>"


def _quoted(text: str) -> str:
    return quoteattr(_NOT_XML.sub("\ufffd", text))


def workflow_commands(findings: tuple[_Placed, ...]) -> str:
    """Commands of GitHub's workflows; of each level as many as are shown, and the number of the others."""
    lines: list[str] = []
    for severity in Severity:
        of_level = [pair for pair in findings if pair[1].severity is severity]
        more = len(of_level) - MOST_ANNOTATIONS
        shown = of_level if more <= 0 else of_level[: MOST_ANNOTATIONS - 1]
        lines += (_annotation(*pair) for pair in shown)
        if more > 0:
            level = {"note": "notice"}.get(severity.value, severity.value)
            lines.append(f"::{level} title=prepkit::and {more + 1} more: prepkit gate --format text")
    return "\n".join(lines)


def _annotation(place: FilePlace, finding: Finding) -> str:
    def escaped(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    file = escaped(place.file).replace(":", "%3A").replace(",", "%2C")
    level = {"note": "notice"}.get(finding.severity.value, finding.severity.value)
    where = f"file={file},line={place.line},col={place.column},title={finding.rule}"
    return f"::{level} {where}::{escaped(_with_fix(finding))}"
