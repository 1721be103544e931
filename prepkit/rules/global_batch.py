"""The global batch against what the loaders read at once, the ranks that read, and a written accumulation."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.config import DeepSpeed
from prepkit.findings.text import count
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

_WHERE = "config.global_batch"
_SAY = "Pass loaders=[DataLoader(..., batch_size=4)], or --batch-size 4 on the command line, with your own number; or"


def _asked(resolved: Resolved) -> int | None:
    """The global batch, where it and the ranks are numbers that can be divided: other rules say what is not."""
    asked, written = resolved.cfg.global_batch, resolved.cfg.accumulation
    if asked is None or asked < 1 or resolved.batch.ranks < 1 or (written is not None and written < 1):
        return None
    return None if resolved.mesh is None else asked


def _derived(resolved: Resolved) -> bool:
    """Whether the accumulation is to follow from the global batch, whatever the ranks are."""
    asked = resolved.cfg.global_batch
    return asked is not None and asked >= 1 and resolved.cfg.accumulation is None


def _unknown(resolved: Resolved) -> Iterator[Hit]:
    if not _derived(resolved) or resolved.batch.sizes:
        return
    given = count(len(resolved.facts.loaders), "loader")
    what = (
        f"of the {given} none for training says how many"
        if resolved.facts.loaders
        else "no loader and no --batch-size is given"
    )
    own = "DeepSpeed(micro_batch=4) with your own number, or " if isinstance(resolved.cfg.engine, DeepSpeed) else ""
    yield Hit(
        _WHERE,
        f"Nothing says how many samples a rank reads at once: {what}.",
        f"{_SAY} write {own}accumulation=... in the place of global_batch.",
    )


def _differ(resolved: Resolved) -> Iterator[Hit]:
    sizes = resolved.batch.sizes
    if not _derived(resolved) or len(sizes) < 2:
        return
    yield Hit(
        _WHERE,
        f"The loaders for training read {', '.join(map(str, sizes))} samples at once: which one counts is not said.",
    )


def _two_places(resolved: Resolved) -> Iterator[Hit]:
    asked, steps = _asked(resolved), resolved.cfg.accumulation
    if asked is None or steps is None:
        return
    ranks, sizes = resolved.batch.ranks, resolved.batch.sizes
    if any(size * ranks * steps == asked for size in sizes) or (not sizes and asked % (ranks * steps) == 0):
        return
    reached = " or ".join(f"{size} x {ranks} ranks x {steps} = {size * ranks * steps}" for size in sizes)
    known = reached or f"{ranks} ranks x {steps} divide it for no batch of a loader"
    fix = "Leave accumulation out, which follows from global_batch; or leave global_batch out."
    yield Hit("config.accumulation", f"accumulation={steps}, and global_batch={asked}: {known}.", fix)


def _unreachable(resolved: Resolved) -> Iterator[Hit]:
    asked, whole = _asked(resolved), resolved.batch.at_once
    if asked is None or whole is None or asked % whole == 0 or resolved.cfg.accumulation is not None:
        return
    micro, ranks = resolved.batch.micro or 1, resolved.batch.ranks
    what = f"{asked} samples are no whole number of micro-batches: {micro} on each of {count(ranks, 'data rank')}"
    yield Hit(_WHERE, f"{what} are {whole} at once.", f"{_nearest(asked, whole)}{_ways(asked, micro, resolved)}.")


def _nearest(asked: int, whole: int) -> str:
    """The next global batches that are reached, each with its accumulation."""
    below = asked // whole
    told = [f"global_batch={n * whole} (accumulation {n})" for n in (below, below + 1) if n]
    return f"Write {' or '.join(told)}"


def _ways(asked: int, micro: int, resolved: Resolved) -> str:
    """Other ranks, and other batches of a loader, with which the global batch is reached as it is."""
    ranks = resolved.batch.ranks
    same = max(1, resolved.facts.env.world_size // ranks)
    fewer = [n for n in range(ranks - 1, 0, -1) if asked % (micro * n) == 0][:1]
    more = [n for n in range(ranks + 1, 2 * ranks + 1) if asked % (micro * n) == 0][:1]
    starts = [f"{n * same} ranks (accumulation {asked // (micro * n)})" for n in (*fewer, *more)]
    sizes = [n for n in range(micro - 1, 0, -1) if asked % (n * ranks) == 0][:1]
    parts = [f"start {' or '.join(starts)}"] if starts else []
    for size in sizes:
        steps = f"accumulation {asked // (size * ranks)}"
        parts.append(f"build the loader with batch_size={size} ({steps}), --batch-size {size} on the command line")
    return "".join(f"; or {part}" for part in parts)


RULES: tuple[Rule, ...] = (
    Rule(
        id="global-batch.unknown",
        summary="Where the global batch gives the accumulation, it is known how many samples a rank reads at once.",
        check=_unknown,
        fix=f"{_SAY} write accumulation=... in the place of global_batch.",
        overridable=False,
        source=("pain 4", "DS-8"),
    ),
    Rule(
        id="global-batch.loaders-differ",
        summary="Where the global batch gives the accumulation, all loaders for training have one batch size.",
        check=_differ,
        fix='Write loaders=EachLoader((ShardLoaders(), ShardLoaders(purpose="evaluation"))) where one of them '
        "evaluates, or write accumulation=... in the place of global_batch.",
        overridable=False,
        source=("pain 4", "DS-7"),
    ),
    Rule(
        id="global-batch.two-places",
        summary="An accumulation that is written beside a global batch is the one that it gives.",
        check=_two_places,
        fix="Leave accumulation out, which follows from global_batch; or leave global_batch out.",
        overridable=False,
        source=("pain 4", "DS-11"),
    ),
    Rule(
        id="global-batch.unreachable",
        summary="The global batch is a whole number of micro-batches of all data ranks.",
        check=_unreachable,
        fix="Write a global_batch that divides by the samples of all data ranks.",
        overridable=False,
        source=("pain 4", "DS-23a"),
    ),
)
"""Reporting order: what is not known, what contradicts, what does not divide."""
