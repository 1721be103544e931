"""The facts of a model are what stands there, under the names that its author wrote."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from prepkit.facts import BufferFact, ClassFact, Env, ModelFacts, ParamFact
from prepkit.observe import observe
from tests.objects.test_names import Block, Net
from tests.support.patience import MOST

HERE = Env()


def facts(model: nn.Module) -> ModelFacts:
    return observe(model, env=HERE).facts.model


# --- structure and tensors -----------------------------------------------------------------------------------------


def test_a_small_model_is_described_to_the_last_field() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3, dtype=torch.float16), requires_grad=False)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("cache", torch.zeros(2, 3, dtype=torch.int64), persistent=False)
            self.register_buffer("unset", None)
            self.register_parameter("absent", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    model = nn.Sequential(nn.Linear(4, 3), nn.ModuleList([Scale()]))
    assert facts(model) == ModelFacts(
        classes=(
            ClassFact(name="Sequential", module="torch.nn.modules.container"),
            ClassFact(name="Linear", module="torch.nn.modules.linear", resets=True),
            ClassFact(name="ModuleList", module="torch.nn.modules.container", has_forward=False),
            ClassFact(name="Scale", module=__name__),
        ),
        modules=facts(model).modules,
        params=(
            ParamFact(name="0.weight", shape=(3, 4), dtype="float32"),
            ParamFact(name="0.bias", shape=(3,), dtype="float32"),
            ParamFact(name="1.0.gain", shape=(3,), dtype="float16", requires_grad=False),
        ),
        buffers=(
            BufferFact(name="1.0.mean", shape=(3,), dtype="float32"),
            BufferFact(name="1.0.cache", shape=(2, 3), dtype="int64", persistent=False),
        ),
    )
    assert [(m.path, m.cls, m.marks) for m in facts(model).modules] == [
        ("", 0, ()),
        ("0", 1, ()),
        ("1", 2, ()),
        ("1.0", 3, ()),
    ]


def test_the_bases_of_a_class_are_named_up_to_module() -> None:
    class Wide(Block):
        pass

    assert facts(Wide()).classes[0].mro == ("Block",)


def test_classes_that_look_the_same_are_one_class() -> None:
    model = nn.Sequential(*(weight_norm(nn.Linear(2, 2)) for _ in range(3)))
    found = facts(model)
    assert [cls.name for cls in found.classes].count("ParametrizedLinear") == 1
    assert [found.classes[module.cls].name for module in found.modules] == [
        type(module).__name__ for module in model.modules()
    ]


def test_ties_are_told_by_identity_with_the_first_name_in_front() -> None:
    net = Net()
    assert facts(net).ties == (("embed.weight", "head.weight"),)
    assert [param.name for param in facts(net).params].count("head.weight") == 0


def test_parameters_that_only_share_storage_are_not_tied() -> None:
    net = Net()
    net.head.weight = nn.Parameter(net.embed.weight.data)
    assert net.head.weight.data_ptr() == net.embed.weight.data_ptr()
    assert facts(net).ties == ()


def test_a_shared_module_appears_once_and_ties_its_parameters() -> None:
    shared = nn.Linear(2, 2, bias=False)
    found = facts(nn.Sequential(shared, nn.Sequential(shared)))
    assert [module.path for module in found.modules] == ["", "0", "1"]
    assert found.ties == (("0.weight", "1.0.weight"),)


def test_a_shared_buffer_appears_under_its_first_name() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[1].register_buffer("table", torch.zeros(2))
    model[0].register_buffer("table", model[1].table)
    assert [buffer.name for buffer in facts(model).buffers] == ["0.table"]


def test_a_model_on_meta_has_the_same_facts_as_a_real_one() -> None:
    with torch.device("meta"):
        meta = Net()
    assert facts(meta) == facts(Net())


def test_where_tensors_are_is_local_and_counted() -> None:
    net = Net()
    net.layers[0] = net.layers[0].to("meta")
    net.register_buffer("cache", torch.zeros(1))
    local = observe(net, env=HERE).local
    assert local.param_devices == (("cpu", 5), ("meta", 4))
    assert local.buffer_devices == (("cpu", 1),)
    assert local.host_memory is None or local.host_memory > 0


def test_a_parameter_under_zero_init_has_its_whole_shape() -> None:
    net = nn.Linear(4, 4, bias=False)
    net.weight.data = torch.empty(0)
    net.weight.ds_shape = torch.Size([4, 4])
    assert facts(net).params == (ParamFact(name="weight", shape=(4, 4), dtype="float32", cls="ZeroParameter"),)


def test_a_lazy_parameter_has_no_shape_yet_and_its_class_says_so() -> None:
    lazy = facts(nn.LazyBatchNorm1d())
    assert {(p.cls, p.shape) for p in lazy.params} == {("UninitializedParameter", ())}
    assert lazy.buffers[0] == BufferFact(name="running_mean", shape=(), dtype="float32")


def test_a_subclass_of_parameter_is_named() -> None:
    class Params4bit(nn.Parameter):
        pass

    net = nn.Linear(4, 4, bias=False)
    net.weight = Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert facts(net).params == (
        ParamFact(name="weight", shape=(8, 1), dtype="uint8", requires_grad=False, cls="Params4bit"),
    )


# --- what it says of itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [["B", "A", "A"], {"A", "B"}, ("A", "B"), {"B": 1, "A": 2}])
def test_declared_blocks_are_sorted_whatever_holds_them(declared: Any) -> None:
    net = Net()
    net._no_split_modules = declared
    net._tied_weights_keys = declared
    assert facts(net).declared_blocks == facts(net).tied_keys == ("A", "B")


@pytest.mark.parametrize(("declared", "expected"), [(None, ()), ("Block", ("Block",)), (7, ())])
def test_one_name_is_a_declaration_and_none_is_none(declared: Any, expected: tuple[str, ...]) -> None:
    net = Net()
    net._no_split_modules = declared
    assert facts(net).declared_blocks == expected


def test_a_forward_that_is_a_plain_function_is_told_from_a_bound_one() -> None:
    net = Net()
    assert facts(net).forward == "bound"
    net.forward = lambda ids: ids
    assert facts(net).forward == "plain"


def test_the_device_map_is_that_of_the_first_module_that_is_spread() -> None:
    net = Net()
    net.hf_device_map = {"": 0}
    assert facts(net).device_map == (("", "local"),)
    net.layers[1].hf_device_map = {"up": 0, "down": "cpu"}
    assert facts(net).device_map == (("up", "0"), ("down", "cpu"))


@pytest.mark.parametrize(
    ("flag", "expected"), [("is_loaded_in_4bit", "4bit"), ("is_loaded_in_8bit", "8bit"), ("other", "")]
)
def test_a_quantised_model_is_told(flag: str, expected: str) -> None:
    net = Net()
    setattr(net, flag, True)
    assert facts(net).quantised == expected


def test_embeddings_that_are_not_implemented_or_not_in_the_model_are_none() -> None:
    class Odd(Net):
        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

        def get_output_embeddings(self) -> nn.Module:
            return nn.Linear(1, 1)

    assert (facts(Odd()).input_embedding, facts(Odd()).output_embedding) == (None, None)


def test_an_embedding_behind_a_wrapper_has_its_canonical_path() -> None:
    class Told(Net):
        def get_input_embeddings(self) -> nn.Module:
            return self.embed

    net = Told()
    net.embed = torch.compile(net.embed)
    assert facts(net).input_embedding == "embed"


# --- harmless ------------------------------------------------------------------------------------------------------


def test_observing_touches_nothing() -> None:
    net = Net().eval()
    net.layers[0].register_forward_hook(lambda *_: None)
    before = snapshot(net)
    observe(net, optimizer=torch.optim.AdamW(net.parameters()), env=HERE)
    assert snapshot(net) == before


def snapshot(net: nn.Module) -> list[Any]:
    """Every attribute of every module, tensors and hooks by identity, and what is attached to each tensor."""
    tensors = [*net.parameters(), *net.buffers()]
    return [
        [{name: (id(value), repr(value)) for name, value in vars(module).items()} for module in net.modules()],
        [(id(tensor), tensor._version, tensor.requires_grad, dict(vars(tensor))) for tensor in tensors],
    ]


def test_observing_imports_nothing_at_all() -> None:
    code = (
        "import sys, torch; from prepkit.observe import observe, observe_env\n"
        "before = set(sys.modules); observe(torch.nn.Linear(2, 2)); observe_env()\n"
        "print(sorted(set(sys.modules) - before), [n for n in ('transformers', 'torch._dynamo') if n in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120 * MOST)
    assert ran.stdout.strip() == "[] []"


def test_the_cost_grows_with_the_size_and_no_faster() -> None:
    def calls(layers: int) -> int:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.ModuleList(nn.Linear(2, 2) for _ in range(20)) for _ in range(layers)))
        count = 0

        def tally(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(tally)
        try:
            observe(model, env=HERE)
        finally:
            sys.setprofile(None)
        return count

    small, large = calls(5), calls(20)
    assert large < 4.2 * small, "four times the modules take four times the calls"
