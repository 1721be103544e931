"""Options of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import XLA, CompileBlocks, CompileModel, Config, NoCompile
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import did_you_mean, some
from prepkit.resolve.resolved import Resolved
from prepkit.rules import inductor_options
from prepkit.rules.rule import Hit, Rule

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes that every torch since 2.6 knows."""
BACKENDS = ("inductor", "cudagraphs", "openxla", "tvm", "eager", "aot_eager", "aot_ts", "ts")
"""Backends that torch itself brings, those for finding mistakes included; others register themselves when imported."""
TAKE_NO_OPTIONS = frozenset(BACKENDS) - {"inductor", "tvm"}
"""torch's own backends that ignore ``options``, or fail at them in the first forward."""
_SWITCHES = (("TORCH_COMPILE_DISABLE", "1"), ("TORCHDYNAMO_DISABLE", "1"))


def _asked(cfg: Config) -> CompileModel | CompileBlocks | None:
    return None if isinstance(cfg.compile, NoCompile) else cfg.compile


def _mode(resolved: Resolved) -> Iterator[Hit]:
    if (asked := _asked(resolved.cfg)) and asked.mode not in MODES:
        fix = f"Write one of {', '.join(MODES)}.{did_you_mean(asked.mode, MODES)}"
        yield Hit("config.compile.mode", f"torch.compile has no mode `{asked.mode}`.", fix)


def _backend(resolved: Resolved) -> Iterator[Hit]:
    if (asked := _asked(resolved.cfg)) and not asked.backend.strip():
        yield Hit("config.compile.backend", f"{asked.backend!r} names no backend.")


def _foreign_backend(resolved: Resolved) -> Iterator[Hit]:
    if (asked := _asked(resolved.cfg)) and asked.backend.strip() and asked.backend not in BACKENDS:
        fix = f"Import what registers it before apply, or write one of {', '.join(BACKENDS)}."
        what = f"torch itself brings no backend `{asked.backend}`."
        yield Hit("config.compile.backend", what, fix + did_you_mean(asked.backend, BACKENDS))


def _options(resolved: Resolved) -> Iterator[Hit]:
    asked = _asked(resolved.cfg)
    if asked is None or not asked.options:
        return
    names = [option.name for option in asked.options]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield Hit("config.compile.options", f"{some(twice)}: given more than once.", "Give each option once.")
    if asked.mode != "default":
        what = f'torch takes a mode or options, and not both: mode="{asked.mode}" is a set of options of its own.'
        yield Hit("config.compile.mode", what, 'Write mode="default", or leave options out.')
    if asked.backend in TAKE_NO_OPTIONS:
        what = f"The backend `{asked.backend}` takes no options."
        yield Hit("config.compile.options", what, 'Leave options out, or write backend="inductor".')


def _unknown_option(resolved: Resolved) -> Iterator[Hit]:
    """Asks inductor alone, and releases of torch whose options are known; ``apply`` asks the torch that is there."""
    asked, env = _asked(resolved.cfg), resolved.facts.env
    known = inductor_options.RELEASES.get(env.release)
    if asked is None or known is None or asked.backend != "inductor":
        return
    for name in dict.fromkeys(option.name for option in asked.options):
        if name.replace("-", "_") not in known:
            what = f"inductor of torch {env.torch} has no option `{name}`."
            fix = f"Write a name that torch._inductor.list_options() has, or leave it out.{did_you_mean(name, known)}"
            yield Hit("config.compile.options", what, fix)


def _limit(resolved: Resolved) -> Iterator[Hit]:
    asked = _asked(resolved.cfg)
    if asked and asked.recompile_limit is not None and asked.recompile_limit < 1:
        what = f"recompile_limit={asked.recompile_limit} would compile nothing."
        yield Hit("config.compile.recompile_limit", what)


def _dynamic(resolved: Resolved) -> Iterator[Hit]:
    if (asked := _asked(resolved.cfg)) and asked.dynamic and resolved.tp.planned:
        what = "dynamic=True, and layers that are cut: torch 2.13 was seen to recurse without end while it traces them."
        yield Hit("config.compile.dynamic", what)


def _disabled(resolved: Resolved) -> Iterator[Hit]:
    for name, value in _SWITCHES:
        if _asked(resolved.cfg) and (name, value) in resolved.facts.env.variables:
            what = f"{name}={value} is set: torch.compile would return what it gets, and nobody would notice."
            yield Hit(f"env.variables.{name}", what, f"Write `unset {name}`, or compile=NoCompile().")


def _default_mode(cfg: Config, _: Facts) -> Config:
    asked = _asked(cfg)
    return evolve(cfg, compile=evolve(asked, mode="default")) if asked else cfg


def _without_options(cfg: Config, _: Facts) -> Config:
    asked = _asked(cfg)
    return evolve(cfg, compile=evolve(asked, options=())) if asked else cfg


def _known_options(cfg: Config, facts: Facts) -> Config:
    asked, known = _asked(cfg), inductor_options.RELEASES.get(facts.env.release)
    if asked is None or known is None:
        return cfg
    kept = tuple(option for option in asked.options if option.name.replace("-", "_") in known)
    return evolve(cfg, compile=evolve(asked, options=kept))


def _usual_limit(cfg: Config, _: Facts) -> Config:
    asked = _asked(cfg)
    return evolve(cfg, compile=evolve(asked, recompile_limit=None)) if asked else cfg


def _usual_backend(cfg: Config, _: Facts) -> Config:
    asked, usual = _asked(cfg), "openxla" if isinstance(cfg.engine, XLA) else "inductor"
    return evolve(cfg, compile=evolve(asked, backend=usual, options=())) if asked else cfg  # they are another's


def _as_needed(cfg: Config, _: Facts) -> Config:
    asked = _asked(cfg)
    return evolve(cfg, compile=evolve(asked, dynamic=None)) if asked else cfg


def _eager(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, compile=NoCompile())


RULES: tuple[Rule, ...] = (
    Rule(
        id="compile.unknown-mode",
        summary="torch.compile knows the mode.",
        check=_mode,
        fix='Write mode="default".',
        source=("CM-3", "torch._inductor.list_mode_options"),
        repair=_default_mode,
    ),
    Rule(
        id="compile.no-backend",
        summary="A backend of torch.compile has a name.",
        check=_backend,
        fix='Write backend="inductor", or compile=NoCompile().',
        source=("CM-1", "CM-3"),
        repair=_usual_backend,
    ),
    Rule(
        id="compile.foreign-backend",
        summary="The backend of torch.compile is one of torch's own.",
        check=_foreign_backend,
        fix="Import what registers it before apply.",
        severity=Severity.WARNING,
        source=("CM-3", "K-DY1"),
        repair=_usual_backend,
    ),
    Rule(
        id="compile.options",
        summary="Options of torch.compile are given once, to a backend that takes them, and in the place of a mode.",
        check=_options,
        fix="Leave options out.",
        source=("K-DY5", "torch.compile"),
        repair=_without_options,
    ),
    Rule(
        id="compile.unknown-option",
        summary="inductor knows the options that torch.compile is given.",
        check=_unknown_option,
        fix="Write a name that torch._inductor.list_options() has, or leave it out.",
        source=("K-DY5", "torch._inductor.list_options"),
        repair=_known_options,
    ),
    Rule(
        id="compile.recompile-limit",
        summary="At least one compilation of a function is allowed.",
        check=_limit,
        fix="Write recompile_limit=None, or compile=NoCompile().",
        source=("K-DY5", "torch.compile"),
        repair=_usual_limit,
    ),
    Rule(
        id="compile.dynamic-cut",
        summary="Cut layers are compiled for the sizes that come, and for others when they change.",
        check=_dynamic,
        fix="Leave dynamic at None, or compile nothing.",
        severity=Severity.WARNING,
        source=("CM-3", "torch proxy_tensor.py"),
        repair=_as_needed,
    ),
    Rule(
        id="compile.switched-off",
        summary="No environment variable switches torch.compile off while it is asked for.",
        check=_disabled,
        fix="Unset the variable, or write compile=NoCompile().",
        source=("pain 20", "pain 25"),
        repair=_eager,
    ),
)
"""Reporting order: fields, then the environment."""
