"""Where a setting was written before it was imported."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Origin:
    """One setting of a config, and the key of another library's file, or the variable, that it was read from."""

    setting: str
    """Path of the setting as findings write it, such as ``config.engine.offload``."""
    key: str
    """Dotted key in the file, or name of the variable; empty for the file as a whole."""
    source: str
    """The file, or ``environment``."""
    line: int | None = None
    """Line in the file, from 1; None where there are no lines."""
    column: int | None = None
    """Column in the line, from 1."""

    def __str__(self) -> str:
        place = "".join(f":{number}" for number in (self.line, self.column) if number is not None)
        return f"{self.key} in {self.source}{place}" if self.key else self.source


def origin_of(origins: tuple[Origin, ...], where: str, what: str = "") -> Origin | None:
    """Return where the setting was written that a path such as ``config.engine.wrap`` names, or one that it is part of.

    Of several keys inside the setting, such as those of DeepSpeed's JSON, the one that the text ``what`` quotes.
    """
    inner = [origin for origin in origins if origin.setting.startswith(f"{where}.")]
    quoted = [origin for origin in inner if f"`{origin.key}`" in what or f"`{origin.key}." in what]
    named = [origin for origin in origins if f"{where}.".startswith(f"{origin.setting}.")]
    nearest = max(reversed(named), key=lambda origin: len(origin.setting), default=None)
    return next(iter(quoted), None) or nearest or next(iter(inner), None)
