"""One number per parameter under every engine: before and after, saved, resumed, exported and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.fsdp import FullyShardedDataParallel

import prepkit as pk
from prepkit.applying import verification as applied_values
from prepkit.applying.apply import ApplyHalted, NotAsPlanned
from prepkit.observe.fingerprints import fingerprints
from prepkit.observe.fingerprints.parts import Part, parts
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang
from tests.support.transformers_models import build

Numbers = dict[str, str]

TWO: dict[str, dict[str, Any]] = {
    "DDP": {"engine": pk.DDP()},
    "FSDP1": {"engine": pk.FSDP1()},
    "FSDP1, parameters gone": {"engine": pk.FSDP1(use_orig_params=False)},
    "FSDP2 in bfloat16": {"engine": pk.FSDP2(), "precision": pk.BF16()},
    "tensor parallel": {"engine": pk.TensorParallel(), "tp_plan": pk.tp.TPPlanFromModel()},
}
FOUR: dict[str, dict[str, Any]] = {
    "HSDP": {"engine": pk.FSDP2(), "mesh": pk.Mesh(replicate=2, shard=2)},
    "HSDP of FSDP1": {"engine": pk.FSDP1(sharding="HYBRID_SHARD"), "mesh": pk.Mesh(replicate=2, shard=2)},
    "tensor parallel under FSDP2": {
        "engine": pk.FSDP2(),
        "mesh": pk.Mesh(shard=2, tensor=2),
        "tp_plan": pk.tp.TPPlanFromModel(),
    },
}
ZERO: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}": {"engine": pk.DeepSpeed(stage=stage, micro_batch=2)} for stage in range(4)},
    "ZeRO 3 in bfloat16": {"engine": pk.DeepSpeed(stage=3, micro_batch=2), "precision": pk.BF16()},
}
LOW = ("ZeRO 3 in bfloat16",)


@frozen
class Life:
    """What one rank has seen of the weights' numbers."""

    plain: Numbers
    attested: Numbers
    trained: Numbers
    exported: Numbers
    planted: str
    """What a bit says that the last rank flips in its part."""
    resumed: Numbers


def flipped(part: Part, at: int = 0) -> None:
    """One bit of one element of this part."""
    row = part.values.detach().reshape(-1)
    assert row.data_ptr() == part.values.data_ptr()
    row.view(torch.uint8)[at] ^= 1


def said_of_a_flipped_bit(model: Any, rank: int, world: int, true: Numbers) -> str:
    mine = parts(model, masters=True)
    name = next(name for name, part in mine.items() if part.values.numel())
    if rank == world - 1:
        flipped(mine[name])
    try:
        now = pk.fingerprints(model, master_weights=True)
    except pk.RunRefused as error:
        return str(error)
    return f"other numbers: {sum(now[name] != true[name] for name in true)}"


def lives(rank: int, world: int, ways: dict[str, dict[str, Any]], folder: str) -> dict[str, Life]:
    if ways is not None and "ZeRO 0" in ways:
        lean()
    found = {}
    for way, options in ways.items():
        model, batch = build("llama-tied")
        plain = pk.fingerprints(model)
        ready = pk.apply(
            pk.build_plan(pk.Config(optimizer=pk.optim.AdamW(lr=0.01), **options), model), fingerprint=True
        )
        ready.backward(ready.model(**batch).loss)
        ready.step()
        trained = pk.fingerprints(ready.model, master_weights=True)
        ready.save(f"{folder}/{way}")
        ready.export(f"{folder}/{way}, exported")
        dist.barrier()
        exported = pk.fingerprints(f"{folder}/{way}, exported")
        planted = said_of_a_flipped_bit(ready.model, rank, world, trained)
        ready.resume(f"{folder}/{way}")
        resumed = pk.fingerprints(ready.model, master_weights=True)
        found[way] = Life(plain, dict(ready.attestation.fingerprints), trained, exported, planted, resumed)
        ready.close()
    return found


def held(each: list[dict[str, Life]], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    for way, life in each[0].items():
        assert [other[way] for other in each] == [life] * len(each), way
        assert life.trained.keys() == life.plain.keys(), way
        assert all(life.trained[name] != life.plain[name] for name in life.plain), way
        assert life.exported == life.trained == life.resumed, way
        again = AutoModelForCausalLM.from_pretrained(str(folder / f"{way}, exported"), dtype=torch.float32)
        assert pk.fingerprints(again) == life.trained, way
        assert life.planted == "other numbers: 1" or "ranks hold other values of the same weights" in life.planted, way
        if way in LOW:  # the attestation tells what the model computes with
            assert life.attested == pk.fingerprints(build("llama-tied")[0].bfloat16()), way
        else:
            assert life.attested == life.plain, way


def test_two_ranks_have_the_numbers_of_the_whole_model_all_its_life(gang2: Gang, tmp_path: Path) -> None:
    each = gang2.run(lives, TWO, str(tmp_path), timeout=120)
    held(each, tmp_path)
    assert "ranks hold other values" in each[0]["DDP"].planted
    assert each[0]["FSDP1"].planted == each[0]["FSDP2 in bfloat16"].planted == "other numbers: 1"


def opposite(rank: int, world: int) -> tuple[str, ...]:
    """Rank 1 has one more in the bits of an element, and rank 2 one less."""
    model = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0).view(torch.int32)[2, 2] += {1: 1, 2: -1}.get(rank, 0)
    return fingerprints(model).parted


def test_differences_of_two_ranks_do_not_cancel(gang4: Gang) -> None:
    assert gang4.run(opposite) == [("weight",)] * 4


def test_four_ranks_of_two_axes_have_them(gang4: Gang, tmp_path: Path) -> None:
    each = gang4.run(lives, FOUR, str(tmp_path), timeout=120)
    held(each, tmp_path)
    assert "ranks hold other values" in each[0]["HSDP"].planted


def test_the_ranks_of_deepspeed_have_them_at_every_stage(gang2: Gang, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    each = gang2.run(lives, ZERO, str(tmp_path), timeout=240)
    held(each, tmp_path)
    assert each[0]["ZeRO 3"].planted == "other numbers: 1"


def damaged(rank: int, world: int, way: str) -> str:
    """What apply says where a step has changed one bit on the last rank."""
    look = applied_values.fingerprints.fingerprints

    def after_damage(model: Any) -> Any:
        if rank == world - 1:
            flipped(next(part for part in parts(model).values() if part.values.numel()))
        return look(model)

    model, _ = build("llama-tied")
    plan = pk.build_plan(pk.Config(optimizer=pk.optim.AdamW(lr=0.01), **TWO[way]), model)
    applied_values.fingerprints.fingerprints = after_damage
    try:
        pk.apply(plan, fingerprint=True)
    except (NotAsPlanned, ApplyHalted) as wrong:
        return str(wrong)
    finally:
        applied_values.fingerprints.fingerprints = look
    return ""


def test_a_bit_that_a_step_changes_is_a_failed_check_by_name(gang2: Gang) -> None:
    for said in gang2.run(damaged, "DDP", timeout=60):
        assert "run.ranks-values at model.model.embed_tokens.weight" in said
    for said in gang2.run(damaged, "FSDP2 in bfloat16", timeout=60):
        assert "run.values-changed at model.model.embed_tokens.weight: 1 tensor with other values" in said


def of_other_strides(rank: int, world: int) -> tuple[Numbers, Numbers]:
    """A flat parameter has the elements in the order of their strides, and not of their indices."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    model[0].weight = torch.nn.Parameter(torch.randn(5, 3).t())
    assert not model[0].weight.is_contiguous()
    plain = pk.fingerprints(model)
    return plain, pk.fingerprints(FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")))


def test_flat_parameters_of_other_strides_have_the_numbers_of_their_indices(gang2: Gang) -> None:
    for plain, flat in gang2.run(of_other_strides, timeout=60):
        assert flat == plain
        assert len(flat) == 4


def test_alone_every_weight_has_its_number_and_loaded_ones_have_those_of_the_file(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    cfg = pk.Config(intent=pk.Intent.INFERENCE)
    ready = pk.apply(pk.build_plan(cfg, model), fingerprint=True)
    assert dict(ready.attestation.fingerprints) == pk.fingerprints(model)
    assert pk.apply(pk.build_plan(cfg, torch.nn.Linear(2, 2))).attestation.fingerprints == ()
    ready.export(str(tmp_path))
    with torch.device("meta"):
        other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    with pytest.raises(pk.RunRefused, match=r"plan.no-weights at 0\.weight and 3 more"):
        pk.fingerprints(other)
    loading = pk.Config(intent=pk.Intent.INFERENCE, weights=pk.LoadWeights(str(tmp_path)))
    loaded = pk.apply(pk.build_plan(loading, other), fingerprint=True)
    assert dict(loaded.attestation.fingerprints) == pk.fingerprints(tmp_path) == pk.fingerprints(model)
    pk.save(loaded.attestation, str(tmp_path / "a.json"))
    assert pk.load(str(tmp_path / "a.json")) == loaded.attestation


def test_what_has_no_fingerprint_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="weights is 3"):
        pk.fingerprints(3)
    with pytest.raises(FileNotFoundError, match=r"ready\.export or save_pretrained"):
        pk.fingerprints(tmp_path)
