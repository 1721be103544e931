"""axolotl's YAML: ``TrainingArguments`` under some names of its own, beside data, adapters and logging."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from prepkit.codec.text import shown
from prepkit.config import BF16, FP8, FSDP1, FSDP2, CheckpointBlocks, DType, Mesh, TorchAO
from prepkit.findings.keywords import unknown_key_fix
from prepkit.formats.importers.argument_keys import KEYS, NOW
from prepkit.formats.importers.foreign import TRUE, Foreign, foreign, named_model
from prepkit.formats.importers.source import Imported, Source
from prepkit.formats.importers.training_arguments import training_arguments

_SIZES = (("dp_replicate_size", "replicate"), ("dp_shard_size", "shard"), ("tensor_parallel_size", "tensor"))
_ELSEWHERE = (
    ("context_parallel_size", "prepkit cuts no sequences over ranks"),
    ("sequence_parallel_degree", "prepkit cuts no sequences over ranks"),  # as it was called until 0.12
    ("expert_parallel_size", "prepkit spreads no experts over ranks"),
)
_AUTO = {"bf16": True, "fp16": False, "tf32": False, "torch_compile": True}
"""Switches that may be ``auto``, which asks GPU or torch, and what each is read as."""
_KEPT = ("legacy", "disk", "hidden_states")
"""Words of ``activation_offloading`` beside true: what is kept, and where."""
_OFFLOADED = ("unsloth", "offload", "offload_disk")
"""Words of ``gradient_checkpointing`` that recompute from inputs kept off the device."""

_SEEN_TO = ("checkpoint.offload-compiled",)
"""It keeps what is offloaded by TRL's ``OffloadActivations``, and not by torch's ``save_on_cpu``."""


def read_axolotl(source: Source) -> Imported:
    """The file as prepkit's config. Raises ``PlanRejected`` with every finding."""
    file = foreign("axolotl", source)
    data = file.data
    _say_others(file)
    _quantised(file)
    for name, on in _AUTO.items():
        if data.get(name) == "auto":
            what = f"auto asks GPU and torch; it is read as {str(on).lower()}"
            file.warn("asks-machine", name, what, "Write true or false.")
            data[name] = on
    full = data.get("bf16") == "full" or (file.flag("bfloat16") or False)
    if full:
        data["bf16"] = True
        file.raw("bfloat16", "precision.master_weights")
    if file.flag("float16"):
        what = "weights of float16 that are trained as they are, without copies in float32 or a loss scale"
        file.error("not-supported", "float16", what, "Write fp16: true.")
    offload = _offloaded(file)
    _sharding(file)
    sizes = _sizes(file)
    steps = _accumulation(file)
    float8 = file.flag("fp8", "precision")
    gathered = file.flag("fp8_enable_fsdp_float8_all_gather", *(("precision.backend",) if float8 else ()))
    imported = training_arguments(file, Path(source.path), "micro_batch_size")
    config = imported.config
    if steps is not None:
        config = evolve(config, accumulation=steps)
    if offload and isinstance(config.checkpointing, CheckpointBlocks):
        config = evolve(config, checkpointing=evolve(config.checkpointing, offload=True))
        imported = evolve(imported, seen_to=(*imported.seen_to, *_SEEN_TO))
    if full and isinstance(config.precision, BF16):
        config = evolve(config, precision=evolve(config.precision, master_weights=False))
    if float8:
        reduce: DType = "bfloat16" if isinstance(config.engine, FSDP1 | FSDP2) else "float32"
        backend = TorchAO(float8_all_gather=gathered)
        config = evolve(config, precision=FP8(backend=backend, reduce_dtype=reduce, master_weights=not full))
    if sizes and isinstance(config.engine, FSDP2):
        config = evolve(config, mesh=Mesh(**{"shard": -1} | sizes))
    parts = any(file.data.get(name) for name in ("adapter", "load_in_4bit", "load_in_8bit", "unfrozen_parameters"))
    return evolve(imported, config=config, model=None if parts else named_model(file, "base_model"))


def _quantised(file: Foreign) -> None:
    """``qlora`` trains beside weights of 4 bits, which have a switch of their own (``check_qlora``)."""
    on = {name: str(file.data.get(name)).lower() in TRUE for name in ("load_in_4bit", "load_in_8bit", "merge_lora")}
    if file.data.get("adapter") != "qlora" or on["merge_lora"]:
        return
    if on["load_in_8bit"]:
        what = "axolotl refuses it with adapter: qlora, whose weights have 4 bits"
        fix = "Write load_in_4bit: true in its place, or adapter: lora."
        file.error("contradiction", "load_in_8bit", what, fix, misread=False)
    elif not on["load_in_4bit"]:
        what = "axolotl refuses qlora without load_in_4bit: true"
        file.error("contradiction", "adapter", what, "Write load_in_4bit: true, or adapter: lora.", misread=False)


def _say_others(file: Foreign) -> None:
    """Says which keys of ``TrainingArguments`` axolotl does not have, and leaves them out as it does."""
    for name in sorted(NOW & file.data.keys() - KEYS["axolotl"]):
        if file.data[name] is not None:
            what = "transformers has this key; axolotl does not, and passes it by"
            fix = unknown_key_fix(name, KEYS["axolotl"], file.data)
            file.error("unknown-key", name, what, fix, misread=False)
        del file.data[name]


def _offloaded(file: Foreign) -> bool:
    """Return whether blocks are recomputed from inputs that wait in host memory; both names become a plain switch."""
    name, data = "gradient_checkpointing", file.data
    word = data.get(name)
    if word in _OFFLOADED:
        data[name] = True
    else:
        name = "activation_offloading"
        word = file.raw(name)
        if word in (None, False, "false"):
            return False
        if word not in (True, "true", *_KEPT):
            file.error("wrong-value", name, f"{shown(word)} is none of {', '.join(_KEPT)}", "Write true.")
            return False
        if not data.get("gradient_checkpointing"):
            what = "axolotl refuses it without gradient_checkpointing: only what is recomputed is offloaded"
            file.error("contradiction", name, what, "Write gradient_checkpointing: true, or remove it.")
    if word in ("offload_disk", "disk"):
        what = "inputs of recomputed blocks are kept in host memory, and not on a disk"
        file.warn("not-supported", name, what, "Write offload." if word == "offload_disk" else "Write true.")
    file.raw(name, "checkpointing.offload")
    return True


def _sharding(file: Foreign) -> None:
    """``fsdp_version`` at the top is one of ``fsdp_config``, which alone asks for FSDP."""
    section = file.data.get("fsdp_config")
    if not isinstance(section, dict) or not section:
        return
    if (version := file.raw("fsdp_version", "engine")) is not None and "version" not in section:
        section.setdefault("fsdp_version", version)
        file.places.setdefault("fsdp_config.fsdp_version", file.places.get("fsdp_version", (1, 1)))
    if not file.data.get("fsdp") and not file.data.get("deepspeed"):
        file.data["fsdp"] = True
        file.places["fsdp"] = file.places.get("fsdp_config", (1, 1))
        file.shown_as["fsdp"] = "fsdp_config"


def _accumulation(file: Foreign) -> int | None:
    """Micro-batches per step of ``batch_size``, which is that of one rank (``check_gas_bsz``)."""
    if file.data.get("batch_size") is None:
        return None
    whole, micro = file.whole("batch_size", "accumulation"), file.whole("micro_batch_size", "accumulation")
    if file.data.get("gradient_accumulation_steps") is not None:
        what = "axolotl takes gradient_accumulation_steps or batch_size, and not both"
        file.error("contradiction", "batch_size", what, "Keep one of them.")
        return None
    if not whole or not micro or whole < micro:
        return 1
    return whole // micro


def _sizes(file: Foreign) -> dict[str, int]:
    for name, why in _ELSEWHERE:
        if (file.whole(name) or 1) > 1:
            file.error("not-supported", name, why, "Write 1, and give its ranks to dp_shard_size.")
    found = {axis: file.count(name, f"mesh.{axis}") for name, axis in _SIZES}
    return {axis: size for axis, size in found.items() if size is not None}
