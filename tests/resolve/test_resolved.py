"""Properties of ``Resolved`` as text, for a few configs and facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from attrs import fields

from prepkit import config as c
from prepkit.facts import ModelFacts
from prepkit.resolve import checkpoint, fp8
from prepkit.resolve.checkpoint import renamed
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.tensor_parallel import ShardedLayers
from prepkit.resolve.weight_sources import WeightSources
from prepkit.testing.tiny import PATH
from tests.support.drawn_runs import TP_LAYERS
from tests.support.golden import assert_golden
from tests.support.readable_plans import Settings, asked, brief

GOLDEN = Path(__file__).parent / "golden"
PARTS = {"": Resolved, "tp": ShardedLayers, "values": WeightSources}
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
    "float8": ("fsdp2", "", (("precision", c.FP8()), ("compile", c.CompileBlocks()))),
    "engine float8": (
        "ddp",
        "a norm with a bias",
        (("precision", c.FP8(backend=c.TransformerEngine())),),
    ),
    "zero": ("zero", "scheduler and two loaders", (("engine.stage", 3), ("global_batch", 64), ("precision", c.BF16()))),
}
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


def lines(engine: str, model: str, settings: Settings) -> Iterator[str]:
    """Every property that holds something, by name."""
    resolved = Resolved(cfg=asked(engine, model, settings)[0], facts=asked(engine, model, settings)[1])
    for part, cls in PARTS.items():
        for name in worked_out(cls):
            if name in PARTS or (name == "deepspeed" and engine != "zero"):
                continue
            try:
                value = getattr(getattr(resolved, part) if part else resolved, name)
            except (AssertionError, LookupError, TypeError, ValueError):  # an engine that has no such thing
                continue
            if (text := shown(value)) not in ("()", "{}", "None", "False", "0", "''"):
                yield f"  {f'{part}.{name}'.strip('.')}: {text}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_worked_out_reads_as_it_did(name: str) -> None:
    text = "\n".join(lines(*CASES[name])) + "\n"
    assert_golden(GOLDEN / f"{name.replace(' ', '-')}.txt", text)


def test_float8_layers_and_norms_are_found_beside_what_stays_wide() -> None:
    cfg, facts = asked(*CASES["engine float8"])
    assert fp8.norms(cfg, facts.model) == ("norm",)
    assert fp8.norms(c.Config(), facts.model) == ()
    assert not fp8.has_engine_layers(facts.model)
    gathers = c.Config(engine=c.FSDP2(), precision=c.FP8(backend=c.TorchAO(float8_all_gather=True)))
    assert fp8.all_gather(gathers)
    assert not fp8.all_gather(cfg)


def test_expressions_cost_what_they_did() -> None:
    def digits(pattern: str) -> str:
        from re import _parser  # type: ignore[attr-defined]  # as the module itself

        return f"{checkpoint._digits(_parser.parse(pattern)):.6f} {checkpoint.cost(pattern, '')[:11]}"

    assert_golden(GOLDEN / "expressions.txt", "".join(f"{one!r:.40}: {digits(one)}\n" for one in PATTERNS))


def test_a_key_is_renamed_up_to_the_longest_name() -> None:
    longest = c.LoadWeights("x", rename=(("^", "a"), ("^", "b")))
    assert renamed(longest, "k" * 299)[:3] == "bak"
    assert renamed(longest, "k" * 300)[:2] == "ak"


def test_a_model_without_modules_of_a_kind_has_none() -> None:
    assert fp8.linears(ModelFacts(classes=(), modules=(), params=())) == ()
