"""Units that ``fully_shard`` has made of a model, as facts.

torch keeps what they were asked for in private attributes (``_fsdp_state.py``, ``_fsdp_param_group.py``); one that a
version of torch does not have says nothing. Reads attributes only, and imports nothing of ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from prepkit.facts import UnitFact
from prepkit.objects.names import Site, known_bases


def unit_facts(places: Iterable[Site]) -> tuple[UnitFact, ...]:
    """The units of a model with these places, children before parents; none where it is not sharded."""
    found: list[UnitFact] = []
    around: list[UnitFact] = []
    known: dict[type, bool] = {}  # a class is asked once, however many modules have it
    for site in places:
        unit = next((module for module in site.stack if _is_unit(module, known)), None) if site.first else None
        if unit is None:
            continue
        while around and around[-1].path and not site.path.startswith(around[-1].path + "."):
            found.append(around.pop())
        around.append(unit_fact(site.path, unit))
    return (*found, *reversed(around))


def is_unit(module: object) -> bool:
    """True if ``fully_shard`` was called on the module."""
    return "FSDPModule" in known_bases(type(module))


def _is_unit(module: object, known: dict[type, bool]) -> bool:
    cls = type(module)
    if cls not in known:
        known[cls] = is_unit(module)
    return known[cls]


def unit_fact(path: str, module: Any) -> UnitFact:
    """Return what ``fully_shard`` was asked for, of a module that it was called on."""
    state = module._get_fsdp_state()
    policy = state._mp_policy
    groups = getattr(state, "_fsdp_param_groups", None) or (getattr(state, "_fsdp_param_group", None),)
    group = next(filter(None, groups), None)
    return UnitFact(
        path=path,
        ranks=getattr(group.mesh_info, "shard_mesh_size", 1) if group else 0,
        copies=getattr(group.mesh_info, "replicate_mesh_size", 1) if group else 1,
        reshard_after_forward=_reshards(state, group, path),
        param_dtype=_name(policy.param_dtype),
        reduce_dtype=_name(policy.reduce_dtype),
        output_dtype=_name(policy.output_dtype),
        offload=type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy",
        cast_forward_inputs=policy.cast_forward_inputs,
        reduce_unused=bool(getattr(group, "reduce_scatter_unused_params", False)),
    )


def _reshards(state: Any, group: Any, path: str) -> bool | int:
    """True if a unit frees what it gathered, or the ranks that it is gathered over less widely in between.

    A root that was not told stays gathered: torch decides so in the first forward (``FSDPState._lazy_init``).
    """
    after = getattr(group, "post_forward_mesh_info", None)
    if after is None or (not path and getattr(state, "_auto_reshard_after_forward", False)):
        return False
    return True if after is group.mesh_info else int(after.shard_mesh_size)


def _name(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def rewritten(group: Any) -> Iterator[tuple[Any, Any]]:
    """Each sharded parameter of a group, and whether this rank's part of it is lost: it was written while gathered.

    What is gathered is freed, and gathered anew from the shard, as what ``.data =`` puts in a shard's place is as well.
    """
    from prepkit.objects.local_part import differs, local  # late, as torch.distributed is

    for one in group.fsdp_params:
        shard = one._sharded_local_tensor
        if hasattr(shard, "fsdp_pre_all_gather"):
            continue  # what is gathered is another thing
        if one.sharded_state.name == "SHARDED":
            moved = shard.untyped_storage().data_ptr() != one._sharded_param_data.untyped_storage().data_ptr()
            yield one.sharded_param, shard.new_tensor(moved, dtype=torch.bool)
        elif one.sharded_state.name == "UNSHARDED":
            mesh = one.mesh_info
            parts = (
                local(one._unsharded_param).detach().chunk(getattr(mesh, "shard_mesh_size", 1), one.fsdp_placement.dim)
            )
            rank = getattr(mesh, "shard_mesh_rank", 0)
            if rank < len(parts) and parts[rank].shape == shard.shape:
                yield one.sharded_param, differs(parts[rank], shard)
