"""``prepkit check`` without a model: what it finds by itself, what it says of it, and what it cannot know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings

from prepkit.config import Config, DeepSpeed
from prepkit.facts import Env
from prepkit.resolve.deepspeed.data import said
from prepkit.rules import deepspeed
from prepkit.rules.without_model import ask
from prepkit.testing.strategies.deepspeed import deepspeeds
from tests.support.command_line import MAKE, fresh, run, workplace

DEEPSPEED = """{
  "train_micro_batch_size_per_gpu": 4,
  "zero_optimization": {
    "stage": 3,
    "overlap_com": true
  }
}
"""
SLURM = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=8
CONFIG=acc.yaml
srun torchrun --nnodes 4 --nproc_per_node=8 \\
    train.py --deepspeed sub/ds.json
accelerate launch --config_file $CONFIG --num_machines 2 --num_processes 3 train.py
accelerate launch --config_file $ELSEWHERE/other.yaml train.py
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


@pytest.fixture
def project(folder: Path) -> Path:
    """A folder of somebody else's: configs of four libraries, a script that starts two of them, and other files."""
    here = folder / "project"
    for name, text in {
        "acc.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precison: bf16\n",
        "sub/ds.json": DEEPSPEED,
        "ax.yml": "base_model: m\ndatasets: []\nmicro_batch_size: 1\nbf16: auto\ncontext_parallel_size: 2\n",
        "run.slurm": SLURM,
        "package.json": '{"name": "engine", "kind": "other"}',
        "workflow.yml": "on: push\njobs: {}\n",
        ".hidden/acc.yaml": "distributed_type: NOTHING\n",
    }.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    return here


def test_a_folder_is_searched_and_each_finding_has_its_place(project: Path) -> None:
    done = run("check", "project", "--json")
    data = json.loads(done.stdout)
    assert done.exit_code == 1
    assert {(one["file"], one["kind"]) for one in data["files"]} == {
        ("project/acc.yaml", "accelerate"),
        ("project/sub/ds.json", "deepspeed"),
        ("project/ax.yml", "axolotl"),
        ("project/run.slurm", "script"),
    }
    places = {(one["rule"], one["file"], one["line"], one["column"]) for one in data["findings"]}
    assert {
        ("import.unknown-key", "project/acc.yaml", 3, 1),
        ("deepspeed.unknown-key", "project/sub/ds.json", 5, 5),
        ("launch.gpus", "project/run.slurm", 6, 6),
        ("launch.nodes", "project/run.slurm", 6, 6),
        ("launch.twice", "project/run.slurm", 6, 6),
        ("launch.processes", "project/run.slurm", 8, 1),
    } <= places


def test_what_only_another_place_can_tell_is_not_called_wrong(project: Path) -> None:
    data = json.loads(run("check", "project", "--json").stdout)
    unknown = {(one["rule"], one["file"], one["line"]) for one in data["cannot_know"]}
    assert unknown == {
        ("import.asks-machine", "project/ax.yml", 4),
        ("import.not-supported", "project/ax.yml", 5),
        ("config.unasked", "project/ax.yml", 5),
        ("import.missing-file", "project/run.slurm", 9),
    }
    said = run("check", "project")
    assert "cannot know here:" in said.stdout
    assert "add --model FOLDER, with its config.json, or --model PKG.MOD:FACTORY" in said.stdout
    assert "\nproject/ax.yml" not in said.stdout


@pytest.mark.parametrize(
    ("text", "tells", "case"),
    [
        (
            "distributed_type: FSDP\nnum_processes: many\n",
            "correct its errors, then: prepkit check a.yaml",
            '<skipped message="what it means is not known',
        ),
        (
            "distributed_type: FSDP\nnum_processes: 4\nparallelism_config: {parallelism_config_cp_size: 2}\n",
            "run prepkit audit SCRIPT, where it trains",
            '<skipped message="it asks for what prepkit does not do',
        ),
    ],
)
def test_a_file_that_no_rule_was_asked_about_says_so_and_what_would_tell(
    text: str, tells: str, case: str, folder: Path
) -> None:
    Path("a.yaml").write_text(text)
    unasked = run("check", "a.yaml").stdout.partition("cannot know here:\n")[2]
    assert "so that no rule was asked about it" in unasked
    assert tells in unasked
    gated = json.loads(run("gate", "a.yaml", "--format", "sarif").stdout)["runs"][0]["results"]
    assert [one["level"] for one in gated if one["ruleId"] == "config.unasked"] == ["note"]
    assert case in run("gate", "a.yaml", "--format", "junit").stdout
    Path("a.yaml").write_text("distributed_type: FSDP\nnum_processes: 4\n")
    assert "config.unasked" not in run("check", "a.yaml", "--json").stdout


@pytest.mark.parametrize("of", ["accelerate", "transformers"])
def test_a_json_that_cannot_be_read_hides_what_the_file_that_names_it_means(of: str, folder: Path) -> None:
    """Rules that are asked of the file alone would judge another engine."""
    Path("ds.json").write_text("{")
    texts = {
        "accelerate": "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n",
        "transformers": "output_dir: x\nmax_steps: 9\ndeepspeed: ds.json\n",
    }
    Path("a.yaml").write_text(texts[of])
    data = json.loads(run("check", "a.yaml", "ds.json", "--json").stdout)
    assert "config.unasked" in {one["rule"] for one in data["cannot_know"] if one["file"] == "a.yaml"}
    assert {one["rules_that_hold"] for one in data["files"] if one["file"] == "a.yaml"} == {0}


def test_a_json_that_a_script_makes_is_one_finding_and_asks_for_no_correction(folder: Path) -> None:
    Path("here").mkdir()
    one = Path("here/a.yaml")
    Path("here/run.sh").write_text("python make.py > ds.json\ntorchrun --nproc_per_node 8 train.py --config a.yaml\n")
    one.write_text("output_dir: x\nmax_steps: 9\nlearning_rate: 0.1\ndeepspeed: ds.json\n")
    data = json.loads(run("check", "here", "--json").stdout)
    assert data["findings"] == []
    assert [(note["rule"], note["file"], note["line"], note["what"]) for note in data["cannot_know"]] == [
        (
            *("config.unasked", "here/a.yaml", 4),
            "ds.json is not here, and here/run.sh may make it before it is read, so that no rule was asked about it",
        )
    ]
    gated = run("gate", "here").stdout
    assert (gated.count("config.unasked"), "errors stand" in gated) == (1, False)
    one.write_text(f"{one.read_text()}bf16: maybe\n")
    told = [note["rule"] for note in json.loads(run("check", "here", "--json").stdout)["cannot_know"]]
    assert sorted(told) == ["config.unasked", "import.missing-file"]  # one is to be corrected, the other is not here


def test_what_a_trainer_is_started_with_is_its_config_whatever_its_keys(folder: Path) -> None:
    """LLaMA-Factory knows no extends, and refuses the file; nothing in it tells whose it is but who is given it."""
    Path("here").mkdir()
    Path("here/run.yaml").write_text("extends: base.yaml\nfp16: true\n")
    assert json.loads(run("check", "here", "--json").stdout)["files"] == []
    Path("here/go.sh").write_text("llamafactory-cli train run.yaml\n")
    data = json.loads(run("check", "here", "--json").stdout)
    told = {(one["file"], one["kind"], one["why"]) for one in data["files"]}
    assert ("here/run.yaml", "llamafactory", "here/go.sh starts it") in told
    assert [(one["file"], one["line"], one["rule"]) for one in data["findings"]] == [
        ("here/run.yaml", 1, "import.unknown-key")
    ]


def test_what_the_trainer_refuses_hides_no_rule_about_the_json(folder: Path) -> None:
    words = "--output_dir out --per_device_train_batch_size 4 --learning_rate 2e-5 --bf16 True --deepspeed ds.json"
    Path("run.sh").write_text(f"torchrun --nproc_per_node 8 train.py {words}\n")
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": optimizer, "bf16": {}}))
    data = json.loads(run("check", "--json").stdout)
    assert "import.contradiction" in {one["rule"] for one in data["findings"] if one["file"] == "run.sh"}
    assert "config.unasked" not in {one["rule"] for one in data["cannot_know"]}
    assert {one["why"] for one in data["files"] if one["file"] == "ds.json"} == {"run.sh names it"}


def test_files_that_are_named_and_taken_for_nothing_are_named_again(folder: Path) -> None:
    Path("a.yaml").write_text("distributed_type: MULTI_GPU\n")
    Path("b.yaml").write_text("lr: 0.1\n")
    done = run("check", "a.yaml", "b.yaml")
    assert "passed by b.yaml: nothing tells whose config it is; name it alone, with --from LIBRARY\n" in done.stdout
    assert json.loads(run("check", "a.yaml", "b.yaml", "--json").stdout)["passed_by"] == ["b.yaml"]
    Path("a.yaml").unlink()
    assert "passed by" not in run("check", ".").stdout


def test_two_misspelt_keys_of_a_file_are_two_findings_on_the_screen(folder: Path) -> None:
    Path("a.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precison: bf16\nnum_proceses: 8\n")
    said = run("check", "a.yaml").stdout
    assert "a.yaml:2:1: error import.unknown-key: mixed_precison: " in said
    assert "a.yaml:3:1: error import.unknown-key: num_proceses: " in said
    assert "\n  fix: Write 'num_processes', or remove it.\n" in said


JSON_FOR_TRAINER = """{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_clipping": "auto",
  "optimizer": {
    "type": "AdamW",
    "params": {
      "lr": "auto"
    }
  },
  "zero_optimization": {
    "stage": "three",
    "overlap_com": true
  }
}
"""


def test_a_json_that_others_name_is_checked_as_a_part_of_them_and_each_mistake_told_once(folder: Path) -> None:
    """Of its own line and key, under the shortest name of the file, and with what those that name it fill in."""
    arguments = "output_dir: out\nper_device_train_batch_size: 4\ndeepspeed: ../conf/ds.json\n"
    for name, text in {
        "conf/ds.json": JSON_FOR_TRAINER,
        "jobs/one.yaml": f"learning_rate: 1.0e-5\n{arguments}",
        "jobs/two.yaml": f"learning_rate: 2.0e-5\n{arguments}",
        "jobs/alone.json": JSON_FOR_TRAINER,
    }.items():
        (folder / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "project" / name).write_text(text)
    data = json.loads(run("check", "project", "--json").stdout)
    for file, autos in (("project/conf/ds.json", []), ("project/jobs/alone.json", [3, 7])):
        found = [(one["rule"], one["line"], one["column"]) for one in data["findings"] if one["file"] == file]
        assert sorted(found) == [("deepspeed.unknown-key", 12, 5), ("deepspeed.wrong-type", 11, 5)]
        left = [one for one in data["cannot_know"] if one["file"] == file and one["rule"] != "deepspeed.batch"]
        assert sorted(one["line"] for one in left if '"auto"' in one["what"]) == autos, left
    named = next(one for one in data["files"] if one["file"] == "project/conf/ds.json")
    assert named["why"] == "project/jobs/one.yaml, project/jobs/two.yaml name it"
    assert len(data["findings"]) == 4
    text = run("check", "project").stdout
    assert "2 files wrong, 2 files fine" in text


def test_a_json_that_is_named_by_what_cannot_be_read_is_checked_alone(folder: Path) -> None:
    Path("ds.json").write_text(JSON_FOR_TRAINER)
    Path("args.yaml").write_text("output_dir: a\nbf16: true\nfp16: true\nlearning_rate: 1.0\ndeepspeed: ds.json\n")
    data = json.loads(run("check", "ds.json", "args.yaml", "--json").stdout)
    assert {(one["file"], one["rule"]) for one in data["findings"]} == {
        ("args.yaml", "import.contradiction"),
        ("ds.json", "deepspeed.wrong-type"),
        ("ds.json", "deepspeed.unknown-key"),
    }


TRAINED = """deepspeed --num_gpus 8 run_clm.py --model_name_or_path m --do_train \\
    --output_dir out --per_device_train_batch_size {batch} --gradient_accumulation_step 2 \\
    --learning_rate {rate} --max_steps -1 --bf16 --deepspeed conf/ds.json
"""
"""As people write it: an option that is cut short, a switch without a value, and a number below 0."""


def test_the_arguments_of_a_line_are_checked_with_the_json_that_it_names(folder: Path) -> None:
    Path("conf").mkdir()
    data = {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "zero_optimization": {"stage": 3}}
    params = {"lr": 2e-5, "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    batches = {"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": 4}
    Path("conf/ds.json").write_text(json.dumps({**data, "optimizer": {"type": "AdamW", "params": params}, **batches}))
    for rate, batch, wrong in (("2e-5", 4, []), ("$LR", 4, []), ("1e-5", 4, [(3, 5)]), ("2e-5", 8, [(2, 22)])):
        Path("run.sh").write_text(TRAINED.format(rate=rate, batch=batch))
        data = json.loads(run("check", "conf", "run.sh", "--json").stdout)
        assert [(one["line"], one["column"]) for one in data["findings"] if one["file"] == "run.sh"] == wrong
        assert all(one["rule"] == "import.contradiction" for one in data["findings"])
        assert not any('"auto"' in one["what"] for one in data["cannot_know"]), rate
    assert [one["file"] for one in data["files"]] == ["run.sh", "conf/ds.json"]


def test_the_arguments_of_other_scripts_are_theirs(folder: Path) -> None:
    """They have the names of ``TrainingArguments``, and say neither DeepSpeed nor FSDP."""
    line = "--output_dir o --per_device_train_batch_size 4 --lr_warmup_steps 10 --logging_dir logs"
    Path("run.sh").write_text(f"accelerate launch --num_processes 2 train_lora.py {line}\n")
    assert json.loads(run("check", "run.sh", "--json").stdout)["findings"] == []


def test_a_file_of_prepkits_own_is_told_where_its_engine_is_misspelt(folder: Path) -> None:
    Path("ours.toml").write_text('accumulation = 4\n[engine]\nkind = "FSDP"\n')
    Path("theirs.yaml").write_text("kind: Database\nengine: postgres\n")
    data = json.loads(run("check", "ours.toml", "theirs.yaml", "--json").stdout)
    assert [one["file"] for one in data["files"]] == ["ours.toml"]
    assert [(one["rule"], one["line"]) for one in data["findings"]] == [("codec.unknown-kind", 3)]


def test_a_script_says_for_how_many_processes_its_config_is_checked(project: Path) -> None:
    """48 = 4 x 12 samples cannot be had on the 32 processes that the script starts."""
    text = DEEPSPEED.replace("overlap_com", "overlap_comm").replace("{\n", '{\n  "train_batch_size": 48,\n', 1)
    (project / "sub/ds.json").write_text(text)
    alone = json.loads(run("check", "project/sub/ds.json", "--json").stdout)
    assert not [one for one in alone["findings"] if one["rule"] == "deepspeed.batch-sizes"], alone
    started = json.loads(run("check", "project", "--json").stdout)
    found = [one for one in started["findings"] if one["file"].endswith("ds.json")]
    assert any("32" in one["what"] for one in found), started["findings"]


AXOLOTL = """base_model: org/small
datasets: []
micro_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 2e-5
"""
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8}


def test_a_model_that_is_named_and_not_here_is_told_with_the_command_that_fetches_it(folder: Path) -> None:
    Path("ax.yml").write_text(AXOLOTL)
    said = run("check", "ax.yml", "--world-size", "8").stdout
    assert "ax.yml: it names org/small: there is no folder org/small" in said
    assert "hf download org/small config.json" in said
    assert "memory" not in said
    Path("ax.yml").write_text(AXOLOTL.replace("org/small", "../../etc"))
    assert "it names ../../etc, which lies elsewhere" in run("check", "ax.yml").stdout
    Path("ax.yml").write_text(AXOLOTL + "adapter: lora\n")  # what is trained is not the model alone
    assert "org/small" not in run("check", "ax.yml", "--world-size", "8").stdout


def test_a_model_beside_the_file_gives_memory_and_the_dearest_settings(folder: Path) -> None:
    """6.5 B parameters, float32, in AdamW: 4 + 4 + 8 bytes of each on every rank of DDP, and an eighth if sharded."""
    Path("ax.yml").write_text(AXOLOTL)
    Path("org/small").mkdir(parents=True)
    Path("org/small/config.json").write_text(json.dumps(LLAMA))
    alone = json.loads(run("check", "ax.yml", "--json").stdout)["files"][0]
    one = json.loads(run("check", "ax.yml", "--json", "--world-size", "8").stdout)["files"][0]
    assert one["rules_that_hold"] > alone["rules_that_hold"]
    assert "the model" not in one["not_known"]
    assert one["costs"]["floor"] == pytest.approx(16 * 5_933_109_248, rel=1e-3)
    dearest = one["costs"]["dearest"]
    assert dearest[0]["change"] == ["engine=FSDP2() instead of DDP()"]
    assert dearest[0]["less"] > one["costs"]["floor"] // 2
    said = run("check", "ax.yml", "--world-size", "8").stdout
    assert "ax.yml, with org/small:" in said  # axolotl creates AdamW where nothing is said
    assert "GiB for certain and " in said
    assert "dearest settings:\n    engine=FSDP2() instead of DDP(): " in said


def test_the_dearest_settings_of_a_deepspeed_file_are_its_keys_and_not_the_file(folder: Path) -> None:
    both = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000}}
    Path("ds.json").write_text(json.dumps(both | {"gradient_clipping": 0.0}))
    Path("small").mkdir()
    Path("small/config.json").write_text(json.dumps(LLAMA))
    words = ("--model", "small", "--world-size", "8", "--device", "cuda", "--optimizer", "AdamW")
    said = run("check", "ds.json", *words)
    assert "dearest settings:\n" in said.stdout, said.stderr
    changes = said.stdout.partition("dearest settings:\n")[2].partition("cannot know")[0]
    assert "zero_optimization.stage=3 instead of 2: " in changes
    assert 'zero_optimization.offload_optimizer.device="cpu": ' in changes
    assert "{" not in changes


@pytest.mark.parametrize(
    ("name", "text", "keys"),
    [
        (
            "ds.json",
            '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}',
            "Here clip is gradient_clipping.",
        ),
        (
            "acc.yaml",
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: NO_WRAP}\n",
            "Here wrap is fsdp_config.fsdp_auto_wrap_policy",
        ),
        ("own.toml", '[engine]\nkind = "FSDP2"\nwrap = "WrapRoot"\n', ""),
    ],
)
def test_a_fix_names_the_key_of_the_file_that_says_it(name: str, text: str, keys: str, folder: Path) -> None:
    """Nobody can write ``clip=ClipNorm(1.0)`` into DeepSpeed's JSON."""
    Path(name).write_text(text)
    words = ("--world-size", "2", "--device", "cuda", "--batch-size", "2")
    alone = json.loads(run("check", name, "--json", *words).stdout)["findings"]
    beside = json.loads(run("check", name, "--json", *words, *MAKE).stdout)["findings"]
    fixes = [one["fix"] for one in (*alone, *beside)]
    assert fixes
    assert [fix for fix in fixes if keys in fix]
    assert keys or not [fix for fix in fixes if " Here " in fix]


@pytest.mark.parametrize("word", ["check", "plan", "sweep"])
def test_an_optimizer_that_is_named_is_counted_where_the_config_names_none(word: str, folder: Path) -> None:
    """AdamW holds two moments of each weight, SGD without momentum none: both are told, and no state is left out."""
    Path("ddp.toml").write_text('engine = "DDP"\n')
    words = (word, "ddp.toml", *MAKE, "--world-size", "8", "--device", "cuda", "--memory", "80GiB", "--optimizer")
    adamw, sgd = (run(*words, name).stdout for name in ("adamw", "SGD"))
    assert "optimizer state NOT counted" not in adamw + sgd
    assert adamw != sgd
    assert run(*words, "lion").exit_code == 2
    Path("ddp.toml").write_text('engine = "DDP"\noptimizer = "SGD"\n')  # what the config says stands
    assert run(*words, "adamw").stdout == run(*words[:-1]).stdout


def test_the_names_of_optimizers_complete_in_a_shell(folder: Path) -> None:
    said = fresh(_PREPKIT_COMPLETE="bash_complete", COMP_WORDS="prepkit check --optimizer A", COMP_CWORD="3").stdout
    assert [line.partition(",")[2] for line in said.splitlines()] == ["adamw", "adam", "adagrad", "adafactor"]


def test_what_another_library_may_do_is_wrong_in_a_file_of_prepkits_own(folder: Path) -> None:
    both = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    Path("own.json").write_text(json.dumps({"engine": {"kind": "DeepSpeed", "config": both}}))
    Path("ds.json").write_text(json.dumps(both))
    data = json.loads(run("check", "own.json", "ds.json", "--json").stdout)
    assert {(one["rule"], one["file"]) for one in data["findings"] if one["rule"] == "deepspeed.precision"} == {
        ("deepspeed.precision", "own.json")
    }


@pytest.mark.parametrize("optimizer", ["", 'optimizer = "AdamW"\n'])
def test_memory_without_an_optimizer_is_told_to_be_without_its_state(folder: Path, optimizer: str) -> None:
    """Twice the parameters in AdamW's moments are most of what a rank holds: nobody may take the rest for all."""
    Path("ddp.toml").write_text(f'engine = "DDP"\n{optimizer}')
    cluster = (*MAKE, "--world-size", "8", "--device", "cuda", "--memory", "80GiB")
    told = [run(word, "ddp.toml", *cluster).stdout for word in ("check", "plan")]
    told.append(run("sweep", "ddp.toml", *MAKE, "--world-size", "8", "--device", "cuda", "--memory", "80GiB").stdout)
    for text in told:
        assert "activations" in text
        assert ("optimizer state NOT counted (no optimizer is given)" in text) is (not optimizer)


AUTO = """{
  "zero_optimization": {
    "stage": 3,
    "reduce_bucket_size": "auto",
    "overlap_com": true
  },
  "fp16": {"enabled": true},
  "bf16": {"enabled": true},
  "gradient_clippping": 1.0,
  "train_micro_batch_size_per_gpu": 4
}
"""


def test_an_auto_that_only_the_model_tells_hides_no_finding(folder: Path) -> None:
    """The bucket size is worked out from the hidden size, which nobody knows here: what else is wrong is told."""
    Path("auto.json").write_text(AUTO)
    Path("number.json").write_text(AUTO.replace('"auto"', "1000000"))
    told = []
    for name in ("auto.json", "number.json"):
        data = json.loads(run("check", name, "--json").stdout)
        told.append([(one["rule"], one["line"]) for key in ("findings", "cannot_know") for one in data[key]])
    assert told[0] == told[1]
    expected = [("import.contradiction", 7), ("deepspeed.unknown-key", 5), ("deepspeed.unknown-key", 9)]
    expected.append(("deepspeed.precision", 7))
    assert told[0] == expected
    assert run("gate", "auto.json", "--strict").exit_code == 1


@settings(max_examples=60, deadline=None)
@given(deepspeeds())
def test_no_rule_of_the_text_waits_for_facts_and_no_typo_is_hidden(engine: DeepSpeed) -> None:
    """Of a file without a model: what is said of its keys is said whatever else stands in it, and is no guess."""
    env = Env.declare(world_size=1)
    answers = ask(Config(engine=engine), env, frozenset(), rules=deepspeed.RULES)
    assert not {f"deepspeed.{name}" for name in deepspeed.TEXT} & {rule for rule, _ in answers.unasked}
    data = said(engine)
    if not data:
        return
    misspelt = evolve(engine, config=json.dumps(data | {"gradient_clippping": 1.0}))
    found = ask(Config(engine=misspelt), env, frozenset(), rules=deepspeed.RULES).findings
    assert [one for one in found if "`gradient_clippping`" in one.what]


def test_findings_of_a_kind_are_told_once(folder: Path) -> None:
    for number in range(30):
        (folder / f"{number}.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precison: bf16\n")
    done = run("check")
    assert done.stdout.count("import.unknown-key") == 1
    assert "29 more findings of the kinds above" in done.stdout
    assert len((done.stdout + done.stderr).splitlines()) < 40


@pytest.mark.parametrize("suffix", ["json", "yaml", "toml", "sh"])
@pytest.mark.parametrize(
    "text", ["", "{", "\x00", "zero_optimization: [", '{"zero_optimization": 1, "fp16": []}', "[a"]
)
def test_a_damaged_file_gives_findings_and_no_traceback(suffix: str, text: str, folder: Path) -> None:
    Path(f"deepspeed.{suffix}").write_text(text)
    assert run("check", f"deepspeed.{suffix}", "--json").exit_code in (0, 1)
    assert run("check", "--json").exit_code in (0, 1)


def test_several_files_are_checked_against_one_model(folder: Path) -> None:
    Path("broken.toml").write_text('[engine]\nkind = "FSDP9"\n')
    done = run("check", "fsdp2.toml", "single.json", "broken.toml", *MAKE, "--world-size", "1", "--device", "cpu")
    assert done.exit_code == 1
    assert "single.json:\na plan exists for world size 1" in done.stdout
    assert "codec.unknown-kind" in done.stdout


def test_a_check_against_a_model_says_what_no_declared_cluster_tells(folder: Path) -> None:
    words = ("check", "fsdp2.toml", *MAKE, "--world-size", "4", "--device", "cuda")
    done = run(*words)
    said = json.loads(run(*words, "--json").stdout)["cannot_know"]
    what = {one["what"]: one["tells"] for one in said}
    assert what["the version of torch"] == "add --torch VERSION"
    assert {"the loaders", "the scheduler"} <= set(what)
    assert not {"the model", "the number of processes", "the device type", "the optimizer"} & set(what)  # all given
    assert [
        line.split(":")[0].strip() for line in done.stdout.splitlines() if "asks for it" in line or "ask for it" in line
    ]
    assert run("check", "fsdp2.toml", "--torch", "nightly").exit_code == 0  # which is no release
    assert "the version of torch" not in {
        one["what"] for one in json.loads(run(*words, "--torch", "2.9", "--json").stdout)["cannot_know"]
    }


def test_findings_of_a_model_have_their_place_as_data_too(folder: Path) -> None:
    """As in the text, and as without a model: of one file and of several, refused or not."""
    wrong = '{\n "engine": "FSDP2",\n "optimizer": "AdamW",\n "mesh": {"replicate": 3}\n}\n'
    for name, text in {"a.json": wrong, "b.json": wrong, "c.json": wrong.replace("mesh", "mehs")}.items():
        Path(name).write_text(text)
    model = ("--model", "model_of_cli_tests:make", "--world-size", "4", "--json")
    for paths in (("a.json",), ("c.json",), ("a.json", "b.json")):
        found = json.loads(run("check", *paths, *model).stdout)["findings"]
        assert {one["file"] for one in found} == {*paths}, found
        assert {one["line"] for one in found if one["severity"] == "error"} == {4}, found


def test_heads_that_do_not_divide_the_width_are_told_of_the_config_of_the_model(folder: Path) -> None:
    Path("m").mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 5}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    Path("m/config.json").write_text(json.dumps(llama, indent=1))
    arguments = {"model_name_or_path": "./m", "stage": "sft", "finetuning_type": "full", "output_dir": "o"}
    Path("lf.json").write_text(json.dumps(arguments | {"do_train": True}))
    Path("p.json").write_text('{"engine": "DDP", "optimizer": "AdamW"}')
    for words in (("lf.json",), ("p.json", "--model", "m", "--world-size", "2")):
        result = run("check", *words, "--json")
        assert result.exit_code == 1
        found = [one for one in json.loads(result.stdout)["findings"] if one["rule"] == "model.sizes"]
        places = [(Path(one["file"]).as_posix(), one["line"], one["column"]) for one in found]
        assert places == [("m/config.json", 7, 2)], result.stdout


_BATCH = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
_FILE = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (None, "acc.yaml:2:1"),
        ("accelerate launch --config_file acc.yaml train.py", "acc.yaml:2:1"),
        ("accelerate launch --config_file acc.yaml --num_processes 4 train.py", "run.sh:2:1"),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", "run.sh:2:1"),
    ],
)
def test_a_batch_that_several_files_make_names_the_place_of_its_ranks(
    folder: Path, line: str | None, said: str
) -> None:
    Path("ds.json").write_text(json.dumps(_BATCH | {"zero_optimization": {"stage": 2}}))
    if line is None or "acc.yaml" in line:
        Path("acc.yaml").write_text(_FILE)
    if line is not None:
        Path("run.sh").write_text(f"#!/bin/bash\n{line}\n")
    found = json.loads(run("check", ".", "--json").stdout)["findings"]
    batches = [one for one in found if one["rule"] == "deepspeed.batch"]
    assert {one["file"] for one in batches} == {"ds.json"}
    assert any(f"ranks by {said}." in one["what"] for one in batches), batches


def test_a_type_that_accelerate_does_not_know_is_all_that_is_told_of_it(folder: Path) -> None:
    """What NO would do with the rest follows from the typo alone."""
    Path("acc.yaml").write_text("distributed_type: MULTIGPU\nmixed_precision: bf16\nnum_processes: 8\n")
    Path("f.yaml").write_text("distributed_type: FSPD\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n")
    Path("x.yaml").write_text("distributed_type: SHARDS\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n")
    for name in ("acc.yaml", "f.yaml", "x.yaml"):
        found = json.loads(run("check", name, "--json").stdout)["findings"]
        assert [(one["rule"], one["line"]) for one in found] == [("import.wrong-value", 1)], name


def test_a_json_with_a_number_of_thousands_of_digits_is_told_in_a_folder_too(folder: Path) -> None:
    Path("here").mkdir()
    Path("here/ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": ' + "9" * 5000 + "}")
    found = json.loads(run("check", "here", "--json").stdout)["findings"]
    assert [(one["file"], one["rule"], one["column"]) for one in found] == [("here/ds.json", "codec.wrong-value", 37)]


_MISSPELT = "distributed_type: MULTI_GPU\nmixed_precison: bf16\nnum_processes: 8\n"


def test_a_patch_has_each_file_once_and_none_that_may_not_be_written(folder: Path) -> None:
    Path("here").mkdir()
    Path("here/b.yaml").write_text(_MISSPELT)
    Path("here/a.yaml").symlink_to("b.yaml")
    Path("here/c.yaml").write_text(_MISSPELT)
    Path("here/c.yaml").chmod(0o444)
    done = run("check", "here", "--diff")
    assert done.exit_code == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("+++")] == ["+++ b/here/b.yaml"]
    assert "here/c.yaml may not be written, and is left as it is: mixed_precison" in done.stderr
    assert run("check", "here/a.yaml", "--diff").stdout == run("check", "here/b.yaml", "--diff").stdout
    assert run("check", "here/c.yaml", "--diff").exit_code == 0
    run("check", "here", "--fix")
    assert Path("here/b.yaml").read_text() == _MISSPELT.replace("precison", "precision")
    assert (Path("here/a.yaml").is_symlink(), Path("here/c.yaml").read_text()) == (True, _MISSPELT)


def test_no_file_outside_of_the_given_folders_is_mended(folder: Path) -> None:
    for name in ("here", "there"):
        Path(name).mkdir()
    Path("there/b.yaml").write_text(_MISSPELT)
    Path("here/a.yaml").symlink_to("../there/b.yaml")
    Path("here/sub").symlink_to("../there")
    for word in ("--diff", "--fix"):
        done = run("check", "here", word)
        left = "here/a.yaml is a link to there/b.yaml, which is not in here, and is left as it is: mixed_precison"
        assert left in done.stderr
        assert "1 finding is not mended: here/a.yaml:2:1 import.unknown-key" in done.stderr
        assert ("+++" in done.stdout, Path("there/b.yaml").read_text()) == (False, _MISSPELT)
    assert "import.unknown-key" in run("check", "here").stdout  # it is told as ever
    Path("link").symlink_to("here")
    run("check", "link", "here/sub", "--fix")  # a folder that was named itself is given, link or not
    assert Path("there/b.yaml").read_text() == _MISSPELT.replace("precison", "precision")
    Path("there/b.yaml").write_text(_MISSPELT)
    run("check", "here/a.yaml", "--fix")  # and so is a file
    assert Path("there/b.yaml").read_text() == _MISSPELT.replace("precison", "precision")


def test_a_line_end_in_the_name_of_a_file_breaks_no_line(folder: Path) -> None:
    Path("here").mkdir()
    Path("here/a\nb.yaml").write_text(_MISSPELT)
    for words in (("check", "here"), ("gate", "here"), ("check", "here", "--diff"), ("check", "here", "--fix")):
        done = run(*words)
        lines = f"{done.stdout}{done.stderr}".splitlines()
        assert not [line for line in lines if line.startswith("b.yaml")], words
        assert [line for line in lines if "a\\nb.yaml" in line], words
