"""A small model with everything that is easily lost, plans for it, and their application, for the tests beside this."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import evolve
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from prepkit.applying.step_kinds import handlers
from prepkit.config import Config, LoadWeights
from prepkit.facts import Env
from prepkit.facts.checkpoint import CheckpointFacts, KeyMapping, WeightConverter
from prepkit.formats.stored_weights import observe_checkpoint
from prepkit.interpreter import Done, interpret
from prepkit.objects.target import Target
from prepkit.observe import observe
from prepkit.plan import Plan
from prepkit.planner import plan

WIDTH, WORDS = 6, 11


class Block(nn.Module):
    """Residual block with a scale that is a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 5)
        self.outer = nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.outer(torch.relu(self.inner(x))) * self.scale
        return x + change


class Tiny(nn.Module):
    """Embedding, three blocks and a head that is tied to the embedding; one buffer of each kind."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("passing", torch.arange(4.0), persistent=False)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits

    def embedded(self, tokens: Tensor) -> Tensor:
        """Another way into the model than its forward."""
        x: Tensor = self.embed(tokens)
        return x


TOKENS = torch.arange(8).reshape(2, 4)


def stepped(model: nn.Module, *, groups: int = 2) -> Optimizer:
    """AdamW over the trainable parameters in two groups, or in one, with the state of one step."""
    held = [param for param in model.parameters() if param.requires_grad]
    two: list[dict[str, Any]] = [{"params": held[:3]}, {"params": held[3:], "lr": 0.5}]
    optimizer = AdamW(two if groups == 2 else held)
    model(TOKENS).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


STORED = LoadWeights("tiny.safetensors")
"""Stands for the file of ``stored``, wherever that lies."""
LACKS = ("layers.0.inner.weight", "layers.0.inner.bias")
"""What is not in that file: its module initialises it."""


IN_PARTS = "layers.1.outer.weight"
"""What is in that file as its first two rows and the rest."""


@cache
def stored() -> tuple[TemporaryDirectory[str], CheckpointFacts]:
    """A float32 file of ``Tiny`` without ``LACKS``, and what is seen of it; it is there as long as the process."""
    folder = TemporaryDirectory(prefix="prepkit-tiny-")
    torch.manual_seed(1)
    values = Tiny().state_dict()
    top, rest = values.pop(IN_PARTS).split((2, WIDTH - 2))
    path = f"{folder.name}/{STORED.path}"
    kept = {name: value for name, value in values.items() if name not in (*LACKS, "head.weight")}
    save_file(kept | {"top": top.clone(), "rest": rest.clone()}, path)
    seen = observe_checkpoint(path)
    places = {key: KeyMapping(name=IN_PARTS, recipe=0, source=index) for index, key in enumerate(("top", "rest"))}
    tensors = tuple(evolve(one, place=places.get(one.key)) for one in seen.tensors)
    recipe = WeightConverter(sources=("top", "rest"), join=0)
    return folder, evolve(seen, path=STORED.path, tensors=tensors, recipes=(recipe,))


def tiny_on_meta() -> Tiny:
    """``Tiny`` without values, but for the buffer that is in no checkpoint."""
    with torch.device("meta"):
        model = Tiny(torch.bfloat16)
    model.passing = torch.arange(4.0).to(torch.bfloat16)
    return model


def planned(
    cfg: Config,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    world: int = 1,
    device: str = "cpu",
    loaders: tuple[Any, ...] = (),
    scheduler: Any = None,
) -> Plan:
    """The plan for this model on so many ranks."""
    env = Env(world_size=world, device=device)
    seen = observe(model, optimizer=optimizer, scheduler=scheduler, loaders=loaders, env=env).facts
    return plan(cfg, evolve(seen, checkpoint=stored()[1]) if cfg.weights == STORED else seen).unwrap()


def applied(plan: Plan, model: nn.Module, optimizer: Optimizer | None = None, **given: Any) -> Target:
    """The target after all steps of the plan."""
    target = Target(model=model, optimizer=optimizer, **given)
    outcome = interpret(tuple(step.step for step in plan.steps), handlers(), target)
    assert isinstance(outcome, Done), str(outcome)
    return target
