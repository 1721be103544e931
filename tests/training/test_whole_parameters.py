"""What no unit shards trains as in one process: single numbers, as CLIP's ``logit_scale``, and ignored modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, normalize

import prepkit as pk
from prepkit.objects.whole_gradients import average
from prepkit.steps import ShardUnits
from tests.support.gang import Gang

WIDTH, MICRO, WINDOWS = 6, 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = torch.relu(self.linear(x)) * self.gain
        return x + changed


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Clip(nn.Module):
    """Two towers, a projection, and the scale of their product: what CLIP is."""

    def __init__(self, *, freezes: bool = False) -> None:
        super().__init__()
        self.vision, self.text = Tower(), Tower()
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.vision.requires_grad_(not freezes)

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        seen, read = self.vision(images), self.projection(self.text(texts))
        return self.logit_scale.exp() * normalize(seen, dim=-1) @ normalize(read, dim=-1).T


def batch(reader: int, micro: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(100 * reader + micro)
    return torch.randn(4, WIDTH, generator=drawn), torch.randn(4, WIDTH, generator=drawn)


def loss_of(logits: Tensor) -> Tensor:
    return cross_entropy(logits, torch.arange(4))


def seeded(*, freezes: bool) -> Clip:
    torch.manual_seed(0)
    return Clip(freezes=freezes)


def by_hand(*, freezes: bool, readers: int = 2) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses of all micro-batches, the values in the end, and the norms before clipping, of one process."""
    model = seeded(freezes=freezes)
    held = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(held, lr=0.05)
    losses, norms = [], []
    for window in range(WINDOWS):
        for micro in range(window * MICRO, (window + 1) * MICRO):
            for reader in range(readers):
                loss = loss_of(model(*batch(reader, micro)))
                losses.append(loss.item())
                (loss / readers / MICRO).backward()  # type: ignore[no-untyped-call]  # torch has no types
        norms.append(float(nn.utils.clip_grad_norm_(held, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach() for name, param in model.named_parameters()}, norms


def config(engine: pk.FSDP2, **more: Any) -> pk.Config:
    return pk.Config(
        engine=engine, optimizer=pk.optim.AdamW(lr=0.05), accumulation=MICRO, clip=pk.ClipNorm(0.5), **more
    )


def windows(ready: Any, rank: int, first: int, last: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for micro in range(first * MICRO, last * MICRO):
        loss = loss_of(ready.model(*batch(rank, micro)))
        losses.append(loss.item())
        ready.backward(loss)
        if ready.step():
            norms.append(float(ready.grad_norm))
    return losses, norms


def values(model: nn.Module) -> dict[str, Tensor]:
    params = {name.replace("_orig_mod.", ""): param.detach() for name, param in model.named_parameters()}
    return {
        name: param.full_tensor() if isinstance(param, DTensor) else param.clone() for name, param in params.items()
    }


def trained(rank: int, world: int, engine: pk.FSDP2, freezes: bool, folder: str) -> Any:
    """Half of the windows, a checkpoint, and the other half by what has resumed it: losses, values, norms, kinds."""
    del world
    ready = pk.apply(pk.build_plan(config(engine), seeded(freezes=freezes)))
    losses, norms = windows(ready, rank, 0, WINDOWS // 2)
    ready.save(f"{folder}/saved")
    ready.close()
    torch.manual_seed(5)
    ready = pk.apply(pk.build_plan(config(engine), Clip(freezes=freezes)))
    ready.resume(f"{folder}/saved")
    more, others = windows(ready, rank, WINDOWS // 2, WINDOWS)
    after = values(ready.model)
    ready.export(f"{folder}/whole")
    whole = [name for name, param in ready.model.named_parameters() if not isinstance(param, DTensor)]
    told = [one.rule for one in ready.attestation.asked if one.moment == "before the first step"]
    ready.close()
    return losses + more, after, norms + others, whole, told


SCALARS = [f"{tower}.layers.{index}.gain" for tower in ("vision", "text") for index in range(2)]


@pytest.mark.parametrize("freezes", [False, True])
def test_what_stays_whole_trains_saves_resumes_and_exports_as_in_one_process(
    gang2: Gang, tmp_path: Path, freezes: bool
) -> None:
    engine = pk.FSDP2(ignored=("vision", "projection")) if freezes else pk.FSDP2()
    expected, weights, norms = by_hand(freezes=freezes)
    found = gang2.run(trained, engine, freezes, str(tmp_path), timeout=90)
    for rank, (losses, after, clipped, whole, told) in enumerate(found):
        assert losses == pytest.approx(expected[rank::2], abs=1e-5)
        assert clipped == pytest.approx(norms, rel=1e-4)
        for name, value in weights.items():
            torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-4)
        assert {"logit_scale", *SCALARS} <= set(whole)
        assert ("projection.weight" in whole, "vision.layers.0.linear.weight" in whole) == (freezes, freezes)
        assert len(told) == 11
    for name, value in load_file(tmp_path / "whole" / "model.safetensors").items():
        torch.testing.assert_close(value, weights[name], atol=1e-5, rtol=1e-4)


def without_prepared(rank: int, world: int) -> tuple[float, float]:
    """The scale after a loop of one's own with an optimizer made by hand, and what it becomes in one process."""
    model = seeded(freezes=True)
    ready = pk.apply(pk.build_plan(pk.Config(engine=pk.FSDP2(), overrides=("optimizer.none",)), model))
    optimizer = torch.optim.SGD(ready.model.parameters(), lr=0.5)
    loss_of(ready.model(*batch(rank, 0))).backward()  # type: ignore[no-untyped-call]  # torch has no types
    optimizer.step()
    after = float(model.logit_scale)
    ready.close()
    alone = seeded(freezes=True)
    for reader in range(world):
        (loss_of(alone(*batch(reader, 0))) / world).backward()  # type: ignore[no-untyped-call]  # torch has no types
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    return after, float(alone.logit_scale)


def missing(rank: int, world: int) -> list[list[float] | None]:
    """The averages where all ranks have a gradient, where rank 0 alone has one, and where nobody has."""
    del world
    params = tuple(nn.Parameter(torch.zeros(2)) for _ in range(3))
    params[0].grad = torch.full((2,), rank + 1.0)
    if rank == 0:
        params[1].grad = torch.full((2,), 4.0)
    for _ in range(2):  # an average stays what it is
        average(params, (dist.group.WORLD,))
    return [None if param.grad is None else param.grad.tolist() for param in params]


def test_gradients_are_averaged_in_a_loop_of_ones_own_and_where_ranks_have_others(gang2: Gang) -> None:
    for after, alone in gang2.run(without_prepared):
        assert after == pytest.approx(alone, abs=1e-6)
    assert gang2.run(missing) == [[[1.5, 1.5], [2.0, 2.0], None]] * 2


class Norms(nn.Module):
    """A convolution with a batch norm behind it, in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(3 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def normed(rank: int, world: int) -> tuple[list[float], list[float], list[str], int]:
    """Losses in bfloat16 and in float32 by one process, dtypes of the statistics, and units in float32."""
    torch.manual_seed(0)
    cfg = pk.Config(engine=pk.FSDP2(), precision=pk.BF16(), optimizer=pk.optim.SGD(lr=0.1))
    ready = pk.apply(pk.build_plan(cfg, Norms()))
    torch.manual_seed(0)
    alone = Norms()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    mine, expected = [], []
    for step in range(3):
        for reader in range(world):
            x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(10 * reader + step))
            loss = loss_of(alone(x))
            (loss / world).backward()  # type: ignore[no-untyped-call]  # torch has no types
            if reader == rank:
                expected.append(loss.item())
                own = loss_of(ready.model(x))
                mine.append(own.item())
                ready.backward(own)
                ready.step()
        optimizer.step()
        optimizer.zero_grad()
    dtypes = [str(buffer.dtype) for name, buffer in ready.model.named_buffers() if name.endswith("running_mean")]
    units = [u for one in ready.plan.steps if isinstance(one.step, ShardUnits) for u in one.step.units]
    ready.close()
    return mine, expected, dtypes, sum(unit.full_precision for unit in units)


def test_batch_norms_stay_in_float32_beside_units_in_bfloat16(gang2: Gang) -> None:
    for mine, expected, dtypes, full in gang2.run(normed):
        assert mine == pytest.approx(expected, abs=0.05)
        assert dtypes == ["torch.float32"] * 2
        assert full == 2


def filled(rank: int, world: int, path: str) -> list[str]:
    """Parameters that are not those of the file, or of rank 0, in a model that is on meta elsewhere."""
    del world
    wanted = values(seeded(freezes=False))
    wrong = []
    for weights in (pk.LoadWeights(path), pk.BroadcastWeights()):
        with torch.device("meta"):
            model = Clip()
        if rank == 0 and isinstance(weights, pk.BroadcastWeights):
            model = seeded(freezes=False)
        cfg = pk.Config(engine=pk.FSDP2(ignored=("projection",)), weights=weights, optimizer=pk.optim.SGD())
        ready = pk.apply(pk.build_plan(cfg, model))
        found = values(ready.model)
        wrong += [name for name, value in wanted.items() if not torch.equal(found[name], value)]
        ready.close()
    return wrong


def test_what_stays_whole_gets_its_values_from_a_file_or_from_rank_0(gang2: Gang, tmp_path: Path) -> None:
    save_file(values(seeded(freezes=False)), tmp_path / "clip.safetensors")
    assert gang2.run(filled, str(tmp_path / "clip.safetensors"), timeout=90) == [[], []]
