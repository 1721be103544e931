"""The machine, the processes and the environment; or those of a cluster that is not here."""

from __future__ import annotations

import re
import sys

from attrs import field, frozen

_UNITS = {
    "": 1,
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
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size in bytes; write a number with a unit, such as '80GiB' or '512MB'")
    return int(float(match.group(1)) * unit)


@frozen(kw_only=True)
class Env:
    """The environment that the plan is for: observed here, or declared for a cluster that is not here."""

    world_size: int = 1
    """Number of processes, all nodes together."""
    per_node: int | None = None
    """Processes on one node; None: not known."""
    device: str = "cpu"
    """Device type of the accelerator, or ``cpu``."""
    memory: int | None = None
    """Bytes of one device; None: not known."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None: not CUDA, or not known."""
    bf16: bool | None = None
    """Whether the device computes in bfloat16; None: not known."""
    torch: str = ""
    """torch version; empty: not known."""
    python: str = ""
    """Python version; empty: not known."""
    libraries: tuple[tuple[str, str], ...] = ()
    """Versions of the optional libraries that are installed, sorted by name."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables that change what torch, transformers or a launcher do, sorted by name (pain 25)."""
    assumed: tuple[str, ...] = field(default=())
    """Names of the fields that were declared and not seen."""

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor number of torch; one that is not known passes for newer than any.

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
        capability: tuple[int, int] | None = None,
        bf16: bool | None = None,
        torch: str = "",
        libraries: tuple[tuple[str, str], ...] = (),
    ) -> Env:
        """Facts of a cluster that is not here. Every field that is given is marked as assumed.

        Without ``libraries``, which of them are installed there is not known.

        >>> Env.declare(world_size=512, per_node=8, memory="80GiB").memory
        85899345920
        """
        given = {
            "world_size": world_size,
            "device": device,
            "per_node": per_node,
            "memory": None if memory is None else parse_bytes(memory),
            "capability": capability,
            "bf16": bf16,
            "torch": torch,
            "libraries": libraries,
        }
        said = {name: value for name, value in given.items() if value not in (None, "", ())}
        return cls(**said, assumed=tuple(sorted(said)))  # type: ignore[arg-type]  # values checked by the signature
