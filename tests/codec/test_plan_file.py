"""The plan file: what is written, and that nothing but an intact plan of this format is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from prepkit import codec
from prepkit.codec.files import load, save
from prepkit.codec.text import readable
from prepkit.findings import PlanRejected
from prepkit.version import VERSION
from tests.support.sample_plan import sample_plan


def refused(path: Path) -> list[tuple[str, str, str]]:
    with pytest.raises(PlanRejected) as caught:
        codec.load_plan(path)
    name = f"{path}:"
    return [(found.rule, found.where.removeprefix(name), found.what) for found in caught.value.findings]


def edited(tmp_path: Path, *path: str | int, value: Any) -> Path:
    """A plan file in which one value was replaced."""
    data = json.loads(codec.plan_to_text(sample_plan()))
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    target = tmp_path / "plan.json"
    target.write_text(readable(data))
    return target


def test_a_saved_plan_is_loaded_as_it_was(tmp_path: Path) -> None:
    plan = sample_plan()
    save(plan, str(tmp_path / "plan.json"))
    assert codec.load_plan(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_file_says_what_it_is_and_carries_the_digest(tmp_path: Path) -> None:
    data = json.loads(codec.plan_to_text(sample_plan()))
    assert (data["kind"], data["format"], data["digest"]) == ("prepkit.plan", 2, codec.plan_digest(sample_plan()))
    assert data["digests"].keys() == data["plan"].keys()
    assert len(data["digests"]["steps"]) == len(data["plan"]["steps"])


def test_laying_the_file_out_anew_changes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text(json.dumps(json.loads(codec.plan_to_text(sample_plan())), sort_keys=True, indent=7))
    assert codec.load_plan(target) == sample_plan()


def test_the_file_of_a_70b_llama_stays_below_a_megabyte_with_a_line_for_each_parameter() -> None:
    plan = sample_plan(layers=80)
    text = codec.plan_to_text(plan)
    assert len(text.encode()) < 1_000_000
    lines = [line for line in text.splitlines() if '"model.layers.79.mlp.up_proj.weight"' in line]
    assert [line.lstrip()[:8] for line in lines].count('{"name":') == 2  # its fact and its layout


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.json"
    save(sample_plan(), str(target))
    before = target.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save(sample_plan(layers=3), target)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_all_is_written_before_the_disk_is_asked_to_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: kept.extend(path.read_text() for path in tmp_path.iterdir()))
    codec.write_text("short", tmp_path / "plan.json")
    assert kept == ["short"]


def test_text_that_utf_8_does_not_have_is_written_as_its_escape(tmp_path: Path) -> None:
    codec.write_text("a\udc80b\n", tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == b"a\\udc80b\n"


def test_saving_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("")
    (tmp_path / "link.json").symlink_to("real.json")
    save(sample_plan(), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert codec.load_plan(tmp_path / "real.json") == sample_plan()


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(PlanRejected) as caught:
            codec.load_plan(path)
        (found,) = caught.value.findings
        assert (found.rule, found.where) == ("codec.unreadable", str(path))
        assert reason in found.what


@pytest.mark.parametrize("path", [3, None, b"plan.json"])
def test_what_is_no_path_is_named(path: Any) -> None:
    with pytest.raises(TypeError, match=r"pk.load: .* is no path; give the path of a file"):
        load(path)
    with pytest.raises(TypeError, match=r"pk.save: .* is no path; give the path of a file"):
        save(sample_plan(), path)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_bytes(b'{"kind": "\xff"}')
    assert refused(target) == [("codec.damaged", "$", "byte 10 is not UTF-8 text")]


@pytest.mark.parametrize("text", ["{}", "[]", "3", '"prepkit.plan"', '{"kind": "prepkit.config"}', '{"kind": null}'])
def test_a_foreign_file_is_named_as_such(tmp_path: Path, text: str) -> None:
    target = tmp_path / "plan.json"
    target.write_text(text)
    assert [(rule, where) for rule, where, _ in refused(target)] == [("codec.foreign", "$")]


@pytest.mark.parametrize("number", [3, 1, 0, True, "2", 2.0, None])
def test_another_format_is_named_with_both_numbers_and_the_writer(tmp_path: Path, number: object) -> None:
    target = edited(tmp_path, "format", value=number)
    what = f"format {number!r}, written by prepkit '0.1.0', but prepkit {VERSION} reads format {codec.FORMAT}"
    assert refused(target) == [("codec.other-format", "$.format", what)]


def test_a_newer_file_whose_plan_has_another_shape_is_still_only_newer(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text('{"kind": "prepkit.plan", "format": 9, "plan": [], "more": 1}')
    assert [rule for rule, _, _ in refused(target)] == ["codec.other-format"]


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (("plan", "config", "accumulation"), 2, "$.plan.config"),
        (("plan", "steps", 4, "step", "device", "type"), "cpu", "$.plan.steps[4]"),
        (("plan", "steps", 0, "reason"), "because", "$.plan.steps[0]"),
        (("plan", "warnings"), [], "$.plan.warnings"),
        (("digests", "facts"), "sha256:0", "$.plan.facts"),
        (("digests", "steps"), [], "$.plan.steps"),
        (("digests",), None, "$.plan.config"),
        (("digest",), "sha256:0", "$.digest"),
        (("digests", "more"), "sha256:0", "$.digest"),
    ],
)
def test_an_edited_file_is_refused_with_the_part_that_was_edited(
    tmp_path: Path, path: tuple[str | int, ...], value: object, place: str
) -> None:
    (rule, where, _), *_ = refused(edited(tmp_path, *path, value=value))
    assert (rule, where) == ("codec.edited", place)


def test_an_edited_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PlanRejected, match="fix: change the config and plan again"):
        codec.load_plan(edited(tmp_path, "plan", "config", "accumulation", value=2))


@pytest.mark.parametrize(
    ("path", "value", "finding"),
    [
        (("plan", "steps", 3, "step", "kind"), "ReleaseOptimiser", ("codec.unknown-kind", "$.plan.steps[3].step.kind")),
        (("plan", "config", "wrap"), 1, ("codec.unknown-key", "$.plan.config.wrap")),
        (("plan", "mesh", 0, "size"), "8", ("codec.wrong-type", "$.plan.mesh[0].size")),
        (("plan",), None, ("codec.wrong-type", "$.plan")),
        (("more",), None, ("codec.unknown-key", "$.more")),
        (("plan", "target"), None, ("codec.unknown-key", "$.plan.target")),
    ],
)
def test_contents_that_no_plan_has_are_named(
    tmp_path: Path, path: tuple[str | int, ...], value: object, finding: tuple[str, str]
) -> None:
    assert [(rule, where) for rule, where, _ in refused(edited(tmp_path, *path, value=value))] == [finding]


def test_a_missing_part_of_the_file_is_named() -> None:
    with pytest.raises(PlanRejected) as caught:
        codec.plan_from_text(f'{{"kind": "prepkit.plan", "format": {codec.FORMAT}, "plan": {{}}}}')
    assert [found.where for found in caught.value.findings] == ["$.digest", "$.digests"]


def test_a_module_that_the_file_names_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    data = json.loads(codec.plan_to_text(sample_plan()))
    data["plan"]["facts"]["optimizer"]["module"] = "trap"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        with pytest.raises(PlanRejected, match=r"plan\.facts"):
            codec.plan_from_text(json.dumps(data))


def test_a_digest_that_is_a_list_is_one_edited_part() -> None:
    data = json.loads(codec.plan_to_text(sample_plan()))
    data["digests"]["mesh"] = list(data["digests"]["mesh"])
    with pytest.raises(PlanRejected) as caught:
        codec.plan_from_text(json.dumps(data))
    assert [found.where for found in caught.value.findings] == ["$.plan.mesh"]


@pytest.mark.parametrize("more", [0, 1])
def test_a_file_of_the_largest_size_is_read_and_one_byte_more_is_not(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "LARGEST", 10)
    (tmp_path / "text").write_text("x" * (10 + more))
    if not more:
        assert codec.read_text(tmp_path / "text") == "x" * 10
        return
    with pytest.raises(PlanRejected, match="more than 10 bytes"):
        codec.read_text(tmp_path / "text")
