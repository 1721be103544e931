"""Data loaders: each rank its own part, and what the training loop iterates over."""

from __future__ import annotations

from prepkit.config import KeepLoaders, ShardLoaders
from prepkit.facts import LoaderFacts
from prepkit.findings.text import count
from prepkit.plan import because
from prepkit.planner.pieces import Piece, is_spread
from prepkit.resolve import loaders
from prepkit.resolve.resolved import Resolved
from prepkit.steps import LocalDevice, ShardLoader, WrapLoader


def prepare_loaders(resolved: Resolved) -> Piece:
    """Each loader divided, where it is, and then wrapped."""
    world = resolved.facts.env.world_size
    steps: Piece = ()
    for index, loader in enumerate(resolved.facts.loaders):
        how = loaders.choice(resolved.cfg, index)
        if isinstance(how, ShardLoaders) and loaders.is_divided(how, loader, world):
            steps += _shard(resolved, index, loader, how)
        steps += _wrap(resolved, index, how)
    return steps


def _readers(resolved: Resolved) -> tuple[tuple[str, ...] | None, int]:
    """Axes of the mesh over which data is divided, and how many neighbours read the same where there is no mesh."""
    axes = resolved.data_axes
    if resolved.engine_traits.own_layout:
        return None, resolved.facts.env.world_size // resolved.data_parallel_size
    return axes, 1


def _shard(resolved: Resolved, index: int, loader: LoaderFacts, how: ShardLoaders) -> Piece:
    axes, same = _readers(resolved)
    parts = resolved.data_parallel_size
    step = ShardLoader(
        index=index,
        shuffle=loader.sampler == "random",
        seed=how.seed,
        drop_last=how.drop_last,
        axes=axes,
        same_data=same,
        split="stream" if how.dispatch and loader.iterable else loaders.split(loader, parts),
        batch_size=loaders.batch_size(how, loader, parts) if how.split_batches else None,
        dispatch=how.dispatch and resolved.facts.env.world_size > 1,
        spread=how.purpose == "evaluation",
    )
    reason, *rows = _why_divided(resolved, parts, axes is not None or same > 1)
    repeated = loaders.repeats(how, loader, parts)
    if repeated and loader.length is not None:
        counts = "; gather_for_metrics leaves them out" if how.purpose == "evaluation" else ""
        reason += f"; {repeated} of {count(loader.length, 'sample')} are read twice{counts}"
    return because(step, reason, *rows)


def _why_divided(resolved: Resolved, parts: int, tensor: bool) -> tuple[str, ...]:
    if resolved.facts.env.world_size == 1:
        return "the order follows from seed and epoch, as on any number of ranks", "DL-10", "DL-28"
    if not tensor:
        return "every rank reads its own samples", "DL-15"
    if parts > 1:
        return "tensor ranks read the same samples, all others their own", "DL-15", "DL-6", "DL-7", "G-47"
    return "all ranks read the same", "DL-15", "DL-6", "DL-7", "G-47"


def _wrap(resolved: Resolved, index: int, how: ShardLoaders | KeepLoaders) -> Piece:
    axes, same = _readers(resolved)
    moves = how.to_device and not is_spread(resolved)
    step = WrapLoader(
        index=index,
        device=LocalDevice(type=resolved.compute_device) if moves else None,
        ends_window=how.ends_window and how.purpose == "training" and resolved.trains,
        evaluation=how.purpose == "evaluation",
        axes=axes,
        same_data=same,
    )
    where = f"batches arrive on {resolved.compute_device}" if moves else "batches stay where the loader leaves them"
    return because(step, f"{where}; epochs advance by themselves", "DL-23", "DL-27", "DL-28")
