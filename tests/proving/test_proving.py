"""Planted errors are told with their cause, and right programs are not accused."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import prepkit as pk
from prepkit.findings import FindingWarning, PlanRejected, Severity
from prepkit.observe.env import observe_env
from prepkit.proving import spawned
from prepkit.proving.record_file import FORMAT, path_of, read
from tests.proving.asking import ERRORS_ASKING, RIGHT_ASKING, collective_in_the_forward
from tests.proving.by_hand import ERRORS_BY_HAND, RIGHT_BY_HAND
from tests.proving.drawn import DRAWN_ERRORS, DRAWN_RIGHT
from tests.proving.libraries import ALWAYS_TRIED, BY_LIBRARIES, RIGHT_BY_LIBRARIES
from tests.proving.right import RIGHT, Right
from tests.proving.sending import ERRORS_SENDING, RIGHT_SENDING
from tests.proving.small import Drawing, batches, by_sample, halved, loss, make, of_outputs
from tests.proving.unseen import UNSEEN
from tests.proving.unusual import ERRORS_UNUSUAL, RIGHT_UNUSUAL
from tests.proving.window import proved, recorded
from tests.proving.wrong import ERRORS, Planted
from tests.support.command_line import run
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang
from tests.support.script import LAUNCHER, Ran, run_typed

SHARE = (*DRAWN_ERRORS[::9], *BY_LIBRARIES[::11], *(one for one in ALWAYS_TRIED if one not in BY_LIBRARIES[::11]))
MORE_ERRORS = tuple(
    Planted(*one) for one in (*UNSEEN, *ERRORS_UNUSUAL, *ERRORS_BY_HAND, *ERRORS_ASKING, *ERRORS_SENDING, *SHARE)
)
"""A share of them; ``python -m tests.tools.proofs`` tries all."""


def needed(program: Planted | Right) -> None:
    """Skips where the library that makes it is not there."""
    if name := getattr(program.make, "needs", ""):
        pytest.importorskip(name)


@pytest.mark.parametrize("planted", [*ERRORS, *MORE_ERRORS], ids=lambda planted: planted.id)
def test_a_planted_error_is_told_with_its_cause(planted: Planted, request: Any, tmp_path: Path) -> None:
    needed(planted)
    gang = request.getfixturevalue(f"gang{planted.ranks}")
    proof = gang.run(proved, planted.make, str(tmp_path))[0]
    told = [finding for finding in proof.findings if finding.severity is not Severity.NOTE]
    assert {finding.rule for finding in told} == {planted.rule}, str(proof)
    assert any(planted.says in finding.what for finding in told), str(proof)


@pytest.mark.parametrize(
    "right",
    [
        *RIGHT[::2],
        *RIGHT[-1:],
        *map(Right, (*RIGHT_UNUSUAL, *RIGHT_BY_HAND, *RIGHT_ASKING, *RIGHT_SENDING)),
        *map(Right, DRAWN_RIGHT[::13]),
        *(Right(*one) for one in RIGHT_BY_LIBRARIES[::6]),
    ],
    ids=lambda right: right.id,
)
def test_a_right_program_is_not_accused(right: Right, request: Any, tmp_path: Path) -> None:
    needed(right)
    gang = request.getfixturevalue(f"gang{right.ranks}")
    proof = gang.run(proved, right.make, str(tmp_path))[0]
    assert proof.fine, str(proof)
    assert proof.facts.gradients or proof.facts.measured
    assert proof.facts.steps or "cannot take its step again" in str(proof)


def left_behind(rank: int, world: int, folder: str) -> tuple[bool, bool, int]:
    """Whether torch is as it was after a window, and how many hooks the root has."""
    backward, call, groups = torch.autograd.backward, nn.Module.__call__, dict(vars(dist.ProcessGroup))
    _, window = recorded(collective_in_the_forward, rank, world, folder)
    hooks = len(window.model._forward_hooks) + len(window.model._forward_pre_hooks)
    same = torch.autograd.backward is backward and dict(vars(dist.ProcessGroup)) == groups
    return same, nn.Module.__call__ is call, hooks


def test_nothing_is_left_behind_and_a_torn_or_foreign_record_is_a_finding(gang2: Any, tmp_path: Path) -> None:
    assert gang2.run(left_behind, str(tmp_path)) == [(True, True, 0)] * 2
    assert [record.head.rank for record in read(tmp_path)] == [0, 1]
    whole = path_of(tmp_path, 1).read_bytes()
    for spoiled in (
        whole[:-9],
        b"not a record",
        whole.replace(b'\\"rank\\": 1', b'\\"rank\\": 0'),
        whole.replace(b'\\"format\\": %d' % FORMAT, b'\\"format\\": 7'),
        whole.replace(b'\\"scale\\"', b'\\"scald\\"'),
        whole.replace(b'\\"start\\": 0', b'\\"start\\": 9'),
        whole.replace(b'\\"micro\\": 0', b'\\"micro\\": 9'),
        whole.replace(b'\\"float32\\"', b'\\"saveall\\"'),
        whole.replace(b'\\\\\\"class\\\\\\"', b'\\\\\\"klass\\\\\\"'),
        whole.replace(b'\\\\\\"tensor\\\\\\"', b'\\\\\\"pickle\\\\\\"'),
        whole.replace(b'\\"allreduce\\"', b'\\"ringallre\\"'),
        whole.replace(b'\\"shapes\\": [[]]', b'\\"shapes\\": []  '),
        whole.replace(b'\\"shapes\\"', b'\\"shakes\\"'),
    ):
        assert spoiled != whole
        path_of(tmp_path, 1).write_bytes(spoiled)
        with pytest.raises(PlanRejected):
            read(tmp_path)


def test_a_plan_for_a_cluster_is_proven_here_and_the_attestation_says_so(fork_servers: ForkServers) -> None:
    """By processes that are forked; those of the last test here start as those of a user do."""
    gang = Gang(1, fork_servers)
    try:
        gang.run_fresh(prove_all, timeout=120)
    finally:
        gang.close()


def prove_all(rank: int, world: int) -> None:
    del rank, world
    for name in LAUNCHER:
        os.environ.pop(name, None)
    with patch.object(spawned, "start_processes", forked):
        prove_a_plan()
        prove_a_plan_with_loaders()
        prove_a_plan_that_cuts_layers()
        prove_with_wrong_arguments()
        prove_what_holds_a_generator()
        prove_hooks()


START: Any = spawned.start_processes  # which has no types


def forked(function: Any, args: tuple[Any, ...], nprocs: int, join: bool, start_method: str) -> Any:
    """Processes that get what pickle makes of their arguments, as those of ``spawn`` do, without the wait for torch."""
    assert start_method == "spawn"
    return START(unpickled, (pickle.dumps((function, args)),), nprocs=nprocs, join=join, start_method="fork")


def unpickled(rank: int, given: bytes) -> None:
    function, args = pickle.loads(given)
    function(rank, *args)


def prove_hooks() -> None:
    """A hook that pickle takes goes with the model; the gradients behind it are named, and not accused."""
    model = make()
    model.get_parameter("inner.weight").register_hook(halved)
    plan = pk.build_plan(pk.Config(optimizer=pk.optim.SGD(lr=0.1)), model, env=pk.Env.declare(world_size=1))
    proof = pk.prove(plan, model, batches()[:1], loss=loss, processes=1)
    assert proof.fine, str(proof)
    assert "hooks of the program's own change the gradients of `inner.weight`" in str(proof)
    assert {one.name for one in proof.facts.gradients} == {"inner.bias", "outer.weight", "outer.bias"}
    model.get_parameter("outer.weight").register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"outer\.weight\.register_hook\(.*a function of a module's top level"):
        pk.prove(plan, model, batches()[:1], loss=loss, processes=1)


def prove_a_plan() -> None:
    cfg = pk.Config(engine=pk.FSDP2(), optimizer=pk.optim.AdamW(lr=1e-2), accumulation=2, clip=pk.ClipNorm(0.05))
    model = make()
    plan = pk.build_plan(cfg, model, env=pk.Env.declare(world_size=16, device="cuda"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        proof = pk.prove(plan, model, batches(), loss=loss)
    ours = [one for one in told if issubclass(one.category, FindingWarning)]
    assert [(one.message.finding.rule, one.filename) for one in ours] == [("blocks.one-unit", __file__)]
    assert proof.fine, str(proof)
    assert len(proof.facts.gradients) == len(proof.facts.steps) == 4
    assert proof.attestation is not None
    assert {"prove.summed", "run.other-layout"} <= {asked.rule for asked in proof.attestation.asked}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="2 processes with 2 micro-batches a step read 4 batches, and 3 were given"):
        pk.prove(plan, model, batches()[:3], loss=loss)


def prove_with_wrong_arguments() -> None:
    """Each is told in a sentence, and no traceback of a process."""
    model = make()
    plan = pk.build_plan(pk.Config(engine=pk.DDP(), optimizer=pk.optim.SGD(lr=0.1)), model, env=env_of_two())
    given: dict[str, Any] = {"batches": batches()[:2], "loss": loss}
    for wrong, says in (
        ({"batches": "abc"}, r"batches is 'abc' \(str\); give a list with one batch for each micro-batch of each"),
        ({"loss": 3}, r"loss is 3 \(int\); give a function of outputs and batch that returns the loss"),
        ({"loss": of_outputs}, r"loss is `of_outputs`, and is called with outputs and batch; it takes \(outputs"),
        ({"loss": by_sample}, r"loss is `by_sample`, and returned a tensor of shape \(5,\); return one number"),
        (
            {"loss": lambda outputs, _: outputs.mean()},
            r"loss: processes get it by pickle, .* by def and class",
        ),
        ({"batches": [1, 2]}, r"batches holds [12] \(int\), which the model does not take .*torch\.as_tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            pk.prove(plan, model, **{**given, **wrong})
    proof = str(pk.prove(plan, model, batches()[:3]))
    assert proof.startswith("proof of 2 x 1 micro-batches in float32, 4 gradients, 4 steps of a loss that prepkit has")
    assert "of 3 batches the first 2 were read: 2 processes with 1 micro-batch a step" in proof


def prove_what_holds_a_generator() -> None:
    """It goes to the processes with the model, though what is in it is made only to be sent."""
    model = Drawing()
    plan = pk.build_plan(pk.Config(optimizer=pk.optim.SGD(lr=0.1)), model, env=pk.Env.declare(world_size=1))
    assert pk.prove(plan, model, batches()[:1], loss=loss, processes=1).fine


def env_of_two() -> pk.Env:
    return pk.Env.declare(world_size=2, device="cpu", torch=observe_env().torch)


def prove_a_plan_with_loaders() -> None:
    """Made for as many processes of this machine, it is made again without what reads other samples."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more: dict[str, Any] = {
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "loaders": [DataLoader(TensorDataset(torch.randn(20, 6)), batch_size=5)],
    }
    env = pk.Env.declare(world_size=2, device="cpu")
    plan = pk.build_plan(pk.Config(engine=pk.DDP()), model, **more, env=env)
    assert pk.prove(plan, model, batches(), loss=loss, optimizer=optimizer).fine


def prove_a_plan_that_cuts_layers() -> None:
    """Its two processes read the same samples: one batch for each micro-batch of both."""
    rows = pk.tp.TPPlan((pk.tp.TPLayer("inner", "colwise"), pk.tp.TPLayer("outer", "rowwise")))
    cfg = pk.Config(engine=pk.TensorParallel(), tp_plan=rows, optimizer=pk.optim.SGD(lr=0.1), accumulation=2)
    model = make()
    model.get_submodule("drop").p = 0.0  # one inside of cut layers is compared with nothing
    plan = pk.build_plan(cfg, model, env=env_of_two())
    proof = pk.prove(plan, model, batches()[:2], loss=loss)
    assert proof.fine, str(proof)
    assert len(proof.facts.gradients) == 4
    said = "2 processes, of which each 2 read the same samples, with 2 micro-batches a step read 2 batches, and 1 were"
    with pytest.raises(ValueError, match=said):
        pk.prove(plan, model, batches()[:1], loss=loss)


SCRIPT = """
import torch, torch.distributed as dist
from accelerate import Accelerator
from torch import nn
ours = Accelerator(gradient_accumulation_steps=4)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters()))
generator = torch.Generator().manual_seed(ours.process_index)
for step in range(8):
    x = torch.randn(5, 6, generator=generator)
    with ours.accumulate(model):
        loss = model(x).square().mean()
        ours.backward(loss DIVIDED)
        optimizer.step()
        optimizer.zero_grad()
print("went on")
"""


@pytest.mark.parametrize(
    ("divided", "says"), [("", ""), ("/ 4", "0.250 x what they should be: the loss is divided twice")]
)
def test_a_script_with_accelerate_is_proven_in_one_line(
    tmp_path: Path, forked_torchrun: list[Ran], monkeypatch: pytest.MonkeyPatch, divided: str, says: str
) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(SCRIPT.replace("DIVIDED", divided))
    monkeypatch.chdir(tmp_path)
    code = run("audit", "--prove", "--torchrun", "2", "train.py").exit_code
    out = "".join(one.out for one in forked_torchrun)
    assert "went on" not in out
    assert "proof of 2 x 4 micro-batches" in out, "".join(one.err[-3000:] for one in forked_torchrun)
    assert (("prove.accumulation" in out) and (says in out)) == bool(says), out
    assert ("backward at train.py:14, step at train.py:15" in out) == bool(says)
    assert (code == 0) == (not says)


BY_RANK = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed import get_rank
IMPORTS
class Net(nn.Module):
    def __init__(self, rank=None):
        super().__init__()
        self.layer, self.rank = nn.Linear(6, 3), rank
    def forward(self, x):
        return torch.tanh(self.layer(x) + ASKED)
dist.is_initialized() or dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(5, 6) + dist.get_rank()
for _ in range(2):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    WRONGloss.backward()
    optimizer.step()
"""
LIGHTNING = """
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
    def training_step(self, batch, _):
        assert self.trainer.world_size == 2
        return torch.tanh(self.layer(batch) + ASKED).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
given = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, **given)
trainer.fit(Module(), DataLoader(torch.randn(20, 6), 5))
"""
FABRIC = (
    "from lightning.fabric import Fabric\nours = Fabric(accelerator='cpu', devices=2, strategy='ddp'); ours.launch()"
)
ACCELERATE = "from accelerate import Accelerator\nours = Accelerator(cpu=True)"
ASKED: dict[str, tuple[str, str, str]] = {
    "torch": (BY_RANK, "", "dist.get_rank()"),
    "torch, by its name": (BY_RANK, "", "get_rank()"),
    "a branch": (BY_RANK, "", "(x if get_rank() else 2 * x).mean()"),
    "a group": (BY_RANK, "", "(dist.get_rank(dist.group.WORLD) if dist.get_backend() == 'gloo' else 5)"),
    "a launcher": (BY_RANK, "", "int(os.environ['RANK'])"),
    "a launcher, on its node": (BY_RANK, "", "int(os.environ['LOCAL_RANK'])"),
    "accelerate": (BY_RANK, ACCELERATE, "ours.process_index"),
    "accelerate, whether it is first": (BY_RANK, ACCELERATE, "(1 if ours.is_local_main_process else 2)"),
    "fabric": (BY_RANK, FABRIC, "ours.global_rank"),
    "lightning": (LIGHTNING, "", "self.global_rank"),
    "lightning's trainer": (LIGHTNING, "", "(1 + self.trainer.local_rank)"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_forward_that_asks_for_its_rank_is_told_that_of_the_rank_that_made_the_call(
    tmp_path: Path, forked_torchrun: list[Ran], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    script, imports, asked = ASKED[name]
    for needs in ("accelerate", "lightning"):
        if needs in script + imports:
            pytest.importorskip(needs)
    text = script.replace("IMPORTS", imports).replace("ASKED", asked)
    (tmp_path / "train.py").write_text(text.replace("WRONG", ""))
    monkeypatch.chdir(tmp_path)
    code = run("audit", "--prove", "--torchrun", "2", "train.py").exit_code
    out = "".join(one.out for one in forked_torchrun)
    assert "2 gradients, 2 steps: trained as plain torch trains it" in out, out + forked_torchrun[0].err[-3000:]
    assert "the forward asks for its rank, and computes by it" in out
    assert code == 0, out
    if "WRONG" in text and not imports:
        (tmp_path / "train.py").write_text(
            text.replace("WRONG", "model.module.layer.bias.register_hook(lambda g: 3 * g); ")
        )
        assert run("audit", "--prove", "--torchrun", "2", "train.py").exit_code == 1


IN_TURN = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
one, other = (nn.parallel.DistributedDataParallel(nn.Linear(6, width)) for width in (3, 2))
first = torch.optim.SGD(one.parameters(), lr=0.1)
second = None if dist.get_rank() else torch.optim.SGD(other.parameters(), lr=0.1)
x = torch.randn(5, 6) + dist.get_rank()
for at in range(12):
    with torch.no_grad():
        other(x)
    first.zero_grad()
    one(x).square().mean().backward()
    first.step()
    if at == 5:
        second = second or torch.optim.SGD(other.parameters(), lr=0.1)
        second.zero_grad()
        other(x).square().mean().backward()
        second.step()
"""


def test_ranks_decide_together_for_which_model_they_wait(
    tmp_path: Path, forked_torchrun: list[Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 makes the optimizer of the second model when it is needed, and cannot know of it before."""
    (tmp_path / "train.py").write_text(IN_TURN)
    monkeypatch.chdir(tmp_path)
    assert run("audit", "--prove", "--torchrun", "2", "train.py").exit_code == 0
    out = "".join(one.out for one in forked_torchrun)
    assert out.count("1 micro-batches in float32, 2 gradients, 2 steps: trained as plain torch trains it") == 2, out


def test_a_plan_is_proven_from_the_command_line(tmp_path: Path, fork_servers: ForkServers) -> None:
    plan = pk.build_plan(
        pk.Config(engine=pk.DDP(), optimizer=pk.optim.SGD(lr=0.1)), make(), env=pk.Env.declare(world_size=2)
    )
    pk.save(plan, str(tmp_path / "plan.json"))
    here = "tests.proving.small"
    command = ["-m", "prepkit", "prove", str(tmp_path / "plan.json"), "--model", f"{here}:make"]
    command += ["--batches", f"{here}:batches", "--loss", f"{here}:loss"]
    environment = {"PYTHONPATH": str(Path(pk.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = run_typed(fork_servers, command, environment, tmp_path)
    assert done.code == 0, done.out + done.err[-3000:]
    assert "trained as plain torch trains it" in done.out
