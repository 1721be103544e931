"""Where the parameters' values come from: a checkpoint that fits the model, or initialisers that the model has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from prepkit.config import DDP, FP8, FSDP2, Config, KeepWeights, LoadWeights, SendWeights, Single
from prepkit.facts import Facts
from prepkit.filling import asked, computed, helpless, initialised, match, unreadable
from prepkit.findings import Severity
from prepkit.rules.rule import Hit, Rule
from prepkit.rules.text import at, count, near, some

_CASTS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes that are cast into one another when they are read."""


_FILLED = (Single, DDP, FSDP2)
"""Engines whose plans give a model its values."""


def _unfilled(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if isinstance(cfg.weights, KeepWeights):
        return
    asked_for, name = f"`{type(cfg.weights).__name__}`", type(cfg.engine).__name__
    if isinstance(cfg.weights, SendWeights) and isinstance(cfg.engine, Single):
        what = f"{asked_for} with {name}, where there is no other rank to send to."
        yield Hit("config.weights", what, "Leave config.weights out: the model keeps its values.")
    elif not isinstance(cfg.engine, _FILLED):
        yield Hit("config.weights", f"{asked_for} with {name}, which takes the values that the model has.")
    if isinstance(cfg.precision, FP8):
        yield Hit("config.weights", f"{asked_for} with float8, whose layers are made from the values that are there.")
    if facts.model.quantised:
        yield Hit("config.weights", f"{asked_for} for a {facts.model.quantised} model, whose values are packed.")
    elif len(facts.model.device_map) > 1:
        yield Hit("config.weights", f"{asked_for} for a model that a device map has spread over several devices.")


def _state(cfg: Config, facts: Facts) -> Iterator[Hit]:
    held = facts.optimizer
    if isinstance(cfg.weights, SendWeights) and held is not None and held.stateful:
        what = f"`SendWeights` sends what the model holds; the optimizer's state of {some(held.stateful)} is not sent."
        yield Hit("optimizer", what)


def _unseen(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if isinstance(cfg.weights, LoadWeights) and asked(cfg, facts) is None:
        seen = f"the facts are about `{facts.checkpoint.path}`" if facts.checkpoint else "the facts hold no checkpoint"
        yield Hit("config.weights.path", f"`{cfg.weights.path}` is to be loaded, but {seen}.")


def _unreadable(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if (there := asked(cfg, facts)) is not None:
        for problem in there.problems:
            yield Hit(f"checkpoint.{problem.file}", f"`{problem.file}` in `{there.folder}`: {problem.what}.")


def _whole(cfg: Config, facts: Facts) -> bool:
    """Whether there is a checkpoint whose files can be read: else what it lacks says nothing."""
    there = asked(cfg, facts)
    return there is not None and not there.problems


def _rename(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not isinstance(cfg.weights, LoadWeights):
        return
    where = "config.weights.rename"
    for pattern, why in unreadable(cfg.weights):
        yield Hit(where, f"`{pattern}` and its replacement are no regular expression: {why}.")
    if (there := asked(cfg, facts)) is not None and not there.problems:
        twice = [key for key, times in Counter(one.key for one in there.tensors).items() if times > 1]
        if twice:
            yield Hit(where, f"Several tensors of the checkpoint are renamed to {some(twice)}.")


def _missing(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not _whole(cfg, facts) or (there := asked(cfg, facts)) is None:
        return
    found = match(facts.model, there)
    if not found.missing:
        return
    what = f"The checkpoint lacks {count(len(found.missing), 'tensor')} of the model: {some(found.missing)}."
    if prefix := _prefix(found.missing, found.unexpected):
        what += f" They are there {prefix[0]}."
        yield Hit(at(found.missing[0]), what, f"Write LoadWeights(path, rename=(({prefix[1]}),)).")
        return
    elif close := near(found.missing[0], found.unexpected, limit=1):
        what += f" It has `{close[0]}`."
    yield Hit(at(found.missing[0]), what)


def _prefix(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> tuple[str, str] | None:
    """How the names differ, where all of them do alike, and the renaming that mends it."""
    there = set(unexpected)
    for key in unexpected:
        if key.endswith(f".{missing[0]}"):
            more = key.removesuffix(missing[0])
            if all(f"{more}{name}" in there for name in missing):
                return f"under `{more}`", f'"^{re.escape(more)}", ""'
        if missing[0].endswith(f".{key}"):
            less = missing[0].removesuffix(key)
            if all(name.startswith(less) and name.removeprefix(less) in there for name in missing):
                return f"without `{less}`", f'"^", "{less}"'
    return None


def _unexpected(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if _whole(cfg, facts) and (there := asked(cfg, facts)) is not None:
        keys = match(facts.model, there).unexpected
        if keys:
            what = f"The checkpoint has {count(len(keys), 'tensor')} that the model does not have: {some(keys)}."
            yield Hit(f"checkpoint.{keys[0]}", what)


def _shape(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if (there := asked(cfg, facts)) is None:
        return
    shapes = {one.name: one.shape for one in facts.model.params} | {one.name: one.shape for one in facts.model.buffers}
    wrong = [(name, stored) for name, stored in match(facts.model, there).found if stored.shape != shapes[name]]
    for name, stored in wrong[:5]:
        what = f"`{stored.key}` in the checkpoint is {list(stored.shape)}, the model's is {list(shapes[name])}."
        yield Hit(at(name), what)
    if len(wrong) > 5:
        yield Hit("model", f"{count(len(wrong) - 5, 'more tensor')} of the checkpoint have another shape.")


def _dtype(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if (there := asked(cfg, facts)) is None:
        return
    dtypes = {one.name: one.dtype for one in facts.model.params} | {one.name: one.dtype for one in facts.model.buffers}
    for name, stored in match(facts.model, there).found:
        wanted = dtypes[name]
        if stored.dtype != wanted and not {stored.dtype, wanted} <= _CASTS:
            what = f"`{stored.key}` in the checkpoint is {stored.dtype}, the model's is {wanted}: not to be cast."
            yield Hit(at(name), what)


def _twice(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if (there := asked(cfg, facts)) is not None:
        for read, left in match(facts.model, there).twice:
            yield Hit(
                at(left), f"`{left}` and `{read}` are one parameter, and the checkpoint has both: `{read}` is read."
            )


def _helpless(cfg: Config, facts: Facts) -> Iterator[Hit]:
    names = helpless(facts.model, initialised(cfg, facts))
    if names:
        what = f"Nothing initialises {count(len(names), 'parameter')}: {some(names)}. "
        yield Hit(
            at(names[0]), what + "Their modules have no reset_parameters(), and nothing above has _init_weights()."
        )


def _buffers(cfg: Config, facts: Facts) -> Iterator[Hit]:
    names = helpless(facts.model, computed(cfg, facts))
    if names:
        what = f"Nothing computes {count(len(names), 'buffer')} that no checkpoint holds: {some(names)}."
        yield Hit(at(names[0]), what + " Where they are on meta, apply refuses the model.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="weights.not-filled",
        summary="Values are given to plain models, by engines that fill them shard by shard or whole.",
        check=_unfilled,
        fix="Give the model its values before it is prepared, and leave config.weights out; or use FSDP2, DDP or "
        "Single.",
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
        overridable=False,
        source=("safetensors format",),
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
    Rule(
        id="weights.no-initialiser",
        summary="What is to be initialised has a reset_parameters, or an _init_weights above it.",
        check=_helpless,
        fix="Give the module a reset_parameters() that writes what it holds, or load the weights: LoadWeights(path).",
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
)
"""Reporting order: whether there is a checkpoint, whether it fits, then what the model can do by itself."""
