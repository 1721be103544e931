"""What stands around modules: twice, inside out, or without effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some, spans
from prepkit.rules.rule import Hit, Moment, Need, Rule
from prepkit.rules.run.gradients import REENTRANT, recomputed

WORDS = {
    "ddp": "DistributedDataParallel",
    "compiled": "torch.compile",
    "fsdp1": "FullyShardedDataParallel",
    "deepspeed": "DeepSpeedEngine",
}
"""Wrappers that a module has once, as users write them."""


def _twice(facts: RunFacts) -> Iterator[Hit]:
    for place in facts.wrapped:
        for word, number in Counter(place.wrappers).items():
            if number > 1 and word in WORDS:
                what = f"{number} times {WORDS[word]}, one around the other."
                yield Hit(at(place.path), what, milder=word != "deepspeed")
        if {"ddp", "fsdp1"} <= set(place.wrappers) or {"ddp", "deepspeed"} <= set(place.wrappers):
            names = " around ".join(WORDS[word] for word in place.wrappers if word in WORDS)
            yield Hit(at(place.path), f"{names}: two average the same gradients.")


def _cut(facts: RunFacts) -> Iterator[Hit]:
    for line, name, apart in facts.window.cut_otherwise if facts.window is not None else ():
        what = f"{name} computes otherwise since it was cut over the ranks here: by {apart:.2g} of its largest output,"
        yield Hit(line, f"{what} given the same, with the weights that it had.")


def _alike(facts: RunFacts) -> Iterator[Hit]:
    told = facts.window.parts_alike if facts.window is not None else ()
    if told:
        name, ranks = told[0]
        what = (
            f"Ranks {spans(ranks)} hold the same numbers as parts of {count(len(told), 'parameter')}, each at a place"
        )
        names = some([name for name, _ in told])
        yield Hit(at(name), f"{what} of its own: {names}. So one half of a matrix begins, and may stay, as the other.")


def _nested(facts: RunFacts) -> Iterator[Hit]:
    around = {place.path: place for place in facts.wrapped if {"ddp", "deepspeed"} & set(place.wrappers)}
    for place in facts.wrapped:
        above = {*_above(place.path), ""} & around.keys()
        if "ddp" in place.wrappers and place.path and above:
            what = "DistributedDataParallel inside another: two average the same gradients."
            yield Hit(at(place.path), what, milder=not any("deepspeed" in around[path].wrappers for path in above))


def _either(facts: RunFacts) -> Iterator[Hit]:
    yield from _twice(facts)
    yield from _nested(facts)


def _checkpointed(facts: RunFacts) -> tuple[str, ...]:
    """Paths of modules that are recomputed as a whole; transformers' flag at a layer is one."""
    return tuple(place.path for place in facts.wrapped if "checkpointed" in place.wrappers)


def _checkpointed_twice(facts: RunFacts) -> Iterator[Hit]:
    twice = tuple(place.path for place in facts.wrapped if Counter(place.wrappers)["checkpointed"] > 1)
    paths = set(_checkpointed(facts))
    nested = tuple(path for path in _checkpointed(facts) if path and _above(path) & paths)
    hits = tuple(dict.fromkeys((*twice, *nested)))
    if hits:
        yield Hit(at(hits[0]), f"Checkpointed inside what is checkpointed: {some(hits)}.")


def _above(path: str) -> set[str]:
    parts = path.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def _whole(facts: RunFacts) -> Iterator[Hit]:
    for place in facts.wrapped:
        if not place.path and place.wrappers[-1] == "checkpointed" and len(facts.model.modules) > 2:
            yield Hit("model", "The whole model is one checkpoint: backward holds every activation again, all at once.")


def _outside(facts: RunFacts) -> Iterator[Hit]:
    bad = tuple(
        place.path
        for place in facts.wrapped
        if {"checkpointed", "fsdp1"} <= set(place.wrappers)
        and place.wrappers.index("checkpointed") < place.wrappers.index("fsdp1")
    )
    if bad:
        what = f"Checkpoints stand around {count(len(bad), 'unit')} of FSDP, not inside: {some(bad)}."
        yield Hit(at(bad[0]), what)


def _reentrant(facts: RunFacts) -> Iterator[Hit]:
    model = facts.model
    name = f"{model.input_embedding}.weight"
    frozen = any(param.name == name and not param.requires_grad for param in facts.params)
    reentrant = tuple(module.path for module in model.modules if "reentrant" in module.marks)
    if reentrant and frozen and not model.grad_inputs:
        what = (
            f"`{name}` is frozen under use_reentrant=True ({count(len(reentrant), 'module')}): no input "
            "requires a gradient, so that nothing inside gets one."
        )
        yield Hit(at(reentrant[0]), what)
    elif cut := recomputed(facts):
        name, line = next(iter(cut.items()))
        what = f"checkpoint(..., use_reentrant=True) ({line}) was given no input that requires a gradient:"
        inside = f"none reaches {count(len(cut), 'parameter')} inside: {some(tuple(cut))}."
        yield Hit(at(name), f"{what} {inside}", REENTRANT)


def _off(facts: RunFacts) -> Iterator[Hit]:
    compiled = tuple(module.path for module in facts.model.modules if "compiled" in module.marks)
    if facts.compile_off and compiled:
        what = f"torch compiles nothing in this process, not what is to be compiled: {some(compiled)}."
        yield Hit(at(compiled[0]), what)


def _one_unit(facts: RunFacts) -> Iterator[Hit]:
    parents = {module.path.rpartition(".")[0] for module in facts.model.modules}
    blocks = Counter(
        (module.path.rpartition(".")[0], module.cls)
        for module in facts.model.modules
        if module.path.rpartition(".")[2].isdigit() and module.path in parents
    )
    repeated = [place for place, number in blocks.items() if number > 1]
    if facts.units == ("",) and facts.world_size > 1 and repeated:
        (parent, cls), name = repeated[0], facts.model.classes[repeated[0][1]].name
        what = f"One unit holds the whole model, and gathers it whole; `{parent}` has {blocks[parent, cls]} `{name}`."
        fix = f"Make each `{name}` a unit: fully_shard(block), or auto_wrap_policy=ModuleWrapPolicy({{{name}}})."
        yield Hit("model", what, fix)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.wrapped-twice",
        summary="Gradients are averaged by one wrapper.",
        check=_either,
        at=(Moment.AUDIT,),
        fix="Give the model to one of them, once.",
        milder="for a wrapper of torch in another of its kind, which do the work twice and come to the same",
        source=("pain 19",),
    ),
    Rule(
        id="run.reentrant-frozen",
        summary="Gradients reach what is inside reentrant checkpoints.",
        check=_reentrant,
        at=(Moment.AUDIT,),
        needs=(Need.GRADIENTS,),
        fix="Write use_reentrant=False, or call model.enable_input_require_grads().",
        source=("pain 28",),
    ),
    Rule(
        id="run.checkpointed-twice",
        summary="Nothing is recomputed within what is recomputed.",
        check=_checkpointed_twice,
        at=(Moment.AUDIT,),
        fix="Keep one of the two: the model's own gradient checkpointing, or that of the wrapper.",
        severity=Severity.WARNING,
        source=("pain 21",),
    ),
    Rule(
        id="run.checkpointed-whole",
        summary="Checkpoints divide the model.",
        check=_whole,
        at=(Moment.AUDIT,),
        fix=(
            "Checkpoint each block instead: torch.distributed.algorithms._checkpoint.checkpoint_wrapper."
            "apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))."
        ),
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.checkpoint-outside",
        summary="Checkpoints stand inside the units of FSDP1.",
        check=_outside,
        at=(Moment.AUDIT,),
        fix="Write FSDP(checkpoint_wrapper(block)), so that recomputing gathers no unit twice.",
        severity=Severity.WARNING,
        source=("pain 21",),
    ),
    Rule(
        id="run.compile-off",
        summary="What is to be compiled can be.",
        check=_off,
        at=(Moment.AUDIT,),
        fix="Unset TORCHDYNAMO_DISABLE, and leave torch._dynamo.config.disable False.",
        severity=Severity.WARNING,
        source=("pain 20",),
    ),
    Rule(
        id="run.cut-otherwise",
        summary="What is cut over ranks computes what it computed whole.",
        check=_cut,
        at=(Moment.AUDIT,),
        fix=(
            "Cut what is used in parts by these: a layer for the queries, one for the keys and one for the values, and "
            "whole heads. Behind ColwiseParallel follows RowwiseParallel, which sums."
        ),
        severity=Severity.WARNING,
        source=("torch parallelize_module", "torch ColwiseParallel"),
    ),
    Rule(
        id="run.parts-alike",
        summary="Parts of a parameter that ranks hold are drawn apart.",
        check=_alike,
        at=(Moment.AUDIT,),
        fix=(
            "Draw into the parameter itself, as by nn.init.normal_(param), or whole on each rank before it is cut; "
            "where to_local() is drawn into, seed by the rank."
        ),
        severity=Severity.WARNING,
        source=("torch DTensor: random operators", "torch fully_shard"),
    ),
    Rule(
        id="run.one-unit",
        summary="Several units share a model of repeated blocks, so that one is gathered at a time.",
        check=_one_unit,
        at=(Moment.AUDIT,),
        fix="Make each block a unit.",
        severity=Severity.WARNING,
        source=("pain 7",),
    ),
)
"""Reporting order: what trains wrongly, then what wastes memory or time."""
