"""Plan, look, apply, verify: PyTorch models prepared for training without surprises.

>>> import prepkit as pk
>>> cfg = pk.Config(engine=pk.FSDP2(), precision=pk.BF16())

``pk.build_plan(cfg, model)`` gives a ``Plan`` or every reason against one; ``pk.apply(plan)`` does what it says.
Names arrive when they are first asked for, and torch with ``apply``.
"""

import importlib

from prepkit.later import later
from prepkit.version import VERSION

__version__ = VERSION

NAMES = {
    "prepkit.config": (
        *("Config", "Intent", "Mesh"),
        *("DDP", "DeepSpeed", "FSDP1", "FSDP2", "Single", "TensorParallel", "XLA"),
        *("BF16", "FP16", "FP8"),
        *("BroadcastWeights", "InitWeights", "LoadWeights"),
        *("CheckpointBlocks", "ClipNorm", "ClipValue", "CompileBlocks", "CompileModel", "OffloadToCPU"),
    ),
    "prepkit.facts": ("Env", "Facts"),
    "prepkit.findings": ("Finding", "PlanRejected", "RunRefused", "Severity"),
    "prepkit.plan": ("Plan",),
    "prepkit.plan.attestation": ("Attestation",),
    "prepkit.auditing.outcome": ("Audit",),
    "prepkit.training.ema": ("Ema",),
    "prepkit.training.prepared": ("Prepared",),
    "prepkit.api": (
        *("ExampleInputs", "activations", "apply", "audit", "build_plan", "check", "diff", "fingerprints", "fits"),
        *("foreign_uses", "load", "prove", "rehearse", "save", "show", "watch"),
    ),
    "prepkit.codec.diff": ("patch",),
    "prepkit.formats.exporters": ("export_config",),
    "prepkit.formats.importers": ("import_config",),
    "prepkit.formats.importers.native": ("read_config",),
    "prepkit.data": (),
    "prepkit.ddp": (),
    "prepkit.errors": (),
    "prepkit.fp8": (),
    "prepkit.optim": (),
    "prepkit.processes": (),
    "prepkit.rules": (),
    "prepkit.tp": (),
    "prepkit.track": (),
    "prepkit.wrap": (),
}
"""Modules to their public names; the last ones are namespaces of their own."""

GONE = {
    "AsStored": "precision=None",
    "CompileOption": "options={name: value}",
    "Example": "pk.ExampleInputs",
    "Imported": "prepkit.formats.importers.source.Imported",
    "KeepOnDevice": "offload=None",
    "KeepWeights": "weights=None",
    "NoCheckpointing": "checkpointing=None",
    "NoClip": "clip=None",
    "NoCompile": "compile=None",
    "NoHook": "hook=None",
    "SendWeights": "pk.BroadcastWeights",
}
"""Names that are no longer here, to what to write now; what has moved into a namespace is looked up there."""


def _hint(name: str) -> str:
    if name in GONE:
        return f"; write {GONE[name]}"
    spaces = () if name.startswith("_") else (home for home, of in NAMES.items() if not of)
    found = next((home for home in spaces if name in dir(importlib.import_module(home))), "")
    return f"; write {found.replace('prepkit', 'pk', 1)}.{name}" if found else ""


__getattr__, __dir__ = later(__name__, NAMES, _hint)
