"""Edits change one place of a text and no other, and ``prepkit check --fix`` makes those alone that change no run."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prepkit.findings import Finding, Severity
from prepkit.formats.edits import mended, renamed, revalued, without
from prepkit.formats.importers.foreign import lenient
from prepkit.formats.importers.source import Source
from prepkit.formats.places import comments
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
    assert "mended acc.yaml: mixed_precison, fsdp_reshard_after_forward" in done.stderr.replace("fsdp_config.", "")
    assert Path("acc.yaml").read_bytes().count(b"\r\n") == 8
    assert run("check", "--diff").exit_code == 0
    assert "import.unknown-key" not in done.stderr


STAGE = """distributed_type: DEEPSPEED
num_processes: 8
deepspeed_config:
  offload_param_device: {device}
  zero3_init_flag: true
  zero_stage: {stage}
"""


@pytest.mark.parametrize(("stage", "device", "mends"), [(4, "none", False), (2, "cpu", False), (2, "none", True)])
def test_a_key_that_an_error_leaves_without_effect_stays(folder: Path, stage: int, device: str, mends: bool) -> None:
    """It has its effect again when the error is corrected: with stage 3 that flag is wanted."""
    text = STAGE.format(stage=stage, device=device)
    after, gone = mended(Source("acc.yaml", text), "accelerate")
    assert bool(gone) is mends
    assert ("zero3_init_flag" in after.text) is not mends
    Path("acc.yaml").write_text(text)
    assert run("check", "acc.yaml", "--diff").exit_code == int(mends)


def test_an_error_that_others_beside_the_file_show_keeps_it_too(folder: Path) -> None:
    text = ACCELERATE.replace("mixed_precison", "mixed_precision")
    error = Finding(rule="a.b", severity=Severity.ERROR, where="w", what="x", fix="y")
    assert mended(Source("acc.yaml", text), "accelerate")[1]
    assert mended(Source("acc.yaml", text), "accelerate", (error,))[1] == ()


def test_json_that_every_reader_takes_stays_so() -> None:
    for text in ('{"a": 1,\n"b": 2\n}\n', '{"a": 1, "b": 2}', '{"b": 2,\n "a": 1}'):
        after = without(Source("ds.json", text), "b")
        assert after is not None
        assert json.loads(after) == {"a": 1}
    assert without(Source("ds.json", '{"a": 1,\n"b": 2\n} // end'), "b") == '{"a": 1,\n} // end'


COMMENTED = {
    "acc.yaml": """# 0
distributed_type: FSDP  # 1
# 2
fsdp_config:  # 3
  # 4
  fsdp_sharding_strategy: >-  # 5 gone
    FULL_SHARD

  # 6
  fsdp_auto_wrap_policy: NO_WRAP
  fsdp_version: 2
  # 7
  fsdp_use_orig_params:
    true
  # 8
  fsdp_backward_prefetch: "NO_PREFETCH"

# 9
num_processes: 2  # it's "10
# 11
""",
    "prepkit.toml": """# 0
engine = "DDP"  # 1
# 2
accumulation = "4"  # 3
# 4
timeout_s = '1e3'  # 5 # "6"
""",
}


@pytest.mark.parametrize("name", COMMENTED)
def test_every_comment_stays_that_does_not_stand_on_a_removed_line(name: str) -> None:
    source = Source(name, COMMENTED[name])
    after, gone = mended(source, "accelerate" if name.endswith("yaml") else "prepkit")
    assert len(gone) >= 2
    before, now = (
        [text[start:end] for start, end in comments(text, source.suffix)] for text in (source.text, after.text)
    )
    assert now == [one for one in before if "gone" not in one]


@pytest.mark.parametrize(
    ("suffix", "text", "found"),
    [
        (
            ".yaml",
            "a: 'x # no'  # yes\nb: x#no\nc: |\n  # no\n# yes too\nd: \"it's # no\" # 3\n",
            ["# yes", "# yes too", "# 3"],
        ),
        (".yaml", "a: 'x # no'  # yes\nb: [\n", ["# yes"]),
        (".toml", 'a = \'x # no\'  # yes\nb = """\n# no\n"""\n', ["# yes"]),
        (".json", '{"a": "// no", // yes\n "b": 1 /* 2 */}', ["// yes", "/* 2 */"]),
        (".sh", "echo \"# no\" '# no' $# ${a#b}  # yes\ncat <<E\ndon't # no\nE\n# it's 2\n", ["# yes", "# it's 2"]),
        (".sh", "a=$((1 << b))  # yes\ncat <<A  # c\n# no\nA\ncat <<-'B'\n\t# no\n\tB\n# d", ["# yes", "# c", "# d"]),
    ],
)
def test_comments_are_told_from_strings(suffix: str, text: str, found: list[str]) -> None:
    assert [text[start:end] for start, end in comments(text, suffix)] == found


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o755])
def test_a_mended_file_keeps_its_mode_its_mark_and_its_ends_of_lines(folder: Path, mode: int) -> None:
    raw = b"\xef\xbb\xbf" + ACCELERATE.replace("\n", "\r\n").encode()
    Path("acc.yaml").write_bytes(raw)
    Path("acc.yaml").chmod(mode)
    assert "mended acc.yaml" in run("check", "acc.yaml", "--fix").stderr
    assert Path("acc.yaml").stat().st_mode & 0o7777 == mode
    now = Path("acc.yaml").read_bytes()
    assert now == raw.replace(b"  fsdp_reshard_after_forward: true\r\n", b"").replace(b"precison", b"precision")


def test_a_file_that_may_not_be_written_is_told_and_left(folder: Path) -> None:
    Path("acc.yaml").write_text(ACCELERATE)
    Path("acc.yaml").chmod(0o444)
    done = run("check", "acc.yaml", "--fix")
    assert "acc.yaml may not be written, and is left as it is: mixed_precison, " in done.stderr
    assert "findings are not mended" in done.stderr
    assert (Path("acc.yaml").read_text(), Path("acc.yaml").stat().st_mode & 0o777) == (ACCELERATE, 0o444)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["acc.yaml", "con f/a cc.yaml", 'con"f/ä.yaml'])
def test_what_is_shown_is_a_patch_that_git_applies(folder: Path, name: str, ending: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    for mark in ("", "\ufeff"):
        for end in ("", "\n\n\n"):
            text = (mark + ACCELERATE.rstrip() + end).replace("\n", ending)
            Path(name).write_bytes(text.encode())
            Path("made.patch").write_bytes(run("check", name, "--diff").stdout_bytes)
            assert run("check", name, "--fix").exit_code == 0
            meant = Path(name).read_bytes()
            for words in (("git", "apply"), ("patch", "-p1", "--binary", "-i")):
                Path(name).write_bytes(text.encode())
                if shutil.which(words[0]):
                    subprocess.run((*words, "made.patch"), check=True, capture_output=True)
                    assert Path(name).read_bytes() == meant


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
