"""Findings that no rule about config and facts makes: of files, of the command line, and of a plan that meets a model.

``prepkit rules`` lists them with the rules, and ``prepkit rules codec.foreign`` explains one.
"""

from __future__ import annotations

from prepkit.findings.refusal import Refusal
from prepkit.findings.refused_files import REFUSED_FILES

_APPLY = "pk.apply, prepkit.live.run"
_RESUME = "ready.resume"
_MODEL_OPTION = "prepkit plan, check, rehearse and report with --model"

REFUSALS: tuple[Refusal, ...] = (
    *REFUSED_FILES,
    # --- calls ---
    Refusal(
        id="optimizer.two-places",
        summary="The config and the call do not name two different optimizers.",
        fix="Give the optimizer in one place.",
        raised_by="pk.build_plan, pk.check",
    ),
    Refusal(
        id="diff.does-not-fit",
        summary="Every change meets the values that it was taken from.",
        fix="Patch the plan that the changes were taken from.",
        raised_by="pk.patch",
    ),
    Refusal(
        id="cli.no-such-model",
        summary="--model names something that can be imported.",
        fix="Write package.module:name, such as train:make_model.",
        raised_by=_MODEL_OPTION,
    ),
    Refusal(
        id="model.not-built",
        summary="What --model names returns a model.",
        fix="Call it in Python and mend what it raises.",
        raised_by=_MODEL_OPTION,
    ),
    Refusal(
        id="audit.no-config",
        summary="What stands there is what a config of prepkit asks for.",
        fix="Prepare the model in the way that the finding says, or with prepkit.",
        raised_by="audit.config, audit.plan",
    ),
    # --- a plan that meets live objects ---
    Refusal(
        id="plan.other-model",
        summary="The model has the names, shapes, dtypes, classes and ties of the one that was planned for.",
        fix="Apply the plan to the model that it was made for, or plan again for this one.",
        raised_by=_APPLY,
    ),
    Refusal(
        id="plan.model-changed",
        summary="Model, optimizer, scheduler and loaders are in the state in which they were planned for.",
        fix="Undo the change, or plan again with the model as it is now.",
        raised_by=_APPLY,
    ),
    Refusal(
        id="plan.other-environment",
        summary="World size and device are those of the plan, and the size of a node where the mesh follows it.",
        fix="Launch as the plan says, or plan again for this launch.",
        raised_by=_APPLY,
    ),
    Refusal(
        id="optimizer.prepared-elsewhere",
        summary="No optimizer is prepared with two models.",
        fix="Give each model an optimizer of its own, or put both models into one module.",
        raised_by="pk.apply",
    ),
    Refusal(
        id="plan.inference-mode",
        summary="What is to be trained is made and prepared outside torch.inference_mode().",
        fix="Build the model and call apply outside torch.inference_mode(), or plan with intent=Intent.INFERENCE.",
        raised_by=_APPLY,
    ),
    Refusal(
        id="plan.no-weights",
        summary="No parameter is left on the meta device when training is to begin.",
        fix="Plan with weights=LoadWeights(path), InitWeights() or SendWeights(), or build the model off meta.",
        raised_by=_APPLY,
    ),
    # --- checkpoints of runs ---
    Refusal(
        id="checkpoint.damaged",
        summary="Every byte of a checkpoint is as it was written.",
        fix="Go on from the checkpoint that the finding names, or restore the files from a copy.",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.other-config",
        summary="The model computes as the one that was saved: its config and its modules say the same.",
        fix="Build the model as the finding says, or accept it with ready.resume(folder, accept=[...]).",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.other-dtype",
        summary="Parameters are at least as precise as those that were saved.",
        fix="Build the model in the dtype that was saved, or accept the rounding with accept=[...].",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.other-groups",
        summary="The optimizer has the groups of parameters that were saved.",
        fix="Group the parameters as they were, or read the weights alone with only_model=True.",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.other-model",
        summary="The checkpoint holds the tensors of this model, in their shapes, and no others.",
        fix="Build the model that was saved, or give the folder of this one.",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.other-optimizer",
        summary="The checkpoint holds the state of this kind of optimizer.",
        fix="Use the optimizer that was saved, or read the weights alone with only_model=True.",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.other-scheduler",
        summary="The scheduler is of the class that was saved.",
        fix="Build that scheduler, or let the one here begin anew with accept=[...].",
        raised_by=_RESUME,
    ),
)
"""Every refusal, in the order in which a user may meet them: files, calls, live objects."""
