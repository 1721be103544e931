"""Loaders: samples that a rank reads at once, and the accumulation that gives a global batch.

Global batch = samples that a rank reads at once x data ranks x accumulation: the third number follows from the others.
"""

from __future__ import annotations

from attrs import frozen

from prepkit.config import Config, DeepSpeed, EachLoader, KeepLoaders, ShardLoaders
from prepkit.facts import Facts, LoaderFacts
from prepkit.resolve.deepspeed.data import said
from prepkit.steps.optimizer import Split


def choice(cfg: Config, index: int) -> ShardLoaders | KeepLoaders:
    """Return what the config says of the loader at this position. One that a list forgets has a rule against it."""
    how = cfg.loaders
    if not isinstance(how, EachLoader):
        return how
    return how.choices[index] if index < len(how.choices) else ShardLoaders()


def batch_size(how: ShardLoaders | KeepLoaders, loader: LoaderFacts, parts: int) -> int | None:
    """Samples that one rank reads at once; None: the loader makes batches of its own."""
    if loader.batch_size is None or not isinstance(how, ShardLoaders) or not how.split_batches:
        return loader.batch_size
    return max(1, loader.batch_size // parts)


def split(loader: LoaderFacts, parts: int) -> Split:
    """Return how a loader is divided over so many ranks."""
    if loader.iterable:
        return "shards" if loader.shards and parts > 1 and loader.shards % parts == 0 else "stream"
    if loader.custom_batches:
        return "batches"
    return "sampler" if loader.sampler == "custom" else "samples"


def is_divided(how: ShardLoaders | KeepLoaders, loader: LoaderFacts, world: int) -> bool:
    """Whether the loader is rebuilt: on several ranks always; on one where its order then has the config's seed."""
    if not isinstance(how, ShardLoaders):
        return False
    reorders = not (loader.foreign or loader.iterable or loader.own_iteration or loader.stateful)
    return world > 1 or (reorders and how.draws == "seed" and loader.sampler in ("random", "custom"))


def repeats(how: ShardLoaders, loader: LoaderFacts, parts: int) -> int | None:
    """Samples that are read twice in a pass, by the ranks together; None where nobody knows."""
    size = batch_size(how, loader, parts)
    if loader.length is None or size is None or loader.iterable:
        return None
    if how.drop_last or loader.drop_last:
        return 0
    if how.purpose == "evaluation":
        rounds = -(-loader.length // (size * parts))
        return max(0, rounds * parts - loader.length)
    return (
        -loader.length % (size * parts)
        if how.whole_batches and parts > 1
        else -(loader.length % (size * parts)) % parts
    )


def batches(loader: LoaderFacts) -> int | None:
    """Batches of a pass as the loader was given, which is its ``len``; None where nobody knows."""
    if loader.custom_batches:
        return loader.batches
    if loader.length is None or not loader.batch_size or loader.iterable or loader.foreign:
        return None
    return loader.length // loader.batch_size if loader.drop_last else -(-loader.length // loader.batch_size)


def rounds(how: ShardLoaders, loader: LoaderFacts, parts: int) -> int | None:
    """Batches of a pass on each rank, for training; None where nobody knows."""
    size, whole = batch_size(how, loader, parts), batches(loader)
    if whole is None or size is None or loader.custom_batches:
        full, left = divmod(whole or 0, parts)
        return None if whole is None else full + (left > 0 and not how.drop_last)
    full, left = divmod(loader.length or 0, size * parts)
    return full + (not loader.drop_last and left >= (parts if how.drop_last else 1))


# --- global batch ----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Batch:
    """What is known of one micro-batch of all ranks together."""

    sizes: tuple[int, ...]
    """Samples that one rank reads at once: one number, several where training loaders differ, none where unknown."""
    ranks: int
    """Data ranks: those that read different samples."""

    @property
    def micro(self) -> int | None:
        """Samples that one rank reads at once; None: nobody says, or the loaders do not agree."""
        return self.sizes[0] if len(self.sizes) == 1 else None

    @property
    def at_once(self) -> int | None:
        """Samples that all ranks read at once; None where ``micro`` is, and in a world without ranks."""
        return self.micro * self.ranks or None if self.micro is not None else None


def batch(cfg: Config, facts: Facts, ranks: int) -> Batch:
    """The sizes that engine, DeepSpeed's JSON or the training loaders say, each once, in the order of the loaders."""
    if isinstance(cfg.engine, DeepSpeed):
        micro = _deepspeed_micro(cfg.engine)
        if micro is not None:
            return Batch(sizes=(micro,), ranks=ranks)
    sizes = tuple(dict.fromkeys(loader_sizes(cfg, facts, ranks)))
    if isinstance(cfg.engine, DeepSpeed) and sizes:  # it counts by one of them, and says which
        sizes = (min(sizes) if cfg.engine.micro_batch_of == "smallest" else max(sizes),)
    return Batch(sizes=sizes, ranks=ranks)


def loader_sizes(cfg: Config, facts: Facts, ranks: int) -> tuple[int, ...]:
    """Samples that a rank gets at once from each loader for training that says so."""
    choices = [(choice(cfg, index), loader) for index, loader in enumerate(facts.loaders)]
    sizes = (batch_size(how, loader, ranks) for how, loader in choices if how.purpose == "training")
    return tuple(size for size in sizes if size is not None and size > 0)


def _deepspeed_micro(engine: DeepSpeed) -> int | None:
    """The micro batch that engine or JSON say; one below 1 has a finding of its own."""
    asked = engine.micro_batch if engine.micro_batch is not None else said(engine).get("train_micro_batch_size_per_gpu")
    return asked if type(asked) is int and asked > 0 else None


def accumulation(cfg: Config, known: Batch) -> int:
    """Micro-batches per optimizer step; 1 where the rules refuse the numbers."""
    if cfg.accumulation is not None or cfg.global_batch is None:
        return 1 if cfg.accumulation is None else cfg.accumulation
    whole = known.at_once
    return max(1, cfg.global_batch // whole) if whole else 1


def samples(cfg: Config, known: Batch) -> int | None:
    """Samples per optimizer step; None where nobody says how many a rank reads at once."""
    if known.at_once is not None:
        return known.at_once * accumulation(cfg, known)
    return cfg.global_batch
