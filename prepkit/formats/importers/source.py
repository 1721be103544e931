"""A config file as text and as data: TOML, YAML or JSON, told by the extension."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from attrs import evolve, field, fields, frozen, has
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from prepkit.codec import text as codec_json
from prepkit.codec.languages import Language
from prepkit.codec.text import read_bytes
from prepkit.config import Config, Origin
from prepkit.config.optimizer import OptimizerSpec
from prepkit.facts import Env
from prepkit.findings import Finding, PlanRejected
from prepkit.formats.importers.composed import VALUES, TooManyValues, composed
from prepkit.formats.importers.positions import twice_in
from prepkit.rules import found

LARGEST = 2**20
"""Bytes of the largest config: a reader in Python takes seconds for each million."""

MOST = 100
"""Findings of one file: a hostile one has no say over how many there are."""

DOTS = 500
"""Dots in one line of TOML: a key of thousands of parts takes the reader a time that grows with their square."""

_MEND = "mend the file at that place"
_ANOTHER = "give the path of a config file"
_LEAST = "write at least the engine: Single, DDP, FSDP1, FSDP2, TensorParallel, XLA or DeepSpeed"
LEAST = {
    "accelerate": "write at least distributed_type: MULTI_GPU, FSDP or DEEPSPEED, or run accelerate config",
    "deepspeed": 'write at least "train_micro_batch_size_per_gpu" and "zero_optimization"',
    "transformers": "write at least output_dir and per_device_train_batch_size",
    "axolotl": "write at least base_model, datasets and micro_batch_size",
    "llamafactory": "write at least model_name_or_path, stage and output_dir",
    "torchtitan": "write at least [model] and [training]",
}
"""Library to what an empty file needs that is to be one of its own; any other is prepkit's."""


@frozen
class Source:
    """A config file that has been read, once: it may be a pipe."""

    path: str
    """As it was named."""
    text: str
    suffix: str = field()
    """What it is read as: one of ``READERS``; without more said, its extension in small letters."""

    @suffix.default
    def _extension(self) -> str:
        return Path(self.path).suffix.lower()

    def data(self, text: str | None = None) -> dict[str, Any]:
        """What the file holds, or ``text`` in its place. Raises ``PlanRejected`` for what is damaged or no mapping."""
        where = f"{self.path}:$"
        data = READERS[self.suffix](self.text if text is None else text, where)
        if not isinstance(data, dict):
            what = f"the top level is a {type(data).__name__}, not a mapping of config fields"
            _refuse("not-a-mapping", where, what, "write fields such as 'engine' at the top level")
        return data


_ASSIGNED = re.compile(r"(?<![\w.-])([a-z][a-z0-9_]*)=(?!=)")
"""Name of a field that a fix gives a value, as in a call of Python."""

JSON = ".json"


def read(path: str, suffix: str | None = None) -> Source:
    """The file. ``suffix`` None: read as its extension says; else as this, whatever it is called.

    Raises ``PlanRejected`` for a file that is missing, empty, not UTF-8 or of an unknown extension.
    """
    ending = Path(path).suffix
    suffix = suffix or ending.lower()
    if suffix not in READERS:
        ending = f"the extension {ending!r}" if ending else "no extension"
        _refuse("unknown-extension", path, f"the file has {ending}", f"name it with one of {', '.join(READERS)}")
    try:
        raw = read_bytes(path, LARGEST + 1)
        if len(raw) > LARGEST:
            _refuse("unreadable", path, f"the file has more than {LARGEST:,} bytes", _ANOTHER)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse("damaged", path, f"byte {error.start} is not UTF-8: {error.reason}", "save the file as UTF-8")
    except (OSError, ValueError) as error:
        what = f"the file cannot be read: {getattr(error, 'strerror', None) or error}"
        _refuse("unreadable", path, what, _ANOTHER)
    if not text.strip():
        _refuse("empty", path, "the file is empty", _LEAST)
    return Source(path, text, suffix)


def _toml(text: str, where: str) -> object:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > DOTS:
            _refuse("too-large", where, f"line {number} has more than {DOTS} dots", _MEND)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.fullmatch(r"(.*) \(at (.*)\)", str(error), re.DOTALL)
        what = f"not TOML at {place[2]}: {place[1]}" if place else f"not TOML: {error}"
        _refuse("damaged", where, what, _MEND)
    except ValueError as error:  # an integer of thousands of digits
        _refuse("damaged", where, f"a value cannot be read: {error}", _MEND)
    except RecursionError:
        _refuse_depth(where)


def _json(text: str, where: str) -> object:
    try:
        return codec_json.parse(text, where)
    except PlanRejected as refused:
        mend = {"codec.damaged": _MEND}  # a config file cannot be had by planning again
        told = (evolve(finding, fix=mend.get(finding.rule, finding.fix)) for finding in refused.findings)
        raise PlanRejected(tuple(_with_lines(finding, text) for finding in told)) from None


def _with_lines(finding: Finding, text: str) -> Finding:
    """A finding about a key of JSON that is there twice, with the lines of both, as of YAML."""
    if finding.rule != "codec.duplicate-key" or (both := twice_in(text, finding.where.partition(":$")[2])) is None:
        return finding
    name, first, second = both
    what = f"the key appears twice, in line {first[0]} and in line {second[0]}"
    return evolve(finding, where=codec_json.inside(finding.where, name), what=what)


def _yaml(text: str, where: str) -> object:
    """YAML 1.2: ``NO`` is a string and ``5e8`` a float (ruamel.yaml's pure safe loader)."""
    try:
        node = composed(text)
        if node is None:
            _refuse("empty", where, "the file holds comments only", _LEAST)
        if flaws := tuple(islice(_flaws(node, where, {}), MOST + 1)):
            raise PlanRejected(_told(flaws, where))
        known: dict[int, int] = {}
        if _values(node, known) > VALUES:
            many, aliased = f"it has more than {VALUES:,} values", len(known) <= VALUES
            what = f"with every alias written out {many}" if aliased else many
            _refuse("too-large", where, what, "write it out without the aliases" if aliased else _ANOTHER)
        # merging with << writes into the nodes, which are kept
        return YAML(typ="safe", pure=True).constructor.construct_document(deepcopy(node) if "<<" in text else node)
    except YAMLError as error:
        if isinstance(error, ReaderError):
            above = text[: error.position]
            line, column = above.count("\n") + 1, error.position - above.rfind("\n")
            what = f"not YAML at line {line}, column {column}: the character U+{error.character:04X} is not allowed"
            _refuse("damaged", where, what, _MEND)
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = " ".join(str(getattr(error, part, None) or "") for part in ("context", "problem")).strip()
        _refuse("damaged", where, f"not YAML{place}: {problem or str(error).splitlines()[0]}", _MEND)
    except TooManyValues as error:
        _refuse("too-large", where, str(error), _ANOTHER)
    except (ValueError, LookupError, TypeError, OverflowError) as error:  # as a tag asks for: ``!!bool maybe``
        _refuse("damaged", where, f"a value cannot be read: {error}", _MEND)
    except RecursionError:
        _refuse_depth(where)


def _told(flaws: tuple[Finding, ...], where: str) -> tuple[Finding, ...]:
    """The findings, or the first of them and that there are more."""
    if len(flaws) <= MOST:
        return flaws
    more = _finding(
        "too-many", where, f"more than {MOST} places are wrong; {MOST} of them are reported", "correct these first"
    )
    return (*flaws[:MOST], more)


def _values(node: Node, known: dict[int, int]) -> int:
    """Return how many values the node stands for, with every alias written out; each node is gone through once."""
    if id(node) not in known:
        match node:
            case MappingNode(value=pairs):
                known[id(node)] = 1 + sum(_values(value, known) for _, value in pairs)
            case SequenceNode(value=items):
                known[id(node)] = 1 + sum(_values(item, known) for item in items)
            case _:
                known[id(node)] = 1
    return known[id(node)]


def _flaws(node: Node, where: str, seen: dict[int, bool]) -> Iterator[Finding]:
    """Keys that appear twice, and values that contain themselves. Each node once, however often an alias names it."""
    if seen.setdefault(id(node), True) is False:
        return
    match node:
        case MappingNode(value=pairs):
            plain = [(key, value) for key, value in pairs if isinstance(key, ScalarNode)]
            children = [(codec_json.inside(where, key.value), value) for key, value in plain]
            for key, _ in pairs:
                if not isinstance(key, ScalarNode):
                    what = f"a key in line {key.start_mark.line + 1} is a list or a mapping, not text"
                    yield _finding("damaged", where, what, _MEND)
            yield from _twice([(key.value, key) for key, _ in plain], where)
        case SequenceNode(value=items):
            children = [(codec_json.inside(where, index), item) for index, item in enumerate(items)]
        case _:
            children = []
    for place, child in children:
        if seen.get(id(child)):
            yield _finding("recursive", place, "the value contains itself", "write it out without the alias")
        else:
            yield from _flaws(child, place, seen)
    seen[id(node)] = False


def _twice(keys: list[tuple[object, Node]], where: str) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for key, node in keys:
        line = node.start_mark.line + 1
        if str(key) in first:
            what = f"the key appears twice, in line {first[str(key)]} and in line {line}"
            yield _finding("duplicate-key", codec_json.inside(where, key), what, "keep one of them")
        first.setdefault(str(key), line)


def _refuse_depth(where: str) -> NoReturn:
    _refuse("damaged", where, "the values are nested too deeply to be read", _MEND)


def refuse_damage(where: str, what: str) -> NoReturn:
    """Raises ``PlanRejected``: the file has to be mended there."""
    _refuse("damaged", where, what, _MEND)


def refuse_unrecognised(path: str, keys: tuple[str, ...]) -> NoReturn:
    """Raises ``PlanRejected``: nothing tells whose file it is."""
    some = ", ".join(map(codec_json.shown, keys[:8])) + (" and others" if len(keys) > 8 else "")
    what = f"none of its keys is one of prepkit's config, or tells which library's file it is: {some}"
    fix = "say whose it is: --from on the command line, import_config(path, kind) in Python"
    _refuse("unrecognised", path, what, fix)


def _refuse(rule: str, where: str, what: str, fix: str) -> NoReturn:
    raise PlanRejected((_finding(rule, where, what, fix),))


def _finding(rule: str, where: str, what: str, fix: str) -> Finding:
    return found(f"config.{rule}", where, what, fix)


READERS: dict[str, Callable[[str, str], object]] = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml, ".json": _json}
"""Extension to the function that reads text of that format; the second argument begins the path of every finding."""

LANGUAGES: dict[str, Language] = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
"""Extension to the language in which fixes are typed."""


_CLASS = r'WrapClasses\(\("(\w+)",\)\)'
_CLIP = r"such as ClipNorm\(1\.0\), or clip=None"
_STAGE = r"(?<![(\w])stage=(\d)"
_MESH = r"(?:mesh=)?Mesh\(replicate=(\d+), shard=(\d+)\)"
_TRAINER = {
    r"precision=BF16\(\)": "bf16: true",
    r"precision=None": "neither bf16 nor fp16",
    _CLASS: r"fsdp_config.transformer_layer_cls_to_wrap: \1",
    _CLIP: "such as max_grad_norm: 1.0, or 0 for none",
}
_WAYS = {
    "accelerate": {
        r"precision=BF16\(\)": "mixed_precision: bf16",
        r"precision=None": "mixed_precision: 'no'",
        _CLASS: r"fsdp_config.fsdp_transformer_layer_cls_to_wrap: \1",
        _STAGE: r"zero_stage: \1",
        _MESH: r"dp_replicate_size: \1 with dp_shard_size: \2",
    },
    **dict.fromkeys(("transformers", "axolotl", "llamafactory"), _TRAINER),
    "torchtitan": {
        _CLIP: "such as training.max_norm = 1.0",
        _MESH: r"data_parallel_replicate_degree = \1 with data_parallel_shard_degree = \2",
    },
    "deepspeed": {_STAGE: r'"stage": \1', _CLIP: 'such as "gradient_clipping": 1.0, or 0.0 for none'},
}
SPELLED = {kind: tuple((re.compile(way), typed) for way, typed in ways.items()) for kind, ways in _WAYS.items()}
"""Whose file it is to ways of saying a fix in Python, each with what is typed there."""
_QUOTED = re.compile(r"`([\w.]+)`")


@frozen(kw_only=True)
class Imported:
    """Another library's file, or variables, as prepkit's config.

    ``build_plan(imported.config, model, env=imported.env)`` plans for the cluster that the file was written for;
    without ``env`` for what is here. Where ``at`` has the number of processes, ``for_size`` gives its settings.
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
    model: str | None = None
    """Folder, or name on the hub, of a model that the file says to train whole; None: it does not say."""
    optimizer: OptimizerSpec | None = None
    """What its library itself creates, where ``config`` asks for none; None: its script does, or nobody knows."""
    batch_size: int | None = None
    """Samples that a rank reads at once; None: it does not say."""
    not_preparation: tuple[Origin, ...] = ()
    """What the file says of launching, logging or the run itself: read, and of no concern to preparation."""
    unchanged: tuple[Origin, ...] = ()
    """What it says beside that: read, and off, empty or as it is without it, so that no setting came of it."""
    named: tuple[str, ...] = ()
    """Files that it names, and that were read as a part of it."""
    written: tuple[Origin, ...] = ()
    """Where each key of a file of prepkit's own is; empty for other files, whose ``config.origins`` say it."""
    meant: Mapping[str, tuple[str, ...]] = field(factory=dict, repr=False, eq=False)
    """Setting to the keys that say it in a file of this library, be they there or not; empty for prepkit's own."""
    seen_to: tuple[str, ...] = ()
    """Rules whose harm its library keeps away by itself: they speak of what prepkit does, and of no run of that one."""
    at: Mapping[int, Config] = field(factory=dict, repr=False, eq=False)
    """Processes in all to the settings that the file means for so many, where they are others."""
    notes: tuple[Finding, ...] = ()
    """Warnings: settings that do nothing there either, or that prepkit answers in another way."""

    def for_size(self, world_size: int | None) -> Config:
        """The settings that the file means for so many processes in all; None: how many there are is not known."""
        return self.config if world_size is None else self.at.get(world_size, self.config)

    @property
    def env(self) -> Env | None:
        """The cluster that the file declares; None where it does not say how many processes there are."""
        if self.world_size is None:
            return None
        said: dict[str, Any] = {"per_node": self.per_node, "device": self.device}
        return Env.declare(world_size=self.world_size, **{name: value for name, value in said.items() if value})

    def worded(self, finding: Finding) -> Finding:
        """The finding with the keys of this file that say what its fix asks for in Python, where there are any."""
        finding = evolve(finding, fix=self._spelled(finding.fix))
        named = dict.fromkeys(_ASSIGNED.findall(finding.fix))
        known = {setting.rpartition(".")[2]: keys for setting, keys in reversed(tuple(self.meant.items()))}
        said = [f"{name} is {' or '.join(known[name])}" for name in named if name in known]
        same = all(name in known[name] for name in named if name in known)
        return finding if not said or same else evolve(finding, fix=f"{finding.fix} Here {', '.join(said)}.")

    def _spelled(self, fix: str) -> str:
        """A fix as it is typed in a file of this library, and keys of DeepSpeed's JSON under the names that it has."""
        for way, typed in SPELLED.get(self.kind, ()):
            fix = way.sub(typed, fix)
        for path in _QUOTED.findall(fix):
            if keys := self.meant.get(f"config.engine.config.{path}"):
                fix = fix.replace(f"`{path}`", f"`{keys[0]}`")
        return fix

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
        for size, config in self.at.items():
            names = [one.name for one in fields(Config) if one.name != "origins"]
            both = [(name, getattr(config, name), getattr(self.config, name)) for name in names]
            other = [f"{name} {_short(_brief(there))}" for name, there, here in both if there != here]
            yield f"for {size} processes in all: {', '.join(other)}"
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
    """Return what the config says at a path, on one short line."""
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
