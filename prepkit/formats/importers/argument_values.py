"""Values of transformers' ``TrainingArguments`` that say nothing of preparation, and that the class refuses.

Its numbers and its words; ``tests/formats/importers/test_argument_values.py`` compares them with the installed one.
"""

from __future__ import annotations

from typing import Any

from prepkit.codec.text import shown
from prepkit.findings.text import near
from prepkit.formats.importers.foreign import TRUE, Foreign

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


def judge(file: Foreign, micro_batch: str) -> None:
    """Says which values are refused; ``micro_batch`` is what the file calls the samples of a rank."""
    for name in (*NUMBERS, micro_batch):
        value = file.data.get(name)
        if value is not None and not _open(value) and _number(value) is None:
            file.say_no_number(name, value)
    size = _number(file.data.get(micro_batch))
    if size is not None and size < 1:
        file.error("wrong-value", micro_batch, f"{size:g} samples make no batch", "Write 1 or more.", misread=False)
    if file.kind in ("transformers", "llamafactory"):  # others have words of their own
        _words(file)
        _best(file)


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
