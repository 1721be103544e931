"""Values of transformers' ``TrainingArguments`` that the class refuses, or that DeepSpeed's JSON says otherwise.

Its numbers and its words; ``tests/formats/importers/test_argument_values.py`` compares them with the installed one.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from prepkit.codec.text import shown
from prepkit.config import SGD, Adafactor, Adagrad, AdamW, Muon, RMSprop
from prepkit.config.optimizer import OptimizerSpec
from prepkit.findings.text import near
from prepkit.formats.importers.foreign import TRUE, Foreign
from prepkit.resolve.deepspeed.data import AUTO, look

_NUMBERS = """
per_device_train_batch_size max_steps torch_empty_cache_steps per_device_eval_batch_size eval_accumulation_steps
save_total_limit seed data_seed dataloader_num_workers dataloader_prefetch_factor num_train_epochs learning_rate
warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon label_smoothing_factor neftune_noise_alpha logging_steps
eval_steps eval_delay save_steps
"""
NUMBERS = tuple(_NUMBERS.split())
"""Arguments that are numbers, but for those that every importer reads as ones."""
_SCHEDULES = """
linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt reduce_lr_on_plateau
cosine_with_min_lr cosine_warmup_with_min_lr warmup_stable_decay greedy
"""
_OPTIMIZERS = """
adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adafactor adamw_anyprecision adamw_torch_4bit
adamw_torch_8bit ademamix sgd adagrad adamw_bnb_8bit adamw_8bit ademamix_8bit lion_8bit lion_32bit paged_adamw_32bit
paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit paged_lion_32bit paged_lion_8bit rmsprop rmsprop_bnb
rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise
galore_adamw_8bit_layerwise galore_adafactor_layerwise lomo adalomo grokadamw schedule_free_radam schedule_free_adamw
schedule_free_sgd apollo_adamw apollo_adamw_layerwise stable_adamw
"""
CHOICES: dict[str, tuple[str, ...]] = {
    "eval_strategy": ("no", "steps", "epoch"),
    "logging_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "hub_strategy": ("end", "every_save", "checkpoint", "all_checkpoints"),
    "lr_scheduler_type": tuple(_SCHEDULES.split()),
    "optim": tuple(_OPTIMIZERS.split()),
}
"""Argument to the words of which it is one."""
OLDER = {"optim": ("adamw_hf", "adamw_apex_fused")}
"""Words that releases before 5.0 take too."""


_MOST = float("inf")
RANGES: dict[str, tuple[float, float, str, str]] = {
    "per_device_eval_batch_size": (1, _MOST, "1 or more", "torch's DataLoader"),
    "eval_batch_size": (1, _MOST, "1 or more", "torch's DataLoader"),  # as axolotl calls it
    "dataloader_num_workers": (0, _MOST, "0 or more", "torch's DataLoader"),
    "dataloader_prefetch_factor": (0, _MOST, "0 or more", "torch's DataLoader"),
    "warmup_steps": (0, _MOST, "0 or more", "transformers"),
    "torch_empty_cache_steps": (1, _MOST, "1 or more", "transformers"),
    "seed": (0, 2**32, "0 to 4294967295", "numpy's generator"),
}
"""Argument to its least value, the first that is too much, both in words, and what refuses any other."""
OF_ADAMW: dict[str, tuple[float, float, str, str]] = {
    "learning_rate": (0, _MOST, "a finite number from 0", "torch's AdamW"),
    "adam_beta1": (0, 1, "a number from 0 and below 1", "torch's AdamW"),
    "adam_beta2": (0, 1, "a number from 0 and below 1", "torch's AdamW"),
    "adam_epsilon": (0, _MOST, "a finite number from 0", "torch's AdamW"),
    "weight_decay": (0, _MOST, "a finite number from 0", "torch's AdamW"),
}
"""The same of those that the optimizer gets where torch's own is asked for, as it is where nothing is said."""


_CREATED: dict[str, type[OptimizerSpec]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), AdamW),
    **dict.fromkeys(("adamw_hf", "adamw_apex_fused"), AdamW),
    "adafactor": Adafactor,
    "sgd": SGD,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "muon": Muon,
}
"""Words for optimizers to those with the same state; others keep another."""
_OWN_WAY = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "loraplus_lr_ratio", "adam_mini")
"""Switches of LLaMA-Factory that create another optimizer than the one that is named."""


def _asked(file: Foreign) -> str:
    return str(file.data.get("optim") or file.data.get("optimizer") or "adamw_torch")


def created(file: Foreign) -> OptimizerSpec | None:
    """The optimizer that the Trainer creates, AdamW where nothing is said; None: one of another state."""
    spec = _CREATED.get(_asked(file))
    if spec is None or any(file.data.get(name) for name in _OWN_WAY):
        return None
    said: dict[str, Any] = {"lr": _within(file, "learning_rate", OPTIMIZER["lr"])}
    if spec is AdamW:
        betas = tuple(_within(file, f"adam_beta{at}", OPTIMIZER["betas"][at - 1]) for at in (1, 2))
        said |= {"betas": betas, "eps": _within(file, "adam_epsilon", OPTIMIZER["eps"])}
        said |= {"weight_decay": _within(file, "weight_decay", OPTIMIZER["weight_decay"])}
    return spec(**said)


def samples(file: Foreign, micro_batch: str) -> int | None:
    """Samples that a rank reads at once; None where nothing says it, or the Trainer looks for it."""
    size = _number(file.data.get(micro_batch))
    looked_for = str(file.data.get("auto_find_batch_size")).lower() in TRUE
    return None if size is None or not 1 <= size < MOST_SAMPLES or looked_for else int(size)


MOST_SAMPLES = 2**31
"""Samples that no rank reads at once."""


def _within(file: Foreign, name: str, else_: float) -> float:
    """What the file says, where that may be: what may not is told of the key."""
    value, (least, below, *_) = _number(file.data.get(name)), OF_ADAMW[name]
    return else_ if value is None or not least <= value < below else value


def _ranges(file: Foreign) -> None:
    asked = _asked(file)
    own = asked in ("adamw_torch", "adamw_torch_fused") and not file.data.get("deepspeed")
    for name, (least, below, words, by) in (RANGES | (OF_ADAMW if own else {})).items():
        value = _number(file.data.get(name))
        if value is not None and not least <= value < below:
            what = f"{value:g} is refused by {by}, which takes {words}"
            file.error("wrong-value", name, what, f"Write {words}.", misread=False)


def _steps(file: Foreign) -> None:
    """Steps are whole from 1 on, where they are counted; of logging they are not 0."""
    for what, strategy in (("logging", "steps"), ("save", "steps"), ("eval", "no")):
        name, value = f"{what}_steps", _number(file.data.get(f"{what}_steps"))
        if value is None or str(file.data.get(f"{what}_strategy") or strategy) != "steps":
            continue
        if what == "logging" and value == 0:
            said = "transformers refuses 0 with logging_strategy: steps, which is meant where nothing is said"
            file.error("wrong-value", name, said, "Write 1 or more, or logging_strategy: 'no'.", misread=False)
        elif value > 1 and value % 1:
            said = f"transformers refuses {value:g}, as steps above 1 are whole"
            file.error("wrong-value", name, said, f"Write {int(value)}.", misread=False)


def judge(file: Foreign, micro_batch: str) -> None:
    """Says which values are refused; ``micro_batch`` is what the file calls the samples of a rank."""
    for name in (*NUMBERS, micro_batch):
        value = file.data.get(name)
        if value is not None and not _open(value) and _number(value) is None:
            file.say_no_number(name, value)
    size = _number(file.data.get(micro_batch))
    if size is not None and size < 1:
        file.error("wrong-value", micro_batch, f"{size:g} samples make no batch", "Write 1 or more.", misread=False)
    _ranges(file)
    if file.kind in ("transformers", "llamafactory"):  # others have words of their own
        _words(file)
        _steps(file)
        _best(file)


def say_texts(file: Foreign, micro_batch: str) -> None:
    """Says which numbers ``HfArgumentParser.parse_yaml_file`` hands on as text; ``TrainingArguments`` keep them so.

    axolotl makes numbers of them (``convert_learning_rate``), and so does OmegaConf, with which LLaMA-Factory reads.
    """
    if file.kind != "transformers":
        return
    for name, typed in file.texts.items():
        number, (digits, _, power) = float(typed), typed.lower().partition("e")
        if abs(number) < _MOST and name in (*NUMBERS, micro_batch, "gradient_accumulation_steps", "max_grad_norm"):
            signed = power if power[0] in "+-" else f"+{power}"
            written = f"{number:.0f}" if number.is_integer() else f"{digits}{'' if '.' in digits else '.0'}e{signed}"
            what = f"HfArgumentParser reads {typed} as text, with which the Trainer cannot count"
            file.warn("wrong-type", name, what, f"Write {written}.")


def _words(file: Foreign) -> None:
    for name, words in CHOICES.items():
        value = file.data.get(name)
        if isinstance(value, str) and value not in (*words, *OLDER.get(name, ())) and not _open(value):
            meant = near(value, words, 1)
            fix = f"Write {meant[0]!r}." if meant else f"Write one of {', '.join(words[:6])}."
            what = f"{shown(value)} is none of the words that transformers takes"
            file.error("wrong-value", name, what, fix, misread=False)


def _best(file: Foreign) -> None:
    """The best model is known where saves and evaluations fall together (``TrainingArguments.__post_init__``)."""
    data, name = file.data, "load_best_model_at_end"
    if str(data.get(name)).lower() not in TRUE:
        return
    evaluated = str(data.get("eval_strategy") or data.get("evaluation_strategy") or "no")
    saved = str(data.get("save_strategy") or "steps")
    if _open(evaluated) or _open(saved) or saved in ("best", evaluated):
        return
    what = f"it needs a save wherever is evaluated: eval_strategy is {evaluated}, and save_strategy {saved}"
    wanted = "steps" if evaluated == "no" else evaluated
    key = "eval_strategy" if evaluated == "no" and saved == "steps" else "save_strategy"
    also = f", and eval_strategy: {wanted}" if evaluated == "no" and key == "save_strategy" else ""
    file.error("contradiction", name, what, f"Write {key}: {wanted}{also}.", misread=False)


def _open(value: Any) -> bool:
    """Whether something else fills it in before the class sees it."""
    return isinstance(value, str) and ("$" in value or "{{" in value)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) or not isinstance(value, str | int | float) else float(value)
    except (ValueError, OverflowError):
        return None


# --- beside DeepSpeed's JSON ---

MAX_NORM = 1.0
OPTIMIZER: dict[str, Any] = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""What the Trainer takes where its arguments say nothing."""


def say_mismatches(file: Foreign, data: dict[str, Any], given: dict[str, tuple[str, Any]]) -> None:
    """Says which keys of the JSON are not what arguments are, given or by default (``HfTrainerDeepSpeedConfig``)."""
    for key, (name, value) in given.items():
        there = look(data, key)
        if there not in (None, AUTO, value) and isinstance(there, str) <= isinstance(
            value, str
        ):  # else DeepSpeed says it
            what = f"it is {shown(value)}, and the JSON says {shown(there)} in {key}: the Trainer refuses to start"
            file.error("contradiction", name, what, f'Write "auto" there, or {shown(there)} here.', misread=False)
    if file.kind in _NOTHING_MORE:
        _say_default_mismatches(file, data, given)


_NOTHING_MORE = ("transformers", "llamafactory")
"""Kinds of file whose arguments are the library's own, each with its default where nothing is said."""
DEFAULTS: dict[str, tuple[str, Any]] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "gradient_clipping": ("max_grad_norm", MAX_NORM),
    "optimizer.params.lr": ("learning_rate", OPTIMIZER["lr"]),
    "optimizer.params.betas": ("adam_beta1", OPTIMIZER["betas"]),
    "optimizer.params.eps": ("adam_epsilon", OPTIMIZER["eps"]),
    "optimizer.params.weight_decay": ("weight_decay", OPTIMIZER["weight_decay"]),
    "scheduler.params.warmup_max_lr": ("learning_rate", OPTIMIZER["lr"]),
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
    "fp16.enabled": ("fp16", False),
    "bf16.enabled": ("bf16", False),
}
"""Keys of DeepSpeed's JSON to the argument that says the same, and what the Trainer takes where it is not given."""


def _say_default_mismatches(file: Foreign, data: dict[str, Any], given: dict[str, tuple[str, Any]]) -> None:
    for key, (name, value) in DEFAULTS.items():
        there = look(data, key)
        if key in given or file.has(name) or there in (None, AUTO, value) or isinstance(there, str):
            continue
        if any(file.flag(one) for one in _INSTEAD.get(name, ())):
            continue
        other = next((one for one in ("bf16", "fp16") if name in ("bf16", "fp16") and file.flag(one)), "deepspeed")
        what = f"the JSON says {shown(there)} in {key}, and {name} is {shown(value)} where nothing is said here"
        fix = f'Write "auto" there, or {name}: {shown(there)} here.' if not isinstance(there, list) else _FILLED
        file.error("contradiction", other, f"{what}: the Trainer refuses to start", fix, misread=False)


_FILLED = 'Write "auto" there.'
_INSTEAD = {
    "per_device_train_batch_size": ("auto_find_batch_size",),
    "fp16": ("fp16_full_eval",),
    "bf16": ("bf16_full_eval", "pure_bf16"),
}
"""Arguments with which another one need not be what the JSON says."""


def given_in(file: Foreign, data: dict[str, Any], micro_batch: str) -> dict[str, tuple[str, Any]]:
    """Keys of DeepSpeed's JSON to the argument that says the same, and its value, for arguments that are given."""

    def number(name: str, section: str = "") -> float | None:
        return file.number(name, *(("engine.config",) if section in data else ()))

    rate, steps = number("learning_rate", "optimizer"), file.whole("max_steps")
    steps = steps if steps and steps > 0 else None  # -1 asks for epochs
    said: dict[str, tuple[str, Any]] = {
        "gradient_accumulation_steps": ("gradient_accumulation_steps", file.whole("gradient_accumulation_steps")),
        "gradient_clipping": ("max_grad_norm", file.number("max_grad_norm")),
        "optimizer.params.lr": ("learning_rate", rate),
        "optimizer.params.betas": _betas(file, data),
        "optimizer.params.eps": ("adam_epsilon", number("adam_epsilon", "optimizer")),
        "optimizer.params.weight_decay": ("weight_decay", number("weight_decay", "optimizer")),
        "scheduler.params.warmup_max_lr": ("learning_rate", rate),
        "scheduler.params.warmup_num_steps": _warmup(file, steps),
        "scheduler.params.total_num_steps": ("max_steps", steps),
        "fp16.enabled": ("fp16", file.flag("fp16")),
        "bf16.enabled": ("bf16", file.flag("bf16")),
    }
    if not file.flag("auto_find_batch_size"):
        said["train_micro_batch_size_per_gpu"] = (micro_batch, file.whole(micro_batch))
    return {key: (name, value) for key, (name, value) in said.items() if value is not None}


def _betas(file: Foreign, data: dict[str, Any]) -> tuple[str, list[float] | None]:
    names = ("adam_beta1", "adam_beta2")
    both = [file.number(name, *(("engine.config",) if "optimizer" in data else ())) for name in names]
    pairs = zip(both, OPTIMIZER["betas"], strict=True)
    name = next((name for name, beta in zip(names, both, strict=True) if beta is not None), "")
    return name, [own if beta is None else beta for beta, own in pairs] if name else None


def _warmup(file: Foreign, steps: int | None) -> tuple[str, int | None]:
    """Steps of the warm-up, at least one; a number below 1 is a part of all, as ``warmup_ratio`` was."""
    warmup, ratio = file.number("warmup_steps", "engine.config"), file.number("warmup_ratio")
    name = "warmup_steps" if warmup or ratio is None else "warmup_ratio"
    part = warmup or ratio
    if part is None:
        return name, None if warmup is None else 1
    if part >= 1:
        return name, int(part)
    return name, None if part and not steps else max(1, ceil((steps or 0) * part))
