"""Programs whose wrappers make two weights of one, rows of matrices, or leave one out; their right twins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.nn import functional as fn

from tests.audit.case import adam
from tests.audit.loops import Loop, taken

WORDS, WIDE = 16, 8


class Tied(nn.Module):
    """One table for what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        self.head.weight = self.enter.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.enter(ids)).tanh())


def seeded() -> Tied:
    torch.manual_seed(0)
    return Tied()


def trained(model: nn.Module, rank: int) -> None:
    ids, goal = torch.randint(WORDS, (2, 4, 6), generator=torch.Generator().manual_seed(rank))
    taken(model, adam(model), fn.cross_entropy(model(ids).flatten(0, 1), goal.flatten()))


def flattened(model: Tied, apart: Callable[[nn.Module], bool], *, original: bool) -> FullyShardedDataParallel:
    policy = CustomPolicy(apart)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu")
    )


def ends_in_units_of_fsdp1(rank: int, world: int) -> None:
    model = seeded()
    trained(flattened(model, lambda one: one in (model.enter, model.head), original=False), rank)


def an_end_in_a_unit_of_fsdp1(rank: int, world: int) -> None:
    model = seeded()
    trained(flattened(model, lambda one: one is model.head, original=False), rank)


def ends_in_the_root_of_fsdp1(rank: int, world: int) -> None:
    model = seeded()
    trained(flattened(model, lambda one: one is model.inner, original=True), rank)


def ends_in_the_root_of_fsdp2(rank: int, world: int) -> None:
    model = seeded()
    fully_shard(model.inner)
    fully_shard(model)
    trained(model, rank)


def cut(model: Tied, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    rows = parallel.RowwiseParallel(input_layouts=Replicate())
    columns = parallel.ColwiseParallel(output_layouts=Replicate())
    parallel.parallelize_module(model, mesh, {"enter": rows, "head": columns})


def ends_that_are_cut(rank: int, world: int) -> None:
    """Each rank reads the same, as ranks do that hold parts of one layer."""
    model = seeded()
    cut(model, world)
    trained(model, 0)


def ends_that_are_cut_and_tied(rank: int, world: int) -> None:
    model = seeded()
    cut(model, world)
    model.head.weight = model.enter.weight
    trained(model, 0)


def ends_of_their_own_that_are_cut(rank: int, world: int) -> None:
    """Torch gives the whole gradient of an embedding that is cut by rows."""
    model = seeded()
    model.head = nn.Linear(WIDE, WORDS, bias=False)
    cut(model, world)
    trained(model, 0)


def from_nothing(*, tied: bool) -> Callable[[int, int], None]:
    """Made without memory, and given some."""

    def ends_from_nothing(rank: int, world: int) -> None:
        with torch.device("meta"):
            model = Tied()
        model.to_empty(device="cpu")
        for one in model.parameters():
            nn.init.normal_(one, std=0.1)
        if tied:
            model.head.weight = model.enter.weight
        trained(model, rank)

    ends_from_nothing.__name__ += "_and_tied" if tied else ""
    return ends_from_nothing


def teacher_in_shards(rank: int, world: int) -> None:
    """What ranks hold of it are other parts of one model."""
    model = seeded()
    teacher = flattened(copy.deepcopy(model), lambda one: False, original=False).requires_grad_(requires_grad=False)
    student = flattened(model, lambda one: False, original=False)
    ids = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        goal = teacher(ids)
    taken(student, adam(student), fn.mse_loss(student(ids), 2 * goal))


def beside_what_was_freed(rank: int, world: int) -> None:
    """A tensor like a weight, whose memory is gone, as FSDP1 leaves what it has gathered."""
    model = seeded()
    freed = torch.empty_like(model.enter.weight, requires_grad=False)
    freed.untyped_storage().resize_(0)
    trained(model, rank)
    assert not freed.untyped_storage().nbytes()


def decayed_by_dims(*, behind: bool) -> Callable[[int, int], None]:
    """Matrices decay; their dims are asked ``behind`` the wrapper, or before it."""

    def run(rank: int, world: int) -> None:
        model = seeded()
        model.head = nn.Linear(WIDE, WORDS)
        matrices = {name for name, one in model.named_parameters() if one.dim() > 1}
        wrapped = flattened(model, lambda _: False, original=True)
        if behind:
            matrices = {name for name, one in wrapped.named_parameters() if one.dim() > 1}
        named = [(name.replace("_fsdp_wrapped_module.", ""), one) for name, one in wrapped.named_parameters()]
        decayed, others = ([one for name, one in named if (name in matrices) == is_in] for is_in in (True, False))
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], weight_decay=0.0)
        ids = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(rank))
        taken(wrapped, optimizer, fn.cross_entropy(wrapped(ids).flatten(0, 1), ids.flatten()))

    run.__name__ = f"decayed_by_dims_{'behind' if behind else 'before'}_the_wrapper"
    return run


def width_beside_the_model(rank: int, world: int, *, averages: bool = False) -> None:
    """A policy whose width is a parameter of no module, as that of normal actions is."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDE, 2))
    width = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), width], lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        said = model(torch.randn(16, WIDE, generator=generator))
        acts = said.detach() + torch.randn(16, 2, generator=generator)
        (width + 0.5 * ((acts - said) / width.exp()).square()).mean().backward()
        if averages:
            assert width.grad is not None
            dist.all_reduce(width.grad)
            width.grad /= world
        optimizer.step()


def width_beside_the_model_that_is_averaged(rank: int, world: int) -> None:
    width_beside_the_model(rank, world, averages=True)


def noise_of_each_rank(rank: int, world: int) -> None:
    """An adversarial example, which an optimizer of its own steps, on each rank for its own samples."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDE, 2))
    x = torch.randn(16, WIDE, generator=torch.Generator().manual_seed(rank))
    noise = torch.zeros_like(x, requires_grad=True)
    moves, optimizer = torch.optim.SGD([noise], lr=0.1, maximize=True), adam(model)
    for _ in range(2):
        goal = (x.sum(1) > 0).long()
        fn.cross_entropy(model(x + noise), goal).backward()
        moves.step()
        optimizer.zero_grad()
        fn.cross_entropy(model(x + noise.detach()), goal).backward()
        optimizer.step()
        moves.zero_grad()
        optimizer.zero_grad()


def norms_of_parts_of_a_sequence(rank: int, world: int) -> None:
    """Whose gradients torch leaves partial, for the optimizer to add up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, 2 * WIDE), nn.GELU(), nn.Linear(2 * WIDE, WORDS))
    cut, rows = parallel.SequenceParallel(), Shard(1)
    parallel.parallelize_module(
        model,
        init_device_mesh("cpu", (world,)),
        {
            "": parallel.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=rows),
            "0": cut,
            "1": parallel.ColwiseParallel(input_layouts=rows),
            "3": parallel.RowwiseParallel(),
        },
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2 * world, WIDE, generator=generator)
    goal = torch.randint(WORDS, (4, 2 * world), generator=generator)
    said = model(x)
    assert said.shape[:2] == goal.shape, "the last layer puts the parts together"
    taken(model, adam(model), fn.cross_entropy(said.flatten(0, 1), goal.flatten()))


class Attends(nn.Module):
    """Two heads; ``fused``: queries, keys and values by one layer; ``heads``: of each rank, None: as many as fit."""

    def __init__(self, fused: bool = False, heads: int | None = None, drops: float = 0.0) -> None:
        super().__init__()
        self.fused, self.heads = fused, heads
        if fused:
            self.qkv = nn.Linear(WIDE, 3 * WIDE)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDE, WIDE) for _ in range(3))
        self.out, self.drops = nn.Linear(WIDE, WIDE), nn.Dropout(drops)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        size = WIDE // 2 if self.heads is None else parts[0].shape[-1] // self.heads
        q, k, v = (one.unflatten(-1, (-1, size)).transpose(1, 2) for one in parts)
        said = fn.scaled_dot_product_attention(q, k, v)
        return self.drops(self.out(said.transpose(1, 2).flatten(2)))


def attends(
    name: str, *, root: bool = False, loads: bool = False, model: Callable[[], nn.Module] = Attends
) -> Callable[[int, int], None]:
    """``root``: the model is cut as one; ``loads``: it gets its weights behind that."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(0)
        whole = nn.Sequential(model(), nn.Linear(WIDE, WORDS))
        columns, at = parallel.ColwiseParallel(), "0." if root else ""
        plan = {f"{at}{one}": columns for one in ("qkv", "q", "k", "v") if hasattr(whole[0], one)}
        cut = whole if root else whole[0]
        parallel.parallelize_module(
            cut, init_device_mesh("cpu", (world,)), {**plan, f"{at}out": parallel.RowwiseParallel()}
        )
        if loads:
            with torch.no_grad():
                for param in whole.parameters():
                    param.mul_(0.5)
        x, goal = torch.randn(4, 6, WIDE), torch.randint(WORDS, (4, 6))
        taken(whole, adam(whole), fn.cross_entropy(whole(x).flatten(0, 1), goal.flatten()))

    run.__name__ = name
    return run


def begun(name: str, *, by: str) -> Callable[[int, int], None]:
    """Shards from nothing, drawn ``by`` each rank, by its own seed, or by torch."""

    def run(rank: int, world: int) -> None:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.LayerNorm(2 * WIDE), nn.Linear(2 * WIDE, WORDS))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        model.to_empty(device="cpu")
        torch.manual_seed(rank if by == "own seed" else 0)
        for param in model.parameters():
            if param.dim() == 1:
                nn.init.ones_(param)
            elif by == "torch":
                nn.init.normal_(param, std=0.1)
            else:
                nn.init.normal_(param.to_local(), std=0.1)
        torch.manual_seed(rank)
        taken(model, adam(model), fn.cross_entropy(model(torch.randn(4, WIDE)), torch.randint(WORDS, (4,))))

    run.__name__ = name
    return run


class Mixes(nn.Module):
    """Places that are mixed, between norms of each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDE), Attends()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def cut_over_a_sequence(rank: int, world: int) -> None:
    """What a block is given, and gives, are the places of one rank."""
    torch.manual_seed(0)
    mesh, rows = init_device_mesh("cpu", (world,)), Shard(1)
    model = nn.Sequential(Mixes(), nn.Linear(WIDE, WORDS))
    columns = parallel.ColwiseParallel()
    plan: dict[str, Any] = {f"inner.{name}": columns for name in "qkv"}
    plan["norm"] = parallel.SequenceParallel(use_local_output=True)
    plan["inner"] = parallel.PrepareModuleInput(input_layouts=rows, desired_input_layouts=Replicate())
    plan["inner.out"] = parallel.RowwiseParallel(output_layouts=rows)
    parallel.parallelize_module(model[0], mesh, plan)
    x, goal = torch.randn(4, 6, WIDE), torch.randint(WORDS, (4, 6))
    own = x.chunk(world, 1)[rank], goal.chunk(world, 1)[rank]
    loss = fn.cross_entropy(model(own[0]).flatten(0, 1), own[1].flatten())
    optimizer = adam(model)
    loss.backward()
    for param in model[1].parameters():
        dist.all_reduce(param.grad)
    optimizer.step()


_OTHERWISE = (
    attends("cut_across_queries_and_keys", model=partial(Attends, fused=True)),
    attends("cut_across_queries_and_keys_as_one", root=True, model=partial(Attends, fused=True)),
    attends("heads_of_all_ranks_on_each", model=partial(Attends, heads=2)),
)
_AS_WHOLE = (
    cut_over_a_sequence,
    begun("shards_of_their_own_seeds", by="own seed"),
    begun("shards_that_torch_draws", by="torch"),
    attends("cut_by_heads"),
    attends("cut_by_heads_as_one", root=True),
    attends("cut_by_heads_that_drop", model=partial(Attends, drops=0.1)),
    attends("cut_by_heads_and_loaded", loads=True),
)
_PARTED = (ends_in_units_of_fsdp1, an_end_in_a_unit_of_fsdp1, ends_that_are_cut)
WRONG_TIES: tuple[Loop, ...] = (
    *(Loop(run, ranks=2, rule="run.tie-broken") for run in _PARTED),
    Loop(from_nothing(tied=False), rule="run.tie-broken"),
    Loop(decayed_by_dims(behind=True), ranks=2, rule="run.decays-nothing"),
    Loop(width_beside_the_model, ranks=2, rule="run.not-averaged"),
    *(Loop(run, ranks=2, rule="run.cut-otherwise") for run in _OTHERWISE),
    Loop(begun("shards_of_one_seed", by="one seed"), ranks=2, rule="run.parts-alike"),
)
_WHOLE = (ends_in_the_root_of_fsdp1, ends_in_the_root_of_fsdp2, teacher_in_shards)
_CUT = (ends_that_are_cut_and_tied, ends_of_their_own_that_are_cut, decayed_by_dims(behind=False))
_BESIDE = (width_beside_the_model_that_is_averaged, noise_of_each_rank, norms_of_parts_of_a_sequence)
RIGHT_TIES: tuple[Loop, ...] = (
    Loop(beside_what_was_freed),
    Loop(from_nothing(tied=True)),
    *(Loop(run, ranks=2) for run in (*_WHOLE, *_CUT, *_BESIDE, *_AS_WHOLE)),
)
