"""The model itself: modes, ties, dtypes, values, and what stands inside it and trains otherwise than it seems."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule

LOGITS = {
    "cross_entropy": "Leave the softmax out: it takes logits.",
    "binary_cross_entropy_with_logits": "Leave the sigmoid out: it takes logits.",
    "nll_loss": "Write log_softmax in the place of softmax.",
}
"""What a loss takes."""


def _drops(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.frozen_drops:
        what = f"Frozen, and in training mode with dropout: {some(facts.frozen_drops)}. What it gives is random."
        yield Hit(at(facts.frozen_drops[0]), what)
    for name in facts.window.drops_resting if facts.window is not None else ():
        what = f"{name} is called without gradients, is in training mode, and drops elements: what it gives is random."
        yield Hit("model", what, f"Call .eval() on the {name}.")


def _norms(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.frozen_norms:
        what = f"Frozen, and its batch norms go on to average what they see: {some(facts.frozen_norms)}."
        yield Hit(at(facts.frozen_norms[0]), what)


def _forgetful(facts: RunFacts) -> Iterator[Hit]:
    if facts.forgetful:
        what = f"Checkpointed with preserve_rng_state=False over dropout: {some(facts.forgetful)}."
        yield Hit(at(facts.forgetful[0]), f"{what} Backward drops other elements than forward did.")
    elif facts.window is not None and facts.window.forgetful:
        what = f"Checkpointed with preserve_rng_state=False, and draws random numbers: {some(facts.window.forgetful)}."
        yield Hit("model", f"{what} Backward draws others than forward did.")


def _renormalised(facts: RunFacts) -> Iterator[Hit]:
    if facts.renormalised:
        what = f"Checkpointed over batch norms, which average each batch twice: {some(facts.renormalised)}."
        yield Hit(at(facts.renormalised[0]), what)
    elif facts.window is not None and facts.window.renormalised:
        what = f"Checkpointed over batch norms, which average each batch twice: {some(facts.window.renormalised)}."
        yield Hit("model", what)


def _softmax(facts: RunFacts) -> Iterator[Hit]:
    if facts.softmax:
        yield Hit(at(facts.softmax), "The model ends with a softmax, and its CrossEntropyLoss takes another one.")
    for loss, before in facts.window.squashed if facts.window is not None else ():
        if before.endswith("mm"):
            what = f"{loss} was given what a linear layer computes, and takes logarithms of probabilities."
            yield Hit("loss", what, "Write cross_entropy in its place, or log_softmax before it.")
        else:
            yield Hit("loss", f"{loss} was given what has gone through a {before} already.", LOGITS[loss])


def _off(facts: RunFacts) -> Iterator[Hit]:
    if facts.adapters is not None and facts.adapters.off:
        names = facts.adapters.off
        what = f"{count(len(names), 'adapter')} train, and are disabled or merged: {some(names)}. None gets a gradient."
        yield Hit(at(names[0]), what)


def _zero(facts: RunFacts) -> Iterator[Hit]:
    if facts.adapters is not None and facts.adapters.zero:
        names = facts.adapters.zero
        what = f"{count(len(names), 'adapter')} with a scale of 0: {some(names)}. Neither matrix gets a gradient."
        yield Hit(at(names[0]), what)


def _base(facts: RunFacts) -> Iterator[Hit]:
    if facts.adapters is not None and facts.adapters.base:
        names = facts.adapters.base
        what = f"{count(len(names), 'layer')} train beside their adapters: {some(names)}."
        yield Hit(at(names[0]), f"{what} Saving the adapter saves none of it.")


def _head(facts: RunFacts) -> Iterator[Hit]:
    if facts.adapters is not None and facts.adapters.heads and facts.optimizers:
        names = facts.adapters.heads
        yield Hit(at(names[0]), f"Adapters train, and the head of the task is frozen: {some(names)}.")


_INSIDE: tuple[Rule, ...] = (
    Rule(
        id="run.checkpoint-forgets",
        summary="What is recomputed is what forward computed.",
        check=_forgetful,
        at=(Moment.AUDIT,),
        fix="Leave preserve_rng_state at True.",
        source=("torch.utils.checkpoint",),
    ),
    Rule(
        id="run.softmax-twice",
        summary="A loss takes what the model computes as it is meant.",
        check=_softmax,
        at=(Moment.AUDIT,),
        fix="End the model with the linear layer: CrossEntropyLoss takes logits.",
        source=("torch CrossEntropyLoss",),
    ),
    Rule(
        id="run.adapters-off",
        summary="Adapters that train are in use.",
        check=_off,
        at=(Moment.AUDIT,),
        fix="Call model.unmerge_adapter() and model.enable_adapter_layers() before training.",
        source=("peft BaseTunerLayer",),
    ),
    Rule(
        id="run.adapters-zero",
        summary="Adapters have a scale.",
        check=_zero,
        at=(Moment.AUDIT,),
        fix="Give lora_alpha a value above 0, and call no set_scale(..., 0).",
        source=("peft LoraLayer",),
    ),
    Rule(
        id="run.adapters-base",
        summary="What lies under an adapter is frozen.",
        check=_base,
        at=(Moment.AUDIT,),
        fix="Freeze it, or name it in modules_to_save so that it is saved.",
        severity=Severity.WARNING,
        source=("peft",),
    ),
    Rule(
        id="run.head-frozen",
        summary="A task's head trains with the adapters.",
        check=_head,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Write LoraConfig(task_type='SEQ_CLS') or modules_to_save=['score']; nothing, where it was trained before.",
        severity=Severity.WARNING,
        source=("peft LoraConfig.modules_to_save",),
    ),
    Rule(
        id="run.frozen-drops",
        summary="What is frozen gives the same for the same input.",
        check=_drops,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call .eval() on it after each model.train().",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.frozen-norms",
        summary="Batch norms of what is frozen rest.",
        check=_norms,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call .eval() on it after each model.train().",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.checkpoint-norms",
        summary="A batch norm averages each batch once.",
        check=_renormalised,
        at=(Moment.AUDIT,),
        fix="Checkpoint what stands beside them, or write momentum = 1 - (1 - momentum) ** 0.5 for theirs.",
        severity=Severity.WARNING,
        source=("torch.utils.checkpoint",),
    ),
)
"""Reporting order: what trains otherwise, then what is odd."""


def _eval(facts: RunFacts) -> Iterator[Hit]:
    sleeping = (*facts.dropout, *facts.normalised)
    if facts.optimizers and not facts.training and sleeping:
        what = f"The model is in evaluation mode, and so {count(len(sleeping), 'module')} not in use: {some(sleeping)}."
        yield Hit("model", what)


def _part_in_eval(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.evaluating:
        what = f"Modules with dropout and trained parameters are in evaluation mode: {some(facts.evaluating)}."
        yield Hit(at(facts.evaluating[0]), what)


_ASSIGNED = "Tie them after the load, as by head.weight = embedding.weight, and make the optimizer after that."
_ONE_UNIT = "Leave both in one unit, that of the root or of a module around them; layers that are cut, tie behind it."
_OVER_STAGES = "Sum the gradients of both before each step: dist.all_reduce(table.grad, group=...) of these ranks."
_AGAIN = "Call model.tie_weights() after what replaced one of them, and make the optimizer again."


def _untied(facts: RunFacts) -> Iterator[Hit]:
    """Since an earlier look, since before apply, or while a script ran."""
    for first, second, by in facts.window.untied if facts.window is not None else ():
        what = f"{by} has made two tensors of `{first}` and `{second}`, which were one parameter: they train apart."
        yield Hit(at(second), what, _AGAIN if by == "to_empty" else _ASSIGNED if by.startswith("load") else _ONE_UNIT)
    for name, other, rank in facts.window.tied_over if facts.window is not None else ():
        what = f"It begins as `{other}` of rank {rank} does, one a table to look up in and the other none, and each"
        what = f"{what} is about to step by a gradient of its own: a tie over stages."
        yield Hit(at(name), what, _OVER_STAGES, milder=True)
    for before, now in facts.running:
        held = [set(group) for group in now.ties]
        for group in before.ties:
            if not any(set(group) <= one for one in held):
                what = f"{' and '.join(f'`{name}`' for name in group)} are no longer one parameter."
                yield Hit(at(group[0]), what, _AGAIN)


def _tie(facts: RunFacts) -> Iterator[Hit]:
    yield from (told := list(_untied(facts)))
    if told or facts.running:
        return
    model = facts.model
    ends = (model.input_embedding, model.output_embedding)
    flat = any("fsdp1" in param.averaged_by for param in facts.params)
    if not model.architecture.tie_word_embeddings or None in ends or ends[0] == ends[1] or flat:
        return  # FSDP1's views have no identity of their own
    pair = {f"{end}.weight" for end in ends}
    names = {param.name for param in model.params}
    if pair <= names and not any(pair <= set(group) for group in model.ties):
        what = f"The config says tie_word_embeddings=True, but `{ends[0]}.weight` is not `{ends[1]}.weight`."
        yield Hit(at(f"{ends[1]}.weight"), what)


def _unlike(facts: RunFacts) -> Iterator[Hit]:
    alike: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for param in facts.params:
        if param.requires_grad and re.search(r"\.\d+\.", param.name):
            alike[re.sub(r"\.\d+\.", ".*.", param.name)].append((param.dtype, param.name))
    odd: list[str] = []
    kinds: Counter[str] = Counter()
    for members in alike.values():
        counted = Counter(dtype for dtype, _ in members)
        if len(counted) > 1:
            usual = counted.most_common(1)[0][0]
            odd += [f"{name} ({dtype})" for dtype, name in members if dtype != usual]
            kinds[usual] += 1
    if odd:
        usual = kinds.most_common(1)[0][0]
        yield Hit(at(odd[0].split(" ")[0]), f"Their like in other blocks are {usual}: {some(odd)}.")


_BACK = "Go back to a checkpoint before it; clip gradients, and leave out steps whose loss is not finite."

_ANEW = (
    "Keep batches that are not finite from the model, also where nothing is stepped, and fill it anew, as by "
    "reset_running_stats() of a batch norm."
)


def _nan(facts: RunFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        if new := [name for name in now.course.not_finite if name not in before.course.not_finite]:
            what = f"NaN or infinite since the last look: {some(new)}, of the weights that were read."
            yield Hit(at(new[0]), what, _BACK)
        for word, seen, known in (
            ("NaN", now.course.spoiled, before.course.spoiled),
            ("infinite", now.course.unbounded, before.course.unbounded),
        ):
            if new := [name for name in seen if name not in known]:
                what = f"{count(len(new), 'buffer')} came to be {word} since the last look: {some(new)}."
                yield Hit(at(new[0]), what, _ANEW, milder=word != "NaN")
    if facts.running:
        return
    if facts.nan:
        yield Hit(
            at(facts.nan[0]), f"NaN before the first step, in {count(len(facts.nan), 'tensor')}: {some(facts.nan)}."
        )


def _meta(facts: RunFacts) -> Iterator[Hit]:
    empty = tuple(param.name for param in facts.params if param.device == "meta")
    if facts.applied is not None and facts.applied.empty:
        empty = facts.applied.empty
        yield Hit(at(empty[0]), f"No data for {count(len(empty), 'tensor')}: {some(empty)}.")
    elif empty and len(empty) < len(facts.params):
        what = f"No data for {len(empty)} of {count(len(facts.params), 'parameter')}: {some(empty)}."
        yield Hit(at(empty[0]), what)


def _elsewhere(facts: RunFacts) -> Iterator[Hit]:
    for path in facts.elsewhere:
        yield Hit(at(path), "`forward` was set on the object, and computes with modules that are not in this model.")
    for name in facts.window.elsewhere if facts.window is not None else ():
        what = f"`forward` was set on a `{name}` beside the model, and runs the model: its own weights do nothing."
        yield Hit(name, what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.left-on-meta",
        summary="Every parameter has data, or none.",
        check=_meta,
        at=(Moment.APPLY, Moment.AUDIT),
        fix="Load or initialise them: module.to_empty(device=...) and then its weights.",
        source=("pain 17",),
    ),
    Rule(
        id="run.nan",
        summary="No parameter and no buffer holds NaN, and none comes to.",
        check=_nan,
        at=(Moment.AUDIT, Moment.DRIFT),
        needs=(Need.VALUES, Need.BEFORE),
        cost="a pass over all weights",
        fix="Load or initialise it again, as by module.reset_parameters(): to_empty() leaves what the memory held.",
        milder="of a buffer that has come to be infinite, as a bound may be on purpose",
        source=("pain 17",),
    ),
    Rule(
        id="run.tie-broken",
        summary="What the config says is tied is one parameter, and what was tied stays so.",
        check=_tie,
        at=(Moment.APPLY, Moment.AUDIT, Moment.DRIFT),
        needs=(Need.BEFORE,),
        fix="Call model.tie_weights() before the model is wrapped, or write tie_word_embeddings=False.",
        milder="over stages, where tables may be meant to begin alike and no more",
        source=("pain 10",),
    ),
    Rule(
        id="run.forward-elsewhere",
        summary="A forward that was set on a module computes with that module.",
        check=_elsewhere,
        at=(Moment.AUDIT,),
        fix="Copy the model before its forward is replaced, or take the forward off: del module.forward.",
        source=("pain 20",),
    ),
    Rule(
        id="run.eval-mode",
        summary="A model that is trained is in training mode.",
        check=_eval,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix=(
            "Call model.train() before the loop, as from_pretrained returns a model in evaluation mode; nothing, where "
            "it is to be trained without dropout."
        ),
        severity=Severity.WARNING,
        source=("pain 19",),
    ),
    Rule(
        id="run.part-in-eval",
        summary="Parts that are trained are in training mode.",
        check=_part_in_eval,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call model.train(), or freeze the part with requires_grad_(False).",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.unlike-dtypes",
        summary="Trained parameters at the same place of equal blocks have one dtype.",
        check=_unlike,
        at=(Moment.AUDIT,),
        fix="Cast them as the others: block.to(dtype).",
        severity=Severity.WARNING,
        source=("pain 8",),
    ),
    *_INSIDE,
)
"""Reporting order: what cannot run, what computes otherwise, what trains otherwise."""
