"""What rules say of prepared objects, loops, proofs and checkpoints that differ in one value from others.

``golden/looks/<looked at>.txt`` has bases, right ones and one for each way to be wrong, and below each what is said of
its neighbours: what is said anew, the rules of the base that then say nothing, and by which changes. What a line above
says already is not repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import evolve, frozen

from prepkit.facts.loop import Called, LoopPlan, LoopState, Turn
from prepkit.facts.proof import ClipProof, GradientProof, LossShare, ProofFacts, StepProof
from prepkit.facts.run import PreparedLoader, PreparedScheduler, RunFacts
from prepkit.facts.saved_run import (
    FolderFacts,
    GivenFolder,
    ResumeFacts,
    SavedFacts,
    SavedModule,
    SavedTensor,
    SavedWindows,
)
from prepkit.rules import due
from prepkit.rules.rule import Moment, Rule, findings_of
from prepkit.rules.run import AUDIT_RULES
from prepkit.rules.run.loop import ASKED
from prepkit.testing.tiny import tiny_loader
from property_tests.test_proof_laws import everywhere, window
from tests.audit.test_rules import BROKEN, FINE, OTHERWISE, RANK, with_ranks
from tests.proving.test_causes import APART
from tests.support.golden import assert_golden
from tests.support.neighbours import neighbours

GOLDEN = Path(__file__).parent / "golden" / "looks"


@frozen(kw_only=True)
class Looked:
    """One kind of facts that rules are asked about."""

    rules: tuple[Rule, ...]
    cls: type
    bases: Mapping[str, Any]
    possible: Callable[[Any], bool] = lambda _: True
    """Whether anything could be seen so."""
    as_they_are: frozenset[str] = frozenset()
    """Fields of the base that are not changed: they are large, or belong together."""


def _possible_run(facts: RunFacts) -> bool:
    looks = [look for pair in facts.running for look in pair]
    return (
        (facts.scheduler is None or facts.scheduler.ticks > 0)
        and all(one.wrappers for one in facts.wrapped)
        and all(len(tied) > 1 for look in looks for tied in look.ties)
        and all(len(look.held) == len(look.orphans) == len(look.stateful) for look in looks)
        and len({(len(look.held), len(look.rates), len(look.scheduled)) for look in looks}) <= 1
    )


def _possible_proof(facts: ProofFacts) -> bool:
    """Inner products belong to shares and replicas, and factors are no zero."""
    many, names = len(facts.shares), [one.name for one in facts.gradients]
    return (
        facts.scale > 0
        and facts.accumulation != 0
        and facts.divides != 0
        and {share.rank for share in facts.shares} == set(range(facts.world))
        and len({(share.rank, share.micro) for share in facts.shares}) == many
        and len(set(names)) == len(names)
        and all(map(partial(_whole, many), facts.gradients))
    )


def _whole(shares: int, one: GradientProof) -> bool:
    return (
        len(one.gram) == shares
        and len(one.weight) in (0, shares)
        and len(one.dots) == len(one.squares) == len(one.holders)
        and len(one.along) in (0, len(one.dots))
        and all(len(part.dots) == 1 and _whole(shares, part) for part in one.parts)
    )


def _possible_resume(facts: ResumeFacts) -> bool:
    """A step has micro-batches on some ranks, and a sample in each at least."""
    windows = [one for one in (facts.before, facts.now) if one is not None]
    return all(one.batch > 0 and (one.global_batch is None or one.global_batch >= one.batch) for one in windows)


def _reads(*ranks: tuple[str, str], sampler: Literal["custom", "random"] = "custom") -> RunFacts:
    """Two ranks whose loader nothing divides that is known, about to read these indices and samples."""
    base = BROKEN["run.samples-unknown"]
    told = tuple(evolve(rank, reads=(read,)) for rank, read in zip(base.ranks, ranks, strict=True))
    return evolve(base, ranks=told, loaders=(PreparedLoader(seen=evolve(tiny_loader(), sampler=sampler)),))


def _parts(replicas: int, *parts: int, contents: str = "aaaa") -> RunFacts:
    """Ranks that read these parts of so many, of data sets with these samples."""
    ranks = tuple(
        evolve(
            RANK,
            rank=rank,
            tensor_ranks=(rank,),
            loaders=((replicas, part, "sampler", contents[rank]),),
            contents=(contents[rank],),
        )
        for rank, part in enumerate(parts)
    )
    (loader,) = BROKEN["run.divided-twice"].loaders
    divided = evolve(loader, replicas=replicas, parts=replicas)
    return evolve(FINE, world_size=len(parts), params=(), optimizers=(), ranks=ranks, loaders=(divided,))


def _scheduled(**how: Any) -> RunFacts:
    """A scheduler, and a pass of 32 batches."""
    (loader,) = _parts(2, 0, 1).loaders
    scheduler = PreparedScheduler(name="CosineAnnealingLR", drives_optimizer=True, **how)
    return evolve(FINE, scheduler=scheduler, loaders=(evolve(loader, batches=32),))


RUNS: dict[str, RunFacts] = {
    "nothing wrong": FINE,
    "two ranks": with_ranks(),
    "two ranks with a loader": _parts(2, 0, 1),
    "ranks that read one part": _parts(2, 0, 0),
    "ranks with data of their own": _parts(2, 0, 1, contents="ab"),
    "tensor ranks that read one part": evolve(
        _parts(2, 0, 0, 1, 1),
        ranks=tuple(
            evolve(rank, tensor_ranks=(rank.rank // 2 * 2, rank.rank // 2 * 2 + 1))
            for rank in _parts(2, 0, 0, 1, 1).ranks
        ),
    ),
    "own samples": _reads(("a", "b"), ("c", "d")),
    "same samples": _reads(("a", "b"), ("a", "b")),
    "same samples at other indices": _reads(("a", "c"), ("b", "c"), sampler="random"),
    "a schedule ticked twice a step": _scheduled(ticks=2, horizon=96),
    "a schedule ticked with every batch": _scheduled(by_batch=True, horizon=24),
    **BROKEN,
    **{f"{rule}, otherwise": facts for rule, facts in OTHERWISE.items()},
}


def _held_in_parts() -> GradientProof:
    def part(rank: int, by: float) -> GradientProof:
        gram = ((1.0, 1.0), (1.0, 1.0))
        return GradientProof(name="weight", numel=50, gram=gram, dots=((by, by),), squares=(by * by,), holders=(rank,))

    whole = evolve(part(0, 0.5), numel=100, gram=((2.0, 2.0), (2.0, 2.0)), dots=((1.3, 1.3),), squares=(0.89,))
    return evolve(whole, parts=(part(0, 0.5), part(1, 0.8)))


STEPS = (
    StepProof(name="right", along=1.0, expected=1.0, moved=1.0),
    StepProof(name="unheld", held=False),
    StepProof(name="still", expected=1.0),
    StepProof(name="short", along=0.5, expected=1.0, moved=0.25),
    StepProof(name="turned", along=0.1, expected=1.0, moved=1.0),
    StepProof(name="narrow", along=1.0, expected=1.0, moved=1.0, dtype="bfloat16", meant=100, lost=60),
)
ALONE = (LossShare(rank=0, micro=0),)


def _weighed(*each: float) -> ProofFacts:
    """Losses of two ranks, two micro-batches each, in which a sample weighs so much."""
    shares = tuple(
        LossShare(rank=at // 2, micro=at % 2, each=one, count=4.0, operators="NllLossBackward0")
        for at, one in enumerate(each)
    )
    return ProofFacts(world=2, shares=shares)


PROOFS: dict[str, ProofFacts] = {
    "as it should be": window(2, 2, 1, everywhere(2, 2, 1.0)),
    "summed": window(2, 2, 1, everywhere(2, 2, 2.0)),
    "averaged twice": window(2, 2, 1, everywhere(2, 2, 0.5)),
    "divided twice": window(2, 3, 1, everywhere(2, 3, 1 / 3), weight=1 / 3),
    "never divided": window(2, 3, 1, everywhere(2, 3, 3.0), weight=3.0, accumulation=3),
    "one rank's": window(2, 2, 1, [[2.0, 2.0], [0.0, 0.0]]),
    "part of the ranks": window(4, 1, 1, [[2.0], [2.0], [0.0], [0.0]]),
    "a micro-batch lost": window(2, 2, 1, [[0.0, 1.0], [0.0, 1.0]]),
    "scaled": window(2, 1, 1, everywhere(2, 1, 128.0), scale=128.0),
    "not clipped": window(2, 1, 1, everywhere(2, 1, 1.0), clip=ClipProof(most=0.01, seen=1.0)),
    "clipped": window(2, 1, 1, everywhere(2, 1, 0.01), clip=ClipProof(most=0.01)),
    "a factor of its own": window(2, 2, 1, everywhere(2, 2, 0.14), weight=0.14),
    "apart": APART,
    "nearly right": evolve(
        APART, gradients=(evolve(APART.gradients[0], dots=((0.48, 0.48),), squares=(0.5,), holders=(0,)),)
    ),
    "in parts": evolve(APART, gradients=(_held_in_parts(),)),
    "clipped before the average": evolve(
        APART,
        gradients=(evolve(APART.gradients[0], dots=((0.25, 0.05), (0.25, 0.05)), squares=(0.065, 0.065)),),
        shrunk=(0.5, 0.1),
    ),
    "no gradient": evolve(APART, gradients=(evolve(APART.gradients[0], dots=(), squares=(), holders=()),)),
    "steps": ProofFacts(world=1, shares=ALONE, steps=STEPS, kept=("unheld", "right")),
    "ranks weigh otherwise": _weighed(1.0, 1.0, 2.0, 2.0),
    "losses weigh otherwise": _weighed(1.0, 2.0, 1.0, 2.0),
    "apart before and after": evolve(
        APART,
        gradients=(),
        first_apart=(("weight", (1,)),),
        after_apart=(("weight", (1,)), ("bias", (1,))),
        buffers_apart=(("mean", (1,)),),
    ),
    "apart after": evolve(APART, gradients=(), after_apart=(("weight", (1,)), ("bias", (1,)))),
}

RUN = SavedFacts(
    engine="FSDP2",
    world_size=4,
    tensors=(
        SavedTensor(name="embed.weight", dtype="float32", shape=(4, 2)),
        SavedTensor(name="head.weight", dtype="bfloat16", shape=(2,)),
    ),
    modules=(SavedModule(path="layers.0", cls="Linear", values=(("in_features", "2"), ("p", "0.1"))),),
    config=(("heads", "2"),),
    optimizer="AdamW",
    groups=(("embed.weight",), ("head.weight",)),
    scheduler="StepLR",
)
WINDOW = SavedWindows(micro_batches=2, ranks=2, clip="ClipNorm(max_norm=1.0)", global_batch=16, total_steps=9)
RESUMES: dict[str, ResumeFacts] = {
    "as it was": ResumeFacts(where="runs/7", saved=RUN, here=RUN, before=WINDOW, now=WINDOW),
    "without an optimizer": ResumeFacts(where="runs/7", saved=evolve(RUN, optimizer="", groups=()), here=RUN),
    "of torch alone": ResumeFacts(where="runs/7", here=RUN),
    "accepted": ResumeFacts(accepted=("checkpoint.other-dtype",), saved=RUN, here=RUN),
    "nothing saved": ResumeFacts(where="runs", nothing="there is no such folder"),
    "torn": ResumeFacts(where="runs", torn=("it is not there",)),
    "other names": ResumeFacts(
        lacking=("model.a", "optimizer.b.exp_avg"), unknown=("model.c",), reshaped=("model.d [1], here [2]",)
    ),
    "what changes": ResumeFacts(
        joined=("step of a, b differs",),
        replaced=("lr of group 0: 0.1 for 0.2",),
        other_data=("loaders[0] has 9, and had 8",),
    ),
}
FOLDERS: dict[str, FolderFacts] = {
    "one": FolderFacts(given=(GivenFolder(path="runs"), GivenFolder(path="runs")), folder="runs"),
    "two": FolderFacts(given=(GivenFolder(path="runs"), GivenFolder(path="run"))),
    "none": FolderFacts(given=(GivenFolder(path="runs"), GivenFolder(path="", problem="None is no path"))),
    "of another run": FolderFacts(folder="runs", others=("000003-step-9", "000002-step-6"), steps=2),
}
LOOPS = {"alone": LoopPlan(), "of two": LoopPlan(accumulation=2, engine="DDP", wrapper_averages=True, ticks=1)}
STATES = {
    "a new loop": LoopState(),
    "a window": LoopState(backwards=1, used=True, weighed=False, averaging=True),
}
EVENTS: dict[type, Any] = {kind: kind(**({"call": "ready.log"} if kind is Called else {})) for kind in ASKED}
TURNS = {
    kind: {
        f"{kind.__name__} in {when}, {which}": Turn(state=state, event=event, plan=plan)
        for when, state in STATES.items()
        for which, plan in LOOPS.items()
    }
    for kind, event in EVENTS.items()
}
LOOKS: dict[str, tuple[Looked, ...]] = {
    "run": (
        Looked(rules=AUDIT_RULES, cls=RunFacts, bases=RUNS, possible=_possible_run, as_they_are=frozenset({"model"})),
        *(Looked(rules=ASKED[kind], cls=Turn, bases=bases) for kind, bases in TURNS.items()),
    ),
    "proof": (
        Looked(
            rules=due(Moment.PROVE),
            cls=ProofFacts,
            bases=PROOFS,
            possible=_possible_proof,
            as_they_are=frozenset({"gram", "dots"}),
        ),
    ),
    "checkpoint": (
        Looked(rules=due(Moment.RESUME), cls=ResumeFacts, bases=RESUMES, possible=_possible_resume),
        Looked(rules=due(Moment.FOLDER), cls=FolderFacts, bases=FOLDERS),
    ),
}
"""By the file that has what is said of them."""


def _said(rules: tuple[Rule, ...], facts: Any) -> tuple[str, ...]:
    return tuple(f"{one.rule} ({one.severity.value}) {one.where}: {one.what}" for one in findings_of(rules, facts))


def _id(said: str) -> str:
    return said.partition(" ")[0]


def _lines(looked: Looked) -> Iterator[str]:
    before: set[str] = set()
    for name, base in looked.bases.items():
        usual = _said(looked.rules, base)
        yield f"{name}: {', '.join(map(_id, usual)) or 'nothing is said'}"
        found: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for place, other in neighbours(base, looked.cls):
            if looked.as_they_are.intersection(place) or not looked.possible(other):
                continue
            words = _said(looked.rules, other)
            anew = [one for one in words if one not in usual and one not in before]
            gone = dict.fromkeys(_id(one) for one in usual if one not in words)
            silent = [f"no {rule}" for rule in gone if rule not in map(_id, words)]
            silent += [f"{rule} as above" for rule in gone if rule in set(map(_id, words)) - set(map(_id, anew))]
            if silent or anew:
                found[*silent, *anew].append(".".join(place))
        for words, places in found.items():
            yield f"  {'; '.join(words)} <- {', '.join(dict.fromkeys(places))}"
            before.update(words)
        before.update(usual)


@pytest.mark.parametrize("name", LOOKS)
def test_neighbours_of_what_was_looked_at_are_told_as_when_somebody_last_read_it(name: str) -> None:
    assert_golden(GOLDEN / f"{name}.txt", "".join(f"{line}\n" for looked in LOOKS[name] for line in _lines(looked)))
