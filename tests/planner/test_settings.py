"""What each setting changes in the readable plans: kinds of steps, layout, owners, bytes, findings.

``golden/settings.txt`` has a line for each field of the config, for all engines together. A field that changes nothing
has no line there, and has to be in ``CHANGES_NOTHING`` with a reason.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

from attrs import evolve, fields, has
from returns.result import Success

from prepkit import codec, planner
from prepkit import config as c
from prepkit.codec import field_types
from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.testing.tiny import PATH
from tests.support.golden import assert_golden
from tests.support.neighbours import neighbours
from tests.support.readable_plans import CASES, Settings, asked

OPEN = dict.fromkeys(("total_num_steps", "warmup_num_steps", "warmup_min_lr", "warmup_max_lr"), "auto")
SCHEDULED = json.dumps({"scheduler": {"type": "WarmupDecayLR", "params": OPEN}})
GOLDEN = Path(__file__).parent / "golden"
CHANGES_NOTHING: dict[str, str] = {
    "Config.overrides": "only a rule that refuses asks for it: property_tests/test_rule_laws.py",
    **dict.fromkeys((f"Origin.{name}" for name in ("setting", "key", "source", "line", "column")), "words of findings"),
    "Config.origins": "words of findings",
}
"""Field to the reason why no plan here changes with it."""


OPTIONS = (c.CompileOption(name="epilogue_fusion", value=True),)
OTHER: dict[str, Any] = {
    "adjust_lr_fn": "match_rms_adamw",
    "amax_compute_algo": "most_recent",
    "betas": (0.5, 0.6),
    "Config.backend": "cpu:gloo,cuda:nccl",
    "DelayedScaling.fp8_format": "E4M3",
    "MXFP8BlockScaling.fp8_format": "HYBRID",
    "groups": (c.Group(names=("*norm*",), lr=0.5),),
    "ignored": ("head",),
    "keep_ops": ("aten.mm",),
    "names": ("head",),
    "options": (c.CompileOption(name="max_autotune", value=True),),
    "CompileOption.name": "max_autotune",
    "override_linear_precision": (False, True, False),
    "paths": ("embed",),
    "patterns": ("layers.0",),
    "Muon.groups": (c.Group(names=("layers.0.*",), lr=0.5),),
    "Muon.lr": 0.5,
    "Muon.momentum": 0.5,
    "Muon.nesterov": False,
    "Muon.weight_decay": 0.5,
    "Group.lr": 0.5,
    "Group.weight_decay": 0.5,
    "TorchAO.recipe": "rowwise",
    "TransformerEngine.recipe": c.DelayedScaling(margin=2),
    "rename": (("^head", "tail"),),
    "skip": ("*.attn",),
}
"""Field, or class and field, to another value, where a text of no meaning would only be refused."""
MORE: tuple[tuple[str, str, Settings], ...] = (
    ("ddp", "device map", ()),
    *(("single", "", (("optimizer", one),)) for one in (c.Adafactor(), c.Adagrad(), c.Adam(), c.RMSprop(), c.SGD())),
    ("single", "", (("optimizer", (c.Muon(names=("layers.*",)), c.AdamW(groups=(c.Group(names=("*norm*",)),)))),)),
    ("fsdp2", "", (("engine.wrap", c.WrapClasses(("Block",), paths=("head",))), ("engine.offload", c.OffloadToCPU()))),
    ("fsdp2", "", (("engine.wrap", c.WrapPaths(("layers.*",))), ("weights", c.LoadWeights(PATH)))),
    ("ddp", "a norm with a bias", (("precision", c.FP8(backend=c.TransformerEngine(recipe=c.DelayedScaling()))),)),
    ("ddp", "a newer device", (("precision", c.FP8(backend=c.TransformerEngine(recipe=c.MXFP8BlockScaling()))),)),
    ("single", "device map", ()),
    ("zero", "loaders of two sizes", (("engine.leaf_modules", ("Block",)), ("engine.stage", 3))),
    ("zero", "", (("precision", c.FP8(backend=c.MSAMP())),)),
    ("fsdp2", "", (("weights", c.InitWeights(seed=3)), ("optimizer", c.AdamW()))),
    ("ddp", "", (("engine.hook", c.CompressHook()),)),
    ("ddp", "", (("engine.hook", c.PowerSGDHook(rank=4)),)),
    ("fsdp2", "", (("precision", c.FP8()), ("checkpointing", c.CheckpointBlocks()))),
    ("ddp", "", (("loaders", c.KeepLoaders()), ("compile", c.CompileBlocks(options=OPTIONS)))),
    ("ddp", "", (("compile", c.CompileModel(options=OPTIONS)),)),
    ("zero", "", (("engine.config", SCHEDULED), ("engine.schedule", c.Schedule(warmup_steps=3, total_steps=20)))),
)
"""Plans besides the readable ones, for the fields of classes that those do not have."""


def settings(cfg: Config) -> Iterator[tuple[str, Config]]:
    """Every config that differs in one field, with ``Class.field`` of the value that differs."""
    for place, other in neighbours(cfg, Config):
        if len(place) > 1:
            yield owner(cfg, place[:-1]), other
    yield from named(cfg)


def named(value: Any) -> Iterator[tuple[str, Any]]:
    """Every value that differs in one field of ``OTHER``, at any depth."""
    for field in fields(type(value)) if has(type(value)) else ():
        inner = getattr(value, field.name)
        name = f"{type(value).__name__}.{field.name}"
        if (other := OTHER.get(name, OTHER.get(field.name))) is not None:
            yield name, evolve(value, **{field.name: other})
        for name, other in named(inner):
            yield name, evolve(value, **{field.name: other})
        for index, item in enumerate(inner if isinstance(inner, tuple) else ()):
            for name, other in named(item):
                yield name, evolve(value, **{field.name: (*inner[:index], other, *inner[index + 1 :])})


def owner(value: Any, place: tuple[str, ...]) -> str:
    """Class and field that the last name of a place is of."""
    name = ""
    for part in place:
        if part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
            continue
        name = f"{type(value).__name__}.{part}"
        value = getattr(value, part, None)
    return name


def parts(cfg: Config, facts: Facts) -> dict[str, Any]:
    """What a plan consists of, by name; of a config without one, the rules that refuse it."""
    made = planner.plan(cfg, facts)
    if not isinstance(made, Success):
        return dict.fromkeys((f"refused by {one.rule}" for one in made.failure()), True)
    plan: Plan = made.unwrap()
    found = predict(plan)
    steps: dict[str, list[Any]] = defaultdict(list)
    for one in plan.steps:
        steps[type(one.step).__name__].append(one.step)
    return {
        **steps,
        **dict.fromkeys((f"warned by {one.rule}" for one in plan.warnings), True),
        **{f"run.{one.name}": getattr(plan.run, one.name) for one in fields(type(plan.run))},
        **{f"owners.{one.name}": getattr(plan.owners, one.name) for one in fields(type(plan.owners))},
        "mesh": plan.mesh,
        "layout": plan.layout,
        "memory": found.classes,
        "traffic": found.traffic,
    }


@cache
def changed() -> dict[str, set[str]]:
    """``Class.field`` to all that some other value of it changes in some plan."""
    found: dict[str, set[str]] = defaultdict(set)
    some = [(engine, *case) for engine, cases in CASES.items() for case in cases[:: 1 if engine == "xla" else 3]]
    for case in (*some, *MORE):
        cfg, facts = asked(*case)
        usual = parts(cfg, facts)
        for name, other in settings(cfg):
            now = parts(other, facts)
            refused = {one for one in now if one.startswith("refused")}
            differs = {one for one in {*usual, *now} if usual.get(one) != now.get(one)}
            found[name] |= refused - set(usual) or differs
    return found


def fields_below(cls: Any) -> Iterator[str]:
    """``Class.field`` of everything that a value of this type is made of."""
    for inner in get_args(cls):
        yield from fields_below(inner)
    for field in field_types.fields(cls) if has(cls) else ():
        yield f"{cls.__name__}.{field.name}"
        yield from fields_below(field.type)


def test_every_setting_changes_what_it_changed() -> None:
    lines = (f"{name}: {', '.join(sorted(parts))}\n" for name, parts in sorted(changed().items()) if parts)
    assert_golden(GOLDEN / "settings.txt", "".join(lines))


def test_every_setting_changes_a_plan_or_is_refused_or_has_a_reason_why_not() -> None:
    idle = {name for name in fields_below(Config) if not changed().get(name)}
    assert idle == set(CHANGES_NOTHING), "make use of it, or say in CHANGES_NOTHING why no plan changes with it"


def test_a_config_that_differs_in_nothing_has_the_same_plan() -> None:
    for engine, cases in CASES.items():
        cfg, facts = asked(engine, *cases[1])
        again = codec.from_data(codec.to_data(cfg), Config)
        assert parts(cfg, facts) == parts(again, facts)
