"""How data is typed: in JSON, TOML, YAML, or as a call in Python. For fixes that can be copied as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from attrs import frozen

Language: TypeAlias = Literal["python", "toml", "yaml", "json"]
"""What the reader of a message types."""

TAG = "kind"
"""The key that names the class of a union's member."""


@frozen
class Untagged:
    """An object of a class that is no member of a union: only Python types its name."""

    name: str
    fields: dict[str, object]


def typed(data: object, language: Language = "json") -> str:
    """The data as one types it; an object that says nothing but its kind is typed as the bare name.

    >>> for language in ("toml", "yaml", "json", "python"):
    ...     print(typed({"kind": "ClipNorm", "max_norm": 1.0}, language), "or", typed({"kind": "DDP"}, language))
    { kind = "ClipNorm", max_norm = 1.0 } or "DDP"
    {kind: ClipNorm, max_norm: 1.0} or DDP
    {"kind": "ClipNorm", "max_norm": 1.0} or "DDP"
    ClipNorm(max_norm=1.0) or DDP()
    """
    match data:
        case {"kind": str(name), **rest} if not rest or language == "python":
            return f"{name}({_pairs(rest, '=', language)})" if language == "python" else typed(name, language)
        case Untagged(name, fields):
            return f"{name}({_pairs(fields, '=', language)})" if language == "python" else typed(fields, language)
        case dict():
            return _OBJECTS[language](data, language)
        case tuple() if language == "python":
            return repr(data)
        case list():
            return f"[{', '.join(typed(item, language) for item in data)}]"
        case str():
            return _TEXTS[language](data)
        case bool() | None if language == "python":
            return repr(data)
        case _:
            return json.dumps(data)


def assigned(name: str, language: Language) -> str:
    """The beginning of a line that gives a field its value: ``max_norm = `` in TOML."""
    return {"toml": f"{name} = ", "yaml": f"{name}: ", "json": f'"{name}": ', "python": f"{name}="}[language]


def _pairs(data: Mapping[Any, object], sign: str, language: Language) -> str:
    return ", ".join(f"{key}{sign}{typed(value, language)}" for key, value in data.items())


def _toml_object(data: dict[str, object], language: Language) -> str:
    return f"{{ {_pairs({key: value for key, value in data.items() if value is not None}, ' = ', language)} }}"


def _yaml_object(data: dict[str, object], language: Language) -> str:
    return f"{{{_pairs(data, ': ', language)}}}"


def _json_object(data: dict[str, object], language: Language) -> str:
    return f"{{{', '.join(f'{json.dumps(key)}: {typed(value, language)}' for key, value in data.items())}}}"


def _python_object(data: dict[str, object], language: Language) -> str:
    return f"dict({_pairs(data, '=', language)})"


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z][A-Za-z0-9_.-]*", re.IGNORECASE)
"""Text that YAML reads as text without quotes."""


def _yaml_text(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else _json_text(text)


_TEXTS: dict[Language, Callable[[str], str]] = {
    "json": _json_text,
    "toml": _json_text,
    "yaml": _yaml_text,
    "python": repr,
}
_OBJECTS: dict[Language, Callable[[dict[str, object], Language], str]] = {
    "json": _json_object,
    "toml": _toml_object,
    "yaml": _yaml_object,
    "python": _python_object,
}
