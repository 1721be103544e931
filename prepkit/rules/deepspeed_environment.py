"""DeepSpeed against the environment, the mesh, the loaders, the optimizer and the scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import evolve

from prepkit.config import Config, DeepSpeed, Mixed
from prepkit.facts import Env, Facts
from prepkit.findings.text import count
from prepkit.resolve.deepspeed.data import stage, tensor_parallel
from prepkit.resolve.resolved import Resolved
from prepkit.rules.deepspeed import flaws
from prepkit.rules.rule import Hit, Moment, Rule, under, with_engine

_FOR_DEVICE = {"mlu": (0, 15, 2), "musa": (0, 14, 3)}


def _version(env: Env, library: str) -> tuple[int, ...] | None:
    """The version of a library; None where it is not known."""
    text = env.torch if library == "torch" else dict(env.libraries).get(library, "")
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else None


def _older(env: Env, least: tuple[int, ...]) -> bool:
    version = _version(env, "deepspeed")
    return version is not None and version < least


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _installed(resolved: Resolved, engine: DeepSpeed) -> Iterator[Hit]:
    cfg = resolved.cfg
    env = resolved.facts.env
    if env.libraries and _version(env, "deepspeed") is None:
        yield Hit("env.libraries", "DeepSpeed is not installed.")
    least = [("", _FOR_DEVICE.get(env.device, (0, 9, 3)))]
    if engine.leaf_modules:
        least.append(("leaf_modules ", (0, 14, 0)))
    if tensor_parallel(engine) > 1:
        least.append(("tensor_parallel.autotp_size ", (0, 16, 4)))
    if cfg.compile is not None:
        least.append(("config.compile ", (0, 14, 4)))
    for name, version in least:
        if _older(env, version):
            here = dict(env.libraries)["deepspeed"]
            what = f"DeepSpeed {here} is older than {_dotted(version)}, which {name or 'prepkit '}needs."
            yield Hit("env.libraries", what, f"Write `pip install 'deepspeed>={_dotted(version)}'`.")


def _accelerator(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    device = resolved.cfg.device or facts.env.device
    forced = dict(facts.env.variables).get("DS_ACCELERATOR")
    if forced not in (None, device):
        what = f"DS_ACCELERATOR={forced} is set, and the plan computes on {device}."
        yield Hit(
            "env.variables.DS_ACCELERATOR", what, f"Write `export DS_ACCELERATOR={device}`, or unset it.", milder=True
        )
    elif forced is None and device == "cpu" != facts.env.device:
        what = f"DeepSpeed takes the {facts.env.device} that it finds, and the plan computes on the CPU."
        yield Hit("config.device", what, "Write `export DS_ACCELERATOR=cpu` before DeepSpeed is imported.", milder=True)


def _lazy(resolved: Resolved) -> Iterator[Hit]:
    if (resolved.cfg.device or resolved.facts.env.device) != "hpu":
        return
    if resolved.deepspeed.convert and dict(resolved.facts.env.variables).get("PT_HPU_LAZY_MODE", "1") == "1":
        yield Hit("env.variables.PT_HPU_LAZY_MODE", "Optimizer state cannot be offloaded while HPU runs lazily.")


def _mesh(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if cfg.mesh is not None:
        asked = f"Mesh(replicate={cfg.mesh.replicate}, shard={cfg.mesh.shard})"
        yield Hit("config.mesh", f"{asked} is asked for, and DeepSpeed lays out the ranks by itself.")


def _no_mesh(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, mesh=None)


# --- optimizer and scheduler ------------------------------------------------------------------------------


def _state(resolved: Resolved, engine: DeepSpeed) -> Iterator[Hit]:
    cfg = resolved.cfg
    optimizer = resolved.facts.optimizer
    if optimizer is None or optimizer.initial_state or not optimizer.stateful:
        return
    if stage(engine) or isinstance(cfg.precision, Mixed):
        params = count(len(optimizer.stateful), "parameter")
        what = f"It has state for {params}, which DeepSpeed would drop: it steps shards of its own."
        yield Hit("optimizer", what)


def _adagrad(resolved: Resolved, engine: DeepSpeed) -> Iterator[Hit]:
    facts = resolved.facts
    optimizer = facts.optimizer
    if optimizer is None or not stage(engine):
        return
    torchs = optimizer.name == "Adagrad" and optimizer.module.startswith("torch") and resolved.deepspeed.convert is None
    if torchs and (facts.scheduler is not None or len(optimizer.groups) > 1):
        lost = "the scheduler would go on with the old one" if facts.scheduler else "its groups would get one rate"
        yield Hit("optimizer", f"ZeRO makes torch's Adagrad anew from the options it was made with, and {lost}.")


def _factory(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if facts.scheduler and facts.scheduler.factory and not resolved.engine_traits.engine_steps:
        what = (
            f"`{facts.scheduler.name}` makes a scheduler, and {type(cfg.engine).__name__} wants the scheduler itself."
        )
        yield Hit("scheduler", what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="deepspeed.installed",
        summary="DeepSpeed is installed, and new enough for what is asked of it.",
        check=with_engine(DeepSpeed, _installed),
        fix="Write `pip install 'prepkit[deepspeed]'`.",
        at=(Moment.PLAN, Moment.ACT),
        source=("ST-45", "DS-3", "DS-19", "DS-30"),
    ),
    Rule(
        id="deepspeed.accelerator",
        summary="DeepSpeed works on the device of the plan.",
        check=under(DeepSpeed, _accelerator),
        fix="Set DS_ACCELERATOR before DeepSpeed is imported.",
        at=(Moment.PLAN, Moment.ACT),
        milder="before apply, as the variable may be set until the launch",
        source=("deepspeed/accelerator/real_accelerator.py", "ST-3"),
    ),
    Rule(
        id="deepspeed.hpu-lazy",
        summary="HPU runs eagerly where optimizer state is offloaded.",
        check=under(DeepSpeed, _lazy),
        fix="Write `export PT_HPU_LAZY_MODE=0`, or leave the offload out.",
        source=("DS-26", "DS-27"),
    ),
    Rule(
        id="deepspeed.mesh",
        summary="Under DeepSpeed no mesh is asked for.",
        check=under(DeepSpeed, _mesh),
        fix="Leave mesh out.",
        overridable=False,
        source=("PC-10",),
        repair=_no_mesh,
    ),
    Rule(
        id="deepspeed.needs-optimizer",
        summary="ZeRO stages 1 and 2 have an optimizer whose state they shard.",
        check=flaws("needs-optimizer"),
        fix="Pass an optimizer, or write stage=0 or 3.",
        overridable=False,
        source=("DS-17", "DS-50", "G-39"),
    ),
    Rule(
        id="deepspeed.two-optimizers",
        summary="One place says which optimizer DeepSpeed steps.",
        check=flaws("two-optimizers"),
        fix="Leave one of them out.",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("DS-70", "DS-77"),
    ),
    Rule(
        id="deepspeed.two-schedulers",
        summary="One place says which scheduler is stepped.",
        check=flaws("two-schedulers"),
        fix="Leave one of them out.",
        overridable=False,
        source=("DS-60", "DS-64", "DS-76", "DS-62", "DS-66", "DS-80"),
    ),
    Rule(
        id="deepspeed.unknown-type",
        summary="The optimizer and scheduler sections name types that DeepSpeed or torch has.",
        check=flaws("unknown-type"),
        fix="Write a type that it knows.",
        overridable=False,
        source=("deepspeed/runtime/engine.py _configure_basic_optimizer", "pain 24"),
    ),
    Rule(
        id="deepspeed.removed-type",
        summary="The optimizer section names no type that DeepSpeed has removed.",
        lawful="an older release has it",
        check=flaws("removed-type"),
        fix="Write AdamW, or install a DeepSpeed that still has it.",
        overridable=False,
        source=("deepspeed/runtime/engine.py _configure_basic_optimizer",),
    ),
    Rule(
        id="deepspeed.schedule-alone",
        summary="A schedule has a section that it fills in, and an optimizer whose rate it sets.",
        check=flaws("schedule-alone"),
        fix="Add what is missing, or leave the schedule out.",
        overridable=False,
        source=("DS-52", "DS-55", "DS-69", "DS-73", "G-39"),
    ),
    Rule(
        id="deepspeed.scheduler-ticks",
        summary="A scheduler that DeepSpeed steps is stepped once per optimizer step.",
        check=flaws("scheduler-ticks"),
        fix="Write scheduler_ticks=1.",
        overridable=False,
        source=("W-16", "W-22", "pain 15"),
    ),
    Rule(
        id="deepspeed.untested-optimizer",
        summary="An optimizer that ZeRO was not tested with is allowed by nobody's false.",
        check=flaws("untested-optimizer"),
        fix="Write true, or use AdamW.",
        overridable=False,
        source=("DS-16",),
    ),
    Rule(
        id="deepspeed.optimizer-state",
        summary="An optimizer that is handed to ZeRO has no state yet.",
        check=with_engine(DeepSpeed, _state),
        fix="Pass a fresh optimizer, and load a checkpoint with the engine's load_checkpoint().",
        at=(Moment.PLAN, Moment.ACT),
        source=("G-4", "DS-25"),
    ),
    Rule(
        id="deepspeed.adagrad",
        summary="Under ZeRO torch's Adagrad has one group and no scheduler.",
        check=with_engine(DeepSpeed, _adagrad),
        fix="Use AdamW, or write stage=0.",
        source=("deepspeed/runtime/zero/stage_1_and_2.py initialize_optimizer_states", "pain 1"),
    ),
    Rule(
        id="scheduler.factory",
        summary="Outside DeepSpeed a scheduler is given, not a function that makes one.",
        check=_factory,
        fix="Make the scheduler from the optimizer that you pass, or write engine=DeepSpeed().",
        overridable=False,
        source=("DS-74", "G-38"),
    ),
)
