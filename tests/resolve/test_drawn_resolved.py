"""Everything that is worked out of drawn configs and facts, before a rule or a planner asks for it, as digests.

Beside the runs of ``drawn_runs``, whose model and loaders are any, there are some with float8 or a checkpoint in every
one, because few of the others have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, fields

from prepkit import codec
from prepkit import config as c
from prepkit.facts import ClassFact, Facts, ModelFacts
from prepkit.resolve import expression_cost, fp8, modules
from prepkit.resolve.checkpoint import renamed, unreadable, without_initializer
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.sharded_layers import ShardedLayers
from prepkit.resolve.weight_sources import WeightSources
from tests.support.drawn_runs import ENGINES, Draws, checkpoint, run
from tests.support.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden"
COUNT = 160
PARTS = {"": Resolved, "tp": ShardedLayers, "values": WeightSources}


def worked_out(cls: type) -> tuple[str, ...]:
    """Names of the properties; attrs makes slots of those that are cached."""
    given = {field.name for field in fields(cls)}
    cached = (name for name in vars(cls)["__slots__"] if not name.startswith("__") and name not in given)
    return (*cached, *(name for name, value in vars(cls).items() if isinstance(value, property)))


PROPERTIES = tuple((part, name) for part, cls in PARTS.items() for name in worked_out(cls) if name not in PARTS)
SKIPS = ((), ("layers.*",), ("head",), ("*.attn", "norm"))
BACKENDS: tuple[Any, ...] = (
    *(c.TorchAO(), c.TorchAO(recipe="rowwise", emulate=True), c.TorchAO(float8_all_gather=True)),
    *(c.TorchAO(keep_first_and_last=False, float8_all_gather=False), c.TorchAO(precompute_scales=False)),
    *(c.TorchAO(skip=skip) for skip in SKIPS),
    *(c.TransformerEngine(skip=skip) for skip in SKIPS),
    *(c.TransformerEngine(convert_norms=False), c.MSAMP(), c.MSAMP(opt_level="O1")),
)
RENAMES: tuple[tuple[tuple[str, str], ...], ...] = (
    *(
        (),
        (),
        (("^model[.]", ""),),
        (("^", "model."),),
        (("attn", "mlp"),),
        (("[.]weight$", ".w"), ("[.]w$", ".weight")),
    ),
    *((("(a+)+$", ""),), (("(", ""),), (("embed", r"\1"),), (("layers[.](.*)", r"layers.\1"),), (("x" * 1001, ""),)),
)
PATTERNS = (
    *("", "a", "a*", "a+b*", "(a|b|c)", "(a|b){3}", "(a*){2}", "(a*){2,}", "a{3,7}", "a{7}", "a{0,200}", "a{150,200}"),
    *(
        "(?=a*)(b|c)*",
        "(?<=ab)c?",
        "(?:a|b*){2,4}",
        "[a-z]*[0-9]+",
        "(x*)(y*)(z*)",
        "(?P<n>a?)(?(n)b|c)",
        "a*?",
        "a{5,}",
    ),
    *(
        "((a|b)*c){3}",
        "(a{1,3}){1,3}",
        "(a{1,3}){4}",
        "a|b|c|d|e|f|g|h|i|j|k",
        "(?i:a*)",
        "(?>a*)",
        "a?" * 20,
        "(.*)x(.*)",
    ),
)


def shown(value: object) -> str:
    """The same text for equal values, whatever the order of a set."""
    if isinstance(value, frozenset | set):
        return repr(sorted(value))
    return repr(dict(value)) if isinstance(value, Mapping) else repr(value)


def asked(resolved: Resolved, part: str, name: str) -> str:
    try:
        return shown(getattr(getattr(resolved, part) if part else resolved, name))
    except (AssertionError, LookupError, TypeError, ValueError) as refusal:  # of an engine that has no such thing
        return type(refusal).__name__


def float8(engine: str, number: int) -> tuple[c.Config, Facts]:
    """A run in float8, of a model some of whose layers are as wide as float8 wants, or made for it."""
    cfg, facts = run(engine, number)
    draws = Draws(f"float8 {engine} {number}")
    classes = list(facts.model.classes)
    for old, new in (("Norm", ClassFact(name="LayerNorm", module="torch.nn.modules.normalization")),):
        classes = [new if one.name == old and not draws.seldom(3) else one for one in classes]
    if draws.seldom(12):
        classes.append(ClassFact(name="Linear", module="transformer_engine.pytorch"))
    model = evolve(facts.model, classes=tuple(classes))
    precision = c.FP8(backend=draws.one(BACKENDS))
    return evolve(cfg, precision=precision), evolve(facts, model=model)


def loaded(engine: str, number: int) -> tuple[c.Config, Facts]:
    """A run that reads a checkpoint, which stands there, or was seen, under other names."""
    cfg, facts = run(engine, number)
    draws = Draws(f"loaded {engine} {number}")
    seen = evolve(checkpoint(draws, facts.model), rename=draws.one(RENAMES))
    if draws.seldom(3):
        prefix = draws.one(("model.", "module."))
        seen = evolve(seen, tensors=tuple(evolve(one, key=f"{prefix}{one.key}") for one in seen.tensors))
    weights = c.LoadWeights(seen.path if not draws.seldom(12) else "/elsewhere", rename=draws.one(RENAMES))
    return evolve(cfg, weights=weights), evolve(facts, checkpoint=seen)


RUNS = {"drawn": run, "float8": float8, "loaded": loaded}


def functions(cfg: c.Config, facts: Facts, resolved: Resolved) -> Iterator[tuple[str, object]]:
    """What is worked out by functions of their own."""
    model = facts.model
    yield "fp8.norms", fp8.norms(cfg, model)
    yield "fp8.all_gather", fp8.all_gather(cfg)
    yield "fp8.kept_wide", fp8.kept_wide(model)
    yield "fp8.has_engine_layers", fp8.has_engine_layers(model)
    yield "repeated_blocks", modules.repeated_blocks(model)
    yield "without_initializer", without_initializer(model, (*(param.name for param in model.params),))
    if isinstance(cfg.weights, c.LoadWeights):
        yield "unreadable", unreadable(cfg.weights)


def table(kind: str, engine: str) -> Iterator[str]:
    said: dict[str, list[str]] = {}
    for number in range(COUNT):
        cfg, facts = RUNS[kind](engine, number)
        resolved = Resolved(cfg=cfg, facts=facts)
        for part, name in PROPERTIES:
            said.setdefault(f"{part}.{name}".strip("."), []).append(asked(resolved, part, name))
        for name, value in functions(cfg, facts, resolved):
            said.setdefault(name, []).append(shown(value))
    for name, texts in said.items():
        parts = (texts[first : first + 10] for first in range(0, len(texts), 10))
        yield f"{name}: {' '.join(codec.digest(repr(part))[-4:] for part in parts)}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", RUNS)
def test_what_is_worked_out_of_drawn_runs_is_what_it_was(kind: str, engine: str) -> None:
    assert_golden(GOLDEN / f"{kind}-{engine}.txt", "\n".join(table(kind, engine)) + "\n")


def test_expressions_cost_what_they_did() -> None:
    def digits(pattern: str) -> str:
        from re import _parser  # type: ignore[attr-defined]  # as the module itself

        return f"{expression_cost._digits(_parser.parse(pattern)):.6f} {expression_cost.cost(pattern, '')[:11]}"

    assert_golden(GOLDEN / "expressions.txt", "".join(f"{one!r:.40}: {digits(one)}\n" for one in PATTERNS))


def test_a_key_is_renamed_up_to_the_longest_name() -> None:
    longest = c.LoadWeights("x", rename=(("^", "a"), ("^", "b")))
    assert renamed(longest, "k" * 299)[:3] == "bak"
    assert renamed(longest, "k" * 300)[:2] == "ak"


def test_a_model_without_modules_of_a_kind_has_none() -> None:
    assert fp8.linears(ModelFacts(classes=(), modules=(), params=())) == ()
