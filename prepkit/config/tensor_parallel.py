"""How single layers are cut over ranks."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class TensorParallel:
    """Single layers are cut over all ranks, which read the same batch (torch ``parallelize_module``).

    ``config.tp_plan`` says how. For shards or copies beside it write ``FSDP2()`` with ``Mesh(tensor=...)``.
    """


ActivationLayout = Literal["replicate", "features", "heads", "sequence"]
"""How an activation is cut over the tensor ranks: not, in its last dimension, in its last but one, in dimension 1."""


@frozen
class TPLayer:
    """How the modules at some paths are cut."""

    pattern: str
    """Shell pattern over dotted module paths; ``*`` stays inside one path segment."""
    style: Literal["colwise", "rowwise", "sequence", "replicate"]
    """``colwise`` cuts the outputs of a linear layer or the columns of an embedding, ``rowwise`` the inputs, or the
    vocabulary. ``sequence`` and ``replicate`` keep the weights whole, and work on a part of the sequence, or on all."""
    input_layout: ActivationLayout | None = None
    """How the input arrives. None: ``features`` for a rowwise linear layer, ``sequence`` for sequence, else
    ``replicate``."""
    output_layout: ActivationLayout | None = None
    """How the output leaves. None: ``features`` for colwise, ``sequence`` for sequence, else ``replicate``."""


@frozen(kw_only=True)
class TPPlanFromModel:
    """The model's own plan: its ``tp_plan``, or the ``base_model_tp_plan`` of its config (transformers)."""


@frozen
class TPPlan:
    """A plan by hand. Modules that no row names are left as they are, and every tensor rank computes all of them."""

    layers: tuple[TPLayer, ...]
    """No module may be named by two rows."""


TensorParallelPlan = TPPlanFromModel | TPPlan
