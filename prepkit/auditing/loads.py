"""What modules take of what ``load_state_dict`` gives them, and weights that loads or wrappers make two of."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed.tensor.parallel as tensor_parallel
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import _flat_param
from torch.distributed.tensor.parallel import api

from prepkit.facts.window import Loaded
from prepkit.observe.prepared.around import called_by_program, frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls

LOADED = "load_state_dict(assign=True)"


@frozen(eq=False)
class _Pair:
    """Names that were one parameter of a module before a call."""

    by: str
    module: weakref.ref[nn.Module]
    one: str
    other: str

    def parted(self) -> bool:
        """Whether they are two now. What a load has told apart on purpose holds other values."""
        named = dict(module.named_parameters(remove_duplicate=False)) if (module := self.module()) is not None else {}
        one, other = named.get(self.one), named.get(self.other)
        return one is not None and other is not None and one is not other and (self.by != LOADED or _equal(one, other))


@frozen(eq=False)
class _Unit:
    """A parameter as a unit was made of it."""

    param: weakref.ref[Tensor]
    module: weakref.ref[nn.Module]
    """Whose it was."""
    name: str

    def __str__(self) -> str:
        return f"{type(self.module()).__name__}.{self.name}"


@define(eq=False)
class Ties:
    """Listens inside ``on()``."""

    _pairs: list[_Pair] = field(factory=list)
    _units: dict[int, _Unit] = field(factory=dict)
    """The first that was made of each parameter, by its ``id``."""
    _torn: list[tuple[str, _Unit, _Unit]] = field(factory=list)
    """What makes units, and two that were made of one parameter."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(_flat_param.FlatParamHandle, "__init__", self._flattens))
            stack.enter_context(around_calls(api, "parallelize_module", self._parallelizes, also=tensor_parallel))
            stack.enter_context(around_calls(nn.Module, "to_empty", self._empties))
            yield

    def untied(self) -> Iterator[tuple[str, str, str]]:
        """Yield the names of what is two still, with what has made it so."""
        yield from ((pair.one, pair.other, pair.by) for pair in self._pairs if pair.parted())
        for by, one, other in self._torn:
            if one.module() is not None and other.module() is not None:
                yield str(one), str(other), by

    def before_a_load(self, module: nn.Module) -> list[_Pair]:
        """What a load that replaces parameters may part; to be given back behind it."""
        return _tied(module, LOADED)

    def behind(self, pairs: list[_Pair]) -> None:
        """Hears of a call that may have parted these."""
        self._pairs += pairs

    def _parallelizes(self, plain: Any, module: Any, *given: Any, **named: Any) -> Any:
        pairs = _tied(module, "parallelize_module")
        result = plain(module, *given, **named)
        self.behind(pairs)
        return result

    def _empties(self, plain: Any, module: Any, *given: Any, **named: Any) -> Any:
        pairs = _tied(module, "to_empty")
        result = plain(module, *given, **named)
        self.behind(pairs)
        return result

    def _flattens(self, plain: Any, handle: Any, params: Any, module: Any, *given: Any, **named: Any) -> Any:
        params = [*params]
        places = {id(one): name for name, one in module.named_parameters()}
        for one in params:
            self._makes("FullyShardedDataParallel", one, module, places.get(id(one), ""))
        return plain(handle, params, module, *given, **named)

    def _makes(self, by: str, param: Tensor, module: nn.Module, name: str) -> None:
        unit, first = _Unit(weakref.ref(param), weakref.ref(module), name), self._units.get(id(param))
        if first is not None and first.param() is param:
            self._torn.append((by, first, unit))
        else:
            self._units[id(param)] = unit


def _tied(module: nn.Module, by: str) -> list[_Pair]:
    """Names of one parameter: the first, and each other."""
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False)]
    pairs = ((first.setdefault(id(param), name), name) for name, param in named)
    return [_Pair(by, weakref.ref(module), one, other) for one, other in pairs if one != other]


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether they hold the same in two places. Reads both."""
    kinds = type(one.data) is type(other.data) is Tensor and one.device == other.device and one.device.type != "meta"
    apart = kinds and one.shape == other.shape and one.dtype == other.dtype and one.data_ptr() != other.data_ptr()
    return apart and torch.equal(one, other)


@define(eq=False)
class Loads:
    """Listens inside ``on()``."""

    _last: dict[int, tuple[weakref.ref[nn.Module], Loaded | None]] = field(factory=dict)
    """By ``id`` of a module what was wrong with its last load."""
    ties: Ties = field(factory=Ties)
    itself: dict[tuple[str, str], None] = field(factory=dict)
    """Classes of modules that were given their own living weights once something had stepped, and lines."""
    stepped: bool = False
    _samples: dict[int, tuple[weakref.ref[Tensor], Tensor, str, str]] = field(factory=dict)
    """By ``id`` of a weight that was loaded: some of its elements as they were then, and where it was loaded."""

    _idle: dict[str, tuple[Callable[[], Any], list[Tensor]]] = field(factory=dict)
    """By line the module of a load that has changed nothing, and some elements of its weights then."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with around_calls(nn.Module, "load_state_dict", self._loaded), self.ties.on():
            yield

    def lost(self) -> tuple[Loaded, ...]:
        """Return what living modules did not take."""
        return tuple(one for module, one in self._last.values() if one is not None and module() is not None)

    def knows(self, module: nn.Module) -> bool:
        """Whether something was loaded into it, or into a part of it."""
        return any(self._last.get(id(one), (lambda: None,))[0]() is one for one in module.modules())

    def _loaded(self, plain: Any, module: Any, *given: Any, **named: Any) -> Any:
        ties = self.ties.before_a_load(module) if named.get("assign") or given[2:3] == (True,) else []
        state = given[0] if given else named["state_dict"]
        if self.stepped and called_by_program(frames_above(__file__)):
            line = line_of_program(frames_above(__file__))
            if _is_own(module, state) or self._changes_nothing_again(module, state, line):
                self.itself[type(module).__name__, line] = None
        result = plain(module, *given, **named)
        self.ties.behind(ties)
        missing, unexpected = getattr(result, "missing_keys", ()), set(getattr(result, "unexpected_keys", ()))
        told = _lost(module, state, missing, unexpected) if missing else None
        self._last[id(module)] = weakref.ref(module), told
        self._remembers(module, state)
        return result

    def _changes_nothing_again(self, module: nn.Module, state: Mapping[Any, Any], line: str) -> bool:
        """Whether a line loads what is there, for the second time, and the weights were trained in between."""
        pairs = _pairs(module, state)
        if not pairs or not all(a.shape == b.shape and torch.equal(a, b.to(a)) for a, b in pairs):
            self._idle.pop(line, None)
            return False
        now = [_some_of(one) for one, _ in pairs[:SAMPLED]]
        known, before = self._idle.get(line, (lambda: None, []))
        self._idle[line] = weakref.ref(module), now
        return known() is module and not all(map(torch.equal, before, now))

    def _remembers(self, module: nn.Module, state: Mapping[Any, Any]) -> None:
        line, name = line_of_program(frames_above(__file__)), type(module).__name__
        matrices = (one for key, one in module.named_parameters() if key in state and one.dim() > 1)
        for one in islice(matrices, SAMPLED):
            if type(one.data) is Tensor and one.numel() >= ELEMENTS and not one.is_meta:
                self._samples[id(one)] = weakref.ref(one), _some_of(one), name, line

    def overwritten(self) -> Iterator[tuple[str, str]]:
        """Yield classes and lines of loads of which most weights hold something else by now, unlike what was loaded."""
        loads: dict[tuple[str, str], list[bool]] = defaultdict(list)
        for param, loaded, *where in self._samples.values():
            if (now := param()) is not None and type(now.data) is Tensor and now.numel() >= ELEMENTS:
                loads[where[0], where[1]].append(_is_other(_some_of(now), loaded))
        yield from (where for where, others in loads.items() if 2 * sum(others) > len(others))


SAMPLED, ELEMENTS = 8, 16
"""Weights of a load that are remembered, and the fewest elements of each; up to ``MOST``."""
MOST = 256


@torch.no_grad()
def _some_of(param: Tensor) -> Tensor:
    """Elements of it, as float32 on the CPU."""
    return param.detach().reshape(-1)[:MOST].float().cpu().clone()


def _is_other(now: Tensor, before: Tensor) -> bool:
    """Return whether these are no multiple of what was there, nor near it."""
    if now.shape != before.shape or not bool(before.any()):
        return False
    along = float(now @ before) / (float(now.norm() * before.norm()) or 1.0)
    return along < 0.5


def _is_own(module: nn.Module, state: Mapping[Any, Any]) -> bool:
    """Return whether all that is loaded lies in the memory of the parameters that are to take it."""
    here = _pairs(module, state)
    return bool(here) and all(a.data_ptr() == b.data_ptr() for a, b in here)


def _pairs(module: nn.Module, state: Mapping[Any, Any]) -> list[tuple[Tensor, Tensor]]:
    """Parameters, and what they are to take, of plain tensors."""
    params = dict(module.named_parameters(remove_duplicate=False))
    pairs = [(params[key], one) for key, one in state.items() if key in params and isinstance(one, Tensor)]
    return [(a, b) for a, b in pairs if a.numel() and type(a.data) is type(b.data) is Tensor and not a.is_meta]


def _lost(module: nn.Module, state: Mapping[Any, Any], missing: list[str], unexpected: set[str]) -> Loaded | None:
    """Return what a load has left out that it was to take, as it seems: everything, or what has other names."""
    keys = [key for key in state if isinstance(key, str)]
    known = {**dict(module.named_buffers()), **dict(module.named_parameters(remove_duplicate=False))}
    told = partial(Loaded, model=type(module).__name__, given=len(keys))
    if unexpected.issuperset(keys):
        if not keys:
            return told(key="") if called_by_program(frames_above(__file__)) else None
        for key in keys:
            inside = state[key]
            if isinstance(inside, Mapping) and (near := next((one for one in inside if one in known), "")):
                return told(key=key, near=near, inside=True)
        pairs = ((key, name) for key in keys for name in missing if _alike(key, name))
        key, near = next(pairs, (keys[0], ""))
        return told(key=key, near=near)
    renamed = _renamed({key: _shape(state[key]) for key in keys if key in unexpected}, missing, known)
    return told(key=renamed[0][0], near=renamed[0][1], lost=len(renamed)) if renamed else None


def _renamed(
    given: Mapping[str, tuple[int, ...]], missing: Iterable[str], known: Mapping[str, Tensor]
) -> list[tuple[str, str]]:
    """Pairs of a key that was given and the name without a value that it would be, but for words between their dots.

    Those of one word that is too many, or too few, where most keys with that word are such.
    """
    wanted = {name: tuple(known[name].shape) for name in missing if name in known}
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    within: Counter[str] = Counter()
    for key, shape in given.items():
        for words, name in _without(key):
            within[words] += 1
            if wanted.get(name) == shape:
                found[words].append((key, name))
    for name, shape in wanted.items():
        for words, key in _without(name):
            within[f"+{words}"] += 1
            if given.get(key) == shape:
                found[f"+{words}"].append((key, name))
    words = max(found, key=lambda one: len(found[one]), default="")
    pairs = found[words] if words else []
    return pairs if len(pairs) > 1 and 2 * len(pairs) > within[words] else []


def _without(key: str) -> Iterator[tuple[str, str]]:
    """Yield words that stand next to each other in a key, and the key without them."""
    parts = key.split(".")
    for begin in range(len(parts) - 1):
        for end in range(begin + 1, len(parts)):
            yield ".".join(parts[begin:end]), ".".join((*parts[:begin], *parts[end:]))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _alike(key: str, name: str) -> bool:
    """Return whether one is the other behind a prefix."""
    return key.endswith(f".{name}") or name.endswith(f".{key}")
