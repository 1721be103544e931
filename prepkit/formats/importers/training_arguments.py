"""The part of transformers' ``TrainingArguments`` that prepares a model.

A YAML or JSON of them, as ``HfArgumentParser`` reads it, and as TRL's files hold it beside more.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path

from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FP16,
    AsStored,
    CheckpointBlocks,
    ClipNorm,
    CompileModel,
    Config,
    DeepSpeed,
    Engine,
    NoCheckpointing,
    NoClip,
    NoCompile,
    Precision,
)
from prepkit.findings import PlanRejected
from prepkit.formats.importers.deepspeed import AUTO, from_json, read_deepspeed
from prepkit.formats.importers.foreign import Foreign, foreign
from prepkit.formats.importers.imported import Imported
from prepkit.formats.importers.source import JSON, Source, read
from prepkit.formats.importers.training_arguments_fsdp import sharded

_MAX_NORM = 1.0
"""The Trainer clips to this norm where nothing is said (``max_grad_norm``)."""


def read_training_arguments(source: Source) -> Imported:
    """The file as prepkit's config; what concerns data, logging and evaluation is listed as not preparation.

    Raises ``PlanRejected`` with every finding.
    """
    file = foreign("transformers", source)
    return training_arguments(file, Path(source.path))


def training_arguments(file: Foreign, path: Path, micro_batch: str = "per_device_train_batch_size") -> Imported:
    """The same of a file that has other keys beside those of ``TrainingArguments``; ``micro_batch`` as it names it."""
    steps = file.whole("gradient_accumulation_steps", "accumulation")
    norm = file.number("max_grad_norm", "clip")
    clip = _MAX_NORM if norm is None else norm
    timeout = file.number("ddp_timeout", "timeout_s")
    compiled = file.flag("torch_compile", "compile")
    backend, mode = file.text("torch_compile_backend"), file.text("torch_compile_mode")
    config = Config(
        precision=_precision(file),
        accumulation=steps,
        clip=ClipNorm(clip) if clip > 0 else NoClip(),
        compile=CompileModel(backend=backend or "inductor", mode=mode or "default") if compiled else NoCompile(),
        checkpointing=_checkpointing(file),
        device=_device(file),
        backend=file.text("ddp_backend", "backend"),
        timeout_s=1800.0 if timeout is None else float(timeout),
    )
    config = _engine(file, config, path, micro_batch)
    _rest(file)
    return file.imported(config)


def _device(file: Foreign) -> str | None:
    """``cpu`` where it is asked for, also under the name that it had before ``use_cpu``."""
    asked = [name for name in ("use_cpu", "no_cuda") if file.flag(name)]
    for name in asked:
        file.raw(name, "device")
    return "cpu" if asked else None


def _checkpointing(file: Foreign) -> CheckpointBlocks | NoCheckpointing:
    """Under the name that transformers has had since 5, or the older one."""
    new, old = "activation_checkpointing", "gradient_checkpointing"
    for end in ("", "_kwargs"):
        if file.raw(f"{new}{end}") is not None and file.has(f"{old}{end}"):
            file.without_effect(f"{old}{end}", f"{new}{end} is there, and is read in its place")
        file.covered(f"{new}{end}")
        file.covered(f"{old}{end}")
    name = new if file.raw(new) is not None else old
    options = file.raw(f"{name}_kwargs", "checkpointing")
    if isinstance(options, dict) and options.get("every_n_layers") not in (None, 1):
        file.warn("no-effect", f"{name}_kwargs", "every block is recomputed (every_n_layers)", "Remove it.")
    return CheckpointBlocks() if file.flag(name, "checkpointing") else NoCheckpointing()


def _precision(file: Foreign) -> Precision:
    bf16, fp16 = file.flag("bf16", "precision"), file.flag("fp16", "precision")
    if bf16 and fp16:
        file.error("contradiction", "fp16", "bf16 is true as well, and a run has one precision", "Keep one of them.")
    return BF16() if bf16 else FP16() if fp16 else AsStored()


def _engine(file: Foreign, config: Config, path: Path, micro_batch: str) -> Config:
    asked = file.raw("fsdp")
    if file.raw("deepspeed") and asked:
        file.error("contradiction", "fsdp", "deepspeed is given as well, and one of them shards", "Keep one of them.")
    if file.raw("deepspeed"):
        return _deepspeed(file, config, path, micro_batch)
    if asked not in (None, False, "", []):
        return sharded(file, config, asked, path)
    if file.raw("fsdp_config"):
        file.without_effect("fsdp_config", "it is read with `fsdp` only", "Write fsdp: true, or remove it.")
    return evolve(config, engine=_ddp(file))


def _ddp(file: Foreign) -> Engine:
    unused = file.flag("ddp_find_unused_parameters", "engine.find_unused_parameters")
    bucket = file.number("ddp_bucket_cap_mb", "engine.bucket_cap_mb")
    buffers = file.flag("ddp_broadcast_buffers", "engine.broadcast_buffers")
    static = file.flag("ddp_static_graph", "engine.static_graph")
    return DDP(
        find_unused_parameters=bool(unused),
        bucket_cap_mb=25.0 if bucket is None else bucket,
        broadcast_buffers=buffers is not False,
        static_graph=bool(static),
    )


def _deepspeed(file: Foreign, config: Config, path: Path, micro_batch: str) -> Config:
    given = file.raw("deepspeed", "engine")
    if isinstance(given, dict):
        places = {key.removeprefix("deepspeed."): place for key, place in file.places.items()}
        nested = Foreign(
            kind=file.kind,
            source=file.source,
            data=given,
            places=places,
            shown_as={key: f"deepspeed.{key}" for key in places},
        )
        inner = from_json(nested, config.precision)
        file.covered("deepspeed")
        file.findings += nested.findings
        return _with_json(config, inner, file, micro_batch)
    found = next((place for place in (Path(str(given)), path.parent / str(given)) if place.is_file()), None)
    if found is None:
        what = f"there is no file {given}, neither from here nor beside {path.name}"
        file.error("missing-file", "deepspeed", what, "Give the path of the JSON file.")
        return config
    try:
        imported = read_deepspeed(read(str(found), JSON), config.precision)
    except PlanRejected as refused:
        file.findings += refused.findings
        return config
    assert isinstance(imported.config.engine, DeepSpeed)
    file.origins += [origin for origin in imported.config.origins if origin.setting.startswith("config.engine")]
    file.findings += imported.notes
    return _with_json(config, imported.config, file, micro_batch)


def _with_json(config: Config, inner: Config, file: Foreign, micro_batch: str) -> Config:
    """The arguments with DeepSpeed's own config, whose loss scale counts where both ask for one precision.

    A micro-batch that the JSON leaves to the Trainer (``auto``) is the one of the arguments.
    """
    same = type(inner.precision) is type(config.precision)
    engine = inner.engine
    assert isinstance(engine, DeepSpeed)
    data = json.loads(engine.config)
    left = AUTO if data.get("train_batch_size", AUTO) == AUTO else None
    if data.get("train_micro_batch_size_per_gpu", left) == AUTO:
        engine = evolve(engine, micro_batch=file.whole(micro_batch, "engine.micro_batch"))
    return evolve(config, engine=engine, precision=inner.precision if same else config.precision)


def _rest(file: Foreign) -> None:
    """Everything else is about data, logging and the loop, unless it is nearly a key that was looked for.

    Keys of the rest are often near to each other (``load_in_4bit``, ``load_in_8bit``), which says nothing of them.
    """
    looked_for = file.known()
    for key in file.unread():
        if not get_close_matches(key, looked_for, n=1, cutoff=0.88):
            file.launching(key)
