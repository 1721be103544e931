"""Every value that differs from a given one in one field: what a rule is asked beside its counterexample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from attrs import NOTHING, evolve, has

from prepkit.codec import field_types
from prepkit.config import Config
from prepkit.facts import (
    BufferFact,
    Facts,
    GroupFact,
    LoaderFacts,
    MemberFact,
    ModuleFact,
    OptimizerFacts,
    ParamFact,
    SchedulerFacts,
    UnitFact,
)
from prepkit.testing import tiny_loader
from prepkit.testing.tiny import LIBRARIES

TEXTS: dict[str, tuple[str, ...]] = {
    "device": ("cpu", "cuda", "xpu", "mps", "xla"),
    "torch": ("2.6.0", "2.9.1", "2.13.0", "2.14.0", ""),
    "dtype": ("float32", "bfloat16", "float16", "uint8", "int64"),
    "cls": ("Parameter", "DTensor", "Params4bit", "Int8Params"),
    "quantised": ("", "4bit", "8bit"),
    "prepared": ("", "accelerate"),
}
"""What else a field of that name may say."""
PLAIN: dict[type, tuple[Any, ...]] = {bool: (True, False), float: (0.0, 0.5, 1.0, 2.0), type(None): (None,)}
SAMPLES: dict[type, Any] = {
    BufferFact: BufferFact(name="table", shape=(3,), dtype="float32"),
    GroupFact: GroupFact(slots=("embed.weight",)),
    LoaderFacts: tiny_loader(),
    MemberFact: MemberFact(name="SGD", module="torch.optim.sgd", groups=1),
    ModuleFact: ModuleFact(path="extra", cls=4),
    OptimizerFacts: OptimizerFacts(name="SGD", module="torch.optim.sgd", groups=(GroupFact(slots=("embed.weight",)),)),
    ParamFact: ParamFact(name="extra", shape=(2, 2), dtype="float32"),
    SchedulerFacts: SchedulerFacts(name="StepLR", drives_optimizer=True),
    UnitFact: UnitFact(path="", ranks=2),
}
"""One of each class that has no default of its own."""
COUNTED = frozenset({"classes", "files", "recipes", "cls", "file", "recipe"})
"""Tables, and the places in them that other facts name: a table of another length would fit no facts."""
Place = tuple[str, ...]


def asked(cfg: Config, facts: Facts) -> Iterator[tuple[str, Config, Facts]]:
    """Every neighbour of the config, and of the facts, with the place where it differs."""
    for place, other in neighbours(cfg, Config):
        yield ".".join(("config", *place)), other, facts
    for place, changed in neighbours(facts, Facts):
        if possible(changed):
            yield ".".join(place), cfg, changed


def possible(facts: Facts) -> bool:
    """Whether a model in some process could have been seen so."""
    model, optimizer = facts.model, facts.optimizer
    names = {param.name for param in model.params}
    paths = {module.path for module in model.modules}
    return (
        facts.env.world_size > 0
        and bool(model.modules)
        and not model.modules[0].path
        and all(tied and tied[0] in names for tied in model.ties)
        and all(name.rpartition(".")[0] in paths for name in names)
        and all(param.shape or param.cls != "DTensor" for param in model.params)
        and all(unit.reshard_after_forward is False or unit.reshard_after_forward > 0 for unit in model.units)
        and all(loader.batch_size != 0 for loader in facts.loaders)
        and (optimizer is None or sum(one.groups for one in optimizer.classes) == len(optimizer.groups) > 0)
    )


def neighbours(value: Any, cls: Any, name: str = "") -> Iterator[tuple[Place, Any]]:
    """Where it differs, and the other value. ``cls`` is the type of the field called ``name``."""
    for other in () if name in COUNTED and cls is not str else others(value, cls, name):
        if type(other) is not type(value) or other != value:
            yield (short(other),), other
    if has(type(value)) or hasattr(value, "_fields"):
        yield from _fields(value)
    elif isinstance(value, tuple):
        yield from _items(value, cls)


def others(value: Any, cls: Any, name: str) -> Iterator[Any]:
    """Other values of the type, a few of each kind."""
    if field_types.is_union(cls):
        for member in get_args(cls):
            if not has(member) or not isinstance(value, member):
                yield from others(None if has(member) else value, member, name)
    elif field_types.is_choice(cls):
        named = field_types.choices(cls)
        yield from map(cls, named) if isinstance(cls, type) else named
    elif cls is str:
        yield from TEXTS.get(name, ("",))
    elif cls is int:
        yield from (0, 1, 2, 3, value + 1 if isinstance(value, int) else 8)
    elif cls in PLAIN:
        yield from PLAIN[cls]
    elif name == "libraries" and not has(cls):
        yield from ((), LIBRARIES)
    elif field_types.is_tuple(cls):
        yield from _tuples(value, cls)
    elif has(cls) and all(field.default is not NOTHING for field in field_types.fields(cls)):
        yield cls()
    elif cls in SAMPLES and value is None:
        yield SAMPLES[cls]


def _tuples(value: Any, cls: Any) -> Iterator[Any]:
    item = get_args(cls)[0]
    held = value if isinstance(value, tuple) else ()
    if Ellipsis not in get_args(cls):
        return
    yield ()
    if held:
        yield held[:1]
        yield held[1:]
        yield (*held, held[-1])
    if item in SAMPLES:
        yield (*held, SAMPLES[item])


def _fields(value: Any) -> Iterator[tuple[Place, Any]]:
    """One field changed, of a class of attrs or of a named tuple."""
    named = hasattr(value, "_fields")
    kinds = get_type_hints(type(value)) if named else {one.name: one.type for one in field_types.fields(type(value))}
    for field, kind in kinds.items():
        for place, other in neighbours(getattr(value, field), kind, field):
            try:
                changed = value._replace(**{field: other}) if named else evolve(value, **{field: other})
            except (TypeError, ValueError):  # what the class refuses is nobody's neighbour
                continue
            yield (field, *place), changed


def _items(value: tuple[Any, ...], cls: Any) -> Iterator[tuple[Place, Any]]:
    """One item changed: the first, the last, or all alike."""
    kinds = get_args(cls) if not field_types.is_union(cls) else ()
    for index in sorted({0, len(value) - 1}) if kinds and value else ():
        kind = kinds[0] if Ellipsis in kinds else kinds[index]
        for place, other in neighbours(value[index], kind):
            yield (str(index), *place), (*value[:index], other, *value[index + 1 :])


def short(value: Any) -> str:
    """A value in a word or two."""
    text = type(value).__name__ if has(type(value)) else repr(value)
    return text if len(text) <= 24 else f"{text[:20]}…"
