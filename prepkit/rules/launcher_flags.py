"""Variables that accelerate's launcher leaves in the environment, against the config.

prepkit obeys none of them: the config alone says what is prepared. Other libraries read them (transformers inside
``from_pretrained``), and people believe them. Values that the launcher also writes when nobody asked for anything
(``no``, ``false``, one micro-batch) say nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prepkit.config import (
    BF16,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    XLA,
    Compile,
    CompileBlocks,
    CompileModel,
    DeepSpeed,
    OffloadToCPU,
)
from prepkit.config.engines import AXES
from prepkit.config.precision import as_typed
from prepkit.findings import Severity
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_PRECISIONS = {"fp16": FP16, "bf16": BF16, "fp8": FP8}
_MESH_SIZES = {"replicate": "DP_REPLICATE", "shard": "DP_SHARD", "tensor": "TP"}
"""Axis of the mesh to the word for it in ``PARALLELISM_CONFIG_<word>_SIZE`` (K-PC1)."""

Contradiction = Callable[[Resolved, str], str]
"""What the config says instead, for a value of the variable; empty where the two agree."""


def _engine(*engines: type) -> Contradiction:
    def contradiction(resolved: Resolved, value: str) -> str:
        if value.lower() not in _TRUE or isinstance(resolved.cfg.engine, engines):
            return ""
        return (
            f"the engine is {type(resolved.cfg.engine).__name__}: other libraries read it and load or shard the model "
            "in another way"
        )

    return contradiction


def _fsdp_version(resolved: Resolved, value: str) -> str:
    return "the engine is FSDP1" if value == "2" and isinstance(resolved.cfg.engine, FSDP1) else ""


def _precision(resolved: Resolved, value: str) -> str:
    asked = value.lower()
    if asked in ("", "no") or type(resolved.cfg.precision) is _PRECISIONS.get(asked):
        return ""
    return f"the precision is {as_typed(resolved.cfg.precision)}"


def _cpu(resolved: Resolved, value: str) -> str:
    elsewhere = value.lower() in _TRUE and resolved.compute_device != "cpu"
    return f"the plan computes on {resolved.compute_device}" if elsewhere else ""


def _device(resolved: Resolved, value: str) -> str:
    kind, _, index = value.partition(":")
    if kind != resolved.compute_device:
        return f"the plan computes on {resolved.compute_device}"
    return "every rank takes the device of its local rank" if index.isdecimal() and kind != "cpu" else ""


def _backend(resolved: Resolved, value: str) -> str:
    asked, compiled = value.lower(), _compiled(resolved.cfg.compile)
    if asked in ("", "no") or (compiled is not None and compiled.backend.lower() == asked):
        return ""
    return "nothing is compiled" if compiled is None else f"the config compiles with {compiled.backend}"


def _mode(resolved: Resolved, value: str) -> str:
    compiled = _compiled(resolved.cfg.compile)
    if compiled is None or value in ("", "default", compiled.mode):
        return ""
    return f"the config compiles in mode {compiled.mode}"


def _compiled(asked: Compile) -> CompileModel | CompileBlocks | None:
    return asked


def _offload(resolved: Resolved, value: str) -> str:
    engine = resolved.cfg.engine
    offloads = (isinstance(engine, FSDP1) and engine.offload) or (
        isinstance(engine, FSDP2) and isinstance(engine.offload, OffloadToCPU)
    )
    return "the engine offloads nothing" if value.lower() in _TRUE and not offloads else ""


def _accumulation(resolved: Resolved, value: str) -> str:
    if value.strip() in ("", "auto", "1", str(resolved.accumulation)):
        return ""
    return f"accumulation is {resolved.accumulation}"


def _parallelism(resolved: Resolved, value: str) -> str:
    if value.lower() not in _TRUE or resolved.mesh is None:
        return ""
    variables = dict(resolved.facts.env.variables)
    sizes = {
        word: variables.get(f"PARALLELISM_CONFIG_{word}_SIZE", "1") for word in (*_MESH_SIZES.values(), "CP", "SP")
    }
    here = {_MESH_SIZES[axis.name]: str(resolved.axis_size(axis.name)) for axis in AXES} | {"CP": "1", "SP": "1"}
    differing = [
        f"{word}_SIZE={sizes[word]} where the plan has {size}" for word, size in here.items() if sizes[word] != size
    ]
    return f"the mesh of the plan is another: {', '.join(differing)}" if differing else ""


def _downcast(resolved: Resolved, value: str) -> str:
    asked = value.lower() not in ("", "0", "false", "no") and isinstance(resolved.cfg.engine, XLA)
    return "XLA computes as config.precision says, and casts nothing by itself" if asked else ""


FLAGS: dict[str, Contradiction] = {
    "ACCELERATE_USE_FSDP": _engine(FSDP1, FSDP2),
    "ACCELERATE_USE_DEEPSPEED": _engine(DeepSpeed),
    "ACCELERATE_USE_MEGATRON_LM": _engine(),
    "FSDP_VERSION": _fsdp_version,
    "ACCELERATE_MIXED_PRECISION": _precision,
    "ACCELERATE_USE_CPU": _cpu,
    "ACCELERATE_TORCH_DEVICE": _device,
    "ACCELERATE_DYNAMO_BACKEND": _backend,
    "ACCELERATE_DYNAMO_MODE": _mode,
    "FSDP_OFFLOAD_PARAMS": _offload,
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": _accumulation,
    "ACCELERATE_USE_PARALLELISM_CONFIG": _parallelism,
    "ACCELERATE_DOWNCAST_BF16": _downcast,
}
"""Variable to what it contradicts in the config."""


def _flags(resolved: Resolved) -> Iterator[Hit]:
    variables = dict(resolved.facts.env.variables)
    for name, contradiction in FLAGS.items():
        if name in variables and (said := contradiction(resolved, variables[name])):
            what = f"{name}={variables[name]} is set, but {said}."
            yield Hit(f"env.variables.{name}", what, f"Write `unset {name}`.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="environment.launcher-flag",
        summary="No launcher flag in the environment contradicts the config.",
        check=_flags,
        fix="Unset the variable.",
        severity=Severity.WARNING,
        source=("pain 25", "ST-4", "ST-6", "ST-7", "ST-8", "ST-10", "ST-20", "ST-48", "ST-50", "K-16", "K-DY1"),
    ),
)
"""One rule, whatever the variable: each hit names it."""
