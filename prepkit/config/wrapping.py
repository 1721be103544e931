"""Which modules become units, or are picked for anything else that is done to modules."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class WrapBlocks:
    """The classes that the model declares in ``_no_split_modules``; where it declares none, its repeated blocks.

    A repeated block is an item of a ``ModuleList`` or ``Sequential`` of at least two items, all of one class.
    A module that holds some names of a tied parameter and not the others is left to the root: the tie stays whole.
    """


@frozen
class WrapClasses:
    """Every module whose class has one of these names; exact text, subclasses do not match (behaviour G-60).

    ``WrapClasses(("LlamaDecoderLayer",), paths=("lm_head",))`` means single modules besides.
    """

    names: tuple[str, ...]
    """Class names, such as ``("LlamaDecoderLayer",)``."""
    paths: tuple[str, ...] = ()
    """Patterns of further modules, as in ``WrapPaths``."""


@frozen
class WrapPaths:
    """Every module whose dotted path matches one of these patterns."""

    patterns: tuple[str, ...]
    """Shell patterns over dotted paths, such as ``("model.layers.*",)``; ``*`` stays inside one path segment."""


@frozen
class WrapSize:
    """Every module, leaves first, that still owns at least this many parameters once its own units are taken out."""

    min_params: int
    """Number of elements, at least 1."""


@frozen(kw_only=True)
class WrapRoot:
    """No module of its own: the root is the only unit, and the whole model is gathered at once."""


Wrap = WrapBlocks | WrapClasses | WrapPaths | WrapSize | WrapRoot
