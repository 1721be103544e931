"""Batches divided over ranks, in rounds: in each of them every rank reads one batch. Pure arithmetic on lists.

Every rank has the same number of batches, because forward and backward may be collective. What remains for a last,
incomplete round is shared out as ``Tail`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice, repeat
from typing import Any, Literal, NamedTuple

Tail = Literal["repeat", "fill", "spread", "trim", "drop"]
"""What becomes of a last round that is incomplete. ``repeat``: equal parts, filled up from the first samples.
``fill``: whole batches on every part, filled up from the first samples, as accelerate has it.
``spread``: every sample once, so that parts differ by one sample; a rank that is left with none reads one that does not
count. ``trim``: equal parts, and less than a sample per rank is dropped. ``drop``: nothing of it is read."""


class Share(NamedTuple):
    """What one rank reads in one round."""

    items: list[Any]
    """Samples, or their indices; never empty."""
    counted: int
    """How many of them, from the first, no rank has read before in this pass. The others are repeats."""
    consumed: int
    """What all ranks together have read when this round is over: samples, or batches where these stay whole."""
    last: bool
    """True if no round follows."""
    began: int = 0
    """In the first round of a stream, a digest of what is divided in it; 0: not known."""


def rounds(
    batches: Iterable[list[Any]],
    parts: int,
    tail: Tail,
    *,
    size: int | None,
    consumed: int = 0,
    first: tuple[Any, ...] = (),
) -> Iterator[tuple[Share, ...]]:
    """One share per part, round by round; part ``p`` of a full round reads its ``p``-th batch (behaviour DL-21).

    ``size``: samples in a full batch, which is cut up where a round is incomplete; None: batches are kept whole,
    whatever their length. ``consumed`` and ``first``: what was read before in this pass, and the samples (batches,
    where whole) that it began with.
    """
    held: list[list[Any]] | None = None  # the latest full round, until something follows
    rest: list[list[Any]] = []
    for batch in batches:
        rest.append(list(batch))
        if len(rest) == parts and (size is None or set(map(len, rest)) == {size}):
            first = first or tuple(_units(rest, size))
            if held is not None:
                consumed += len(held) if size is None else sum(map(len, held))
                yield _full(held, consumed, last=False)
            held, rest = rest, []
    yield from _ends(held, rest, first, parts, tail, size, consumed)


def length(batches: int, samples: int, parts: int, tail: Tail, *, size: int | None) -> int:
    """Number of rounds over so many batches of ``size`` samples; ``samples`` is not read where batches are whole."""
    if size is None:
        full, left = divmod(batches, parts)
        return full + (left > 0 and tail in ("repeat", "fill", "spread"))
    full, left = divmod(samples, size * parts)
    least = {"trim": parts, "drop": size * parts}.get(tail, 1)
    return full + (left >= least)


def _units(batches: list[list[Any]], size: int | None) -> list[Any]:
    """Return what is counted and repeated: samples, or batches where these stay whole."""
    return batches if size is None else list(chain.from_iterable(batches))


def _full(batches: list[list[Any]], consumed: int, *, last: bool) -> tuple[Share, ...]:
    return tuple(map(Share, batches, map(len, batches), repeat(consumed), repeat(last)))


def _ends(
    held: list[list[Any]] | None,
    rest: list[list[Any]],
    first: tuple[Any, ...],
    parts: int,
    tail: Tail,
    size: int | None,
    consumed: int,
) -> Iterator[tuple[Share, ...]]:
    """The last full round, and what follows it."""
    left = _units(rest, size)
    dropped = len(left) < {"trim": parts, "drop": len(left) + 1}.get(tail, 1)
    if held is not None:
        full = _units(held, size)
        if tail == "spread" and size is not None and 0 < len(left) < parts and len(full) + len(left) >= 2 * parts:
            yield from _evenly([*full, *left], parts, 2, consumed)  # else some rank would have nothing to read
            return
        consumed += len(full)
        yield _full(held, consumed, last=dropped)
    if dropped:
        return
    consumed += len(left)
    more = cycle(first or left)
    if size is None:
        repeated = islice(more, parts - len(left))
        yield (
            *_full(left, consumed, last=True),
            *(Share(list(one), counted=0, consumed=consumed, last=True) for one in repeated),
        )
    elif tail == "spread":
        yield from _evenly(left, parts, 1, consumed - len(left))
    else:
        each = len(left) // parts if tail == "trim" else -(-len(left) // parts)
        each = size if tail == "fill" and parts > 1 else each
        filled = [*left, *islice(more, max(0, each * parts - len(left)))]
        yield tuple(
            Share(filled[at : at + each], min(each, max(0, len(left) - at)), consumed, last=True)
            for at in range(0, each * parts, each)
        )


def _evenly(samples: list[Any], parts: int, count: int, consumed: int) -> Iterator[tuple[Share, ...]]:
    """So many rounds in which every sample is read once, by parts of equal size or one less."""
    each, larger = divmod(len(samples), parts * count)
    sizes = [each + (at < larger) for at in range(parts * count)]
    source = iter(samples)
    chunks = [list(islice(source, size)) for size in sizes]
    for at in range(count):
        chosen = chunks[at * parts : (at + 1) * parts]
        consumed += sum(map(len, chosen))
        yield tuple(Share(chunk or samples[:1], len(chunk), consumed, at == count - 1) for chunk in chosen)
