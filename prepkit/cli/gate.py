"""``prepkit gate``: what ``prepkit check`` finds, in the formats of CI, with a baseline of what is known already."""

from __future__ import annotations

import json
import re
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import click

from prepkit.cli import plan_files as cli_files
from prepkit.cli.check import examined, line_of
from prepkit.cli.options import Cluster, cluster_options, kind_option
from prepkit.cli.terminal import say, say_json
from prepkit.findings import Finding, Severity
from prepkit.formats.found import found
from prepkit.formats.places import FilePlace

MOST_RESULTS = 25_000
"""Results of one run that code scanning of GitHub takes."""
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
_Placed = tuple[FilePlace, Finding]


@click.command(short_help="Check for CI: SARIF, JUnit, annotations, a baseline.")
@click.argument("paths", metavar="[PATH ...]", type=click.Path(exists=True), nargs=-1)
@cluster_options
@kind_option
@click.option("--format", "form", type=click.Choice(("text", "json", "junit", "sarif", "github")), default="text")
@click.option("--strict", is_flag=True, help="End with 1 where there is an error; without it findings are advice.")
@click.option("--baseline", type=click.Path(dir_okay=False), help="File of findings that are known already.")
@click.option("--write-baseline", is_flag=True, help="Write what is found now into the baseline.")
def gate(
    paths: tuple[str, ...],
    cluster: Cluster,
    kind: str | None,
    form: str,
    strict: bool,  # as click calls it
    baseline: str | None,
    write_baseline: bool,
) -> None:
    """Check what lies at each PATH, as prepkit check does without a model, for CI.

    Exit codes: 0 fine, or findings without --strict; 1 an error that the baseline does not know, with --strict; 2 used
    wrongly.
    """
    if write_baseline and baseline is None:
        raise click.UsageError("--write-baseline needs --baseline FILE")
    # a hook is handed every file that has changed: those that nothing tells to be a config are passed by
    asked = tuple(path for path in paths or (".",) if kind or Path(path).is_dir() or found(path) is not None)
    every = tuple(pair for one in examined(asked, cluster, kind) for pair in one.findings) if asked else ()
    if write_baseline and baseline is not None:
        cli_files.write(json.dumps({"known": sorted({print_of(*pair) for pair in every})}, indent=1) + "\n", baseline)
        say(f"wrote {baseline}", err=True)
        sys.exit(0)
    known = _known(baseline)
    new = tuple(pair for pair in every if print_of(*pair) not in known)
    match form:
        case "json":
            say_json({"findings": [_data(*pair) for pair in new], "known": len(every) - len(new)})
        case "sarif":
            say_json(sarif(new))
        case "junit":
            say(junit(new))
        case "github":
            say("\n".join(_annotation(*pair) for pair in new))
        case _:
            text = (*(line_of(*pair) for pair in new), f"{len(new)} new, {len(every) - len(new)} known")
            say("\n".join(text))
    sys.exit(1 if strict and any(finding.severity is Severity.ERROR for _, finding in new) else 0)


def print_of(place: FilePlace, finding: Finding) -> str:
    """What stays of a finding when lines are added above it: file, rule, key and what is wrong."""
    where = re.sub(r":\d+:\d+", "", finding.where)
    text = "\0".join((Path(place.file).as_posix(), finding.rule, where, finding.what))
    return sha256(text.encode()).hexdigest()[:32]


def _known(baseline: str | None) -> frozenset[str]:
    if baseline is None or not Path(baseline).exists():
        return frozenset()
    try:
        data = json.loads(Path(baseline).read_text())
        return frozenset(map(str, data["known"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        what = f"{baseline} is no baseline: write it anew with --write-baseline"
        raise click.UsageError(what) from None


def _data(place: FilePlace, finding: Finding) -> dict[str, Any]:
    from prepkit import codec

    return {**codec.to_data(finding), "file": place.file, "line": place.line, "column": place.column}


def sarif(findings: tuple[_Placed, ...]) -> dict[str, Any]:
    """SARIF 2.1.0, within what code scanning takes; the errors come first where there are too many."""
    first = sorted(findings, key=lambda pair: pair[1].severity is not Severity.ERROR)[:MOST_RESULTS]
    rules = sorted({finding.rule for _, finding in first})
    driver = {"name": "prepkit", "rules": [{"id": rule, "properties": {"tags": ["training"]}} for rule in rules]}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {"tool": {"driver": driver}, "results": [_result(*pair, rules.index(pair[1].rule)) for pair in first]}
        ],
    }


def _result(place: FilePlace, finding: Finding, index: int) -> dict[str, Any]:
    region = {"startLine": place.line, "startColumn": place.column}
    where = {"artifactLocation": {"uri": Path(place.file).as_posix()}, "region": region}
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.what} Fix: {finding.fix}"},
        "locations": [{"physicalLocation": where}],
        "partialFingerprints": {"prepkit/v1": print_of(place, finding)},
    }


def junit(findings: tuple[_Placed, ...]) -> str:
    """JUnit's XML: a test case per finding, which failed where it is an error."""
    failed = sum(finding.severity is Severity.ERROR for _, finding in findings)
    lines = [f'<testsuite name="prepkit" tests="{len(findings)}" failures="{failed}">']
    for place, finding in findings:
        head = f"  <testcase classname={quoteattr(finding.rule)} name={quoteattr(str(place))}"
        failure = f"<failure message={quoteattr(f'{finding.what} Fix: {finding.fix}')}/>"
        lines.append(f"{head}>{failure}</testcase>" if finding.severity is Severity.ERROR else f"{head}/>")
    return "\n".join(('<?xml version="1.0" encoding="UTF-8"?>', *lines, "</testsuite>"))


def _annotation(place: FilePlace, finding: Finding) -> str:
    def escaped(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    file = escaped(place.file).replace(":", "%3A").replace(",", "%2C")
    level = {"note": "notice"}.get(finding.severity.value, finding.severity.value)
    where = f"file={file},line={place.line},col={place.column},title={finding.rule}"
    return f"::{level} {where}::{escaped(f'{finding.what} Fix: {finding.fix}')}"
