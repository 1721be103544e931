"""A checkpoint as facts: where its files are and what their headers say. Reads headers, and no tensor."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prepkit.codec import LARGEST
from prepkit.codec.text import read_bytes
from prepkit.facts import ModelFacts
from prepkit.facts.checkpoint import CheckpointFacts, StoredFile, StoredProblem, StoredTensor
from prepkit.formats.safetensors_header import (
    PREFIX,
    HeaderError,
    header_digest,
    header_size,
    is_unicode,
    parse_header,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""What ``save_pretrained`` of transformers writes: one file, or several and an index of them."""


def observe_checkpoint(path: str, most: int = LARGEST) -> CheckpointFacts:
    """Facts of the checkpoint at ``path``: a file, an index, or a folder that holds one of them.

    Never raises over what is there: what is missing, damaged or truncated is in ``problems``, as is a file whose header
    would make those that are read longer than ``most`` bytes together.
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
            file, held, end = _read(place.parent / name, len(files), most)
            most -= file.data
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


def head(path: str | Path, most: int = LARGEST) -> bytes:
    """The first bytes of a safetensors file, up to its first tensor. Raises ``OSError`` and ``HeaderError``."""
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise HeaderError("it is no regular file; give the path of a file")  # one that waits for a writer among them
    with Path(path).open("rb") as file:
        prefix = file.read(PREFIX)
        size = header_size(prefix)
        if size > most:
            raise HeaderError(f"its header has {size:,} bytes, and {most:,} are left to read: no model has that many")
        return prefix + file.read(size)


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


def _read(path: Path, index: int, most: int) -> tuple[StoredFile, tuple[StoredTensor, ...], int]:
    first = head(path, most)
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
    """Yield where index and headers differ, and tensors that are there twice."""
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


def state_names(facts: ModelFacts) -> dict[str, bool]:
    """The keys of the model's state dict."""
    tied = (name for group in facts.ties for name in group)
    kept = (buffer.name for buffer in facts.buffers if buffer.persistent)
    return dict.fromkeys((*(param.name for param in facts.params), *kept, *tied), True)
