"""The parts of a run that go into a checkpoint, and their tensors and values, named alike for every engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch.nn import Module
from torch.optim import Optimizer

from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation

MODEL, STATE = "model.", "optimizer.state."
"""How the names of a model's tensors and of an optimizer's state begin, as torch has them."""


@frozen(kw_only=True, eq=False, repr=False)
class RunParts:
    """All of a run that a checkpoint is made of, or is read into, at one moment."""

    model: Module
    optimizer: Optimizer | None = None
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None
    loaders: tuple[Any, ...] = ()
    plan: Plan
    attestation: Attestation | None = None
    steps: int = 0
    """Optimizer steps that were taken."""
    epoch: int = 0
    batches: tuple[tuple[int, int, int], ...] = ()
    """What the loop knows of the micro-batches that its batches make; see ``facts.loop.Batches.seen``."""
    set_epoch: Callable[[int], None]
    """Called by a resume before the positions of the loaders are put back."""


@frozen(kw_only=True)
class Contents:
    """Model and optimizer of a run as they are: tensors are views, so that reading into them changes the run."""

    tensors: dict[str, Any]
    """Name to what torch's distributed checkpoints take: a tensor, a ``DTensor``, a ``FlatRange``."""
    plain: dict[str, Any]
    """Name to what is no tensor, such as the step count of an optimizer that keeps an int."""
    groups: list[dict[str, Any]]
    """Per group of the optimizer its options, and under ``params`` the names of its parameters."""
    joined: list[str] = field(factory=list)
    """Counts of steps that differed over parameters, and that the engine keeps one of; known once all is in place."""

    @property
    def model(self) -> dict[str, Any]:
        """Name to tensor of the model alone."""
        return {name.removeprefix(MODEL): one for name, one in self.tensors.items() if name.startswith(MODEL)}

    @property
    def members(self) -> tuple[tuple[str, ...], ...]:
        """The parameters of each group."""
        return tuple(tuple(group["params"]) for group in self.groups)


def nested(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same names for torch, in two steps: it logs what it does to every key at the top (torch 2.13)."""
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts


def missing(wanted: Contents, stored: Collection[str]) -> list[str]:
    """Names of what is wanted and not in the checkpoint."""
    return [name for name in (*wanted.tensors, *wanted.plain) if name not in stored]


def unknown(wanted: Contents, stored: Collection[str], *, only_model: bool) -> list[str]:
    """Names in the checkpoint that nothing here has."""
    begins = (MODEL,) if only_model else (MODEL, STATE)
    return [
        name for name in stored if name.startswith(begins) and name not in wanted.tensors and name not in wanted.plain
    ]


def stateless(held: Mapping[str, str], stored: Collection[str]) -> frozenset[str]:
    """Parameters of which the checkpoint holds no optimizer state at all: they never had a gradient.

    ``held`` is each name of optimizer state to its parameter.
    """
    there: dict[str, bool] = {}
    for name, param in held.items():
        there[param] = there.get(param, False) or name in stored
    return frozenset(param for param, found in there.items() if not found)
