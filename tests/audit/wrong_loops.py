"""Errors that show only while a script runs, each made for real: what its first window has passed through."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _composable as composable
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as fn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as rates
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.audit.alike_loops import RIGHT_ALIKE, WRONG_ALIKE
from tests.audit.beginnings_loops import RIGHT_BEGINNINGS, WRONG_BEGINNINGS
from tests.audit.by_libraries import engine_of
from tests.audit.case import WIDTH, adam, divided, net, rows
from tests.audit.inputs_loops import RIGHT_INPUTS, WRONG_INPUTS
from tests.audit.lessons_loops import RIGHT_LESSONS, WRONG_LESSONS
from tests.audit.libraries_loops import RIGHT_ASKED, WRONG_ASKED
from tests.audit.loops import (
    RIGHT,
    Loop,
    Noisy,
    X,
    Y,
    for_each_shard,
    loaded_by_assignment,
    loss_of,
    one_seed,
    over,
    resumed,
    taken,
    teacher_that_one_rank_has_loaded,
    text_model,
    trained_by_lightning,
    trained_by_transformers,
    two_layers,
)
from tests.audit.misgiven import MISGIVEN, RIGHT_LOSSES
from tests.audit.others_loops import RIGHT_OTHERS, WRONG_OTHERS
from tests.audit.own_backwards_loops import RIGHT_BACKWARDS, WRONG_BACKWARDS
from tests.audit.sequences import RIGHT_SEQUENCES, WRONG_SEQUENCES
from tests.audit.shares_loops import RIGHT_SHARES, WRONG_SHARES
from tests.audit.summed_loops import RIGHT_SUMS, WRONG_SUMS
from tests.audit.terms_loops import RIGHT_TERMS, WRONG_TERMS
from tests.audit.ties_loops import RIGHT_TIES, WRONG_TIES
from tests.audit.turned import RIGHT_TURNS, TURNED
from tests.audit.untrained_loops import RIGHT_UNTRAINED, WRONG_UNTRAINED
from tests.audit.values_loops import RIGHT_VALUES, WRONG_VALUES


def float16_without_a_scaler(rank: int, world: int) -> None:
    model = net()
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model)
    taken(model, adam(model), loss)


def shards_in_float16(rank: int, world: int) -> None:
    model = two_layers()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer = adam(model)
    for x, y in divided(rank, world):
        taken(model, optimizer, fn.cross_entropy(model(x).float(), y))


def flat_shards_in_float16(rank: int, world: int) -> None:
    precision = MixedPrecision(param_dtype=torch.float16)
    model = FullyShardedDataParallel(two_layers(), mixed_precision=precision, device_id=torch.device("cpu"))
    optimizer = adam(model)
    for x, y in divided(rank, world):
        taken(model, optimizer, fn.cross_entropy(model(x).float(), y))


def scaled_and_stepped_past_the_scaler(rank: int, world: int) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    taken(model, adam(model), scaler.scale(loss_of(model)))


def scaled_in_part(rank: int, world: int) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = adam(model)
    scaler.scale(loss_of(model)).backward()
    loss_of(model).backward()
    scaler.step(optimizer)


def clipped_while_scaled(rank: int, world: int) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = adam(model)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)


def clipped_by_value_while_scaled(rank: int, world: int) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = adam(model)
    scaler.scale(loss_of(model)).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def softmax_under_cross_entropy(rank: int, world: int) -> None:
    model = nn.Sequential(net(), nn.Softmax(-1))
    taken(model, adam(model), nn.CrossEntropyLoss()(model(X), Y))


def softmax_in_the_loop(rank: int, world: int) -> None:
    model = net()
    taken(model, adam(model), fn.cross_entropy(model(X).softmax(-1).float().view(4, 4), Y))


def sigmoid_under_logits(rank: int, world: int) -> None:
    model = nn.Sequential(net(), nn.Sigmoid())
    taken(model, adam(model), nn.BCEWithLogitsLoss()(model(X), torch.ones(4, 4)))


def softmax_under_nll(rank: int, world: int) -> None:
    model = nn.Sequential(net(), nn.Softmax(-1))
    taken(model, adam(model), fn.nll_loss(model(X), Y))


def logits_under_nll(rank: int, world: int) -> None:
    model = net()
    taken(model, adam(model), nn.NLLLoss()(model(X), Y))


def clipped_before_backward(rank: int, world: int) -> None:
    model = net()
    optimizer, loss = adam(model), loss_of(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    taken(model, optimizer, loss)


def clipped_by_a_spent_generator(rank: int, world: int) -> None:
    model = net()
    params = (one for one in model.parameters())
    optimizer = torch.optim.AdamW(params)
    loss_of(model).backward()
    with pytest.warns(UserWarning, match="is an empty generator"):  # torch's own is not lost
        nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()


def clipped_by_a_spent_filter(rank: int, world: int) -> None:
    model = net()
    params = filter(lambda one: one.requires_grad, model.parameters())
    optimizer = torch.optim.AdamW(params)
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(params, 1.0)  # of which torch says nothing
    optimizer.step()


def clipped_shards(rank: int, world: int) -> None:
    for_each_shard(rank, world, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def clipped_flat_shards(rank: int, world: int) -> None:
    clip = nn.utils.clip_grad_norm_
    for_each_shard(rank, world, lambda model: clip(parameters=model.parameters(), max_norm=1.0), use_orig_params=False)


def loaded_under_other_names(rank: int, world: int) -> None:
    model = net()
    model.load_state_dict({f"module.{key}": value for key, value in net().state_dict().items()}, strict=False)
    taken(model, adam(model), loss_of(model))


def loaded_from_what_nothing_is_left_of(rank: int, world: int) -> None:
    model = net()
    model.load_state_dict({key: one for key, one in net().state_dict().items() if "missing" in key}, strict=False)
    taken(model, adam(model), loss_of(model))


def loaded_from_around_the_state(rank: int, world: int) -> None:
    model = net()
    model.load_state_dict({"epoch": 3, "model": net().state_dict()}, strict=False)
    taken(model, adam(model), loss_of(model))


def body_loaded_under_its_prefix(rank: int, world: int) -> None:
    model = net()
    state = {key if "head" in key else f"encoder.{key}": value for key, value in net().state_dict().items()}
    model.load_state_dict(state, strict=False)
    taken(model, adam(model), loss_of(model))


def compiled_blocks_loaded_uncompiled(rank: int, world: int) -> None:
    model = net()
    state = {key.replace(".inner", "._orig_mod.inner"): value for key, value in net().state_dict().items()}
    model.load_state_dict(state, strict=False)
    taken(model, adam(model), loss_of(model))


def teacher_loaded_without_its_prefix(rank: int, world: int) -> None:
    model, teacher = net(), nn.Sequential(net()).requires_grad_(requires_grad=False).eval()
    teacher.load_state_dict(net().state_dict(), strict=False)
    taken(model, adam(model), fn.mse_loss(model(X), teacher(X)))


def recomputed_with_other_random_numbers(rank: int, world: int) -> None:
    model = net(dropout=0.3)
    x = checkpoint(model.blocks[0], model.enter(X), use_reentrant=False, preserve_rng_state=False)
    taken(model, adam(model), fn.cross_entropy(model.head(x), Y))


def recomputed_reentrantly_with_other_random_numbers(rank: int, world: int) -> None:
    model = net()

    def dropped(x: Tensor) -> Tensor:
        return fn.dropout(model.blocks[0](x), 0.3)

    x = checkpoint(dropped, model.enter(X), use_reentrant=True, preserve_rng_state=False)
    taken(model, adam(model), fn.cross_entropy(model.head(x), Y))


def in_a_row() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
        *(nn.Linear(WIDTH, 4), nn.Identity()),
    )


def recomputed_in_a_row_with_other_random_numbers(rank: int, world: int) -> None:
    model = in_a_row()
    output = checkpoint_sequential(model, 3, X, use_reentrant=False, preserve_rng_state=False)
    taken(model, adam(model), fn.cross_entropy(output, Y))


def recomputed_in_a_row_over_norms(rank: int, world: int) -> None:
    model = in_a_row()
    taken(model, adam(model), fn.cross_entropy(checkpoint_sequential(model, 3, X, use_reentrant=False), Y))


def recomputed_in_a_row_over_inputs(rank: int, world: int) -> None:
    model = in_a_row()
    taken(model, adam(model), fn.cross_entropy(checkpoint_sequential(model, 3, X, use_reentrant=True), Y))


def recomputed_in_place_over_norms(rank: int, world: int) -> None:
    model = in_a_row()
    composable.checkpoint(model[3])
    taken(model, adam(model), fn.cross_entropy(model(X), Y))


def recomputed_over_norms(rank: int, world: int) -> None:
    model, norm = net(), nn.BatchNorm1d(WIDTH)
    for reentrant in (True, False):
        x = checkpoint(lambda x: norm(model.blocks[0](x)), model.enter(X), use_reentrant=reentrant)
    taken(model, adam(model), fn.cross_entropy(model.head(x), Y))


def tie_lost_by_a_load(rank: int, world: int) -> None:
    model = loaded_by_assignment(again=False)
    taken(model, adam(model), loss_of(model))


def average_that_runs_what_it_averages(rank: int, world: int) -> None:
    model = net()
    plain = model.forward
    model.forward = lambda x: plain(x).clamp(-3, 3)  # type: ignore[method-assign]
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    with torch.no_grad():
        wanted = average(X)
    taken(model, adam(model), fn.mse_loss(model(X), wanted + 1))


def average_that_runs_what_a_file_names(rank: int, world: int) -> None:
    model = net()
    names = {"plain": model.forward}
    exec("def clamped(x): return plain(x).clamp(-3, 3)", names)  # as a script writes it
    model.forward = names["clamped"]  # type: ignore[method-assign]
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    with torch.no_grad():
        wanted = average(X)
    taken(model, adam(model), fn.mse_loss(model(X), wanted + 1))


def copy_that_trains_and_runs_its_original(rank: int, world: int) -> None:
    first = net()
    first.forward = torch.autocast("cpu", torch.bfloat16)(first.forward)  # type: ignore[method-assign]
    model = copy.deepcopy(first)
    taken(model, adam(model), model(X).float().square().mean())


def compiled_and_called_uncompiled(rank: int, world: int) -> None:
    model = net()
    torch.compile(model, backend="eager")
    taken(model, adam(model), loss_of(model))


def compiled_again_and_again(rank: int, world: int) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.name = nn.Linear(WIDTH, 4), ""

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if self.name == "" else self.inner(x) / 10

    model = Named()
    fast = torch.compile(model, backend="eager")
    optimizer = adam(model)
    for at in range(10):
        model.name = f"micro-batch {at}"
        (loss_of(fast) / 10).backward()
    optimizer.step()


class Undivided(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((WIDTH,), at / 32) for at in range(64))


class Augmented(Dataset[Tensor]):
    def __init__(self) -> None:
        self.rng = random.Random(0)  # noise

    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> Tensor:
        return torch.full((WIDTH,), at / 32 + self.rng.random())


def workers_of_an_undivided_stream(rank: int, world: int) -> None:
    over(Undivided(), num_workers=2)


def workers_with_one_seed(rank: int, world: int) -> None:
    over(Noisy(), num_workers=2, shuffle=True, worker_init_fn=one_seed)


def workers_with_copies_of_a_generator(rank: int, world: int) -> None:
    over(Augmented(), num_workers=2, shuffle=True)


def backward_past_accelerate(rank: int, world: int) -> None:
    from accelerate import Accelerator

    ours = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(rows(), 4, shuffle=True))
    for x, y in loader:
        with ours.accumulate(model):
            fn.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def other_model_replaced_under_its_optimizer(rank: int, world: int) -> None:
    maker, judge = nn.Linear(8, WIDTH), nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1))
    first, second = adam(maker), adam(judge)
    judge[1] = nn.Linear(4, 1)
    taken(maker, first, -judge(maker(torch.randn(4, 8))).mean())
    assert second is not None


def maker_copied_under_its_optimizer(rank: int, world: int) -> None:
    """The judge is stepped first, and gradients flow through the maker."""
    maker, judge = nn.Linear(8, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    first, second = adam(judge), adam(maker)
    maker = copy.deepcopy(maker)
    taken(judge, first, judge(maker(torch.randn(4, 8))).mean() - judge(X).mean())
    assert second is not None


def maker_copied_and_stepped_first(rank: int, world: int) -> None:
    """The judge has more parameters, and an optimizer that holds them."""
    maker, judge = nn.Linear(8, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    first, second = adam(maker), adam(judge)
    before, maker = maker, copy.deepcopy(maker)
    taken(maker, first, -judge(maker(torch.randn(4, 8))).mean())
    assert (before, second) is not None


def stepped_by_two_in_a_row(rank: int, world: int) -> None:
    model = net()
    both, head = adam(model), torch.optim.SGD(model.head.parameters(), 0.1)
    loss_of(model).backward()
    both.step()
    head.step()


def stepped_by_two_in_a_loop(rank: int, world: int) -> None:
    model = net()
    optimizers = [torch.optim.SGD(model.head.parameters(), 0.1), adam(model)]
    loss_of(model).backward()
    for optimizer in optimizers:
        optimizer.step()


def stepped_by_two_through_a_scaler(rank: int, world: int) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=4.0)
    both, head = adam(model), torch.optim.SGD(model.head.parameters(), 0.1)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(both)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(both)
    scaler.step(head)
    scaler.update()


def mix(average: nn.Module, model: nn.Module, decay: float = 0.9) -> None:
    with torch.no_grad():
        for held, param in zip(average.parameters(), model.parameters(), strict=True):
            held.mul_(decay).add_(param, alpha=1 - decay)


def average_that_is_the_model(rank: int, world: int) -> None:
    model = net()
    target = model
    taken(model, adam(model), loss_of(model))
    mix(target, model)


def average_that_shares_its_weights(rank: int, world: int) -> None:
    model = net()
    shadow = copy.copy(model)
    taken(model, adam(model), loss_of(model))
    for name, value in shadow.state_dict().items():
        value.lerp_(model.state_dict()[name], 0.1)


class Distilled:
    def __init__(self) -> None:
        self.student = net()
        self.teacher = self.student

    def follow(self) -> None:
        for held, param in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            held.data = 0.9 * held.data + 0.1 * param.data

    def train(self) -> None:
        taken(self.student, adam(self.student), loss_of(self.student))
        self.follow()


def teacher_that_is_the_student(rank: int, world: int) -> None:
    Distilled().train()


def ticked_at_the_top(rank: int, world: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = rates.MultiStepLR(optimizer, [1, 30])
    scheduler.step()
    taken(model, optimizer, loss_of(model))


def ticked_at_the_top_of_the_loop(rank: int, world: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = rates.MultiStepLR(optimizer, [1, 30])
    for _ in range(3):
        scheduler.step()
        taken(model, optimizer, loss_of(model))


def ticked_at_the_top_of_an_epoch(rank: int, world: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = rates.StepLR(optimizer, 1)

    def epoch() -> None:
        for _ in range(3):
            taken(model, optimizer, loss_of(model))

    for _ in range(3):
        scheduler.step()
        epoch()


def ticked_by_micro_batch(rank: int, world: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = rates.CosineAnnealingLR(optimizer, 50)
    for _ in range(3):
        (loss_of(model) / 4).backward()
        scheduler.step()
    optimizer.step()


def resumed_without_its_schedule(rank: int, world: int) -> None:
    resumed(scheduler_too=False)


def shorter_than_the_trainer(rank: int, world: int) -> None:
    trained_by_transformers(lambda optimizer: rates.LinearLR(optimizer, 1.0, 0.0, total_iters=3))


def steps_ticked_by_epoch(rank: int, world: int) -> None:
    trained_by_lightning(lambda one: rates.OneCycleLR(one, 0.1, total_steps=24))


def function_ticked_by_epoch(rank: int, world: int) -> None:
    def factor(at: int) -> float:
        return (at + 1) / 4 if at < 4 else max(0.0, (24 - at) / 20)

    trained_by_lightning(lambda one: rates.LambdaLR(one, factor))


def warm_up_ticked_by_epoch(rank: int, world: int) -> None:
    def factor(at: int) -> float:
        return (at + 1) / 12 if at < 12 else 0.5 * (1 + math.cos(math.pi * (at - 12) / 12))

    trained_by_lightning(lambda one: rates.LambdaLR(one, factor))


def longer_than_the_trainer(rank: int, world: int) -> None:
    trained_by_transformers(lambda one: rates.OneCycleLR(one, 0.1, total_steps=10_000))


def warm_up_that_the_trainer_does_not_leave(rank: int, world: int) -> None:
    from transformers import get_linear_schedule_with_warmup

    trained_by_transformers(lambda one: get_linear_schedule_with_warmup(one, 100, 1_000))


def longer_than_lightning(rank: int, world: int) -> None:
    trained_by_lightning(lambda one: {"scheduler": rates.OneCycleLR(one, 0.1, total_steps=96), "interval": "step"})


def sequence_shorter_than_the_trainer(rank: int, world: int) -> None:
    def make(optimizer: torch.optim.Optimizer) -> rates.LRScheduler:
        parts = [rates.LinearLR(optimizer, 0.01, total_iters=2), rates.LinearLR(optimizer, 1.0, 0.0, total_iters=3)]
        return rates.SequentialLR(optimizer, parts, [2])

    trained_by_transformers(make)


def stepped_beside_the_engine(rank: int, world: int) -> None:
    model = net()
    optimizer = adam(model)
    engine, *_ = engine_of(model, 1, optimizer=optimizer)
    for x, y in divided(rank, world):
        taken(engine, optimizer, fn.cross_entropy(engine(x), y))


def decayed_by_an_engine_inside_a_pass(rank: int, world: int) -> None:
    model = net()
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1, "total_num_steps": 3}}
    engine, *_ = engine_of(model, 0, optimizer=adam(model), config={"scheduler": schedule})
    for x, y in divided(rank, world):
        engine.backward(fn.cross_entropy(engine(x), y))
        engine.step()


def labels_that_the_loop_shifts(rank: int, world: int) -> None:
    model, ids = text_model("gpt2"), torch.arange(1, 33).reshape(4, 8)
    taken(model, adam(model), model(input_ids=ids[:, :-1], labels=ids[:, 1:]).loss)


def pads_that_count(rank: int, world: int) -> None:
    model, ids = DistributedDataParallel(text_model("llama")), torch.arange(1, 33).reshape(4, 8)
    mask = (ids != ids[-1, -1]).long()
    taken(model, adam(model), model(input_ids=ids, labels=ids, attention_mask=mask).loss)


def an_end_that_is_no_label(rank: int, world: int) -> None:
    model, ids = text_model("llama"), torch.arange(3, 35).reshape(4, 8)
    ids[:, -1] = model.config.eos_token_id
    labels = ids.masked_fill(ids == model.config.eos_token_id, -100)
    taken(model, adam(model), model(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids)).loss)


WRONG: tuple[Loop, ...] = (
    *WRONG_VALUES,
    *WRONG_INPUTS,
    *WRONG_SEQUENCES,
    *MISGIVEN,
    *TURNED,
    *WRONG_TERMS,
    *WRONG_BACKWARDS,
    *WRONG_SUMS,
    *WRONG_UNTRAINED,
    *WRONG_ALIKE,
    *WRONG_BEGINNINGS,
    *WRONG_ASKED,
    *WRONG_SHARES,
    *WRONG_LESSONS,
    *WRONG_OTHERS,
    *WRONG_TIES,
    Loop(labels_that_the_loop_shifts, "transformers", rule="run.text-odd"),
    Loop(pads_that_count, "transformers", 2, rule="run.text-odd"),
    Loop(an_end_that_is_no_label, "transformers", rule="run.text-odd"),
    Loop(float16_without_a_scaler, rule="run.float16-unscaled"),
    *(Loop(run, ranks=2, rule="run.float16-unscaled") for run in (shards_in_float16, flat_shards_in_float16)),
    *(Loop(run, rule="run.scaled-stepped") for run in (scaled_and_stepped_past_the_scaler, scaled_in_part)),
    Loop(clipped_while_scaled, rule="run.clipped-scaled"),
    Loop(clipped_by_value_while_scaled, rule="run.clipped-scaled"),
    *(Loop(run, rule="run.softmax-twice") for run in (softmax_under_cross_entropy, softmax_in_the_loop)),
    *(Loop(run, rule="run.softmax-twice") for run in (sigmoid_under_logits, softmax_under_nll)),
    Loop(logits_under_nll, rule="run.softmax-twice"),
    *(Loop(run, rule="run.clipped-scaled") for run in (clipped_before_backward, clipped_by_a_spent_generator)),
    Loop(clipped_by_a_spent_filter, rule="run.clipped-scaled"),
    *(Loop(run, ranks=2, rule="run.clipped-scaled") for run in (clipped_shards, clipped_flat_shards)),
    *(Loop(run, rule="run.loaded-nothing") for run in (loaded_under_other_names, teacher_loaded_without_its_prefix)),
    *(
        Loop(run, rule="run.loaded-nothing")
        for run in (
            *(loaded_from_what_nothing_is_left_of, loaded_from_around_the_state, body_loaded_under_its_prefix),
            compiled_blocks_loaded_uncompiled,
        )
    ),
    Loop(recomputed_with_other_random_numbers, rule="run.checkpoint-forgets"),
    Loop(recomputed_reentrantly_with_other_random_numbers, rule="run.checkpoint-forgets"),
    Loop(recomputed_in_a_row_with_other_random_numbers, rule="run.checkpoint-forgets"),
    Loop(recomputed_in_a_row_over_inputs, rule="run.reentrant-frozen"),
    *(
        Loop(run, rule="run.checkpoint-norms")
        for run in (recomputed_over_norms, recomputed_in_a_row_over_norms, recomputed_in_place_over_norms)
    ),
    *(
        Loop(run, rule="run.forward-elsewhere")
        for run in (
            average_that_runs_what_it_averages,
            average_that_runs_what_a_file_names,
            copy_that_trains_and_runs_its_original,
        )
    ),
    Loop(tie_lost_by_a_load, rule="run.tie-broken"),
    Loop(compiled_and_called_uncompiled, rule="run.compiled-idle"),
    Loop(compiled_again_and_again, rule="run.recompiled"),
    *(Loop(run, rule="run.workers-alike") for run in (workers_of_an_undivided_stream, workers_with_one_seed)),
    Loop(workers_with_copies_of_a_generator, rule="run.workers-alike"),
    *(Loop(run, rule="run.ticked-early") for run in (ticked_at_the_top, ticked_by_micro_batch)),
    *(Loop(run, rule="run.ticked-early") for run in (ticked_at_the_top_of_the_loop, ticked_at_the_top_of_an_epoch)),
    Loop(resumed_without_its_schedule, rule="run.ticked-early"),
    Loop(backward_past_accelerate, "accelerate", rule="run.undivided"),
    Loop(other_model_replaced_under_its_optimizer, rule="run.orphans"),
    *(Loop(run, rule="run.orphans") for run in (maker_copied_under_its_optimizer, maker_copied_and_stepped_first)),
    *(Loop(run, rule="run.average-idle") for run in (average_that_is_the_model, average_that_shares_its_weights)),
    Loop(teacher_that_is_the_student, rule="run.average-idle"),
    *(Loop(run, rule="run.stepped-twice") for run in (stepped_by_two_in_a_row, stepped_by_two_in_a_loop)),
    Loop(stepped_by_two_through_a_scaler, rule="run.stepped-twice"),
    *(
        Loop(run, "transformers", rule="run.trainer-schedule")
        for run in (shorter_than_the_trainer, sequence_shorter_than_the_trainer, longer_than_the_trainer)
    ),
    Loop(teacher_that_one_rank_has_loaded, ranks=2, rule="run.rests-apart"),
    Loop(stepped_beside_the_engine, "deepspeed", 2, rule="run.past-engine"),
    Loop(decayed_by_an_engine_inside_a_pass, "deepspeed", 2, rule="run.scheduler-early"),
    Loop(warm_up_that_the_trainer_does_not_leave, "transformers", rule="run.trainer-schedule"),
    *(
        Loop(run, "lightning", rule="run.trainer-schedule")
        for run in (steps_ticked_by_epoch, function_ticked_by_epoch, longer_than_lightning, warm_up_ticked_by_epoch)
    ),
)
LOOPS: tuple[Loop, ...] = (
    *(*RIGHT, *RIGHT_SEQUENCES, *RIGHT_LOSSES, *RIGHT_TURNS, *RIGHT_TERMS, *RIGHT_SUMS, *RIGHT_ALIKE, *RIGHT_BACKWARDS),
    *(*RIGHT_BEGINNINGS, *RIGHT_ASKED, *RIGHT_VALUES, *RIGHT_UNTRAINED, *RIGHT_INPUTS, *RIGHT_SHARES),
    *(*RIGHT_LESSONS, *RIGHT_OTHERS, *RIGHT_TIES, *WRONG),
)
