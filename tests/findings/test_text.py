"""Names collapse to ranges, and ranges stand for exactly their names."""

from __future__ import annotations

import pytest

from prepkit.findings.text import collapse, in_bytes, listed


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (["h.0", "h.1", "h.2"], ["h.0..2"]),
        (["h.2", "h.0", "h.5", "h.1"], ["h.0..2,5"]),
        (["h.0.a", "n", "h.1.a", "h.0.b"], ["h.0..1.a", "n", "h.0.b"]),
        (["h.0.e.0", "h.0.e.1", "h.1.e.0"], ["h.0.e.0..1", "h.1.e.0"]),
        ([f"h.{i}.e.{j}" for i in range(3) for j in range(4)], ["h.0..2.e.0..3"]),
        (["h.01", "h.1", "h.2"], ["h.01", "h.1..2"]),
        (["", "a"], ["", "a"]),
        ([], []),
    ],
)
def test_names_collapse_to_ranges(names: list[str], texts: list[str]) -> None:
    found = collapse(names)
    assert [one.text for one in found] == texts
    assert sorted(name for one in found for name in one.names) == sorted(names)


def test_a_long_list_is_cut_and_what_is_left_out_is_counted() -> None:
    names = [f"h.{i}.{part}" for i in range(80) for part in "abcdef"]
    assert listed(names) == "h.0..79.a, h.0..79.b, h.0..79.c, h.0..79.d and 160 more"
    assert listed(["", "a"]) == "(root), a"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (85899345920, "80.00 GiB"), (2**70, "1048576.00 PiB")],
)
def test_bytes_are_shown_in_binary_units(number: int, text: str) -> None:
    assert in_bytes(number) == text
