"""What the rules can say of a config alone: every rule is asked, and one that reads what is not known says so."""

from __future__ import annotations

from typing import Any, cast

from attrs import frozen

from prepkit.config import Config
from prepkit.facts import Env, Facts, GroupFact, LoaderFacts, ModelFacts, OptimizerFacts, SchedulerFacts
from prepkit.findings import Finding
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES, finding_of
from prepkit.rules.rule import Hit, Rule

_NOT_SEEN = {
    "world_size": "the number of processes",
    "per_node": "the processes of a node",
    "device": "the device type",
    "torch": "the version of torch",
    "release": "the version of torch",
    "knows_release": "the version of torch",
    "python": "the version of Python",
    "libraries": "the libraries that are installed",
    "variables": "the environment variables",
}
"""Fields of an ``Env`` that have a value also where nobody has looked, and what people call them."""


def _optimizer(name: str, module: str) -> OptimizerFacts:
    return OptimizerFacts(name=name, module=module, groups=(GroupFact(slots=(), options=(("lr", 0.001),)),))


_LOADER = LoaderFacts(batch_size=4, length=4096, sampler="random")


@frozen
class _Architecture:
    """A model, and its config, of which a width is supposed, and nothing else: bucket sizes are worked out from it."""

    hidden_sizes: tuple[int, ...] = ()

    @property
    def architecture(self) -> _Architecture:
        return self

    def __getattr__(self, name: str) -> Any:
        raise _Unknown("the model")


_SUPPOSED: tuple[dict[str, Any], ...] = (
    {"world_size": 1, "device": "cpu", "optimizer": None, "loaders": (), "scheduler": None, "model": _Architecture()},
    {
        "world_size": 2,
        "device": "cuda",
        "optimizer": _optimizer("AdamW", "torch.optim.adamw"),
        "loaders": (_LOADER,),
        "scheduler": SchedulerFacts(name="LambdaLR", drives_optimizer=True),
        "model": _Architecture((64,)),
    },
    {
        "world_size": 8,
        "device": "cuda",
        "optimizer": None,
        "loaders": (_LOADER,),
        "scheduler": None,
        "model": _Architecture((4096,)),
    },
    {
        "world_size": 48,
        "device": "cuda",
        "optimizer": _optimizer("SGD", "torch.optim.sgd"),
        "loaders": (),
        "scheduler": None,
        "model": _Architecture((8192, 1024)),
    },
)
"""Runs that are far apart: what is wrong in the same words in all of them, and of no other, is wrong in any."""


class _Unknown(Exception):
    """A rule has read what is not known."""


@frozen
class _Env:
    """An environment of which some fields are known, and others may be supposed."""

    env: Env
    known: frozenset[str]
    supposed: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        of = "torch" if name in ("release", "knows_release") else name
        if name in self.supposed and of not in self.known:
            return self.supposed[name]
        if name in _NOT_SEEN and of not in self.known:
            raise _Unknown(_NOT_SEEN[name])
        return getattr(self.env, name)


@frozen
class _Facts:
    """Facts of an environment alone, and of what is supposed."""

    env: _Env
    supposed: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name in self.supposed:
            return self.supposed[name]
        raise _Unknown(f"the {name}")


@frozen(kw_only=True)
class Answers:
    """What the rules say of a config, and which of them could not be asked to the end."""

    findings: tuple[Finding, ...]
    unasked: tuple[tuple[str, str], ...]
    """Id of a rule, and what it would have to know."""
    asked: int
    """Number of rules that were asked to the end."""


def ask(
    cfg: Config, env: Env, known: frozenset[str], model: ModelFacts | None = None, rules: tuple[Rule, ...] = RULES
) -> Answers:
    """Ask every rule about a config in an environment of which the fields ``known`` are known. Pure.

    What a rule has found before it reads what is not known stands: a hit is a hit whatever comes behind it. One that
    cannot be asked to the end is asked about runs that are far apart, and what it says of each of them stands too.
    """
    known = known if env.knows_release else known - {"torch"}  # a name such as nightly says nothing
    seen = {} if model is None else {"model": model}
    plain = _resolved(cfg, env, known, seen)
    supposed = tuple(_resolved(cfg, env, known, facts | seen) for facts in _SUPPOSED)
    findings: list[Finding] = []
    unasked: list[tuple[str, str]] = []
    for rule in rules:
        hits, unknown = _hits(rule, plain)
        if unknown:
            unasked.append((rule.id, unknown))
            every = [_hits(rule, resolved)[0] for resolved in supposed]
            hits = tuple(dict.fromkeys((*hits, *(hit for hit in every[0] if all(hit in one for one in every)))))
        findings += (finding_of(cfg, rule, hit) for hit in hits)
    return Answers(findings=tuple(findings), unasked=tuple(unasked), asked=len(rules) - len(unasked))


def _resolved(cfg: Config, env: Env, known: frozenset[str], supposed: dict[str, Any]) -> Resolved:
    return Resolved(cfg=cfg, facts=cast("Facts", _Facts(_Env(env, known, supposed), supposed)))


def _hits(rule: Rule, resolved: Resolved) -> tuple[tuple[Hit, ...], str]:
    """What the rule finds before it reads what is not known, and what that is; empty: it was asked to the end."""
    hits: list[Hit] = []
    try:
        for hit in rule.check(resolved):
            hits.append(hit)  # noqa: PERF402  # what came before the end counts
    except _Unknown as unknown:
        return tuple(hits), str(unknown)
    return tuple(hits), ""
