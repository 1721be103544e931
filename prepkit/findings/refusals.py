"""Findings that no rule about config and facts makes: of files, of the command line, and of a plan that meets a model.

``prepkit rules`` lists them with the rules, and ``prepkit rules codec.foreign`` explains one.
"""

from __future__ import annotations

from attrs import frozen

from prepkit.findings import Severity


@frozen(kw_only=True)
class Refusal:
    """Why a file, a call or a model is refused. It cannot be overridden: without it there is nothing to go on with."""

    id: str
    """``subject.what-is-wrong``, as findings carry it; never reused."""
    summary: str
    """What holds when there is no such finding."""
    fix: str
    """What helps in general; the finding itself says it for its case."""
    raised_by: str
    """The call or the module that makes the finding."""
    severity: Severity = Severity.ERROR


_DATA = "pk.load, pk.read_config, prepkit.codec"
_PLAN_FILE = "pk.load, prepkit show, prepkit diff"
_CONFIG_FILE = "pk.read_config, prepkit plan, prepkit check"
_IMPORT = "pk.import_config, prepkit import, prepkit plan, prepkit check"
_APPLY = "pk.apply, prepkit.live.run"
_RESUME = "ready.resume"
_MODEL_OPTION = "prepkit plan, check, rehearse and report with --model"

REFUSALS: tuple[Refusal, ...] = (
    # --- files that prepkit wrote ---
    Refusal(
        id="codec.damaged",
        summary="The file is UTF-8 text in JSON.",
        fix="Restore the file, or plan again.",
        raised_by=_DATA,
    ),
    Refusal(
        id="codec.duplicate-key",
        summary="No key appears twice in one object.",
        fix="Keep one of them.",
        raised_by=_DATA,
    ),
    Refusal(
        id="codec.edited",
        summary="The contents of a saved plan or attestation have the digest that was written with them.",
        fix="Change the config and plan again; a plan is not edited by hand.",
        raised_by=_PLAN_FILE,
    ),
    Refusal(
        id="codec.foreign",
        summary="The file says of itself that it is a plan or an attestation of prepkit.",
        fix="Give a file that pk.save(plan, path) wrote.",
        raised_by=_PLAN_FILE,
    ),
    Refusal(
        id="codec.inconsistent",
        summary="The parts of a saved plan fit each other: indices lead somewhere, axes multiply to the ranks.",
        fix="Plan again; a plan is not edited by hand.",
        raised_by=_PLAN_FILE,
    ),
    Refusal(
        id="codec.missing-key",
        summary="Every key without a default is there.",
        fix="Add the key; the finding says what stands under it.",
        raised_by=_DATA,
    ),
    Refusal(
        id="codec.other-format",
        summary="The file has the format number that this prepkit reads.",
        fix="Use the prepkit that wrote the file, or plan again with this one.",
        raised_by=_PLAN_FILE,
    ),
    Refusal(
        id="codec.too-large",
        summary="The file is not larger than any plan can be.",
        fix="Give the path of a plan file.",
        raised_by=_PLAN_FILE,
    ),
    Refusal(
        id="codec.too-many",
        summary="Not more places of one list or object are wrong than findings are told of.",
        fix="Mend the places that are told, or write the file anew.",
        raised_by=_DATA,
    ),
    Refusal(
        id="codec.unknown-key",
        summary="Every key is one that the value has.",
        fix="Write the name that is proposed, or remove the key.",
        raised_by=_DATA,
    ),
    Refusal(
        id="codec.unknown-kind",
        summary="A kind is the name of a class that may stand in that place.",
        fix="Write one of the names that the finding lists.",
        raised_by=_DATA,
    ),
    Refusal(
        id="codec.unreadable",
        summary="The file is there and may be read.",
        fix="Give the path of a plan file.",
        raised_by=_PLAN_FILE,
    ),
    Refusal(
        id="codec.wrong-keys",
        summary="An attestation file has the keys of an attestation file, and no others.",
        fix="Restore the file.",
        raised_by=_PLAN_FILE,
    ),
    Refusal(
        id="codec.wrong-type",
        summary="Every value has the type of its field; none is turned into another.",
        fix="Write the type that the finding names.",
        raised_by=_DATA,
    ),
    Refusal(
        id="codec.wrong-value",
        summary="Every value is one that its field allows, and that JSON has.",
        fix="Write one of the values that the finding names.",
        raised_by=_DATA,
    ),
    # --- other libraries' files ---
    Refusal(
        id="import.contradiction",
        summary="No two keys of an imported config say different things of one setting.",
        fix="Keep one of them.",
        raised_by=_IMPORT,
    ),
    Refusal(
        id="import.missing-file",
        summary="A file that an imported config points to is there.",
        fix="Give its path, from where you are or from the file that points to it.",
        raised_by=_IMPORT,
    ),
    Refusal(
        id="import.no-effect",
        summary="Every key of an imported config does something where it stands.",
        fix="Remove the key.",
        raised_by=_IMPORT,
        severity=Severity.WARNING,
    ),
    Refusal(
        id="import.not-supported",
        summary="An imported config asks for what prepkit does.",
        fix="Write the nearest way that the finding names.",
        raised_by=_IMPORT,
    ),
    Refusal(
        id="import.unknown-key",
        summary="Every key of an imported config is one that its library knows.",
        fix="Write the name that is proposed, or remove the key.",
        raised_by=_IMPORT,
    ),
    Refusal(
        id="import.wrong-type",
        summary="Every value of an imported config has the type that its library takes.",
        fix="Write the type that the finding names.",
        raised_by=_IMPORT,
    ),
    Refusal(
        id="import.wrong-value",
        summary="Every value of an imported config is one that its library knows.",
        fix="Write one of the values that the finding names.",
        raised_by=_IMPORT,
    ),
    # --- config files ---
    Refusal(
        id="config.damaged",
        summary="The config file is UTF-8 text in the format that its extension says.",
        fix="Mend the file at the line and column that the finding names.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.duplicate-key",
        summary="No key appears twice in one mapping of a YAML file.",
        fix="Keep one of them.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.empty",
        summary="The config file says something.",
        fix="Write at least the engine.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.not-a-mapping",
        summary="The top level of the config file is a mapping of config fields.",
        fix="Write fields such as 'engine' at the top level.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.recursive",
        summary="No value of a YAML file contains itself through an alias.",
        fix="Write it out without the alias.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.not-in-toml",
        summary="A config that is written as TOML has no setting that is null.",
        fix="Name the file .yaml or .json.",
        raised_by="prepkit import -o",
    ),
    Refusal(
        id="config.too-large",
        summary="The config file, with every alias written out, is not larger than any config can be.",
        fix="Write it out without aliases, or shorter.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.too-many",
        summary="Not more places of one file are wrong than findings are told of.",
        fix="Mend the places that are told, or write the file anew.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.unknown-extension",
        summary="The extension of the config file says its format.",
        fix="Name it with one of .toml, .yaml, .yml, .json.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.unreadable",
        summary="The config file is there and may be read.",
        fix="Give the path of a config file.",
        raised_by=_CONFIG_FILE,
    ),
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
