"""What ``prepkit check`` says of scripts that start a training: who starts how many processes, where, on which GPUs."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepkit.formats.importers import import_config
from prepkit.formats.launcher_options import LAUNCHERS
from prepkit.formats.launches import read_script
from tests.support.command_line import run, workplace

YAML = """compute_environment: LOCAL_MACHINE
distributed_type: {kind}
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: {nodes}
num_processes: {processes}
use_cpu: false
"""
ONE, FOUR = YAML.format(kind="MULTI_GPU", nodes=1, processes=8), YAML.format(kind="MULTI_GPU", nodes=4, processes=32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


def slurm(*lines: str) -> str:
    """A script for Slurm: options of ``#SBATCH`` lines, then what is run."""
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" if line.startswith("-") else f"{line}\n" for line in lines)


def told(text: str) -> list[tuple[str, str, str]]:
    """Rule, what is wrong and what to type, of the script."""
    Path("here").mkdir()
    more = {"one.yaml": ONE.replace("MULTI_GPU", "'NO'"), "npu.yaml": ONE.replace("MULTI_GPU", "MULTI_NPU")}
    Path("here/plain.py").write_text("print(1)\n")
    for name, content in {"acc.yaml": ONE, "four.yaml": FOUR, **more, "run.slurm": text}.items():
        Path("here", name).write_text(content)
    data = json.loads(run("check", "here", "--json").stdout)
    return [(one["rule"], one["what"], one["fix"]) for one in data["findings"] if one["file"] == "here/run.slurm"]


TWO = "--nodes=2", "--ntasks-per-node=1"
C10D = "--rdzv_backend c10d --rdzv_endpoint h:29500"
ONE_TASK = "--ntasks-per-node=1"
WRONG = [
    # commands that end too early
    ("torchrun --nproc_per_node 4 \\ \n  t.py\n", "cut", "End the line with the backslash."),
    ("torchrun \\\n  # --nproc_per_node 8 \\\n  t.py\n", "cut", "Put the comment above the command."),
    # more processes than GPUs, however either is spelt
    (slurm("--nodes=1", "--gres=gpu:4", "accelerate launch --num_processes 8 t.py"), "gpus", "--num_processes 4"),
    (slurm("--nodes=1", "--gpus-per-node=4", "accelerate launch --config_file acc.yaml t.py"), "gpus", "acc.yaml"),
    (slurm(*TWO, "--gpus=8", f"srun torchrun --nnodes 2 --nproc_per_node 8 {C10D} t.py"), "gpus", "--gpus=16"),
    (slurm(*TWO, "-G a100:8", f"srun torchrun --nnodes 2 --nproc_per_node 8 {C10D} t.py"), "gpus", "--gpus=a100:16"),
    (slurm(*TWO, "--gpus-per-task=4", f"srun torchrun --nnodes 2 --nproc-per-node 8 {C10D} t.py"), "gpus", "=8"),
    (slurm("--nodes=1 --gres=gpu:v100:2(S:0-1)", "torchrun --nproc_per_node 4 t.py"), "gpus", "gpu:v100:4(S:0-1)"),
    (slurm("-N1", "srun -n1 --gpus=2 torchrun --nproc_per_node 4 t.py"), "gpus", "srun --gpus=4"),
    ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 4 t.py\n", "gpus", "--nproc_per_node 2"),
    ("export CUDA_VISIBLE_DEVICES=0,1\naccelerate launch --config_file acc.yaml t.py\n", "gpus", "num_processes: 2"),
    ("accelerate launch --config_file acc.yaml --gpu_ids 0,1 t.py\n", "gpus", "num_processes: 2 in acc.yaml"),
    ('ARGS="--nnodes 1 --nproc_per_node 8"\nCUDA_VISIBLE_DEVICES=0 torchrun $ARGS t.py\n', "gpus", " 1,"),
    ('ARGS=(\n  --nproc_per_node 8\n)\nCUDA_VISIBLE_DEVICES=0 torchrun "${ARGS[@]}" t.py\n', "gpus", " 1,"),
    # machines that nobody asks for, or on which nothing starts
    (slurm(*TWO, "srun accelerate launch --config_file four.yaml t.py"), "nodes", "num_machines: 2 in four.yaml"),
    (slurm(*TWO, f"srun bash -c 'torchrun --nnodes 4 --nproc_per_node 8 {C10D} t.py'"), "nodes", "--nodes=4"),
    (slurm(*TWO, "M=2", f"srun torchrun --nnodes $((M * 2)) --nproc_per_node 8 {C10D} t.py"), "nodes", "--nnodes 2"),
    (slurm("--nodes=4 --ntasks=1", "srun accelerate launch --config_file four.yaml t.py"), "nodes", "of --ntasks=1"),
    (slurm("--nodes=4", "accelerate launch --config_file four.yaml t.py"), "nodes", "$SLURM_NODEID"),
    (slurm("--nodes=4", f"torchrun --nnodes 4 --nproc_per_node 8 {C10D} t.py"), "nodes", "srun --ntasks-per-node=1"),
    (slurm("--nodes=4", ONE_TASK, f"srun torchrun --nnodes=2 --nproc_per_node=8 {C10D} t.py"), "nodes", "--nnodes 4"),
    # machines that do not find each other
    (slurm(*TWO, "srun torchrun --nproc_per_node 8 t.py"), "nodes", "Write --nnodes=2; or"),
    (slurm(*TWO, "srun torchrun --nnodes 2 --node_rank=0 --master_addr h t.py"), "nodes", "$SLURM_NODEID"),
    (
        slurm(*TWO, "srun accelerate launch --config_file four.yaml --num_machines 2 --machine_rank 0 t.py"),
        "nodes",
        "ID",
    ),
    ("torchrun --nnodes=2 --node_rank=2 --master_addr h --nproc_per_node 8 t.py\n", "nodes", "of this machine, from 0"),
    ("torchrun --standalone --nnodes 2 --nproc_per_node 8 t.py\n", "nodes", "--nnodes 1"),
    ("torchrun --nnodes=2 --rdzv_endpoint=localhost:29500 t.py\n", "nodes", "--rdzv_endpoint with the name"),
    # a launcher for each of the processes that it starts
    (slurm("-N 2", "-n 16", f"srun torchrun --nnodes 2 --nproc_per_node 8 {C10D} t.py"), "twice", "of --ntasks=16"),
    (slurm("-N2", f"srun --ntasks-per-node=8 torchrun --nnodes 2 --nproc_per_node 8 {C10D} t.py"), "twice", "srun -"),
    (slurm(*TWO[:1], "--ntasks-per-node=8", "srun accelerate launch --config_file acc.yaml t.py"), "twice", "=1"),
    ("mpirun -np 8 torchrun --nproc_per_node 8 t.py\n", "twice", "Remove mpirun"),
    ("mpirun -np 32 --map-by ppr:8:node torchrun --nnodes 4 --nproc_per_node 8 t.py\n", "twice", "-np 4 --map-by"),
    ("docker run img bash -c 'cd /x && CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 2 t.py'\n", "gpus", " 1,"),
    ("accelerate launch --config_file four.yaml --num_machines 3 t.py\n", "processes", "num_processes: 96"),
    # ranks that srun or mpirun starts itself
    (slurm("-N1", "--ntasks-per-node=8", "--gres=gpu:4", "srun python t.py"), "gpus", "#SBATCH --ntasks-per-node=4"),
    (slurm("-N2", "-n16", "--gpus-per-node=4", "srun python3 -u t.py"), "gpus", "per-node=4 in the place of --ntasks"),
    (slurm("-N1", "--gres=gpu:4", "srun -n8 bash -c 'cd x && python -m t.train'"), "gpus", "srun --ntasks-per-node=4"),
    (slurm("-N1", "-n8", "--gres=gpu:4", 'RUN="python t.py --x"', "srun apptainer exec i $RUN"), "gpus", "=4"),
    (slurm("-N2", "--ntasks-per-node=4", "--gres=gpu:4", "srun --nodes=4 python t.py"), "nodes", "--nodes=4"),
    (slurm("-N1", "--gres=gpu:4", "mpirun -np 8 python t.py"), "gpus", "-np 4"),
    ("CUDA_VISIBLE_DEVICES=0,1 mpirun -np 4 python t.py\n", "gpus", "-np 2"),
]


@pytest.mark.parametrize(("text", "rule", "fix"), WRONG)
def test_processes_nodes_and_gpus_are_compared_whatever_says_them(text: str, rule: str, fix: str, folder: Path) -> None:
    found = told(text)
    assert [one[0] for one in found] == [f"launch.{rule}"], found
    assert fix in found[0][2]


RIGHT = [
    slurm(
        *TWO, 'export RUN="accelerate launch --num_machines=2 --num_processes=8 --machine_rank=\\${SLURM_NODEID} t.py"'
    )
    + 'srun bash -c "$RUN"\n',
    slurm("--nodes=4", ONE_TASK, f"srun -w a,b torchrun --nnodes=2 --nproc_per_node=8 {C10D} t.py"),
    slurm(*TWO, "srun torchrun --standalone --nproc_per_node 8 t.py"),
    slurm(*TWO, "export PET_NNODES=2", "srun torchrun --nproc_per_node 8 t.py"),
    slurm(*TWO, f"srun torchrun --nnodes 2 --node_rank 0 {C10D} t.py"),
    slurm("-N2", "srun -N1 -n1 torchrun --nproc_per_node 8 t.py"),
    "".join(f"torchrun --nnodes=2 --rdzv_endpoint=localhost:29500 t.py {end}\n" for end in "&;"),
    "torchrun --nnodes=2 --node_rank=1 --master_addr h --nproc_per_node 8 t.py\n",
    "torchrun --nproc_per_node 4 \\\n  t.py \\\n  # --more\n\necho done\n",
    slurm("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=8")
    + 2 * "srun -n1 --gpus=4 --exact torchrun --standalone --nproc_per_node 4 a.py &\n",
    slurm(*TWO, "--gpus-per-task=8", f"srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 {C10D} t.py"),
    slurm(*TWO, "--gres=gpu:a100:8", f"srun torchrun --nnodes 2 --nproc_per_node gpu {C10D} t.py"),
    slurm("--nodes=4", "--ntasks-per-node=1", f"srun torchrun --nnodes 1:4 --nproc_per_node 8 {C10D} t.py"),
    slurm("-N1", "srun --ntasks-per-node=2 --gpus-per-task=4 torchrun --standalone --nproc_per_node 4 t.py"),
    slurm("--nodes=4", "--gpus-per-node=8", "for i in 0 1 2 3; do")
    + f"srun -N1 -n1 torchrun --nnodes 4 --node_rank $i --nproc_per_node 8 {C10D} t.py &\ndone\n",
    slurm("--nodes=4", "for h in $HOSTS; do ssh $h 'cd x && torchrun --nnodes 4 --nproc_per_node 8 t.py' & done"),
    slurm("--nodes=2", "--gpus-per-node=8", "deepspeed --num_nodes 2 --num_gpus 8 --hostfile hosts t.py"),
    slurm("-N2", "-n16", "--gres=gpu:8", f"srun torchrun --nnodes=16 --nproc_per_node=1 {C10D} t.py"),
    slurm("-N2", "--ntasks-per-node=2", "--gres=gpu:8", f"srun torchrun --nnodes=4 --nproc_per_node=4 {C10D} t.py"),
    slurm("--nodes=4", f'export RUN="torchrun --nnodes 4 --nproc_per_node 8 {C10D} t.py"', "./start.sh"),
    slurm("--nodes=2", "accelerate launch --num_machines 2 --num_processes 2 --mpirun_hostfile hosts t.py"),
    "mpirun -np 2 -H a,b torchrun --nnodes 2 --nproc_per_node 8 t.py\n",
    "mpirun -np 2 -H a,b torchrun --nproc_per_node 8 t.py\n",
    "CUDA_VISIBLE_DEVICES=0 accelerate launch --config_file one.yaml t.py\n",
    "CUDA_VISIBLE_DEVICES=0 accelerate launch --config_file npu.yaml t.py\n",
    "CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 4 t.py\n",
    "accelerate launch --cpu --num_processes 8 t.py\n",
    "accelerate launch --config_file acc.yaml t.py --num_processes 3 --num_machines 2\n",
    "GPUS=8\nwhile getopts g: o; do GPUS=$OPTARG; done\nCUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node $GPUS t.py\n",
    "CONFIG=$1\naccelerate launch --config_file $CONFIG t.py\n",
    "python prep.py <<'X'\nCUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 9 t.py\nX\n",
    'echo "usage: CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 9 t.py"\n',
    slurm("-N2", "--ntasks-per-node=4", "--gres=gpu:4", "srun python t.py"),
    slurm("-N2", "--ntasks-per-node=4", "--gpus-per-task=1", "srun python t.py"),
    slurm("-N2", "--gres=gpu:4", "srun python t.py"),  # sbatch may be told how many tasks
    slurm("-N1", "-n8", "--gres=gpu:4", "srun python p.py", "torchrun --nproc_per_node 4 t.py"),
    slurm("-N1", "-n8", "--gres=gpu:4", "srun python plain.py"),
    slurm("-N1", "-n8", "--gres=gpu:4", "srun ./t.sh python"),
    "mpirun -np 8 -H a:4,b:4 python t.py\n",
]


@pytest.mark.parametrize("text", RIGHT)
def test_what_adds_up_is_right(text: str, folder: Path) -> None:
    assert told(text) == []


MESH = 'engine = "FSDP2"\noptimizer = "AdamW"\nmesh = {replicate = 3, shard = 2}\n'
TITAN = "[job]\n[model]\nname = 'llama3'\n[training]\nlocal_batch_size = 1\n[parallelism]\n"
TITAN += "data_parallel_replicate_degree = 1\ndata_parallel_shard_degree = 3\n"
AXOLOTL = "base_model: a/b\ndatasets: []\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\nlearning_rate: 1e-4\n"
AXOLOTL += (
    "fsdp_version: 2\nfsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}\ndp_shard_size: 3\ndp_replicate_size: 2\n"
)


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("torchrun --nproc_per_node 8 train.py mesh.toml", "mesh.toml", MESH),
        ("torchrun --nproc_per_node 8 train.py --config=mesh.toml", "mesh.toml", MESH),
        ("torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file titan.toml", "titan.toml", TITAN),
        ("torchrun --nproc_per_node 8 -m torchtitan.train --job.config-file=titan.toml", "titan.toml", TITAN),
        ("accelerate launch --num_processes 8 -m axolotl.cli.train axo.yaml", "axo.yaml", AXOLOTL),
        ("accelerate launch --config_file acc.yaml -m axolotl.cli.train axo.yaml", "axo.yaml", AXOLOTL),
        ("axolotl train axo.yaml --num-processes 8", "axo.yaml", AXOLOTL),
        ("axolotl train axo.yaml --launcher torchrun -- --nproc_per_node=8", "axo.yaml", AXOLOTL),
        ("cd sub && torchrun --nproc_per_node 8 train.py ../mesh.toml", "mesh.toml", MESH),
    ],
)
def test_every_config_that_the_started_command_names_is_checked_for_its_processes(
    line: str, name: str, text: str, folder: Path
) -> None:
    for place, content in {"acc.yaml": ONE, name: text, "run.sh": f"{line}\n"}.items():
        Path(place).write_text(content)
    Path("sub").mkdir()
    data = json.loads(run("check", ".", "--json").stdout)
    found = [one for one in data["findings"] if one["file"] == name and "8" in one["what"]]
    assert {one["rule"] for one in found} == {"mesh.not-world-size"}, data["findings"]
    assert not [one for one in data["cannot_know"] if one["rule"] == "import.missing-file"]


FIXED = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
ARGUMENTS = {
    "output_dir": "o",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "deepspeed": "ds.json",
}


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc_per_node 4 train.py args.json",
        "deepspeed --include localhost:0,1,2,3 train.py --deepspeed_config ds.json",
        "CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed train.py --deepspeed_config ds.json",
        "FORCE_TORCHRUN=1 NPROC_PER_NODE=4 llamafactory-cli train lf.yaml",
        "accelerate launch --num_processes 4 train.py --ds_config ds.json",
        "srun -N1 -n4 python train.py --deepspeed_config ds.json",
        "srun -N2 --ntasks-per-node=2 python -m train args.json",
        "mpirun -np 4 python train.py args.json",
    ],
)
def test_a_json_is_checked_for_the_processes_of_what_names_it(line: str, folder: Path) -> None:
    """2 samples x 4 micro-batches x 4 processes are 32, and not 64."""
    llama_factory = json.dumps(ARGUMENTS | {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "full"})
    texts = {"ds.json": json.dumps(FIXED), "args.json": json.dumps(ARGUMENTS | {"max_steps": 1})}
    for name, text in {**texts, "lf.yaml": llama_factory, "run.sh": f"{line}\n"}.items():
        if name in line or name in ("ds.json", "run.sh"):
            Path(name).write_text(text)
    found = json.loads(run("check", ".", "--json").stdout)["findings"]
    assert any(one["rule"] == "deepspeed.batch" and "4 ranks = 32" in one["what"] for one in found), found


@pytest.mark.parametrize("below", ["cd src\n", "pushd src\n", "(cd src && ", "D=$PWD/x\n", "D=`pwd`/x\n"])
def test_a_path_is_from_where_the_script_has_gone(below: str, folder: Path) -> None:
    Path("here/src").mkdir(parents=True)
    Path("here/x").mkdir()
    Path("here/ds.json").write_text(json.dumps(FIXED))
    line = f"torchrun --nproc_per_node 4 train.py --deepspeed {'$D/..' if 'D=' in below else '..'}/ds.json"
    Path("here/run.sh").write_text(f"{below}{line}{')' if '(' in below else ''}\n")
    data = json.loads(run("check", "here", "--json").stdout)
    assert [one["rule"] for one in data["findings"]] == ["deepspeed.batch"]
    assert not [one for one in data["cannot_know"] if one["rule"] == "import.missing-file"]


def test_a_config_that_shows_fewer_gpus_than_processes_is_wrong_by_itself(folder: Path) -> None:
    """Where a line starts it, the line is judged with what it says over it."""
    Path("here").mkdir()
    Path("here/acc.yaml").write_text(ONE.replace("machine_rank: 0", 'gpu_ids: "0,1"'))
    found = json.loads(run("check", "here", "--json").stdout)["findings"]
    assert [(one["rule"], one["line"], one["fix"]) for one in found] == [
        ("launch.gpus", 3, "Write num_processes: 2, or name 8 GPUs there.")
    ]
    Path("here/run.sh").write_text("accelerate launch --config_file acc.yaml --num_processes 2 t.py\n")
    assert json.loads(run("check", "here", "--json").stdout)["findings"] == []


def test_a_launcher_that_a_variable_holds_is_read_once(folder: Path) -> None:
    wrong = "CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 2"
    lines = f'export LAUNCHER="{wrong}"\n', "$LAUNCHER t.py\n", 'srun bash -c "$LAUNCHER t.py"\n', 'start "$LAUNCHER"\n'
    for number, rest in ((1, lines[1:2]), (1, lines[2:3]), (1, lines[3:])):
        Path("run.sh").write_text("".join((lines[0], *rest)))
        found = json.loads(run("check", "run.sh", "--json").stdout)["findings"]
        assert [one["rule"] for one in found] == ["launch.gpus"] * number, rest


@pytest.mark.parametrize(
    "text",
    [
        "".join(f'A{n}="$A{n + 1} $A{n + 1}"\n' for n in range(400)) + "torchrun --nproc_per_node $A0 t.py\n",
        "torchrun --nproc_per_node 8 t.py --a b --c d\n" * 3000,
        'X="torchrun --nproc_per_node 8 t.py"\n' * 3000,
        "bash -c 'bash -c \"eval torchrun t.py\"'\n" * 1000,
        "(" * 5000 + "torchrun" + ")" * 5000,
        "A=(" * 3000 + "torchrun $((1/0)) t.py\n",
        "torchrun $((9*9*9*9*9*9*9*9)) ${A[@]} \x01 t.py\n#SBATCH -N\n#SBATCH --gres=gpu:\n",
    ],
)
def test_a_hostile_script_ends_soon(text: str, folder: Path) -> None:
    Path("run.sh").write_text(text)
    assert run("check", "run.sh", "--json").exit_code in (0, 1)


# --- defaults of the shell -------------------------------------------------------------------------------------------

EIGHT = "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node "


@pytest.mark.parametrize(
    ("text", "supposing"),
    [
        (f"{EIGHT}${{N:-8}} t.py\n", "N=8"),
        (f"{EIGHT}${{N-8}} t.py\n", "N=8"),
        (f"{EIGHT}${{N:=8}} t.py\n", "N=8"),
        (f'{EIGHT}"${{N:-${{M:-8}}}}" t.py\n', "M=8, N=8"),
        (f"N=${{N:-8}}\n{EIGHT}$N t.py\n", "N=8"),
        (f'export N="${{N:-8}}"\n{EIGHT}${{N}} t.py\n', "N=8"),
        (f": ${{N:=8}}\n{EIGHT}$N t.py\n", "N=8"),
        (f"N=${{1:-8}}\n{EIGHT}$N t.py\n", "1=8"),
        (f"G=$1\nN=${{G:-8}}\n{EIGHT}$N t.py\n", "G=8"),
        (f"{EIGHT}$((2 * ${{M:-4}})) t.py\n", "M=4"),
        (f"OPTIONS=${{OPTIONS:-8}}\nbash -c '{EIGHT}$OPTIONS t.py'\n", "OPTIONS=8"),
        ("export CUDA_VISIBLE_DEVICES=${G:-0,1}\ntorchrun --nproc_per_node 8 t.py\n", "G=0,1"),
        (f"N=\n{EIGHT}${{N:-8}} t.py\n", ""),
        (f"N=8\n{EIGHT}${{N:-1}} t.py\n", ""),
        (f"N=8\nN=${{N:-1}}\n{EIGHT}$N t.py\n", ""),
        (f"N=8\n{EIGHT}${{N:?how many}} t.py\n", ""),
    ],
)
def test_a_variable_that_nothing_sets_is_what_the_script_takes_it_for(text: str, supposing: str, folder: Path) -> None:
    (found,) = told(text)
    assert found[0] == "launch.gpus"
    assert found[1].startswith("8 processes are started on a node")
    assert found[1].partition(", supposing ")[2] == supposing
    taken = next(one for one in run("check", "here/run.slurm").stdout.splitlines() if one.startswith("took"))
    assert f"supposing {supposing}" in taken if supposing else "supposing" not in taken


@pytest.mark.parametrize(
    "text",
    [
        f"for N in 1 2; do\n{EIGHT}${{N:-8}} t.py\ndone\n",
        f"N=$(nvidia-smi -L | wc -l)\n{EIGHT}${{N:-8}} t.py\n",
        f"{EIGHT}${{N:?how many}} t.py\n",
        f"{EIGHT}${{N:-$(nproc)}} t.py\n",
        f"N=1\nN=2\n{EIGHT}${{N:-8}} t.py\n",
        slurm("--partition=a", f"{EIGHT}${{SLURM_NTASKS:-8}} t.py"),
        slurm("--nodes=2", f"srun torchrun --nnodes ${{SLURM_NNODES:-4}} --nproc_per_node 8 {C10D} t.py"),
    ],
)
def test_a_variable_that_something_sets_is_no_default(text: str, folder: Path) -> None:
    assert told(text) == []


# --- options over a config -------------------------------------------------------------------------------------------

FSDP = YAML.format(kind="FSDP", nodes=1, processes=8) + (
    "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
)
JSON = YAML.format(kind="DEEPSPEED", nodes=1, processes=8).replace("mixed_precision: bf16\n", "")
JSON += "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize(
    ("file", "options", "found"),
    [
        (JSON, "--mixed_precision fp16", [("import.contradiction", "--mixed_precision")]),
        (JSON, "--mixed_precision bf16", []),
        (JSON, "--mixed_precision no", []),
        (JSON, "--mixed_precision $PRECISION", []),
        (FSDP, "--mixed_precision bf17", [("launch.refused-option", "--mixed_precision")]),
        (FSDP, "--mixed_precision bf16", []),
        (FSDP, "--mixed_precision fp16", []),
        (
            FSDP,
            "--num_processes 4 --fsdp_transformer_layer_cls_to_wrap LamaDecoderLayer",
            [("wrap.class-not-found", "--fsdp_transformer_layer_cls_to_wrap")],
        ),
        (FSDP, "--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer", []),
        (FSDP, "--fsdp_reshard_after_forward sometimes", [("import.wrong-type", "--fsdp_reshard_after_forward")]),
        (FSDP, "--fsdp_version 2 --fsdp_reshard_after_forward false", []),
        (FSDP, "--fsdp_version=3", [("launch.refused-option", "--fsdp_version")]),
    ],
)
def test_options_of_the_launcher_go_before_its_config(
    file: str, options: str, found: list[tuple[str, str]], folder: Path
) -> None:
    """They are judged as a part of it, and what they make wrong is told where they stand."""
    Path("here/model").mkdir(parents=True)
    line = f"accelerate launch --config_file acc.yaml {options} t.py --model_name_or_path ./model"
    Path("here/run.sh").write_text(f"{line}\n")
    Path("here/acc.yaml").write_text(file)
    Path("here/ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    Path("here/model/config.json").write_text(json.dumps(LLAMA))
    told = json.loads(run("check", "here", "--json").stdout)["findings"]
    at = [(one["rule"], one["line"], one["column"]) for one in told if one["file"] == "here/run.sh"]
    assert at == [(rule, 1, line.index(option) + 1) for rule, option in found], told
    assert not [one for one in told if one["file"] == "here/acc.yaml"]


# --- options of the launchers themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "column", "fix"),
    [
        ("accelerate launch --config_file acc.yaml --num_proceses 4 t.py", 42, "Write --num_processes."),
        ("accelerate launch --num-proceses=4 t.py", 19, "Write --num-processes."),
        ("torchrun --nproc_per_nodes 8 t.py", 10, "Write --nproc_per_node."),
        ("deepspeed --num_gpu 8 t.py", 0, ""),  # short for --num_gpus
        ("torchrun --standalon --nproc_per_node 8 t.py", 0, ""),
        (
            "accelerate launch --num_processe 8 t.py",
            19,
            "Write --num_processes.",
        ),  # accelerate takes none that is short
        ("deepspeed --num_gpsu 8 t.py", 11, "Write --num_gpus."),
        ("torchrun --nproc_per_node 8 t.py --nproc_per_nodes 8", 0, ""),
        ("accelerate launch --ipex --fsdp_backward_prefetch_policy X t.py", 0, ""),  # older releases have them
        ("torchrun --of_our_own_fork 8 t.py", 0, ""),
        ("torchrun $ARGS --nproc_per_nodes 8 t.py", 16, "Write --nproc_per_node."),
        ("torchrun $SCRIPT --nproc 8 t.py", 0, ""),  # of the script, maybe
        ("accelerate launch --num_processes 8 $TASK.py --main_port 8", 0, ""),
        ("accelerate launch --main_port=29500 t.py", 19, "Write --main_process_port."),
        ("accelerate launch --nproc 8 t.py", 19, "Write --num_processes."),
        ("torchrun --nproc 8 t.py", 10, "Write --nproc_per_node."),  # argparse finds it in two spellings of one
        ("torchrun --nproc-p 8 t.py", 0, ""),
        ("deepspeed --master-port 29500 t.py", 11, "Write --master_port."),
        ("deepspeed --num 8 t.py", 0, ""),
    ],
)
def test_a_misspelt_option_of_a_launcher_is_named(line: str, column: int, fix: str, folder: Path) -> None:
    Path("run.sh").write_text(f"{line}\n")
    data = json.loads(run("check", "run.sh", "--json").stdout)
    found = [(one["rule"], one["line"], one["column"], one["fix"]) for one in data["findings"]]
    assert found == ([("launch.unknown-option", 1, column, fix)] if fix else [])


def test_thousands_of_lines_that_export_cost_as_much_as_others(folder: Path) -> None:
    """What is exported is gone through once, and not with each command."""
    lines = [f'echo {at} "$FOO" && export A{at % 500}=b{at}' for at in range(5_000)]
    Path("run.sh").write_text(
        "\n".join(("#!/bin/bash", *lines, "OMP_NUM_THREADS=2 torchrun --nproc_per_node 4 t.py\n"))
    )
    began = time.process_time()
    (launch,) = read_script("run.sh").launches
    assert time.process_time() - began < 3
    assert launch.environment["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ("--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP", ""),
        ("--use_fsdp --fsdp_version 3", "launch.refused-option"),
        ("--use_fsdp --mixed_precision bf17", "launch.refused-option"),
        ("--multi_gpu --num_machines 1 --mixed_precision bf16", ""),
        ("--use_deepspeed --zero_stage 4", "deepspeed.stage"),
        ("--use_deepspeed --zero_stage 3 --gradient_clipping 1.0", ""),
        ("--use_deepspeed --deepspeed_config_file ds.json", ""),
        ("--use_deepspeed --deepspeed_config_file ds.json --mixed_precision fp16", "import.contradiction"),
        ("--use_deepspeed --deepspeed_config_file gone.json --mixed_precision fp16", ""),
        ("--mixed_precision bf17", "launch.refused-option"),
    ],
)
def test_a_line_without_a_config_is_judged_as_one(options: str, rule: str, folder: Path) -> None:
    Path("here").mkdir()
    Path("here/run.sh").write_text(f"accelerate launch --num_processes 8 {options} t.py\n")
    Path("here/ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    found = json.loads(run("check", "here", "--json").stdout)["findings"]
    assert [(one["rule"], one["file"]) for one in found] == ([(rule, "here/run.sh")] if rule else []), found


REFUSED = [
    ("accelerate launch --mixed_precision bf61 t.py", "bf61: it does not start"),
    ("accelerate launch --num_processes eight t.py", "a whole number"),
    ("accelerate launch --use_fsdp --use_deepspeed --num_processes 8 t.py", "does not start with both"),
    ("accelerate launch --multi_gpu --cpu t.py", "--multi_gpu or --cpu"),
    ("accelerate launch --multi_gpu --num_processes 1 t.py", "2 or more"),
    ("accelerate launch --num_machines 0 t.py", "a number from 1"),
    ("deepspeed --include localhost:0,1 --num_gpus 4 t.py", "--include or --num_gpus"),
    ("deepspeed -i localhost:0,1 --exclude b:1 t.py", "-i or --exclude"),
    ("deepspeed --master_port 70000 t.py", "from 0 to 65535"),
    ("torchrun --nproc_per_node eight t.py", "gpu, cpu or auto"),
    ("torchrun --nproc_per_node 0 t.py", "a number from 1"),
    ("torchrun --nnodes 2:4:8 --rdzv_endpoint h:1 t.py", "LEAST:MOST"),
    ("torchrun --nproc_per_node 8 --master_port 66664 t.py", "from 0 to 65535"),
    ("torchrun --nnodes 2 --rdzv_endpoint h:66664 t.py", "a port below 65536"),
]
TAKEN = [
    "torchrun --nproc_per_node gpu --nnodes 1:4 --rdzv_endpoint h:29500 --master_port 66664 t.py",
    "torchrun --nproc_per_node $N --master_port <port> --node_rank \\$RANK --max_restarts N t.py",
    "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 --mixed_precision no t.py",
    "accelerate launch --multi_gpu t.py --cpu --mixed_precision bf61",
    "deepspeed --num_nodes 2 --num_gpus 8 --master_port 29500 t.py",
    "deepspeed --include a:0 t.py",
]


@pytest.mark.parametrize(("line", "what"), REFUSED)
def test_what_a_launcher_refuses_is_told_before_it_is_started(line: str, what: str, folder: Path) -> None:
    Path("run.sh").write_text(f"{line}\n")
    (found,) = json.loads(run("check", "run.sh", "--json").stdout)["findings"]
    assert found["rule"] == "launch.refused-option"
    assert what in found["what"]


@pytest.mark.parametrize("line", TAKEN)
def test_what_a_launcher_takes_is_not(line: str, folder: Path) -> None:
    Path("run.sh").write_text(f"{line}\n")
    assert json.loads(run("check", "run.sh", "--json").stdout)["findings"] == []


def _parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield "torchrun", pytest.importorskip("torch.distributed.run").get_args_parser()
    yield "accelerate", pytest.importorskip("accelerate.commands.launch").launch_command_parser()
    runner = pytest.importorskip("deepspeed.launcher.runner")
    with pytest.MonkeyPatch.context() as patch:
        made: list[argparse.ArgumentParser] = []
        patch.setattr(argparse.ArgumentParser, "parse_args", lambda self, **_: made.append(self))
        runner.parse_args()
    yield "deepspeed", made[0]


def test_the_options_of_every_launcher_are_those_of_its_parser() -> None:
    """What it takes is listed, with whether a value follows; what an older one took may be listed beside."""
    for launcher, parser in _parsers():
        table = LAUNCHERS[launcher]
        assert table.shortened is parser.allow_abbrev
        for action in parser._actions:
            for typed in action.option_strings:
                name = typed.lstrip("-").replace("-", "_")
                assert name in (table.switches if action.nargs == 0 else table.valued), f"{launcher} {typed}"
        taken = {one.lstrip("-").replace("-", "_") for one in parser._option_string_actions}
        assert not (table.valued | table.switches) - taken, launcher
        assert not table.older & taken, launcher
        assert table.dashed is any("-" in one.lstrip("-") for one in parser._option_string_actions)


def test_what_the_options_of_every_launcher_take_is_what_its_parser_takes() -> None:
    """Types, choices, and which beginnings of a name it takes for the name."""
    for launcher, parser in _parsers():
        table = LAUNCHERS[launcher]
        actions = {
            typed.lstrip("-").replace("-", "_"): action for typed, action in parser._option_string_actions.items()
        }
        assert table.numbers == {name for name, action in actions.items() if action.type is int}, launcher
        choices = {name: "|".join(action.choices) for name, action in actions.items() if action.choices}
        assert dict(table.words) == choices, launcher
        listed = {*table.ranges, *table.forms, *table.unread, *(name for _, name, _ in table.least)}
        assert listed | {name for groups in table.apart for group in groups for name in group.split()} <= actions.keys()
        for typed in ("nproc", "nproc_per", "nproc-p", "nnode", "log", "num", "num_g", "master-po", "master_po"):
            if table.shortened and not table.older & set(table.begun(typed)):
                known = len(parser._get_option_tuples(f"--{typed}")) == 1
                assert (table.name(typed) is not None) is known, f"{launcher} {typed}"


def followed(text: str, fix: str) -> Iterator[str]:
    """The script after each way of the fix that is typed into it."""
    for way in re.split(r", or ", fix.removeprefix("Write ").rstrip(".")):
        typed = re.match(r"(#SBATCH |srun )?(-[-\w]+)[= ]([\w:()-]+)(?: in the place of (\S+?)=\S+)?(?:$|:)", way)
        if typed is None:
            continue
        who, name, value, gone = typed.groups()
        short = {"--nodes": "-N", "--gpus": "-G", "--ntasks": "-n"}
        old = rf"(?<![\w-])(?:{gone or name}|{short.get(gone or name, '--none')})[ =]?(?:\$\(\(.*\)\)|[\w:()-]+)"
        before, by, rest = text.rpartition("srun ") if who == "srun " else ("", "", text)
        after = before + by + re.sub(old, f"{name}={value}" if who else f"{name} {value}", rest, count=1)
        yield after if after != text else text.replace("#!/bin/bash\n", f"#!/bin/bash\n#SBATCH {name}={value}\n")


@pytest.mark.parametrize(("text", "rule", "fix"), [case for case in WRONG if "processes" not in case[1]])
def test_every_way_of_a_fix_mends_what_it_is_told_of(text: str, rule: str, fix: str, folder: Path) -> None:
    (before,) = told(text)
    for after in followed(text, before[2]):
        shutil.rmtree("here")
        assert after != text
        assert rule not in [one[0].partition(".")[2] for one in told(after)], after


_BOTH = """distributed_type: {kind}
num_processes: 2
deepspeed_config: {{gradient_accumulation_steps: 4, gradient_clipping: 0.5, zero_stage: 2}}
fsdp_config: {{fsdp_version: 2, fsdp_activation_checkpointing: true}}
"""


@pytest.mark.parametrize(
    ("kind", "words", "wrong"),
    [
        ("DEEPSPEED", "--gradient_accumulation_steps 2 --max_grad_norm 0.5", ["--gradient_accumulation_steps"]),
        ("DEEPSPEED", "--gradient_accumulation_steps=4 --max_grad_norm 1.0", ["--max_grad_norm"]),
        ("DEEPSPEED", "--gradient_accumulation_steps $N --gradient_checkpointing", []),
        ("FSDP", "--gradient_accumulation_steps 2 --gradient_checkpointing True", ["--gradient_checkpointing"]),
        ("FSDP", "--gradient_checkpointing false", []),
        ("MULTI_GPU", "--gradient_accumulation_steps 2 --gradient_checkpointing", []),
    ],
)
def test_what_arguments_and_the_launchers_config_say_otherwise_is_told_at_the_argument(
    kind: str, words: str, wrong: list[str], folder: Path
) -> None:
    line = f"accelerate launch --config_file acc.yaml train.py {words}"
    Path("acc.yaml").write_text(_BOTH.format(kind=kind))
    Path("run.sh").write_text(f"{line}\n")
    found = [one for one in json.loads(run("check", ".", "--json").stdout)["findings"] if one["file"] == "run.sh"]
    said = [(one["rule"], one["column"]) for one in found]
    assert said == [("launch.two-places", line.index(option) + 1) for option in wrong]


def test_an_option_of_the_launcher_counts_before_its_file(folder: Path) -> None:
    Path("acc.yaml").write_text(_BOTH.format(kind="DEEPSPEED"))
    words = "--gradient_accumulation_steps 2 train.py --gradient_accumulation_steps"
    for steps, wrong in ((2, 0), (4, 1)):
        Path("run.sh").write_text(f"accelerate launch --config_file acc.yaml {words} {steps}\n")
        found = [one["rule"] for one in json.loads(run("check", ".", "--json").stdout)["findings"]]
        assert found.count("launch.two-places") == wrong


AXOLOTL_JSON = """base_model: a/b
datasets: [{path: a}]
adapter: lora
micro_batch_size: 2
deepspeed: made/zero3.json
"""


@pytest.mark.parametrize(
    ("before", "made"),
    [
        ("axolotl fetch made\n", True),
        ("mkdir -p made\ncat > made/zero3.json << 'EOF'\n{}\nEOF\n", True),
        ("echo '{}' >made/zero3.json\n", True),
        ("python make.py --out=made/zero3.json\n", True),
        ("mkdir -p made\nls made\n", False),
        ("axolotl fetch examples\n", False),
    ],
)
def test_a_file_that_a_script_makes_first_cannot_be_known_here(before: str, made: bool, folder: Path) -> None:
    Path("ax.yml").write_text(AXOLOTL_JSON)
    Path("run.sh").write_text(f"#!/bin/bash\n{before}axolotl train ax.yml\n")
    data = json.loads(run("check", ".", "--json").stdout)
    told_of = {key: [one["rule"] for one in data[key]] for key in ("findings", "cannot_know")}
    assert ["may make it before it is read" in one["what"] for one in data["cannot_know"]] == [made]
    assert ("import.missing-file" in told_of["findings"]) is not made


def test_what_accelerates_line_names_is_read_as_accelerates(folder: Path) -> None:
    Path("run.sh").write_text("accelerate launch --config_file acc.yaml t.py\n")
    for text in ("", "# nothing yet\n"):
        Path("acc.yaml").write_text(text)
        found = [one for one in json.loads(run("check", ".", "--json").stdout)["findings"] if one["file"] == "acc.yaml"]
        assert [(one["rule"], "distributed_type" in one["fix"]) for one in found] == [("config.empty", True)]
    Path("acc.yaml").write_text("output_dir: o\nper_device_train_batch_size: 2\nlearning_rate: 1\n")
    data = json.loads(run("check", ".", "--json").stdout)
    assert "accelerate" in {one["kind"] for one in data["files"] if one["file"] == "acc.yaml"}
    assert "output_dir: accelerate knows no such key" in run("check", "acc.yaml", "run.sh").stdout


TENSOR = """[training]
local_batch_size = 1
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
"""


@pytest.mark.parametrize(("processes", "engine"), [(8, "TensorParallel"), (16, "FSDP2")])
def test_ranks_that_tensor_parallelism_takes_all_of_leave_nothing_to_shard(
    processes: int, engine: str, folder: Path
) -> None:
    Path("t.toml").write_text(TENSOR)
    line = f"torchrun --nproc_per_node={processes} -m torchtitan.train --job.config_file t.toml\n"
    Path("run.sh").write_text(line)
    assert json.loads(run("check", "run.sh", "--json").stdout)["findings"] == []
    assert type(import_config("t.toml").for_size(processes).engine).__name__ == engine


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 160,
}


@pytest.mark.parametrize(("processes", "engine"), [(8, "TensorParallel"), (16, "FSDP2")])
def test_every_command_reads_the_file_for_as_many_processes(processes: int, engine: str, folder: Path) -> None:
    """A plan, a check against a model, an import, an export and a difference of revisions, as a check of a script."""
    Path("t.toml").write_text(TENSOR)
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps({**LLAMA, "use_cache": False}))
    model = ("--model", "llama", "--world-size", str(processes), "--device", "cuda", "--torch", "2.13")
    (plan,) = json.loads(run("plan", "t.toml", *model, "--json").stdout)["plans"]
    assert plan["plan"]["plan"]["config"]["engine"]["kind"] == engine
    assert json.loads(run("check", "t.toml", *model, "--json").stdout)["findings"] == []
    imported = json.loads(run("import", "t.toml", "--world-size", str(processes), "--json").stdout)
    assert (imported["config"]["engine"]["kind"], imported["at"]) == (engine, {})
    assert json.loads(run("import", "t.toml", "--json").stdout)["at"]["8"]["engine"]["kind"] == "TensorParallel"
    assert "for 8 processes in all: engine TensorParallel(), mesh None" in run("import", "t.toml").stdout
    said = run("export", "t.toml", "--to", "accelerate", "--world-size", str(processes), "--partial").stdout
    assert ("distributed_type: FSDP" in said) is (engine == "FSDP2")
    for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "1")):
        subprocess.run(("git", *words), check=True)
    Path("t.toml").write_text(TENSOR.replace("= 8", "= 4"))
    subprocess.run(("git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qam", "2"), check=True)
    (one,) = json.loads(run("diff", "HEAD~1..HEAD", *model, "--json").stdout)["files"]
    assert one["refused"] == []
    before = {pair["setting"]: pair["before"] for pair in one["settings"]}
    assert before.get("engine.kind", before.get("engine", "FSDP2")) == engine
