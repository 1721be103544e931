"""A team's rules as files: thresholds over what a plan says in TOML, and ``Rule``s in Python."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from prepkit import codec
from prepkit.codec import field_types
from prepkit.codec.languages import TAG
from prepkit.codec.text import shown
from prepkit.facts import parse_bytes
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.findings.text import in_bytes, near
from prepkit.formats.exceptions import Exempt, sort
from prepkit.formats.importers.positions import positions
from prepkit.formats.importers.source import read
from prepkit.formats.places import FilePlace, place_of
from prepkit.plan import Plan
from prepkit.predict.said import BYTES, CONFIG, NUMBERS, TELLS, WHATS, every, impossible, said
from prepkit.rules import by_id, found
from prepkit.rules.rule import Moment, Rule

MOST = 1_000
"""Rules and exceptions of one file."""
LARGEST = 2**20
"""Bytes of one policy."""
_TABLES = {"deny": Severity.ERROR, "warn": Severity.WARNING}


def _same(value: Any, wanted: Any) -> bool:
    """Equal as JSON has it, where ``true`` is not 1."""
    return isinstance(value, bool) is isinstance(wanted, bool) and bool(value == wanted)


_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "above": lambda value, limit: value > limit,
    "below": lambda value, limit: value < limit,
    "is": _same,
    "is_not": lambda value, wanted: not _same(value, wanted),
    "in": lambda value, wanted: any(_same(value, one) for one in wanted),
    "not_in": lambda value, wanted: not any(_same(value, one) for one in wanted),
    "has": lambda value, wanted: any(_same(one, wanted) for one in (value if isinstance(value, list) else [value])),
}
"""What a threshold asks: it is broken where the answer is yes."""
_PASSES = {
    "above": "is at most {}",
    "below": "is at least {}",
    "is": "is not {}",
    "is_not": "is {}",
    "in": "is none of {}",
    "not_in": "is one of {}",
    "has": "does not have {}",
}
"""What passes each test, as a clause: the contrary of what breaks it."""
_LISTS = ("in", "not_in")
_IDS = ("warnings", "overridden", "config.overrides")
"""Lists of ids of rules."""
_KEYS = ("id", "what", *_TESTS, "because", "fix", "owner")
_EXCEPTION = ("rule", "until", "because", "owner", "file")


@frozen(kw_only=True)
class Threshold:
    """One rule over a value that a plan says."""

    id: str
    what: str
    """Dotted path into what ``prepkit.predict.said`` says of a plan."""
    test: str
    limit: Any
    severity: Severity
    because: str
    fix: str
    written: str
    """File, line and column of the rule."""
    written_limit: str
    """The same of what the value is compared with."""

    def ask(self, values: dict[str, Any]) -> Iterator[Finding]:
        """The finding about a plan that breaks it, or that does not say the value: what is not known is no pass."""
        for value in tuple(_asked(values, self.what)) or (None,):
            unknown = value is None if self.test == "has" else self.test in NUMBERS and not _is_number(value)
            if unknown:
                none = f"the plan says no {self.what}" if value is None else f"{self.what} is {shown(value)}, no number"
                what = f"{none}, so that nobody knows whether it {self._passing()}"
                tells = f"plan with {TELLS[self.what]}; " if value is None and self.what in TELLS else ""
                yield self._found(f"plan.{self.what}", what, f"{tells}{self.fix}")
                return
            if _TESTS[self.test](value, self.limit):
                what = f"{self.what} is {_text(self.what, value)}; it passes where it {self._passing()}: {self.because}"
                yield self._found(f"plan.{self.what}", what, self.fix)
                return

    def _found(self, where: str, what: str, fix: str) -> Finding:
        return Finding(
            rule=self.id, severity=self.severity, where=where, what=what, fix=fix, origin=f"{self.id} in {self.written}"
        )

    def _passing(self) -> str:
        return _passing(self.what, self.test, self.limit)


def _asked(values: dict[str, Any], what: str) -> Iterator[Any]:
    """What is compared: the values at the path, an object by its kind, and of a list of objects each."""
    for value in every(values, what):
        for one in value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]:
            yield one.get(TAG) if isinstance(one, dict) else one


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _passing(what: str, test: str, limit: object) -> str:
    return _PASSES[test].format(_text(what, limit))


def _text(what: str, value: object) -> str:
    return in_bytes(value) if what in BYTES and isinstance(value, int) else shown(value)


@frozen(kw_only=True)
class Policy:
    """Everything that the policies of one command ask."""

    thresholds: tuple[Threshold, ...] = ()
    rules: tuple[Rule, ...] = ()
    """Those of Python files, in the order in which they were given."""
    exempt: tuple[Exempt, ...] = ()
    files: tuple[str, ...] = field(default=())

    @property
    def asks(self) -> tuple[str, ...]:
        """Ids of what it asks of plans; empty where it has exceptions alone."""
        return (*(one.id for one in self.thresholds), *(rule.id for rule in self.rules))


@frozen(kw_only=True)
class Judged:
    """What a policy says of a plan today."""

    denied: tuple[Finding, ...]
    warned: tuple[Finding, ...]
    excepted: tuple[Finding, ...]


def read_policies(files: Iterable[str]) -> Policy:
    """The policies in these files. Raises ``PlanRejected`` with every place that is wrong.

    A TOML file holds data alone; a Python file, which has to be named by whoever runs the command, is run.
    """
    policy = Policy()
    wrong: list[Finding] = []
    for file in files:
        try:
            one = _of_python(file) if file.endswith(".py") else _of_toml(file)
        except PlanRejected as refused:
            wrong += refused.findings
            continue
        policy = Policy(
            thresholds=(*policy.thresholds, *one.thresholds),
            rules=(*policy.rules, *one.rules),
            exempt=(*policy.exempt, *one.exempt),
            files=(*policy.files, file),
        )
    wrong += _without_rule(policy)
    if wrong:
        raise PlanRejected(tuple(wrong))
    return policy


def _without_rule(policy: Policy) -> Iterator[Finding]:
    """What is asked about rules that there are not: a team's own are those of the files that were read together."""
    ids = (*by_id(), *policy.asks)
    subjects = {name.partition(".")[0] for name in by_id()}
    for one in policy.thresholds:
        for name in _texts(one.limit) if one.what in _IDS else ():
            close = near(name, ids, 1, 0.9)
            if name not in ids and (close or name.partition(".")[0] in subjects or not name):
                fix = f'Write "{close[0]}".' if close else "Write the id of a rule: prepkit rules lists them."
                yield _broken(one.written_limit, f"there is no rule {name or shown(name)}", fix)


def judge(policy: Policy, plan: Plan, today: date, file: str = "") -> Judged:
    """Return what the policy says of the plan. ``file`` is what exceptions about a file are held against.

    Raises ``PlanRejected`` where a rule in Python raises.
    """
    place = FilePlace(file or "plan", 1, 1)
    result = sort(tuple((place, finding) for finding in asked(policy, plan)), policy.exempt, today)
    findings = tuple(finding for _, finding in result.standing if not finding.rule.startswith("gate.exception-unused"))
    return Judged(
        denied=tuple(finding for finding in findings if finding.severity is Severity.ERROR),
        warned=tuple(finding for finding in findings if finding.severity is not Severity.ERROR),
        excepted=tuple(finding for _, finding in result.excepted),
    )


def recorded(policy: Policy, plan: Plan, today: date, file: str = "") -> Plan:
    """The plan with what was warned of and excepted in it. Raises ``PlanRejected`` for a plan that is denied."""
    judged = judge(policy, plan, today, file)
    if judged.denied:
        raise PlanRejected((*plan.warnings, *judged.warned, *judged.denied))
    if not judged.warned and not judged.excepted:
        return plan
    return evolve(plan, warnings=(*plan.warnings, *judged.warned), overridden=(*plan.overridden, *judged.excepted))


def asked(policy: Policy, plan: Plan) -> Iterator[Finding]:
    """Every finding of the policy about a plan, whatever is excepted."""
    from prepkit.resolve.resolved import Resolved

    values = said(plan) if policy.thresholds else {}
    for threshold in policy.thresholds:
        yield from threshold.ask(values)
    resolved = Resolved(cfg=plan.config, facts=plan.facts)
    for rule in policy.rules:
        try:
            yield from [rule.found(hit) for hit in rule.check(resolved)]
        except (Exception, SystemExit) as error:  # a team's code: whatever it raises, the plan has not passed
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename}:{frame.lineno}"
            what = f"the rule {rule.id} raises {type(error).__name__}: {error}"
            raise PlanRejected(
                (_broken(where, what, "Mend the rule: nothing passes while it cannot be asked."),)
            ) from error


def refusals_of(policy: Policy, file: str) -> tuple[tuple[FilePlace, Finding], ...]:
    """What the policy says of a plan file, exceptions not counted; a rule that raises is a finding like any other.

    Raises ``PlanRejected`` for a file that cannot be read.
    """
    place, plan = FilePlace(file, 1, 1), codec.load_plan(file)
    try:
        return tuple((place, finding) for finding in asked(policy, plan))
    except PlanRejected as refused:
        return tuple((place, finding) for finding in refused.findings)


# --- TOML ------------------------------------------------------------------------------------------------------------


def _of_toml(file: str) -> Policy:
    if file.endswith(".rego"):
        what = "rules in Rego are asked by conftest, unmodified"
        fix = f"Run prepkit show plan.json --json | conftest test -p {Path(file).parent} -"
        raise PlanRejected((_broken(file, what, fix),))
    if Path(file).suffix != ".toml":
        raise PlanRejected((_broken(file, "a policy is a file in TOML or Python", "Name it policy.toml."),))
    if Path(file).stat().st_size > LARGEST:
        raise PlanRejected((_broken(file, f"it has more than {LARGEST:,} bytes", "Give the path of a policy."),))
    text = ""
    try:
        source = read(file)
        text, data = source.text, source.data()
    except PlanRejected as refused:
        empty = refused.findings[0].rule == "config.empty"
        raise PlanRejected((_nothing(file),) if empty else tuple(_damaged(file, text, refused))) from None
    if not data:
        raise PlanRejected((_nothing(file),))
    made = _Reader(file, positions(source.text, ".toml")).policy(data)
    if not made.asks and not made.exempt:
        raise PlanRejected((_nothing(file),))
    return made


def _damaged(file: str, text: str, refused: PlanRejected) -> Iterator[Finding]:
    """What keeps the file from being read, at its line where that is known."""
    for finding in refused.findings:
        place = place_of(finding, file, text, ".toml")
        yield _broken(str(place), finding.what, f"{finding.fix[:1].upper()}{finding.fix[1:]}.")


def _nothing(file: str) -> Finding:
    what = "it asks nothing: there is no deny, warn or exception in it"
    return _broken(
        f"{file}:1:1", what, "Write [[deny]], and below it id, what, one test such as above = 8, and because."
    )


@frozen
class _Reader:
    """Entries of a policy as values; everything that is wrong with them is gathered, and told together."""

    file: str
    places: dict[str, tuple[int, int]]
    wrong: list[Finding] = field(factory=list)

    def policy(self, data: dict[str, Any]) -> Policy:
        for key in data.keys() - {*_TABLES, "exception"}:
            self.say(str(key), f"a policy has no {shown(key)}, only deny, warn and exception", "Remove it.")
        thresholds = tuple(
            found
            for table, severity in _TABLES.items()
            for index, entry in self.entries(data, table)
            if (found := self.threshold(f"{table}.{index}", entry, severity)) is not None
        )
        exempt = tuple(
            one
            for index, entry in self.entries(data, "exception")
            if (one := self.exception(f"exception.{index}", entry)) is not None
        )
        if self.wrong:
            raise PlanRejected(tuple(self.wrong[:MOST]))
        return Policy(thresholds=thresholds, exempt=exempt)

    def entries(self, data: dict[str, Any], table: str) -> Iterator[tuple[int, dict[str, Any]]]:
        given = data.get(table, [])
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given) or len(given) > MOST:
            self.say(table, f"{table} is no list of at most {MOST} tables", f"Write [[{table}]] above each of them.")
            return
        yield from enumerate(given)

    def threshold(self, at_: str, entry: dict[str, Any], severity: Severity) -> Threshold | None:
        before = len(self.wrong)
        self.keys(at_, entry, _KEYS, ("id", "what", "because"))
        tests = [test for test in _TESTS if test in entry]
        if len(tests) != 1:
            self.say(
                at_, f"it has {len(tests) or 'none'} of {', '.join(_TESTS)}", "Write one of them, such as above = 8."
            )
        if len(self.wrong) > before:
            return None
        types = self.says(f"{at_}.what", entry["what"])
        if not types:
            return None
        test = tests[0]
        limit = self.limit(f"{at_}.{test}", entry["what"], test, entry[test], types)
        if len(self.wrong) > before:
            return None
        return Threshold(
            id=entry["id"],
            what=entry["what"],
            test=test,
            limit=limit,
            severity=severity,
            because=entry["because"],
            fix=entry.get("fix", f"Change the config so that {entry['what']} {_passing(entry['what'], test, limit)}."),
            written=self.where(at_),
            written_limit=self.where(f"{at_}.{test}"),
        )

    def says(self, at_: str, what: str) -> tuple[Any, ...]:
        """The types that plans have there; of a config those of every kind of object. None where no plan says that."""
        if what in WHATS:
            return (WHATS[what],)
        table, _, rest = what.partition(".")
        if table != "config" or not rest:
            close = near(what, WHATS, 1) or [path for path in WHATS if path.rpartition(".")[2] == what]
            inside = [path for path in WHATS if path.startswith(f"{what}.")]
            many = f"Write one of {', '.join(inside or WHATS)}{'' if inside else ', or config. with a setting'}."
            self.say(at_, f"a plan says no {shown(what)}", f'Write "{close[0]}".' if close and not inside else many)
            return ()
        path, types = "config", (CONFIG,)
        for name in rest.split("."):
            if not (found := tuple(kind for one in types for kind in field_types.within(one, name))):
                known = tuple(dict.fromkeys(key for one in types for key in field_types.names_within(one)))
                close = near(name, known, 1)
                fix = f'Write "{path}.{close[0]}".' if close else f"Write one of {', '.join(known)} behind {path}."
                self.say(at_, f"{path} has no {shown(name)}", fix if known else f'Write "{path}": nothing is inside.')
                return ()
            path, types = f"{path}.{name}", found
        return types

    def limit(self, at_: str, what: str, test: str, value: Any, types: tuple[Any, ...]) -> Any:
        """What the value is compared with. One that no plan can have there is told: its entry would ask nothing."""
        if test in _LISTS and (not isinstance(value, list) or not value):
            listed = isinstance(value, list)
            fix = "Write what it may have." if listed else f"Write [{shown(value)}]."
            self.say(at_, "the list is empty" if listed else f"{shown(value)} is not a list", fix)
            return value
        if test in NUMBERS and not _is_number(value) and not (what in BYTES and isinstance(value, str)):
            self.say(at_, f"{shown(value)} is not a number", "Write a number.")
            return value
        if what in BYTES:
            try:
                sized = [parse_bytes(one) if isinstance(one, str) else one for one in _list(value)]
            except ValueError as error:
                self.say(at_, str(error), 'Write a size such as "70GiB".')
                return value
            value = sized if isinstance(value, list) else sized[0]
        for one in value if test in _LISTS else [value]:
            if told := impossible(what, test, one, types):
                self.say(at_, *told)
        return value

    def exception(self, at_: str, entry: dict[str, Any]) -> Exempt | None:
        before = len(self.wrong)
        day = entry.get("until")
        texts = {key: value for key, value in entry.items() if key != "until"}
        self.keys(
            at_,
            {**texts, **({"until": ""} if "until" in entry else {})},
            _EXCEPTION,
            ("rule", "until", "because", "owner"),
        )
        if "until" in entry and type(day) is not date:
            self.say(f"{at_}.until", f"{shown(str(day))} is not a day", "Write until = 2027-01-01, without quotes.")
        if len(self.wrong) > before or type(day) is not date:
            return None
        line, column = self.places.get(at_, (1, 1))
        return Exempt(
            rule=entry["rule"],
            until=day,
            because=entry["because"],
            owner=entry["owner"],
            file=entry.get("file", ""),
            written=FilePlace(self.file, line, column),
        )

    def keys(self, at_: str, entry: dict[str, Any], known: tuple[str, ...], needed: tuple[str, ...]) -> None:
        for key, value in entry.items():
            if key not in known:
                close = near(key, known, 1)
                fix = f"Write {close[0]}." if close else "Remove it."
                self.say(f"{at_}.{key}", f"{shown(key)} is no key of it", fix)
            elif key not in _TESTS and not isinstance(value, str):
                self.say(f"{at_}.{key}", f"{shown(value)} is not text", "Write it in quotes.")
        for key in needed:
            if key not in entry:
                self.say(at_, f"it does not say {key}", f"Add {key} = ...")

    def where(self, path: str) -> str:
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        line, column = self.places.get(path, (1, 1))
        return f"{self.file}:{line}:{column}"

    def say(self, path: str, what: str, fix: str) -> None:
        self.wrong.append(_broken(self.where(path), what, fix))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _texts(value: Any) -> Iterator[str]:
    """Texts in a limit, however deep its lists are."""
    if isinstance(value, str):
        yield value
    for one in value if isinstance(value, list) else ():
        yield from _texts(one)


# --- Python ----------------------------------------------------------------------------------------------------------


def _of_python(file: str) -> Policy:
    import runpy

    try:
        rules = runpy.run_path(file).get("RULES")
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else 1)
        what = f"it raises {type(error).__name__}: {error}"
        raise PlanRejected(
            (_broken(f"{file}:{line}:1", what, "Mend it: nothing passes while it cannot be read."),)
        ) from error
    if not isinstance(rules, tuple | list) or not all(isinstance(rule, Rule) for rule in rules):
        what = "it has no RULES, a tuple of prepkit.rules.Rule"
        raise PlanRejected((_broken(f"{file}:1:1", what, "Write RULES = (Rule(...),) at its end."),))
    if not rules:
        what = "it asks nothing: RULES is empty"
        raise PlanRejected((_broken(f"{file}:1:1", what, "Write RULES = (Rule(...),) at its end."),))
    for rule in rules:
        if rule.at != (Moment.PLAN,):
            what = f"{rule.id} is asked {', '.join(rule.at)}, and a policy is asked {Moment.PLAN}"
            raise PlanRejected((_broken(f"{file}:1:1", what, "Leave out at=..."),))
    return Policy(rules=tuple(rules))


def _broken(where: str, what: str, fix: str) -> Finding:
    return found("policy.broken", where, what, fix)
