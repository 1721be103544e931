"""Methods that are called in the place of the forward, against what the model has."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.facts.model import WELL_KNOWN
from prepkit.findings import Severity
from prepkit.findings.text import did_you_mean, some
from prepkit.resolve.entry_points import through
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

_WHERE = "config.entry_points"
_FIX = "Write the name of a method that the model's class defines, or leave it out."
_STANDS_IN_THE_WAY = {
    "units": "its own parameters are sharded outside a forward",
    "wrapper": "the wrapper neither gathers nor averages for it",
    "forward": "it runs outside the precision of the forward",
}


def _unknown(resolved: Resolved) -> Iterator[Hit]:
    model = resolved.facts.model
    for name in resolved.cfg.entry_points or ():
        if name == "forward":
            yield Hit(_WHERE, "`forward` is the entry point that every model has.", "Leave it out.")
        elif name not in model.methods:
            there = f"; it has {some(model.methods)}" if model.methods else ""
            yield Hit(
                _WHERE, f"The model has no method `{name}` of its own{there}.", _FIX + did_you_mean(name, model.methods)
            )


def _left_out(resolved: Resolved) -> Iterator[Hit]:
    way, asked = through(resolved.cfg), resolved.cfg.entry_points
    if way is None or asked is None:
        return
    left = tuple(name for name in resolved.facts.model.methods if name in WELL_KNOWN and name not in asked)
    if left:
        what = f"{some(left)} will not work as forward does on the prepared model: {_STANDS_IN_THE_WAY[way]}."
        yield Hit(_WHERE, what, f"Write entry_points={(*asked, *left)!r}, or leave entry_points out, which means them.")


def _known(cfg: Config, facts: Facts) -> Config:
    kept = tuple(name for name in cfg.entry_points or () if name in facts.model.methods and name != "forward")
    return evolve(cfg, entry_points=kept or None)


RULES: tuple[Rule, ...] = (
    Rule(
        id="entry-points.unknown",
        summary="Every entry point is a method of the model.",
        check=_unknown,
        fix=_FIX,
        source=("torch register_fsdp_forward_method",),
        repair=_known,
    ),
    Rule(
        id="entry-points.left-out",
        summary="Where methods are named that run as the forward does, the model's well-known ones are among them.",
        check=_left_out,
        fix="Name them as well.",
        severity=Severity.WARNING,
        source=("torch register_fsdp_forward_method",),
    ),
)
"""Reporting order: the names, then what they leave out."""
