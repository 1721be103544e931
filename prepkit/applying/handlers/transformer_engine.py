"""Float8 with TransformerEngine, which is imported when a step needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import LayerNorm, Linear, Module

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.swap_layers import Swapped, layer_problems, library_problems, put_back, swap
from prepkit.interpreter import Handler
from prepkit.objects.forward import FP8_MARK, FP8Forward
from prepkit.objects.target import Target
from prepkit.steps import AutocastFP8Forward, ConvertTransformerEngine

_LIBRARY = ("transformer_engine.pytorch", "'transformer_engine[pytorch]'")

# --- layers --------------------------------------------------------------------------------------------------------


def convert_ready(step: ConvertTransformerEngine, target: Target) -> problems.Problems:
    """TransformerEngine must be there, and every layer one of torch's own, without hooks."""
    return (
        *library_problems(*_LIBRARY),
        *layer_problems(step.linears, Linear, target.model),
        *layer_problems(step.norms, LayerNorm, target.model),
    )


def convert_do(step: ConvertTransformerEngine, target: Target) -> tuple[Swapped, ...]:
    """Makes the new layers first, on the device and in the dtype of the old, and exchanges them together."""
    return swap(target.model, (*step.linears, *step.norms), _made)


def _made(old: Module) -> Module:
    import transformer_engine.pytorch as te

    new: Module
    if isinstance(old, Linear):
        like = {"params_dtype": old.weight.dtype, "device": old.weight.device}
        new = te.Linear(old.in_features, old.out_features, bias=old.bias is not None, **like)
    else:
        assert isinstance(old, LayerNorm), "the check has looked"
        new = te.LayerNorm(
            old.normalized_shape[0], eps=old.eps, params_dtype=old.weight.dtype, device=old.weight.device
        )
    own = dict(new.named_parameters())
    with torch.no_grad():
        for name, param in old.named_parameters():
            own[name].copy_(param)
            own[name].requires_grad_(param.requires_grad)
    return new


def convert_undo(step: ConvertTransformerEngine, target: Target, memo: tuple[Swapped, ...]) -> None:
    """Puts torch's layers back, whose parameters were never changed."""
    del step
    put_back(target.model, memo)


CONVERT: Handler[ConvertTransformerEngine, Target, tuple[Swapped, ...]] = Handler(
    ready=convert_ready, do=convert_do, undo=convert_undo
)

# --- autocast ------------------------------------------------------------------------------------------------------


def autocast_ready(step: AutocastFP8Forward, target: Target) -> problems.Problems:
    """TransformerEngine must be there and take the recipe, and nothing of the model be under its autocast yet."""
    met = library_problems(*_LIBRARY)
    if not met:
        try:
            _recipe(step)  # a newer one knows fewer options, and after FSDP1 there is no way back
        except Exception as error:
            what = f"TransformerEngine refuses it: {error}"
            met += problems.told("fp8.recipe-refused", [step.recipe], what)
    marked = ["model.forward"] if any(FP8_MARK in vars(module) for module in target.model.modules()) else []
    return met + problems.told("model.already-wrapped", marked, "runs under prepkit's float8 autocast", problems.PLAIN)


def autocast_do(step: AutocastFP8Forward, target: Target) -> tuple[Module, Any]:
    """Puts an ``FP8Forward`` into what is outermost; returns that module and what stood there."""
    outer = target.model
    own = vars(outer).get("forward")
    patched = FP8Forward(outer, outer.forward, _recipe(step), step.during_eval)
    try:
        vars(outer).update({"forward": patched, FP8_MARK: True})
        return outer, own
    except BaseException:
        autocast_undo(step, target, (outer, own))
        raise


def _recipe(step: AutocastFP8Forward) -> Any:
    from transformer_engine.common import recipe

    options = ("amax_history_len", "amax_compute_algo", "interval", "override_linear_precision")
    chosen = {name: value for name in options if (value := getattr(step, name)) is not None}
    make = getattr(recipe, step.recipe)
    return make(margin=step.margin, fp8_format=getattr(recipe.Format, step.fp8_format), **chosen)


def autocast_undo(step: AutocastFP8Forward, target: Target, memo: tuple[Module, Any]) -> None:
    """Leaves the module with exactly the forward that it had, or with none of its own."""
    del step, target
    outer, own = memo
    vars(outer).pop(FP8_MARK, None)
    vars(outer).pop("forward", None)
    if own is not None:
        vars(outer)["forward"] = own


AUTOCAST: Handler[AutocastFP8Forward, Target, tuple[Module, Any]] = Handler(
    ready=autocast_ready, do=autocast_do, undo=autocast_undo
)
