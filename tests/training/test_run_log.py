"""What a run prints, shows and logs: on the main process alone, by trackers of any kind."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import prepkit as pk
from tests.support import library_doubles
from tests.support.gang import Gang


def prepared(loaders: list[Any] | None = None, **options: Any) -> Any:
    cfg = pk.Config(optimizer=pk.optim.AdamW(), **options)
    return pk.apply(pk.build_plan(cfg, nn.Linear(2, 2), loaders=loaders or []))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_hold_what_was_logged_at_which_step_and_go_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "log.jsonl"
    ready = prepared()
    ready.log.to(pk.track.JsonLines(str(path)))
    ready.log({"loss": torch.tensor(2.5), "norm": None, "of": "epoch 0"})
    ready.backward(ready.model(torch.ones(1, 2)).sum())
    ready.step()
    ready.log({"loss": 1})
    ready.log({"loss": 0.5}, step=7)
    assert len(lines(path)) == 3, "on the disk before close"
    ready.close()
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    again = prepared()
    again.log.to(pk.track.JsonLines(str(path)))
    again.log({"loss": 3.0}, step=8)
    again.close()
    assert lines(path) == [
        {"step": 0, "loss": 2.5, "of": "epoch 0"},
        {"step": 1, "loss": 1},
        {"step": 7, "loss": 0.5},
        {"step": 8, "loss": 3.0},
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [(torch.ones(3), r"has shape \[3\]; log single values"), ([1.0], "is of list; log numbers")],
)
def test_what_is_no_single_value_is_refused(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"'loss' {said}"):
        prepared().log({"loss": value})


def test_what_is_no_tracker_or_has_no_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepared()
    with pytest.raises(TypeError, match=r"'runs/7' cannot be logged to; give pk.track.JsonLines"):
        ready.log.to("runs/7")
    monkeypatch.setattr("prepkit.training.trackers.PACKAGES", {pk.track.WandB: "no_such_package_here"})
    with pytest.raises(ModuleNotFoundError, match="WandB needs no_such_package_here: pip install"):
        ready.log.to(pk.track.WandB(project="x"))


class Recorder:
    """Takes any call, and keeps it with its arguments."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, *args, *sorted(kwargs.items())))

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The packages that write values elsewhere, recorded."""
    made: list[tuple[Any, ...]] = []

    def start(*args: Any, **kwargs: Any) -> Recorder:
        made.append(("start", *args, *sorted(kwargs.items())))
        return Recorder(made)

    library_doubles.install(monkeypatch, "wandb", init=start)
    library_doubles.install(monkeypatch, "tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=start))
    recorder = Recorder(made)
    verbs = ("set_experiment", "start_run", "log_params", "log_metrics", "end_run")
    library_doubles.install(monkeypatch, "mlflow", **{verb: getattr(recorder, verb) for verb in verbs})
    monkeypatch.setattr("prepkit.training.trackers.importlib.util.find_spec", sys.modules.get)
    return made


SPECS = {
    "wandb": pk.track.WandB(project="gpt", id="run7"),
    "tensorboard": pk.track.TensorBoard(folder="runs"),
    "mlflow": pk.track.MLflow(experiment="gpt", name="7"),
}


@pytest.mark.parametrize("name", SPECS)
def test_each_tracker_is_called_as_its_package_wants(calls: list[tuple[Any, ...]], name: str) -> None:
    ready = prepared(accumulation=2)
    ready.loop.steps = 3  # as after a resume
    ready.log.to(SPECS[name])
    ready.log({"loss": torch.tensor(0.5), "of": "epoch 0"})
    ready.close()
    started, logged, ended = calls[:-2], calls[-2], calls[-1]
    match name:
        case "wandb":
            (call,) = started
            given = dict(call[1:])
            config = given.pop("config")
            assert given == {"id": "run7", "name": None, "project": "gpt", "resume": "allow"}
            assert (config["accumulation"], config["engine.kind"]) == (2, "Single")
            assert logged == ("log", {"loss": 0.5, "of": "epoch 0"}, ("step", 3))
            assert ended == ("finish",)
        case "tensorboard":
            assert started[0] == ("start", "runs", ("purge_step", 4))
            assert "    accumulation = 2" in started[1][2]
            assert (logged, ended) == (("add_scalar", "loss", 0.5, 3), ("close",))
        case "mlflow":
            assert started[0] == ("set_experiment", "gpt")
            assert started[1] == ("start_run", ("run_id", None), ("run_name", "7"))
            assert started[2][1]["accumulation"] == "2"
            assert (logged, ended) == (("log_metrics", {"loss": 0.5}, ("step", 3)), ("end_run",))


def test_any_function_that_makes_a_tracker_will_do(calls: list[tuple[Any, ...]]) -> None:
    ready = prepared()
    ready.log.to(lambda: Recorder(calls))
    ready.log({"loss": 1.0})
    ready.close()
    ready.close()
    assert calls == [("log", {"loss": 1.0}, ("step", 0)), ("finish",)], "finished once"


def test_prints_and_bars_are_seen_and_a_bar_begins_where_a_resumed_pass_does() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(24.0).reshape(12, 2), batch_size=3)
    ready = prepared([loader])
    out = io.StringIO()
    ready.ranks.print("epoch", 1, sep="-", file=out)
    assert out.getvalue() == "epoch-1\n"
    batches = iter(ready.loaders[0])
    next(batches)
    state = ready.loaders[0].state_dict()
    again = prepared([loader])
    again.loaders[0].load_state_dict(state)
    bar = again.ranks.progress(again.loaders[0], desc="epoch 0", disable=False, file=out)
    assert (bar.initial, bar.total) == (1, 4)
    assert len(list(bar)) == 3
    assert bar.n == 4
    assert "epoch 0: 100%" in out.getvalue()
    assert again.ranks.progress(again.loaders[0], disable=False, file=out).initial == 0, "the next pass is a whole one"


def quiet(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Each rank calls everything once but for the main one's other calls, which are nobody else's business."""
    del world
    opened: list[int] = []

    def tracker() -> Recorder:
        opened.append(rank)
        return Recorder([])

    loader = torch.utils.data.DataLoader(torch.arange(24.0).reshape(12, 2), batch_size=3)
    cfg = pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapRoot()), optimizer=pk.optim.AdamW())
    ready = pk.apply(pk.build_plan(cfg, nn.Linear(2, 2), loaders=[loader]))
    out = io.StringIO()
    ready.log.to(pk.track.JsonLines(f"{folder}/log.jsonl"), tracker)
    ready.log({"loss": float(rank)})
    ready.ranks.print("from", rank, file=out)
    list(ready.ranks.progress(ready.loaders[0], disable=False, file=out))
    if rank == 0:
        ready.log({"loss": 9.0})
        ready.ranks.print("alone", file=out)
    param = next(ready.model.parameters())
    assert isinstance(param, DTensor)
    with pytest.raises(TypeError, match="is a DTensor, which ranks read together"):
        ready.log({"norm": param.sum()})
    ready.close()
    return {"opened": opened, "said": out.getvalue(), "main": ready.ranks.is_main}


def test_only_the_main_process_writes_and_nobody_waits_for_it(gang2: Gang, tmp_path: Path) -> None:
    main, other = gang2.run_fresh(quiet, str(tmp_path))
    assert other == {"opened": [], "said": "", "main": False}
    assert (main["opened"], main["main"]) == ([0], True)
    assert main["said"].startswith("from 0\n")
    assert "2/2" in main["said"]
    assert "alone" in main["said"]
    assert lines(tmp_path / "log.jsonl") == [{"step": 0, "loss": 0.0}, {"step": 0, "loss": 9.0}]


def test_a_file_that_holds_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes, without a newline")
    with pytest.raises(ValueError, match="is no file of JSON lines: it ends with b'my notes"):
        pk.track.JsonLines(str(notes)).open(0, {})
    assert notes.read_text() == "my notes, without a newline"


def test_what_json_has_no_number_for_is_a_word_that_float_reads(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    ready = prepared()
    ready.log.to(pk.track.JsonLines(str(path)))
    ready.log({"nan": torch.tensor(float("nan")), "up": float("inf"), "down": float("-inf"), "loss": 1.0})
    ready.close()

    def no_constant(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads(path.read_text(), parse_constant=no_constant)
    assert line == {"step": 0, "nan": "NaN", "up": "Infinity", "down": "-Infinity", "loss": 1.0}
    assert [float(line["up"]), float(line["down"])] == [float("inf"), float("-inf")]
    assert float(line["nan"]) != float(line["nan"])


@pytest.mark.parametrize(
    ("values", "step", "error", "said"),
    [
        (None, None, TypeError, r'takes values under their names, and not None; write {"loss": loss}'),
        (2.5, None, TypeError, "takes values under their names, and not 2.5"),
        ({3: 1.0}, None, TypeError, "3 is no name"),
        ({"step": 5, "loss": 1.0}, None, ValueError, r"write ready.log\({...}, step=...\)"),
        ({"loss": 1.0}, 2.5, TypeError, "step=2.5 is no step; give a whole number"),
        ({"loss": 1.0}, True, TypeError, "step=True is no step"),
    ],
)
def test_what_cannot_stand_in_a_log_is_refused_with_what_to_write(
    tmp_path: Path, values: Any, step: Any, error: type[Exception], said: str
) -> None:
    ready = prepared()
    ready.log.to(pk.track.JsonLines(str(tmp_path / "log.jsonl")))
    with pytest.raises(error, match=said):
        ready.log(values, step=step)
    ready.close()
    assert lines(tmp_path / "log.jsonl") == []


def test_nothing_is_logged_to_twice(
    tmp_path: Path, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ready = prepared()
    ready.log.to(pk.track.JsonLines("log.jsonl"), pk.track.TensorBoard(folder="runs"), pk.track.WandB(project="gpt"))
    for again in (
        pk.track.JsonLines(str(tmp_path / "log.jsonl")),
        pk.track.TensorBoard(folder="./runs"),
        pk.track.WandB(project="b"),
    ):
        with pytest.raises(ValueError, match=r"is where ready.log writes already"):
            ready.log.to(again)
    with pytest.raises(ValueError, match=r"is where ready.log writes already"):
        ready.log.to(pk.track.JsonLines("b.jsonl"), pk.track.JsonLines("./b.jsonl"))
    assert not (tmp_path / "b.jsonl").exists()
    one = Recorder(calls)
    with pytest.raises(ValueError, match="given by a function, is logged to already"):
        ready.log.to(lambda: one, lambda: one)
    assert calls[-1] == ("finish",), "what was opened is closed again"
    ready.log.to(pk.track.JsonLines("b.jsonl"))
    ready.log({"loss": 1.0})
    ready.close()
    assert lines(tmp_path / "log.jsonl") == lines(tmp_path / "b.jsonl") == [{"step": 0, "loss": 1.0}]


def test_a_function_that_makes_no_tracker_is_named_with_what_it_gave() -> None:
    ready = prepared()

    def forgot_to_return() -> None:
        return None

    with pytest.raises(TypeError, match=r"forgot_to_return.* gave None, which has no log and no finish; let it return"):
        ready.log.to(forgot_to_return)  # type: ignore[arg-type]  # on purpose
    ready.log({"loss": 1.0})
