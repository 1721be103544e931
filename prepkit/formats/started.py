"""Who starts how many processes, on how many nodes, with how many GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from prepkit.formats.importers.positions import positions
from prepkit.formats.importers.source import READERS, read
from prepkit.formats.launches import LaunchLine


@frozen(kw_only=True)
class Started:
    """What a launcher starts, as far as its line, its config and its environment say."""

    nodes: int | None = None
    """Machines that it waits for."""
    per_node: int | None = None
    processes: int | None = None
    """All of them together."""
    visible: int | None = None
    """GPUs of a node that the processes see."""
    visible_by: str = ""
    """What shows them no others."""
    reaches: bool = False
    """Whether it starts what is to run on other nodes by itself."""


@frozen(kw_only=True)
class SlurmShare:
    """What Slurm gives to what starts a launcher."""

    nodes: int | None = None
    launchers: int | None = None
    """All of them together."""
    per_node: int | None = None
    gpus: int | None = None
    """Of a node."""
    all_gpus: int | None = None
    tasks_by: tuple[str, str, str] = ("", "", "")
    """Who says how many launchers there are, by which option, with which value."""
    gpus_by: tuple[str, str, str] = ("", "", "")
    """The same of the GPUs."""


def started(launch: LaunchLine) -> Started:
    """Return what a line starts."""
    made = _STARTS[launch.launcher](launch)
    visible, visible_by = _visible(launch)
    nodes, each, whole = made
    if each is None and visible is not None and _every_gpu(launch):
        each = visible
    if whole is None and nodes and each:
        whole = nodes * each
    return Started(
        nodes=nodes,
        per_node=each,
        processes=whole,
        visible=visible,
        visible_by=visible_by,
        reaches=_reaches(launch),
    )


def processes_said(path: str, launch: LaunchLine | None = None) -> str:
    """Where it is said how many processes start: on a line of a script, or in the config of accelerate that it names.

    Without a line in that config, whose ``path`` it is then, or of the script that a config is made of.
    """
    if launch is not None:
        named = launch.config_file if launch.launcher == "accelerate" and not COUNTS & launch.options.keys() else None
        if named is None or named.place is None:
            return f"{path}:{launch.line}:{launch.column}"
        path = named.place
    suffix = Path(path).suffix.lower()
    where = positions(read(path).text, suffix).get("num_processes") if suffix in READERS else None
    return path if where is None else f"{path}:{where[0]}:{where[1]}"


COUNTS = frozenset({"num_processes", "num_machines"})
_Sizes = tuple[int | None, int | None, int | None]
"""Machines, processes on one of them, and all processes."""


def whole_number(text: Any) -> int | None:
    """Return the number that a text is; None: it is none, or one of more than nine digits."""
    return int(str(text)) if re.fullmatch(r"\d{1,9}", str(text)) else None


def given_by(launch: LaunchLine, name: str) -> int | None:
    """What the line says, or its file: the line wins."""
    if name in launch.options:
        return whole_number(launch.options[name].value)
    return whole_number(launch.file.get(name, ""))


SWITCHED = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "multi_gpu": "MULTI_GPU"}
"""Option of accelerate's launcher to the distributed type that it chooses."""
_SEVERAL = frozenset({"num_machines", "machine_rank", "main_process_ip", "config_file"})
"""Options of accelerate that tell of more machines than one, or may."""


def _accelerate(launch: LaunchLine) -> _Sizes:
    if launch.file.get("distributed_type") == "NO" and not SWITCHED.keys() & launch.options.keys():
        return 1, 1, 1  # whatever numbers are given
    nodes, whole = given_by(launch, "num_machines"), given_by(launch, "num_processes")
    if nodes is None and (launch.file or not (launch.by or _SEVERAL & launch.options.keys())):
        nodes = 1 if "num_machines" not in {*launch.options, *launch.file} else None
    return nodes, whole // nodes if nodes and whole and whole % nodes == 0 else None, whole


def _torchrun(launch: LaunchLine) -> _Sizes:
    one = "nnodes" not in launch.options or "standalone" in launch.options
    return 1 if one else given_by(launch, "nnodes"), given_by(launch, "nproc_per_node"), None


def _deepspeed(launch: LaunchLine) -> _Sizes:
    hosts = launch.options.get("include") or launch.options.get("i")
    if hosts is not None:
        slots = [host.partition(":")[2] for host in str(hosts.value).split("@")]
        counts = [len(re.findall(r"\d+", numbers)) for numbers in slots]
        plain = all(re.fullmatch(r"\d+(,\d+)*", numbers) for numbers in slots)
        return len(slots), counts[0] if len(set(counts)) == 1 and plain else None, sum(counts) if plain else None
    one = not {"num_nodes", "hostfile", "H", "exclude", "e"} & launch.options.keys()
    gpus = "num_gpus" if "num_gpus" in launch.options else "num_accelerators"
    return given_by(launch, "num_nodes") or (1 if one else None), given_by(launch, gpus), None


def _axolotl(launch: LaunchLine) -> _Sizes:
    if {"nproc_per_node", "nnodes"} & launch.options.keys():
        return _torchrun(launch)
    return _accelerate(launch)


def _llama_factory(launch: LaunchLine) -> _Sizes:
    nodes = whole_number(launch.environment.get("NNODES", "1"))
    return nodes, whole_number(launch.environment.get("NPROC_PER_NODE", "")), None


def _tasks_of_slurm(launch: LaunchLine) -> _Sizes:
    """Each task of srun's is a rank. Where nobody says how many there are, ``sbatch`` may have been told."""
    given = share(launch.slurm, launch)
    return (given.nodes, given.per_node, given.launchers) if given.tasks_by[1] else (given.nodes, None, None)


def _copies(launch: LaunchLine) -> _Sizes:
    """Each process of mpirun's is a rank; on which hosts they are, its file says."""
    whole = whole_number(next((launch.step[name] for name in ("np", "n", "c") if name in launch.step), ""))
    elsewhere = {"H", "host", "hostfile", "machinefile", "f", "map-by", "N", "npernode"} & launch.step.keys()
    asked = share(launch.slurm, launch).nodes
    nodes = 1 if not elsewhere and asked in (None, 1) else None
    return nodes, whole if nodes else None, whole


_STARTS = {
    "srun": _tasks_of_slurm,
    "mpirun": _copies,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    "axolotl": _axolotl,
    "llamafactory-cli": _llama_factory,
}
"""Launcher to what it starts."""


def _every_gpu(launch: LaunchLine) -> bool:
    """Whether it starts a process for each GPU that it sees."""
    if launch.launcher == "torchrun":
        asked = launch.options.get("nproc_per_node")
        return asked is not None and asked.value in ("gpu", "auto")
    narrowed = {"num_gpus", "num_accelerators", "include", "i", "exclude", "e", "hostfile", "H", "num_nodes"}
    return launch.launcher == "deepspeed" and not narrowed & launch.options.keys()


def _visible(launch: LaunchLine) -> tuple[int | None, str]:
    """GPUs that the processes of a node see, and what says so; DeepSpeed's launcher reads the variable once."""
    asked: Any = launch.environment.get("CUDA_VISIBLE_DEVICES", "")
    by = f"CUDA_VISIBLE_DEVICES={asked}"
    if launch.launcher == "accelerate":
        option = launch.options.get("gpu_ids")
        ids = option.value if option is not None else launch.file.get("gpu_ids")
        if ids not in (None, "all", ""):
            asked = ids
            by = f"{option.typed} {ids}" if option is not None else f"gpu_ids: {ids}"
    if launch.launcher == "deepspeed" and not _every_gpu(launch):
        return None, ""
    devices = [one.strip() for one in str(asked).split(",")]
    if not all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", one) for one in devices):
        return None, ""
    return len(devices), by


def _reaches(launch: LaunchLine) -> bool:
    if launch.launcher != "accelerate":
        return launch.launcher in ("deepspeed", "srun", "mpirun")
    if "config_file" in launch.options and not launch.file:
        return True  # nobody knows here
    if "mpirun_hostfile" in launch.options or launch.file.get("mpirun_config"):
        return True
    inner = launch.file.get("deepspeed_config")
    said = launch.options.get("deepspeed_multinode_launcher")
    way = (
        said.value if said is not None else inner.get("deepspeed_multinode_launcher") if isinstance(inner, dict) else ""
    )
    by_deepspeed = "use_deepspeed" in launch.options or launch.file.get("distributed_type") == "DEEPSPEED"
    return by_deepspeed and way != "standard"


def on_cpu(launch: LaunchLine) -> bool:
    """Whether no process takes a GPU, or one that CUDA knows nothing of."""
    kind = str(launch.file.get("distributed_type", "FSDP"))
    return "cpu" in launch.options or bool(launch.file.get("use_cpu")) or kind not in _ON_GPUS


_ON_GPUS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")


# --- what Slurm gives ------------------------------------------------------------------------------------------------

_NOT_COUNTED = ("--ntasks-per-gpu", "--ntasks-per-socket", "--ntasks-per-core")
_GPU_OPTIONS = ("--gpus-per-node", "--gres", "--gpus", "--gpus-per-task")


def share(slurm: Mapping[str, str], launch: LaunchLine) -> SlurmShare:
    """Return what Slurm gives to a line: what stands on the line of srun goes before what ``#SBATCH`` lines say."""
    own = launch.step if launch.by == "srun" else {}
    said = [(who, name, options[name]) for who, options in (("srun", own), ("#SBATCH", slurm)) for name in options]
    nodes = next((whole_number(value) for _, name, value in said if name == "--nodes"), None)
    tasks = next((one for one in said if one[1] in ("--ntasks", "--ntasks-per-node")), ("", "", ""))
    for who in ("srun", "#SBATCH"):  # of one and the same, all tasks go before those of a node
        tasks = next((one for one in said if one[:2] == (who, "--ntasks") and tasks[0] == who), tasks)
    all_nodes = nodes
    nodes, per_node, launchers = _tasks(nodes, tasks, counted=not any(name in _NOT_COUNTED for _, name, _ in said))
    gpus_by = next((one for one in said if one[1] in _GPU_OPTIONS and _gpus(one) is not None), ("", "", ""))
    count = _gpus(gpus_by)
    each = whole = None
    if gpus_by[1] == "--gpus":
        each, whole = count if nodes == 1 else None, count
    elif gpus_by[1] == "--gpus-per-task":
        each = count * per_node if count and per_node else None
    else:
        each = count
    return SlurmShare(
        nodes=nodes,
        launchers=launchers,
        per_node=per_node,
        gpus=each,
        all_gpus=whole if whole is not None else each * all_nodes if each and all_nodes else None,
        tasks_by=tasks,
        gpus_by=gpus_by,
    )


def _tasks(nodes: int | None, said: tuple[str, str, str], *, counted: bool) -> _Sizes:
    """Nodes, tasks on one of them, and all tasks."""
    number = whole_number(said[2])
    if not counted or (said[1] and number is None):
        return nodes, None, None
    if said[1] == "--ntasks" and number is not None:
        if number == 1 or (nodes and number <= nodes):
            return min(nodes or number, number), 1, number
        return nodes, -(-number // nodes) if nodes else None, number
    each = number or 1
    return nodes, each, each * nodes if nodes else None


def _gpus(said: tuple[str, str, str]) -> int | None:
    """GPUs that an option of Slurm's asks for: ``8``, ``a100:8``, ``gpu:a100:8``; the sum over what stands in it."""
    parts = re.sub(r"\([^)]*\)", "", said[2]).split(",")
    if said[1] == "--gres":
        parts = [re.sub(r"^(gres/)?gpu:?", "", part) or "1" for part in parts if re.match(r"(gres/)?gpu(:|$)", part)]
        parts = [part if re.search(r"\d$", part) and ":" in f":{part}" else f"{part}:1" for part in parts]
    found = [re.fullmatch(r"(?:[A-Za-z][\w.-]*:)?(\d{1,6})", part) for part in parts]
    return sum(int(one[1]) for one in found if one) if found and all(found) else None
