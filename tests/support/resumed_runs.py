"""A tiny language model trained under DDP and, saved and resumed in the middle, under FSDP2: the differences."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from attrs import evolve, frozen

import prepkit as pk
from tests.support import transformers_tiny as tiny

STEPS, SAVED_AFTER = 20, 10
CLOSE = 1e-5
"""Largest difference, over the largest value of the same kind."""
OPTIMIZER = pk.optim.AdamW(lr=1e-3, eps=1e-5)
CLIP = pk.ClipNorm(max_norm=1.0)
DDP = pk.Config(engine=pk.DDP(find_unused_parameters=True), optimizer=OPTIMIZER, clip=CLIP)
FSDP2 = pk.Config(engine=pk.FSDP2(), optimizer=OPTIMIZER, clip=CLIP)
EQUAL, EQUAL_64, DIFFERS = "equal", "equal in float64", "differs"
REFUSED, FAILED, NOT_BUILT = "refused", "failed", "not built"


@frozen
class Run:
    """What one rank has seen of a run: the same on all ranks."""

    losses: torch.Tensor
    norms: torch.Tensor
    tensors: dict[str, torch.Tensor]
    """Whole parameters and buffers."""


def compare(rank: int, world: int, kind: str, folder: str) -> tuple[str, str, tuple[float, float, float]]:
    """Outcome, detail and largest differences of loss, norm and weights. For ``Gang.run``.

    What differs in float32 is done once more in float64: what is rounding there is a billion times smaller, and what
    was done otherwise is not. ``detail`` then has both, and the differences are those of float32.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        recipe = tiny.recipe_of(kind)
    except Exception as error:  # whatever transformers raises; held against the table of known reasons
        return NOT_BUILT, _one_line(error), (float("nan"),) * 3
    try:
        plain, resumed = both(rank, kind, recipe, folder)
        gaps = differences(plain, resumed)
        if all(gap <= CLOSE for gap in gaps):
            number = len(recipe.frozen)
            return EQUAL, f"{number} parameters without part in the loss are frozen" if number else "", gaps
        detail = _where(plain, resumed)
        fine = differences(*both(rank, kind, evolve(recipe, dtype=torch.float64), f"{folder}/float64"))
    except pk.PlanRejected as refused:
        errors = {hit.rule for hit in refused.findings if hit.severity is pk.Severity.ERROR}
        return REFUSED, ", ".join(sorted(errors)), (float("nan"),) * 3
    outcome = EQUAL_64 if all(gap <= CLOSE for gap in fine) else DIFFERS
    return outcome, f"in float64 by {', '.join(f'{gap:.1e}' for gap in fine)}; in float32 {detail}", gaps


def both(rank: int, kind: str, recipe: tiny.Recipe, folder: str) -> tuple[Run, Run]:
    """The run under DDP, and the one that was resumed under FSDP2."""
    return undisturbed(rank, kind, recipe), saved_and_resumed(rank, kind, recipe, f"{folder}/saved")


def undisturbed(rank: int, kind: str, recipe: tiny.Recipe) -> Run:
    """All steps under DDP."""
    model = tiny.build(kind, 0, recipe)
    ready = pk.apply(pk.build_plan(DDP, model))
    torch.manual_seed(rank)
    curve = _train(ready, model, rank, range(STEPS))
    return _seen(ready, curve)


def saved_and_resumed(rank: int, kind: str, recipe: tiny.Recipe, folder: str) -> Run:
    """The same steps under FSDP2, the later ones by a model that began with other weights and resumed."""
    model = tiny.build(kind, 0, recipe)
    ready = pk.apply(_sharded(model))
    torch.manual_seed(rank)
    curve = _train(ready, model, rank, range(SAVED_AFTER))
    ready.save(folder)
    ready.close()
    model = tiny.build(kind, 1, recipe)
    ready = pk.apply(_sharded(model))
    ready.resume(folder)
    return _seen(ready, curve + _train(ready, model, rank, range(SAVED_AFTER, STEPS)))


def _sharded(model: Any) -> pk.Plan:
    """The plan under FSDP2, which reduces zeros where a finding asks for it."""
    plan = pk.build_plan(FSDP2, model)
    if all(finding.rule != "units.experts" for finding in plan.warnings):
        return plan
    return pk.build_plan(evolve(FSDP2, engine=pk.FSDP2(reduce_unused=True)), model)


def _train(ready: Any, model: Any, rank: int, steps: range) -> list[tuple[float, float]]:
    """Loss, mean of the ranks, and gradient norm of each step."""
    curve = []
    for step in steps:
        loss = tiny.loss_of(ready.model, tiny.batch_of(model, step, rank))
        ready.backward(loss)
        assert ready.step()
        curve.append((float(ready.ranks.reduce(loss.detach())), float(ready.grad_norm)))
    return curve


def _seen(ready: Any, curve: list[tuple[float, float]]) -> Run:
    model = ready.unwrap()
    named = dict((*model.named_parameters(), *model.named_buffers()))
    whole = {name: _whole(tensor.detach()) for name, tensor in named.items()}
    ready.close()
    losses, norms = torch.tensor(curve, dtype=torch.float64).unbind(1)
    return Run(losses, norms, whole)


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def differences(one: Run, other: Run) -> tuple[float, float, float]:
    """Largest of losses, norms and weights, each over the largest value there; of a weight: in its tensor, or 1e-2."""
    if one.tensors.keys() != other.tensors.keys():
        raise AssertionError(f"names differ: {sorted(one.tensors.keys() ^ other.tensors.keys())[:5]}")
    weights = max(_weight_gap(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    return _gap(one.losses, other.losses), _gap(one.norms, other.norms), weights


def _weight_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return _gap(one.double(), other.double(), floor=1e-2) if one.numel() else 0.0


def _gap(one: torch.Tensor, other: torch.Tensor, floor: float = 1e-30) -> float:
    """Infinite where one is not finite and the other is not the same."""
    if torch.equal(one, other):
        return 0.0
    gap = float((one - other).abs().max() / max(float(one.abs().max()), floor))
    return gap if gap == gap else float("inf")


def _where(one: Run, other: Run) -> str:
    """The first step that differs, and the tensor that differs most."""
    steps = [step for step in range(STEPS) if _gap(one.losses[step], other.losses[step]) > CLOSE]
    gaps = {name: _weight_gap(tensor, other.tensors[name]) for name, tensor in one.tensors.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    many = sum(gap > CLOSE for gap in gaps.values())
    return f"loss from step {steps[:1]}; {many} of {len(gaps)} tensors, most {worst} by {gaps[worst]:.1e}"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
