"""LLaMA-Factory's YAML: ``TrainingArguments`` with switches of its own for precision and activations."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from prepkit.codec.text import shown
from prepkit.config import (
    BF16,
    FP8,
    FSDP1,
    FSDP2,
    MSAMP,
    CheckpointBlocks,
    Config,
    DType,
    FP8Backend,
    Precision,
    TorchAO,
    TransformerEngine,
)
from prepkit.findings.text import near
from prepkit.formats.importers.deepspeed import with_own_dtypes
from prepkit.formats.importers.foreign import Foreign, foreign, named_model
from prepkit.formats.importers.source import Imported, Source
from prepkit.formats.importers.training_arguments import training_arguments

_BACKENDS = ("auto", "torchao", "te", "msamp")
_MEGATRON = ("use_mca", "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
"""Keys that take model, optimizer and loop out of PyTorch's hands (``mcore_adapter``)."""


def read_llama_factory(source: Source) -> Imported:
    """The file as prepkit's config; data, adapters, generation and logging are listed as not preparation.

    Raises ``PlanRejected`` with every finding.
    """
    file = foreign("llamafactory", source)
    for name in _MEGATRON:
        value = file.raw(name)
        if value is True or value not in (None, False, 1):
            what = "Megatron-Core replaces model, optimizer and loop, and prepkit prepares a model that you have"
            file.error("not-supported", name, what, "Remove it, and write fsdp: true or deepspeed: FILE.")
    _method(file)
    checkpointed = _checkpointed(file)
    pure = file.flag("pure_bf16", *(("precision",) if file.data.get("pure_bf16") else ()))
    if pure and file.flag("fp16"):
        file.error("contradiction", "fp16", "pure_bf16 is true as well, and a run has one precision", "Keep one.")
    float8 = _float8(file)
    imported = training_arguments(file, Path(source.path))
    config = imported.config
    if checkpointed:
        config = evolve(config, checkpointing=CheckpointBlocks())
    model = named_model(file, "model_name_or_path") if file.data.get("finetuning_type") == "full" else None
    return evolve(imported, config=_precise(config, float8, pure=bool(pure)), model=model)


def _method(file: Foreign) -> None:
    """What is trained, and how: words of its own (``hparams/finetuning_args.py``, ``hparams/parser.py``)."""
    for name, words in _WORDS.items():
        value = file.data.get(name)
        if value is not None and value not in words:
            meant = near(str(value), words, 1)
            fix = f"Write {meant[0]}." if meant else f"Write one of {', '.join(words)}."
            file.error("wrong-value", name, f"{shown(value)} is none of {', '.join(words)}", fix, misread=False)
    method = file.data.get("finetuning_type")
    if file.data.get("quantization_bit") is not None and method in ("full", "freeze"):
        what = f"quantised weights are not trained: LLaMA-Factory refuses them with finetuning_type: {method}"
        fix = "Write finetuning_type: lora, or remove it."
        file.error("contradiction", "quantization_bit", what, fix, misread=False)


_WORDS = {"finetuning_type": ("lora", "oft", "freeze", "full"), "stage": ("pt", "sft", "rm", "ppo", "dpo", "kto")}


def _precise(config: Config, float8: FP8Backend | None, *, pure: bool) -> Config:
    reduce: DType = "bfloat16" if isinstance(config.engine, FSDP1 | FSDP2) else "float32"
    if float8 is not None:
        precision: Precision = FP8(backend=float8, reduce_dtype=reduce, master_weights=not pure)
    else:
        precision = BF16(reduce_dtype=reduce, master_weights=False) if pure else config.precision
    return with_own_dtypes(evolve(config, precision=precision))


def _checkpointed(file: Foreign) -> bool:
    """Return whether blocks are recomputed, which is so unless it is switched off (``prepare_model_for_training``)."""
    off = file.flag("disable_gradient_checkpointing", "checkpointing")
    if off and file.flag("gradient_checkpointing"):
        what = "disable_gradient_checkpointing is true as well"
        file.error("contradiction", "gradient_checkpointing", what, "Keep one of them.")
    file.flag("use_reentrant_gc")  # the same gradients either way; prepkit's is not reentrant
    if file.flag("use_unsloth_gc"):
        what = "activations are recomputed, and not kept in host memory"
        file.warn("not-supported", "use_unsloth_gc", what, "Remove it.")
    if file.flag("use_unsloth"):
        what = "unsloth changes the model before it is prepared; that is yours to call"
        file.warn("not-supported", "use_unsloth", what, "Remove it.")
    return not off


def _float8(file: Foreign) -> FP8Backend | None:
    on = file.flag("fp8", *(("precision",) if file.data.get("fp8") else ()))
    backend = file.word("fp8_backend", _BACKENDS, *(("precision.backend",) if on else ()))
    gathered = file.flag("fp8_enable_fsdp_float8_all_gather")
    if not on:
        for name in ("fp8_backend", "fp8_enable_fsdp_float8_all_gather"):
            file.without_effect(name, "it is read with fp8: true only")
        return None
    if backend in (None, "auto"):
        what = "the library that is found installed is taken; the plan is for torchao"
        file.warn("asks-machine", "fp8_backend", what, "Write torchao, te or msamp.")
    if backend == "te":
        return TransformerEngine()
    return MSAMP() if backend == "msamp" else TorchAO(float8_all_gather=gathered)
