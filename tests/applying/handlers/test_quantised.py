"""Real 4-bit and 8-bit layers of bitsandbytes on the CPU: seen, planned, prepared and trained around."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import prepkit as pk
from prepkit.applying.rehearse import rehearse_here
from prepkit.applying.verification import verify
from prepkit.config import BF16, DDP, FSDP1, FSDP2, AdamW, Config, DeepSpeed, InitWeights, Single
from prepkit.facts import Env
from prepkit.observe import model as observe_devices
from prepkit.observe import observe
from prepkit.observe.model import alike
from prepkit.planner import plan
from prepkit.predict import predict
from prepkit.ranks import launcher
from prepkit.rules import check
from prepkit.steps import MoveModel, ShardUnits, WrapDDP
from prepkit.training.prepared import Prepared
from tests.support.fragile_model import applied, planned
from tests.support.gang import Gang

bnb = pytest.importorskip("bitsandbytes")
WIDE = 64


class Adapted(nn.Module):
    """A frozen packed layer, and a low-rank adapter beside it that is trained."""

    def __init__(self, bits: int, stored: torch.dtype = torch.uint8) -> None:
        super().__init__()
        if bits == 4:
            self.base = bnb.nn.Linear4bit(WIDE, WIDE, bias=False, quant_type="nf4", quant_storage=stored)
        else:
            self.base = bnb.nn.Linear8bitLt(WIDE, WIDE, bias=False, has_fp16_weights=False)
        self.down = nn.Linear(WIDE, 4, bias=False)
        self.up = nn.Linear(4, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def packed(bits: int, stored: torch.dtype = torch.uint8) -> Adapted:
    torch.manual_seed(bits)
    return Adapted(bits, stored).to("cpu")  # which packs


BITS = pytest.mark.parametrize("bits", [4, 8])


def errors(model: nn.Module, cfg: Config, world: int = 1) -> list[str]:
    env = Env(world_size=world, libraries=(("bitsandbytes", "0.50.2"),))
    return [one.rule for one in check(cfg, observe(model, env=env).facts) if one.severity == "error"]


@BITS
def test_packed_layers_are_seen_by_class_and_dtype(bits: int) -> None:
    (base, *_) = observe(packed(bits)).facts.model.params
    assert (base.cls, base.dtype) == (("Params4bit", "uint8") if bits == 4 else ("Int8Params", "int8"))
    assert not base.requires_grad


@BITS
def test_a_layer_that_was_never_moved_is_refused_because_a_move_would_pack_it(bits: int) -> None:
    assert errors(Adapted(bits), Config()) == ["quantised.not-packed"]
    assert errors(packed(bits), Config()) == []


@BITS
def test_flat_parameters_hold_no_packed_weights(bits: int) -> None:
    assert "units.packed" in errors(packed(bits), Config(engine=FSDP1()), world=2)
    assert errors(packed(bits), Config(engine=DDP()), world=2) == []
    assert errors(packed(bits), Config(engine=FSDP2()), world=2) == []


@BITS
def test_weights_that_a_plan_would_make_anew_are_not_packed(bits: int) -> None:
    assert "units.packed" in errors(packed(bits), Config(engine=FSDP2(), weights=InitWeights()), world=2)


@BITS
def test_what_is_packed_is_ignored_and_everything_else_sharded(bits: int) -> None:
    model = packed(bits)
    optimizer = torch.optim.SGD([model.down.weight, model.up.weight], lr=0.1)
    made = planned(Config(engine=FSDP2(), precision=BF16()), model, optimizer, world=2)
    (step,) = (one.step for one in made.steps if isinstance(one.step, ShardUnits))
    assert step.ignored == ("base.weight",)
    lies = {one.name: (one.cls, one.placements) for one in made.layout}
    assert lies["base.weight"] == (("Params4bit", ()) if bits == 4 else ("Int8Params", ()))
    assert lies["up.weight"] == ("DTensor", ("shard(0)",))
    terms = {one.what: one.bytes for one in predict(made).at(1).terms if one.category == "parameters"}
    assert terms["what no unit shards, whole on every rank"] == model.base.weight.numel()
    assert terms["padded shards"] == 2 * 4 * WIDE * 4 // 2


def train(
    rank: int, world: int, bits: int, engine: Any, stored: torch.dtype = torch.uint8
) -> tuple[list[str], bool, bool, list[float]]:
    """Failed checks, whether the bytes are as they were, whether the adapter moved, and the adapter itself."""
    model = packed(bits, stored)
    bytes_ = model.base.weight.detach().clone()
    optimizer = torch.optim.SGD([model.down.weight, model.up.weight], lr=0.1)
    before = model.up.weight.detach().clone()
    made = planned(Config(engine=engine, precision=BF16()), model, optimizer, world=world)
    target = applied(made, model, optimizer)
    failed = [str(one) for one in verify(made, target).failed]
    ready = Prepared(model=target.model, optimizer=optimizer, plan=made)
    ready.backward(ready.model(torch.randn(8, WIDE, generator=torch.Generator().manual_seed(rank))).square().mean())
    assert ready.step()
    inner = ready.unwrap()
    up = inner.up.weight
    moved = up.full_tensor() if isinstance(up, DTensor) else up
    base: Any = inner.base.weight
    if isinstance(base, DTensor):
        assert base.to_local().numel() == bytes_.numel() // world, "a shard of the packed weight"
        base = base.full_tensor()
    else:
        assert type(base).__name__ in ("Params4bit", "Int8Params")
    kept = torch.equal(base.view(torch.uint8), bytes_.view(torch.uint8))
    return failed, kept, not torch.equal(before, moved), moved.flatten()[:4].tolist()


@BITS
def test_an_adapter_beside_packed_weights_trains_and_the_bytes_stay(bits: int) -> None:
    assert train(0, 1, bits, Single())[:3] == ([], True, True)


@BITS
def test_an_adapter_is_averaged_by_ddp_and_the_bytes_stay(gang2: Gang, bits: int) -> None:
    one, other = gang2.run(train, bits, DDP())
    assert one[:3] == other[:3] == ([], True, True)
    assert one[3] == other[3]


@BITS
def test_an_adapter_is_sharded_by_fsdp2_learns_what_ddp_learns_and_the_bytes_stay(gang2: Gang, bits: int) -> None:
    one, other = gang2.run(train, bits, FSDP2())
    assert one[:3] == other[:3] == ([], True, True)
    copied, _ = gang2.run(train, bits, DDP())
    assert one[3] == other[3] == pytest.approx(copied[3], rel=1e-2)  # bfloat16 gathered, or under autocast


STORED = torch.bfloat16
"""Storage of 4-bit weights that is gathered as it is, so that they can be sharded."""


def test_four_bit_weights_in_the_gathered_dtype_are_sharded_and_others_stay_whole_with_a_word() -> None:
    def whole(stored: torch.dtype, precision: Any) -> tuple[tuple[str, ...], list[str]]:
        model = packed(4, stored)
        optimizer = torch.optim.SGD([model.down.weight, model.up.weight], lr=0.1)
        cfg = Config(engine=FSDP2(), precision=precision)
        made = planned(cfg, model, optimizer, world=2)
        (step,) = (one.step for one in made.steps if isinstance(one.step, ShardUnits))
        return step.ignored, [one.rule for one in made.warnings if one.rule == "units.packed-whole"]

    assert whole(STORED, BF16()) == whole(STORED, None) == whole(torch.float32, None) == ((), [])
    for stored, precision in ((torch.uint8, BF16()), (torch.float32, BF16()), (torch.uint8, None)):
        assert whole(stored, precision) == (("base.weight",), ["units.packed-whole"])


def test_shards_of_packed_weights_are_counted_to_the_byte() -> None:
    model = packed(4, STORED)
    optimizer = torch.optim.SGD([model.down.weight, model.up.weight], lr=0.1)
    made = planned(Config(engine=FSDP2(), precision=BF16()), model, optimizer, world=2)
    terms = {one.what: one.bytes for one in predict(made).at(1).terms if one.category == "parameters"}
    assert terms == {"padded shards": (2 * 4 * WIDE * 4 + WIDE * WIDE // 2) // 2}
    assert "what unpacks packed weights: scales and tables" in predict(made).not_predicted
    lies = {one.name: (one.cls, one.placements) for one in made.layout}
    assert lies["base.weight"] == ("DTensor", ("shard(0)",))


def test_packed_weights_are_sharded_by_fsdp2_and_the_adapter_learns_what_ddp_learns(gang2: Gang) -> None:
    one, other = gang2.run(train, 4, FSDP2(), STORED)
    assert one[:3] == other[:3] == ([], True, True)
    copied, _ = gang2.run(train, 4, DDP(), STORED)
    assert one[3] == other[3] == pytest.approx(copied[3], rel=1e-2)  # bfloat16 gathered, or under autocast


def train_with_deepspeed(rank: int, world: int, stage: int | None, stored: torch.dtype) -> tuple[list[float], bool]:
    """Losses of four steps, and whether the packed bytes are as they were. Without a stage: under DDP."""
    model = packed(4, stored)
    bytes_ = model.base.weight.detach().clone()
    engine = DDP() if stage is None else DeepSpeed(stage=stage, micro_batch=8)
    cfg = Config(engine=engine, precision=BF16(), optimizer=AdamW(lr=0.01))
    ready = pk.apply(pk.build_plan(cfg, model))
    losses = []
    for step in range(4):
        x = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(rank + 10 * step))
        loss = ready.model(x).float().square().mean()
        losses.append(float(loss.detach()))
        ready.backward(loss)
        ready.step()
    weight: Any = ready.unwrap().base.weight
    if stage == 3:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        assert weight.ds_tensor.numel() == bytes_.numel() // world, "a shard of the packed weight"
        with GatheredParameters([weight]):
            kept = torch.equal(weight.detach().view(torch.uint8).flatten(), bytes_.view(torch.uint8).flatten())
    else:
        kept = torch.equal(weight.detach().view(torch.uint8), bytes_.view(torch.uint8))
    ready.close()
    return losses, kept


@pytest.mark.parametrize(("stage", "stored"), [(2, torch.uint8), (3, STORED)])
def test_an_adapter_beside_packed_weights_learns_under_zero_what_it_learns_under_ddp(
    gang2: Gang, stage: int, stored: torch.dtype
) -> None:
    for (losses, kept), (plain, _) in zip(
        gang2.run(train_with_deepspeed, stage, stored), gang2.run(train_with_deepspeed, None, stored), strict=True
    ):
        assert kept
        assert losses == pytest.approx(plain, rel=2e-2)
        assert losses != plain[:1] * 4


def test_packed_weights_that_zero_would_cast_or_cannot_partition_are_refused() -> None:
    def refused(stage: int, stored: torch.dtype) -> bool:
        return "deepspeed.packed" in errors(
            packed(4, stored), Config(engine=DeepSpeed(stage=stage), precision=BF16()), 2
        )

    bad = [(3, torch.uint8), (3, torch.float32), (2, torch.float32)]
    fine = [(2, torch.uint8), (2, STORED), (3, STORED)]
    assert [refused(*one) for one in bad] == [True] * 3
    assert [refused(*one) for one in fine] == [False] * 3


@BITS
def test_a_plan_for_packed_weights_is_rehearsed_without_a_difference(bits: int) -> None:
    model = packed(bits)
    optimizer = torch.optim.SGD([model.down.weight, model.up.weight], lr=0.1)
    assert rehearse_here(planned(Config(), model, optimizer), model, optimizer=optimizer).fine
    sharded = planned(Config(engine=FSDP2()), model, optimizer, world=8)
    assert rehearse_here(sharded, model, optimizer=optimizer, rank=5).fine
    if bits == 4:
        model = packed(4, STORED)
        optimizer = torch.optim.SGD([model.down.weight, model.up.weight], lr=0.1)
        sharded = planned(Config(engine=FSDP2()), model, optimizer, world=8)
        assert rehearse_here(sharded, model, optimizer=optimizer, rank=5).fine


# --- device maps ---------------------------------------------------------------------------------------------------


def loaded(device_map: dict[str, object]) -> Any:
    """As transformers leaves a model that was loaded in 4 bits."""
    model: Any = packed(4)
    model.is_loaded_in_4bit, model.hf_device_map = True, device_map
    return model


def test_a_quantised_model_with_a_map_is_not_moved_and_one_without_is() -> None:
    for device_map, moved in (({"": "cpu"}, False), ({}, True)):
        model = loaded(device_map)
        optimizer = torch.optim.SGD([model.down.weight, model.up.weight], lr=0.1)
        env = Env(libraries=(("bitsandbytes", "0.50.2"),))
        facts = observe(model, optimizer=optimizer, env=env).facts
        steps = [type(one.step) for one in plan(Config(), facts).unwrap().steps]
        assert (MoveModel in steps) is moved


def test_a_cpu_device_object_is_seen_as_its_text_is() -> None:
    for device in ("cpu", torch.device("cpu")):
        assert observe(loaded({"": device})).facts.model.device_map == (("", "cpu"),)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("write", [int, "cuda:{}".format, lambda index: torch.device("cuda", index)])
def test_a_map_to_the_rank_s_own_device_is_the_same_fact_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, write: Any
) -> None:
    machine(monkeypatch, rank)
    assert alike([write(rank)]) == ("cuda:local",)
    assert alike([write(rank)] * 2) == ("cuda:local",) * 2
    assert alike([write(rank + 1)]) == (f"cuda:{rank + 1}",)


def machine(monkeypatch: pytest.MonkeyPatch, rank: int, devices: int = 4) -> None:
    monkeypatch.setattr(observe_devices, "_accelerator", lambda: "cuda")
    monkeypatch.setattr(launcher, "local_rank", lambda: rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)


def test_ranks_that_are_spread_over_devices_of_their_own_hold_the_same_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 0)
    assert alike([0, 1, "cpu"]) == alike(["cuda:2", "cuda:3", "cpu"]) == ("cuda:0", "cuda:1", "cpu")


def test_where_each_process_sees_one_device_that_one_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 3, devices=1)
    assert alike(["cuda"]) == alike([0]) == ("cuda:local",)


def test_disk_and_odd_texts_pass_through() -> None:
    assert alike(["disk", "cpu"]) == ("disk", "cpu")
    assert alike(["disk"]) == ("disk",)


def test_ddp_gets_no_device_ids_for_a_model_that_is_kept_spread() -> None:
    model = loaded({"base": "cpu", "down": "meta"})
    del model.is_loaded_in_4bit
    optimizer = torch.optim.SGD([model.down.weight, model.up.weight], lr=0.1)
    made = planned(Config(engine=DDP(), keep_device_map=True), model, optimizer, world=2)
    (step,) = [one.step for one in made.steps if isinstance(one.step, WrapDDP)]
    assert step.device is None
    assert not any(isinstance(one.step, MoveModel) for one in made.steps)
