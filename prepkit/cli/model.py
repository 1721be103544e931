"""The model that ``--model pkg.mod:factory`` names; what goes wrong on the way is a finding."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from prepkit.config import LoadWeights
from prepkit.facts import Env, Facts
from prepkit.findings import Finding, PlanRejected, Severity

WRONG = "cli.no-such-model"
"""Rule of the finding for an import path that leads nowhere: the command was used wrongly."""


def build(reference: str) -> Any:
    """The ``nn.Module``, on meta. Raises ``PlanRejected`` where the path leads nowhere or the user's code raises."""
    from prepkit.live.rehearse import factory

    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_concerns_us)
    try:
        return factory.build(reference)
    except Exception as error:
        raise PlanRejected((_finding(reference, error, factory.__file__),)) from error


def _concerns_us(record: logging.LogRecord) -> bool:
    """At import torchao, which transformers imports, tells which kernels it lacks, and torch of what it registers."""
    return not record.getMessage().startswith(("Failed to load", "<enum "))


def facts(reference: str, env: Env | None, checkpoint: LoadWeights | None = None) -> Facts:
    """Facts of the model, in an environment that is declared or here, and of a checkpoint. Raises as ``build`` does."""
    from prepkit.live.observe import observe
    from prepkit.live.rehearse import factory

    model = build(reference)
    try:
        return observe(model, env=env, checkpoint=checkpoint).facts
    except (TypeError, ValueError) as error:
        raise PlanRejected((_finding(reference, error, factory.__file__),)) from error


def _finding(reference: str, error: Exception, ours: str) -> Finding:
    """A path that leads nowhere is refused by prepkit's own file; anything deeper is the user's code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"--model {reference}"
    if isinstance(error, ValueError) and frame.filename == ours:
        what, _, fix = str(error).partition("; ")
        fix = fix or "write package.module:name, such as train:make_model"
        return Finding(rule=WRONG, severity=Severity.ERROR, where=where, what=what, fix=fix)
    module, _, name = reference.partition(":")
    return Finding(
        rule="model.not-built",
        severity=Severity.ERROR,
        where=where,
        what=f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})",
        fix=f'see the whole traceback with: python -c "import {module}; {module}.{name}()"',
    )
