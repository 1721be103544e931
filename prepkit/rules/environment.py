"""The environment: devices, process-group backends, Slurm, and versions of torch that the rules know."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import FSDP2, Config, Intent
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Moment, Rule, under

BACKENDS = frozenset({"cpu", "cuda", "xpu", "npu", "hpu", "mlu", "sdaa", "musa", "neuron"})
"""Device types for which the planner knows a process-group backend (ST-3)."""
_SERVES = {
    "nccl": ("cuda",),
    "xccl": ("xpu",),
    "hccl": ("npu", "hpu"),
    "cncl": ("mlu",),
    "tccl": ("sdaa",),
    "mccl": ("musa",),
    "gloo": ("cpu", "cuda"),
}
"""Backend to the device types that it serves; a backend that is not here is taken at its word."""
_OLDEST = (2, 6)
_GATHERS_ON_CPU = (2, 7)
"""Release from which on ``fully_shard`` gathers without an accelerator: before, streams of the CPU record no events."""
_AVERAGES_ON_CPU = (2, 9)
"""Release from which on gloo divides what ``fully_shard`` asks it to average; 2.7 and 2.8 were seen to only add."""


def _world(resolved: Resolved) -> Iterator[Hit]:
    if resolved.facts.env.world_size < 1:
        yield Hit("env.world_size", f"{resolved.facts.env.world_size} processes cannot prepare a model.")


def _other_device(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if cfg.device in (None, "cpu", facts.env.device):
        return
    what = f"`{cfg.device}` is asked for, but the environment has {facts.env.device}."
    kind = cfg.device.partition(":")[0]
    if kind != cfg.device:
        what = f"`{cfg.device}` names one device; every rank takes the one of its local rank."
    fix = f'Write device="{kind}".' if kind in ("cpu", facts.env.device) else ""
    yield Hit("config.device", what, fix)


def _serves(backend: str, device: str) -> bool:
    """Return whether a process-group backend, such as ``nccl`` or ``cpu:gloo,cuda:nccl``, serves a device type."""
    parts = dict(part.strip().partition(":")[::2] for part in backend.split(","))
    if all(parts.values()):
        return device in parts
    return device in _SERVES.get(backend.strip(), (device,))


def _backend(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    device = resolved.compute_device
    if not resolved.engine_traits.starts_group:
        return
    if cfg.backend and not _serves(cfg.backend, device):
        yield Hit("config.backend", f"`{cfg.backend}` does not serve {device}.")
    elif not cfg.backend and device not in BACKENDS:
        fix = 'Write device="cpu", engine=Single(), or the name of a process-group backend in config.backend.'
        yield Hit("env.device", f"No process-group backend is known for {device}.", fix)


def _offload(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    device = resolved.compute_device
    # A backend that does not even serve the device is the finding of the rule above.
    if resolved.offloads and cfg.backend and _serves(cfg.backend, device) and not _serves(cfg.backend, "cpu"):
        sharded = resolved.engine_traits.makes_dtensors
        work = "gradients are clipped and reduced" if sharded else "shards are saved and gathered"
        what = f"`{cfg.backend}` does not serve the CPU, where offloaded {work}."
        yield Hit("config.backend", what, f'Leave backend out, or write backend="cpu:gloo,{device}:{cfg.backend}".')


def _slurm(resolved: Resolved) -> Iterator[Hit]:
    value = dict(resolved.facts.env.variables).get("SLURM_NTASKS", "")
    world = resolved.facts.env.world_size
    # One task per node that starts a launcher is usual: then the tasks divide the world size.
    if value.isdecimal() and world >= 1 and (int(value) == 0 or world % int(value)):
        yield Hit("env.variables.SLURM_NTASKS", f"SLURM started {value} tasks, but the world size is {world}.")


def _version(resolved: Resolved) -> Iterator[Hit]:
    if resolved.facts.env.release < _OLDEST:
        yield Hit("env.torch", f"torch {resolved.facts.env.torch} is older than 2.6.")


def _fsdp2_on_cpu(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if resolved.compute_device != "cpu":
        return
    trains = resolved.cfg.intent is Intent.TRAINING and facts.env.world_size > 1
    if facts.env.release < _GATHERS_ON_CPU:
        yield Hit("env.torch", f"torch {facts.env.torch} shards on the CPU, and then fails where a unit is gathered.")
    elif facts.env.release < _AVERAGES_ON_CPU and trains:
        yield Hit(
            "env.torch", f"torch {facts.env.torch} adds the ranks' gradients up on the CPU, and does not average."
        )


def _own_device(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, device=None)


def _own_backend(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, backend=None)


# --- releases of torch -----------------------------------------------------------------------------------------------


ID = "environment.torch-unknown"

BY_RELEASE = (
    "optimizer.newer-torch",
    "environment.fsdp2-on-cpu",
    "tensor.uneven-shards",
    "units.left-whole",
    "units.mixed-dtypes",
    "units.packed",
    "units.unused-on-old-torch",
    "units.experts-on-old-torch",
)
"""Rules that say something of an old torch which they do not say of a new one."""

OLDEST = "2.6.0"
"""The first torch that prepkit takes."""


def about_unknown_torch(rules: tuple[Rule, ...]) -> Rule:
    """The rule that asks others what they would say of the oldest torch."""
    by_release = tuple(rule for rule in rules if rule.id in BY_RELEASE)

    def check(resolved: Resolved) -> Iterator[Hit]:
        facts = resolved.facts
        if facts.env.knows_release:
            return
        oldest = Resolved(cfg=resolved.cfg, facts=evolve(facts, env=evolve(facts.env, torch=OLDEST)))
        for rule in by_release:
            places = {hit.where for hit in rule.check(resolved)}
            for hit in rule.check(oldest):
                if hit.where not in places:
                    said = f"`{facts.env.torch}` names no release" if facts.env.torch else "is not known"
                    what = f"The version of torch {said}. Under torch 2.6 `{rule.id}` would say: {hit.what}"
                    yield Hit("env.torch", what)

    return Rule(
        id=ID,
        summary="The version of torch is known where an old one would be refused.",
        check=check,
        fix='Declare it, such as Env.declare(torch="2.9"); apply asks again with the torch that is there.',
        severity=Severity.WARNING,
        source=("pain 35", "ST-46"),
    )


RULES: tuple[Rule, ...] = (
    Rule(
        id="environment.world-size",
        summary="At least one process runs.",
        check=_world,
        fix="Declare a world size of at least 1.",
        overridable=False,
        source=("ST-13",),
    ),
    Rule(
        id="environment.device",
        summary="The device that is asked for is the one of the environment, or the CPU.",
        check=_other_device,
        fix="Leave config.device out, or declare an environment with that device.",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("ST-10", "ST-12", "G-25"),
        repair=_own_device,
    ),
    Rule(
        id="environment.backend",
        summary="A process-group backend serves the device.",
        check=_backend,
        fix="Leave config.backend out: the planner names the backend of the device.",
        overridable=False,
        source=("ST-3", "ST-4"),
    ),
    Rule(
        id="environment.offload-backend",
        summary="Under FSDP1 and FSDP2 with offload the backend serves the CPU too.",
        check=_offload,
        fix="Leave config.backend out.",
        source=("pain 33", "G-69", "ST-16"),
        repair=_own_backend,
    ),
    Rule(
        id="environment.slurm-tasks",
        summary="The tasks of SLURM divide the world size.",
        check=_slurm,
        fix="Write `unset SLURM_NTASKS` if one process is meant, or start the tasks with a launcher.",
        source=("pain 36", "G-2"),
    ),
    Rule(
        id="environment.torch-version",
        summary="torch is at least 2.6.",
        check=_version,
        fix="Write `pip install 'torch>=2.6'`.",
        source=("pain 35", "ST-46"),
    ),
    Rule(
        id="environment.fsdp2-on-cpu",
        summary="Where FSDP2 trains on the CPU, torch is at least 2.9.",
        check=under(FSDP2, _fsdp2_on_cpu),
        fix="Write `pip install 'torch>=2.9'`, or engine=FSDP1() or DDP().",
        source=("ST-46", "torch fully_shard"),
    ),
)
