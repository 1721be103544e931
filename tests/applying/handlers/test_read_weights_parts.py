"""Files of transformers 5 that hold a tensor in parts or under another name load like any other."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch import nn

import prepkit as pk
from prepkit.applying.handlers import read_weights
from prepkit.observe import observe
from prepkit.resolve.checkpoint import requested_checkpoint
from prepkit.steps import ReadTensors
from tests.support.gang import Gang
from tests.support.meta_models import ON_TWO, close, on_meta, saved, saved_as_held, trained, whole
from tests.support.transformers_models import build

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("transformers.conversion_mapping") is None,
    reason="transformers 5 writes such files",
)

EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
STORED = "model.layers.1.block_sparse_moe.experts"


def merged(path: str, change: Any = None, into: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """All tensors of the files at ``path``, which become a single file of what ``change`` makes of them."""
    held = {key: value for file in Path(path).glob("*.safetensors") for key, value in load_file(file).items()}
    for file in Path(path).glob("*.safetensors*"):
        file.unlink()
    held = change(held) if change else held
    save_file(held, Path(path) / into)
    return held


# --- the same training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ON_TWO[1:])
def test_experts_in_parts_train_as_the_full_model_checkpointed_and_compiled(
    gang2: Gang, tmp_path: Path, case: str
) -> None:
    path = saved(tmp_path, "mixtral")
    assert "block_sparse_moe.experts.2.w3" in (tmp_path / "model.safetensors.index.json").read_text()
    close(gang2.run(trained, "mixtral", [(path, case)], timeout=180), 1, 2e-6)


def test_experts_in_parts_become_copies_of_shards(gang4: Gang, tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral")
    cases = [(path, "replicas of shards"), (path, "replicas of compiled shards")]
    close(gang4.run(trained, "mixtral", cases, timeout=180), 2, 1e-5)


def test_a_file_with_the_models_own_keys_stays_as_it_is(gang2: Gang, tmp_path: Path) -> None:
    path = saved_as_held(tmp_path, "mixtral")
    checkpoint = observe(on_meta("mixtral")[0], checkpoint=path).facts.checkpoint
    assert checkpoint is not None
    assert not checkpoint.recipes
    assert {one.place for one in checkpoint.tensors} == {None}
    close(gang2.run(trained, "mixtral", [(path, "shards")]), 1, 1e-6)


def cast(rank: int, world: int, path: str, family: str, staging: int) -> list[str]:
    """Parameters that are not the file's values, where no more than ``staging`` bytes pass through at a time."""
    del rank, world
    model, _ = on_meta(family)
    plan = pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=pk.LoadWeights(path)), model)
    real, read_weights.STAGING = read_weights.STAGING, staging
    try:
        ready = pk.apply(plan)
    finally:
        read_weights.STAGING = real
    full = dict(build(family)[0].named_parameters())
    return [n for n, p in ready.model.named_parameters() if not torch.equal(whole(p), full[n].bfloat16().float())]


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_parts_are_cast_on_the_way_in_pieces(gang2: Gang, tmp_path: Path, family: str) -> None:
    path = saved(tmp_path, family, torch.bfloat16)
    assert gang2.run(cast, path, family, 22) == [[], []]


# --- the places ----------------------------------------------------------------------------------------------------


def test_the_plan_says_what_lies_where_and_survives_its_file(tmp_path: Path) -> None:
    model, batch = on_meta("mixtral")
    plan = pk.build_plan(pk.Config(weights=pk.LoadWeights(saved(tmp_path, "mixtral"))), model)
    (step,) = (one.step for one in plan.steps if isinstance(one.step, ReadTensors))
    parts = {one.key: one.chunk for one in step.sources if one.name == EXPERTS}
    assert len(parts) == 6
    third = parts[f"{STORED}.2.w3.weight"]
    assert third is not None
    assert (third.offsets, third.sizes) == ((2, 40, 0), (1, 40, 32))
    assert "4 of them from 18 parts, from 7 files" in str(plan)
    pk.save(plan, str(tmp_path / "plan.json"))
    loaded = pk.load(str(tmp_path / "plan.json"))
    assert loaded == plan
    full, _ = build("mixtral")
    assert torch.equal(pk.apply(loaded, model=model).model(**batch).loss, full(**batch).loss)


def test_looking_at_a_model_changes_neither_it_nor_the_library(tmp_path: Path) -> None:
    from transformers.conversion_mapping import get_model_conversion_mapping

    path = saved(tmp_path, "mixtral")
    model, _ = on_meta("mixtral")
    before = dict(vars(model))
    first, second = (observe(model, checkpoint=path).facts.checkpoint for _ in range(2))
    assert first == second
    assert dict(vars(model)) == before
    assert not any(one.was_used() for one in get_model_conversion_mapping(model))


def test_ten_experts_are_stacked_by_number_and_not_by_spelling(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 16}
    config = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=11)
    full = MixtralForCausalLM(config)
    full.save_pretrained(str(tmp_path))
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    ready = pk.apply(pk.build_plan(pk.Config(weights=pk.LoadWeights(str(tmp_path))), model))
    assert all(torch.equal(p, full.get_parameter(name)) for name, p in ready.model.named_parameters())


SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 96, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2}
SIZES |= {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "num_local_experts": 3}
SIZES |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SIZES |= {"first_k_dense_replace": 1, "image_size": 8, "patch_size": 4}


@pytest.mark.parametrize(
    ("name", "recipes"),
    [
        ("Qwen2MoeForCausalLM", {(0, 1), (0, None)}),
        ("DeepseekV3ForCausalLM", {(0, 1), (0, None)}),
        ("JambaForCausalLM", {(0, 1), (0, None)}),
        ("MiniMaxForCausalLM", {(0, 1), (0, None)}),
        ("OlmoHybridForCausalLM", {(None, 0)}),
        ("GraniteMoeForCausalLM", set()),
        ("Dinov2ForImageClassification", set()),
        ("BeitForImageClassification", set()),
    ],
)
def test_what_a_family_saves_is_what_is_read(
    tmp_path: Path, name: str, recipes: set[tuple[int | None, int | None]]
) -> None:
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**SIZES)
    full = kind(config)
    full.save_pretrained(str(tmp_path), max_shard_size="50KB")
    with torch.device("meta"):
        model = kind(config)
    plan = pk.build_plan(pk.Config(weights=pk.LoadWeights(str(tmp_path)), intent=pk.Intent.INFERENCE), model)
    checkpoint = plan.facts.checkpoint
    assert checkpoint is not None
    assert any(one.place for one in checkpoint.tensors)
    assert {(one.stack, one.join) for one in checkpoint.recipes} == recipes
    there = pk.apply(plan).model.state_dict()
    assert list(there) == list(full.state_dict())
    assert all(torch.equal(there[key], value) for key, value in full.state_dict().items())


def test_the_renaming_that_is_asked_for_comes_before_the_librarys(tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral")
    merged(path, lambda held: {f"policy.{key}": value for key, value in held.items()})
    model, batch = on_meta("mixtral")
    full, _ = build("mixtral")
    how = pk.LoadWeights(path, rename=((r"^policy\.", ""),))
    ready = pk.apply(pk.build_plan(pk.Config(weights=how), model))
    assert torch.equal(ready.model(**batch).loss, full(**batch).loss)


def test_the_renaming_that_is_asked_for_wins_over_the_librarys(tmp_path: Path) -> None:
    """It exchanges the queries of two layers, and the library renames the rest."""
    path = saved(tmp_path, "vit")
    model, _ = on_meta("vit")
    first, second = (f"vit.layers.{layer}.attention.q_proj.weight" for layer in (0, 1))
    stored = "vit.encoder.layer.{}.attention.attention.query.weight"
    rename = tuple((f"^{stored.format(layer)}$".replace(".", "[.]"), name) for layer, name in ((0, second), (1, first)))
    ready = pk.apply(pk.build_plan(pk.Config(weights=pk.LoadWeights(path, rename=rename)), model))
    full = dict(build("vit")[0].named_parameters())
    there = dict(ready.model.named_parameters())
    assert torch.equal(there[first], full[second])
    assert torch.equal(there[second], full[first])
    assert torch.equal(there[first.replace("q_", "k_")], full[first.replace("q_", "k_")])


@pytest.fixture
def exchanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose files call up what the model calls gate, and gate what it calls up."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    pairs = [("mlp.up_proj", "mlp.held"), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.held", "mlp.gate_proj")]

    def mapping(model: nn.Module, add_legacy: bool = True) -> list[Any]:
        return [WeightRenaming(*pair) for pair in pairs] if add_legacy else []  # none while it saves

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)


def gates_exchanged(how: pk.LoadWeights) -> bool:
    """Whether the gate has the values that the file has under up; an error where it has neither's."""
    model, _ = on_meta("llama")
    cfg = pk.Config(weights=how, overrides=("weights.unexpected-keys",))
    there = pk.apply(pk.build_plan(cfg, model)).model.model.layers[1].mlp
    full = build("llama")[0].model.layers[1].mlp
    exchanged = torch.equal(there.gate_proj.weight, full.up_proj.weight)
    assert exchanged or torch.equal(there.gate_proj.weight, full.gate_proj.weight)
    return exchanged


@pytest.mark.usefixtures("exchanging")
def test_a_checkpoint_of_names_of_the_model_alone_is_read_under_them(tmp_path: Path) -> None:
    path = saved(tmp_path)
    held = merged(path)
    assert not gates_exchanged(pk.LoadWeights(path))
    save_file(held | {"more": torch.ones(1)}, tmp_path / "model.safetensors")
    assert gates_exchanged(pk.LoadWeights(path)), "as from_pretrained reads it"


@pytest.mark.usefixtures("exchanging")
def test_names_of_the_model_that_the_renaming_gives_stay(tmp_path: Path) -> None:
    path = saved(tmp_path)
    merged(path, lambda held: {f"policy.{key}": value for key, value in held.items()} | {"more": torch.ones(1)})
    assert not gates_exchanged(pk.LoadWeights(path, rename=(("^policy[.]", ""),)))


def test_places_hold_for_the_renaming_that_they_were_found_after(tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral")
    model, _ = on_meta("mixtral")
    first = f"{STORED}.0.w1.weight"
    how = pk.LoadWeights(path, rename=((f"^{first}$".replace(".", "[.]"), "elsewhere"),))
    plain, after = (observe(model, checkpoint=one).facts for one in (path, how))
    names = {one.key for one in plain.checkpoint.tensors if one.place}  # type: ignore[union-attr]
    assert first in names

    def placed(facts: pk.Facts, asked_for: pk.LoadWeights) -> set[str]:
        checkpoint = requested_checkpoint(pk.Config(weights=asked_for), facts)
        assert checkpoint is not None
        return {one.key for one in checkpoint.tensors if one.place}

    assert placed(plain, pk.LoadWeights(path)) == names
    assert placed(plain, how) == names - {first}
    assert placed(after, how) == names - {first}
    assert placed(after, pk.LoadWeights(path)) == set(), "the places were found after another renaming"


def test_files_of_the_base_model_fill_the_model_with_a_head(tmp_path: Path) -> None:
    full, _ = build("llama")
    full.model.save_pretrained(str(tmp_path))
    model, _ = on_meta("llama")
    cfg = pk.Config(weights=pk.LoadWeights(str(tmp_path)), overrides=("weights.missing-keys",))
    ready = pk.apply(pk.build_plan(cfg, model))
    assert torch.equal(ready.model.model.layers[2].mlp.up_proj.weight, full.model.layers[2].mlp.up_proj.weight)


def test_models_of_other_libraries_are_left_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_file({"weight": torch.ones(2, 2), "LayerNorm.gamma": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = observe(model, checkpoint=str(tmp_path)).facts.checkpoint
    assert checkpoint is not None
    assert {one.place for one in checkpoint.tensors} == {None}


def test_without_the_librarys_mapping_nothing_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with transformers 4."""
    path = saved(tmp_path, "mixtral")
    monkeypatch.setattr("prepkit.observe.find_spec", lambda name: None)
    assert "`model.layers.0.mlp.experts.gate_up_proj`" in findings(path)["weights.missing-keys"]


# --- findings at plan time -----------------------------------------------------------------------------------------


def findings(path: str, model: nn.Module | None = None) -> dict[str, str]:
    """Of each rule that refuses, what it says first."""
    found = pk.check(pk.Config(weights=pk.LoadWeights(path)), model or on_meta("mixtral")[0])
    return {one.rule: one.what for one in reversed(found) if one.severity == "error"}


def without(*keys: str) -> Any:
    return lambda held: {key: value for key, value in held.items() if key not in keys}


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral")
    merged(path, without(f"{STORED}.1.w3.weight"))
    (said,) = findings(path).items()
    assert said == (
        "weights.parts",
        f"5 tensors of the checkpoint do not make it up: the checkpoint lacks `{STORED}.1.w3.weight`.",
    )
    merged(path, without(*(f"{STORED}.1.w{part}.weight" for part in (1, 2, 3))))
    model, _ = on_meta("mixtral")
    found = [one for one in pk.check(pk.Config(weights=pk.LoadWeights(path)), model) if one.rule == "weights.parts"]
    assert [one.where for one in found] == [f"model.{EXPERTS}", f"model.{EXPERTS.replace('gate_up', 'down')}"]
    assert found[0].what.endswith(f"the checkpoint lacks `{STORED}.1.w1.weight`, `{STORED}.1.w3.weight`.")
    assert found[1].what == (
        "2 tensors of the checkpoint do not make it up: they are [2, 32, 40] in all, the model's is [3, 32, 40]; "
        f"the checkpoint lacks `{STORED}.1.w2.weight`."
    )


def test_parts_of_another_kind_that_are_all_missing_are_told_by_their_pattern(tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral")
    merged(path, without(*(f"{STORED}.{expert}.w3.weight" for expert in range(3))))
    assert findings(path)["weights.parts"] == (
        "3 tensors of the checkpoint do not make it up: they are [3, 40, 32] in all, the model's is [3, 80, 32]; "
        "it has nothing like `.experts.*.w3.weight`."
    )


def test_parts_of_different_dtypes_and_shapes_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral")
    key = f"{STORED}.1.w2.weight"
    held = merged(path, lambda held: held | {key: held[key].bfloat16()})
    assert "experts.0.w2.weight` is float32" in findings(path)["weights.parts"]
    assert f"`{key}` is bfloat16" in findings(path)["weights.parts"]
    save_file(held | {key: torch.zeros(32, 41)}, Path(path) / "model.safetensors")
    assert f"`{key}` is [32, 41]" in findings(path)["weights.parts"]


@pytest.mark.parametrize("experts", [2, 4])
def test_a_model_with_another_number_of_experts_is_refused(tmp_path: Path, experts: int) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    path = saved(tmp_path, "mixtral")
    asked = on_meta("mixtral")[0].config.to_dict() | {"num_local_experts": experts}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**asked))
    found = findings(path, model)
    assert f"they are [3, 80, 32] in all, the model's is [{experts}, 80, 32]" in found["weights.parts"]
    assert ("lacks `model.layers.0.block_sparse_moe.experts.3.w1.weight`" in found["weights.parts"]) == (experts == 4)
    assert "weights.shape" in found, "the router"


def test_files_that_are_cut_or_gone_are_findings(tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    file = tmp_path / index[f"{STORED}.1.w1.weight"]
    data = file.read_bytes()
    file.write_bytes(data[:-8])
    found = findings(path)
    assert list(found) == ["weights.unreadable"]
    assert "truncated: it has" in found["weights.unreadable"]
    file.unlink()
    assert "cannot be read: No such file" in findings(path)["weights.unreadable"]


def test_a_tensor_that_is_there_whole_and_in_parts_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "mixtral")
    merged(path, lambda held: held | {EXPERTS: torch.zeros(3, 80, 32)})
    said = findings(path)["weights.rename"]
    assert said.startswith(f"Several tensors of the checkpoint are renamed to `{EXPERTS}`, by the model's library: ")


def test_what_is_cut_up_as_it_is_loaded_is_refused_with_the_operation_and_the_ways_that_work(tmp_path: Path) -> None:
    """Its files hold two layers' weights in one, which the library takes apart by ``Chunk``."""
    from transformers import Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = Dinov2Config(**sizes, use_swiglu_ffn=True)
    Dinov2Model(config).save_pretrained(str(tmp_path))
    with torch.device("meta"):
        model = Dinov2Model(config)
    found = pk.check(pk.Config(weights=pk.LoadWeights(str(tmp_path))), model)
    (one,) = (one for one in found if one.rule == "weights.missing-keys")
    assert "converts `encoder.layer.0.mlp.weights_in.bias` and 1 more tensor by Chunk(dim=0)" in one.what
    assert "weights=BroadcastWeights()" in one.fix
    assert "the model's own keys" in one.fix


def test_a_tensor_of_which_a_part_is_not_read_has_no_values(tmp_path: Path) -> None:
    model, _ = on_meta("mixtral")
    plan = pk.build_plan(pk.Config(weights=pk.LoadWeights(saved(tmp_path, "mixtral"))), model)
    (index,) = (index for index, one in enumerate(plan.steps) if isinstance(one.step, ReadTensors))
    read = plan.steps[index].step
    left = tuple(one for one in read.sources if one.key != f"{STORED}.2.w1.weight")
    less = evolve(plan.steps[index], step=evolve(read, sources=left))
    steps = (*plan.steps[:index], less, *plan.steps[index + 1 :])
    with pytest.raises(pk.errors.NotAsPlanned, match=rf"everything that was on meta has values: {EXPERTS}"):
        pk.apply(evolve(plan, steps=steps))
