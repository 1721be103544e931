"""Parameters that some ranks use and others do not, where the ranks reduce the gradients of a unit together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prepkit.config import FSDP2
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Moment, Rule, options, with_engine

REDUCES_ZEROS = (2, 13)
"""torch from which ``FSDPModule.set_reduce_scatter_unused_params`` is known to work (pull requests 170667, 183040)."""
_OF_AN_EXPERT = re.compile(r"((?:.*\.)?experts)\.[^.]+\..+")
"""A parameter of one module in a list or dict called ``experts``; experts that are stacked have no such modules."""


def _experts(resolved: Resolved, engine: FSDP2) -> Iterator[Hit]:
    if resolved.facts.env.release >= REDUCES_ZEROS:
        yield from _lists(resolved, engine)


def _experts_on_old_torch(resolved: Resolved, engine: FSDP2) -> Iterator[Hit]:
    if resolved.facts.env.release < REDUCES_ZEROS:
        yield from _lists(resolved, engine)


def _lists(resolved: Resolved, engine: FSDP2) -> Iterator[Hit]:
    if engine.reduce_unused or not resolved.trains or resolved.arrives_sharded:
        return
    if resolved.data_parallel_size == 1:
        return
    whole = set(resolved.unsharded_params)
    params = (p.name for p in resolved.facts.model.params if p.requires_grad and p.name not in whole)
    lists = tuple(dict.fromkeys(found[1] for name in params if (found := _OF_AN_EXPERT.fullmatch(name))))
    if lists:
        what = f"{count(len(lists), 'list')} of experts ({some(lists)}) with parameters of their own: one that no token"
        yield Hit(at(lists[0]), f"{what} of a rank chooses gets no gradient there, and the ranks' reductions differ.")


def _old_torch(resolved: Resolved, engine: FSDP2) -> Iterator[Hit]:
    env = resolved.facts.env
    if engine.reduce_unused and env.release < REDUCES_ZEROS:
        what = f"torch {env.torch} reduces no zeros for parameters without a gradient; fully_shard does from 2.13 on."
        yield Hit("config.engine.reduce_unused", what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="units.unused-on-old-torch",
        summary="Zeros are reduced for parameters without a gradient by a torch that can.",
        check=with_engine(FSDP2, _old_torch),
        fix="Write `pip install 'torch>=2.13'`, or leave reduce_unused out.",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("pain 35", "torch FSDPModule.set_reduce_scatter_unused_params"),
        repair=options(FSDP2, reduce_unused=False),
    ),
    Rule(
        id="units.experts",
        summary="Under FSDP2 ranks whose data choose other experts reduce gradients of the same parameters.",
        check=with_engine(FSDP2, _experts),
        fix="Write FSDP2(reduce_unused=True).",
        severity=Severity.WARNING,
        source=("pain 26", "pain 31", "torch FSDPParamGroup.post_backward"),
        repair=options(FSDP2, reduce_unused=True),
    ),
    Rule(
        id="units.experts-on-old-torch",
        summary="Ranks whose data choose other experts have a torch with which FSDP2 reduces alike, or another engine.",
        check=with_engine(FSDP2, _experts_on_old_torch),
        fix="Write `pip install 'torch>=2.13'` and FSDP2(reduce_unused=True), or "
        "engine=DDP(find_unused_parameters=True).",
        severity=Severity.WARNING,
        source=("pain 26", "pain 31", "torch FSDPParamGroup.post_backward"),
    ),
)
"""Reporting order: the error, then the warnings."""
