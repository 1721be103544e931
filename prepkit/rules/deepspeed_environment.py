"""DeepSpeed against the environment, the mesh and the loaders."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import evolve

from prepkit.config import Config, DeepSpeed, NoCompile
from prepkit.facts import Env, Facts
from prepkit.findings import Severity
from prepkit.resolve.deepspeed.data import tensor_parallel
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

_FOR_DEVICE = {"mlu": (0, 15, 2), "musa": (0, 14, 3)}


def _version(env: Env, library: str) -> tuple[int, ...] | None:
    """The version of a library; None where it is not known."""
    text = env.torch if library == "torch" else dict(env.libraries).get(library, "")
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else None


def _older(env: Env, least: tuple[int, ...]) -> bool:
    version = _version(env, "deepspeed")
    return version is not None and version < least


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _installed(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if not isinstance(cfg.engine, DeepSpeed):
        return
    env = resolved.facts.env
    if env.libraries and _version(env, "deepspeed") is None:
        yield Hit("env.libraries", "DeepSpeed is not installed.")
    least = [("", _FOR_DEVICE.get(env.device, (0, 9, 3)))]
    if cfg.engine.leaf_modules:
        least.append(("leaf_modules ", (0, 14, 0)))
    if tensor_parallel(cfg.engine) > 1:
        least.append(("tensor_parallel.autotp_size ", (0, 16, 4)))
    if not isinstance(cfg.compile, NoCompile):
        least.append(("config.compile ", (0, 14, 4)))
    for name, version in least:
        if _older(env, version):
            here = dict(env.libraries)["deepspeed"]
            what = f"DeepSpeed {here} is older than {_dotted(version)}, which {name or 'prepkit '}needs."
            yield Hit("env.libraries", what, f"Write `pip install 'deepspeed>={_dotted(version)}'`.")


def _accelerator(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if not isinstance(resolved.cfg.engine, DeepSpeed):
        return
    device = resolved.cfg.device or facts.env.device
    forced = dict(facts.env.variables).get("DS_ACCELERATOR")
    if forced not in (None, device):
        what = f"DS_ACCELERATOR={forced} is set, and the plan computes on {device}."
        yield Hit("env.variables.DS_ACCELERATOR", what, f"Write `export DS_ACCELERATOR={device}`, or unset it.")
    elif forced is None and device == "cpu" != facts.env.device:
        what = f"DeepSpeed takes the {facts.env.device} that it finds, and the plan computes on the CPU."
        yield Hit("config.device", what, "Write `export DS_ACCELERATOR=cpu` before DeepSpeed is imported.")


def _lazy(resolved: Resolved) -> Iterator[Hit]:
    if not isinstance(resolved.cfg.engine, DeepSpeed) or (resolved.cfg.device or resolved.facts.env.device) != "hpu":
        return
    if resolved.deepspeed.convert and dict(resolved.facts.env.variables).get("PT_HPU_LAZY_MODE", "1") == "1":
        yield Hit("env.variables.PT_HPU_LAZY_MODE", "Optimizer state cannot be offloaded while HPU runs lazily.")


def _mesh(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if isinstance(cfg.engine, DeepSpeed) and cfg.mesh is not None:
        asked = f"Mesh(replicate={cfg.mesh.replicate}, shard={cfg.mesh.shard})"
        yield Hit("config.mesh", f"{asked} is asked for, and DeepSpeed lays out the ranks by itself.")


def _no_mesh(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, mesh=None) if isinstance(cfg.engine, DeepSpeed) else cfg


RULES: tuple[Rule, ...] = (
    Rule(
        id="deepspeed.installed",
        summary="DeepSpeed is installed, and new enough for what is asked of it.",
        check=_installed,
        fix="Write `pip install 'prepkit[deepspeed]'`.",
        source=("ST-45", "DS-3", "DS-19", "DS-30"),
    ),
    Rule(
        id="deepspeed.accelerator",
        summary="DeepSpeed works on the device of the plan.",
        check=_accelerator,
        fix="Set DS_ACCELERATOR before DeepSpeed is imported.",
        severity=Severity.WARNING,  # the variable may be set by launch time; apply refuses if it is not
        source=("deepspeed/accelerator/real_accelerator.py", "ST-3"),
    ),
    Rule(
        id="deepspeed.hpu-lazy",
        summary="HPU runs eagerly where optimizer state is offloaded.",
        check=_lazy,
        fix="Write `export PT_HPU_LAZY_MODE=0`, or leave the offload out.",
        source=("DS-26", "DS-27"),
    ),
    Rule(
        id="deepspeed.mesh",
        summary="Under DeepSpeed no mesh is asked for.",
        check=_mesh,
        fix="Leave mesh out.",
        overridable=False,
        source=("PC-10",),
        repair=_no_mesh,
    ),
)
"""Reporting order: the environment, then what stands beside the model."""
