"""Pieces for float8: which modules are replaced, and what runs around them. Empty unless the precision is FP8."""

from __future__ import annotations

from typing import assert_never

from prepkit.config import FP8, MSAMP, DelayedScaling, MXFP8BlockScaling, TorchAO, TransformerEngine
from prepkit.plan import Planned, because
from prepkit.resolve.fp8 import all_gather, has_engine_layers, kept_wide, norms
from prepkit.resolve.resolved import Resolved
from prepkit.steps import (
    AutocastFP8Forward,
    ConvertFP8Linears,
    ConvertTransformerEngine,
    InitializeMSAMP,
    PrecomputeFloat8Scales,
)

Piece = tuple[Planned, ...]


def convert(resolved: Resolved) -> Piece:
    """Layers replaced, before anything is wrapped around them (pain 38)."""
    cfg = resolved.cfg
    if not isinstance(cfg.precision, FP8):
        return ()
    match cfg.precision.backend:
        case TorchAO(recipe=recipe, pad_inner_dim=pad, emulate=emulate):
            paths = resolved.fp8_linears
            step = ConvertFP8Linears(
                paths=paths, recipe=recipe, pad_inner_dim=pad, all_gather=all_gather(cfg), emulate=emulate
            )
            left = len(resolved.linears) - len(paths)
            reason = (
                f"these multiply in float8; {left} other{'s' * (left != 1)} of the model's Linears stay as they are"
            )
            return because(step, reason, "X-4", "H-32", "K-H6")
        case TransformerEngine():
            if has_engine_layers(resolved.facts.model):
                return ()
            both = ConvertTransformerEngine(linears=resolved.fp8_linears, norms=norms(cfg, resolved.facts.model))
            return because(both, "these can compute in float8; the optimizer follows by name", "X-3", "H-31")
        case MSAMP():
            return ()
        case _:
            assert_never(cfg.precision.backend)


def autocast(resolved: Resolved) -> Piece:
    """TransformerEngine's autocast around the model: outside the bfloat16 one (TE-1), around DDP's wrapper (TE-2)."""
    cfg = resolved.cfg
    if not isinstance(cfg.precision, FP8) or not isinstance(cfg.precision.backend, TransformerEngine):
        return ()
    recipe, during_eval = cfg.precision.backend.recipe, cfg.precision.backend.autocast_during_eval
    reason = f"float8 {'in training and evaluation' if during_eval else 'while the model trains'}"
    match recipe:
        case DelayedScaling():
            step = AutocastFP8Forward(
                recipe="DelayedScaling",
                fp8_format=recipe.fp8_format,
                margin=recipe.margin,
                during_eval=during_eval,
                amax_history_len=recipe.amax_history_len,
                amax_compute_algo=recipe.amax_compute_algo,
                interval=recipe.interval if recipe.interval != 1 else None,
                override_linear_precision=recipe.override_linear_precision
                if any(recipe.override_linear_precision)
                else None,
            )
        case MXFP8BlockScaling(margin=margin, fp8_format=form):
            step = AutocastFP8Forward(
                recipe="MXFP8BlockScaling", fp8_format=form, margin=margin, during_eval=during_eval
            )
        case _:
            assert_never(recipe)
    return because(step, reason, "TE-1", "TE-2", "H-33", "K-H5")


def initialize(resolved: Resolved) -> Piece:
    """MS-AMP takes model and optimizer over where they will live, and before DDP looks at the gradients."""
    cfg = resolved.cfg
    if not isinstance(cfg.precision, FP8) or not isinstance(cfg.precision.backend, MSAMP):
        return ()
    step = InitializeMSAMP(
        opt_level=cfg.precision.backend.opt_level,
        linears=resolved.fp8_linears,
        kept=kept_wide(resolved.facts.model),
        reduced=resolved.engine_traits.averages,
    )
    return because(step, "replaces the Linears and the optimizer together", "X-5", "K-H7", "PR-17")


def precompute(resolved: Resolved) -> Piece:
    """Scales of float8 weights, once per optimizer step."""
    cfg = resolved.cfg
    backend = cfg.precision.backend if isinstance(cfg.precision, FP8) else None
    stepped = resolved.facts.optimizer is not None or bool(cfg.optimizer)
    if not (isinstance(backend, TorchAO) and backend.precompute_scales and all_gather(cfg) and stepped):
        return ()
    return because(PrecomputeFloat8Scales(), "one reduction for all scales instead of one per weight", "X-4")


def follows(resolved: Resolved) -> bool:
    """Return whether the optimizer holds parameters that the conversion replaces while no sharding does (X-3)."""
    backend = resolved.cfg.precision.backend if isinstance(resolved.cfg.precision, FP8) else None
    return isinstance(backend, TransformerEngine) and not has_engine_layers(resolved.facts.model)
