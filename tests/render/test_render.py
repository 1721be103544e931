"""Plans, findings and rules as text."""

from __future__ import annotations

import gc
import time
from math import prod

import pytest
import torch
from attrs import evolve
from torch import nn

from prepkit import api
from prepkit.config import (
    BF16,
    FSDP2,
    SGD,
    AdamW,
    Config,
    Mesh,
    WrapPaths,
)
from prepkit.facts import (
    Env,
    Facts,
    ParamFact,
)
from prepkit.findings import Finding, Severity
from prepkit.plan import Plan
from prepkit.plan.layout import itemsize, local_shape
from prepkit.render.plan import ROWS, extremes, plan_text, unit_classes
from prepkit.render.text import findings_text, rule_text, rules_text
from prepkit.rules import RULES
from prepkit.rules.rule import Rule
from tests.support.plans import PLANS, assert_rendered, ddp_plan, make, model


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_reads_as_its_golden_page(name: str) -> None:
    made = PLANS[name]()
    assert_rendered(name, plan_text(made))


@pytest.mark.parametrize("name", PLANS)
def test_a_page_is_ascii_without_trailing_blanks(name: str) -> None:
    text = str(PLANS[name]())
    assert text.isascii()
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_a_page_says_what_was_overridden_and_what_is_warned_of() -> None:
    bad = Finding(rule="x.y", severity=Severity.ERROR, where="config.z", what="z is 1", fix="write 2")
    text = str(evolve(ddp_plan(), overridden=(bad,), warnings=(evolve(bad, severity=Severity.WARNING),)))
    assert text.endswith(
        "warnings: 1\n  warning x.y at config.z: z is 1\n    fix: write 2\n\n"
        "overridden (accepted in config.overrides): 1\n  error x.y at config.z: z is 1\n    fix: write 2"
    )


def test_a_page_grows_with_the_kinds_of_blocks_and_not_with_their_number() -> None:
    def lines(blocks: int) -> int:
        env = Env.declare(world_size=64, bf16=True)
        facts = Facts(model=model(blocks=blocks), env=env)
        return len(str(make(Config(engine=FSDP2(), precision=BF16(), optimizer=AdamW()), facts)).splitlines())

    assert lines(200) == lines(3) < 70


def test_a_unit_of_many_parameters_is_cut_and_the_rest_is_summed_up() -> None:
    params = tuple(ParamFact(name=f"w_{chr(97 + i)}", shape=(4, i + 1), dtype="float32") for i in range(ROWS + 3))
    facts = Facts(model=evolve(model(), params=params), env=Env())
    text = plan_text(make(Config(optimizer=SGD()), facts))
    left = sum(4 * 4 * (i + 1) for i in range(ROWS, ROWS + 3))
    assert f"    and 3 more parameters, {left} B on a rank" in text
    assert f"w_{chr(97 + ROWS - 1)}" in text
    assert f"w_{chr(97 + ROWS)} " not in text


def test_unit_classes_cover_every_unit_once_and_part_those_that_differ() -> None:
    seen = model(blocks=4)
    wide = tuple(evolve(p, shape=(24, 6)) if p.name == "blocks.2.up.weight" else p for p in seen.params)
    facts = Facts(model=evolve(seen, params=wide), env=Env.declare(world_size=2, bf16=True))
    made = make(Config(engine=FSDP2(), precision=BF16(), optimizer=SGD()), facts)
    assert [one.paths for one in unit_classes(made)] == [
        ("",),
        ("blocks.0", "blocks.1", "blocks.3"),
        ("blocks.2",),
    ]


@pytest.mark.parametrize(
    ("mesh", "said"),
    [(Mesh(), "0 B to 252 B"), (Mesh(replicate=2), "0 B to 360 B"), (Mesh(replicate=7), "1.02 KiB")],
)
def test_the_bytes_on_the_page_are_the_least_and_the_most_of_all_ranks(mesh: Mesh, said: str) -> None:
    env = Env.declare(world_size=14, bf16=True)
    cfg = Config(engine=FSDP2(), mesh=mesh, precision=BF16(), optimizer=SGD())
    made = make(cfg, Facts(model=model(), env=env))
    held = [
        sum(prod(local_shape(one, made.mesh, rank)) * itemsize(one.dtype) for one in made.layout) for rank in range(14)
    ]
    assert extremes(made, made.layout) == (min(held), max(held))
    assert f"each rank holds {said} of them" in plan_text(made)


def test_findings_are_shown_with_their_number() -> None:
    bad = Finding(rule="x.y", severity=Severity.ERROR, where="config.z", what="z is 1", fix="write 2")
    mild = evolve(bad, severity=Severity.WARNING)
    assert findings_text((bad, mild, bad)).splitlines() == [
        "error x.y at config.z: z is 1",
        "  fix: write 2",
        "warning x.y at config.z: z is 1",
        "  fix: write 2",
        "error x.y at config.z: z is 1",
        "  fix: write 2",
        "2 errors, 1 warning",
    ]
    assert findings_text(()) == "no findings"


def test_every_rule_has_one_line_in_the_list_and_a_page_of_its_own() -> None:
    lines = rules_text(RULES).splitlines()
    assert [line.split()[0] for line in lines] == [rule.id for rule in RULES]
    for rule in RULES:
        page = rule_text(rule)
        assert page.startswith(f"{rule.severity.value} {rule.id}\n")
        assert rule.summary in page
        assert rule.fix in page


def test_a_rule_says_whether_it_can_be_overridden_and_repaired_and_gives_its_example() -> None:
    rule = Rule(
        id="a.b", summary="A is b.", check=lambda cfg, facts: iter(()), fix="Write b.", source=("DM-1", "pain 2")
    )
    assert rule_text(rule, "error a.b\n  fix: b") == (
        "error a.b\n"
        "  holds     A is b.\n"
        "  fix       Write b.\n"
        "  repair    no: config alone cannot give it\n"
        "  override  yes: overrides = ['a.b']\n"
        "  source    DM-1, pain 2\n"
        "  example   error a.b\n"
        "              fix: b"
    )
    assert "no: nothing can go on unless it holds" in rule_text(evolve(rule, overridable=False))


def test_behaviour_rows_are_printed_only_when_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    made = ddp_plan()
    ids = {row for planned in made.steps for row in planned.behaviour_ids}
    assert "ST-3" in ids
    api.show(made, sources=True)
    assert "because the backend for cpu  [ST-3, ST-4, ST-16]\n" in capsys.readouterr().out
    api.show(made)
    assert not [row for row in ids for text in (str(made), capsys.readouterr().out) if row in text]


def test_the_text_of_a_large_plan_takes_time_in_proportion_to_its_modules() -> None:
    """Four times the modules may take eight times the time; a text that looks at all units for each takes sixteen."""
    few, many = (plan_of_lists(count) for count in (10, 40))
    assert seconds(many) < 8 * max(seconds(few), 0.01)


def seconds(plan: Plan) -> float:
    """The fastest of three, in CPU time; a collection of garbage would count all that other tests have left."""
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            began = time.process_time()
            plan_text(plan)
            times.append(time.process_time() - began)
    finally:
        gc.enable()
    return min(times)


def plan_of_lists(lists: int) -> Plan:
    """A plan with 100 units in each of so many units."""
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(100)) for _ in range(lists))
        )
    cfg = Config(engine=FSDP2(wrap=WrapPaths(("*.*",))))
    return api.build_plan(cfg, model, env=Env.declare(world_size=2, torch="2.13"))
