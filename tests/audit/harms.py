"""What each error does to a number: three steps of a wrong program, and three of the same without its error.

Truth is plain torch: nothing here is prepkit's but the programs that its audit refuses. ``python -m tests.tools.harms``
prints the table of rules, harms and numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from tests.audit import by_gradients, by_habit, by_hand, by_libraries, by_numbers
from tests.audit.by_gradients import batch
from tests.audit.case import WIDTH, Case, adam, net, rows
from tests.audit.errors import ERRORS

Make = Callable[[int, int], Case]
Seen = float | str
"""A number, or the kind of exception that ended the program."""

STEPS = 3


@frozen
class Harm:
    """One error, what it does, and the number that shows it."""

    make: Make
    mended: Make
    """The same program without the error."""
    what: str
    """What the error does to the run."""
    measure: Callable[[Case], Seen]

    @property
    def rule(self) -> str:
        (rule,) = (one.rule for one in ERRORS if one.make is self.make)
        return rule

    @property
    def library(self) -> str:
        (library,) = (one.library for one in ERRORS if one.make is self.make)
        return library


def seen(make: Make, measure: Callable[[Case], Seen]) -> Seen:
    """What a program comes to."""
    with torch.random.fork_rng(devices=[]):
        return measure(make(0, 1))


# --- three steps ---


def samples() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of eight samples, as many as there are steps."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        inputs = torch.randn(8, WIDTH, generator=generator)
        yield inputs, torch.randint(4, (8,), generator=generator)


def loss_of(model: Any, inputs: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy in float32; a language model reads tokens made from the samples."""
    if hasattr(model, "config") and hasattr(model, "generate"):
        tokens = (inputs.abs() * 20).long() % 64
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]  # transformers
    dtype = next(model.parameters()).dtype
    return cross_entropy(model(inputs.to(dtype)).float(), classes)


def train(case: Case) -> None:
    """Three steps as torch's own guide writes them."""
    optimizers = case.optimizer if isinstance(case.optimizer, list) else [case.optimizer]
    torch.manual_seed(5)
    for inputs, classes in samples():
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(case.model, inputs, classes).backward()  # type: ignore[no-untyped-call]  # torch
        for optimizer in optimizers:
            optimizer.step()
        if case.scheduler is not None:
            case.scheduler.step()


def loss_after(case: Case) -> float:
    """The loss of the first batch after three steps, without dropout."""
    train(case)
    inputs, classes = next(samples())
    with torch.no_grad():
        return float(loss_of(case.model.eval(), inputs, classes))


def moved(*names: str) -> Callable[[Case], float]:
    """How far the parameters with these in their names have moved in three steps, as a sum."""

    def measure(case: Case) -> float:
        before = {name: param.detach().clone() for name, param in case.model.named_parameters()}
        train(case)
        return distance(case.model, before, names)

    return measure


def distance(model: nn.Module, before: dict[str, Tensor], names: tuple[str, ...] = ("",)) -> float:
    now = {name: param.detach() for name, param in model.named_parameters()}
    chosen = [name for name in now if any(part in name for part in names)]
    assert chosen, f"no parameter is named like {names}"
    return float(sum((now[name].float() - before[name].float()).abs().sum() for name in chosen))


def stepped(case: Case) -> float:
    """How far the weights move in the step that the program is about to take."""
    before = {name: param.detach().clone() for name, param in case.model.named_parameters()}
    case.optimizer.step()
    return distance(case.model, before)


def ends(case: Case) -> Seen:
    """The exception that ends three steps, or the loss after them."""
    try:
        return loss_after(case)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return type(error).__name__


def rate(case: Case) -> float:
    """The rate after three steps, as a share of the first."""
    before = case.optimizer.param_groups[0]["lr"]
    train(case)
    return float(case.optimizer.param_groups[0]["lr"] / before)


def gradient(path: str) -> Callable[[Case], float]:
    """Sum of the absolute gradients of a module's parameters in the first step."""

    def measure(case: Case) -> float:
        torch.manual_seed(5)
        loss_of(case.model, *next(samples())).backward()  # type: ignore[no-untyped-call]  # torch
        params = case.model.get_submodule(path).parameters()
        return float(sum(param.grad.abs().sum() for param in params if param.grad is not None))

    return measure


def apart(case: Case) -> float:
    """How far the output layer is from the embedding after three steps."""
    train(case)
    model: Any = case.model
    return float((model.lm_head.weight - model.get_input_embeddings().weight).abs().sum())


def batches(case: Case) -> float:
    """Batches of a pass."""
    return float(len(list(case.loaders[0])))


def reading(case: Case) -> float:
    """The first sample that the loader reads."""
    return float(next(iter(case.loaders[0]))[0][0, 0])


# --- programs without their errors ---


def plain(**options: Any) -> Make:
    """The small model and its optimizer, both as they should be."""

    def mended(rank: int, world: int) -> Case:
        model = net()
        return Case(model=model, optimizer=adam(model, **options))

    return mended


def on(model: Callable[[], nn.Module], **options: Any) -> Make:
    """A model and the optimizer of all of it."""

    def mended(rank: int, world: int) -> Case:
        made = model()
        return Case(model=made, optimizer=adam(made, **options))

    return mended


def unfrozen_first(rank: int, world: int) -> Case:
    model = net()
    model.blocks.requires_grad_(requires_grad=False)
    model.blocks.requires_grad_(requires_grad=True)
    return Case(model=model, optimizer=adam(model))


def head_replaced_first(rank: int, world: int) -> Case:
    model = net()
    model.head = nn.Linear(WIDTH, 8)
    return Case(model=model, optimizer=adam(model))


def state_taken_along(rank: int, world: int) -> Case:
    case = by_hand.trained_state_left_behind(rank, world)
    state = case.optimizer.state
    held = list(state)
    for old, new in zip(held, case.model.parameters(), strict=True):
        state[new] = state.pop(old)
    return case


def one_optimizer_each(rank: int, world: int) -> Case:
    model = net()
    rest = torch.optim.AdamW((p for n, p in model.named_parameters() if "head" not in n), lr=1e-3)
    return Case(model=model, optimizer=[rest, torch.optim.SGD(model.head.parameters(), lr=0.1)])


def weight_frozen(rank: int, world: int) -> Case:
    model = net()
    model.enter.weight.requires_grad_(requires_grad=False)
    return Case(model=model, optimizer=adam(model))


def blocks_frozen(rank: int, world: int) -> Case:
    model = net()
    model.blocks.requires_grad_(requires_grad=False)
    return Case(model=model, optimizer=adam(model))


def group_spelt(rank: int, world: int) -> Case:
    model = net()
    return Case(model=model, optimizer=torch.optim.AdamW([{"params": model.parameters(), "weight_decay": 0.0}]))


def attention_drops(rank: int, world: int) -> Case:
    model = by_libraries.llama(attention_dropout=0.1)
    return Case(model=model, optimizer=adam(model))


def epoch_set(rank: int, world: int) -> Case:
    sampler: Any = DistributedSampler(rows(), num_replicas=1, rank=0)  # type: ignore[var-annotated]
    sampler.set_epoch(3)
    model = net()
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(rows(), batch_size=4, sampler=sampler),))


def layers_in_a_module_list(rank: int, world: int) -> Case:
    model: Any = net()
    model.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    return Case(model=model, optimizer=adam(model))


def heads_in_a_module_dict(rank: int, world: int) -> Case:
    model: Any = net()
    model.heads = nn.ModuleDict({"words": nn.Linear(WIDTH, 2)})
    return Case(model=model, optimizer=adam(model))


def weights_in_a_parameter_list(rank: int, world: int) -> Case:
    model: Any = net()
    model.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])
    return Case(model=model, optimizer=adam(model))


def stored(case: Case) -> float:
    """Numbers that a checkpoint holds."""
    return float(sum(value.numel() for value in case.model.state_dict().values()))


def copied_with_its_own_forward(rank: int, world: int) -> Case:
    copied = copy.deepcopy(net())
    return Case(model=copied, optimizer=adam(copied))


def checkpoints_that_remember(rank: int, world: int) -> Case:
    model = net(dropout=0.1)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    return Case(model=model, optimizer=adam(model))


def scheduler_of_this_optimizer(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return Case(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))


def tied(rank: int, world: int) -> Case:
    return on(lambda: by_libraries.llama(tie_word_embeddings=True))(rank, world)


def adapters_of_one_zero(rank: int, world: int) -> Case:
    from peft import LoraConfig, get_peft_model

    return on(lambda: get_peft_model(net(), LoraConfig(target_modules=["head"], r=2)))(rank, world)  # type: ignore[arg-type]


def moments_that_fit(rank: int, world: int) -> Case:
    model = net()
    return Case(model=model, optimizer=by_numbers.stepped(model))


def pass_with_its_last_batch(rank: int, world: int) -> Case:
    model = net()
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(rows(3), batch_size=4),))


def gradients_kept(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    model(batch(rank)).sum().backward()
    return Case(model=model, optimizer=optimizer, at_step=True)


def gradients_clipped(rank: int, world: int) -> Case:
    model = net()
    model(batch(rank)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return Case(model=model, optimizer=adam(model), at_step=True)


def root_away_from_zero(rank: int, world: int) -> Case:
    model = nn.Linear(WIDTH, 4, bias=False)
    (model(torch.zeros(2, WIDTH)).norm(dim=1) + 1e-6).sqrt().sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def lora(**given: Any) -> Make:
    return on(lambda: by_habit.lora(**given))


NAN = "the loss is no number"
STILL = "nothing moves"

HARMS: tuple[Harm, ...] = (
    Harm(by_hand.optimizer_of_the_copy, copied_with_its_own_forward, STILL, moved("")),
    Harm(by_hand.head_replaced, head_replaced_first, "the new layer never moves", moved("head")),
    Harm(by_hand.unfrozen_later, unfrozen_first, "what was unfrozen never moves", moved("blocks")),
    Harm(by_hand.all_frozen, plain(), "backward raises", ends),
    Harm(by_hand.trained_state_left_behind, state_taken_along, "the moments start from zero", loss_after),
    Harm(by_hand.two_optimizers_one_parameter, one_optimizer_each, "a layer moves twice a step", moved("head")),
    Harm(by_hand.rate_of_zero, plain(), STILL, moved("")),
    Harm(by_hand.float16_weights, plain(), "weights overflow or round their steps away", loss_after),
    Harm(by_habit.parameter_misspelt, weight_frozen, "what is to be frozen trains", moved("enter.weight")),
    Harm(by_habit.module_without_its_underscore, blocks_frozen, "what is to be frozen trains", moved("blocks")),
    Harm(by_habit.group_misspelt, group_spelt, "weights decay that are not to", loss_after),
    Harm(by_habit.rate_on_the_optimizer, plain(lr=1e-5), "the rate is the old one", moved("")),
    Harm(by_habit.config_misspelt, attention_drops, "nothing is dropped", loss_after),
    Harm(by_habit.epoch_misspelt, epoch_set, "every pass has the same order", reading),
    Harm(by_habit.layers_in_a_list, layers_in_a_module_list, "checkpoints lack the layers", stored),
    Harm(by_habit.heads_in_a_dict, heads_in_a_module_dict, "checkpoints lack the heads", stored),
    Harm(by_habit.weights_in_a_tuple, weights_in_a_parameter_list, "checkpoints lack the weights", stored),
    Harm(by_hand.half_on_meta, plain(), "forward raises", ends),
    Harm(by_hand.buffer_never_filled, plain(), NAN, loss_after),
    Harm(
        by_libraries.tie_that_broke,
        on(lambda: by_libraries.llama(tie_word_embeddings=True)),
        "tied weights part",
        apart,
    ),
    Harm(
        by_hand.forward_of_the_original,
        copied_with_its_own_forward,
        "the copy gets no gradient",
        gradient("head"),
    ),
    Harm(by_hand.forward_bound_to_the_original, plain(), "the model gets no gradient", gradient("head")),
    Harm(
        by_habit.checkpoints_that_forget,
        checkpoints_that_remember,
        "gradients of other drops",
        gradient("blocks.0"),
    ),
    Harm(by_habit.adapters_merged, lora(), "adapters get no gradient", ends),
    Harm(by_habit.adapters_disabled, lora(), "adapters get no gradient", ends),
    Harm(by_habit.adapters_scaled_by_zero, lora(), "adapters get no gradient", moved("lora_B")),
    Harm(by_numbers.rate_that_is_no_number, plain(), NAN, loss_after),
    Harm(by_numbers.weight_that_overflowed, plain(), NAN, loss_after),
    Harm(by_numbers.running_variance_below_zero, on(normed), NAN, loss_after),
    Harm(by_numbers.adapters_of_two_zeros, adapters_of_one_zero, "adapters never move", moved("lora_B")),
    Harm(by_numbers.weights_of_zero, plain(), "blocks get no gradient", gradient("blocks.0")),
    Harm(by_numbers.dropout_of_everything, plain(), "blocks get no gradient", gradient("blocks.0")),
    Harm(by_numbers.state_of_other_groups, moments_that_fit, "step raises", ends),
    Harm(by_numbers.state_of_a_run_that_diverged, moments_that_fit, NAN, loss_after),
    Harm(by_numbers.pass_without_a_batch, pass_with_its_last_batch, "a pass trains nothing", batches),
    Harm(by_libraries.adapter_loaded_for_inference, lora(), "backward raises", ends),
    Harm(by_libraries.trainer_given_another_models_optimizer, on(by_libraries.llama), STILL, moved("")),
    Harm(by_gradients.gradients_thrown_away, gradients_kept, STILL, stepped),
    Harm(by_gradients.gradients_clipped_to_nothing, gradients_clipped, "only decay moves weights", stepped),
    Harm(by_gradients.root_of_zero, root_away_from_zero, "weights are no numbers", stepped),
    Harm(by_hand.scheduler_of_another_optimizer, scheduler_of_this_optimizer, "the rate stays", rate),
)
