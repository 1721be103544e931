"""Commands about what was applied: statements to be signed, and the log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from prepkit.cli import plan_files as cli_files
from prepkit.cli.compare import load
from prepkit.cli.options import FILE, as_json
from prepkit.cli.terminal import say, say_json
from prepkit.codec.log import Entry, read
from prepkit.codec.text import canonical
from prepkit.findings import PlanRejected
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.rules import found


@click.command(short_help="Write a plan or an attestation as an in-toto Statement, to be signed.")
@click.argument("file", type=FILE)
@click.option("-o", "--output", help="File to write; without it the text is printed.")
def statement(file: str, output: str | None) -> None:
    """Write a plan or an attestation as an in-toto Statement, which stock tools sign and verify.

    What is signed of a plan is what pk.apply(plan, require=...) hands to whoever verifies it. An attestation that does
    not hold is written too, and gives exit code 1.
    """
    from prepkit.codec.statement import statement_text

    every: tuple[Plan | Attestation, ...] = cli_files.readable(load((file,)), as_json=False)
    loaded = every[0]
    text = statement_text(loaded)
    if output:
        cli_files.keep_inputs((file,), (output,))
        cli_files.write(text, output)
    else:
        say(text.rstrip("\n"))
    sys.exit(1 if isinstance(loaded, Attestation) and loaded.failed else 0)


@click.command(short_help="Verify a log of applied plans, and show it.")
@click.argument("file", type=FILE)
@click.option("--has", metavar="DIGEST", help="Digest of an entry that was kept elsewhere: it has to be there.")
@as_json
def log(file: str, has: str | None, as_json: bool) -> None:
    """Verify the chain of a log that pk.apply(plan, log=FILE) wrote, and show its entries.

    Exit code 1 where it is torn, with the line: changed, left out, moved, or cut in half. Whoever keeps the digest of
    an entry elsewhere finds by --has that entries were cut off at the end. A line shows how the digest of the entry
    begins, when it was applied, and how that of the plan begins; --json has both digests of the line whole.
    """
    listed: list[dict[str, Any]] = []
    last, known = "", False
    refused: PlanRejected | None = None
    try:
        for one in read(file):
            listed.append({"line": one.line, "at": one.at, "plan": one.plan, "holds": one.holds, "digest": one.digest})
            last, known = one.digest, known or one.digest == has
            if not as_json:
                say(_line(one))
    except PlanRejected as torn:
        refused = torn
    if refused is None and has is not None and len(has) != len(last or has):
        raise click.UsageError(_no_digest(has, listed))
    if refused is None and has is not None and not known:
        refused = PlanRejected((found("log.cut", file, f"no entry of it has the digest {has!r:.90}"),))
    if as_json:
        from prepkit import codec

        say_json({"entries": listed, "last": last, "findings": codec.to_data(refused.findings) if refused else []})
        sys.exit(1 if refused else 0)
    if refused is not None:
        cli_files.refuse((refused,), as_json=False)
    say(f"{len(listed)} whole; the last is {last}" if listed else "nothing was written yet")


def _no_digest(has: str, listed: list[dict[str, Any]]) -> str:
    """What to write in the place of a part of a digest, which tells nothing for sure."""
    begun = [one for one in listed if one["digest"].removeprefix("sha256:").startswith(has.removeprefix("sha256:"))]
    one = (begun or listed)[-1]
    whose = f"that of line {one['line']} begins so" if begun else "that of the last line is"
    return f"--has {has:.90} is no whole digest; {whose}: {one['digest']}"


def _line(one: Entry) -> str:
    engine, size = one.said.get("engine"), one.said["env"].get("world_size")
    kind = engine.get("kind") if isinstance(engine, dict) else engine
    verdict = "holds" if one.holds else "does not hold"
    when = f"{one.line}  {_short(one.digest)}  {one.at:.40}"
    return f"{when}  {_short(one.plan)}  {kind!s:.40} over {size!s:.40}  {verdict}"


@click.command(short_help="Say which plan first had the value of a setting.")
@click.argument("file", type=FILE)
@click.argument("field", metavar="FIELD")
@as_json
def blame(file: str, field: str, as_json: bool) -> None:
    """Say which plan in a log first had the value that FIELD has now, and what it was before.

    FIELD is a setting such as optimizer.lr or engine, or one of the environment, such as env.world_size. A log that is
    torn is not believed: exit code 1.
    """
    path = tuple(field.removeprefix("config.").split("."))
    changes = cli_files.attempt(lambda: tuple(_changes(read(file), path)))
    if isinstance(changes, PlanRejected):
        cli_files.refuse((changes,), as_json)
    if all(value is _ABSENT for _, value in changes):
        raise click.UsageError(_unknown(field, path, changes[0][0] if changes else None))
    if as_json:
        told = [{"at": one.at, "line": one.line, "plan": one.plan} | _data(value) for one, value in reversed(changes)]
        say_json({"field": field, "values": told})
        return
    for index, (one, value) in enumerate(reversed(changes)):
        text = "not there" if value is _ABSENT else canonical(value)
        say(f"{'' if index else f'{field} = '}{text}  since {one.at:.40}, plan {_short(one.plan)} ({file}:{one.line})")


_ABSENT = object()


def _changes(every: Iterator[Entry], path: tuple[str, ...]) -> Iterator[tuple[Entry, Any]]:
    """Each entry at which the value is another than before, with the value."""
    before: object = None
    for entry in every:
        value = _value(entry.said, path)
        text = value if value is _ABSENT else canonical(value)
        if text != before:
            yield entry, value
        before = text


def _value(data: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdecimal() and len(part) < 9 and int(part) < len(data):
            data = data[int(part)]
        else:
            return _ABSENT
    return data


def _data(value: Any) -> dict[str, Any]:
    return {} if value is _ABSENT else {"value": value}


def _unknown(field: str, path: tuple[str, ...], first: Entry | None) -> str:
    """A field that no plan has, and the nearest that the first one has."""
    from difflib import get_close_matches

    if first is None:
        return "the log has no entry yet"
    above = _value(first.said, path[:-1])
    near = get_close_matches(path[-1], above, n=1) if isinstance(above, dict) else []
    better = ".".join((*path[:-1], *near))
    fix = f"did you mean {better!r}?" if near else "write optimizer.lr or the like"
    return f"no plan of the log has {field!r}; {fix}"


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
