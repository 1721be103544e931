"""A process that stands for another rank is itself again where prepkit's own collectives ask."""

from __future__ import annotations

from unittest.mock import Mock

import torch.distributed as dist

from prepkit.proving.other_rank import itself, not_plainly, standing_for
from tests.support.gang import Gang


def ranks_told(rank: int, world: int) -> tuple[int, ...]:
    """What torch says of this process: as another rank, as itself inside, as the other again, and afterwards."""
    del world
    with standing_for(Mock(asked=1 - rank, variables=())):
        other = dist.get_rank()
        with itself():
            own = dist.get_rank()
        again = dist.get_rank()
    return other, own, again, dist.get_rank()


def test_a_process_that_stands_for_another_is_itself_for_collectives_of_prepkit_s_own(gang2: Gang) -> None:
    assert gang2.run(ranks_told) == [(1, 0, 1, 0), (0, 1, 0, 1)]


def test_a_model_that_asks_other_ranks_is_told_of_where_no_group_is() -> None:
    """As in the process that replays for ``pk.prove``."""
    told = str(not_plainly(ValueError("Default process group has not been initialized, please make sure to call it")))
    assert told.startswith("the model asks other ranks in its forward or backward, as by a collective of its own")
    assert str(not_plainly(ValueError("no"))) == "the model does not run plainly: ValueError: no"
