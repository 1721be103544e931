"""From a model type's table and a config's fields to ``ModelFacts``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from prepkit.facts import BufferFact, ClassFact, ModelFacts, ModuleFact, ParamFact
from prepkit.formats.models.architecture import architecture
from prepkit.formats.models.config_fields import MOST_ITEMS
from prepkit.formats.models.expressions import LARGEST, Unfit, evaluate

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
