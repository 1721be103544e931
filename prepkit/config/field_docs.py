"""``help()`` of a config class shows what its fields mean: the string after each field, read when it is asked for."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from textwrap import dedent

from attrs import has


class FieldDocs:
    """Stands as the ``__doc__`` of a class: its own docstring, and a section ``Fields:`` with those of its fields.

    Python asks a descriptor for ``__doc__`` on every reading. So the source is parsed for ``help()`` and nothing else,
    and importing the class costs no more than it did.
    """

    def __init__(self, own: str | None) -> None:
        self.own = inspect.cleandoc(own or "")

    def __get__(self, instance: object, owner: type) -> str:
        lines = [f"    {name}: {text}" for name, text in field_docs(owner).items()]
        return "\n".join((self.own, "", "Fields:", *lines)) if lines else self.own


def field_docs(cls: type) -> dict[str, str]:
    """Field to the string that follows it in the class body, in their order; empty where the source is not at hand."""
    try:
        tree = ast.parse(dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    (definition,) = tree.body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    docs: dict[str, str] = {}
    for statement, following in pairwise(body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
            case _:
                pass
    return docs


def show_fields(names: dict[str, object]) -> None:
    """Gives every class of prepkit's config among these names a docstring with its fields."""
    for value in names.values():
        if isinstance(value, type) and value.__module__.startswith("prepkit.config") and has(value):
            value.__doc__ = FieldDocs(value.__doc__)  # type: ignore[assignment]
