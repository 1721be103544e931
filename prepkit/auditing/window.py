"""What passes through torch's functions while a script runs up to its first step; afterwards all is as before."""

from __future__ import annotations

import sys
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from prepkit.auditing import workers
from prepkit.auditing.beginnings import Beginnings
from prepkit.auditing.checkpoints import HeardLoads, kept_alive
from prepkit.auditing.copies import Copies
from prepkit.auditing.cuts import Cuts
from prepkit.auditing.forwards import Forwards, sizes_of
from prepkit.auditing.inputs import InputCalls
from prepkit.auditing.ledger import Ledger
from prepkit.auditing.lessons import Lessons
from prepkit.auditing.libraries import LibraryCalls
from prepkit.auditing.loads import Loads
from prepkit.auditing.loops import Turning
from prepkit.auditing.losses import Losses, leads_to_parameter
from prepkit.auditing.phases import Phases
from prepkit.auditing.ratios import Ratios
from prepkit.auditing.recomputed import Recomputed
from prepkit.auditing.running import recompiled
from prepkit.auditing.shares import SharedWork
from prepkit.auditing.standing import Standing
from prepkit.auditing.terms import Terms
from prepkit.auditing.values import Computing
from prepkit.facts.window import OddSample, WindowFacts
from prepkit.objects.names import named_parameters, sites, unwrap_root
from prepkit.observe.prepared.around import (
    Line,
    frames_above,
    in_one_loop,
    is_foreign,
    line_of_program,
    lines_of_program,
    reads_gradients,
    stepped_next,
    ticked_in_loop,
)
from prepkit.observe.prepared.averaging import averages_weights
from prepkit.observe.prepared.instead import around_calls, called_first, scripts_read_plain
from prepkit.observe.prepared.loaders import language_config, odd_batch, overlap
from prepkit.observe.prepared.mixing import averages
from prepkit.observe.prepared.modules import elsewhere, float16_units, generator
from prepkit.observe.prepared.optimizers import engines, inner, steps_copies
from prepkit.observe.prepared.trainers import planned
from prepkit.ranks.arrivals import Arrivals

DIVIDES = ("DivBackward0", "MulBackward0")
BETWEEN = ("isend", "irecv", "all_to_all", "all_to_all_single")
"""Calls by which ranks send each other what is no gradient of a parameter."""
HANDS = BETWEEN[:2]
"""Those between two ranks, which ``send`` and ``recv`` make too."""
SENDS = (*BETWEEN, "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
COLLECTIVES = ("distributed_c10d.py", "c10d_logger.py", "distributed/nn/functional.py", "_functional_collectives.py")
"""Files of torch's that stand between a program and such a call."""
PAST = ("accelerate.", "deepspeed.", "lightning.", "pytorch_lightning.", "transformers.")
"""Modules whose own code calls backward for a loop."""


@define(eq=False)
class Window:
    """Listens inside ``on()``, until ``facts`` is asked at a step."""

    communicates: str = ""
    """As in ``WindowFacts``."""
    reduced: set[str] = field(factory=set)
    """Lines of the program that have summed something over the ranks."""
    scaled: bool = False
    stepping: bool = False
    clipped_scaled: bool = False
    clipped_none: bool = False
    """Whether gradients were clipped before anything went backward."""
    clipped_spent: bool = False
    backwards: int = 0
    undivided: bool = False
    cleared: str = ""
    rebuilt: str = ""
    taken: str = ""
    text: OddSample = ""
    draws: str = ""
    recomputed: Recomputed = field(factory=Recomputed)
    forwards: Forwards = field(factory=Forwards)
    losses: Losses = field(factory=Losses)
    loads: Loads = field(factory=Loads)
    ledger: Ledger = field(factory=Ledger)
    checkpoints: HeardLoads = field(factory=HeardLoads)
    terms: Terms = field(factory=Terms)
    values: Computing = field(factory=Computing)
    libraries: LibraryCalls = field(factory=LibraryCalls)
    turns: Turning = field(factory=Turning)
    beginnings: Beginnings = field(factory=Beginnings)
    ratios: Ratios = field(factory=Ratios)
    inputs: InputCalls = field(factory=InputCalls)
    shares: SharedWork = field(factory=SharedWork)
    lessons: Lessons = field(factory=Lessons)
    copies: Copies = field(factory=Copies)
    cuts: Cuts = field(factory=Cuts)
    phases: Phases = field(factory=Phases)
    folder: str = ""
    arrivals: Arrivals = field(factory=Arrivals)
    """Is told of calls and backwards."""
    awaited: tuple[nn.Parameter, ...] = ()
    """As of ``audit``."""
    _emptied: set[int] = field(factory=set)
    """The ``id``s of parameters whose gradients were cleared last."""
    _float16: dict[str, None] = field(factory=dict)
    _float16_units: dict[str, None] = field(factory=dict)
    _unscaled: set[int] = field(factory=set)
    _by_norm: set[int] = field(factory=set)
    """Parameters that were clipped by a norm of theirs."""
    _compiled: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = field(factory=list)
    _called: dict[int, weakref.ref[nn.Module]] = field(factory=dict)
    _entered: dict[int, weakref.ref[nn.Module]] = field(factory=dict)
    """Modules that were called from outside of any other, be it without gradients."""
    _ticked: dict[int, int] = field(factory=dict)
    """Per scheduler how often it was ticked after something went backward."""
    _before: dict[int, list[list[Line]]] = field(factory=lambda: defaultdict(list))
    """Where each was ticked before."""

    @contextmanager
    def on(self) -> Iterator[Window]:
        """Inside, it listens."""
        with ExitStack() as stack:
            self.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prepkit-audit-"))
            stack.enter_context(scripts_read_plain())
            others = (self.copies.enters, self.phases.enters, self.terms.given_back.enters)
            for enters in (self._enters, self.lessons.enters, *others):
                stack.enter_context(called_first(enters))
            rooms = (self.recomputed, self.losses, self.loads, self.ledger, self.terms, self.values, self.checkpoints)
            more = (self.libraries, self.turns, self.beginnings, self.ratios, self.inputs, self.shares, self.lessons)
            for room in (*rooms, *more, self.copies, self.cuts, self.phases, Standing(self.arrivals)):
                stack.enter_context(room.on())
            for scaler in _scalers():
                for name, around in (("scale", self._scales), ("unscale_", self._unscales), ("step", self._steps)):
                    if name in vars(scaler):
                        stack.enter_context(around_calls(scaler, name, around))
            for home in (clip_grad, torch.nn.utils):
                for name in ("clip_grad_norm_", "clip_grad_value_"):
                    stack.enter_context(around_calls(home, name, partial(self._clips, name)))
            stack.enter_context(around_calls(torch.autograd, "backward", self._backward))
            stack.enter_context(around_calls(torch.autograd, "grad", self._takes))
            stack.enter_context(around_calls(torch.optim.Optimizer, "zero_grad", self._clears))
            stack.enter_context(around_calls(nn.Module, "zero_grad", self._clears))
            stack.enter_context(around_calls(torch, "compile", self._compile))
            stack.enter_context(around_calls(LRScheduler, "step", self._ticks))
            for name in SENDS:
                sends = partial(self._sends, name)
                stack.enter_context(around_calls(distributed_c10d, name, sends, also=dist))
                if name in vars(functional):
                    stack.enter_context(around_calls(functional, name, sends))
            stack.enter_context(around_calls(_MultiProcessingDataLoaderIter, "__init__", self._reads))
            yield self

    def told(self) -> dict[str, Any]:
        """What later steps may have as well, as fields of ``WindowFacts``."""
        own = {"loaded_itself": tuple(self.loads.itself), "shares": self.shares.told(), "values": self.values.facts()}
        rooms = (self.ledger, self.beginnings, self.copies, self.cuts, self.ratios, self.phases, self.libraries)
        told = {name: one for room in rooms for name, one in room.told().items()}
        return told | own | {"lessons": self.lessons.told()}

    def called(self) -> list[nn.Module]:
        """Return the modules that were called from outside of any other, with gradients."""
        return [module for one in self._called.values() if (module := one()) is not None]

    def facts(
        self, alive: list[Any], model: nn.Module | None = None, scheduler: Any = None, optimizer: Any = None
    ) -> WindowFacts:
        """What was heard so far; ``model``: whose parameters have names.

        Reads on in streams that several workers give, which nobody reads afterwards.
        """
        trainer, steps, ticks = planned()
        named = {} if model is None else named_parameters(model)
        first = {id(param): name for name, param in named.items()}
        hidden = model is None or goes_backward() or engines(model)
        return WindowFacts(
            float16=tuple(self._float16),
            float16_units=tuple(self._float16_units),
            scaled=self.scaled,
            scaler_steps=self.stepping,
            clipped_scaled=self.clipped_scaled,
            clipped_none=self.clipped_none,
            clipped_spent=self.clipped_spent,
            clipped_shards=any(map(self._clipped_here, alive)),
            squashed=tuple(self.losses.squashed),
            misgiven=self.losses.told(),
            alike=tuple(self.forwards.alike),
            given=(self.forwards.given(),),
            copies=optimizer is not None and self._steps_copies(optimizer, model),
            untouched=frozenset(() if hidden else (name for name, param in named.items() if param.grad is None)),
            idle=tuple(self._idle()),
            unheld=tuple(self._unheld(alive, first.keys())),
            workers=tuple(workers.alike([one for one in alive if isinstance(one, _MultiProcessingDataLoaderIter)])),
            undivided=self.undivided,
            forgetful=tuple(self.recomputed.forgetful),
            renormalised=tuple(self.recomputed.renormalised),
            forwards=tuple(self.forwards.facts(sizes_of(alive), first.keys(), self.losses.compared)),
            terms=self.terms.facts(first),
            elsewhere=() if model is None else tuple(dict.fromkeys(self._elsewhere(model))),
            ticked=self._ticked.get(id(scheduler), 0) or self._at_the_top(scheduler),
            backwards=self.backwards,
            draws=self.draws or self.inputs.noise,
            by_batch=ticked_in_loop(scheduler, frames_above(__file__)),
            overlap=overlap(alive),
            drops_resting=tuple(self.forwards.drop_at_rest(alive, model)),
            cleared=self.cleared if not first or self._emptied & first.keys() else "",
            **self._loaded(optimizer, scheduler),
            **(self.told() | self._rooms(alive, model, scheduler, optimizer)),
            rebuilt=self.rebuilt,
            taken=self.taken,
            reentrant=tuple(self.recomputed.without_gradient(first)),
            communicates=self.communicates,
            averages_weights=averages_weights(self.reduced),
            recompiled=recompiled(),
            text=self.text,
            again=tuple(_again(optimizer, first)),
            **self._averages(alive),
            trainer=trainer,
            steps=steps,
            ticks=ticks,
        )

    def _steps_copies(self, optimizer: Any, model: nn.Module | None) -> bool:
        """Whether it steps copies of this model's parameters; of any that was called, where it holds none of those."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        called = self.called()
        loose = not any(id(param) in held for module in called for param in module.parameters())
        models = [*(called if loose else ()), *([] if model is None else [model])]
        return any(steps_copies(one, optimizer) for one in models)

    def _rooms(self, alive: list[Any], model: nn.Module | None, scheduler: Any, optimizer: Any) -> dict[str, Any]:
        return {
            "libraries": self.libraries.facts(alive, self.called()),
            "turns": self.turns.facts(scheduler, optimizer),
            "beginnings": self.beginnings.facts(model),
            "inputs": self.inputs.facts(),
            "overlapping": self.copies.overlapping(alive, model),
        }

    def _averages(self, alive: list[Any]) -> dict[str, Any]:
        found = averages(alive)
        self.copies.mixed.quiet = bool(found["mixed"] or found["aliased"])
        return found

    def _loaded(self, optimizer: Any, scheduler: Any) -> dict[str, Any]:
        """What became of what was loaded, and of what is kept to be loaded."""
        return {
            "loaded": self.loads.lost(),
            "untied": tuple(self.loads.ties.untied()),
            "overwritten": tuple(self.loads.overwritten()),
            "unresumed": self.checkpoints.left(optimizer, scheduler),
            "kept_alive": tuple(dict.fromkeys(kept_alive())),
        }

    def _enters(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        if next(module.parameters(), None) is not None:
            self.arrivals.calls(alone=torch.is_grad_enabled() and _unsynced(module))
        self._entered[id(module)] = weakref.ref(module)
        if not torch.is_grad_enabled() or torch._C._functorch.maybe_current_level() is not None:
            self.forwards.rests(module)  # or inside a transform of torch.func, whose tensors mean nothing outside
            return None
        inside = unwrap_root(module)[-1]
        if not self.text and (config := language_config(inside)) is not None:
            self.text = odd_batch(dict(zip(signature(inside.forward).parameters, args, strict=False)) | kwargs, config)
        if id(module) not in self._called and any(one.requires_grad for one in module.parameters()):
            self._float16_units |= dict.fromkeys(float16_units(module))
        self._called[id(module)] = weakref.ref(module)
        narrow = next((one for one in module.parameters() if one.requires_grad and one.dtype == torch.float32), None)
        kind = None if narrow is None else narrow.device.type
        if kind and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            self._float16[type(module).__name__] = None
        return self._hears_outputs(module, args, kwargs) if module.training else None

    def _hears_outputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Callable[[Any], None]:
        self.losses.enters()
        if self.forwards.knows(module):
            self.losses.compared = []  # of an earlier micro-batch
        leaves, before = self.forwards.enters(module, args, kwargs), generator("cpu")

        def left(outputs: Any) -> None:
            self.draws = self.draws or (type(unwrap_root(module)[-1]).__name__ if generator("cpu") != before else "")
            leaves(outputs)
            self.inputs.leaves(module, (args, kwargs), outputs)

        return left

    def _sends(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            frames = list(frames_above(__file__))
            self.reduced |= {line_of_program(frames)} if name == "all_reduce" else set()
            self.communicates = self.communicates or _sent_through(name, (*given, *named.values()), frames)
        result = plain(*given, **named)
        return self.arrivals.handed(result, given[0] if given else named["tensor"]) if name in HANDS else result

    def _scales(self, plain: Any, scaler: Any, *given: Any, **named: Any) -> Any:
        self.scaled = self.scaled or scaler.is_enabled()
        return self.ledger.scales(plain(scaler, *given, **named), enabled=scaler.is_enabled())

    def _unscales(self, plain: Any, scaler: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
        self._unscaled |= {id(param) for group in optimizer.param_groups for param in group["params"]}
        self.ledger.divides(inner(optimizer))
        return plain(scaler, optimizer, *given, **named)

    def _steps(self, plain: Any, scaler: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
        before, self.stepping = self.stepping, self.stepping or scaler.is_enabled()
        try:
            return plain(scaler, optimizer, *given, **named)
        finally:
            self.stepping = before
            self.arrivals.scaled(scaler, optimizer)

    def _clips(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        params, rest = (given[0], given[1:]) if given else (named.pop("parameters"), ())
        streamed = isinstance(params, Iterator)
        params = [params] if isinstance(params, Tensor) else [*params]
        self.clipped_spent = self.clipped_spent or (streamed and not params)
        held = {id(param) for param in params if param.grad is not None}
        self.clipped_scaled = self.clipped_scaled or (self.scaled and not held <= self._unscaled)
        self.clipped_none = self.clipped_none or not (held or self.backwards)
        if self.backwards and not held:
            self.libraries.clips(params)
        if name == "clip_grad_norm_" and float(rest[0] if rest else named["max_norm"]) < float("inf"):
            self._by_norm |= held
        return self.shares.clips(params, partial(plain, (p for p in params) if streamed else params, *rest, **named))

    def entered(self) -> list[nn.Module]:
        """Modules that were called from outside of any other."""
        return [one for known in self._entered.values() if (one := known()) is not None]

    def _clipped_here(self, thing: Any) -> bool:
        """Whether it is a unit of FSDP1 whose shards were clipped by the norm of what this rank has of them."""
        handle: Any = getattr(thing, "_handle", None) if isinstance(thing, FullyShardedDataParallel) else None
        if handle is None or not handle.uses_sharded_strategy or handle.world_size < 2:
            return False
        return any(id(one) in self._by_norm for one in (handle.flat_param, *(handle.flat_param._params or ())))

    def _backward(self, plain: Any, tensors: Any, *given: Any, **named: Any) -> Any:
        self.backwards += 1
        for room in (self.libraries, self.copies, self.arrivals):
            room.goes_backward()
        self.cleared = self.taken = ""
        given_to = tensors if isinstance(tensors, tuple | list) else (tensors,)
        self.rebuilt = "" if any(map(leads_to_parameter, given_to)) else line_of_program(frames_above(__file__))
        loss = tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors
        self.losses.backward(loss)
        self.forwards.backward(loss)
        node = type(getattr(loss, "grad_fn", None)).__name__
        if not _by_a_library() and getattr(loss, "numel", int)() == 1 and node not in DIVIDES:
            self.undivided = True
        return plain(tensors, *given, **named)

    def _takes(self, plain: Any, outputs: Any, inputs: Any = (), *given: Any, **named: Any) -> Any:
        params = inputs if isinstance(inputs, tuple | list) else (inputs,)
        if not torch.compiler.is_compiling() and any(isinstance(one, nn.Parameter) for one in params):
            self.taken = line_of_program(frames_above(__file__))
        return plain(outputs, inputs, *given, **named)

    def _clears(self, plain: Any, owner: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling() and self.backwards:
            groups = (
                [owner.parameters()] if isinstance(owner, nn.Module) else [one["params"] for one in owner.param_groups]
            )
            held = {id(param) for group in groups for param in group if param.grad is not None}
            if held:
                self.cleared, self._emptied = line_of_program(frames_above(__file__)), held
        return plain(owner, *given, **named)

    def _ticks(self, plain: Any, scheduler: Any, *given: Any, **named: Any) -> Any:
        anew = not getattr(scheduler, "_step_count", 0)  # as it is made
        self._ticked[id(scheduler)] = 0 if anew else self._ticked.get(id(scheduler), 0) + bool(self.backwards)
        if anew:
            self._before.pop(id(scheduler), None)
        elif not self.backwards:
            self._before[id(scheduler)].append(lines_of_program(frames_above(__file__)))
        return plain(scheduler, *given, **named)

    def _at_the_top(self, scheduler: Any) -> int:
        """1 where it was ticked once in the loop that is about to step; more often: it was wound forward there."""
        before = self._before.get(id(scheduler), [])
        return int(len(before) == 1 and in_one_loop(before[0], lines_of_program(frames_above(__file__))))

    def _compile(self, plain: Any, model: Any = None, *given: Any, **named: Any) -> Any:
        result = plain(model, *given, **named)
        if isinstance(model, nn.Module) and isinstance(result, nn.Module) and result is not model:
            self._compiled.append((weakref.ref(model), weakref.ref(result)))
        return result

    def _elsewhere(self, model: nn.Module) -> Iterator[str]:
        known = {id(one) for one in model.modules()}
        for module in self.entered():
            if id(module) not in known and elsewhere(sites(module), known):
                yield type(module).__name__

    def _idle(self) -> Iterator[str]:
        inside = {id(module) for root in self.called() for module in root.modules()}
        for model, result in self._compiled:
            if id(model()) in inside and id(result()) not in inside:
                yield type(model()).__name__

    def _unheld(self, alive: list[Any], known: Iterable[int]) -> Iterator[tuple[str, int]]:
        """Yield modules of the program that train, get gradients, were not loaded, and that no optimizer holds."""
        optimizers = (one for one in alive if isinstance(one, torch.optim.Optimizer))
        held = {id(param) for one in optimizers for group in one.param_groups for param in group["params"]}.union(known)
        by_hand = reads_gradients() or any(isinstance(one, nn.Module) and engines(one) for one in alive)
        for module in () if by_hand else self.called():
            params = {id(one) for one in module.parameters() if one.requires_grad and one.grad is not None}
            own = not is_foreign(getattr(sys.modules.get(type(module).__module__), "__file__", None) or "<")
            if own and module.training and params and params.isdisjoint(held) and not self.loads.knows(module):
                yield type(module).__name__, len(params)

    def _reads(self, plain: Any, reading: Any, loader: Any) -> None:
        before = loader.worker_init_fn
        loader.worker_init_fn = workers.Telling(str(Path(self.folder) / f"{id(reading)}"), before)
        reading._prepkit_told = loader.worker_init_fn.folder
        try:
            plain(reading, loader)
        finally:
            loader.worker_init_fn = before


_APPLY = vars(torch.autograd.Function)["apply"].__func__.__code__


def _sent_through(name: str, given: Iterable[Any], frames: list[FrameType]) -> str:
    """The line of the program that sends activations or their gradients by this call; empty: it sends something else.

    Between two ranks, from each to each, in a backward, in a function of autograd, or in the place of an activation.
    """
    tensors = [one for each in given for one in (each if isinstance(each, list | tuple) else [each])]
    tensors = [one for one in tensors if isinstance(one, Tensor) and one.numel() > 1]
    if not tensors:
        return ""
    caller = next(one.f_code.co_filename for one in frames if not one.f_code.co_filename.endswith(COLLECTIVES))
    if name in BETWEEN:
        return line_of_program(frames)
    if caller.startswith(str(Path(torch.__file__).parent)):
        return ""  # as SyncBatchNorm and FSDP do by themselves
    inside = goes_backward() or any(one.f_code is _APPLY for one in frames)
    instead = name == "all_reduce" and any(one.grad_fn is not None for one in tensors)
    return line_of_program(frames) if inside or instead else ""


def _again(optimizer: Any, first: Mapping[int, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the optimizers that the program steps next, and what they share with this one."""
    mine = {id(one) for group in optimizer.param_groups for one in group["params"]} if optimizer is not None else set()
    for other in map(inner, stepped_next(frames_above(__file__)) if mine else ()):
        if isinstance(other, torch.optim.Optimizer) and other is not optimizer:
            params = [one for group in other.param_groups for one in group["params"] if id(one) in mine]
            if shared := tuple(first.get(id(one), "?") for one in params if one.grad is not None):
                yield type(other).__name__, shared


def _unsynced(module: nn.Module) -> bool:
    """Return whether the next backward of a wrapper averages nothing, as inside ``no_sync()``."""
    return not getattr(module, "require_backward_grad_sync", getattr(module, "_sync_gradients", True))


def _by_a_library() -> bool:
    frame = sys._getframe(2)
    for _ in range(8):
        if str(frame.f_globals.get("__name__", "")).startswith(PAST):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _scalers() -> list[type]:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return [torch.amp.GradScaler, ShardedGradScaler]


def goes_backward() -> bool:
    """Return whether this is inside of a backward, as in a hook of a parameter's."""
    return torch._C._current_graph_task_id() != -1
