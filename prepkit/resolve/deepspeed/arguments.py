"""The ``optimizer`` and ``scheduler`` sections of a DeepSpeed config, as the makers of their types take them.

DeepSpeed hands ``params`` on as keywords: what a maker does not take raises in ``deepspeed.initialize``, on every rank.
"""

from __future__ import annotations

from typing import Any

from prepkit.findings.keywords import unknown_key_fix
from prepkit.findings.text import near
from prepkit.resolve.deepspeed.arguments_table import SECTIONS
from prepkit.resolve.deepspeed.data import AUTO, drop, look, number_in, put
from prepkit.resolve.deepspeed.flaws import Draft

_UNSEEN = ("muadam", "muadamw", "musgd")
"""Types that the package mup makes, which takes any keyword."""
OWN = ("adagrad", "adam", "adamw", "lamb", "lion", *_UNSEEN, "muon")
"""Optimizers of DeepSpeed's own, in small letters: it takes these in any case, and torch's exactly."""
_REMOVED = ("onebitadam", "onebitlamb", "zerooneadam")
"""Types that releases before 0.19 had (deepspeed/runtime/fp16/onebit)."""
_HOMES = {"optimizer": "torch.optim", "scheduler": "torch.optim.lr_scheduler"}
_NUMBERS = {"number": "a number", "bool": "true or false", "list": "a list", "text": "text"}
_POSITIVE = ("lr", "eps", "weight_decay", "momentum")
_COUNTS = ("warmup_num_steps", "lr_range_test_step_size")
"""What DeepSpeed wants as a whole number above 0, and not as ``1e3`` (deepspeed/runtime/lr_schedules.py)."""


def arguments(draft: Draft) -> None:
    """Judges type and params of both sections; goes on with what is meant, and without what cannot be."""
    for section in _HOMES:
        if not look(draft.data, section):
            drop(draft.data, section)  # which says nothing, and DeepSpeed makes nothing of it
            continue
        if draft.is_auto(section) or draft.is_auto(f"{section}.type"):
            continue
        kind = draft.get(f"{section}.type", "")
        params = draft.get(f"{section}.params", {})
        if not named(section, kind):
            _unknown_type(draft, section, kind)
        elif (known := taken(section, kind, params)) is not None:
            _params(draft, section, kind, known)


def named(section: str, kind: str) -> str:
    """The type as DeepSpeed finds it; empty where neither it nor torch has one of this name."""
    if section == "optimizer" and kind.lower() in OWN:
        return kind if f"{section} {kind}" in SECTIONS else kind.lower()
    return kind if f"{section} {kind}" in SECTIONS else ""


def taken(section: str, kind: str, params: dict[str, Any]) -> dict[str, str] | None:
    """What may stand in ``params``, each with its kind; None: anything may."""
    name = kind.lower() if section == "optimizer" and kind.lower() in OWN else kind
    if name in ("adam", "adamw"):
        name = "torch adam" if params.get("torch_adam") else "adam"
    return SECTIONS.get(f"{section} {name}")


def _unknown_type(draft: Draft, section: str, kind: str) -> None:
    path, home = f"{section}.type", _HOMES[section]
    if not kind:
        what = f"The `{section}` section would do nothing: it has no `{path}`."
        draft.flaw("unknown-type", what, f"Write `{path}`, or remove the section.")
    elif kind.lower() in _REMOVED:
        fix = "Write AdamW, or install a DeepSpeed that still has it."
        draft.flaw("removed-type", f"`{path}` is {kind}, which DeepSpeed has had until 0.18.", fix)
    else:
        names = [one.partition(" ")[2] for one in SECTIONS if one.startswith(f"{section} ")]
        meant = near(kind, sorted(one for one in names if " " not in one), 2) or near(kind, _USUAL[section], 3, 0.1)
        what = f"`{path}` is {kind!r:.60}, which neither DeepSpeed nor {home} has: DeepSpeed raises."
        draft.flaw("unknown-type", what, f"Write {' or '.join(meant or _USUAL[section])}.")


_USUAL = {"optimizer": ("AdamW", "Adam", "SGD"), "scheduler": ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")}


def _params(draft: Draft, section: str, kind: str, known: dict[str, str]) -> None:
    here = f"{section}.params"
    params = draft.get(here, {})
    every = [f"{here}.{name}" for name in known]
    for name, value in tuple(params.items()):
        path = f"{here}.{name}"
        if name == "max_grad_norm" and section == "optimizer":
            continue  # which a rule of its own tells
        if name not in known:
            fix = unknown_key_fix(path, every, (f"{here}.{one}" for one in params))
            draft.flaw("unknown-key", f"{kind} takes no `{path}`: DeepSpeed raises.", fix)
            drop(draft.data, path)
        elif value != AUTO:
            _value(draft, section, path, value, known[name].rstrip("!"))
    missing = [name for name, one in known.items() if one.endswith("!") and name not in params]
    for name in missing:
        what = f"`{here}` has no `{name}`, without which DeepSpeed makes no {kind}: it raises."
        draft.flaw("missing-key", what, f"Write `{here}.{name}` with its number.")


def _value(draft: Draft, section: str, path: str, value: Any, kind: str) -> None:
    name = path.rpartition(".")[2]
    each = isinstance(value, list) and (AUTO in value or (section == "scheduler" and name not in _COUNTS))
    if value is None or kind == "any" or each:  # a schedule takes one for each group of parameters
        return
    if not _fits(value, kind):
        number = number_in(value) if kind == "number" else None
        such = "" if number is None else f" without quotes: {value}"
        draft.flaw(
            "wrong-type",
            f"`{path}` is {value!r:.60}, where DeepSpeed expects {_NUMBERS[kind]}.",
            f"Write {_NUMBERS[kind]}{such}.",
        )
        drop(draft.data, path) if number is None else put(draft.data, path, number)
    elif name in _COUNTS and (type(value) is not int or value < 1):
        whole = f", such as {int(value)}" if value >= 1 else ""
        draft.flaw(
            "wrong-value",
            f"`{path}` is {value}, and DeepSpeed takes a whole number above 0.",
            f"Write such a number{whole}.",
        )
        drop(draft.data, path)
    elif name in _POSITIVE and kind == "number" and value < 0:
        draft.flaw("wrong-value", f"`{path}` is {value}, and a number from 0 is taken.", "Write such a number.")
        drop(draft.data, path)
    elif name == "betas" and not (len(value) == 2 and all(_fits(one, "number") and 0 <= one < 1 for one in value)):
        what = f"`{path}` is {value!r:.60}, and two numbers from 0 to below 1 are taken."
        draft.flaw("wrong-value", what, "Write such numbers, as in [0.9, 0.999].")
        drop(draft.data, path)


def _fits(value: Any, kind: str) -> bool:
    if kind == "bool":  # whatever is true or false to Python, but for a text that means the other
        return not isinstance(value, str) or value.lower() not in ("true", "false")
    if isinstance(value, bool):
        return False
    kinds: dict[str, type | tuple[type, ...]] = {"number": (int, float), "list": list, "text": str}
    return isinstance(value, kinds[kind])
