"""Tied parameters: refused where two units would hold them."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import Config, Wrap, WrapBlocks, WrapPaths
from prepkit.facts import ArchitectureFacts, ModelFacts, ParamFact
from prepkit.testing.tiny import tiny_facts, tiny_model
from tests.support.rule_findings import fsdp2_with, rule_ids


@pytest.mark.parametrize(
    ("wrap", "rules"),
    [
        (WrapBlocks(), []),
        (WrapPaths(("head",)), ["ties.split"]),
        (WrapPaths(("embed", "head")), ["ties.split"]),
        (WrapPaths(("norm",)), []),
    ],
)
def test_a_tie_is_refused_exactly_where_two_units_would_hold_it(wrap: Wrap, rules: list[str]) -> None:
    assert rule_ids(*fsdp2_with(wrap, tiny_model(tied=True))) == rules


def test_a_module_that_is_used_twice_is_no_split_tie() -> None:
    model = evolve(tiny_model(), ties=(("layers.0.attn.weight", "layers.7.attn.weight"),))
    assert rule_ids(*fsdp2_with(WrapBlocks(), model)) == []


ROOT = ParamFact(name="weight", shape=(4,), dtype="float32")


def without(model: ModelFacts, name: str) -> ModelFacts:
    return evolve(model, params=tuple(param for param in model.params if param.name != name))


@pytest.mark.parametrize(
    ("model", "says", "keys", "rules"),
    [
        (tiny_model(), True, True, ["ties.only-declared"]),
        (tiny_model(), True, False, []),
        (tiny_model(), None, True, []),
        (tiny_model(), False, True, []),
        (tiny_model(tied=True), True, True, []),
        (tiny_model(tied=True), None, True, []),
        (tiny_model(tied=True), False, True, ["ties.undeclared"]),
        (evolve(tiny_model(extra=(ROOT,)), input_embedding=None), True, True, []),
        (evolve(tiny_model(extra=(ROOT,)), output_embedding=None), True, True, []),
        (evolve(tiny_model(extra=(ROOT,)), input_embedding=""), True, True, ["ties.only-declared"]),
        (evolve(tiny_model(), output_embedding="embed"), True, True, []),
        (without(tiny_model(), "embed.weight"), True, True, []),
        (without(tiny_model(), "head.weight"), True, True, []),
    ],
)
def test_embeddings_are_tied_exactly_where_the_config_of_the_model_says_so(
    model: ModelFacts, says: bool | None, keys: bool, rules: list[str]
) -> None:
    said = evolve(
        model,
        architecture=ArchitectureFacts(tie_word_embeddings=says),
        tied_keys=("head.weight",) if keys else (),
    )
    assert rule_ids(Config(), tiny_facts(said)) == rules


@pytest.mark.parametrize(
    ("keys", "ties", "rules"),
    [
        (("head.bias", "entities.weight"), (), []),
        (("encoder.embed.weight",), (), []),
        (("head.weight",), (("decoder.embed.weight", "head.weight"),), []),
        (("head.weight",), (("decoder.embed.weight", "norm.weight"),), ["ties.only-declared"]),
        ((r"^embed\.weight",), (), ["ties.only-declared"]),
        (("(",), (), []),
    ],
    ids=[
        "the class ties other things (Luke)",
        "the class ties two embeddings, and no output (Pop2Piano)",
        "the output is tied to the embedding of the decoder (T5Gemma)",
        "the output is tied to nothing",
        "the class ties the input to the output, and names it by an expression",
        "a key that is no expression",
    ],
)
def test_an_output_that_the_class_does_not_tie_may_be_untied(
    keys: tuple[str, ...], ties: tuple[tuple[str, ...], ...], rules: list[str]
) -> None:
    said = ArchitectureFacts(tie_word_embeddings=True)
    model = evolve(tiny_model(extra=(evolve(ROOT, name="decoder.embed.weight"),)), architecture=said, tied_keys=keys)
    assert rule_ids(Config(), tiny_facts(evolve(model, ties=ties))) == rules
