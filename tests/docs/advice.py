"""What a reader does about an error: for exceptions, and for findings that no rule makes."""

from __future__ import annotations

EXCEPTIONS: dict[str, tuple[str, str]] = {
    "PlanRejected": (
        "`build_plan`, `load`, `read_config` and `apply` raise it. Nothing live has been touched. `findings` is a tuple with every reason "
        "at once, errors and warnings.",
        "Read each finding's `fix`: it says what to type. `prepkit rules ID` explains a rule; ids that it does not know stand below. "
        "Where you know better than a rule, put its id into `overrides`.",
    ),
    "ApplyHalted": (
        "`apply` raises it when a step fails. `halted` says which step, what was undone and what stands; `__cause__` is what the step raised. "
        "On the other ranks the cause is `RankFailed`.",
        'If the message ends with "everything is as it was", mend the cause and apply the plan again. If it names something that '
        "stands, such as shards, build model and optimizer anew first. A process group that you had started yourself may have been "
        "ended, so that no rank waits in it for one that has failed; the message says so, and you start it again.",
    ),
    "NotAsPlanned": (
        "Every step was done, and what stands there is not what the plan says: a defect of prepkit or of torch. "
        "`attestation.failed` holds each difference, and what has a way back was taken back.",
        "Build model and optimizer again before the next `apply`. Report it with the plan file and the attestation, "
        '`pk.save(error.attestation, "attestation.json")`.',
    ),
    "RankFailed": (
        "Another rank could not go on, so this one did not either. `rank` is the first one that failed, -1 where it is not known.",
        "Look at the log of that rank: its error is the cause, and this message repeats its text.",
    ),
    "Disagreement": (
        "The ranks do not hold the same plan and model. It is raised on every rank before anything is changed; `odd` are the ranks outside the "
        "majority, `details` says how each differs.",
        'Save the plan on two of these ranks, `pk.save(plan, f"plan-{rank}.json")`, and run `prepkit diff` on the files. '
        "The usual causes: another config or environment variable on one node, or a model that is built from a random choice.",
    ),
}
"""Exception to when it is raised, and what to do."""

_RESTORE = "Restore the file from where it came, or make the plan again."
_MEND = "Mend the file at the place that the finding names."

ADVICE: dict[str, tuple[str, str]] = {
    "cli.no-such-model": (
        "What `--model` names is no importable function without arguments that returns a module.",
        "Write `package.module:name`, and start the command where `package` can be imported, or put its folder into `PYTHONPATH`.",
    ),
    "codec.damaged": ("A file is not JSON, or nested too deeply; the message has line and column.", _RESTORE),
    "codec.duplicate-key": ("A key stands twice in one object.", "Keep one of them."),
    "codec.edited": (
        "A plan or attestation was changed by hand: its digest does not fit its content.",
        "Change the config and plan again; a plan is never edited. `pk.patch(plan, changes)` makes a changed plan as a value.",
    ),
    "codec.foreign": ("The file is JSON, but no plan or attestation.", "Give a file that `pk.save(plan, path)` wrote."),
    "codec.missing-key": ("An object lacks a key that it cannot do without.", "Add the key that the fix names; for a plan file: " + _RESTORE),
    "codec.other-format": (
        "The file was written in another format of plan files, by a newer or older prepkit.",
        "Install the prepkit that the message names, or make the plan again.",
    ),
    "codec.too-large": ("The file is larger than any plan.", "Give the path of a plan file."),
    "codec.too-many": ("A file has more wrong places than are listed.", "Mend those that are listed first, or write the file anew."),
    "codec.unknown-key": (
        "An object has a key that its class does not have. The fix names the nearest one that it has.",
        "Write the name in the fix, or remove the key. [The configuration reference](config.md) has all of them.",
    ),
    "codec.unknown-kind": ("`kind` names no class that may stand there.", "Write one of the names in the message."),
    "codec.unreadable": ("The file cannot be read, or is not there.", "Give the path of a plan file."),
    "codec.wrong-keys": ("An attestation has keys that it should not have, or lacks some.", _RESTORE),
    "codec.wrong-type": ("A value has another type than its field.", "Write a value of the type that the fix names."),
    "codec.wrong-value": ("A value has the right type, and is not allowed.", "Write one of the values in the fix."),
    "config.damaged": ("A config file is not TOML, YAML or JSON; the message has line and column.", _MEND),
    "config.duplicate-key": ("A key stands twice in one table.", "Keep one of them."),
    "config.empty": ("A config file is empty, or holds comments only.", "Write at least the engine, such as `engine = \"FSDP2\"`."),
    "config.not-a-mapping": ("The top level of a config file is a list or a value.", "Write fields such as `engine` at the top level."),
    "config.recursive": ("A YAML alias contains itself.", "Write the value out without the alias."),
    "config.unknown-extension": ("The extension of a config file says no format.", "Name it `.toml`, `.yaml`, `.yml` or `.json`."),
    "config.unreadable": ("A config file cannot be read, or is not there.", "Give the path of a config file."),
    "diff.does-not-fit": (
        "`pk.patch` was given changes that were taken from another plan.",
        "Patch the plan that the changes were taken from.",
    ),
    "model.not-built": (
        "The function that `--model` names raised an error of its own; file and line are in the message.",
        "Run the command in the fix to see the whole traceback.",
    ),
    "optimizer.two-places": (
        "The config has an optimizer, and `build_plan` was given another one.",
        "Give it in one place.",
    ),
    "plan.model-changed": (
        "The model is the plan's, and has changed since: devices, `requires_grad`, wrappers, training mode.",
        "Undo the change, or plan again with the model as it is now.",
    ),
    "plan.no-weights": (
        "The model is on the meta device: it has shapes and no values, and the plan does not say where they come from.",
        "Plan with `weights=LoadWeights(path)`, `InitWeights()` or `SendWeights()` ([how](../howto/weights.md)), or build the model with values.",
    ),
    "plan.other-environment": (
        "The launch is another than the plan's: world size, device, processes per node.",
        "Launch as the plan says, or plan again for this launch.",
    ),
    "plan.other-model": (
        "The model has other names, shapes, dtypes or ties than the plan's.",
        "Apply the plan to the model that it was made for, or plan again for this one.",
    ),
}  # fmt: skip
"""Id to when a finding has it, and what to do."""
