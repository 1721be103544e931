"""Where the model's values come from."""

from __future__ import annotations

from attrs import frozen


@frozen
class InitWeights:
    """New values from the modules' own ``reset_parameters`` and ``_init_weights``, also for a model on meta.

    The values depend on the seed and on each module's path: they are equal on all ranks and for every world size.
    """

    seed: int = 0
    """Any whole number."""


@frozen
class LoadWeights:
    """Values from safetensors files, also for a model on meta: every rank reads the bytes of its own shards.

    What a model of transformers (from 5 on) saves under other names or in parts is read into its place, as its
    ``from_pretrained`` would put it.
    """

    path: str
    """A ``.safetensors`` file, a ``.safetensors.index.json``, or the folder that holds either (``save_pretrained``)."""
    rename: tuple[tuple[str, str], ...] = ()
    """Regular expressions and what to put in their place, applied in turn to every key: ``(("^policy[.]", ""),)``.

    They come before what the model's library renames, and a name of the model that they give stays."""


@frozen(kw_only=True)
class BroadcastWeights:
    """The values that rank 0's model has, sent to all; on every other rank the model may be on meta.

    Each rank is sent its own part, so that those on meta never hold more than their shards and one piece of a tensor.
    """


Weights = InitWeights | LoadWeights | BroadcastWeights | None
"""None: the values that the model has. A model on the meta device has none, and ``apply`` refuses it."""
