"""``FullyShardedDataParallel`` per unit: real training on two and four processes, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.optim import AdamW, Optimizer

import prepkit as pk
from prepkit import config as c
from prepkit.applying.handlers import fsdp1
from prepkit.applying.step_kinds import handlers
from prepkit.interpreter import Halted, interpret
from prepkit.objects import fsdp1_flat, names
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.steps import (
    CheckpointModules,
    FlatUnit,
    LocalDevice,
    RegroupOptimizer,
    ReleaseOptimizer,
    WrapFSDP1,
)
from tests.support.drawn_training import found_by_proof
from tests.support.fragile_model import WIDTH, WORDS, Tiny
from tests.support.gang import Gang
from tests.support.single_step import do, fake_group, problems, shard_mesh


@pytest.mark.parametrize("on_device", [True, False])
def test_a_scalar_of_joined_states_lies_where_the_optimizer_keeps_it(on_device: bool) -> None:
    flat = nn.Parameter(torch.empty(4, device="meta"))
    states = {name: {"step": torch.tensor(3.0)} for name in "ab"}
    shapes = {name: SimpleNamespace(shape=torch.Size([2])) for name in "ab"}
    joined = fsdp1._join(states, shapes, flat, on_device)  # type: ignore[arg-type]
    assert joined["step"].device.type == ("meta" if on_device else "cpu")


BLOCKS = ("layers.0", "layers.1", "layers.2")
BATCHES = torch.randint(WORDS, (6, 4, 4), generator=torch.Generator().manual_seed(5))
"""Six micro-batches of four samples."""


def wrapping(*paths: str, **changes: Any) -> WrapFSDP1:
    usual = WrapFSDP1(
        units=(*(FlatUnit(path=path) for path in paths), FlatUnit(path="")),
        sharding="FULL_SHARD",
        device=LocalDevice(type="cpu"),
        param_dtype=None,
        reduce_dtype=None,
        buffer_dtype=None,
        offload=False,
        backward_prefetch="BACKWARD_PRE",
        forward_prefetch=False,
        limit_all_gathers=True,
        use_orig_params=True,
        sync_module_states=False,
        ignored=(),
    )
    return evolve(usual, **changes)


# --- the real thing ------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Two blocks with a batch norm each, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits.reshape(*tokens.shape, WORDS)


class Thawed(Tiny):
    """Nothing is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_()


class Low(Tiny):
    """Stored in bfloat16."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def two_groups(model: nn.Module) -> Optimizer:
    """The blocks learn faster than the rest."""
    inner = [p for n, p in model.named_parameters() if p.requires_grad and n.startswith("layers")]
    outer = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("layers")]
    return AdamW([{"params": outer}, {"params": inner, "lr": 0.02}], lr=0.01)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def warm_up(model: nn.Module, optimizer: Optimizer) -> None:
    """Two steps on equal data, so that the optimizer has state when the plan is made."""
    for tokens in BATCHES[:2]:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def prepared(rank: int, world: int, cfg: c.Config, kind: type[nn.Module], warm: bool) -> list[str]:
    """What proofs of all windows find, by which it trains as plain torch; gradients are averaged at the end of each."""
    model = seeded(kind)
    optimizer = two_groups(model) if cfg.optimizer is None else None
    if warm and optimizer is not None:
        warm_up(model, optimizer)
    ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer), prove=2)
    assert isinstance(ready.model, FullyShardedDataParallel)
    for index, tokens in enumerate(BATCHES[2:], 1):
        averages = {unit._sync_gradients for unit in fsdp1_flat.units(ready.model).values()}
        assert averages == {index % (cfg.accumulation or 1) == 0}
        ready.backward(loss_of(ready.model, tokens.chunk(world)[rank]))
        ready.step()
    return found_by_proof(ready)


USUAL = c.Config(engine=c.FSDP1(), accumulation=2, clip=c.ClipNorm(0.1))
FLAT = c.FSDP1(use_orig_params=False)
CASES: dict[str, tuple[c.Config, type[nn.Module], bool]] = {
    "full-shard, state": (USUAL, Tiny, True),
    "grad-op": (evolve(USUAL, engine=c.FSDP1(sharding="SHARD_GRAD_OP")), Tiny, False),
    "no-shard, state": (evolve(USUAL, engine=c.FSDP1(sharding="NO_SHARD")), Tiny, True),
    "root only, other norm": (evolve(USUAL, engine=c.FSDP1(wrap=c.WrapRoot()), clip=c.ClipNorm(0.1, 1.0)), Tiny, False),
    "nested units, value": (
        evolve(USUAL, engine=c.FSDP1(wrap=c.WrapPaths(("layers.*", "layers.*.inner"))), clip=c.ClipValue(1e-3)),
        Tiny,
        False,
    ),
    "prefetch": (
        evolve(USUAL, engine=c.FSDP1(forward_prefetch=True, backward_prefetch="NO_PREFETCH", limit_all_gathers=False)),
        Tiny,
        False,
    ),
    "checkpointed and compiled blocks": (
        evolve(USUAL, checkpointing=c.CheckpointBlocks(), compile=c.CompileBlocks(backend="eager")),
        Tiny,
        False,
    ),
    "compiled": (evolve(USUAL, compile=c.CompileModel(backend="aot_eager")), Tiny, False),
    "flat, state": (evolve(USUAL, engine=FLAT), Thawed, True),
    "flat, created": (evolve(USUAL, engine=FLAT, optimizer=c.AdamW(lr=0.01)), Thawed, False),
    "created": (evolve(USUAL, optimizer=c.AdamW(lr=0.01)), Thawed, False),
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_what_one_learns(gang2: Gang, case: str) -> None:
    assert gang2.run(prepared, *CASES[case], timeout=120) == [[], []]


WARM = True
HYBRID = c.Mesh(replicate=2, shard=2)


@pytest.mark.parametrize("sharding", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_replicas_of_flat_shards_learn_what_one_process_learns(gang4: Gang, sharding: Any) -> None:
    cfg = evolve(USUAL, engine=c.FSDP1(sharding=sharding), mesh=HYBRID)
    assert gang4.run(prepared, cfg, Tiny, WARM, timeout=120) == [[]] * 4


def computing(rank: int, world: int) -> dict[str, Any]:
    """What a model with batch norms, stored in bfloat16, computes in under BF16."""
    model = seeded(Normed).to(torch.bfloat16)
    cfg = c.Config(engine=c.FSDP1(wrap=c.WrapPaths(("layers.*",))), precision=c.BF16(), optimizer=c.SGD(lr=0.1))
    ready = pk.apply(pk.build_plan(cfg, model))
    seen: dict[str, Any] = {}
    there = names.named_modules(ready.model)
    for path in ("layers.0.0", "layers.0.1"):
        there[path].register_forward_hook(
            lambda module, _, out, path=path: seen.update({path: (str(module.weight.dtype), str(out.dtype))})
        )
    before = there["layers.0.1"].running_mean.clone()
    out = ready.model(BATCHES[0])
    ready.backward(out.square().mean())
    ready.step()
    stored = {str(piece.flat.dtype) for piece in fsdp1_flat.flat_shards(ready.model).values()}
    moved = bool((there["layers.0.1"].running_mean != before).any())
    return {
        **seen,
        "out": str(out.dtype),
        "stored": stored,
        "units": list(fsdp1_flat.units(ready.model)),
        "moved": moved,
    }


def test_batch_norms_stay_in_float32_while_all_else_computes_in_bfloat16(gang2: Gang) -> None:
    for seen in gang2.run(computing):
        assert seen["layers.0.0"] == ("torch.bfloat16", "torch.bfloat16")
        assert seen["layers.0.1"][0] == "torch.float32"
        assert seen["out"] == "torch.float32"
        assert seen["stored"] == {"torch.float32"}
        assert seen["units"] == ["", "layers.0", "layers.0.1", "layers.1", "layers.1.1"]
        assert seen["moved"]


def upcast(rank: int, world: int) -> dict[str, tuple[str, bool]]:
    """Stored dtype and trainability of a bfloat16 model whose embedding, and a scale in each block, are frozen."""
    model = seeded(Low)
    model.get_submodule("embed").requires_grad_(requires_grad=False)
    cfg = c.Config(engine=c.FSDP1(), precision=c.BF16(), optimizer=c.SGD(lr=0.1))
    ready = pk.apply(pk.build_plan(cfg, model))
    loss_of(ready.model, BATCHES[0]).backward()
    return {n: (str(p.flat.dtype), p.flat.requires_grad) for n, p in fsdp1_flat.flat_shards(ready.model).items()}


def test_a_unit_that_trains_something_is_stored_in_float32_whole_and_a_frozen_one_as_it_came(gang2: Gang) -> None:
    for found in gang2.run(upcast):
        assert found.pop("embed.weight") == ("torch.bfloat16", False)
        assert set(found.values()) == {("torch.float32", True)}
        assert "layers.0.scale" in found


def ignoring(rank: int, world: int) -> tuple[list[str], torch.Size, float]:
    model = seeded(Tiny)
    model.get_submodule("embed").requires_grad_(requires_grad=False)
    cfg = c.Config(engine=c.FSDP1(ignored=("head",)), optimizer=c.SGD(lr=0.1))
    ready = pk.apply(pk.build_plan(cfg, model))
    ready.backward(loss_of(ready.model, BATCHES[0]))
    ready.step()
    held = names.named_parameters(ready.model)["embed.weight"]
    return list(fsdp1_flat.flat_shards(ready.model)), held.shape, float((held - seeded(Tiny).embed.weight).abs().max())


def test_an_ignored_module_stays_whole_and_takes_along_what_is_tied_to_it(gang2: Gang) -> None:
    for cut, shape, change in gang2.run(ignoring):
        assert "embed.weight" not in cut
        assert len(cut) == 15
        assert shape == (WORDS, WIDTH)
        assert change == 0


def inferring(rank: int, world: int) -> tuple[int, bool]:
    model = seeded(Tiny).requires_grad_(requires_grad=False).eval()
    expected = model(BATCHES[0])
    ready = pk.apply(pk.build_plan(c.Config(engine=c.FSDP1(), intent=c.Intent.INFERENCE), model))
    with torch.no_grad():
        same = torch.allclose(ready.model(BATCHES[0]), expected, atol=1e-6)
    return len(fsdp1_flat.units(ready.model)), same


def adapted(rank: int, world: int) -> tuple[int, list[bool]]:
    """Gradients that a rank holds of a large frozen layer and a small trained one, and whether each one steps."""
    del rank, world
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    model[0].requires_grad_(requires_grad=False)
    cfg = c.Config(engine=c.FSDP1(wrap=c.WrapRoot()), clip=c.ClipValue(1e-3), optimizer=c.SGD(lr=0.1))
    ready: Any = pk.apply(pk.build_plan(cfg, model))
    stepped = []
    for _ in range(2):
        ready.backward(ready.model(torch.ones(3, 16)).sum())
        held = [param for param in ready.model.parameters() if param.grad is not None and param.grad.numel()]
        stepped.append(ready.step())
    return len(held), stepped


def test_a_rank_whose_shards_are_all_frozen_clips_nothing_and_steps_with_the_others(gang2: Gang) -> None:
    assert gang2.run(adapted) == [(0, [True, True]), (2, [True, True])]


def test_a_model_for_inference_is_sharded_too(gang2: Gang) -> None:
    assert gang2.run(inferring) == [(4, True)] * 2


# --- one step ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_wrapper_goes_inside_the_unit_and_names_stay() -> None:
    with fake_group(2):
        model = Tiny()
        before = list(names.named_parameters(model))
        target = Target(model=model, mesh=shard_mesh(2))
        do(CheckpointModules(paths=BLOCKS, preserve_rng_state=True), target)
        do(wrapping(*BLOCKS), target)
        for path in BLOCKS:
            (wrapper, inner) = names.named_slots(target.model)[path], fsdp1_flat.units(target.model)[path]
            assert wrapper is inner
            assert isinstance(inner._fsdp_wrapped_module, CheckpointWrapper)
        assert sorted(names.named_parameters(target.model)) == sorted(before)
        held = names.all_parameter_names(target.model)
        assert held["head.weight"] is held["embed.weight"]


def test_what_is_asked_for_reaches_torch() -> None:
    with fake_group(2):
        target = Target(model=Tiny(), mesh=shard_mesh(2))
        asked = {"forward_prefetch": True, "backward_prefetch": "BACKWARD_POST", "limit_all_gathers": False}
        low = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "buffer_dtype": "float16"}
        do(wrapping("layers.0", sharding="SHARD_GRAD_OP", offload=True, **asked, **low), target)
        for unit in fsdp1_flat.units(target.model).values():
            assert unit.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
            assert (unit.forward_prefetch, unit.backward_prefetch) == (True, BackwardPrefetch.BACKWARD_POST)
            assert (unit.limit_all_gathers, unit.cpu_offload.offload_params) == (False, True)
            assert unit.mixed_precision == MixedPrecision(torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize("sync", [False, True])
def test_every_unit_is_told_the_device_of_the_rank_and_whether_rank_0_is_broadcast(
    monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    given: list[Any] = []
    real = FullyShardedDataParallel

    def wrap(
        module: nn.Module, *, device_id: Any, sync_module_states: bool, **options: Any
    ) -> FullyShardedDataParallel:
        given.append((device_id, sync_module_states))
        return real(module, device_id=torch.device("cpu"), **options)

    monkeypatch.setattr(fsdp1, "FullyShardedDataParallel", wrap)
    monkeypatch.setattr(launcher, "bind", lambda device: (device.type, 5))
    with fake_group(2):
        target = Target(model=Tiny(), mesh=shard_mesh(2))
        step = wrapping("layers.0", device=LocalDevice(type="cuda"), sync_module_states=sync)
        fsdp1.WRAP.do(step, target)
    assert given == [(("cuda", 5), sync)] * 2


class Wrapped(nn.Module):
    """Stands in for torch's wrapper, and keeps what it was given."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options


def test_mesh_ignored_modules_and_a_unit_of_full_precision_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp1, "FullyShardedDataParallel", Wrapped)
    model = Tiny()
    step = wrapping("layers.0", ignored=("layers.2",), param_dtype="bfloat16", use_orig_params=False)
    full = evolve(step, units=(evolve(step.units[0], full_precision=True), step.units[1]))
    with fake_group(2):
        mesh = shard_mesh(2)
        target: Any = Target(model=model, mesh=mesh)
        fsdp1.WRAP.do(full, target)
        root, block = target.model.options, model.layers[0].options
        assert root["device_mesh"] is block["device_mesh"] is mesh
    assert root["ignored_states"] == block["ignored_states"] == [model.layers[2]]
    whole = torch.float32
    assert block["mixed_precision"] == MixedPrecision(whole, whole, whole, cast_forward_inputs=False)
    assert root["mixed_precision"] == MixedPrecision(torch.bfloat16)
    assert root["use_orig_params"] is False


@pytest.mark.parametrize("elsewhere", ["a parameter", "a buffer", "nothing"])
def test_what_is_ignored_is_moved_whole_as_torch_moves_what_it_wraps(
    monkeypatch: pytest.MonkeyPatch, elsewhere: str
) -> None:
    """Meta stands in for the device."""
    monkeypatch.setattr(fsdp1, "FullyShardedDataParallel", Wrapped)
    monkeypatch.setattr(launcher, "bind", lambda device: torch.device("meta"))
    model = Tiny()
    model.layers[2] = nn.BatchNorm1d(3, device="meta")
    if elsewhere == "a parameter":
        model.layers[2].bias = nn.Parameter(torch.zeros(3))
    if elsewhere == "a buffer":
        model.layers[2].running_mean = torch.zeros(3)
    moves: list[nn.Module] = []
    real = nn.Module.to
    monkeypatch.setattr(nn.Module, "to", lambda self, *how: (moves.append(self), real(self, *how))[1])
    with fake_group(2):
        fsdp1.WRAP.do(wrapping("layers.0", ignored=("layers.2",)), Target(model=model, mesh=shard_mesh(2)))
    ignored = model.layers[2]
    assert all(tensor.is_meta for tensor in (*ignored.parameters(), *ignored.buffers()))
    assert moves == ([] if elsewhere == "nothing" else [ignored])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.layers[0].weight.grad = torch.ones(2, 2)


def test_what_torch_would_refuse_half_way_is_refused_before_it_begins() -> None:
    assert problems(wrapping("layers", "nose", sync_module_states=True), Target(model=Scaled())) == (
        "plan.other-model at nose: the model has no such module",
        "wrap.container at layers: a container without forward cannot be a unit",
        "units.scalar at scale: a scalar cannot be flattened; Make it a tensor of shape (1,).",
        "units.integer at table: torch.int64 cannot be flattened",
        "fsdp1.sync-on-cpu at config.engine: torch broadcasts module states on an accelerator only",
        "apply.gradient-lost at layers.0.weight: there is a gradient, which would be lost",
    )


def test_a_compiled_model_is_wrapped_around_its_compilation_and_compiled_no_second_time() -> None:
    with fake_group(2):
        model = torch.compile(Tiny(), backend="eager")
        target = Target(model=model, mesh=shard_mesh(2))
        do(wrapping(*BLOCKS), target)
        assert isinstance(target.model, FullyShardedDataParallel)
        assert target.model._fsdp_wrapped_module is model
        assert list(fsdp1_flat.units(target.model)) == ["", *BLOCKS]
        other = Target(model=Tiny(), mesh=shard_mesh(2))
        do(wrapping(), other)
        again = pk.check(c.Config(engine=c.FSDP1()), torch.compile(other.model, backend="eager"))
        assert "model.already-wrapped" in {finding.rule for finding in again}
    twice = c.Config(engine=c.FSDP1(), compile=c.CompileModel(backend="eager"))
    assert "model.already-compiled" in {finding.rule for finding in pk.check(twice, model)}


def test_torch_itself_broadcasts_no_module_states_on_the_cpu() -> None:
    with fake_group(2), pytest.raises(ValueError, match="requires them to be on GPU"):
        FullyShardedDataParallel(Tiny(), device_id=torch.device("cpu"), sync_module_states=True)


def test_a_wrapped_model_is_refused() -> None:
    with fake_group(2):
        target = Target(model=Tiny(), mesh=shard_mesh(2))
        do(wrapping("layers.0"), target)
        text = (
            "model.already-wrapped at '' (the root), layers.0: sharded already; Apply to a model that was not prepared."
        )
        assert problems(wrapping("layers.1"), target) == (text,)


def test_a_failure_names_the_flat_units_and_says_that_there_is_no_way_back() -> None:
    model = Tiny()
    model.layers[1].inner.bias.data = model.layers[1].inner.bias.data.double()
    with fake_group(2):
        halted = interpret((wrapping(*BLOCKS),), handlers(), Target(model=model, mesh=shard_mesh(2)))
    assert isinstance(halted, Halted)
    assert halted.torn
    assert "unit layers.1: could not be wrapped (wrapped before it: layers.0): Must flatten" in str(halted)


def test_wrapping_without_a_mesh_names_the_step_that_is_missing() -> None:
    with pytest.raises(RuntimeError, match="BuildMesh has to come before this step"):
        do(wrapping(), Target(model=Tiny()))


# --- the optimizer without original parameters ----------------------------------------------------------------------


def regrouped(rank: int, change: str) -> tuple[Target, str]:
    """A model under FSDP1 without original parameters, whose stateful optimizer takes the flat ones."""
    model = seeded(Thawed)
    optimizer = two_groups(model)
    warm_up(model, optimizer)
    held = names.named_parameters(model)
    slots = [[name for p in group["params"] for name in held if held[name] is p] for group in optimizer.param_groups]
    if change == "two groups":
        slots[0].append(slots[1].pop())
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    if change == "counts":
        optimizer.state[held["layers.0.scale"]]["step"] += 1
    if change == "no state":
        del optimizer.state[held["layers.0.scale"]]
    target = Target(model=model, optimizer=optimizer, mesh=shard_mesh(2))
    plan = (tuple(map(tuple, slots)),)
    steps = (ReleaseOptimizer(slots=plan[0]), wrapping(*BLOCKS, use_orig_params=False), RegroupOptimizer(slots=plan[0]))
    outcome = interpret(steps, handlers(), target)
    return target, str(outcome) if isinstance(outcome, Halted) else ""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_state_of_a_flat_parameter_is_that_of_its_parts_end_to_end(rank: int) -> None:
    whole = seeded(Thawed)
    optimizer = two_groups(whole)
    warm_up(whole, optimizer)
    with fake_group(2, rank):
        target, halted = regrouped(rank, "")
        assert not halted
        assert target.optimizer is not None
        assert [len(group["params"]) for group in target.optimizer.param_groups] == [1, 3]
        assert [group["lr"] for group in target.optimizer.param_groups] == [0.01, 0.02]
        unit = fsdp1_flat.units(target.model)["layers.1"]
        mine = target.optimizer.state[unit._flat_param]
        ends = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in whole.layers[1].parameters()])
        assert torch.equal(mine["exp_avg"], nn.functional.pad(ends, (0, len(ends) % 2)).chunk(2)[rank])
        assert mine["step"] == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("two groups", "fsdp1.unit-in-two-groups"),
        ("counts", "'step' differs, and a flat parameter has one"),
        ("no state", "layers.0.scale: without the state that others of its unit have"),
    ],
)
def test_what_one_flat_parameter_cannot_be_halts(change: str, text: str) -> None:
    with fake_group(2):
        assert text in regrouped(0, change)[1]
