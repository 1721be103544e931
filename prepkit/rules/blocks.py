"""What a selection of modules amounts to: nothing, everything at once, or blocks inside blocks."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import (
    CompileBlocks,
    Config,
    NoCheckpointing,
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapPaths,
    WrapSize,
)
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import short, some
from prepkit.resolve.engines import wrap_of
from prepkit.resolve.modules import select
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule
from prepkit.rules.selections import below_root, blocks, known_blocks, selections, whole_model


def _explained_by_none(wrap: Wrap) -> bool:
    """Whether no other rule explains an empty selection."""
    return not isinstance(wrap, WrapClasses | WrapPaths) and not (isinstance(wrap, WrapSize) and wrap.min_params < 1)


def _no_blocks(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    for chosen in blocks(resolved.cfg):
        if _explained_by_none(chosen.wrap) and not resolved.selected[chosen.wrap]:
            what = f"{chosen.wrap} selects no module, so that this would do nothing. {known_blocks(facts.model)}"
            yield Hit(chosen.where, what)


def _one_unit(resolved: Resolved) -> Iterator[Hit]:
    wrap, facts = wrap_of(resolved.cfg), resolved.facts
    if wrap is None or not _explained_by_none(wrap) or not facts.model.params:
        return
    if not resolved.selected[wrap]:
        total = short(sum(param.numel for param in facts.model.params))
        what = f"{wrap} selects no module: one unit holds 100 % of the {total} parameters"
        yield Hit("config.engine.wrap", f"{what} and is gathered whole. {known_blocks(facts.model)}")


def _nested(resolved: Resolved) -> Iterator[Hit]:
    for chosen in blocks(resolved.cfg):
        paths = resolved.selected[chosen.wrap]
        chosen_paths = frozenset(paths)
        inner = tuple(path for path in paths if _lies_inside(path, chosen_paths))
        if inner:
            what = f"{some(inner)} {'lies' if len(inner) == 1 else 'lie'} inside other selected modules."
            yield Hit(chosen.where, what)


def _lies_inside(path: str, chosen: frozenset[str]) -> bool:
    while path := path.rpartition(".")[0]:
        if path in chosen:
            return True
    return False


def _declared_absent(resolved: Resolved) -> Iterator[Hit]:
    model = resolved.facts.model
    uses = tuple(chosen.where for chosen in selections(resolved.cfg) if isinstance(chosen.wrap, WrapBlocks))
    present = {model.classes[cls].name for cls in below_root(model)}
    if uses and model.declared_blocks and not present & set(model.declared_blocks):
        what = f"`_no_split_modules` declares {some(model.declared_blocks)}, none of which the model contains."
        yield Hit(uses[0], f"{what} {known_blocks(model)}")


def _leave_out(cfg: Config, facts: Facts) -> Config:
    empty = {
        chosen.where
        for chosen in blocks(cfg)
        if _explained_by_none(chosen.wrap) and not select(chosen.wrap, facts.model)
    }
    if "config.checkpointing.blocks" in empty:
        cfg = evolve(cfg, checkpointing=NoCheckpointing())
    if "config.compile.blocks" in empty and isinstance(cfg.compile, CompileBlocks):
        cfg = evolve(cfg, compile=whole_model(cfg.compile))
    return cfg


RULES: tuple[Rule, ...] = (
    Rule(
        id="blocks.none-selected",
        summary="What is to be checkpointed or compiled per block selects at least one module.",
        check=_no_blocks,
        fix="Name the blocks with WrapClasses or WrapPaths, or write NoCheckpointing() or CompileModel().",
        source=("G-6", "G-7", "pain 20"),
        repair=_leave_out,
    ),
    Rule(
        id="blocks.one-unit",
        summary="What is sharded has more units than the root.",
        check=_one_unit,
        fix='Name the blocks: wrap=WrapClasses(("...",)), WrapPaths(("...",)) or WrapSize(1_000_000).',
        severity=Severity.WARNING,
        source=("pain 7", "G-9"),
    ),
    Rule(
        id="blocks.nested",
        summary="No block to be checkpointed or compiled lies inside another one.",
        check=_nested,
        fix="Select the outer or the inner modules: nested ones are recomputed, or compiled, twice.",
        severity=Severity.WARNING,
        source=("G-7", "G-52"),
    ),
    Rule(
        id="blocks.declared-absent",
        summary="The model contains a class that it declares in `_no_split_modules`.",
        check=_declared_absent,
        fix="Name the blocks with WrapClasses or WrapPaths if the repeated blocks are not the ones you want.",
        severity=Severity.WARNING,
        source=("pain 5", "H-11a"),
    ),
)
"""Reporting order: nothing, everything, too much."""
