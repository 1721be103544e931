"""Properties of ``Resolved`` as text, for a few configs and facts, and for every neighbour of them.

A neighbour differs in one value. Below the properties there is a line for each: how many pieces of properties and steps
of the plan it takes away, and those that it adds and no line above has added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, fields
from returns.result import Success

from prepkit import config as c
from prepkit import planner
from prepkit.facts import Facts, ModelFacts
from prepkit.facts.checkpoint import KeyMapping, StoredTensor, WeightConverter
from prepkit.facts.model import WELL_KNOWN
from prepkit.findings import errors
from prepkit.resolve import checkpoint, entry_points, fp8
from prepkit.resolve.checkpoint import assemble, renamed
from prepkit.resolve.deepspeed.working import WorkingConfig
from prepkit.resolve.resolved import Resolved, WeightSources
from prepkit.resolve.tensor_parallel import ShardedLayers
from prepkit.steps import InitializeDeepSpeed
from prepkit.testing import tiny_model
from prepkit.testing.tiny import PATH
from tests.support import neighbours
from tests.support.drawn_runs import TP_LAYERS
from tests.support.golden import assert_golden
from tests.support.readable_plans import Settings, asked, brief

GOLDEN = Path(__file__).parent / "golden"
PARTS = {"": Resolved, "tp": ShardedLayers, "values": WeightSources}
OPTIONS = (c.CompileOption(name="epilogue_fusion", value=True),)
CASES: dict[str, tuple[str, str, Settings]] = {
    "single": ("single", "16 bits, tied", (("optimizer", (c.Muon(names=("layers.*",)), c.AdamW())),)),
    "ddp": ("ddp", "scheduler and two loaders", (("global_batch", 64), ("precision", c.BF16()))),
    "fsdp1": ("fsdp1", "partly frozen, 16 ranks", (("engine.sharding", "HYBRID_SHARD"), ("mesh", c.Mesh(replicate=4)))),
    "fsdp1 flat": ("fsdp1", "16 bits, tied", (("engine.use_orig_params", False), ("engine.wrap", c.WrapSize(300)))),
    "fsdp2": ("fsdp2", "partly frozen, 16 ranks", (("mesh", c.Mesh(replicate=2)), ("engine.ignored", ("layers.0",)))),
    "fsdp2 cut": ("fsdp2", "", (("mesh", c.Mesh(shard=2, tensor=2)), ("tp_plan", c.TPPlan(TP_LAYERS[:2])))),
    "tensor": (
        "tensor",
        "16 bits, tied",
        (("tp_plan", c.TPPlan(TP_LAYERS[:4])),),
    ),
    "loaded": ("fsdp2", "16 bits, tied", (("weights", c.LoadWeights(PATH, rename=(("^layers", "blocks"),))),)),
    "initialised": ("ddp", "a norm with a bias", (("weights", c.InitWeights(seed=3)),)),
    "float8": ("fsdp2", "", (("precision", c.FP8()), ("compile", c.CompileBlocks(options=OPTIONS)))),
    "engine float8": (
        "ddp",
        "a norm with a bias",
        (("precision", c.FP8(backend=c.TransformerEngine())),),
    ),
    "zero": ("zero", "scheduler and two loaders", (("engine.stage", 3), ("global_batch", 64), ("precision", c.BF16()))),
}
PATTERNS: dict[str, tuple[float, str]] = {
    "": (0.000000, ""),
    "a": (0.000000, ""),
    "a*": (2.004321, ""),
    "a+b*": (4.004321, ""),
    "(a|b|c)": (0.000000, ""),
    "(a|b){3}": (0.000000, ""),
    "(a*){2}": (4.008643, ""),
    "(a*){2,}": (202.427773, "too costly:"),
    "a{3,7}": (0.698970, ""),
    "a{7}": (0.000000, ""),
    "a{0,200}": (2.004321, ""),
    "a{150,200}": (0.000000, ""),
    "(?=a*)(b|c)*": (4.008643, ""),
    "(?<=ab)c?": (0.301030, ""),
    "(?:a|b*){2,4}": (9.698527, "too costly:"),
    "[a-z]*[0-9]+": (4.004321, ""),
    "(x*)(y*)(z*)": (6.012964, ""),
    "(?P<n>a?)(?(n)b|c)": (0.301030, ""),
    "a*?": (2.004321, ""),
    "a{5,}": (1.982271, ""),
    "((a|b)*c){3}": (6.012964, ""),
    "(a{1,3}){1,3}": (1.908485, ""),
    "(a{1,3}){4}": (1.908485, ""),
    "a|b|c|d|e|f|g|h|i|j|k": (0.000000, ""),
    "(?i:a*)": (2.004321, ""),
    "(?>a*)": (2.004321, ""),
    "a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?": (6.020600, ""),
    "(.*)x(.*)": (4.008643, ""),
}
"""Expression to the decimal digits of the ways in which it matches, and how it is refused."""


def worked_out(cls: type) -> tuple[str, ...]:
    """Names of the properties; attrs makes slots of those that are cached."""
    given = {field.name for field in fields(cls)}
    cached = (name for name in vars(cls)["__slots__"] if not name.startswith("__") and name not in given)
    return (*cached, *(name for name, value in vars(cls).items() if isinstance(value, property)))


def shown(value: object) -> str:
    """The same text for equal values, whatever the order of a set."""
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(brief, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{brief(key)}: {shown(held)}' for key, held in value.items())}}}"
    return brief(value)


def properties(cfg: c.Config, facts: Facts) -> dict[str, object]:
    """Every property by name, and what becomes of it: the steps of the plan, and what is found."""
    resolved = Resolved(cfg=cfg, facts=facts)
    found: dict[str, object] = {}
    for part, cls in PARTS.items():
        for name in worked_out(cls):
            if name in PARTS or (name == "deepspeed" and not isinstance(cfg.engine, c.DeepSpeed)):
                continue
            with suppress(AssertionError, LookupError, TypeError, ValueError):  # an engine that has no such thing
                found[f"{part}.{name}".strip(".")] = getattr(getattr(resolved, part) if part else resolved, name)
    return found


def lines(cfg: c.Config, facts: Facts) -> Iterator[str]:
    """Every property that holds something, by name."""
    for name, value in properties(cfg, facts).items():
        if (text := shown(value)) not in ("()", "{}", "None", "False", "0", "''"):
            yield f"  {name}: {text}"


def items(cfg: c.Config, facts: Facts) -> list[str]:
    """What the properties hold, piece by piece; then the plan's steps and what warns, or the rules that refuse it."""
    made = planner.plan(cfg, facts)
    held = [f"{name}: {item}" for name, value in properties(cfg, facts).items() for item in _pieces(value)]
    if not isinstance(made, Success):
        return [*held, *(f"refused by {one.rule}" for one in errors(made.failure()))]
    plan = made.unwrap()
    steps = [brief(one.step) for one in plan.steps if not isinstance(one.step, InitializeDeepSpeed)]
    return [*held, *steps, *(f"warned by {one.rule}" for one in plan.warnings)]


def _pieces(value: object) -> list[str]:
    if isinstance(value, WorkingConfig):
        held = {field.name: getattr(value, field.name) for field in fields(type(value))}
        return [f"{name}: {piece}" for name, inner in held.items() for piece in _pieces(inner)]
    if isinstance(value, Mapping):
        return [f"{brief(key)}: {shown(held)}" for key, held in value.items()]
    if isinstance(value, tuple | frozenset | set):
        return sorted(map(shown, value)) if not isinstance(value, tuple) else [*map(shown, value)]
    return [shown(value)]


def around(cfg: c.Config, facts: Facts) -> Iterator[str]:
    """What a change of one value adds that no change above adds, and how much it takes away."""
    usual, before = items(cfg, facts), set[str]()
    for place, other, changed in neighbours.asked(cfg, facts):
        now = dict.fromkeys(items(other, changed))
        anew = [item for item in now if item not in usual and item not in before]
        gone = sum(item not in now for item in dict.fromkeys(usual))
        if anew or gone:
            yield f"{place}: {f'{gone} less' if gone else 'nothing less'}{''.join(f'; {item}' for item in anew)}"
        before.update(anew)


@pytest.mark.parametrize("name", CASES)
def test_what_is_worked_out_reads_as_it_did(name: str) -> None:
    cfg, facts = asked(*CASES[name])
    text = "\n".join((*lines(cfg, facts), *around(cfg, facts))) + "\n"
    assert_golden(GOLDEN / f"{name.replace(' ', '-')}.txt", text)


def test_float8_layers_and_norms_are_found_beside_what_stays_wide() -> None:
    cfg, facts = asked(*CASES["engine float8"])
    assert fp8.norms(cfg, facts.model) == ("norm",)
    assert fp8.norms(c.Config(), facts.model) == ()
    assert not fp8.has_engine_layers(facts.model)
    gathers = c.Config(engine=c.FSDP2(), precision=c.FP8(backend=c.TorchAO(float8_all_gather=True)))
    assert fp8.all_gather(gathers)
    assert not fp8.all_gather(cfg)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_expressions_cost_what_they_did(pattern: str) -> None:
    from re import _parser  # type: ignore[attr-defined]  # as the module itself

    digits, refused = PATTERNS[pattern]
    assert checkpoint._digits(_parser.parse(pattern)) == pytest.approx(digits, abs=1e-6)
    assert checkpoint.cost(pattern, "")[:11] == refused


def test_a_key_is_renamed_up_to_the_longest_name() -> None:
    longest = c.LoadWeights("x", rename=(("^", "a"), ("^", "b")))
    assert renamed(longest, "k" * 299)[:3] == "bak"
    assert renamed(longest, "k" * 300)[:2] == "ak"


def test_a_model_without_modules_of_a_kind_has_none() -> None:
    assert fp8.linears(ModelFacts(classes=(), modules=(), params=())) == ()


@pytest.mark.parametrize("sources", [1, 2, 3])
def test_stacks_that_lack_a_tensor_that_another_has_are_told_its_key(sources: int) -> None:
    """A single key of each may be numbered as it likes."""
    recipe = WeightConverter(sources=tuple(f"experts.*.{name}" for name in "abc"[:sources]), stack=0, join=1)
    held = [numbers for size in (1, 2, 3) for numbers in combinations(range(3), size)]
    for stacks in product(held, repeat=sources):
        stored = [_expert(number, source) for source, numbers in enumerate(stacks) for number in numbers]
        every = {number for numbers in stacks for number in numbers}
        lack = [f"`experts.{n}.{'abc'[source]}`" for source, own in enumerate(stacks) for n in sorted(every - {*own})]
        told = f"the checkpoint lacks {', '.join(lack[:3])}" if lack and max(map(len, stacks)) > 1 else ""
        assert assemble("experts", tuple(reversed(stored)), recipe).wrong == told


def _expert(number: int, source: int) -> StoredTensor:
    place = KeyMapping(name="experts", recipe=0, source=source, number=number)
    key = f"experts.{number}.{'abc'[source]}"
    return StoredTensor(key=key, dtype="float32", shape=(2, 2), file=0, start=0, length=16, place=place)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({}, ""),
        ({"dtype": "int8"}, "`experts.0.a` is float32, `experts.1.a` is int8"),
        ({"shape": (2, 2, 1)}, "`experts.0.a` is [2, 2], `experts.1.a` is [2, 2, 1]"),
        ({"shape": (2, 3)}, "`experts.0.a` is [2, 2], `experts.1.a` is [2, 3]"),
    ],
)
def test_tensors_that_cannot_be_stacked_are_named_with_what_differs(other: dict[str, Any], told: str) -> None:
    stored = (_expert(0, 0), evolve(_expert(1, 0), **other))
    assert assemble("experts", stored, WeightConverter(sources=("experts.*.a",), stack=0)).wrong == told


def test_methods_of_known_names_are_entry_points_unless_the_config_names_its_own() -> None:
    model = evolve(tiny_model(), methods=("own", *WELL_KNOWN, "other"))
    assert entry_points.named(c.Config(), model) == WELL_KNOWN
    assert entry_points.named(c.Config(entry_points=("own",)), model) == ("own",)
    assert entry_points.named(c.Config(entry_points=()), model) == ()
