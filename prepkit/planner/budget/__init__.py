"""Whether a plan fits its device, and which changes of the config would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any, Literal

from attrs import evolve, fields, frozen, has
from returns.result import Result

from prepkit.config import Config
from prepkit.findings import Finding
from prepkit.findings.text import in_bytes
from prepkit.plan import Plan
from prepkit.planner.budget.moves import Move, moves
from prepkit.predict import predict
from prepkit.predict.prediction import Prediction
from prepkit.rules.memory import EXCEEDS, TIGHT
from prepkit.rules.rule import Rule

Again = Callable[[Config], Result[Plan, tuple[Finding, ...]]]
"""Plans another config for the same facts."""

LIMIT = 4
"""Changes that are shown."""


@frozen(kw_only=True)
class Option:
    """A changed config whose plan fits, with what a rank then holds and sends."""

    config: Config
    diff: tuple[str, ...]
    """What to change, one line per field."""
    floor: int
    """Bytes that the fullest rank then certainly holds at one moment."""
    ceiling: int
    """Bytes that it holds at most."""
    sent: int
    """Bytes that a rank sends per step."""
    between: int
    """Those of them that go over node borders, or may."""
    copied: int
    """Bytes that a rank copies between device and host per step."""
    host: int = 0
    """Bytes that the fullest rank holds in host memory."""
    caveats: tuple[str, ...] = ()
    """What else the change changes."""

    def __str__(self) -> str:
        between = f" ({in_bytes(self.between)} between nodes)" if self.between != self.sent else ""
        copied = (
            f", copies {in_bytes(self.copied)} and keeps {in_bytes(self.host)} in host memory" if self.copied else ""
        )
        also = "".join(f"; {caveat}" for caveat in self.caveats)
        memory = f"{in_bytes(self.floor)} to {in_bytes(self.ceiling)}"
        return f"{', '.join(self.diff)}: {memory}, sends {in_bytes(self.sent)} a step{between}{copied}{also}"


@frozen(kw_only=True)
class Fit:
    """Whether a plan fits into the memory of a device, how surely, and what else would. True where it fits."""

    memory: int
    floor: int
    """Bytes that the fullest rank certainly holds at one moment."""
    ceiling: int
    """Bytes that it holds at most."""
    verdict: Literal["fits", "may not fit", "does not fit", "not predicted"]
    options: tuple[Option, ...] = ()
    """The smallest changes after which it fits: as few fields as possible, then by traffic."""
    left_out: tuple[str, ...] = ()
    """What is not in the numbers."""
    activations: int | None = None
    """Bytes of activations that are in the ceiling; None: not counted."""

    def __bool__(self) -> bool:
        return self.verdict == "fits"

    def __str__(self) -> str:
        if self.verdict == "not predicted":
            return "\n".join(("not predicted", *(f"  {phrase}" for phrase in self.left_out)))
        left = self.memory - self.ceiling
        counted = self.activations is not None
        room = f"; {in_bytes(left)} left{'' if counted else ' for activations'}" if left > 0 else ""
        need = f"{in_bytes(self.floor)} for certain and {in_bytes(self.ceiling)} at most"
        also = (
            f"with {in_bytes(self.activations)} of activations"
            if self.activations is not None
            else "activations not counted"
        )
        head = f"{self.verdict}: of {in_bytes(self.memory)} the fullest rank needs {need}, {also}{room}"
        lines = [head, *(f"  not counted either: {phrase}" for phrase in self.left_out)]
        if self.options:
            lines += [
                "changes that fit, least traffic between nodes and with the host first:",
                *(f"  {option}" for option in self.options),
            ]
        elif self.verdict != "fits":
            lines.append(
                "no change of mesh, stage, wrapping, offload, bucket, precision or accumulation fits; "
                "take more ranks or memory"
            )
        return "\n".join(lines)


def bounds(prediction: Prediction) -> tuple[int, int]:
    """Bytes of device memory that some rank certainly holds at one moment, and that no rank exceeds."""
    return max(ranks.floor() for ranks in prediction.classes), max(ranks.total() for ranks in prediction.classes)


def fits(plan: Plan, memory: int, again: Again, activations: int | None = None) -> Fit:
    """Whether the plan fits; where it may not, also what would. Candidates are planned and predicted in full.

    ``activations`` is taken to be the same for all of them.
    """
    prediction = predict(plan, activations)
    if not prediction.classes:
        return Fit(memory=memory, floor=0, ceiling=0, verdict="not predicted", left_out=prediction.not_predicted)
    floor, ceiling = bounds(prediction)
    verdict: Literal["fits", "may not fit", "does not fit"] = "fits" if ceiling <= memory else "may not fit"
    verdict = "does not fit" if floor > memory else verdict
    options = () if verdict == "fits" else _options(plan, memory - (activations or 0), again)
    options = tuple(evolve(option, ceiling=option.ceiling + (activations or 0)) for option in options)
    return Fit(
        memory=memory,
        floor=floor,
        ceiling=ceiling,
        verdict=verdict,
        options=options,
        left_out=prediction.not_predicted,
        activations=activations,
    )


def findings(plan: Plan, again: Again) -> tuple[Finding, ...]:
    """What the rules about memory say of a finished plan; nothing where no memory of the device is known."""
    memory, device = plan.facts.env.memory, plan.facts.env.device
    if memory is None or (plan.config.device or device) != device:  # it is not the memory of the device computed on
        return ()
    prediction = predict(plan)
    if not prediction.classes or bounds(prediction)[1] <= memory:
        return ()
    fit = fits(plan, memory, again)
    rule = EXCEEDS if fit.verdict == "does not fit" else TIGHT
    needs = f"for certain {in_bytes(fit.floor)}" if rule is EXCEEDS else f"at most {in_bytes(fit.ceiling)}"
    who = f"The fullest rank, {prediction.fullest.first * prediction.tensor}, holds {needs}, activations aside"
    return (_finding(rule, f"{who}; a device has {in_bytes(memory)}.", fit.options),)


def _finding(rule: Rule, what: str, options: tuple[Option, ...]) -> Finding:
    typed_options = "\n       or write ".join(str(option) for option in options)
    fix = f"Write {typed_options}." if typed_options else rule.fix
    return Finding(rule=rule.id, severity=rule.severity, where="env.memory", what=what, fix=fix)


def _options(plan: Plan, memory: int, again: Again) -> tuple[Option, ...]:
    """As few moves as possible: first every single one, then pairs, then triples."""
    possible = tuple(moves(plan))
    for number in (1, 2, 3):
        options: dict[Config, Option] = {}
        ended: set[tuple[Move | str, ...]] = set()
        for chosen in combinations(possible, number):
            alike = tuple(move.series or move for move in chosen)
            if alike in ended or len({move.about for move in chosen}) < number:
                continue
            cfg = _changed(plan.config, chosen)
            option = _option(plan, cfg, chosen, memory, again) if cfg is not None and cfg not in options else None
            if option is not None:
                options[option.config] = option
                ended |= {alike} if any(move.series for move in chosen) else set()
        if options:
            ranked = sorted(options.values(), key=lambda o: (o.between + o.copied, o.sent, o.ceiling))
            return tuple(ranked[:LIMIT])
    return ()


def _changed(cfg: Config, moves: Iterable[Move]) -> Config | None:
    for move in moves:
        changed = move.change(cfg)
        if changed is None or changed == cfg:
            return None
        cfg = changed
    return cfg


def _option(plan: Plan, cfg: Config, moves: tuple[Move, ...], memory: int, again: Again) -> Option | None:
    changed_plan = again(cfg).value_or(None)
    if changed_plan is None:
        return None
    prediction = predict(changed_plan)
    if not prediction.classes or bounds(prediction)[1] > memory:
        return None
    floor, ceiling = bounds(prediction)
    return Option(
        config=cfg,
        diff=_diff(plan.config, cfg),
        floor=floor,
        ceiling=ceiling,
        sent=prediction.sent,
        between=prediction.crossing(plan.facts.env.per_node),
        copied=prediction.copied,
        host=max(ranks.total("host") for ranks in prediction.classes),
        caveats=tuple(move.caveat for move in moves if move.caveat),
    )


def _diff(old: Config, new: Config) -> tuple[str, ...]:
    """``name=new instead of old`` for each field that differs, as one would type it."""
    pairs = ((field.name, getattr(old, field.name), getattr(new, field.name)) for field in fields(Config))
    return tuple(f"{name}={typed(b)} instead of {typed(a)}" for name, a, b in pairs if a != b)


def typed(value: Any) -> str:
    """A value of the config as one would type it: fields that keep their default are left out.

    >>> from prepkit.config import FSDP2, Mesh, OffloadToCPU
    >>> typed(Mesh(replicate=2)), typed(FSDP2(offload=OffloadToCPU()))
    ('Mesh(replicate=2)', 'FSDP2(offload=OffloadToCPU())')
    """
    if not has(type(value)):
        return repr(value)
    values = ((field, getattr(value, field.name)) for field in fields(type(value)))
    given = ", ".join(
        f"{field.name}={typed(item)}" if field.kw_only else typed(item)
        for field, item in values
        if item != field.default
    )
    return f"{type(value).__name__}({given})"
