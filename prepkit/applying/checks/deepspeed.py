"""After apply: what the steps of the DeepSpeed engine have left behind."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.objects.deepspeed import initialised as compared
from prepkit.objects.forward import MARK, CastedForward, FP8Forward
from prepkit.objects.state import LiveModel
from prepkit.plan.attestation import Check, each, same
from prepkit.steps import CastForward, ConvertOptimizer, InitializeDeepSpeed, MarkLeafModules, PartitionParameters


def cast(step: CastForward, live: LiveModel) -> Iterator[Check]:
    """The root's forward casts, from and to these dtypes."""
    own = live.modules[""][-1]
    forward = own.forward.forward if isinstance(own.forward, FP8Forward) else own.forward  # which is outside it
    if isinstance(forward, CastedForward) and hasattr(own, MARK):
        found = tuple(str(dtype).removeprefix("torch.") for dtype in (forward.dtype, forward.output_dtype))
        yield same("CastForward", "cast forward", (step.dtype, step.output_dtype), found)
    else:
        yield each("CastForward", "cast forward", [f"{type(own).__name__} has its own forward"])


def leaves(step: MarkLeafModules, live: LiveModel) -> Iterator[Check]:
    """DeepSpeed's own mark stands on each."""
    bad = [path for path in step.paths if not any(getattr(m, "_z3_leaf", False) for m in live.at(path))]
    yield each("MarkLeafModules", "gathered whole", bad)


def converted(step: ConvertOptimizer, live: LiveModel) -> Iterator[Check]:
    """The optimizer inside DeepSpeed's is the CPU form."""
    found = getattr(live.target.model, "basic_optimizer", live.target.optimizer)
    yield same("ConvertOptimizer", "class", step.algorithm, type(found).__name__)


def partitioned(step: PartitionParameters, live: LiveModel) -> Iterator[Check]:
    """What got a part got values too; that each is in parts, and how large they are, is the layout's to say."""
    del step
    yield each("PartitionParameters", "everything that was on meta has values", sorted(live.target.unfilled))


def initialised(step: InitializeDeepSpeed, live: LiveModel) -> Iterator[Check]:
    """The engine's own numbers are the step's, and its optimizer steps what is trained."""
    for what, planned, found in compared(step, live):
        yield same("InitializeDeepSpeed", what, planned, found)
