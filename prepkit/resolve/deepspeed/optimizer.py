"""Optimizer and scheduler of a DeepSpeed config against those that are given: who makes what, and who steps it."""

from __future__ import annotations

from typing import Literal

from prepkit.config import OptimizerSpec
from prepkit.config.optimizer import OPTIMIZERS, options, specs
from prepkit.facts import OptimizerFacts
from prepkit.resolve.deepspeed.arguments import named
from prepkit.resolve.deepspeed.data import put
from prepkit.resolve.deepspeed.flaws import Draft

Maker = Literal["given", "section", "none"]
Stepper = Literal["handed over", "section", "outside"]
Conversion = tuple[Literal["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"], bool]

SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""DeepSpeed's own schedules: a scheduler of such a class is handed to DeepSpeed (DS-14, DS-57)."""
_TESTED = (("torch", "Adam"), ("torch", "AdamW"), ("torch", "Adagrad"), ("deepspeed", ""), ("apex", "FusedAdam"))
"""Package and class that ZeRO takes without ``zero_allow_untested_optimizer`` (deepspeed/runtime/zero/utils.py)."""
_CPU: dict[tuple[str, str], Conversion] = {
    ("torch", "AdamW"): ("DeepSpeedCPUAdam", True),
    ("torch", "Adam"): ("DeepSpeedCPUAdam", False),
    ("torch", "Adagrad"): ("DeepSpeedCPUAdagrad", False),
    ("bitsandbytes", "AdamW"): ("DeepSpeedCPUAdam", True),
    ("bitsandbytes", "AdamW32bit"): ("DeepSpeedCPUAdam", True),
    ("bitsandbytes", "Adagrad32bit"): ("DeepSpeedCPUAdagrad", False),
    ("bitsandbytes", "Lion32bit"): ("DeepSpeedCPULion", False),
}
"""Package and class to the CPU form that computes the same (H-40)."""
_SAME_ONLY_WITHOUT = ("amsgrad", "maximize", "lr_decay", "initial_accumulator_value")
"""Options that DeepSpeed's CPU forms do not have."""


def optimizer(draft: Draft) -> Maker:
    """Who makes the optimizer; fills in a section from the spec (DS-15, DS-21, DS-50 … DS-80)."""
    given, spec = draft.facts.optimizer, _spec(draft)
    if draft.get("optimizer") is None:
        return "none" if given is None and spec is None else "given"
    kind = _type(draft, "optimizer")
    if given is not None:
        what = f"The `optimizer` section asks for {kind}, and an optimizer `{given.name}` is given as well."
        draft.flaw("two-optimizers", what, "Remove the section, or do not pass an optimizer.")
    elif spec is not None:
        _fill(draft, spec, kind)
    if draft.says("optimizer.params.max_grad_norm"):
        limit = draft.get("optimizer.params.max_grad_norm")
        what = f"`optimizer.params.max_grad_norm` is {limit}: DeepSpeed refuses it there, it clips by itself."
        draft.flaw("max-grad-norm", what, f"Remove it, and write clip=ClipNorm({float(limit)}).")
    return "section"


def _type(draft: Draft, section: str) -> str:
    kind = draft.get(f"{section}.type", "")
    return named(section, kind) or str(kind) or "no type"


def _spec(draft: Draft) -> OptimizerSpec | None:
    """The optimizer that is asked for; of several the first, where a rule refuses that there are several."""
    return next(iter(specs(draft.cfg.optimizer)), None)


def _fill(draft: Draft, spec: OptimizerSpec, kind: str) -> None:
    known, asked = OPTIMIZERS[type(spec)].section_types, type(spec).__name__
    if not {kind, kind.lower()} & {*known}:
        what = f"The `optimizer` section asks for {kind}, and config.optimizer for {asked}."
        fix = f'Write `optimizer.type`: "{asked}", or leave one of them out.' if known else "Remove the section."
        draft.flaw("two-optimizers", what, fix)
        return
    if spec.names or spec.groups:
        what = f"The `optimizer` section makes one group of all parameters, and config.optimizer asks for {asked} with"
        draft.flaw("two-optimizers", f"{what} {'groups' if spec.groups else 'names'}.", "Remove the section.")
        return
    said = options(spec)
    for name in sorted(said, key=lambda name: name not in ("lr", "weight_decay")):  # those of every optimizer
        value = said[name]
        number = list(value) if isinstance(value, tuple) else value
        draft.settle(f"optimizer.params.{name}", number, f"config.optimizer.{name}")


def scheduler(draft: Draft, maker: Maker) -> Stepper:
    """Who makes and steps the scheduler; fills in a section from the schedule (DS-22, DS-50 … DS-80)."""
    given, numbers = draft.facts.scheduler, draft.engine.schedule
    if draft.get("scheduler") is None:
        if numbers is not None:
            what = "schedule=Schedule(...) fills in a `scheduler` section, and config.engine.config has none."
            fix = 'Add {"scheduler": {"type": "WarmupLR", "params": {...}}}, or leave schedule out.'
            draft.flaw("schedule-alone", what, fix, "config.engine.schedule")
        if given is None:
            return "outside"
        return "handed over" if given.factory or given.name in SCHEDULES else "outside"
    kind = _type(draft, "scheduler")
    if given is not None:
        what = f"The `scheduler` section asks for {kind}, and a scheduler `{given.name}` is given as well."
        draft.flaw("two-schedulers", what, "Remove the section, or do not pass a scheduler.")
    if maker == "none":
        what = f"The `scheduler` section asks for {kind}, and there is no optimizer whose learning rate it could set."
        draft.flaw("schedule-alone", what, "Pass an optimizer or add an `optimizer` section, or remove this one.")
    _numbers(draft)
    if draft.cfg.scheduler_ticks != 1:
        what = f"scheduler_ticks={draft.cfg.scheduler_ticks}, but DeepSpeed steps its own scheduler once."
        draft.flaw("scheduler-ticks", what, where="config.scheduler_ticks")
    return "section"


def ticks(draft: Draft, stepper: Stepper) -> None:
    """A scheduler that DeepSpeed steps is stepped once per optimizer step."""
    if stepper == "handed over" and draft.cfg.scheduler_ticks != 1:
        what = f"scheduler_ticks={draft.cfg.scheduler_ticks}, but DeepSpeed steps a scheduler that it is given once."
        draft.flaw("scheduler-ticks", what, where="config.scheduler_ticks")


def _numbers(draft: Draft) -> None:
    """Fills only what is ``auto``: the keys of one schedule are no keys of another."""
    numbers = draft.engine.schedule
    said: dict[str, tuple[object, str]] = {"warmup_min_lr": (numbers.min_lr if numbers else 0.0, "from zero")}
    if (rate := _rate(draft)) is not None:
        said["warmup_max_lr"] = rate
    place = "config.engine.schedule"
    if numbers is not None:
        said["warmup_min_lr"] = (numbers.min_lr, place)
        said["warmup_num_steps"] = (max(1, numbers.warmup_steps), f"{place}, at least 1")  # 0 is refused by WarmupLR
        if numbers.max_lr is not None:
            said["warmup_max_lr"] = (numbers.max_lr, place)
        if numbers.total_steps is not None:
            said["total_num_steps"] = (numbers.total_steps, f"{place}, in optimizer steps")
    for name, (value, why) in said.items():
        path = f"scheduler.params.{name}"
        if draft.is_auto(path):
            draft.fill(path, value, why)
        elif numbers is not None and draft.says(path) and name != "warmup_max_lr" and draft.get(path) != value:
            draft.settle(path, value, place)


def _rate(draft: Draft) -> tuple[float, str] | None:
    """Learning rate of the optimizer, and where it stands; None: nobody says."""
    if draft.facts.optimizer is not None:
        rates = [dict(group.options).get("lr") for group in draft.facts.optimizer.groups]
        known = [float(rate) for rate in rates if isinstance(rate, int | float)]
        return (max(known), "the optimizer's learning rate") if known else None
    if (spec := _spec(draft)) is not None:
        return spec.lr, "config.optimizer.lr"
    rate = draft.get("optimizer.params.lr")
    return (rate, "`optimizer.params.lr`") if isinstance(rate, int | float) else None


def untested(draft: Draft, maker: Maker, stage: int) -> None:
    """ZeRO wants to be told that an optimizer is not among those it was tested with (DS-16)."""
    name, package = _named(draft)
    if maker != "given" or stage == 0 or any(package == p and n in ("", name) for p, n in _TESTED):
        return
    path = "zero_allow_untested_optimizer"
    if draft.get(path) is False:
        what = f"`{path}` is false, and `{name}` is none of the optimizers that ZeRO was tested with."
        draft.flaw("untested-optimizer", what, f"Write true or remove `{path}`, or use AdamW.")
    draft.fill(path, value=True, why=f"ZeRO was not tested with {name}")


def _named(draft: Draft) -> tuple[str, str]:
    """Class and package of the optimizer that is given or will be made."""
    if draft.facts.optimizer is not None:
        return draft.facts.optimizer.name, draft.facts.optimizer.module.partition(".")[0]
    return type(_spec(draft)).__name__, "torch"


def convert(draft: Draft, maker: Maker, device: str) -> Conversion | None:
    """DeepSpeed's CPU form of an offloaded optimizer; a flaw where there is none that computes the same (G-34)."""
    if maker != "given" or device == "none":
        return None
    forced = "zero_force_ds_cpu_optimizer"
    name, package = _named(draft)
    own = draft.get(forced) is False or package == "deepspeed"
    if name in ("Adagrad", "Adagrad32bit", "DeepSpeedCPUAdagrad"):
        draft.fill(forced, value=False, why="DeepSpeed refuses its own CPU Adagrad otherwise")
    if own:
        return None
    conversion = _CPU.get((package, name))
    lost = _lost(draft.facts.optimizer) if draft.facts.optimizer else ()
    if conversion is None or lost:
        why = f"has `{', '.join(lost)}`, which DeepSpeed's does not know" if lost else "has no CPU form in DeepSpeed"
        what = f"Optimizer state is offloaded, and `{package}` `{name}` {why}; another would train otherwise."
        fix = f'Use torch.optim.AdamW, or write {{"{forced}": false}} to keep {name}, which is slower.'
        draft.flaw("offload-optimizer", what, fix, "optimizer" if draft.facts.optimizer else "config.optimizer")
        put(draft.data, forced, value=False)
        return None
    return conversion


def _lost(seen: OptimizerFacts) -> tuple[str, ...]:
    set_ = {name for group in seen.groups for name, value in group.options if value}
    return tuple(name for name in _SAME_ONLY_WITHOUT if name in set_)
