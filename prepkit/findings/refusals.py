"""Findings that no rule makes: of files, of the command line, of checkpoints, and of a plan that meets a model.

``prepkit rules`` lists them with the rules, and ``prepkit rules codec.foreign`` explains one.
"""

from __future__ import annotations

from attrs import frozen

from prepkit.findings import Severity


@frozen(kw_only=True)
class Refusal:
    """A reason to refuse a file, a call or a model. It cannot be overridden: nothing could go on without it."""

    id: str
    """``subject.what-is-wrong``, as findings carry it; never reused."""
    summary: str
    """Condition that holds when there is no such finding."""
    fix: str
    """General remedy; the finding has the one for its case."""
    raised_by: str
    """Call or module that makes the finding."""
    severity: Severity = Severity.ERROR


# --- files ---

_DATA = "pk.load, pk.read_config, prepkit.codec"
_PLAN_FILE = "pk.load, prepkit show, prepkit diff"
_CONFIG_FILE = "pk.read_config, prepkit plan, prepkit check"
_IMPORT = "pk.import_config, prepkit import, prepkit plan, prepkit check"
_CHECK = "prepkit check, prepkit gate"
_EXPORT = "pk.export_config, prepkit export"

_FILES: tuple[Refusal, ...] = (
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
        summary="Not more places of one list or object are wrong than findings report.",
        fix="Correct the places that are reported, or write the file again.",
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
        id="import.asks-machine",
        summary="No key of an imported config leaves it to the machine that it runs on what is done.",
        fix="Write what is meant.",
        raised_by=_IMPORT,
        severity=Severity.WARNING,
    ),
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
    Refusal(
        id="launch.gpus",
        summary="A script starts no more processes on a node than it asks Slurm for GPUs.",
        fix="Start fewer, or ask for more.",
        raised_by=_CHECK,
    ),
    Refusal(
        id="launch.nodes",
        summary="A script waits for no more machines than it asks Slurm for.",
        fix="Write the same number in both places.",
        raised_by=_CHECK,
    ),
    Refusal(
        id="launch.processes",
        summary="The processes that accelerate launch is told of can be divided over its machines.",
        fix="Write the processes of all machines together.",
        raised_by=_CHECK,
    ),
    Refusal(
        id="launch.twice",
        summary="Either srun or the launcher starts the processes of a node.",
        fix="Write #SBATCH --ntasks-per-node=1.",
        raised_by=_CHECK,
    ),
    Refusal(
        id="export.not-expressible",
        summary="Every setting of an exported config is one that the other library's file can say.",
        fix="Write what it can say, or leave it out with partial=True (--partial) and see to it in your script.",
        raised_by=_EXPORT,
    ),
    Refusal(
        id="export.unknown-extension",
        summary="An exported file has an extension that its library reads.",
        fix="Name it with one of the extensions that the finding names.",
        raised_by=_EXPORT,
    ),
    Refusal(
        id="export.unknown-library",
        summary="The library that a config is exported to is one of those that there is an exporter for.",
        fix="Write accelerate, deepspeed or transformers.",
        raised_by=_EXPORT,
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
        id="config.too-large",
        summary="The config file, with every alias written out, is not larger than any config can be.",
        fix="Write it out without aliases, or shorter.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.too-many",
        summary="Not more places of one file are wrong than findings report.",
        fix="Correct the places that are reported, or write the file again.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.unknown-extension",
        summary="The extension of the config file says its format.",
        fix="Name it with one of .toml, .yaml, .yml, .json.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.unrecognised",
        summary="The keys of the config file tell whose it is.",
        fix="Say whose it is: --from on the command line, import_config(path, kind) in Python.",
        raised_by=_CONFIG_FILE,
    ),
    Refusal(
        id="config.unreadable",
        summary="The config file is there and may be read.",
        fix="Give the path of a config file.",
        raised_by=_CONFIG_FILE,
    ),
)
"""Reporting order: file by file."""


# --- checkpoints and exports ---

_SAVE, _RESUME, _EXPORTS = "ready.save, ready.checkpoints.check", "ready.resume", "ready.export"

_CHECKPOINTS: tuple[Refusal, ...] = (
    Refusal(
        id="checkpoint.not-written",
        summary="Every rank can write its part of a checkpoint.",
        fix="Mend what the error names, such as a full disk; the last whole checkpoint of the folder is untouched.",
        raised_by=_SAVE,
    ),
    Refusal(
        id="checkpoint.not-shared",
        summary="Rank 0 sees the files of all ranks.",
        fix="Give a folder on a file system that all ranks share.",
        raised_by=_SAVE,
    ),
    Refusal(
        id="checkpoint.not-plain",
        summary="What schedulers and loaders keep is plain data, which can be read again without running any code.",
        fix="Keep numbers, texts, lists, dicts and tensors in it, or leave it out of its state_dict().",
        raised_by=_SAVE,
    ),
    Refusal(
        id="checkpoint.not-read",
        summary="Every rank can read its part of a checkpoint.",
        fix="Mend what the error names. Some of the model may have been read: prepare it again before going on.",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.not-there",
        summary="There is a whole checkpoint in the folder.",
        fix="Give the folder that ready.save() wrote; missing_ok=True begins anew where nothing was ever saved.",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.damaged",
        summary="Every byte of a checkpoint is as it was written.",
        fix="Go on from an older checkpoint of the folder, or restore the files from a copy.",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.other-format",
        summary="This version of prepkit reads the checkpoint's format.",
        fix="Read it with the version that wrote it.",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.foreign",
        summary="A checkpoint holds tensors and plain data, and names no file outside of its folder.",
        fix="Do not use the file: no checkpoint of prepkit or torch is made so. Nothing in it was run.",
        raised_by=_RESUME,
    ),
    Refusal(
        id="checkpoint.deepspeed-state",
        summary="What DeepSpeed keeps can be told apart by parameter.",
        fix="Save and load in DeepSpeed's own format, by ready.model.save_checkpoint and load_checkpoint.",
        raised_by="ready.save, ready.resume, pk.fingerprints",
    ),
    Refusal(
        id="prove.record",
        summary="The record of a window is whole, and of a format that this version reads.",
        fix="Record the window again; a record is read by the version of prepkit that has written it.",
        raised_by="pk.prove, prepkit audit --prove",
    ),
    Refusal(
        id="export.not-written",
        summary="Rank 0 can write the whole model.",
        fix="Mend what the error names, or give another folder; the run is as it was.",
        raised_by=_EXPORTS,
    ),
    Refusal(
        id="export.incomplete",
        summary="What was exported holds all that was trained.",
        fix="Keep the run: ready.save has everything, and what it wrote can be resumed and exported.",
        raised_by=_EXPORTS,
    ),
    Refusal(
        id="export.split-layers",
        summary="DeepSpeed has not split the layers over the ranks.",
        fix="Write ready.model.save_16bit_model(folder).",
        raised_by=_EXPORTS,
    ),
)
"""Every one, in the order of a run: written, found, read, exported."""


# --- all ---

_APPLY = "pk.apply, prepkit.applying.run"
_MODEL_OPTION = "prepkit plan, check, rehearse and report with --model"

_GATE: tuple[Refusal, ...] = (
    Refusal(
        id="gate.exception",
        summary="A comment that names prepkit's ignore is an exception that prepkit reads.",
        fix="Write # prepkit: ignore[RULE] until 2027-01-01 by WHO because REASON.",
        raised_by="prepkit gate",
    ),
    Refusal(
        id="gate.exception-ended",
        summary="The day of an exception has not passed.",
        fix="Mend what the rule finds, or write another day.",
        raised_by="prepkit gate",
        severity=Severity.WARNING,
    ),
    Refusal(
        id="gate.exception-owner",
        summary="Somebody owns every exception.",
        fix="Write by WHO before because.",
        raised_by="prepkit gate",
        severity=Severity.NOTE,
    ),
    Refusal(
        id="gate.exception-unused",
        summary="Every exception excepts something.",
        fix="Remove it.",
        raised_by="prepkit gate",
        severity=Severity.NOTE,
    ),
    Refusal(
        id="policy.broken",
        summary="A policy can be read, and its rules can be asked.",
        fix="Mend the line that the finding names: nothing passes until then.",
        raised_by="prepkit gate --policy, prepkit plan --policy",
    ),
)

REFUSALS: tuple[Refusal, ...] = (
    *_FILES,
    *_GATE,
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
        fix="Plan with weights=LoadWeights(path), InitWeights() or BroadcastWeights(), or build the model off meta.",
        raised_by=_APPLY,
    ),
    Refusal(
        id="ema.zero3",
        summary="Parameters are where their average can be taken.",
        fix="Average under FSDP2, or at ZeRO 0 to 2.",
        raised_by="pk.Ema",
    ),
    Refusal(
        id="sigterm.other-thread",
        summary="Signals are handled in the main thread.",
        fix="Call save_on_sigterm in the main thread.",
        raised_by="pk.processes.save_on_sigterm",
    ),
    *_CHECKPOINTS,
)
"""Every refusal, in the order in which a user may meet them: files, calls, live objects."""
