"""Methods that are called in the place of the forward."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class RegisterEntryPoints:
    """Makes methods of the model run as its forward does. Fails if the model has no such method.

    ``units``: torch's ``register_fsdp_forward_method`` gathers the root around each call. ``wrapper``: the outermost
    module gets the method, and runs it in the place of the model's forward inside its own. ``forward``: the method gets
    the patches that the forward has. No call is compiled as a whole; modules that it calls run as they are compiled.
    """

    names: tuple[str, ...]
    through: Literal["units", "wrapper", "forward"]
    in_step: bool = False
    """Ranks gather parameters together in each forward, and ``generate`` is told so: it goes on until all are done."""
