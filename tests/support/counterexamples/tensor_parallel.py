"""For every rule about tensor parallelism one pair on which it fires."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from prepkit.config import (
    DDP,
    FSDP2,
    Config,
    Mesh,
    TensorParallel,
    TensorParallelPlan,
    TPLayer,
    TPPlan,
    TPPlanFromModel,
)
from prepkit.facts import ArchitectureFacts, ModelFacts, ParamFact
from prepkit.testing.tiny import tiny_facts, tiny_model, tiny_optimizer
from tests.support.counterexamples.build import Counterexample


def _rows(*rows: tuple[str, str]) -> TPPlan:
    return TPPlan(tuple(TPLayer(pattern, style) for pattern, style in rows))  # type: ignore[arg-type]  # a Literal


def _parallel(tensor: TensorParallelPlan, model: ModelFacts | None = None, world: int = 2) -> Counterexample:
    return Config(engine=TensorParallel(), tp_plan=tensor), tiny_facts(model, world=world)


def _arrives(tp_size: int) -> ModelFacts:
    """A model whose head was cut over two ranks when it was loaded."""
    model = evolve(tiny_model(), architecture=ArchitectureFacts(tp_size=tp_size))
    cut = (evolve(p, cls="DTensor", placements=("shard(0)",)) if p.name == "head.weight" else p for p in model.params)
    return evolve(model, params=tuple(cut))


def _on_torch(version: str, cfg: Config) -> Counterexample:
    """Eight GPUs, and blocks of 12 rows."""
    facts = tiny_facts(tiny_model(width=3), world=8, device="cuda")
    return cfg, evolve(facts, env=evolve(facts.env, torch=version))


def _fused() -> Counterexample:
    cfg, facts = _parallel(_rows(("layers.*.mlp", "colwise")))
    held = tiny_optimizer(facts.model)
    (group,) = held.groups
    return cfg, evolve(facts, optimizer=evolve(held, groups=(evolve(group, options=(("fused", True),)),)))


_MLP = _rows(("layers.*.mlp", "colwise"))
_CONV = ParamFact(name="norm.kernel", shape=(4, 4), dtype="float32")

COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "mesh.tensor-needs-dtensors": lambda: (
        Config(engine=DDP(), mesh=Mesh(replicate=4, shard=1, tensor=2)),
        tiny_facts(world=8),
    ),
    "mesh.tensor-alone": lambda: (
        Config(engine=TensorParallel(), mesh=Mesh(tensor=2), tp_plan=_MLP),
        tiny_facts(world=8),
    ),
    "mesh.tensor-takes-all": lambda: (
        Config(engine=FSDP2(), mesh=Mesh(shard=1, tensor=8), tp_plan=_MLP),
        tiny_facts(world=8),
    ),
    "tensor.no-plan": lambda: _parallel(TPPlanFromModel()),
    "tensor.style-unknown": lambda: _parallel(
        TPPlanFromModel(),
        evolve(tiny_model(), tensor_plan=(("layers.*.mlp", "colwise"), ("layers.*.attn", "moe_tp_experts"))),
    ),
    "tensor.pattern-not-found": lambda: _parallel(_rows(("layers.*.mlp", "colwise"), ("layer.*.attn", "rowwise"))),
    "tensor.not-a-layer": lambda: _parallel(_rows(("norm", "colwise")), tiny_model(extra=(_CONV,))),
    "tensor.named-twice": lambda: _parallel(_rows(("layers.*.mlp", "colwise"), ("layers.0.*", "colwise"))),
    "tensor.not-divisible": lambda: _parallel(_rows(("layers.*.attn", "colwise"), ("head", "colwise")), world=8),
    "tensor.uneven-shards": lambda: _on_torch("2.7.1", Config(engine=FSDP2(), mesh=Mesh(tensor=2), tp_plan=_MLP)),
    "tensor.tie-broken": lambda: _parallel(_rows(("embed", "colwise"), ("head", "colwise")), tiny_model(tied=True)),
    "tensor.size-differs": lambda: _parallel(TPPlanFromModel(), _arrives(4)),
    "tensor.mixed-optimizer": _fused,
    "tensor.not-read": lambda: (Config(tp_plan=_MLP), tiny_facts()),
}
"""Rule id to a config and facts on which the rule fires."""
