"""Rules and errors as pages: rules from ``RULES``, the ids of other findings from where the source makes them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from itertools import groupby

from prepkit.findings import Finding
from prepkit.rules import LATE_RULES, RULES, check
from prepkit.rules.rule import Rule
from prepkit.testing import COUNTEREXAMPLES
from tests.docs.blocks import ROOT

ADVICE = tomllib.loads((ROOT / "tests/docs/advice.toml").read_text())
"""``exceptions`` and ``findings``: name or id to ``when`` it is raised, and what to do ``then``."""

_RULES_HEAD = """# Rules

A rule is a value: what has to hold between config and facts, and what to do where it does not. `pk.RULES` holds all
of them, in the order in which findings are reported; `prepkit rules ID` prints one. An **error** refuses the plan, a
**warning** is written into it. An error that can be overridden is accepted with `overrides = ["its.id"]` in the
config, and recorded in the plan. Where a rule has a repair, `Rule.repair` is the fix as a function from config to
config.

*Source* names the rows of the behaviour reference, the users' reports (`pain`) or the library functions that a rule
comes from. The example below each rule is what it says of the counterexample in `prepkit.testing.COUNTEREXAMPLES`.
"""

_ERRORS_HEAD = """# Errors

What prepkit raises, and the findings that come from no rule. `PlanRejected.findings` holds every finding; each has an
id, a severity, a place, what is wrong and what to type. Findings of rules are in the [rules reference](rules.md).
"""


def rules_page() -> str:
    """Every rule by its subject, the first word of its id."""
    lines = [_RULES_HEAD]
    ordered = sorted((*RULES, *LATE_RULES), key=lambda rule: rule.id.partition(".")[0])  # stable: reporting order stays
    subjects = [(name, tuple(rules)) for name, rules in groupby(ordered, lambda rule: rule.id.partition(".")[0])]
    lines += [
        f"{len(ordered)} rules: " + ", ".join(f"[{name}](#{name}) {len(rules)}" for name, rules in subjects) + ".",
        "",
    ]
    for name, rules in subjects:
        lines += [f"## {name}", "", *map(_rule, rules)]
    return "\n".join(lines).rstrip() + "\n"


def _rule(rule: Rule) -> str:
    override = "can be overridden" if rule.overridable else "cannot be overridden: no plan exists unless it holds"
    repair = ", has a repair" if rule.repair else ""
    lines = [f"### {rule.id}", "", f"{rule.severity.value.capitalize()}, {override}{repair}.", ""]
    lines += [f"- Holds: {_plain(rule.summary)}", f"- Fix: {_plain(rule.fix)}"]
    if rule.source:
        lines.append(f"- Source: {', '.join(rule.source)}")
    if rule.id in COUNTEREXAMPLES:
        first = _example(rule)
        lines += ["", "```text", f"{first.where}: {first.what}", f"fix: {first.fix}", "```"]
    else:
        lines.append(f"- Asked: {_LATER[rule.id.partition('.')[0]]}")
    return "\n".join((*lines, ""))


_LATER = {
    "memory": 'once there is a plan; `pk.fits(plan, "1MiB")` gives its numbers for any plan.',
    "first-step": "by the first `ready.step()` that ends a window, before the optimizer acts.",
}
"""Subject of the rules that config and facts alone cannot break, to when they are asked."""


def _plain(text: str) -> str:
    """As Markdown that shows the text: stars and angle brackets outside code would vanish."""
    parts = text.split("`")
    return "`".join(
        part if at % 2 else part.replace("*", r"\*").replace("<", r"\<").replace("_", r"\_")
        for at, part in enumerate(parts)
    )


def _example(rule: Rule) -> Finding:
    cfg, facts = COUNTEREXAMPLES[rule.id]()
    return next(one for one in check(cfg, facts, (rule,)) if one.rule == rule.id)


def errors_page() -> str:
    """Exceptions, then the ids of findings that no rule has."""
    wrong = {*ids()} ^ set(ADVICE["findings"])
    assert not wrong, f"tests/docs/advice.toml and the source differ in {sorted(wrong)}"
    lines = [_ERRORS_HEAD, "## Exceptions", ""]
    lines += [_advice(*item) for item in ADVICE["exceptions"].items()]
    lines += ["## Findings without a rule", ""]
    lines += [_advice(*item) for item in sorted(ADVICE["findings"].items())]
    return "\n".join(lines).rstrip() + "\n"


def _advice(name: str, row: dict[str, str]) -> str:
    return f"### {name}\n\n{row['when']}\n\n**What to do.** {row['then']}\n"


# --- ids in the source ---------------------------------------------------------------------------------------------

_FULL = re.compile(r"(cli|codec|config|diff|model|optimizer|plan)\.[a-z]+(-[a-z]+)+")
"""An id that the source writes out. Paths such as ``config.optimizer`` have no hyphen."""
_PREFIXED = {
    "codec": ("codec", ("refusal", "MisfitError", "flaw")),
    "importers": ("config", ("_refuse", "_finding")),
}
"""Folder to the prefix that its ids get, and to the functions whose first argument is the rest of an id."""


def ids() -> Iterator[str]:
    """Ids that findings have and no rule has, as often as the source names them."""
    ours = {rule.id for rule in (*RULES, *LATE_RULES)}
    for path in sorted((ROOT / "prepkit").rglob("*.py")):
        folder = path.relative_to(ROOT / "prepkit").parts[0]
        if folder in ("rules", "testing", "render"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FULL.fullmatch(node.value):
                if node.value not in ours:
                    yield node.value
            elif isinstance(node, ast.Call) and folder in _PREFIXED and node.args:
                prefix, makers = _PREFIXED[folder]
                first = node.args[0]
                if ast.unparse(node.func) in makers and isinstance(first, ast.Constant):
                    yield f"{prefix}.{first.value}"
