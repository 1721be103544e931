"""Programs that ask libraries for what does not come, and their right twins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.utils.data import DataLoader

from tests.audit.by_libraries import accelerator, engine_of, llama
from tests.audit.case import adam, divided, net, rows
from tests.audit.loops import Loop

# --- DeepSpeed ---


def clipped_past_the_engine(rank: int, world: int) -> None:
    model = net()
    engine, *_ = engine_of(model, 2, optimizer=adam(model))
    for x, y in divided(rank, world):
        engine.backward(fn.cross_entropy(engine(x), y))
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.5)
        engine.step()


def clipped_by_the_engine(rank: int, world: int) -> None:
    model = net()
    engine, *_ = engine_of(model, 2, optimizer=adam(model), config={"gradient_clipping": 0.5})
    for x, y in divided(rank, world):
        engine.backward(fn.cross_entropy(engine(x), y))
        engine.step()


def begun_by_other_weights(rank: int, world: int, *, behind: bool = True) -> None:
    """Weights of an earlier run, put into the model behind DeepSpeed, or before."""
    model = net()
    if not behind:
        begin(model)
    engine, *_ = engine_of(model, 2, optimizer=adam(model))
    if behind:
        begin(engine.module)
    for x, y in divided(rank, world):
        engine.backward(fn.cross_entropy(engine(x), y))
        engine.step()


def begin(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def begun_by_other_weights_before(rank: int, world: int) -> None:
    begun_by_other_weights(rank, world, behind=False)


def engine_stepped_by_count(rank: int, world: int) -> None:
    model = net()
    engine, *_ = engine_of(model, 0, optimizer=adam(model), config={"gradient_accumulation_steps": 2})
    for at in range(8):
        for x, y in divided(rank, world):
            engine.backward(fn.cross_entropy(engine(x), y))
            if (at + 1) % 2 == 0:
                engine.step()


def engine_stepped_behind_two_losses(rank: int, world: int) -> None:
    model = net()
    engine, *_ = engine_of(model, 0, optimizer=adam(model))
    for x, y in divided(rank, world):
        outputs = engine(x)
        for loss in (fn.cross_entropy(outputs, y), outputs.square().mean()):
            engine.backward(loss, retain_graph=True)
        engine.step()


def clipped_one_model_before_its_turn(rank: int, world: int) -> None:
    maker, judge = net(), net()
    optimizers = adam(maker), adam(judge)
    for x, y in divided(rank, world):
        fn.cross_entropy(maker(x), y).backward()
        for one in (maker, judge):
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        optimizers[0].step()


# --- accelerate ---


class Methods(nn.Module):
    """What is called by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def project(self, x: Tensor) -> Tensor:
        return self.net(x).tanh()


def prepared(precision: str) -> tuple[Any, Any, Any, Any]:
    ours = accelerator(mixed_precision=precision)
    model = Methods()
    return ours, *ours.prepare(model, adam(model), DataLoader(rows(), 4, shuffle=True))


def called_past_autocast(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared("bf16")
    for x, y in loader:
        ours.backward(fn.cross_entropy(ours.unwrap_model(model).project(x), y))
        optimizer.step()
        optimizer.zero_grad()


def called_under_autocast(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared("bf16")
    for x, y in loader:
        with ours.autocast():
            outputs = ours.unwrap_model(model).project(x)
        ours.backward(fn.cross_entropy(outputs.float(), y))
        optimizer.step()
        optimizer.zero_grad()


def called_as_prepared(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared("bf16")
    for x, y in loader:
        ours.backward(fn.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def called_in_full_precision(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared("no")
    for x, y in loader:
        ours.backward(fn.cross_entropy(ours.unwrap_model(model).project(x), y))
        optimizer.step()
        optimizer.zero_grad()


# --- transformers ---


def weighed(**given: Any) -> None:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    class Weighed(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **named: Any) -> Any:
            weight = inputs.pop("weight", None)
            loss = model(**inputs).loss
            return loss if weight is None else loss * weight.mean()

    text = list(range(8))
    data = Dataset.from_list([{"input_ids": text, "labels": text, "weight": 2.0, "unread": 1}] * 16)
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    if "collator" in given:
        data, given = data.remove_columns("unread"), {"data_collator": given["collator"]}
        Weighed(model=llama(), args=TrainingArguments("out", **quiet), train_dataset=data, **given).train()
    else:
        kept = data if not given else data.remove_columns("unread")
        Weighed(model=llama(), args=TrainingArguments("out", **quiet, **given), train_dataset=kept).train()


def weights_left_out(rank: int, world: int) -> None:
    weighed()


def weights_kept(rank: int, world: int) -> None:
    weighed(remove_unused_columns=False)


def weights_made_by_the_collator(rank: int, world: int) -> None:
    from transformers import default_data_collator

    def collate(samples: Any) -> Any:
        batch = default_data_collator(samples)
        batch["weight"] = torch.ones(len(samples))
        return batch

    weighed(collator=collate)


def weights_passed_on(rank: int, world: int) -> None:
    from transformers import default_data_collator

    def collate(samples: Any) -> Any:
        batch = default_data_collator(samples)
        if "weight" in samples[0]:
            batch["weight"] = torch.tensor([one["weight"] for one in samples])
        return batch

    weighed(collator=collate)


def smoothed(*, by_count: bool, micros: int = 2) -> None:
    """A loss of the program's own over micro-batches; ``by_count``: divided by the tokens of all of them."""
    from transformers import Trainer, TrainingArguments

    class Smooths(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = 0, num_items_in_batch: Any = None) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs).logits[:, :-1].flatten(0, 1)
            return fn.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)

    class Counts(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = 0, num_items_in_batch: Any = None) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs).logits[:, :-1].flatten(0, 1)
            return fn.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    text = [{"input_ids": list(range(at, at + 8)), "labels": list(range(at, at + 8))} for at in range(16)]
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    given = TrainingArguments("out", gradient_accumulation_steps=micros, **quiet)
    (Counts if by_count else Smooths)(model=llama(), args=given, train_dataset=text).train()


def tagged(*, counts: bool, micros: int = 2, smooths: bool = False) -> None:
    """A model of the program's own that is given the count; ``smooths``: by a Trainer that hands its loss on."""
    from transformers import Trainer, TrainingArguments

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

        def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
            return {"loss": fn.cross_entropy(self.head(self.enter(input_ids)).flatten(0, 1), labels.flatten())}

    class Counting(Tagger):
        def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
            logits = self.head(self.enter(input_ids)).flatten(0, 1)
            loss = fn.cross_entropy(logits, labels.flatten(), reduction="sum")
            return {"loss": loss / kwargs.get("num_items_in_batch", labels.numel())}

    class Adds(Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return super().compute_loss(*given, **named) + 0.0

    text = [{"input_ids": list(range(at, at + 8)), "labels": list(range(at + 8, at, -1))} for at in range(16)]
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    given = TrainingArguments("out", gradient_accumulation_steps=micros, **quiet)
    model = Counting() if counts else Tagger()
    (Adds if smooths else Trainer)(model=model, args=given, train_dataset=text).train()


def the_model_divides_nothing(rank: int, world: int) -> None:
    tagged(counts=False)


def the_model_divides_nothing_for_a_trainer_of_its_own(rank: int, world: int) -> None:
    tagged(counts=False, smooths=True)


def the_model_divides(rank: int, world: int) -> None:
    tagged(counts=True)


def the_model_divides_nothing_of_one_micro_batch(rank: int, world: int) -> None:
    tagged(counts=False, micros=1)


def nobody_divides(rank: int, world: int) -> None:
    smoothed(by_count=False)


def divided_by_the_count(rank: int, world: int) -> None:
    smoothed(by_count=True)


def one_micro_batch(rank: int, world: int) -> None:
    smoothed(by_count=False, micros=1)


def summed_up(*, by_count: bool, micros: int = 2) -> None:
    """A function of the program's own makes the loss."""
    from transformers import Trainer, TrainingArguments

    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return fn.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def divided(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return fn.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    text = [{"input_ids": list(range(at, at + 8)), "labels": list(range(at, at + 8))} for at in range(16)]
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    given = TrainingArguments("out", gradient_accumulation_steps=micros, **quiet)
    made = divided if by_count else mean
    Trainer(model=llama(), args=given, train_dataset=text, compute_loss_func=made).train()


def a_function_gives_means(rank: int, world: int) -> None:
    summed_up(by_count=False)


def a_function_divides_by_the_count(rank: int, world: int) -> None:
    summed_up(by_count=True)


def a_function_gives_the_mean_of_one(rank: int, world: int) -> None:
    summed_up(by_count=False, micros=1)


# --- pictures ---


def pictures(model: nn.Module, *, scale: float = 1.0) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8)
    optimizer = adam(model)
    fn.cross_entropy(model(images.float() * scale), torch.arange(8) % 4).backward()
    optimizer.step()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeing()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images / 255)


def seeing(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *between, nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def pixels_as_they_are(rank: int, world: int) -> None:
    pictures(seeing())


def pixels_scaled(rank: int, world: int) -> None:
    pictures(seeing(), scale=1 / 255)


def pixels_scaled_inside(rank: int, world: int) -> None:
    pictures(Scaled())


def pixels_under_a_norm(rank: int, world: int) -> None:
    pictures(seeing(nn.BatchNorm2d(4)))


WRONG_ASKED: tuple[Loop, ...] = (
    Loop(clipped_past_the_engine, "deepspeed", 2, rule="run.clipped-nothing"),
    Loop(engine_stepped_by_count, "deepspeed", 2, rule="run.engine-gated"),
    Loop(begun_by_other_weights, "deepspeed", 2, rule="run.masters-apart"),
    Loop(called_past_autocast, "accelerate", rule="run.autocast-unused"),
    *(Loop(run, "transformers", rule="run.column-dropped") for run in (weights_left_out, weights_passed_on)),
    Loop(nobody_divides, "transformers", rule="run.trainer-undivided"),
    Loop(a_function_gives_means, "transformers", rule="run.trainer-undivided"),
    Loop(the_model_divides_nothing, "transformers", rule="run.trainer-undivided"),
    Loop(the_model_divides_nothing_for_a_trainer_of_its_own, "transformers", rule="run.trainer-undivided"),
    Loop(pixels_as_they_are, rule="run.pixels-raw"),
)
RIGHT_ASKED: tuple[Loop, ...] = (
    *(Loop(run, "deepspeed", 2) for run in (clipped_by_the_engine, engine_stepped_behind_two_losses)),
    Loop(begun_by_other_weights_before, "deepspeed", 2),
    Loop(clipped_one_model_before_its_turn),
    *(Loop(run, "transformers") for run in (divided_by_the_count, one_micro_batch)),
    *(Loop(run, "transformers") for run in (the_model_divides, the_model_divides_nothing_of_one_micro_batch)),
    *(Loop(run, "transformers") for run in (a_function_divides_by_the_count, a_function_gives_the_mean_of_one)),
    *(Loop(run, "transformers") for run in (weights_kept, weights_made_by_the_collator)),
    *(Loop(run) for run in (pixels_scaled, pixels_scaled_inside, pixels_under_a_norm)),
    *(Loop(run, "accelerate") for run in (called_under_autocast, called_as_prepared, called_in_full_precision)),
)
