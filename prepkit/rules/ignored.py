"""Modules that FSDP1 and FSDP2 leave out of their units."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import FSDP1, FSDP2, Config, Intent
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import count, did_you_mean, some
from prepkit.resolve.modules import matcher
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule, under


def _unmatched(resolved: Resolved) -> tuple[str, ...]:
    if not isinstance(resolved.cfg.engine, FSDP1 | FSDP2) or not resolved.cfg.engine.ignored:
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
    if cfg.intent is not Intent.TRAINING or facts.env.world_size < 2:
        return
    left_out = resolved.ignored_params
    if names := [p.name for p in facts.model.params if p.requires_grad and p.name in left_out]:
        what = f"{count(len(names), 'trainable parameter')} in ignored modules ({some(names)}): nobody averages the"
        yield Hit("config.engine.ignored", f"{what} gradients, so the {facts.env.world_size} ranks would drift apart.")


def _ignored_dtype(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    low = resolved.compute_dtypes.param if resolved.compute_dtypes else None
    left_out, stored = resolved.ignored_params, resolved.stored_dtypes
    if not left_out or low is None or resolved.arrives_sharded:
        return
    params = (p for p in facts.model.params if p.name in left_out and p.shape)  # a single number widens no tensor
    names = [p.name for p in params if "float" in p.dtype and stored[p.name] != low]
    if names:
        what = f"{count(len(names), 'ignored parameter')} not in {low} ({some(names)}): layers that take what comes out"
        yield Hit("config.engine.ignored", f"{what} of their modules, and compute in {low}, may refuse it.")


def _known_patterns(cfg: Config, facts: Facts) -> Config:
    assert isinstance(cfg.engine, FSDP1 | FSDP2), "no other engine ignores modules"
    bad = _unmatched(Resolved(cfg=cfg, facts=facts))
    known = tuple(pattern for pattern in cfg.engine.ignored if pattern not in bad)
    return evolve(cfg, engine=evolve(cfg.engine, ignored=known))


RULES: tuple[Rule, ...] = (
    Rule(
        id="units.ignored-not-found",
        summary="Every pattern of ignored modules matches one.",
        check=_ignored_not_found,
        fix="Leave it out, or write the path of a module.",
        source=("F1-6", "F1-49", "SS-7"),
        repair=_known_patterns,
    ),
    Rule(
        id="fsdp1.ignored-trains",
        summary="Nothing that FSDP1 ignores is trained.",
        check=under(FSDP1, _ignored_trains),
        fix="Write engine=FSDP2(ignored=...), which averages them; or call requires_grad_(False) on them.",
        source=("F1-49", "pain 9"),
    ),
    Rule(
        id="units.ignored-dtype",
        summary="What is ignored has the dtype that the units compute in.",
        check=_ignored_dtype,
        fix="Cast the ignored modules to that dtype, or leave out of config.engine.ignored what is tied to a layer.",
        severity=Severity.WARNING,
        source=("F1-49", "pain 8", "torch FlatParamHandle", "torch fully_shard ignored_params"),
    ),
)
"""Reporting order: the names, then what is ignored."""
