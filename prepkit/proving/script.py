"""A user's script, run until its first window is complete, and proven there."""

from __future__ import annotations

import re
import runpy
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import define, evolve, field
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from prepkit.auditing.looks import HeardBehind, ScriptEnded, ScriptLooks, everywhere, heard_behind
from prepkit.auditing.outcome import Audit
from prepkit.auditing.script import as_main, audited_at_first_step, told
from prepkit.auditing.window import SENDS, goes_backward
from prepkit.facts.proof import HandedBack, ProofFacts
from prepkit.findings import Finding, Severity
from prepkit.findings.text import count
from prepkit.observe.prepared.instead import around_calls
from prepkit.proving.called import digest
from prepkit.proving.handed import handed_back, sides
from prepkit.proving.proof import Proof, found_in, joined, prove_records
from prepkit.proving.record_file import Record, TooLarge, write
from prepkit.proving.recorder import Recorder
from prepkit.proving.slopes import by_slopes
from prepkit.proving.steppers import given_to
from prepkit.proving.strays import HeardStrays, strays_apart
from prepkit.ranks.arrivals import Arrivals, RanksApart
from prepkit.ranks.world import world
from prepkit.rules import found

TOGETHER = (
    "Let all ranks step after the same backward, and end at the same batch: what a rank decides by its own data, as "
    "to skip a step, all have to decide alike, as by an all_reduce of it."
)


UNSEEN = (
    "optimizers have stepped, and no backward went over outputs of a module that holds what they step: a step inside "
    "of a module's own call, as by manual optimization, or weights that no call of a module holds as they are stepped"
)
TRANSFORMED = (
    "torch.func (grad, vjp, vmap) has made the gradients: inside of it nothing can be recorded. While you prove, "
    "make them by loss.backward(), or by torch.autograd.grad(loss, parameters)"
)
WAITING = "DDP waits for gradients that never came, as the audit says, and has averaged nothing that was to be stepped"
SAID = {
    "run.not-averaged": ("prove.not-averaged", "prove.part-of-ranks", "prove.past-wrapper"),
    "run.averaged-over-part": ("prove.part-of-ranks",),
    "run.others-gradients": ("prove.left-over",),
    "run.gradients-part": ("prove.not-averaged", "prove.part-of-ranks", "prove.past-wrapper", "prove.direction"),
}
"""Rules of an audit, which looks at what stands there, to those of a proof that tell the same from gradients."""
MEASURED = frozenset({"run.not-averaged", "run.ranks-values", "run.gradients-part"})
"""Rules of an audit whose findings are notes where each rank's gradients were measured, and are what they should be."""
NAMED = re.compile("`([^`]+)`")
ENOUGH = 20
"""Steps of that kind after which nothing else is waited for."""


STAGES = "the ranks hold stages, which were proven one by one, each with what the others had sent it"
Recorded = tuple[nn.Module, Record]
"""A model, and what was recorded of it on this rank."""
AT_END = "the end of its window"


class WindowDone(BaseException):
    """Ends the script after its first window; no ``except Exception`` of the script holds it up."""


class StillWaits(BaseException):
    """Ends the script at its first step, before which DDP had not averaged what is stepped."""


def prove_script(
    script: str,
    arguments: tuple[str, ...] = (),
    keep: str | None = None,
    gives_up: Callable[[str], object] | None = None,
    *,
    steps: int = 1,
) -> Proof | None:
    """The proof of a script's first window, on every rank; None where no optimizer steps a model that was called.

    With it the audit of its first step, as ``audit_script`` makes it. The script runs as ``python script arguments``
    would run it, on every rank that a launcher has started, until all that trains was stepped, or the next window
    begins. Rank 0 replays while the others wait.
    ``keep``: a folder that the record is left in, with what each module and operator has computed, for ``bisect``.
    ``gives_up``: as of ``Arrivals``.
    ``steps``: the window that ends with this step is proven, and a watch looks before each behind the first up to it.
    Raises ``ScriptEnded`` for what the script itself raises before that.
    """
    arrivals = Arrivals(gives_up)
    recorder = Recorder(traces=keep is not None, lingers=True)
    window = ScriptWindow(arrivals=arrivals, steps=steps, recorder=recorder)
    try:
        window.runs(script, arguments)
        proof = window.proven(keep)
    except (TooLarge, StillWaits) as error:
        arrivals.ends(str(error))
        proof = _unproven(str(error))
    except RanksApart as apart:
        proof = _left_apart(arrivals, apart)
    proof = None if proof is None else window.beside(proof)
    arrivals.lets_go()
    return proof


@define(eq=False)
class Rounds:
    """The steps of a program, window by window; the first window shows which optimizers step in each."""

    made: int = 0
    """Steps of the first optimizer."""
    _first: Any = None
    _now: set[Any] = field(factory=set)
    _each: frozenset[Any] = frozenset()

    def steps(self, optimizer: Any, counted: int) -> None:
        """An optimizer has stepped. ``counted``: steps of the first one, where somebody counts them."""
        self._first = optimizer if self._first is None else self._first
        self.made = counted or self.made + (optimizer is self._first)  # an engine may step part by part
        self._now.add(optimizer)

    def learns(self) -> None:
        """The first window is over."""
        self._each, self._now = frozenset(self._now), set()

    def over(self, steps: int) -> bool:
        """Whether a window is; or nothing else is waited for, where the one that ends with step ``steps`` should be."""
        if self._each <= self._now or self.made >= steps + ENOUGH:
            self._now = set()
            return True
        return False


@define(eq=False, kw_only=True)
class ScriptWindow:
    """The window of a script that ends with one of its steps, and what an audit has found on the way there."""

    arrivals: Arrivals
    steps: int
    """Whose window is recorded."""
    recorder: Recorder
    _looks: ScriptLooks = field(init=False)
    _turns: TurnsOfRanks = field(init=False)
    _behind: HeardBehind = field(factory=HeardBehind, init=False)
    _strays: HeardStrays = field(factory=HeardStrays, init=False)
    _mine: list[Recorded] = field(factory=list, init=False)
    _taken: int = field(default=0, init=False)
    """Steps with gradients, of any optimizer, since anything is recorded."""
    _rounds: Rounds = field(factory=Rounds, init=False)
    _met: bool = field(default=False, init=False)
    """Whether all ranks have come to the end."""

    def __attrs_post_init__(self) -> None:
        self._looks = ScriptLooks(arrivals=self.arrivals, steps=self.steps, ends=False)
        self._turns = TurnsOfRanks(self.arrivals)
        self.recorder.agrees, self.recorder.when_done = self._turns.agrees, self._ends
        self.recorder.lingers = self.steps == 1

    def runs(self, script: str, arguments: tuple[str, ...]) -> None:
        """Run the script until the window is complete, or to its end."""
        others, later = (None, self._behind.later) if self.steps == 1 else (self._looks, None)
        look = audited_at_first_step(self._looked, self.arrivals, others, self._forgets, later)
        hook = register_optimizer_step_post_hook(self._stepped)
        try:
            with self.recorder.on(), look, self._turns.on(self.recorder):
                _run(script, arguments, self.arrivals)
        finally:
            hook.remove()
            self._looks.close()

    def proven(self, keep: str | None) -> Proof | None:
        """Rank 0's proof on every rank; None where nothing was stepped. Collective. ``keep``: its folder."""
        self.arrivals.meet(AT_END, last=True)
        self.arrivals.meet("the proof", last=True)
        self._met = True
        if any(world().gather(self.steps > 1 and not self._taken)):
            return None if self._looks.found is None else _unproven(self._short())
        handed = any(world().gather(self.arrivals.hands))
        proof = (proven_stages if handed else proven_models)(self._mine or self._recorded(), keep)
        if proof is None and self._taken:
            return _unproven(TRANSFORMED if any(one.transformed for one in self.recorder.family) else UNSEEN)
        return proof

    def beside(self, proof: Proof) -> Proof:
        """The proof with the audit, and what was heard behind its last look, but for what it tells itself."""
        found = self._looks.found
        if found is None:
            return proof
        if self.arrivals.alone or (self.steps > 1 and self._met):
            found = everywhere(found)
        if not self.arrivals.alone:
            found = _with_strays(found, self._strays, proof)
        told = untold((*found.findings, *self._behind.beside(found)), proof.findings)
        if proof.facts.measured and not proof.facts.slopes:
            told = (evolve(one, severity=Severity.NOTE) if one.rule in MEASURED else one for one in told)
        return evolve(proof, audit=evolve(found, findings=tuple(told)))

    def _looked(self, found: Audit) -> None:
        self._looks.first(evolve(found, proven=True))
        if not self.arrivals.alone and any(one.rule == "run.gradients-waited-for" for one in found.findings):
            raise StillWaits(WAITING)  # what is recorded says nothing, as all ranks have found

    def _forgets(self) -> None:
        """What was recorded and counted is of something that no other rank trains."""
        self.recorder.forgets()
        self._taken = 0

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._strays.hears(optimizer, given_to(optimizer))
        if not self.recorder.lingers:
            if self._looks.found is not None:  # else this rank trains something by itself
                self._rounds.steps(optimizer, self._looks.watched.steps)
            if self.recorder.rests and self._rounds.over(self.steps):
                self._begins()
            return
        self._taken += any(param.grad is not None for param in given_to(optimizer))
        if self._taken >= ENOUGH and not any(one.stepped for one in self.recorder.family):
            raise WindowDone

    def _begins(self) -> None:
        """A window is over: the next is recorded where it is the last, and else nothing is."""
        self.recorder.rests = self._rounds.made < self.steps - 1
        self.recorder.lingers = not self.recorder.rests

    def _short(self) -> str:
        made = self._rounds.made
        told = f"the script has taken {count(made, 'step')}, and no window that ends with step {self.steps} or later"
        return f"{told} was complete: give --steps {max(1, min(made, self.steps - 1))}"

    def _ends(self) -> None:
        if not self.recorder.lingers:
            self.recorder.forgets()
            self._rounds.learns()
            self._begins()
            return
        if self.arrivals.hands and not self._mine:  # what this rank does for others behind its window is no part of it
            self._mine.extend(self._recorded())
        self.arrivals.leaves(AT_END, _stop, last=True)

    def _recorded(self) -> list[Recorded]:
        if self._looks.found is not None:
            facts = self._looks.found.facts
            by_hand = facts.window.averages_weights if facts.window else ""
            for one in self.recorder.family:
                one.around.averages = by_hand or facts.local_sgd
        return models_of(self.recorder)


def _stop() -> None:
    raise WindowDone


def _with_strays(found: Audit, strays: HeardStrays, proof: Proof) -> Audit:
    """With what is wrong with tensors of no module that optimizers have stepped behind the first too. Collective."""
    told = () if proof.facts.unproven else heard_behind({"strays_apart": strays_apart(strays.held)})
    known = {(one.rule, one.where) for one in found.findings}
    more = tuple(one for one in told if (one.rule, one.where) not in known)
    return evolve(found, findings=found.findings + more)


@define(eq=False)
class TurnsOfRanks:
    """A rank that ended its window alone would leave the others in a collective."""

    arrivals: Arrivals
    _turns: int = 0
    _collectives: int = 0

    @property
    def _end(self) -> str:
        return f"the end of turn {self._turns}"

    def agrees(self, waits: bool) -> bool:  # as ``Turns.agrees``
        """As ``Turns.agrees``."""
        end, self._turns = self._end, self._turns + 1
        return self.arrivals.wanted(end, waits, AT_END)

    @contextmanager
    def on(self, recorder: Recorder) -> Iterator[None]:
        """Inside, a rank that has stepped looks before each collective of the program whether the others come there.

        Where one has begun its next window, as by the call of a model that this rank leaves out, its own is over too.
        """

        def comes(plain: Callable[..., Any], *given: Any, **named: Any) -> Any:
            over = recorder.root is not None and all(one.done for one in recorder.family) and not recorder.ending
            if over and not goes_backward():
                at, self._collectives = self._collectives, self._collectives + 1
                if not self.arrivals.all_come(f"collective {at}", f"{self._end} wants"):
                    recorder.over()
            return plain(*given, **named)

        with ExitStack() as stack:
            for name in SENDS:
                stack.enter_context(around_calls(distributed_c10d, name, comes, also=dist))
            yield


def _left_apart(arrivals: Arrivals, apart: RanksApart) -> Proof:
    return _unproven(f"ranks send each other tensors. {apart}") if arrivals.hands else _uneven(str(apart))


def untold(audited: Iterable[Finding], proven: Iterable[Finding]) -> Iterator[Finding]:
    """Yield what an audit has found but for that which the proof beside it tells more exactly. Pure."""
    found = [*proven]
    told = {one.rule for one in found}
    unheld = {name for one in found if one.rule == "prove.not-stepped" for name in NAMED.findall(one.what)}
    for one in audited:
        names = set(NAMED.findall(one.what)) if one.rule == "run.missed" else set()
        if told.isdisjoint(SAID.get(one.rule, ())) and not (names and names <= unheld):
            yield one


def _run(script: str, arguments: tuple[str, ...], arrivals: Arrivals) -> None:
    """Until the window is done, or the script has come to its end."""
    try:
        with as_main(script, arguments):
            runpy.run_path(script, run_name="__main__")
        arrivals.ends("its script has come to its end, and has not stepped")
    except WindowDone:
        pass
    except TooLarge:
        raise
    except SystemExit as left:
        arrivals.ends("its script has left, and has not stepped")
        if left.code:
            raise ScriptEnded(f"{script} left with exit code {left.code} before its first step") from left
    except Exception as error:
        if said := arrivals.verdict():  # what it waited for has gone
            raise RanksApart(said) from error
        arrivals.ends(f"its script has raised {type(error).__name__}: {error!s:.200}")
        raise ScriptEnded(told(script, error)) from error


def proven_stages(mine: list[Recorded], keep: str | None) -> Proof | None:
    """The same of ranks that send each other tensors, and so may hold a stage of a pipeline each. Collective.

    Ranks that begin with the same weights are proven together, those of other stages by themselves.
    """
    weights = [
        {key: one for key, one in record.tensors.items() if key.startswith(("weight/", "buffer/"))}
        for _, record in mine
    ]
    every = world().gather([(type(root).__name__, digest(one)) for (root, _), one in zip(mine, weights, strict=True)])
    stages = [one[0] for one in every if len(one) == 1]
    if len(stages) < len(every) or len(set(stages)) == 1:
        return proven_models(mine, keep)
    ((root, record),) = mine
    mates = [rank for rank, one in enumerate(stages) if one == stages[world().rank]]
    apart = tuple(handed_back(world().gather(sides(record))))
    with _folder(keep) as folder:
        proofs = _by_themselves(root, record, folder / f"stage-{mates[0]}", mates)
    return joined([(name, _with_handed(one, at, apart)) for at, (name, one) in enumerate(proofs)])


def _with_handed(proof: Proof, at: int, apart: tuple[HandedBack, ...]) -> Proof:
    """The first one says what stages have handed back."""
    if at or not apart:
        return proof
    return evolve(found_in(evolve(proof.facts, handed_back=apart)), seconds=proof.seconds, held=proof.held)


def _by_themselves(
    root: nn.Module, record: Record, home: Path, mates: list[int], said: tuple[str, ...] = (STAGES,)
) -> list[tuple[str, Proof]]:
    """The proofs of ranks that hold the same, of which these are this rank's; each with its name. Collective."""
    head = evolve(
        record.head,
        rank=mates.index(world().rank),
        ran_as=world().rank,
        world=len(mates),
        limits=(*record.head.limits, *said),
    )
    write(Record(head, record.tensors), home)
    world().meet()
    each = world().gather((type(root).__name__, prove_records(root, home) if mates[0] == world().rank else None))
    return [(f"{name} of rank {rank}", one) for rank, (name, one) in enumerate(each) if one is not None]


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """Rank 0's folder for records, which goes unless it is to be kept. Collective."""
    made = keep or (tempfile.mkdtemp(prefix="prepkit-proof-") if world().is_first else "")
    folder = Path(world().from_first(made))
    try:
        yield folder
    finally:
        if world().is_first and keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def models_of(recorder: Recorder) -> list[Recorded]:
    """Every model that was stepped, with what was recorded of it."""
    stepped = [(one.root, one.record()) for one in recorder.family if one.root is not None and one.stepped]
    return [(root, Record(record.head, dict(record.tensors))) for root, record in stepped]


def proven_models(mine: list[Recorded], keep: str | None) -> Proof | None:
    """Rank 0's proof on every rank, of each model that was stepped; None where none was. Collective.

    ``keep``: a folder that the records are left in.
    """
    every = world().gather([type(root).__name__ for root, _ in mine])
    if not any(every):
        return None
    if any(one != every[0] for one in every):
        said = "; ".join(f"{', '.join(one) or 'nothing'} on rank {rank}" for rank, one in enumerate(every))
        return _unproven(f"the ranks had stepped different models when the first of them was done: {said}")
    own = _own_sizes(mine)
    with _folder(keep) as folder:
        homes = [folder, *(folder / f"beside-{at}" for at in range(1, len(mine)))]
        shared = [at for at in range(len(mine)) if at not in own]
        for at in shared:
            write(mine[at][1], homes[at])
        world().meet()
        proofs = [(every[0][at], prove_records(mine[at][0], homes[at])) for at in shared if world().is_first]
        proofs = world().from_first(proofs)
        proofs = [(name, by_slopes(one, *mine[at])) for (name, one), at in zip(proofs, shared, strict=True)]
        if any(one.facts.measured for _, one in proofs):
            proofs = [(name, _meant_alike(one)) for name, one in proofs]
        for at in own:
            home = folder / f"own-{at}-{world().rank}"
            proofs += _by_themselves(*mine[at], home, [world().rank], ())
        return joined(proofs)


def _meant_alike(proof: Proof) -> Proof:
    """Without the samples that ranks share, as they hold parts of another model, over which they send activations."""
    facts = evolve(proof.facts, same_samples=())
    return proof if facts.measured else evolve(found_in(facts), seconds=proof.seconds, held=proof.held)


def _own_sizes(mine: list[Recorded]) -> list[int]:
    """Numbers of the models of which each rank has one of its own, in other shapes than the others. Collective."""
    every = world().gather([{one.name: one.shape for one in record.head.params} for _, record in mine])
    alike = [all(one[at].keys() == every[0][at].keys() for one in every) for at in range(len(mine))]
    return [at for at in range(len(mine)) if alike[at] and any(one[at] != every[0][at] for one in every)]


def _uneven(why: str) -> Proof:
    facts = ProofFacts(world=world().size, shares=(), unproven=why)
    return Proof(facts=facts, findings=(found("prove.uneven", "loop", f"{why}.", TOGETHER),))


def _unproven(why: str) -> Proof:
    facts = ProofFacts(world=world().size, shares=(), unproven=why)
    return found_in(facts)
