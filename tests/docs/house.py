"""Parts of pages about the house: its layers as a picture in text, its rooms, and the versions that it stands on."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import takewhile
from typing import Any

from prepkit.predict import CHECKED
from tests.docs.blocks import ROOT

_TESTED = ("torch", "transformers", "deepspeed", "accelerate", "torchao", "bitsandbytes", "safetensors", "numpy")


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _source() -> str:
    return (ROOT / "pyproject.toml").read_text()


def layers() -> str:
    """The layers contract of ``pyproject.toml`` as boxes on each other, with the comment behind each line."""
    contract = next(
        contract
        for contract in _project()["tool"]["importlinter"]["contracts"]
        if contract["name"].startswith("Layers: ")
    )
    rows = []
    for layer in contract["layers"]:
        comment = re.search(rf'"{re.escape(layer)}",\s*# (.*)', _source())
        rows.append((layer.replace("prepkit.", ""), comment[1] if comment else ""))
    left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
    edge = f"+-{'-' * left}-+-{'-' * right}-+"
    lines = [edge]
    for name, comment in rows:
        lines += [f"| {name.ljust(left)} | {comment.ljust(right)} |", edge]
    return "\n".join(("```text", *lines, "```"))


def rooms() -> str:
    """Every room of the package and those of ``applying``, with the first line of its docstring."""
    lines = ["| room | what is in it |", "|---|---|"]
    for folder in (ROOT / "prepkit", ROOT / "prepkit/applying"):
        for path in sorted(folder.iterdir()):
            inside = path / "__init__.py" if path.is_dir() else path
            if inside.suffix == ".py" and inside.exists() and not path.name.startswith("__"):
                text = ast.get_docstring(ast.parse(inside.read_text())) or ""
                first = " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
                lines.append(f"| `{path.relative_to(ROOT)}{'/' * path.is_dir()}` | {first} |")
    return "\n".join(lines)


def tested_versions() -> str:
    """What ``constraints.txt`` pins: the suite runs with these."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    return "\n".join(("| library | version that the suite runs with |", "|---|---|",
                      *(f"| {name} | {pins[name]} |" for name in _TESTED)))  # fmt: skip


def required_versions() -> str:
    """What ``pyproject.toml`` asks for."""
    project = _project()["project"]
    rows = [("python", project["requires-python"])]
    names = {"": project["dependencies"], **project["optional-dependencies"]}
    lines = ["| part | needs |", "|---|---|", f"| Python | `{rows[0][1]}` |"]
    for extra, needs in names.items():
        part = f"`prepkit[{extra}]`" if extra else "`prepkit`"
        lines.append(f"| {part} | {', '.join(f'`{need}`' for need in needs)} |")
    return "\n".join(lines)


def checked_predictions() -> str:
    """``prepkit.predict.CHECKED`` as a table."""
    lines = ["| engine | compared byte for byte with |", "|---|---|"]
    for engine, libraries in sorted(CHECKED.items()):
        releases_text = "; ".join(f"{name} {', '.join(releases)}" for name, releases in libraries.items())
        lines.append(f"| {engine} | {releases_text} |")
    return "\n".join(lines)


def adding() -> str:
    """The table of ``CONTRIBUTING.md`` that says what to edit for one more of a kind."""
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| to add |"))
    rows = takewhile(lambda line: line.startswith("|"), lines[start:])
    return "\n".join(rows)


def model_tables() -> str:
    """The types with tables, as Markdown: how many, and which classes of each."""
    import json

    held = {
        file.stem: list(json.loads(file.read_text())["models"])
        for file in sorted((ROOT / "prepkit" / "formats" / "models" / "data").glob("*.json"))
        if file.stem != "common"
    }
    classes = sorted((f"`{name}`" for names in held.values() for name in names), key=str.lower)
    return f"{len(held)} types of models: {', '.join(classes)}."
