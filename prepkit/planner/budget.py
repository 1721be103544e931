"""Memory of a plan against its device, and the changes of the config that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any, Literal, assert_never

from attrs import evolve, fields, frozen, has
from returns.result import Result

from prepkit.config import (
    BF16,
    DDP,
    FSDP1,
    FSDP2,
    XLA,
    Config,
    DeepSpeed,
    Engine,
    Mesh,
    OffloadToCPU,
    Single,
    TensorParallel,
    WrapBlocks,
)
from prepkit.findings import Finding
from prepkit.findings.text import in_bytes
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.predict.inputs import stored_bytes
from prepkit.predict.prediction import Prediction
from prepkit.predict.zero import REDUCE_BUCKET, zero_of
from prepkit.resolve.deepspeed.data import changed_keys, offloaded, offloads, restaged, with_key
from prepkit.resolve.deepspeed.data import stage as stage_of
from prepkit.resolve.engines import traits
from prepkit.resolve.mesh import size_of
from prepkit.rules.memory import PLANNED_RULES, Held, Host
from prepkit.rules.mesh import strategy
from prepkit.rules.rule import findings_of
from prepkit.steps import ReadTensors, SendTensors

Again = Callable[[Config], Result[Plan, tuple[Finding, ...]]]
"""Plans another config for the same facts."""

LIMIT = 4
"""Changes that are shown."""


@frozen(kw_only=True)
class Option:
    """A changed config whose plan fits, with what a rank then holds and sends."""

    config: Config
    diff: tuple[str, ...]
    """What to change, one line per field."""
    floor: int
    """Bytes that the fullest rank then certainly holds at one moment."""
    ceiling: int
    """Bytes that it holds at most."""
    sent: int
    """Bytes that a rank sends per step."""
    between: int
    """Those of them that go over node borders, or may."""
    copied: int
    """Bytes that a rank copies between device and host per step."""
    host: int = 0
    """Bytes that the fullest rank holds in host memory."""
    caveats: tuple[str, ...] = ()
    """What else the change changes."""

    def __str__(self) -> str:
        between = f" ({in_bytes(self.between)} between nodes)" if self.between != self.sent else ""
        copied = (
            f", copies {in_bytes(self.copied)} and keeps {in_bytes(self.host)} in host memory" if self.copied else ""
        )
        also = "".join(f"; {caveat}" for caveat in self.caveats)
        memory = f"{in_bytes(self.floor)} to {in_bytes(self.ceiling)}"
        return f"{', '.join(self.diff)}: {memory}, sends {in_bytes(self.sent)} a step{between}{copied}{also}"


_STATE = "optimizer state, as no optimizer is given"


@frozen(kw_only=True)
class Fit:
    """Whether a plan fits into the memory of a device, how surely, and what else would. True where it fits."""

    memory: int
    floor: int
    """Bytes that the fullest rank certainly holds at one moment."""
    ceiling: int
    """Bytes that it holds at most."""
    verdict: Literal["fits", "may not fit", "does not fit", "not predicted"]
    options: tuple[Option, ...] = ()
    """The smallest changes after which it fits: as few fields as possible, then by traffic."""
    left_out: tuple[str, ...] = ()
    """What is not in the numbers."""
    activations: int | None = None
    """Bytes of activations that are in the ceiling; None: not counted."""

    def __bool__(self) -> bool:
        return self.verdict == "fits"

    def __str__(self) -> str:
        if self.verdict == "not predicted":
            return "\n".join(("not predicted", *(f"  {phrase}" for phrase in self.left_out)))
        left = self.memory - self.ceiling
        counted = self.activations is not None
        room = f"; {in_bytes(left)} left{'' if counted else ' for activations'}" if left > 0 else ""
        need = f"{in_bytes(self.floor)} for certain and {in_bytes(self.ceiling)} at most"
        also = (
            f"with {in_bytes(self.activations)} of activations"
            if self.activations is not None
            else "activations not counted"
        )
        head = f"{self.verdict}: of {in_bytes(self.memory)} the fullest rank needs {need}, {also}{room}"
        lines = [head, *(f"  not counted either: {phrase}" for phrase in self.left_out)]
        if self.options:
            lines += [
                "changes that fit, least traffic between nodes and with the host first:",
                *(f"  {option}" for option in self.options),
            ]
        elif self.verdict != "fits":
            tried = "no change of mesh, stage, wrapping, offload, bucket, precision or accumulation fits"
            lines.append(f"{tried}; {self._advice()}")
        return "\n".join(lines)

    def _advice(self) -> str:
        """Advice where no change fits: activations of one micro-batch are the same on any number of ranks."""
        if self.activations is None or self.activations < self.memory:
            return "take more ranks or memory"
        alone = f"the activations of one micro-batch alone need {in_bytes(self.activations)}, on any number of ranks"
        return f"{alone}: take smaller micro-batches, checkpointing=CheckpointBlocks(), or more memory"


def bounds(prediction: Prediction) -> tuple[int, int]:
    """Bytes of device memory that some rank certainly holds at one moment, and that no rank exceeds."""
    return max(ranks.floor() for ranks in prediction.classes), max(ranks.total() for ranks in prediction.classes)


def fits(plan: Plan, memory: int, again: Again, activations: int | None = None) -> Fit:
    """Return whether the plan fits; where it may not, also what would. Candidates are planned and predicted in full.

    ``activations`` is taken to be the same for all of them.
    """
    prediction = predict(plan, activations)
    if not prediction.classes:
        return Fit(memory=memory, floor=0, ceiling=0, verdict="not predicted", left_out=prediction.not_predicted)
    floor, ceiling = bounds(prediction)
    verdict: Literal["fits", "may not fit", "does not fit"] = "fits" if ceiling <= memory else "may not fit"
    verdict = "does not fit" if floor > memory else verdict
    options = () if verdict == "fits" else _options(plan, memory - (activations or 0), again)
    options = tuple(evolve(option, ceiling=option.ceiling + (activations or 0)) for option in options)
    return Fit(
        memory=memory,
        floor=floor,
        ceiling=ceiling,
        verdict=verdict,
        options=options,
        left_out=(*prediction.not_predicted, *([_STATE] if prediction.without_state else ())),
        activations=activations,
    )


def findings(plan: Plan, again: Again) -> tuple[Finding, ...]:
    """What the rules about memory say of a finished plan; nothing where no memory of a device or a node is known."""
    env = plan.facts.env
    elsewhere = (plan.config.device or env.device) != env.device  # it is not the memory of the device computed on
    memory = None if elsewhere else env.memory
    host = env.host_memory if env.per_node or plan.world_size == 1 else None
    if memory is None and host is None:
        return ()
    prediction = predict(plan)
    if not prediction.classes:
        return ()
    held = Held(rank=prediction.fullest.first * prediction.tensor, floor=0, ceiling=0, memory=0)
    if memory is not None and bounds(prediction)[1] > memory:
        fit = fits(plan, memory, again)
        options = tuple(map(str, fit.options))
        held = evolve(held, floor=fit.floor, ceiling=fit.ceiling, memory=memory, options=options)
    if host is not None:
        ranks = min(env.per_node or 1, plan.world_size)
        own = any(isinstance(planned.step, ReadTensors | SendTensors) for planned in plan.steps)
        loads = 0 if own else sum(map(stored_bytes, plan.layout))
        keeps = max(one.total("host") for one in prediction.classes)
        held = evolve(held, host=Host(memory=host, ranks=ranks, keeps=keeps, loads=loads))
    return findings_of(PLANNED_RULES, held)


def _options(plan: Plan, memory: int, again: Again) -> tuple[Option, ...]:
    """As few moves as possible: first every single one, then pairs, then triples."""
    possible = tuple(moves(plan))
    for number in (1, 2, 3):
        options: dict[Config, Option] = {}
        ended: set[tuple[Move | str, ...]] = set()
        for chosen in combinations(possible, number):
            alike = tuple(move.series or move for move in chosen)
            if alike in ended or len({move.about for move in chosen}) < number:
                continue
            cfg = _changed(plan.config, chosen)
            option = _option(plan, cfg, chosen, memory, again) if cfg is not None and cfg not in options else None
            if option is not None:
                options[option.config] = option
                ended |= {alike} if any(move.series for move in chosen) else set()
        if options:
            ranked = sorted(options.values(), key=lambda o: (o.between + o.copied, o.sent, o.ceiling))
            return tuple(ranked[:LIMIT])
    return ()


def _changed(cfg: Config, moves: Iterable[Move]) -> Config | None:
    for move in moves:
        changed = move.change(cfg)
        if changed is None or changed == cfg:
            return None
        cfg = changed
    return cfg


def _option(plan: Plan, cfg: Config, moves: tuple[Move, ...], memory: int, again: Again) -> Option | None:
    changed_plan = again(cfg).value_or(None)
    if changed_plan is None:
        return None
    prediction = predict(changed_plan)
    if not prediction.classes or bounds(prediction)[1] > memory:
        return None
    floor, ceiling = bounds(prediction)
    return Option(
        config=cfg,
        diff=_diff(plan.config, cfg),
        floor=floor,
        ceiling=ceiling,
        sent=prediction.sent,
        between=prediction.crossing(plan.facts.env.per_node),
        copied=prediction.copied,
        host=max(one.total("host") for one in prediction.classes),
        caveats=tuple(move.caveat for move in moves if move.caveat),
    )


def _diff(old: Config, new: Config) -> tuple[str, ...]:
    """``name=new instead of old`` for each field that differs, as one would type it; in DeepSpeed's JSON each key."""
    pairs = [(field.name, getattr(old, field.name), getattr(new, field.name)) for field in fields(Config)]
    keys = changed_keys(old.engine, new.engine)
    rest = [(name, a, b) for name, a, b in pairs if a != b and not (keys and name == "engine")]
    return (*keys, *(f"{name}={typed(b)} instead of {typed(a)}" for name, a, b in rest))


def typed(value: Any) -> str:
    """A value of the config as one would type it: fields that keep their default are left out.

    >>> from prepkit.config import FSDP2, Mesh, OffloadToCPU
    >>> typed(Mesh(replicate=2)), typed(FSDP2(offload=OffloadToCPU()))
    ('Mesh(replicate=2)', 'FSDP2(offload=OffloadToCPU())')
    """
    if not has(type(value)):
        return repr(value)
    values = ((field, getattr(value, field.name)) for field in fields(type(value)))
    given = ", ".join(
        f"{field.name}={typed(item)}" if field.kw_only else typed(item)
        for field, item in values
        if item != field.default
    )
    return f"{type(value).__name__}({given})"


# --- what settings cost ----------------------------------------------------------------------------------------------

DEAREST = 3
"""Settings that are named."""


@frozen(kw_only=True)
class Costs:
    """What a plan needs, and what its dearest settings would give back."""

    floor: int
    """Bytes that the fullest rank certainly holds at one moment."""
    ceiling: int
    """Bytes that it holds at most."""
    sent: int
    """Bytes that a rank sends per step."""
    about: str = ""
    """What is not in the bytes, in words."""
    dearest: tuple[Option, ...] = ()
    """The change of each of these settings that gives back most, the dearest first."""

    def __str__(self) -> str:
        need = f"{in_bytes(self.floor)} for certain and {in_bytes(self.ceiling)} at most on the fullest rank"
        lines = [f"memory: {need}, {self.about}; each rank sends {in_bytes(self.sent)} a step"]
        lines += ["dearest settings:"] if self.dearest else []
        for option in self.dearest:
            more = option.sent - self.sent
            traffic = f"{in_bytes(abs(more))} {'more' if more > 0 else 'less'} sent" if more else ""
            copied = f"{in_bytes(option.copied)} copied to and from the host" if option.copied else ""
            step = " and ".join(filter(None, (traffic, copied)))
            cost = f"{in_bytes(self.ceiling - option.ceiling)} less" + (f", {step} a step" if step else "")
            lines.append("; ".join((f"  {', '.join(option.diff)}: {cost}", *option.caveats)))
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """The same as JSON data, in bytes."""
        dearest = [
            {"change": list(one.diff), "less": self.ceiling - one.ceiling, "sent": one.sent, "copied": one.copied}
            for one in self.dearest
        ]
        held = {"floor": self.floor, "ceiling": self.ceiling, "about": self.about}
        return held | {"sent": self.sent, "dearest": dearest}


def costs(plan: Plan, again: Again) -> Costs | None:
    """Memory and traffic of a plan, and the settings that cost most of the memory; None where it is not predicted."""
    prediction = predict(plan)
    if not prediction.classes:
        return None
    floor, ceiling = bounds(prediction)
    best: dict[str, Option] = {}
    for move in moves(plan):
        cfg = _changed(plan.config, (move,))
        option = _option(plan, cfg, (move,), ceiling - ceiling // 100, again) if cfg is not None else None
        if option is not None and (move.about not in best or option.ceiling < best[move.about].ceiling):
            best[move.about] = option
    dearest = sorted(best.values(), key=lambda option: (option.ceiling, option.sent))[:DEAREST]
    return Costs(floor=floor, ceiling=ceiling, sent=prediction.sent, about=prediction.about, dearest=tuple(dearest))


# --- moves -----------------------------------------------------------------------------------------------------------


@frozen
class Move:
    """One change of a config that may make a rank hold less."""

    about: str
    """The field; two moves about one field exclude each other."""
    change: Callable[[Config], Config | None]
    """None: does not apply."""
    caveat: str = ""
    series: str = ""
    """Moves of one series go further and further: of those that fit beside the same others the first one is meant."""


def moves(plan: Plan) -> Iterator[Move]:
    """Every change that might help; those about the same field exclude each other.

    A DeepSpeed plan stays one: its stage, its offloads and its bucket are changed, not its engine.
    """
    if plan.run.engine_steps:
        yield from zero_moves(plan)
        return
    for mesh in _meshes(plan):
        yield Move("mesh", lambda cfg, mesh=mesh: _sharded(cfg, mesh))  # type: ignore[misc]
    yield Move("offload", _offloaded)
    yield Move("wrap", _wrapped)
    yield Move("reshard", _resharded)
    yield Move("view", _viewed)
    yield from _narrowed()
    yield Move("accumulation", _at_once, "the same global batch needs larger micro-batches or more ranks")


def zero_moves(plan: Plan) -> Iterator[Move]:
    """Higher stages; optimizer state, and at stage 3 parameters, in host memory; a smaller reduce bucket.

    Halves of the bucket down to a hundredth of DeepSpeed's default: smaller ones send a model in thousands of calls.
    """
    for stage in (1, 2, 3):
        yield Move("stage", lambda cfg, stage=stage: _staged(cfg, stage))  # type: ignore[misc]
    yield Move("offload optimizer", lambda cfg: _away(cfg, "optimizer"))
    yield Move("offload param", lambda cfg: _away(cfg, "param"))
    zero = zero_of(plan)
    size = zero.bucket // 2 if zero else 0
    while size >= REDUCE_BUCKET // 100:
        yield Move("bucket", lambda cfg, size=size: _bucketed(cfg, size), series="bucket")  # type: ignore[misc]
        size //= 2
    yield from _narrowed()


def _narrowed() -> Iterator[Move]:
    yield Move("precision", _halved, "computes in bfloat16")
    yield Move("precision", _reduced, "gradients are averaged in bfloat16")


def _staged(cfg: Config, stage: int) -> Config | None:
    engine = cfg.engine
    if not isinstance(engine, DeepSpeed) or stage <= stage_of(engine):
        return None
    return evolve(cfg, engine=restaged(engine, stage))


def _away(cfg: Config, kind: str) -> Config | None:
    engine = cfg.engine
    if not isinstance(engine, DeepSpeed) or offloads(engine, kind):
        return None
    least = 3 if kind == "param" else 1
    return evolve(cfg, engine=offloaded(engine, kind)) if stage_of(engine) >= least else None


def _bucketed(cfg: Config, size: int) -> Config | None:
    engine = cfg.engine
    if not isinstance(engine, DeepSpeed):
        return None
    return evolve(cfg, engine=with_key(engine, "zero_optimization.reduce_bucket_size", size))


def _meshes(plan: Plan) -> Iterator[Mesh | None]:
    """More shards per copy, the layers cut as they are; where they are cut over all ranks, over fewer."""
    world, now, parts = plan.world_size, size_of("shard", plan.mesh), size_of("tensor", plan.mesh)
    if traits(plan.config).cuts_all_ranks:
        yield from (Mesh(shard=size, tensor=world // size) for size in range(2, world) if world % size == 0)
        return
    ranks = world // parts
    for size in range(now + 1, ranks + 1):
        if ranks % size == 0:
            yield None if size == world else Mesh(replicate=ranks // size, shard=size, tensor=parts)


def _sharded(cfg: Config, mesh: Mesh | None) -> Config | None:
    """More shards per copy; from an engine that shards nothing, FSDP2."""
    match cfg.engine:
        case FSDP1(sharding="NO_SHARD") if mesh is None:
            engine: Engine = evolve(cfg.engine, sharding="FULL_SHARD")
        case FSDP1(sharding="NO_SHARD"):
            engine = evolve(cfg.engine, sharding="HYBRID_SHARD")
        case FSDP1():
            engine = strategy(cfg.engine, hybrid=mesh is not None)
        case FSDP2():
            engine = cfg.engine
        case Single() | DDP() | TensorParallel() | XLA() | DeepSpeed():
            engine = FSDP2()
        case _:
            assert_never(cfg.engine)
    return evolve(cfg, engine=engine, mesh=mesh)


def _offloaded(cfg: Config) -> Config | None:
    match cfg.engine:
        case FSDP1(offload=False):
            return evolve(cfg, engine=evolve(cfg.engine, offload=True))
        case FSDP2(offload=None):
            return evolve(cfg, engine=evolve(cfg.engine, offload=OffloadToCPU()))
        case Single() | DDP() | FSDP1() | FSDP2() | TensorParallel() | XLA() | DeepSpeed():
            return None
        case _:
            assert_never(cfg.engine)


def _wrapped(cfg: Config) -> Config | None:
    engine = cfg.engine
    return evolve(cfg, engine=evolve(engine, wrap=WrapBlocks())) if isinstance(engine, FSDP1 | FSDP2) else None


def _resharded(cfg: Config) -> Config | None:
    match cfg.engine:
        case FSDP1(sharding="SHARD_GRAD_OP"):
            return evolve(cfg, engine=evolve(cfg.engine, sharding="FULL_SHARD"))
        case FSDP1(sharding="HYBRID_SHARD_ZERO2"):
            return evolve(cfg, engine=evolve(cfg.engine, sharding="HYBRID_SHARD"))
        case FSDP2():
            return evolve(cfg, engine=evolve(cfg.engine, reshard_after_forward=True))
        case Single() | DDP() | FSDP1() | TensorParallel() | XLA() | DeepSpeed():
            return None
        case _:
            assert_never(cfg.engine)


def _viewed(cfg: Config) -> Config | None:
    engine = cfg.engine
    return evolve(cfg, engine=evolve(engine, gradient_as_bucket_view=True)) if isinstance(engine, DDP) else None


def _halved(cfg: Config) -> Config | None:
    return evolve(cfg, precision=BF16()) if cfg.precision is None else None


def _reduced(cfg: Config) -> Config | None:
    precision = cfg.precision
    if not isinstance(precision, BF16) or not traits(cfg).takes_reduce_dtype:
        return None
    return evolve(cfg, precision=evolve(precision, reduce_dtype="bfloat16"))


def _at_once(cfg: Config) -> Config | None:
    accumulates = cfg.accumulation not in (None, 1) or cfg.global_batch is not None
    if not accumulates or not traits(cfg).has_units:
        return None
    return evolve(cfg, accumulation=1, global_batch=None)
