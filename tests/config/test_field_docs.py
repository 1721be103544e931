"""``help()`` of a config class says what each field means."""

from __future__ import annotations

import pydoc

import pytest
from attrs import fields

import prepkit as pk
from prepkit import config
from prepkit.config.field_docs import field_docs

CLASSES = [value for value in vars(config).values() if isinstance(value, type) and hasattr(value, "__attrs_attrs__")]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_help_of_a_config_class_has_its_own_docstring_and_those_of_its_fields(cls: type) -> None:
    page = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    docs = field_docs(cls)
    assert set(docs) <= {field.name for field in fields(cls)}
    assert all(f"{name}: {text}" in page for name, text in docs.items())
    assert ("Fields:" in page) is bool(docs)
    assert (cls.__doc__ or "").splitlines()[0] in page


def test_no_field_of_the_config_is_without_words() -> None:
    assert set(field_docs(pk.Config)) == {field.name for field in fields(pk.Config)}
    assert (
        "    accumulation: Micro-batches per optimizer step. None: 1, or what ``global_batch`` gives."
        in (pk.Config.__doc__ or "").splitlines()
    )
