"""What one rank gets of inputs that all ranks have whole."""

from __future__ import annotations

from typing import Any

import torch


def share(inputs: Any, rank: int, ranks: int, *, padded: bool) -> Any:
    """A rank's part of a sequence, a tensor's first dimension, a data set with ``select``, or a dict of these.

    Parts are as equal as can be, the first ones longer by one item. Where ``padded`` all are as long as the first: the
    last item of the inputs is repeated. Raises ``ValueError`` for a dict whose values differ in length.
    """
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"split_between_processes was given values of different length: {lengths}")
        return {key: share(value, rank, ranks, padded=padded) for key, value in inputs.items()}
    each, longer = divmod(len(inputs), ranks)
    start = each * rank + min(rank, longer)
    chosen = list(range(start, start + each + (rank < longer)))
    if padded and len(inputs):
        chosen += [len(inputs) - 1] * (each + (longer > 0) - len(chosen))
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(chosen, dtype=torch.int64, device=inputs.device)]
    if hasattr(inputs, "select"):
        return inputs.select(chosen)
    items = [inputs[at] for at in chosen]
    return tuple(items) if isinstance(inputs, tuple) else items
