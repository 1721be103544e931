"""What ranks and micro-batches of a window have otherwise than each other, or alike, and what each loss counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from math import isclose, log

import torch
from attrs import evolve
from torch import Tensor

from prepkit.facts.proof import LossShare
from prepkit.findings.text import count, some, spans
from prepkit.observe.prepared.reading import digest_of
from prepkit.proving.hooks import alike
from prepkit.proving.parts_of import CannotReplay, Replica, numbers, replicas
from prepkit.proving.record_file import Disturbed, Record

LOOKED_AT = 4096
"""Elements of each gradient that tell in which dtype it was sent."""
FEW = 16
"""Fewer different ones tell nothing, as of signs."""
STATE = 1e-3
"""Of an optimizer's state, so much is rounding where ranks add up in another order."""
COUNTED = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that a batch norm changes in each forward."""


def weights_apart(records: tuple[Record, ...]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Every parameter with the holders of replicas that differ before the step, and that differ after it.

    Those after it by more than a trace of what was moved. Raises ``CannotReplay`` where the ranks have not recorded a
    whole one.
    """
    for name in (one.name for one in records[0].head.params):
        before = replicas(records, "weight", name)
        if not before:
            raise CannotReplay(f"the ranks have not recorded all parts of {name}")
        after = replicas(records, "after", name)
        moved = float((numbers(after[0].values).double() - numbers(before[0].values).double()).norm()) if after else 0.0
        yield name, _others(before, 0.0), _others(after, 1e-3 * moved)


def changed_later(records: tuple[Record, ...]) -> tuple[str, ...]:
    """Parameters that something has changed behind the step."""
    return tuple(
        one.name for one in records[0].head.params if any(f"later/{one.name}" in record.tensors for record in records)
    )


def averaged_later(records: tuple[Record, ...], after: tuple[str, ...], later: tuple[str, ...]) -> bool:
    """Return whether all parameters that were apart after the step are alike behind it, and not those of one rank."""
    alike = bool(after) and set(after) <= set(later) and not any(_later_apart(records, name) for name in after)
    return alike and not all(_as_one_had_it(records, name) for name in after)


def _as_one_had_it(records: tuple[Record, ...], name: str) -> bool:
    """Return whether behind the step all have what one of them had after it."""
    found, after = replicas(records, "later", name), replicas(records, "after", name)
    return bool(found) and any(torch.equal(found[0].values, one.values) for one in after)


def undone_later(records: tuple[Record, ...], later: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield parameters that a rank has stepped, and that something put back behind the step, with the first such rank.

    As where ranks step parts of the model, and a part is sent by a rank that does not step it.
    """
    for name in later:
        for record in records:
            before, after, then = (record.tensors.get(f"{kind}/{name}") for kind in ("weight", "after", "later"))
            group = next((one.group for one in record.head.params if one.name == name), None)
            if group is None or before is None or after is None or then is None or torch.equal(before, after):
                continue
            if torch.equal(before, then):
                yield name, record.head.rank
                break


def _later_apart(records: tuple[Record, ...], name: str) -> bool:
    found = replicas(records, "later", name)
    return not found or bool(_others(found, 1e-6 * float(numbers(found[0].values).double().norm())))


def _others(found: tuple[Replica, ...], allowed: float) -> tuple[int, ...]:
    """Holders of replicas that are further from the first one."""
    held = [(one.holder, numbers(one.values).double()) for one in found]
    return tuple(holder for holder, values in held[1:] if float((values - held[0][1]).norm()) > allowed)


def buffers_apart(records: tuple[Record, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Buffers that ranks begin with; what a batch norm has counted is each rank's own."""
    for key, mine in records[0].tensors.items():
        if key.startswith("buffer/") and not key.endswith(COUNTED):
            others = [record for record in records[1:] if key in record.tensors]
            ranks = tuple(one.head.rank for one in others if not alike(mine, one.tensors[key]))
            if ranks:
                yield key.removeprefix("buffer/"), ranks


def _run_apart(records: tuple[Record, ...]) -> Iterator[str]:
    """Yield how ranks run, where they should run alike."""
    for what, told in (
        ("computed in", lambda head: head.dtype),
        ("loss scale", lambda head: f"{head.scale:g}"),
        ("modules in evaluation", lambda head: str(len(head.evaluating))),
        ("optimizer", lambda head: head.optimizer),
        ("layers", lambda head: _without(head.settings, records)),
    ):
        mine = told(records[0].head)
        yield from (
            f"{what}: {mine} on rank 0, {told(record.head)} on rank {record.head.rank}"
            for record in records[1:]
            if told(record.head) != mine
        )


def _without(settings: tuple[str, ...], records: tuple[Record, ...]) -> str:
    """Numbers of layers that are not those of every rank."""
    every = set.intersection(*(set(record.head.settings) for record in records))
    return ", ".join([one for one in settings if one not in every][:3])


def options_apart(records: tuple[Record, ...]) -> tuple[str, ...]:
    """Options of the optimizer, and of the run, that are not alike, with who has what."""
    said = list(_run_apart(records))
    for number, text in enumerate(records[0].head.groups):
        mine = json.loads(text)
        for record in records[1:]:
            other = json.loads(record.head.groups[number]) if number < len(record.head.groups) else {}
            said += [
                f"{key} of group {number}: {value} on rank 0, {other.get(key)} on rank {record.head.rank}"
                for key, value in mine.items()
                if other.get(key) != value
            ]
    return tuple(said)


def state_apart(records: tuple[Record, ...]) -> Iterator[str]:
    """Yield what an optimizer has of parameters on one rank alone, or on ranks that hold the same of them otherwise."""
    keys = (key for record in records for key in record.tensors if key.startswith(("state.", "number.")))
    for kind in sorted({key.partition("/")[0] for key in keys}):
        found: dict[str, list[str]] = {}
        for one in records[0].head.params:
            if why := _kind_apart(records, kind, one.name):
                found.setdefault(why, []).append(one.name)
        for why, names in found.items():
            yield f"{kind.partition('.')[2]} of {count(len(names), 'parameter')} ({some(names)}) {why}"


def _kind_apart(records: tuple[Record, ...], kind: str, name: str) -> str:
    """Which ranks have other state of one parameter than others that step it; empty: none."""
    held = [(one, part) for one in records for part in one.head.params if part.name == name and part.here]
    held = [(one, part) for one, part in held if part.group is not None]
    have = tuple(one.head.rank for one, _ in held if f"{kind}/{name}" in one.tensors)
    if len(have) < len(held):
        return f"is on rank {spans(have)} alone" if have else ""
    first: dict[object, Tensor] = {}
    others: list[int] = []
    for one, part in held:
        mine = numbers(one.tensors[f"{kind}/{name}"]).double()
        other = first.setdefault((part.start, part.dims, part.here), mine)
        if float((mine - other).norm()) > STATE * float(other.norm()):
            others.append(one.head.rank)
    return f"is other on rank {spans(tuple(others))} than on rank {held[0][0].head.rank}" if others else ""


def same_samples(records: tuple[Record, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks that have read what others have, though each computes with all of the model; those that did, together.

    Not those whose losses ask for other rows of what it says, as of one graph, or for something else of it.
    """
    by: dict[tuple[str, ...], list[int]] = {}
    said = {digest_of([one for key, one in record.tensors.items() if key.startswith("seen/")]) for record in records}
    if not any(record.head.cut or record.head.disturbed.lends for record in records):
        for record in records:
            key = (*read(record), _asked_for(record, signs=len(said) == 1)) if record.head.calls else ()
            by.setdefault(key, []).append(record.head.rank)
    return tuple(tuple(ranks) for what, ranks in by.items() if what and len(ranks) > 1)


def _asked_for(record: Record, *, signs: bool) -> str:
    """A digest of which rows of each call's outputs have got gradients; or of which sign, where ranks say the same."""
    keys = (f"output/{at}/{place}" for at, call in enumerate(record.head.calls) for place in call.outputs)
    arrived = [one for key in keys if (one := record.tensors.get(key)) is not None and one.dim()]
    return digest_of([one.sign() if signs else (one != 0).any(-1) for one in arrived])


def same_draws(records: Iterable[Record]) -> Iterator[tuple[int, int, int]]:
    """Yield ranks whose generator stood in two micro-batches where it had stood before, with both."""
    for record in records:
        begun: list[tuple[int, Tensor]] = []
        for number, call in enumerate(record.head.calls):
            if call.micro in (micro for micro, _ in begun):
                continue
            state = record.tensors[f"input/{number}/rng"]
            if earlier := [micro for micro, other in begun if torch.equal(state, other)]:
                yield record.head.rank, earlier[0], call.micro
                break
            begun.append((call.micro, state))


def miscounted(records: tuple[Record, ...]) -> str:
    """How the number that the run was given for a loss is another than that of the graph; empty: all are in one ratio.

    A ratio that is the same everywhere changes no sum: as where a loss is a mean over elements, and samples are given.
    """
    every = [(record.head.rank, at, one) for record in records for at, one in enumerate(record.head.micros)]
    known = [(rank, at, one.tokens, one.count) for rank, at, one in every if one.tokens and one.count]
    whole = all(count == round(count) for *_, count in known)  # with weights of classes it is a sum of them
    ratios = [tokens / count for _, _, tokens, count in known]
    if len(known) < len(every) or not whole or max(ratios) <= 1.01 * min(ratios):
        return ""
    rank, at, tokens, count = max(known, key=lambda one: abs(log(one[2] / one[3])))
    return f"The loss of micro-batch {at} of rank {rank} is a mean over {count:g}, and mean_over={tokens:g} was given"


def odd_calls(records: tuple[Record, ...]) -> Iterator[str]:
    """Yield what is odd in how micro-batches of a rank were computed, beside each other."""
    yield from _read_again(records)
    yield from _modes_apart(records)
    if lines := list(dict.fromkeys(one.line for record in records for call in record.head.calls for one in call.asked)):
        what = f"the forward asks other ranks ({some(lines)}), and no gradient flows through what they answer"
        yield f"{what}: it was given the answers of the run again"


def _modes_apart(records: tuple[Record, ...]) -> Iterator[str]:
    """Yield a sentence where a micro-batch of a rank was computed in other modes than the first one."""
    for record in records:
        modes: dict[int, set[tuple[str, ...]]] = {}
        for call in record.head.calls:
            if call.micro >= 0 and call.outputs:
                modes.setdefault(call.micro, set()).add(call.evaluating)
        first = modes.get(0, set())
        for at, found in modes.items():
            if first and first.isdisjoint(found):
                still = len(set(min(found)) ^ set(min(first)))
                said = f"micro-batch {at} of rank {record.head.rank} was computed with {count(still, 'module')} in"
                yield f"{said} another mode, train() or eval(), than micro-batch 0: dropout and batch norms are others"
                return


def _read_again(records: tuple[Record, ...]) -> Iterator[str]:
    """Yield a sentence where two micro-batches of a rank, whose losses were made alike, were of the same samples."""
    for record in (one for one in records if not one.head.disturbed.lends):
        seen: dict[tuple[object, ...], int] = {}
        for at, micro in enumerate(record.head.micros):
            calls = [(call.inputs, call.digest) for call in record.head.calls if call.micro == at]
            if (first := seen.setdefault((micro.like, *calls), at)) != at:
                yield f"micro-batches {first} and {at} of rank {record.head.rank} were of the same samples"
                return


def read(record: Record) -> list[str]:
    """Digests of what each call was given."""
    return [call.digest for call in record.head.calls]


def loss_shares(records: tuple[Record, ...], reached: Sequence[frozenset[str]] = ()) -> tuple[LossShare, ...]:
    """Each backward of each rank; ``reached``: the parameters to which a gradient of it has come."""
    left = iter(reached)
    kinds = [_kinds(record, [next(left, frozenset()) for _ in record.head.micros]) for record in records]
    return tuple(
        LossShare(
            rank=record.head.rank,
            micro=at,
            weight=weight_of(records, record, at),
            total=of.total,
            given=of.given,
            meant=of.meant,
            operators=of.operators,
            count=of.count if of.tokens is None else None,
            rows=_rows(record, at),
            each=_each(record, at),
            kind=kind[at],
            added=of.added,
        )
        for record, kind in zip(records, kinds, strict=True)
        for at, of in enumerate(record.head.micros)
    )


def counted(records: tuple[Record, ...]) -> tuple[Record, ...]:
    """The records, with the counts of sums that the program divides by the elements of all ranks' together."""
    every = [micro for one in records for micro in one.head.micros]
    whole = sum(micro.summed or 0.0 for micro in every)
    plain = all(micro.total and micro.summed and micro.tokens is micro.count is None for micro in every)
    if not plain or not all(any(isclose(by, whole) for by in micro.divisors) for micro in every):
        return records
    heads = (one.head for one in records)
    known = (evolve(one, micros=tuple(evolve(micro, count=micro.summed) for micro in one.micros)) for one in heads)
    return tuple(evolve(one, head=head) for one, head in zip(records, known, strict=True))


def _rows(record: Record, at: int) -> int:
    each = [call.returned[0].shape for call in record.head.calls if call.micro == at and call.returned]
    return sum(shape[0] for shape in each if shape)


def _kinds(record: Record, reached: Sequence[frozenset[str]]) -> list[int]:
    """Return of each micro-batch the first one whose loss is of its kind: made alike, of a model that was called alike.

    A number that the model is given may choose a head of its, which trains alone; what a router chooses is no kind.
    """
    given = [[call.inputs for call in record.head.calls if call.micro == at] for at in range(len(reached))]
    found: list[int] = []
    for at, micro in enumerate(record.head.micros):
        same = (
            kind
            for kind in dict.fromkeys(found)
            if record.head.micros[kind].like == micro.like
            and (given[kind] == given[at] or reached[kind] == reached[at])
        )
        found.append(next(same, at))
    return found


def weight_of(records: tuple[Record, ...], record: Record, at: int) -> float:
    """The factor of a loss, without the loss scale, over that by which an average of all would carry it."""
    every = [micro for one in records for micro in one.head.micros]
    micro, scale, number = record.head.micros[at], record.head.scale, number_of(record)
    if micro.tokens is not None:
        return micro.tokens * sum(map(number_of, records)) / sum(one.tokens or 0.0 for one in every)
    if not micro.total:
        return micro.factor * number / scale
    samples = [one.count for one in every if one.total and one.count]
    more = number / len(record.head.micros)
    return more * micro.factor / scale * sum(samples) / len(records) if len(samples) == len(every) else 1.0


def number_of(record: Record) -> int:
    """Micro-batches over which gradients are averaged on a rank."""
    return record.head.divides or len(record.head.micros)


def _each(record: Record, at: int) -> float | None:
    """The part of one sample in the loss, by what it is a mean over, or by what its sum was divided by."""
    micro = record.head.micros[at]
    if micro.tokens is not None or micro.given:
        return None
    factor = micro.factor / record.head.scale
    return factor if micro.total else factor / micro.count if micro.count else None


def disturbed_of(records: tuple[Record, ...]) -> Disturbed:
    """Of any rank."""
    every = [record.head.disturbed for record in records]

    def names_of(kind: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for one in every for name in getattr(one, kind)))

    return Disturbed(
        unproven=next((one.unproven for one in every if one.unproven), ""),
        moved=names_of("moved"),
        swung=any(one.swung for one in every),
        left=names_of("left"),
        faded=next((one.faded for one in every if one.faded), 0.0),
        kept=names_of("kept"),
        twice=any(one.twice for one in every),
        outside=names_of("outside"),
        beside=names_of("beside"),
        wrapper=next((one.wrapper for one in every if one.wrapper), ""),
        raw=any(one.raw for one in every),
        uses=names_of("uses"),
        cleared=max(one.cleared for one in every),
        wasted=min(one.wasted for one in every),
        unstepped=names_of("unstepped"),
        detached=names_of("detached"),
        idle=any(one.idle for one in every),
        asked=any(one.asked for one in every),
        doubled=names_of("doubled"),
        averages=next((one.averages for one in every if one.averages), ""),
    )


def lowest(records: tuple[Record, ...], kind: str) -> str:
    """The coarsest floating dtype of any rank."""
    every: list[str] = [getattr(record.head, kind) for record in records]
    return max(every, key=lambda name: torch.finfo(getattr(torch, name)).eps)


def sent_as(records: tuple[Record, ...]) -> tuple[str, tuple[str, ...]]:
    """The coarsest dtype in which gradients were sent, as wrappers say or numbers show; and what to tell of that."""
    said = lowest(records, "sent")
    low = said == lowest(records, "dtype") == "float32" and _in_16_bits(records)
    if not low:
        return said, ()
    return low, (f"all gradients are numbers of {low}, as if sent in it: they are compared with its rounding",)


def _in_16_bits(records: tuple[Record, ...]) -> str:
    """The dtype of 16 bits that holds all gradients of float32; empty: none.

    They may have been divided since, by the ranks or the micro-batches. Of a few numbers that may be by chance.
    """
    every = [one for record in records for key, one in record.tensors.items() if key.startswith("grad/")]
    if not every or any(one.dtype != torch.float32 for one in every):
        return ""
    seen = torch.unique(torch.cat([one.reshape(-1)[:LOOKED_AT] for one in every]).abs())
    world, micros = records[0].head.world, len(records[0].head.micros)
    for kind in ("bfloat16", "float16") if len(seen) >= FEW else ():
        for times in dict.fromkeys((1, world, micros, world * micros)):
            sent = seen * times
            off = (sent.to(getattr(torch, kind)).to(sent.dtype) - sent).abs()
            if bool((off <= 2 * torch.finfo(torch.float32).eps * sent).all()):
                return kind
    return ""


def shrunk(records: tuple[Record, ...]) -> tuple[float, ...]:
    """By which factor each rank has clipped; empty: not every one has shown its norm."""
    clips = [record.head.clip for record in records]
    found = [min(1.0, one.most / (one.seen + 1e-6)) for one in clips if one is not None and one.seen is not None]
    return tuple(found) if len(found) == len(clips) else ()


def had_gradient(records: tuple[Record, ...], name: str) -> bool:
    """Return whether any rank was about to step a gradient of it that is not of zeros."""
    return any(bool(record.tensors[f"grad/{name}"].any()) for record in records if f"grad/{name}" in record.tensors)


def meant(records: tuple[Record, ...]) -> Iterator[str]:
    """Yield what of the losses nobody can tell."""
    every = [micro for record in records for micro in record.head.micros]
    if any(micro.total and micro.tokens is None and not micro.count for micro in every):
        given = any(micro.given for micro in every)
        what = "a backward was given gradients" if given else "the loss is a sum that the program divides"
        yield f"{what}: {'what they are' if given else 'by what'}, is taken as meant"
