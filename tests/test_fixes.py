"""What fixes tell people to type is there to be typed: names of prepkit, torch and accelerate, commands and options."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import prepkit as pk
from prepkit.cli import main
from prepkit.rules import LAW
from prepkit.training.prepared import Prepared

TESTS = Path(__file__).parent
_NAME = re.compile(r"(?<![\w./-])(pk|ready|torch|accelerator|prepkit)\.([A-Za-z_][\w.]*\w)")
_COMMAND = re.compile(r"(?<![\w.-])prepkit (?!that\b|or\b)([a-z]+)\b(?!-)")


def fixes() -> Iterator[tuple[str, str]]:
    """Every fix of the law book, and of the findings that tests keep."""
    yield from ((rule.id, rule.fix) for rule in LAW)
    for path in TESTS.glob("**/golden/**/*.txt"):
        told = re.findall(r"^\w+ ([a-z]+\.[a-z-]+) at .*\n  fix: (.*)$", path.read_text(), re.MULTILINE)
        yield from told


def leads(root: str, path: str) -> bool:
    """Whether there is something at the end of a dotted path."""
    if root == "accelerator":
        at: Any = pytest.importorskip("accelerate").Accelerator
    else:
        at = {"pk": pk, "prepkit": pk, "ready": Prepared, "torch": torch}[root]
    for done, name in enumerate(path.split(".")):
        if not hasattr(at, name) and name not in getattr(at, "__annotations__", ()):
            try:
                at = importlib.import_module(".".join((at.__name__, name)))
            except (ImportError, AttributeError):
                return False
            continue
        at = getattr(at, name, None)
        if at is None or isinstance(at, property) or (root == "ready" and done == 0):
            return True  # of an object: what it has is known when it is made
    return True


def test_every_name_that_a_fix_has_is_there() -> None:
    absent = {
        f"{rule}: {root}.{path}"
        for rule, fix in fixes()
        for root, path in _NAME.findall(fix)
        if not leads(root, path.split("(")[0]) and f"{root}.{path}" not in FILES
    }
    assert absent == set()


FILES = {"prepkit.toml", "prepkit.yaml", "prepkit.json"}
"""Names of files."""


def test_every_command_that_a_fix_has_is_there() -> None:
    assert isinstance(main, click.Group)
    told = {(rule, command) for rule, fix in fixes() for command in _COMMAND.findall(fix)}
    commands = {command for _, command in told}
    assert {"audit", "diff", "statement"} <= commands
    assert {f"{rule}: prepkit {command}" for rule, command in told if command not in main.commands} == set()


def test_a_name_that_is_not_there_is_found() -> None:
    assert leads("ready", "skip")
    assert leads("torch", "distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing")
    assert not leads("ready", "skipp")
    assert not leads("pk", "ShardLoaders.no_such_field_of_it")
    assert not leads("torch", "distributed.algorithms.nothing")
