"""The schemas and the readers agree: on files that are drawn, and on the same ones bent.

``python -m tests.formats.test_schemas 100000 [SEED [NAME ...]]`` tries so many files of each name.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import NonInteractiveExampleWarning

from prepkit import codec
from prepkit.config import Config, DeepSpeed
from prepkit.findings import PlanRejected
from prepkit.formats.importers.accelerate import TYPES, asked_for, read_accelerate
from prepkit.formats.importers.native import read_prepkit
from prepkit.formats.importers.source import Source
from prepkit.formats.schemas import SCHEMAS
from prepkit.resolve.deepspeed.flaws import Draft
from prepkit.resolve.deepspeed.keys import OPEN, SECTIONS
from prepkit.resolve.deepspeed.schema import LIMITS, tidy, within_limits
from prepkit.testing.strategies.configs import configs
from prepkit.testing.tiny import tiny_facts
from tests.support.command_line import run
from tests.support.drawn_part import THOROUGH
from tests.support.plans import PLANS

jsonschema = pytest.importorskip("jsonschema")

BENT: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    7,
    0.5,
    -0.5,
    1e30,
    2**70,
    "",
    "x",
    "auto",
    "DDP",
    "None",
    [],
    ["x"],
    [1, 2],
    {},
)
"""What is put where something else stood. No float without a fraction: JSON Schema counts it as an integer."""


def bend(data: Any, draw: random.Random) -> Any:
    """The data with one change somewhere: another value, a key renamed, left out or added."""
    if isinstance(data, dict) and data and draw.random() < 0.85:
        key = draw.choice(list(data))
        match draw.randrange(6):
            case 0:
                return {name: value for name, value in data.items() if name != key}
            case 1:
                return {(f"{name}_" if name == key else name): value for name, value in data.items()}
            case 2:
                return data | {draw.choice(("kind", "name", "more", "a.b", "_comment")): draw.choice(BENT)}
            case _:
                return data | {key: bend(data[key], draw)}
    if isinstance(data, list) and data and draw.random() < 0.7:
        at = draw.randrange(len(data))
        return [*data[:at], bend(data[at], draw), *data[at + 1 :]]
    return draw.choice(BENT)


def config_is_read(data: dict[str, Any]) -> bool:
    """Whether the reader of config files takes it."""
    try:
        read_prepkit(Source("x.json", json.dumps(data), ".json"))
    except PlanRejected:
        return False
    return True


def deepspeed_is_read(data: dict[str, Any]) -> bool:
    """Whether keys, types and limits are taken as DeepSpeed takes them."""
    draft = Draft(cfg=Config(engine=DeepSpeed()), facts=tiny_facts(), data=json.loads(json.dumps(data)))
    tidy(draft)
    within_limits(draft)
    return not draft.flaws


def drawn_configs(count: int, start: int) -> Iterator[dict[str, Any]]:
    """Data of drawn configs."""
    found: list[Config] = []

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(configs())
    def draw(config: Config) -> None:
        found.append(config)

    draw()
    for config in found[:count]:
        yield codec.to_data(evolve(config, origins=()))


_VALUES = {
    "bool": (True, False),
    "int": (0, 1, 64, 500000000),
    "float": (0, 0.5, 1),
    "text": ("cpu", "bf16", "Warn", "x"),
    "list": ([], ["x"]),
}


def drawn_deepspeed(count: int, start: int) -> Iterator[dict[str, Any]]:
    """Configs of DeepSpeed, drawn from the table of keys."""
    draw = random.Random(start)

    def section(path: str) -> dict[str, Any]:
        known = SECTIONS.get(path, {})
        keys = draw.sample(sorted(known), min(len(known), draw.randrange(7)))
        return {key: value(f"{path}.{key}" if path else key, known[key]) for key in keys}

    def value(path: str, kinds: str) -> Any:
        kind = draw.choice(kinds.split("|"))
        if kind == "map":
            return {} if path in OPEN else section(path)
        if draw.random() < 0.1 or kind == "any":
            return draw.choice(("auto", None))
        return draw.choice((*_VALUES[kind], *LIMITS.get(path, ())))

    for _ in range(count):
        yield section("")


WRONG = {"import.unknown-key", "import.wrong-type", "import.wrong-value"}
"""What a schema can see. Values that contradict each other, or that prepkit does not do, are right one by one."""


def accelerate_is_read(data: dict[str, Any]) -> bool:
    """Whether keys, types and words are taken as accelerate's reader takes them."""
    try:
        read_accelerate(Source("x.json", json.dumps(data), ".json"))
    except PlanRejected as refused:
        return not WRONG.intersection(finding.rule for finding in refused.findings)
    return True


_GIVEN: dict[str, tuple[Any, ...]] = {
    "flag": (True, False, 0, 1, "yes", "False", " on ", "n"),
    "whole": (1, 2, 8, 4096, "2", "16", "4.0"),
    "number": (1, 0.5, 1e-3, "1.5", "1e3"),
    "names": ("Block", "Block,Other", ["Block"], []),
    "section": (None, {}, {"x": 1}),
    "text": ("x", ""),
    "raw": ("x", "", 1, [1], {"x": 1}),
}
"""A way of asking for a key to values that it takes, or does not look at."""


def _given(draw: random.Random, way: tuple[str, ...]) -> Any:
    if draw.random() < 0.1:
        return None
    if way[0] != "word":
        return draw.choice(_GIVEN[way[0]])
    place = draw.randrange(1, len(way))
    word = way[place]
    return draw.choice((word, word.lower(), word.upper(), f"Kind.{word}", place, str(place)))


def drawn_accelerate(count: int, start: int) -> Iterator[dict[str, Any]]:
    """Launch configs, drawn from what the reader asks for: each way of asking has its values."""
    draw = random.Random(start)
    probes = [
        {"distributed_type": kind, "mixed_precision": "fp8", "fsdp_config": {"fsdp_version": version}}
        | {section: {"": 1} for section in ("deepspeed_config", "dynamo_config", "fp8_config", "parallelism_config")}
        for kind in TYPES
        for version in (1, 2)
    ]
    asked = [file.asked for file in map(asked_for, probes)]

    for _ in range(count):
        at = draw.randrange(len(asked))
        known, data = asked[at], {"distributed_type": probes[at]["distributed_type"]}
        for name in draw.sample(sorted(known), draw.randrange(min(len(known), 12))):
            section, _, key = name.rpartition(".")
            if section and isinstance(data.setdefault(section, {}), dict):
                short = key.removeprefix("fsdp_").removeprefix("dynamo_") if draw.random() < 0.2 else key
                if not {short, key} & data[section].keys():
                    data[section][short] = 2 if key == "fsdp_version" and at % 2 else _given(draw, known[name])
            elif not section and name not in data:
                data[name] = _given(draw, known[name])
        yield data


READERS: dict[str, tuple[Callable[[int, int], Iterator[dict[str, Any]]], Callable[[dict[str, Any]], bool]]] = {
    "config": (drawn_configs, config_is_read),
    "deepspeed": (drawn_deepspeed, deepspeed_is_read),
    "accelerate": (drawn_accelerate, accelerate_is_read),
}


def disagreements(name: str, count: int, start: int = 0) -> tuple[list[dict[str, Any]], Counter[bool]]:
    """Files that schema and reader judge otherwise, and how many were taken and refused: one drawn, nine bent."""
    validator = jsonschema.Draft202012Validator(SCHEMAS[name]())
    draw_files, is_read = READERS[name]
    draw, other, judged = random.Random(start + 1), [], Counter[bool]()
    for data in draw_files(max(1, count // 10), start):
        for bent in (data, *(bend(data, draw) for _ in range(9))):
            if not isinstance(bent, dict):
                continue
            taken = is_read(bent)
            judged[taken] += 1
            if validator.is_valid(bent) is not taken:
                other.append(bent)
    return other, judged


FILES = 5000 if THOROUGH else 500


@pytest.mark.parametrize("name", sorted(READERS))
def test_schema_and_reader_agree_on_drawn_and_bent_files(name: str) -> None:
    other, judged = disagreements(name, FILES)
    assert other == []
    assert min(judged[True], judged[False]) > 100


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_schema_is_one_and_the_command_prints_it(name: str) -> None:
    schema = SCHEMAS[name]()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(run("schema", name).stdout) == schema


@pytest.mark.parametrize("name", sorted(PLANS))
def test_plans_are_what_their_schema_says(name: str) -> None:
    data = json.loads(codec.plan_to_text(PLANS[name]()))
    validator = jsonschema.Draft202012Validator(SCHEMAS["plan"]())
    assert list(validator.iter_errors(data)) == []
    data["plan"]["steps"][0]["step"]["kind"] = "Nothing"
    assert not validator.is_valid(data)


def test_editors_see_what_a_field_means() -> None:
    inside = SCHEMAS["config"]()["properties"]
    assert inside["clip"]["description"].startswith("Gradient clipping, done by prepkit")


if __name__ == "__main__":
    warnings.simplefilter("ignore", NonInteractiveExampleWarning)
    wanted, begun = (*map(int, sys.argv[1:3]), *(100_000, 0)[len(sys.argv[1:3]) :])
    for each in sys.argv[3:] or sorted(READERS):
        differ, counted = disagreements(each, wanted, begun)
        print(f"{each}: {counted[True]} taken, {counted[False]} refused, {len(differ)} judged otherwise", flush=True)
        for one_file in differ[:5]:
            print(json.dumps(one_file)[:600], flush=True)
