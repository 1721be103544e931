"""``prepkit check --model`` finds all that is found without it, and plans what scripts start, as their libraries do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_launch_scripts import FOUR, ONE, WRONG, slurm
from tests.support.command_line import run, workplace

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
SHARDED = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
parallelism_config: {parallelism_config_dp_replicate_size: 1, parallelism_config_dp_shard_size: 8}
"""
ZERO = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 8\n"
BF16 = '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}'
CONFIGS = {
    "acc.yaml": ONE,
    "four.yaml": FOUR,
    "one.yaml": ONE.replace("MULTI_GPU", "'NO'"),
    "sharded.yaml": SHARDED,
    "odd.yaml": SHARDED.replace("num_processes: 8", "num_processes: 7").replace("machines: 1", "machines: 2"),
    "misspelt.yaml": SHARDED.replace("mixed_precision", "mixed_precison"),
    "zero.yaml": ZERO + "deepspeed_config: {zero_stage: 2}\n",
    "named.yaml": ZERO + "deepspeed_config: {deepspeed_config_file: ds.json}\n",
    "ds.json": BF16 + ', "nosuch": 1}',
    "alone.json": BF16.replace('"auto"', "0", 1) + "}",
    "ta.yaml": "output_dir: o\nper_device_train_batch_size: 2\nmax_steps: 9\nlearning_rate: -1\ndeepspeed: ds.json\n",
    "ax.yaml": "base_model: m\ndatasets: []\nmicro_batch_size: 2\nfsdp: [full_shard]\nfsdp_config: {nosuch: 1}\n",
    "ours.toml": 'engine = "FSDP2"\naccumulation = 0\n[mesh]\nreplicate = 3\nshard = 2\n',
    "unread.toml": 'engine = "FSDP2"\nacumulation = 4\n',
    "torn.json": '{"prepkit": 1, "kind": "plan", "engine": ',
    "sharded.sh": "accelerate launch --num_proceses 9 --num_processes 16 --config_file sharded.yaml t.py\n",
    "lines.sh": "accelerate launch --config_file zero.yaml t.py --gradient_accumulation_steps 4 --max_grad_norm 2\n"
    "deepspeed --num_gpus 8 t.py --output_dir o --per_device_train_batch_size 2 --deepspeed ds.json --max_steps x\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for _ in workplace(tmp_path, monkeypatch):
        for name in ("here", "m"):
            Path(name).mkdir()
        Path("m/config.json").write_text(json.dumps(MODEL))
        yield tmp_path


def found(*words: str) -> dict[str, Any]:
    return dict(json.loads(run("check", *words, "--json").stdout))


def placed(said: dict[str, Any]) -> set[tuple[str, str, int]]:
    return {(one["rule"], one["file"], one["line"]) for one in said["findings"]}


def test_what_is_found_without_a_model_is_found_with_one(folder: Path) -> None:
    """In a folder with everything that may be wrong, and in one with each file and what it names alone."""
    for name, text in CONFIGS.items() | {(f"run{at}.slurm", text) for at, (text, *_) in enumerate(WRONG)}:
        Path("here", name).write_text(text)
    Path("here/t.py").write_text("print(1)\n")
    without = found("here")
    assert {one["rule"].partition(".")[0] for one in without["findings"]} >= {"launch", "mesh", "import", "deepspeed"}
    with_model = found("here", "--model", "m", "--device", "cuda")
    assert placed(without) - placed(with_model) == set()
    for name in CONFIGS:
        one, other = found(f"here/{name}"), found(f"here/{name}", "--model", "m")
        assert placed(one) - placed(other) == set(), name


def test_the_plan_is_that_of_as_many_processes_as_the_line_starts(folder: Path) -> None:
    line = slurm("--nodes=2", "--ntasks-per-node=1", "srun accelerate launch --num_machines 2 --num_processes 32 {}")
    rest = "--machine_rank $SLURM_NODEID --main_process_ip h --main_process_port 1 --config_file acc.yaml t.py"
    Path("here/acc.yaml").write_text(ONE)
    Path("here/run.slurm").write_text(line.format(rest))
    done = run("check", "here", "--model", "m", "--optimizer", "adamw")
    assert (done.exit_code, "a plan exists for world size 32\n" in done.stdout) == (0, True), done.stdout
    said = run("check", "here", "--model", "m", "--world-size", "8").stdout
    assert "a plan exists for world size 8\n" in said  # what is typed wins
    Path("here/acc.yaml").write_text(SHARDED)
    done = run("check", "here", "--model", "m", "--optimizer", "adamw")
    assert done.exit_code == 1
    assert "here/acc.yaml:7:" in done.stdout
    assert "error mesh.not-world-size" in done.stdout
    Path("here/acc.yaml").unlink()
    Path("here/run.slurm").write_text("torchrun --nproc_per_nodes 8 t.py\n")
    done = run("check", "here", "--model", "m")
    assert (done.exit_code, "launch.unknown-option" in done.stdout) == (1, True)


@pytest.mark.parametrize(
    ("text", "supposed", "tells"),
    [
        (ZERO + "deepspeed_config: {zero_stage: 2}\n", "a sample at a time, supposing AdamW", "add --batch-size N"),
        (ZERO + "deepspeed_config: {deepspeed_config_file: b.json}\n", "AdamW", "add --optimizer adamw, or run"),
        (SHARDED, "", "add --optimizer adamw, or run"),
    ],
)
def test_what_a_script_gives_is_not_known_here_and_no_error(text: str, supposed: str, tells: str, folder: Path) -> None:
    Path("here/a.yaml").write_text(text)
    Path("here/b.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}')
    done = run("check", "here/a.yaml", "--model", "m")
    assert done.exit_code == 0, done.stdout
    assert f"a plan exists for world size 8{f', supposing {supposed}' if supposed else ''}\n" in done.stdout
    assert tells in done.stdout.partition("cannot know here:")[2]
    assert found("here/a.yaml", "--model", "m")["findings"] == []
    given = ("--optimizer", "adamw", "--batch-size", "2")
    done = run("check", "here/a.yaml", "--model", "m", *given)
    assert (done.exit_code, "supposing" in done.stdout) == (0, False)
    plan = run("plan", "here/a.yaml", "--model", "m", "-o", "p.json")
    assert (plan.exit_code == 0) is not bool(supposed)  # what a plan file says is not supposed
    assert not supposed or "--optimizer adamw on the command line" in plan.stderr
    assert run("plan", "here/a.yaml", "--model", "m", *given, "-o", "p.json").exit_code == 0


BATCH = {
    "ta.yaml": "output_dir: o\nper_device_train_batch_size: 2\nmax_steps: 9\ngradient_accumulation_steps: 4\n",
    "zero.yaml": "output_dir: o\nper_device_train_batch_size: 2\nmax_steps: 9\ngradient_accumulation_steps: 4\n"
    "deepspeed: {zero_optimization: {stage: 2}, gradient_clipping: auto}\n",
    "ax.yaml": "base_model: m\ndatasets: []\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n",
    "lf.yaml": "model_name_or_path: m\nstage: sft\noutput_dir: o\nper_device_train_batch_size: 2\n"
    "finetuning_type: full\ngradient_accumulation_steps: 4\n",
}
TITAN = '[model]\nname = "llama3"\n[training]\nlocal_batch_size = 8\n[parallelism]\ndata_parallel_shard_degree = -1\n'


@pytest.mark.parametrize("name", [*BATCH, "tt.toml"])
def test_the_batch_and_the_optimizer_of_a_file_are_those_of_its_plan(name: str, folder: Path) -> None:
    Path(name).write_text({**BATCH, "tt.toml": TITAN}[name])
    words = ("--model", "m", "--world-size", "8", "--device", "cuda")
    done = run("check", name, *words)
    assert (done.exit_code, "NOT counted" in done.stdout) == (0, False), done.stdout
    assert "optimizer.none" not in done.stdout
    for limit, code in ((63, 1), (64, 0)):
        Path("p.toml").write_text(
            f'[[deny]]\nid = "ours.x"\nwhat = "global_batch"\nabove = {limit}\nbecause = "y"\n'
            '[[deny]]\nid = "ours.o"\nwhat = "optimizer"\nis_not = "AdamW"\nbecause = "y"\n'
        )
        made = run("plan", name, *words, "--policy", "p.toml", "-o", "plan.json")
        assert (made.exit_code, "ours.o" in made.stderr) == (code, False), made.stderr
    assert run("gate", "plan.json", "--policy", "p.toml", "--strict").exit_code == 0
    assert run("plan", name, *words, "--batch-size", "1", "--policy", "p.toml").exit_code == int(name == "zero.yaml")


@pytest.mark.parametrize(
    ("optim", "kind"),
    [("sgd", "SGD"), ("adafactor", "Adafactor"), ("adamw_torch", "AdamW"), ("", "AdamW"), ("adamw_bnb_8bit", None)],
)
def test_the_optimizer_that_is_named_is_the_one_that_is_counted(optim: str, kind: str | None, folder: Path) -> None:
    Path("ta.yaml").write_text(BATCH["ta.yaml"] + (f"optim: {optim}\n" if optim else ""))
    words = ("--model", "m", "--world-size", "8", "--device", "cuda")
    assert ("NOT counted" in run("check", "ta.yaml", *words).stdout) is (kind is None)
    run("plan", "ta.yaml", *words, "-o", "plan.json")
    asked = json.loads(Path("plan.json").read_text())["plan"]["config"].get("optimizer")
    assert (asked or {}).get("kind") == kind


def test_the_numbers_of_a_file_are_those_of_the_optimizer_that_is_typed_again(folder: Path) -> None:
    Path("here/ta.yaml").write_text("output_dir: o\nper_device_train_batch_size: 2\nlearning_rate: 2.0e-6\n")
    rates = {}
    for name in ("adamw", "sgd"):
        words = ("--model", "m", "--world-size", "2", "--device", "cuda", "--optimizer", name, "-o", "plan.json")
        assert run("plan", "here/ta.yaml", *words).exit_code == 0
        optimizer = json.loads(Path("plan.json").read_text())["plan"]["config"]["optimizer"]
        rates[optimizer["kind"]] = optimizer["lr"]
    assert rates == {"AdamW": 2e-6, "SGD": 1e-3}


def test_a_value_that_a_plan_does_not_say_is_told_with_the_option_that_says_it_where_there_is_one(
    folder: Path,
) -> None:
    Path("c.toml").write_text('engine = "FSDP2"\n')
    words = ("plan", "c.toml", "--model", "m", "--world-size", "8", "--device", "cuda", "--policy", "p.toml")
    for what, test, option in (
        ("global_batch", "above = 8", "--batch-size N"),
        ("traffic.between_nodes", "above = 8", "--per-node N"),
        ("config.engine.stage", "above = 1", ""),
        ("config.clip.max_norm", "above = 1", ""),
    ):
        Path("p.toml").write_text(
            f'[[deny]]\nid = "ours.x"\nwhat = "{what}"\n{test}\nbecause = "y"\nfix = "Mend it."\n'
        )
        said = run(*words).stderr
        assert f"the plan says no {what}" in said
        assert ("plan with " in said, option in said) == (bool(option), True)
