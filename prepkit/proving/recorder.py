"""Records one window of a model that trains, whoever has prepared it: hooks that are put on, and taken off again.

Nothing is communicated and nothing is changed. While no window is recorded, nothing hangs anywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from prepkit.facts.proof import ClipProof
from prepkit.findings.text import some
from prepkit.objects import names
from prepkit.objects.joint_optimizer import JointOptimizer
from prepkit.objects.local_part import local
from prepkit.observe.fingerprints.parts import parts
from prepkit.observe.prepared.instead import around_calls, called_first
from prepkit.observe.prepared.preparation.tensor_parallel import tensor_parallel
from prepkit.proving import bare, called
from prepkit.proving.called import (
    Called,
    by_each,
    ends_of,
    leaves_listened,
    leaves_of,
    micro_of,
    place_in,
)
from prepkit.proving.collectives import listened
from prepkit.proving.hooks import (
    asked_for,
    begin_anew,
    evaluating,
    heard,
    held_parts,
    in_place_of,
    is_aside,
    keep_changed,
    line_of,
    other_buffers,
    shapes,
    transforms,
    with_closure,
    with_gradients,
)
from prepkit.proving.loss_graph import given_gradients, lowest_dtype, seed_of, weights_of
from prepkit.proving.parts_of import faded_said, parameters
from prepkit.proving.record_file import LARGEST, Head, Record, TooLarge
from prepkit.proving.steppers import (
    Clipping,
    Turns,
    Waiting,
    clip_of,
    engine_of,
    holds,
    places,
    steps_nothing,
    torn,
    waiting,
)
from prepkit.proving.trace import Tracer, on_calls
from prepkit.ranks.world import world
from prepkit.training.token_loss import TokenWindow

BACKWARD, GRAD = inspect.signature(torch.autograd.backward), inspect.signature(torch.autograd.grad)


@define(kw_only=True)
class Recorder(Turns):
    """What one window leaves on this rank. ``with recorder.on():`` around it; ``done`` once it is complete."""

    rests: bool = False
    """Whether no module is taken for the root yet."""
    accumulation: int | None = None
    divides: int | None = None
    """As ``Head.divides``."""
    computes_in: str | None = None
    """The lowest floating dtype, as a plan has it; None: as the graph of the outputs shows."""
    clip: ClipProof | None = None
    """As a plan or an engine has it; a clipping that is seen says which norm there was."""
    value: float | None = None
    """To which a plan clips each element."""
    largest: int = LARGEST
    raises: bool = True
    """Whether what cannot be recorded ends the program; else nothing more is, and ``given_up`` says why."""
    given_up: str = field(default="", init=False)
    traces: bool = False
    """Whether outputs of all modules and operators are noted too, for ``proving.bisect``."""
    _trains: set[str] = field(factory=set, init=False)
    """Parameters that were trained when something has stepped, whatever is frozen afterwards."""
    _looked: int = field(default=0, init=False)
    """Calls before the last step over nothing."""
    _evaluating: tuple[str, ...] = field(default=(), init=False)
    _calls: list[Called] = field(factory=list, init=False)
    _tracer: Tracer = field(factory=Tracer, init=False)
    _dtype: torch.dtype = field(default=torch.float64, init=False)
    _shapes: dict[str, tuple[int, ...]] = field(factory=dict, init=False)
    _told: int | None = field(default=None, init=False)
    """The accumulation that a Trainer was told."""
    _lines: dict[str, None] = field(factory=dict, init=False)
    _clips: Clipping = field(init=False)
    transformed: bool = field(default=False, init=False)
    """Whether a module was called inside of a transform of ``torch.func``, whose gradients nothing outside sees."""
    _aside: bool = field(default=False, init=False)
    _computed: bool = field(default=False, init=False)
    """Whether a module was called with weights that were computed from others."""
    _likes: list[Any] = field(factory=list, init=False)
    """How each kind of loss was made, so that those of one kind have the same place."""
    _stack: ExitStack = field(factory=ExitStack, init=False)
    _hooked: ExitStack = field(factory=ExitStack, init=False)
    """What hangs on the root."""

    def __attrs_post_init__(self) -> None:
        self.family = [self]
        self._clips = Clipping(self.clip, self.value)

    @contextmanager
    def on(self) -> Iterator[Recorder]:
        """Hooks are on inside."""
        with ExitStack() as stack:
            self._stack = stack
            stack.callback(self._hooked.close)
            if self.root is None:
                stack.enter_context(called_first(heard(self._root, self.fails)))
            else:
                self._attach(self.root)
            around: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
                *by_each(self, [(torch.autograd, "backward", "_backward"), (torch.autograd, "grad", "_asks")]),
                (torch.optim.Optimizer, "zero_grad", self._cleared),
                (nn.Module, "zero_grad", self._cleared),
                (torch.amp.GradScaler, "scale", self.around.scaled),
                (torch.amp.GradScaler, "step", self._tried),
                *self._clips.places(self._clippable, self._micros),
                (TokenWindow, "weighed", self.around.weighed),
                *listened(lambda: next((one.asked for one in self._calls[-1:] if one.asked.open), None)),
            )
            for home, name, instead in around:
                stack.enter_context(around_calls(home, name, in_place_of(instead, self.fails)))
            stack.callback(register_optimizer_step_pre_hook(heard(self._before_step, self.fails)).remove)
            stack.callback(register_optimizer_step_post_hook(heard(self._after_step, self.fails)).remove)
            yield self

    def clipped_at(self, norm: Any) -> None:
        """Takes the norm at which a run has clipped, where nothing has shown one."""
        self._clips.shows(norm)

    def record(self) -> Record:
        """Return what was recorded. Raises ``ValueError`` where no optimizer has stepped what the root trains."""
        if self.root is None or not self.stepped:
            raise ValueError("no optimizer has stepped parameters of a model that was called")
        if self._ready and not self._next.closed:  # and there was no other window
            keep_changed(self._parts, self._tensors, self._keep)
        self._tensors |= {name: one for at, call in enumerate(self._calls) for name, one in dict(call.held(at)).items()}
        first = self is next(one for one in self.family if one.stepped)
        untold = waiting(self.family, self.family[0].awaited) if first else Waiting()
        others = [one.root for one in self.family if not one.stepped and one.root is not None]
        if own := tuple(self.around.own):
            self.tell(f"the forward itself changes {some(own)}: weights were replayed as they were at the step")
        if elsewhere := self._held.elsewhere(parameters(self.root)):
            self.around.kept = ()  # a part may gather gradients while the other trains, and clear them before its own
            said = "and has not stepped in this window, which is right where parts train in turn"
            self.tell(f"another optimizer holds {some(elsewhere)}, {said}")
        faded = (faded_said(self._next.faded),) if self._next.faded else ()
        alike = bare.in_the_same_place(parameters(self.root), (*self.family[0].still.values(), *others))
        for told in (*untold.noted, *faded, *alike):
            self.tell(told)
        engine, copies = engine_of(self.root), self._strange and not self._held.optimizers
        scale = float(getattr(engine.optimizer, "cur_scale", 1.0)) if engine is not None else self.around.scale
        clip = self._clips.seen(len(self._micros))
        known = self.accumulation or called.known_accumulation(self._told, engine, self._micros)
        clip = clip_of(engine) if engine is not None and clip is None and engine.gradient_clipping() else clip
        head = Head(
            rank=world().rank,
            variables=self.variables,
            world=world().size,
            calls=tuple(call.recorded(self._trains) for call in self._calls),
            micros=tuple(self._micros),
            params=tuple(held_parts(self._trains, self._parts, self._shapes, self._held.groups)),
            evaluating=self._evaluating,
            optimizer=", ".join(dict.fromkeys(type(one).__name__ for one in self._held.optimizers)),
            groups=self._held.options,
            fresh=self._held.fresh,
            odd=tuple(self._held.odd),
            elsewhere=elsewhere,
            dtype=str(self._dtype).removeprefix("torch.") if self.computes_in is None else self.computes_in,
            sent="bfloat16" if bare.sums_low(self.root) else "float32",
            scale=scale,
            clip=clip,
            value=self._clips.value,
            accumulation=known,
            divides=self.divides,
            cut=bool(tensor_parallel(names.sites(self.root))),
            settings=tuple(bare.settings(self.root)),
            device=next((param.device.type for param in self.root.parameters()), "cpu"),
            disturbed=evolve(
                self.around.told(
                    self.root, tuple(self._micros), scale, known, copies=copies, computed=self.family[0]._computed
                ),
                **bare.stands_around(self.root, self.around.wrapper),
                unstepped=untold.unstepped,
                detached=untold.detached,
            ),
            lines=tuple(self._lines),
            limits=tuple(self._limits),
            trace=tuple(self._tracer.entries),
        )
        self._tensors |= {f"trace/{at}": values for at, values in enumerate(self._tracer.values)}
        return Record(head, self._tensors)

    def _root(self, module: nn.Module, *_: Any) -> None:
        """Takes the first module that trains, or what holds it, for the root, and gives any other a recorder."""
        if self.rests or transforms():
            self.transformed = self.transformed or not self.rests
            return
        if not torch.is_grad_enabled() or not any(one.requires_grad for one in module.parameters()):
            self.still[id(module)] = module
            return
        if not all(one.is_leaf for one in module.parameters()):
            self._computed = True
            return
        if self.root is None:
            self._attach(module)
            return
        inside = set(module.modules()) - {module}
        # a layer with a parametrization, which is called when its weight is looked at, comes before the whole
        if parts := [one for one in self.family if one.root in inside and not (one._micros or one.stepped)]:
            for one in parts:
                one._detach(done=one is not parts[0])
            self.family[:] = [one for one in self.family if one.root is not None or one is parts[0]]
            parts[0]._attach(module)
            return
        mine = {id(param) for param in module.parameters()}
        for one in self.family:
            assert one.root is not None
            if module in set(one.root.modules()) or mine == (held := set(map(id, one.root.parameters()))):
                return
            if not mine.isdisjoint(held):
                one._beside(module)
                return
        other = Recorder(root=module, when_done=self._ended, lingers=self.lingers, raises=self.raises)
        other.largest, other.family = self.largest, self.family
        self.family.append(other)
        self._stack.enter_context(other.on())

    def _detach(self, *, done: bool) -> None:
        """Forgets a root of which nothing went backward."""
        self._hooked.close()
        self.root, self.done, self._dtype, self.around.swung = None, done, torch.float64, False
        for what in (self._calls, self._tensors, self._limits, self._tracer):
            what.clear()

    def forgets(self) -> None:
        """Nothing that was heard so far is of the window."""
        for one in self.family:
            one._detach(done=one is not self)
            begin_anew(one, evolve(one, root=None), but=("family", "done", "_stack", "_hooked"))
        del self.family[1:]

    def _attach(self, root: nn.Module) -> None:
        self.root = bare.standing(root)
        if self.traces:
            self._hooked.enter_context(self._tracer.on(root))
            self._hooked.callback(self._tracer.hushes)
        on_calls(root, heard(self.enters, self.fails), heard(self._leaves, self.fails), self._hooked)
        if isinstance(root, nn.parallel.DistributedDataParallel) and root._compiled_call_impl is None:
            self._hooked.callback(root.module.register_forward_pre_hook(heard(self._reads_buffers, self.fails)).remove)

    def enters(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A call of the root begins."""
        self._aside = is_aside(module)
        if self._aside:
            return
        if self.stepped and not self.done and torch.is_grad_enabled():
            self._complete()
        if self._ready and torch.is_grad_enabled():
            self.over()
        if self.done or self.root is None or not torch.is_grad_enabled():
            self._next.called = self._next.called or torch.is_grad_enabled()
            self._again = self._again or (torch.is_grad_enabled() and all(one.done for one in self.family))
            return
        self.around.forward(self.root, first=not self._calls)
        self._dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self._dtype
        if self.traces:
            self._tracer.micro = len(self._micros)
            self._tracer.listens()
        self._calls.append(Called.of(self.root, args, kwargs, self.tell))
        self._reads_buffers()
        if (held := sum(call.nbytes for call in self._calls)) > self.largest:
            self._give_up(
                f"the inputs of {len(self._calls)} calls take {held:,} bytes, and {self.largest:,} may be kept"
            )

    def _reads_buffers(self, *_: Any) -> None:
        """As a forward begins with them, which is once DDP has sent those of rank 0."""
        if self.done or self._aside or self.root is None or not (self._calls and torch.is_grad_enabled()):
            return
        for path, buffer in bare.named_buffers(self.root) if len(self._calls) == 1 else ():
            self._keep(f"buffer/{path}", local(buffer))
        self._calls[-1].buffers = dict(other_buffers(self.root, self._tensors))

    def _leaves(self, _: nn.Module, __: Any, output: Any) -> None:
        self._tracer.hushes()
        if self.done or self._aside or not torch.is_grad_enabled() or not self._calls:
            return
        self.around.went(self.root)
        self._calls[-1].ended(output, lambda *at: heard(self.around.adding(*at), self.fails))
        self._dtype = lowest_dtype(self._calls[-1].ends, self._dtype)

    def _backward(self, plain: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        given = BACKWARD.bind(tensors, *args, **kwargs).arguments
        if (inputs := given.get("inputs")) is not None:
            if not (wanted := asked_for(self.root, inputs)):
                return plain(tensors, *args, **kwargs)
            self.around.trains_some(self.root, wanted)
        if self.done and not self._stepping:
            self._goes_on()
        if self.around.asked and not (self.done or self._stepping):  # that was not what trains
            self.around.asked = ()
            self._micros.clear()
            for call in self._calls:
                call.micro = -1
                call.arrived.clear()
        return self._goes(partial(plain, tensors, *args, **kwargs), tensors, given.get("grad_tensors"))

    def _asks(self, plain: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Gradients of weights that a program puts into their places itself, unless a backward follows."""
        wanted = asked_for(self.root, inputs)
        given = GRAD.bind(outputs, inputs, *args, **kwargs).arguments
        instead = self._micros and not (self.around.asked or self.done)
        if self._stepping or given.get("create_graph") or not wanted or instead:
            return plain(outputs, inputs, *args, **kwargs)
        if self.done and self._again:
            self._next.went = True
            self.over()
        if not self.done:
            self.around.asks(wanted)
        return self._goes(partial(plain, outputs, inputs, *args, **kwargs), outputs, given.get("grad_outputs"))

    def _goes(self, plain: Callable[[], Any], tensors: Any, gradient: Any) -> Any:
        """Backward from one loss, or one for each sample, or from outputs that are given their gradients."""
        several = tensors if isinstance(tensors, tuple | list) else (tensors,)
        tensor, open_calls = several[0], [call for call in self._calls if call.micro < 0]
        asked, still = bool(self.around.asked), self._stepping or self.done or self.around.going
        ends, leaves = ends_of(self._calls), leaves_of(self._calls)
        seed = None if still else seed_of(tensor, gradient)
        trains = not still and (seed is not None or given_gradients(several, gradient, ends))
        if trains and not open_calls and not self.around.again(self.root, tensor, ends, leaves) and not asked:
            self.around.past(self.root, tensor, set(), first=not self._micros)
        listens = leaves_listened(tensor, open_calls or self._calls if trains else (), self.around.adding)
        if not trains or not open_calls:  # as in checkpointing too, which goes backward inside a backward
            with listens:
                return self.around.goes(plain, None if still else self.root, self.largest)
        self.around.backward(self.root, tensor, ends, leaves, first=not (self._micros or asked))
        made = micro_of(tensor, seed, ends, open_calls, self.around.spent())
        if not isfinite(made.loss):
            said = f"the loss of micro-batch {len(self._micros)} is {made.loss} on rank {world().rank}"
            self.around.unproven, made = said, evolve(made, loss=0.0)
        like = (made.line, made.operators, {*weights_of(tensor, ends)})
        for call in open_calls:
            call.micro = len(self._micros)
        self._micros.append(evolve(made, like=place_in(self._likes, like)))
        self._lines |= dict.fromkeys(line_of("backward"))
        self._tracer.backward = True
        with listens:
            result = self.around.goes(plain, self.root, self.largest)
        self._tracer.backward = False
        if not any(call.arrived for call in open_calls):  # the loss of another model, which this one's outputs fed
            self._micros.pop()
            self.around.past(self.root, tensor, ends, first=False)
        for call in open_calls:
            call.micro = call.micro if call.arrived else -1  # its own may follow
        return result

    def _cleared(self, plain: Callable[..., Any], which: Any, *args: Any, **kwargs: Any) -> Any:
        """What was not stepped is no part of this window. ``which``: an optimizer, or a module; of all that trains."""
        result = plain(which, *args, **kwargs)
        kept = self.around.asked or self.done or self.stepped  # what was asked for lies elsewhere
        if self.done and holds(self.root, which):
            self._ready = self.lingers and not with_gradients(self.root)
            if self._next.undecided and not self._next.left_of(self.root, self._tensors):
                self.over()
        elif not kept and holds(self.root, which) and not with_gradients(self.root):
            self.around.cleared(self._micros)
            self._calls = [call for call in self._calls if call.micro < 0]
            for what in (self._micros, self._clips.at, self.around.outside, self.around.beside, self._tracer):
                what.clear()
        return result

    def _clippable(self) -> dict[int, nn.Parameter] | None:
        """What may be clipped here, by identity; None: nothing is listened to."""
        return None if self.root is None else {id(param): param for param in self.root.parameters()}

    def _before_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records what is about to be stepped; what a closure makes first, after the closure."""
        closed = with_closure(args, kwargs or {}, heard(partial(self._made, optimizer, [*self.family]), self.fails))
        if self.done and closed and optimizer in self._held.optimizers:
            self._steps_again()
        if not closed:
            self._gradients(optimizer)
        return None if self.done else closed

    def _made(self, optimizer: Any, known: list[Any]) -> None:
        """A closure has made gradients, be it of models that it was the first to call."""
        for one in (self, *(one for one in self.family if self is known[0] and one not in known)):
            one._gradients(optimizer)

    def _gradients(self, optimizer: Any) -> None:
        known = self.done and (optimizer in self._held.optimizers or (not self._ready and holds(self.root, optimizer)))
        if known and not self._stepping:
            self.around.twice = self.around.twice or not self._next.went
            self._steps_again()
        if self.done or self._stepping or self.root is None or isinstance(optimizer, JointOptimizer):
            return  # of that the members step
        if not self._micros:
            self._idles(self.root, optimizer)
            return
        if not self._parts:
            self._parts = parts(self.root, masters=True)
            self._shapes = shapes(self.root)
            self._trains = {name for name, param in parameters(self.root) if param.requires_grad}
            for name, part in self._parts.items():
                self._keep(f"weight/{name}", part.values)
            self.around.steps(self.root)
            self._told = called.trainer_accumulation()
        self.around.unproven = torn(self._parts, optimizer) or self.around.unproven
        if not (held := places(self._parts, optimizer)):
            self._strange = self._strange or not any(holds(one.root, optimizer) for one in self.family)
            self.around.tried()
            return
        self._stepping = True
        self._trains |= {name for name, param in parameters(self.root) if param.requires_grad}
        self._lines |= dict.fromkeys(line_of("step"))
        self._held.take(optimizer, held, self._parts, self._keep)
        for name, made in self.around.written(held, self._tensors):
            self._keep(f"made/{name}", made)

    def _idles(self, root: nn.Module, optimizer: Any) -> None:
        """A step over nothing: the second one is all that there is to tell."""
        if self.stepped or not holds(root, optimizer):
            return
        if self.around.stepped_nothing(root):
            self._lines |= dict.fromkeys(line_of("step"))
            self._held.optimizers.append(optimizer)
            self._complete()
        elif any(call.ends for call in self._calls[self._looked :]) and steps_nothing(optimizer):
            self.around.detached += 1
        self.around.passed = self.around.passed or bool(self.around.beside and with_gradients(root))
        self._looked = len(self._calls)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self._held.optimizers or not self._stepping:
            return
        self._stepping = False
        for name in places(self._parts, optimizer):
            self._keep(f"after/{name}", self._parts[name].values)
        if not any(self._parts[name].values.numel() for name in self._missing()):
            self._complete()

    def _missing(self) -> set[str]:
        return (self._trains & self._parts.keys()) - self._held.groups.keys()

    def _complete(self) -> None:
        if not self.done and self.root is not None:
            self._evaluating = evaluating(self.root)
            for name in sorted(self._missing()):  # which other ranks may step, and send
                self._keep(f"after/{name}", self._parts[name].values)
        self.done = self._clips.closed = True
        if not self.lingers:
            self.family[0]._ended()

    def _keep(self, key: str, tensor: Tensor) -> None:
        if self.given_up:
            return
        values = tensor.detach() if key.startswith("buffer/") else tensor.detach().reshape(-1)
        self._tensors[key] = values.cpu().clone()
        if sum(one.nbytes for one in self._tensors.values()) > self.largest:
            self._give_up(f"weights and gradients take more than {self.largest:,} bytes on a rank")

    def fails(self, error: Exception) -> None:
        """A hook of this one has raised: the run goes on, and nothing more of it is recorded."""
        if isinstance(error, TooLarge) or self.family[0].ending:
            raise error
        self._give_up(f"what the run does could not be recorded ({type(error).__name__}: {error!s:.200})")

    def _give_up(self, why: str) -> None:
        if self.raises:
            raise TooLarge(why)
        self.given_up, self.done = why, True
        self._tensors.clear()
        self._calls.clear()
