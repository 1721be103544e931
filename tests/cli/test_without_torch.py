"""Everything pure works where torch cannot be imported, and everything else asks for it by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import ROOT

WALL = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "deepspeed", "accelerate"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
sys.meta_path.insert(0, Wall())
"""

COMMANDS = """
import contextlib, io
from prepkit.cli import main
def run(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(list(words), standalone_mode=False)
        except SystemExit as end:
            return end.code or 0, out.getvalue()
        except Exception as error:
            return 9, f"{type(error).__name__}: {error}"
    return 0, out.getvalue()
"""

PURE = """
model = ("--model", "model", "--world-size", "8")
for words in (
    ("plan", "fsdp2.toml", *model, "-o", "plan.json"),
    ("check", "fsdp2.toml", *model),
    ("check", "fsdp2.toml"),
    ("check", "plan.json"),
    ("check",),
    ("gate",),
    ("gate", ".", "--format", "sarif"),
    ("show", "plan.json"),
    ("diff", "plan.json", "plan.json"),
    ("import", "accelerate.yaml", "-o", "imported.toml"),
    ("export", "imported.toml", "--to", "accelerate"),
    ("rules",),
    ("rules", "mesh.not-world-size"),
    ("report", "plan.json", "-o", "page.html"),
    ("sweep", "fsdp2.toml", *model, "--memory", "80GiB"),
):
    code, text = run(*words)
    assert code == 0, (words, code, text)
print("all", "torch" in sys.modules)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 512}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "fsdp2.toml").write_text('optimizer = {kind = "AdamW", lr = 1e-3}\n[engine]\nkind = "FSDP2"\n')
    (tmp_path / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n")
    return tmp_path


def fresh(code: str, place: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False, timeout=240,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_pure_command_runs_without_torch(place: Path) -> None:
    assert fresh(WALL + COMMANDS + PURE, place) == "all False\n"


def test_the_wall_does_stop_torch(place: Path) -> None:
    stopped = "try:\n    import torch\nexcept ModuleNotFoundError as error:\n    print(error.name)\n"
    assert fresh(WALL + stopped, place) == "torch\n"


ASKING = """
import prepkit as pk
plan = pk.load("plan.json")
calls = {
    "pk.apply": lambda: pk.apply(plan),
    "pk.rehearse": lambda: pk.rehearse(plan, None),
    "pk.audit": lambda: pk.audit(None),
    "pk.prove": lambda: pk.prove(plan, None, []),
    "prepkit.Prepared": lambda: pk.Prepared,
    "a plan for live objects": lambda: pk.build_plan(pk.Config(), None),
}
for what, call in calls.items():
    try:
        call()
    except ModuleNotFoundError as error:
        assert str(error) == f"{what} needs torch, and it is not installed; type: pip install 'prepkit[torch]'", error
    else:
        raise AssertionError(what)
model = ("--model", "a.b:c")
for words in (
    ("plan", "fsdp2.toml", *model),
    ("rehearse", "plan.json", *model),
    ("audit", "a.py"),
    ("prove", "plan.json", *model, "--batches", "a:b"),
):
    code, text = run(*words)
    assert "needs torch, and it is not installed" in text, text
    assert text.startswith("UsageError"), text
print("asked")
"""


def test_whatever_needs_torch_asks_for_it_by_name(place: Path) -> None:
    (place / "a.py").write_text("")
    made = 'code, text = run("plan", "fsdp2.toml", "--model", "model", "--world-size", "8", "-o", "plan.json")\n'
    assert fresh(WALL + COMMANDS + made + ASKING, place) == "asked\n"


def test_a_name_of_the_hub_is_looked_up_in_its_cache_alone(place: Path) -> None:
    kept = place / "hub" / "models--org--name"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "config.json").write_bytes((place / "model" / "config.json").read_bytes())
    (place / "model" / "config.json").rename(kept / "snapshots" / "abc" / "config.json")
    code = f"""
import os
os.environ["HF_HUB_CACHE"] = {str(place / "hub")!r}
code, text = run("check", "fsdp2.toml", "--model", "org/name", "--world-size", "8")
assert code == 0, text
code, text = run("check", "fsdp2.toml", "--model", "org/other", "--world-size", "8")
assert code == 2 and "hf download org/other config.json" in text, text
(code, text) = run("check", "fsdp2.toml", "--model", "nowhere/config.json")
assert code == 2 and "name a folder with config.json" in text, text
open({str(kept / "refs" / "main")!r}, "w").write("../../../elsewhere")
code, text = run("check", "fsdp2.toml", "--model", "org/name", "--world-size", "8")
assert code == 2, text
print("found")
"""
    assert fresh(WALL + COMMANDS + code, place) == "found\n"
