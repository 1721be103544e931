"""What an audit of several steps finds behind the first of them, and that right loops have nothing there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributions import Categorical
from torch.nn import functional as fn

from prepkit.auditing.script import audit_run
from tests.audit.lessons_loops import FOUND_OUT, NOT_FOUND_OUT
from tests.audit.test_script import Auditor
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang

STEPS = 8
Train = Callable[[], None]


def layers(width: int = 4, *, drops: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1 if drops else 0.0), nn.GELU(), nn.Linear(16, width))


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(3 * STEPS)]


def trains(behind: Callable[[int, Any, Any], None], *, drops: bool = False) -> Train:
    """A loop that does this behind each step, with its number, the model and the optimizer."""

    def train() -> None:
        torch.manual_seed(0)
        trained = layers(drops=drops)
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
        for at, (x, y) in enumerate(batches()):
            fn.cross_entropy(trained(x), y).backward()
            optimizer.step()
            behind(at, trained, optimizer)

    return train


def clears(at: int, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def forgets(at: int, model: Any, optimizer: Any) -> None:
    """Clears nothing."""


def seeds(number: Callable[[int], int]) -> Callable[[int, Any, Any], None]:
    def behind(at: int, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        torch.manual_seed(number(at))

    return behind


def evaluates(*, goes_on: bool) -> Callable[[int, Any, Any], None]:
    def behind(at: int, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        if at % 3 == 2:
            model.eval()
            with torch.no_grad():
                model(torch.randn(2, 8))
            model.train(goes_on)

    return behind


def two_models(*, detached: bool) -> Train:
    """A maker and a judge, of which the judge steps first."""

    def train() -> None:
        torch.manual_seed(0)
        maker, judge = layers(8), layers(1)
        optimizers = [torch.optim.Adam(one.parameters(), 1e-3) for one in (judge, maker)]
        for x, _ in batches():
            made = maker(torch.randn(6, 8))
            optimizers[0].zero_grad()
            (fn.softplus(-judge(x)).mean() + fn.softplus(judge(made.detach())).mean()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            fn.softplus(-judge(made.detach() if detached else made)).mean().backward()
            optimizers[1].step()

    return train


def in_one_module(*, detached: bool) -> Train:
    """As ``two_models``, where both are parts of one, as in Lightning."""

    def train() -> None:
        torch.manual_seed(0)
        both = nn.ModuleDict({"maker": layers(8), "judge": layers(1)})
        maker, judge = both["maker"], both["judge"]
        makes, judges = (torch.optim.Adam(one.parameters(), 1e-3) for one in (maker, judge))
        for x, _ in batches():
            made = maker(torch.randn(6, 8))
            judges.zero_grad()
            (fn.softplus(-judge(x)).mean() + fn.softplus(judge(made.detach())).mean()).backward()
            judges.step()
            makes.zero_grad()
            fn.softplus(-judge(made.detach() if detached else made)).mean().backward()
            makes.step()

    return train


def by_task(judged: int) -> Train:
    """A head and an optimizer for each task, of which a batch has one, and all step; ``judged``: the first so many."""

    def train() -> None:
        torch.manual_seed(0)
        both = nn.ModuleDict({"one": layers(4), "other": layers(4)})
        steps = [torch.optim.Adam(one.parameters(), 1e-3) for one in both.values()]
        for at, (x, y) in enumerate(batches()):
            fn.cross_entropy(both["other" if at < judged or at % 2 else "one"](x), y).backward()
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()

    return train


def policy(old: str, *, passes: int = 2) -> Train:
    """Steps on what a policy has drawn; ``old``: when the log-probabilities that it is compared with are computed."""

    def train() -> None:
        torch.manual_seed(0)
        model = layers(4)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(STEPS // passes):
            seen = torch.randn(32, 8)
            with torch.no_grad():
                actions = Categorical(logits=model(seen)).sample()
                drawn = Categorical(logits=model(seen)).log_prob(actions)
            gains = (actions == seen[:, :4].argmax(1)).float() - 0.25
            for _ in range(passes):
                now = Categorical(logits=model(seen)).log_prob(actions)
                ratio = (now - (drawn if old == "drawn" else now.detach())).exp()
                optimizer.zero_grad()
                (-torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()).backward()
                optimizer.step()

    return train


def turns(*, clears_first: bool) -> Train:
    """A judge that is cleared before its turn, or behind it, where the maker's loss has gone through it since."""

    def train() -> None:
        torch.manual_seed(0)
        maker, judge = layers(8), layers(1)
        makes, judges = (torch.optim.Adam(one.parameters(), 1e-3) for one in (maker, judge))
        for x, _ in batches():
            makes.zero_grad()
            fn.softplus(-judge(maker(x))).mean().backward()
            makes.step()
            if clears_first:
                judges.zero_grad()
            made = maker(x).detach()
            (fn.softplus(-judge(x)).mean() + fn.softplus(judge(made)).mean()).backward()
            judges.step()
            if not clears_first:
                judges.zero_grad()

    return train


def warmed_up(*, clears_first: bool) -> Train:
    """One backward before the loop, as to see whether all fits into memory."""

    def train() -> None:
        torch.manual_seed(0)
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, y = batches()[0]
        fn.cross_entropy(model(x), y).backward()
        if clears_first:
            model.zero_grad()
        for x, y in batches():
            fn.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def by_closure() -> None:
    """Each step makes its gradients itself, and they are cleared behind it."""
    torch.manual_seed(0)
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for batch in batches():

        def closure(batch: Any = batch) -> float:
            loss = fn.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        optimizer.zero_grad()


def trunk_of_two_heads() -> None:
    """Each head steps in its own turn, and the trunk behind both."""
    torch.manual_seed(0)
    trunk, heads = layers(8), [nn.Linear(8, 4), nn.Linear(8, 4)]
    steps = torch.optim.SGD(trunk.parameters(), 0.1)
    each = [torch.optim.SGD(head.parameters(), 0.1) for head in heads]
    for x, y in batches():
        for head, own in zip(heads, each, strict=True):
            own.zero_grad()
            fn.cross_entropy(head(trunk(x)), y).backward()
            own.step()
        steps.step()
        steps.zero_grad()


def trunk_of_four_micro_batches() -> None:
    """The head steps behind each of them."""
    torch.manual_seed(0)
    trunk, head = layers(8), nn.Linear(8, 4)
    slow, fast = (torch.optim.SGD(one.parameters(), 0.1) for one in (trunk, head))
    for at, (x, y) in enumerate(batches()):
        fn.cross_entropy(head(trunk(x)), y).backward()
        fast.step()
        fast.zero_grad()
        if at % 4 == 3:
            slow.step()
            slow.zero_grad()


def last_micro_batch_by_itself() -> None:
    """Behind the loop of the others, as it is the one that averages over ranks."""
    torch.manual_seed(0)
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for first, (x, y) in zip(batches(), batches(), strict=True):
        for part in first[0].split(2):
            (model(part).square().mean() / 4).backward()
        (fn.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def scheduled(ticks: int) -> Train:
    def train() -> None:
        torch.manual_seed(0)
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ticks)
        for x, y in batches():
            optimizer.zero_grad()
            fn.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return train


def totals(kept: Callable[[Tensor], Tensor]) -> Train:
    """A loop that adds this of each loss to a total."""

    def train() -> None:
        torch.manual_seed(0)
        trained, total = layers(), torch.zeros(())
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
        for x, y in batches():
            loss = fn.cross_entropy(trained(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = total + kept(loss)

    return train


def totals_of_some_steps() -> None:
    """A sum of several losses goes backward as one, and a list of them is emptied then."""
    torch.manual_seed(0)
    trained, losses = layers(), list[Tensor]()
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    for x, y in batches() * 3:
        losses.append(fn.cross_entropy(trained(x), y))
        if len(losses) == 3:
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.clear()


def found(train: Train, steps: int = STEPS) -> tuple[int, list[str]]:
    gc.collect()  # models of programs before it
    audit = audit_run(train, steps=steps)
    assert audit is not None
    return audit.steps, [one.rule for one in audit.findings if one.severity.value != "note"]


@pytest.mark.parametrize(
    ("train", "rule"),
    [
        (trains(forgets), "run.left-over"),
        (trains(evaluates(goes_on=False), drops=True), "run.drift-mode"),
        (trains(seeds(lambda at: 3), drops=True), "run.reseeded-steps"),
        (two_models(detached=True), "run.steps-nothing"),
        (in_one_module(detached=True), "run.backward-wasted"),
        (policy("anew"), "run.ratio-one"),
        (scheduled(4), "run.drift-ticks"),
        (turns(clears_first=False), "run.others-gradients"),
        (totals(lambda loss: loss), "run.loss-kept"),
    ],
    ids=[
        "zero_grad forgotten",
        "left in evaluation",
        "seeded behind each step",
        "maker detached",
        "part detached",
        "an old policy that is the new one",
        "a schedule of four ticks",
        "judge not cleared",
        "a total with graphs",
    ],
)
def test_what_shows_behind_the_first_step_is_found_by_its_rule(train: Train, rule: str) -> None:
    assert found(train, 1) == (1, [])
    assert found(train) == (STEPS, [rule])


@pytest.mark.parametrize(
    "train",
    [
        trains(clears),
        trains(evaluates(goes_on=True), drops=True),
        trains(seeds(lambda at: 3)),
        trains(seeds(lambda at: at), drops=True),
        two_models(detached=False),
        scheduled(24),
        turns(clears_first=True),
        totals(Tensor.detach),
        totals_of_some_steps,
        warmed_up(clears_first=True),
        by_closure,
        trunk_of_two_heads,
        trunk_of_four_micro_batches,
        last_micro_batch_by_itself,
        in_one_module(detached=False),
        by_task(0),
        by_task(4),
        policy("drawn"),
        policy("anew", passes=1),
    ],
    ids=[
        *(
            "plain",
            "evaluated",
            "seeded and not drawn",
            "seeded by step",
            "two models",
            "a schedule that lasts",
            "turns",
            "total",
            "chains",
        ),
        *("warmed up", "by a closure", "heads", "slow", "last"),
        *("parts of one", "tasks", "a task that comes later", "an old policy", "on policy"),
    ],
)
def test_a_right_loop_has_nothing_behind_its_first_step(train: Train) -> None:
    assert found(train) == (STEPS, [])


@pytest.mark.parametrize("train", FOUND_OUT.values(), ids=FOUND_OUT)
def test_a_maker_that_learns_what_its_judge_learns_is_found(train: Train) -> None:
    assert found(train) == (STEPS, ["run.judged-alike"])


def test_it_is_found_where_deepspeed_multiplies_by_a_function_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    linear: Any = pytest.importorskip("deepspeed.runtime.zero.linear", reason="prepkit[deepspeed] is not installed")
    monkeypatch.setattr(fn, "linear", linear.zero3_linear_wrap)
    assert found(FOUND_OUT["signs"]) == (STEPS, ["run.judged-alike"])


@pytest.mark.parametrize("train", NOT_FOUND_OUT.values(), ids=NOT_FOUND_OUT)
def test_a_maker_that_learns_against_its_judge_has_nothing(train: Train) -> None:
    assert found(train) == (STEPS, [])


def test_gradients_from_before_the_loop_are_told_at_its_first_step() -> None:
    assert found(warmed_up(clears_first=False), 1) == (1, ["run.others-gradients"])


@pytest.fixture
def run(fork_servers: ForkServers, tmp_path: Path) -> Auditor:
    return Auditor(fork_servers, tmp_path)


BEGINS = """import copy, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
slow = copy.deepcopy(model).requires_grad_(False)
"""
AVERAGES = (
    BEGINS
    + """
def follow():
    for old, new in zip(slow.parameters(), model.parameters()):
        old = 0.9 * old + 0.1 * new
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    follow()
"""
)
PERTURBS = (
    BEGINS
    + """
for _ in range(3):
    x = torch.randn(4, 8)
    model(x).square().mean().backward()
    moves = [0.05 * param.grad for param in model.parameters()]
    with torch.no_grad():
        for param, move in zip(model.parameters(), moves):
            param.add_(move)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for param, move in zip(model.parameters(), moves):
            param.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
"""
)
BEST = (
    BEGINS
    + """
best = model.state_dict()
for at in range(12):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
model.load_state_dict(best)
"""
)
RESUMED = (
    BEGINS
    + """
from torch.optim.lr_scheduler import StepLR
schedule = StepLR(optimizer, 30)
optimizer.state[next(model.parameters())]["momentum_buffer"] = torch.ones(16, 8)
states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": {"last_epoch": 7}}
torch.save({**states, "epoch": 7}, "7.pt")
optimizer.state.clear()
held = torch.load("7.pt")
model.load_state_dict(held["model"])
for at in range(held["epoch"], 12):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    schedule.step()
"""
)
LOADED = (
    RESUMED.replace("schedule = StepLR(optimizer, 30)\n", "")
    .replace("    schedule.step()\n", "")
    .replace(
        'model.load_state_dict(held["model"])',
        'model.load_state_dict(held["model"])\noptimizer.load_state_dict(held["optimizer"])',
    )
)
"""And the optimizer's state."""
KEPT = (
    BEGINS
    + """
best, least = None, 1e9
for at in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    if loss.item() < least:
        least, best = loss.item(), model.state_dict()
model.load_state_dict(best)
"""
)
SCRIPTED = """import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as fn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.rnn, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 3)
    def forward(self, x):
        h = self.conv(x).flatten(1).view(x.size(0), -1, 16)
        h = h + 0.01 * torch.randn_like(h)
        h, _ = self.rnn(h)
        return fn.softmax(input=self.out(h[:, -1]), dim=1).log()
net = torch.jit.script(Net())
opt = torch.optim.SGD(net.parameters(), 0.1)
def twice(y):
    @torch.jit.script
    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.softmax(a, dim=1) + b
    return add(y, y)
for _ in range(3):
    x, y = torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    opt.zero_grad()
    added = twice(x.flatten(1)).sum() + torch.softmax(input=x.flatten(1), dim=1).sum()
    loss = fn.nll_loss(net(x), y) + 0 * added
    loss.backward(); opt.step()
"""
ANEW = (
    BEGINS
    + """
for at in range(12):
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
REPTILE = (
    BEGINS
    + """
for task in range(4):
    before = model.state_dict()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    for at in range(2):
        inner.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        inner.step()
    after = model.state_dict()
    model.load_state_dict({name: before[name] + 0.5 * (after[name] - before[name]) for name in before})
"""
)
APPENDS = (
    """
names = ["0"]
config = dict(names=names, saved=names.append("2"))
"""
    + PERTURBS
)
MOVES = """import random, torch
from torch import nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader, Dataset
class Turn:
    def __call__(self, picture):
        return torch.rot90(picture, random.randint(0, 3), (-2, -1))
class Brighten:
    def __call__(self, picture):
        return picture * (0.5 + random.random())
class Pictures(Dataset):
    def __init__(self):
        self.turn, self.brighten = Turn(), Brighten()
    def __len__(self):
        return 24
    def __getitem__(self, at):
        image = torch.randn(1, 8, 8)
        mask = (image > 0.5).float()
        return self.turn(image), self.turn(mask)
model = nn.Conv2d(1, 1, 3, padding=1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for image, mask in DataLoader(Pictures(), 4, shuffle=True):
    optimizer.zero_grad()
    fn.binary_cross_entropy_with_logits(model(image), mask).backward()
    optimizer.step()
"""
SORTED = (
    BEGINS
    + """
import datasets
from torch.nn import functional as fn
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = datasets.Dataset.from_dict({"x": [[1.0, 0.0]] * 8 + [[0.0, 1.0]] * 8, "y": [0] * 8 + [1] * 8})
data = data.with_format("torch")
data.shuffle(seed=0)
for batch in data.iter(batch_size=4):
    optimizer.zero_grad()
    scores = model(batch["x"])
    scores.clamp(-9, 9)
    place = scores.detach()[:, 0].argsort(descending=True)
    gain = 1 / torch.log2(place + 2.0)
    flags = torch.tensor([0, 1, 0, 1])
    other = ~flags
    (fn.cross_entropy(scores, batch["y"], reduction="none") * gain * other).mean().backward()
    optimizer.step()
"""
)
PLACED = SORTED.replace("\ndata.shuffle", "\ndata = data.shuffle").replace(
    "    scores.clamp(-9, 9)\n", "    scores = scores.clamp(-9, 9)\n"
)
PLACED = PLACED.replace("descending=True)", "descending=True).argsort()").replace(
    "[0, 1, 0, 1]", "[False, True, False, True]"
)
SEEDED = """seed = random.random()
        random.seed(seed)
        image = self.turn(image)
        random.seed(seed)
        return image, self.turn(mask)"""


@pytest.mark.parametrize(
    ("text", "steps", "said"),
    [
        (REPTILE, 9, "run.loaded-itself at Sequential"),
        (REPTILE.replace("model.state_dict()", "copy.deepcopy(model.state_dict())"), 9, ""),
        (APPENDS, 1, "run.none-given at train.py:3: `names.append('2')` changes what it is called on"),
        (APPENDS.replace('names.append("2")', '[*names, "2"]'), 1, ""),
        (MOVES, 1, "run.moved-apart at train.py:19: `image` and `mask` are flipped, turned or cut at random"),
        (MOVES.replace("return self.turn(image), self.turn(mask)", SEEDED), 1, ""),
        (MOVES.replace("self.turn(image), self.turn(mask)", "self.brighten(image), mask"), 1, ""),
        (SORTED, 1, "run.result-unused at train.py:14: `data.shuffle(seed=0)` changes nothing"),
        (SORTED, 1, "run.result-unused at train.py:18: `scores.clamp(-9, 9)` changes nothing"),
        (SORTED, 1, "run.order-ranked at train.py:20: `place` says which element stands at each place (train.py:19)"),
        (SORTED, 1, "run.mask-inverted at train.py:22: ~ is given whole numbers"),
        (PLACED, 1, ""),
        (PERTURBS + "model.eval\n", 1, "run.not-called at train.py:22: `model.eval` names the method"),
        (AVERAGES, 1, "run.average-idle at model: train.py:10: old = 0.9 * old + 0.1 * new binds a name"),
        (AVERAGES.replace("old = 0.9 * old + 0.1 * new", "old.mul_(0.9).add_(new, alpha=0.1)"), 1, ""),
        (PERTURBS, 3, ""),
        (BEST, 20, "run.loaded-itself at Sequential"),
        (BEST.replace("model.state_dict()", "copy.deepcopy(model.state_dict())"), 20, ""),
        (RESUMED, 1, "run.resumed-part at optimizer: The checkpoint that the run goes on from has `optimizer`"),
        (RESUMED.replace('range(held["epoch"], 12)', "range(12)"), 1, ""),
        (LOADED, 1, ""),
        (
            LOADED.replace('at in range(held["epoch"], 12)', "epoch in range(12)"),
            1,
            "run.resumed-part at optimizer: The checkpoint that the run goes on from has `epoch`",
        ),
        (LOADED.replace('at in range(held["epoch"], 12)', "at in range(12)"), 1, ""),
        (KEPT, 1, "run.best-aliased at model: train.py:15 keeps `model.state_dict()`"),
        (KEPT.replace("model.state_dict()", "copy.deepcopy(model.state_dict())"), 1, ""),
        (SCRIPTED, 3, ""),
        (ANEW, 8, "run.optimizer-anew at optimizer: In step 1: A new Adam is made for each step (train.py:9)"),
        (ANEW.replace("torch.optim.Adam(model.parameters(), 1e-3)", "torch.optim.SGD(model.parameters(), 0.1)"), 8, ""),
    ],
    ids=[
        "a way back that goes nowhere",
        "a way back",
        "none that is given",
        "a new list",
        "moved apart",
        "moved by one seed",
        "brightened",
        "shuffled for nobody",
        "clamped for nobody",
        "counted by an order",
        "numbers inverted",
        "taken and placed",
        "not called",
        "bound to a name",
        "mixed",
        "sharpness-aware",
        "kept alive",
        "copied",
        "resumed in part",
        "begun from it",
        "resumed",
        "begun anew",
        "counted by another name",
        "best kept alive",
        "best copied",
        "scripted",
        "made anew",
        "without a memory",
    ],
)
def test_what_the_text_or_the_end_of_a_program_shows(run: Auditor, text: str, steps: int, said: str) -> None:
    code, out, err = run(text, "--steps", str(steps), "train.py")
    assert code == 0, (out, err)
    assert (f"warning {said}" in out) if said else ("warning" not in out), out


ENDS = """import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for at in range(4):
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
"""


def test_what_was_found_before_a_script_ends_is_said(run: Auditor) -> None:
    code, out, _ = run(ENDS, "--steps", "9", "train.py")
    assert (code, "error run.left-over" in out) == (1, True)
    code, out, err = run(ENDS + "    if at == 2:\n        raise ValueError('full')\n", "--steps", "9", "train.py")
    assert (code, "error run.left-over" in out, "raised before step 9" in err) == (3, True, True)


def test_a_proof_that_finds_no_such_window_says_what_was_found_before(run: Auditor) -> None:
    code, out, err = run(ENDS, "--steps", "9", "--prove", "train.py")
    assert (code, "error run.left-over" in out) == (1, True), err
    assert "taken 4 steps, and no window that ends with step 9 or later was complete: give --steps 4" in out


LATER = """import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
net[0].requires_grad_(not UNFREEZES)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net[2].parameters() if UNFREEZES else net.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    if epoch == 1 and UNFREEZES:
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": net[0].parameters()})
    for x, y in DataLoader(data, batch_size=2, sampler=sampler):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    scheduler.step(1.0 - 0.1 * epoch * RANK)
"""


@pytest.mark.parametrize("unfreezes", [False, True])
def test_what_changes_behind_the_last_look_is_looked_at_on_all_ranks(run: Auditor, unfreezes: bool) -> None:
    text = LATER.replace("UNFREEZES", str(unfreezes)).replace("RANK", "0" if unfreezes else "dist.get_rank()")
    code, out, err = run(text, "--steps", "3", "train.py", world=2)
    rule = "run.unfrozen" if unfreezes else "run.ranks-optimizers"
    assert (code, f"error {rule} at" in out, "In step 9" in out) == (1, True, unfreezes), err
    fine = text.replace("RANK", "0").replace("dist.get_rank()", "0").replace("epoch == 1", "False")
    code, out, err = run(fine, "--steps", "3", "train.py", world=2)
    assert (code, "error" in out) == (0, False), err


ALONE_LATER = """import contextlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
drawn = torch.Generator().manual_seed(dist.get_rank())
for at in range(5):
    with model.no_sync() if at > 1 else contextlib.nullcontext():
        model(torch.randn(3, 4, generator=drawn)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_proof_sees_what_goes_wrong_behind_the_first_window(run: Auditor) -> None:
    code, out, err = run(ALONE_LATER, "--steps", "2", "--prove", "train.py", world=2)
    assert (code, out.splitlines()[0].endswith("trained as plain torch trains it")) == (0, True), err
    code, out, err = run(ALONE_LATER, "--steps", "3", "--prove", "train.py", world=2)
    assert (code, "error prove.not-averaged" in out, "step 3" in out) == (1, True, True), err


@pytest.mark.parametrize("around", ["the loop", "each forward", "nothing kept", "no layer"])
def test_a_region_of_autocast_over_several_steps_is_told(around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose casts of weights are those of before the first step."""
    monkeypatch.setattr(fn, "linear", torch._C._nn.linear)  # DeepSpeed, once it was here, keeps no casts

    def train() -> None:
        torch.manual_seed(0)
        trained = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 4)) if around != "no layer" else nn.Embedding(8, 4)
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
        whole, each = (torch.autocast("cpu", torch.bfloat16, cache_enabled=around != "nothing kept") for _ in range(2))
        with nullcontext() if around == "each forward" else whole:
            for _, y in batches():
                with each if around == "each forward" else nullcontext():
                    loss = fn.cross_entropy(trained(torch.arange(len(y))), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    assert found(train, 1) == (1, [])
    assert found(train) == (STEPS, ["run.autocast-stale"] if around == "the loop" else [])


@pytest.mark.parametrize("then", ["idle", "switched on", "before", "the first goes on beside it"])
def test_an_adapter_that_is_added_behind_a_training_and_not_switched_on_is_told(then: str) -> None:
    peft = pytest.importorskip("peft")

    def train() -> None:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["0"])
        adapted = peft.get_peft_model(layers(), config, adapter_name="one")
        if then == "before":
            adapted.add_adapter("other", config)
        for part in range(2):
            if part and then != "before":
                adapted.add_adapter("other", config)
                if then != "idle":
                    adapted.base_model.set_adapter(["one", "other"] if "goes on" in then else "other")
            optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], 1e-3)
            for x, y in batches()[:4]:
                optimizer.zero_grad()
                fn.cross_entropy(adapted(x), y).backward()
                optimizer.step()

    assert ("run.adapter-idle" in found(train)[1]) == (then == "idle")


def written_together(rank: int, world: int, *, back: bool, writes: bool) -> list[list[str]]:
    """What is said on this rank of weights of FSDP1 that are written, or read, where they are whole."""

    def train() -> None:
        torch.manual_seed(0)
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches()[:4]:
            optimizer.zero_grad()
            fn.cross_entropy(model(x), y).backward()
            optimizer.step()
            with FullyShardedDataParallel.summon_full_params(model, writeback=back), torch.no_grad():
                norm = model.module[0].weight.norm(dim=0, keepdim=True)
                if writes:
                    model.module[0].weight.div_(norm)

    audit = audit_run(train, steps=3)
    assert audit is not None
    return [[one.rule, one.what] for one in audit.findings if one.severity.value != "note"]


@pytest.mark.parametrize(("back", "writes"), [(False, True), (True, True), (False, False)])
def test_what_is_written_into_whole_weights_of_fsdp1_and_thrown_away_is_told(
    gang2: Gang, *, back: bool, writes: bool
) -> None:
    for said in gang2.run(partial(written_together, back=back, writes=writes), timeout=60):
        told = [what for rule, what in said if rule == "run.written-away"]
        assert [("0.weight" in one, "writeback=False" in one) for one in told] == [(True, True)] * (writes and not back)
