"""Small facts made by hand: what rules, planner and strategies are tried on where there is no model."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from attrs import evolve

from prepkit.facts import (
    BufferFact,
    ClassFact,
    Env,
    Facts,
    GroupFact,
    LoaderFacts,
    Mark,
    ModelFacts,
    ModuleFact,
    OptimizerFacts,
    ParamFact,
    UnitFact,
)
from prepkit.facts.checkpoint import CheckpointFacts, KeyMapping, StoredFile, StoredTensor, WeightConverter
from prepkit.plan.layout import itemsize
from prepkit.resolve.modules import packed_params
from prepkit.resolve.units import scalars

LIBRARIES = (
    *(("deepspeed", "0.19.8"), ("msamp", "0.4.0"), ("torch_xla", "2.9.0")),
    *(("torchao", "0.18.0"), ("transformer_engine", "2.9.0")),
)
"""What is installed where float8 is to be tried, with versions."""


CLASSES = tuple(
    ClassFact(
        name=name,
        module=module,
        has_forward=name != "ModuleList",
        resets=module.startswith("torch.nn.modules.") and name != "ModuleList",
    )
    for name, module in (
        ("Tiny", "tiny"),
        ("Embedding", "torch.nn.modules.sparse"),
        ("ModuleList", "torch.nn.modules.container"),
        ("Block", "tiny"),
        ("Linear", "torch.nn.modules.linear"),
        ("LayerNorm", "torch.nn.modules.normalization"),
    )
)


INDEX = {cls.name: index for index, cls in enumerate(CLASSES)}


def tiny_model(
    *,
    blocks: int = 2,
    width: int = 4,
    vocab: int = 8,
    dtype: str = "float32",
    tied: bool = False,
    frozen: tuple[str, ...] = (),
    extra: tuple[ParamFact, ...] = (),
) -> ModelFacts:
    """A language model: ``embed``, ``layers.0`` … (class ``Block``, with ``attn`` and ``mlp``), ``norm``, ``head``.

    ``tied``: ``head.weight`` is ``embed.weight``. ``frozen``: names of parameters without a gradient.
    ``extra``: more parameters, in modules that exist.
    """
    tree = [("", "Tiny"), ("embed", "Embedding"), ("layers", "ModuleList")]
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab, width)}
    for path in (f"layers.{index}" for index in range(blocks)):
        tree += [(path, "Block"), (f"{path}.attn", "Linear"), (f"{path}.mlp", "Linear")]
        shapes |= {f"{path}.attn.weight": (width, width), f"{path}.mlp.weight": (4 * width, width)}
    tree += [("norm", "LayerNorm"), ("head", "Linear")]
    shapes |= {"norm.weight": (width,)} | ({} if tied else {"head.weight": (vocab, width)})
    params = tuple(
        ParamFact(name=name, shape=shape, dtype=dtype, requires_grad=name not in frozen)
        for name, shape in shapes.items()
    )
    return ModelFacts(
        classes=CLASSES,
        modules=tuple(ModuleFact(path=path, cls=INDEX[cls]) for path, cls in tree),
        params=params + extra,
        buffers=(BufferFact(name="positions", shape=(vocab,), dtype="int64", persistent=False),),
        ties=(("embed.weight", "head.weight"),) if tied else (),
        input_embedding="embed",
        output_embedding="head",
    )


def tiny_optimizer(model: ModelFacts, name: str = "AdamW", module: str = "torch.optim.adamw") -> OptimizerFacts:
    """An optimizer that holds every trainable parameter of the model in one group."""
    slots = tuple(param.name for param in model.params if param.requires_grad)
    return OptimizerFacts(name=name, module=module, groups=(GroupFact(slots=slots, options=(("lr", 1e-3),)),))


def tiny_facts(
    model: ModelFacts | None = None,
    *,
    world: int = 1,
    device: str = "cpu",
    optimizer: bool = True,
    loader: LoaderFacts | None = None,
    variables: tuple[tuple[str, str], ...] = (),
) -> Facts:
    """Facts about ``tiny_model()``, or the model given, with an optimizer that fits it."""
    model = model or tiny_model()
    return Facts(
        model=model,
        optimizer=tiny_optimizer(model) if optimizer else None,
        loaders=(loader,) if loader else (),
        env=Env(world_size=world, device=device, torch="2.13.0", variables=variables),
    )


def tiny_loader(**changes: Any) -> LoaderFacts:
    """A shuffled loader of 64 samples in batches of 4."""
    usual = LoaderFacts(batch_size=4, length=64, sampler="random")
    return evolve(usual, **changes)


def marked(model: ModelFacts, mark: Mark, path: str = "") -> ModelFacts:
    """The model with a mark on one module."""
    modules = (evolve(m, marks=(*m.marks, mark)) if m.path == path else m for m in model.modules)
    return evolve(model, modules=tuple(modules))


def arrived(model: ModelFacts, *, paths: tuple[str, ...] = (), root: UnitFact) -> ModelFacts:
    """The model as ``fully_shard`` leaves it with these units below the root, which get what the root got."""
    inner = evolve(root, reshard_after_forward=True, output_dtype=None)
    units = (*(evolve(inner, path=path) for path in paths), root)
    placements = ("replicate", "shard(0)") if root.copies > 1 else ("shard(0)",)
    replicated = {*packed_params(model), *scalars(model)}
    params = (p if p.name in replicated else evolve(p, cls="DTensor", placements=placements) for p in model.params)
    model = evolve(model, params=tuple(params), units=units)
    for unit in units:
        model = marked(model, "fsdp2", unit.path)
    return model


def tiny_experts() -> ModelFacts:
    """The tiny model whose blocks hold a list of experts."""
    model = tiny_model()
    return evolve(model, modules=(*model.modules, ModuleFact(path="layers.0.experts", cls=INDEX["ModuleList"])))


def with_batchnorm(model: ModelFacts) -> ModelFacts:
    """The model with a batch norm in the place of its layer norm."""
    norm = ClassFact(name="BatchNorm1d", module="torch.nn.modules.batchnorm", mro=("_BatchNorm", "_NormBase"))
    return evolve(model, classes=tuple(norm if cls.name == "LayerNorm" else cls for cls in model.classes))


PATH = "checkpoint"
"""Path of the checkpoint in the facts that are made here."""


def tiny_checkpoint(
    model: ModelFacts, *, drop: tuple[str, ...] = (), files: int = 1, path: str = PATH
) -> CheckpointFacts:
    """A checkpoint with every parameter and persistent buffer of the model but those in ``drop``."""
    buffers = [buffer for buffer in model.buffers if buffer.persistent]
    stored: list[ParamFact | BufferFact] = [*model.params, *buffers]
    tensors: list[StoredTensor] = []
    ends = [100] * files
    for index, tensor in enumerate(stored):
        if tensor.name not in drop:
            file = index % files
            length = prod(tensor.shape) * itemsize(tensor.dtype)
            tensors.append(
                StoredTensor(
                    key=tensor.name, dtype=tensor.dtype, shape=tensor.shape, file=file, start=ends[file], length=length
                )
            )
            ends[file] += length
    return CheckpointFacts(
        path=path,
        folder=PATH,
        files=tuple(
            StoredFile(name=f"model-{index}.safetensors", size=end, header="sha256:0", data=100)
            for index, end in enumerate(ends)
        ),
        tensors=tuple(sorted(tensors, key=lambda tensor: (tensor.file, tensor.start))),
    )


def in_parts(checkpoint: CheckpointFacts) -> CheckpointFacts:
    """The same with its first tensor of two dims in rows to be stacked, the next in two to be joined, or renamed.

    A tensor without rows, and one of a single row, stay as they are, but for their names.
    """
    wide = [tensor for tensor in checkpoint.tensors if len(tensor.shape) == 2][:2]
    tensors: list[StoredTensor] = []
    for tensor in checkpoint.tensors:
        if tensor in wide and tensor.shape[0] > 1:
            tensors.extend(_rows(tensor, wide.index(tensor)))
        elif tensor in wide:
            tensors.append(evolve(tensor, key=f"old.{tensor.key}", place=KeyMapping(name=tensor.key)))
        else:
            tensors.append(tensor)
    recipes = (WeightConverter(sources=("rows.*",), stack=0), WeightConverter(sources=("top", "rest"), join=0))
    return evolve(checkpoint, tensors=tuple(tensors), recipes=recipes)


def _rows(tensor: StoredTensor, recipe: int) -> Iterator[StoredTensor]:
    """The rows of a tensor: each by itself, or the first and the rest of them."""
    rows, row = tensor.shape[0], tensor.length // tensor.shape[0]
    stacked = recipe == 0
    for index, (first, last) in enumerate([(n, n + 1) for n in range(rows)] if stacked else [(0, 1), (1, rows)]):
        place = KeyMapping(
            name=tensor.key, recipe=recipe, source=0 if stacked else index, number=index if stacked else 0
        )
        yield evolve(
            tensor,
            key=f"{tensor.key}.{index}",
            shape=tensor.shape[1:] if stacked else (last - first, *tensor.shape[1:]),
            start=tensor.start + first * row,
            length=(last - first) * row,
            place=place,
        )
