"""What an importer returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from attrs import fields, frozen, has

from prepkit.config import Config, Origin
from prepkit.facts import Env
from prepkit.findings import Finding


@frozen(kw_only=True)
class Imported:
    """Another library's file, or variables, as prepkit's config.

    ``build_plan(imported.config, model, env=imported.env)`` plans for the cluster that the file was written for;
    without ``env`` for what is here.
    """

    config: Config
    """The settings; ``config.origins`` says where each was written."""
    kind: str
    """Whose file it is: a key of ``IMPORTERS``."""
    world_size: int | None = None
    """Processes that the file starts; None: it does not say."""
    per_node: int | None = None
    """Processes on one machine; None: it does not say."""
    device: str | None = None
    """Device type of the machines; None: it does not say."""
    not_preparation: tuple[Origin, ...] = ()
    """What the file says of launching, logging or the run itself: read, and of no concern to preparation."""
    unchanged: tuple[Origin, ...] = ()
    """What it says beside that: read, and off, empty or as it is without it, so that no setting came of it."""
    written: tuple[Origin, ...] = ()
    """Where each key of a file of prepkit's own is; empty for other files, whose ``config.origins`` say it."""
    notes: tuple[Finding, ...] = ()
    """Warnings: settings that do nothing there either, or that prepkit answers in another way."""

    @property
    def env(self) -> Env | None:
        """The cluster that the file declares; None where it does not say how many processes there are."""
        if self.world_size is None:
            return None
        said: dict[str, Any] = {"per_node": self.per_node, "device": self.device}
        return Env.declare(world_size=self.world_size, **{name: value for name, value in said.items() if value})

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"imported from {self.kind}"
        written: dict[str, list[str]] = {}
        for origin in self.config.origins:
            written.setdefault(origin.setting, []).append(str(origin))
        written |= {setting: [f"what {self.kind} does by itself"] for setting in self._implied()}
        width = max(map(len, written), default=0)
        for setting, places in written.items():
            yield f"  {setting:<{width}}  {_value(self.config, setting)}  from {', '.join(places)}"
        said = {"world size": self.world_size, "per node": self.per_node, "device": self.device}
        declared = ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)
        if declared:
            yield f"declared: {declared}"
        if self.not_preparation:
            yield f"not preparation: {', '.join(origin.key for origin in self.not_preparation)}"
        if self.unchanged:
            yield f"changes nothing: {', '.join(origin.key for origin in self.unchanged)}"
        yield from map(str, self.notes)

    def _implied(self) -> Iterator[str]:
        """Settings that no key of another library's file says."""
        named = {origin.setting.split(".")[1] for origin in self.config.origins if "." in origin.setting}
        for one in fields(Config) if self.kind != "prepkit" else ():
            if one.name not in {*named, "origins"} and getattr(self.config, one.name) != one.default:
                yield f"config.{one.name}"


def _value(config: Config, setting: str) -> str:
    """What the config says at a path, on one short line."""
    value: object = config
    names = setting.split(".")[1:]
    for at, name in enumerate(names):
        if isinstance(value, str):  # DeepSpeed's own JSON: what it says there, and not the whole of it again
            return _short(json.dumps(json.loads(value).get(".".join(names[at:])), ensure_ascii=False))
        value = getattr(value, name, value)
    return _short(_brief(value))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:58]} …"


def _brief(value: Any) -> str:
    """``repr``, without the fields that have their defaults."""
    if not has(type(value)):
        return repr(value)
    said = [(one, getattr(value, one.name)) for one in fields(type(value))]
    inside = ", ".join(f"{one.name}={_brief(held)}" for one, held in said if held != one.default)
    return f"{type(value).__name__}({inside})"
