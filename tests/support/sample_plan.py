"""A plan built by hand from the vocabulary, for tests of what happens to plans after planning."""

from __future__ import annotations

from attrs import evolve

from prepkit.config import BF16, FSDP2, AdamW, CheckpointBlocks, ClipNorm, Config, Intent, WrapClasses
from prepkit.facts import ClassFact, Env, Facts, GroupFact, ModelFacts, ModuleFact, OptimizerFacts, ParamFact
from prepkit.findings import Finding, Severity
from prepkit.plan import Owners, Plan, Provenance, RunSettings, because
from prepkit.plan.layout import ParamLayout
from prepkit.steps import (
    Agree,
    Axis,
    BuildMesh,
    CheckpointModules,
    CreateOptimizer,
    LocalDevice,
    MoveModel,
    OptimizerOption,
    ReleaseOptimizer,
    ShardUnits,
    StartProcessGroup,
    Unit,
)

PROJECTIONS = (
    ("self_attn.q_proj", (8192, 8192)),
    ("self_attn.k_proj", (1024, 8192)),
    ("self_attn.v_proj", (1024, 8192)),
    ("self_attn.o_proj", (8192, 8192)),
    ("mlp.gate_proj", (28672, 8192)),
    ("mlp.up_proj", (28672, 8192)),
    ("mlp.down_proj", (8192, 28672)),
    ("input_layernorm", (8192,)),
    ("post_attention_layernorm", (8192,)),
)


def model_facts(layers: int) -> ModelFacts:
    """Facts of a Llama with the widths of the 70B one."""
    inner = ("self_attn", "mlp", "mlp.act_fn", *(name for name, _ in PROJECTIONS))
    return ModelFacts(
        classes=tuple(
            ClassFact(name=name, module="transformers.models.llama.modeling_llama")
            for name in ("LlamaForCausalLM", "LlamaDecoderLayer", "Linear")
        ),
        modules=(
            ModuleFact(path="", cls=0),
            *(
                ModuleFact(path=f"model.layers.{layer}{path and '.'}{path}", cls=2 if path else 1)
                for layer in range(layers)
                for path in ("", *inner)
            ),
        ),
        params=(
            ParamFact(name="model.embed_tokens.weight", shape=(128256, 8192), dtype="float32"),
            *(
                ParamFact(name=f"model.layers.{layer}.{name}.weight", shape=shape, dtype="float32")
                for layer in range(layers)
                for name, shape in PROJECTIONS
            ),
        ),
        ties=(("model.embed_tokens.weight", "lm_head.weight"),),
        declared_blocks=("LlamaDecoderLayer",),
    )


def sample_plan(layers: int = 2) -> Plan:
    """An FSDP2 plan over 64 ranks with most kinds of step."""
    model = model_facts(layers)
    names = tuple(param.name for param in model.params)
    blocks = tuple(f"model.layers.{layer}" for layer in range(layers))
    options = (("betas.0", 0.9), ("foreach", None), ("fused", False), ("lr", 0.001), ("maximize", True), ("step", 3))
    group = GroupFact(slots=(*names, None), options=options)
    mesh = (Axis(name="shard", size=64),)
    steps = (
        because(StartProcessGroup(backend="nccl", world_size=64, timeout_s=600.0), "64 ranks", "PG-1")
        + because(Agree(), "all ranks must hold this plan")
        + because(BuildMesh(device="cuda", axes=mesh), "the world is one shard group")
        + because(ReleaseOptimizer(slots=(names,)), "or the parameters keep the whole model in memory", "F2-3", "F2-4")
        + because(MoveModel(device=LocalDevice(type="cuda")), "compute there")
        + because(CheckpointModules(paths=blocks, preserve_rng_state=True), "asked")
        + because(_shard(blocks), "asked")
        + because(_adamw(names), "asked")
    )
    return Plan(
        config=Config(
            engine=FSDP2(wrap=WrapClasses(("LlamaDecoderLayer",))),
            precision=BF16(),
            checkpointing=CheckpointBlocks(),
            optimizer=AdamW(lr=3e-4),
            clip=ClipNorm(1.0),
        ),
        facts=Facts(
            model=model,
            optimizer=OptimizerFacts(name="AdamW", module="torch.optim.adamw", groups=(group,)),
            env=Env.declare(world_size=64, per_node=8, memory="80GiB"),
        ),
        mesh=mesh,
        steps=steps,
        layout=_layout(model),
        owners=Owners(
            accumulation="prepkit",
            accumulation_steps=1,
            clipping="prepkit",
            clip=ClipNorm(1.0),
            scheduler="prepkit",
            scheduler_ticks=1,
            master_weights="the shards, in float32",
        ),
        run=RunSettings(
            intent=Intent.TRAINING,
            timeout_s=600.0,
            accepted=(),
            average_each=False,
            divides_loaders=True,
            global_batch=None,
            total_steps=None,
            engine="FSDP2",
            precision="BF16",
            collectives="torch",
            engine_steps=False,
            shards_params=True,
            shows_gradients=True,
            averages_known_params=False,
            follows_new_params=False,
            follows_unfrozen=True,
            steps_frozen=False,
            master_weights_in_place=True,
        ),
        provenance=Provenance(prepkit="0.1.0", config="sha256:c", facts="sha256:f", assumed=("world_size",)),
        warnings=(_warning(),),
    )


def with_steps(plan: Plan, *indices: int) -> Plan:
    """The plan with only these of its steps, in this order."""
    return evolve(plan, steps=tuple(plan.steps[index] for index in indices))


def _shard(blocks: tuple[str, ...]) -> ShardUnits:
    return ShardUnits(
        units=(
            *(Unit(path=path, reshard_after_forward=True) for path in blocks),
            Unit(path="", reshard_after_forward=8, output_dtype="float32"),
        ),
        param_dtype="bfloat16",
        reduce_dtype="float32",
        offload=False,
        pin_memory=False,
    )


def _adamw(names: tuple[str, ...]) -> CreateOptimizer:
    options = (
        OptimizerOption(name="lr", value=3e-4),
        OptimizerOption(name="betas", value=(0.9, 0.999)),
        OptimizerOption(name="fused", value=True),
    )
    return CreateOptimizer(algorithm="AdamW", names=names, options=options)


def _layout(model: ModelFacts) -> tuple[ParamLayout, ...]:
    return tuple(
        ParamLayout(
            name=param.name,
            shape=param.shape,
            dtype=param.dtype,
            cls="DTensor",
            placements=("shard(0)",),
            unit=".".join(param.name.split(".")[:3]) if "layers" in param.name else "",
            requires_grad=True,
        )
        for param in model.params
    )


def _warning() -> Finding:
    return Finding(
        rule="env.assumed",
        severity=Severity.WARNING,
        where="facts.env",
        what="the cluster was declared, not seen: größe ≠ Größe",
        fix="observe it",
    )
