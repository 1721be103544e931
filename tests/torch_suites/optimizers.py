"""One configuration of torch's own optimizer tests under one engine: stepped, counted, saved and gone on with.

``python -m tests.tools.torch_optimizers`` runs all of them on two processes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import prepkit as pk
from prepkit.predict import predict
from prepkit.predict.prediction import Label
from tests.support.measured_bytes import held
from tests.support.optimizer_runs import TORCH, batches, model_of

ENGINES = {"DDP": pk.Config(engine=pk.DDP()), "FSDP2": pk.Config(engine=pk.FSDP2())}
SAVED = 2
"""Steps before the save; as many follow."""
NEAR = 5e-3
"""How far weights may lie from those of one process, in the distance that training has moved them."""


@frozen
class Configuration:
    """An optimizer of torch and one set of options that torch tests it with."""

    name: str
    index: int
    desc: str

    def __str__(self) -> str:
        return f"{self.name}, {self.desc}"


@frozen
class Outcome:
    """What came of a configuration under an engine, on one rank."""

    case: Configuration
    engine: str
    refused: tuple[str, ...] = ()
    """Rules that refuse it."""
    wrong: tuple[str, ...] = ()
    """What is not as it has to be."""
    state: str = ""
    """``0``, ``not predicted`` or the difference of predicted and measured bytes of optimizer state."""

    @property
    def text(self) -> str:
        """One of: passes, refused by its rules, or what is wrong."""
        if self.wrong:
            return "; ".join(self.wrong)
        return f"refused by {', '.join(self.refused)}" if self.refused else "passes"


def configurations() -> Iterator[Configuration]:
    """All of ``optim_db``."""
    from torch.testing._internal.common_optimizers import optim_db  # needs expecttest

    for info in optim_db:
        for index, given in enumerate(info.optim_inputs_func(device="cpu", dtype=torch.float32)):
            yield Configuration(info.optim_cls.__name__, index, given.desc)


def options(case: Configuration) -> dict[str, Any]:
    """The options of the configuration, new ones each time: a learning rate may be a tensor."""
    from torch.testing._internal.common_optimizers import optim_db

    (info,) = (info for info in optim_db if info.optim_cls.__name__ == case.name)
    given = info.optim_inputs_func(device="cpu", dtype=torch.float32)[case.index]
    return copy.deepcopy(dict(given.kwargs))


def made(case: Configuration) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer, the same every time."""
    model = model_of(TORCH[case.name].model)
    return model, getattr(torch.optim, case.name)(model.parameters(), **options(case))


def alone(case: Configuration) -> dict[str, Tensor]:
    """Weights after twice ``SAVED`` steps in one process, by hand; gradients are added up as two ranks add theirs."""
    model, optimizer = made(case)
    for x, y in list(batches(0, 1))[: 2 * SAVED]:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            losses = [(model(part) - of).square().mean() / 2 for part, of in zip(x.chunk(2), y.chunk(2), strict=True)]
            for loss in losses:
                loss.backward()
            return losses[0].detach() + losses[1].detach()

        if case.name == "LBFGS":
            optimizer.step(closure)  # type: ignore[arg-type]  # torch wants a float
        else:
            closure()
            optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def trained(ready: Any, case: Configuration, steps: slice, rank: int, world: int) -> None:
    """These steps on this rank's part of the batches."""
    for x, y in list(batches(rank, world))[steps]:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss: Tensor = (ready.model(x).float() - y).square().mean()
            ready.backward(loss)
            return loss

        if case.name == "LBFGS":
            ready.step(closure)
        else:
            closure()
            ready.step()


def outcome(rank: int, world: int, case: Configuration, engine: str, folder: str) -> Outcome:
    """The whole way under one engine. Collective."""
    model, optimizer = made(case)
    begun = {name: param.detach().clone() for name, param in model.named_parameters()}
    try:
        plan = pk.build_plan(ENGINES[engine], model, optimizer=optimizer)
    except pk.PlanRejected as refused:
        errors = {one.rule for one in refused.findings if one.severity is pk.Severity.ERROR}
        return Outcome(case, engine, refused=tuple(sorted(errors)))
    ready = pk.apply(plan)
    wrong = list(bound(ready, case))
    trained(ready, case, slice(0, 1), rank, world)
    state = difference(plan, ready, rank)
    trained(ready, case, slice(1, SAVED), rank, world)
    ready.save(folder)
    trained(ready, case, slice(SAVED, 2 * SAVED), rank, world)
    weights = whole(ready)
    ready.close()
    wrong += apart(weights, alone(case), begun)
    ready = pk.apply(spoilt(case, engine))
    ready.resume(folder)
    trained(ready, case, slice(SAVED, 2 * SAVED), rank, world)
    again = whole(ready)
    ready.close()
    changed = [name for name in weights if not torch.equal(weights[name], again[name])]
    wrong += [f"resumed otherwise: {', '.join(changed)}"] if changed else []
    wrong += [] if state in ("0", "not predicted") else [f"optimizer state differs by {state} bytes"]
    return Outcome(case, engine, wrong=tuple(wrong), state=state)


@contextmanager
def in_float32() -> Iterator[None]:
    """Muon makes its update orthogonal in bfloat16, which turns the last bit of a sum into a tenth of a step."""
    narrow = Tensor.bfloat16
    Tensor.bfloat16 = Tensor.float  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.bfloat16 = narrow  # type: ignore[method-assign]


def every(rank: int, world: int, cases: list[Configuration], folder: str) -> list[Outcome]:
    """All of them under every engine, in one run of the processes."""
    found = []
    for case in cases:
        for engine in ENGINES:
            try:
                with in_float32():
                    found.append(outcome(rank, world, case, engine, f"{folder}/{case.name}-{case.index}-{engine}"))
            except Exception as error:  # a table of all says more than the first that fails
                dist.barrier()
                found.append(Outcome(case, engine, wrong=(f"{type(error).__name__}: {' '.join(str(error).split())}",)))
    return found


def bound(ready: Any, case: Configuration) -> Iterator[str]:
    """Where the optimizer does not hold the parameters that the model now has, or lost an option."""
    held_now = [id(param) for group in ready.optimizer.param_groups for param in group["params"]]
    if held_now != [id(param) for param in ready.unwrap().parameters()]:
        yield "its slots are not the parameters of the model, in their order"
    for key, value in options(case).items():
        for group in ready.optimizer.param_groups:
            if group[key] != value:
                yield f"{key} is {group[key]!r}, and was {value!r}"


def difference(plan: pk.Plan, ready: Any, rank: int) -> str:
    """Predicted without measured bytes of optimizer state after a step."""
    prediction = predict(plan)
    if any(text.startswith("optimizer state") for text in prediction.not_predicted):
        return "not predicted"
    terms = [term for term in prediction.at(rank).terms if term.category == "optimizer state"]
    if any(term.label is not Label.EXACT for term in terms):
        return "not exact"
    state = [value for entry in ready.optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return str(sum(term.bytes for term in terms) - held(state))


def whole(ready: Any) -> dict[str, Tensor]:
    """The weights, gathered. Collective."""
    params = ready.unwrap().named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in params}


def apart(weights: dict[str, Tensor], expected: dict[str, Tensor], begun: dict[str, Tensor]) -> Iterator[str]:
    """Where training has not led to where it leads in one process."""
    far = torch.stack([(weights[name] - expected[name]).norm() for name in expected]).norm()
    moved = torch.stack([(begun[name] - expected[name]).norm() for name in expected]).norm()
    if not moved > 0:
        yield "one process has not moved"
    elif not far <= NEAR * moved:
        yield f"weights lie {float(far / moved):.1%} of the way of one process from it"


def spoilt(case: Configuration, engine: str) -> pk.Plan:
    """A plan for a model with other weights, which a checkpoint has to put right."""
    model, optimizer = made(case)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return pk.build_plan(ENGINES[engine], model, optimizer=optimizer)
