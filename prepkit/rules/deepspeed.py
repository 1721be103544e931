"""The DeepSpeed config: the user's JSON against prepkit's config, and against the modules of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import evolve

from prepkit.config import ClipNorm, Config, DeepSpeed, Intent, Mixed
from prepkit.facts import Facts, ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, did_you_mean, some
from prepkit.resolve.deepspeed.data import look, said, stage
from prepkit.resolve.deepspeed.flaws import Flaw
from prepkit.resolve.modules import PACKED
from prepkit.resolve.placements import CAST
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.units import scalars
from prepkit.rules.rule import Check, Hit, Rule, options, under, with_engine

TEXT = (
    *("not-json", "removed-key", "unknown-key", "missing-key", "wrong-type", "wrong-value", "no-stage", "stage"),
    *("turned-off", "unknown-type", "removed-type"),
)
"""Rules about the user's JSON as it is written: no fact is read for them, so that none can be missing."""
_UNREAD = ("removed-key", "unknown-key", "missing-key", "wrong-type", "wrong-value", "stage", "unknown-type")


def flaws(name: str) -> Check:
    """A check that reports what was found under this id: in the text alone first, then in working it out."""

    def check(resolved: Resolved) -> Iterator[Hit]:
        written = resolved.deepspeed_text
        yield from _hits(name, written)
        if name not in TEXT:
            yield from _hits(name, (flaw for flaw in resolved.deepspeed.flaws if flaw not in written))

    return under(DeepSpeed, check)


def _hits(name: str, flaws: Iterable[Flaw]) -> Iterator[Hit]:
    return (Hit(flaw.where, flaw.what, flaw.fix) for flaw in flaws if flaw.rule == f"deepspeed.{name}")


def _adopt_clip(cfg: Config, _: Facts) -> Config:
    """Return what the JSON clips to, if it says so; else nothing is clipped."""
    asked = look(said(cfg.engine), "gradient_clipping")
    if isinstance(asked, int | float) and not isinstance(asked, bool) and asked > 0:
        return evolve(cfg, clip=ClipNorm(float(asked)))
    return evolve(cfg, clip=None)


def _masters(cfg: Config, _: Facts) -> Config:
    return (
        evolve(cfg, precision=evolve(cfg.precision, master_weights=True)) if isinstance(cfg.precision, Mixed) else cfg
    )


def _stored(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.precision is None:
        low = next((p for p in resolved.facts.model.params if p.dtype in ("bfloat16", "float16")), None)
        if low:
            what = f"Without bf16 and fp16 DeepSpeed takes parameters for float32, and `{low.name}` is {low.dtype}."
            yield Hit("config.precision", what)


# --- modules and parameters ------------------------------------------------------------------------------------------


KNOWN_LEAVES = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")
"""Classes that DeepSpeed marks by itself (deepspeed/runtime/zero/leaf_module_config.py)."""


def _leaves(resolved: Resolved, engine: DeepSpeed) -> Iterator[Hit]:
    names = {cls.name for cls in resolved.facts.model.classes}
    for name in engine.leaf_modules:
        if name not in names:
            fix = f"Write the name of a class in the model, without its module.{did_you_mean(name, names)}"
            yield Hit("config.engine.leaf_modules", f"No module of the model is a `{name}`.", fix)


def _leaf_inputs(resolved: Resolved, engine: DeepSpeed) -> Iterator[Hit]:
    """The first trained parameter lies in a leaf, so that what goes into the leaf needs no gradient."""
    cfg, facts = resolved.cfg, resolved.facts
    if stage(engine) != 3 or cfg.intent is not Intent.TRAINING:
        return
    trained = [param.name for param in facts.model.params if param.requires_grad]
    if not trained:
        return
    marked = {index for index, cls in enumerate(facts.model.classes) if cls.name in engine.leaf_modules}
    leaf = next((m.path for m in facts.model.modules if m.cls in marked and trained[0].startswith(f"{m.path}.")), "")
    if leaf and not facts.model.grad_inputs:
        what = f"Nothing before the leaf `{leaf}` is trained, so that its input needs no gradient, and `{trained[0]}`"
        yield Hit(
            at(leaf), f"{what} in it is: DeepSpeed lets go of the weights of such a leaf before its backward is over."
        )


def _packed(resolved: Resolved, engine: DeepSpeed) -> Iterator[Hit]:
    """4-bit and 8-bit weights whose bytes DeepSpeed would cast, or cannot partition."""
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


def _complex(resolved: Resolved, engine: DeepSpeed) -> Iterator[Hit]:
    params = resolved.facts.model.params
    names = [one.name for one in params if one.requires_grad and one.dtype.startswith("complex")]
    if names and stage(engine) and resolved.trains:
        yield Hit(at(names[0]), f"Trained complex numbers, which ZeRO flattens among real ones: {some(names)}.")


def _experts(resolved: Resolved, engine: DeepSpeed) -> Iterator[Hit]:
    if stage(engine) != 3 or engine.leaf_modules:
        return
    if look(said(engine), "zero_optimization.leaf_module") is not None:
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
    if resolved.zero_stage == 3:
        return
    empty = tuple(param.name for param in resolved.facts.model.params if param.cls == "ZeroParameter")
    if empty:
        here = type(cfg.engine).__name__ if resolved.zero_stage is None else f"stage {resolved.zero_stage}"
        what = f"{count(len(empty), 'parameter')} built under zero.Init: empty until gathered, which {here} never does."
        yield Hit(at(empty[0]), what)


def _scalars(resolved: Resolved) -> Iterator[Hit]:
    names = scalars(resolved.facts.model)
    if names:
        what = f"{some(names)} {'has' if len(names) == 1 else 'have'} no dimension; DeepSpeed sends the model as bytes,"
        yield Hit(at(names[0]), f"{what} and torch shows no such tensor as bytes.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="deepspeed.not-json",
        summary="The DeepSpeed config is a JSON object in which no key appears twice.",
        check=flaws("not-json"),
        fix="Mend the JSON, or give a mapping: DeepSpeed(config={...}).",
        overridable=False,
        source=("HC-1", "pain 24"),
    ),
    Rule(
        id="deepspeed.removed-key",
        summary="No key asks for something that DeepSpeed has removed.",
        check=flaws("removed-key"),
        fix="Remove the key, or install a DeepSpeed that still has it.",
        overridable=False,
        source=("deepspeed/runtime/config.py _reject_removed_config_keys",),
    ),
    Rule(
        id="deepspeed.unknown-key",
        summary="DeepSpeed knows every key of its config.",
        check=flaws("unknown-key"),
        fix="Remove the key.",
        source=("pain 24", "DP-20"),
    ),
    Rule(
        id="deepspeed.missing-key",
        summary="What a schedule or an optimizer of the DeepSpeed config cannot be made without is there.",
        check=flaws("missing-key"),
        fix="Write the key.",
        overridable=False,
        source=("deepspeed/runtime/lr_schedules.py",),
    ),
    Rule(
        id="deepspeed.wrong-type",
        summary="Every value of the DeepSpeed config has the type that DeepSpeed expects.",
        check=flaws("wrong-type"),
        fix="Write a value of that type.",
        overridable=False,
        source=("pain 14", "pain 24"),
    ),
    Rule(
        id="deepspeed.wrong-value",
        summary="Every number and word of the DeepSpeed config is one that DeepSpeed takes.",
        check=flaws("wrong-value"),
        fix="Write a value that DeepSpeed takes.",
        overridable=False,
        source=("DP-20", "deepspeed/runtime/zero/config.py"),
    ),
    Rule(
        id="deepspeed.no-stage",
        summary="Somebody says which ZeRO stage is meant.",
        lawful="DeepSpeed has a default for it",
        check=flaws("no-stage"),
        fix="Write DeepSpeed(stage=2).",
        source=("DP-4",),
        repair=options(DeepSpeed, stage=2),
    ),
    Rule(
        id="deepspeed.stage",
        summary="The ZeRO stage is 0, 1, 2 or 3.",
        check=flaws("stage"),
        fix="Write a stage from 0 to 3.",
        overridable=False,
        source=("K-DS4",),
    ),
    Rule(
        id="deepspeed.two-places",
        summary="No setting stands in two places that disagree.",
        lawful="DeepSpeed reads one of them",
        check=flaws("two-places"),
        fix="Give it in one place.",
        overridable=False,
        source=("pain 3", "G-36", "DS-11", "DP-3", "DP-7", "DP-21"),
    ),
    Rule(
        id="deepspeed.precision",
        summary="config.precision alone says in which precision DeepSpeed computes.",
        lawful="DeepSpeed reads its own section",
        check=flaws("precision"),
        fix="Say it in config.precision alone.",
        overridable=False,
        source=("G-35", "DP-30", "DP-31", "DP-32", "DP-33", "DP-34", "ST-22"),
    ),
    Rule(
        id="deepspeed.stored-16-bit",
        summary="Without BF16 or FP16 every parameter of a DeepSpeed model is stored in float32.",
        check=under(DeepSpeed, _stored),
        fix="Write precision=BF16(), or load the model in float32.",
        source=("pain 2", "ST-22"),
    ),
    Rule(
        id="deepspeed.master-weights",
        summary="DeepSpeed keeps float32 master weights.",
        check=flaws("master-weights"),
        fix="Leave master_weights at True.",
        source=("pain 2",),
        repair=_masters,
    ),
    Rule(
        id="deepspeed.loss-scale",
        summary="The loss scale is one that DeepSpeed can hold.",
        check=flaws("loss-scale"),
        fix="Leave init_scale, growth_factor and backoff_factor out.",
        overridable=False,
        source=("deepspeed/runtime/fp16/loss_scaler.py DynamicLossScaler", "ST-23"),
    ),
    Rule(
        id="deepspeed.clip",
        summary="Under DeepSpeed gradients are clipped by their 2-norm, in one place.",
        check=flaws("clip"),
        fix="Write clip=ClipNorm(1.0) with your limit, or clip=None.",
        source=("pain 27", "DS-12"),
        repair=_adopt_clip,
    ),
    Rule(
        id="deepspeed.max-grad-norm",
        summary="The optimizer section leaves clipping to the engine.",
        check=flaws("max-grad-norm"),
        fix="Remove max_grad_norm, and write clip=ClipNorm(1.0) with its number.",
        overridable=False,
        source=("pain 27", "deepspeed/runtime/engine.py _configure_basic_optimizer"),
    ),
    Rule(
        id="deepspeed.batch",
        summary="Micro batch x accumulation x data-parallel ranks is the global batch.",
        check=flaws("batch"),
        fix="Write numbers that multiply.",
        overridable=False,
        source=("pain 4", "DS-13", "DS-23a", "G-61"),
    ),
    Rule(
        id="deepspeed.no-micro-batch",
        summary="A loader, the config or the JSON says how many samples a rank sees at once.",
        check=flaws("no-micro-batch"),
        fix="Write DeepSpeed(micro_batch=4) with your number.",
        overridable=False,
        source=("DS-5", "DS-8", "pain 14"),
    ),
    Rule(
        id="deepspeed.hidden-size",
        summary="Where bucket sizes are auto, the model says its hidden size.",
        check=flaws("hidden-size"),
        fix="Write a number, or remove the key: DeepSpeed has a default.",
        overridable=False,
        source=("DS-20", "G-40", "pain 14"),
    ),
    Rule(
        id="deepspeed.auto",
        summary="Every auto can be worked out.",
        lawful="its caller may fill it in",
        check=flaws("auto"),
        fix="Write a value.",
        overridable=False,
        source=("DS-23", "DP-20", "pain 14"),
    ),
    Rule(
        id="deepspeed.turned-off",
        summary="What a DeepSpeed config leaves to its caller, and nobody fills in, is off on purpose.",
        lawful="its caller may fill it in",
        check=flaws("turned-off"),
        fix='Write precision=BF16() and clip=ClipNorm(1.0), or false and 0.0 in the place of "auto".',
        severity=Severity.WARNING,
        source=("DS-12", "DP-20"),
    ),
    Rule(
        id="deepspeed.offload",
        summary="What is offloaded is sharded, and has a place to go.",
        check=flaws("offload"),
        fix="Leave the offload out.",
        overridable=False,
        source=("K-DS6/7", "K-DS8/9", "G-42"),
    ),
    Rule(
        id="deepspeed.offload-optimizer",
        summary="The CPU form of an offloaded optimizer computes what the optimizer computes.",
        check=flaws("offload-optimizer"),
        fix="Use torch.optim.AdamW, or keep the optimizer.",
        source=("G-34", "DS-26", "H-40a", "H-40b", "H-40c", "H-40d", "H-40e", "K-DS15"),
    ),
    Rule(
        id="deepspeed.tensor-parallel",
        summary="Ranks of a tensor-parallel group, of one sequence, and of a group of ZeRO++ divide the world size.",
        check=flaws("tensor-parallel"),
        fix="Write a size that divides the world size.",
        overridable=False,
        source=("DS-3", "G-61", "K-DS16"),
    ),
    Rule(
        id="deepspeed.sequence-parallel",
        summary="Every rank reads sequences of its own.",
        lawful="DeepSpeed cuts sequences over ranks where its caller makes the groups",
        check=flaws("sequence-parallel"),
        fix="Remove sequence_parallel_size.",
        overridable=False,
        source=("deepspeed/runtime/config.py DeepSpeedConfig",),
    ),
    Rule(
        id="deepspeed.msamp",
        summary="MS-AMP trains at ZeRO stages 0 to 2, with its optimizer where the parameters are.",
        check=flaws("msamp"),
        fix="Write backend=TorchAO().",
        overridable=False,
        source=("DP-12", "DP-31", "K-DS13", "K-DS14"),
    ),
    Rule(
        id="deepspeed.stage-0-16-bit",
        summary="Training in 16 bits begins at ZeRO stage 1.",
        check=flaws("stage-0-16-bit"),
        fix="Write stage=1, which holds the same on every rank but optimizer state, or engine=DDP().",
        severity=Severity.WARNING,
        source=("deepspeed/runtime/fp16/unfused_optimizer.py initialize_optimizer_states",),
    ),
    Rule(
        id="deepspeed.packed",
        summary="Packed 4-bit and 8-bit weights are stored so that DeepSpeed leaves their bytes as they are.",
        check=with_engine(DeepSpeed, _packed),
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
        check=under(DeepSpeed, _scalars),
        fix="Write engine=FSDP2(), which keeps it whole on every rank and averages its gradient, or engine=DDP().",
        source=("deepspeed DeepSpeedEngine._broadcast_model", "DS-19"),
    ),
    Rule(
        id="deepspeed.leaf-modules",
        summary="Every leaf class is a class of the model.",
        check=with_engine(DeepSpeed, _leaves),
        fix="Write the name of a class in the model.",
        overridable=False,
        source=("DS-19", "K-DS12"),
        repair=_known_leaves,
    ),
    Rule(
        id="deepspeed.leaf-inputs",
        summary="What goes into a leaf that is trained needs a gradient.",
        check=with_engine(DeepSpeed, _leaf_inputs),
        fix="Call model.enable_input_require_grads(), or train something before it, or leave it out of leaf_modules.",
        source=("deepspeed PartitionedParameterCoordinator", "DS-19"),
    ),
    Rule(
        id="deepspeed.complex",
        summary="What ZeRO flattens into one tensor are real numbers.",
        check=with_engine(DeepSpeed, _complex),
        fix="Keep real and imaginary part as two real parameters (torch.view_as_complex), or write engine=DDP().",
        source=("deepspeed flatten_dense_tensors",),
    ),
    Rule(
        id="deepspeed.experts",
        summary="ZeRO-3 gathers modules with data-dependent experts whole.",
        check=with_engine(DeepSpeed, _experts),
        fix="Name the class in leaf_modules.",
        severity=Severity.WARNING,
        source=("DS-19", "pain 31"),
        repair=_mark,
    ),
)

DAMAGE = tuple(rule for rule in RULES if rule.id.partition(".")[2] in _UNREAD)
"""Rules about what DeepSpeed itself refuses or passes by in its JSON, whatever is prepared with it."""
