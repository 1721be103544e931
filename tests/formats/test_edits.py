"""Edits change one place of a text and no other, and ``prepkit check --fix`` makes those alone that change no run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prepkit.formats.edits import mended, renamed, revalued, without
from prepkit.formats.importers.foreign import lenient
from prepkit.formats.importers.source import Source
from tests.formats.test_places import CONFIGS, spelt
from tests.support.command_line import run, workplace

ACCELERATE = """# how we train
distributed_type: FSDP  # two cards
num_processes: 2
fsdp_config:
  fsdp_version: 1
  # which ones
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_reshard_after_forward: true
mixed_precison: bf16  # half
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


def paths(data: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in data.items():
        yield above + name
        if isinstance(value, dict):
            yield from paths(value, f"{above}{name}.")


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json"])
@pytest.mark.parametrize(("kind", "data"), CONFIGS, ids=[kind for kind, _ in CONFIGS])
def test_an_edit_leaves_every_other_value_and_most_of_the_text(kind: str, data: dict[str, Any], suffix: str) -> None:
    draw, made, tries, valued = random.Random(f"{kind}{suffix}"), 0, 0, 0
    for path in paths(data):
        source = Source(f"c{suffix}", spelt(data, suffix, draw), suffix)
        *parts, name = path.split(".")
        if (text := revalued(source, path, 12345)) is not None:
            valued += 1
            meant = json.loads(json.dumps(data))
            place = meant
            for part in parts:
                place = place[part]
            place[name] = 12345
            assert lenient(Source("c", text, suffix)) == meant
        for text, new in ((without(source, path), None), (renamed(source, path, "zq_new"), "zq_new")):
            tries += 1
            if text is None:
                continue
            made += 1
            meant = json.loads(json.dumps(data))
            place = meant
            for part in parts:
                place = place[part]
            value = place.pop(name)
            if new is not None:
                place[new] = value
                assert len(text) - len(source.text) == len(new) - len(name)
            assert lenient(Source("c", text, suffix)) == meant
    assert valued >= 0.35 * tries  # of two tries for each key
    assert made >= (0.7 if suffix == ".toml" else 0.9) * tries  # a table of TOML with a header of its own is left


def test_a_name_that_is_taken_is_not_given_twice() -> None:
    assert renamed(Source("c.yaml", "a: 1\nb: 2\n"), "a", "b") is None
    assert without(Source("c.yaml", "a: 1\n"), "b") is None


def test_what_changes_no_run_is_mended_and_nothing_else() -> None:
    after, gone = mended(Source("acc.yaml", ACCELERATE), "accelerate")
    assert after.text == ACCELERATE.replace("  fsdp_reshard_after_forward: true\n", "").replace("precison", "precision")
    assert {finding.rule for finding in gone} == {"import.no-effect", "import.unknown-key"}
    assert mended(after, "accelerate") == (after, ())


def test_a_misspelt_key_that_its_library_passes_by_is_left_to_people() -> None:
    """DeepSpeed trains without a word where ``overlap_com`` stands; written right it would train otherwise."""
    source = Source("ds.json", '{"zero_optimization": {"stage": 2, "overlap_com": true}}')
    assert mended(source, "deepspeed") == (source, ())
    below = Source("acc.yaml", "distributed_type: FSDP\nfsdp_config:\n  fsdp_versio: 2\n")
    assert mended(below, "accelerate") == (below, ())


QUOTED = """{
  "train_micro_batch_size_per_gpu": "25", // as a template had it
  "gradient_clipping": "1.0",
  "bf16": {"enabled": "True"},
  "zero_optimization": {
    "stage": 3, "overlap_comm": "true", "reduce_bucket_size": "5e7", "stage3_max_live_parameters": "many"
  }
}
"""


def test_a_number_or_a_switch_in_quotes_gets_its_type_in_the_json_of_deepspeed(folder: Path) -> None:
    after, gone = mended(Source("ds.json", QUOTED), "deepspeed")
    plain = QUOTED.replace('"25"', "25").replace('"1.0"', "1.0").replace('"True"', "true").replace('"true"', "true")
    assert after.text == plain.replace('"5e7"', "50000000")
    assert len(gone) == 5
    assert mended(after, "deepspeed") == (after, ())
    Path("ds.json").write_text(QUOTED)
    done = run("check", "ds.json", "--fix")
    assert "mended ds.json: " in done.stderr
    assert "zero_optimization.reduce_bucket_size" in done.stderr
    assert Path("ds.json").read_text() == after.text
    assert done.stdout.count("deepspeed.wrong-type") == 1
    assert "many" in done.stdout


OWN = {
    ".toml": (
        (
            'engine = "FSDP2"\naccumulation = "4"  # four\nprecision = ["BF16"]\ntimeout_s = "1e3"\n'
            '[optimizer]\nkind = "AdamW"\nbetas = ["0.9", 0.95]\nweigth_decay = "0.1"\n'
        ),
        (
            'engine = "FSDP2"\naccumulation = 4  # four\nprecision = "BF16"\ntimeout_s = 1000.0\n'
            '[optimizer]\nkind = "AdamW"\nbetas = [0.9, 0.95]\nweight_decay = 0.1\n'
        ),
    ),
    ".yaml": (
        "engine: {kind: FSDP2, wrap: {kind: WrapClasses, names: Block}}\naccumulation: 4.0\n",
        "engine: {kind: FSDP2, wrap: {kind: WrapClasses, names: [Block]}}\naccumulation: 4\n",
    ),
    ".json": (
        '{"engine": {"kind": "DDP", "static_graph": "True"}, "timeout_s": "60"}',
        '{"engine": {"kind": "DDP", "static_graph": true}, "timeout_s": 60.0}',
    ),
}


@pytest.mark.parametrize("suffix", OWN)
def test_a_value_of_prepkits_own_file_that_means_one_thing_gets_its_type(suffix: str) -> None:
    text, meant = OWN[suffix]
    after, gone = mended(Source(f"prepkit{suffix}", text), "prepkit")
    assert after.text == meant
    assert {finding.rule for finding in gone} <= {"codec.wrong-type", "codec.unknown-key"}
    assert mended(after, "prepkit") == (after, ())


@pytest.mark.parametrize("value", ['"four"', "4.5", "[4, 5]", '["four"]', "{ many = 4 }"])
def test_a_value_that_can_mean_nothing_else_is_left(value: str) -> None:
    source = Source("prepkit.toml", f'engine = "DDP"\naccumulation = {value}\n')
    assert mended(source, "prepkit") == (source, ())


def test_the_command_shows_and_makes_the_same_change(folder: Path) -> None:
    Path("acc.yaml").write_bytes(ACCELERATE.replace("\n", "\r\n").encode())
    shown = run("check", "--diff")
    assert shown.exit_code == 1
    assert "-  fsdp_reshard_after_forward: true" in shown.stdout
    assert "+mixed_precision: bf16  # half" in shown.stdout
    assert Path("acc.yaml").read_bytes().count(b"\r\n") == 9
    done = run("check", "--fix")
    assert "mended acc.yaml: fsdp_reshard_after_forward, mixed_precison" in done.stderr.replace("fsdp_config.", "")
    assert Path("acc.yaml").read_bytes().count(b"\r\n") == 8
    assert run("check", "--diff").exit_code == 0
    assert "import.unknown-key" not in done.stderr


def test_the_command_says_what_it_does_not_mend(folder: Path) -> None:
    """A typo below the top is passed by in silence by its library: mending it would change the run."""
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": 4,\n "zero_optimization": {"overlap_com": true}}\n')
    for word in ("--diff", "--fix"):
        done = run("check", "ds.json", word)
        assert "1 finding is not mended: ds.json:2:24 deepspeed.unknown-key" in done.stderr
        assert "overlap_com" in Path("ds.json").read_text()
    Path("acc.yaml").write_text(ACCELERATE)
    for word in ("--diff", "--fix"):
        done = run("check", "ds.json", "acc.yaml", word)
        (line,) = (line for line in done.stderr.splitlines() if "not mended" in line)
        assert "mixed_precison" not in line
        assert "import.unknown-key" not in line
