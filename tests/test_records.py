"""``apply(plan, require=..., log=...)``: who has signed the plan decides, on every rank; and what ran is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import prepkit as pk
from prepkit.codec import plan_digest
from prepkit.codec.log import read
from prepkit.codec.statement import statement_text
from prepkit.facts import Env
from tests.support.command_line import run
from tests.support.gang import Gang


def _planned(rate: float = 1e-3, world: int = 1) -> tuple[torch.nn.Module, pk.Plan]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    engine = pk.DDP() if world > 1 else pk.Single()
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=rate))
    return model, pk.build_plan(cfg, model, env=Env.declare(world_size=world, device="cpu"))


def _ssh(*words: str) -> None:
    subprocess.run(("ssh-keygen", *words), check=True, capture_output=True)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, pk.Plan], tuple[str, ...]]:
    """Signs the statement of a plan as the commands of the docs do, and gives the command that verifies it for ana."""
    monkeypatch.chdir(tmp_path)
    for name in ("ana", "eve"):
        _ssh("-q", "-t", "ed25519", "-N", "", "-f", name)
    Path("signers").write_text(f"ana {Path('ana.pub').read_text()}")

    def sign(name: str, plan: pk.Plan) -> tuple[str, ...]:
        pk.save(plan, "plan.json")
        assert run("statement", "plan.json", "-o", "plan.statement.json").exit_code == 0
        Path("plan.statement.json.sig").unlink(missing_ok=True)
        _ssh("-q", "-Y", "sign", "-f", name, "-n", "prepkit", "plan.statement.json")
        command = "ssh-keygen -Y verify -f signers -I ana -n prepkit -s plan.statement.json.sig"
        return tuple(command.split())

    return sign


Sign = Callable[[str, pk.Plan], tuple[str, ...]]


def _refused(plan: pk.Plan, model: torch.nn.Module, require: Any) -> str:
    before = model.weight.clone()
    with pytest.raises(pk.PlanRejected) as caught:
        pk.apply(plan, model=model, require=require)
    (finding,) = caught.value.findings
    assert finding.rule == "plan.not-signed"
    assert torch.equal(model.weight, before)
    return finding.what


def test_a_plan_is_applied_when_who_should_has_signed_it_and_no_other_plan_is(keys: Sign) -> None:
    model, plan = _planned()
    command = keys("ana", plan)
    assert pk.apply(pk.load("plan.json"), model=model, require=command).attestation.plan == plan_digest(plan)
    model, other = _planned(rate=2e-3)
    assert "ssh-keygen ended with 255" in _refused(other, model, command)
    model, plan = _planned()
    assert "ssh-keygen ended with" in _refused(plan, model, keys("eve", plan))
    Path("plan.statement.json.sig").unlink()
    assert "ssh-keygen ended with" in _refused(plan, model, command)


def test_the_statement_is_the_same_bytes_wherever_it_is_made(keys: Sign) -> None:
    _, plan = _planned()
    keys("ana", plan)
    text = Path("plan.statement.json").read_text()
    assert text == statement_text(plan) == statement_text(_planned()[1])
    data = json.loads(text)
    (digest,) = [one["digest"]["sha256"] for one in data["subject"] if one["name"] == "plan"]
    assert f"sha256:{digest}" == plan_digest(plan)
    assert (data["predicate"]["engine"], data["predicate"]["world_size"]) == ("Single", 1)
    assert text != statement_text(_planned(rate=2e-3)[1])


def test_a_function_that_ends_the_process_has_not_accepted() -> None:
    def ends(_: bytes) -> bool:
        raise SystemExit(0)

    model, plan = _planned()
    assert "raised SystemExit" in _refused(plan, model, ends)


def test_a_function_accepts_by_true_alone() -> None:
    model, plan = _planned()
    seen: list[bytes] = []

    def asks(*, answer: Any) -> Callable[[bytes], Any]:
        return lambda statement: (seen.append(statement), answer)[1]

    for answer in (None, False, 1, "yes", subprocess.CompletedProcess):
        assert "and not True" in _refused(plan, model, asks(answer=answer))
    assert "ZeroDivisionError" in _refused(plan, model, lambda _: 1 / 0)
    pk.apply(plan, model=model, require=asks(answer=True))
    assert set(seen) == {statement_text(plan).encode()}


def test_a_command_gets_the_statement_as_input_or_as_a_file_and_fails_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = _planned()
    digest = plan_digest(plan).removeprefix("sha256:")
    looks = f"import sys; sys.exit({digest!r} not in (open(sys.argv[1]).read() if sys.argv[1:] else sys.stdin.read()))"
    pk.apply(_planned()[1], model=_planned()[0], require=(sys.executable, "-c", looks))
    pk.apply(_planned()[1], model=_planned()[0], require=(sys.executable, "-c", looks, "{statement}"))
    assert "could not decide" in _refused(plan, model, ("no-such-command-here",))
    assert "ended with 3: no key" in _refused(plan, model, ("sh", "-c", "echo no key >&2; exit 3"))
    assert "ended with -9: it said nothing" in _refused(plan, model, ("sh", "-c", "kill -9 $$"))
    monkeypatch.setattr("prepkit.api.acting.SECONDS", 0.2)
    assert "timed out" in _refused(plan, model, ("sleep", "60"))
    for require in ("ssh-keygen -Y verify", (), (1,), b"true"):
        with pytest.raises(TypeError, match="words of a command"):
            pk.apply(plan, model=model, require=require)  # type: ignore[arg-type]


def test_what_was_applied_is_in_the_log_and_a_torn_one_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    log = tmp_path / "runs.log"
    for rate in (1e-3, 2e-3):
        model, plan = _planned(rate)
        pk.apply(plan, model=model, log=log)
    entries = list(read(log))
    assert [one.said["optimizer"]["lr"] for one in entries] == [1e-3, 2e-3]
    assert [one.plan for one in entries] == [plan_digest(_planned(rate)[1]) for rate in (1e-3, 2e-3)]
    assert entries[0].at[:2] == "20"
    assert entries[0].at.endswith("Z")
    log.write_bytes(log.read_bytes()[:-10])
    model, plan = _planned()
    with pytest.raises(pk.PlanRejected, match=r"log\.torn"):
        pk.apply(plan, model=model, log=log)
    assert isinstance(pk.apply(plan, model=model).model, torch.nn.Module)  # nothing was touched before


def _applied(rank: int, world: int, folder: str, signed: tuple[bool, ...]) -> str:
    model, plan = _planned(world=world)
    try:
        pk.apply(plan, model=model, require=lambda _: signed[rank], log=f"{folder}/runs.log").close()
    except (pk.PlanRejected, pk.RunRefused) as error:
        return f"{type(error).__name__}: {error}"
    return "applied"


def test_one_rank_that_does_not_accept_refuses_on_every_rank_and_one_line_is_written(
    gang2: Gang, tmp_path: Path
) -> None:
    first, second = gang2.run(_applied, str(tmp_path), (True, False))
    assert first.startswith("ApplyHalted")
    assert "rank 1" in first
    assert second.startswith("PlanRejected")
    assert "plan.not-signed" in second
    assert not (tmp_path / "runs.log").exists() or (tmp_path / "runs.log").read_bytes() == b""
    assert gang2.run(_applied, str(tmp_path), (True, True)) == ["applied", "applied"]
    assert len(list(read(tmp_path / "runs.log"))) == 1
