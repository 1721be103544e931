"""Whose parameters the optimizers hold, whether they can change them, and what else was written where nobody reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule
from prepkit.rules.run.applied import REPORT


def _unread(facts: RunFacts) -> Iterator[Hit]:
    for one in facts.unread:
        what = f"`{one.name}` was set, and nothing reads it: `{one.meant}` does what it seems to mean."
        yield Hit(one.where, what, f"Write {one.meant} in its place.", milder=not one.sure)


def _hidden(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.hidden:
        what = f"{count(len(facts.hidden), 'module')} in plain lists or dicts, of which no optimizer has a parameter"
        yield Hit(at(facts.hidden[0]), f"{what}: {some(facts.hidden)}. The model does not know them.")


def _no_gradients(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and not facts.gradients_on:
        yield Hit("env", "Gradients are switched off in this thread: a backward would fail, or train nothing.")


def _alone(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.launched > 1 and facts.world_size == 1:
        what = f"A launcher has started {facts.launched} processes, and this one has no group with the others"
        yield Hit("env", f"{what}: {facts.launched} models train, each by itself.")


def _window(facts: RunFacts) -> Iterator[Hit]:
    if facts.inside_window:
        what = (
            f"It steps inside a window of {facts.accumulation} micro-batches: accelerate holds back the steps of "
            "optimizers that it has prepared, and this one it has not."
        )
        yield Hit("optimizer", what)


def _unused_window(facts: RunFacts) -> Iterator[Hit]:
    if facts.unused_window:
        what = f"Accelerator(gradient_accumulation_steps={facts.accumulation}), and it steps after one micro-batch"
        yield Hit("optimizer", f"{what}: accumulate() was not entered.")


_UNREAD: tuple[Rule, ...] = (
    Rule(
        id="run.unread-setting",
        summary="A setting has a name that somebody reads.",
        check=_unread,
        at=(Moment.AUDIT,),
        fix="Write the name that is read.",
        milder="where the name is only like one that is read",
        source=("torch Module.requires_grad_", "torch Optimizer.add_param_group"),
    ),
    Rule(
        id="run.hidden-module",
        summary="What is to be trained is registered.",
        check=_hidden,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Hold them in nn.ModuleList, nn.ModuleDict or nn.ParameterList; freeze what is not to be trained.",
        source=("torch ModuleList",),
    ),
    Rule(
        id="run.gradients-off",
        summary="Gradients are computed.",
        check=_no_gradients,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call torch.set_grad_enabled(True); use `with torch.no_grad():` where none are wanted.",
        source=("torch.set_grad_enabled",),
    ),
    Rule(
        id="run.no-group",
        summary="Processes that were launched together train one model.",
        check=_alone,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call torch.distributed.init_process_group() before the model is wrapped, with the launcher's world size.",
        source=("torchrun",),
    ),
    Rule(
        id="run.raw-optimizer",
        summary="An optimizer that steps inside accumulate() is accelerate's.",
        check=_window,
        at=(Moment.AUDIT,),
        needs=(Need.GRADIENTS,),
        fix="Write optimizer = accelerator.prepare(optimizer), or `if accelerator.sync_gradients: optimizer.step()`.",
        source=("accelerate Accelerator.accumulate",),
    ),
    Rule(
        id="run.unused-window",
        summary="A count of micro-batches per step is used.",
        check=_unused_window,
        at=(Moment.AUDIT,),
        needs=(Need.GRADIENTS,),
        fix="Write `with accelerator.accumulate(model):` around the body of the loop, or drop the argument.",
        severity=Severity.WARNING,
        source=("accelerate Accelerator.accumulate",),
    ),
)
"""Reporting order: settings, modules, then the process and its windows."""


AGAIN = (
    "Change the model before build_plan. In the middle of a run: ready.save(folder), ready.close(), change the model, "
    "then build_plan, apply and ready.resume(folder, only_model=True)."
)
"""How a model that prepkit has prepared is changed."""


def foreign(facts: RunFacts) -> bool:
    """Return whether the model was looked at, and prepkit has not prepared it; its own loop looks at parameters alone.

    Whoever drives it has no ``ready`` then.
    """
    return bool(facts.model.params) and not facts.model.prepared


def _trained(facts: RunFacts) -> tuple[str, ...]:
    return tuple(param.name for param in facts.params if param.requires_grad)


def _missed(facts: RunFacts) -> tuple[str, ...]:
    if facts.window is not None and facts.window.copies:
        return ()
    held = {name for optimizer in facts.optimizers for name in optimizer.held}
    return tuple(name for name in _trained(facts) if name not in held)


def _where(facts: RunFacts, index: int) -> str:
    return "optimizer" if len(facts.optimizers) == 1 else f"optimizer[{index}]"


def _orphans(facts: RunFacts) -> Iterator[Hit]:
    if facts.running:
        yield from _other_slots(facts)
        return  # what stood there before was told then
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


_MAKE_AGAIN = "Make the optimizer again where parameters are replaced, and give the scheduler that one."


def _other_slots(facts: RunFacts) -> Iterator[Hit]:
    """Since an earlier look, or since before apply."""
    for before, now in facts.running:
        for index, (old, new) in enumerate(zip(before.held, now.held, strict=False)):
            frozen = {one.name for one in now.params if not one.requires_grad} if facts.applied is None else set()
            gone = [name for name in old if name and name not in new and name not in frozen]
            orphans = now.orphans[index] - before.orphans[index]
            moved = facts.applied is not None and old != new  # then what is compared is each group, slot by slot
            where = "optimizer" if len(now.held) == 1 else f"optimizer{'.param_groups' * moved}[{index}]"
            if gone or orphans > 0 or moved:
                still = "It steps all that it did" + ", in other slots or more of them" * moved
                what = f"It no longer steps {some(gone)}" if gone else still
                strangers = f", and steps {count(orphans, 'tensor')} that the model does not have" * (orphans > 0)
                yield Hit(where, f"{what}{strangers}.", _MAKE_AGAIN)


def _misses(facts: RunFacts) -> Iterator[Hit]:
    if facts.running:
        yield from _put_in(facts)
        return
    untouched = facts.window.untouched if facts.window is not None else frozenset[str]()  # of a later task
    before = facts.window.phases.stepped if facts.window is not None else ()  # which a second training may leave
    missed = tuple(name for name in _missed(facts) if name not in untouched and name not in before)
    if not facts.optimizers or not missed or any(one.orphans for one in facts.optimizers):
        return
    if len({rank.held for rank in facts.ranks}) > 1:  # each steps a part, and may send it to the others
        return
    what = f"Nobody steps {count(len(missed), 'trained parameter')}: {some(missed)}."
    yield Hit("optimizer", what)


def _put_in(facts: RunFacts) -> Iterator[Hit]:
    """Since it was prepared, as by a layer that was replaced, or a tie that was broken."""
    for _, now in facts.running:
        new = [one.name for one in now.params if one.requires_grad and not one.known and not one.served]
        if new:
            what = f"The model has {count(len(new), 'trained parameter')} that nothing trains: {some(new)}."
            yield Hit(at(new[0]), what, AGAIN)


def _nothing_trains(facts: RunFacts) -> Iterator[Hit]:
    beside = any(one.orphans for one in facts.optimizers)  # an input is trained, as for an adversarial example
    if facts.optimizers and facts.params and not _trained(facts) and not beside:
        lora = [param.name for param in facts.params if "lora_" in param.name]
        fix = (
            "Load the adapter with PeftModel.from_pretrained(..., is_trainable=True), or inference_mode=False."
            if lora
            else ""
        )
        yield Hit("model", f"None of {count(len(facts.params), 'parameter')} requires a gradient.", fix)


_RESTART = (
    "Load a state dict with the state of every parameter; clear optimizer.state in the loop only to restart, as SGDR "
    "and ReLoRA do."
)


def _cleared(facts: RunFacts) -> Iterator[Hit]:
    """Since an earlier look, or since before apply."""
    for before, now in facts.running:
        for index, (old, new) in enumerate(zip(before.stateful, now.stateful, strict=False)):
            if lost := [name for name in old if name not in new]:
                where = "optimizer" if len(now.stateful) == 1 else f"optimizer[{index}]"
                what = f"The state of {count(len(lost), 'parameter')} is gone: {some(lost)}."
                yield Hit(where, what, _RESTART, milder=facts.applied is None)


def _lost(facts: RunFacts) -> Iterator[Hit]:
    if facts.running:
        yield from _cleared(facts)
        return
    for index, optimizer in enumerate(facts.optimizers):
        if optimizer.lost:
            what = f"`{optimizer.name}` has state of {count(optimizer.lost, 'tensor')} outside its groups."
            yield Hit(_where(facts, index), what)


def _twice(facts: RunFacts) -> Iterator[Hit]:
    for _, now in facts.running:
        if now.course.twice:
            names = " and ".join(f"`{name}`" for name in now.course.steppers)
            what = f"{names} have stepped one gradient, one after the other: {some(now.course.twice)}."
            yield Hit("optimizer", what)
    if facts.running:
        return
    for name, again in facts.window.again if facts.window is not None else ():
        what = f"`{facts.optimizers[0].name}` steps {count(len(again), 'parameter')}, and `{name}` right behind it"
        yield Hit("optimizer", f"{what}, by the same gradients: {some(again)}.")
        return
    counted = Counter(name for optimizer in facts.optimizers for name in optimizer.held)
    shared = {name for name, number in counted.items() if number > 1}
    without = set(facts.gradients.missing) if facts.window is not None and facts.gradients is not None else None
    steps = [one for one in facts.optimizers if without is None or not set(one.held) - shared <= without]
    held = Counter(name for one in steps for name in one.held)  # others may step what a later backward gives
    if twice := tuple(name for name in counted if held[name] > 1):
        names = " and ".join(f"`{one.name}`" for one in steps if set(one.held) & set(twice))
        yield Hit("optimizer", f"{names} both step {count(len(twice), 'parameter')}: {some(twice)}.")


def _decays_nothing(facts: RunFacts) -> Iterator[Hit]:
    for one in facts.optimizers:
        if one.idle_decay and one.held:
            what = f"{one.name} decays by {one.idle_decay:g} the parameters of a group that holds none, and no others"
            yield Hit("optimizer", f"{what}: nothing decays.")


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


def _masters(facts: RunFacts) -> Iterator[Hit]:
    if facts.applied is not None:
        if low := facts.applied.masters:
            what = f"Master weights are not float32 where the plan says who keeps them: {'; '.join(low[:5])}."
            yield Hit("model", what, REPORT)
        return
    for dtype in ("float16", "bfloat16"):
        if low := _stored(facts, dtype):
            what = f"Stored in {dtype}, without master weights: {count(len(low), 'trained parameter')}, {some(low)}."
            rounds = " An update below 1/256 of a weight is rounded away." * (dtype == "bfloat16")
            yield Hit("model", f"{what}{rounds}", milder=dtype == "bfloat16")


def _masters_apart(facts: RunFacts) -> Iterator[Hit]:
    if names := facts.masters_apart:
        what = f"Of {count(len(names), 'parameter')} DeepSpeed steps other values than the model computes with"
        why = "what was put into the model behind deepspeed.initialize goes with the next step"
        yield Hit(at(names[0]), f"{what}: {some(names)}. Its master weights were made before: {why}.")


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
        summary="The optimizer steps the parameters that the model has, and goes on with them.",
        check=_orphans,
        at=(Moment.APPLY, Moment.AUDIT, Moment.DRIFT),
        needs=(Need.OPTIMIZERS, Need.BEFORE),
        fix="Make the optimizer after the model is wrapped, sharded, copied or changed: AdamW(model.parameters()).",
        source=("pain 1",),
    ),
    Rule(
        id="run.missed",
        summary="Every parameter that trains is stepped by an optimizer, also one that was put in later.",
        check=_misses,
        at=(Moment.DUE, Moment.AUDIT, Moment.DRIFT),
        needs=(Need.OPTIMIZERS, Need.BEFORE),
        fix="Add them with optimizer.add_param_group({'params': [...]}), or freeze them with requires_grad_(False).",
        source=("pain 1",),
    ),
    Rule(
        id="run.state-lost",
        summary="The optimizer's state belongs to the parameters that it steps, and is kept.",
        check=_lost,
        at=(Moment.APPLY, Moment.AUDIT, Moment.DRIFT),
        needs=(Need.OPTIMIZERS, Need.STATE, Need.BEFORE),
        cost="a pass over the optimizers' state",
        fix="Move the state along when parameters are replaced: optimizer.state[new] = optimizer.state.pop(old).",
        milder="while a loop runs, where state is cleared on purpose for a restart",
        source=("pain 13",),
    ),
    Rule(
        id="run.stepped-twice",
        summary="Each parameter is stepped by one optimizer.",
        check=_twice,
        at=(Moment.AUDIT, Moment.DRIFT),
        needs=(Need.OPTIMIZERS, Need.BEFORE),
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
        id="run.decays-nothing",
        summary="A group that decays holds parameters.",
        check=_decays_nothing,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Divide parameters by their dims before the model is wrapped, where they have them: FSDP1 leaves rows.",
        severity=Severity.WARNING,
        source=("torch FullyShardedDataParallel: use_orig_params",),
    ),
    Rule(
        id="run.masters-apart",
        summary="DeepSpeed steps the weights that its engine computes with.",
        check=_masters_apart,
        at=(Moment.AUDIT,),
        fix="Load and write weights before deepspeed.initialize, or by engine.load_checkpoint, which fills both.",
        source=("deepspeed runtime/zero/stage_1_and_2.py",),
    ),
    Rule(
        id="run.no-master-weights",
        summary="Trained parameters of 16 bits have master weights, or updates that are rounded stochastically.",
        check=_masters,
        at=(Moment.APPLY, Moment.AUDIT),
        needs=(Need.OPTIMIZERS,),
        fix=(
            "Load the model in float32 and compute in 16 bits: torch.autocast, with a GradScaler for float16, or "
            "param_dtype of FSDP's policy."
        ),
        milder="in bfloat16, which keeps the range and rounds small updates away",
        source=("pain 29", "pain 2"),
    ),
    *_UNREAD,
)
"""Reporting order: what trains nothing, then what trains a part, then what trains badly."""
