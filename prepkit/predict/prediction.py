"""What a prediction says: bytes held and sent, rank by rank, each with how sure it is."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Literal, get_args

from attrs import evolve, frozen

Category = Literal[
    "parameters",
    "gradients",
    "master weights",
    "optimizer state",
    "buckets",
    "module buffers",
    "gathered units",
    "working buffers",
    "activations",
]
"""What bytes are for. The last three come and go within a step; the others stay."""

CATEGORIES: tuple[Category, ...] = get_args(Category)
"""In the order in which they are shown."""

NO_STATE = "optimizer state NOT counted (no optimizer is given)"


class Label(StrEnum):
    """How sure a number of bytes is."""

    EXACT = "exact"
    """The bytes that the checked versions allocate or send: measured equal, difference 0."""
    BOUNDED = "bounded"
    """At most this; how much of it is there at one moment depends on what the model or the allocator does."""
    ESTIMATED = "estimated"
    """About this."""


class Lifetime(StrEnum):
    """How long bytes are held. Terms of ``STEP`` and of ``PASS`` need not be there at one moment."""

    ALWAYS = "always"
    """From the end of the first step on."""
    STEP = "step"
    """From backward to the optimizer step."""
    PASS = "pass"
    """Within forward and backward."""


Place = Literal["device", "host"]
"""Which memory bytes are in: the device's, or the host's beside it. On a CPU there is one, called device."""


@frozen(kw_only=True)
class Term:
    """Bytes that one rank holds for one purpose: how many, in which memory, for how long, and how sure that is."""

    category: Category
    bytes: int
    what: str
    """A few words, such as ``root, kept from forward to backward``."""
    label: Label = Label.EXACT
    place: Place = "device"
    lifetime: Lifetime = Lifetime.ALWAYS


@frozen(kw_only=True)
class RankClass:
    """Ranks that hold the same number of bytes in every term."""

    first: int
    """Smallest index inside the shard group."""
    last: int
    """Largest index."""
    ranks: int
    """Number of ranks of this kind, over all replicas."""
    terms: tuple[Term, ...]
    empty: bool = False
    """Whether these ranks hold no element of any parameter, only padding."""

    def and_also(self, terms: tuple[Term, ...]) -> RankClass:
        """The same ranks, holding these terms as well."""
        return evolve(self, terms=(*self.terms, *terms))

    def total(self, place: Place = "device", *labels: Label) -> int:
        """Bytes of all terms in that place, whatever their lifetime; with labels, only of those that carry one."""
        wanted = labels or tuple(Label)
        return sum(term.bytes for term in self.terms if term.place == place and term.label in wanted)

    def category(self, category: Category, place: Place | None = None) -> int:
        """Bytes of one category; in both places unless one is given."""
        return sum(t.bytes for t in self.terms if t.category == category and place in (None, t.place))

    def floor(self, place: Place = "device") -> int:
        """Bytes that are certainly held at one moment: exact terms that meet. No run of the plan can need less.

        What is there always meets the gradients at the optimizer step, or what is gathered within the pass before it.
        """
        exact = dict.fromkeys(Lifetime, 0)
        for term in self.terms:
            if term.place == place and term.label is Label.EXACT:
                exact[term.lifetime] += term.bytes
        return exact[Lifetime.ALWAYS] + max(exact[Lifetime.STEP], exact[Lifetime.PASS])


Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "host copy"]


@frozen(kw_only=True)
class Traffic:
    """All calls of one collective for one purpose in one optimizer step, accumulation included."""

    collective: Collective
    what: str
    calls: int
    """Number of calls; of DDP's buckets about so many, because the order of the gradients moves their borders."""
    bytes: int
    """Sum over the calls of the whole buffer, in bytes: what is gathered, or what is reduced before it is scattered."""
    ranks: int
    """Ranks that take part in one call."""
    axis: str
    """Name of the mesh axis."""
    label: Label = Label.EXACT
    stride: int = 1
    """Distance of neighbouring ranks: 1 where a group is consecutive ranks."""

    def crosses(self, per_node: int) -> bool:
        """Return whether one call has ranks on two nodes, where each node has ``per_node`` consecutive ranks.

        A group spans ``(ranks - 1) * stride + 1`` consecutive ranks. A copy with the host stays on its node.
        """
        return self.collective != "host copy" and (self.ranks - 1) * self.stride + 1 > per_node

    @property
    def sent(self) -> int:
        """Bytes that one rank sends with ring algorithms; other algorithms send at least as much in all."""
        match self.collective:
            case "all-reduce":
                return 2 * self.bytes * (self.ranks - 1) // self.ranks
            case "all-gather" | "reduce-scatter":
                return self.bytes * (self.ranks - 1) // self.ranks
            case "broadcast" | "host copy":
                return self.bytes


@frozen(kw_only=True)
class Prediction:
    """What every rank of a plan holds and sends. Allocator and driver are not counted; activations if given."""

    engine: str
    world_size: int
    shards: int = 1
    """Ranks of the shard axis; rank r has the shard index ``r // tensor % shards``."""
    tensor: int = 1
    """Ranks of the tensor axis, which are neighbours and hold equally many bytes."""
    classes: tuple[RankClass, ...] = ()
    """All kinds of ranks, by index; empty where the engine has no formulas here."""
    traffic: tuple[Traffic, ...] = ()
    notes: tuple[str, ...] = ()
    """What the numbers mean and what the choices cost, one sentence each."""
    not_predicted: tuple[str, ...] = ()
    """What is left out of the numbers although it is there, one phrase each."""
    without_state: bool = False
    """Whether it trains and nobody says with which optimizer, so that the state of none is in the numbers."""

    def at(self, rank: int) -> RankClass:
        """The class of a rank. Raises ``ValueError`` for a rank that the plan does not have."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank} among {self.world_size}; give one of 0 to {self.world_size - 1}")
        index = rank // self.tensor % self.shards
        return next(ranks for ranks in self.classes if ranks.first <= index <= ranks.last)

    @property
    def about(self) -> str:
        """In words, whether activations and optimizer state are in the numbers."""
        counted = any(term.category == "activations" for ranks in self.classes for term in ranks.terms)
        activations = "activations as estimated" if counted else "activations not counted"
        return f"{activations}, {NO_STATE}" if self.without_state else activations

    @property
    def fullest(self) -> RankClass:
        """The class that holds most on its device; the first of equals."""
        return max(self.classes, key=lambda ranks: (ranks.total(), ranks.total("host"), -ranks.first))

    @property
    def emptiest(self) -> RankClass:
        """The class that holds least on its device; the last of equals."""
        return min(self.classes, key=lambda ranks: (ranks.total(), ranks.total("host"), -ranks.first))

    @property
    def empty_ranks(self) -> int:
        """How many ranks hold no element of any parameter, only padding."""
        return sum(ranks.ranks for ranks in self.classes if ranks.empty)

    @property
    def sent(self) -> int:
        """Bytes that one rank sends to other ranks per optimizer step."""
        return sum(entry.sent for entry in self.traffic if entry.collective != "host copy")

    def crossing(self, per_node: int | None) -> int:
        """The part of ``sent`` in collectives that reach over nodes; all of it where the nodes are not known."""
        return sum(entry.sent for entry in self.traffic if entry.crosses(per_node or 0))

    @property
    def copied(self) -> int:
        """Bytes that one rank moves between device and host per optimizer step."""
        return sum(entry.sent for entry in self.traffic if entry.collective == "host copy")

    def categories(self) -> Iterator[tuple[Category, Place]]:
        """The categories that some rank holds anything of, with the place, in the order in which they are shown."""
        places: tuple[Place, Place] = ("device", "host")
        for category in CATEGORIES:
            for place in places:
                if any(ranks.category(category, place) for ranks in self.classes):
                    yield category, place
