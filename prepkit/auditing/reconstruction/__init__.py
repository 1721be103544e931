"""What stands there as the config that asks for it, or every reason why there is none."""

from __future__ import annotations

from typing import Any, cast

from attrs import evolve, fields, frozen

from prepkit.auditing.reconstruction.engines import prepared
from prepkit.auditing.reconstruction.reasons import Reasons
from prepkit.auditing.reconstruction.selection import pattern, selection
from prepkit.config import (
    ActivationLayout,
    CheckpointBlocks,
    Compile,
    CompileBlocks,
    CompileModel,
    Config,
    DeepSpeed,
    Intent,
    Single,
    TPLayer,
    TPPlan,
    TPPlanFromModel,
)
from prepkit.config.blocks import ActivationCheckpointing, CompileOption
from prepkit.config.optimizer import OPTIMIZERS, SELECTS, Group, OptimizerSpec
from prepkit.facts import Facts, GroupFact, ModelFacts, OptimizerFacts
from prepkit.facts.preparation import HowPrepared, OptimizerOptions, SteppedGroup, TensorParallelModule
from prepkit.facts.run import RunFacts
from prepkit.findings import Finding, errors
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES, findings_of

__all__ = ["Reconstruction", "reconstruct"]


@frozen(kw_only=True)
class Reconstruction:
    """The config that is nearest to what stands there, and what it does not say of it."""

    config: Config
    """``overrides`` names the rules that would have refused it."""
    facts: Facts
    """The model as it was before, and the environment."""
    reasons: tuple[Finding, ...]
    """What stands there that the config does not ask for; empty: it is the config."""


def reconstruct(facts: RunFacts) -> Reconstruction:
    """The config for what was seen. Pure, and linear in the size of the model. Raises ``ValueError`` for facts by hand.

    What leaves no trace keeps its default: where the weights came from, clipping and accumulation that a loop does by
    itself, the division of loaders, methods besides ``forward``, time-outs.
    """
    how = facts.preparation
    if how is None:
        raise ValueError("these facts do not say how the model was prepared; take those of pk.audit")
    reasons = Reasons()
    for what in how.unknown:
        reasons.add("model", f"there are {what}, and what they were asked for is not told", "Prepare it with prepkit.")
    trains = bool(facts.optimizers) or (facts.training and any(param.requires_grad for param in how.model.params))
    engine = prepared(facts, how, reasons, trains=trains)
    rest = engine.rest or Config()
    section = isinstance(engine.engine, DeepSpeed) and '"optimizer":' in how.deepspeed
    devices = {param.device for param in facts.params} - {"meta"}
    config = Config(
        engine=engine.engine,
        mesh=engine.mesh,
        tp_plan=_tp_plan(how, reasons),
        precision=engine.precision,
        compile=_compile(how, reasons),
        checkpointing=_checkpointing(how, reasons),
        intent=Intent.TRAINING if trains else Intent.INFERENCE,
        device=_device(devices, how, spread=not isinstance(engine.engine, Single)),
        optimizer=None if section else specs_of(how.optimizers, how.model, reasons),
        accumulation=rest.accumulation or _unlike_default(facts.accumulation),
        global_batch=rest.global_batch,
        clip=rest.clip,
    )
    bare = Facts(model=how.model, optimizer=None if section else live(how.optimizers), env=how.env)
    return Reconstruction(config=_accepted(config, bare), facts=bare, reasons=tuple(reasons.found))


def _unlike_default(accumulation: int | None) -> int | None:
    """Micro-batches of a window; None for one, which is what a config that says nothing means."""
    return None if accumulation == 1 else accumulation


def _accepted(config: Config, bare: Facts) -> Config:
    """The config with the ids of the rules that would have refused it, where a config may accept what they say."""
    overridable = {rule.id for rule in RULES if rule.overridable}
    hits = errors(findings_of(Resolved(cfg=config, facts=bare), RULES))
    return evolve(config, overrides=tuple(dict.fromkeys(hit.rule for hit in hits if hit.rule in overridable)))


def _device(devices: set[str], how: HowPrepared, *, spread: bool) -> str | None:
    """The device that the parameters are on, where the machine has another one that a plan would take."""
    offloaded = spread and (any(unit.offload for unit in how.flat_units) or how.pin_memory)
    return devices.pop() if len(devices) == 1 and how.env.device not in devices and not offloaded else None


def _checkpointing(how: HowPrepared, reasons: Reasons) -> ActivationCheckpointing:
    modules = how.recomputed
    if not modules:
        return None
    first = modules[0]
    for module in modules:
        if module.reentrant or module.unknown:
            what = "torch's reentrant checkpoint" if module.reentrant else module.unknown
            reasons.add(f"model.{module.path}", f"it is recomputed by {what}", "Checkpoint with use_reentrant=False.")
            break
    reasons.same("model", "what recomputed blocks keep", {evolve(module, path="") for module in modules})
    blocks = selection(frozenset(module.path for module in modules), how.model)
    if blocks is None:
        reasons.add("model", "no selection means the modules that are recomputed", "Checkpoint modules below the root.")
        return None
    return CheckpointBlocks(
        blocks=blocks, preserve_rng_state=first.preserve_rng_state, keep_ops=first.keep_ops, offload=first.offload
    )


def _compile(how: HowPrepared, reasons: Reasons) -> Compile:
    if not how.compiled:
        return None
    first = how.compiled[0]
    if first.unknown:
        reasons.add(f"model.{first.path}", first.unknown, "Compile with torch.compile of torch 2.6 or newer.")
    reasons.same(
        "model", "what torch.compile was asked for", {evolve(module, path="", inside=False) for module in how.compiled}
    )
    options = {
        "backend": first.backend,
        "mode": first.mode,
        "fullgraph": first.fullgraph,
        "dynamic": first.dynamic,
        "options": tuple(CompileOption(name=name, value=value) for name, value in first.options if value is not None),
        "recompile_limit": first.recompile_limit,
        "isolate_recompiles": first.isolate_recompiles,
    }
    paths = frozenset(module.path for module in how.compiled)
    if "" in paths:
        if first.inside:
            what = "what is compiled stands inside the wrapper, and graphs are not split at its buckets or units"
            reasons.add("model", what, "Compile what the wrapper has made.")
        if len(paths) > 1:
            reasons.add("model", "the model is compiled, and modules in it once more", "Compile the one or the others.")
        return CompileModel(**options)  # type: ignore[arg-type]  # by name, as CompileBlocks takes them too
    blocks = selection(paths, how.model)
    if blocks is None:
        reasons.add("model", "no selection means the modules that are compiled", "Compile modules with a forward.")
        return None
    return CompileBlocks(blocks=blocks, **options)  # type: ignore[arg-type]  # as above


def _tp_plan(how: HowPrepared, reasons: Reasons) -> TPPlan | TPPlanFromModel:
    cut = how.tensor_parallel
    if not cut:
        return TPPlanFromModel()
    for module in cut:
        if not module.style:
            what = "the hooks that lay out its input and output are not those of torch's styles with local outputs"
            reasons.add(
                f"model.{module.path}", what, "Cut it with ColwiseParallel, RowwiseParallel or SequenceParallel."
            )
    groups: dict[TensorParallelModule, list[str]] = {}
    for module in cut:
        groups.setdefault(evolve(module, path=""), []).append(module.path)
    every = tuple(module.path for module in how.model.modules)
    layers = []
    for form, paths in groups.items():
        one = pattern(tuple(paths), every)
        layers += [_layer(name, form) for name in ((one,) if one is not None else paths)]
    return TPPlan(tuple(layers))


def _layer(path: str, form: TensorParallelModule) -> TPLayer:
    style = form.style or "replicate"
    return TPLayer(
        path,
        style,  # type: ignore[arg-type]  # one of the four
        cast("ActivationLayout", form.input_layout or "replicate"),
        cast("ActivationLayout", form.output_layout or "replicate"),
    )


HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "bias_correction"})
"""Options that say how, and not what, is computed."""
BY_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""Options that schedulers write into groups, as torch's ``OneCycleLR``."""
DEFAULTS: dict[tuple[str, str], object] = {
    ("AdamW", "decoupled_weight_decay"): True,
    ("Adafactor", "eps"): (None, 1e-3),
    ("Muon", "eps"): 1e-7,
    ("Muon", "ns_coefficients"): (3.4445, -4.775, 2.0315),
    ("Muon", "ns_steps"): 5,
}
"""torch's own values of options that no spec has, where they are not false."""


def specs_of(
    given: tuple[OptimizerOptions, ...], model: ModelFacts, reasons: Reasons
) -> OptimizerSpec | tuple[OptimizerSpec, ...] | None:
    """The specs, or None where there is no optimizer, or one whose class no spec names: that one is given live."""
    kinds = [_kind(one) for one in given]
    if not given or None in kinds:
        return None
    trained = tuple(param.name for param in model.params if param.requires_grad)
    made = tuple(
        _spec(
            kind,
            one,
            trained if len(given) == 1 else (),
            f"optimizer[{index}]" if len(given) > 1 else "optimizer",
            reasons,
        )
        for index, (kind, one) in enumerate(zip(kinds, given, strict=True))
        if kind is not None
    )
    return made[0] if len(made) == 1 else made


def live(given: tuple[OptimizerOptions, ...]) -> OptimizerFacts | None:
    """Facts of the optimizer that a plan takes as it is, because no spec names its class; None without such a one."""
    if not given or None not in map(_kind, given):
        return None
    groups = tuple(
        GroupFact(
            slots=group.slots,
            options=tuple((key, value) for key, value in group.options if not isinstance(value, tuple)),
        )
        for one in given
        for group in one.groups
    )
    return OptimizerFacts(name=" + ".join(one.name for one in given), module=given[0].module, groups=groups)


def _kind(one: OptimizerOptions) -> type[OptimizerSpec] | None:
    named = (kind for kind in OPTIMIZERS if kind.__name__ == one.name and one.module.startswith("torch.optim"))
    return cast("type[OptimizerSpec] | None", next(named, None))


def _spec(
    kind: type[OptimizerSpec], one: OptimizerOptions, all_trained: tuple[str, ...], where: str, reasons: Reasons
) -> OptimizerSpec:
    base, *rest = sorted(one.groups, key=lambda group: not group.slots)
    options = _options(base, kind)
    held = [name for group in one.groups for name in group.slots]
    if None in held:
        fix = "Make it from the parameters of the prepared model."
        reasons.add(where, f"`{one.name}` steps tensors that are none of the model's", fix)
    names = tuple(name for name in held if name is not None)
    groups = [_group(group, kind, options, where, reasons) for group in rest if _options(group, kind) != options]
    for group in one.groups:
        for key, value in group.options:
            if key not in {*options, *HOW, *BY_SCHEDULERS} and value and value != DEFAULTS.get((one.name, key)):
                reasons.add(where, f"`{one.name}` has {key}={value!r}, which {kind.__name__} of prepkit has not", _GIVE)
    said: dict[str, Any] = {**options, "groups": tuple(groups)}
    if set(names) != set(all_trained):
        said["names"] = names
    return kind(**said)


def _options(group: SteppedGroup, kind: type[OptimizerSpec]) -> dict[str, Any]:
    usual = {one.name: one.default for one in fields(kind) if one.name not in SELECTS}
    options: dict[str, Any] = {
        key: float(value) if isinstance(usual[key], float) and isinstance(value, int) else value
        for key, value in group.options
        if key in usual
    }
    first = dict(group.options).get("initial_lr")  # a scheduler has changed the other one
    if first is not None:
        options["lr"] = first
    return options


def _group(group: SteppedGroup, kind: type[OptimizerSpec], base: dict[str, Any], where: str, reasons: Reasons) -> Group:
    own = _options(group, kind)
    other = {key: value for key, value in own.items() if value != base.get(key)}
    able = {one.name for one in fields(Group)} - {"names"}
    for key in sorted(set(other) - able):
        reasons.add(where, f"a group has {key}={other[key]!r} of its own", _GIVE)
    names = tuple(name for name in group.slots if name is not None)
    return Group(names=names, **{key: value for key, value in other.items() if key in able})


_GIVE = "Give build_plan the optimizer itself, and leave Config.optimizer out."
