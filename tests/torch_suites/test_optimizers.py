"""Some configurations of torch's own optimizer tests; ``python -m tests.tools.torch_optimizers`` runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gang import Gang
from tests.torch_suites import optimizers as suite
from tests.torch_suites.optimizers import Configuration

pytest.importorskip("expecttest", reason="torch's own tests need it: pip install 'prepkit[dev]'")

DRAWN = ("ASGD", "AdamW", "LBFGS", "Muon", "Rprop", "SparseAdam")
REFUSED = {
    "LBFGS": "optimizer.keeps-own-list",
    "Rprop": "optimizer.under-engine",
    "SparseAdam": "optimizer.under-engine",
}
"""Under FSDP2; everything else trains there."""
UNKNOWN = {"ASGD", "LBFGS", "SparseAdam"}
"""Whose state is not predicted."""


def drawn() -> list[Configuration]:
    """The configuration with most options of each of these classes."""
    cases: dict[str, Configuration] = {}
    for case in suite.configurations():
        if case.name not in DRAWN:
            continue
        if case.name not in cases or len(suite.options(case)) > len(suite.options(cases[case.name])):
            cases[case.name] = case
    return list(cases.values())


@pytest.mark.timeout(180)
def test_an_optimizer_of_torch_trains_saves_and_goes_on_as_alone_or_is_refused(gang2: Gang, tmp_path: Path) -> None:
    cases = drawn()
    assert len(cases) == len(DRAWN)
    for found in gang2.run(suite.every, cases, str(tmp_path), timeout=150):
        assert not [f"{one.case} under {one.engine}: {one.text}" for one in found if one.wrong]
        refused = {one.case.name: one.refused for one in found if one.engine == "FSDP2" and one.refused}
        assert refused == {name: (rule,) for name, rule in REFUSED.items()}
        assert not any(one.refused for one in found if one.engine == "DDP")
        assert {one.case.name for one in found if one.state == "not predicted"} == UNKNOWN


def test_weights_that_went_another_way_are_seen() -> None:
    begun, expected = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    assert not list(suite.apart({"w": torch.full((4,), 1.001)}, expected, begun))
    assert list(suite.apart({"w": torch.full((4,), 1.01)}, expected, begun))
    assert list(suite.apart({"w": torch.zeros(4)}, expected, begun))
    assert list(suite.apart(expected, expected, expected))
