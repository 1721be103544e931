"""The tool that counts golden files per change: its edits fit the source, and it sees what differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tools.golden_changes import CHANGES, ROOT, different, edited


@pytest.mark.parametrize("name", CHANGES)
def test_each_edit_fits_the_source_and_changes_it(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    (tmp_path / change.file).parent.mkdir(parents=True)
    shutil.copy2(ROOT / change.file, tmp_path / change.file)
    edited(change, tmp_path)
    text = (tmp_path / change.file).read_text()
    assert text != (ROOT / change.file).read_text()
    compile(text, change.file, "exec")


def test_an_edit_that_no_longer_fits_is_named(tmp_path: Path) -> None:
    change = CHANGES["unused field"]
    (tmp_path / change.file).parent.mkdir(parents=True)
    (tmp_path / change.file).write_text("")
    with pytest.raises(LookupError, match="write in CHANGES"):
        edited(change, tmp_path)


def test_files_that_differ_or_are_in_one_tree_only_are_counted(tmp_path: Path) -> None:
    for tree, texts in {"a": {"same": "1", "other": "1", "gone": "1"}, "b": {"same": "1", "other": "2"}}.items():
        for name, text in texts.items():
            path = tmp_path / tree / "tests" / "x" / "golden" / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    found = [Path(name).stem for name in different(tmp_path / "a", tmp_path / "b")]
    assert found == ["gone", "other"]
