"""Configs as files of accelerate, DeepSpeed and transformers: what those libraries make of them, and what is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    AdamW,
    BroadcastWeights,
    CheckpointBlocks,
    ClipNorm,
    CompileBlocks,
    CompileModel,
    Config,
    DeepSpeed,
    Mesh,
    OffloadToCPU,
    Single,
    TensorParallel,
    TorchAO,
    WrapClasses,
    WrapRoot,
    WrapSize,
)
from prepkit.findings import PlanRejected
from prepkit.formats.exporters import EXPORTERS, Exported, export_config
from prepkit.formats.exporters.exported import plain
from prepkit.formats.importers import import_config

LOW = BF16(reduce_dtype="bfloat16")
SAID = {
    "accelerate": (
        Config(engine=Single(), precision=FP16()),
        Config(engine=DDP(), compile=CompileBlocks(mode="max-autotune", dynamic=True)),
        Config(engine=DDP(), device="cpu", precision=FP8(backend=TorchAO(float8_all_gather=True))),
        Config(engine=TensorParallel()),
        Config(
            engine=FSDP2(wrap=WrapClasses(("A", "B")), reshard_after_forward=False, offload=OffloadToCPU()),
            mesh=Mesh(replicate=2, shard=4, tensor=1),
            precision=LOW,
            checkpointing=CheckpointBlocks(),
            weights=BroadcastWeights(),
        ),
        Config(engine=FSDP2(wrap=WrapSize(1000))),
        Config(
            engine=FSDP1(
                wrap=WrapRoot(), sharding="SHARD_GRAD_OP", backward_prefetch="NO_PREFETCH", ignored=("vision.*",)
            )
        ),
        Config(
            engine=DeepSpeed(stage=3, offload_param="cpu", leaf_modules=("Moe",)), accumulation=4, clip=ClipNorm(1.0)
        ),
        Config(engine=DeepSpeed(config={"zero_optimization": {"stage": 1}}), precision=BF16()),
    ),
    "deepspeed": (
        Config(engine=DeepSpeed(stage=3, offload_optimizer="cpu", micro_batch=2), precision=BF16(), accumulation=2),
        Config(engine=DeepSpeed(config={"zero_optimization": {"stage": 1}}), clip=ClipNorm(0.5)),
        Config(engine=DeepSpeed(), precision=FP16(init_scale=1024.0, growth_interval=100)),
        Config(engine=DeepSpeed(stage=1, micro_batch=2), global_batch=64),
    ),
    "transformers": (
        Config(engine=DDP(find_unused_parameters=True, bucket_cap_mb=10.0), precision=BF16(), timeout_s=60.0),
        Config(engine=DDP(), compile=CompileModel(mode="max-autotune"), checkpointing=CheckpointBlocks()),
        Config(engine=FSDP2(wrap=WrapClasses(("Block",)), offload=OffloadToCPU()), precision=LOW, accumulation=3),
        Config(engine=FSDP1(sharding="HYBRID_SHARD", sync_module_states=True), weights=BroadcastWeights()),
        Config(engine=DeepSpeed(config={"zero_optimization": {"stage": 2}}), clip=ClipNorm(1.0)),
    ),
}
"""Configs that each library's file can say, whole."""
CASES = [(to, config) for to, configs in SAID.items() for config in configs]
IDS = [f"{to}-{type(config.engine).__name__}-{number}" for number, (to, config) in enumerate(CASES)]


def written(tmp_path: Path, to: str, config: Config) -> tuple[Path, Exported]:
    file = tmp_path / f"config{EXPORTERS[to][1][0]}"
    return file, export_config(config, to, file, world_size=8, per_node=8)


@pytest.mark.parametrize(("to", "config"), CASES, ids=IDS)
def test_what_is_written_is_read_as_the_same(tmp_path: Path, to: str, config: Config) -> None:
    file, made = written(tmp_path, to, config)
    imported = import_config(file, to)
    assert made.left_out == ()
    alone = isinstance(config.engine, Single)  # accelerate starts one process, whatever number is written beside NO
    started = (1, 1) if alone else (8, 8)
    assert (imported.world_size, imported.per_node) == (started if to == "accelerate" else (None, None))
    again = export_config(evolve(imported.config, origins=()), to, world_size=8, per_node=8)
    assert (again.text, again.beside) == (made.text, made.beside)
    if not isinstance(config.engine, DeepSpeed):  # whose fields are written into its JSON
        assert plain(imported.config) == plain(config)


@pytest.mark.parametrize("config", SAID["accelerate"], ids=IDS[: len(SAID["accelerate"])])
def test_accelerates_own_class_loads_it(tmp_path: Path, config: Config) -> None:
    args = pytest.importorskip("accelerate.commands.config.config_args")
    file, _ = written(tmp_path, "accelerate", config)
    loaded = args.load_config_from_file(str(file))
    assert loaded.num_processes == 8
    assert (loaded.mixed_precision or "no") in ("no", "bf16", "fp16", "fp8")


@pytest.mark.parametrize("config", SAID["deepspeed"], ids=lambda config: str(config.engine.stage))
def test_deepspeeds_own_class_parses_it(tmp_path: Path, config: Config) -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config")
    file, _ = written(tmp_path, "deepspeed", config)
    data: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1} | json.loads(file.read_text())
    parsed = runtime.DeepSpeedConfig(data)
    assert parsed.zero_config.stage == (config.engine.stage or data["zero_optimization"]["stage"])  # type: ignore[union-attr]
    if config.global_batch is None:
        assert parsed.gradient_accumulation_steps == (config.accumulation or 1)
    else:  # in one process, as here
        assert (parsed.train_batch_size, parsed.gradient_accumulation_steps) == (64, 32)
    assert parsed.bfloat16_config.enabled is isinstance(config.precision, BF16)
    assert parsed.float16_config.enabled is isinstance(config.precision, FP16)


@pytest.mark.parametrize("config", SAID["transformers"][:4], ids=lambda config: type(config.engine).__name__)
def test_the_trainers_own_class_takes_it(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # which the class sets, and monkeypatch takes back
    import ruamel.yaml

    file, _ = written(tmp_path, "transformers", config)
    data = ruamel.yaml.YAML(typ="safe").load(file.read_text())
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **data)
    assert args.gradient_accumulation_steps == (config.accumulation or 1)
    assert bool(args.fsdp) is not isinstance(config.engine, DDP)


@pytest.mark.parametrize(
    ("to", "config", "places"),
    [
        ("accelerate", Config(engine=FSDP2(), precision=BF16()), ["config.precision.reduce_dtype"]),
        ("accelerate", Config(optimizer=AdamW(), clip=ClipNorm(1.0)), ["config.optimizer", "config.clip"]),
        ("accelerate", Config(engine=FSDP2(wrap=WrapClasses(("A",), paths=("head",)))), ["config.engine.wrap.paths"]),
        ("accelerate", Config(engine=DDP(), global_batch=64), ["config.global_batch"]),
        ("deepspeed", Config(engine=DDP()), ["config.engine"]),
        ("transformers", Config(engine=DDP(static_graph=True), timeout_s=1.0, intent="inference"), ["config.intent"]),  # type: ignore[arg-type]
    ],
)
def test_what_a_file_cannot_say_is_named_and_nothing_is_written(
    tmp_path: Path, to: str, config: Config, places: list[str]
) -> None:
    with pytest.raises(PlanRejected) as caught:
        written(tmp_path, to, config)
    assert [finding.where for finding in caught.value.findings if finding.where in places] == places
    assert {finding.rule for finding in caught.value.findings} == {"export.not-expressible"}
    assert list(tmp_path.iterdir()) == []
    partial = export_config(config, to, partial=True)
    assert [finding.where for finding in partial.left_out] == [finding.where for finding in caught.value.findings]


@pytest.mark.parametrize("to", ["deepspeed", "accelerate"])
def test_a_deepspeed_file_of_a_config_that_does_not_clip_says_so(tmp_path: Path, to: str) -> None:
    """DeepSpeed would clip to 1.0 where nothing is said."""
    place, _ = written(tmp_path, to, Config(engine=DeepSpeed(stage=2), clip=None))
    file = place if to == "deepspeed" else tmp_path / "deepspeed.json"
    assert json.loads(file.read_text())["gradient_clipping"] == 0.0


def test_nothing_said_of_micro_batches_is_one_and_a_global_batch_is_named() -> None:
    assert (
        "gradient_accumulation_steps: 1\n" in export_config(Config(engine=DDP(), timeout_s=60.0), "transformers").text
    )
    with pytest.raises(PlanRejected, match=r"at config\.global_batch"):
        export_config(Config(engine=DDP(), global_batch=64), "accelerate")


def test_a_library_or_an_extension_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanRejected, match="Write one of accelerate, deepspeed, transformers"):
        export_config(Config(), "axolotl")
    with pytest.raises(PlanRejected, match=r"Name it with one of \.json"):
        export_config(Config(), "deepspeed", "ds.yaml")


def test_the_axis_that_takes_what_is_left_is_written_as_a_number(tmp_path: Path) -> None:
    """PC-2: accelerate works no size out."""
    config = Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=-1), precision=BF16(reduce_dtype="bfloat16"))
    file, _ = written(tmp_path, "accelerate", config)
    assert import_config(file).config.mesh == Mesh(replicate=2, shard=4)
    with pytest.raises(PlanRejected, match="accelerate takes 1 or more"):
        export_config(config, "accelerate", tmp_path / "unknown.yaml")
