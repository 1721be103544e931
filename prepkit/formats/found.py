"""What lies in a folder: configs of every library that there is an importer for, plans, and scripts that start them."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from attrs import evolve, fields_dict, frozen

from prepkit.codec import LARGEST
from prepkit.config import Config
from prepkit.formats.importers.accelerate_engines import LAUNCHING
from prepkit.formats.importers.argument_keys import GONE, KEYS, strange_keys
from prepkit.formats.importers.positions import plain_json
from prepkit.resolve.deepspeed.keys import SECTIONS

MOST = 20_000
"""Files of one folder that are looked at."""
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
"""Extensions of shell scripts, also of those that Slurm is given."""
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_PASSED_BY = ("node_modules", "__pycache__", "site-packages", "venv", "mlruns", "lightning_logs")
"""Folders of what others have installed, and of what runs have left."""

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

_ENGINES = ("Single", "DDP", "FSDP1", "FSDP2", "TensorParallel", "XLA", "DeepSpeed")
_BESIDE_ENGINE = frozenset({"accumulation", "precision", "optimizer", "clip", "mesh", "checkpointing"})
"""Keys of prepkit's own files that tell one in which the engine is misspelt."""
_KNOWN: dict[str, frozenset[str]] = {
    "prepkit": frozenset(fields_dict(Config)),
    **KEYS,
    "transformers": KEYS["transformers"] | GONE.keys(),
    "torchtitan": frozenset(
        (
            *("activation_checkpoint", "checkpoint", "comm", "compile", "experimental", "fault_tolerance", "float8"),
            *("job", "lr_scheduler", "memory_estimation", "metrics", "model", "mx", "optimizer", "parallelism"),
            *("profiling", "quantize", "training", "validation"),
        )
    ),
    "accelerate": frozenset(
        (
            *(*LAUNCHING, "distributed_type", "mixed_precision", "num_processes", "num_machines", "use_cpu"),
            *("fsdp_config", "deepspeed_config", "megatron_lm_config", "dynamo_config", "parallelism_config"),
            *("fp8_config", "dynamo_backend", "fp16", "downcast_bf16"),
        )
    ),
    "deepspeed": frozenset(SECTIONS[""]),
}
"""Kind to the keys that stand at the top of its files. In a file where a key that would tell it is misspelt, most of
the others are among them."""
_MOSTLY = 0.8
"""Of the keys of a file, the share that has to be known where one that tells is misspelt."""
_NEAR = 0.8
"""How near a misspelt key is, as ``difflib`` counts it."""
_KIND = re.compile(r"\bkind[\"']?\s*[:=]")
_NAMED = re.compile(r"\b(?:engine|kind)[\"']?\s*[:=]\s*(?:\{\s*[\"']?kind[\"']?\s*[:=]\s*)?[\"']?(\w+)")
_TRIED = 20
"""Strange keys of a file that are compared with known ones."""
_SMALL = 20_000
"""Letters of a JSON that is read though it has no key that tells."""
_YAML_KEY = re.compile(r"^[\"']?([A-Za-z_][\w.-]*)[\"']?\s*:", re.MULTILINE)
_TOML_KEY = re.compile(r"^\s*(?:\[+\s*)?[\"']?([A-Za-z_][\w-]*)[\"']?\s*[.\]=]", re.MULTILINE)
_LAUNCH = re.compile(
    r"accelerate\s+launch|accelerate\.commands\.launch|torchrun|torch\.distributed\.(?:run|launch)|\bdeepspeed\s|axolotl\s+train|llamafactory-cli"
)
_STEP = re.compile(r"\b(?:srun|mpirun|mpiexec|orterun)\s")
_PYTHON = re.compile(r"python", re.IGNORECASE)
_HEAD = 4_096
"""Bytes at the beginning of a file whose name does not tell that it is a script."""
_SHELL = re.compile(
    rb"#![ \t]*(?:\S*/)?(?:env[ \t]+(?:-\S+[ \t]+)*)?(?:ba|da|k|z)?sh\b|(?!#!)(?:#[^\n]*\n|[ \t\r]*\n)*#SBATCH\b"
)
"""How a shell script begins: with a line that names a shell, or with options for Slurm."""


def found(path: str) -> Found | None:
    """Return what a file is taken for; None where nothing tells it to be of any concern here. Reads the file only."""
    suffix, script = Path(path).suffix.lower(), is_script(path)
    if suffix not in _CONFIGS and not script:
        return None
    text = _text(path)
    if text is None or (suffix == ".json" and _template(text)):
        return None
    if script:
        launch = _LAUNCH.search(text) or (_STEP.search(text) if _PYTHON.search(text) else None)
        return Found(path=path, sort="script", kind="script", why=f"it says {launch[0].strip()}") if launch else None
    keys = top_keys(text, suffix)
    if _record(text, keys):
        return None
    if suffix == ".json" and "kind" in keys and re.search(r'"kind"\s*:\s*"prepkit\.plan"', text[:LARGEST]):
        return Found(path=path, sort="plan", kind="plan", why="its kind says so")
    if (said := _own(text, keys)) or Path(path).name.startswith("prepkit."):
        return Found(path=path, sort="config", kind="prepkit", why=said or "its name")
    for misspelt in (False, True):
        for kind, groups in _TELLS:
            if (kind != "torchtitan" or suffix == ".toml") and (why := _told(kind, groups, keys, misspelt=misspelt)):
                if kind == "deepspeed" and strange_keys(kind, keys):
                    return None  # of a program, such as GPT-NeoX, that hands a part of it on
                return Found(path=path, sort="config", kind=kind, why=why)
    return None


def is_record(path: str) -> bool:
    """Whether a file is one that a tracker has written of a run."""
    text = _text(path)
    return text is not None and _record(text, top_keys(text, Path(path).suffix.lower()))


def _record(text: str, keys: frozenset[str]) -> bool:
    """Whether a file is what a tracker has noted of a run, as wandb does: nobody starts anything from it.

    It has a section of its own, or below each of its keys a ``value``, which no library has there.
    """
    entries = _ENTRY.findall(text) if "value" in text else ()
    return bool(keys & _RECORDS) or (len(entries) > 1 and len(entries) == len(keys))


_RECORDS = frozenset({"_wandb", "wandb_version"})
_ENTRY = re.compile(r"^\w[^\n]*:[ \t]*\n(?:[ \t]+desc:[^\n]*\n)?[ \t]+value:", re.MULTILINE)
"""A key with nothing but its value below it, and maybe a text about it."""


def is_script(path: str) -> bool:
    """Whether a file is a shell script, by its extension or, where that tells nothing, by how it begins."""
    suffix = Path(path).suffix.lower()
    if suffix in (*_CONFIGS, *SCRIPTS):
        return suffix in SCRIPTS
    try:
        if not Path(path).is_file():
            return False
        with Path(path).open("rb") as file:
            return file.read(1) == b"#" and _SHELL.match(b"#" + file.read(_HEAD)) is not None
    except OSError:
        return False


def _text(path: str) -> str | None:
    """The text of a file, also of one that is saved in UTF-16: its reader says that it is to be saved otherwise."""
    try:
        if not Path(path).is_file() or Path(path).stat().st_size > LARGEST:
            return None
        raw = Path(path).read_bytes()
    except OSError:
        return None
    wide = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    return raw.decode("utf-16" if wide else "utf-8-sig", errors="replace").replace("\r\n", "\n")


def _own(text: str, keys: frozenset[str]) -> str:
    """What tells a file of prepkit's own: an engine by its name, or a name near one; else most of the other keys."""
    beside = keys & _BESIDE_ENGINE
    if "engine" in keys:
        exact = re.search(rf"\b({'|'.join(_ENGINES)})\b", text)
        if exact or (beside and _KIND.search(text)) or (len(beside) > 1 and _mostly("prepkit", keys)):
            return "engine"
        known = [name.casefold() for name in _ENGINES]
        named = any(difflib.get_close_matches(word.casefold(), known, 1, _NEAR) for word in _NAMED.findall(text))
        return "engine" if named and _mostly("prepkit", keys) else ""
    if len(beside) < 2 or not _mostly("prepkit", keys):  # as every file of another's is asked
        return ""
    near = _near("engine", keys, _KNOWN["prepkit"])
    return f"{' and '.join(sorted(beside))} beside {near}" if near else ""


def _told(kind: str, groups: tuple[frozenset[str], ...], keys: frozenset[str], *, misspelt: bool) -> str:
    """The keys that tell a kind, one of each group; ``misspelt``: it may be one that is near, in a file of its keys."""
    if misspelt and not _mostly(kind, keys):
        return ""
    seen = []
    for group in groups:
        here = next((key for key in sorted(group) if key in keys), "")
        if not here and misspelt:
            here = next((near for key in sorted(group) if (near := _near(key, keys, _KNOWN[kind]))), "")
        seen.append(here)
    return " and ".join(seen) if all(seen) else ""


def _near(key: str, keys: frozenset[str], known: frozenset[str]) -> str:
    """The key of a file that is near the one that tells, and is none that the library knows."""
    return next(iter(difflib.get_close_matches(key, sorted(keys - known), 1, _NEAR)), "")


def _mostly(kind: str, keys: frozenset[str]) -> bool:
    """Whether most of the keys of a file are, or are near, those of a kind."""
    known = _KNOWN[kind]
    strange = sorted(keys - known)
    right = len(keys) - len(strange)
    if 3 * right < len(keys) or len(strange) > _TRIED:
        return False
    near = sum(bool(difflib.get_close_matches(key, known, 1, _NEAR)) for key in strange)
    return right + near >= _MOSTLY * len(keys)


def top_keys(text: str, suffix: str) -> frozenset[str]:
    """Keys at the top of a text, also of one that is damaged: quick, and with no account of what is below them."""
    if suffix == ".toml":
        return frozenset(_TOML_KEY.findall(text))
    if suffix != ".json":
        return frozenset(_YAML_KEY.findall(text))
    if len(text) > _SMALL and not any(f'"{key}"' in text for key in _JSON_MARKS):
        return frozenset()
    try:
        data = json.loads(plain_json(text), parse_int=float)  # which takes any number of digits
    except (ValueError, RecursionError):
        return frozenset(key for key in _JSON_MARKS if re.search(rf'^\s*{{?\s*"{key}"\s*:', text, re.MULTILINE))
    return frozenset(map(str, data)) if isinstance(data, dict) else frozenset()


def _template(text: str) -> bool:
    """Whether a JSON is one only once something has filled in its values, as ``sed`` does."""
    filled, count = _OPEN.subn(r"\1null", text)
    try:
        return count > 0 and isinstance(json.loads(plain_json(filled)), dict)
    except (ValueError, RecursionError):
        return False


_OPEN = re.compile(
    r"(:\s*)(?:\$\{?\w+\}?|\{\{[^{}\n]*\}\}|<\w+>|%\w+%|@\w+@|(?!(?:TRUE|FALSE|NULL|NONE)\b)[A-Z](?:\w*_\w*|[A-Z]{2}\w*))(?=\s*[,}\]])"
)
"""A value of JSON that stands for another one."""
_JSON_MARKS = ("engine", "kind", *sorted({key for _, groups in _TELLS for key in groups[0]}))


def files_found(paths: tuple[str, ...], kind: str | None) -> list[Found]:
    """Return what lies there and is of any concern; ``kind``: whose config each of them is."""
    every = [file for path in paths for file in (below(path) if Path(path).is_dir() else (path,))]
    founds = [one for path in dict.fromkeys(every) if (one := found(path)) is not None]
    if len(paths) == 1 and not founds and not Path(paths[0]).is_dir() and (kind or not is_record(paths[0])):
        sort: Literal["script", "config"] = "script" if is_script(paths[0]) else "config"
        founds = [Found(path=paths[0], sort=sort, kind=kind or "", why="it was named")]
    if kind is not None:
        founds = [evolve(one, sort="config", kind=kind, why="--from says so") for one in founds]
    return founds


def below(folder: str) -> Iterator[str]:
    """Files below a folder in order, but for hidden ones and those that others have installed. Follows no links."""
    count = looked_into = 0
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _PASSED_BY)
        for name in sorted(files):
            path, told = str(Path(at) / name), Path(name).suffix.lower() in (*_CONFIGS, *SCRIPTS)
            looked_into += not told
            if not name.startswith(".") and (told or (looked_into <= MOST and is_script(path))):
                count += 1
                if count > MOST:
                    return
                yield path
