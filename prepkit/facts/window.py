"""What a script did up to its first optimizer step, seen from outside of it; gradients before a step."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.facts.copies import AverageFacts
from prepkit.facts.inputs import InputFacts
from prepkit.facts.libraries import LibraryFacts
from prepkit.facts.loops import LessonFacts, ShareFacts, TurnFacts
from prepkit.facts.phases import PhaseFacts
from prepkit.facts.terms import TermFacts
from prepkit.facts.values import BeginningFacts, Following, ValueFacts

Groups = tuple[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], ...]
"""Groups of optimizers: the names of the parameters of each, and its options but for rates, with their values."""
OddSample = Literal["", "shifted", "unmasked", "learned", "both", "counted", "endless"]
"""What is wrong in a sample of a causal language model: labels that are shifted already; without a mask, pads before
the text, pads behind it that count as labels, and pads before it that count; masked pads that count as labels; an
end of the text that counts as none."""


@frozen(kw_only=True)
class GradientFacts:
    """The gradients that an optimizer is about to step."""

    stepped: int
    """Parameters of the model that an optimizer holds and that train."""
    missing: tuple[str, ...] = ()
    """Those of them without a gradient on a rank that holds some of their elements."""
    awaited: tuple[str, ...] = ()
    """Those without one among all that train, which DDP waits for whether they are stepped or not."""
    awaited_on: tuple[int, ...] = ()
    """Ranks on which they had none; empty: not known, or DDP waits for nothing."""
    spoiled: tuple[str, ...] = ()
    """Those that train, stepped or not, whose gradient has NaN or infinite elements on a rank: they spoil a norm."""
    zero: bool = False
    """True if every gradient there is holds zeros only, on all ranks."""
    compared: tuple[str, ...] = ()
    """Those whose gradient several ranks hold the same of, so that it was compared."""
    parted: tuple[str, ...] = ()
    """Those among them whose gradient is further apart over these ranks than rounding brings it."""
    misplaced: tuple[str, ...] = ()
    """Those whose gradient is still to be summed over ranks, or has not the dtype of the parameter."""
    on_some_ranks: tuple[str, ...] = ()
    """Those that have a gradient on some ranks, and none on others that hold a part of them."""
    not_chosen: tuple[str, ...] = ()
    """Those without one that a batch may leave out: a member of a ModuleList, or an optimizer's whole turn."""
    divided: tuple[str, ...] = ()
    """Those that some ranks step, and others do not: there they count alone."""
    stale: tuple[str, ...] = ()
    """Those without one in this window, of which ZeRO 3 keeps that of an earlier one and steps with it."""
    by: str = ""
    """What reduces them: ``FSDP1``, ``FSDP2`` or ``ZeRO`` with its stage; empty: DDP, hooks, or nothing."""
    apart_before: bool = False
    """Whether ranks had gradients of other parameters in a micro-batch since they were asked last."""


@frozen(kw_only=True)
class SharersFacts:
    """Ranks that share layers and step other gradients than each other: what they have otherwise."""

    weights: tuple[str, ...] = ()
    """Parameters that they should hold alike."""
    samples: bool = False
    """Whether the last forward was given other ones."""
    draws: bool = False
    """Whether it has drawn from generators in other states."""


@frozen(kw_only=True)
class Loaded:
    """A ``load_state_dict`` that took nothing of what it was given, or left out what has other names."""

    model: str
    """Class of the module."""
    given: int
    """Keys that it was given."""
    key: str
    """One of them that was not taken; empty: there was none."""
    near: str = ""
    """The module's key that it would have been without or with a prefix; empty: there is none."""
    inside: bool = False
    """Whether ``near`` is a key of the mapping that stands under ``key``."""
    lost: int = 0
    """Keys that would have been the module's likewise, where it took others; 0: it took none."""


@frozen(kw_only=True)
class WorkersAlike:
    """A loader of which several workers draw, or give, the same."""

    loader: str
    """Class of its data set."""
    workers: int
    what: str
    """What is alike."""
    sure: bool = True
    """False: nobody could tell whether the data set draws at all."""
    anew: str = ""
    """What gives a worker a generator of its own, as code; empty: there is none among the data set's attributes."""


@frozen(kw_only=True)
class SamplesMixed:
    """A module in which what a model says of one sample comes to depend on others of its batch."""

    path: str
    kind: str
    """Its class."""
    batch: int
    """Samples of the batch."""
    time_first: bool = False
    """Whether it says ``batch_first=False``."""


@frozen(kw_only=True)
class Misgiven:
    """A loss that was given what it is not defined for, or what cannot meet."""

    loss: str
    """Its name in ``torch.nn.functional``; ``loss``: one by hand."""
    what: str
    fix: str
    kind: Literal["", "bounded", "alike"] = ""
    """``bounded``: it is defined, and outputs can be no smaller, or no larger; ``alike``: its targets are one class."""


@frozen(kw_only=True)
class ForwardFacts:
    """What a model makes of the batch that it was given last, asked with something of it changed."""

    model: str
    """Its class."""
    drops: tuple[str, ...] = ()
    """Functions that drop elements in evaluation mode, with their lines."""
    mixed: SamplesMixed | None = None
    ahead: str = ""
    """The input whose next token is learned by places that see it; empty: there is none."""
    copies: str = ""
    """The input of which each place learns the token that it was given."""
    skips: bool = False
    """Whether every place learns the token behind the next one."""
    padded: str = ""
    """The input whose pads change what the model says of a sample."""
    placed: bool = False
    """Whether what it says of a sample depends on its place in the batch."""
    holds: str = ""
    """Where in an input the number stands that each sample is to give: ``x[:, 23]``; empty: nowhere."""
    shown: str = ""
    """Where an input says of which class the samples of the loss are, and not of which others are: ``x[:, 24:29]``."""
    learned: str = ""
    """The input whose pads count in the loss."""
    views_apart: int = 0
    """Samples that stand beside another view of themselves, and that a loss pairs with another sample; 0: none do."""


@frozen(kw_only=True)
class WindowFacts:
    """What passed through which function before the first step."""

    float16: tuple[str, ...] = ()
    """Classes of modules that were called under an autocast to float16 and train in float32."""
    float16_units: tuple[str, ...] = ()
    """Classes of options, of FSDP1 or FSDP2, by which units of what is trained compute in float16."""
    scaled: bool = False
    """Whether a loss went through an enabled ``GradScaler``."""
    scaler_steps: bool = False
    """Whether an enabled ``GradScaler`` steps."""
    clipped_scaled: bool = False
    """Whether gradients were clipped that were scaled still."""
    clipped_none: bool = False
    """Whether gradients were clipped before there were any."""
    asked: tuple[str, int] = ("", 0)
    """The line that has gone backward several times for the gradient of an input, into weights that step; how often."""
    half_scaled: tuple[str, str] = ("", "")
    """Lines of two backwards into one gradient, of a scaled loss and of one that is not."""
    clipped_spent: bool = False
    """Whether a generator that was at its end was given to be clipped."""
    clipped_shards: bool = False
    """Whether each rank has clipped its shards of FSDP1 by the norm of these."""
    squashed: tuple[tuple[str, str], ...] = ()
    """Losses that were not given what they take: function, and what was computed before it, such as a softmax."""
    loaded: tuple[Loaded, ...] = ()
    loaded_itself: tuple[tuple[str, str], ...] = ()
    """Classes of modules that were given their own living weights to load, and lines."""
    kept_alive: tuple[tuple[str, str], ...] = ()
    """Lines that keep ``model.state_dict()`` in a loop without a copy, to be loaded behind it; and the model."""
    overwritten: tuple[tuple[str, str], ...] = ()
    """Classes of modules whose weights were loaded, and written anew before anything has stepped; and lines."""
    unresumed: tuple[tuple[str, str], ...] = ()
    """Keys of a checkpoint, of a run that goes on, that nobody has loaded, with whose state it is."""
    alike: tuple[tuple[str, str], ...] = ()
    """Classes of modules that were called twice for one loss, with the same, and gave the same; and lines."""
    rebound: tuple[str, ...] = ()
    """Lines that bind a name of a loop over weights anew, where they were to change what it stands for."""
    untied: tuple[tuple[str, str, str], ...] = ()
    """Pairs of names that were one parameter, and are two since, with what has made them two: a load, or a wrapper."""
    cut_otherwise: tuple[tuple[str, str, float], ...] = ()
    """Lines that cut modules which compute otherwise since, their classes, and by which part of the largest output."""
    parts_alike: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Parameters of which ranks hold parts that are one and the same, each at a place of its own, and which ranks."""
    idle: tuple[str, ...] = ()
    """Classes of modules that were compiled, and called as they were before."""
    unheld: tuple[tuple[str, int], ...] = ()
    """Classes of modules that train and that no optimizer holds, with how many of their parameters have gradients."""
    workers: tuple[WorkersAlike, ...] = ()
    forgetful: tuple[str, ...] = ()
    """What was checkpointed, without its random numbers, and has drawn some."""
    renormalised: tuple[str, ...] = ()
    """What was checkpointed with a batch norm inside that averages what it sees."""
    misgiven: tuple[Misgiven, ...] = ()
    forwards: tuple[ForwardFacts, ...] = ()
    elsewhere: tuple[str, ...] = ()
    """Classes of other models that were called, and whose ``forward`` runs the one that trains."""
    ticked: int = 0
    """How often the scheduler was ticked after something went backward."""
    backwards: int = 0
    """How often it went backward."""
    undivided: bool = False
    """Whether a loss went backward past accelerate, divided by nothing."""
    cleared: str = ""
    """The line of the program that has cleared gradients since the last backward; empty: none has."""
    terms: TermFacts = TermFacts()
    values: ValueFacts = ValueFacts()
    libraries: LibraryFacts = LibraryFacts()
    turns: TurnFacts = TurnFacts()
    shares: ShareFacts = ShareFacts()
    lessons: LessonFacts = LessonFacts()
    beginnings: BeginningFacts = BeginningFacts()
    inputs: InputFacts = InputFacts()
    phases: PhaseFacts = PhaseFacts()
    carried: tuple[tuple[str, str, str], ...] = ()
    """Recurrent layers whose state goes from a batch to the next of a loader that shuffles: class, line of the program,
    sampler."""
    stale: tuple[tuple[str, str], ...] = ()
    """Lines whose backward is in the gradients still, though it is not of this step, with who has stepped it; empty:
    nobody, and it lies before the loop."""
    untouched: frozenset[str] = frozenset()
    """Parameters to which no gradient has come, where gradients are kept in ``.grad``."""
    wasted: tuple[tuple[str, int], ...] = ()
    """Lines of the loop of this step whose gradients were cleared before anybody stepped them, and how often."""
    copies: bool = False
    """Whether the program steps copies of parameters, one for each or flat ones, and gives them gradients itself."""
    given: tuple[str, ...] = ()
    """By rank, where all were asked, a digest of what its models were given last; empty: nothing tells samples apart.
    """
    ratios: tuple[str, ...] = ()
    """Lines whose losses have a ratio of policies that is 1 behind every step since samples were drawn."""
    advantages: tuple[str, ...] = ()
    """Lines whose losses have the product of a log-probability and a constant less what trains."""
    cut_draws: tuple[tuple[str, str], ...] = ()
    """Lines that draw without a graph what trained layers of the loss are given, and the class of a distribution whose
    parameters the loss trains too."""
    unled: tuple[tuple[str, str], ...] = ()
    """Lines of a backward whose gradients nobody has stepped, and of the step right behind it, which held none."""
    anew: tuple[str, str] = ("", "")
    """Class and line of an optimizer that the program makes for each step; empty: it makes none."""
    rebuilt: str = ""
    """The line of the last backward, where its loss leads to no parameter; empty: it leads to some, or is large."""
    taken: str = ""
    """The line that has computed gradients of parameters by ``torch.autograd.grad`` since the last backward."""
    reentrant: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Reentrant checkpoints that were given no input that requires a gradient: the line, and what trains inside."""
    draws: str = ""
    """Class of a model that trains and has drawn random numbers of the CPU's generator, or a line of the loop that has
    drawn some for each sample; empty: none has."""
    by_batch: bool = False
    """Whether the program ticks the scheduler in the innermost loop around its step."""
    overlap: tuple[int, int, int] = (0, 0, 0)
    """Samples that two loaders take of one data set, and those that both take."""
    drops_resting: tuple[str, ...] = ()
    """Classes of models that were called without gradients, that no optimizer holds, and that drop elements."""
    recompiled: tuple[tuple[str, int], ...] = ()
    """Functions that torch compiled as often as it may, and runs as they are since; and how often."""
    text: OddSample = ""
    """What is wrong in what such a model was called with."""
    again: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Optimizers that the program steps behind this one, with nothing backward and nothing cleared between: the class,
    and the parameters with a gradient that both hold."""
    mixed: tuple[tuple[str, str, str], ...] = ()
    """Lines that mix the weights of a model with themselves, as an average is made, and the two names of the model."""
    aliased: tuple[tuple[str, str], ...] = ()
    """Pairs of names of one model, the first for one that rests, as a teacher does."""
    overlapping: tuple[tuple[str, str], ...] = ()
    """Pairs of names of two trained parameters that are one piece of memory, each of which is stepped."""
    following: tuple[Following, ...] = ()
    averages: AverageFacts = AverageFacts()
    never_updated: tuple[str, ...] = ()
    """Classes of averages that no line of the program updates."""
    communicates: str = ""
    """The line of the program that has sent activations, or their gradients, to other ranks; empty: none has."""
    cut: tuple[str, ...] = ()
    """Parameters of which each rank may hold a part of its own: it has other values there than the others, is about to
    step them by other gradients, and has sent activations to the others. Ranks that were seeded apart, and should hold
    one model, send none."""
    rests_apart: tuple[str, ...] = ()
    """Classes of models that train on no rank, and of which ranks that call them hold other weights."""
    tied_over: tuple[tuple[str, str, int], ...] = ()
    """Tables that begin as those of another stage, and step by another gradient: names of both, and whose the other."""
    strays_apart: tuple[tuple[int, ...], ...] = ()
    """Shapes of tensors of no module that are stepped beside what a wrapper averages, each rank by its own gradient."""
    averages_weights: str = ""
    """The line of the program that averages weights over ranks, be it called or not; empty: none was seen."""
    trainer: str = ""
    """The Trainer that steps; empty: none."""
    steps: int | None = None
    """Optimizer steps that it is to take."""
    ticks: int | None = None
    """How often it ticks the scheduler until its end."""


@frozen(kw_only=True)
class CourseFacts:
    """Where a run stands at one look: modes, averaging, counts, and what the weights that were read hold."""

    resting: tuple[str, ...] = ()
    """Modules that drop or average batches, and are in evaluation mode."""
    unaveraged: tuple[str, ...] = ()
    """Wrappers whose next backward averages nothing."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of groups but for the rate: ``param_groups[0].eps`` and its value."""
    groups: Groups = ()
    altered: tuple[tuple[str, str, str], ...] = ()
    """Those that were other before the last look and have rested since, so that no schedule moves them: name, what it
    was, what it is."""
    counts: tuple[int | None, ...] = ()
    """Per optimizer how many steps its state has counted; None: it counts none."""
    lately: tuple[int, int] = (0, 0)
    """Steps and ticks since a look some looks ago."""
    at_zero: bool = False
    """Whether the rate was 0 at all of these looks."""
    stretches: int = 0
    """Between two steps, of whatever optimizers, in which the scheduler was ticked; since watching began."""
    steps: int | None = None
    """Optimizer steps since watching began; None: nobody counts them."""
    rate: float | None = None
    """The greatest learning rate of all groups; None: not known."""
    moved: bool | None = None
    """Whether a trained weight that is read at each look is other than at the last; None: nobody knows."""
    still: int = 0
    """Steps in which no trained weight has changed, though some gradient is other than zero; 0: some has."""
    unstepped: int = 0
    """Forwards that have trained since the optimizer stepped last, where that is many more than ever before; else 0."""
    ticked: int | None = None
    """Ticks of the scheduler; None: there is none, or it does not say."""
    unticked: int = 0
    """Optimizer steps since the scheduler was ticked last, where that is many more than ever before; else 0."""
    horizon: int | None = None
    """Ticks that it is made for; None: none, or not known."""
    not_finite: tuple[str, ...] = ()
    """Of the weights that were read those that are NaN or infinite somewhere."""
    spoiled: tuple[str, ...] = ()
    """Buffers that were finite at a look, and hold NaN."""
    unbounded: tuple[str, ...] = ()
    """Buffers that were, and hold infinity."""
    zeroed: tuple[str, ...] = ()
    """Of the parameters that were read those whose moments were other than zero before, and are zero."""
    repeated: tuple[str, ...] = ()
    """Samplers that have given two whole passes in one order, with the epoch of it."""
    left: tuple[str, ...] = ()
    """Parameters whose gradients were stepped, not cleared, added to and stepped again, of those that are followed."""
    twice: tuple[str, ...] = ()
    """Likewise those of which two optimizers have stepped one gradient, one after the other."""
    steppers: tuple[str, ...] = ()
    """Classes of the two."""
