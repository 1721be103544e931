"""Links lead somewhere, every page is in the navigation, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, ROOT, pages
from tests.support.patience import MOST

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link into the page may name: its headings as GitHub and the site spell them, and explicit ids."""
    text = FENCE.sub("", page.read_text())
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text))
    return {*slugs, *re.findall(r'<a id="([^"]+)">', text)}


def dead(page: Path) -> list[str]:
    """Links of a page that lead nowhere. Links to other places on the net are not followed."""
    out = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            out.append(f"{page.name}: {link}")
    return out


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](#a-heading) [b](#b) [c](no.md) ![d](no.png)\n```text\n[e](no.md)\n```\n")
    assert dead(page) == ["page.md: #b", "page.md: no.md", "page.md: no.png"]


def test_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_in_the_navigation_and_in_the_index() -> None:
    config = (ROOT / "zensical.toml").read_text()
    tomllib.loads(config)
    present = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(re.findall(r'"([\w/-]+\.md)"', config)) == present
    assert set(LINK.findall((DOCS / "index.md").read_text())) == present - {"index.md"}


def test_no_page_names_a_machine_or_a_registry() -> None:
    for page in pages():
        assert not re.search(r"(?<![\w/])/(home|root|tmp|work|opt|usr)/|https?://(?!localhost)", page.read_text()), page


@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="takes pip install 'prepkit[docs]'")
@pytest.mark.parametrize("planted", ["", "\n[dead](nowhere.md)\n"], ids=["as it is", "with a dead link"])
def test_the_site_builds_without_a_warning(tmp_path: Path, planted: str) -> None:
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    with (tmp_path / "docs/concepts.md").open("a") as page:
        page.write(planted)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240 * MOST)
    assert (built.returncode == 0) is (not planted), built.stdout + built.stderr
    assert planted or (tmp_path / "build/site/reference/rules.html").exists()
