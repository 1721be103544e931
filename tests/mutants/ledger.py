"""What is known of mutants: results of earlier runs, and the table of those that nothing can tell from the source."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from pathlib import Path

from attrs import asdict, define, field, frozen

from tests.mutants.host import IMPORT, Killed, Survived, Verdict
from tests.mutants.mutant import Mutant, digest
from tests.mutants.patch import ROOT

TABLE = Path(__file__).with_name("equivalent.toml")


@frozen(kw_only=True)
class Entry:
    """One mutant's result."""

    id: str
    source: str
    """Digest of the mutated file."""
    tests: str
    """Digest of all tests; a mutant that survived has to be tried again when they change, a killed one is dead."""
    seconds: float
    test: str = ""
    """What killed it; empty if it survived."""
    how: str = ""

    @property
    def verdict(self) -> Verdict:
        """As the attempt said it."""
        return Killed(self.test, self.how) if self.test else Survived()


@define
class Ledger:
    """Results by mutant id, kept in a file with one JSON object a line; later lines win."""

    file: Path
    entries: dict[str, Entry] = field(factory=dict)

    def read(self) -> None:
        """Takes in what earlier runs wrote."""
        if self.file.exists():
            entries = (Entry(**json.loads(line)) for line in self.file.read_text().splitlines())
            self.entries = {entry.id: entry for entry in entries}

    def add(self, entry: Entry) -> None:
        """Keeps it, on disk as well."""
        self.entries[entry.id] = entry
        with self.file.open("a") as out:
            out.write(json.dumps(asdict(entry)) + "\n")

    def known(self, mutant: Mutant, tests: str, names: Collection[str]) -> Entry | None:
        """The result, if the source, and for a survivor every test, is as it was; ``names``: the tests of today."""
        entry = self.entries.get(mutant.id)
        if entry is None or entry.source != source_digest(mutant):
            return None
        if entry.test:
            return entry if entry.test in names or entry.test == IMPORT else None
        return entry if entry.tests == tests else None


def source_digest(mutant: Mutant) -> str:
    """Of the file that it changes."""
    return digest((ROOT / mutant.path).read_bytes())


def equivalents(table: Path = TABLE) -> dict[str, str]:
    """Reasons by mutant id. Raises ``ValueError`` for an entry without a reason."""
    rows = tomllib.loads(table.read_text()).get("equivalent", [])
    if lacking := [row["id"] for row in rows if len(row.get("reason", "")) < 10]:
        raise ValueError(f"{table.name}: no reason is given for {', '.join(lacking)}")
    return {row["id"]: row["reason"] for row in rows}
