"""Files are looked at before anything is changed, and a model gets storage for what is read from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Parameter

from prepkit.live.interpreter import Handler
from prepkit.live.model import names
from prepkit.live.model.target import Target
from prepkit.live.ranks import launcher
from prepkit.live.safetensors_header import header_digest
from prepkit.steps import AllocateTensors, CheckFiles, File


class FileError(RuntimeError):
    """A file is not as planned; names it, and the tensor where there is one."""


# --- files ---------------------------------------------------------------------------------------------------------


def check_ready(step: CheckFiles, target: Target) -> tuple[str, ...]:
    """Always: a rank that refused here would leave the others waiting, so files are looked at when all are there."""
    del step, target
    return ()


def check_do(step: CheckFiles, target: Target) -> None:
    """Looks at every file, then waits for the other ranks. Raises ``FileError``, or what the first to fail has said."""
    bad = [text for file in step.files if (text := _difference(file))]
    if bad:
        raise FileError("; ".join(bad))
    target.together()


def check_undo(step: CheckFiles, target: Target, memo: None) -> None:
    """Nothing was changed."""
    del step, target, memo


def _difference(file: File) -> str:
    """How a file is not the one that was planned with; empty when it is."""
    try:
        size = Path(file.path).stat().st_size
        if size != file.size:
            return f"{file.path} has {size:,} bytes, {file.size:,} when the plan was made; restore it, or plan again"
        with Path(file.path).open("rb") as opened:
            head = opened.read(file.data)
    except OSError as error:
        return f"{file.path} cannot be read: {error.strerror or error}"
    if header_digest(head) != file.header:
        return f"{file.path} has another header than when the plan was made; restore it, or plan again"
    return ""


CHECK: Handler[CheckFiles, Target, None] = Handler(ready=check_ready, do=check_do, undo=check_undo)

# --- storage -------------------------------------------------------------------------------------------------------


def allocate_ready(step: AllocateTensors, target: Target) -> tuple[str, ...]:
    """The devices must be there."""
    del target
    found = launcher.device_problems(step.device.type)
    return found + (launcher.device_problems(step.buffers.type) if step.buffers else ())


@frozen(eq=False)
class Places:
    """Where everything was."""

    devices: dict[str, torch.device]
    buffers: tuple[tuple[dict[str, Tensor | None], str, Tensor], ...]
    """The dictionary that holds each buffer, its key in it, and the buffer."""


def allocate_do(step: AllocateTensors, target: Target) -> Places:
    """Gives every tensor storage on the device and notes in ``target.unfilled`` which have no values yet.

    Buffers that have values keep them, which ``to_empty`` would lose. Returns where things were.
    """
    device = launcher.bind(step.device)
    computes = launcher.bind(step.buffers) if step.buffers else device
    before = Places(
        devices={name: tensor.device for name, tensor in tensors(target).items()},
        buffers=tuple(
            (site.module._buffers, key, buffer)
            for site in names.sites(target.model)
            for key, buffer in site.module._buffers.items()
            if buffer is not None
        ),
    )
    try:
        target.unfilled |= {name for name, where in before.devices.items() if where.type == "meta"}
        _each(target, lambda tensor: _on(tensor, device if isinstance(tensor, Parameter) else computes))
        return before
    except BaseException:
        allocate_undo(step, target, before)
        raise


def allocate_undo(step: AllocateTensors, target: Target, memo: Places) -> None:
    """Puts every tensor back to where it was; what had no values has no storage again."""
    del step
    places = {id(tensor): memo.devices[name] for name, tensor in tensors(target).items()}
    _each(target, lambda tensor: _on(tensor, places[id(tensor)]))
    for slots, key, buffer in memo.buffers:
        slots[key] = buffer
    target.unfilled -= memo.devices.keys()


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta or device.type == "meta":
        return torch.empty_like(tensor, device=device)
    return tensor.to(device)


def _each(target: Target, change: Callable[[Tensor], Tensor]) -> None:
    """``Module._apply``, as ``to`` and ``to_empty`` call it: FSDP2 hooks into it to take over new shards.

    Tensors are swapped in place, so that ties stay tied and an optimizer keeps what it holds.
    """
    changed: dict[int, tuple[Tensor, Tensor]] = {}

    def once(tensor: Tensor) -> Tensor:
        """A buffer that two modules share stays one; a parameter is itself again when it is met a second time."""
        if isinstance(tensor, Parameter):
            return change(tensor)
        return changed.setdefault(id(tensor), (tensor, change(tensor)))[1]

    with _swapping():
        target.model._apply(once)  # type: ignore[no-untyped-call]  # torch has no types here


@contextmanager
def _swapping() -> Iterator[None]:
    """Meanwhile torch exchanges a converted parameter's content, not its ``data``, which cannot leave meta."""
    own = torch.__future__.get_swap_module_params_on_conversion()
    try:
        torch.__future__.set_swap_module_params_on_conversion(True)
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(own)


def tensors(target: Target) -> dict[str, Tensor]:
    """Canonical name to parameter or buffer, each once, under its first name."""
    found: dict[str, Tensor] = dict(names.named_parameters(target.model))
    seen: set[int] = set()
    for site in names.sites(target.model):
        for name, buffer in site.module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{site.path}.{name}" if site.path else name] = buffer
    return found


ALLOCATE: Handler[AllocateTensors, Target, Places] = Handler(ready=allocate_ready, do=allocate_do, undo=allocate_undo)
