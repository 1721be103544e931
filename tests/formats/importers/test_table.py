"""Every importer has a test file of its own, and says what it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepkit.findings import PlanRejected
from prepkit.formats.importers import IMPORTERS
from prepkit.formats.importers.source import read


@pytest.mark.parametrize("name", IMPORTERS)
def test_every_importer_has_a_test_file_of_its_own(name: str) -> None:
    module = IMPORTERS[name].read.__module__.rpartition(".")[2]
    file = Path(__file__).with_name(f"test_{module}.py")
    assert file.is_file(), f"the importer of {name!r} in prepkit/formats/importers/{module}.py has no {file.name} here"


@pytest.mark.parametrize("name", IMPORTERS)
def test_a_key_that_no_importer_knows_is_a_finding_or_is_listed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"no_such_key_anywhere": 1}')
    try:
        accounted = str(IMPORTERS[name].read(read(str(file))).not_preparation)
    except PlanRejected as refused:
        accounted = str(refused)
    assert "no_such_key_anywhere" in accounted


def test_no_importer_hides_another_by_its_marks() -> None:
    """A file is the first's whose mark it shows, so a mark that stands twice would never be the second's."""
    told: set[str] = set()
    for name, importer in IMPORTERS.items():
        assert importer.marks, f"{name!r}: nobody would take a file for one of its; give its row in IMPORTERS marks"
        assert not told.intersection(importer.marks), name
        told.update(importer.marks)
