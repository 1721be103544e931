"""Tables of ratios: ``make bench``, or ``python -m tests.benchmarks plan imports apply``."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.rivals import has_accelerate
from tests.benchmarks.weights import loading
from tests.benchmarks.worlds import worlds
from tests.support.launch import torchrun

ROUNDS = 10
STEPS = 48
"""Pairs of steps: one step differs from the next by a quarter, and one part in a hundred is to be seen."""


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def plan() -> Table:
    """``build_plan`` against a bare walk over the same model, on meta."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import prepkit as pk

    def llama(layers: int) -> torch.nn.Module:
        wide = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
        heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
        with torch.device("meta"):
            return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **wide, **heads))

    def experts(count: int) -> torch.nn.Module:
        def block() -> torch.nn.Module:
            return torch.nn.ModuleDict({"up": torch.nn.Linear(8, 8), "down": torch.nn.Linear(8, 8)})

        with torch.device("meta"):
            return torch.nn.ModuleList(torch.nn.ModuleList(block() for _ in range(64)) for _ in range(count // 192))

    table = Table(title="build_plan against a bare walk over modules and parameters")
    for column in ("model", "modules", "walk, ms", "build_plan, ms", "ratio", "plan file, kB"):
        table.add_column(column, justify="left" if column == "model" else "right")
    models = {
        "Llama 70B": llama(80),
        "25,000-module experts": experts(25_000),
        "50,000-module experts": experts(50_000),
    }
    for name, model in models.items():
        cfg = pk.Config(engine=pk.FSDP2())
        env = pk.Env.declare(world_size=512, per_node=8)
        made = pk.build_plan(cfg, model, env=env)
        walks, plans = [], []
        for _ in range(3):
            walks.append(seconds(lambda m=model: (list(m.named_modules()), list(m.named_parameters()))))
            plans.append(seconds(lambda m=model, c=cfg, e=env: pk.build_plan(c, m, env=e)))
        walk, built = min(walks), min(plans)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            pk.save(made, str(path))
            size = path.stat().st_size / 1000
        count = f"{sum(1 for _ in model.modules()):,}"
        table.add_row(name, count, f"{walk * 1e3:.1f}", f"{built * 1e3:.0f}", f"{built / walk:.1f}", f"{size:.0f}")
    return table


def imports() -> Table:
    """Fresh interpreters: ``import prepkit`` and ``prepkit show`` against ``import torch``."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        _save_small_plan(path)
        python = [sys.executable, "-c"]
        commands = {
            "import torch": [*python, "import torch"],
            "import prepkit": [*python, "import prepkit"],
            "prepkit show": [sys.executable, "-m", "prepkit", "show", path],
            "python alone": [*python, "pass"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                run = lambda c=command: subprocess.run(c, check=True, stdout=subprocess.DEVNULL)  # noqa: E731  # timed
                times[name].append(seconds(run))
    table = Table(title=f"fresh interpreters, best of {ROUNDS}")
    for column in ("command", "s", "against import torch"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for name, taken in times.items():
        table.add_row(name, f"{min(taken):.3f}", f"{min(taken) / min(times['import torch']):.3f}")
    return table


def _save_small_plan(path: str) -> None:
    import torch

    import prepkit as pk

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    pk.save(pk.build_plan(pk.Config(engine=pk.FSDP2()), model, env=pk.Env.declare(world_size=8)), path)


FIGURES = (
    ("seconds", "the first apply of a process, its imports included, s"),
    ("busy", "likewise, CPU s of rank 0"),
    ("again", "the second, s"),
    ("peak", "rank 0, MiB above start"),
    ("other peak", "rank 1, MiB above start"),
    ("step", "step, s"),
)


def apply(engines: tuple[str, ...] = ("fsdp2", "fsdp1", "ddp", "tensor")) -> Table:
    """``apply`` and a step against hand-written torch: two gloo processes, 162 million float32 parameters.

    From a plan in hand to a model that trains, as a user has it: what is imported meanwhile counts, byte code cached.
    """
    table = Table(title=f"two processes, 162M-parameter Llama, median of {ROUNDS} runs in turn (minimum)")
    for column in ("engine", "figure", "by hand", "prepkit", "ratio", "accelerate"):
        table.add_column(column, justify="left" if column in ("engine", "figure") else "right")
    for engine in engines:
        ways = ("hand", "prepkit", *(("accelerate",) if engine == "fsdp2" and has_accelerate() else ()))
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, results in runs.items():
                results.append(_launch(engine, way))
        for figure, unit in FIGURES:
            found = {way: [run.get(figure, 0.0) for run in results] for way, results in runs.items()}
            pairs = zip(found["hand"], found["prepkit"], strict=True)
            ratio = statistics.median(b / a for a, b in pairs) if min(found["hand"]) > 0 else float("nan")
            rival = _both(found["accelerate"]) if "accelerate" in found else ""
            table.add_row(engine, unit, _both(found["hand"]), _both(found["prepkit"]), f"{ratio:.3f}", rival)
        ours = runs["prepkit"]
        if engine not in ("zero1", "zero3"):
            table.add_row(engine, "of it verification, %", "", _both([run["verified"] for run in ours]))
        ratio = statistics.median(run["step"] / run["step by hand"] for run in ours)
        inner, outer = (_both([run[name] for run in ours]) for name in ("step by hand", "step"))
        table.add_row(engine, "step of the prepared objects, s", inner, outer, f"{ratio:.3f}")
    return table


def _both(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f})"


def deepspeed() -> Table:
    """The same against a hand-written ``deepspeed.initialize``."""
    return apply(("zero1", "zero3"))


def _launch(engine: str, way: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        script = ["-m", "tests.benchmarks.worker", engine, way, str(out)]
        cached = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run([*torchrun(2), *script], check=True, timeout=300, env=cached)
        result: dict[str, float] = json.loads(out.read_text())
        return result


def autocast() -> Table:
    """A step with the planned autocast forward against ``torch.autocast`` around the class's own forward.

    In turn, on one model with one optimizer: where the weights lie in memory makes 4 % between two equal models.
    """
    import torch

    import prepkit as pk
    from tests.benchmarks.worker import llama

    tokens = torch.randint(32000, (1, 64), generator=torch.Generator().manual_seed(0))
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ready = pk.apply(pk.build_plan(pk.Config(precision=pk.BF16(), device="cpu"), model, optimizer=optimizer))

    def by_hand() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = type(model).forward(model, input_ids=tokens, labels=tokens).loss
        loss.float().backward()
        optimizer.step()
        optimizer.zero_grad()

    def prepared() -> None:
        ready.backward(ready.model(input_ids=tokens, labels=tokens).loss)
        ready.step()

    ways, times = {"hand": by_hand, "prepkit": prepared}, {"hand": list[float](), "prepkit": list[float]()}
    for way in ways.values():
        way()
    for round_ in range(STEPS):
        for name in sorted(ways, reverse=round_ % 2 == 0):  # each goes first as often as the other
            times[name].append(seconds(ways[name]))
    table = Table(title=f"bf16 step of a 162M-parameter Llama, median of {STEPS} in turn (minimum)")
    for column in ("by hand, s", "prepkit, s", "ratio"):
        table.add_column(column, justify="right")
    cells = (f"{statistics.median(taken):.3f} ({min(taken):.3f})" for taken in times.values())
    ratio = statistics.median(b / a for a, b in zip(times["hand"], times["prepkit"], strict=True))
    table.add_row(*cells, f"{ratio:.3f}")
    return table


def _loop() -> Table:
    from tests.benchmarks.loop import loop

    return loop()


def fingerprints() -> Table:
    """Fingerprints of 64 MiB against a copy of the same bytes, and looks for drift against the steps between them."""
    import torch

    import prepkit as pk
    from prepkit.observe.fingerprints.tensor import fingerprint, fingerprint_sum
    from tests.benchmarks.worker import llama

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else int
    table = Table(title=f"fingerprints on {device}, {torch.get_num_threads()} threads, best of {ROUNDS}")
    for column in ("what", "copy, GB/s", "fingerprint, GB/s", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    size = 2**26 if device == "cpu" else 2**32
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        tensor = torch.zeros(size, dtype=torch.uint8, device=device).view(dtype)
        rows = tensor.view(1024, -1)
        cut = rows[:, : rows.shape[1] // 2].contiguous()
        ways = {
            "copy": lambda t=tensor: (t.clone(), wait()),
            "run": lambda t=tensor: fingerprint(t),
            "box": lambda t=cut, w=rows.shape[1]: int(fingerprint_sum(t, 0, ((1024, 0, w), (w // 2, 0, 1)))),
        }
        best = {name: min(seconds(way) for _ in range(ROUNDS)) for name, way in ways.items()}
        for name, of in (("run", size), ("box", size // 2)):
            rates = 2 * size / best["copy"] / 1e9, of / best[name] / 1e9
            shape = "whole, or cut along dim 0" if name == "run" else "cut along dim 1"
            table.add_row(f"{dtype}, {shape}", f"{rates[0]:.1f}", f"{rates[1]:.2f}", f"{rates[1] / rates[0]:.3f}")
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    audit = pk.audit(model, optimizer)
    look = min(seconds(audit.drift) for _ in range(ROUNDS))
    table.add_row("162M-parameter Llama: audit.drift() on one rank, ms", "", f"{look * 1e3:.2f}", "")
    every = min(seconds(lambda: pk.fingerprints(model)) for _ in range(3))
    table.add_row("162M-parameter Llama: all fingerprints, s", "", f"{every:.2f}", "")
    return table


TABLES: dict[str, Callable[[], Table]] = {
    "plan": plan,
    "imports": imports,
    "apply": apply,
    "deepspeed": deepspeed,
    "autocast": autocast,
    "worlds": worlds,
    "loading": loading,
    "loop": _loop,
    "fingerprints": fingerprints,
}


if __name__ == "__main__":
    if unknown := [name for name in sys.argv[1:] if name not in TABLES]:
        sys.exit(f"{', '.join(unknown)}: no such table; there are {', '.join(TABLES)}")
    for chosen in sys.argv[1:] or TABLES:
        Console().print(TABLES[chosen]())
