"""Rules and errors as pages: rules from ``RULES``, the ids of other findings from where the source makes them."""

from __future__ import annotations

import tomllib
from itertools import groupby

from prepkit.findings import Finding
from prepkit.render.text import NOTHING_GOES_ON
from prepkit.rules import LAW, check
from prepkit.rules.rule import Moment, Rule
from tests.docs.blocks import ROOT
from tests.support.counterexamples import COUNTEREXAMPLES

ADVICE = tomllib.loads((ROOT / "tests/docs/advice.toml").read_text())
"""Exception to ``when`` it is raised, and what to do ``then``."""

_RULES_HEAD = """# Rules

A rule is a value: what has to hold, at which moments that is asked, and what to do where it does not.
`prepkit.rules.LAW` holds all of them, in the order in which findings are reported; `prepkit rules ID` prints one. An
**error** refuses the plan or the call, a **warning** is written into the plan or reported once on rank 0, a **note**
asks nothing. An error that can be overridden is accepted with `overrides = ["its.id"]` in the config, and recorded in
the plan or the attestation. Where a rule has a repair, `Rule.repair` is the fix as a function from config to config.

*Source* names the rows of the behaviour reference, the users' reports (`pain`) or the library functions that a rule
comes from. The example below a rule is a finding of it.
"""

_RUN_HEAD = """These rules are about prepared objects, whoever has prepared them. One look gathers what the rules that
are due at a moment need, with one exchange over the ranks; each invariant is one row, asked at all of its moments.
Errors raise `RunRefused` in a loop of prepkit's, and are findings of `pk.audit` and `pk.watch`
([how](../howto/audit.md)).
"""

_ERRORS_HEAD = """# Errors

What prepkit raises, and the findings that a call tells by itself. `PlanRejected.findings` and `RunRefused.findings`
hold every finding; each has an id, a severity, a place, what is wrong and what to type. Findings that a look makes are
in the [rules reference](rules.md).
"""

_REFUSALS_HEAD = """Each is about a file, a call, a model or a step of a plan, and is told by the call that meets it.
It cannot be overridden unless it says so. `prepkit rules ID` prints one; the finding itself says what is wrong, where,
and what to type for its case."""


def rules_page() -> str:
    """Every rule by its subject, the first word of its id."""
    lines = [_RULES_HEAD]
    ordered = sorted(
        (rule for rule in LAW if not rule.told_by), key=lambda rule: rule.id.partition(".")[0]
    )  # stable: reporting order stays
    subjects = [(name, tuple(rules)) for name, rules in groupby(ordered, lambda rule: rule.id.partition(".")[0])]
    counts = ", ".join(f"[{name}](#{name}) {len(rules)}" for name, rules in subjects)
    lines += [f"{len(ordered)} rules: {counts}.", ""]
    for name, rules in subjects:
        lines += [f"## {name}", ""]
        if name == "run":
            lines += [_RUN_HEAD, _moments(rules), ""]
        lines += map(_rule, rules)
    return "\n".join(lines).rstrip() + "\n"


_COLUMNS = (
    (Moment.APPLY, "apply"),
    (Moment.FIRST_STEP, "first step"),
    (Moment.STEP, "each step"),
    (Moment.DUE, "due"),
    (Moment.SAVE, "save"),
    (Moment.LOAD, "load"),
    (Moment.RESUME, "resume"),
    (Moment.AUDIT, "audit"),
    (Moment.DRIFT, "drift"),
)
"""Moments at which prepared objects are looked at, as columns; *due* are the steps 1, 2, 4, 8 ... and each 64th."""


def _moments(rules: tuple[Rule, ...]) -> str:
    """One row for each invariant, with its moments."""
    columns = [(moment, word) for moment, word in _COLUMNS if any(moment in rule.at for rule in rules)]
    lines = [f"| invariant | rule | {' | '.join(word for _, word in columns)} |", "|---" * (2 + len(columns)) + "|"]
    for rule in rules:
        marks = " | ".join(rule.severity.value if moment in rule.at else "" for moment, _ in columns)
        lines.append(f"| {_plain(rule.summary)} | [{rule.id}](#{rule.id.replace('.', '')}) | {marks} |")
    return "\n".join(lines)


def _rule(rule: Rule) -> str:
    override = "can be overridden" if rule.overridable else f"cannot be overridden: {rule.stops or NOTHING_GOES_ON}"
    repair = ", has a repair" if rule.repair else ""
    milder = f", or a warning {rule.milder}" if rule.milder else ""
    lines = [f"### {rule.id}", "", f"{rule.severity.value.capitalize()}{milder}; {override}{repair}.", ""]
    lines += [f"- Holds: {_plain(rule.summary)}", f"- Fix: {_plain(rule.fix)}"]
    if rule.at != (Moment.PLAN,):
        lines.append(f"- Asked: {'; '.join(_plain(moment.value) for moment in rule.at)}")
    if rule.needs:
        lines.append(f"- Needs: {'; '.join(need.value for need in rule.needs)}")
    if rule.cost:
        lines.append(f"- Costs: {rule.cost}")
    if rule.source:
        lines.append(f"- Source: {', '.join(rule.source)}")
    if rule.id in COUNTEREXAMPLES:
        first = _example(rule)
        lines += ["", "```text", f"{first.where}: {first.what}", f"fix: {first.fix}", "```"]
    return "\n".join((*lines, ""))


def _plain(text: str) -> str:
    """As Markdown that shows the text: stars and angle brackets outside code would vanish."""
    parts = text.split("`")
    return "`".join(
        part if at % 2 else part.replace("*", r"\*").replace("<", r"\<").replace("_", r"\_")
        for at, part in enumerate(parts)
    )


def _example(rule: Rule) -> Finding:
    cfg, facts = COUNTEREXAMPLES[rule.id]()
    return next(finding for finding in check(cfg, facts, (rule,)) if finding.rule == rule.id)


def errors_page() -> str:
    """Exceptions, then the ids of findings that no rule has."""
    lines = [_ERRORS_HEAD, "## Exceptions", ""]
    for name, row in ADVICE.items():
        lines += [f"### {name}", "", row["when"], "", f"**What to do.** {row['then']}", ""]
    lines += ["## Findings of calls", "", _REFUSALS_HEAD, ""]
    for refusal in sorted((rule for rule in LAW if rule.told_by), key=lambda refusal: refusal.id):
        lines += [f"### {refusal.id}", "", f"- Holds otherwise: {_plain(refusal.summary)}"]
        override = ("- Can be overridden",) if refusal.overridable else ()
        lines += [f"- What to do: {_plain(refusal.fix)}", f"- Met in: {refusal.told_by}", *override, ""]
    return "\n".join(lines).rstrip() + "\n"
