"""The page on which prepkit is tried without installing it: what it is made of, what it answers, and in a browser."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_without_torch import WALL
from tests.tools.page import PYODIDE, ROOT, build

MODULES = os.environ.get("PREPKIT_NODE_MODULES", "")
"""Folder ``node_modules`` with pyodide, puppeteer-core and @sparticuz/chromium, which are not kept here."""
LLAMA = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 512}'
GOOD = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("page", ROOT / "page" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def ask(**given: str) -> dict[str, Any]:
        blank = {"language": ".yaml", "config": "", "model": "", "processes": "", "per_node": "", "memory": ""}
        said: dict[str, Any] = json.loads(module.answer(json.dumps(blank | given)))
        return said

    return ask


def test_a_config_and_a_model_have_findings_memory_and_a_page_with_the_mesh(answer: Any) -> None:
    here = Path.cwd()
    said = answer(config=GOOD, model=LLAMA, per_node="8", memory="80GiB")
    assert not said["wrong"]
    assert "a plan exists for world size 8" in said["found"]
    assert "for certain" in said["found"]
    assert 'class="mesh"' in said["page"]
    assert "rank 7: shard 7" in said["page"]
    assert Path.cwd() == here
    small = answer(config=GOOD, model=LLAMA, per_node="4", memory="1MiB")
    assert "memory.exceeds-device" in small["found"]
    assert "node 1" not in said["page"]
    assert "node 1" in answer(config=GOOD, model=LLAMA, per_node="4")["page"]
    assert "a plan exists for world size 2" in answer(config=GOOD, model=LLAMA, processes="2")["found"]
    wrong = answer(config=GOOD.replace("precision", "precison"), model=LLAMA)
    assert (wrong["wrong"], wrong["page"]) == (True, "")
    assert "import.unknown-key" in wrong["found"]
    alone = answer(config=GOOD)
    assert (alone["wrong"], alone["page"]) == (False, "")
    assert "cannot know here" in alone["found"]


@pytest.mark.parametrize(
    "given",
    [
        {"config": ""},
        {"config": "[" * 10_000, "language": ".json"},
        {"config": "a: &a [*a]"},
        {"config": GOOD, "model": "no json"},
        {"config": GOOD, "model": '{"model_type": "nobody knows"}'},
        {"config": GOOD, "model": LLAMA, "processes": "-3"},
        {"config": GOOD, "model": LLAMA, "memory": "--help"},
        {"config": "\ud800", "language": "../../x"},
    ],
)
def test_whatever_is_typed_is_answered(answer: Any, given: dict[str, str]) -> None:
    said = answer(**given)
    assert said["found"]
    assert said["page"] == ""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """Files that stand for pyodide, where it is not here: the zip does not depend on it."""
    (tmp_path / "modules" / "pyodide").mkdir(parents=True)
    for name in PYODIDE:
        (tmp_path / "modules" / "pyodide" / name).write_text("")
    return tmp_path / "modules"


def test_the_zip_holds_all_that_the_page_imports_and_nothing_compiled(tmp_path: Path, modules: Path) -> None:
    build(tmp_path / "out", modules)
    with zipfile.ZipFile(tmp_path / "out" / "site.zip") as site:
        site.extractall(tmp_path / "site")
        assert not [name for name in site.namelist() if name.endswith((".so", ".pyd", ".pyc"))]
    asked = json.dumps({"language": ".yaml", "config": GOOD, "model": LLAMA})
    code = f"{WALL}\nimport sys\nsys.path.insert(0, {str(tmp_path / 'site')!r})\nimport page, prepkit\n"
    code += f"print(page.answer({asked!r}))\nprint(prepkit.__file__)"
    words = (sys.executable, "-I", "-S", "-c", code)  # nothing of what is installed here
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    said, where = done.stdout.splitlines()
    assert json.loads(said)["page"]
    assert where.startswith(str(tmp_path))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    build(tmp_path / "out", Path(MODULES))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "out"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


@pytest.mark.skipif(not (MODULES and shutil.which("node")), reason="PREPKIT_NODE_MODULES names no folder, or no node")
def test_a_browser_shows_findings_then_a_plan_and_asks_nobody_else(url: str) -> None:
    libraries = {
        "AWS_LAMBDA_JS_RUNTIME": "nodejs22.x",
        "AWS_EXECUTION_ENV": "AWS_Lambda_nodejs22.x",
    }  # they come with it
    words = ("node", str(ROOT / "page" / "browse.mjs"), MODULES, url)
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=600, env={**os.environ, **libraries}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    wrong, right, hostile = seen["answers"]
    assert wrong["state"] == "something is wrong"
    assert "import.unknown-key" in wrong["found"]
    assert right["state"].startswith("fine")
    assert "a plan exists for world size 16" in right["found"]
    assert 'class="mesh"' in right["page"]
    assert "onerror" in hostile["found"]
    assert not any(one["hacked"] for one in seen["answers"])
    assert seen["errors"] == []
    assert all(one.startswith(url.rpartition("/")[0]) for one in seen["asked"])
