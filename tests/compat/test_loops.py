"""Loops as public scripts write them, beside the same loop of torch alone: weights have to be equal."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState
from torch.nn import Linear, Module
from torch.utils.data import DataLoader

from prepkit.compat.accelerate import Accelerator, NotOffered
from prepkit.config import DDP, Config
from tests.support.gang import Gang

ROOT = Path(__file__).parents[2]
ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.end_training()


def net(out: int = 1) -> Linear:
    torch.manual_seed(3)
    return Linear(4, out)


def sgd(*models: Module) -> torch.optim.SGD:
    return torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1, momentum=0.5)


class Plain:
    """The calls of an Accelerator, as one process needs them and torch has them; ``world`` ranks' rows are one's."""

    def __init__(self, steps: int = 1) -> None:
        self.gradient_accumulation_steps = steps
        self.num_processes = 1

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        (loss / self.gradient_accumulation_steps).backward(**options)  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, parameters: Any, limit: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)

    def free_memory(self) -> None:
        """Nothing is held."""

    def unwrap_model(self, model: Module) -> Module:
        return model

    def prepare(self, *given: Any) -> Any:
        return given if len(given) > 1 else given[0]


def two_backwards(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for row in rows:
        optimizer.zero_grad()
        accelerator.backward(model(row).square().mean())
        accelerator.backward(model(row * 2).abs().mean())
        optimizer.step()
    return [model]


def by_hand_windows(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for at, row in enumerate(rows):
        accelerator.backward(model(row).square().mean() / 2)
        if at % 2:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def plain_backward(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for row in rows:
        model(row).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def two_calls(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    model = accelerator.prepare(net())
    optimizer = accelerator.prepare(sgd(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for row in rows:
        accelerator.backward(model(row).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [model]


def one_optimizer_over_two(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    first, second = net(4), net()
    optimizer = sgd(first, second)
    first, second, optimizer = accelerator.prepare(first, second, optimizer)
    for row in rows:
        accelerator.backward(second(first(row).tanh()).square().mean())
        both = itertools.chain(first.parameters(), second.parameters())
        accelerator.clip_grad_norm_(both, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [first, second]


def adversaries(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    """As every DCGAN: two backwards for the one, through which the other's gradient then goes."""
    generator, judge = net(4), net()
    generator, judge, of_generator, of_judge = accelerator.prepare(generator, judge, sgd(generator), sgd(judge))
    for row in rows:
        judge.zero_grad()
        accelerator.backward((judge(row) - 1).square().mean())
        made = generator(row.flip(1))
        accelerator.backward(judge(made.detach()).square().mean())
        of_judge.step()
        generator.zero_grad()
        accelerator.backward((judge(made) - 1).square().mean())
        of_generator.step()
    return [generator, judge]


def part_clipped(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for row in rows:
        accelerator.backward(model(row).square().mean() * 10)
        accelerator.clip_grad_norm_([next(iter(model.parameters()))], 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def left_out(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    """A batch whose loss is not finite is left out before its backward."""
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for at, row in enumerate(rows):
        loss = model(row).square().mean() * (float("nan") if at == 1 else 1.0)
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            continue
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def left_out_late(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    """Likewise behind its backward."""
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for at, row in enumerate(rows):
        loss = model(row).square().mean() * (float("nan") if at == 1 else 1.0)
        accelerator.backward(loss)
        if not torch.isfinite(loss):
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def another_optimizer(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    """The model stays prepared, and trains on with an optimizer that comes by itself."""
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for at, row in enumerate(rows):
        if at == 2:
            optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.02))
        accelerator.backward(model(row).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def another_phase(accelerator: Any, rows: list[torch.Tensor]) -> list[Module]:
    """What was trained is let go, gets another head, and is prepared again."""
    model: Any = torch.nn.Sequential(net(4), net())
    model, optimizer = accelerator.prepare(model, sgd(model))
    for at, row in enumerate(rows):
        if at == 2:
            model = accelerator.unwrap_model(model)
            accelerator.free_memory()
            model[1] = net(2)
            model, optimizer = accelerator.prepare(model, sgd(model))
        accelerator.backward(model(row).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [model]


LOOPS: tuple[Callable[[Any, list[torch.Tensor]], list[Module]], ...] = (
    two_backwards,
    by_hand_windows,
    plain_backward,
    two_calls,
    one_optimizer_over_two,
    adversaries,
    part_clipped,
    left_out,
    left_out_late,
    another_optimizer,
    another_phase,
)


def weights(models: list[Module]) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for model in models for param in model.parameters()])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_of_public_scripts_trains_as_torch_alone(accelerator: Accelerator, loop: Any) -> None:
    rows = [*ROWS.split(6)]
    assert torch.allclose(weights(loop(accelerator, rows)), weights(loop(Plain(), rows)), atol=1e-6)


def test_a_graph_may_be_kept_for_another_backward_where_no_wrapper_averages_in_it(accelerator: Accelerator) -> None:
    def loop(accelerator: Any) -> torch.Tensor:
        model = net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        for row in ROWS.split(6):
            out = model(row)
            accelerator.backward(out.square().mean(), retain_graph=True)
            accelerator.backward(out.abs().mean())
            optimizer.step()
            optimizer.zero_grad()
        return weights([model])

    assert torch.allclose(loop(accelerator), loop(Plain()), atol=1e-6)


def on_ranks(rank: int, world: int) -> list[torch.Tensor]:
    out = []
    for loop in LOOPS:
        accelerator = Accelerator(cpu=True, config=Config(engine=DDP()))
        out.append(weights(loop(accelerator, [row[rank::world] for row in ROWS.split(6)])).clone())
        accelerator.free_memory()
    accelerator.end_training()
    return out


def test_on_two_ranks_they_train_as_torch_alone_on_all_rows(gang2: Gang) -> None:
    first, second = gang2.run_fresh(on_ranks)
    for loop, one, other in zip(LOOPS, first, second, strict=True):
        assert torch.equal(one, other), loop.__name__
        alone = weights(loop(Plain(), [*ROWS.split(6)]))
        assert torch.allclose(one, alone, atol=1e-6), loop.__name__


KEPT: list[Any] = []
"""Wrappers of accelerate's, each of which may wait for a thread of gloo if it goes before its process."""


def alone_for_two_steps(rank: int, world: int, library: str) -> list[torch.Tensor]:
    """Weights behind each step of LocalSGD, in which ranks meet at every second."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of whoever was here before
    accelerator = import_module(library).Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    KEPT.append(model)
    seen = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for row in ROWS.split(6):
            accelerator.backward(model(row[rank::world]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(weights([model]).clone())
    accelerator.end_training()
    return seen


def test_ranks_of_local_sgd_train_alone_and_meet_where_they_say(gang2: Gang) -> None:
    told, theirs = (
        gang2.run_fresh(alone_for_two_steps, library) for library in ("prepkit.compat.accelerate", "accelerate")
    )
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    for at, row in enumerate(ROWS.split(6)):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model(row[rank::2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if at % 2:
            with torch.no_grad():
                for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    one.copy_((one + other) / 2)
                    other.copy_(one)
        for rank, model in enumerate(models):
            assert torch.allclose(told[rank][at], weights([model]), atol=1e-6), (rank, at)
            assert torch.equal(told[rank][at], theirs[rank][at]), "as accelerate's own, to the bit"
    assert not torch.equal(told[0][0], told[1][0]), "and not as ranks that meet in each step"


def test_outside_of_accumulate_each_step_is_one_and_losses_are_divided_all_the_same() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rows = [*ROWS.split(6)]
    found = weights(two_backwards(accelerator, rows))
    assert torch.allclose(found, weights(two_backwards(Plain(2), rows)), atol=1e-6)
    accelerator.end_training()


def test_another_number_of_steps_holds_from_where_it_is_set() -> None:
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.gradient_accumulation_steps = 2
    ends = []
    for row in ROWS.split(6):
        before = model.weight.detach().clone()
        with accelerator.accumulate(model):
            accelerator.backward(model(row).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        ends.append((accelerator.sync_gradients, torch.equal(before, model.weight)))
    assert ends == [(False, True), (True, False)] * 2
    assert accelerator.gradient_accumulation_steps == 2
    accelerator.end_training()


def test_an_iterator_at_its_end_clips_nothing_and_is_told(accelerator: Accelerator) -> None:
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    used = iter(list(model.parameters()))
    list(used)
    accelerator.backward(model(ROWS).sum())
    with pytest.warns(UserWarning, match=r"Write list\(\.\.\.\) around it"):
        assert accelerator.clip_grad_norm_(used, 0.1) == 0
    optimizer.step()


# --- objects ---------------------------------------------------------------------------------------------------------


class Moded(torch.optim.SGD):
    mode = "train"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def test_the_prepared_optimizer_is_one_of_torch_with_its_own_mode_that_copies_and_pickles(
    accelerator: Accelerator,
) -> None:
    model = net()
    given = Moded(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, given)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.eval()
    assert given.mode == "eval"
    accelerator.backward(model(ROWS).sum())
    optimizer.step()
    for one in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert one.state_dict()["param_groups"] == given.state_dict()["param_groups"]
        one.param_groups[0]["lr"] = 5.0
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_prepared_loader_copies_and_pickles_inside_a_pass(accelerator: Accelerator) -> None:
    model = net()
    rows: Any = ROWS
    _, _, loader = accelerator.prepare(model, sgd(model), DataLoader(rows, batch_size=6))
    for _ in loader:
        made = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
        assert [one.present for one in made] == [None, None]
    for one in made:
        assert len(one) == 4
        assert torch.equal(torch.cat([*one]), ROWS)
        assert not accelerator.gradient_state.in_dataloader


def test_a_one_cycle_schedule_is_not_ticked_past_its_end() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.num_processes = 2  # two ticks for each step, as on two processes
    accelerator.free_memory()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, cycle)
    for _ in range(4):
        accelerator.backward(model(ROWS).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert cycle.last_epoch == 5


def test_what_is_nothing_to_prepare_stays_as_it_is(accelerator: Accelerator) -> None:
    thing, model = object(), net()
    assert accelerator.prepare(thing, model)[0] is thing
    assert accelerator.scaler is None
    assert accelerator.state.deepspeed_plugin is None


def test_preparing_a_loader_draws_nothing(accelerator: Accelerator) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    loader = accelerator.prepare(DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
    assert torch.equal(torch.rand(1), expected)
    assert loader.total_batch_size == 4


def test_metrics_that_are_no_rows_are_cut_to_what_is_left(accelerator: Accelerator) -> None:
    loader = accelerator.prepare(DataLoader(ROWS[:10], batch_size=4))  # type: ignore[arg-type]
    losses = [accelerator.gather_for_metrics(batch.mean().repeat(4)) for batch in loader]
    assert list(map(len, losses)) == [4, 4, 2]
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]
    assert accelerator.gather(torch.tensor(1.0)).shape == ()


# --- files and the log -----------------------------------------------------------------------------------------------


def hooked(rank: int, world: int, folder: Path) -> list[Any]:
    del world
    accelerator = Accelerator(cpu=True, config=Config(engine=DDP()))
    first, second = net(4), net()
    optimizer = sgd(first, second)
    first, second, optimizer = accelerator.prepare(first, second, optimizer)
    heard: list[Any] = []

    def saving(models: list[Any], weights: list[Any], to: str) -> None:
        heard.append([type(model).__name__ for model in models])
        if accelerator.is_main_process:
            torch.save(models[0].state_dict(), Path(to) / "first.pt")
        while weights:
            weights.pop()

    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(lambda models, _: heard.append(len(models)))
    accelerator.backward(second(first(ROWS + rank)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(str(folder))
    kept = weights([first, second]), copy.deepcopy(optimizer.state_dict())
    accelerator.backward(second(first(ROWS)).square().mean())
    optimizer.step()
    assert not torch.equal(weights([first, second]), kept[0])
    accelerator.load_state(str(folder))
    assert torch.equal(weights([first, second]), kept[0])
    momentum = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    expected = [state["momentum_buffer"] for state in kept[1]["state"].values()]
    assert all(map(torch.equal, momentum, expected))
    accelerator.end_training()
    return heard


def test_hooks_get_bare_models_and_a_folder_that_is_there_and_all_that_is_trained_comes_back(
    gang2: Gang, tmp_path: Path
) -> None:
    for heard in gang2.run_fresh(hooked, tmp_path / "state"):
        assert heard == [["Linear", "Linear"], 2]


def test_trackers_are_accelerates_own_and_hear_what_is_logged(tmp_path: Path) -> None:
    tracking = pytest.importorskip("accelerate.tracking")
    said: list[Any] = []

    class Told(tracking.GeneralTracker):  # type: ignore[misc, name-defined]
        name = "told"
        requires_logging_directory = False

        def start(self) -> None:
            said.append("start")

        @property
        def tracker(self) -> list[Any]:
            return said

        def store_init_configuration(self, values: Any) -> None:
            said.append(values)

        def log(self, values: Any, step: Any = None, **_: Any) -> None:
            said.append((values, step))

        def finish(self) -> None:
            said.append("finish")

    accelerator = Accelerator(cpu=True, log_with=Told(), project_dir=str(tmp_path))
    accelerator.init_trackers("mine", {"lr": 1})
    accelerator.log({"loss": 2.0}, step=3)
    assert accelerator.get_tracker("told", unwrap=True) is said
    with pytest.raises(ValueError, match="not an available tracker"):
        accelerator.get_tracker("other")
    accelerator.end_training()
    assert said == ["start", {"lr": 1}, ({"loss": 2.0}, 3), "finish"]


def tracked_by_a_class_without_guards(rank: int, world: int) -> list[str]:
    """What a tracker hears whose methods do not ask on which process they are."""
    from accelerate.tracking import GeneralTracker

    said: list[str] = []

    class Told(GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, tracker = "told", False, None

        def store_init_configuration(self, values: Any) -> None:
            said.append("config")

        def log(self, values: Any, step: Any = None, **_: Any) -> None:
            said.append("log")

        def finish(self) -> None:
            said.append("finish")

    accelerator = Accelerator(cpu=True, log_with=Told())
    accelerator.init_trackers("mine", {"lr": 1})
    accelerator.log({"loss": 2.0})
    accelerator.end_training()
    return said


def test_trackers_run_on_the_main_process_alone(gang2: Gang) -> None:
    pytest.importorskip("accelerate.tracking")
    assert gang2.run_fresh(tracked_by_a_class_without_guards) == [["config", "log", "finish"], []]


def test_a_profile_is_written_where_its_handler_says(tmp_path: Path) -> None:
    utils = pytest.importorskip("accelerate.utils")
    handler = utils.ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with accelerator.profile() as profiler:
        torch.ones(4).sum()
    assert profiler.key_averages()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["profile_0.json"]
    accelerator.end_training()


def test_autocast_does_as_its_handler_says() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with accelerator.autocast():
        assert net()(ROWS).dtype == torch.bfloat16
    with accelerator.autocast(SimpleNamespace(enabled=False, cache_enabled=True)):
        assert net()(ROWS).dtype == torch.float32
    accelerator.end_training()


# --- refusals --------------------------------------------------------------------------------------------------------


def test_clearing_before_the_step_is_refused_in_accelerates_words_and_its_advice_works(
    accelerator: Accelerator,
) -> None:
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.backward(model(ROWS).sum())
    optimizer.zero_grad()
    with pytest.raises(NotOffered, match=r"move it after optimizer\.step\(\)"):
        optimizer.step()
    before = model.weight.detach().clone()
    accelerator.backward(model(ROWS).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model.weight, before)


def test_saving_inside_a_window_is_refused_in_accelerates_words_and_its_advice_works(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for at, row in enumerate(ROWS.split(12)):
        with accelerator.accumulate(model):
            accelerator.backward(model(row).sum())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.save_state(str(tmp_path / str(at)))
        else:
            with pytest.raises(NotOffered, match=r"write `if accelerator\.sync_gradients:` above it"):
                accelerator.save_state(str(tmp_path / str(at)))
    assert (tmp_path / "1").is_dir()
    accelerator.end_training()


def test_the_face_uses_public_calls_of_prepkit_alone() -> None:
    private = re.compile(r"(?<!\bself)(?<!\bcls)\._(?!shared_state\b|_)[a-z]\w*")
    for file in (ROOT / "prepkit/compat/accelerate").glob("*.py"):
        found = [line for line in file.read_text().splitlines() if private.search(line.partition("#")[0])]
        assert not found, f"{file.name}: {found}"


def test_nothing_is_warned_of_in_a_usual_loop(accelerator: Accelerator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two_backwards(accelerator, [*ROWS.split(6)])
