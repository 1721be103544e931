"""The model as it is now: modules and tensors under canonical names, and how they lie, in the plan's words. Reads only.

``planned_layout`` says how a parameter is to lie on a rank, ``actual_layout`` how it does.
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import Module, Parameter

from prepkit.objects import names
from prepkit.objects.local_part import local
from prepkit.objects.target import Target
from prepkit.plan.layout import ParamLayout, local_shape
from prepkit.steps import Axis


@frozen(kw_only=True)
class LiveModel:
    """The target, looked through once."""

    target: Target
    params: dict[str, Tensor]
    """Canonical name to parameter; a tied one stands under each of its names."""
    buffers: dict[str, Tensor]
    """Canonical name to buffer."""
    modules: dict[str, tuple[Module, ...]]
    """Canonical path to what stands there: wrappers first, the user's own module last."""

    units: tuple[str, ...]
    """Paths of the modules that ``fully_shard`` was called on, in module order; of a shared one the first."""

    def at(self, path: str) -> tuple[Module, ...]:
        """Return what stands at a path; nothing where the path leads nowhere."""
        return self.modules.get(path, ())


@frozen(kw_only=True)
class TensorLayout:
    """How one tensor lies on this rank, in the words of a ``ParamLayout``."""

    cls: str
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    """Global shape."""
    local_shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    def against(self, other: TensorLayout) -> tuple[str, ...]:
        """Return what differs, each with the value here and the value there; empty when nothing does."""
        if self == other:
            return ()
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in TensorLayout.__annotations__)
        return tuple(f"{name} planned {here}, found {there}" for name, here, there in pairs if here != there)


def inspect(target: Target) -> LiveModel:
    """The target's model as it is now; linear in modules and parameters. Takes no copies: tensors are the live ones."""
    sites = names.sites(target.model)
    return LiveModel(
        target=target,
        params={_join(s.path, name): t for s in sites for name, t in s.module._parameters.items() if t is not None},
        buffers={_join(s.path, name): t for s in sites for name, t in s.module._buffers.items() if t is not None},
        modules={s.path: s.stack for s in sites},
        units=tuple(s.path for s in sites if s.first and any(isinstance(m, FSDPModule) for m in s.stack)),
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def planned_layout(layout: ParamLayout, axes: tuple[Axis, ...], rank: int) -> TensorLayout:
    """Return how a parameter of this layout lies on ``rank``."""
    return TensorLayout(
        cls=layout.cls,
        placements=tuple(word for word in layout.placements if word != "off-mesh"),  # not on the tensor's own mesh
        shape=layout.shape,
        local_shape=local_shape(layout, axes, rank),
        dtype=layout.dtype,
        requires_grad=layout.requires_grad,
    )


def actual_layout(tensor: Tensor) -> TensorLayout:
    """How a live tensor lies. The class of a DTensor is ``DTensor``, also where torch puts a Parameter around it."""
    return TensorLayout(
        cls=_cls(tensor),
        placements=placements(tensor) or (("partition",) if hasattr(tensor, "ds_tensor") else ()),
        shape=tuple(getattr(tensor, "ds_shape", tensor.shape)),
        local_shape=tuple(local(tensor).shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        requires_grad=tensor.requires_grad,
    )


def placements(tensor: Tensor) -> tuple[str, ...]:
    """Return how a DTensor lies on its own mesh, one word per axis; empty for a plain tensor."""
    return tuple(map(_placement, tensor.placements)) if isinstance(tensor, DTensor) else ()


def _cls(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return "DTensor"
    name = type(tensor).__name__
    return "Parameter" if name == "FakeTensor" and isinstance(tensor, Parameter) else name  # a rehearsal's


def _placement(placement: Placement) -> str:
    if isinstance(placement, _StridedShard):  # orders the rows differently
        return f"strided({placement.dim})"
    if isinstance(placement, Shard):
        return f"shard({placement.dim})"
    return "replicate" if isinstance(placement, Replicate) else str(placement)
