"""Which tensors of a checkpoint become which tensor of the model, and what a model can initialize by itself.

Arithmetic on facts that rules and planner share, linear in the number of tensors. A checkpoint has *keys*, the model
has *names*: ``rename`` of ``LoadWeights`` turns keys into names. Where the model's library stores a tensor in several
parts, a ``KeyMapping`` says which name a key is a part of, and a ``WeightConverter`` how the parts are joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import evolve, frozen

from prepkit.config import Config, InitWeights, LoadWeights
from prepkit.facts import Facts, ModelFacts
from prepkit.facts.checkpoint import CheckpointFacts, StoredTensor, WeightConverter
from prepkit.resolve.checkpoint_parts import AssembledTensor, assemble
from prepkit.resolve.expression_cost import cost
from prepkit.resolve.modules import parent

LONGEST_NAME = 300
"""Characters of a name that ``rename`` still looks at; those of models have a hundred or two."""


@frozen(kw_only=True)
class CheckpointMatch:
    """A checkpoint held against a model."""

    assembled: tuple[AssembledTensor, ...]
    """What each parameter and persistent buffer is read from; a tied one under its first name."""
    missing: tuple[str, ...]
    """Names that the checkpoint has under none of their ties."""
    unexpected: tuple[str, ...]
    """Keys that are no parameter, no buffer and no tie of the model, nor a part of one."""
    tied_twice: tuple[tuple[str, str], ...]
    """Of tied parameters that the checkpoint holds under several keys: the key that is read, and one that is not."""
    ambiguous: tuple[tuple[str, tuple[str, ...]], ...]
    """Names that several tensors stand for, each as a whole, or one as a whole and others in parts; with the keys."""
    converted: tuple[tuple[str, str], ...]
    """Keys that the model's library converts as it loads them, each with its operations: they are not read."""


def match(model: ModelFacts, checkpoint: CheckpointFacts) -> CheckpointMatch:
    """Each tensor of the model with those of the checkpoint that it is read from.

    Keys are names of the model, as in a state dict, unless a key mapping says which name they are a part of.
    """
    tensors_of = _by_name(checkpoint)
    tied = {group[0]: group for group in model.ties}
    wanted = [*(param.name for param in model.params), *(buffer.name for buffer in model.buffers if buffer.persistent)]
    assembled: dict[str, AssembledTensor] = {}
    tied_twice: list[tuple[str, str]] = []
    for name in wanted:
        keys = [key for key in tied.get(name, (name,)) if key in tensors_of]
        if keys:
            assembled[name] = _assembled(name, tensors_of[keys[0]], checkpoint.recipes)
            tied_twice.extend((keys[0], key) for key in keys[1:])
    known = {*wanted, *(buffer.name for buffer in model.buffers), *(name for group in model.ties for name in group)}
    return CheckpointMatch(
        assembled=tuple(assembled.values()),
        missing=tuple(name for name in wanted if name not in assembled),
        unexpected=tuple(t.key for name, tensors in tensors_of.items() if name not in known for t in tensors),
        tied_twice=tuple(tied_twice),
        ambiguous=tuple(
            (name, tuple(tensor.key for tensor in tensors))
            for name, tensors in tensors_of.items()
            if _is_ambiguous(tensors)
        ),
        converted=tuple(
            (tensor.key, ", ".join(converter.others))
            for tensor in checkpoint.tensors
            if (converter := _converter(tensor, checkpoint.recipes)) is not None and converter.others
        ),
    )


def _by_name(checkpoint: CheckpointFacts) -> dict[str, list[StoredTensor]]:
    """Name in the model to the tensors that stand for it; what no key mapping places stands under its key.

    So does what the library would change in a way that is not joining and stacking (``others``): it is not read.
    """
    tensors_of: dict[str, list[StoredTensor]] = {}
    for tensor in checkpoint.tensors:
        tensors_of.setdefault(_name_of(tensor, checkpoint.recipes), []).append(tensor)
    return tensors_of


def _name_of(tensor: StoredTensor, converters: tuple[WeightConverter, ...]) -> str:
    converter = _converter(tensor, converters)
    if tensor.place is None or (converter is not None and converter.others):
        return tensor.key
    return tensor.place.name


def _converter(tensor: StoredTensor, converters: tuple[WeightConverter, ...]) -> WeightConverter | None:
    """How the tensor becomes a part of another; None: it is the whole, as where a bent plan file names no converter."""
    index = None if tensor.place is None else tensor.place.recipe
    return converters[index] if index is not None and 0 <= index < len(converters) else None


def _is_ambiguous(tensors: list[StoredTensor]) -> bool:
    """Whether the tensors are more than the parts of one."""
    indices = {None if tensor.place is None else tensor.place.recipe for tensor in tensors}
    return len(tensors) > 1 and (len(indices) > 1 or None in indices)


def _assembled(name: str, tensors: list[StoredTensor], converters: tuple[WeightConverter, ...]) -> AssembledTensor:
    """From the tensors that are converted as the first one is; the others are said to be ambiguous."""
    converter = _converter(tensors[0], converters)
    return assemble(name, [tensor for tensor in tensors if _converter(tensor, converters) is converter], converter)


def requested_checkpoint(cfg: Config, facts: Facts) -> CheckpointFacts | None:
    """The checkpoint that the config loads, where it was seen, with its keys renamed as the config says.

    None where nothing is loaded, and where the facts are about another path or about no checkpoint.

    The facts may have been gathered under another ``rename``. A key mapping found then holds for the key as it was
    renamed then, so it is kept only where the config now renames the key to the same name; else the key has none.
    """
    seen, how = facts.checkpoint, cfg.weights
    if not isinstance(how, LoadWeights) or seen is None or seen.path != how.path:
        return None
    same = seen.rename == how.rename
    if unreadable(how) or (same and not how.rename):
        return seen
    tensors = []
    for tensor in seen.tensors:
        key = renamed(how, tensor.key)
        holds = same or (not seen.rename and key == tensor.key)
        tensors.append(evolve(tensor, key=key, place=tensor.place if holds else None))
    return evolve(seen, tensors=tuple(tensors))


def renamed(how: LoadWeights, key: str) -> str:
    """The name in the model that a key of the checkpoint stands for.

    A name of more than ``LONGEST_NAME`` characters is renamed no further: it is no model's, and costs without bound.

    >>> renamed(LoadWeights("x", rename=(("^policy[.]", ""), ("[.]gamma$", ".weight"))), "policy.norm.gamma")
    'norm.weight'
    """
    for pattern, replacement in how.rename:
        if len(key) > LONGEST_NAME:
            break
        key = re.sub(pattern, replacement, key)
    return key


def unreadable(how: LoadWeights) -> tuple[tuple[str, str], ...]:
    """The pairs of ``rename`` that are no regular expression and replacement, or cost too much, each with why."""
    reasons = []
    for pattern, replacement in how.rename:
        try:
            if why := cost(pattern, replacement):
                reasons.append((pattern, why))
                continue
            re.sub(f"(?:{pattern})|", replacement, "")
        except (re.error, IndexError, RecursionError, OverflowError) as error:
            reasons.append((pattern, f"no regular expression: {error}"))
    return tuple(reasons)


def initialized_params(cfg: Config, model: ModelFacts, checkpoint: CheckpointMatch | None) -> tuple[str, ...]:
    """Names of the parameters that get their values from initializers: all, those that a checkpoint lacks, or none."""
    names = tuple(param.name for param in model.params)
    if isinstance(cfg.weights, InitWeights):
        return names
    missing = set(checkpoint.missing) if checkpoint else set()
    return tuple(name for name in names if name in missing)


def computed_buffers(cfg: Config, model: ModelFacts, checkpoint: CheckpointMatch | None) -> tuple[str, ...]:
    """Names of the buffers that are in no checkpoint: where they are on meta, the model has to compute them.

    None where the model keeps its own values, or rank 0 sends them.
    """
    names = tuple(buffer.name for buffer in model.buffers)
    if isinstance(cfg.weights, InitWeights):
        return names
    if checkpoint is None:
        return ()
    read = {tensor.name for tensor in checkpoint.assembled}
    return tuple(name for name in names if name not in read)


def without_initializer(model: ModelFacts, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the tensors whose module has no ``reset_parameters``, nor an ``_init_weights`` in or above it."""
    resets = {module.path for module in model.modules if model.classes[module.cls].resets}
    inits = {module.path for module in model.modules if model.classes[module.cls].inits}
    return tuple(name for name in names if parent(name) not in resets and not _is_under(parent(name), inits))


def _is_under(path: str, roots: set[str]) -> bool:
    while path and path not in roots:
        path = parent(path)
    return path in roots
