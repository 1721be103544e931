"""The machine, the processes and the environment; or those of a cluster that is not here."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from attrs import field, frozen

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"80GiB"``, ``"80GB"`` or a plain number. Raises ``ValueError`` on anything else."""
    match = None
    if isinstance(text, str) or (type(text) is int and 0 <= text <= _MOST_BYTES):
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else _MOST_BYTES + 1
    if size > _MOST_BYTES:
        what = f"{_shown(text)} is not a size in bytes"
        raise ValueError(f"{what}; write a number with a unit, such as '80GiB' or '512MB'")
    return size


_MOST_BYTES = 2**62
MOST_RANKS = 2**31 - 1
"""Processes of the largest job that torch can number."""


def _shown(value: object) -> str:
    """A value as a message quotes it; of a number with thousands of digits not even the first are worked out."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.60}"


Check = Callable[[Any, Any, Any], None]


def _of(described: str, fits: Callable[[Any], bool]) -> Check:
    """A validator: raises ``TypeError`` with the field, the value and what to write."""

    def check(_: object, attribute: Any, value: object) -> None:
        if not fits(value):
            raise TypeError(f"{attribute.name}={_shown(value)}: write {described}")

    return check


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _pairs(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in value
    )


_SIZE = _of("a whole number of processes, such as world_size=8", _whole(-MOST_RANKS, MOST_RANKS))
_PER_NODE = _of(
    "a whole number of at least 1, such as per_node=8, or None",
    lambda value: value is None or _whole(1, MOST_RANKS)(value),
)
_MEMORY = _of("bytes, such as memory='80GiB'", lambda value: value is None or _whole(0, _MOST_BYTES)(value))
_HOST = _of("bytes, such as host_memory='384GB'", lambda value: value is None or _whole(0, _MOST_BYTES)(value))
_CAPABILITY = _of(
    "two whole numbers, such as capability=(9, 0), or None",
    lambda value: value is None or (isinstance(value, tuple) and len(value) == 2 and all(map(_whole(0, 10**6), value))),
)
_BF16 = _of("True, False or None", lambda value: value is None or isinstance(value, bool))
_TEXT = _of("text", lambda value: isinstance(value, str))
_PAIRS = _of("pairs of texts, such as (('deepspeed', '0.19.8'),)", _pairs)


@frozen(kw_only=True)
class Env:
    """The environment that the plan is for: observed here, or declared for a cluster that is not here."""

    world_size: int = field(default=1, validator=_SIZE)
    """Number of processes, all nodes together."""
    per_node: int | None = field(default=None, validator=_PER_NODE)
    """Processes on one node; None: not known."""
    device: str = field(default="cpu", validator=_TEXT)
    """Device type of the accelerator, or ``cpu``."""
    memory: int | None = field(default=None, validator=_MEMORY)
    """Bytes of one device; None: not known."""
    host_memory: int | None = field(default=None, validator=_HOST)
    """Bytes that a node has beside its devices, as declared; None: not known. Nodes may have other sizes, so that it is
    no fact that ranks observe."""
    capability: tuple[int, int] | None = field(default=None, validator=_CAPABILITY)
    """CUDA compute capability; None: not CUDA, or not known."""
    bf16: bool | None = field(default=None, validator=_BF16)
    """Whether the device computes in bfloat16; None: not known."""
    torch: str = field(default="", validator=_TEXT)
    """torch version; empty: not known."""
    python: str = field(default="", validator=_TEXT)
    """Python version; empty: not known."""
    libraries: tuple[tuple[str, str], ...] = field(default=(), validator=_PAIRS)
    """Versions of the optional libraries that are installed, sorted by name."""
    variables: tuple[tuple[str, str], ...] = field(default=(), validator=_PAIRS)
    """Environment variables that change what torch, transformers or a launcher do, sorted by name (pain 25)."""
    assumed: tuple[str, ...] = field(default=())
    """Names of the fields that were declared and not seen."""

    @property
    def knows_release(self) -> bool:
        """Whether ``torch`` names a release."""
        return re.match(r"\d+\.\d+", self.torch) is not None

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor number of torch; one that is not known passes for newer than any.

        Where that matters the rule ``environment.torch-unknown`` says so, and ``apply`` asks again with what is there.

        >>> Env(torch="2.13.0+cpu").release < (2, 6), Env().release < (2, 6)
        (False, False)
        """
        found = re.match(r"(\d+)\.(\d+)", self.torch)
        return (int(found[1]), int(found[2])) if found else (sys.maxsize, 0)

    @classmethod
    def declare(
        cls,
        *,
        world_size: int,
        device: str = "cuda",
        per_node: int | None = None,
        memory: str | int | None = None,
        host_memory: str | int | None = None,
        capability: tuple[int, int] | None = None,
        bf16: bool | None = None,
        torch: str = "",
        libraries: tuple[tuple[str, str], ...] = (),
    ) -> Env:
        """Facts of a cluster that is not here. Every field that is given is marked as assumed.

        Without ``libraries``, which of them are installed there is not known.

        Raises ``TypeError`` for a value of another type or beyond what a cluster has, and ``ValueError`` for a size in
        bytes that is none.

        >>> Env.declare(world_size=512, per_node=8, memory="80GiB").memory
        85899345920
        """
        given = {
            "world_size": world_size,
            "device": device,
            "per_node": per_node,
            "memory": None if memory is None else parse_bytes(memory),
            "host_memory": None if host_memory is None else parse_bytes(host_memory),
            "capability": capability,
            "bf16": bf16,
            "torch": torch,
            "libraries": libraries,
        }
        if type(world_size) is int and world_size < 1:
            raise TypeError(f"world_size={_shown(world_size)}: write a whole number of at least 1")
        said = [name for name, value in given.items() if value is not None and value not in ("", ())]
        return cls(**given, assumed=tuple(sorted(said)))  # type: ignore[arg-type]  # values checked by the fields
