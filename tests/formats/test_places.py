"""A finding names the line and column at which the error was planted."""

from __future__ import annotations

import json
import random
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from ruamel.yaml import YAML

from prepkit.cli.examined import examined
from prepkit.cli.options import Cluster
from prepkit.formats.importers.composed import DEEPEST, composed
from prepkit.formats.importers.positions import _below, plain_json, positions

NOWHERE = Cluster()
CONFIGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("prepkit", {"engine": {"kind": "FSDP2", "wrap": {"kind": "WrapClasses", "names": ["A", "B"]}}, "accumulation": 2,
        "clip": {"kind": "ClipNorm", "max_norm": 1.0}, "precision": {"kind": "BF16"}, "mesh": {"replicate": 2}}),
    ("deepspeed", {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2, "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True}}, "bf16": {"enabled": True}}),
    ("accelerate", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 4,
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False, "fsdp_state_dict_type": "FULL_STATE_DICT"}}),
)  # fmt: skip


def spelt(data: dict[str, Any], suffix: str, draw: random.Random) -> str:
    if suffix == ".json":
        return json.dumps(data, indent=draw.choice([None, 1, 2, 4, "\t"]))
    if suffix == ".toml":
        if draw.random() < 0.5:
            return tomli_w.dumps(data)
        lines = [f"{name} = {_inline(value)}" for name, value in data.items()]
        return "# first\n\n" + "  # why\n".join(lines) + "\n"
    out, yaml = StringIO(), YAML(typ="safe", pure=True)
    yaml.default_flow_style = draw.choice([False, None, True])
    yaml.dump(data, out)
    return f"# first\n{out.getvalue()}"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_inline(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)


def _planted(data: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str]:
    """The data with a key that nobody knows beside some key, at any depth."""
    copy = json.loads(json.dumps(data))
    places = [copy]
    for place in places:
        places += [value for value in place.values() if isinstance(value, dict)]
    place = draw.choice(places)
    items = list(place.items())
    items.insert(draw.randrange(len(items) + 1), ("zq_planted", 3))
    place.clear()
    place.update(items)
    return copy, "zq_planted"


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json"])
@pytest.mark.parametrize(("kind", "data"), CONFIGS, ids=[kind for kind, _ in CONFIGS])
def test_a_planted_key_is_found_where_it_stands(kind: str, data: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    draw, right, tries = random.Random(f"{kind}{suffix}"), 0, 25
    for _ in range(tries):
        bent, key = _planted(data, draw)
        text = spelt(bent, suffix, draw)
        file = tmp_path / f"c{suffix}"
        file.write_text(text)
        at = text.index(f'"{key}"' if f'"{key}"' in text else key)
        there = (text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))
        (one,) = examined((str(file),), NOWHERE, kind)
        right += there in {(place.line, place.column) for place, finding in one.findings if key in f"{place} {finding}"}
    assert right == tries


WRONG: tuple[Any, ...] = ("zq_wrong", -7, ["zq_wrong"], {"zq_wrong": 1})


def _leaves(data: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [(*above, name) for name, value in data.items() if not isinstance(value, dict)]
    return inner + [
        path for name, value in data.items() if isinstance(value, dict) for path in _leaves(value, (*above, name))
    ]


def _key_at(text: str, path: tuple[str, ...]) -> tuple[int, int]:
    """Line and column of the last of the path's names, each looked for behind the one before."""
    at = -1
    for name in path:
        at = next(
            found.start()
            for found in re.finditer(rf"[\"']?\b{name}\b[\"']?(?=\]?\s*[:=\].])", text)
            if found.start() > at
        )
    begin = text.rfind("\n", 0, at) + 1
    return text.count("\n", 0, at) + 1, 1 if text[
        begin
    ] == "[" else at - begin + 1  # a table stands where its header does


def test_a_wrong_value_of_any_key_is_told_at_that_key(tmp_path: Path) -> None:
    """Errors of all kinds: types, words, ranges, and rules that the value offends; 99 % are told where they stand."""
    right = told = 0
    for kind, data in CONFIGS:
        for suffix in (".toml", ".yaml", ".json"):
            draw = random.Random(f"wrong {kind}{suffix}")
            for path in _leaves(data):
                for value in draw.sample(WRONG, 2):
                    bent = json.loads(json.dumps(data))
                    place = bent
                    for part in path[:-1]:
                        place = place[part]
                    place[path[-1]] = value
                    text = spelt(bent, suffix, draw)
                    file = tmp_path / f"c{suffix}"
                    file.write_text(text)
                    (one,) = examined((str(file),), NOWHERE, kind)
                    there = {(place.line, place.column) for place, _ in (*one.findings, *one.beyond)}
                    told += bool(there)
                    right += _key_at(text, path) in there
    assert told > 100
    assert right >= 0.99 * told


def test_json_is_gone_through_as_the_yaml_that_it_also_is() -> None:
    draw = random.Random("as yaml")
    texts = [spelt(_planted(data, draw)[0], ".json", draw) for _, data in CONFIGS for _ in range(10)]
    texts += [
        '{"a" : 1, "b": [ {"c.d": "x: {y}, [z]"}, 3,\n[4]], "e": {}, "f":\n{"g": null}}',
        "[1, {}]",
        "{}",
        '"a"',
    ]
    for text in texts:
        assert positions(text, ".json") == positions(text.replace("\t", " "), ".yaml"), text
    assert positions('{// a: 1\n"b": 2, /* "c": */ "d": 3,}', ".json") == {"b": (2, 1), "d": (2, 20)}
    assert positions('{"a"\n: [1]}', ".json") == {"a": (1, 2), "a.0": (2, 4)}


def test_a_text_of_toml_is_gone_through_as_its_reader_does() -> None:
    text = """a.b = 1 # [c]
c = \"\"\"
[no] = 2
\"\"\"
[[loaders]]
name = "x"
[[loaders]]
"name" = [ # two
  { k = 1 },
]
[loaders.in]
z = '''
q = 1'''
"""
    assert positions(text, ".toml") == {
        "a": (1, 1), "a.b": (1, 1), "c": (2, 1), "loaders": (7, 1), "loaders.0": (5, 1), "loaders.0.name": (6, 1),
        "loaders.1": (7, 1), "loaders.1.name": (8, 1), "loaders.1.name.0": (9, 3), "loaders.1.name.0.k": (9, 5),
        "loaders.1.in": (11, 1), "loaders.1.in.z": (12, 1),
    }  # fmt: skip


def test_keys_of_json_stand_where_a_reader_of_yaml_finds_them() -> None:
    draw = random.Random(3)
    words = ["a", "b c", "d.e", "é", 'q"r', "", "{,", "0"]

    def value(depth: int) -> object:
        match draw.randrange(9) if depth < 5 else 0:
            case 0 | 1 | 2 | 3:
                return draw.choice([1, None, True, "x", "a,{b", -0.5, "", [], {}, 'q"\\'])
            case 4 | 5 | 6:
                return {draw.choice(words): value(depth + 1) for _ in range(draw.randrange(5))}
        return [value(depth + 1) for _ in range(draw.randrange(4))]

    for _ in range(100):
        text = json.dumps({"x": value(0), "y": value(0)}, indent=draw.choice([None, 1, 3]))
        text = text.replace("{", "{ // as it was\n", draw.randrange(2))
        node = composed(plain_json(text))
        assert node is not None
        assert positions(text, ".json") == dict(_below(node, "", set()))


@pytest.mark.parametrize(
    "text", ["{", "[1", '{"a":', "{]}", "}}}{", "[[[[", '{"a" 3, 4, : , }', '{"a":1}}', "", '{"a": "']
)
def test_places_of_what_is_no_json_are_had_as_far_as_it_goes(text: str) -> None:
    assert set(positions(text, ".json")) <= {"a", "0", "0.0", "0.0.0", "0.0.0.0", "4"}


def test_a_json_that_goes_deeper_than_any_config_takes_neither_time_nor_memory() -> None:
    assert len(positions("[" * 1_000_000, ".json")) == DEEPEST
    assert len(positions('{"a":' * 1_000_000, ".json")) <= DEEPEST + 1
