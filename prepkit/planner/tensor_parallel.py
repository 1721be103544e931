"""Single layers are cut over the ranks of one axis; the piece that does it stands in FSDP2's plan as well."""

from __future__ import annotations

from prepkit.config import Config, TPPlanFromModel
from prepkit.facts import Facts
from prepkit.plan import because
from prepkit.planner import pieces
from prepkit.planner.pieces import Piece
from prepkit.resolve.tensor_parallel import degree, is_cut, step_cuts
from prepkit.steps import Axis, BuildMesh, ParallelizeModules


def plan_tensor_parallel(cfg: Config, facts: Facts) -> Piece:
    """Steps of the ``TensorParallel`` engine (behaviour TP-1 … TP-5, X-1)."""
    cut = parallelize(cfg, facts)
    return (
        pieces.start_group(cfg, facts)
        + mesh(cfg, facts)
        + (pieces.release_optimizer(facts) if cut else ())  # the old parameters would keep every layer whole
        + pieces.upcast(cfg, facts)  # keeps each parameter the object that it is, so before it is replaced
        + cut
        + pieces.move(cfg, facts)  # after the cut, so that no device ever has to hold the whole model
        + pieces.autocast(cfg, facts)
        + pieces.checkpoint(cfg, facts)  # around the layers' hooks, so that recomputing communicates again
        + pieces.compile_blocks(cfg, facts)
        + pieces.compile_model(cfg)
        + (pieces.rebind_optimizer(facts) if cut else pieces.move_state(cfg, facts))
        + pieces.create_optimizer(cfg, facts)
        + pieces.grad_scaler(cfg, facts)
        + pieces.shard_loaders(cfg, facts)
    )


def mesh(cfg: Config, facts: Facts) -> Piece:
    """The device mesh, of one axis."""
    axes = (Axis(name="tensor", size=degree(cfg, facts.env)),)
    reason = "every layer of the plan is cut over all ranks"
    return because(BuildMesh(device=pieces.device(cfg, facts), axes=axes), reason, "TP-1", "PC-8")


def parallelize(cfg: Config, facts: Facts) -> Piece:
    """The layers that are cut; none where the model arrives parallel (TP-5), or the mesh has no tensor axis."""
    cuts = step_cuts(cfg, facts.model) if is_cut(cfg, facts.model, facts.env) else ()
    if not cuts:
        return ()
    whose = "the model's own plan" if isinstance(cfg.tp_plan, TPPlanFromModel) else "the rows of config.tp_plan"
    step = ParallelizeModules(styles=cuts, axis="tensor")
    return because(step, f"{whose}, over {degree(cfg, facts.env)} ranks", "TP-1", "X-1", "G-33")
