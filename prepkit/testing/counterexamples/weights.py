"""A checkpoint that fits a model, as facts, and the ways in which one can fail to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from attrs import evolve

from prepkit.config import FSDP2, XLA, Config, InitWeights, KeepLoaders, LoadWeights, SendWeights
from prepkit.facts import BufferFact, Facts, ModelFacts, ParamFact
from prepkit.facts.checkpoint import (
    CheckpointFacts,
    KeyMapping,
    StoredFile,
    StoredProblem,
    StoredTensor,
    WeightConverter,
)
from prepkit.plan.dtypes import itemsize

PATH = "checkpoint"


def tiny_checkpoint(
    model: ModelFacts, *, drop: tuple[str, ...] = (), files: int = 1, path: str = PATH
) -> CheckpointFacts:
    """A checkpoint with every parameter and persistent buffer of the model but those in ``drop``."""
    buffers = [buffer for buffer in model.buffers if buffer.persistent]
    stored: list[ParamFact | BufferFact] = [*model.params, *buffers]
    tensors: list[StoredTensor] = []
    ends = [100] * files
    for index, tensor in enumerate(stored):
        if tensor.name not in drop:
            file = index % files
            length = prod(tensor.shape) * itemsize(tensor.dtype)
            tensors.append(
                StoredTensor(
                    key=tensor.name, dtype=tensor.dtype, shape=tensor.shape, file=file, start=ends[file], length=length
                )
            )
            ends[file] += length
    return CheckpointFacts(
        path=path,
        folder=PATH,
        files=tuple(
            StoredFile(name=f"model-{index}.safetensors", size=end, header="sha256:0", data=100)
            for index, end in enumerate(ends)
        ),
        tensors=tuple(sorted(tensors, key=lambda tensor: (tensor.file, tensor.start))),
    )


def in_parts(checkpoint: CheckpointFacts) -> CheckpointFacts:
    """The same with its first tensor of two dims in rows to be stacked, the next in two to be joined, or renamed.

    A tensor without rows, and one of a single row, stay as they are, but for their names.
    """
    wide = [tensor for tensor in checkpoint.tensors if len(tensor.shape) == 2][:2]
    tensors: list[StoredTensor] = []
    for tensor in checkpoint.tensors:
        if tensor in wide and tensor.shape[0] > 1:
            tensors.extend(_rows(tensor, wide.index(tensor)))
        elif tensor in wide:
            tensors.append(evolve(tensor, key=f"old.{tensor.key}", place=KeyMapping(name=tensor.key)))
        else:
            tensors.append(tensor)
    recipes = (WeightConverter(sources=("rows.*",), stack=0), WeightConverter(sources=("top", "rest"), join=0))
    return evolve(checkpoint, tensors=tuple(tensors), recipes=recipes)


def _rows(tensor: StoredTensor, recipe: int) -> Iterator[StoredTensor]:
    """The rows of a tensor: each by itself, or the first and the rest of them."""
    rows, row = tensor.shape[0], tensor.length // tensor.shape[0]
    stacked = recipe == 0
    for index, (first, last) in enumerate([(n, n + 1) for n in range(rows)] if stacked else [(0, 1), (1, rows)]):
        place = KeyMapping(
            name=tensor.key, recipe=recipe, source=0 if stacked else index, number=index if stacked else 0
        )
        yield evolve(
            tensor,
            key=f"{tensor.key}.{index}",
            shape=tensor.shape[1:] if stacked else (last - first, *tensor.shape[1:]),
            start=tensor.start + first * row,
            length=(last - first) * row,
            place=place,
        )


def _lacking_a_row(facts: Facts) -> tuple[Config, Facts]:
    whole = in_parts(tiny_checkpoint(facts.model))
    return _load(
        facts, evolve(whole, tensors=tuple(tensor for tensor in whole.tensors if tensor.key != "embed.weight.1"))
    )


def _load(facts: Facts, checkpoint: CheckpointFacts | None) -> tuple[Config, Facts]:
    return Config(weights=LoadWeights(PATH)), evolve(facts, checkpoint=checkpoint)


def _changed(facts: Facts, name: str, **changes: Any) -> tuple[Config, Facts]:
    """Another tensor under this name."""
    whole = tiny_checkpoint(facts.model)
    tensors = (evolve(tensor, **changes) if tensor.key == name else tensor for tensor in whole.tensors)
    return _load(facts, evolve(whole, tensors=tuple(tensors)))


def _more(facts: Facts, key: str) -> Facts:
    """Facts of a checkpoint that holds a tensor a second time, under its key with a prefix."""
    whole = tiny_checkpoint(facts.model)
    again = tuple(evolve(tensor, key=key) for tensor in whole.tensors if key.endswith(f".{tensor.key}"))
    return evolve(facts, checkpoint=evolve(whole, tensors=whole.tensors + again))


def _damaged(facts: Facts) -> tuple[Config, Facts]:
    problem = StoredProblem(file="model-0.safetensors", what="truncated: it has 90 bytes of 740")
    return _load(facts, evolve(tiny_checkpoint(facts.model), problems=(problem,)))


def _both(facts: Facts) -> tuple[Config, Facts]:
    model = facts.model
    whole = tiny_checkpoint(model)
    tied = evolve(
        model,
        params=tuple(param for param in model.params if param.name != "head.weight"),
        ties=(("embed.weight", "head.weight"),),
    )
    return _load(evolve(facts, model=tied, optimizer=None), whole)


def _without_resets(facts: Facts) -> Facts:
    classes = tuple(evolve(cls, resets=False) for cls in facts.model.classes)
    return evolve(facts, model=evolve(facts.model, classes=classes))


def _stepped(facts: Facts) -> tuple[Config, Facts]:
    assert facts.optimizer is not None, "healthy facts have one"
    optimizer = evolve(facts.optimizer, stateful=("norm.weight",))
    return Config(engine=FSDP2(), weights=SendWeights()), evolve(facts, optimizer=optimizer)


COUNTEREXAMPLES: dict[str, Callable[[Facts], tuple[Config, Facts]]] = {
    "weights.not-filled": lambda facts: (
        Config(engine=XLA(), weights=InitWeights(), loaders=KeepLoaders()),
        evolve(facts, env=evolve(facts.env, libraries=(("torch_xla", "2.9.0"),))),
    ),
    "weights.state-not-sent": _stepped,
    "weights.not-seen": lambda facts: _load(facts, None),
    "weights.unreadable": _damaged,
    "weights.rename": lambda facts: (
        Config(weights=LoadWeights(PATH, rename=(("^old[.]", ""),))),
        _more(facts, "old.norm.weight"),
    ),
    "weights.missing-keys": lambda facts: _load(facts, tiny_checkpoint(facts.model, drop=("norm.weight",))),
    "weights.unexpected-keys": lambda facts: (Config(weights=LoadWeights(PATH)), _more(facts, "old.norm.weight")),
    "weights.shape": lambda facts: _changed(facts, "norm.weight", shape=(8,), length=32),
    "weights.parts": _lacking_a_row,
    "weights.dtype": lambda facts: _changed(facts, "norm.weight", dtype="int8", length=4),
    "weights.tied-twice": _both,
    "weights.no-initialiser": lambda facts: (Config(weights=InitWeights()), _without_resets(facts)),
    "weights.buffer-not-computed": lambda facts: (Config(weights=InitWeights()), facts),
}
"""Rule id to a pair on which it fires, made from healthy facts."""
