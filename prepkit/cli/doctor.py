"""``prepkit doctor``: what is installed here, what is wrong with it, and which rules cannot be asked here, and why."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

import click
from attrs import frozen

from prepkit.cli.check import tells
from prepkit.cli.options import as_json
from prepkit.cli.terminal import say, say_json
from prepkit.config import Config
from prepkit.facts import Env
from prepkit.findings import Finding, errors
from prepkit.findings.text import count
from prepkit.later import needs_torch
from prepkit.rules import LAW, found
from prepkit.rules.rule import Moment, Need, Rule
from prepkit.rules.without_model import ask
from prepkit.version import VERSION

LIBRARIES = (
    *("torch", "deepspeed", "accelerate", "transformers", "peft", "lightning", "torchao", "bitsandbytes"),
    *("safetensors", "transformer_engine", "torch_xla"),
)
"""What a run may use, looked up in its metadata and never imported; torch alone is imported, for its devices."""
_KNOWN = frozenset({"world_size", "device", "torch", "python", "libraries", "variables"})
"""Fields of an environment that was looked at."""
_OLDEST = re.compile(r"([A-Za-z0-9._-]+)>=([0-9.]+)")


@frozen(kw_only=True)
class Doctor:
    """What stands here, and the three verdicts about it."""

    installed: Mapping[str, str]
    absent: tuple[str, ...]
    devices: tuple[str, ...]
    """One line for each accelerator, or of the CPU; empty without torch."""
    wrong: tuple[Finding, ...]
    fine: int
    """Rules that were asked to the end, about the environment and a config that asks for nothing."""
    unknown: Mapping[str, tuple[str, ...]]
    """What is not known here, and the ids of the rules that would have to know it."""


@click.command(short_help="Say what is installed, and what cannot be known here.")
@as_json
def doctor(as_json: bool) -> None:
    """Say what is installed here, which devices there are, what is wrong with them, and what cannot be known here.

    Three verdicts: wrong, with a fix; fine; and what no rule can know here, with the command that would tell. Errors
    give exit code 1. Nothing is installed, started or allocated.
    """
    seen = look()
    if as_json:
        from prepkit import codec

        unknown = [{"what": what, "tells": _tells(what), "rules": list(ids)} for what, ids in seen.unknown.items()]
        head = {"prepkit": VERSION, "python": platform.python_version(), "installed": dict(seen.installed)}
        say_json(
            head
            | {"not_installed": list(seen.absent), "devices": list(seen.devices), "rules_that_hold": seen.fine}
            | {"wrong": codec.to_data(seen.wrong), "cannot_know": unknown}
        )
    else:
        say("\n".join(_page(seen)))
    sys.exit(1 if errors(seen.wrong) else 0)


def look() -> Doctor:
    """Look at this interpreter and this machine."""
    versions = {name: version for name in LIBRARIES if (version := _version(name)) is not None}
    devices: tuple[str, ...] = ()
    env, known = Env(python=platform.python_version()), frozenset({"python"})
    wrong = tuple(_too_old(versions, _requirements()))
    if "torch" in versions:
        try:
            needs_torch("prepkit doctor")
            from prepkit.observe.env import devices as seen
            from prepkit.observe.env import observe_env

            devices, env, known = seen(), observe_env(), _KNOWN
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # a broken install, driver or launcher
            what = f"torch {versions['torch']} is installed, and looking through it failed: {error}"
            wrong += (found("machine.torch-broken", "env.torch", what),)
    answers = ask(Config(), env, known)
    unknown: dict[str, list[str]] = {}
    for rule, what in (*answers.unasked, *_later("torch" if "torch" not in versions else "")):
        unknown.setdefault(what, []).append(rule)
    return Doctor(
        installed=versions,
        absent=tuple(name for name in LIBRARIES if name not in versions),
        devices=devices,
        wrong=(*wrong, *answers.findings),
        fine=answers.asked - len({finding.rule for finding in answers.findings}),
        unknown={what: tuple(dict.fromkeys(ids)) for what, ids in unknown.items()},
    )


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterable[str]:
    """Return what the installed prepkit asks for; nothing where it runs from a folder."""
    try:
        return metadata.requires("prepkit") or ()
    except metadata.PackageNotFoundError:
        return ()


def _too_old(versions: Mapping[str, str], requirements: Iterable[str]) -> Iterator[Finding]:
    """Libraries that are older than the oldest that prepkit was tried with."""
    oldest = {match[1]: match[2] for text in requirements if (match := _OLDEST.match(text))}
    for name, version in versions.items():
        least = oldest.get(name)
        if least is not None and _numbers(version) < _numbers(least):
            what = f"{name} {version} is older than {least}, the oldest that prepkit runs with"
            yield found("machine.library-too-old", "env.libraries", what, f"Type: pip install '{name}>={least}'")


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version; what comes behind its numbers is left out.

    >>> _numbers("2.13.0+cpu") < _numbers("2.6"), _numbers("0.9.1") < _numbers("0.16.4")
    (False, True)
    """
    numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(one[:9]) for one in numbers[0].split(".")) if numbers else ()


def _later(missing: str) -> Iterator[tuple[str, str]]:
    """Rules that are asked once something runs, and what each of them waits for."""
    for rule in LAW:
        if not rule.told_by and not {Moment.PLAN, Moment.PLANNED} & set(rule.at):
            yield rule.id, missing or _waits_for(rule)


def _waits_for(rule: Rule) -> str:
    if rule.at == (Moment.FORWARD,):
        return "what the model's forward does"
    if rule.at == (Moment.PROVE,):
        return "a window that was trained"
    if Need.RANKS in rule.needs:
        return "what the other ranks have seen"
    return "objects that train"


_TELLS = {
    "torch": "type: pip install 'prepkit[torch]'",
    "what the model's forward does": "call pk.foreign_uses, or pk.build_plan(..., example=batch)",
    "a window that was trained": "run prepkit audit --prove SCRIPT",
    "what the other ranks have seen": "run prepkit audit --torchrun 2 SCRIPT",
    "the model": "run prepkit check CONFIG --model FOLDER",
}


def _tells(what: str) -> str:
    return _TELLS.get(what) or tells(what)


def _page(seen: Doctor) -> Iterator[str]:
    """One screen."""
    yield f"prepkit {VERSION} on Python {platform.python_version()}"
    installed = ", ".join(f"{name} {version}" for name, version in seen.installed.items())
    yield f"installed: {installed or 'none of the libraries that a run may use'}"
    if seen.absent:
        yield f"not installed: {', '.join(seen.absent)}"
    for device in seen.devices:
        yield f"device: {device}"
    yield from ("wrong:", *(f"  {line}" for one in seen.wrong for line in str(one).splitlines())) if seen.wrong else ()
    yield f"fine: {count(seen.fine, 'rule')} about what is here {'holds' if seen.fine == 1 else 'hold'}"
    yield "cannot know here:"
    for what, ids in sorted(seen.unknown.items(), key=lambda pair: -len(pair[1])):
        yield f"  {what}: {count(len(ids), 'rule')} {'asks' if len(ids) == 1 else 'ask'} for it; {_tells(what)}"
