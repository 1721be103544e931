"""The behaviour reference as a page, and the rows in which prepkit deviates on purpose."""

from __future__ import annotations

import re
import tomllib
from itertools import groupby

from tests.docs.blocks import ROOT
from tests.support.behaviour_rows import ROWS
from tests.support.behaviour_rows.settings import SETTINGS_OF

REFERENCE: dict[str, str] = tomllib.loads((ROOT / "tests/support/behaviour_rows/reference.toml").read_text())
"""Row to what accelerate does there."""

AREAS: dict[str, str] = {
    "ST": "Start-up facts",
    "PR": "The public call",
    "BK": "Registries of prepared objects",
    "DM": "Device maps",
    "AMP": "Autocast",
    "TE": "TransformerEngine",
    "Q": "Quantised models",
    "PL": "Placement",
    "EV": "Evaluation",
    "DDP": "DDP",
    "MC": "Several CPU processes",
    "TP": "Tensor parallelism",
    "FR": "FSDP2 through the wrong call",
    "F1": "FSDP1",
    "XL": "XLA",
    "CM": "Compilation",
    "P2": "FSDP2: around the model",
    "M2": "FSDP2: the model",
    "DS": "DeepSpeed",
    "DP": "DeepSpeed's plugin",
    "HC": "DeepSpeed's config as transformers reads it",
    "H": "Helpers",
    "W": "Optimizer, scheduler and accumulation",
    "DL": "Data loaders",
    "PC": "The mesh",
    "X": "What runs before the engine",
    "K": "Settings",
    "SS": "Changes of accelerate since 1.8",
    "G": "Defects of accelerate",
}
"""Area of an id to its heading."""

_HEAD = f"""# Behaviour reference

What accelerate 1.15 does in each branch of preparing a model, and what prepkit does there. `prepkit show plan.json
--sources` and `pk.show(plan, sources=True)` print these ids beside the steps of a plan; rules have them as their
source. {len(ROWS)} rows, each with an answer that a test holds.

In the second column *today* is accelerate 1.15 and *before* is 1.8. In the third, a sentence is the name of the test
that shows it; names in `code` are [rules](rules.md) and [errors](errors.md), [steps](steps.md) and
[settings](config.md). Rows where prepkit deviates on purpose are also on [a page of their own](../deviations.md).
"""


def page() -> str:
    """Every row by area."""
    lines = [_HEAD]
    ordered = sorted(ROWS, key=lambda row: list(AREAS).index(area(row)))
    for name, rows in groupby(ordered, area):
        lines += [f"## {name}: {AREAS[name]}", "", "| id | accelerate | prepkit |", "|---|---|---|"]
        lines += [f"| {row} | {_cell(REFERENCE[row])} | {_cell(_answer(row))} |" for row in rows]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def deviations() -> str:
    """Rows in which prepkit does otherwise on purpose, with the reason."""
    lines = [f"{len(deviating())} rows:", "", "| row | accelerate | prepkit, and why |", "|---|---|---|"]
    lines += [f"| {row} | {_cell(REFERENCE[row])} | {_cell(reason)} |" for row, reason in deviating().items()]
    return "\n".join(lines)


def deviating() -> dict[str, str]:
    """Row to the reasons for which prepkit does otherwise."""
    reasons = {row: "; ".join(_of("deviation", row)) for row in ROWS}
    return {row: reason for row, reason in reasons.items() if reason}


def area(row: str) -> str:
    """The letters of an id.

    >>> area("K-DS6"), area("F1-22")
    ('K', 'F1')
    """
    return row.partition("-")[0]


def _answer(row: str) -> str:
    """Deviations, tests as sentences, other rows, and the names of what answers."""
    said = list(_of("deviation", row))
    said += [_sentence(name) for name in _of("test", row)[: 1 if said else 2]]
    said += [f"as {other}" for other in _of("row", row)]
    names = [f"`{name}`" for name in (*_of("rule", row), *_of("step", row), *SETTINGS_OF.get(row, ()))]
    return "; ".join((*said, *names))


def _of(kind: str, row: str) -> list[str]:
    return [answer.removeprefix(f"{kind} ") for answer in ROWS[row] if answer.startswith(f"{kind} ")]


def _sentence(name: str) -> str:
    """The sentence that a test's name is.

    >>> _sentence("test_every_accelerator_gets_torch_s_scaler")
    "every accelerator gets torch's scaler"
    """
    return re.sub(r"\b(\w+) s\b", r"\1's", name.removeprefix("test_").replace("_", " "))


def _cell(text: str) -> str:
    """Text in a cell of a table: bars end no cell, and stars and brackets outside code are shown."""
    parts = text.replace("|", r"\|").split("`")
    return "`".join(
        part if at % 2 else part.replace("*", r"\*").replace("<", r"\<").replace("_", r"\_")
        for at, part in enumerate(parts)
    )
