"""Audit rules as a table: each message is the one that was read and agreed to, on facts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from prepkit.codec import from_data, to_data
from prepkit.facts.copies import AverageFacts, RoundedAway, StandsStill, StaysIn
from prepkit.facts.inputs import InputFacts, LostSetting, PaddingRead, Rewritten, WrappedAround
from prepkit.facts.libraries import LibraryFacts
from prepkit.facts.loop import LoopFacts
from prepkit.facts.loops import ByPass, LessonFacts, ShareFacts, TurnFacts
from prepkit.facts.phases import EvaluationFacts, LeftBehind, OtherMoments, OtherSamples, PhaseFacts, WorstKept
from prepkit.facts.run import (
    AdapterFacts,
    AppliedFacts,
    DDPFacts,
    EngineFacts,
    GradientFacts,
    PreparedLoader,
    PreparedOptimizer,
    PreparedParam,
    PreparedScheduler,
    RankFacts,
    RunFacts,
    RunningFacts,
    RunningParam,
    StrangerFacts,
    Unlike,
    Unread,
    WrappedModule,
)
from prepkit.facts.terms import (
    Cancelled,
    ConstantTerm,
    Dropped,
    FlatWay,
    HalfMixed,
    OddBackward,
    OddDivergence,
    Overwritten,
    TermFacts,
)
from prepkit.facts.values import BeginningFacts, Following, LostSums, Permuted, RepeatedDraws, ValueFacts
from prepkit.facts.window import CourseFacts, ForwardFacts, Loaded, Misgiven, SamplesMixed, WindowFacts, WorkersAlike
from prepkit.findings import Finding, Severity
from prepkit.rules import by_id, due
from prepkit.rules.rule import Moment, Need, Rule, findings_of
from prepkit.rules.run import AUDIT_RULES
from prepkit.testing.tiny import tiny_loader, tiny_model
from tests.support.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
MODEL = tiny_model()
NAMES = tuple(param.name for param in MODEL.params)
FINE = RunFacts(
    model=MODEL,
    params=tuple(PreparedParam(name=name, dtype="float32", averaged_by=("ddp",), ranks=2) for name in NAMES),
    optimizers=(PreparedOptimizer(name="AdamW", held=NAMES, rates=(0.1,)),),
    world_size=2,
    backend="cpu:gloo",
)
RANK = RankFacts(rank=0, names="a", model="a", values="a", generator="a", tensor_ranks=(0,))


def with_params(**changes: object) -> RunFacts:
    first, *rest = FINE.params
    return evolve(FINE, params=(evolve(first, **changes), *rest))


def with_optimizer(**changes: object) -> RunFacts:
    return evolve(FINE, optimizers=(evolve(FINE.optimizers[0], **changes),))


def with_ranks(**changes: object) -> RunFacts:
    return evolve(FINE, ranks=(RANK, evolve(RANK, **{"rank": 1, "tensor_ranks": (1,), "generator": "b", **changes})))


RUNNING = RunningFacts(
    params=tuple(RunningParam(name=name, dtype="float32", device="cpu", requires_grad=True) for name in NAMES),
    ties=((NAMES[0], NAMES[1]),),
    hooks=(("", "forward_hooks: DDP.hook"),),
    held=(NAMES,),
    orphans=(0,),
    stateful=(NAMES,),
    rates=(0.1,),
    scheduled=(0.1,),
)


def later(**changed: Any) -> RunFacts:
    """What a look at a later step finds where this has changed since."""
    return evolve(FINE, running=((RUNNING, evolve(RUNNING, **changed)),))


def onwards(then: dict[str, Any], now: dict[str, Any]) -> RunFacts:
    """What two looks find in the course of a run."""
    before = evolve(RUNNING, course=CourseFacts(**then))
    return evolve(FINE, running=((before, evolve(RUNNING, course=CourseFacts(**now))),))


def switched(**now: Any) -> RunFacts:
    """The first parameter was frozen since, or unfrozen where it would not be served."""
    trains = "served" in now
    before = evolve(RUNNING, params=(evolve(RUNNING.params[0], requires_grad=not trains), *RUNNING.params[1:]))
    after = evolve(RUNNING, params=(evolve(RUNNING.params[0], requires_grad=trains, **now), *RUNNING.params[1:]))
    return evolve(FINE, running=((before, after),))


def began(**begun: Any) -> RunFacts:
    return evolve(FINE, window=WindowFacts(beginnings=BeginningFacts(**begun)))


def shared(**found: Any) -> RunFacts:
    return evolve(FINE, window=WindowFacts(shares=ShareFacts(**found)))


def missed(**found: Any) -> RunFacts:
    return evolve(FINE, window=WindowFacts(lessons=LessonFacts(**found)))


def told(**found: Any) -> RunFacts:
    """Facts with this of what libraries were asked for."""
    return evolve(FINE, window=WindowFacts(libraries=LibraryFacts(**found)))


def asked(**found: Any) -> RunFacts:
    """Facts with this of a model that was asked what it makes of its batch."""
    return evolve(FINE, window=WindowFacts(forwards=(ForwardFacts(model="Net", **found),)))


def computed(**found: Any) -> RunFacts:
    """Facts with this of what a program computes on the way."""
    return evolve(FINE, window=WindowFacts(values=ValueFacts(**found)))


def evaluated(**found: Any) -> RunFacts:
    """Facts with this of what a program makes of its evaluations."""
    return evolve(FINE, window=WindowFacts(phases=PhaseFacts(evaluations=EvaluationFacts(**found))))


def handed(**found: Any) -> RunFacts:
    """Facts with this of what a program hands to its layers and losses."""
    return evolve(FINE, window=WindowFacts(inputs=InputFacts(**found)))


OTHER_MOMENTS = OtherMoments(optimizer="Adam", line="train.py:31", step=9, weights=4, key="exp_avg")
OTHER_SAMPLES = OtherSamples(line="train.py:31", step=9, trained=3, passed=3, others=True)
LEFT = LeftBehind(model="Net", name="body.0", count=3, line="train.py:31")
SCRAMBLED = Permuted(line="train.py:9", function="view", before=(2, 8, 6, 5), after=(2, 5, 48), order=(0, 3, 1, 2))
BROKEN: dict[str, RunFacts] = {
    "run.clipped-nothing": told(clipped_past="train.py:31"),
    "run.engine-gated": told(gated=("train.py:31", 16, 4)),
    "run.autocast-unused": told(uncast="bf16"),
    "run.adapters-frozen": told(frozen_adapters=("Classifier.body",)),
    "run.trainer-undivided": told(undivided=("forward", "train.py:31", 8)),
    "run.column-dropped": told(dropped=(("train.py:31", "weight"),)),
    "run.moved-apart": told(moved_apart=(("data.py:31", "image", "mask"),)),
    "run.autocast-stale": told(stale_casts=("train.py:9",)),
    "run.pixels-raw": told(raw_pixels=(("Net.enter", 255.0),)),
    "run.view-permutes": computed(permuted=(SCRAMBLED, evolve(SCRAMBLED, before=(4, 3), after=(3, 4), order=(1, 0)))),
    "run.sums-lost": computed(
        lost_sums=(
            LostSums(line="net.py:9", said="out[dst] += h", repeats=14, instead="out.index_add_(0, dst, h)"),
            LostSums(line="net.py:12", said="links[i, j] += w", repeats=3),
        )
    ),
    "run.written-away": computed(
        written_away=(
            ("data.py:69", "boxes[at, row][:, :2]", "boxes[at, row]"),
            ("data.py:71", "boxes[kept][0]", "boxes[kept]"),
        ),
        unkept=(("train.py:36", ("decoder.weight",)),),
    ),
    "run.cast-to-nothing": computed(emptied=(("train.py:9", "long"),)),
    "run.orphans": with_optimizer(held=NAMES[1:], orphans=((4, 4),)),
    "run.missed": with_optimizer(held=NAMES[1:]),
    "run.state-lost": with_optimizer(lost=3),
    "run.decays-nothing": with_optimizer(idle_decay=0.1),
    "run.rate-zero": with_optimizer(rates=(0.0, 0.0)),
    "run.stepped-twice": evolve(FINE, optimizers=(*FINE.optimizers, PreparedOptimizer(name="SGD", held=NAMES[:1]))),
    "run.no-master-weights": with_params(dtype="float16"),
    "run.nan": evolve(FINE, nan=NAMES[:1]),
    "run.left-on-meta": with_params(device="meta"),
    "run.forward-elsewhere": evolve(FINE, elsewhere=("layers.0",)),
    "run.eval-mode": evolve(FINE, training=False, dropout=("drop",)),
    "run.part-in-eval": evolve(FINE, evaluating=("layers.0",), dropout=("layers.0.drop",)),
    "run.wrapped-twice": evolve(FINE, wrapped=(WrappedModule(path="", wrappers=("ddp", "ddp")),)),
    "run.checkpointed-whole": evolve(FINE, wrapped=(WrappedModule(path="", wrappers=("checkpointed",)),)),
    "run.checkpoint-outside": evolve(FINE, wrapped=(WrappedModule(path="a", wrappers=("checkpointed", "fsdp1")),)),
    "run.not-averaged": with_params(averaged_by=(), ranks=1),
    "run.averaged-over-part": with_params(averaged_by=("fsdp2",), ranks=1),
    "run.ddp-frozen": evolve(FINE, ddp=(DDPFacts(path="", reduced=4, known=3, waits=True, frozen=NAMES[:1]),)),
    "run.backend": with_params(device="cuda"),
    "run.ranks-models": with_ranks(model="b"),
    "run.ranks-optimizers": evolve(FINE, unlike=(Unlike(name="lr of group 0", held="0.1 on rank 0, 0.2 on rank 1"),)),
    "run.ranks-values": evolve(FINE, parted=NAMES[:2]),
    "run.overwritten-ranks": evolve(FINE, applied=AppliedFacts(overwritten=(1, 2))),
    "run.saves-shards": evolve(FINE, saves_shards=("train.py:87: model.save_pretrained(...)",)),
    "run.masters-apart": evolve(FINE, masters_apart=NAMES[:2]),
    "run.mixes-empty": evolve(FINE, mixes_empty=("train.py:87: old.data.mul_(0.5).add_(new.data, alpha=0.5)",)),
    "run.ranks-passes": evolve(FINE, loop=LoopFacts(window=2, passes=(0, 1))),
    "run.orders-apart": evolve(FINE, loop=LoopFacts(window=1, orders=(1, 2), own_order=1)),
    "run.order-lost": evolve(FINE, unrepeatable=(0,)),
    "run.buffers-apart": evolve(FINE, buffers_apart=("norm.running_mean", "norm.running_var")),
    "run.loss-not-finite": evolve(FINE, loop=LoopFacts(window=2, loss_finite=False, own_loss_finite=False)),
    "run.not-read": evolve(FINE, loop=LoopFacts(window=1, loaders=1, read=False, divides="given", readers=2)),
    "run.dropout-alike": evolve(with_ranks(generator="a"), dropout=("drop",), drops=1),
    "run.dropout-unlike": evolve(
        FINE,
        ranks=tuple(evolve(RANK, rank=rank, tensor_ranks=(0, 1), generator=str(rank)) for rank in (0, 1)),
        dropout=("drop",),
        drops=1,
    ),
    "run.gradients-waited-for": evolve(
        FINE,
        ddp=(DDPFacts(path="", reduced=2, known=2, waits=True),),
        gradients=GradientFacts(stepped=2, missing=NAMES[:1], awaited=NAMES[:1], parted=NAMES[1:2]),
    ),
    "run.gradients-on-some-ranks": evolve(FINE, gradients=GradientFacts(stepped=2, on_some_ranks=NAMES[:1])),
    "run.gradients-stale": evolve(FINE, gradients=GradientFacts(stepped=2, stale=NAMES[:1])),
    "run.gradients-misplaced": evolve(FINE, gradients=GradientFacts(stepped=2, misplaced=NAMES[:1])),
    "run.steps-nothing": evolve(FINE, gradients=GradientFacts(stepped=2, missing=NAMES[:2])),
    "run.gradients-part": evolve(with_ranks(), gradients=GradientFacts(stepped=2, compared=NAMES, parted=NAMES[:1])),
    "run.gradients-not-finite": evolve(FINE, gradients=GradientFacts(stepped=2, spoiled=NAMES[:1])),
    "run.without-gradient": evolve(FINE, gradients=GradientFacts(stepped=2, missing=NAMES[:1])),
    "run.unread-samples": evolve(FINE, loaders=(PreparedLoader(seen=tiny_loader(), division="sampler", replicas=4),)),
    "run.unread-setting": evolve(
        FINE, unread=(Unread(where="model.blocks", name="requires_grad", meant="requires_grad_(False)"),)
    ),
    "run.hidden-module": evolve(FINE, hidden=("layers[0]",)),
    "run.gradients-off": evolve(FINE, gradients_on=False),
    "run.no-group": evolve(FINE, launched=2, world_size=1),
    "run.raw-optimizer": evolve(FINE, inside_window=True, accumulation=4),
    "run.unused-window": evolve(FINE, unused_window=True, accumulation=4),
    "run.checkpoint-forgets": evolve(FINE, forgetful=("layers.0",)),
    "run.softmax-twice": evolve(FINE, softmax="1"),
    "run.adapters-off": evolve(FINE, adapters=AdapterFacts(off=("q_proj",))),
    "run.adapters-zero": evolve(FINE, adapters=AdapterFacts(zero=("q_proj",))),
    "run.adapters-base": evolve(FINE, adapters=AdapterFacts(base=("q_proj",))),
    "run.head-frozen": evolve(FINE, adapters=AdapterFacts(heads=("score",))),
    "run.frozen-drops": evolve(FINE, frozen_drops=("teacher",)),
    "run.frozen-norms": evolve(FINE, frozen_norms=("body",)),
    "run.checkpoint-norms": evolve(FINE, renormalised=("0",)),
    "run.ticked-early": evolve(
        with_optimizer(fresh=True),
        scheduler=PreparedScheduler(name="StepLR", drives_optimizer=True, early=2),
    ),
    "run.divided-twice": evolve(
        FINE,
        loaders=(PreparedLoader(seen=tiny_loader(), division="sampler", replicas=2, parts=4),),
    ),
    "run.shares-overlap": evolve(
        with_ranks(),
        loaders=(PreparedLoader(seen=tiny_loader()),),
        ranks=tuple(
            evolve(rank, loaders=((1, 0, "", "ab"[rank.rank]),), picks=(("a", (0, 3 + rank.rank)),))
            for rank in with_ranks().ranks
        ),
    ),
    "run.samples-apart": evolve(
        with_ranks(),
        loaders=(PreparedLoader(seen=tiny_loader(), division="sampler", replicas=2),),
        ranks=tuple(
            evolve(
                rank,
                loaders=((2, rank.rank, "sampler", ""),),
                held_data=((("", "ab"[rank.rank]), ("Maps.mean", "cd"[rank.rank])),),
            )
            for rank in with_ranks().ranks
        ),
    ),
    "run.samples-odd": evolve(
        FINE, loaders=(PreparedLoader(seen=tiny_loader(), division="sampler", replicas=2, sample="shifted"),)
    ),
    "run.text-odd": evolve(FINE, window=WindowFacts(text="counted")),
    "run.in-order": evolve(
        FINE,
        loaders=(PreparedLoader(seen=evolve(tiny_loader(), sampler="sequential"), division="dataset", replicas=2),),
    ),
    "run.maybe-averaged": evolve(with_params(averaged_by=(), ranks=1), averages_by_hand="average (train.py:3)"),
    "run.left-out": evolve(
        FINE,
        ddp=(DDPFacts(path="", reduced=2, known=2),),
        gradients=GradientFacts(stepped=2, missing=NAMES[:1]),
    ),
    "run.samples-unknown": evolve(
        FINE,
        ranks=tuple(evolve(RANK, rank=rank, tensor_ranks=(rank,), reads=(("", ""),)) for rank in (0, 1)),
        loaders=(PreparedLoader(seen=evolve(tiny_loader(), sampler="custom")),),
    ),
    "run.same-batch": evolve(
        FINE,
        averages_by_hand="train (train.py:31)",
        ranks=tuple(evolve(RANK, rank=rank, tensor_ranks=(rank,)) for rank in (0, 1)),
        window=WindowFacts(given=("a", "a")),
    ),
    "run.same-samples": evolve(FINE, loaders=(PreparedLoader(seen=tiny_loader()),)),
    "run.tensor-samples": evolve(
        FINE,
        loaders=(PreparedLoader(seen=tiny_loader(), division="sampler", replicas=2),),
        ranks=tuple(
            evolve(RANK, rank=rank, tensor_ranks=(0, 1), loaders=((2, rank, "sampler", "a"),)) for rank in (0, 1)
        ),
    ),
    "run.scheduler-elsewhere": evolve(
        FINE, scheduler=PreparedScheduler(name="CosineAnnealingLR", drives_optimizer=False)
    ),
    "run.two-schedulers": evolve(
        FINE,
        engine=EngineFacts(stage=1, micro_batch=4, accumulation=1, scheduler="WarmupLR"),
        optimizers=(evolve(FINE.optimizers[0], engine=True),),
        scheduler=PreparedScheduler(name="CosineAnnealingLR", drives_optimizer=True),
    ),
    "run.past-engine": evolve(FINE, engine=EngineFacts(stage=1, micro_batch=4, accumulation=1)),
    "run.replaced": evolve(FINE, stranger=StrangerFacts(name="Muon", replaced=NAMES[:1])),
    "run.unknown-optimizer": evolve(
        FINE, stranger=StrangerFacts(name="Muon", shared=NAMES[:1], averaged_elsewhere=True)
    ),
    "run.inside-window": evolve(FINE, stranger=StrangerFacts(name="SGD", shared=NAMES[:1], planned=False, window=2)),
    "run.unsaved-optimizer": evolve(FINE, stranger=StrangerFacts(name="SGD", shared=NAMES[:1])),
    "run.whole-state": evolve(FINE, whole_state=2),
    "run.whole-weights": evolve(FINE, whole_weights=NAMES[:1]),
    "run.drift-params": later(params=(evolve(RUNNING.params[0], device="cuda"), *RUNNING.params[1:])),
    "run.cast": later(params=(evolve(RUNNING.params[0], dtype="float16"), *RUNNING.params[1:])),
    "run.overwritten": evolve(FINE, overwritten=True),
    "run.unfrozen": switched(served=False),
    "run.frozen": switched(stuck=True),
    "run.written-in-forward": evolve(FINE, loop=LoopFacts(window=1, written=NAMES[:1], gathers="FSDP2")),
    "run.drift-trained": later(params=(evolve(RUNNING.params[0], requires_grad=False), *RUNNING.params[1:])),
    "run.tie-broken": later(ties=()),
    "run.stepped-again": evolve(FINE, restepped="AdamW"),
    "run.drift-hooks": later(hooks=()),
    "run.drift-rate": later(rates=(0.5,)),
    "run.averaging-off": later(course=CourseFacts(unaveraged=("",))),
    "run.drift-zeroed": later(course=CourseFacts(zeroed=NAMES[:1])),
    "run.drift-counts": onwards({"counts": (7,)}, {"counts": (1,)}),
    "run.drift-mode": later(course=CourseFacts(resting=("drop",))),
    "run.drift-options": later(course=CourseFacts(altered=(("param_groups[0].eps", "1e-08", "0.1"),))),
    "run.drift-still": onwards({"rate": 0.0, "steps": 9}, {"rate": 0.0, "moved": False, "steps": 12}),
    "run.left-over": later(course=CourseFacts(left=NAMES[:1])),
    "run.drift-unstepped": later(course=CourseFacts(unstepped=40)),
    "run.drift-ticks": onwards({"ticked": 9, "horizon": 10, "steps": 9}, {"ticked": 13, "horizon": 10, "steps": 11}),
    "run.drift-epoch": later(course=CourseFacts(repeated=("of 32 samples, at epoch 0",))),
    "run.scaled-stepped": evolve(FINE, window=WindowFacts(scaled=True)),
    "run.clipped-scaled": evolve(FINE, window=WindowFacts(scaled=True, scaler_steps=True, clipped_scaled=True)),
    "run.loaded-nothing": evolve(
        FINE, window=WindowFacts(loaded=(Loaded(model="Net", given=9, key="module.head.bias", near="head.bias"),))
    ),
    "run.average-idle": evolve(FINE, window=WindowFacts(mixed=(("train.py:9", "average", "model"),))),
    "run.workers-alike": evolve(
        FINE, window=WindowFacts(workers=(WorkersAlike(loader="Rows", workers=4, what="give the same samples"),))
    ),
    "run.float16-unscaled": evolve(FINE, window=WindowFacts(float16=("Net",))),
    "run.undivided": evolve(FINE, accumulation=4, window=WindowFacts(undivided=True)),
    "run.samples-mix": asked(
        mixed=SamplesMixed(path="layer.attention", kind="MultiheadAttention", batch=8, time_first=True)
    ),
    "run.sees-ahead": asked(ahead="tokens"),
    "run.shifted": asked(copies="tokens"),
    "run.pads-heeded": asked(padded="tokens"),
    "run.pads-learned": asked(learned="tokens"),
    "run.loss-misgiven": evolve(
        FINE, window=WindowFacts(misgiven=(Misgiven(loss="kl_div", what="values above 0", fix="Give it logarithms."),))
    ),
    "run.loss-bounded": evolve(
        FINE,
        window=WindowFacts(
            misgiven=(Misgiven(loss="mse_loss", what="targets from 3 to 7", fix="Scale them.", kind="bounded"),)
        ),
    ),
    "run.rests-apart": evolve(FINE, window=WindowFacts(rests_apart=("Teacher",))),
    "run.target-trains": evolve(
        FINE, window=WindowFacts(terms=TermFacts(targets=("train.py:31",)), advantages=("train.py:40",))
    ),
    "run.drawn-without-graph": evolve(FINE, window=WindowFacts(cut_draws=(("net.py:16", "Normal"),))),
    "run.slope-zero": evolve(
        FINE,
        window=WindowFacts(
            terms=TermFacts(flat=(FlatWay(line="train.py:31", step="round", weights=("0.weight", "0.bias")),))
        ),
    ),
    "run.backward-other": evolve(
        FINE,
        window=WindowFacts(
            terms=TermFacts(
                backwards=(
                    OddBackward(line="train.py:31", name="Swish", argument="x", ratio=None),
                    OddBackward(line="train.py:33", name="Scores", argument="weight", ratio=0.0625),
                )
            )
        ),
    ),
    "run.masked-chosen": evolve(FINE, window=WindowFacts(terms=TermFacts(masked=(("train.py:31", (32,)),)))),
    "run.straight-through": evolve(FINE, window=WindowFacts(terms=TermFacts(undone=(("train.py:31", (8, 4)),)))),
    "run.term-cancels": evolve(
        FINE,
        window=WindowFacts(
            terms=TermFacts(cancelled=(Cancelled(line="train.py:31", of="difference", shape=(64,), terms=2),))
        ),
    ),
    "run.term-constant": evolve(
        FINE,
        window=WindowFacts(
            terms=TermFacts(constants=(ConstantTerm(line="train.py:29", name="penalty", made=".data"),))
        ),
    ),
    "run.divergence-negative": evolve(
        FINE,
        window=WindowFacts(
            terms=TermFacts(
                divergences=(
                    OddDivergence(line="train.py:30", name="kl", value=-0.31),
                    OddDivergence(line="train.py:31", name="kld", value=0.31, subtracted=True),
                )
            )
        ),
    ),
    "run.result-dropped": evolve(
        FINE,
        window=WindowFacts(
            terms=TermFacts(
                dropped=(
                    Dropped(line="train.py:20", name="logdet", shape=(128,)),
                    Dropped(line="train.py:21", name="fast", shape=(), weights=4),
                )
            )
        ),
    ),
    "run.term-overwritten": evolve(
        FINE,
        window=WindowFacts(
            terms=TermFacts(
                overwritten=(
                    Overwritten(
                        line="train.py:20",
                        model="Flow",
                        kind="Coupling",
                        method="forward",
                        name="x, logdet",
                        before=("layers.0", "layers.1"),
                        last="layers.2",
                        shape=(128,),
                    ),
                )
            )
        ),
    ),
    "run.mixed-half": evolve(
        FINE,
        window=WindowFacts(
            terms=TermFacts(half_mixed=(HalfMixed(line="train.py:12", name="x", labels="ya", left="yb"),))
        ),
    ),
    "run.storage-shared": evolve(FINE, window=WindowFacts(overlapping=(("dec.weight", "enc.weight"),))),
    "run.average-follows": evolve(
        FINE, window=WindowFacts(following=(Following(name="0.weight", part=0.999), Following(name="", part=0.9)))
    ),
    "run.unfrozen-unheld": evolve(FINE, window=WindowFacts(phases=PhaseFacts(unheld=(LEFT,)))),
    "run.adapter-idle": evolve(FINE, window=WindowFacts(phases=PhaseFacts(idle=(LEFT,)))),
    "run.merged-trained": evolve(FINE, window=WindowFacts(phases=PhaseFacts(merged=(LEFT,)))),
    "run.resumed-state": evolve(FINE, window=WindowFacts(phases=PhaseFacts(moments=(OTHER_MOMENTS,)))),
    "run.resumed-samples": evolve(FINE, window=WindowFacts(phases=PhaseFacts(samples=(OTHER_SAMPLES,)))),
    "run.evaluated-training": evaluated(training=(("train.py:9", "Net", "drops elements"),)),
    "run.worst-kept": evaluated(
        worst=(
            WorstKept(line="train.py:9", who="val_acc < best", measure="val_acc", lower=False),
            WorstKept(line="train.py:9", who="val_acc > best", measure="val_acc", lower=False, never="1000.0"),
            WorstKept(line="train.py:9", who="loss > best", measure="loss", lower=True),
        )
    ),
    "run.refitted": evaluated(refitted=(("train.py:9", "scaler.fit_transform(x_test)"),)),
    "run.average-buffers": evolve(
        FINE,
        window=WindowFacts(averages=AverageFacts(still=(StandsStill(line="train.py:9", model="Net", norms=3),))),
    ),
    "run.average-rounds": evolve(
        FINE,
        window=WindowFacts(
            averages=AverageFacts(rounded=(RoundedAway(line="train.py:9", dtype="bfloat16", share=0.4),))
        ),
    ),
    "run.average-often": evolve(FINE, window=WindowFacts(averages=AverageFacts(often=(("0.weight", 4), ("", 2))))),
    "run.average-stays": evolve(
        FINE, window=WindowFacts(averages=AverageFacts(stays=(StaysIn(line="train.py:9", model="Net"),)))
    ),
    "run.average-itself": evolve(FINE, window=WindowFacts(averages=AverageFacts(itself=("train.py:9",)))),
    "run.targets-alike": evolve(
        FINE,
        window=WindowFacts(
            misgiven=(Misgiven(loss="cross_entropy", what="20 targets that are all 3", fix="Shuffle.", kind="alike"),)
        ),
    ),
    "run.units-alike": began(alike=(("0.weight", 16), ("2.weight", 16))),
    "run.norm-momentum": began(keeps=(("1", 0.99), ("5", 0.99))),
    "run.layer-repeated": began(repeated=(("blocks", "Block", 4, "train.py:9"),)),
    "run.state-carried": evolve(FINE, window=WindowFacts(carried=(("LSTM", "train.py:9", "RandomSampler"),))),
    "run.parts-overlap": evolve(
        FINE, window=WindowFacts(overlap=(240, 60, 53), phases=PhaseFacts(parted="train.py:9"))
    ),
    "run.reseeded": evolve(
        FINE,
        loaders=(PreparedLoader(seen=tiny_loader(), division="sampler", replicas=2, reseeds=("torch.manual_seed",)),),
    ),
    "run.weights-misfit": evolve(
        FINE,
        loaders=(PreparedLoader(seen=evolve(tiny_loader(), length=64), division="sampler", replicas=2, weights=5),),
    ),
    "run.samples-placed": asked(placed=True),
    "run.padding-read": handed(
        padding=(PaddingRead(line="train.py:9", row=0, samples=14, batch=64, said="its mask has them read"),)
    ),
    "run.order-read": handed(ordered=(("train.py:9", "logcumsumexp", "RandomSampler"),)),
    "run.noise-uniform": handed(uniform=("train.py:12",)),
    "run.noise-other": handed(noises=(("train.py:12", "train.py:7"),)),
    "run.time-other": handed(times=(("train.py:12", "train.py:7"),)),
    "run.transform-shared": handed(
        lost=(LostSetting(line="train.py:9", name="transform", kind="Shapes", other="train.py:10"),)
    ),
    "run.samples-rewritten": handed(rewritten=(Rewritten(line="train.py:9", holder="Noisy.x"),)),
    "run.fields-mispaired": handed(mispaired=(("pads", "0", "1"),)),
    "run.rows-alike": handed(alike=(("train.py:9", "Net", 64),)),
    "run.integers-wrapped": handed(wrapped=(WrappedAround(line="train.py:9", dtype="int16", past=37, numbers=400),)),
    "run.reseeded-steps": computed(
        reseeded=(("train.py:31", 1234),), repeated=(RepeatedDraws(line="train.py:65", seed=42, every=8),)
    ),
    "run.classes-blended": computed(blended=("train.py:31",)),
    "run.none-given": computed(
        none_given=(
            ("train.py:9", "modules_to_save", "names.append('score')"),
            ("train.py:12", "", "names.sort()"),
        )
    ),
    "run.result-unused": computed(unused=(("train.py:12", "data.shuffle(seed=0)"),)),
    "run.order-ranked": computed(ranked=(("train.py:31", "place", "train.py:30"),)),
    "run.mask-inverted": computed(inverted=("train.py:9",)),
    "run.not-called": computed(not_called=(("train.py:31", "model.eval"),)),
    "run.views-apart": asked(views_apart=128),
    "run.target-given": asked(holds="x[:, 23]", shown="x[:, 24:29]"),
    "run.drops-evaluating": asked(drops=("dropout (train.py:31)",)),
    "run.backward-wasted": evolve(FINE, window=WindowFacts(wasted=(("train.py:31", 3),))),
    "run.optimizer-anew": evolve(FINE, window=WindowFacts(anew=("Adam", "train.py:31"))),
    "run.module-unheld": evolve(
        FINE, window=WindowFacts(unheld=(("Weighed", 2),), phases=PhaseFacts(loose=("Weights.logs",)))
    ),
    "run.ratio-one": evolve(FINE, window=WindowFacts(ratios=("train.py:31",))),
    "run.best-aliased": evolve(FINE, window=WindowFacts(kept_alive=(("train.py:31", "model"),))),
    "run.loaded-overwritten": evolve(FINE, window=WindowFacts(overwritten=(("Net", "train.py:9"),))),
    "run.resumed-part": evolve(FINE, window=WindowFacts(unresumed=(("optimizer", "AdamW"),))),
    "run.loaded-itself": evolve(FINE, window=WindowFacts(loaded_itself=(("Net", "train.py:31"),))),
    "run.calls-alike": evolve(FINE, window=WindowFacts(alike=(("Net", "train.py:31"),))),
    "run.rate-squared": evolve(
        FINE, scheduler=PreparedScheduler(name="LambdaLR", drives_optimizer=True, factor=(1e-3, 1e-3))
    ),
    "run.others-gradients": evolve(
        FINE, window=WindowFacts(stale=(("train.py:31", "train.py:32"), ("train.py:9", "")))
    ),
    "run.cut-otherwise": evolve(FINE, window=WindowFacts(cut_otherwise=(("train.py:9", "Block", 0.22),))),
    "run.parts-alike": evolve(FINE, window=WindowFacts(parts_alike=(("mix.weight", (0, 1)),))),
    "run.compiled-idle": evolve(FINE, window=WindowFacts(idle=("Net",))),
    "run.recompiled": later(recompiled=(("forward", 8),)),
    "run.trainer-schedule": evolve(
        FINE,
        scheduler=PreparedScheduler(name="OneCycleLR", drives_optimizer=True, horizon=24),
        window=WindowFacts(trainer="the Trainer", steps=24, ticks=3),
    ),
    "run.loss-divided": shared(twice=("train.py:31", "accelerate", 4)),
    "run.clipped-between": shared(clipped_between=("train.py:33",)),
    "run.clipped-late": shared(clipped_late=("train.py:32", "train.py:31")),
    "run.gathered-apart": shared(gathered=(("train.py:18", 2),)),
    "run.pairs-misplaced": shared(misplaced=(("train.py:40", 0, 32),)),
    "run.unwaited": shared(unwaited=(("train.py:30", "all_reduce"),)),
    "run.loss-kept": shared(kept=(("total", "train.py", 6),)),
    "run.skip-kept": missed(skips=(("train.py:31", "active", 7),)),
    "run.new-tokens-frozen": missed(new_tokens=(("train.py:21", 2, 32000, 32001),)),
    "run.judged-alike": missed(judged_alike=(("train.py:42", "Generator", "Discriminator"),)),
    "run.schedule-idle": evolve(FINE, window=WindowFacts(turns=TurnFacts(idle=("CosineAnnealingLR", "train.py:12")))),
    "run.ticked-by-pass": evolve(
        FINE,
        window=WindowFacts(
            turns=TurnFacts(by_pass=ByPass(scheduler="LambdaLR", line="train.py:24", ticks=80, passes=4))
        ),
    ),
}


OTHERWISE: dict[str, RunFacts] = {
    "run.mixes-empty": evolve(
        told(begun_empty=(("zeros_", "train.py:12"),)), writes_lost=("train.py:9: weight.mul_(0.5)",)
    ),
    "run.others-gradients": evolve(FINE, window=WindowFacts(asked=("train.py:45", 4))),
    "run.tie-broken": evolve(
        FINE,
        window=WindowFacts(
            tied_over=(("table", "head.weight", 1),),
            untied=(("embed.weight", "head.weight", "load_state_dict(assign=True)"),),
        ),
    ),
    "run.forward-elsewhere": evolve(FINE, window=WindowFacts(elsewhere=("Net",))),
    "run.ticked-early": evolve(
        FINE,
        optimizers=tuple(evolve(one, counted=40) for one in FINE.optimizers),
        scheduler=PreparedScheduler(name="OneCycleLR", drives_optimizer=True, by_batch=True, ticked=0),
        window=WindowFacts(),
    ),
    "run.checkpoint-forgets": evolve(FINE, window=WindowFacts(forgetful=("Block",))),
    "run.checkpoint-norms": evolve(FINE, window=WindowFacts(renormalised=("Block",))),
    "run.stepped-twice": later(course=CourseFacts(twice=NAMES[:1], steppers=("AdamW", "SGD"))),
    "run.average-idle": evolve(FINE, window=WindowFacts(never_updated=("AveragedModel",))),
    "run.loaded-nothing": evolve(
        FINE, window=WindowFacts(loaded=(Loaded(model="Net", given=2, key="model", near="head.bias", inside=True),))
    ),
    "run.no-master-weights": with_params(dtype="bfloat16"),
    "run.missed": later(params=(evolve(RUNNING.params[0], known=False, served=False), *RUNNING.params[1:])),
    "run.orphans": later(held=(NAMES[1:],), orphans=(1,)),
    "run.state-lost": later(stateful=((),)),
    "run.ranks-values": later(parted=NAMES[:1]),
    "run.saves-shards": evolve(FINE, saves_shards=("train.py:88: torch.save(...)",)),
    "run.nan": later(course=CourseFacts(not_finite=NAMES[:1])),
    "run.wrapped-twice": evolve(FINE, wrapped=(WrappedModule(path="", wrappers=("ddp", "fsdp1")),)),
    "run.steps-nothing": evolve(
        FINE, gradients=GradientFacts(stepped=2, zero=True), window=WindowFacts(backwards=1, cleared="train.py:9")
    ),
    "run.reentrant-frozen": evolve(
        FINE,
        gradients=GradientFacts(stepped=2, missing=NAMES[:1], awaited=NAMES[:1]),
        window=WindowFacts(backwards=1, reentrant=(("train.py:9", NAMES[:1]), ("train.py:9", NAMES[:2]))),
    ),
    "run.gradients-part": evolve(
        with_ranks(),
        ddp=(DDPFacts(path="", reduced=2, known=2),),
        gradients=GradientFacts(stepped=2, compared=NAMES, parted=NAMES[:1]),
        window=WindowFacts(taken="train.py:9"),
    ),
    "run.divided-twice": evolve(
        FINE,
        loaders=(PreparedLoader(seen=tiny_loader(), division="sampler", replicas=2),),
        ranks=tuple(
            evolve(
                RANK,
                rank=rank,
                tensor_ranks=(rank,),
                generator="ab"[rank],
                contents=("ab"[rank],),
                loaders=((2, rank, "sampler", ""),),
                picks=(("a", (rank, 2)),),
            )
            for rank in (0, 1)
        ),
    ),
    "run.workers-alike": evolve(
        FINE,
        window=WindowFacts(workers=(WorkersAlike(loader="Rows", workers=4, what="draw", anew="info.dataset.x = 1"),)),
    ),
    "run.text-odd": evolve(FINE, window=WindowFacts(text="learned")),
    "run.same-samples": evolve(FINE, loaders=(PreparedLoader(seen=evolve(tiny_loader(), iterable=True)),)),
    "run.not-read": evolve(FINE, loop=LoopFacts(window=8, loaders=1, apart=4, divides="given", readers=2)),
    "run.maybe-averaged": evolve(
        FINE,
        params=tuple(evolve(param, averaged_by=(), ranks=1) for param in FINE.params),
        gradients=GradientFacts(
            stepped=len(NAMES), compared=(NAMES[0], *NAMES[2:]), parted=NAMES[:1] + NAMES[2:3], divided=NAMES[1:2]
        ),
        window=WindowFacts(communicates="train.py:9", cut=NAMES[:1], averages_weights="train.py:19"),
    ),
}
"""Another way to break what a rule is about."""


def test_facts_with_nothing_wrong_give_no_finding() -> None:
    assert findings_of(AUDIT_RULES, FINE) == ()
    assert findings_of(AUDIT_RULES, with_ranks()) == ()


@pytest.mark.parametrize(("rule", "facts"), [*BROKEN.items(), *OTHERWISE.items()], ids=lambda one: str(one)[:40])
def test_a_rule_says_what_its_facts_break_and_no_other_does(rule: str, facts: RunFacts) -> None:
    assert {finding.rule for finding in findings_of(AUDIT_RULES, facts)} == {rule}


def test_ranks_of_other_names_are_other_stages_where_they_send_activations() -> None:
    stages = tuple(evolve(RANK, rank=rank, names="aabb"[rank], model="aabb"[rank]) for rank in range(4))
    rule = by_id()["run.ranks-models"]
    assert len(findings_of((rule,), evolve(FINE, ranks=stages))) == 1
    sends = evolve(FINE, window=WindowFacts(communicates="train.py:9"))
    assert findings_of((rule,), evolve(sends, ranks=stages)) == ()
    assert len(findings_of((rule,), evolve(sends, ranks=(*stages[:1], evolve(stages[1], model="c"), *stages[2:])))) == 1


def test_what_may_be_cut_by_hand_is_held_by_each_rank_in_values_of_its_own() -> None:
    bare = evolve(FINE, params=tuple(evolve(param, averaged_by=(), ranks=1) for param in FINE.params))
    unlike = with_ranks(state="b", modes="b")
    for rule, broken in (
        ("run.ranks-values", BROKEN["run.ranks-values"]),
        ("run.ranks-state", unlike),
        ("run.ranks-modes", unlike),
    ):
        seen = evolve(broken, params=bare.params)
        assert [one.rule for one in findings_of((by_id()[rule],), seen)] == [rule]
        assert findings_of((by_id()[rule],), evolve(seen, sends_by_hand="f")) == ()
    told = findings_of(AUDIT_RULES, evolve(bare, sends_by_hand="Leaves.forward (train.py:9)"))
    assert [(one.rule, "`Leaves.forward (train.py:9)` may do so" in one.what) for one in told] == [
        ("run.maybe-averaged", True)
    ]
    kept = evolve(BROKEN["run.ranks-values"], sends_by_hand="f")  # somebody averages it
    assert findings_of((by_id()["run.ranks-values"],), kept) != ()


def test_messages_are_those_that_were_agreed_to() -> None:
    text = (
        "\n\n".join(
            str(finding)
            for facts in (*BROKEN.values(), *OTHERWISE.values())
            for finding in findings_of(AUDIT_RULES, facts)
        )
        + "\n"
    )
    assert_golden(GOLDEN, text)


def test_ids_are_of_one_subject_and_fixes_are_sentences() -> None:
    assert len({rule.id for rule in AUDIT_RULES}) == len(AUDIT_RULES)
    for rule in AUDIT_RULES:
        assert rule.id.startswith("run.")
        assert rule.summary.endswith("."), rule.id
        assert rule.fix.endswith("."), rule.id
    assert {rule.severity for rule in AUDIT_RULES} == set(Severity)


def test_a_finding_of_every_severity_is_written_and_read_back() -> None:
    for severity in Severity:
        finding = Finding(rule="run.nan", severity=severity, where="model", what="x", fix="y")
        assert from_data(to_data(finding), Finding, "finding", "python") == finding


@given(
    trained=st.lists(st.booleans(), min_size=len(NAMES), max_size=len(NAMES)),
    held=st.lists(st.booleans(), min_size=len(NAMES), max_size=len(NAMES)),
    orphans=st.integers(0, 3),
)
def test_every_trained_parameter_that_nobody_steps_is_counted_once(
    trained: list[bool], held: list[bool], orphans: int
) -> None:
    params = tuple(evolve(param, requires_grad=yes) for param, yes in zip(FINE.params, trained, strict=True))
    names = tuple(name for name, yes in zip(NAMES, held, strict=True) if yes)
    optimizer = PreparedOptimizer(name="AdamW", held=names, rates=(0.1,), orphans=((2,),) * orphans)
    rules = [finding.rule for finding in findings_of(AUDIT_RULES, evolve(FINE, params=params, optimizers=(optimizer,)))]
    missed = {name for name, yes in zip(NAMES, trained, strict=True) if yes} - set(names)
    assert rules.count("run.orphans") == (bool(missed) and bool(orphans))
    assert rules.count("run.missed") == (bool(missed) and not orphans)
    assert rules.count("run.nothing-trains") == (not any(trained) and not orphans)


@pytest.mark.parametrize(
    ("horizon", "found"),
    [(32, True), (96, True), (48, True), (63, True), (64, False), (24, False), (80, False)],
)
def test_a_schedule_that_accelerate_ticks_twice_a_step_is_early_where_it_ends_inside_a_pass(
    horizon: int, found: bool
) -> None:
    """A pass has 32 steps. Made for two passes it ends with the first, as for whoever counts its ticks."""
    scheduler = PreparedScheduler(name="CosineAnnealingLR", drives_optimizer=True, horizon=horizon, ticks=2)
    loader = PreparedLoader(seen=tiny_loader(), division="sampler", replicas=2, batches=32)
    rules = [finding.rule for finding in findings_of(AUDIT_RULES, evolve(FINE, scheduler=scheduler, loaders=(loader,)))]
    assert ("run.scheduler-early" in rules) is found


GATHERED: dict[Need, tuple[str, ...]] = {
    Need.OPTIMIZERS: ("optimizers", "scheduler", "stranger"),
    Need.STATE: ("whole_state", "whole_weights"),
    Need.VALUES: ("nan", "infinite", "negative", "zeros"),
    Need.LOADERS: ("loaders",),
    Need.RANKS: ("ranks", "parted", "drawn_alike", "unlike", "buffers_apart"),
    Need.GRADIENTS: ("gradients",),
    Need.LOOP: ("loop",),
    Need.BEFORE: ("running", "overwritten"),
}
"""What a look leaves at its default unless it is needed; ``STATE`` is inside of the optimizers."""


def seen_with(facts: RunFacts, needs: tuple[Need, ...]) -> RunFacts:
    """What a look with these needs alone would have seen."""
    left = [name for need, names in GATHERED.items() if need not in needs for name in names]
    kept = evolve(facts, **{name: getattr(RunFacts(), name) for name in left})
    if Need.STATE in needs:
        return kept
    return evolve(kept, optimizers=tuple(evolve(one, lost=0, misfits=(), spoiled=()) for one in kept.optimizers))


@pytest.mark.parametrize("rule", AUDIT_RULES, ids=lambda rule: rule.id)
def test_a_rule_asks_nothing_that_its_needs_have_not_gathered(rule: Rule) -> None:
    for facts in (FINE, *BROKEN.values(), *OTHERWISE.values()):
        assert findings_of((rule,), seen_with(facts, rule.needs)) == findings_of((rule,), facts)


def test_a_rule_without_its_needs_would_be_noticed() -> None:
    orphans = next(rule for rule in AUDIT_RULES if rule.id == "run.orphans")
    assert findings_of((orphans,), seen_with(BROKEN["run.orphans"], ())) == ()


@pytest.mark.parametrize(
    "moment", [Moment.AUDIT, Moment.DRIFT, Moment.DUE, Moment.FIRST_STEP, Moment.STEP, Moment.LOAD, Moment.SAVE]
)
def test_a_look_with_the_needs_of_the_rules_that_are_due_gives_what_a_look_at_everything_gives(moment: Moment) -> None:
    rules = due(moment)
    needs = tuple({need for rule in rules for need in rule.needs})
    for facts in (FINE, *BROKEN.values(), *OTHERWISE.values()):
        assert findings_of(rules, seen_with(facts, needs)) == findings_of(rules, facts)


def test_orders_of_different_passes_are_not_laid_to_the_sampler() -> None:
    rule = by_id()["run.orders-apart"]
    (own,) = findings_of((rule,), evolve(FINE, loop=LoopFacts(window=1, orders=(1, 2))))
    (passes,) = findings_of((rule,), evolve(FINE, loop=LoopFacts(window=1, orders=(1, 2), passes=(0, 1))))
    assert "set_epoch(epoch)" in own.fix
    assert "different passes, 0 to 1" in passes.what
    assert passes.fix == by_id()["run.ranks-passes"].fix
