"""What is said of a script names the cause that was seen, and its advice, followed to the letter, mends it."""

from __future__ import annotations

import pytest
from attrs import frozen

from tests.audit import test_script
from tests.audit.test_script import Auditor

run = test_script.run
ONE = """
import random, numpy, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
torch.manual_seed(0)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
loss = nn.functional.cross_entropy(model(x), y)
"""
RANKS = """
import itertools, torch, torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset, random_split
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.randn(80, 8))
torch.manual_seed(rank)
"""


@frozen(kw_only=True)
class Advice:
    """A program with an error, what is said of it, and the advice."""

    text: str
    says: tuple[str, ...]
    follow: tuple[tuple[str, str], ...]
    """What is written in the place of what; nothing is said then."""
    ranks: int = 1
    then: str = ""
    """What may be said all the same."""


def draws(makes: str) -> str:
    """A program whose data set holds a generator, of which each worker has a copy."""
    return f"""{ONE}
class Augmented(Dataset):
    def __init__(self):
        self.draws = {makes}
    def __len__(self):
        return 16
    def __getitem__(self, at):
        noise = torch.rand((), generator=self.draws) if isinstance(self.draws, torch.Generator) else self.draws.random()
        return torch.ones(8) * float(noise)
def init(worker):
    pass
for x in DataLoader(Augmented(), 4, shuffle=True, num_workers=2, worker_init_fn=init):
    model(x).square().mean().backward()
    optimizer.step()
"""


def reseeds(line: str) -> Advice:
    makes = {
        "seed(": "random.Random(0)",
        "manual_seed(": "torch.Generator()",
        "seed(torch.initial_seed() % 2**32)": "numpy.random.RandomState(0)",
    }
    line = f"torch.utils.data.get_worker_info().dataset.draws{line}"
    made = makes.get(line.rpartition("draws.")[2], makes.get(line.rpartition("draws.")[2].partition("torch")[0]))
    return Advice(
        text=draws(made or "numpy.random.default_rng(0)"),
        says=("run.workers-alike", f"Write in worker_init_fn: {line}, which is"),
        follow=(("    pass\n", f"    {line}\n"),),
    )


ADAPTED = """
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8).requires_grad_(False)
        self.adapter, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(checkpoint(FUNCTION, x, use_reentrant=True))
    def adapted(self, x):
        return self.adapter(self.body(x))
"""
LABELS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
PAD = 0
sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
config = GPT2Config(vocab_size=64, pad_token_id=PAD, bos_token_id=1, eos_token_id=1, **sizes)
model = GPT2LMHeadModel(config).train()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.tensor([ROWS])
attention_mask, labels = (ids != PAD).long(), ids.clone()
model(input_ids=ids, labels=labels).loss.backward()
optimizer.step()
"""
UNLABELLED = ("labels=labels)", "labels=labels.masked_fill(attention_mask == 0, -100))")
MASKED = ("input_ids=ids,", "input_ids=ids, attention_mask=attention_mask,")
UNLABEL = "write labels.masked_fill(attention_mask == 0, -100), with the tokenizer's attention_mask."

ADVICE: dict[str, Advice] = {
    "a loss that is made anew": Advice(
        text=f"{ONE}losses = [loss, loss]\ntorch.tensor([one.item() for one in losses], requires_grad=True).mean()"
        ".backward()\noptimizer.step()\n",
        says=("error run.steps-nothing", "the loss that went backward (train.py:12) leads to no parameter of a model."),
        follow=(("torch.tensor([one.item() for one in losses], requires_grad=True)", "torch.stack(losses)"),),
    ),
    "gradients that are cleared to None": Advice(
        text=f"{ONE}loss.backward()\noptimizer.zero_grad()\noptimizer.step()\n",
        says=("error run.steps-nothing", "has a gradient: zero_grad() (train.py:12) has cleared them since the last"),
        follow=(("loss.backward()\noptimizer.zero_grad()\n", "optimizer.zero_grad()\nloss.backward()\n"),),
    ),
    "gradients that are cleared to zeros": Advice(
        text=f"{ONE}loss.backward()\nmodel.zero_grad(set_to_none=False)\noptimizer.step()\n",
        says=("error run.steps-nothing", "is zero: zero_grad() (train.py:12) has cleared them since the last backward"),
        follow=(
            (
                "model.zero_grad(set_to_none=False)\noptimizer.step()",
                "optimizer.step()\nmodel.zero_grad(set_to_none=False)",
            ),
        ),
    ),
    "a loss times 0": Advice(
        text=f"{ONE}(loss * 0).backward()\noptimizer.step()\n",
        says=("warning run.steps-nothing", "is zero.\n", "a clip of 0, a loss times 0, or labels"),
        follow=(("(loss * 0)", "loss"),),
    ),
    "no backward": Advice(
        text=f"{ONE}optimizer.step()\n",
        says=(
            "error run.steps-nothing",
            "nothing went backward before",
            "Call loss.backward() before optimizer.step()",
        ),
        follow=(("optimizer.step()", "loss.backward()\noptimizer.step()"),),
    ),
    "a loss of another model": Advice(
        text=f"{ONE}other = nn.Linear(8, 3)\nother(x).square().mean().backward()\noptimizer.step()\n",
        says=("error run.steps-nothing", "what went backward leads to others", "Give the optimizer what the loss is"),
        follow=(("optimizer.step()", "optimizer = torch.optim.SGD(other.parameters(), 0.1)\noptimizer.step()"),),
    ),
    **{
        f"a checkpoint of {function}": Advice(
            text=f"{ONE}{ADAPTED.replace('FUNCTION', function)}model = Adapted()\n"
            "optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)\n"
            "nn.functional.cross_entropy(model(x), y).backward()\noptimizer.step()\n",
            says=(
                "error run.reentrant-frozen at model.adapter.weight: checkpoint(..., use_reentrant=True) (train.py:18)",
                "a gradient: none reaches 2 parameters inside: `adapter.weight`, `adapter.bias`.",
            ),
            follow=(("use_reentrant=True", "use_reentrant=False"),),
        )
        for function in ("self.adapted", "lambda z: self.adapter(self.body(z))", "lambda z, a=self.adapter: a(z)")
    },
    "pads behind the text that count": Advice(
        text=LABELS.replace("ROWS", "[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 0]"),
        says=("error run.text-odd", "Samples end in pads that count as labels", f"W{UNLABEL[1:]}"),
        follow=(UNLABELLED,),
    ),
    "pads before the text that count": Advice(
        text=LABELS.replace("ROWS", "[0, 0, 5, 6, 7, 8], [0, 5, 6, 7, 8, 9]"),
        says=(
            "error run.text-odd",
            "Samples begin with pads",
            f"Give the tokenizer's attention_mask along, and {UNLABEL}",
        ),
        follow=(UNLABELLED, MASKED),
    ),
    "pads before the text": Advice(
        text=LABELS.replace("ROWS", "[0, 0, 5, 6, 7, 8], [0, 5, 6, 7, 8, 9]").replace(*UNLABELLED),
        says=("error run.text-odd", "Samples begin with pads", "Give the tokenizer's attention_mask along.\n"),
        follow=(MASKED,),
    ),
    "a generator of Python": reseeds(".seed(torch.initial_seed())"),
    "a generator of torch": reseeds(".manual_seed(torch.initial_seed())"),
    "an old generator of numpy": reseeds(".seed(torch.initial_seed() % 2**32)"),
    "a generator of numpy": reseeds(" = numpy.random.default_rng(torch.initial_seed())"),
    "gradients past DDP": Advice(
        text=f"{RANKS}params = list(model.parameters())\n"
        "loss = model(torch.randn(4, 8)).square().mean()\n"
        "for one, grad in zip(params, torch.autograd.grad(loss, params)):\n    one.grad = grad\noptimizer.step()\n",
        says=("error run.gradients-part", "torch.autograd.grad (train.py:15) has made them", "Call loss.backward()"),
        follow=(
            (
                "for one, grad in zip(params, torch.autograd.grad(loss, params)):\n    one.grad = grad",
                "loss.backward()",
            ),
        ),
        ranks=2,
    ),
    "gradients past DDP, averaged by hand": Advice(
        text=f"{RANKS}params = list(model.parameters())\n"
        "loss = model(torch.randn(4, 8)).square().mean()\n"
        "for one, grad in zip(params, torch.autograd.grad(loss, params)):\n    one.grad = grad\noptimizer.step()\n",
        says=("or average each by hand: torch.distributed.all_reduce(grad); grad /= world.",),
        follow=(("    one.grad =", "    torch.distributed.all_reduce(grad); grad /= world\n    one.grad ="),),
        ranks=2,
    ),
    "a call past DDP": Advice(
        text=f"{RANKS}model.module(torch.randn(4, 8)).square().mean().backward()\noptimizer.step()\n",
        says=("error run.gradients-part", "`weight`, `bias`.\n", "Call the wrapper, model(x), and not model.module(x)"),
        follow=(("model.module(", "model("),),
        ranks=2,
    ),
    "a checkpoint under DDP": Advice(
        text=f"{RANKS}{ADAPTED.replace('FUNCTION', 'self.adapted')}"
        "model = nn.parallel.DistributedDataParallel(Adapted())\n"
        "optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)\n"
        "model(torch.randn(4, 8)).square().mean().backward()\noptimizer.step()\n",
        says=(
            "error run.reentrant-frozen at model.adapter.weight",
            "error run.gradients-waited-for",
            "a bucket with them.\n  fix: Write torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",
        ),
        follow=(("use_reentrant=True", "use_reentrant=False"),),
        ranks=2,
    ),
    "a split that each rank draws": Advice(
        text=f"{RANKS}train, held = random_split(data, [64, 16])\n"
        "for (x,) in DataLoader(train, 4, sampler=DistributedSampler(train)):\n"
        "    model(x).square().mean().backward()\n    optimizer.step()\n",
        says=(
            "error run.divided-twice at loaders[0]: Data sets differ by rank, and a DistributedSampler cuts each into",
            "They are parts of one and overlap",
            "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))",
        ),
        follow=(("[64, 16])", "[64, 16], generator=torch.Generator().manual_seed(0))"),),
        ranks=2,
    ),
    "parts that are divided again": Advice(
        text=f"{RANKS}part = Subset(data, range(rank, 80, world))\n"
        "for (x,) in DataLoader(part, 4, sampler=DistributedSampler(part)):\n"
        "    model(x).square().mean().backward()\n    optimizer.step()\n",
        says=(
            "error run.divided-twice at loaders[0]",
            "a rank reads 1 of its own.\n",
            "Divide once: by the sampler, over",
        ),
        follow=(("Subset(data, range(rank, 80, world))", "data"),),
        ranks=2,
    ),
    "a stream that nothing divides": Advice(
        text=f"""{RANKS}
class Stream(IterableDataset):
    def __iter__(self):
        samples = (torch.full((8,), float(at)) for at in range(64))
        return samples
for x in DataLoader(Stream(), 4):
    model(x).square().mean().backward()
    optimizer.step()
""",
        says=(
            "error run.same-samples",
            "Write accelerator.prepare(loader), or",
            "itertools.islice(samples, rank, None, world)",
        ),
        follow=(("return samples", "return itertools.islice(samples, rank, None, world)"),),
        ranks=2,
    ),
    "a stream that nothing divides, under accelerate": Advice(
        text=f"""{RANKS}
from accelerate import Accelerator
class Stream(IterableDataset):
    def __iter__(self):
        return (torch.full((8,), float(at)) for at in range(64))
accelerator, loader = Accelerator(cpu=True), DataLoader(Stream(), 4)
for x in loader:
    model(x).square().mean().backward()
    optimizer.step()
""",
        says=("error run.same-samples", "Write accelerator.prepare(loader), or"),
        follow=(("for x in loader", "for x in accelerator.prepare(loader)"),),
        ranks=2,
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_that_is_followed_to_the_letter_mends(run: Auditor, name: str) -> None:
    one = ADVICE[name]
    if "transformers" in one.text:
        pytest.importorskip("transformers")
    code, out, err = run(one.text, "train.py", world=one.ranks)
    assert [part for part in one.says if part not in out] == [], (out, err)
    mended = one.text
    for old, new in one.follow:
        assert old in mended
        mended = mended.replace(old, new)
    code, out, err = run(mended, "train.py", world=one.ranks)
    assert (code, "error" in out, "warning" in out) == (0, False, False), (out, err)


EMPTY = f"""{ONE}
for epoch in range(2):
    for (x,) in DataLoader(DATA, 32, shuffle=True, drop_last=True):
        optimizer.step()
"""


@pytest.mark.parametrize("prove", [(), ("--prove",)])
def test_a_loader_without_a_batch_is_named_where_a_script_takes_no_step(run: Auditor, prove: tuple[str, ...]) -> None:
    code, out, err = run(EMPTY.replace("DATA", "TensorDataset(torch.ones(20, 8))"), *prove, "train.py")
    assert (code, out) == (2, "")
    assert err.count("run.no-batches") == 1
    assert "train.py ended without an optimizer step" in err
    assert "error run.no-batches at loader of TensorDataset: A pass over it has no batch: of 20 samples it has" in err
    stream = "class Empty(IterableDataset):\n    def __iter__(self):\n        return iter(())\nfor epoch"
    text = EMPTY.replace("for epoch", stream, 1).replace("DATA, 32, shuffle=True, drop_last=True", "Empty(), 4")
    code, out, err = run(text, *prove, "train.py")
    assert (code, out, "error run.no-batches at loader of Empty: A pass over it has no batch.\n" in err) == (
        2,
        "",
        True,
    )


def test_a_script_without_a_step_whose_loaders_have_batches_names_none(run: Auditor) -> None:
    text = EMPTY.replace("DATA", "TensorDataset(torch.ones(64, 8))").replace("optimizer.step()", "model(x)")
    code, out, err = run(text, "train.py")
    assert (code, out, "no-batches" in err) == (2, "", False)


RIGHT: dict[str, tuple[int, str]] = {
    "a frozen body in a reentrant checkpoint": (
        1,
        (
            f"{ONE}body = nn.Linear(8, 8).requires_grad_(False)\n"
            "nn.functional.cross_entropy(model(checkpoint(body, x, use_reentrant=True)), y).backward()\n"
            "optimizer.step()\n"
        ),
    ),
    "a reentrant checkpoint that is evaluated": (
        1,
        (
            f"{ONE}with torch.no_grad():\n    checkpoint(model, x, use_reentrant=True)\nloss.backward()\n"
            "optimizer.step()\n"
        ),
    ),
    "a reentrant checkpoint of an input with a gradient": (
        1,
        (
            f"{ONE}body = nn.Linear(8, 8)\noptimizer.add_param_group({{'params': body.parameters()}})\n"
            "given = checkpoint(body, x.requires_grad_(), use_reentrant=True)\n"
            "nn.functional.cross_entropy(model(given), y).backward()\n"
            "optimizer.step()\n"
        ),
    ),
    "gradients that are cleared after each step, and in the place of None": (
        1,
        (
            f"{ONE}optimizer.zero_grad(set_to_none=False)\nloss.backward()\noptimizer.step()\n"
            "optimizer.zero_grad(set_to_none=False)\n"
        ),
    ),
    "a norm of gradients that is taken before DDP's": (
        2,
        (
            f"{RANKS}loss = model(torch.randn(4, 8)).square().mean()\n"
            "torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)\n"
            "loss.backward()\noptimizer.step()\n"
        ),
    ),
    "one split on every rank": (
        2,
        (
            f"{RANKS}train, held = random_split(data, [64, 16], generator=torch.Generator().manual_seed(3))\n"
            "for (x,) in DataLoader(train, 4, sampler=DistributedSampler(train)):\n"
            "    model(x).square().mean().backward()\n    optimizer.step()\n"
        ),
    ),
    "parts that nothing divides again": (
        2,
        (
            f"{RANKS}for (x,) in DataLoader(Subset(data, range(rank, 80, world)), 4, shuffle=True):\n"
            "    model(x).square().mean().backward()\n    optimizer.step()\n"
        ),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_neighbours_have_no_finding_above_a_note(run: Auditor, name: str) -> None:
    ranks, text = RIGHT[name]
    code, out, err = run(text, "train.py", world=ranks)
    assert (code, "error" in out, "warning" in out) == (0, False, False), (out, err)
