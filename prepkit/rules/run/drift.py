"""What has changed since an earlier look, while the model trains: parameters, optimizers, hooks, rates, modes, counts.

Optimizers, DDP's buckets and ZeRO's master weights hold what the model had when it was prepared. torch and DeepSpeed
go on with that, and raise nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isclose

from prepkit.facts.run import RunFacts, RunningFacts, RunningParam
from prepkit.facts.window import CourseFacts, Groups
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.plan.layout import itemsize
from prepkit.rules.rule import Hit, Moment, Need, Rule
from prepkit.rules.run.who_steps import AGAIN, foreign


def _pairs(facts: RunFacts) -> Iterator[tuple[CourseFacts, CourseFacts]]:
    return ((before.course, now.course) for before, now in facts.running)


def _mode(facts: RunFacts) -> Iterator[Hit]:
    for before, now in _pairs(facts):
        if new := [name for name in now.resting if name not in before.resting]:
            what = f"{count(len(new), 'module')} with dropout or batch norm went into evaluation mode: {some(new)}."
            yield Hit(at(new[0]), what)


def _zeroed(facts: RunFacts) -> Iterator[Hit]:
    for _, now in _pairs(facts):
        if now.zeroed:
            what = f"The moments of {count(len(now.zeroed), 'parameter')} are zero, and were not: {some(now.zeroed)}."
            yield Hit("optimizer", what)


def _counts(facts: RunFacts) -> Iterator[Hit]:
    for before, now in _pairs(facts):
        for index, (old, new) in enumerate(zip(before.counts, now.counts, strict=False)):
            if old is not None and new is not None and new < old:
                where = "optimizer" if len(now.counts) == 1 else f"optimizer[{index}]"
                yield Hit(where, f"Its state has counted {count(new, 'step')}, and {old} at the last look.")


def _options(facts: RunFacts) -> Iterator[Hit]:
    for _, now in _pairs(facts):
        for name, old, new in now.altered:
            yield Hit(name, f"It is {new} since the last look, and was {old}.")
    for before, now in _pairs(facts):
        yield from _merged(before.groups, now.groups)


_GROUPS = "Leave parameters in the groups that the optimizer was made with; nothing, where they are to be one."


def _merged(before: Groups, now: Groups) -> Iterator[Hit]:
    """Groups in which parameters stand together that had other options, as where all are given one decay."""
    had = {name: dict(options) for names, options in before for name in names}
    for index, (names, _) in enumerate(now):
        known = [name for name in names if name in had]
        for key in dict.fromkeys(key for name in known for key in had[name]):
            by: dict[str, list[str]] = {}
            for name in known:
                by.setdefault(had[name].get(key, "none"), []).append(name)
            if len(by) > 1:
                each = " and ".join(f"{value} for {some(held)}" for value, held in by.items())
                what = f"It holds parameters of several groups, which had {each} as {key}, and have one by now"
                yield Hit(f"optimizer.param_groups[{index}]", f"{what}.", _GROUPS)


def _steps(seen: CourseFacts) -> int:
    """Optimizer steps until then; 0 where nobody counts them."""
    return seen.steps if seen.steps is not None else next((one for one in seen.counts if one is not None), 0)


def _ticks(facts: RunFacts) -> Iterator[Hit]:
    each = facts.scheduler.ticks if facts.scheduler is not None else 1
    for before, now in _pairs(facts):
        if now.ticked is None or before.ticked is None:
            continue
        if now.unticked:
            than = "many more than ever before" if now.ticked else "and is ticked by the step"
            fix = "Call scheduler.step() behind optimizer.step(); nothing, where the rate is to stay as it is."
            yield Hit("scheduler", f"It was not ticked in the last {now.unticked} steps, {than}.", fix)
        if now.horizon and before.ticked <= now.horizon < now.ticked:
            what = f"It is made for {now.horizon} ticks, and was ticked {now.ticked} times: its end is behind it."
            yield Hit("scheduler", what, "Make it for as many ticks as there are steps, or end there.")
        steps = max(_steps(now) - _steps(before), now.stretches - before.stretches)
        if steps > 1 and now.ticked - before.ticked >= 2 * steps * each:
            what = f"It was ticked {now.ticked - before.ticked} times in {steps} steps."
            yield Hit("scheduler", what)
        elif _steps(now) - _steps(before) == 1 and now.lately[0] >= LOOKS and now.lately[1] >= 2 * now.lately[0] * each:
            yield Hit("scheduler", f"It was ticked {now.lately[1]} times in {now.lately[0]} steps.")


LOOKS = 4
"""Steps of which each was looked at, as in an audit."""


def _still(facts: RunFacts) -> Iterator[Hit]:
    for before, now in _pairs(facts):
        steps = _steps(now) - _steps(before)
        if now.still:
            at_rate = f" at a rate of {now.rate:g}" if now.rate is not None else ""
            what = f"No weight has changed in {now.still} steps{at_rate}, and gradients are not zero."
            yield Hit("optimizer", what)
        elif before.rate == now.rate == 0 and now.moved is False and steps > 1:
            yield Hit("optimizer", f"Its learning rate is 0, as it was {steps} steps ago: no weight has changed.")
        elif steps == 1 and now.at_zero and now.moved is False:
            yield Hit("optimizer", f"Its learning rate is 0, as it was {LOOKS} steps ago: no weight has changed.")


def _epochs(facts: RunFacts) -> Iterator[Hit]:
    for before, now in _pairs(facts):
        for sampler in now.repeated:
            if sampler not in before.repeated:
                yield Hit("loaders", f"A DistributedSampler {sampler}, has given two passes in one order.")


def _left(facts: RunFacts) -> Iterator[Hit]:
    for _, now in _pairs(facts):
        if now.left:
            what = "Gradients of a step were there when the next backward began, and were stepped with what it added"
            yield Hit("optimizer", f"{what}: {some(now.left)}.")


def _unstepped(facts: RunFacts) -> Iterator[Hit]:
    for _, now in _pairs(facts):
        if now.unstepped:
            what = f"It has not stepped in the last {now.unstepped} forwards that train, many more than before."
            yield Hit("optimizer", what)


def _rule(
    name: str, summary: str, check: object, fix: str, severity: Severity, *source: str, also: tuple[Moment, ...] = ()
) -> Rule:
    return Rule(
        id=f"run.drift-{name}",
        summary=summary,
        check=check,  # type: ignore[arg-type]  # each is one
        at=(*also, Moment.DRIFT),
        needs=(Need.BEFORE, Need.OPTIMIZERS),
        fix=fix,
        severity=severity,
        source=source,
    )


_DRIFT_COURSE: tuple[Rule, ...] = (
    _rule(
        "zeroed",
        "Moments that have become other than zero stay so.",
        _zeroed,
        "Leave optimizer.state alone in the loop; nothing, where a restart is meant.",
        Severity.WARNING,
    ),
    _rule(
        "counts",
        "An optimizer counts its steps onwards.",
        _counts,
        "Load the state of the optimizer where it was saved; nothing, where a restart is meant.",
        Severity.WARNING,
    ),
    _rule(
        "mode",
        "What trains at one look trains at the next.",
        _mode,
        "Call model.train() after each evaluation.",
        Severity.WARNING,
    ),
    _rule(
        "options",
        "Options of an optimizer stay what they were, unless something moves them all the time, and groups stay apart.",
        _options,
        "Drop the line that writes into param_groups; nothing, where it is meant.",
        Severity.WARNING,
        also=(Moment.DUE,),
    ),
    _rule(
        "still",
        "While steps are taken weights change.",
        _still,
        "Tick the scheduler that raises the rate, end where its schedule ends, or give a higher one; keep weights in "
        "float32, as bfloat16 rounds away what is below 1/256 of a weight; nothing, where it is to rest.",
        Severity.WARNING,
    ),
    _rule(
        "unstepped",
        "While a model trains, the optimizer that is watched steps.",
        _unstepped,
        "Where another optimizer was made for the model, make its scheduler anew and watch that one.",
        Severity.WARNING,
    ),
    _rule(
        "ticks",
        "A scheduler is ticked as often as the optimizer steps, and not past its end.",
        _ticks,
        "Tick it in one place.",
        Severity.WARNING,
        "pain 15",
    ),
    _rule(
        "epoch",
        "Each pass has an order of its own.",
        _epochs,
        "Call sampler.set_epoch(epoch) before each pass.",
        Severity.WARNING,
        "torch DistributedSampler.set_epoch",
    ),
)
"""Reporting order: numbers that are wrong, then what may be meant."""


def _switched(before: RunningFacts, now: RunningFacts) -> Iterator[RunningParam]:
    old = {one.name: one.requires_grad for one in before.params}
    return (one for one in now.params if one.known and old.get(one.name, one.requires_grad) != one.requires_grad)


def _unfrozen(facts: RunFacts) -> Iterator[Hit]:
    """Since an earlier look or, where there was none, since the wrapper was made."""
    for ddp in () if facts.running or facts.world_size < 2 else facts.ddp:
        if ddp.reduced is not None and ddp.known > ddp.reduced:
            what = (
                f"{ddp.known} parameters train, and DistributedDataParallel averages {ddp.reduced}: those that were "
                "unfrozen after it was made are trained by each rank alone."
            )
            fix = "Call requires_grad_(True) first, and DistributedDataParallel(model) after it."
            yield Hit(at(ddp.path), what, fix)
    outside = _outside(facts)
    for before, now in facts.running:
        switched = [one for one in _switched(before, now) if one.requires_grad]
        if loose := [one.name for one in switched if not one.served or one.name in outside]:
            what = f"{count(len(loose), 'parameter')} unfrozen since the model was prepared, and"
            yield Hit(
                at(loose[0]),
                f"{what} {'no rank averages' if facts.ddp else 'nothing uses'} the gradient: {some(loose)}.",
            )


def _outside(facts: RunFacts) -> set[str]:
    """What was frozen when DDP was made, which averages no gradient of it, whatever it is told of unused ones."""
    several = facts.ddp if facts.world_size > 1 else ()
    return {name for ddp in several if ddp.reduced == ddp.known for name in ddp.frozen}


def _turns(now: RunningFacts) -> set[str]:
    """What an optimizer steps of which nothing trains now, while another has its turn."""
    trained = {one.name for one in now.params if one.requires_grad}
    return {name for held in now.held if trained.isdisjoint(held) for name in held} if trained else set()


def _frozen(facts: RunFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        gone = [one for one in _switched(before, now) if not one.requires_grad]
        stuck, awaited = [one.name for one in gone if one.stuck], [one.name for one in gone if one.awaited]
        for names, harm in ((stuck, "trained all the same"), (awaited, "awaited by DDP, which averages no gradient")):
            if names:
                what = f"{count(len(names), 'parameter')} frozen since the model was prepared, and {harm}"
                yield Hit(at(names[0]), f"{what}: {some(names)}.")


def _narrowed(before: RunningFacts, now: RunningFacts) -> Iterator[tuple[RunningParam, str]]:
    """Trained parameters of 16 bits or fewer that had more; some models widen a layer in their first forward."""
    old = {one.name: one for one in before.params if one.requires_grad}
    for one in now.params:
        if one.known and one.name in old and itemsize(one.dtype) < min(4, itemsize(old[one.name].dtype)):
            yield one, old[one.name].dtype


def _cast(facts: RunFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        if cast := [f"{one.name} (was {dtype}, is {one.dtype})" for one, dtype in _narrowed(before, now)]:
            what = f"{count(len(cast), 'trained parameter')} cast to fewer bits, without master weights: {some(cast)}."
            yield Hit(at(cast[0].partition(" ")[0]), what, _CAST_COPY if foreign(facts) else "")


_CAST_COPY = (
    "Compute in fewer bits under torch.autocast, or with a copy: copy.deepcopy(model).bfloat16(). The bits that are "
    "lost come back with a checkpoint, and not by model.float()."
)
"""How a model that prepkit has not prepared is computed in fewer bits."""


def _overwritten(facts: RunFacts) -> Iterator[Hit]:
    if facts.overwritten:
        what = (
            "Weights were put into the model in place, by load_state_dict() or by hand, and DeepSpeed's master weights "
            "are what they were: the next step would undo that, and a checkpoint or an export would hold those."
        )
        yield Hit("model", what)


def _restepped(facts: RunFacts) -> Iterator[Hit]:
    if facts.restepped:
        what = f"`{facts.restepped}` steps once more over the gradients of its last step: nothing has gone backward to"
        yield Hit("optimizer", f"{what} them since, and nothing has cleared them.")


def _written(facts: RunFacts) -> Iterator[Hit]:
    loop = facts.loop
    if loop is not None and loop.written:
        what = (
            f"The forward has written parameters, and that is lost: {some(loop.written)}. "
            f"{loop.gathers} gathers weights for a forward, frees them after it, and gathers them anew from shards."
        )
        yield Hit(at(loop.written[0]), what, FSDP1_INSTEAD if loop.gathers == "FSDP1" else "")


FSDP1_INSTEAD = "Choose engine=DDP(), or FSDP2() and write them after ready.step(), through ready.unwrap()."
"""Shards of FSDP1 are cut without regard to parameters, so that those of a copy do not lie beside their model's."""


def _params(facts: RunFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        old = {param.name: (param.dtype, param.device) for param in before.params}
        new = {param.name: (param.dtype, param.device) for param in now.params}
        if gone := [name for name in old if name not in new]:
            yield Hit(
                at(gone[0]), f"The model no longer has {count(len(gone), 'parameter')} of the audit: {some(gone)}."
            )
        if more := [name for name in new if name not in old]:
            yield Hit(
                at(more[0]), f"The model has {count(len(more), 'parameter')} more than at the audit: {some(more)}."
            )
        told = {one.name for one, _ in _narrowed(before, now)}
        changed = [name for name in old if name in new and old[name] != new[name] and name not in told]
        if changed:
            (dtype, device), (other, there) = old[changed[0]], new[changed[0]]
            what = f"was {dtype} on {device}, and is {other} on {there}"
            also = f"; so are {len(changed) - 1} more" if len(changed) > 1 else ""
            yield Hit(at(changed[0]), f"It {what}{also}.")


def _trained(facts: RunFacts) -> Iterator[Hit]:
    """What is unfrozen trains as the rest, where an optimizer holds it. What is an error is told as that."""
    outside = _outside(facts)
    for before, now in facts.running:
        old, turns = {param.name: param.requires_grad for param in before.params}, _turns(now)
        changed = [one for one in now.params if old.get(one.name, one.requires_grad) != one.requires_grad]
        new = [one for one in changed if one.requires_grad and one.served and one.name not in outside]
        if names := [one.name for one in new if not one.stepped]:
            what = f"{count(len(names), 'parameter')} unfrozen since the audit, and no optimizer has"
            yield Hit(at(names[0]), f"{what} {'them' if len(names) > 1 else 'it'}: {some(names)}.", _UNFROZEN)
        gone = [one for one in changed if not (one.requires_grad or one.stuck or one.awaited or one.name in turns)]
        if names := [one.name for one in gone]:
            yield Hit(at(names[0]), f"{count(len(names), 'parameter')} frozen since the audit: {some(names)}.")


_UNFROZEN = (
    "Give them to it at that step, optimizer.add_param_group({'params': ...}), or from the beginning, where it leaves "
    "alone what is frozen."
)


def _hooks(facts: RunFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        gone = Counter(before.hooks) - Counter(now.hooks)
        if gone:
            path, hook = next(iter(gone))
            what = f"{count(gone.total(), 'hook')} of the audit {'is' if gone.total() == 1 else 'are'} gone, such as"
            yield Hit(at(path), f"{what} {hook}.")


def _rate(facts: RunFacts) -> Iterator[Hit]:
    for _, now in facts.running:
        pairs = list(zip(now.rates, now.scheduled, strict=False))
        for index, (rate, wanted) in enumerate(pairs):
            if not isclose(rate, wanted, rel_tol=1e-6, abs_tol=1e-15):
                where = f"optimizer.param_groups[{index}].lr"
                yield Hit(where, f"The learning rate is {rate:g}, and the scheduler has set {wanted:g}.")
                break


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.overwritten",
        summary="Weights that lie in the model are those of which the optimizer keeps master weights.",
        check=_overwritten,
        at=(Moment.STEP, Moment.SAVE),
        needs=(Need.BEFORE,),
        fix=(
            "Load weights before build_plan, or by ready.resume(folder, only_model=True) from what ready.save(folder) "
            "has written, which fills both."
        ),
    ),
    Rule(
        id="run.stepped-again",
        summary="Between two steps of an optimizer something goes backward to what it steps.",
        check=_restepped,
        at=(Moment.STEP, Moment.DRIFT),
        needs=(Need.BEFORE, Need.OPTIMIZERS),
        fix=(
            "Call step() once: a trainer, an engine or a scaler calls it by itself; nothing, where gradients are meant "
            "to be stepped twice."
        ),
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.written-in-forward",
        summary="A forward writes no parameter that is gathered for it, as that of MoCo or BYOL its momentum copy.",
        check=_written,
        at=(Moment.DUE,),
        needs=(Need.LOOP, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix=(
            "Write them after ready.step(), through ready.unwrap() and under torch.no_grad(), in place: "
            "b.mul_(0.99).add_(a, alpha=0.01), and not b.data = ...; or choose engine=DDP(), whose weights stay."
        ),
        source=("torch FSDPParam.free_unsharded_param",),
    ),
    Rule(
        id="run.unfrozen",
        summary="A parameter that is unfrozen is averaged and stepped.",
        check=_unfrozen,
        at=(Moment.AUDIT, Moment.DUE, Moment.DRIFT),
        needs=(Need.BEFORE,),
        fix=AGAIN,
    ),
    Rule(
        id="run.frozen",
        summary="A parameter that is frozen is no longer stepped, and nobody waits for it.",
        check=_frozen,
        at=(Moment.DUE, Moment.DRIFT),
        needs=(Need.BEFORE,),
        fix=AGAIN,
    ),
    Rule(
        id="run.cast",
        summary="Trained parameters keep their bits, as nobody keeps master weights of them.",
        check=_cast,
        at=(Moment.DUE, Moment.DRIFT),
        needs=(Need.BEFORE,),
        fix=AGAIN,
        source=("pain 2",),
    ),
    Rule(
        id="run.drift-params",
        summary="While it trains a model keeps its parameters, and each its dtype and device.",
        check=_params,
        at=(Moment.DRIFT,),
        needs=(Need.BEFORE,),
        fix="Cast, move and change the model before it is prepared, not in the loop: no .half(), .to() or del there.",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.drift-trained",
        summary="What trains at the audit trains later, and nothing else.",
        check=_trained,
        at=(Moment.DRIFT,),
        needs=(Need.BEFORE,),
        fix=(
            "Unfreeze them again after what was to run without them; where they are to rest call zero_grad() at that "
            "step, as an optimizer leaves alone what has no gradient."
        ),
        severity=Severity.WARNING,
        source=("pain 26",),
    ),
    Rule(
        id="run.drift-hooks",
        summary="Hooks of libraries that hung at the audit hang on.",
        check=_hooks,
        at=(Moment.DRIFT,),
        needs=(Need.BEFORE,),
        fix="Remove hooks before the model is prepared; what clears all of a module's takes its wrapper's as well.",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.drift-rate",
        summary="The learning rate is what the scheduler has set.",
        check=_rate,
        at=(Moment.DRIFT,),
        needs=(Need.BEFORE,),
        fix=(
            "Let one of them set the rate: drop the line that writes param_groups[...]['lr'], or the scheduler; "
            "nothing, for a warm-up by hand that the scheduler goes on from."
        ),
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.left-over",
        summary="Gradients are cleared between one step and the next.",
        check=_left,
        at=(Moment.DRIFT,),
        needs=(Need.BEFORE, Need.OPTIMIZERS),
        fix="Call optimizer.zero_grad() after every step.",
    ),
    *_DRIFT_COURSE,
)
"""Reporting order: the model, its hooks, the rate."""
