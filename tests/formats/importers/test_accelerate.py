"""accelerate's launch configs: what each key becomes, and what is said of the ones that become nothing."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from attrs import evolve

from prepkit.api import check
from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    BroadcastWeights,
    CheckpointBlocks,
    ClipNorm,
    CompileBlocks,
    CompileModel,
    Config,
    DeepSpeed,
    DelayedScaling,
    Mesh,
    OffloadToCPU,
    Single,
    TensorParallel,
    TorchAO,
    TransformerEngine,
    WrapBlocks,
    WrapClasses,
    WrapSize,
)
from prepkit.findings import PlanRejected
from prepkit.formats.importers import Imported, import_config
from prepkit.testing.tiny import tiny_facts


def read(tmp_path: Path, text: str, name: str = "accelerate.yaml") -> Imported:
    file = tmp_path / name
    file.write_text(text)
    return import_config(str(file))


def config_of(tmp_path: Path, text: str) -> Config:
    """The config without the places that its settings come from."""
    return evolve(read(tmp_path, text).config, origins=())


def refused(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(PlanRejected) as caught:
        read(tmp_path, text)
    return [str(finding).replace(f"{tmp_path}/", "") for finding in caught.value.findings]


GPU = "distributed_type: MULTI_GPU\n"
FSDP2_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 16
num_machines: 2
machine_rank: 0
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, Head
  fsdp_reshard_after_forward: false
  fsdp_offload_params: true
  fsdp_activation_checkpointing: yes
  fsdp_cpu_ram_efficient_loading: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


def test_fsdp_of_version_2_with_every_key(tmp_path: Path) -> None:
    assert config_of(tmp_path, FSDP2_FILE) == Config(
        engine=FSDP2(
            wrap=WrapClasses(("LlamaDecoderLayer", "Head")), reshard_after_forward=False, offload=OffloadToCPU()
        ),
        precision=BF16(reduce_dtype="bfloat16"),
        checkpointing=CheckpointBlocks(),
        weights=BroadcastWeights(),
    )


def test_each_setting_says_key_file_line_and_column(tmp_path: Path) -> None:
    imported = read(tmp_path, FSDP2_FILE)
    places = {origin.setting: (origin.key, origin.line, origin.column) for origin in imported.config.origins}
    assert places["config.precision"] == ("mixed_precision", 6, 1)
    assert places["config.engine.offload"] == ("fsdp_config.fsdp_offload_params", 12, 3)
    assert places["config.weights"] == ("fsdp_config.fsdp_cpu_ram_efficient_loading", 14, 3)


def test_processes_and_machines_become_the_declared_environment(tmp_path: Path) -> None:
    imported = read(tmp_path, FSDP2_FILE)
    assert imported.env is not None
    assert (imported.env.world_size, imported.env.per_node) == (16, 8)
    skipped = {"compute_environment", "machine_rank", "fsdp_config.fsdp_state_dict_type"}
    assert {origin.key for origin in imported.not_preparation} == skipped


def test_inputs_of_recomputed_blocks_go_to_host_memory_as_accelerate_has_it(tmp_path: Path) -> None:
    on, off = "  fsdp_activation_checkpointing: yes\n", "  fsdp_activation_checkpointing_offload: true\n"
    assert config_of(tmp_path, FSDP2_FILE.replace(on, on + off)).checkpointing == CheckpointBlocks(offload=True)
    with pytest.raises(PlanRejected, match="accelerate refuses it without fsdp_activation_checkpointing"):
        read(tmp_path, FSDP2_FILE.replace(on, off))
    first = "distributed_type: FSDP\nfsdp_config:\n" + on + off
    assert [note.where for note in read(tmp_path, first).notes if "version 1" in note.what] != []


def test_fsdp_of_version_1_with_every_key(tmp_path: Path) -> None:
    text = """\
distributed_type: FSDP
mixed_precision: fp16
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1000000
  fsdp_sharding_strategy: 2
  fsdp_backward_prefetch: NO_PREFETCH
  fsdp_forward_prefetch: "true"
  fsdp_use_orig_params: false
  fsdp_sync_module_states: false
  fsdp_cpu_ram_efficient_loading: false
  fsdp_limit_all_gathers: no
  fsdp_offload_params: 1
  fsdp_ignored_modules: vision
"""
    assert config_of(tmp_path, text) == Config(
        engine=FSDP1(
            wrap=WrapSize(1_000_000),
            sharding="SHARD_GRAD_OP",
            offload=True,
            backward_prefetch="NO_PREFETCH",
            forward_prefetch=True,
            use_orig_params=False,
            limit_all_gathers=False,
            ignored=("vision",),
            buffer_dtype="float16",
        ),
        precision=FP16(reduce_dtype="float16"),
        weights=None,
    )


def test_fsdp_of_version_1_where_the_file_is_silent_is_as_accelerates_launcher_has_it(tmp_path: Path) -> None:
    """K-F5, H-10c: no prefetch in backward, and buffers in the dtype in which gradients are reduced, if in any."""
    engines = [
        config_of(tmp_path, f"distributed_type: FSDP\nmixed_precision: {word}\nfsdp_config: {{}}").engine
        for word in ("no", "bf16")
    ]
    assert [engine.backward_prefetch for engine in engines if isinstance(engine, FSDP1)] == [
        "NO_PREFETCH",
        "NO_PREFETCH",
    ]
    assert [engine.buffer_dtype for engine in engines if isinstance(engine, FSDP1)] == [None, "bfloat16"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: 'NO'", Config(engine=Single())),
        ("distributed_type: NO\nuse_cpu: true", Config(engine=Single(), device="cpu")),
        ("distributed_type: false", Config(engine=Single())),
        ("distributed_type: MULTI_GPU\nnum_processes: 2", Config(engine=DDP())),
        ("distributed_type: MULTI_CPU\nnum_processes: 2", Config(engine=DDP(), device="cpu")),
        ("distributed_type: MULTI_GPU\nnum_processes: 1", Config(engine=Single())),
        (
            "distributed_type: MULTI_GPU\ndynamo_backend: INDUCTOR",
            Config(engine=DDP(), compile=CompileModel(dynamic=False)),
        ),
        (
            GPU
            + "dynamo_config: {dynamo_backend: inductor, dynamo_use_regional_compilation: true,"
            + " dynamo_mode: max-autotune}",
            Config(engine=DDP(), compile=CompileBlocks(mode="max-autotune", dynamic=False)),
        ),
        (
            "distributed_type: MULTI_GPU\nparallelism_config:\n  parallelism_config_tp_size: 4\n",
            Config(engine=TensorParallel()),
        ),
        (
            (
                "distributed_type: FSDP\n"
                "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
                "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
                "  parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 2\n"
            ),
            Config(
                engine=FSDP2(wrap=WrapBlocks()),
                mesh=Mesh(replicate=2, shard=4, tensor=2),
                weights=BroadcastWeights(),
            ),
        ),
        (
            (
                "distributed_type: MULTI_GPU\nmixed_precision: fp8\n"
                "fp8_config: {backend: TE, fp8_format: E4M3, margin: 1,"
                " amax_compute_algo: max, override_linear_precision: '[false, false, true]'}\n"
            ),
            Config(
                engine=DDP(),
                precision=FP8(
                    backend=TransformerEngine(
                        recipe=DelayedScaling(
                            fp8_format="E4M3", margin=1, override_linear_precision=(False, False, True)
                        )
                    )
                ),
            ),
        ),
    ],
)
def test_what_a_file_becomes(tmp_path: Path, text: str, expected: Config) -> None:
    assert config_of(tmp_path, text) == expected


def test_a_deepspeed_section_becomes_the_engine(tmp_path: Path) -> None:
    text = """\
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
  zero3_init_flag: true
  offload_optimizer_device: cpu
  offload_param_device: none
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  deepspeed_moe_layer_cls_names: Experts
"""
    assert config_of(tmp_path, text) == Config(
        engine=DeepSpeed(stage=3, offload_optimizer="cpu", offload_param="none", leaf_modules=("Experts",)),
        precision=BF16(reduce_dtype="bfloat16"),
        accumulation=4,
        clip=ClipNorm(1.0),
    )


def test_the_switch_for_saving_16_bit_weights_is_read_and_changes_nothing(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
    without = config_of(tmp_path, text)
    for value in ("true", "false"):
        imported = read(tmp_path, f"{text}  zero3_save_16bit_model: {value}\n")
        assert evolve(imported.config, origins=()) == without
        assert {"deepspeed_config.zero3_save_16bit_model"} == {one.key for one in imported.not_preparation}
        assert imported.notes == ()


@pytest.mark.parametrize(
    "given", ["", "  gradient_clipping: auto\n", "  gradient_clipping: 0.0\n", "  deepspeed_config_file: auto.json\n"]
)
def test_what_is_left_to_accelerate_is_clipped_to_its_norm_and_not_said_to_be_off(tmp_path: Path, given: str) -> None:
    """``auto`` becomes 1.0 in ``Accelerator._prepare_deepspeed``; it leaves 0 out, and DeepSpeed's own norm is 1.0."""
    (tmp_path / "auto.json").write_text(
        '{"zero_optimization": {"stage": 2}, "gradient_clipping": "auto", "fp16": {"enabled": "auto"}}'
    )
    stage = "" if "file" in given else "  zero_stage: 2\n"
    imported = read(tmp_path, f"distributed_type: DEEPSPEED\ndeepspeed_config:\n{stage}{given}")
    assert imported.config.clip == ClipNorm(1.0)
    assert bool(imported.notes) is ("0.0" in given)
    rules = [one.rule for one in check(imported.config, tiny_facts(world=2))]
    assert "deepspeed.turned-off" not in rules


def test_a_deepspeed_file_is_read_where_it_lies_beside_the_yaml(tmp_path: Path) -> None:
    inner = '{\n  "zero_optimization": {"stage": 2},\n  "bf16": {"enabled": true},\n  "gradient_clipping": 0.5\n}'
    (tmp_path / "zero.json").write_text(inner)
    imported = read(tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero.json\n")
    assert imported.config.clip == ClipNorm(0.5)
    assert isinstance(imported.config.precision, BF16)
    assert isinstance(imported.config.engine, DeepSpeed)
    assert json.loads(imported.config.engine.config)["zero_optimization"] == {"stage": 2}
    clip = next(origin for origin in imported.config.origins if origin.setting == "config.clip")
    assert (Path(clip.source).name, clip.line) == ("zero.json", 4)


def test_a_wrong_value_that_changes_no_setting_keeps_no_rule_from_being_asked(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_state_dict_type: SHARDED_STATE_DICTS\n"
    (tmp_path / "accelerate.yaml").write_text(text)
    with pytest.raises(PlanRejected) as told:
        import_config(str(tmp_path / "accelerate.yaml"))
    (finding,) = (one for one in told.value.findings if one.rule == "import.wrong-value")
    assert finding.fix == "Write 'SHARDED_STATE_DICT'."
    assert isinstance(told.value.rest.config.engine, FSDP2)
    (tmp_path / "accelerate.yaml").write_text(text.replace("fsdp_version: 2", "fsdp_version: 3"))
    with pytest.raises(PlanRejected) as told:
        import_config(str(tmp_path / "accelerate.yaml"))
    assert told.value.rest is None


def test_everything_wrong_with_a_file_is_said_at_once_with_its_line(tmp_path: Path) -> None:
    text = """\
distributed_type: FSPD
mixed_precission: bf16
num_processes: many
fsdp_config:
  fsdp_version: 3
"""
    said = [line.partition("\n")[0] for line in refused(tmp_path, text)]
    assert said[0].startswith(
        "error import.wrong-value at accelerate.yaml:1:1 distributed_type: 'FSPD' is none of NO, "
    )
    assert said[1:] == [
        "error import.wrong-type at accelerate.yaml:3:1 num_processes: 'many' is not a number",
        "error import.wrong-value at accelerate.yaml:5:3 fsdp_config.fsdp_version: there is no version 3 of FSDP",
        (
            "error import.unknown-key at accelerate.yaml:2:1 mixed_precission: accelerate knows no such key, and "
            "nothing would read it"
        ),
    ]


def test_of_very_many_unknown_keys_some_are_told_and_the_rest_counted_in_no_time(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text("".join(f"mixed_precisio{at}: 1\n" for at in range(19_000)))
    begun = time.process_time()
    with pytest.raises(PlanRejected) as refused:
        import_config(tmp_path / "accelerate.yaml", "accelerate")
    told = [one for one in refused.value.findings if one.rule == "import.unknown-key"]
    assert len(told) == 101
    assert "100 unknown keys are reported" in told[-1].what
    assert time.process_time() - begun < 20.0


def test_an_unknown_key_gets_the_near_spelling(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_versoin: 2\n"
    assert refused(tmp_path, text)[-1].endswith("fix: Write 'fsdp_config.fsdp_version', or remove it.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\n", "Megatron-LM replaces"),
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_cp_size: 2}\n", "context parallelism"),
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_sp_size: 2}\n", "sequence parallelism"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_ignored_modules: 'a|b'}\n", "regular expression"),
        ("num_processes: 2\ncompute_environment: LOCAL_MACHINE\n", "accelerate needs it in every config file"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: no.json}\n",
            "there is no file no.json",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: no.json, zero_stage: 3}\n",
            "accelerate refuses it beside deepspeed_config_file",
        ),
    ],
)
def test_what_prepkit_does_not_do_or_accelerate_refuses_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in line for line in refused(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}\n", "fsdp_config"),
        ("distributed_type: MULTI_GPU\ndowncast_bf16: 'yes'\n", "downcast_bf16"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_use_orig_params: true}\n",
            "fsdp_use_orig_params",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: 1}\n",
            "fsdp_sharding_strategy",
        ),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_min_num_params: 7}\n", "fsdp_min_num_params"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, zero3_init_flag: true}\n", "zero3_init_flag"),
    ],
)
def test_a_key_that_does_nothing_is_a_warning(tmp_path: Path, text: str, key: str) -> None:
    notes = read(tmp_path, text).notes
    assert [note.rule for note in notes] == ["import.no-effect"]
    assert notes[0].where.endswith(key)


def test_rank_0_sends_its_values_under_both_versions_of_fsdp(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_cpu_ram_efficient_loading: true}\n"
    assert config_of(tmp_path, text).weights == BroadcastWeights()
    kept = text.replace("}", ", fsdp_sync_module_states: false}")
    assert ["rank 0 alone has values" in finding for finding in refused(tmp_path, kept)] == [True]


def test_keys_of_another_float8_library_are_said(tmp_path: Path) -> None:
    text = "distributed_type: NO\nmixed_precision: fp8\nfp8_config: {backend: AO, margin: 1, pad_inner_dim: false}\n"
    imported = read(tmp_path, text)
    assert [note.what for note in imported.notes] == ["it is for backend: TE, and that is AO"]
    assert "fp8_config.pad_inner_dim" in {origin.key for origin in imported.config.origins}


def test_an_unknown_section_is_said_once(tmp_path: Path) -> None:
    said = refused(tmp_path, f"{GPU}fsdp_confg: {{fsdp_version: 2, fsdp_offload_params: true}}\n")
    assert len(said) == 1
    assert "Write 'fsdp_config'" in said[0]


def test_keys_of_sections_are_read_without_their_beginning_too(tmp_path: Path) -> None:
    """As files of 2022 have them; accelerate's launcher puts the beginning before them."""
    text = """\
distributed_type: FSDP
mixed_precision: fp8
fsdp_config:
  sharding_strategy: 2
  offload_params: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: Block
fp8_config: {fp8_backend: AO, fp8_pad_inner_dim: false}
dynamo_config: {backend: inductor, use_fullgraph: true}
"""
    imported = read(tmp_path, text)
    assert imported.config.engine == FSDP1(
        wrap=WrapClasses(("Block",)),
        sharding="SHARD_GRAD_OP",
        offload=True,
        backward_prefetch="NO_PREFETCH",
        sync_module_states=True,
        buffer_dtype="bfloat16",
    )
    assert imported.config.compile == CompileModel(fullgraph=True, dynamic=False)
    assert imported.config.precision == FP8(backend=TorchAO(pad_inner_dim=False), reduce_dtype="bfloat16")
    keys = {origin.setting: (origin.key, origin.line) for origin in imported.config.origins}
    assert keys["config.engine.sharding"] == ("fsdp_config.sharding_strategy", 4)
    with pytest.raises(PlanRejected, match=r"fsdp_config\.offload_parms: accelerate knows no such key"):
        read(tmp_path, "distributed_type: FSDP\nfsdp_config: {offload_parms: true}\n")
    with pytest.raises(PlanRejected, match="given twice"):
        read(tmp_path, "distributed_type: FSDP\nfsdp_config: {offload_params: true, fsdp_offload_params: false}\n")


def test_rank_0_loads_for_all_where_the_file_says_nothing(tmp_path: Path) -> None:
    """K-F19: the launcher's own default, which refuses sync_module_states: false beside it."""
    assert config_of(tmp_path, "distributed_type: FSDP\nfsdp_config: {}\n").weights == BroadcastWeights()
    with pytest.raises(PlanRejected, match="launcher means true where nothing is said"):
        read(tmp_path, "distributed_type: FSDP\nfsdp_config: {fsdp_sync_module_states: false}\n")


def test_a_json_of_deepspeed_is_read_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "stage3.conf").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: stage3.conf}\n"
    config = config_of(tmp_path, text)
    assert isinstance(config.engine, DeepSpeed)
    assert json.loads(config.engine.config)["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize("text", ['{"zero_optimization": {"stage": 3},\n}', '{\n// of ours\n"zero_optimization": {}}'])
def test_a_json_that_pythons_reader_does_not_take_is_refused_at_its_place(tmp_path: Path, text: str) -> None:
    """DeepSpeed's own reader takes both; accelerate reads with ``json.load`` (``HfDeepSpeedConfig``)."""
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(PlanRejected) as refused:
        config_of(tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n")
    assert [one.rule for one in refused.value.findings] == ["config.damaged"]
    assert "ds.json:2:1" in refused.value.findings[0].where
    with pytest.raises(json.JSONDecodeError) as theirs:
        json.loads(text)
    assert theirs.value.lineno == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_processes: 0", "num_processes: 0 processes"),
        ("num_processes: -4", "num_processes: -4 processes"),
        ("num_machines: 0", "num_machines: 0 machines"),
        (
            "parallelism_config: {parallelism_config_tp_size: 0}",
            "parallelism_config_tp_size: accelerate takes 1 or more",
        ),
    ],
)
def test_sizes_that_accelerate_refuses_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PlanRejected, match=said):
        read(tmp_path, f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2}}\n{text}\n")


def test_processes_that_the_machines_do_not_share_evenly_are_those_that_start(tmp_path: Path) -> None:
    imported = read(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 9\nnum_machines: 2\n")
    assert (imported.world_size, imported.per_node) == (8, 4)
    assert [note.rule for note in imported.notes] == ["import.contradiction"]
    assert read(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: -1\n").world_size is None


def test_what_is_wrong_in_deepspeeds_file_is_said_with_what_is_wrong_here(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": NaN}')
    text = "distributed_type: DEEPSPEED\nnum_proceses: 2\ndeepspeed_config: {deepspeed_config_file: zero.json}\n"
    with pytest.raises(PlanRejected) as refused:
        read(tmp_path, text)
    assert [found.rule for found in refused.value.findings] == ["codec.wrong-value", "import.unknown-key"]


@pytest.mark.parametrize("kind", ["DEEPSPEED", "XLA"])
@pytest.mark.parametrize("said", ["dynamo_backend: INDUCTOR", "dynamo_config: {dynamo_backend: INDUCTOR}"])
def test_compilation_is_not_what_the_launcher_hands_on_to_nobody(tmp_path: Path, kind: str, said: str) -> None:
    imported = read(tmp_path, f"distributed_type: {kind}\n{said}\n")
    assert imported.config.compile is None
    assert [note.rule for note in imported.notes] == ["import.no-effect"]
    off = read(tmp_path, f"distributed_type: {kind}\n{said.replace('INDUCTOR', 'NO')}\n")
    assert (off.config.compile, off.notes) == (None, ())
    with pytest.raises(PlanRejected, match="dynamo_config: \\[1\\] is no section"):
        read(tmp_path, f"distributed_type: {kind}\ndynamo_config: [1]\n")


def test_a_key_of_deepspeeds_own_file_is_sent_there(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  overlap_comm: true\n  zzz: 1\n")
    with pytest.raises(PlanRejected) as caught:
        import_config(file)
    fixes = {found.where.rpartition(" ")[2]: found.fix for found in caught.value.findings}
    assert fixes["deepspeed_config.overlap_comm"].startswith(
        "Write zero_optimization.overlap_comm into a DeepSpeed JSON"
    )
    assert fixes["deepspeed_config.zzz"] == "Remove it."


def test_a_setting_that_no_key_says_has_a_row_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_sync_module_states: true}\n")
    assert "config.weights" in str(import_config(path))
    assert re.search(r"BroadcastWeights\(\) +from what accelerate does by itself", str(import_config(path)))


@pytest.mark.parametrize("where", ["", "fsdp_config"])
def test_an_unknown_key_with_dots_in_it_is_said(tmp_path: Path, where: str) -> None:
    line = f"{where}:\n  'no.such.key': 1\n" if where else "'no.such.key': 1\n"
    (tmp_path / "a.yaml").write_text(f"distributed_type: FSDP\n{line}")
    with pytest.raises(PlanRejected) as caught:
        import_config(str(tmp_path / "a.yaml"))
    said = [finding for finding in caught.value.findings if finding.rule == "import.unknown-key"]
    assert [one.where.rpartition(" ")[2] for one in said] == [f"{where}.no.such.key".strip(".")]


MISPLACED = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 8
fsdp_version: 2
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
"""


def test_a_key_that_belongs_into_a_section_is_told_so_and_read_there(tmp_path: Path) -> None:
    what = "accelerate refuses a file with it at the top: it is a key of fsdp_config"
    assert refused(tmp_path, MISPLACED) == [
        f"error import.unknown-key at accelerate.yaml:4:1 fsdp_version: {what}\n  fix: Move it into fsdp_config."
    ]
    said = refused(tmp_path, "distributed_type: 'NO'\nfsdp_version: 2\n")
    assert len(said) == 1
    assert "Write it as fsdp_config.fsdp_version, with distributed_type: FSDP" in said[0]


def test_keys_of_sagemaker_are_known_in_its_files_alone(tmp_path: Path) -> None:
    assert "no such key" in refused(tmp_path, f"compute_environment: LOCAL_MACHINE\n{GPU}py_version: py310\n")[0]
    text = f"compute_environment: AMAZON_SAGEMAKER\n{GPU}py_version: py310\n"
    assert not read(tmp_path, text).notes


def test_a_key_of_the_top_in_a_section_is_what_the_launcher_takes(tmp_path: Path) -> None:
    inside = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  mixed_precision: fp16\n"
    imported = read(tmp_path, inside)
    assert isinstance(imported.config.precision, FP16)
    assert [(note.rule, note.fix) for note in imported.notes] == [("import.contradiction", "Move it to the top.")]
    [said] = refused(tmp_path, f"mixed_precision: bf16\n{inside}")
    assert "accelerate's launcher takes it over mixed_precision: 'bf16' at the top" in said
    assert not read(tmp_path, f"mixed_precision: fp16\n{inside}").notes


def test_a_guess_takes_the_value_that_is_there(tmp_path: Path) -> None:
    [said] = refused(
        tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config: {offload_optimizer_pin_memory: true, zero_stage: 2}\n"
    )
    assert "Write zero_optimization.offload_optimizer.pin_memory into a DeepSpeed JSON" in said
    for value, guessed in (("true", False), ("/tmp/x", True)):
        text = f"distributed_type: DEEPSPEED\ndeepspeed_config: {{offload_param_nvme_paht: {value}, zero_stage: 3}}\n"
        assert ("offload_param_nvme_path'" in refused(tmp_path, text)[0]) is guessed


@pytest.mark.parametrize(("written", "refusals"), [("1e8", 1), ("1.0e+8", 1), ("100000000", 0), ("'100000000'", 0)])
def test_a_number_that_is_read_with_int_is_in_digits(tmp_path: Path, written: str, refusals: int) -> None:
    size = f"fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: {written}"
    text = f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2, {size}}}\n"
    if refusals:
        assert "Write 100000000." in refused(tmp_path, text)[0]
    else:
        assert read(tmp_path, text).config.engine.wrap == WrapSize(100_000_000)  # type: ignore[union-attr]


def test_keys_that_accelerate_config_writes_and_its_launcher_does_not_read_do_nothing(tmp_path: Path) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    names = vars(launch.launch_command_parser().parse_args(["x.py"]))
    assert {"fp8_amax_history_len", "fp8_amax_compute_algo"} <= names.keys()
    assert not {"fp8_amax_history_length", "fp8_amax_compute_algorithm"} & names.keys()
    asked = "  amax_history_length: 16\n  amax_compute_algorithm: max\n"
    text = f"distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n{asked}"
    imported = read(tmp_path, text)
    said = {finding.where.rpartition(".")[2]: (finding.rule, finding.fix) for finding in imported.notes}
    assert said == {
        "amax_history_length": ("import.no-effect", "Write it as amax_history_len."),
        "amax_compute_algorithm": ("import.no-effect", "Write it as amax_compute_algo."),
    }
    recipe = DelayedScaling(amax_compute_algo="most_recent")
    assert imported.config.precision == FP8(backend=TransformerEngine(recipe=recipe))


def test_a_section_of_another_name_is_not_taken_for_one_that_ends_alike(tmp_path: Path) -> None:
    with pytest.raises(PlanRejected) as refused:
        read(tmp_path, "distributed_type: MULTI_GPU\nmixed_precision: bf16\nipex_config:\n  ipex: true\n")
    assert [finding.fix for finding in refused.value.findings] == ["Remove it."]
    with pytest.raises(PlanRejected, match="Write 'fsdp_config'"):
        read(tmp_path, "distributed_type: FSDP\nfsdpp_config: {}\n")
