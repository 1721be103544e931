"""axolotl's YAML: ``TrainingArguments`` under some names of its own, beside data, adapters and logging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from prepkit.codec.text import shown
from prepkit.config import BF16, FP8, FSDP1, FSDP2, CheckpointBlocks, DType, Mesh, TorchAO
from prepkit.findings.keywords import unknown_key_fix
from prepkit.formats.importers.argument_keys import KEYS, NOW
from prepkit.formats.importers.deepspeed import with_own_dtypes
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
    _say_refused(file)
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
        precise = evolve(config, precision=FP8(backend=backend, reduce_dtype=reduce, master_weights=not full))
        config = with_own_dtypes(precise)
    if sizes and isinstance(config.engine, FSDP2):
        config = evolve(config, mesh=_mesh(sizes))
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
    """``fsdp_version`` at the top is one of ``fsdp_config``, which alone asks for FSDP.

    Keys that axolotl does not hand on to FSDP, or that it reads itself, are left out of the section.
    """
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
    said = _Said.of(file)
    for key in tuple(section):
        name, path = str(key).removeprefix("fsdp_"), f"fsdp_config.{key}"
        if name == "use_orig_params" and said.version == "2" and _reads_orig_params(said):
            file.launching(path)
            del section[key]
        elif name in _DROPPED and said.version == "1":
            if section[key] == _DROPPED[name]:
                file.launching(path)
            else:
                file.without_effect(path, "axolotl 0.18 has no such key in fsdp_config, and passes it by")
            del section[key]


_DROPPED = {
    "sharding_strategy": "FULL_SHARD",
    "limit_all_gathers": True,
    "backward_prefetch": "NO_PREFETCH",
    "forward_prefetch": False,
}
"""Keys that ``FSDPConfig`` of axolotl 0.18 does not have, to what FSDP of version 1 does then."""


def _reads_orig_params(said: _Said) -> bool:
    """Whether something other than FSDP looks at the key: ``check_qgalore``, or a plugin (that of Spectrum does)."""
    return said.optimizer == "q_galore_adamw8bit" or bool(said.data.get("plugins"))


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


def _mesh(sizes: Mapping[str, int]) -> Mesh:
    """The ranks as axolotl 0.18 lays them out under FSDP (``_get_parallel_config_kwargs``): 1 says nothing.

    What shards leave is copies, where nobody says how many of them; without shards, what copies leave is shards.
    """
    copies, shards = sizes.get("replicate", 1), sizes.get("shard", 1)
    left = 1 if shards <= 1 else -1
    return Mesh(
        replicate=copies if copies > 1 else left,
        shard=shards if shards > 1 else -1,
        tensor=max(sizes.get("tensor", 1), 1),
    )


# --- what axolotl refuses ---------------------------------------------------------------------------------------------


@frozen
class _Said:
    """What a file says of optimizer and sharding, as axolotl's validators look at it."""

    data: Mapping[str, Any]
    section: Mapping[str, Any]
    """``fsdp_config`` without the ``fsdp_`` that its keys may begin with."""

    @staticmethod
    def of(file: Foreign) -> _Said:
        section = file.data.get("fsdp_config")
        given = section if isinstance(section, dict) else {}
        return _Said(file.data, {str(key).removeprefix("fsdp_"): value for key, value in given.items()})

    @property
    def version(self) -> str:
        """The version of FSDP, 1 where nothing is said (``check_fsdp_version_in_fsdp_config``); empty: no FSDP."""
        if not (self.section or self.data.get("fsdp")):
            return ""
        return str(self.section.get("version") or self.data.get("fsdp_version") or 1)

    @property
    def optimizer(self) -> str:
        return str(self.data.get("optimizer") or "")

    def on(self, name: str) -> bool:
        """Whether a switch, or anything else, is given at the top."""
        return str(self.data.get(name) or "false").lower() not in ("false", "no", "off", "0", "0.0", "none")


@frozen
class _Refusal:
    """What axolotl 0.18 raises an error for before it starts."""

    at: str
    """The key that is told."""
    when: Callable[[_Said], bool]
    what: str
    fix: str


_EVALUATED = ("eval_strategy", "evaluation_strategy")
"""Names of one key, the second of which is older."""
_REFUSALS = (
    _Refusal(
        "dp_shard_size",
        lambda said: not said.version and str(said.data["dp_shard_size"]) not in ("0", "1"),
        "axolotl refuses it without fsdp_config, where several processes start",
        "Write an fsdp_config, with fsdp_version: 2, or remove it.",
    ),
    _Refusal(
        "optimizer",
        lambda said: said.version == "2" and said.optimizer in ("adamw_8bit", "adamw_bnb_8bit"),
        "axolotl refuses it under FSDP of version 2, whose shards bitsandbytes cannot step",
        "Write optimizer: adamw_torch_8bit.",
    ),
    _Refusal(
        "optimizer",
        lambda said: said.version == "1" and "8bit" in said.optimizer and said.section.get("offload_params") is True,
        "axolotl refuses an optimizer of 8 bits with offload_params under FSDP of version 1",
        "Write optimizer: adamw_torch_8bit, with fsdp_version: 2.",
    ),
    _Refusal(
        "optimizer",
        lambda said: (
            said.version == "1"
            and (said.optimizer in ("muon", "q_galore_adamw8bit") or said.optimizer.startswith("flash_"))
        ),
        "axolotl refuses it under FSDP of version 1, which it takes where no version is given",
        "Write fsdp_version: 2.",
    ),
    _Refusal(
        "optimizer",
        lambda said: (
            said.on("deepspeed")
            and (said.optimizer in ("muon", "q_galore_adamw8bit") or said.optimizer.startswith("flash_"))
        ),
        "axolotl refuses it with deepspeed",
        "Write optimizer: adamw_torch_fused, or fsdp_config with fsdp_version: 2 in the place of deepspeed.",
    ),
    _Refusal(
        "optimizer",
        lambda said: (
            said.optimizer == "q_galore_adamw8bit"
            and said.version == "2"
            and said.section.get("use_orig_params") is not True
        ),
        "axolotl refuses it under FSDP without use_orig_params: true in fsdp_config",
        "Write use_orig_params: true into fsdp_config.",
    ),
    _Refusal(
        "adapter",
        lambda said: said.optimizer == "q_galore_adamw8bit" and said.on("adapter"),
        "axolotl refuses it with optimizer: q_galore_adamw8bit, which trains whole weights",
        "Remove it, or write optimizer: adamw_torch_fused.",
    ),
    _Refusal(
        "fp8_enable_fsdp_float8_all_gather",
        lambda said: said.on("fp8_enable_fsdp_float8_all_gather") and said.version == "1",
        "axolotl refuses it without FSDP of version 2",
        "Write fsdp_version: 2.",
    ),
    _Refusal(
        "fsdp_config",
        lambda said: (
            said.section.get("cpu_offload_pin_memory") is False
            and (said.version == "1" or not said.section.get("offload_params"))
        ),
        "axolotl refuses cpu_offload_pin_memory: false without offload_params: true and FSDP of version 2",
        "Write offload_params: true, and fsdp_version: 2.",
    ),
    _Refusal(
        "fsdp_config",
        lambda said: said.version == "1" and isinstance(said.section.get("reshard_after_forward"), bool),
        "a switch as reshard_after_forward is refused under FSDP of version 1, the one that no version means",
        "Write fsdp_version: 2, or remove reshard_after_forward.",
    ),
    _Refusal(
        "rl",
        lambda said: (
            said.version == "2"
            and said.data["rl"] in ("dpo", "kto", "orpo", "ipo")
            and (said.on("load_in_8bit") or said.on("load_in_4bit"))
        ),
        "axolotl refuses it with weights of 8 or 4 bits under FSDP of version 2",
        "Write fsdp_version: 1, or deepspeed in the place of fsdp_config.",
    ),
    _Refusal(
        "warmup_steps",
        lambda said: isinstance(steps := said.data["warmup_steps"], float) and not steps.is_integer(),
        "axolotl takes whole steps here, and refuses a part of them",
        "Write warmup_ratio with the same number in its place.",
    ),
    _Refusal(
        "save_steps",
        lambda said: said.on("save_steps") and said.on("save_strategy") and said.data["save_strategy"] != "steps",
        "axolotl refuses it with another save_strategy than steps",
        "Remove it, or write save_strategy: steps.",
    ),
    *(
        _Refusal(
            name,
            lambda said, name=name: (  # type: ignore[misc]  # lambdas have no types
                said.on(name) and any(said.on(one) and said.data[one] != "steps" for one in _EVALUATED)
            ),
            "axolotl refuses it with another eval_strategy than steps",
            "Remove it, or write eval_strategy: steps.",
        )
        for name in ("eval_steps", "evals_per_epoch")
    ),
    _Refusal(
        "val_set_size",
        lambda said: (
            said.data["val_set_size"] in (0, "0")
            and any(said.on(one) for one in ("eval_steps", *_EVALUATED))
            and not said.on("test_datasets")
        ),
        "axolotl refuses eval_steps and eval_strategy with it, as there is nothing to evaluate on",
        "Write a part of the data, such as 0.05, or remove eval_steps and eval_strategy.",
    ),
)
_KERNELS = "lora_mlp_kernel lora_qkv_kernel lora_o_kernel"
_LOSSES = "cut_cross_entropy chunked_cross_entropy liger_cross_entropy liger_fused_linear_cross_entropy"
_APART: tuple[tuple[str, str], ...] = (
    ("warmup_ratio", "warmup_steps"),
    ("saves_per_epoch", "save_steps"),
    ("evals_per_epoch", "eval_steps"),
    ("val_set_size", "test_datasets pretraining_dataset streaming"),
    ("max_memory", "gpu_memory_limit"),
    ("noisy_embedding_alpha", "neftune_noise_alpha"),
    ("pretrain_multipack_buffer_size", "streaming_multipack_buffer_size"),
    ("lr_groups", "loraplus_lr_ratio"),
    ("include_tokens_per_second", "pretraining_dataset"),
    ("eval_sample_packing", "do_causal_lm_eval"),
    ("model_quantization_config", "load_in_8bit load_in_4bit"),
    ("revision_of_model", "gptq"),
    *((one, " ".join(_LOSSES.split()[at + 1 :])) for at, one in enumerate(_LOSSES.split()[:-1])),
    ("dataset_exact_deduplication", "streaming pretraining_dataset skip_prepare_dataset"),
    ("qat", "load_in_8bit load_in_4bit"),
    ("ple_cpu_offload", "fsdp fsdp_config deepspeed"),
    ("relora", "fsdp fsdp_config deepspeed flash_attn_fuse_mlp"),
    ("quantize_moe_experts", "lora_target_linear"),
    ("trust_remote_code", _KERNELS),
    ("sample_packing", "rl"),
    ("tokenizer_use_mistral_common", "added_tokens_overrides special_tokens tokens chat_template processor_kwargs"),
)
"""Keys, each with those that axolotl 0.19 refuses it beside (``schemas/validation.py`` and ``schemas/config.py``)."""
_NEEDS: tuple[tuple[str, str], ...] = (
    ("pretraining_dataset", "max_steps"),
    ("streaming", "max_steps"),
    ("do_bench_eval", "evals_per_epoch eval_steps"),
    ("push_dataset_to_hub", "hf_use_auth_token"),
    ("peft_layers_pattern", "peft_layers_to_transform"),
    ("deepcompile", "deepspeed"),
    ("relora", "jagged_restart_steps"),
    ("quantize_moe_experts", "load_in_4bit load_in_8bit"),
    ("early_stopping_patience", "save_steps"),
    ("early_stopping_patience", "eval_steps"),
    ("selective_checkpointing", "gradient_checkpointing"),
    ("fp8_config", "fp8"),
)
"""Keys, each with those of which it asks for one."""
_REMOVED = {
    "max_packed_sequence_len": "Write sequence_len, with sample_packing: true.",
    "rope_scaling": "Write it below overrides_of_model_config.",
    "dpo_use_logits_to_keep": "Remove it.",
    "dpo_generate_during_eval": "Remove it.",
    "dpo_norm_loss": "Remove it.",
    "rpo_alpha": "Remove it.",
    "s2_attention": "Remove it.",
    "flash_attn_rms_norm": "Remove it.",
    "unsloth_cross_entropy_loss": "Remove it.",
    "unsloth_lora_mlp": "Write lora_mlp_kernel.",
    "unsloth_lora_qkv": "Write lora_qkv_kernel.",
    "unsloth_lora_o": "Write lora_o_kernel.",
    "unsloth_rms_norm": "Remove it.",
    "unsloth_rope": "Remove it.",
}
"""Keys that axolotl 0.18 raises an error for (``DeprecatedParameters``, ``check_deprecated_unsloth_fields``)."""


def _say_refused(file: Foreign) -> None:
    """Says what axolotl 0.18 does not start with."""
    said = _Said.of(file)
    for row in _REFUSALS:
        if file.data.get(row.at) is not None and row.when(said):
            file.error("contradiction", row.at, row.what, row.fix, misread=False)
    for name, others in _APART:
        if said.on(name) and (there := [one for one in others.split() if said.on(one)]):
            what = f"axolotl refuses it beside {there[0]}"
            file.error("contradiction", name, what, "Keep one of them.", misread=False)
    for name, others in _NEEDS:
        if said.on(name) and not any(said.on(one) for one in others.split()):
            needed = others.replace(" ", " or ")
            file.error("contradiction", name, f"axolotl refuses it without {needed}", f"Write {needed}.", misread=False)
    for name, fix in _REMOVED.items():
        if said.on(name) or (name[:4] in ("dpo_", "rpo_") and file.data.get(name) is not None):  # false too
            file.error("unknown-key", name, "axolotl 0.18 has it no longer, and refuses it", fix, misread=False)
