"""What an audit says of stages of a pipeline that begin with one table, to look up in and to say ids by."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as fn

from prepkit.auditing.script import audit_run
from tests.audit.case import adam
from tests.support.gang import Gang

WORDS, WIDE = 16, 8


class Lower(nn.Module):
    """Looks ids up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WORDS, WIDE))
        self.inner = nn.Linear(WIDE, WIDE)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(fn.embedding(ids, self.table))


class Upper(nn.Module):
    """Says ids by that table, or by one of its own."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WORDS, WIDE))
        self.inner, self.norm = nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE)
        if not tied:
            nn.init.normal_(self.table)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)) @ self.table.t()


def stages(rank: int, world: int, *, tied: bool, sums: bool) -> list[tuple[str, str]]:
    """What is said on this rank; the layers begin alike. ``sums``: the gradients of the table, over both."""

    def train() -> None:
        model = Upper(tied=tied) if rank else Lower()
        ids = torch.randint(WORDS, (2, 4, 6), generator=torch.Generator().manual_seed(1))
        if rank == 0:
            said = model(ids[0])
            dist.send(said.detach(), 1)
            dist.recv(gradient := torch.empty_like(said), 1)
            said.backward(gradient)
        else:
            dist.recv(given := torch.empty(4, 6, WIDE), 0)
            fn.cross_entropy(model(given.requires_grad_()).flatten(0, 1), ids[1].flatten()).backward()
            assert given.grad is not None
            dist.send(given.grad, 0)
        if sums:
            dist.all_reduce(model.table.grad)
        adam(model).step()

    audit = audit_run(train)
    assert audit is not None
    return sorted((one.rule, one.what) for one in audit.findings if one.severity.value != "note")


@pytest.mark.parametrize(("tied", "sums"), [(True, False), (True, True), (False, False)])
def test_a_table_of_two_stages_that_nobody_sums_for_is_told(gang2: Gang, *, tied: bool, sums: bool) -> None:
    for said in gang2.run(partial(stages, tied=tied, sums=sums), timeout=60):
        assert [rule for rule, _ in said] == ["run.tie-broken"] * (2 * (tied and not sums))
        assert all(f"`table` of rank {rank} does" in what for rank, (_, what) in enumerate(said)), "each rank's is told"
