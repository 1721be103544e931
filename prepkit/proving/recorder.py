"""Records one window of a model that trains, whoever has prepared it: hooks that are put on, and taken off again.

Nothing is communicated and nothing is changed: what is copied is what the program holds anyway. While no window is
recorded, nothing hangs anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from prepkit.auditing.window import around_calls, called_first
from prepkit.facts.proof import ClipProof
from prepkit.objects import names
from prepkit.objects.fsdp1_flat import flat_shards, holders
from prepkit.objects.local_part import local
from prepkit.observe.fingerprints.parts import Part, parts
from prepkit.proving import bare, tree
from prepkit.proving.hooks import CLIPS, adding, line_of, that_clip
from prepkit.proving.loss_graph import Factor, factor_of, lowest_dtype
from prepkit.proving.record_file import Head, HeldPart, Micro, Record, RecordedCall
from prepkit.proving.trace import Tracer
from prepkit.ranks.world import world
from prepkit.training.token_loss import TokenWindow

LARGEST = 4 << 30
"""Bytes that a record may take on a rank."""


class TooLarge(ValueError):
    """A record would take more memory than it may."""


@define(eq=False)
class _Called:
    """One call of the root, and what came back to it."""

    inputs: str
    tensors: dict[str, Tensor]
    ends: tuple[Any, ...] = ()
    """Nodes of the graph at which its outputs begin."""
    arrived: dict[int, Tensor] = field(factory=dict)
    micro: int = -1
    own_total: bool = False
    """Whether the model was told to divide a sum by a number that the window gives it."""


@define(kw_only=True)
class Recorder:
    """What one window leaves on this rank. ``with recorder.on():`` around it; ``done`` once it is complete."""

    root: nn.Module | None = None
    """What the loop calls. None: the first module with trained parameters that is called from outside of any other."""
    accumulation: int | None = None
    computes_in: str | None = None
    """The lowest floating dtype, as a plan has it; None: as the graph of the outputs shows."""
    clip: ClipProof | None = None
    """As a plan or an engine has it; a clipping that is seen says more."""
    largest: int = LARGEST
    raises: bool = True
    """Whether a larger record ends the program; else nothing more is recorded, and ``too_large`` says so."""
    too_large: str = field(default="", init=False)
    traces: bool = False
    """Whether outputs of all modules and operators are noted too, for ``proving.bisect``."""
    when_done: Callable[[], None] = lambda: None  # the default of a field
    """Called once the window is complete: everything that trains was stepped, or the next window begins."""
    done: bool = field(default=False, init=False)
    _stepping: bool = field(default=False, init=False)
    _calls: list[_Called] = field(factory=list, init=False)
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
    _first: dict[int, int] = field(factory=dict, init=False)
    _fresh: bool = field(default=True, init=False)
    _lines: dict[str, None] = field(factory=dict, init=False)
    _limits: dict[str, None] = field(factory=dict, init=False)
    _stack: ExitStack = field(factory=ExitStack, init=False)

    @contextmanager
    def on(self) -> Iterator[Recorder]:
        """Hooks are on inside."""
        with ExitStack() as stack:
            self._stack = stack
            if self.root is None:
                stack.enter_context(called_first(self._root))
            else:
                self._attach(self.root, stack)
            for home, name, instead in (
                (torch.autograd, "backward", self._backward),
                (torch.optim.Optimizer, "zero_grad", self._cleared),
                (torch.amp.GradScaler, "scale", self._scaled),
                (clip_grad, "_clip_grads_with_norm_", self._clipped),
                *((home, CLIPS, self._clipped) for home in that_clip()),
                (FullyShardedDataParallel, "clip_grad_norm_", self._clipped_fsdp1),
                (TokenWindow, "weighed", self._weighed),
            ):
                stack.enter_context(around_calls(home, name, instead))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            yield self

    def tell(self, limit: str) -> None:
        """Notes what the proof cannot see."""
        self._limits[limit] = None

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has stepped what the root trains."""
        return bool(self._optimizers)

    def record(self) -> Record:
        """What was recorded. Raises ``ValueError`` where no optimizer has stepped what the root trains."""
        if self.root is None or not self._optimizers:
            raise ValueError("no optimizer has stepped parameters of a model that was called")
        for call_at, call in enumerate(self._calls):
            self._tensors |= {f"input/{call_at}/{key}": tensor for key, tensor in call.tensors.items()}
            self._tensors |= {f"output/{call_at}/{place}": grad for place, grad in call.arrived.items()}
        engine = _engine(self.root)
        scale = float(getattr(engine.optimizer, "cur_scale", 1.0)) if engine is not None else self._scale
        clip = self.clip
        if engine is not None and clip is None and engine.gradient_clipping():
            clip = ClipProof(most=float(engine.gradient_clipping()))
        trained = {name for name, param in _parameters(self.root) if param.requires_grad}
        head = Head(
            rank=world().rank,
            world=world().size,
            calls=tuple(
                RecordedCall(
                    inputs=call.inputs,
                    micro=call.micro,
                    outputs=tuple(sorted(call.arrived)),
                    digest=_digest(call.tensors),
                )
                for call in self._calls
            ),
            micros=tuple(self._micros),
            params=tuple(
                HeldPart(
                    name=name,
                    shape=self._shapes[name],
                    start=part.start,
                    dims=part.dims,
                    here=part.values.numel(),
                    trained=name in trained,
                    group=self._groups.get(name),
                )
                for name, part in self._parts.items()
            ),
            evaluating=tuple(path for path, one in names.named_modules(self.root).items() if not one.training),
            optimizer=", ".join(dict.fromkeys(type(one).__name__ for one in self._optimizers)),
            groups=self._options,
            fresh=self._fresh,
            dtype=str(self._dtype).removeprefix("torch.") if self.computes_in is None else self.computes_in,
            sent="bfloat16" if any(getattr(one, "_comm_hooks", None) for one in self.root.modules()) else "float32",
            scale=scale,
            clip=clip,
            accumulation=self.accumulation,
            device=next((param.device.type for param in self.root.parameters()), "cpu"),
            lines=tuple(self._lines),
            limits=tuple(self._limits),
            trace=tuple(self._tracer.entries),
        )
        self._tensors |= {f"trace/{at}": values for at, values in enumerate(self._tracer.values)}
        return Record(head, self._tensors)

    # --- forward ----------------------------------------------------------------------------------------------------

    def _root(self, module: nn.Module) -> None:
        """Takes the first module that trains for the root, and any other that trains for a limit."""
        if module is self.root or self.done or not any(param.requires_grad for param in module.parameters()):
            return
        if self.root is None:
            self._attach(module, self._stack)
        elif module not in set(self.root.modules()):
            self._limits[
                f"`{type(module).__name__}` trains too, and is called beside the model: it was not replayed"
            ] = None

    def _attach(self, root: nn.Module, stack: ExitStack) -> None:
        self.root = root
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

    def _enters(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self._optimizers and not self.done and torch.is_grad_enabled():
            self._complete()
        if self.done or not torch.is_grad_enabled():
            return
        if not self._calls:
            assert self.root is not None
            for path, buffer in bare.named_buffers(self.root):
                self._keep(f"buffer/{path}", local(buffer))
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
        self._calls.append(_Called(inputs, tensors, own_total=own))
        held = sum(one.nbytes for call in self._calls for one in call.tensors.values())
        if held > self.largest:
            self._give_up(
                f"the inputs of {len(self._calls)} calls take {held:,} bytes, and {self.largest:,} may be kept"
            )

    def _leaves(self, _: nn.Module, __: Any, output: Any) -> None:
        self._operators.close()
        if self.done or not torch.is_grad_enabled() or not self._calls:
            return
        call = self._calls[-1]
        found = list(tree.tensors_of(output))
        call.ends = tuple(tensor.grad_fn for tensor in found if tensor.grad_fn is not None)
        self._dtype = lowest_dtype(call.ends, self._dtype)
        for place, tensor in enumerate(found):
            if tensor.requires_grad:
                tensor.register_hook(adding(call.arrived, place))  # type: ignore[no-untyped-call]

    # --- backward ---------------------------------------------------------------------------------------------------

    def _backward(self, plain: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        losses = tensors if isinstance(tensors, tuple | list) else (tensors,)
        open_calls = [call for call in self._calls if call.micro < 0]
        if self._stepping or self.done or not open_calls or losses[0].numel() != 1:
            return plain(tensors, *args, **kwargs)  # as in checkpointing, which goes backward inside a backward
        ends = {id(end) for call in open_calls for end in call.ends}
        factor: Factor = factor_of(losses[0], ends)
        micro = len(self._micros)
        total = factor.total or any(call.own_total for call in open_calls)
        loss = float(losses[0].detach())
        self._micros.append(
            Micro(
                loss=loss / factor.value if factor.value else loss,
                factor=factor.value,
                total=total and self._tokens is None,
                tokens=self._tokens,
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
            for call in open_calls:
                call.micro = -1  # its own may follow
        return result

    def _cleared(self, plain: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """What was not stepped is no part of this window."""
        if not self.done and not self._optimizers and self._holds(optimizer):
            self._calls = [call for call in self._calls if call.micro < 0]
            self._micros.clear()
            self._tracer.forget()
        return plain(optimizer, *args, **kwargs)

    def _holds(self, optimizer: Any) -> bool:
        if self.root is None:
            return False
        mine = {id(param) for param in self.root.parameters()}
        return any(id(param) in mine for group in optimizer.param_groups for param in group["params"])

    def _scaled(self, plain: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(scaler, *args, **kwargs)
        self._scale = float(scaler.get_scale())
        return result

    def _weighed(self, plain: Callable[..., Any], window: Any, loss: Tensor, mean_over: Any) -> Any:
        """The run says over how many tokens a loss is a mean."""
        if not self.done and mean_over is not None:
            self._tokens = float(mean_over)
        return plain(window, loss, mean_over)

    def _clipped(self, plain: Callable[..., Any], params: Any, most: float, norm: Any, *args: Any, **kw: Any) -> Any:
        if not self.done and not isinstance(norm, DTensor):
            self.clip = ClipProof(most=float(most), seen=float(norm))
        elif not self.done:
            self.clip = ClipProof(most=float(most))
        return plain(params, most, norm, *args, **kw)

    def _clipped_fsdp1(self, plain: Callable[..., Any], unit: Any, most: float, *args: Any, **kwargs: Any) -> Any:
        norm = plain(unit, most, *args, **kwargs)
        self.clip = evolve(self.clip, seen=float(norm)) if self.clip else ClipProof(most=float(most), seen=float(norm))
        return norm

    # --- step -------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records what is about to be stepped; what a closure makes first, behind the closure."""
        given = [*args, *(kwargs or {}).values()]
        closures = [one for one in given if callable(one) and not isinstance(one, torch.optim.Optimizer)]
        if not closures or self.done:
            self._gradients(optimizer)
            return None

        def closure() -> Any:
            result = closures[0]()
            self._gradients(optimizer)
            return result

        return tuple(closure if one is closures[0] else one for one in args), {
            key: closure if one is closures[0] else one for key, one in (kwargs or {}).items()
        }

    def _gradients(self, optimizer: Any) -> None:
        if self.done or self._stepping or self.root is None or not self._micros:
            return
        if not self._parts:
            self._parts = parts(self.root, masters=True)
            self._shapes = _shapes(self.root)
            for name, part in self._parts.items():
                self._keep(f"weight/{name}", part.values)
        if not (held := self._places(optimizer)):
            return
        self._stepping = True
        self._lines |= dict.fromkeys(line_of("step"))
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            self._fresh = self._fresh and all(map(_is_fresh, optimizer.state.values()))
            self._first[id(optimizer)] = len(self._options)
            self._options += tuple(_plain_options(optimizer, group) for group in optimizer.param_groups)
        for name, (group, holder, at) in held.items():
            self._groups[name] = self._first[id(optimizer)] + group
            if holder.grad is not None:
                numel = self._parts[name].values.numel()
                grad = holder.grad.to_dense() if holder.grad.is_sparse else holder.grad
                self._keep(f"grad/{name}", local(grad).reshape(-1)[at : at + numel])

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self._optimizers or not self._stepping:
            return
        self._stepping = False
        for name in self._places(optimizer):
            self._keep(f"after/{name}", self._parts[name].values)
        trained = {name for name, param in _parameters(self.root) if param.requires_grad} & self._parts.keys()
        if all(name in self._groups or not self._parts[name].values.numel() for name in trained):
            self._complete()

    def _complete(self) -> None:
        self.done = True
        self.when_done()

    def _places(self, optimizer: Any) -> dict[str, tuple[int, Any, int]]:
        """Of each parameter that it holds: the group, the tensor that is stepped, and where in it the part begins."""
        found: dict[str, tuple[int, Any, int]] = {}
        rows = [
            (local(param).data_ptr(), local(param).numel() * local(param).element_size(), group, param)
            for group, options in enumerate(optimizer.param_groups)
            for param in options["params"]
        ]
        for name, part in self._parts.items():
            values = part.values
            for begin, size, group, param in rows:
                if values.numel() and begin <= values.data_ptr() < begin + size:
                    found[name] = (group, param, (values.data_ptr() - begin) // values.element_size())
                    break
        return found

    def _keep(self, key: str, tensor: Tensor) -> None:
        if self.too_large:
            return
        self._tensors[key] = (
            tensor.detach().reshape(-1).cpu().clone() if "buffer/" not in key else tensor.detach().cpu()
        )
        held = sum(one.nbytes for one in self._tensors.values())
        if held > self.largest:
            self._give_up(f"weights and gradients take more than {self.largest:,} bytes on a rank")

    def _give_up(self, why: str) -> None:
        if self.raises:
            raise TooLarge(why)
        self.too_large, self.done = why, True
        self._tensors.clear()
        self._calls.clear()


def _plain_options(optimizer: Any, group: dict[str, Any]) -> str:
    kept: dict[str, Any] = {
        key: [float(one) for one in value] if isinstance(value, tuple | list) else _number(value)
        for key, value in group.items()
        if key not in ("params", "initial_lr", "param_names")
        and (_is_number(value) or (isinstance(value, tuple | list) and all(map(_is_number, value))))
    }
    return json.dumps({"class": type(optimizer).__name__, **kept}, sort_keys=True)


def _is_fresh(state: Any) -> bool:
    """Whether it is as the optimizer has made it: Adagrad has some before its first step."""
    return not state or ("step" in state and float(state["step"]) == 0)


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _engine(root: nn.Module | None) -> Any:
    found = (
        one for one in (root.modules() if root is not None else ()) if "DeepSpeedEngine" in names.known_bases(type(one))
    )
    return next(found, None)


def _parameters(root: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    """Every parameter, or the flat one of FSDP1 that trains in its place."""
    return list(holders(root).items()) if root is not None else []


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of keys, kinds and bytes of everything that a call was given; of a generator nothing."""
    found = hashlib.sha256()
    for key, one in sorted(tensors.items()):
        if key != "rng":
            found.update(repr((key, one.dtype, tuple(one.shape))).encode())
            found.update(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _shapes(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of every parameter as a whole."""
    whole = {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in _parameters(root)}
    return whole | {name: tuple(shard.shape) for name, shard in flat_shards(root).items()}
