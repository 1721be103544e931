"""The step of a recorded window, taken once more by the optimizer's class over the recorded gradients."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from prepkit.facts.proof import StepProof
from prepkit.proving.parts_of import as_wide, numbers, replicas
from prepkit.proving.record_file import HeldPart, Record
from prepkit.ranks.no_collectives import NoCollectives

OTHER_NAMES = {"FusedAdam": "AdamW", "DeepSpeedCPUAdam": "AdamW"}
"""Optimizers of DeepSpeed's to those of torch that do the same with the options that they are given."""
OF_ROWS = ("SparseAdam",)
"""Optimizers that take no gradient but one of some rows; rows of zeros are none of them."""
HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that change how a step is computed, and not what comes of it."""
PARTS = ("to_local", "full_tensor")
"""Methods that DTensors alone have, and that give what they hold here, or all of it."""
KEPT = ("state.", "number.")
"""How keys of an optimizer's state begin."""
AT_ONCE = 1 << 28
"""Elements that an optimizer of the program's own is given at once, at most: four copies in float64 are 8 GiB."""
NUDGED = 2.0**-20
"""By which part of itself a gradient is moved, to see what rounding inside a step of the program's own may do."""


def _class_of(name: str) -> Any:
    """Torch's optimizer of that name; None: it has none."""
    return getattr(torch.optim, OTHER_NAMES.get(name, name), None)


def _no_step(records: tuple[Record, ...]) -> str:
    """Why no step is taken again; empty where some may be."""
    head = records[0].head
    if head.odd:
        return f"{head.optimizer} keeps {', '.join(head.odd)}, which a record does not hold: its step was not replayed"
    if "LBFGS" in head.optimizer:
        return f"{head.optimizer} asks for several gradients in a step: the first was compared, and no step"
    return ""


def steps_of(records: tuple[Record, ...], weight: Callable[[str], Tensor]) -> tuple[tuple[StepProof, ...], str]:
    """Every trained parameter: the step that was taken, and the same class taken plainly over the recorded gradient.

    And why nothing is compared, or not those of some optimizer. ``weight``: what a parameter was before, whole.
    """
    if why := _no_step(records):
        return (), why
    found: list[StepProof] = []
    said: dict[str, None] = {}
    own = _Own(records, weight)
    for one in records[0].head.params:
        try:
            found += (own.steps(one) or _steps(records, weight, one)) if one.trained else ()
        except CannotStep as why_not:
            said[str(why_not)] = None
    none = said and not any(one.held for one in found)  # nothing is known of any step
    return () if none else tuple(found), "; ".join(said)


class CannotStep(RuntimeError):
    """A step is not taken again; the text says of which optimizer, and why."""


def _steps(records: tuple[Record, ...], weight: Callable[[str], Tensor], one: HeldPart) -> Iterator[StepProof]:
    rank, group = _stepped_by(records, one.name)
    grads, after = (
        tuple(replica for replica in every if replica.holder == rank) or every  # where others hold no optimizer of it
        for every in (replicas(records, "grad", one.name), replicas(records, "after", one.name))
    )
    if group is None:
        if not any(one.name in record.head.elsewhere for record in records):
            yield StepProof(name=one.name, held=False)
    elif grads and after:
        before = weight(one.name)
        options = json.loads(records[0].head.groups[group])
        exact, coarse = _updates(options, before, grads[0].values, dict(_state(records, one.name)))
        yield _beside(one.name, before, after[0].values, exact, float((exact - coarse).norm()))


def _stepped_by(records: tuple[Record, ...], name: str) -> tuple[int, int | None]:
    """The first rank whose optimizer holds the parameter, and its group there."""
    held = ((record.head.rank, part.group) for record in records for part in record.head.params if part.name == name)
    return next(((rank, group) for rank, group in held if group is not None), (0, None))


def _beside(name: str, before: Tensor, after: Tensor, exact: Tensor, noise: float, by_parts: str = "") -> StepProof:
    """What a weight has become beside the plain update."""
    moved = numbers(after).double() - numbers(before).double()
    return StepProof(
        name=name,
        along=float(moved @ exact),
        expected=float(exact @ exact),
        moved=float(moved @ moved),
        noise=noise,
        dtype=str(before.dtype.to_real()).removeprefix("torch."),
        meant=int(exact.count_nonzero()),
        lost=int(((moved == 0) & (exact != 0)).sum()),
        by_parts=by_parts,
    )


@frozen(eq=False)
class _Whole:
    """One parameter that ranks hold in parts, put together."""

    options: dict[str, Any]
    before: Tensor
    grad: Tensor
    after: Tensor


class _Own:
    """Optimizers of the program's own classes: what they do to parts of weights, and would do to the whole ones.

    What they compute is their own. That cutting weights changes it can be wanted by nobody, and is seen where the
    class takes the same step over whole tensors: all of its parameters at once, as some norm may reach over them.
    """

    def __init__(self, records: tuple[Record, ...], weight: Callable[[str], Tensor]) -> None:
        self.records, self.weight = records, weight
        self.known: dict[str, dict[str, StepProof] | CannotStep] = {}

    def steps(self, one: HeldPart) -> tuple[StepProof, ...]:
        """Those of one parameter; none where one of torch's optimizers, or nobody, steps it, or a rank has it whole."""
        _, group = _stepped_by(self.records, one.name)
        name = json.loads(self.records[0].head.groups[group])["class"] if group is not None else ""
        make = _living(name) if _class_of(name) is None and self.records[0].head.fresh else None
        if make is None:
            return ()
        if name not in self.known:
            self.known[name] = self._taken(name, make)
        match self.known[name]:
            case CannotStep() as why_not:
                raise why_not
            case known:
                return (known[one.name],) if one.name in known else ()

    def _taken(self, name: str, make: type[Optimizer]) -> dict[str, StepProof] | CannotStep:
        wholes = dict(self._wholes(name))
        if not wholes:
            return {}
        if sum(one.before.numel() for one in wholes.values()) > AT_ONCE:
            return CannotStep(f"{name} steps too many parameters to take its step again over all of them at once")
        try:
            exact = _own_updates(make, wholes, torch.float64)
            others = [_own_updates(make, wholes, torch.float32), _own_updates(make, wholes, torch.float64, NUDGED)]
        except Exception as error:  # a class that nobody here has seen
            said = f"{type(error).__name__}: {error!s:.200}"
            return CannotStep(f"{name} cannot take its step again over whole weights: {said}")
        found = dict[str, StepProof]()
        for key, one in wholes.items():
            noise = max(float((exact[key] - other[key]).norm()) for other in others)
            found[key] = _beside(key, one.before, one.after, exact[key], noise, name.rpartition(".")[2])
        return found

    def _wholes(self, name: str) -> Iterator[tuple[str, _Whole]]:
        head = self.records[0].head
        for one in head.params if any(_cut(self.records, one.name) for one in head.params) else ():
            _, group = _stepped_by(self.records, one.name)
            options = json.loads(head.groups[group]) if group is not None else {}
            if one.trained and options.pop("class", "") == name:
                grads, after = (replicas(self.records, kind, one.name) for kind in ("grad", "after"))
                if grads and after:
                    yield one.name, _Whole(options, self.weight(one.name), grads[0].values, after[0].values)


def _cut(records: tuple[Record, ...], name: str) -> bool:
    """Return whether ranks hold parts of the parameter."""
    return any(one.owners is not None for one in replicas(records, "weight", name)[:1])


def _living(name: str) -> type[Optimizer] | None:
    """The optimizer class of this process that goes by that name, with its module; None: there is none, or several."""
    classes, found = [Optimizer], []
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        found += [kind] if f"{kind.__module__}.{kind.__name__}" == name else []
    return found[0] if len(found) == 1 else None


def _own_updates(
    make: type[Optimizer], wholes: Mapping[str, _Whole], dtype: torch.dtype, nudged: float = 0.0
) -> dict[str, Tensor]:
    """What a step of the class adds to each weight, in float64; ``nudged``: over gradients that are a little other."""
    params, groups = dict[str, nn.Parameter](), dict[str, dict[str, Any]]()
    generator = torch.Generator().manual_seed(0)
    for name, one in wholes.items():
        param = params[name] = nn.Parameter(one.before.to(as_wide(dtype, one.before), copy=True))
        param.grad = one.grad.to(param.dtype, copy=True)
        if nudged:
            by = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
            param.grad.mul_(1 + nudged * by)
        options = groups.setdefault(json.dumps(one.options, sort_keys=True), {"params": [], **one.options})
        options["params"].append(param)
    optimizer = _made(make, [*groups.values()])
    with NoCollectives(_sends), _parts_of_themselves():
        optimizer.step()
    return {name: numbers(params[name]).double() - numbers(one.before).double() for name, one in wholes.items()}


@contextmanager
def _parts_of_themselves() -> Iterator[None]:
    """Inside, a plain tensor answers what only a DTensor is asked for: its part, and the whole of it, are itself."""
    for name in PARTS:
        setattr(Tensor, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name in PARTS:
            delattr(Tensor, name)


def _sends(name: str) -> Exception:
    return CannotStep(f"it sends tensors to other ranks ({name})")


def _made(make: Any, groups: list[dict[str, Any]]) -> Any:
    """An optimizer of the class over the groups: by its own ``__init__`` where that takes them, else without it."""
    try:
        return make([{**group} for group in groups])
    except Exception:  # its own arguments: a learning rate that must be given, two lists of parameters
        plain = make.__new__(make)
        Optimizer.__init__(plain, groups, {})
        return plain


def _updates(options: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The step in float64, and in the weight's own dtype. Raises ``CannotStep``."""
    if _class_of(options["class"]) is None:
        raise CannotStep(f"{options['class']} is no optimizer of torch's: its step was not replayed")
    try:
        kinds = torch.float64, weight.dtype.to_real()
        exact, coarse = (_update(options, weight, grad, state, dtype) for dtype in kinds)
    except Exception as error:  # options and state are what a file says
        said = f"{type(error).__name__}: {error!s:.200}"
        raise CannotStep(f"{options['class']} cannot take its step again: {said}") from error
    return exact, coarse


def _state(records: tuple[Record, ...], name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what the optimizer had of one parameter, whole."""
    every = (key.partition("/") for record in records for key in record.tensors if key.startswith(KEPT))
    kinds = sorted({kind for kind, _, of in every if of == name})
    for kind in kinds:
        key = kind.partition(".")[2]
        if kind.startswith("number."):
            kept = next((one.tensors[f"{kind}/{name}"] for one in records if f"{kind}/{name}" in one.tensors), None)
            if kept is not None:
                yield key, kept[0]
        elif whole := replicas(records, kind, name):
            yield key, whole[0].values


def _update(
    options: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return what one step adds to a weight, in float64."""
    make: Callable[..., Any] = _class_of(options["class"])
    known = inspect.signature(make).parameters
    given = {key: value for key, value in options.items() if key in known and key not in HOW}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    param = nn.Parameter(weight.to(as_wide(dtype, weight), copy=True))
    param.grad = grad.to(param.dtype, copy=True)
    if options["class"] in OF_ROWS:
        param.grad = param.grad.to_sparse(1)
    optimizer = make([param], **given)
    if state:
        optimizer.state[param] = {key: _as_it_was(key, value, dtype) for key, value in state.items()}
    optimizer.step()
    return numbers(param).double() - numbers(weight).double()


def _as_it_was(key: str, value: Tensor, dtype: torch.dtype) -> Any:
    """One entry of an optimizer's state: torch keeps the number of steps in float32, and numbers as they are."""
    if value.dim():
        return value.to(as_wide(dtype, value), copy=True)
    if key != "step" and not value.is_floating_point():
        return value.item()
    return value.to(torch.float32 if key == "step" else dtype, copy=True)  # which the step changes in its place
