"""Legal configs drawn at random, trained for real on several processes, against the same steps by hand on one.

A plan that no rule refuses has to run, and to train what plain torch does: ``make drawn`` looks for one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import evolve, frozen
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

import prepkit as pk
from prepkit import config as c
from prepkit import testing
from prepkit.findings import errors
from prepkit.observe import observe, observe_env
from prepkit.proving.live import proven_together
from prepkit.proving.recorder import Recorder
from prepkit.resolve.deepspeed.data import look, said
from prepkit.resolve.mesh import axes, size_of
from prepkit.rules import check
from tests.support.gang import Gang, GangError, gang_of

STEPS = 3
EXACT, ROUNDED = 2e-4, 0.15
"""How far a loss may be from that by hand: in float32, and where anything is rounded to 16 bits."""


class Block(nn.Module):
    """The block of ``tiny_model``."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width, bias=False, dtype=dtype)
        self.mlp = nn.Linear(width, 4 * width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.relu(self.attn(x))
        return x + self.mlp(x).unflatten(-1, (4, -1)).sum(-2)


@frozen(kw_only=True)
class Sizes:
    """What a drawn model is."""

    blocks: int
    width: int
    vocab: int
    tied: bool
    dtype: torch.dtype
    frozen: tuple[str, ...]


class Drawn(nn.Module):
    """``tiny_model`` with values: modules of the same names, so that drawn selections fit."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, dtype = sizes.width, sizes.dtype
        self.embed = nn.Embedding(sizes.vocab, width, dtype=dtype)
        self.layers = nn.ModuleList(Block(width, dtype) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(width, bias=False, dtype=dtype)
        self.head = nn.Linear(width, sizes.vocab, bias=False, dtype=dtype)
        if sizes.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(sizes.vocab), persistent=False)
        for name, param in self.named_parameters():
            param.requires_grad_(name not in sizes.frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@frozen(kw_only=True)
class Case:
    """A legal config, and the model that it is legal for."""

    cfg: c.Config
    sizes: Sizes
    given: bool
    """Whether the optimizer is made before and given, and not asked for in the config."""
    parts: int
    """Number of tensor ranks, which read the same data."""

    def __str__(self) -> str:
        usual = c.Config()
        names = [name for name in c.Config.__annotations__ if getattr(self.cfg, name) != getattr(usual, name)]
        said_ = ", ".join(f"{name}={getattr(self.cfg, name)}" for name in names if name not in ("tensor", "timeout_s"))
        return f"Config({said_}) on {self.sizes}"


# --- drawing ---------------------------------------------------------------------------------------------------------

_FROZEN = ("embed.weight", "layers.0.attn.weight", "layers.1.mlp.weight", "norm.weight")
_SIZES = st.builds(
    Sizes,
    blocks=st.integers(0, 3),
    width=st.sampled_from((4, 5, 6, 8)),
    vocab=st.sampled_from((7, 8, 12)),
    tied=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.float32, torch.bfloat16)),
    frozen=st.sets(st.sampled_from(_FROZEN)).map(lambda names: tuple(sorted(names))),
)


def cases(world: int, number: int, start: int) -> list[Case]:
    """Cases out of so many draws, each once; what cannot run here, or is not to be compared, is left out."""
    found: dict[str, Case] = {}

    @seed(start)
    @settings(
        max_examples=number,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        deadline=None,
    )
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        if (case := _drawn(data, world)) is not None:
            found.setdefault(str(case), case)

    collect()
    return list(found.values())


def _drawn(data: st.DataObject, world: int) -> Case | None:
    sizes = data.draw(_SIZES)
    model = Drawn(sizes)
    given_ = data.draw(st.booleans()) and any(param.requires_grad for param in model.parameters())
    env = evolve(observe_env(), world_size=world, per_node=world)
    facts = observe(model, optimizer=_usual(model) if given_ else None, env=env).facts
    cfg = data.draw(testing.fitting(facts, zero=data.draw(st.sampled_from((False, False, False, True)))))
    cfg = evolve(
        cfg, device=None, backend=None, timeout_s=60.0, overrides=(), accumulation=min(cfg.accumulation or 1, 3)
    )
    if cfg.compile is not None:  # inductor proves nothing more, and takes long
        cfg = evolve(
            cfg, compile=evolve(cfg.compile, backend="aot_eager", mode="default", fullgraph=False, dynamic=None)
        )
    parts = size_of("tensor", axes(cfg, env) or ())
    if parts > 1:
        rows = (c.TPLayer("layers.*.mlp", "colwise", output_layout="replicate"), c.TPLayer("norm", "replicate"))
        cfg = evolve(cfg, tp_plan=c.TPPlan(rows))
    steps = given_ or cfg.optimizer is not None or cfg.intent is c.Intent.INFERENCE
    scheduled = isinstance(cfg.engine, c.DeepSpeed) and look(said(cfg.engine), "scheduler") is not None
    if not steps or scheduled or isinstance(cfg.engine, c.XLA) or errors(check(cfg, facts)):
        return None
    return Case(cfg=cfg, sizes=sizes, given=given_, parts=parts)


# --- training --------------------------------------------------------------------------------------------------------


def _usual(model: nn.Module) -> Optimizer:
    return AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)


def _model(sizes: Sizes) -> Drawn:
    torch.manual_seed(0)
    return Drawn(sizes)


def _batch(reader: int, step: int, micro: int, vocab: int) -> Tensor:
    drawn = torch.Generator().manual_seed(1000 * reader + 10 * step + micro)
    return torch.randint(vocab, (2, 5), generator=drawn)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def trained(rank: int, world: int, case: Case) -> list[float]:
    """The losses of all micro-batches on this rank."""
    return _trained(rank, case)[1]


def proven(rank: int, world: int, case: Case) -> list[str]:
    """What the proof of the first two windows of a case finds."""
    return found_by_proof(_trained(rank, case, prove=2)[0])


def found_by_proof(ready: Any) -> list[str]:
    """All that proofs of a run's windows have told, what they could not compare among it.

    Raises ``AssertionError`` where nothing was asked.
    """
    asked = [one for one in ready.attestation.asked if one.rule.startswith("prove.")]
    assert len(asked) > 30, asked
    return [one.what for each in asked for one in each.found]


def found_in_windows(root: nn.Module, *windows: Callable[[], Any]) -> list[str]:
    """All that proofs of windows trained by hand find, notes of what was not compared among it. Collective."""
    found: list[str] = []
    for window in windows:
        recorder = Recorder(root=root)
        with recorder.on():
            window()
        proof = proven_together(root, recorder.record())
        assert proof.facts.gradients, str(proof)
        assert proof.facts.steps, str(proof)
        found += [one.what for one in proof.findings]
    return found


def _trained(rank: int, case: Case, prove: int = 0) -> tuple[Any, list[float]]:
    cfg = case.cfg
    model = _model(case.sizes)
    if isinstance(cfg.weights, c.InitWeights) or (isinstance(cfg.weights, c.BroadcastWeights) and rank):
        with torch.device("meta"):
            model = Drawn(case.sizes)
        model.positions = torch.arange(case.sizes.vocab)
    ready: Any = pk.apply(pk.build_plan(cfg, model, optimizer=_usual(model) if case.given else None), prove=prove)
    losses: list[float] = []
    for step in range(STEPS):
        for micro in range(cfg.accumulation or 1):
            tokens = _batch(rank // case.parts, step, micro, case.sizes.vocab)
            loss = _loss(ready.model(tokens), tokens)
            losses.append(loss.item())
            if cfg.intent is c.Intent.TRAINING:
                ready.backward(loss)
                ready.step()
    ready.close()
    return ready, losses


def by_hand(case: Case, readers: int) -> list[list[float]]:
    """The losses of each reader's micro-batches where plain torch trains on all of them in one process."""
    cfg = case.cfg
    model = _model(case.sizes)
    trains = cfg.intent is c.Intent.TRAINING
    optimizer = _asked(cfg, model) if trains else None
    losses: list[list[float]] = [[] for _ in range(readers)]
    for step in range(STEPS):
        for micro in range(cfg.accumulation or 1):
            for reader, seen in enumerate(losses):
                tokens = _batch(reader, step, micro, case.sizes.vocab)
                loss = _loss(model(tokens), tokens)
                seen.append(loss.item())
                if trains:
                    (loss / readers / (cfg.accumulation or 1)).backward()  # type: ignore[no-untyped-call]  # torch has no types
        if optimizer is not None:
            _clip(cfg.clip, model)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _asked(cfg: c.Config, model: nn.Module) -> Optimizer:
    held = [param for param in model.parameters() if param.requires_grad]
    match cfg.optimizer:
        case c.AdamW(lr=lr, betas=betas, eps=eps, weight_decay=decay):
            return AdamW(held, lr=lr, betas=betas, eps=eps, weight_decay=decay)
        case c.SGD(lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov):
            return SGD(held, lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov)
        case _:
            return _usual(model)


def _clip(how: c.Clip, model: nn.Module) -> None:
    held = [param for param in model.parameters() if param.grad is not None]
    match how:
        case c.ClipNorm(max_norm=most, norm_type=power):
            nn.utils.clip_grad_norm_(held, most, power)
        case c.ClipValue(max_value=most):
            nn.utils.clip_grad_value_(held, most)
        case _:
            pass


# --- comparing -------------------------------------------------------------------------------------------------------


def judged(gang: Gang, case: Case, nearest: float | None = None) -> str:
    """What is wrong with what the processes did; empty where they trained what plain torch trains.

    ``nearest``: how far a loss may be off, else what the dtypes allow. A model that initialises itself is only run: its
    values are its own.
    """
    try:
        found = gang.run(trained, case, timeout=120)
    except GangError as error:
        return str(error)
    if isinstance(case.cfg.weights, c.InitWeights):
        return ""
    expected = by_hand(case, gang.world // case.parts)
    pairs = [(a, b) for rank, seen in enumerate(found) for a, b in zip(seen, expected[rank // case.parts], strict=True)]
    gap = max(abs(a - b) for a, b in pairs)
    exact = case.cfg.precision is None and case.sizes.dtype == torch.float32
    least = nearest if nearest is not None else EXACT if exact else ROUNDED
    return "" if gap <= least else f"losses {gap:.4f} apart: {found}, by hand {expected}"


def wrong(world: int, number: int, start: int) -> Iterator[tuple[Case, str]]:
    """Every case, with what is wrong; empty where nothing is."""
    with gang_of(world) as gang:
        for case in cases(world, number, start):
            yield case, judged(gang, case)
