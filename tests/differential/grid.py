"""Which cases there are: everything that is at most two settings away from each engine's plain use, and drawn ones."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

from attrs import evolve

from tests.differential.case import Case

ENGINES = ("single", "ddp", "fsdp2", "fsdp1", "zero0", "zero1", "zero2", "zero3")
_COMMON: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp16", "fp8"),
    "compiled": ("whole", "regional"),
    "frozen": (True,),
    "tied": (True,),
    "optimizer": ("SGD",),
}
_FSDP: dict[str, tuple[Any, ...]] = {"wrap": ("class", "size"), "checkpointing": (True,)}
_ZERO: dict[str, tuple[Any, ...]] = {"unclipped": (True,)}


def settings(engine: str) -> dict[str, tuple[Any, ...]]:
    """What can be varied under an engine, without the usual value of each."""
    return _COMMON | (_FSDP if engine.startswith("fsdp") else _ZERO if engine.startswith("zero") else {})


def grid(engine: str) -> list[Case]:
    """The engine alone, with each setting, and with each two."""
    usual, varied = Case(engine=engine), settings(engine)
    cases = [usual]
    for count in (1, 2):
        for names in combinations(varied, count):
            chosen = product(*(varied[name] for name in names))
            cases += [evolve(usual, **dict(zip(names, values, strict=True))) for values in chosen]
    return cases


def drawn(engine: str, number: int, seed: int) -> list[Case]:
    """Cases with any number of settings, none twice and none of the grid."""
    draw = random.Random(f"{engine} {seed}")
    usual = Case(engine=engine)
    known, found = set(grid(engine)), list[Case]()
    while len(found) < number:
        chosen = {name: draw.choice((getattr(usual, name), *values)) for name, values in settings(engine).items()}
        case = evolve(usual, **chosen)
        if case not in known:
            known.add(case)
            found.append(case)
    return found
