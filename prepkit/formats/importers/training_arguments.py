"""The part of transformers' ``TrainingArguments`` that prepares a model.

A YAML or JSON of them, as ``HfArgumentParser`` reads it, and as TRL's files hold it beside more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import evolve

from prepkit.codec.text import shown
from prepkit.config import (
    BF16,
    DDP,
    FP16,
    FSDP2,
    BroadcastWeights,
    CheckpointBlocks,
    ClipNorm,
    CompileModel,
    Config,
    DeepSpeed,
    Engine,
    OffloadToCPU,
    Precision,
)
from prepkit.findings import Finding
from prepkit.findings.keywords import ELSEWHERE, meant_key
from prepkit.findings.text import near
from prepkit.formats.importers.accelerate_engines import fsdp
from prepkit.formats.importers.argument_keys import GONE, KEYS, NOW, strange_keys
from prepkit.formats.importers.argument_values import (
    MAX_NORM,
    OPTIMIZER,
    created,
    given_in,
    judge,
    samples,
    say_mismatches,
    say_texts,
)
from prepkit.formats.importers.deepspeed import from_json, read_deepspeed, with_own_dtypes
from prepkit.formats.importers.foreign import Foreign, beside, foreign
from prepkit.formats.importers.positions import LineColumn, positions
from prepkit.formats.importers.source import JSON, Imported, Source, read
from prepkit.resolve.deepspeed.data import AUTO, OWN_CLIP, filled

"""The Trainer clips to this norm where nothing is said (``max_grad_norm``)."""


def read_training_arguments(source: Source) -> Imported:
    """The file as prepkit's config; what concerns data, logging and evaluation is listed as not preparation.

    Raises ``PlanRejected`` with every finding.
    """
    file = foreign("transformers", source)
    if strange_keys("transformers", file.data):
        file.launching(*(key for key in file.data if key not in NOW))
    else:
        _say_gone(file)
    return training_arguments(file, Path(source.path))


def read_options(path: str, options: Mapping[str, tuple[str | bool | None, LineColumn]]) -> Imported:
    """The same of options that a line of a launch script gives; as argparse takes them, a beginning is enough.

    Raises ``PlanRejected`` with every finding.
    """
    given, places = {}, {}
    for name, (value, place) in options.items():
        near = [key for key in NOW if key.startswith(name)] if name not in NOW else []
        key = near[0] if len(near) == 1 and near[0] not in options else name
        given[key], places[key] = value, place
    file = Foreign(kind="transformers", source=path, data=given, places=places)
    _say_gone(file)
    return training_arguments(file, Path(path))


def _say_gone(file: Foreign) -> None:
    """Says which keys later releases of transformers refuse."""
    for key in GONE:
        if file.has(key):
            gone = GONE[key]
            what = f"transformers {gone.until} and later have no such key, and refuse it"
            file.warn("unknown-key", key, what, f"Write {gone.instead}." if gone.instead else "Remove it.")


def training_arguments(file: Foreign, path: Path, micro_batch: str = "per_device_train_batch_size") -> Imported:
    """The same of a file that has other keys beside those of ``TrainingArguments``; ``micro_batch`` as it names it."""
    steps = file.whole("gradient_accumulation_steps", "accumulation")
    norm = file.number("max_grad_norm", "clip")
    clip = MAX_NORM if norm is None else norm
    timeout = file.number("ddp_timeout", "timeout_s")
    compiled = file.flag("torch_compile", "compile")
    backend, mode = file.text("torch_compile_backend"), file.text("torch_compile_mode")
    config = Config(
        precision=_precision(file),
        accumulation=steps,
        clip=ClipNorm(clip) if clip > 0 else None,
        compile=CompileModel(backend=backend or "inductor", mode=mode or "default") if compiled else None,
        checkpointing=_checkpointing(file),
        device=_device(file),
        backend=file.text("ddp_backend", "backend"),
        timeout_s=1800.0 if timeout is None else float(timeout),
    )
    config = _engine(file, config, path, micro_batch)
    judge(file, micro_batch)
    _rest(file)
    say_texts(file, micro_batch)
    made, size = created(file), samples(file, micro_batch)
    return file.imported(config, known=tuple(KEYS[file.kind]), seen_to=_SEEN_TO, optimizer=made, batch_size=size)


_SEEN_TO = ("checkpoint.cache",)
"""The Trainer switches the cache off (``use_cache``), and blocks that are recomputed drop it as they are called."""


def _device(file: Foreign) -> str | None:
    """``cpu`` where it is asked for, also under the name that it had before ``use_cpu``."""
    asked = [name for name in ("use_cpu", "no_cuda") if file.flag(name)]
    for name in asked:
        file.raw(name, "device")
    return "cpu" if asked else None


def _checkpointing(file: Foreign) -> CheckpointBlocks | None:
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
        file.warn("not-supported", f"{name}_kwargs", "every block is recomputed (every_n_layers)", "Remove it.")
    return CheckpointBlocks() if file.flag(name, "checkpointing") else None


def _precision(file: Foreign) -> Precision:
    bf16, fp16 = file.flag("bf16", "precision"), file.flag("fp16", "precision")
    if bf16 and fp16:
        file.error("contradiction", "fp16", "bf16 is true as well, and a run has one precision", "Keep one of them.")
    return BF16() if bf16 else FP16() if fp16 else None


def _engine(file: Foreign, config: Config, path: Path, micro_batch: str) -> Config:
    asked = file.raw("fsdp")
    if file.raw("deepspeed") and asked:
        file.error("contradiction", "fsdp", "deepspeed is given as well, and one of them shards", "Keep one of them.")
    if file.raw("deepspeed"):
        if file.raw("fsdp_config"):
            what = "deepspeed is given as well, and one of them shards"
            file.error("contradiction", "fsdp_config", what, "Keep one of them.")
            file.covered("fsdp_config")
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
    given = _typed_out(file.raw("deepspeed", "engine"))
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
    found = beside(str(given), path)
    if found is None:
        file.missing("deepspeed", str(given), path)
        return config
    imported = file.part("deepspeed", lambda: read_deepspeed(file.json(found), config.precision))
    if imported is None:
        return config
    file.origins += [origin for origin in imported.config.origins if origin.setting.startswith(_OF_THE_JSON)]
    file.findings += imported.notes
    file.taken(imported, found)
    return _with_json(config, imported.config, file, micro_batch)


_OF_THE_JSON = ("config.engine", "config.precision.reduce_dtype", "config.precision.master_weights")
"""Settings that DeepSpeed's own file says, whatever the arguments say."""


def _typed_out(given: Any) -> Any:
    """The value; a text that holds JSON as what it holds, which the Trainer takes too."""
    with suppress(ValueError):
        return json.loads(given) if isinstance(given, str) and given.startswith("{") else given
    return given


def _with_json(config: Config, inner: Config, file: Foreign, micro_batch: str) -> Config:
    """The arguments with DeepSpeed's own config, whose loss scale counts where both ask for one precision.

    What the JSON leaves to the Trainer (``auto``) is what the arguments say, and what both say has to be the same
    (``HfTrainerDeepSpeedConfig``).
    """
    same = type(inner.precision) is type(config.precision)
    engine = inner.engine
    assert isinstance(engine, DeepSpeed)
    data = json.loads(engine.config)
    given = given_in(file, data, micro_batch)
    say_mismatches(file, data, given)
    left = AUTO if data.get("train_batch_size", AUTO) == AUTO else None
    if data.get("train_micro_batch_size_per_gpu", left) == AUTO:
        engine = evolve(engine, micro_batch=file.whole(micro_batch, "engine.micro_batch"))
    filling = {f"optimizer.params.{key}": value for key, value in OPTIMIZER.items()}
    filling |= {"scheduler.params.warmup_min_lr": 0, "scheduler.params.warmup_max_lr": OPTIMIZER["lr"]}
    filling |= {key: value for key, (_, value) in given.items() if key.startswith(("optimizer.", "scheduler."))}
    engine = filled(engine, filling)
    clip = config.clip
    if "gradient_clipping" not in data and clip != inner.clip:
        what = f"the JSON has no gradient_clipping, and DeepSpeed clips to {OWN_CLIP} then, whatever stands here"
        file.warn("no-effect", "max_grad_norm", what, 'Write "gradient_clipping": "auto" into the JSON.')
        clip = inner.clip
    if config.precision is None:  # as the Trainer fills in what is left to it
        engine = filled(engine, {"fp16.enabled": False, "bf16.enabled": False})
    engine = engine if clip else filled(engine, {"gradient_clipping": 0.0})
    precision = inner.precision if same else config.precision
    return with_own_dtypes(evolve(config, engine=engine, precision=precision, clip=clip))


def _rest(file: Foreign) -> None:
    """Everything else is about data, logging and the loop, unless it is nearly a key that was looked for.

    Keys of the rest are often near to each other (``load_in_4bit``, ``load_in_8bit``), which says nothing of them.
    """
    own = KEYS[file.kind]
    known = {*file.known(), *own}
    closed = file.kind in _PASSED and all(str(one).startswith("axolotl.") for one in file.data.get("plugins") or ())
    for key in file.unread():
        if key in own or file.data[key] is None:
            file.launching(key)
        elif closed and not meant_key(key, known):
            file.warn("unknown-key", key, _PASSED[file.kind], "Remove it.")
        elif not closed and not near(key, known, 1, ELSEWHERE):
            file.launching(key)


_PASSED = {
    "axolotl": "axolotl 0.4 to 0.18 has no such key, and passes it by",
    "llamafactory": "LLaMA-Factory 0.1 to 0.9.5 has no such key, and refuses it",
}
"""Library whose keys are all known, plugins of others aside, to what becomes of any other key."""


# --- FSDP ------------------------------------------------------------------------------------------------------------


_LEGACY = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD"} | {
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
}
"""Words of the old ``fsdp: "full_shard auto_wrap"`` to sharding strategies."""
_HERE = "fsdp_config.fsdp_"


def sharded(file: Foreign, config: Config, asked: Any, path: Path) -> Config:
    """The config with FSDP as its engine; ``asked`` is the value of ``fsdp``."""
    file.raw("fsdp", "engine")
    inner = _as_accelerates(file, asked, path)
    typed = inner.shown_as
    precision = _reduced(config.precision)
    engine = fsdp(inner, precision)
    if inner.flag(f"{_HERE}cpu_offload_pin_memory", "engine.offload") is False and isinstance(engine, FSDP2):
        engine = evolve(engine, offload=OffloadToCPU(pin_memory=False)) if engine.offload == OffloadToCPU() else engine
    sent = inner.flag(f"{_HERE}cpu_ram_efficient_loading", "weights")
    checkpointed = inner.flag(f"{_HERE}activation_checkpointing", "checkpointing")
    offloaded = inner.flag(f"{_HERE}activation_checkpointing_offload", "checkpointing.offload") or False
    if checkpointed and config.checkpointing is not None and file.kind == "transformers":
        what = "blocks are checkpointed by the model too (gradient_checkpointing): the Trainer refuses to start"
        inner.error("contradiction", f"{_HERE}activation_checkpointing", what, "Keep one of them.", misread=False)
    inner.launching(f"{_HERE}final_state_dict_type")
    file.covered("fsdp_config")
    inner.raw(f"{_HERE}cpu_offload")  # which is read by its other name
    inner.say_unknown()
    inner.findings = [_as_typed(one, "" if inner.sources else "fsdp_config.") for one in inner.findings]
    file.origins += [origin for origin in inner.origins if origin.key in typed.values()]  # the others are defaults
    file.not_preparation += inner.not_preparation
    file.findings += inner.findings
    config = evolve(config, engine=engine, precision=precision)
    if sent:
        config = evolve(config, weights=BroadcastWeights())
    return evolve(config, checkpointing=CheckpointBlocks(offload=offloaded)) if checkpointed else config


def _as_typed(finding: Finding, above: str) -> Finding:
    """The finding with keys in its fix as the file has them: with ``fsdp_`` before them, or without."""
    before = "fsdp_" if finding.where.rpartition(" ")[2].rpartition(".")[2].startswith("fsdp_") else ""
    return evolve(finding, fix=finding.fix.replace(_HERE, f"{above}{before}"))


def _as_accelerates(file: Foreign, asked: Any, path: Path) -> Foreign:
    """``fsdp_config`` under accelerate's names, shown as the file has them, in the file or in a JSON of its own."""
    section: Any = _typed_out(file.data.get("fsdp_config") or {})
    there: Source | None = None
    if isinstance(section, str) and section.startswith("{"):
        what = "the Trainer reads what begins with a brace as JSON, and this is none"
        file.error("wrong-value", "fsdp_config", what, "Write it as JSON, or the path of a JSON file.")
        section = {}
    elif isinstance(section, str):
        there = _json(file, "fsdp_config", section, path)
        section = {} if there is None else there.data()
    if not isinstance(section, dict):
        file.error("wrong-type", "fsdp_config", f"{shown(section)} is no section", "Write keys below it, or remove it.")
        section = {}
    words = asked.replace(",", " ").split() if isinstance(asked, str) else asked if isinstance(asked, list) else []
    named = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in section.items()}
    above = "" if there else "fsdp_config."
    typed = {f"{_HERE}{str(key).removeprefix('fsdp_')}": f"{above}{key}" for key in section}
    _older_names(file, named, typed)
    unsaid = _UNSAID.get(file.kind, 2)
    named["fsdp_version"] = {"1": 1, "2": 2}.get(str(named.get("fsdp_version", unsaid)), named.get("fsdp_version"))
    named.setdefault("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    _renamed(file, words, named, typed)
    inner = Foreign(
        kind=file.kind,
        source=file.source,
        data={"fsdp_config": named},
        places={name: place for name, key in typed.items() if (place := _place(file, key, section, there))},
        shown_as=typed,
        sources={name: there.path for name, key in typed.items() if key in section} if there else {},
    )
    if inner.flag(f"{_HERE}xla"):
        what = "torch_xla's own FSDP shards then, and prepkit's XLA engine shards nothing"
        inner.error("not-supported", f"{_HERE}xla", what, "Write false.")
    for name in ("xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):  # which are read with xla only
        inner.raw(f"{_HERE}{name}")
    return inner


_UNSAID = {"axolotl": 1}
"""Library to the version of FSDP where nothing is said, if it is another than transformers' (5.10 and later) 2.

axolotl 0.18 writes 1 into ``fsdp_config`` (``check_fsdp_version_in_fsdp_config``); what else is not said there is the
Trainer's, ``use_orig_params`` and ``sync_module_states`` true (transformers 5.14, which it asks for, to 5.23).
"""


def _place(file: Foreign, key: str, section: dict[str, Any], there: Source | None) -> LineColumn | None:
    """Where a key stands: in the JSON that is named, below ``fsdp_config``, or where that holds all of it as text."""
    if there is not None and key in section:
        return positions(there.text, there.suffix).get(key)
    return file.places.get(key, file.places.get(key.partition(".")[0]))


def _older_names(file: Foreign, named: dict[str, Any], typed: dict[str, str]) -> None:
    """What older files have at the top, where the section does not say it (transformers before 4.40)."""
    for name in ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
        value = file.raw(name)
        if value in (None, 0, "") or name in named:
            continue
        named[name] = value
        typed[f"fsdp_config.{name}"] = name
        if name == "fsdp_min_num_params":
            named.setdefault("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP")


def _renamed(file: Foreign, words: list[Any], named: dict[str, Any], typed: dict[str, str]) -> None:
    """The Trainer's words and names as accelerate's keys, in place."""
    _strategy(named, typed)
    for word in (str(word).lower() for word in words):
        if word in _LEGACY and named["fsdp_version"] == 1:
            named.setdefault("fsdp_sharding_strategy", _LEGACY[word])
            typed.setdefault("fsdp_config.fsdp_sharding_strategy", "fsdp")
        elif word in ("full_shard", "shard_grad_op"):
            named.setdefault("fsdp_reshard_after_forward", word == "full_shard")
            typed.setdefault("fsdp_config.fsdp_reshard_after_forward", "fsdp")
        elif word in _LEGACY:
            what = f"{word} is a way of FSDP of version 1, and fsdp_config says version 2, or nothing, which means 2"
            file.error("contradiction", "fsdp", what, "Write fsdp_config with version: 1, or fsdp: true.")
        elif word == "offload":
            named["fsdp_offload_params"] = True
            typed["fsdp_config.fsdp_offload_params"] = "fsdp"
        elif word != "auto_wrap":
            meant = near(word, (*_LEGACY, "offload", "auto_wrap"), 1)
            fix = f"Write {meant[0]} in its place." if meant else "Write fsdp: true."
            file.error("wrong-value", "fsdp", f"{word!r} is no word of transformers' fsdp", fix)
    if (offload := named.pop("fsdp_cpu_offload", None)) is not None:
        named["fsdp_offload_params"] = offload
        typed["fsdp_config.fsdp_offload_params"] = typed["fsdp_config.fsdp_cpu_offload"]


def _strategy(named: dict[str, Any], typed: dict[str, str]) -> None:
    """Version 1 has its strategy where version 2 has a switch, and other defaults than accelerate."""
    if named["fsdp_version"] == 1:
        named.setdefault("fsdp_backward_prefetch", "NO_PREFETCH")
        if isinstance(strategy := named.get("fsdp_reshard_after_forward"), str):
            named["fsdp_sharding_strategy"] = strategy.upper()
            typed["fsdp_config.fsdp_sharding_strategy"] = typed["fsdp_config.fsdp_reshard_after_forward"]
            del named["fsdp_reshard_after_forward"]


def _reduced(precision: Precision) -> Precision:
    """Under FSDP the Trainer's accelerate reduces gradients in the compute dtype (H-10c)."""
    match precision:
        case BF16():
            return evolve(precision, reduce_dtype="bfloat16")
        case FP16():
            return evolve(precision, reduce_dtype="float16")
    return precision


def _json(file: Foreign, key: str, name: str, path: Path) -> Source | None:
    """The JSON that a key names; None, with a finding, where it is not there or cannot be read."""
    found = beside(name, path)
    if found is None:
        file.missing(key, name, path)
        return None
    file.named.append(str(found))
    held: list[Source] = []

    def inside() -> Imported:
        source = read(str(found), JSON)
        source.data()
        held.append(source)
        return Imported(config=Config(), kind=file.kind)

    file.part(key, inside)  # what else is wrong is told beside it
    return held[0] if held else None
