"""What a failure at any place of any plan leaves behind: ``make faults`` prints it as a table.

A fault is raised before each step, after each step, after the last one, at every line that a handler runs, and at calls
into torch below it. Afterwards either everything is as before (``snapshot``), or ``Halted`` says what is not.

A new engine is a row in ``ENGINES``.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import define, evolve, field, frozen
from torch._dynamo import trace_rules
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from prepkit.applying import handlers, step_kinds
from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    MSAMP,
    XLA,
    AdamW,
    BroadcastWeights,
    CheckpointBlocks,
    CompileBlocks,
    CompileModel,
    Config,
    InitWeights,
    KeepLoaders,
    Mesh,
    TorchAO,
    TransformerEngine,
)
from prepkit.interpreter import Done, Halted, Handler, interpret
from prepkit.objects.target import Target
from prepkit.plan import Plan
from prepkit.steps import (
    Agree,
    BuildMesh,
    CastForward,
    CheckpointModules,
    InitializeDeepSpeed,
    MarkLeafModules,
    PartitionParameters,
    ShardUnits,
    StartProcessGroup,
    WrapDDP,
)
from tests.support import fp8_model, library_doubles
from tests.support.drawn_part import THOROUGH, one_in
from tests.support.fragile_model import STORED, Tiny, planned, stepped, tiny_on_meta
from tests.support.planted_faults import CUT, LAID, NORMED, STRIDED, ZERO, WithNorm, bare, eight_bits, transposed
from tests.support.snapshot import differences, snapshot

FILES = Config(weights=STORED, optimizer=AdamW(), overrides=("weights.missing-keys",))
FULL = Config(precision=BF16(), compile=CompileBlocks(backend="eager"), checkpointing=CheckpointBlocks())


@frozen
class Case:
    """What is planned, and where."""

    cfg: Config
    world: int = 1
    """Above one rank a fake group runs already, below the plan starts a real one."""
    wide: bool = False
    """The model of the float8 tests."""
    bare: bool = False
    """The model has no values before."""
    double: Callable[[pytest.MonkeyPatch], object] | None = None
    """Puts a stand-in for a library in place that needs another device."""


ENGINES: dict[str, Case] = {
    "Single": Case(FULL, 1),
    "Single, created optimizer": Case(evolve(FULL, optimizer=AdamW(), compile=CompileModel(backend="eager")), 1),
    "Single, entry points": Case(Config(precision=BF16(), entry_points=("embedded",)), 1),
    "FSDP1, entry points": Case(Config(engine=FSDP1(), entry_points=("embedded",)), 4),
    "Single, float16": Case(Config(precision=FP16(), overrides=("precision.fp16-unsupported",)), 1),
    "DDP": Case(evolve(FULL, engine=DDP()), 4),
    "DDP, synchronised norms": Case(NORMED, 4),
    "DDP, real group": Case(evolve(FULL, engine=DDP(), optimizer=AdamW()), 1),
    "FSDP1": Case(evolve(FULL, engine=FSDP1()), 4),
    "FSDP1, flat optimizer": Case(LAID, 4),
    "FSDP2": Case(evolve(FULL, engine=FSDP2()), 4),
    "FSDP2, HSDP": Case(evolve(FULL, engine=FSDP2(), mesh=Mesh(replicate=2, shard=2)), 4),
    "FSDP2, transposed weights": Case(STRIDED, 4),
    "FSDP2, parts left whole": Case(Config(engine=FSDP2(ignored=("layers.*.outer",)), optimizer=AdamW()), 4),
    "FSDP2, real group": Case(evolve(FULL, engine=FSDP2(), optimizer=AdamW()), 1),
    "FSDP2, sent by rank 0": Case(evolve(FULL, engine=FSDP2(), weights=BroadcastWeights(), optimizer=AdamW()), 4),
    "DDP, sent by rank 0": Case(Config(engine=DDP(), weights=BroadcastWeights(), optimizer=AdamW()), 4),
    "Single, from files": Case(FILES, 1),
    "Single, from files, on meta": Case(FILES, 1, bare=True),
    "FSDP2, from files": Case(evolve(FILES, engine=FSDP2()), 4),
    "FSDP2, from files, on meta": Case(evolve(FILES, engine=FSDP2()), 4, bare=True),
    "TensorParallel": Case(CUT, 2, wide=True),
    "FSDP2, cut over tensor ranks": Case(evolve(CUT, engine=FSDP2(), mesh=Mesh(shard=2, tensor=2)), 4, wide=True),
    "DeepSpeed": Case(ZERO, wide=True, double=bare),
    "DeepSpeed, initialised in parts": Case(evolve(ZERO, weights=InitWeights(0)), wide=True, double=bare),
    "FSDP2, torchao": Case(Config(engine=FSDP2(), precision=FP8(backend=TorchAO(emulate=True))), 4, wide=True),
    "Single, TransformerEngine": Case(
        eight_bits(TransformerEngine()), wide=True, double=library_doubles.transformer_engine
    ),
    "Single, MS-AMP": Case(eight_bits(MSAMP()), wide=True, double=library_doubles.msamp),
    "XLA": Case(Config(engine=XLA(), loaders=KeepLoaders()), 2, wide=True, double=library_doubles.torch_xla),
}
"""What fails, by name. A new engine or step kind is a row."""

SOME = 2 if THOROUGH else 0
"""Of the times that a handler passes a line so many are made to fail: the first ones, and always the last."""

CALLS = 24 if THOROUGH else 4
"""Of the calls into torch that one handler makes so many are made to fail, spread evenly."""

CASES = len(ENGINES) if THOROUGH else 2
"""Each kind of step is made to fail inside in so many cases: the first that have it; at its boundaries in all."""

OF_A_REAL_GROUP = (
    *(StartProcessGroup, Agree, BuildMesh, WrapDDP, ShardUnits),
    *(CastForward, MarkLeafModules, CheckpointModules, PartitionParameters, InitializeDeepSpeed),
)
"""Steps to fail inside under a real group, which takes long to start; the others fail under a fake one."""


class Fault(Exception):
    """What is planted."""


@frozen
class Outcome:
    """What one fault led to."""

    engine: str
    step: str
    place: str
    """``before``, ``line 3``, ``call 17 _apply``, ``after``, ``at the end``."""
    claimed: str
    """What ``Halted`` says: ``as before``, or what stands, in words."""
    changed: tuple[str, ...]
    """What is not as before, in truth."""

    @property
    def honest(self) -> bool:
        """Whether what is said is so: a claim of nothing changed is true."""
        return not self.changed or self.claimed != CLEAN


CLEAN = "as before"


@contextmanager
def stage(engine: str) -> Iterator[None]:
    """No group, or a fake one; none afterwards. What stands in for a library is there meanwhile."""
    one = ENGINES[engine]
    hook = sys.excepthook  # torch puts one around it with every group that it starts
    with pytest.MonkeyPatch.context() as patches:
        # A group that ends forgets what dynamo knows of torch, and the next compile spends 0.1 s on the same again.
        patches.setattr(trace_rules, "clear_lru_cache", lambda: None)
        if one.double is not None:
            one.double(patches)
        if one.world > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=one.world)
        try:
            yield
        finally:
            sys.excepthook = hook
            if dist.is_initialized():
                dist.destroy_process_group()


def case(engine: str) -> tuple[Plan, Target]:
    """A fresh target, and its plan."""
    one = ENGINES[engine]
    model, optimizer = _wide(one) if one.wide else _tiny(one)
    scheduler = None if optimizer is None else StepLR(optimizer, 1)
    loader: Any = DataLoader(TensorDataset(torch.arange(16.0)), batch_size=2)
    if engine not in PLANS:
        if one.wide:
            made = fp8_model.planned(one.cfg, model, optimizer, world_size=one.world)
        else:
            made = planned(one.cfg, model, optimizer, world=one.world, loaders=(loader,))
        kept = tuple(step for step in made.steps if not (one.cfg is NORMED and isinstance(step.step, WrapDDP)))
        PLANS[engine] = evolve(made, steps=kept)
    return PLANS[engine], Target(model=model, optimizer=optimizer, scheduler=scheduler, loaders=[loader])


PLANS: dict[str, Plan] = {}
"""Made once: a plan is a value. On a CPU DDP takes no synchronised batch norm, so that its step is left out."""


def _wide(one: Case) -> tuple[Module, Optimizer]:
    model = fp8_model.seeded()
    # MS-AMP and DeepSpeed take no optimizer with state, as their rules say.
    fresh = one.double in (library_doubles.msamp, bare)
    return model, torch.optim.AdamW(model.parameters()) if fresh else fp8_model.stepped(model)


def _tiny(one: Case) -> tuple[Module, Optimizer | None]:
    torch.manual_seed(0)
    if one.bare:
        return tiny_on_meta(), None
    cfg = one.cfg
    model = WithNorm() if cfg is NORMED else Tiny(torch.bfloat16)
    if cfg is LAID:
        model.requires_grad_()
    if cfg is STRIDED:
        transposed(model)
    return model, None if cfg.optimizer else stepped(model, groups=1 if cfg is LAID else 2)


def fail(
    engine: str, place: str, table: Mapping[type, Handler[Any, Any, Any]], finish: Callable[[], None]
) -> Iterator[Outcome]:
    """Applies the engine's plan with these handlers, and looks at what is left; nothing where nothing failed."""
    plan, target = case(engine)
    with stage(engine):
        before = snapshot(target)
        outcome = interpret(tuple(one.step for one in plan.steps), table, target, finish=finish)
        if isinstance(outcome, Done):
            return  # torch makes fewer calls the second time
        changed = tuple(differences(before, snapshot(target))) if outcome.clean else ("not looked at",)
    step = "" if outcome.step is None else type(outcome.step).__name__
    yield Outcome(engine, step or "(the end)", place, claim(outcome), changed)


def claim(halted: Halted) -> str:
    """What a halt says, in few words."""
    if halted.clean:
        assert "everything is as it was" in str(halted)
        return CLEAN
    stands = [type(halted.steps[index]).__name__ for index in halted.not_undone]
    said = [*(f"{name} stands" for name in stands), *([f"{type(halted.step).__name__} torn"] if halted.torn else [])]
    assert all(name in str(halted) for name in stands)
    assert "build model and optimizer again" in str(halted)
    return ", ".join((*said, *halted.remains))


def no_end() -> None:
    """The end of a plan that goes well."""


def bad_end() -> None:
    """The end of a plan that does not."""
    raise Fault("at the end")


# --- where faults are planted --------------------------------------------------------------------------------------


def at_boundaries(engine: str) -> Iterator[Outcome]:
    """Before each step, which is after the one before it, and after the last one."""
    plan, target = case(engine)
    with stage(engine):  # torch sets variables of its own the first time that some of it is used
        assert isinstance(interpret(tuple(one.step for one in plan.steps), step_kinds.handlers(), target), Done)
    for one in plan.steps:
        kind = type(one.step)
        yield from fail(
            engine, "before", {**step_kinds.handlers(), kind: evolve(step_kinds.handlers()[kind], do=broken)}, no_end
        )
    yield from fail(engine, "at the end", step_kinds.handlers(), bad_end)


def broken(step: Any, target: Any) -> Any:
    """A ``do`` that does not begin."""
    raise Fault("before")


HANDLER_FILES = str(Path(handlers.__file__).parent)
TORCH_FILES = str(Path(torch.__file__).parent)


def _leaving(frame: FrameType | None) -> bool:
    """Whether a context is being left, or an object goes."""
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_name in ("__exit__", "__del__"):
            return True
        frame = frame.f_back
    return False


@define
class Planter:
    """Notes the places that a handler passes, or raises at the one with this number."""

    at: int = -1
    lines: bool = True
    passed: list[str] = field(factory=list)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The trace function (``sys.settrace``)."""
        name, code = frame.f_code.co_filename, frame.f_code
        if not self.lines:
            # An exit that is interrupted could restore nothing; an error inside torch does not begin there.
            if event == "call" and name.startswith(TORCH_FILES) and not _leaving(frame):
                self._pass(code.co_name)
            return None
        if not name.startswith(HANDLER_FILES):
            return None
        # The line of a ``with`` is passed again on the way out, where a fault would keep it from closing.
        on_the_way_out = _leaving(frame) or linecache.getline(name, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not on_the_way_out:
            self._pass(f"{Path(name).stem}:{frame.f_lineno}")
        return self

    def _pass(self, place: str) -> None:
        self.passed.append(place)
        if len(self.passed) - 1 == self.at:
            raise Fault(place)

    def chosen(self) -> list[int]:
        """Numbers of the places to fail at: of each line some, of the calls into torch some."""
        if not self.lines:
            return list(range(0, len(self.passed), max(1, len(self.passed) // CALLS)))
        found: dict[str, list[int]] = {}
        for number, place in enumerate(self.passed):
            found.setdefault(place, []).append(number)
        return sorted({number for numbers in found.values() for number in (*numbers[:SOME], numbers[-1])})


def traced(real: Handler[Any, Any, Any], planter: Planter) -> Handler[Any, Any, Any]:
    """The handler with its ``do`` under the planter's eyes."""

    def do(step: Any, target: Any) -> Any:
        old = sys.gettrace()
        sys.settrace(planter)
        try:
            return real.do(step, target)
        finally:
            sys.settrace(old)

    return evolve(real, do=do)


def entered(engine: str) -> tuple[type, ...]:
    """Kinds of the engine's steps that are made to fail inside, in their order."""
    kinds = tuple(dict.fromkeys(type(one.step) for one in case(engine)[0].steps))
    real = StartProcessGroup in kinds and ENGINES[engine].world == 1
    return tuple(kind for kind in kinds if not real or kind in OF_A_REAL_GROUP)


@cache
def cases_of(kind: type) -> tuple[str, ...]:
    """The first cases in which it is made to fail inside."""
    return tuple(islice((engine for engine in ENGINES if kind in entered(engine)), CASES))


def inside_handlers(engine: str, *, lines: bool) -> Iterator[Outcome]:
    """At every line that a handler runs; or at some of the calls that it leads to inside torch."""
    plan, _ = case(engine)
    for kind in (kind for kind in entered(engine) if engine in cases_of(kind)):
        counter = Planter(lines=lines)
        _, target = case(engine)
        with stage(engine):
            table = {**step_kinds.handlers(), kind: traced(step_kinds.handlers()[kind], counter)}
            outcome = interpret(tuple(one.step for one in plan.steps), table, target)
            assert isinstance(outcome, Done), str(outcome)
        for at in one_in(3, counter.chosen()):
            planter = Planter(at=at, lines=lines)
            for one in fail(
                engine, "", {**step_kinds.handlers(), kind: traced(step_kinds.handlers()[kind], planter)}, no_end
            ):
                yield evolve(one, place=planter.passed[at])


def all_outcomes(engine: str) -> Iterator[Outcome]:
    """Every fault of one engine."""
    yield from at_boundaries(engine)
    yield from inside_handlers(engine, lines=True)
    yield from inside_handlers(engine, lines=False)


# --- the table -----------------------------------------------------------------------------------------------------


def table(outcomes: list[Outcome]) -> str:
    """Engine, step, number of faults, and what they led to."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for one in outcomes:
        said = one.claimed if one.honest else f"DISHONEST at {one.place}: {', '.join(one.changed)}"
        rows.setdefault((one.engine, one.step), Counter())[said] += 1
    head = ("engine", "step that failed", "faults", "outcome")
    lines = [
        (engine, step, str(count.total()), "; ".join(f"{n} x {text}" for text, n in count.items()))
        for (engine, step), count in rows.items()
    ]
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(3)]
    return "\n".join("  ".join((*map(str.ljust, line[:3], widths), line[3])) for line in (head, *lines))
