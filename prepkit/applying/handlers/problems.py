"""Findings about named modules and parameters that the checks of several backends share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from prepkit.court import found, refused
from prepkit.findings import Finding, RunRefused
from prepkit.interpreter import HalfDone
from prepkit.objects.target import Target

Problems = tuple[Finding, ...]
PLAIN = "Apply to a model that was not prepared."


def told(rule: str, names: Iterable[str], what: str, fix: str = "") -> Problems:
    """One finding for all these names; none where there are none."""
    names = list(names)
    return (found(rule, listed(names), what, fix),) if names else ()


def absent(kind: str, wanted: Iterable[str], existing: Collection[str] | Mapping[str, object]) -> Problems:
    """One finding for all the wanted names that the model does not have."""
    return told("plan.other-model", (name for name in wanted if name not in existing), f"the model has no such {kind}")


def sharded(params: Mapping[str, Parameter], what: str) -> Problems:
    """One finding for all parameters that arrive sharded, and so whom the step cannot take."""
    return told(
        "model.sharded-parameters", (name for name, param in params.items() if isinstance(param, DTensor)), what
    )


def partitioned(params: Iterable[tuple[str, Parameter]]) -> Problems:
    """One finding for all parameters that DeepSpeed has divided."""
    names = (name for name, param in params if hasattr(param, "ds_id"))
    fix = "Build the model outside deepspeed.zero.Init."
    return told("model.sharded-parameters", names, "divided by deepspeed.zero.Init", fix)


def on_meta(tensors: Mapping[str, Tensor]) -> Problems:
    """One finding for all tensors that have no data."""
    return told(
        "plan.no-weights", (name for name, tensor in tensors.items() if tensor.is_meta), "on meta, without data"
    )


def hollow(paths: Iterable[str]) -> Problems:
    """One finding for all modules that hold others and have no forward."""
    return told("wrap.container", paths, "a container without forward cannot be a unit")


def no_optimizer(target: Target) -> Problems:
    """A finding where the plan's optimizer was not given."""
    what, fix = "the plan was made with one", "Give it to apply(), or build the plan again without one."
    return told("plan.model-changed", [] if target.optimizer is not None else ["optimizer"], what, fix)


def no_mesh(use: str) -> RunRefused:
    """The refusal of a step that comes before the mesh that it works on."""
    return refused("apply.no-mesh", "mesh", f"there is no device mesh to {use}")


def step_refused(where: str, what: str, error: Exception) -> RunRefused:
    """The refusal of a step whose library has raised."""
    return refused("apply.library-refused", where, f"{what}: {error}")


def listed(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    shown = ", ".join(name or "'' (the root)" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def with_gradient(wanted: Iterable[str], params: Mapping[str, Parameter]) -> Problems:
    """One finding for all wanted parameters whose gradient a step would lose."""
    names = (name for name in wanted if name in params and params[name].grad is not None)
    return told("apply.gradient-lost", names, "there is a gradient, which would be lost")


def overwritten(names: Sequence[str]) -> str | None:
    """Return what remains after values were written over others; None when there were none."""
    return f"{listed(names)}: the values from before are overwritten" if names else None


@contextmanager
def half_done(names: Sequence[str]) -> Iterator[None]:
    """While tensors that had values are written: an error then says that these are lost."""
    try:
        yield
    except Exception as error:
        if (remains := overwritten(names)) is None:
            raise
        raise HalfDone(f"{error}; {remains}") from error
