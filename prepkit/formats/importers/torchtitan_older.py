"""Keys of torchtitan's job configs of 2024, moved to where those of 2025 have them."""

from __future__ import annotations

from typing import Any

from prepkit.formats.importers.foreign import Foreign

_PARALLELISM = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
_EXPERIMENTAL = (
    *("pipeline_parallel_degree", "context_parallel_degree", "enable_async_tensor_parallel"),
    *("pipeline_parallel_schedule", "pipeline_parallel_split_points", "context_parallel_rotate_method"),
    "enable_compiled_autograd",
)
_FLOAT8 = ("enable_float8_linear", "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
MOVED: dict[str, str] = (
    {f"training.{name}": f"parallelism.{name}" for name in _PARALLELISM}
    | {"training.data_parallel_degree": "parallelism.data_parallel_shard_degree"}
    | {f"experimental.{name}": f"parallelism.{name}" for name in _EXPERIMENTAL}
    | {f"training.{name}": f"float8.{name}" for name in _FLOAT8}
)
"""Path in a file of 2024 (``torchtitan/config_manager.py``) to the path of the same key since."""


def move_older_keys(file: Foreign) -> None:
    """Moves them in place; findings and origins show each where it was written.

    ``float8.enable_float8_linear`` becomes the converter ``float8``, which asks for the same.
    """
    for old, new in MOVED.items():
        if file.has(old):
            _move(file, old, new)
    section = file.data.get("float8")
    if isinstance(section, dict) and "enable_float8_linear" in section:
        on = section.pop("enable_float8_linear")
        written = file.shown_as.get("float8.enable_float8_linear", "float8.enable_float8_linear")
        place = file.places.get(written)
        if on is True:
            _put(file, "model.converters", [*(_get(file.data, "model.converters") or ()), "float8"])
            file.shown_as.setdefault("model.converters", written)
            if place is not None:
                file.places["model.converters"] = place
        elif on is not False:
            file.error("wrong-type", written, f"{on!r} is not true or false", "Write true or false.")
        else:
            file.launching("float8")  # off, with whatever it says of how
            file.data.pop("float8")


def _move(file: Foreign, old: str, new: str) -> None:
    section, _, name = old.rpartition(".")
    value = _get(file.data, section).pop(name)
    if file.has(new):
        what = f"it is given twice, as {file.shown_as.get(new, new)} too"
        file.error("contradiction", old, what, "Keep one of them.")
        return
    _put(file, new, value)
    file.shown_as[new] = old
    if old in file.places:
        file.places[new] = file.places[old]


def _get(data: Any, path: str) -> Any:
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _put(file: Foreign, path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    held = file.data.setdefault(section, {})
    if isinstance(held, dict):
        held[name] = value
