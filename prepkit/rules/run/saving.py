"""Rules of checkpoints: what keeps one from being written right, and what keeps a run from going on from one.

What cannot work at all refuses; what would work and train otherwise refuses until its id is accepted, by
``ready.resume(folder, accept=[...])``. Everything here is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prepkit.facts.saved_run import (
    FolderFacts,
    ResumeFacts,
    Said,
    SavedFacts,
    SavedModule,
    SavedWindows,
)
from prepkit.findings import Severity
from prepkit.findings.text import count
from prepkit.rules.rule import Hit, Moment, Rule

SHOWN = 3
"""Differences that a finding spells out."""

MODEL = "model."
"""How the names of a model's tensors begin in a checkpoint."""

KERNELS: Mapping[str, tuple[str, ...]] = {
    "FusedAdam": ("Adam", "AdamW"),
    "DeepSpeedCPUAdam": ("Adam", "AdamW"),
    "DeepSpeedCPUAdagrad": ("Adagrad",),
    "DeepSpeedCPULion": ("Lion",),
    "FusedLion": ("Lion",),
}
"""Kernels of DeepSpeed's, and the optimizers that they are for."""

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Per element."""

_WEIGHTS_ALONE = "begin with the weights alone: ready.resume(folder, only_model=True)"


def listed(texts: Iterable[str]) -> str:
    """The first few in order of the alphabet, and how many more.

    >>> listed(["d", "b", "c", "a"])
    'a, b, c and 1 more'
    """
    every = sorted(texts)
    text = ", ".join(every[:SHOWN])
    return text if len(every) <= SHOWN else f"{text} and {len(every) - SHOWN} more"


def _accepting(rule: str) -> str:
    return f"ready.resume(folder, accept=['{rule}'])"


# --- the folder ---


def _no_folder(facts: FolderFacts) -> Iterator[Hit]:
    several = len(facts.given) > 1
    wrong = [f"{one.problem}{f' (rank {rank})' if several else ''}" for rank, one in enumerate(facts.given)]
    if found := [text for text, one in zip(wrong, facts.given, strict=True) if one.problem]:
        yield Hit("folder", "; ".join(found[:4]))


def _folders_differ(facts: FolderFacts) -> Iterator[Hit]:
    paths = [one.path for one in facts.given]
    if len(set(paths)) > 1 and not any(one.problem for one in facts.given):
        other = next(rank for rank, path in enumerate(paths) if path != paths[0])
        yield Hit("folder", f"rank 0 gives {paths[0]!r:.200}, and rank {other} {paths[other]!r:.200}")


def _beside_another(facts: FolderFacts) -> Iterator[Hit]:
    if facts.others:
        held = f"it holds {count(len(facts.others), 'checkpoint')} of a run that this one did not resume, "
        left = f"{facts.others[0]} the newest; they are left alone, and the latest is now that of step {facts.steps}"
        yield Hit(facts.folder, f"{held}{left} of this run")


def _nothing_saved(facts: ResumeFacts) -> Iterator[Hit]:
    if facts.nothing:
        yield Hit(facts.where, f"{facts.nothing}, so that training begins at step 0")


def _latest_torn(facts: ResumeFacts) -> Iterator[Hit]:
    if facts.torn:
        yield Hit(facts.where, f"{'; '.join(facts.torn)}; this is the newest that is whole")


def _accepts_unknown(facts: ResumeFacts) -> Iterator[Hit]:
    if unknown := [one for one in facts.accepted if one not in ACCEPTABLE]:
        yield Hit("accept", f"{listed(unknown)} names no error of a resume that can be accepted")


# --- the run that was saved, and the one here ---


Both = Callable[[SavedFacts, SavedFacts, str], Iterable[Hit]]


def _both(check: Both) -> Callable[[ResumeFacts], Iterable[Hit]]:
    """Asks ``check`` where the runs on both sides are known."""

    def asked(facts: ResumeFacts) -> Iterable[Hit]:
        return () if facts.saved is None or facts.here is None else check(facts.saved, facts.here, facts.where)

    return asked


def _other_model(facts: ResumeFacts) -> Iterator[Hit]:
    there = {} if facts.saved is None else {one.name: one.shape for one in facts.saved.tensors}
    now = {} if facts.saved is None or facts.here is None else {one.name: one.shape for one in facts.here.tensors}
    lacking = {f"{MODEL}{name}" for name in now if name not in there}
    lacking |= {name for name in facts.lacking if name.startswith(MODEL)}
    unknown = {f"{MODEL}{name}" for name in there if facts.here is not None and name not in now}
    unknown |= {name for name in facts.unknown if name.startswith(MODEL)}
    shapes = {
        f"{MODEL}{name} {list(there[name])}, here {list(shape)}"
        for name, shape in now.items()
        if there.get(name, shape) != shape
    }
    shapes |= {text for text in facts.reshaped if text.startswith(MODEL)}
    yield from _names(facts.where, lacking, unknown, shapes)


def _other_state(facts: ResumeFacts) -> Iterator[Hit]:
    found = (
        [name for name in names if not name.startswith(MODEL)]
        for names in (facts.lacking, facts.unknown, facts.reshaped)
    )
    yield from _names(facts.where, *found)


def _names(where: str, lacking: Iterable[str], unknown: Iterable[str], shapes: Iterable[str]) -> Iterator[Hit]:
    if lacking:
        yield Hit(where, f"it lacks {listed(lacking)}")
    if unknown:
        yield Hit(where, f"it holds {listed(unknown)}, which nothing here has")
    if shapes:
        yield Hit(where, f"it holds {listed(shapes)}")


def _other_dtype(saved: SavedFacts, here: SavedFacts, where: str) -> Iterator[Hit]:
    there = {one.name: one.dtype for one in saved.tensors}
    narrowed = [
        f"{one.name} in {there[one.name]}, here {one.dtype}"
        for one in here.tensors
        if one.name in there and _loses(there[one.name], one.dtype)
    ]
    if narrowed:
        dtype = min(there[one.name] for one in here.tensors if one.name in there)
        fix = f"Build the model in {dtype}, or accept the rounding: {_accepting('checkpoint.other-dtype')}."
        yield Hit(where, f"it holds {listed(narrowed)}", fix)


def _loses(before: str, now: str) -> bool:
    """True where values are rounded on the way."""
    if before == now or before not in BYTES:
        return before != now
    return BYTES.get(now, 0) <= BYTES[before]


def _other_config(saved: SavedFacts, here: SavedFacts, where: str) -> Iterator[Hit]:
    apart = [f"config.{line}" for line in _unlike(saved.config, here.config)]
    apart = apart or [f"{path}.{line}" for path, line in _modules(saved.modules, here.modules)]
    if apart:
        name, _, values = apart[0].partition(" is ")
        back = f"Build the model with {name} = {values.partition(',')[0]}"
        fix = f"{back}, or accept: {_accepting('checkpoint.other-config')}."
        yield Hit(where, f"the model that was saved is another: {listed(apart)}", fix)


def _modules(saved: tuple[SavedModule, ...], here: tuple[SavedModule, ...]) -> Iterator[tuple[str, str]]:
    there = {one.path: one for one in saved}
    for one in here:
        if one.path in there:
            for line in _unlike(there[one.path].values, one.values):
                yield one.path or "(root)", line


def _unlike(saved: Said, here: Said) -> Iterator[str]:
    """Entries that both have, with other values."""
    there: Mapping[str, str] = dict(saved)
    for name, value in here:
        if there.get(name, value) != value:
            yield f"{name} is {there[name]}, here {value}"


def _no_optimizer(saved: SavedFacts, here: SavedFacts, where: str) -> Iterator[Hit]:
    if here.optimizer and not saved.optimizer:
        yield Hit(where, "it was saved without an optimizer")


def _other_optimizer(saved: SavedFacts, here: SavedFacts, where: str) -> Iterator[Hit]:
    if here.optimizer and saved.optimizer and not _alike(saved.optimizer, here.optimizer):
        fix = f"Use {saved.optimizer}, or accept: {_accepting('checkpoint.other-optimizer')}."
        yield Hit(where, f"it was saved with {saved.optimizer}, and here is {here.optimizer}", fix)


def _alike(saved: str, here: str) -> bool:
    """True where the two compute the same from the same state."""
    return saved == here or bool({saved, *KERNELS.get(saved, ())} & {here, *KERNELS.get(here, ())})


def _other_groups(saved: SavedFacts, here: SavedFacts, where: str) -> Iterator[Hit]:
    before, now = [frozenset(group) for group in saved.groups], [frozenset(group) for group in here.groups]
    if not (here.optimizer and saved.optimizer) or before == now:
        return
    moved = next((sorted(a ^ b) for a, b in zip(before, now, strict=False) if a != b), [])
    new = sorted(frozenset[str]().union(*now) - frozenset[str]().union(*before))
    what = f"its optimizer has groups of {_sizes(saved)} parameters, the one here of {_sizes(here)}"
    what += f"; {listed(moved)} changed the group" if moved and moved != new else ""
    what += f"; {listed(new)} trained by none then, as what is frozen" if new else ""
    yield Hit(where, what)


def _sizes(run: SavedFacts) -> str:
    return " + ".join(str(len(group)) for group in run.groups)


def _other_scheduler(saved: SavedFacts, here: SavedFacts, where: str) -> Iterator[Hit]:
    if not (here.optimizer and saved.optimizer) or saved.scheduler == here.scheduler:
        return
    back = f"Build the {saved.scheduler}" if saved.scheduler else "Leave the scheduler out"
    fix = f"{back}, or let the one here begin again: {_accepting('checkpoint.other-scheduler')}."
    what = f"it was saved with {saved.scheduler or 'no scheduler'}, and here is {here.scheduler or 'none'}"
    yield Hit(where, what, fix)


# --- what the plan says, and no state holds: this run's counts ---


def _windows(check: Callable[[SavedWindows, SavedWindows], Iterable[Hit]]) -> Callable[[ResumeFacts], Iterable[Hit]]:
    """Asks ``check`` where the plans on both sides are known."""

    def asked(facts: ResumeFacts) -> Iterable[Hit]:
        return () if facts.before is None or facts.now is None else check(facts.before, facts.now)

    return asked


def _other_batch(before: SavedWindows, now: SavedWindows) -> Iterator[Hit]:
    if before.global_batch is not None and now.global_batch is not None:
        took, takes, each = before.global_batch, now.global_batch, now.global_batch // now.micro_batches
        said = f"{count(takes, 'sample')}, and took {took:,}"
    else:
        took, takes, each = before.batch, now.batch, now.ranks
        said = f"{_window(now)}, and took {_window(before)}"
    if took != takes:
        whole, rest = divmod(took, each)
        fix = "" if rest else f"To train on as before, write Config(accumulation={whole})."
        yield Hit("config.accumulation", f"a step takes {said}", fix)


def _window(windows: SavedWindows) -> str:
    return f"{count(windows.micro_batches, 'micro-batch')} on each of {count(windows.ranks, 'data rank')}"


def _other_clipping(before: SavedWindows, now: SavedWindows) -> Iterator[Hit]:
    if before.clip != now.clip:
        fix = f"write Config(clip=pk.{before.clip})" if before.clip else "write Config(clip=None)"
        what = f"clipping is {now.clip or 'off'}, and was {before.clip or 'off'}"
        yield Hit("config.clip", what, f"To train on as before, {fix}.")


def _other_steps(before: SavedWindows, now: SavedWindows) -> Iterator[Hit]:
    if None not in (before.total_steps, now.total_steps) and before.total_steps != now.total_steps:
        what = f"the run takes {now.total_steps} steps in all, and took {before.total_steps}"
        fix = f"To train on as before, write Config(total_steps={before.total_steps})."
        yield Hit("config.total_steps", f"{what}: a schedule that ends with them is another", fix)


# --- what a resume has done ---


def _joined(facts: ResumeFacts) -> Iterator[Hit]:
    for text in facts.joined:
        yield Hit("optimizer", f"{text}; the largest counts for all")


def _replaced(facts: ResumeFacts) -> Iterator[Hit]:
    if facts.replaced:
        what = f"ready.resume() has put back what the checkpoint had: {'; '.join(facts.replaced[:SHOWN])}"
        yield Hit("optimizer.param_groups", what)


def _other_data(facts: ResumeFacts) -> Iterator[Hit]:
    for text in facts.other_data:
        what = f"{text} samples when the pass began that goes on here: one that is shuffled has another order now"
        yield Hit("loaders", f"{what}, and reads some samples twice, or leaves some out")


def _row(slug: str, summary: str, check: Any, fix: str, **more: Any) -> Rule:
    return Rule(
        id=slug, summary=summary, check=check, fix=fix, **{"at": (Moment.RESUME,), "overridable": False, **more}
    )


_FOLDER = {"at": (Moment.FOLDER,), "cost": "one exchange of texts"}
_WARNS = {"severity": Severity.WARNING, "overridable": True}

RULES: tuple[Rule, ...] = (
    _row(
        "checkpoint.no-folder",
        "A checkpoint is written to, and read from, a path of a folder.",
        _no_folder,
        'Give every rank the same folder, such as "runs/7".',
        **_FOLDER,
        stops="there is nowhere to write to, or read from",
    ),
    _row(
        "checkpoint.folders-differ",
        "Every rank gives the same folder.",
        _folders_differ,
        'Give every rank the same folder, such as "runs/7".',
        **_FOLDER,
        stops="a checkpoint is written and read by all ranks together",
    ),
    _row(
        "save.beside-another-run",
        "A folder holds the checkpoints of one run.",
        _beside_another,
        "Give each run a folder of its own, or go on with ready.resume(folder).",
        at=(Moment.FOLDER,),
        **_WARNS,
    ),
    _row(
        "resume.nothing-saved",
        "There is a checkpoint to go on from.",
        _nothing_saved,
        "Look whether the folder is meant; for the first start of a run nothing is to be done.",
        **_WARNS,
    ),
    _row(
        "resume.latest-torn",
        "The newest checkpoint of the folder is whole.",
        _latest_torn,
        "Restore the newer files from a copy if the steps since then are wanted; else nothing is to be done.",
        **_WARNS,
    ),
    _row(
        "resume.accepts-unknown",
        "accept= names errors of a resume that can be accepted.",
        _accepts_unknown,
        "Write one or more of checkpoint.other-config, checkpoint.other-dtype, checkpoint.other-optimizer and "
        "checkpoint.other-scheduler.",
        **_WARNS,
    ),
    _row(
        "checkpoint.other-model",
        "The checkpoint holds the tensors of this model, in their shapes, and no others.",
        _other_model,
        "Build the model that was saved, or give the folder of this one.",
        stops="there is no place for what is read",
    ),
    _row(
        "checkpoint.other-dtype",
        "Parameters are at least as precise as those that were saved.",
        _both(_other_dtype),
        "Build the model in the dtype that was saved, or accept the rounding with accept=[...].",
        overridable=True,
    ),
    _row(
        "checkpoint.other-config",
        "The model computes as the one that was saved: its config and its modules say the same.",
        _both(_other_config),
        "Build the model as the finding says, or accept it with ready.resume(folder, accept=[...]).",
        overridable=True,
    ),
    _row(
        "checkpoint.no-optimizer",
        "A run that trains goes on from one that trained.",
        _both(_no_optimizer),
        f"Give the folder of a training run, or {_WEIGHTS_ALONE}.",
        stops="there is no state to go on from; only_model=True does without",
    ),
    _row(
        "checkpoint.other-optimizer",
        "The checkpoint holds the state of this kind of optimizer.",
        _both(_other_optimizer),
        "Use the optimizer that was saved, or read the weights alone with only_model=True.",
        overridable=True,
    ),
    _row(
        "checkpoint.other-state",
        "The checkpoint holds the state of this optimizer, in its shapes, and no other.",
        _other_state,
        f"Use the optimizer that was saved, or {_WEIGHTS_ALONE}.",
        stops="there is no place for what is read; only_model=True does without",
    ),
    _row(
        "checkpoint.other-groups",
        "The optimizer has the groups of parameters that were saved.",
        _both(_other_groups),
        f"Group the parameters as they were, or {_WEIGHTS_ALONE}.",
        stops="the settings of a group belong to its parameters; only_model=True does without",
    ),
    _row(
        "checkpoint.other-scheduler",
        "The scheduler is of the class that was saved.",
        _both(_other_scheduler),
        "Build that scheduler, or let the one here begin again with accept=[...].",
        overridable=True,
    ),
    _row(
        "resume.other-batch",
        "A step takes as many samples, or micro-batches, on all ranks, as in the run that was saved.",
        _windows(_other_batch),
        "Nothing is to be done where it was changed on purpose: this run's plan counts.",
        **_WARNS,
    ),
    _row(
        "resume.other-clipping",
        "Gradients are clipped as in the run that was saved.",
        _windows(_other_clipping),
        "Nothing is to be done where it was changed on purpose: this run's plan counts.",
        **_WARNS,
    ),
    _row(
        "resume.other-total-steps",
        "The run takes as many steps in all as the one that was saved.",
        _windows(_other_steps),
        "Nothing is to be done where it was changed on purpose: this run's plan counts.",
        **_WARNS,
    ),
    _row(
        "resume.steps-joined",
        "Parameters that DeepSpeed steps as one have taken as many steps.",
        _joined,
        "Nothing is to be done where that is right: DeepSpeed keeps one count for a group.",
        **_WARNS,
    ),
    _row(
        "resume.other-data",
        "A pass goes on over as many samples as it began with.",
        _other_data,
        "Nothing is to be done where the data were changed on purpose: the next pass reads each sample once.",
        **_WARNS,
    ),
    _row(
        "resume.settings-replaced",
        "Optimizer and scheduler were built with the settings that the checkpoint has.",
        _replaced,
        "To train on with yours, set them after the resume in ready.optimizer.param_groups and ready.scheduler (of a "
        "rate that it sets, base_lrs too), or write ready.resume(folder, only_model=True), which leaves both as they "
        "were built.",
        **_WARNS,
    ),
)
"""Every rule of checkpoints: the folder, the two runs, what the plan says otherwise, and what was put back."""

ACCEPTABLE = tuple(rule.id for rule in RULES if rule.overridable and rule.severity is Severity.ERROR)
"""Ids that ``ready.resume(accept=...)`` takes."""
