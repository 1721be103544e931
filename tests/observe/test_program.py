"""Which files a program is made of, seen from a function of it that runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from prepkit.observe.prepared.around import texts_of_program

MAIN = """import program_read
def run(look):
    import program_late
    return look()
"""
FILES = {
    "main": MAIN,
    "read": "from program_deep import value\n",
    "deep": "def value(): ...\n",
    "late": "LATE = 1\n",
    "other": "OTHER = 1\n",
}


def test_a_program_is_its_running_code_and_what_that_imports_and_not_all_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / f"program_{name}.py").write_text(text)
    importlib.import_module("program_other")
    main = importlib.import_module("program_main")
    texts = main.run(texts_of_program)
    read = {Path(one).stem for one in texts if Path(one).parent == tmp_path}
    assert read == {"program_main", "program_read", "program_deep", "program_late"}
    assert texts[str(tmp_path / "program_late.py")] == FILES["late"]
