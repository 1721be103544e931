"""transformers' ``TrainingArguments``, alone or in files of TRL."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import pytest
from attrs import evolve
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from prepkit.config import (
    BF16,
    DDP,
    FP16,
    FSDP1,
    FSDP2,
    BroadcastWeights,
    CheckpointBlocks,
    ClipNorm,
    CompileModel,
    Config,
    DeepSpeed,
    OffloadToCPU,
    WrapBlocks,
    WrapClasses,
)
from prepkit.findings import PlanRejected, Severity
from prepkit.formats.importers import Imported, import_config
from prepkit.formats.importers.argument_keys import GONE, NOW


def read(tmp_path: Path, text: str) -> Imported:
    (tmp_path / "args.yaml").write_text(text)
    return import_config(tmp_path / "args.yaml", "transformers")


PLAIN = {"clip": ClipNorm(1.0), "timeout_s": 1800.0}
"""What the Trainer does where nothing is said."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16: true", Config(engine=DDP(), precision=BF16(), **PLAIN)),
        ("fp16: true\nmax_grad_norm: 0", Config(engine=DDP(), precision=FP16(), clip=None, timeout_s=1800.0)),
        (
            (
                "gradient_accumulation_steps: 8\ngradient_checkpointing: true\n"
                "ddp_find_unused_parameters: true\nddp_timeout: 60"
            ),
            Config(
                engine=DDP(find_unused_parameters=True),
                accumulation=8,
                checkpointing=CheckpointBlocks(),
                clip=ClipNorm(1.0),
                timeout_s=60.0,
            ),
        ),
        (
            "torch_compile: true\ntorch_compile_backend: eager",
            Config(engine=DDP(), compile=CompileModel(backend="eager"), **PLAIN),
        ),
        ("fsdp: true", Config(engine=FSDP2(wrap=WrapBlocks()), **PLAIN)),
        ("fsdp: true\nbf16: true", Config(engine=FSDP2(), precision=BF16(reduce_dtype="bfloat16"), **PLAIN)),
        (
            "fsdp: true\nfsdp_config: {version: 1, reshard_after_forward: hybrid_shard, cpu_offload: true}",
            Config(
                engine=FSDP1(
                    sharding="HYBRID_SHARD", offload=True, sync_module_states=True, backward_prefetch="NO_PREFETCH"
                ),
                **PLAIN,
            ),
        ),
        (
            (
                "fsdp: true\nfsdp_config: {transformer_layer_cls_to_wrap: Block, cpu_ram_efficient_loading: true,"
                " offload_params: true}"
            ),
            Config(
                engine=FSDP2(wrap=WrapClasses(("Block",)), offload=OffloadToCPU()), weights=BroadcastWeights(), **PLAIN
            ),
        ),
        (
            "fsdp: shard_grad_op auto_wrap offload\nfsdp_config: {version: 1, activation_checkpointing: true}",
            Config(
                engine=FSDP1(
                    sharding="SHARD_GRAD_OP", offload=True, sync_module_states=True, backward_prefetch="NO_PREFETCH"
                ),
                checkpointing=CheckpointBlocks(),
                **PLAIN,
            ),
        ),
    ],
)
def test_what_the_arguments_become(tmp_path: Path, text: str, expected: Config) -> None:
    assert evolve(read(tmp_path, text).config, origins=()) == expected


def test_deepspeed_is_read_from_the_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    config = read(tmp_path, "bf16: true\ndeepspeed: zero3.json\n").config
    assert isinstance(config.engine, DeepSpeed)
    assert json.loads(config.engine.config)["zero_optimization"] == {"stage": 3}
    assert config.precision == BF16(reduce_dtype="bfloat16")


def test_data_and_logging_are_listed_and_a_slip_of_the_pen_is_refused(tmp_path: Path) -> None:
    imported = read(tmp_path, "bf16: true\noutput_dir: out\nlogging_steps: 10\nlearning_rate: 1e-4\n")
    assert {origin.key for origin in imported.not_preparation} == {"output_dir", "logging_steps", "learning_rate"}
    with pytest.raises(PlanRejected, match="Write 'gradient_accumulation_steps', or remove it"):
        read(tmp_path, "gradient_acumulation_steps: 4\noutput_dir: out\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bf16: true\nfp16: true", "a run has one precision"),
        ("fsdp: true\ndeepspeed: {zero_optimization: {stage: 2}}", "one of them shards"),
        ("fsdp: full_shrad", "'full_shrad' is no word of transformers' fsdp"),
        ("deepspeed: nowhere.json", "there is no file nowhere.json"),
        (f"deepspeed: {'x' * 5000}.json", "there is no file xxxx"),
        ("fsdp: true\nfsdp_config: {vresion: 2}", "knows no such key"),
    ],
)
def test_contradictions_and_what_is_not_there_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PlanRejected, match=said):
        read(tmp_path, text)


def test_the_section_alone_does_nothing(tmp_path: Path) -> None:
    notes = read(tmp_path, "fsdp_config: {version: 2}\n").notes
    assert [(note.rule, note.where[-11:]) for note in notes] == [("import.no-effect", "fsdp_config")]


@pytest.mark.parametrize(("words", "freed"), [("full_shard auto_wrap", True), ("shard_grad_op", False)])
def test_nothing_is_said_of_keys_that_nobody_wrote(tmp_path: Path, words: str, freed: bool) -> None:
    imported = read(tmp_path, f'output_dir: out\nfsdp: "{words}"\n')
    assert {origin.key for origin in imported.config.origins} == {"fsdp"}
    assert imported.notes == ()
    assert imported.config.engine == FSDP2(reshard_after_forward=freed)


def test_a_strategy_of_the_first_version_is_refused_under_the_second(tmp_path: Path) -> None:
    with pytest.raises(PlanRejected, match="hybrid_shard is a way of FSDP of version 1"):
        read(tmp_path, "fsdp: hybrid_shard auto_wrap\n")
    config = read(tmp_path, "fsdp: hybrid_shard auto_wrap\nfsdp_config: {version: '1'}\n").config
    assert isinstance(config.engine, FSDP1)
    assert config.engine.sharding == "HYBRID_SHARD"


def test_keys_of_the_section_are_named_as_they_were_written(tmp_path: Path) -> None:
    config = read(
        tmp_path, "fsdp: true\nfsdp_config: {cpu_ram_efficient_loading: true, fsdp_offload_params: true}\n"
    ).config
    keys = {origin.setting: (origin.key, origin.line) for origin in config.origins}
    assert keys["config.engine.offload"] == ("fsdp_config.fsdp_offload_params", 2)
    with pytest.raises(PlanRejected, match=r"fsdp_config\.vresion: transformers knows no such key"):
        read(tmp_path, "fsdp: true\nfsdp_config: {vresion: 2}")


@pytest.mark.parametrize("value", ["[1]", "1.5", "true"])
def test_a_section_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(PlanRejected, match="is no section"):
        read(tmp_path, f"fsdp: true\nfsdp_config: {value}\n")


def test_recomputation_under_its_newer_name(tmp_path: Path) -> None:
    assert read(tmp_path, "activation_checkpointing: true\n").config.checkpointing == CheckpointBlocks()
    text = "activation_checkpointing: true\ngradient_checkpointing: false\n"
    both = read(tmp_path, f"{text}activation_checkpointing_kwargs: {{every_n_layers: 2}}\n")
    assert both.config.checkpointing == CheckpointBlocks()
    assert [note.where.rpartition(" ")[2] for note in both.notes] == [
        "gradient_checkpointing",
        "activation_checkpointing_kwargs",
    ]


def test_options_of_recomputation_are_no_unknown_keys(tmp_path: Path) -> None:
    text = "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false}\n"
    imported = read(tmp_path, text)
    assert (imported.config.checkpointing, imported.notes) == (CheckpointBlocks(), ())


def test_keys_of_the_rest_that_are_near_to_each_other_are_no_mistakes(tmp_path: Path) -> None:
    imported = read(tmp_path, "load_in_8bit: false\nload_in_4bit: true\nlora_r: 8\nlora_n: 1\n")
    assert {origin.key for origin in imported.not_preparation} == {"load_in_8bit", "load_in_4bit", "lora_r", "lora_n"}
    with pytest.raises(PlanRejected, match="gradient_acumulation_steps: transformers knows no such key"):
        read(tmp_path, "gradient_acumulation_steps: 2\n")


def test_older_names_are_read_as_the_new_ones(tmp_path: Path) -> None:
    config = read(
        tmp_path, "no_cuda: true\nfsdp: full_shard auto_wrap\nfsdp_transformer_layer_cls_to_wrap: Block\n"
    ).config
    assert config.device == "cpu"
    assert config.engine == FSDP2(wrap=WrapClasses(("Block",)))
    keys = {origin.setting: (origin.key, origin.line) for origin in config.origins}
    assert keys["config.engine.wrap"] == ("fsdp_transformer_layer_cls_to_wrap", 3)
    assert keys["config.device"] == ("no_cuda", 1)


def test_what_the_section_says_of_blocks_and_weights_has_its_place(tmp_path: Path) -> None:
    text = "fsdp: true\nfsdp_config: {cpu_ram_efficient_loading: true, activation_checkpointing: true}\n"
    config = read(tmp_path, text).config
    assert (config.weights, config.checkpointing) == (BroadcastWeights(), CheckpointBlocks())
    settings = {origin.setting: origin.key for origin in config.origins}
    assert settings["config.weights"] == "fsdp_config.cpu_ram_efficient_loading"
    assert settings["config.checkpointing"] == "fsdp_config.activation_checkpointing"


def test_the_shards_of_torch_xla_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanRejected, match=r"fsdp_config\.xla: torch_xla's own FSDP"):
        read(tmp_path, "fsdp: true\nfsdp_config: {xla: true, xla_fsdp_v2: true}\n")


def test_what_deepspeeds_file_leaves_to_the_arguments_is_filled_in_from_them(tmp_path: Path) -> None:
    """The usual file: precision and batch sizes "auto", and a loss scale of its own, which counts (DP-30, HC-1)."""
    left = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "fp16": {"enabled": "auto", "loss_scale_window": 500, "initial_scale_power": 12},
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "zero.json").write_text(json.dumps(left))
    config = read(tmp_path, "fp16: true\ndeepspeed: zero.json\nper_device_train_batch_size: 3\n").config
    assert config.precision == FP16(reduce_dtype="float16", init_scale=4096.0, growth_interval=500)
    assert isinstance(config.engine, DeepSpeed)
    assert config.engine.micro_batch == 3
    (tmp_path / "zero.json").write_text(json.dumps(left | {"train_micro_batch_size_per_gpu": 3}))
    config = read(tmp_path, "fp16: true\ndeepspeed: zero.json\nper_device_train_batch_size: 3\n").config
    assert isinstance(config.engine, DeepSpeed)
    assert config.engine.micro_batch is None
    text = "bf16: true\ndeepspeed: zero.json\nper_device_train_batch_size: 3\n"
    assert read(tmp_path, text).config.precision == BF16(reduce_dtype="bfloat16")


def test_a_file_with_an_fsdp_config_is_told_from_accelerates(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("output_dir: out\nfsdp: true\nfsdp_config: {reshard_after_forward: false}\n")
    imported = import_config(tmp_path / "args.yaml")
    assert (imported.kind, imported.config.engine) == ("transformers", FSDP2(reshard_after_forward=False))
    (tmp_path / "args.yaml").write_text("fsdp_config: {fsdp_version: 2}\n")
    with pytest.raises(PlanRejected, match="accelerate needs it in every config file"):
        import_config(tmp_path / "args.yaml")


def test_a_time_out_of_nothing_is_not_the_usual_one(tmp_path: Path) -> None:
    assert read(tmp_path, "ddp_timeout: 0\n").config.timeout_s == 0.0


def test_what_is_wrong_in_a_json_of_deepspeed_is_said_with_what_is_wrong_here(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text("[1]")
    with pytest.raises(PlanRejected) as refused:
        read(tmp_path, "bf16: maybe\ndeepspeed: zero.json\n")
    assert {found.rule for found in refused.value.findings} == {"import.wrong-type", "config.not-a-mapping"}


def test_a_json_without_clipping_clips_as_deepspeed_does_and_the_arguments_say_nothing_of_it(tmp_path: Path) -> None:
    """``HfTrainerDeepSpeedConfig.fill_match`` fills in what is ``auto``, and adds no key that is not there."""
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    text = "max_grad_norm: 0.5\ndeepspeed: zero.json\n"
    imported = read(tmp_path, text)
    assert imported.config.clip == ClipNorm(1.0)
    assert [note.where.rpartition(" ")[2] for note in imported.notes] == ["max_grad_norm"]
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}')
    assert (read(tmp_path, text).config.clip, read(tmp_path, text).notes) == (ClipNorm(0.5), ())


def test_a_damaged_file_that_is_named_hides_nothing_else_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text("{")
    with pytest.raises(PlanRejected) as refused:
        read(tmp_path, "fsdp: full_shard\nfsdp_config: fsdp.json\nmax_grad_norm: many\n")
    assert {finding.rule for finding in refused.value.findings} >= {"codec.damaged", "import.wrong-type"}


def test_an_optimizer_of_a_json_takes_its_numbers_from_the_arguments(tmp_path: Path) -> None:
    """``HfTrainerDeepSpeedConfig.trainer_config_process``; what neither says is the Trainer's default."""
    params = {"lr": "auto", "betas": "auto", "eps": 1e-6, "weight_decay": "auto"}
    steps = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    data = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": params}, "scheduler": steps}
    (tmp_path / "zero.json").write_text(json.dumps(data))
    text = "learning_rate: 3.0e-4\nadam_beta2: 0.95\nadam_epsilon: 1.0e-6\nwarmup_steps: 10\ndeepspeed: zero.json\n"
    imported = read(tmp_path, text)
    assert isinstance(imported.config.engine, DeepSpeed)
    made = json.loads(imported.config.engine.config)["optimizer"]["params"]
    assert made == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.0}
    assert json.loads(imported.config.engine.config)["scheduler"]["params"] == {"warmup_num_steps": 10}
    assert "learning_rate" not in {one.key for one in imported.not_preparation}


def test_a_scheduler_of_a_json_is_filled_in_as_the_trainer_does(tmp_path: Path) -> None:
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    scheduler = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler}))
    for text, expected in {
        "learning_rate: 3.0e-4\nmax_steps: 200\nwarmup_steps: 0.1": (0, 3e-4, 20, 200),
        "learning_rate: 3.0e-4\nmax_steps: 200\nwarmup_ratio: 0.1": (0, 3e-4, 20, 200),
        "max_steps: 50\nwarmup_steps: 0": (0, 5e-5, 1, 50),
        "warmup_steps: 0.1": (0, 5e-5, "auto", "auto"),  # of a number of steps that the data say
    }.items():
        engine = read(tmp_path, f"{text}\ndeepspeed: zero.json\n").config.engine
        assert isinstance(engine, DeepSpeed)
        params = json.loads(engine.config)["scheduler"]["params"]
        assert tuple(params[name] for name in names) == expected, text


@pytest.mark.parametrize(
    ("text", "data", "key"),
    [
        ("learning_rate: 1.0e-4", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "learning_rate"),
        ("adam_beta2: 0.95", {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999]}}}, "adam_beta2"),
        ("per_device_train_batch_size: 4", {"train_micro_batch_size_per_gpu": 2}, "per_device_train_batch_size"),
        ("gradient_accumulation_steps: 4", {"gradient_accumulation_steps": 1}, "gradient_accumulation_steps"),
        ("max_grad_norm: 0.5", {"gradient_clipping": 1.0}, "max_grad_norm"),
        ("warmup_steps: 10", {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "warmup_steps"),
        ("bf16: true", {"fp16": {"enabled": True}}, "bf16"),
        ("bf16: false", {"bf16": {"enabled": True}}, "bf16"),
        ("bf16: false", {"fp16": {"enabled": True}}, "deepspeed"),
        ("bf16: true", {"gradient_clipping": 0.3}, "deepspeed"),
        ("learning_rate: 1.0e-4", {"train_micro_batch_size_per_gpu": 2}, "deepspeed"),
        ("learning_rate: 1.0e-4", {"gradient_accumulation_steps": 2}, "deepspeed"),
        ("learning_rate: 1.0e-4", {"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "deepspeed"),
        ("learning_rate: 1.0e-4", {"optimizer": {"params": {"weight_decay": 0.1}}}, "deepspeed"),
        ("adam_beta2: 0.99", {"scheduler": {"params": {"warmup_max_lr": 1e-4}}}, "deepspeed"),
        ("auto_find_batch_size: true", {"optimizer": {"params": {"eps": 1e-6}}}, "deepspeed"),
    ],
)
def test_what_the_arguments_and_the_json_say_otherwise_is_refused_as_the_trainer_refuses_it(
    tmp_path: Path, text: str, data: dict[str, object], key: str
) -> None:
    """The table of the importer beside the installed transformers: both refuse, or neither."""
    plain = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    for changed in (plain | data, plain):
        (tmp_path / "zero.json").write_text(json.dumps(changed))
        said: tuple[str, ...] = ()
        try:
            read(tmp_path, f"output_dir: out\n{text}\ndeepspeed: zero.json\n")
        except PlanRejected as refused:
            said = tuple(f"{one.rule} {one.where.rpartition(' ')[2]}" for one in refused.findings)
        assert said == ((f"import.contradiction {key}",) if changed != plain else ())
        theirs = HfTrainerDeepSpeedConfig(str(tmp_path / "zero.json"))
        name, _, value = text.partition(": ")
        arguments = TrainingArguments(output_dir="out", use_cpu=True, **{name: json.loads(value)})
        theirs.trainer_config_process(arguments)
        with nullcontext() if changed == plain else pytest.raises(ValueError, match="mismatch"):
            theirs.trainer_config_finalize(arguments, None, 1000)


def test_options_of_fsdp_beside_deepspeed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(PlanRejected) as refused:
        read(tmp_path, "deepspeed: zero.json\nfsdp_config: {min_num_params: 3}\n")
    (finding,) = refused.value.findings
    assert (finding.rule, finding.where.rpartition(" ")[2]) == ("import.contradiction", "fsdp_config")


def test_the_keys_of_the_table_are_those_of_the_installed_transformers() -> None:
    assert {field.name for field in fields(TrainingArguments)} - {"distributed_state"} == NOW
    assert not NOW & set(GONE)
    for gone in GONE.values():
        written = re.match(r"[a-z_]+(?=$|[:,])", gone.instead)
        assert written is None or written[0] in NOW, gone


@pytest.mark.parametrize(("text", "says"), [("evaluation_strategy: steps", "4.51"), ("warmup_ratio: 0.1", "5.15")])
def test_a_key_that_later_releases_refuse_is_told_with_what_to_write(tmp_path: Path, text: str, says: str) -> None:
    (finding,) = read(tmp_path, f"output_dir: out\n{text}\n").notes
    assert (finding.rule, finding.severity) == ("import.unknown-key", Severity.WARNING)
    assert finding.what == f"transformers {says} and later have no such key, and refuse it"
    assert finding.fix.startswith(("Write eval_strategy", "Write the same number as warmup_steps"))


def test_a_misspelt_key_of_data_and_logging_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(PlanRejected, match="Write 'learning_rate', or remove it"):
        read(tmp_path, "output_dir: out\nlearnig_rate: 1.0e-4\n")


def test_the_json_beside_the_arguments_is_read_before_one_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "zero.json").write_text('{"zero_optimization": {"stage": 1}}')
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    monkeypatch.chdir(tmp_path / "here")
    engine = read(tmp_path, "deepspeed: zero.json\n").config.engine
    assert isinstance(engine, DeepSpeed)
    assert json.loads(engine.config)["zero_optimization"]["stage"] == 3
