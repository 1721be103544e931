"""DeepSpeed's ZeRO."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen


def _json_text(given: str | Mapping[str, Any]) -> str:
    """Text as it is; a mapping as JSON text, so that the caller's own is never kept, and never changed."""
    return given if isinstance(given, str) else json.dumps(given)


@frozen(kw_only=True)
class Schedule:
    """Numbers for the values that a DeepSpeed ``scheduler`` section leaves ``"auto"``."""

    warmup_steps: int = 0
    """``warmup_num_steps``: optimizer steps until the full learning rate."""
    total_steps: int | None = None
    """``total_num_steps``: optimizer steps of the whole run."""
    min_lr: float = 0.0
    """``warmup_min_lr``."""
    max_lr: float | None = None
    """``warmup_max_lr``. None: the learning rate of the optimizer."""


@frozen(kw_only=True)
class DeepSpeed:
    """DeepSpeed holds the model: ZeRO shards optimizer state (1), gradients too (2), parameters too (3)."""

    stage: int | None = None
    """ZeRO stage, 0 to 3. None: that of ``config``, else 2."""
    offload_optimizer: Literal["none", "cpu", "nvme"] | None = None
    """Where optimizer state lives. None: as ``config`` says, else with the parameters."""
    offload_param: Literal["none", "cpu", "nvme"] | None = None
    """Where the shards of parameters live, at stage 3. None: as ``config`` says, else on the device."""
    micro_batch: int | None = None
    """Samples per rank and micro-batch. None: as ``config`` says, else that of the loaders."""
    micro_batch_of: Literal["smallest", "largest"] = "smallest"
    """Which loader counts where several have different batch sizes."""
    leaf_modules: tuple[str, ...] = ()
    """Classes whose modules ZeRO-3 gathers whole, such as a mixture of experts that picks experts by the data."""
    schedule: Schedule | None = None
    """Numbers for the ``scheduler`` section of ``config``."""
    config: str = field(default="{}", converter=_json_text)
    """DeepSpeed's own config as JSON text, or a mapping, which is copied. ``"auto"`` values are worked out."""
