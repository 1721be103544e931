"""Findings of files: those that prepkit wrote, other libraries', and configs."""

from __future__ import annotations

from prepkit.findings import Severity
from prepkit.findings.refusal import Refusal

_DATA = "pk.load, pk.read_config, prepkit.codec"
_PLAN_FILE = "pk.load, prepkit show, prepkit diff"
_CONFIG_FILE = "pk.read_config, prepkit plan, prepkit check"
_IMPORT = "pk.import_config, prepkit import, prepkit plan, prepkit check"
_EXPORT = "pk.export_config, prepkit export"

REFUSED_FILES: tuple[Refusal, ...] = (
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
