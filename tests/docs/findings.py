"""Rules and errors as pages: rules from ``RULES``, the ids of other findings from where the source makes them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from itertools import groupby

from prepkit.findings import Finding, Severity
from prepkit.render.text import NOTHING_GOES_ON
from prepkit.rules import LAW, check
from prepkit.rules.rule import Moment, Rule
from prepkit.rules.run import INVARIANTS
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
are due at a moment need, with one exchange over the ranks; each invariant is one row of
the table, with the rules that tell how it is broken and the moments at which they are asked.
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


_PAGES = {
    "config": ("Rules of a config", "They are asked before there is a plan; those about memory once there is one."),
    "run": ("Rules of prepared objects", _RUN_HEAD),
    "loop": (
        "Rules of the loop",
        "They are asked at each call of the loop ([events](../training-loop.md#what-follows-what)).",
    ),
    "checkpoints": ("Rules of checkpoints", "They are asked before a checkpoint is written or read."),
    "prove": ("Rules of a proof", "They are asked of a window that was replayed ([how](../howto/prove.md))."),
}
"""Page of the rules reference to its title and what it begins with."""
_ELSEWHERE = {"run": "run", "loop": "loop", "checkpoint": "checkpoints", "resume": "checkpoints", "prove": "prove"}
"""Subjects that are not on the page about configs."""


def link(rule: str) -> str:
    """The place of a rule, from a page beside the reference's."""
    return f"rules-{_ELSEWHERE.get(rule.partition('.')[0], 'config')}.md#{rule.replace('.', '')}"


def _subjects() -> list[tuple[str, tuple[Rule, ...]]]:
    """Every rule by its subject, the first word of its id."""
    asked = (rule for rule in LAW if not rule.told_by)
    ordered = sorted(asked, key=lambda rule: rule.id.partition(".")[0])  # stable: reporting order stays
    return [(name, tuple(rules)) for name, rules in groupby(ordered, lambda rule: rule.id.partition(".")[0])]


def rules_page() -> str:
    """What a rule is, and the names of all of them with the pages where they are."""
    subjects = _subjects()
    total = sum(len(rules) for _, rules in subjects)
    lines = [_RULES_HEAD, f"{total} rules on {len(_PAGES)} pages:", ""]
    for page, (title, _) in _PAGES.items():
        count = sum(len(rules) for name, rules in subjects if _ELSEWHERE.get(name, "config") == page)
        lines.append(f"- [{title}](rules-{page}.md): {count}")
    lines += ["", "| subject | rules |", "|---|---|"]
    for name, rules in subjects:
        said = ", ".join(f"[{rule.id.partition('.')[2]}]({link(rule.id)})" for rule in rules)
        lines.append(f"| {name} | {said} |")
    return "\n".join(lines).rstrip() + "\n"


def rules_of(page: str) -> Callable[[], str]:
    """What makes one page of the rules reference."""

    def made() -> str:
        title, head = _PAGES[page]
        subjects = [(name, rules) for name, rules in _subjects() if _ELSEWHERE.get(name, "config") == page]
        lines = [f"# {title}", "", head, ""]
        if page == "run":
            lines += [_moments(subjects[0][1]), ""]
        else:
            lines += [", ".join(f"[{name}](#{name}) {len(rules)}" for name, rules in subjects) + ".", ""]
        for name, rules in subjects:
            lines += [f"## {name}", "", *map(_rule, rules)]
        return "\n".join(lines).rstrip() + "\n"

    return made


PAGES = {f"reference/rules-{page}.md": rules_of(page) for page in _PAGES}


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
    """One row for each invariant, with the rules that tell how it is broken and the moments at which they are asked."""
    columns = [(moment, word) for moment, word in _COLUMNS if any(moment in rule.at for rule in rules)]
    lines = [f"| invariant | told by | {' | '.join(word for _, word in columns)} |", "|---" * (2 + len(columns)) + "|"]
    known = {rule.id: rule for rule in rules}
    told = [name for _, names in INVARIANTS for name in names]
    assert len(set(told)) == len(told), "a rule is about one invariant"
    rows = [(text, tuple(known[name] for name in names)) for text, names in INVARIANTS]
    rows += [(rule.summary, (rule,)) for rule in rules if rule.id not in told]
    for text, of in rows:
        marks = " | ".join(_worst([rule for rule in of if moment in rule.at]) for moment, _ in columns)
        names = ", ".join(f"[{rule.id.removeprefix('run.')}](#{rule.id.replace('.', '')})" for rule in of)
        lines.append(f"| {_plain(text)} | {names} | {marks} |")
    return "\n".join(lines)


def _worst(rules: list[Rule]) -> str:
    kinds = [rule.severity for rule in rules]
    return next((kind.value for kind in (Severity.ERROR, Severity.WARNING, Severity.NOTE) if kind in kinds), "")


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
