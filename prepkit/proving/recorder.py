"""Records one window of a model that trains, whoever has prepared it: hooks that are put on, and taken off again.

Nothing is communicated and nothing is changed: what is copied is what the program holds anyway. While no window is
recorded, nothing hangs anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import isfinite
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from prepkit.auditing.window import around_calls, called_first
from prepkit.facts.proof import ClipProof
from prepkit.objects import names
from prepkit.objects.local_part import local
from prepkit.observe.fingerprints.parts import Part, parts
from prepkit.observe.preparation.tensor_parallel import tensor_parallel
from prepkit.proving import bare, tree
from prepkit.proving.hooks import (
    Around,
    Called,
    Clipping,
    clip_of,
    engine_of,
    evaluating,
    held_parts,
    keep_changed,
    known_accumulation,
    line_of,
    other_buffers,
    parameters,
    shapes,
    trainer_accumulation,
    with_closure,
    with_gradients,
)
from prepkit.proving.loss_graph import Factor, factor_of, given_to, lowest_dtype, operators_of, seed_of
from prepkit.proving.outputs import RETURNED, returned
from prepkit.proving.record_file import Head, Micro, Record
from prepkit.proving.steppers import acting, earlier, holds, is_fresh, places, plain_options, torn
from prepkit.proving.trace import Tracer, sketch
from prepkit.ranks.world import world
from prepkit.training.token_loss import TokenWindow

LARGEST = 4 << 30
"""Bytes that a record may take on a rank."""


class TooLarge(ValueError):
    """A record would take more memory than it may."""


@define(kw_only=True)
class Recorder:
    """What one window leaves on this rank. ``with recorder.on():`` around it; ``done`` once it is complete."""

    root: nn.Module | None = None
    """What the loop calls. None: the first module with trained parameters that is called from outside of any other."""
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
    """Whether a larger record ends the program; else nothing more is recorded, and ``too_large`` says so."""
    too_large: str = field(default="", init=False)
    traces: bool = False
    """Whether outputs of all modules and operators are noted too, for ``proving.bisect``."""
    when_done: Callable[[], None] = lambda: None  # the default of a field
    """Called once the window is complete: everything that trains was stepped, or the next window begins."""
    lingers: bool = False
    """Whether ``when_done`` waits until the next window goes forward, backward or steps."""
    family: list[Recorder] = field(init=False)
    """It, and one for each other model that is called beside this one and trains, where the root was not given."""
    done: bool = field(default=False, init=False)
    _again: bool = field(default=False, init=False)
    """Whether the root was called since its window is complete."""
    _ready: bool = field(default=False, init=False)
    """Whether gradients were cleared since then: the next forward is another window's."""
    _evaluating: tuple[str, ...] = field(default=(), init=False)
    _stepping: bool = field(default=False, init=False)
    _calls: list[Called] = field(factory=list, init=False)
    _micros: list[Micro] = field(factory=list, init=False)
    _tracer: Tracer = field(factory=Tracer, init=False)
    _operators: ExitStack = field(factory=ExitStack, init=False)
    _scale: float = field(default=1.0, init=False)
    _dtype: torch.dtype = field(default=torch.float64, init=False)
    _parts: dict[str, Part] = field(factory=dict, init=False)
    _tensors: dict[str, Tensor] = field(factory=dict, init=False)
    _groups: dict[str, int] = field(factory=dict, init=False)
    _shapes: dict[str, tuple[int, ...]] = field(factory=dict, init=False)
    _optimizers: list[Any] = field(factory=list, init=False)
    _options: tuple[str, ...] = field(default=(), init=False)
    _tokens: float | None = field(default=None, init=False)
    _told: int | None = field(default=None, init=False)
    """The accumulation that a Trainer was told."""
    _numbers: dict[int, int] = field(factory=dict, init=False)
    """Identities of groups to their places among the options."""
    _fresh: bool = field(default=True, init=False)
    _lines: dict[str, None] = field(factory=dict, init=False)
    _limits: dict[str, None] = field(factory=dict, init=False)
    _clips: Clipping = field(init=False)
    around: Around = field(factory=Around, init=False)
    _odd: dict[str, None] = field(factory=dict, init=False)
    """Entries of an optimizer's state that a record cannot hold."""
    _strange: bool = field(default=False, init=False)
    """Whether an optimizer has stepped that holds nothing of any model that was called."""
    _stack: ExitStack = field(factory=ExitStack, init=False)

    def __attrs_post_init__(self) -> None:
        self.family = [self]
        self._clips = Clipping(self.clip, self.value)

    @contextmanager
    def on(self) -> Iterator[Recorder]:
        """Hooks are on inside."""
        with ExitStack() as stack:
            self._stack = stack
            if self.root is None:
                stack.enter_context(called_first(self._root))
            else:
                self._attach(self.root, stack)
            around: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
                (torch.autograd, "backward", self._backward),
                (torch.autograd, "backward", self.around.goes),
                (torch.optim.Optimizer, "zero_grad", self._cleared),
                (nn.Module, "zero_grad", self._cleared),
                (torch.amp.GradScaler, "scale", self._scaled),
                (torch.amp.GradScaler, "step", self._tried),
                *self._clips.places(self._clippable, self._micros),
                (TokenWindow, "weighed", self._weighed),
            )
            for home, name, instead in around:
                stack.enter_context(around_calls(home, name, instead))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            yield self

    def clipped_at(self, norm: Any) -> None:
        """Takes the norm at which a run has clipped, where nothing has shown one."""
        clip = self._clips.clip
        if clip is not None and clip.seen is None and norm is not None:
            self._clips.clip = evolve(clip, seen=float(norm))

    def tell(self, limit: str) -> None:
        """Notes what the proof cannot see."""
        self._limits[limit] = None

    @property
    def stepped(self) -> bool:
        """Whether a window of the root was stepped, be it by an optimizer that holds nothing of it."""
        return bool(self._optimizers or self._strange)

    def record(self) -> Record:
        """Return what was recorded. Raises ``ValueError`` where no optimizer has stepped what the root trains."""
        if self.root is None or not self.stepped:
            raise ValueError("no optimizer has stepped parameters of a model that was called")
        if self._ready:  # and there was no other window
            keep_changed(self._parts, self._tensors, self._keep)
        for call_at, call in enumerate(self._calls):
            self._tensors |= dict(call.held(call_at))
        for other in self.family[1:] if self.family[0] is self else ():
            if not other.stepped:
                self.tell(f"`{type(other.root).__name__}` trains too, and nothing has stepped it: it was not replayed")
        engine = engine_of(self.root)
        scale = float(getattr(engine.optimizer, "cur_scale", 1.0)) if engine is not None else self._scale
        clip, copies = self._clips.seen(len(self._micros)), self._strange and not self._optimizers
        known = self.accumulation or known_accumulation(self._told, engine, self._micros)
        if engine is not None and clip is None and engine.gradient_clipping():
            clip = clip_of(engine)
        head = Head(
            rank=world().rank,
            world=world().size,
            calls=tuple(call.recorded() for call in self._calls),
            micros=tuple(self._micros),
            params=tuple(held_parts(self.root, self._parts, self._shapes, self._groups)),
            evaluating=self._evaluating,
            optimizer=", ".join(dict.fromkeys(type(one).__name__ for one in self._optimizers)),
            groups=self._options,
            fresh=self._fresh,
            odd=tuple(self._odd),
            dtype=str(self._dtype).removeprefix("torch.") if self.computes_in is None else self.computes_in,
            sent="bfloat16" if any(getattr(one, "_comm_hooks", None) for one in self.root.modules()) else "float32",
            scale=scale,
            clip=clip,
            value=self._clips.value,
            accumulation=known,
            divides=self.divides,
            cut=bool(tensor_parallel(names.sites(self.root))),
            device=next((param.device.type for param in self.root.parameters()), "cpu"),
            disturbed=self.around.told(self.root, tuple(self._micros), scale, known, copies=copies),
            lines=tuple(self._lines),
            limits=tuple(self._limits),
            trace=tuple(self._tracer.entries),
        )
        self._tensors |= {f"trace/{at}": values for at, values in enumerate(self._tracer.values)}
        return Record(head, self._tensors)

    # --- forward ----------------------------------------------------------------------------------------------------

    def _root(self, module: nn.Module, *_: Any) -> None:
        """Takes the first module that trains for the root, and gives any other a recorder of its own."""
        if not torch.is_grad_enabled() or not any(param.requires_grad for param in module.parameters()):
            return
        if self.root is None:
            self._attach(module, self._stack)
            return
        mine = {id(param) for param in module.parameters()}
        for one in self.family:
            assert one.root is not None
            if module in set(one.root.modules()) or mine == (held := set(map(id, one.root.parameters()))):
                return
            if not mine.isdisjoint(held):
                one.tell(f"`{type(module).__name__}` trains some of the same weights, and is called beside it")
                one.around.swung = True
                return
        other = Recorder(root=module, when_done=self._ended, lingers=self.lingers, raises=self.raises)
        other.largest, other.family = self.largest, self.family
        self.family.append(other)
        self._stack.enter_context(other.on())

    def _attach(self, root: nn.Module, stack: ExitStack) -> None:
        self.root = bare.standing(root)
        if self.traces:
            stack.enter_context(self._tracer.on(root))
            stack.callback(self._operators.close)
        if (compiled := root._compiled_call_impl) is not None:  # hooks would be compiled with the model

            def call(*args: Any, **kwargs: Any) -> Any:
                self._enters(root, args, kwargs)
                output = compiled(*args, **kwargs)
                self._leaves(root, args, output)
                return output

            root._compiled_call_impl = call
            stack.callback(setattr, root, "_compiled_call_impl", compiled)
            return
        stack.callback(root.register_forward_pre_hook(self._enters, prepend=True, with_kwargs=True).remove)
        stack.callback(root.register_forward_hook(self._leaves).remove)
        if isinstance(root, nn.parallel.DistributedDataParallel):
            stack.callback(root.module.register_forward_pre_hook(self._reads_buffers).remove)

    def _enters(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.stepped and not self.done and torch.is_grad_enabled():
            self._complete()
        if self._ready and torch.is_grad_enabled():
            self._over()
        if self.done or self.root is None or not torch.is_grad_enabled():
            self._again = self._again or (torch.is_grad_enabled() and all(one.done for one in self.family))
            return
        self.around.forward(self.root, first=not self._calls)
        if torch.is_autocast_enabled("cpu"):
            self._dtype = torch.get_autocast_dtype("cpu")
        tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}

        def keep(tensor: Tensor) -> str:
            key = f"{len(tensors)}"
            tensors[key] = local(tensor).detach().cpu().clone()
            return key

        try:
            inputs = json.dumps(tree.written([args, kwargs], keep))
        except tree.NotPlain as error:
            self._limits[f"{error}, which a record does not hold: nothing was replayed"] = None
            inputs = ""
        if self.traces:
            self._tracer.micro = len(self._micros)
            self._operators.close()
            self._operators.enter_context(self._tracer.operators())
        own = "num_items_in_batch" in kwargs
        self._calls.append(Called.of(self.root, inputs, tensors, own_total=own))
        self._reads_buffers()
        held = sum(one.nbytes for call in self._calls for one in (*call.tensors.values(), *call.buffers.values()))
        if held > self.largest:
            self._give_up(
                f"the inputs of {len(self._calls)} calls take {held:,} bytes, and {self.largest:,} may be kept"
            )

    def _reads_buffers(self, *_: Any) -> None:
        """As a forward begins with them, which is once DDP has sent those of rank 0."""
        if self.done or self.root is None or not (self._calls and torch.is_grad_enabled()):
            return
        for path, buffer in bare.named_buffers(self.root) if len(self._calls) == 1 else ():
            self._keep(f"buffer/{path}", local(buffer))
        self._calls[-1].buffers = dict(other_buffers(self.root, self._tensors))

    def _leaves(self, _: nn.Module, __: Any, output: Any) -> None:
        self._operators.close()
        if self.done or not torch.is_grad_enabled() or not self._calls:
            return
        call, found = self._calls[-1], list(tree.tensors_of(output))
        call.ends = tuple(tensor.grad_fn for tensor in found if tensor.grad_fn is not None)
        self._dtype = lowest_dtype(call.ends, self._dtype)
        for place, tensor in enumerate(found):
            if place < RETURNED and tensor.is_floating_point() and tensor.layout is torch.strided:
                call.seen[place] = sketch(local(tensor).detach().reshape(-1))
                call.returned.append(returned(place, tensor))
            if tensor.requires_grad:
                tensor.register_hook(self.around.adding(call.arrived, place))  # type: ignore[no-untyped-call]

    # --- backward ---------------------------------------------------------------------------------------------------

    def _backward(self, plain: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        losses = tensors if isinstance(tensors, tuple | list) else (tensors,)
        if self.done and self._again and not self._stepping:
            self.around.kept = with_gradients(self.root)
            self._over()
        open_calls = [call for call in self._calls if call.micro < 0]
        ends = {id(end) for call in open_calls for end in call.ends}
        handed = given_to(losses, grads := args[0] if args else kwargs.get("grad_tensors"), ends)
        trains = not (self._stepping or self.done) and (losses[0].numel() == 1 or handed)
        if trains and not open_calls and not self.around.again(self.root, losses[0], self._calls):
            self.around.past(self.root, losses[0], set(), first=not self._micros)
        if not (trains and open_calls):  # as in checkpointing too, which goes backward inside a backward
            return plain(tensors, *args, **kwargs)
        factor: Factor = Factor(1.0, total=True) if handed else factor_of(losses[0])
        self.around.backward(self.root, losses[0], ends, first=not self._micros)
        micro, total = len(self._micros), factor.total or any(call.own_total for call in open_calls)
        loss = 0.0 if handed else float(losses[0].detach())
        if not isfinite(loss):
            if self._tokens != 0:  # else a mean over nothing, which counts as nothing
                self.around.unproven = f"the loss of micro-batch {micro} is {loss} on rank {world().rank}"
            loss = 0.0
        self._micros.append(
            Micro(
                loss=loss / factor.value if factor.value else loss,
                factor=1.0 if handed else factor.value * seed_of(losses[0], grads),
                given=handed,
                total=total and self._tokens is None,
                tokens=self._tokens,
                count=factor.count,
                meant=factor.meant,
                line=next(line_of("backward"), ""),
                operators=operators_of(losses[0], ends),
            )
        )
        self._tokens = None
        self._lines |= dict.fromkeys(line_of("backward"))
        for call in open_calls:
            call.micro = micro
        self._tracer.backward = True
        result = plain(tensors, *args, **kwargs)
        self._tracer.backward = False
        if not any(call.arrived for call in open_calls):  # the loss of another model, which this one's outputs fed
            self._micros.pop()
            self.around.past(self.root, losses[0], ends, first=False)
        for call in open_calls:
            call.micro = call.micro if call.arrived else -1  # its own may follow
        return result

    def _cleared(self, plain: Callable[..., Any], which: Any, *args: Any, **kwargs: Any) -> Any:
        """What was not stepped is no part of this window. ``which``: an optimizer, or a module; of all that trains."""
        result = plain(which, *args, **kwargs)
        if self.done and holds(self.root, which):
            self._ready = self.lingers
        elif not (self.done or self.stepped) and holds(self.root, which) and not with_gradients(self.root):
            self.around.cleared(self._micros)
            self._calls = [call for call in self._calls if call.micro < 0]
            for what in (self._micros, self._clips.at, self.around.outside, self.around.beside, self._tracer):
                what.clear()
        return result

    def _scaled(self, plain: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(scaler, *args, **kwargs)
        self._scale = float(scaler.get_scale())
        return result

    def _tried(self, plain: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(scaler, *args, **kwargs)
        if not (self.done or self.stepped):
            self.around.tried()
        return result

    def _weighed(self, plain: Callable[..., Any], window: Any, loss: Tensor, mean_over: Any) -> Any:
        """The run says over how many tokens a loss is a mean."""
        self._tokens = self._tokens if self.done or mean_over is None else float(mean_over)
        return plain(window, loss, mean_over)

    def _clippable(self) -> dict[int, nn.Parameter] | None:
        """What may be clipped here, by identity; None: nothing is listened to."""
        return None if self.done or self.root is None else {id(param): param for param in self.root.parameters()}

    # --- step -------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records what is about to be stepped; what a closure makes first, after the closure."""
        closed = with_closure(args, kwargs or {}, lambda: self._gradients(optimizer))
        if self.done and closed and optimizer in self._optimizers:
            self.family[0].when_done()  # the next window
        if not closed or self.done:
            self._gradients(optimizer if not closed else None)
        return None if self.done else closed

    def _gradients(self, optimizer: Any) -> None:
        if self.done and optimizer in self._optimizers and not self._stepping:
            self.around.twice = not self._again
            self.family[0].when_done()  # what has not stepped by now does not step in this window
        if self.done or self._stepping or self.root is None:
            return
        if not self._micros:
            self._idles(self.root, optimizer)
            return
        if not self._parts:
            self._parts = parts(self.root, masters=True)
            self._shapes = shapes(self.root)
            for name, part in self._parts.items():
                self._keep(f"weight/{name}", part.values)
            self.around.moved = self.around.changed(self.root)
            self._told = trainer_accumulation()
        self.around.unproven = torn(self._parts, optimizer) or self.around.unproven
        if not (held := places(self._parts, optimizer)):
            self._strange = self._strange or not any(holds(one.root, optimizer) for one in self.family)
            self.around.tried()
            return
        self._stepping, state = True, acting(optimizer).state
        self._lines |= dict.fromkeys(line_of("step"))
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            self._fresh = self._fresh and all(map(is_fresh, state.values()))
        for group in optimizer.param_groups:  # DeepSpeed's ZeRO 1 and 2 step one after the other
            if id(group) not in self._numbers:
                self._numbers[id(group)] = len(self._options)
                self._options += (plain_options(optimizer, group),)
        for name, (place, holder, at) in held.items():
            self._groups[name] = self._numbers[id(optimizer.param_groups[place])]
            numel = self._parts[name].values.numel()
            self._keep_state(name, earlier(state.get(holder, {}), local(holder).numel(), slice(at, at + numel)))
            if holder.grad is not None:
                grad = holder.grad.to_dense() if holder.grad.is_sparse else holder.grad
                self._keep(f"grad/{name}", local(grad).reshape(-1)[at : at + numel])

    def _idles(self, root: nn.Module, optimizer: Any) -> None:
        """A step over nothing: the second one is all that there is to tell."""
        if not self.stepped and holds(root, optimizer) and self.around.stepped_nothing(root):
            self._lines |= dict.fromkeys(line_of("step"))
            self._optimizers.append(optimizer)
            self._complete()

    def _keep_state(self, name: str, found: Iterator[tuple[str, Tensor | None]]) -> None:
        for key, row in found:
            self._keep(f"{key}/{name}", row) if row is not None else self._odd.setdefault(key)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self._optimizers or not self._stepping:
            return
        self._stepping = False
        for name in places(self._parts, optimizer):
            self._keep(f"after/{name}", self._parts[name].values)
        trained = {name for name, param in parameters(self.root) if param.requires_grad} & self._parts.keys()
        if all(name in self._groups or not self._parts[name].values.numel() for name in trained):
            self._complete()

    def _complete(self) -> None:
        if not self.done and self.root is not None:
            self._evaluating = evaluating(self.root)
            trained = {name for name, param in parameters(self.root) if param.requires_grad} & self._parts.keys()
            for name in sorted(trained - self._groups.keys()):  # which other ranks may step, and send
                self._keep(f"after/{name}", self._parts[name].values)
        self.done = True
        if not self.lingers:
            self._over()

    def _over(self) -> None:
        """Nothing more of this model is to be seen: the window is over, where all are done."""
        keep_changed(self._parts, self._tensors, self._keep)
        self._ready = False
        self._ended() if self.family[0] is self else self.when_done()

    def _ended(self) -> None:
        if all(one.done for one in self.family):
            self.when_done()

    def _keep(self, key: str, tensor: Tensor) -> None:
        if self.too_large:
            return
        values = tensor.detach() if key.startswith("buffer/") else tensor.detach().reshape(-1)
        self._tensors[key] = values.cpu().clone()
        held = sum(one.nbytes for one in self._tensors.values())
        if held > self.largest:
            self._give_up(f"weights and gradients take more than {self.largest:,} bytes on a rank")

    def _give_up(self, why: str) -> None:
        if self.raises:
            raise TooLarge(why)
        self.too_large, self.done = why, True
        self._tensors.clear()
        self._calls.clear()
