"""Laws of the formulas for drawn inputs, many of which no plan has yet; parameters are counted again, slowly.

``python -m tests.predict.test_drawn_inputs FSDP1 17`` prints one of them whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
from attrs import evolve

from prepkit.config import DDP, FSDP1, FSDP2, DeepSpeed, Engine, Single, TensorParallel
from prepkit.plan.layout import round_up
from prepkit.predict import predict_inputs
from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import (
    LIBRARIES,
    OptimizerInputs,
    StateBytes,
    class_formula,
    state_formula,
    steps_on_device,
)
from prepkit.predict.unit_contents import ParamKind, UnitContent, UnitInstance
from prepkit.predict.zero import Zero
from prepkit.steps import Axis, DDPCommHook, WrapDDP
from tests.support.drawn_runs import Draws
from tests.support.golden import assert_golden
from tests.support.readable_plans import brief

GOLDEN = Path(__file__).parent / "golden"
ENGINES: dict[str, type[Engine]] = {
    engine.__name__: engine for engine in (Single, DDP, FSDP1, FSDP2, TensorParallel, DeepSpeed)
}
COUNT = dict.fromkeys(ENGINES, 400) | {"DeepSpeed": 1000}
SHAPES = (
    (),
    (1,),
    (7,),
    (8,),
    (0, 3),
    (3, 5),
    (8, 8),
    (16, 2),
    (5, 4, 2),
    (64, 96),
    (128, 64),
    (4096,),
    (4097, 3),
    (512, 700),
)
PATHS = ("", "a", "a.b", "a.b.c", "ab", "d", "d.e")
SOME_OPTIONS = (
    *({}, {}, {"amsgrad": True}, {"momentum": 0.9}, {"centered": True}, {"fused": True}, {"capturable": True}),
    *({"momentum": 0.5, "centered": True}, {"amsgrad": True, "fused": True}),
)


def drawn(name: str, number: int) -> Inputs:
    """Inputs of that number; what is drawn follows the engine only where a formula could not be asked otherwise."""
    draws = Draws(f"inputs {name} {number}")
    groups = draws.one((1, 1, 2, 3))
    contents = tuple(_content(draws, name, groups) for _ in range(draws.one((1, 1, 2, 3))))
    paths = PATHS[draws.one((0, 0, 0, 1)) :][: draws.one((1, 2, 4, 7))]
    reshard = draws.one(((True,), (False,), (True, False), (2, True), (2, 4, False)))
    units = tuple(
        UnitInstance(path, draws.one(range(len(contents))), draws.one(reshard), draws.seldom(3)) for path in paths
    )
    mesh = _mesh(draws, name)
    world = prod(axis.size for axis in mesh) * (draws.one((1, 2, 8, 96)) if name in ("DDP", "DeepSpeed") else 1)
    zero = _zero(draws, world, groups) if name == "DeepSpeed" else None
    return Inputs(
        engine=name,
        world_size=world,
        mesh=mesh,
        contents=contents,
        units=units,
        buffers=draws.one((0, 0, 100)),
        trains=not draws.seldom(8),
        optimizer=_optimizer(draws, groups) if not draws.seldom(8) else None,
        accumulation=draws.one((1, 1, 2, 5)),
        average_each=draws.seldom(4),
        torch=draws.one(("2.13.0", "2.13.1", "2.9.0", "", "here")),
        deepspeed=draws.one(("0.19.8", "0.18.0", "")),
        device=draws.one(("cuda", "cuda", "cpu")),
        per_node=draws.one((None, 1, 8)),
        gathered_size=draws.one((None, None, 2, 4)),
        reduced_size=draws.one((None, None, 2, 4)),
        autocast_size=draws.one((None, 2)),
        offload=draws.seldom(3),
        wraps=_wrap(draws) if name == "DDP" else None,
        left_out=draws.one(((), ("something",))),
        uneven=draws.seldom(6),
        whole=draws.one(((), ((_param(draws, groups), 2),))) if name == "FSDP2" else (),
        loaded=draws.one((0, 12345, 1 << 31)),
        sent=draws.seldom(3),
        narrower=draws.seldom(6),
        original=not draws.seldom(3),
        zero=zero,
        upcast_frozen=draws.one((0, 0, 640)),
        splits_units=draws.seldom(4),
    )


def _content(draws: Draws, name: str, groups: int) -> UnitContent:
    shapes = SHAPES[1:] if name == "FSDP2" else SHAPES  # it shards no scalar
    kinds = [_param(draws, groups, shapes) for _ in range(draws.one((1, 2, 3, 4)))]
    if name != "FSDP1":
        return UnitContent(tuple((kind, draws.one((1, 1, 2, 6))) for kind in kinds), full=draws.seldom(6))
    size, multiple, end = kinds[0].size, draws.one((1, 4, 8)), 0
    placed = []
    for kind in kinds:
        ignored = draws.seldom(5)
        start = None if ignored else round_up(end, multiple)
        end = end if start is None else start + prod(kind.shape)
        placed.append((evolve(kind, size=kind.size if ignored else size, start=start), 1))
    return UnitContent(tuple(placed), full=draws.seldom(6))


def _param(draws: Draws, groups: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> ParamKind:
    trains = not draws.seldom(4)
    return ParamKind(
        shape=draws.one(shapes),
        size=draws.one((4, 4, 2, 1)),
        floating=not draws.seldom(6),
        trains=trains,
        group=draws.one(range(groups)) if trains and not draws.seldom(8) else None,
        grad_factor=draws.one((1, 1, 1, 2)),
    )


def _mesh(draws: Draws, name: str) -> tuple[Axis, ...]:
    sizes = {
        "Single": {},
        "DeepSpeed": {},
        "DDP": {"replicate": draws.one((1, 2, 3, 64))},
        "TensorParallel": {"tensor": draws.one((2, 4))},
        "FSDP1": draws.one(({"shard": 4}, {"shard": 3}, {"replicate": 4}, {"replicate": 2, "shard": 8})),
        "FSDP2": {
            **draws.one(({}, {}, {"replicate": 2})),
            "shard": draws.one((1, 2, 3, 4, 16, 100)),
            **draws.one(({}, {}, {"tensor": 2})),
        },
    }[name]
    return tuple(Axis(name=axis, size=size) for axis, size in sizes.items())


def _wrap(draws: Draws) -> WrapDDP:
    hooks = (DDPCommHook(hook="bf16_compress_hook"), DDPCommHook(hook="powerSGD_hook"))
    return WrapDDP(
        device=None,
        broadcast_buffers=not draws.seldom(3),
        bucket_cap_mb=draws.one((25.0, 25.0, 1.0, 0.0001, 0.125)),
        find_unused_parameters=draws.seldom(3),
        gradient_as_bucket_view=not draws.seldom(3),
        static_graph=draws.seldom(3),
        hook=draws.one((None, None, *hooks)),
    )


def _optimizer(draws: Draws, groups: int) -> OptimizerInputs:
    def one() -> tuple[str, str]:
        library, known = draws.one(LIBRARIES[: draws.one((1, len(LIBRARIES)))])
        return library + draws.one(("", ".adam")), draws.one((*known, *known, "Other"))

    module, name = one()
    options = tuple(tuple(draws.one(SOME_OPTIONS).items()) for _ in range(groups))
    several = tuple(one() for _ in range(groups)) if draws.seldom(4) else ()
    return OptimizerInputs(name=name, module=module, groups=options, classes=several)


def _zero(draws: Draws, world: int, groups: int) -> Zero:
    numels = tuple((draws.one((0, 1, 7, 8, 64, 100, 6144)), not draws.seldom(5)) for _ in range(draws.one((1, 3, 8))))
    trained = [numel for numel, trains in numels if trains and numel]
    cut = len(trained) // 2 if groups > 1 else 0
    ranks = draws.one((world, world, max(1, world // 2)))
    total = sum(numel for numel, _ in numels)
    size = draws.one((4, 2, 2))
    return Zero(
        stage=draws.one((1, 2, 3)),
        ranks=ranks,
        size=size,
        grad_size=draws.one((4, size)),
        bfloat16=size == 2 and not draws.seldom(3),
        sent_size=draws.one((2, 4)),
        bucket=draws.one((1, 64, 107, 108, 500_000_000)),
        overlaps=draws.seldom(2),
        persistent=draws.one((0, 7, 8, 63, 64, 100_000)),
        live=draws.one((0, 100, 1_000_000_000)),
        reuse=draws.one((0, 100, 2 * total, 2 * total + 1, 1_000_000_000)),
        sub_group=draws.one((1, 8, 64, 1_000_000_000)),
        numels=numels,
        module=draws.one((0, 64, 6144)),
        groups=tuple(tuple(group) for group in (trained[:cut], trained[cut:]) if group),
        offload_state=draws.seldom(3),
        offload_params=draws.seldom(3),
        pins_state=not draws.seldom(3),
        at_once=draws.seldom(4),
        unknown=draws.one(((),) * 12 + (("zenflow", "MiCS"),)),
    )


NUMBERS = [(name, number) for name in ENGINES for number in range(COUNT[name])]


def test_the_classes_have_every_index_once_and_nothing_is_less_than_nothing() -> None:
    for name, number in NUMBERS:
        found = predict_inputs(ENGINES[name], drawn(name, number))
        starts = [one.first for one in found.classes]
        assert starts == [0, *(one.last + 1 for one in found.classes)][: len(starts)], (name, number)
        for one in found.classes:
            assert one.last >= one.first, (name, number)
            assert all(term.bytes >= 0 for term in one.terms), (name, number)
            assert one.floor() <= one.total(), (name, number)
        assert all(min(entry.bytes, entry.calls, entry.ranks - 1) >= 0 for entry in found.traffic), (name, number)


WHOLE = ("Single", "DDP")


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model_is_held_on_every_rank_element_by_element(name: str) -> None:
    for number in range(COUNT[name]):
        inputs = drawn(name, number)
        found = predict_inputs(ENGINES[name], inputs)
        held = 0
        for unit in inputs.units:
            for kind, times in inputs.contents[unit.content].params:
                held += sum(kind.size for _ in range(times) for _ in range(prod(kind.shape)))
        for one in found.classes:
            assert one.category("parameters") == held, (name, number)


def test_shards_of_a_parameter_are_rows_of_it_padded_to_the_first_rank_s() -> None:
    for number in range(COUNT["FSDP2"]):
        inputs = drawn("FSDP2", number)
        axes = {axis.name: axis.size for axis in inputs.mesh}
        if axes.get("tensor", 1) > 1 or inputs.whole:
            continue
        held = 0
        for unit in inputs.units:
            for kind, times in inputs.contents[unit.content].params:
                rows, rest = kind.shape[0], prod(kind.shape[1:])
                first = len(range(0, rows, axes["shard"]))
                held += kind.size * times * first * rest
        for one in predict_inputs(FSDP2, inputs).classes:
            assert one.category("parameters") == held, number


@pytest.mark.parametrize("name", ["FSDP2", "DDP", "FSDP1"])
def test_more_ranks_never_hold_more(name: str) -> None:
    """Parameters, gradients and optimizer state of the fullest rank."""
    for number in range(0, COUNT[name], 2):
        inputs = drawn(name, number)
        if name == "FSDP1" or inputs.optimizer is None:  # the places in a flat parameter are padded for one size
            continue
        axes = tuple(evolve(axis, size=axis.size * (2 if axis.name == "shard" else 1)) for axis in inputs.mesh)
        more = evolve(inputs, mesh=axes, world_size=prod(axis.size for axis in axes) or inputs.world_size)
        before, after = (predict_inputs(ENGINES[name], one) for one in (inputs, more))
        for category in ("parameters", "gradients", "master weights"):
            if before.classes:
                most = [max(one.category(category) for one in made.classes) for made in (before, after)]
                assert most[1] <= most[0], (name, number, category)


def test_twice_the_micro_batches_hold_no_less_and_send_no_less() -> None:
    for name, number in NUMBERS[::3]:
        inputs = drawn(name, number)
        once, twice = (predict_inputs(ENGINES[name], evolve(inputs, accumulation=times)) for times in (2, 4))
        assert twice.sent >= once.sent, (name, number)
        if once.classes:
            assert twice.fullest.total() >= once.fullest.total(), (name, number)


def test_every_optimizer_in_the_tables_has_the_state_that_it_had() -> None:
    """Bytes of a parameter of 8 x 8 elements of four bytes, cut in two, and whole, for every set of options."""

    def row(library: str, name: str) -> Iterator[str]:
        formula = class_formula(library, name)
        assert formula
        usual = ""
        for options in SOME_OPTIONS:
            said = ", ".join(f"{key}={value}" for key, value in options.items()) or "no options"
            cut, whole = (formula(local, (8, 8), 4, options) for local in ((4, 8), (8, 8)))
            if (text := f"{cut and brief(cut)} cut, {whole and brief(whole)} whole") != usual:
                usual = usual or text
                yield f"  {said}: {text}"

    table = [(library, name) for library, known in LIBRARIES for name in (*known,)]
    text = "".join(f"{library}.{name}\n" + "\n".join(row(library, name)) + "\n" for library, name in table)
    assert_golden(GOLDEN / "optimizers.txt", text)


def test_steps_are_counted_on_the_device_where_every_group_says_so() -> None:
    def on_device(*groups: dict[str, bool]) -> bool:
        options = tuple(tuple(group.items()) for group in groups)
        return steps_on_device(OptimizerInputs(name="AdamW", module="torch.optim", groups=options))

    assert on_device({"fused": True}, {"capturable": True})
    assert not on_device({"fused": True}, {})
    assert not on_device()


def test_several_optimizers_have_the_state_of_each_and_none_where_one_is_unknown() -> None:
    two = OptimizerInputs(
        name="SGD + AdamW",
        module="torch.optim",
        groups=((("momentum", 0.9),), (("amsgrad", True),)),
        classes=(("torch.optim", "SGD"), ("torch.optim", "AdamW")),
    )
    formula = state_formula(two)
    assert formula
    assert formula((8,), (8,), 4, 0) == StateBytes(32)
    assert formula((8,), (8,), 4, 1) == StateBytes(96, step=4)
    assert state_formula(evolve(two, classes=(two.classes[0], ("torch.optim", "Other")))) is None


if __name__ == "__main__":
    inputs = drawn(sys.argv[1], int(sys.argv[2]))
    print(inputs, predict_inputs(ENGINES[sys.argv[1]], inputs), sep="\n")
