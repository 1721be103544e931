"""The first windows of a prepared run, proven where they ran: records stay in memory, and travel by collectives alone.

Rank 0 replays. It is sent the small tensors of every rank at once, and asks for one after the other of those that are
left; the other ranks answer until it is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import accumulate, islice, takewhile
from math import prod
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from prepkit.config import ClipNorm, ClipValue
from prepkit.config.precision import PRECISIONS
from prepkit.facts.loop import LoopState
from prepkit.facts.proof import ClipProof, ProofFacts
from prepkit.findings.text import spans
from prepkit.objects import names
from prepkit.observe.prepared.instead import called_first
from prepkit.proving.hooks import heard
from prepkit.proving.other_rank import itself
from prepkit.proving.parts_of import sampled_gradients
from prepkit.proving.proof import Proof, found_in, prove_record
from prepkit.proving.record_file import Head, Record
from prepkit.proving.recorder import Recorder
from prepkit.proving.replay import HALF
from prepkit.proving.slopes import by_slopes
from prepkit.proving.steppers import alive_optimizers, given_to
from prepkit.ranks.world import RankZeroFailed, world
from prepkit.rules import due
from prepkit.rules.rule import Moment, answers
from prepkit.training.prepared import Prepared

Kinds = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every tensor of a record."""
Sent = tuple[Head, Kinds, tuple[str, ...]]
"""What a rank tells of its record: all but the tensors, and the keys of those that travel at once."""
AT_ONCE = 64 << 20
"""Bytes of the records of all ranks that travel before the replay begins."""


@frozen(eq=False)
class Elsewhere(Mapping[str, Tensor]):
    """The tensors of another rank's record: each travels when rank 0 looks at it, but for those that have already."""

    rank: int
    kinds: Kinds
    here: Mapping[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        if key in self.here:
            return self.here[key]
        shape, dtype = self.kinds[key]
        with _disable_current_modes(), itself():  # ``Alone`` forbids collectives, and this one is answered
            world().from_first((self.rank, key))
            return _sent(self.rank, torch.empty(shape, dtype=dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def __contains__(self, key: object) -> bool:
        return key in self.kinds


def _sent(rank: int, tensor: Tensor) -> Tensor:
    """A tensor of this rank's, on every rank. Collective."""
    wire = world().wire(tensor.device)
    sent = tensor.contiguous().view(-1).view(torch.uint8).to(wire)  # not every backend knows every dtype
    if sent.numel():
        world().send(sent, rank)
    return sent.cpu().view(tensor.dtype).view(tensor.shape)


def _early(tensors: Mapping[str, Tensor], most: int) -> tuple[str, ...]:
    """Keys of the tensors that travel at once: of the smallest as many as fit into so many bytes."""
    keys = sorted(
        (key for key, one in tensors.items() if one.layout is torch.strided), key=lambda key: tensors[key].nbytes
    )
    held = accumulate(tensors[key].nbytes for key in keys)
    return tuple(key for key, so_far in zip(keys, held, strict=True) if so_far <= most)


def _sent_at_once(mine: Record, told: Iterable[Sent]) -> Iterator[Elsewhere]:
    """Yield, for each rank behind the first, its tensors, of which the small ones have come. Collective."""
    for rank, (_, kinds, early) in islice(enumerate(told), 1, None):
        sizes = [prod(kinds[key][0]) * kinds[key][1].itemsize for key in early]
        row = torch.empty(sum(sizes), dtype=torch.uint8)
        if rank == mine.head.rank and early:
            row = torch.cat([mine.tensors[key].detach().cpu().reshape(-1).view(torch.uint8) for key in early])
        pieces = dict(zip(early, _sent(rank, row).split_with_sizes(sizes), strict=True))
        here = {key: one.clone().view(kinds[key][1]).view(kinds[key][0]) for key, one in pieces.items()}
        yield Elsewhere(rank, kinds, here if world().is_first else {})


def proven_together(root: nn.Module, mine: Record, hooked: tuple[str, ...] = (), late: tuple[int, ...] = ()) -> Proof:
    """The proof of the window of which each rank gives its record. Collective; the same on every rank.

    ``hooked`` and ``late``: as in ``replay.Replay``.
    """
    ranks = world()
    kinds = {key: (tuple(one.shape), one.dtype) for key, one in mine.tensors.items()}
    if not ranks.carries_data:
        return prove_record(root, (mine,), hooked=hooked, late=late)
    told: list[Sent] = ranks.gather((mine.head, kinds, _early(mine.tensors, AT_ONCE // ranks.size)))
    elsewhere = list(_sent_at_once(mine, told))
    if not ranks.is_first:
        while isinstance(asked := ranks.from_first(None), tuple):
            rank, key = asked
            shape, dtype = told[rank][1][key]
            _sent(rank, mine.tensors[key] if rank == ranks.rank else torch.empty(shape, dtype=dtype))
        if isinstance(asked, str):
            raise RankZeroFailed(f"the proof of a window: rank 0 raised {asked}")
        assert isinstance(asked, Proof)
        return by_slopes(asked, root, mine, late)
    try:
        others = (Record(head, tensors) for (head, _, _), tensors in zip(told[1:], elsewhere, strict=True))
        records = (mine, *others)
        proof = prove_record(root, records, hooked=hooked, late=late)
    except BaseException as error:  # the others wait to be told
        ranks.from_first(f"{type(error).__name__}: {error}")
        raise
    return by_slopes(ranks.from_first(proof), root, mine, late)


def _hooks_of(root: nn.Module) -> tuple[int, ...]:
    """Numbers of the hooks behind the forward of a root and of what it wraps."""
    return tuple(number for one in names.unwrap_root(root) for number in one._forward_hooks)


@define(eq=False)
class Proving:
    """Records the windows of a prepared run, and proves each when its step was taken."""

    ready: Prepared
    left: int
    """Windows that are still to be proven."""
    recorder: Recorder = field(init=False)
    _stack: ExitStack = field(factory=ExitStack, init=False)
    _calls: ExitStack = field(factory=ExitStack, init=False)
    """What hears of calls of any module, which ends with the step; hooks of a step cannot go inside of it."""
    _known: tuple[int, ...] = field(init=False)
    """Hooks of the root's forward that were there when the model was prepared."""
    _first: int = field(default=-1, init=False)
    """The recorder's hook before the root's forward."""
    _ahead: tuple[int, ...] = field(default=(), init=False)
    """Hooks that came before that, as they were put there later."""
    _beside: dict[int, nn.Module] = field(factory=dict, init=False)
    """Modules that train and were called from outside of any other, the root among them."""
    _stepped: dict[str, Tensor] = field(factory=dict, init=False)
    """Some elements of the gradients of the last window."""
    _over: bool = field(default=False, init=False)
    """Whether a window of a loop of the program's own was proven, inside of its step, where no hook can go."""

    def __attrs_post_init__(self) -> None:
        self._known = _hooks_of(self.ready.model)

    def begin(self) -> None:
        """Puts hooks on for one window."""
        plan = self.ready.plan
        clip, lowest = plan.owners.clip, PRECISIONS[type(plan.config.precision)].compute_dtype
        self.recorder = Recorder(
            root=self.ready.model,
            accumulation=plan.owners.accumulation_steps,
            clip=ClipProof(most=clip.max_norm, power=clip.norm_type) if isinstance(clip, ClipNorm) else None,
            value=clip.max_value if isinstance(clip, ClipValue) else None,
            computes_in=lowest if plan.config.compile is not None and lowest in HALF else None,
            raises=False,
            when_done=self.by_hand,
        )
        self.recorder.around.earlier = self._stepped
        self._over, before = False, set(self.ready.model._forward_pre_hooks)
        self._beside.clear()
        self._stack.enter_context(self.recorder.on())
        self._calls.enter_context(called_first(heard(self._hears, self.recorder.fails)))
        self._first = next((one for one in self.ready.model._forward_pre_hooks if one not in before), -1)
        self.ready.loop.proven = self.window

    def _hears(self, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters()):
            self._beside[id(module)] = module

    def _outside(self) -> Iterator[str]:
        """Yield what is called beside the model of the plan and stepped by an optimizer that is none of its own."""
        mine = {id(param) for param in self.ready.model.parameters()}
        trained = [(one, {id(param) for param in one.parameters()}) for one in self._beside.values()]
        others = [(one, own) for one, own in trained if own.isdisjoint(mine)]
        held = {id(param) for one in alive_optimizers() for param in given_to(one)} if others else set()
        for one, own in others:
            if not own.isdisjoint(held):
                said = f"`{type(one).__name__}` trains beside the model of the plan, by an optimizer of its own"
                yield f"{said}: nothing of it was proven"

    def window(self, ended: LoopState) -> None:
        """A window has ended. Collective: proves what was recorded, and reports it as any other rule.

        One that is full, or was cut short by ``accumulate(last=True)`` or by the end of a pass, is divided by the full
        number, and a micro-batch of several backwards (``more=True``) is their sum.
        """
        self._note_ahead()
        self._stack.close()
        full = self.ready.plan.owners.accumulation_steps
        if ended.micro_batches + 1 == full or ended.cut_short or ended.at_last_batch:
            self.recorder.divides = full
        self.ready.loop.proven = None
        if self.ready.skipped:  # nothing was stepped
            self.begin()
            return
        proof = self._proof()
        self.left -= 1
        if self.left:
            self.begin()
        self._tells(proof)

    def by_hand(self) -> None:
        """Everything that trains was stepped. Collective where that was by a loop of the program's own."""
        loop = self.ready.loop
        if loop.acting or loop.state.used or self._over:
            return
        loop.proven, self._over = None, True
        self._note_ahead()
        proof = self._proof()
        self.left -= 1
        goes_on = self.ready.model.register_forward_pre_hook(self._goes_on, prepend=True, with_kwargs=True)
        self._stack.callback(goes_on.remove)
        self._tells(proof)

    def _note_ahead(self) -> None:
        """Takes note of what was put before the recorder, which has heard what it gives; nothing more is called."""
        self._calls.close()
        hooks = self.ready.model._forward_pre_hooks
        self._ahead = tuple(takewhile(lambda one: one != self._first, hooks)) if self._first in hooks else ()

    def _goes_on(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The next window of such a loop begins with this call, of which the new hooks hear the end alone."""
        self._stack.close()
        if self.left:
            self.begin()
            self.recorder.enters(model, args, kwargs)

    def _tells(self, proof: Proof) -> None:
        """Puts a proof into the attestation, and reports it. Raises ``RunRefused`` for what is wrong."""
        self.ready._attest(answers(due(Moment.PROVE), Moment.PROVE, proof.facts))
        self.ready._court.hear(proof.findings)

    def _proof(self) -> Proof:
        ranks, recorder = world(), self.recorder
        norm = self.ready.grad_norm
        recorder.clipped_at(norm)
        for told in self._outside():
            recorder.tell(told)
        record = heard(recorder.record, recorder.fails)() if recorder.stepped else None
        self._stepped = sampled_gradients(record.tensors) if record is not None else {}
        said = recorder.given_up or ("" if record else "no optimizer has stepped what the model trains")
        every = ranks.gather(said)
        if record is not None and not any(every):
            hooked = dict.fromkeys(name for name, _ in self.ready.plan.facts.model.param_hooks)
            late = tuple(number for number in _hooks_of(self.ready.model) if number not in self._known)
            return proven_together(self.ready.model, record, tuple(hooked), (*late, *self._ahead))
        which = spans(tuple(rank for rank, one in enumerate(every) if one))
        why = f"rank {which}: {next(filter(None, every))}"
        return found_in(ProofFacts(world=ranks.size, shares=(), unproven=why))

    def end(self) -> None:
        """Takes hooks off, and says so if a window was never complete, unless the run fails."""
        self._calls.close()
        self._stack.close()
        if self.left and not self._over and sys.exc_info()[1] is None:
            self.left, recorder = 0, self.recorder
            rest = f"all that `{type(recorder.root).__name__}` trains" if recorder.stepped else "what the model trains"
            why = recorder.given_up or f"the run was closed before an optimizer of it had stepped {rest}"
            self._tells(found_in(ProofFacts(world=world().size, shares=(), unproven=why)))


def prove_windows(ready: Prepared, number: int) -> None:
    """Proves the next windows of a run that was just prepared. See ``pk.apply``."""
    proving = Proving(ready, number)
    proving.begin()
    ready.loop._hooks.append(_Removable(proving))


@frozen(eq=False)
class _Removable:
    """Ends with the loop's own hooks."""

    proving: Proving

    def remove(self) -> None:
        """As of a hook of torch's."""
        self.proving.end()
