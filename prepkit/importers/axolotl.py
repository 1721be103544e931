"""axolotl's YAML: ``TrainingArguments`` under some names of its own, beside data, adapters and logging."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from prepkit.config import BF16, FSDP2, CheckpointBlocks, Mesh
from prepkit.importers.foreign import Foreign, foreign
from prepkit.importers.imported import Imported
from prepkit.importers.source import Source
from prepkit.importers.training_arguments import training_arguments

_SIZES = (("dp_replicate_size", "replicate"), ("dp_shard_size", "shard"), ("tensor_parallel_size", "tensor"))
_AUTO = ("bf16", "fp16", "tf32")
"""Switches that may be ``auto``: as the GPU has it."""
_OFFLOADED = ("unsloth", "offload", "offload_disk")
"""Words of ``gradient_checkpointing`` that recompute from inputs kept off the device."""


def read_axolotl(source: Source) -> Imported:
    """The file as prepkit's config. Raises ``PlanRejected`` with every finding."""
    file = foreign("axolotl", source)
    data = file.data
    for name in _AUTO:
        if data.get(name) == "auto":
            on = name == "bf16"
            file.warn("no-effect", name, f"auto asks the GPU; it is read as {str(on).lower()}", "Write true or false.")
            data[name] = on
    full = data.get("bf16") == "full"
    if full:
        data["bf16"] = True
    offload = data.get("gradient_checkpointing") in _OFFLOADED
    if offload:
        if data["gradient_checkpointing"] == "offload_disk":
            what = "inputs of recomputed blocks are kept in host memory, and not on a disk"
            file.warn("no-effect", "gradient_checkpointing", what, "Write offload.")
        data["gradient_checkpointing"] = True
    if (version := data.pop("fsdp_version", None)) is not None and isinstance(data.get("fsdp_config"), dict):
        data["fsdp_config"].setdefault("fsdp_version", version)
    if data.get("fsdp_config") and not data.get("fsdp") and not data.get("deepspeed"):
        data["fsdp"] = True
    sizes = _sizes(file)
    imported = training_arguments(file, Path(source.path))
    config = imported.config
    if offload and isinstance(config.checkpointing, CheckpointBlocks):
        config = evolve(config, checkpointing=evolve(config.checkpointing, offload=True))
    if full and isinstance(config.precision, BF16):
        config = evolve(config, precision=evolve(config.precision, master_weights=False))
    if sizes and isinstance(config.engine, FSDP2):
        config = evolve(config, mesh=Mesh(**{"shard": -1} | sizes))
    return evolve(imported, config=config)


def _sizes(file: Foreign) -> dict[str, int]:
    if (file.whole("context_parallel_size") or 1) > 1:
        why = "prepkit cuts no sequences over ranks"
        file.error("not-supported", "context_parallel_size", why, "Write 1, and give its ranks to dp_shard_size.")
    found = {axis: file.whole(name, f"mesh.{axis}") for name, axis in _SIZES}
    return {axis: size for axis, size in found.items() if size is not None}
