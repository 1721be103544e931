"""Functions with a backward of their own: the slope of their forward, another one that is meant, and a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from tests.audit.loops import Loop
from tests.audit.terms_loops import program


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))


class SwishWithoutAFactor(Swish):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.sigmoid() + x * x.sigmoid())


class Scores(torch.autograd.Function):
    """A product with a matrix of constants, averaged over the samples on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        ctx.save_for_backward(x, by)
        return x @ by

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, by = ctx.saved_tensors
        return grads[0] @ by.T / len(x), None


class Cube(torch.autograd.Function):
    """Forgets what comes from behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2


class Rounds(torch.autograd.Function):
    """A straight-through estimate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Binary(torch.autograd.Function):
    """Signs times the mean size, which has a slope (arXiv 1603.05279), and a gradient as if there were no sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, 1.0, -1.0) * x.abs().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 1)


class Spikes(torch.autograd.Function):
    """A surrogate gradient, as of spiking networks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / (1 + 10 * x.abs()) ** 2


class Steps(torch.autograd.Function):
    """A quantization whose width is learned (arXiv 1902.08153): no slope of it is one of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: Tensor) -> Tensor:
        ctx.save_for_backward(x, width)
        return (x / width).round() * width

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, width = ctx.saved_tensors
        return grads[0], (grads[0] * ((x / width).round() - x / width)).sum()


class Turned(torch.autograd.Function):
    """A gradient that is turned round, and smaller."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.1 * grads[0]


class Corner(torch.autograd.Function):
    """A hinge, given values on its corner too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x > 0)


class Dropped(torch.autograd.Function):
    """Leaves elements out, by what it draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = (torch.rand(x.shape) > 0.3).to(x.dtype) / 0.7
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask


def _through(name: str, made: Callable[[Tensor], Tensor]) -> Callable[[int, int], None]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return fn.mse_loss(made(model(x)), x[:, :6].sin().contiguous())

    return program(f"through_{name}", loss)


def _by(kind: Any) -> Callable[[Tensor], Tensor]:
    """Looks ``apply`` up when it is called, as a script does behind the beginning of its audit."""

    def made(x: Tensor) -> Tensor:
        return kind.apply(x)  # type: ignore[no-any-return]

    return made


WRONG_BACKWARDS: tuple[Loop, ...] = tuple(
    Loop(_through(name, made), rule="run.backward-other")
    for name, made in (
        ("a_swish_without_a_factor", _by(SwishWithoutAFactor)),
        ("scores_of_an_average", lambda x: Scores.apply(x, torch.eye(6) + 0.1)),
        ("a_cube_that_forgets_what_comes", _by(Cube)),
    )
)
RIGHT_BACKWARDS: tuple[Loop, ...] = tuple(
    Loop(_through(name, made))
    for name, made in (
        ("a_swish", _by(Swish)),
        ("what_rounds", _by(Rounds)),
        ("signs_of_a_size", _by(Binary)),
        ("spikes", lambda x: Spikes.apply(x) + 0.1 * x),
        ("steps_whose_width_is_learned", lambda x: Steps.apply(x, torch.tensor(0.1, requires_grad=True))),
        ("what_is_turned", lambda x: x + 0.1 * Turned.apply(x)),
        ("a_corner", lambda x: Corner.apply(x.clamp(min=0))),
        ("what_drops", _by(Dropped)),
    )
)
