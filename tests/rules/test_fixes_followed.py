"""A fix that is followed to the letter mends: each way that it gives, on the counterexample of its rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
import torch
from attrs import evolve, fields, has

import prepkit as pk
from prepkit import config
from prepkit.config import Config
from prepkit.findings import Finding
from prepkit.rules import by_id, check
from tests.support.counterexamples import COUNTEREXAMPLES

NAMES: dict[str, Any] = {
    name: getattr(home, name)
    for home in (pk.track, pk.tp, pk.fp8, pk.ddp, pk.data, pk.optim, pk.wrap, config, pk)
    for name in dir(home)
    if not name.startswith("_")
}
"""What an expression of a fix may name."""
_WAYS = re.compile(r"; or |, or | or |; ")
_BEGINS = re.compile(r"(?<![\w.(\[\"])(?:(\w+)=|(?=[A-Z]\w+\())")
"""``name=``, or a call of a class: an engine that stands by itself."""
PARTS = {
    "deepspeed.max-grad-norm": "the rest is removed by hand",
    "deepspeed.packed": "the model is loaded anew too",
    "quantised.on-cpu": "another bitsandbytes is installed too",
}
"""Rules whose fix has a part that is no config, to why."""


def settings(way: str) -> Iterator[tuple[str, str]]:
    """Every setting of a text: its name (empty: an engine) and the expression; as long as Python reads it."""
    at = 0
    while found := _BEGINS.search(way, at):
        ends = (end for end in range(found.end() + 1, len(way) + 1) if _reads(way[found.end() : end]))
        last = next((end for end in ends if end == len(way) or way[end] in " ,;.:)"), None)
        if last is not None:
            yield found.group(1) or "", way[found.end() : last]
        at = last or found.end() + 1


def _reads(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


class Unsaid(ast.NodeTransformer):
    """``AdamW(...)`` is one with the user's own options: here it has the usual ones."""

    def visit_Call(self, node: ast.Call) -> ast.Call:  # the name that ast calls
        node.args = [one for one in node.args if not (isinstance(one, ast.Constant) and one.value is ...)]
        return node


def value_of(text: str) -> Any:
    """What an expression of a fix stands for. Raises ``LookupError`` where it is the user's own."""
    tree = Unsaid().visit(ast.parse(text, mode="eval"))
    if "..." in ast.unparse(tree):
        raise LookupError(text)
    try:
        return eval(compile(tree, "fix", "eval"), {**NAMES, "torch": torch})
    except (NameError, TypeError) as error:
        raise LookupError(text) from error


def written(cfg: Config, name: str, value: Any, where: str) -> list[Config]:
    """The config with a setting, in each place where it can stand: below the finding's own first."""
    if not name:
        kinds: dict[str, Any] = {"engine": config.Engine, "mesh": config.Mesh, "precision": config.Precision}
        return [evolve(cfg, **{at: value}) for at, kind in kinds.items() if isinstance(value, kind)]
    return list(_places(cfg, name, value, where.removeprefix("config.")))


def _places(holder: Any, name: str, value: Any, where: str) -> Iterator[Any]:
    mine = [one.name for one in fields(type(holder))]
    if name in mine and _takes(holder, name, value):
        yield evolve(holder, **{name: value})
    for inner in sorted(mine, key=lambda one: not where.startswith(one)):
        if has(type(held := getattr(holder, inner))):
            yield from (evolve(holder, **{inner: one}) for one in _places(held, name, value, where.partition(".")[2]))


def _takes(holder: Any, name: str, value: Any) -> bool:
    """Whether a field may have such a value: ``backend`` is one of a process group, of a compiler and of float8."""
    try:
        return isinstance(value, get_type_hints(type(holder))[name])
    except TypeError:  # as of ``tuple[str, ...]``
        return True


def followed(cfg: Config, way: str, where: str) -> list[Config]:
    """The configs that a way may mean. Empty: it tells nothing of a config, or leaves out what is the user's own."""
    ways = [cfg]
    told = False
    for name, text in settings(way):
        try:
            value = value_of(text)
        except LookupError:
            return []
        ways = [new for one in ways for new in written(one, name, value, where)]
        told = True
    return ways if told else []


def ways_of(rule: str) -> Iterator[tuple[Finding, str, list[Config], Any]]:
    cfg, facts = COUNTEREXAMPLES[rule]()
    finding = next(one for one in check(cfg, facts) if one.rule == rule)
    for way in _WAYS.split(finding.fix):
        if found := followed(cfg, way, finding.where):
            theirs = facts.optimizer if found[0].optimizer == cfg.optimizer else None  # else the config makes it
            yield finding, way, found, evolve(facts, optimizer=theirs)


def test_each_way_that_a_fix_gives_mends_the_counterexample_of_its_rule() -> None:
    tried, unmended = 0, list[str]()
    for rule in COUNTEREXAMPLES.keys() - PARTS.keys():
        for finding, way, configs, facts in ways_of(rule):
            tried += 1
            if f'overrides=("{rule}",)' in way:
                assert by_id()[rule].overridable
            elif all(rule in {one.rule for one in check(cfg, facts)} for cfg in configs):
                unmended.append(f"{finding.rule}: {way}")
    assert "\n".join(unmended) == ""
    assert tried > 120


@pytest.mark.parametrize("rule", PARTS)
def test_what_is_left_out_of_that_has_a_way_that_does_not_mend_by_itself(rule: str) -> None:
    assert any(
        all(rule in {one.rule for one in check(cfg, facts)} for cfg in configs)
        for _, _, configs, facts in ways_of(rule)
    )


def test_settings_are_read_out_of_sentences() -> None:
    assert list(settings("Write mesh=Mesh(replicate=2, shard=4).")) == [("mesh", "Mesh(replicate=2, shard=4)")]
    assert list(settings("write DeepSpeed(stage=2), with your own number")) == [("", "DeepSpeed(stage=2)")]
    assert list(settings("Name it once.")) == []
