"""Activation checkpointing against what the model does in its forward."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import CheckpointBlocks, Config, Intent, NoCheckpointing
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import at, some
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


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
    return evolve(cfg, checkpointing=NoCheckpointing())


RULES: tuple[Rule, ...] = (
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
