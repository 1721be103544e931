"""The DeepSpeed config: what the user's JSON says, what prepkit's config says, and whether they say one thing."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import AsStored, ClipNorm, Config, DeepSpeed, Mixed, NoClip
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.resolve.deepspeed.data import look, said
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Check, Hit, Rule


def flaws(name: str) -> Check:
    """A check that reports what working out the config found under this id."""

    def check(resolved: Resolved) -> Iterator[Hit]:
        if isinstance(resolved.cfg.engine, DeepSpeed):
            for flaw in resolved.deepspeed.flaws:
                if flaw.rule == f"deepspeed.{name}":
                    yield Hit(flaw.where, flaw.what, flaw.fix)

    return check


def _default_stage(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, engine=evolve(cfg.engine, stage=2)) if isinstance(cfg.engine, DeepSpeed) else cfg


def _adopt_clip(cfg: Config, _: Facts) -> Config:
    """What the JSON clips to, if it says so; else nothing is clipped."""
    asked = look(said(cfg.engine), "gradient_clipping") if isinstance(cfg.engine, DeepSpeed) else None
    if isinstance(asked, int | float) and not isinstance(asked, bool) and asked > 0:
        return evolve(cfg, clip=ClipNorm(float(asked)))
    return evolve(cfg, clip=NoClip())


def _masters(cfg: Config, _: Facts) -> Config:
    return (
        evolve(cfg, precision=evolve(cfg.precision, master_weights=True)) if isinstance(cfg.precision, Mixed) else cfg
    )


def _stored(resolved: Resolved) -> Iterator[Hit]:
    if isinstance(resolved.cfg.engine, DeepSpeed) and isinstance(resolved.cfg.precision, AsStored):
        low = next((p for p in resolved.facts.model.params if p.dtype in ("bfloat16", "float16")), None)
        if low:
            what = f"Without bf16 and fp16 DeepSpeed takes parameters for float32, and `{low.name}` is {low.dtype}."
            yield Hit("config.precision", what)


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
        check=flaws("no-stage"),
        fix="Write DeepSpeed(stage=2).",
        source=("DP-4",),
        repair=_default_stage,
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
        check=flaws("two-places"),
        fix="Give it in one place.",
        overridable=False,
        source=("pain 3", "G-36", "DS-11", "DP-3", "DP-7", "DP-21"),
    ),
    Rule(
        id="deepspeed.precision",
        summary="config.precision alone says in which precision DeepSpeed computes.",
        check=flaws("precision"),
        fix="Say it in config.precision alone.",
        overridable=False,
        source=("G-35", "DP-30", "DP-31", "DP-32", "DP-33", "DP-34", "ST-22"),
    ),
    Rule(
        id="deepspeed.stored-16-bit",
        summary="Without BF16 or FP16 every parameter of a DeepSpeed model is stored in float32.",
        check=_stored,
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
        fix="Write clip=ClipNorm(1.0) with your limit, or NoClip().",
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
        check=flaws("auto"),
        fix="Write a value.",
        overridable=False,
        source=("DS-23", "DP-20", "pain 14"),
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
        summary="The tensor-parallel size divides the world size.",
        check=flaws("tensor-parallel"),
        fix="Write a size that divides the world size.",
        overridable=False,
        source=("DS-3", "G-61", "K-DS16"),
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
)
"""Reporting order: the text, its keys, its values, what the values mean together; then warnings."""
