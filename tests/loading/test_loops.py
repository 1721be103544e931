"""The loop that users write, over real processes: what every rank reads, moves, counts and gathers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, WeightedRandomSampler

import prepkit as pk
from prepkit.config import Config, EachLoader, Engine, KeepLoaders, ShardLoaders
from prepkit.training.prepared import Prepared
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang

EVALUATE = ShardLoaders(purpose="evaluation")
PLAN = pk.tp.TPPlan((pk.tp.TPLayer("0", "colwise"), pk.tp.TPLayer("1", "rowwise", output_layout="replicate")))
CFG = Config(
    accumulation=2, optimizer=pk.optim.SGD(lr=0.1), loaders=EachLoader((ShardLoaders(seed=3), EVALUATE)), tp_plan=PLAN
)


def samples(count: int) -> list[tuple[Tensor, int]]:
    return [(torch.full((4,), float(at)) / count, at) for at in range(count)]


Seen = tuple[list[list[int]], list[int], int, list[float]]


def looped(rank: int, world: int, engine: Engine, mesh: pk.Mesh | None = None, readers: int = 0) -> Seen:
    """Two epochs, each followed by an evaluation: what was trained on, what was gathered, what is left, the weights."""
    if isinstance(engine, pk.DeepSpeed):
        lean()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    train = DataLoader(samples(12), batch_size=4 // (readers or world), shuffle=True)  # type: ignore[arg-type]
    evaluation = DataLoader(samples(7), batch_size=2)  # type: ignore[arg-type]  # a list is a data set
    cfg = evolve(CFG, engine=engine, mesh=mesh)
    ready = pk.apply(pk.build_plan(cfg, model, loaders=[train, evaluation]))
    torch.manual_seed(rank)  # what else is drawn differs from rank to rank
    trained, gathered, losses = [], [], []
    for _ in range(2):
        epoch: list[int] = []
        for inputs, index in ready.loaders[0]:
            loss = ready.model(inputs).square().mean()
            ready.backward(loss)
            ready.step()
            epoch += index.tolist()
        trained.append(epoch)
        with torch.no_grad():
            for inputs, index in ready.loaders[1]:
                seen, output = ready.ranks.gather_for_metrics((index, ready.model(inputs).sum(1)))
                gathered += seen.tolist()
                losses += output.tolist()
    return trained, gathered, ready.loop.pending, losses


@cache
def alone() -> Seen:
    """What one process does."""
    return looped(0, 1, pk.Single())


@pytest.mark.parametrize(
    "engine", [pk.DDP(), pk.FSDP1(), pk.FSDP2(), pk.DeepSpeed(stage=1)], ids=lambda e: type(e).__name__
)
def test_one_loop_reads_moves_counts_and_gathers_alike_under_every_engine(gang2: Gang, engine: Engine) -> None:
    ranks = gang2.run(looped, engine, timeout=120)
    assert ranks[0][1:3] == (list(range(7)) * 2, 0)
    for epoch in range(2):
        parts = [rank[0][epoch] for rank in ranks]
        together = [index for at in range(0, 6, 2) for part in parts for index in part[at : at + 2]]
        assert together == alone()[0][epoch]
    assert alone()[0][0] != alone()[0][1]
    for rank in ranks:
        assert rank[1:3] == alone()[1:3]
        assert rank[3] == pytest.approx(alone()[3], abs=1e-5)


def test_what_is_gathered_in_an_inner_loop_is_of_its_batches() -> None:
    rows = list(torch.arange(6.0).view(6, 1))
    loaders = [DataLoader(rows, batch_size=size) for size in (4, 3)]  # type: ignore[arg-type]  # a list is a data set
    ready = pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.SGD(lr=0.1)), nn.Linear(1, 1), loaders=loaders))
    outer = iter(ready.loaders[0])
    next(outer)
    inner = [ready.ranks.gather_for_metrics(batch).flatten().tolist() for batch in ready.loaders[1]]
    assert inner == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert ready.ranks.gather_for_metrics(next(outer)).flatten().tolist() == [4.0, 5.0]


def test_a_loop_over_a_loader_that_skips_reads_the_rest_of_that_pass_alone() -> None:
    rows = list(torch.arange(6.0).view(6, 1))
    plan = pk.build_plan(
        pk.Config(optimizer=pk.optim.SGD(lr=0.1), loaders=pk.data.ShardLoaders()),
        nn.Linear(1, 1),
        loaders=[DataLoader(rows, batch_size=2), DataLoader(Plain((3,)), batch_size=1)],  # type: ignore[arg-type]
    )
    indexed, stream = pk.apply(plan).loaders
    assert [batch.flatten().tolist() for batch in indexed.skip(2)] == [[4.0, 5.0]]
    assert len(list(indexed)) == len(indexed) == 3
    assert len(list(stream.skip(2))) == 1
    assert len(list(stream)) == 3
    assert list(indexed.skip(7)) == []
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match=r"loader\.skip\(.*\): give the number of batches to leave out, 0 or more"):
            indexed.skip(wrong)
    assert len(list(indexed)) == 3


@pytest.mark.parametrize(
    ("engine", "mesh", "readers"),
    [(pk.FSDP2(), pk.Mesh(shard=2, tensor=2), 2), (pk.FSDP2(), pk.Mesh(replicate=2, shard=2), 4)],
    ids=["tensor", "hybrid"],
)
def test_ranks_that_hold_one_model_together_read_the_same(
    gang4: Gang, engine: Engine, mesh: pk.Mesh, readers: int
) -> None:
    ranks = gang4.run(looped, engine, mesh, readers, timeout=120)
    parts = {tuple(map(tuple, rank[0])) for rank in ranks}
    assert len(parts) == readers
    assert sorted(index for part in parts for index in part[0]) == list(range(12))
    for rank in ranks:
        assert rank[1:3] == alone()[1:3]
        assert rank[3] == pytest.approx(alone()[3], abs=1e-5)


class Numbers(IterableDataset[int]):
    """A stream in four shards of uneven length, shuffled by whatever the process draws."""

    def __init__(self, shards: tuple[int, ...] = (5, 1, 2, 3)) -> None:
        self.shards = shards

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Numbers:
        return Numbers(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        numbers = [10 * shard + at for shard in self.shards for at in range(shard)]
        return iter([numbers[at] for at in torch.randperm(len(numbers))])


class Plain(Numbers):
    num_shards = None  # type: ignore[assignment]  # cannot be asked for a part


LOADERS: dict[str, tuple[DataLoader[Any], ShardLoaders | KeepLoaders]] = {
    "shards": (DataLoader(Numbers(), batch_size=2), ShardLoaders()),
    "shards, dropped": (DataLoader(Numbers(), batch_size=2), ShardLoaders(drop_last=True)),
    "stream": (DataLoader(Plain(), batch_size=2), EVALUATE),
    "weighted": (
        DataLoader(range(9), batch_size=2, sampler=WeightedRandomSampler([1.0] * 9, 9)),  # type: ignore[arg-type]
        ShardLoaders(),
    ),
    "batches": (
        DataLoader(range(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 3, drop_last=False)),  # type: ignore[arg-type]
        ShardLoaders(),
    ),
    "sent": (DataLoader(range(9), batch_size=2, shuffle=True), ShardLoaders(dispatch=True)),  # type: ignore[arg-type]
    "sent stream": (DataLoader(Plain(), batch_size=2), ShardLoaders(dispatch=True, purpose="evaluation")),
    "split batches": (DataLoader(range(8), batch_size=4), ShardLoaders(split_batches=True)),  # type: ignore[arg-type]
}
STREAM = sorted(10 * shard + at for shard in (5, 1, 2, 3) for at in range(shard))


def read(rank: int, world: int) -> dict[str, tuple[list[int], list[int], list[list[int]]]]:
    """By loader: what counts of one pass, gathered; sizes of this rank's batches; what another pass gathers."""
    torch.manual_seed(rank)
    cfg = Config(
        engine=pk.DDP(), optimizer=pk.optim.SGD(), loaders=EachLoader(tuple(how for _, how in LOADERS.values()))
    )
    given = tuple(loader for loader, _ in LOADERS.values())
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(1, 1), loaders=given))
    found = {}
    for name, loader in zip(LOADERS, ready.loaders, strict=True):
        passes = []
        for _ in range(2):
            once, sizes = [], []
            for batch in loader:
                once += ready.ranks.gather_for_metrics(batch).tolist()
                sizes.append(len(batch))
            passes.append(once)
        found[name] = (passes[0], sizes, passes)
    return found


def test_every_kind_of_loader_is_divided_so_that_each_sample_counts_once(gang2: Gang) -> None:
    first, second = gang2.run(read, timeout=120)
    counted = {name: sorted(once) for name, (once, _, _) in first.items()}
    dropped = counted.pop("shards, dropped")
    assert set(dropped) < set(STREAM)
    weighted = counted.pop("weighted")
    assert len(weighted) == 9
    assert counted == {
        "shards": STREAM,
        "stream": STREAM,
        "batches": list(range(9)),
        "sent": list(range(9)),
        "sent stream": STREAM,
        "split batches": list(range(8)),
    }
    for name, (_, sizes, passes) in first.items():
        assert (name, passes) == (name, second[name][2])
        assert (name, len(sizes)) == (name, len(second[name][1]))
        assert (passes[0] == passes[1]) is (name in ("batches", "split batches")), name
    assert first["split batches"][1] == [2, 2]


def fails(rank: int, world: int) -> str:
    """What each rank is told where rank 0 cannot read."""

    class Torn(Plain):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise OSError("the disk is gone")

    cfg = Config(engine=pk.DDP(), optimizer=pk.optim.SGD(), loaders=ShardLoaders(dispatch=True))
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(1, 1), loaders=[DataLoader(Torn(), batch_size=1)]))
    with pytest.raises((OSError, RuntimeError)) as caught:
        list(ready.loaders[0])
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_that_wait_for_data_of_rank_0_hear_why_there_are_none(gang2: Gang) -> None:
    first, second = gang2.run(fails)
    assert first == "OSError: the disk is gone"
    assert second == "RuntimeError: rank 0, which reads for all ranks, failed: OSError('the disk is gone')"


def zero(rank: int, world: int) -> list[int]:
    """What a rank reads where DeepSpeed cuts the layers over both."""
    from tests.support.transformers_models import build

    lean()
    torch.manual_seed(1)
    model, _ = build("llama")
    engine = pk.DeepSpeed(stage=1, config='{"tensor_parallel": {"autotp_size": 2}}')
    cfg = Config(engine=engine, optimizer=pk.optim.AdamW())
    loader = DataLoader(range(6), batch_size=2, shuffle=True)  # type: ignore[arg-type]  # it is a data set
    ready = pk.apply(pk.build_plan(cfg, model, loaders=[loader]))
    torch.manual_seed(rank)
    return [int(index) for batch in ready.loaders[0] for index in batch]


def test_tensor_ranks_of_deepspeed_read_the_same_samples(gang2: Gang) -> None:
    first, second = gang2.run(zero, timeout=120)
    assert first == second
    assert sorted(first) == list(range(6))


class Counted(IterableDataset[tuple[Tensor, int]]):
    """A stream of so many samples."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(samples(12))


def going_on(
    rank: int, world: int, engine: Engine, folder: str, batches: int, shuffle: bool, size: int
) -> tuple[list[int], int]:
    """Reads so many batches of a pass and saves, or resumes and reads what is left: the samples, and the pass."""
    del rank, world
    torch.manual_seed(5)
    model = nn.Linear(4, 2)
    loader = DataLoader(samples(12), batch_size=size, shuffle=shuffle)  # type: ignore[arg-type]  # a data set
    ready = pk.apply(pk.build_plan(Config(engine=engine, optimizer=pk.optim.SGD()), model, loaders=[loader]))
    if not batches:
        ready.resume(folder)
    read, epoch = [], ready.loaders[0].epoch
    for at, (inputs, index) in enumerate(ready.loaders[0], 1):
        ready.backward(ready.model(inputs).square().mean())
        ready.step()
        read += index.tolist()
        if at == batches:
            ready.save(folder)
            break
    return read, epoch


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
def test_a_run_goes_on_inside_a_pass_on_more_ranks_or_with_other_batches_than_have_saved_it(
    gang2: Gang, tmp_path: Path, shuffle: bool
) -> None:
    read, _ = going_on(0, 1, pk.Single(), str(tmp_path), 2, shuffle, 4)
    (first, epoch), (second, other) = gang2.run(going_on, pk.DDP(), str(tmp_path), 0, shuffle, 2)
    assert (len(first), len(second), epoch, other) == (2, 2, 0, 0)
    assert sorted(read + first + second) == list(range(12))
    smaller, _ = going_on(0, 1, pk.Single(), str(tmp_path), 0, shuffle, 1)
    assert sorted(read + smaller) == list(range(12))
    gang2.run(going_on, pk.DDP(), str(tmp_path / "two"), 1, shuffle, 2)
    rest, _ = going_on(0, 1, pk.Single(), str(tmp_path / "two"), 0, shuffle, 4)
    assert len(rest) == 8


@pytest.mark.parametrize("kind", ["shuffled", "in order", "stream"])
def test_a_run_that_draws_at_every_step_goes_on_inside_a_pass_to_the_bit(tmp_path: Path, kind: str) -> None:
    """What the beginning of a pass draws, as torch's DataLoader does, was drawn before the run was saved."""

    def run(*, stop: int = 0, start: bool = False) -> tuple[Prepared, list[Tensor]]:
        torch.manual_seed(5)
        data: Any = Counted() if kind == "stream" else samples(12)
        loader = DataLoader(data, batch_size=2, shuffle=kind == "shuffled")
        model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
        ready = pk.apply(pk.build_plan(Config(optimizer=pk.optim.SGD(lr=0.1)), model, loaders=[loader]))
        if start:
            ready.resume(str(tmp_path))
        for at, (inputs, _) in enumerate(ready.loaders[0], 1):
            ready.backward((ready.model(inputs) - 1).square().mean())
            ready.step()
            if at == stop:
                break
        return ready, [param.detach().clone() for param in ready.model.parameters()]

    _, whole = run()
    half, _ = run(stop=3)
    half.save(str(tmp_path))
    _, resumed = run(start=True)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def epochs(rank: int, world: int, told: bool, folder: str) -> tuple[list[int], int, int]:
    """The epochs that a loop goes through that is ended after each, and resumed from what it saved there."""
    del rank, world
    seen = []
    for _ in range(4):
        torch.manual_seed(5)
        loaders = [DataLoader(samples(12), batch_size=4, shuffle=True) for _ in range(2)]  # type: ignore[arg-type]  # a data set
        choices = EachLoader((ShardLoaders(purpose="evaluation"), ShardLoaders()))
        cfg = Config(engine=pk.Single(), optimizer=pk.optim.SGD(), loaders=choices)
        ready = pk.apply(pk.build_plan(cfg, nn.Linear(4, 2), loaders=loaders))
        if Path(folder).exists():
            ready.resume(folder)
        for epoch in range(ready.epoch, 3):
            if told:
                ready.loop.passes.set_epoch(epoch)
            seen.append(epoch)
            for inputs, _ in ready.loaders[1]:
                ready.backward(ready.model(inputs).square().mean())
                ready.step()
            list(ready.loaders[0])
            ready.save(folder)
            break
    return seen, ready.steps, ready.epoch


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_a_run_that_ends_between_epochs_goes_on_with_the_next_and_ends_when_all_are_done(
    tmp_path: Path, told: bool
) -> None:
    assert epochs(0, 1, told, str(tmp_path / "run")) == ([0, 1, 2], 9, 3)


def unread(rank: int, world: int, which: str) -> list[str]:
    """What is warned of where a loop iterates the loader that was given, or the prepared one."""
    del rank, world
    loader = DataLoader(samples(8), batch_size=2)  # type: ignore[arg-type]  # a data set
    how = KeepLoaders() if which == "divided" else ShardLoaders()
    cfg = Config(engine=pk.DDP(), optimizer=pk.optim.SGD(), loaders=how)
    given = [loader] if which in ("given", "prepared") else []
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(4, 2), loaders=given))
    beside = pk.apply(pk.build_plan(cfg, nn.Linear(4, 2), loaders=[loader])) if which == "beside" else None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for inputs, _ in (beside or ready).loaders[0] if which in ("prepared", "beside") else loader:
            ready.backward(ready.model(inputs).square().mean())
            ready.step()
    return [str(one.message) for one in told if "ready.loaders" in str(one.message)]


def test_a_loop_over_the_loader_that_was_given_is_warned_of_once(gang2: Gang) -> None:
    first, second = gang2.run(unread, "given")
    assert (len(first), second) == (1, [])
    assert "every rank trains on all samples" in first[0]
    assert gang2.run(unread, "prepared") == [[], []]


def test_a_loop_over_a_loader_that_nobody_was_given_is_warned_of_once_unless_its_data_are_divided(gang2: Gang) -> None:
    first, second = gang2.run(unread, "none")
    assert (len(first), second) == (1, [])
    assert "run.not-read at loaders: build_plan was given no loader, and 2 ranks train: " in first[0]
    assert gang2.run(unread, "divided") == [[], []]
    assert gang2.run(unread, "beside") == [[], []]  # what was prepared with another model, as a GAN's other half


def apart(rank: int, world: int, kind: str) -> list[str]:
    """What is warned of in a loop with steps outside of every pass over what was prepared."""
    del rank, world
    loader: Any = DataLoader(samples(32), batch_size=2)  # type: ignore[arg-type]  # a data set
    cfg = Config(engine=pk.DDP(), optimizer=pk.optim.SGD())
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(4, 2), loaders=[loader]))
    (mine,) = ready.loaders
    kept = list(mine)

    def epochs() -> Iterator[Any]:
        if kind == "kept":  # each rank's own part, more than once
            yield from kept * 4
        if kind == "reused":
            yield from (batch for batch in mine for _ in range(12))
        if kind == "seldom":
            for _ in range(12):
                yield from [next(iter(mine))] * 3
        if kind in ("rest", "another"):
            for _ in range(3):
                yield from mine
                yield from kept[: 3 * (kind == "rest")]
        if kind == "another":
            yield from loader

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for inputs, _ in epochs():
            ready.backward(ready.model(inputs).square().mean())
            ready.step()
    return [str(one.message) for one in told if "run.not-read" in str(one.message)]


def test_steps_on_a_loader_that_was_not_prepared_are_warned_of_once_also_after_a_pass(gang2: Gang) -> None:
    first, second = gang2.run(apart, "another")
    assert (len(first), second) == (1, [])
    assert "steps were taken since the last pass over ready.loaders was over" in first[0]
    for kind in ("kept", "reused", "seldom", "rest"):
        assert gang2.run(apart, kind) == [[], []], kind
