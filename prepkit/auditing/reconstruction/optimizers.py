"""Live optimizers as specs of a config."""

from __future__ import annotations

from typing import Any, cast

from attrs import fields

from prepkit.auditing.reconstruction.reasons import Reasons
from prepkit.config.optimizer import OPTIMIZERS, SELECTS, Group, OptimizerSpec
from prepkit.facts import GroupFact, ModelFacts, OptimizerFacts
from prepkit.facts.preparation import OptimizerOptions, SteppedGroup

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
