"""Strategies for the DeepSpeed engine: anything that its fields allow, and what suits given facts."""

from __future__ import annotations

import json
from typing import Any, Literal

from attrs import evolve
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit.config import FP16, AdamW, ClipNorm, Config, DeepSpeed, Intent, Mixed, Precision, Schedule
from prepkit.facts import Facts
from prepkit.findings import errors
from prepkit.resolve.units import scalars
from prepkit.rules import check, deepspeed

_DEVICES = ("none", "cpu", "nvme")
_WHICH: tuple[Literal["smallest", "largest"], ...] = ("smallest", "largest")
_RULES = st.sampled_from(_WHICH)
_AUTO = ("auto", "auto", 4, 2.5, "4", True)


def _sections() -> SearchStrategy[dict[str, Any]]:
    """User JSON in which anything may be missing, ``auto``, wrong or misspelt."""
    value = st.sampled_from(_AUTO)
    device = st.fixed_dictionaries({}, optional={"device": st.sampled_from((*_DEVICES, "auto", "gpu"))})
    zero = st.fixed_dictionaries(
        {},
        optional={
            "stage": st.sampled_from((0, 1, 2, 3, 7, "auto")),
            "reduce_bucket_size": st.sampled_from((5e8, "auto", 0.5)),
            "stage3_max_live_parameters": value,
            "offload_optimizer": device,
            "offload_param": device,
            "cpu_offload": st.booleans(),
        },
    )
    optimizer = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(("AdamW", "SGD", "Lamb", "OneBitAdam")),
            "params": st.fixed_dictionaries({}, optional={"lr": value, "max_grad_norm": value}),
        },
    )
    switched = st.fixed_dictionaries({}, optional={"enabled": st.sampled_from((True, False, "auto", "true"))})
    schedule = st.fixed_dictionaries(
        {"type": st.sampled_from(("WarmupLR", "StepLR"))},
        optional={"params": st.fixed_dictionaries({}, optional={"warmup_num_steps": value, "total_num_steps": value})},
    )
    return st.fixed_dictionaries(
        {},
        optional={
            "train_batch_size": value,
            "train_micro_batch_size_per_gpu": value,
            "gradient_accumulation_steps": value,
            "gradient_clipping": st.sampled_from((0.0, 1.0, "auto")),
            "gradient_clipp1ng": st.just(1.0),
            "zero_optimization": zero | st.booleans(),
            "zero_allow_untested_optimizer": st.booleans(),
            "zero_force_ds_cpu_optimizer": st.booleans(),
            "bf16": switched,
            "fp16": switched,
            "optimizer": optimizer,
            "scheduler": schedule,
            "tensor_parallel": st.fixed_dictionaries({"autotp_size": st.sampled_from((0, 2, 3))}),
            "amp": st.just({}),
        },
    )


def schedules() -> SearchStrategy[Schedule]:
    """Every field varied."""
    rate = st.sampled_from((0.0, 0.5))
    total = st.sampled_from((7, None, 9))
    most = st.sampled_from((0.5, None, 0.25))
    return st.builds(Schedule, warmup_steps=st.integers(0, 3), total_steps=total, min_lr=rate, max_lr=most)


def deepspeeds() -> SearchStrategy[DeepSpeed]:
    """Right or wrong, with JSON that is none now and then."""
    device = st.sampled_from((None, *_DEVICES))
    return st.builds(
        DeepSpeed,
        stage=st.sampled_from((None, None, 0, 1, 2, 3, 4)),
        offload_optimizer=device,
        offload_param=device,
        micro_batch=st.sampled_from((None, 0, 2, 4)),
        micro_batch_of=_RULES,
        leaf_modules=st.sampled_from(((), ("Block",), ("Blok", "Linear"))),
        schedule=st.none() | schedules(),
        config=_sections().map(json.dumps) | st.sampled_from(("{}", "[1]", '{"a": 1, "a": 2}', "{")),
    )


@st.composite
def facts_for_deepspeed(draw: st.DrawFn, facts: Facts) -> Facts:
    """The same facts with a fresh optimizer of torch's and parameters in float32, which few drawn ones have."""
    model, optimizer = facts.model, facts.optimizer
    params = tuple(
        evolve(p, dtype="float32" if p.dtype in ("float16", "bfloat16") else p.dtype, shape=p.shape or (1,))
        for p in model.params
    )
    if optimizer is not None:
        optimizer = evolve(optimizer, stateful=(), keeps_own_list=False, module="torch.optim.adamw")
    scheduler = facts.scheduler if draw(st.booleans()) else None  # it leaves no room for a section
    libraries = dict(facts.env.libraries) | {"deepspeed": "0.19.8"}
    env = evolve(facts.env, libraries=tuple(sorted(libraries.items())))
    return evolve(facts, model=evolve(model, params=params), optimizer=optimizer, scheduler=scheduler, env=env)


def can_use_deepspeed(facts: Facts, precision: Precision) -> bool:
    """Whether some DeepSpeed config suits these facts: stored in float32 or cast to 16 bits, a fresh optimizer."""
    optimizer = facts.optimizer
    return (
        (
            isinstance(precision, Mixed)
            or not any(param.dtype in ("float16", "bfloat16") for param in facts.model.params)
        )
        and not scalars(facts.model)
        and all(loader.batch_size for loader in facts.loaders)
        and not (optimizer and (optimizer.stateful or optimizer.keeps_own_list))
    )


@st.composite
def legal_deepspeeds(draw: st.DrawFn, facts: Facts, trains: bool) -> DeepSpeed:
    """An engine that suits the facts. With a schedule, a section for it stands in the JSON."""
    stage = draw(st.integers(0, 3)) if trains else 3
    where: tuple[Literal["none", "cpu"] | None, ...] = (None, "none", "cpu")
    offload = draw(st.sampled_from(where)) if trains and stage > 0 else None
    sizes = [loader.batch_size for loader in facts.loaders if loader.batch_size]
    settings: dict[str, Any] = {
        "zero_optimization": {"stage": draw(st.sampled_from((stage, "auto"))), "overlap_comm": False}
    }
    explicit = settings["zero_optimization"]["stage"] == "auto" or draw(st.booleans())
    schedule = None
    if trains and facts.scheduler is None and draw(st.sampled_from((True, True, True, False))):
        schedule = draw(schedules())
        params = {"warmup_num_steps": "auto", "warmup_min_lr": "auto"}
        settings["scheduler"] = {"type": "WarmupLR", "params": params}
    return DeepSpeed(
        stage=stage if explicit else None,
        offload_optimizer=offload,
        offload_param=draw(st.sampled_from((None, "none", "cpu"))) if stage == 3 else None,
        micro_batch=draw(st.sampled_from(sizes) | st.none()) if sizes else draw(st.integers(1, 8)),
        micro_batch_of=draw(_RULES),
        leaf_modules=draw(st.sampled_from(((), ("Linear",)))),
        schedule=schedule,
        config=json.dumps(settings),
    )


def completed_for_deepspeed(cfg: Config, facts: Facts, draw: st.DrawFn) -> Config:
    """The rest of a drawn config as DeepSpeed takes it: the 2-norm, one tick of the scheduler, float32 masters."""
    limit = draw(st.none() | st.floats(0.125, 8.0))
    if cfg.intent is Intent.TRAINING and facts.optimizer is None and not isinstance(cfg.optimizer, AdamW):
        cfg = evolve(cfg, optimizer=AdamW())
    if isinstance(cfg.precision, Mixed):
        cfg = evolve(cfg, precision=evolve(cfg.precision, master_weights=True))
    if isinstance(cfg.precision, FP16):
        scale = 2.0 ** draw(st.integers(0, 24))
        cfg = evolve(cfg, precision=evolve(cfg.precision, init_scale=scale, growth_factor=2.0, backoff_factor=0.5))
    if errors(check(cfg, facts, deepspeed.RULES)):  # nothing is trained before the first leaf
        assert isinstance(cfg.engine, DeepSpeed), "only such configs are fitted"
        cfg = evolve(cfg, engine=evolve(cfg.engine, leaf_modules=()))
    return evolve(cfg, mesh=None, clip=None if limit is None else ClipNorm(limit), scheduler_ticks=1)
