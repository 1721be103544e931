"""Facts at plan time against facts at apply time: which difference is of which kind."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from prepkit.applying.apply import drifted
from prepkit.facts import Facts
from prepkit.plan.drift import DriftKind, drift
from prepkit.testing import marked, tiny_facts, tiny_loader, tiny_model

SEEN = tiny_facts(world=2, loader=tiny_loader())


def with_model(**changes: Any) -> Facts:
    return evolve(SEEN, model=evolve(SEEN.model, **changes))


def with_param(**changes: Any) -> Facts:
    first, *rest = SEEN.model.params
    return with_model(params=(evolve(first, **changes), *rest))


def with_optimizer(**changes: Any) -> Facts:
    assert SEEN.optimizer is not None
    return evolve(SEEN, optimizer=evolve(SEEN.optimizer, **changes))


CASES: dict[str, tuple[Facts, DriftKind, str, str]] = {
    "another shape": (with_param(shape=(9, 4)), "identity", "parameter embed.weight", "float32[9, 4]"),
    "another dtype": (with_param(dtype="bfloat16"), "identity", "parameter embed.weight", "bfloat16[8, 4]"),
    "a missing parameter": (with_model(params=SEEN.model.params[1:]), "identity", "parameter embed.weight", "absent"),
    "a buffer less": (with_model(buffers=()), "identity", "buffer positions", "absent"),
    "another class": (with_model(modules=SEEN.model.modules[:-1]), "identity", "module head", "absent"),
    "another tie": (with_model(ties=(("embed.weight", "head.weight"),)), "identity", "tied parameters", "head.weight"),
    "a frozen parameter": (with_param(requires_grad=False), "state", "embed.weight.requires_grad", "False"),
    "a quantised parameter": (with_param(cls="Params4bit"), "state", "class of embed.weight", "Params4bit"),
    "a wrapped model": (evolve(SEEN, model=marked(SEEN.model, "ddp")), "state", "module (root)", "ddp"),
    "no optimizer": (evolve(SEEN, optimizer=None), "state", "optimizer", "none"),
    "another optimizer": (with_optimizer(name="SGD"), "state", "optimizer", "SGD"),
    "an optimizer that has stepped": (with_optimizer(stateful=("embed.weight",)), "state", "optimizer state", "1 have"),
    "a loader less": (evolve(SEEN, loaders=()), "state", "number of loaders", "0"),
    "another sampler": (evolve(SEEN, loaders=(tiny_loader(sampler="custom"),)), "state", "loader 0", "custom"),
    "more data": (evolve(SEEN, loaders=(tiny_loader(length=65),)), "note", "loader 0", "length=65"),
    "another launch": (evolve(SEEN, env=evolve(SEEN.env, world_size=4)), "environment", "env.world_size", "4"),
    "another torch": (evolve(SEEN, env=evolve(SEEN.env, torch="2.9.0")), "note", "env.torch", "2.9.0"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_difference_is_named_with_its_place_and_both_values(name: str) -> None:
    now, kind, where, said = CASES[name]
    (found,) = drift(SEEN, now)
    assert (found.nature, found.where) == (kind, where)
    assert said in found.now
    assert found.planned != found.now


@pytest.mark.parametrize("name", CASES)
def test_all_but_notes_refuse_the_plan(name: str) -> None:
    now, kind, where, _ = CASES[name]
    refused = tuple(drifted(drift(SEEN, now)))
    assert [finding.where for finding in refused] == ([] if kind == "note" else [where])


def test_another_model_and_a_changed_one_have_two_different_messages() -> None:
    another = next(drifted(drift(SEEN, with_param(shape=(9, 4)))))
    changed = next(drifted(drift(SEEN, with_param(requires_grad=False))))
    assert (another.rule, changed.rule) == ("plan.other-model", "plan.model-changed")
    assert another.fix != changed.fix


def test_equal_facts_have_no_drift() -> None:
    assert drift(SEEN, SEEN) == ()


def test_many_differences_are_counted_after_the_first_twenty() -> None:
    big = tiny_facts(tiny_model(blocks=30))
    wide = tiny_facts(tiny_model(blocks=30, width=8))
    refused = tuple(drifted(drift(big, wide)))
    assert len(refused) == 21
    assert refused[-1].what == f"{len(drift(big, wide)) - 20} more facts differ"
