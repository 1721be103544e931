"""Configuration and steps as pages, from the source: docstrings of fields are not there at run time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from attrs import frozen

import prepkit
from prepkit.steps import Step
from tests.docs.blocks import ROOT


@frozen(kw_only=True)
class Field:
    """One field of a class as its source has it."""

    name: str
    type: str
    default: str
    """As typed; empty: the field has to be given."""
    text: str


@frozen(kw_only=True)
class Class:
    """A class of the vocabulary."""

    name: str
    text: str
    fields: tuple[Field, ...]
    words: tuple[tuple[str, str], ...] = ()
    """Members of an enumeration and their values."""


@frozen(kw_only=True)
class Source:
    """One file: what it is about, its classes, and the unions that it defines."""

    path: Path
    text: str
    classes: tuple[Class, ...]
    unions: tuple[tuple[str, tuple[str, ...]], ...]


def read(path: Path) -> Source:
    """What a file of ``prepkit/config`` or ``prepkit/steps`` defines."""
    tree = ast.parse(path.read_text())
    return Source(
        path=path,
        text=ast.get_docstring(tree) or "",
        classes=tuple(_class(node) for node in tree.body if isinstance(node, ast.ClassDef)),
        unions=tuple(_unions(tree)),
    )


def _class(node: ast.ClassDef) -> Class:
    fields: list[Field] = []
    words: list[tuple[str, str]] = []
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            docstring = after.value if isinstance(after, ast.Expr) else None
            text = docstring.value if isinstance(docstring, ast.Constant) and isinstance(docstring.value, str) else ""
            fields.append(Field(name=item.target.id, type=ast.unparse(item.annotation), default=_default(item.value),
                                text=" ".join(text.split())))  # fmt: skip
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            words.append((item.targets[0].id, str(ast.literal_eval(item.value))))
    text = ast.get_docstring(node) or ""
    return Class(name=node.name, text=text, fields=tuple(fields), words=tuple(words))


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        named = {word.arg: word.value for word in value.keywords}
        return _default(named.get("default", value.args[0] if value.args else None))
    return "" if value is None else ast.unparse(value)


def _unions(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = ast.unparse(node.value)
            if " | " in text:
                yield node.targets[0].id, tuple(text.split(" | "))
            elif text.startswith("Literal["):
                yield node.targets[0].id, (text,)


# --- text ----------------------------------------------------------------------------------------------------------


def code(text: str) -> str:
    """Docstring markup as Markdown: double backticks become single ones."""
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _type(text: str, known: dict[str, str]) -> str:
    """A type in words: its alternatives joined by "or", those that this page describes as links."""
    return " or ".join(f"[`{name}`](#{known[name]})" if name in known else f"`{name}`" for name in _parts(text))


def _parts(text: str) -> tuple[str, ...]:
    """The alternatives of a union or of a ``Literal``; bars inside brackets do not count."""
    tree = ast.parse(text, mode="eval").body
    if isinstance(tree, ast.BinOp):
        return (*_parts(ast.unparse(tree.left)), *_parts(ast.unparse(tree.right)))
    if isinstance(tree, ast.Subscript) and ast.unparse(tree.value) == "Literal":
        items = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        return tuple(ast.unparse(item).replace("'", '"') for item in items)
    return (text,)


def _section(kind: Class, known: dict[str, str], level: int = 3, place: str = "") -> str:
    lines = [f"{'#' * level} {kind.name}", "", *((f"`{place}`", "") if place else ()), code(kind.text), ""]
    if kind.fields:
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        for row in kind.fields:
            default = f"`{row.default}`" if row.default else "has to be given"
            text = code(row.text).replace("|", "\\|")
            lines.append(f"| `{row.name}` | {_type(row.type, known)} | {default} | {text} |")
        lines.append("")
    if kind.words:
        lines += [
            "| member | in a file |",
            "|---|---|",
            *(f"| `{kind.name}.{a}` | `{b!r}` |" for a, b in kind.words),
            "",
        ]
    return "\n".join(lines)


def _known(sources: tuple[Source, ...]) -> dict[str, str]:
    """Name to its anchor: classes, and unions."""
    names = [kind.name for source in sources for kind in source.classes]
    return {name: name.lower() for name in (*names, *(name for source in sources for name, _ in source.unions))}


# --- pages ---------------------------------------------------------------------------------------------------------

_SUBJECTS = (
    ("__init__", "The whole config"),
    ("engines", "Engines and the mesh of ranks"),
    ("precision", "Dtypes and float8 libraries"),
    ("blocks", "Which modules: units, recomputation, compilation"),
    ("weights", "Where weights come from"),
    ("optimizer", "Optimizers and clipping"),
    ("loaders", "Data loaders"),
    ("origin", "Where imported settings were written"),
)


_SPACES = ("data", "ddp", "fp8", "optim", "tp", "wrap")
_PLACES = {name: f"pk.{space}.{name}" for space in _SPACES for name in dir(getattr(prepkit, space))}
_PLACES |= {name: f"pk.{name}" for name in dir(prepkit)} | {"CompileOption": ""}
"""Public classes to how they are typed; options of a compiler are typed as a mapping."""


def config_page() -> str:
    """Every class and field that can be written into a config."""
    folder = ROOT / "prepkit/config"
    sources = {path.stem: read(path) for path in folder.glob("*.py") if path.stem != "field_docs"}
    missing = set(sources) ^ {name for name, _ in _SUBJECTS}
    assert not missing, f"give each file of prepkit/config a heading in tests/docs/classes.py: {sorted(missing)}"
    known = _known(tuple(sources.values()))
    lines = [_CONFIG_HEAD]
    for name, heading in _SUBJECTS:
        lines += [f"## {heading}", ""]
        for union, members in sources[name].unions:
            parts = _type(" | ".join(members), known)
            lines += [f'<a id="{union.lower()}"></a>**`{union}`** is {parts}.', ""]
        public = [kind for kind in sources[name].classes if kind.name in _PLACES]
        lines += [
            _section(kind, known, place=_PLACES[kind.name])
            for kind in sorted(public, key=lambda kind: kind.name != "Config")
        ]
    return "\n".join(lines).rstrip() + "\n"


_CONFIG_HEAD = """# Configuration

In Python the line under a heading is how the class is typed, after `import prepkit as pk`. In TOML, YAML and JSON a
class is its name, whatever the namespace, or a table with the name under `kind`; a class with its defaults may be its
bare name:

```toml
engine = "FSDP2"
accumulation = 4
clip = { kind = "ClipNorm", max_norm = 1.0 }

[precision]
kind = "BF16"
reduce_dtype = "float32"
```

A key that no class has, a value of the wrong type and a key that stands twice are findings with their place in the
file.
"""

_STEPS_HEAD = """# Steps

A plan is a sequence of these values. Each says what it does and when it fails; the `because` line that a plan prints
behind a step says why it stands there. Their names are tags in saved plans, and do not change within one format of
plan files.
"""


def steps_page() -> str:
    """Every kind of step, with what it does."""
    lines = [_STEPS_HEAD]
    steps = {kind.__name__ for kind in get_args(Step)}
    paths = sorted((ROOT / "prepkit/steps").glob("*.py"))
    for source in map(read, paths):
        kinds = [kind for kind in source.classes if kind.name in steps]
        if kinds:
            lines += [f"## {source.text.splitlines()[0].rstrip('.')}", ""]
            lines += [f"### {kind.name}\n\n{code(kind.text)}\n" for kind in kinds]
    return "\n".join(lines).rstrip() + "\n"
