"""State of the model: what it carries already, and what it cannot be prepared with."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import (
    DDP,
    FSDP2,
    AsStored,
    CheckpointBlocks,
    Config,
    Intent,
    NoCheckpointing,
    NoCompile,
    Single,
    TensorParallel,
)
from prepkit.facts import Facts, Mark, ModelFacts
from prepkit.findings.text import at, count, some
from prepkit.resolve.fsdp2 import LAZY
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

_WRAPPED: tuple[Mark, ...] = ("ddp", "fsdp1", "fsdp2", "deepspeed", "fabric", "prepared")
_WHOLE = ("Single", "DDP", "XLA")
"""Engines that leave the module whole: it can be taken out of what they put around it."""
_ONE_AXIS = tuple((word,) for word in ("replicate", "shard(0)", "shard(1)"))
_BYPASS = "ACCELERATE_BYPASS_DEVICE_MAP"


def _marked(model: ModelFacts, mark: Mark) -> tuple[str, ...]:
    return tuple(module.path for module in model.modules if mark in module.marks)


def _named(paths: tuple[str, ...]) -> str:
    return some(paths) if paths[0] else "the model itself"


def _wrapped(resolved: Resolved) -> Iterator[Hit]:
    for mark in _WRAPPED:
        stands = mark == "fsdp2" and resolved.arrives_sharded  # is kept as it is
        if stands or not (paths := _marked(resolved.facts.model, mark)):
            continue
        if mark == "prepared" and (carried := resolved.facts.model.prepared):
            engine = carried.partition(",")[0]
            ways = ["what apply returned", f"a model that is built anew: {engine} has changed this one in place"]
            if engine in _WHOLE:
                ways[1:] = ["ready.unwrap(keep_autocast=False, keep_compiled=False)", "a model that is built anew"]
            fix = f"Use {', or '.join(ways)}."
            yield Hit("model", f"prepkit has prepared this model already: it carries {carried}.", fix)
        else:
            yield Hit(at(paths[0]), f"Already {mark}: {_named(paths)}; preparing it again would wrap the wrapper.")


def _autocast(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if paths := _marked(resolved.facts.model, "autocast"):
        kind = type(cfg.precision).__name__
        asked = "AsStored() promises no cast" if isinstance(cfg.precision, AsStored) else f"{kind}() would add a second"
        yield Hit(at(paths[0]), f"The forward of {_named(paths)} runs under autocast already, and {asked}.")


def _compiled(resolved: Resolved) -> Iterator[Hit]:
    if not isinstance(resolved.cfg.compile, NoCompile) and (paths := _marked(resolved.facts.model, "compiled")):
        yield Hit(at(paths[0]), f"Already compiled: {_named(paths)}; config.compile would compile it again.")


def _checkpointed(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if isinstance(resolved.cfg.checkpointing, CheckpointBlocks) and (paths := _marked(facts.model, "checkpointed")):
        yield Hit(at(paths[0]), f"Already checkpointed: {_named(paths)}; everything inside would be recomputed twice.")


def _dtensors(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if isinstance(cfg.engine, TensorParallel):  # arrives cut, and is only verified
        names = [p.name for p in resolved.facts.model.params if p.cls == "DTensor" and p.placements not in _ONE_AXIS]
        if names:
            what = f"{count(len(names), 'parameter')} lie otherwise than cut over one axis ({some(names)})."
            yield Hit(at(names[0]), what)
        return
    names = [param.name for param in resolved.facts.model.params if param.cls == "DTensor"]
    if names and not isinstance(cfg.engine, Single) and not resolved.arrives_sharded:
        engine, shown = type(cfg.engine).__name__, f"{count(len(names), 'parameter')} sharded already ({some(names)})"
        cut = resolved.facts.model.architecture.tp_size
        if isinstance(cfg.engine, FSDP2) and cut:
            what = f"{shown}: transformers has cut the layers over {cut} ranks, and FSDP2 shards whole layers."
            fix = (
                f"Load it without tp_plan and write mesh=Mesh(shard=-1, tensor={cut}): FSDP2 cuts the same layers, by "
                "the model's own plan; or write engine=TensorParallel(), which takes the model as it is."
            )
            yield Hit(at(names[0]), what, fix)
        else:
            yield Hit(at(names[0]), f"{shown}, and {engine} takes plain ones.")


def _device_map(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    spread = facts.model.device_map
    keeps = isinstance(cfg.engine, DDP)  # the others place the model themselves
    if isinstance(cfg.engine, Single) or len(spread) < 2 or (keeps and cfg.keep_device_map):
        return
    devices = some(tuple(dict.fromkeys(device for _, device in spread)))
    engine = type(cfg.engine).__name__
    what = f"hf_device_map spreads the model over {devices}, and {engine} would do so in each of {facts.env.world_size}"
    fix = "Load the model without device_map, or run one process with engine=Single()."
    said = dict(facts.env.variables).get(_BYPASS)
    if keeps:
        seen = f" prepkit does not obey {_BYPASS}={said}." if said else ""
        fix += f" If each process shall have devices of its own, write keep_device_map=True.{seen}"
    yield Hit("model.hf_device_map", what + " processes.", fix)


def _lazy(resolved: Resolved) -> Iterator[Hit]:
    names = [param.name for param in resolved.facts.model.params if param.cls in LAZY]
    if names:
        yield Hit(at(names[0]), f"{count(len(names), 'parameter')} without a shape yet: {some(names)}.")


def _nothing_trainable(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if resolved.cfg.intent is Intent.TRAINING and not any(param.requires_grad for param in facts.model.params):
        what = f"intent is training, but none of the {count(len(facts.model.params), 'parameter')} requires a gradient."
        yield Hit("model", what)


def _eager(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, compile=NoCompile())


def _no_checkpointing(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, checkpointing=NoCheckpointing())


RULES: tuple[Rule, ...] = (
    Rule(
        id="model.already-wrapped",
        summary="No module is wrapped or prepared already.",
        check=_wrapped,
        fix="Pass the model as it was before it was wrapped, and build it anew if it was sharded in place.",
        source=("BK-2", "G-20", "G-21", "G-56", "pain 19"),
    ),
    Rule(
        id="model.already-autocast",
        summary="No forward runs under autocast already.",
        check=_autocast,
        fix="Pass the model without the autocast patch, and write the precision in config.precision.",
        source=("AMP-1", "G-20"),
    ),
    Rule(
        id="model.already-compiled",
        summary="A model that is to be compiled is not compiled already.",
        check=_compiled,
        fix="Write compile=NoCompile(), or pass the model uncompiled.",
        source=("CM-2", "G-46", "G-22"),
        repair=_eager,
    ),
    Rule(
        id="model.already-checkpointed",
        summary="A model that is to be checkpointed is not checkpointed already.",
        check=_checkpointed,
        fix="Write checkpointing=NoCheckpointing(), or call model.gradient_checkpointing_disable().",
        source=("pain 21", "G-52"),
        repair=_no_checkpointing,
    ),
    Rule(
        id="model.sharded-parameters",
        summary="DDP and FSDP1 get plain parameters, TensorParallel and FSDP2 also such as they make themselves.",
        check=_dtensors,
        fix="Pass the model before it is sharded.",
        source=("DDP-2", "H-2", "pain 34"),
    ),
    Rule(
        id="model.device-map",
        summary="A model of several processes is not spread over devices by a device map.",
        check=_device_map,
        fix="Load the model without device_map, or run one process with engine=Single().",
        source=("DM-1", "DM-2", "DM-3", "DM-4", "PR-4", "G-27", "pain 23"),
    ),
    Rule(
        id="model.lazy-parameters",
        summary="Every parameter has a shape.",
        check=_lazy,
        fix="Run one forward on a sample batch before planning, which gives lazy modules their shapes.",
        source=("torch UninitializedParameter", "torch DistributedDataParallel"),
    ),
    Rule(
        id="model.nothing-trainable",
        summary="A model that is trained has a trainable parameter.",
        check=_nothing_trainable,
        fix="Call requires_grad_(True) on what is to be trained, or write intent=Intent.INFERENCE.",
        source=("DDP-3", "MC-1", "G-23", "G-30", "pain 19"),
    ),
)
"""Reporting order: what was done to the model, then what it is."""
