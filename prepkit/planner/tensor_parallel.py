"""Single layers are cut over the ranks of one axis; the piece that does it stands in FSDP2's plan as well."""

from __future__ import annotations

from prepkit.config import TPPlanFromModel
from prepkit.plan import because
from prepkit.planner import pieces, weights
from prepkit.planner.loaders import prepare_loaders
from prepkit.planner.pieces import Piece, entry_points
from prepkit.resolve.resolved import Resolved
from prepkit.steps import Axis, BuildMesh, ParallelizeModules


def plan_tensor_parallel(resolved: Resolved) -> Piece:
    """Steps of the ``TensorParallel`` engine (behaviour TP-1 … TP-5, X-1)."""
    parallel = parallelize(resolved)
    return (
        pieces.start_group(resolved)
        + weights.check_files(resolved)  # while nothing has been changed
        + weights.stash(resolved)  # before the optimizer lets go of the parameters, which stay themselves
        + mesh(resolved)
        + (pieces.release_optimizer(resolved) if parallel else ())  # the old parameters would keep every layer whole
        + pieces.upcast(resolved)  # keeps each parameter the object that it is, so before it is replaced
        + parallel
        + weights.move(resolved)  # after the cut, so that no device ever has to hold the whole model
        + pieces.autocast(resolved)
        + pieces.checkpoint(resolved)  # around the layers' hooks, so that recomputing communicates again
        + pieces.compile_blocks(resolved)
        + entry_points(resolved)  # patched as the forward is by now
        + pieces.compile_model(resolved)
        + weights.fill(resolved)  # each rank's parts alone; before the optimizer's state takes their device
        + (pieces.rebind_optimizer(resolved) if parallel else pieces.move_state(resolved))
        + pieces.create_optimizer(resolved)
        + pieces.grad_scaler(resolved)
        + prepare_loaders(resolved)
    )


def mesh(resolved: Resolved) -> Piece:
    """The device mesh, of one axis."""
    axes = (Axis(name="tensor", size=resolved.tp.size),)
    reason = "every layer of the plan is cut over all ranks"
    return because(BuildMesh(device=resolved.compute_device, axes=axes), reason, "TP-1", "PC-8")


def parallelize(resolved: Resolved) -> Piece:
    """The layers that are cut; none where the model arrives parallel (TP-5), or the mesh has no tensor axis."""
    styles = resolved.tp.styles
    if not styles:
        return ()
    whose = (
        "the model's own plan" if isinstance(resolved.cfg.tp_plan, TPPlanFromModel) else "the rows of config.tp_plan"
    )
    step = ParallelizeModules(styles=styles, axis="tensor")
    return because(step, f"{whose}, over {resolved.tp.size} ranks", "TP-1", "X-1", "G-33")
