"""Plan, look, apply, verify: PyTorch models prepared for training without surprises.

>>> import prepkit as pk
>>> cfg = pk.Config(engine=pk.FSDP2(), precision=pk.BF16())

``pk.build_plan(cfg, model)`` gives a ``Plan`` or every reason against one; ``pk.apply(plan)`` does what it says.
Importing prepkit loads the vocabulary alone: calls arrive when they are first asked for, and torch with ``apply``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from prepkit.config import BF16 as BF16
from prepkit.config import DDP as DDP
from prepkit.config import FP8 as FP8
from prepkit.config import FP16 as FP16
from prepkit.config import FSDP1 as FSDP1
from prepkit.config import FSDP2 as FSDP2
from prepkit.config import MSAMP as MSAMP
from prepkit.config import XLA as XLA
from prepkit.config import AsStored as AsStored
from prepkit.config import CheckpointBlocks as CheckpointBlocks
from prepkit.config import ClipNorm as ClipNorm
from prepkit.config import ClipValue as ClipValue
from prepkit.config import CompileBlocks as CompileBlocks
from prepkit.config import CompileModel as CompileModel
from prepkit.config import CompileOption as CompileOption
from prepkit.config import CompressHook as CompressHook
from prepkit.config import Config as Config
from prepkit.config import DeepSpeed as DeepSpeed
from prepkit.config import DelayedScaling as DelayedScaling
from prepkit.config import EachLoader as EachLoader
from prepkit.config import InitWeights as InitWeights
from prepkit.config import Intent as Intent
from prepkit.config import KeepLoaders as KeepLoaders
from prepkit.config import KeepOnDevice as KeepOnDevice
from prepkit.config import KeepWeights as KeepWeights
from prepkit.config import LoadWeights as LoadWeights
from prepkit.config import Mesh as Mesh
from prepkit.config import MXFP8BlockScaling as MXFP8BlockScaling
from prepkit.config import NoCheckpointing as NoCheckpointing
from prepkit.config import NoClip as NoClip
from prepkit.config import NoCompile as NoCompile
from prepkit.config import NoHook as NoHook
from prepkit.config import OffloadToCPU as OffloadToCPU
from prepkit.config import PowerSGDHook as PowerSGDHook
from prepkit.config import Schedule as Schedule
from prepkit.config import SendWeights as SendWeights
from prepkit.config import ShardLoaders as ShardLoaders
from prepkit.config import Single as Single
from prepkit.config import TensorParallel as TensorParallel
from prepkit.config import TorchAO as TorchAO
from prepkit.config import TPLayer as TPLayer
from prepkit.config import TPPlan as TPPlan
from prepkit.config import TPPlanFromModel as TPPlanFromModel
from prepkit.config import TransformerEngine as TransformerEngine
from prepkit.config import WrapBlocks as WrapBlocks
from prepkit.config import WrapClasses as WrapClasses
from prepkit.config import WrapPaths as WrapPaths
from prepkit.config import WrapRoot as WrapRoot
from prepkit.config import WrapSize as WrapSize
from prepkit.config.optimizer import *  # noqa: F403  # the file's table says what there is
from prepkit.facts import Env as Env
from prepkit.facts import Facts as Facts
from prepkit.findings import Finding as Finding
from prepkit.findings import PlanRejected as PlanRejected
from prepkit.findings import Severity as Severity

if TYPE_CHECKING:
    from prepkit.api import Example as Example
    from prepkit.api import activations as activations
    from prepkit.api import apply as apply
    from prepkit.api import audit as audit
    from prepkit.api import build_plan as build_plan
    from prepkit.api import check as check
    from prepkit.api import diff as diff
    from prepkit.api import fingerprints as fingerprints
    from prepkit.api import fits as fits
    from prepkit.api import foreign_uses as foreign_uses
    from prepkit.api import load as load
    from prepkit.api import rehearse as rehearse
    from prepkit.api import save as save
    from prepkit.api import show as show
    from prepkit.api import watch as watch
    from prepkit.auditing import AUDIT_RULES as AUDIT_RULES
    from prepkit.auditing import Audit as Audit
    from prepkit.codec.diff import patch as patch
    from prepkit.formats.exporters import export_config as export_config
    from prepkit.formats.importers import import_config as import_config
    from prepkit.formats.importers.imported import Imported as Imported
    from prepkit.formats.importers.native import read_config as read_config
    from prepkit.live.apply import ApplyHalted as ApplyHalted
    from prepkit.live.apply import NotAsPlanned as NotAsPlanned
    from prepkit.live.ranks.agree import Disagreement as Disagreement
    from prepkit.live.ranks.main_first import main_process_first as main_process_first
    from prepkit.live.ranks.peers import RankFailed as RankFailed
    from prepkit.live.ranks.together import together as together
    from prepkit.live.training.preemption import Preempted as Preempted
    from prepkit.live.training.preemption import save_on_sigterm as save_on_sigterm
    from prepkit.live.training.prepared import Prepared as Prepared
    from prepkit.live.training.trackers import JsonLines as JsonLines
    from prepkit.live.training.trackers import MLflow as MLflow
    from prepkit.live.training.trackers import TensorBoard as TensorBoard
    from prepkit.live.training.trackers import WandB as WandB
    from prepkit.plan import Plan as Plan
    from prepkit.plan.attestation import Attestation as Attestation
    from prepkit.resolve.resolved import Resolved as Resolved
    from prepkit.rules import RULES as RULES
    from prepkit.rules.rule import Hit as Hit
    from prepkit.rules.rule import Rule as Rule

_LATER = {
    "activations": "prepkit.api",
    "apply": "prepkit.api",
    "audit": "prepkit.api",
    "Audit": "prepkit.auditing",
    "AUDIT_RULES": "prepkit.auditing",
    "ApplyHalted": "prepkit.live.apply",
    "Attestation": "prepkit.plan.attestation",
    "build_plan": "prepkit.api",
    "check": "prepkit.api",
    "diff": "prepkit.api",
    "Disagreement": "prepkit.live.ranks.agree",
    "Example": "prepkit.api",
    "Hit": "prepkit.rules.rule",
    "Imported": "prepkit.formats.importers.imported",
    "export_config": "prepkit.formats.exporters",
    "import_config": "prepkit.formats.importers",
    "fingerprints": "prepkit.api",
    "fits": "prepkit.api",
    "foreign_uses": "prepkit.api",
    "JsonLines": "prepkit.live.training.trackers",
    "load": "prepkit.api",
    "main_process_first": "prepkit.live.ranks.main_first",
    "MLflow": "prepkit.live.training.trackers",
    "NotAsPlanned": "prepkit.live.apply",
    "patch": "prepkit.codec.diff",
    "Plan": "prepkit.plan",
    "Preempted": "prepkit.live.training.preemption",
    "Prepared": "prepkit.live.training.prepared",
    "RankFailed": "prepkit.live.ranks.peers",
    "read_config": "prepkit.formats.importers.native",
    "rehearse": "prepkit.api",
    "Resolved": "prepkit.resolve.resolved",
    "save": "prepkit.api",
    "save_on_sigterm": "prepkit.live.training.preemption",
    "show": "prepkit.api",
    "Rule": "prepkit.rules.rule",
    "RULES": "prepkit.rules",
    "TensorBoard": "prepkit.live.training.trackers",
    "together": "prepkit.live.ranks.together",
    "watch": "prepkit.api",
    "WandB": "prepkit.live.training.trackers",
}
"""Name to the module that has it."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from prepkit.version import VERSION

        return VERSION
    if name not in _LATER:
        raise AttributeError(f"module 'prepkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted((*(name for name in globals() if not name.startswith("_")), *_LATER, "__version__"))
