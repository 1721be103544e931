"""TRL's ``SFTTrainer`` over a prepared model, as docs/howto/trainer.md writes it: it trains as TRL alone does."""

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
trl = pytest.importorskip("trl")


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def tokens() -> Any:
    """Sequences of unequal lengths, so that a mean of means would be another loss."""
    from datasets import Dataset

    draw = torch.Generator().manual_seed(0)
    return Dataset.from_list(
        [{"input_ids": torch.randint(4, 32, (3 + at % 5,), generator=draw).tolist()} for at in range(16)]
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def options(folder: str, batch: int) -> dict[str, Any]:
    args = trl.SFTConfig(
        folder, per_device_train_batch_size=batch, gradient_accumulation_steps=2, num_train_epochs=2, logging_steps=1,
        learning_rate=1e-2, lr_scheduler_type="constant", adam_epsilon=1e-5, bf16=False, use_cpu=True,
        gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    return {"args": args, "train_dataset": tokens(), "processing_class": tokenizer()}


def steps(trainer: Any) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [(line["loss"], line["grad_norm"]) for line in lines]


def alone(folder: str) -> list[tuple[float, float]]:
    class InOrder(trl.SFTTrainer):  # type: ignore[misc]  # TRL is imported where it is installed
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    return steps(InOrder(model(), **options(folder, 4)))


def prepared(rank: int, world: int, engine: pk.DDP | pk.FSDP2, folder: str) -> list[tuple[float, float]]:
    del rank, world
    sys.path.insert(0, str(EXAMPLES))
    from prepared_trainer import PreparedTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    class PreparedSFTTrainer(PreparedTrainer, trl.SFTTrainer):  # type: ignore[misc]
        pass

    collate = DataCollatorForLanguageModeling(tokenizer().pad_token_id)
    loader = DataLoader(tokens(), batch_size=4, collate_fn=collate)
    cfg = pk.Config(
        engine=engine,
        optimizer=pk.optim.AdamW(lr=1e-2, eps=1e-5, weight_decay=0.0),
        accumulation=2,
        clip=pk.ClipNorm(1.0),
        loaders=pk.data.ShardLoaders(split_batches=True, ends_window=False),
    )
    ready = pk.apply(pk.build_plan(cfg, model(), loaders=[loader]))
    found = steps(PreparedSFTTrainer(ready, **options(folder, 2)))
    ready.close()
    return found


@pytest.mark.parametrize("engine", [pk.DDP(), pk.FSDP2()], ids=["ddp", "fsdp2"])
def test_fine_tuning_on_two_processes_takes_the_steps_of_trl_in_one(
    gang2: Gang, tmp_path: Path, engine: pk.DDP | pk.FSDP2
) -> None:
    found, _ = gang2.run_fresh(prepared, engine, str(tmp_path / "two"))
    expected = alone(str(tmp_path / "one"))
    assert len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)  # logs are rounded
