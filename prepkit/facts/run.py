"""What was seen of a model that something else has prepared: who averages, who steps, and what ranks differ in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from attrs import frozen

from prepkit.facts.loop import LoopFacts
from prepkit.facts.model import ModelFacts
from prepkit.facts.preparation import HowPrepared
from prepkit.facts.training import LoaderFacts
from prepkit.facts.window import CourseFacts, GradientFacts, OddSample, SharersFacts, WindowFacts

Averager = Literal["ddp", "fsdp1", "fsdp2", "dtensor", "deepspeed", "hook"]
"""What sees to it that a parameter's gradient is that of several ranks; a hook on the parameter may do anything."""

Wrapper = Literal["ddp", "compiled", "checkpointed", "fsdp1", "deepspeed"]
"""A module that stands around another."""


@frozen(kw_only=True)
class PreparedParam:
    """One parameter as it lies now; tied ones once."""

    name: str
    dtype: str
    requires_grad: bool = True
    device: str = "cpu"
    """Kind of its device: ``cpu``, ``cuda``, ``meta``."""
    averaged_by: tuple[Averager, ...] = ()
    ranks: int = 1
    """Over how many ranks its gradient is averaged, or its elements are divided."""
    matrix: bool = False
    """Whether it has two dimensions or more."""


@frozen(kw_only=True)
class WrappedModule:
    """A place at which wrappers stand, outermost first; a unit of ``fully_shard`` is no wrapper."""

    path: str
    wrappers: tuple[Wrapper, ...]


@frozen(kw_only=True)
class DDPFacts:
    """One ``DistributedDataParallel``."""

    path: str
    reduced: int | None
    """Parameters that its reducer was built with; None: this torch does not say."""
    known: int
    """Parameters that it has seen and that train now."""
    frozen: tuple[str, ...] = ()
    """Names of those that it has seen and that do not train now."""
    averages: bool = True
    """Whether the next backward averages; not inside ``no_sync``."""
    ignored: tuple[str, ...] = ()
    """Names of those that it was told to leave to each rank."""
    joins: bool = False
    """Whether it stands inside torch's ``Join``, where ranks may end early."""
    hook: str = ""
    """The communication hook that somebody has registered; empty: none."""
    waits: bool = False
    """Whether it waits for every gradient: without ``find_unused_parameters`` and ``static_graph``."""


@frozen(kw_only=True)
class PreparedOptimizer:
    """One optimizer, out of the wrappers of accelerate and DeepSpeed."""

    name: str
    held: tuple[str, ...]
    """Names of the model's parameters that it steps."""
    orphans: tuple[tuple[int, ...], ...] = ()
    """Shapes of tensors that it steps and the model does not have."""
    lost: int = 0
    """Entries of its state whose tensor stands in none of its groups."""
    misfits: tuple[str, ...] = ()
    """Parameters whose moments have another shape."""
    spoiled: tuple[str, ...] = ()
    """Parameters whose state holds NaN or infinite elements."""
    rates: tuple[float, ...] = ()
    """Learning rate of each group."""
    idle_decay: float = 0.0
    """Weight decay of a group that holds nothing, where no group that holds something decays."""
    fresh: bool = False
    """Whether it keeps state from its first step on, and has none."""
    counted: int | None = None
    """Steps that its state has counted; None: it counts none, or where reading it would wait for a device."""
    scheduled: bool = False
    """Whether a scheduler has been put on it (``initial_lr`` in a group)."""
    rounds: bool = False
    """Whether it rounds updates stochastically, or keeps masters of its own."""
    engine: bool = False
    """Whether it is that of the DeepSpeed engine, which keeps master weights."""


@frozen(kw_only=True)
class PreparedScheduler:
    """One learning-rate scheduler."""

    name: str
    drives_optimizer: bool
    horizon: int | None = None
    """Ticks that it is made for; None: none, or not known."""
    ticks: int = 1
    """Ticks for each optimizer step, as accelerate's wrapper makes them; 1 where it is called by hand."""
    ticked: int | None = None
    """How often it has been ticked (``last_epoch``); None: it does not say."""
    early: int = 0
    """How often it was ticked after it was made, loaded ticks included."""
    by_batch: bool = False
    """Whether its class is made to be ticked with every batch, as ``OneCycleLR``."""
    factor: tuple[float, float] | None = None
    """Of ``LambdaLR``, where a function gives it: the rate that it multiplies, and the largest factor that is found."""
    end: int | None = None
    """Of such a function, the tick from which it gives one small factor; None: there is none that is found."""
    warm: int = 0
    """Of such a function, the first tick at which it gives half of its largest factor; 0: it begins so."""


Division = Literal["", "sampler", "accelerate", "dataset"]
"""What gives each rank its samples: nothing, a ``DistributedSampler``, accelerate's shards, the data set itself."""


@frozen(kw_only=True)
class PreparedLoader:
    """One loader, and how its samples are divided over ranks."""

    seen: LoaderFacts
    division: Division = ""
    replicas: int = 1
    """Into how many parts the samples are divided."""
    part: int = 0
    """Which of them this rank reads."""
    batches: int | None = None
    """Batches of a pass on this rank; None: not known."""
    data: str = ""
    """A digest of what can be told of the data set without reading it; empty: nothing can."""
    parts: int = 1
    """Into how many parts all that divides it divides it, one inside the other."""
    content: str = ""
    """A digest of which samples its data set has, where its kind tells; else of their number."""
    picked: tuple[str, tuple[int, ...]] = ("", ())
    """Where it is a part of another data set: a digest of that one, and the least indices of what it takes there."""
    held: tuple[tuple[str, str], ...] = ()
    """Digests of its first sample, under no name, and of numbers that its data set keeps, where it divides one."""
    sample: OddSample = ""
    """What is wrong in its first sample, where it feeds a causal language model."""
    indices: str = ""
    """A digest of the indices of its first batches; empty: not looked at, or not to be told."""
    samples: str = ""
    """A digest of its first samples; likewise."""
    reseeds: tuple[str, ...] = ()
    """What each sample of its data set calls with one seed, whatever the sample: ``torch.manual_seed``."""
    weights: int | None = None
    """Weights that it draws its samples by; None: by none."""
    order: tuple[int, ...] = ()
    """Seed and epoch of a sampler that shuffles for all ranks together; empty: there is none."""


@frozen(kw_only=True)
class EngineFacts:
    """What a DeepSpeed engine was told by its JSON."""

    stage: int
    micro_batch: int | None
    accumulation: int
    scheduler: str | None = None
    """Class of the scheduler that the engine ticks by itself."""
    clipping: float = 0.0
    past: bool = False
    """Whether the optimizer inside its own is about to step, and the engine has not called it."""


@frozen(kw_only=True)
class RankFacts:
    """What one rank tells the others: small, whatever the model's size."""

    rank: int
    names: str
    """Digest of the names of parameters."""
    model: str
    """Digest of names, shapes, dtypes and of what trains."""
    values: str
    """Digest of the values that all ranks of a group should hold alike."""
    generator: str
    """Digest of the state of the generator that dropout draws from."""
    tensor_ranks: tuple[int, ...] = ()
    """Ranks that hold parts of the same layers; this rank alone where no layer is cut."""
    loaders: tuple[tuple[int, int, str, str], ...] = ()
    """Per loader: replicas, part, division and digest of its data set."""
    passes: tuple[tuple[int | None, int | None, tuple[int, ...]], ...] = ()
    """Per loader: batches of a pass, samples of a batch, and what gives the order."""
    contents: tuple[str, ...] = ()
    """Per loader: digest of which samples its data set has."""
    held_data: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Per loader: as ``held`` of ``PreparedLoader``."""
    picks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Per loader: of which data set its own is a part, and the least indices of what it takes there."""
    reads: tuple[tuple[str, str], ...] = ()
    """Per loader: digests of the indices of its first batches, and of its first samples."""
    modes: str = ""
    """Digest of which modules are in training mode."""
    scheduler: str = ""
    """Digest of the scheduler's class, horizon and position."""
    state: str = ""
    """Digest of the optimizers' state of parameters that every rank steps alike."""
    keeps: frozenset[str] = frozenset()
    """Those of which it has a state that is not all zeros, where not all of them are such."""
    held: str = ""
    """Digest of the names of parameters that its optimizers hold."""
    awaits: tuple[str, ...] = ()
    """Names of the parameters whose gradients DDP has waited for."""


@frozen(kw_only=True)
class Unlike:
    """A number that every rank should have alike, and has not."""

    name: str
    """Such as ``lr of group 0``."""
    held: str
    """Who has what: ``0.1 on rank 0, 0.2 on ranks 1-3``."""


@frozen(kw_only=True)
class Unread:
    """A setting that was written where nobody reads it."""

    where: str
    """The object that has it."""
    name: str
    meant: str
    """What would do what it seems to mean."""
    sure: bool = False
    """True if it can mean nothing else; False: the name is like one that is read."""


@frozen(kw_only=True)
class AdapterFacts:
    """Adapters of peft, by the paths of their layers."""

    off: tuple[str, ...] = ()
    """Those that train, and are disabled or merged."""
    zero: tuple[str, ...] = ()
    """Those that train, and have a scale of 0."""
    base: tuple[str, ...] = ()
    """Those of which the layer itself trains."""
    heads: tuple[str, ...] = ()
    """Heads of a task that do not train."""


@frozen(kw_only=True)
class StrangerFacts:
    """An optimizer that is about to step, and that the plan of a prepared model does not know."""

    name: str
    replaced: tuple[str, ...] = ()
    """Parameters that it holds and that apply has replaced in the model, by the names that they had."""
    shared: tuple[str, ...] = ()
    """The model's parameters that it holds."""
    planned: bool = True
    """Whether the plan has an optimizer, which is another one."""
    averaged_elsewhere: bool = False
    """Whether gradients are divided, averaged and cleared for the plan's own."""
    engine_steps: bool = False
    """Whether the engine steps the plan's own, and takes gradients away as they come."""
    window: int = 0
    """Micro-batches of the window inside which it steps gradients that nobody has averaged; 0: it does not."""


@frozen
class Departure:
    """Something that is not as a plan says."""

    where: str
    """The name of a parameter or a buffer, or a kind of step."""
    what: str
    """What differs, with the planned and the found value."""


def same(where: str, what: str, planned: object, found: object) -> Iterator[Departure]:
    """The difference of what is there from what was planned, if any."""
    if planned != found:
        yield Departure(where, f"{what}: planned {planned}, found {found}")


def each(where: str, what: str, bad: Sequence[str]) -> Iterator[Departure]:
    """One difference for all of many objects that are not as planned, if any."""
    if bad:
        yield Departure(where, f"{what}: {'; '.join(bad[:5])}{f'; and {len(bad) - 5} more' * (len(bad) > 5)}")


@frozen(kw_only=True)
class AppliedFacts:
    """What differs from a plan after apply; empty where nothing does, or nobody has looked."""

    layout: tuple[Departure, ...] = ()
    """Parameters and buffers that are not as the plan says, are missing, or are not in the plan."""
    masters: tuple[str, ...] = ()
    """What of the float32 master weights is none, where the plan says who keeps them."""
    empty: tuple[str, ...] = ()
    """Parameters and buffers without data."""
    changed: tuple[str, ...] = ()
    """Weights and buffers with other values than before the first step, although no step writes them."""
    odd_ranks: tuple[int, ...] = ()
    """Ranks on which tensors of ``RunFacts.parted`` differ from rank 0's, where that is known."""
    overwritten: tuple[int, ...] = ()
    """Ranks whose weights were not rank 0's, and that have rank 0's now, since the engine sends them."""
    owners: tuple[Departure, ...] = ()
    """Duties that somebody else has than the plan says."""
    steps: tuple[Departure, ...] = ()
    """What steps of the plan have not left as they say."""


@frozen(kw_only=True)
class RunFacts:
    """A prepared model and what belongs to it, as one rank sees it. What nobody has looked at keeps its default."""

    model: ModelFacts = ModelFacts(classes=(), modules=(), params=())
    params: tuple[PreparedParam, ...] = ()
    wrapped: tuple[WrappedModule, ...] = ()
    ddp: tuple[DDPFacts, ...] = ()
    units: tuple[str, ...] = ()
    """Paths of the units of FSDP1 and FSDP2."""
    optimizers: tuple[PreparedOptimizer, ...] = ()
    scheduler: PreparedScheduler | None = None
    loaders: tuple[PreparedLoader, ...] = ()
    gradients: GradientFacts | None = None
    """None where nobody is about to step, or a closure is yet to make them."""
    engine: EngineFacts | None = None
    training: bool = True
    """Whether the root is in training mode."""
    evaluating: tuple[str, ...] = ()
    """Outermost modules in evaluation mode below a root that trains, with dropout and with parameters that train."""
    dropout: tuple[str, ...] = ()
    """Modules that drop elements in training, whatever mode they are in."""
    drops: int = 0
    """How many of them are in training mode, so that their next forward drops."""
    drawn_alike: bool = False
    """Whether the generators of ranks that read other samples are all in one state."""
    alike_for: int = 1
    """Neighbouring ranks that read the same samples, and should draw alike."""
    sharers: SharersFacts | None = None
    """Of these, where they step other gradients than each other; None: they do not."""
    normalised: tuple[str, ...] = ()
    """Modules that normalise by their batch in training."""
    nan: tuple[str, ...] = ()
    """Tensors with NaN among their elements on this rank."""
    infinite: tuple[str, ...] = ()
    """Parameters with infinite elements on this rank."""
    negative: tuple[str, ...] = ()
    """Running variances with elements below zero."""
    zeros: tuple[str, ...] = ()
    """Trained matrices of which every element on this rank is zero."""
    drops_all: tuple[str, ...] = ()
    """Modules that drop every element in training."""
    unaveraged: tuple[str, ...] = ()
    """Units of FSDP2 that are told to reduce no gradients."""
    elsewhere: tuple[str, ...] = ()
    """Modules whose ``forward`` runs another object's."""
    compile_off: bool = False
    """Whether torch compiles nothing in this process."""
    unread: tuple[Unread, ...] = ()
    """Settings under names that nobody reads."""
    hidden: tuple[str, ...] = ()
    """Places in plain lists, tuples and dicts of modules and parameters that would train and that nobody knows."""
    gradients_on: bool = True
    """Whether this thread computes gradients."""
    launched: int = 1
    """Processes that a launcher says it has started."""
    inside_window: bool = False
    """Whether accelerate counts micro-batches, and this one is not the last of its window."""
    unused_window: bool = False
    """Whether accelerate was to count micro-batches, and has counted none."""
    frozen_drops: tuple[str, ...] = ()
    """Frozen parts beside what trains, in training mode with dropout."""
    frozen_norms: tuple[str, ...] = ()
    """Frozen parts with a batch norm that averages what it sees."""
    forgetful: tuple[str, ...] = ()
    """Checkpoints over dropout that keep no random numbers."""
    renormalised: tuple[str, ...] = ()
    """Checkpoints over batch norms that average what they see."""
    softmax: str = ""
    """A softmax before a loss that takes one itself."""
    adapters: AdapterFacts | None = None
    """None where peft has put none into the model."""
    averages_by_hand: str = ""
    """The function of the program that seems to average over ranks by itself; empty: none was seen."""
    local_sgd: str = ""
    """What of a library's averages weights in the place of gradients: its class; empty: nothing does."""
    sends_by_hand: str = ""
    """What of the program seems to send activations between ranks, unseen by a window; empty: nothing does."""
    saves_shards: tuple[str, ...] = ()
    """Places in the program that would write shards, by ``save_pretrained`` or ``torch.save``."""
    mixes_empty: tuple[str, ...] = ()
    """Places in the program that mix weights of two modules which ZeRO-3 keeps empty."""
    writes_lost: tuple[str, ...] = ()
    """Those that write into weights which DeepSpeed has gathered to be read."""
    accumulation: int | None = None
    """Micro-batches per step that accelerate counts; None: it is not in use."""
    world_size: int = 1
    rank: int = 0
    backend: str = ""
    """Backends of the default group in torch's words, such as ``cpu:gloo,cuda:nccl``."""
    ranks: tuple[RankFacts, ...] = ()
    """What every rank has told, in their order; empty: they were not asked."""
    parted: tuple[str, ...] = ()
    """Tensors whose values differ over ranks that should hold them alike."""
    own_sizes: tuple[str, ...] = ()
    """Parameters and buffers that each rank has for itself: with what ranks hold in other shapes, what nobody averages
    either. Empty where something of them is averaged, or where ranks differ in more than shapes."""
    averages_beside: bool = False
    """Whether the program averages gradients of another model than this one, of which nobody averages any."""
    buffers_apart: tuple[str, ...] = ()
    """Buffers of a checkpoint that ranks hold unlike."""
    preparation: HowPrepared | None = None
    """How it was prepared; None where nobody has looked."""
    running: tuple[tuple[RunningFacts, RunningFacts], ...] = ()
    """What is compared: an earlier look and one at this step; empty where there is no earlier one."""
    unrepeatable: tuple[int, ...] = ()
    """Loaders whose pass under way would not begin again as it began."""
    restepped: str = ""
    """Class of an optimizer that is about to step over the gradients of its last step; empty: none."""
    masters_apart: tuple[str, ...] = ()
    """Parameters of which DeepSpeed steps other values than the model computes with."""
    overwritten: bool = False
    """Whether weights were written in place of which the optimizer keeps master weights of its own."""
    unlike: tuple[Unlike, ...] = ()
    """Options of optimizers that ranks should have alike and have not, with who has which."""
    stranger: StrangerFacts | None = None
    """None unless an optimizer that the plan does not know is about to step."""
    whole_state: int = 0
    """Parameters whose state is whole in what is about to be loaded, and sharded in the optimizer."""
    whole_weights: tuple[str, ...] = ()
    """Parameters that are whole in what is about to be loaded, and sharded in the model."""
    loop: LoopFacts | None = None
    """None where nobody trains with prepkit's loop."""
    applied: AppliedFacts | None = None
    """None but after apply."""
    window: WindowFacts | None = None
    """None where no script was run."""


@frozen(kw_only=True)
class RunningParam:
    """One parameter as it lies at a step; tied ones once."""

    name: str
    dtype: str
    device: str
    """Kind of its device: ``cpu``, ``cuda``, ``meta``."""
    requires_grad: bool
    known: bool = True
    """Whether the very parameter was there at the earlier look."""
    served: bool = True
    """Whether it would be averaged and stepped if it trains."""
    stuck: bool = False
    """Whether it is stepped though it is frozen: the engine keeps master weights, or one flat parameter with others."""
    awaited: bool = False
    """Whether DDP waits for its gradient though it is frozen, and averages nothing without."""
    stepped: bool = True
    """Whether an optimizer holds it, where it has begun to train since the earlier look."""


@frozen(kw_only=True)
class RunningFacts:
    """Model, optimizers and learning rates at one moment."""

    params: tuple[RunningParam, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    hooks: tuple[tuple[str, str], ...] = ()
    """Where a hook hangs, a module or a parameter, and which: its kind and its function."""
    held: tuple[tuple[str, ...], ...] = ()
    """Per optimizer the parameters that it steps, by name."""
    orphans: tuple[int, ...] = ()
    """Per optimizer how many tensors it steps that the model does not have."""
    stateful: tuple[tuple[str, ...], ...] = ()
    """Per optimizer the slots of which it has state: by name, or by number where the model has no such parameter."""
    rates: tuple[float, ...] = ()
    """Learning rates of the groups that the scheduler drives."""
    scheduled: tuple[float, ...] = ()
    """What the scheduler has set them to last; empty without one, or where it does not say."""
    parted: tuple[str, ...] = ()
    """Parameters whose replicas on different ranks differ."""
    recompiled: tuple[tuple[str, int], ...] = ()
    """Functions that torch compiled as often as it may, and runs as they are since; and how often."""
    course: CourseFacts = CourseFacts()
