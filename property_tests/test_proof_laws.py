"""A planted factor is told with its cause, whatever the ranks and the micro-batches; a right run is not accused."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from prepkit.facts.proof import ClipProof, GradientProof, LossShare, ProofFacts
from prepkit.findings import Severity
from prepkit.rules import due
from prepkit.rules.rule import Moment, findings_of

WORLDS = st.sampled_from((2, 3, 4, 6, 8))
MICROS = st.integers(1, 4)
SEEDS = st.integers(0, 10_000)
NOISE = 1e-6
SIZE = 24


def window(
    world: int,
    micros: int,
    seed: int,
    factor: list[list[float]],
    weight: float = 1.0,
    noise: float = NOISE,
    **more: object,
) -> ProofFacts:
    """A window whose recorded gradients are the shares times a factor for each rank and micro-batch, and a noise."""
    drawn = random.Random(seed)
    shares = tuple(LossShare(rank=rank, micro=micro, weight=weight) for rank in range(world) for micro in range(micros))
    gradients = []
    for number in range(3):
        vectors = [[drawn.gauss(0, 1) for _ in range(SIZE)] for _ in shares]
        factors = [factor[one.rank][one.micro] / (world * micros) for one in shares]
        got = [sum(f * v[at] for f, v in zip(factors, vectors, strict=True)) for at in range(SIZE)]
        length = sum(x * x for x in got) ** 0.5
        got = [x + noise * length * drawn.gauss(0, 1) / SIZE**0.5 for x in got]
        gradients.append(
            GradientProof(
                name=f"layer.{number}.weight",
                numel=SIZE,
                gram=tuple(tuple(dot(a, b) for b in vectors) for a in vectors),
                dots=(tuple(dot(got, v) for v in vectors),),
                squares=(dot(got, got),),
                holders=(0,),
                noise=noise * sum(sum(v[at] for v in vectors) ** 2 for at in range(SIZE)) ** 0.5 / len(vectors),
            )
        )
    return ProofFacts(world=world, shares=shares, gradients=tuple(gradients), **more)  # type: ignore[arg-type]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def told(facts: ProofFacts) -> set[str]:
    """Rules that say more than a note."""
    return {one.rule for one in findings_of(due(Moment.PROVE), facts) if one.severity is not Severity.NOTE}


def everywhere(world: int, micros: int, by: float) -> list[list[float]]:
    return [[by] * micros for _ in range(world)]


@given(WORLDS, MICROS, SEEDS, st.sampled_from((1e-7, 1e-5, 1e-3, 1e-2)))
def test_a_right_run_is_not_accused_however_coarse_its_dtype(world: int, micros: int, seed: int, noise: float) -> None:
    assert told(window(world, micros, seed, everywhere(world, micros, 1.0), noise=noise)) == set()


@given(WORLDS, MICROS, SEEDS)
def test_a_sum_over_the_ranks_is_told_and_an_average_of_averages_too(world: int, micros: int, seed: int) -> None:
    assert told(window(world, micros, seed, everywhere(world, micros, world))) == {"prove.summed"}
    assert told(window(world, micros, seed, everywhere(world, micros, 1 / world))) == {"prove.averaged-twice"}


@given(WORLDS, st.integers(2, 6), SEEDS)
def test_a_loss_that_is_divided_twice_or_not_at_all_is_told(world: int, micros: int, seed: int) -> None:
    twice = window(world, micros, seed, everywhere(world, micros, 1 / micros), weight=1 / micros)
    never = window(world, micros, seed, everywhere(world, micros, micros), weight=micros, accumulation=micros)
    assert told(twice) == told(never) == {"prove.accumulation"}


@given(WORLDS, MICROS, SEEDS, st.floats(0.11, 0.19))
def test_a_factor_of_the_losses_own_is_taken_as_meant(world: int, micros: int, seed: int, weight: float) -> None:
    numbers = {1 / world, 1 / micros}
    weight = weight if all(abs(weight - one) > 0.1 * one for one in numbers) else 0.7
    assert told(window(world, micros, seed, everywhere(world, micros, weight), weight=weight)) == set()


@given(WORLDS, MICROS, SEEDS, st.data())
def test_what_is_one_ranks_alone_is_told_with_the_rank(world: int, micros: int, seed: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    factor = [[float(world) if at == rank else 0.0] * micros for at in range(world)]
    facts = window(world, micros, seed, factor)
    assert told(facts) == {"prove.not-averaged"}
    assert f"those of rank {rank} alone" in findings_of(due(Moment.PROVE), facts)[0].what


@given(st.sampled_from(((4, 2), (6, 2), (6, 3), (8, 2), (8, 4))), MICROS, SEEDS, st.booleans())
def test_an_average_over_a_group_of_ranks_is_told(sizes: tuple[int, int], micros: int, seed: int, steps: bool) -> None:
    world, size = sizes
    group = range(0, world, world // size) if steps else range(size)
    factor = [[world / size if rank in group else 0.0] * micros for rank in range(world)]
    assert told(window(world, micros, seed, factor)) == {"prove.part-of-ranks"}


@given(WORLDS, st.integers(2, 4), SEEDS)
def test_a_micro_batch_that_was_cleared_is_told(world: int, micros: int, seed: int) -> None:
    factor = [[0.0] * (micros - 1) + [1.0] for _ in range(world)]
    assert told(window(world, micros, seed, factor)) == {"prove.micro-batch"}


@given(WORLDS, MICROS, SEEDS, st.sampled_from((128.0, 1024.0, 65536.0)))
def test_a_step_over_scaled_gradients_is_told(world: int, micros: int, seed: int, scale: float) -> None:
    assert told(window(world, micros, seed, everywhere(world, micros, scale), scale=scale)) == {"prove.scaled"}


@given(WORLDS, MICROS, SEEDS)
def test_a_clipping_that_was_asked_for_and_not_done_is_told_and_one_that_was_done_is_not(
    world: int, micros: int, seed: int
) -> None:
    plain = window(world, micros, seed, everywhere(world, micros, 1.0))
    norm = sum(one.squares[0] for one in plain.gradients) ** 0.5
    clip = ClipProof(most=norm / 37)
    assert told(window(world, micros, seed, everywhere(world, micros, 1.0), clip=clip)) == {"prove.not-clipped"}
    done = window(world, micros, seed, everywhere(world, micros, 1 / 37), clip=clip)
    assert told(done) == set()


@given(WORLDS, MICROS, SEEDS)
def test_gradients_of_other_samples_are_no_sum_of_these(world: int, micros: int, seed: int) -> None:
    mine = window(world, micros, seed, everywhere(world, micros, 1.0))
    other = window(world, micros, seed + 1, everywhere(world, micros, 1.0))
    mixed = tuple(
        GradientProof(
            name=one.name,
            numel=SIZE,
            gram=one.gram,
            dots=(tuple(0.0 for _ in one.gram),),
            squares=two.squares,
            holders=(0,),
        )
        for one, two in zip(mine.gradients, other.gradients, strict=True)
    )
    assert told(ProofFacts(world=world, shares=mine.shares, gradients=mixed)) == {"prove.direction"}
