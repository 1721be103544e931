"""Keys, types and values of a user's DeepSpeed config, as DeepSpeed itself takes or refuses them.

From the fields of its own config (deepspeed/runtime/zero/config.py, offload_config.py, config.py), release 0.19.8.
"""

from __future__ import annotations

import re
from typing import Any

from prepkit.config import FP8, MSAMP
from prepkit.findings.keywords import unknown_key_fix
from prepkit.resolve.deepspeed.data import AUTO, Data, drop, look, number_in, put
from prepkit.resolve.deepspeed.flaws import Draft
from prepkit.resolve.deepspeed.keys import OPEN, REMOVED, SECTIONS

COMMENT = ("_", "//", "#")
"""What a key at the top begins with that people write for people; DeepSpeed reads no such key."""

_NAMES = {"bool": "true or false", "int": "a whole number", "float": "a number", "text": "text", "list": "a list"}
MOST = 100
"""Unknown keys that are reported, each with what is near to it."""
_OLD = {
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer.device",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param.device",
}
"""Switches of older versions to the device that they mean (deepspeed/runtime/zero/config.py)."""
_MSAMP = {"enabled": "bool", "opt_level": "text", "use_te": "bool"}
"""Keys of the section that MS-AMP adds (msamp/deepspeed/runtime/config.py)."""
_BATCH_SIZES = ("train_micro_batch_size_per_gpu", "train_batch_size")
PARSED = (
    *("zero_optimization", "bf16", "bfloat16", "fp16", "compile", "hybrid_engine", "tensor_parallel", "timers"),
    *("comms_logger", "comet", "csv_monitor", "tensorboard", "wandb"),
)
"""Sections in which DeepSpeed reads text as the switch or number that it says (pydantic models); others keep it."""
_SWITCHES = frozenset(["true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0"])
_OWN_AUTO = ("data_types.keep_in_fp32_modules", "pipeline.stages")
"""Places where ``auto`` is a value of DeepSpeed's own."""


def tidy(draft: Draft) -> None:
    """Checks every key and type; leaves out what is null, and writes whole floats and the oldest forms as today's."""
    _removed(draft)
    _sections(draft)
    zero = draft.data.get("zero_optimization")
    if isinstance(zero, bool):
        draft.data["zero_optimization"] = {"stage": int(zero)}
        draft.notes.append(f"zero_optimization = {{stage: {int(zero)}}} (the old form was {zero})")
    for old, new in _OLD.items():
        if (on := look(draft.data, old)) is not None:
            drop(draft.data, old)
            if on is True:
                draft.fill(new, "cpu", f"`{old}` is its old name")


def _removed(draft: Draft) -> None:
    for path in REMOVED:
        if look(draft.data, path, draft) is not draft:
            draft.flaw("removed-key", f"DeepSpeed has removed `{path}`, and refuses a config that has it.")
            drop(draft.data, path)


def _sections(draft: Draft) -> None:
    asked = draft.cfg.precision
    sections: dict[str, dict[str, str]] = dict(SECTIONS)
    if isinstance(asked, FP8) and isinstance(asked.backend, MSAMP):
        sections |= {"": SECTIONS[""] | {"msamp": "map"}, "msamp": _MSAMP}

    unknown: list[str] = []

    def visit(path: str, data: Data) -> None:
        known = sections.get(path)
        if known is None or path in OPEN:
            return
        for key in tuple(data):
            here = f"{path}.{key}" if path else key
            if not path and key.startswith(COMMENT):
                del data[key]
                draft.notes.append(f"{here} is left out (a comment)")
                continue
            if key not in known:
                unknown.append(here)
                if len(unknown) > MOST:
                    continue
                _unknown(draft, here, sections)
                continue
            if data[key] is None:
                del data[key]  # DeepSpeed refuses it where it wants a number, and takes its default elsewhere
                draft.notes.append(f"{here} is left out (null)")
                continue
            _typed(draft, here, data[key], known[key])
            if isinstance(inner := data.get(key), dict):
                visit(here, inner)

    visit("", draft.data)
    if len(unknown) > MOST:
        draft.flaw("unknown-key", f"{len(unknown)} keys are unknown to DeepSpeed; {MOST} of them are reported.")


def _unknown(draft: Draft, here: str, sections: dict[str, dict[str, str]]) -> None:
    every = [f"{path}.{one}".strip(".") for path, keys in sections.items() for one in keys]
    fix = unknown_key_fix(here, every, (one for one in every if look(draft.data, one, draft) is not draft))
    if here == "msamp":
        fix = "Remove it, and write precision=FP8(backend=MSAMP()), which adds it."
    draft.flaw("unknown-key", f"DeepSpeed knows no `{here}`, and would ignore or refuse it.", fix)


def _typed(draft: Draft, path: str, value: Any, kinds: str) -> None:
    allowed = kinds.split("|")
    if value == AUTO or "any" in allowed or _fits(value, allowed):
        return
    if "int" in allowed and isinstance(value, float) and value.is_integer():
        put(draft.data, path, int(value))  # 5e8 is a float in JSON, and means an integer
        return
    shown = " or ".join(_NAMES.get(kind, "a section") for kind in allowed)
    fix = f"Write {shown}{_retyped(value, allowed)}."
    what = f"`{path}` is {value!r:.60}, where DeepSpeed expects {shown}."
    section, _, inside = path.partition(".")
    if isinstance(value, str) and section in PARSED and inside and _parsed(value, allowed):
        what = (
            f"`{path}` is {value!r:.60}, text where {shown} belongs: DeepSpeed itself reads it as that; transformers "
        )
        what += "and accelerate, where they look at it, do not."
    draft.flaw("wrong-type", what, fix)
    number = number_in(value)
    if path == "zero_optimization.stage" and number is not None and number.is_integer():
        put(draft.data, path, int(number))  # so that no rule speaks of a stage that nobody has asked for
    else:
        drop(draft.data, path)


def _parsed(text: str, allowed: list[str]) -> bool:
    """Whether DeepSpeed's own models of a section take the text (pydantic 2, not strict)."""
    whole = "int" in allowed and re.fullmatch(r"[+-]?\d{1,18}", text) is not None
    number = "float" in allowed and number_in(text) is not None
    return whole or number or ("bool" in allowed and text.lower() in _SWITCHES)


def _fits(value: Any, allowed: list[str]) -> bool:
    if isinstance(value, bool):
        return "bool" in allowed
    if isinstance(value, int):
        return "int" in allowed or "float" in allowed
    kinds = {float: "float", str: "text", list: "list", dict: "map"}
    return kinds.get(type(value), "") in allowed


def _retyped(value: Any, allowed: list[str]) -> str:
    if isinstance(value, float) and "int" in allowed:
        return f", such as {round(value)}"
    if isinstance(value, str) and value.lower() in ("true", "false") and "bool" in allowed:
        return f" without quotes: {value.lower()}"
    number = number_in(value) if {"int", "float"}.intersection(allowed) else None
    whole = number is not None and number.is_integer() and "int" in allowed
    if number is None or not (whole or "float" in allowed):
        return ""
    return f" without quotes: {int(number) if whole else number}"


def left_over(draft: Draft) -> None:
    """Says which ``auto`` nobody could work out, also those in lists (DP-20, pain 14)."""

    def autos(value: Any, path: str) -> list[str]:
        if value == AUTO:
            return [] if path in _OWN_AUTO or path.startswith("autotuning.") else [path]
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [found for key, inner in items for found in autos(inner, f"{path}.{key}" if path else str(key))]

    for path in autos(draft.data, ""):
        fix = "Write a number, or remove the key: DeepSpeed has a default."
        if path.startswith("optimizer.params"):
            fix = "Write a number, or optimizer=AdamW(...) in the config, which fills it in."
        elif path.startswith("scheduler.params"):
            fix = "Write a number, or DeepSpeed(schedule=Schedule(...)), which fills it in."
        elif path in _BATCH_SIZES:
            fix = "Pass loaders=[...], or --batch-size 4 on the command line, which fills it in, or write a number."
        draft.flaw("auto", f'`{path}` is "auto", and nothing says what it is.', fix)
        drop(draft.data, path)


# --- limits ----------------------------------------------------------------------------------------------------------


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
