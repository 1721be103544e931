"""Where each number is refused: each of a config and its facts, climbed from below the least to above the most.

``golden/limits.txt`` has for each number the rules that speak, with the rungs at which they do: a limit that moves by
one, or that begins to count its own value, changes a line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from math import inf, nan
from operator import itemgetter
from pathlib import Path
from typing import Any

from attrs import evolve, fields, has

from prepkit import config as c
from prepkit.facts import Facts, LoaderFacts
from prepkit.resolve.resolved import Resolved
from prepkit.rules import findings_of
from tests.support.golden import assert_golden
from tests.support.readable_plans import CASES, Settings, asked

GOLDEN = Path(__file__).parent / "golden" / "limits.txt"
WHOLE: dict[str, Any] = {
    **{str(number): number for number in (-2, -1, 0, 1, 2, 3, 4, 5, 8, 16, 17, 63, 64, 65)},
    "2^31": 2**31,
    "2^63-1": 2**63 - 1,
    "2^63": 2**63,
}
"""Rungs of whole numbers; the loaders here have 64 samples, the models 2 blocks, the worlds 4 ranks."""
_NEAR = 2.0**-20
BROKEN: dict[str, Any] = {
    name: number
    for names, numbers in (
        (
            "-inf -1 -tiny 0 tiny 0.5 below-1 1 above-1",
            (-inf, -1.0, -_NEAR, 0.0, _NEAR, 0.5, 1 - _NEAR, 1.0, 1 + _NEAR),
        ),
        ("2 below-2^42 2^42 1e300 inf nan", (2.0, 2.0**42 - 1, 2.0**42, 1e300, inf, nan)),
    )
    for name, number in zip(names.split(), numbers, strict=True)
}
"""Rungs of numbers with a fraction."""
ENVIRONMENT: dict[str, tuple[Any, ...]] = {
    "world_size": (0, 1, 2, 3, 4, 5, 8),
    "per_node": (1, 2, 3, 4, 8),
    "memory": (1, 10_000, 40_000, 160_000, 10**9),
    "capability": ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)),
    "torch": tuple(f"2.{minor}.0" for minor in range(3, 15)),
}
MORE: tuple[tuple[str, str, Settings], ...] = (
    (
        "ddp",
        "",
        (("precision", c.FP16(growth_interval=7)), ("engine.bucket_cap_mb", 30.0), ("compile", c.CompileModel())),
    ),
    ("ddp", "", (("checkpointing", c.CheckpointBlocks(every=2)), ("weights", c.InitWeights(seed=3)))),
    ("ddp", "", (("engine.hook", c.PowerSGDHook(use_error_feedback=False, warm_start=False)),)),
    ("fsdp2", "", (("compile", c.CompileBlocks(recompile_limit=8)), ("engine.reshard_after_forward", 2))),
    ("fsdp2", "scheduler and two loaders", (("scheduler_ticks", 2), ("total_steps", 50), ("accumulation", 2))),
    ("fsdp2", "", (("loaders", c.ShardLoaders(purpose="evaluation")), ("global_batch", 16))),
    ("zero", "", (("precision", c.FP16()), ("engine.micro_batch", 2), ("clip", c.ClipNorm(1.0)))),
)
"""Engine, model and settings of numbers that no plan there has."""
FLOAT8: Settings = (("precision", c.FP8(backend=c.TorchAO())),)
ENVIRONMENTS = (*((engine, *cases[1]) for engine, cases in CASES.items()), ("fsdp2", "", FLOAT8))


def bases() -> Iterator[tuple[str, c.Config, Facts]]:
    for engine, model, settings in (*MORE, *((engine, *case) for engine, cases in CASES.items() for case in cases)):
        cfg, facts = asked(engine, model, settings)
        yield engine, cfg, facts


def numbers(value: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Every number below a value: its place, it itself, and how to put another one there."""
    for field in fields(type(value)):
        held = getattr(value, field.name)
        here = f"{place}.{field.name}"
        if type(held) in (int, float):
            yield here, held, lambda new, name=field.name: evolve(value, **{name: new})
        elif has(type(held)):
            for below, number, put in numbers(held, f"{here}.{type(held).__name__}"):
                yield below, number, lambda new, put=put, name=field.name: evolve(value, **{name: put(new)})


def spoken(cfg: c.Config, facts: Facts) -> frozenset[str]:
    return frozenset(f"{one.rule} at {one.where}" for one in findings_of(Resolved(cfg=cfg, facts=facts)))


def climbed(ladder: Mapping[str, Any], said: Callable[[Any], frozenset[str]]) -> Iterator[str]:
    """The rules that speak on some rungs and not on others, each with the first and last rung of every stretch."""
    outcomes = {name: said(value) for name, value in ladder.items()}
    for one in sorted(
        frozenset[str]().union(*outcomes.values()).difference(frozenset.intersection(*outcomes.values()))
    ):
        speaks = [(name, one in said_there) for name, said_there in outcomes.items()]
        stretches = ([name for name, _ in group] for there, group in groupby(speaks, itemgetter(1)) if there)
        yield f"  {one}: {', '.join(' to '.join(dict.fromkeys((names[0], names[-1]))) for names in stretches)}"


Climb = tuple[str, str, Mapping[str, Any], Callable[[Any], frozenset[str]]]
"""A number, its engine, its rungs, and what is said on one."""


def climbs() -> Iterator[Climb]:
    for engine, cfg, facts in bases():
        for place, number, put in numbers(cfg, "config"):
            yield place, engine, _ladder(number), partial(_asked, put, facts)
        for place, number, put in numbers(facts.loaders[0], "loader"):
            yield place, engine, _ladder(number), partial(_loaded, put, cfg, facts)
    for engine, model, settings in ENVIRONMENTS:
        cfg, facts = asked(engine, model, settings)
        title = f"{engine} in float8" if settings == FLOAT8 else engine
        for name, rungs in ENVIRONMENT.items():
            yield f"env.{name}", title, {str(rung): rung for rung in rungs}, partial(_placed, name, cfg, facts)


def _ladder(number: float) -> Mapping[str, Any]:
    return BROKEN if isinstance(number, float) else WHOLE


def _asked(put: Callable[[Any], c.Config], facts: Facts, rung: Any) -> frozenset[str]:
    return spoken(put(rung), facts)


def _loaded(put: Callable[[Any], LoaderFacts], cfg: c.Config, facts: Facts, rung: Any) -> frozenset[str]:
    return spoken(cfg, evolve(facts, loaders=(put(rung), *facts.loaders[1:])))


def _placed(name: str, cfg: c.Config, facts: Facts, rung: Any) -> frozenset[str]:
    return spoken(cfg, evolve(facts, env=evolve(facts.env, **{name: rung})))


def found() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Number, engine, and what is said of it there."""
    seen: set[tuple[str, str]] = set()
    for place, engine, ladder, said in climbs():
        if (engine, place) not in seen:
            seen.add((engine, place))
            yield place, engine, tuple(climbed(ladder, said))


def test_every_number_is_refused_where_it_was_when_somebody_last_read_it() -> None:
    engines: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for place, engine, lines in found():
        engines[place, lines].append(engine)
    told = (
        f"{place} of {', '.join(names)}\n{chr(10).join(lines)}\n" for (place, lines), names in engines.items() if lines
    )
    quiet = "".join(f"  {place}: {', '.join(names)}\n" for (place, lines), names in engines.items() if not lines)
    assert_golden(GOLDEN, f"{''.join(told)}no rule speaks of\n{quiet}")
