"""What a recorder reads off an optimizer that is about to step: its class, its options, and which tensors it steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prepkit.objects.local_part import local
from prepkit.observe.fingerprints.parts import Part


def acting(optimizer: Any) -> Any:
    """The optimizer that takes the step: of torch's ``ZeroRedundancyOptimizer`` the one inside, for a rank's part."""
    return optimizer.optim if class_of(optimizer) == "ZeroRedundancyOptimizer" else optimizer


def plain_options(optimizer: Any, group: dict[str, Any]) -> str:
    """Class and plain options of one of its groups, as JSON."""
    kept: dict[str, Any] = {
        key: list(map(_number, value)) if isinstance(value, tuple | list) else _number(value)
        for key, value in group.items()
        if key not in ("params", "initial_lr", "param_names")
        and (_is_number(value) or (isinstance(value, tuple | list) and all(map(_is_number, value))))
    }
    return json.dumps({"class": class_of(acting(optimizer)), **kept}, sort_keys=True)


def class_of(optimizer: Any) -> str:
    """Its name, for an optimizer of torch's or DeepSpeed's; else with its module, as others have the same names."""
    kind = type(optimizer)
    return (
        kind.__name__ if kind.__module__.startswith(("torch.", "deepspeed.")) else f"{kind.__module__}.{kind.__name__}"
    )


def is_fresh(state: Any) -> bool:
    """Return whether it is as the optimizer has made it: Adagrad has some before its first step."""
    return not state or ("step" in state and float(state["step"]) == 0)


def earlier(state: Mapping[str, Any], whole: int, part: slice) -> Iterator[tuple[str, Tensor | None]]:
    """Yield what an optimizer has of one parameter from earlier steps, by its key in a record, and of its part.

    Numbers, and what is as large as the parameter; None for anything else.
    """
    for key, value in state.items() if not is_fresh(state) else ():
        row = local(value).reshape(-1) if isinstance(value, Tensor) else torch.tensor([value])
        if not isinstance(value, Tensor) or value.dim() == 0:
            yield f"number.{key}", row
        else:
            yield (f"state.{key}", row[part]) if row.numel() == whole else (key, None)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def given_to(optimizer: Any) -> Iterator[Any]:
    """Every parameter that an optimizer holds."""
    return (param for group in optimizer.param_groups for param in group["params"])


def holds(root: nn.Module | None, which: Any) -> bool:
    """Return whether an optimizer, or a module, has a parameter of this one."""
    mine = {id(param) for param in root.parameters()} if root is not None else set()
    held = which.parameters() if isinstance(which, nn.Module) else given_to(which)
    return any(id(param) in mine for param in held)


def _rows(optimizer: Any) -> list[tuple[int, int, int, Any]]:
    """Where each tensor that it steps lies in memory: begin, end, group, and the tensor."""
    held = [(group, param) for group, options in enumerate(optimizer.param_groups) for param in options["params"]]
    begins = [local(param).data_ptr() for _, param in held]
    ends = [
        begin + local(one).numel() * local(one).element_size() for begin, (_, one) in zip(begins, held, strict=True)
    ]
    return [(*lies, *one) for *lies, one in zip(begins, ends, held, strict=True)]


def torn(known: Mapping[str, Part], optimizer: Any) -> str:
    """Say which parameter it steps a part of alone, as where it steps a piece of a flat buffer; empty: none."""
    rows = _rows(optimizer)
    for name, part in known.items():
        first = part.values.data_ptr()
        last = first + part.values.numel() * part.values.element_size()
        if any(first < end and begin < last and not (begin <= first and last <= end) for begin, end, _, _ in rows):
            return f"an optimizer steps a part of {name}, as a piece of a flat buffer: no gradient is that of it alone"
    return ""


def places(known: Mapping[str, Part], optimizer: Any) -> dict[str, tuple[int, Any, int]]:
    """Of each parameter that it holds: the group, the tensor that is stepped, and where in it the part begins."""
    found: dict[str, tuple[int, Any, int]] = {}
    rows = _rows(optimizer)
    for name, part in known.items():
        first, nbytes = part.values.data_ptr(), part.values.numel() * part.values.element_size()
        for begin, end, group, param in rows:
            if nbytes and begin <= first and first + nbytes <= end:
                found[name] = (group, param, (first - begin) // part.values.element_size())
                break
    return found
