"""What a recorder hangs into a program and reads off it: gradients of outputs, clipping, lines, options, digests."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, fields, has
from torch import Tensor, nn

from prepkit.facts.proof import COPIES, near
from prepkit.objects import names
from prepkit.objects.fsdp1_flat import flat_shards
from prepkit.objects.local_part import local, whole
from prepkit.observe.fingerprints.parts import Part
from prepkit.proving import bare
from prepkit.proving.loss_graph import made_of, terms_of, used_outside
from prepkit.proving.parts_of import Size, faded, numbers, others, parameters, same_size, sizes
from prepkit.proving.record_file import Disturbed, HeldPart, Micro

HOME = str(Path(__file__).parents[1])
"""The folder of prepkit's own frames."""
LIBRARIES = frozenset({"site-packages", "dist-packages", f"python{sys.version_info.major}.{sys.version_info.minor}"})
"""Folders of what a program has not written itself."""


def shapes(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of every parameter as a whole."""
    whole = {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in parameters(root)}
    return whole | {name: tuple(shard.shape) for name, shard in flat_shards(root).items()}


def held_parts(
    trained: Collection[str], held: Mapping[str, Part], shapes: Mapping[str, tuple[int, ...]], groups: Mapping[str, int]
) -> Iterator[HeldPart]:
    """Yield what a record says of each parameter; ``groups``: that of the optimizer that has stepped it."""
    for name, part in held.items():
        yield HeldPart(
            name=name,
            shape=shapes[name],
            start=part.start,
            dims=part.dims,
            here=part.values.numel(),
            trained=name in trained,
            group=groups.get(name),
        )


def with_gradients(root: nn.Module | None) -> tuple[str, ...]:
    """Parameters that have a gradient, and not of zeros alone."""
    grads = {name: param.grad for name, param in parameters(root) if param.requires_grad}
    return tuple(name for name, one in grads.items() if one is not None and bool(local(one).to_dense().any()))


def with_closure(args: Sequence[Any], kwargs: Mapping[str, Any], then: Callable[[], None]) -> Any:
    """The arguments of a step, whose closure does ``then`` when it has made the gradients; None where it has none."""
    given = (*args, *kwargs.values())
    made = next((one for one in given if callable(one) and not isinstance(one, torch.optim.Optimizer)), None)
    if made is None:
        return None

    def closure() -> Any:
        result = made()
        then()
        return result

    def instead(one: Any) -> Any:
        return closure if one is made else one

    return tuple(map(instead, args)), {key: instead(one) for key, one in kwargs.items()}


def evaluating(root: nn.Module) -> tuple[str, ...]:
    """Paths of the modules that are in evaluation."""
    return tuple(path for path, module in names.named_modules(root).items() if not module.training)


def _used(root: nn.Module | None, loss: Tensor, ends: set[int], returned: Collection[int] = ()) -> Iterator[str]:
    """Yield parameters that a loss uses itself, beside the outputs that begin at ``ends``.

    ``returned``: identities of those that are outputs.
    """
    known = {id(param): name for name, param in parameters(root) if id(param) not in returned}
    yield from (known[id(leaf)] for leaf in used_outside(loss, ends) if id(leaf) in known)


def keep_changed(parts: Mapping[str, Part], tensors: dict[str, Tensor], keep: Callable[[str, Tensor], None]) -> None:
    """Keeps weights that something has changed since they were stepped; ``tensors`` are those of a record."""
    for name, part in parts.items():
        after = tensors.get(f"after/{name}")
        if after is not None and not torch.equal(after, part.values.detach().reshape(-1).cpu()):
            keep(f"later/{name}", part.values)


@define(eq=False)
class Next:
    """What a program does with a model behind its window, which says whether the window was left as it should be."""

    called: bool = False
    """Whether it was called, so that it trains, since it was stepped last."""
    went: bool = False
    """Whether anything went backward since then."""
    closed: bool = False
    """Whether nothing more of the window is looked at."""
    undecided: tuple[str, ...] = ()
    """Parameters that had a gradient of the window when something went backward, and have had one ever since. It is
    left over once it is stepped with what the model's own backward adds; a backward of another model's loss, whose
    gradients are cleared before, is none."""
    faded: float = 0.0
    """By which all that was stepped had been multiplied when something went backward, as by a momentum by hand; 0: by
    nothing of that kind."""
    _looked: bool = False

    def left_of(self, root: nn.Module | None, stepped: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Return what is left of the window's gradients; ``stepped``: the tensors of its record."""
        now = with_gradients(root)
        if not self._looked:
            self.faded = faded(root, now, stepped)
        self.undecided = tuple(name for name in now if name in self.undecided or not (self._looked or self.faded))
        self._looked = True
        return self.undecided

    def stepped(self) -> None:
        """The optimizer steps once more."""
        self.called, self.went, self.undecided = False, False, ()


COMPUTED = (
    "a module was called with weights that were computed from others (functional_call), as by a step in the loss: they "
    "are not replayed"
)


@define(eq=False)
class Around:
    """Listens to what a program does to a model beside forward, backward and step."""

    unproven: str = field(default="", init=False)
    averages: str = field(default="", init=False)
    """As in ``Disturbed``."""
    made: dict[str, Tensor] = field(factory=dict, init=False)
    """Gradients as the last backward has left them."""
    moved: tuple[str, ...] = field(default=(), init=False)
    swung: bool = field(default=False, init=False)
    outside: dict[str, None] = field(factory=dict, init=False)
    beside: dict[str, None] = field(factory=dict, init=False)
    """Lines that went backward over weights of the model, and over no output of it."""
    wrapper: str = field(default="", init=False)
    """The class of what wraps the model there."""
    kept: tuple[str, ...] = field(default=(), init=False)
    twice: bool = field(default=False, init=False)
    own: dict[str, None] = field(factory=dict, init=False)
    """Parameters that the forward of the model itself changes, as those of an encoder that follows another."""
    doubled: dict[str, None] = field(factory=dict, init=False)
    """Lines in which a loss went backward that had done so before."""
    scale: float = field(default=1.0, init=False)
    """By which a scaler multiplies losses."""
    tokens: float | None = field(default=None, init=False)
    """Over how many the next loss is a mean, where the run says so."""
    _terms: list[Any] = field(factory=list, init=False)
    """Nodes of all losses that went backward."""
    asked: tuple[int, ...] = field(default=(), init=False)
    """Identities of the weights whose gradients the program has asked for, and goes backward over by nothing else."""
    idle: int = field(default=0, init=False)
    """Steps over gradients that were cleared after the last backward, one after the other."""
    fed: bool = field(default=False, init=False)
    """Whether any gradient has arrived at an output."""
    passed: bool = field(default=False, init=False)
    """Whether it was stepped over gradients, and none had come by its outputs."""
    detached: int = field(default=0, init=False)
    """Steps over no gradient at all, with outputs of the model that nothing has gone backward over."""
    _cleared: int = field(default=0, init=False)
    _thrown: list[Micro] = field(factory=list, init=False)
    """Micro-batches that were cleared since anything has stepped, or has tried to."""
    _tried: bool = field(default=False, init=False)
    going: int = field(default=0, init=False)
    """Backwards that run now, one inside the other."""
    _left: tuple[str, ...] = field(default=(), init=False)
    earlier: Mapping[str, Tensor] = field(factory=dict, init=False)
    """The gradients that the window before has stepped, or some elements of each, as a record has them."""
    faded: float = field(default=0.0, init=False)
    """As in ``Disturbed``."""
    _began: dict[str, Size] = field(factory=dict, init=False)
    _entered: dict[str, Size] = field(factory=dict, init=False)
    """At the begin of the forward that runs, or ran last."""
    _earlier: dict[str, Size] = field(factory=dict, init=False)
    """At the first forward of what was cleared."""

    def forward(self, root: nn.Module, *, first: bool) -> None:
        """Before a forward of the window."""
        self._entered = sizes(root)
        if first:
            self._began = dict(self._entered)
        elif others(self._began, self._entered):
            self.swung = True

    def went(self, root: nn.Module | None) -> None:
        """Behind a forward: what is other than when it began, it has changed itself."""
        now = sizes(root) if self._began else {}
        changed = others(self._entered, now)
        self.own |= dict.fromkeys(changed)
        self._began |= {name: now[name] for name in changed}

    def backward(self, root: nn.Module | None, loss: Tensor, ends: set[int], leaves: set[int], *, first: bool) -> None:
        """Before a backward; ``ends`` and ``leaves``: where outputs of the calls begin, and outputs of no graph."""
        self._finds_left(root, first=first)
        self._goes_over(root, loss, ends, leaves)

    def _finds_left(self, root: nn.Module | None, *, first: bool) -> None:
        """Notes what gradients there are before anything of the window goes backward."""
        if first and not self.beside:
            self._left = with_gradients(root)
            if by := faded(root, self._left, self.earlier):
                self.faded, self._left = by, ()

    def _goes_over(self, root: nn.Module | None, loss: Tensor, ends: set[int], leaves: set[int]) -> None:
        self.outside |= dict.fromkeys(_used(root, loss, ends, leaves))
        self._counts(loss, ends)

    def _counts(self, loss: Tensor, ends: set[int]) -> None:
        """Notes a loss, or one of those that it is the sum of, that has gone backward before."""
        made = terms_of(loss, ends) if not self.asked else []
        if any(one is other for one in made for other in self._terms):
            self.doubled |= dict.fromkeys(line_of("backward"))
        self._terms += made

    def trains_some(self, root: nn.Module | None, wanted: tuple[int, ...]) -> None:
        """A backward was told for which weights alone it is."""
        if any(param.requires_grad and id(param) not in wanted for _, param in parameters(root)):
            self.unproven = "backward was given inputs=, so that a loss trains some weights alone: none was replayed"

    def again(self, root: nn.Module | None, loss: Tensor, ends: set[int], leaves: set[int]) -> bool:
        """Before a backward over no new call: whether it goes over outputs of earlier ones, whose gradients add up."""
        if not made_of(loss, ends):
            return False
        self._goes_over(root, loss, ends, leaves)
        return True

    def past(self, root: nn.Module | None, loss: Tensor, ends: set[int], *, first: bool) -> None:
        """Before, or behind, a backward that no output of the model takes part in; ``first``: of all."""
        if root is not None and next(_used(root, loss, ends), None) is not None:
            self._finds_left(root, first=first)
            self.beside |= dict.fromkeys(line_of("backward"))
            self.wrapper = type(root).__name__ if root is not names.unwrap_root(root)[-1] else ""

    def changed(self, root: nn.Module | None) -> tuple[str, ...]:
        """Parameters that are not as they were at the first forward."""
        return others(self._began, sizes(root))

    def steps(self, root: nn.Module) -> None:
        """Before the first step: whether weights are others than in the first forward, or others were put back."""
        self.moved = self.changed(root)
        now = sizes(root) if self.moved else {}
        for began in (self._began if self.swung else {}, self._earlier):
            if began and all(name in began and same_size(began[name], now[name], 1e-6) for name in self.moved):
                self.moved, self.swung = (), self.swung or bool(now)

    def goes(self, plain: Callable[[], Any], root: nn.Module | None, most: int) -> Any:
        """A backward, or ``autograd.grad``. ``root``: what it trains; ``most``: bytes of gradients that may be kept."""
        self.going += 1
        try:
            result = plain()
        finally:
            self.going -= 1
        if root is not None and not self.going:
            grads = ((name, param.grad) for name, param in parameters(root))
            held = {name: local(one) for name, one in grads if one is not None and one.layout is torch.strided}
            fits = sum(one.nbytes for one in held.values()) <= most
            self.made = {name: one.detach().reshape(-1).cpu().clone() for name, one in held.items() if fits}
        return result

    def written(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield what backward has left of gradients that are no multiple of it where ``tensors`` of a record hold them.

        Clipping and unscaling multiply; anything else was written by the program.
        """
        for name in names:
            made, kept = self.made.get(name), tensors.get(f"grad/{name}")
            if made is not None and kept is not None and made.numel() == kept.numel():
                one, other = numbers(made).double(), numbers(kept).double()
                by = float(one @ other) / (float(one @ one) or 1.0)
                if float((other - by * one).norm()) > 8 * torch.finfo(kept.dtype).eps * float(other.norm()):
                    yield name, made

    def scaled(self, plain: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        """A scaler multiplies a loss."""
        result = plain(scaler, *args, **kwargs)
        self.scale = float(scaler.get_scale())
        return result

    def weighed(self, plain: Callable[..., Any], window: Any, loss: Tensor, mean_over: Any) -> Any:
        """The run says over how many tokens a loss is a mean."""
        self.tokens = self.tokens if mean_over is None else float(mean_over)
        return plain(window, loss, mean_over)

    def spent(self) -> float | None:
        """Over how many tokens the loss is a mean that goes backward now, which says nothing of the next."""
        tokens, self.tokens = self.tokens, None
        return tokens

    def asks(self, wanted: tuple[int, ...]) -> None:
        """The program asks for the gradients of these weights."""
        if self.asked and self.asked != wanted:
            self.unproven = (
                "the program has asked torch.autograd.grad for gradients of some weights, and then of others"
            )
        self.asked = wanted

    def adding(self, arrived: dict[int, Tensor], place: int) -> Callable[[Tensor | None], None]:
        """A hook that keeps the gradient of an output; one that arrives again adds up."""

        def hook(grad: Tensor | None) -> None:
            if grad is None or not self.going:  # DDP gives none to outputs that no loss has used
                return
            kept = whole(grad).detach().cpu().clone().resolve_conj()
            self.fed = True
            arrived[place] = arrived[place] + kept if place in arrived else kept

        return hook

    def cleared(self, micros: list[Micro]) -> None:
        """The gradients of these micro-batches were cleared."""
        self._thrown += [] if self._tried else micros
        self._cleared += 0 if self._tried else len(micros)
        self._tried, self.unproven, self._earlier = False, "", self._earlier or self._began
        self._terms.clear()
        self.doubled.clear()

    def tried(self) -> None:
        """Something else has stepped, or a scaler has refused to: what is cleared behind it is cleared on purpose."""
        self._thrown.clear()
        self._tried = True

    def wasted(self, kept: tuple[Micro, ...], scale: float, known: int | None) -> int:
        """Return how many of the cleared micro-batches belong to the step over those that are kept.

        A loop that skips a batch, or measures before it trains, clears on purpose. An accumulation clears too early
        where all went backward in the same line, and a plan or accelerate knows of so many (``known``), or each loss
        is divided by their number, from three on.
        """
        lines = {one.line for one in kept}
        same = [one for one in self._thrown if {one.line} == lines and one.line]
        number = len(same) + len(kept)
        divided = number > 2 and all(near(abs(one.factor) * number, scale) for one in (*same, *kept))
        return len(same) if divided or number == known else 0

    def stepped_nothing(self, root: nn.Module) -> bool:
        """An optimizer steps, and nothing went backward: whether it is the second time that it was cleared before."""
        self.idle = self.idle + 1 if self._thrown and not with_gradients(root) else 0
        self._thrown.clear()
        return self.idle > 1

    def told(
        self,
        root: nn.Module,
        kept: tuple[Micro, ...],
        scale: float,
        known: int | None,
        *,
        copies: bool,
        computed: bool,
    ) -> Disturbed:
        """All of it. ``copies``: whether it has to be asked if weights came from somewhere else.

        ``computed``: whether a module was called with weights that are no leaves.
        """
        lends = COMPUTED if computed and self.outside else ""
        why = self.unproven or (COPIES if copies and self.changed(root) else lends)
        return Disturbed(
            unproven=why,
            moved=self.moved,
            swung=self.swung,
            left=self._left,
            faded=self.faded,
            outside=tuple(self.outside),
            beside=tuple(self.beside),
            wrapper=self.wrapper,
            kept=self.kept,
            twice=self.twice,
            cleared=self._cleared,
            wasted=self.wasted(kept, scale, known),
            idle=self.idle > 1,
            asked=bool(self.asked),
            lends=computed,
            doubled=tuple(self.doubled),
            averages=self.averages,
        )


def heard(hook: Callable[..., Any], fails: Callable[[Exception], None]) -> Callable[..., Any]:
    """The hook; what it raises is told to ``fails``, a method, and is not raised into the run.

    Whose method it is does not live on for it: a hook that hangs on an output of a graph would keep the graph.
    """
    method = weakref.WeakMethod(fails)

    def listens(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # whatever a program trains
            told = method()
            return None if told is None else told(error)

    return listens


def in_place_of(instead: Callable[..., Any], fails: Callable[[Exception], None]) -> Callable[..., Any]:
    """The same of what is called with a function in its place: that is called once, and what it raises is raised."""

    def calls(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began, came = list[bool](), list[Any]()

        def once(*its: Any, **own: Any) -> Any:
            began.append(True)
            came.append(plain(*its, **own))
            return came[-1]

        try:
            return instead(once, *args, **kwargs)
        except Exception as error:
            if len(began) > len(came):
                raise
            fails(error)
            return came[-1] if came else plain(*args, **kwargs)

    return calls


def asked_for(root: nn.Module | None, inputs: Any) -> tuple[int, ...]:
    """Identities of the trained weights of a model among what gradients are asked for."""
    mine = {id(param) for _, param in parameters(root) if param.requires_grad}
    given = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return tuple(sorted({id(one) for one in given} & mine))


def is_aside(root: nn.Module) -> bool:
    """Whether a call of it trains none of its own weights: inside of a transform, with others, or frozen."""
    every = list(root.parameters())
    return transforms() or not all(one.is_leaf for one in every) or not any(one.requires_grad for one in every)


def transforms() -> bool:
    """Return whether this is inside of a transform of ``torch.func``: its tensors mean nothing outside."""
    return torch._C._functorch.maybe_current_level() is not None


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values."""
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def other_buffers(root: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers that are not as the first call of the window found them, by their paths."""
    for path, buffer in bare.named_buffers(root):
        now, first = local(buffer).detach().cpu(), tensors.get(f"buffer/{path}")
        if first is None or not alike(now, first):
            yield path, now.clone()


def line_of(what: str) -> Iterator[str]:
    """The line of the program, outside of installed packages and of prepkit, that has led here."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((HOME, "<")) or LIBRARIES.intersection(Path(file).parts)):
            yield f"{what} at {Path(file).name}:{frame.f_lineno}"
            return
        frame = frame.f_back  # type: ignore[assignment]  # the last one has none


def begin_anew(heard: Any, fresh: Any, but: Collection[str] = ()) -> None:
    """What a listener has heard becomes what a ``fresh`` one has. Lists, dicts and its parts stay: others hold them."""
    for name in (one.name for one in fields(type(heard)) if one.name not in but and hasattr(fresh, one.name)):
        match getattr(heard, name), getattr(fresh, name):
            case list() as now, list() as new:
                now[:] = new
            case dict() as now, dict() as new:
                now.clear()
                now.update(new)
            case now, new if has(type(now)) and type(now).__module__.startswith(__package__):
                begin_anew(now, new)
            case _, new:
                setattr(heard, name, new)
