"""The page about a plan: what is on it, that it needs nothing from outside, and what a browser makes of it."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from attrs import evolve

from prepkit.config import DDP, FSDP2, AdamW, Config, Mesh
from prepkit.findings import Finding, Severity
from prepkit.findings.text import in_bytes
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.render.plan import plan_text
from prepkit.render.report import COLOURS, mesh, report
from prepkit.steps import Axis
from tests.support.llama_facts import fsdp2
from tests.support.plans import PLANS, fsdp2_plan, single_plan

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def shard() -> Plan:
    return fsdp2("8B", 4096, Config(engine=FSDP2(), optimizer=AdamW()))


class Tags(HTMLParser):
    """Every element with its attributes, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "rect", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", PLANS)
def test_a_page_is_whole_and_asks_for_nothing(name: str) -> None:
    html = report([(name, PLANS[name]())])
    seen = Tags(html)
    assert seen.open == []
    assert not {tag for tag, _ in seen.found} & {"script", "link", "img", "iframe", "object", "image", "use", "form"}
    assert not [attrs for _, attrs in seen.found if {"src", "href", "srcset", "action", "onload"} & set(attrs)]
    assert not re.search(r"url\(|@import|https?://", html)
    assert "default-src 'none'" in html


def test_the_page_holds_steps_structure_bytes_traffic_and_findings() -> None:
    bad = Finding(rule="x.y", severity=Severity.ERROR, where="config.z", what="z is 1", fix="write 2")
    plan = evolve(shard(), overridden=(bad,))
    text = " ".join(Tags(report([("one", plan)], memory=80 * 2**30)).texts)
    made = predict(plan)
    for planned in plan.steps:
        assert f"because {planned.reason}" in text
    for term in made.fullest.terms:
        assert term.what in text
        assert in_bytes(term.bytes) in text
    for one in made.traffic:
        assert in_bytes(one.sent) in text
    assert "80.00 GiB of a device" in text
    assert "32 x" in text
    assert "LlamaDecoderLayer" in text
    assert "x.y at config.z" in text
    assert all(note in text for note in made.notes)


def test_bars_are_as_long_as_their_bytes_and_the_budget_stands_on_the_same_scale() -> None:
    memory = 2**30
    plan = shard()
    seen = Tags(report([("one", plan)], memory=memory)).found
    most = predict(plan).fullest
    (svg,) = [attrs for tag, attrs in seen if tag == "svg"]
    width = float(str(svg["viewbox"]).split()[2])
    rects = [attrs for tag, attrs in seen if tag == "rect"]
    per_byte = sum(float(str(r["width"])) for r in rects if r["y"] == "22") / most.total()
    assert per_byte * max(most.total(), memory) == pytest.approx((width - 130 - 90) / 1.02, rel=0.01)
    (line,) = [attrs for tag, attrs in seen if tag == "line"]
    assert float(str(line["x1"])) == pytest.approx(130 + per_byte * memory, rel=0.01)
    assert len({r["y"] for r in rects}) == 2, "one bar for the fullest rank and one for the emptiest"


def test_the_picture_of_the_mesh_has_a_row_for_each_node_and_a_colour_for_each_copy() -> None:
    def cells(plan: Plan) -> dict[str, str]:
        found = [attrs for tag, attrs in Tags(mesh(plan)).found if tag == "td" and "title" in attrs]
        return {str(one["title"]): str(one["style"]) for one in found}

    plan = fsdp2_plan()
    two = evolve(plan, mesh=(Axis(name="replicate", size=2), Axis(name="shard", size=3)))
    seen = cells(two)
    assert list(seen) == [f"rank {rank}: replicate {rank // 3}, shard {rank % 3}" for rank in range(6)]
    colours = list(seen.values())
    assert (len(set(colours[:3])), len(set(colours[3:])), len(set(colours))) == (1, 1, 2)
    wide = fsdp2("8B", 4096)
    assert len(cells(wide)) == 16 * (wide.facts.env.per_node or 16)
    assert "more nodes like these" in mesh(wide)
    assert "one process" in mesh(single_plan())


def test_two_plans_stand_side_by_side_with_their_differences() -> None:
    a = shard()
    b = fsdp2("8B", 4096, Config(engine=FSDP2(), mesh=Mesh(replicate=512), optimizer=AdamW()))
    text = " ".join(Tags(report([("a.json", a), ("b.json", b)])).texts)
    assert "config.mesh: none -> (replicate=512, shard=-1, tensor=1)" in text
    grown = predict(b).fullest.category("parameters") - predict(a).fullest.category("parameters")
    assert f"+{in_bytes(grown)}" in text
    assert "The plans are equal." in " ".join(Tags(report([("a", a), ("b", a)])).texts)
    with pytest.raises(ValueError, match="one plan or two, not 3"):
        report([("a", a)] * 3)


def test_names_from_a_model_cannot_break_out_of_the_page() -> None:
    plan = fsdp2_plan()
    nasty = '<script>alert("1")</script>'
    classes = tuple(evolve(one, name=nasty) for one in plan.facts.model.classes)
    plan = evolve(plan, facts=evolve(plan.facts, model=evolve(plan.facts.model, classes=classes)))
    html = report([(nasty, plan)])
    assert "<script" not in html
    assert nasty in " ".join(Tags(html).texts)


def test_an_engine_that_is_not_predicted_still_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("prepkit.predict", fromlist=["PREDICTORS"]).PREDICTORS, DDP)
    plan = PLANS["ddp"]()
    text = " ".join(Tags(report([("ddp", plan), ("again", plan)])).texts)
    assert "not predicted: everything: there are no formulas for DDP here" in text
    assert "memory: not predicted" in plan_text(plan)


# --- in a browser --------------------------------------------------------------------------------------------------


def pixels(png: bytes) -> tuple[int, int, set[tuple[int, int, int]]]:
    """Width, height and colours of a picture as Chromium writes it: 8 bits, three or four channels, not interlaced."""
    width, height, depth, kind, *_, interlace = struct.unpack(">IIBBBBB", png[16:29])
    assert (depth, interlace) == (8, 0)
    channels = {2: 3, 6: 4}[kind]
    data, at = b"", 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        data += png[at + 8 : at + 8 + size] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + size
    raw, stride, before = zlib.decompress(data), width * channels, bytearray(width * channels)
    colours: set[tuple[int, int, int]] = set()
    for row in range(height):
        start = row * (stride + 1)
        line = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, channels)
        colours.update(zip(line[0::channels], line[1::channels], line[2::channels], strict=True))
        before = line
    return width, height, colours


def _unfiltered(kind: int, line: bytearray, up: bytearray, step: int) -> bytearray:
    for i in range(len(line)):
        left = line[i - step] if i >= step else 0
        corner = up[i - step] if i >= step else 0
        guess = left + up[i] - corner
        near = min((left, up[i], corner), key=lambda value: abs(guess - value))
        line[i] = (line[i] + (0, left, up[i], (left + up[i]) // 2, near)[kind]) & 255
    return line


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to look at the page with")
def test_a_browser_draws_the_bars_in_the_colours_of_their_categories(tmp_path: Path) -> None:
    assert CHROMIUM
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    plan = fsdp2("8B", 64)
    page.write_text(report([("8B on 64", plan)], memory=80 * 2**30))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=700,700",
        f"--user-data-dir={tmp_path}/u",
    ]
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=120)
    width, height, colours = pixels(picture.read_bytes())
    assert (width, height) == (700, 700)
    shown = ("parameters", "gradients", "optimizer state", "gathered units", "working buffers")
    wanted = {name: tuple(bytes.fromhex(COLOURS[name][1:])) for name in shown}
    assert [name for name, colour in wanted.items() if colour not in colours] == []
    assert (0xA3, 0x24, 0x2F) in colours, "the line of the budget"
