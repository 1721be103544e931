"""``examples/prepared_trainer.py``: transformers' Trainer over a prepared model trains as the Trainer alone does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

import prepkit as pk
from tests.support.gang import Gang

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

ENGINES = {"ddp": pk.DDP(), "fsdp2": pk.FSDP2(), "zero2": pk.DeepSpeed(stage=2)}

Log = list[dict[str, Any]]


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def data() -> list[dict[str, torch.Tensor]]:
    """Sequences with different numbers of tokens that count, so that a mean of means would be another loss."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (16, 8), generator=draw)
    return [
        {"input_ids": row, "labels": torch.where(torch.arange(8) < 3 + at % 5, row, -100)}
        for at, row in enumerate(tokens)
    ]


def optimizer(of: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), lr=1e-2, eps=1e-5)


def arguments(folder: str, batch: int) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder, use_cpu=True, per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2, num_train_epochs=3, logging_steps=1, save_steps=1, eval_strategy="epoch",
        report_to=[], disable_tqdm=True, max_grad_norm=1.0, save_total_limit=6,
    )  # fmt: skip


def steps(log: Log) -> dict[int, tuple[float, ...]]:
    """Step to loss, norm and rate; and the evaluations."""
    found = {line["step"]: (line["loss"], line["grad_norm"], line["learning_rate"]) for line in log if "loss" in line}
    return found | {-line["step"]: (line["eval_loss"],) for line in log if "eval_loss" in line}


def alone(folder: str) -> dict[int, tuple[float, ...]]:
    """The Trainer as it is, in one process."""
    from transformers import Trainer

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(data())

    live = model()
    made = optimizer(live)
    rate = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.8**step)
    trainer = InOrder(model=live, args=arguments(folder, 4), train_dataset=data(), eval_dataset=data()[:8],
                      optimizers=(made, rate))  # fmt: skip
    trainer.train()
    return steps(trainer.state.log_history)


def prepared(engine: str) -> Any:
    from transformers import default_data_collator

    live = model()
    made = optimizer(live)
    rate = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.8**step)
    cfg = pk.Config(
        engine=ENGINES[engine], accumulation=2, clip=pk.ClipNorm(1.0), loaders=pk.data.ShardLoaders(ends_window=False)
    )
    loader = DataLoader(data(), batch_size=2, collate_fn=default_data_collator)
    return pk.apply(pk.build_plan(cfg, live, optimizer=made, scheduler=rate, loaders=[loader]))


def under(rank: int, world: int, engine: str, folder: str) -> tuple[Log, Log]:
    """Trains to the end; then goes on from the third of six steps with everything made anew."""
    del rank, world
    if engine.startswith("zero"):
        from tests.support.deepspeed_cpu import lean

        lean()
    sys.path.insert(0, str(EXAMPLES))
    from accelerate.state import AcceleratorState
    from prepared_trainer import PreparedTrainer

    logs = []
    for resume in (None, str(Path(folder, "checkpoint-3"))):
        ready = prepared(engine)
        trainer = PreparedTrainer(ready, args=arguments(folder, 2), eval_dataset=data()[:8])
        trainer.train(resume_from_checkpoint=resume)
        logs.append(trainer.state.log_history)
        ready.close()
        AcceleratorState._reset_state(reset_partial_state=True)
    return logs[0], logs[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_trainer_over_a_prepared_model_trains_saves_and_goes_on_as_the_trainer_alone_does(
    gang2: Gang, tmp_path: Path, engine: str
) -> None:
    expected = alone(str(tmp_path / "alone"))
    whole, rest = gang2.run_fresh(under, engine, str(tmp_path / "run"), timeout=100)[0]
    assert sorted(expected) == [-6, -4, -2, 1, 2, 3, 4, 5, 6]
    for log in (whole, rest):
        seen = steps(log)
        assert sorted(seen) == sorted(expected)
        for step, values in expected.items():
            assert seen[step] == pytest.approx(values, rel=1e-5), step

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6").config.hidden_size == 16


def test_what_the_trainer_would_do_otherwise_is_refused(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    from prepared_trainer import PreparedTrainer

    def made(**options: Any) -> Any:
        loader = DataLoader(data(), batch_size=4)
        return pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.AdamW(), **options), model(), loaders=[loader]))

    with pytest.raises(ValueError, match="gradient_accumulation_steps=2, and the plan has 1; write the same number"):
        PreparedTrainer(made(), args=arguments(str(tmp_path), 4), eval_dataset=data())
    with pytest.raises(ValueError, match=r"plan with loaders=ShardLoaders\(ends_window=False\)"):
        PreparedTrainer(made(accumulation=2), args=arguments(str(tmp_path), 4), eval_dataset=data())
