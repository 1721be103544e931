"""What lies in a folder: configs of every library that there is an importer for, plans, and scripts that start them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from attrs import frozen

from prepkit.codec import LARGEST
from prepkit.formats.importers.positions import plain_json

MOST = 20_000
"""Files of one folder that are looked at."""
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
"""Extensions of shell scripts, also of those that Slurm is given."""
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_PASSED_BY = ("node_modules", "__pycache__", "site-packages", "venv")

Sort = Literal["config", "plan", "script"]


@frozen(kw_only=True)
class Found:
    """One file, and what it was taken for."""

    path: str
    sort: Sort
    kind: str
    """Whose config it is, as ``IMPORTERS`` calls it; of other files their sort."""
    why: str
    """What it was told by."""


# Every kind is told by more than one key, as each single one also stands in files that have nothing to do with it.
_TELLS: tuple[tuple[str, tuple[frozenset[str], ...]], ...] = (
    (
        "axolotl",
        (
            frozenset({"base_model"}),
            frozenset(
                {"datasets", "adapter", "micro_batch_size", "num_epochs", "sequence_len", "rl", "pretraining_dataset"}
            ),
        ),
    ),
    (
        "llamafactory",
        (
            frozenset({"model_name_or_path"}),
            frozenset({"finetuning_type", "stage", "cutoff_len", "dataset_dir", "lora_target"}),
            frozenset({"do_train", "per_device_train_batch_size", "output_dir", "num_train_epochs"}),
        ),
    ),
    (
        "torchtitan",
        (frozenset({"training"}), frozenset({"parallelism", "job", "activation_checkpoint", "profiling", "metrics"})),
    ),
    (
        "transformers",
        (
            frozenset({"output_dir", "per_device_train_batch_size"}),
            frozenset(
                {"num_train_epochs", "max_steps", "learning_rate", "gradient_accumulation_steps", "save_strategy"}
            ),
        ),
    ),
    ("accelerate", (frozenset({"distributed_type", "compute_environment"}),)),
    ("deepspeed", (frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"}),)),
    (
        "deepspeed",
        (
            frozenset({"train_batch_size"}),
            frozenset({"gradient_clipping", "steps_per_print", "zero_allow_untested_optimizer", "fp16", "bf16"}),
        ),
    ),
)
"""Kind to groups of keys: a file is the first kind's that has a key of each group at its top."""

_ENGINES = re.compile(r"\b(Single|DDP|FSDP1|FSDP2|TensorParallel|XLA|DeepSpeed)\b")
_BESIDE_ENGINE = frozenset({"accumulation", "precision", "optimizer", "clip", "mesh", "checkpointing"})
"""Keys of prepkit's own files that tell one in which the engine is misspelt."""
_KIND = re.compile(r"\bkind[\"']?\s*[:=]")
_YAML_KEY = re.compile(r"^[\"']?([A-Za-z_][\w.-]*)[\"']?\s*:", re.MULTILINE)
_TOML_KEY = re.compile(r"^\s*(?:\[+\s*)?[\"']?([A-Za-z_][\w-]*)[\"']?\s*[.\]=]", re.MULTILINE)
_LAUNCH = re.compile(
    r"accelerate\s+launch|accelerate\.commands\.launch|torchrun|torch\.distributed\.(?:run|launch)|\bdeepspeed\s|axolotl\s+train|llamafactory-cli"
)


def found(path: str) -> Found | None:
    """Return what a file is taken for; None where nothing tells it to be of any concern here. Reads the file only."""
    suffix = Path(path).suffix.lower()
    if suffix not in (*_CONFIGS, *SCRIPTS):
        return None
    try:
        if not Path(path).is_file() or Path(path).stat().st_size > LARGEST:
            return None
        text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    except OSError:
        return None
    if suffix in SCRIPTS:
        launch = _LAUNCH.search(text)
        return Found(path=path, sort="script", kind="script", why=f"it says {launch[0].strip()}") if launch else None
    keys = top_keys(text, suffix)
    if suffix == ".json" and "kind" in keys and re.search(r'"kind"\s*:\s*"prepkit\.plan"', text[:LARGEST]):
        return Found(path=path, sort="plan", kind="plan", why="its kind says so")
    own = "engine" in keys and (_ENGINES.search(text) or (keys & _BESIDE_ENGINE and _KIND.search(text)))
    if own or Path(path).name.startswith("prepkit."):
        return Found(path=path, sort="config", kind="prepkit", why="engine" if "engine" in keys else "its name")
    for kind, groups in _TELLS:
        seen = tuple(next((key for key in sorted(group) if key in keys), "") for group in groups)
        if all(seen) and (kind != "torchtitan" or suffix == ".toml"):
            return Found(path=path, sort="config", kind=kind, why=" and ".join(seen))
    return None


def top_keys(text: str, suffix: str) -> frozenset[str]:
    """Keys at the top of a text, also of one that is damaged: quick, and with no account of what is below them."""
    if suffix == ".toml":
        return frozenset(_TOML_KEY.findall(text))
    if suffix != ".json":
        return frozenset(_YAML_KEY.findall(text))
    if not any(f'"{key}"' in text for key in _JSON_MARKS):
        return frozenset()
    try:
        data = json.loads(plain_json(text))
    except (ValueError, RecursionError):
        return frozenset(key for key in _JSON_MARKS if re.search(rf'^\s*"{key}"\s*:', text, re.MULTILINE))
    return frozenset(map(str, data)) if isinstance(data, dict) else frozenset()


_JSON_MARKS = ("engine", "kind", *sorted({key for _, groups in _TELLS for key in groups[0]}))


def below(folder: str) -> Iterator[str]:
    """Files below a folder in order, but for hidden ones and those that others have installed. Follows no links."""
    count = 0
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _PASSED_BY)
        for name in sorted(files):
            if not name.startswith(".") and Path(name).suffix.lower() in (*_CONFIGS, *SCRIPTS):
                count += 1
                if count > MOST:
                    return
                yield str(Path(at) / name)
