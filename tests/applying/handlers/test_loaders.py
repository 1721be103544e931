"""A loader that reads one rank's part, and the given one, which stays as it was."""

from __future__ import annotations

import inspect
from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from prepkit.applying.handlers.loaders import _source
from prepkit.findings import RunRefused
from prepkit.loading.loader import mover
from prepkit.objects.target import Target
from prepkit.steps import LocalDevice, ShardLoader, WrapLoader
from tests.support.single_step import do, fake_group, problems, undo

DATA = list(range(10))
STEP = ShardLoader(index=0, shuffle=False, seed=3, drop_last=False)


def collate(batch: list[int]) -> list[int]:
    return batch


def target_with(loader: Any) -> Target:
    return Target(model=torch.nn.Identity(), loaders=[loader])


def seen(loader: Any) -> list[int]:
    return [item for batch in loader for item in batch]


@pytest.mark.parametrize(("rank", "part"), [(0, [0, 1, 8]), (1, [2, 3, 9]), (2, [4, 5, 0]), (3, [6, 7, 1])])
def test_every_rank_reads_its_own_samples_and_the_tail_repeats_the_start(rank: int, part: list[int]) -> None:
    target = target_with(DataLoader(DATA, batch_size=2, collate_fn=collate))
    with fake_group(4, rank):
        do(STEP, target)
    assert seen(target.loaders[0]) == part
    assert len(target.loaders[0]) == 2


def test_the_order_follows_seed_and_epoch_and_is_that_of_one_process() -> None:
    step = ShardLoader(index=0, shuffle=True, seed=3, drop_last=True)
    given = DataLoader(DATA, batch_size=2, collate_fn=collate, shuffle=True)
    orders = []
    for epoch in range(2):
        oracle = DistributedSampler(DATA, 1, 0, shuffle=True, seed=3)
        oracle.set_epoch(epoch)
        whole = [DATA[i] for i in oracle]
        parts = []
        for rank in range(4):
            target = target_with(given)
            with fake_group(4, rank):
                do(step, target)
            for _ in range(epoch):
                seen(target.loaders[0])
            parts.append(seen(target.loaders[0]))
        assert [index for part in parts for index in part[:2]] == whole[:8]
        orders.append(whole)
    assert orders[0] != orders[1]


def test_everything_else_is_kept_and_the_given_loader_is_untouched() -> None:
    newer = {"in_order": False} if "in_order" in inspect.signature(DataLoader.__init__).parameters else {}
    given: Any = DataLoader(
        DATA, batch_size=3, num_workers=2, collate_fn=collate, drop_last=True, timeout=5, worker_init_fn=print,
        generator=torch.Generator(), prefetch_factor=4, persistent_workers=True, multiprocessing_context="fork",
        pin_memory=True, **newer,
    )  # fmt: skip
    before = dict(vars(given))
    target = target_with(given)
    memo = do(STEP, target)
    made = target.loaders[0].source.loader
    assert made is not given
    assert vars(given) == before
    arguments = set(inspect.signature(DataLoader.__init__).parameters)
    kept = arguments - {"self", "dataset", "shuffle", "sampler", "batch_sampler", "in_order"}
    assert made.in_order  # what is known of a batch is known by its place
    assert {name: getattr(made, name) for name in kept} == {name: getattr(given, name) for name in kept}
    undo(STEP, target, memo)
    assert target.loaders == [given]


def test_a_loader_without_automatic_batches_stays_so() -> None:
    target = target_with(DataLoader(DATA, batch_size=None))
    with fake_group(2, 1):
        do(STEP, target)
    assert list(target.loaders[0]) == [1, 3, 5, 7, 9]


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


class Own(DataLoader[int]):
    def __iter__(self) -> Any:
        return map(list, super().__iter__())


SPLITS: list[tuple[Any, dict[str, Any], list[list[list[int]]]]] = [
    (DataLoader(DATA[:7], batch_size=2, collate_fn=collate), {}, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
    (DataLoader(DATA[:7], batch_size=2, collate_fn=collate), {"spread": True}, [[[0, 1], [4, 5]], [[2, 3], [6]]]),
    (Own(DATA, batch_size=3, collate_fn=collate), {}, [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]]),
    (
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 3, drop_last=False), collate_fn=collate),
        {"spread": True},
        [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]],
    ),
    (
        DataLoader(DATA, batch_sampler=[[0, 1, 2], [3], [4, 5]], collate_fn=collate),
        {"split": "batches"},
        [[[0, 1, 2], [4, 5]], [[3], [0, 1, 2]]],
    ),
    (
        DataLoader(DATA, batch_size=3, sampler=[9, 8, 7, 6, 5], collate_fn=collate),
        {"split": "sampler"},
        [[[9, 8, 7]], [[6, 5, 9]]],
    ),
    (
        DataLoader(Numbers(), batch_size=3, collate_fn=collate),
        {"split": "stream"},
        [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]],
    ),
    (
        DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True, collate_fn=collate),
        {"split": "stream", "batch_size": 2},
        [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]],
    ),
    (
        DataLoader(Numbers(), batch_size=3, drop_last=True, collate_fn=collate),
        {"split": "stream"},
        [[[0, 1, 2]], [[3, 4, 5]]],
    ),
]


@pytest.mark.parametrize(("loader", "how", "parts"), SPLITS)
def test_whatever_a_loader_draws_by_is_split(loader: Any, how: dict[str, Any], parts: list[list[list[int]]]) -> None:
    read = []
    for rank in range(2):
        target = target_with(loader)
        with fake_group(2, rank):
            do(evolve(STEP, **how), target)
        made = target.loaders[0]
        last, batches = [], []
        for batch in made:
            batches.append(batch)
            last.append(made.present.last)
        assert last == [False] * (len(batches) - 1) + [True]
        assert list(made) == batches  # a second pass
        read.append(batches)
    assert read == parts


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_pass_has_the_length_of_the_data_when_it_begins(world: int, shuffle: bool) -> None:
    read: list[list[int]] = [[], [], []]
    for rank in range(world):
        data = DATA[:8]
        target = target_with(DataLoader(data, batch_size=2, collate_fn=collate))
        with fake_group(world, rank):
            do(evolve(STEP, shuffle=shuffle), target)
        (made,) = target.loaders
        for at, length in enumerate((8, 4, 24)):
            data[:] = range(length)
            assert len(made) == length // 2 // world
            read[at] += seen(made)
    assert [sorted(one) for one in read] == [list(range(length)) for length in (8, 4, 24)]


def test_a_batch_size_that_the_given_loader_gets_holds_from_the_next_pass() -> None:
    steps = (
        STEP,
        evolve(STEP, split="sampler"),
        evolve(STEP, batch_size=2),
        WrapLoader(index=0, device=None, ends_window=True, evaluation=False),
    )
    for world, step in ((2, steps[0]), (2, steps[1]), (2, steps[2]), (1, steps[3])):
        given: Any = DataLoader(list(range(16)), batch_size=4 if step is steps[2] else 2, collate_fn=collate)
        target = target_with(given)
        with fake_group(world, world - 1):
            do(step, target)
        (made,) = target.loaders
        assert {len(batch) for batch in made} == {2}
        given.batch_sampler.batch_size *= 2
        assert [len(batch) for batch in made] == [4] * (4 // world)
        assert (len(made), made.total_batch_size) == (4 // world, 4 * world)
    target = target_with(given := DataLoader(DATA, batch_size=4))
    with fake_group(2, 0):
        do(steps[2], target)
    given.batch_sampler.batch_size = 5
    with pytest.raises(RunRefused, match="batch_size is 5 now, which cannot be split over 2 ranks"):
        next(iter(target.loaders[0]))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (
            DataLoader(Numbers()),
            "plan.model-changed at loaders[0]: reads an IterableDataset, and the plan divides it by samples",
        ),
        ([1, 2], "loaders.foreign at loaders[0]: is a list, and not a torch DataLoader"),
        (
            DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)),
            "loaders.already-distributed at loaders[0]: has a DistributedSampler already",
        ),
    ],
    ids=["stream", "list", "distributed"],
)
def test_what_cannot_be_split_as_planned_is_refused(loader: Any, why: str) -> None:
    (text,) = problems(STEP, target_with(loader))
    assert text.startswith(why)


def test_a_loader_that_was_not_given_is_refused() -> None:
    (text,) = problems(STEP, Target(model=torch.nn.Identity()))
    assert text == "plan.model-changed at loaders[0]: the plan has it, and 0 were given; Pass the loaders of the plan."


# --- what is handed out ---------------------------------------------------------------------------------------------

WRAP = WrapLoader(index=0, device=LocalDevice(type="cpu"), ends_window=True, evaluation=False)


@pytest.mark.parametrize("device", [None, LocalDevice(type="cpu")])
def test_a_wrapper_is_what_its_step_says(device: LocalDevice | None) -> None:
    for ends_window, evaluation in product((True, False), repeat=2):
        step = WrapLoader(index=0, device=device, ends_window=ends_window, evaluation=evaluation)
        target = target_with(DataLoader(DATA, batch_size=2))
        with fake_group(4, 2):
            do(step, target)
        wrapper = target.loaders[0]
        assert (wrapper.ends_window, wrapper.evaluation, wrapper.part) == (ends_window, evaluation, 2)
        assert wrapper.device == (None if device is None else torch.device("cpu"))


class Shards(IterableDataset[int]):
    """Numbers that are asked for a part of them."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.numbers[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


def test_a_stream_in_shards_gives_each_rank_its_own_and_one_that_is_whole_is_drawn_from_the_step_s_seed() -> None:
    for rank in range(3):
        source = _source(evolve(STEP, split="shards"), DataLoader(Shards(DATA), batch_size=2), 3, rank, None)
        assert source.loader.dataset.numbers == DATA[rank::3]
    for seed in (None, 0, 5):
        target = target_with(DataLoader(Shards(DATA), batch_size=2, collate_fn=collate))
        with fake_group(3):
            do(evolve(STEP, split="stream", seed=seed), target)
        assert target.loaders[0].source.divided.seed == (seed or 0)


class Moved:
    """Moves itself, and notes how."""

    def __init__(self, how: Any = None) -> None:
        self.how = how

    def to(self, device: torch.device, **options: bool) -> Moved:
        return Moved((device.type, options))


class Stubborn:
    def to(self, device: torch.device) -> str:
        return device.type


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    pixels: torch.Tensor
    name: str


def test_batches_of_any_make_are_moved() -> None:
    tensor = torch.zeros(2)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {
        "nested": [(tensor, "text"), {"deep": tensor}],
        "pair": Pair(tensor, 3),
        "own": UserDict(ids=tensor),
        "class": Sample(tensor, "cat"),
        "self": [Moved(), Stubborn()],
        "packed": packed,
    }
    there = mover(torch.device("meta"), non_blocking=True)(batch)
    assert said(there) == {
        "nested": [("meta", "text"), {"deep": "meta"}],
        "pair": Pair("meta", 3),
        "own": {"ids": "meta"},
        "class": ("meta", "cat"),
        "self": [("meta", {"non_blocking": True}), "meta"],
        "packed": "meta",
    }
    assert [type(part) for part in there.values()] == [type(part) for part in batch.values()]
    assert said(batch)["pair"] == Pair("cpu", 3)


def said(batch: Any) -> Any:
    """Devices in the place of tensors."""
    match batch:
        case torch.Tensor() | torch.nn.utils.rnn.PackedSequence():
            return batch[0].device.type if isinstance(batch, tuple) else batch.device.type
        case Pair():
            return Pair(said(batch.left), batch.right)
        case Sample():
            return said(batch.pixels), batch.name
        case Moved():
            return batch.how
        case dict() | UserDict():
            return {name: said(part) for name, part in batch.items()}
        case list() | tuple():
            return type(batch)(map(said, batch))
    return batch


@pytest.mark.parametrize("pin", [True, False])
def test_pinned_batches_are_moved_without_waiting(pin: bool) -> None:
    class Pinned(DataLoader[Any]):
        pin_memory = property(lambda _: pin, lambda *_: None)

        def __iter__(self) -> Any:
            return iter([Moved()])

    target = target_with(Pinned(DATA))
    do(WRAP, target)
    assert [one.how for one in target.loaders[0]] == [("cpu", {"non_blocking": pin})]


def test_a_pass_that_was_left_early_is_not_taken_up_by_the_next_loop() -> None:
    target = target_with(DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=collate))
    do(evolve(STEP, shuffle=True), target)
    memo = do(WRAP, target)
    loader = target.loaders[0]
    first = next(iter(loader))
    assert loader.epoch == 0
    loader.set_epoch(0)
    assert (next(iter(loader)), loader.epoch) == (first, 0)
    whole = seen(loader)
    assert (loader.epoch, sorted(whole)) == (2, DATA)
    loader.set_epoch(0)
    assert seen(loader)[:4] == first != whole[:4]
    undo(WRAP, target, memo)
    assert target.loaders == [memo]


@pytest.mark.parametrize("kind", ["indices", "stream", "batches of its own", "kept", "kept stream", "stateful", "list"])
def test_a_pass_goes_on_after_the_batch_that_was_in_use_when_it_was_saved(kind: str) -> None:
    fetched: list[int] = []

    class Counted(list[int]):
        def __getitem__(self, at: Any) -> Any:
            fetched.append(at)
            return super().__getitem__(at)

    def prepared() -> Any:
        data: Any = Numbers() if "stream" in kind else Counted(DATA)
        given: Any = DataLoader(data, batch_size=3, collate_fn=collate)
        split = {"stream": "stream", "batches of its own": "batches", "indices": "samples"}.get(kind)
        if kind == "batches of its own":
            given = DataLoader(data, batch_sampler=[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]], collate_fn=collate)
        if kind == "stateful":
            given = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(
                Numbers(), batch_size=3, collate_fn=collate
            )
        target = target_with([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]] if kind == "list" else given)
        if split is not None:
            do(evolve(STEP, split=split), target)
        do(WRAP, target)
        return target.loaders[0]

    first, again = prepared(), prepared()
    for at, _ in enumerate(first):
        if at == 1:
            state = first.state_dict()
            break
    again.load_state_dict(state)
    fetched.clear()
    assert list(again) == [[6, 7, 8], [9]]
    assert "stream" in kind or kind in ("stateful", "list") or fetched == [6, 7, 8, 9]
    assert list(again) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    for _ in first:
        state = first.state_dict()
    assert (state["epoch"], state["consumed"]) == (2, 0)
    again.load_state_dict(state)
    assert (again.epoch, len(list(again))) == (2, 4)


class Epochs(list[int]):
    """A data set that is told which pass it is in, and gives that beside its samples."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, at: Any) -> Any:
        return 100 * self.epoch + super().__getitem__(at)


class StreamOfEpochs(IterableDataset[int]):
    """The same as a stream."""

    def __init__(self) -> None:
        self.rows = Epochs(DATA)

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return (self.rows[at] for at in DATA)


@pytest.mark.parametrize("make", [lambda: Epochs(DATA), StreamOfEpochs], ids=["data set", "stream"])
def test_data_sets_and_streams_are_told_the_epoch_of_each_pass(make: Any) -> None:
    target = target_with(DataLoader(make(), batch_size=2, collate_fn=collate))
    split = "stream" if make is StreamOfEpochs else "samples"
    do(evolve(STEP, split=split), target)
    loader = target.loaders[0]
    for epoch in (0, 1):
        assert {item // 100 for item in seen(loader)} == {epoch}
    loader.set_epoch(7)
    assert {item // 100 for item in seen(loader)} == {7}
