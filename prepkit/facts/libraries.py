"""What a program asks of its libraries, and what comes of it."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class LibraryFacts:
    """What a program asks of its libraries, and what comes of it."""

    clipped_past: str = ""
    """The line that has clipped parameters whose gradients a DeepSpeed engine keeps to itself; empty: none has."""
    gated: tuple[str, int, int] = ("", 0, 0)
    """The line of a backward of an engine, how often it ran before the engine's first step, and what the engine counts
    to; empty: the engine is stepped behind each."""
    uncast: str = ""
    """The precision that accelerate was asked for, where nothing ran under an autocast; empty: something did."""
    frozen_adapters: tuple[str, ...] = ()
    """Where models of peft stand that train inside of something, and of whose adapters none does."""
    dropped: tuple[tuple[str, str], ...] = ()
    """Lines that read a column of the data set which the Trainer of transformers leaves out, and the column."""
    undivided: tuple[str, str, int] = ("", "", 0)
    """What gives a loss that no Trainer divides (``compute_loss``, ``forward``), its line, and by what it is too
    large."""
    begun_empty: tuple[tuple[str, str], ...] = ()
    """Functions of ``torch.nn.init`` that were given a weight which ZeRO-3 has empty, with their lines."""
    stale_casts: tuple[str, ...] = ()
    """Lines that step inside of a region of autocast in which a cast of a weight from before the last step is kept."""
    raw_pixels: tuple[tuple[str, float], ...] = ()
    """First convolutions that are given whole numbers up to 255, and the largest of them."""
    moved_apart: tuple[tuple[str, str, str], ...] = ()
    """Lines of data sets that move something at random apart from the picture of whose places it speaks: the line, the
    picture, and what is moved."""
