"""Predictions as values: known numbers, rank classes, labels, and what is said in words."""

from __future__ import annotations

import time
from importlib import metadata
from itertools import accumulate
from math import prod
from typing import Literal, get_args

import pytest
from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    AdamW,
    Config,
    DeepSpeed,
    Engine,
    Intent,
    Mesh,
    OffloadToCPU,
    WrapRoot,
)
from prepkit.plan.layout import chunk, local_shape
from prepkit.predict import CHECKED, PREDICTORS, predict, predict_inputs
from prepkit.predict.deepspeed.bytes import overlaps, parts
from prepkit.predict.fsdp2 import alike
from prepkit.predict.inputs import Inputs, inputs_of
from prepkit.predict.optimizers import TORCH, OptimizerInputs, state_formula
from prepkit.predict.prediction import Label, Prediction, Term, Traffic
from prepkit.render.plan import memory_lines
from prepkit.rules.mesh import strategy
from prepkit.testing.tiny import tiny_facts, tiny_model, tiny_optimizer
from tests.support.llama_facts import SIZES, fsdp2, llama
from tests.support.plain_inputs import plain_inputs
from tests.support.plans import make


def zero(stage: int, *, offload: Literal["cpu"] | None = None, **settings: int) -> Config:
    own: dict[str, object] = {"zero_optimization": settings} if settings else {}
    engine = DeepSpeed(stage=stage, micro_batch=1, offload_optimizer=offload, config=own)  # type: ignore[arg-type]
    return Config(engine=engine, precision=BF16(), optimizer=AdamW())


def params(name: str) -> list[int]:
    return [param.numel for param in llama(name).params]


def said(made: Prediction, start: str) -> str:
    return next((note for note in made.notes if note.startswith(start)), "")


def reduced(made: Prediction) -> int:
    return sum(entry.bytes for entry in made.traffic if entry.what.startswith("gradients"))


def only(made: Prediction, what: str) -> Term:
    (found,) = {term for one in made.classes for term in one.terms if term.what.startswith(what)}
    return found


# --- every engine --------------------------------------------------------------------------------------------------


def test_every_engine_is_predicted_or_says_that_it_is_not() -> None:
    for engine in set(get_args(Engine)) - set(PREDICTORS):
        assert "no formulas for" in predict_inputs(engine, _bare(engine.__name__)).not_predicted[0]


def _bare(name: str) -> Inputs:
    return plain_inputs(name, torch="")


def test_an_engine_without_formulas_is_not_predicted_and_nothing_breaks() -> None:
    made = predict_inputs(int, _bare("int"))
    assert (made.classes, made.not_predicted) == ((), ("everything: there are no formulas for int here",))


def test_single_and_inference_hold_what_they_need_and_no_more() -> None:
    facts = tiny_facts()
    whole = sum(param.numel * 4 for param in facts.model.params)
    made = predict(make(Config(), facts))
    (one,) = made.classes
    assert (one.category("parameters"), one.category("gradients"), made.traffic) == (whole, whole, ())
    assert one.category("optimizer state") == 2 * whole + 4 * len(facts.model.params)
    asks = Config(engine=FSDP2(), intent=Intent.INFERENCE)
    quiet = predict(make(asks, tiny_facts(world=4, optimizer=False)))
    assert not any(some.category("gradients") + some.category("optimizer state") for some in quiet.classes)
    assert {one.collective for one in quiet.traffic} == {"all-gather"}


# --- known numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world", "over"),
    [
        ("8B", 512, 1.0003), ("8B", 4096, 1.17), ("8B", 16384, 2.67),
        ("70B", 512, 1.0001), ("70B", 4096, 1.06), ("70B", 16384, 1.78),
        ("405B", 512, 1.0000), ("405B", 4096, 1.03), ("405B", 16384, 1.28),
    ],
)  # fmt: skip
def test_fsdp2_pads_as_it_was_measured_to(name: str, world: int, over: float) -> None:
    made = predict(fsdp2(name, world))
    ratio = made.fullest.category("parameters") / (sum(params(name)) * 4 / world)
    assert ratio == pytest.approx(over, abs=0.005 if world > 512 else 0.00005)
    assert bool(said(made, "Padding")) == (over > 1.01)


def test_the_fullest_rank_of_8b_holds_more_adam_state_than_the_emptiest_and_352_ranks_hold_nothing() -> None:
    at512, at4096 = predict(fsdp2("8B", 512)), predict(fsdp2("8B", 4096))
    ratios = [m.fullest.category("optimizer state") / m.emptiest.category("optimizer state") for m in (at512, at4096)]
    assert ratios == pytest.approx([1.15, 3.2], abs=0.05)
    assert [predict(fsdp2(name, 16384)).empty_ranks for name in ("8B", "70B")] == [352, 352]


def test_flat_layouts_hardly_pad_at_any_size() -> None:
    for name in SIZES:
        numels = params(name)
        flat = predict(fsdp2(name, 16384, Config(engine=FSDP1(), optimizer=AdamW())))
        assert flat.fullest.category("parameters") / (sum(numels) * 4 / 16384) <= 1.0001
        made = predict(fsdp2(name, 16384, zero(3)))
        (cut,) = {term.bytes for one in made.classes for term in one.terms if term.what == "parts"}
        assert cut / (sum(numels) * 2 / 16384) <= 1.0001


def test_the_default_reduce_bucket_takes_gigabytes_and_a_small_model_stays_gathered() -> None:
    made = predict(fsdp2("8B", 64, zero(3)))
    assert only(made, "reduce bucket").bytes == 500_000_000 * 4  # prepkit sends gradients in float32
    assert said(made, "The reduce bucket takes 1.86 GiB on every rank")
    assert not said(made, "All ")
    lowered = predict(fsdp2("8B", 64, zero(3, stage3_max_live_parameters=10**11, stage3_max_reuse_distance=10**11)))
    assert said(lowered, "All 14.96 GiB of parameters stay gathered")
    gathered, again = (one.traffic[0].bytes for one in (lowered, made))
    assert again > 1.99 * gathered


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_sends_three_times_the_model_below_stage_3(stage: int) -> None:
    cfg = evolve(zero(stage), precision=BF16(reduce_dtype="bfloat16"))
    made = predict(fsdp2("8B", 64, cfg))
    reduce, gather = made.traffic
    assert (reduce.collective, gather.collective) == ("all-reduce", "all-gather")
    assert made.sent == pytest.approx(3 * sum(params("8B")) * 2 * 63 / 64, rel=1e-6)
    assert said(made, f"ZeRO {stage} all-reduces gradients and then gathers all parameters")


def test_offloaded_states_are_on_the_host_and_what_is_page_locked_is_rounded_up() -> None:
    made, low = (predict(fsdp2("8B", 64, zero(stage, offload="cpu"))) for stage in (3, 2))
    for one in (made, low):
        assert not one.fullest.category("optimizer state", "device") + one.fullest.category("master weights", "device")
        assert one.fullest.total("host") > 8 * 10**9 * 12 // 64
        assert one.copied > 0
    labels = {term.what: (term.label, term.bytes) for term in made.fullest.terms if term.place == "host"}
    mine = labels["float32 copy of the part"][1]
    assert labels["float32 copy of the part"][0] is Label.EXACT  # a clone, which is not locked
    assert labels["of the part, from the start"] == (Label.BOUNDED, 1 << (mine - 1).bit_length())
    assert [one.ranks for one in low.classes] == [64]  # no rank has padding only, so they are alike
    (masters,) = (term for term in low.fullest.terms if term.category == "master weights")
    assert masters.label is Label.BOUNDED
    assert masters.bytes.bit_count() == 1


def test_a_rank_keeps_whole_gradients_of_what_lies_in_its_part_unless_they_add_up_in_float32() -> None:
    cfg = zero(2)
    sums = evolve(cfg, precision=BF16(reduce_dtype="bfloat16"))
    wide, narrow = predict(fsdp2("8B", 512, sums)), predict(fsdp2("8B", 512, cfg))
    embedding = 128256 * 4096
    assert max(one.category("gradients") for one in wide.classes) >= embedding * 2
    assert wide.at(0).category("gradients") == embedding * 2
    assert {one.category("gradients") for one in narrow.classes} == {only(narrow, "float32, of a part").bytes}
    assert sum(one.ranks for one in wide.classes) == 512
    assert said(wide, "A rank keeps whole gradients of the parameters that lie in its part, if only partly")
    assert not said(narrow, "A rank keeps whole gradients")


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_runs_of_ranks_are_those_of_every_rank_one_by_one(ranks: int) -> None:
    one = inputs_of(fsdp2("8B", 64, zero(2))).zero
    assert one is not None
    small = evolve(one, ranks=ranks, groups=((5, 1, 300, 17), (64,), (1, 1), (0,)))
    found = overlaps(small)
    for rank in range(ranks):
        whole = padding = used = 0
        for some, part in zip(small.groups, parts(small), strict=True):
            ends = list(accumulate(some))
            begin, end = rank * part, (rank + 1) * part
            whole += sum(n for n, stop in zip(some, ends, strict=True) if stop > begin and stop - n < end)
            padding += min(part, max(0, end - ends[-1]))
            used += part if begin < ends[-1] else 0
        run = [run for run in found if run.first <= rank][-1]
        assert (run.touched, run.padding, run.used) == (whole, padding, used)


def test_accumulation_sends_gradients_of_every_micro_batch_from_stage_2_on_and_exactly() -> None:
    for stage in (1, 2, 3):
        once, often = (predict(fsdp2("8B", 64, evolve(zero(stage), accumulation=times))) for times in (1, 4))
        sent = [next(t for t in made.traffic if t.what == "gradients") for made in (once, often)]
        assert {one.label for one in sent} == {Label.EXACT}
        assert sent[1].bytes == sent[0].bytes * (1 if stage == 1 else 4)


def test_what_is_gathered_again_at_stage_3_is_exact_only_where_nothing_is() -> None:
    far = 2 * sum(params("8B")) + 1
    for distance, label in ((far, Label.EXACT), (far - 1, Label.BOUNDED)):
        made = predict(fsdp2("8B", 64, zero(3, stage3_max_reuse_distance=distance)))
        assert made.traffic[0].label is label
        assert bool(said(made, "What is gathered once, not twice, follows")) is (label is Label.BOUNDED)


def test_settings_that_no_formula_knows_leave_zero_unpredicted() -> None:
    made = predict(fsdp2("8B", 64, zero(3, zero_hpz_partition_size=8)))
    assert made.not_predicted == ("everything: no formulas here know zero_hpz_partition_size",)


def test_a_ring_sends_all_but_its_own_part_once_and_an_all_reduce_twice() -> None:
    one = Traffic(collective="all-gather", what="", calls=1, bytes=800, ranks=8, axis="shard")
    assert (one.sent, evolve(one, collective="all-reduce").sent, evolve(one, collective="broadcast").sent) == (
        700,
        1400,
        800,
    )
    assert [one.crosses(size) for size in (8, 7)] == [False, True]
    assert evolve(one, ranks=2, stride=8).crosses(8)


# --- all ranks at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 7, 64, 513])
def test_classes_are_those_of_every_rank_one_by_one(shards: int) -> None:
    sizes = (1, 5, 63, 64, 65, 512, 1003, 0)
    found = alike(sizes, shards)
    assert [index for first, last in found for index in range(first, last + 1)] == list(range(shards))
    for first, last in found:
        assert len({tuple(chunk(size, shards, index)[1] for size in sizes) for index in range(first, last + 1)}) == 1
    assert len(found) <= 2 * len(sizes) + 1


@pytest.mark.parametrize("copies", [1, 2, 7])
@pytest.mark.parametrize("engine", [FSDP2(), FSDP1(sharding="HYBRID_SHARD")], ids=["FSDP2", "FSDP1"])
def test_the_state_of_every_rank_is_that_of_its_own_shapes(engine: Engine, copies: int) -> None:
    mesh = Mesh(replicate=copies) if copies > 1 else None
    if isinstance(engine, FSDP1):
        engine = strategy(engine, hybrid=copies > 1)
    facts = tiny_facts(tiny_model(width=5, vocab=23), world=14, optimizer=False)
    plan = make(Config(engine=engine, mesh=mesh, optimizer=SGD(momentum=0.9)), facts)
    made = predict(plan)
    assert sum(one.ranks for one in made.classes) == 14
    for rank in range(14):
        own = sum(prod(local_shape(one, plan.mesh, rank)) * 4 for one in plan.layout)
        assert made.at(rank).category("optimizer state") == own
        assert made.at(rank).empty == (own == 0)
    with pytest.raises(ValueError, match="there is no rank 14"):
        made.at(14)


@pytest.mark.parametrize("engine", [FSDP2(), FSDP1()], ids=["FSDP2", "FSDP1"])
def test_405b_on_16384_ranks_takes_milliseconds(engine: Engine) -> None:
    plan = fsdp2("405B", 16384, Config(engine=engine, optimizer=AdamW()))
    times = []
    for _ in range(5):
        began = time.process_time()
        made = predict(plan)
        times.append(time.process_time() - began)
    assert len(made.classes) <= (2 * 5 + 1 if isinstance(engine, FSDP2) else 2 * 2 * 12 + 1)
    assert min(times) < 0.5, times  # 5 ms on an idle core


# --- labels --------------------------------------------------------------------------------------------------------


def test_a_torch_that_was_not_compared_is_bounded_and_one_that_is_not_known_is_said() -> None:
    checked, other, unknown = (predict(fsdp2("8B", 64, torch=version)) for version in ("2.13.1+cu130", "2.9", ""))
    assert Label.EXACT in {term.label for term in checked.fullest.terms}
    assert Label.EXACT not in {term.label for term in other.fullest.terms} | {one.label for one in other.traffic}
    assert other.fullest.total() == checked.fullest.total()
    assert (other.fullest.floor(), bool(said(other, "torch 2.9 was not compared"))) == (0, True)
    assert said(unknown, "torch version not known")
    assert unknown.fullest.floor() == checked.fullest.floor()


def test_a_deepspeed_that_was_not_compared_is_bounded_too() -> None:
    plan = fsdp2("8B", 64, zero(2))
    known, other = (
        predict(evolve(plan, facts=evolve(plan.facts, env=evolve(plan.facts.env, libraries=(("deepspeed", version),)))))
        for version in ("0.19.8", "0.18.1")
    )
    assert Label.EXACT in {one.label for one in known.traffic}
    assert Label.EXACT not in {one.label for one in other.traffic} | {term.label for term in other.fullest.terms}
    assert said(other, "deepspeed 0.18.1 was not compared")
    assert said(predict(plan), "deepspeed version not known")
    assert not said(known, "deepspeed")


def test_the_libraries_that_are_installed_are_those_that_the_formulas_were_compared_with() -> None:
    for engine, libraries in CHECKED.items():
        for library, releases in libraries.items():
            found = ".".join(metadata.version(library).split(".")[:2])
            assert found in releases, f"compare {engine} with {library} {found}, then add it to versions.py"


def test_an_optimizer_that_no_table_knows_is_not_guessed() -> None:
    facts = tiny_facts()
    mine = evolve(facts, optimizer=tiny_optimizer(facts.model, name="Muon", module="my.optim"))
    made = predict(make(Config(), mine))
    assert made.not_predicted == ("optimizer state: my.optim.Muon is not in the tables",)
    assert not made.fullest.category("optimizer state")
    assert state_formula(OptimizerInputs(name="AdamW", module="my.torch.optim", groups=())) is None
    assert "LBFGS" not in TORCH


def test_units_that_train_nothing_make_the_gathers_a_bound() -> None:
    frozen = tuple(param.name for param in tiny_model().params if param.name.startswith("layers.0"))
    cfg = Config(engine=FSDP2())
    labels = {
        predict(make(cfg, tiny_facts(tiny_model(frozen=some), world=4))).traffic[0].label for some in (frozen, ())
    }
    assert labels == {Label.BOUNDED, Label.EXACT}


def test_the_floor_counts_what_meets_and_the_total_counts_all() -> None:
    made = predict(fsdp2("8B", 64, Config(engine=FSDP2(), precision=BF16(), optimizer=AdamW())))
    one = made.fullest
    kept = one.category("parameters") + one.category("optimizer state", "device") + one.category("module buffers")
    assert one.floor() == kept + max(one.category("gradients"), one.category("gathered units"))
    assert one.floor() < one.total()


# --- what choices cost, in words -----------------------------------------------------------------------------------


def test_one_unit_accumulation_offload_and_the_second_copy_of_gradients_are_said() -> None:
    facts = tiny_facts(world=4, optimizer=False)
    facts = evolve(facts, env=evolve(facts.env, device="cuda", per_node=4))
    one_unit = predict(make(Config(engine=FSDP2(wrap=WrapRoot()), optimizer=AdamW()), facts))
    assert said(one_unit, "There is one unit")
    kept = predict(make(Config(engine=FSDP2(), accumulation=3, optimizer=AdamW()), facts))
    whole = sum(param.numel * 4 for param in facts.model.params)
    assert only(kept, "whole gradients").bytes == whole
    assert said(kept, "Accumulation over 3 micro-batches")
    each = predict(make(Config(engine=FSDP2(), accumulation=3, average_each=True, optimizer=AdamW()), facts))
    assert said(each, "Accumulation over") == ""
    assert each.fullest.total() == kept.fullest.total() - whole
    assert reduced(each) == 3 * reduced(kept) > 0
    copies = Config(engine=DDP(), accumulation=3, optimizer=AdamW())
    assert reduced(predict(make(evolve(copies, average_each=True), facts))) == 3 * reduced(predict(make(copies, facts)))
    flat = Config(engine=FSDP1(), accumulation=3, optimizer=AdamW())
    last, every = (predict(make(evolve(flat, average_each=each), facts)) for each in (False, True))
    assert reduced(every) == 3 * reduced(last) > 0
    assert every.fullest.total() < last.fullest.total()
    away = predict(make(Config(engine=FSDP2(offload=OffloadToCPU()), optimizer=AdamW()), facts))
    assert said(away, "Host memory").endswith("a node of 4 ranks.")
    assert not away.fullest.category("parameters", "device")
    assert away.copied > 0
    twice = predict(make(Config(engine=DDP(gradient_as_bucket_view=False), optimizer=AdamW()), facts))
    assert twice.notes[0].startswith("gradient_as_bucket_view=False (torch's own default) keeps gradients twice")
    once = predict(make(Config(engine=DDP(), optimizer=AdamW()), facts))
    assert twice.fullest.total() - once.fullest.total() == whole


def test_a_job_can_be_given_another_mesh_without_the_model() -> None:
    plan = fsdp2("8B", 64)
    other = fsdp2("8B", 64, Config(engine=FSDP2(), optimizer=AdamW(), mesh=Mesh(replicate=8)))
    assert predict_inputs(FSDP2, evolve(inputs_of(plan), mesh=other.mesh)) == predict(other)


def test_a_page_says_how_much_goes_between_nodes() -> None:
    made = make(Config(engine=DDP()), tiny_facts(world=4))
    for per_node, share in ((2, ", all of it between nodes"), (4, ""), (None, "")):
        env = evolve(made.facts.env, per_node=per_node)
        made = evolve(made, facts=evolve(made.facts, env=env))
        [line] = [line for line in memory_lines(made) if line.startswith("traffic")]
        assert line.endswith(f" sent{share}")
