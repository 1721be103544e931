"""A field that a config class does not have is told with the one that was meant, also where Python builds the class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from attrs import fields, has

from prepkit.findings.text import near, shorter

OTHER_NAMES = {
    "learning_rate": "lr",
    "weight_decay_rate": "weight_decay",
    "wd": "weight_decay",
    "clip_grad_norm": "clip",
    "gradient_clipping": "clip",
    "max_grad_norm": "clip",
    "gradient_accumulation_steps": "accumulation",
    "accumulation_steps": "accumulation",
    "mixed_precision": "precision",
    "gradient_checkpointing": "checkpointing",
    "activation_checkpointing": "checkpointing",
    "torch_compile": "compile",
    "strategy": "engine",
    "zero_stage": "stage",
    "cpu_offload": "offload",
    "sharding_strategy": "sharding",
    "auto_wrap_policy": "wrap",
    "fsdp_version": "engine",
}
"""What others call a field of prepkit's: accelerate, transformers, DeepSpeed, torch."""


def explain_keywords(names: dict[str, object]) -> None:
    """Gives every class of prepkit's config among these names an ``__init__`` that names the field that was meant."""
    for value in names.values():
        if isinstance(value, type) and value.__module__.startswith("prepkit.config") and has(value):
            type.__setattr__(value, "__init__", _explained(value, value.__init__))


def _explained(cls: type, plain: Callable[..., None]) -> Callable[..., None]:
    if hasattr(plain, "__wrapped__"):
        return plain
    known = tuple(field.alias for field in fields(cls) if field.init)

    @wraps(plain)
    def init(self: Any, *args: Any, **given: Any) -> None:
        if unknown := [key for key in given if key not in known]:
            raise TypeError(_said(cls, unknown[0], known))
        plain(self, *args, **given)

    return init


def _said(cls: type, key: str, known: tuple[str, ...]) -> str:
    what = f"{cls.__name__} has no field {shorter(repr(key), 100)}"
    other = OTHER_NAMES.get(key.lower(), "")
    meant = (other,) if other in known else near(key, known, limit=1)
    if meant:
        return f"{what}; write {meant[0]}=..."
    return f"{what}, only {', '.join(known)}" if known else f"{what}, and takes none"


def meant_key(path: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known keys, two at most, that may be meant by a dotted path: of its own section, else of any other.

    >>> known = ("debug", "deepspeed_config.gradient_accumulation_steps", "deepspeed_config.zero_stage")
    >>> meant_key("deepspeed_config.zero_stag", known)
    ('deepspeed_config.zero_stage',)
    >>> meant_key("gradient_accumulation_step", known)
    ('deepspeed_config.gradient_accumulation_steps',)
    >>> meant_key("fsdp_version", ("py_version", "fsdp_config.fsdp_version"))
    ('fsdp_config.fsdp_version',)
    """
    section, _, name = path.rpartition(".")
    homes: dict[str, dict[str, None]] = {}
    for one in known:
        home, _, last = one.rpartition(".")
        homes.setdefault(last, {})[home] = None
    own = [last for last, places in homes.items() if section in places]
    others = (OTHER_NAMES.get(name, ""), _EACH_OTHER.get(name, ""))
    moved = name in homes and section not in homes[name]  # spelt right, it stands elsewhere
    beside = tuple(other for other in others if other in own)[:1] or (() if moved else _alike(name, own))
    elsewhere = [f"{home}.{last}" for last in near(name, homes, 1, ELSEWHERE) for home in homes[last]]
    return tuple(f"{section}.{last}".strip(".") for last in beside) or tuple(one.strip(".") for one in elsewhere[:2])


def _alike(name: str, own: list[str]) -> tuple[str, ...]:
    """The nearest name of the same section; a word at the end that both have, such as _config, makes none alike."""
    stem, _, end = name.rpartition("_")

    def apart(one: str) -> bool:
        beginning, _, last = one.rpartition("_")
        return bool(stem) and last == end and not near(stem, (beginning,))

    return tuple(one for one in near(name, own, 1, _BESIDE) if not apart(one))


_EACH_OTHER = {
    "per_device_batch_size": "per_device_train_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
}
"""What a key is called in a file of another library: of transformers in axolotl's."""
_BESIDE, ELSEWHERE = 0.75, 0.87
"""How near a name has to be in its own section, and in another, where it may be a word of its own."""


def unknown_key_fix(path: str, known: Iterable[str], given: Iterable[str] = ()) -> str:
    """What to do about a key that nobody knows, in a file that has the keys ``given``.

    >>> unknown_key_fix("zero.stag", ("zero.stage", "steps")), unknown_key_fix("zero.steps", ("steps", "zero.stage"))
    ("Write 'zero.stage', or remove it.", "Move it to 'steps', or remove it.")
    >>> unknown_key_fix("zero.stag", ("zero.stage",), ("zero.stag", "zero.stage"))
    "Remove it: 'zero.stage' is there too."
    """
    meant = meant_key(path, known)
    if not meant:
        return "Remove it."
    if there := [one for one in given if one in meant]:
        return f"Remove it: {there[0]!r} is there too."
    same = meant[0].rpartition(".")[0] == path.rpartition(".")[0]
    return f"{'Write' if same else 'Move it to'} {' or '.join(map(repr, meant))}, or remove it."
