"""Optimizers that do not train under an engine as they do alone: what was seen, pair by pair.

``python -m tests.tools.optimizers`` runs every optimizer of torch, of transformers, of bitsandbytes and of torchao
under every engine on two processes, in float32 and bfloat16, and says where it differs from this. What is not here
trains there as it does alone; what was never run is not here either. Seen with torch 2.13, transformers 5.23,
bitsandbytes 0.50, torchao 0.18 and DeepSpeed 0.19.8.
"""

from __future__ import annotations

from prepkit.config import FSDP1, FSDP2, Config, DeepSpeed, OffloadToCPU, TensorParallel
from prepkit.config.engines import Mesh
from prepkit.resolve.deepspeed.data import stage

RAISES = "raises"
OTHERWISE = "trains otherwise"

CUT = ("FSDP1", "FSDP1, flat")
"""A rank holds a piece of each parameter, without its shape."""
DTENSORS = ("FSDP2", "FSDP2, offloaded", "TensorParallel")
"""A rank's part is a DTensor, whose operations torch has rules for, or not."""
ZERO = ("ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 2, offloaded")
"""A rank steps its part of all parameters end to end."""
MEASURED = ("DDP", *CUT, *DTENSORS, "ZeRO 0", *ZERO)
"""Every engine of more than one process."""


def _in(places: tuple[str, ...], what: str) -> dict[str, str]:
    return dict.fromkeys(places, what)


_ADAFACTOR = _in(CUT, OTHERWISE) | _in(DTENSORS, RAISES) | _in(ZERO, OTHERWISE)

FAILS: dict[str, dict[str, str]] = {
    "torch.Adafactor": _ADAFACTOR,
    "torch.Muon": _in(CUT, RAISES) | _in(ZERO, RAISES),
    "torch.Rprop": _in(DTENSORS, RAISES),
    "torch.SparseAdam": _in((*CUT, "FSDP2", "FSDP2, offloaded", "ZeRO 0", *ZERO), RAISES),
    "transformers.Adafactor": _ADAFACTOR,
}
"""Library and class to the engines under which it fails, and how. A finding refuses each."""


def places(cfg: Config) -> tuple[str, ...]:
    """Return what the table calls the config's engine; two where layers are cut under FSDP2."""
    engine = cfg.engine
    match engine:
        case FSDP1():
            return ("FSDP1" if engine.use_orig_params else "FSDP1, flat",)
        case FSDP2():
            cut = ("TensorParallel",) if (cfg.mesh or Mesh()).tensor > 1 else ()
            return ("FSDP2, offloaded" if isinstance(engine.offload, OffloadToCPU) else "FSDP2", *cut)
        case TensorParallel():
            return ("TensorParallel",)
        case DeepSpeed():
            return (f"ZeRO {stage(engine)}",)
        case _:
            return (type(engine).__name__,)
