"""From files to shards: every rank reads its own bytes, and what is wrong with a file is an error on every rank."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

import prepkit as pk
from prepkit.applying.handlers import allocate, check_files, read_weights
from prepkit.objects.target import Target
from prepkit.ranks.progress import progress
from prepkit.steps import AllocateTensors, LocalDevice, ReadTensors
from tests.support.fragile_model import Tiny, planned
from tests.support.gang import Gang
from tests.support.meta_models import EVERY, ON_FOUR, ON_TWO, close, on_meta, saved, trained, whole
from tests.support.transformers_models import build

# --- the same training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY)
def test_a_meta_model_loaded_into_shards_trains_as_the_full_one(gang2: Gang, tmp_path: Path, family: str) -> None:
    one, several = (saved(tmp_path / name, family, size=size) for name, size in (("one", "1GB"), ("several", "30KB")))
    assert len(list(Path(one).glob("*.safetensors"))) == 1
    assert (Path(several) / "model.safetensors.index.json").exists()
    found = gang2.run(trained, family, [(one, "shards"), (several, "shards")], timeout=120)
    close(found, 2, 1e-6)


def test_checkpointed_and_compiled_blocks_train_as_the_full_model(gang2: Gang, tmp_path: Path) -> None:
    path = saved(tmp_path)
    close(gang2.run(trained, "llama", [(path, case) for case in ON_TWO[1:]], timeout=180), 4, 2e-6)


def test_copies_of_shards_and_cut_layers_train_as_the_full_model(gang4: Gang, tmp_path: Path) -> None:
    path = saved(tmp_path)
    close(gang4.run(trained, "llama", [(path, case) for case in ON_FOUR], timeout=180), 4, 1e-5)


def loaded(rank: int, world: int, path: str, stored: Any, precision: pk.BF16 | None) -> list[str]:
    """Names of the parameters that are not what the files hold."""
    del rank, world
    model, _ = on_meta("llama-tied", stored)
    cfg = pk.Config(engine=pk.FSDP2(), weights=pk.LoadWeights(path), precision=precision or None)
    ready = pk.apply(pk.build_plan(cfg, model))
    files = [load_file(file) for file in Path(path).glob("*.safetensors")]
    values = {key: value for file in files for key, value in file.items()}
    params = dict(ready.model.named_parameters())
    assert "lm_head.weight" not in params, "tied"
    assert {str(p.dtype) for p in params.values()} == {"torch.float32" if precision else str(stored)}
    return [name for name, p in params.items() if not torch.equal(whole(p), values[name].to(p.dtype))]


@pytest.mark.parametrize(
    ("file", "stored", "precision"),
    [
        (torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16, pk.BF16()),
        (torch.float32, torch.bfloat16, None),
        (torch.float16, torch.float32, None),
    ],
)
def test_values_are_cast_on_the_way(gang2: Gang, tmp_path: Path, file: Any, stored: Any, precision: Any) -> None:
    path = saved(tmp_path, "llama-tied", file)
    assert gang2.run(loaded, path, stored, precision) == [[], []]


def test_a_cast_longer_than_the_staging_buffer_is_read_in_several_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_weights, "STAGING", 30)  # no multiple of a row
    path = saved(tmp_path, "llama", torch.bfloat16)
    model, _ = on_meta("llama")
    ready = pk.apply(pk.build_plan(pk.Config(weights=pk.LoadWeights(path)), model))
    full, _ = build("llama")
    assert all(
        torch.equal(p, q.bfloat16().float()) for p, q in zip(ready.model.parameters(), full.parameters(), strict=True)
    )


# --- other engines, other buffers ----------------------------------------------------------------------------------


class Counting(nn.Module):
    """Persistent buffers, one shared by two modules, and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.full((5,), 3.0))
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.left, self.right = nn.Module(), nn.Module()
        self.left.register_buffer("shared", torch.ones(2))
        self.right.register_buffer("shared", self.left.shared)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4.0))
        nn.init.constant_(self.scale, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x)) * self.scale


def counting_file(folder: Path) -> tuple[nn.Module, str]:
    torch.manual_seed(1)
    model = Counting()
    model(torch.rand(8, 3))
    model.left.shared.add_(1)
    path = str(folder / "counting.safetensors")
    save_file({k: v.clone() for k, v in model.state_dict().items() if k != "right.shared"}, path)
    return model, path


def fsdp2_of_counting(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    del rank, world
    with torch.device("meta"):
        model = Counting()
    made = pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=pk.LoadWeights(path)), model)
    ready = pk.apply(made)
    assert ready.model.left.shared is ready.model.right.shared
    return {name: whole(t) for name, t in [*ready.model.named_parameters(), *ready.model.named_buffers()]}


def test_buffers_are_read_whole_computed_or_kept_shared(gang2: Gang, tmp_path: Path) -> None:
    model, path = counting_file(tmp_path)
    expected = {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for found in gang2.run(fsdp2_of_counting, path):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in expected.items())


def test_buffers_that_have_values_keep_them(tmp_path: Path) -> None:
    _, path = counting_file(tmp_path)
    with torch.device("meta"):
        model = Counting()
    model.table = torch.full((4,), 7.0)
    ready = pk.apply(pk.build_plan(pk.Config(weights=pk.LoadWeights(path)), model))
    assert torch.equal(ready.model.table, torch.full((4,), 7.0))


def test_buffers_that_have_values_take_those_of_the_file(tmp_path: Path) -> None:
    """A model that was built with values, and its trained running statistics."""
    expected, path = counting_file(tmp_path)
    model = Counting()
    assert not torch.equal(model.norm.running_mean, expected.norm.running_mean)
    ready = pk.apply(pk.build_plan(pk.Config(weights=pk.LoadWeights(path)), model))
    assert torch.equal(ready.model.norm.running_mean, expected.norm.running_mean)


def ddp_of(rank: int, world: int, path: str) -> bool:
    del rank, world
    model, _ = on_meta("llama-tied")
    optimizer = torch.optim.AdamW(model.parameters())
    ready = pk.apply(
        pk.build_plan(pk.Config(engine=pk.DDP(), weights=pk.LoadWeights(path)), model, optimizer=optimizer)
    )
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    full, batch = build("llama-tied")
    assert ready.model.module.lm_head.weight is ready.model.module.model.embed_tokens.weight
    assert held == {id(p) for p in ready.model.parameters()}
    return torch.equal(ready.model(**batch).loss, full(**batch).loss)


def test_ddp_and_an_optimizer_over_meta_parameters_work_too(gang2: Gang, tmp_path: Path) -> None:
    assert gang2.run(ddp_of, saved(tmp_path, "llama-tied")) == [True, True]


def fsdp2_with_optimizer(rank: int, world: int, path: str) -> int:
    del rank, world
    model, batch = on_meta("llama-tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ready = pk.apply(
        pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=pk.LoadWeights(path)), model, optimizer=optimizer)
    )
    before = [whole(p).clone() for p in ready.model.parameters()]
    ready.backward(ready.model(**batch).loss)
    ready.step()
    return sum(not torch.equal(a, whole(p)) for a, p in zip(before, ready.model.parameters(), strict=True))


def test_an_optimizer_over_a_meta_model_steps_every_parameter(gang2: Gang, tmp_path: Path) -> None:
    count = sum(1 for _ in build("llama-tied")[0].parameters())
    assert gang2.run(fsdp2_with_optimizer, saved(tmp_path, "llama-tied")) == [count, count]


def test_allocating_can_be_taken_back() -> None:
    with torch.device("meta"):
        model = Tiny()
    model.kept = torch.arange(3.0)
    target = Target(model=model)
    step = AllocateTensors(device=LocalDevice(type="cpu"))
    memo = allocate.allocate_do(step, target)
    assert model.head.weight is model.embed.weight
    assert not model.embed.weight.is_meta
    assert torch.equal(model.kept, torch.arange(3.0))
    assert "kept" not in target.unfilled
    assert "passing" in target.unfilled
    allocate.allocate_undo(step, target, memo)
    assert model.head.weight is model.embed.weight
    assert {t.is_meta for t in [*model.parameters(), model.passing]} == {True}
    assert torch.equal(model.kept, torch.arange(3.0))
    assert not target.unfilled


def test_offloaded_shards_are_kept_on_the_host_and_buffers_where_they_are_computed_with() -> None:
    model = Tiny()
    cfg = pk.Config(engine=pk.FSDP2(offload=pk.OffloadToCPU()), weights=pk.BroadcastWeights())
    steps = {
        device: [one.step for one in planned(cfg, model, world=2, device=device).steps] for device in ("cuda", "cpu")
    }
    host, gpu = LocalDevice(type="cpu"), LocalDevice(type="cuda")
    assert AllocateTensors(device=host) in steps["cpu"]
    assert AllocateTensors(device=host, buffers=gpu) in steps["cuda"]
    target = Target(model=model)  # meta stands for a device that is not here
    allocate.allocate_do(AllocateTensors(device=host, buffers=LocalDevice(type="meta")), target)
    assert {t.device.type for t in model.parameters()} == {"cpu"}
    assert {t.device.type for t in model.buffers()} == {"meta"}


def test_what_got_storage_and_no_values_is_found_afterwards(tmp_path: Path) -> None:
    model, _ = on_meta("llama")
    plan = pk.build_plan(pk.Config(weights=pk.LoadWeights(saved(tmp_path))), model)
    steps = tuple(
        evolve(one, step=evolve(one.step, sources=one.step.sources[1:])) if isinstance(one.step, ReadTensors) else one
        for one in plan.steps
    )
    with pytest.raises(
        pk.errors.NotAsPlanned, match=r"everything that was on meta has values: model\.embed_tokens\.weight"
    ):
        pk.apply(evolve(plan, steps=steps))


def test_a_model_on_meta_is_refused_where_nothing_fills_it() -> None:
    model, _ = on_meta("llama")
    with pytest.raises(pk.PlanRejected, match=r"plan\.no-weights.*\n.*LoadWeights\(path\)"):
        pk.apply(pk.build_plan(pk.Config(), model))


# --- bad files -----------------------------------------------------------------------------------------------------


def told(halted: pk.errors.ApplyHalted) -> str:
    return f"{type(halted.__cause__).__name__}: {halted.__cause__}"


def refusal(rank: int, world: int, path: str, harm: str, family: str) -> tuple[str, bool]:
    """What apply raises on this rank when one file is harmed after planning; whether the model is still unsharded."""
    del world
    model, _ = on_meta(family)
    plan = pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=pk.LoadWeights(path)), model)
    file = sorted(Path(path).glob("*.safetensors"))[-1]
    dist.barrier()
    if rank == 0 and harm in HARMS:
        HARMS[harm](file)
    dist.barrier()
    real = check_files._differences
    if rank == 1 and harm == "not here":  # this rank has not mounted the folder
        check_files._differences = lambda file: real(evolve(file, path=file.path.replace(path, "/nowhere")))
    sampled = check_files._sampled
    if rank == 1 and harm == "other values":  # another checkpoint of the same model stands here under the same path
        other = f"{path}-of-rank-1"
        check_files._sampled = lambda file: sampled(evolve(file, path=file.path.replace(path, other)))
    try:
        pk.apply(plan)
    except pk.errors.ApplyHalted as halted:
        return told(halted), not any(hasattr(p, "placements") for p in model.parameters())
    finally:
        check_files._differences, check_files._sampled = real, sampled
    return "", True


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def other_header(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"F32"', b'"I32"', 1))


HARMS = {"cut": cut, "gone": Path.unlink, "other": other_header}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("cut", "RunRefused: error weights.file-changed at {file}: has"),
        ("gone", "RunRefused: error weights.unreadable at {file}: cannot be read: No such file"),
        ("other", "RunRefused: error weights.file-changed at {file}: has another header than when the plan was made"),
        ("not here", "rank 1 of 2 failed: RunRefused: error weights.unreadable at /nowhere/model-00001-of-"),
    ],
)
def test_a_file_that_changed_is_an_error_on_every_rank_before_anything_is_sharded(
    gang2: Gang, tmp_path: Path, harm: str, said: str, family: str
) -> None:
    path = saved(tmp_path, family)
    file = str(sorted(tmp_path.glob("*.safetensors"))[-1])
    found = gang2.run(refusal, path, harm, family, timeout=30)
    for rank, (text, untouched) in enumerate(found):
        own = said.replace("rank 1 of 2 failed: ", "") if rank == 1 else said
        assert own.format(file=file) in text, text
        assert untouched


def test_a_checkpoint_whose_values_are_others_on_one_rank_is_refused_with_file_and_ranks(
    gang2: Gang, tmp_path: Path
) -> None:
    path = saved(tmp_path / "one")
    shutil.copytree(path, f"{path}-of-rank-1")
    file = sorted((tmp_path / "one-of-rank-1").glob("*.safetensors"))[-1]
    bytes_ = bytearray(file.read_bytes())
    bytes_[-1] ^= 1
    file.write_bytes(bytes_)
    for text, untouched in gang2.run(refusal, path, "other values", "llama", timeout=30):
        assert (
            f"weights.files-differ at {path}/{file.name}: has other values on rank 0 and other values on rank 1" in text
        ), text
        assert text.count(".safetensors") == 1, "the files that are alike are not named"
        assert untouched


def cut_while_reading(rank: int, world: int, path: str) -> str:
    del world
    model, _ = on_meta("llama")
    plan = pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=pk.LoadWeights(path)), model)
    if rank == 1:  # this rank's disk, a copy, loses the file after the check
        real = read_weights._pread
        read_weights._pread = lambda number, into, start: (os.truncate(number, start), real(number, into, start))[1]  # type: ignore[assignment]
        os_open, read_weights.os.open = os.open, lambda name, _: os_open(shutil.copy(name, f"{name}.own"), os.O_RDWR)  # type: ignore[assignment]
    try:
        pk.apply(plan)
    except pk.errors.ApplyHalted as halted:
        return told(halted)
    finally:
        if rank == 1:
            read_weights._pread, read_weights.os.open = real, os_open
    return ""


def test_a_file_that_ends_while_it_is_read_is_an_error_on_every_rank_with_file_and_tensor(
    gang2: Gang, tmp_path: Path
) -> None:
    path = saved(tmp_path, size="1GB")
    first, second = gang2.run(cut_while_reading, path, timeout=30)
    assert first.startswith("RankFailed: rank 1 of 2 failed: RunRefused: error weights.unreadable at ")
    assert second.startswith("RunRefused: error weights.unreadable at ")
    for text in (first, second):
        assert "model.safetensors: `" in text
        assert "the file was truncated" in text
        assert "anew" not in text, "what is to be done says the end of the story, which knows what stands"


# --- findings at plan time -----------------------------------------------------------------------------------------


def findings(path: str, family: str = "llama") -> dict[str, str]:
    model, _ = on_meta(family)
    return {
        one.rule: one.what
        for one in pk.check(pk.Config(weights=pk.LoadWeights(path)), model)
        if one.severity == "error"
    }


def test_a_checkpoint_of_another_model_is_refused_at_plan_time_with_names(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama-tied")
    assert findings(path, "llama") == {
        "weights.missing-keys": "The checkpoint lacks 1 tensor of the model: `lm_head.weight`."
    }


def test_a_checkpoint_under_another_prefix_is_recognised(tmp_path: Path) -> None:
    full, _ = build("llama")
    save_file({f"policy.{k}": v for k, v in full.state_dict().items()}, tmp_path / "model.safetensors")
    assert findings(str(tmp_path))["weights.missing-keys"].endswith("They are there under `policy.`.")
    model, batch = on_meta("llama")
    (found,) = (
        one for one in pk.check(pk.Config(weights=pk.LoadWeights(str(tmp_path))), model) if "missing" in one.rule
    )
    assert found.fix == r'Write LoadWeights(path, rename=(("^policy\.", ""),)).'
    cfg = pk.Config(weights=pk.LoadWeights(str(tmp_path), rename=((r"^policy\.", ""),)))
    assert torch.equal(pk.apply(pk.build_plan(cfg, model)).model(**batch).loss, full(**batch).loss)


def test_missing_files_and_a_wrong_index_are_findings(tmp_path: Path) -> None:
    path = saved(tmp_path)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.unlink()
    cut(second)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    key = next(key for key, name in index["weight_map"].items() if name not in (first.name, second.name))
    index["weight_map"]["ghost"] = index["weight_map"][key]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model, _ = on_meta("llama")
    found = [
        one.what for one in pk.check(pk.Config(weights=pk.LoadWeights(path)), model) if one.rule.startswith("weights")
    ]
    assert any(f"`{first.name}` in `{path}`: cannot be read: No such file" in what for what in found)
    assert any(f"`{second.name}` in `{path}`: truncated: it has" in what for what in found)
    assert any("does not hold `ghost`, as the index says; no file does" in what for what in found)


def test_no_checkpoint_at_all_is_one_finding(tmp_path: Path) -> None:
    assert list(findings(str(tmp_path))) == ["weights.unreadable"]
    assert list(findings(str(tmp_path / "nowhere"))) == ["weights.unreadable"]
    (tmp_path / "model.safetensors").write_bytes(b"\x05\x00\x00\x00\x00\x00\x00\x00hello")
    assert "no JSON" in findings(str(tmp_path))["weights.unreadable"]


def test_missing_keys_that_are_accepted_are_initialised(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama-tied")
    model, _ = on_meta("llama")
    cfg = pk.Config(weights=pk.LoadWeights(path), overrides=("weights.missing-keys",))
    ready = pk.apply(pk.build_plan(cfg, model))
    full, _ = build("llama-tied")
    assert torch.equal(ready.model.model.embed_tokens.weight, full.model.embed_tokens.weight)
    assert 0.01 < float(ready.model.lm_head.weight.detach().std()) < 0.03


# --- plan file, progress -------------------------------------------------------------------------------------------


def test_a_saved_plan_reads_what_the_live_one_reads(tmp_path: Path) -> None:
    model, batch = on_meta("llama")
    plan = pk.build_plan(pk.Config(weights=pk.LoadWeights(saved(tmp_path))), model)
    pk.save(plan, str(tmp_path / "plan.json"))
    ready = pk.apply(pk.load(str(tmp_path / "plan.json")), model=model)
    full, _ = build("llama")
    assert torch.equal(ready.model(**batch).loss, full(**batch).loss)


def test_progress_is_shown_on_a_terminal_and_nowhere_else() -> None:
    shown, silent = io.StringIO(), io.StringIO()
    with progress("reading weights", 2048, Console(file=shown, force_terminal=True, width=80)) as advance:
        advance(1024)
    with progress("reading weights", 2048, Console(file=silent, force_terminal=False)) as advance:
        advance(1024)
    assert "reading weights" in shown.getvalue()
    assert silent.getvalue() == ""
