"""A field that a config class does not have is told with the one that was meant."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
from attrs import evolve, fields

import prepkit as pk
from prepkit.findings import keywords


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: pk.Config(accumulate=4), "Config has no field 'accumulate'; write accumulation=..."),
        (lambda: pk.Config(gradient_accumulation_steps=4), "'gradient_accumulation_steps'; write accumulation=..."),
        (lambda: pk.Config(mixed_precision="bf16"), "'mixed_precision'; write precision=..."),
        (lambda: pk.FSDP2(wrapp=pk.wrap.WrapBlocks()), "FSDP2 has no field 'wrapp'; write wrap=..."),
        (lambda: pk.optim.AdamW(learning_rate=1.0), "AdamW has no field 'learning_rate'; write lr=..."),
        (lambda: pk.DDP(find_unused=True), "'find_unused'; write find_unused_parameters=..."),
        (lambda: pk.Mesh(zzz=2), "Mesh has no field 'zzz', only replicate, shard, tensor"),
        (lambda: pk.Single(x=1), "Single has no field 'x', and takes none"),
        (lambda: evolve(pk.Config(), accumulate=4), "write accumulation=..."),
    ],
)
def test_a_misspelled_field_is_told_with_the_one_that_was_meant(build: object, says: str) -> None:
    assert callable(build)
    with pytest.raises(TypeError) as raised:
        build()
    assert says in str(raised.value)


def test_what_is_spelled_right_is_as_before() -> None:
    cfg = pk.Config(accumulation=4, optimizer=pk.optim.AdamW(lr=1.0))
    assert (
        pickle.loads(pickle.dumps(cfg))
        == copy.deepcopy(cfg)
        == evolve(pk.Config(), accumulation=4, optimizer=pk.optim.AdamW(lr=1.0))
    )
    assert tuple(inspect.signature(pk.Config).parameters) == tuple(field.name for field in fields(pk.Config))
    with pytest.raises(TypeError, match="positional"):
        pk.Config(pk.DDP())  # type: ignore[misc]


def test_each_other_name_stands_for_a_field_of_some_class() -> None:
    known = {field.name for cls in vars(pk.config).values() if hasattr(cls, "__attrs_attrs__") for field in fields(cls)}
    assert set(keywords.OTHER_NAMES.values()) <= known
