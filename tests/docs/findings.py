"""Rules and errors as pages: rules from ``RULES``, the ids of other findings from where the source makes them."""

from __future__ import annotations

import tomllib
from itertools import groupby

from prepkit.auditing import AUDIT_RULES
from prepkit.auditing.rule import AuditRule
from prepkit.findings import Finding
from prepkit.findings.refusals import REFUSALS
from prepkit.rules import LATE_RULES, RULES, check
from prepkit.rules.rule import Rule
from prepkit.testing import COUNTEREXAMPLES
from tests.docs.blocks import ROOT

ADVICE = tomllib.loads((ROOT / "tests/docs/advice.toml").read_text())
"""Exception to ``when`` it is raised, and what to do ``then``."""

_RULES_HEAD = """# Rules

A rule is a value: what has to hold between config and facts, and what to do where it does not. `pk.RULES` holds all
of them, in the order in which findings are reported; `prepkit rules ID` prints one. An **error** refuses the plan, a
**warning** is written into it. An error that can be overridden is accepted with `overrides = ["its.id"]` in the
config, and recorded in the plan. Where a rule has a repair, `Rule.repair` is the fix as a function from config to
config.

*Source* names the rows of the behaviour reference, the users' reports (`pain`) or the library functions that a rule
comes from. The example below each rule is what it says of the counterexample in `prepkit.testing.COUNTEREXAMPLES`.
"""

_AUDIT_HEAD = f"""{len(AUDIT_RULES)} more rules are about a model that something else has prepared, asked of what stands
there before its first step, by `pk.audit` and `prepkit audit`: [how](../howto/audit.md). They refuse no plan,
so that none is overridden."""

_ERRORS_HEAD = """# Errors

What prepkit raises, and the findings that come from no rule. `PlanRejected.findings` holds every finding; each has an
id, a severity, a place, what is wrong and what to type. Findings of rules are in the [rules reference](rules.md).
"""

_REFUSALS_HEAD = """Each is about a file, a call or a model, not about a config, and cannot be overridden. `prepkit
rules ID` prints one; the finding itself says what is wrong, where, and what to type for its case."""


def rules_page() -> str:
    """Every rule by its subject, the first word of its id."""
    lines = [_RULES_HEAD]
    ordered = sorted((*RULES, *LATE_RULES), key=lambda rule: rule.id.partition(".")[0])  # stable: reporting order stays
    subjects = [(name, tuple(rules)) for name, rules in groupby(ordered, lambda rule: rule.id.partition(".")[0])]
    counts = ", ".join(f"[{name}](#{name}) {len(rules)}" for name, rules in subjects)
    lines += [f"{len(ordered)} rules: {counts}.", ""]
    for name, rules in subjects:
        lines += [f"## {name}", "", *map(_rule, rules)]
    lines += ["## audit", "", _AUDIT_HEAD, "", *map(_audit_rule, AUDIT_RULES)]
    return "\n".join(lines).rstrip() + "\n"


def _audit_rule(rule: AuditRule) -> str:
    lines = [f"### {rule.id}", "", f"{rule.severity.value.capitalize()}.", ""]
    lines += [f"- Holds: {_plain(rule.summary)}", f"- Fix: {_plain(rule.fix)}"]
    return "\n".join((*lines, *((f"- Source: {', '.join(rule.source)}",) if rule.source else ()), ""))


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
    "forward": "by `build_plan(..., example=pk.Example(batch))` or `pk.foreign_uses(plan, model, batch)`.",
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
    return next(finding for finding in check(cfg, facts, (rule,)) if finding.rule == rule.id)


def errors_page() -> str:
    """Exceptions, then the ids of findings that no rule has."""
    lines = [_ERRORS_HEAD, "## Exceptions", ""]
    for name, row in ADVICE.items():
        lines += [f"### {name}", "", row["when"], "", f"**What to do.** {row['then']}", ""]
    lines += ["## Findings without a rule", "", _REFUSALS_HEAD, ""]
    for refusal in sorted(REFUSALS, key=lambda refusal: refusal.id):
        lines += [f"### {refusal.id}", "", f"- Holds otherwise: {_plain(refusal.summary)}"]
        lines += [f"- What to do: {_plain(refusal.fix)}", f"- Met in: {refusal.raised_by}", ""]
    return "\n".join(lines).rstrip() + "\n"
