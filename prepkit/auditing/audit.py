"""What is wrong with a model that is ready to be trained: one look at it, and every rule asked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from prepkit.auditing.outcome import Audit
from prepkit.auditing.running import RunningLook
from prepkit.auditing.window import goes_backward
from prepkit.facts import Env
from prepkit.facts.run import RunFacts
from prepkit.facts.window import WindowFacts
from prepkit.findings import RunRefused
from prepkit.objects.alive import alive
from prepkit.objects.whole_gradients import average_without
from prepkit.observe.fingerprints.parts import masters_apart
from prepkit.observe.prepared.around import accelerate_window, averages_by_hand, local_sgd, sends_by_hand
from prepkit.observe.prepared.averaging import left_waiting
from prepkit.observe.prepared.look import BEFORE_A_STEP, look, optimizers_of
from prepkit.observe.prepared.mixing import mixes_empty, writes_lost
from prepkit.observe.prepared.optimizers import past_engine
from prepkit.ranks.arrivals import LOOK_S, Arrivals
from prepkit.ranks.world import world
from prepkit.rules import due
from prepkit.rules.rule import Moment, Need, Rule, findings_of


def audit(
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    env: Env | None = None,
    ask_ranks: bool = True,
    at_step: bool = False,
    window: WindowFacts | None = None,
    awaited: Sequence[nn.Parameter] | None = None,
) -> Audit:
    """Return what is wrong with objects that are ready to be trained, whoever has prepared them; see ``pk.audit``.

    ``at_step``: the optimizers are about to step, so that their gradients are looked at too.
    ``window``: what a script did until then. ``awaited``: as of ``look``; None: it is averaged here, where other ranks
    do not come as they wait for that.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model.weight = torch.nn.Parameter(torch.ones(4, 4))
    >>> print(audit(model, optimizer).findings[0])
    error run.orphans at optimizer: `AdamW` steps 1 tensor that the model does not have (shapes [4, 4]), and ...
      fix: Make the optimizer after the model is wrapped, sharded, copied or changed: AdamW(model.parameters()).
    """
    begun = time.perf_counter()
    if window is not None and ask_ranks and world().size > 1:
        window = evolve(window, given=tuple(one for each in world().gather(window.given) for one in each))
    if awaited is None:
        awaited = _finished(model) if ask_ranks and world().carries_data and not goes_backward() else ()
    rules = due(Moment.AUDIT)
    needs = {need for rule in rules for need in rule.needs} & (BEFORE_A_STEP | ({Need.GRADIENTS} if at_step else set()))
    needs = needs if ask_ranks else needs - {Need.RANKS}
    facts = look(model, optimizer, scheduler, loaders, needs=needs, env=env, awaited=awaited)
    inside, unused = accelerate_window(optimizer) if at_step else (False, False)
    there = (at_step or goes_backward()) and any(param.grad is not None for param in model.parameters())
    facts = evolve(with_cut(facts, window), gradients_on=there or torch.is_grad_enabled())
    by_hand = window is not None and window.backwards >= (facts.accumulation or 0)  # which backward() divides too
    facts = evolve(facts, inside_window=inside, unused_window=unused and not by_hand)
    if facts.engine is not None and at_step:
        facts = evolve(facts, engine=evolve(facts.engine, past=past_engine(optimizer, model)))
        with suppress(RunRefused):  # of masters that lie where nobody can read them
            facts = evolve(facts, masters_apart=masters_apart(model))
    if facts.world_size > 1:
        sends = sends_by_hand() if window is None else ""
        facts = evolve(
            facts,
            averages_beside=_averages_beside(facts, model),
            mixes_empty=mixes_empty(model),
            writes_lost=writes_lost(model),
        )
        facts = evolve(facts, averages_by_hand=averages_by_hand(), sends_by_hand=sends, local_sgd=local_sgd())
    findings = findings_of(rules, facts)
    again = RunningLook(
        model=model, optimizers=optimizers_of(optimizer), scheduler=scheduler, facts=facts, asks_ranks=bool(facts.ranks)
    )
    return Audit(
        facts=facts,
        findings=findings,
        unasked=tuple(unasked(rules, facts, at_step=at_step or facts.gradients is not None)),
        seconds=time.perf_counter() - begun,
        live=again,
    )


def _averages_beside(facts: RunFacts, model: nn.Module) -> bool:
    """As in ``RunFacts``."""
    if any(param.averaged_by for param in facts.params):
        return False
    mine = {id(param) for param in model.parameters()}
    wrappers = alive(DistributedDataParallel, FSDPModule)
    return any(mine.isdisjoint(map(id, one.parameters())) for one in wrappers)


_AUDITS = count()


def _finished(model: nn.Module) -> tuple[nn.Parameter, ...]:
    """What DDP was given zeros for here, as others do not come: they wait in a backward that this rank has left."""
    if not any(isinstance(one, DistributedDataParallel) for one in model.modules()):
        return ()
    awaited = left_waiting(model)
    here = Arrivals().come(f"audit {next(_AUDITS)}", LOOK_S if awaited else 0.0)
    if here and "nccl" not in world().backend:  # of which only the device waits
        return ()
    average_without(awaited)
    return awaited


def with_cut(facts: RunFacts, window: WindowFacts | None) -> RunFacts:
    """The facts with what a script did, and what it may have cut over ranks by hand apart from what they hold alike.

    Without copies that are stepped in the place of the model's own: of these ranks may hold parts.
    """
    found = facts.gradients
    if window is not None and window.copies:
        held = {name for one in facts.optimizers for name in one.held if name}
        params = tuple(one for one in facts.params if one.name not in held)
        facts = evolve(facts, params=params, parted=tuple(name for name in facts.parted if name not in held))
        found = None if found is None else evolve(found, parted=tuple(one for one in found.parted if one not in held))
        facts = evolve(facts, gradients=found)
    if window is None or not window.communicates or found is None:
        return evolve(facts, window=window)
    bare = {param.name: param for param in facts.params if set(param.averaged_by) <= {"hook"}}  # which may only scale
    cut = tuple(name for name in facts.parted if name in bare and name in found.parted)
    matrices = [name for name, param in bare.items() if param.matrix and param.requires_grad]
    beside = tuple(
        name
        for name in found.parted
        if name in bare and not bare[name].matrix and name not in cut and _all_beside(name, matrices) <= set(cut)
    )  # as biases, which begin with the same on all ranks
    cut += beside if cut else ()
    params = tuple(evolve(one, averaged_by=()) if one.name in cut else one for one in facts.params)
    parted = tuple(name for name in facts.parted if name not in cut)
    return evolve(facts, params=params, parted=parted, window=evolve(window, cut=cut))


def _all_beside(name: str, matrices: Sequence[str]) -> set[str]:
    """The matrices of the smallest module that holds a parameter and has any; all of them where none has."""
    parts = name.split(".")[:-1]
    inside = (".".join(parts[:depth]) + "." for depth in range(len(parts), 0, -1))
    each = ({one for one in matrices if one.startswith(begin)} for begin in inside)
    return next(filter(None, each), set(matrices))


def unasked(rules: Iterable[Rule], facts: RunFacts, *, at_step: bool) -> Iterator[tuple[str, str]]:
    """Id of each rule that had to know what was not there to be seen, and what that is. Pure.

    Of one rank the rules about several ask nothing, and nobody knows what several would show.
    """
    absent: dict[Need, str] = {}
    if not facts.optimizers:
        absent |= dict.fromkeys((Need.OPTIMIZERS, Need.STATE), "the optimizer, as there is none")
    if not at_step:
        coming = "the gradients, of which some are still to come: the step is inside of the backward"
        absent[Need.GRADIENTS] = (
            coming if facts.window else "the gradients, as nobody is about to step: run prepkit audit SCRIPT"
        )
    elif facts.engine is not None:
        absent[Need.GRADIENTS] = "the gradients, which DeepSpeed keeps where nobody sees them"
    if not facts.loaders:
        absent[Need.LOADERS] = "the loaders, as there is none"
    if facts.world_size == 1:
        absent[Need.RANKS] = "what other ranks would see: run prepkit audit --torchrun 2 SCRIPT"
    elif not facts.ranks:
        absent[Need.RANKS] = "what the other ranks have seen, as they were not asked"
    if facts.window is None:
        absent[Need.BEFORE] = "what stood there before: pk.watch, or prepkit audit SCRIPT"
    for rule in rules:
        now = [
            need for need in rule.needs if need is not Need.BEFORE or Moment.DRIFT not in rule.at
        ]  # a watch asks again
        if (why := next((absent[need] for need in now if need in absent), None)) is not None:
            yield rule.id, why
