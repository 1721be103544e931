"""Scripts for accelerate with one changed import: the same losses, and words for what is not offered."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from prepkit.compat import accelerate as face
from prepkit.compat.accelerate import OTHERWISE, Accelerator, NotOffered, PlanRejected, theirs
from prepkit.config import BF16, DDP, FP16, FSDP2, Config, ShardLoaders
from tests.support.fork_server import ForkServers
from tests.support.script import run_script

SCRIPT = Path(__file__).with_name("script.py")
ROOT = SCRIPT.parents[2]


def by_both(servers: ForkServers, tmp_path: Path, *arguments: str) -> tuple[list[Any], list[Any]]:
    """What the script says on two processes under accelerate, and under prepkit's face."""
    pytest.importorskip("accelerate")
    said = []
    for library in ("accelerate", "prepkit.compat.accelerate"):
        out = tmp_path / f"{library}.json"
        command = [str(SCRIPT), library, "2", "bf16", str(out), *arguments]
        run_script(servers, 2, command, {"ACCELERATE_USE_CPU": "true"}, 120)
        said.append(json.loads(out.read_text()))
    theirs, ours = said
    assert len(theirs) == len(ours) == 2 * (64 // 8 // 2) + 2
    for expected, found in zip(theirs, ours, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    return theirs, ours


def test_a_script_trains_and_evaluates_on_two_processes_as_under_accelerate(
    tmp_path: Path, fork_servers: ForkServers
) -> None:
    _, ours = by_both(fork_servers, tmp_path)
    assert ours[0][0] > ours[-2][0]
    assert [row[0] for row in ours if len(row) == 2] == [21, 21]


def test_a_schedule_over_the_processes_stops_where_accelerate_s_does(tmp_path: Path, fork_servers: ForkServers) -> None:
    """Made for 5 ticks, of which each of 4 steps on two processes takes two."""
    _, ours = by_both(fork_servers, tmp_path, "5")
    rates = [row[1] for row in ours if len(row) == 3]
    assert rates[-3] == rates[-1]


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.end_training()


def tools() -> tuple[torch.nn.Linear, torch.optim.SGD, DataLoader[Any]]:
    model = torch.nn.Linear(4, 1)
    data: Any = [torch.randn(4) for _ in range(8)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)


def test_objects_come_back_in_the_order_in_which_they_are_given(accelerator: Accelerator) -> None:
    model, optimizer, loader = tools()
    other, prepared, bound = accelerator.prepare(loader, model, optimizer)
    assert (prepared, bound.optimizer) == (accelerator.ready.model, accelerator.ready.optimizer)
    assert other is accelerator.ready.loaders[0]
    assert bound.param_groups is optimizer.param_groups
    assert accelerator.unwrap_model(prepared) is model
    assert "Single plan for 1 rank" in str(accelerator.plan)


def test_a_refusal_has_every_finding_and_touches_nothing() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=0)
    model, optimizer, loader = tools()
    with pytest.raises(PlanRejected) as caught:
        accelerator.prepare(model, optimizer, loader)
    assert {"precision.fp16-unsupported", "values.accumulation"} <= {found.rule for found in caught.value.findings}
    assert "forward" not in vars(model)


def test_clipping_holds_for_the_window_in_which_it_is_asked_for(accelerator: Accelerator) -> None:
    model, optimizer, loader = accelerator.prepare(*tools())
    batch = next(iter(loader))
    for clipped in (True, False):
        before = model.weight.detach().clone()
        accelerator.backward(model(batch).sum() * 100)
        if clipped:
            whole = float(model.weight.grad.square().sum() + model.bias.grad.square().sum()) ** 0.5
            assert accelerator.clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(whole)
        optimizer.step()
        moved = float((model.weight.detach() - before).norm())
        assert (moved <= 0.05 + 1e-6) is clipped
        assert (accelerator.ready.grad_norm is not None) is clipped
        assert accelerator.plan.owners.clip is None


def test_the_norm_of_a_scaled_loss_is_that_of_the_loss() -> None:
    config = Config(precision=FP16(init_scale=1024.0), overrides=("precision.fp16-unsupported",))
    accelerator = Accelerator(cpu=True, config=config)
    model, optimizer, loader = accelerator.prepare(*tools())
    accelerator.backward(model(next(iter(loader))).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert 0 < norm < 100, "times 1024 it would be more"
    optimizer.step()
    assert float(norm) == pytest.approx(float(accelerator.ready.grad_norm))
    accelerator.end_training()


def test_gradients_are_kept_inside_a_window_and_not_thrown_away_at_its_end() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*tools())
    (first, second), before = tuple(loader), model.weight.detach().clone()
    for batch in (first, second):
        optimizer.zero_grad()  # at the top of the loop, as many scripts have it
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            if accelerator.sync_gradients:
                optimizer.step()
    mean = (first.sum(0) + second.sum(0)) / 2
    assert torch.allclose(model.weight.detach(), before - 0.1 * mean, atol=1e-6)
    accelerator.end_training()


def test_what_trains_otherwise_than_under_accelerate_is_told_once() -> None:
    """There the first clips inside a window, and the second throws away its first micro-batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*tools())
    batches, before = tuple(loader), model.weight.detach().clone()
    norms = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            for batch in batches:
                with accelerator.accumulate(model):
                    optimizer.zero_grad()
                    accelerator.backward(model(batch).sum() * 100)
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                    optimizer.step()
    told = [one for one in heard if "accelerate" in str(one.message)]
    assert all(one.filename == __file__ for one in told)
    cleared, clipped = sorted(str(one.message) for one in told)
    assert "Write `if accelerator.sync_gradients:` above it" in clipped
    assert "under accelerate it throws away the micro-batches before" in cleared
    assert [norm != norm for norm in norms] == [True, False, True, False]
    assert float((model.weight.detach() - before).norm()) <= 2 * 0.05 + 1e-6
    accelerator.end_training()


def test_a_checkpoint_is_saved_and_read(accelerator: Accelerator, tmp_path: Path) -> None:
    model, optimizer, loader = accelerator.prepare(*tools())
    accelerator.save_state(str(tmp_path / "state"))
    kept = model.weight.detach().clone()
    accelerator.backward(model(next(iter(loader))).sum())
    optimizer.step()
    assert not torch.equal(model.weight, kept)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(model.weight, kept)


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_not_offered_says_what_to_write_and_names_the_page(accelerator: Accelerator, name: str) -> None:
    with pytest.raises(NotOffered) as caught:
        getattr(accelerator, name)
    assert OTHERWISE[name] in str(caught.value)
    assert (ROOT / caught.value.findings[0].fix.rpartition("See ")[2]).is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"dynamo_backend": "inductor"},
            "Accelerator(dynamo_backend=...)\n  fix: give Accelerator(config=pk.Config(engine=pk.DDP(), compile=",
        ),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'"),
        ({"kwargs_handlers": [SimpleNamespace()]}, "SimpleNamespace"),
    ],
)
def test_an_argument_without_a_place_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(NotOffered) as caught:
        Accelerator(cpu=True, **arguments)
    assert said in str(caught.value)


def test_an_argument_that_is_nobody_s_is_told_with_what_was_meant() -> None:
    with pytest.raises(TypeError, match="'gradient_accumulation_step'; did you mean gradient_accumulation_steps"):
        Accelerator(cpu=True, gradient_accumulation_step=2)


def test_calls_before_prepare_are_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(NotOffered, match="before prepare"):
        accelerator.plan  # noqa: B018  # it raises
    with pytest.raises(NotOffered, match=r"prepare\(device_placement=\.\.\.\)"):
        accelerator.prepare(*tools(), device_placement=[False])
    with pytest.raises(NotOffered, match="before prepare"):
        accelerator.prepare(tools()[1])
    accelerator.end_training()


def test_a_name_that_nobody_knows_is_no_attribute(accelerator: Accelerator) -> None:
    assert not hasattr(accelerator, "no_such_member")
    assert not hasattr(face, "no_such_name")


@pytest.mark.parametrize("name", sorted(theirs.NAMES))
def test_names_that_scripts_import_beside_the_accelerator_are_accelerates_own(name: str) -> None:
    accelerate, utils = pytest.importorskip("accelerate"), pytest.importorskip("accelerate.utils")
    assert getattr(face, name) is getattr(accelerate, name, None) or getattr(face, name) is getattr(utils, name)


# --- arguments -------------------------------------------------------------------------------------------------------


def test_the_launchers_variables_choose_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Accelerator(mixed_precision="bf16").config.engine == DDP()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    config = Accelerator(mixed_precision="bf16").config
    assert (config.engine, config.precision) == (FSDP2(), BF16(reduce_dtype="bfloat16"))


def test_accelerates_own_objects_are_read() -> None:
    utils = pytest.importorskip("accelerate.utils")
    config = Accelerator(
        config=Config(engine=DDP()),
        mixed_precision="fp16",
        dataloader_config=utils.DataLoaderConfiguration(
            split_batches=True, dispatch_batches=True, use_seedable_sampler=True, data_seed=3
        ),
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False),
        kwargs_handlers=[
            utils.DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True),
            utils.GradScalerKwargs(init_scale=1024.0),
            utils.InitProcessGroupKwargs(timeout=timedelta(seconds=60)),
        ],
    ).config
    assert config.engine == DDP(find_unused_parameters=True)
    assert config.precision == FP16(init_scale=1024.0)
    assert (config.accumulation, config.timeout_s) == (4, 60.0)
    asked = ShardLoaders(split_batches=True, dispatch=True, seed=3, ends_window=False, whole_batches=True)
    assert config.loaders == asked
