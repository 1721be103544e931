"""A config file of another library, however it was bent, becomes a config or findings, and every key has an account."""

from __future__ import annotations

import pytest
from hypothesis import given

from property_tests.support.foreign_files import files
from tests.tools.corpus import examined


@given(drawn=files())
def test_whatever_was_done_to_a_file_nothing_raw_is_raised_and_no_key_is_lost(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[str, bytes]
) -> None:
    name, raw = drawn
    file = tmp_path_factory.getbasetemp() / name
    file.write_bytes(raw)
    row = examined(file, name, "")
    assert not row.unexplained, raw.decode(errors="replace")
    assert row.findings or row.keys or row.kind == "prepkit"
    assert all(finding.where and finding.what and finding.fix for finding in row.findings)
