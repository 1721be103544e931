"""Strategies for float8: everything that the types allow, and what given facts allow."""

from __future__ import annotations

from functools import cache
from typing import get_args

from attrs import evolve
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit import config as c
from prepkit.config import BF16, DDP, FP8, FSDP2, XLA, Config, Intent, Single
from prepkit.facts import Facts
from prepkit.resolve.fp8 import linears
from prepkit.resolve.resolved import Resolved
from prepkit.rules.fp8 import ADA, BLACKWELL
from prepkit.testing.tiny import tiny_optimizer


@cache
def _skips() -> SearchStrategy[tuple[str, ...]]:
    return st.sampled_from(((), ("layers.0.attn",), ("head", "no.*")))


@cache
def fp8_backends() -> SearchStrategy[c.FP8Backend]:
    """Every float8 library with all its options."""
    recipes = st.sampled_from(("tensorwise", "rowwise", "rowwise_with_gw_hp"))
    names = ("pad_inner_dim", "precompute_scales", "keep_first_and_last", "emulate")
    flags = {name: st.booleans() for name in names}
    gather = st.sampled_from((None, True, False))
    torchao = st.builds(c.TorchAO, recipe=recipes, float8_all_gather=gather, skip=_skips(), **flags)
    msamp = st.builds(c.MSAMP, opt_level=st.sampled_from(("O1", "O2")))
    return torchao | delayed(_skips()) | blockwise(_skips()) | msamp


_FORMATS = st.sampled_from(("HYBRID", "E4M3"))
_MARGINS = st.integers(0, 2)


def delayed(skips: SearchStrategy[tuple[str, ...]]) -> SearchStrategy[c.TransformerEngine]:
    """TransformerEngine with the recipe that every GPU with float8 knows, and all its options."""
    return _engine_of_nvidia(
        skips,
        st.builds(
            c.DelayedScaling,
            margin=_MARGINS,
            fp8_format=_FORMATS,
            interval=st.integers(1, 2),
            amax_history_len=st.sampled_from((16, 1024)),
            amax_compute_algo=st.sampled_from(("max", "most_recent")),
            override_linear_precision=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        ),
    )


def blockwise(skips: SearchStrategy[tuple[str, ...]]) -> SearchStrategy[c.TransformerEngine]:
    """TransformerEngine with one scale per 32 values."""
    return _engine_of_nvidia(skips, st.builds(c.MXFP8BlockScaling, margin=_MARGINS, fp8_format=_FORMATS))


def _engine_of_nvidia(
    skips: SearchStrategy[tuple[str, ...]], recipe: SearchStrategy[c.DelayedScaling | c.MXFP8BlockScaling]
) -> SearchStrategy[c.TransformerEngine]:
    flags = {name: st.booleans() for name in ("autocast_during_eval", "convert_norms")}
    return st.builds(c.TransformerEngine, recipe=recipe, skip=skips, **flags)


@st.composite
def facts_for_fp8(draw: st.DrawFn, facts: Facts) -> Facts:
    """The facts with sizes that are multiples of 16, often with a new optimizer on a GPU that multiplies in float8."""
    params = tuple(
        evolve(param, shape=tuple(-(-size // 16) * 16 for size in param.shape)) for param in facts.model.params
    )
    model = evolve(facts.model, params=params)
    device = draw(st.sampled_from(("cuda", "cuda", "cuda", "cpu")))
    capability = draw(st.sampled_from((None, (10, 0), (9, 0), (8, 9)))) if device == "cuda" else None
    optimizer = facts.optimizer
    if any(param.requires_grad for param in params) and draw(st.booleans()):
        optimizer = tiny_optimizer(model)
    env = evolve(facts.env, device=device, capability=capability, bf16=None)
    return evolve(facts, model=model, optimizer=optimizer, env=env)


def legal_fp8(cfg: Config, facts: Facts) -> SearchStrategy[Config]:
    """The same config with float8 in the place of BF16, where library, device, engine, model and optimizer allow it."""
    precision = cfg.precision
    if not isinstance(precision, BF16) or isinstance(cfg.engine, XLA):
        return st.just(cfg)
    wide = FP8(
        reduce_dtype=precision.reduce_dtype,
        output_dtype=precision.output_dtype,
        master_weights=precision.master_weights,
    )

    def applied(backend: c.FP8Backend) -> Config:
        clip = None if isinstance(backend, c.MSAMP) else cfg.clip
        return evolve(cfg, precision=evolve(wide, backend=backend), clip=clip)

    def kept(drawn: Config) -> Config:
        return drawn if Resolved(cfg=drawn, facts=facts).fp8_linears else cfg

    return st.one_of([backends.map(applied).map(kept) for backends in _fp8_backends(cfg, facts)])


def _fp8_backends(cfg: Config, facts: Facts) -> list[SearchStrategy[c.FP8Backend]]:
    """Strategies for the libraries that these facts allow; torchao can always emulate."""
    cpu, capability = cfg.device == "cpu" or facts.env.device == "cpu", facts.env.capability
    real = not cpu and (capability is None or capability >= ADA)
    recipes = ("tensorwise", "rowwise", *(() if cpu else ("rowwise_with_gw_hp",)))
    layers = linears(facts.model)
    skips = st.sampled_from(((), ("head",)) if len(layers) > 1 else ((),))

    def torchao(recipe: str) -> SearchStrategy[c.FP8Backend]:
        gathers = isinstance(cfg.engine, FSDP2) and recipe == "tensorwise"
        flags = {name: st.booleans() for name in ("pad_inner_dim", "precompute_scales")}
        return st.builds(
            c.TorchAO,
            recipe=st.just(recipe),
            float8_all_gather=st.sampled_from((None, False, *([True] if gathers else []))),
            emulate=st.sampled_from((True, *([False] if real else []))),
            skip=skips,
            keep_first_and_last=st.sampled_from((False, True) if len(layers) > 2 else (False,)),
            **flags,
        )

    choices: list[SearchStrategy[c.FP8Backend]] = [st.sampled_from(recipes).flatmap(torchao)]
    if real and (cfg.intent is Intent.INFERENCE or facts.optimizer or cfg.optimizer):
        choices.append(delayed(skips))
        choices += [blockwise(skips)] if capability is None or capability >= BLACKWELL else []
    fresh = facts.optimizer and facts.optimizer.module.startswith("torch.") and not facts.optimizer.stateful
    if real and fresh and isinstance(cfg.engine, Single | DDP):
        choices += [st.just(c.MSAMP(opt_level="O1")), st.just(c.MSAMP(opt_level="O2"))] * 4  # few facts suit it
    return choices


def fp8s(backends: SearchStrategy[c.FP8Backend], *, invalid: bool = True) -> SearchStrategy[FP8]:
    """FP8 with these libraries; ``invalid`` adds float16 beside bfloat16."""
    dtype = st.sampled_from(get_args(c.DType) if invalid else ("float32", "bfloat16"))
    return st.builds(FP8, backend=backends, reduce_dtype=dtype, output_dtype=dtype, master_weights=st.booleans())
