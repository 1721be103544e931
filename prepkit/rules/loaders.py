"""Data loaders against the number of ranks, and the global batch against what they read at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve

from prepkit.config import DDP, XLA, Config, EachLoader, KeepLoaders, ShardLoaders
from prepkit.facts import Facts, LoaderFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count
from prepkit.resolve import loaders
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Check, Hit, Moment, Rule

_KEEP = "Split the data by rank yourself and write loaders=KeepLoaders()"


def _split(resolved: Resolved) -> Iterator[tuple[str, LoaderFacts, ShardLoaders]]:
    """The loaders that are split between ranks."""
    if resolved.facts.env.world_size > 1:
        for index, loader in enumerate(resolved.facts.loaders):
            how = loaders.choice(resolved.cfg, index)
            if isinstance(how, ShardLoaders):
                yield f"loaders[{index}]", loader, how


def _each(test: Callable[[LoaderFacts], bool], what: str) -> Check:
    """A check that says the same of every loader that is to be split and passes a test."""

    def check(resolved: Resolved) -> Iterator[Hit]:
        for where, loader, _ in _split(resolved):
            if test(loader):
                yield Hit(where, what.format(loader=loader))

    return check


def _count(resolved: Resolved) -> Iterator[Hit]:
    how, given = resolved.cfg.loaders, len(resolved.facts.loaders)
    if isinstance(how, EachLoader) and len(how.choices) != given:
        said = f"EachLoader has {count(len(how.choices), 'choice')}, and {count(given, 'loader')} are given."
        yield Hit("config.loaders", said.replace("1 loader are", "1 loader is"))


def _split_batches(resolved: Resolved) -> Iterator[Hit]:
    parts = resolved.data_parallel_size
    for where, loader, how in _split(resolved):
        if not how.split_batches or loader.foreign:
            continue
        if loader.batch_size is None:
            yield Hit(where, "It has no batch_size that could be split over the ranks.")
        elif loader.batch_size % parts:
            below = loader.batch_size // parts * parts
            sizes = " or ".join(str(size) for size in (below, below + parts) if size)
            yield Hit(
                where,
                f"A batch of {loader.batch_size} cannot be split over {parts} ranks.",
                f"Build the loader with batch_size={sizes}.",
            )


def _no_batch(resolved: Resolved) -> Iterator[Hit]:
    parts = resolved.data_parallel_size
    for index, loader in enumerate(resolved.facts.loaders if resolved.facts.env.world_size == 1 else ()):
        if isinstance(loaders.choice(resolved.cfg, index), ShardLoaders) and loaders.batches(loader) == 0:
            has = f"of {count(loader.length, 'sample')} " if loader.length else ""
            what = f"It has no batch {has}now: a loop over it does nothing."
            fix = "Nothing, where its data come before its first pass; else look at the data set, and at drop_last."
            yield Hit(f"loaders[{index}]", what, fix, milder=True)
    for where, loader, how in _split(resolved):
        size = loaders.batch_size(how, loader, parts)
        if loader.custom_batches and loader.batches is not None:
            drops = how.purpose == "training" and (how.drop_last or loader.drop_last)
            if loader.batches < (parts if drops else 1):
                yield Hit(where, f"{count(loader.batches, 'batch')} over {parts} ranks leave some with none.")
        elif loader.length is not None and not loader.iterable:
            yield from _too_few(where, loader, how, parts, size)


def _too_few(where: str, loader: LoaderFacts, how: ShardLoaders, parts: int, size: int | None) -> Iterator[Hit]:
    """Samples that make no batch for some rank."""
    length, samples = loader.length or 0, count(loader.length or 0, "sample")
    if length == 0 or (length < parts and how.drop_last and how.purpose == "training"):
        yield Hit(where, f"{samples} over {parts} ranks leave some with none.")
    elif loader.drop_last and size is not None:
        least = size if how.purpose == "evaluation" else size * parts
        if length < least:
            each = f"{parts} batches of {size}" if how.purpose == "training" else f"a batch of {size}"
            yield Hit(where, f"{samples} do not fill {each}, and drop_last=True drops what is not full.")


def _repeats(resolved: Resolved) -> Iterator[Hit]:
    parts = resolved.data_parallel_size
    for where, loader, how in _split(resolved):
        if how.purpose == "training" and loader.length is not None and 0 < loader.length < parts:
            samples = count(loader.length, "sample")
            yield Hit(where, f"{samples} over {parts} ranks: some of them are read by several ranks.")


def _last_round(resolved: Resolved) -> Iterator[Hit]:
    """Torch raises there: "Expected more than 1 value per channel when training"."""
    model, parts = resolved.facts.model, resolved.data_parallel_size
    synced = isinstance(resolved.cfg.engine, DDP) and resolved.cfg.engine.sync_batchnorm
    norms = [one.path for one in model.modules if model.classes[one.cls].name == "BatchNorm1d"]
    for index, loader in enumerate(resolved.facts.loaders if norms and resolved.trains and not synced else ()):
        how = loaders.choice(resolved.cfg, index)
        size = loaders.batch_size(how, loader, parts)
        odd = loader.iterable or loader.custom_batches or loader.foreign or loader.length is None or loader.drop_last
        if not isinstance(how, ShardLoaders) or how.purpose != "training" or how.drop_last or odd or not size:
            continue
        rest = (loader.length or 0) % (size * parts)
        if size > 1 and rest and -(-rest // parts) == 1:
            what = (
                f"{loader.length} samples in batches of {size} over {count(parts, 'rank')} end with one sample a rank"
            )
            yield Hit(f"loaders[{index}]", f"{what}, of which {at(norms[0])} takes no variance: torch raises there.")


def _same_data(resolved: Resolved) -> Iterator[Hit]:
    if resolved.facts.env.world_size == 1:
        return
    for index, loader in enumerate(resolved.facts.loaders):
        if isinstance(loaders.choice(resolved.cfg, index), KeepLoaders) and (what := _unsplit(resolved, loader)):
            yield Hit(f"loaders[{index}]", what)


def _unsplit(resolved: Resolved, loader: LoaderFacts) -> str | None:
    """Why ranks may read the same, or not the same where they have to; None: nothing says so."""
    parts = resolved.data_parallel_size
    if loader.foreign or loader.custom_batches or loader.divided:
        return None
    if loader.iterable:
        return (
            None if parts == 1 else f"Nothing says that its stream is split by rank: {parts} ranks may read the same."
        )
    if loader.sampler not in ("sequential", "random"):
        return None
    if parts > 1:
        return f"A {loader.sampler} sampler does not split the data: {parts} ranks may read the same."
    if loader.sampler == "random":
        return "A random sampler draws on each rank for itself, but tensor ranks have to read the same."
    return None


def _keep(cfg: Config, facts: Facts) -> Config:
    """Keeps all loaders; what is asked of each beside being split stays."""
    kept = tuple(_kept(loaders.choice(cfg, index)) for index in range(len(facts.loaders)))
    return evolve(cfg, loaders=EachLoader(kept) if isinstance(cfg.loaders, EachLoader) else KeepLoaders())


def _kept(how: ShardLoaders | KeepLoaders) -> KeepLoaders:
    return KeepLoaders(purpose=how.purpose, to_device=how.to_device, ends_window=how.ends_window)


def _for_each(cfg: Config, facts: Facts) -> Config:
    choices = tuple(loaders.choice(cfg, index) for index in range(len(facts.loaders)))
    return evolve(cfg, loaders=EachLoader(choices) if not isinstance(cfg.engine, XLA) else KeepLoaders())


# --- batches of all ranks --------------------------------------------------------------------------------------------


_WHERE = "config.global_batch"
_SAY = "Pass loaders=[DataLoader(..., batch_size=4)], or --batch-size 4 on the command line, with your own number; or"


def _asked(resolved: Resolved) -> int | None:
    """The global batch, where it and the ranks are numbers that can be divided: other rules say what is not."""
    asked, written = resolved.cfg.global_batch, resolved.cfg.accumulation
    if asked is None or asked < 1 or resolved.batch.ranks < 1 or (written is not None and written < 1):
        return None
    return None if resolved.mesh is None else asked


def _derived(resolved: Resolved) -> bool:
    """Return whether the accumulation is to follow from the global batch, whatever the ranks are."""
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
    own = "DeepSpeed(micro_batch=4) with your own number, or " if resolved.engine_traits.own_layout else ""
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
        id="loaders.count",
        summary="EachLoader has a choice for every loader.",
        check=_count,
        fix="Write one ShardLoaders() or KeepLoaders() for each loader, in their order.",
        overridable=False,
        source=("DL-2", "DL-4"),
        repair=_for_each,
    ),
    Rule(
        id="loaders.foreign",
        summary="A loader that is split by rank is a torch DataLoader.",
        check=_each(
            lambda loader: loader.foreign,
            "It is a {loader.name}, and no torch DataLoader: how it draws cannot be seen.",
        ),
        fix=f"{_KEEP}, or pass a torch.utils.data.DataLoader.",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("DL-18",),
        repair=_keep,
    ),
    Rule(
        id="loaders.own-iteration",
        summary="A loader that is split by rank iterates as torch's DataLoader does.",
        check=_each(
            lambda loader: loader.own_iteration,
            "{loader.name} has an __iter__ of its own, which may not read by the sampler that it is given.",
        ),
        fix=f"{_KEEP}; or accept it in overrides, where it yields what super().__iter__() does, batch by batch.",
        source=("DL-18", "DL-19"),
        repair=_keep,
    ),
    Rule(
        id="loaders.out-of-order",
        summary="A loader that is divided by rank gives its batches in order.",
        check=_each(
            lambda loader: not loader.in_order and loader.workers > 0 and not loader.iterable,
            "{loader.name} has in_order=False, and is read in order: else nobody knows which samples a batch has.",
        ),
        fix="Leave in_order out; or write loaders=KeepLoaders() and divide the data yourself.",
        severity=Severity.WARNING,
        source=("DL-17",),
    ),
    Rule(
        id="loaders.already-distributed",
        summary="A loader that is split by rank is not split already.",
        check=_each(
            lambda loader: loader.sampler == "distributed" or loader.divided,
            "It is split by rank already: it has a DistributedSampler, or a stream that was split by node.",
        ),
        fix="Write loaders=KeepLoaders(), or pass a loader over the whole data.",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("DL-1", "DL-13", "DL-15"),
        repair=_keep,
    ),
    Rule(
        id="loaders.split-batches",
        summary="A batch that is split over the ranks divides by their number.",
        check=_split_batches,
        fix="Pass a loader with batch_size, or leave split_batches out.",
        overridable=False,
        source=("DL-8", "DL-9"),
    ),
    Rule(
        id="loaders.no-batch",
        summary="Every rank gets at least one batch of each loader.",
        check=_no_batch,
        milder="in one process, where data may come before the first pass",
        fix="Write drop_last=False, use a smaller batch_size, or start fewer processes.",
        source=("DL-21",),
    ),
    Rule(
        id="loaders.fewer-than-ranks",
        summary="A loader has at least one sample for every rank.",
        check=_repeats,
        fix='Start fewer processes if every sample is to count once, or write purpose="evaluation" to evaluate.',
        severity=Severity.WARNING,
        source=("DL-21", "DL-27"),
    ),
    Rule(
        id="loaders.last-round",
        summary="The last batch of a pass has a variance for batch norms.",
        check=_last_round,
        fix="Build the loader with drop_last=True, or with another batch_size.",
        severity=Severity.WARNING,
        source=("DL-21", "torch batch_norm"),
    ),
    Rule(
        id="loaders.same-data",
        summary="Loaders that are kept as they are read different data on every rank.",
        check=_same_data,
        fix="Write loaders=ShardLoaders(), unless the data set itself differs from rank to rank.",
        severity=Severity.WARNING,
        source=("DL-12", "G-47"),
    ),
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
