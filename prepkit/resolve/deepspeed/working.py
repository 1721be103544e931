"""The complete DeepSpeed config from prepkit's config, the user's JSON and the facts; or every reason against it.

Rules report the flaws, the planner takes the rest: what is checked is what is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from math import frexp

from attrs import frozen

from prepkit.config import FP8, FP16, MSAMP, ClipNorm, ClipValue, Config, Intent, Mixed
from prepkit.config.precision import PRECISIONS, DType, as_typed
from prepkit.facts import Facts
from prepkit.resolve.deepspeed import optimizer as tools
from prepkit.resolve.deepspeed.arguments import arguments
from prepkit.resolve.deepspeed.batch import batches, whole_batch
from prepkit.resolve.deepspeed.data import (
    DEFAULT_STAGE,
    NotJsonError,
    drop,
    look,
    parse,
    put,
    settings,
    tensor_parallel,
)
from prepkit.resolve.deepspeed.flaws import WHERE, Draft, Flaw
from prepkit.resolve.deepspeed.schema import left_over, tidy, within_limits
from prepkit.steps import Setting

_DEVICES = ("none", "cpu", "nvme")
_HIDDEN: dict[str, tuple[Callable[[int], int], str]] = {
    "reduce_bucket_size": (lambda size: size * size, "hidden size {0} x {0}"),
    "stage3_prefetch_bucket_size": (lambda size: 9 * size * size // 10, "9/10 x hidden size {0} x {0}"),
    "stage3_param_persistence_threshold": (lambda size: 10 * size, "10 x hidden size {0}"),
}
"""Key of ``zero_optimization`` to its formula (DS-20), in integers: DeepSpeed refuses 15099494.4 (pain 14)."""


@frozen(kw_only=True)
class WorkingConfig:
    """A DeepSpeed config with every value filled in, and what was said on the way."""

    settings: tuple[Setting, ...]
    """What ``deepspeed.initialize`` is given, as the leaves of its JSON, sorted by path."""
    notes: tuple[str, ...]
    """One text per value that was worked out: the value and the formula."""
    flaws: tuple[Flaw, ...]
    """What is wrong; each becomes a finding of the rule that it names."""
    stage: int
    """ZeRO stage; the default where a flaw says that there is no such stage."""
    optimizer: tools.Maker
    """Who makes the optimizer: the user, a section of the config, or nobody."""
    scheduler: tools.Stepper
    """Who steps the scheduler."""
    ranks: int
    """Data-parallel ranks."""
    convert: tools.Conversion | None
    """DeepSpeed's CPU form that takes the optimizer's place; None: it stays."""


def working_config(cfg: Config, facts: Facts) -> WorkingConfig:
    """Fills in every value that DeepSpeed needs. Pure; the user's JSON is text and stays as it is.

    Of the model it reads the hidden sizes alone: no fact that grows with it.
    """
    draft, stage = as_written(cfg, facts)
    _needs_optimizer(draft, stage)
    device = _offload(draft, stage)
    precision(draft, stage)
    _clip(draft)
    ranks = _ranks(draft)
    batches(draft, ranks)
    _hidden(draft)
    maker = tools.optimizer(draft)
    stepper = tools.scheduler(draft, maker)
    tools.ticks(draft, stepper)
    tools.untested(draft, maker, stage)
    convert = tools.convert(draft, maker, device)
    if draft.is_auto("zero_optimization.stage3_gather_16bit_weights_on_model_save"):
        put(draft.data, "zero_optimization.stage3_gather_16bit_weights_on_model_save", value=False)
    left_over(draft)
    return WorkingConfig(
        settings=settings(draft.data),
        notes=tuple(draft.notes),
        flaws=tuple(draft.flaws),
        stage=stage,
        optimizer=maker,
        scheduler=stepper,
        ranks=ranks,
        convert=convert,
    )


def as_written(cfg: Config, facts: Facts) -> tuple[Draft, int]:
    """The user's JSON with its keys, values and stage judged, and that stage. No fact is read: the text says it all."""
    draft = Draft(cfg=cfg, facts=facts, data={})
    try:
        draft.data = parse(draft.engine.config)
    except NotJsonError as error:
        draft.flaw("not-json", f"The text cannot be read: {error}.")
    tidy(draft)
    within_limits(draft)
    arguments(draft)
    whole_batch(draft)
    _turned_off(draft)
    return draft, _stage(draft)


def _turned_off(draft: Draft) -> None:
    """Says what is off because the JSON leaves it to a caller that is not here, and config says nothing of it."""
    low = [f"{name}.enabled" for name in ("bf16", "fp16") if draft.is_auto(f"{name}.enabled")]
    parts, fixes = [], []
    if low and draft.cfg.precision is None:
        named = " and ".join(f"`{path}`" for path in low)
        parts.append(f'{named} {"are" if len(low) > 1 else "is"} "auto", so that all is computed in float32')
        fixes.append("precision=BF16()")
    if draft.is_auto("gradient_clipping") and draft.cfg.clip is None and draft.cfg.intent is Intent.TRAINING:
        parts.append('`gradient_clipping` is "auto", so that gradients are not clipped')
        fixes.append("clip=ClipNorm(1.0)")
    if parts:
        what = f"Nothing fills in what the JSON leaves to its caller: {'; '.join(parts)}."
        draft.flaw("turned-off", what, f'Write {" and ".join(fixes)}, or what you mean in the place of "auto".')


def _stage(draft: Draft) -> int:
    path, asked = "zero_optimization.stage", draft.engine.stage
    if asked is not None:
        draft.settle(path, asked, "config.engine.stage")
    elif draft.data and "zero_optimization" not in draft.data:
        what = "Neither config.engine.stage nor a `zero_optimization` section says which ZeRO stage is meant."
        draft.flaw("no-stage", what, "Write DeepSpeed(stage=2) with the stage that you mean.", "config.engine.stage")
    elif draft.data and not draft.is_auto(path):
        draft.fill(path, 0, "DeepSpeed's own default of a section without a stage")
    draft.fill(path, DEFAULT_STAGE, "prepkit's default")
    stage = draft.get(path)
    if stage not in (0, 1, 2, 3):
        where = WHERE if asked is None else "config.engine.stage"
        draft.flaw("stage", f"There is no ZeRO stage {stage}.", "Write 0, 1, 2 or 3.", where)
        stage = DEFAULT_STAGE
    return int(stage)


def _needs_optimizer(draft: Draft, stage: int) -> None:
    if stage in (1, 2) and draft.facts.optimizer is None and not draft.cfg.optimizer and "optimizer" not in draft.data:
        what = f"ZeRO stage {stage} shards the state of an optimizer, and there is none."
        fix = "Pass an optimizer, or --optimizer adamw on the command line, or write optimizer=AdamW(...)."
        fix = "Write stage=0 or 3." if draft.cfg.intent is Intent.INFERENCE else fix
        draft.flaw("needs-optimizer", what, fix, "config.engine.stage")


def _offload(draft: Draft, stage: int) -> str:
    """Settles both devices; gives that of the optimizer's state."""
    asked = {"offload_optimizer": draft.engine.offload_optimizer, "offload_param": draft.engine.offload_param}
    for name, device in asked.items():
        path = f"zero_optimization.{name}.device"
        if device is not None and (device != "none" or look(draft.data, path) is not None):
            draft.settle(path, device, f"config.engine.{name}")
        if draft.is_auto(path):
            draft.fill(path, "none", "nothing is offloaded unless asked")
        chosen, least = draft.get(path, "none"), 3 if name == "offload_param" else 1
        where = f"config.engine.{name}" if device is not None else WHERE
        nvme = f"zero_optimization.{name}.nvme_path"
        if draft.is_auto(nvme):
            drop(draft.data, nvme)  # the text "none" of old templates would become a folder of that name
        if chosen not in _DEVICES:
            draft.flaw("offload", f"`{path}` is {chosen!r}.", f"Write one of {', '.join(_DEVICES)}.", where)
            drop(draft.data, path)
        elif chosen != "none" and stage < least:
            what = f"{name} to {chosen} begins at ZeRO stage {least}, and this is stage {stage}."
            draft.flaw("offload", what, f"Write stage={least} or higher, or leave {name} out.", where)
        elif chosen == "nvme" and not draft.get(nvme):
            draft.flaw(
                "offload", f"{name} to nvme has no folder.", f"Write `{nvme}` with a folder on that drive.", where
            )
    return str(draft.get("zero_optimization.offload_optimizer.device", "none"))


def _clip(draft: Draft) -> None:
    """One owner: config.clip; DeepSpeed does it (DS-12, pain 27). Its own default is 1.0, so none is written as 0.0."""
    limit, place = 0.0, "config.clip"
    match draft.cfg.clip:
        case None:
            pass
        case ClipNorm(max_norm=limit, norm_type=power):
            if power != 2.0:
                draft.flaw("clip", f"DeepSpeed clips by the 2-norm, not by the {power:g}-norm.", where=place)
        case ClipValue(max_value=most):
            draft.flaw("clip", f"DeepSpeed clips by norm, not each element to {most:g}.", where=place)
            place = "config.clip as a norm"
    limit = float(limit)
    draft.settle("gradient_clipping", limit, place, place if limit else "config.clip is None")


_SECOND = "zero_optimization.zero_hpz_partition_size"
"""Ranks of one group of ZeRO++, each with a whole second copy of what is sharded (deepspeed/utils/groups.py)."""


def _ranks(draft: Draft) -> int:
    """Data-parallel ranks: those that see different data (pain 4: world / tensor-parallel size; G-61)."""
    world, tensor = max(1, draft.facts.env.world_size), tensor_parallel(draft.engine)
    second = draft.get(_SECOND, 1) if draft.get("zero_optimization.stage") == 3 else 1
    if 1 < second < world and world % second:
        what = f"`{_SECOND}` = {second} does not divide the world size {world}: DeepSpeed raises."
        below = next(size for size in range(second, 0, -1) if world % size == 0)
        above = next(size for size in range(second, world + 1) if world % size == 0)
        draft.flaw("tensor-parallel", what, f"Write {below} or {above}, or start other processes.")
    if world % tensor:
        what = f"`tensor_parallel.autotp_size` = {tensor} does not divide the world size {world}."
        draft.flaw("tensor-parallel", what, "Write a size that divides it, or start other processes.")
        return world
    return _with_sequences(draft, world // tensor)


def _with_sequences(draft: Draft, ranks: int) -> int:
    """Data-parallel ranks where several share a sequence, as DeepSpeed counts them (deepspeed/runtime/config.py)."""
    together = draft.get("sequence_parallel_size", 1)
    if together < 2:
        return ranks
    what = f"`sequence_parallel_size` = {together}: prepkit cuts no sequences over ranks."
    draft.flaw("sequence-parallel", what)
    if ranks % together:
        what = f"`sequence_parallel_size` = {together} does not divide {ranks} ranks."
        draft.flaw("tensor-parallel", what, "Write a size that divides them, or start other processes.")
        return ranks
    return int(ranks // together)


def _hidden(draft: Draft) -> None:
    """Bucket sizes from the hidden size, where the user left them to us (DS-20, G-40)."""
    asked = [name for name in _HIDDEN if draft.is_auto(f"zero_optimization.{name}")]
    if not asked:
        return
    sizes = draft.facts.model.architecture.hidden_sizes
    for name in asked:
        path = f"zero_optimization.{name}"
        if not sizes:
            what = f'`{path}` is "auto", but the model\'s config names no hidden size (hidden_size, d_model …).'
            draft.flaw("hidden-size", what)
            drop(draft.data, path)
            continue
        formula, said = _HIDDEN[name]
        draft.fill(path, formula(max(sizes)), said.format(max(sizes)))


# --- precision -------------------------------------------------------------------------------------------------------


DTYPES: dict[DType, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""torch's names to DeepSpeed's (deepspeed/runtime/config.py ``DtypeEnum``)."""


def precision(draft: Draft, stage: int) -> None:
    """Switches the sections on and off, and says where the user's JSON asks for another precision."""
    asked = draft.cfg.precision
    if "bfloat16" in draft.data:
        draft.data.setdefault("bf16", draft.data.pop("bfloat16"))
    section = PRECISIONS[type(asked)].deepspeed_section
    for name in ("bf16", "fp16", "torch_autocast"):
        _switch(draft, f"{name}.enabled", on=name == section)
    if isinstance(asked, Mixed):
        _masters(draft, asked)
        _sums(draft, asked, stage)
    if isinstance(asked, FP16):
        _scale(draft, asked)
    if isinstance(asked, FP8) and isinstance(asked.backend, MSAMP):
        _msamp(draft, asked.backend, stage)


def _switch(draft: Draft, path: str, *, on: bool) -> None:
    """A section that is there is filled in, and one that is wanted made."""
    named = as_typed(draft.cfg.precision)
    said = look(draft.data, path)
    if draft.says(path) and said is not on:
        what = f"`{path}` is {str(said).lower()} in config.engine.config, and config.precision is {named}."
        fix = f'Say it in config.precision alone, and remove `{path}` or write "auto" there.'
        draft.flaw("precision", what, fix, "config.precision")
    elif on or draft.is_auto(path):
        draft.fill(path, on, f"config.precision is {named}")


def _masters(draft: Draft, asked: Mixed) -> None:
    low, section = PRECISIONS[type(asked)].compute_dtype, PRECISIONS[type(asked)].deepspeed_section
    path = f"{section}.{section}_master_weights_and_grads"
    if draft.says(path):
        draft.settle(path, not asked.master_weights, "config.precision.master_weights")
    elif not asked.master_weights:
        what = f"DeepSpeed keeps float32 copies of what it trains in {low}, unless `{path}` is true."
        fix = f"Leave master_weights at True, or write `{path}`: true as well."
        draft.flaw("master-weights", what, fix, "config.precision.master_weights")


def _sums(draft: Draft, asked: Mixed, stage: int) -> None:
    """Dtypes in which gradients travel and add up."""
    if stage == 0 and draft.cfg.intent is Intent.TRAINING:
        low = PRECISIONS[type(asked)].compute_dtype
        what = f"At stage 0 in {low} DeepSpeed takes a step with zero gradients first: decay and bias correction drift."
        draft.flaw("stage-0-16-bit", what, where="config.engine.stage")
    reduce = DTYPES[asked.reduce_dtype]
    draft.settle("communication_data_type", reduce, "config.precision.reduce_dtype")
    if asked.reduce_dtype == "float32" and stage > 0:
        draft.fill("data_types.grad_accum_dtype", reduce, "micro-batches add up as they are reduced")


def _msamp(draft: Draft, asked: MSAMP, stage: int) -> None:
    """MS-AMP's own section (msamp/deepspeed/runtime/config.py), which DeepSpeed itself does not know (DP-12, DP-31)."""
    if stage == 3:
        what = "MS-AMP shards optimizer state and gradients, and cannot shard parameters (ZeRO stage 3)."
        draft.flaw("msamp", what, "Write DeepSpeed(stage=2), or backend=TorchAO().", "config.engine.stage")
    device = draft.get("zero_optimization.offload_optimizer.device", "none")
    if device != "none":
        what = f"MS-AMP steps its optimizer where the parameters are, and optimizer state is offloaded to {device}."
        fix = "Leave offload_optimizer out, or write backend=TorchAO()."
        draft.flaw("msamp", what, fix, "config.engine.offload_optimizer")
    draft.settle("msamp.enabled", ours=True, place="config.precision")
    draft.settle("msamp.opt_level", asked.opt_level, "config.precision.backend.opt_level")


def _scale(draft: Draft, asked: FP16) -> None:
    """The loss scale, which DeepSpeed holds: powers of two, doubled and halved (deepspeed/runtime/fp16)."""
    if (asked.growth_factor, asked.backoff_factor) != (2.0, 0.5):
        what = (
            f"DeepSpeed doubles and halves the loss scale, not by {asked.growth_factor:g} and {asked.backoff_factor:g}."
        )
        draft.flaw("loss-scale", what, "Leave growth_factor and backoff_factor out.", "config.precision")
    half, power = frexp(asked.init_scale)
    if half != 0.5 or power < 1:
        what = f"DeepSpeed begins with a power of two, and init_scale is {asked.init_scale:g}."
        draft.flaw("loss-scale", what, "Write init_scale=65536.0.", "config.precision.init_scale")
        return
    draft.settle("fp16.loss_scale", 0, "config.precision", "scaled as overflows ask for")
    draft.settle("fp16.initial_scale_power", power - 1, "config.precision.init_scale")
    draft.settle("fp16.loss_scale_window", asked.growth_interval, "config.precision.growth_interval")
    draft.fill("fp16.hysteresis", 1, "each overflow lowers the scale, as under every other engine")
