"""How many processes accelerate's file starts, and how it lays them out (behaviour PC-1, PC-2)."""

from __future__ import annotations

from prepkit.config import Mesh
from prepkit.formats.importers.foreign import Foreign


def processes(file: Foreign, kind: str) -> tuple[int | None, int]:
    """How many processes are started in all, None where the file does not say, and on how many machines."""
    world, machines = file.whole("num_processes"), file.whole("num_machines")
    file.declared |= {"num_processes", "num_machines"}
    if world is not None and world < 1 and world != -1:  # which is how accelerate's class says that it is not said
        file.error("wrong-value", "num_processes", f"{world} processes prepare nothing", "Write 1 or more.")
    if machines is not None and machines < 1:
        file.error("wrong-value", "num_machines", f"{machines} machines start nothing", "Write 1 or more.")
    machines = max(machines or 1, 1)
    if world is None or world < 1:
        return 1 if kind == "NO" else None, machines
    if kind == "NO" or world % machines == 0:
        return world, machines
    each = world // machines
    what = f"{world} is no multiple of num_machines: {machines}; accelerate starts {each} on each machine"
    file.warn("contradiction", "num_processes", what, f"Write {each * machines} or {(each + 1) * machines}.")
    return each * machines or None, machines


def mesh_of(file: Foreign, kind: str) -> Mesh | None:
    """The mesh of ``parallelism_config``; None where there is none, and under DeepSpeed, which makes its own groups."""
    here = "parallelism_config"
    if not file.section(here):
        return None
    prefix = f"{here}.{here}"
    sizes = {name: _size(file, f"{prefix}_{name}_size") for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    for name, what in (("cp", "context"), ("sp", "sequence")):
        if sizes[name] > 1:
            why = f"prepkit cuts no sequences over ranks ({what} parallelism)"
            fix = f"Write {here}_{name}_size: 1 and give its ranks to dp_shard, or split the batch in the model."
            file.error("not-supported", f"{prefix}_{name}_size", why, fix)
    said = ("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable")
    file.launching(*(f"{prefix}_{name}" for name in (*said, "sp_attn_implementation")))
    for name, axis in (("dp_replicate", "replicate"), ("dp_shard", "shard"), ("tp", "tensor")):
        file.raw(f"{prefix}_{name}_size", f"mesh.{axis}")
    if kind == "DEEPSPEED":
        return None
    return Mesh(replicate=sizes["dp_replicate"], shard=sizes["dp_shard"], tensor=sizes["tp"])


def _size(file: Foreign, name: str) -> int:
    """Ranks along an axis. accelerate works none of them out (PC-2)."""
    size = file.whole(name)
    if size is not None and size < 1:
        file.error("wrong-value", name, f"accelerate takes 1 or more, and this is {size}", "Write the number of ranks.")
    return 1 if size is None else size
