"""``prepkit diff BASE..HEAD``: what changed of the configs and plans between two revisions, and the comment of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepkit.cli.revisions import Number
from prepkit.codec.files import save
from tests.support.command_line import FSDP2_CONFIG, MAKE, run, workplace
from tests.support.plans import ddp_plan, fsdp2_plan

CLUSTER = ("--world-size", "8", "--per-node", "4", "--device", "cuda", "--batch-size", "2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "ana")
        monkeypatch.setenv(f"{name}_EMAIL", "ana@example.org")
    for inside in workplace(tmp_path, monkeypatch):
        git("init", "-q", "-b", "main")
        commit()
        yield inside


def git(*words: str) -> str:
    return subprocess.run(("git", *words), check=True, capture_output=True, text=True).stdout


def commit() -> None:
    git("add", "-A")
    git("commit", "-qm", "more", "--allow-empty")


def test_memory_traffic_batch_and_what_trains_differently_are_told(folder: Path) -> None:
    (folder / "fsdp2.toml").write_text(
        f"accumulation = 2\nclip = {{ kind = 'ClipNorm', max_norm = 1.0 }}\n{FSDP2_CONFIG}"
    )
    (folder / "fsdp2.toml").write_text((folder / "fsdp2.toml").read_text().replace("replicate = 2", "replicate = 4"))
    commit()
    result = run("diff", "HEAD~1..HEAD", *MAKE, *CLUSTER, "--json")
    (one,) = json.loads(result.stdout)["files"]
    numbers = {row["name"]: (row["before"], row["after"]) for row in one["numbers"]}
    assert (result.exit_code, one["file"], one["what"], one["refused"]) == (1, "fsdp2.toml", "changed", [])
    assert numbers["global batch"] == (16, 32)
    assert numbers["micro-batches per step"] == (1, 2)
    assert numbers["memory for certain"][0] < numbers["memory for certain"][1]
    assert numbers["between nodes per step"][0] < numbers["between nodes per step"][1]
    assert {pair["setting"] for pair in one["trains_differently"]} >= {"accumulation", "clip.max_norm"}
    assert [pair["setting"] for pair in one["settings"]] == ["mesh.replicate"]
    comment = run("diff", "HEAD~1..HEAD", *MAKE, *CLUSTER, "--comment").stdout
    assert comment.startswith("<!-- prepkit diff -->\n")
    assert "| global batch | 16 | 32 | +100 % |" in comment
    assert "- `clip.max_norm`: `none` → `1.0`" in comment


def test_nothing_that_matters_is_no_difference(folder: Path) -> None:
    (folder / "fsdp2.toml").write_text(f"# a comment\n{FSDP2_CONFIG}")
    (folder / "workflow.yml").write_text("on: push\n")
    commit()
    result = run("diff", "HEAD~1..HEAD", *MAKE, *CLUSTER)
    assert (result.exit_code, result.stdout) == (0, "no config, script or plan says anything else than before\n")


def test_plans_and_configs_are_compared_without_a_model_too(folder: Path) -> None:
    save(fsdp2_plan(), "ddp.json")
    (folder / "single.json").write_text('{"engine": "Single", "optimizer": "AdamW"}')
    (folder / "one.json").unlink()
    commit()
    said = run("diff", "HEAD~1..HEAD").stdout
    assert "ddp.json: changed\n  memory for certain: " in said
    assert "trains differently: optimizer.kind: SGD -> AdamW" in said
    assert "one.json: removed" in said


def test_processes_and_machines_that_a_config_starts_are_told(folder: Path) -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    axolotl = "base_model: org/one\ndatasets: [{path: d, type: alpaca}]\nmicro_batch_size: 1\nlearning_rate: 1e-4\n"
    (folder / "acc.yaml").write_text(text)
    (folder / "axo.yaml").write_text(axolotl)
    commit()
    (folder / "acc.yaml").write_text(text.replace("machines: 1", "machines: 8"))
    commit()
    said = run("diff", "HEAD~1..HEAD")
    assert (said.exit_code, said.stdout.splitlines()) == (
        1,
        ["acc.yaml: changed", "  processes of a node: 8 -> 1 (-88 %)", "  nodes: 1 -> 8 (+700 %)"],
    )
    (folder / "acc.yaml").write_text(
        text.replace("machines: 1", "machines: 8").replace("processes: 8", "processes: 64")
    )
    (folder / "axo.yaml").write_text(axolotl.replace("org/one", "org/two"))
    commit()
    said = run("diff", "HEAD~2..HEAD")
    assert "  processes: 8 -> 64 (+700 %)\n  nodes: 1 -> 8 (+700 %)\n" in said.stdout
    assert "  trains differently: model: org/one -> org/two" in said.stdout
    assert "| nodes | 1 | 8 | +700 % |" in run("diff", "HEAD~2..HEAD", "--comment").stdout
    with_model = run("diff", "HEAD~2..HEAD", "acc.yaml", *MAKE).stdout
    assert with_model.count("  processes: 8 -> 64") == 1


@pytest.mark.parametrize("name", ["run.slurm", "launch"])
def test_what_a_script_starts_is_told(name: str, folder: Path) -> None:
    text = "#SBATCH --nodes=1\nsrun torchrun --nnodes 1 --nproc_per_node 8 train.py --lr 1e-4\necho 1\n"
    (folder / name).write_text(text)
    (folder / "build.sh").write_text("make\n")
    commit()
    (folder / name).write_text(text.replace("echo 1", "echo 2"))
    (folder / "build.sh").write_text("make all\n")
    commit()
    assert run("diff", "HEAD~1..HEAD").exit_code == 0
    (folder / name).write_text(text.replace("nodes=1", "nodes=4").replace("nnodes 1", "nnodes 4"))
    commit()
    assert run("diff", "HEAD~1..HEAD").stdout.splitlines() == [
        f"{name}: changed",
        "  settings: #SBATCH --nodes: 1 -> 4",
        "  settings: torchrun: processes: 8 -> 32",
        "  settings: torchrun: nodes: 1 -> 4",
    ]


def test_of_the_json_of_deepspeed_what_changed_is_told_alone(folder: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}'
    (folder / "ds.json").write_text(text)
    commit()
    (folder / "ds.json").write_text(text.replace("3", "2").replace("1.0", "0.5"))
    commit()
    said = run("diff", "HEAD~1..HEAD").stdout.splitlines()
    assert said[0] == "ds.json: changed"
    assert said[-1] == "  settings: zero_optimization.stage: 3 -> 2"
    assert all("clip" in line for line in said[1:-1])
    assert "  trains differently: gradient_clipping: 1.0 -> 0.5" in said


def test_a_path_that_neither_revision_has_is_used_wrongly(folder: Path) -> None:
    (folder / "fsdp2.toml").unlink()
    commit()
    done = run("diff", "HEAD~1..HEAD", "one.json", "absent.toml")
    assert (done.exit_code, "neither revision has a file at absent.toml" in done.stderr) == (2, True)
    assert run("diff", "HEAD~1..HEAD", "fsdp2.toml").stdout == "fsdp2.toml: removed\n"
    assert run("diff", "HEAD~1..HEAD", "one.json", "*.py").exit_code == 0


def test_a_file_that_is_refused_now_says_why(folder: Path) -> None:
    (folder / "fsdp2.toml").write_text(FSDP2_CONFIG.replace("replicate = 2", "replicate = 3"))
    (folder / "new.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precison: bf16\n")
    commit()
    files = {
        one["file"]: one for one in json.loads(run("diff", "HEAD~1..HEAD", *MAKE, *CLUSTER, "--json").stdout)["files"]
    }
    assert files["fsdp2.toml"]["refused"][0].startswith("mesh.")
    assert files["new.yaml"]["what"] == "added"
    assert files["new.yaml"]["refused"][0].startswith("import.unknown-key at new.yaml:2:1 mixed_precison")


def test_three_dots_begin_where_the_two_have_parted(folder: Path) -> None:
    git("checkout", "-qb", "side")
    (folder / "single.json").write_text('{"engine": "Single", "optimizer": "AdamW"}')
    commit()
    git("checkout", "-q", "main")
    (folder / "fsdp2.toml").write_text(f"accumulation = 2\n{FSDP2_CONFIG}")
    commit()
    assert "fsdp2.toml" in run("diff", "main..side").stdout
    assert "fsdp2.toml" not in run("diff", "main...side").stdout


def test_hostile_names_values_and_links_stay_text_and_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "x`|<b>@all.json").write_text('{"engine": "Single", "device": "`<img src=x>`|@ana"}')
    (folder / "link.json").symlink_to("/etc/passwd")
    commit()
    (folder / "x`|<b>@all.json").write_text('{"engine": "Single", "device": "``[a](http://b)|"}')
    commit()
    result = run("diff", "HEAD~2..HEAD", "--comment")
    line = next(
        one for one in run("diff", "HEAD~1..HEAD", "--comment").stdout.splitlines() if one.startswith("- `device`")
    )
    assert (line.count("`"), line.count("|")) == (6, 0)
    assert "link.json" not in result.stdout
    assert "root:" not in result.stdout


def test_words_that_are_neither_files_nor_revisions_are_used_wrongly(folder: Path) -> None:
    save(ddp_plan(), "other.json")
    for words in (("nowhere..HEAD",), ("HEAD..--output=x",), ("fsdp2.json",), ("fsdp2.json", "gone.json")):
        assert run("diff", *words).exit_code == 2, words
    assert not (folder / "x").exists()
    assert run("diff", "ddp.json", "other.json").exit_code == 0


def test_from_a_folder_inside_the_whole_repository_is_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "fsdp2.toml").write_text(f"accumulation = 2\n{FSDP2_CONFIG}")
    (folder / "sub").mkdir()
    (folder / "sub" / "one.toml").write_text(FSDP2_CONFIG)
    commit()
    monkeypatch.chdir(folder / "sub")
    said = run("diff", "HEAD~1..HEAD")
    assert (said.exit_code, said.stdout.splitlines()) == (
        1,
        ["../fsdp2.toml: changed", "  trains differently: accumulation: none -> 2", "one.toml: added"],
    )
    assert run("diff", "HEAD~1..HEAD", "one.toml").stdout.splitlines() == ["one.toml: added"]


def test_a_new_file_with_errors_is_refused_without_a_model_too(folder: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}'
    script = "#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node=4\nsrun torchrun --nproc_per_node 4 train.py\n"
    (folder / "ds.json").write_text(text)
    (folder / "old.sh").write_text(script.replace("node 4", "node 8"))
    commit()
    (folder / "ds.json").write_text(text.replace("3", "5"))
    (folder / "run.sh").write_text(script.replace("node 4", "node 8"))
    (folder / "old.sh").write_text("# known\n" + script.replace("node 4", "node 8").replace("train.py", "main.py"))
    commit()
    files = {one["file"]: one for one in json.loads(run("diff", "HEAD~1..HEAD", "--json").stdout)["files"]}
    assert [one.partition(":")[0] for one in files["ds.json"]["refused"]] == ["deepspeed.stage at ds.json"]
    assert [one.partition(":")[0] for one in files["run.sh"]["refused"]] == ["launch.gpus at run.sh"]
    assert "old.sh" not in files or files["old.sh"]["refused"] == []  # it was wrong before


def test_what_is_declared_of_the_cluster_is_no_change_of_a_file(folder: Path) -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    (folder / "acc.yaml").write_text(text)
    commit()
    (folder / "acc.yaml").write_text(text.replace("processes: 8", "processes: 16"))
    commit()
    said = run("diff", "HEAD~1..HEAD", "--per-node", "8").stdout.splitlines()
    assert said == ["acc.yaml: changed", "  processes: 8 -> 16 (+100 %)", "  processes of a node: 8 -> 16 (+100 %)"]


def test_a_leap_from_next_to_nothing_has_no_share() -> None:
    assert Number(name="host memory", before=4, after=2**35, bytes=True).share == ""
    assert Number(name="host memory", before=4, after=8, bytes=True).share == "+100 %"


def told(*words: str) -> dict[str, dict]:
    files = json.loads(run("diff", "HEAD~1..HEAD", *words, "--json").stdout)["files"]
    return {one["file"]: one for one in files}


def test_machines_are_counted_as_the_file_has_them_and_the_numbers_say_of_how_many_processes_they_are(
    folder: Path,
) -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: {}\nnum_processes: {}\n"
    for machines in (1, 2):
        (folder / "acc.yaml").write_text(text.format(machines, 8 * machines))
        commit()
    one = told(*MAKE, *CLUSTER)["acc.yaml"]
    numbers = {row["name"]: (row["before"], row["after"]) for row in one["numbers"]}
    assert (numbers["nodes"], numbers["processes"]) == ((1, 2), (8, 16))
    (note,) = one["notes"]
    assert "of the 8 processes that are declared, and the file starts 16" in note
    assert note in run("diff", "HEAD~1..HEAD", *MAKE, *CLUSTER).stdout


def test_why_neither_side_can_be_planned_is_told_with_what_to_type(folder: Path) -> None:
    data = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}
    for stage in (2, 3):
        (folder / "ds.json").write_text(json.dumps(data | {"zero_optimization": {"stage": stage}}))
        commit()
    (note,) = told(*MAKE, *CLUSTER)["ds.json"]["notes"]
    assert note.startswith("no change of memory, traffic or batch is told, as neither revision can be planned")
    assert "--batch-size 4" in note
    assert "neither revision can be planned" in run("diff", "HEAD~1..HEAD", *MAKE, *CLUSTER, "--comment").stdout
    again = told(*MAKE, *CLUSTER[:-1], "4")["ds.json"]
    assert again["notes"] == []
    assert "sent per step" in {row["name"] for row in again["numbers"]}
