"""What has been wrapped around a model is marked; names, classes, shapes and ties stay its author's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from prepkit.facts import ParamFact
from prepkit.observe.prepared.optimizers import inner, options
from tests.objects.test_names import Net
from tests.observe.test_model import facts
from tests.support.transformers_models import build


def marks(model: nn.Module) -> dict[str, tuple[str, ...]]:
    return {module.path: module.marks for module in facts(model).modules if module.marks}


@contextmanager
def fake_group(world: int = 2) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compiled_root(net: Net) -> nn.Module:
    return torch.compile(net)


def compiled_in_place(net: Net) -> nn.Module:
    net.layers[0].compile()
    return net


def compiled_block(net: Net) -> nn.Module:
    net.layers[0] = torch.compile(net.layers[0])
    return net


def checkpointed_block(net: Net) -> nn.Module:
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    return net


def checkpointed_and_compiled_block(net: Net) -> nn.Module:
    net.layers[0] = torch.compile(checkpoint_wrapper(net.layers[0]))
    return net


def offloaded_block(net: Net) -> nn.Module:
    net.layers[0] = offload_wrapper(net.layers[0])
    return net


def attribute(name: str, value: object) -> Callable[[Net], nn.Module]:
    def setting(net: Net) -> nn.Module:
        setattr(net, name, value)
        return net

    return setting


def in_ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def compiled_ddp_of_checkpointed(net: Net) -> nn.Module:
    return torch.compile(DistributedDataParallel(checkpointed_block(net)))


def sharded(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net.layers[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def deepspeed_engine(net: Net) -> nn.Module:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    engine.module = net
    return engine


CARRIED = [
    (compiled_root, {"": ("compiled",)}),
    (compiled_in_place, {"layers.0": ("compiled",)}),
    (compiled_block, {"layers.0": ("compiled",)}),
    (checkpointed_block, {"layers.0": ("checkpointed",)}),
    (checkpointed_and_compiled_block, {"layers.0": ("compiled", "checkpointed")}),
    (offloaded_block, {}),
    (attribute("gradient_checkpointing", value=True), {"": ("checkpointed",)}),
    (attribute("gradient_checkpointing", value=False), {}),
    (attribute("_original_forward", value=print), {"": ("autocast",)}),
    (attribute("_prepkit_autocast", value=True), {"": ("autocast",)}),
    (attribute("_is_accelerate_prepared", value=True), {"": ("prepared",)}),
    (attribute("_prepkit_prepared", value=True), {"": ("prepared",)}),
    (in_ddp, {"": ("ddp",)}),
    (compiled_ddp_of_checkpointed, {"": ("compiled", "ddp"), "layers.0": ("checkpointed",)}),
    (sharded, {"": ("fsdp2",), "layers.0": ("fsdp2",)}),
    (deepspeed_engine, {"": ("deepspeed",)}),
]


@pytest.mark.parametrize(("wrap", "expected"), CARRIED)
def test_what_a_module_carries_is_marked_and_nothing_else_changes(
    wrap: Callable[[Net], nn.Module], expected: dict[str, tuple[str, ...]]
) -> None:
    with fake_group():
        untouched = facts(Net())
        wrapped = wrap(Net())
        assert marks(wrapped) == expected
        found = facts(wrapped)
    assert [module.path for module in found.modules] == [module.path for module in untouched.modules]
    assert found.classes == untouched.classes, "wrappers and the classes that fully_shard makes are not the author's"
    assert [(p.name, p.shape, p.dtype) for p in found.params] == [(p.name, p.shape, p.dtype) for p in untouched.params]
    assert found.ties == untouched.ties


def test_a_sharded_parameter_is_a_dtensor_of_its_whole_shape() -> None:
    with fake_group():
        found = facts(fully_shard(nn.Linear(4, 6, bias=False), mesh=init_device_mesh("cpu", (2,))))
    assert found.params == (
        ParamFact(name="weight", shape=(6, 4), dtype="float32", cls="DTensor", placements=("shard(0)",)),
    )


def test_an_fsdp1_model_is_marked_under_its_own_names() -> None:
    with fake_group():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[0] = FullyShardedDataParallel(net[0], use_orig_params=True, device_id=torch.device("cpu"))
        wrapped = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
        assert marks(wrapped) == {"": ("fsdp1",), "0": ("fsdp1",)}
        assert [module.path for module in facts(wrapped).modules] == ["", "0", "1"]
        assert [param.name for param in facts(wrapped).params] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_reentrant_checkpointing_is_told_from_the_other_kind(reentrant: bool) -> None:
    net = Net()
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    net.layers[0] = checkpoint_wrapper(net.layers[0], impl)
    assert ("reentrant" in marks(net)["layers.0"]) is reentrant


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_transformers_checkpointing_and_its_help_for_frozen_inputs_are_seen(reentrant: bool) -> None:
    pytest.importorskip("transformers")
    model, _ = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert ("reentrant" in marks(model)["model.layers.0"]) is reentrant
    model.disable_input_require_grads()  # transformers 5 enables it together with checkpointing
    assert not facts(model).grad_inputs
    model.enable_input_require_grads()
    assert facts(model).grad_inputs


def test_an_optimizer_of_a_lightning_module_is_the_one_inside() -> None:
    """Both stand on the heap, and each rank may meet another one of them first."""
    optimizers = pytest.importorskip("lightning.pytorch.core.optimizer")
    adam = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    wrapped = optimizers.LightningOptimizer(adam)
    assert type(wrapped) is not type(adam)
    assert inner(wrapped) is adam
    assert options([wrapped]) == options([adam])
