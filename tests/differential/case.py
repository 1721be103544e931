"""A case: a config file of accelerate, and a model. Both libraries read the file; neither is told anything else."""

from __future__ import annotations

from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

WIDTH, VOCAB, BLOCKS = 16, 32, 2
LEAST = 2200
"""Elements above which a module is a unit, where units are chosen by size: blocks (2304) are, their layers are not."""


@frozen(kw_only=True)
class Case:
    """One point of the grid; the words are those of accelerate's file."""

    engine: str = "single"
    """``single``, ``ddp``, ``fsdp1``, ``fsdp2``, or ``zero0`` to ``zero3``."""
    precision: str = "no"
    wrap: str = "none"
    """``class``, ``size`` or ``none``: how FSDP finds its units."""
    checkpointing: bool = False
    compiled: str = "no"
    """``no``, ``whole`` or ``regional``."""
    frozen: bool = False
    """Whether the first block is frozen."""
    tied: bool = False
    optimizer: str = "AdamW"
    unclipped: bool = False
    """Whether the section of DeepSpeed says nothing about clipping."""

    def __str__(self) -> str:
        usual = asdict(Case())
        said = {name: value for name, value in asdict(self).items() if name != "engine" and value != usual[name]}
        return " ".join([self.engine, *(name if value is True else str(value) for name, value in said.items())])

    @property
    def world(self) -> int:
        return 1 if self.engine == "single" else 2


def file_of(case: Case) -> dict[str, Any]:
    """What ``accelerate config`` would write for it."""
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": case.precision,
        "num_machines": 1,
        "num_processes": case.world,
        "use_cpu": case.engine in ("single", "ddp"),
    }
    if case.engine == "ddp":
        data["distributed_type"] = "MULTI_CPU"
    if case.precision == "fp8":
        data["fp8_config"] = {"backend": "AO"}
    if case.compiled != "no":
        regional = case.compiled == "regional"
        data["dynamo_config"] = {"dynamo_backend": "EAGER", "dynamo_use_regional_compilation": regional}
    if case.engine.startswith("fsdp"):
        data["distributed_type"] = "FSDP"
        data["fsdp_config"] = _fsdp(case)
    if case.engine.startswith("zero"):
        data["distributed_type"] = "DEEPSPEED"
        clip = {} if case.unclipped else {"gradient_clipping": 0.5}
        data["deepspeed_config"] = {"zero_stage": int(case.engine[-1]), "gradient_accumulation_steps": 1, **clip}
    return data


def _fsdp(case: Case) -> dict[str, Any]:
    policy = {"class": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"}[case.wrap]
    data: dict[str, Any] = {
        "fsdp_version": int(case.engine[-1]),
        "fsdp_auto_wrap_policy": policy,
        "fsdp_activation_checkpointing": case.checkpointing,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_sync_module_states": False,  # torch's FSDP of version 1 sends on accelerators only
    }
    if case.wrap == "class":
        data["fsdp_transformer_layer_cls_to_wrap"] = "Block"
    if case.wrap == "size":
        data["fsdp_min_num_params"] = LEAST
    return data


# --- the model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Linear(WIDTH, 8 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.relu(self.attn(x))
        return x + self.mlp(x).unflatten(-1, (8, -1)).sum(-2)


class Model(nn.Module):
    """A small language model with the two calls by which transformers names its embeddings."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(WIDTH))
        if case.tied:
            self.head.weight = self.embed.weight
        if case.frozen:
            self.layers[0].requires_grad_(requires_grad=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x * self.scale.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def made(case: Case) -> tuple[Model, Optimizer]:
    """The same model on every rank and on both sides, with its optimizer."""
    torch.manual_seed(0)
    model = Model(case)
    params = [param for param in model.parameters() if param.requires_grad]
    return model, AdamW(params, lr=0.05) if case.optimizer == "AdamW" else SGD(params, lr=0.5, momentum=0.9)


def batch(rank: int, step: int) -> Tensor:
    """Tokens ``(2, 4)`` of one rank and step."""
    return torch.randint(VOCAB, (2, 4), generator=torch.Generator().manual_seed(100 * rank + step))
