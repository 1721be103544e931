"""How single layers are cut over ranks."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class TensorParallel:
    """Single layers are cut over all ranks, which read the same batch (torch ``parallelize_module``).

    ``config.tensor`` says how. For shards or copies beside it write ``FSDP2()`` with ``Mesh(tensor=...)``.
    """


Activation = Literal["whole", "features", "heads", "sequence"]
"""How an activation is cut over the tensor ranks: not, in its last dimension, in its last but one, in dimension 1."""


@frozen
class TensorRow:
    """How the modules at some paths are cut."""

    pattern: str
    """Shell pattern over dotted module paths; ``*`` stays inside one path segment."""
    style: Literal["colwise", "rowwise", "sequence", "replicate"]
    """``colwise`` cuts the outputs of a linear layer or the columns of an embedding, ``rowwise`` the inputs, or the
    vocabulary. ``sequence`` and ``replicate`` keep the weights whole, and work on a part of the sequence, or on all."""
    takes: Activation | None = None
    """How the input arrives. None: ``features`` for a rowwise linear layer, ``sequence`` for sequence, else whole."""
    gives: Activation | None = None
    """How the output leaves. None: ``features`` for colwise, ``sequence`` for sequence, else whole."""


@frozen(kw_only=True)
class TensorFromModel:
    """The model's own plan: its ``tp_plan``, or the ``base_model_tp_plan`` of its config (transformers)."""


@frozen
class TensorRows:
    """A plan by hand. Modules that no row names are left as they are, and every tensor rank computes all of them."""

    rows: tuple[TensorRow, ...]
    """No module may be named by two rows."""


TensorPlan = TensorFromModel | TensorRows
