"""The weights of a prepared model, whole: accelerate's ``get_state_dict``."""

from __future__ import annotations

from typing import Any

from prepkit.training import export
from prepkit.training.prepared import Prepared


def whole_weights(ready: Prepared | None, model: Any) -> dict[str, Any]:
    """Name to tensor, tied ones under each name; of a module that was not prepared its own ``state_dict``.

    Where the engine shards it is collective: in host memory on the main process, empty on the others, as accelerate has
    it under FSDP. Where master weights are kept, as under DeepSpeed, it is these.
    """
    if ready is None:
        own: dict[str, Any] = model.state_dict()
        return own
    weights = dict(export.whole(ready.model))
    for first, *others in ready.plan.facts.model.ties:
        if first in weights:
            weights.update(dict.fromkeys(others, weights[first]))
    return weights
