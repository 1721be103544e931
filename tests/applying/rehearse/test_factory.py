"""An import path gives a model on meta, or says which part of the path is wrong."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from prepkit.applying.rehearse.factory import build

SOURCE = """
import torch
from torch import nn

def make_model():
    return nn.Linear(2, 2)

def sized(width, depth=1):
    return nn.Linear(width, width)

def forgets():
    nn.Linear(2, 2)

def breaks():
    raise RuntimeError("no such checkpoint")

class Models:
    small = staticmethod(make_model)

ready = nn.Linear(3, 3)
constant = torch.ones(1)
number = 7
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A current directory with a script of the user's."""
    (tmp_path / "recipes_of_mine.py").write_text(SOURCE)
    (tmp_path / "needs_more.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    importlib.invalidate_caches()
    yield
    for name in ("recipes_of_mine", "needs_more"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("factory", ["recipes_of_mine:make_model", "recipes_of_mine:Models.small"])
def test_a_function_is_called_under_the_meta_device(factory: str) -> None:
    model = build(factory)
    assert isinstance(model, nn.Linear)
    assert model.weight.is_meta


def test_another_device_can_be_asked_for() -> None:
    assert build("recipes_of_mine:make_model", device="cpu").weight.device == torch.device("cpu")


def test_a_module_that_stands_there_is_returned_as_it_is() -> None:
    model = build("recipes_of_mine:ready")
    assert model is sys.modules["recipes_of_mine"].ready
    assert not model.weight.is_meta


def test_importing_is_not_done_under_the_meta_device() -> None:
    build("recipes_of_mine:make_model")
    assert not sys.modules["recipes_of_mine"].constant.is_meta


def test_the_current_directory_is_on_the_path_once(tmp_path: Path) -> None:
    build("recipes_of_mine:make_model")
    build("recipes_of_mine:make_model")
    assert sys.path.count(str(Path.cwd())) == 1
    assert sys.path[0] == str(Path.cwd())


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (
            "recipes_of_mine",
            "'recipes_of_mine' is not an import path; write package.module:name, such as train:make_model",
        ),
        (":make", "':make' is not an import path; write package.module:name, such as train:make_model"),
        ("a..b:make", "'a..b:make' is not an import path; write package.module:name, such as train:make_model"),
        ("recipes_of_mine.py:make", "'recipes_of_mine.py' is a file, not a module; write recipes_of_mine:make"),
        ("./src/train.py", "'./src/train.py' is a file, not a module; write src.train:make_model"),
        ("recipe_of_mine:make", "there is no module 'recipe_of_mine'; did you mean recipes_of_mine?"),
        (
            "zzz.models:make",
            "there is no module 'zzz'; run this from the directory that holds zzz, or install it",
        ),
        ("recipes_of_mine:make_modle", "recipes_of_mine has no 'make_modle'; did you mean make_model?"),
        ("recipes_of_mine:Models.smal", "recipes_of_mine:Models has no 'smal'; did you mean small?"),
        ("recipes_of_mine:qqqqq", "recipes_of_mine has no 'qqqqq'; check the spelling"),
        ("recipes_of_mine:number", "recipes_of_mine:number is 7 (int); name a function that returns a torch.nn.Module"),
        (
            "recipes_of_mine:forgets",
            "recipes_of_mine:forgets() returned None (NoneType), not a torch.nn.Module; end it with: return model",
        ),
        (
            "recipes_of_mine:sized",
            "recipes_of_mine:sized needs arguments (width); name a function without: def make(): return ...",
        ),
    ],
)
def test_each_mistake_is_named_with_what_to_write(factory: str, text: str) -> None:
    with pytest.raises(ValueError, match=r".") as said:
        build(factory)
    assert str(said.value) == text


def test_what_the_users_code_raises_passes_through() -> None:
    with pytest.raises(RuntimeError, match="no such checkpoint"):
        build("recipes_of_mine:breaks")


def test_a_module_that_misses_an_import_of_its_own_says_so_itself() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        build("needs_more:make")
