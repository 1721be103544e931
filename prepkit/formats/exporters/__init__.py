"""A ``Config`` as a file, of prepkit or of others."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from prepkit.config import Config
from prepkit.findings import PlanRejected, Severity
from prepkit.formats.exporters.accelerate import accelerate_file
from prepkit.formats.exporters.deepspeed import deepspeed_file
from prepkit.formats.exporters.exported import WRITERS, Exported, Exporter, exported, refused
from prepkit.formats.exporters.training_arguments import training_arguments_file
from prepkit.rules import found

EXPORTERS: dict[str, tuple[Exporter, tuple[str, ...]]] = {
    "accelerate": (accelerate_file, (".yaml", ".yml", ".json")),
    "deepspeed": (deepspeed_file, (".json",)),
    "transformers": (training_arguments_file, (".yaml", ".yml", ".json")),
}
"""Whose file it becomes: what writes it, and the extensions that such a file has, the usual one first."""


def export_config(
    config: Config,
    to: str,
    path: str | Path = "",
    *,
    world_size: int | None = None,
    per_node: int | None = None,
    partial: bool = False,
) -> Exported:
    """A config as a file of ``accelerate``, ``deepspeed`` or ``transformers``; written to ``path`` where one is given.

    The text is read back with that library's importer: what does not come back as it was is named. Raises
    ``PlanRejected`` with each such setting, unless ``partial``, which leaves them to ``left_out``; and for an unknown
    ``to`` or extension, and a config that the other library would refuse. ``world_size`` and ``per_node`` are processes
    in all and on one machine, where the file has a place for them. DeepSpeed's JSON is written beside accelerate's.
    """
    if to not in EXPORTERS:
        what, fix = f"there is no exporter {to!r}", f"Write one of {', '.join(EXPORTERS)}."
        raise PlanRejected((found("export.unknown-library", "to", what, fix),))
    write, suffixes = EXPORTERS[to]
    suffix = Path(path).suffix.lower() if str(path) else suffixes[0]
    if suffix not in suffixes or suffix not in WRITERS:
        what, fix = f"{to} reads no file with that extension", f"Name it with one of {', '.join(suffixes)}."
        raise PlanRejected((found("export.unknown-extension", str(path), what, fix),))
    made = exported(to, write(config, world_size, per_node), suffix)
    if made.left_out and not partial:
        raise refused(made)
    made = evolve(made, left_out=tuple(evolve(finding, severity=Severity.WARNING) for finding in made.left_out))
    if str(path):
        for name, text in ((Path(path).name, made.text), *made.beside):
            Path(path).with_name(name).write_text(text)
    return made
