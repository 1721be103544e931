"""The edge of the command line: torch, pipes, colour and characters."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from prepkit.codec.files import save
from prepkit.version import VERSION
from tests.support.command_line import MAKE, ROOT, fresh, python, run, workplace
from tests.support.patience import MOST
from tests.support.plans import ddp_plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] not in ("torch", "transformers", "deepspeed", "hypothesis"), f"{name} was imported"

sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("show", "fsdp2.json"), 0),
        (("show", "fsdp2.json", "--json"), 0),
        (("diff", "fsdp2.json", "ddp.json"), 1),
        (("check", "ddp.json"), 0),
        (("rules",), 0),
        (("rules", "mesh.not-world-size"), 0),
        (("--version",), 0),
    ],
)
def test_what_works_on_files_does_without_torch(words: tuple[str, ...], code: int, folder: Path) -> None:
    done = fresh(*words, prelude=NO_TORCH)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout


def test_the_check_for_torch_can_fail(folder: Path) -> None:
    done = fresh("plan", "single.json", *MAKE, prelude=NO_TORCH)
    assert done.returncode == 1
    assert "torch was imported" in done.stderr


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "hypothesis", "rich"]
    code = f"import sys, prepkit.cli; print([name for name in {heavy} if name in sys.modules])"
    done = python("-c", code)
    assert done.stdout == "[]\n", done.stderr


def test_python_m_prepkit_is_the_command(folder: Path) -> None:
    assert python("-m", "prepkit", "--version").stdout == f"prepkit, version {VERSION}\n"
    wrong = python("-m", "prepkit", "show", "absent.json")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Usage: prepkit show")


@pytest.mark.parametrize(("words", "code"), [(("show", "fsdp2.json"), 0), (("diff", "fsdp2.json", "ddp.json"), 1)])
def test_a_reader_that_leaves_early_is_no_fault(words: tuple[str, ...], code: int, folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = python("-m", "prepkit", *words, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, "")


def on_terminal(*words: str, **environment: str) -> str:
    """What a person sees, colour codes included."""
    shown, screen = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment}
    process = subprocess.Popen([sys.executable, "-m", "prepkit", *words], stdout=screen, stderr=screen, env=env)
    os.close(screen)
    text = b""
    try:
        while part := os.read(shown, 65536):
            text += part
    except OSError:  # how Linux says that the other end was closed
        pass
    os.close(shown)
    process.wait(timeout=60 * MOST)
    return text.decode().replace("\r\n", "\n")


def test_a_terminal_gets_the_same_text_in_colour(folder: Path) -> None:
    plain = run("show", "fsdp2.json").stdout
    coloured = on_terminal("show", "fsdp2.json")
    assert "\x1b[" not in plain
    assert "\x1b[36mShardUnits" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert on_terminal("show", "fsdp2.json", NO_COLOR="1", TERM="dumb") == plain


def test_findings_are_red_on_a_terminal(folder: Path) -> None:
    Path("x.json").write_text("{")
    assert "\x1b[31merror\x1b[0m codec.damaged" in on_terminal("show", "x.json")


def test_a_name_that_the_terminal_cannot_show_ends_no_command(folder: Path) -> None:
    made = ddp_plan()
    model = made.facts.model
    named = evolve(model, classes=(evolve(model.classes[0], name="Modèle"), *model.classes[1:]))
    save(evolve(made, facts=evolve(made.facts, model=named)), "named.json")
    done = fresh("show", "named.json", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Mod\\xe8le, 13 modules" in done.stdout


def test_a_name_that_steers_a_terminal_is_shown_as_its_escapes(folder: Path) -> None:
    made = ddp_plan()
    model = made.facts.model
    named = evolve(model, classes=(evolve(model.classes[0], name="\x1b[2J\x9b0m\rGone"), *model.classes[1:]))
    save(evolve(made, facts=evolve(made.facts, model=named)), "named.json")
    done = run("show", "named.json")
    assert "\\x1b[2J\\x9b0m\\x0dGone, 13 modules" in done.stdout
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.stdout)


def test_an_output_that_is_full_is_said_and_one_that_is_closed_is_not(folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = python("-m", "prepkit", "show", "fsdp2.json", stdout=full)
    assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")
    closed = in_shell(f"{sys.executable} -m prepkit show fsdp2.json >&-")
    assert (closed.returncode, closed.stderr) == (0, "")


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    """What the command line did, with what the shell makes of it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["/bin/sh", "-c", command], env=env, capture_output=True, text=True, timeout=60 * MOST, check=False
    )


def test_a_plan_comes_through_a_pipe_as_from_a_file(folder: Path) -> None:
    done = in_shell(f"cat fsdp2.json | {sys.executable} -m prepkit show /dev/stdin")
    assert (done.stdout, done.stderr, done.returncode) == (run("show", "fsdp2.json").stdout, "", 0)


def test_a_file_that_is_read_is_not_written_over_and_a_device_is_not_replaced(folder: Path) -> None:
    before = Path("fsdp2.json").read_bytes()
    done = run("report", "fsdp2.json", "-o", "./fsdp2.json")
    assert done.exit_code == 2
    assert "./fsdp2.json is read by this command: write to another file" in done.stderr
    assert Path("fsdp2.json").read_bytes() == before
    done = run("plan", "single.json", *MAKE, "-o", "single.json")
    assert "single.json is read by this command" in done.stderr
    os.mkfifo("pipe.html")
    done = run("report", "fsdp2.json", "-o", "pipe.html")
    assert (done.exit_code, "pipe.html cannot be written" in done.stderr) == (2, True)
    assert Path("pipe.html").is_fifo()


@pytest.mark.parametrize("option", ["--world-size", "--per-node"])
def test_a_number_beyond_every_cluster_is_used_wrongly(option: str, folder: Path) -> None:
    for number in ("9" * 30, "9" * 5000):
        done = run("check", "single.json", *MAKE, option, number)
        assert done.exit_code == 2
        assert "Invalid value" in done.stderr
