"""What is wrong with the gradients that an optimizer is about to step."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.window import SharersFacts, WindowFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some, spans
from prepkit.rules.rule import Hit, Moment, Need, Rule
from prepkit.rules.run.averaging import LEAVE, averages_weights


def _nothing(facts: RunFacts) -> Iterator[Hit]:
    found = facts.gradients
    if found is not None and found.stepped and len(found.missing) == found.stepped and not found.on_some_ranks:
        what = f"None of {count(found.stepped, 'parameter')} that it is about to step has a gradient"
        why, fix = _why_none(facts.window)
        yield Hit("optimizer", f"{what}{why}.", fix)
    elif found is not None and found.zero:
        what = f"Every gradient of {count(found.stepped, 'parameter')} that it is about to step is zero"
        cleared = facts.window.cleared if facts.window is not None else ""
        if cleared:
            yield Hit("optimizer", f"{what}: zero_grad() ({cleared}) has cleared them since the last backward.", _CLEAR)
        else:
            yield Hit("optimizer", f"{what}.", _ZEROS, milder=True)


def _why_none(seen: WindowFacts | None) -> tuple[str, str]:
    """Return what has led there as far as it was seen, and what mends that; empty: the rule's own."""
    if seen is None:
        return "", ""
    if seen.cleared:
        return f": zero_grad() ({seen.cleared}) has cleared them since the last backward", _CLEAR
    if not seen.backwards:
        return ": nothing went backward before", "Call loss.backward() before optimizer.step()."
    if seen.rebuilt:
        return f": the loss that went backward ({seen.rebuilt}) leads to no parameter of a model", _REBUILT
    return ": what went backward leads to others, or their `.grad` was set to None since", _OTHERS


def recomputed(facts: RunFacts) -> dict[str, str]:
    """Return what reentrant checkpoints keep all gradients from, each with the line of its checkpoint."""
    if facts.window is None or facts.gradients is None:
        return {}
    without = set(facts.gradients.awaited)
    return {name: line for line, held in facts.window.reentrant if without >= set(held) for name in held}


def _without(facts: RunFacts) -> Iterator[Hit]:
    found = facts.gradients
    if _waits(facts):
        return  # an error there
    if found is not None and 0 < len(found.missing) < found.stepped:
        chosen = {*_chosen(facts), *recomputed(facts)}
        if missing := [name for name in found.missing if name not in chosen]:
            what = f"{count(len(missing), 'parameter')} of {found.stepped} that are about to be stepped"
            yield Hit(at(missing[0]), f"{what} have no gradient: {some(missing)}.", _stepped_without(found.by))


def _stepped_without(by: str) -> str:
    """What to mend where the optimizer does not leave alone what has no gradient; empty: it does."""
    match by:
        case "ZeRO 3":
            then = f"{by} steps them with zeros until they have one, and with the last one in windows without one"
        case "ZeRO 0" | "ZeRO 1" | "ZeRO 2":
            then = f"{by} steps them with zeros, so that momentum and weight decay move them; DDP leaves them alone"
        case "FSDP1":
            then = f"{by} leaves them alone, but steps with zeros where another parameter of their unit has a gradient"
        case _:
            return ""
    return f"{then}. Nothing, where that is meant. {_ELSE}"


def _chosen(facts: RunFacts) -> set[str]:
    """Those that a batch has not chosen among others beside them; all where DDP expects unused ones."""
    if facts.gradients is None:
        return set()
    return set(facts.gradients.missing if facts.ddp else facts.gradients.not_chosen)


def _of_others(facts: RunFacts) -> Iterator[Hit]:
    for line, stepped in facts.window.stale if facts.window is not None else ():
        if stepped:
            what = f"They hold those of the backward at {line} as well, which another optimizer has stepped ({stepped})"
            yield Hit("gradients", f"{what}: nobody has cleared them before the last backward.")
        else:
            what = f"They hold those of the backward at {line} as well, which lies before the loop of this step"
            yield Hit("gradients", f"{what}: nobody has cleared them.")
    if facts.window is not None and all(facts.window.asked):
        line, many = facts.window.asked
        what = f"They hold those of {count(many, 'backward')} at {line} as well, which have given an input its gradient"
        yield Hit(
            "gradients", f"{what}, as for an attack, and no loss of the step is: nobody has cleared them.", _ASKED
        )


_ASKED = "Write torch.autograd.grad(loss, delta) there, or call optimizer.zero_grad() right before the last backward."


def _in_vain(facts: RunFacts) -> Iterator[Hit]:
    for line, many in facts.window.wasted if facts.window is not None else ():
        what = f"The backward at {line} has run {count(many, 'time')} whose gradients were cleared before any step"
        yield Hit("gradients", f"{what}: these batches train nothing.")
    for backward, step in facts.window.unled if facts.window is not None else ():
        what = f"The backward at {backward} gives no gradient to what {step} steps behind it, time and again"
        yield Hit("gradients", f"{what}, and what it gives to others is cleared: it trains nothing.", _UNLED)


def _unheld(facts: RunFacts) -> Iterator[Hit]:
    for name, many in facts.window.unheld if facts.window is not None else ():
        what = f"`{name}` trains and gets gradients of {count(many, 'parameter')}, and no optimizer holds any of them"
        yield Hit("optimizer", f"{what}: it stays as it was made.")
    for name in facts.window.phases.loose if facts.window is not None else ():
        what = f"`{name}` gets gradients, is a parameter of no module, and no optimizer holds it: it stays as it was"
        yield Hit("optimizer", f"{what} made.", "Make it an attribute of the model, or give it to an optimizer too.")


def _anew(facts: RunFacts) -> Iterator[Hit]:
    name, line = facts.window.anew if facts.window is not None else ("", "")
    if name:
        yield Hit("optimizer", f"A new {name} is made for each step ({line}): what the last one has averaged is lost.")


def _left_out(facts: RunFacts) -> Iterator[Hit]:
    found = facts.gradients
    if found is None or len(found.missing) >= found.stepped or _waits(facts):
        return
    chosen = _chosen(facts)
    cut = recomputed(facts)
    if left := [name for name in found.missing if name in chosen and name not in cut]:
        what = f"This batch gives {count(len(left), 'parameter')} no gradient, and others beside them one"
        yield Hit(at(left[0]), f"{what}: {some(left)}.")


def _spoiled(facts: RunFacts) -> Iterator[Hit]:
    found = facts.gradients
    if found is not None and found.spoiled:
        what = f"{count(len(found.spoiled), 'gradient')} about to be stepped hold NaN or infinite elements"
        yield Hit(at(found.spoiled[0]), f"{what}: {some(found.spoiled)}.")


def _parted(facts: RunFacts) -> Iterator[Hit]:
    found = facts.gradients
    if found is None or _waits(facts) or averages_weights(facts):
        return  # DDP has averaged nothing that shares a bucket with what is missing
    alone = {param.name for param in facts.params if not param.averaged_by}
    own = [name for name in found.parted if name not in alone]
    if own:
        what = f"Each rank is about to step {count(len(own), 'parameter')} with a gradient of its own: {some(own)}."
        why, fix = _of_sharers(facts, facts.sharers) if facts.sharers else ("", _cause(facts))
        if facts.ddp and not fix and facts.window is not None and facts.window.taken:
            by = f"torch.autograd.grad ({facts.window.taken}) has made them, past the hooks by which DDP averages."
            what, fix = f"{what} {by}", _TAKEN
        yield Hit(at(own[0]), what + why, fix)


def _of_sharers(facts: RunFacts, sharers: SharersFacts) -> tuple[str, str]:
    """What ranks that share cut layers have otherwise, and what to do: they should compute the same beside these."""
    if sharers.weights:
        told, fix = f"hold other weights beside them: {some(sharers.weights)}", _HOLD
    elif sharers.samples:
        told, fix = "have read other samples", _READ
    elif sharers.draws:
        told, fix = "have drawn from generators in other states: dropout takes other elements on each", _DRAW
    else:
        told, fix = "read, draw and hold the same: what lies between cut layers gets a part on each rank", _PART
    return f" Every {facts.alike_for} neighbouring ranks share layers, and {told}.", fix.format(size=facts.alike_for)


def _cause(facts: RunFacts) -> str:
    """Return what to mend where it shows what keeps gradients apart; empty: nothing does."""
    hooks = ", ".join(f"`{ddp.hook}`" for ddp in facts.ddp if ddp.hook)
    if "post_localSGD" in hooks:
        return f"{hooks} leaves gradients to each rank by now: step by PostLocalSGDOptimizer, which averages weights."
    if hooks:
        return f"Look at DDP's communication hook {hooks}: it has to return the average over all ranks."
    if any(not ddp.averages for ddp in facts.ddp):
        return LEAVE
    return ""


def _waited_for(facts: RunFacts) -> Iterator[Hit]:
    """DDP averages no bucket of which one gradient never comes, so that ranks step gradients of their own."""
    found = facts.gradients
    if found is None or not _waits(facts) or not (len(found.missing) < found.stepped or found.on_some_ranks):
        return
    what = f"DDP waits for {count(len(found.awaited), 'gradient')} that never came"
    if 0 < len(found.awaited_on) < facts.world_size:
        who = f"on rank{'s' * (len(found.awaited_on) > 1)} {spans(found.awaited_on)}"
        yield Hit(at(found.awaited[0]), f"{what} {who}: {some(found.awaited)}.", _FINDS)
        return
    then = "It has averaged nothing that shares a bucket with them."
    fix = REENTRANT if recomputed(facts).keys() >= set(found.awaited) else ""
    yield Hit(at(found.awaited[0]), f"{what}: {some(found.awaited)}. {then}", fix)


def _waits(facts: RunFacts) -> bool:
    """Return whether DDP goes on waiting for a gradient."""
    return facts.gradients is not None and bool(facts.gradients.awaited) and any(ddp.waits for ddp in facts.ddp)


def _on_some_ranks(facts: RunFacts) -> Iterator[Hit]:
    found = facts.gradients
    if _waits(facts):
        return  # an error there
    if found is not None and found.on_some_ranks:
        what = f"{count(len(found.on_some_ranks), 'parameter')} with a gradient on some ranks, and none on others"
        mixed = f" {found.by} has added gradients of other parameters to them." if found.by in _IN_A_ROW else ""
        fix = f"{_SAME} {_REDUCE_UNUSED}" if found.by == "FSDP2" else ""
        yield Hit(at(found.on_some_ranks[0]), f"{what}: {some(found.on_some_ranks)}.{mixed}", fix)
    elif found is not None and found.apart_before:
        what = f"In an earlier micro-batch ranks had gradients of other parameters, and {found.by} has added them up."
        yield Hit("ready.step()", what, f"Go back to a checkpoint before its step. {_SAME}")


def _stale(facts: RunFacts) -> Iterator[Hit]:
    """ZeRO 3 keeps the gradient of each parameter, and writes those alone that a backward brings (``stage3.py``)."""
    found = facts.gradients
    if found is not None and found.stale:
        what = f"ZeRO 3 is about to step {count(len(found.stale), 'parameter')} with the gradient of an earlier window"
        yield Hit(at(found.stale[0]), f"{what}, as this one has none: {some(found.stale)}.")


def _misplaced(facts: RunFacts) -> Iterator[Hit]:
    found = facts.gradients
    if found is not None and found.misplaced:
        what = f"{count(len(found.misplaced), 'gradient')} of another dtype than the parameter"
        yield Hit(at(found.misplaced[0]), f"{what}: {some(found.misplaced)}.")


_BOTH = (Moment.FIRST_STEP, Moment.AUDIT)

_IN_A_ROW = ("FSDP2", "ZeRO 1", "ZeRO 2", "ZeRO 3")
"""What lays gradients one after another as there are any, and reduces the row: other ranks' are of other parameters."""

_CLEAR = "Call zero_grad() before backward, or after step()."
_REBUILT = (
    "Compute the loss from what the model gives by torch's functions alone, as by torch.stack(losses).mean(): "
    "torch.tensor(...), .item(), .tolist(), .numpy() and .detach() cut it off from the model."
)
_OTHERS = (
    "Give the optimizer what the loss is computed with; look for a .detach(), .item() or no_grad() on the way to it, "
    "and for what sets `.grad` between backward and step."
)
_ZEROS = (
    "Look for zero_grad(set_to_none=False) or .grad.zero_() between backward and step, a clip of 0, a loss times 0, or "
    "labels that are all ignored."
)
_TAKEN = (
    "Call loss.backward(), which fills .grad with the average, or average each by hand: "
    "torch.distributed.all_reduce(grad); grad /= world."
)
REENTRANT = "Write torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
_ELSE = (
    "Else freeze what takes no part in the loss; look for a .detach(), .item(), no_grad() or reentrant checkpoint on "
    "the way to it."
)
_SAME = "Run the same layers on every rank: add `0 * layer(x).sum()` to the loss where a batch leaves one out."
_FINDS = (
    "Write find_unused_parameters=True for DDP, which then averages zeros for a rank that leaves a layer out, or run "
    "the same layers on every rank: add `0 * layer(x).sum()` to the loss where a batch leaves one out."
)
_HOLD = "Write weights on all ranks alike, or before apply: a rank that writes its own parts the replicas."
_DRAW = "Seed ranks that share layers alike: torch.manual_seed(seed + dist.get_rank() // {size})."
_PART = "Cut it as the layers around it are, by a TPLayer in tp_plan, or use it before the first or behind the last."
_READ = (
    "Give ranks that share layers the same samples: build_plan(..., loaders=[loader]), or a DistributedSampler with "
    "rank=dist.get_rank() // {size} and num_replicas=dist.get_world_size() // {size}."
)
_REDUCE_UNUSED = (
    "FSDP2(reduce_unused=True) reduces zeros where every rank runs the unit that holds them, but cannot help with a "
    "unit that only some ranks run."
)

_UNLED = (
    "Let the loss lead to what is to be stepped: look for a .detach(), .item() or no_grad() on the way, as where a "
    "GAN's samples were detached for its discriminator."
)

RULES: tuple[Rule, ...] = (
    Rule(
        id="run.steps-nothing",
        summary="What an optimizer steps has gradients.",
        check=_nothing,
        at=_BOTH,
        needs=(Need.GRADIENTS,),
        fix=(
            "Call zero_grad() before backward or after step(), not between them; compute the loss without "
            "torch.tensor(...), .item() or .detach(); give the optimizer what is trained."
        ),
        milder="for gradients of zeros that nobody was seen to clear, as of a window without a label that counts",
    ),
    Rule(
        id="run.others-gradients",
        summary="Gradients that are stepped are of the losses of that step.",
        check=_of_others,
        at=(Moment.AUDIT,),
        fix="Call zero_grad() of that optimizer right before the first backward of its own turn.",
        severity=Severity.WARNING,
        source=("torch Optimizer.zero_grad",),
    ),
    Rule(
        id="run.backward-wasted",
        summary="What a backward of the loop has made is stepped.",
        check=_in_vain,
        at=(Moment.AUDIT,),
        fix="Call zero_grad() right behind the step alone, and not before each micro-batch.",
        severity=Severity.WARNING,
        source=("torch Optimizer.zero_grad",),
    ),
    Rule(
        id="run.module-unheld",
        summary="A module, or a parameter, that gets gradients is stepped by somebody, or frozen.",
        check=_unheld,
        at=(Moment.AUDIT,),
        fix="Give its parameters() to an optimizer too, or freeze it by requires_grad_(False).",
        severity=Severity.WARNING,
        source=("torch Optimizer.add_param_group",),
    ),
    Rule(
        id="run.optimizer-anew",
        summary="An optimizer lasts longer than a step.",
        check=_anew,
        at=(Moment.AUDIT,),
        fix="Make the optimizer once, before the loop, and hand it to the function that steps.",
        severity=Severity.WARNING,
        source=("torch Optimizer.state",),
    ),
    Rule(
        id="run.gradients-waited-for",
        summary="DDP gets every gradient that it waits for.",
        check=_waited_for,
        at=(Moment.FIRST_STEP, Moment.DUE, Moment.STEP, Moment.AUDIT),
        needs=(Need.GRADIENTS,),
        fix=(
            "Write find_unused_parameters=True for DDP, or freeze them with requires_grad_(False) before the model is "
            "wrapped."
        ),
        overridable=False,
        stops="DDP refuses the next forward itself",
        source=("K-H1", "pain 26", "torch reducer.cpp"),
    ),
    Rule(
        id="run.gradients-on-some-ranks",
        summary="A parameter has a gradient on every rank that holds some of it, or on none.",
        check=_on_some_ranks,
        at=(Moment.FIRST_STEP, Moment.DUE, Moment.AUDIT),
        needs=(Need.GRADIENTS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix=_SAME,
        source=("torch fully_shard", "deepspeed stage_1_and_2.py"),
    ),
    Rule(
        id="run.gradients-stale",
        summary="No parameter is stepped with the gradient of an earlier window.",
        check=_stale,
        at=(Moment.STEP,),
        needs=(Need.GRADIENTS,),
        fix=(
            "Add `0 * layer(x).sum()` to the loss where a batch leaves a layer out, or take DeepSpeed(stage=2), which "
            "steps with zeros then, or FSDP2, which leaves the layer alone."
        ),
        source=("deepspeed stage3.py",),
    ),
    Rule(
        id="run.gradients-part",
        summary="Ranks step a replicated parameter with one gradient.",
        check=_parted,
        at=_BOTH,
        needs=(Need.GRADIENTS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Call the wrapper, model(x), and not model.module(x); leave no_sync() before a window's last backward.",
        source=("torch DistributedDataParallel.forward",),
    ),
    Rule(
        id="run.gradients-not-finite",
        summary="Gradients are finite when they are stepped.",
        check=_spoiled,
        at=_BOTH,
        needs=(Need.GRADIENTS,),
        fix="Look at the first batch and the loss under torch.autograd.detect_anomaly(); mind sqrt and log of zero.",
        source=("torch.autograd.detect_anomaly",),
    ),
    Rule(
        id="run.gradients-misplaced",
        summary="A gradient has the dtype of its parameter.",
        check=_misplaced,
        at=_BOTH,
        needs=(Need.GRADIENTS,),
        fix="Report it: torch gives no such gradient to a parameter.",
        overridable=False,
        stops="the optimizer could not add it to the parameter",
    ),
    Rule(
        id="run.left-out",
        summary="A batch uses every member of a list of modules, and gives every optimizer gradients.",
        check=_left_out,
        at=_BOTH,
        needs=(Need.GRADIENTS,),
        fix="Nothing, where a batch chooses, as among experts or tasks, or a loss is one optimizer's alone.",
        severity=Severity.NOTE,
    ),
    Rule(
        id="run.without-gradient",
        summary="Every parameter that is stepped has a gradient.",
        check=_without,
        at=_BOTH,
        needs=(Need.GRADIENTS,),
        fix=f"Nothing, where a batch may leave layers out, as experts and mask tokens. {_ELSE}",
        severity=Severity.WARNING,
        source=("K-H1", "pain 26"),
    ),
)
"""Reporting order: nothing is trained, ranks part, then values, then what may be meant so."""
