"""Whose parameters the optimizers hold, and whether they can change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule


def _trained(facts: RunFacts) -> tuple[str, ...]:
    return tuple(param.name for param in facts.params if param.requires_grad)


def _missed(facts: RunFacts) -> tuple[str, ...]:
    held = {name for optimizer in facts.optimizers for name in optimizer.held}
    return tuple(name for name in _trained(facts) if name not in held)


def _where(facts: RunFacts, index: int) -> str:
    return "optimizer" if len(facts.optimizers) == 1 else f"optimizer[{index}]"


def _orphans(facts: RunFacts) -> Iterator[Hit]:
    missed = _missed(facts)
    for index, optimizer in enumerate(facts.optimizers):
        if not optimizer.orphans or not missed:
            continue  # a loss of its own may be trained beside the model
        shapes = ", ".join(str(list(shape)) for shape in optimizer.orphans[:3])
        what = (
            f"`{optimizer.name}` steps {count(len(optimizer.orphans), 'tensor')} that the model does not have "
            f"(shapes {shapes}{', …' * (len(optimizer.orphans) > 3)}), and nobody steps {len(missed)} of "
            f"the model's {len(_trained(facts))} trained parameters: {some(missed)}."
        )
        yield Hit(_where(facts, index), what)


def _misses(facts: RunFacts) -> Iterator[Hit]:
    missed = _missed(facts)
    if not facts.optimizers or not missed or any(one.orphans for one in facts.optimizers):
        return
    what = f"Nobody steps {count(len(missed), 'trained parameter')}: {some(missed)}."
    yield Hit("optimizer", what)


def _nothing_trains(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.params and not _trained(facts):
        lora = [param.name for param in facts.params if "lora_" in param.name]
        fix = (
            "Load the adapter with PeftModel.from_pretrained(..., is_trainable=True), or inference_mode=False."
            if lora
            else ""
        )
        yield Hit("model", f"None of {count(len(facts.params), 'parameter')} requires a gradient.", fix)


def _lost(facts: RunFacts) -> Iterator[Hit]:
    for index, optimizer in enumerate(facts.optimizers):
        if optimizer.lost:
            what = f"`{optimizer.name}` has state of {count(optimizer.lost, 'tensor')} outside its groups."
            yield Hit(_where(facts, index), what)


def _twice(facts: RunFacts) -> Iterator[Hit]:
    counted = Counter(name for optimizer in facts.optimizers for name in optimizer.held)
    twice = tuple(name for name, number in counted.items() if number > 1)
    if twice:
        names = " and ".join(f"`{one.name}`" for one in facts.optimizers if set(one.held) & set(twice))
        yield Hit("optimizer", f"{names} both step {count(len(twice), 'parameter')}: {some(twice)}.")


def _zero(facts: RunFacts) -> Iterator[Hit]:
    for index, optimizer in enumerate(facts.optimizers):
        driven = optimizer.scheduled or facts.scheduler or (facts.engine and facts.engine.scheduler)
        if optimizer.rates and not any(optimizer.rates) and not driven:
            yield Hit(_where(facts, index), f"`{optimizer.name}` has learning rate 0, and no scheduler raises it.")


def _stored(facts: RunFacts, dtype: str) -> tuple[str, ...]:
    """Trained parameters of this dtype whose optimizer keeps no master weights."""
    safe = {name for one in facts.optimizers if one.engine or one.rounds for name in one.held}
    plain = {name for one in facts.optimizers for name in one.held} - safe
    return tuple(
        param.name for param in facts.params if param.requires_grad and param.dtype == dtype and param.name in plain
    )


def _float16(facts: RunFacts) -> Iterator[Hit]:
    if low := _stored(facts, "float16"):
        what = f"Stored in float16, without master weights: {count(len(low), 'trained parameter')}, {some(low)}."
        yield Hit("model", what)


def _bfloat16(facts: RunFacts) -> Iterator[Hit]:
    if low := _stored(facts, "bfloat16"):
        what = (
            f"Stored in bfloat16, without master weights: {count(len(low), 'trained parameter')}, {some(low)}. An "
            "update below 1/256 of a weight is rounded away."
        )
        yield Hit("model", what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.nothing-trains",
        summary="Some parameter requires a gradient.",
        check=_nothing_trains,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call requires_grad_(True) on what is to be trained, before the optimizer is made.",
        source=("pain 1",),
    ),
    Rule(
        id="run.orphans",
        summary="The optimizer steps the parameters that the model has.",
        check=_orphans,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Make the optimizer after the model is wrapped, sharded, copied or changed: AdamW(model.parameters()).",
        source=("pain 1",),
    ),
    Rule(
        id="run.missed",
        summary="Every parameter that gets a gradient is stepped by an optimizer.",
        check=_misses,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Add them with optimizer.add_param_group({'params': [...]}), or freeze them with requires_grad_(False).",
        source=("pain 1",),
    ),
    Rule(
        id="run.state-lost",
        summary="The optimizer's state belongs to the parameters that it steps.",
        check=_lost,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS, Need.STATE),
        cost="a pass over the optimizers' state",
        fix="Move the state along when parameters are replaced: optimizer.state[new] = optimizer.state.pop(old).",
        source=("pain 13",),
    ),
    Rule(
        id="run.stepped-twice",
        summary="Each parameter is stepped by one optimizer.",
        check=_twice,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Leave them to one optimizer.",
    ),
    Rule(
        id="run.rate-zero",
        summary="The learning rate is above zero, or a scheduler raises it.",
        check=_zero,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Give lr a value above 0; nothing, where the loop sets it.",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.float16-weights",
        summary="Trained parameters are not stored in float16 alone.",
        check=_float16,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Load the model in float32 and compute under torch.autocast('cuda', torch.float16) with a GradScaler.",
        source=("pain 29", "pain 2"),
    ),
    Rule(
        id="run.bfloat16-weights",
        summary="Trained parameters in bfloat16 have master weights, or updates that are rounded stochastically.",
        check=_bfloat16,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Load the model in float32 and compute in bfloat16: torch.autocast, or param_dtype of FSDP's policy.",
        severity=Severity.WARNING,
        source=("pain 2",),
    ),
)
"""Reporting order: what trains nothing, then what trains a part, then what trains badly."""
