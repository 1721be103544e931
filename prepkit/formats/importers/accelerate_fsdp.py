"""The ``fsdp_config`` section of accelerate's file, for both versions of FSDP (behaviour K-F1 to K-F19)."""

from __future__ import annotations

from typing import cast

from attrs import evolve

from prepkit.config import (
    FSDP1,
    FSDP2,
    AsStored,
    KeepOnDevice,
    KeepWeights,
    OffloadToCPU,
    Precision,
    SendWeights,
    Weights,
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapRoot,
    WrapSize,
)
from prepkit.config.fsdp import Sharding
from prepkit.formats.importers.foreign import Foreign

_HERE = "fsdp_config."
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_FIRST_ONLY = ("backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "use_orig_params")
_MIN_PARAMS = 100_000_000
"""Elements above which accelerate's launcher makes a module a unit where the file says no number."""


def fsdp(file: Foreign, precision: Precision) -> FSDP1 | FSDP2:
    """The engine. Keys that the other version reads are said to do nothing.

    Version 1 keeps buffers in the dtype in which it reduces, where anything is cast (H-10c).
    """
    file.section("fsdp_config")
    version = file.whole(f"{_HERE}fsdp_version", "engine") or 1
    if version not in (1, 2):
        file.error("wrong-value", f"{_HERE}fsdp_version", f"there is no version {version} of FSDP", "Write 1 or 2.")
    file.word(f"{_HERE}fsdp_state_dict_type", ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"))
    if file.has(f"{_HERE}fsdp_state_dict_type"):  # save writes shards, export the whole: whoever saves says which
        file.launching(f"{_HERE}fsdp_state_dict_type")
    if version == 2:
        return _second(file)
    return evolve(_first(file), buffer_dtype=None if isinstance(precision, AsStored) else precision.reduce_dtype)


def weights(file: Foreign) -> Weights:
    """Rank 0's values for all, where the file lets the others load nothing (M2-13, F1-47).

    The launcher does so where the file says nothing of it (K-F19).
    """
    name = f"{_HERE}fsdp_cpu_ram_efficient_loading"
    said = file.flag(name, "weights")
    sent = file.kind == "accelerate" if said is None else said
    second = file.whole(f"{_HERE}fsdp_version") == 2
    if sent and not second and file.flag(f"{_HERE}fsdp_sync_module_states") is False:
        what = "rank 0 alone has values then, and fsdp_sync_module_states: false keeps them there"
        if said is None:
            what = f"accelerate's launcher means true where nothing is said; {what}"
        file.error("contradiction", name, what, "Write fsdp_sync_module_states: true, or false here.")
    return SendWeights() if sent else KeepWeights()


def _wrap(file: Foreign) -> Wrap:
    policy = file.word(f"{_HERE}fsdp_auto_wrap_policy", _POLICIES, "engine.wrap")
    current = f"{_HERE}fsdp_transformer_layer_cls_to_wrap"
    older = f"{_HERE}fsdp_transformer_cls_names_to_wrap"
    names = file.names(current, "engine.wrap") or file.names(older, "engine.wrap")
    file.names(older)
    least = file.whole(f"{_HERE}fsdp_min_num_params", *(("engine.wrap",) if policy == "SIZE_BASED_WRAP" else ()))
    if policy == "SIZE_BASED_WRAP":
        return WrapSize(_MIN_PARAMS if least is None else least)
    if least is not None:
        file.without_effect(
            f"{_HERE}fsdp_min_num_params", "it is read with fsdp_auto_wrap_policy: SIZE_BASED_WRAP only"
        )
    if policy == "TRANSFORMER_BASED_WRAP":
        return WrapClasses(names) if names else WrapBlocks()
    if names:
        why = "it is read with fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP only"
        file.without_effect(current if file.has(current) else older, why)
    return WrapRoot()


def _first(file: Foreign) -> FSDP1:
    strategy = file.word(f"{_HERE}fsdp_sharding_strategy", _STRATEGIES, "engine.sharding") or "FULL_SHARD"
    reshard = f"{_HERE}fsdp_reshard_after_forward"
    if file.has(reshard):
        file.without_effect(reshard, "FSDP of version 1 reads fsdp_sharding_strategy in its place", "Remove it.")
    prefetch = file.word(f"{_HERE}fsdp_backward_prefetch", _PREFETCH, "engine.backward_prefetch")
    older = file.word(f"{_HERE}fsdp_backward_prefetch_policy", _PREFETCH)
    if older is not None:
        file.without_effect(
            f"{_HERE}fsdp_backward_prefetch_policy", "accelerate reads fsdp_backward_prefetch", "Rename it."
        )
    limit = file.flag(f"{_HERE}fsdp_limit_all_gathers", "engine.limit_all_gathers")
    forward = file.flag(f"{_HERE}fsdp_forward_prefetch", "engine.forward_prefetch")
    original = file.flag(f"{_HERE}fsdp_use_orig_params", "engine.use_orig_params")
    sync = file.flag(f"{_HERE}fsdp_sync_module_states", "engine.sync_module_states")
    return FSDP1(
        wrap=_wrap(file),
        sharding=cast("Sharding", strategy),
        offload=file.flag(f"{_HERE}fsdp_offload_params", "engine.offload") or False,
        backward_prefetch=None if prefetch == "NO_PREFETCH" else prefetch,  # type: ignore[arg-type]
        forward_prefetch=forward or False,
        limit_all_gathers=limit is not False,
        use_orig_params=original is not False,
        sync_module_states=sync is not False,
        ignored=_ignored(file),
    )


def _second(file: Foreign) -> FSDP2:
    for name in (*_FIRST_ONLY, "limit_all_gathers", "sync_module_states"):
        file.without_effect(f"{_HERE}fsdp_{name}", "FSDP of version 2 does not read it")
    strategy = file.word(f"{_HERE}fsdp_sharding_strategy", _STRATEGIES)
    if strategy:
        why = "FSDP of version 2 reads fsdp_reshard_after_forward in its place"
        file.without_effect(f"{_HERE}fsdp_sharding_strategy", why)
    reshard = f"{_HERE}fsdp_reshard_after_forward"
    freed: bool | None
    if isinstance(file.raw(reshard), str) and str(file.raw(reshard)).upper() in _STRATEGIES:
        freed = str(file.raw(reshard, "engine.reshard_after_forward")).upper() not in ("SHARD_GRAD_OP", "NO_SHARD")
        what = "version 2 wants true or false here, and a name is refused by accelerate"
        file.warn("wrong-value", reshard, what, f"Write {str(freed).lower()}.")
    else:
        freed = file.flag(reshard, "engine.reshard_after_forward")
    offload = file.flag(f"{_HERE}fsdp_offload_params", "engine.offload")
    if _ignored(file):
        file.error("not-supported", f"{_HERE}fsdp_ignored_modules", "FSDP2 here shards every module", "Remove it.")
    return FSDP2(
        wrap=_wrap(file),
        reshard_after_forward=freed is not False,
        offload=OffloadToCPU() if offload else KeepOnDevice(),
    )


def _ignored(file: Foreign) -> tuple[str, ...]:
    """Patterns; accelerate takes one regular expression over paths; a plain path is a pattern of ours too."""
    name = f"{_HERE}fsdp_ignored_modules"
    text = file.text(name, "engine.ignored")
    if text is None:
        return ()
    if any(letter in text for letter in "\\[](){}^$+?|"):
        fix = "Write shell patterns over dotted paths in prepkit's config: FSDP1(ignored=('vision_tower.*',))."
        file.error("not-supported", name, f"{text!r} is a regular expression; prepkit takes shell patterns", fix)
        return ()
    return (text.replace(".*", "*"),)
