"""Lines of scripts that start a training: how many processes, and which config files they name. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import field, frozen

from prepkit import rules
from prepkit.codec import LARGEST
from prepkit.findings import Finding

_WORD = re.compile(r"""(?:[^\s"'\\;&|]|\\.|"(?:\\.|[^"\\])*"|'[^']*')+|[;&|]+|\n""", re.DOTALL)
_SET = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=([^\s;&|$`(]+)\s*(?:#.*)?$", re.MULTILINE)
_SBATCH = re.compile(r"^#SBATCH[ \t]+(--[\w-]+|-\w)[= \t][ \t]*(\S+)", re.MULTILINE)
_SHORT = {"-N": "--nodes", "-G": "--gpus", "-n": "--ntasks"}
_KEPT = re.compile(
    r"((?:export\s+)?\w+=[\"'])(\s*(?:accelerate\s+launch|torchrun|python3?\s+-m\s+torch)[^\"']*)[\"']", re.DOTALL
)
_ON = re.compile(r"\\\r?\n")


@frozen(kw_only=True)
class NamedFile:
    """A config file that a line names."""

    path: str
    """As written, with the variables that the script sets; one with a ``$`` left is known when it runs only."""
    kind: str
    """Whose config it is, as what names it takes no other's."""
    line: int
    column: int


@frozen(kw_only=True)
class Argument:
    """An option that a line gives to its script."""

    name: str
    """With ``_`` between words, without the dashes before it."""
    value: str | bool
    """As written, with the variables that the script sets; True where nothing follows."""
    line: int
    column: int


@frozen(kw_only=True)
class LaunchLine:
    """One line that starts processes."""

    launcher: str
    line: int
    column: int
    processes: int | None = None
    """All of them together; None: the line does not say."""
    nodes: int | None = None
    per_node: int | None = None
    configs: tuple[NamedFile, ...] = ()
    arguments: tuple[Argument, ...] = ()
    """What stands behind the name of a script; one with a ``$`` left is known when it runs only."""
    by_srun: bool = False


@frozen(kw_only=True)
class Script:
    """A script, what it asks Slurm for, and what it starts."""

    path: str
    launches: tuple[LaunchLine, ...]
    slurm: Mapping[str, str] = field(factory=dict)
    """Options of ``#SBATCH`` lines by their long names."""


def read_script(path: str) -> Script:
    """The launches in a script. One that cannot be read has none."""
    try:
        text = Path(path).read_bytes()[:LARGEST].decode("utf-8-sig", errors="replace")
    except OSError:
        text = ""
    slurm = {_SHORT.get(name, name): value for name, value in _SBATCH.findall(text)}
    values: dict[str, set[str]] = {}
    for name, value in _SET.findall(text):
        values.setdefault(name, set()).add(value.strip("\"'"))
    plain = {name: next(iter(given)) for name, given in values.items() if len(given) == 1}
    return Script(path=path, launches=tuple(_launches(text, plain)), slurm=slurm)


@frozen
class _Word:
    text: str
    at: int


def _launches(text: str, values: Mapping[str, str]) -> Iterator[LaunchLine]:
    joined = _ON.sub(lambda found: " " * len(found[0]), text)
    joined = re.sub(r"(?m)^\s*#[^\n]*|(?<=\s)#[^\n]*", lambda found: " " * len(found[0]), joined)
    for kept in _KEPT.finditer(joined):  # LAUNCHER="accelerate launch ...", which a later line runs
        joined = "".join((joined[: kept.start()], " " * len(kept[1]), kept[2], "\n", joined[kept.end() :]))
    words: list[_Word] = []
    for found in _WORD.finditer(f"{joined}\n"):
        if found[0] != "\n" and not re.fullmatch(r"[;&|]+", found[0]):
            words.append(_Word(_valued(found[0], values), found.start()))
            continue
        launch = _launch(words, text)
        words = []
        if launch is not None:
            yield launch


def _valued(word: str, values: Mapping[str, str]) -> str:
    plain = word if word.startswith("'") else re.sub(r"\$\{?(\w+)\}?", lambda v: values.get(v[1], v[0]), word)
    return re.sub(r"[\"']", "", plain)


def _launch(words: list[_Word], text: str) -> LaunchLine | None:
    texts = [word.text for word in words]
    for at, word in enumerate(texts):
        name, after = word.rpartition("/")[2], texts[at + 1] if at + 1 < len(texts) else ""
        started = {
            "accelerate": after == "launch",
            "torchrun": True,
            "deepspeed": any(one.endswith(".py") or one in ("-m", "--module") for one in texts[at + 1 :]),
            "axolotl": after == "train",
            "llamafactory-cli": after == "train",
            "accelerate.commands.launch": at > 0 and texts[at - 1] == "-m",
            "torch.distributed.run": at > 0 and texts[at - 1] == "-m",
            "torch.distributed.launch": at > 0 and texts[at - 1] == "-m",
        }.get(name, False)
        if started and not {"pip", "echo", "conda", "install"} & set(texts[:at]):
            launcher = {"torch": "torchrun"}.get(name.partition(".")[0], name.partition(".")[0])
            skipped = 2 if name in ("accelerate", "axolotl", "llamafactory-cli") else 1
            return _read(launcher, words[at], words[at + skipped :], text, by_srun="srun" in texts[:at])
    return None


_OPTIONS = {"config_file": "accelerate", **dict.fromkeys(("deepspeed", "deepspeed_config", "ds_config"), "deepspeed")}
"""Option that names a file, to whose file that is."""
_TRAINERS = {"axolotl": "axolotl", "llamafactory-cli": "llamafactory"}
"""Command that is given a file first, to whose file that is."""


def _read(launcher: str, start: _Word, rest: list[_Word], text: str, *, by_srun: bool) -> LaunchLine:
    options: dict[str, _Word] = {}
    script = next((i for i, word in enumerate(rest) if re.search(r"\.py$", word.text)), len(rest))
    for i, word in enumerate(rest):
        name, sign, value = word.text.partition("=")
        if name.startswith("-"):
            key = name.lstrip("-").replace("-", "_")
            if i > script and key not in ("deepspeed", "deepspeed_config", "ds_config"):
                continue  # an option of the script, which means what it means there
            behind = rest[i + 1] if i + 1 < len(rest) else None
            if sign:
                options[key] = _Word(value, word.at)
            elif behind is not None and not behind.text.startswith("-"):
                options[key] = behind
    named = [(options[name], kind) for name, kind in _OPTIONS.items() if name in options]
    if launcher in _TRAINERS and rest:
        named.append((rest[0], _TRAINERS[launcher]))
    configs = tuple(
        NamedFile(path=word.text, kind=kind, line=_line(text, word.at)[0], column=_line(text, word.at)[1])
        for word, kind in named
        if re.search(r"\.(json|ya?ml|toml)$", word.text)
    )
    line, column = _line(text, start.at)
    nodes, each, whole = _sizes(launcher, {name: word.text for name, word in options.items()})
    return LaunchLine(
        launcher=launcher,
        line=line,
        column=column,
        processes=whole,
        nodes=nodes,
        per_node=each,
        configs=configs,
        arguments=tuple(_arguments(rest[script + 1 :], text)),
        by_srun=by_srun,
    )


def _arguments(words: list[_Word], text: str) -> Iterator[Argument]:
    for word, behind in zip(words, [*words[1:], _Word("--", 0)], strict=False):
        name, sign, value = word.text.partition("=")
        if re.match(r"--?[A-Za-z]", name):
            line, column = _line(text, word.at)
            given = value if sign else True if re.match(r"-(?!\d)", behind.text) else behind.text
            yield Argument(name=name.lstrip("-").replace("-", "_"), value=given, line=line, column=column)


def _line(text: str, at: int) -> tuple[int, int]:
    return text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1


def _sizes(launcher: str, options: Mapping[str, str]) -> tuple[int | None, int | None, int | None]:
    """Machines, processes on one of them, and all processes, as far as the line says."""

    def number(*names: str) -> int | None:
        texts = [options[name] for name in names if name in options]
        return int(texts[0]) if texts and re.fullmatch(r"\d{1,9}", texts[0]) else None

    if launcher == "accelerate":
        nodes, whole = number("num_machines"), number("num_processes")
        return nodes, whole // nodes if nodes and whole and whole % nodes == 0 else None, whole
    if launcher == "torchrun":
        nodes, each = number("nnodes"), number("nproc_per_node")
        one = "nnodes" not in options
    else:
        nodes, each = number("num_nodes"), number("num_gpus")
        one = "num_nodes" not in options and "hostfile" not in options
    nodes = nodes or (1 if one else None)
    return nodes, each, nodes * each if nodes and each else None


# --- what is wrong with them -----------------------------------------------------------------------------------------


def script_findings(script: Script) -> tuple[Finding, ...]:
    """Return what contradicts in the lines of a script."""
    return tuple(finding for launch in script.launches for finding in _flaws(script, launch))


def _flaws(script: Script, launch: LaunchLine) -> Iterator[Finding]:
    where = f"{script.path}:{launch.line}:{launch.column}"

    def error(rule: str, what: str, fix: str) -> Finding:
        return rules.found(rule, where, what, fix)

    nodes, whole = launch.nodes, launch.processes
    if launch.launcher == "accelerate" and nodes and whole and whole % nodes:
        what = f"--num_processes {whole} are all processes together, and --num_machines {nodes} does not divide them"
        yield error("launch.processes", what, f"Write --num_processes {whole * nodes}, or another multiple of {nodes}.")
    gpus, tasks = _gpus(script.slurm), script.slurm.get("--ntasks-per-node", "")
    if gpus and launch.per_node and launch.per_node > gpus:
        what = f"{launch.per_node} processes are started on a node, and Slurm is asked for {gpus} GPUs on it"
        yield error("launch.gpus", what, f"Start {gpus}, or ask for --gpus-per-node={launch.per_node}.")
    asked = script.slurm.get("--nodes", "")
    if asked.isdecimal() and nodes and nodes > int(asked):
        what = f"it waits for {nodes} machines, and Slurm is asked for {asked}"
        yield error("launch.nodes", what, f"Write {asked} there, or #SBATCH --nodes={nodes}.")
    if launch.by_srun and tasks.isdecimal() and int(tasks) > 1 and launch.per_node and launch.per_node > 1:
        what = f"srun starts {tasks} launchers on a node, and each of them {launch.per_node} processes"
        yield error(
            "launch.twice", what, "Write #SBATCH --ntasks-per-node=1: the launcher starts the processes of its node."
        )


def _gpus(slurm: Mapping[str, str]) -> int | None:
    for name in ("--gpus-per-node", "--gres"):
        found = re.search(r"(?:^|gpu:)(?:[A-Za-z][\w.-]*:)?(\d{1,6})(?:\(|$|,)", slurm.get(name, ""))
        if found:
            return int(found[1])
    return None
