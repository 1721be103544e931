"""Whose config file one is, by the keys at its top."""

from __future__ import annotations

from prepkit.findings import PlanRejected
from prepkit.importers.foreign import lenient
from prepkit.importers.source import Source

# a file of axolotl, LLaMA-Factory or TRL is one of ``TrainingArguments`` with more keys: theirs are asked for first
MARKS: dict[str, tuple[str, ...]] = {
    "axolotl": ("base_model",),
    "accelerate": ("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"),
    "llamafactory": (
        *("finetuning_type", "pure_bf16", "disable_gradient_checkpointing", "dataset_dir", "cutoff_len"),
        *("lora_target", "quantization_bit", "flash_attn"),
    ),
    "torchtitan": ("job", "parallelism", "activation_checkpoint", "lr_scheduler", "training"),
    "transformers": (
        "output_dir",
        "per_device_train_batch_size",
        "model_name_or_path",
        "fsdp",
        "gradient_checkpointing",
    ),
    "deepspeed": (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_clipping"),
        *("gradient_accumulation_steps", "zero_allow_untested_optimizer", "fp16", "bf16"),
    ),
}
"""Whose file it is to keys that no other's has at its top. Asked in this order, after prepkit's own ``engine``."""


def kind_of(source: Source) -> str:
    """The key of ``IMPORTERS`` for a file; ``prepkit`` for one that shows no mark, and for one that is damaged."""
    try:
        data = lenient(source)
    except PlanRejected:
        return "prepkit"  # whose importer says what is wrong
    if "engine" in data:
        return "prepkit"
    return next((kind for kind, marks in MARKS.items() if any(mark in data for mark in marks)), "prepkit")
