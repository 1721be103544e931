"""Config files of prepkit and of others, as ``Config``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prepkit.importers.accelerate import read_accelerate
from prepkit.importers.axolotl import read_axolotl
from prepkit.importers.deepspeed import read_deepspeed
from prepkit.importers.imported import Imported
from prepkit.importers.llama_factory import read_llama_factory
from prepkit.importers.native import read_prepkit
from prepkit.importers.recognise import kind_of
from prepkit.importers.source import Source, read
from prepkit.importers.torchtitan import read_torchtitan
from prepkit.importers.training_arguments import read_training_arguments

IMPORTERS: dict[str, Callable[[Source], Imported]] = {
    "prepkit": read_prepkit,
    "accelerate": read_accelerate,
    "deepspeed": read_deepspeed,
    "axolotl": read_axolotl,
    "llamafactory": read_llama_factory,
    "torchtitan": read_torchtitan,
    "transformers": read_training_arguments,
}
"""Whose file it is to the function that understands it; each raises ``PlanRejected`` with every finding."""


def import_config(path: str | Path, kind: str | None = None) -> Imported:
    """A config file of prepkit or another library. ``kind`` None: told by the keys that the file has.

    Raises ``PlanRejected`` with every finding: a file that cannot be read, unknown keys (with a near spelling),
    values of a wrong type, keys that contradict each other, and what prepkit does not do.
    """
    source = read(str(path))
    return IMPORTERS[kind or kind_of(source)](source)
