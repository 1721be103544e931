"""``prepkit audit SCRIPT`` runs real scripts up to their first step, and says what is wrong at that point."""

from __future__ import annotations

import gc
import json
import runpy
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import reduce
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from prepkit.auditing import window
from prepkit.auditing.at_step import _loaders, audit_step
from prepkit.auditing.audit import audit
from prepkit.auditing.looks import is_of_a_loop
from prepkit.auditing.outcome import Audit
from prepkit.auditing.script import told
from prepkit.observe.prepared.loaders import first_sample, prepared_loader
from tests.audit.by_libraries import accelerator
from tests.audit.case import ROOT, WIDTH, adam, net, rows
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang
from tests.support.script import ran

MODEL = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""

LOOP = """
for x, y in loader:
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print("went on")
"""

ORPHANS = f"""{MODEL}
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=3)
model[2] = nn.Linear(8, 2)
loader = DataLoader(data, batch_size=4)
{LOOP}"""

FINE = f"""{MODEL}
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=8)
loader = DataLoader(data, batch_size=4, shuffle=True)
{LOOP}"""

RANKS = f"""{MODEL}
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
loader = DataLoader(data, batch_size=4)
{LOOP}"""

TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=64, num_attention_heads=2)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
model.lm_head = torch.nn.Linear(16, 64, bias=False)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
arguments = TrainingArguments("out", use_cpu=True, report_to=[], per_device_train_batch_size=2)
Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)).train()
"""

ACCELERATE = f"""{MODEL}
from accelerate import Accelerator
ours = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(data, batch_size=4, shuffle=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)  # three passes, as one rank sees them
model, optimizer, loader, scheduler = ours.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    ours.backward((model(x) - y).square().mean())
    optimizer.step()
"""


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Auditor:
    """``prepkit audit`` in processes that are forked, as torchrun would start it."""

    def __init__(self, servers: ForkServers, folder: Path) -> None:
        self.servers, self.folder = servers, folder

    def __call__(self, text: str, *words: str, world: int = 1) -> tuple[int, str, str]:
        """The largest exit code, and what all have written."""
        (self.folder / "train.py").write_text(text)
        each = ran(self.servers, world, ["-m", "prepkit", "audit", *words], ENVIRONMENT, 120, self.folder)
        return max(one.code for one in each), "".join(one.out for one in each), "".join(one.err for one in each)


@pytest.fixture
def run(fork_servers: ForkServers, tmp_path: Path) -> Auditor:
    return Auditor(fork_servers, tmp_path)


def test_a_script_with_an_error_ends_with_1_before_it_steps(run: Auditor) -> None:
    code, out, err = run(ORPHANS, "train.py", "0.001")
    assert code == 1, err
    assert "went on" not in out
    assert "error run.orphans at optimizer" in out
    assert "warning run.scheduler-early at scheduler: `OneCycleLR` is made for 3 ticks, and a pass has 8 steps" in out


def test_a_script_with_nothing_wrong_ends_with_0(run: Auditor) -> None:
    code, out, err = run(FINE, "--json", "train.py")
    assert (code, json.loads(out)["findings"]) == (0, []), err


def test_a_script_that_never_steps_or_fails_by_itself_says_so(run: Auditor) -> None:
    code, _, err = run("import sys; sys.exit(0)", "train.py")
    assert code == 2
    assert "train.py ended without an optimizer step" in err
    code, _, err = run("def load():\n    raise KeyError('mine')\nload()\n", "train.py")
    assert code == 3
    assert err.splitlines()[-6:-1] == [
        *('  File "train.py", line 3, in <module>', "    load()"),
        *('  File "train.py", line 2, in load', "    raise KeyError('mine')", "KeyError: 'mine'"),
    ]
    assert "train.py raised before its first optimizer step" in err
    assert "runpy" not in err
    code, _, err = run("import sys; sys.exit('no data')", "train.py")
    assert code == 3
    assert "train.py left with exit code no data before its first optimizer step" in err
    code, _, err = run("def load(:\n", "train.py")
    assert code == 3
    assert "SyntaxError" in err


def test_ranks_of_torchrun_are_audited_together(run: Auditor) -> None:
    """As torchrun starts them: torchrun itself is in ``tests/cli/test_audit_processes.py``."""
    code, out, err = run(RANKS, "train.py", world=2)
    assert code == 1, err
    assert out.count("audit of Sequential, 58 parameters, 58 trained; ddp over 2 ranks") == 1
    assert "error run.same-samples at loaders[0]: 2 ranks read all of its samples, in one order" in out


TICKED = f"""{MODEL}
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
ours = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), 4, shuffle=True)
model, optimizer, loader = ours.prepare(model, optimizer, loader)
EPOCHS = 2
total = EPOCHS * len(loader)
schedule = ours.prepare(LambdaLR(optimizer, lambda at: max(0.0, 1 - at / total)))
for epoch in range(EPOCHS):
    for (x,) in loader:
        optimizer.zero_grad()
        ours.backward(model(x).square().mean())
        optimizer.step()
        schedule.step()
"""


def test_a_schedule_for_all_steps_that_accelerate_ticks_once_a_process_is_told(run: Auditor) -> None:
    pytest.importorskip("accelerate")
    code, out, err = run(TICKED, "train.py", world=2)
    assert code == 0, err
    assert "warning run.ticked-by-pass at LambdaLR: It is made for 16 ticks, and for train.py:" in out
    assert "accelerate ticks it 2 times a step, one for each process: it is at its end after 8 steps" in out
    _, out, _ = run(
        TICKED.replace("EPOCHS * len(loader)", "EPOCHS * len(loader) * ours.num_processes"), "train.py", world=2
    )
    assert "ticked-by-pass" not in out


ONE_LEAVES = RANKS.replace("optimizer.step()", "if dist.get_rank() == 1: sys.exit()\n    optimizer.step()")
ONE_SKIPS = RANKS.replace(
    "optimizer.step()",
    """if dist.get_rank() == 1:
        model.module(x)
        import time; time.sleep(4); sys.exit()
    optimizer.step()""",
)
QUICK = "from prepkit.ranks import arrivals\narrivals.SAID_S, arrivals.AHEAD_S, arrivals.LOOK_S = 0.0, 1.0, 0.1\n"
AT_STEP = "Rank 0 has come to its first step, and rank 1 has not: rank 1 has called a model"


def test_a_rank_that_leaves_before_its_step_is_named_by_the_others(run: Auditor) -> None:
    code, _, err = run(QUICK + ONE_LEAVES, "train.py", world=2)
    assert code == 3
    assert f"{AT_STEP} 1 time and gone backward 1 time" in err
    assert "Rank 1: its script has left before" in err
    code, out, err = run(QUICK + ONE_LEAVES, "--prove", "train.py", world=2)
    assert code == 1, err
    assert out.startswith(f"nothing was proven\nerror prove.uneven at loop: {AT_STEP} 1 time")
    assert "Rank 1: its script has left, and has not stepped" in out


def test_a_rank_that_skips_its_step_is_given_up(run: Auditor) -> None:
    code, out, err = run(QUICK + ONE_SKIPS, "--prove", "train.py", world=2)
    assert code == 1, err
    assert f"prepkit: {AT_STEP}" in err
    assert out.startswith(f"nothing was proven\nerror prove.uneven at loop: {AT_STEP} 2 times and gone backward 1 time")
    assert "Rank 1 has done nothing more for" in out
    assert "Traceback" not in err


ONE_FIRST = f"""{MODEL}
import gc
import torch.distributed as dist
gc.disable()
dist.init_process_group("gloo")
class Teacher(nn.Sequential):
    pass
def trained():
    teacher = Teacher(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    teacher.layers = [teacher]  # which the collector alone frees
    by = torch.optim.Adam(teacher.parameters())
    for x, y in DataLoader(data, batch_size=4):
        by.zero_grad()
        (teacher(x) - y).square().mean().backward()
        by.step()
    by.param_groups.clear()  # it lives as long
    return teacher.state_dict()
if dist.get_rank() == 0:
    torch.save(trained(), "teacher.pt")
dist.barrier()
if TRAINS:
    if LOADS:
        model.load_state_dict(torch.load("teacher.pt"))
    model = nn.parallel.DistributedDataParallel(model, init_sync=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""Rank 0 trains a teacher by itself, while the other one waits for it."""


@pytest.mark.parametrize("words", [(), ("--prove",)], ids=["audit", "proof"])
def test_what_one_rank_trains_while_the_others_wait_is_no_part_of_what_all_train(
    run: Auditor, words: tuple[str, ...]
) -> None:
    def ran(loads: str, trains: str = "True") -> tuple[int, str, str]:
        return run(QUICK + ONE_FIRST.replace("LOADS", loads).replace("TRAINS", trains), *words, "train.py", world=2)

    code, out, err = ran("True")
    assert code == 0, out + err
    assert "ddp over 2 ranks; AdamW" in out
    assert ("proof of 2 x 1 micro-batches in float32, 4 gradients, 4 steps: trained as plain" in out) is bool(words)
    assert not {line.split()[0] for line in out.splitlines()} & {"warning", "error"}, out
    code, out, err = ran("dist.get_rank() == 0")
    assert code == 1, out + err
    assert ("prove.first-weights" if words else "run.ranks-values") in out
    code, out, err = ran("True", trains="False")
    assert code == (1 if words else 3), out + err
    assert "Rank 0 has made 8 steps while no other rank had called a model, and none has stepped with it" in out + err


ALL_FIRST = f"""{MODEL}
import torch.distributed as dist
dist.init_process_group("gloo")
def fit(teacher):
    by = torch.optim.Adam(teacher.parameters())
    for x, y in DataLoader(data, batch_size=4):
        by.zero_grad()
        (OF_RANK * (teacher(x) - y)).square().mean().backward()
        by.step()
    return teacher.requires_grad_(False)
teacher = fit(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
for param in model.parameters():
    dist.broadcast(param.data, 0)
WRAPS
optimizer = torch.optim.AdamW(model.parameters())
for x, y in DataLoader(data, batch_size=4, sampler=torch.utils.data.DistributedSampler(data)):
    optimizer.zero_grad()
    (model(x) - teacher(x)).square().mean().backward()
    optimizer.step()
"""
WRAPS = "model = nn.parallel.DistributedDataParallel(model)"


@pytest.mark.parametrize("words", [(), ("--prove",)], ids=["audit", "prove"])
def test_what_all_ranks_train_alike_before_the_program_wraps_a_model_is_passed(
    run: Auditor, words: tuple[str, ...]
) -> None:
    def ran(wraps: str, of_rank: str = "1.0") -> tuple[int, str]:
        text = ALL_FIRST.replace("WRAPS", wraps).replace("OF_RANK", of_rank)
        code, out, err = run(text, *words, "train.py", world=2)
        return code, out + err

    code, out = ran(WRAPS)
    assert code == 0, out
    assert "ddp over 2 ranks; AdamW" in out
    assert not words or "proof of 2 x 1 micro-batches in float32, 4 gradients, 4 steps: trained as plain" in out
    assert not {line.split()[0] for line in out.splitlines() if line.strip()} & {"warning", "error"}, out
    code, out = ran(f"if dist.get_rank() > 5:\n    {WRAPS}")  # which nobody is
    assert "Adam" in out
    assert "ddp over" not in out
    code, out = ran(WRAPS, "(1 + dist.get_rank())")
    assert code == 1, out
    assert ("trained not as plain torch" if words else "run.not-averaged") in out


LEAVES_OUT = f"""{MODEL}
import torch.distributed as dist
dist.init_process_group("gloo")
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
    def forward(self, x, which):
        return sum(getattr(self, name)(x) for name in which)
model = nn.parallel.DistributedDataParallel(Two(), bucket_cap_mb=BUCKET, gradient_as_bucket_view=VIEW)
optimizer = torch.optim.AdamW(model.parameters())
which = TAKES[dist.get_rank()]
for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    with model.no_sync():
        model(x, ["first"]).square().mean().backward()
    (model(x, which) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
BOTH = ["first", "second"]
SHORT = "from prepkit.ranks import arrivals\narrivals.SAID_S, arrivals.AHEAD_S, arrivals.STILL_S = 0.0, 4.0, 8.0\n"


def leaves_out(takes: list[list[str]], *, small: bool = False) -> str:
    """A script of two ranks under DDP whose forwards take these layers; ``small``: each has a bucket of its own."""
    words = {"TAKES": repr(takes), "BUCKET": "1e-6" if small else "25", "VIEW": str(small)}
    return reduce(lambda text, word: text.replace(*word), words.items(), LEAVES_OUT)


@pytest.mark.parametrize("small", [False, True], ids=["one bucket", "a bucket each"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_that_one_rank_alone_leaves_out_under_ddp_is_named_at_once(
    run: Auditor, rank: int, small: bool
) -> None:
    takes = [["first"] if one == rank else BOTH for one in range(2)]
    said = "error run.gradients-waited-for at model.second.weight: DDP waits for 2 gradients that never came on rank"
    for words in ((), ("--prove",)):
        code, out, err = run(SHORT + leaves_out(takes, small=small), *words, "train.py", world=2)
        assert code == 1, err
        assert f"{said} {rank}: `second.weight`, `second.bias`" in out
        assert out.count("error ") == 1, out
        assert ("DDP waits for gradients that never came, as the audit says" in out) is bool(words)


def test_layers_that_each_rank_leaves_out_under_ddp_are_named_on_both(run: Auditor) -> None:
    code, out, err = run(SHORT + leaves_out([["first"], ["second"]]), "train.py", world=2)
    assert code == 1, err
    assert "DDP waits for 4 gradients that never came: `first.weight`, `first.bias`, `second.weight`" in out
    code, out, err = run(SHORT + leaves_out([BOTH, BOTH]), "train.py", world=2)
    assert (code, "error" in out) == (0, False), err


@pytest.mark.parametrize("rank", [0, 1])
def test_what_ddp_waits_for_on_one_rank_is_named_by_an_audit_behind_the_backward(
    gang2: Gang, tmp_path: Path, rank: int
) -> None:
    takes = [["first"] if one == rank else BOTH for one in range(2)]
    asks = "    import prepkit as pk\n    print(pk.audit(model, optimizer))\n    break\n"
    text = leaves_out(takes).replace(STARTS, "").replace("    optimizer.step()\n", asks)
    (tmp_path / "train.py").write_text(text)
    for said in gang2.run(says, str(tmp_path / "train.py"), timeout=60):
        assert f"DDP waits for 2 gradients that never came on rank {rank}: `second.weight`, `second.bias`" in said


COPIED = f"""{MODEL}
import copy
model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
trained = copy.deepcopy(model)
optimizer = torch.optim.AdamW(trained.parameters())
trained(data[0][0]).float().square().mean().backward()
optimizer.step()
"""


def test_a_copy_that_trains_is_audited_and_not_what_its_forward_runs(run: Auditor) -> None:
    code, out, err = run(COPIED, "train.py")
    assert code == 1, err
    assert "error run.forward-elsewhere at model: `forward` was set on the object" in out
    assert "run.orphans" not in out


def test_a_trainer_is_audited_at_its_first_step(run: Auditor) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    code, out, err = run(TRAINER, "train.py")
    assert code == 1, err
    assert "audit of LlamaForCausalLM" in out
    assert "error run.orphans at optimizer" in out
    assert "`lm_head.weight`" in out


def test_wrappers_of_accelerate_are_found_around_what_steps(run: Auditor) -> None:
    pytest.importorskip("accelerate")
    code, out, err = run(ACCELERATE, "train.py", world=2)
    assert code == 0, err
    assert "; AdamW; CosineAnnealingLR; 1 loader" in out
    assert "warning run.scheduler-early at scheduler" in out


def audited_inside(loader: Any) -> Audit:
    """The audit of a loop that is being run over this loader, which nobody else holds."""
    passes = iter(loader)
    del loader
    gc.collect()
    next(passes)
    model = net()
    optimizer = adam(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    return audit_step(optimizer)


def test_a_loader_that_is_written_into_the_loop_is_found_by_what_reads() -> None:
    found = audited_inside(DataLoader(rows(), batch_size=4, shuffle=True, drop_last=True))
    (loader,) = found.facts.loaders
    assert (loader.seen.batch_size, loader.seen.length, loader.seen.drop_last) == (4, len(rows()), True)
    assert loader.seen.sampler == "random"


@pytest.mark.filterwarnings("error")
def test_a_data_set_of_bare_tensors_is_not_asked_by_name() -> None:
    assert first_sample(torch.zeros(4, 8, dtype=torch.int64), None) == ""


def test_a_stream_that_accelerate_hands_out_is_divided_by_it() -> None:
    pytest.importorskip("accelerate")
    from accelerate.data_loader import DataLoaderDispatcher

    stream = DataLoaderDispatcher(DataLoader(Stream(), batch_size=2).dataset, batch_size=2)
    loader = DataLoader(Stream(), batch_size=2)
    assert [type(one) for one in (stream, loader) if is_of_a_loop(type(one))] == [DataLoaderDispatcher, DataLoader]
    reading = iter(stream.base_dataloader)
    assert _loaders([stream, stream.base_dataloader, loader, reading]) == [stream]
    assert prepared_loader(stream).division == "accelerate"


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(8, WIDTH))


def test_what_prepkit_itself_raises_is_not_laid_on_the_script() -> None:
    def failing() -> Exception:
        try:
            window.sizes_of(None)  # type: ignore[arg-type]
        except TypeError as error:
            return error
        raise AssertionError

    assert "not by train.py: report it, please" in told("train.py", failing())
    assert "train.py raised before its first optimizer step" in told("train.py", ValueError("mine"))


REFUSED = "import prepkit as pk\npk.apply(3)\n"


@pytest.mark.parametrize("ours", [True, False])
def test_a_look_that_fails_says_so_and_a_refusal_that_the_script_asks_for_is_the_scripts(
    run: Auditor, ours: bool
) -> None:
    breaks = FINE.replace("optimizer.step()", "optimizer.param_groups[0][3] = 0; optimizer.step()")
    code, _, err = run(breaks if ours else REFUSED, "train.py")
    assert code == 3, err
    assert ("this was raised by prepkit itself, and not by train.py: report it, please" in err) is ours, err
    assert ("train.py raised before its first optimizer step" in err) is not ours
    assert "Traceback" in err


def test_what_torch_raises_where_a_listener_calls_it_is_the_scripts(run: Auditor) -> None:
    text = FINE.replace("optimizer.step()", "torch.ones(3).lerp_(torch.ones(4), 0.1); optimizer.step()")
    code, _, err = run(text, "train.py")
    assert code == 3, err
    assert "train.py raised before its first optimizer step" in err


HAND = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
draws = torch.Generator().manual_seed(rank)
data = [(torch.randn(6, 8, generator=draws), torch.randint(4, (6,), generator=draws)) for _ in range(3)]
alike = torch.Generator().manual_seed(7)
same = [(torch.randn(6, 8, generator=alike), torch.randint(4, (6,), generator=alike)) for _ in range(3)]
"""

STARTS = 'dist.init_process_group("gloo")\n'
STAGES = f"""{HAND}
layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
stage = nn.Sequential(*(layers[:2] if rank == 0 else layers[2:]))
del layers
optimizer = torch.optim.AdamW(stage.parameters())
for x, y in same:
    optimizer.zero_grad()
    if rank == 0:
        outputs, work = [], []
        for part in x.chunk(3):
            outputs.append(stage(part))
            work.append(dist.isend(outputs[-1].detach(), 1))
        for one in outputs:
            grad = torch.empty_like(one)
            dist.recv(grad, 1)
            one.backward(grad)
        optimizer.step()
    else:
        given, losses, work = [], [], []
        for part in y.chunk(3):
            given.append(torch.empty(2, 16))
            dist.recv(given[-1], 0)
            losses.append(functional.cross_entropy(stage(given[-1].requires_grad_()), part) / 3)
        for one, loss in zip(given, losses):
            loss.backward()
            work.append(dist.isend(one.grad, 0))
        optimizer.step()
    for one in work:
        one.wait()
"""
LATE = STAGES.replace(
    "            work.append(dist.isend(one.grad, 0))\n        optimizer.step()\n", "        optimizer.step()\n"
)
LATE = LATE.replace(
    "    for one in work:", "        work = [dist.isend(one.grad, 0) for one in given]\n    for one in work:"
)
EQUAL = STAGES.replace("(8, 16)", "(8, 8)").replace("(16, 16)", "(8, 4)").replace(", nn.Tanh(), nn.Linear(16, 4)]", "]")
EQUAL = EQUAL.replace("nn.Linear(8, 4)", "nn.Linear(8, 8)").replace("(2, 16)", "(2, 8)")

CUT = f"""{HAND}
class Enters(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad
class Leaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, grad):
        return grad
class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        torch.manual_seed(1 + rank)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.up.bias)
    def forward(self, x):
        x = self.enter(x)
        return self.head(x + Leaves.apply(self.down(torch.relu(self.up(Enters.apply(x))))))
model = Cut()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in same:
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
EXPERTS = f"""{HAND}
class Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        got = torch.empty_like(x)
        dist.all_to_all_single(got, x.contiguous())
        return got
    @staticmethod
    def backward(ctx, grad):
        got = torch.empty_like(grad)
        dist.all_to_all_single(got, grad.contiguous())
        return got
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        torch.manual_seed(1 + rank)
        self.expert = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    def forward(self, x):
        x = self.enter(x)
        return self.head(x + Sent.apply(self.expert(Sent.apply(x))))
model = Experts()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in data:
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    for name, param in model.named_parameters():
        if not name.startswith("expert"):
            dist.all_reduce(param.grad)
        param.grad /= world
    optimizer.step()
"""
HOOKED = EXPERTS.replace("        param.grad /= world", "            param.grad /= world").replace(
    "optimizer = ",
    "for param in model.expert.parameters():\n    param.register_hook(lambda grad: grad / world)\noptimizer = ",
)
OWNERS = f"""{HAND}
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
owner = {{param: at % world for at, param in enumerate(model.parameters())}}
optimizer = torch.optim.AdamW([param for param in owner if owner[param] == rank])
for x, y in data:
    functional.cross_entropy(model(x), y).backward()
    for param in owner:
        dist.reduce(param.grad, owner[param])
        param.grad = param.grad / world if owner[param] == rank else None
    optimizer.step()
    for param in owner:
        dist.broadcast(param.data, owner[param])
        param.grad = None
"""
SHARED_OUT = f"""{HAND}
from torch.distributed.optim import ZeroRedundancyOptimizer
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
for x, y in data:
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
LOCAL = f"""{HAND}
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
def average():
    for param in model.parameters():
        dist.all_reduce(param.data)
        param.data /= world
for at, (x, y) in enumerate(data):
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    average()
"""
FLAT = f"""{HAND}
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
flat = nn.utils.parameters_to_vector(model.parameters()).detach()
nn.utils.vector_to_parameters(flat, model.parameters())
half = flat.numel() // world
piece = nn.Parameter(flat[rank * half : (rank + 1) * half])
optimizer = torch.optim.AdamW([piece])
for x, y in data:
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    grads = torch.cat([param.grad.reshape(-1) for param in model.parameters()])
    dist.all_reduce(grads)
    piece.grad = grads[rank * half : (rank + 1) * half] / world
    optimizer.step()
    pieces = [torch.empty(half) for _ in range(world)]
    dist.all_gather(pieces, piece.data)
    flat.copy_(torch.cat(pieces))
"""
TAKEN_AWAY = FLAT.replace("(rank + 1) * half])", "(rank + 1) * half].clone())")
TAKEN_AWAY = TAKEN_AWAY.replace(
    "    optimizer.step()", "    for param in model.parameters():\n        param.grad = None\n    optimizer.step()"
)
OF_TORCH = f"""{HAND}
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
stage = nn.Sequential(*(layers[:2] if rank == 0 else layers[2:]))
del layers
optimizer = torch.optim.AdamW(stage.parameters())
held = PipelineStage(stage, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(held, n_microbatches=3, loss_fn=functional.cross_entropy)
for x, y in same:
    optimizer.zero_grad()
    schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
    optimizer.step()
"""
SEEDED_APART = "torch.manual_seed(0)", "torch.manual_seed(rank)"
PERSONAL = f"""{HAND}
backbone = nn.parallel.DistributedDataParallel(nn.Linear(8, 16))
head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4 + 2 * rank))
optimizers = torch.optim.AdamW(backbone.parameters()), torch.optim.SGD(head.parameters(), 0.1)
for x, y in data:
    loss = functional.cross_entropy(head(backbone(x)), y)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
"""
IN_ONE = (
    "torch.optim.AdamW(backbone.parameters()), torch.optim.SGD(head.parameters(), 0.1)",
    "[torch.optim.AdamW([*backbone.parameters(), *head.parameters()])]",
)
PROVEN_ALONE = "Sequential of rank 1: proof of 1 x 1 micro-batches in float32, 4 gradients, 4 steps: trained as plain"

WIDTHS = f"""{HAND}
actor = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
critic = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
width = nn.Parameter(torch.zeros(2))
acts = torch.optim.Adam([*actor.parameters(), width])
values = torch.optim.Adam(critic.parameters())
for x, _ in data:
    values.zero_grad()
    (critic(x)[:, 0] - x.sum(1)).square().mean().backward()
    values.step()
    said = actor(x)
    drawn = said.detach() + torch.randn(6, 2, generator=draws)
    acts.zero_grad()
    (width + 0.5 * ((drawn - said) / width.exp()).square()).mean().backward()
    acts.step()
"""

CUT_BETWEEN = (
    CUT.replace("self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 4)", "whole = nn.Linear(8, 8)")
    .replace("        nn.init.zeros_(self.up.bias)\n", "        self.compared = (whole,)\n")
    .replace("        x = self.enter(x)\n", "")
    .replace("self.head(x + Leaves", "(x + Leaves")
    .replace("model = Cut()", "enter, head = nn.Linear(8, 8), nn.Linear(8, 4)\nmodel = Cut()")
    .replace("(model.parameters())", "([*enter.parameters(), *model.parameters(), *head.parameters()])")
    .replace("model(x)", "head(model(enter(x)))")
)
"""The same between two models of their own, beside a layer that it is compared with and that nobody trains."""


RIGHT_BY_HAND: dict[str, tuple[str, str]] = {
    "a layer that is cut, between others": (CUT_BETWEEN, "gradients by their slopes, 3 steps: trained as plain"),
    "stages": (STAGES, "of rank 1: proof of 1 x 3 micro-batches in float32, 4 gradients, 4 steps: trained as plain"),
    "stages of one shape": (EQUAL, "of rank 1: proof of 1 x 3 micro-batches in float32, 2 gradients, 2 steps: trained"),
    "a stage that steps before it answers": (LATE, "of rank 0: proof of 1 x 3 micro-batches in float32, 2 gradients"),
    "a layer that is cut": (CUT, "gradients by their slopes, 7 steps: trained as plain torch trains it"),
    "experts": (EXPERTS, "gradients by their slopes, 10 steps: trained as plain torch trains it"),
    "experts whose gradients a hook divides": (HOOKED, "gradients by their slopes, 10 steps: trained as plain torch"),
    "owners of parts": (
        OWNERS,
        "proof of 2 x 1 micro-batches in float32, 4 gradients, 4 steps: trained as plain torch",
    ),
    "pieces of a flat buffer": (FLAT, "prove.unproven at proof: an optimizer steps a part of 0.weight, as a piece"),
    "pieces that are copies, of gradients that are taken away": (
        TAKEN_AWAY,
        "prove.unproven at proof: an optimizer has stepped copies of the weights",
    ),
    "stages of torch's own": (
        OF_TORCH,
        "of rank 0: proof of 1 x 3 micro-batches in float32, 2 gradients, 2 steps: train",
    ),
    "weights that are averaged": (LOCAL, "nothing is known of its gradients\nnote prove.limit at proof: Each rank has"),
    "heads of each rank's own classes": (PERSONAL, PROVEN_ALONE),
    "heads of each rank's own classes in one optimizer": (PERSONAL.replace(*IN_ONE), PROVEN_ALONE),
    "weights that are averaged at times": (
        LOCAL.replace("    average()\n", "    if at % 3 == 2:\n        average()\n"),
        "averages weights behind another step, as it seems (train.py:",
    ),
    "weights that a function is given and averages": (
        LOCAL.replace(
            "def average():\n    for param in model.parameters():", "def average(given):\n    for param in given:"
        )
        .replace(
            "dist.all_reduce(param.data)\n        param.data /= world", "dist.all_reduce(param)\n        param /= world"
        )
        .replace("    average()\n", "    if at % 3 == 2:\n        average([one.data for one in model.parameters()])\n"),
        "averages weights behind another step, as it seems (train.py:",
    ),
}
"""Each with what its proof says."""
WRONG_BY_HAND: dict[str, tuple[str, bool, str]] = {
    "a stage that does not divide": (STAGES.replace(" / 3)", ")"), True, "prove.accumulation at Sequential of rank 1"),
    "a stage that takes its last micro-batch first": (
        STAGES.replace("for one in outputs:\n", "for one in reversed(outputs):\n"),
        True,
        "prove.handed-back at Sequential of rank 0: gradients: What rank 0 had sent from its call 0, rank 1 has",
    ),
    "a width of no module that is stepped behind a critic": (
        WIDTHS,
        True,
        "run.not-averaged at optimizer: It steps 1 tensor of no module (shapes [2]) beside parameters of the model",
    ),
    "a stage that clears nothing": (
        STAGES.replace("    optimizer.zero_grad()", "    if rank == 1: optimizer.zero_grad()"),
        True,
        "prove.left-over at Sequential of rank 0",
    ),
    "replicas that are seeded apart": (
        LOCAL.replace(*SEEDED_APART).replace("    average()\n", ""),
        False,
        "run.ranks-values at model.0.weight: Every rank holds 4 tensors",
    ),
    "layers beside a cut one whose gradients are parts": (
        CUT.replace("        dist.all_reduce(grad)\n", ""),
        False,
        "run.not-averaged at model.enter.weight: Nobody averages 2 of 7 trained parameters: `enter.weight`, ",
    ),
    "layers beside experts that nobody averages": (
        EXPERTS.replace("            dist.all_reduce(param.grad)\n", "            pass\n"),
        False,
        "run.not-averaged at model.enter.weight: Nobody averages 4 of 10 trained parameters: `enter.weight`",
    ),
    "layers beside experts of a hook that nobody averages": (
        HOOKED.replace("            dist.all_reduce(param.grad)\n", ""),
        False,
        "run.not-averaged at model.enter.weight: Nobody averages 4 of 10 trained parameters: `enter.weight`",
    ),
    "owners that reduce nothing": (
        OWNERS.replace("        dist.reduce(param.grad, owner[param])\n", ""),
        True,
        "prove.not-averaged at model.0.weight: The gradients of 2 of 4 parameters",
    ),
    "parts of an optimizer that reduces nothing": (
        SHARED_OUT,
        True,
        "prove.not-averaged at gradients: All gradients are each rank's own",
    ),
    "gradients that another rank has": (
        OWNERS.replace("if owner[param] == rank else None", "if owner[param] != rank else None"),
        False,
        "run.gradients-on-some-ranks at model.0.weight",
    ),
    "owners that send nothing": (
        OWNERS.replace("        dist.broadcast(param.data, owner[param])\n", ""),
        True,
        "prove.after-apart at model.0.weight: Rank 1 has other weights",
    ),
    "parts that a rank sends and does not step": (
        OWNERS.replace("dist.broadcast(param.data, owner[param])", "dist.broadcast(param.data, 0)"),
        True,
        "prove.not-stepped at model.0.bias: Rank 1 has stepped 2 parameters that are behind the step as they were",
    ),
    "weights of rank 0 behind each step": (
        LOCAL.replace("dist.all_reduce(param.data)", "dist.broadcast(param.data, 0)").replace("/= world", "/= 1"),
        True,
        "prove.not-averaged at gradients: All gradients are each rank's own",
    ),
    "an average of weights that nobody calls": (
        LOCAL.replace("    average()\n", ""),
        False,
        "run.not-averaged at model: 2 ranks run, and nothing averages the gradients",
    ),
    "an average of weights before the loop alone": (
        LOCAL.replace("    average()\n", "").replace("for at, (x", "average()\nfor at, (x"),
        True,
        "prove.not-averaged at gradients: All gradients are each rank's own",
    ),
}
"""Each with whether it takes a proof, and what is said."""


OF_ACCELERATE = f"""{ACCELERATE}
from accelerate.local_sgd import LocalSGD
with LocalSGD(accelerator=ours, model=model, local_sgd_steps=4) as local:
    for x, y in loader:
        ours.backward((model(x) - y).square().mean())
        optimizer.step()
        local.step()
        scheduler.step()
""".replace("for x, y in loader:\n    ours.backward", "for x, y in ():\n    ours.backward").replace(
    "optimizer, 12", "optimizer, 24"
)
POST_LOCAL = f"""{HAND}
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
state = local.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
model.register_comm_hook(state, local.post_localSGD_hook)
optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), PeriodicModelAverager(2, 0))
for x, y in data:
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
INSIDE_NO_SYNC = f"""{HAND}
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for at, (x, y) in enumerate(data):
    with model.no_sync():
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if at % 2:
        for param in model.parameters():
            dist.all_reduce(param.data)
            param.data /= world
"""
PAST_BACKWARD = f"""{HAND}
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in data:
    grads = torch.autograd.grad(functional.cross_entropy(model(x), y), [*model.parameters()])
    for param, param.grad in zip(model.parameters(), grads):
        pass
    optimizer.step()
"""
DILOCO = f"""{HAND}
model = nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
start = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
outer = torch.optim.SGD(start, lr=0.7, momentum=0.9, nesterov=True)
for at, (x, y) in enumerate(data):
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if at % 2:
        for first, param in zip(start, model.parameters()):
            first.grad = first.data - param.data
            dist.all_reduce(first.grad)
            first.grad /= world
        outer.step()
        for first, param in zip(start, model.parameters()):
            param.data.copy_(first.data)
"""
AS_VECTOR = DILOCO.replace(
    """        for first, param in zip(start, model.parameters()):
            first.grad = first.data - param.data
            dist.all_reduce(first.grad)
""",
    """        moved = [first.data - param.data for first, param in zip(start, model.parameters())]
        row = torch.cat([one.flatten() for one in moved])
        dist.all_reduce(row)
        for first, part in zip(start, row.split([one.numel() for one in start])):
            first.grad = part.view_as(first)
""",
)
STEPS_ALONE: dict[str, tuple[str, bool, str]] = {
    "what ranks have moved is averaged": (
        DILOCO,
        True,
        "note run.maybe-averaged at model.weight: Each rank is about to step 2",
    ),
    "what ranks have moved is averaged as a vector": (
        AS_VECTOR,
        True,
        "note run.maybe-averaged at model.weight: Each rank is about to step 2",
    ),
    "how far ranks have moved is measured": (
        DILOCO.replace("all_reduce(first.grad)", "all_reduce(first.grad, op=dist.ReduceOp.MAX)"),
        False,
        "run.not-averaged at model: 2 ranks run, and nothing averages",
    ),
    "local SGD of accelerate": (OF_ACCELERATE, True, ""),
    "post-local SGD of torch": (POST_LOCAL, True, ""),
    "local SGD by hand": (
        INSIDE_NO_SYNC,
        True,
        "note run.maybe-averaged at model.weight: Each rank is about to step 2",
    ),
    "local SGD that is off": (
        OF_ACCELERATE.replace("steps=4", "steps=4, enabled=False").replace(") as local", ") as local, model.no_sync()"),
        False,
        "Leave no_sync() before the last backward of a window; it stays on where weights are averaged",
    ),
    "post-local SGD that never averages": (
        POST_LOCAL.replace("PostLocalSGDOptimizer(torch", "(torch").replace(", PeriodicModelAverager(2, 0)", ""),
        False,
        "`post_localSGD_hook` leaves gradients to each rank by now: step by PostLocalSGDOptimizer",
    ),
    "no_sync() alone": (
        INSIDE_NO_SYNC.partition("    if at % 2")[0],
        False,
        "error run.gradients-part at model.weight",
    ),
    "gradients past backward": (PAST_BACKWARD, False, "Call loss.backward(), which fills .grad with the average"),
}
"""Each with whether it is right, and what is said."""


@pytest.mark.parametrize("name", STEPS_ALONE)
def test_ranks_step_by_gradients_of_their_own_only_where_weights_are_averaged(run: Auditor, name: str) -> None:
    pytest.importorskip("accelerate")
    text, right, said = STEPS_ALONE[name]
    code, out, err = run(text, "train.py", world=2)
    assert (code, "error" not in out and "warning" not in out) == (int(not right), right), (out, err)
    assert said in " ".join(out.split())


WATCHED = LOCAL.replace("    average()\n", "    if at % 3 == 2:\n        average()\n").replace("range(3)]", "range(9)]")
WATCHED = WATCHED.replace(
    "def average", "import prepkit as pk\nwatch = pk.watch(model, optimizer, every=1)\ndef average"
)
WATCHED += "print(*watch.findings)\n"


@pytest.mark.parametrize("averages", [True, False])
def test_ranks_that_meet_at_times_do_not_drift_in_between(
    fork_servers: ForkServers, tmp_path: Path, averages: bool
) -> None:
    text = WATCHED if averages else WATCHED.replace("        average()\n", "        pass\n")
    (tmp_path / "train.py").write_text(text)
    each = ran(fork_servers, 2, ["train.py"], ENVIRONMENT, 120, tmp_path)
    assert [one.code for one in each] == [0, 0], each
    assert all(("run.ranks-values" in one.out) is not averages for one in each), each


@pytest.mark.parametrize("name", RIGHT_BY_HAND)
def test_what_is_divided_over_ranks_by_hand_has_no_finding_above_a_note(run: Auditor, name: str) -> None:
    text, said = RIGHT_BY_HAND[name]
    code, out, err = run(text, "train.py", world=2)
    assert (code, "error" in out, "warning" in out) == (0, False, False), (out, err)
    code, out, err = run(text, "--prove", "train.py", world=2)
    blind = "prove.unproven" in out or "nothing is known of its gradients" in out
    assert (code, "error" in out) == (4 if blind else 0, False), (out, err)
    assert said in out
    assert "warning" not in out or "prove.unproven" in out


@pytest.mark.parametrize("name", WRONG_BY_HAND)
def test_what_is_divided_wrongly_by_hand_is_an_error(run: Auditor, name: str) -> None:
    text, prove, said = WRONG_BY_HAND[name]
    code, out, err = run(text, *["--prove"] * prove, "train.py", world=2)
    assert code == 1, (out, err)
    assert f"error {said}" in out
    assert ("prove.not-averaged" in said) <= ("prove.step-size" not in out)  # which comes of it


@pytest.mark.parametrize("size", ["4 + 2 * rank", "4"])
@pytest.mark.parametrize("optimizers", [IN_ONE[0], IN_ONE[1]])
def test_what_each_rank_steps_by_itself_is_its_own_where_sizes_say_so(run: Auditor, size: str, optimizers: str) -> None:
    text = PERSONAL.replace(IN_ONE[0], optimizers).replace("4 + 2 * rank", size)
    text = text.replace("head =", "torch.manual_seed(rank)\nhead =")
    code, out, err = run(text, "--steps", "3", "train.py", world=2)
    own = size != "4"
    milder = optimizers == IN_ONE[0]
    assert code == int(not own and not milder), (out, err)
    assert ("note run.maybe-averaged" in out and "warning" not in out) is own, out
    for rule in () if own else ("run.ranks-values", "run.not-averaged"):
        assert f"{'warning' if milder else 'error'} {rule} at" in out, out


CUT_BY_HAND = {"stages": STAGES, "stages of one shape": EQUAL, "a layer that is cut": CUT, "experts": EXPERTS}


def asked_itself(gang2: Gang, tmp_path: Path, text: str) -> list[str]:
    """What ``pk.audit`` says on each rank in a program that asks it before its first step."""
    train = tmp_path / "train.py"
    name = "stage" if "stage =" in text else "model"
    asks = f"\nimport prepkit as pk\nprint(pk.audit({name}, optimizer))\nfor "
    train.write_text(text.replace(STARTS, "").replace("\nfor ", asks, 1))
    return gang2.run(says, str(train), timeout=60)


def says(rank: int, world: int, train: str) -> str:
    del rank, world
    out = StringIO()
    with redirect_stdout(out):
        runpy.run_path(train)
    return out.getvalue()


@pytest.mark.parametrize("name", CUT_BY_HAND)
def test_layers_that_are_cut_by_hand_may_hold_values_of_their_own(gang2: Gang, tmp_path: Path, name: str) -> None:
    for said in asked_itself(gang2, tmp_path, CUT_BY_HAND[name]):
        assert "error" not in said, said
        assert "note run.maybe-averaged" in said or name == "stages", said


def test_replicas_of_their_own_values_are_an_error_where_nothing_is_sent(gang2: Gang, tmp_path: Path) -> None:
    replicas = LOCAL.replace(*SEEDED_APART).replace("    average()\n", "")
    for said in asked_itself(gang2, tmp_path, replicas):
        assert "error run.ranks-values at model.0.weight" in said, said


@pytest.mark.parametrize("backwards", [1, 3])
def test_a_number_of_micro_batches_that_a_loop_counts_itself_is_used(backwards: int) -> None:
    """``accelerator.backward`` divides by it without ``accumulate()`` too."""
    pytest.importorskip("accelerate")
    ours = accelerator(gradient_accumulation_steps=3)
    model, optimizer = ours.prepare(net(), adam(net()))
    with (heard := window.Window()).on():
        for _ in range(backwards):
            ours.backward(model(torch.ones(4, WIDTH)).square().sum())
    found = audit(model, optimizer, at_step=True, window=heard.facts([], model))
    accelerator()  # as it was before
    assert ("run.unused-window" in {one.rule for one in found.findings}) == (backwards == 1)
