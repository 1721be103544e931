"""ZeRO under a fake process group: DeepSpeed's own objects after a step of a plan, for a process of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.config import BF16, AsStored, Config, DeepSpeed
from prepkit.facts import Env
from prepkit.interpreter import Done, interpret
from prepkit.live.handlers import HANDLERS
from prepkit.live.observe import observe
from prepkit.live.target import Target
from prepkit.plan import Plan
from prepkit.planner import plan
from prepkit.predict import predict
from prepkit.steps import Agree, StartProcessGroup
from tests.predict.drawn import LM
from tests.predict.measure import TOKENS, Row, held

SMALL, BUCKET = 100, 50_000
"""Threshold of parameters that stay, and elements of the reduce bucket."""
WORLD = 64


def model(seed: int) -> LM:
    """Odd sizes; at odd seeds the first block is frozen."""
    torch.manual_seed(seed)
    made = LM(vocab=101 + seed, width=19 + 2 * seed, inner=(31 + seed, 47, 31 + seed), tied=False, bias=seed % 2 == 0)
    for name, param in made.named_parameters():
        param.requires_grad_(requires_grad=seed % 2 == 0 or not name.startswith("blocks.0."))
    return made


def planned(made: LM, optimizer: torch.optim.Optimizer, stage: int, *, half: bool) -> Plan:
    settings = {"reduce_bucket_size": BUCKET}
    settings |= {"stage3_param_persistence_threshold": SMALL} if stage == 3 else {}
    own = {"zero_optimization": settings, "zero_allow_untested_optimizer": True}
    engine = DeepSpeed(stage=stage, micro_batch=2, config=own)  # type: ignore[arg-type]
    cfg = Config(engine=engine, precision=BF16() if half else AsStored())
    env = Env(world_size=WORLD, device="cpu", torch=torch.__version__, libraries=(("deepspeed", "0.19.8"),))
    found = plan(cfg, observe(made, optimizer=optimizer, env=env).facts)
    assert found.value_or(None) is not None, found.failure()
    return found.unwrap()


def rows(seed: int, rank: int, stage: int, *, half: bool) -> list[Row]:
    made = model(seed)
    held_by = [param for param in made.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(held_by)
    laid = planned(made, optimizer, stage, half=half)
    params = list(made.parameters())
    target = Target(model=made, optimizer=optimizer)
    steps = tuple(p.step for p in laid.steps if not isinstance(p.step, StartProcessGroup | Agree))
    outcome = interpret(steps, HANDLERS, target)
    assert isinstance(outcome, Done), str(outcome)
    engine: Any = target.model
    zero = engine.optimizer
    _step(engine)  # from the second step on it is always the same
    with counted() as sent:
        engine.backward(engine(TOKENS).float().square().mean())
        grads = _gradients(zero, stage)
        engine.step()
    mine = predict(laid).at(rank)
    found = _measured(zero, params, stage) | ({"gradients": grads} if grads else {})
    what = {term.what: term.bytes for term in mine.terms}
    expected = {name: mine.category(name) for name in found if name != "persistent"}  # type: ignore[arg-type]
    expected["optimizer state"] = next((v for k, v in what.items() if k.startswith("of AdamW")), 0)
    if stage == 3:
        expected["persistent"] = what.get("small ones, whole on every rank", 0)
        expected["parameters"] -= expected["persistent"]
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        expected[kind] = sum(one.bytes for one in predict(laid).traffic if one.collective == kind)
    found |= {kind: sent[kind] for kind in ("all-reduce", "all-gather", "reduce-scatter")}
    case = f"DeepSpeed ZeRO {stage} {'bf16' if half else 'fp32'} seed {seed}"
    return [
        Row(case=case, world=WORLD, rank=rank, what=name, predicted=value, measured=found[name], exact=True)
        for name, value in expected.items()
    ]


def _step(engine: Any) -> None:
    engine.backward(engine(TOKENS).float().square().mean())
    engine.step()


WATCHED = {
    "all_reduce": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "all_gather_single": ("all-gather", 0),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "reduce_scatter_single": ("reduce-scatter", 1),
}
"""Functions of ``torch.distributed`` that DeepSpeed calls, with the place of the whole buffer."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes of the whole buffers of DeepSpeed's collectives; norms and flags of a few elements are left out."""
    import deepspeed.comm.comm as comm

    sent: Counter[str] = Counter()

    def watched(real: Any, kind: str, place: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[place] if len(args) > place else list(kwargs.values())[place]
            if given.numel() > 8:
                sent[kind] += given.numel() * given.element_size()
            return real(*args, **kwargs)

        return call

    backend: Any = comm.cdb
    bound = {name: getattr(backend, name) for name in ("all_gather_function", "reduce_scatter_function")}
    reals = {name: getattr(dist, name) for name in WATCHED if hasattr(dist, name)}
    for name, real in reals.items():
        setattr(dist, name, watched(real, *WATCHED[name]))
    for name, real in bound.items():
        kind = "all-gather" if "gather" in name else "reduce-scatter"
        setattr(backend, name, watched(real, kind, 0 if kind == "all-gather" else 1))
    try:
        yield sent
    finally:
        for name, real in reals.items():
            setattr(dist, name, real)
        for name, real in bound.items():
            setattr(backend, name, real)


def _gradients(zero: Any, stage: int) -> int:
    if stage == 2:
        parts = [tensor for some in zero.averaged_gradients.values() for tensor in some or ()]
        return sum(part.numel() * part.element_size() for part in parts)  # views of the bucket until the step
    return held([zero.grad_partitions_flat_buffer]) if stage == 3 else 0


def _measured(zero: Any, params: list[torch.nn.Parameter], stage: int) -> dict[str, int]:
    inner = getattr(zero, "optimizer", zero)
    states = [state for state in inner.state.values() if state]
    moments = sum(s[name].numel() * s[name].element_size() for s in states for name in ("exp_avg", "exp_avg_sq"))
    if stage == 3:
        return {
            "parameters": sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in params),
            "master weights": held(zero.fp32_partitioned_groups_flat),
            "persistent": sum(p.ds_numel * p.element_size() for p in params if p.ds_persist),
            "buckets": held(b.buffer for b in zero.ipg_buckets.values() if b.buffer is not None),
            "optimizer state": moments,
        }
    flat = getattr(zero, "bit16_groups_flat", None) or getattr(zero, "bf16_groups_flat", ())
    masters = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_groups_flat_partition
    frozen = sum(p.numel() * p.element_size() for p in params if not p.requires_grad)
    return {"parameters": held(flat) + frozen, "master weights": held(masters), "optimizer state": moments}


def main(stages: list[int]) -> None:
    logging.disable(logging.WARNING)
    for stage in stages:
        rank = 0 if stage == 3 else WORLD - 1  # stage 3 compares its ranks
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1"
        )
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        for seed in range(4):  # padding to twice the ranks shows only where an odd number of parts is needed
            for half in (True, False):
                for row in rows(seed, rank, stage, half=half):
                    print(json.dumps(asdict(row)))
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main([int(word) for word in sys.argv[1:]])
