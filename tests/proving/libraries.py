"""The same windows by the libraries that people train with: right, and with one thing wrong that nothing shows.

``OfLibrary("accelerate", "summed")`` is accelerate's own loop with gradients that are summed once more by hand. What a
fault is, ``WRONG`` says for all of them; a library has those that can be made with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.audit.by_libraries import accelerator, engine_of, llama
from tests.proving.window import Net, Window, loss_of, micros, net

MICROS = 3
"""Micro-batches of a window: another number than that of the ranks."""


@frozen
class Fault:
    """What is wrong with a window, and the rule that tells it."""

    rule: str
    says: str = ""
    by: Callable[[int], float] = lambda world: 1.0  # the default of a field
    """What the script divides its loss by, although the library divides it as it should be."""
    grads: Callable[[nn.Module, int], None] | None = None
    """What it does to gradients before the step."""
    each: bool = False
    """Whether it does so after each micro-batch."""


def _summed(model: nn.Module, world: int) -> None:
    for param in _trained(model):
        dist.all_reduce(param.grad)


def _divided(model: nn.Module, world: int) -> None:
    for param in _trained(model):
        param.grad /= world


def _clipped(model: nn.Module, world: int) -> None:
    nn.utils.clip_grad_norm_(list(_trained(model)), 0.02)


def _cleared(model: nn.Module, world: int) -> None:
    for param in _trained(model):
        param.grad = None


def _one_dropped(model: nn.Module, world: int) -> None:
    list(_trained(model))[-1].grad = None


def _head_fivefold(model: nn.Module, world: int) -> None:
    for param in list(_trained(model))[-2:]:
        param.grad *= 5


def _signs(model: nn.Module, world: int) -> None:
    for param in _trained(model):
        param.grad.sign_()


def _of_rank_0(model: nn.Module, world: int) -> None:
    """Rank 0 adds something to its own."""
    for param in list(_trained(model))[-1:]:
        param.grad += dist.get_rank() == 0


def _clamped(model: nn.Module, world: int) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.1, 0.1)


def _trained(model: nn.Module) -> Iterator[Any]:
    return (param for param in model.parameters() if param.grad is not None)


FAULTS: dict[str, Fault] = {
    "divided twice": Fault("prove.accumulation", "0.333 x", by=lambda world: MICROS),
    "never divided": Fault("prove.accumulation", "3.000 x", by=lambda world: 1 / MICROS),
    "divided by the ranks": Fault("prove.averaged-twice", "divided by the", by=lambda world: world),
    "multiplied by the ranks": Fault("prove.summed", "multiplied by the", by=lambda world: 1 / world),
    "summed": Fault("prove.summed", ".000 x", grads=_summed),
    "divided": Fault("prove.averaged-twice", "averaged twice", grads=_divided),
    "clipped at each": Fault("prove.clipped-scaled", "before the last micro-batch", grads=_clipped, each=True),
    "dropped": Fault("prove.no-gradient", "head.bias", grads=_one_dropped),
    "fivefold": Fault("prove.ratio", "5.000 x", grads=_head_fivefold),
    "clamped": Fault("prove.moved", "has changed", grads=_clamped, each=True),
    "signs": Fault("", grads=_signs),  # alike on all ranks: a rule of the program's own, which is right
    "one rank's": Fault("prove.direction", grads=_of_rank_0),
    "rate by rank": Fault("prove.options", "lr of group 0"),
    "same samples": Fault("prove.same-samples", "same samples"),
    "not stepped": Fault("prove.not-stepped", "head.weight"),
    "not prepared": Fault("prove.not-averaged", "each rank's own"),
    "never sent": Fault("prove.not-averaged", "each rank's own"),
    "called inside": Fault("prove.past-wrapper", "each rank's own"),
    "thawed after": Fault("prove.not-averaged", "head` are each"),
    "more by rank": Fault("prove.unlike-losses", "00 x one of rank 0"),
    "other weights": Fault("prove.first-weights", "Rank 1 has other first weights"),
}
LOSS = ("divided twice", "never divided", "divided by the ranks", "multiplied by the ranks")
"""Faults of the loss alone, which every library has."""


@frozen
class OfLibrary:
    """One window of a library; ``fault`` is a key of ``FAULTS``, or nothing is wrong."""

    library: str
    fault: str = ""
    low: bool = False
    """Whether it computes in bfloat16."""
    stage: int = 0
    """Of DeepSpeed."""

    @property
    def __name__(self) -> str:
        parts = (self.library, str(self.stage) * self.library.startswith("deepspeed"), "bf16" * self.low, self.fault)
        return "_".join(part.replace(" ", "_").replace("'", "") for part in parts if part)

    @property
    def needs(self) -> str:
        """The package that has to be there."""
        return {"fabric": "lightning", "trainer": "transformers"}.get(self.library, self.library)

    def __call__(self, rank: int, world: int) -> Window:
        return LIBRARIES[self.library](self, rank, world)

    def loss(self, loss: Tensor, world: int) -> Tensor:
        """The loss as the script gives it to the library."""
        return loss / FAULTS[self.fault].by(world) if self.fault in LOSS else loss

    def touches(self, model: nn.Module, world: int, *, last: bool) -> None:
        """What the script does behind a backward."""
        fault = FAULTS.get(self.fault)
        if fault is not None and fault.grads is not None and (fault.each or last):
            fault.grads(model, world)

    def batches(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        return micros(MICROS, rank=0 if self.fault == "same samples" else rank)

    def optimizer(self, model: nn.Module, rank: int) -> torch.optim.Optimizer:
        kept = [param for name, param in model.named_parameters() if not name.startswith("head")]
        given = kept if self.fault == "not stepped" else list(model.parameters())
        return torch.optim.AdamW(given, lr=1e-2 * (1 + rank * (self.fault == "rate by rank")))

    def model(self, rank: int) -> Net:
        made = net()
        if self.fault == "other weights" and rank == 1:
            nn.init.normal_(made.head.weight)
        if self.fault == "thawed after":
            made.head.requires_grad_(requires_grad=False)
        return made


def _accelerate(of: OfLibrary, rank: int, world: int) -> Window:
    ours = accelerator(gradient_accumulation_steps=MICROS, mixed_precision="bf16" if of.low else "no")
    plain = of.model(rank)
    optimizer = of.optimizer(plain, rank)
    if of.fault in ("not prepared", "other weights"):
        model, optimizer = plain, ours.prepare(optimizer)
    else:
        model, optimizer = ours.prepare(plain, optimizer)
    called = plain if of.fault == "called inside" else model
    if of.fault == "thawed after":
        plain.head.requires_grad_(requires_grad=True)

    def train() -> None:
        with ours.no_sync(model) if of.fault == "never sent" else nullcontext():
            for at, batch in enumerate(of.batches(rank)):
                with ours.accumulate(model) if of.fault != "never sent" else nullcontext():
                    divisor = MICROS if of.fault == "never sent" else 1
                    ours.backward(of.loss(loss_of(called, batch), world) / divisor)
                    of.touches(plain, world, last=at == MICROS - 1)
                    if of.fault != "never sent" or at == MICROS - 1:
                        optimizer.step()
                        optimizer.zero_grad()

    return Window(None, train)


def _fabric(of: OfLibrary, rank: int, world: int) -> Window:
    from lightning.fabric import Fabric

    runs = Fabric(accelerator="cpu", devices=world, strategy="ddp", precision="bf16-mixed" if of.low else "32-true")
    runs.launch()
    plain = of.model(rank)
    optimizer: Any = of.optimizer(plain, rank)
    model: Any = plain
    if of.fault in ("not prepared", "other weights"):
        optimizer = runs.setup_optimizers(optimizer)
    else:
        model, optimizer = runs.setup(plain, optimizer)
    if of.fault == "thawed after":
        plain.head.requires_grad_(requires_grad=True)
    called = plain if of.fault == "called inside" else model
    skips = of.fault not in ("not prepared", "other weights")

    def train() -> None:
        for at, batch in enumerate(of.batches(rank)):
            last = at == MICROS - 1 and of.fault != "never sent"
            with runs.no_backward_sync(model, enabled=not last) if skips else nullcontext():
                runs.backward(of.loss(loss_of(called, batch), world) / MICROS)
            of.touches(plain, world, last=at == MICROS - 1)
        optimizer.step()

    return Window(None, train)


def _lightning(of: OfLibrary, rank: int, world: int) -> Window:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = of.model(rank)

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
            self.log("loss", loss, sync_dist=True)
            self.log_dict({"epoch": self.current_epoch, "rate": self.trainer.optimizers[0].param_groups[0]["lr"]})
            if self.logger is not None:
                self.logger.log_metrics({"loss": loss.item()}, step=self.global_step)
            loss = loss * (1 + self.global_rank) if of.fault == "more by rank" else loss
            assert self.trainer.accumulate_grad_batches == MICROS
            return of.loss(loss, self.trainer.world_size)

        def on_after_backward(self) -> None:
            of.touches(self.net, world, last=(self.trainer.fit_loop.batch_idx + 1) % MICROS == 0)

        def configure_optimizers(self) -> Any:
            return of.optimizer(self.net, rank)

    given = {"accelerator": "cpu", "devices": world, "strategy": "ddp", "accumulate_grad_batches": MICROS}
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")

    def train() -> None:
        trainer = lightning.Trainer(
            **given, **dict.fromkeys(quiet, False), max_steps=1, use_distributed_sampler=False,
            precision="bf16-mixed" if of.low else "32-true",
        )  # fmt: skip
        data = [torch.cat(one) for one in zip(*of.batches(rank), strict=True)]
        trainer.fit(Module(), DataLoader(TensorDataset(*data), batch_size=6))

    return Window(None, train)


def _trainer(of: OfLibrary, rank: int, world: int) -> Window:
    """Of transformers, over a small Llama; sequences have different numbers of tokens that count."""
    from transformers import Trainer, TrainingArguments

    class Theirs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if of.fault == "never divided":  # a loss of one's own that does not look at the number of tokens
                return super().compute_loss(model, inputs, *args, **{**kwargs, "num_items_in_batch": None})
            return of.loss(super().compute_loss(model, inputs, *args, **kwargs), world)

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            found = super().training_step(model, *args, **kwargs)
            of.touches(model, world, last=self.accelerator.sync_gradients)
            return found

    even = of.fault == "never divided"  # else its mean of means is told too
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(64, (2 * world * MICROS, 8), generator=draw)
    data = [
        {"input_ids": row, "labels": torch.where(torch.arange(8) < (8 if even else 4 + at % 4), row, -100)}
        for at, row in enumerate(tokens)
    ]
    model = llama()

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=MICROS,
                max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no", max_grad_norm=0.0, bf16=of.low,
            )  # fmt: skip
            head = [p for name, p in model.named_parameters() if of.fault != "not stepped" or "lm_head" not in name]
            rate = 1e-2 * (1 + rank * (of.fault == "rate by rank"))
            schedule = None
            Theirs(model=model, args=arguments, train_dataset=data,
                   optimizers=(torch.optim.AdamW(head, lr=rate), schedule)).train()  # fmt: skip

    return Window(None, train)


def _deepspeed(of: OfLibrary, rank: int, world: int) -> Window:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": MICROS}
    if of.low:
        config["bf16"] = {"enabled": True}
    plain = of.model(rank)
    engine, *_ = engine_of(plain, of.stage, optimizer=of.optimizer(plain, rank), config=config)
    called = plain if of.fault == "called inside" else engine

    def train() -> None:
        for x, y in of.batches(rank):
            given = x.bfloat16() if of.low else x
            engine.backward(of.loss(nn.functional.cross_entropy(called(given).float(), y), world))
            of.touches(plain, world, last=engine.is_gradient_accumulation_boundary())
            engine.step()

    return Window(None, train)


LIBRARIES: dict[str, Callable[[OfLibrary, int, int], Window]] = {
    "accelerate": _accelerate,
    "fabric": _fabric,
    "lightning": _lightning,
    "trainer": _trainer,
    "deepspeed": _deepspeed,
}
GRADS = ("summed", "divided", "clipped at each", "dropped", "fivefold")
AROUND = ("rate by rank", "same samples", "not stepped")
PREPARED = ("not prepared", "never sent", "called inside", "thawed after", "other weights")
MADE: dict[str, tuple[str, ...]] = {
    "accelerate": (*LOSS, *GRADS, *AROUND, *PREPARED),
    "fabric": (*LOSS, *GRADS, *AROUND, *PREPARED),
    "lightning": ("more by rank", *LOSS, *GRADS, *AROUND),
    "trainer": (*LOSS, "summed", "divided", "fivefold", "rate by rank", "not stepped"),
    "deepspeed": (*LOSS, *AROUND),
}
BY_LIBRARIES: tuple[tuple[OfLibrary, str, str, int], ...] = tuple(
    (OfLibrary(library, fault, stage=stage), FAULTS[fault].rule, FAULTS[fault].says, ranks)
    for library, faults in MADE.items()
    for ranks in (2, 4)
    for fault in (faults if ranks == 2 else faults[:: 2 + (library == "deepspeed")])
    for stage in (range(4) if library == "deepspeed" else (0,))
)
"""Each with its rule, a word of its text, and the ranks."""
ALWAYS_TRIED: tuple[tuple[OfLibrary, str, str, int], ...] = tuple(
    (one, FAULTS[one.fault].rule, FAULTS[one.fault].says, 2)
    for one in (
        OfLibrary("lightning", "divided twice"),
        OfLibrary("lightning", "more by rank"),
        OfLibrary("deepspeed", "clamped", stage=2),
    )
)
"""What no share of them leaves out."""
RIGHT_BY_LIBRARIES: tuple[tuple[OfLibrary, int], ...] = tuple(
    (OfLibrary(library, low=low, stage=stage), ranks)
    for library in MADE
    for low in (False, True)
    for stage in (range(4) if library == "deepspeed" else (0,))
    for ranks in ((2,) if low else (2, 4))
) + tuple((OfLibrary(library, "signs"), 2) for library in ("accelerate", "fabric", "lightning"))
