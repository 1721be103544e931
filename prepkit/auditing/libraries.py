"""What a program asks of its libraries, and what comes of it."""

from __future__ import annotations

import ast
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import torch
from attrs import define, field
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.auditing.of_trainer import dropped_columns, undivided_loss
from prepkit.auditing.pixels import Pixels, moved_apart
from prepkit.facts.libraries import LibraryFacts
from prepkit.objects import zero3
from prepkit.objects.alive import alive
from prepkit.observe.prepared.around import (
    Line,
    frames_above,
    in_one_loop,
    line_of_program,
    lines_of_program,
    parsed,
    texts_of_program,
)
from prepkit.observe.prepared.instead import around_calls

LOW = (torch.bfloat16, torch.float16)
MOST_CASTS, MOST_INPUTS = 8, 64
"""Layers at a step, and columns of each, of which a cast that is kept is looked at."""
BEGINS = ("zeros_", "ones_", "constant_", "normal_", "uniform_", "trunc_normal_")
"""Functions of ``torch.nn.init`` that say nothing of a tensor without elements."""
MEANT = re.compile(r"requires_grad_\(|\.requires_grad = |is_trainable|freez|frozen")
"""Words of a program that freezes on purpose."""


@define(eq=False)
class LibraryCalls:
    """Listens inside ``on()``."""

    _clipped: list[tuple[str, list[weakref.ref[Any]]]] = field(factory=list)
    """Lines that have clipped what had no gradient, with some of the parameters."""
    _backwards: dict[Line, tuple[int, list[Line]]] = field(factory=dict)
    """Lines that have gone backward through an engine, how often, and where they stand."""
    _casts: bool = False
    """Whether an autocast of low precision was entered."""

    _regions: int = 0
    """Regions of autocast that are over, and whose casts are forgotten."""
    _cast_in: int | None = None
    """In which the last step was made; None: in none that keeps casts."""
    _asked: weakref.WeakSet[nn.Module] = field(factory=weakref.WeakSet)
    """Layers whose kept casts were looked at."""
    _stale: dict[str, None] = field(factory=dict)
    """Lines that step in a region in which a cast from before the last step is kept."""

    _empty: dict[tuple[str, str], None] = field(factory=dict)
    pixels: Pixels = field(factory=Pixels)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(torch.autocast, "__enter__", self._enters))
            stack.enter_context(around_calls(torch, "clear_autocast_cache", self._forgets))
            stack.callback(register_optimizer_step_pre_hook(self._steps).remove)
            stack.enter_context(self.pixels.on())
            for name in BEGINS:
                stack.enter_context(around_calls(nn.init, name, partial(self._begins, name)))
            yield

    def clips(self, params: Iterable[Any]) -> None:
        """Hears of parameters that are clipped after something went backward, none of which has a gradient."""
        trained = [weakref.ref(one) for one in params if one.requires_grad]
        if trained:
            self._clipped.append((line_of_program(frames_above(__file__)), trained[:1]))

    def goes_backward(self) -> None:
        """Hears of a backward, and counts those of DeepSpeed's engines."""
        frames = list(frames_above(__file__))
        engine = next(_engines_of(frames), None)
        if engine is not None and not getattr(engine, "inside_no_sync_ctxt", False):
            lines = lines_of_program(frames)
            if lines:
                self._backwards[lines[0]] = (self._backwards.get(lines[0], (0, []))[0] + 1, lines)

    def facts(self, alive: Iterable[Any] = (), roots: Iterable[nn.Module] = ()) -> LibraryFacts:
        """What was heard so far; ``roots``: modules that were called from outside of any other."""
        alive, roots = [*alive], [*roots]
        modules = [one for one in alive if isinstance(one, nn.Module)]
        engines = _of(modules, "deepspeed.runtime.engine", "DeepSpeedEngine")
        return LibraryFacts(
            clipped_past=self._clipped_past(engines),
            gated=self._gated(),
            uncast=self._uncast(roots),
            dropped=dropped_columns(),
            undivided=undivided_loss(),
            begun_empty=tuple(self._empty),
            raw_pixels=tuple(dict.fromkeys(self.pixels.facts(roots))),
            moved_apart=tuple(moved_apart(alive)),
            frozen_adapters=tuple(dict.fromkeys(_frozen_adapters(roots))),
        )

    def told(self) -> dict[str, Any]:
        """What later steps show, as fields of ``WindowFacts``."""
        return {"libraries": LibraryFacts(stale_casts=tuple(self._stale))}

    def _begins(self, name: str, plain: Any, tensor: Any, *given: Any, **named: Any) -> Any:
        if zero3.is_partitioned(tensor) and not tensor.numel():
            self._empty[name, line_of_program(frames_above(__file__))] = None
        return plain(tensor, *given, **named)

    def _enters(self, plain: Any, context: Any, *given: Any) -> Any:
        if not torch.compiler.is_compiling() and context._enabled and context.fast_dtype in LOW:
            self._casts = True
        return plain(context, *given)

    def _forgets(self, plain: Any) -> None:
        self._regions += 1
        plain()

    def _steps(self, optimizer: Any, *_: Any) -> None:
        """A step of any optimizer begins: in the region of the last one, a cast that is kept may be of before it."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        held = {id(one): one for group in optimizer.param_groups for one in group["params"] if one.grad is not None}
        kind = next((one.device.type for one in held.values()), "cpu")
        keeps = torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled()
        before, self._cast_in = self._cast_in, self._regions if keeps else None
        if keeps and before == self._regions:
            layers = (one for one in alive(nn.Linear) if id(one.weight) in held and one not in self._asked)
            for layer in islice(layers, MOST_CASTS):
                self._asked.add(layer)
                if _is_stale(layer.weight):
                    self._stale[line_of_program(frames_above(__file__))] = None

    def _clipped_past(self, engines: list[Any]) -> str:
        held = {id(param) for engine in engines for param in engine.module.parameters()} if self._clipped else set()
        for line, params in self._clipped:
            if any(id(one()) in held and getattr(one(), "grad", None) is None for one in params):
                return line
        return ""

    def _gated(self) -> tuple[str, int, int]:
        """As in ``LibraryFacts``, as an engine steps, and not of what two loops do, or is counted by hand."""
        frames = list(frames_above(__file__))
        engine = next(_engines_of(frames), None)
        if engine is None or getattr(engine, "_is_gradient_accumulation_boundary", None) is not None:
            return "", 0, 0
        now, counts_to = lines_of_program(frames), int(engine.gradient_accumulation_steps())
        for (code, line), (times, lines) in self._backwards.items():
            if times > counts_to and in_one_loop(lines, now):
                return f"{code.co_filename.rpartition('/')[2]}:{line}", times, counts_to
        return "", 0, 0

    def _uncast(self, roots: Iterable[nn.Module]) -> str:
        state: Any = sys.modules.get("accelerate.state")
        shared = {} if state is None else state.AcceleratorState._shared_state
        asked = str(shared.get("_mixed_precision", ""))
        kind = getattr(shared.get("distributed_type"), "value", "")
        if self._casts or asked not in ("bf16", "fp16") or not (kind == "NO" or kind.startswith("MULTI_")):
            return ""
        trains = (param for root in roots for param in root.parameters() if param.requires_grad)
        return asked if any(param.dtype == torch.float32 for param in trains) and not _turned_off() else ""


def _is_stale(weight: nn.Parameter) -> bool:
    """Return whether autocast computes with another weight than it is: a cast of it that is kept."""
    if type(weight) is not nn.Parameter or weight.dtype != torch.float32 or weight.is_meta or weight.dim() != 2:
        return False
    inputs = min(weight.shape[1], MOST_INPUTS)
    with torch.enable_grad():  # what is cast without a graph here would be kept so
        said = nn.functional.linear(torch.eye(inputs, weight.shape[1], device=weight.device), weight).detach()
    return said.dtype in LOW and not torch.equal(said, weight.detach()[:, :inputs].t().to(said.dtype))


def _turned_off() -> bool:
    """Whether the program says that accelerate's autocast is not to run."""
    return any("AutocastKwargs" in text for text in texts_of_program().values())


def _engines_of(frames: Iterable[FrameType]) -> Iterator[Any]:
    """Yield the engines of DeepSpeed of which methods run."""
    kind: Any = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    for frame in frames if kind is not None else ():
        if isinstance(owner := frame.f_locals.get("self"), kind):
            yield owner


def _of(modules: Iterable[nn.Module], home: str, kind: str) -> list[Any]:
    """Those of a class of a library that the program may have loaded."""
    known = getattr(sys.modules.get(home), kind, None)
    return [one for one in modules if known is not None and isinstance(one, known)]


def _frozen_adapters(roots: Iterable[nn.Module]) -> Iterator[str]:
    """Yield where a model of peft that was loaded to be used stands inside of what trains, or is called before it."""
    kind = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if kind is None:
        return
    for root in roots:
        params = dict(root.named_parameters())
        adapts = any(one.requires_grad for name, one in params.items() if "lora_" in name)
        trains = any(one.requires_grad for one in params.values())
        for path, module in root.named_modules() if not adapts else ():
            inside = bool(path) if trains else not path
            if inside and isinstance(module, kind) and module.training and _is_for_use(module):
                yield ".".join(filter(None, (type(root).__name__, path)))


def _is_for_use(model: Any) -> bool:
    """Whether all of its adapters were loaded without being told to train, and the program freezes nothing itself."""
    configs = list(model.peft_config.values())
    for_use = bool(configs) and all(getattr(one, "inference_mode", False) for one in configs)
    return for_use and not any(MEANT.search(ast.unparse(parsed(file))) for file in texts_of_program())
