"""Collectives in a recorded forward over tensors that carry no gradient: what they gave, and the same given again.

As the count of all ranks' tokens, which a model adds up itself. They are heard where torch's functions hand them to a
process group: what DDP sends from inside of torch, and what shards or replicates a model, is not the model's.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch._C import _distributed_c10d  # a finished work has no public door
from torch.distributed import distributed_c10d

from prepkit.facts.proof import OWN_COLLECTIVE
from prepkit.objects.local_part import local
from prepkit.observe.prepared.instead import around_calls
from prepkit.proving import tree
from prepkit.proving.loss_graph import Factor
from prepkit.proving.parts_of import CannotReplay
from prepkit.proving.record_file import COLLECTIVES, Question, Record
from prepkit.ranks.world import world

MOST = 1 << 20
"""Elements that are kept of one call; a collective that would take more is not."""
FEW = 16
"""Numbers of an answer that may be counts by which a loss is divided."""
SURELY = 32
"""From this count on a loss that was divided by the same number was divided by it."""
GATHERS = frozenset({"allgather", "all_gather_single", "_allgather_base"})
IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce"})
"""Those that write into what they are given; of all others, the first argument takes what comes."""
HERE = tuple(name for name in sorted(COLLECTIVES) if hasattr(getattr(dist, "ProcessGroup", None), name))
"""Methods of a process group in this torch."""
PASSES = re.compile(
    r"[/\\](?:torch[/\\](?:distributed[/\\][^/\\]*|overrides|utils[/\\]_\w+)|deepspeed[/\\](?:comm|utils)[/\\].*)\.py$"
    r"|[/\\](?:typing_extensions|functools|contextlib)\.py$"
)
"""Files through which a collective only passes, beside prepkit's that listen."""
SHARES = re.compile(
    r"[/\\](?:torch[/\\]distributed[/\\](?:fsdp|tensor|_composable|algorithms|optim)|torch[/\\]nn[/\\]parallel"
    r"|deepspeed|prepkit[/\\]ranks)[/\\]"
)
"""Folders of what shards or replicates a model, and of prepkit's own collectives."""
HOME = str(Path(__file__).parents[1])
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _asked_at() -> str:
    """The line that asks, as ``train.py:31``; empty: it is no collective of the model's own, or one with a gradient."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not found and SHARES.search(file):
            return ""
        if not (found or file.startswith(HOME) or PASSES.search(file)):
            found = f"{Path(file).name}:{frame.f_lineno}"
        if frame.f_code is _APPLY and _needs_gradient(frame.f_locals.get("args", ())):
            return ""
        frame = frame.f_back  # type: ignore[assignment]  # the last one has none
    return found


def _needs_gradient(given: Any) -> bool:
    return any(one.requires_grad for one in tree.tensors_of(given))


def _tensors(args: Any) -> list[Tensor]:
    return [one for given in args if isinstance(given, Tensor | list | tuple) for one in tree.tensors_of(given)]


def _question(name: str, args: Any, kwargs: Any) -> Question | None:
    """What is asked by a method of a process group; None: it carries a gradient, or is not the model's."""
    given = _tensors(args)
    unkept = _tensors(kwargs.values()) or any(one.layout is not torch.strided for one in given)
    if unkept or _needs_gradient(given) or not (line := _asked_at()):
        return None
    return Question(name=name, line=line, shapes=tuple(tuple(one.shape) for one in given))


@define(eq=False)
class Answer:
    """A question, and what it gave."""

    asked: Question
    into: list[Tensor]
    """What takes it."""
    before: list[Tensor]
    own: list[float]
    """This rank's numbers, where they are few and are added up over the ranks, or gathered from them."""
    given: dict[int, Tensor] = field(factory=dict)
    """Places among its tensors, which begin with what takes it, and what came there."""
    lies_at: int = 0
    """Place in memory of what took the first answer."""
    mixes: bool = False
    """Whether several numbers of each rank come together in it, which are no counts."""

    @classmethod
    def to(cls, asked: Question, args: Any) -> Answer:
        """Before it is asked."""
        into, own = _tensors(args[:1]), list[float]()
        mine = _tensors(args[:1] if asked.name == "allreduce" else args[1:])
        sums = any(getattr(one, "reduceOp", None) == dist.ReduceOp.SUM for one in args[1:])
        added = asked.name in GATHERS or (asked.name == "allreduce" and sums)
        if added and len(mine) == 1 and mine[0].numel() <= FEW and not mine[0].is_complex():
            own = local(mine[0]).detach().double().reshape(-1).tolist()
        several = any(one.numel() > 1 and (one.is_floating_point() or one.is_complex()) for one in into)
        before = [local(one).detach().cpu().clone() for one in into]
        return cls(asked, into, before, own, mixes=several and asked.name != "broadcast")

    def counts(self) -> Iterator[tuple[float, float]]:
        """Yield this rank's numbers with those of all ranks together."""
        every = [one.double().reshape(-1) for one in self.given.values()]
        if self.own and all(one.numel() == len(self.own) for one in every[1:]) and every:
            whole = torch.cat(every).reshape(-1, len(self.own)).sum(0).tolist()
            yield from zip(self.own, whole, strict=True)

    def came(self) -> None:
        """The answer is there."""
        for at, (one, before) in enumerate(zip(self.into, self.before, strict=True)):
            now = local(one).detach().cpu().clone()
            if self.asked.name not in IN_PLACE or not torch.equal(now, before):
                self.given[at] = now
        self.lies_at = self.into[0].untyped_storage().data_ptr() if self.into else 0
        self.into, self.before = [], []


@define(eq=False)
class AnswersInCall:
    """Those of one call."""

    answers: list[Answer] = field(factory=list)
    open: bool = True
    """Whether the call runs."""
    _waits: list[tuple[Any, Answer]] = field(factory=list)
    _left: int = MOST

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(one.nbytes for answer in self.answers for one in answer.given.values())

    def asks(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A method of a process group is called in it."""
        asked = _question(name, args, kwargs)
        numel = sum(one.numel() for one in _tensors(args[:1]))
        if asked is None or numel > self._left:
            return plain(*args, **kwargs)
        self._left -= numel
        answer = Answer.to(asked, args)
        self.answers.append(answer)
        work = plain(*args, **kwargs)
        if work is None:
            answer.came()
        else:
            self._waits.append((work, answer))
        return work

    def waited(self, work: Any) -> None:
        """The program has waited for one."""
        for one, answer in self._waits:
            if one is work:
                answer.came()
        self._waits = [pair for pair in self._waits if pair[0] is not work]

    def ended(self) -> None:
        """The call is over: what is still under way came too late for it."""
        self.open = False
        late = [answer for _, answer in self._waits]
        self.answers = [one for one in self.answers if not any(one is other for other in late)]
        self._waits.clear()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what came, by its number and place."""
        for at, answer in enumerate(self.answers):
            yield from ((f"{at}/{place}", one) for place, one in answer.given.items())

    @property
    def mixes(self) -> bool:
        """Whether it got numbers of other ranks, and no counts alone, so that a loss may be one of all of them."""
        return any(one.mixes for one in self.answers)

    def recorded(self) -> tuple[Question, ...]:
        """As the file has it."""
        return tuple(one.asked for one in self.answers)


def own_count(factor: Factor, calls: Sequence[AnswersInCall], given: Collection[float]) -> float | None:
    """The part that a rank has in the number by which a sum was divided, as collectives tell; None: nobody knows.

    It was divided by that number, or by the mean of the ranks. ``given``: numbers that came from outside, which may be
    those of a whole window.
    """
    ranks = world().size
    for answer in (answer for call in calls if factor.total for answer in call.answers):
        for own, whole in answer.counts():
            for by, lies_at in factor.divisors:
                known = lies_at == answer.lies_at or whole >= SURELY
                known = known and own not in given
                if known and 0 < own < whole and any(isclose(by, one, rel_tol=1e-6) for one in (whole, whole / ranks)):
                    return own
    return None


def listened(now: Callable[[], AnswersInCall | None]) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What stands for methods of process groups while a recorder listens; ``now``: of the call that runs."""

    def asks(name: str, plain: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        answers = now()
        if answers is None or torch.compiler.is_compiling():
            return plain(group, *args, **kwargs)
        return answers.asks(name, partial(plain, group), args, kwargs)

    def waits(plain: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(work, *args, **kwargs)
        if (answers := now()) is not None:
            answers.waited(work)
        return result

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (dist.ProcessGroup, name, partial(asks, name)) for name in HERE
    ]
    return [*places, (_distributed_c10d.Work, "wait", waits)] if HERE else []


# --- the same again ---------------------------------------------------------------------------------------------------


class _PlainData(pickle.Unpickler):
    """Objects that ranks have sent each other, as far as they are plain data: a record may come from anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        """See pickle."""
        said = f"the model sends objects of class {module}.{name:.40} to other ranks in its forward"
        raise CannotReplay(f"{said}, {OWN_COLLECTIVE}")


@frozen(eq=False)
class _Again:
    """Answers a call's questions as they were answered."""

    record: Record
    number: int
    _at: list[int] = field(factory=lambda: [0])
    """Of the next question."""
    _lines: set[str] = field(factory=set)
    """That have asked."""

    @property
    def questions(self) -> Sequence[Question]:
        """Those that were recorded."""
        return self.record.head.calls[self.number].asked

    def answers(self, name: str, plain: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of a method of a process group."""
        asked = _question(name, args, kwargs)
        if asked is None:
            return plain(group, *args, **kwargs)
        following = range(self._at[0], len(self.questions))
        at = next((at for at in following if self.questions[at] == asked), None)
        if at is None:
            if any(one.line == asked.line for one in self.questions):
                raise self._other(asked)
            return plain(group, *args, **kwargs)
        self._at[0] = at + 1
        self._lines.add(asked.line)
        into = _tensors(args[:1])
        for place, one in enumerate(into):
            if (given := self.record.tensors.get(f"asked/{self.number}/{at}/{place}")) is not None:
                one.data.copy_(given)
        done: Any = torch.futures.Future()
        done.set_result(into)
        return _distributed_c10d._create_work_from_future(done)  # type: ignore[attr-defined]

    def ended(self) -> None:
        """Raises ``CannotReplay`` where lines that have asked had asked more often."""
        for one in self.questions[self._at[0] :]:
            if one.line in self._lines:
                raise self._other(one)

    def _other(self, asked: Question) -> CannotReplay:
        which = f"{asked.name} at {asked.line} in call {self.number} on rank {self.record.head.rank}"
        said = f"the forward does not repeat the collectives of the run ({which})"
        return CannotReplay(f"{said}, {OWN_COLLECTIVE}")


def answered(record: Record, number: int, entered: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a call, to which collectives give what they gave in the run."""
    if not record.head.calls[number].asked:
        return entered

    def forward(*args: Any, **kwargs: Any) -> Any:
        again = _Again(record, number)
        with _in_place_of_others(again):
            output = entered(*args, **kwargs)
        again.ended()
        return output

    return forward


@contextmanager
def _in_place_of_others(again: _Again) -> Iterator[None]:
    with ExitStack() as stack:
        for name in HERE:
            stack.enter_context(around_calls(dist.ProcessGroup, name, partial(again.answers, name)))
        stack.enter_context(patch.object(distributed_c10d, "_unpickler", _PlainData))
        yield
