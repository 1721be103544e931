"""A model's facts from its folder: ``config.json``, and headers of safetensors files. Nothing else is opened."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from prepkit.codec.text import read_bytes
from prepkit.config import LoadWeights
from prepkit.facts import BufferFact, ClassFact, ModelFacts, ModuleFact, ParamFact
from prepkit.facts.checkpoint import CheckpointFacts, StoredTensor
from prepkit.formats.importers.positions import positions
from prepkit.formats.models import config_fields
from prepkit.formats.models.architecture import architecture
from prepkit.formats.models.config_fields import MOST_ITEMS
from prepkit.formats.models.expressions import LARGEST, Unfit, evaluate
from prepkit.formats.stored_weights import INDEX, SINGLE, observe_checkpoint, state_names
from prepkit.resolve.checkpoint import renamed, unreadable

CONFIG = "config.json"

MOST_BYTES = 8 * 2**20
"""Size of a ``config.json`` at most."""

MOST_HEADERS = 24 * 2**20
"""Bytes of all headers of a model together: those of 91,000 tensors have 10 million."""

MOST_TENSORS, DEEPEST, LONGEST_NAME = 250_000, 40, 1000
"""Tensors of a model, parts of a name and its characters, at most."""

ELSE = "give --model PKG.MOD:FACTORY, a function that returns the model"

UNSEEN = ("quantization_config", "per_layer_config", "heterogeneous")
"""What changes the modules of any model in ways that no table holds."""


class NotKnown(ValueError):
    """The facts of the model cannot be known from its folder; the text says why, and what to type."""


class Impossible(NotKnown):
    """No model has the sizes that a config says; ``where``: the file, with line, column and key."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(f"{where}: {what}; {fix}")
        self.where, self.what, self.fix = where, what, fix


class NotThere(NotKnown):
    """There is no such folder."""


@frozen(kw_only=True)
class DescribedModel:
    """What a folder says of its model."""

    model: ModelFacts
    words: tuple[str, ...] = ()
    """What could not be known, or differs between config and headers."""


def read(path: Path) -> DescribedModel:
    """Facts of the model in a folder, or beside a ``config.json``. Raises ``NotKnown``; runs and follows nothing."""
    folder, config = (path, path / CONFIG) if path.is_dir() else (path.parent, path)
    if config.exists():
        _keep_inside(folder, config)
    raw = _config(config)
    stored = _stored(folder)
    kind, name = _named(raw)
    table = _table(kind)
    if name is not None and name not in table.get("models", {}):
        table = {}
    if name is None and table:
        names = ", ".join(table["models"])
        raise NotKnown(f'{config.name} names no class; add "architectures": [...] with one of {names}')
    if not table:
        return _by_headers(stored, kind, name, raw)
    model = _by_table(table, str(name), raw, stored, config)
    return DescribedModel(model=model, words=tuple(_differences(model, stored)))


def _config(path: Path) -> dict[str, Any]:
    try:
        text = read_bytes(path, MOST_BYTES + 1)
    except OSError as error:
        raise NotThere(f"{path} cannot be read: {error.strerror or error}; name a folder with {CONFIG}") from None
    except ValueError:
        raise NotThere(f"{path!a:.200} is no name of a file; name a folder with {CONFIG}") from None
    if len(text) > MOST_BYTES:
        raise NotKnown(f"{path} has more than {MOST_BYTES:,} bytes: that is no config of a model; {ELSE}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise NotKnown(f"{path} is no JSON; fetch it again") from None
    if not isinstance(data, dict):
        raise NotKnown(f"{path} is no JSON object; fetch it again")
    return data


def _named(raw: Mapping[str, Any]) -> tuple[str, str | None]:
    """The model's type and its class."""
    kind, names = raw.get("model_type"), raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return (kind if isinstance(kind, str) else ""), (first if isinstance(first, str) else None)


def _table(kind: str) -> dict[str, Any]:
    """The table of a model type; empty where there is none."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", kind) or kind == COMMON:
        return {}
    file = files(__package__) / "data" / f"{kind}.json"
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found


COMMON = "common"
"""The table that is no type's: activations, and classes of torch and of others that many types share."""


def _by_table(
    table: Mapping[str, Any], name: str, raw: Mapping[str, Any], stored: CheckpointFacts | None, file: Path
) -> ModelFacts:
    model = table["models"][name]
    for unseen in UNSEEN:
        if raw.get(unseen):
            raise NotKnown(f"{unseen} changes the modules of {name}, and no table says how; {ELSE}")
    for path, default in model["fixed"].items():
        value = _at(raw, path)
        if value is not None and value != default:
            raise NotKnown(f"{path} is {value!r:.60}; what {name} is is known where it is {default!r:.60}; {ELSE}")
    common = json.loads((files(__package__) / "data" / f"{COMMON}.json").read_text("utf-8"))
    own = {"classes": table["classes"], "module": table["module"]}
    try:
        said = model.get("config", table["config"])
        fields = config_fields.fields(said, raw)
        _demand(model["needs"], said, fields, name, file)
        return model_facts(model | own, fields, _dtype(fields["dtype"], stored), common)
    except Unfit as error:
        raise NotKnown(f"{CONFIG}: {error}; mend it, or {ELSE}") from None


def _demand(needs: list[str], table: Mapping[str, Any], fields: Mapping[str, Any], name: str, file: Path) -> None:
    """Raise ``Impossible`` where a size does not divide another one, without which the class builds or runs nothing."""
    for need in needs:
        whole, part = need.removesuffix(" == 0").split(" % ")
        size, divisor = evaluate(whole, fields), evaluate(part, fields)
        if not (type(size) is type(divisor) is int) or (divisor > 0 and size % divisor == 0):
            continue
        there = positions(file.read_text("utf-8-sig", errors="replace"), file.suffix)
        typed = next((one for one in (*_spelt(part, table), *_spelt(whole, table)) if one in there), part)
        line, column = there.get(typed, (1, 1))
        what = f"{part} is {divisor}, which does not divide {whole}, {size}: {name} cannot run"
        ways = [one for one in range(1, min(size, 2 * abs(divisor), MOST_TENSORS) + 1) if size % one == 0]
        near = sorted(sorted(ways, key=lambda one: abs(one - divisor))[:2])
        fix = f"Write {part.rpartition('.')[2]} {' or '.join(map(str, near))}, or a multiple of {divisor} for {whole}."
        raise Impossible(f"{file}:{line}:{column} {typed}", what, fix)


def _spelt(path: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    """The path of a field, and those under the other names that it may have in a file."""
    *parts, name = path.split(".")
    for part in parts:
        table = table["parts"][part]
    others = (other for other, one in table["aliases"].items() if one == name)
    return tuple(".".join((*parts, one)) for one in (name, *others))


def _dtype(said: Any, stored: CheckpointFacts | None) -> str:
    """The config's, as transformers takes it, else that of the first floating tensor, else float32."""
    if isinstance(said, str) and said.removeprefix("torch.") in DTYPES:
        return said.removeprefix("torch.")
    if said not in (None, "auto"):
        raise Unfit(f"dtype is {said!r:.60}; write one of {', '.join(DTYPES)}")
    kinds = (tensor.dtype for tensor in stored.tensors) if stored else ()
    return next((kind for kind in kinds if kind in DTYPES), "float32")


DTYPES = ("float32", "bfloat16", "float16", "float64")


def _at(raw: Any, path: str) -> Any:
    for name in path.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw


# --- headers ---------------------------------------------------------------------------------------------------------


def _stored(folder: Path) -> CheckpointFacts | None:
    """What the headers say; None where there are no safetensors files. Files outside the folder are not opened."""
    place = next((folder / name for name in (INDEX, SINGLE) if (folder / name).exists()), None)
    if place is None:
        return None
    _keep_inside(folder, place)
    if place.name == INDEX:
        for name in sorted({found.name for found in folder.glob("*.safetensors")}):
            _keep_inside(folder, folder / name)
    stored = observe_checkpoint(str(place), MOST_HEADERS)
    if len(stored.tensors) > MOST_TENSORS:
        raise NotKnown(f"{place.name} names more than {MOST_TENSORS:,} tensors; {ELSE}")
    return stored


def _keep_inside(folder: Path, file: Path) -> None:
    """A link of the hub's cache leads to its ``blobs``; any other that leads out of the folder is refused."""
    at, home = file.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (at.is_relative_to(home) or at.is_relative_to(blobs)):
        raise NotKnown(f"{file.name} is a link out of its folder; copy the file, or {ELSE}")


def _differences(model: ModelFacts, stored: CheckpointFacts | None) -> Iterator[str]:
    """Where the files hold other shapes than the config makes. Names are the library's business: it maps old ones."""
    if stored is None:
        return
    yield from (f"{problem.file} {problem.what}" for problem in stored.problems[:3])
    shapes = {param.name: param.shape for param in model.params}
    wrong = [one for one in stored.tensors if one.key in shapes and one.shape != shapes[one.key]]
    for tensor in wrong[:3]:
        by = f"{shapes[tensor.key]} by {CONFIG}"
        yield f"{tensor.key} is {tensor.shape} in the file, and {by}: they belong to two models"


def _by_headers(stored: CheckpointFacts | None, kind: str, name: str | None, raw: Mapping[str, Any]) -> DescribedModel:
    what = f"no table says what {name or 'a model'} of the type {kind!r:.60} is"
    what = what if kind else f"{CONFIG} has no model_type"
    if stored is None or not stored.tensors:
        problems = "".join(f" ({one.file} {one.what})" for one in (stored.problems[:1] if stored else ()))
        beside = f"there are no headers of safetensors files beside it{problems}"
        raise NotKnown(f"{what}, and {beside}; fetch {SINGLE}, or {ELSE}")
    if raw.get("quantization_config"):
        raise NotKnown(f"{what}, and its weights are quantised; {ELSE}")
    words = (
        f"{what}: names, shapes and dtypes are those of {stored.files[0].name if stored.files else INDEX}; classes of "
        f"modules, ties and buffers are not known, so that blocks are named by their place; {ELSE}, to have them"
    )
    damaged = tuple(f"{one.file} {one.what}" for one in stored.problems[:3])
    return DescribedModel(model=header_facts(stored.tensors), words=(words, *damaged))


def header_facts(tensors: tuple[StoredTensor, ...]) -> ModelFacts:
    """A model of which the tensors are known: a module per part of a name, whose class is its place."""
    ordered = sorted(tensors, key=lambda one: [(int(p) if p.isdecimal() else -1, p) for p in one.key.split(".")])
    paths: dict[str, None] = {"": None}
    for tensor in ordered:
        parts = tensor.key.split(".")[:-1]
        if len(parts) > DEEPEST or len(tensor.key) > LONGEST_NAME:
            raise NotKnown(f"{tensor.key:.60}... is no name of a parameter; {ELSE}")
        paths |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    children = Counter(path.rpartition(".")[0] for path in paths if path)
    numbered = Counter(path.rpartition(".")[0] for path in paths if path.rpartition(".")[2].isdecimal())
    classes: dict[ClassFact, int] = {}
    modules = []
    for path in paths:
        is_list = bool(children[path]) and children[path] == numbered[path]
        place = re.sub(r"(?<![^.])\d+(?![^.])", "*", path) or "model"
        fact = (
            ClassFact(name="ModuleList", module="torch.nn.modules.container", has_forward=False)
            if is_list
            else ClassFact(name=place, module="")
        )
        modules.append(ModuleFact(path=path, cls=classes.setdefault(fact, len(classes))))
    params = tuple(ParamFact(name=one.key, shape=one.shape, dtype=one.dtype) for one in ordered)
    return ModelFacts(classes=tuple(classes), modules=tuple(modules), params=params)


def checkpoint_of(stored: CheckpointFacts, how: LoadWeights, model: ModelFacts) -> CheckpointFacts:
    """The checkpoint, renamed as asked. Raises ``NotKnown`` where its names are not the model's."""
    if unreadable(how):
        return stored
    names = state_names(model)
    strange = next((one.key for one in stored.tensors if renamed(how, one.key) not in names), None)
    if strange is not None:
        what = f"{strange} of {stored.path} is no name of the model, and where it belongs its library knows"
        raise NotKnown(f"{what}; {ELSE}")
    return evolve(stored, rename=how.rename)


# --- a tree as lines -------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Tensor:
    """A parameter (``weight = [hidden_size]``) or a buffer (``inv_freq ~ [dim]; 'float32'; False``)."""

    name: str
    buffer: bool
    shape: str
    dtype: str = "dtype"
    flag: str = "True"
    """Whether a parameter is trained, and a buffer is saved."""
    there: str = "True"


@frozen(kw_only=True)
class SourceModule:
    """A module, ``name[count]: Class ? condition``, above what is in it; with a count it holds its one child so often.

    A class is a name, ``act(field)``, which is an activation that a field names, or an expression that gives a name.
    """

    name: str
    cls: str
    count: str = ""
    there: str = "True"
    tensors: tuple[Tensor, ...] = ()
    children: tuple[SourceModule, ...] = ()


_TENSOR = re.compile(r"(\w+) ([=~]) (\[[^;?]*\])(?:; ([^;?]+?))?(?:; ([^;?]+?))?(?: \? (.+))?")
_MODULE = re.compile(r"(?:(\w+)(?:\[(.+)\])?: )?([^?]+?)(?: \? (.+))?")


def parsed(lines: Sequence[str]) -> SourceModule:
    """The tree in lines, which are indented by one blank for each module around them."""
    return _node(lines, 0)[0]


def _node(lines: Sequence[str], at: int) -> tuple[SourceModule, int]:
    depth = _depth(lines[at])
    said = _MODULE.fullmatch(lines[at][depth:])
    if said is None:
        raise ValueError(f"{lines[at]!r} is no line of a table")
    name, count, cls, there = said.groups()
    tensors: list[Tensor] = []
    children: list[SourceModule] = []
    at += 1
    while at < len(lines) and _depth(lines[at]) > depth:
        if tensor := _TENSOR.fullmatch(lines[at].strip()):
            tensors.append(_tensor(*tensor.groups()))
            at += 1
        else:
            child, at = _node(lines, at)
            children.append(child)
    return SourceModule(
        name=name or "",
        cls=cls,
        count=count or "",
        there=there or "True",
        tensors=tuple(tensors),
        children=tuple(children),
    ), at


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _tensor(name: str, sign: str, shape: str, dtype: str | None, flag: str | None, there: str | None) -> Tensor:
    usual = dtype or "dtype", flag or "True", there or "True"
    return Tensor(name=name, buffer=sign == "~", shape=shape, dtype=usual[0], flag=usual[1], there=usual[2])


# --- a tree as facts -------------------------------------------------------------------------------------------------


def model_facts(
    table: Mapping[str, Any], fields: Mapping[str, Any], dtype: str, common: Mapping[str, Any]
) -> ModelFacts:
    """Facts of the model whose class has this table, in this dtype. Raises ``Unfit`` for values that no model has.

    ``common`` has the activations, and the classes of torch and others that many types share.
    """
    fields = {**fields, "dtype": dtype}
    classes = {**common["classes"], **table["classes"]}
    grown = _Grown(fields=fields, classes=classes, module=table["module"], activations=common["activations"])
    grown.add(parsed(table["tree"]), "", ())
    whole = {name: _tuples(_chosen(value, fields)) for name, value in table["whole"].items()}
    ties = [tuple(group) for group, there in table["ties"] if evaluate(there, fields)]
    place = {param.name: number for number, param in enumerate(grown.params)}
    return ModelFacts(
        classes=tuple(grown.seen),
        modules=tuple(grown.modules),
        params=tuple(grown.params),
        buffers=tuple(grown.buffers),
        ties=tuple(sorted(ties, key=lambda group: place.get(group[0], len(place)))),
        architecture=architecture(fields),
        **whole,
    )


def _chosen(value: Any, fields: Mapping[str, Any]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return next(held for there, held in value["when"] if evaluate(there, fields))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@define(kw_only=True)
class _Grown:
    """What has grown so far."""

    fields: Mapping[str, Any]
    classes: Mapping[str, Mapping[str, Any]]
    """Name of a class to its facts, but for those that are as usual."""
    module: str
    """Where the classes are whose module is not said."""
    activations: Mapping[str, str]
    seen: dict[ClassFact, int] = field(factory=dict)
    modules: list[ModuleFact] = field(factory=list)
    params: list[ParamFact] = field(factory=list)
    buffers: list[BufferFact] = field(factory=list)

    def add(self, node: SourceModule, path: str, counts: tuple[int, ...]) -> None:
        """Add a module with all that is in it, if it is there."""
        if not evaluate(node.there, self.fields, counts):
            return
        fact = self._class(node.cls, counts)
        self.modules.append(ModuleFact(path=path, cls=self.seen.setdefault(fact, len(self.seen))))
        if len(self.modules) > MOST_ITEMS:
            raise Unfit(f"the model has more than {MOST_ITEMS:,} modules")
        prefix = path + "." if path else ""
        for tensor in node.tensors:
            if evaluate(tensor.there, self.fields, counts):
                self._add_tensor(tensor, prefix, counts)
        if node.count:
            for index in range(self._count(node.count, counts)):
                self.add(node.children[0], f"{prefix}{index}", (*counts, index))
        else:
            for child in node.children:
                self.add(child, prefix + child.name, counts)

    def _class(self, said: str, counts: tuple[int, ...]) -> ClassFact:
        name = said
        if said.startswith("act("):
            given = evaluate(said[4:-1], self.fields, counts)
            if given not in self.activations:
                raise Unfit(f"{said[4:-1]} is {given!r:.60}; give one of {', '.join(sorted(self.activations))}")
            name = self.activations[given]
        elif not said.isidentifier():
            name = evaluate(said, self.fields, counts)
        fact = self.classes[name]
        return ClassFact(name=name, **{"module": self.module, **fact, "mro": tuple(fact.get("mro", ()))})

    def _count(self, expression: str, counts: tuple[int, ...]) -> int:
        count = evaluate(expression, self.fields, counts)
        if type(count) is not int or not 0 <= count <= MOST_ITEMS:
            raise Unfit(f"{expression} is {count!r:.40}; a number of modules is needed")
        return count

    def _add_tensor(self, tensor: Tensor, prefix: str, counts: tuple[int, ...]) -> None:
        shape = tuple(evaluate(tensor.shape, self.fields, counts))
        if not all(type(size) is int and 0 <= size <= LARGEST for size in shape):
            said = ", ".join(f"{size!r:.40}" for size in shape)
            raise Unfit(f"{tensor.shape} is [{said}]; sizes of a tensor are needed")
        dtype, flag = (evaluate(one, self.fields, counts) for one in (tensor.dtype, tensor.flag))
        if tensor.buffer:
            self.buffers.append(BufferFact(name=prefix + tensor.name, shape=shape, dtype=dtype, persistent=flag))
        else:
            self.params.append(ParamFact(name=prefix + tensor.name, shape=shape, dtype=dtype, requires_grad=flag))
