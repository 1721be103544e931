"""What the XLA engine leaves to torch_xla, and what it therefore cannot be asked for."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import XLA, Config, KeepLoaders
from prepkit.facts import Facts
from prepkit.resolve import loaders
from prepkit.resolve.resolved import Resolved
from prepkit.rules.fp8 import knows_libraries
from prepkit.rules.rule import Hit, Moment, Rule, under

NOT_FOR_XLA = ("inductor", "cudagraphs", "tvm")
"""Backends of torch.compile that make code for other devices."""


def _missing(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if knows_libraries(facts) and "torch_xla" not in dict(facts.env.libraries):
        yield Hit("config.engine", "XLA needs `torch_xla`, which is not installed.")


def _mesh(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.mesh is not None:
        yield Hit("config.mesh", "XLA() copies the model to every process, and builds no mesh.")


def _loaders(resolved: Resolved) -> Iterator[Hit]:
    count = len(resolved.facts.loaders) if resolved.facts.env.world_size > 1 else 0
    split = any(not isinstance(loaders.choice(resolved.cfg, index), KeepLoaders) for index in range(count))
    if split:
        yield Hit("config.loaders", "Under XLA() the processes are torch_xla's, whose ranks torch does not know.")


def _compile(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if cfg.compile is not None and cfg.compile.backend in NOT_FOR_XLA:
        yield Hit("config.compile.backend", f"`{cfg.compile.backend}` makes no code for XLA devices.")


def _openxla(cfg: Config, _: Facts) -> Config:
    assert cfg.compile is not None, "the rule has looked at its backend"
    return evolve(cfg, compile=evolve(cfg.compile, backend="openxla", mode="default", options=()))


def _no_mesh(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, mesh=None)


def _kept(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, loaders=KeepLoaders())


RULES: tuple[Rule, ...] = (
    Rule(
        id="xla.library-missing",
        summary="torch_xla is installed where the engine is XLA.",
        check=under(XLA, _missing),
        fix="Write `pip install torch_xla`, or engine=Single() or engine=DDP().",
        at=(Moment.PLAN, Moment.ACT),
        source=("ST-2",),
    ),
    Rule(
        id="xla.mesh",
        summary="XLA comes without a mesh.",
        check=under(XLA, _mesh),
        fix="Leave mesh out.",
        source=("G-3", "ST-9"),
        repair=_no_mesh,
    ),
    Rule(
        id="xla.loaders",
        summary="Under XLA in several processes the loaders are kept.",
        check=under(XLA, _loaders),
        fix="Write loaders=KeepLoaders(), split the data with a DistributedSampler over torch_xla's ordinals, and wrap "
        "the loader in its MpDeviceLoader, which ends every step.",
        source=("DL-2", "DL-18"),
        repair=_kept,
    ),
    Rule(
        id="xla.compile",
        summary="Under XLA code is compiled by a backend that knows its devices.",
        check=under(XLA, _compile),
        fix='Write backend="openxla", or compile=None.',
        source=("CM-3", "K-DY1"),
        repair=_openxla,
    ),
)
"""Reporting order: what cannot run, then fields of the config."""
