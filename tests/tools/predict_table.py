"""Predicted beside measured, and beside what others say: ``python -m tests.tools.predict_table`` prints Markdown.

Measured are real torch and DeepSpeed objects after one optimizer step, under a fake process group; the models are
drawn and small, so that every rank's storages can be counted. The second table has what the functions behind
``accelerate estimate-memory`` and DeepSpeed's ``estimate_zero*_model_states_mem_needs`` give for the same cases and
for the shapes of Llama.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from math import prod

from prepkit.config import BF16, DDP, FSDP1, FSDP2, AdamW, Config, DeepSpeed
from prepkit.findings.text import in_bytes
from prepkit.predict import predict
from prepkit.predict.prediction import Category, Prediction
from tests.support.fork_server import ROOT
from tests.support.llama_facts import fsdp2, llama
from tests.support.measure_zero import model as drawn_model
from tests.support.measured_bytes import Row

SEEDS = 9
STAGES = ("1", "2", "3")
MIDDLE = 64
"""The world size of the measured rows of the second table."""


def rows() -> Iterator[Row]:
    for engine in ("DDP", "FSDP1", "FSDP2", "TensorParallel"):
        yield from rows_of("measure_under_fake_group", engine, str(SEEDS))
    for stage in STAGES:
        yield from rows_of("measure_zero", str(stage))


@cache
def rows_of(module: str, *words: str) -> tuple[Row, ...]:
    """What a process of its own measured."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "PREPKIT_BUILD_OPS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.support.{module}", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    return tuple(Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{"))


def measured() -> Iterator[str]:
    """One line per engine: what was compared, how often, at which sizes, and the largest difference."""
    yield "| engine | compared after one real step | numbers | world sizes | largest difference |"
    yield "|---|---|--:|---|--:|"
    found: dict[str, list[Row]] = {}
    for row in rows():
        if row.exact:
            found.setdefault(engine_of(row), []).append(row)
    for engine, some in found.items():
        worst = max(abs(row.predicted - row.measured) for row in some)
        sizes = ", ".join(map(str, sorted({row.world for row in some})))
        compared = dict.fromkeys(row.what for row in some)
        never = [what for what in compared if not any(row.measured for row in some if row.what == what)]
        names = [f"{what} (none)" if what in never else what for what in compared]
        yield f"| {engine} | {', '.join(names)} | {len(some):,} | {sizes} | {worst} B |"


def engine_of(row: Row) -> str:
    """The engine of a case, which begins with it or with its seed."""
    words = row.case.split()
    if not words[0].isdigit():
        return " ".join(words[:3])
    cut = next((word for word in words if word.startswith("cut")), "cut1")
    return words[1] if cut == "cut1" else f"{words[1]} over cut layers"


STATES: tuple[Category, ...] = ("parameters", "gradients", "master weights", "optimizer state", "buckets")
"""What the other estimators mean to give."""


def states(made: Prediction) -> int:
    """Bytes of model states of the fullest rank."""
    return sum(made.fullest.category(one) for one in STATES)


def deepspeed_says(numels: list[int], stage: int, world: int) -> int:
    """Bytes on the device as DeepSpeed's own function gives them, without offload."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as three
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as two

    per_node = min(world, 8)
    ranks = {"num_gpus_per_node": per_node, "num_nodes": world // per_node, "cpu_offload": False}
    if stage == 2:
        return int(two(sum(numels), **ranks)[1])
    return int(three(sum(numels), max(numels), cpu_offload_params=False, **ranks)[1])


def accelerate_says(numels: list[int], precision: str) -> int | str:
    """Bytes for training with Adam as ``accelerate estimate-memory`` gives them, whatever the ranks."""
    if find_spec("accelerate") is None:
        return "not installed"
    from accelerate.commands.estimate import estimate_training_usage

    return int(max(estimate_training_usage(4 * sum(numels), precision).values()))


CLUSTERS = (("8B", 512), ("70B", 64), ("70B", 512))
"""Llama and ranks of the second table."""


def beside() -> Iterator[str]:
    """Model states of a rank for measured cases, and for Llama: predicted, measured, and what others say."""
    others = "DeepSpeed's estimator | `accelerate estimate-memory`"
    yield f"| model | parameters | engine | ranks | measured | predicted | {others} |"
    yield "|---|--:|---|--:|--:|--:|--:|--:|"
    yield from small()
    for name, world in CLUSTERS:
        numels = [prod(param.shape) for param in llama(name).params]
        for engine in (DDP(), FSDP1(), FSDP2(), *(DeepSpeed(stage=stage, micro_batch=1) for stage in (1, 2, 3))):
            made = predict(fsdp2(name, world, Config(engine=engine, precision=BF16(), optimizer=AdamW())))
            stage = engine.stage if isinstance(engine, DeepSpeed) else None
            words = (f"Llama {name}", sum(numels), f"ZeRO {stage}" if stage else made.engine, world)
            says = deepspeed_says(numels, stage, world) if stage in (2, 3) else ""
            yield line(words, "", states(made), says, accelerate_says(numels, "bfloat16"))


def small() -> Iterator[str]:
    """What was measured of one drawn model under ZeRO, after the step: all of it but module buffers and counters."""
    for stage in (2, 3):
        cases = [row for row in rows_of("measure_zero", str(stage)) if row.world == MIDDLE and row.rank == 0]
        (held,) = (r for r in cases if r.case.endswith("bf16 seed 0 x1") and r.what == "everything before the step")
        numels = [param.numel() for param in drawn_model(0).parameters()]
        words = ("drawn", sum(numels), f"ZeRO {stage}", held.world)
        says = deepspeed_says(numels, stage, held.world)
        yield line(words, held.measured, held.predicted, says, accelerate_says(numels, "bfloat16"))


def line(words: tuple[str, int, str, int], *numbers: int | str) -> str:
    """One row of Markdown; numbers that are not there stay empty."""
    name, count, engine, world = words
    cells = (in_bytes(one) if isinstance(one, int) else one for one in numbers)
    return f"| {name} | {count:,} | {engine} | {world:,} | {' | '.join(cells)} |"


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed says on stdout that it found none
    print("\n".join(measured()), end="\n\n", flush=True)
    print("\n".join(beside()))


if __name__ == "__main__":
    main()
