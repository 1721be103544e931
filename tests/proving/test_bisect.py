"""Two recorded windows part at the module and the operator in which a fault was planted, and nowhere without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from prepkit.cli import main
from prepkit.proving.bisect import between, parting
from prepkit.proving.record_file import Record, read, write
from prepkit.proving.recorder import Recorder
from tests.proving.window import DDP, Block, Net, adam, loop, micros, net


class Turned(torch.autograd.Function):
    """The identity, with a backward that is wrong by a tenth."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0] * 1.1


def _plain() -> Net:
    torch.manual_seed(0)
    return Net()


def _recorded(change: Callable[[Net], None], lr: float = 1e-2, by: float = 1.0, seed: int = 0) -> Record:
    model = _plain()
    change(model)
    optimizer = adam(model, lr)
    with (recorder := Recorder(root=model, traces=True)).on():
        for x, y in micros(2, rank=seed):
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad *= by
        optimizer.step()
    return recorder.record()


def as_it_is(model: Net) -> None:
    del model


class Rounded(Block):
    """Rounds between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.inner(self.norm(x)))
        return x + self.drop(self.outer(torch.round(inner, decimals=1)))


class Scaled(Block):
    """Multiplies between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(torch.relu(self.inner(self.norm(x))) * 1.001))


class Careless(Block):
    """Its forward is right, and its backward is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(Turned.apply(torch.relu(self.inner(self.norm(x))))))  # type: ignore[no-untyped-call]


def rounds_in_block_1(model: Net) -> None:
    model.blocks[1].__class__ = Rounded


def backward_of_block_1(model: Net) -> None:
    model.blocks[1].__class__ = Careless


def scales_in_block_1(model: Net) -> None:
    model.blocks[1].__class__ = Scaled


def epsilon_of_a_norm(model: Net) -> None:
    model.blocks[0].norm.eps = 1e-2


class Sloped(Block):
    slope = 0.1

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.leaky_relu(self.inner(self.norm(x)), self.slope)
        return x + self.drop(self.outer(inner))


class Steep(Sloped):
    slope = 0.2


class Coarse(nn.Linear):
    """Computes in bfloat16, and nothing around it does."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


def sloped(model: Net) -> None:
    model.blocks[1].__class__ = Sloped


def steep(model: Net) -> None:
    model.blocks[1].__class__ = Steep


def coarse_layer(model: Net) -> None:
    model.get_submodule("blocks.1.inner").__class__ = Coarse


def other_head(model: Net) -> None:
    with torch.no_grad():
        model.head.weight[0, 0] += 0.5


@pytest.mark.parametrize(
    ("change", "options", "stage", "where", "says"),
    [
        (as_it_is, {}, "", "", "nowhere beyond rounding"),
        (epsilon_of_a_norm, {}, "forward", "blocks.0.norm", "aten.native_layer_norm"),
        (
            rounds_in_block_1,
            {},
            "forward",
            "blocks.1",
            "in aten.round.decimals, which the second window alone computes",
        ),
        (backward_of_block_1, {}, "backward", "blocks.1.inner", "arrives at `blocks.1.inner`"),
        (other_head, {}, "weights", "head.weight", "other weights at `head.weight`"),
        (as_it_is, {"by": 0.5}, "gradients", "enter.weight", "averages, clips or scales"),
        (as_it_is, {"lr": 2e-2}, "step", "enter.weight", "the step differs"),
        (as_it_is, {"seed": 7}, "inputs", "", "the same data"),
    ],
)
def test_windows_part_where_the_fault_is(
    change: Callable[[Net], None], options: dict[str, Any], stage: str, where: str, says: str
) -> None:
    found = between((_recorded(as_it_is),), (_recorded(change, **options),))
    assert (found.stage, found.where) == (stage, where), str(found)
    assert says in str(found)


def test_an_operator_between_the_layers_of_a_module_is_named_with_the_module() -> None:
    found = between((_recorded(sloped),), (_recorded(steep),))
    assert (found.stage, found.where) == ("forward", "blocks.1"), str(found)
    assert "in aten.leaky_relu.default" in str(found)


@pytest.mark.parametrize("turned", [False, True])
def test_an_operator_that_one_window_alone_computes_is_named_and_not_what_takes_its_output(turned: bool) -> None:
    records = (_recorded(as_it_is),), (_recorded(scales_in_block_1),)
    found = between(*records[::-1] if turned else records)
    assert (found.where, found.operator) == ("blocks.1", "aten.mul.Tensor"), str(found)
    assert f"in aten.mul.Tensor, which the {'first' if turned else 'second'} window alone computes" in str(found)


def drops(model: Net) -> None:
    model.blocks[0].drop.p = 0.5


def other_masks(model: Net) -> None:
    drops(model)
    torch.manual_seed(3)


def test_where_masks_differ_the_operator_that_draws_them_is_named_and_not_the_memory_that_it_fills() -> None:
    found = between((_recorded(drops),), (_recorded(other_masks),))
    assert (found.where, found.operator) == ("blocks.0.drop", "aten.bernoulli_.float"), str(found)


class Keys(nn.Module):
    """Attention with a bias of its keys, whose gradient is nothing but rounding: softmax takes no constant."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.eager = eager

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.query(x), self.key(x), self.value(x))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.eager:
            return (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1) @ value
        return nn.functional.scaled_dot_product_attention(query, key, value)


class Fused(Keys):
    """One layer makes all three."""

    def __init__(self, eager: bool) -> None:
        super().__init__(eager)
        self.value = nn.Linear(8, 24)
        del self.query, self.key

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.value(x).chunk(3, -1))


def attending(kind: type[Keys], eager: bool, by: float = 1.0, lr: float = 1e-2) -> Record:
    torch.manual_seed(0)
    model, x = kind(eager), torch.randn(4, 16, 8)
    optimizer = adam(model, lr)
    with (recorder := Recorder(root=model, traces=True)).on():
        (model(x) - 1).square().mean().backward()
        assert model.value.bias.grad is not None
        model.value.bias.grad *= by
        optimizer.step()
    return recorder.record()


@pytest.mark.parametrize("kind", [Keys, Fused])
def test_a_gradient_that_cancels_to_rounding_is_no_difference_nor_is_its_step(kind: type[Keys]) -> None:
    plain = attending(kind, eager=False)
    keys = plain.tensors["grad/key.bias"] if kind is Keys else plain.tensors["grad/value.bias"][8:16]
    assert float(keys.norm()) < 1e-6 * float(plain.tensors["grad/value.bias"].norm())
    found = between((plain,), (attending(kind, eager=True),))
    assert not found.stage, str(found)
    found = between((plain,), (attending(kind, eager=True, by=1.01),))
    assert (found.stage, found.where) == ("gradients", "value.bias"), str(found)
    assert between((plain,), (attending(kind, eager=True, lr=1.01e-2),)).stage == "step"


@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_that_one_of_them_computes_in_a_coarser_dtype_is_a_difference(turned: bool) -> None:
    records = (_recorded(as_it_is),), (_recorded(coarse_layer),)
    found = between(*records[::-1] if turned else records)
    assert (found.stage, found.where) == ("forward", "blocks.1.inner"), str(found)
    assert not between(records[1], (_recorded(coarse_layer),)).stage


def _scales(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend of torch.compile that gives other outputs than the model."""
    del inputs
    return lambda *given: tuple(1.01 * one if one.is_floating_point() else one for one in graph.forward(*given))


def child(model: Any, backend: Any) -> Any:
    model.blocks[1] = torch.compile(model.blocks[1], backend=backend)
    return model


def in_place(model: Any, backend: Any) -> Any:
    model.blocks[1].compile(backend=backend)
    return model


def root(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def function(model: Any, backend: Any) -> Any:
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend=backend)
    return model


def _compiled(how: Callable[[Any, Any], Any], backend: Any) -> Record:
    torch.compiler.reset()
    model = how(_plain(), backend)
    optimizer = adam(model)
    with (recorder := Recorder(root=model, traces=True)).on():
        for x, y in micros(2, rank=0):
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
    return recorder.record()


@pytest.mark.parametrize(("how", "where"), [(child, "blocks.1"), (in_place, "blocks.1"), (root, ""), (function, "")])
def test_what_is_compiled_runs_compiled_while_its_outputs_are_noted(how: Any, where: str) -> None:
    plain, same, scaled = _compiled(lambda model, _: model, None), _compiled(how, "aot_eager"), _compiled(how, _scales)
    assert not between((plain,), (same,)).stage, str(between((plain,), (same,)))
    found = between((same,), (scaled,))
    assert (found.stage, found.where) == ("forward", where or found.where), str(found)
    paths = {one.path for one in same.head.trace if one.kind == "module"}
    assert "blocks.0.inner" in paths or how is root
    assert "blocks.1.inner" not in paths, paths


def kept(rank: int, world: int, folder: str, engine: str) -> None:
    model: Any = net()
    model = DDP(model) if engine == "ddp" else fully_shard(model)
    optimizer = adam(model)
    with (recorder := Recorder(root=model, traces=True)).on():
        loop(model, optimizer)
    write(recorder.record(), Path(folder))


@pytest.mark.parametrize(("divide", "stage"), [(4, ""), (2, "gradients")])
def test_windows_of_more_ranks_and_of_more_micro_batches_are_the_same_where_they_average_the_same(
    gang2: Any, tmp_path: Path, divide: int, stage: str
) -> None:
    gang2.run(kept, str(tmp_path), "ddp")
    torch.manual_seed(0)
    model = Net()
    optimizer = adam(model)
    with (recorder := Recorder(root=model, traces=True)).on():
        for batch in (one for rank in range(2) for one in micros(2, rank=rank)):
            (nn.functional.cross_entropy(model(batch[0]), batch[1]) / divide).backward()
        optimizer.step()
    for pair in (((recorder.record(),), read(tmp_path)), (read(tmp_path), (recorder.record(),))):
        found = between(*pair)
        assert found.stage == stage, str(found)


def test_two_engines_are_compared_from_the_command_line(gang2: Any, tmp_path: Path) -> None:
    for engine in ("ddp", "fsdp2"):
        gang2.run(kept, str(tmp_path / engine), engine)
    assert parting(tmp_path / "ddp", tmp_path / "fsdp2").compared > 20
    done = CliRunner().invoke(main, ["bisect", str(tmp_path / "ddp"), str(tmp_path / "fsdp2")])
    assert (done.exit_code, "nowhere beyond rounding" in done.output) == (0, True), done.output
    (tmp_path / "ddp" / "rank-1.record").write_bytes(b"torn")
    assert CliRunner().invoke(main, ["bisect", str(tmp_path / "ddp"), str(tmp_path / "fsdp2")]).exit_code == 1
