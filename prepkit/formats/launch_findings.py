"""What contradicts in a line that starts a run: options that its launcher refuses, counts that do not fit, machines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import evolve

from prepkit import rules
from prepkit.findings import Finding
from prepkit.formats.launcher_options import LAUNCHERS
from prepkit.formats.launches import Argument, LaunchLine, Script
from prepkit.formats.started import COUNTS, SlurmShare, Started, on_cpu, share, started, whole_number


def script_findings(script: Script) -> tuple[Finding, ...]:
    """Return what contradicts in the lines of a script."""
    return tuple(
        finding
        for launch in script.launches
        for finding in (
            *_refused_options(script.path, launch),
            *_cut(script, launch),
            *(_supposing(finding, launch) for finding in _flaws(script, launch)),
        )
    )


def supposed(launch: LaunchLine) -> str:
    """What a line is read with that only its environment can say otherwise: ``supposing NUM_GPUS=6``; or nothing."""
    pairs = ", ".join(f"{name}={value}" for name, value in launch.assumed.items())
    return f"supposing {pairs}" if pairs else ""


def _supposing(finding: Finding, launch: LaunchLine) -> Finding:
    told = supposed(launch)
    return evolve(finding, what=f"{finding.what}, {told}") if told else finding


def file_findings(path: str, data: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return what contradicts in a config of accelerate that no line is known to start."""
    launch = LaunchLine(launcher="accelerate", line=1, column=1, file=data)
    starts = started(launch)
    if on_cpu(launch) or not starts.per_node or starts.visible is None or starts.per_node <= starts.visible:
        return ()
    each, gpus = starts.per_node, starts.visible
    what = f"{each} processes are started on a node, and {starts.visible_by} shows them {_so_many(gpus)}"
    fix = f"Write num_processes: {gpus * (starts.nodes or 1)}, or name {each} GPUs there."
    return (rules.found("launch.gpus", f"{path}:$.gpu_ids", what, fix),)


def _flaws(script: Script, launch: LaunchLine) -> Iterator[Finding]:
    """What contradicts in the numbers of a line."""
    where = f"{script.path}:{launch.line}:{launch.column}"
    starts, given = started(launch), share(script.slurm, launch)
    nodes, whole = starts.nodes, starts.processes
    on_line = COUNTS & launch.options.keys()
    if launch.launcher == "accelerate" and on_line and nodes and whole and whole % nodes:
        machines, processes = _as_written(launch, "num_machines", nodes), _as_written(launch, "num_processes", whole)
        what = f"{processes} are all processes together, and {machines} does not divide them"
        more = _as_written(launch, "num_processes", whole * nodes)
        yield rules.found("launch.processes", where, what, f"Write {more}, or another multiple of {nodes}.")
    yield from _more_than_gpus(launch, starts, given, where)
    yield from _waits(script, launch, starts, given, where)
    yield from _twice(launch, starts, given, where)
    yield from _machines(script, launch, given)


def _cut(script: Script, launch: LaunchLine) -> Iterator[Finding]:
    if launch.cut is not None:
        line, by = launch.cut
        what = f"the command of {launch.launcher} ends here, by {by}: the line below is a command of its own"
        how = "Put the comment above the command." if by == "a comment" else "End the line with the backslash."
        yield rules.found("launch.cut", f"{script.path}:{line}:1", what, how)


def _more_than_gpus(launch: LaunchLine, starts: Started, given: SlurmShare, where: str) -> Iterator[Finding]:
    each, whole = starts.per_node, starts.processes
    if on_cpu(launch):
        return
    if each and starts.visible is not None and each > starts.visible:
        what = f"{each} processes are started on a node, and {starts.visible_by} shows them {_so_many(starts.visible)}"
        fix = f"Write {_fewer(launch, starts, starts.visible)}, or name {each} GPUs there."
        yield rules.found("launch.gpus", where, what, fix)
    elif each and given.gpus and each > given.gpus:
        what = f"{each} processes are started on a node, and Slurm is asked for {_so_many(given.gpus)} on it"
        fix = f"Write {_fewer(launch, starts, given.gpus)}, or {_more_gpus(given, each)}."
        yield rules.found("launch.gpus", where, what, fix)
    elif (
        whole
        and given.all_gpus
        and whole > given.all_gpus
        and (starts.nodes or 1) <= (given.nodes or starts.nodes or 1)
    ):
        what = f"{whole} processes are started, and Slurm is asked for {_so_many(given.all_gpus)}"
        even = given.all_gpus // starts.nodes if starts.nodes else 0
        fewer = _fewer(launch, starts, even) if even else f"{given.all_gpus} processes"
        yield rules.found("launch.gpus", where, what, f"Write {fewer}, or {_more_gpus(given, whole)}.")


def _so_many(gpus: int) -> str:
    return f"{gpus} {'GPU' if gpus == 1 else 'GPUs'}"


def _as_written(launch: LaunchLine, name: str, number: int) -> str:
    """A number under the name that the line, or its config, has for it."""
    if name in launch.options:
        return f"{launch.options[name].typed} {number}"
    file = launch.config_file
    return f"{name}: {number} in {file.path}" if file is not None and name in launch.file else f"--{name} {number}"


def _fewer(launch: LaunchLine, starts: Started, each: int) -> str:
    """What starts so many processes on a node."""
    if launch.launcher == "torchrun":
        return _as_written(launch, "nproc_per_node", each)
    if launch.launcher == "deepspeed":
        named = launch.options.get("include") or launch.options.get("i")
        return f"{_so_many(each)} behind {named.typed}" if named else _as_written(launch, "num_gpus", each)
    if launch.launcher == "llamafactory-cli":
        return f"NPROC_PER_NODE={each}"
    if launch.launcher == "mpirun":
        return f"-np {each * (starts.nodes or 1)}"
    if launch.launcher == "srun":
        who, name, value = share(launch.slurm, launch).tasks_by
        place = "" if name == "--ntasks-per-node" else f" in the place of {name}={value}"
        return f"{who} --ntasks-per-node={each}{place}"
    return _as_written(launch, "num_processes", each * (starts.nodes or 1))


def _more_gpus(given: SlurmShare, count: int) -> str:
    """What asks Slurm for so many: on a node, or, as ``--gpus`` does, together."""
    who, name, value = given.gpus_by
    if name == "--gpus-per-task":
        count = -(-count // (given.per_node or 1))
    elif name != "--gpus" and given.all_gpus and given.gpus and given.nodes and count > given.gpus * given.nodes:
        count = -(-count // given.nodes)
    one = re.fullmatch(r"(\D*(?:\w*:)*)\d+(\(.*\))?", value)
    return f"{who} {name}={one[1]}{count}{one[2] or ''}" if one else f"{who} --gpus-per-node={count}"


def _waits(script: Script, launch: LaunchLine, starts: Started, given: SlurmShare, where: str) -> Iterator[Finding]:
    nodes, asked = starts.nodes, whole_number(script.slurm.get("--nodes", "")) or given.nodes
    who, name, value = given.tasks_by
    itself = launch.launcher == launch.by
    if not nodes or nodes == 1 or not asked or (launch.by == "srun" and nodes == given.launchers and not itself):
        return  # each launcher is a machine to the others, be it on one or not
    if nodes > asked and launch.launcher == "srun":
        what = f"srun asks for {nodes} machines, and Slurm is asked for {asked}"
        yield rules.found("launch.nodes", where, what, f"Write srun --nodes={asked}, or #SBATCH --nodes={nodes}.")
    elif nodes > asked:
        option = {"torchrun": "nnodes", "deepspeed": "num_nodes"}.get(launch.launcher, "num_machines")
        what = f"it waits for {nodes} machines, and Slurm is asked for {asked}"
        fix = f"Write {_as_written(launch, option, asked)}, or #SBATCH --nodes={nodes}."
        yield rules.found("launch.nodes", where, what, fix)
    elif starts.reaches:
        return
    elif _too_many(launch, nodes, given):
        option = {"torchrun": "nnodes"}.get(launch.launcher, "num_machines")
        what = f"it waits for {nodes} machines, and srun starts launchers on {given.nodes}: the others find no place"
        fix = f"Write {_as_written(launch, option, given.nodes or nodes)}, or #SBATCH --nodes={nodes}."
        yield rules.found("launch.nodes", where, what, fix)
    elif launch.by == "srun" and who == "#SBATCH" and given.launchers and given.launchers < nodes:
        launchers = "one launcher" if given.launchers == 1 else f"{given.launchers} launchers"
        what = f"it waits for {nodes} machines, and srun starts {launchers}"
        fix = f"Write {who} --ntasks-per-node=1 in the place of {name}={value}."
        yield rules.found("launch.nodes", where, what, fix)
    elif not launch.by and not launch.kept and not script.spreads:
        what = f"it waits for {nodes} machines, and without srun it is started on the first of them alone"
        inside = ", with --machine_rank $SLURM_NODEID between the quotes" if launch.launcher == "accelerate" else ""
        command = "srun --ntasks-per-node=1 bash -c '...' around it" if inside else "srun --ntasks-per-node=1 before it"
        yield rules.found("launch.nodes", where, what, f"Write {command}{inside}.")


def _too_many(launch: LaunchLine, nodes: int, given: SlurmShare) -> bool:
    """Whether srun starts launchers on more machines than each of them waits for; not where it names its machines."""
    chosen = {"-w", "--nodelist", "-x", "--exclude", "-r", "--relative"} & launch.step.keys()
    return launch.by == "srun" and not chosen and (given.launchers or 0) > nodes and (given.nodes or 0) > nodes


def _twice(launch: LaunchLine, starts: Started, given: SlurmShare, where: str) -> Iterator[Finding]:
    each, tasks = starts.per_node, given.per_node
    if not each or each == 1 or launch.launcher == launch.by:  # which starts the processes itself
        return
    ends = "the launcher starts the processes of its node."
    if launch.by == "srun" and tasks and tasks > 1:
        apart = starts.nodes in (1, given.launchers)  # each task is a machine to them, or trains by itself
        if apart and given.gpus and tasks * each <= given.gpus:
            return
        who, name, value = given.tasks_by
        place = "" if name == "--ntasks-per-node" else f" in the place of {name}={value}"
        what = f"srun starts {tasks} launchers on a node, and each of them {each} processes"
        yield rules.found("launch.twice", where, what, f"Write {who} --ntasks-per-node=1{place}: {ends}")
    copies = whole_number(next((launch.step[name] for name in ("np", "n", "c") if name in launch.step), ""))
    if launch.by == "mpirun" and copies and starts.nodes and copies > starts.nodes:
        if starts.nodes == 1 and {"H", "host", "hostfile", "machinefile", "f"} & launch.step.keys():
            return  # on each host one that trains by itself
        what = f"mpirun starts {copies} launchers, and each of them {each} processes"
        one = "Remove mpirun" if starts.nodes == 1 else f"Write -np {starts.nodes} --map-by ppr:1:node"
        yield rules.found("launch.twice", where, what, f"{one}: {ends}")


# --- options ---------------------------------------------------------------------------------------------------------


def _refused_options(path: str, launch: LaunchLine) -> Iterator[Finding]:
    """Say which options of a line its launcher refuses: before it has started anything."""
    table = LAUNCHERS.get(launch.launcher)
    if table is None:
        return
    for option in launch.strange:
        typed = option.typed.lstrip("-")
        if meant := table.meant(typed):
            begun = table.begun(typed) if table.shortened else ()
            what = f"{launch.launcher} has no option {option.typed}, and does not start"
            if len(begun) > 1:
                what = f"{option.typed} begins --{begun[0]} and --{begun[1]}, and {launch.launcher} does not start"
            written = meant.replace("_", "-") if "-" in typed and table.dashed else meant
            yield rules.found("launch.unknown-option", _at(path, option), what, f"Write --{written}.")
    for name, option in launch.options.items():
        if any(one in launch.options for one in table.unread.get(name, "").split()):
            continue
        if said := table.refused(name, option.value):
            what = f"{launch.launcher} takes {said[0]} as {option.typed}, and not {option.value}: it does not start"
            yield rules.found("launch.refused-option", _at(path, option), what, f"Write {said[1]}.")
    for switch, name, least in table.least:
        few = launch.options.get(name)
        if few is not None and switch in launch.options and (whole_number(few.value) or least) < least:
            what = f"{launch.launcher} takes {least} or more as {few.typed} with --{switch}, and does not start"
            fix = f"Write {least} or more, or remove --{switch}."
            yield rules.found("launch.refused-option", _at(path, few), what, fix)
    for groups in table.apart:
        here = [option for group in groups for option in _first(launch, group)]
        if len(here) > 1:
            what = f"{launch.launcher} takes {here[0].typed} or {here[1].typed}, and does not start with both"
            yield rules.found("launch.refused-option", _at(path, here[1]), what, "Remove one of them.")


def _first(launch: LaunchLine, group: str) -> list[Argument]:
    return [launch.options[name] for name in group.split() if name in launch.options][:1]


def _at(path: str, option: Argument) -> str:
    return f"{path}:{option.line}:{option.column}"


# --- several machines -------------------------------------------------------------------------------------------------

_RANKS_OF = {"torchrun": ("node_rank", "nnodes"), "accelerate": ("machine_rank", "num_machines")}
"""Launcher to its options of the number of this machine, and of how many there are."""


def _machines(script: Script, launch: LaunchLine, given: SlurmShare) -> Iterator[Finding]:
    """Say what each of several machines does by itself, where it is to find the others."""
    if launch.launcher not in _RANKS_OF:
        return
    options = launch.options
    rank_by, nodes_by = _RANKS_OF[launch.launcher]
    said, rank = options.get(nodes_by), options.get(rank_by)
    named = launch.file.get(nodes_by, "") if said is None else str(said.value).rpartition(":")[2]
    nodes = whole_number(named)
    fixed = whole_number(rank.value) if rank is not None and "rdzv_backend" not in options else None
    several = launch.by == "srun" and given.per_node == 1 and (given.launchers or 1) > 1

    def found(at: Argument | LaunchLine, what: str, fix: str) -> Finding:
        return rules.found("launch.nodes", f"{script.path}:{at.line}:{at.column}", what, fix)

    if rank is not None and fixed is not None and nodes and fixed >= nodes:
        there = f"the machines are 0 to {nodes - 1}" if nodes > 1 else "the only machine is 0"
        yield found(rank, f"{there}, and {rank.typed} is {fixed}", "Write the number of this machine, from 0.")
    elif rank is not None and fixed is not None and several and nodes != 1:
        what = f"srun starts {given.launchers} launchers, and each of them says that it is machine {fixed}"
        yield found(rank, what, f"Write bash -c '...' around it, with {rank.typed} $SLURM_NODEID between the quotes.")
    elif launch.launcher == "torchrun" and several and said is None and not _by_itself(launch):
        what = f"srun starts {given.launchers} launchers, and without --nnodes each trains by itself"
        yield found(launch, what, f"Write --nnodes={given.launchers}; or --standalone, where that is meant.")
    elif said is not None and nodes and nodes > 1 and "standalone" in options:
        what = f"it waits for {nodes} machines, and --standalone lets no other find it"
        yield found(options["standalone"], what, f"Remove it, or write {said.typed} 1.")
    elif said is not None and nodes and nodes > 1 and rank is None and _own_host(script, launch):
        at = options["rdzv_endpoint"]
        what = f"it waits for {nodes} machines, and each looks for the others at its own {at.value}"
        yield found(at, what, f"Write {at.typed} with the name of one machine that all of them reach.")


def _by_itself(launch: LaunchLine) -> bool:
    """Whether a line says that each launcher trains alone, or variables of torchrun's may say how many there are."""
    return "standalone" in launch.options or any(name.startswith("PET_") for name in launch.environment)


def _own_host(script: Script, launch: LaunchLine) -> bool:
    """Whether the only launch of a script names the machine that it is on; several may be several on one machine."""
    end = launch.options.get("rdzv_endpoint")
    host = "" if end is None else str(end.value).partition(":")[0]
    return host in ("localhost", "127.0.0.1") and len(script.launches) == 1
