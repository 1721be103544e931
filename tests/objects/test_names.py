"""A module's canonical name is the one its author wrote, whatever has been wrapped around it since."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from prepkit.objects import names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Two blocks, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain(net: Net) -> nn.Module:
    return net


def checkpointed_block(net: Net) -> nn.Module:
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    return net


def compiled_and_checkpointed_block(net: Net) -> nn.Module:
    net.layers[1] = torch.compile(checkpoint_wrapper(net.layers[1]))
    return net


def checkpointed_root(net: Net) -> nn.Module:
    return checkpoint_wrapper(net)


def compiled_root(net: Net) -> nn.Module:
    return torch.compile(checkpointed_block(net))


WRAPPED = [plain, checkpointed_block, compiled_and_checkpointed_block, checkpointed_root, compiled_root]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", ""),
        ("weight", "weight"),
        ("_orig_mod", ""),
        ("_orig_mod.layers.0._orig_mod.up.weight", "layers.0.up.weight"),
        ("_checkpoint_wrapped_module.weight", "weight"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module._checkpoint_wrapped_module.w", "a.w"),
        ("my_orig_mod.w", "my_orig_mod.w"),
    ],
)
def test_wrapper_segments_are_dropped_wherever_they_stand(name: str, expected: str) -> None:
    assert names.canonical(name) == expected


@pytest.mark.parametrize("wrap", WRAPPED)
def test_wrapping_changes_no_canonical_name_no_parameter_and_no_order(wrap: Callable[[Net], nn.Module]) -> None:
    net = Net()
    parameters, every = dict(net.named_parameters()), dict(net.named_parameters(remove_duplicate=False))
    modules = dict(net.named_modules())
    wrapped = wrap(net)
    found = names.named_parameters(wrapped)
    assert list(found) == list(parameters)
    assert all(found[name] is parameters[name] for name in parameters)
    assert list(names.all_parameter_names(wrapped)) == list(every)
    assert list(names.named_modules(wrapped)) == list(modules)
    assert all(names.named_modules(wrapped)[path] is modules[path] for path in modules)


@pytest.mark.parametrize("wrap", WRAPPED)
def test_the_names_are_those_that_torch_gives_made_canonical(wrap: Callable[[Net], nn.Module]) -> None:
    wrapped = wrap(Net())
    assert list(names.named_parameters(wrapped)) == [names.canonical(name) for name, _ in wrapped.named_parameters()]
    assert set(names.named_slots(wrapped)) == {names.canonical(path) for path, _ in wrapped.named_modules()}


def test_a_tied_parameter_is_named_once_and_its_aliases_are_there_on_request() -> None:
    net = Net()
    assert "head.weight" not in names.named_parameters(net)
    assert names.all_parameter_names(net)["head.weight"] is net.embed.weight


def test_a_slot_is_the_outermost_wrapper_and_the_module_is_what_is_inside() -> None:
    net = Net()
    block = net.layers[1]
    compiled_and_checkpointed_block(net)
    assert names.named_slots(net)["layers.1"] is net.layers[1]
    assert names.named_modules(net)["layers.1"] is block
    assert names.named_slots(net)["layers.0"] is names.named_modules(net)["layers.0"]


def test_a_shared_module_has_one_name_and_a_slot_on_every_path() -> None:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.Sequential(shared))
    assert list(names.named_modules(net)) == ["", "0", "1"]
    assert list(names.named_slots(net)) == ["", "0", "1", "1.0"]
    assert list(names.named_parameters(net)) == ["0.weight", "0.bias"]
    assert list(names.all_parameter_names(net)) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]


def test_two_wrappers_around_one_module_are_one_module() -> None:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(checkpoint_wrapper(shared), checkpoint_wrapper(shared))
    assert names.named_modules(net) == {"": net, "0": shared}
    assert names.named_slots(net)["1"] is net[1]


def test_a_model_that_contains_itself_is_refused_with_both_paths() -> None:
    net = Net()
    net.layers[1].up.outer = net.layers
    with pytest.raises(ValueError, match=r"layers\.1\.up\.outer is the same ModuleList as layers, which contains it"):
        names.sites(net)


def test_a_class_of_the_users_own_that_is_called_like_a_wrapper_is_not_looked_through() -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert list(names.named_parameters(DistributedDataParallel())) == ["module.weight", "module.bias"]


def test_modules_that_double_their_places_at_each_level_are_refused_in_a_second() -> None:
    """Sixty levels would have more names than any machine has bytes."""

    def doubled(levels: int) -> nn.Module:
        module: nn.Module = nn.Linear(2, 2)
        for _ in range(levels):
            above = nn.Module()
            above.a = above.b = module
            module = above
        return module

    assert len(names.sites(doubled(10))) == 2**11 - 1
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"more than 100,000 places, a[.a-z]* \(\w+\) among them: .* self.again"):
        names.sites(doubled(60))
    assert time.monotonic() - begun < 60
