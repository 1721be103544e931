"""One recorded call of a model, done again: with what it was given, and with buffers and generators as they stood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prepkit.proving import bare, draws, tree
from prepkit.proving.parts_of import CannotReplay, as_wide
from prepkit.proving.record_file import Record


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the dtype of a replay; what counts or chooses stays as it is."""
    return tensor.to(as_wide(dtype, tensor)) if tensor.is_floating_point() or tensor.is_complex() else tensor


def begin(model: nn.Module, params: Mapping[str, nn.Parameter], record: Record, number: int) -> None:
    """Puts modes, buffers, and what was frozen, to where a call began: others may have changed them since the last."""
    call = record.head.calls[number]
    draws.put_back(model, _below(record, f"draw/{number}/"))
    for name, buffer in list(bare.named_buffers(model)):  # a forward may have put another tensor there
        for key in (f"before/{number}/{name}", f"buffer/{name}"):
            if key in record.tensors:
                buffer.data = record.tensors[key].to(buffer.dtype, copy=True)
                break
    bare.evaluate(model, call.evaluating)
    trained = {one.name for one in record.head.params if one.trained}
    for name, param in params.items():
        param.requires_grad_(name in trained and name not in call.frozen)


def called(
    entered: Callable[..., Any], params: Mapping[str, nn.Parameter], record: Record, number: int
) -> tuple[list[Tensor], bool]:
    """The tensors that it returns, and whether it has drawn from torch's generator."""
    tensors = _below(record, f"input/{number}/")
    torch.set_rng_state(tensors["rng"])
    dtype = next((one.dtype.to_real() for one in params.values()), torch.float32)
    args, kwargs = tree.read(record.head.calls[number].inputs, {key: cast(one, dtype) for key, one in tensors.items()})
    outputs = list(tree.tensors_of(entered(*args, **kwargs)))
    return outputs, not torch.equal(torch.get_rng_state(), tensors["rng"])


def arrived(record: Record, number: int, outputs: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each output at which a gradient had arrived, with that.

    Raises ``CannotReplay`` where it is of another shape.
    """
    for place in record.head.calls[number].outputs:
        grad = record.tensors[f"output/{number}/{place}"]
        if place >= len(outputs) or outputs[place].shape != grad.shape:
            plain = f"of shape {tuple(outputs[place].shape)}" if place < len(outputs) else "none"
            said = f"output {place} of call {number} on rank {record.head.rank} was of shape {tuple(grad.shape)}"
            raise CannotReplay(f"{said}, and plainly the model returns {plain}: a part of the whole, or others")
        yield outputs[place], grad


def _below(record: Record, begin: str) -> dict[str, Tensor]:
    return {key.removeprefix(begin): record.tensors[key] for key in record.tensors if key.startswith(begin)}
