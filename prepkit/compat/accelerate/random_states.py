"""Random states of rank 0, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prepkit.compat.accelerate.not_offered import NotOffered
from prepkit.compat.accelerate.operations import broadcast


def synchronize_rng_states(rng_types: Sequence[str], generator: torch.Generator | None = None) -> None:
    """The states of ``torch``, ``cuda`` or the ``generator`` that is given become those of rank 0. Collective.

    Prepared loaders need none of it: ``prepare`` has put their generators into one state (behaviour DL-10).
    """
    for kind in (str(getattr(one, "value", one)) for one in rng_types):
        if kind == "torch":
            torch.set_rng_state(broadcast(torch.get_rng_state()))
        elif kind == "cuda":
            torch.cuda.set_rng_state(broadcast(torch.cuda.get_rng_state()))
        elif kind == "generator" and generator is not None:
            generator.set_state(broadcast(generator.get_state()))
        else:
            raise NotOffered(f"synchronize_rng_states({kind!r})", "write torch, cuda, or generator and pass one")
