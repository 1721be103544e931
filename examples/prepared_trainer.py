"""transformers' Trainer over a prepared model; loop, callbacks, logs and evaluation are the Trainer's.

Model, optimizer, training data, gradients and what a checkpoint holds are prepkit's. Written for transformers 5.23.
"""

from pathlib import Path
from typing import Any

from transformers import Trainer

import prepkit as pk


class Stepped:
    """An optimizer or scheduler that ``ready.step`` steps; where the Trainer does, nothing happens."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def step(self, *_: Any) -> None:
        """Done already."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class PreparedTrainer(Trainer):
    """``PreparedTrainer(ready, args=TrainingArguments(...), eval_dataset=..., callbacks=...)``.

    ``args`` and the plan have to agree on accumulation. Of ``args`` these do nothing: the optimizer's and the
    scheduler's, clipping, precision, ``fsdp``, ``deepspeed``; the plan says all that.
    """

    def __init__(self, ready: pk.Prepared, **options: Any) -> None:
        super().__init__(model=ready.unwrap(), **options)
        self.ready = ready
        self.rate = ready.optimizer.param_groups[0]["lr"]
        self.args.ignore_data_skip = True  # the loader stands where it was saved
        self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True  # prepkit knows when to average
        if self.args.gradient_accumulation_steps != ready.plan.owners.accumulation_steps:
            said = f"gradient_accumulation_steps={self.args.gradient_accumulation_steps}"
            raise ValueError(f"{said}, and the plan has {ready.plan.owners.accumulation_steps}; write the same number")
        if ready.plan.data_parallel_size != ready.plan.world_size:
            raise ValueError("the Trainer would evaluate other batches on each rank; leave tensor parallelism out")
        if ready.loaders[0].ends_window:
            raise ValueError("the Trainer reads a window ahead; plan with loaders=ShardLoaders(ends_window=False)")

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """It lies where the plan says; a move would part ZeRO's parameters from the buffers that they are in."""

    def get_train_dataloader(self) -> Any:
        """The prepared one. The Trainer reads a window ahead and says itself where it ends."""
        return self.ready.loaders[0]

    def _prepare_for_training(self, max_steps: int, loader: Any, resume_from_checkpoint: str | None) -> Any:
        self.model_wrapped = self.ready.model
        self.optimizer, self.lr_scheduler = Stepped(self.ready.optimizer), Stepped(self.ready.scheduler)
        if resume_from_checkpoint is not None:
            if len(loader) % self.args.gradient_accumulation_steps:
                raise ValueError(
                    "the Trainer would leave the last window of this epoch open; choose another batch size"
                )
            self.ready.resume(str(Path(resume_from_checkpoint, "prepkit")))
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        return self.ready.model, loader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One micro-batch: the Trainer's loss, prepkit's gradients and step."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.ready.accumulate(last=self.accelerator.sync_gradients):
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            summed = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            if not (summed or self.compute_loss_func is not None):
                loss = loss / self.current_gradient_accumulation_steps
            self.rate = self.ready.optimizer.param_groups[0]["lr"]
            self.ready.backward(loss * self.args.gradient_accumulation_steps)  # which backward divides by
            self.ready.step()
        return loss.detach()

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.ready.grad_norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.ready.grad_norm

    def _get_learning_rate(self) -> float:
        return float(self.rate)  # of the step that was taken; the scheduler has ticked since

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self.ready.model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model, for ``from_pretrained``; of a peft model the adapters."""
        folder = output_dir or self.args.output_dir
        self.ready.export(folder)
        if self.args.should_save and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.ready.save(str(Path(output_dir, "prepkit")))

    def _save_scaler(self, output_dir: str) -> None:
        """Saved with the rest, as random states are."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Saved with the rest."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """``_prepare_for_training`` does."""

    def _load_rng_state(self, checkpoint: str) -> None:
        """Put back with the rest."""

    def _load_best_model(self) -> None:
        self.ready.resume(str(Path(self.state.best_model_checkpoint, "prepkit")), only_model=True)
