"""``examples/gate/policy.rego``: asked by conftest of the JSON that ``prepkit show`` prints."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from prepkit.codec import plan_to_text
from prepkit.codec.files import save
from prepkit.config import ClipNorm
from prepkit.plan import Plan
from tests.support.command_line import ROOT, run
from tests.support.plans import ddp_plan, fsdp2_plan

POLICY = ROOT / "examples" / "gate" / "policy.rego"


def _by_conftest(document: str) -> dict[str, list[str]]:
    if shutil.which("conftest") is None:
        pytest.skip("conftest is not installed: github.com/open-policy-agent/conftest")
    words = ("conftest", "test", "-p", str(POLICY), "-o", "json", "-")
    (said,) = json.loads(subprocess.run(words, input=document, capture_output=True, text=True, check=False).stdout)
    return {
        kind: [one["msg"] for one in said.get(plural, ())]
        for kind, plural in (("deny", "failures"), ("warn", "warnings"))
    }


def _by_regopy(document: str) -> dict[str, list[str]]:
    regopy = pytest.importorskip("regopy", reason="regopy is not installed")
    asked = regopy.Interpreter()
    asked.add_module("policy", POLICY.read_text())
    asked.set_input(json.loads(document))
    (said,) = json.loads(str(asked.query("data.main")))["expressions"]
    return {kind: list(said.get(kind, ())) for kind in ("deny", "warn")}


ASKS: tuple[Callable[[str], dict[str, list[str]]], ...] = (_by_conftest, _by_regopy)


def _clipped(plan: Plan, norm: float | None = 1.0) -> Plan:
    return evolve(plan, config=evolve(plan.config, clip=None if norm is None else ClipNorm(norm)))


@pytest.mark.parametrize("ask", ASKS)
def test_a_plan_is_denied_warned_of_and_passed(ask: Callable[[str], dict[str, list[str]]]) -> None:
    passed = ask(plan_to_text(_clipped(fsdp2_plan())))
    assert passed == {"deny": [], "warn": []}
    (denied,) = ask(plan_to_text(_clipped(fsdp2_plan(), None)))["deny"]
    assert denied.startswith("gradients are not clipped")
    (warned,) = ask(plan_to_text(_clipped(ddp_plan())))["warn"]
    assert warned == "DDP is not what we know best, which is FSDP2"
    plan = _clipped(fsdp2_plan())
    many = evolve(plan, facts=evolve(plan.facts, env=evolve(plan.facts.env, world_size=1024)))
    assert ask(plan_to_text(many))["deny"] == ["1024 processes are more than the 512 that we pay for"]


def test_the_command_prints_what_the_policy_reads(tmp_path: Any) -> None:
    save(fsdp2_plan(), str(tmp_path / "plan.json"))
    data = json.loads(run("show", str(tmp_path / "plan.json"), "--json").stdout)
    assert data == json.loads(plan_to_text(fsdp2_plan()))
    text = POLICY.read_text()
    for path in (
        "plan.config.engine.kind",
        "plan.facts.env",
        "plan.config.clip",
        "plan.config.intent",
        "plan.overridden",
    ):
        here = data
        for part in path.split("."):
            here = here[part]
        assert f"input.{path}" in text
