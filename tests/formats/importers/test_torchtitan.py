"""torchtitan's job configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FSDP2,
    AdamW,
    CheckpointBlocks,
    ClipNorm,
    CompileBlocks,
    LoadWeights,
    Mesh,
    OffloadToCPU,
    Single,
    TensorParallel,
    TorchAO,
)
from prepkit.findings import PlanRejected, Severity
from prepkit.formats.importers import Imported, import_config
from tests.support.command_line import run

FULL = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
converters = ["quantize.linear.float8"]
[optimizer]
name = "AdamW"
lr = 1.5e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 4
global_batch_size = 64
max_norm = 0.5  # of gradients
steps = 1000
mixed_precision_reduce = "float32"
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output", "attention.wq"]
[compile]
enable = true
components = ["model"]
"""
NONE = '[activation_checkpoint]\nmode = "none"\n'


def read(tmp_path: Path, text: str) -> Imported:
    (tmp_path / "job.toml").write_text(text)
    return import_config(tmp_path / "job.toml")


def test_a_whole_job_config(tmp_path: Path) -> None:
    imported = read(tmp_path, FULL)
    config = imported.config
    assert (imported.kind, imported.world_size, imported.notes) == ("torchtitan", 16, ())
    assert (config.engine, config.mesh) == (FSDP2(), Mesh(replicate=1, shard=8, tensor=2))
    assert config.optimizer == AdamW(lr=1.5e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    assert (config.accumulation, config.clip, config.total_steps) == (2, ClipNorm(0.5), 1000)
    assert config.timeout_s == 300.0
    assert config.compile == CompileBlocks(fullgraph=True)
    assert config.checkpointing == CheckpointBlocks(preserve_rng_state=False)
    layers = TorchAO(
        pad_inner_dim=False,
        float8_all_gather=True,
        precompute_scales=False,
        keep_first_and_last=False,
        skip=("output*", "layers.*.attention.wq*"),
    )
    assert config.precision == FP8(backend=layers, output_dtype="bfloat16")
    places = {origin.setting: (origin.key, origin.line) for origin in config.origins}
    assert places["config.clip"] == ("training.max_norm", 15)
    assert places["config.accumulation"] == ("training.global_batch_size", 14)
    assert {"job", "lr_scheduler", "model.flavor"} <= {origin.key for origin in imported.not_preparation}


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("", FSDP2()),
        ("data_parallel_shard_degree = 1", Single()),
        ("data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 4", DDP()),
        ("data_parallel_shard_degree = 1\ntensor_parallel_degree = 4", TensorParallel()),
        ('fsdp_reshard_after_forward = "never"', FSDP2(reshard_after_forward=False)),
        ("[training]\nenable_cpu_offload = true", FSDP2(offload=OffloadToCPU())),
    ],
)
def test_degrees_choose_the_engine(tmp_path: Path, text: str, engine: object) -> None:
    assert read(tmp_path, f"{NONE}[parallelism]\n{text}\n").config.engine == engine


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("", BF16(output_dtype="bfloat16")),
        ('dtype = "bfloat16"', BF16(output_dtype="bfloat16", master_weights=False)),
        ('mixed_precision_param = "float32"', None),
    ],
)
def test_precision_as_the_policy_of_fully_shard_has_it(tmp_path: Path, text: str, precision: object) -> None:
    assert read(tmp_path, f"{NONE}[training]\n{text}\n").config.precision == precision


def test_switches_that_are_off_and_weights_in_files(tmp_path: Path) -> None:
    text = '[checkpoint]\ninitial_load_in_hf = true\ninitial_load_path = "llama"\n'
    config = read(tmp_path, NONE + text).config
    assert (config.checkpointing, config.weights) == (None, LoadWeights("llama"))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_makes_no_gradient_is_left_to_the_rule_about_it(tmp_path: Path, limit: int) -> None:
    """torchtitan hands it to ``clip_grad_norm_`` whatever it is."""
    assert read(tmp_path, f"{NONE}[training]\nmax_norm = {limit}\n").config.clip == ClipNorm(limit)


def test_the_accumulation_of_a_global_batch_is_left_to_the_ranks_where_the_file_leaves_them_open(
    tmp_path: Path,
) -> None:
    config = read(tmp_path, f"{NONE}[training]\nglobal_batch_size = 64\nlocal_batch_size = 2\n").config
    assert (config.accumulation, config.global_batch) == (None, 64)
    named = "[parallelism]\ndata_parallel_shard_degree = 4\n"
    config = read(tmp_path, f"{NONE}[training]\nglobal_batch_size = 64\nlocal_batch_size = 2\n{named}").config
    assert (config.accumulation, config.global_batch) == (8, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[training]\nseq_len = "8192"', "Write 8192 without quotes."),
        ('[optimizer]\nlr = "3e-4"', "Write 3e-4 without quotes."),
        ('[optimizer]\nlr = "high"', "Write a number."),
        ('[lr_scheduler]\nwarmup_steps = "2"', "Write 2 without quotes."),
        ('[optimizer]\nname = "Adamw"', "Write 'AdamW'."),
        ('[optimizer]\nname = "1"', "Write one of AdamW, Adam."),
        ('[training]\nenable_cpu_offload = "true"', "Write true without quotes."),
        ('[training]\nmixed_precision_param = "BFLOAT16"', "Write 'bfloat16'."),
        ('[compile]\nenable = true\ncomponents = ["modle"]', "Write model in its place."),
    ],
)
def test_values_are_taken_as_they_are_typed(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PlanRejected) as caught:
        read(tmp_path, f"{NONE}{text}\n")
    assert [finding.fix for finding in caught.value.findings] == [said]


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("[parallelism]\ntensor_paralel_degree = 2", "job.toml:4:1", "Write 'parallelism.tensor_parallel_degree'"),
        ("[parallelism]\npipeline_parallel_degree = 2", "job.toml:4:1", "prepkit makes no pipelines"),
        ("[training]\nglobal_batch_size = 63", "job.toml:4:1", "Write a multiple of 8."),
        (
            "[training]\nglobal_batch_size = 9\n[parallelism]\ndata_parallel_shard_degree = 2",
            "job.toml:4:1",
            "Write a multiple of 16.",
        ),
        ('[model]\nconverters = ["mx"]', "job.toml:4:1", "prepkit swaps no layers for 'mx'"),
        (
            '[model]\nconverters = ["float8"]\n[float8]\nfilter_fqns = ["auto_filter_small_kn"]',
            "job.toml:6:1",
            "prepkit takes shell patterns",
        ),
        ("[optimizer]\nearly_step_in_backward = true", "job.toml:4:1", "the optimizer steps after backward"),
        ("[parallelism]\ndata_parallel_shard_degree = [8]", "job.toml:4:1", "is not a number"),
        ("[fault_tolerance]\nenable = true", "job.toml:4:1", "no groups of replicas"),
        ("[activation_checkpointing]\nx = 1", "job.toml:3:1", "Remove it: 'activation_checkpoint' is there too."),
    ],
)
def test_what_is_wrong_or_not_offered_is_said_with_its_place(tmp_path: Path, text: str, place: str, said: str) -> None:
    with pytest.raises(PlanRejected) as caught:
        read(tmp_path, f"{NONE}{text}\n")
    assert [place in finding.where and said in str(finding) for finding in caught.value.findings] == [True]


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        ("[float8]\nemulate = true", "float8", "no-effect"),
        (
            "[parallelism]\nenable_async_tensor_parallel = true",
            "parallelism.enable_async_tensor_parallel",
            "not-supported",
        ),
        ("[activation_checkpoint]\nmode = 'memory_budget'", "activation_checkpoint.mode", "not-supported"),
        (
            "[parallelism]\ndata_parallel_shard_degree = 1\n[training]\nenable_cpu_offload = true",
            "training.enable_cpu_offload",
            "no-effect",
        ),
    ],
)
def test_keys_that_do_nothing_there_or_here_are_said(tmp_path: Path, text: str, key: str, rule: str) -> None:
    """A check calls the first wrong; of the second it says that prepkit does not do it."""
    none = "" if "checkpoint" in key else NONE
    notes = read(tmp_path, f"job = {{}}\n{none}{text}\n").notes
    assert [(note.rule, note.where.rpartition(" ")[2]) for note in notes] == [(f"import.{rule}", key)]


@pytest.mark.parametrize("named", ["[experimental]\ncustom_args_module", "[job]\ncustom_config_module"])
def test_keys_of_a_module_of_ones_own_are_listed(tmp_path: Path, named: str) -> None:
    text = f'{named} = "mine"\n[my_section]\nkey = 1\n'
    assert read(tmp_path, NONE + text).notes == ()
    assert "my_section" in {origin.key for origin in read(tmp_path, NONE + text).not_preparation}


def test_a_file_of_2024_says_the_same_in_other_places(tmp_path: Path) -> None:
    text = """\
[model]
norm_type = "rmsnorm"
[training]
warmup_steps = 10
data_parallel_degree = 4
tensor_parallel_degree = 2
enable_float8_linear = true
[experimental]
pipeline_parallel_degree = 1
[float8]
enable_fsdp_float8_all_gather = true
[activation_checkpoint]
mode = "full"
"""
    imported = read(tmp_path, text)
    config = imported.config
    assert (config.mesh, config.engine) == (Mesh(shard=4, tensor=2), FSDP2())
    assert isinstance(config.precision, FP8)
    assert isinstance(config.precision.backend, TorchAO)
    assert config.precision.backend.float8_all_gather
    keys = {origin.setting: (origin.key, origin.line) for origin in config.origins}
    assert keys["config.mesh.shard"] == ("training.data_parallel_degree", 5)
    assert keys["config.precision"] == ("training.enable_float8_linear", 7)
    off = read(tmp_path, text.replace("linear = true", "linear = false"))
    assert isinstance(off.config.precision, BF16)
    assert "float8" in {origin.key for origin in off.not_preparation}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[experimental]\npipeline_parallel_degree = 4", r"experimental\.pipeline_parallel_degree: prepkit makes no"),
        (
            "[training]\ntensor_parallel_degree = 2\n[parallelism]\ntensor_parallel_degree = 4",
            r"training\.tensor_parallel_degree: it is given twice",
        ),
        ("[float8]\nenable_float8_linear = 3", r"float8\.enable_float8_linear: 3 is not true or false"),
    ],
)
def test_what_an_older_file_asks_for_is_not_passed_over(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PlanRejected, match=said):
        read(tmp_path, f"job = {{}}\n{text}\n")


def test_keys_of_a_module_of_ones_own_are_listed_unless_they_are_nearly_known(tmp_path: Path) -> None:
    own = '[experimental]\ncustom_args_module = "mine"\n[training]\nimg_size = 256\n'
    assert "training.img_size" in {origin.key for origin in read(tmp_path, own).not_preparation}
    with pytest.raises(PlanRejected, match=r"training\.max_nrom: torchtitan knows no such key"):
        read(tmp_path, f"{own}max_nrom = 1.0\n")


FORK = """\
[experimental]
custom_import = "my_fork.models"
[training]
steps = 100
data_mix = "a,b"
[my_fork]
gate = true
[my_fork.router]
width = 2
[flux_data]
x = 1
"""


def test_what_only_a_fork_reads_is_one_finding_that_makes_no_file_wrong(tmp_path: Path) -> None:
    imported = read(tmp_path, FORK)
    (note,) = imported.notes
    assert (note.rule, note.severity) == ("import.fork-key", Severity.WARNING)
    assert "job.toml:5:1 training.data_mix" in note.where
    assert "refuses training.data_mix, my_fork, flux_data, and a fork that adds them reads them" in note.what
    assert imported.config.total_steps == 100
    data = json.loads(run("check", str(tmp_path / "job.toml"), "--json").stdout)
    assert (data["findings"], [one["rule"] for one in data["cannot_know"]]) == ([], ["import.fork-key"])
    with pytest.raises(PlanRejected) as caught:
        read(tmp_path, f"{FORK}[paralelism]\ntensor_parallel_degree = 2\n")
    assert [one.rule for one in caught.value.findings] == ["import.fork-key", "import.unknown-key"]


@pytest.mark.parametrize(
    ("text", "every", "notes"),
    [
        ("", 2, 0),  # torchtitan's own default
        ("selective_ac_option = '3'", 3, 0),
        ("selective_ac_option = 'op'", 1, 1),
        ("mode = 'full'", 1, 0),
        ("mode = 'memory_budget'", 1, 1),
    ],
)
def test_every_so_many_blocks_are_recomputed(tmp_path: Path, text: str, every: int, notes: int) -> None:
    imported = read(tmp_path, f"job = {{}}\n[activation_checkpoint]\n{text}\n")
    assert imported.config.checkpointing == CheckpointBlocks(preserve_rng_state=False, every=every)
    assert len(imported.notes) == notes
    with pytest.raises(PlanRejected, match="there is no block 0"):
        read(tmp_path, "job = {}\n[activation_checkpoint]\nselective_ac_option = '0'\n")


def test_what_is_off_or_as_it_would_be_is_listed(tmp_path: Path) -> None:
    off = "[compile]\nenable = false\n[parallelism]\npipeline_parallel_degree = 1\ndata_parallel_shard_degree = 1\n"
    imported = read(tmp_path, off)
    assert {origin.key for origin in imported.unchanged} == {"compile.enable", "parallelism.pipeline_parallel_degree"}
    assert "changes nothing: compile.enable, parallelism.pipeline_parallel_degree" in str(imported)
