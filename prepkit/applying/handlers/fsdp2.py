"""torch ``fully_shard``, one call per unit."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import Module, ModuleDict, ModuleList, Parameter

from prepkit.applying.handlers import problems
from prepkit.interpreter import Handler
from prepkit.objects import names, param_extras
from prepkit.objects.fsdp2_units import unit_facts
from prepkit.objects.target import Target
from prepkit.plan.layout import chunk
from prepkit.steps import ShardUnits, Unit


def shard_ready(step: ShardUnits, target: Target) -> problems.Problems:
    """Everything that ``fully_shard`` refuses must be found here: it has no way back (G-8, torch ``_fsdp_init.py``)."""
    old = ["reduce_unused"] if step.reduce_unused and not hasattr(FSDPModule, _UNUSED) else []
    met = problems.told("units.unused-on-old-torch", old, f"torch {torch.__version__} has no FSDPModule.{_UNUSED}")
    if step.already_sharded:
        return met + _other_units(step, target)
    modules, params = names.named_slots(target.model), names.named_parameters(target.model)
    paths = [unit.path for unit in step.units]
    sharded = (path for path, module in modules.items() if isinstance(module, FSDPModule))
    scalars = (name for name, param in params.items() if param.ndim == 0 and name not in set(step.ignored))
    return (
        *met,
        *problems.absent("module", paths, modules),
        *problems.hollow(path for path in paths if path in modules and _is_container(modules[path])),
        *problems.told("model.already-wrapped", sharded, "sharded already", problems.PLAIN),
        *problems.absent("parameter", step.ignored, params),
        *problems.told("units.scalar", scalars, "a scalar cannot be sharded", "Plan it among the ignored ones."),
        *problems.with_gradient(params, params),
    )


_UNUSED = "set_reduce_scatter_unused_params"


def _other_units(step: ShardUnits, target: Target) -> problems.Problems:
    """Units that the plan takes for granted, and those that it does not know."""
    existing = {unit.path for unit in unit_facts(names.sites(target.model))}
    planned = {unit.path for unit in step.units}
    return (
        *problems.told("plan.model-changed", sorted(planned - existing), "planned as a unit already, which it is not"),
        *problems.told("plan.model-changed", sorted(existing - planned), "a unit already, which was not planned"),
    )


def shard_do(step: ShardUnits, target: Target) -> None:
    """Shards the units in their order. Of a checkpointed module the wrapper becomes the unit: recomputing calls it.

    Raises ``RuntimeError`` that says which units are sharded and which one failed.
    """
    if not step.already_sharded:
        _shard_all(step, target)
    if step.reduce_unused:
        modules = names.named_slots(target.model)
        for unit in step.units:
            getattr(modules[unit.path], _UNUSED)(step.reduce_unused, recurse=False)


def _shard_all(step: ShardUnits, target: Target) -> None:
    if target.mesh is None:
        raise problems.no_mesh("shard over")
    modules, ignored = names.named_slots(target.model), _ignored_params(step, target)
    kept = param_extras.every_attribute(target.model)
    done: list[str] = []
    with lean_chunks():
        for unit in step.units:
            try:
                _shard(step, unit, modules[unit.path], target, ignored)
            except Exception as error:
                name = problems.listed([unit.path])
                progress = f"sharded before it: {problems.listed(done)}" if done else "it was the first"
                raise problems.step_refused(f"unit {name}", f"could not be sharded ({progress})", error) from error
            done.append(unit.path)
    param_extras.carry_over(target.model, kept)


def _ignored_params(step: ShardUnits, target: Target) -> set[Parameter]:
    """The ignored parameters, moved to the mesh's device, as ``fully_shard`` moves what it shards (M2-6)."""
    if not step.ignored:
        return set()
    modules, params = names.named_modules(target.model), names.named_parameters(target.model)
    device = target.mesh.device_type if target.mesh is not None else "cpu"
    for name in step.ignored:
        param = params[name]
        if param.device.type in (device, "meta"):
            continue
        if type(param) is Parameter:
            param.data = param.data.to(device)  # alone: its module may be the model
        else:
            modules[name.rpartition(".")[0]].to(torch.device(device))  # a packed weight takes what unpacks it along
    params = names.named_parameters(target.model)
    return {params[name] for name in step.ignored}


def _shard(step: ShardUnits, unit: Unit, module: Module, target: Target, ignored: set[Parameter]) -> None:
    precision = MixedPrecisionPolicy(
        param_dtype=_dtype(step.param_dtype),
        reduce_dtype=_dtype(step.reduce_dtype),
        output_dtype=_dtype(unit.output_dtype),
        cast_forward_inputs=step.cast_forward_inputs,
    )
    if unit.full_precision:  # its inputs stay: kernels take float32 statistics with bfloat16 activations (pain 40)
        precision = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    more: dict[str, Any] = {"ignored_params": ignored} if ignored else {}  # torch 2.6 does not know it
    # torch can pin host memory only where it has an accelerator to pin it for.
    pin = step.pin_memory and torch.accelerator.is_available()
    fully_shard(
        module,
        mesh=target.mesh[step.axes] if step.axes and target.mesh is not None else target.mesh,
        reshard_after_forward=unit.reshard_after_forward,
        mp_policy=precision,
        offload_policy=CPUOffloadPolicy(pin_memory=pin) if step.offload else OffloadPolicy(),
        **more,
    )


def _is_container(module: Module) -> bool:
    return isinstance(module, ModuleList | ModuleDict) and type(module).forward is Module.forward


def _dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(torch, name) if name else None
    return dtype


SHARD: Handler[ShardUnits, Target, None] = Handler(ready=shard_ready, do=shard_do)


# --- sharding without a cost that grows with the number of ranks ---
#
# To shard a parameter, torch divides it into one chunk per rank (``_chunk_with_empty``, a list of views), takes this
# rank's chunk and, for its size, the first one from that list, and drops all others. A view costs some microseconds:
# with the 1,137 parameters of Llama 405B at 16,384 ranks that is two minutes on every rank.
#
# ``lean_chunks`` puts ``Chunks`` in the place of that function while units are sharded: an object that looks like the
# list and makes a chunk only when it is asked for it. Nothing else of torch is touched, no memory is held, and on a
# torch whose code was not compared nothing is replaced.

KNOWN = ("2.6", "2.7", "2.11", "2.13", "2.15")
"""Releases of torch whose sharding was compared bit for bit with and without the replacement. On any other, torch's
own code runs: the same shards, later."""

_REPLACED = "_chunk_with_empty"
"""The function of torch's ``_fsdp_param`` that makes the list: tensor, number of chunks, dim."""
_ONE_AT_A_TIME = threading.Lock()
"""Two threads that replace the name would each put back what the other has put there."""


@frozen(eq=False, repr=False)
class Chunks:
    """What ``_chunk_with_empty`` returns, each chunk made when asked for: a view, or an empty tensor past the end.

    Called as that function is, with its arguments in its order. Read by position only, as ``FSDPParam`` does (torch
    ``_fsdp_param.py``): ``chunks[0]`` and ``chunks[rank]``.
    """

    tensor: torch.Tensor
    """The whole parameter."""
    count: int
    """Number of ranks that it is sharded over."""
    dim: int
    """The dimension that is divided."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """Chunk ``index`` of ``count``, as ``torch.chunk`` does: ``ceil(size / count)`` rows each, until none are left.

        Raises ``IndexError`` outside ``0 .. count - 1``.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"chunk {index} of {self.count}")
        size = self.tensor.size(self.dim)
        start, rows = chunk(size, self.count, index)
        if size and not rows:  # of an empty tensor torch.chunk gives views, of any other nothing past its end
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, rows)


def known(version: str) -> bool:
    """True if the replacement was verified on this torch: a release, not a nightly build.

    >>> known("2.13.0+cpu"), known("2.14.0"), known("2.13.0a0+git12")
    (True, False, False)
    """
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return release is not None and release.group(1) in KNOWN


@contextmanager
def lean_chunks(version: str | None = None) -> Iterator[bool]:
    """While it is open, sharding costs no more than there are parameters; True where this torch is known.

    Changes one name in torch's ``_fsdp_param`` and puts it back at the end, whatever happens. Threads take turns.
    ``version`` None: the torch that runs.
    """
    module = _sharding_code() if known(str(torch.__version__) if version is None else version) else None
    if module is None:
        yield False
        return
    with _ONE_AT_A_TIME, _replaced(module):
        yield True


@contextmanager
def _replaced(module: Any) -> Iterator[None]:
    """Meanwhile the function of that module is ``Chunks``."""
    own = getattr(module, _REPLACED)
    try:
        setattr(module, _REPLACED, Chunks)
        yield
    finally:
        setattr(module, _REPLACED, own)


def _sharding_code() -> Any:
    """The module of torch that divides parameters; None where it no longer has the function."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param
    except ImportError:
        return None
    return _fsdp_param if hasattr(_fsdp_param, _REPLACED) else None
