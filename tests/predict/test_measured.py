"""What was predicted is what real torch objects hold and send: a difference of 0 bytes."""

from __future__ import annotations

import json
import random
from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import prepkit as pk
from prepkit.config import BF16, DDP, FSDP1, FSDP2, TensorParallel, TPLayer, TPPlan
from prepkit.predict.ddp import DEFAULT_CAP, FIRST_BUCKET, bucket_sizes
from prepkit.predict.optimizers import OptimizerInputs, state_formula
from prepkit.predict.tensor_parallel import cut_traffic
from tests.support.drawn_models import Case, case, cut
from tests.support.drawn_part import THOROUGH
from tests.support.fork_server import ROOT, ForkServers
from tests.support.gang import Gang
from tests.support.measured_bytes import Row, measure
from tests.support.script import run_script

SEEDS = 8 if THOROUGH else 4
CUT_SEEDS = 3 if THOROUGH else 2
ZERO_WORLDS = (3,)
"""``python -m tests.tools.predict_table`` measures 7, 8, 64 and 512 ranks, and optimizers that DeepSpeed compiles."""


def wrong(rows: list[Row]) -> list[str]:
    return [str(row) for row in rows if not row.holds]


def on_each_rank(rank: int, world: int, cases: list[Case]) -> list[Row]:
    return [row for one in cases for row in measure(one, rank, world)]


def test_ddp_holds_and_sends_what_was_predicted_with_and_without_bucket_views(gang2: Gang) -> None:
    cases = [case(seed, DDP) for seed in range(14)]
    assert {one.cfg.engine.gradient_as_bucket_view for one in cases} == {True, False}  # type: ignore[union-attr]
    for rows in gang2.run(on_each_rank, cases):
        assert wrong(rows) == []
        assert {row.what for row in rows} >= {"parameters", "gradients", "optimizer state", "buckets", "all-reduce"}


def test_fsdp2_holds_and_sends_what_was_predicted_in_both_precisions(gang2: Gang) -> None:
    cases = [case(seed, FSDP2, accumulation=1 + seed % 2) for seed in range(14)]
    assert {type(one.cfg.precision) for one in cases} == {BF16, type(None)}
    for rows in gang2.run(on_each_rank, cases):
        assert wrong(rows) == []
        seen = {row.what for row in rows}
        assert seen >= {"parameters", "gradients", "optimizer state", "gathered units", "all-gather", "reduce-scatter"}
        assert "whole gradients" in seen


def test_fsdp1_holds_and_sends_what_was_predicted_under_every_strategy(gang2: Gang) -> None:
    cases = [case(seed, FSDP1, accumulation=1 + seed % 2) for seed in range(14)]
    assert {one.cfg.engine.sharding for one in cases} == {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"}  # type: ignore[union-attr]
    assert {one.cfg.engine.use_orig_params for one in cases} == {True, False}  # type: ignore[union-attr]
    for rows in gang2.run(on_each_rank, cases):
        assert wrong(rows) == []
        seen = {row.what for row in rows}
        assert seen >= {"parameters", "gradients", "optimizer state", "gathered units", "all-gather", "reduce-scatter"}
        assert seen >= {"whole gradients", "all-reduce"}


def test_cut_layers_hold_and_send_what_was_predicted_alone_and_under_shards(gang2: Gang, gang4: Gang) -> None:
    alone = [cut(case(seed, TensorParallel), 2) for seed in range(4)]
    under = [cut(case(seed, FSDP2, accumulation=1 + seed % 2), 2) for seed in (0, 1)]
    for rows in (*gang2.run(on_each_rank, alone), *gang4.run(on_each_rank, under, timeout=180)):
        assert wrong(rows) == []
        assert {row.what for row in rows} >= {"parameters", "gradients", "optimizer state"}


class Cut(torch.nn.Module):
    """A vocabulary cut by words, two cut pairs of layers, and a head whose output is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(32, 16)
        self.up = torch.nn.ModuleList(torch.nn.Linear(16, 24, bias=False) for _ in range(2))
        self.down = torch.nn.ModuleList(torch.nn.Linear(24, 16, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(16, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        out: torch.Tensor = self.head(x)
        return out


class Sent(TorchDispatchMode):
    """Bytes of the whole buffers of what DTensors send, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.name()
        if name.startswith("_c10d_functional::all_reduce"):
            self.bytes["all-reduce"] += args[0].numel() * args[0].element_size()
        elif name.startswith("_c10d_functional::all_gather_into_tensor"):
            self.bytes["all-gather"] += args[0].numel() * args[0].element_size() * args[1]
        return func(*args, **(kwargs or {}))


def cut_sends(rank: int, world: int) -> tuple[dict[str, int], dict[str, int]]:
    """Predicted and sent in forward and backward of 6 tokens."""
    torch.manual_seed(0)
    layers = (
        TPLayer("words", "rowwise", input_layout="replicate"),
        TPLayer("up.*", "colwise"),
        TPLayer("down.*", "rowwise"),
        TPLayer("head", "colwise", output_layout="replicate"),
    )
    made = pk.build_plan(pk.Config(engine=TensorParallel(), tp_plan=TPPlan(layers)), Cut())
    predicted = cut_traffic(made, 6)
    assert predicted is not None
    ready = pk.apply(made)
    with Sent() as sent:
        ready.model(torch.arange(6).reshape(2, 3)).square().mean().backward()
    return {one.collective: one.bytes for one in predicted}, dict(sent.bytes)


def test_cut_layers_send_what_is_predicted_from_the_tokens(gang2: Gang) -> None:
    for predicted, sent in gang2.run(cut_sends):
        assert predicted == sent
        assert set(sent) == {"all-reduce", "all-gather"}


@pytest.mark.slow
def test_cut_layers_hold_and_send_what_was_predicted_at_other_worlds(fork_servers: ForkServers) -> None:
    rows = staged(fork_servers, "measure_under_fake_group", "TensorParallel", CUT_SEEDS)
    assert wrong(rows) == []
    assert {row.world for row in rows} == {2, 4, 6, 8, 512}
    assert {row.rank for row in rows} >= {0, 1, 2, 3, 4, 5, 7, 256, 511}
    assert {row.what for row in rows} >= {"all-gather", "reduce-scatter", "all-reduce", "whole gradients"}


@pytest.mark.parametrize("cap", [25 << 20, 3 << 20, 1000])
def test_buckets_close_where_torch_closes_them(cap: int) -> None:
    sizes = [random.Random(seed).randint(1, 4 << 20) for seed in range(60)]
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    limits = [FIRST_BUCKET, cap] if cap == DEFAULT_CAP else [cap]
    torch_s, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits)
    assert bucket_sizes(sizes, cap) == [sum(sizes[index] for index in bucket) for bucket in torch_s]


def staged(servers: ForkServers, module: str, *words: object, **environment: str) -> list[Row]:
    """The rows of many cases under a fake process group, from one process of its own."""
    command = ["-m", f"tests.support.{module}", *map(str, words)]
    said = run_script(servers, 1, command, {"PYTHONPATH": str(ROOT), **environment}, 280, ROOT)
    return [Row(**json.loads(line)) for line in said.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["DDP", "FSDP1", "FSDP2"])
def test_ranks_hold_and_send_what_was_predicted_on_first_middle_and_last_ranks_of_any_world(
    engine: str, fork_servers: ForkServers
) -> None:
    rows = staged(fork_servers, "measure_under_fake_group", engine, SEEDS)
    assert wrong(rows) == []
    assert {row.world for row in rows} == {3, 7, 8, 64, 512, 4096}
    assert {row.rank for row in rows} >= {0, 1, 2, 3, 6, 7, 256, 511, 2048, 4095}
    assert any(row.what == "all-reduce" for row in rows), "no case has copies"
    assert {row.what for row in rows} >= {"parameters", "gradients", "optimizer state"}
    assert sum(row.exact for row in rows) > 0.9 * len(rows)


# --- optimizers that need no wrapper -------------------------------------------------------------------------------

SHAPES = ((64, 64), (100,), (333, 77), (4096,))


def _stored(state: dict[str, object]) -> int:
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    return sum(v.untyped_storage().nbytes() for name, v in tensors.items() if not name.startswith("qmap"))


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Lion", "Lion8bit", "Adam8bit", "PagedAdamW8bit"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bitsandbytes_state_is_as_predicted(name: str, shape: tuple[int, ...]) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    param = torch.nn.Parameter(torch.ones(shape))
    optimizer = getattr(optim, name)([param])
    param.grad = torch.ones(shape)
    optimizer.step()
    rule = state_formula(OptimizerInputs(name=name, module=type(optimizer).__module__, groups=()))
    assert rule is not None
    assert rule(shape, shape, 4, 0).bytes == _stored(optimizer.state[param])


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torchao_state_is_as_predicted(name: str, shape: tuple[int, ...]) -> None:
    optim = pytest.importorskip("torchao.optim")
    param = torch.nn.Parameter(torch.ones(shape))
    optimizer = getattr(optim, name)([param])
    buffers = [optimizer._new_buffer(param, signed=signed) for signed in (True, False)]  # stepping would compile
    parts = [getattr(b, part) for b in buffers for part in ("codes", "scale", "qmap") if hasattr(b, part)] or buffers
    rule = state_formula(OptimizerInputs(name=name, module=type(optimizer).__module__, groups=()))
    assert rule is not None
    assert rule(shape, shape, 4, 0).bytes == sum(part.untyped_storage().nbytes() for part in parts)


@pytest.mark.parametrize("shape", [(5,), (7, 3), (2, 3, 4)], ids=str)
def test_adafactor_keeps_a_row_and_a_column(shape: tuple[int, ...]) -> None:
    param = torch.nn.Parameter(torch.ones(shape))
    optimizer = torch.optim.Adafactor([param])
    param.grad = torch.ones(shape)
    optimizer.step()
    rule = state_formula(OptimizerInputs(name="Adafactor", module="torch.optim._adafactor", groups=()))
    assert rule is not None
    state = rule(shape, shape, 4, 0)
    assert state.bytes + state.step == _stored(optimizer.state[param])
    assert state.bytes < 4 * prod(shape) or len(shape) == 1


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_holds_and_sends_what_was_predicted_on_first_middle_and_last_ranks_of_any_world(
    stage: int, fork_servers: ForkServers
) -> None:
    pytest.importorskip("deepspeed")
    rows = staged(fork_servers, "measure_zero", stage, *ZERO_WORLDS, DS_ACCELERATOR="cpu")
    assert wrong(rows) == []
    assert {(row.world, row.rank) for row in rows} == {(n, rank) for n in ZERO_WORLDS for rank in (0, n // 2, n - 1)}
    seen = {row.what for row in rows if row.exact and row.measured}
    assert seen >= {
        "parameters",
        "master weights",
        "optimizer state",
        "everything after the step",
        "everything before the step",
    }
    assert seen >= ({"all-reduce"} if stage < 3 else {"reduce-scatter", "persistent", "buckets", "all-gather"})
    assert sum(row.exact for row in rows) > 0.9 * len(rows)
