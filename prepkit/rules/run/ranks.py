"""What ranks hold alike though they should not, or unlike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prepkit.facts.run import RankFacts, RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some, spans
from prepkit.rules.rule import Hit, Moment, Need, Rule
from prepkit.rules.run.averaging import BESIDE, averages_weights
from prepkit.rules.run.who_steps import foreign


def _odd(ranks: tuple[RankFacts, ...], digest: Callable[[RankFacts], str]) -> str:
    """Return which ranks hold something else than the first, as text; empty where none does."""
    others = [str(rank.rank) for rank in ranks if digest(rank) != digest(ranks[0])] if ranks else []
    return f"rank{'s' * (len(others) > 1)} {', '.join(others[:5])}{', …' * (len(others) > 5)}" if others else ""


def _models(facts: RunFacts) -> Iterator[Hit]:
    pipeline = len({rank.names for rank in facts.ranks}) == len(facts.ranks) and not any(
        param.averaged_by for param in facts.params
    )
    sends = bool(facts.sends_by_hand if facts.window is None else facts.window.communicates)
    first = facts.ranks[0].names if facts.ranks else ""  # where ranks send activations, others may hold other stages
    ranks = tuple(rank for rank in facts.ranks if rank.names == first or not sends)
    if (odd := _odd(ranks, lambda rank: rank.model)) and not pipeline and not facts.own_sizes:
        what = f"Names, shapes, dtypes or requires_grad of parameters on {odd} are not those of rank 0."
        yield Hit("model", what)


def _optimizers(facts: RunFacts) -> Iterator[Hit]:
    for one in () if _pipeline(facts) else facts.unlike:
        fix = _SAME_OPTIONS + _AVERAGED if foreign(facts) else ""
        yield Hit("optimizer", f"Ranks step with different options: {one.name} is {one.held}.", fix)


_SAME_OPTIONS = (
    "Give every rank the same lr, weight_decay and groups: where a metric decides, as for ReduceLROnPlateau, "
)
_AVERAGED = "average it over the ranks before: torch.distributed.all_reduce(metric); metric /= world."
_TOGETHER = "Train through the wrapper: its forward, no step of one rank alone; broadcast the weights to go on."


_WRITTEN_ALIKE = (
    "Write weights on all ranks alike: inside torch.random.fork_rng() after torch.manual_seed(0), or send rank 0's: "
    "dist.broadcast(param.data, src=0)."
)


_EXPERTS = (
    "Where each rank is to have its own, as experts, leave them out of what is averaged; else begin alike: "
    "torch.manual_seed(0) before the model is built."
)


def _until_they_meet(facts: RunFacts) -> set[str]:
    """Parameters that ranks step by themselves until weights are averaged, as far as that can be told."""
    if averages_weights(facts):
        return {param.name for param in facts.params}
    line = facts.window is not None and bool(facts.window.averages_weights)
    return {param.name for param in facts.params if line and not param.averaged_by}


def _values(facts: RunFacts) -> Iterator[Hit]:
    apart = _until_they_meet(facts)
    for _, now in facts.running:
        if parted := [name for name in now.parted if name not in apart.union(facts.parted)]:  # told at the audit
            what = f"Ranks that hold the same of {count(len(parted), 'parameter')} differ: {some(parted)}."
            yield Hit(at(parted[0]), what, _TOGETHER)
    if facts.running and facts.applied is None:
        return  # what differed at an audit was told then
    own = {name for ddp in facts.ddp for name in ddp.ignored}  # experts, which each rank has for itself
    if facts.sends_by_hand:  # and what may be cut by hand, as nobody averages it
        own |= {param.name for param in facts.params if not param.averaged_by}
    if parted := [name for name in facts.parted if name not in own]:
        odd = facts.applied.odd_ranks if facts.applied is not None else ()
        who = f"Beside rank 0, rank {spans(odd)} holds" if odd else "Every rank holds"
        what = f"{who} {count(len(parted), 'tensor')} with values of its own: {some(parted)}."
        fix = "" if facts.loop is None else _WRITTEN_ALIKE
        sends = facts.sends_by_hand if facts.window is None else facts.window.communicates
        if sends and len(parted) < len(facts.params):
            what, fix = f"{what[:-1]}, and averages their gradients with those of others.", _EXPERTS
        yield Hit(at(parted[0]), what, fix, milder=facts.averages_beside)


def _rests_apart(facts: RunFacts) -> Iterator[Hit]:
    for name in facts.window.rests_apart if facts.window is not None else ():
        what = f"Ranks compute with `{name}`, of which nothing trains, and hold other weights of it"
        yield Hit(name, f"{what}: what it gives, as targets, is another model's on each.")


def _buffers(facts: RunFacts) -> Iterator[Hit]:
    if facts.buffers_apart:
        what = (
            f"Ranks hold other values of {count(len(facts.buffers_apart), 'buffer')}: {some(facts.buffers_apart)}. "
            "Rank 0's are saved and exported; each rank evaluates with its own, and has rank 0's after a resume."
        )
        yield Hit("model", what)


def _pipeline(facts: RunFacts) -> bool:
    """Return whether each rank has modules of its own, or may have, be it under the same names."""
    cut = set(facts.window.cut if facts.window is not None else ())
    alike = {param.name for param in facts.params if param.requires_grad} - cut
    return len({rank.names for rank in facts.ranks}) > 1 or (bool(cut) and not alike) or bool(facts.sends_by_hand)


def _modes(facts: RunFacts) -> Iterator[Hit]:
    if not _pipeline(facts) and (odd := _odd(facts.ranks, lambda rank: rank.modes)):
        yield Hit("model", f"Which modules are in training mode on {odd} is not as on rank 0.")


def _state(facts: RunFacts) -> Iterator[Hit]:
    own = Counter(name for rank in facts.ranks for name in rank.keeps)
    divided = sum(bool(rank.keeps) for rank in facts.ranks) > 1 and own.most_common(1)[0][1] == 1  # as of a Muon
    if not _pipeline(facts) and not divided and (odd := _odd(facts.ranks, lambda rank: rank.state)):
        what = f"The state of parameters that all ranks step alike, its count of steps too, on {odd} is not rank 0's."
        yield Hit("optimizer", what)


_END_TOGETHER = "End passes on all ranks together, as by `if ready.ranks.reduce(float(done), 'max'):`."


def _passes(facts: RunFacts) -> Iterator[Hit]:
    if facts.loop is not None and facts.loop.passes[0] != facts.loop.passes[1]:
        least, most = facts.loop.passes
        what = (
            f"Ranks are in different passes over their data, {least} to {most}: one has left a pass early, or loaders "
            "of the loop's own have different lengths."
        )
        yield Hit("loop", what)


def _orders(facts: RunFacts) -> Iterator[Hit]:
    if facts.loop is not None and all(facts.loop.orders) and facts.loop.orders[0] != facts.loop.orders[1]:
        least, most = facts.loop.passes
        lost = "what one rank leaves to another is read by nobody, and other samples twice."
        if least == most:
            yield Hit("loaders", f"Each rank takes its part of an order of its own: {lost}")
        else:
            what = f"Ranks take their parts of the orders of different passes, {least} to {most}: {lost}"
            yield Hit("loaders", what, _END_TOGETHER)
    for number, (least, most) in enumerate(facts.loop.streams if facts.loop is not None else ()):
        if not least or least == most:
            continue
        what = (
            "The stream gives each rank other samples, and each rank keeps only its part of them: what it leaves to "
            "the others is read by nobody."
        )
        fix = (
            "Write loaders=pk.data.KeepLoaders() where the stream splits itself by rank, or let it give "
            "all samples on every rank, in one order."
        )
        yield Hit(f"loaders[{number}]", what, fix)


def _unrepeatable(facts: RunFacts) -> Iterator[Hit]:
    for number in facts.unrepeatable:
        what = "The pass under way began in an order that does not come again: a resume would read some samples twice."
        yield Hit(f"loaders[{number}]", what)


def _loss(facts: RunFacts) -> Iterator[Hit]:
    if facts.loop is not None and not facts.loop.loss_finite:
        here = " on this rank" * (not facts.loop.own_loss_finite)
        what = f"The loss is not finite in window {facts.loop.window}{here}, and no step can mend weights that are not."
        yield Hit("loop", what)


def _schedulers(facts: RunFacts) -> Iterator[Hit]:
    if not _pipeline(facts) and (odd := _odd(facts.ranks, lambda rank: rank.scheduler)):
        yield Hit("scheduler", f"Class, horizon or position on {odd} is not that of rank 0.")


def _alike(facts: RunFacts) -> Iterator[Hit]:
    groups = {rank.tensor_ranks: rank.generator for rank in facts.ranks}
    alike = facts.drawn_alike or (len(groups) > 1 and len(set(groups.values())) == 1)
    draws, given = (facts.window.draws, facts.window.given) if facts.window is not None else ("", ())
    together = (
        len(given) > 1 and any(given) and len(set(given)) == 1
    )  # as where ranks hold parts of layers, cut by hand
    if together or not (alike and (facts.drops or draws)):
        return
    dropped = f"dropout in {count(facts.drops, 'module')} takes the same elements"
    does = dropped if facts.drops else f"{draws} draws the same numbers"
    what = f"The random generators of all {facts.world_size} ranks are in one state: {does} on each"
    what = f"{what}, though ranks read other samples."
    same = max(facts.alike_for, max(map(len, groups), default=1))
    seed = f"seed + dist.get_rank(){f' // {same}' if same > 1 else ''}"
    yield Hit(
        "env", what, f"Write torch.manual_seed({seed}) once the model is built (import torch.distributed as dist)."
    )


def _unlike(facts: RunFacts) -> Iterator[Hit]:
    if not facts.drops:
        return
    state = {rank.rank: rank.generator for rank in facts.ranks}
    for rank in facts.ranks:
        if len({state[other] for other in rank.tensor_ranks if other in state}) > 1:
            ranks = ", ".join(map(str, rank.tensor_ranks))
            what = (
                f"Ranks {ranks} hold parts of one layer, and their generators part: {some(facts.dropout)} drop unlike."
            )
            yield Hit("env", what)
            return


_DRAWN = (
    "Let the sampler or stream draw from a generator that it holds (self.generator = torch.Generator(), "
    "random.Random() or one of numpy), which is seeded anew for each pass, or from (seed, epoch), with a "
    "set_epoch(epoch)."
)

RULES: tuple[Rule, ...] = (
    Rule(
        id="run.ranks-models",
        summary="Every rank has the same parameters, and trains the same ones.",
        check=_models,
        at=(Moment.AUDIT,),
        needs=(Need.RANKS,),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Build and freeze the model from the same config on every rank.",
        source=("pain 11",),
    ),
    Rule(
        id="run.ranks-optimizers",
        summary="Every rank steps with the same options.",
        check=_optimizers,
        at=(Moment.DUE, Moment.AUDIT, Moment.DRIFT),
        needs=(Need.OPTIMIZERS, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix=(f"{_SAME_OPTIONS}give it ready.ranks.reduce(metric)."),
        source=("pain 11",),
    ),
    Rule(
        id="run.ranks-values",
        summary="What several ranks hold the same of has one value, bit by bit.",
        check=_values,
        at=(Moment.ACT, Moment.APPLY, Moment.DUE, Moment.AUDIT, Moment.DRIFT),
        needs=(Need.RANKS, Need.BEFORE),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix=(
            "Write torch.manual_seed(0) before the model is built, load one checkpoint on every rank, or send rank 0's "
            "values: dist.broadcast(tensor, src=0), or weights=BroadcastWeights() in the config."
        ),
        milder=BESIDE,
        source=("pain 11", "pain 17", "pain 22"),
    ),
    Rule(
        id="run.rests-apart",
        summary="A model that rests is the same on all ranks that compute with it.",
        check=_rests_apart,
        at=(Moment.AUDIT,),
        needs=(Need.RANKS,),
        cost="one exchange of a number for each model that rests",
        fix=(
            "Load it on every rank, or send rank 0's: for one in teacher.state_dict().values(): "
            "torch.distributed.broadcast(one, src=0). Nothing, where each rank is to have a teacher of its own."
        ),
        severity=Severity.WARNING,
        source=("pain 11", "torch DistributedDataParallel: wraps what trains alone"),
    ),
    Rule(
        id="run.ranks-modes",
        summary="Every rank has the same modules in training mode.",
        check=_modes,
        at=(Moment.ACT, Moment.AUDIT),
        needs=(Need.RANKS,),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Call model.train(), or model.eval(), for the same modules on every rank.",
    ),
    Rule(
        id="run.ranks-passes",
        summary="Ranks are in the same pass over their data.",
        check=_passes,
        at=(Moment.DUE,),
        needs=(Need.LOOP, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix=_END_TOGETHER,
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.orders-apart",
        summary="Ranks take their parts of one order of the data.",
        check=_orders,
        at=(Moment.DUE,),
        needs=(Need.LOOP, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix=_DRAWN,
        source=("DL-15",),
    ),
    Rule(
        id="run.order-lost",
        summary="The order of a pass can be drawn again after a resume.",
        check=_unrepeatable,
        at=(Moment.SAVE,),
        needs=(Need.BEFORE,),
        cost="draws the order of a pass once more",
        fix=_DRAWN,
        severity=Severity.WARNING,
        source=("DL-15",),
    ),
    Rule(
        id="run.buffers-apart",
        summary="Buffers that are saved are the same on every rank.",
        check=_buffers,
        at=(Moment.SAVE,),
        needs=(Need.RANKS,),
        cost="reads the buffers once, and one exchange of a number for each",
        fix=(
            "Before each save and evaluation, on every rank, write for buffer in ready.unwrap().buffers(): "
            "dist.broadcast(buffer, src=0) (import torch.distributed as dist); for batch norms build the model with "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or train under DDP, which sends rank 0's buffers "
            "before each forward."
        ),
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.loss-not-finite",
        summary="The loss is a number on every rank.",
        check=_loss,
        at=(Moment.DUE,),
        needs=(Need.LOOP, Need.RANKS),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Go back to a checkpoint, and lower the learning rate or write Config(clip=pk.ClipNorm(1.0)).",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.ranks-state",
        summary="What replicas have of optimizer state is the same.",
        check=_state,
        at=(Moment.AUDIT,),
        needs=(Need.RANKS,),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Load the optimizer's state on every rank, before its first step.",
        source=("pain 13",),
    ),
    Rule(
        id="run.ranks-schedulers",
        summary="Schedulers stand at the same step on every rank.",
        check=_schedulers,
        at=(Moment.AUDIT,),
        needs=(Need.RANKS,),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Load the scheduler's state on every rank, and tick it as often.",
    ),
    Rule(
        id="run.dropout-unlike",
        summary="Ranks that hold parts of one layer drop the same elements.",
        check=_unlike,
        at=(Moment.AUDIT,),
        needs=(Need.RANKS,),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Call torch.manual_seed with one seed on the ranks of a tensor-parallel group.",
    ),
    Rule(
        id="run.dropout-alike",
        summary="Ranks with other samples draw other numbers for them: for dropout, and as noise.",
        check=_alike,
        at=(Moment.DUE, Moment.AUDIT),
        needs=(Need.RANKS,),
        cost="a share of the one exchange over the ranks that the moment makes",
        fix="Write torch.manual_seed(seed + rank) once the model is built; set_seed(seed, device_specific=True).",
        severity=Severity.WARNING,
    ),
)
"""Reporting order: another model, another optimizer, other values, modes and state, other random numbers."""
