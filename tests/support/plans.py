"""Small plans of every engine, made by the planner from facts by hand; and golden texts to compare with."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import evolve

from prepkit import planner
from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FSDP2,
    SGD,
    XLA,
    AdamW,
    CheckpointBlocks,
    ClipNorm,
    ClipValue,
    CompileModel,
    Config,
    KeepLoaders,
    Mesh,
    OffloadToCPU,
    Single,
)
from prepkit.facts import (
    ClassFact,
    Env,
    Facts,
    GroupFact,
    LoaderFacts,
    ModelFacts,
    ModuleFact,
    OptimizerFacts,
    ParamFact,
    SchedulerFacts,
)
from prepkit.plan import Plan
from prepkit.version import VERSION
from tests.support.golden import assert_golden

GOLDEN = Path(__file__).parents[1] / "render" / "golden"

CLASSES = ("LM", "Embedding", "ModuleList", "Block", "Linear")
BLOCK = (("up", (12, 6)), ("down", (6, 12)))


def model(blocks: int = 3, dtype: str = "bfloat16", frozen: bool = True) -> ModelFacts:
    """A language model of a few blocks; its embedding is frozen."""
    modules = [("", 0), ("embed", 1), ("blocks", 2)]
    params = [ParamFact(name="embed.weight", shape=(10, 6), dtype=dtype, requires_grad=not frozen)]
    for index in range(blocks):
        modules += [(f"blocks.{index}", 3), *((f"blocks.{index}.{name}", 4) for name, _ in BLOCK)]
        params += [ParamFact(name=f"blocks.{index}.{name}.weight", shape=shape, dtype=dtype) for name, shape in BLOCK]
    return ModelFacts(
        classes=tuple(ClassFact(name=name, module="lm", has_forward=name != "ModuleList") for name in CLASSES),
        modules=tuple(ModuleFact(path=path, cls=cls) for path, cls in (*modules, ("head", 4))),
        params=(*params, ParamFact(name="head.weight", shape=(10, 6), dtype=dtype)),
        declared_blocks=("Block",),
    )


def adam(facts: ModelFacts) -> OptimizerFacts:
    names = tuple(param.name for param in facts.params if param.requires_grad)
    return OptimizerFacts(name="AdamW", module="torch.optim.adamw", groups=(GroupFact(slots=names),))


def make(cfg: Config, facts: Facts) -> Plan:
    return planner.plan(cfg, facts).unwrap()


def fsdp2_plan() -> Plan:
    """Two copies of three shards each, everything else switched on."""
    seen = model()
    loader = LoaderFacts(batch_size=2, length=96, sampler="random")
    env = Env.declare(world_size=6, per_node=6, memory="80GiB", torch="2.9.0", bf16=True)
    cfg = Config(
        engine=FSDP2(offload=OffloadToCPU()),
        mesh=Mesh(replicate=2, shard=3),
        precision=BF16(),
        checkpointing=CheckpointBlocks(),
        accumulation=4,
        clip=ClipNorm(1.0),
    )
    scheduler = SchedulerFacts(name="LambdaLR", drives_optimizer=True)
    return make(cfg, Facts(model=seen, optimizer=adam(seen), scheduler=scheduler, loaders=(loader,), env=env))


def ddp_plan() -> Plan:
    """A model whose blocks have no units of their own."""
    cfg = Config(engine=DDP(), optimizer=AdamW(lr=3e-4), clip=ClipValue(0.5))
    return make(cfg, Facts(model=model(dtype="float32"), env=Env.declare(world_size=4, device="cpu")))


def fp8_plan() -> Plan:
    """Float8 on a cluster that is not here: the sizes fit all but the blocks' first Linear and the head."""
    shapes = {"blocks.0.up.weight": (48, 24), "head.weight": (40, 32)}
    seen = model(dtype="float32", frozen=False)
    params = tuple(evolve(p, shape=shapes.get(p.name, (64, 32))) for p in seen.params)
    torch_linear = ClassFact(name="Linear", module="torch.nn.modules.linear")
    seen = evolve(seen, params=params, classes=(*seen.classes[:4], torch_linear))
    env = Env.declare(world_size=4, capability=(9, 0), libraries=(("torchao", "0.18.0"),))
    return make(Config(engine=FSDP2(), precision=FP8()), Facts(model=seen, optimizer=adam(seen), env=env))


def xla_plan() -> Plan:
    """Four forked processes."""
    cfg = Config(engine=XLA(forked=True), precision=BF16(), loaders=KeepLoaders())
    seen = model(blocks=1)
    env = Env.declare(world_size=4, device="cpu", libraries=(("torch_xla", "2.9.0"),))
    return make(cfg, Facts(model=seen, optimizer=adam(seen), env=env))


def single_plan() -> Plan:
    """Trains in 16 bits, which is a warning."""
    cfg = Config(engine=Single(), precision=None, compile=CompileModel(), optimizer=SGD(lr=0.1))
    return make(cfg, Facts(model=model(blocks=1), env=Env()))


PLANS = {"fsdp2": fsdp2_plan, "ddp": ddp_plan, "single": single_plan, "fp8": fp8_plan, "xla": xla_plan}


def assert_rendered(name: str, text: str) -> None:
    """The text of a page is the golden one."""
    text = text.replace(VERSION, "<version>")  # digests and versions change for reasons that are none of the page's
    text = re.sub(r"\b[0-9a-f]{12}\b|\b[0-9a-f]{64}\b", "<digest>", text)
    assert_golden(GOLDEN / f"{name}.txt", text + "\n")
