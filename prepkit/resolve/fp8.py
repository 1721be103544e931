"""Which modules float8 replaces: sums on config and facts that rules and planner share."""

from __future__ import annotations

from typing import assert_never

from attrs import frozen

from prepkit.config import FP8, MSAMP, Config, TorchAO, TransformerEngine
from prepkit.facts import ModelFacts, ModuleFact, ParamFact
from prepkit.resolve.engines import traits
from prepkit.resolve.modules import matcher

MULTIPLE = 16
"""Float8 products take matrices whose sides are multiples of this (torchao ``float8_linear_utils``, TE ``Linear``)."""

LINEAR = ("Linear", "torch.nn.modules.linear")
NORM = ("LayerNorm", "torch.nn.modules.normalization")
"""Bare name and module of the classes that are replaced; subclasses do more than their base and stay."""

CONVERTED = ("torchao.float8", "transformer_engine", "msamp")
"""Python packages whose modules compute in float8 already."""


@frozen
class Linear:
    """One plain ``torch.nn.Linear`` below the root."""

    path: str
    weight: ParamFact
    tied: bool
    """The weight has another name too, which new parameters would lose."""

    @property
    def fits(self) -> bool:
        """Whether both sides are multiples of 16."""
        return len(self.weight.shape) == 2 and not any(side % MULTIPLE for side in self.weight.shape)


def linears(model: ModelFacts) -> tuple[Linear, ...]:
    """Every plain Linear below the root, in module order."""
    params = _params(model)
    tied = {name for group in model.ties for name in group}
    return tuple(
        Linear(module.path, params[weight], weight in tied)
        for module in model.modules
        if module.path and _is(model, module, LINEAR) and (weight := f"{module.path}.weight") in params
    )


def fp8_linears(cfg: Config, model: ModelFacts, every: tuple[Linear, ...]) -> tuple[str, ...]:
    """Paths of the Linears that the backend of ``config.precision`` replaces, in module order; none without FP8.

    ``every``: what ``linears`` says of the model. A Linear whose sides are no multiples of 16 stays as it is, and keeps
    no other from being replaced (accelerate then converts none, behaviour G-32).
    """
    if not isinstance(cfg.precision, FP8):
        return ()
    match cfg.precision.backend:
        case TorchAO(skip=skip):
            skipped = matcher(skip)
            return tuple(linear.path for linear in _candidates(cfg, every) if linear.fits and not skipped(linear.path))
        case TransformerEngine(skip=skip):
            if has_engine_layers(model):
                return ()
            skipped = matcher(skip)
            return tuple(
                linear.path for linear in every if linear.fits and not linear.tied and not skipped(linear.path)
            )
        case MSAMP():
            return tuple(path for path, kept in _every_linear(model) if not kept)
        case _:
            assert_never(cfg.precision.backend)


def _candidates(cfg: Config, every: tuple[Linear, ...]) -> tuple[Linear, ...]:
    assert isinstance(cfg.precision, FP8)
    assert isinstance(cfg.precision.backend, TorchAO)
    inner = every[1:-1] if cfg.precision.backend.keep_first_and_last else every
    return tuple(linear for linear in inner if not (linear.tied and all_gather(cfg)))


def kept_wide(model: ModelFacts) -> tuple[str, ...]:
    """Linears that MS-AMP has to be told to leave: it would tear a tied weight apart, and cannot read a packed one."""
    return tuple(path for path, kept in _every_linear(model) if kept)


def _every_linear(model: ModelFacts) -> tuple[tuple[str, bool], ...]:
    """Path of what MS-AMP takes, and whether it may not: every instance, subclasses included, whatever its size."""
    params, tied = _params(model), {name for group in model.ties for name in group}
    return tuple(
        (module.path, weight in tied or params[weight].cls != "Parameter")
        for module in model.modules
        if (weight := f"{module.path}.weight") in params and _is_linear(model, module)
    )


def norms(cfg: Config, model: ModelFacts) -> tuple[str, ...]:
    """Paths of the LayerNorms that TransformerEngine replaces: those over one dimension, with weight and bias.

    Its own always has a bias, which another would get as a parameter that nobody knows (behaviour H-31, SS-28).
    """
    if not isinstance(cfg.precision, FP8) or not isinstance(cfg.precision.backend, TransformerEngine):
        return ()
    backend, params = cfg.precision.backend, _params(model)
    if not backend.convert_norms or has_engine_layers(model):
        return ()
    tied = {name for group in model.ties for name in group}
    kept = matcher(backend.skip)
    return tuple(
        module.path
        for module in model.modules
        if module.path and _is(model, module, NORM) and not kept(module.path)
        for names in [(f"{module.path}.weight", f"{module.path}.bias")]
        if all(name in params and name not in tied and len(params[name].shape) == 1 for name in names)
    )


def all_gather(cfg: Config) -> bool:
    """Whether FSDP2 gathers the converted weights in float8 (behaviour SS-27: where it can, unless told otherwise)."""
    if not isinstance(cfg.precision, FP8) or not isinstance(cfg.precision.backend, TorchAO):
        return False
    backend = cfg.precision.backend
    if backend.float8_all_gather is not None:
        return backend.float8_all_gather
    return traits(cfg).takes_sharded and backend.recipe == "tensorwise"


def has_engine_layers(model: ModelFacts) -> bool:
    """Return whether the model was built with TransformerEngine's layers, which then only need their autocast."""
    return any(cls.module.partition(".")[0] == "transformer_engine" for cls in model.classes)


def _params(model: ModelFacts) -> dict[str, ParamFact]:
    """Every name of every parameter, those of tied ones included."""
    params = {param.name: param for param in model.params}
    return params | {name: params[names[0]] for names in model.ties for name in names if names[0] in params}


def _is(model: ModelFacts, module: ModuleFact, kind: tuple[str, str]) -> bool:
    cls = model.classes[module.cls]
    return (cls.name, cls.module) == kind


def _is_linear(model: ModelFacts, module: ModuleFact) -> bool:
    return _is(model, module, LINEAR) or "Linear" in model.classes[module.cls].mro
