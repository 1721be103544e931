"""Rank 0's values reach every rank: once, in messages of bounded size, into its shards as planned; or all fail."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import prepkit as pk
from prepkit.applying.handlers import allocate, send_weights
from prepkit.applying.handlers.send_weights import send, send_do
from prepkit.applying.handlers.stash import stash_do, stash_undo
from prepkit.objects.target import Target
from prepkit.plan import broadcast
from prepkit.ranks import channel as channels
from prepkit.ranks.channel import P2PChannel
from prepkit.steps import AllocateTensors, LocalDevice, SendTensors, StashTensors, Transfer
from tests.support.fragile_model import TOKENS, Tiny, planned, stepped
from tests.support.gang import Gang
from tests.support.in_memory_messages import InMemoryNetwork, Work
from tests.support.meta_models import held, on_meta, saved, together
from tests.support.snapshot import differences, snapshot
from tests.support.transformers_models import build

SEND = pk.BroadcastWeights()

# --- the same training -----------------------------------------------------------------------------------------------

MESHES = {"replicas of shards": pk.Mesh(replicate=2, shard=2), "parallelized layers": pk.Mesh(shard=2, tensor=2)}
CASES: dict[str, pk.Config] = {
    "shards": pk.Config(engine=pk.FSDP2(), weights=SEND),
    "one unit": pk.Config(engine=pk.FSDP2(wrap=pk.wrap.WrapRoot()), weights=SEND),
    "checkpointed, compiled": pk.Config(
        engine=pk.FSDP2(),
        weights=SEND,
        checkpointing=pk.CheckpointBlocks(),
        compile=pk.CompileBlocks(backend="eager"),
    ),
    "offloaded": pk.Config(engine=pk.FSDP2(offload=pk.OffloadToCPU()), weights=SEND),
    "whole": pk.Config(engine=pk.DDP(), weights=SEND),
    "replicas of shards": pk.Config(engine=pk.FSDP2(), mesh=MESHES["replicas of shards"], weights=SEND),
    "parallelized layers": pk.Config(engine=pk.FSDP2(), mesh=MESHES["parallelized layers"], weights=SEND),
}


@contextmanager
def shards_alone() -> Iterator[None]:
    """Meanwhile no shard is so small that the whole is sent instead."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(broadcast, "TINY", 0)
        yield


def trained(rank: int, world: int, family: str, cases: tuple[str, ...], others: str) -> dict[str, float]:
    """Largest differences from the model in one process: of loss, of parameters and buffers after a step of AdamW."""
    with nullcontext() if others == "other values" else shards_alone():
        return {name: value for case in cases for name, value in _trained(rank, world, family, case, others).items()}


def _trained(rank: int, world: int, family: str, case: str, others: str) -> dict[str, float]:
    found = {}
    full, batch = build(family)
    alone = torch.optim.AdamW(full.parameters(), lr=1e-3)
    loss = full(**batch).loss
    loss.backward()
    alone.step()
    model = build(family)[0] if rank == 0 else on_meta(family)[0] if others == "meta" else build(family, seed=7)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ready = pk.apply(pk.build_plan(CASES[case], model, optimizer=optimizer))
    mine = together(ready, batch, rank, world, readers=world // 2 if case == "parallelized layers" else world)
    expected, there = held(full), held(ready.model)
    assert list(there) == list(expected)
    assert all(there[name].dtype == value.dtype for name, value in expected.items())
    slots = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in slots} == {id(p) for p in ready.model.parameters()}
    assert len(slots) == len(list(full.parameters())), "tied ones are one, also in the optimizer"
    found[f"{case}: loss"] = abs(mine - float(loss.detach()))
    found[f"{case}: step"] = max(float((there[name] - value).abs().max()) for name, value in expected.items())
    ready.close()
    return found


def from_files(rank: int, world: int, path: str) -> dict[str, float]:
    """Of a family whose files transformers merges as it loads them, on rank 0 alone."""
    from transformers import MixtralForCausalLM

    full, batch = build("mixtral")
    loss = full(**batch).loss
    model = MixtralForCausalLM.from_pretrained(path).train() if rank == 0 else on_meta("mixtral")[0]
    ready = pk.apply(pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=SEND, optimizer=pk.optim.AdamW()), model))
    there = held(ready.model)
    mine = ready.model(**{key: value.chunk(world)[rank] for key, value in batch.items()}).loss.detach()
    dist.all_reduce(mine)
    return {
        "values": float(sum(not torch.equal(there[name], value) for name, value in held(full).items())),
        "loss": abs(float(mine) / world - float(loss.detach())),
    }


def test_what_rank_0_has_loaded_and_merged_by_the_model_s_own_library_is_sent(gang2: Gang, tmp_path: Path) -> None:
    close(gang2.run(from_files, saved(tmp_path, "mixtral"), timeout=120))


def close(found: list[dict[str, float]], limit: float = 2e-6) -> None:
    for one in found:
        assert one
        assert all(value < limit for value in one.values()), one


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3"])
def test_a_model_that_rank_0_alone_has_trains_as_in_one_process(gang2: Gang, family: str) -> None:
    cases = ("shards", "one unit", "checkpointed, compiled", "offloaded", "whole")
    close(gang2.run(trained, family, cases if family == "llama-tied" else ("shards", "whole"), "meta", timeout=120))


def test_what_other_ranks_hold_is_replaced_by_rank_0_s_values(gang2: Gang) -> None:
    close(gang2.run(trained, "llama", ("shards", "whole"), "other values", timeout=120))


def test_replicas_of_shards_and_parallelized_layers_get_their_shards(gang4: Gang) -> None:
    found = gang4.run(trained, "llama", ("replicas of shards", "parallelized layers"), "meta", timeout=120)
    close(found, 1e-5)


# --- buffers, dtypes -------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Buffers of every kind: persistent and not, whole numbers, flags, a scalar, one that two modules share."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.full((5,), 3.0 + start))
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.arange(4.0) + start, persistent=False)
        self.register_buffer("narrow", (torch.arange(6.0) + start).to(torch.bfloat16).view(2, 3).t(), persistent=False)
        self.register_buffer("flags", torch.tensor([start == 0, True]))
        self.register_buffer("empty", torch.empty(0, 3))
        self.left, self.right = nn.Module(), nn.Module()
        self.left.register_buffer("shared", torch.ones(2) + start)
        self.right.register_buffer("shared", self.left.shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)) * self.scale


def counting(rank: int, world: int, engine: Any, others: str) -> dict[str, Tensor]:
    del world
    torch.manual_seed(rank)
    model = Counting()
    if rank == 0:
        model(torch.rand(8, 3))  # the norm counts
    elif others == "meta":
        with torch.device("meta"):
            model = Counting()
    else:
        model = Counting(start=5.0)
    with shards_alone() if others == "meta" else nullcontext():
        ready = pk.apply(pk.build_plan(pk.Config(engine=engine, weights=SEND), model))
    inner = getattr(ready.model, "module", ready.model)
    assert inner.left.shared is inner.right.shared
    assert [n for n, _ in inner.named_buffers() if n not in inner.state_dict()] == ["table", "narrow"]
    return held(ready.model)


@pytest.mark.parametrize("others", ["meta", "other values"])
@pytest.mark.parametrize("engine", [pk.FSDP2(), pk.DDP()])
def test_buffers_of_both_kinds_keep_rank_0_s_values_and_dtypes(gang2: Gang, engine: Any, others: str) -> None:
    torch.manual_seed(0)
    model = Counting()
    model(torch.rand(8, 3))
    expected = held(model)
    for found in gang2.run(counting, engine, others):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in expected.items())


class Watched:
    """``torch.distributed`` as it is, with a note of the bytes of every message of this process."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def batch_isend_irecv(self, ops: list[Any]) -> Any:
        self.sizes += [op.tensor.numel() for op in ops]
        return dist.batch_isend_irecv(ops)

    def broadcast(self, raw: Tensor, **given: Any) -> Any:
        self.sizes.append(raw.numel())
        return dist.broadcast(raw, **given)


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that is made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, Tensor) and not tensor.is_meta and "empty" in str(func):
                self.most = max(self.most, tensor.numel() * tensor.element_size())
        return out


@frozen(kw_only=True)
class Seen:
    """What one rank sends and holds while it applies a plan."""

    ready: Any
    sizes: list[int]
    """Bytes of every message that it sent or received."""
    largest: int
    """Bytes of the largest storage that was made for sending."""


def watched(plan: pk.Plan, *, message_bytes: int = 2**20, tiny: int = 0) -> Seen:
    """Applies the plan."""
    seen, largest, real = Watched(), Largest(), send_weights._send_all

    def send_all(*args: Any) -> None:
        with largest:
            real(*args)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(channels, "dist", seen)
        patches.setattr(channels, "MESSAGE_BYTES", message_bytes)
        patches.setattr(broadcast, "TINY", tiny)
        patches.setattr(send_weights, "_send_all", send_all)
        return Seen(ready=pk.apply(plan), sizes=seen.sizes, largest=largest.most)


def narrow(rank: int, world: int, engine: Any) -> tuple[list[str], int, int]:
    """Names that differ from rank 0's bfloat16 values in float32 masters; bytes that came or went; the buffer's."""
    del world
    torch.manual_seed(3)
    full = Tiny(torch.bfloat16)
    with torch.device("meta"):
        model = Tiny(torch.bfloat16)
    plan = pk.build_plan(pk.Config(engine=engine, precision=pk.BF16(), weights=SEND), full if rank == 0 else model)
    expected = {name: t.detach().clone() for name, t in held(full).items()}
    seen = watched(plan, message_bytes=1000)
    found = held(seen.ready.model)
    assert {p.dtype for p in seen.ready.model.parameters() if p.requires_grad} == {torch.float32}
    differing = [n for n, t in found.items() if not torch.equal(t, expected[n].to(t.dtype))]
    return differing, sum(seen.sizes), seen.largest


def test_values_travel_in_the_dtype_that_they_have_and_are_cast_where_they_arrive(gang2: Gang) -> None:
    model = Tiny(torch.bfloat16)
    total = sum(t.numel() * t.element_size() for t in held(model).values())
    whole = sum(t.numel() * t.element_size() for t in model.buffers())
    assert gang2.run(narrow, pk.DDP()) == [([], total, 1000)] * 2
    # Five rows, three of them on rank 0, and the like: rank 1 gets a little less than half.
    (none, sent, first), (neither, got, second) = gang2.run(narrow, pk.FSDP2())
    assert none == neither == []
    assert sent == got
    assert whole < sent <= whole + (total - whole) // 2
    assert (first, second) == (0, 1000), "only what is cast passes through the buffer"


# --- how much is held, and sent --------------------------------------------------------------------------------------


def measured(rank: int, world: int, message_bytes: int, tiny: int) -> tuple[int, int, int, int]:
    """Bytes of the parameters and of the rest; bytes sent or received; the longest message; the buffer."""
    model = build("llama-tied")[0] if rank == 0 else on_meta("llama-tied")[0]
    assert all(p.shape[0] % world == 0 for p in model.parameters())
    halves = sum(p.numel() * p.element_size() for p in model.parameters())
    rest = sum(b.numel() * b.element_size() for b in model.buffers())
    plan = pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=SEND), model)
    seen = watched(plan, message_bytes=message_bytes, tiny=tiny)
    assert max(seen.sizes) <= max(message_bytes, rest)
    return halves, rest, sum(seen.sizes), seen.largest


def test_a_rank_is_sent_its_own_shard_alone_straight_from_storage_to_storage(gang2: Gang) -> None:
    for halves, rest, sent, largest in gang2.run(measured, 1000, 0):
        assert sent == halves // 2 + rest
        assert largest == 0, "no copy is made on the way"
    sender, taker = gang2.run(measured, 1000, 2**14)
    for halves, rest, sent, _ in (sender, taker):
        assert sent == halves + rest, "tiny shards are not sent one by one"
    assert (sender[3], taker[3]) == (0, 1000), "of what goes whole a rank takes its shard from the buffer"


def test_rank_0_frees_each_tensor_once_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny()
    target = Target(model=model)
    step = StashTensors(params=tuple(name for name, _ in model.named_parameters()), buffers=())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    alive: list[int] = []
    try:
        stash_do(step, target)
        refs = [StorageWeakRef(one.held.untyped_storage()) for one in target.stashed.values()]

        class Counted(InMemoryNetwork):
            def start_send(self, raw: Tensor, peer: int) -> Work:
                del raw, peer
                alive.append(sum(not ref.expired() for ref in refs))
                return Work(lambda: None)

        monkeypatch.setattr(channels, "dist", Counted())
        monkeypatch.setattr(channels, "WINDOW", 0)
        allocate.allocate_do(AllocateTensors(device=LocalDevice(type="cpu")), target)
        send_do(SendTensors(tensors=sent_of(model), axes=()), target)
    finally:
        dist.destroy_process_group()
    assert alive == list(range(len(refs), 0, -1))
    assert not target.stashed


def sent_of(model: nn.Module) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(name=name, dtype=str(p.dtype).removeprefix("torch."), shape=tuple(p.shape))
        for name, p in model.named_parameters()
    )


# --- failures --------------------------------------------------------------------------------------------------------


def lacking(rank: int, world: int, engine: Any, what: str) -> tuple[str, float, list[str]]:
    """What apply says, after how long, and what it has changed, where rank 0 has not all values."""
    del world
    if what == "everything" and rank == 0:
        with torch.device("meta"):
            model = Tiny()
    else:
        model = Tiny()
    if what == "a buffer" and rank == 0:
        model.passing = model.passing.to("meta")
    plan = pk.build_plan(pk.Config(engine=engine, weights=SEND), model)
    target = Target(model=model)
    real = all(not t.is_meta for t in (*model.parameters(), *model.buffers()))
    before = snapshot(target) if real else {}
    began = time.monotonic()
    with pytest.raises(pk.errors.ApplyHalted) as halted:
        pk.apply(plan)
    took = time.monotonic() - began
    assert "everything is as it was" in str(halted.value)
    return str(halted.value.__cause__), took, differences(before, snapshot(target)) if real else []


@pytest.mark.parametrize("engine", [pk.FSDP2(), pk.DDP()])
@pytest.mark.parametrize(("what", "name"), [("everything", "embed.weight"), ("a buffer", "passing")])
def test_a_rank_0_without_values_is_an_error_on_every_rank_and_nothing_is_changed(
    gang2: Gang, engine: Any, what: str, name: str
) -> None:
    for said, took, changed in gang2.run(lacking, engine, what, timeout=40):
        assert f"plan.no-weights at {name}" in said
        assert "rank 0 has no values" in said
        assert "LoadWeights(path)" in said
        assert took < 15
        assert changed == []


def broken_at(rank: int, world: int, odd: int, mesh: pk.Mesh | None, tiny: int) -> tuple[str, float]:
    """What apply says where one rank fails in the middle of the tensors."""
    del world
    model = build("llama")[0] if rank == 0 else on_meta("llama")[0]
    plan = pk.build_plan(pk.Config(engine=pk.FSDP2(), mesh=mesh, weights=SEND), model)
    real, calls = send_weights._runs, []

    def runs(shape: tuple[int, ...], item: int, most: int) -> Any:
        calls.append(shape)
        if len(calls) == 9:
            raise OSError("the cable was pulled")
        return real(shape, item, most)

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(broadcast, "TINY", tiny)
        patches.setattr(send_weights, "_runs", runs if rank == odd else real)
        with pytest.raises(pk.errors.ApplyHalted) as halted:
            pk.apply(plan)
    cause = halted.value.__cause__
    return f"{type(cause).__name__}: {cause}", time.monotonic() - began


def all_hear(found: list[tuple[str, float]], odd: int) -> None:
    for rank, (said, took) in enumerate(found):
        assert "the cable was pulled" in said
        assert said.startswith("RankFailed" if rank != odd else "OSError")
        assert took < 20


@pytest.mark.parametrize("tiny", [0, 4096])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_fails_while_tensors_are_sent_is_an_error_on_every_rank_within_seconds(
    gang2: Gang, odd: int, tiny: int
) -> None:
    all_hear(gang2.run(broken_at, odd, None, tiny, timeout=40), odd)


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_who_waits_for_one_that_waits_for_the_failed_rank_hears_it_too(gang4: Gang, odd: int) -> None:
    """Rank 3 gets its shards from rank 1."""
    all_hear(gang4.run(broken_at, odd, MESHES["replicas of shards"], 0, timeout=40), odd)


def test_stashing_is_taken_back_to_the_byte() -> None:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = stepped(model)
    vars(model.embed.weight)["note"] = "kept"
    target = Target(model=model, optimizer=optimizer)
    before = snapshot(target)
    step = StashTensors(params=tuple(name for name, _ in model.named_parameters()), buffers=("kept", "passing"))
    memo = stash_do(step, target)
    assert memo == step.params
    assert all(p.is_meta for p in model.parameters())
    assert not model.kept.is_meta
    assert model.head.weight is model.embed.weight
    assert vars(model.embed.weight)["note"] == "kept"
    assert stash_undo(step, target, memo) is None
    assert differences(before, snapshot(target)) == []
    assert vars(model.embed.weight)["note"] == "kept"
    assert not target.stashed


@pytest.mark.parametrize("kept", ["a loss", "a weak reference"])
def test_a_parameter_that_something_else_holds_is_named_and_nothing_is_changed(kept: str) -> None:
    model = Tiny()
    names = tuple(name for name, _ in model.named_parameters())
    target, before = Target(model=model), [param.detach().clone() for param in model.parameters()]
    held_by = model(TOKENS).sum() if kept == "a loss" else weakref.ref(model.layers[2].outer.weight)
    name = "embed.weight" if kept == "a loss" else "layers.2.outer.weight"
    with pytest.raises(
        RuntimeError, match=rf"weights.held-elsewhere at {name}: held by more than the model and its optimizer"
    ):
        stash_do(StashTensors(params=names, buffers=()), target)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not target.stashed
    assert held_by is not None


def launched(rank: int, world: int) -> tuple[bool, bool]:
    """As a script under torchrun: prepkit starts the group, and ends it."""
    model = build("llama-tied")[0] if rank == 0 else on_meta("llama-tied")[0]
    with pk.processes.together():
        ready = pk.apply(pk.build_plan(pk.Config(engine=pk.FSDP2(), weights=SEND, optimizer=pk.optim.AdamW()), model))
    same = all(torch.equal(held(ready.model)[name], t) for name, t in held(build("llama-tied")[0]).items())
    ready.backward(ready.model(**build("llama-tied")[1]).loss)
    ready.step()
    ready.close()
    return same, dist.is_initialized()


def test_a_script_under_a_launcher_needs_no_group_of_its_own(gang2: Gang) -> None:
    assert gang2.run_fresh(launched) == [(True, False)] * 2


def test_what_was_sent_and_freed_is_told_when_sending_is_taken_back() -> None:
    target = Target(model=Tiny())
    names = tuple(name for name, _ in target.model.named_parameters())
    memo = stash_do(StashTensors(params=names, buffers=()), target)
    del target.stashed["embed.weight"]
    said = stash_undo(StashTensors(params=names, buffers=()), target, memo)
    assert said == "embed.weight: sent, and freed on this rank"
    assert target.model.embed.weight.is_meta
    assert not target.model.layers[0].inner.weight.is_meta


def test_a_shard_of_another_size_than_planned_is_refused_by_name() -> None:
    one = Transfer(name="w", dtype="float32", shape=(4, 2))
    with pytest.raises(RuntimeError, match=r"w: this rank holds \[3, 2\], planned \[4, 2\]"):
        send(one, (), torch.zeros(4, 2), torch.zeros(3, 2), P2PChannel(device=torch.device("cpu")))


def test_parameters_that_nobody_stashed_are_not_sent_from_shards() -> None:
    with torch.device("meta"):
        model = Tiny()
    target = Target(model=model, unfilled={"embed.weight"})
    with pytest.raises(pk.errors.RunRefused, match=r"plan.no-weights at embed\.weight: rank 0 has no values"):
        send_do(SendTensors(tensors=sent_of(model)[:1], axes=()), target)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_model_on_meta_and_one_with_values_have_the_same_plan() -> None:
    cfg = pk.Config(engine=pk.FSDP2(), weights=SEND)
    env = pk.Env.declare(world_size=2, device="cpu")
    full, (bare, _) = build("llama-tied")[0], on_meta("llama-tied")
    here, there = pk.build_plan(cfg, full, env=env), pk.build_plan(cfg, bare, env=env)
    assert here == there
    kinds = [type(one.step).__name__ for one in here.steps]
    assert kinds.index("StashTensors") < kinds.index("BuildMesh")
    assert kinds.index("ShardUnits") < kinds.index("AllocateTensors") < kinds.index("SendTensors")


def test_a_rehearsal_says_that_nothing_is_sent() -> None:
    plan = planned(pk.Config(engine=pk.FSDP2(), weights=SEND), Tiny(), world=8)
    found = pk.rehearse(plan, Tiny(), rank=3)
    assert found.fine, str(found)
    omitted = [one.step for one in found.omitted if "carries no data, so there is nothing" in one.why]
    assert omitted == ["StashTensors", "SendTensors"]


def test_the_prediction_says_which_rank_holds_the_model_first() -> None:
    from prepkit.predict import predict

    plan = planned(pk.Config(engine=pk.FSDP2(), weights=SEND), Tiny(), world=8)
    (note,) = [note for note in predict(plan).notes if note.startswith("Loading")]
    assert note.startswith("Loading: rank 0 alone holds the whole model first, ")


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        (pk.Config(weights=SEND), "no other rank to send to"),
        (pk.Config(engine=pk.XLA(), weights=SEND), "`BroadcastWeights` with XLA"),
    ],
)
def test_an_engine_that_sends_nothing_is_refused_with_what_to_write(cfg: pk.Config, said: str) -> None:
    env = pk.Env.declare(world_size=1 if isinstance(cfg.engine, pk.Single) else 2, device="cpu")
    (found,) = [one for one in pk.check(cfg, Tiny(), env=env) if one.rule == "weights.not-filled"]
    assert said in found.what


def test_an_optimizer_with_state_is_refused() -> None:
    model = Tiny()
    cfg = pk.Config(engine=pk.FSDP2(), weights=SEND)
    found = [one.rule for one in pk.check(cfg, model, optimizer=stepped(model))]
    assert "weights.state-not-sent" in found
    fresh = torch.optim.AdamW(model.parameters())
    assert "weights.state-not-sent" not in [one.rule for one in pk.check(cfg, model, optimizer=fresh)]
    assert "weights.state-not-sent" not in [
        one.rule for one in pk.check(evolve(cfg, weights=None), model, optimizer=stepped(model))
    ]
