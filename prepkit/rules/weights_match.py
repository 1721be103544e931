"""Whether the tensors of a checkpoint are those of the model: names, shapes, dtypes, and parts that make up a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prepkit.config import Config, LoadWeights
from prepkit.facts import Facts, ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, near, some
from prepkit.resolve.checkpoint import asked, match, unreadable
from prepkit.resolve.checkpoint_parts import AssembledTensor, lacking, unmatched
from prepkit.rules.rule import Hit, Rule

_CASTS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Dtypes that are cast into one another when they are read."""


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
        twice = match(facts.model, there).doubled
        if twice:
            what = f"Several tensors of the checkpoint are renamed to {some([name for name, _ in twice])}"
            if all(one.place is None for one in there.tensors):
                yield Hit(where, f"{what}.")
            else:
                fix = "Remove all but one of them from the files, or rename the one that is read."
                yield Hit(where, f"{what}, by the model's library: {some(twice[0][1])}.", fix)


def _missing(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not _whole(cfg, facts) or (there := asked(cfg, facts)) is None:
        return
    found = match(facts.model, there)
    if not found.missing:
        return
    what = f"The checkpoint lacks {count(len(found.missing), 'tensor')} of the model: {some(found.missing)}."
    if found.converted:
        key, how = found.converted[0]
        what += f" The model's library converts `{key}`{_more(found.converted)} by {how}, which no byte range does."
        yield Hit(at(found.missing[0]), what, _CONVERT)
        return
    if prefix := _prefix(found.missing, found.unexpected):
        what += f" They are there {prefix[0]}."
        yield Hit(at(found.missing[0]), what, f"Write LoadWeights(path, rename=(({prefix[1]}),)).")
        return
    if close := near(found.missing[0], found.unexpected, limit=1):
        what += f" It has `{close[0]}`."
    yield Hit(at(found.missing[0]), what)


_CONVERT = (
    "Let the library load them on rank 0 and write weights=SendWeights(); or save a file with the model's own keys, "
    "safetensors.torch.save_model(model, path), and load that."
)


def _more(keys: tuple[object, ...]) -> str:
    return f" and {count(len(keys) - 1, 'more tensor')}" if len(keys) > 1 else ""


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
    shapes = _shapes(facts.model)
    wrong = [one for one in match(facts.model, there).found if not one.recipe and one.shape != shapes[one.name]]
    for one in wrong[:5]:
        what = f"`{one.stored[0].key}` in the checkpoint is {list(one.shape)}, the model's is {list(shapes[one.name])}."
        yield Hit(at(one.name), what)
    if len(wrong) > 5:
        yield Hit("model", f"{count(len(wrong) - 5, 'more tensor')} of the checkpoint have another shape.")


def _shapes(model: ModelFacts) -> dict[str, tuple[int, ...]]:
    return {one.name: one.shape for one in model.params} | {one.name: one.shape for one in model.buffers}


def _parts(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not _whole(cfg, facts) or (there := asked(cfg, facts)) is None:
        return
    shapes = _shapes(facts.model)
    made = (one for one in match(facts.model, there).found if one.recipe)
    wrong = [(one, why) for one in made if (why := _why(one, shapes[one.name]))]
    for one, why in wrong[:5]:
        yield Hit(at(one.name), f"{count(len(one.stored), 'tensor')} of the checkpoint do not make it up: {why}.")
    if len(wrong) > 5:
        yield Hit("model", f"The parts of {count(len(wrong) - 5, 'more tensor')} do not make it up.")


def _why(made: AssembledTensor, shape: tuple[int, ...]) -> str:
    """Why the parts are not the model's tensor, with the keys that are not there."""
    if made.wrong or made.shape == shape:
        return made.wrong
    what = f"they are {list(made.shape)} in all, the model's is {list(shape)}"
    stack = made.recipe.stack if made.recipe else None
    absent = lacking(made, shape[stack]) if stack is not None and stack < len(shape) else ()
    if absent:
        what += f"; the checkpoint lacks {some(absent)}"
    if patterns := unmatched(made):
        what += f"; it has nothing like {some(patterns)}"
    return what


def _dtype(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if (there := asked(cfg, facts)) is None:
        return
    dtypes = {one.name: one.dtype for one in facts.model.params} | {one.name: one.dtype for one in facts.model.buffers}
    for one in match(facts.model, there).found:
        wanted, stored = dtypes[one.name], one.stored[0]
        if stored.dtype != wanted and not {stored.dtype, wanted} <= _CASTS:
            what = f"`{stored.key}` in the checkpoint is {stored.dtype}, the model's is {wanted}: not to be cast."
            yield Hit(at(one.name), what)


def _twice(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if (there := asked(cfg, facts)) is not None:
        for read, left in match(facts.model, there).twice:
            yield Hit(
                at(left), f"`{left}` and `{read}` are one parameter, and the checkpoint has both: `{read}` is read."
            )


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
