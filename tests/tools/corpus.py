"""Imports every collected config file, and prints what became of it: by kind, outcome and rule, key by key.

``python -m tests.tools.corpus [FOLDER]`` ends with 1 where a file crashes, a key is not accounted for, or a file that
the library itself accepts is refused by a rule that no reason stands for. FOLDER holds ``index.csv`` with the columns
file, kind, accelerate_ok and deepspeed_ok; without one: the folder ``shared/corpus`` beside the project.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from attrs import frozen

from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.formats.importers import Imported, import_config
from prepkit.formats.importers.foreign import Foreign

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"

JUSTIFIED = {
    "config.duplicate-key": "the library's reader takes the last of two silently",
    "import.missing-file": "accelerate fails at launch, where the file is not there either",
    "import.not-supported": "Megatron-LM, and sequences cut over ranks",
}
"""Why prepkit refuses a file that the library itself accepts."""

_OFF = frozenset({"", "0", "1", "1.0", "false", "no", "none", "off", "n", "f"})
"""What asks for nothing, as text in small letters; a size of 1 too."""

SILENT: dict[str, tuple[frozenset[str] | None, str]] = {
    "megatron_lm_config": (None, "the finding on distributed_type says what becomes of it"),
    **dict.fromkeys(
        (
            *("fp16", "fp8", "pure_bf16", "fsdp_config", "deepspeed_config", "parallelism_config"),
            *("dynamo_config", "fp8_config"),
        ),
        (_OFF, "nothing is asked for"),
    ),
    "use_cpu": (_OFF, "the device is as it is found"),
    "downcast_bf16": (_OFF, "nothing is asked for"),
    "deepspeed_config.zero3_init_flag": (_OFF, "the model is built as usual"),
    "parallelism_config.parallelism_config_cp_size": (_OFF, "sequences stay whole; more is a finding"),
    "parallelism_config.parallelism_config_sp_size": (_OFF, "sequences stay whole; more is a finding"),
}
"""Keys that may be read without being a setting, listed or in a finding: for which values (None: all), and why."""


@frozen(kw_only=True)
class Row:
    """What became of one file."""

    file: str
    kind: str
    accepted: bool
    """Whether the library that it is written for accepts it."""
    crash: str
    """What was raised that is no finding; empty: nothing."""
    findings: tuple[Finding, ...]
    keys: tuple[tuple[str, str], ...]
    """Each key with a value of its own, and what it is: see ``account``."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Ids of the rules that refuse it."""
        return tuple(sorted({found.rule for found in self.findings if found.severity is Severity.ERROR}))

    @property
    def outcome(self) -> str:
        """What stands in the table."""
        return "crash" if self.crash else "findings" if self.errors else "config with notes" if self.notes else "config"

    @property
    def notes(self) -> tuple[str, ...]:
        """Ids of its warnings."""
        return tuple(found.rule for found in self.findings if found.severity is not Severity.ERROR)

    @property
    def unexplained(self) -> tuple[str, ...]:
        """What nobody can answer for: a crash, keys without an account, refusals without a reason."""
        keys = tuple(f"key {key}" for key, account in self.keys if account == "unaccounted")
        refused = tuple(f"refused by {rule}" for rule in self.errors if self.accepted and rule not in JUSTIFIED)
        return (*filter(None, (self.crash,)), *keys, *refused)


def rows(folder: Path = CORPUS) -> Iterator[Row]:
    """One for each file of the index; none where the folder is not there."""
    if (folder / "index.csv").is_file():
        with (folder / "index.csv").open() as file:
            for entry in csv.DictReader(file):
                accepted = "true" in (entry["accelerate_ok"], entry["deepspeed_ok"])
                yield examined(folder / entry["file"], entry["file"], entry["kind"], accepted=accepted)


def examined(path: Path, name: str, kind: str, *, accepted: bool = False) -> Row:
    """Imports one file."""
    read: list[Foreign] = []
    whole = Foreign.imported

    def noted(self: Foreign, *args: object, **named: object) -> Imported:
        read.append(self)
        return whole(self, *args, **named)  # type: ignore[arg-type]

    crash, findings = "", ()
    with patch.object(Foreign, "imported", noted):
        try:
            imported = import_config(path)
            findings, kind = imported.notes, imported.kind
        except PlanRejected as refused:
            findings = refused.findings
        except Exception as error:
            crash = f"{type(error).__name__}: {error}"
    outer = [file for file in read if file.source == str(path)]
    keys = tuple(account(outer[-1])) if outer else ()
    return Row(file=name, kind=kind, accepted=accepted, crash=crash, findings=findings, keys=keys)


def account(file: Foreign) -> Iterator[tuple[str, str]]:
    """Each key with a value of its own: setting, finding, declared, not preparation, null, silent (with a reason)."""
    settings = {origin.key for origin in file.origins}
    said = {finding.where for finding in file.findings}
    unchanged = set(file.unchanged())
    for key in tuple(file.keys()):  # of a file, and no mapping
        value = file.raw(key)
        if isinstance(value, dict) and value:
            continue
        names = {key, *(key[:place] for place, letter in enumerate(key) if letter == ".")}
        above = names | {file.shown_as[name] for name in names if name in file.shown_as}  # as the file writes them
        if said & {file.where(name) for name in names}:
            yield key, "finding"
        elif key not in unchanged:
            yield key, "setting" if above & settings else "declared" if key in file.declared else "not preparation"
        elif value is None or value in ("", {}, []):
            yield key, "null"
        else:
            yield key, "silent" if any(_silent(name, value) for name in sorted(above)) else "unaccounted"


def _silent(name: str, value: object) -> bool:
    values, _ = SILENT.get(name, (frozenset[str](), ""))
    return values is None or str(value).strip().lower() in values


def table(found: Sequence[Row]) -> str:
    """Files by kind and outcome, findings by rule, keys by account."""
    lines = [f"{len(found)} files"]
    for (kind, outcome), number in sorted(Counter((row.kind, row.outcome) for row in found).items()):
        lines.append(f"  {kind:<14} {outcome:<18} {number:>5}")
    rules = Counter((found_.rule, found_.severity.value, row.accepted) for row in found for found_ in row.findings)
    lines.append("findings by rule")
    for (rule, severity, accepted), number in sorted(rules.items()):
        why = JUSTIFIED.get(rule, "") if accepted and severity == "error" else ""
        of = "accepted by the library" if accepted else "refused there too"
        lines.append(f"  {rule:<24} {severity:<8} {of:<24} {number:>5}  {why}".rstrip())
    accounts = Counter((row.kind, account_) for row in found for _, account_ in row.keys)
    total = sum(accounts.values())
    lines.append(f"{total} keys")
    lines += [f"  {kind:<14} {account_:<18} {number:>5}" for (kind, account_), number in sorted(accounts.items())]
    bad = [f"  {row.file}: {what}" for row in found for what in row.unexplained]
    return "\n".join((*lines, f"unexplained: {len(bad)}", *bad))


def main(words: Sequence[str]) -> int:
    """Prints the table; 1 where something is unexplained, 2 where there are no files."""
    folder = Path(words[0]) if words else CORPUS
    found = tuple(rows(folder))
    if not found:
        print(f"{folder} holds no index.csv", file=sys.stderr)
        return 2
    print(table(found))
    return 1 if any(row.unexplained for row in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
