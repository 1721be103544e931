"""Float8: requirements of the library, the device, the model, the engine and the optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, assert_never

from attrs import evolve

from prepkit.config import (
    BF16,
    FP8,
    MSAMP,
    Config,
    Intent,
    MXFP8BlockScaling,
    TorchAO,
    TransformerEngine,
)
from prepkit.config.precision import FP8Backend
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.resolve.fp8 import CONVERTED, MULTIPLE, has_engine_layers
from prepkit.resolve.modules import matcher
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Moment, Rule

OLDEST_TORCHAO = (0, 6, 1)
ADA = (8, 9)
"""First CUDA compute capability that multiplies in float8."""
BLACKWELL = (10, 0)
"""First one that scales blocks of 32 (TransformerEngine ``check_mxfp8_support``)."""
INSTALL = {
    "torchao": "torchao",
    "transformer_engine": "'transformer_engine[pytorch]'",
    "msamp": "git+https://github.com/Azure/MS-AMP",
}
"""What to give to pip for each library."""
_BACKEND = "config.precision.backend"
_LAUNCHERS = {"TE": TransformerEngine, "MSAMP": MSAMP, "AO": TorchAO}


def backend(cfg: Config) -> FP8Backend | None:
    """The library that is asked for; None without float8."""
    return cfg.precision.backend if isinstance(cfg.precision, FP8) else None


def library(backend: FP8Backend) -> str:
    """Its name among the facts' libraries."""
    match backend:
        case TorchAO():
            return "torchao"
        case TransformerEngine():
            return "transformer_engine"
        case MSAMP():
            return "msamp"
        case _:
            assert_never(backend)


def knows_libraries(facts: Facts) -> bool:
    """Return whether the facts say what is installed; those of a declared cluster may not."""
    return bool(facts.env.libraries) or not facts.env.assumed


def _missing(resolved: Resolved) -> Iterator[Hit]:
    if (asked := backend(resolved.cfg)) is None or not knows_libraries(resolved.facts):
        return
    name = library(asked)
    if name not in dict(resolved.facts.env.libraries):
        fix = f"Write `pip install {INSTALL[name]}`, or precision=BF16()."
        yield Hit(_BACKEND, f"{type(asked).__name__} needs `{name}`, which is not installed.", fix)


def _old(resolved: Resolved) -> Iterator[Hit]:
    version = dict(resolved.facts.env.libraries).get("torchao", "")
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    old = numbers is not None and tuple(int(part or 0) for part in numbers.groups()) < OLDEST_TORCHAO
    if isinstance(backend(resolved.cfg), TorchAO) and old:
        yield Hit(_BACKEND, f"torchao {version} is older than 0.6.1.")


def _device(resolved: Resolved) -> Iterator[Hit]:
    asked, env = backend(resolved.cfg), resolved.facts.env
    device = resolved.compute_device
    if asked is None or device == "xla" or (isinstance(asked, TorchAO) and asked.emulate):
        return  # an engine without float8 is the finding of another rule
    if device != "cuda":
        yield Hit(_BACKEND, f"{type(asked).__name__} multiplies in float8 on CUDA devices, and the device is {device}.")
    elif env.capability is not None and env.capability < ADA:
        major, minor = env.capability
        what = f"The {env.device} device has compute capability {major}.{minor}; float8 needs 8.9."
        yield Hit(_BACKEND, what)


def _blocks(resolved: Resolved) -> Iterator[Hit]:
    asked, capability = backend(resolved.cfg), resolved.facts.env.capability
    wants = isinstance(asked, TransformerEngine) and isinstance(asked.recipe, MXFP8BlockScaling)
    if wants and capability is not None and ADA <= capability < BLACKWELL:
        major, minor = capability
        yield Hit(f"{_BACKEND}.recipe", f"Blocks of 32 values need compute capability 10.0; it is {major}.{minor}.")


def _cpu_recipe(resolved: Resolved) -> Iterator[Hit]:
    asked = backend(resolved.cfg)
    on_cpu = resolved.compute_device == "cpu"
    if isinstance(asked, TorchAO) and asked.recipe == "rowwise_with_gw_hp" and on_cpu:
        what = "torchao's rowwise_with_gw_hp does not follow autocast on the CPU: its backward mixes dtypes and fails."
        yield Hit(f"{_BACKEND}.recipe", what)


def _nothing(resolved: Resolved) -> Iterator[Hit]:
    asked = backend(resolved.cfg)
    if asked is None or resolved.fp8_linears or has_engine_layers(resolved.facts.model):
        return
    every = resolved.linears
    odd = [f"{linear.path} {' x '.join(map(str, linear.weight.shape))}" for linear in every if not linear.fits]
    if not every:
        what = "The model has no plain torch.nn.Linear that could compute in float8."
    elif len(odd) == len(every):
        what = f"No Linear has sides that are multiples of {MULTIPLE}: {some(odd)}."
    else:
        left = f", or of odd size ({some(odd)})" if odd else ""
        what = f"Of the model's {count(len(every), 'Linear')} each is the first, the last, skipped, tied{left}."
    yield Hit("model", what)


def _skip(resolved: Resolved) -> Iterator[Hit]:
    asked = backend(resolved.cfg)
    for pattern in () if asked is None or isinstance(asked, MSAMP) else asked.skip:
        if not any(matcher((pattern,))(module.path) for module in resolved.facts.model.modules if module.path):
            yield Hit(f"{_BACKEND}.skip", f"No module's path matches `{pattern}`.")


def _converted(resolved: Resolved) -> Iterator[Hit]:
    asked = backend(resolved.cfg)
    if asked is None:
        return
    own = "transformer_engine" if isinstance(asked, TransformerEngine) else ""
    for module in resolved.facts.model.modules:
        cls = resolved.facts.model.classes[module.cls]
        if cls.module.startswith(CONVERTED) and cls.module.partition(".")[0] != own:
            yield Hit(at(module.path), f"Already a float8 `{cls.name}` of {cls.module.partition('.')[0]}.")
            return


def _parallel(resolved: Resolved) -> Iterator[Hit]:
    arrived = resolved.facts.model.architecture.tp_size or 1
    if backend(resolved.cfg) is None:
        return
    if arrived > 1:
        yield Hit(
            "model", f"Its layers are cut over {arrived} ranks already (tensor parallel); float8 takes whole ones."
        )
    elif resolved.engine_traits.takes_sharded and (ranks := resolved.tp.size) > 1:
        yield Hit("config.precision", f"Layers would be cut over {ranks} tensor ranks; float8 takes whole ones.")


def _idle(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    asked = backend(cfg)
    if isinstance(asked, TransformerEngine) and not asked.autocast_during_eval and cfg.intent is Intent.INFERENCE:
        what = "intent is inference, but TransformerEngine would compute in float8 only while the model trains."
        yield Hit(f"{_BACKEND}.autocast_during_eval", what)


def _launcher(resolved: Resolved) -> Iterator[Hit]:
    value = dict(resolved.facts.env.variables).get("ACCELERATE_FP8_BACKEND", "NO")
    asked = backend(resolved.cfg)
    if value.upper() != "NO" and _LAUNCHERS.get(value.upper()) is not (type(asked) if asked else None):
        said = type(asked).__name__ if asked else "no float8"
        what = f"ACCELERATE_FP8_BACKEND={value} is set, but config.precision asks for {said}."
        yield Hit("env.variables.ACCELERATE_FP8_BACKEND", what)


def bf16(cfg: Config, _: Facts) -> Config:
    """The same precision without float8."""
    asked = cfg.precision
    if not isinstance(asked, FP8):
        return cfg
    kept = {name: getattr(asked, name) for name in ("reduce_dtype", "output_dtype", "master_weights")}
    return evolve(cfg, precision=BF16(**kept))


def changed(**values: Any) -> Callable[[Config, Facts], Config]:
    """A repair that sets fields of the backend."""

    def repair(cfg: Config, _: Facts) -> Config:
        assert isinstance(cfg.precision, FP8), "the rule has looked at its backend"
        return evolve(cfg, precision=evolve(cfg.precision, backend=evolve(cfg.precision.backend, **values)))

    return repair


def _no_skip(cfg: Config, facts: Facts) -> Config:
    asked = backend(cfg)
    if asked is None or isinstance(asked, MSAMP):
        return cfg
    paths = [module.path for module in facts.model.modules if module.path]
    kept = tuple(pattern for pattern in asked.skip if any(map(matcher((pattern,)), paths)))
    return changed(skip=kept)(cfg, facts)


# --- engines and libraries -------------------------------------------------------------------------------------------


ADAMS = (("Adam", "torch.optim"), ("AdamW", "torch.optim"), ("FusedAdam", "deepspeed.ops"))
"""Classes, with the start of their modules, that ``msamp.initialize`` takes."""


def _without(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    asked = backend(cfg)
    if asked is not None and not resolved.engine_traits.fp8_backends:
        what = f"{type(asked).__name__} does not compute in float8 under {type(cfg.engine).__name__}."
        yield Hit("config.precision.backend", what)


def _gather(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    asked = backend(cfg)
    if not isinstance(asked, TorchAO) or not asked.float8_all_gather:
        return
    if not resolved.engine_traits.takes_sharded:
        does = "gathers flat parameters" if resolved.engine_traits.flattens else "gathers no weights"
        what = f"{type(cfg.engine).__name__} {does}, so that float8_all_gather=True has no use."
        yield Hit("config.precision.backend.float8_all_gather", what)
    elif asked.recipe != "tensorwise":
        what = f"Weights are gathered with one scale each, and {asked.recipe} wants one per row."
        yield Hit("config.precision.backend.float8_all_gather", what)


def _engine(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if isinstance(backend(cfg), MSAMP) and MSAMP not in resolved.engine_traits.fp8_backends:
        engine = type(cfg.engine).__name__
        what = f"MSAMP trains under Single, DDP and DeepSpeed, and the engine is {engine}."
        yield Hit("config.precision.backend", what)


def _adam(resolved: Resolved) -> Iterator[Hit]:
    if not isinstance(backend(resolved.cfg), MSAMP) or _makes_its_own(resolved):
        return
    optimizer = resolved.facts.optimizer
    if optimizer is None:
        what = "MS-AMP replaces model and optimizer together, and none is given."
    elif not any(optimizer.name == name and optimizer.module.startswith(module) for name, module in ADAMS):
        what = f"MS-AMP takes Adam, AdamW and FusedAdam, and `{optimizer.name}` is given."
    elif optimizer.stateful:
        state = count(len(optimizer.stateful), "parameter")
        what = f"MS-AMP starts its optimizer anew, and the state of {state} would be lost."
    else:
        return
    yield Hit("optimizer", what)


def _makes_its_own(resolved: Resolved) -> bool:
    """Return whether DeepSpeed will make the optimizer, over the parameters as they then are."""
    return resolved.engine_traits.engine_steps and resolved.deepspeed.optimizer == "section"


def _clip(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    own = resolved.engine_traits.engine_steps  # whose float8 optimizer clips by itself
    if isinstance(backend(cfg), MSAMP) and cfg.clip is not None and not own:
        yield Hit("config.clip", "MS-AMP's float8 gradients are no tensors that torch could clip.")


def _follower(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    asked = backend(cfg)
    alone = resolved.facts.optimizer is None and not cfg.optimizer and cfg.intent is Intent.TRAINING
    alone = alone and not _makes_its_own(resolved)
    if isinstance(asked, TransformerEngine) and alone and not has_engine_layers(resolved.facts.model):
        what = "TransformerEngine's layers have parameters of their own: an optimizer that is not given keeps the old."
        yield Hit("optimizer", what)


def _deprecated(resolved: Resolved) -> Iterator[Hit]:
    if isinstance(backend(resolved.cfg), MSAMP):
        yield Hit("config.precision.backend", "MS-AMP is no longer developed, and accelerate has deprecated it.")


def _unclipped(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, clip=None)


RULES: tuple[Rule, ...] = (
    Rule(
        id="fp8.library-missing",
        summary="The library that computes in float8 is installed.",
        check=_missing,
        fix="Install it, or write precision=BF16().",
        at=(Moment.PLAN, Moment.ACT),
        source=("ST-21", "ST-33", "X-3", "X-4", "X-5"),
        repair=bf16,
    ),
    Rule(
        id="fp8.library-too-old",
        summary="torchao is at least 0.6.1.",
        check=_old,
        fix="Write `pip install 'torchao>=0.6.1'`.",
        at=(Moment.PLAN, Moment.ACT),
        source=("ST-21",),
        repair=bf16,
    ),
    Rule(
        id="fp8.unsupported-device",
        summary="The device multiplies in float8, or torchao emulates it.",
        check=_device,
        fix="Write precision=BF16(), or FP8(backend=TorchAO(emulate=True)) to try it out slowly.",
        source=("ST-21", "pain 35"),
        repair=bf16,
    ),
    Rule(
        id="fp8.unsupported-blocks",
        summary="MXFP8BlockScaling runs on compute capability 10.0 or higher.",
        check=_blocks,
        fix="Write recipe=DelayedScaling().",
        source=("TE-1", "SS-28"),
    ),
    Rule(
        id="fp8.recipe-on-cpu",
        summary="The emulated recipe trains on the CPU.",
        check=_cpu_recipe,
        fix='Write recipe="rowwise".',
        source=("torchao Float8Linear.forward",),
        repair=changed(recipe="rowwise"),
    ),
    Rule(
        id="fp8.skip-not-found",
        summary="Every pattern of skip matches a module.",
        check=_skip,
        fix="Write the dotted path as the model has it; `*` stays inside one segment.",
        source=("K-H6", "pain 9"),
        repair=_no_skip,
    ),
    Rule(
        id="fp8.nothing-to-convert",
        summary="At least one Linear computes in float8.",
        check=_nothing,
        fix="Write precision=BF16(), or make the sizes of the Linears multiples of 16.",
        source=("H-31", "H-32", "G-32"),
        repair=bf16,
    ),
    Rule(
        id="fp8.already-converted",
        summary="No layer computes in float8 already.",
        check=_converted,
        fix="Pass the model as it was before it was converted.",
        source=("pain 38",),
        repair=bf16,
    ),
    Rule(
        id="fp8.tensor-parallel",
        summary="Float8 layers are not cut by tensor parallelism.",
        check=_parallel,
        fix="Write precision=BF16(), or do without tensor parallelism.",
        source=("pain 38",),
        repair=bf16,
    ),
    Rule(
        id="fp8.idle-in-eval",
        summary="For inference TransformerEngine computes in float8 in evaluation mode.",
        check=_idle,
        fix="Write autocast_during_eval=True, or precision=BF16().",
        severity=Severity.WARNING,
        source=("H-33", "K-H5"),
        repair=changed(autocast_during_eval=True),
    ),
    Rule(
        id="fp8.launcher-flag",
        summary="No launcher flag in the environment asks for another float8 library.",
        check=_launcher,
        fix="Write `unset ACCELERATE_FP8_BACKEND`; the config alone decides.",
        severity=Severity.WARNING,
        source=("ST-32", "G-41", "SS-3", "K-H8", "pain 25"),
    ),
    Rule(
        id="fp8.engine",
        summary="The engine computes in float8.",
        check=_without,
        fix="Write precision=BF16(), or engine=FSDP2().",
        overridable=False,
        source=("ST-21", "ST-35"),
        repair=bf16,
    ),
    Rule(
        id="fp8.all-gather",
        summary="Weights are gathered in float8 under FSDP2 with the tensorwise recipe.",
        check=_gather,
        fix="Leave float8_all_gather out: it is on where it can be.",
        overridable=False,
        source=("X-4", "SS-27", "K-H6"),
        repair=changed(float8_all_gather=None),
    ),
    Rule(
        id="fp8.msamp-engine",
        summary="MS-AMP trains under Single, DDP and DeepSpeed.",
        check=_engine,
        fix="Write backend=TorchAO(), or engine=DDP().",
        overridable=False,
        source=("ST-26", "ST-31"),
        repair=bf16,
    ),
    Rule(
        id="fp8.msamp-optimizer",
        summary="MS-AMP is given an Adam that has not stepped yet.",
        check=_adam,
        fix="Pass a new torch.optim.AdamW over the model's parameters, and leave config.optimizer out.",
        overridable=False,
        source=("X-5",),
        repair=bf16,
    ),
    Rule(
        id="fp8.msamp-clip",
        summary="MS-AMP's gradients are not clipped.",
        check=_clip,
        fix="Write clip=None.",
        source=("msamp.clip_grad_norm_", "pain 34"),
        repair=_unclipped,
    ),
    Rule(
        id="fp8.optimizer-missing",
        summary="TransformerEngine trains with an optimizer that is given or asked for.",
        check=_follower,
        fix="Pass the optimizer, or write optimizer=AdamW(...) in the config.",
        source=("X-3", "PR-15"),
        repair=bf16,
    ),
    Rule(
        id="fp8.msamp-deprecated",
        summary="The float8 library is one that is still developed.",
        check=_deprecated,
        fix="Write backend=TorchAO().",
        severity=Severity.WARNING,
        source=("SS-29",),
        repair=bf16,
    ),
)
