"""The places of a config that select modules, how messages speak of blocks, and how a repair changes selections."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, fields, frozen

from prepkit.config import (
    FSDP1,
    FSDP2,
    CheckpointBlocks,
    CompileBlocks,
    CompileModel,
    Config,
    NoCheckpointing,
    Wrap,
    WrapBlocks,
    WrapRoot,
)
from prepkit.facts import Facts, ModelFacts
from prepkit.findings.text import short
from prepkit.resolve.engines import wrap_of
from prepkit.resolve.modules import repeated_blocks, select


@frozen(kw_only=True)
class Selection:
    """One place of the config that selects modules."""

    where: str
    wrap: Wrap


def selections(cfg: Config) -> tuple[Selection, ...]:
    """Every selection of the config."""
    out: list[Selection] = []
    if (units := wrap_of(cfg)) is not None:
        out.append(Selection(where="config.engine.wrap", wrap=units))
    return (*out, *blocks(cfg))


def blocks(cfg: Config) -> tuple[Selection, ...]:
    """The selections of blocks, which do nothing when they select nothing."""
    out: list[Selection] = []
    if isinstance(cfg.checkpointing, CheckpointBlocks):
        out.append(Selection(where="config.checkpointing.blocks", wrap=cfg.checkpointing.blocks))
    if isinstance(cfg.compile, CompileBlocks):
        out.append(Selection(where="config.compile.blocks", wrap=cfg.compile.blocks))
    return tuple(out)


def below_root(model: ModelFacts) -> set[int]:
    """Classes that modules below the root have, as indices into ``model.classes``."""
    return {module.cls for module in model.modules if module.path}


def known_blocks(model: ModelFacts) -> str:
    """The repeated blocks with their numbers and sizes, as a sentence to put behind a message."""
    repeated = repeated_blocks(model)
    if not repeated:
        return "The model has no repeated blocks."
    first = {block.paths[0]: 0 for block in repeated}
    for param in model.params:
        for path in first:
            if param.name.startswith(path + "."):
                first[path] += param.numel
    shown = (f"`{b.cls}` x{len(b.paths)} ({short(first[b.paths[0]])} parameters each)" for b in repeated)
    return f"Repeated blocks: {', '.join(shown)}."


def instead(model: ModelFacts) -> str:
    """What to type in the place of a selection that does not fit the model."""
    repeated = repeated_blocks(model)
    return f'WrapClasses(("{repeated[0].cls}",)) or WrapBlocks()' if repeated else "WrapRoot()"


def mend(change: Callable[[Wrap, ModelFacts], Wrap | None]) -> Callable[[Config, Facts], Config]:
    """A repair that changes every selection; what has no selection left gets the model's own blocks, or is left out."""

    def repair(cfg: Config, facts: Facts) -> Config:
        model = facts.model
        own = WrapBlocks() if select(WrapBlocks(), model) else None
        if isinstance(cfg.engine, FSDP1 | FSDP2):
            whole = change(cfg.engine.wrap, model) or own or WrapRoot()
            cfg = evolve(cfg, engine=evolve(cfg.engine, wrap=whole))
        if isinstance(cfg.checkpointing, CheckpointBlocks):
            mended = change(cfg.checkpointing.blocks, model) or own
            kept = evolve(cfg.checkpointing, blocks=mended) if mended else NoCheckpointing()
            cfg = evolve(cfg, checkpointing=kept)
        if isinstance(cfg.compile, CompileBlocks):
            mended = change(cfg.compile.blocks, model) or own
            cfg = evolve(cfg, compile=evolve(cfg.compile, blocks=mended) if mended else whole_model(cfg.compile))
        return cfg

    return repair


def whole_model(how: CompileBlocks) -> CompileModel:
    """The same compilation, of the whole model."""
    return CompileModel(**{field.name: getattr(how, field.name) for field in fields(CompileModel)})
