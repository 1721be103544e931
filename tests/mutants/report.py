"""The table of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from tests.mutants.host import Killed, Verdict
from tests.mutants.mutant import Mutant


@frozen(kw_only=True)
class Row:
    """Counts of a file, or of all."""

    name: str
    killed: int
    survived: int
    equivalent: int

    @property
    def tried(self) -> int:
        """All of them."""
        return self.killed + self.survived + self.equivalent

    @property
    def share(self) -> float:
        """Killed, of those that can be."""
        return self.killed / max(1, self.killed + self.survived)

    def __str__(self) -> str:
        counts = f"{self.tried:6} {self.killed:7} {self.survived:9} {self.equivalent:11}"
        return f"{self.name:48} {counts} {100 * self.share:7.1f} %"


HEAD = f"{'file':48} {'tried':>6} {'killed':>7} {'survived':>9} {'equivalent':>11} {'killed':>9}"


def rows(verdicts: Mapping[Mutant, Verdict], equivalent: Mapping[str, str]) -> tuple[Row, ...]:
    """By file in the order of their names, then the sum. A mutant in the table that a test kills counts as killed."""
    paths = sorted({mutant.path for mutant in verdicts})
    found = tuple(_row(path, [m for m in verdicts if m.path == path], verdicts, equivalent) for path in paths)
    return (*found, _row("all", list(verdicts), verdicts, equivalent))


def _row(name: str, mutants: Sequence[Mutant], verdicts: Mapping[Mutant, Verdict], same: Mapping[str, str]) -> Row:
    killed = sum(isinstance(verdicts[mutant], Killed) for mutant in mutants)
    equivalent = sum(mutant.id in same and not isinstance(verdicts[mutant], Killed) for mutant in mutants)
    return Row(name=name, killed=killed, survived=len(mutants) - killed - equivalent, equivalent=equivalent)


def survivors(verdicts: Mapping[Mutant, Verdict], equivalent: Mapping[str, str]) -> list[str]:
    """One line each, as an editor can follow it, and the id below."""
    alive = [m for m, verdict in verdicts.items() if not isinstance(verdict, Killed) and m.id not in equivalent]
    return [f"{mutant.place}: {mutant.operator}\n    {mutant.id}" for mutant in sorted(alive)]


def wrong(verdicts: Mapping[Mutant, Verdict], equivalent: Mapping[str, str]) -> list[str]:
    """Rows of the table of equivalents that a test kills: they are not."""
    return [m.id for m, verdict in verdicts.items() if m.id in equivalent and isinstance(verdict, Killed)]
