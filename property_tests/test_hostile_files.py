"""Files that were written to do harm: findings come back and nothing else, whatever they name, however large they are.

Twenty files per example: 100,000 in the nightly profile. What Python does meanwhile is watched by an audit hook.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepkit.api import build_plan
from prepkit.cli.verdict import judge
from prepkit.codec import FORMAT, KIND, LARGEST, from_data, load_plan, plan_from_text, plan_to_text, to_data
from prepkit.codec.files import attestation_from_text, attestation_to_text
from prepkit.codec.text import canonical, digest_text
from prepkit.config import Config, DeepSpeed
from prepkit.facts import Facts
from prepkit.findings import PlanRejected
from prepkit.plan import Plan
from prepkit.plan.attestation import Asked, Attestation
from prepkit.render.text import text_of
from prepkit.testing import tiny_facts
from tests.support.plans import fsdp2_plan

PER_EXAMPLE = 20

HARM = frozenset({"import", "exec", "compile", "open", "os.system", "os.exec", "subprocess.Popen", "socket.connect"})
"""Events of ``sys.audit`` that reading a text never raises."""

PAYLOADS: tuple[Any, ...] = (
    *("os.system", "builtins.eval", "__import__('os')", "!!python/object/apply:os.system", "prepkit.cli:main"),
    *("__class__", "__reduce__", "../../etc/passwd", "\x00", "\ud800", "{{7*7}}", "%s" * 40, "Ω" * 500, "NaN", "1e999"),
    *("7", "0", "2.13", "9" * 5000),
    *(None, True, -1, 0, 2**63, -(2**70), 10**300, 1e308, 0.1, [], {}, [[]], [None] * 50),
    *({"kind": "os.system"}, {"kind": ["ls"]}, {"__class__": "os"}, {"kind": "Config", "kind ": 1}, {"": {}}),
)
SEEDS = (
    (plan_to_text(fsdp2_plan()), "plan"),
    (attestation_to_text(Attestation(asked=(Asked(rule="a", moment="b"),))), "attestation"),
)

seen: list[str] = []
watching = False


def _hook(event: str, args: object) -> None:
    # cattrs makes the code that reads a class the first time that one is read, whatever the file says.
    if watching and event in HARM and "<cattrs generated" not in repr(args):
        seen.append(f"{event} {args!r:.200}")


sys.addaudithook(_hook)  # for the life of the process, silent but in ``watched``


@contextmanager
def watched() -> Iterator[None]:
    """Nothing harmful happens inside."""
    global watching  # noqa: PLW0603  # the hook cannot be taken away, so it has to be told
    seen.clear()
    watching = True
    try:
        yield
    finally:
        watching = False
    assert not seen, seen


def only_findings(read: Callable[[str], object], text: str) -> None:
    """A value, or findings with a place: no other exception, and none without an end."""
    findings = None
    with watched():
        try:
            read(text)
        except PlanRejected as refused:
            findings = refused.findings
    if findings is not None:
        assert 0 < len(findings) < 2000
        assert all(found.rule.startswith("codec.") and found.where and found.what for found in findings)
        assert all(len(str(found)) < 3000 for found in findings)


# --- mutations -----------------------------------------------------------------------------------------------------


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys."""
    found: list[tuple[Any, Any]] = []
    rest = [data]
    while rest:
        held = rest.pop()
        keys = list(held) if isinstance(held, dict) else range(len(held)) if isinstance(held, list) else ()
        found += [(held, key) for key in keys]
        rest += [held[key] for key in keys]
    return found


def bent(chance: random.Random, data: Any) -> Any:
    """The data with one to four values replaced, moved, doubled, renamed or dropped."""
    data = copy.deepcopy(data)
    for _ in range(chance.randint(1, 4)):
        held, key = chance.choice(places(data) or [({}, None)])
        match chance.randrange(6):
            case 0 if key is not None:
                held[key] = copy.deepcopy(chance.choice(PAYLOADS))
            case 1 if key is not None:
                other, there = chance.choice(places(data))
                held[key] = copy.deepcopy(other[there])
            case 2 if isinstance(held, dict):
                held[str(chance.choice(PAYLOADS))] = copy.deepcopy(chance.choice(PAYLOADS))
            case 3 if isinstance(held, list):
                held.extend(copy.deepcopy(held) * chance.randint(1, 3))
            case 4 if isinstance(held, dict) and isinstance(key, str):
                held[chance.choice(("kind", "__class__", key + " "))] = held.pop(key)
            case 5 if key is not None:
                del held[key]
            case _:
                pass
    return data


def sealed(body: Any, part: str, kind: str) -> str:
    """A file whose seal is right, so that what is inside is read."""
    data = {"kind": kind, "format": FORMAT, "digest": digest_text(_text(body)), part: body}
    if isinstance(body, dict) and part == "plan":
        data["digests"] = {name: digest_text(_text(one)) for name, one in body.items()}
    return json.dumps(data)


def _text(data: Any) -> str:
    try:
        return canonical(data)
    except PlanRejected:
        return json.dumps(data)


def torn(chance: random.Random, text: str) -> str:
    """The text cut, doubled, or with characters replaced anywhere."""
    at, end = sorted((chance.randrange(len(text)), chance.randrange(len(text))))
    match chance.randrange(4):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + text[end:]
        case 2:
            return text[:end] + text[at:]
        case _:
            return text[:at] + chance.choice('{}[]",:\\0e-') * chance.randint(1, 9) + text[at + 1 :]


READERS: dict[str, Callable[[str], object]] = {"plan": plan_from_text, "attestation": attestation_from_text}
KINDS = {"plan": KIND, "attestation": "prepkit.attestation"}


@pytest.mark.timeout(3600)
@given(st.integers(0, 2**64))
def test_a_file_that_was_bent_gives_findings_and_nothing_else(number: int) -> None:
    chance = random.Random(number)
    for _ in range(PER_EXAMPLE):
        text, part = chance.choice(SEEDS)
        if chance.random() < 0.5:
            hostile = torn(chance, text)
        else:
            hostile = sealed(bent(chance, json.loads(text)[part]), part, KINDS[part])
        only_findings(READERS[part], hostile)


@pytest.mark.timeout(3600)
@given(st.integers(0, 2**64), st.sampled_from((Config, Facts, Plan)))
def test_data_that_was_bent_gives_findings_and_nothing_else(number: int, cls: type) -> None:
    chance = random.Random(number)
    whole = fsdp2_plan()
    data = to_data({Config: whole.config, Facts: whole.facts, Plan: whole}[cls])
    for _ in range(PER_EXAMPLE):
        wrong = bent(chance, data)
        only_findings(lambda _, wrong=wrong: from_data(wrong, cls), "")  # type: ignore[misc]  # the default binds it


# --- the watch works, and memory is bounded ------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_a_plan_that_was_forged_is_shown_and_checked_or_refused_with_the_place() -> None:
    """Every place of two plans with each odd value, and digests that were made anew: nothing raw from deep inside."""
    shown = refused = 0
    for seed in (fsdp2_plan(), build_plan(Config(engine=DeepSpeed(stage=3, micro_batch=4)), tiny_facts(world=4))):
        data = to_data(seed)
        for held, key in one_of_each_place(data):
            before = held[key]
            for odd in (-1, 0, "", []):
                held[key] = odd
                try:
                    made = plan_from_text(resealed(data))
                    text_of(made)
                    judge(made.config, made.facts)
                    shown += 1
                except PlanRejected as wrong:
                    refused += all(found.where and found.what for found in wrong.findings)
            held[key] = before
    assert shown > 100
    assert refused > 400


def one_of_each_place(data: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys, of the items of a list the first alone."""
    found: list[tuple[Any, Any]] = []
    rest = [data]
    while rest:
        held = rest.pop()
        keys = list(held) if isinstance(held, dict) else [0] if isinstance(held, list) and held else ()
        found += [(held, key) for key in keys]
        rest += [held[key] for key in keys]
    return found


def resealed(plan: Any) -> str:
    """A plan file with the right digests for whatever is in it. Raises ``PlanRejected`` for what JSON has not."""
    parts = {key: digest_text(canonical(value)) for key, value in plan.items() if key != "steps"}
    steps = [digest_text(canonical(step)) for step in plan["steps"]] if isinstance(plan["steps"], list) else []
    digests = {**parts, "steps": steps}
    return json.dumps(
        {"kind": KIND, "format": FORMAT, "digest": digest_text(canonical(plan)), "digests": digests, "plan": plan}
    )


def test_the_watch_sees_an_import_an_evaluation_and_an_opened_file() -> None:
    for harm in (
        lambda _: __import__("this_is_no_module"),
        lambda _: eval("1 + 1"),  # what is to be seen
        lambda _: Path(__file__).open().close(),
    ):
        with pytest.raises((AssertionError, ModuleNotFoundError)):
            only_findings(harm, "")
        assert seen


BOMBS = {
    "nested lists": "[" * 200_000,
    "nested objects": '{"a":' * 100_000,
    "a long number": '{"kind": "prepkit.plan", "format": ' + "9" * 200_000 + "}",
    "a long exponent": '{"kind": "prepkit.plan", "format": 1e' + "9" * 200_000 + "}",
    "many keys": "{" + ",".join(f'"{number}": 1' for number in range(20_000)) + "}",
    "one key often": "{" + ",".join('"kind": "prepkit.plan"' for _ in range(10_000)) + "}",
    "escapes": '{"kind": "' + "\\u0041" * 50_000 + '"}',
    "a long kind": sealed({"config": {"engine": {"kind": "x" * 200_000}}}, "plan", KIND),
    "many unknown keys": sealed({"config": {f"key{number}": 1 for number in range(20_000)}}, "plan", KIND),
    "many wrong values": sealed({"steps": [{"step": {"kind": "no"}}] * 3_000}, "plan", KIND),
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_memory_is_bounded_by_the_size_of_the_file(text: str) -> None:
    tracemalloc.start()
    try:
        only_findings_of_any_length(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000 + 60 * len(text)


def only_findings_of_any_length(text: str) -> None:
    with watched(), pytest.raises(PlanRejected):
        plan_from_text(text)


def test_a_device_without_end_is_refused_after_a_bounded_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prepkit.codec.LARGEST", 1000)
    (tmp_path / "large.json").write_text(" " * 1001)
    for path in (tmp_path / "large.json", Path("/dev/zero")):
        with pytest.raises(PlanRejected) as caught:
            load_plan(path)
        assert [found.rule for found in caught.value.findings] == ["codec.too-large"]
    assert LARGEST == 2**28
