"""Differences between plans, as people ask for them, and their replay."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from prepkit import codec
from prepkit.codec.diff import Set, Splice, diff, patch
from prepkit.config import DDP, FSDP2, WrapBlocks, WrapClasses, WrapRoot
from prepkit.findings import PlanRejected
from prepkit.plan import Plan, because
from prepkit.steps import CompileModules, Unit
from tests.support.sample_plan import sample_plan, with_steps

COMPILE = because(
    CompileModules(paths=("a",), backend="inductor", mode="default", fullgraph=False, dynamic=None), "asked"
)


def lines(a: Plan, b: Plan) -> list[str]:
    """The changes as text; that they lead to ``b`` is checked in passing."""
    changes = diff(a, b)
    assert patch(a, changes) == b
    return [str(change) for change in changes]


def with_config(plan: Plan, **fields: Any) -> Plan:
    return evolve(plan, config=evolve(plan.config, **fields))


def test_equal_plans_do_not_differ_whatever_they_were_built_from() -> None:
    assert diff(sample_plan(), evolve(sample_plan(), target=object())) == ()


def test_a_changed_name_is_one_change_with_both_names() -> None:
    a = sample_plan()
    assert lines(a, with_config(a, engine=FSDP2(wrap=WrapClasses(("LlamaBlock",))))) == [
        "config.engine.wrap.names[0]: 'LlamaDecoderLayer' -> 'LlamaBlock'"
    ]


def test_another_kind_is_replaced_whole() -> None:
    a = sample_plan()
    (change,) = diff(a, with_config(a, engine=DDP()))
    assert change == Set(("config", "engine"), codec.to_data(a.config.engine), codec.to_data(DDP()))


def test_kinds_without_keys_are_replaced_whole_too() -> None:
    a = with_config(sample_plan(), engine=FSDP2(wrap=WrapBlocks()))
    assert lines(a, with_config(a, engine=FSDP2(wrap=WrapRoot()))) == [
        "config.engine.wrap: {'kind': 'WrapBlocks'} -> {'kind': 'WrapRoot'}"
    ]


def test_parameters_are_found_again_by_name_when_all_have_changed_and_one_has_gone() -> None:
    a = sample_plan()
    layout = tuple(evolve(param, dtype="bfloat16") for param in a.layout[1:])
    (gone, *changed) = diff(a, evolve(a, layout=layout))
    assert gone == Splice(("layout",), 0, (codec.to_data(a.layout[0]),), ())
    assert changed == [Set(("layout", index, "dtype"), "float32", "bfloat16") for index in range(len(layout))]


def test_a_change_of_the_first_item_is_shown() -> None:
    a = sample_plan()
    b = evolve(a, mesh=(evolve(a.mesh[0], size=8),), steps=(evolve(a.steps[0], reason="asked"), *a.steps[1:]))
    assert lines(a, b) == ["mesh[0].size: 64 -> 8", "steps[0].reason: '64 ranks' -> 'asked'"]


def test_true_and_one_differ() -> None:
    a = with_config(sample_plan(), engine=FSDP2(reshard_after_forward=True))
    b = with_config(a, engine=FSDP2(reshard_after_forward=1))
    assert a == b  # as Python sees it
    assert [str(change) for change in diff(a, b)] == ["config.engine.reshard_after_forward: True -> 1"]


def test_an_inserted_step_is_one_insertion() -> None:
    a = sample_plan()
    b = evolve(a, steps=a.steps[:5] + COMPILE + a.steps[5:])
    assert diff(a, b) == (Splice(("steps",), 5, (), (codec.to_data(COMPILE[0]),)),)
    assert patch(a, diff(a, b)) == b


def test_a_removed_and_an_inserted_step_are_shown_where_they_are_in_the_new_plan() -> None:
    a = sample_plan()
    b = evolve(a, steps=a.steps[1:6] + COMPILE + a.steps[6:])
    assert [(type(change), change.path, getattr(change, "index", None)) for change in diff(a, b)] == [
        (Splice, ("steps",), 0),
        (Splice, ("steps",), 5),
    ]
    assert patch(a, diff(a, b)) == b


def test_a_changed_step_beside_an_inserted_one_is_still_one_changed_field() -> None:
    a = sample_plan()
    moved = evolve(a.steps[4], reason="faster there")
    b = evolve(a, steps=(*a.steps[:4], *COMPILE, moved, *a.steps[5:]))
    assert lines(a, b)[1:] == ["steps[5].reason: 'compute there' -> 'faster there'"]


def test_of_two_steps_of_a_kind_the_untouched_one_keeps_its_place() -> None:
    one, two = evolve(COMPILE[0], reason="one"), evolve(COMPILE[0], reason="two")
    a = evolve(sample_plan(), steps=(one,))
    b = evolve(a, steps=(two, one))
    assert diff(a, b) == (Splice(("steps",), 0, (), (codec.to_data(two),)),)


def test_a_unit_is_found_again_by_its_path() -> None:
    a = sample_plan()
    shard: Any = a.steps[6].step
    units = (Unit(path="model.embed_tokens", reshard_after_forward=True), *shard.units[:-1])
    root = evolve(shard.units[-1], reshard_after_forward=False)
    step = evolve(a.steps[6], step=evolve(shard, units=(*units, root)))
    changed = lines(a, evolve(a, steps=(*a.steps[:6], step, a.steps[7])))
    assert [line.split(":")[0] for line in changed] == [
        "steps[6].step.units[0]",
        "steps[6].step.units[3].reshard_after_forward",
    ]


def test_reversed_steps_are_found_again() -> None:
    a = sample_plan()
    b = with_steps(a, *reversed(range(len(a.steps))))
    assert patch(a, diff(a, b)) == b


def test_a_changed_option_shows_only_its_value() -> None:
    a = sample_plan()
    seen: Any = a.facts.optimizer
    group = seen.groups[0]
    options = tuple((name, 0.5 if name == "lr" else value) for name, value in group.options)
    optimizer = evolve(seen, groups=(evolve(group, options=options),))
    b = evolve(a, facts=evolve(a.facts, optimizer=optimizer))
    assert lines(a, b) == ["facts.optimizer.groups[0].options[3][1]: 0.001 -> 0.5"]


def test_changes_come_in_the_order_in_which_people_ask() -> None:
    a = sample_plan()
    model = evolve(a.facts.model, has_tie_weights=True)
    b = evolve(
        with_steps(with_config(a, accumulation=4), 0, 1, 2),
        facts=evolve(a.facts, model=model, env=evolve(a.facts.env, torch="2.9")),
        layout=a.layout[1:],
        provenance=evolve(a.provenance, config="sha256:d"),
        owners=evolve(a.owners, accumulation_steps=4),
        warnings=(),
        mesh=(),
    )
    assert [line.split("[")[0].split(":")[0] for line in lines(a, b)] == [
        "config.accumulation",
        "facts.env.torch",
        "mesh",
        "steps",
        "owners.accumulation_steps",
        "layout",
        "warnings",
        "facts.model.has_tie_weights",
        "provenance.config",
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (Set(("config", "accumulation"), 7, 8), "None stands there"),
        (Set(("config", "no_such"), 7, 8), "'no_such'"),
        (Set(("steps", 99, "reason"), 7, 8), "list index out of range"),
        (Splice(("mesh",), 0, ({"name": "x", "size": 1},), ()), "'shard'"),
        (Splice(("mesh",), 5, (), ({"name": "x", "size": 1},)), "has no place 5"),
        (Splice(("config",), 0, (), ()), "has no place 0"),
    ],
)
def test_a_change_that_does_not_fit_is_refused_and_named(change: Set | Splice, what: str) -> None:
    with pytest.raises(PlanRejected) as caught:
        patch(sample_plan(), (change,))
    (found,) = caught.value.findings
    assert found.rule == "diff.does-not-fit"
    assert str(change) in found.what
    assert what in found.what


def test_a_change_to_something_that_is_no_plan_is_refused() -> None:
    with pytest.raises(PlanRejected, match=r"codec\.wrong-type at \$\.config\.accumulation"):
        patch(sample_plan(), (Set(("config", "accumulation"), None, "2"),))


def test_replaying_changes_does_not_touch_them() -> None:
    a, b = with_steps(sample_plan()), sample_plan()
    changes = diff(a, b)
    more = (*changes, Set(("steps", 0, "reason"), "64 ranks", "asked"))
    assert patch(a, more).steps[0].reason == "asked"
    assert patch(a, changes) == b


def test_plain_values_are_replaced_one_for_one_where_their_number_stays() -> None:
    a, b = with_config(sample_plan(), overrides=("a", "b", "c")), with_config(sample_plan(), overrides=("a", "d", "e"))
    assert lines(a, b) == ["config.overrides[1]: 'b' -> 'd'", "config.overrides[2]: 'c' -> 'e'"]


def test_what_are_no_changes_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the changes that pk\.diff gave"):
        patch(sample_plan(), ["config.device: None -> 'cpu'"])  # type: ignore[list-item]
