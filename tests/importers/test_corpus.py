"""Config files that people have: each becomes a config or findings, and every key of it is accounted for."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from prepkit.findings import PlanRejected, Severity
from prepkit.importers import Imported, import_config

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"


def rows() -> list[dict[str, str]]:
    if not (CORPUS / "index.csv").is_file():
        return []
    with (CORPUS / "index.csv").open() as file:
        return list(csv.DictReader(file))


JUSTIFIED = {
    "config.duplicate-key": "the library's reader takes the last of two silently",
    "import.missing-file": "accelerate fails at launch, where the file is not there either",
    "import.not-supported": "Megatron-LM, and sequences cut over ranks",
}
"""Why prepkit refuses a file that the library itself accepts."""


@pytest.mark.skipif(not rows(), reason="the folder of collected configs is not beside the project")
@pytest.mark.parametrize("row", rows(), ids=lambda row: row["file"][-60:])
def test_each_file_becomes_a_config_or_justified_findings(row: dict[str, str]) -> None:
    file = CORPUS / row["file"]
    accepted = "true" in (row["accelerate_ok"], row["deepspeed_ok"])
    outcome = attempt(file)
    if isinstance(outcome, PlanRejected):
        errors = {finding.rule for finding in outcome.findings if finding.severity is Severity.ERROR}
        assert not accepted or errors <= JUSTIFIED.keys(), str(outcome)
    else:
        assert outcome.kind == row["kind"]
        assert outcome.config.origins


def attempt(file: Path) -> Imported | PlanRejected:
    try:
        return import_config(file)
    except PlanRejected as refused:
        return refused
