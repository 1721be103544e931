"""An exponential moving average of what is trained, shard by shard: no copy of the model, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from attrs import define, field
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from prepkit.court import refused
from prepkit.objects import names
from prepkit.objects.local_part import local
from prepkit.training.drivers import reshard
from prepkit.training.prepared import Prepared


@define
class Ema:
    """Average ``average = decay * average + (1 - decay) * parameter`` after every step (torch ``swa_utils``).

    torch's ``AveragedModel`` copies the model, which ``fully_shard`` forbids. Here each rank averages the parts that it
    holds of the trained parameters, in float32 at least: a step of an average is lost in bfloat16. Parameters and
    averages are sharded alike, so that both can be saved, and put in each other's place. Buffers are the model's own.
    """

    run: Prepared = field(repr=False)
    decay: float = 0.999
    averages: dict[str, Tensor] = field(init=False, repr=False)
    """Canonical name to the average, a DTensor where the parameter is one."""

    def __attrs_post_init__(self) -> None:
        if any(hasattr(param, "ds_tensor") for param in self.run.model.parameters()):
            what = "ZeRO-3 keeps parameters in buffers of its own, of which no average is taken"
            raise refused("ema.zero3", "model", what)
        if not isinstance(self.decay, float | int) or not 0 <= self.decay < 1:
            raise ValueError(f"a decay of {self.decay!r} is no average; write one from 0 to below 1, such as 0.999")
        self.averages = {name: _precise(param.detach()).clone() for name, param in self._trained().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters into the average: after every ``ready.step()`` that returned True."""
        values = {name: local(_precise(param.detach())) for name, param in self._trained().items()}
        pairs = [(local(self.averages[name]), value) for name, value in values.items()]
        held = [pair for pair in pairs if pair[0].numel()]
        if held:
            average = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]  # torch has no types
            average([one for one, _ in held], [other for _, other in held], 1)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute with the averages inside, for evaluation and export; afterwards the model has its own values.

        ``ready.backward``, ``step``, ``save`` and ``resume`` raise ``RunRefused`` inside.
        """
        own = {name: param.detach().clone() for name, param in self._trained().items()}
        with self.run.loop.averages_applied():
            self._put(self.averages)
            try:
                yield
            finally:
                self._put(own)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages themselves, each rank's parts, as ``torch.distributed.checkpoint`` saves and loads them."""
        return dict(self.averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take averages over. Raises ``KeyError`` for a name that is missing."""
        for name, average in self.averages.items():
            local(average).copy_(local(state[name]))

    def _trained(self) -> dict[str, Tensor]:
        """The trained parameters as they are between steps: units that a forward has left gathered are freed first."""
        reshard(self.run.model)
        return {name: param for name, param in names.named_parameters(self.run.model).items() if param.requires_grad}

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, param in self._trained().items():
            local(param.data).copy_(local(values[name]))  # ``data``: what is written here is none of the user's writes


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
