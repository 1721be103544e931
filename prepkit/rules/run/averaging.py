"""Who averages gradients over ranks, and who does not."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import PreparedParam, RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule


def _one_model(facts: RunFacts) -> bool:
    """Return whether ranks train one model, and not the stages of a pipeline."""
    return facts.world_size > 1 and len({rank.names for rank in facts.ranks}) <= 1


def _tensor_ranks(facts: RunFacts) -> int:
    return max((len(rank.tensor_ranks) for rank in facts.ranks), default=1)


def _alone(facts: RunFacts) -> tuple[PreparedParam, ...]:
    """Trained parameters that nobody averages; those beside cut layers are alike over tensor ranks by themselves."""
    trained = tuple(param for param in facts.params if param.requires_grad)
    if not trained or not _one_model(facts) or _tensor_ranks(facts) == facts.world_size:
        return ()
    if any(param.ranks == facts.world_size for param in trained if param.averaged_by == ("dtensor",)):
        return ()
    own = kept_apart(facts)
    return tuple(
        param
        for param in trained
        if not param.averaged_by and param.name not in own and not _by_hand(facts, param.name)
    )


def kept_apart(facts: RunFacts) -> set[str]:
    """Parameters of which each rank holds its own: experts that DDP leaves to it, or parts that are cut by hand."""
    told = {name for ddp in facts.ddp for name in ddp.ignored}
    cut = set(facts.window.cut if facts.window else ())
    return (told if told & set(facts.parted) else set()) | cut | set(facts.own_sizes)


def averages_weights(facts: RunFacts) -> bool:
    """Return whether ranks step by gradients of their own on purpose, and weights are averaged, as local SGD does."""
    line = facts.window is not None and bool(facts.window.averages_weights)
    off = facts.unaveraged or any(not ddp.averages or "post_localSGD" in ddp.hook for ddp in facts.ddp)
    return bool(facts.local_sgd) or (line and bool(off or any(now.course.unaveraged for _, now in facts.running)))


def _own_steps(facts: RunFacts) -> set[str]:
    """Parameters whose gradients ranks need not have alike: others do not step them, or weights may be averaged."""
    found = facts.gradients
    if found is None:
        return set()
    weights = facts.window is not None and bool(facts.window.averages_weights)
    return {*found.divided, *(found.compared if weights else ())}


def _out_of_sight(facts: RunFacts) -> bool:
    """Return whether the program may average by itself, and has no gradients yet that would show it."""
    unseen = facts.gradients is None or not facts.gradients.compared
    return bool(facts.averages_by_hand or _sends(facts)) and unseen


def _sends(facts: RunFacts) -> str:
    """Where the program sends activations, and the ranks were not looked at together in a window; else empty."""
    if facts.window is None:
        return facts.sends_by_hand
    return facts.window.communicates if not facts.ranks else ""


def _by_hand(facts: RunFacts, name: str) -> bool:
    """Return whether somebody has averaged its gradient: ranks are about to step with the same."""
    found = facts.gradients
    return found is not None and name in found.compared and name not in found.parted


def _not_averaged(facts: RunFacts) -> Iterator[Hit]:
    yield from _strays(facts)
    own = _own_steps(facts)
    alone = [param for param in _alone(facts) if param.name not in own]
    if not facts.optimizers or not alone or _out_of_sight(facts):
        return
    names = some([param.name for param in alone])
    trained = sum(param.requires_grad for param in facts.params)
    if len(alone) == trained:
        what = f"{count(facts.world_size, 'rank')} run, and nothing averages the gradients of the model: no wrapper."
        yield Hit("model", what, milder=facts.averages_beside)
    else:
        what = f"Nobody averages {len(alone)} of {count(trained, 'trained parameter')}: {names}."
        fix = "Wrap what is trained once it is complete: everything inside one DDP, or inside the units of FSDP."
        if facts.window is not None and facts.window.communicates:
            fix = f"Where layers behind it are cut over ranks, add up the gradients of what they are given. Else: {fix}"
        yield Hit(at(alone[0].name), what, fix)


def _strays(facts: RunFacts) -> Iterator[Hit]:
    strays = facts.window.strays_apart if facts.window is not None and not facts.window.averages_weights else ()
    if strays:
        shapes = ", ".join(str([*shape]) for shape in strays[:3])
        what = f"It steps {count(len(strays), 'tensor')} of no module (shapes {shapes}) beside parameters of the model"
        yield Hit("optimizer", f"{what}: each rank has a gradient of its own, and nobody averages it.", _STRAYS)


def _maybe_by_hand(facts: RunFacts) -> Iterator[Hit]:
    if not facts.optimizers:
        return
    if _out_of_sight(facts) and (alone := _alone(facts)):
        who = facts.averages_by_hand or _sends(facts)
        what = f"No wrapper averages {count(len(alone), 'trained parameter')}; `{who}` may do so."
        yield Hit("model", what, "" if facts.averages_by_hand else _CUT)
    if own := [param.name for param in facts.params if param.requires_grad and param.name in facts.own_sizes]:
        what = (
            f"Each rank trains {count(len(own), 'parameter')} by itself, in shapes of its own or beside such: "
            f"{some(own)}. That is right of a part that is a rank's alone, as the head of its own classes."
        )
        yield Hit(at(own[0]), what, _OWN_SIZES)
    if facts.window is None or facts.gradients is None:
        return
    if cut := facts.window.cut:
        what = (
            f"Each rank holds values of its own of {count(len(cut), 'parameter')}, steps them by its own gradients, "
            f"and sends activations to the others ({facts.window.communicates}): {some(cut)}. That is right of parts "
            "of a layer, or experts, and wrong of what ranks are to hold the same of."
        )
        yield Hit(at(cut[0]), what, _CUT)
    divided, apart = set(facts.gradients.divided), _own_steps(facts)
    names = [param.name for param in _alone(facts)]
    if averages_weights(facts) and not facts.local_sgd:
        names += [name for name in facts.gradients.parted if name not in names]
    if steps := [name for name in names if name in divided]:
        what = (
            f"Some ranks step {count(len(steps), 'parameter')} that others do not: {some(steps)}. Whether the gradient "
            "is that of all ranks, and all get what is stepped, shows behind the step."
        )
        yield Hit(at(steps[0]), what, _DIVIDED)
    if own := [name for name in names if name in apart - divided]:
        what = (
            f"Each rank is about to step {count(len(own), 'parameter')} by gradients of its own, and the program "
            f"averages weights ({facts.window.averages_weights}): {some(own)}. Whether behind this step, is to be "
            "seen."
        )
        yield Hit(at(own[0]), what, LOCAL_SGD)


_CUT = (
    "Nothing, where each rank holds a part, or a stage; else build the model from one seed on every rank, and wrap it "
    "in DistributedDataParallel."
)
_OWN_SIZES = "Nothing, where that is meant; else build the model from one config on every rank, and wrap all of it."
_STRAYS = (
    "Make it a parameter of the module that is wrapped, so that forward uses it; or average its gradient behind the "
    "backward: dist.all_reduce(param.grad), and divide by the ranks."
)
BESIDE = "a model that an optimizer of its own steps, beside one whose gradients are averaged: a rank's own part"
LEAVE = (
    "Leave no_sync() before the last backward of a window; it stays on where weights are averaged in the place of "
    "gradients, as by accelerate's LocalSGD."
)
_DIVIDED = "Run prepkit audit --prove SCRIPT, which compares gradients and weights of all ranks."
LOCAL_SGD = (
    "Nothing, where local SGD is meant: behind each step of SGD it is what an average of gradients gives, and under "
    "Adam and its like it trains otherwise. Else average gradients: DistributedDataParallel(model)."
)


def _frozen(facts: RunFacts) -> Iterator[Hit]:
    for ddp in facts.ddp:
        if ddp.waits and ddp.reduced is not None and ddp.known < ddp.reduced:
            what = (
                f"DistributedDataParallel waits for the gradients of {ddp.reduced} parameters, and {ddp.known} train: "
                f"its buckets hold what was frozen after it was made{_named(ddp.frozen)}."
            )
            yield Hit(at(ddp.path), what)


def _named(names: tuple[str, ...]) -> str:
    return f", among {some(names)}" if names else ""


def _part(facts: RunFacts) -> Iterator[Hit]:
    if not facts.optimizers or not _one_model(facts):
        return
    tensor = _tensor_ranks(facts)
    found = tuple(
        param
        for param in facts.params
        if param.requires_grad and param.averaged_by and param.ranks * tensor < facts.world_size
    )
    if found:
        one = found[0]
        what = (
            f"Averaged over {count(one.ranks, 'rank')} of {facts.world_size}, by {' and '.join(one.averaged_by)}: "
            f"{count(len(found), 'parameter')}, {some([param.name for param in found])}."
        )
        yield Hit(at(one.name), what)


def _backend(facts: RunFacts) -> Iterator[Hit]:
    kinds = {param.device for param in facts.params} - {"meta"}
    if facts.world_size == 1 or not facts.backend:
        return
    for kind, needs, has in (("cuda", "nccl", "gloo"), ("cpu", "gloo", "nccl")):
        backends = dict(pair.split(":") for pair in facts.backend.split(",") if ":" in pair)
        used = backends.get(kind, "" if backends else facts.backend)
        if kind in kinds and used in (has, ""):
            what = f"Parameters lie on {kind}, and the process group has `{facts.backend}`."
            fix = f"Write init_process_group('cpu:gloo,cuda:nccl'), so that {kind} tensors have {needs}."
            yield Hit("env.backend", what, fix)


def _switched_off(facts: RunFacts) -> Iterator[Hit]:
    """While a loop runs, or before it; not of what prepkit has prepared, which switches it for each micro-batch."""
    if averages_weights(facts):
        return
    for before, now in facts.running:
        if new := [name for name in now.course.unaveraged if name not in before.course.unaveraged]:
            what = "An optimizer steps, and backward averages nothing here since the last look."
            yield Hit(at(new[0]), what, LEAVE)
    if facts.running:
        return
    if facts.world_size < 2 or facts.model.prepared:
        return
    off = [ddp.path for ddp in facts.ddp if not ddp.averages] or list(facts.unaveraged)
    if off:
        what = "The next backward averages nothing: no_sync() or set_requires_gradient_sync(False) stands at "
        yield Hit(at(off[0]), f"{what}{some(off) if off[0] else 'the root'}.", milder=True)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.not-averaged",
        summary="The gradients of everything that is trained are averaged over ranks.",
        check=_not_averaged,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS, Need.GRADIENTS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Wrap the model before training: DistributedDataParallel(model), fully_shard(model), accelerator.prepare.",
        milder=BESIDE,
        source=("pain 22", "torch DistributedDataParallel"),
    ),
    Rule(
        id="run.maybe-averaged",
        summary="What averages gradients can be seen.",
        check=_maybe_by_hand,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS, Need.GRADIENTS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Run prepkit audit SCRIPT, which compares gradients at the first step; nothing where the loop averages.",
        severity=Severity.NOTE,
    ),
    Rule(
        id="run.averaging-off",
        summary="The backward of a step averages gradients.",
        check=_switched_off,
        at=(Moment.AUDIT, Moment.DRIFT),
        needs=(Need.BEFORE,),
        fix="Leave `with model.no_sync():` before the last micro-batch; model.set_requires_gradient_sync(True).",
        milder="before the loop, which may switch it on again",
        source=("torch DistributedDataParallel.no_sync",),
    ),
    Rule(
        id="run.averaged-over-part",
        summary="Gradients are averaged over all ranks, and not over some.",
        check=_part,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Give the wrapper a mesh or a group of all ranks; a mesh of (n, 1) makes n models that part.",
        source=("pain 22",),
    ),
    Rule(
        id="run.ddp-frozen",
        summary="DistributedDataParallel waits for the parameters that train.",
        check=_frozen,
        at=(Moment.AUDIT,),
        fix="Freeze first, and call DistributedDataParallel(model) after it.",
        source=("pain 26",),
    ),
    Rule(
        id="run.backend",
        summary="The process group has the backend of the device that parameters lie on.",
        check=_backend,
        at=(Moment.AUDIT,),
        fix="Write init_process_group('cpu:gloo,cuda:nccl').",
        severity=Severity.WARNING,
        source=("pain 33",),
    ),
)
"""Reporting order: what parts ranks, then what stops them, then what slows them down."""
