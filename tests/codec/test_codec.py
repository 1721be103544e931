"""Values to and from JSON data, and what is said about data that does not fit."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from typing import Any, get_args

import attrs
import pytest

from prepkit import codec
from prepkit.codec import field_types as codec_shapes
from prepkit.codec.languages import TAG
from prepkit.config import (
    FSDP2,
    SGD,
    AdamW,
    ClipNorm,
    CompileBlocks,
    Config,
    Group,
    Intent,
    Mesh,
    WrapBlocks,
    WrapClasses,
)
from prepkit.facts import Env, GroupFact, LocalFacts, Observation
from prepkit.findings import PlanRejected
from prepkit.plan import Plan
from prepkit.steps import Agree, OptimizerOption, Step
from tests.support.sample_plan import sample_plan


def refused(data: object, cls: Any = Config) -> list[tuple[str, str, str, str]]:
    with pytest.raises(PlanRejected) as caught:
        codec.from_data(data, cls)
    return [(found.rule, found.where, found.what, found.fix) for found in caught.value.findings]


def test_a_plan_returns_from_its_data_as_it_was() -> None:
    plan = sample_plan()
    data = json.loads(json.dumps(codec.to_data(plan)))
    assert data == codec.to_data(plan)
    assert codec.from_data(data, Plan) == plan


def test_a_union_member_is_written_with_its_kind_and_a_lone_class_without() -> None:
    assert codec.to_data(FSDP2(wrap=WrapClasses(("A", "B")))) == {
        "kind": "FSDP2",
        "wrap": {"kind": "WrapClasses", "names": ["A", "B"], "paths": []},
        "reshard_after_forward": True,
        "offload": None,
        "ignored": [],
        "cast_forward_inputs": True,
        "reduce_unused": False,
    }
    assert codec.to_data(Mesh()) == {"replicate": 1, "shard": -1, "tensor": 1}
    assert codec.to_data(Agree()) == {"kind": "Agree"}


def test_no_field_hides_the_tag() -> None:
    classes = [cls for cls in codec_shapes.types() if isinstance(cls, type) and attrs.has(cls)]
    assert classes
    assert not [cls for cls in classes if TAG in attrs.fields_dict(cls)]


def test_leaving_a_key_out_means_none_wherever_none_may_be_written() -> None:
    """TOML has no null."""
    rest: list[Any] = [Config]
    seen: set[Any] = set()
    while rest:
        if (cls := rest.pop()) in seen:
            continue
        seen.add(cls)
        rest.extend(get_args(cls))
        for field in codec_shapes.fields(cls) if attrs.has(cls) else ():
            rest.append(field.type)
            assert field.default is None or not codec_shapes.takes_none(field.type), f"{cls.__name__}.{field.name}"
    assert Mesh in seen


def test_the_live_target_is_in_no_data_and_no_digest() -> None:
    plan = sample_plan()
    live = attrs.evolve(plan, target=object())
    assert "target" not in codec.to_data(live)
    assert codec.plan_digest(live) == codec.plan_digest(plan)


def test_a_bare_name_stands_for_a_kind_with_its_defaults() -> None:
    cfg = codec.from_data({"engine": "FSDP2", "compile": {"kind": "CompileBlocks", "blocks": "WrapBlocks"}}, Config)
    assert cfg == Config(engine=FSDP2(), compile=CompileBlocks(blocks=WrapBlocks()))
    assert codec.from_data({"optimizer": "SGD", "clip": None}, Config) == Config(optimizer=SGD(), clip=None)


def test_a_bare_name_of_a_kind_that_needs_more_says_what_it_needs() -> None:
    assert refused({"clip": "ClipNorm"}) == [
        ("codec.missing-key", "$.clip.max_norm", "ClipNorm needs the key 'max_norm'", 'add "max_norm": <a number>')
    ]


def test_every_unknown_key_is_reported_in_order() -> None:
    assert [where for _, where, _, _ in refused({"mesh": {"z": 1, "a": 2, 3: 4, "shard": 8}})] == [
        "$.mesh.z",
        "$.mesh.a",
        "$.mesh[3]",
    ]


def test_data_of_one_kind_is_not_read_as_another() -> None:
    assert codec.from_data({"kind": "FSDP2"}, FSDP2) == FSDP2()
    assert [(rule, where) for rule, where, _, _ in refused({"kind": "DDP"}, FSDP2)] == [
        ("codec.unknown-kind", "$.kind")
    ]


def test_a_text_that_is_no_finite_number_is_not_suggested_as_one() -> None:
    assert [refused(text, float)[0][3] for text in ("nan", "inf", "1e999", "many")] == ["write a number"] * 4


def test_every_mistake_is_reported_at_once_with_its_place() -> None:
    data = {
        "engine": {"kind": "FSDP2", "wrap": {"kind": "WrapClasses", "names": ["A", 3, "B", None]}},
        "accumulation": "4",
        "intent": "train",
        "timeot_s": 5,
        "loaders": {"kind": "ShardLoaders", "seed": 1.5, "drop": True},
    }
    assert [(rule, where) for rule, where, _, _ in refused(data)] == [
        ("codec.wrong-type", "$.engine.wrap.names[1]"),
        ("codec.wrong-type", "$.engine.wrap.names[3]"),
        ("codec.wrong-value", "$.intent"),
        ("codec.wrong-type", "$.accumulation"),
        ("codec.wrong-type", "$.loaders.seed"),
        ("codec.unknown-key", "$.loaders.drop"),
        ("codec.unknown-key", "$.timeot_s"),
    ]


@pytest.mark.parametrize(
    ("data", "finding"),
    [
        (
            {"engine": "FSDP3"},
            (
                "codec.unknown-kind",
                "$.engine",
                "'FSDP3' is not one of Single, DDP, FSDP2, FSDP1, TensorParallel, XLA, DeepSpeed",
                'write "FSDP2"',
            ),
        ),
        (
            {"engine": {"kind": "fsdp2"}},
            (
                "codec.unknown-kind",
                "$.engine.kind",
                "'fsdp2' is not one of Single, DDP, FSDP2, FSDP1, TensorParallel, XLA, DeepSpeed",
                'write "FSDP2"',
            ),
        ),
        (
            {"engine": {"wrap": "WrapRoot"}},
            (
                "codec.missing-key",
                "$.engine.kind",
                "no key 'kind' says which of Single, DDP, FSDP2, FSDP1, TensorParallel, XLA, DeepSpeed this is",
                'write {"kind": "FSDP2", "wrap": "WrapRoot"} or {"kind": "FSDP1", "wrap": "WrapRoot"}',
            ),
        ),
        (
            {"mesh": {"shards": 8}},
            (
                "codec.unknown-key",
                "$.mesh.shards",
                "Mesh has no key 'shards', only replicate, shard, tensor",
                "write 'shard' instead",
            ),
        ),
        (
            {"compile": {"kind": "CompileModel", "fullgraph": "false"}},
            (
                "codec.wrong-type",
                "$.compile.fullgraph",
                "'false' is given where true or false is expected",
                "write false without quotes",
            ),
        ),
        (
            {"optimizer": {"kind": "AdamW", "lr": "5e-4"}},
            (
                "codec.wrong-type",
                "$.optimizer.lr",
                "'5e-4' is given where a number is expected",
                "write 0.0005 without quotes",
            ),
        ),
        (
            {"accumulation": 2.0},
            ("codec.wrong-type", "$.accumulation", "2.0 is given where a whole number or null is expected", "write 2"),
        ),
        (
            {"overrides": "mesh.size"},
            (
                "codec.wrong-type",
                "$.overrides",
                "'mesh.size' is given where a list (of text) is expected",
                'put it into a list: ["mesh.size"]',
            ),
        ),
        (
            {"optimizer": {"kind": "AdamW", "betas": [0.9]}},
            (
                "codec.wrong-value",
                "$.optimizer.betas",
                "[0.9] has 1 items, not 2",
                "write [0.9, 0.999]",
            ),
        ),
        (
            {"precision": {"kind": "BF16", "reduce_dtype": "bf16"}},
            (
                "codec.wrong-value",
                "$.precision.reduce_dtype",
                "'bf16' is not one of 'float32', 'bfloat16', 'float16'",
                'write "bfloat16"',
            ),
        ),
    ],
)  # fmt: skip
def test_a_message_shows_the_value_and_what_to_type(data: dict[str, Any], finding: tuple[str, ...]) -> None:
    assert refused(data) == [finding]


WRONG: list[tuple[Any, list[Any]]] = [
    (bool, ["true", 1, 0, 1.0, None, [], {}]),
    (int, [True, 1.0, "1", None, [1], {}]),
    (float, [True, "1.0", None, [1.0], math.inf, math.nan, 10**400]),
    (str, [1, True, None, ["a"], {}]),
    (bool | int, [1.0, "1", None, "true"]),
    (bool | float | tuple[float, ...], ["1", None, [True], ["1"], [[1.0]], {}]),
    (bool | int | float | str | None, [[], {}, math.nan]),
    (int | None, [True, 1.0, "", []]),
    (tuple[float, float], [[1.0], [1.0, 2.0, 3.0], (1.0, 2.0), "ab", {"0": 1, "1": 2}, [1.0, True]]),
    (tuple[str, ...], ["abc", ("a",), {"a": 1}, None]),
    (Intent, ["TRAINING", 1, None, True]),
]


@pytest.mark.parametrize(("cls", "value"), [(cls, value) for cls, values in WRONG for value in values])
def test_nothing_is_turned_into_another_type(cls: Any, value: object) -> None:
    assert [where.startswith("$") for _, where, _, _ in refused(value, cls)] == [True]


@pytest.mark.parametrize(
    ("field", "value"),
    [("accumulation", "4"), ("timeout_s", True), ("device", 3), ("intent", "x"), ("overrides", [1]), ("mesh", [])],
)
def test_fields_of_a_class_are_as_strict_as_bare_values(field: str, value: object) -> None:
    assert len(refused({field: value})) == 1


@pytest.mark.parametrize(
    ("cls", "data", "value"),
    [
        (float, 1, 1.0),
        (bool | int, True, True),
        (bool | int, 1, 1),
        (bool | float | tuple[float, ...], True, True),
        (bool | float | tuple[float, ...], 3, 3.0),
        (bool | float | tuple[float, ...], [1, 2.5], (1.0, 2.5)),
        (bool | int | float | str | None, 3, 3),
        (bool | int | float | str | None, 3.0, 3.0),
        (float | int, 3, 3),
        (tuple[tuple[str, int], ...], [["meta", 2]], (("meta", 2),)),
    ],
)  # fmt: skip
def test_what_fits_keeps_its_type(cls: Any, data: object, value: object) -> None:
    read = codec.from_data(data, cls)
    assert (repr(read), type(read)) == (repr(value), type(value))


@pytest.mark.parametrize("value", [OptimizerOption(name="lr", value=1), AdamW(lr=1, betas=(0, 1)), ClipNorm(1)])
def test_an_int_where_a_number_is_meant_is_written_as_it_will_be_read(value: object) -> None:
    assert codec.dumps(codec.from_data(codec.to_data(value), type(value))) == codec.dumps(value)


def test_true_one_and_one_point_zero_have_digests_of_their_own() -> None:
    groups = [GroupFact(slots=(), options=(("x", value),)) for value in (True, 1, 1.0, "1", None)]
    assert len({codec.digest(group) for group in groups}) == 5


def test_every_step_kind_is_tagged_and_every_class_that_plans_hold_is_known() -> None:
    assert set(get_args(Step)) <= codec_shapes.tagged()
    assert {Plan, Config, Env, LocalFacts, Observation, Mesh} <= codec_shapes.types()
    assert Mesh not in codec_shapes.tagged()


def test_canonical_text_has_sorted_keys_no_spaces_and_letters_as_they_are() -> None:
    assert codec.dumps(Mesh(shard=4)) == '{"replicate":1,"shard":4,"tensor":1}'
    assert codec.dumps(WrapClasses(("Größe",))) == '{"kind":"WrapClasses","names":["Größe"],"paths":[]}'
    assert (
        codec.digest(Mesh(shard=4)) == "sha256:" + hashlib.sha256(b'{"replicate":1,"shard":4,"tensor":1}').hexdigest()
    )


def test_a_number_that_json_does_not_have_is_refused_with_its_place() -> None:
    with pytest.raises(PlanRejected) as caught:
        codec.digest(Config(clip=ClipNorm(1.0, norm_type=math.inf), accumulation=10**5000))
    assert [(found.where, found.rule) for found in caught.value.findings] == [
        ("$.accumulation", "codec.wrong-value"),
        ("$.clip.norm_type", "codec.wrong-value"),
    ]


def test_a_value_of_the_wrong_type_is_not_made_right_by_writing_it() -> None:
    wrong: Any = "4"
    assert codec.to_data(Config(accumulation=wrong, timeout_s=wrong, device=wrong))["accumulation"] == "4"
    assert codec.to_data(AdamW(lr=wrong))["lr"] == "4"
    with pytest.raises(PlanRejected, match=r"wrong-type at \$\.device: <object"):
        codec.digest(Config(device=object()))  # type: ignore[arg-type]


def test_text_with_a_lone_surrogate_has_a_digest() -> None:
    assert codec.digest(Env(variables=(("PATH", "\udc80"),))) != codec.digest(Env(variables=(("PATH", "\\udc80"),)))


def test_loading_the_codec_does_not_import_torch() -> None:
    probe = "import sys, prepkit.codec, prepkit.codec.diff; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.mark.parametrize("kind", [[], {}, None, 3])
def test_a_kind_that_is_no_name_is_unknown(kind: object) -> None:
    ((rule, where, what, _),) = refused({"engine": {"kind": kind}})
    assert (rule, where) == ("codec.unknown-kind", "$.engine.kind")
    assert what.startswith(f"{kind!r} is not one of ")


def test_a_tuple_of_another_length_is_written_whole_and_refused_when_it_is_read() -> None:
    data = codec.to_data(AdamW(betas=(0.9,)))  # type: ignore[arg-type]
    assert data["betas"] == [0.9]
    assert refused(data, AdamW)[0][0] == "codec.wrong-value"


def test_true_is_not_written_as_a_number() -> None:
    assert codec.to_data(Group(names=("a",), lr=True))["lr"] is True


def test_the_hundredth_misfit_of_a_list_is_followed_by_how_many_were_not_looked_at() -> None:
    found = refused({"overrides": list(range(500))})
    assert len(found) == 101
    assert [one[0] for one in found[-2:]] == ["codec.wrong-type", "codec.too-many"]


@pytest.mark.parametrize(("value", "cls"), [("3", bool), ("0.5", int), ("true", int)])
def test_a_text_is_not_suggested_as_what_is_not_expected(value: str, cls: type) -> None:
    assert "without quotes" not in refused(value, cls)[0][3]


def test_hundreds_of_unknown_keys_are_counted_and_a_hundred_of_them_told() -> None:
    found = refused({f"key_{number}": 1 for number in range(300)})
    assert [one[0] for one in found].count("codec.unknown-key") == 100
    assert "codec.too-many" in {one[0] for one in found}
