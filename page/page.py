"""What the page asks: the commands of prepkit, run in a folder of their own. No torch, no network."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path

from prepkit.cli import main

LANGUAGES = (".yaml", ".toml", ".json")
OPTIONS = {"processes": "--world-size", "per_node": "--per-node", "memory": "--memory"}


def answer(asked: str) -> str:
    """JSON with what ``check`` says (``found``), whether something is ``wrong``, and the ``page`` of the plan as HTML.

    ``asked`` is JSON too: the text of a config and its language, the text of a model's ``config.json``, both may be
    empty, and what is declared of the cluster.
    """
    given = json.loads(asked)
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return json.dumps(_answer(given))
        finally:
            os.chdir(here)


def _answer(given: dict[str, str]) -> dict[str, object]:
    config = f"config{given['language'] if given['language'] in LANGUAGES else '.yaml'}"
    Path(config).write_text(given["config"], encoding="utf-8", errors="backslashreplace")
    words = [part for name, option in OPTIONS.items() if given.get(name) for part in (option, given[name])]
    if given["model"].strip():
        Path("model").mkdir()
        Path("model", "config.json").write_text(given["model"], encoding="utf-8", errors="backslashreplace")
        words += ["--model", "model"]
    wrong, found = _run("check", config, *words)
    page = ""
    if not wrong and "--model" in words:
        wrong, said = _run("plan", config, *words, "-o", "plan.json")
        found = f"{found}\n{said}" if wrong else found
        if not wrong:
            _run("report", "plan.json", "-o", "plan.html")
            page = Path("plan.html").read_text(encoding="utf-8")
    return {"found": found, "wrong": bool(wrong), "page": page}


def _run(*words: str) -> tuple[int, str]:
    """The command's exit code, and all that it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(list(words), prog_name="prepkit")
        except SystemExit as end:
            return (end.code if isinstance(end.code, int) else 0), out.getvalue().rstrip()
    return 0, out.getvalue().rstrip()
