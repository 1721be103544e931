"""What is refused at the edges of what a file may hold, and what a message then shows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import pytest
from attrs import evolve

from prepkit import codec
from prepkit.codec import field_types, inconsistencies
from prepkit.codec.diff import _anchors
from prepkit.codec.files import FORMAT, KIND, attestation_from_text
from prepkit.codec.languages import Language, assigned, typed
from prepkit.codec.misfits import MisfitError, meant, samples, wrong_type
from prepkit.codec.text import shown
from prepkit.config import (
    DDP,
    FSDP1,
    FSDP2,
    AdamW,
    CompressHook,
    Config,
    DeepSpeed,
    LoadWeights,
    Mesh,
    Wrap,
    WrapRoot,
)
from prepkit.findings import PlanRejected
from prepkit.findings.keywords import OTHER_NAMES
from prepkit.findings.text import near
from prepkit.plan import Plan, because
from prepkit.plan.layout import Placement
from prepkit.steps import Axis, InitializeDeepSpeed, WrapDDP
from prepkit.steps.engines import Setting
from prepkit.testing import tiny_facts, tiny_loader
from prepkit.testing.tiny import PATH
from tests.support.golden import assert_golden
from tests.support.neighbours import neighbours
from tests.support.plans import make
from tests.support.readable_plans import Settings, asked
from tests.support.sample_plan import sample_plan

GOLDEN = Path(__file__).parent / "golden"


def test_keys_that_an_attestation_does_not_have_are_told_in_their_order() -> None:
    names = [f"key{number}" for number in range(8)]
    text = json.dumps({"kind": KIND, "format": FORMAT} | dict.fromkeys(reversed(names)))
    with pytest.raises(PlanRejected) as caught:
        attestation_from_text(text)
    assert [found.where for found in caught.value.findings] == [
        f"$.{name}" for name in ("attestation", "digest", *names)
    ]


# --- plans whose parts do not fit ----------------------------------------------------------------------------------


def wrong(plan: Plan) -> list[tuple[str, str]]:
    return [(found.where, found.what) for found in inconsistencies(plan, "$")]


def with_shape(size: int) -> Plan:
    plan = sample_plan()
    first, *rest = plan.facts.model.params
    params = (evolve(first, shape=(size,)), *rest)
    return evolve(plan, facts=evolve(plan.facts, model=evolve(plan.facts.model, params=params)))


def test_places_of_what_does_not_fit_are_those_in_the_file() -> None:
    plan = sample_plan()
    bare = evolve(plan.facts, model=evolve(plan.facts.model, modules=plan.facts.model.modules[1:]))
    assert wrong(evolve(plan, facts=bare))[0][0] == "$.facts.model.modules"
    assert wrong(with_shape(2**62)) == [("$.facts.model.params[0].shape", f"({2**62},) is no shape")]
    assert wrong(with_shape(2**62 - 1)) == wrong(plan) == []


@pytest.mark.parametrize(("size", "fits"), [(None, True), (1, True), (0, False)])
def test_a_loader_has_batches_of_its_own_or_of_at_least_one_sample(size: int | None, fits: bool) -> None:
    plan = sample_plan()
    found = wrong(evolve(plan, facts=evolve(plan.facts, loaders=(tiny_loader(batch_size=size),))))
    assert found == ([] if fits else [("$.facts.loaders[0].batch_size", "batches of 0 samples")])


CASES: tuple[tuple[str, str, Settings], ...] = (
    ("single", "scheduler and two loaders", ()),
    ("ddp", "", (("engine.hook", CompressHook()),)),
    ("fsdp1", "partly frozen, 16 ranks", (("engine.sharding", "HYBRID_SHARD"), ("mesh", Mesh(replicate=4)))),
    ("fsdp1", "", (("engine.use_orig_params", False), ("engine.wrap", WrapRoot()))),
    ("fsdp2", "", (("weights", LoadWeights(PATH)), ("mesh", Mesh(replicate=2)))),
    ("tensor", "", ()),
    ("zero", "scheduler and two loaders", (("engine.stage", 3),)),
)


def _around(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Every plan that differs in one value: of all but its steps, then of each of these."""
    for place, other in neighbours(evolve(plan, steps=()), Plan):
        yield ".".join(place), evolve(other, steps=plan.steps)
    for index, planned in enumerate(plan.steps):
        for place, step in neighbours(planned.step, type(planned.step)):
            steps = (*plan.steps[:index], evolve(planned, step=step), *plan.steps[index + 1 :])
            yield ".".join((type(planned.step).__name__, *place)), evolve(plan, steps=steps)


def test_what_does_not_fit_in_neighbours_of_plans_reads_as_it_did() -> None:
    """What a line above says already is not repeated."""
    lines, before = [], set[str]()
    for case in CASES:
        found: dict[tuple[str, ...], list[str]] = defaultdict(list)
        plan = make(*asked(*case))
        assert wrong(plan) == []
        for place, other in _around(plan):
            said = tuple(f"{where}: {what}" for where, what in wrong(other))
            if anew := tuple(one for one in said if one not in before):
                found[anew].append(place)
        lines += [f"{'; '.join(said)} <- {', '.join(dict.fromkeys(places))}" for said, places in found.items()]
        before.update(one for said in found for one in said)
    assert_golden(GOLDEN / "misfits.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_a_layout_lies_on_dims_and_axes_that_there_are(axes: int) -> None:
    plan = sample_plan()
    (first, *rest), mesh = plan.layout, tuple(Axis(name="shard", size=1) for _ in range(axes))
    shapes: tuple[tuple[int, ...], ...] = ((), (3,), (0, 4), (-1, 3), (3, 2**62), (1,) * 64, (1,) * 65)
    lying: tuple[tuple[Placement, ...], ...] = (
        *((), ("replicate",), ("shard(0)",), ("strided(0)", "replicate"), ("replicate", "shard(1)")),
    )
    for shape, placements in product(shapes, lying):
        layout = (evolve(first, shape=shape, placements=placements, flat=None), *rest)
        found = wrong(evolve(plan, mesh=mesh, layout=layout))
        told = {where.rpartition(".")[2] for where, _ in found if where.startswith("$.layout[0]")}
        dims = [int(one[-2]) for one in placements if one.endswith(")")]
        fits = len(shape) <= 64 and all(0 <= size < 2**62 for size in shape) and all(dim < len(shape) for dim in dims)
        assert told == {*(("shape",) if not fits else ()), *(("placements",) if len(placements) > axes else ())}


@pytest.mark.parametrize(("value", "fits"), [("1", True), ('"a"', True), ("a", False), ("[" * 10**5, False)])
def test_settings_of_deepspeed_are_json(value: str, fits: bool) -> None:
    plan = make(Config(engine=DeepSpeed(stage=2, micro_batch=1)), tiny_facts(world=2))
    (step,) = (one.step for one in plan.steps if isinstance(one.step, InitializeDeepSpeed))
    odd = because(evolve(step, settings=(Setting(path=("a",), value=value),)), "asked")
    found = wrong(evolve(plan, steps=odd))
    assert [where for where, _ in found] == ([] if fits else ["$.steps[0].step.settings[0].value"])


# --- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "fits"), [(2**64 - 1, True), (2**64, False), (1 - 2**64, True), (-(2**64), False)])
def test_whole_numbers_have_at_most_64_bits(number: int, fits: bool) -> None:
    data = codec.to_data(Config()) | {"accumulation": number}
    if fits:
        assert codec.from_data(data, Config).accumulation == number
    else:
        with pytest.raises(PlanRejected, match="is too large"):
            codec.from_data(data, Config)


def test_long_numbers_are_shown_by_their_bits() -> None:
    assert [shown(10**40 - 1), shown(10**40)] == ["9" * 40, "an integer of 133 bits"]


def test_a_misfit_is_an_error_whose_text_is_what_does_not_fit() -> None:
    error = wrong_type("x", int)
    assert isinstance(error, MisfitError)
    assert str(error) == error.what == "'x' is given where a whole number is expected"


@pytest.mark.parametrize(
    ("language", "expected"), [("toml", "lr = "), ("yaml", "lr: "), ("json", '"lr": '), ("python", "lr=")]
)
def test_a_field_is_given_its_value_as_each_language_does(language: Language, expected: str) -> None:
    assert assigned("lr", language) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [((0.9, 0.95), "(0.9, 0.95)"), ([1, "a"], "[1, 'a']"), (None, "None"), (True, "True"), ({"a": 1}, "dict(a=1)")],
)
def test_data_is_typed_as_python_writes_it(data: object, expected: str) -> None:
    assert typed(data, "python") == expected


FIELDS: dict[type, dict[str, str]] = {
    Config: {
        "clip_grad_norm": "clip",
        "gradient_clipping": "clip",
        "max_grad_norm": "clip",
        "gradient_accumulation_steps": "accumulation",
        "accumulation_steps": "accumulation",
        "mixed_precision": "precision",
        "gradient_checkpointing": "checkpointing",
        "activation_checkpointing": "checkpointing",
        "torch_compile": "compile",
        "strategy": "engine",
        "fsdp_version": "engine",
        "timeout": "timeout_s",
    },
    FSDP1: {"sharding_strategy": "sharding"},
    FSDP2: {"cpu_offload": "offload", "auto_wrap_policy": "wrap"},
    DeepSpeed: {"zero_stage": "stage"},
    AdamW: {"learning_rate": "lr", "weight_decay_rate": "weight_decay", "wd": "weight_decay"},
}


SHORT: dict[type, object] = {int: 3, float: 0.5, str: "text", bool: True}
"""A value of each type of which fields are told from one another."""


def test_a_key_like_no_field_is_the_one_that_is_missing_and_takes_its_value() -> None:
    """Fields that are given already are never meant."""
    told = 0
    for cls in filter(attrs.has, field_types.types()):
        needed = {field.name: field.type for field in field_types.fields(cls) if field.default is attrs.NOTHING}
        for name, kind in needed.items():
            given = dict.fromkeys(other for other in needed if other != name)
            if kind in SHORT and not near("qqqqqqqq", (name,), 1):
                assert meant("qqqqqqqq", SHORT[kind], cls, given) == name, cls
                assert meant("qqqqqqqq", SHORT[kind], cls, given | {name: None}) == ""
                told += 1
    assert told > 100


def test_names_of_other_libraries_are_answered_with_prepkit_s() -> None:
    for cls, names in FIELDS.items():
        for name, field in names.items():
            with pytest.raises(PlanRejected) as caught:
                codec.from_data({name: 3}, cls)
            fixes = [found.fix for found in caught.value.findings if found.rule == "codec.unknown-key"]
            assert fixes == [f"write {field!r} instead"]
    assert {name for names in FIELDS.values() for name in names} == {*OTHER_NAMES, "timeout"}


def test_an_object_stands_for_members_that_have_its_keys_and_need_no_others() -> None:
    bare = ({"kind": "WrapBlocks"}, {"kind": "WrapRoot"})
    assert samples({"paths": ["a"]}, Wrap) == bare
    assert samples({"names": ["a"]}, Wrap) == ({"kind": "WrapClasses", "names": ["a"]}, *bare)


# --- differences ---------------------------------------------------------------------------------------------------


def test_equal_items_meet_one_for_one_in_their_order() -> None:
    assert _anchors(["a", "a", "b", "a"], ["a", "b", "a", "a"]) == [(0, 0), (1, 2), (3, 3)]
    assert _anchors(["a", "a"], ["a", "a", "a"]) == [(0, 0), (1, 1)]


@pytest.mark.parametrize(("size", "fits"), [(2**62 - 1, True), (2**62, False)])
def test_a_flat_parameter_has_a_size_that_torch_can_count(size: int, fits: bool) -> None:
    plan = make(Config(engine=FSDP1()), tiny_facts(world=2))
    first, *rest = plan.layout
    assert first.flat is not None
    large = evolve(first, flat=evolve(first.flat, size=size))
    assert [where for where, _ in wrong(evolve(plan, layout=(large, *rest)))] == ([] if fits else ["$.layout[0].flat"])


@pytest.mark.parametrize(("size", "fits"), [(100.0, True), (2.0**41, True), (2.0**42, False), (0.0, False)])
def test_a_bucket_has_a_size_between_nothing_and_what_no_machine_has(size: float, fits: bool) -> None:
    plan = make(Config(engine=DDP()), tiny_facts(world=2))
    steps = tuple(
        evolve(one, step=evolve(one.step, bucket_cap_mb=size)) if isinstance(one.step, WrapDDP) else one
        for one in plan.steps
    )
    assert bool(wrong(evolve(plan, steps=steps))) is not fits


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        ({"optimizer": {"kind": "AdamW", "betas": 0.9}}, "write [0.9, 0.999]"),
        ({"optimizer": {"kind": "AdamW", "betas": [0.8]}}, "write [0.8, 0.999]"),
        ({"optimizer": {"kind": "AdamW", "betas": [1, 2, 3]}}, "write a list (a number, a number)"),
        ({"lr": 0.1}, "move it into 'optimizer': optimizer: {kind: AdamW, lr: 0.1}"),
        ({"lr": 0.1, "optimizer": "SGD"}, "move it into 'optimizer': optimizer: {kind: SGD, lr: 0.1}"),
        ({"replicate": 2}, "move it into 'mesh': mesh: {replicate: 2}"),
        ({"checkpointing": True}, "write CheckpointBlocks"),
        ({"checkpointing": False}, "write null"),
        ({"compile": True}, "write CompileModel or CompileBlocks"),
    ],
)
def test_a_fix_is_what_would_stand_there(data: dict[str, object], fix: str) -> None:
    with pytest.raises(PlanRejected) as caught:
        codec.from_data(data, Config, language="yaml")
    [found] = caught.value.findings
    assert found.fix == fix
    assert isinstance(caught.value.rest, Config)


def test_what_was_meant_is_read_and_a_config_without_an_engine_is_not() -> None:
    with pytest.raises(PlanRejected) as caught:
        codec.from_data({"engine": {"kind": "DPD"}, "lr": 0.5, "timeout_s": "long"}, Config)
    assert caught.value.rest == Config(engine=DDP(), optimizer=AdamW(lr=0.5))
    with pytest.raises(PlanRejected) as caught:
        codec.from_data({"engine": 4, "timeout_s": 5}, Config)
    assert caught.value.rest is None


def found(data: object, cls: Any) -> list[tuple[str, str]]:
    with pytest.raises(PlanRejected) as caught:
        codec.from_data(data, cls)
    return [(one.where, one.fix) for one in caught.value.findings]


def test_items_that_do_not_fit_are_told_by_their_own_places() -> None:
    items = [1, "x", 2, "y", "z", 3, 4, "w"]
    assert [where for where, _ in found(items, tuple[int, ...])] == ["$[1]", "$[3]", "$[4]", "$[7]"]


UNIONS = tuple(field for field in field_types.fields(Config) if field_types.kinds(field.type))


@pytest.mark.parametrize("value", [True, False, 2.5])
def test_a_switch_or_a_number_in_quotes_is_answered_as_the_one_without(value: object) -> None:
    fixes = [
        (found({"engine": "DDP"} | {one.name: text}, Config)) for one in UNIONS for text in (value, json.dumps(value))
    ]
    assert fixes[::2] == fixes[1::2]


def test_every_object_is_described_by_its_name() -> None:
    for cls in filter(attrs.has, field_types.types()):
        assert cls.__name__ in field_types.describe(cls)


def test_a_word_that_is_nearly_one_of_those_is_read_as_the_one_that_was_meant() -> None:
    with pytest.raises(PlanRejected) as caught:
        codec.from_data({"engine": {"kind": "FSDP1", "sharding": "SHARD_GRAD_OPS"}}, Config)
    assert caught.value.rest == Config(engine=FSDP1(sharding="SHARD_GRAD_OP"))


@pytest.mark.parametrize("kind", [["AdamW"], {"kind": ["AdamW"]}, {"kind": {}}])
def test_a_key_of_a_section_whose_kind_is_no_text_is_a_finding_and_no_crash(kind: object) -> None:
    with pytest.raises(PlanRejected) as caught:
        codec.from_data({"engine": "DDP", "optimizer": kind, "lr": 0.1}, Config)
    assert "codec.unknown-key" in {found.rule for found in caught.value.findings}


def test_a_whole_number_beyond_64_bits_is_a_number_where_one_may_be() -> None:
    """As JSON Schema has it, to which 1e30 and 10**30 are one."""
    options = [{"name": "x", "value": 2**70}, {"name": "y", "value": 2**60}]
    data = {"engine": "DDP", "compile": {"kind": "CompileModel", "options": options}}
    compiled = codec.from_data(data, Config).compile
    assert compiled is not None
    assert [(option.value, type(option.value)) for option in compiled.options] == [(2.0**70, float), (2**60, int)]
