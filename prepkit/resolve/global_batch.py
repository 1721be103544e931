"""Global batch = samples that a rank reads at once x data ranks x accumulation: the third number from the others."""

from __future__ import annotations

from attrs import frozen

from prepkit.config import Config, DeepSpeed
from prepkit.facts import Facts
from prepkit.resolve import loaders
from prepkit.resolve.deepspeed.data import said


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
    choices = [(loaders.choice(cfg, index), loader) for index, loader in enumerate(facts.loaders)]
    sizes = (loaders.batch_size(how, loader, ranks) for how, loader in choices if how.purpose == "training")
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
