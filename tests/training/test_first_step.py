"""Before the optimizer acts for the first time: what would train wrongly raises on every rank, with nothing stepped."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.auditing.audit import audit
from prepkit.findings import FindingWarning, RunRefused
from tests.support.gang import Gang


class Partly(nn.Module):
    """One layer has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).tanh()


class Whole(Partly):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unused(self.used(x))


ENGINES = {
    "Single": pk.Single(),
    "DDP": pk.DDP(),
    "DDP, unused": pk.DDP(find_unused_parameters=True),
    "FSDP1": pk.FSDP1(wrap=pk.wrap.WrapClasses(("Linear",))),
    "FSDP2": pk.FSDP2(wrap=pk.wrap.WrapClasses(("Linear",))),
    "ZeRO 0": pk.DeepSpeed(stage=0, micro_batch=2),
    "ZeRO 2": pk.DeepSpeed(stage=2, micro_batch=2),
    "ZeRO 3": pk.DeepSpeed(stage=3, micro_batch=2),
}


def prepared(engine: str, kind: type[nn.Module] = Partly, **options: Any) -> Any:
    torch.manual_seed(0)
    model = kind()
    if engine.startswith("ZeRO"):
        from tests.support.deepspeed_cpu import lean

        lean()
    cfg = pk.Config(engine=ENGINES[engine], optimizer=pk.optim.SGD(lr=0.1), **options)
    return pk.apply(pk.build_plan(cfg, model))


def values(ready: Any) -> list[float]:
    return [
        float(getattr(param, "ds_tensor", getattr(param, "_local_tensor", param)).detach().sum())
        for param in ready.model.parameters()
    ]


def first(
    rank: int, world: int, engine: str, kind: type[nn.Module] = Partly, **options: Any
) -> tuple[str, str, bool, int]:
    """What the first step raises and what it warns of, whether anything was changed, and the checks attested of it."""
    del world
    ready = prepared(engine, kind, **options)
    before = values(ready)
    text = ""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            ready.backward(ready.model(torch.full((2, 4), rank + 1.0)).sum())
            ready.step()
        except RunRefused as error:
            text = str(error)
    checks = [one for one in ready.attestation.asked if one.moment == "before the first step"]
    told = [str(one.message) for one in heard if isinstance(one.message, FindingWarning)]
    told = [one for one in told if "run.not-read" not in one]
    return text, "\n".join(told), values(ready) == before, len(checks)


MISSING = "2 parameters of 4 that are about to be stepped have no gradient: `unused.weight`, `unused.bias`."
RULES = 11
"""Asked at the first step."""


@pytest.mark.parametrize("engine", ["FSDP1", "FSDP2", "ZeRO 0", "ZeRO 2", "ZeRO 3"])
def test_a_parameter_without_a_gradient_is_named_on_rank_0_and_trained_on_where_torch_is_right(
    gang2: Gang, engine: str
) -> None:
    for rank, (text, told, same, checks) in enumerate(gang2.run(first, engine, timeout=90)):
        assert (text, same, checks) == ("", False, RULES)
        assert ("warning run.without-gradient at model.unused.weight" in told) is (rank == 0)
        assert (MISSING in told) is (rank == 0)


def test_in_one_process_too() -> None:
    text, told, same, checks = first(0, 1, "Single")
    assert MISSING in told
    assert (text, same, checks) == ("", False, RULES)


def test_ddp_that_waits_for_a_gradient_refuses_on_every_rank_and_cannot_be_overridden(gang2: Gang) -> None:
    for text, told, same, checks in gang2.run(first, "DDP", timeout=60):
        assert "error run.gradients-waited-for at model.unused.weight: DDP waits for 2 gradients" in text
        assert "find_unused_parameters=True" in text
        assert "run.gradients-part" not in text  # which would only follow from it
        assert (told, same, checks) == ("", True, 0)
    with pytest.raises(pk.PlanRejected, match=r"`run\.gradients-waited-for` cannot be overridden"):
        prepared("Single", overrides=("run.gradients-waited-for",))


def test_ddp_that_finds_what_is_unused_trains(gang2: Gang) -> None:
    for text, told, same, checks in gang2.run(first, "DDP, unused", timeout=60):
        assert (text, told, same, checks) == ("", "", False, RULES)


class Experts(nn.Module):
    """A batch uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](x)  # type: ignore[no-any-return]


def left_out(ready: Any) -> tuple[list[str], list[str], list[str]]:
    """What the audit and the first step say of a batch that leaves something out, and what is warned of."""
    ready.backward(ready.model(torch.ones(2, 4)).square().sum())
    seen = audit(ready.model, list(ready.loop.optimizers), at_step=True)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert ready.step()
    noted = [one for asked in ready.attestation.asked if asked.moment == "before the first step" for one in asked.found]
    told = [str(one.message) for one in heard if isinstance(one.message, FindingWarning)]
    return [str(one) for one in seen.findings], list(map(str, noted)), told


def test_a_batch_that_chooses_an_expert_is_noted_by_step_and_audit_alike_and_not_warned_of() -> None:
    judged, noted, told = left_out(prepared("Single", Experts))
    assert judged == noted
    assert "note run.left-out at model.experts.1.weight: This batch gives 2 parameters no gradient" in noted[0]
    assert told == []


def of_two_optimizers() -> Any:
    torch.manual_seed(0)
    model = Partly()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.used, model.unused)]
    return pk.apply(pk.build_plan(pk.Config(), model, optimizer=optimizers))


def test_a_turn_of_one_of_two_optimizers_is_noted_by_step_and_audit_alike_and_not_warned_of() -> None:
    judged, noted, told = left_out(of_two_optimizers())
    assert judged == noted
    assert "note run.left-out at model.unused.weight" in noted[0]
    assert told == []


def waits_for_what_nobody_steps(rank: int, world: int) -> tuple[str, str]:
    """What the audit says of DDP over a layer that is trained, in no optimizer and not in the loss; and torch."""
    del rank, world
    model = nn.parallel.DistributedDataParallel(Partly())
    optimizer = torch.optim.SGD(model.module.used.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    seen = audit(model, optimizer, at_step=True)
    found = "".join(str(one) for one in seen.findings if one.rule == "run.gradients-waited-for")
    optimizer.step()
    try:
        model(torch.ones(2, 4))
    except RuntimeError as error:
        return found, str(error)
    return found, ""


def test_ddp_waits_for_what_trains_also_where_nobody_steps_it(gang2: Gang) -> None:
    for found, raised in gang2.run(waits_for_what_nobody_steps, timeout=60):
        assert "DDP waits for 2 gradients that never came: `unused.weight`, `unused.bias`" in found
        assert "Expected to have finished reduction" in raised


class Nothing(Partly):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach().requires_grad_()


def test_a_step_that_would_train_nothing_is_refused_unless_it_is_accepted() -> None:
    text, _, same, checks = first(0, 1, "Single", Nothing)
    assert "error run.steps-nothing at optimizer: None of 4 parameters" in text
    assert (same, checks) == (True, 0)
    text, _, same, checks = first(0, 1, "Single", Nothing, overrides=("run.steps-nothing",))
    assert (text, same, checks) == ("", True, RULES)


@pytest.mark.parametrize("engine", ["DDP", "FSDP1", "FSDP2", "ZeRO 0", "ZeRO 2", "ZeRO 3"])
def test_where_all_is_well_the_attestation_says_so(gang2: Gang, engine: str) -> None:
    for text, told, same, checks in gang2.run(first, engine, Whole, timeout=90):
        assert (text, told, same, checks) == ("", "", False, RULES)


def apart(rank: int, world: int, factor: float, hook: bool) -> tuple[str, str]:
    """What the first step and the audit say where rank 1's gradients are its own by a factor."""
    del world
    ready = prepared("DDP", Whole)
    if hook:
        ready.model.register_comm_hook(None, as_each_has_it)
    ready.backward(ready.model(torch.full((2, 4), rank + 1.0 if hook else 1.0)).sum())
    for param in ready.model.parameters():  # as a hook of the user's might
        param.grad *= 1.0 if hook or not rank else factor
    seen = audit(ready.model, ready.optimizer, at_step=True)
    judged = "\n".join(str(one) for one in seen.findings if one.rule == "run.gradients-part")
    try:
        ready.step()
    except RunRefused as error:
        return str(error), judged
    return "", judged


def as_each_has_it(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    """A communication hook that averages nothing."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize(
    ("factor", "hook", "fix"),
    [
        (2.0, False, "Call the wrapper, model(x)"),
        (-1.0, False, "Call the wrapper, model(x)"),
        (1.0, True, "hook `as_each_has_it`"),
        (1.0 + 1e-6, False, ""),
    ],
    ids=["larger", "other signs", "hook", "rounding"],
)
def test_gradients_that_differ_over_the_replicas_are_seen_by_step_and_audit_alike(
    gang2: Gang, factor: float, hook: bool, fix: str
) -> None:
    for text, judged in gang2.run(apart, factor, hook, timeout=60):
        assert ("error run.gradients-part at model.used.weight" in text) is bool(fix)
        assert ("error run.gradients-part at model.used.weight" in judged) is bool(fix)
        assert fix in text
        assert fix in judged


def apart_in_one_group(rank: int, world: int) -> str:
    """What the first step of replicated shards says where a gradient of one rank is its own."""
    del world
    torch.manual_seed(0)
    cfg = pk.Config(
        engine=pk.FSDP2(wrap=pk.wrap.WrapClasses(("Linear",))),
        mesh=pk.Mesh(replicate=2, shard=2),
        optimizer=pk.optim.SGD(lr=0.1),
    )
    ready = pk.apply(pk.build_plan(cfg, Whole()))
    ready.backward(ready.model(torch.full((2, 4), rank + 1.0)).square().sum())
    if rank == 2:
        ready.model.used.weight.grad._local_tensor.mul_(2)
    try:
        ready.step()
    except RunRefused as error:
        return str(error)
    return ""


def test_what_some_replicas_find_apart_is_refused_on_all_ranks(gang4: Gang) -> None:
    """Ranks 0 and 2 compare what they hold; ranks 1 and 3, which hold other shards, would go on alone."""
    for text in gang4.run(apart_in_one_group, timeout=90):
        assert "error run.gradients-part at model.used.weight" in text


class Zero(Whole):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0


@pytest.mark.parametrize("engine", ["DDP", "FSDP1", "FSDP2", "ZeRO 2"])
def test_gradients_that_are_all_zero_are_warned_of_on_rank_0(gang2: Gang, engine: str) -> None:
    """As of a window without a label that counts, which is right."""
    for rank, (text, told, _, _) in enumerate(gang2.run(first, engine, Zero, timeout=90)):
        assert text == ""
        assert ("warning run.steps-nothing at optimizer: Every gradient of 4 parameters" in told) == (rank == 0)


def infinite(rank: int, world: int, engine: str) -> str:
    del world
    ready = prepared(engine, Whole)
    batch = torch.full((2, 4), float("nan") if rank == 1 else 1.0)
    ready.backward(ready.model(batch).sum())
    try:
        ready.step()
    except RunRefused as error:
        return str(error)
    return ""


@pytest.mark.parametrize("engine", ["DDP", "FSDP2", "ZeRO 2"])
def test_what_is_not_finite_on_one_rank_raises_on_all(gang2: Gang, engine: str) -> None:
    for text in gang2.run(infinite, engine, timeout=90):
        assert "error run.gradients-not-finite at model." in text


def after_the_first(rank: int, world: int) -> list[int]:
    del world
    ready = prepared("DDP", Whole)
    counts = []
    for _ in range(3):
        ready.backward(ready.model(torch.full((2, 4), rank + 1.0)).sum())
        ready.step()
        counts.append(sum(one.moment == "before the first step" for one in ready.attestation.asked))
    return counts


def test_it_is_looked_at_once(gang2: Gang) -> None:
    assert gang2.run(after_the_first, timeout=60) == [[RULES] * 3] * 2


def test_who_has_a_loop_of_their_own_steps_as_they_like() -> None:
    ready = prepared("Single", Whole)
    before = values(ready)
    ready.model(torch.ones(2, 4)).sum().backward()
    ready.optimizer.step()
    assert values(ready) != before


def refused_twice(rank: int, world: int) -> list[str]:
    del world
    ready = prepared("ZeRO 2", Whole)
    ready.backward(ready.model(torch.full((2, 4), float("nan") if rank else 1.0)).sum())
    texts = []
    for _ in range(2):
        try:
            ready.step()
        except RunRefused as error:
            texts.append(str(error))
    return texts


def test_a_step_that_is_tried_again_is_refused_for_the_same_reason(gang2: Gang) -> None:
    for first_text, again in gang2.run(refused_twice, timeout=90):
        assert "run.gradients-not-finite" in first_text
        assert again == first_text


def test_an_error_that_is_accepted_after_the_first_step_is_in_the_attestation_at_once() -> None:
    rule = "loop.gradients-left-over"
    ready = prepared("Single", Whole, overrides=(rule,))
    ready.backward(ready.model(torch.ones(2, 4)).sum())
    ready.step()
    assert ready.attestation.overridden == ()
    ready.model.used.weight.grad = torch.ones(4, 4)
    ready.backward(ready.model(torch.ones(2, 4)).sum())
    assert ready.attestation.overridden == (rule,)


def decayed(rank: int, world: int, engine: str) -> tuple[str, bool]:
    """What is warned of a layer that has no part in the loss, and whether weight decay moves it."""
    del rank, world
    if engine.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
        from tests.support.deepspeed_cpu import lean

        lean()
    torch.manual_seed(0)
    cfg = pk.Config(engine=ENGINES[engine], optimizer=pk.optim.SGD(lr=0.1, weight_decay=0.5))
    ready = pk.apply(pk.build_plan(cfg, Partly()))
    before = values(ready)[2:]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ready.backward(ready.model(torch.ones(2, 4)).sum())
        ready.step()
    told = [str(one.message) for one in heard if "run.without-gradient" in str(one.message)]
    return "".join(told), values(ready)[2:] != before


@pytest.mark.parametrize("engine", ["FSDP1", "FSDP2", "ZeRO 0", "ZeRO 2", "ZeRO 3"])
def test_the_warning_says_what_the_engine_does_with_a_parameter_without_a_gradient(gang2: Gang, engine: str) -> None:
    (told, moved), _ = gang2.run(decayed, engine, timeout=90)
    assert (f"{engine} steps them with zeros" in told) is moved is engine.startswith("ZeRO")
    assert ("leaves them alone, but steps with zeros where another" in told) is (engine == "FSDP1")
    assert ("Nothing, where a batch may leave layers out" in told) is (engine == "FSDP2")


class Chosen(nn.Module):
    """Two layers of one shape; the caller says which a batch goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.of, self.last = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for at in chosen:
            x = x + (at + 1) * self.of[at](x)
        return self.last(x)  # type: ignore[no-any-return]


def prepared_to_choose(engine: str, **options: Any) -> Any:
    if engine.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
        from tests.support.deepspeed_cpu import lean

        lean()
    wraps = {"FSDP1": pk.FSDP1(wrap=pk.wrap.WrapPaths(("of.0", "of.1"))), "FSDP2": pk.FSDP2(wrap=pk.wrap.WrapRoot())}
    torch.manual_seed(0)
    cfg = pk.Config(engine={**ENGINES, **wraps}[engine], optimizer=pk.optim.SGD(lr=0.1), **options)
    return pk.apply(pk.build_plan(cfg, Chosen()))


def window(ready: Any, rank: int, *chosen: int) -> str:
    """What refuses a window through these layers."""
    try:
        ready.backward(ready.model(torch.full((2, 4), rank + 1.0), chosen).sum())
        ready.step()
    except RunRefused as error:
        return str(error)
    return ""


def each_its_own(rank: int, world: int, engine: str, before: int) -> tuple[list[str], str]:
    """What refuses windows through both layers, and then one in which each rank takes another."""
    del world
    ready = prepared_to_choose(engine)
    return [window(ready, rank, 0, 1) for _ in range(before)], window(ready, rank, rank)


@pytest.mark.parametrize(("engine", "before"), [("ZeRO 2", 0), ("ZeRO 2", 3), ("FSDP2", 3), ("FSDP1", 3)])
def test_ranks_with_gradients_of_other_parameters_are_refused_in_any_window_that_is_looked_at(
    gang2: Gang, engine: str, before: int
) -> None:
    for together, apart in gang2.run(each_its_own, engine, before, timeout=90):
        assert together == [""] * before
        assert "error run.gradients-on-some-ranks at model.of.0.weight: 2 parameters with a gradient on some" in apart
        assert ("has added gradients of other parameters to them" in apart) is (engine != "FSDP1")
        assert ("FSDP2(reduce_unused=True) reduces zeros where every rank runs" in apart) is (engine == "FSDP2")


def leaves_out(rank: int, world: int, before: int, accumulation: int, weighs: bool) -> tuple[list[str], str, bool]:
    """What refuses windows through both layers, then one in whose last micro-batch rank 0 takes the first alone.

    And whether that one moved a weight.
    """
    del world
    ready = prepared_to_choose("DDP", accumulation=accumulation)
    said: list[str] = []
    for at in range(1, before + 2):
        weights = values(ready)
        try:
            for micro in range(1, accumulation + 1):
                chosen = (0,) if not rank and (at, micro) == (before + 1, accumulation) else (0, 1)
                loss = ready.model(torch.full((2, 4), rank + 1.0), chosen).mean()
                ready.backward(loss, mean_over=8 if weighs else None)
                ready.step()
            said.append("")
        except RunRefused as error:
            said.append(str(error))
    return said[:before], said[before], values(ready) != weights


@pytest.mark.parametrize(
    ("before", "accumulation", "weighs"), [(0, 1, False), (3, 1, True), (0, 2, False), (1, 2, True)]
)
def test_what_ddp_waits_for_on_one_rank_alone_refuses_on_all_and_names_the_rank_in_a_window_that_is_looked_at(
    gang2: Gang, before: int, accumulation: int, weighs: bool
) -> None:
    for together, apart, moved in gang2.run(leaves_out, before, accumulation, weighs, timeout=90):
        assert together == [""] * before
        assert "at model.of.1.weight: DDP waits for 1 gradient that never came on rank 0: `of.1.weight`" in apart
        assert "find_unused_parameters=True" in apart
        assert apart.count("error ") == 1
        assert not moved


@pytest.mark.parametrize(("accumulation", "weighs"), [(1, False), (2, True)])
def test_what_ddp_waits_for_on_one_rank_alone_refuses_on_that_rank_in_a_window_that_is_not(
    gang2: Gang, accumulation: int, weighs: bool
) -> None:
    (_, apart, moved), (_, other, _) = gang2.run(leaves_out, 2, accumulation, weighs, timeout=90)
    assert "at model.of.1.weight: DDP waits for 1 gradient that never came on rank 0: `of.1.weight`" in apart
    assert (moved, other) == (False, ""), "the others hear of it as of any rank that ends"


def test_a_layer_that_each_rank_takes_alone_under_ddp_is_waited_for_and_not_said_to_be_of_nobody(gang2: Gang) -> None:
    for together, apart in gang2.run(each_its_own, "DDP", 0, timeout=90):
        assert together == []
        assert "DDP waits for 2 gradients that never came: `of.0.weight`, `of.1.weight`" in apart
        assert apart.count("error ") == 1


def once_its_own(rank: int, world: int, engine: str, at: int) -> list[str]:
    """What refuses five windows, in one of which each rank takes another layer, and the end."""
    del world
    ready = prepared_to_choose(engine)
    said: list[str] = []
    while len(said) < 5 and not any(said):
        said.append(window(ready, rank, *((rank,) if len(said) + 1 == at else (0, 1))))
    if not any(said):  # as close asks where apply has started the group
        said += map(str, ready._looks.before_close(ready.loop.passes))
    return said


@pytest.mark.parametrize("engine", ["ZeRO 2", "FSDP2"])
def test_gradients_of_other_parameters_in_a_window_that_nobody_looks_at_are_told_in_the_next_that_is(
    gang2: Gang, engine: str
) -> None:
    for said in gang2.run(once_its_own, engine, 3, timeout=90):
        assert said[:3] == ["", "", ""]
        assert "error run.gradients-on-some-ranks at ready.step(): In an earlier micro-batch ranks had" in said[3]
        assert "Go back to a checkpoint before its step." in said[3]
    assert gang2.run(once_its_own, engine, 0, timeout=90) == [[""] * 5] * 2
    for said in gang2.run(once_its_own, engine, 5, timeout=90):
        assert said[:5] == [""] * 5
        assert "In an earlier micro-batch ranks had" in said[5], "what nobody looks at any more is told by close"


def mixed(rank: int, world: int) -> tuple[float, float, float]:
    """How far a layer of rank 0's alone moves where nothing refuses it, by its own gradient, and by both layers'."""
    del world
    ready, plain = prepared_to_choose("ZeRO 2", overrides=("run.gradients-on-some-ranks",)), Chosen()
    start = ready.unwrap().of[0].weight.detach().clone()
    plain.load_state_dict({name: value.detach().clone() for name, value in ready.unwrap().state_dict().items()})
    window(ready, rank, rank)
    moved = float((start - ready.unwrap().of[0].weight.detach()).sum())
    for at in range(2):
        (plain(torch.full((2, 4), at + 1.0), (at,)).sum() / 2).backward()
    own, other = (0.1 * float(layer.weight.grad.sum()) for layer in plain.of)  # type: ignore[union-attr, arg-type]
    return moved, own, own + other


def test_zero_2_adds_up_gradients_of_layers_of_which_each_rank_takes_another(gang2: Gang) -> None:
    for moved, own, both in gang2.run(mixed, timeout=90):
        assert moved == pytest.approx(both, rel=1e-4)
        assert abs(own - both) > 0.5


def left_out_later(rank: int, world: int, engine: str, before: int) -> tuple[list[str], str, str]:
    """What refuses windows through both layers, one through the first alone, and one that nothing refuses after it."""
    del world
    ready = prepared_to_choose(engine)
    return [window(ready, rank, 0, 1) for _ in range(before)], window(ready, rank, 0), window(ready, rank, 0, 1)


@pytest.mark.parametrize("before", [1, 2, 4])
def test_zero_3_refuses_to_step_with_the_gradient_of_an_earlier_window_whichever_it_is(
    gang2: Gang, before: int
) -> None:
    for together, without, _ in gang2.run(left_out_later, "ZeRO 3", before, timeout=90):
        assert together == [""] * before
        assert "error run.gradients-stale at model.of.1.weight: ZeRO 3 is about to step 1 parameter with" in without


def in_the_second_micro_batch(rank: int, world: int, engine: str) -> str:
    """What refuses windows of two micro-batches, in the second of which the first leaves a layer out."""
    del world
    ready = prepared_to_choose(engine, accumulation=2)
    return "".join(window(ready, rank, *chosen) for chosen in ((0,), (0, 1), (0, 1), (0, 1), (0,), (0, 1)))


def test_zero_3_refuses_to_add_to_the_gradient_of_an_earlier_window(gang2: Gang) -> None:
    for said in gang2.run(in_the_second_micro_batch, "ZeRO 3", timeout=90):
        assert "error run.gradients-stale at model.of.1.weight: ZeRO 3 is about to step 1 parameter with" in said
    assert gang2.run(in_the_second_micro_batch, "ZeRO 2", timeout=90) == [""] * 2


def turned_about(rank: int, world: int, apart: int) -> list[str]:
    """What refuses windows of two micro-batches in which each rank takes both layers, one after the other."""
    del world
    ready = prepared_to_choose("ZeRO 2", accumulation=2)
    return [window(ready, rank, (rank * apart + at) % 2) for at in range(4)]


def test_layers_that_ranks_take_in_other_micro_batches_of_a_window_are_found(gang2: Gang) -> None:
    for said in gang2.run(turned_about, 1, timeout=90):
        assert "ranks had gradients of other parameters, and ZeRO 2 has added them up" in said[1]
    assert gang2.run(turned_about, 0, timeout=90) == [[""] * 4] * 2


@pytest.mark.parametrize("engine", ["FSDP2", "ZeRO 2"])
def test_a_layer_that_all_ranks_leave_out_later_is_no_error_where_nothing_stale_is_stepped(
    gang2: Gang, engine: str
) -> None:
    assert gang2.run(left_out_later, engine, 1, timeout=90) == [([""], "", "")] * 2
