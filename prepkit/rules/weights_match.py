"""Whether the tensors of a checkpoint are those of the model: names, shapes, dtypes, and parts that make up a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prepkit.config import LoadWeights
from prepkit.facts import ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, near, some
from prepkit.resolve.checkpoint import CheckpointMatch, unreadable
from prepkit.resolve.checkpoint_parts import AssembledTensor, lacking, unmatched
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

_CASTS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes that are cast into one another when they are read."""


def _readable_match(resolved: Resolved) -> CheckpointMatch | None:
    """The checkpoint against the model where its files can be read: else what it lacks says nothing."""
    checkpoint = resolved.values.checkpoint
    return resolved.values.match if checkpoint is not None and not checkpoint.problems else None


def _rename(resolved: Resolved) -> Iterator[Hit]:
    if not isinstance(resolved.cfg.weights, LoadWeights):
        return
    where = "config.weights.rename"
    for pattern, why in unreadable(resolved.cfg.weights):
        yield Hit(where, f"`{pattern}` and its replacement are {why}.")
    checkpoint, match = resolved.values.checkpoint, _readable_match(resolved)
    if checkpoint is not None and match is not None and match.ambiguous:
        what = f"Several tensors of the checkpoint are renamed to {some([name for name, _ in match.ambiguous])}"
        if all(tensor.place is None for tensor in checkpoint.tensors):
            yield Hit(where, f"{what}.")
        else:
            fix = "Remove all but one of them from the files, or rename the one that is read."
            yield Hit(where, f"{what}, by the model's library: {some(match.ambiguous[0][1])}.", fix)


def _missing(resolved: Resolved) -> Iterator[Hit]:
    match = _readable_match(resolved)
    if match is None or not match.missing:
        return
    what = f"The checkpoint lacks {count(len(match.missing), 'tensor')} of the model: {some(match.missing)}."
    if match.converted:
        key, how = match.converted[0]
        what += f" The model's library converts `{key}`{_more(match.converted)} by {how}, which no byte range does."
        yield Hit(at(match.missing[0]), what, _CONVERT)
        return
    if prefix := _prefix(match.missing, match.unexpected):
        what += f" They are there {prefix[0]}."
        yield Hit(at(match.missing[0]), what, f"Write LoadWeights(path, rename=(({prefix[1]}),)).")
        return
    if close := near(match.missing[0], match.unexpected):
        what += f" It has `{close[0]}`."
    yield Hit(at(match.missing[0]), what)


_CONVERT = (
    "Let the library load them on rank 0 and write weights=SendWeights(); or save a file with the model's own keys, "
    "safetensors.torch.save_model(model, path), and load that."
)


def _more(keys: tuple[object, ...]) -> str:
    return f" and {count(len(keys) - 1, 'more tensor')}" if len(keys) > 1 else ""


def _prefix(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> tuple[str, str] | None:
    """How the names differ, where all of them do alike, and the renaming that mends it."""
    keys = set(unexpected)
    for key in unexpected:
        if key.endswith(f".{missing[0]}"):
            more = key.removesuffix(missing[0])
            if all(f"{more}{name}" in keys for name in missing):
                return f"under `{more}`", f'"^{re.escape(more)}", ""'
        if missing[0].endswith(f".{key}"):
            less = missing[0].removesuffix(key)
            if all(name.startswith(less) and name.removeprefix(less) in keys for name in missing):
                return f"without `{less}`", f'"^", "{less}"'
    return None


def _unexpected(resolved: Resolved) -> Iterator[Hit]:
    if (match := _readable_match(resolved)) is not None and (keys := match.unexpected):
        what = f"The checkpoint has {count(len(keys), 'tensor')} that the model does not have: {some(keys)}."
        yield Hit(f"checkpoint.{keys[0]}", what)


def _shape(resolved: Resolved) -> Iterator[Hit]:
    if (match := resolved.values.match) is None:
        return
    shapes = _shapes(resolved.facts.model)
    wrong = [tensor for tensor in match.assembled if not tensor.recipe and tensor.shape != shapes[tensor.name]]
    for tensor in wrong[:5]:
        shape, wanted = list(tensor.shape), list(shapes[tensor.name])
        yield Hit(at(tensor.name), f"`{tensor.stored[0].key}` in the checkpoint is {shape}, the model's is {wanted}.")
    if len(wrong) > 5:
        yield Hit("model", f"{count(len(wrong) - 5, 'more tensor')} of the checkpoint have another shape.")


def _shapes(model: ModelFacts) -> dict[str, tuple[int, ...]]:
    return {param.name: param.shape for param in model.params} | {buffer.name: buffer.shape for buffer in model.buffers}


def _parts(resolved: Resolved) -> Iterator[Hit]:
    if (match := _readable_match(resolved)) is None:
        return
    shapes = _shapes(resolved.facts.model)
    joined = (tensor for tensor in match.assembled if tensor.recipe)
    wrong = [(tensor, why) for tensor in joined if (why := _why(tensor, shapes[tensor.name]))]
    for tensor, why in wrong[:5]:
        yield Hit(at(tensor.name), f"{count(len(tensor.stored), 'tensor')} of the checkpoint do not make it up: {why}.")
    if len(wrong) > 5:
        yield Hit("model", f"The parts of {count(len(wrong) - 5, 'more tensor')} do not make it up.")


def _why(tensor: AssembledTensor, shape: tuple[int, ...]) -> str:
    """Why the parts are not the model's tensor, with the keys that are not there."""
    if tensor.wrong or tensor.shape == shape:
        return tensor.wrong
    what = f"they are {list(tensor.shape)} in all, the model's is {list(shape)}"
    stack = tensor.recipe.stack if tensor.recipe else None
    absent = lacking(tensor, shape[stack]) if stack is not None and stack < len(shape) else ()
    if absent:
        what += f"; the checkpoint lacks {some(absent)}"
    if patterns := unmatched(tensor):
        what += f"; it has nothing like {some(patterns)}"
    return what


def _dtype(resolved: Resolved) -> Iterator[Hit]:
    if (match := resolved.values.match) is None:
        return
    model = resolved.facts.model
    dtypes = {param.name: param.dtype for param in model.params} | {buf.name: buf.dtype for buf in model.buffers}
    for tensor in match.assembled:
        wanted, stored = dtypes[tensor.name], tensor.stored[0]
        if stored.dtype != wanted and not {stored.dtype, wanted} <= _CASTS:
            what = f"`{stored.key}` in the checkpoint is {stored.dtype}, the model's is {wanted}: not to be cast."
            yield Hit(at(tensor.name), what)


def _twice(resolved: Resolved) -> Iterator[Hit]:
    for read, left in resolved.values.match.tied_twice if resolved.values.match else ():
        yield Hit(at(left), f"`{left}` and `{read}` are one parameter, and the checkpoint has both: `{read}` is read.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="weights.rename",
        summary="Renaming is by regular expressions, and gives no name to two tensors.",
        check=_rename,
        fix="Mend the pair in config.weights.rename, or leave it out.",
        overridable=False,
        source=("pain 10",),
    ),
    Rule(
        id="weights.missing-keys",
        summary="The checkpoint has every parameter and persistent buffer of the model.",
        check=_missing,
        fix='Load the checkpoint of this model, or write overrides=("weights.missing-keys",), which '
        "initialises what it lacks by its own reset_parameters or _init_weights. Where the model's library converts "
        "the files as it loads them, load them on rank 0 and write weights=SendWeights().",
        source=("G-62", "pain 10"),
    ),
    Rule(
        id="weights.unexpected-keys",
        summary="The model has every tensor of the checkpoint.",
        check=_unexpected,
        fix='Load the checkpoint of this model, or write overrides=("weights.unexpected-keys",), which skips them.',
        source=("G-62",),
    ),
    Rule(
        id="weights.shape",
        summary="Every tensor of the checkpoint has the shape that the model gives it.",
        check=_shape,
        fix="Build the model with the config that the checkpoint was saved with.",
        overridable=False,
        source=("G-62",),
    ),
    Rule(
        id="weights.parts",
        summary="What a checkpoint holds in parts makes up the model's tensors.",
        check=_parts,
        fix="Restore the files that hold the parts, or build the model with the config that they were saved with.",
        overridable=False,
        source=("G-62", "transformers core_model_loading.py"),
    ),
    Rule(
        id="weights.dtype",
        summary="Every tensor of the checkpoint has the model's dtype, or both are floating-point and are cast.",
        check=_dtype,
        fix="Build the model in the dtype of the checkpoint.",
        overridable=False,
        source=("G-62", "pain 17"),
    ),
    Rule(
        id="weights.tied-twice",
        summary="A checkpoint holds tied parameters once.",
        check=_twice,
        fix="Untie them in the model's config if their values differ.",
        severity=Severity.WARNING,
        source=("pain 10",),
    ),
)
"""Reporting order: names, then shapes, then values."""
