"""DeepSpeed against the objects around it: optimizer, scheduler, model, environment."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import evolve

from prepkit.config import (
    Config,
    DeepSpeed,
    KeepLoaders,
    Mixed,
    NoCompile,
)
from prepkit.deepspeed_config import work_out
from prepkit.deepspeed_json import look, said, stage, tensor_parallel
from prepkit.facts import Env, Facts, ModelFacts
from prepkit.findings import Severity
from prepkit.rules.deepspeed import flaws
from prepkit.rules.rule import Hit, Rule
from prepkit.rules.text import at, count, did_you_mean, some

KNOWN_LEAVES = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
"""Classes that DeepSpeed marks by itself (deepspeed/runtime/zero/leaf_module_config.py)."""
_FOR_DEVICE = {"mlu": (0, 15, 2), "musa": (0, 14, 3)}


def _version(env: Env, library: str) -> tuple[int, ...] | None:
    """The version of a library; None where it is not known."""
    text = env.torch if library == "torch" else dict(env.libraries).get(library, "")
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else None


def _older(env: Env, least: tuple[int, ...]) -> bool:
    found = _version(env, "deepspeed")
    return found is not None and found < least


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _installed(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not isinstance(cfg.engine, DeepSpeed):
        return
    env = facts.env
    if env.libraries and _version(env, "deepspeed") is None:
        yield Hit("env.libraries", "DeepSpeed is not installed.")
    least = [("", _FOR_DEVICE.get(env.device, (0, 9, 3)))]
    if cfg.engine.leaf_modules:
        least.append(("leaf_modules ", (0, 14, 0)))
    if tensor_parallel(cfg.engine) > 1:
        least.append(("tensor_parallel.autotp_size ", (0, 16, 4)))
    if not isinstance(cfg.compile, NoCompile):
        least.append(("config.compile ", (0, 14, 4)))
    for name, version in least:
        if _older(env, version):
            here = dict(env.libraries)["deepspeed"]
            what = f"DeepSpeed {here} is older than {_dotted(version)}, which {name or 'prepkit '}needs."
            yield Hit("env.libraries", what, f"Write `pip install 'deepspeed>={_dotted(version)}'`.")


def _accelerator(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not isinstance(cfg.engine, DeepSpeed):
        return
    device = cfg.device or facts.env.device
    forced = dict(facts.env.variables).get("DS_ACCELERATOR")
    if forced not in (None, device):
        what = f"DS_ACCELERATOR={forced} is set, and the plan computes on {device}."
        yield Hit("env.variables.DS_ACCELERATOR", what, f"Write `export DS_ACCELERATOR={device}`, or unset it.")
    elif forced is None and device == "cpu" != facts.env.device:
        what = f"DeepSpeed takes the {facts.env.device} that it finds, and the plan computes on the CPU."
        yield Hit("config.device", what, "Write `export DS_ACCELERATOR=cpu` before DeepSpeed is imported.")


def _lazy(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not isinstance(cfg.engine, DeepSpeed) or (cfg.device or facts.env.device) != "hpu":
        return
    if work_out(cfg, facts).convert and dict(facts.env.variables).get("PT_HPU_LAZY_MODE", "1") == "1":
        yield Hit("env.variables.PT_HPU_LAZY_MODE", "Optimizer state cannot be offloaded while HPU runs lazily.")


def _mesh(cfg: Config, _: Facts) -> Iterator[Hit]:
    if isinstance(cfg.engine, DeepSpeed) and cfg.mesh is not None:
        asked = f"Mesh(replicate={cfg.mesh.replicate}, shard={cfg.mesh.shard})"
        yield Hit("config.mesh", f"{asked} is asked for, and DeepSpeed lays out the ranks by itself.")


def _no_mesh(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, mesh=None) if isinstance(cfg.engine, DeepSpeed) else cfg


def _state(cfg: Config, facts: Facts) -> Iterator[Hit]:
    held = facts.optimizer.stateful if facts.optimizer else ()
    if isinstance(cfg.engine, DeepSpeed) and held and (stage(cfg.engine) or isinstance(cfg.precision, Mixed)):
        what = (
            f"It has state for {count(len(held), 'parameter')}, which DeepSpeed would drop: it steps shards of its own."
        )
        yield Hit("optimizer", what)


def _adagrad(cfg: Config, facts: Facts) -> Iterator[Hit]:
    held = facts.optimizer
    if not isinstance(cfg.engine, DeepSpeed) or held is None or not stage(cfg.engine):
        return
    torchs = held.name == "Adagrad" and held.module.startswith("torch") and work_out(cfg, facts).convert is None
    if torchs and (facts.scheduler is not None or len(held.groups) > 1):
        lost = "the scheduler would go on with the old one" if facts.scheduler else "its groups would get one rate"
        yield Hit("optimizer", f"ZeRO makes torch's Adagrad anew from the options it was made with, and {lost}.")


def _factory(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if facts.scheduler and facts.scheduler.factory and not isinstance(cfg.engine, DeepSpeed):
        what = (
            f"`{facts.scheduler.name}` makes a scheduler, and {type(cfg.engine).__name__} wants the scheduler itself."
        )
        yield Hit("scheduler", what)


def _tensor_loaders(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not isinstance(cfg.engine, DeepSpeed) or not facts.loaders or isinstance(cfg.loaders, KeepLoaders):
        return
    if (size := tensor_parallel(cfg.engine)) > 1:
        what = f"{size} ranks hold one model together and must read the same samples, not parts of their own."
        yield Hit("config.loaders", what)


def _keep(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, loaders=KeepLoaders())


def _leaves(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not isinstance(cfg.engine, DeepSpeed):
        return
    names = {cls.name for cls in facts.model.classes}
    for name in cfg.engine.leaf_modules:
        if name not in names:
            fix = f"Write the name of a class in the model, without its module.{did_you_mean(name, names)}"
            yield Hit("config.engine.leaf_modules", f"No module of the model is a `{name}`.", fix)


def _known_leaves(cfg: Config, facts: Facts) -> Config:
    if not isinstance(cfg.engine, DeepSpeed):
        return cfg
    names = {cls.name for cls in facts.model.classes}
    kept = tuple(name for name in cfg.engine.leaf_modules if name in names)
    return evolve(cfg, engine=evolve(cfg.engine, leaf_modules=kept))


def experts(model: ModelFacts) -> tuple[str, ...]:
    """Classes of the modules that hold a list called ``experts``."""
    at_path = {module.path: model.classes[module.cls].name for module in model.modules}
    holders = (path.rpartition(".")[0] for path in at_path if path.rpartition(".")[2] == "experts")
    return tuple(dict.fromkeys(at_path[path] for path in holders if path in at_path))


def _experts(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if not isinstance(cfg.engine, DeepSpeed) or stage(cfg.engine) != 3 or cfg.engine.leaf_modules:
        return
    if look(said(cfg.engine), "zero_optimization.leaf_module") is not None:
        return
    unmarked = tuple(name for name in experts(facts.model) if name not in KNOWN_LEAVES)
    if unmarked:
        what = f"ZeRO-3 and data-dependent experts in {some(unmarked)}: ranks that skip an expert wait for ever."
        named = ", ".join(f'"{name}"' for name in unmarked)
        yield Hit("config.engine.leaf_modules", what, f"Write leaf_modules=({named},).")


def _mark(cfg: Config, facts: Facts) -> Config:
    if not isinstance(cfg.engine, DeepSpeed):
        return cfg
    return evolve(cfg, engine=evolve(cfg.engine, leaf_modules=experts(facts.model)))


def _zero_init(cfg: Config, facts: Facts) -> Iterator[Hit]:
    if isinstance(cfg.engine, DeepSpeed) and stage(cfg.engine) == 3:
        return
    empty = tuple(param.name for param in facts.model.params if param.cls == "ZeroParameter")
    if empty:
        here = f"stage {stage(cfg.engine)}" if isinstance(cfg.engine, DeepSpeed) else type(cfg.engine).__name__
        what = f"{count(len(empty), 'parameter')} built under zero.Init: empty until gathered, which {here} never does."
        yield Hit(at(empty[0]), what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="deepspeed.installed",
        summary="DeepSpeed is installed, and new enough for what is asked of it.",
        check=_installed,
        fix="Write `pip install 'prepkit[deepspeed]'`.",
        source=("ST-45", "DS-3", "DS-19", "DS-30"),
    ),
    Rule(
        id="deepspeed.accelerator",
        summary="DeepSpeed works on the device of the plan.",
        check=_accelerator,
        fix="Set DS_ACCELERATOR before DeepSpeed is imported.",
        severity=Severity.WARNING,  # the variable may be set by launch time; apply refuses if it is not
        source=("deepspeed/accelerator/real_accelerator.py", "ST-3"),
    ),
    Rule(
        id="deepspeed.hpu-lazy",
        summary="HPU runs eagerly where optimizer state is offloaded.",
        check=_lazy,
        fix="Write `export PT_HPU_LAZY_MODE=0`, or leave the offload out.",
        source=("DS-26", "DS-27"),
    ),
    Rule(
        id="deepspeed.mesh",
        summary="Under DeepSpeed no mesh is asked for.",
        check=_mesh,
        fix="Leave mesh out.",
        overridable=False,
        source=("PC-10",),
        repair=_no_mesh,
    ),
    Rule(
        id="deepspeed.tensor-parallel-loaders",
        summary="Ranks that hold one model together read the same samples.",
        check=_tensor_loaders,
        fix="Write loaders=KeepLoaders(), and split the data by data-parallel rank.",
        source=("DS-4", "G-47", "G-61"),
        repair=_keep,
    ),
    Rule(
        id="deepspeed.zero-init",
        summary="A model built under zero.Init is prepared with ZeRO stage 3.",
        check=_zero_init,
        fix="Write engine=DeepSpeed(stage=3), or build the model without zero.Init.",
        overridable=False,
        source=("pain 37",),
    ),
    Rule(
        id="deepspeed.leaf-modules",
        summary="Every leaf class is a class of the model.",
        check=_leaves,
        fix="Write the name of a class in the model.",
        overridable=False,
        source=("DS-19", "K-DS12"),
        repair=_known_leaves,
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
        summary="The optimizer and scheduler sections name types that DeepSpeed knows.",
        check=flaws("unknown-type"),
        fix="Write a type that it knows.",
        overridable=False,
        source=("deepspeed/runtime/engine.py _configure_basic_optimizer", "pain 24"),
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
        check=_state,
        fix="Pass a fresh optimizer, and load a checkpoint with the engine's load_checkpoint().",
        source=("G-4", "DS-25"),
    ),
    Rule(
        id="deepspeed.adagrad",
        summary="Under ZeRO torch's Adagrad has one group and no scheduler.",
        check=_adagrad,
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
    Rule(
        id="deepspeed.experts",
        summary="ZeRO-3 gathers modules with data-dependent experts whole.",
        check=_experts,
        fix="Name the class in leaf_modules.",
        severity=Severity.WARNING,
        source=("DS-19", "pain 31"),
        repair=_mark,
    ),
)
"""Reporting order: the environment, the model, the optimizer, the scheduler; then warnings."""
