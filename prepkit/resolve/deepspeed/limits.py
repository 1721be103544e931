"""Values of a user's DeepSpeed config that DeepSpeed itself refuses while it starts, on every rank at once.

From the fields of its own config (deepspeed/runtime/zero/config.py, offload_config.py, config.py), release 0.19.8.
"""

from __future__ import annotations

from prepkit.resolve.deepspeed.data import AUTO, drop, look
from prepkit.resolve.deepspeed.flaws import Draft

_SIZES = ("allgather_bucket_size", "sub_group_size", "zero_hpz_partition_size")
_STAGE_3 = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance"),
)
_BUFFERS = ("offload_param.buffer_count", "offload_param.buffer_size", "offload_param.max_in_cpu")
_RATIOS = ("offload_optimizer.ratio", "offload_optimizer.cpuadam_cores_perc")
_LARGEST = 2**63 - 1
"""What its kernels and torch take as a size."""

LIMITS: dict[str, tuple[float, float]] = {
    "zero_optimization.reduce_bucket_size": (1, _LARGEST),
    **{f"zero_optimization.{prefix}{name}": (0, _LARGEST) for name in _STAGE_3 for prefix in ("", "stage3_")},
    **{f"zero_optimization.{name}": (0, _LARGEST) for name in (*_SIZES, *_BUFFERS, "offload_optimizer.buffer_count")},
    **{f"zero_optimization.{name}": (0, 1) for name in _RATIOS},
    "hybrid_engine.max_out_tokens": (1, _LARGEST),
}
"""Path to the least and the largest number that is taken."""

_DTYPES = ("fp32", "fp16", "bf16")
CHOICES: dict[str, tuple[str, ...]] = {
    "communication_data_type": _DTYPES,
    "seq_parallel_communication_data_type": _DTYPES,
    "checkpoint.tag_validation": ("Warn", "Ignore", "Fail"),
}
"""Path to the texts that are taken, in any case."""


def within_limits(draft: Draft) -> None:
    """Says which values are refused, and goes on without them; those of another type are gone already (``tidy``)."""
    for path, (least, most) in LIMITS.items():
        number = look(draft.data, path)
        if isinstance(number, int | float) and not least <= number <= most:
            shown = f"{number:g}" if isinstance(number, float) or abs(number) < 10**15 else "too large"
            asked = f"from {least} to {most}" if most == 1 else f"of at least {least}, and below 2^63"
            _say(draft, path, f"`{path}` is {shown}, and DeepSpeed takes a number {asked}.", "Write such a number")
    for path, texts in CHOICES.items():
        text = look(draft.data, path)
        if text not in (None, AUTO) and (not isinstance(text, str) or text.lower() not in map(str.lower, texts)):
            named = ", ".join(f'"{one}"' for one in texts)
            _say(draft, path, f"`{path}` is {text!r:.60}, and DeepSpeed takes {named}.", "Write one of them")


def _say(draft: Draft, path: str, what: str, fix: str) -> None:
    draft.flaw("wrong-value", what, f"{fix}, or remove the key.")
    drop(draft.data, path)
