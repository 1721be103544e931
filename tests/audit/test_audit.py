"""An audit finds what is wrong by name, finds nothing in what is right, and leaves everything as it was."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.findings import Severity
from prepkit.rules import due
from prepkit.rules.rule import Moment, Need
from tests.audit import by_hand, clean
from tests.audit.case import WIDTH, Case, adam, divided, net
from tests.audit.clean import CLEAN
from tests.audit.errors import ERRORS
from tests.audit.programs import audited
from tests.audit.wrong_loops import WRONG
from tests.support.gang import Gang
from tests.support.launch import launched


def of(programs: Any, ranks: int) -> list[str]:
    return [one.id for one in programs if one.ranks == ranks]


def all_audited(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    return {name: audited(rank, world, name)[1] for name in names}


@pytest.fixture(scope="module")
def pair(gang2: Gang) -> list[dict[str, Any]]:
    """What both ranks find in each program of two ranks."""
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    pytest.importorskip("deepspeed")
    names = [*of(ERRORS, 2), *of(CLEAN, 2)]
    return gang2.run(all_audited, names, timeout=240.0)


@pytest.mark.parametrize("error", [one for one in ERRORS if one.ranks == 1], ids=lambda one: one.id)
def test_an_error_of_one_process_is_found_by_its_rule(error: Any) -> None:
    for library in error.library.split(", "):
        pytest.importorskip(library)
    found = audited(0, 1, error.id)[1]
    assert error.rule in {rule for rule, _, _ in found}, found


@pytest.mark.parametrize("name", of(ERRORS, 2))
def test_an_error_of_two_ranks_is_found_by_its_rule_on_both(pair: list[dict[str, Any]], name: str) -> None:
    (rule,) = (one.rule for one in ERRORS if one.id == name)
    for seen in pair:
        assert rule in {found for found, _, _ in seen[name]}, seen[name]


def test_a_hook_that_averages_nothing_is_named_as_the_cause(pair: list[dict[str, Any]]) -> None:
    for seen in pair:
        (text,) = (text for rule, _, text in seen["hook_that_averages_nothing"] if rule == "run.gradients-part")
        assert "Look at DDP's communication hook `hook_that_averages_nothing.<locals>.nothing`" in text


@pytest.mark.parametrize("program", [one for one in CLEAN if one.ranks == 1], ids=lambda one: one.id)
def test_a_clean_program_of_one_process_has_no_finding_above_a_note(program: Any) -> None:
    pytest.importorskip(program.library)
    assert [text for _, severity, text in audited(0, 1, program.id)[1] if severity != "note"] == []


@pytest.mark.parametrize("name", of(CLEAN, 2))
def test_a_clean_program_of_two_ranks_has_no_finding_above_a_note(pair: list[dict[str, Any]], name: str) -> None:
    for seen in pair:
        assert [text for _, severity, text in seen[name] if severity != "note"] == []


def test_the_table_is_as_large_as_it_was_frozen_and_every_rule_has_an_error_or_a_reason() -> None:
    assert len(ERRORS) >= 91
    assert len(CLEAN) >= 120
    assert len({one.id for one in (*ERRORS, *CLEAN)}) == len(ERRORS) + len(CLEAN)
    without = {rule.id for rule in due(Moment.AUDIT) if rule.severity is not Severity.NOTE} - {
        one.rule for one in (*ERRORS, *WRONG)
    }
    behind_the_first_step = {"loaded-itself", "optimizer-anew", "state-carried"}
    behind_the_first_step |= {"ratio-one", "loss-kept", "average-follows", "judged-alike", "storage-shared"}
    behind_the_first_step |= {"average-itself", "average-buffers", "average-rounds", "unfrozen-unheld"}
    behind_the_first_step |= {"merged-trained", "average-stays", "resumed-state", "resumed-samples"}
    behind_the_first_step |= {"average-often", "autocast-stale", "adapter-idle"}
    by_a_text = {"not-called", "resumed-part", "best-aliased", "schedule-idle", "ticked-by-pass", "adapters-frozen"}
    by_a_text |= {"evaluated-training", "worst-kept", "refitted"}
    by_a_text |= {"result-unused", "order-ranked", "mask-inverted", "mixes-empty", "none-given", "moved-apart"}
    no_such_gradient = {"backend", "gradients-misplaced"}  # torch takes none from Python
    assert without == {f"run.{one}" for one in behind_the_first_step | by_a_text | no_such_gradient}


def state_of(case: Case) -> dict[str, Any]:
    """All that an audit might change: values, versions, flags, hooks, attributes, random numbers."""
    model, optimizer = case.model, case.optimizer
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "versions": [tensor._version for tensor in (*model.parameters(), *model.buffers())],
        "gradients": [(param.requires_grad, param.grad) for param in model.parameters()],
        "graphs": [param.grad_fn for param in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            [(name, len(hooks)) for name, hooks in vars(module).items() if name.endswith("_hooks")]
            for module in model.modules()
        ],
        "param hooks": [(param._backward_hooks, param._post_accumulate_grad_hooks) for param in model.parameters()],
        "groups": [[id(param) for param in group["params"]] for group in optimizer.param_groups],
        "state": len(optimizer.state),
        "rng": (torch.get_rng_state(), random.getstate()),
        "grad mode": torch.is_grad_enabled(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_an_audit_leaves_everything_as_it_was() -> None:
    for make in (clean.alone, clean.compiled, clean.checkpointed, by_hand.trained_state_left_behind):
        case = make(0, 1)
        before = state_of(case)
        pk.audit(case.model, case.optimizer, case.scheduler, case.loaders)
        after = state_of(case)
        assert [name for name in before if not same(before[name], after[name])] == []


def untouched(rank: int, world: int) -> list[str]:
    changed = []
    for make in (clean.plain_ddp, clean.fsdp1, clean.fsdp2, clean.tensor_parallel):
        with launched(rank, world):
            case = make(rank, world)
            before = state_of(case)
            pk.audit(case.model, case.optimizer, case.scheduler, case.loaders)
            after = state_of(case)
        changed += [f"{make.__name__} {name}" for name in before if not same(before[name], after[name])]
    return changed


def test_an_audit_leaves_wrapped_models_as_they_were(gang2: Gang) -> None:
    assert gang2.run(untouched) == [[], []]


def test_eight_billion_parameters_on_meta_take_less_than_a_second() -> None:
    with torch.device("meta"):
        layer = [nn.Linear(4096, 4096, bias=False) for _ in range(32 * 15)]
        model = nn.Sequential(nn.Embedding(128256, 4096), *layer, nn.Linear(4096, 128256))
    assert sum(param.numel() for param in model.parameters()) > 8e9
    optimizer = adam(model)
    gc.collect()
    begun = time.process_time()
    audit = pk.audit(model, optimizer)
    assert time.process_time() - begun < 8.0
    assert audit.findings == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "model is 3"),
        ({"model": nn.Linear(2, 2), "optimizer": "adam"}, "optimizer is 'adam'"),
        ({"model": nn.Linear(2, 2), "optimizer": [None]}, r"optimizer\[0\] is None"),
        ({"model": nn.Linear(2, 2), "scheduler": 1}, "scheduler is 1"),
        ({"model": nn.Linear(2, 2), "loaders": 1}, "pass a list of loaders"),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pk.audit(**given)


def test_an_audit_reads_as_what_stands_there_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    audit = pk.audit(model, adam(model), loaders=[divided(0, 1)])
    later = "later steps (prepkit audit --steps 20, or pk.watch)"
    assert audit.fine
    assert str(audit).splitlines() == [
        "audit of Net, 1.2 K parameters, 1.2 K trained; no wrapper over 1 rank; AdamW; 1 loader",
        "nothing is wrong that can be told before the first step",
        f"not asked: how gradients are averaged and scaled (prepkit audit --prove), and {later}",
        "cannot know here:",
        *(f"  {number} rules: {why}" for why, number in Counter(why for _, why in audit.unasked).items()),
    ]
    model.head = nn.Linear(WIDTH, 4)
    wrong = pk.audit(model, adam(net()))
    assert not wrong.fine
    pk.show(wrong)
    assert "error run.orphans at optimizer" in capsys.readouterr().out


def test_an_audit_names_each_rule_that_could_not_be_asked_and_why() -> None:
    model = net()
    everything = pk.audit(model, adam(model), loaders=[divided(0, 1)])
    asked = {
        rule.id: set(rule.needs) - ({Need.BEFORE} if Moment.DRIFT in rule.at else set()) for rule in due(Moment.AUDIT)
    }
    why = dict(everything.unasked)
    assert set(why) == {rule for rule, needs in asked.items() if {Need.GRADIENTS, Need.RANKS, Need.BEFORE} & needs}
    assert "nobody is about to step" in why["run.steps-nothing"]
    alone = dict(pk.audit(model).unasked)
    assert set(alone) == {rule for rule, needs in asked.items() if needs - {Need.VALUES}}
    assert alone["run.orphans"] == "the optimizer, as there is none"


def test_an_environment_that_is_declared_is_judged_by() -> None:
    model = net()
    audit = pk.audit(model, adam(model), env=pk.Env.declare(world_size=4, device="cpu"))
    assert [finding.rule for finding in audit.findings] == ["run.not-averaged"]


def test_rules_are_read_without_torch() -> None:
    code = "import prepkit.auditing, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


class Odd(nn.Module):
    """A config that cannot be read yet, and a layer without a shape yet."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(4)
        self.norm = nn.LazyBatchNorm1d()
        self.other = nn.Linear(2, 2)

    @property
    def config(self) -> Any:
        raise RuntimeError("no config before the model is built")

    base_model = config


def test_a_model_with_lazy_layers_and_a_config_that_raises_is_audited() -> None:
    model = Odd()
    audit = pk.audit(model, torch.optim.SGD(model.other.parameters(), lr=0.1))
    assert {one.rule for one in audit.findings} <= {"run.missed"}
    assert audit.drift() == ()
    assert pk.audit(nn.Sequential(nn.LazyLinear(4))).findings == ()
