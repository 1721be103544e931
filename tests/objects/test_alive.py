"""What is alive is looked for once, where several questions are asked of it."""

from __future__ import annotations

import gc
from unittest.mock import patch

from torch import nn

from prepkit.objects.alive import alive, alive_of, seen_once


class Marked(nn.Linear):
    pass


def test_several_questions_take_one_look_and_see_one_state() -> None:
    first = Marked(1, 1)
    with patch.object(gc, "get_objects", wraps=gc.get_objects) as looks, seen_once():
        assert alive(Marked) == [first]
        second = Marked(1, 1)
        with seen_once():
            assert alive(Marked) == [first]
        assert alive_of(lambda kind: kind is Marked) == [first]
        assert looks.call_count == 1
    assert alive(Marked) == [first, second]
    del first, second
    gc.collect()
    assert alive(Marked) == []
