"""What keeps a run from going on: a checkpoint of the same run has no finding, and each change has exactly its row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from prepkit.facts.saved_run import (
    FolderFacts,
    GivenFolder,
    ResumeFacts,
    SavedFacts,
    SavedModule,
    SavedTensor,
    SavedWindows,
)
from prepkit.rules import due
from prepkit.rules.rule import Moment, findings_of
from prepkit.rules.run.saving import ACCEPTABLE, RULES

NAMES = ("embed.weight", "layers.0.weight", "layers.0.bias", "head.weight")
WORDS = st.sampled_from(("1", "2", "True", "'gelu'"))


@st.composite
def runs(draw: st.DrawFn) -> SavedFacts:
    """A run with an optimizer: each parameter is in one of its groups."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    at = [draw(st.integers(0, 1)) for _ in names]
    shapes = st.lists(st.integers(1, 4), max_size=2).map(tuple)
    return SavedFacts(
        engine=draw(st.sampled_from(("Single", "DDP", "FSDP2", "DeepSpeed"))),
        world_size=draw(st.integers(1, 8)),
        tensors=tuple(SavedTensor(name=name, dtype="float32", shape=draw(shapes)) for name in names),
        modules=(SavedModule(path="layers.0", cls="Linear", values=(("in_features", draw(WORDS)),)),),
        config=(("heads", draw(WORDS)),),
        optimizer=draw(st.sampled_from(("AdamW", "SGD", "FusedAdam"))),
        groups=tuple(tuple(name for name, own in zip(names, at, strict=True) if own == group) for group in (0, 1)),
        scheduler=draw(st.sampled_from(("", "StepLR"))),
    )


@st.composite
def windows(draw: st.DrawFn) -> SavedWindows:
    return SavedWindows(
        micro_batches=draw(st.integers(1, 4)),
        ranks=draw(st.integers(1, 4)),
        clip=draw(st.sampled_from(("", "ClipNorm(max_norm=1.0, norm_type=2.0)"))),
        total_steps=draw(st.integers(1, 9)),
    )


def resumed(saved: SavedFacts | None, here: SavedFacts | None, **more: object) -> ResumeFacts:
    return evolve(ResumeFacts(where="runs/7", saved=saved, here=here), **more)


def rows(facts: ResumeFacts) -> set[str]:
    return {finding.rule for finding in findings_of(due(Moment.RESUME), facts)}


@given(runs(), windows())
def test_a_run_goes_on_from_its_own_checkpoint_on_any_engine_and_any_number_of_ranks(
    run: SavedFacts, window: SavedWindows
) -> None:
    other = evolve(run, engine="FSDP1", world_size=run.world_size + 3, loaders=2, scaler=not run.scaler)
    split = evolve(window, micro_batches=window.ranks, ranks=window.micro_batches)
    assert rows(resumed(run, other, before=window, now=split, accepted=ACCEPTABLE)) == set()


def _first(run: SavedFacts, **changes: object) -> SavedFacts:
    return evolve(run, tensors=(evolve(run.tensors[0], **changes), *run.tensors[1:]))


CHANGES: dict[str, tuple[Callable[[SavedFacts], SavedFacts], ...]] = {
    "checkpoint.other-model": (
        lambda run: _first(run, shape=(7, 7, 7)),
        lambda run: evolve(run, tensors=(*run.tensors, SavedTensor(name="new", dtype="float32", shape=(1,)))),
        lambda run: evolve(run, tensors=run.tensors[1:]),
    ),
    "checkpoint.other-dtype": (lambda run: _first(run, dtype="bfloat16"), lambda run: _first(run, dtype="int8")),
    "checkpoint.other-config": (
        lambda run: evolve(run, config=(("heads", "16"),)),
        lambda run: evolve(run, modules=(evolve(run.modules[0], values=(("in_features", "16"),)),)),
    ),
    "checkpoint.other-optimizer": (lambda run: evolve(run, optimizer="Lion"),),
    "checkpoint.other-groups": (
        lambda run: evolve(run, groups=(*run.groups, ("late",))),
        lambda run: evolve(run, groups=((*run.groups[0], "late"), *run.groups[1:])),
    ),
    "checkpoint.other-scheduler": (lambda run: evolve(run, scheduler="CosineAnnealingLR"),),
}


@pytest.mark.parametrize(("rule", "at"), [(rule, at) for rule, every in CHANGES.items() for at in range(len(every))])
@given(runs())
def test_each_change_of_a_run_has_exactly_its_row(rule: str, at: int, run: SavedFacts) -> None:
    assert rows(resumed(run, CHANGES[rule][at](run))) == {rule}


@given(runs())
def test_a_run_without_an_optimizer_is_one_row_and_without_one_here_the_weights_alone_are_compared(
    run: SavedFacts,
) -> None:
    bare = evolve(run, optimizer="", groups=(), scheduler="")
    assert rows(resumed(bare, run)) == {"checkpoint.no-optimizer"}
    assert rows(resumed(run, bare)) == set()


@given(windows())
def test_each_change_of_the_windows_has_exactly_its_row(window: SavedWindows) -> None:
    def found(**changes: object) -> set[str]:
        return rows(ResumeFacts(before=window, now=evolve(window, **changes)))

    assert found(micro_batches=window.micro_batches + 1) == {"resume.other-batch"}
    assert found(clip="ClipValue(1.0)") == {"resume.other-clipping"}
    assert found(total_steps=10) == {"resume.other-total-steps"}
    assert found(total_steps=None) == set()


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        (ResumeFacts(accepted=("checkpoint.other-model",)), "resume.accepts-unknown"),
        (ResumeFacts(nothing="there is no such folder"), "resume.nothing-saved"),
        (ResumeFacts(torn=("it is not there",)), "resume.latest-torn"),
        (ResumeFacts(lacking=("optimizer.state.a.exp_avg",)), "checkpoint.other-state"),
        (ResumeFacts(unknown=("optimizer.state.a.exp_avg",)), "checkpoint.other-state"),
        (ResumeFacts(reshaped=("optimizer.state.a.exp_avg [1], here [2]",)), "checkpoint.other-state"),
        (ResumeFacts(lacking=("model.a",)), "checkpoint.other-model"),
        (ResumeFacts(unknown=("model.a",)), "checkpoint.other-model"),
        (ResumeFacts(reshaped=("model.a [1], here [2]",)), "checkpoint.other-model"),
        (ResumeFacts(joined=("step of a, b differs",)), "resume.steps-joined"),
        (ResumeFacts(replaced=("lr of group 0: 0.1 for 0.2",)), "resume.settings-replaced"),
    ],
)
def test_what_else_is_seen_has_exactly_its_row(facts: ResumeFacts, rule: str) -> None:
    assert rows(facts) == {rule}


@given(st.lists(st.sampled_from(("runs/7", "runs/8")), min_size=1, max_size=4), st.integers(0, 3))
def test_a_folder_is_used_where_all_ranks_give_the_same(paths: list[str], none: int) -> None:
    def found(given: tuple[GivenFolder, ...]) -> set[str]:
        return {finding.rule for finding in findings_of(due(Moment.FOLDER), FolderFacts(given=given))}

    given_by = tuple(GivenFolder(path=path) for path in paths)
    assert found(given_by) == ({"checkpoint.folders-differ"} if len(set(paths)) > 1 else set())
    at = none % len(paths)
    broken = (*given_by[:at], GivenFolder(path="", problem="None is no path"), *given_by[at + 1 :])
    assert found(broken) == {"checkpoint.no-folder"}


def test_a_folder_of_another_run_has_its_row_and_every_row_is_met_here() -> None:
    (beside,) = findings_of(due(Moment.FOLDER), FolderFacts(folder="runs/7", others=("000003-step-9",), steps=2))
    assert beside.rule == "save.beside-another-run"
    assert {rule.at for rule in RULES} == {(Moment.FOLDER,), (Moment.RESUME,)}
    assert set(ACCEPTABLE) == {f"checkpoint.other-{what}" for what in ("config", "dtype", "optimizer", "scheduler")}


def test_a_kernel_of_deepspeed_s_goes_on_from_the_optimizer_that_it_is_for() -> None:
    run = SavedFacts(engine="DDP", world_size=1, tensors=(), optimizer="AdamW", groups=())
    fused, other = evolve(run, optimizer="FusedAdam"), evolve(run, optimizer="FusedLion")
    assert rows(resumed(run, fused)) == rows(resumed(fused, run)) == set()
    assert rows(resumed(other, run)) == {"checkpoint.other-optimizer"}


@pytest.mark.parametrize(
    ("saved", "here", "rounds"),
    [
        ("bfloat16", "float16", True),
        ("bfloat16", "float32", False),
        ("float32", "float64", False),
        ("float64", "float32", True),
        ("int64", "int32", True),
        ("int64", "int64", False),
    ],
)
def test_a_dtype_that_rounds_is_refused_and_a_wider_one_is_not(saved: str, here: str, rounds: bool) -> None:
    run = SavedFacts(engine="DDP", world_size=1, tensors=(SavedTensor(name="a", dtype=saved, shape=(2,)),))
    assert rows(resumed(run, _first(run, dtype=here))) == ({"checkpoint.other-dtype"} if rounds else set())
