"""What a recorder reads off who steps: an optimizer's class, options and tensors, and how gradients are clipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from math import isfinite
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from prepkit.facts.proof import ClipProof
from prepkit.objects import names
from prepkit.objects.alive import alive
from prepkit.objects.local_part import local, part_of_gradient
from prepkit.observe.fingerprints.parts import Part
from prepkit.proving.hooks import Around, Next, keep_changed
from prepkit.proving.other_rank import variables
from prepkit.proving.record_file import Micro


def acting(optimizer: Any) -> Any:
    """The optimizer that takes the step: of torch's ``ZeroRedundancyOptimizer`` the one inside, for a rank's part."""
    return optimizer.optim if class_of(optimizer) == "ZeroRedundancyOptimizer" else optimizer


def plain_options(optimizer: Any, group: dict[str, Any]) -> str:
    """Class and plain options of one of its groups, as JSON."""
    kept: dict[str, Any] = {
        key: list(map(_number, value)) if isinstance(value, tuple | list) else _number(value)
        for key, value in group.items()
        if key not in ("params", "initial_lr", "param_names")
        and (_is_number(value) or (isinstance(value, tuple | list) and all(map(_is_number, value))))
    }
    return json.dumps({"class": class_of(acting(optimizer)), **kept}, sort_keys=True)


def class_of(optimizer: Any) -> str:
    """Its name, for an optimizer of torch's or DeepSpeed's; else with its module, as others have the same names."""
    kind = type(optimizer)
    return (
        kind.__name__ if kind.__module__.startswith(("torch.", "deepspeed.")) else f"{kind.__module__}.{kind.__name__}"
    )


def is_fresh(state: Any) -> bool:
    """Return whether it is as the optimizer has made it: Adagrad has some before its first step."""
    return not state or ("step" in state and float(state["step"]) == 0)


def earlier(state: Mapping[str, Any], whole: int, part: slice) -> Iterator[tuple[str, Tensor | None]]:
    """Yield what an optimizer has of one parameter: numbers, and what is as large, by its part; None for all else."""
    for key, value in state.items() if not is_fresh(state) else ():
        row = local(value).reshape(-1) if isinstance(value, Tensor) else torch.tensor([value], device="cpu")
        if not isinstance(value, Tensor) or value.dim() == 0:
            yield f"number.{key}", row
        else:
            yield (f"state.{key}", row[part]) if row.numel() == whole else (key, None)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def given_to(optimizer: Any) -> Iterator[Any]:
    """Every parameter that an optimizer holds."""
    return (param for group in optimizer.param_groups for param in group["params"])


def holds(root: nn.Module | None, which: Any) -> bool:
    """Return whether an optimizer, or a module, has a parameter of this one."""
    mine = {id(param) for param in root.parameters()} if root is not None else set()
    held = which.parameters() if isinstance(which, nn.Module) else given_to(which)
    return any(id(param) in mine for param in held)


def _rows(optimizer: Any) -> list[tuple[int, int, int, Any]]:
    """Where each tensor that it steps lies in memory: begin, end, group, and the tensor."""
    held = [(group, param) for group, options in enumerate(optimizer.param_groups) for param in options["params"]]
    begins = [local(param).data_ptr() for _, param in held]
    ends = [
        begin + local(one).numel() * local(one).element_size() for begin, (_, one) in zip(begins, held, strict=True)
    ]
    return [(*lies, *one) for *lies, one in zip(begins, ends, held, strict=True)]


def torn(known: Mapping[str, Part], optimizer: Any) -> str:
    """Say which parameter it steps a part of alone, as where it steps a piece of a flat buffer; empty: none."""
    rows = _rows(optimizer)
    for name, part in known.items():
        first = part.values.data_ptr()
        last = first + part.values.numel() * part.values.element_size()
        if any(first < end and begin < last and not (begin <= first and last <= end) for begin, end, _, _ in rows):
            return f"an optimizer steps a part of {name}, as a piece of a flat buffer: no gradient is that of it alone"
    return ""


def places(known: Mapping[str, Part], optimizer: Any) -> dict[str, tuple[int, Any, int]]:
    """Of each parameter that it holds: the group, the tensor that is stepped, and where in it the part begins."""
    found: dict[str, tuple[int, Any, int]] = {}
    rows = _rows(optimizer)
    for name, part in known.items():
        first, nbytes = part.values.data_ptr(), part.values.numel() * part.values.element_size()
        for begin, end, group, param in rows:
            if nbytes and begin <= first and first + nbytes <= end:
                found[name] = (group, param, (first - begin) // part.values.element_size())
                break
    return found


@define(eq=False)
class HeldState:
    """What optimizers have stepped of a model in one window."""

    optimizers: list[Any] = field(factory=list)
    options: tuple[str, ...] = ()
    """Of each group."""
    groups: dict[str, int] = field(factory=dict)
    """The place of each parameter's group among them."""
    odd: dict[str, None] = field(factory=dict)
    """Entries of a state that a record cannot hold."""
    fresh: bool = True
    """Whether no optimizer had any state."""
    _numbers: dict[int, int] = field(factory=dict)
    """Identities of groups to their places."""

    def elsewhere(self, params: Iterable[tuple[str, nn.Parameter]]) -> tuple[str, ...]:
        """Trained parameters that another optimizer holds which is alive: it steps in a window of its own."""
        rest = {name: id(param) for name, param in params if param.requires_grad and name not in self.groups}
        rest = rest if self.groups else {}
        alive = alive_optimizers() if rest else []
        others = [one for one in alive if not any(one is other for other in self.optimizers)]
        held = {id(param) for one in others for param in given_to(one)}
        return tuple(name for name, its in rest.items() if its in held)

    def take(
        self,
        optimizer: Any,
        held: Mapping[str, tuple[int, Any, int]],
        parts: Mapping[str, Part],
        keep: Callable[[str, Tensor], None],
    ) -> None:
        """Keeps gradients and state of what an optimizer is about to step; ``held`` as of ``places``."""
        state = acting(optimizer).state
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            self.fresh = self.fresh and all(map(is_fresh, state.values()))
        for group in optimizer.param_groups:  # DeepSpeed's ZeRO 1 and 2 step one after the other
            if id(group) not in self._numbers:
                self._numbers[id(group)] = len(self.options)
                self.options += (plain_options(optimizer, group),)
        mine = {id(one) for one in given_to(acting(optimizer))}
        for name, (place, holder, at) in held.items():
            if optimizer is acting(optimizer) or id(holder) in mine:  # else another rank steps it
                self.groups[name] = self._numbers[id(optimizer.param_groups[place])]
            numel = parts[name].values.numel()
            for key, row in earlier(state.get(holder, {}), local(holder).numel(), slice(at, at + numel)):
                if row is None:
                    self.odd[key] = None
                else:
                    keep(f"{key}/{name}", row)
            if holder.grad is not None:
                grad = holder.grad.to_dense() if holder.grad.is_sparse else holder.grad
                keep(f"grad/{name}", part_of_gradient(holder, grad).reshape(-1)[at : at + numel])


WAITS = 20
"""Steps of models that have stepped already for which one waits that is still to step."""


@frozen
class Waiting:
    """Models that were called beside those that are proven, and that nothing has stepped."""

    unstepped: tuple[str, ...] = ()
    """Why nothing is proven of those that have had gradients."""
    detached: tuple[str, ...] = ()
    """Classes of those whose optimizer has stepped, over no gradient."""
    noted: tuple[str, ...] = ()
    """What is to be told of the others."""


def alive_optimizers() -> list[Any]:
    """Every optimizer that there is."""
    return alive(torch.optim.Optimizer)


def steps_nothing(optimizer: Any) -> bool:
    """Return whether nothing that it holds has a gradient."""
    return all(param.grad is None or not bool(local(param.grad).any()) for param in given_to(optimizer))


def to_step(family: Sequence[Turns], others: Iterable[nn.Module]) -> list[nn.Module]:
    """Models that were called, that an optimizer holds, and that nothing has stepped.

    ``others``: such as did not train so far; what an optimizer holds that has stepped stays frozen.
    """
    done = {id(param) for one in family if one.stepped and one.root is not None for param in one.root.parameters()}
    known = {id(param) for one in family for stepped in one._held.optimizers for param in given_to(stepped)}
    models = [one.root for one in family if one.root is not None]
    still = [one for one in others if known.isdisjoint(map(id, one.parameters()))]
    rest = {id(one): {id(param) for param in one.parameters()} for one in (*models, *still)}
    left = [one for one in (*models, *still) if rest[id(one)] and done.isdisjoint(rest[id(one)])]
    held = {id(param) for one in alive_optimizers() for param in given_to(one)} if left else set()
    return [one for one in left if not held.isdisjoint(rest[id(one)]) or engine_of(one) is not None]


def waiting(family: Sequence[Turns], awaited: Sequence[nn.Module] | None) -> Waiting:
    """Return what is to be told of models that nothing has stepped; ``awaited`` as of ``Turns``."""
    held = awaited or ()
    unstepped, detached, noted = list[str](), list[str](), list[str]()
    for one in family:
        name, mine = type(one.root).__name__, any(one.root is other for other in held)
        if one.stepped:
            continue
        if one.around.detached > 1:
            detached.append(name)
        elif mine and one.around.fed:
            unstepped.append(
                f"`{name}` has had gradients, and the optimizer that holds it has not stepped in this window"
            )
        elif one.around.passed:
            unstepped.append(f"The optimizer of `{name}` has stepped over a loss that no output of it is in")
        else:
            none = ", and no optimizer holds it" * (awaited is not None and not mine)
            noted.append(f"`{name}` trains too, and nothing has stepped it{none}: it was not replayed")
    known = {id(param) for one in family if one.root is not None for param in one.root.parameters()}
    for other in held:
        if known.isdisjoint(map(id, other.parameters())):
            known |= set(map(id, other.parameters()))
            said = f"`{type(other).__name__}` was called, and the optimizer that holds it has not stepped in this"
            noted.append(f"{said} window: nothing of it was proven")
    return Waiting(tuple(unstepped), tuple(detached), tuple(noted))


@define(kw_only=True)
class Turns:
    """One of the models that a program calls, which may train one after the other: when its window is over."""

    root: nn.Module | None = None
    """What the loop calls. None: the first module with trained parameters that is called from outside of any other."""
    when_done: Callable[[], None] = lambda: None  # the default of a field
    """Called once the window is complete: everything that trains was stepped, or the next window begins."""
    agrees: Callable[[bool], bool] = lambda waits: waits  # the default of a field
    """Told at each step at which its window may end whether it waits for another model: whether all ranks are to."""
    lingers: bool = False
    """Whether ``when_done`` waits until the next window goes forward, backward or steps."""
    family: list[Any] = field(init=False)
    """It, and one for each other model that is called beside this one and trains, where the root was not given."""
    variables: tuple[tuple[str, str], ...] = field(factory=variables, init=False)
    """As ``Head.variables``."""
    done: bool = field(default=False, init=False)
    ending: bool = field(default=False, init=False)
    """Whether ``when_done`` runs: what it raises ends the window."""
    _again: bool = field(default=False, init=False)
    """Whether the root was called since its window is complete."""
    _ready: bool = field(default=False, init=False)
    """Whether gradients were cleared since then: the next forward is another window's."""
    _stepping: bool = field(default=False, init=False)
    _next: Next = field(factory=Next, init=False)
    waited: int = field(default=0, init=False)
    """Steps that were taken once more while others were still to step."""
    _micros: list[Micro] = field(factory=list, init=False)
    _parts: dict[str, Part] = field(factory=dict, init=False)
    _tensors: dict[str, Tensor] = field(factory=dict, init=False)
    _limits: dict[str, None] = field(factory=dict, init=False)
    around: Around = field(factory=Around, init=False)
    _held: HeldState = field(factory=HeldState, init=False)
    _strange: bool = field(default=False, init=False)
    """Whether an optimizer has stepped that holds nothing of any model that was called."""
    awaited: list[nn.Module] | None = field(default=None, init=False)
    """As of ``to_step``, when somebody has looked last; None: nobody has."""
    still: dict[int, nn.Module] = field(factory=dict, init=False)
    """Modules that were called, and do not train."""

    @property
    def stepped(self) -> bool:
        """Whether a window of the root was stepped, be it by an optimizer that holds nothing of it."""
        return bool(self._held.optimizers or self._strange)

    def _tried(self, plain: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(scaler, *args, **kwargs)
        if not (self.done or self.stepped):
            self.around.tried()
        return result

    def _goes_on(self) -> None:
        """Something goes backward behind the window of this model. What was left counts where it is stepped too."""
        self._next.went = self._next.went or self._next.called
        if self._again and not self._next.closed:
            self._next.left_of(self.root, self._tensors)
        if self._again and not self._next.undecided:
            self.over()

    def _steps_again(self) -> None:
        """The next window of this model: what has not stepped by now may still do so."""
        self.around.kept = self._next.undecided or self.around.kept
        self._close()
        self._next.stepped()
        self.family[0].waited += 1
        self.family[0]._ended(again=True)

    def _close(self) -> None:
        if not self._next.closed:
            keep_changed(self._parts, self._tensors, self._keep)
        self._ready, self._next.closed = False, True

    def over(self) -> None:
        """Nothing more of this model is to be seen: the window is over, where all are done."""
        self._close()
        self.family[0]._ended()

    def _ended(self, *, again: bool = False) -> None:
        """A model is done; ``again``: and has stepped once more."""
        taken = not any(one._stepping for one in self.family)  # else one optimizer steps several, and is about to
        if not (taken and (again or all(one.done for one in self.family))):
            return
        self.awaited = to_step(self.family, self.still.values())
        waits = bool(self.awaited) or any(one._next.undecided for one in self.family)
        if not self.agrees(waits and self.waited < WAITS):
            self.ending = True
            self.when_done()
            self.ending = False

    def _beside(self, module: nn.Module) -> None:
        """Another module that trains some of these weights is called; behind this window, in the next one."""
        self._next.called, self.around.swung = self.done, self.around.swung or not self.done
        if not self.done:
            self.tell(f"`{type(module).__name__}` trains some of the same weights, and is called beside it")

    def tell(self, limit: str) -> None:
        """Notes what the proof cannot see."""
        self._limits[limit] = None

    def _keep(self, key: str, tensor: Tensor) -> None:
        raise NotImplementedError


CLIPS = {"_clip_grads_with_norm_": "clipped", "_get_total_norm": "measured", "clip_grad_value_": "clamped"}
"""Functions of torch's that clip, and what takes note of each."""


@define(eq=False)
class Clipping:
    """How the gradients of a model are clipped while a window is recorded."""

    clip: ClipProof | None
    """As a plan has it, or the last one that was seen; the norm that a plan allows stays."""
    value: float | None
    """To which each element is clipped, likewise."""
    closed: bool = field(default=False, init=False)
    """Whether everything was stepped."""
    at: list[int] = field(factory=list, init=False)
    """Micro-batches before each clipping that has shrunk something."""
    _asked: ClipProof | None = field(init=False)
    _power: float = field(default=2.0, init=False)
    _norms: dict[int, Any] = field(factory=dict, init=False)
    """The norm by which each parameter was clipped last, which parts of one clipping have in common."""
    _mine: Callable[[], dict[int, nn.Parameter] | None] = field(init=False)
    _micros: Sized = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._asked = self.clip

    def places(
        self, mine: Callable[[], dict[int, nn.Parameter] | None], micros: Sized
    ) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Home and name of each function, and what is to be called in its place.

        ``mine``: the parameters that are meant, by identity; None: nothing is noted now.
        """
        self._mine, self._micros = mine, micros
        yield FullyShardedDataParallel, "clip_grad_norm_", self.clipped_fsdp1
        clips = {
            known: (vars(clip_grad)[name], getattr(self, how))
            for name, how in CLIPS.items()
            for known in (name, name.removeprefix("_"))  # also where it was imported by its public name
        }
        for home in list(sys.modules.values()):
            there: Mapping[str, Any] = getattr(home, "__dict__", {})
            for known in clips.keys() & there.keys():
                plain, instead = clips[known]
                if there[known] is plain:
                    yield home, known, instead

    def shows(self, norm: Any) -> None:
        """Takes a norm at which a run has clipped, where nothing has shown one."""
        if self.clip is not None and self.clip.seen is None and norm is not None:
            self.clip = evolve(self.clip, seen=float(norm))

    def _open(self, most: float) -> bool:
        """Whether this is the first clipping of the window that may shrink something."""
        return self.clip is None and isfinite(most)

    def seen(self, micros: int) -> ClipProof | None:
        """The last clipping of a window with so many micro-batches."""
        return evolve(self.clip, early=any(at < micros for at in self.at)) if self.clip else None

    def clipped(self, plain: Callable[..., Any], params: Any, most: float, norm: Any, *args: Any, **kw: Any) -> Any:
        """Of gradients whose norm is known."""
        given = [params] if isinstance(params, Tensor) else list(params)
        mine = self._mine()
        if self.closed and mine is not None:
            stale = any(id(one) in mine and one.grad is not None for one in given)
            self.clip = ClipProof(most=float(most), late=True) if stale and self._open(most) else self.clip
            return plain(given, most, norm, *args, **kw)
        others = [] if mine is None else [param for param in given if id(param) not in mine]
        if mine is not None and not given and self._open(most):
            self.clip = ClipProof(most=float(most), empty=True)
        if mine is not None and len(others) < len(given):  # else another model is clipped
            joint = norm if isinstance(norm, DTensor) else float(norm)
            self._note(most, None if isinstance(joint, DTensor) else joint, beyond=bool(others))
            self._norms |= {id(param): joint for param in given}
            held = {key for key, one in mine.items() if one.requires_grad and one.grad is not None}
            known = {norm for key, norm in self._norms.items() if key in mine}  # of what is stepped already too
            alike = held <= self._norms.keys() and len(known) < 2
            if self.clip is not None and not alike:
                self.clip = evolve(self.clip, parts=True)
        return plain(given, most, norm, *args, **kw)

    def measured(self, plain: Callable[..., Any], grads: Any, norm_type: float = 2.0, *args: Any, **kw: Any) -> Any:
        """A norm of gradients."""
        self._power = float(norm_type)
        return plain(grads, norm_type, *args, **kw)

    def clamped(self, plain: Callable[..., Any], params: Any, clip_value: float, *args: Any, **kw: Any) -> Any:
        """Each element by itself."""
        if self.value is None and self._mine() is not None and not self.closed:
            self.value = float(clip_value)
        return plain(params, clip_value, *args, **kw)

    def clipped_fsdp1(self, plain: Callable[..., Any], unit: Any, most: float, norm_type: float = 2.0) -> Any:
        """By FSDP1's own method, which knows the norm of all shards."""
        norm, self._power = plain(unit, most, norm_type), float(norm_type)
        if self._mine() is not None and not self.closed:
            self._note(most, float(norm), beyond=False)
        return norm

    def _note(self, most: float, norm: float | None, *, beyond: bool) -> None:
        if not isfinite(most):  # as the Trainer of transformers measures a norm
            return
        seen = norm if norm is None or isfinite(norm) else None
        allowed = float(most) if self._asked is None else self._asked.most
        self.clip = ClipProof(most=allowed, seen=seen, power=self._power, beyond=beyond)
        if seen is not None and seen > most:
            self.at.append(len(self._micros))


def engine_of(root: nn.Module | None) -> Any:
    """DeepSpeed's engine, at the root or in it."""
    found = (
        one for one in (root.modules() if root is not None else ()) if "DeepSpeedEngine" in names.known_bases(type(one))
    )
    return next(found, None)


def clip_of(engine: Any) -> ClipProof:
    """Return how DeepSpeed clips, which it does by itself."""
    norm = getattr(engine.optimizer, "_global_grad_norm", None)
    return ClipProof(most=float(engine.gradient_clipping()), seen=float(norm) if norm and isfinite(norm) else None)
