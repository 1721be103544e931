"""Modules that FSDP1 leaves out of its units."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import FSDP1, Config, Intent
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import count, did_you_mean, some
from prepkit.resolve.modules import matcher
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def _unmatched(resolved: Resolved) -> tuple[str, ...]:
    if not isinstance(resolved.cfg.engine, FSDP1):
        return ()
    paths = tuple(module.path for module in resolved.facts.model.modules if module.path)
    return tuple(pattern for pattern in resolved.cfg.engine.ignored if not any(map(matcher((pattern,)), paths)))


def _ignored_not_found(resolved: Resolved) -> Iterator[Hit]:
    for pattern in _unmatched(resolved):
        what = f"The pattern `{pattern}` matches no module; `*` stays inside one segment of a path."
        hint = did_you_mean(pattern, (module.path for module in resolved.facts.model.modules if module.path))
        yield Hit("config.engine.ignored", what, f"Leave it out, or write the path of a module.{hint}")


def _ignored_trains(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if not isinstance(cfg.engine, FSDP1) or cfg.intent is not Intent.TRAINING or facts.env.world_size < 2:
        return
    left_out = resolved.ignored_params
    if names := [p.name for p in facts.model.params if p.requires_grad and p.name in left_out]:
        what = f"{count(len(names), 'trainable parameter')} in ignored modules ({some(names)}): nobody averages the"
        yield Hit("config.engine.ignored", f"{what} gradients, so the {facts.env.world_size} ranks would drift apart.")


def _ignored_dtype(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    low = resolved.compute_dtypes.param if resolved.compute_dtypes else None
    if not isinstance(resolved.cfg.engine, FSDP1) or low is None:
        return
    left_out = resolved.ignored_params
    names = [p.name for p in facts.model.params if p.name in left_out and "float" in p.dtype and p.dtype != low]
    if names:
        what = f"{count(len(names), 'ignored parameter')} not in {low} ({some(names)}): layers that take what comes out"
        yield Hit("config.engine.ignored", f"{what} of their modules, and compute in {low}, may refuse it.")


def _known_patterns(cfg: Config, facts: Facts) -> Config:
    assert isinstance(cfg.engine, FSDP1), "only FSDP1 ignores modules"
    bad = _unmatched(Resolved(cfg=cfg, facts=facts))
    return evolve(cfg, engine=evolve(cfg.engine, ignored=tuple(p for p in cfg.engine.ignored if p not in bad)))


RULES: tuple[Rule, ...] = (
    Rule(
        id="fsdp1.ignored-not-found",
        summary="Every pattern of ignored modules matches one.",
        check=_ignored_not_found,
        fix="Leave it out, or write the path of a module.",
        source=("F1-6", "F1-49", "SS-7"),
        repair=_known_patterns,
    ),
    Rule(
        id="fsdp1.ignored-trains",
        summary="Nothing that is ignored is trained.",
        check=_ignored_trains,
        fix="Call requires_grad_(False) on them, or leave them out of ignored.",
        source=("F1-49", "pain 9"),
    ),
    Rule(
        id="fsdp1.ignored-dtype",
        summary="What FSDP1 ignores has the dtype that the units compute in.",
        check=_ignored_dtype,
        fix="Cast the ignored modules to that dtype, or leave out of config.engine.ignored what is tied to a layer.",
        severity=Severity.WARNING,
        source=("F1-49", "pain 8", "torch FlatParamHandle"),
    ),
)
"""Reporting order: the names, then what is ignored."""
