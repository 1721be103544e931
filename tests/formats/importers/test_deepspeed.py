"""DeepSpeed's JSON: kept as it is, with precision, clipping and accumulation beside it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve

from prepkit import api
from prepkit.config import BF16, FP16, ClipNorm, Config, DeepSpeed
from prepkit.findings import PlanRejected
from prepkit.formats.exporters import export_config
from prepkit.formats.importers import import_config
from prepkit.resolve.deepspeed.data import data_of
from prepkit.resolve.deepspeed.working import working_config
from prepkit.testing.tiny import tiny_facts

TEXT = """\
{
  // what people write
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": 2, # floats and comments
  "gradient_clipping": 1.0,
\t"bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "reduce_bucket_size": 5e8, /* a float */
  },
}
"""


LOW = BF16(reduce_dtype="bfloat16")
"""What DeepSpeed does with bf16 where nothing else is said."""


def read(tmp_path: Path, text: str):
    (tmp_path / "ds.json").write_text(text)
    return import_config(str(tmp_path / "ds.json"))


def test_comments_trailing_commas_and_floats_are_read(tmp_path: Path) -> None:
    imported = read(tmp_path, TEXT)
    config = imported.config
    assert imported.kind == "deepspeed"
    assert (config.accumulation, config.clip, config.precision) == (2, ClipNorm(1.0), LOW)
    assert isinstance(config.engine, DeepSpeed)
    assert json.loads(config.engine.config)["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 5e8}


def test_each_setting_says_line_and_column(tmp_path: Path) -> None:
    places = {origin.key: (origin.line, origin.column) for origin in read(tmp_path, TEXT).config.origins}
    assert places["gradient_clipping"] == (5, 3)
    assert places["zero_optimization"] == (7, 3)


@pytest.mark.parametrize(
    ("section", "precision"),
    [
        ({"fp16": {"enabled": True}}, FP16(reduce_dtype="float16", growth_interval=1000)),  # DeepSpeed's own default
        (
            {"fp16": {"enabled": True, "loss_scale_window": 500, "initial_scale_power": 12}},
            FP16(reduce_dtype="float16", growth_interval=500, init_scale=4096.0),
        ),
        (
            {"fp16": {"enabled": True, "loss_scale_window": "auto"}},
            FP16(reduce_dtype="float16", growth_interval=1000),
        ),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, None),
        ({"bfloat16": {"enabled": True}}, LOW),
    ],
)
def test_the_section_that_is_on_says_the_precision(tmp_path: Path, section: dict, precision: object) -> None:
    assert read(tmp_path, json.dumps({"zero_optimization": {"stage": 1}} | section)).config.precision == precision


def test_the_loss_scale_of_the_file_stands_in_one_place(tmp_path: Path) -> None:
    section = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
    text = json.dumps({"zero_optimization": {"stage": 1}, "fp16": section})
    rules = [finding.rule for finding in api.check(read(tmp_path, text).config, tiny_facts(world=2))]
    assert "deepspeed.two-places" not in rules


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, (None, 64)),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"},
            (None, 64),
        ),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, (2, None)),
        ({"train_batch_size": 64}, (None, None)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, (None, None)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, (None, None)),
    ],
)
def test_a_global_batch_beside_a_micro_batch_gives_the_accumulation_of_any_number_of_ranks(
    tmp_path: Path, numbers: dict[str, object], wanted: tuple[int | None, int | None]
) -> None:
    """As DeepSpeed works it out; of the global batch alone it works out the micro batch."""
    config = read(tmp_path, json.dumps({"zero_optimization": {"stage": 1}, **numbers})).config
    assert (config.accumulation, config.global_batch) == wanted
    if wanted == (None, 64):
        assert api.build_plan(config, tiny_facts(world=2)).owners.accumulation_steps == 8
        assert [found.rule for found in api.check(config, tiny_facts(world=3))] == ["global-batch.unreachable"]


def test_what_is_auto_is_left_to_the_plan(tmp_path: Path) -> None:
    text = '{"zero_optimization": {"stage": 1}, "gradient_clipping": "auto", "gradient_accumulation_steps": "auto"}'
    config = read(tmp_path, text).config
    assert (config.clip, config.accumulation, config.global_batch) == (None, None, None)


@pytest.mark.parametrize(("said", "clip"), [("", ClipNorm(1.0)), (', "gradient_clipping": 0.0', None)])
def test_where_nothing_is_said_of_clipping_it_is_as_deepspeed_does_by_itself(
    tmp_path: Path, said: str, clip: ClipNorm | None
) -> None:
    from deepspeed.runtime.config import get_gradient_clipping

    data = json.loads(f'{{"zero_optimization": {{"stage": 1}}{said}}}')
    assert get_gradient_clipping(data) == (clip.max_norm if clip else 0.0)
    assert read(tmp_path, json.dumps(data)).config.clip == clip


def test_what_is_left_to_a_caller_that_is_not_here_is_said_once_to_be_off(tmp_path: Path) -> None:
    left = {"zero_optimization": {"stage": 1}, "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": 1}
    left |= {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}

    def said(config: Config) -> list[str]:
        found = api.check(config, tiny_facts(world=2))
        return [finding.what for finding in found if finding.rule == "deepspeed.turned-off"]

    config = read(tmp_path, json.dumps(left)).config
    (told,) = said(config)
    assert "`bf16.enabled` and `fp16.enabled`" in told
    assert "computed in float32" in told
    assert "not clipped" in told
    assert said(evolve(config, precision=BF16(reduce_dtype="float32"), clip=ClipNorm(1.0))) == []
    off = left | {"gradient_clipping": 0.0, "fp16": {"enabled": False}, "bf16": {"enabled": False}}
    assert said(read(tmp_path, json.dumps(off)).config) == []


def test_findings_of_rules_name_the_key_and_its_line(tmp_path: Path) -> None:

    text = '{\n "zero_optimization": {"stage": 9},\n "gradient_cliping": 1.0\n}'
    findings = {finding.rule: finding for finding in api.check(read(tmp_path, text).config, tiny_facts(world=2))}
    finding = findings["deepspeed.unknown-key"]
    assert finding.origin == f"gradient_cliping in {tmp_path}/ds.json:3:2"
    assert finding.origin in str(finding)
    assert findings["deepspeed.stage"].origin == f"{tmp_path}/ds.json", "its text quotes no key: the file it is"


def test_both_precisions_are_refused_and_the_rest_is_read_all_the_same(tmp_path: Path) -> None:
    text = '{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "zero_optimization": {"stage": 3}}'
    with pytest.raises(PlanRejected) as refused:
        read(tmp_path, text)
    (finding,) = (one for one in refused.value.findings if one.rule == "import.contradiction")
    assert "fp16.enabled" in finding.where
    assert "bf16 and fp16 are both enabled" in finding.what
    assert refused.value.rest.config.precision == LOW


def test_a_file_with_no_key_of_deepspeed_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"no_such": 1}')
    with pytest.raises(PlanRejected, match="it has none of train_batch_size"):
        import_config(str(tmp_path / "x.json"), "deepspeed")


def test_checkpoints_on_the_cpu_are_said_to_be_for_models_that_make_them_by_themselves(tmp_path: Path) -> None:
    text = '{"bf16": {"enabled": true}, "activation_checkpointing": {"cpu_checkpointing": true}}'
    on, off = text, text.replace('cpu_checkpointing": true', 'cpu_checkpointing": false')
    (note,) = read(tmp_path, on).notes
    assert note.fix.startswith("Write checkpointing=CheckpointBlocks(offload=True)")
    assert read(tmp_path, off).notes == ()
    assert "cpu_checkpointing" in read(tmp_path, on).config.engine.config


def test_what_is_shown_of_a_key_is_its_own_value_and_not_the_whole_file_again(tmp_path: Path) -> None:
    lines = {line.split()[0]: line for line in str(read(tmp_path, TEXT)).splitlines()[1:]}
    assert '  {"stage": 2, "reduce_bucket_size": 500000000.0}  from' in lines["config.engine.config.zero_optimization"]
    assert '  "auto"  from' in lines["config.engine.config.train_micro_batch_size_per_gpu"]


def own_dtypes(data: dict) -> tuple[object, ...]:
    """The dtypes in which DeepSpeed's own engine computes, adds up and reduces with this JSON."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = DeepSpeedConfig({key: value for key, value in data.items() if "batch" not in key} | {"train_batch_size": 1})
    low, half = own.bfloat16_config, own.float16_config
    engine = SimpleNamespace(_config=own, fp16_enabled=lambda: half.enabled, bfloat16_enabled=lambda: low.enabled)
    masters = (low.bf16_master_weights_and_grads, half.fp16_master_weights_and_grads)
    return *DeepSpeedEngine.get_data_types(engine), DeepSpeedEngine.communication_data_type.fget(engine), masters


FILES = {
    "deepspeed": "",
    "accelerate": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n",
    "transformers": "output_dir: out\n{0}: true\nper_device_train_batch_size: 1\ndeepspeed: ds.json\n",
    "axolotl": "base_model: m\n{0}: true\nmicro_batch_size: 1\ndeepspeed: ds.json\n",
}
"""Kinds of files to one that names DeepSpeed's JSON; ``{0}`` is the precision."""


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_plan_of_a_json_reduces_and_adds_up_in_the_dtypes_that_deepspeed_takes_from_it(
    tmp_path: Path, kind: str, stage: int, low: str
) -> None:
    """Be they said or not, also through the files that name it; what is exported of it says the same again."""
    (tmp_path / "run.yaml").write_text(FILES[kind].format(low))
    for sent, summed in product((None, "fp32", low), (None, "fp32", low) if stage else (None,)):
        section = {"enabled": True} | ({f"{low}_master_weights_and_grads": True} if summed == low else {})
        data: dict = {"zero_optimization": {"stage": stage}, low: section, "train_micro_batch_size_per_gpu": 1}
        data |= {"communication_data_type": sent} if sent else {}
        data |= {"data_types": {"grad_accum_dtype": summed}} if summed else {}
        (tmp_path / "ds.json").write_text(json.dumps(data))
        config = import_config(tmp_path / ("ds.json" if kind == "deepspeed" else "run.yaml"), kind).config
        settings = working_config(config, tiny_facts(world=2))
        assert [flaw for flaw in settings.flaws if flaw.rule == "deepspeed.two-places"] == []
        assert own_dtypes(data_of(settings.settings)) == own_dtypes(data), (sent, summed)
        again = export_config(evolve(config, origins=()), "deepspeed", partial=True)
        assert own_dtypes(json.loads(again.text)) == own_dtypes(data), (sent, summed)


@pytest.mark.parametrize("to", ["deepspeed", "accelerate", "transformers"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_exported_has_deepspeed_reduce_and_add_up_as_the_plan_does(
    tmp_path: Path, to: str, stage: int, dtype: str
) -> None:
    precision = BF16(reduce_dtype=dtype)  # type: ignore[arg-type]
    config = Config(engine=DeepSpeed(stage=stage), precision=precision, clip=ClipNorm(1.0))  # type: ignore[arg-type]
    own = own_dtypes(data_of(working_config(config, tiny_facts(world=2)).settings))
    file = tmp_path / ("x.json" if to == "deepspeed" else "x.yaml")
    made = export_config(config, to, file, partial=True)
    assert not [finding for finding in made.left_out if "precision" in finding.where]
    read_back = import_config(file, to).config
    assert own_dtypes(data_of(working_config(read_back, tiny_facts(world=2)).settings)) == own
    said = {"deepspeed": file, "accelerate": tmp_path / "deepspeed.json"}.get(to)
    if said is not None and said.exists():
        assert own_dtypes(json.loads(said.read_text())) == own
