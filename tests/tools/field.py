"""``python -m tests.tools.field FOLDER``: what ``prepkit check`` says of a folder of public configs, judged by hand.

Prints the findings by rule with ten drawn of each, how long the first and all of them took, and the share of false
alarms among those that are judged in ``field_judged.csv``: a row is a rule and a digest of the file, so that no file of
others is kept here. Ends with 1 where more than one in a hundred is false, or a drawn one is not judged.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from attrs import frozen

from prepkit.cli.examined import examined
from prepkit.cli.options import Cluster
from prepkit.findings import Finding
from prepkit.formats.places import FilePlace

JUDGED = Path(__file__).with_suffix(".csv").with_stem("field_judged")
DRAWN = 10
"""Findings of a rule that people look at."""
FALSE = 0.01
"""Share of false alarms at most."""
NOWHERE = Cluster()

Key = tuple[str, str]
"""A rule, and a digest of the file in which it finds something."""


@frozen
class Seen:
    """A finding, and what is said of it by hand."""

    rule: str
    digest: str
    place: FilePlace
    finding: Finding

    @property
    def key(self) -> Key:
        return self.rule, self.digest


@frozen(kw_only=True)
class Field:
    """Everything that was found in a folder."""

    files: int
    seen: tuple[Seen, ...]
    first: float
    """Seconds of this process until the first finding."""
    whole: float

    def drawn(self) -> Mapping[str, tuple[Seen, ...]]:
        """Of each rule the findings whose digests come first: the same ones whenever the same files are there."""
        rules: dict[str, dict[Key, Seen]] = {}
        for one in sorted(self.seen, key=lambda one: sha256(f"{one.rule}{one.digest}".encode()).hexdigest()):
            rules.setdefault(one.rule, {}).setdefault(one.key, one)
        return {rule: tuple(found.values())[:DRAWN] for rule, found in sorted(rules.items())}


def look(folder: str) -> Field:
    """Check everything in the folder, as the command does."""
    begun, first, files = time.process_time(), 0.0, 0
    seen: list[Seen] = []
    for checked in examined((folder,), NOWHERE):
        files += 1
        digest = sha256(Path(checked.found.path).read_bytes()).hexdigest()[:16]
        for place, finding in checked.findings:
            first = first or time.process_time() - begun
            seen.append(Seen(finding.rule, digest, place, finding))
    return Field(files=files, seen=tuple(seen), first=first, whole=time.process_time() - begun)


def judged(file: Path = JUDGED) -> dict[Key, str]:
    """Rule and digest to ``true``, or to why it is a false alarm."""
    with file.open(encoding="utf-8", newline="") as lines:
        return {(row["rule"], row["digest"]): row["verdict"] for row in csv.DictReader(lines)}


def account(field: Field, verdicts: Mapping[Key, str]) -> Iterator[str]:
    """The page that is printed."""
    for rule, drawn in field.drawn().items():
        yield f"{rule}: {sum(one.rule == rule for one in field.seen)} findings"
        for one in drawn:
            yield f"  [{verdicts.get(one.key, 'not judged')}] {one.digest} {one.place}: {one.finding.what}"
    true, false, unjudged = tally(field, verdicts)
    yield f"{field.files} files, first finding after {field.first:.2f} s, all after {field.whole:.2f} s"
    yield f"of those drawn {true} are true, {false} false alarms, {unjudged} not judged"


def tally(field: Field, verdicts: Mapping[Key, str]) -> tuple[int, int, int]:
    """How many of those drawn are true, false and not judged."""
    said = [verdicts.get(one.key) for drawn in field.drawn().values() for one in drawn]
    return said.count("true"), sum(one not in ("true", None) for one in said), said.count(None)


if __name__ == "__main__":
    outcome, known = look(sys.argv[1]), judged()
    print("\n".join(account(outcome, known)))
    good, bad, unknown = tally(outcome, known)
    sys.exit(1 if unknown or bad > FALSE * (good + bad) else 0)
