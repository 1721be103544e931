"""Every value to and from strict JSON data; its canonical form, its digest, and the plan file.

The data form of a value is an object with a key per field, in the order of the fields. Members of a union also have
the key ``kind``, with the name of the class. Fields outside equality (``Plan.target``) are left out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import uuid
from collections.abc import Iterator
from itertools import islice
from math import prod
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, overload

from prepkit.codec import converter as codec_converter
from prepkit.codec.languages import Language
from prepkit.codec.text import Json, canonical, digest_text, inside, parse, read_bytes, readable, refusal, shown
from prepkit.facts import Facts
from prepkit.findings import Finding, PlanRejected
from prepkit.plan import Plan
from prepkit.plan.layout import ParamLayout, sharded_dim
from prepkit.steps import Axis, InitializeDeepSpeed, ShardUnits, Step, WrapDDP, WrapFSDP1
from prepkit.version import VERSION

FORMAT = 2
"""Number of the plan file's format. A field or kind that goes away, or changes its meaning, needs the next number."""

KIND = "prepkit.plan"
"""What the file says it is."""

LARGEST = 2**28
"""Bytes of the largest file that is read; the plan of a model of a million parameters has half of that."""

T = TypeVar("T")


# --- values --------------------------------------------------------------------------------------------------------


def to_data(value: object) -> Any:
    """The data form of a value of config, facts, steps, layout, findings or plan."""
    return codec_converter.write(value)


def settings_of(plan: Plan) -> dict[str, Any]:
    """The config of a plan as single values under dotted names, as trackers show it."""
    return flat(to_data(plan.config))


def flat(data: Any) -> dict[str, Any]:
    """Data as single values under dotted names; what is null is left out."""
    return dict(_flat(data, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A config as single values under dotted names."""
    match value:
        case dict():
            for name, part in value.items():
                yield from _flat(part, f"{path}.{name}" if path else name)
        case list():
            for at, part in enumerate(value):
                yield from _flat(part, f"{path}.{at}")
        case None:
            return
        case _:
            yield path, value


@overload
def from_data(data: object, cls: type[T], where: str = "$", language: Language = "json") -> T: ...
@overload
def from_data(data: object, cls: UnionType, where: str = "$", language: Language = "json") -> Any: ...
def from_data(data: object, cls: Any, where: str = "$", language: Language = "json") -> Any:
    """The value that the data stands for; exact: no type is turned into another, but a whole number is also a number.

    Missing keys take the field's default. For a member of a union whose fields all have defaults its bare name will do:
    ``{"engine": "FSDP2"}``. Raises ``PlanRejected`` with a finding for every place that does not fit, and with what to
    type instead in the language of the file.
    """
    return codec_converter.read(data, cls, where, language)


def dumps(value: object) -> str:
    """The canonical JSON text of a value. Raises ``PlanRejected`` if it holds a number that JSON does not have."""
    return canonical(to_data(value))


def digest(value: object) -> str:
    """``sha256:<hex>`` of the canonical text: it changes when and only when the value does."""
    return digest_text(dumps(value))


def plan_digest(plan: Plan) -> str:
    """The digest that the plan file carries and that ranks compare."""
    return digest(plan)


def prepare(plan: Plan) -> None:
    """Generates what writes the classes of this plan: a tenth of a millisecond each, which ``apply`` then does not pay.

    Changes no result: a class that is met for the first time is generated when it is met.
    """
    codec_converter.prepare((Plan, *(type(planned.step) for planned in plan.steps)))


def plan_digests(plan: Plan) -> tuple[str, str]:
    """``digest(plan)`` and ``digest(plan.facts.model)``, at the cost of one walk over the plan."""
    data = to_data(plan)
    return digest_text(canonical(data)), digest_text(canonical(data["facts"]["model"]))


# --- plan file -----------------------------------------------------------------------------------------------------


def plan_to_text(plan: Plan) -> str:
    """The text of the plan file: kind, format number, digests of the plan and its parts, and the plan itself."""
    data = to_data(plan)
    long = {key: data.pop(key) for key in ("facts", "layout")}  # a line per parameter: what is read first stands first
    return readable({"kind": KIND, "format": FORMAT, **_seals(data | long), "plan": data | long}) + "\n"


def plan_from_text(text: str, where: str = "$") -> Plan:
    """The plan in the text of a plan file. ``where`` begins every path, such as ``plan.json:$``.

    Raises ``PlanRejected`` for damaged JSON, another kind of file, another format, keys or types that a plan does not
    have, contents that were changed after prepkit wrote them, and parts that do not fit each other. Nothing that the
    text names is imported or called.
    """
    data = _checked_header(parse(text, where), where)
    plan = from_data(data["plan"], Plan, inside(where, "plan"))
    if wrong := tuple(_broken_seals(data, where)) or inconsistencies(plan, inside(where, "plan")):
        raise PlanRejected(wrong)
    return plan


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file. Raises ``PlanRejected`` as ``plan_from_text`` does, and for a file that cannot be read."""
    return plan_from_text(read_text(path), f"{path}:$")


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Writes a file whole or not at all. Raises ``OSError`` where the folder cannot be written.

    Also where something stands there that is no file, such as a device: a new file would take its place. A file that
    stands there keeps its mode and, as far as whoever writes may give it away, its owner.
    """
    target = Path(os.path.realpath(path))  # a link keeps pointing to the file
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    was = target.stat() if target.exists() else None
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        made = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600 if was else 0o666
        )
        with os.fdopen(made, "wb") as file:
            file.write(text.encode(errors="backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        if was is not None:
            _as_it_was(draft, was)
        draft.replace(target)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _as_it_was(draft: Path, was: os.stat_result) -> None:
    now = draft.stat()
    if hasattr(os, "chown") and (now.st_uid, now.st_gid) != (was.st_uid, was.st_gid):
        with contextlib.suppress(PermissionError):  # only root gives files away
            os.chown(draft, was.st_uid, was.st_gid)
    draft.chmod(stat.S_IMODE(was.st_mode))


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file of at most ``LARGEST`` bytes. Raises ``PlanRejected`` for one that cannot be read."""
    try:
        raw = read_bytes(path, LARGEST + 1)  # also a device without end, such as /dev/zero, costs no more than this
    except (OSError, ValueError) as error:
        what = f"the file cannot be read: {getattr(error, 'strerror', None) or error}"
        raise PlanRejected((refusal("unreadable", str(path), what, "give the path of a plan file"),)) from None
    if len(raw) > LARGEST:
        what = f"the file has more than {LARGEST:,} bytes"
        raise PlanRejected((refusal("too-large", str(path), what, "give the path of a plan file"),))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"byte {error.start} is not UTF-8 text"
        raise PlanRejected((refusal("damaged", f"{path}:$", what, "restore the file, or plan again"),)) from None


def _checked_header(data: Json, where: str) -> dict[str, Any]:
    """Kind and format come first: what another format means by its keys is not known."""
    if not isinstance(data, dict) or data.get("kind") != KIND:
        what = f"not a plan file: {shown(data)} does not have the kind {KIND!r}"
        raise PlanRejected((refusal("foreign", where, what, "give a file that pk.save(plan, path) wrote"),))
    number = data.get("format")
    if type(number) is not int or number != FORMAT:
        newer = type(number) is int and number > FORMAT
        what = f"format {shown(number)}{_writer(data)}, but prepkit {VERSION} reads format {FORMAT}"
        fix = f"{'upgrade prepkit' if newer else 'use the prepkit that wrote it'}, or plan again with this one"
        raise PlanRejected((refusal("other-format", inside(where, "format"), what, fix),))
    keys = {"kind", "format", "digest", "digests", "plan"}
    unknown = [
        refusal("unknown-key", inside(where, key), f"a plan file has no key {shown(key)}", "remove it")
        for key in sorted(data.keys() - keys)
    ]
    missing = [
        refusal("missing-key", inside(where, key), f"a plan file needs the key {key!r}", "restore it, or plan again")
        for key in sorted(keys - data.keys())
    ]
    if unknown or missing:
        raise PlanRejected((*unknown, *missing))
    return data


def _writer(data: dict[str, Any]) -> str:
    """Return which prepkit wrote the file, where it says so."""
    match data.get("plan"):
        case {"provenance": {"prepkit": str(version)}}:
            return f", written by prepkit {shown(version)}"
        case _:
            return ""


# --- seals ---------------------------------------------------------------------------------------------------------


def _seals(plan: dict[str, Any]) -> dict[str, Any]:
    """The digest of a plan's data, and those of its parts, step by step, so that a change can be located."""
    parts = {key: digest_text(canonical(value)) for key, value in plan.items() if key != "steps"}
    steps = [digest_text(canonical(step)) for step in plan["steps"]]
    return {"digest": digest_text(canonical(plan)), "digests": {**parts, "steps": steps}}


def _broken_seals(data: dict[str, Any], where: str) -> Iterator[Finding]:
    """Yield what differs from the digests in the same file: this finds edits and damage, not forgery."""
    seals = _seals(data["plan"])
    written = data["digests"] if isinstance(data["digests"], dict) else {}
    located = False
    for place, was, now in _parts(written, seals["digests"]):
        located = True
        what = f"changed after prepkit wrote it: its digest is {shown(now)}, the file says {shown(was)}"
        yield refusal("edited", f"{where}.plan.{place}", what, "change the config and plan again")
    if not located and (data["digest"], data["digests"]) != (seals["digest"], seals["digests"]):
        what = f"the digests are not those of the plan, whose digest is {seals['digest']}"
        yield refusal("edited", f"{where}.digest", what, "restore the file, or plan again")


def _parts(written: dict[str, Any], seals: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Place, digest in the file and true digest of each part where the two differ."""
    for key, now in seals.items():
        was = written.get(key)
        if isinstance(now, list) and isinstance(was, list) and len(now) == len(was):
            pairs = enumerate(zip(was, now, strict=True))
            yield from ((f"{key}[{index}]", old, new) for index, (old, new) in pairs if old != new)
        elif was != now:
            yield key, was, now


DIMS = 64
"""Dimensions of a tensor, as torch has them at most."""
MOST = 100
"""Findings of one plan; a hostile file has no say over how many there are."""
_LARGEST_BUCKET = 2.0**42


def inconsistencies(plan: Plan, where: str) -> tuple[Finding, ...]:
    """Return what does not fit, at most ``MOST`` places. Linear in the plan."""
    facts = inside(where, "facts")
    return tuple(islice((*_facts(plan.facts, facts), *_outcome(plan, where), *_steps(plan, where)), MOST))


def _facts(facts: Facts, where: str) -> Iterator[Finding]:
    env, model = facts.env, inside(where, "model")
    if env.world_size < 1:
        yield _wrong(inside(inside(where, "env"), "world_size"), f"{env.world_size} processes hold no plan")
    for index, loader in enumerate(facts.loaders):
        if loader.batch_size is not None and loader.batch_size < 1:
            place = inside(inside(inside(where, "loaders"), index), "batch_size")
            yield _wrong(place, f"batches of {loader.batch_size} samples")
    modules, classes = facts.model.modules, len(facts.model.classes)
    if not modules or modules[0].path:
        yield _wrong(inside(model, "modules"), "the first module is not the root, whose path is empty")
    known: set[str] = set()
    for index, module in enumerate(modules):
        place = inside(inside(model, "modules"), index)
        if not 0 <= module.cls < classes:
            yield _wrong(inside(place, "cls"), f"there is no class {module.cls}, only {classes} of them")
        if module.path in known:
            yield _wrong(inside(place, "path"), f"{shown(module.path)} appears twice")
        known.add(module.path)
    for index, param in enumerate(facts.model.params):
        if not _is_shape(param.shape):
            yield _wrong(inside(inside(inside(model, "params"), index), "shape"), f"{shown(param.shape)} is no shape")


def _is_shape(shape: tuple[int, ...]) -> bool:
    return len(shape) <= DIMS and all(0 <= size < 2**62 for size in shape)


def _outcome(plan: Plan, where: str) -> Iterator[Finding]:
    """Mesh and layout: every axis has ranks, and every parameter lies on axes that there are."""
    place = inside(where, "mesh")
    for index, axis in enumerate(plan.mesh):
        if axis.size < 1:
            yield _wrong(inside(inside(place, index), "size"), f"an axis of {axis.size} ranks")
    if plan.mesh and prod(axis.size for axis in plan.mesh) != plan.world_size:
        yield _wrong(place, f"the axes do not multiply to the world size, {plan.world_size}")
    place = inside(where, "layout")
    params = plan.facts.model.params
    if len(plan.layout) != len(params):
        yield _wrong(place, f"{len(plan.layout)} layouts of {len(params)} parameters")
    for index, (layout, param) in enumerate(zip(plan.layout, params, strict=False)):
        if layout.name != param.name:
            what = f"{shown(layout.name)} stands where the facts have {shown(param.name)}"
            yield _wrong(inside(inside(place, index), "name"), what)
        for field, what in _layout(layout, plan.mesh):
            yield _wrong(inside(inside(place, index), field), what)


def _layout(layout: ParamLayout, mesh: tuple[Axis, ...]) -> Iterator[tuple[str, str]]:
    dims = [dim for dim in map(sharded_dim, layout.placements) if dim is not None]
    if not _is_shape(layout.shape) or any(dim >= len(layout.shape) for dim in dims):
        yield "shape", f"{shown(layout.shape)} cannot be placed as {', '.join(layout.placements) or 'it is'}"
    if len(layout.placements) > len(mesh):
        yield "placements", f"{len(layout.placements)} placements on {len(mesh)} axes"
    flat = layout.flat
    if flat is not None and not (
        0 <= flat.start <= flat.size < 2**62 and flat.shards >= 1 and (mesh or flat.shards == 1)
    ):
        yield "flat", f"{shown(flat)} is no place in a flat parameter"


def _steps(plan: Plan, where: str) -> Iterator[Finding]:
    for index, planned in enumerate(plan.steps):
        place = inside(inside(inside(where, "steps"), index), "step")
        yield from _step(planned.step, plan, place)


def _step(step: Step, plan: Plan, where: str) -> Iterator[Finding]:
    match step:
        case ShardUnits(units=units):
            if not units:
                yield _wrong(inside(where, "units"), "nothing is sharded")
            for unit in units:
                if not isinstance(unit.reshard_after_forward, bool) and unit.reshard_after_forward < 1:
                    yield _wrong(
                        inside(where, "units"), f"{shown(unit.path)} is resharded to {unit.reshard_after_forward} ranks"
                    )
        case WrapFSDP1(units=()):
            yield _wrong(inside(where, "units"), "nothing is sharded")
        case WrapDDP(bucket_cap_mb=size) if not 0 < size < _LARGEST_BUCKET:
            yield _wrong(inside(where, "bucket_cap_mb"), f"{size:g} MiB is no size of a bucket")
        case InitializeDeepSpeed(data_parallel=ranks):
            if ranks < 1 or plan.world_size % ranks:
                yield _wrong(inside(where, "data_parallel"), f"{ranks} does not divide {plan.world_size} ranks")
            if not plan.layout:
                yield _wrong(inside(where, "names"), "there is no parameter to train")
            for number, setting in enumerate(step.settings):
                if not _is_json(setting.value):
                    place = inside(inside(inside(where, "settings"), number), "value")
                    yield _wrong(place, f"{shown(setting.value)} is not JSON")
        case _:
            pass


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _wrong(where: str, what: str) -> Finding:
    return refusal("inconsistent", where, what, "plan again; a plan is not edited by hand")
