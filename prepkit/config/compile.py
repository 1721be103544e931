"""torch.compile."""

from __future__ import annotations

from attrs import frozen

from prepkit.config.wrapping import Wrap, WrapBlocks


@frozen(kw_only=True)
class NoCompile:
    """Run eagerly."""


@frozen(kw_only=True)
class CompileModel:
    """Compile the whole model."""

    backend: str = "inductor"
    """A backend that ``torch.compile`` knows."""
    mode: str = "default"
    """``default``, ``reduce-overhead``, ``max-autotune`` or ``max-autotune-no-cudagraphs``."""
    fullgraph: bool = False
    """Refuse graph breaks."""
    dynamic: bool | None = None
    """Compile for dynamic shapes; None lets torch decide."""


@frozen(kw_only=True)
class CompileBlocks:
    """Compile each repeated block by itself: one compilation serves all of them."""

    blocks: Wrap = WrapBlocks()
    """Which modules."""
    backend: str = "inductor"
    """A backend that ``torch.compile`` knows."""
    mode: str = "default"
    """As in ``CompileModel``."""
    fullgraph: bool = False
    """Refuse graph breaks."""
    dynamic: bool | None = None
    """Compile for dynamic shapes; None lets torch decide."""


Compile = NoCompile | CompileModel | CompileBlocks
