"""Ids that a table takes for pads, though the program is about them: their row of zeros never trains."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn

from prepkit.auditing.asking import tensors
from prepkit.facts.inputs import PaddingRead
from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls

FEW = 4
"""Samples, or places, of which nothing is told."""
MOST_ROWS = 1 << 14
"""Samples of a batch that are looked at."""
MOST_NUMBERS = 1 << 20
"""Numbers of an input that are looked at."""
MOST = 16
"""Lookups that are remembered."""
ENDS = ("bos_token_id", "eos_token_id", "sep_token_id", "mask_token_id")
"""What a config of transformers may say that a pad is as well."""


@frozen(kw_only=True, eq=False)
class _Lookup:
    """Where a table gave the row of its pads."""

    line: str
    row: int
    there: Tensor
    """Which samples; of texts which places between others."""
    others: Tensor
    """Places with another id."""
    rows: int
    """Of the table."""

    def as_read(self, said: str) -> PaddingRead:
        return PaddingRead(
            line=self.line, row=self.row, samples=int(self.there.sum()), batch=len(self.there), said=said
        )


@define(eq=False)
class PadsRead:
    """Listens inside ``on()``."""

    told: dict[str, PaddingRead] = field(factory=dict)
    """By line."""
    _tables: dict[int, weakref.ref[Tensor]] = field(factory=dict)
    _samples: list[_Lookup] = field(factory=list)
    """Lookups of one id for each sample, since the last call of a model."""
    _texts: list[_Lookup] = field(factory=list)
    """Those of several, since a loss has counted classes."""

    @property
    def tables(self) -> list[Tensor]:
        """Those that are alive of all in which ids were looked up."""
        return [one for known in self._tables.values() if (one := known()) is not None]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(nn.functional, "embedding", self._looks_up))
            stack.enter_context(around_calls(nn.functional, "cross_entropy", self._counts))
            yield

    def leaves(self, module: nn.Module, inputs: list[Tensor], outputs: Any) -> None:
        """Hears what a model that trains was called with from outside of any other, and what it gave."""
        for one in self._samples if not isinstance(module, nn.Embedding) else ():
            if _says_alike(one, inputs, outputs):
                self.told.setdefault(one.line, one.as_read("the model says the same of all of them"))
        self._samples = []
        for text in list(self._texts):
            masks = [one for one in inputs if one.shape == text.there.shape and _is_mask(one)]
            reads = [found for one in masks if (found := _reads_it(one.cpu(), text)) is not None]
            if reads:
                self._texts.remove(text)
            if reads and all(reads):
                self.told.setdefault(text.line, text.as_read("its mask has them read"))

    def _looks_up(self, plain: Any, *given: Any, **named: Any) -> Any:
        self._looked_up(**dict(zip(("input", "weight", "padding_idx"), given, strict=False)), **named)
        return plain(*given, **named)

    def _looked_up(self, weight: Any, padding_idx: Any = None, **named: Any) -> None:
        ids = named["input"]
        if isinstance(weight, nn.Parameter):
            self._tables[id(weight)] = weakref.ref(weight)
        if padding_idx is None or torch.compiler.is_compiling() or type(ids) is not Tensor or ids.is_meta:
            return
        trains = torch.is_grad_enabled() and getattr(weight, "requires_grad", False)
        inside = torch._C._functorch.maybe_current_level() is not None
        if not trains or inside or ids.dim() not in (1, 2) or not FEW < len(ids) <= MOST_ROWS:
            return
        row = padding_idx if padding_idx >= 0 else len(weight) + padding_idx
        found, there = self._samples if ids.dim() == 1 else self._texts, (ids == row).cpu()
        line = line_of_program(frames_above(__file__))
        one = _Lookup(line=line, row=row, there=there, others=~there, rows=len(weight))
        if ids.dim() == 2:
            one = evolve(one, there=_between(there))
        if line and line not in self.told and _lie_apart(one.there) and not (ids.dim() == 2 and _is_an_end(row)):
            found.append(one)
            del found[:-MOST]

    def _counts(self, plain: Any, *given: Any, **named: Any) -> Any:
        if self._texts and not torch.compiler.is_compiling():
            self._counted(**dict(zip(("input", "target"), given, strict=False)), **named)
        return plain(*given, **named)

    def _counted(self, target: Any, ignore_index: int = -100, **named: Any) -> None:
        classes, waiting = named["input"], self._texts
        self._texts = []
        for one in waiting if type(target) is Tensor and not target.is_floating_point() else ():
            fits = classes.dim() > 1 and classes.shape[1] == one.rows and one.row != ignore_index
            if fits and int((target == one.row).sum()) >= FEW:
                self.told.setdefault(one.line, one.as_read("it is one of the classes that the loss counts"))


def _between(there: Tensor) -> Tensor:
    """Those places that have others before and behind them in their row."""
    before, behind = (~there).cumsum(1) > 0, (~there).flip(1).cumsum(1).flip(1) > 0
    return there & before & behind


def _lie_apart(there: Tensor) -> bool:
    """Return whether there are some in most places of which the next is another: pads stand in runs."""
    there = there.flatten()
    count = int(there.sum())
    runs = int((there[1:] & ~there[:-1]).sum()) + int(there[0])
    return FEW <= count < len(there) and 2 * runs > count


def _is_an_end(row: int) -> bool:
    """Return whether a model of transformers ends texts by its pads, which stand between texts that are packed."""
    owners = (one.f_locals.get("self") for one in frames_above(__file__))
    configs = (one.config for one in owners if isinstance(one, nn.Module) and hasattr(one, "config"))
    return any(getattr(config, name, None) == row for config in configs for name in ENDS)


def _is_mask(one: Tensor) -> bool:
    return 0 < one.numel() <= MOST_NUMBERS and bool(((one == one.max()) | (one == one.min())).all())


def _reads_it(mask: Tensor, text: _Lookup) -> bool | None:
    """Return whether a mask says of these places what it says of all others; None: it says several things of those."""
    others = mask[text.others]
    return None if _differ(others) else int((mask[text.there] == others[0]).sum()) >= FEW


def _says_alike(lookup: _Lookup, inputs: Iterable[Tensor], outputs: Any) -> bool:
    """Whether a model says the same of all samples with such an id, though they differ otherwise."""
    there, count = lookup.there, len(lookup.there)
    given = [one for one in inputs if len(one) == count and one.numel() <= MOST_NUMBERS]
    made = next((one.detach() for one in tensors(outputs) if one.dim() and len(one) == count), None)
    if made is None or made.numel() > MOST_NUMBERS or not any(_differ(one.detach().cpu()[there]) for one in given):
        return False
    made = made.cpu()
    return not _differ(made[there]) and _differ(made[~there])


def _differ(rows: Tensor) -> bool:
    return bool((rows != rows[:1]).any())
