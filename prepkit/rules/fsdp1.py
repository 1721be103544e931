"""What FSDP1 asks of its arguments, and of the parameters and states that become one flat parameter."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.config import FSDP1, Intent
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.resolve.mesh import size_of
from prepkit.resolve.resolved import Resolved
from prepkit.rules.environment import BACKENDS
from prepkit.rules.optimizer import SHAPED, classes
from prepkit.rules.rule import Hit, Moment, Rule, options, with_engine


def _on_cpu(resolved: Resolved) -> bool:
    """Return whether the CPU computes, or a device that ranks cannot talk through."""
    return "cpu" in (resolved.cfg.device, resolved.facts.env.device) or resolved.facts.env.device not in BACKENDS


def _sync(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    if engine.sync_module_states and _on_cpu(resolved):
        what = "torch broadcasts the states of modules on an accelerator only, and this runs on the CPU."
        yield Hit("config.engine.sync_module_states", what)


def _offload(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    if engine.offload and _on_cpu(resolved):
        what = (
            "The shards are in host memory already, and torch pins offloaded ones for an accelerator that is not here."
        )
        yield Hit("config.engine.offload", what)


def _buffers(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    cfg = resolved.cfg
    if engine.buffer_dtype and cfg.precision is None:
        what = f"{engine.buffer_dtype} has no effect: with precision=None nothing is cast."
        yield Hit("config.engine.buffer_dtype", what)


def _no_shard(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    if engine.sharding == "NO_SHARD" and resolved.facts.env.world_size > 1:
        yield Hit("config.engine.sharding", "torch has deprecated NO_SHARD: DDP does the same, and overlaps better.")


def _tied_gradients(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    cfg = resolved.cfg
    mesh = resolved.mesh
    if not engine.use_orig_params or resolved.accumulation < 2 or mesh is None:
        return
    low = resolved.compute_dtypes.param if resolved.compute_dtypes else None
    if size_of("shard", mesh) > 1 or low is None or cfg.intent is not Intent.TRAINING:
        return
    stored, left_out = resolved.stored_dtypes, resolved.ignored_params
    trained = {p.name for p in resolved.facts.model.params if p.requires_grad and p.name not in left_out}
    for group in resolved.facts.model.ties:
        if group[0] in trained and stored[group[0]] != low:
            what = f"{some(group)} are one parameter in {stored[group[0]]}: between micro-batches its gradient stays"
            yield Hit(at(group[0]), f"{what} in {low}, and torch cannot give that to its second name.")


def _compiled(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    cfg = resolved.cfg
    if not engine.use_orig_params and cfg.compile is not None:
        what = "torch.compile breaks the graph at every module whose parameters are gone."
        yield Hit("config.engine.use_orig_params", what)


def _mixed_training(resolved: Resolved) -> tuple[tuple[str, list[str], list[str]], ...]:
    """Units that hold trainable and frozen parameters, with the names of both."""
    mixed = []
    for unit, params in resolved.flat_params.items():
        trained, frozen = ([p.name for p in params if p.requires_grad is on] for on in (True, False))
        if trained and frozen:
            mixed.append((unit, trained, frozen))
    return tuple(mixed)


def _others(number: int) -> str:
    return f" So do {count(number, 'other unit')}." if number > 1 else " So does 1 other unit." if number else ""


def _mixed_requires_grad(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    mixed = _mixed_training(resolved)
    if mixed and not engine.use_orig_params:
        unit, trained, frozen = mixed[0]
        what = (
            f"The unit holds {len(trained)} trainable and {len(frozen)} frozen parameters ({some(frozen)}), and a flat"
        )
        yield Hit(at(unit), f"{what} parameter is either.{_others(len(mixed) - 1)}")


def _frozen_gradients(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    cfg = resolved.cfg
    mixed = _mixed_training(resolved) if cfg.intent is Intent.TRAINING else ()
    if not mixed or not engine.use_orig_params or resolved.mesh is None:
        return
    parts, numel = resolved.flat_shards, {p.name: p.numel for p in resolved.facts.model.params}
    unit, _, frozen = mixed[0]
    total = sum(numel[name] // parts[name].shards for _, _, names in mixed for name in names)
    what = f"The unit trains some parameters and not {some(frozen)}.{_others(len(mixed) - 1)} A flat parameter has one"
    yield Hit(at(unit), f"{what} gradient: about {total} elements of it per rank are for frozen ones.")


def _two_groups(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    facts = resolved.facts
    given = facts.optimizer
    lists = tuple(group.slots for group in given.groups) if given else tuple(_created(resolved))
    if engine.use_orig_params or not lists:
        return
    group_of = {name: i for i, names in enumerate(lists) for name in names if name}
    for unit, params in resolved.flat_params.items():
        groups = {group_of.get(p.name) for p in params if p.requires_grad}
        if len(groups) > 1:
            odd = [p.name for p in params if p.requires_grad and group_of.get(p.name) != group_of.get(params[0].name)]
            lie = "are in no group" if None in groups else f"lie in {len(groups)} groups"
            what = f"Parameters of the unit {lie} of the optimizer ({some(odd)}): after use_orig_params=False they are"
            yield Hit(at(unit), f"{what} one flat parameter, which can be in one.")
            return


def _created(resolved: Resolved) -> Iterator[tuple[str, ...]]:
    """The parameters of each group of each optimizer that the config asks for."""
    for made in resolved.created_optimizers:
        yield from (made.rest, *(group.names for group in made.groups))


def _partial_state(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    facts = resolved.facts
    if engine.use_orig_params or facts.optimizer is None:
        return
    stateful = set(facts.optimizer.stateful)
    for unit, params in resolved.flat_params.items():
        without = [p.name for p in params if p.name not in stateful]
        if 0 < len(without) < len(params):
            what = f"Some parameters of the unit have optimizer state, {some(without)} not: they would share one."
            yield Hit(at(unit), what)
            return


def _shaped(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    cut = resolved.facts.env.world_size > 1 and engine.sharding != "NO_SHARD"
    for where, _, name in classes(resolved) if cut or not engine.use_orig_params else ():
        if name in SHAPED:
            what = (
                f"`{name}` computes from each parameter's shape or norm, and would get one-dimensional parts of them."
            )
            yield Hit(where, what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="fsdp1.mixed-requires-grad",
        summary="Without use_orig_params the parameters of a unit are all trainable or all frozen.",
        check=with_engine(FSDP1, _mixed_requires_grad),
        fix="Write use_orig_params=True, or give the frozen modules units of their own.",
        source=("pain 9", "torch _validate_tensors_to_flatten"),
        repair=options(FSDP1, use_orig_params=True),
    ),
    Rule(
        id="fsdp1.unit-in-two-groups",
        summary="Without use_orig_params the trainable parameters of a unit are in one group of the optimizer.",
        check=with_engine(FSDP1, _two_groups),
        fix="Write use_orig_params=True, or put the unit's parameters into one group.",
        at=(Moment.PLAN, Moment.ACT),
        source=("pain 1", "G-1", "F1-47"),
        repair=options(FSDP1, use_orig_params=True),
    ),
    Rule(
        id="fsdp1.partial-state",
        summary="Without use_orig_params all parameters of a unit have optimizer state, or none has.",
        check=with_engine(FSDP1, _partial_state),
        fix="Write use_orig_params=True, or prepare before the first optimizer step.",
        source=("G-4", "F1-47"),
        repair=options(FSDP1, use_orig_params=True),
    ),
    Rule(
        id="fsdp1.compiled-flat",
        summary="What is compiled keeps its parameters.",
        check=with_engine(FSDP1, _compiled),
        fix="Write use_orig_params=True, or compile=None.",
        source=("torch _annotate_modules_for_dynamo", "F1-47"),
        repair=options(FSDP1, use_orig_params=True),
    ),
    Rule(
        id="fsdp1.shaped-optimizer",
        summary="The optimizer needs no more of a parameter than its elements.",
        check=with_engine(FSDP1, _shaped),
        fix="Use AdamW or SGD, or write engine=DDP().",
        source=("pain 13", "F1-47"),
    ),
    Rule(
        id="fsdp1.sync-on-cpu",
        summary="Module states are broadcast on an accelerator.",
        check=with_engine(FSDP1, _sync),
        fix="Write sync_module_states=False, and build the model alike on every rank.",
        at=(Moment.PLAN, Moment.ACT),
        source=("F1-44", "K-F15", "torch _check_module_states_for_sync_module_states"),
        repair=options(FSDP1, sync_module_states=False),
    ),
    Rule(
        id="fsdp1.offload-on-cpu",
        summary="What is offloaded computes on an accelerator.",
        check=with_engine(FSDP1, _offload),
        fix="Write offload=False.",
        source=("F1-41", "torch FlatParamHandle.init_flat_param_attributes"),
        repair=options(FSDP1, offload=False),
    ),
    Rule(
        id="fsdp1.buffer-dtype-ignored",
        summary="A buffer_dtype is asked for where something is cast.",
        check=with_engine(FSDP1, _buffers),
        fix="Leave buffer_dtype out, or write precision=BF16().",
        severity=Severity.WARNING,
        source=("F1-43", "pain 24"),
        repair=options(FSDP1, buffer_dtype=None),
    ),
    Rule(
        id="fsdp1.frozen-gradients",
        summary="No gradient memory is spent on frozen parameters.",
        check=with_engine(FSDP1, _frozen_gradients),
        fix="Give what is trained units of its own, for example with WrapClasses, if the memory matters.",
        severity=Severity.WARNING,
        source=("pain 9",),
    ),
    Rule(
        id="fsdp1.tied-gradients",
        summary="Where FSDP1 accumulates whole gradients in 16 bits, a tied parameter is stored so too, or is flat.",
        check=with_engine(FSDP1, _tied_gradients),
        fix="Write engine=DDP(), which does the same, or use_orig_params=False, or accumulation=1.",
        source=("torch FlatParamHandle._use_sharded_grad_views",),
    ),
    Rule(
        id="fsdp1.no-shard",
        summary="FSDP1 shards.",
        check=with_engine(FSDP1, _no_shard),
        fix="Write engine=DDP().",
        severity=Severity.WARNING,
        source=("F1-40", "K-F2", "torch _init_core_state"),
    ),
)
"""Reporting order: what would not train, what torch refuses, what is wasted."""
