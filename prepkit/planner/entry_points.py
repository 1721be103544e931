"""The piece that makes other methods run as the forward does."""

from __future__ import annotations

from prepkit.config import FSDP1, FSDP2, DeepSpeed
from prepkit.plan import because
from prepkit.planner.pieces import Piece
from prepkit.resolve.entry_points import through
from prepkit.resolve.resolved import Resolved
from prepkit.steps import RegisterEntryPoints

_REASONS = {
    "units": "each call gathers the root's parameters, as forward does",
    "wrapper": "each call runs inside the wrapper's forward, which averages or gathers",
    "forward": "each call runs in the precision of forward",
}


def entry_points(resolved: Resolved) -> Piece:
    """None where no method is named or well-known, or each works as it stands."""
    names, way = resolved.entry_points, through(resolved.cfg)
    if not names or way is None:
        return ()
    step = RegisterEntryPoints(names=names, through=way, in_step=_gathers_in_step(resolved))
    return because(step, _REASONS[way], "torch register_fsdp_forward_method")


def _gathers_in_step(resolved: Resolved) -> bool:
    """Whether ranks gather parameters together in every forward, so that all have to call it equally often."""
    engine = resolved.cfg.engine
    zero3 = isinstance(engine, DeepSpeed) and resolved.deepspeed.stage == 3
    return isinstance(engine, FSDP1 | FSDP2) or zero3
