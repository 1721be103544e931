"""Right programs of unusual shape on one process, written before the rules that they hold in check were touched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as rates
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from tests.audit.by_libraries import llama
from tests.audit.case import WIDTH, Case, adam, net, rows

X = torch.full((2, WIDTH), 0.5)


class LightningAdam:
    """Shares everything with the optimizer inside, as Lightning's wrapper does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self._optimizer = optimizer


class Sam(torch.optim.Optimizer):
    """Steps by another optimizer over the same groups."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **given: Any) -> None:
        super().__init__(params, {"rho": 0.05, **given})
        self.base_optimizer = base(self.param_groups, **given)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[1](self.enter(x))


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({"words": nn.Linear(WIDTH, 4), "tags": nn.Linear(WIDTH, 2)})

    def forward(self, x: Tensor, task: str = "words") -> Tensor:
        return self.heads[task](self.body(x))


class Distilled(nn.Module):
    """A student, and a teacher that is no part of it."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        self.student = net()
        teacher = net(dropout=0.1).requires_grad_(requires_grad=False).eval()
        self.teacher = [teacher] if hidden else teacher

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4), nn.Softmax(-1))
        self.critic = nn.Linear(WIDTH, 1)
        self.target = copy.deepcopy(self.critic).requires_grad_(requires_grad=False)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(2, base.in_features) * 0.02)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.net.head(x)


class Counting(IterableDataset[Tensor]):
    """Never ends, and cannot be read twice."""

    def __init__(self) -> None:
        self.rows = iter(lambda: torch.ones(WIDTH), None)

    def __iter__(self) -> Iterator[Tensor]:
        return self.rows


class Longest(Sampler[list[int]]):
    """Batches of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3], [4, 5]])

    def __len__(self) -> int:
        return 3


def case(model: nn.Module, optimizer: Any = None, scheduler: Any = None, **given: Any) -> Case:
    return Case(model=model, optimizer=optimizer or adam(model), scheduler=scheduler, **given)


def backward(model: nn.Module, optimizer: Any = None, count: int = 1, x: Tensor = X) -> Case:
    for _ in range(count):
        model(x).square().mean().backward()
    return Case(model=model, optimizer=optimizer or adam(model), at_step=True)


def gan(rank: int, world: int) -> Case:
    model = nn.ModuleDict({"generator": nn.Linear(8, WIDTH), "discriminator": nn.Linear(WIDTH, 1)})
    return case(model, [adam(model["generator"]), adam(model["discriminator"])])


def gan_at_the_generators_step(rank: int, world: int) -> Case:
    model = nn.ModuleDict({"generator": nn.Linear(WIDTH, WIDTH), "discriminator": nn.Linear(WIDTH, 1)})
    one, other = adam(model["generator"]), adam(model["discriminator"])
    model["discriminator"](model["generator"](X)).mean().backward()
    other.zero_grad()
    return Case(model=model, optimizer=[one, other], at_step=True)


def lightning_around_adam(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return case(model, [optimizer, LightningAdam(optimizer)])


def manual_optimization(rank: int, world: int) -> Case:
    model = nn.ModuleDict({"a": net(), "b": net()})
    one, other = adam(model["a"]), adam(model["b"])
    return case(model, [LightningAdam(one), LightningAdam(other), one])


def input_that_is_trained(rank: int, world: int) -> Case:
    """As for an adversarial example, or a prompt."""
    model = net().requires_grad_(requires_grad=False)
    return case(model, torch.optim.Adam([torch.zeros(4, WIDTH, requires_grad=True)]))


def sharpness_aware(rank: int, world: int) -> Case:
    model = net()
    return case(model, Sam(model.parameters(), torch.optim.SGD, lr=0.1))


def teacher_inside(rank: int, world: int) -> Case:
    return case(Distilled(hidden=False))


def teacher_in_a_list(rank: int, world: int) -> Case:
    return case(Distilled(hidden=True))


def teacher_inside_at_step(rank: int, world: int) -> Case:
    return backward(Distilled(hidden=False))


def ema_in_a_list(rank: int, world: int) -> Case:
    model: Any = net()
    model.averages = [AveragedModel(model)]
    return case(model)


def ema_inside(rank: int, world: int) -> Case:
    model = nn.ModuleDict({"net": net()})
    optimizer = adam(model)
    model["ema"] = copy.deepcopy(model["net"]).requires_grad_(requires_grad=False)
    return case(model, optimizer)


def adapters_by_hand(rank: int, world: int) -> Case:
    model = net().requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.inner = Adapter(block.inner)
    return case(model)


def adapters_by_hand_at_step(rank: int, world: int) -> Case:
    return backward(nn.Sequential(Adapter(nn.Linear(WIDTH, WIDTH)), nn.ReLU(), Adapter(nn.Linear(WIDTH, 4))))


def expert_without_a_token(rank: int, world: int) -> Case:
    return backward(Experts())


def task_of_this_batch(rank: int, world: int) -> Case:
    return backward(Tasks())


def closure_to_come(rank: int, world: int) -> Case:
    model = net()
    return case(model, torch.optim.LBFGS(model.parameters()))


def gradient_penalty(rank: int, world: int) -> Case:
    model = net()
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x).square().mean() + (slope.norm(2, 1) - 1).square().mean()).backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def tied_by_hand(rank: int, world: int) -> Case:
    model = nn.ModuleDict({"enter": nn.Embedding(8, WIDTH), "leave": nn.Linear(WIDTH, 8, bias=False)})
    model["leave"].weight = model["enter"].weight
    return case(model)


def recomputed_in_its_forward(rank: int, world: int) -> Case:
    return case(Recomputed())


def recomputed_and_compiled(rank: int, world: int) -> Case:
    model = Recomputed()
    model.compile()
    return case(model)


def normalised_weights(rank: int, world: int) -> Case:
    model = net()
    nn.utils.parametrizations.weight_norm(model.head)
    nn.utils.parametrizations.spectral_norm(model.enter)
    return case(model)


def orthogonal_weights(rank: int, world: int) -> Case:
    model = net()
    nn.utils.parametrizations.orthogonal(model.enter)
    return case(model)


def a_group_that_rests(rank: int, world: int) -> Case:
    model = net()
    groups = [{"params": model.blocks.parameters(), "lr": 0.0}, {"params": model.head.parameters()}]
    return case(model, torch.optim.AdamW([*groups, {"params": model.enter.parameters()}], lr=1e-3))


def warm_up_then_cosine(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    parts = [rates.LinearLR(optimizer, 0.01, total_iters=5), rates.CosineAnnealingLR(optimizer, 95)]
    return case(model, optimizer, rates.SequentialLR(optimizer, parts, [5]), loaders=(DataLoader(rows(), 4),))


def warm_up_alone(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return case(model, optimizer, rates.LinearLR(optimizer, total_iters=4), loaders=(DataLoader(rows(), 4),))


def chained_rates(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    parts = [rates.ConstantLR(optimizer, 0.1, 2), rates.ExponentialLR(optimizer, 0.99)]
    return case(model, optimizer, rates.ChainedScheduler(parts, optimizer), loaders=(DataLoader(rows(), 4),))


def rate_by_plateau(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return case(model, optimizer, rates.ReduceLROnPlateau(optimizer))


def rate_by_epoch(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return case(model, optimizer, rates.CosineAnnealingLR(optimizer, 3), loaders=(DataLoader(rows(), 4),))


def restarts(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return case(model, optimizer, rates.CosineAnnealingWarmRestarts(optimizer, 4), loaders=(DataLoader(rows(), 4),))


def cyclic(rank: int, world: int) -> Case:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return case(model, optimizer, rates.CyclicLR(optimizer, 0.01, 0.1, 4))


def other_optimizers(rank: int, world: int) -> Case:
    model = net()
    body = [p for name, p in model.named_parameters() if "head" not in name]
    return case(model, [torch.optim.Adafactor(body), torch.optim.NAdam(model.head.parameters())])


def rates_that_are_no_numbers(rank: int, world: int) -> Case:
    """As Adafactor of transformers, which finds its own."""
    model = net()
    groups = [{"params": model.blocks.parameters()}, {"params": model.enter.parameters(), "lr": torch.tensor(0.1)}]
    optimizer = torch.optim.SGD([*groups, {"params": model.head.parameters()}], lr=0.1)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[2]["lr"] = None, torch.empty(0)
    return backward(model, optimizer)


def sparse_embedding(rank: int, world: int) -> Case:
    model = nn.ModuleDict({"words": nn.Embedding(8, WIDTH, sparse=True), "head": nn.Linear(WIDTH, 4)})
    model["head"](model["words"](torch.tensor([1, 2]))).sum().backward()
    optimizers = [torch.optim.SparseAdam(model["words"].parameters()), adam(model["head"])]
    return Case(model=model, optimizer=optimizers, at_step=True)


def frozen_norms(rank: int, world: int) -> Case:
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).requires_grad_(requires_grad=False)
    body.eval()
    return case(nn.Sequential(body, nn.Linear(WIDTH, 4)))


class Contrast(nn.Module):
    """MoCo's: keys come from a copy that follows, in training mode with batch norms of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(requires_grad=False)


def norms_of_a_copy_that_follows(rank: int, world: int) -> Case:
    model = Contrast()
    for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
        key.add_(torch.randn_like(key), alpha=0.05 * float(query.detach().std(correction=0)))  # as after a resume
    return case(model, adam(model.query))


def frozen_for_a_turn(rank: int, world: int) -> Case:
    """As Lightning's ``toggle_optimizer`` leaves the discriminator while the generator steps."""
    critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, 1))
    model = nn.ModuleDict({"generator": nn.Linear(8, WIDTH), "critic": critic})
    optimizers = [adam(model["generator"]), adam(critic)]
    critic.requires_grad_(requires_grad=False)
    return case(model, optimizers)


def eval_without_anything_that_cares(rank: int, world: int) -> Case:
    return case(net().eval())


def actor_critic(rank: int, world: int) -> Case:
    return case(Critic())


def resumed(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    scheduler = rates.CosineAnnealingLR(optimizer, 100)
    for _ in range(3):
        model(X).sum().backward()
        optimizer.step()
        scheduler.step()
    again = net()
    again.load_state_dict(model.state_dict())
    later = adam(again)
    later.load_state_dict(optimizer.state_dict())
    schedule = rates.CosineAnnealingLR(later, 100)
    schedule.load_state_dict(scheduler.state_dict())
    return case(again, later, schedule)


def resumed_without_state(rank: int, world: int) -> Case:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = rates.StepLR(optimizer, 10)
    state = {**scheduler.state_dict(), "last_epoch": 7, "_step_count": 8}
    scheduler.load_state_dict(state)
    return case(model, optimizer, scheduler)


def accumulated_by_hand(rank: int, world: int) -> Case:
    return backward(net(), count=3)


def stepped_in_backward(rank: int, world: int) -> Case:
    model = net()
    each = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: nn.Parameter) -> None:
        each[param].step()
        each[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return case(model, list(each.values()))


def endless_stream(rank: int, world: int) -> Case:
    return case(net(), loaders=(DataLoader(Counting(), batch_size=4),))


def batches_of_its_own(rank: int, world: int) -> Case:
    return case(net(), loaders=(DataLoader(rows(), batch_sampler=Longest()),))


def in_time(rank: int, world: int) -> Case:
    sampler = BatchSampler(SequentialSampler(rows()), 4, drop_last=True)
    return case(net(), loaders=(DataLoader(rows(), batch_sampler=sampler), DataLoader(rows(), 8)))


def parameters_in_lists(rank: int, world: int) -> Case:
    model: Any = net()
    model.prompts = nn.ParameterList(torch.ones(WIDTH) for _ in range(3))
    model.callables = [torch.relu, nn.functional.gelu]
    model.shapes = {"in": (WIDTH,), "cache": torch.zeros(3)}
    model.order = [model.enter, *model.blocks]
    return case(model)


def complex_weights(rank: int, world: int) -> Case:
    model = net()
    model.register_parameter("waves", nn.Parameter(torch.ones(4, dtype=torch.complex64)))
    return case(model)


def preferred(rank: int, world: int) -> Case:
    model = llama()
    model.reference = [copy.deepcopy(model).requires_grad_(requires_grad=False).eval()]
    return case(model)


def classified_by_adapters(rank: int, world: int) -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0)
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], bias="lora_only", init_lora_weights="pissa")
    return case(get_peft_model(LlamaForSequenceClassification(config), lora).train())


def adapters_on_a_narrow_base(rank: int, world: int) -> Case:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama().bfloat16(), LoraConfig(target_modules=["q_proj"], use_dora=True)).train()
    for param in model.parameters():
        param.data = param.data.float() if param.requires_grad else param.data
    return case(model)


def labels_as_the_model_takes_them(rank: int, world: int) -> Case:
    ids = torch.arange(1, 17).reshape(4, 4)
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones(4)} for row in ids]
    return case(llama(), loaders=(DataLoader(data, batch_size=2, shuffle=True),))  # type: ignore[arg-type]


ODD_ONE = (
    *(gan, gan_at_the_generators_step, lightning_around_adam, manual_optimization, sharpness_aware, teacher_inside),
    *(teacher_in_a_list, teacher_inside_at_step, ema_in_a_list, ema_inside, adapters_by_hand, adapters_by_hand_at_step),
    *(expert_without_a_token, task_of_this_batch, closure_to_come, gradient_penalty, tied_by_hand),
    *(recomputed_in_its_forward, recomputed_and_compiled, normalised_weights, orthogonal_weights, a_group_that_rests),
    *(warm_up_then_cosine, warm_up_alone, chained_rates, rate_by_plateau, rate_by_epoch, restarts, cyclic),
    *(other_optimizers, sparse_embedding, frozen_norms, eval_without_anything_that_cares, actor_critic, resumed),
    *(resumed_without_state, accumulated_by_hand, stepped_in_backward, endless_stream, batches_of_its_own, in_time),
    *(parameters_in_lists, complex_weights, input_that_is_trained, rates_that_are_no_numbers),
    *(norms_of_a_copy_that_follows, frozen_for_a_turn),
)
ODD_LIBRARIES = (
    *((make, "transformers") for make in (preferred, labels_as_the_model_takes_them)),
    *((make, "peft") for make in (classified_by_adapters, adapters_on_a_narrow_base)),
)
