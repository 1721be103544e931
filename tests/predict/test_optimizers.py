"""What an optimizer keeps of a parameter: as torch's own do, and a row for each class that is not installed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prepkit.predict.optimizers import (
    BITSANDBYTES,
    DEEPSPEED,
    LION,
    SECTIONS,
    TORCH,
    TORCHAO,
    OptimizerInputs,
    StateBytes,
    class_formula,
    state_formula,
)
from prepkit.predict.prediction import Label

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TORCH if name != "SGD"),
    *(("SGD", options) for options in ({}, {"momentum": 0.9})),
    *((name, {"amsgrad": True}) for name in ("Adam", "AdamW")),
    ("RMSprop", {"momentum": 0.9}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_torch_s_optimizers_hold_as_much_after_a_step_as_their_formulas_say(name: str, options: dict[str, Any]) -> None:
    param = torch.nn.Parameter(torch.ones(7, 3))
    optimizer = getattr(torch.optim, name)([param], lr=0.1, **options)
    param.grad = torch.ones(7, 3)
    optimizer.step()
    held = {key: value.nbytes for key, value in optimizer.state[param].items() if torch.is_tensor(value)}
    counters = sum(held.pop(key, 0) for key in ("step", "mu_product"))
    formula = state_formula(
        OptimizerInputs(name=name, module=type(optimizer).__module__, groups=(tuple(options.items()),))
    )
    assert formula is not None
    assert formula((7, 3), (7, 3), 4, 0) == StateBytes(sum(held.values()), counters)


def state(module: str, name: str, elements: int, size: int = 2, **options: Any) -> StateBytes | None:
    formula = class_formula(module, name)
    return formula and formula((elements,), (elements,), size, options)


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("lion_pytorch.lion_pytorch", "Lion", 1),
        ("deepspeed.ops.adam.fused_adam", "FusedAdam", 2),
        ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam", 2),
        ("deepspeed.ops.lion.fused_lion", "FusedLion", 1),
        ("deepspeed.ops.lion.cpu_lion", "DeepSpeedCPULion", 1),
        ("deepspeed.ops.adagrad.cpu_adagrad", "DeepSpeedCPUAdagrad", 1),
    ],
)
def test_lion_and_deepspeed_keep_tensors_of_the_parameter_s_dtype_and_no_counters(
    module: str, name: str, expected: int
) -> None:
    assert state(module, name, 10) == StateBytes(expected * 10 * 2)


def test_deepspeed_s_own_section_names_classes_that_are_known() -> None:
    assert set(SECTIONS.values()) <= set(DEEPSPEED)
    assert {"adamw": SECTIONS["adamw"], "lion": SECTIONS["lion"]} == {"adamw": "FusedAdam", "lion": "FusedLion"}


@pytest.mark.parametrize(
    ("name", "states"),
    [("AdamW", 2), ("Adam", 2), ("Lion", 1), ("Adagrad", 1), ("SGD", 1), ("RMSprop", 1), ("LAMB", 2)],
)
@pytest.mark.parametrize("paged", ["", "Paged"])
def test_bitsandbytes_keeps_small_states_and_those_of_32_bits_in_float32(name: str, states: int, paged: str) -> None:
    blocks = 4097 + 4 * 17  # a byte an element, and a float32 for every 256 of them
    for suffix in ("", "8bit", "32bit"):
        small, large = (state("bitsandbytes.optim.any", f"{paged}{name}{suffix}", count) for count in (4095, 4097))
        assert small == StateBytes(states * 4095 * 4)
        if suffix == "8bit":
            assert large == StateBytes(states * blocks, label=Label.ESTIMATED)
        else:
            assert large == StateBytes(states * 4097 * 4)
    edge = state("bitsandbytes.optim.any", f"{paged}{name}8bit", 4096)
    assert edge == StateBytes(states * (4096 + 4 * 16), label=Label.ESTIMATED)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    ("suffix", "quantised"), [("8bit", 4096 + 16 * 4 + 1024), ("4bit", 2048 + 32 * 4 + 64), ("Fp8", 4096 + 16 * 4)]
)
def test_torchao_quantises_what_is_large_and_divides_into_blocks(name: str, suffix: str, quantised: int) -> None:
    module = f"torchao.optim.{name.lower()}"
    assert state(module, name + suffix, 4096) == StateBytes(2 * quantised, 4)
    assert state(module, name + suffix, 4096, amsgrad=True) == StateBytes(3 * quantised, 4)
    for whole in (4097, 4096 - 256):
        assert state(module, name + suffix, whole) == StateBytes(2 * whole * 2, 4)


def test_a_class_is_known_by_its_library_and_by_its_name() -> None:
    known = {"torch.optim": TORCH, "bitsandbytes": BITSANDBYTES, "torchao": TORCHAO, "lion_pytorch": LION}
    for library, formulas in (known | {"deepspeed": DEEPSPEED}).items():
        assert {name for name in formulas if class_formula(library, name) is None} == set()
        assert class_formula(f"{library}x", next(iter(formulas))) is None
        assert class_formula(library, "LBFGS") is None
