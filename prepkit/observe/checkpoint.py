"""A checkpoint as facts: where its files are and what their headers say. Reads headers, and no tensor."""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import define, evolve, field
from torch import nn

from prepkit.codec import LARGEST
from prepkit.codec.text import read_bytes
from prepkit.config import LoadWeights
from prepkit.facts import ModelFacts
from prepkit.facts.checkpoint import (
    CheckpointFacts,
    KeyMapping,
    StoredFile,
    StoredProblem,
    StoredTensor,
    WeightConverter,
)
from prepkit.objects.safetensors_header import (
    PREFIX,
    HeaderError,
    header_digest,
    header_size,
    is_unicode,
    parse_header,
)
from prepkit.resolve.checkpoint import renamed, unreadable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""What ``save_pretrained`` of transformers writes: one file, or several and an index of them."""


def observe_checkpoint(path: str) -> CheckpointFacts:
    """Facts of the checkpoint at ``path``: a file, an index, or a folder that holds one of them.

    Never raises over what is there: what is missing, damaged or truncated is in ``problems``.
    """
    try:
        place = _found(Path(path))
        index = _index(place) if place.name.endswith(".json") else None
    except (OSError, ValueError) as error:
        problem = StoredProblem(file=Path(path).name, what=_said(error))
        return CheckpointFacts(path=path, folder=str(Path(path).parent), problems=(problem,))
    files: list[StoredFile] = []
    tensors: list[StoredTensor] = []
    problems: list[StoredProblem] = []
    for name in [place.name] if index is None else sorted(set(index.values())):
        try:
            file, held, end = _read(place.parent / name, len(files))
        except (OSError, ValueError) as error:
            problems.append(StoredProblem(file=name, what=_said(error)))
            continue
        files.append(file)
        tensors.extend(held)
        problems.extend(_sizes(file, held, end))
    problems.extend(_misplaced(index or {}, files, tensors))
    return CheckpointFacts(
        path=path, folder=str(place.parent), files=tuple(files), tensors=tuple(tensors), problems=tuple(problems)
    )


def head(path: str | Path) -> bytes:
    """The first bytes of a safetensors file, up to its first tensor. Raises ``OSError`` and ``HeaderError``."""
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise HeaderError("it is no regular file; give the path of a file")  # one that waits for a writer among them
    with Path(path).open("rb") as file:
        prefix = file.read(PREFIX)
        return prefix + file.read(header_size(prefix))


def _found(path: Path) -> Path:
    if not path.is_dir():
        return path
    if (path / INDEX).exists():
        return path / INDEX
    if (path / SINGLE).exists():
        return path / SINGLE
    there = sorted(file.name for file in path.glob("*.safetensors"))
    if len(there) == 1:
        return path / there[0]
    what = f"holds neither {INDEX} nor {SINGLE}" + (f", but {', '.join(there[:3])}" if there else "")
    raise HeaderError(f"the folder {what}; name the file or the index")


def _index(path: Path) -> dict[str, str]:
    """Key to file name, as the index gives them."""
    try:
        data: Any = json.loads(read_bytes(path, LARGEST))
    except ValueError:
        raise HeaderError("it is no JSON; restore the index") from None
    except RecursionError:
        raise HeaderError("its JSON is nested too deeply for an index; restore the index") from None
    match data:
        case {"weight_map": dict(names)} if names and all(_plain(name) for name in names.values()):
            if odd := next((text for pair in names.items() for text in pair if not is_unicode(text)), None):
                raise HeaderError(f"it has the name {odd!a}, which is no Unicode text; restore the index")
            return {str(key): str(name) for key, name in names.items()}
    raise HeaderError("it has no `weight_map` from tensors to file names; restore the index")


def _plain(name: object) -> bool:
    """True if it is a file in the index's own folder: an index must not point anywhere else."""
    return isinstance(name, str) and Path(name).name == name


def _read(path: Path, index: int) -> tuple[StoredFile, tuple[StoredTensor, ...], int]:
    first = head(path)
    header = parse_header(first, index)
    file = StoredFile(name=path.name, size=path.stat().st_size, header=header_digest(first), data=header.data)
    return file, header.tensors, header.end


def _sizes(file: StoredFile, tensors: tuple[StoredTensor, ...], end: int) -> Iterator[StoredProblem]:
    if file.size < end:
        cut = next(tensor.key for tensor in tensors if tensor.start + tensor.length > file.size)
        what = f"truncated: it has {file.size:,} bytes of {end:,}, and ends inside or before `{cut}`"
        yield StoredProblem(file=file.name, what=what)
    elif file.size > end:
        yield StoredProblem(
            file=file.name, what=f"has {file.size:,} bytes, {file.size - end:,} more than its header says"
        )


def _misplaced(index: dict[str, str], files: list[StoredFile], tensors: list[StoredTensor]) -> Iterator[StoredProblem]:
    """Where index and headers differ, and tensors that are there twice."""
    there: dict[str, str] = {}
    for tensor in tensors:
        name = files[tensor.file].name
        if tensor.key in there:
            yield StoredProblem(file=name, what=f"holds `{tensor.key}`, which {there[tensor.key]} holds too")
        there.setdefault(tensor.key, name)
    read = {file.name for file in files}
    for key, name in index.items():
        if name in read and there.get(key) != name:
            where = there.get(key, "no file")
            yield StoredProblem(file=name, what=f"does not hold `{key}`, as the index says; {where} does")


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    if isinstance(error, HeaderError):
        return str(error)
    return f"cannot be read: no file can have this name ({error})"  # a NUL, or a character that no byte stands for


# --- where tensors of a checkpoint belong in a model of transformers ---
#
# From version 5 on transformers saves many models under other names than they have, or in parts, and maps the files to
# the model when ``from_pretrained`` loads them. The library itself is asked for that mapping, as data; what follows
# does with it what ``convert_and_load_state_dict_in_model`` (``core_model_loading.py``) does, key by key. For older
# versions, and for models of other libraries, nothing is mapped.

STACKS, JOINS = "MergeModulelist", "Concatenate"
"""The operations of transformers (``torch.stack``, ``torch.cat``) that make every byte of a file one of the model."""


def mapped(found: CheckpointFacts, how: LoadWeights, model: nn.Module, facts: ModelFacts) -> CheckpointFacts:
    """The checkpoint with the place of every tensor that belongs to another name than its own, or is a part.

    The renaming that was asked for comes first, and names of the model that it gives stay. A checkpoint that holds
    nothing but the model's own names is left as it is.
    """
    if unreadable(how):
        return found
    found = evolve(found, rename=how.rename)
    names = _names(facts)
    keys = {tensor.key: renamed(how, tensor.key) for tensor in found.tensors}
    if all(key in names for key in keys.values()) or not _maps(model):
        return found
    asked_for = {old for old, new in keys.items() if old != new and new in names}
    mapping = _mapping(model, names)
    places = mapping.places({old: new for old, new in keys.items() if old not in asked_for})
    tensors = tuple(evolve(tensor, place=places.get(tensor.key)) for tensor in found.tensors)
    return evolve(found, tensors=tensors, recipes=tuple(mapping.recipes))


def _names(facts: ModelFacts) -> dict[str, bool]:
    """The keys of the model's state dict."""
    tied = (name for group in facts.ties for name in group)
    kept = (buffer.name for buffer in facts.buffers if buffer.persistent)
    return dict.fromkeys((*(param.name for param in facts.params), *kept, *tied), True)


def _maps(model: nn.Module) -> bool:
    """True if the model's class is one of transformers', in a version that maps what it loads."""
    known = any(
        cls.__module__ == "transformers.modeling_utils" and cls.__name__ == "PreTrainedModel"
        for cls in type(model).__mro__
    )
    return known and find_spec("transformers.conversion_mapping") is not None


@define
class _Mapping:
    """What transformers does with each key of a checkpoint."""

    model: Any
    names: dict[str, bool]
    renamings: list[Any]
    converters: list[Any]
    owners: dict[str, Any]
    """Pattern to the converter that takes its keys."""
    recipes: list[WeightConverter] = field(factory=list)
    known: dict[int, int] = field(factory=dict)
    """Identity of a converter to the index of its recipe."""

    def places(self, keys: dict[str, str]) -> dict[str, KeyMapping]:
        """Key of the file, with what it was renamed to, to its place; the order of the keys counts in stacks."""
        from transformers.core_model_loading import dot_natural_key

        taken: Counter[tuple[str, int, int]] = Counter()
        found: dict[str, KeyMapping] = {}
        for old, key in sorted(keys.items(), key=lambda pair: dot_natural_key(pair[1])):
            name, pattern = self._renamed(key)
            place = self._place(key, name, pattern)
            if place is not None:
                slot = (place.name, -1 if place.recipe is None else place.recipe, place.source)
                found[old] = evolve(place, number=0 if place.recipe is None else taken[slot])
                taken[slot] += 1
        return found

    def _renamed(self, key: str) -> tuple[str, str | None]:
        """The model's name for a key, and the pattern of the converter that takes it."""
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        name, pattern = rename_source_key(key, self.renamings, self.converters, prefix, self.names)
        if name not in self.names and key in self.names:
            name, pattern = rename_source_key(key, [], [], prefix, self.names)
        return name, pattern

    def _place(self, key: str, name: str, pattern: str | None) -> KeyMapping | None:
        if name not in self.names or (pattern is None and name == key):
            return None
        if pattern is None:
            return KeyMapping(name=name)
        converter = self.owners[pattern]
        index = self.known.setdefault(id(converter), len(self.recipes))
        if index == len(self.recipes):
            self.recipes.append(_recipe(converter))
        if self.recipes[index].others and name == key:
            return None  # it is the model's own; whether it has to be converted its shape shows
        return KeyMapping(name=name, recipe=index, source=list(converter.source_patterns).index(pattern))


def _mapping(model: Any, names: dict[str, bool]) -> _Mapping:
    """The library's own list, which it makes anew for every call, so that nothing of the model is changed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    made = get_model_conversion_mapping(model)
    converters = [one for one in made if isinstance(one, WeightConverter)]
    return _Mapping(
        model=model,
        names=names,
        renamings=[one for one in made if isinstance(one, WeightRenaming)],
        converters=converters,
        owners={pattern: one for one in converters for pattern in one.source_patterns},
    )


def _recipe(converter: Any) -> WeightConverter:
    """A converter as data; one that does more than stack and join says what."""
    sources = tuple(converter.source_patterns)
    kinds = tuple(type(one).__name__ for one in converter.operations)
    merges = kinds == (STACKS,) and len(sources) == 1
    if len(converter.target_patterns) > 1 or not (merges or kinds in ((JOINS,), (STACKS, JOINS))):
        return WeightConverter(sources=sources, others=tuple(repr(one) for one in converter.operations))
    dims = {kind: one.dim for kind, one in zip(kinds, converter.operations, strict=True)}
    if min(dims.values()) < 0:  # counted from the end, which is another dim before stacking than after
        return WeightConverter(sources=sources, others=tuple(repr(one) for one in converter.operations))
    return WeightConverter(sources=sources, stack=dims.get(STACKS), join=dims.get(JOINS))
