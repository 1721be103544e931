"""A model without values is filled before DeepSpeed gets it, at ZeRO-3 part by part, and learns as the plain one."""

from __future__ import annotations

import ctypes
import gc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import prepkit as pk
from prepkit.applying.step_kinds import handlers
from prepkit.interpreter import Done, interpret
from prepkit.objects.target import Target
from tests.applying.handlers.test_deepspeed import mean
from tests.applying.handlers.test_read_weights import Counting
from tests.benchmarks.worker import memory, reset_peak
from tests.support.deepspeed_cpu import lean
from tests.support.filled_models import FROM, filled, values
from tests.support.fork_server import ForkServers
from tests.support.fragile_model import applied, planned
from tests.support.gang import Gang
from tests.support.meta_models import held, on_meta, saved
from tests.support.transformers_models import build

pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")


def every(rank: int, world: int, cfg: pk.Config, family: str, path: str) -> dict[str, float]:
    """The largest difference of each kind, over all sources of values."""
    lean()
    runs = [filled(rank, world, cfg, family, source, path, 2) for source in FROM]
    return {key: max(run[key] for run in runs) for key in runs[0]}


@pytest.mark.parametrize(("stage", "family"), [(0, "llama-tied"), (2, "llama-tied"), (3, "llama-tied"), (3, "gpt2")])
def test_each_stage_gets_the_values_and_learns_what_the_plain_model_learns(
    gang2: Gang, tmp_path: Path, stage: int, family: str
) -> None:
    cfg = pk.Config(engine=pk.DeepSpeed(stage=stage, micro_batch=2, config={"zero_allow_untested_optimizer": True}))
    for rank in gang2.run(every, cfg, family, saved(tmp_path, family), timeout=120):
        assert rank["values"] == 0
        assert max(rank["loss"], rank["step"]) < 1e-6


def losses(ready: pk.Prepared, rank: int, steps: int) -> list[float]:
    """Mean losses over two ranks of so many steps, each on another order of the batch."""
    batch, found = build("llama-tied")[1], []
    for step in range(steps):
        share = {key: value.roll(step, 0).chunk(2)[rank] for key, value in batch.items()}
        loss = ready.model(**share).loss
        ready.backward(loss)
        assert ready.step()
        found.append(mean(loss))
    return found


def frozen_first_block(model: Any) -> Any:
    for param in model.model.layers[0].parameters():
        param.requires_grad = False
    return model


def plain_losses(path: str, steps: int) -> list[float]:
    """Of one process that has read the same file whole, as the library reads it."""
    model = frozen_first_block(type(build("llama-tied")[0]).from_pretrained(path))
    batch, found = build("llama-tied")[1], []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    for step in range(steps):
        loss = model(**{key: value.roll(step, 0) for key, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def trained_and_resumed(rank: int, world: int, stage: int, path: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses of five steps from files, and of the last two again by a run that was built anew and resumed."""
    del world
    lean()
    cfg = pk.Config(
        engine=pk.DeepSpeed(stage=stage, micro_batch=2),
        weights=pk.LoadWeights(path),
        optimizer=pk.optim.AdamW(lr=1e-2, eps=1e-3),
    )
    ready = pk.apply(pk.build_plan(cfg, frozen_first_block(on_meta("llama-tied")[0])))
    first = losses(ready, rank, 3)
    ready.save(folder)
    again = pk.apply(pk.build_plan(cfg, frozen_first_block(on_meta("llama-tied")[0])))
    again.resume(folder)
    return first + losses(ready, rank, 2), losses(again, rank, 2)


@pytest.mark.parametrize(("stage", "dtype"), [(1, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
def test_losses_are_those_of_the_plain_model_with_the_same_file_and_a_run_goes_on(
    gang2: Gang, tmp_path: Path, stage: int, dtype: torch.dtype
) -> None:
    path = saved(tmp_path, "llama-tied", dtype)
    model = type(build("llama-tied")[0]).from_pretrained(path)
    assert model.dtype == dtype
    expected = plain_losses(path, 3) if dtype == torch.float32 else None
    for ran, again in gang2.run(trained_and_resumed, stage, path, str(tmp_path / "run"), timeout=120):
        if expected:
            assert ran[:3] == pytest.approx(expected, abs=1e-6)
        assert again != pytest.approx(ran[:2], abs=1e-4), "the run has learnt something"
        assert again == pytest.approx(ran[3:], abs=1e-6)


def in_bfloat16(rank: int, world: int, stage: int, path: str) -> tuple[Any, Any]:
    """Losses and float32 master weights of a model that has its values, and of one that reads them."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = []
    for model, weights in (
        (type(build("llama-tied")[0]).from_pretrained(path, dtype=torch.float32), None),
        (on_meta("llama-tied")[0], pk.LoadWeights(path)),
    ):
        lean()
        engine = pk.DeepSpeed(stage=stage, micro_batch=2)
        cfg = pk.Config(
            engine=engine, precision=pk.BF16(), weights=weights, optimizer=pk.optim.AdamW(lr=1e-2, eps=1e-3)
        )
        ready = pk.apply(pk.build_plan(cfg, model.train()))
        inner: Any = ready.unwrap()
        master = safe_get_full_fp32_param(inner.model.embed_tokens.weight)
        found.append((losses(ready, rank, 3), master.float().sum().item(), str(master.dtype)))
        ready.close()
    return found[0], found[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_and_its_float32_copies_come_from_the_file_as_those_of_a_model_with_values(
    gang2: Gang, tmp_path: Path, stage: int
) -> None:
    for kept, read in gang2.run(in_bfloat16, stage, saved(tmp_path, "llama-tied"), timeout=120):
        assert read == kept
        assert read[2] == "torch.float32"


class Uneven(Counting):
    """Parameters that do not divide by the ranks: of one element, of an odd number, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.ones(1))
        self.still = nn.Parameter(torch.ones(7), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "still"):
            nn.init.constant_(self.single, 5.0)
            nn.init.normal_(self.still)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x) * self.single + self.still.sum()
        return made


def uneven_on_meta() -> Uneven:
    """Without values, but for the buffer that nothing computes."""
    with torch.device("meta"):
        model = Uneven()
    for side in (model.left, model.right):
        side.register_buffer("shared", model.left.shared if side is model.right else torch.ones(2))
    return model


def uneven(rank: int, world: int, path: str, config: dict[str, Any]) -> list[str]:
    """Names of what is not as in the whole model, by the source of its values; and what pads parts."""
    del world
    lean()
    bad = []
    for weights in (pk.LoadWeights(path), pk.BroadcastWeights(), pk.InitWeights(3)):
        torch.manual_seed(1)
        whole = Uneven()
        if isinstance(weights, pk.InitWeights):
            whole = uneven_on_meta()
            applied(planned(pk.Config(weights=weights), whole), whole)
        torch.manual_seed(1)
        model = Uneven() if isinstance(weights, pk.BroadcastWeights) and rank == 0 else uneven_on_meta()
        engine = pk.DeepSpeed(stage=3, micro_batch=2, config={"zero_optimization": config})
        ready = pk.apply(
            pk.build_plan(pk.Config(engine=engine, weights=weights, optimizer=pk.optim.SGD(lr=0.1)), model)
        )
        inner: Any = ready.unwrap()
        assert inner.left.shared is inner.right.shared
        expected, there = held(whole), values(ready.model)
        assert set(there) == set(expected)
        assert {n: t.dtype for n, t in there.items()} == {n: t.dtype for n, t in expected.items()}
        wrong = [name for name, tensor in there.items() if not torch.equal(tensor, expected[name])]
        bad += [f"{weights}: {name}" for name in wrong]
        ready.backward(ready.model(torch.rand(2, 3)).sum())
        assert ready.step()
        ready.close()
    return bad


@pytest.mark.parametrize("config", [{}, {"offload_param": {"device": "cpu"}}], ids=str)
def test_parameters_that_do_not_divide_and_buffers_of_every_kind_arrive(
    gang2: Gang, tmp_path: Path, config: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    model, path = Uneven(), str(tmp_path / "uneven.safetensors")
    save_file({k: v.clone() for k, v in model.state_dict().items() if k != "right.shared"}, path)
    assert gang2.run(uneven, path, config, timeout=90) == [[], []]


class Deep(nn.Module):
    """32 blocks of 4 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(32))


MIB = 2**20
M_MMAP_THRESHOLD = -3
"""Of glibc's ``mallopt``: larger blocks are mapped by themselves, and the limit no longer grows with what is freed."""


ZERO_1, ZERO_3 = (pk.DeepSpeed(stage=stage, micro_batch=2) for stage in (1, 3))


def inferred(rank: int, world: int, path: str) -> float:
    """How far from the plain model's outputs."""
    del rank, world
    lean()
    full, batch = build("llama-tied")
    cfg = pk.Config(engine=ZERO_3, weights=pk.LoadWeights(path), intent=pk.Intent.INFERENCE)
    ready = pk.apply(pk.build_plan(cfg, on_meta("llama-tied")[0]))
    with torch.no_grad():
        return float((ready.model(**batch).logits - full(**batch).logits).abs().max())


def test_a_model_from_files_answers_as_the_plain_one(gang2: Gang, tmp_path: Path) -> None:
    assert max(gang2.run(inferred, saved(tmp_path, "llama-tied"), timeout=60)) < 1e-6


def peak(rank: int, world: int, engine: pk.Engine, weights: pk.Weights) -> float:
    """MiB of the process above the start, at most, until the model has its values."""
    del rank, world
    lean()
    with torch.device("meta"):
        model = Deep()
    cfg = pk.Config(engine=engine, weights=weights, optimizer=pk.optim.SGD(lr=0.1))
    steps = [one.step for one in pk.build_plan(cfg, model).steps]
    kinds = [type(step).__name__ for step in steps]
    gc.collect()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)  # a freed block goes back to the system
    reset_peak()
    before = memory("VmRSS")
    outcome = interpret(tuple(steps[: kinds.index("CreateOptimizer")]), handlers(), Target(model=model))
    assert isinstance(outcome, Done), str(outcome)
    return memory("VmHWM") - before


def test_a_rank_of_zero_3_holds_its_parts_and_one_block_and_never_the_whole(
    tmp_path: Path, fork_servers: ForkServers
) -> None:
    """So does one of FSDP1 that initialises."""
    save_file(Deep().state_dict(), tmp_path / "model.safetensors")
    files, new, whole, block = pk.LoadWeights(str(tmp_path)), pk.InitWeights(), 128, 4
    with closing(Gang(2, fork_servers)) as fresh:  # which no test before has left anything in
        assert min(fresh.run(peak, ZERO_1, files, timeout=60)) > 0.95 * whole, "the measure sees a whole model"
        for engine, weights, blocks in ((ZERO_3, files, 1), (ZERO_3, new, 3), (pk.FSDP1(), new, 3)):
            for most in fresh.run(peak, engine, weights, timeout=60):
                assert whole / 2 - 1 < most < whole / 2 + blocks * block, (engine, weights)
