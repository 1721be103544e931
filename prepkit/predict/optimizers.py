"""Bytes of optimizer state for one parameter, from its shape on the rank.

Read in torch 2.13 ``torch/optim``, bitsandbytes 0.50 ``optim/optimizer.py`` and torchao 0.18 ``optim/adam.py``, and
measured against them. An optimizer that is in no table here is not predicted: no guess is made.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from attrs import frozen

from prepkit.facts import Scalar
from prepkit.predict.prediction import Label

STEP = 4
"""Bytes of torch's ``step`` tensor, one float32 per parameter; on the host unless fused or capturable."""

QUANTISED = 4096
"""Elements from which on bitsandbytes (``min_8bit_size``) and torchao quantise a state."""

Shape = tuple[int, ...]
Options = dict[str, Scalar]


@frozen(kw_only=True)
class OptimizerInputs:
    """The optimizer that steps in the end, as far as its state's bytes depend on it."""

    name: str
    """Name of its class."""
    module: str
    """Module of its class, such as ``torch.optim.adamw``."""
    groups: tuple[tuple[tuple[str, Scalar], ...], ...]
    """Options of each of its ``param_groups``, such as ``("amsgrad", True)``."""
    classes: tuple[tuple[str, str], ...] = ()
    """Where several optimizers step: module and name of the class of each group; none: one class has all groups."""


@frozen
class StateBytes:
    """Bytes of the optimizer state of one parameter, or of several: they add, and multiply by a number of them."""

    bytes: int
    """On the parameter's device."""
    step: int = 0
    """Bytes of its step counter, on the host unless ``steps_on_device``."""
    label: Label = Label.EXACT

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(self.bytes + other.bytes, self.step + other.step, _weaker(self.label, other.label))

    def __mul__(self, times: int) -> StateBytes:
        return StateBytes(self.bytes * times, self.step * times, self.label)


def _weaker(a: Label, b: Label) -> Label:
    return max(a, b, key=tuple(Label).index)


StateFormula = Callable[[Shape, Shape, int, Options], StateBytes]
"""Local shape, global shape, bytes per element and the group's options to the bytes of one parameter's state."""


def _like(copies: int, *, step: int = STEP) -> StateFormula:
    """As many tensors of the parameter's shape and dtype, and ``step`` bytes of counters."""

    def formula(local: Shape, _: Shape, size: int, __: Options) -> StateBytes:
        return StateBytes(copies * prod(local) * size, step)

    return formula


def _adam(local: Shape, _: Shape, size: int, options: Options) -> StateBytes:
    return StateBytes((3 if options.get("amsgrad") else 2) * prod(local) * size, STEP)


def _sgd(local: Shape, _: Shape, size: int, options: Options) -> StateBytes:
    return StateBytes(prod(local) * size if options.get("momentum") else 0)


def _rmsprop(local: Shape, _: Shape, size: int, options: Options) -> StateBytes:
    return StateBytes((1 + bool(options.get("momentum")) + bool(options.get("centered"))) * prod(local) * size, STEP)


def _adafactor(local: Shape, whole: Shape, size: int, _: Options) -> StateBytes:
    """Row and column factors. Torch 2.13 makes them for a sharded parameter too, but cannot step it: an upper bound."""
    if len(whole) < 2:
        return StateBytes(prod(local) * size, STEP)
    row, col = (*whole[:-1], 1), (*whole[:-2], 1, whole[-1])
    label = Label.EXACT if local == whole else Label.BOUNDED
    return StateBytes((prod(row) + prod(col)) * size, STEP, label)


def _bitsandbytes(states: int, *, quantised: bool) -> StateFormula:
    """``init_state``: float32, or 8 bits with one float32 per 256 elements; small parameters stay in float32.

    Estimated, because the groups do not show ``min_8bit_size``: its default is assumed.
    """

    def formula(local: Shape, _: Shape, __: int, ___: Options) -> StateBytes:
        count = prod(local)
        if not quantised or count < QUANTISED:
            return StateBytes(states * count * 4)
        return StateBytes(states * (count + 4 * -(-count // 256)), label=Label.ESTIMATED)

    return formula


def _torchao(bits: int, block: int, table: int) -> StateFormula:
    """``_new_buffer``: quantised where the local part has at least 4096 elements and divides into blocks."""

    def formula(local: Shape, _: Shape, size: int, options: Options) -> StateBytes:
        count = prod(local)
        states = 3 if options.get("amsgrad") else 2
        if count < QUANTISED or count % block:
            return StateBytes(states * count * size, STEP)
        return StateBytes(states * (count * bits // 8 + count // block * 4 + table), STEP)

    return formula


TORCH: dict[str, StateFormula] = {
    "AdamW": _adam,
    "Adam": _adam,
    "NAdam": _like(2, step=2 * STEP),
    "RAdam": _like(2),
    "Adamax": _like(2),
    "Adadelta": _like(2),
    "Adagrad": _like(1),
    "Adafactor": _adafactor,
    "RMSprop": _rmsprop,
    "Rprop": _like(2),
    "Muon": _like(1, step=0),
    "SGD": _sgd,
}
"""Classes of ``torch.optim``."""

BITSANDBYTES: dict[str, StateFormula] = {
    f"{paged}{name}{suffix}": _bitsandbytes(states, quantised=suffix == "8bit")
    for name, states in (
        ("AdamW", 2),
        ("Adam", 2),
        ("Lion", 1),
        ("Adagrad", 1),
        ("SGD", 1),
        ("RMSprop", 1),
        ("LAMB", 2),
    )
    for suffix in ("", "8bit", "32bit")
    for paged in ("", "Paged")
}
"""Classes of ``bitsandbytes.optim``; paged ones may move to host memory, and are counted on the device."""

TORCHAO: dict[str, StateFormula] = {
    f"{name}{suffix}": formula
    for name in ("Adam", "AdamW")
    for suffix, formula in (
        ("8bit", _torchao(8, 256, 1024)),
        ("4bit", _torchao(4, 128, 64)),
        ("Fp8", _torchao(8, 256, 0)),
    )
}
"""Classes of ``torchao.optim``."""

LION: dict[str, StateFormula] = {"Lion": _like(1, step=0)}
"""The class of ``lion_pytorch``."""

DEEPSPEED: dict[str, StateFormula] = {
    "FusedAdam": _like(2, step=0),
    "DeepSpeedCPUAdam": _like(2, step=0),
    "FusedLion": _like(1, step=0),
    "DeepSpeedCPULion": _like(1, step=0),
    "DeepSpeedCPUAdagrad": _like(1, step=0),
}
"""Classes of ``deepspeed.ops``."""

SECTIONS = {"adam": "FusedAdam", "adamw": "FusedAdam", "lion": "FusedLion", "adagrad": "DeepSpeedCPUAdagrad"}
"""The ``type`` in DeepSpeed's own ``optimizer`` section to the class, or one that holds as much."""

LIBRARIES: tuple[tuple[str, dict[str, StateFormula]], ...] = (
    ("torch.optim", TORCH),
    ("bitsandbytes", BITSANDBYTES),
    ("torchao", TORCHAO),
    ("lion_pytorch", LION),
    ("deepspeed", DEEPSPEED),
)
"""How the class's module begins, and the classes that are known there."""


def class_formula(module: str, name: str) -> StateFormula | None:
    """The formula of the state of an optimizer of this class; None: it is in no table."""
    for library, formulas in LIBRARIES:
        if f"{module}.".startswith(f"{library}."):
            return formulas.get(name)
    return None


GroupFormula = Callable[[Shape, Shape, int, int], StateBytes]
"""Local shape, global shape, bytes per element and the index of its group to the bytes of one parameter's state."""


def state_formula(optimizer: OptimizerInputs) -> GroupFormula | None:
    """The formula of the optimizer's state, or of the state of several; None where one of them is in no table."""
    kinds = optimizer.classes or ((optimizer.module, optimizer.name),) * max(len(optimizer.groups), 1)
    formulas = [class_formula(module, name) for module, name in kinds]
    known = [formula for formula in formulas if formula is not None]
    if len(known) < len(formulas):
        return None
    options = [dict(group) for group in optimizer.groups] or [{}]
    return lambda local, whole, size, group: known[group](local, whole, size, options[group])


def steps_on_device(optimizer: OptimizerInputs) -> bool:
    """Return whether the step counters are beside the parameters, not on the host."""
    options = [dict(group) for group in optimizer.groups]
    return bool(options) and all(group.get("fused") or group.get("capturable") for group in options)
