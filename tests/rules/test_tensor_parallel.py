"""Tensor parallelism: styles of a model's own plan, optimizers over cut and whole parameters, models that come cut."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import Config, TensorParallel, TPLayer, TPPlan, TPPlanFromModel
from prepkit.facts import ArchitectureFacts
from prepkit.testing.tiny import tiny_facts, tiny_model, tiny_optimizer
from tests.support.rule_findings import finding_of, rule_ids

ROWS = TPPlan((TPLayer("layers.*.mlp", "colwise"),))


def test_a_style_of_the_models_own_plan_matters_where_that_plan_is_used() -> None:
    model = evolve(tiny_model(), tensor_plan=(("layers.*.mlp", "colwise"), ("layers.*.attn", "moe_tp_experts")))
    facts = tiny_facts(model, world=2)
    assert rule_ids(Config(engine=TensorParallel(), tp_plan=TPPlanFromModel()), facts) == ["tensor.style-unknown"]
    assert rule_ids(Config(engine=TensorParallel(), tp_plan=ROWS), facts) == []


@pytest.mark.parametrize(
    ("pattern", "rules"),
    [
        ("layers.*.attn", ["tensor.style-unknown"]),
        ("layers.*.attn.weight", ["tensor.style-unknown"]),  # of experts a plan names the parameter
        ("layers.*.experts", []),
        ("layers.*.experts.gate_up_proj", []),
    ],
)
def test_a_style_of_the_models_own_plan_matters_where_the_model_has_such_a_layer(
    pattern: str, rules: list[str]
) -> None:
    model = evolve(tiny_model(), tensor_plan=(("layers.*.mlp", "colwise"), (pattern, "packed_colwise")))
    assert rule_ids(Config(engine=TensorParallel()), tiny_facts(model, world=2)) == rules


@pytest.mark.parametrize(
    ("options", "fires"),
    [
        ((("foreach", True),), 1),
        ((("fused", True),), 1),
        ((("foreach", False), ("fused", True)), 1),
        ((("foreach", False), ("fused", False)), 0),
        ((("foreach", None), ("fused", None)), 0),
        ((("capturable", True),), 0),
    ],
)
def test_an_optimizer_that_steps_all_at_once_takes_no_mix_of_cut_and_whole(
    options: tuple[tuple[str, bool | None], ...], fires: int
) -> None:
    facts = tiny_facts(world=2)
    held = tiny_optimizer(facts.model)
    (group,) = held.groups
    facts = evolve(facts, optimizer=evolve(held, groups=(evolve(group, options=options),)))
    assert rule_ids(Config(engine=TensorParallel(), tp_plan=ROWS), facts) == ["tensor.mixed-optimizer"] * fires


def test_a_model_is_cut_without_an_optimizer_as_well() -> None:
    facts = tiny_facts(world=2, optimizer=False)
    assert rule_ids(Config(engine=TensorParallel(), tp_plan=ROWS), facts) == ["optimizer.none"]


@pytest.mark.parametrize(
    ("size", "what"),
    [
        (None, "The model is cut already, and neither"),
        (4, "The model says tp_size=4, but 2 tensor ranks run."),
        (2, ""),
    ],
)
def test_a_model_that_comes_cut_says_over_how_many_ranks(size: int | None, what: str) -> None:
    model = evolve(tiny_model(), architecture=ArchitectureFacts(tp_size=size))
    cut = (evolve(p, cls="DTensor", placements=("shard(0)",)) if p.name == "head.weight" else p for p in model.params)
    cfg, facts = Config(engine=TensorParallel()), tiny_facts(evolve(model, params=tuple(cut)), world=2)
    if what:
        found = finding_of("tensor.size-differs", cfg, facts)
        assert found.where == "model.tp_size"
        assert found.what.startswith(what)
    else:
        assert "tensor.size-differs" not in rule_ids(cfg, facts)
