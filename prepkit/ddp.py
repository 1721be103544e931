"""Compression of gradients on their way to the other ranks: ``DDP(hook=...)``."""

from prepkit.config import CompressHook as CompressHook
from prepkit.config import PowerSGDHook as PowerSGDHook
