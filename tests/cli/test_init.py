"""``prepkit init``: what it writes is a config that holds for the model and the cluster, comments and all."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from prepkit.codec import load_plan
from prepkit.config import DDP, FSDP2, Config, OffloadToCPU, Single
from prepkit.formats.importers.native import read_config
from tests.support.command_line import run

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


CLUSTERS: dict[str, tuple[type, bool]] = {
    "--gpus 1 --memory 256GiB": (Single, False),
    "--gpus 8 --memory 512GiB": (DDP, False),
    "--gpus 8 --nodes 2 --memory 80GiB": (FSDP2, False),
    "--gpus 8 --memory 80GiB": (FSDP2, False),
    "--gpus 2 --memory 24GiB": (FSDP2, True),
    "--gpus 4 --device cpu": (DDP, False),
}
"""What is declared, the engine that is chosen for it, and whether it keeps its shards on the host."""


def _offloads(cfg: Config) -> bool:
    return isinstance(cfg.engine, FSDP2) and cfg.engine.offload == OffloadToCPU()


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_is_written_is_found_fine_by_the_command_that_is_printed(folder: Path, cluster: str) -> None:
    made = run("init", "--model", "model", *cluster.split())
    cfg = read_config("prepkit.toml")
    assert (made.exit_code, type(cfg.engine), _offloads(cfg)) == (0, *CLUSTERS[cluster])
    words = shlex.split(made.stdout)
    assert words[:3] == ["prepkit", "check", "prepkit.toml"]
    done = run(*words[1:])
    assert (done.exit_code, "error " in done.stderr) == (0, False), done.stderr
    assert run("check", "prepkit.toml").exit_code == 0
    assert made.stdout.strip() in (folder / "prepkit.toml").read_text()


def test_what_the_comment_says_of_the_parameters_is_what_a_plan_holds(folder: Path) -> None:
    stored = LLAMA | {"torch_dtype": "bfloat16"}
    (folder / "model" / "config.json").write_text(json.dumps(stored))
    cluster = ("--model", "model", "--world-size", "8", "--per-node", "8", "--device", "cuda", "--memory", "512GiB")
    run("init", "--model", "model", "--gpus", "8", "--memory", "512GiB")
    text = (folder / "prepkit.toml").read_text()
    other = re.search(r"as they are stored: (\{.*\})\.", text)
    assert other is not None
    assert "trained parameters, and the optimizer's state with them, are held in float32" in text
    (folder / "stored.toml").write_text(text.replace('precision = "BF16"', f"precision = {other[1]}"))
    held = {}
    for name in ("prepkit", "stored"):
        assert run("plan", f"{name}.toml", *cluster, "-o", f"{name}.json").exit_code == 0
        held[name] = {str(one.dtype) for one in load_plan(f"{name}.json").layout}
    assert held == {"prepkit": {"float32"}, "stored": {"bfloat16"}}


def test_blocks_are_recomputed_only_where_shards_over_all_leave_too_little_room(folder: Path) -> None:
    for memory, recomputed in (("80GiB", False), ("19GiB", True)):
        run("init", "--model", "model", "--gpus", "8", "--memory", memory, "-o", f"{memory}.toml")
        cfg = read_config(f"{memory}.toml")
        assert (type(cfg.engine), cfg.checkpointing is not None, _offloads(cfg)) == (FSDP2, recomputed, False)


@pytest.mark.parametrize("gpus", ["1", "8"])
def test_where_no_memory_is_said_nothing_claims_that_it_fits_and_the_way_to_know_is_said(
    folder: Path, gpus: str
) -> None:
    made = run("init", "--model", "model", "--gpus", gpus)
    text = (folder / "prepkit.toml").read_text()
    for told in (text, made.stderr):
        assert "nothing says" in told
        assert "whether it fits" in told
        assert "--memory" in told
        assert " holds " not in told.partition("engine =")[0]
    known = run("init", "--model", "model", "--gpus", gpus, "--memory", "512GiB", "-o", "known.toml")
    assert "whether it fits" not in known.stderr + (folder / "known.toml").read_text()


def test_a_copy_stays_on_a_node_where_there_are_several(folder: Path) -> None:
    run("init", "--model", "model", "--gpus", "8", "--nodes", "2", "--memory", "80GiB")
    mesh = read_config("prepkit.toml").mesh
    assert mesh is not None
    assert (mesh.replicate, mesh.shard) == (2, 8)


def test_every_setting_that_is_commented_out_holds_too_and_changes_the_config(folder: Path) -> None:
    run("init", "--model", "model", "--gpus", "8", "--memory", "80GiB")
    text = (folder / "prepkit.toml").read_text()
    options = re.findall(r"^# \w+ = .+$", text, re.MULTILINE)
    assert len(options) >= 5
    plain = read_config("prepkit.toml")
    for option in options:
        (folder / "with.toml").write_text(text.replace(option, option[2:]))
        if option[2:] not in ("accumulation = 1", "timeout_s = 600.0"):  # the value that holds without it
            assert read_config("with.toml") != plain
        done = run("check", "with.toml", "--model", "model", "--world-size", "8", "--per-node", "8", "--device", "cuda")
        assert done.exit_code == 0, done.stderr


def test_nothing_is_written_over_and_nothing_is_written_where_nothing_holds(folder: Path) -> None:
    (folder / "prepkit.toml").write_text("mine")
    words = ("init", "--model", "model", "--gpus", "8")
    assert run(*words).exit_code == 2
    assert (folder / "prepkit.toml").read_text() == "mine"
    (folder / "prepkit.toml").unlink()
    (folder / "prepkit.toml").symlink_to(folder / "elsewhere")
    assert run(*words).exit_code == 2
    assert not (folder / "elsewhere").exists()
    assert run(*words, "-o", "prepkit.json").exit_code == 2
    assert run("init", "--model", "absent", "--gpus", "8").exit_code == 2
    (folder / "model" / "config.json").write_text('{"model_type": "nobody knows"}')
    assert run(*words, "-o", "other.toml").exit_code == 1
    assert not (folder / "other.toml").exists()


def test_a_name_with_line_breaks_stays_in_its_comment(folder: Path) -> None:
    name = 'model\n[engine]\nkind = "XLA"'
    (folder / "model").rename(folder / name)
    assert run("init", "--model", name, "--gpus", "8", "--memory", "80GiB").exit_code == 0
    assert isinstance(read_config("prepkit.toml").engine, FSDP2)
