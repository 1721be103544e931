"""Loops whose lessons miss batches, new tokens, or what a maker is to learn; and their right twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader

from tests.audit.by_libraries import accelerator, llama
from tests.audit.case import adam, net, rows
from tests.audit.loops import Loop

# --- batches ---


def resumed_loaders(skip: int = 2) -> tuple[Any, Any, Any, Any, Any]:
    ours = accelerator()
    model = net()
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(rows(), 4, shuffle=True))
    return ours, model, optimizer, loader, ours.skip_first_batches(loader, skip)


def passes_over(ours: Any, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        ours.backward(fn.cross_entropy(model(x), y))
        optimizer.step()


def skips_in_each_pass(rank: int, world: int) -> None:
    ours, model, optimizer, _, active = resumed_loaders()
    for _ in range(2, 6):
        for x, y in active:
            optimizer.zero_grad()
            ours.backward(fn.cross_entropy(model(x), y))
            optimizer.step()


def skips_in_each_call(rank: int, world: int) -> None:
    ours, model, optimizer, _, active = resumed_loaders()
    for _ in range(2, 6):
        passes_over(ours, model, optimizer, active)


def skips_for_good(rank: int, world: int) -> None:
    ours, model, optimizer, loader, _ = resumed_loaders()
    for epoch in range(2, 6):
        if epoch == 2:
            loader = ours.skip_first_batches(loader, 2)
        passes_over(ours, model, optimizer, loader)


def skips_and_goes_back(rank: int, world: int) -> None:
    ours, model, optimizer, loader, _ = resumed_loaders()
    whole = loader
    for epoch in range(2, 6):
        loader = whole
        if epoch == 2:
            loader = ours.skip_first_batches(loader, 2)
        passes_over(ours, model, optimizer, loader)


def skips_in_the_first_pass(rank: int, world: int) -> None:
    ours, model, optimizer, loader, skipped = resumed_loaders()
    for epoch in range(2, 6):
        active = skipped if epoch == 2 else loader
        for x, y in active:
            optimizer.zero_grad()
            ours.backward(fn.cross_entropy(model(x), y))
            optimizer.step()


def skips_where_it_asks(rank: int, world: int) -> None:
    ours, model, optimizer, loader, skipped = resumed_loaders()
    for epoch in range(2, 6):
        if epoch == 2:
            passes_over(ours, model, optimizer, skipped)
        else:
            passes_over(ours, model, optimizer, loader)


def goes_back_to_the_loader(rank: int, world: int) -> None:
    ours, model, optimizer, loader, active = resumed_loaders()
    for _ in range(2, 6):
        passes_over(ours, model, optimizer, active)
        active = loader


def skips_before_the_passes(rank: int, world: int) -> None:
    ours, model, optimizer, loader, skipped = resumed_loaders()
    passes_over(ours, model, optimizer, skipped)
    for _ in range(3, 6):
        passes_over(ours, model, optimizer, loader)


def skips_in_the_last_pass(rank: int, world: int) -> None:
    ours, model, optimizer, _, active = resumed_loaders()
    for _ in range(5, 6):
        passes_over(ours, model, optimizer, active)


# --- tokens ---


def adapted(rank: int, ids: Callable[[], Tensor], *, padded: bool = False, **given: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = llama()
    model.resize_token_embeddings(66)
    options = {"target_modules": ["q_proj"], **given}
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-3)
    for _ in range(3):
        batch = ids()
        mask = (batch != 65).long() if padded else torch.ones_like(batch)
        labels = batch.masked_fill(mask == 0, -100)
        model(input_ids=batch, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def chats() -> Tensor:
    begins, answers = torch.full((4, 1), 64), torch.full((4, 1), 65)
    return torch.cat([begins, torch.randint(64, (4, 5)), answers, torch.randint(64, (4, 5))], 1)


def pads() -> Tensor:
    ids = torch.randint(1, 64, (4, 8))
    for row, length in enumerate((8, 6, 5, 7)):
        ids[row, length:] = 65
    return ids


def new_tokens_rest(rank: int, world: int) -> None:
    adapted(rank, chats)


def new_tokens_are_saved(rank: int, world: int) -> None:
    adapted(rank, chats, modules_to_save=["embed_tokens", "lm_head"])


def new_tokens_alone_train(rank: int, world: int) -> None:
    adapted(rank, chats, trainable_token_indices=[64, 65])


def new_tokens_have_an_adapter(rank: int, world: int) -> None:
    adapted(rank, chats, target_modules=["q_proj", "embed_tokens"])


def new_token_pads(rank: int, world: int) -> None:
    adapted(rank, pads, padded=True)


def new_tokens_are_never_read(rank: int, world: int) -> None:
    adapted(rank, lambda: torch.randint(1, 64, (4, 8)))


class Reader(nn.Module):
    """Has a vocabulary that it makes larger by itself, and may put something in the place of new tokens."""

    def __init__(self, *, inserts: bool = False) -> None:
        super().__init__()
        self.embed, self.inserts = nn.Embedding(20, 8), inserts
        self.sees, self.head = nn.Linear(3, 8), nn.Linear(8, 4)
        self.grows(2)

    def grows(self, more: int) -> None:
        old = self.embed
        new = nn.Embedding(old.num_embeddings + more, old.embedding_dim)
        with torch.no_grad():
            new.weight[: old.num_embeddings] = old.weight
        self.embed = new.requires_grad_(requires_grad=False)

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        held = self.embed(ids)
        if self.inserts:
            places = (ids >= 20).unsqueeze(-1).expand_as(held)
            held = held.masked_scatter(places, self.sees(seen))
        return self.head(held.mean(1) + (0 if self.inserts else self.sees(seen).mean(1)))


def reads(*, inserts: bool) -> None:
    torch.manual_seed(0)
    model = Reader(inserts=inserts)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], 1e-3)
    for _ in range(3):
        ids = torch.randint(20, (6, 7))
        ids[:, 2], ids[:, 4] = 20, 21
        fn.cross_entropy(model(ids, torch.randn(6, 2, 3)), torch.randint(4, (6,))).backward()
        optimizer.step()
        optimizer.zero_grad()


def grown_by_hand_and_frozen(rank: int, world: int) -> None:
    reads(inserts=False)


def images_in_the_place_of_tokens(rank: int, world: int) -> None:
    reads(inserts=True)


WRONG_LESSONS: tuple[Loop, ...] = (
    *(
        Loop(run, "accelerate", rule="run.skip-kept")
        for run in (skips_in_each_pass, skips_in_each_call, skips_for_good)
    ),
    Loop(new_tokens_rest, "peft", rule="run.new-tokens-frozen"),
    Loop(grown_by_hand_and_frozen, rule="run.new-tokens-frozen"),
)
RIGHT_LESSONS: tuple[Loop, ...] = (
    *(Loop(run, "accelerate") for run in (skips_in_the_first_pass, skips_where_it_asks, goes_back_to_the_loader)),
    *(Loop(run, "accelerate") for run in (skips_before_the_passes, skips_in_the_last_pass, skips_and_goes_back)),
    *(Loop(run, "peft") for run in (new_tokens_are_saved, new_tokens_alone_train, new_tokens_have_an_adapter)),
    *(Loop(run, "peft") for run in (new_token_pads, new_tokens_are_never_read)),
    Loop(images_in_the_place_of_tokens),
)

# --- judges ---

Lesson = Callable[[Tensor], Tensor]
"""A loss of what a judge says."""


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def plays(
    real: Lesson,
    made: Lesson,
    makes: Lesson,
    *,
    anew: bool = False,
    apart: bool = False,
    through: Callable[[Tensor], Tensor] = lambda made: made,
    sign: int = 1,
) -> Callable[[], None]:
    """A judge and a maker in turns. ``anew``: of samples of its own; ``apart``: two backwards of a judge's turn."""

    def train() -> None:
        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        judge = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        judges = torch.optim.Adam(judge.parameters(), 1e-3)
        learns = torch.optim.Adam(maker.parameters(), 1e-3, maximize=sign < 0)
        for _ in range(12):
            given = maker(torch.randn(8, 8))
            judges.zero_grad()
            first, second = real(judge(torch.randn(8, 8) + 2)), made(judge(given.detach()))
            if apart:
                first.backward()
                second.backward()
            else:
                (first + second).backward()
            judges.step()
            learns.zero_grad()
            makes(judge(through(maker(torch.randn(8, 8)) if anew else given))).backward()
            learns.step()

    return train


def labelled(label: float) -> Lesson:
    return lambda said: fn.binary_cross_entropy_with_logits(said, torch.full_like(said, label))


def squared(label: float) -> Lesson:
    return lambda said: (said - label).square().mean()


ONES, ZEROS = labelled(1.0), labelled(0.0)
FOUND_OUT: dict[str, Callable[[], None]] = {
    "labels": plays(ONES, ZEROS, ZEROS),
    "labels of new samples": plays(ONES, ZEROS, ZEROS, anew=True),
    "labels in two backwards": plays(ONES, ZEROS, ZEROS, apart=True),
    "squares": plays(squared(4.0), squared(-4.0), squared(-4.0)),
    "signs": plays(lambda said: -said.mean(), lambda said: said.mean(), lambda said: said.mean()),
}
NOT_FOUND_OUT: dict[str, Callable[[], None]] = {
    "not saturating": plays(ONES, ZEROS, ONES),
    "not saturating, of new samples": plays(ONES, ZEROS, ONES, anew=True, apart=True),
    "minimax": plays(ONES, ZEROS, lambda said: -ZEROS(said)),
    "by a function that reverses": plays(ONES, ZEROS, ZEROS, through=Reversed.apply),
    "by an optimizer that goes up": plays(ONES, ZEROS, ZEROS, sign=-1),
    "hinge": plays(
        lambda said: fn.relu(1 - said).mean(), lambda said: fn.relu(1 + said).mean(), lambda said: -said.mean()
    ),
    "Wasserstein": plays(lambda said: -said.mean(), lambda said: said.mean(), lambda said: -said.mean()),
    "squares": plays(squared(4.0), squared(-4.0), squared(4.0)),
    "features": plays(ONES, ZEROS, lambda said: (said.mean() - 1).square()),
}
