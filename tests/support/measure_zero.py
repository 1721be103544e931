"""ZeRO under a fake process group: DeepSpeed's own objects after a step of a plan, for a process of its own.

``python -m tests.support.measure_zero 2`` measures stage 2 at every world size, on the first, the middle and the last
rank, in a process for each: DeepSpeed keeps its groups. A fake group carries no data, so two things stand in for the
others: what rank 0 would send is what this rank has, and what they hold of the parameters is zero.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.applying.step_kinds import handlers
from prepkit.config import BF16, Config, DeepSpeed, Precision
from prepkit.facts import Env
from prepkit.interpreter import Done, interpret
from prepkit.objects.target import Target
from prepkit.observe import observe
from prepkit.plan import Plan
from prepkit.planner import plan
from prepkit.predict import predict
from prepkit.predict.prediction import Label, Lifetime, Prediction, RankClass
from prepkit.steps import Agree, StartProcessGroup
from tests.support.deepspeed_cpu import kernel_built, lean
from tests.support.drawn_models import LM
from tests.support.measured_bytes import TOKENS, Row, held

SMALL, BUCKET = 100, 50_000
"""Threshold of parameters that stay, and elements of the reduce bucket."""
WORLDS = (3, 7, 8, 64, 512)
PRECISIONS: dict[str, Precision] = {"bf16": BF16(), "bf16 sums": BF16(reduce_dtype="bfloat16"), "fp32": None}


@frozen(kw_only=True)
class Case:
    """A model, by its seed, and how it is trained. Padding to twice the ranks shows only at some seeds."""

    seed: int
    precision: str
    accumulation: int = 1
    offload: str = ""
    """``state``, ``parameters``, both, or none; with ``torch`` its AdamW is kept where it would be converted."""
    reuse: int | None = None
    """``stage3_max_reuse_distance``."""

    @property
    def compiled(self) -> bool:
        """Whether the optimizer becomes DeepSpeed's own for the CPU."""
        return "state" in self.offload and "torch" not in self.offload

    def __str__(self) -> str:
        away = f" offload {self.offload}" if self.offload else ""
        reuse = f" reuse {self.reuse}" if self.reuse is not None else ""
        return f"{self.precision} seed {self.seed} x{self.accumulation}{away}{reuse}"


CASES = (
    Case(seed=0, precision="bf16"),
    Case(seed=1, precision="bf16", accumulation=2),
    Case(seed=2, precision="fp32"),
    Case(seed=3, precision="fp32", accumulation=2),
    Case(seed=0, precision="bf16 sums"),
    Case(seed=3, precision="bf16 sums", accumulation=3),
    Case(seed=0, precision="bf16", offload="state"),
    Case(seed=1, precision="fp32", accumulation=2, offload="state"),
    Case(seed=2, precision="bf16 sums", accumulation=2, offload="state"),
    Case(seed=3, precision="bf16", accumulation=2, offload="state torch"),
)
THREE = (
    Case(seed=0, precision="bf16", offload="state parameters"),
    Case(seed=1, precision="fp32", accumulation=2, offload="state parameters"),
    Case(seed=2, precision="bf16", accumulation=2, offload="parameters"),
    Case(seed=3, precision="bf16", accumulation=2, reuse=0),
    Case(seed=2, precision="fp32", reuse=12_000),
)
"""Beside the others, at stage 3 only."""


def cases(stage: int) -> tuple[Case, ...]:
    """All of the stage; without those that DeepSpeed would first have to compile its CPU optimizer for."""
    every = (*CASES, *(THREE if stage == 3 else ()))
    return tuple(case for case in every if kernel_built("cpu_adam") or not case.compiled)


def model(seed: int) -> LM:
    """Odd sizes; at odd seeds the first block is frozen."""
    torch.manual_seed(seed)
    made = LM(vocab=101 + seed, width=19 + 2 * seed, inner=(31 + seed, 47, 31 + seed), tied=False, bias=seed % 2 == 0)
    for name, param in made.named_parameters():
        param.requires_grad_(requires_grad=seed % 2 == 0 or not name.startswith("blocks.0."))
    return made


def optimizer_of(made: LM, seed: int) -> torch.optim.Optimizer:
    """AdamW over what is trained; from the third seed on in two groups."""
    trained = [param for param in made.parameters() if param.requires_grad]
    cut = len(trained) // 3 if seed > 1 else 0
    return torch.optim.AdamW([{"params": some} for some in (trained[:cut], trained[cut:]) if some])


def config(case: Case, stage: int) -> Config:
    settings: dict[str, object] = {"reduce_bucket_size": BUCKET}
    settings |= {"stage3_param_persistence_threshold": SMALL} if stage == 3 else {}
    settings |= {"stage3_max_reuse_distance": case.reuse} if case.reuse is not None else {}
    own = {"zero_optimization": settings, "zero_allow_untested_optimizer": True}
    own |= {"zero_force_ds_cpu_optimizer": False} if "torch" in case.offload else {}  # type: ignore[dict-item]
    state, params = ("cpu" if word in case.offload else None for word in ("state", "parameters"))
    engine = DeepSpeed(stage=stage, micro_batch=2, config=own, offload_optimizer=state, offload_param=params)  # type: ignore[arg-type]
    return Config(engine=engine, precision=PRECISIONS[case.precision], accumulation=case.accumulation)


def planned(case: Case, stage: int, made: LM, optimizer: torch.optim.Optimizer, world: int) -> Plan:
    env = Env(world_size=world, device="cpu", torch=torch.__version__, libraries=(("deepspeed", "0.19.8"),))
    found = plan(config(case, stage), observe(made, optimizer=optimizer, env=env).facts)
    assert found.value_or(None) is not None, found.failure()
    return found.unwrap()


def rows(case: Case, stage: int, rank: int, world: int) -> list[Row]:
    gc.collect()
    gc.freeze()
    made = model(case.seed)
    optimizer = optimizer_of(made, case.seed)
    laid = planned(case, stage, made, optimizer, world)
    params = list(made.parameters())
    target = Target(model=made, optimizer=optimizer)
    del optimizer
    steps = tuple(p.step for p in laid.steps if not isinstance(p.step, StartProcessGroup | Agree))
    outcome = interpret(steps, handlers(), target)
    assert isinstance(outcome, Done), str(outcome)
    engine: Any = target.model
    _step(engine, case.accumulation, looks=False)  # from the second step on it is always the same
    after = _all(engine)
    with counted() as sent:
        waiting = _step(engine, case.accumulation)
    measured = _measured(engine.optimizer, params, stage) | dict(sent)
    measured |= {"everything after the step": after, "everything before the step": waiting}
    expected, bounded = _expected(predict(laid), rank, stage)
    return [
        Row(
            case=f"DeepSpeed ZeRO {stage} {case}",
            world=world,
            rank=rank,
            what=name,
            predicted=value,
            measured=measured.get(name, 0),
            exact=name not in bounded,
        )
        for name, value in expected.items()
    ]


def _expected(made: Prediction, rank: int, stage: int) -> tuple[dict[str, int], set[str]]:
    mine = made.at(rank)
    found: dict[str, int] = {name: mine.category(name) for name in ("parameters", "master weights", "optimizer state")}
    if stage == 3:
        found["persistent"] = sum(term.bytes for term in mine.terms if term.what.startswith("small ones"))
        found["parameters"] -= found["persistent"]
        found["buckets"] = mine.category("buckets")
    found["everything after the step"] = _exactly(mine, Lifetime.ALWAYS)
    found["everything before the step"] = _exactly(mine, Lifetime.ALWAYS, Lifetime.STEP)
    bounded = {"everything before the step"} if _retained(mine) else set()
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        some = [one for one in made.traffic if one.collective == kind]
        found[kind] = sum(one.bytes for one in some)
        bounded |= {kind} if any(one.label is not Label.EXACT for one in some) else set()
    return found, bounded


def _exactly(mine: RankClass, *lifetimes: Lifetime) -> int:
    kept = sum(term.bytes for term in mine.terms if term.lifetime in lifetimes and term.label is Label.EXACT)
    return kept + _retained(mine) * (Lifetime.STEP in lifetimes)


def _retained(mine: RankClass) -> int:
    """The bucket that some gradients still lie in: at most all of it."""
    return sum(term.bytes for term in mine.terms if term.what.startswith("the reduce bucket, in which"))


def _step(engine: Any, micro: int, *, looks: bool = True) -> int:
    """One optimizer step; gives the bytes of all that is there before it is stepped."""
    waiting = 0
    for index in range(micro):
        engine.backward(engine(TOKENS).float().square().mean())
        waiting = _all(engine) if looks and index == micro - 1 else 0
        engine.step()
    return waiting


# --- what is held --------------------------------------------------------------------------------------------------

PASSING = ("_global_grad_norm", "inf_or_nan_tracker", "norm_for_param_grads")
"""Attributes of DeepSpeed's optimizer that hold norms and flags, a few bytes each, which nobody counts."""


def storages() -> dict[int, int]:
    """Every storage that some tensor has that was made since ``gc.freeze()``, with its bytes."""
    gc.collect()
    seen = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    seen += [one.grad for one in seen if one.is_leaf and one.grad is not None]
    kept = [one.untyped_storage() for one in seen if one.device.type != "meta"]
    return {one.data_ptr(): one.nbytes() for one in kept if one.nbytes()}


def _all(engine: Any) -> int:
    """Bytes of everything that was allocated for the case, norms and flags aside."""
    values = [getattr(engine.optimizer, name, None) for name in PASSING]
    few = [one for value in values for one in (value.values() if isinstance(value, dict) else (value,))]
    passing = {one.untyped_storage().data_ptr() for one in few if torch.is_tensor(one)}
    return sum(size for place, size in storages().items() if place not in passing)


def _measured(zero: Any, params: list[torch.nn.Parameter], stage: int) -> dict[str, int]:
    inner = getattr(zero, "optimizer", zero)
    state = held(value for one in inner.state.values() for value in one.values() if torch.is_tensor(value))
    if stage == 3:
        return {
            "parameters": sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in params),
            "master weights": held(zero.fp32_partitioned_groups_flat),
            "persistent": held(p for p in params if p.ds_persist),
            "buckets": held(b.buffer for b in zero.ipg_buckets.values() if b.buffer is not None),
            "optimizer state": state,
        }
    flat = getattr(zero, "bit16_groups_flat", None) or getattr(zero, "bf16_groups_flat", ())
    masters = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_groups_flat_partition
    frozen = sum(p.numel() * p.element_size() for p in params if not p.requires_grad)
    return {"parameters": held(flat) + frozen, "master weights": held(masters), "optimizer state": state}


# --- what is sent --------------------------------------------------------------------------------------------------

WATCHED = {
    "all_reduce": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", 0),
    "all_gather_single": ("all-gather", 0),
    "reduce_scatter_tensor": ("reduce-scatter", 1),
    "reduce_scatter_single": ("reduce-scatter", 1),
}
"""Functions of ``torch.distributed`` that DeepSpeed calls, with the place of the whole buffer."""

Call = Any
Wrap = Any


def _replaced(wrap: Wrap) -> list[tuple[Any, str, Call]]:
    """Puts a wrapper around every such function; returns what stood there."""
    import deepspeed.comm.comm as comm

    backend: Any = comm.cdb
    places = [(dist, name, *WATCHED[name]) for name in WATCHED if hasattr(dist, name)]
    places += [
        (backend, "all_gather_function", "all-gather", 0),
        (backend, "reduce_scatter_function", "reduce-scatter", 1),
    ]
    before = [(where, name, getattr(where, name)) for where, name, _, _ in places]
    for where, name, kind, place in places:
        setattr(where, name, wrap(getattr(where, name), kind, place))
    return before


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> Tensor:
    found: Tensor = args[place] if len(args) > place else list(kwargs.values())[place]
    return found


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes of the whole buffers of DeepSpeed's collectives; norms and flags of a few elements are left out."""
    sent: Counter[str] = Counter()

    def watched(real: Call, kind: str, place: int) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = _given(args, kwargs, place)
            if given.numel() > 8:
                sent[kind] += given.numel() * given.element_size()
            return real(*args, **kwargs)

        return call

    before = _replaced(watched)
    try:
        yield sent
    finally:
        for where, name, real in before:
            setattr(where, name, real)


def _stand_in() -> None:
    """For the other ranks: they agree with this one, and their parts of the parameters are zero, not what was there."""
    import deepspeed
    import deepspeed.runtime.zero.utils as utils
    from deepspeed.runtime.zero import stage3

    deepspeed.init_distributed(verbose=False)
    utils.get_lst_from_rank0 = lambda mine: mine
    utils.assert_lst_len_same_as_other_ranks = lambda _: None
    stage3.is_invalid_grad_norm = lambda _: False  # gradients of what nobody sent may be no numbers: step all the same

    def zeroed(real: Call, kind: str, place: int) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind == "all-gather":
                with torch.no_grad():
                    _given(args, kwargs, place).zero_()
            return real(*args, **kwargs)

        return call

    _replaced(zeroed)


def main(stage: int, worlds: tuple[int, ...]) -> None:
    import cpuinfo

    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)  # DeepSpeed asks for every optimizer, which takes a second
    import deepspeed.ops.adam  # noqa: F401  once, before there are children

    lean()

    logging.disable(logging.WARNING)
    for world in worlds:
        for rank in dict.fromkeys((0, world // 2, world - 1)):
            sys.stdout.flush()
            child = os.fork()
            if not child:
                one_rank(stage, rank, world)
            assert os.waitpid(child, 0)[1] == 0, "a rank failed; what it wrote to stderr says why"


def one_rank(stage: int, rank: int, world: int) -> None:
    """Never returns."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    code = 1
    try:
        _stand_in()
        for case in cases(stage):
            for row in rows(case, stage, rank, world):
                print(json.dumps(asdict(row)))
        code = 0
    finally:
        sys.stdout.flush()
        if code:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(code)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main(int(sys.argv[1]), tuple(int(word) for word in sys.argv[2:]) or WORLDS)
