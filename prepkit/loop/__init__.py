"""The training loop as a state machine: events come in, orders come out. Pure; nothing here imports torch."""

from prepkit.loop.advance import Advanced, Junction, Refused, advance, learned
from prepkit.loop.history import History

__all__ = ["Advanced", "History", "Junction", "Refused", "advance", "learned"]
