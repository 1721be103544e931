"""Every formula on a model of a few elements, whose bytes can be counted by hand: what each rank holds and sends."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from prepkit.config import DDP, FSDP1, FSDP2, Config, DeepSpeed, TensorParallel
from prepkit.predict import notes, predict, predict_inputs
from prepkit.predict.deepspeed.bytes import Run, overlaps
from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import OptimizerInputs, StateBytes, steps_on_device
from prepkit.predict.prediction import Label, Prediction, RankClass, Term, Traffic
from prepkit.predict.replicated import optimizer_state
from prepkit.predict.unit_contents import ParamKind, UnitContent, UnitInstance
from prepkit.predict.zero import Zero
from prepkit.steps import Axis, DDPCommHook, WrapDDP
from prepkit.testing.tiny import tiny_facts
from tests.support.plain_inputs import plain_inputs
from tests.support.plans import make

ADAMW = OptimizerInputs(name="AdamW", module="torch.optim", groups=((),))
SGD = OptimizerInputs(name="SGD", module="torch.optim", groups=((("momentum", 0.9),),))
UNKNOWN = OptimizerInputs(name="Mine", module="mine", groups=((),))
WRAPS = WrapDDP(
    device=None, broadcast_buffers=True, bucket_cap_mb=25.0, find_unused_parameters=False,
    gradient_as_bucket_view=True, static_graph=False,
)  # fmt: skip


def kind(*shape: int, trains: bool = True, start: int | None = None, size: int = 4) -> ParamKind:
    """A floating parameter, which the only optimizer group steps unless it is frozen."""
    return ParamKind(shape=shape, size=size, floating=True, trains=trains, group=0 if trains else None, start=start)


def inputs(*units: UnitContent, world: int = 1, **more: Any) -> Inputs:
    """A training of these units on a CPU: the root, then ``a``, ``a.b`` … below each other."""
    paths = ("", "a", "a.b", "a.b.c")
    usual: dict[str, Any] = {
        "engine": "FSDP2",
        "world_size": world,
        "mesh": (Axis(name="shard", size=world),),
        "contents": units,
        "units": tuple(UnitInstance(path, i, reshard=True) for i, path in zip(range(len(units)), paths, strict=False)),
    }
    return plain_inputs(**usual | more)


def holding(*params: ParamKind | tuple[ParamKind, int], full: bool = False) -> UnitContent:
    return UnitContent(tuple(p if isinstance(p, tuple) else (p, 1) for p in params), full)


def axes(**sizes: int) -> tuple[Axis, ...]:
    return tuple(Axis(name=name, size=size) for name, size in sizes.items())  # type: ignore[arg-type]


def held(term: Term) -> str:
    return f"{term.category} {term.bytes} {term.label} {term.place} {term.lifetime}"


def sent(entry: Traffic) -> str:
    group = f"{entry.ranks} {entry.axis} / {entry.stride}"
    return f"{entry.collective} {entry.bytes} {entry.label} in {entry.calls} by {group}"


def ranks(one: RankClass) -> str:
    return f"ranks {one.first} to {one.last}, {one.ranks} in all" + ", empty" * one.empty


def told(made: Prediction) -> list[str]:
    """What every rank holds, what each class of ranks holds besides, and what is sent, in the prediction's order."""
    shared = [term for term in made.classes[0].terms if all(term in one.terms for one in made.classes)]
    rows = [held(term) for term in shared]
    for one in made.classes:
        rows += [ranks(one), *(held(term) for term in one.terms if term not in shared)]
    return rows + [sent(entry) for entry in made.traffic]


def predicted(engine: type, given: Inputs) -> Prediction:
    return predict_inputs(engine, evolve(given, engine=engine.__name__))


MIXED = holding((kind(3, 2), 2), kind(5, trains=False))
FLOAT16 = DDPCommHook(hook="fp16_compress_hook")
ROOT = holding(kind(2, trains=False, start=0), kind(5, start=4), (kind(1), 2))
"""The two of one element are in an ignored module."""
NORM = holding(kind(3, start=0), full=True)
FLAT = holding(kind(2, trains=False, start=0), kind(5, start=2))
THREE = holding(kind(3, 2))
WHOLE = ((kind(), 2), (kind(trains=False), 3))
NESTED = inputs(holding(kind(1)), holding(kind(2)), holding(kind(4)), holding(kind(8)), world=2)
NESTED = evolve(NESTED, units=(NESTED.units[0], *NESTED.units[2:]))


def stage(number: int, device: str = "cpu", times: int = 2, **more: Any) -> Inputs:
    """Two ranks of a ZeRO stage, and a model of 17 elements of two bytes, of which two groups step 12."""
    usual: dict[str, Any] = {
        "ranks": 2, "size": 2, "grad_size": 2, "sent_size": 2, "bfloat16": True, "bucket": 8, "overlaps": False,
        "persistent": 2, "live": 100, "reuse": 100, "sub_group": 100, "module": 7, "groups": ((7, 3), (2,)),
        "numels": ((7, True), (5, False), (3, True), (2, True)), "offload_state": False, "offload_params": False,
    }  # fmt: skip
    numbers = Zero(stage=number, **usual | more)
    return inputs(zero=numbers, world=numbers.ranks, optimizer=ADAMW, accumulation=times, device=device)


REPLICATED: dict[str, tuple[type, Inputs, str]] = {
    "DDP, a part frozen": (
        DDP,
        inputs(MIXED, world=2, mesh=axes(replicate=2), buffers=12, wraps=WRAPS, optimizer=ADAMW),
        """
        parameters 68 exact device always
        module buffers 12 exact device always
        optimizer state 96 exact device always
        optimizer state 8 exact device always
        buckets 48 exact device always
        ranks 0 to 0, 2 in all
        all-reduce 48 exact in 1 by 2 replicate / 1
        broadcast 12 bounded in 1 by 2 replicate / 1
        """,
    ),
    "DDP without a wrapper": (
        DDP,
        inputs(MIXED, world=2, mesh=axes(replicate=2)),
        """
        parameters 68 exact device always
        gradients 48 exact device step
        ranks 0 to 0, 2 in all
        """,
    ),
    "DDP under autocast": (
        DDP,
        inputs(MIXED, world=2, mesh=axes(replicate=2), wraps=WRAPS, autocast_size=2),
        """
        parameters 68 exact device always
        working buffers 24 bounded device pass
        buckets 48 exact device always
        ranks 0 to 0, 2 in all
        all-reduce 48 exact in 1 by 2 replicate / 1
        """,
    ),
    "DDP that sends float16": (
        DDP,
        inputs(MIXED, world=2, mesh=axes(replicate=2), wraps=evolve(WRAPS, hook=FLOAT16)),
        """
        parameters 68 exact device always
        buckets 48 exact device always
        ranks 0 to 0, 2 in all
        all-reduce 24 exact in 1 by 2 replicate / 1
        """,
    ),
    "layers that are cut, a part frozen": (
        TensorParallel,
        inputs(MIXED, world=2, mesh=axes(tensor=2), optimizer=SGD),
        """
        parameters 68 exact device always
        optimizer state 48 exact device always
        gradients 48 exact device step
        ranks 0 to 0, 2 in all
        """,
    ),
}

SHARDED: dict[str, tuple[type, Inputs, str]] = {
    "FSDP1, copies of shards": (
        FSDP1,
        inputs(ROOT, NORM, gathered_size=2, optimizer=ADAMW, world=4, mesh=axes(replicate=2, shard=2)),
        """
        parameters 28 exact device always
        parameters 8 exact device always
        gradients 36 exact device step
        gathered units 20 exact device pass
        gathered units 16 exact device pass
        working buffers 20 bounded device pass
        working buffers 20 bounded device pass
        working buffers 16 bounded device pass
        working buffers 20 bounded device pass
        working buffers 10 bounded device pass
        optimizer state 16 exact device always
        ranks 0 to 0, 2 in all
        optimizer state 40 exact device always
        ranks 1 to 1, 2 in all
        optimizer state 56 exact device always
        all-gather 72 exact in 4 by 2 shard / 1
        reduce-scatter 36 exact in 2 by 2 shard / 1
        all-reduce 18 exact in 2 by 2 replicate / 2
        """,
    ),
    "FSDP1, whole": (
        FSDP1,
        inputs(ROOT, NORM, gathered_size=2, reduced_size=4, optimizer=ADAMW, world=3, mesh=axes(replicate=3)),
        """
        parameters 48 exact device always
        parameters 8 exact device always
        gradients 56 exact device step
        working buffers 18 bounded device pass
        working buffers 12 bounded device pass
        working buffers 36 bounded device pass
        working buffers 18 bounded device pass
        optimizer state 80 exact device always
        optimizer state 16 exact device always
        ranks 0 to 0, 3 in all
        all-reduce 48 exact in 2 by 3 replicate / 1
        """,
    ),
    "FSDP1 without original parameters": (
        FSDP1,
        inputs(FLAT, original=False, optimizer=SGD, world=2),
        """
        parameters 16 exact device always
        gradients 16 exact device step
        gathered units 32 exact device pass
        working buffers 32 bounded device pass
        working buffers 28 bounded device pass
        working buffers 32 bounded device pass
        optimizer state 16 exact device always
        ranks 0 to 0, 1 in all
        ranks 1 to 1, 1 in all
        all-gather 64 exact in 2 by 2 shard / 1
        reduce-scatter 32 exact in 1 by 2 shard / 1
        """,
    ),
    "FSDP1 without original parameters or a known optimizer": (
        FSDP1,
        inputs(FLAT, original=False, optimizer=UNKNOWN, world=2),
        """
        parameters 16 exact device always
        gradients 16 exact device step
        gathered units 32 exact device pass
        working buffers 32 bounded device pass
        working buffers 28 bounded device pass
        working buffers 32 bounded device pass
        ranks 0 to 0, 1 in all
        ranks 1 to 1, 1 in all
        all-gather 64 exact in 2 by 2 shard / 1
        reduce-scatter 32 exact in 1 by 2 shard / 1
        """,
    ),
    "FSDP1, ignored ones on ranks of padding": (
        FSDP1,
        inputs(holding(kind(1, start=0), (kind(1), 2)), optimizer=SGD, world=2),
        """
        parameters 4 exact device always
        parameters 8 exact device always
        gradients 12 exact device step
        gathered units 8 exact device pass
        working buffers 8 bounded device pass
        working buffers 8 bounded device pass
        working buffers 8 bounded device pass
        ranks 0 to 0, 1 in all
        optimizer state 12 exact device always
        ranks 1 to 1, 1 in all
        optimizer state 8 exact device always
        all-gather 16 exact in 2 by 2 shard / 1
        reduce-scatter 8 exact in 1 by 2 shard / 1
        """,
    ),
    "FSDP1 without parameters": (
        FSDP1,
        inputs(optimizer=SGD, world=2),
        """
        parameters 0 exact device always
        ranks 0 to 1, 2 in all, empty
        """,
    ),
    "FSDP2, copies of shards of parts": (
        FSDP2,
        inputs(THREE, whole=WHOLE, optimizer=SGD, world=8, mesh=axes(replicate=2, shard=2, tensor=2)),
        """
        parameters 16 exact device always
        parameters 20 exact device always
        gradients 8 exact device step
        gradients 16 exact device step
        gathered units 32 exact device pass
        working buffers 32 bounded device pass
        working buffers 24 bounded device pass
        working buffers 32 bounded device pass
        working buffers 16 bounded device pass
        ranks 0 to 0, 4 in all
        optimizer state 24 exact device always
        ranks 1 to 1, 4 in all
        optimizer state 16 exact device always
        all-gather 64 exact in 2 by 2 shard / 2
        reduce-scatter 32 exact in 1 by 2 shard / 2
        all-reduce 16 exact in 1 by 2 replicate / 4
        all-reduce 16 exact in 1 by 2 shard / 2
        all-reduce 16 exact in 1 by 2 replicate / 4
        """,
    ),
    "FSDP2, whole ones on shards alone": (
        FSDP2,
        inputs(THREE, whole=WHOLE[:1], world=2),
        """
        parameters 16 exact device always
        parameters 8 exact device always
        gradients 8 exact device step
        gradients 16 exact device step
        gathered units 32 exact device pass
        working buffers 32 bounded device pass
        working buffers 24 bounded device pass
        working buffers 32 bounded device pass
        working buffers 16 bounded device pass
        ranks 0 to 0, 1 in all
        ranks 1 to 1, 1 in all
        all-gather 64 exact in 2 by 2 shard / 1
        reduce-scatter 32 exact in 1 by 2 shard / 1
        all-reduce 16 exact in 1 by 2 shard / 1
        """,
    ),
    "FSDP2, units inside units": (
        FSDP2,
        NESTED,
        """
        parameters 28 exact device always
        gradients 28 exact device step
        gathered units 8 exact device pass
        gathered units 48 exact device pass
        working buffers 32 bounded device pass
        working buffers 4 bounded device pass
        working buffers 32 bounded device pass
        working buffers 32 bounded device pass
        ranks 0 to 0, 1 in all
        ranks 1 to 1, 1 in all
        all-gather 112 exact in 6 by 2 shard / 1
        reduce-scatter 56 exact in 3 by 2 shard / 1
        """,
    ),
    "FSDP2, units inside units, kept": (
        FSDP2,
        evolve(NESTED, units=tuple(evolve(unit, reshard=False) for unit in NESTED.units)),
        """
        parameters 28 exact device always
        gradients 28 exact device step
        gathered units 8 exact device pass
        gathered units 48 exact device pass
        working buffers 32 bounded device pass
        working buffers 4 bounded device pass
        working buffers 32 bounded device pass
        working buffers 32 bounded device pass
        ranks 0 to 0, 1 in all
        ranks 1 to 1, 1 in all
        all-gather 56 exact in 3 by 2 shard / 1
        reduce-scatter 56 exact in 3 by 2 shard / 1
        """,
    ),
}

ZERO: dict[str, tuple[type, Inputs, str]] = {
    "1, gradients in float32, two groups": (
        DeepSpeed,
        stage(1, grad_size=4, sent_size=4),
        """
        parameters 42 exact device always
        master weights 32 exact device always
        optimizer state 64 exact device always
        optimizer state 8 exact device always
        gradients 64 exact device always
        gradients 24 exact device step
        working buffers 64 bounded device step
        ranks 0 to 0, 2 in all
        all-reduce 64 exact in 2 by 2 shard / 1
        all-gather 32 exact in 2 by 2 shard / 1
        """,
    ),
    "1, gradients in float32, one group, sent in 16 bits": (
        DeepSpeed,
        stage(1, grad_size=4, groups=((7, 3, 2),)),
        """
        parameters 34 exact device always
        master weights 24 exact device always
        optimizer state 48 exact device always
        optimizer state 4 exact device always
        gradients 48 exact device always
        gradients 24 exact device step
        working buffers 24 bounded device step
        ranks 0 to 0, 2 in all
        all-reduce 24 exact in 1 by 2 shard / 1
        all-gather 24 exact in 1 by 2 shard / 1
        """,
    ),
    "1, gradients in float32 of float16": (
        DeepSpeed,
        stage(1, grad_size=4, bfloat16=False),
        """
        parameters 42 exact device always
        master weights 32 exact device always
        optimizer state 64 exact device always
        optimizer state 8 exact device always
        working buffers 32 exact device pass
        working buffers 48 bounded device pass
        gradients 48 exact device pass
        working buffers 14 bounded device pass
        gradients 32 exact device step
        ranks 0 to 0, 2 in all
        all-reduce 24 exact in 2 by 2 shard / 1
        all-gather 32 exact in 2 by 2 shard / 1
        """,
    ),
    "2": (
        DeepSpeed,
        stage(2),
        """
        parameters 42 exact device always
        master weights 32 exact device always
        optimizer state 64 exact device always
        optimizer state 8 exact device always
        working buffers 16 exact device pass
        working buffers 16 bounded device pass
        working buffers 14 bounded device pass
        working buffers 48 bounded device step
        ranks 0 to 0, 1 in all
        gradients 18 exact device step
        working buffers 18 exact device pass
        ranks 1 to 1, 1 in all
        gradients 28 exact device step
        working buffers 20 exact device pass
        all-reduce 48 exact in 4 by 2 shard / 1
        all-gather 32 exact in 2 by 2 shard / 1
        """,
    ),
    "2, sent in float32": (
        DeepSpeed,
        stage(2, times=1, sent_size=4),
        """
        parameters 42 exact device always
        master weights 32 exact device always
        optimizer state 64 exact device always
        optimizer state 8 exact device always
        working buffers 16 exact device pass
        working buffers 48 bounded device pass
        working buffers 14 bounded device pass
        working buffers 48 bounded device step
        ranks 0 to 0, 1 in all
        gradients 18 exact device step
        ranks 1 to 1, 1 in all
        gradients 28 exact device step
        all-reduce 48 exact in 2 by 2 shard / 1
        all-gather 32 exact in 2 by 2 shard / 1
        """,
    ),
    "2, offloaded": (
        DeepSpeed,
        stage(2, "cuda", offload_state=True),
        """
        parameters 42 exact device always
        master weights 32 bounded host always
        optimizer state 64 exact host always
        optimizer state 8 exact host always
        working buffers 16 exact device pass
        working buffers 16 bounded device pass
        working buffers 14 bounded device pass
        gradients 32 bounded host always
        buckets 16 bounded host always
        buckets 16 bounded host always
        buckets 14 exact device always
        gradients 32 bounded host always
        ranks 0 to 0, 1 in all
        working buffers 18 bounded device pass
        ranks 1 to 1, 1 in all
        working buffers 20 bounded device pass
        all-reduce 48 exact in 4 by 2 shard / 1
        all-gather 32 exact in 2 by 2 shard / 1
        host copy 32 bounded in 3 by 1 shard / 1
        host copy 16 bounded in 2 by 1 shard / 1
        host copy 72 bounded in 9 by 1 shard / 1
        """,
    ),
    "2, offloaded, of many small parameters": (
        DeepSpeed,
        stage(2, "cuda", offload_state=True, ranks=4, groups=((1,) * 20,) * 2, numels=((1, True),) * 40),
        """
        parameters 96 exact device always
        master weights 64 bounded host always
        optimizer state 96 exact host always
        optimizer state 8 exact host always
        working buffers 16 exact device pass
        working buffers 16 bounded device pass
        working buffers 2 bounded device pass
        gradients 64 bounded host always
        buckets 32 bounded host always
        buckets 2 bounded host always
        buckets 2 exact device always
        ranks 0 to 2, 3 in all
        gradients 32 bounded host always
        working buffers 24 bounded device pass
        ranks 3 to 3, 1 in all
        gradients 8 bounded host always
        working buffers 8 bounded device pass
        all-reduce 160 exact in 10 by 4 shard / 1
        all-gather 96 exact in 2 by 4 shard / 1
        host copy 48 bounded in 40 by 1 shard / 1
        host copy 24 bounded in 2 by 1 shard / 1
        host copy 96 bounded in 120 by 1 shard / 1
        """,
    ),
    "2, offloaded on a CPU": (
        DeepSpeed,
        stage(2, offload_state=True),
        """
        parameters 42 exact device always
        master weights 32 exact device always
        optimizer state 64 exact device always
        optimizer state 8 exact device always
        working buffers 16 exact device pass
        working buffers 16 bounded device pass
        working buffers 14 bounded device pass
        gradients 32 exact device always
        buckets 16 exact device always
        buckets 14 exact device always
        buckets 14 exact device always
        ranks 0 to 0, 1 in all
        gradients 18 exact device always
        working buffers 18 bounded device pass
        ranks 1 to 1, 1 in all
        gradients 20 exact device always
        working buffers 20 bounded device pass
        all-reduce 48 exact in 4 by 2 shard / 1
        all-gather 32 exact in 2 by 2 shard / 1
        """,
    ),
    "2, inference": (
        DeepSpeed,
        evolve(stage(2), trains=False),
        """
        parameters 42 exact device always
        ranks 0 to 0, 2 in all
        """,
    ),
    "3": (
        DeepSpeed,
        stage(3),
        """
        parameters 20 exact device always
        parameters 4 exact device always
        gathered units 42 bounded device pass
        master weights 28 exact device always
        optimizer state 56 exact device always
        optimizer state 8 exact device always
        buckets 16 exact device always
        working buffers 32 bounded device pass
        working buffers 14 bounded device pass
        gradients 14 exact device always
        working buffers 42 bounded device step
        ranks 0 to 0, 2 in all
        all-gather 76 exact in 7 by 2 shard / 1
        reduce-scatter 56 exact in 4 by 2 shard / 1
        """,
    ),
    "3, gradients in float32": (
        DeepSpeed,
        stage(3, grad_size=4, sent_size=4),
        """
        parameters 20 exact device always
        parameters 4 exact device always
        gathered units 42 bounded device pass
        master weights 28 exact device always
        optimizer state 56 exact device always
        optimizer state 8 exact device always
        buckets 32 exact device always
        working buffers 64 bounded device pass
        working buffers 14 bounded device pass
        gradients 28 exact device always
        working buffers 28 bounded device step
        ranks 0 to 0, 2 in all
        all-gather 76 exact in 7 by 2 shard / 1
        reduce-scatter 112 exact in 4 by 2 shard / 1
        """,
    ),
    "3, all offloaded": (
        DeepSpeed,
        stage(3, "cuda", grad_size=4, offload_state=True, offload_params=True, reuse=1, live=1),
        """
        parameters 32 bounded host always
        parameters 4 exact device always
        gathered units 28 bounded device pass
        master weights 28 exact host always
        optimizer state 56 exact host always
        optimizer state 8 exact host always
        buckets 16 exact device always
        working buffers 32 bounded device pass
        working buffers 14 bounded device pass
        gradients 32 bounded host always
        gradients 32 bounded host always
        ranks 0 to 0, 2 in all
        all-gather 148 bounded in 13 by 2 shard / 1
        reduce-scatter 56 exact in 4 by 2 shard / 1
        host copy 100 bounded in 20 by 1 shard / 1
        host copy 84 bounded in 9 by 1 shard / 1
        host copy 56 bounded in 6 by 1 shard / 1
        """,
    ),
    "3, parameters offloaded": (
        DeepSpeed,
        stage(3, "cuda", offload_params=True),
        """
        parameters 32 bounded host always
        parameters 4 exact device always
        gathered units 42 bounded device pass
        master weights 28 exact device always
        optimizer state 56 exact device always
        optimizer state 8 exact host always
        buckets 16 exact device always
        working buffers 32 bounded device pass
        working buffers 14 bounded device pass
        gradients 14 exact device always
        working buffers 42 bounded device step
        ranks 0 to 0, 2 in all
        all-gather 76 exact in 7 by 2 shard / 1
        reduce-scatter 56 exact in 4 by 2 shard / 1
        host copy 60 bounded in 12 by 1 shard / 1
        host copy 14 bounded in 1 by 1 shard / 1
        """,
    ),
    "3, all frozen": (
        DeepSpeed,
        stage(3, numels=((7, False),), groups=()),
        """
        parameters 8 exact device always
        gathered units 18 bounded device pass
        buckets 16 exact device always
        working buffers 4 bounded device pass
        ranks 0 to 0, 2 in all
        all-gather 32 exact in 2 by 2 shard / 1
        """,
    ),
}


@pytest.mark.parametrize("name", [*REPLICATED, *SHARDED, *ZERO])
def test_ranks_hold_and_send_what_can_be_counted_by_hand(name: str) -> None:
    engine, given, expected = (REPLICATED | SHARDED | ZERO)[name]
    assert told(predicted(engine, given)) == [line.strip() for line in expected.strip().splitlines()]


# --- in words ------------------------------------------------------------------------------------------------------


def test_activations_are_an_estimate_that_comes_and_goes() -> None:
    made = predict(make(Config(), tiny_facts()), 5)
    (term,) = (term for term in made.fullest.terms if term.category == "activations")
    assert held(term) == "activations 5 estimated device pass"


def test_a_hook_is_said_to_send_two_bytes_unless_it_sends_less() -> None:
    power = evolve(FLOAT16, hook="powerSGD_hook")
    plain, halved, low = (
        predicted(DDP, inputs(MIXED, world=2, wraps=evolve(WRAPS, hook=hook))) for hook in (None, FLOAT16, power)
    )
    assert [" sends gradients in two bytes" in made.notes[0] for made in (plain, halved, low)] == [False, True, False]
    assert not low.traffic
    assert low.not_predicted == (
        "traffic of gradients, and memory of PowerSGD: both follow its ranks and when it starts",
    )


@pytest.mark.parametrize(
    ("content", "trains", "said"),
    [
        (MIXED, True, False),
        (holding(kind(2, trains=False)), True, True),
        (holding(kind(2, trains=False)), False, False),
    ],
)
def test_units_without_trained_parameters_are_said_where_the_plan_trains(
    content: UnitContent, trains: bool, said: bool
) -> None:
    made = predicted(FSDP2, inputs(MIXED, content, world=2, trains=trains))
    assert any(note.startswith("Units without trained parameters") for note in made.notes) is said


@pytest.mark.parametrize(("trains", "optimizer"), [(True, ADAMW), (True, None), (False, ADAMW)])
def test_the_state_of_an_optimizer_is_spoken_of_where_it_steps(trains: bool, optimizer: OptimizerInputs | None) -> None:
    made = predicted(FSDP2, inputs(MIXED, trains=trains, optimizer=optimizer))
    assert (notes.STATE in made.notes) is (trains and optimizer is not None)


@pytest.mark.parametrize("label", Label)
def test_all_of_an_optimizers_state_is_as_certain_as_its_formula(label: Label) -> None:
    inputs = plain_inputs("DDP", optimizer=OptimizerInputs(module="torch.optim.adamw", name="AdamW", groups=()))
    terms = optimizer_state(inputs, StateBytes(8, 4, label))
    assert [(one.bytes, one.label) for one in terms] == [(8, label), (4, label)]


def test_zero_says_what_it_sends_and_when_a_rank_keeps_more_than_its_part() -> None:
    once, often = (predicted(DeepSpeed, stage(2, times=times)).notes for times in (1, 4))
    assert "ZeRO 2 all-reduces gradients and then gathers all parameters: it sends as much as 3 x" in once[3]
    assert "gathers all parameters; gradients after each of the 4 micro-batches" in often[3]
    keeps = "A rank keeps whole gradients of the parameters that lie in its part, if only partly: up to"
    wide = predicted(DeepSpeed, stage(2, ranks=8, groups=((20,),))).notes
    assert [keeps in note for note in (often[-1], wide[-1])] == [False, True]


def test_optimizer_groups_without_elements_are_one_run_of_ranks() -> None:
    zero = stage(2).zero
    assert zero is not None
    assert overlaps(evolve(zero, groups=())) == [Run(0, 0, 0, 0)]


def test_the_bucket_of_stage_1_stays_until_the_step_where_state_is_away_and_gradients_add_up_in_another_dtype() -> None:
    def kept(**more: Any) -> list[str]:
        made = predicted(DeepSpeed, stage(1, offload_state=True, **more))
        return [term.what for term in made.classes[0].terms if "other parts stay until the step" in term.what]

    assert len(kept(grad_size=4)) == 1
    assert kept() == []


@pytest.mark.parametrize(("overlaps", "times", "exact"), [(False, 1, True), (True, 1, False), (True, 2, True)])
def test_gradients_of_stage_1_are_all_there_where_they_are_reduced_at_the_end(
    overlaps: bool, times: int, exact: bool
) -> None:
    made = predicted(DeepSpeed, stage(1, overlaps=overlaps, times=times))
    (label,) = {term.label for term in made.classes[0].terms if "until they are reduced" in term.what}
    assert (label is Label.EXACT) is exact


def test_a_scalar_of_a_unit_is_one_element() -> None:
    with_scalar, without = (
        predicted(DDP, inputs(holding(*kinds), optimizer=ADAMW)) for kinds in ((kind(3), kind()), (kind(3),))
    )
    assert with_scalar.fullest.total() - without.fullest.total() == 4 + 4 + 2 * 4 + 4  # with its gradient, state, step


@pytest.mark.parametrize(
    ("groups", "there"),
    [
        ((), False),
        (((("fused", True),),), True),
        (((("capturable", True),), (("fused", True),)), True),
        (((("fused", True),), ()), False),
    ],
)
def test_step_counters_are_on_the_device_where_every_group_steps_there(groups: Any, there: bool) -> None:
    assert steps_on_device(OptimizerInputs(name="AdamW", module="torch.optim", groups=groups)) is there
