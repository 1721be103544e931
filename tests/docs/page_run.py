"""A page as its reader would run it: files written, Python executed in one namespace, commands typed."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import prepkit as pk
from prepkit.formats.importers.positions import positions
from prepkit.formats.policy import read_policies
from tests.docs.blocks import ROOT, Block
from tests.support.command_line import run as run_prepkit
from tests.support.fork_server import ForkServers
from tests.support.patience import MOST
from tests.support.script import run_script, run_typed

SECONDS = 240.0
"""The longest that one command of a page may take, on a machine that does much else."""


def differs(expected: str, actual: str) -> str:
    """Empty where the output is as shown; ``...`` stands for anything or nothing, and lines may be broken anywhere."""
    parts = (re.escape(" ".join(part.split())) for part in expected.split("..."))
    shown = r"\s*.*?\s*".join(parts)
    if re.fullmatch(shown, " ".join(actual.split())):
        return ""
    return f"the page shows:\n{expected}\nit printed:\n{actual}"


class PageRun:
    """State of one page: its folder is the working directory, its namespace that of all its Python blocks."""

    def __init__(self, folder: Path, servers: ForkServers) -> None:
        self.folder = folder
        self.servers = servers
        self.namespace: dict[str, Any] = {"__name__": "page"}
        self.printed = ""
        """What the last Python block has printed, or the text of its error."""

    def do(self, block: Block) -> None:
        """Runs one block; an ``AssertionError`` names the page and line where the outcome is another than shown."""
        if (needed := block.notes.get("needs")) and importlib.util.find_spec(needed) is None:
            return
        if name := block.notes.get("file"):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        if block.language in ("toml", "yaml", "json"):
            self._config(block)
        elif block.language in ("sh", "python") and ("not run" in block.notes or "file" in block.notes):
            self.parse(block)
        elif "not run" in block.notes:
            self._known(block)
        elif block.language == "python":
            self._python(block)
        elif block.language == "console":
            self._console(block)
        elif block.language == "text" and "output" in block.notes:
            assert not (wrong := differs(block.text, self.printed)), f"{block}: {wrong}"

    def parse(self, block: Block) -> None:
        """Compiles Python, and lets bash read a script without running it."""
        if block.language == "python":
            ast.parse(block.text, filename=str(block))
        else:
            read = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
            assert read.returncode == 0, f"{block}: {read.stderr}"

    def _config(self, block: Block) -> None:
        path = self.folder / f"block-{block.line}.{block.language}"
        path.write_text(block.text)
        if "policy" in block.notes:
            read_policies((str(path),))
        elif "not run" in block.notes:
            positions(block.text, path.suffix)
        elif wanted := block.notes.get("raises"):
            with pytest.raises(Exception) as caught:  # noqa: PT011  # its type is compared below
                pk.import_config(path)
            assert caught.type.__name__ == wanted, f"{block}: {caught.value!r}"
        else:
            pk.import_config(path)

    def _python(self, block: Block) -> None:
        code = compile("\n" * block.line + block.text, block.page, "exec", dont_inherit=True)
        out = io.StringIO()
        wanted = block.notes.get("raises")
        with contextlib.redirect_stdout(out):
            if wanted is None:
                exec(code, self.namespace)
                self.printed = out.getvalue()
            else:
                with pytest.raises(Exception) as caught:  # noqa: PT011  # its type is compared below
                    exec(code, self.namespace)
                assert caught.type.__name__ == wanted, f"{block}: {caught.value!r}"
                self.printed = str(caught.value)

    def _console(self, block: Block) -> None:
        pairs = typed(block)
        for at, (command, shown) in enumerate(pairs):
            status, output = self._command(command, block)
            wanted = int(block.notes.get("exit", 0)) if at == len(pairs) - 1 else 0
            assert status == wanted, f"{block}: `{command}` ended with {status}:\n{output}"
            assert not (wrong := differs(shown, output) if shown.strip() else ""), f"{block}: `{command}`: {wrong}"

    def _command(self, command: str, block: Block) -> tuple[int, str]:
        words = shlex.split(command)
        paths = os.pathsep.join((str(self.folder), str(ROOT / "examples"), str(ROOT)))
        environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(self.folder)}  # torchrun leaves a folder there
        match words:
            case ["prepkit", "rehearse", *_]:  # in a process of its own: what it starts ends with it
                return self._module(words, environment)
            case ["prepkit", *rest]:
                done = run_prepkit(*rest)
                return done.exit_code, done.output
            case ["python", "-m", *module]:
                return self._module(module, environment)
            case ["python", *rest]:
                return 0, self._script(1, rest, environment)
            case ["torchrun", "--nproc-per-node", count, *rest]:
                return 0, self._script(int(count), rest, environment)
            case _:
                raise AssertionError(f"{block}: no test runs `{command}`; say why with <!-- not run: reason -->")

    def _module(self, words: list[str], environment: dict[str, str]) -> tuple[int, str]:
        done = run_typed(self.servers, ("-m", *words), environment, self.folder, SECONDS / MOST)
        return done.code, f"{done.out}{done.err}"

    def _script(self, processes: int, command: list[str], environment: dict[str, str]) -> str:
        return run_script(self.servers, processes, command, environment, timeout=SECONDS / MOST, folder=self.folder)

    def _known(self, block: Block) -> None:
        """What a command that is not run names, where that is cheap: targets of make, extras and modules of ours."""
        extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
        for command, _ in typed(block):
            match shlex.split(command, comments=True):
                case ["make", *targets]:
                    for target in targets:
                        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), f"{block}: {target}"
                case ["python", "-m", module, *_] if module.startswith("tests."):
                    assert importlib.util.find_spec(module), f"{block}: {module}"
                case ["python", script, *_] | ["torchrun", *_, script, _] if script.startswith("examples/"):
                    assert (ROOT / script).exists(), f"{block}: {script}"
                case words:
                    for extra in re.findall(r"prepkit\[(\w+)\]|'\.\[(\w+)\]'", " ".join(words)):
                        assert set(extra) - {""} <= extras, f"{block}: {extra}"


def typed(block: Block) -> tuple[tuple[str, str], ...]:
    """The commands of a console block after ``$``, each with the output that is shown below it."""
    text = block.text.replace("\\\n", " ")
    parts = re.split(r"^\$ (.*)$", text, flags=re.MULTILINE)
    assert not parts[0].strip(), f"{block}: output stands before the first command"
    return tuple(zip(parts[1::2], parts[2::2], strict=True))
