"""Where the parameters' values come from: a checkpoint that fits the model, or initialisers that the model has."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.config import FP8, DeepSpeed, KeepWeights, LoadWeights, SendWeights, Single, TorchAO
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.resolve.checkpoint import without_initializer
from prepkit.resolve.resolved import Resolved
from prepkit.rules import weights_match
from prepkit.rules.rule import Hit, Rule

_FLOAT8 = "FP8(backend=TorchAO()), whose layers keep the weights as they are"


def _unfilled(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if isinstance(cfg.weights, KeepWeights):
        return
    asked_for, name = f"`{type(cfg.weights).__name__}`", type(cfg.engine).__name__
    if isinstance(cfg.weights, SendWeights) and isinstance(cfg.engine, Single):
        what = f"{asked_for} with {name}, where there is no other rank to send to."
        yield Hit("config.weights", what, "Leave config.weights out: the model keeps its values.")
    elif not resolved.engine_traits.gives_values:
        yield Hit("config.weights", f"{asked_for} with {name}, which takes the values that the model has.")
    if isinstance(cfg.precision, FP8) and not isinstance(cfg.precision.backend, TorchAO):
        library = type(cfg.precision.backend).__name__
        what = f"{asked_for} with {library}, whose layers are made from the values that are there."
        yield Hit("config.weights", what, f"Give the model its values, and leave config.weights out; or use {_FLOAT8}.")
    if isinstance(cfg.engine, DeepSpeed):
        if divided := [param.name for param in facts.model.params if param.cls == "ZeroParameter"]:
            what = f"{asked_for} for {count(len(divided), 'parameter')} that zero.Init has divided already."
            yield Hit(at(divided[0]), what, f"Build the model with torch.device('meta') in its place; or {_KEEP}.")
        for what, fix in _deepspeed_parts(resolved):
            yield Hit("config.weights", f"{asked_for} with {what}", f"{fix}; or {_GIVE}.")
    if facts.model.quantised:
        yield Hit("config.weights", f"{asked_for} for a {facts.model.quantised} model, whose values are packed.")
    elif len(facts.model.device_map) > 1:
        yield Hit("config.weights", f"{asked_for} for a model that a device map has spread over several devices.")


_KEEP = "leave config.weights out, and load what is divided with the library that divided it"
_GIVE = "give the model its values, and leave config.weights out"


def _deepspeed_parts(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """Layouts of DeepSpeed's whose parts are made from values that are there, with what to write instead."""
    config = resolved.deepspeed
    if resolved.axis_size("tensor") > 1:
        yield "`tensor_parallel`, which cuts the values that the layers have.", "Remove `tensor_parallel`"
    if config.stage != 3:
        return
    said = {".".join(setting.path).removeprefix("zero_optimization."): setting.value for setting in config.settings}
    if said.get("offload_param.device") == '"nvme"':
        yield "parameters on NVMe, where DeepSpeed writes the values that they have.", 'Write offload_param="cpu"'
    if said.get("zero_hpz_partition_size", "1") not in ("0", "1"):
        yield (
            "`zero_hpz_partition_size`, a second copy of the values that are there.",
            _remove("zero_hpz_partition_size"),
        )
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if said.get(key) == "true":
            yield f"`{key}`, which quantises the values that are there.", _remove(key)


def _remove(key: str) -> str:
    return f"Remove `zero_optimization.{key}`"


def _state(resolved: Resolved) -> Iterator[Hit]:
    optimizer = resolved.facts.optimizer
    if isinstance(resolved.cfg.weights, SendWeights) and optimizer is not None and optimizer.stateful:
        what = "`SendWeights` sends what the model holds; the optimizer's state of"
        yield Hit("optimizer", f"{what} {some(optimizer.stateful)} is not sent.")


def _unseen(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if isinstance(resolved.cfg.weights, LoadWeights) and resolved.values.checkpoint is None:
        seen = f"the facts are about `{facts.checkpoint.path}`" if facts.checkpoint else "the facts hold no checkpoint"
        yield Hit("config.weights.path", f"`{resolved.cfg.weights.path}` is to be loaded, but {seen}.")


def _unreadable(resolved: Resolved) -> Iterator[Hit]:
    if (checkpoint := resolved.values.checkpoint) is not None:
        for problem in checkpoint.problems:
            yield Hit(f"checkpoint.{problem.file}", f"`{problem.file}` in `{checkpoint.folder}`: {problem.what}.")


def _uninitialized(resolved: Resolved) -> Iterator[Hit]:
    names = without_initializer(resolved.facts.model, resolved.values.initialized_params)
    if names:
        what = f"Nothing initialises {count(len(names), 'parameter')}: {some(names)}. "
        yield Hit(
            at(names[0]), what + "Their modules have no reset_parameters(), and nothing above has _init_weights()."
        )


def _buffers(resolved: Resolved) -> Iterator[Hit]:
    names = without_initializer(resolved.facts.model, resolved.values.computed_buffers)
    if names:
        what = f"Nothing computes {count(len(names), 'buffer')} that no checkpoint holds: {some(names)}."
        yield Hit(at(names[0]), what + " Where they are on meta, apply refuses the model.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="weights.not-filled",
        summary="Values are given to plain models, by engines that fill them shard by shard or whole.",
        check=_unfilled,
        fix="Give the model its values before it is prepared, and leave config.weights out; or use FSDP2, "
        "FSDP1, TensorParallel, DDP, DeepSpeed or Single.",
        overridable=False,
        source=("M2-13", "PL-3", "Q-13"),
    ),
    Rule(
        id="weights.state-not-sent",
        summary="An optimizer has no state yet where rank 0 sends the weights.",
        check=_state,
        fix="Write optimizer=AdamW(...), which is created after sharding, or pass an optimizer that has not stepped; a "
        "run that goes on is resumed with ready.resume(folder).",
        overridable=False,
        source=("M2-13", "P2-14"),
    ),
    Rule(
        id="weights.not-seen",
        summary="The checkpoint that is to be loaded is in the facts.",
        check=_unseen,
        fix="Plan with the model itself, which reads the headers of the files; or observe it with checkpoint=path.",
        overridable=False,
        source=("issue of weights from a checkpoint",),
    ),
    Rule(
        id="weights.unreadable",
        summary="Every file of the checkpoint is there and whole, and its index is right.",
        check=_unreadable,
        fix="Restore the file, or name another checkpoint in config.weights.",
        overridable=False,
        source=("safetensors format",),
    ),
    *weights_match.RULES,
    Rule(
        id="weights.no-initialiser",
        summary="What is to be initialised has a reset_parameters, or an _init_weights above it.",
        check=_uninitialized,
        fix="Give the module a reset_parameters() that writes what it holds, or load the weights: LoadWeights(path).",
        overridable=False,
        source=("G-5", "pain 17"),
    ),
    Rule(
        id="weights.buffer-not-computed",
        summary="Buffers that no checkpoint holds are computed by their module, should they be on meta.",
        check=_buffers,
        fix="Build the buffers outside torch.device('meta'), or write them in the module's reset_parameters().",
        severity=Severity.WARNING,
        source=("pain 17", "H-18"),
    ),
)
"""Reporting order: whether there is a checkpoint, whether it fits, then what the model can do by itself."""
