"""Names of the keys in the sections of accelerate's file: with and without the beginning that its launcher adds."""

from __future__ import annotations

from typing import Any

from prepkit.formats.importers.foreign import Foreign

_PREFIXES = {"fsdp_config": "fsdp", "dynamo_config": "dynamo_"}
"""Sections whose keys the launcher gives this beginning, where a file leaves it out (``_validate_launch_command``)."""


def name_in_full(file: Foreign) -> None:
    """Keys of sections as the launcher names them, shown as the file does: ``sharding_strategy`` is read by it too."""
    for section, start in _PREFIXES.items():
        given = file.data.get(section)
        if isinstance(given, dict):
            names = {key: str(key) if str(key).startswith(start) else f"{start.rstrip('_')}_{key}" for key in given}
            _rename(file, section, names)
    given = file.data.get("fp8_config")
    if isinstance(given, dict):
        own = ("fp8_format",)
        names = {key: str(key) if key in own else str(key).removeprefix("fp8_") for key in given}
        _rename(file, "fp8_config", names)


def _rename(file: Foreign, section: str, names: dict[Any, str]) -> None:
    """Gives keys of a section their full names; of two that become one the later counts, which is said."""
    given, renamed = file.data[section], {}
    for key, name in names.items():
        path, written = f"{section}.{name}", f"{section}.{key}"
        if name in renamed:
            what = f"it is given twice, as {file.shown_as.get(path, path)} too"
            file.error("contradiction", written, what, "Keep one of them.")
        renamed[name] = given[key]
        if written != path:
            file.shown_as[path] = written
            if written in file.places:
                file.places[path] = file.places[written]
    file.data[section] = renamed
