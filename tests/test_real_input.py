"""The examples on real input, small, on two processes: what they log, write and say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.gang import Gang

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

PLOT = "plot in" if importlib.util.find_spec("matplotlib") else "no plot: matplotlib is not installed; pip install"

CASES = {
    "causal_lm": ("fsdp2", 8, "loss", ()),
    "digits": ("ddp", 25, "loss", ("sklearn",)),
    "lora": ("fsdp2", 8, "loss", ("peft", "transformers")),
    "qlora": ("fsdp2", 8, "loss", ("peft", "transformers", "bitsandbytes")),
    "clip": ("fsdp2", 25, "loss", ("sklearn", "transformers")),
    "streaming": ("ddp", 8, "loss", ("datasets",)),
    "distillation": ("ddp", 8, "divergence", ()),
    "gan": ("ddp", 30, "critic", ("sklearn",)),
}
"""Example to engine, steps, the value that falls, and what it needs."""


def said(rank: int, world: int, example: str, folder: str, engine: str, steps: int) -> str:
    """What an example prints on this rank."""
    del rank, world
    sys.path.insert(0, str(EXAMPLES))
    config = str(EXAMPLES / "engines" / f"{engine}.toml")
    sys.argv = [example, "--folder", folder, "--config", config, "--steps", str(steps)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("example", CASES)
def test_an_example_on_real_input_learns_logs_and_plots(gang2: Gang, tmp_path: Path, example: str) -> None:
    engine, steps, falls, needs = CASES[example]
    for module in needs:
        pytest.importorskip(module)
    folder = tmp_path / "run"
    main, other = gang2.run_fresh(said, example, str(folder), engine, steps, timeout=100)
    assert f"{steps} steps" in main
    assert PLOT in main
    assert other == ""
    assert (folder / "log.png").exists() == (PLOT == "plot in")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    curve = {line["step"]: line[falls] for line in lines if falls in line}
    assert sorted(curve) == list(range(1, steps + 1))
    assert min(curve.values()) < 0.95 * curve[1]  # a critic gets worse again as its generator gets better
    if example in ("lora", "qlora"):
        held = {path.name for path in (folder / "adapter").iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= held
