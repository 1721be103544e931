"""The user's own module out of what apply has made of it."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from prepkit.objects import names
from prepkit.objects.bare_tree import SAVE
from prepkit.objects.entry_point import MARK as ENTRIES
from prepkit.objects.forward import FP8_MARK, MARK, AutocastedForward, CastedForward, FP8Forward

PREPARED = "_prepkit_prepared"
"""Attribute of the user's root module that says in a few words what apply has made of it."""


def unwrap(model: Module, *, keep_autocast: bool = True, keep_compiled: bool = True) -> Module:
    """The module inside the wrappers of ``torch.compile``, DDP and DeepSpeed (H-35); the very one given to apply.

    Without ``keep_autocast`` its own forward is put back, a bound method or a plain function as it was (G-51); without
    ``keep_compiled`` compiled calls are dropped, at every depth. Without both the model can be prepared again, unless
    it was sharded in place or DeepSpeed holds it. Checkpoint wrappers, float8 layers and the dtypes of parameters stay.
    """
    inner = names.unwrap_root(model)[-1]
    if not keep_autocast:
        for name in vars(inner).pop(ENTRIES, ()):
            vars(inner).pop(name, None)
        _restore_forward(inner, FP8_MARK, FP8Forward)  # the outer one first (TE-1)
        _restore_forward(inner, MARK, AutocastedForward, CastedForward)
    if not keep_compiled:
        for module in model.modules():
            vars(module).pop("_compiled_call_impl", None)
    taken = isinstance(inner, FSDPModule) or "DeepSpeedEngine" in names.known_bases(type(model))
    if not (keep_autocast or keep_compiled or taken):
        vars(inner).pop(PREPARED, None)
        vars(inner).pop(SAVE, None)
    return inner


def _restore_forward(module: Module, mark: str, *kinds: type[AutocastedForward | CastedForward | FP8Forward]) -> None:
    """Leaves the class's own forward bare, and puts back whatever else stood in the instance."""
    if vars(module).pop(mark, None) is None:
        return
    patched = vars(module).pop("forward")
    assert isinstance(patched, kinds), "the mark is set together with the patched forward"
    if patched.forward != module.forward:
        vars(module)["forward"] = patched.forward
