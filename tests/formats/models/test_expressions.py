"""Expressions of tables are read as Python reads them, are bounded, and run nothing."""

from __future__ import annotations

import pytest

from prepkit.formats.models.expressions import LARGEST, Unfit, evaluate

FIELDS = {
    "width": 96,
    "heads": 6,
    "share": 0.25,
    "kind": "fast",
    "layers": ["full", "sliding", "full"],
    "nothing": None,
    "text": {"width": 48},
    "yes": True,
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (7, 7),
        ("width // heads", 16),
        ("width + 3 * heads - 1", 113),
        ("int(width * share) // 2", 12),
        ("text.width * 2", 96),
        ("text.missing", None),
        ("layers[i] == 'full'", False),
        ("layers[-1]", "full"),
        ("len(layers)", 3),
        ("'sliding' in layers", True),
        ("'other' in nothing", False),
        ("(heads if yes else width) % 4", 2),
        ("nothing is None and not (kind == 'slow')", True),
        ("(i + 1) % 2 == 0", True),
        ("nothing < 3", False),
        ("[1, heads]", [1, 6]),
    ],
)
def test_an_expression_has_the_value_that_it_says(expression: str | int, value: object) -> None:
    assert evaluate(expression, FIELDS, (1,)) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("width // (heads - 6)", "divided by 0"),
        ("kind * 2", "kind is 'fast'; a number"),
        ("nothing + 1", "nothing is None; a number"),
        ("layers[7]", "layers[7] is missing"),
        ("kind[0]", "kind[0] is missing"),
    ],
)
def test_values_that_do_not_fit_are_named(expression: str, said: str) -> None:
    with pytest.raises(Unfit) as refused:
        evaluate(expression, FIELDS)
    assert said in str(refused.value)


def test_no_number_grows_beyond_what_a_model_has() -> None:
    with pytest.raises(Unfit, match="a number up to"):
        evaluate("big * big * big", {"big": LARGEST})


@pytest.mark.parametrize(
    "expression", ["open('x')", "__import__('os')", "(lambda: 1)()", "[x for x in layers]", "f'{kind}'"]
)
def test_anything_else_is_no_expression(expression: str) -> None:
    with pytest.raises(ValueError, match="is no expression of a table"):
        evaluate(expression, FIELDS)
