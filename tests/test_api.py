"""The public calls on live objects: what they accept, what they refuse, and what they leave alone."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from attrs import evolve

import prepkit as pk
from prepkit.findings import FindingWarning
from prepkit.observe import observe_env
from prepkit.testing import tiny_facts

BATCH = torch.arange(12.0).reshape(3, 4)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def adam(of: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), lr=0.1)


def test_a_plan_remembers_the_objects_it_was_built_from() -> None:
    live = model()
    optimizer = adam(live)
    ready = pk.apply(pk.build_plan(pk.Config(), live, optimizer=optimizer))
    assert ready.model is live
    assert ready.optimizer is optimizer
    before = live[0].weight.detach().clone()
    ready.backward(ready.model(BATCH).sum())
    assert ready.step()
    assert not torch.equal(before, live[0].weight)


def test_what_a_plan_remembers_is_in_no_comparison_and_no_file(tmp_path: Path) -> None:
    made = pk.build_plan(pk.Config(), model())
    pk.save(made, str(tmp_path / "plan.json"))
    loaded = pk.load(str(tmp_path / "plan.json"))
    assert loaded == made == pk.build_plan(pk.Config(), model())
    assert loaded.target is None


def test_apply_returns_each_object_by_its_name_whatever_was_given() -> None:
    live = model()
    optimizer = adam(live)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batches = torch.utils.data.DataLoader(BATCH, batch_size=1)
    ready = pk.apply(pk.build_plan(pk.Config(), live, optimizer=optimizer, scheduler=scheduler, loaders=[batches]))
    assert isinstance(ready, pk.Prepared)
    assert (ready.model, ready.optimizer, ready.scheduler) == (live, optimizer, scheduler)
    assert len(ready.loaders) == 1
    alone = pk.apply(pk.build_plan(pk.Config(intent=pk.Intent.INFERENCE), model()))
    assert isinstance(alone, pk.Prepared)
    assert (alone.optimizer, alone.scheduler, alone.loaders) == (None, None, ())


def test_a_plan_from_a_file_is_applied_to_the_objects_given(tmp_path: Path) -> None:
    here = model()
    pk.save(pk.build_plan(pk.Config(), here, optimizer=adam(here)), str(tmp_path / "plan.json"))
    live = model()
    ready = pk.apply(pk.load(str(tmp_path / "plan.json")), model=live, optimizer=adam(live))
    assert ready.model is live
    assert not ready.attestation.failed


def test_a_config_of_wrong_types_is_refused_with_the_call_to_write() -> None:
    with pytest.raises(pk.PlanRejected) as refused:
        pk.build_plan(pk.Config(clip=1.0, mesh=4, overrides="mesh.x"), model())  # type: ignore[arg-type]
    assert {finding.where: finding.fix for finding in refused.value.findings} == {
        "config.mesh": "write Mesh(replicate=1, shard=-1, tensor=1)",
        "config.clip": "write ClipNorm(max_norm=1.0) or ClipValue(max_value=1.0) or None",
        "config.overrides": "put it into a list: ['mesh.x']",
    }


def test_what_a_plan_left_open_is_asked_again_where_it_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    live = model()
    here = observe_env()
    cfg = pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapRoot()), device="cpu")
    made = pk.build_plan(cfg, live, optimizer=adam(live), env=evolve(here, torch=""))
    assert "environment.torch-unknown" in [finding.rule for finding in made.warnings]
    monkeypatch.setattr("prepkit.observe.observe_env", lambda: evolve(here, torch="2.6.0"))
    with pytest.raises(pk.PlanRejected, match=r"environment\.fsdp2-on-cpu at env\.torch: torch 2\.6\.0"):
        pk.apply(made)
    assert type(live) is torch.nn.Sequential
    assert type(live[0].weight) is torch.nn.Parameter


def test_a_warning_that_only_apply_can_give_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pk.build_plan(pk.Config(optimizer=pk.optim.AdamW()), model())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.warns(FindingWarning, match=r"^warning environment\.launcher-flag at env\.variables\.ACCELERATE_MIX"):
        assert pk.apply(made).attestation.failed == ()


def test_what_is_to_be_trained_is_not_prepared_under_inference_mode() -> None:
    made = pk.build_plan(pk.Config(), model())
    with torch.inference_mode():
        with pytest.raises(pk.PlanRejected, match=r"plan\.inference-mode at torch\.inference_mode"):
            pk.apply(made)
        inside = model()
    with pytest.raises(pk.PlanRejected, match=r"plan\.inference-mode at model\.0\.weight"):
        pk.apply(made, model=inside)
    with torch.inference_mode():
        pk.apply(pk.build_plan(pk.Config(intent=pk.Intent.INFERENCE), inside))
    assert pk.apply(made).attestation.failed == ()


def test_an_optimizer_spec_may_be_given_in_the_call_or_in_the_config() -> None:
    called = pk.build_plan(pk.Config(), model(), optimizer=pk.optim.AdamW(lr=0.5))
    assert called == pk.build_plan(pk.Config(optimizer=pk.optim.AdamW(lr=0.5)), model())
    ready = pk.apply(called)
    assert isinstance(ready.optimizer, torch.optim.AdamW)
    assert ready.optimizer.param_groups[0]["lr"] == 0.5


def test_the_objects_of_a_loop_and_sizes_may_be_given_by_their_place() -> None:
    live = model()
    optimizer = adam(live)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plan = pk.build_plan(pk.Config(), live, optimizer, scheduler)
    assert plan == pk.build_plan(pk.Config(), live, optimizer=optimizer, scheduler=scheduler)
    assert pk.fits(plan, "1GiB", "2GiB") == pk.fits(plan, memory="1GiB", activations="2GiB")
    assert not pk.fits(plan, "1GiB", "2GiB")


def test_two_different_optimizer_specs_are_refused() -> None:
    with pytest.raises(pk.PlanRejected) as refused:
        pk.build_plan(pk.Config(optimizer=pk.optim.SGD()), model(), optimizer=pk.optim.AdamW())
    assert [finding.rule for finding in refused.value.findings] == ["optimizer.two-places"]


def test_every_finding_comes_at_once() -> None:
    cfg = pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapClasses(("Liner",))), accumulation=0, clip=pk.ClipNorm(-1.0))
    with pytest.raises(pk.PlanRejected) as refused:
        pk.build_plan(cfg, model(), env=pk.Env.declare(world_size=2, device="cpu"))
    assert {f.where for f in refused.value.findings} >= {"config.accumulation", "config.clip.max_norm"}
    assert any("Linear" in finding.fix for finding in refused.value.findings)
    assert refused.value.findings == tuple(pk.check(cfg, model(), env=pk.Env.declare(world_size=2, device="cpu")))


def test_facts_are_planned_without_a_model_and_cannot_be_applied() -> None:
    made = pk.build_plan(pk.Config(), tiny_facts())
    assert made.target is None
    with pytest.raises(TypeError, match="model"):
        pk.apply(made)


def test_facts_with_live_objects_beside_them_are_refused() -> None:
    with pytest.raises(TypeError, match="facts alone"):
        pk.build_plan(pk.Config(), tiny_facts(), optimizer=adam(model()))


def test_a_single_loader_instead_of_a_list_is_refused_without_drawing_from_it() -> None:
    loader = torch.utils.data.DataLoader([torch.zeros(4)])
    with pytest.raises(TypeError, match=r"loaders=\[loader\]"):
        pk.build_plan(pk.Config(), model(), loaders=loader)


def test_a_config_with_a_value_of_the_wrong_type_is_refused_with_its_place() -> None:
    with pytest.raises(pk.PlanRejected) as refused:
        pk.build_plan(pk.Config(accumulation="4"), model())
    (finding,) = refused.value.findings
    assert finding.where == "config.accumulation"


def test_a_model_without_weights_is_planned_and_refused_by_apply() -> None:
    with torch.device("meta"):
        empty = model()
    with pytest.raises(pk.PlanRejected, match=r"plan\.no-weights"):
        pk.apply(pk.build_plan(pk.Config(), empty))


def test_a_changed_model_is_refused_untouched() -> None:
    live = model()
    made = pk.build_plan(pk.Config(precision=pk.BF16()), live)
    live[0].weight.requires_grad_(requires_grad=False)
    with pytest.raises(pk.PlanRejected, match=r"plan\.model-changed"):
        pk.apply(made)
    assert "forward" not in live.__dict__


def test_a_plan_for_more_ranks_than_were_launched_is_refused() -> None:
    made = pk.build_plan(pk.Config(engine=pk.FSDP2()), model(), env=pk.Env.declare(world_size=2, device="cpu"))
    with pytest.raises(pk.PlanRejected, match=r"plan\.other-environment"):
        pk.apply(made)


def test_an_outcome_that_is_not_the_plan_s_is_not_returned() -> None:
    live = model()
    made = pk.build_plan(pk.Config(), live)
    wrong = evolve(made, layout=tuple(evolve(one, dtype="bfloat16") for one in made.layout))
    with pytest.raises(pk.errors.NotAsPlanned) as raised:
        pk.apply(wrong)
    (one,) = raised.value.findings
    assert (one.rule, raised.value.attestation.failed) == ("run.other-layout", (one,))
    assert "; likewise `0.bias`, `1.weight`" in one.what or len(made.layout) == 2


def test_a_rule_of_apply_is_overridden_by_its_id_and_the_attestation_has_it() -> None:
    live = model()
    made = pk.build_plan(pk.Config(overrides=("run.other-layout",)), live)
    wrong = evolve(made, layout=tuple(evolve(one, cls="Other") for one in made.layout))
    ready = pk.apply(wrong)
    assert (ready.attestation.failed, ready.attestation.overridden) == ((), ("run.other-layout",))
    assert [one.rule for asked in ready.attestation.asked for one in asked.found] == ["run.other-layout"]


def test_a_step_that_fails_halts_with_its_cause_and_undoes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    live = model()
    cfg = pk.Config(precision=pk.BF16(), compile=pk.CompileModel(backend="eager"))
    made = pk.build_plan(cfg, live)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: 1 / 0)
    with pytest.raises(pk.errors.ApplyHalted) as raised:
        pk.apply(made)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert [(one.rule, one.where) for one in raised.value.findings] == [("apply.step-failed", "CompileModules")]
    assert raised.value.halted.clean
    assert "forward" not in live.__dict__


def test_what_a_step_refuses_before_it_acts_has_an_id_and_gives_way_to_its_override() -> None:
    live = model().bfloat16()
    for param in live.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(pk.errors.RunRefused) as raised:
        pk.apply(pk.build_plan(pk.Config(precision=pk.BF16()), live))
    assert isinstance(raised.value, pk.errors.ApplyHalted)
    assert [one.rule for one in raised.value.findings] == ["apply.gradient-lost"]
    assert {param.dtype for param in live.parameters()} == {torch.bfloat16}
    ready = pk.apply(pk.build_plan(pk.Config(precision=pk.BF16(), overrides=("apply.gradient-lost",)), live))
    assert ready.attestation.overridden == ("apply.gradient-lost",)


def test_what_steps_refuse_and_nobody_can_accept_halts_whatever_is_overridden() -> None:
    cfg = pk.Config(overrides=("plan.other-model",))
    with pytest.raises(pk.errors.PlanRejected, match=r"overrides\.unknown"):
        pk.build_plan(cfg, model())


def test_warnings_of_plan_and_run_are_in_the_attestation_once_each(tmp_path: Path) -> None:
    live = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(live.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
    ready = pk.apply(pk.build_plan(pk.Config(), live, optimizer=optimizer, scheduler=scheduler))
    before = [one.rule for one in ready.attestation.warned]

    def trained() -> None:
        for _ in range(4):
            ready.backward(ready.model(torch.ones(1, 2)).sum())
            ready.step()

    with pytest.warns(FindingWarning, match=r"loop\.scheduler-at-end"):
        trained()
    assert [one.rule for one in ready.attestation.warned] == [*before, "loop.scheduler-at-end"]
    pk.save(ready.attestation, tmp_path / "attestation.json")
    assert pk.load(tmp_path / "attestation.json") == ready.attestation


def test_the_functional_face_returns_failures_as_values() -> None:
    from returns.io import IOFailure

    from prepkit.applying.apply import run
    from prepkit.objects.target import Target

    made = pk.build_plan(pk.Config(), model())
    assert isinstance(run(made, Target(model=torch.nn.Linear(1, 1))), IOFailure)


def test_every_public_name_arrives() -> None:
    for name in dir(pk):
        assert getattr(pk, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pk.nonsense
    assert callable(pk.diff)


@pytest.mark.parametrize("accepted", [True, False])
def test_python_s_collector_leaves_old_objects_alone_while_apply_runs(accepted: bool) -> None:
    """A look at all of torch would cost more than the rest of a first ``apply``."""
    plan = pk.build_plan(pk.Config(engine=pk.Single(), optimizer=pk.optim.SGD(lr=0.1)), model())
    looked: list[int] = []
    usual = gc.get_threshold()

    def require(_: bytes) -> bool:
        gc.callbacks.append(heard)
        many = [[] for _ in range(3 * usual[0] * usual[1])]  # what makes a look at the second generation due thrice
        gc.callbacks.remove(heard)
        return accepted and bool(many)

    def heard(phase: str, told: dict[str, int]) -> None:
        if phase == "start":
            looked.append(told["generation"])

    gc.collect()  # so that the next ones make out more than a quarter of what is old
    gc.set_threshold(usual[0], usual[1], 0)
    try:
        with nullcontext() if accepted else pytest.raises(pk.PlanRejected):
            pk.apply(plan, require=require)
        assert gc.get_threshold() == (usual[0], usual[1], 0)
    finally:
        gc.set_threshold(*usual)
    assert set(looked) == {0, 1}
