"""How the samples of a loader are divided over ranks. Nothing is drawn from it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sized
from heapq import nsmallest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from prepkit.facts.run import Division, PreparedLoader
from prepkit.facts.window import OddSample
from prepkit.formats.models.architecture import peek
from prepkit.observe.loaders import loader_facts
from prepkit.observe.prepared.reading import digest_of, divides_itself, first_reads, generator_states, generators_kept
from prepkit.ranks.world import world

SHOWN = 64
"""Items of a list or elements of a tensor that enter the digest of a data set."""
MOST_ROWS, COLUMNS = 1 << 18, 16
"""Rows of tensors, and columns of each, by which a rank's own are known."""
OWN = 0.98
"""The part of rows that are like no other, where rows are known by what they hold."""
MIXES = -7046029254386353131
"""An odd number of 64 bits, as splitmix64 has it."""
TEXT = ("input_ids", "labels", "attention_mask")
"""What a text, its labels and its mask are called in transformers."""
ROWS = 4
"""Samples of a batch, or entries of a list, that are looked at."""
DEPTH = 3
"""Objects of a data set inside of each other."""


def prepared_loader(loader: Any, config: Any = None) -> PreparedLoader:
    """Facts of one loader of torch, accelerate or anybody; ``config``: that of the language model that it feeds."""
    division, replicas, part = _division(loader)
    data = getattr(loader, "dataset", None)
    indices, samples = first_reads(loader) if not division and world().size > 1 else ("", "")
    return PreparedLoader(
        seen=loader_facts(loader),
        division=division,
        replicas=replicas,
        part=part,
        parts=_parts(loader),
        content="" if data is None else _content(data),
        picked=_picked(data),
        held=tuple(_held(data)) if division in ("sampler", "accelerate") and replicas > 1 else (),
        sample=first_sample(data, config) if config is not None else "",
        batches=_length(loader),
        data="" if data is None else _digest(data),
        indices=indices,
        samples=samples,
        reseeds=_reseeds(data),
        weights=next((len(one.weights) for one in _chain(loader) if isinstance(one, WeightedRandomSampler)), None),
        order=_order(loader),
    )


def _held(data: Any) -> Iterator[tuple[str, str]]:
    """Yield digests of its first sample, under no name, and of numbers that it keeps; nothing where it gives others.

    Of what keeps a generator, or an order, of its own, the first sample is another each time.
    """
    try:
        if isinstance(data, IterableDataset) or not _length(data):
            return
        with generators_kept(seed=0):
            first = digest_of(data[0])
        with generators_kept(seed=0):
            again = digest_of(data[0])
    except Exception:  # code of the user that reads a sample
        return
    if first == again:
        yield "", first
        yield from ((name, digest_of(value)) for name, value in _numbers(data, type(data).__name__, DEPTH))


def _numbers(one: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield numbers and tensors that are no whole numbers, and numbers of words, by where it keeps them."""
    if isinstance(one, float) or (isinstance(one, Tensor) and one.is_floating_point() and not one.is_meta):
        yield name, one.flatten()[:SHOWN] if isinstance(one, Tensor) else one
    elif type(one) is dict and one and all(type(key) is str and type(value) is int for key, value in one.items()):
        yield name, sorted(one.items())
    elif depth and isinstance(one, list | tuple):
        for at, value in enumerate(one[:ROWS]):
            yield from _numbers(value, f"{name}[{at}]", depth - 1)
    elif depth and type(one).__module__ != "builtins" and not isinstance(one, nn.Module):
        for key, value in [*getattr(one, "__dict__", {}).items()][:SHOWN]:
            yield from _numbers(value, f"{name}.{key}", depth - 1)


def _reseeds(data: Any) -> tuple[str, ...]:
    """Return the generators that reading a sample puts into one state, whatever the sample and the state before."""
    try:
        streams = not isinstance(data, Dataset) or isinstance(data, IterableDataset)
        rows = 0 if streams else min(_length(data) or 0, 2)
        if rows < 2 or type(data).__module__.partition(".")[0] in ("torch", "datasets", "torchvision"):
            return ()
        first, second = (_left_by(data, at) for at in range(rows))
    except Exception:  # code of the user that reads a sample
        return ()
    return tuple(name for name in first if first[name] == second.get(name))


def _left_by(data: Any, at: int) -> dict[str, str]:
    """Where a sample leaves each generator, which begins in a state of its own."""
    with generators_kept(seed=1 + at):
        data[at]
        return generator_states()


def _order(loader: Any) -> tuple[int, ...]:
    """Seed and epoch of the sampler from which every rank takes its part."""
    for one in _chain(loader):
        said = (getattr(one, "seed", None), getattr(one, "epoch", 0))
        if isinstance(one, DistributedSampler) and one.shuffle and all(isinstance(value, int) for value in said):
            return int(one.seed), int(one.epoch)
    return ()


def _division(loader: Any) -> tuple[Division, int, int]:
    """Return what divides the samples, into how many parts, and which of them is read here."""
    chain = _chain(loader)
    for one in chain:
        if isinstance(one, DistributedSampler):
            return "sampler", int(one.num_replicas), int(one.rank)
    for one in chain:
        name, module = type(one).__name__, type(one).__module__
        if module.startswith("accelerate.") and hasattr(one, "num_processes") and hasattr(one, "process_index"):
            return "accelerate", int(one.num_processes), int(one.process_index)
        if name == "DataLoaderDispatcher":
            return "accelerate", 0, 0  # rank 0 reads, and sends each rank its part
        if getattr(one, "_distributed", None) is not None:  # split_dataset_by_node of datasets
            return "dataset", int(one._distributed.world_size), int(one._distributed.rank)
        replicas = getattr(one, "num_replicas", None)  # samplers of many libraries follow torch's words
        if isinstance(replicas, int) and isinstance(getattr(one, "rank", None), int):
            return "sampler", replicas, int(one.rank)
    return "", 1, 0


def _parts(loader: Any) -> int:
    """Of all that divides inside a loader that accelerate divides: the product.

    accelerate's own loaders cut a stream, or let rank 0 read it for all, whoever has split it before.
    """
    parts, chain = 1, _chain(loader)
    accelerates = any(type(one).__module__.startswith("accelerate.") and hasattr(one, "process_index") for one in chain)
    itself = any(type(one).__module__.partition(".")[0] != "accelerate" and divides_itself(one) for one in chain)
    for one in chain:
        ours = type(one).__module__.startswith("accelerate.")
        if (split := getattr(one, "_distributed", None)) is not None:
            parts *= int(split.world_size)
        elif isinstance(one, DistributedSampler) or (ours and hasattr(one, "process_index")):
            told = getattr(one, "num_replicas", None) or getattr(one, "num_processes", None)
            parts *= told if isinstance(told, int) and told > 0 else 1
        elif ours and type(one).__name__ in ("DataLoaderShard", "DataLoaderDispatcher") and not accelerates:
            cuts = any(hasattr(other, "_distributed") for other in chain)
            parts *= world().size if cuts or (itself and type(one).__name__ == "DataLoaderDispatcher") else 1
    return parts * (world().size if itself else 1)


def _content(data: Any) -> str:
    """Return which samples it has, where its kind tells; else how many."""

    def told(one: Any, depth: int) -> Any:
        match one:
            case Subset() if depth:
                return tuple(one.indices[:SHOWN]), len(one.indices), told(one.dataset, depth - 1)
            case TensorDataset():
                return [_told(tensor, 1) for tensor in one.tensors]
            case list() | tuple() | range():
                return _told(one, 2)
            case _:
                table = type(one).__module__.startswith("datasets.") and _length(one)
                return _told(one[0], 2) if table else None, _length(one)  # its own fingerprint may be random

    try:
        return hashlib.sha256(repr(told(data, 3)).encode()).hexdigest()
    except Exception:  # code of the user that reads a sample
        return ""


def overlap(alive: list[Any]) -> tuple[int, int, int]:
    """Samples of two parts of one data set that two living loaders have, and those of both; zeros: there are no two.

    Of parts where one holds the other nobody knows whether that is meant, and of more than two whether they are folds.
    """
    data = [getattr(one, "dataset", getattr(one, "_dataset", None)) for one in alive]  # a reading keeps no loader
    parts = {id(one): one for one in data if isinstance(one, Subset)}
    if len(parts) != 2 or len({id(one.dataset) for one in parts.values()}) != 1:
        return 0, 0, 0
    one, other = ({*map(int, part.indices)} for part in parts.values())
    apart = one - other and other - one
    return (len(one), len(other), len(one & other)) if apart and one & other else (0, 0, 0)


def _picked(data: Any) -> tuple[str, tuple[int, ...]]:
    """Return a digest of the data set of which it is a part, as of ``random_split``, and its least indices there.

    Of tensors that are a rank's own the least numbers that stand for its rows, which are the same for the same rows.
    """
    if isinstance(data, TensorDataset) and world().size > 1:
        return "rows", _least_rows(data.tensors)
    if not isinstance(data, Subset) or world().size == 1:
        return "", ()
    indices: Any = data.indices.tolist() if hasattr(data.indices, "tolist") else data.indices
    return _digest(data.dataset), tuple(nsmallest(SHOWN, map(int, indices)))


def _least_rows(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Nothing where there are too many rows, or some are the same."""
    if not tensors or not 0 < len(tensors[0]) <= MOST_ROWS or any(one.is_meta or one.is_complex() for one in tensors):
        return ()
    columns = [one.detach().cpu().reshape(len(one), -1) for one in tensors if one.numel()]
    some = [one[:, :: max(1, one.shape[1] // COLUMNS)][:, :COLUMNS] for one in columns]
    numbers = torch.cat([one.double() for one in some], 1).contiguous().view(torch.int64)
    mixed = torch.zeros(len(numbers), dtype=torch.int64)
    for column in numbers.unbind(1):
        mixed = (mixed ^ column ^ (column >> 29)) * MIXES  # which wraps around
        mixed = mixed ^ (mixed >> 31)
    known = sorted({*mixed.tolist()})
    return tuple(known[:SHOWN]) if len(known) > OWN * len(mixed) else ()


def language_config(module: nn.Module) -> Any:
    """The config of a causal language model of transformers, adapters around it or not; None for another model.

    Such a model shifts labels: it is called so, or gives them to transformers' own loss.
    """
    if isinstance(module, torch.jit.ScriptModule):  # whose forward is no function of Python
        return None
    base = peek(module, "base_model")
    inside = peek(base, "model") or module
    for one in (module, inside):
        name, forward = type(one).__name__, inspect.unwrap(type(one).forward)
        own = "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ())
        if name.endswith("ForCausalLM") or (own and name.endswith("LMHeadModel")):
            return peek(inside, "config")
    return None


def first_sample(data: Any, config: Any) -> OddSample:
    """Return what is wrong in the first sample of a data set for a causal language model of transformers."""
    try:
        sample: Any = data[0] if hasattr(data, "__getitem__") and len(data) else {}
        if isinstance(sample, Tensor):  # torch warns of a name as its index
            return ""
        given = {name: list(map(int, sample[name])) for name in TEXT if name in sample}
    except Exception:  # of another kind, or code of the user that fails
        return ""
    return odd_text(given, config)


def odd_batch(given: Mapping[str, Any], config: Any) -> OddSample:
    """Return what is wrong in the first samples of a batch that such a model is called with, by keyword."""
    tensors = {name: given[name] for name in TEXT if isinstance(given.get(name), Tensor) and given[name].dim() == 2}
    rows: list[dict[str, list[int]]] = [{} for _ in range(min((ROWS, *map(len, tensors.values()))))]
    for name, tensor in tensors.items():
        for row, values in zip(rows, tensor[:ROWS].tolist(), strict=False):
            row[name] = values
    return next(filter(None, (odd_text(row, config) for row in rows)), "")


def odd_text(given: Mapping[str, list[int]], config: Any) -> OddSample:
    """Return what is wrong in one text, its labels and its mask.

    Pads after the text whose labels count nothing do no harm: no token attends to what follows it.
    """
    ids, labels, mask = (given.get(name, []) for name in TEXT)
    pairs = [(label, following) for label, following in zip(labels, ids[1:], strict=False) if label >= 0]
    if len(pairs) > 2 and labels[: len(ids)] != ids and all(label == following for label, following in pairs):
        return "shifted"
    if mask:
        counted = any(label >= 0 and not seen for label, seen in zip(labels, mask, strict=False))
        return "counted" if counted else _end(ids, labels, mask, config)
    pad = getattr(config, "pad_token_id", None)
    if pad is None or len(ids) < 2 or not labels:
        return ""

    def learns(ends: slice) -> bool:
        return any(one == pad == label for one, label in zip(ids[ends], labels[ends], strict=False))

    before, behind = ids[0] == ids[1] == pad, ids[-1] == ids[-2] == pad
    if before:
        return "both" if learns(slice(0, 2)) else "unmasked"
    return "learned" if behind and learns(slice(-2, None)) else ""


def _end(ids: list[int], labels: list[int], mask: list[int], config: Any) -> OddSample:
    """Return whether what ends a text is read and not learned, though the token before it is."""
    end = getattr(config, "eos_token_id", None)
    ends = end if isinstance(end, list | tuple) else (end,)
    last = max((at for at, seen in enumerate(mask) if seen), default=0)
    known = 0 < last < min(len(ids), len(labels)) and ids[last] in ends and ids[last - 1] not in ends
    return "endless" if known and labels[last] < 0 <= labels[last - 1] else ""


def _chain(loader: Any) -> list[Any]:
    """The loader, its samplers and its data set, and what each of them keeps inside."""
    found: list[Any] = []
    waiting = [loader]
    while waiting and len(found) < 32:
        one = waiting.pop(0)
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        own = getattr(one, "__dict__", {})
        waiting += [own.get(name) for name in ("base_dataloader", "batch_sampler", "sampler", "dataset")]
    return found


def _length(loader: Any) -> int | None:
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except Exception:  # user code answers here, and a stream has no length
        return None


def _digest(data: Any) -> str:
    """What can be told of a data set without reading it: its kind, its length, and the plain values that it keeps."""
    return hashlib.sha256(repr(_told(data, 3)).encode()).hexdigest()


def _told(value: Any, depth: int) -> Any:
    match value:
        case bool() | int() | float() | str() | bytes() | None:
            return value
        case torch.Tensor():
            row = value.detach().reshape(-1)[:SHOWN]
            return (tuple(value.shape), row.tolist() if row.device.type != "meta" else "meta")
        case Subset() | TensorDataset() if depth:
            return (type(value).__name__, *(_told(one, depth - 1) for one in vars(value).values()))
        case list() | tuple() | range() if depth:
            return (len(value), *(_told(one, depth - 1) for one in (*value[:SHOWN], *value[-1:])))
        case dict() if depth:
            return tuple((str(key), _told(one, depth - 1)) for key, one in list(value.items())[:SHOWN])
        case _ if depth and hasattr(value, "__dict__"):
            kept = (value._fingerprint,) if isinstance(getattr(value, "_fingerprint", None), str) else ()
            return (type(value).__name__, *kept, _told(dict(vars(value)), depth - 1))
        case _:
            return type(value).__name__
