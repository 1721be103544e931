"""Many layouts at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from prepkit import planner
from prepkit.cli import options as cli_options
from prepkit.config import (
    BF16,
    FSDP1,
    FSDP2,
    AdamW,
    Config,
    DeepSpeed,
    Mesh,
    OffloadToCPU,
    TPLayer,
    TPPlan,
    WrapRoot,
)
from prepkit.facts import parse_bytes
from prepkit.planner.budget import bounds
from prepkit.planner.sweep import ENGINES, sweep, sweep_text
from prepkit.predict import predict
from prepkit.rules.mesh import strategy
from prepkit.testing.tiny import tiny_loader
from tests.cli.test_terminal import NO_TORCH
from tests.support.command_line import MAKE, fresh, run, workplace
from tests.support.llama_facts import facts

ZERO = tuple(name for name in ENGINES if name.startswith("zero"))
CFG = Config(engine=FSDP2(), optimizer=AdamW())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


def test_every_row_is_what_the_plan_of_that_layout_predicts() -> None:
    seen = facts("8B", 1, memory="80GB")
    found, refused = sweep(CFG, seen, (6, 8), tuple(ENGINES))
    assert {(row.engine, row.world_size, row.replicate, row.shard) for row in found} == {
        *(("ddp", world, world, 1) for world in (6, 8)),
        *(
            (name, world, world // size, size)
            for name in ("fsdp1", "fsdp2", "fsdp2+offload")
            for world, sizes in ((6, (2, 3, 6)), (8, (2, 4, 8)))
            for size in sizes
        ),
        *((name, world, 1 if "3" in name else world, world if "3" in name else 1) for name in ZERO for world in (6, 8)),
    }
    assert {one.engine for one in refused} == {"single", "fsdp2+tensor", "tensor"}  # the model says no cuts
    for row in found:
        mesh = Mesh(replicate=row.replicate, shard=row.shard) if "fsdp" in row.engine else None
        engine = ENGINES[row.engine]
        engine = strategy(engine, hybrid=row.replicate > 1) if isinstance(engine, FSDP1) else engine
        engine = evolve(engine, micro_batch=1) if isinstance(engine, DeepSpeed) else engine
        cfg = evolve(CFG, engine=engine, mesh=mesh)
        env = evolve(seen.env, world_size=row.world_size, memory=None)
        made = predict(planner.plan(cfg, evolve(seen, env=env)).unwrap())
        assert (row.floor, row.ceiling) == bounds(made)
        assert (row.sent, row.copied, row.empty_ranks) == (made.sent, made.copied, made.empty_ranks)


def test_zero_rows_have_the_stage_and_the_offload_of_their_name_and_the_options_of_the_configs_own() -> None:
    bucket: dict[str, object] = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    cfg = Config(engine=DeepSpeed(micro_batch=3, config=bucket), optimizer=AdamW(), precision=BF16())
    seen = facts("8B", 1)
    found, refused = sweep(cfg, seen, (64,), ZERO)
    assert refused == ()
    own = {row.engine: row for row in found}
    usual = {row.engine: row for row in sweep(evolve(cfg, engine=FSDP2()), seen, (64,), ZERO)[0]}
    assert list(own) == [name for name in own if name in ZERO]
    assert set(own) == set(usual) == set(ZERO)
    assert all(usual[name].ceiling > own[name].ceiling for name in ZERO if name != "zero1")  # which has no bucket
    assert usual["zero3"].floor < usual["zero2"].floor < usual["zero1"].floor
    for name in ZERO:
        if "offload" in name:
            kept = name.partition("+")[0]
            assert (usual[name].host > 10**9, usual[name].floor < usual[kept].floor) == (True, True)
    assert usual["zero3+offload-all"].floor < usual["zero3+offload"].floor


def test_what_no_formula_knows_is_refused_and_not_left_out() -> None:
    cfg = Config(engine=DeepSpeed(config={"zero_optimization": {"zero_hpz_partition_size": 8}}), optimizer=AdamW())
    found, refused = sweep(cfg, facts("8B", 1), (64,), ("zero3",))
    assert found == ()
    assert refused[0].why == "everything: no formulas here know zero_hpz_partition_size"


def test_layers_are_cut_over_the_neighbours_that_divide_them() -> None:
    cuts = TPPlan(
        (
            *(TPLayer(f"model.layers.*.mlp.{name}_proj", "colwise") for name in ("gate", "up")),
            TPLayer("model.layers.*.mlp.down_proj", "rowwise"),
        )
    )
    cfg, seen = evolve(CFG, tp_plan=cuts), facts("8B", 1, per_node=4)
    found, refused = sweep(cfg, seen, (8,), ("fsdp2+tensor", "tensor"))
    laid = {(row.engine, row.replicate, row.shard, row.tensor) for row in found}
    assert laid == {
        ("fsdp2+tensor", 1, 4, 2), ("fsdp2+tensor", 2, 2, 2), ("fsdp2+tensor", 1, 2, 4), ("tensor", 1, 1, 8)
    }  # fmt: skip
    assert refused == ()
    for row in found:
        mesh = Mesh(replicate=row.replicate, shard=row.shard, tensor=row.tensor) if row.engine != "tensor" else None
        env = evolve(seen.env, world_size=8)
        laid_out = evolve(cfg, engine=ENGINES[row.engine], mesh=mesh)
        made = predict(planner.plan(laid_out, evolve(seen, env=env)).unwrap())
        assert (row.floor, row.ceiling, row.sent) == (*bounds(made), made.sent)
        assert made.tensor == row.tensor


def test_what_is_sent_in_part_is_ranked_behind_what_is_known_in_full_and_says_so() -> None:
    cuts = TPPlan((TPLayer("model.layers.*.mlp.gate_proj", "colwise", output_layout="replicate"),))
    found, refused = sweep(evolve(CFG, tp_plan=cuts), facts("8B", 1), (8,), ("tensor", "fsdp2"))
    assert [row.engine for row in found[-2:]] == ["fsdp2", "tensor"]
    (cut,) = (row for row in found if row.engine == "tensor")
    assert (cut.sent, cut.sent_in_full) == (0, False)
    assert all(row.sent_in_full for row in found[:-1])
    lines = sweep_text(found, refused).splitlines()
    assert "0 B and more" in next(line for line in lines if line.startswith("tensor"))
    assert lines[-3].startswith("and more: what cut layers send follows the tokens of a micro-batch, which --tokens")
    assert "and more" not in sweep_text(found[:-1], refused)


def test_forty_rows_are_shown_unless_more_are_asked_for() -> None:
    found, _ = sweep(CFG, facts("8B", 1), (8,), ("ddp",))
    for rows, more in ((40, ""), (41, "and 1 more; --limit shows them")):
        assert ("--limit" in sweep_text(found[:1] * rows, ())) == bool(more)
        assert more in sweep_text(found[:1] * rows, ())


def test_with_the_tokens_of_a_micro_batch_cut_layers_are_ranked_by_what_they_send() -> None:
    """Each gate's output is gathered, and the gradient of its input added up: 7/8 and 2 x 7/8 of it leave a rank."""
    cuts = TPPlan((TPLayer("model.layers.*.mlp.gate_proj", "colwise", output_layout="replicate"),))
    cfg = evolve(CFG, tp_plan=cuts, accumulation=2)
    found, refused = sweep(cfg, facts("8B", 1), (8,), ("tensor", "ddp"), tokens=8192)
    (cut,) = (row for row in found if row.engine == "tensor")
    assert cut.sent_in_full
    assert cut.sent == 2 * 32 * 4 * 8192 * (14336 * 7 // 8 + 2 * 4096 * 7 // 8)
    assert "and more" not in sweep_text(found, refused)
    assert [row.sent for row in found] == sorted(row.sent for row in found)


def test_sizes_of_a_cluster_are_ranked_each_for_itself() -> None:
    found, _ = sweep(CFG, facts("70B", 1, memory="80GB"), (64, 8), ("ddp", "fsdp2"))
    sizes = [row.world_size for row in found]
    assert sizes == sorted(sizes)
    assert set(sizes) == {8, 64}


def test_what_fits_comes_first_and_then_what_sends_least() -> None:
    found, _ = sweep(CFG, facts("70B", 1, memory="80GB"), (64,), ("ddp", "fsdp2"))
    verdicts = [row.verdict for row in found]
    assert verdicts == sorted(verdicts, key=("fits", "may not fit", "does not fit").index)
    assert len(set(verdicts)) > 1
    sent = [row.sent for row in found if row.verdict == "does not fit"]
    assert sent == sorted(sent)
    memory = parse_bytes("80GB")
    for row in found:
        assert (row.floor > memory, row.ceiling <= memory) == (row.verdict == "does not fit", row.verdict == "fits")


def test_the_configs_own_engine_keeps_its_options() -> None:
    seen = facts("8B", 1)
    own = evolve(CFG, engine=FSDP2(wrap=WrapRoot()))
    (mine,), _ = sweep(own, seen, (2,), ("fsdp2",))
    (usual,), _ = sweep(CFG, seen, (2,), ("fsdp2",))
    assert mine.ceiling > usual.ceiling
    offloads = evolve(CFG, engine=FSDP2(offload=OffloadToCPU()))
    (kept,), _ = sweep(offloads, seen, (2,), ("fsdp2",))
    assert kept == usual


def test_a_number_to_reshard_to_keeps_only_the_meshes_that_allow_it() -> None:
    cfg = evolve(CFG, engine=FSDP2(reshard_after_forward=4))
    found, _ = sweep(cfg, facts("8B", 1), (16,), ("fsdp2",))
    assert {row.shard for row in found} == {8, 16}


def test_a_global_batch_keeps_the_worlds_that_reach_it_and_each_says_its_accumulation() -> None:
    """What a row sends and holds is that of its own accumulation, though the model is gone through once per engine."""
    cfg, loader = evolve(CFG, global_batch=64), tiny_loader(batch_size=4, length=None)
    seen = evolve(facts("8B", 1), loaders=(loader,))
    found, refused = sweep(cfg, seen, (2, 3, 6, 8, 16), ("fsdp2", "zero2", "zero3"))
    wanted = {2: 8, 8: 2, 16: 1}
    assert {(row.engine, row.world_size, row.accumulation) for row in found} == {
        (name, world, steps) for name in ("fsdp2", "zero2", "zero3") for world, steps in wanted.items()
    }
    assert {(one.engine, one.world_size) for one in refused} == {
        (name, world) for name in ("fsdp2", "zero2", "zero3") for world in (3, 6)
    }
    for world, steps in wanted.items():
        alone, _ = sweep(evolve(CFG, accumulation=steps), seen, (world,), ("zero2", "fsdp2"))
        assert {row for row in found if row.world_size == world and row.engine != "zero3"} == set(alone)
    lines = sweep_text(found, refused).splitlines()
    assert lines[0].split()[-1] == "accumulation"
    assert "fsdp2 over 3, 6 ranks: 64 samples are no whole number of micro-batches" in "\n".join(lines)


def test_rows_cost_no_more_where_there_are_more_of_them() -> None:
    def cost(worlds: tuple[int, ...]) -> tuple[float, int]:
        began = time.process_time()
        found, _ = sweep(CFG, facts("8B", 1), worlds, ("fsdp2", "fsdp2+offload", *ZERO))
        return time.process_time() - began, len(found)

    cost((8,))  # what is read and worked out once
    (few_s, few), (many_s, many) = cost(tuple(range(8, 200, 8))), cost(tuple(range(8, 800, 8)))
    assert many > 3 * few
    assert many_s / many < 5 * few_s / few  # side by side, because machines differ; larger worlds divide in more ways


def test_the_table_counts_what_it_leaves_out_and_says_what_was_refused() -> None:
    found, refused = sweep(CFG, facts("8B", 1, memory="80GB"), (8, 64), ("single", "fsdp2"))
    lines = sweep_text(found, refused, limit=3).splitlines()
    assert lines[0].split()[:3] == ["engine", "ranks", "copies"]
    assert f"and {len(found) - 3} more; --limit shows them" in lines
    assert lines[-3].startswith("single over 8, 64 ranks: 8 processes run")
    assert lines[-2].startswith("  fix: ")
    assert lines[-1].endswith("activations are not counted")


def test_the_names_on_the_command_line_are_those_of_the_engines() -> None:
    assert tuple(ENGINES) == cli_options.ENGINES


# --- the command line ----------------------------------------------------------------------------------------------


def test_sweep_prints_the_table_or_json(folder: Path) -> None:
    words = (
        "sweep",
        "fsdp2.toml",
        *MAKE,
        "--world-size",
        "4",
        "--world-size",
        "8",
        "--memory",
        "16GiB",
        "--device",
        "cpu",
    )
    shown = run(*words, "--engine", "fsdp2")
    assert shown.exit_code == 0
    assert "2 x 2" in shown.stdout
    data = json.loads(run(*words, "--json").stdout)
    assert {row["verdict"] for row in data["rows"]} == {"fits"}
    assert [one["engine"] for one in data["refused"]][:2] == ["single", "single"]
    assert run(*words[:-4], "--memory", "0.1KB", "--device", "cpu").exit_code == 1
    assert run(*words, "--engine", "zero9").exit_code == 2


def test_a_global_batch_is_swept_and_checked_with_the_batch_size_that_is_declared(folder: Path) -> None:
    Path("global.toml").write_text('global_batch = 64\nengine = "DDP"\n')
    words = ("global.toml", *MAKE, "--device", "cpu", "--world-size", "3", "--world-size", "8")
    shown = run("sweep", *words, "--engine", "ddp", "--batch-size", "4")
    assert [line.split()[-1] for line in shown.stdout.splitlines() if line.startswith("ddp   ")] == ["2"]
    assert "ddp over 3 ranks: 64 samples" in shown.stdout
    checked = run("check", *words, "--batch-size", "4")
    assert checked.exit_code == 1
    assert "a plan exists for world size 8" in checked.stdout
    untold = run("check", *words)
    assert "global-batch.unknown" in untold.stdout
    assert "or --batch-size 4 on the command line" in untold.stdout, "what was typed above"
    assert "no loader and no --batch-size is given" in run("sweep", *words, "--engine", "ddp").stdout


def test_report_writes_one_page_for_one_plan_or_two(folder: Path) -> None:
    done = run("report", "fsdp2.json", "-o", "page.html", "--memory", "80GiB")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "wrote page.html\n")
    assert Path("page.html").read_text().startswith("<!doctype html>")
    assert run("report", "fsdp2.json", "ddp.json", "-o", "two.html").exit_code == 0
    assert "Differences" in Path("two.html").read_text()
    assert run("report", "one.json", "ddp.json", "fsdp2.json", "-o", "x.html").exit_code == 2
    assert run("report", "one.json", "-o", "no/such/x.html").exit_code == 2


def test_a_plan_that_cannot_fit_is_refused_on_the_command_line_with_what_would(folder: Path) -> None:
    Path("c.toml").write_text('engine = "DDP"\noptimizer = "AdamW"\n')
    done = run("plan", "c.toml", *MAKE, "--world-size", "4", "--device", "cpu", "--memory", "4KB", "--torch", "2.13")
    assert done.exit_code == 1
    assert "error memory.exceeds-device at env.memory: The fullest rank, 0, holds for certain" in done.stderr
    listed = run("rules").stdout
    assert "memory.exceeds-device" in listed
    assert "overrides = ['memory.exceeds-device']" in run("rules", "memory.exceeds-device").stdout


def test_report_does_without_torch(folder: Path) -> None:
    done = fresh("report", "fsdp2.json", "ddp.json", "-o", "two.html", prelude=NO_TORCH)
    assert (done.returncode, done.stderr) == (0, "wrote two.html\n")
