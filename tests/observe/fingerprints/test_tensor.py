"""The fingerprint of one tensor: every bit counts, every cut adds up, memory stays bounded."""

from __future__ import annotations

import pytest
import torch

from prepkit.observe.fingerprints import tensor as module
from prepkit.observe.fingerprints.tensor import fingerprint, fingerprint_sum, unsigned

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


def drawn(dtype: torch.dtype, size: int = 257) -> torch.Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(1)).mul(9)
    return values.gt(0) if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_bit_of_any_element_changes_the_fingerprint(dtype: torch.dtype) -> None:
    whole = drawn(dtype)
    true = fingerprint(whole)
    rows = whole.view(torch.uint8).view(len(whole), -1)
    for place in (0, 100, 256):
        for bit in range(8 * rows.shape[1]) if dtype is not torch.bool else (0,):
            changed = rows.clone()
            changed[place, bit // 8] ^= 1 << bit % 8
            assert fingerprint(changed.view(-1).view(dtype)) != true, (place, bit)
    assert fingerprint(rows.flip(0).reshape(-1).view(dtype)) != true


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_sum_that_its_definition_says(dtype: torch.dtype) -> None:
    whole = drawn(dtype, 33)
    flat = torch.view_as_real(whole).reshape(-1) if whole.is_complex() else whole
    bits = flat.view(INTEGERS[flat.element_size()]).tolist()

    def hashed(index: int) -> int:
        mixed = index * module._ODD % 2**64
        mixed = (mixed ^ mixed >> 29) * module._ALSO_ODD % 2**64
        return (mixed ^ mixed >> 32) | 1

    assert fingerprint(whole) == sum(bit * hashed(index) for index, bit in enumerate(bits)) % 2**64


def test_chunks_make_no_difference_and_bound_the_memory_beside_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(301, 77, generator=torch.Generator().manual_seed(2))
    true = [fingerprint(one) for one in (whole, whole.t(), whole[:, 3:40])]
    seen: list[int] = []
    ask = module._bits
    monkeypatch.setattr(module, "_bits", lambda row: seen.append(row.numel()) or ask(row))
    monkeypatch.setattr(module, "CHUNK", 64)
    assert [fingerprint(one) for one in (whole, whole.t(), whole[:, 3:40])] == true
    assert fingerprint(whole.t()) == fingerprint(whole.t().contiguous())
    assert max(seen) <= 64


def test_a_cast_is_read_as_the_tensor_that_it_would_give() -> None:
    whole = torch.randn(70_000, generator=torch.Generator().manual_seed(3))
    assert unsigned(int(fingerprint_sum(whole, dtype=torch.bfloat16))) == fingerprint(whole.bfloat16())
    assert fingerprint(torch.empty(0)) == 0
    assert fingerprint(torch.tensor(2.0)) == fingerprint(torch.tensor([2.0])) != 0
