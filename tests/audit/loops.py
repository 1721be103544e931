"""Right programs of unusual shape as loops, each run up to its first step as ``prepkit audit SCRIPT`` runs one."""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as fn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as rates
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info

from prepkit.auditing.script import audit_run
from tests.audit.case import WIDTH, adam, divided, net, rows
from tests.audit.odd import LightningAdam, Sam

X = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
Y = torch.tensor([0, 1, 2, 3])


@frozen
class Loop:
    """A program that trains, on this rank of so many."""

    run: Callable[[int, int], None]
    library: str = "torch"
    ranks: int = 1
    rule: str = ""
    """The rule that has to find what is wrong in it; empty: nothing is."""

    @property
    def id(self) -> str:
        return self.run.__name__


def heard(loop: Loop, rank: int = 0, world: int = 1) -> list[tuple[str, str, str]]:
    """Rule, severity and text of each finding at the first step."""
    torch.manual_seed(rank)
    found = audit_run(lambda: loop.run(rank, world))
    assert found is not None, f"{loop.id} never stepped"
    return [(one.rule, one.severity.value, str(one)) for one in found.findings]


def two_layers() -> nn.Module:
    """Without a norm, which computes in float32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def loss_of(model: nn.Module, x: Tensor = X) -> Tensor:
    return fn.cross_entropy(model(x), Y)


def taken(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# --- precision, clipping ---


def scaled(rank: int, world: int) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = adam(model)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model)
    scaler.scale(loss).backward()
    scaler.step(optimizer)


def scaled_and_clipped(rank: int, world: int) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = adam(model)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)


def scaled_beside_a_penalty(rank: int, world: int) -> None:
    """Two losses that are scaled, one of them in a sum, and a penalty behind the division."""
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = adam(model)
    scaler.scale(loss_of(model)).backward()
    (scaler.scale(loss_of(model)) + scaler.scale(loss_of(model))).backward()
    scaler.unscale_(optimizer)
    (1e-3 * sum(one.square().sum() for one in model.parameters())).backward()
    scaler.step(optimizer)


def scaler_switched_off(rank: int, world: int) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = adam(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)


def clipped_by_keyword(rank: int, world: int) -> None:
    model = net()
    model.load_state_dict(state_dict=model.state_dict())
    optimizer = adam(model)
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(parameters=(one for one in model.parameters()), max_norm=1.0)
    optimizer.step()


def for_each_shard(rank: int, world: int, clip: Callable[[Any], Any], **given: Any) -> None:
    model = FullyShardedDataParallel(two_layers(), device_id=torch.device("cpu"), **{"use_orig_params": True} | given)
    optimizer = adam(model)
    for x, y in divided(rank, world):
        fn.cross_entropy(model(x), y).backward()
        clip(model)
        optimizer.step()


def shards_clipped_together(rank: int, world: int) -> None:
    for_each_shard(rank, world, lambda model: model.clip_grad_norm_(1.0))


def shards_measured_and_clamped(rank: int, world: int) -> None:
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        nn.utils.clip_grad_value_(model.parameters(), 1.0)

    for_each_shard(rank, world, clip)


def shards_of_fsdp2_clipped(rank: int, world: int) -> None:
    model = two_layers()
    fully_shard(model)
    optimizer = adam(model)
    for x, y in divided(rank, world):
        fn.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def two_scaled(rank: int, world: int) -> None:
    one, other, scaler = net(), net(), torch.amp.GradScaler("cpu")
    optimizers = adam(one), adam(other)
    with torch.autocast("cpu", torch.float16):
        losses = loss_of(one), loss_of(other)
    for loss in losses:
        scaler.scale(loss).backward()
    for model, optimizer in zip((one, other), optimizers, strict=True):
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)


def loss_alone_under_autocast(rank: int, world: int) -> None:
    model = net()
    output = model(X)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fn.cross_entropy(output, Y)
    taken(model, adam(model), loss)


def teacher_in_float16(rank: int, world: int) -> None:
    model, teacher = net(), net().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        wanted = teacher(X).float()
    taken(model, adam(model), fn.mse_loss(model(X), wanted))


# --- losses ---


def soft_labels(rank: int, world: int) -> None:
    model, teacher = net(), net().eval()
    with torch.no_grad():
        wanted = teacher(X).softmax(-1)
    taken(model, adam(model), fn.cross_entropy(model(X), wanted))


def log_softmax_before_cross_entropy(rank: int, world: int) -> None:
    model = nn.Sequential(net(), nn.LogSoftmax(-1))
    taken(model, adam(model), nn.CrossEntropyLoss()(model(X), Y))


def log_softmax_before_nll(rank: int, world: int) -> None:
    model = nn.Sequential(net(), nn.LogSoftmax(-1))
    taken(model, adam(model), nn.NLLLoss()(model(X), Y))


def policy(rank: int, world: int) -> None:
    model = nn.Sequential(net(), nn.Softmax(-1))
    chances = model(X)
    taken(model, adam(model), -(chances.gather(1, Y[:, None]).log() * 0.5).mean())


def gated(rank: int, world: int) -> None:
    model = nn.Sequential(net(), nn.Softmax(-1), nn.Linear(4, 4))
    taken(model, adam(model), loss_of(model))


def attended(rank: int, world: int) -> None:
    model = nn.ModuleDict({"mix": nn.MultiheadAttention(WIDTH, 2, batch_first=True), "head": nn.Linear(WIDTH, 4)})
    output = model["head"](model["mix"](X[None], X[None], X[None])[0][0])
    taken(model, adam(model), fn.cross_entropy(output, Y))


def bounded(rank: int, world: int) -> None:
    model = nn.Sequential(net(), nn.Sigmoid())
    taken(model, adam(model), fn.binary_cross_entropy(model(X), torch.ones(4, 4)))


# --- weights from files ---


def body_loaded(rank: int, world: int) -> None:
    model = net()
    model.load_state_dict({key: value for key, value in net().state_dict().items() if "head" not in key}, strict=False)
    taken(model, adam(model), loss_of(model))


def loaded_again_by_the_right_names(rank: int, world: int) -> None:
    model = net()
    state = {f"module.{key}": value for key, value in net().state_dict().items()}
    if model.load_state_dict(state, strict=False).missing_keys:
        model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    taken(model, adam(model), loss_of(model))


def nothing_to_load(rank: int, world: int) -> None:
    model = net()
    nn.ReLU().load_state_dict({}, strict=False)
    taken(model, adam(model), loss_of(model))


def new_head_beside_a_loaded_body(rank: int, world: int) -> None:
    """Of a checkpoint with another head, and with an average and an optimizer beside."""
    model, state = net(), net().state_dict()
    state = {key: value for key, value in state.items() if "head" not in key}
    others = {"average.head.weight": torch.ones(4, WIDTH), "average.head.bias": torch.ones(4)}
    average = {f"average.{key}": value for key, value in state.items()}
    model.load_state_dict({**state, **average, **others, "classifier.weight": torch.ones(9, WIDTH)}, strict=False)
    taken(model, adam(model), loss_of(model))


def one_of_two_towers_loaded(rank: int, world: int) -> None:
    """What it has not lies under the same words in the other tower."""
    model = nn.ModuleDict({"text": net(), "image": net()})
    model.load_state_dict({f"text.{key}": value for key, value in net().state_dict().items()}, strict=False)
    taken(model, adam(model), loss_of(model["text"]) + loss_of(model["image"]))


def adapter_loaded_alone(rank: int, world: int) -> None:
    model = nn.Sequential(net(), nn.Linear(4, 4))
    state = {"1.weight": torch.eye(4), "1.bias": torch.zeros(4), "scale": torch.ones(1)}
    model.load_state_dict(state, strict=False)
    taken(model, adam(model), loss_of(model))


def blocks_loaded_from_a_deeper_model(rank: int, world: int) -> None:
    """Blocks that the checkpoint has more of, and a norm that it has not."""
    model = net()
    model.norm = nn.LayerNorm(WIDTH)
    state = {f"blocks.{at}.inner.{name}": torch.ones(WIDTH) for at in range(3, 9) for name in ("bias", "scale")}
    model.load_state_dict({**net().state_dict(), **state}, strict=False)
    taken(model, adam(model), loss_of(model) + model.norm(X).sum())


def loaded_and_replaced(rank: int, world: int) -> None:
    model = net()
    model.head = nn.Linear(WIDTH, 7)
    model.load_state_dict(model.state_dict())
    model.head = nn.Linear(WIDTH, 4)
    taken(model, adam(model), loss_of(model))


def loaded_by_assignment(*, again: bool, alike: bool = True) -> nn.Module:
    """Two layers that share a weight, made without data, and filled from a file that names both."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
        model[1].weight = model[0].weight
    held = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    held["1.weight"] = held["0.weight"].clone() if alike else torch.randn(WIDTH, WIDTH)
    model.load_state_dict(held, assign=True)
    if again:
        model[1].weight = model[0].weight
    return model


def tied_again_after_a_load(rank: int, world: int) -> None:
    model = loaded_by_assignment(again=True)
    taken(model, adam(model), loss_of(model))


def told_apart_by_a_load(rank: int, world: int) -> None:
    model = loaded_by_assignment(again=False, alike=False)
    taken(model, adam(model), loss_of(model))


# --- compiled ---


def compiled(rank: int, world: int) -> None:
    model = net()
    fast: Any = torch.compile(model, backend="eager")
    taken(model, adam(model), loss_of(fast))


def compiled_blocks(rank: int, world: int) -> None:
    model = net()
    for at, block in enumerate(model.blocks):
        model.blocks[at] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    taken(model, adam(model), loss_of(model))


def compiled_in_place(rank: int, world: int) -> None:
    model = net()
    model.compile(backend="eager")
    taken(model, adam(model), loss_of(model))


def average_compiled_for_later(rank: int, world: int) -> None:
    model = net()
    later = torch.compile(copy.deepcopy(model).eval(), backend="eager")
    taken(model, adam(model), loss_of(model))
    assert later is not None


def step_compiled(rank: int, world: int) -> None:
    model = net()

    @torch.compile(backend="eager")
    def loss() -> Tensor:
        return loss_of(model)

    taken(model, adam(model), loss())


def lengths_that_differ(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4))
    fast: Any = torch.compile(model, backend="eager")
    optimizer = adam(model)
    for length in (2, 3, 5, 8, 13):
        (fast(torch.ones(length, WIDTH)).square().mean() / 5).backward()
    optimizer.step()


# --- workers ---


class Noisy(Dataset[Tensor]):
    """Rows with noise from the process's generators."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> Tensor:
        return torch.full((WIDTH,), at / 32) + torch.randn(WIDTH) * random.random()  # noise


class Shuffled(Dataset[Tensor]):
    """A generator of its own that served when it was made, and no more."""

    def __init__(self) -> None:
        self.rng = random.Random(0)  # an order
        self.order = self.rng.sample(range(32), 32)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> Tensor:
        return torch.full((WIDTH,), self.order[at] / 32)


class Divided(IterableDataset[Tensor]):
    """A stream of which each worker gives its part."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        return (torch.full((WIDTH,), at / 32) for at in range(info.id, 64, info.num_workers))


class Constant(IterableDataset[Tensor]):
    """One sample over and over, as to see that a model can learn it."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(64, WIDTH))


def over(data: Any, **given: Any) -> None:
    model = net()
    optimizer = adam(model)
    for batch in DataLoader(data, batch_size=4, **given):
        taken(model, optimizer, model(batch).square().mean())


def workers_of_their_own_seeds(rank: int, world: int) -> None:
    over(Noisy(), num_workers=2, shuffle=True)


def workers_with_an_order_of_the_data_set(rank: int, world: int) -> None:
    over(Shuffled(), num_workers=2, shuffle=True)


def workers_of_a_divided_stream(rank: int, world: int) -> None:
    over(Divided(), num_workers=2)


def workers_of_one_sample(rank: int, world: int) -> None:
    over(Constant(), num_workers=2)


def one_seed(worker: int) -> None:
    torch.manual_seed(0)
    random.seed(0)


def workers_with_one_seed_that_nobody_draws_with(rank: int, world: int) -> None:
    over(Shuffled(), num_workers=2, shuffle=True, worker_init_fn=one_seed)


# --- several models and optimizers ---


def discriminator_first(rank: int, world: int) -> None:
    maker, judge = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
    first, second = adam(judge), adam(maker)
    taken(judge, first, judge(maker(torch.randn(4, 8)).detach()).mean() - judge(X).mean())
    taken(maker, second, -judge(maker(torch.randn(4, 8))).mean())


def encoder_stepped_in_turns(rank: int, world: int) -> None:
    """As SAC-AE does: by what reconstructs, then with the critic by its own loss."""
    encoder, decoder, critic = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    every = nn.ModuleDict({"encoder": encoder, "critic": critic})
    of_encoder, of_decoder, of_critic = adam(encoder), adam(decoder), adam(every)
    fn.mse_loss(decoder(encoder(X)), X).backward()
    of_encoder.step()
    of_decoder.step()
    of_critic.zero_grad()
    critic(encoder(X)).square().mean().backward()
    of_critic.step()


def encoder_of_two_makers_in_turns(rank: int, world: int) -> None:
    encoder, one, other = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2)
    models = nn.Sequential(encoder, one), nn.Sequential(encoder, other)
    for model in models:
        optimizers = [adam(each) for each in models]
        taken(model, optimizers[0], model(torch.randn(4, 8)).square().mean())


def head_stepped_again_by_a_loss_of_its_own(rank: int, world: int) -> None:
    model = net()
    both, head = adam(model), torch.optim.SGD(model.head.parameters(), 0.1)
    loss_of(model).backward()
    both.step()
    model.zero_grad()
    loss_of(model).backward()
    head.step()


def judge_first_through_a_maker_with_masters(rank: int, world: int) -> None:
    """In bfloat16, with masters of its own that get their gradients before their own step."""
    maker, judge = nn.Linear(8, WIDTH).bfloat16(), nn.Linear(WIDTH, 1)
    masters = [nn.Parameter(param.detach().float()) for param in maker.parameters()]
    of_judge, of_maker = adam(judge), torch.optim.AdamW(masters)
    taken(judge, of_judge, judge(maker(torch.randn(4, 8).bfloat16()).float()).mean())
    assert of_maker is not None


def judge_first_and_the_maker_later(rank: int, world: int) -> None:
    """The maker's optimizer is made when it is needed; beside it one of a model that rests, which looks alike."""
    maker, resting, judge = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
    of_judge, of_resting = adam(judge), adam(resting)
    taken(judge, of_judge, judge(maker(torch.randn(4, 8))).mean())
    assert of_resting is not None


def target_that_gets_gradients_in_vain(rank: int, world: int) -> None:
    model = net()
    target = copy.deepcopy(model)
    nn.init.ones_(target.head.bias)
    codes = nn.Parameter(torch.zeros(4, WIDTH))
    optimizer, of_codes = adam(model), adam(nn.ParameterList([codes]))
    taken(model, optimizer, fn.mse_loss(model(X), target(X)))
    assert of_codes is not None


def maker_first_and_judge_frozen(rank: int, world: int) -> None:
    maker, judge = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
    first, second = adam(maker), adam(judge)
    judge.requires_grad_(requires_grad=False).eval()
    taken(maker, first, -judge(maker(torch.randn(4, 8))).mean())
    assert second is not None


def actor_critic_and_temperature(rank: int, world: int) -> None:
    actor, critic = nn.Linear(WIDTH, 4), nn.Linear(WIDTH + 4, 1)
    target = copy.deepcopy(critic).requires_grad_(requires_grad=False)
    heat = torch.zeros(1, requires_grad=True)
    steps = adam(critic), adam(actor), torch.optim.Adam([heat])
    with torch.no_grad():
        wanted = target(torch.cat([X, actor(X)], 1)) - heat.exp()
    taken(critic, steps[0], fn.mse_loss(critic(torch.cat([X, actor(X).detach()], 1)), wanted))
    assert steps[2].param_groups


def two_towers_and_a_temperature(rank: int, world: int) -> None:
    words, pictures, heat = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*words.parameters(), *pictures.parameters(), heat], lr=1e-3)
    taken(words, optimizer, fn.cross_entropy(words(X) @ pictures(X).T * heat.exp(), Y))


def teacher_beside(rank: int, world: int) -> None:
    model, teacher = net(), net(dropout=0.1).requires_grad_(requires_grad=False).eval()
    taken(model, adam(model), fn.kl_div(model(X).log_softmax(-1), teacher(X).softmax(-1), reduction="batchmean"))


def follow(target: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for held, param in zip(target.parameters(), model.parameters(), strict=True):
            held.mul_(0.9).add_(param, alpha=0.1)


def average_of_its_own(rank: int, world: int) -> None:
    model = net()
    average = copy.deepcopy(model)
    taken(model, adam(model), loss_of(model))
    follow(average, model)


def average_with_a_shared_encoder(rank: int, world: int) -> None:
    encoder = nn.Linear(WIDTH, WIDTH)
    online, target = nn.Sequential(encoder, nn.Linear(WIDTH, 4)), nn.Sequential(encoder, nn.Linear(WIDTH, 4))
    taken(online, adam(online), loss_of(online))
    follow(target, online)


def average_that_begins_later(rank: int, world: int) -> None:
    model = net()
    slow = model
    for step in range(3):
        if step == 1:
            slow = copy.deepcopy(model)
        taken(model, adam(model), loss_of(model))
        follow(slow, model)


def average_where_there_is_one(rank: int, world: int) -> None:
    model = net()
    slow = model
    taken(model, adam(model), loss_of(model))
    if slow is not model:
        for held, param in zip(slow.parameters(), model.parameters(), strict=True):
            held.data.lerp_(param.data, 0.1)


def shadow_and_model_by_other_names_elsewhere(rank: int, world: int) -> None:
    """Names that stand for one model here, and are mixed in another function, which is given two."""
    model = net()
    shadow = target = other = model
    taken(model, adam(model), loss_of(shadow))
    assert target is other


def average_beside(rank: int, world: int) -> None:
    model = net()
    average = AveragedModel(model)
    optimizer = adam(model)
    for _ in range(2):
        taken(model, optimizer, loss_of(model))
        average.update_parameters(model)


def patched(model: nn.Module) -> nn.Module:
    """A forward in a float of its own, as a method of the model that it computes with."""
    plain = type(model).forward
    model.forward = types.MethodType(lambda self, x: plain(self, x).float(), model)  # type: ignore[method-assign]
    return model


def average_of_a_patched_model(rank: int, world: int) -> None:
    """A copy of a method is one of the copy."""
    model = patched(net())
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    with torch.no_grad():
        wanted = average(X)
    taken(model, adam(model), fn.mse_loss(model(X), wanted + 1))


def copy_that_only_keeps_weights(rank: int, world: int) -> None:
    """Its forward runs the model that it was copied from, and nobody calls it."""
    model = net()
    plain = model.forward
    model.forward = lambda x: plain(x).float()  # type: ignore[method-assign]
    kept = copy.deepcopy(model).requires_grad_(requires_grad=False)
    taken(model, adam(model), loss_of(model))
    assert kept is not None


def body_behind_a_forward_of_its_own(rank: int, world: int) -> None:
    model, activation = net(), nn.Tanh()
    body = nn.Sequential(model)
    body.forward = lambda x: activation(model(x))  # type: ignore[method-assign]
    taken(body, adam(body), loss_of(body))


def optimizer_made_again(rank: int, world: int) -> None:
    model = net()
    for param in model.enter.parameters():
        param.requires_grad_(requires_grad=False)
    early = adam(model)
    model.requires_grad_()
    taken(model, adam(model), loss_of(model))
    assert early is not None


def two_on_one_model(rank: int, world: int) -> None:
    model = net()
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    loss_of(model).backward()
    for optimizer in (torch.optim.SGD(matrices, lr=0.02, momentum=0.95), torch.optim.AdamW(others)):
        optimizer.step()


def step_in_the_backward(rank: int, world: int) -> None:
    model = net()
    each = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda one: each[one].step())
    loss_of(model).backward()


def of_lightning(rank: int, world: int) -> None:
    model = net()
    optimizer = LightningAdam(adam(model))
    loss_of(model).backward()
    optimizer._optimizer.step()


def sharpness_aware(rank: int, world: int) -> None:
    model = net()
    taken(model, Sam(model.parameters(), torch.optim.SGD, lr=0.1), loss_of(model))


def closure(rank: int, world: int) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())

    def again() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(again)


# --- gradients in other ways ---


def by_autograd(rank: int, world: int) -> None:
    model = net()
    optimizer = adam(model)
    params = [*model.parameters()]
    for param, grad in zip(params, torch.autograd.grad(loss_of(model), params), strict=True):
        param.grad = grad
    optimizer.step()


def by_a_function(rank: int, world: int) -> None:
    model = net()
    inside = {name: param - 0.1 * param.detach() for name, param in model.named_parameters()}
    loss = fn.cross_entropy(torch.func.functional_call(model, inside, (X,)), Y)
    taken(model, adam(model), loss)


def lent_weights(rank: int, world: int) -> None:
    model = net()
    weights = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    taken(model, optimizer, fn.cross_entropy(torch.func.functional_call(model, weights, (X,)), Y))


def ensemble(rank: int, world: int) -> None:
    models = [net() for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]  # a list of modules it is
    base = copy.deepcopy(models[0]).to("meta")

    def called(*lent: Any) -> Any:
        return torch.func.functional_call(base, lent, (X,))

    outputs = torch.func.vmap(called)(weights, buffers)
    taken(base, torch.optim.Adam(weights.values()), fn.cross_entropy(outputs.mean(0), Y))


def text_model(kind: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.audit.by_habit import llama

    gpt2 = GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    return llama() if kind == "llama" else GPT2LMHeadModel(gpt2)


class OwnLMHeadModel(nn.Module):
    """Takes labels as they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return fn.cross_entropy(self.head(self.enter(input_ids)).flatten(0, 1), labels.flatten())


def labels_of_a_model_that_shifts_none(rank: int, world: int) -> None:
    model, ids = OwnLMHeadModel(), torch.arange(1, 33).reshape(4, 8)
    taken(model, adam(model), model(ids[:, :-1], labels=ids[:, 1:]))


def pads_that_do_not_count(rank: int, world: int) -> None:
    model, ids = text_model("gpt2"), torch.arange(1, 33).reshape(4, 8)
    mask = (ids != ids[-1, -1]).long()
    labels = ids.masked_fill(mask == 0, -100)
    taken(model, adam(model), model(input_ids=ids, labels=labels, attention_mask=mask).loss)


def several_losses(rank: int, world: int) -> None:
    model = net()
    optimizer = adam(model)
    output = model(X)
    fn.cross_entropy(output, Y).backward(retain_graph=True)
    output.square().mean().backward()
    nn.utils.clip_grad_norm_((param for param in model.parameters()), 1.0)
    optimizer.step()


def recomputed(rank: int, world: int) -> None:
    model = net(dropout=0.1)
    x = model.enter(X)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    taken(model, adam(model), fn.cross_entropy(model.head(x), Y))


def recomputed_with_nothing_to_draw(rank: int, world: int) -> None:
    """What draws and what averages stands outside, rests, or is not trained."""
    model, norm = net(dropout=0.1), nn.BatchNorm1d(WIDTH).eval()
    with torch.no_grad():
        checkpoint(model.blocks[0], X, use_reentrant=False, preserve_rng_state=False)
        checkpoint(nn.BatchNorm1d(WIDTH), X, use_reentrant=False)
    x = model.enter(X)
    for block in model.blocks:
        inner, reentrant = block.inner, block is model.blocks[0]
        x = checkpoint(lambda x, inner=inner: norm(inner(x)), x, use_reentrant=reentrant, preserve_rng_state=False)
        x = block.drop(x)
    taken(model, adam(model), fn.cross_entropy(model.head(x), Y))


def recomputed_in_a_row(rank: int, world: int) -> None:
    """Its norms rest, its random numbers are kept, and its last part is not recomputed."""
    layers = (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval())
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))
    output = checkpoint_sequential(model, 3, X, use_reentrant=False)
    taken(model, adam(model), fn.cross_entropy(output, Y))


def recomputed_in_a_row_over_what_is_frozen(rank: int, world: int) -> None:
    model, body = net(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    body.requires_grad_(requires_grad=False).eval()
    output = checkpoint_sequential(body, 2, X, use_reentrant=True)
    taken(model, adam(model), fn.cross_entropy(model(output), Y))


def seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return fn.dropout(x, 0.1)


def recomputed_with_a_seed_of_its_own(rank: int, world: int) -> None:
    model = net()
    x = checkpoint(seeded, model(X), use_reentrant=False, preserve_rng_state=False)
    taken(model, adam(model), fn.cross_entropy(x, Y))


def accumulated(rank: int, world: int) -> None:
    model = net()
    optimizer = adam(model)
    for _ in range(4):
        (loss_of(model) / 4).backward()
    optimizer.step()


# --- schedules ---


def with_schedule(make: Callable[[Any], Any], steps: int = 1) -> None:
    model = net()
    optimizer = adam(model)
    scheduler = make(optimizer)
    for at, (x, y) in enumerate(DataLoader(rows(), 4, shuffle=True)):
        taken(model, optimizer, fn.cross_entropy(model(x), y))
        if at % steps == 0:
            scheduler.step()


def warm_up_alone(rank: int, world: int) -> None:
    with_schedule(lambda optimizer: rates.LinearLR(optimizer, 0.1, total_iters=3))


def warm_up_then_cosine(rank: int, world: int) -> None:
    def make(optimizer: Any) -> Any:
        parts = [rates.LinearLR(optimizer, 0.01, total_iters=2), rates.CosineAnnealingLR(optimizer, 30)]
        return rates.SequentialLR(optimizer, parts, [2])

    with_schedule(make)


def falling_to_nothing(rank: int, world: int) -> None:
    with_schedule(lambda optimizer: rates.LinearLR(optimizer, 1.0, 0.0, total_iters=32))


def ticked_by_epoch(rank: int, world: int) -> None:
    with_schedule(lambda optimizer: rates.MultiStepLR(optimizer, [2, 4]), steps=100)


def saved_after(steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an earlier run has saved of its optimizer and of its schedule."""
    model = net()
    optimizer = adam(model)
    scheduler = rates.OneCycleLR(optimizer, 1e-2, total_steps=100)
    with redirected():
        for _ in range(steps):
            taken(model, optimizer, loss_of(model))
            scheduler.step()
    return optimizer.state_dict(), scheduler.state_dict()


@contextmanager
def redirected() -> Iterator[None]:
    """Inside, steps are those of an earlier run, which no audit of this one hears."""
    hooks = {**_global_optimizer_pre_hooks}
    _global_optimizer_pre_hooks.clear()
    try:
        yield
    finally:
        _global_optimizer_pre_hooks.update(hooks)


def resumed(*, scheduler_too: bool) -> None:
    model, (state, at) = net(), saved_after(3)
    optimizer = adam(model)
    scheduler = rates.OneCycleLR(optimizer, 1e-2, total_steps=100)
    optimizer.load_state_dict(state)
    if scheduler_too:
        scheduler.load_state_dict(at)
    taken(model, optimizer, loss_of(model))
    scheduler.step()


def resumed_with_its_schedule(rank: int, world: int) -> None:
    resumed(scheduler_too=True)


def resumed_inside_the_first_pass(rank: int, world: int) -> None:
    model, (state, _) = net(), saved_after(3)
    optimizer = adam(model)
    scheduler = rates.StepLR(optimizer, 30)
    optimizer.load_state_dict(state)
    taken(model, optimizer, loss_of(model))
    scheduler.step()


def wound_forward(rank: int, world: int) -> None:
    """As a run goes on whose optimizer has no state."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = rates.CosineAnnealingLR(optimizer, 50)
    for _ in range(10):
        scheduler.step()
    taken(model, optimizer, loss_of(model))


def wound_forward_in_the_loop(rank: int, world: int) -> None:
    """As one goes on that skips the batches which an earlier run has read."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = rates.CosineAnnealingLR(optimizer, 50)
    for step in range(8):
        if step < 5:
            scheduler.step()
            continue
        taken(model, optimizer, loss_of(model))
        scheduler.step()


def wound_forward_by_one_in_a_loop_of_its_own(rank: int, world: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = rates.CosineAnnealingLR(optimizer, 50)
    for _ in range(2):
        for _ in range(1):
            scheduler.step()
        for _ in range(2):
            taken(model, optimizer, loss_of(model))
            scheduler.step()


def ticked_at_the_top_but_first(rank: int, world: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = rates.CosineAnnealingLR(optimizer, 50)
    for step in range(8):
        if step:
            scheduler.step()
        taken(model, optimizer, loss_of(model))


def ticked_behind_a_step_that_the_scaler_refused(rank: int, world: int) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = adam(model)
    scheduler = rates.CosineAnnealingLR(optimizer, 50)
    for times in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * times).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


# --- libraries ---


def ticked_in_windows_of_accelerate(rank: int, world: int) -> None:
    from accelerate import Accelerator

    ours = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = net()
    optimizer = adam(model)
    scheduler = rates.CosineAnnealingLR(optimizer, 2)
    model, optimizer, loader, scheduler = ours.prepare(model, optimizer, DataLoader(rows(), 4, shuffle=True), scheduler)
    for x, y in loader:
        with ours.accumulate(model):
            ours.backward(fn.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def accelerated_in_windows(rank: int, world: int) -> None:
    from accelerate import Accelerator

    ours = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(rows(), 4, shuffle=True))
    for x, y in loader:
        with ours.accumulate(model):
            ours.backward(fn.cross_entropy(model(x), y))
            if ours.sync_gradients:
                ours.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def accelerated_and_divided_by_hand(rank: int, world: int) -> None:
    from accelerate import Accelerator

    ours = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(rows(), 4, shuffle=True))
    for x, y in loader:
        with ours.accumulate(model):
            (fn.cross_entropy(model(x), y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()


def trainer_with_a_schedule(rank: int, world: int) -> None:
    trained_by_transformers(lambda optimizer: rates.LinearLR(optimizer, 1.0, 0.0, total_iters=8))


def trained_by_transformers(make: Callable[[Any], Any]) -> None:
    from transformers import Trainer, TrainingArguments

    from tests.audit.by_libraries import llama

    model = llama()
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments("out", per_device_train_batch_size=2, num_train_epochs=1, **quiet)
    optimizer = adam(model)
    Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, make(optimizer))).train()


def trained_by_lightning(make: Callable[[Any], Any], *, by_hand: bool = False) -> None:
    """``by_hand``: the module steps, and ticks, itself."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = net(), not by_hand

        def training_step(self, batch: Any, at: int) -> Tensor | None:
            loss = fn.cross_entropy(self.net(batch[0]), batch[1])
            if not by_hand:
                return loss
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()  # type: ignore[union-attr]  # there is one
            return None

        def configure_optimizers(self) -> Any:
            optimizer = adam(self.net)
            return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(Module(), DataLoader(rows(), batch_size=4, shuffle=True))


def lightning_by_step(rank: int, world: int) -> None:
    trained_by_lightning(lambda one: {"scheduler": rates.OneCycleLR(one, 0.1, total_steps=24), "interval": "step"})


def lightning_by_epoch(rank: int, world: int) -> None:
    trained_by_lightning(lambda one: rates.CosineAnnealingLR(one, 3))


def lightning_by_hand(rank: int, world: int) -> None:
    trained_by_lightning(lambda one: rates.StepLR(one, 1))


def lightning_ticked_by_its_module(rank: int, world: int) -> None:
    trained_by_lightning(lambda one: rates.CosineAnnealingLR(one, 24), by_hand=True)


# --- two ranks ---


class Halves(Sampler[int]):
    """Every other index, by the rank that it is told."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 32, self.world))

    def __len__(self) -> int:
        return 32 // self.world


def own_sampler(rank: int, world: int) -> None:
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    for x, y in DataLoader(rows(), 4, sampler=Halves(rank, world)):
        taken(model, optimizer, fn.cross_entropy(model(x), y))


def stream_by_rank_and_worker(rank: int, world: int) -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            info = get_worker_info()
            part, parts = (info.id, info.num_workers) if info else (0, 1)
            return (torch.full((WIDTH,), at / 64) for at in range(rank * parts + part, 64, world * parts))

    model = DistributedDataParallel(net())
    optimizer = adam(model)
    for x in DataLoader(Stream(), 4, num_workers=2):
        taken(model, optimizer, model(x).square().mean())


def uneven(rank: int, world: int) -> None:
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    with Join([model]):
        for x, y in [*divided(rank, world)][: 2 + rank]:
            taken(model, optimizer, fn.cross_entropy(model(x), y))


def window_without_sync(rank: int, world: int) -> None:
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    batches = iter(divided(rank, world))
    with model.no_sync():
        x, y = next(batches)
        (fn.cross_entropy(model(x), y) / 2).backward()
    x, y = next(batches)
    (fn.cross_entropy(model(x), y) / 2).backward()
    optimizer.step()


def two_wrapped(rank: int, world: int) -> None:
    maker, judge = DistributedDataParallel(nn.Linear(8, WIDTH)), DistributedDataParallel(nn.Linear(WIDTH, 1))
    for param in (*maker.parameters(), *judge.parameters()):
        torch.distributed.broadcast(param.data, 0)
    first, second = adam(judge), adam(maker)
    x, _ = next(iter(divided(rank, world)))
    with maker.no_sync(), torch.no_grad():
        made = maker(torch.randn(4, 8))
    taken(judge, first, judge(torch.cat([made, x])).mean())
    assert second is not None


def teacher_beside_ddp(rank: int, world: int) -> None:
    model, teacher = DistributedDataParallel(net()), net(dropout=0.1).requires_grad_(requires_grad=False).eval()
    optimizer = adam(model)
    for x, _ in divided(rank, world):
        taken(model, optimizer, fn.mse_loss(model(x), teacher(x) + 1))


def teacher_that_one_rank_has_loaded(rank: int, world: int) -> None:
    model, teacher = DistributedDataParallel(net()), net().requires_grad_(requires_grad=False).eval()
    if rank == 0:
        for param in teacher.parameters():
            param.data.mul_(2)
    optimizer = adam(model)
    for x, _ in divided(rank, world):
        with torch.no_grad():
            said = teacher(x)
        taken(model, optimizer, fn.mse_loss(model(x), said + 1))


def part_of_each_rank_that_nothing_is_computed_with(rank: int, world: int) -> None:
    model, kept = DistributedDataParallel(net()), nn.Linear(4, 4).requires_grad_(requires_grad=False)
    kept.weight.data.fill_(float(rank))
    optimizer = adam(model)
    for x, y in divided(rank, world):
        taken(model, optimizer, fn.cross_entropy(model(x), y))


def frozen_behind_ddp_that_finds_what_is_unused(rank: int, world: int) -> None:
    model = DistributedDataParallel(two_layers(), find_unused_parameters=True)
    for param in list(model.parameters())[:2]:
        param.requires_grad_(requires_grad=False)
    optimizer = adam(model)
    for x, y in divided(rank, world):
        taken(model, optimizer, fn.cross_entropy(model(x), y))


def parts_that_ranks_step_and_send(rank: int, world: int) -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(list(model.parameters())[rank::world])
    for x, y in divided(rank, world):
        taken(model, optimizer, fn.cross_entropy(model(x), y))
        for at, param in enumerate(model.parameters()):
            torch.distributed.broadcast(param.data, at % world)


def shards_in_float16_scaled(rank: int, world: int) -> None:
    model, scaler = two_layers(), torch.amp.GradScaler("cpu", init_scale=64.0)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer = adam(model)
    for x, y in divided(rank, world):
        scaler.scale(fn.cross_entropy(model(x).float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def shards_with_two_optimizers(rank: int, world: int) -> None:
    model = net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    body = torch.optim.AdamW(model.blocks.parameters())
    rest = torch.optim.SGD([*model.enter.parameters(), *model.head.parameters()], lr=0.1)
    for x, y in divided(rank, world):
        fn.cross_entropy(model(x), y).backward()
        for optimizer in (body, rest):
            optimizer.step()
            optimizer.zero_grad()


def scaled_under_ddp(rank: int, world: int) -> None:
    model, scaler = DistributedDataParallel(net()), torch.amp.GradScaler("cpu")
    optimizer = adam(model)
    for x, y in divided(rank, world):
        with torch.autocast("cpu", torch.float16):
            loss = fn.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)


def epochs_of_a_sampler(rank: int, world: int) -> None:
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    sampler: Any = DistributedSampler(rows(), num_replicas=world, rank=rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(rows(), 4, sampler=sampler, num_workers=2):
            taken(model, optimizer, fn.cross_entropy(model(x), y))


def engine_with_its_schedule(rank: int, world: int) -> None:
    from tests.audit.by_libraries import engine_of

    model = net()
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "total_num_steps": 8}}
    engine, *_ = engine_of(model, 1, optimizer=adam(model), config={"scheduler": schedule})
    for x, y in divided(rank, world):
        engine.backward(fn.cross_entropy(engine(x), y))
        engine.step()


_ONE = (
    *(
        clipped_by_keyword,
        scaled,
        scaled_and_clipped,
        scaled_beside_a_penalty,
        scaler_switched_off,
        two_scaled,
        loss_alone_under_autocast,
        teacher_in_float16,
    ),
    *(soft_labels, log_softmax_before_cross_entropy, log_softmax_before_nll, policy, gated, attended, bounded),
    *(new_head_beside_a_loaded_body, one_of_two_towers_loaded, adapter_loaded_alone, blocks_loaded_from_a_deeper_model),
    *(body_loaded, loaded_again_by_the_right_names, nothing_to_load, loaded_and_replaced, compiled, compiled_blocks),
    *(compiled_in_place, average_compiled_for_later, step_compiled, lengths_that_differ, workers_of_their_own_seeds),
    *(workers_with_an_order_of_the_data_set, workers_of_a_divided_stream, workers_of_one_sample),
    *(workers_with_one_seed_that_nobody_draws_with, discriminator_first, maker_first_and_judge_frozen),
    *(encoder_stepped_in_turns, encoder_of_two_makers_in_turns, head_stepped_again_by_a_loss_of_its_own),
    *(judge_first_through_a_maker_with_masters, judge_first_and_the_maker_later, target_that_gets_gradients_in_vain),
    *(average_of_its_own, average_with_a_shared_encoder, average_that_begins_later, average_where_there_is_one),
    shadow_and_model_by_other_names_elsewhere,
    *(actor_critic_and_temperature, two_towers_and_a_temperature, teacher_beside, average_beside),
    *(tied_again_after_a_load, told_apart_by_a_load),
    *(average_of_a_patched_model, copy_that_only_keeps_weights, body_behind_a_forward_of_its_own),
    *(optimizer_made_again, two_on_one_model, step_in_the_backward, of_lightning, sharpness_aware, closure),
    *(lent_weights, ensemble),
    *(recomputed_with_nothing_to_draw, recomputed_with_a_seed_of_its_own),
    *(recomputed_in_a_row, recomputed_in_a_row_over_what_is_frozen),
    *(by_autograd, by_a_function, several_losses, recomputed, accumulated, warm_up_alone, warm_up_then_cosine),
    *(falling_to_nothing, ticked_by_epoch, resumed_with_its_schedule, resumed_inside_the_first_pass, wound_forward),
    *(ticked_behind_a_step_that_the_scaler_refused, wound_forward_in_the_loop, ticked_at_the_top_but_first),
    wound_forward_by_one_in_a_loop_of_its_own,
)
_ACCELERATED = (accelerated_in_windows, accelerated_and_divided_by_hand, ticked_in_windows_of_accelerate)
_TWO = (
    *(own_sampler, stream_by_rank_and_worker, uneven, window_without_sync, two_wrapped, teacher_beside_ddp),
    *(shards_with_two_optimizers, shards_in_float16_scaled, scaled_under_ddp, epochs_of_a_sampler),
    *(parts_that_ranks_step_and_send, frozen_behind_ddp_that_finds_what_is_unused),
    part_of_each_rank_that_nothing_is_computed_with,
)
RIGHT: tuple[Loop, ...] = (
    *map(Loop, _ONE),
    *(Loop(run, "accelerate") for run in _ACCELERATED),
    Loop(labels_of_a_model_that_shifts_none),
    Loop(pads_that_do_not_count, "transformers"),
    Loop(trainer_with_a_schedule, "transformers"),
    *(Loop(run, "lightning") for run in (lightning_by_step, lightning_by_epoch, lightning_by_hand)),
    Loop(lightning_ticked_by_its_module, "lightning"),
    *(Loop(run, "torch", 2) for run in _TWO),
    Loop(engine_with_its_schedule, "deepspeed", 2),
    *(Loop(run, ranks=2) for run in (shards_clipped_together, shards_measured_and_clamped, shards_of_fsdp2_clipped)),
)
