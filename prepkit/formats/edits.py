"""A config file without one key, or with another name for it: that place of the text is changed, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from typing import Any

from attrs import evolve
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from prepkit.codec.languages import typed
from prepkit.facts import Env
from prepkit.findings import Finding, PlanRejected, errors
from prepkit.formats.importers import IMPORTERS
from prepkit.formats.importers.composed import composed
from prepkit.formats.importers.foreign import lenient
from prepkit.formats.importers.positions import plain_json, positions
from prepkit.formats.importers.source import LANGUAGES, Imported, Source
from prepkit.formats.places import scalar_end
from prepkit.rules.without_model import ask


def without(source: Source, path: str) -> str | None:
    """The text without the key at a dotted path; None where no edit leaves every other value as it is."""
    *parts, name = path.split(".")

    def removed(data: dict[str, Any]) -> None:
        _at(data, parts).pop(name)

    return _first(source, _cuts(source, path), removed)


def renamed(source: Source, path: str, new: str) -> str | None:
    """The text with another name for the key at a dotted path; None as above, or where the new name is taken."""
    *parts, name = path.split(".")

    def moved(data: dict[str, Any]) -> None:
        place = _at(data, parts)
        if new in place:
            raise KeyError(new)
        place[new] = place.pop(name)

    start = _offset(source, path)
    if start is None:
        return None
    quote = source.text[start] if source.text[start] in "\"'" else ""
    spelt = json.dumps(new) if quote == '"' else f"{quote}{new}{quote}"
    end = start + len(name) + 2 * len(quote)
    return _first(source, iter((source.text[:start] + spelt + source.text[end:],)), moved)


def revalued(source: Source, path: str, new: object) -> str | None:
    """The text with another value for the key at a dotted path; None as above."""
    *parts, name = path.split(".")

    def given(data: dict[str, Any]) -> None:
        if name not in (place := _at(data, parts)):
            raise KeyError(name)
        place[name] = new

    start, spelt = _offset(source, path), typed(new, LANGUAGES[source.suffix])
    if start is None:
        return None
    ends = ((re.match(r"[^=:\n]+[=:]\s*", source.text[start:]), end) for end in _ends(source, path, start))
    texts = (source.text[: start + key.end()] + spelt + source.text[end:] for key, end in ends if key)
    return _first(source, texts, given)


def _first(source: Source, texts: Iterator[str], change: Any) -> str | None:
    """The first text that is read as the data with the change."""
    try:
        meant = deepcopy(lenient(source))
        change(meant)
    except (PlanRejected, KeyError, TypeError, AttributeError):
        return None
    for text in texts:
        try:
            if lenient(after := Source(source.path, text, source.suffix)) == meant and (
                _plain(after) or not _plain(source)
            ):
                return text
        except PlanRejected:
            continue
    return None


def _plain(source: Source) -> bool:
    """Whether every reader takes it: JSON without comments and without a comma at the end stays so."""
    try:
        source.data()
    except PlanRejected:
        return False
    return True


def _at(data: Any, parts: list[str]) -> Any:
    for part in parts:
        data = data[part]
    return data


def _offset(source: Source, path: str) -> int | None:
    """Return where the key begins in the text."""
    place = positions(source.text, source.suffix).get(path)
    if place is None:
        return None
    lines = source.text.splitlines(keepends=True)
    return sum(map(len, lines[: place[0] - 1])) + place[1] - 1


def _cuts(source: Source, path: str) -> Iterator[str]:
    """Texts without the key: its lines, and, where it shares them, itself with the comma behind or before it."""
    start = _offset(source, path)
    if start is None:
        return
    text = source.text
    begin = text.rfind("\n", 0, start) + 1
    for end in _ends(source, path, start):
        line = text.find("\n", end) + 1 or len(text)
        yield text[:begin] + text[line:]
        if behind := re.match(r"[ \t]*,\s*", text[end:]):
            yield text[:start] + text[end + behind.end() :]
        yield re.sub(r",\s*$", "", text[:start]) + text[end:]


def _ends(source: Source, path: str, start: int) -> Iterator[int]:
    """Yield where its value may end."""
    if source.suffix == ".toml":
        for end in islice(re.finditer(r"\n|\Z|[ \t]*#|\s*[,}]", source.text[start:]), _MOST):
            yield start + end.start()
        return
    plain = re.sub("\t", " ", plain_json(source.text)) if source.suffix == ".json" else source.text
    node = composed(plain)
    for part in path.split("."):
        pairs = node.value if isinstance(node, MappingNode) else ()
        node = next((value for key, value in pairs if str(key.value) == part), None)
    if node is not None:
        yield _last(node, plain)


def _last(node: Node, text: str) -> int:
    """The end of a value; a block's ends with its last scalar, before comments that belong to what follows."""
    if not isinstance(node, CollectionNode) or node.flow_style or not node.value:
        return scalar_end(node, text)
    last = node.value[-1]
    return _last(last[1] if isinstance(last, tuple) else last, text)


# --- mending ---------------------------------------------------------------------------------------------------------

STRICT = ("accelerate", "llamafactory", "transformers")
"""Libraries that start nothing with a file that has an unknown key at its top: another name for it changes no run."""

_PLACE = re.compile(r".*(?::\d+:\d+ |:\$\.)(\S+)")
_NEAR = re.compile(r"Write '([\w.]+)', or remove it\.|write '(\w+)' instead")
_TYPED = re.compile(
    r"write (true|false|-?\d[\d.e+-]*)(?: without quotes)?|(?:put it into a|take it out of the) list: .*"
)
_UNQUOTED = re.compile(r"Write .* without quotes: (true|false|-?\d[\d.e+-]*)\.")
"""What is said of a text in DeepSpeed's JSON that can mean one value only."""
_MOST = 50


def mended(source: Source, kind: str, wrong: tuple[Finding, ...] = ()) -> tuple[Source, tuple[Finding, ...]]:
    """The file with what is safe to mend, and the findings that are gone.

    Keys without effect are removed where all that is read of the file stays as it is, and no error is left in it: what
    mends the error may well give the key its effect. A misspelt key at the top of a
    file that its library would refuse gets the name that is meant; so does any of a file of prepkit's own, which takes
    a value of another type for none, and where a value that can mean one thing only gets the type that it should have,
    as a number or a switch in quotes does in DeepSpeed's JSON: it is refused, or read as the same.
    Each edit is read again before it counts. ``wrong``: errors that were found in the file with others beside it.
    """
    gone: list[Finding] = []
    for _ in range(_MOST):
        ended = {said_of(finding) for finding in gone}
        safe = all(said_of(finding) in ended for finding in wrong)
        step = next(_steps(source, kind, safe), None)
        if step is None:
            break
        source, finding = step
        gone.append(finding)
    return source, tuple(gone)


def _steps(source: Source, kind: str, safe: bool) -> Iterator[tuple[Source, Finding]]:
    """Edits that are safe, each with the finding that it ends; a key is removed where nothing else is to be done."""
    read, findings, wrong = _read(source, kind)
    removed = [finding for finding in findings if finding.rule == _NO_EFFECT]
    others = [finding for finding in findings if finding.rule != _NO_EFFECT]
    for finding in (*others, *(removed if safe and not wrong else ())):
        text, refused = _edited(source, kind, finding)
        if text is None:
            continue
        after, left, _ = _read(Source(source.path, text, source.suffix), kind)
        same = refused or (read is not None and after == read)
        said, before = {said_of(one) for one in left}, {said_of(one) for one in findings}
        own = refused and said_of(finding) not in said and len(said) <= len(before)  # renamed, it may show another flaw
        if own or (same and said < before):
            yield Source(source.path, text, source.suffix), finding


def _edited(source: Source, kind: str, finding: Finding) -> tuple[str | None, bool]:
    """The text with what the finding asks for, or None; and whether its library refuses the file, or reads the same."""
    place, near = _PLACE.fullmatch(finding.where), _NEAR.fullmatch(finding.fix)
    own = kind == "prepkit"
    if place and finding.rule == _NO_EFFECT and finding.fix == "Remove it.":
        return without(source, place[1]), own
    if place and near and finding.rule in ("import.unknown-key", "codec.unknown-key"):
        refused = own or (kind in STRICT and "." not in place[1])
        return renamed(source, place[1], near[1] or near[2]) if refused else None, refused
    if place and own and _TYPED.fullmatch(finding.fix):
        return _retyped(source, place[1], finding.fix), own
    if finding.rule == _WRONG_TYPE and (plain := _UNQUOTED.fullmatch(finding.fix)):
        return revalued(source, key_of(finding), json.loads(plain[1])), True
    return None, own


def _retyped(source: Source, path: str, fix: str) -> str | None:
    """The text with the value at a path such as ``optimizer.betas[0]`` in the type that the fix gives it."""
    key, *inside = re.findall(r"[^\[\]]+", path)
    try:
        whole = value = _at(lenient(source), key.split("."))
        for at in inside:
            value = value[int(at)]
        if fix.startswith("write"):
            new = json.loads(_TYPED.fullmatch(fix)[1])  # type: ignore[index]  # asked before
        else:
            new = [value] if fix.startswith("put") else value[0]
    except (PlanRejected, LookupError, TypeError, ValueError):
        return None
    for at in reversed(inside):
        new = [*whole[: int(at)], new, *whole[int(at) + 1 :]]
    return revalued(source, key, new) if len(inside) < 2 else None  # lists in lists hold no plain values


_WRONG_TYPE = "deepspeed.wrong-type"
_NO_EFFECT = "import.no-effect"


def key_of(finding: Finding) -> str:
    """The key that a finding is about, as its file has it; a rule about DeepSpeed's JSON begins with it."""
    named = re.match(r"`([\w.]+)`", finding.what) if finding.rule == _WRONG_TYPE else None
    return named[1] if named else finding.where.rpartition(" ")[2]


def said_of(finding: Finding) -> tuple[str, str]:
    """What a finding says, and of which key, wherever that stands: places move when the text is mended."""
    return finding.rule, f"{finding.where.rpartition(' ')[2]}: {finding.what}"


def _read(source: Source, kind: str) -> tuple[Imported | None, tuple[Finding, ...], bool]:
    """Return what is read of the file but for places, what is said of it, and whether there is an error in it."""
    try:
        imported = IMPORTERS[kind].read(source)
        findings = imported.notes
    except PlanRejected as refused:
        if not isinstance(refused.rest, Imported):
            return None, refused.findings, True
        imported, findings = refused.rest, refused.findings
    env, known = imported.env, frozenset({"world_size"})
    said = ask(imported.config, env or Env.declare(world_size=1), known if env else frozenset()).findings
    types = tuple(finding for finding in said if finding.rule == _WRONG_TYPE) if kind == "deepspeed" else ()
    return _meant(imported), (*findings, *types), bool(errors((*findings, *said)))


def _meant(imported: Imported) -> Imported:
    config = evolve(imported.config, origins=())
    return evolve(imported, config=config, not_preparation=(), unchanged=(), written=(), notes=())
