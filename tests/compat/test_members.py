"""Members of an ``Accelerator`` that scripts use beside the usual loop."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from prepkit.compat.accelerate import (
    Accelerator,
    DistributedOperationException,
    NotOffered,
    PartialState,
    gather_object,
    pad_across_processes,
    prepare_data_loader,
    synchronize_rng_states,
)
from prepkit.config import (
    BF16,
    DDP,
    FSDP1,
    FSDP2,
    ClipNorm,
    CompressHook,
    Config,
    DeepSpeed,
    PowerSGDHook,
    ShardLoaders,
    TensorParallel,
    WrapClasses,
    WrapRoot,
)
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.end_training()


def tools() -> tuple[torch.nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(24)


# --- the loop --------------------------------------------------------------------------------------------------------


def test_gradients_are_there_until_they_are_cleared(accelerator: Accelerator) -> None:
    model, optimizer = accelerator.prepare(*tools())
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    assert torch.equal(model.weight.grad, torch.full((1, 4), 2.0))
    optimizer.zero_grad()
    assert model.weight.grad is None


def by_no_sync(rank: int, world: int) -> list[list[float]]:
    """Two steps of two micro-batches that the script itself counts; gradients before the average, and weights."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*tools())
    seen = []
    for at in range(4):
        batch = torch.full((1, 4), float(1 + rank + world * at))
        if at % 2 == 0:
            with accelerator.no_sync(model):
                accelerator.backward(model(batch).sum())
            seen.append(model.module.weight.grad[0].tolist()[0])
        else:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            seen.append(model.module.weight.detach()[0].tolist()[0])
            optimizer.zero_grad()
    accelerator.end_training()
    return seen


def one_after_the_other(rank: int, world: int) -> list[list[int]]:
    """What ranks gather under accelerators that each have ended the process group before."""
    seen = []
    for turn in range(4):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(2, 2))
        seen.append(accelerator.gather(torch.tensor([10 * turn + rank])).tolist())
        accelerator.end_training()
    return seen


def test_one_accelerator_after_the_other_forms_a_group_of_its_own(gang2: Gang) -> None:
    assert gang2.run_fresh(one_after_the_other) == [[[10 * turn, 10 * turn + 1] for turn in range(4)]] * 2


def test_windows_that_a_script_counts_with_no_sync_are_averaged_once_at_their_end(gang2: Gang) -> None:
    first, second = gang2.run_fresh(by_no_sync)
    assert (first[0], second[0]) == (1.0, 2.0)
    assert (first[2], second[2]) == (5.0, 6.0)
    assert first[1] == second[1]
    assert first[3] == second[3]
    weight = float(tools()[0].weight.detach()[0, 0])
    assert first[1] == pytest.approx(weight - 0.1 * (1.5 + 3.5))
    assert first[3] == pytest.approx(weight - 0.1 * (1.5 + 3.5 + 5.5 + 7.5))


def under_engines(rank: int, world: int) -> list[list[float]]:
    """Losses of four windows under each engine, whose two micro-batches ``accumulate`` counts or the script does."""
    del rank, world
    seen = []
    for engine in (DDP(), FSDP2(wrap=WrapClasses(("Linear",))), FSDP1(wrap=WrapClasses(("Linear",)))):
        for steps in (2, 1):
            accelerator = Accelerator(cpu=True, config=Config(engine=engine), gradient_accumulation_steps=steps)
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
            model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
            losses = []
            for at, batch in enumerate(loader):
                held = accelerator.no_sync(model) if steps == 1 and at % 2 == 0 else nullcontext()
                with accelerator.accumulate(model) if steps == 2 else held:
                    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                    accelerator.backward(loss * steps / 2)
                    if steps == 2 or at % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                losses.append(accelerator.reduce(loss, "mean").item())
            seen.append(losses)
            accelerator.free_memory()
    accelerator.end_training()
    return seen


def test_a_script_trains_alike_under_every_engine_whoever_counts_its_windows(gang2: Gang) -> None:
    (expected, *others), _ = gang2.run_fresh(under_engines)
    assert len(expected) == 8
    assert expected[0] != expected[2]
    for losses in others:
        assert losses == pytest.approx(expected, rel=1e-5)


def test_nothing_is_joined_and_uneven_batches_inside_alone_are_refused(accelerator: Accelerator) -> None:
    model = accelerator.prepare(tools()[0])
    with accelerator.join_uneven_inputs([model]):
        accelerator.backward(model(torch.ones(2, 4)).sum())
    assert model.weight.grad is not None
    with pytest.raises(NotOffered, match=r"join_uneven_inputs\(even_batches=False\)"):
        accelerator.join_uneven_inputs([model], even_batches=False)


def test_autocast_computes_in_the_precision_of_the_model() -> None:
    for config, dtype in ((Config(), torch.float32), (Config(precision=BF16()), torch.bfloat16)):
        with Accelerator(cpu=True, config=config).autocast():
            assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


# --- prepare ---------------------------------------------------------------------------------------------------------


def test_loaders_that_are_prepared_before_the_model_end_its_windows_and_are_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(torch.ones(3, 4), batch_size=1))  # type: ignore[arg-type]
    model, optimizer = accelerator.prepare(*tools())
    later = accelerator.prepare(DataLoader(torch.ones(3, 4), batch_size=3))  # type: ignore[arg-type]
    assert accelerator.prepare(model, optimizer, loader) == (model, optimizer, loader)
    ends = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        ends.append(accelerator.sync_gradients)
        assert accelerator.gather_for_metrics(batch).shape == (1, 4)
        if len(ends) == 2:
            accelerator.save_state(tmp_path)
    assert ends == [False, True, True]
    accelerator.load_state(tmp_path)
    assert [len(list(one)) for one in (loader, later)] == [1, 1]
    accelerator.end_training()


def test_loaders_of_a_config_are_kept_where_nothing_else_is_said_of_them() -> None:
    config = Config(loaders=ShardLoaders(purpose="evaluation", seed=4))
    assert Accelerator(config=config).config.loaders == config.loaders
    choices = SimpleNamespace(split_batches=True, dispatch_batches=None, even_batches=False, data_seed=None)
    said = Accelerator(config=config, dataloader_config=choices, device_placement=False).config.loaders
    assert said == ShardLoaders(
        purpose="evaluation", split_batches=True, to_device=False, whole_batches=True, draws="sampler"
    )


def test_a_model_that_was_given_back_makes_room_for_another(accelerator: Accelerator) -> None:
    first, optimizer = accelerator.prepare(*tools())
    assert accelerator.free_memory(first, optimizer) == [None, None]
    second, optimizer = accelerator.prepare(*tools())
    accelerator.backward(second(torch.ones(2, 4)).sum())
    optimizer.step()
    assert not torch.equal(second.weight, first.weight)


def test_an_accelerator_goes_to_another_process_without_what_it_has_prepared(accelerator: Accelerator) -> None:
    accelerator.prepare(*tools())
    other = pickle.loads(pickle.dumps(accelerator))
    assert (other.config, vars(other.state)) == (accelerator.config, vars(accelerator.state))
    with pytest.raises(NotOffered, match="before prepare"):
        other.plan  # noqa: B018  # it raises


def alone_under(rank: int, world: int) -> list[list[int]]:
    """What a rank reads of a loader that is prepared by itself, under each engine."""
    del rank, world
    told = []
    for engine in (DDP(), FSDP1(), FSDP2(), DeepSpeed(stage=2, micro_batch=2)):
        accelerator = Accelerator(cpu=True, config=Config(engine=engine))
        loader = accelerator.prepare(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
        assert loader.total_batch_size == 4
        told.append([int(at) for batch in loader for at in batch])
        accelerator.free_memory()
    accelerator.end_training()
    return told


def test_loaders_alone_are_read_under_every_engine_that_divides_by_rank(gang2: Gang) -> None:
    first, second = gang2.run_fresh(alone_under)
    assert first == [[0, 1, 4, 5]] * 4
    assert second == [[2, 3, 6, 7]] * 4


def test_the_state_is_shown_as_accelerate_shows_it(accelerator: Accelerator) -> None:
    state = pytest.importorskip("accelerate.state")
    assert repr(accelerator.state) == repr(state.AcceleratorState())
    assert accelerator.state.deepspeed_plugin is None
    assert accelerator.scaler is None


def test_loaders_alone_are_refused_where_the_model_says_what_data_is_divided_over() -> None:
    accelerator = Accelerator(cpu=True, config=Config(engine=TensorParallel()))
    with pytest.raises(NotOffered, match="loaders alone under TensorParallel"):
        accelerator.prepare(DataLoader(range(4)))  # type: ignore[arg-type]
    with pytest.raises(NotOffered, match="process_index=1"):
        prepare_data_loader(DataLoader(range(4)), num_processes=3, process_index=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hook", "wrapper", "options", "expected"),
    [
        ("fp16", "no", {}, CompressHook(dtype="float16")),
        ("power_sgd", "bf16", {"matrix_approximation_rank": 2}, PowerSGDHook(rank=2, wrapper="bfloat16")),
    ],
)
def test_communication_hooks_become_those_of_the_config(
    hook: str, wrapper: str, options: dict[str, Any], expected: Any
) -> None:
    utils = pytest.importorskip("accelerate.utils")
    kinds = utils.DDPCommunicationHookType
    handler = utils.DistributedDataParallelKwargs(
        comm_hook=kinds(hook), comm_wrapper=kinds(wrapper), comm_state_option=options
    )
    config = Accelerator(config=Config(engine=DDP()), kwargs_handlers=[handler]).config
    assert config.engine == DDP(gradient_as_bucket_view=False, hook=expected)
    handler.comm_hook, handler.comm_state_option = kinds("power_sgd"), {"no_such_option": 1}
    with pytest.raises(NotOffered, match="no_such_option"):
        Accelerator(config=Config(engine=DDP()), kwargs_handlers=[handler])


# --- data ------------------------------------------------------------------------------------------------------------


def read_behind(rank: int, world: int) -> list[tuple[list[Any], list[Any], list[Any]]]:
    """A pass, one that begins behind two batches, and the next; of data read in five ways."""
    out = []
    batches = BatchSampler(SequentialSampler(range(24)), 3, drop_last=False)
    for dispatch, loader in (
        (False, DataLoader(range(24), batch_size=3)),  # type: ignore[arg-type]
        (False, DataLoader(range(24), batch_sampler=batches)),  # type: ignore[arg-type]
        (False, DataLoader(torch.arange(24), sampler=batches, batch_size=None)),  # type: ignore[arg-type]
        (False, DataLoader(Stream(), batch_size=3)),
        (True, DataLoader(range(24), batch_size=3)),  # type: ignore[arg-type]
    ):
        choices = SimpleNamespace(split_batches=False, dispatch_batches=dispatch, even_batches=True, data_seed=None)
        accelerator = Accelerator(cpu=True, dataloader_config=choices)
        prepared = accelerator.prepare(loader)
        whole = []
        for batch in prepared:
            whole.append(list(map(int, batch)))
            gathered = accelerator.gather_for_metrics(torch.as_tensor(batch)).tolist()
            assert gathered[3 * rank : 3 * rank + 3] == whole[-1]
            assert len(gathered) == 3 * world
        behind = [list(map(int, batch)) for batch in accelerator.skip_first_batches(prepared, 2)]
        out.append((whole, behind, [list(map(int, batch)) for batch in prepared]))
    accelerator.end_training()
    return out


def test_the_first_batches_are_skipped_once_however_the_data_are_read(gang2: Gang) -> None:
    for rank, passes in enumerate(gang2.run_fresh(read_behind)):
        for whole, behind, after in passes:
            assert len(whole) == 4
            assert whole[0] == [3 * rank, 3 * rank + 1, 3 * rank + 2]
            assert behind == whole[2:]
            assert after == whole


def test_batches_that_a_load_has_skipped_are_not_skipped_again(accelerator: Accelerator, tmp_path: Path) -> None:
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    for at, _ in enumerate(loader):
        if at == 1:
            accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7]]
    accelerator.load_state(tmp_path)
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)] == [[4, 5], [6, 7]]
    with pytest.raises(NotOffered, match="skip_first_batches"):
        accelerator.skip_first_batches(DataLoader(range(8)), 1)  # type: ignore[arg-type]


def test_batches_are_skipped_in_the_order_of_the_pass_that_comes_next(accelerator: Accelerator) -> None:
    accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True)
    loader = accelerator.prepare(DataLoader(torch.arange(16), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    next(iter(loader))  # a pass that is left
    behind = torch.stack(list(accelerator.skip_first_batches(loader, 3)))
    orders = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        orders.append(torch.stack(list(loader)))
    assert torch.equal(behind, orders[1][3:])
    assert not torch.equal(behind, orders[0][3:])


def test_one_row_for_a_batch_is_one_row_per_rank(accelerator: Accelerator) -> None:
    for batch in accelerator.prepare(DataLoader(torch.ones(8, 4), batch_size=4)):  # type: ignore[arg-type]
        assert accelerator.gather_for_metrics(batch.mean()[None]).tolist() == [1.0]
        assert len(accelerator.gather_for_metrics(batch[:2])) == 2, "as accelerate has it: no row per sample"


def test_parts_of_inputs_are_of_one_length_and_each_item_is_in_one_of_them() -> None:
    state = PartialState()
    state.num_processes, seen = 4, []
    for rank in range(4):
        state.process_index = rank
        with state.split_between_processes({"a": list("abcdef"), "b": torch.arange(6)}) as part:
            seen.append((part["a"], part["b"].tolist()))
        with state.split_between_processes((1, 2), apply_padding=True) as padded:
            assert padded == ((1,), (2,), (2,), (2,))[rank]
    assert seen == [(["a", "b"], [0, 1]), (["c", "d"], [2, 3]), (["e"], [4]), (["f"], [5])]
    with pytest.raises(ValueError, match="different length"), state.split_between_processes({"a": [1], "b": []}):
        pass


def by_their_utils(rank: int) -> list[Any]:
    """What accelerate's own functions give beside our ``Accelerator``: none may act on this rank alone."""
    from accelerate import utils
    from accelerate.logging import get_logger
    from accelerate.state import PartialState as Theirs

    import prepkit.compat.accelerate as face

    assert Theirs().distributed_type == face.DistributedType.MULTI_CPU
    assert get_logger("face").logger.name == "face"
    get_logger("face").info("told on the main process")
    utils.set_seed(3, device_specific=True)
    drawn = torch.rand(1)
    assert utils.gather(torch.tensor([rank])).tolist() == [0, 1]
    assert utils.reduce(torch.tensor(rank + 1.0), "sum").item() == 3
    assert utils.gather_object([rank]) == [0, 1]
    assert utils.broadcast_object_list([rank]) == [0]
    return utils.gather(drawn).tolist()  # type: ignore[no-any-return]


def talk(rank: int, world: int) -> list[Any]:
    """What operations give before anything is prepared."""
    accelerator = Accelerator(cpu=True)
    drawn = by_their_utils(rank) if find_spec("accelerate") else [0, 1]
    assert drawn[0] != drawn[1]
    with redirect_stdout(StringIO()) as out:
        accelerator.print("here")
        accelerator.on_last_process(print)("there")
    assert out.getvalue() == ("here\n", "there\n")[rank]
    assert accelerator.state.distributed_type == "MULTI_CPU"
    said: list[Any] = [gather_object([rank, "x"])]
    padded = pad_across_processes(torch.full((1, rank + 1), rank + 1), dim=1, pad_index=7, pad_first=True)
    said += [padded.tolist(), accelerator.reduce({"n": torch.tensor(rank + 1.0)}, "mean")["n"].item()]
    try:
        accelerator.gather(torch.zeros(rank + 1))
    except DistributedOperationException as error:
        said.append(str(error))
    torch.manual_seed(rank)
    synchronize_rng_states(["torch"])
    said.append(torch.rand(1).item())
    with pytest.raises(NotOffered, match="minimum"):
        accelerator.reduce(torch.zeros(1), "minimum")
    accelerator.end_training()
    assert not torch.distributed.is_initialized()
    return said


def test_ranks_talk_before_anything_is_prepared_and_agree_on_shapes_first(gang2: Gang) -> None:
    first, second = gang2.run_fresh(talk)
    assert (first[0], first[2]) == ([0, "x", 1, "x"], 1.5)
    assert (first[1], second[1]) == ([[7, 1]], [[2, 2]])
    assert "rank 0 gives (1,) of torch.float32, rank 1 gives (2,)" in first[3]
    assert (first[0], *first[2:]) == (second[0], *second[2:])


class Tied(torch.nn.Module):
    """Two names of one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.inner(self.words(tokens)))
        return logits


def whole_and_norms(rank: int, world: int) -> list[Any]:
    """Under each engine: the names of the state dict, whether another model takes it, and the norm before each step."""
    del world
    out = []
    for engine in (DDP(), FSDP2(wrap=WrapRoot()), FSDP1(wrap=WrapRoot())):
        accelerator = Accelerator(cpu=True, config=Config(engine=engine))
        torch.manual_seed(0)
        model = Tied()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        norms = []
        for most in (0.5, float("inf")):  # the second clips nothing
            accelerator.backward(model(torch.arange(4) + rank).square().sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), most).item())
            optimizer.step()
            assert accelerator.ready.grad_norm.item() == pytest.approx(norms[-1])
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        if state:
            Tied().load_state_dict(state)  # every name, and no other
        out.append((sorted(state), norms, float(sum(value.sum() for value in state.values()))))
        other = torch.nn.Linear(1, 1)
        assert accelerator.get_state_dict(other).keys() == other.state_dict().keys()
        accelerator.free_memory()
    accelerator.end_training()
    return out


def test_weights_are_whole_and_norms_those_of_now_under_every_engine(gang2: Gang) -> None:
    first, second = gang2.run_fresh(whole_and_norms)
    names = ["head.weight", "inner.bias", "inner.weight", "seen", "words.weight"]
    assert [found for found, *_ in first] == [names] * 3
    assert [bool(found) for found, *_ in second] == [True, False, False], "as accelerate has it: the main process"
    for _, norms, total in first[1:]:
        assert norms == pytest.approx(first[0][1], rel=1e-5)
        assert total == pytest.approx(first[0][2], rel=1e-5)
    assert [norms for _, norms, _ in first] == [norms for _, norms, _ in second]


# --- files -----------------------------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_registered_objects_are_saved_and_hooks_hear_of_it(accelerator: Accelerator, tmp_path: Path) -> None:
    model, _ = accelerator.prepare(*tools())
    counter, heard = Counter(), []
    counter.count = 3
    accelerator.register_for_checkpointing(counter)
    with pytest.raises(ValueError, match="a list has no state_dict"):
        accelerator.register_for_checkpointing([])

    def saving(models: list[Any], weights: list[Any], folder: str) -> None:
        heard.append((models == [model], folder))
        assert weights[0].keys() == model.state_dict().keys()
        weights.pop()

    handle = accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(lambda models, folder: heard.append((models == [model], folder)))
    folder = str(tmp_path / "state")
    accelerator.save_state(folder)
    handle.remove()
    accelerator.save_state(folder)
    counter.count = 5
    accelerator.load_state(folder)
    assert counter.count == 3
    assert heard == [(True, folder)] * 2


def test_named_checkpoints_are_counted_and_the_oldest_go(tmp_path: Path) -> None:
    project = SimpleNamespace(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2, iteration=0, logging_dir=None
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    model, _ = accelerator.prepare(*tools())
    for value in range(3):
        with torch.no_grad():
            model.weight.fill_(value)
        accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    with torch.no_grad():
        model.weight.fill_(9)
    accelerator.load_state()
    assert model.weight[0, 0] == 2
    project.iteration = 2
    with pytest.raises(ValueError, match="is there already"):
        accelerator.save_state()
    accelerator.project_configuration = None
    with pytest.raises(FileNotFoundError, match="name the folder"):
        accelerator.load_state()
    accelerator.end_training()


def clipped_by_deepspeed(rank: int, world: int) -> tuple[list[float], str, str]:
    """The norms that a script hears under DeepSpeed, and what it hears where the config says another, or nothing."""
    del world
    lean()
    norms: list[float] = []
    said = []
    for limit in (ClipNorm(0.5), None):
        accelerator = Accelerator(cpu=True, config=Config(engine=DeepSpeed(stage=2, micro_batch=4), clip=limit))
        torch.manual_seed(0)
        model = Tied()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2 if isinstance(limit, ClipNorm) else 0):
            accelerator.backward(model(torch.arange(4) + rank).square().sum())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(NotOffered) as caught:
            accelerator.clip_grad_norm_(model.parameters(), 0.7)
        said.append(str(caught.value))
        accelerator.free_memory()
    accelerator.end_training()
    return norms, said[0], said[1]


def test_under_deepspeed_clipping_is_that_of_its_config_and_has_to_agree_with_the_script(gang2: Gang) -> None:
    for norms, other, none in gang2.run_fresh(clipped_by_deepspeed):
        assert math.isnan(norms[0]), "accelerate gives None before the first step"
        assert norms[1] > 0.5
        assert "its config says gradient_clipping 0.5, by the 2-norm; write the same number" in other
        assert 'write "gradient_clipping": 0.7 into its config' in none


# --- what was asked, and what is told --------------------------------------------------------------------------------


def test_what_was_asked_of_loaders_is_told_as_accelerate_tells_it(accelerator: Accelerator) -> None:
    theirs = pytest.importorskip("accelerate").Accelerator(cpu=True)
    names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
    for name in (*names, "device_placement", "use_stateful_dataloader", "distributed_type"):
        assert getattr(accelerator, name) == getattr(theirs, name), name
    assert str(accelerator.distributed_type) == str(theirs.distributed_type) == "DistributedType.NO"
    assert accelerator.distributed_type is theirs.distributed_type
    assert "DistributedType.NO\n" in repr(accelerator.state)
    asked = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    assert not asked.even_batches
    asked.end_training()


def test_a_loss_without_weights_that_is_prepared_is_saved_and_loaded(accelerator: Accelerator, tmp_path: Path) -> None:
    model, optimizer, loss = accelerator.prepare(*tools(), torch.nn.MSELoss())
    for _ in range(2):
        accelerator.backward(loss(model(torch.ones(2, 4)), torch.zeros(2, 1)))
        optimizer.step()
        optimizer.zero_grad()
    saved = model.weight.detach().clone()
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(model.weight, saved)


class Sized(Stream):
    def __len__(self) -> int:
        return 24


def lengths(rank: int, world: int) -> list[tuple[int, int]]:
    """What loaders over a stream of known length say, and how many batches they give."""
    found = []
    for size, drop in ((4, False), (5, False), (5, True), (None, False)):
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Sized(), batch_size=size, drop_last=drop))
        found.append((len(loader), len(list(loader))))
    with pytest.raises(TypeError, match="several workers"):
        len(accelerator.prepare(DataLoader(Sized(), batch_size=4, num_workers=2)))
    return found


def test_a_stream_of_known_length_that_is_divided_has_one(gang2: Gang) -> None:
    for found in gang2.run(lengths, timeout=60):
        assert [said for said, _ in found] == [given for _, given in found] == [3, 3, 2, 12]


def drawn_beside_dispatched(rank: int, world: int) -> list[float]:
    torch.manual_seed(0)
    asked = DataLoaderConfiguration(dispatch_batches=True)
    loader = Accelerator(cpu=True, dataloader_config=asked).prepare(DataLoader(Stream(), batch_size=4))
    return [float(torch.rand(())) for _ in loader]


def test_ranks_that_get_dispatched_batches_draw_what_rank_0_draws(gang2: Gang) -> None:
    mine, others = gang2.run(drawn_beside_dispatched, timeout=60)
    assert mine == others
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()  # as torch's loader, where a pass begins
    assert mine == [float(torch.rand(())) for _ in range(3)]
