"""DeepSpeed against the modules of the model."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import Config, DeepSpeed, Intent
from prepkit.facts import Facts, ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, did_you_mean, some
from prepkit.resolve.deepspeed.data import look, said, stage
from prepkit.resolve.fsdp2 import scalars
from prepkit.resolve.modules import PACKED
from prepkit.resolve.placements import CAST
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

KNOWN_LEAVES = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
"""Classes that DeepSpeed marks by itself (deepspeed/runtime/zero/leaf_module_config.py)."""


def _leaves(resolved: Resolved) -> Iterator[Hit]:
    if not isinstance(resolved.cfg.engine, DeepSpeed):
        return
    names = {cls.name for cls in resolved.facts.model.classes}
    for name in resolved.cfg.engine.leaf_modules:
        if name not in names:
            fix = f"Write the name of a class in the model, without its module.{did_you_mean(name, names)}"
            yield Hit("config.engine.leaf_modules", f"No module of the model is a `{name}`.", fix)


def _leaf_inputs(resolved: Resolved) -> Iterator[Hit]:
    """The first trained parameter lies in a leaf, so that what goes into the leaf needs no gradient."""
    cfg, facts = resolved.cfg, resolved.facts
    if not isinstance(cfg.engine, DeepSpeed) or stage(cfg.engine) != 3 or cfg.intent is not Intent.TRAINING:
        return
    trained = [param.name for param in facts.model.params if param.requires_grad]
    if not trained:
        return
    marked = {index for index, cls in enumerate(facts.model.classes) if cls.name in cfg.engine.leaf_modules}
    leaf = next((m.path for m in facts.model.modules if m.cls in marked and trained[0].startswith(f"{m.path}.")), "")
    if leaf and not facts.model.grad_inputs:
        what = f"Nothing before the leaf `{leaf}` is trained, so that its input needs no gradient, and `{trained[0]}`"
        yield Hit(
            at(leaf), f"{what} in it is: DeepSpeed lets go of the weights of such a leaf before its backward is over."
        )


def _packed(resolved: Resolved) -> Iterator[Hit]:
    """4-bit and 8-bit weights whose bytes DeepSpeed would cast, or cannot partition."""
    engine = resolved.cfg.engine
    if not isinstance(engine, DeepSpeed):
        return
    low = resolved.compute_dtypes.param if resolved.compute_dtypes else None
    packed = [param for param in resolved.facts.model.params if param.cls in PACKED and param.dtype != low]
    cast = [param for param in packed if low and param.dtype in CAST]
    bad = packed if stage(engine) == 3 else cast
    if bad:
        does = "ZeRO-3 partitions weights of its own dtype alone" if bad is packed else f"DeepSpeed casts them to {low}"
        names = some([param.name for param in bad])
        yield Hit(at(bad[0].name), f"{count(len(bad), 'packed weight')} stored as {bad[0].dtype} ({names}): {does}.")


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


def _experts(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if not isinstance(cfg.engine, DeepSpeed) or stage(cfg.engine) != 3 or cfg.engine.leaf_modules:
        return
    if look(said(cfg.engine), "zero_optimization.leaf_module") is not None:
        return
    unmarked = tuple(name for name in experts(resolved.facts.model) if name not in KNOWN_LEAVES)
    if unmarked:
        what = f"ZeRO-3 and data-dependent experts in {some(unmarked)}: ranks that skip an expert wait for ever."
        named = ", ".join(f'"{name}"' for name in unmarked)
        yield Hit("config.engine.leaf_modules", what, f"Write leaf_modules=({named},).")


def _mark(cfg: Config, facts: Facts) -> Config:
    if not isinstance(cfg.engine, DeepSpeed):
        return cfg
    return evolve(cfg, engine=evolve(cfg.engine, leaf_modules=experts(facts.model)))


def _zero_init(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if isinstance(cfg.engine, DeepSpeed) and stage(cfg.engine) == 3:
        return
    empty = tuple(param.name for param in resolved.facts.model.params if param.cls == "ZeroParameter")
    if empty:
        here = f"stage {stage(cfg.engine)}" if isinstance(cfg.engine, DeepSpeed) else type(cfg.engine).__name__
        what = f"{count(len(empty), 'parameter')} built under zero.Init: empty until gathered, which {here} never does."
        yield Hit(at(empty[0]), what)


def _scalars(resolved: Resolved) -> Iterator[Hit]:
    names = scalars(resolved.facts.model) if isinstance(resolved.cfg.engine, DeepSpeed) else ()
    if names:
        what = f"{some(names)} {'has' if len(names) == 1 else 'have'} no dimension; DeepSpeed sends the model as bytes,"
        yield Hit(at(names[0]), f"{what} and torch shows no such tensor as bytes.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="deepspeed.packed",
        summary="Packed 4-bit and 8-bit weights are stored so that DeepSpeed leaves their bytes as they are.",
        check=_packed,
        fix="Load the model with BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16) and write precision=BF16(); "
        "or write DeepSpeed(stage=2) or FSDP2().",
        source=("M2-7", "deepspeed _configure_distributed_model"),
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
        id="deepspeed.scalar",
        summary="Under DeepSpeed every parameter has at least one dimension.",
        check=_scalars,
        fix="Write engine=FSDP2(), which keeps it whole on every rank and averages its gradient, or engine=DDP().",
        source=("deepspeed DeepSpeedEngine._broadcast_model", "DS-19"),
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
        id="deepspeed.leaf-inputs",
        summary="What goes into a leaf that is trained needs a gradient.",
        check=_leaf_inputs,
        fix="Call model.enable_input_require_grads(), or train something before it, or leave it out of leaf_modules.",
        source=("deepspeed PartitionedParameterCoordinator", "DS-19"),
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
"""Reporting order: errors, then the warning."""
