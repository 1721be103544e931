"""Selections of modules: names that are not there, containers, sizes."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import FSDP2, CheckpointBlocks, Config, Wrap, WrapBlocks, WrapClasses, WrapPaths, WrapRoot, WrapSize
from prepkit.facts import ModuleFact, ParamFact
from prepkit.resolve.modules import select
from prepkit.rules import RULES
from prepkit.testing.tiny import tiny_facts, tiny_model
from tests.support.rule_findings import finding_of, fsdp2_with, mended, rule_ids


def test_a_class_in_the_wrong_case_gets_the_right_spelling() -> None:
    assert (
        finding_of("wrap.class-not-found", *fsdp2_with(WrapClasses(("block",)))).fix == 'Write WrapClasses(("Block",)).'
    )


def test_a_base_class_is_told_which_class_inherits_from_it() -> None:
    model = tiny_model()
    classes = tuple(evolve(cls, mro=("BaseBlock",)) if cls.name == "Block" else cls for cls in model.classes)
    finding = finding_of(
        "wrap.class-not-found", *fsdp2_with(WrapClasses(("BaseBlock",)), evolve(model, classes=classes))
    )
    assert "`Block` inherits from it" in finding.what
    assert finding.fix == 'Write WrapClasses(("Block",)).'


@pytest.mark.parametrize("name", [" Block", "Block ", "Bloc"])
def test_a_class_is_found_under_its_exact_name_alone(name: str) -> None:
    assert rule_ids(*fsdp2_with(WrapClasses((name,)))) == ["wrap.class-not-found"]


def test_the_class_of_the_root_is_not_found_below_it() -> None:
    assert rule_ids(*fsdp2_with(WrapClasses(("Tiny",)))) == ["wrap.class-not-found"]


@pytest.mark.parametrize("wrap", [WrapClasses(("ModuleList",)), WrapPaths(("layers",)), WrapPaths(("layer?",))])
def test_naming_only_containers_is_refused(wrap: Wrap) -> None:
    assert rule_ids(*fsdp2_with(wrap)) == ["wrap.container"]


def test_a_pattern_that_meets_a_container_among_others_passes_it_over() -> None:
    cfg, facts = fsdp2_with(WrapPaths(("*",)))
    assert rule_ids(cfg, facts) == []
    assert select(WrapPaths(("*",)), facts.model) == ("embed", "norm", "head")


@pytest.mark.parametrize("wrap", [WrapClasses(()), WrapPaths(()), WrapPaths(("layers.*", " "))])
def test_a_list_that_names_nothing_is_refused(wrap: Wrap) -> None:
    assert rule_ids(*fsdp2_with(wrap)) == ["wrap.empty"]


def test_mending_a_size_of_zero_leaves_no_selection_that_does_nothing() -> None:
    model = tiny_model(blocks=0)
    bare = evolve(model, params=(ParamFact(name="scale", shape=(4,), dtype="float32"),))
    cfg, facts = Config(checkpointing=CheckpointBlocks(blocks=WrapSize(0))), tiny_facts(bare)
    (rule,) = [rule for rule in RULES if rule.id == "wrap.size-below-one"]
    assert rule.repair is not None
    assert rule_ids(cfg, facts) == ["wrap.size-below-one"]
    assert rule_ids(rule.repair(cfg, facts), facts) == []


def test_classes_and_paths_can_be_named_together_and_each_is_looked_at() -> None:
    assert rule_ids(*fsdp2_with(WrapClasses(("Block",), paths=("head",)))) == []
    assert rule_ids(*fsdp2_with(WrapClasses((), paths=("head",)))) == []
    finding = finding_of("wrap.pattern-not-found", *fsdp2_with(WrapClasses(("Block",), paths=("hed",))))
    assert finding.fix == 'Write paths=("layers.*",). Did you mean `head`?'


@pytest.mark.parametrize(
    ("wrap", "kept"),
    [
        (WrapSize(1), WrapSize(1)),
        (WrapRoot(), WrapRoot()),
        (WrapBlocks(), WrapBlocks()),
        (WrapClasses(("Blok", "Block")), WrapClasses(("Block",))),
        (WrapClasses(("Blok",), paths=("head",)), WrapClasses((), paths=("head",))),
        (WrapPaths(("head",)), WrapPaths(("head",))),
    ],
    ids=str,
)
def test_a_class_that_is_not_found_is_left_out_and_every_other_selection_stays(wrap: Wrap, kept: Wrap) -> None:
    cfg = Config(engine=FSDP2(wrap=wrap), checkpointing=CheckpointBlocks(blocks=WrapClasses(("Blok",))))
    done = mended("wrap.class-not-found", cfg)
    assert done.engine == FSDP2(wrap=kept)
    assert done.checkpointing == CheckpointBlocks(blocks=WrapBlocks())


def test_a_pattern_that_is_not_found_is_told_every_list_of_blocks() -> None:
    model = tiny_model()
    cls = {module.path: module.cls for module in model.modules}
    late = (("late", cls["layers"]), *((f"late.{index}", cls["layers.0"]) for index in range(2)))
    model = evolve(model, modules=(*model.modules, *(ModuleFact(path=path, cls=kind) for path, kind in late)))
    fix = finding_of("wrap.pattern-not-found", *fsdp2_with(WrapPaths(("layer.*",)), model)).fix
    assert fix.startswith('Write WrapPaths(("layers.*", "late.*",)). ')
