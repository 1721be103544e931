"""What a job config of torchtitan says of dtypes: ``training.mixed_precision_*``, ``training.dtype`` and float8."""

from __future__ import annotations

from prepkit.config import BF16, FP8, AsStored, Engine, Precision, TensorParallel, TorchAO
from prepkit.formats.importers.foreign import Foreign

_FLOAT8 = ("float8", "quantize.linear.float8")
"""Names of the converter, and of its section, in older and in newer files."""
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_BLOCKS = ("attention", "feed_forward", "moe")
"""Children of torchtitan's blocks, which are ``layers.0``, ``layers.1`` and so on."""


def precision(file: Foreign, engine: Engine) -> Precision:
    """The precision: bfloat16 where nothing is said, reduced in float32 (``MixedPrecisionPolicy``)."""
    compute = file.word("training.mixed_precision_param", ("bfloat16", "float32"), "precision") or "bfloat16"
    reduce = file.word("training.mixed_precision_reduce", ("float32", "bfloat16"), "precision.reduce_dtype")
    stored = file.word("training.dtype", ("float32", "bfloat16"), "precision.master_weights")
    float8 = _float8(file)
    if isinstance(engine, TensorParallel) and compute == "bfloat16" and stored != "bfloat16":
        if file.has("training.mixed_precision_param"):
            why = "torchtitan computes in the stored dtype where layers are cut and nothing is sharded"
            file.without_effect("training.mixed_precision_param", why)
        compute = "float32"
    options = {"reduce_dtype": reduce or "float32", "output_dtype": "bfloat16", "master_weights": stored != "bfloat16"}
    if float8 is not None:
        return FP8(backend=float8, **options)  # type: ignore[arg-type]  # names of dtypes
    if compute == "float32" or isinstance(engine, TensorParallel):
        return AsStored()
    return BF16(**options)  # type: ignore[arg-type]


def _float8(file: Foreign) -> TorchAO | None:
    asked = file.names("model.converters", "precision") or ()
    for name in asked:
        if name not in _FLOAT8:
            what = f"prepkit swaps no layers for {name!r}"
            file.error("not-supported", "model.converters", what, f"Write {list(_FLOAT8[1:])} or [].")
    for section in (*_FLOAT8, "mx", "quantize.linear.mx"):
        if file.section(section) and section not in asked:
            file.without_effect(section, f"model.converters does not name it: {list(asked)}")
    file.raw("quantize")
    file.raw("quantize.linear")
    here = next((name for name in _FLOAT8 if name in asked), None)
    if here is None:
        return None
    at = "precision.backend"
    gathered = file.flag(f"{here}.enable_fsdp_float8_all_gather", f"{at}.float8_all_gather")
    computed = file.flag(f"{here}.precompute_float8_dynamic_scale_for_fsdp", f"{at}.precompute_scales")
    if file.flag(f"{here}.force_recompute_fp8_weight_in_bwd"):
        name = f"{here}.force_recompute_fp8_weight_in_bwd"
        file.warn("no-effect", name, "torchao decides it by itself since 0.8", "Remove it.")
    if file.raw(f"{here}.moe_fqns_prototype"):
        what = "experts are not multiplied in float8"
        file.error("not-supported", f"{here}.moe_fqns_prototype", what, "Write [].")
    recipe = file.word(f"{here}.recipe_name", _RECIPES, f"{at}.recipe")
    emulate = file.flag(f"{here}.emulate", f"{at}.emulate")
    return TorchAO(
        recipe=recipe or "tensorwise",  # type: ignore[arg-type]  # one of its words
        pad_inner_dim=False,
        float8_all_gather=bool(gathered),
        precompute_scales=bool(computed),
        keep_first_and_last=False,
        skip=_skip(file, f"{here}.filter_fqns"),
        emulate=bool(emulate),
    )


def _skip(file: Foreign, name: str) -> tuple[str, ...]:
    """Patterns for texts that torchtitan looks for anywhere in a path: its own models say where they can be."""
    found = []
    for text in file.names(name, "precision.backend.skip") or ():
        first = text.partition(".")[0]
        if first in _BLOCKS and "." in text:
            found.append(f"layers.*.{text}*")
        elif first in ("output", "lm_head", "layers") or text.startswith("layers."):
            found.append(f"{text}*")
        else:
            what = f"torchtitan skips every path that contains {text!r}; prepkit takes shell patterns over whole paths"
            fix = "Remove it, and write TorchAO(skip=('layers.*.attention.wq',)) in prepkit's config."
            file.error("not-supported", name, what, fix)
    return tuple(found)
