"""A folder's ``config.json`` gives the facts, and so the plan, of the model that transformers makes of it on meta."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prepkit import codec
from prepkit.api import build_plan
from prepkit.config import FSDP2, AdamW, Config
from prepkit.facts import Env, Facts
from prepkit.formats.models import folder
from prepkit.observe import observe

DATA = Path(folder.__file__).parent / "data"

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
"""As the hub has it, with the keys of older versions."""


def put(place: Path, config: Any, **tensors: torch.Tensor) -> Path:
    (place / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if tensors:
        save_file(tensors, place / "model.safetensors")
    return place


DRAWN = ("llama", "qwen2", "gpt2", "bert", "t5", "mixtral", "deepseek_v3", "vit")


@pytest.mark.parametrize("kind", DRAWN)
def test_facts_and_plan_are_those_of_the_model_on_meta_at_drawn_sizes(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers import AutoConfig

    from tests.tools.model_tables.draws import Drawer

    name = next(iter(json.loads((DATA / f"{kind}.json").read_text())["models"]))
    cls = getattr(transformers, name)
    drawer = Drawer(transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind], cls, seed=7)
    env = Env.declare(world_size=8)
    for _ in range(2):
        raw = {**drawer.probe().raw, "model_type": kind, "architectures": [name]}
        put(tmp_path, raw)
        with torch.device("meta"):
            model = cls._from_config(AutoConfig.from_pretrained(tmp_path))
        mine = Facts(model=folder.read(tmp_path).model, env=env)
        live = observe(model, env=env).facts
        assert mine.model == live.model
        cfg = Config(engine=FSDP2(), optimizer=AdamW(lr=1e-3))
        plans = [build_plan(cfg, one) for one in (mine, live)]
        assert codec.digest(plans[0]) == codec.digest(plans[1])


def test_llama_3_8b_has_as_many_parameters_as_it_is_known_for(tmp_path: Path) -> None:
    seen = folder.read(put(tmp_path, LLAMA_8B))
    assert sum(param.numel for param in seen.model.params) == 8_030_261_248
    assert {param.dtype for param in seen.model.params} == {"bfloat16"}
    assert seen.model.architecture.kv_heads == 8
    assert folder.read(tmp_path / "config.json") == seen


def test_at_least_a_hundred_types_have_tables_that_are_small() -> None:
    files = [file for file in DATA.glob("*.json") if file.stem != "common"]
    assert len(files) >= 100
    assert sum(file.stat().st_size for file in files) < 1_500_000


def test_a_type_without_a_table_is_known_by_its_headers(tmp_path: Path) -> None:
    tensors = {f"net.blocks.{i}.up.weight": torch.zeros(4, 2) for i in (0, 1, 10, 2)}
    seen = folder.read(put(tmp_path, {"model_type": "strange", "architectures": ["Strange"]}, **tensors))
    assert [param.name.split(".")[2] for param in seen.model.params] == ["0", "1", "2", "10"]
    assert [seen.model.classes[module.cls].name for module in seen.model.modules][:4] == [
        *("model", "net", "ModuleList", "net.blocks.*")
    ]
    assert "classes of modules, ties and buffers are not known" in seen.words[0]


def test_headers_of_another_model_than_the_config_are_told(tmp_path: Path) -> None:
    seen = folder.read(put(tmp_path, LLAMA_8B, **{"model.norm.weight": torch.zeros(64)}))
    assert seen.words == (
        "model.norm.weight is (64,) in the file, and (4096,) by config.json: they belong to two models",
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no JSON object"),
        ("{}", "config.json has no model_type, and there are no headers"),
        ({"model_type": "../../../etc/passwd"}, "no table says what a model"),
        ({"model_type": "strange"}, "fetch model.safetensors, or give --model PKG.MOD:FACTORY"),
        ({"model_type": "llama"}, '"architectures": [...] with one of LlamaForCausalLM'),
        (LLAMA_8B | {"num_hidden_layers": 10**9}, "a number of modules is needed"),
        (LLAMA_8B | {"num_hidden_layers": -1}, "a number of modules is needed"),
        (LLAMA_8B | {"num_hidden_layers": 99_999}, "more than 100,000 modules"),
        (LLAMA_8B | {"hidden_size": 10**400}, "hidden_size is"),
        (LLAMA_8B | {"hidden_size": "4096"}, "hidden_size is '4096'"),
        (LLAMA_8B | {"num_attention_heads": 0}, "divided by 0"),
        (LLAMA_8B | {"hidden_act": "__import__('os')"}, "hidden_act is"),
        (LLAMA_8B | {"torch_dtype": "int4"}, "dtype is 'int4'"),
        (LLAMA_8B | {"quantization_config": {"bits": 4}}, "quantization_config changes the modules"),
    ],
)
def test_a_config_that_says_too_little_or_too_much_is_refused_at_once(tmp_path: Path, config: Any, said: str) -> None:
    with pytest.raises(folder.NotKnown) as refused:
        folder.read(put(tmp_path, config))
    assert said in str(refused.value)
    assert len(str(refused.value)) < 1500


def test_a_header_of_a_hundred_gigabytes_costs_nothing(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [5 * 10**5, 5 * 10**4], "data_offsets": [0, 10**11]}
    header = json.dumps({"net.weight": entry}).encode()
    put(tmp_path, {"model_type": "strange"})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    seen = folder.read(tmp_path)
    (param,) = seen.model.params
    assert param.shape == (500_000, 50_000)
    assert seen.words[1].startswith("model.safetensors truncated: it has ")
    (tmp_path / "model.safetensors").write_bytes((10**11).to_bytes(8, "little") + header)
    with pytest.raises(folder.NotKnown, match="a header of 100,000,000,000 bytes"):
        folder.read(tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it has 0 bytes"),
        ((90).to_bytes(8, "little") + b'{"net.weight":', "it ends after 22 bytes"),
        ((95_000_000).to_bytes(8, "little") + b" ", "its header has 95,000,000 bytes"),
        ((400_007).to_bytes(8, "little") + b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", ""),
    ],
    ids=["empty", "torn", "huge", "deep"],
)
def test_a_header_that_is_torn_huge_or_deep_costs_milliseconds(tmp_path: Path, data: bytes, said: str) -> None:
    put(tmp_path, {"model_type": "strange"})
    (tmp_path / "model.safetensors").write_bytes(data)
    begun = time.process_time()
    with pytest.raises(folder.NotKnown, match=f"there are no headers .*{said}"):
        folder.read(tmp_path)
    assert time.process_time() - begun < 0.1


def test_a_name_of_hundreds_of_parts_is_refused(tmp_path: Path) -> None:
    put(tmp_path, {"model_type": "strange"}, **{"a." * 450 + "weight": torch.zeros(1)})
    with pytest.raises(folder.NotKnown, match="is no name of a parameter"):
        folder.read(tmp_path)


def test_a_link_out_of_the_folder_is_not_followed_but_one_into_the_hubs_blobs_is(tmp_path: Path) -> None:
    blobs, here = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    here.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    put(here, {"model_type": "strange"})
    save_file({"net.weight": torch.zeros(2)}, blobs / "123")
    (here / "model.safetensors").symlink_to("../../blobs/123")
    assert len(folder.read(here).model.params) == 1
    (here / "model.safetensors").unlink()
    (blobs / "123").rename(elsewhere)
    (here / "model.safetensors").symlink_to(elsewhere)
    with pytest.raises(folder.NotKnown, match="is a link out of its folder"):
        folder.read(here)
    (here / "config.json").rename(tmp_path / "config")
    (here / "config.json").symlink_to(tmp_path / "config")
    with pytest.raises(folder.NotKnown, match="is a link out of its folder"):
        folder.read(here)


def test_a_field_that_no_table_was_tried_with_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = json.loads((DATA / "llama.json").read_text())
    table["models"]["LlamaForCausalLM"]["fixed"] = {"pooling": "mean"}
    monkeypatch.setattr(folder, "_table", lambda kind: table)
    folder.read(put(tmp_path, LLAMA_8B | {"pooling": "mean"}))
    with pytest.raises(folder.NotKnown, match="pooling is 'max'"):
        folder.read(put(tmp_path, LLAMA_8B | {"pooling": "max"}))


IMPOSSIBLE = [
    ({"num_attention_heads": 30}, "num_attention_heads", "which does not divide hidden_size, 4096"),
    ({"num_key_value_heads": 5}, "num_key_value_heads", "which does not divide num_attention_heads, 32"),
    ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 5}, "n_head", "n_embd, 64"),
    (
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "num_attention_heads": 5},
        "num_attention_heads",
        "n_embd, 64",
    ),
    (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 5},
        "num_key_value_heads",
        "",
    ),
]


@pytest.mark.parametrize(("change", "key", "what"), IMPOSSIBLE)
def test_sizes_that_make_no_model_are_told_where_they_stand(
    tmp_path: Path, change: dict[str, Any], key: str, what: str
) -> None:
    config = LLAMA_8B | change
    lines = json.dumps({name: value for name, value in config.items() if name not in ("rope_scaling",)}, indent=2)
    put(tmp_path, lines)
    with pytest.raises(folder.Impossible) as told:
        folder.read(tmp_path)
    line = 1 + next(at for at, text in enumerate(lines.splitlines()) if f'"{key}"' in text)
    assert told.value.where.startswith(f"{tmp_path / 'config.json'}:{line}:")
    assert told.value.where.endswith(f" {key}")
    assert what in told.value.what


def test_heads_with_a_size_of_their_own_need_not_divide_the_width(tmp_path: Path) -> None:
    folder.read(put(tmp_path, qwen := LLAMA_8B | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    folder.read(put(tmp_path, qwen | {"num_attention_heads": 24, "head_dim": 128}))


def test_what_tables_need_is_what_transformers_needs() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.tools.model_tables.needs import needs

    for kind in ("llama", "gpt2", "qwen3", "t5"):
        name, model = next(iter(json.loads((DATA / f"{kind}.json").read_text())["models"].items()))
        config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
        assert needs(config_class, getattr(transformers, name)) == model["needs"], kind


def test_a_hostile_size_is_told_soon(tmp_path: Path) -> None:
    put(tmp_path, LLAMA_8B | {"hidden_size": 2**47, "num_attention_heads": 2**46 - 1})
    begun = time.monotonic()
    with pytest.raises(folder.Impossible):
        folder.read(tmp_path)
    assert time.monotonic() - begun < 5
