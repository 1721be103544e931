"""A model that runs although its weights are elsewhere: each is fetched when an operator needs it, and let go again.

What backward would keep of a weight is fetched once more, and what else it keeps lies in a file beyond a limit. So a
model of any size is done again within the memory of its largest layer, whatever its forward does with its parameters.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only

from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls

LOOKS: frozenset[Any] = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "grad_fn")),
        *(getattr(torch.Tensor, name).__get__ for name in ("is_leaf", "is_cuda", "is_meta", "ndim", "layout", "grad")),
        *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__hash__")),
        torch.is_floating_point,
        torch.numel,
    }
)
"""Functions that look at a parameter, and not at its values."""
AS_THEY_ARE = frozenset({"to", "type_as", "__set__", "__setitem__"})
"""Functions that take tensors of two dtypes by themselves, and casts, which are the model's own."""

_T: Any = torch.Tensor
DETACHES = frozenset({torch.detach, _T.detach, _T.detach_, _T.data.__get__})
"""Functions that cut a tensor off the graph that has made it."""

PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})
"""Types of arguments in which no tensor is."""

DRAWS = frozenset({"randn", "rand", "randn_like", "rand_like", "normal", "normal_", "uniform_", "exponential_"})
"""Functions that draw."""


def stub(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Stands for a weight: of its shape, in the memory of one element."""
    return torch.zeros((), dtype=dtype).expand(shape)


@define(eq=False)
class Streamed:
    """Inside ``with streamed.on():`` operators find the values of ``params``, which are stubs."""

    params: dict[str, nn.Parameter]
    fetch: Callable[[str], Tensor]
    """A whole weight in the dtype of the replay."""
    limit: int
    """Bytes of weights that are kept, and of what backward keeps, before either goes elsewhere."""
    cuts: dict[str, str] | None = None
    """What would have cut off the gradient of a weight, as no graph is cut then; None: the forward cuts as it does."""
    default: torch.dtype | None = None
    """In which the run has drawn where it said none, while another one is set; None: it is set as it was."""
    arrived: Callable[[str, Tensor], None] = field(init=False)
    """Told each gradient of a weight; one that arrives again adds up."""
    used: set[str] = field(factory=set, init=False)
    """Parameters that an operator has computed with."""
    most: int = field(default=0, init=False)
    """The most bytes that were held at once."""
    ungraded: bool = field(default=False, init=False)
    """Whether the forward has said that it wants no graph, where it is given one all the same."""
    exact: bool = field(init=False)
    """Whether the weights are in float64."""
    _names: dict[int, str] = field(factory=dict, init=False)
    _kept: OrderedDict[str, Tensor] = field(factory=OrderedDict, init=False)
    _storages: dict[int, tuple[Any, str]] = field(factory=dict, init=False)
    _saved: int = field(default=0, init=False)
    _file: Any = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._names = {id(param): name for name, param in self.params.items()}
        self.exact = any(one.dtype.to_real() == torch.float64 for one in self.params.values())

    def on(self, arrived: Callable[[str, Tensor], None]) -> tuple[AbstractContextManager[Any], ...]:
        """The contexts of one forward and its backward."""
        self.arrived, self._saved = arrived, 0
        mode = _Mode(self)

        def goes(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with mode:  # which torch leaves for a backward, where a function of the model's own may run its forward
                return plain(*args, **kwargs)

        engine = around_calls(torch.autograd, "_engine_run_backward", goes)
        return mode, engine, _nothing_again(), saved_tensors_hooks(self._pack, self._unpack)

    def real(self, tensor: Tensor) -> Tensor:
        """The weight that a stub stands for; any other tensor as it is."""
        name = self._names.get(id(tensor))
        if name is None:
            return tensor
        self.used.add(name)
        if self.cuts is not None and self.ungraded:
            self.cuts.setdefault(name, f"no_grad() at {line_of_program(frames_above(__file__))}")
        return cast("Tensor", _Fetched.apply(tensor, self, name))  # type: ignore[no-untyped-call]

    def whole(self, name: str) -> Tensor:
        """One weight, as an alias of what is kept."""
        if name not in self._kept:
            found = self.fetch(name)
            self._kept[name] = found
            made: Any = StorageWeakRef  # which has no types
            self._storages[found.untyped_storage().data_ptr()] = (made(found.untyped_storage()), name)
            held = sum(one.nbytes for one in self._kept.values())
            while held > self.limit and len(self._kept) > 1:
                _, gone = self._kept.popitem(last=False)
                held -= gone.nbytes
            self.most = max(self.most, held + self._saved)
        self._kept.move_to_end(name)
        return self._kept[name].detach()

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        known = self._storages.get(storage.data_ptr())
        if known is not None and not known[0].expired() and tensor.dtype == self.params[known[1]].dtype:
            return _View(known[1], tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        if tensor.layout is not torch.strided or self._saved + tensor.nbytes <= self.limit:
            self._saved += tensor.nbytes if tensor.layout is torch.strided else 0
            self.most = max(self.most, self._saved + sum(one.nbytes for one in self._kept.values()))
            return tensor
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the graph that reads it
        begin = self._file.seek(0, 2)
        self._file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return _Filed(begin, tensor.nbytes, tensor.dtype, tuple(tensor.shape), tensor.device)

    def _unpack(self, packed: Any) -> Tensor:
        match packed:
            case _View():
                return self.whole(packed.name).as_strided(packed.shape, packed.stride, packed.offset)
            case _Filed():
                self._file.seek(packed.begin)
                read = bytearray(self._file.read(packed.nbytes))
                return torch.frombuffer(read, dtype=packed.dtype).view(packed.shape).to(packed.device)
            case _:
                return cast("Tensor", packed)


@contextmanager
def _nothing_again() -> Iterator[None]:
    """Inside, torch's checkpoints keep what they would compute again: what a forward draws, it draws once."""

    def kept(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        del plain, args, kwargs
        yield  # before the forward; it ends behind it, and what that raises goes through

    reentrant = checkpoint.CheckpointFunction
    with around_calls(checkpoint, "_checkpoint_without_reentrant_generator", kept):
        vars(checkpoint)["CheckpointFunction"] = _Kept
        try:
            yield
        finally:
            vars(checkpoint)["CheckpointFunction"] = reentrant


class _Kept:
    """Stands for ``torch.utils.checkpoint.CheckpointFunction``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        """Call the function, and compute nothing again."""
        del preserves
        return function(*args)


@frozen
class _View:
    """What backward keeps of a weight."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@frozen
class _Filed:
    """What backward keeps in a file."""

    begin: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device


class _Mode(TorchFunctionMode):
    def __init__(self, streamed: Streamed) -> None:
        super().__init__()
        self.streamed = streamed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in LOOKS:
            return func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled and self.streamed.cuts is not None:
            self.streamed.ungraded = not args[0]
            return None
        given = _changed((args, kwargs or {}), self.streamed.real)
        if func in DETACHES and self.streamed.cuts is not None:
            line = line_of_program(frames_above(__file__))
            return _Joined.apply(given[0][0], self.streamed.cuts, f"detach() at {line}")  # type: ignore[no-untyped-call]
        if self.streamed.exact and getattr(func, "__name__", "") in DRAWS:
            with default_dtype(self.streamed.default):
                return _drawn(func, *given)
        args, kwargs = _widened(given) if self.streamed.exact and not _writes(func, given[1]) else given
        return func(*args, **kwargs)


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function changes a tensor that it is given, or takes two dtypes by itself."""
    name = getattr(func, "__name__", "")
    special = name.startswith("__")
    return name in AS_THEY_ARE or "out" in kwargs or (name.startswith("__i") if special else name.endswith("_"))


def _drawn(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Random numbers as the run has drawn them: in float64 a generator gives others."""
    if func.__name__.endswith("_"):
        narrow = torch.empty_like(args[0], dtype=torch.float32)
        func(narrow, *args[1:], **kwargs)
        return args[0].copy_(narrow)
    wide = [one for one in (*tree_leaves(args), *kwargs.values()) if _dtype(one) == torch.float64]
    args, kwargs = _changed((args, kwargs), lambda one: one.float() if one.dtype == torch.float64 else one)
    kwargs = {key: torch.float32 if one is torch.float64 else one for key, one in kwargs.items()}
    found = func(*args, **kwargs)
    return found.double() if wide else found


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, torch makes tensors of this dtype where nobody says which; None: as before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _dtype(value: Any) -> Any:
    return value.dtype if isinstance(value, Tensor) else value


def _widened(given: Any) -> Any:
    """Arguments among which float32 stands beside float64, all in float64.

    A model makes some of its tensors itself, such as a mask: in its run they are of its parameters' dtype. Not every
    operator of torch promotes them. Attention on a CPU takes a mask of float32 for one of float64, and is wrong.
    """
    kinds: set[torch.dtype] = set()

    def noted(one: Tensor) -> Tensor:
        kinds.update({one.dtype} if one.dim() else ())
        return one

    _changed(given, noted)
    if not {torch.float32, torch.float64} <= kinds:
        return given
    return _changed(given, lambda one: one.double() if one.dtype == torch.float32 else one)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """As torch's ``tree_map_only``, which takes many times as long over what functions are mostly given."""
    kind = type(value)
    if isinstance(value, Tensor):
        return change(value)
    if kind is tuple or kind is list:
        return kind([_changed(one, change) for one in value])
    if kind is dict:
        return {key: _changed(one, change) for key, one in value.items()}
    return value if kind in PLAIN else tree_map_only(Tensor, change, value)


class _Fetched(torch.autograd.Function):
    """From a stub to its weight; backward tells the gradient, and leaves none in the stub."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, streamed: Streamed, name: str) -> Tensor:
        del held
        ctx.streamed, ctx.name = streamed, name
        return streamed.whole(name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        with torch._C.DisableTorchFunction():  # what is done with it is none of the model's functions
            ctx.streamed.arrived(ctx.name, grads[0])
        return None, None, None


class _Joined(torch.autograd.Function):
    """Stands for a detach that is left out; a gradient that comes back tells what it would have been kept from."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, cuts: dict[str, str], cut: str) -> Tensor:
        ctx.cuts, ctx.cut = cuts, cut
        return held.view_as(held)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        nodes, seen = [ctx], set[Any]()
        while nodes:
            node = nodes.pop()
            if type(node).__name__ == "_FetchedBackward":
                ctx.cuts.setdefault(node.name, ctx.cut)
            more = {one for one, _ in node.next_functions if one is not None} - seen
            seen |= more
            nodes += more
        return grads[0], None, None
