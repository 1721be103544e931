"""Lines of scripts that start a training: what starts it, with which options, and which config files they name."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from prepkit.codec import LARGEST
from prepkit.findings import PlanRejected
from prepkit.formats.importers.foreign import shortest
from prepkit.formats.importers.source import read
from prepkit.formats.launcher_options import LAUNCHERS
from prepkit.formats.shell_words import Command, Word, commands, unquoted

_SBATCH = re.compile(r"^#SBATCH[ \t]+([^#\n]*)", re.MULTILINE)
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}
_LAUNCHER = re.compile(r"accelerate|torchrun|torch\.distributed|deepspeed|axolotl|llamafactory-cli|srun|mpirun")
_FILE = re.compile(r".*\.(json|ya?ml|toml)", re.DOTALL)


@frozen(kw_only=True)
class NamedFile:
    """A config file that a line names."""

    path: str
    """As written, with the variables that the script sets; one with a ``$`` left is known when it runs only."""
    kind: str
    """Whose config it is, as what names it takes no other's; empty: what is in it tells."""
    line: int
    column: int
    place: str | None = None
    """Where it lies here; None: it does not."""


@frozen(kw_only=True)
class Argument:
    """An option that a line gives to its launcher, or to its script."""

    name: str
    """With ``_`` between words, without the dashes before it."""
    value: str | bool
    """As written, with the variables that the script sets; True where nothing follows."""
    line: int
    column: int
    typed: str = ""
    """As it is typed, with its dashes."""


@frozen(kw_only=True)
class LaunchLine:
    """One line that starts processes."""

    launcher: str
    line: int
    column: int
    options: Mapping[str, Argument] = field(factory=dict)
    """Those of the launcher by their names, and of those that it does not know what was typed."""
    strange: tuple[Argument, ...] = ()
    """Options before the script that the launcher does not know."""
    configs: tuple[NamedFile, ...] = ()
    arguments: tuple[Argument, ...] = ()
    """What stands behind the name of a script; one with a ``$`` left is known when it runs only."""
    by: str = ""
    """What starts the launcher, and may start several: ``srun`` or ``mpirun``."""
    step: Mapping[str, str] = field(factory=dict)
    """Options of srun or mpirun on the line."""
    environment: Mapping[str, str] = field(factory=dict)
    """What the script puts into the environment of the line."""
    kept: bool = False
    """Whether it is the value of a variable, and no line is known that runs it."""
    file: Mapping[str, Any] = field(factory=dict)
    """What stands in the config of accelerate that the line names."""
    assumed: Mapping[str, str] = field(factory=dict)
    """Variables of the command up to its script that nothing sets here, and what the script takes them for then."""
    slurm: Mapping[str, str] = field(factory=dict)
    """What ``#SBATCH`` lines ask for, where srun or mpirun starts the processes themselves."""
    cut: tuple[int, str] | None = None
    """The line at which the command ends before its last line, and by what; None: it does not."""

    @property
    def config_file(self) -> NamedFile | None:
        """The config of accelerate that the line names."""
        return next((one for one in self.configs if one.kind == "accelerate"), None)


@frozen(kw_only=True)
class Script:
    """A script, what it asks Slurm for, and what it starts."""

    path: str
    launches: tuple[LaunchLine, ...]
    slurm: Mapping[str, str] = field(factory=dict)
    """Options of ``#SBATCH`` lines by their long names."""
    spreads: bool = False
    """Whether it starts something on several nodes: by srun, mpirun, ssh or one of their kind."""
    said: frozenset[str] = frozenset()
    """Words of commands that may make files: what they write, fetch or copy, and where to."""


def read_script(path: str) -> Script:
    """The launches in a script. One that cannot be read has none."""
    try:
        text = Path(path).read_bytes()[:LARGEST].decode("utf-8-sig", errors="replace")
    except OSError:
        text = ""
    slurm: dict[str, str] = {}
    for line in _SBATCH.findall(text):
        slurm |= slurm_options(line.split())
    if re.search(r"^#SBATCH[ \t]+(het|pack)job\b", text, re.MULTILINE):
        slurm = {}  # several jobs in one, each with its own numbers
    every = commands(text, _set_by_slurm(slurm, text), _LAUNCHER)
    where = _Where((0, *(found.end() for found in re.finditer("\n", text))), Path(path).parent)
    found = [(command, _launch(command, where)) for command in every]
    if not any(launch is not None for _, launch in found):  # beside a launcher, it starts what prepares the data
        found = [(command, _step_launch(command, where, slurm)) for command in every]
    lines = text.splitlines()
    launches = [
        (command, evolve(launch, cut=_cut(lines, launch.line))) for command, launch in found if launch is not None
    ]
    spreads = any(_SPREADS & {word.text for word in command.words} for command in every)
    said = frozenset(word for command, launch in found if launch is None for word in _may_make(command))
    return Script(path=path, launches=tuple(_once(launches)), slurm=slurm, spreads=spreads, said=said)


_MAKES_NONE = frozenset(
    {"cd", "ls", "mkdir", "rm", "test", "[", "[[", "if", "export", "echo", "head", "tail", "#SBATCH"}
)


def _may_make(command: Command) -> Iterator[str]:
    """The words of a command that may make files; of one that only shows something, the file that it writes to."""
    texts = [word.text for word in command.words]
    for before, text in zip(["", *texts], texts, strict=False):
        into = text[:1] == ">" or before in (">", ">>")
        if (texts[0] not in _MAKES_NONE or into) and (text := text.lstrip(">").rpartition("=")[2]):
            yield str(Path(text))


def makes(script: Script, named: str) -> bool:
    """Whether a command of a script that is no launch names the file, or a folder that it lies in."""
    path = Path(named)
    return any(str(one) in script.said for one in (path, *path.parents) if str(one) not in (".", "/", ".."))


def _cut(lines: list[str], first: int) -> tuple[int, str] | None:
    """Where a command over several lines, that begins in this one, ends too early, and by what."""
    for at, line in enumerate(lines[first - 1 : -1], start=first):
        goes_on = bool(lines[at].strip())
        if at > first and line.lstrip().startswith("#"):
            return (at, "a comment") if goes_on else None
        if not line.endswith("\\"):
            return (at, "blanks behind the backslash") if goes_on and re.search(r"\\[ \t]+$", line) else None
    return None


_SPREADS = frozenset(
    {"srun", "ssh", "pdsh", "mpirun", "mpiexec", "orterun", "clush", "parallel", "ray", "ibrun", "jsrun", "blaunch"}
)


def _once(found: list[tuple[Command, LaunchLine]]) -> Iterator[LaunchLine]:
    """Each launch once, though a variable that holds it is set in one line and run in another."""
    run = {launch.launcher: set[tuple[str, str]]() for _, launch in found}
    for command, launch in found:
        if not command.kept:
            run[launch.launcher] |= {(name, str(option.value)) for name, option in launch.options.items()}
    for command, launch in found:
        said = {(name, str(option.value)) for name, option in launch.options.items()}
        if not command.kept or not said <= run[launch.launcher]:
            yield launch


def slurm_options(words: list[str]) -> dict[str, str]:
    """Options of Slurm by their long names, as ``#SBATCH`` lines and srun take them; those before another word."""
    options: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, sign, value = words[at].partition("=")
        short = re.fullmatch(r"(-[A-Za-z])=?(\S*)", words[at]) if not name.startswith("--") else None
        if short:
            name, value = short[1], short[2]
            sign = value
        if not sign and at + 1 < len(words) and not words[at + 1].startswith("-"):
            at += 1
            value = words[at]
        options[_SHORT.get(name, name)] = unquoted(value)
        at += 1
    return options


def _set_by_slurm(slurm: Mapping[str, str], text: str) -> dict[str, str | None]:
    """Variables that Slurm sets in a script that is given to it; None: what to is not said in the script."""
    said = {
        "SLURM_NNODES": slurm.get("--nodes", ""),
        "SLURM_JOB_NUM_NODES": slurm.get("--nodes", ""),
        "SLURM_NTASKS": slurm.get("--ntasks", ""),
        "SLURM_NPROCS": slurm.get("--ntasks", ""),
        "SLURM_NTASKS_PER_NODE": slurm.get("--ntasks-per-node", ""),
        "SLURM_GPUS_PER_NODE": slurm.get("--gpus-per-node", ""),
        "SLURM_GPUS_ON_NODE": slurm.get("--gpus-per-node", ""),
    }
    seen = set(re.findall(r"\bSLURM_\w+", text)) if _SBATCH.search(text) else set[str]()
    return dict.fromkeys(sorted(seen)) | {name: value for name, value in said.items() if value.isdecimal()}


# --- finding the launcher --------------------------------------------------------------------------------------------

_NOT_RUN = frozenset({"pip", "pip3", "echo", "printf", "install", "which", "pkill", "pgrep", "type"})
_BY = ("srun", "mpirun", "mpiexec", "orterun")
_MODULES = {
    "accelerate.commands.launch": "accelerate",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
}
_SUBCOMMANDS = {"accelerate": "launch", "axolotl": "train", "llamafactory-cli": "train"}


def _launch(command: Command, where: _Where) -> LaunchLine | None:
    words, texts = command.words, [word.text for word in command.words]
    for at, word in enumerate(texts):
        name, after = word.rpartition("/")[2], texts[at + 1] if at + 1 < len(texts) else ""
        if name in _SUBCOMMANDS:
            started, skipped, launcher = after == _SUBCOMMANDS[name], 2, name
        elif name in _MODULES:
            started, skipped, launcher = at > 0 and texts[at - 1] == "-m", 1, _MODULES[name]
        elif name == "deepspeed":
            started = any(one.endswith(".py") or one in ("-m", "--module") for one in texts[at + 1 :])
            skipped, launcher = 1, name
        else:
            started, skipped, launcher = name == "torchrun", 1, name
        if started and not _NOT_RUN & {*texts[:at], *(word.text for word in command.before)}:
            return _read(launcher, command, at, list(words[at + skipped :]), evolve(where, gone=command.folder))
    return None


_PYTHON = re.compile(r"(?:.*/)?python[\d.]*|\$\{?\w*PYTHON\w*\}?", re.DOTALL | re.IGNORECASE)
_RANKS = re.compile(
    r"distributed|accelerat|lightning|deepspeed|Trainer|fairscale|megatron|colossalai|jax|horovod|prepkit|SLURM_|LOCAL_RANK"
)
"""What a program says that is one of several ranks."""


def _step_launch(command: Command, where: _Where, slurm: Mapping[str, str]) -> LaunchLine | None:
    """A launch by srun or mpirun alone, each of whose tasks is a rank: ``srun python train.py``.

    A program that lies here and says nothing of ranks, as one that prepares data, is none.
    """
    words = [*command.before, *command.words]
    by = next((i for i, word in enumerate(words) if word.text.rpartition("/")[2] in _BY), None)
    python = next((i for i, word in enumerate(command.words) if _PYTHON.fullmatch(word.text)), None)
    if by is None or python is None or by >= len(command.before) + python:
        return None
    rest = list(command.words[python + 1 :])
    at = next((i for i, word in enumerate(rest) if word.text.endswith(".py") or (i and rest[i - 1].text == "-m")), None)
    if at is None or _NOT_RUN & {word.text for word in words[: len(command.before) + python]}:
        return None
    program = resolved(rest[at].text, where.folder, command.folder)
    if program is not None and not _RANKS.search(Path(program).read_text(encoding="utf-8", errors="replace")):
        return None
    launcher = "srun" if words[by].text.endswith("srun") else "mpirun"
    return evolve(_read(launcher, command, python, rest[at:], evolve(where, gone=command.folder)), slurm=slurm)


@frozen
class _Where:
    lines: tuple[int, ...]
    """Where each line of the script begins."""
    folder: Path
    gone: str | None = None

    def place(self, word: Word) -> dict[str, int]:
        line = bisect_right(self.lines, word.at)
        return {"line": line, "column": word.at - self.lines[line - 1] + 1}

    def file(self, word: Word, kind: str) -> NamedFile:
        return NamedFile(
            path=word.text, kind=kind, place=resolved(word.text, self.folder, self.gone), **self.place(word)
        )

    def argument(self, name: str, value: str | bool, word: Word) -> Argument:
        return Argument(name=_name(name), value=value, typed=name, **self.place(word))


def _read(launcher: str, command: Command, at: int, rest: list[Word], where: _Where) -> LaunchLine:
    options: dict[str, Argument] = {}
    strange: tuple[Argument, ...] = ()
    script = 0
    if launcher in LAUNCHERS:
        options, strange, script = _of_launcher(launcher, rest, where)
    elif launcher not in _BY:
        options = {one.name: one for one in _arguments(rest[1:], where)}
    started = rest[script].text if script < len(rest) else ""
    before = [*command.before, *command.words[:at]]
    by = next((i for i, word in enumerate(before) if word.text.rpartition("/")[2] in _BY), None)
    configs = tuple(_configs(launcher, rest, script, where))
    named = next((one for one in configs if one.kind == "accelerate"), None)
    place = where.place(command.words[at])
    return LaunchLine(
        launcher=launcher,
        line=place["line"],
        column=place["column"],
        options=options,
        strange=strange,
        configs=configs,
        arguments=() if _TRAINERS.keys() & {launcher, started} else tuple(_arguments(rest[script + 1 :], where)),
        by="" if by is None else "srun" if before[by].text.endswith("srun") else "mpirun",
        step={} if by is None else _step([word.text for word in before[by:]]),
        environment=command.exported,
        kept=command.kept,
        file=_data(named),
        assumed=_assumed(command, (*before, *rest[:script])),
    )


ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "NNODES", "NPROC_PER_NODE")
"""Variables of the environment that say how many processes a launcher starts, and on which GPUs."""


def _assumed(command: Command, words: Iterable[Word]) -> dict[str, str]:
    """What is assumed in the command up to its script, and in the environment that its launcher reads."""
    inherited = (pair for name in ENVIRONMENT for pair in command.assumed.get(name, ()))
    return dict((*inherited, *(pair for word in words for pair in word.assumed)))


def _step(words: list[str]) -> dict[str, str]:
    """Options of srun by their long names; of mpirun without dashes, as it takes them with one and with two."""
    if words[0].endswith("srun"):
        return slurm_options(words[1:])
    pairs = zip(words[1:], [*words[2:], ""], strict=True)
    given = (word.partition("=") if "=" in word else (word, "", behind) for word, behind in pairs if word[:1] == "-")
    return {name.lstrip("-"): value for name, _, value in given}


def _of_launcher(
    launcher: str, rest: list[Word], where: _Where
) -> tuple[dict[str, Argument], tuple[Argument, ...], int]:
    """The options that the launcher knows, those that it does not, and where the name of a script or module is."""
    table = LAUNCHERS[launcher]
    options: dict[str, Argument] = {}
    strange: list[Argument] = []
    opened, at = False, 0
    while at < len(rest):
        typed, sign, value = rest[at].text.partition("=")
        if not typed.startswith("-"):
            if "$" not in typed or typed.endswith(".py"):
                break
            opened = True
            at += 1  # what it stands for is known when it runs
            continue
        word, name = rest[at], table.name(typed.lstrip("-"))
        follows = at + 1 < len(rest) and not (name is None and rest[at + 1].text.startswith("-"))
        given: str | bool = value if sign else True
        if not sign and name not in table.switches and follows and not rest[at + 1].text.endswith(".py"):
            at += 1
            given = rest[at].text
        if name is not None:
            options[name] = where.argument(typed, given, word)
        elif "$" not in typed and re.match(r"--\w", typed) and (not opened or table.near(typed)):
            strange.append(where.argument(typed, given, word))
        at += 1
    return options, tuple(strange), at


def _name(typed: str) -> str:
    return typed.lstrip("-").replace("-", "_")


def _arguments(words: list[Word], where: _Where) -> Iterator[Argument]:
    for word, behind in zip(words, [*words[1:], Word("--", 0)], strict=False):
        name, sign, value = word.text.partition("=")
        if re.match(r"--?[A-Za-z]", name):
            given = value if sign else True if re.match(r"-(?!\d)", behind.text) else behind.text
            yield where.argument(name, given, word)


# --- the files that a line names -------------------------------------------------------------------------------------

_DEEPSPEED = frozenset({"deepspeed", "deepspeed_config", "ds_config", "deepspeed_config_file"})
"""Options that name a file of DeepSpeed's, of launchers and of scripts."""
_TRAINERS = {
    "axolotl": "axolotl",
    "llamafactory-cli": "llamafactory",
    "axolotl.cli.train": "axolotl",
    "llamafactory.launcher": "llamafactory",
}
"""Command or module that is given a file first, to whose file that is."""


def _configs(launcher: str, rest: list[Word], script: int, where: _Where) -> Iterator[NamedFile]:
    """Files of options that name one, of trainers that are given one first, and any other that looks like one."""
    started = rest[script].text if script < len(rest) else ""
    first = {script: _TRAINERS[launcher]} if launcher in _TRAINERS else {}
    if started in _TRAINERS:
        first = {script + 1: _TRAINERS[started]}
    option = ""
    for at, word in enumerate(rest):
        name, sign, value = word.text.partition("=")
        if name.startswith("-"):
            option = _name(name)
        path = Word(value, word.at) if name.startswith("-") and sign else word
        kind = first.get(at, "")
        if not kind and option in _DEEPSPEED:
            kind = "deepspeed"
        elif not kind and option == "config_file" and at < script:
            kind = "accelerate"
        elif not kind and option in ("job.config_file", "config_file") and started.startswith("torchtitan"):
            kind = "torchtitan"
        if (sign or not name.startswith("-")) and _FILE.fullmatch(path.text) and (kind or at >= script):
            yield where.file(path, kind)
        if sign or not name.startswith("-"):
            option = ""


def resolved(named: str, folder: Path, gone: str | None = None) -> str | None:
    """The file from where the script has gone, or is, from here, or from a folder above: nobody knows where it runs."""
    if re.search(r"[$`]", named):
        return None
    absolute = folder.resolve()
    bases = (folder, Path(), *absolute.parents[:6])
    for base in (*((base / gone for base in bases) if gone else ()), *bases):
        try:
            if (base / named).is_file():
                return str(shortest(base / named))
        except (OSError, ValueError):
            return None
    return None


def _data(named: NamedFile | None) -> Mapping[str, Any]:
    if named is None or named.place is None:
        return {}
    try:
        return read(named.place).data()
    except PlanRejected:
        return {}  # what is wrong with it is told of the file
