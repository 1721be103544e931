"""Activation checkpointing against what the model does in its forward."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import evolve

from prepkit.config import CheckpointBlocks, Config, Intent
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, shorter, some
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Moment, Rule

OPERATOR = re.compile(r"[a-zA-Z_]\w*(\.\w+){1,2}")
"""Namespace, operator and, where only one is meant, its overload."""


def _blocks(cfg: Config) -> CheckpointBlocks | None:
    return cfg.checkpointing if isinstance(cfg.checkpointing, CheckpointBlocks) else None


def _every(resolved: Resolved) -> Iterator[Hit]:
    how = _blocks(resolved.cfg)
    if how is None or how.every == 1:
        return
    chosen = len(resolved.selected[how.blocks])
    if how.every < 1:
        yield Hit("config.checkpointing.every", f"every={how.every} means no module.")
    elif 0 < chosen < how.every:
        what = f"every={how.every} of {count(chosen, 'selected module')} means none, so that this would do nothing."
        yield Hit("config.checkpointing.every", what, f"Write every={chosen} or less, or checkpointing=None.")


def _operators(resolved: Resolved) -> Iterator[Hit]:
    how = _blocks(resolved.cfg)
    for name in how.keep_ops if how else ():
        if not OPERATOR.fullmatch(name):
            fix = f'Write "aten.{shorter(name, 200)}".' if re.fullmatch(r"\w+", name) else ""
            yield Hit("config.checkpointing.keep_ops", f"{shorter(repr(name), 200)} names no operator of torch.", fix)


def _offload_on_cpu(resolved: Resolved) -> Iterator[Hit]:
    how = _blocks(resolved.cfg)
    if how and how.offload and resolved.compute_device == "cpu":
        what = "The model computes on the CPU: its activations would be copied from host memory to host memory."
        yield Hit("config.checkpointing.offload", what)


def _offload_compiled(resolved: Resolved) -> Iterator[Hit]:
    how = _blocks(resolved.cfg)
    if how and how.offload and resolved.cfg.compile is not None:
        what = (
            "torch.compile does not trace torch's save_on_cpu: the blocks would run eagerly, and nobody would notice."
        )
        yield Hit("config.checkpointing.offload", what)


def _kept_on_device(resolved: Resolved) -> Iterator[Hit]:
    how = _blocks(resolved.cfg)
    if how and how.offload and how.keep_ops:
        what = (
            "torch holds the outputs of keep_ops where they were made: only the inputs of the blocks leave the device."
        )
        yield Hit("config.checkpointing.keep_ops", what)


def _cache(resolved: Resolved) -> Iterator[Hit]:
    if isinstance(resolved.cfg.checkpointing, CheckpointBlocks) and resolved.facts.model.architecture.use_cache:
        what = "model.config.use_cache is True: blocks that are recomputed would find their key-value cache filled."
        yield Hit("config.checkpointing", what)


def _frozen_input(resolved: Resolved) -> Iterator[Hit]:
    model = resolved.facts.model
    blocks = [module.path for module in model.modules if "reentrant" in module.marks]
    if not blocks or model.grad_inputs or model.input_embedding is None or resolved.cfg.intent is Intent.INFERENCE:
        return
    inside = f"{model.input_embedding}." if model.input_embedding else ""
    params = [param for param in model.params if param.name.startswith(inside)]
    if params and not any(param.requires_grad for param in params):
        what = f"The input embedding is frozen, and reentrant checkpointing of {some([at(path) for path in blocks])}"
        yield Hit(at(model.input_embedding), f"{what} passes gradients on only where its input requires one.")


def _keep_all(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, checkpointing=None)


def _all_of_them(cfg: Config, _: Facts) -> Config:
    how = _blocks(cfg)
    return evolve(cfg, checkpointing=evolve(how, every=1)) if how else cfg


def _recompute_all(cfg: Config, _: Facts) -> Config:
    how = _blocks(cfg)
    return evolve(cfg, checkpointing=evolve(how, keep_ops=())) if how else cfg


def _on_device(cfg: Config, _: Facts) -> Config:
    how = _blocks(cfg)
    return evolve(cfg, checkpointing=evolve(how, offload=False)) if how else cfg


RULES: tuple[Rule, ...] = (
    Rule(
        id="checkpoint.every",
        summary="Of the modules to be recomputed at least one is meant.",
        check=_every,
        fix="Write every=1, or checkpointing=None.",
        source=("P2-5", "torchtitan selective_ac_option"),
        repair=_all_of_them,
    ),
    Rule(
        id="checkpoint.operator",
        summary="Operators whose outputs are kept are named as torch.ops names them.",
        check=_operators,
        fix='Write a namespace, a dot and a name: keep_ops=("aten.mm",), or ("aten.mm.default",) for one overload.',
        at=(Moment.PLAN, Moment.ACT),
        source=("torch create_selective_checkpoint_contexts",),
        repair=_recompute_all,
    ),
    Rule(
        id="checkpoint.offload-compiled",
        summary="Blocks whose inputs go to host memory are not compiled.",
        check=_offload_compiled,
        fix="Write offload=False, with keep_ops or every for another balance, or compile=None.",
        source=("K-F18", "torch save_on_cpu"),
        repair=_on_device,
    ),
    Rule(
        id="checkpoint.offload-on-cpu",
        summary="Activations go to host memory from somewhere else.",
        check=_offload_on_cpu,
        fix="Write offload=False.",
        severity=Severity.WARNING,
        source=("K-F18", "torch save_on_cpu"),
        repair=_on_device,
    ),
    Rule(
        id="checkpoint.kept-on-device",
        summary="What is kept of a block whose inputs go to host memory stays on the device.",
        check=_kept_on_device,
        fix="Write keep_ops=() to hold nothing on the device, or leave it so.",
        severity=Severity.WARNING,
        source=("K-F18", "torch create_selective_checkpoint_contexts"),
        repair=_recompute_all,
    ),
    Rule(
        id="checkpoint.cache",
        summary="A model whose blocks are recomputed fills no key-value cache.",
        check=_cache,
        fix="Write model.config.use_cache = False before build_plan.",
        severity=Severity.WARNING,
        source=("pain 21", "H-16"),
        repair=_keep_all,
    ),
    Rule(
        id="checkpoint.frozen-input",
        summary="Reentrant checkpointing gets an input that requires a gradient.",
        check=_frozen_input,
        fix='Call model.enable_input_require_grads(), or gradient_checkpointing_enable({"use_reentrant": False}).',
        source=("pain 28",),
    ),
)
"""Reporting order: what the config asks for, then what the model does already."""
