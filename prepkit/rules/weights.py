"""Sources of the parameters' values: a checkpoint whose tensors fit the model, or initialisers that the model has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prepkit.config import FP8, BroadcastWeights, LoadWeights, TorchAO
from prepkit.facts import ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, near, some
from prepkit.resolve.checkpoint import (
    AssembledTensor,
    CheckpointMatch,
    lacking,
    unmatched,
    unreadable,
    without_initializer,
)
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Moment, Rule

_FLOAT8 = "FP8(backend=TorchAO()), whose layers keep the weights as they are"


def _unfilled(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if cfg.weights is None:
        return
    asked_for, name = f"`{type(cfg.weights).__name__}`", type(cfg.engine).__name__
    if isinstance(cfg.weights, BroadcastWeights) and resolved.one_process:
        what = f"{asked_for} with {name}, where there is no other rank to send to."
        yield Hit("config.weights", what, "Leave config.weights out: the model keeps its values.")
    elif not resolved.engine_traits.gives_values:
        yield Hit("config.weights", f"{asked_for} with {name}, which takes the values that the model has.")
    if isinstance(cfg.precision, FP8) and not isinstance(cfg.precision.backend, TorchAO):
        library = type(cfg.precision.backend).__name__
        what = f"{asked_for} with {library}, whose layers are made from the values that are there."
        yield Hit("config.weights", what, f"Give the model its values, and leave config.weights out; or use {_FLOAT8}.")
    if resolved.engine_traits.own_layout:
        if divided := [param.name for param in facts.model.params if param.cls == "ZeroParameter"]:
            what = f"{asked_for} for {count(len(divided), 'parameter')} that zero.Init has divided already."
            yield Hit(at(divided[0]), what, f"Build the model with torch.device('meta') in its place; or {_KEEP}.")
        for what, fix in _deepspeed_parts(resolved):
            yield Hit("config.weights", f"{asked_for} with {what}", f"{fix}; or {_GIVE}.")
    if facts.model.quantised:
        yield Hit("config.weights", f"{asked_for} for a {facts.model.quantised} model, whose values are packed.")
    elif len(facts.model.device_map) > 1:
        yield Hit("config.weights", f"{asked_for} for a model that a device map has spread over several devices.")


_KEEP = "leave config.weights out, and load what is divided with the library that divided it"
_GIVE = "give the model its values, and leave config.weights out"


def _deepspeed_parts(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """Layouts of DeepSpeed's whose parts are made from values that are there, with what to write instead."""
    config = resolved.deepspeed
    if resolved.axis_size("tensor") > 1:
        yield "`tensor_parallel`, which cuts the values that the layers have.", "Remove `tensor_parallel`"
    if config.stage != 3:
        return
    said = {".".join(setting.path).removeprefix("zero_optimization."): setting.value for setting in config.settings}
    if said.get("offload_param.device") == '"nvme"':
        yield "parameters on NVMe, where DeepSpeed writes the values that they have.", 'Write offload_param="cpu"'
    if said.get("zero_hpz_partition_size", "1") not in ("0", "1"):
        yield (
            "`zero_hpz_partition_size`, a second copy of the values that are there.",
            _remove("zero_hpz_partition_size"),
        )
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if said.get(key) == "true":
            yield f"`{key}`, which quantises the values that are there.", _remove(key)


def _remove(key: str) -> str:
    return f"Remove `zero_optimization.{key}`"


def _state(resolved: Resolved) -> Iterator[Hit]:
    optimizer = resolved.facts.optimizer
    if isinstance(resolved.cfg.weights, BroadcastWeights) and optimizer is not None and optimizer.stateful:
        what = "`BroadcastWeights` sends what the model holds; the optimizer's state of"
        yield Hit("optimizer", f"{what} {some(optimizer.stateful)} is not sent.")


def _unseen(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if isinstance(resolved.cfg.weights, LoadWeights) and resolved.values.checkpoint is None:
        seen = f"the facts are about `{facts.checkpoint.path}`" if facts.checkpoint else "the facts hold no checkpoint"
        yield Hit("config.weights.path", f"`{resolved.cfg.weights.path}` is to be loaded, but {seen}.")


def _unreadable(resolved: Resolved) -> Iterator[Hit]:
    if (checkpoint := resolved.values.checkpoint) is not None:
        for problem in checkpoint.problems:
            yield Hit(f"checkpoint.{problem.file}", f"`{problem.file}` in `{checkpoint.folder}`: {problem.what}.")


def _uninitialized(resolved: Resolved) -> Iterator[Hit]:
    names = without_initializer(resolved.facts.model, resolved.values.initialized_params)
    if names:
        what = f"Nothing initialises {count(len(names), 'parameter')}: {some(names)}. "
        yield Hit(
            at(names[0]), what + "Their modules have no reset_parameters(), and nothing above has _init_weights()."
        )


def _buffers(resolved: Resolved) -> Iterator[Hit]:
    names = without_initializer(resolved.facts.model, resolved.values.computed_buffers)
    if names:
        what = f"Nothing computes {count(len(names), 'buffer')} that no checkpoint holds: {some(names)}."
        yield Hit(at(names[0]), what + " Where they are on meta, apply refuses the model.")


# --- checkpoints against the model -----------------------------------------------------------------------------------


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
    "Let the library load them on rank 0 and write weights=BroadcastWeights(); or save a file with the model's own "
    "keys, safetensors.torch.save_model(model, path), and load that."
)


def _more(keys: tuple[object, ...]) -> str:
    return f" and {count(len(keys) - 1, 'more tensor')}" if len(keys) > 1 else ""


def _prefix(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> tuple[str, str] | None:
    """Return how the names differ, where all of them do alike, and the renaming that mends it."""
    keys = set(unexpected)
    for key in unexpected:
        if key.endswith(f".{missing[0]}"):
            more = key.removesuffix(missing[0])
            if all(f"{more}{name}" in keys for name in missing):
                return f"under `{more}`", f'"^{re.escape(more)}", ""'
        if missing[0].endswith(f".{key}"):
            less = missing[0].removesuffix(key)
            if all(name.removeprefix(less) in keys for name in missing):  # none of them is a key itself
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
        id="weights.not-filled",
        summary="Values are given to plain models, by engines that fill them shard by shard or whole.",
        check=_unfilled,
        fix="Give the model its values before it is prepared, and leave config.weights out; or use FSDP2, "
        "FSDP1, TensorParallel, DDP, DeepSpeed or Single.",
        overridable=False,
        source=("M2-13", "PL-3", "Q-13"),
    ),
    Rule(
        id="weights.state-not-sent",
        summary="An optimizer has no state yet where rank 0 sends the weights.",
        check=_state,
        fix="Write optimizer=AdamW(...), which is created after sharding, or pass an optimizer that has not stepped; a "
        "run that goes on is resumed with ready.resume(folder).",
        overridable=False,
        source=("M2-13", "P2-14"),
    ),
    Rule(
        id="weights.not-seen",
        summary="The checkpoint that is to be loaded is in the facts.",
        check=_unseen,
        fix="Plan with the model itself, which reads the headers of the files; or observe it with checkpoint=path.",
        overridable=False,
        source=("issue of weights from a checkpoint",),
    ),
    Rule(
        id="weights.unreadable",
        summary="Every file of the checkpoint is there and whole, and its index is right.",
        check=_unreadable,
        fix="Restore the file, or name another checkpoint in config.weights.",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("safetensors format",),
    ),
    Rule(
        id="weights.no-initialiser",
        summary="What is to be initialised has a reset_parameters, or an _init_weights above it.",
        check=_uninitialized,
        fix="Give the module a reset_parameters() that writes what it holds, or load the weights: LoadWeights(path).",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("G-5", "pain 17"),
    ),
    Rule(
        id="weights.buffer-not-computed",
        summary="Buffers that no checkpoint holds are computed by their module, should they be on meta.",
        check=_buffers,
        fix="Build the buffers outside torch.device('meta'), or write them in the module's reset_parameters().",
        severity=Severity.WARNING,
        source=("pain 17", "H-18"),
    ),
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
        "the files as it loads them, load them on rank 0 and write weights=BroadcastWeights().",
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
