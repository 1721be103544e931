"""Laws of plans for float8 and for XLA."""

from __future__ import annotations

from hypothesis import given

from prepkit.config import FP8, XLA, Config, TorchAO
from prepkit.facts import Facts
from prepkit.plan import Plan
from prepkit.planner import plan
from prepkit.resolve.fp8 import MULTIPLE, linears
from prepkit.steps import (
    AutocastFP8Forward,
    ConvertFP8Linears,
    ConvertTransformerEngine,
    InitializeMSAMP,
    PrecomputeFloat8Scales,
)
from prepkit.testing import legal, plans

CONVERTS = ("ConvertFP8Linears", "ConvertTransformerEngine", "InitializeMSAMP")
AROUND = ("AutocastForward", "AutocastFP8Forward", "CheckpointModules", "CompileModules", "ShardUnits", "WrapDDP")

float8 = legal(float8=True)


def kinds(made: Plan) -> list[str]:
    return [type(one.step).__name__ for one in made.steps]


@given(float8)
def test_layers_are_replaced_before_anything_is_put_around_them(pair: tuple[Config, Facts]) -> None:
    names = kinds(plan(*pair).unwrap())
    for convert in (names.index(kind) for kind in CONVERTS if kind in names):
        assert not set(AROUND) & set(names[:convert])


@given(float8)
def test_exactly_one_library_takes_the_model(pair: tuple[Config, Facts]) -> None:
    made = plan(*pair).unwrap()
    assert sum(kind in kinds(made) for kind in CONVERTS) == isinstance(pair[0].precision, FP8)


@given(float8)
def test_every_converted_linear_fits_and_none_is_kept_back_by_another(pair: tuple[Config, Facts]) -> None:
    cfg, facts = pair
    every = linears(facts.model)
    for one in plan(cfg, facts).unwrap().steps:
        match one.step:
            case ConvertFP8Linears(paths=paths):
                assert isinstance(cfg.precision, FP8)
                assert isinstance(cfg.precision.backend, TorchAO)
                inner = every[1:-1] if cfg.precision.backend.keep_first_and_last else every
                fit = {e.path for e in inner if not any(side % MULTIPLE for side in e.weight.shape)}
                left = {path for path in fit if path in cfg.precision.backend.skip}
                tied = {e.path for e in every if e.tied}
                assert fit - left - tied <= set(paths) <= fit - left
            case ConvertTransformerEngine(linears=paths):
                assert set(paths) <= {e.path for e in every if e.fits and not e.tied}


@given(plans())
def test_scales_are_computed_ahead_only_for_weights_that_are_gathered_in_float8(made: Plan) -> None:
    gathered = any(isinstance(one.step, ConvertFP8Linears) and one.step.all_gather for one in made.steps)
    if any(isinstance(one.step, PrecomputeFloat8Scales) for one in made.steps):
        assert gathered
    if gathered:
        assert "ShardUnits" in kinds(made)


@given(plans())
def test_the_optimizer_follows_every_step_that_gives_the_model_other_parameters(made: Plan) -> None:
    new = (ConvertTransformerEngine,)
    if made.facts.optimizer is not None and any(isinstance(one.step, new) for one in made.steps):
        assert {"RebindOptimizer", "RegroupOptimizer"} & set(kinds(made))
    if isinstance(made.config.engine, XLA) and made.facts.optimizer is not None:
        assert kinds(made).index("MoveToXLA") < kinds(made).index("RebindOptimizer")


@given(float8)
def test_the_float8_autocast_is_outside_the_wrapper_and_inside_whole_compilation(pair: tuple[Config, Facts]) -> None:
    made = plan(*pair).unwrap()
    names = kinds(made)
    if AutocastFP8Forward.__name__ in names:
        here = names.index(AutocastFP8Forward.__name__)
        assert all(names.index(kind) < here for kind in ("AutocastForward", "WrapDDP") if kind in names)


@given(float8)
def test_scaled_weights_are_in_the_layout_where_ms_amp_takes_over(pair: tuple[Config, Facts]) -> None:
    made = plan(*pair).unwrap()
    scaled = {one.name for one in made.layout if one.cls == "ScalingParameter"}
    taken = {
        f"{path}.weight" for one in made.steps if isinstance(one.step, InitializeMSAMP) for path in one.step.linears
    }
    assert scaled == taken
