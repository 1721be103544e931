"""Names, patterns and sizes that select modules: against the model, and for nothing, everything or nested blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from attrs import evolve, fields, frozen

from prepkit.config import (
    FSDP1,
    FSDP2,
    CheckpointBlocks,
    CompileBlocks,
    CompileModel,
    Config,
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.facts import Facts, ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import did_you_mean, near, short, some
from prepkit.resolve.engines import wrap_of
from prepkit.resolve.modules import matcher, parent, repeated_blocks, select
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Moment, Rule

# --- selections ------------------------------------------------------------------------------------------------------


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
    """Return what to type in the place of a selection that does not fit the model."""
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
            kept = evolve(cfg.checkpointing, blocks=mended) if mended else None
            cfg = evolve(cfg, checkpointing=kept)
        if isinstance(cfg.compile, CompileBlocks):
            mended = change(cfg.compile.blocks, model) or own
            cfg = evolve(cfg, compile=evolve(cfg.compile, blocks=mended) if mended else whole_model(cfg.compile))
        return cfg

    return repair


def whole_model(how: CompileBlocks) -> CompileModel:
    """The same compilation, of the whole model."""
    return CompileModel(**{field.name: getattr(how, field.name) for field in fields(CompileModel)})


# --- what is wrong with one name or pattern ------------------------------------------------------------------------


def _absent(model: ModelFacts) -> Callable[[str], bool]:
    present = {model.classes[cls].name for cls in below_root(model)}
    return lambda name: bool(name.strip()) and name not in present


def _unmatched(model: ModelFacts) -> Callable[[str], bool]:
    paths = tuple(module.path for module in model.modules if module.path)
    exact = set(paths)

    def check(pattern: str) -> bool:
        return bool(pattern.strip()) and pattern not in exact and not any(map(matcher((pattern,)), paths))

    return check


def _container_class(model: ModelFacts) -> Callable[[str], bool]:
    classes = tuple(model.classes[cls] for cls in below_root(model))
    able = {cls.name for cls in classes if cls.has_forward}
    return lambda name: name not in able and any(cls.name == name for cls in classes)


def _container_path(model: ModelFacts) -> Callable[[str], bool]:
    has_forward = {module.path: model.classes[module.cls].has_forward for module in model.modules if module.path}

    def check(pattern: str) -> bool:
        if pattern in has_forward:
            return not has_forward[pattern]
        matched = matcher((pattern,))
        hits = tuple(able for path, able in has_forward.items() if matched(path))
        return bool(hits) and not any(hits)

    return check


# --- what a selection names ----------------------------------------------------------------------------------------


def _classes(wrap: Wrap) -> tuple[str, ...]:
    return wrap.names if isinstance(wrap, WrapClasses) else ()


def _patterns(wrap: Wrap) -> tuple[str, ...]:
    match wrap:
        case WrapPaths(patterns=patterns) | WrapClasses(paths=patterns):
            return patterns
        case _:
            return ()


# --- checks --------------------------------------------------------------------------------------------------------


def _class_not_found(resolved: Resolved) -> Iterator[Hit]:
    model = resolved.facts.model
    for chosen in selections(resolved.cfg):
        for name in filter(_absent(model), _classes(chosen.wrap)):
            classes = tuple(model.classes[cls] for cls in sorted(below_root(model)))
            bases = tuple(cls.name for cls in classes if name in cls.mro)
            what = f"No module below the root has the class `{name}`. {known_blocks(model)}"
            if bases:
                what += f" {some(bases)} inherits from it, but only the class itself matches."
            alike = bases or near(name, (cls.name for cls in classes if cls.has_forward), 1)
            yield Hit(
                chosen.where, what, f'Write WrapClasses(("{alike[0]}",)).' if alike else f"Write {instead(model)}."
            )


def _pattern_not_found(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    for chosen in selections(resolved.cfg):
        for pattern in filter(_unmatched(facts.model), _patterns(chosen.wrap)):
            what = f"The pattern `{pattern}` matches no module; `*` stays inside one segment of a path."
            lists = {f"{parent(path)}.*": None for block in repeated_blocks(facts.model) for path in block.paths}
            hint = did_you_mean(pattern, (*lists, *(module.path for module in facts.model.modules if module.path)))
            shown = ", ".join(f'"{known}"' for known in lists)
            written = f"paths=({shown},)" if isinstance(chosen.wrap, WrapClasses) else f"WrapPaths(({shown},))"
            yield Hit(chosen.where, what, f"Write {written}.{hint}" if lists else f"Write WrapRoot().{hint}")


def _container(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    for chosen in selections(resolved.cfg):
        classes = filter(_container_class(facts.model), _classes(chosen.wrap))
        for name in (*classes, *filter(_container_path(facts.model), _patterns(chosen.wrap))):
            what = f"`{name}` names containers only, which have no forward of their own and cannot be wrapped."
            yield Hit(chosen.where, what, f"Name what is inside: write {instead(facts.model)}.")


def _size(resolved: Resolved) -> Iterator[Hit]:
    for chosen in selections(resolved.cfg):
        if isinstance(chosen.wrap, WrapSize) and chosen.wrap.min_params < 1:
            yield Hit(chosen.where, f"min_params={chosen.wrap.min_params} would make every module a unit of its own.")


def _names(wrap: Wrap) -> tuple[str, ...] | None:
    return (*_classes(wrap), *_patterns(wrap)) if isinstance(wrap, WrapClasses | WrapPaths) else None


def _empty(resolved: Resolved) -> Iterator[Hit]:
    for chosen in selections(resolved.cfg):
        names = _names(chosen.wrap)
        if names is not None and not all(name.strip() for name in names or ("",)):
            yield Hit(chosen.where, f"{chosen.wrap} names nothing.")


def _twice(resolved: Resolved) -> Iterator[Hit]:
    for chosen in selections(resolved.cfg):
        if _names(chosen.wrap) is None:
            continue
        times = (Counter(_classes(chosen.wrap)), Counter(_patterns(chosen.wrap)))
        if again := tuple(name for counted in times for name, number in counted.items() if number > 1):
            yield Hit(chosen.where, f"{some(again)} is named more than once.")


# --- repairs: none changes which modules are selected, unless nothing is left ---------------------------------------


def _without(
    bad_class: Callable[[ModelFacts], Callable[[str], bool]] | None,
    bad_path: Callable[[ModelFacts], Callable[[str], bool]] | None,
) -> Callable[[Config, Facts], Config]:
    """A repair that drops the names and patterns that a test finds."""

    def change(wrap: Wrap, model: ModelFacts) -> Wrap | None:
        classes, paths = _kept(_classes(wrap), bad_class, model), _kept(_patterns(wrap), bad_path, model)
        match wrap:
            case WrapClasses():
                return WrapClasses(classes, paths) if classes or paths else None
            case WrapPaths():
                return WrapPaths(paths) if paths else None
            case _:
                return wrap

    return mend(change)


def _kept(
    names: tuple[str, ...], bad: Callable[[ModelFacts], Callable[[str], bool]] | None, model: ModelFacts
) -> tuple[str, ...]:
    if bad is None:
        return names
    is_bad = bad(model)
    return tuple(name for name in names if not is_bad(name))


def _blank(_: ModelFacts) -> Callable[[str], bool]:
    return lambda name: not name.strip()


def _once(wrap: Wrap, _: ModelFacts) -> Wrap:
    match wrap:
        case WrapClasses(names=names, paths=paths):
            return WrapClasses(tuple(dict.fromkeys(names)), tuple(dict.fromkeys(paths)))
        case WrapPaths(patterns=patterns):
            return WrapPaths(tuple(dict.fromkeys(patterns)))
        case _:
            return wrap


def _at_least_one(wrap: Wrap, model: ModelFacts) -> Wrap | None:
    if not isinstance(wrap, WrapSize):
        return wrap
    mended = WrapSize(max(1, wrap.min_params))
    return mended if select(mended, model) else None


# --- blocks ----------------------------------------------------------------------------------------------------------


def _explained_by_none(wrap: Wrap) -> bool:
    """Return whether no other rule explains an empty selection."""
    return not isinstance(wrap, WrapClasses | WrapPaths) and not (isinstance(wrap, WrapSize) and wrap.min_params < 1)


def _no_blocks(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    for chosen in blocks(resolved.cfg):
        if _explained_by_none(chosen.wrap) and not resolved.selected[chosen.wrap]:
            what = f"{chosen.wrap} selects no module, so that this would do nothing. {known_blocks(facts.model)}"
            without = "compile=CompileModel()" if "compile" in chosen.where else "checkpointing=None"
            yield Hit(chosen.where, what, f"Name the blocks with WrapClasses or WrapPaths, or write {without}.")


def _one_unit(resolved: Resolved) -> Iterator[Hit]:
    wrap, facts = wrap_of(resolved.cfg), resolved.facts
    if wrap is None or not _explained_by_none(wrap) or not facts.model.params:
        return
    if not resolved.selected[wrap]:
        total = short(sum(param.numel for param in facts.model.params))
        what = f"{wrap} selects no module: one unit holds 100 % of the {total} parameters"
        fix = _smaller(wrap, facts.model)
        yield Hit("config.engine.wrap", f"{what} and is gathered whole. {known_blocks(facts.model)}", fix)


def _smaller(wrap: Wrap, model: ModelFacts) -> str:
    """Name a fix that is not the size that was written; empty where none was: the rule's own fix will do."""
    if not isinstance(wrap, WrapSize):
        return ""
    least = next((size for size in _halves(wrap.min_params) if select(WrapSize(size), model)), 0)
    blocks = (
        f"Write {instead(model)}" if repeated_blocks(model) else 'Write WrapPaths(("...",)) with the paths of blocks'
    )
    return f"{blocks}; or WrapSize({least})." if least else f"{blocks}."


def _halves(size: int) -> Iterator[int]:
    """Sizes below one, each half of the one before."""
    while (size := size // 2) > 0:
        yield size


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
        cfg = evolve(cfg, checkpointing=None)
    if "config.compile.blocks" in empty and isinstance(cfg.compile, CompileBlocks):
        cfg = evolve(cfg, compile=whole_model(cfg.compile))
    return cfg


RULES: tuple[Rule, ...] = (
    Rule(
        id="wrap.empty",
        summary="A list of class names or patterns names something.",
        check=_empty,
        fix="Name classes or paths, or write WrapBlocks() for the model's own blocks.",
        source=("H-11a", "pain 5"),
        repair=_without(_blank, _blank),
    ),
    Rule(
        id="wrap.class-not-found",
        summary="Every class that is named occurs in the model.",
        check=_class_not_found,
        fix="Name a class that the model contains, or write WrapBlocks().",
        source=("H-11a", "G-14", "G-60", "pain 5"),
        repair=_without(_absent, None),
    ),
    Rule(
        id="wrap.pattern-not-found",
        summary="Every path pattern matches a module.",
        check=_pattern_not_found,
        fix="Write a pattern that matches a module, or WrapBlocks().",
        source=("pain 5",),
        repair=_without(None, _unmatched),
    ),
    Rule(
        id="wrap.container",
        summary="What is named has a forward of its own.",
        check=_container,
        fix="Name the modules inside the container.",
        at=(Moment.PLAN, Moment.ACT),
        source=("G-8", "M2-10"),
        repair=_without(_container_class, _container_path),
    ),
    Rule(
        id="wrap.size-below-one",
        summary="WrapSize asks for at least one parameter.",
        check=_size,
        fix="Write a size such as WrapSize(1_000_000), or WrapRoot() for no units of their own.",
        source=("G-9", "H-11b"),
        repair=mend(_at_least_one),
    ),
    Rule(
        id="wrap.named-twice",
        summary="No name or pattern is listed twice.",
        check=_twice,
        fix="Name it once.",
        severity=Severity.WARNING,
        source=("pain 24",),
        repair=mend(_once),
    ),
    Rule(
        id="blocks.none-selected",
        summary="What is to be checkpointed or compiled per block selects at least one module.",
        check=_no_blocks,
        fix="Name the blocks with WrapClasses or WrapPaths, or write checkpointing=None or compile=CompileModel().",
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
