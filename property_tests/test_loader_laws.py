"""Laws of divided data: every sample once, all ranks alike, and on from where a pass stood."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from prepkit.loading.batch_sampler import RankBatches
from prepkit.loading.loader import Loader
from prepkit.loading.rounds import Share, Tail, length, rounds
from prepkit.loading.sources import IndexedSource, StreamSource

SAMPLES = st.integers(0, 60)
SIZES = st.integers(1, 5)
PARTS = st.integers(1, 5)
TAILS: st.SearchStrategy[Tail] = st.sampled_from(("repeat", "spread", "trim", "drop"))


def chunks(samples: int, size: int) -> list[list[int]]:
    return [list(range(at, min(at + size, samples))) for at in range(0, samples, size)]


def counted(made: list[tuple[Share, ...]]) -> list[int]:
    """What counts, in the order in which it would be gathered."""
    return [item for shares in made for share in shares for item in share.items[: share.counted]]


@given(SAMPLES, SIZES, PARTS, TAILS, st.booleans())
def test_every_sample_counts_once_and_in_order_but_for_what_the_tail_drops(
    samples: int, size: int, parts: int, tail: Tail, whole: bool
) -> None:
    batches = chunks(samples, size)
    made = list(rounds(batches, parts, tail, size=None if whole else size))
    read = counted(made)
    assert read == list(range(len(read)))
    dropped = samples - len(read)
    match tail:
        case "repeat" | "spread":
            assert dropped == 0
        case "trim":
            assert dropped < (size * parts if whole else parts)
        case "drop":
            assert dropped < size * parts
    assert len(made) == length(len(batches), samples, parts, tail, size=None if whole else size)


@given(SAMPLES, SIZES, PARTS, TAILS, st.booleans())
def test_all_ranks_read_as_many_batches_and_know_the_last(
    samples: int, size: int, parts: int, tail: Tail, whole: bool
) -> None:
    made = list(rounds(chunks(samples, size), parts, tail, size=None if whole else size))
    for at, shares in enumerate(made):
        assert len(shares) == parts
        assert {share.last for share in shares} == {at == len(made) - 1}
        assert len({share.consumed for share in shares}) == 1
        assert all(0 < len(share.items) <= size for share in shares)
        if tail in ("repeat", "trim") and not whole:
            assert len({len(share.items) for share in shares}) == 1
    repeats = sum(len(share.items) - share.counted for shares in made for share in shares)
    assert repeats < (parts * size if whole else parts)
    if tail == "spread" and not whole and samples >= len(made) * parts:
        assert repeats == 0


@given(SAMPLES, SIZES, PARTS, TAILS, st.booleans(), st.data())
def test_a_pass_goes_on_where_it_stood(
    samples: int, size: int, parts: int, tail: Tail, whole: bool, data: st.DataObject
) -> None:
    def pass_of(part: int, start: int) -> tuple[RankBatches, list[Any]]:
        order: Any = BatchSampler(range(samples), size, False) if whole else range(samples)  # noqa: FBT003  # torch's
        batches = RankBatches(
            order=order, size=None if whole else size, drop_last=False, parts=parts, part=part, tail=tail, start=start
        )
        return batches, list(batches)

    part = data.draw(st.integers(0, parts - 1))
    first, every = pass_of(part, 0)
    at = data.draw(st.integers(0, len(every)))
    consumed = first.shares[at - 1].consumed if at else 0
    rest, again = pass_of(part, consumed)
    if tail != "spread" or whole:
        assert again == every[at:]
    assert sum(share.counted for share in rest.shares) <= sum(share.counted for share in list(first.shares)[at:]) + size
    assert len(again) == len(every) - at


class Numbers(IterableDataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.samples)  # each process has random numbers of its own
        return iter(order.tolist())


@given(st.integers(1, 30), SIZES, PARTS, st.sampled_from(("repeat", "spread")))
def test_a_stream_that_draws_at_random_is_divided_as_one(samples: int, size: int, parts: int, tail: Tail) -> None:
    read: list[int] = []
    for part in range(parts):
        torch.manual_seed(part)
        before = torch.get_rng_state()
        source = StreamSource.of(
            DataLoader(Numbers(samples), batch_size=size),
            parts=parts, part=part, tail=tail, seed=3, size=size, drop_last=False,
        )  # fmt: skip
        reads = list(source.reads(0, 0))
        read += [int(item) for one in reads for item in one.batch[: one.counted]]
        assert [one.last for one in reads] == [False] * (len(reads) - 1) + [True]
        drawn = torch.get_rng_state()
        torch.set_rng_state(before)
        torch.empty((), dtype=torch.int64).random_()  # the seed of its workers, which torch draws in any case
        assert torch.equal(drawn, torch.get_rng_state())
    assert sorted(read) == list(range(samples))


@given(st.integers(2, 40), SIZES, PARTS, st.integers(0, 2))
def test_an_own_sampler_draws_alike_on_all_ranks_and_anew_in_every_epoch(
    samples: int, size: int, parts: int, epoch: int
) -> None:
    order = WeightedRandomSampler([1.0] * samples, 3 * samples)
    seen: list[list[int]] = []
    for part in range(parts):
        torch.manual_seed(part)
        batches = RankBatches(order=order, size=size, drop_last=False, parts=parts, part=part, seed=5, epoch=epoch)
        seen.append([index for batch in batches for index in batch])
    torch.manual_seed(0)
    one = RankBatches(order=order, size=size * parts, drop_last=False, seed=5, epoch=epoch)
    joint = [index for batch in one for index in batch]
    assert len({len(part) for part in seen}) == 1
    full = 3 * samples // (size * parts) * size
    interleaved = [index for at in range(0, full, size) for part in seen for index in part[at : at + size]]
    assert interleaved == joint[: full * parts]
    later = RankBatches(order=order, size=samples * 3, drop_last=False, seed=5, epoch=epoch + 1)
    assert samples < 6 or list(later) != [joint]


@given(SAMPLES.filter(bool), SIZES, PARTS, PARTS, st.data())
def test_a_shuffled_pass_goes_on_over_another_number_of_ranks(
    samples: int, size: int, before: int, after: int, data: st.DataObject
) -> None:
    def loaders(parts: int) -> list[Loader]:
        given = DataLoader(range(samples), batch_size=size, shuffle=True)  # type: ignore[arg-type]  # it is a data set
        return [
            Loader(
                source=IndexedSource.of(
                    given,
                    RankBatches(
                        order=DistributedSampler(given.dataset, 1, 0, seed=2),
                        size=size, drop_last=False, parts=parts, part=part,
                    ),
                )
            )
            for part in range(parts)
        ]  # fmt: skip

    first = loaders(before)
    stop = data.draw(st.integers(1, len(first[0])))
    seen: list[int] = []
    for loader in first:
        for at, batch in enumerate(loader, 1):
            assert loader.present is not None
            seen += batch.tolist()[: loader.present.counted]
            if at == stop:
                break
        state = loader.state_dict() if stop < len(loader) else {"epoch": 0, "consumed": samples, "loader": None}
    for loader in loaders(after):
        loader.load_state_dict(state)
        for batch in loader:
            assert loader.present is not None
            seen += batch.tolist()[: loader.present.counted]
    assert sorted(seen) == list(range(samples))
