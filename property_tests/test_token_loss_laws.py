"""Laws of the mean over tokens: weights and the factor at the end make it, however tokens lie on ranks and windows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prepkit.training import token_loss
from prepkit.training.token_loss import TokenWindow

COUNTS = st.integers(0, 5000)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int, list[list[list[int]]]]:
    """Ranks, micro-batches of a whole window, and by window and micro-batch the tokens of each rank."""
    ranks, whole = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row = st.lists(COUNTS, min_size=ranks, max_size=ranks)
    return ranks, whole, draw(st.lists(st.lists(row, min_size=1, max_size=whole), min_size=1, max_size=3))


@given(windows(), st.data())
def test_weights_over_ranks_and_windows_of_any_length_make_the_mean_over_all_tokens(
    drawn: tuple[int, int, list[list[list[int]]]], data: st.DataObject
) -> None:
    ranks, whole, by_window = drawn
    total = 0.0
    with pytest.MonkeyPatch.context() as patch:  # ranks in the place of a process group: each collective has one total
        joint = SimpleNamespace(size=ranks, total=lambda _: torch.tensor(float(total)))
        patch.setattr(token_loss, "world", lambda: joint)
        states = [TokenWindow() for _ in range(ranks)]
        for micro_batches in by_window:
            means = data.draw(st.lists(st.floats(-8, 8, width=32), min_size=ranks * whole, max_size=ranks * whole))
            summed = 0.0
            for at, counts in enumerate(micro_batches):
                total = sum(counts)
                for rank, (state, count) in enumerate(zip(states, counts, strict=True)):
                    loss = torch.tensor(means[at * ranks + rank], dtype=torch.float64)
                    summed += float(state.weighed(loss, count)) / whole / ranks  # as engines divide and average
            total = sum(map(sum, micro_batches))
            factors = {float(state.end(whole)) for state in states}  # type: ignore[arg-type]
            assert len(factors) == 1
            products = [n * means[at * ranks + r] for at, row in enumerate(micro_batches) for r, n in enumerate(row)]
            wanted = sum(products) / total if total else 0.0
            assert summed * factors.pop() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
            assert all(state.unit is not None and float(state.unit).hex().startswith("0x1.0000") for state in states)


@given(st.integers(1, 64), st.integers(1, 10**6))
def test_even_tokens_leave_gradients_about_as_large_as_means_have_them(micro_batches: int, tokens: int) -> None:
    """Float16 has room for means; sums of so many tokens would overflow."""
    window = TokenWindow()
    weights = [float(window.weighed(torch.tensor(1.0), tokens)) for _ in range(micro_batches)]
    assert all(1.0 <= weight < 2.0 for weight in weights)
    factor = window.end(micro_batches)
    assert factor is not None
    assert 0.5 < float(factor) <= 1.0
