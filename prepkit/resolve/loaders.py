"""What becomes of each loader, worked out from config and facts."""

from __future__ import annotations

from prepkit.config import Config, EachLoader, KeepLoaders, ShardLoaders
from prepkit.facts import LoaderFacts
from prepkit.steps.loaders import Split


def choice(cfg: Config, index: int) -> ShardLoaders | KeepLoaders:
    """What the config says of the loader at this position. One that a list forgets has a rule against it."""
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
    """How a loader is divided over so many ranks."""
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
    return world > 1 or (reorders and loader.sampler in ("random", "custom"))


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
    return -(loader.length % (size * parts)) % parts
