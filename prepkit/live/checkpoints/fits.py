"""Whether a run can go on from a checkpoint: its facts against those of the run that was saved.

What cannot work at all is refused; what would work and train otherwise is refused until its id is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prepkit.facts.saved_run import RunFacts, Said, SavedModule
from prepkit.findings import Finding
from prepkit.live.checkpoints.failures import refused

SHOWN = 3
"""Differences that a finding spells out."""

ACCEPTABLE = (
    "checkpoint.other-config",
    "checkpoint.other-dtype",
    "checkpoint.other-optimizer",
    "checkpoint.other-scheduler",
)
"""What ``resume(accept=...)`` may be given: such a checkpoint can be read, and the run goes on otherwise."""

KERNELS = {
    "FusedAdam": ("Adam", "AdamW"),
    "DeepSpeedCPUAdam": ("Adam", "AdamW"),
    "DeepSpeedCPUAdagrad": ("Adagrad",),
    "DeepSpeedCPULion": ("Lion",),
    "FusedLion": ("Lion",),
}
"""Kernels of DeepSpeed's, and the optimizers that they are for."""

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def differences(saved: RunFacts, here: RunFacts, where: str) -> tuple[Finding, ...]:
    """Everything that keeps this run from going on, from ``where``; empty where it can. Engine and world may differ."""
    found = [*_tensors(saved, here, where), *_config(saved, here, where)]
    if here.optimizer:  # without one, as for inference, nothing beside the model is read
        found += [*_optimizer(saved, here, where), *_scheduler(saved, here, where)]
    return tuple(found)


def _tensors(saved: RunFacts, here: RunFacts, where: str) -> Iterator[Finding]:
    there = {one.name: one for one in saved.tensors}
    now = {one.name: one for one in here.tensors}
    what = "build the model that was saved, or give the folder of this one"
    lacking = [f"model.{name}" for name in now if name not in there]
    if lacking:
        yield refused("other-model", where, f"it lacks {listed(lacking)}", what)
    extra = [f"model.{name}" for name in there if name not in now]
    if extra:
        yield refused("other-model", where, f"it holds {listed(extra)}, which nothing here has", what)
    shapes = [
        f"{name} {list(there[name].shape)}, here {list(one.shape)}"
        for name, one in now.items()
        if name in there and there[name].shape != one.shape
    ]
    if shapes:
        yield refused("other-model", where, f"it holds {listed(shapes)}", what)
    narrowed = [
        f"{name} in {there[name].dtype}, here {one.dtype}"
        for name, one in now.items()
        if name in there and _loses(there[name].dtype, one.dtype)
    ]
    if narrowed:
        dtypes = sorted({there[name].dtype for name, one in now.items() if name in there})
        fix = f"build the model in {dtypes[0]}, or accept the rounding: {_accepting('other-dtype')}"
        yield refused("other-dtype", where, f"it holds {listed(narrowed)}", fix)


def _loses(before: str, now: str) -> bool:
    """Whether values are rounded on the way."""
    if before == now or before not in BYTES:
        return before != now
    return BYTES.get(now, 0) <= BYTES[before]


def _config(saved: RunFacts, here: RunFacts, where: str) -> Iterator[Finding]:
    told = [f"config.{line}" for line in _unlike(saved.config, here.config)]
    told += [f"{path}.{line}" for path, line in _modules(saved.modules, here.modules)] if not told else []
    if told:
        first = told[0].partition(" is ")
        fix = f"build the model with {first[0]} = {first[2].partition(',')[0]}, or accept: {_accepting('other-config')}"
        yield refused("other-config", where, f"the model that was saved is another: {listed(told)}", fix)


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


def _optimizer(saved: RunFacts, here: RunFacts, where: str) -> Iterator[Finding]:
    if not saved.optimizer:
        fix = (
            "give the folder of a training run, or begin with the weights alone: ready.resume(folder, only_model=True)"
        )
        yield refused("other-optimizer", where, "it was saved without an optimizer", fix)
        return
    if not _alike(saved.optimizer, here.optimizer):
        fix = f"use {saved.optimizer}, or accept: {_accepting('other-optimizer')}"
        yield refused(
            "other-optimizer", where, f"it was saved with {saved.optimizer}, and here stands {here.optimizer}", fix
        )
    before, now = [frozenset(group) for group in saved.groups], [frozenset(group) for group in here.groups]
    if before != now:
        moved = next((sorted(a ^ b) for a, b in zip(before, now, strict=False) if a != b), [])
        new = sorted(frozenset[str]().union(*now) - frozenset[str]().union(*before))
        what = f"its optimizer has groups of {_sizes(saved)} parameters, the one here of {_sizes(here)}"
        what += f"; {listed(moved)} changed the group" if moved and moved != new else ""
        what += f"; {listed(new)} trained by none then, as what is frozen" if new else ""
        fix = (
            "group the parameters as they were, or begin with the weights alone: ready.resume(folder, only_model=True)"
        )
        yield refused("other-groups", where, what, fix)


def _alike(saved: str, here: str) -> bool:
    """Whether the two compute the same from the same state."""
    return saved == here or bool({saved, *KERNELS.get(saved, ())} & {here, *KERNELS.get(here, ())})


def _sizes(run: RunFacts) -> str:
    return " + ".join(str(len(group)) for group in run.groups)


def _scheduler(saved: RunFacts, here: RunFacts, where: str) -> Iterator[Finding]:
    if saved.scheduler == here.scheduler:
        return
    there, now = saved.scheduler or "no scheduler", here.scheduler or "none"
    fix = f"build the {saved.scheduler}" if saved.scheduler else "leave the scheduler out"
    fix += f", or let the one here begin anew: {_accepting('other-scheduler')}"
    yield refused("other-scheduler", where, f"it was saved with {there}, and here stands {now}", fix)


def _accepting(rule: str) -> str:
    return f"ready.resume(folder, accept=['checkpoint.{rule}'])"


def listed(texts: list[str]) -> str:
    """The first few, and how many more."""
    text = ", ".join(sorted(texts)[:SHOWN])
    return text if len(texts) <= SHOWN else f"{text} and {len(texts) - SHOWN} more"
