"""Files that are no checkpoint, whatever is in them, are problems in the facts and never raise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepkit.formats.stored_weights import INDEX, observe_checkpoint

DEEP = 100_000


def problem(path: str) -> str:
    facts = observe_checkpoint(path)
    (found,) = facts.problems
    assert not facts.tensors
    return found.what


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ("[" * DEEP + "]" * DEEP, "nested too deeply"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "nested too deeply"),
        (json.dumps({"weight": "a\0b"}), "no file can have this name"),
        (json.dumps({"weight": "a\ud800b"}), "'a\\ud800b', which is no Unicode text"),
        (json.dumps({"weight\ud800": "model.safetensors"}), "'weight\\ud800', which is no Unicode text"),
        ("9" * 6000, "it is no JSON"),
    ],
    ids=["lists", "objects", "nul", "file", "key", "digits"],
)
def test_an_index_that_is_none_is_told_in_words(tmp_path: Path, weight_map: str, says: str) -> None:
    (tmp_path / INDEX).write_text(f'{{"weight_map": {weight_map}}}')
    assert says in problem(str(tmp_path))


def test_a_path_with_a_nul_is_no_file() -> None:
    assert "no file can have this name" in problem("model\0.safetensors")


def test_a_header_whose_name_nothing_can_print_is_damaged(tmp_path: Path) -> None:
    header = json.dumps({"weight\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "'weight\\ud800', which is no Unicode text" in problem(str(tmp_path))
