"""Many layouts of one model: what fits, what it holds, what it sends. The model is gone through once per engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import asdict, evolve, frozen

from prepkit import planner
from prepkit.config import (
    DDP,
    FSDP1,
    FSDP2,
    Config,
    DeepSpeed,
    Engine,
    Mesh,
    OffloadToCPU,
    Single,
    TensorParallel,
)
from prepkit.facts import Env, Facts
from prepkit.findings import errors
from prepkit.findings.text import aligned, count, in_bytes
from prepkit.predict import predict_inputs
from prepkit.predict.inputs import Inputs, inputs_of
from prepkit.predict.prediction import NO_STATE, Prediction, Traffic
from prepkit.predict.tensor_parallel import cut_traffic
from prepkit.resolve.deepspeed.batch import MICRO, WHOLE
from prepkit.resolve.deepspeed.data import offloaded, offloads, restaged, said
from prepkit.resolve.engines import ENGINES as ROWS
from prepkit.resolve.mesh import axes
from prepkit.resolve.resolved import Resolved
from prepkit.rules import check, mesh, split
from prepkit.rules.mesh import strategy
from prepkit.steps import Axis

ENGINES: dict[str, Engine] = {
    "single": Single(),
    "ddp": DDP(),
    "fsdp1": FSDP1(),
    "fsdp2": FSDP2(),
    "fsdp2+offload": FSDP2(offload=OffloadToCPU()),
    "fsdp2+tensor": FSDP2(),
    "tensor": TensorParallel(),
    "zero1": DeepSpeed(stage=1),
    "zero1+offload": DeepSpeed(stage=1, offload_optimizer="cpu"),
    "zero2": DeepSpeed(stage=2),
    "zero2+offload": DeepSpeed(stage=2, offload_optimizer="cpu"),
    "zero3": DeepSpeed(stage=3),
    "zero3+offload": DeepSpeed(stage=3, offload_optimizer="cpu"),
    "zero3+offload-all": DeepSpeed(stage=3, offload_optimizer="cpu", offload_param="cpu"),
}
"""Name on the command line to the engine; a config's own engine of that kind takes its place."""
TENSOR = "fsdp2+tensor"
"""The engine whose layers are cut as well."""
NODE = 8
"""Ranks of a node where it is not said."""


@frozen(kw_only=True)
class Row:
    """One engine on one mesh of one world size: what its fullest rank holds and what a rank sends."""

    engine: str
    world_size: int
    replicate: int
    shard: int
    tensor: int
    """Ranks that single layers are cut over."""
    verdict: str
    """``fits``, ``may not fit``, ``does not fit``; empty where no memory of a device is known."""
    floor: int
    """Bytes that the fullest rank's device certainly holds at one moment."""
    ceiling: int
    """Bytes that it holds at most, activations aside."""
    host: int
    sent: int
    """Bytes that a rank sends per step, as far as they are predicted."""
    copied: int
    empty_ranks: int
    sent_in_full: bool = True
    """``sent`` is all of it. False where layers are cut and nobody says of how many tokens, or how is not counted."""
    accumulation: int = 1
    """Micro-batches per optimizer step: as asked, or what the global batch gives at this size."""
    without_state: bool = False
    """Whether it trains with no optimizer that is given: the state of none is in the bytes."""


@frozen(kw_only=True)
class Unplanned:
    """An engine that has no plan for this model, and why."""

    engine: str
    world_size: int
    why: str
    fix: str
    """What to type; empty where the numbers are not predicted."""


def sweep(
    cfg: Config, facts: Facts, worlds: tuple[int, ...], engines: tuple[str, ...], tokens: int | None = None
) -> tuple[tuple[Row, ...], tuple[Unplanned, ...]]:
    """Every mesh of every world size for every engine, each size for itself: what fits first, then by traffic, memory.

    A row whose traffic is predicted in part comes after those that are alike and predicted in full.

    ``facts.env`` says everything about the cluster but its size. The rules are asked once per engine and world size,
    those about the mesh for each mesh; predictions are those of ``predict``. ``tokens`` of a micro-batch on a rank:
    then what cut layers send is predicted too.

    >>> from prepkit.testing.tiny import tiny_facts
    >>> rows, refused = sweep(Config(), tiny_facts(), worlds=(2, 4), engines=("single", "ddp"))
    >>> [(row.engine, row.world_size) for row in rows]
    [('ddp', 2), ('ddp', 4)]
    >>> print(refused[0].engine, "-", refused[0].why)
    single - 2 processes run, and Single() would train a copy in each ...
    """
    rows: list[Row] = []
    refused: list[Unplanned] = []
    for name in engines:
        engine = _engine(cfg, facts, name)
        if isinstance(engine, FSDP1):
            engine = strategy(engine, hybrid=False)  # legal at every size; the meshes come after
        inputs: dict[tuple[int, int], Inputs] = {}
        cuts: dict[tuple[int, int], tuple[Traffic, ...] | None] = {}
        for world in worlds:
            world_facts = evolve(facts, env=evolve(facts.env, world_size=world, memory=None))
            reasons: list[tuple[str, str]] = []
            for tensor in _parts(name, world_facts.env):
                candidate = evolve(cfg, engine=engine, mesh=Mesh(tensor=tensor) if tensor > 1 else None)
                standing, _ = split(candidate, check(candidate, world_facts))
                if refusing := errors(standing):
                    reasons.append((refusing[0].what, refusing[0].fix))
                    continue
                # What a job takes from the model is the same at every size, as long as layers are cut alike.
                steps = Resolved(cfg=candidate, facts=world_facts).accumulation
                key = (world if ROWS[type(engine)].cuts_all_ranks else tensor, steps)
                if key not in inputs:
                    made = planner.plan(candidate, world_facts).unwrap()
                    inputs[key], cuts[key] = inputs_of(made), cut_traffic(made, tokens) if tokens else None
                inputs[key] = inputs[key].over(world)
                for mesh_axes, prediction in _laid(candidate, world_facts, inputs[key]):
                    reasons += [(why, "") for why in prediction.not_predicted[:1] if not prediction.classes]
                    if prediction.classes:
                        row = _row(name, prediction, mesh_axes, facts.env.memory, steps)
                        rows.append(_with_cuts(row, cuts[key]))
            refused += [Unplanned(engine=name, world_size=world, why=why, fix=fix) for why, fix in reasons[:1]]
    order = {"fits": 0, "": 0, "may not fit": 1, "does not fit": 2}
    ranked = sorted(
        rows, key=lambda row: (row.world_size, order[row.verdict], not row.sent_in_full, row.sent, row.ceiling)
    )
    return tuple(ranked), tuple(refused)


def _parts(name: str, env: Env) -> tuple[int, ...]:
    """Over how many ranks layers may be cut beside shards: neighbours on one node, and not all there are."""
    if name != TENSOR:
        return (1,)
    most = min(env.per_node or NODE, env.world_size - 1)
    return tuple(size for size in range(2, most + 1) if env.world_size % size == 0) or (2,)


def _engine(cfg: Config, facts: Facts, name: str) -> Engine:
    """The engine of that name, with the options of the config's own where it is of the same kind."""
    engine = ENGINES[name]
    if isinstance(engine, DeepSpeed):
        return _zero(engine, cfg.engine if isinstance(cfg.engine, DeepSpeed) else DeepSpeed(), facts)
    match cfg.engine, engine:
        case FSDP2() as own, FSDP2() as named:
            keeps = own.offload is None
            return evolve(own, offload=named.offload if keeps or name in ("fsdp2", TENSOR) else own.offload)
        case own, named:
            return own if type(own) is type(named) else named


def _zero(named: DeepSpeed, own: DeepSpeed, facts: Facts) -> DeepSpeed:
    """The options of ``own`` at the stage and with the offload that the name stands for.

    Where nobody says how many samples a micro-batch has, it is one: no number in a row depends on it.
    """
    engine = restaged(own, named.stage or 0)
    for kind in ("optimizer", "param"):
        if offloads(engine, kind) != offloads(named, kind):
            engine = offloaded(engine, kind, away=offloads(named, kind))
    known = (
        engine.micro_batch or {MICRO, WHOLE} & set(said(engine)) or any(loader.batch_size for loader in facts.loaders)
    )
    return engine if known else evolve(engine, micro_batch=1)


def layouts(cfg: Config, world: int) -> Iterator[Config]:
    """The config with every mesh that its engine can have over so many ranks, most shards first."""
    engine = cfg.engine
    cuts = isinstance(engine, FSDP2) or (isinstance(engine, FSDP1) and engine.sharding != "NO_SHARD")
    if not cuts:
        yield cfg
        return
    parts = cfg.mesh.tensor if cfg.mesh else 1
    ranks = world // parts
    for shard in range(ranks, 1, -1):
        if ranks % shard == 0:
            own = strategy(engine, hybrid=shard < world) if isinstance(engine, FSDP1) else engine
            yield evolve(cfg, engine=own, mesh=Mesh(replicate=ranks // shard, shard=shard, tensor=parts))


def _laid(cfg: Config, facts: Facts, inputs: Inputs) -> Iterator[tuple[tuple[Axis, ...], Prediction]]:
    """Every mesh that the rules allow, and what ranks hold and send there."""
    for candidate in layouts(cfg, facts.env.world_size):
        mesh_axes = axes(candidate, facts.env)
        if mesh_axes is None or errors(check(candidate, facts, mesh.RULES)):
            continue
        yield mesh_axes, predict_inputs(type(cfg.engine), evolve(inputs, mesh=mesh_axes))


def _row(name: str, prediction: Prediction, mesh_axes: tuple[Axis, ...], memory: int | None, steps: int) -> Row:
    sizes = {axis.name: axis.size for axis in mesh_axes}
    floor, ceiling = (
        max(ranks.floor() for ranks in prediction.classes),
        max(ranks.total() for ranks in prediction.classes),
    )
    verdict = ""
    if memory is not None:
        verdict = "does not fit" if floor > memory else "fits" if ceiling <= memory else "may not fit"
    return Row(
        engine=name,
        world_size=prediction.world_size,
        replicate=sizes.get("replicate", 1),
        shard=sizes.get("shard", 1),
        tensor=sizes.get("tensor", 1),
        verdict=verdict,
        floor=floor,
        ceiling=ceiling,
        host=max(ranks.total("host") for ranks in prediction.classes),
        sent=prediction.sent,
        sent_in_full=sizes.get("tensor", 1) == 1,
        copied=prediction.copied,
        empty_ranks=prediction.empty_ranks,
        without_state=prediction.without_state,
        accumulation=steps,
    )


def _with_cuts(row: Row, cuts: tuple[Traffic, ...] | None) -> Row:
    """With what cut layers send in the micro-batches of a step, where it is predicted."""
    if cuts is None or row.sent_in_full:
        return row
    return evolve(row, sent=row.sent + row.accumulation * sum(one.sent for one in cuts), sent_in_full=True)


def sweep_text(rows: tuple[Row, ...], refused: tuple[Unplanned, ...], limit: int = 40) -> str:
    """The table, its first ``limit`` rows, and what was refused."""
    accumulates = any(row.accumulation > 1 for row in rows)
    head = (
        "engine",
        "ranks",
        "copies x shards x parts",
        "verdict",
        "for certain",
        "at most",
        "host",
        "sent a step",
        "copied",
        "",
        *(("accumulation",) if accumulates else ()),
    )
    cells = tuple(
        (
            row.engine,
            f"{row.world_size:,}",
            f"{row.replicate:,} x {row.shard:,} x {row.tensor:,}",
            row.verdict,
            in_bytes(row.floor),
            in_bytes(row.ceiling),
            in_bytes(row.host) if row.host else "",
            in_bytes(row.sent) if row.sent_in_full else f"{in_bytes(row.sent)} and more",
            in_bytes(row.copied) if row.copied else "",
            f"{count(row.empty_ranks, 'empty rank')}" if row.empty_ranks else "",
            *((f"{row.accumulation:,}",) if accumulates else ()),
        )
        for row in rows[:limit]
    )
    lines = list(aligned((head, *cells))) if cells else ["no layout can be planned"]
    if len(rows) > limit:
        lines.append(f"and {len(rows) - limit:,} more; --limit shows them")
    for name in dict.fromkeys(entry.engine for entry in refused):
        entries = [entry for entry in refused if entry.engine == name]
        lines.append(f"{name} over {', '.join(f'{entry.world_size:,}' for entry in entries)} ranks: {entries[0].why}")
        lines += [f"  fix: {entries[0].fix}"] if entries[0].fix else []
    if not all(row.sent_in_full for row in rows[:limit]):
        lines.append("and more: what cut layers send follows the tokens of a micro-batch, which --tokens says")
        lines.append("rows that send more come after those that are predicted in full")
    state = f", {NO_STATE}" if any(row.without_state for row in rows[:limit]) else ""
    return "\n".join((*lines, f"bytes are of the fullest rank; activations are not counted{state}"))


def sweep_data(rows: tuple[Row, ...], refused: tuple[Unplanned, ...]) -> dict[str, Any]:
    """All rows and refusals as JSON data, for scripts."""
    return {"rows": [asdict(row) for row in rows], "refused": [asdict(entry) for entry in refused]}
