"""Phases of one program: optimizers that others replace, what is left behind, and weights that nobody steps."""

from __future__ import annotations

import ast
import gc
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.auditing.coming import makes_optimizer_behind, splits_again
from prepkit.auditing.evaluations import Evaluations
from prepkit.auditing.resumes import Resumes
from prepkit.facts.phases import LeftBehind, Outlived, PhaseFacts
from prepkit.objects.alive import alive, alive_of
from prepkit.objects.local_part import local
from prepkit.objects.names import unwrap_root
from prepkit.observe.prepared.around import (
    Line,
    frames_above,
    is_foreign,
    line_of_program,
    lines_of_program,
    loops_have,
    name_of,
    nodes_of,
    own_frames,
    parsed,
    texts_of_program,
)
from prepkit.observe.prepared.fabric import module_of
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.optimizers import as_rate, engines, inner

TICKED = (LRScheduler, SequentialLR, ChainedScheduler, ReduceLROnPlateau)
"""Classes with a ``step`` of their own."""
IN_VAIN = 2
"""Ticks in a row of a scheduler whose optimizer has rested while another stepped: fewer say nothing."""
SAMPLE = 64
"""Numbers of a weight that are compared."""
MOST_ROOTS = 8
MOST_ADAPTERS = 16
STANDS = 3
"""Steps in which a weight that was frozen has had gradients, and has stayed as it was."""
WAITS = 16
"""And where an optimizer holds it that has not stepped since: one that steps now and then may come yet."""
RESTS = 8
"""Steps in which an adapter has had none any more."""
UP = 3
"""So far above a weight is the module that has a frozen one too."""


@define(eq=False)
class _Course:
    """What is known of one optimizer that has stepped."""

    held: frozenset[int] = frozenset()
    """The ``id``s of its parameters."""
    last: int = 0
    """The number of its last step among those of all."""
    made: str = ""
    """The line that has made it."""
    stands: tuple[Line, ...] = ()
    """Where its first step stands."""


@frozen(eq=False)
class _Tick:
    """Where all stood when a scheduler was ticked."""

    own: int
    """The last step of its optimizer."""
    steps: int
    """Those of all."""
    rates: tuple[float | None, ...]
    """Of the optimizer that has stepped last."""
    in_vain: int


@define(eq=False)
class _Adapter:
    """A module that has weights which train, and a frozen one."""

    home: str
    trained: list[weakref.ref[Tensor]]
    beside: weakref.ref[Tensor]
    """The frozen one."""
    before: Tensor | None = None
    """Some numbers of that, when the others had gradients last; None: they never had."""
    after: Tensor | None = None
    """And when they had none for the first time since then."""
    rests: int = 0
    """Steps since then of an optimizer that holds them."""


@define(eq=False)
class _Root:
    """A model as it was before the first step behind a call of it."""

    frozen: dict[str, weakref.ref[Tensor]]
    adapters: list[_Adapter]
    known: tuple[str, ...] = ()
    """Adapters of peft that it had."""
    since: dict[str, tuple[int, Tensor]] = field(factory=dict)
    """Since which step one of the frozen ones has gradients, and some of its numbers then."""


@define(eq=False)
class PhaseWeights:
    """Is told of calls of modules, and of steps."""

    unheld: dict[LeftBehind, None] = field(factory=dict)
    merged: dict[LeftBehind, None] = field(factory=dict)
    idle: dict[LeftBehind, None] = field(factory=dict)
    _roots: weakref.WeakKeyDictionary[nn.Module, _Root | None] = field(factory=weakref.WeakKeyDictionary)

    def enters(self, module: nn.Module, *_: Any) -> None:
        """A module is called from outside of any other."""
        if module.training and torch.is_grad_enabled() and len(self._roots) < MOST_ROOTS:
            self._roots.setdefault(unwrap_root(module_of(module))[-1], None)

    @torch.no_grad()
    def begins(self, steps: int, held: frozenset[int], courses: Mapping[Any, _Course]) -> None:
        """A step begins, of an optimizer that holds these; ``courses``: of all optimizers."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        for model, root in [*self._roots.items()]:
            now = self._roots[model] = root or _root(model)
            self._thaws(model, now, steps, courses)
            resting = [one for one in now.adapters if _rests(one, held)]
            params = {id(param) for param in (model.parameters() if resting else ())}
            if resting and all(id(ref()) in params for one in resting for ref in one.trained):
                self.merged[_left(model, [one.home for one in resting])] = None
            if added := [name for name in _adapters(model) if name not in now.known]:
                now.known += tuple(added)
                idle = [name for name in added if name not in getattr(model, "active_adapters", added)]
                self.idle |= {_left(model, idle): None} if idle else {}

    def _thaws(self, model: nn.Module, root: _Root, steps: int, courses: Mapping[Any, _Course]) -> None:
        for name, ref in root.frozen.items():
            param = ref()
            if param is None or not param.requires_grad or param.grad is None:
                root.since.pop(name, None)
            elif name not in root.since:
                root.since[name] = (steps, _some(param))
        late = [name for name, (since, _) in root.since.items() if steps - since >= STANDS]
        owners = dict[int, list[Any]]()
        for one in alive(torch.optim.Optimizer) if late else ():
            for param in (param for group in one.param_groups for param in group["params"]):
                owners.setdefault(id(param), []).append(one)
        still = list[str]()
        for name in late:
            (since, some), param = root.since[name], root.frozen[name]()
            mine = owners.get(id(param), ())
            rest = all(one in courses and courses[one].last < since for one in mine)  # of a training that is over
            if mine and rest and steps - since < WAITS:
                continue
            if rest and param is not None and torch.equal(_some(param), some):
                still.append(name)
            del root.since[name], root.frozen[name]
        if still:
            self.unheld[_left(model, still)] = None


def _root(model: nn.Module) -> _Root:
    named = {name: param for name, param in model.named_parameters() if not param.is_meta and param.numel()}
    frozen = {name: weakref.ref[Tensor](param) for name, param in named.items() if not param.requires_grad}
    beside: dict[str, weakref.ref[Tensor]] = {}
    for name, ref in frozen.items():
        for home in _homes(name):
            beside.setdefault(home, ref)
    found: dict[str, _Adapter] = {}
    for name, param in named.items():
        home = next((one for one in _homes(name) if one in beside), "") if param.requires_grad else ""
        if home and (home in found or len(found) < MOST_ADAPTERS):
            found.setdefault(home, _Adapter(home, [], beside[home])).trained.append(weakref.ref(param))
    return _Root(frozen, [*found.values()], _adapters(model))


def _adapters(model: nn.Module) -> tuple[str, ...]:
    kind = getattr(sys.modules.get("peft.peft_model"), "PeftModel", ())
    return tuple(model.peft_config) if isinstance(model, kind) else ()


def _homes(name: str) -> list[str]:
    """The modules that have a parameter, the innermost first, but for the outermost."""
    parts = name.split(".")
    return [".".join(parts[:-up]) for up in range(1, 1 + UP) if parts[:-up]]


def _rests(one: _Adapter, held: frozenset[int]) -> bool:
    """Return whether it has had no gradients for so long now, since its frozen weight was written, and that once."""
    params, beside = [param for ref in one.trained if (param := ref()) is not None], one.beside()
    if beside is None or len(params) < len(one.trained) or any(not param.requires_grad for param in params):
        one.before = None
    elif held.issuperset(map(id, params)):
        if any(param.grad is not None and bool(local(param.grad).any()) for param in params):
            one.before, one.after, one.rests = _some(beside), None, 0
        elif one.before is not None:
            one.rests, one.after = one.rests + 1, _some(beside) if one.after is None else one.after
            written = one.rests == RESTS and not torch.equal(one.before, one.after)
            return written and torch.equal(one.after, _some(beside))
    return False


def _left(model: nn.Module, names: list[str]) -> LeftBehind:
    line = line_of_program(frames_above(__file__))
    return LeftBehind(model=type(model).__name__, name=names[0], count=len(names), line=line)


def _some(param: Tensor) -> Tensor:
    return local(param).detach().reshape(-1)[:SAMPLE].clone()


@define(eq=False)
class Phases:
    """Listens inside ``on()``."""

    weights: PhaseWeights = field(factory=PhaseWeights)
    resumes: Resumes = field(factory=Resumes)
    evaluations: Evaluations = field(factory=Evaluations)
    _steps: int = 0
    """Of all optimizers."""
    _courses: weakref.WeakKeyDictionary[Any, _Course] = field(factory=weakref.WeakKeyDictionary)
    _made_at: weakref.WeakKeyDictionary[Any, str] = field(factory=weakref.WeakKeyDictionary)
    _first: weakref.ref[Any] | None = None
    """The optimizer that has stepped first."""
    _ticking: bool = False
    _ticks: weakref.WeakKeyDictionary[Any, _Tick] = field(factory=weakref.WeakKeyDictionary)
    _driven: weakref.WeakSet[Any] = field(factory=weakref.WeakSet)
    """Optimizers that a scheduler was made for."""
    _outlived: dict[Outlived, None] = field(factory=dict)
    _earlier: list[weakref.ref[Tensor]] = field(factory=list)
    """Parameters that had gradients before the program began, as of other cells of a notebook."""
    begins_anew: bool = False
    """Whether the step that begins is the first of a training of its own, behind those of all other optimizers."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        handle = register_optimizer_step_pre_hook(self._begins)
        self._earlier = [weakref.ref(one) for one in with_gradients()]
        try:
            with ExitStack() as stack:
                for kind in TICKED:
                    stack.enter_context(around_calls(kind, "step", self._ticked))
                stack.enter_context(around_calls(torch.optim.Optimizer, "__init__", self._made))
                stack.enter_context(self.resumes.on())
                yield
        finally:
            handle.remove()

    def enters(self, module: nn.Module, *_: Any) -> None:
        """A module is called from outside of any other."""
        self.weights.enters(module)
        self.resumes.enters(module)
        self.evaluations.enters(module)

    def told(self) -> dict[str, Any]:
        """What was heard so far, as a field of ``WindowFacts``."""
        left: dict[str, Any] = {"unheld": tuple(self.weights.unheld), "merged": tuple(self.weights.merged)}
        left |= {"idle": tuple(self.weights.idle), "parted": splits_again()}
        left["loose"] = tuple(loose_parameters(self._earlier)) if self._steps == 1 else ()
        left |= {"moments": tuple(self.resumes.moments), "samples": tuple(self.resumes.samples)}
        left["evaluations"] = self.evaluations.facts()
        return {"phases": PhaseFacts(outlived=tuple(self._outlived), taken_over=self._taken_over(), **left)}

    def _made(self, plain: Any, optimizer: Any, *given: Any, **named: Any) -> None:
        plain(optimizer, *given, **named)
        self._made_at[optimizer] = line_of_program(frames_above(__file__))

    def _begins(self, optimizer: Any, *_: Any) -> None:
        """A step of any optimizer begins."""
        self._steps += 1
        self._first = self._first or weakref.ref(optimizer)
        held = frozenset(id(param) for group in optimizer.param_groups for param in group["params"])
        self.begins_anew = optimizer not in self._courses and self._is_apart()
        course = self._courses.setdefault(optimizer, _Course(made=self._made_at.get(optimizer, "")))
        course.stands = course.stands or stands()
        course.last, course.held = self._steps, held
        self.weights.begins(self._steps, held, self._courses)

    def _is_apart(self) -> bool:
        """Whether what begins to step now does so in no run of a loop in which another has."""
        return bool(self._courses) and all(elsewhere(one.stands) for one in self._courses.values())

    def over(self) -> list[Any]:
        """Optimizers whose training is over, where the step that begins is the first of another."""
        return [*self._courses][:-1] if self.begins_anew else []

    def _taken_over(self) -> bool:
        first = None if self._first is None else self._first()
        mine = None if first is None else self._courses.get(first)
        return mine is not None and any(one.last > mine.last and one.held & mine.held for one in self._courses.values())

    def _ticked(self, plain: Any, scheduler: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or self._ticking:  # inside another, as SequentialLR ticks its parts
            return plain(scheduler, *given, **named)
        self._ticking = True
        try:
            result = plain(scheduler, *given, **named)
        finally:
            self._ticking = False
        self._looks(scheduler, inner(scheduler.optimizer))
        return result

    def _looks(self, scheduler: Any, optimizer: Any) -> None:
        """Notes where all stand, and tells of the last one of several ticks in a row that nobody has used."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        self._driven.add(optimizer)
        mine, before = self._courses.get(optimizer, _Course()), self._ticks.get(scheduler)
        beside = [one for one, course in self._courses.items() if self._replaces(course, mine)]
        beside = [one for one in beside if type(one) is type(optimizer)]  # an LBFGS behind an Adam has other rates
        rates = tuple(as_rate(group.get("lr")) for one in beside for group in one.param_groups)
        alike = before is not None and before.own == mine.last and before.steps < self._steps
        used = not beside or not alike or any(one in self._driven for one in beside)
        used = used or (before is not None and before.in_vain > 0 and before.rates != rates)
        in_vain = 0 if used or before is None else before.in_vain + 1
        self._ticks[scheduler] = _Tick(mine.last, self._steps, rates, in_vain)
        if in_vain == IN_VAIN + 1:  # the first of them has seen no rate before
            line, names = line_of_program(frames_above(__file__)), [type(one).__name__ for one in (scheduler, *beside)]
            made = self._courses[beside[0]].made
            self._outlived[Outlived(scheduler=names[0], line=line, optimizer=names[1], made=made)] = None

    def _replaces(self, other: _Course, mine: _Course) -> bool:
        """Whether another optimizer has stepped parameters of this one since this one has, and has stepped last."""
        shared = len(other.held & mine.held)
        return bool(mine.last) and other.last == self._steps > mine.last and 2 * shared > len(other.held)


def _in_one_run(before: Sequence[Line], now: Sequence[Line]) -> bool:
    """Whether both stand in one run of some loop: of a function that is called twice, its loop runs twice."""
    for first, second in zip(reversed(before), reversed(now), strict=False):
        if first[0] is second[0] and loops_have([first], [second]):
            return True
        if first != second:
            return False
    return False


# --- what nobody holds ---


def with_gradients() -> list[nn.Parameter]:
    """All parameters that get gradients, and have some."""
    return [one for one in alive_of(lambda kind: kind is nn.Parameter) if one.requires_grad and one.grad is not None]


def loose_parameters(earlier: list[weakref.ref[Tensor]]) -> Iterator[str]:
    """Yield what the program calls its parameters that get gradients, stand in no module, and that nobody steps.

    Not where it reads gradients itself, as one that steps by hand does, or makes an optimizer behind this line.
    """
    known = {id(ref()) for ref in earlier}
    held = known | {
        id(one) for each in alive(torch.optim.Optimizer) for group in each.param_groups for one in group["params"]
    }
    found = [one for one in with_gradients() if id(one) not in held]
    modules = alive(nn.Module) if found else []
    standing = {id(one) for each in modules for one in each._parameters.values()}
    found = [one for one in found if id(one) not in standing]
    if not found or any(map(engines, modules)) or _by_hand() or makes_optimizer_behind():
        return
    kept = {one.untyped_storage().data_ptr() for each in modules for one in each._parameters.values() if _is_own(one)}
    for one in found:
        if one.untyped_storage().data_ptr() not in kept and (name := _name_of(one)):
            yield name


def _is_own(one: Any) -> bool:
    return type(one) is nn.Parameter and not one.is_meta


def _by_hand() -> bool:
    """Return whether the program reads gradients where it steps or begins, or moves weights by them in any file."""
    own = own_frames()
    files = {one.f_code.co_filename for one in (*own[:1], *own[-1:])}
    if any(_is_gradient(one) for file in files for one in nodes_of(parsed(file), ast.Attribute)):
        return True
    return any(
        isinstance(one, ast.AugAssign) or name_of(one).endswith("_")
        for file in texts_of_program()
        for one in nodes_of(parsed(file), ast.AugAssign, ast.Call)
        if any(_is_gradient(each) for each in ast.walk(one))
    )


def _is_gradient(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != "grad":
        return False
    return getattr(node.value, "attr", getattr(node.value, "id", "")) != "autograd"


def _name_of(thing: Any, *, inside: bool = True) -> str:
    """What a variable, or an object of the program's, calls it; empty: only others hold it.

    ``inside``: or a list or table that has such a name.
    """
    named = (pair for one in own_frames() for pair in [*one.f_locals.items(), *one.f_globals.items()])
    if name := next((name for name, value in named if value is thing), ""):
        return name
    for holder in gc.get_referrers(thing):
        table = holder if type(holder) is dict else getattr(holder, "__dict__", {})
        name = next((str(key) for key, value in [*table.items()] if value is thing), "")
        for owner in (gc.get_referrers(holder) if type(holder) is dict else [holder]) if name else ():
            if getattr(owner, "__dict__", None) is table and _is_of_program(type(owner)):
                return f"{type(owner).__name__}.{name}"
        if inside and type(holder) in (list, dict) and (name := _name_of(holder, inside=False)):
            return name
    return ""


def _is_of_program(kind: type) -> bool:
    return not is_foreign(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<")


def stands() -> tuple[Line, ...]:
    """Where the program stands now, the innermost line first."""
    return tuple(lines_of_program(frames_above(__file__)))


def elsewhere(before: Sequence[Line]) -> bool:
    """Return whether it stands in no run of a loop that had that line too."""
    return not _in_one_run(before, stands())
