"""FSDP1 configs that suit drawn facts: every combination that its rules leave, found by asking them."""

from __future__ import annotations

from attrs import evolve
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit import config as c
from prepkit.config import FSDP1, Config
from prepkit.facts import Facts
from prepkit.findings import errors
from prepkit.rules import check, fsdp1, fsdp_units, ignored, mesh, model
from prepkit.testing.strategies.configs import fsdp1s
from prepkit.testing.strategies.facts import fitting_wraps

_RULES = (*fsdp1.RULES, *ignored.RULES, *mesh.RULES, *model.RULES, *fsdp_units.RULES)


def can_use_fsdp1(cfg: Config, facts: Facts) -> bool:
    """Return whether the root alone as a unit, with its parameters kept, is legal: then something is."""
    return not errors(check(evolve(cfg, engine=FSDP1(wrap=c.WrapRoot())), facts, _RULES))


def replaces_parameters(engine: c.Engine) -> bool:
    """Return whether the model's own parameters give way to flat ones, so that nothing can be compiled."""
    return isinstance(engine, FSDP1) and not engine.use_orig_params


def without_refused_accumulation(cfg: Config, facts: Facts) -> Config:
    """One micro-batch per step where torch cannot keep gradients in between."""
    return evolve(cfg, accumulation=1) if errors(check(cfg, facts, fsdp1.RULES)) else cfg


def legal_fsdp1(facts: Facts, base: Config) -> SearchStrategy[FSDP1]:
    """FSDP1 for this mesh, precision, device and intent, with arguments that no rule refuses for these facts."""
    cpu = "cpu" in (base.device, facts.env.device)
    shardings = [
        sharding
        for sharding in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
        if not errors(check(evolve(base, engine=FSDP1(sharding=sharding)), facts, mesh.RULES))
    ]
    switch = st.just(value=False) if cpu else st.booleans()
    return st.tuples(st.sampled_from(shardings), _arguments(base, facts)).flatmap(
        lambda drawn: fsdp1s(
            st.just(drawn[1][0]),
            (drawn[0],),
            st.just(drawn[1][1]),
            use_orig_params=st.just(drawn[1][2]),
            offload=switch,
            sync_module_states=switch,
        )
    )


_Arguments = tuple[c.Wrap, tuple[str, ...], bool]
_SAFE: _Arguments = (c.WrapRoot(), (), True)
"""What ``can_use_fsdp1`` has found legal: any other combination that a rule refuses gives way to it."""


def _arguments(base: Config, facts: Facts) -> SearchStrategy[_Arguments]:
    own = (*fsdp1.RULES, *ignored.RULES, *model.RULES, *fsdp_units.RULES)

    def legal(drawn: _Arguments) -> _Arguments:
        wrap, left_out, original = drawn
        engine = FSDP1(wrap=wrap, ignored=left_out, use_orig_params=original)
        return _SAFE if errors(check(evolve(base, engine=engine), facts, own)) else drawn

    patterns = st.sampled_from(((), (), ("head",), ("norm", "embed")))
    return st.tuples(st.sampled_from(fitting_wraps(facts.model)), patterns, st.booleans()).map(legal)
