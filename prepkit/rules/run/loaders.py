"""Whether ranks read samples of their own, and tensor-parallel ranks the same."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import PreparedLoader, RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule
from prepkit.rules.run.window import MILDER_TEXT, odd


def _readers(facts: RunFacts) -> int:
    """Groups of ranks that are to read samples of their own."""
    groups = {rank.tensor_ranks for rank in facts.ranks}
    if len({rank.names for rank in facts.ranks}) > 1:
        return 1  # stages of a pipeline
    return len(groups) if groups else facts.world_size


_PLAIN = ("sequential", "random")


def _reads(facts: RunFacts, index: int) -> list[tuple[str, str]]:
    """Return what each group of ranks is about to read: digests of indices and of samples."""
    firsts = {rank.tensor_ranks: rank.reads[index] for rank in facts.ranks if index < len(rank.reads)}
    return [*firsts.values()]


def _undivided(facts: RunFacts, index: int) -> bool | None:
    """Whether ranks read the same where no sampler that is known divides; None: that cannot be told from outside.

    Where torch's own sampler goes through all indices, only the samples may differ; any other sampler, or a stream, is
    taken at its word: its first batches.
    """
    reads, seen = _reads(facts, index), facts.loaders[index].seen
    if not facts.ranks or (seen.sampler in _PLAIN and not seen.iterable and not seen.custom_batches):
        return len({samples for _, samples in reads} - {""}) <= 1
    if any(not indices and not samples for indices, samples in reads):
        return None
    return len(set(reads)) < len(reads)


def _unknown(facts: RunFacts) -> Iterator[Hit]:
    for index, loader in enumerate(facts.loaders):
        if _asked(facts, index) and loader.division == "" and _undivided(facts, index) is None:
            what = f"{count(_readers(facts), 'rank')} read it, and what divides its samples cannot be told from here."
            yield Hit(f"loaders[{index}]", what)


def _asked(facts: RunFacts, index: int) -> bool:
    return _readers(facts) > 1 and not facts.loaders[index].seen.foreign and not _split_by_hand(facts, index)


def _split_by_hand(facts: RunFacts, index: int) -> bool:
    """Return whether the data sets of ranks are told to be different ones."""
    data = {rank.loaders[index][3] for rank in facts.ranks if index < len(rank.loaders)}
    return len(data) > 1


def _parts(facts: RunFacts, index: int) -> set[int]:
    return {rank.loaders[index][1] for rank in facts.ranks if index < len(rank.loaders)}


def _same(facts: RunFacts) -> Iterator[Hit]:
    readers = _readers(facts)
    for index, loader in enumerate(facts.loaders):
        if not _asked(facts, index) or (loader.division == "" and not _undivided(facts, index)):
            continue
        if loader.division == "":
            what = f"{count(readers, 'rank')} read all of its samples, {_order(loader)}: nothing divides them."
            yield Hit(f"loaders[{index}]", what, _STREAM if loader.seen.iterable else "")
        elif loader.replicas and loader.replicas < readers:
            what = f"Its samples are divided into {count(loader.replicas, 'part')}, and {readers} ranks read them."
            yield Hit(f"loaders[{index}]", what)
        elif facts.ranks and len(_parts(facts, index)) < min(readers, loader.replicas):
            what = (
                f"{readers} ranks read {count(len(_parts(facts, index)), 'part')} of {loader.replicas}: some the same."
            )
            yield Hit(f"loaders[{index}]", what)


def _given(facts: RunFacts) -> Iterator[Hit]:
    """Of what no loader gives."""
    given = facts.window.given if facts.window is not None else ()
    averaged = facts.averages_by_hand or any(param.averaged_by for param in facts.params)
    groups = {rank.tensor_ranks: given[rank.rank] for rank in facts.ranks if rank.rank < len(given)}
    alone = facts.sends_by_hand or facts.local_sgd or not averaged or (facts.window is not None and facts.window.cut)
    alike = len(groups) == _readers(facts) > 1 and len({*groups.values()}) == 1 and any(groups.values())
    if alike and not alone and not any(_same(facts)):
        what = f"Models of {count(len(groups), 'rank')} were given the same numbers before this step"
        yield Hit("loop", f"{what}: they train on one batch, and count it {len(groups)} times.")


def _unread(facts: RunFacts) -> Iterator[Hit]:
    for index, loader in enumerate(facts.loaders):
        if loader.division == "sampler" and loader.replicas > facts.world_size:
            what = f"Its samples are divided into {loader.replicas} parts, and {count(facts.world_size, 'rank')}"
            reads = "reads one of them" if facts.world_size == 1 else "read as many of them"
            yield Hit(f"loaders[{index}]", f"{what} {reads}: the others are never read.")


def _overlaps(facts: RunFacts) -> Iterator[Hit]:
    one, other, both = facts.window.overlap if facts.window is not None else (0, 0, 0)
    if both:
        what = f"Two loaders take {one} and {other} samples of one data set, and {both} of them are the same"
        yield Hit("loaders", f"{what}: what validates was trained on.")
    if facts.window is not None and (line := facts.window.phases.parted):
        what = f"{line} parts the samples anew in each pass, and what trains goes on"
        yield Hit("loaders", f"{what}: from the second pass on most of what validates was trained on before.")


def _reseeds(facts: RunFacts) -> Iterator[Hit]:
    for index, loader in enumerate(facts.loaders):
        if loader.reseeds:
            what = f"Each of its samples calls {' and '.join(loader.reseeds)} with one seed: all draw the same numbers"
            yield Hit(f"loaders[{index}]", f"{what}, and so does what the program draws behind it.")


def _weights(facts: RunFacts) -> Iterator[Hit]:
    for index, loader in enumerate(facts.loaders):
        if loader.weights is not None and loader.seen.length is not None and loader.weights < loader.seen.length:
            what = f"Its sampler has {count(loader.weights, 'weight')} for {loader.seen.length} samples"
            yield Hit(f"loaders[{index}]", f"{what}, and draws none but the first {loader.weights} of them.")


def _divided_twice(facts: RunFacts) -> Iterator[Hit]:
    for index, loader in enumerate(facts.loaders):
        contents = {rank.contents[index] for rank in facts.ranks if index < len(rank.contents)}
        divides = loader.division in ("sampler", "accelerate") and loader.replicas > 1
        if divides and len(contents) > 1 and _readers(facts) > 1:
            yield _other_data(facts, index)
        elif loader.parts > facts.world_size and loader.division == "accelerate":
            what = f"accelerate divides it, and so does what is inside, into {loader.parts} parts in all, and"
            yield Hit(f"loaders[{index}]", f"{what} {facts.world_size} ranks read one each: the others are never read.")
        elif loader.parts > loader.replicas and loader.parts > facts.world_size:
            what = f"It is divided twice, into {loader.parts} parts, and {facts.world_size} ranks read one each"
            yield Hit(f"loaders[{index}]", f"{what}: the others are never read.")


def _apart(facts: RunFacts) -> Iterator[Hit]:
    for index, _ in enumerate(facts.loaders if not any(_divided_twice(facts)) else ()):
        held = [dict(rank.held_data[index]) for rank in facts.ranks if index < len(rank.held_data)]
        if len({one.get("", "") for one in held}) < 2 or not all(held) or _readers(facts) == 1:
            continue
        names = [name for name in held[0] if name and len({one.get(name) for one in held}) > 1]
        if names:
            what = f"The first sample of its data set is not the same on all ranks, and neither is {some(names)}:"
            yield Hit(f"loaders[{index}]", f"{what} each rank trains on samples as it has prepared them itself.")


def _other_data(facts: RunFacts, index: int) -> Hit:
    """Return what there is to say of what divides data sets that differ: parts of one that meet were drawn apart."""
    held = [rank.picks[index] for rank in facts.ranks if index < len(rank.picks)]
    one = len({whole for whole, _ in held}) == 1
    drawn = {at for _, first in held for at in first}
    meet = one and len(drawn) < sum(len(first) for _, first in held)
    loader = facts.loaders[index]
    who = "a DistributedSampler" if loader.division == "sampler" else "accelerate"
    what = f"Data sets differ by rank, and {who} cuts each into {loader.replicas} parts: a rank reads 1 of its own."
    if not meet:
        return Hit(f"loaders[{index}]", what)
    same = "They are parts of one and overlap, as where each rank draws a split: another trains on what one holds out."
    return Hit(f"loaders[{index}]", f"{what} {same}", _ALIKE)


def _samples(facts: RunFacts) -> Iterator[Hit]:
    if facts.window is not None:  # has heard what the model was called with
        return
    for index, loader in enumerate(facts.loaders):
        if loader.sample:
            yield odd(f"loaders[{index}]", loader.sample)


def _in_order(facts: RunFacts) -> Iterator[Hit]:
    seen = facts.loaders[0].seen if facts.loaders and facts.optimizers else None
    if seen is None or seen.sampler != "sequential" or seen.iterable or seen.custom_batches or seen.foreign:
        return
    if (seen.length or 0) > (seen.batch_size or 1):
        yield Hit("loaders[0]", f"It gives {seen.length} samples in one order, the same in every pass.")


def _order(loader: PreparedLoader) -> str:
    return "in one order" if loader.seen.sampler == "sequential" else "each in its own order at best"


def _tensor(facts: RunFacts) -> Iterator[Hit]:
    part = {(rank.rank, index): one[1] for rank in facts.ranks for index, one in enumerate(rank.loaders)}
    for index in range(len(facts.loaders)):
        for rank in facts.ranks:
            parts = {part[other, index] for other in rank.tensor_ranks if (other, index) in part}
            if len(parts) > 1:
                ranks = ", ".join(map(str, rank.tensor_ranks))
                what = f"Ranks {ranks} hold parts of one layer, and read parts {sorted(parts)}."
                yield Hit(f"loaders[{index}]", what)
                break


def _lengths(facts: RunFacts) -> Iterator[Hit]:
    """Of the first loader, which is trained on; those of evaluation may end where they like."""
    if any(ddp.joins for ddp in facts.ddp):
        return
    first = [rank.passes[0] for rank in facts.ranks if rank.passes]
    batches = {count for count, _, _ in first if count is not None}
    sizes = {size for _, size, _ in first if size is not None}
    if len(batches) > 1:
        what = f"Ranks have {_range(batches)} batches in a pass: at its end some wait for gradients of the others."
        yield Hit("loaders[0]", what)
    elif len(sizes) > 1:
        yield Hit("loaders[0]", f"Ranks have {_range(sizes)} samples in a batch, and their gradients count alike.")


def _range(values: set[int]) -> str:
    return f"{min(values)} to {max(values)}"


def _orders(facts: RunFacts) -> Iterator[Hit]:
    for index in range(len(facts.loaders)):
        orders = {rank.passes[index][2] for rank in facts.ranks if index < len(rank.passes)}
        if len(orders) > 1:
            what = "Seed or epoch of its sampler differ over ranks: their parts overlap, and leave samples out."
            yield Hit(f"loaders[{index}]", what)


def _shares(facts: RunFacts) -> Iterator[Hit]:
    """Of data sets that each rank has made itself, by their least indices in one, or by their rows."""
    for index, loader in enumerate(facts.loaders if _readers(facts) > 1 else ()):
        picks = {rank.tensor_ranks: rank.picks[index] for rank in facts.ranks if index < len(rank.picks)}
        parts = {first for _, first in picks.values()}
        one = len({whole for whole, _ in picks.values()}) == 1 and all(parts) and len(parts) == len(picks)
        least = sorted({at for part in parts for at in part})[: min(map(len, parts), default=0)] if one else []
        both = sum(sum(at in part for part in parts) > 1 for at in least)
        if loader.division == "" and both >= MEET * len(least) > 0:
            what = f"Each rank has made its part of the samples itself, and about {100 * both // len(least)} % of them"
            yield Hit(f"loaders[{index}]", f"{what} are in several parts: these count more than once, others never.")


def _not_read(facts: RunFacts) -> Iterator[Hit]:
    loop = facts.loop
    if loop is None or loop.readers < 2:
        return
    if loop.divides == "given" and not loop.read:
        what = (
            "No batch of ready.loaders was read before the first step: where the loop iterates the loaders that were "
            "given to build_plan, every rank trains on all samples."
        )
        yield Hit("loaders", what, "Write `for batch in ready.loaders[0]:`, or give build_plan no loaders.")
    if loop.divides == "given" and loop.apart >= APART:
        what = (
            f"{loop.apart} steps were taken since the last pass over ready.loaders was over: where they read a "
            f"DataLoader that build_plan was not given, each of {loop.readers} ranks trains on all of its samples."
        )
        fix = "Give it to build_plan(..., loaders=[...]) too; nothing, where what is trained on differs over the ranks."
        yield Hit("loaders", what, fix)
    if loop.divides == "nobody" and not loop.loaders:
        what = (
            f"build_plan was given no loader, and {loop.readers} ranks train: unless the loop divides its data itself, "
            "as a DistributedSampler does, every rank trains on all samples."
        )
        yield Hit("loaders", what)


_STREAM = (
    "Write accelerator.prepare(loader), or divide it in the data set's __iter__: itertools.islice(samples, rank, None, "
    "world); one of the library datasets by datasets.distributed.split_dataset_by_node(dataset, rank, world). No "
    "sampler divides a stream."
)
_ALIKE = (
    "Draw the split alike on every rank: random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)), "
    "and leave it to the sampler or accelerate to divide."
)

MEET = 0.05
"""The part of samples that several ranks hold by no chance."""
APART = 4
"""Steps outside of every pass that are no prefetched batches, and no rest of a window."""

RULES: tuple[Rule, ...] = (
    Rule(
        id="run.not-read",
        summary="The loop reads loaders that divide their samples over the ranks.",
        check=_not_read,
        at=(Moment.FIRST_STEP, Moment.DUE),
        needs=(Need.LOOP,),
        fix=(
            "Write build_plan(..., loaders=[loader]) and `for batch in ready.loaders[0]:`, or "
            "Config(loaders=pk.data.KeepLoaders()) where data are divided."
        ),
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.same-samples",
        summary="Each rank reads samples of its own.",
        check=_same,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Write sampler=DistributedSampler(dataset, num_replicas=world, rank=rank), or accelerator.prepare(loader).",
        source=("torch DistributedSampler",),
    ),
    Rule(
        id="run.same-batch",
        summary="What models of different ranks are given is not the same.",
        check=_given,
        at=(Moment.AUDIT,),
        needs=(Need.RANKS,),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Draw and seed by rank what no loader divides: torch.manual_seed(seed + torch.distributed.get_rank()).",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.divided-twice",
        summary="Samples are divided once.",
        check=_divided_twice,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix=(
            "Divide once: by the sampler, over a data set that is the same on every rank, by accelerate, or by "
            "split_dataset_by_node with a shuffle alone."
        ),
        source=("torch DistributedSampler", "accelerate prepare_data_loader"),
    ),
    Rule(
        id="run.samples-apart",
        summary="A data set that is divided over ranks gives every rank the same samples.",
        check=_apart,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix=(
            "Compute it on every rank from the same, or send it to all: in Lightning in setup(), as prepare_data() "
            "runs on one rank; of a set write sorted(words), as its order is another in each process."
        ),
        severity=Severity.WARNING,
        source=("torch DistributedSampler", "Lightning prepare_data"),
    ),
    Rule(
        id="run.samples-odd",
        summary="Samples are what a causal language model takes, before it is called.",
        check=_samples,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS,),
        fix="Give the tokenizer's attention_mask along.",
        milder=MILDER_TEXT,
        source=("transformers ForCausalLMLoss",),
    ),
    Rule(
        id="run.in-order",
        summary="Samples are shuffled in training.",
        check=_in_order,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS, Need.OPTIMIZERS),
        fix="Write shuffle=True; nothing, where their order is meant.",
        severity=Severity.NOTE,
    ),
    Rule(
        id="run.samples-unknown",
        summary="What gives each rank its samples can be seen.",
        check=_unknown,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Nothing, where the stream or the sampler divides by rank itself; else give it rank and world size.",
        severity=Severity.NOTE,
    ),
    Rule(
        id="run.unread-samples",
        summary="Every part of the samples is read by some rank.",
        check=_unread,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS,),
        fix="Write DistributedSampler(dataset), which takes the number of ranks from the process group.",
        severity=Severity.WARNING,
        source=("torch DistributedSampler",),
    ),
    Rule(
        id="run.parts-overlap",
        summary="What is trained on and what validates are other samples.",
        check=_overlaps,
        at=(Moment.AUDIT,),
        fix="Split once, and take both parts of it: train, valid = random_split(dataset, sizes).",
        severity=Severity.WARNING,
        source=("torch random_split",),
    ),
    Rule(
        id="run.reseeded",
        summary="Reading a sample seeds no generator of the process by one seed.",
        check=_reseeds,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS,),
        fix="Draw with a generator of the sample's own: torch.Generator().manual_seed(seed + index).",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.weights-misfit",
        summary="Samples that are drawn by weights have one each.",
        check=_weights,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS,),
        fix="Give each sample the weight of its class: WeightedRandomSampler(class_weights[targets], len(targets)).",
        source=("torch WeightedRandomSampler",),
    ),
    Rule(
        id="run.ranks-orders",
        summary="Ranks take their parts of one order.",
        check=_orders,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Give DistributedSampler the same seed on every rank, and call sampler.set_epoch(epoch) on all of them.",
        source=("torch DistributedSampler",),
    ),
    Rule(
        id="run.shares-overlap",
        summary="Parts of the data that ranks make themselves have no sample in common.",
        check=_shares,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Draw one order for all before each takes its part: default_rng(seed).permutation(n)[rank::world].",
        severity=Severity.WARNING,
        source=("torch.utils.data.Subset",),
    ),
    Rule(
        id="run.ranks-batches",
        summary="Ranks have as many batches to train on, of one size.",
        check=_lengths,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Pad or cut the parts to one length (DistributedSampler does), or train inside torch's Join.",
        severity=Severity.WARNING,
        source=("torch.distributed.algorithms.Join",),
    ),
    Rule(
        id="run.tensor-samples",
        summary="Ranks that hold parts of one layer read the same samples.",
        check=_tensor,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Write DistributedSampler(dataset, num_replicas=mesh['dp'].size(), rank=mesh['dp'].get_local_rank()).",
    ),
)
"""Reporting order: over data ranks, then over tensor ranks."""
