"""Plans of small models as text that a person can review: hand-picked configs, about twenty for each engine.

Findings stand in the text by id and place, without their words; reasons of steps are in ``sentences`` alone. Settings
and fields of steps that have their default are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from attrs import evolve, fields, has
from returns.result import Success

from prepkit import config as c
from prepkit import planner
from prepkit.codec import field_types
from prepkit.facts import Facts, ParamFact, SchedulerFacts
from prepkit.findings import Finding
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.predict.prediction import Prediction, Term
from prepkit.testing import tiny_facts, tiny_loader, tiny_model
from prepkit.testing.tiny import LIBRARIES, PATH, tiny_checkpoint, with_batchnorm
from tests.support.drawn_runs import ENGINES, TP_LAYERS, changed

Settings = tuple[tuple[str, Any], ...]
"""Paths below the config (``engine.wrap``, ``precision``), with their values."""


def _narrow(facts: Facts) -> Facts:
    """The model in 16 bits, tied, with a frozen embedding."""
    return evolve(facts, model=tiny_model(width=16, vocab=32, dtype="bfloat16", tied=True))


def _frozen(facts: Facts) -> Facts:
    """Five blocks, some weights frozen, an odd vocabulary, 16 ranks on nodes of four."""
    model = tiny_model(blocks=5, width=16, vocab=31, frozen=("embed.weight", "norm.weight"))
    env = evolve(facts.env, world_size=16, per_node=4) if facts.env.world_size > 1 else facts.env
    return evolve(facts, model=model, env=env)


def _batchnorm(facts: Facts) -> Facts:
    """Batch norms, a machine without accelerators and with little memory."""
    env = evolve(facts.env, device="cpu", memory=60_000)
    return evolve(facts, model=with_batchnorm(facts.model), env=env)


def _transposed(facts: Facts) -> Facts:
    """Batch norms, and a head whose rows are not one after the other."""
    return evolve(facts, model=with_batchnorm(evolve(facts.model, strided=("head.weight",))))


def _biased(facts: Facts) -> Facts:
    """A norm with a bias, as TransformerEngine has them."""
    bias = ParamFact(name="norm.bias", shape=(16,), dtype="float32")
    return evolve(facts, model=evolve(facts.model, params=(*facts.model.params, bias)))


def _scheduled(facts: Facts) -> Facts:
    """A scheduler, and a second loader that is read in order."""
    ticks = SchedulerFacts(name="OneCycleLR", drives_optimizer=True, horizon=100)
    second = facts.loaders[0] if facts.loaders[0].sampler == "distributed" else tiny_loader(sampler="sequential")
    return evolve(facts, scheduler=ticks, loaders=(*facts.loaders, second))


MODELS: dict[str, Callable[[Facts], Facts]] = {
    "": lambda facts: facts,
    "16 bits, tied": _narrow,
    "partly frozen, 16 ranks": _frozen,
    "batch norms on a small CPU": _batchnorm,
    "batch norms, rows apart": _transposed,
    "scheduler and two loaders": _scheduled,
    "a norm with a bias": _biased,
    "a newer device": lambda facts: evolve(facts, env=evolve(facts.env, capability=(10, 0))),
    "device map": lambda facts: evolve(facts, model=evolve(facts.model, device_map=(("embed", "0"), ("layers", "1")))),
    "loaders of two sizes": lambda facts: evolve(facts, loaders=(*facts.loaders, tiny_loader(batch_size=2))),
}
"""What differs from the tiny model on four accelerators."""

ANYWHERE: tuple[tuple[str, Settings], ...] = (
    ("", ()),
    ("16 bits, tied", (("precision", c.BF16()), ("accumulation", 2), ("clip", c.ClipNorm(1.0)))),
    ("16 bits, tied", (("precision", c.BF16(master_weights=False, reduce_dtype="bfloat16")), ("average_each", True))),
    ("", (("precision", c.FP16(init_scale=1024.0)), ("clip", c.ClipValue(0.1)), ("accumulation", 4))),
    ("", (("precision", c.FP8(backend=c.TorchAO(recipe="rowwise"))), ("compile", c.CompileModel()))),
    ("", (("precision", c.FP8(backend=c.TransformerEngine())), ("timeout_s", 60.0))),
    ("partly frozen, 16 ranks", (("checkpointing", c.CheckpointBlocks(every=2)), ("compile", c.CompileBlocks()))),
    ("", (("weights", c.LoadWeights(PATH)), ("precision", c.BF16()))),
    ("", (("weights", c.InitWeights(seed=3)), ("optimizer", c.AdamW(lr=3e-4, groups=(c.Group(names=("*norm*",)),))))),
    ("", (("weights", c.BroadcastWeights()), ("optimizer", c.SGD(momentum=0.9)))),
    ("", (("intent", c.Intent.INFERENCE), ("entry_points", ("encode",)), ("checkpointing", c.CheckpointBlocks()))),
    ("scheduler and two loaders", (("global_batch", 64), ("scheduler_ticks", 2), ("total_steps", 50))),
    (
        "scheduler and two loaders",
        (("loaders", c.EachLoader((c.ShardLoaders(seed=7, drop_last=True), c.ShardLoaders(purpose="evaluation")))),),
    ),
    ("batch norms on a small CPU", (("loaders", c.ShardLoaders(dispatch=True)), ("backend", "gloo"))),
)
"""Asked of every engine: which model, and which settings."""
FIRST_TWO = c.TPPlan(TP_LAYERS[:2])
OF_ENGINE: dict[str, tuple[tuple[str, Settings], ...]] = {
    "single": (
        ("", (("precision", c.FP8(backend=c.MSAMP())),)),
        ("", (("compile", c.CompileModel(mode="max-autotune", fullgraph=True)), ("device", "cpu"))),
        ("", (("optimizer", (c.Muon(names=("layers.*",)), c.AdamW())), ("checkpointing", c.CheckpointBlocks()))),
        ("16 bits, tied", (("optimizer", c.Adafactor()), ("loaders", c.KeepLoaders()))),
        ("partly frozen, 16 ranks", (("precision", c.BF16(output_dtype="bfloat16")), ("average_each", True))),
    ),
    "xla": (
        ("", (("engine.forked", True), ("precision", c.BF16()))),
        ("16 bits, tied", (("clip", c.ClipNorm(1.0)), ("accumulation", 2))),
        ("partly frozen, 16 ranks", (("optimizer", c.Adam(amsgrad=True)),)),
        ("", (("optimizer", c.SGD()), ("clip", c.ClipValue(0.5)), ("average_each", True))),
    ),
    "ddp": (
        ("", (("engine.hook", c.CompressHook()), ("engine.bucket_cap_mb", 1.0))),
        ("batch norms, rows apart", (("engine.sync_batchnorm", True), ("checkpointing", c.CheckpointBlocks()))),
        ("", (("engine.hook", c.PowerSGDHook(rank=4)), ("engine.gradient_as_bucket_view", False))),
        ("batch norms on a small CPU", (("engine.broadcast_buffers", False), ("engine.find_unused_parameters", True))),
        ("", (("engine.static_graph", True), ("compile", c.CompileModel()), ("engine.broadcast_buffers", False))),
        ("partly frozen, 16 ranks", (("optimizer", (c.Muon(names=("layers.*",)), c.AdamW())), ("accumulation", 2))),
        ("partly frozen, 16 ranks", (("loaders", c.ShardLoaders(drop_last=True)), ("total_steps", 50))),
    ),
    "fsdp1": (
        ("", (("engine.sharding", "SHARD_GRAD_OP"), ("engine.use_orig_params", False))),
        ("", (("engine.sharding", "NO_SHARD"), ("engine.forward_prefetch", True))),
        ("", (("engine.sharding", "HYBRID_SHARD"), ("mesh", c.Mesh(replicate=2)), ("precision", c.BF16()))),
        ("partly frozen, 16 ranks", (("engine.wrap", c.WrapRoot()), ("engine.offload", True), ("accumulation", 2))),
        (
            "",
            (("engine.wrap", c.WrapSize(40)), ("engine.backward_prefetch", None), ("engine.limit_all_gathers", False)),
        ),
        ("batch norms, rows apart", (("engine.wrap", c.WrapPaths(("layers.*",))), ("engine.buffer_dtype", "bfloat16"))),
        (
            "",
            (
                ("engine.sync_module_states", True),
                ("weights", c.BroadcastWeights()),
                ("engine.cast_forward_inputs", True),
            ),
        ),
    ),
    "fsdp2": (
        ("", (("mesh", c.Mesh(replicate=2)), ("precision", c.BF16(output_dtype="bfloat16")))),
        ("partly frozen, 16 ranks", (("engine.reshard_after_forward", 4), ("engine.wrap", c.WrapRoot()))),
        ("partly frozen, 16 ranks", (("mesh", c.Mesh(replicate=4)), ("accumulation", 4), ("average_each", True))),
        ("", (("engine.offload", c.OffloadToCPU(pin_memory=False)), ("clip", c.ClipNorm(0.5, norm_type=1.0)))),
        ("", (("engine.reshard_after_forward", False), ("engine.ignored", ("head",)), ("engine.reduce_unused", True))),
        ("", (("engine.wrap", c.WrapClasses(("Block", "Embedding"), paths=("head",))), ("precision", c.BF16()))),
        (
            "batch norms, rows apart",
            (("engine.wrap", c.WrapSize(40)), ("engine.cast_forward_inputs", False), ("precision", c.BF16())),
        ),
        ("16 bits, tied", (("mesh", c.Mesh(shard=2, tensor=2)), ("tp_plan", FIRST_TWO), ("accumulation", 2))),
        (
            "partly frozen, 16 ranks",
            (("mesh", c.Mesh(replicate=2, shard=4, tensor=2)), ("tp_plan", c.TPPlan(TP_LAYERS[:2]))),
        ),
        ("", (("precision", c.FP8(backend=c.TorchAO(float8_all_gather=True))), ("engine.wrap", c.WrapBlocks()))),
    ),
    "tensor": (
        ("", (("tp_plan", c.TPPlan(TP_LAYERS)), ("precision", c.BF16()), ("accumulation", 2))),
        ("16 bits, tied", (("clip", c.ClipNorm(1.0)), ("optimizer", c.AdamW()))),
        ("", (("weights", c.LoadWeights(PATH)), ("compile", c.CompileBlocks()))),
        ("scheduler and two loaders", (("global_batch", 16),)),
        ("", (("checkpointing", c.CheckpointBlocks()), ("intent", c.Intent.INFERENCE))),
        ("", (("tp_plan", c.TPPlan((c.TPLayer("layers.*.attn", "replicate"),))),)),
    ),
    "zero": (
        ("", (("engine.stage", 0), ("precision", c.BF16()))),
        ("partly frozen, 16 ranks", (("engine.stage", 1), ("accumulation", 2), ("clip", c.ClipNorm(1.0)))),
        ("", (("engine.stage", 3), ("precision", c.BF16()), ("engine.leaf_modules", ("Block",)))),
        ("", (("engine.stage", 3), ("engine.offload_param", "cpu"), ("engine.offload_optimizer", "cpu"))),
        ("", (("engine.offload_optimizer", "cpu"), ("optimizer", c.AdamW()), ("precision", c.FP16()))),
        ("scheduler and two loaders", (("engine.micro_batch_of", "largest"), ("global_batch", 32))),
        ("", (("optimizer", c.AdamW()), ("engine.schedule", c.Schedule(warmup_steps=3, total_steps=20)))),
        ("", (("engine.config", '{"zero_optimization": {"reduce_bucket_size": 64, "overlap_comm": true}}'),)),
        ("", (("engine.stage", 3), ("engine.config", '{"zero_optimization": {"sub_group_size": 32}}'))),
        ("", (("precision", c.FP8(backend=c.MSAMP())),)),
        ("", (("engine.stage", 3), ("weights", c.LoadWeights(PATH)), ("optimizer", c.AdamW()))),
    ),
}
"""Asked of one engine besides."""
CASES = {engine: (*ANYWHERE, *OF_ENGINE[engine]) for engine in ENGINES}
BEGINS: dict[str, Settings] = {"tensor": (("tp_plan", FIRST_TWO),), "xla": (("loaders", c.KeepLoaders()),)}
"""What an engine cannot do without."""


def asked(engine: str, model: str, settings: Settings) -> tuple[c.Config, Facts]:
    """The config with these settings, and the facts that it is planned for."""
    cfg = c.Config(engine=ENGINES[engine])
    for path, value in (*BEGINS.get(engine, ()), *settings):
        cfg = changed(cfg, path, value)
    model_facts = evolve(tiny_model(width=16, vocab=32), methods=("encode",))
    loader = tiny_loader(sampler="distributed" if engine == "xla" else "random")
    plain = tiny_facts(model_facts, world=4, device="cuda", loader=loader)
    env = evolve(plain.env, per_node=4, capability=(9, 0), bf16=True, libraries=LIBRARIES)
    env = evolve(env, world_size=1 if engine == "single" else 4, device="cpu" if engine == "xla" else "cuda")
    facts = MODELS[model](evolve(plain, env=env))
    facts = evolve(facts, checkpoint=tiny_checkpoint(facts.model) if isinstance(cfg.weights, c.LoadWeights) else None)
    made = cfg.optimizer is None and cfg.intent is c.Intent.TRAINING
    trained = tuple(one.name for one in facts.model.params if one.requires_grad)
    optimizer = tiny_facts(facts.model).optimizer if made and trained else None
    return cfg, evolve(facts, optimizer=optimizer)


def planned() -> Iterator[Plan]:
    """Every plan that the cases have."""
    for engine, cases in CASES.items():
        for case in cases:
            made = planner.plan(*asked(engine, *case))
            if isinstance(made, Success):
                yield made.unwrap()


def text(engine: str, model: str, settings: Settings) -> str:
    """One case: its settings, then the plan in full, or the rules that refuse it."""
    cfg, facts = asked(engine, model, settings)
    head = ", ".join(f"{path}={brief(value)}" for path, value in settings) or "nothing asked for"
    made = planner.plan(cfg, facts)
    lines = _plan(made.unwrap()) if isinstance(made, Success) else _findings("refused", made.failure())
    return "\n".join((f"## {head}{model and f'; {model}'}", *lines))


def brief(value: Any) -> str:
    """A value as Python, without the fields that have their default."""
    if isinstance(value, tuple):
        inner = ", ".join(map(brief, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not has(type(value)):
        return str(value) if isinstance(value, Enum) else repr(value)
    said = (
        f"{field.name}={brief(held)}"
        for field in fields(type(value))
        if field.eq and (held := getattr(value, field.name)) != _default(type(value), field.name)
    )
    return f"{type(value).__name__}({', '.join(said)})"


def _default(cls: type, name: str) -> Any:
    """The default of a field; an object that nothing equals where it has none."""
    return next(field.default for field in field_types.fields(cls) if field.name == name)


def _plan(plan: Plan) -> Iterator[str]:
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh)
    yield f"mesh {mesh or 'none'}, {plan.world_size} ranks"
    yield from _findings("warned", plan.warnings)
    for one in plan.steps:
        yield f"  {brief(one.step)}"
    for layout in plan.layout:
        held = f"{layout.dtype} {layout.cls} {' '.join(layout.placements)}".strip()
        flat = f", {brief(layout.flat)}" if layout.flat else ""
        trained = "" if layout.requires_grad else ", frozen"
        yield f"  {layout.name} {list(layout.shape)} {held} of {layout.unit or 'the root'}{flat}{trained}"
    yield f"  {brief(evolve(plan.owners, master_weights=''))}"
    run = ((field.name, getattr(plan.run, field.name)) for field in fields(type(plan.run)))
    yield f"  run: {', '.join(f'{name}={brief(held)}' for name, held in run if held)}"
    yield from _prediction(predict(plan))


def _findings(title: str, findings: tuple[Finding, ...]) -> Iterator[str]:
    for one in findings:
        yield f"{title} {one.rule} at {one.where}"


def _prediction(found: Prediction) -> Iterator[str]:
    """Bytes that all ranks hold alike, then those of each class of ranks, then what is sent in a step."""
    if not found.classes:
        yield "nothing predicted"
        return
    shared = [term for term in found.classes[0].terms if all(term in one.terms for one in found.classes)]
    yield "every rank"
    yield from _terms(shared)
    for one in found.classes:
        yield f"ranks {one.first} to {one.last}, {one.ranks} in all{', empty' if one.empty else ''}"
        yield from _terms([term for term in one.terms if term not in shared])
    for entry in found.traffic:
        over = f"{entry.ranks} ranks of {entry.axis} at distance {entry.stride}"
        yield f"  {entry.collective} {entry.bytes} B {entry.label} in {entry.calls} calls over {over}"


def _terms(terms: list[Term]) -> Iterator[str]:
    for term in terms:
        yield f"  {term.category} {term.bytes} B {term.label}, {term.place}, {term.lifetime}"


def sentences() -> Iterator[str]:
    """Every sentence that these plans say, once: why a step is there, where master weights are, what bytes are for."""
    found: set[str] = set()
    for plan in planned():
        found |= {f"{type(one.step).__name__}: {one.reason}  [{', '.join(one.behaviour_ids)}]" for one in plan.steps}
        found.add(f"master weights: {plan.owners.master_weights}")
        made = predict(plan)
        found |= {f"{term.category}: {term.what}" for one in made.classes for term in one.terms}
        found |= {f"{entry.collective}: {entry.what}" for entry in made.traffic}
        found |= {f"not predicted: {one}" for one in made.not_predicted}
    yield from sorted(found)
