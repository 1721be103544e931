"""Data loaders against the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve

from prepkit.config import Config, KeepLoaders, ShardLoaders
from prepkit.facts import Facts, LoaderFacts
from prepkit.findings import Severity
from prepkit.findings.text import count
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Check, Hit, Rule

_KEEP = "Split the data by rank yourself and write loaders=KeepLoaders()"


def _split(resolved: Resolved) -> Iterator[tuple[str, LoaderFacts]]:
    """The loaders that are split between ranks."""
    if isinstance(resolved.cfg.loaders, ShardLoaders) and resolved.facts.env.world_size > 1:
        for index, loader in enumerate(resolved.facts.loaders):
            yield f"loaders[{index}]", loader


def _each(test: Callable[[LoaderFacts], bool], what: str) -> Check:
    """A check that says the same of every loader that is to be split and passes a test."""

    def check(resolved: Resolved) -> Iterator[Hit]:
        for where, loader in _split(resolved):
            if test(loader):
                yield Hit(where, what)

    return check


def _no_batch(resolved: Resolved) -> Iterator[Hit]:
    world = resolved.data_parallel_size
    tail = isinstance(resolved.cfg.loaders, ShardLoaders) and not resolved.cfg.loaders.drop_last
    for where, loader in _split(resolved):
        if loader.length is None:
            continue
        share = (-(-loader.length // world)) if tail else loader.length // world
        if share == 0:
            yield Hit(where, f"{count(loader.length, 'sample')} over {world} ranks leave some with none.")
        elif loader.drop_last and loader.batch_size is not None and share < loader.batch_size:
            what = f"{count(loader.length, 'sample')} over {world} ranks are {share} each, which drop_last=True drops:"
            yield Hit(where, f"{what} they fill no batch of {loader.batch_size}.")


def _repeats(resolved: Resolved) -> Iterator[Hit]:
    world = resolved.data_parallel_size
    for where, loader in _split(resolved):
        if loader.length is not None and 0 < loader.length < world:
            samples = count(loader.length, "sample")
            yield Hit(where, f"{samples} over {world} ranks: some of them are read by several ranks.")


def _same_data(resolved: Resolved) -> Iterator[Hit]:
    if isinstance(resolved.cfg.loaders, KeepLoaders) and resolved.facts.env.world_size > 1:
        for index, loader in enumerate(resolved.facts.loaders):
            if loader.sampler in ("sequential", "random") and not loader.iterable and not loader.custom_batches:
                parts = resolved.data_parallel_size
                what = f"A {loader.sampler} sampler does not split the data: {parts} ranks may read the same."
                if parts == 1:  # every rank has to read the same, and a sequential sampler does
                    what = "A random sampler draws on each rank for itself, but tensor ranks have to read the same."
                if parts > 1 or loader.sampler == "random":
                    yield Hit(f"loaders[{index}]", what)


def _keep(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, loaders=KeepLoaders())


RULES: tuple[Rule, ...] = (
    Rule(
        id="loaders.iterable",
        summary="A loader that is split by rank has a dataset that can be indexed.",
        check=_each(lambda loader: loader.iterable, "An iterable dataset cannot be split by a sampler."),
        fix=f"{_KEEP}, for example with itertools.islice(data, rank, None, world_size).",
        source=("DL-14", "DL-22"),
        repair=_keep,
    ),
    Rule(
        id="loaders.custom-batches",
        summary="A loader that is split by rank makes its batches from batch_size.",
        check=_each(lambda loader: loader.custom_batches, "Its own batch sampler would be lost."),
        fix=f"{_KEEP}, or pass a loader with batch_size and shuffle.",
        source=("DL-21n", "DL-15"),
        repair=_keep,
    ),
    Rule(
        id="loaders.custom-sampler",
        summary="A loader that is split by rank reads in order or at random.",
        check=_each(
            lambda loader: loader.sampler == "custom" and not loader.custom_batches and not loader.iterable,
            "Its own sampler would be replaced, and the order that it gives would be lost.",
        ),
        fix=f"{_KEEP}, or pass a loader with shuffle=True or False.",
        source=("DL-15",),
        repair=_keep,
    ),
    Rule(
        id="loaders.already-distributed",
        summary="A loader that is split by rank is not split already.",
        check=_each(
            lambda loader: loader.sampler == "distributed",
            "It has a DistributedSampler already, which ShardLoaders would replace.",
        ),
        fix="Write loaders=KeepLoaders(), or pass a loader without the DistributedSampler.",
        source=("DL-1", "DL-15"),
        repair=_keep,
    ),
    Rule(
        id="loaders.no-batch",
        summary="Every rank gets at least one batch of each loader.",
        check=_no_batch,
        fix="Write drop_last=False, use a smaller batch_size, or start fewer processes.",
        source=("DL-21",),
    ),
    Rule(
        id="loaders.fewer-than-ranks",
        summary="A loader has at least one sample for every rank.",
        check=_repeats,
        fix="Start fewer processes if every sample is to count once.",
        severity=Severity.WARNING,
        source=("DL-21", "DL-27"),
    ),
    Rule(
        id="loaders.same-data",
        summary="Loaders that are kept as they are read different data on every rank.",
        check=_same_data,
        fix="Write loaders=ShardLoaders(), unless the dataset itself differs from rank to rank.",
        severity=Severity.WARNING,
        source=("DL-12", "G-47"),
    ),
)
"""Reporting order: what cannot be split, what leaves a rank without data, what may be read twice."""
