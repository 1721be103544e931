"""The step of a recorded window, taken once more by the optimizer's class over the recorded gradients."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from prepkit.facts.proof import StepProof
from prepkit.proving.parts_of import as_wide, numbers, replicas
from prepkit.proving.record_file import HeldPart, Record

OTHER_NAMES = {"FusedAdam": "AdamW", "DeepSpeedCPUAdam": "AdamW"}
"""Optimizers of DeepSpeed's to those of torch that do the same with the options that they are given."""
OF_ROWS = ("SparseAdam",)
"""Optimizers that take no gradient but one of some rows; rows of zeros are none of them."""
HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that change how a step is computed, and not what comes of it."""
KEPT = ("state.", "number.")
"""How keys of an optimizer's state begin."""


def _class_of(name: str) -> Any:
    """Torch's optimizer of that name; None: it has none."""
    return getattr(torch.optim, OTHER_NAMES.get(name, name), None)


def _no_step(records: tuple[Record, ...]) -> str:
    """Why no step is taken again; empty where some may be."""
    head = records[0].head
    if head.odd:
        return f"{head.optimizer} keeps {', '.join(head.odd)}, which a record does not hold: its step was not replayed"
    if "LBFGS" in head.optimizer:
        return f"{head.optimizer} asks for several gradients in a step: the first was compared, and no step"
    return ""


def steps_of(records: tuple[Record, ...], weight: Callable[[str], Tensor]) -> tuple[tuple[StepProof, ...], str]:
    """Every trained parameter: the step that was taken, and the same class taken plainly over the recorded gradient.

    And why nothing is compared, or not those of some optimizer. ``weight``: what a parameter was before, whole.
    """
    if why := _no_step(records):
        return (), why
    found: list[StepProof] = []
    said: dict[str, None] = {}
    for one in records[0].head.params:
        try:
            found += _steps(records, weight, one) if one.trained else ()
        except CannotStep as why_not:
            said[str(why_not)] = None
    none = said and not any(one.held for one in found)  # nothing is known of any step
    return () if none else tuple(found), "; ".join(said)


class CannotStep(RuntimeError):
    """A step is not taken again; the text says of which optimizer, and why."""


def _steps(records: tuple[Record, ...], weight: Callable[[str], Tensor], one: HeldPart) -> Iterator[StepProof]:
    head = records[0].head
    held = (
        (record.head.rank, part.group) for record in records for part in record.head.params if part.name == one.name
    )
    rank, group = next(((rank, group) for rank, group in held if group is not None), (0, None))
    grads, after = replicas(records, "grad", one.name), replicas(records, "after", one.name)
    grads, after = (  # where others hold no optimizer of it
        tuple(replica for replica in every if replica.holder == rank) or every for every in (grads, after)
    )
    if group is None:
        if not any(one.name in record.head.elsewhere for record in records):
            yield StepProof(name=one.name, held=False)
    elif grads and after:
        before = weight(one.name)
        options = json.loads(head.groups[group])
        exact, coarse = _updates(options, before, grads[0].values, dict(_state(records, one.name)))
        moved = numbers(after[0].values).double() - numbers(before).double()
        yield StepProof(
            name=one.name,
            along=float(moved @ exact),
            expected=float(exact @ exact),
            moved=float(moved @ moved),
            noise=float((exact - coarse).norm()),
            dtype=str(before.dtype.to_real()).removeprefix("torch."),
            meant=int(exact.count_nonzero()),
            lost=int(((moved == 0) & (exact != 0)).sum()),
        )


def _updates(options: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The step in float64, and in the weight's own dtype. Raises ``CannotStep``."""
    if _class_of(options["class"]) is None:
        raise CannotStep(f"{options['class']} is no optimizer of torch's: its step was not replayed")
    try:
        kinds = torch.float64, weight.dtype.to_real()
        exact, coarse = (_update(options, weight, grad, state, dtype) for dtype in kinds)
    except Exception as error:  # options and state are what a file says
        said = f"{type(error).__name__}: {error!s:.200}"
        raise CannotStep(f"{options['class']} cannot take its step again: {said}") from error
    return exact, coarse


def _state(records: tuple[Record, ...], name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what the optimizer had of one parameter, whole."""
    every = (key.partition("/") for record in records for key in record.tensors if key.startswith(KEPT))
    kinds = sorted({kind for kind, _, of in every if of == name})
    for kind in kinds:
        key = kind.partition(".")[2]
        if kind.startswith("number."):
            kept = next((one.tensors[f"{kind}/{name}"] for one in records if f"{kind}/{name}" in one.tensors), None)
            if kept is not None:
                yield key, kept[0]
        elif whole := replicas(records, kind, name):
            yield key, whole[0].values


def _update(
    options: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return what one step adds to a weight, in float64."""
    make: Callable[..., Any] = _class_of(options["class"])
    known = inspect.signature(make).parameters
    given = {key: value for key, value in options.items() if key in known and key not in HOW}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    param = nn.Parameter(weight.to(as_wide(dtype, weight), copy=True))
    param.grad = grad.to(param.dtype, copy=True)
    if options["class"] in OF_ROWS:
        param.grad = param.grad.to_sparse(1)
    optimizer = make([param], **given)
    if state:
        optimizer.state[param] = {key: _as_it_was(key, value, dtype) for key, value in state.items()}
    optimizer.step()
    return numbers(param).double() - numbers(weight).double()


def _as_it_was(key: str, value: Tensor, dtype: torch.dtype) -> Any:
    """One entry of an optimizer's state: torch keeps the number of steps in float32, and numbers as they are."""
    if value.dim():
        return value.to(as_wide(dtype, value), copy=True)
    if key != "step" and not value.is_floating_point():
        return value.item()
    return value.to(torch.float32 if key == "step" else dtype, copy=True)  # which the step changes in its place
