"""What the reader of a program can type against what its proof says, by the tools that the program has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve

from prepkit.facts.proof import ACCELERATED, COPIES, OWN_COLLECTIVE, ProofFacts
from prepkit.rules.rule import Hit

TORCH = "torch"
"""Among the tools of every program that was looked at; facts without it do not know."""
DRIVERS = ("Trainer", "Lightning", "Fabric", "DeepSpeed", "prepkit", "accelerate")
"""What drives a loop, or is called in it, in the order in which one has another inside."""
WRAPPERS = ("DeepSpeed", "FSDP1", "FSDP2")
"""What shards the model and averages its gradients, and is no DDP."""

_ACCELERATED = (
    "Prove the model as it was before convert_sync_batchnorm (sync_batchnorm=False), and the real run, all but its "
    "gradients, by pk.apply(plan, prove=1) on accelerators."
)
_OWN_COLLECTIVE = (
    "Nothing, where it is meant. To see the rest: while you prove, let the forward return what this rank has, and "
    "gather in the loss."
)
_SAME_COLLECTIVES = (
    "While you prove, let each forward call the same collectives, and keep what it counts its calls by in a buffer."
)
_COPIES = (
    "Compare by hand what the copies get, as dist.all_reduce makes it: the proof follows the weights of the model."
)
_PLAIN = "While you prove, call loss.backward() over outputs of the model, and step what it holds."
_UNPROVEN = (
    (ACCELERATED, _ACCELERATED),
    ("does not repeat the collectives", _SAME_COLLECTIVES),
    (OWN_COLLECTIVE, _OWN_COLLECTIVE),
    (COPIES, _COPIES),
    ("flat buffer", _COPIES),
    ("torch.func", _PLAIN),
    ("inputs=", _PLAIN),
    ("computed from others", _PLAIN),
    ("no backward went over outputs", _PLAIN),
    (" take ", "While you prove, give smaller batches, or a smaller model of the same classes."),
    (" is inf on rank", "Lower the learning rate or the loss scale until the first losses are numbers."),
    (" is nan on rank", "Lower the learning rate or the loss scale until the first losses are numbers."),
    ("before an optimizer of it had stepped", "Let the run go on until its first full step."),
    ("had stepped different models", "While you prove, let all ranks step their models in the same order."),
)
"""What to do about what is not proven, by words of why."""
_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), most)"
_BY_ACCELERATE = "accelerator.clip_grad_norm_(model.parameters(), most), where accelerator.sync_gradients holds"


def fitted(rule: str, check: Callable[[ProofFacts], Iterator[Hit]]) -> Callable[[ProofFacts], Iterator[Hit]]:
    """Return the same check, whose hits say what to type in this program where the rule's own words do not fit it."""

    def hits(facts: ProofFacts) -> Iterator[Hit]:
        for hit in check(facts):
            yield hit if hit.fix else evolve(hit, fix=fix_of(rule, hit.what, facts))

    return hits


def fix_of(rule: str, what: str, facts: ProofFacts) -> str:
    """Return it; empty: what the rule says in general fits, or nobody knows the program's tools."""
    if rule == "prove.unproven":
        return next((fix for words, fix in _UNPROVEN if words in what), "")
    if TORCH not in facts.uses:
        return ""
    make = _BY_RULE.get(rule)
    return make(driver(facts), wrapper(facts), what, facts) if make is not None else ""


def driver(facts: ProofFacts) -> str:
    """Return who drives the loop; empty: the program itself."""
    return next((one for one in DRIVERS if one in facts.uses), "")


def wrapper(facts: ProofFacts) -> str:
    """Return what averages gradients; empty: the program itself."""
    if facts.raw and not facts.wrapper:
        return ""
    return next((one for one in WRAPPERS if one in facts.uses), "DDP")


def _clip(by: str, around: str) -> str:
    """Return the call that clips by the norm of everything."""
    match by:
        case "accelerate":
            return _BY_ACCELERATE
        case "Fabric":
            return "fabric.clip_gradients(model, optimizer, max_norm=most)"
        case "Trainer":
            return "TrainingArguments(max_grad_norm=most)"
        case "Lightning":
            return "Trainer(gradient_clip_val=most)"
        case "DeepSpeed":
            return "gradient_clipping in DeepSpeed's config"
        case "prepkit":
            return "Config(clip=pk.ClipNorm(most))"
        case _:
            return "model.clip_grad_norm_(most)" if around == "FSDP1" else _CLIP


def _clipped(by: str, around: str, what: str, facts: ProofFacts) -> str:
    if "as by the norm of the part" in what:
        if not around and not by:
            return "Add up the squares of all parts, dist.all_reduce(square), and clip by the root of that."
        return f"Clip by the norm of all parts: {_clip(by, around)}."
    if facts.scale > 1 and by in ("", "prepkit"):
        return ""
    return f"Clip behind the last backward, by one norm of all parameters: {_clip(by, around)}."


def _not_clipped(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del what, facts
    return f"Clip behind the last backward and before the step: {_clip(by, around)}."


def _scaled(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del around, what, facts
    if by == "DeepSpeed":
        return "Leave the scale to the engine: call engine.backward(loss) and engine.step()."
    return "Call accelerator.backward(loss), and step what accelerator.prepare() gave." if by == "accelerate" else ""


def _samples(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del around, what
    if "loaders" not in facts.uses:
        return "Let each rank read samples of its own: data[rank::world], or a generator that is seeded by the rank."
    match by:
        case "accelerate":
            return "Give the loader to accelerator.prepare() too."
        case "Fabric":
            return "Give the loader to fabric.setup_dataloaders()."
        case _:
            return "Give the loader a sampler: DataLoader(data, sampler=DistributedSampler(data))."


def _tokens(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del what, facts
    by_all = "Divide the sum of the losses by the tokens of all ranks and micro-batches"
    meant = "nothing, where a mean of means is meant."
    match by:
        case "prepkit":
            return f"{by_all}: mean_over= in ready.backward; {meant}"
        case "Trainer":
            return f"{by_all}: num_items_in_batch; {meant}"
        case _:
            times = ", times dist.get_world_size(), as the wrapper averages" if around else ""
            return f"{by_all}{times}; {meant}"


def _summed(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del by, facts
    if "the loss is multiplied by" in what:
        return "Multiply the loss by no number of ranks: gradients are averaged over them."
    if around == "FSDP2":
        return "Leave out set_gradient_divide_factor and an all_reduce of your own: FSDP2 averages by itself."
    if not around:
        return "Divide by dist.get_world_size() behind the dist.all_reduce of the gradients, or by ReduceOp.AVG in it."
    return ""


def _averaged_twice(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del by, what, facts
    if not around:
        return "Divide by the ranks once: behind the dist.all_reduce of the gradients, or at the loss."
    return f"Leave the division to the wrapper: {around} averages by itself."


def _accumulation(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del around, what, facts
    if not by:
        return "Divide each loss by the micro-batches of a step, once."
    return f"Divide by the accumulation in one place: in the loop, or by {by}."


def _not_averaged(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del by, what, facts
    if not around:
        return "Average every gradient behind the last backward: dist.all_reduce(param.grad), and divide by the ranks."
    if around == "FSDP2":
        return "Put what trains inside fully_shard, and call set_requires_gradient_sync(True) before the last backward."
    return ""


def _part_of_ranks(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del by, what, facts
    return "" if around else "Give dist.all_reduce the group of all ranks that read other samples: group=None is all."


def _micro_batch(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del what, facts
    clear = "Clear gradients after the step alone, and step after the last micro-batch"
    if by == "DeepSpeed":
        return ""
    return f"{clear}; leave no_sync() before that." if around == "DDP" else f"{clear}."


def _not_stepped(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del by, what, facts
    return "" if around else "Make the optimizer from all that trains, as it is now: model.parameters()."


def _rounded_away(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del what, facts
    keep = "Keep weights in float32 and compute in bfloat16"
    if by == "prepkit":
        return f"{keep}: Config(precision=pk.BF16())."
    if around == "FSDP2":
        return f"{keep}: MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
    return f"{keep}: torch.autocast."


def _uneven(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del by, around, what
    return "" if "loaders" in facts.uses else "Let no rank skip a batch that others train on."


def _direction(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del by, what, facts
    if around:
        return ""
    return (
        "Look at what changes weights, buffers or gradients between forward and step, at flat buffers that ranks "
        "fill in other orders, and at checkpointed layers that draw other numbers when they are recomputed."
    )


def _after(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del by, around, what
    if facts.gradients:
        return ""
    return "Look for what a rank draws or computes otherwise: one seed where layers are cut, one branch on all ranks."


def _twice(by: str, around: str, what: str, facts: ProofFacts) -> str:
    del around, what
    if "GradScaler" in facts.uses and not by:
        return "Call scaler.step(optimizer), and no optimizer.step() beside it."
    return "" if by else "Call optimizer.step() once behind the last backward of a step."


_BY_RULE: dict[str, Callable[[str, str, str, ProofFacts], str]] = {
    "prove.clipped-scaled": _clipped,
    "prove.not-clipped": _not_clipped,
    "prove.scaled": _scaled,
    "prove.same-samples": _samples,
    "prove.tokens": _tokens,
    "prove.summed": _summed,
    "prove.averaged-twice": _averaged_twice,
    "prove.accumulation": _accumulation,
    "prove.not-averaged": _not_averaged,
    "prove.part-of-ranks": _part_of_ranks,
    "prove.micro-batch": _micro_batch,
    "prove.not-stepped": _not_stepped,
    "prove.rounded-away": _rounded_away,
    "prove.uneven": _uneven,
    "prove.direction": _direction,
    "prove.stepped-twice": _twice,
    "prove.after-apart": _after,
}
