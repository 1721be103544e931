"""Values that nobody means, where they enter: a finding or an error in words, never something raw from deep inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import attrs
import pytest

import prepkit as pk
from prepkit.codec import field_types, plan_from_text, plan_to_text
from prepkit.config import ClipNorm, ClipValue, Config, LoadWeights, WrapClasses, WrapPaths, WrapSize
from prepkit.config.engines import TPPlan
from prepkit.facts import Env, parse_bytes
from prepkit.resolve.deepspeed.schema import CHOICES, LIMITS
from prepkit.resolve.deepspeed.working import working_config
from prepkit.testing import tiny_facts, tiny_loader

ODD = (None, True, -1, 0, 2**63, 10**400, 1e308, float("nan"), "", "\ud800", "7", "9" * 10_000, ("x", 1), [], object())
NEEDED: dict[type, tuple[Any, ...]] = {
    ClipNorm: (1.0,),
    ClipValue: (1.0,),
    LoadWeights: ("x",),
    WrapClasses: (("Block",),),
    WrapPaths: (("layers.*",),),
    WrapSize: (10,),
    TPPlan: ((),),
}


def needs(cls: type) -> bool:
    """Whether the class cannot be built without values."""
    return any(field.default is attrs.NOTHING for field in attrs.fields(cls))


def odd_configs() -> Iterator[tuple[str, Config]]:
    """Every field of the config, and every field of a choice in one of them, with each odd value."""
    usual = Config(engine=pk.FSDP2())
    for field in field_types.fields(Config):
        choices = [cls for cls in get_args(field.type) or (field.type,) if attrs.has(cls)]
        for held in (
            usual,
            *(
                attrs.evolve(usual, **{field.name: cls(*NEEDED.get(cls, ()))})
                for cls in choices
                if cls in NEEDED or not needs(cls)
            ),
        ):
            value = getattr(held, field.name)
            for odd in ODD:
                if held is usual:
                    yield f"{field.name}={odd!r:.20}", attrs.evolve(held, **{field.name: odd})
                    continue
                for inner in attrs.fields(type(value)):
                    if inner.name == "config" and not isinstance(odd, str):
                        continue  # DeepSpeed's own is text or a mapping, and converted at once
                    bent = attrs.evolve(value, **{inner.name: odd})
                    yield f"{type(value).__name__}.{inner.name}={odd!r:.20}", attrs.evolve(held, **{field.name: bent})


def test_an_odd_value_anywhere_in_a_config_gives_a_plan_that_can_be_saved_or_findings() -> None:
    facts = tiny_facts(world=4, device="cuda", loader=tiny_loader())
    tried = longest = 0
    for name, cfg in odd_configs():
        tried += 1
        try:
            made = pk.build_plan(cfg, facts)
            assert plan_from_text(plan_to_text(made)) == made, name
        except pk.PlanRejected as refused:
            longest = max(longest, len(str(refused)))
        except Exception as error:
            raise AssertionError(name) from error
    assert tried > 1000
    assert longest < 40_000


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"world_size": 2.0}, "world_size=2.0: write a whole number of processes, such as world_size=8"),
        ({"world_size": "x"}, "world_size='x': write a whole number"),
        ({"world_size": float("inf")}, "world_size=inf: write a whole number"),
        ({"world_size": True}, "world_size=True: write a whole number"),
        ({"world_size": 0}, "world_size=0: write a whole number of at least 1"),
        ({"world_size": 10**39}, "world_size=1000000000000000000000000000000000000000: write a whole number"),
        ({"world_size": 10**5000}, "world_size=an integer of 16610 bits: write a whole number"),
        ({"per_node": -3}, "per_node=-3: write a whole number of at least 1"),
        ({"bf16": "yes"}, "bf16='yes': write True, False or None"),
        ({"capability": (1,)}, r"capability=\(1,\): write two whole numbers"),
        ({"torch": 2.9}, "torch=2.9: write text"),
        ({"device": None}, "device=None: write text"),
        ({"libraries": ("deepspeed",)}, "libraries=.*: write pairs of texts"),
    ],
)
def test_an_environment_is_declared_in_values_that_a_cluster_has(odd: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=f"^{says}"):
        Env.declare(**{"world_size": 8, **odd})


@pytest.mark.parametrize(("text", "size"), [("0B", 0), ("1B", 1), ("512 b", 512), ("1kB", 1000), ("80GiB", 80 << 30)])
def test_a_size_may_be_in_bytes_too(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", [-1, True, 1.5, "x", "1e9", "9" * 4000, 10**4000, "99999999999TiB", None])
def test_what_is_no_size_in_bytes_is_refused_in_few_words(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes; write a number with a unit") as refused:
        parse_bytes(text)
    assert len(str(refused.value)) < 200


def test_a_name_of_a_million_digits_gives_a_message_of_one_screen() -> None:
    with pytest.raises(pk.PlanRejected) as refused:
        pk.build_plan(Config(overrides=("9" * 10**6,)), tiny_facts())
    assert len(str(refused.value)) < 10_000


@pytest.mark.parametrize(
    "call",
    [
        lambda plan: pk.apply(None),  # type: ignore[arg-type]
        lambda plan: pk.rehearse("plan.json", None),  # type: ignore[arg-type]
        lambda plan: pk.fits(None, "80GiB"),  # type: ignore[arg-type]
        lambda plan: pk.build_plan(Config(), tiny_facts(), rules="x"),  # type: ignore[arg-type]
        lambda plan: pk.check(Config(), tiny_facts(), rules=(1,)),  # type: ignore[arg-type]
        lambda plan: pk.check(Config(), tiny_facts(), env="x"),  # type: ignore[arg-type]
        lambda plan: pk.patch("x", ()),  # type: ignore[type-var]
        lambda plan: pk.patch(plan, "x"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_said_with_what_to_give(call: Any) -> None:
    with pytest.raises(TypeError, match=r"give |takes "):
        call(pk.build_plan(Config(), tiny_facts()))


@pytest.mark.parametrize("path", [*LIMITS, *CHOICES])
def test_a_value_that_deepspeed_refuses_is_refused_before(path: str) -> None:
    for odd in (-5, 1e308) if path in LIMITS else ("odd", 3):
        section: Any = odd
        for key in reversed(path.split(".")):
            section = {key: section}
        worked_out = working_config(Config(engine=pk.DeepSpeed(stage=3, config=section)), tiny_facts(world=2))
        said = [flaw for flaw in worked_out.flaws if f"`{path}`" in flaw.what]
        assert [flaw.rule for flaw in said] in (["deepspeed.wrong-value"], ["deepspeed.wrong-type"]), odd


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": ' * 600 + "1" + "}" * 600, "nested more than 50 levels deep"),
        ('{"zero_optimization": ' + "[" * 100_000, "nested more than 50 levels deep"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "a number of 5000 digits"),
        ('{"gradient_clipping": 1e999}', "1e999 is beyond what a number holds"),
    ],
)
def test_a_hostile_deepspeed_config_is_a_finding(text: str, says: str) -> None:
    found = pk.check(Config(engine=pk.DeepSpeed(config=text)), tiny_facts(world=2))
    assert any(says in finding.what for finding in found), found
