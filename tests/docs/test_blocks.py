"""Every Python block, command and config of README and docs, run as a reader would."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from prepkit.observe.env import VARIABLES
from tests.docs.blocks import LANGUAGES, ROOT, blocks, pages
from tests.docs.page_run import PageRun, differs, typed
from tests.support.fork_server import ForkServers

PAGES = tuple(page for page in pages() if blocks(page))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_servers: ForkServers) -> Iterator[PageRun]:
    """Somebody in an empty folder beside the examples; what they import from it is forgotten afterwards."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT / "examples"), *sys.path])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield PageRun(tmp_path, fork_servers)
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent in (tmp_path, ROOT / "examples"):
            del sys.modules[name]


def _read(page: Path, reader: PageRun) -> None:
    for block in blocks(page):
        reader.do(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, reader: PageRun) -> None:
    before = dict(os.environ)
    for name in VARIABLES:  # what a test before this one has set is in no plan that the page shows
        os.environ.pop(name, None)
    try:
        _read(page, reader)
    finally:
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_its_language_and_why_it_is_not_run(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: {block.language!r} is none of {LANGUAGES}"
        if "not run" in block.notes:
            assert len(block.notes["not run"].split()) > 2, f"{block}: say why in a few words"
        if block.language == "console":
            assert typed(block), f"{block}: no line begins with `$ `"


def test_a_page_that_shows_another_outcome_fails(tmp_path: Path, reader: PageRun) -> None:
    page = tmp_path / "wrong.md"
    wrong = {
        "```python\nprint(1 + 1)\n```\n<!-- output -->\n```text\n3\n```\n": "the page shows",
        "```python\nimport prepkit as pk\npk.Konfig()\n```\n": "Konfig",
        "<!-- raises: ValueError -->\n```python\nint([])\n```\n": "TypeError",
        "```console\n$ prepkit rules wrap.class-not-foun\n```\n": "ended with 2",
        "```console\n$ frobnicate\n```\n": "no test runs",
        "<!-- not run: long -->\n```console\n$ make nothing-of-that-name\n```\n": "nothing-of-that-name",
        "<!-- not run: on a cluster only -->\n```sh\nif then\n```\n": "syntax error",
        '```toml\nengine = "FSDP3"\n```\n': "FSDP3",
    }
    for text, reason in wrong.items():
        page.write_text(text)
        with pytest.raises(Exception, match=reason):
            _read(page, reader)


def test_a_comment_that_belongs_to_no_block_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "loose.md"
    page.write_text("<!-- not run: reason -->\nSome text.\n")
    with pytest.raises(ValueError, match="no block"):
        blocks(page)


def test_dots_stand_for_anything_and_lines_may_be_broken() -> None:
    assert not differs("a ...\nc", "a long\nb\nc\n")
    assert not differs("one\n  two", "one two")
    assert differs("one two", "one three")
