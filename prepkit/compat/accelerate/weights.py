"""The weights of a prepared model, whole: accelerate's ``get_state_dict``."""

from __future__ import annotations

from typing import Any

from prepkit.compat.accelerate.loop import AcceleratedLoop
from prepkit.training import export


def whole_weights(loop: AcceleratedLoop | None, model: Any) -> dict[str, Any]:
    """Name to tensor, tied ones under each name; of a module that was not prepared its own ``state_dict``.

    Where the engine shards it is collective: in host memory on the main process, empty on the others, as accelerate has
    it under FSDP. Where master weights are kept, as under DeepSpeed, it is these.
    """
    if loop is None or (model is not loop.ready.model and model is not loop.ready.unwrap()):
        own: dict[str, Any] = model.state_dict()
        return own
    weights = dict(export.whole(loop.ready.model))
    for first, *others in loop.ready.plan.facts.model.ties:
        if first in weights:
            weights.update(dict.fromkeys(others, weights[first]))
    return weights
