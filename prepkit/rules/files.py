"""Rows about files: what prepkit reads and writes, what it imports, and what a team writes for its gate."""

from __future__ import annotations

from functools import partial

from prepkit.findings import Severity
from prepkit.rules.rule import Moment, Rule

refusal = partial(Rule, at=(Moment.CALL,), overridable=False)
"""A row that no look asks."""

_data = partial(refusal, told_by="pk.load, pk.read_config, prepkit.codec")
_plan_file = partial(refusal, told_by="pk.load, prepkit show, prepkit diff")
_config_file = partial(refusal, told_by="pk.read_config, prepkit plan, prepkit check")
_import = partial(refusal, told_by="pk.import_config, prepkit import, prepkit plan, prepkit check")
_check = partial(refusal, told_by="prepkit check, prepkit gate")
_export = partial(refusal, told_by="pk.export_config, prepkit export")

_gate = partial(refusal, told_by="prepkit gate")

_GATE: tuple[Rule, ...] = (
    _gate(
        id="gate.exception",
        summary="A comment that names prepkit's ignore is an exception that prepkit reads.",
        fix="Write # prepkit: ignore[RULE] until 2027-01-01 by WHO because REASON.",
    ),
    _gate(
        id="gate.exception-ended",
        summary="The day of an exception has not passed.",
        fix="Mend what the rule finds, or write another day.",
        severity=Severity.WARNING,
    ),
    _gate(
        id="gate.exception-owner",
        summary="Somebody owns every exception.",
        fix="Write by WHO before because.",
        severity=Severity.NOTE,
    ),
    _gate(
        id="gate.exception-unused",
        summary="Every exception excepts something.",
        fix="Remove it.",
        severity=Severity.NOTE,
    ),
    _gate(
        id="policy.broken",
        summary="A policy can be read, and its rules can be asked.",
        fix="Mend the line that the finding names: nothing passes until then.",
        told_by="prepkit gate --policy, prepkit plan --policy",
    ),
    _gate(
        id="policy.unasked",
        summary="A policy that is named is asked of a plan.",
        fix="Make the plan, and name it beside the policy.",
        told_by="prepkit gate --policy",
    ),
)

_doctor = partial(refusal, told_by="prepkit doctor")
_log = partial(refusal, told_by="pk.apply(log=...), prepkit log, prepkit blame")

_MACHINE: tuple[Rule, ...] = (
    _doctor(
        id="machine.library-too-old",
        summary="Every library that is installed is as new as the oldest that prepkit was tried with.",
        fix="Install a newer one.",
    ),
    _doctor(
        id="machine.torch-broken",
        summary="torch can be imported, and sees the devices that are here.",
        fix="Mend what the error names, such as the driver, or install torch anew.",
    ),
)

_LOG: tuple[Rule, ...] = (
    _log(
        id="log.torn",
        summary="Every entry of a log is as it was written, behind the one that was written before it.",
        fix="Restore the file from a copy, or begin another log: nothing is written behind what is torn.",
    ),
    _log(
        id="log.cut",
        summary="The log still has the entry whose digest was kept elsewhere.",
        fix="Restore the file from a copy: entries were cut off, or written anew.",
        told_by="prepkit log --has",
    ),
    _log(
        id="log.unreadable",
        summary="The log is there, and is a file that can be read and written.",
        fix="Give the path of a file in a folder that is there.",
    ),
)

FILES: tuple[Rule, ...] = (
    *_GATE,
    *_MACHINE,
    *_LOG,
    # --- files that prepkit wrote ---
    _data(id="codec.damaged", summary="The file is UTF-8 text in JSON.", fix="Restore the file, or plan again."),
    _data(id="codec.duplicate-key", summary="No key appears twice in one object.", fix="Keep one of them."),
    _plan_file(
        id="codec.edited",
        summary="The contents of a saved plan or attestation have the digest that was written with them.",
        fix="Change the config and plan again; a plan is not edited by hand.",
    ),
    _plan_file(
        id="codec.foreign",
        summary="The file says of itself that it is a plan or an attestation of prepkit.",
        fix="Give a file that pk.save(plan, path) wrote.",
    ),
    _plan_file(
        id="codec.inconsistent",
        summary="The parts of a saved plan fit each other: indices lead somewhere, axes multiply to the ranks.",
        fix="Plan again; a plan is not edited by hand.",
    ),
    _data(
        id="codec.missing-key",
        summary="Every key without a default is there.",
        fix="Add the key; the finding says what stands under it.",
    ),
    _plan_file(
        id="codec.other-format",
        summary="The file has the format number that this prepkit reads.",
        fix="Use the prepkit that wrote the file, or plan again with this one.",
    ),
    _plan_file(
        id="codec.too-large",
        summary="The file is not larger than any plan can be.",
        fix="Give the path of a plan file.",
    ),
    _data(
        id="codec.too-many",
        summary="Not more places of one list or object are wrong than findings report.",
        fix="Correct the places that are reported, or write the file again.",
    ),
    _data(
        id="codec.unknown-key",
        summary="Every key is one that the value has.",
        fix="Write the name that is proposed, or remove the key.",
    ),
    _data(
        id="codec.unknown-kind",
        summary="A kind is the name of a class that may stand in that place.",
        fix="Write one of the names that the finding lists.",
    ),
    _plan_file(
        id="codec.unreadable",
        summary="The file is there and may be read.",
        fix="Give the path of a plan file.",
    ),
    _plan_file(
        id="codec.wrong-keys",
        summary="An attestation file has the keys of an attestation file, and no others.",
        fix="Restore the file.",
    ),
    _data(
        id="codec.wrong-type",
        summary="Every value has the type of its field; none is turned into another.",
        fix="Write the type that the finding names.",
    ),
    _data(
        id="codec.wrong-value",
        summary="Every value is one that its field allows, and that JSON has.",
        fix="Write one of the values that the finding names.",
    ),
    # --- other libraries' files ---
    _import(
        id="import.asks-machine",
        summary="No key of an imported config leaves it to the machine that it runs on what is done.",
        fix="Write what is meant.",
        severity=Severity.WARNING,
        lawful="that library asks the machine",
    ),
    _import(
        id="import.contradiction",
        summary="No two keys of an imported config say different things of one setting.",
        fix="Keep one of them.",
        milder="where that library goes on all the same",
    ),
    _import(
        id="import.elsewhere",
        summary="A file that an imported config points to lies where it can be read.",
        fix="Check it where it runs, or give the path of a copy that is here.",
        lawful="the file may lie where it runs",
    ),
    _import(
        id="import.fork-key",
        summary="An imported config has no key that only a fork of its library would read.",
        fix="Remove the key where no fork is meant.",
        severity=Severity.WARNING,
        lawful="a fork of that library may read it",
    ),
    _import(
        id="import.missing-file",
        summary="A file that an imported config points to is there.",
        fix="Give its path, from where you are or from the file that points to it.",
    ),
    _import(
        id="import.no-effect",
        summary="Every key of an imported config does something where it stands.",
        fix="Remove the key.",
        severity=Severity.WARNING,
    ),
    _import(
        id="import.not-supported",
        summary="An imported config asks for what prepkit does.",
        fix="Write the nearest way that the finding names.",
        lawful="that library does it",
        milder="where its own models do it, and others do not",
    ),
    _import(
        id="import.unknown-key",
        summary="Every key of an imported config is one that its library knows.",
        fix="Write the name that is proposed, or remove the key.",
        milder="where an older release knows it",
    ),
    _import(
        id="import.wrong-type",
        summary="Every value of an imported config has the type that its library takes.",
        fix="Write the type that the finding names.",
        milder="where another of its readers takes it for what it should be",
    ),
    _import(
        id="import.wrong-value",
        summary="Every value of an imported config is one that its library knows.",
        fix="Write one of the values that the finding names.",
        milder="where what it means is clear all the same",
    ),
    _check(
        id="check.crashed",
        summary="prepkit reads a file to its end, whatever is in it.",
        fix="Report it, with the traceback on stderr and the file: the error is prepkit's own.",
    ),
    _check(
        id="launch.gpus",
        summary="A script starts no more processes on a node than there are GPUs for them.",
        fix="Start fewer, or ask for more.",
    ),
    _check(
        id="launch.nodes",
        summary="A script waits for the machines that there are, and starts a launcher on each that finds the others.",
        fix="Write the same number in both places.",
    ),
    _check(
        id="launch.processes",
        summary="The processes that accelerate launch is told of can be divided over its machines.",
        fix="Write the processes of all machines together.",
    ),
    _check(
        id="launch.twice",
        summary="Either srun or the launcher starts the processes of a node.",
        fix="Write #SBATCH --ntasks-per-node=1.",
    ),
    _check(
        id="launch.cut",
        summary="A command that goes over several lines goes to its end.",
        fix="End each of its lines but the last with a backslash, and put comments above it.",
    ),
    _check(
        id="launch.two-places",
        summary="The arguments of a script say what the config of its launcher says.",
        fix="Write the same in both places.",
        severity=Severity.WARNING,
        source=("transformers Trainer.propagate_args_to_deepspeed", "accelerate Accelerator._prepare_deepspeed"),
    ),
    _check(
        id="launch.unknown-option",
        summary="Every option before the name of a script is one that its launcher has.",
        fix="Write the name that is proposed.",
    ),
    _check(
        id="launch.refused-option",
        summary="Every option before the name of a script has a value that its launcher takes beside the others.",
        fix="Write a value that the launcher takes, or keep one of the two.",
    ),
    _export(
        id="export.not-expressible",
        summary="Every setting of an exported config is one that the other library's file can say.",
        fix="Write what it can say, or leave it out with partial=True (--partial) and see to it in your script.",
    ),
    _export(
        id="export.unknown-extension",
        summary="An exported file has an extension that its library reads.",
        fix="Name it with one of the extensions that the finding names.",
    ),
    _export(
        id="export.unknown-library",
        summary="The library that a config is exported to is one of those that there is an exporter for.",
        fix="Write accelerate, deepspeed or transformers.",
    ),
    # --- config files ---
    _config_file(
        id="config.damaged",
        summary="The config file is UTF-8 text in the format that its extension says.",
        fix="Mend the file at the line and column that the finding names.",
    ),
    _config_file(
        id="config.duplicate-key",
        summary="No key appears twice in one mapping of a YAML file.",
        fix="Keep one of them.",
    ),
    _config_file(id="config.empty", summary="The config file says something.", fix="Write at least the engine."),
    _config_file(
        id="config.not-a-mapping",
        summary="The top level of the config file is a mapping of config fields.",
        fix="Write fields such as 'engine' at the top level.",
    ),
    _config_file(
        id="config.recursive",
        summary="No value of a YAML file contains itself through an alias.",
        fix="Write it out without the alias.",
    ),
    _config_file(
        id="config.too-large",
        summary="The config file, with every alias written out, is not larger than any config can be.",
        fix="Write it out without aliases, or shorter.",
    ),
    _config_file(
        id="config.too-many",
        summary="Not more places of one file are wrong than findings report.",
        fix="Correct the places that are reported, or write the file again.",
    ),
    _config_file(
        id="config.unknown-extension",
        summary="The extension of the config file says its format.",
        fix="Name it with one of .toml, .yaml, .yml, .json.",
    ),
    _config_file(
        id="config.unrecognised",
        summary="The keys of the config file tell whose it is.",
        fix="Say whose it is: --from on the command line, import_config(path, kind) in Python.",
    ),
    _check(
        id="config.unasked",
        summary="Every rule that can be asked of a config is asked.",
        fix="Correct the errors of the file, and check it again.",
        severity=Severity.NOTE,
        lawful="its errors are told, and what else it means is not known while they stand",
    ),
    _config_file(
        id="config.unreadable",
        summary="The config file is there and may be read.",
        fix="Give the path of a config file.",
    ),
)
"""Reporting order: file by file."""
