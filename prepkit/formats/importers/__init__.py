"""Config files of prepkit and of others, as ``Config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import evolve, frozen

from prepkit.findings import PlanRejected
from prepkit.formats.importers.accelerate import read_accelerate
from prepkit.formats.importers.axolotl import read_axolotl
from prepkit.formats.importers.deepspeed import read_deepspeed
from prepkit.formats.importers.foreign import lenient
from prepkit.formats.importers.llama_factory import read_llama_factory
from prepkit.formats.importers.native import read_prepkit
from prepkit.formats.importers.source import LEAST, Imported, Source, read
from prepkit.formats.importers.torchtitan import read_torchtitan
from prepkit.formats.importers.training_arguments import read_training_arguments


@frozen
class Importer:
    """How the files of one library are told and understood."""

    read: Callable[[Source], Imported]
    """Raises ``PlanRejected`` with every finding."""
    marks: tuple[str, ...]
    """Keys that stand at the top of its files, and of none that is asked for before."""


# a file of axolotl, LLaMA-Factory or TRL is one of ``TrainingArguments`` with more keys: theirs are asked for first;
# and ``TrainingArguments`` have an ``fsdp_config`` as accelerate's files have one
IMPORTERS: dict[str, Importer] = {
    "prepkit": Importer(read_prepkit, ("engine",)),
    "axolotl": Importer(read_axolotl, ("base_model",)),
    "llamafactory": Importer(
        read_llama_factory,
        (
            *("finetuning_type", "pure_bf16", "disable_gradient_checkpointing", "dataset_dir", "cutoff_len"),
            *("lora_target", "quantization_bit", "flash_attn"),
        ),
    ),
    "torchtitan": Importer(
        read_torchtitan, ("job", "parallelism", "activation_checkpoint", "lr_scheduler", "training")
    ),
    "transformers": Importer(
        read_training_arguments,
        ("output_dir", "per_device_train_batch_size", "model_name_or_path", "fsdp", "gradient_checkpointing"),
    ),
    "accelerate": Importer(
        read_accelerate, ("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config")
    ),
    "deepspeed": Importer(
        read_deepspeed,
        (
            *("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_clipping"),
            *("gradient_accumulation_steps", "zero_allow_untested_optimizer", "fp16", "bf16"),
        ),
    ),
}
"""Whose file it is to how it is read; a file is the first's whose mark it shows."""


def import_config(path: str | Path, kind: str | None = None) -> Imported:
    """A config file of prepkit or another library. ``kind`` None: told by the keys that the file has.

    Raises ``PlanRejected`` with every finding: a file that cannot be read, unknown keys (with a near spelling),
    values of a wrong type, keys that contradict each other, and what prepkit does not do.

    >>> from prepkit.findings import PlanRejected
    >>> file = Path(folder, "deepspeed.json")
    >>> _ = file.write_text('{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}')
    >>> imported = import_config(file)
    >>> imported.kind, imported.config.clip
    ('deepspeed', ClipNorm(max_norm=1.0, norm_type=2.0))
    >>> _ = file.write_text('{"distributed_type": "MULTI_CPU", "mixed_precison": "bf16"}')
    >>> try:
    ...     import_config(file)
    ... except PlanRejected as refused:
    ...     print(refused.findings[0])
    error import.unknown-key at ...
    """
    marks = {name: importer.marks for name, importer in IMPORTERS.items()}
    try:
        source = read(str(path))
        return IMPORTERS[kind or kind_of(source, marks)].read(source)
    except PlanRejected as refused:  # of an empty file what its library needs is said
        least = {"config.empty": LEAST[kind]} if kind in LEAST else {}
        told = tuple(evolve(one, fix=least.get(one.rule, one.fix)) for one in refused.findings)
        raise PlanRejected(told, rest=refused.rest) from None


# --- recognising -----------------------------------------------------------------------------------------------------


def kind_of(source: Source, marks: Mapping[str, tuple[str, ...]]) -> str:
    """The first kind that has one of its marks at the top of the file.

    ``prepkit`` for a file that shows no mark, and for one that is damaged: its importer says what is wrong.
    """
    try:
        data = lenient(source)
    except PlanRejected:
        return "prepkit"
    return next((kind for kind, keys in marks.items() if any(key in data for key in keys)), "prepkit")
