"""Scripts of unusual shape are proven, or told why they are not; a hostile record is a finding."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, safe_open, save_file
from torch import nn
from torch.utils.data import DataLoader

from prepkit.auditing.script import audit_run, audit_script
from prepkit.cli import main
from prepkit.findings import PlanRejected, Severity
from prepkit.observe.prepared.instead import called_first
from prepkit.proving.called import known_accumulation
from prepkit.proving.proof import Proof, prove_records
from prepkit.proving.record_file import KEY, Micro, path_of, write
from prepkit.proving.recorder import Recorder
from prepkit.proving.script import prove_script
from tests.proving.small import Small

BEGIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(5, 6)
"""


def proved(tmp_path: Path, text: str, steps: int = 1) -> Proof | None:
    (tmp_path / "train.py").write_text(BEGIN + text)
    gc.collect()  # objects of the script before, which an audit would find alive
    return prove_script(str(tmp_path / "train.py"), steps=steps)


def told(proof: Proof | None) -> list[str]:
    assert proof is not None
    return [f"{one.rule}: {one.what}" for one in proof.findings if one.severity is not Severity.NOTE]


STEPS = "optimizer.step()\noptimizer.zero_grad()\n"

RIGHT: dict[str, str] = {
    "two models": """
other = nn.Linear(6, 3)
second = torch.optim.Adam(other.parameters())
for _ in range(3):
    for one, steps in ((model, optimizer), (other, second)):
        steps.zero_grad()
        one(x).square().mean().backward()
        steps.step()
""",
    "a generator and its critic": """
critic = nn.Linear(3, 1)
second = torch.optim.Adam(critic.parameters())
for _ in range(3):
    fake, real = model(x), torch.randn(5, 3)
    second.zero_grad()
    (critic(fake.detach()).mean() - critic(real).mean()).backward()
    second.step()
    optimizer.zero_grad()
    (-critic(fake).mean()).backward()
    optimizer.step()
""",
    "a critic of several steps": """
critic = nn.Linear(3, 1)
second = torch.optim.Adam(critic.parameters())
for _ in range(3):
    for _ in range(3):
        second.zero_grad()
        (critic(model(x).detach()).mean() - critic(torch.randn(5, 3)).mean()).backward()
        second.step()
        for one in critic.parameters():
            one.data.clamp_(-0.01, 0.01)
    optimizer.zero_grad()
    (-critic(model(x)).mean()).backward()
    optimizer.step()
""",
    "a critic of several steps and its generator, which one optimizer steps": """
critic = nn.Linear(3, 1)
optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1)
for _ in range(3):
    for _ in range(3):
        optimizer.zero_grad()
        (critic(model(x).detach()).mean() - critic(torch.randn(5, 3)).mean()).backward()
        optimizer.step()
    optimizer.zero_grad()
    (-critic(model(x)).mean()).backward()
    optimizer.step()
""",
    "a generator that comes first": """
critic = nn.Linear(3, 1)
second = torch.optim.Adam(critic.parameters())
for _ in range(3):
    fake = model(x)
    optimizer.zero_grad()
    (-critic(fake).mean()).backward()
    optimizer.step()
    second.zero_grad()
    (critic(fake.detach()).mean() - critic(torch.randn(5, 3)).mean()).backward()
    second.step()
""",
    "a critic that is frozen while the generator trains": """
critic = nn.Linear(3, 1)
second = torch.optim.Adam(critic.parameters())
for _ in range(3):
    critic.requires_grad_(False)
    fake = model(x)
    optimizer.zero_grad()
    (-critic(fake).mean()).backward()
    optimizer.step()
    critic.requires_grad_(True)
    second.zero_grad()
    (critic(fake.detach()).mean() - critic(torch.randn(5, 3)).mean()).backward()
    second.step()
""",
    "a layer that is frozen for one of two losses": """
model[0].requires_grad_(False)
(model(x).square().mean() / 2).backward()
model[0].requires_grad_(True)
(model(x + 1).abs().mean() / 2).backward()
optimizer.step()
""",
    "an encoder and a head that one optimizer steps": """
head = nn.Linear(3, 2)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    head(model(x)).square().mean().backward()
    nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 0.01)
    optimizer.step()
""",
    "a closure": """
def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
""",
    "a function of its own": """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return 2 * values
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
    def forward(self, values):
        return Doubled.apply(self.inner(values))
model = Own()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
""",
    "a weight that the model returns": """
class Weighs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.spread = nn.Linear(6, 3), nn.Parameter(torch.linspace(0.1, 0.3, 3))
    def forward(self, values):
        return self.inner(values), self.spread
model = Weighs()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    for by in range(2):
        out, spread = model(x + by)
        ((out.square() * (-spread).exp() + spread).mean() / 2).backward()
    optimizer.step()
""",
    "clipping by value": """
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
""",
    "clipping by another norm": """
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=1.0)
    optimizer.step()
""",
    "weights in the loss": """
for _ in range(3):
    optimizer.zero_grad()
    (model(x).square().mean() + 0.1 * sum(one.square().sum() for one in model.parameters())).backward()
    optimizer.step()
""",
    "a compiled model inside of another": """
model = nn.Sequential(torch.compile(model, backend="eager"), nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
""",
    "rows that one optimizer steps, and layers that another does": """
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)
    def forward(self, ids):
        return self.head(self.rows(ids))
model = Rows()
both = [torch.optim.SparseAdam(model.rows.parameters()), torch.optim.AdamW(model.head.parameters())]
for _ in range(3):
    model(torch.tensor([1, 3, 3])).square().mean().backward()
    for optimizer in both:
        optimizer.step()
        optimizer.zero_grad()
""",
    "a spectral norm that is looked at": """
nn.utils.parametrizations.spectral_norm(model[0])
for _ in range(3):
    optimizer.zero_grad()
    norm = model[0].weight.norm()
    model(x).square().mean().backward()
    optimizer.step()
""",
    "gradients that are asked for": """
for _ in range(3):
    grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    optimizer.zero_grad()
    for one, grad in zip(model.parameters(), grads):
        one.grad = grad
    optimizer.step()
""",
    "an attack that asks for gradients of inputs by backward": """
for _ in range(3):
    near = x.clone().requires_grad_()
    model(near).square().mean().backward(inputs=[near])
    optimizer.zero_grad()
    model(x + 0.1 * near.grad.sign()).square().mean().backward()
    optimizer.step()
""",
    "options that hold None": """
optimizer = torch.optim.Adafactor(model.parameters())
model(x).square().mean().backward()
optimizer.step()
""",
    "a norm that is only measured": """
model(x).square().mean().backward()
nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
optimizer.step()
""",
}


@pytest.fixture(autouse=True)
def others() -> list[Any]:
    """What earlier cells of a notebook have left: a larger model with gradients, its optimizers, half a pass."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)))
    model(torch.ones(1, 6)).sum().backward()
    optimizer = torch.optim.AdamW([*model.parameters(), *nn.Linear(5, 5).parameters()])
    model[0] = nn.Linear(6, 6)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=2)
    reads = iter(DataLoader(torch.ones(8, 6)))  # type: ignore[arg-type]  # a tensor is a data set too
    next(reads)
    return [model, optimizer, scheduler, reads]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_of_unusual_shape_is_proven(tmp_path: Path, name: str) -> None:
    proof = proved(tmp_path, RIGHT[name])
    assert told(proof) == []
    assert proof is not None
    assert [one.facts.unproven for one in (proof, *proof.beside)] == [""] * (1 + len(proof.beside))
    assert sum(len(one.facts.gradients) for one in (proof, *proof.beside)) >= 2 or "by value" in str(proof)
    assert "of several steps" not in name or [len(one.facts.steps) for one in (proof, *proof.beside)] == [4, 2]
    gc.collect()
    alone = audit_script(str(tmp_path / "train.py"))
    assert proof.audit is not None
    assert alone is not None
    assert proof.audit.findings == alone.findings, "a recorder changes nothing that an audit sees"


ONE_WINDOW = ("a layer that is frozen for one of two losses", "options that hold None", "a norm that is only measured")


@pytest.mark.parametrize("name", RIGHT)
def test_its_second_window_is_proven_too(tmp_path: Path, name: str) -> None:
    proof = proved(tmp_path, RIGHT[name], steps=2)
    assert proof is not None
    assert any("give --steps 1" in one for one in told(proof)) is (name in ONE_WINDOW)
    assert name in ONE_WINDOW or told(proof) == []
    assert name in ONE_WINDOW or [one.facts.unproven for one in proof.beside] == [""] * len(proof.beside)
    assert "of several steps" not in name or [len(one.facts.steps) for one in (proof, *proof.beside)] == [4, 2]


SHARED = """
layers = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 3)
for head, steps in (layers[1], FIRST), (layers[2], 3):
    whole = nn.Sequential(layers[0], head)
    optimizer = torch.optim.Adam(whole.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        whole(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("first", [1, 2])
def test_the_last_window_before_another_model_trains_the_same_layer_is_proven(tmp_path: Path, first: int) -> None:
    proof = proved(tmp_path, SHARED.replace("FIRST", str(first)), steps=first)
    assert (told(proof), [] if proof is None else proof.facts.limits) == ([], ())


LATE = """
for at in range(6):
    if at < 2 or KEEPS:
        optimizer.zero_grad()
    model(x).square().mean().backward()
    if at == 2:
        model[0].weight.grad *= 3
    optimizer.step()
"""


@pytest.mark.parametrize(("steps", "cause"), [(2, ""), (3, "prove.ratio"), (4, "")])
def test_what_goes_wrong_in_one_window_is_told_of_that(tmp_path: Path, steps: int, cause: str) -> None:
    assert [one.partition(":")[0] for one in told(proved(tmp_path, LATE.replace("KEEPS", "True"), steps))] == (
        [cause] if cause else []
    )


@pytest.mark.parametrize("steps", [2, 4, 6])
def test_what_is_left_behind_the_first_window_is_told(tmp_path: Path, steps: int) -> None:
    """Of the second too: the third adds to it."""
    causes = {one.partition(":")[0] for one in told(proved(tmp_path, LATE.replace("KEEPS", "False"), steps))}
    assert causes == {"prove.left-over"}


def test_what_was_made_before_is_audited_where_the_program_uses_it() -> None:
    """As where a cell of a notebook makes the model, and another one trains it."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    teacher = nn.Linear(6, 3)
    both = [torch.optim.AdamW(one.parameters()) for one in (model, teacher)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(both[0], lambda _: 1.0)
    reads = iter(DataLoader(torch.ones(8, 6)))  # type: ignore[arg-type]
    next(reads)
    model[0] = nn.Linear(6, 8)

    def train() -> None:
        x = next(reads)
        (model(x) - teacher(x)).square().mean().backward()
        both[0].step()
        scheduler.step()

    found = audit_run(train)
    assert found is not None
    assert "run.orphans" in {one.rule for one in found.findings}
    facts = found.facts
    assert [len(facts.optimizers), len(facts.loaders), facts.scheduler is not None] == [1, 1, True]
    assert {name.partition(".")[0] for name in (one.name for one in facts.params)} >= {"0", "1"}


def test_what_an_audit_says_at_the_first_step_stands_beside_the_proof(tmp_path: Path) -> None:
    """Each sees what the other does not."""
    drops = "model.append(nn.Dropout(0.1))\nmodel.eval()\n"
    proof = proved(tmp_path, f"{drops}(model(x).mean()).backward()\n{STEPS}")
    assert told(proof) == []
    gc.collect()
    done = CliRunner().invoke(main, ["audit", str(tmp_path / "train.py"), "--prove", "--json"])
    assert [one["rule"] for one in json.loads(done.output)["findings"]] == ["run.eval-mode"]


def test_weights_that_are_written_behind_the_step_are_told(tmp_path: Path) -> None:
    write = "    model[2].bias.data.zero_()\n"
    for behind, cleared in (("", ""), (write, ""), ("", write)):
        window = f"for _ in range(2):\n    {BACKWARD}    optimizer.step()\n{behind}    optimizer.zero_grad()\n{cleared}"
        proof = proved(tmp_path, window)
        assert told(proof) == []
        assert ("Behind the step something has changed 1 weight: `2.bias`." in str(proof)) is bool(behind or cleared)


@pytest.mark.parametrize(("coarse", "rule"), [("", "prove.unproven"), (".bfloat16().float()", "prove.limit")])
def test_a_forward_that_computes_with_the_layer_as_it_was_is_told_with_what_to_write(
    tmp_path: Path, coarse: str, rule: str
) -> None:
    patched = f"head = model[2]\nhead.forward = lambda x: nn.functional.linear(x, head.weight, head.bias){coarse}\n"
    rate = "optimizer.param_groups[0]['lr'] = 1e-6\n" if coarse else ""
    proof = proved(tmp_path, f"{patched}{rate}for _ in range(2):\n    {BACKWARD}    optimizer.step()\n")
    assert proof is not None
    (found,) = (one for one in proof.findings if "types.MethodType" in one.fix)
    assert found.rule == rule


def test_steps_over_weights_that_no_module_holds_are_no_script_without_a_step(tmp_path: Path) -> None:
    steps = (
        "weights = nn.Parameter(torch.zeros(6))\noptimizer = torch.optim.SGD([weights], lr=0.1)\nfor at in range(30):\n"
    )
    count = tmp_path / "steps"
    proof = proved(
        tmp_path,
        f"{steps}    (x @ weights).sum().backward()\n    optimizer.step()\n    open({str(count)!r}, 'a').write('.')\n",
    )
    assert (
        "prove.unproven: optimizers have stepped, and no backward went over outputs of a module that" in told(proof)[0]
    )
    assert len(count.read_text()) < 20


def test_an_optimizer_that_has_the_name_of_one_of_torch_is_not_taken_for_it(tmp_path: Path) -> None:
    proof = proved(
        tmp_path,
        """
class SGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * param.grad.sign())
optimizer = SGD(model.parameters(), lr=0.1)
model(x).square().mean().backward()
optimizer.step()
""",
    )
    assert told(proof) == []
    assert "SGD is no optimizer of torch's: its step was not replayed" in str(proof)


def test_the_steps_of_other_optimizers_than_one_of_its_own_are_compared(tmp_path: Path) -> None:
    text = """
class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            param.sub_(0.1 * param.grad.sign())
both = [Own(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)]
model(x).square().mean().backward()
for optimizer in both:
    optimizer.step()
"""
    proof = proved(tmp_path, text)
    assert told(proof) == []
    assert proof is not None
    assert [one.name for one in proof.facts.steps] == ["2.weight", "2.bias"]
    assert "__main__.Own is no optimizer of torch's: its step was not replayed" in str(proof)


@pytest.mark.parametrize("lines", [1, 2])
def test_what_a_trainer_was_told_is_known(tmp_path: Path, lines: int) -> None:
    """Unless a micro-batch may have several backwards."""
    text = f"""
import types
class Trainer:
    args, state = types.SimpleNamespace(gradient_accumulation_steps=2), None
    def train(self):
        for at in range(4):
            if at % {lines}:
                model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
            if at % 2:
                optimizer.step()
                optimizer.zero_grad()
Trainer.__module__ = "transformers.trainer"
Trainer().train()
"""
    said = told(proved(tmp_path, text))
    if lines == 1:
        assert len(said) == 1
        assert "prove.accumulation: All gradients are 2.000 x what they should be: the loss is not divided" in said[0]
    else:
        assert said == []


def test_what_an_engine_of_deepspeed_was_told_is_known() -> None:
    class Engine:
        def gradient_accumulation_steps(self) -> int:
            return 4

    one, other = Micro(loss=0.0, factor=0.25, line="backward at a.py:1"), Micro(loss=0.0, factor=0.25, line="b")
    assert known_accumulation(None, Engine(), [one] * 16) == 4
    assert known_accumulation(None, Engine(), [one, other] * 4) is None
    assert known_accumulation(None, None, [one] * 16) is None


def test_a_model_that_computes_something_else_in_float64_is_compared_in_float32(tmp_path: Path) -> None:
    text = """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
    def forward(self, values):
        return self.inner(values) + 5 * (values.dtype == torch.float64)
model = Odd()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(x).square().mean().backward()
optimizer.step()
"""
    proof = proved(tmp_path, text)
    assert told(proof) == []
    assert "output 0 of call 0 on rank 0" in str(proof)
    assert "in float64, and in float32 as it was: float32 is compared" in str(proof)
    wrong = proved(tmp_path, text.replace("optimizer.step", "model.inner.weight.grad *= 3; optimizer.step"))
    assert ["3.000 x what they should be" in one for one in told(wrong)] == [True]


def test_each_of_two_models_has_a_proof_of_its_own(tmp_path: Path) -> None:
    step = "    optimizer.step()"
    wrong = RIGHT["a generator and its critic"].replace(step, f"    model[0].weight.grad *= 3\n{step}")
    proof = proved(tmp_path, wrong)
    assert ["3.000 x what they should be" in one for one in told(proof)] == [True]
    assert proof is not None
    assert {one.name for one in (proof, *proof.beside)} == {"Sequential", "Linear"}
    assert all(one.where.startswith("Sequential: ") for one in proof.failed)


def test_gradients_of_a_loss_that_another_optimizer_has_stepped_are_told(tmp_path: Path) -> None:
    """The sum of both is no gradient of a wrong size: the audit beside the proof hears whose loss it was."""
    wrong = (
        RIGHT["a generator and its critic"]
        .replace("fake.detach()", "fake")
        .replace("(-critic(fake", "(-critic(model(x)")
    )
    wrong = wrong.replace("    optimizer.zero_grad()\n", "").replace(
        "    second.zero", "    optimizer.zero_grad()\n    second.zero"
    )
    proof = proved(tmp_path, wrong)
    assert proof is not None
    assert proof.audit is not None
    assert [one.rule for one in proof.audit.findings] == ["run.others-gradients"]
    assert "Behind the first step: They hold those of the backward at train.py:" in str(proof.audit)


def test_a_model_that_does_not_step_for_long_is_named(tmp_path: Path) -> None:
    """The critic's window waits for it, and no longer than for so many steps."""
    text = """
critic = nn.Linear(3, 1)
second = torch.optim.Adam(critic.parameters())
for at in range(99):
    with torch.no_grad():
        fake = model(x)
    second.zero_grad()
    critic(fake).mean().backward()
    second.step()
    assert at < 22
"""
    proof = proved(tmp_path, text)
    assert told(proof) == []
    said = "`Sequential` was called, and the optimizer that holds it has not stepped in this window"
    assert said in str(proof)
    assert "has not stepped in this window" not in str(proved(tmp_path, f"del optimizer\n{text}"))


COPIES = """
copies = [nn.Parameter(one.detach().clone()) for one in model.parameters()]
model(x).square().mean().backward()
for one, other in zip(copies, model.parameters()):
    one.grad = other.grad
torch.optim.SGD(copies, lr=0.1).step()
with torch.no_grad():
    for one, other in zip(copies, model.parameters()):
        other.copy_(one)
"""
GIVEN = """
class Given:
    pass
class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, values, more):
        return self.inner(values)
Takes()(x, Given()).square().mean().backward()
optimizer.step()
"""
LENT = """
weights = dict(model.named_parameters())
def loss(weights):
    return torch.func.functional_call(model, weights, (x,)).square().mean()
"""
BY_TRANSFORM = f"""{LENT}
for at in range(30):
    grads = torch.func.grad(loss)({{name: one.detach() for name, one in weights.items()}})
    for name, grad in grads.items():
        weights[name].grad = grad
    optimizer.step()
"""
BY_OTHERS = f"""{LENT}
for at in range(3):
    optimizer.zero_grad()
    grads = torch.autograd.grad(loss(weights), list(weights.values()), create_graph=True)
    loss({{name: one - 0.1 * grad for (name, one), grad in zip(weights.items(), grads)}}).backward()
    optimizer.step()
"""
UPHILL = """
model(x).square().mean().backward()
params = list(model.parameters())
uphill = [0.05 * one.grad / one.grad.norm() for one in params]
with torch.no_grad():
    torch._foreach_add_(params, uphill)
optimizer.zero_grad()
model(x).square().mean().backward()
with torch.no_grad():
    torch._foreach_sub_(params, uphill)
optimizer.step()
"""
BACKWARD = "model(x).square().mean().backward()\n"
CRITIC = """
critic = nn.Linear(3, 1)
second = torch.optim.Adam(critic.parameters())
def of_critic():
    second.zero_grad()
    (critic(model(x).detach()).mean() - critic(torch.randn(5, 3)).mean()).backward()
    second.step()
"""
DETACHED = f"""{CRITIC}
for _ in range(9):
    of_critic()
    optimizer.zero_grad()
    (-critic(model(x).detach()).mean()).backward()
    optimizer.step()
"""
STEPS_THE_OTHER = f"""{CRITIC}
for _ in range(9):
    of_critic()
    critic.zero_grad()
    (-critic(model(x)).mean()).backward()
    second.step()
"""
TRIPLED_LATE = f"""{CRITIC}
for _ in range(9):
    for _ in range(3):
        with torch.no_grad():
            fake = model(x)
        second.zero_grad()
        (critic(fake).mean() - critic(torch.randn(5, 3)).mean()).backward()
        second.step()
    optimizer.zero_grad()
    (-critic(model(x)).mean()).backward()
    model[0].weight.grad *= 3
    optimizer.step()
"""
NOT_CLEARED = f"""{CRITIC}
for _ in range(9):
    fake = model(x)
    optimizer.zero_grad()
    (-critic(fake.detach()).mean() + fake.square().mean()).backward()
    optimizer.step()
    (critic(fake.detach()).mean() - critic(torch.randn(5, 3)).square().mean()).backward()
    second.step()
"""
CACHED = """
other = nn.Linear(6, 3)
second = torch.optim.SGD(other.parameters(), lr=0.1)
for _ in range(3):
    torch.autograd.backward((model(x).square().mean(), other(x).square().mean()))
    optimizer.step()
    second.step()
    optimizer.zero_grad()
    second.zero_grad()
"""


def test_models_first_called_in_the_arguments_of_a_backward_are_proven(tmp_path: Path) -> None:
    proof = proved(tmp_path, CACHED)
    assert told(proof) == [], str(proof)


TOLD: dict[str, tuple[str, str]] = {
    "steps another model": (
        f"{BACKWARD}torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()\n",
        "prove.not-stepped",
    ),
    "steps copies": (COPIES, "prove.unproven: an optimizer has stepped copies"),
    "loses its numbers": (
        "(model(x).square().mean() / 0).backward()\noptimizer.step()\n",
        "prove.unproven: the loss of micro-batch 0 is inf on rank 0",
    ),
    "gives what is no tensor": (GIVEN, "prove.unproven: the forward was given an object of class Given"),
    "calls a part beside the whole": (
        "(model(x).square().mean() + nn.Sequential(model[0], nn.ReLU())(x).mean()).backward()\noptimizer.step()\n",
        "",
    ),
    "makes gradients by a transform": (BY_TRANSFORM, "prove.unproven: torch.func (grad, vjp, vmap) has made the"),
    "computes weights from others": (BY_OTHERS, "prove.unproven: a module was called with weights that were computed"),
    "goes backward for some weights": (
        "model(x).square().mean().backward(inputs=list(model[0].parameters()))\noptimizer.step()\n",
        "prove.unproven: backward was given inputs=",
    ),
    "moves uphill by hand, clears, and moves back": (UPHILL, ""),
    "clears nothing": (f"for _ in range(2):\n    {BACKWARD}    optimizer.step()\n", "prove.left-over"),
    "gives the generator no gradient": (DETACHED, "prove.no-gradient: The optimizer of `Sequential` has stepped over"),
    "steps the critic for the generator": (STEPS_THE_OTHER, "prove.unproven: `Sequential` has had gradients, and the"),
    "steps another model wrongly after several steps of the first": (TRIPLED_LATE, "prove.ratio"),
    "never clears the critic": (NOT_CLEARED, "prove.left-over"),
    "steps twice": (f"{BACKWARD}optimizer.step()\noptimizer.step()\n", "prove.stepped-twice"),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_is_not_as_it_should_be_or_cannot_be_proven_is_told(tmp_path: Path, name: str) -> None:
    text, says = TOLD[name]
    proof = proved(tmp_path, text)
    if says:
        assert [one[: len(says)] for one in told(proof)] == [says], str(proof)
    else:
        assert told(proof) == []
        assert "gradients were not compared" in str(proof)


PARTS = """
class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.aside, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
    def forward(self, x):
        FORWARD
model = Parts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    LOSS
    optimizer.step()
"""
LOSS = "model(x).square().mean().backward()"
CUT: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a detach": ("hidden = torch.tanh(self.enter(x)).detach()\nreturn self.head(hidden)", "detach() at", ("enter",)),
    "its data": ("return self.head(torch.tanh(self.enter(x)).data)", "detach() at", ("enter",)),
    "a weight": ("return self.head(nn.functional.linear(x, self.enter.weight.detach()))", "detach() at", ("enter",)),
    "a gate": ("return self.head(self.enter(x) * torch.sigmoid(self.aside(x)).detach())", "detach() at", ("aside",)),
    "two": (
        "aside = self.aside(x).detach()\nreturn self.head(self.enter(x).detach() + aside)",
        "detach() at",
        ("aside",),
    ),
}
"""A forward, what cuts it, and the layers that this cuts off."""


def of_parts(forward: str, loss: str = LOSS) -> str:
    lines = {"FORWARD": forward.replace("\n", "\n        "), "LOSS": loss.replace("\n", "\n    ")}
    return PARTS.replace("FORWARD", lines["FORWARD"]).replace("LOSS", lines["LOSS"])


@pytest.mark.parametrize("name", CUT)
def test_a_layer_that_the_forward_cuts_off_is_warned_of_with_the_line_that_cuts(tmp_path: Path, name: str) -> None:
    forward, cuts, layers = CUT[name]
    proof = proved(tmp_path, of_parts(forward))
    assert proof is not None
    found = [one for one in proof.findings if one.rule == "prove.no-gradient"]
    assert {one.severity for one in found} == {Severity.WARNING}, str(proof)
    lines = (tmp_path / "train.py").read_text().splitlines()
    for one in found:
        _, _, number = one.what.partition("train.py:")
        assert any(
            word in lines[int(number.split()[0]) - 1] for word in ("detach", ".data", "self.enter(x)", "self.aside(x)")
        )
    (mine,) = [one for one in found if cuts in one.what and f"`{layers[0]}.weight`" in one.what]
    for layer in layers:
        assert f"`{layer}.weight`" in mine.what
    assert "head" not in "".join(one.what for one in found)
    assert len(found) == 1 + (name == "two")


TEACHER = "with torch.no_grad():\n    wanted = self.aside(x)\nreturn self.head(self.enter(x) - wanted)"
DECAYS = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)\n"
ZEROS = "[setattr(one, 'grad', torch.zeros_like(one)) for one in model.aside.parameters()]\n"
RESTS: dict[str, tuple[str, str]] = {
    "a teacher": (TEACHER, ""),
    "a teacher that would decay if it had a gradient": (TEACHER, DECAYS),
    "one with zeros that nothing moves": (TEACHER, ZEROS),
    "a body under a head": ("with torch.no_grad():\n    hidden = self.enter(x)\nreturn self.head(hidden)", DECAYS),
    "a decorated call": (
        "def still(x):\n    return self.aside(x)\nreturn self.head(self.enter(x) + torch.no_grad()(still)(x))",
        DECAYS,
    ),
}
"""A forward, and what is done once before it."""


@pytest.mark.parametrize("name", RESTS)
def test_what_no_grad_alone_holds_still_is_noted_as_plain_torch_leaves_it_too(tmp_path: Path, name: str) -> None:
    forward, first = RESTS[name]
    text = of_parts(forward).replace("for _ in range(3):", f"{first}for _ in range(3):")
    proof = proved(tmp_path, text.replace("zero_grad()", "zero_grad(set_to_none=False)"))
    assert told(proof) == []
    assert proof is not None
    (noted,) = [one.what for one in proof.findings if "leaves them as they are" in one.what]
    layer = "enter" if name.startswith("a body") else "aside"
    assert noted.startswith(f"The forward computes with `{layer}.weight`, `{layer}.bias` under no_grad() at train.py:")


def test_what_no_grad_holds_and_the_step_decays_all_the_same_is_warned_of(tmp_path: Path) -> None:
    text = of_parts(TEACHER).replace("for _ in range(3):", f"{DECAYS}{ZEROS}for _ in range(3):")
    proof = proved(tmp_path, text.replace("zero_grad()", "zero_grad(set_to_none=False)"))
    (found,) = told(proof)
    assert found.startswith(
        "prove.no-gradient: The loss is computed with `aside.weight`, `aside.bias`, and no_grad() at"
    )
    assert "plain torch gives no gradient, and moves nothing. Here the step moves them, over zeros." in found


TARGET = "with torch.no_grad():\n    for one, other in zip(model.aside.parameters(), model.enter.parameters()):\n"
NOT_CUT: dict[str, tuple[str, str]] = {
    "a frozen teacher": (
        (
            "self.aside.requires_grad_(False)\nwith torch.no_grad():\n    wanted = self.aside(x)\n"
            "return self.head(self.enter(x)), self.head(wanted)"
        ),
        "out, wanted = model(x)\n(out - wanted.detach()).square().mean().backward()",
    ),
    "an average of another": (
        "with torch.no_grad():\n    wanted = self.aside(x)\nreturn self.head(self.enter(x) - wanted)",
        f"{LOSS}\noptimizer.step()\n{TARGET}        one.mul_(0.9).add_(other, alpha=0.1)\nmodel.zero_grad()\n{LOSS}",
    ),
    "one that the loss does not use": ("self.aside(x)\nreturn self.head(self.enter(x))", LOSS),
    "one of two outputs": (
        "return self.head(self.enter(x)), self.aside(x)",
        "model(x)[0].square().mean().backward()",
    ),
    "one that is kept to be looked at": (
        "self.seen = self.aside(x).detach()\nreturn self.head(self.enter(x))",
        LOSS,
    ),
    "one that does not run": ("return self.head(self.enter(x))", LOSS),
    "a stopped gradient beside one that goes": (
        "made = self.enter(x)\nreturn self.head(made - self.aside(x)) + self.head(made.detach())",
        LOSS,
    ),
    "one that goes straight through": (
        (
            "made = self.enter(x)\ncode = torch.round(self.aside(x))\n"
            "return self.head(made + (code - made).detach()) + (self.aside(x) - made.detach()).square().mean()"
        ),
        LOSS,
    ),
    "a random mask": (
        (
            "with torch.no_grad():\n    mask = (torch.rand(5, 8) > 0.5).float()\n"
            "return self.head(self.enter(x) * mask + self.aside(x))"
        ),
        LOSS,
    ),
}


@pytest.mark.parametrize("name", NOT_CUT)
def test_what_is_cut_off_on_purpose_or_takes_no_part_is_not(tmp_path: Path, name: str) -> None:
    assert told(proved(tmp_path, of_parts(*NOT_CUT[name]))) == []


def test_a_head_that_nothing_steps_and_the_turns_of_two_nets_are_cut_off_on_purpose(tmp_path: Path) -> None:
    probe = of_parts("hidden = self.enter(x)\nreturn self.head(hidden), self.aside(x).detach() + hidden").replace(
        "SGD(model.parameters()", "SGD([*model.enter.parameters(), *model.head.parameters()]"
    )
    assert "prove.no-gradient" not in str(
        proved(tmp_path, probe.replace("model(x).sq", "sum(map(torch.sum, model(x))).sq"))
    )
    turns = """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)
    def forward(self, x, judges):
        made = self.maker(x)
        return self.critic(made.detach() if judges else made)
model = Both()
each = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model.critic, model.maker)]
for _ in range(3):
    for at, optimizer in enumerate(each):
        model.zero_grad()
        model(x, at == 0).mean().backward()
        optimizer.step()
"""
    assert "prove.no-gradient" not in str(proved(tmp_path, turns))


def heavy_ball(by: str) -> str:
    """Gradients that are multiplied where others clear them."""
    return f"""
for _ in range(3):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_({by})
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
"""


def test_what_is_left_of_a_step_is_a_momentum_by_hand_where_it_is_one_number_times_that(tmp_path: Path) -> None:
    proof = proved(tmp_path, heavy_ball("0.9"))
    assert told(proof) == []
    assert proof is not None
    (found,) = proof.findings
    assert found.what.startswith("of the gradients of this step 0.9 x was left when the next went backward")
    for by in ("1.0", "0.5 + param.dim() / 10"):  # a gradient that is left whole; numbers of their own, which are none
        assert [one[:15] for one in told(proved(tmp_path, heavy_ball(by)))] == ["prove.left-over"]


LIMITS: dict[str, tuple[str, str]] = {
    "a teacher that lies where the model lies": (
        """
teacher = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
teacher.load_state_dict(model.state_dict(), assign=True)
with torch.no_grad():
    wanted = teacher(x)
(model(x) - wanted + 1).square().mean().backward()
""",
        "weights of `Sequential` lie where the model's lie (`0.weight`, `0.bias`, `2.weight`)",
    ),
    "losses that are added up": (
        "sum(model(torch.randn(5, 6)).square().mean() for _ in range(4)).backward()\n",
        "A loss is the sum of 4 losses, each of other samples by the same function",
    ),
    "losses in lines of their own": (
        3 * "model(torch.randn(5, 6)).square().mean().backward()\n",
        "3 backwards of losses that are made otherwise were added up",
    ),
    "the same samples twice": (
        "for _ in range(2):\n    (model(x).square().mean() / 2).backward()\n",
        "micro-batches 0 and 1 of rank 0 were of the same samples",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_may_be_meant_and_may_be_wrong_is_noted(tmp_path: Path, name: str) -> None:
    text, says = LIMITS[name]
    proof = proved(tmp_path, f"{text}{STEPS}")
    assert told(proof) == []
    assert proof is not None
    assert [says in one.what for one in proof.findings] == [True], str(proof)
    other = {"randn(5, 6)).square().mean() for": "randn(5, 6)).square().mean() / 4 for", ", assign=True": ""}
    for word, instead in (*other.items(), ("(x).square().mean() / 2", "(torch.randn(5, 6)).square().mean() / 2")):
        text = text.replace(word, instead)
    if name != "losses in lines of their own":
        assert not (again := proved(tmp_path, f"{text}{STEPS}")).findings, str(again)


def test_a_script_that_never_steps_over_a_gradient_says_so(tmp_path: Path) -> None:
    for text in ("model(x)\n", "optimizer.step()\n", "model(x).mean().backward()\n"):
        assert proved(tmp_path, text) is None
    done = CliRunner().invoke(main, ["audit", "--prove", str(tmp_path / "train.py")])
    assert done.exit_code == 2
    assert "ended without an optimizer step" in done.output


def one_record(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the second one has state
        optimizer.zero_grad()
        with (recorder := Recorder(root=model)).on():
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
    write(recorder.record(), folder)
    return model


def other_rate(head: Any, _: Any) -> None:
    head["groups"] = [json.dumps({**json.loads(head["groups"][0]), "lr": -1.0})]


def asking(name: str) -> Callable[[Any, Any], Any]:
    """A call that has asked other ranks for two numbers."""
    question = {"name": name, "line": "train.py:1", "shapes": [[2]]}
    return lambda head, _: head["calls"][0].update(asked=[question])


HOSTILE: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "an older format, in which calls have no modes": (lambda head, _: head.update(format=2), True),
    "an entry that is no method": (lambda head, _: head["calls"][0].update(entry="__reduce__"), True),
    "an entry that the model lacks": (lambda head, _: head["calls"][0].update(entry="launch"), False),
    "an optimizer with a wrong option": (other_rate, False),
    "a number of steps that is none": (
        lambda _, tensors: tensors.update({"number.step/0.weight": torch.zeros(2)}),
        True,
    ),
    "state of another size": (lambda _, tensors: tensors.update({"state.exp_avg/0.weight": torch.zeros(3)}), True),
    "no weight": (lambda _, tensors: tensors.pop("weight/0.weight"), True),
    "a collective that there is not": (asking("shell"), True),
    "an answer of another shape": (
        lambda head, tensors: (asking("allreduce")(head, tensors), tensors.update({"asked/0/0/0": torch.zeros(3)})),
        True,
    ),
    "an answer to nothing": (lambda _, tensors: tensors.update({"asked/0/0/0": torch.zeros(2)}), True),
}
"""What is changed in header or tensors, and whether it is seen when the file is read."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_a_finding(tmp_path: Path, name: str) -> None:
    change, refuses = HOSTILE[name]
    model = one_record(tmp_path)
    assert prove_records(model, tmp_path).fine
    with safe_open(path_of(tmp_path, 0), framework="pt") as file:
        head = json.loads(file.metadata()[KEY])
    tensors = load_file(path_of(tmp_path, 0))
    change(head, tensors)
    save_file(tensors, path_of(tmp_path, 0), metadata={KEY: json.dumps(head)})
    if refuses:
        with pytest.raises(PlanRejected) as refused:
            prove_records(model, tmp_path)
        assert [one.rule for one in refused.value.findings] == ["prove.record"]
    else:
        proof = prove_records(model, tmp_path)
        assert proof.facts.unproven or any("cannot take its step again" in one for one in proof.facts.limits), proof


def test_a_record_of_a_time_before_collectives_were_kept_is_read(tmp_path: Path) -> None:
    model = one_record(tmp_path)
    with safe_open(path_of(tmp_path, 0), framework="pt") as file:
        head = json.loads(file.metadata()[KEY])
    assert [call.pop("asked") for call in head["calls"]] == [[]]
    save_file(load_file(path_of(tmp_path, 0)), path_of(tmp_path, 0), metadata={KEY: json.dumps(head)})
    assert prove_records(model, tmp_path).fine


CLEARED: dict[str, tuple[str, str, str]] = {
    "an accumulation that clears at the top of each micro-batch": (
        """
for number in range(4):
    optimizer.zero_grad()
    (model(x).square().mean() / 4).backward()
optimizer.step()
""",
        "prove.micro-batch: Gradients of 3 of the 4 micro-batches of a step were cleared before it",
        "not as plain torch trains it",
    ),
    "steps that come behind the clearing": (
        """
for number in range(9):
    model(x).square().mean().backward()
    optimizer.zero_grad()
    optimizer.step()
assert number == 1, "the second one is told"
""",
        "prove.no-gradient: The optimizer has stepped twice over no gradient",
        "nothing was trained",
    ),
    "gradients that a program puts together itself": (
        """
sums = [torch.zeros_like(one) for one in model.parameters()]
for sample in x:
    optimizer.zero_grad()
    model(sample[None]).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for one, param in zip(sums, model.parameters()):
        one += param.grad
for one, param in zip(sums, model.parameters()):
    param.grad = one
optimizer.step()
""",
        "prove.unproven: The gradients of 4 micro-batches were cleared",
        "nothing is known of its gradients",
    ),
    "a loss whose number may be meant": (
        """
for number in range(3):
    optimizer.zero_grad()
    loss = model(x).square().mean() / 4
    loss.backward()
    if number == 2:
        optimizer.step()
""",
        "",
        "trained as plain torch trains it; before it 2 micro-batches cleared that train nothing",
    ),
    "a measurement before the training": (
        """
for _ in range(3):
    model.zero_grad()
    (model(x).square().mean() / 4).backward()
optimizer.zero_grad()
(model(x).square().mean() / 4).backward()
optimizer.step()
""",
        "",
        "before it 3 micro-batches cleared that train nothing",
    ),
    "a critic through which the generator's loss has gone": (
        """
critic = nn.Linear(3, 1)
second = torch.optim.Adam(critic.parameters())
for _ in range(3):
    optimizer.zero_grad()
    fake = model(x)
    critic(fake).mean().backward()
    optimizer.step()
    second.zero_grad()
    (critic(fake.detach()).mean() - critic(torch.randn(5, 3)).mean()).backward()
    second.step()
""",
        "",
        "trained as plain torch trains it\nLinear: proof",
    ),
    "steps that a scaler refuses": (
        """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
for _ in range(40):
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean() * 1e5 / 3).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        "",
        "trained as plain torch trains it",
    ),
}


@pytest.mark.parametrize("name", CLEARED)
def test_gradients_that_are_cleared_before_a_step_are_an_error_where_that_is_certain(tmp_path: Path, name: str) -> None:
    text, says, verdict = CLEARED[name]
    proof = proved(tmp_path, text)
    assert [one[: len(says)] for one in told(proof)] == [says] * bool(says), str(proof)
    assert verdict in str(proof)
    assert verdict or "cleared that train nothing" not in str(proof)
    assert ("cleared that train nothing" in str(proof)) == any(
        "before any step" in one for one in map(str, proof.findings)
    )


def test_a_hook_on_calls_is_not_compiled_with_the_model() -> None:
    """torch.compile keeps the call that it finds, and traces it later, when nobody listens any longer too."""
    told, x, plain = list[nn.Module](), torch.ones(2, 6), nn.Module.__call__
    with called_first(lambda module, *_: told.append(module)):
        outer = nn.Sequential(torch.compile(Small(), backend="eager"))
        outer(x)
    outer(x)
    outer[0](x)
    assert list(map(type, told)) == [nn.Sequential]
    assert nn.Module.__call__ is plain


def test_a_step_over_rows_is_replayed_beside_one_over_layers(tmp_path: Path) -> None:
    proof = proved(tmp_path, RIGHT["rows that one optimizer steps, and layers that another does"])
    assert proof is not None
    assert [one.name for one in proof.facts.steps] == ["rows.weight", "head.weight", "head.bias"]
    assert all(one.expected > 0 for one in proof.facts.steps)


APPLIED = """
import prepkit as pk
ready = pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizer), prove=1)
for _ in range(4):
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("how", ["--steps=3", "--prove"])
def test_a_run_that_would_prove_itself_is_audited_as_any_other(tmp_path: Path, how: str) -> None:
    """Its own proof would be heard as calls of other models, and its hooks go in the middle of a step."""
    (tmp_path / "train.py").write_text(BEGIN + APPLIED)
    done = CliRunner().invoke(main, ["audit", how, str(tmp_path / "train.py")])
    assert done.exit_code == 0, done.output
    assert ("trained as plain torch trains it" in done.output) is (how == "--prove")


COUNTS_CALLS = """
calls = []
model[1].forward = lambda x: (calls.append(1), x * len(calls))[1]
"""
PERTURBED = """
kept = [one.detach().clone() for one in model.parameters()]
model(x).mean().backward()
with torch.no_grad():
    [one.add_(0.01) for one in model.parameters()]
model(x).mean().backward()
with torch.no_grad():
    [one.copy_(other) for one, other in zip(model.parameters(), kept)]
optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (BY_OTHERS, "nothing was proven"),
        (f"{COUNTS_CALLS}{BACKWARD}optimizer.step()", "nothing is known of its gradients"),
        (PERTURBED, "nothing is known of its gradients"),
    ],
    ids=["cannot be replayed", "does not repeat", "weights are put back"],
)
def test_a_window_that_could_not_be_proven_has_an_exit_code_of_its_own(tmp_path: Path, body: str, says: str) -> None:
    proof = proved(tmp_path, body)
    assert says in str(proof).partition("\n")[0]
    gc.collect()
    done = CliRunner().invoke(main, ["audit", "--prove", str(tmp_path / "train.py")])
    assert (done.exit_code, says in done.output) == (4, True), done.output
