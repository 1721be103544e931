"""From a model type's table and a config's fields to ``ModelFacts``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from prepkit.facts import BufferFact, ClassFact, ModelFacts, ModuleFact, ParamFact
from prepkit.formats.models.architecture import architecture
from prepkit.formats.models.config_fields import MOST_ITEMS
from prepkit.formats.models.expressions import LARGEST, Unfit, evaluate


def model_facts(
    table: Mapping[str, Any], fields: Mapping[str, Any], dtype: str, activations: Mapping[str, Any]
) -> ModelFacts:
    """Facts of the model whose class has this table, in this dtype. Raises ``Unfit`` for values that no model has."""
    fields = {**fields, "dtype": dtype}
    grown = _Grown(fields=fields, table=table, activations=activations)
    grown.add(table["root"], "", ())
    whole = {name: _tuples(_chosen(value, fields)) for name, value in table["whole"].items()}
    ties = [tuple(group) for group, there in table["ties"] if evaluate(there, fields)]
    place = {param.name: number for number, param in enumerate(grown.params)}
    return ModelFacts(
        classes=tuple(grown.classes),
        modules=tuple(grown.modules),
        params=tuple(grown.params),
        buffers=tuple(grown.buffers),
        ties=tuple(sorted(ties, key=lambda group: place.get(group[0], len(place)))),
        architecture=architecture(fields),
        **whole,
    )


def class_fact(said: Mapping[str, Any]) -> ClassFact:
    """The class of a table's entry, which leaves out what is as usual."""
    return ClassFact(**(dict(said) | {"mro": tuple(said.get("mro", ()))}))


def _chosen(value: Any, fields: Mapping[str, Any]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return next(held for there, held in value["when"] if evaluate(there, fields))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


USUAL = ((1, "dtype"), (2, "True"), (3, "True"))
"""Place in a tensor's row, and what it is where the row ends before: dtype, flag, whether it is there."""


@define(kw_only=True)
class _Grown:
    """What has grown so far."""

    fields: Mapping[str, Any]
    table: Mapping[str, Any]
    activations: Mapping[str, Any]
    classes: dict[ClassFact, int] = field(factory=dict)
    modules: list[ModuleFact] = field(factory=list)
    params: list[ParamFact] = field(factory=list)
    buffers: list[BufferFact] = field(factory=list)

    def add(self, node: Mapping[str, Any], path: str, counts: tuple[int, ...]) -> None:
        """Add a module with all that is in it, if it is there."""
        if not evaluate(node.get("if", "True"), self.fields, counts):
            return
        fact = self._class(node["c"], counts)
        self.modules.append(ModuleFact(path=path, cls=self.classes.setdefault(fact, len(self.classes))))
        if len(self.modules) > MOST_ITEMS:
            raise Unfit(f"the model has more than {MOST_ITEMS:,} modules")
        prefix = path + "." if path else ""
        for name, row in node.get("p", {}).items():
            if (tensor := self._tensor(row, counts)) is not None:
                shape, dtype, flag = tensor
                self.params.append(ParamFact(name=prefix + name, shape=shape, dtype=dtype, requires_grad=flag))
        for name, row in node.get("b", {}).items():
            if (tensor := self._tensor(row, counts)) is not None:
                shape, dtype, flag = tensor
                self.buffers.append(BufferFact(name=prefix + name, shape=shape, dtype=dtype, persistent=flag))
        if "*" in node:
            for index in range(self._count(node["*"], counts)):
                self.add(node["n"], f"{prefix}{index}", (*counts, index))
        else:
            for name, child in node.get("n", {}).items():
                self.add(child, prefix + name, counts)

    def _class(self, said: int | str, counts: tuple[int, ...]) -> ClassFact:
        if isinstance(said, str) and said.startswith("act("):
            name = evaluate(said[4:-1], self.fields, counts)
            if name not in self.activations:
                raise Unfit(f"{said[4:-1]} is {name!r:.60}; give one of {', '.join(sorted(self.activations))}")
            return class_fact(self.activations[name])
        number = said if isinstance(said, int) else int(evaluate(said, self.fields, counts)[1:])
        return class_fact(self.table["classes"][number])

    def _count(self, expression: Any, counts: tuple[int, ...]) -> int:
        count = evaluate(expression, self.fields, counts)
        if type(count) is not int or not 0 <= count <= MOST_ITEMS:
            raise Unfit(f"{expression} is {count!r:.40}; a number of modules is needed")
        return count

    def _tensor(self, row: Sequence[Any], counts: tuple[int, ...]) -> tuple[tuple[int, ...], str, bool] | None:
        dims = row[0]
        dtype, flag, there = (row[place] if place < len(row) else usual for place, usual in USUAL)
        if not evaluate(there, self.fields, counts):
            return None
        shape = tuple(evaluate(dim, self.fields, counts) for dim in dims)
        for dim, size in zip(dims, shape, strict=True):
            if type(size) is not int or not 0 <= size <= LARGEST:
                raise Unfit(f"{dim} is {size!r:.40}; the size of a tensor is needed")
        return shape, evaluate(dtype, self.fields, counts), evaluate(flag, self.fields, counts)
