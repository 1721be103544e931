"""Laws of predictions, for plans of drawn legal pairs."""

from __future__ import annotations

from math import prod

from hypothesis import given

from prepkit import codec
from prepkit.plan import Plan
from prepkit.plan.layout import ParamLayout, itemsize, local_shape
from prepkit.planner import fits
from prepkit.predict import predict
from prepkit.predict.inputs import inputs_of, tensor_cuts
from prepkit.predict.prediction import Label
from prepkit.render.plan import Node, tree
from prepkit.testing import plans


@given(plans())
def test_a_prediction_is_a_function_of_the_plan_and_survives_its_file(made: Plan) -> None:
    assert predict(made) == predict(codec.plan_from_text(codec.plan_to_text(made)))


@given(plans())
def test_the_classes_hold_every_rank_once_and_only_what_is_there(made: Plan) -> None:
    found = predict(made)
    if not found.classes:
        assert found.not_predicted
        return
    assert sum(one.ranks for one in found.classes) == made.world_size
    assert [one.first for one in found.classes] == [0, *(one.last + 1 for one in found.classes[:-1])]
    for one in found.classes:
        assert all(term.bytes >= 0 for term in one.terms)
        assert 0 <= one.floor() <= one.total()
        assert one.total() == sum(one.total("device", label) for label in Label)
        assert one.total() <= found.fullest.total()


@given(plans())
def test_all_ranks_together_hold_the_model_and_what_pads_it(made: Plan) -> None:
    found = predict(made)
    if not found.classes:
        return
    for rank in dict.fromkeys((0, made.world_size // 2, made.world_size - 1)):
        used = sum(prod(local_shape(one, made.mesh, rank)) * itemsize(one.dtype) for one in made.layout)
        assert found.at(rank).category("parameters") >= used
        assert found.at(rank).empty <= (used == 0)
    whole = sum(prod(one.shape) * itemsize(one.dtype) for one in made.layout)
    assert sum(one.category("parameters") * one.ranks for one in found.classes) >= whole


@given(plans())
def test_the_tree_holds_every_unit_once_and_its_bytes_are_those_of_the_layout(made: Plan) -> None:
    def nodes(node: Node) -> int:
        return len(node.paths) * (node.whole + sum(nodes(inner) for inner in node.inside))

    def held(one: ParamLayout) -> int:
        shape = list(one.shape)
        for dim, parts in tensor_cuts(one, made.mesh):
            shape[dim] = -(-shape[dim] // parts)
        return prod(shape) * itemsize(one.dtype)

    whole = sum(param.numel * param.size * count for param, count in inputs_of(made).whole)
    assert nodes(tree(made)) + whole == sum(held(one) for one in made.layout)


@given(plans())
def test_every_plan_fits_into_enough_and_none_into_less_than_its_floor(made: Plan) -> None:
    found = predict(made)
    if not found.classes:
        assert fits(made, 2**60).verdict == "not predicted"
        return
    enough = max(one.total() for one in found.classes)
    assert fits(made, enough).verdict == "fits"
    floor = max(one.floor() for one in found.classes)
    if floor:
        assert fits(made, floor - 1).verdict == "does not fit"
