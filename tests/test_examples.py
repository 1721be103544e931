"""The examples as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import prepkit as pk
from tests.support.deepspeed_cpu import kernel_built
from tests.support.fork_server import ForkServers
from tests.support.script import ran, run_script

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CONFIGS = sorted([*(EXAMPLES / "configs").iterdir(), *(EXAMPLES / "engines").iterdir()])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{EXAMPLES.parent}"}


def saved_plan(folder: Path, servers: ForkServers, engine: str, world: int) -> Path:
    """A plan of the demo, made as a user makes it."""
    path = folder / "plan.json"
    config = str(EXAMPLES / "engines" / f"{engine}.toml")
    script = [str(EXAMPLES / "plan.py"), config, "--processes", str(world), "--steps", "3", "-o", str(path)]
    run_script(servers, 1, script, ENVIRONMENT, timeout=100)
    return path


ENGINES = [("fsdp2", 2), ("fsdp1", 2), ("ddp", 2), ("tensor", 2), ("single", 1), ("zero3", 2)]


@pytest.mark.parametrize(("engine", "world"), ENGINES)
def test_one_script_trains_under_every_engine(
    tmp_path: Path, fork_servers: ForkServers, engine: str, world: int
) -> None:
    if engine == "zero3" and not kernel_built("deepspeed_shm_comm"):
        pytest.skip("DeepSpeed is not installed, or has not compiled its CPU collectives; PREPKIT_BUILD_OPS=1 lets it")
    path = saved_plan(tmp_path, fork_servers, engine, world)
    out = tmp_path / "result.json"
    script = [str(EXAMPLES / "train.py"), str(path), "--steps", "3", "--out", str(out)]
    run_script(fork_servers, world, script, ENVIRONMENT, timeout=150)
    losses = json.loads(out.read_text())["losses"]
    assert len(losses) == 3
    assert losses == pytest.approx([5.4831, 5.3, 5.2], abs=0.3)
    assert losses[2] < losses[0]


def test_the_plan_of_the_demo_warns_of_nothing(tmp_path: Path, fork_servers: ForkServers) -> None:
    assert pk.load(str(saved_plan(tmp_path, fork_servers, "fsdp2", 2))).warnings == ()


def test_the_custom_rule_refuses() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "custom_rule.py")], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    assert "ours.head-stays-whole at head.weight" in ran.stdout
    assert "Mesh(replicate=-1, shard=64)" in ran.stdout


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_every_example_config_can_be_read(config: Path) -> None:
    assert isinstance(pk.read_config(str(config)), pk.Config)


def test_the_question_whether_it_fits_is_answered_with_a_change(tmp_path: Path, fork_servers: ForkServers) -> None:
    script = tmp_path / "ask.py"
    script.write_text("import fits, llama; fits.ask(llama.eight(), '24GB')", encoding="utf-8")
    (done,) = ran(fork_servers, 1, [str(script)], ENVIRONMENT, timeout=300)
    assert done.code == 0, done.err
    said = done.out.splitlines()
    assert said[0].startswith("may not fit: of 22.35 GiB the fullest rank needs ")
    assert "of activations" in said[0]
    assert said[1].startswith("changes that fit, least traffic")
    assert any("mesh=" in line for line in said[2:])
