"""Rows that no look asks: the call that meets a file, a model or a step that breaks one tells it by its id."""

from __future__ import annotations

from functools import partial

from prepkit.findings import Severity
from prepkit.rules.files import FILES, refusal
from prepkit.rules.rule import Moment, Rule

# --- checkpoints and exports ---

_save = partial(refusal, told_by="ready.save, ready.checkpoints.check")
_resume = partial(refusal, told_by="ready.resume")
_exports = partial(refusal, told_by="ready.export")

_CHECKPOINTS: tuple[Rule, ...] = (
    _save(
        id="checkpoint.not-written",
        summary="Every rank can write its part of a checkpoint.",
        fix="Mend what the error names, such as a full disk; the last whole checkpoint of the folder is untouched.",
    ),
    _save(
        id="checkpoint.not-shared",
        summary="Rank 0 sees the files of all ranks.",
        fix="Give a folder on a file system that all ranks share.",
    ),
    _save(
        id="checkpoint.not-plain",
        summary="What schedulers and loaders keep is plain data, which can be read again without running any code.",
        fix="Keep numbers, texts, lists, dicts and tensors in it, or leave it out of its state_dict().",
    ),
    _resume(
        id="checkpoint.not-read",
        summary="Every rank can read its part of a checkpoint.",
        fix="Mend what the error names. Some of the model may have been read: prepare it again before going on.",
    ),
    _resume(
        id="checkpoint.not-there",
        summary="There is a whole checkpoint in the folder.",
        fix="Give the folder that ready.save() wrote; missing_ok=True begins anew where nothing was ever saved.",
    ),
    _resume(
        id="checkpoint.damaged",
        summary="Every byte of a checkpoint is as it was written.",
        fix="Go on from an older checkpoint of the folder, or restore the files from a copy.",
    ),
    _resume(
        id="checkpoint.other-format",
        summary="This version of prepkit reads the checkpoint's format.",
        fix="Read it with the version that wrote it.",
    ),
    _resume(
        id="checkpoint.foreign",
        summary="A checkpoint holds tensors and plain data, and names no file outside of its folder.",
        fix="Do not use the file: no checkpoint of prepkit or torch is made so. Nothing in it was run.",
    ),
    refusal(
        id="checkpoint.deepspeed-state",
        summary="What DeepSpeed keeps can be told apart by parameter.",
        fix="Save and load in DeepSpeed's own format, by ready.model.save_checkpoint and load_checkpoint.",
        told_by="ready.save, ready.resume, pk.fingerprints",
    ),
    refusal(
        id="prove.record",
        summary="The record of a window is whole, and of a format that this version reads.",
        fix="Record the window again; a record is read by the version of prepkit that has written it.",
        told_by="pk.prove, prepkit audit --prove",
    ),
    _exports(
        id="export.not-written",
        summary="Rank 0 can write the whole model.",
        fix="Mend what the error names, or give another folder; the run is as it was.",
    ),
    _exports(
        id="export.incomplete",
        summary="What was exported holds all that was trained.",
        fix="Keep the run: ready.save has everything, and what it wrote can be resumed and exported.",
    ),
    _exports(
        id="export.split-layers",
        summary="DeepSpeed has not split the layers over the ranks.",
        fix="Write ready.model.save_16bit_model(folder).",
    ),
)
"""Every one, in the order of a run: written, found, read, exported."""


# --- accelerate's face ---

_face = partial(refusal, told_by="prepkit.compat.accelerate")
_PAGE = "docs/from-accelerate.md"

_ACCELERATE: tuple[Rule, ...] = (
    _face(
        id="accelerate.not-offered",
        summary="A script asks of accelerate what prepkit.compat.accelerate does.",
        fix=f"Write what the finding names. See {_PAGE}.",
    ),
    _face(
        id="accelerate.not-installed",
        summary="accelerate is installed where a script takes from it what prepares nothing.",
        fix="Type pip install accelerate.",
    ),
    _face(
        id="accelerate.before-prepare",
        summary="A script prepares its model before it asks for what depends on it.",
        fix="Call accelerator.prepare(model, ...) first.",
    ),
    _face(
        id="accelerate.several-models",
        summary="Several models, or an optimizer alone, are trained by one process or under DDP.",
        fix="Give one model and its optimizer to one prepare, and each other model to an Accelerator.",
    ),
    _face(
        id="accelerate.outside-accumulate",
        summary="Under DeepSpeed a script accumulates gradients inside accelerator.accumulate.",
        fix="Write gradient_accumulation_steps and `with accelerator.accumulate(model):`.",
    ),
    _face(
        id="accelerate.clips-otherwise",
        summary="A script clips as DeepSpeed's config says, and under fp16 all that is trained.",
        fix="Write the number into DeepSpeed's config, or give model.parameters() of the one model.",
    ),
    _face(
        id="accelerate.cleared-nothing",
        summary="optimizer.zero_grad() is called after the step that ends a window.",
        fix=f"Write it after optimizer.step(). See {_PAGE}.",
        severity=Severity.WARNING,
    ),
    _face(
        id="accelerate.clips-nothing",
        summary="Clipping is given parameters.",
        fix=f"Write list(...) around it. See {_PAGE}.",
        severity=Severity.WARNING,
    ),
    _face(
        id="accelerate.clips-inside-window",
        summary="Clipping is asked for in the last micro-batch of a window.",
        fix=f"Write `if accelerator.sync_gradients:` above it. See {_PAGE}.",
        severity=Severity.WARNING,
    ),
)
"""What a script for accelerate has to do otherwise."""


# --- all ---

_apply = partial(refusal, told_by="pk.apply, prepkit.applying.run")
_model_option = partial(refusal, told_by="prepkit plan, check, rehearse and report with --model")

REFUSALS: tuple[Rule, ...] = (
    *FILES,
    # --- calls ---
    refusal(
        id="optimizer.two-places",
        summary="The config and the call do not name two different optimizers.",
        fix="Give the optimizer in one place.",
        told_by="pk.build_plan, pk.check",
    ),
    refusal(
        id="diff.does-not-fit",
        summary="Every change meets the values that it was taken from.",
        fix="Patch the plan that the changes were taken from.",
        told_by="pk.patch",
    ),
    _model_option(
        id="cli.no-such-model",
        summary="--model names something that can be imported.",
        fix="Write package.module:name, such as train:make_model.",
    ),
    _model_option(
        id="model.not-built",
        summary="What --model names returns a model.",
        fix="Call it in Python and mend what it raises.",
    ),
    refusal(
        id="model.not-known",
        summary="What a folder says of its model is enough to know its modules and parameters.",
        fix="Give --model PKG.MOD:FACTORY, a function that returns the model.",
        told_by="prepkit --model",
    ),
    refusal(
        id="model.sizes",
        summary="Every size in a model's config.json that has to divide another one does, such as heads the width.",
        fix="Write a number that divides the other.",
        told_by="prepkit --model, prepkit check",
    ),
    refusal(
        id="audit.no-config",
        summary="What stands there is what a config of prepkit asks for.",
        fix="Prepare the model in the way that the finding says, or with prepkit.",
        told_by="audit.config, audit.plan",
    ),
    # --- a plan that meets live objects ---
    _apply(
        id="plan.other-model",
        summary="The model has the names, shapes, dtypes, classes and ties of the one that was planned for.",
        fix="Apply the plan to the model that it was made for, or plan again for this one.",
        at=(Moment.CALL, Moment.ACT),
    ),
    _apply(
        id="plan.model-changed",
        summary="Model, optimizer, scheduler and loaders are in the state in which they were planned for.",
        fix="Undo the change, or plan again with the model as it is now.",
        at=(Moment.CALL, Moment.ACT),
    ),
    _apply(
        id="plan.other-environment",
        summary="World size, device and backend are those of the plan; so is the node where the mesh follows its size.",
        fix="Launch as the plan says, or plan again for this launch.",
        at=(Moment.CALL, Moment.ACT),
    ),
    refusal(
        id="optimizer.prepared-elsewhere",
        summary="No optimizer is prepared with two models.",
        fix="Give each model an optimizer of its own, or put both models into one module.",
        told_by="pk.apply",
    ),
    _apply(
        id="plan.not-signed",
        summary="Who is asked by require= accepts the statement of the plan.",
        fix="Have it signed: prepkit statement plan.json -o plan.statement.json, and sign that file.",
    ),
    _apply(
        id="plan.inference-mode",
        summary="What is to be trained is made and prepared outside torch.inference_mode().",
        fix="Build the model and call apply outside torch.inference_mode(), or plan with intent=Intent.INFERENCE.",
    ),
    _apply(
        id="plan.no-weights",
        summary="No parameter is left on the meta device when training is to begin.",
        fix="Plan with weights=LoadWeights(path), InitWeights() or BroadcastWeights(), or build the model off meta.",
        at=(Moment.CALL, Moment.ACT),
    ),
    # --- a run ---
    refusal(
        id="run.ranks-give",
        summary="All ranks give values of one structure, shape and dtype to what is done over all of them.",
        fix="Give values of one structure, shape and dtype, and the same how, on every rank.",
        told_by="ready.ranks.reduce, gather_for_metrics",
    ),
    refusal(
        id="run.ranks-skips",
        summary="A micro-batch is left out on every rank, or on none.",
        fix=(
            "Let the ranks decide together: bad = loss is None or not torch.isfinite(loss), with loss = None where an "
            "exception was caught; then, on every rank, `if ready.ranks.reduce(float(bad), 'max'): ready.skip()`."
        ),
        told_by="ready.skip",
    ),
    refusal(
        id="run.group-in-use",
        summary="Nobody uses the process group any more when ready.close() ends it; else it ends with the process.",
        fix="Delete the other model's wrapper before ready.close().",
        told_by="ready.close",
        severity=Severity.WARNING,
    ),
    refusal(
        id="run.rank-waits",
        summary="All ranks make the same calls, in the same order.",
        fix="Look at what the other ranks do: such a call ends when every rank has made it.",
        told_by="a call of ready in which a rank waits for a minute",
        severity=Severity.WARNING,
    ),
    refusal(
        id="loop.gathered-outside-pass",
        summary="gather_for_metrics is called inside a loop over one of ready.loaders, batch by batch.",
        fix="Call it inside the loop over the loader, once for each batch.",
        told_by="ready.ranks.gather_for_metrics",
    ),
    refusal(
        id="forward.no-gradient",
        summary="Every trained parameter gets a gradient from the example.",
        fix="Freeze it with requires_grad_(False), or give an example that uses it.",
        told_by="pk.activations",
        severity=Severity.WARNING,
    ),
    refusal(
        id="forward.unlike-dtypes",
        summary="What a forward computes with has the dtype of its weights.",
        fix="Cast it where it meets activations: tensor.to(x.dtype).",
        told_by="ready.model(...), as a note of the error",
        source=("torch MixedPrecisionPolicy", "deepspeed bf16"),
    ),
    refusal(
        id="save.shards",
        summary="model.save_pretrained is called where parameters are whole.",
        fix=(
            "Call ready.export(folder) on every rank: it gathers them, and calls save_pretrained on rank 0. Under "
            "accelerate's face give it state_dict=accelerator.get_state_dict(model), which every rank calls."
        ),
        told_by="model.save_pretrained",
    ),
    refusal(
        id="ema.zero3",
        summary="Parameters are where their average can be taken.",
        fix="Average under FSDP2, or at ZeRO 0 to 2.",
        told_by="pk.Ema",
    ),
    refusal(
        id="sigterm.other-thread",
        summary="Signals are handled in the main thread.",
        fix="Call save_on_sigterm in the main thread.",
        told_by="pk.processes.save_on_sigterm",
    ),
    *_CHECKPOINTS,
    *_ACCELERATE,
)
"""Every refusal, in the order in which a user may meet them: files, calls, live objects."""
