"""What does not fit is told by ``pk.prove`` and ``prepkit prove`` in a sentence, which says what to type."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attrs import field, frozen
from torch import nn

import prepkit as pk
from prepkit.facts.proof import GradientProof, ProofFacts
from prepkit.findings import Finding, PlanRejected, RunRefused, Severity
from prepkit.proving import spawned
from prepkit.proving.proof import Proof
from prepkit.proving.trial_fails import ProcessDied
from tests.proving import unfit
from tests.proving.small import batches, loss
from tests.proving.test_proving import env_of_two, forked
from tests.support.command_line import run
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang
from tests.support.script import LAUNCHER

ROWS = pk.tp.TPPlan((pk.tp.TPLayer("inner", "colwise"), pk.tp.TPLayer("outer", "rowwise")))
SGD = pk.optim.SGD(lr=0.1)


@frozen
class Unfit:
    """What is given, what is raised, and words of it."""

    model: type[nn.Module]
    kind: type[Exception]
    says: tuple[str, ...]
    given: dict[str, Any] = field(factory=dict)
    config: dict[str, Any] = field(factory=dict)


WIDE = [(torch.zeros(5, 7),)] * 2
UNFIT = {
    "a forward raises": Unfit(
        unfit.Raises,
        ValueError,
        ("model(*batches[", "raised KeyError at unfit.py:", "the model is Raises", "It raises without the plan too"),
    ),
    "one rank's forward raises": Unfit(
        unfit.OneRankRaises, ValueError, ("model(*batches[1]) raised KeyError at unfit.py:", "'labels'")
    ),
    "a batch is too wide": Unfit(
        unfit.Plain,
        ValueError,
        ("cannot be multiplied (5x7 and 6x8)", "the batch (float32[5, 7])", "give batches that forward(x) takes"),
        {"batches": WIDE},
    ),
    "a batch has another key": Unfit(
        unfit.Plain,
        ValueError,
        ("model(**batches[", "unexpected keyword argument 'ids'", "{'ids': float32[5, 6]}"),
        {"batches": [{"ids": torch.zeros(5, 6)}] * 2},
    ),
    "a cut layer is viewed by its whole size": Unfit(
        unfit.Heads,
        ValueError,
        ("raised RuntimeError at unfit.py:", "the model is Heads", "Without the plan it takes this batch", "write -1"),
        {},
        {"engine": pk.TensorParallel(), "tp_plan": ROWS},
    ),
    "a model returns nothing": Unfit(
        unfit.Nothing, ValueError, ("the forward of Nothing returned None", "no tensor in it"), {"loss": None}
    ),
    "a model returns no gradient": Unfit(
        unfit.Detached, ValueError, ("the forward of Detached returned int64[5]", "or give loss="), {"loss": None}
    ),
    "a loss raises": Unfit(
        unfit.Plain,
        ValueError,
        ("loss is `labels`, and raised IndexError at unfit.py:", "outputs float32[5, 3]", "as batch[1]"),
        {"loss": unfit.labels},
    ),
    "a loss is not a number": Unfit(
        unfit.Plain, RunRefused, ("run.gradients-not-finite", "fix:"), {"loss": unfit.not_a_number}
    ),
    "a layer is not called": Unfit(unfit.Unused, RunRefused, ("run.gradients-waited-for", "`more.weight`", "fix:")),
    "a backward raises": Unfit(
        unfit.FailsBackward, ValueError, ("the backward of the loss raised IndexError at unfit.py:", "FailsBackward")
    ),
    "a model is not made from pickle": Unfit(
        unfit.NotMade, ValueError, ("raised OSError at unfit.py:", "no such tokenizer", "top level of a module")
    ),
    "a process leaves": Unfit(
        unfit.Leaves, ProcessDied, ("process 1 of 2 ended with exit code 7 in the forward of Leaves with batches[1]",)
    ),
    "a process is killed": Unfit(
        unfit.Killed, ProcessDied, ("process 1 of 2 was killed by SIGKILL in the forward of Killed", "fewer processes")
    ),
    "a size does not divide": Unfit(
        unfit.Plain,
        PlanRejected,
        ("tensor.not-divisible", "fix:"),
        {"processes": 3, "batches": WIDE},
        {"engine": pk.TensorParallel(), "tp_plan": ROWS},
    ),
    "no such number of processes": Unfit(
        unfit.Plain, TypeError, ("processes=0 is no number of processes; write processes=2",), {"processes": 0}
    ),
}


def refused(rank: int, world: int, name: str) -> tuple[str, str]:
    """Kind and text of what is raised."""
    del rank, world
    for variable in LAUNCHER:
        os.environ.pop(variable, None)
    wrong = UNFIT[name]
    model = wrong.model()
    plan = pk.build_plan(pk.Config(**{"engine": pk.DDP(), "optimizer": SGD, **wrong.config}), model, env=env_of_two())
    with patch.object(spawned, "start_processes", forked):
        try:
            pk.prove(plan, model, **{"batches": batches()[:2], "loss": loss, **wrong.given})
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_told_with_its_cause(fork_servers: ForkServers, name: str) -> None:
    gang = Gang(1, fork_servers)
    try:
        ((kind, said),) = gang.run_fresh(refused, name, timeout=60)
    finally:
        gang.close()
    assert kind == UNFIT[name].kind.__name__, said
    assert [one for one in UNFIT[name].says if one not in said] == [], said
    assert "Traceback" not in said


def too_large(rank: int, world: int) -> tuple[str, bool]:
    """What is said where a record would take more than it may."""
    del rank, world
    for variable in LAUNCHER:
        os.environ.pop(variable, None)
    model = unfit.Plain()
    plan = pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=SGD), model, env=env_of_two())
    small = partial(spawned.Recorder, largest=1)
    with patch.object(spawned, "start_processes", forked), patch.object(spawned, "Recorder", small):
        proof = pk.prove(plan, model, batches()[:2], loss=loss)
    return str(proof), proof.fine


def test_a_window_that_cannot_be_recorded_is_a_finding(fork_servers: ForkServers) -> None:
    gang = Gang(1, fork_servers)
    try:
        ((said, fine),) = gang.run_fresh(too_large, timeout=60)
    finally:
        gang.close()
    assert "prove.unproven" in said
    assert "the inputs of 1 calls take " in said
    assert not fine


CANNOT: dict[str, tuple[Any, pk.DDP, tuple[str, ...]]] = {
    "a forward gathers": (unfit.Gathers, pk.DDP(), ("c10d::allgather_, unfit.py:", "let the forward return")),
    "a batch norm is synchronised": (unfit.synchronised, pk.DDP(), ("`norm` is SyncBatchNorm, which torch runs on",)),
    "a plan synchronises it": (unfit.Normed, pk.DDP(sync_batchnorm=True), ("`norm` would become SyncBatchNorm",)),
}


def unproven(rank: int, world: int, name: str) -> tuple[str, bool, bool]:
    """What is said of a model that no process alone can do again."""
    del rank, world
    for variable in LAUNCHER:
        os.environ.pop(variable, None)
    make, engine, _ = CANNOT[name]
    model = make()
    env = pk.Env.declare(world_size=2, device="cuda") if engine.sync_batchnorm else env_of_two()
    plan = pk.build_plan(pk.Config(engine=engine, optimizer=SGD), model, env=env)
    with patch.object(spawned, "start_processes", forked):
        proof = pk.prove(plan, model, batches()[:2], loss=loss)
    return str(proof), proof.unproven, torch.distributed.is_initialized()


@pytest.mark.parametrize("name", CANNOT)
def test_what_one_process_cannot_do_again_is_named_and_nothing_is_proven(fork_servers: ForkServers, name: str) -> None:
    gang = Gang(1, fork_servers)
    try:
        ((said, cannot, grouped),) = gang.run_fresh(unproven, name, timeout=60)
    finally:
        gang.close()
    assert cannot
    assert not grouped
    assert [one for one in ("nothing was proven", *CANNOT[name][2]) if one not in said] == [], said


def gathered(rank: int, world: int) -> tuple[str, bool]:
    """The same gather in the loss."""
    del rank, world
    for variable in LAUNCHER:
        os.environ.pop(variable, None)
    model = unfit.Plain()
    plan = pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=SGD), model, env=env_of_two())
    with patch.object(spawned, "start_processes", forked):
        proof = pk.prove(plan, model, batches()[:2], loss=unfit.gathered)
    return str(proof), proof.fine


def test_what_a_loss_gathers_is_proven(fork_servers: ForkServers) -> None:
    gang = Gang(1, fork_servers)
    try:
        ((said, fine),) = gang.run_fresh(gathered, timeout=60)
    finally:
        gang.close()
    assert fine, said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"--batches": "tests.proving.unfit:raises"}, "--batches tests.proving.unfit:raises raised KeyError at unfit"),
        ({"--batches": "tests.proving.unfit:AT_BATCHES"}, "is 3 (int); name a function without arguments"),
        ({"--batches": "tests.proving.small:batch"}, "small:batch: tests.proving.small has no 'batch'; did you"),
        ({"--loss": "tests.proving.small:los"}, "--loss tests.proving.small:los: tests.proving.small has no 'los'"),
        ({"--model": "tests.proving.unfit:raises"}, "model.not-built at --model tests.proving.unfit:raises: KeyError"),
        ({"--model": "tests.proving.small:mak"}, "small:mak: tests.proving.small has no 'mak' fix: did you"),
    ],
)
def test_names_that_lead_nowhere_are_told_by_the_command(tmp_path: Path, options: dict[str, str], says: str) -> None:
    model = unfit.Plain()
    pk.save(
        pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=SGD), model, env=env_of_two()), str(tmp_path / "plan.json")
    )
    here = "tests.proving.small"
    given = {"--model": f"{here}:make", "--batches": f"{here}:batches", "--loss": f"{here}:loss", **options}
    done = run("prove", str(tmp_path / "plan.json"), *(word for pair in given.items() for word in pair))
    said = " ".join((done.output).split())
    assert says in said
    assert done.exit_code in (1, 2)
    assert "Traceback" not in said


def test_a_command_tells_what_a_rule_refused_and_which_process_has_died(tmp_path: Path) -> None:
    pk.save(
        pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=SGD), unfit.Plain(), env=env_of_two()),
        str(tmp_path / "plan.json"),
    )
    here = "tests.proving.small"
    words = ["--model", f"{here}:make", "--batches", f"{here}:batches", "--loss", f"{here}:loss"]
    found = Finding(rule="run.x", severity=Severity.ERROR, where="model", what="It is off.", fix="Mend it.")
    for error, says in (
        (ProcessDied("process 1 of 2 was killed"), "Error: process 1 of 2 was killed"),
        (RunRefused((found,)), "error run.x at model: It is off."),
    ):
        with patch("prepkit.api.prove", side_effect=error):
            done = run("prove", str(tmp_path / "plan.json"), *words)
        assert done.exit_code == 1
        assert says in done.output


def test_a_command_ends_with_a_code_of_its_own_where_nothing_could_be_proven(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    pk.save(pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=SGD), unfit.Plain(), env=env_of_two()), path)
    here = "tests.proving.small"
    words = ["--model", f"{here}:make", "--batches", f"{here}:batches", "--loss", f"{here}:loss"]
    wrong = Finding(rule="run.x", severity=Severity.ERROR, where="model", what="It is off.", fix="Mend it.")
    seen = (GradientProof(name="weight", numel=1, gram=(), dots=(), squares=(), holders=()),)
    for of, unproven, findings, code in (
        (seen, "", (), 0),
        ((), "", (), 4),
        (seen, "It draws.", (), 4),
        (seen, "It draws.", (wrong,), 1),
    ):
        facts = ProofFacts(world=2, shares=(), gradients=of, unproven=unproven)
        with patch("prepkit.api.prove", return_value=Proof(facts=facts, findings=findings)):
            assert run("prove", path, *words).exit_code == code
