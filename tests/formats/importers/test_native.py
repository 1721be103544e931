"""prepkit's own config files: what they mean, and what is said of the ones that mean nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import tomli_w

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FSDP2,
    SGD,
    AdamW,
    CheckpointBlocks,
    Clip,
    ClipNorm,
    ClipValue,
    CompileBlocks,
    CompileModel,
    Config,
    DeepSpeed,
    Mesh,
    TorchAO,
    WrapBlocks,
)
from prepkit.findings import Finding, PlanRejected
from prepkit.formats.importers import IMPORTERS, import_config
from prepkit.formats.importers.composed import DEEPEST, composed
from prepkit.formats.importers.native import read_config
from prepkit.formats.importers.source import READERS, read
from prepkit.formats.places import place_of
from prepkit.resolve.engines import ENGINES

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"

FSDP2_EXAMPLE = Config(
    engine=FSDP2(wrap=WrapBlocks(), reshard_after_forward=True),
    precision=BF16(reduce_dtype="float32"),
    compile=CompileBlocks(),
    checkpointing=CheckpointBlocks(),
    optimizer=AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
    accumulation=4,
    clip=ClipNorm(1.0),
)
DDP_EXAMPLE = Config(engine=DDP(bucket_cap_mb=50.0, static_graph=True), precision=BF16(), optimizer=AdamW(lr=3e-4))
FLOAT8_EXAMPLE = Config(engine=FSDP2(), precision=FP8(backend=TorchAO(recipe="tensorwise")))
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
ZERO3_EXAMPLE = Config(
    engine=DeepSpeed(stage=3, micro_batch=2, config={"zero_optimization": dict.fromkeys(BUCKETS, "auto")}),
    precision=BF16(),
    accumulation=4,
    clip=ClipNorm(1.0),
    optimizer=AdamW(lr=3e-4),
)
SINGLE_EXAMPLE = Config(compile=CompileModel(), optimizer=SGD(lr=0.1, momentum=0.9))


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refused(path: str) -> tuple[Finding, ...]:
    with pytest.raises(PlanRejected) as caught:
        read_config(path)
    return caught.value.findings


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fsdp2.toml", FSDP2_EXAMPLE),
        ("ddp.yaml", DDP_EXAMPLE),
        ("single.json", SINGLE_EXAMPLE),
        ("float8.toml", FLOAT8_EXAMPLE),
        ("zero3.yaml", ZERO3_EXAMPLE),
    ],
)
def test_an_example_means_the_config_that_it_says(name: str, expected: Config) -> None:
    assert read_config(str(EXAMPLES / name)) == expected


def test_every_example_is_tested_and_the_table_reaches_the_reader() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {
        "fsdp2.toml",
        "ddp.yaml",
        "single.json",
        "float8.toml",
        "zero3.yaml",
    }
    assert IMPORTERS["prepkit"].read(read(str(EXAMPLES / "single.json"))).config == SINGLE_EXAMPLE


def test_toml_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    toml = 'timeout_s = 60\n[engine]\nkind = "FSDP2"\n[mesh]\nreplicate = 2\n'
    yaml = "timeout_s: 60\nengine: {kind: FSDP2}\nmesh:\n  replicate: 2\n"
    data = {"timeout_s": 60, "engine": {"kind": "FSDP2"}, "mesh": {"replicate": 2}}
    paths = [
        write(tmp_path, "c.toml", toml),
        write(tmp_path, "c.yml", yaml),
        write(tmp_path, "c.json", json.dumps(data)),
    ]
    assert [read_config(path) for path in paths] == [Config(engine=FSDP2(), mesh=Mesh(replicate=2), timeout_s=60.0)] * 3


def test_yaml_is_yaml_1_2_so_no_is_a_word_and_5e8_a_number(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, "c.yaml", "timeout_s: 5e8\nbackend: NO\n")) == Config(
        timeout_s=5e8, backend="NO"
    )
    [found] = refused(write(tmp_path, "d.yaml", "engine: {kind: DDP, static_graph: yes}\n"))
    assert found.where.endswith("d.yaml:$.engine.static_graph")
    assert found.what == "'yes' is given where true or false is expected"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", "accumulation = 2.0\nclips = 1\nbackend = 3\n"),
        ("c.yaml", "accumulation: 2.0\nclips: 1\nbackend: 3\n"),
        ("c.json", '{"accumulation": 2.0, "clips": 1, "backend": 3}'),
    ],
)
def test_everything_that_is_wrong_is_said_at_once(name: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, text)
    found = {finding.where: (finding.what, finding.fix) for finding in refused(path)}
    assert found.keys() == {f"{path}:$.accumulation", f"{path}:$.clips", f"{path}:$.backend"}
    assert found[f"{path}:$.accumulation"] == ("2.0 is given where a whole number or null is expected", "write 2")
    assert found[f"{path}:$.clips"][1] == "write 'clip' instead"


CLIPS = {
    "c.toml": ("clip = 1.0", '{ kind = "ClipNorm", max_norm = 1.0 }', '{ kind = "ClipValue", max_value = 1.0 }'),
    "c.yaml": ("clip: 1.0", "{kind: ClipNorm, max_norm: 1.0}", "{kind: ClipValue, max_value: 1.0}"),
    "c.json": ('{"clip": 1.0}', '{"kind": "ClipNorm", "max_norm": 1.0}', '{"kind": "ClipValue", "max_value": 1.0}'),
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_fix_can_be_typed_as_it_is_in_the_language_of_the_file(name: str, tmp_path: Path) -> None:
    text, by_norm, by_value = CLIPS[name]
    [found] = refused(write(tmp_path, name, text))
    left_out = ", or leave the key out" if name.endswith("toml") else " or null"
    assert found.fix == f"write {by_norm} or {by_value}{left_out}"
    ways: list[tuple[str, Clip]] = [(by_norm, ClipNorm(1.0)), (by_value, ClipValue(1.0))]
    for fix, meant in ways + ([] if name.endswith("toml") else [("null", None)]):
        assert read_config(write(tmp_path, name, text.replace("1.0", fix))).clip == meant


FORMER = {
    "clip": "NoClip",
    "compile": "NoCompile",
    "checkpointing": "NoCheckpointing",
    "weights": "KeepWeights",
    "precision": "AsStored",
    "engine.offload": "KeepOnDevice",
    "engine.hook": "NoHook",
}


def test_the_former_name_of_a_kind_is_refused_with_the_new_one(tmp_path: Path) -> None:
    [found] = refused(write(tmp_path, "c.toml", 'weights = "SendWeights"\n'))
    assert (found.rule, found.fix) == ("codec.unknown-kind", 'write "BroadcastWeights"')
    [found] = refused(write(tmp_path, "c.toml", '[weights]\nkind = "SendWeights"\n'))
    assert (found.where.partition(":")[2], found.fix) == ("$.weights.kind", 'write "BroadcastWeights"')


@pytest.mark.parametrize("setting", FORMER)
@pytest.mark.parametrize("bare", [True, False])
def test_a_former_name_of_nothing_is_refused_with_what_to_write_now(setting: str, bare: bool, tmp_path: Path) -> None:
    engine, _, key = setting.rpartition(".")
    said: object = FORMER[setting] if bare else {"kind": FORMER[setting]}
    kind = "DDP" if key == "hook" else "FSDP2"
    data = {"engine": {"kind": kind, key: said}} if engine else {key: said}
    [found] = refused(write(tmp_path, "c.json", json.dumps(data)))
    assert (found.rule, found.where.partition(":")[2], found.fix) == (
        "codec.unknown-kind",
        f"$.{setting}",
        "write null",
    )
    assert "what asks for none of them is None" in found.what
    [found] = refused(write(tmp_path, "c.toml", tomli_w.dumps(data)))
    assert found.fix == "leave the key out"
    left_out = write(tmp_path, "c.toml", f'[engine]\nkind = "{kind}"\n')
    data = {"engine": {"kind": kind} | ({key: None} if engine else {})} | ({} if engine else {key: None})
    assert read_config(write(tmp_path, "c.json", json.dumps(data))) == read_config(left_out)


CLASSES, PATHS = '{ kind = "WrapClasses", names = ["%s"] }', '{ kind = "WrapPaths", patterns = ["%s"] }'


@pytest.mark.parametrize(
    ("text", "where", "fix"),
    [
        (
            'engine = { kind = "FSDP2", wrap = { kind = "WrapClasses", classes = ["Block"] } }',
            "engine.wrap.classes",
            "write 'names' instead",
        ),
        (
            'engine = { kind = "FSDP2", wrap = ["Block"] }',
            "engine.wrap",
            f'write {CLASSES % "Block"} or {PATHS % "Block"} or "WrapBlocks" or "WrapRoot"',
        ),
        (
            'engine = { kind = "FSDP2", wrap = "GPTLayer" }',
            "engine.wrap",
            f"write {CLASSES % 'GPTLayer'} or {PATHS % 'GPTLayer'}, or one of these names",
        ),
        ('optimizer = { kind = "AdamW", learning_rate = 0.1 }', "optimizer.learning_rate", "write 'lr' instead"),
        (
            'optimizer = { kind = "AdamW", no_decay = ["bias"] }',
            "optimizer.no_decay",
            "remove it: give an optimizer of your own with these groups, as in build_plan(cfg, model, optimizer=...)",
        ),
        ("clip = { max_norm = 2.0 }", "clip.kind", 'write { kind = "ClipNorm", max_norm = 2.0 }'),
        ("gradient_accumulation_steps = 4", "gradient_accumulation_steps", "write 'accumulation' instead"),
        ('precision = "BF16"\nmixed_precision = "no"', "mixed_precision", "remove it: 'precision' says it"),
        ('weights = "llama"', "weights", 'write { kind = "LoadWeights", path = "llama" }, or one of these names'),
        ("mesh = 4", "mesh", "write { replicate = 1, shard = -1, tensor = 1 }"),
        ('overrides = "a.b"', "overrides", 'put it into a list: ["a.b"]'),
    ],
)
def test_what_was_meant_is_proposed(text: str, where: str, fix: str, tmp_path: Path) -> None:
    found = refused(path := write(tmp_path, "c.toml", text))
    assert (f"{path}:$.{where}", fix) in [(one.where, one.fix) for one in found]


@pytest.mark.parametrize(
    ("name", "text", "rule", "what"),
    [
        ("c.toml", "a = [1,\nb = 2\n", "config.damaged", "not TOML at line 2, column 1: "),
        ("c.toml", "a = 1\na = 2\n", "config.damaged", "not TOML at line 2, column 6: Cannot overwrite a value"),
        ("c.yaml", "a: 1\n b: 2\n", "config.damaged", "not YAML at line 2, column 3: mapping values are not allowed"),
        ("c.yaml", "a: *b\n", "config.damaged", "not YAML at line 1, column 4: found undefined alias 'b'"),
        ("c.yaml", "a: 1\n---\nb: 1\n", "config.damaged", "not YAML at line 2, column 1: expected a single document"),
        ("c.yaml", "a: !!python/name:os.system x\n", "config.damaged", "not YAML at line 1, column 4: could not"),
        ("c.yaml", "a: 2024-13-45\n", "config.damaged", "a value cannot be read: month must be in 1..12"),
        ("c.yaml", "a: " + "[" * 1500, "config.damaged", "the values are nested too deeply to be read"),
        ("c.yaml", "[" * 20_000 + "]" * 20_000, "config.damaged", "the values are nested too deeply to be read"),
        ("c.yaml", "# nothing\n", "config.empty", "the file holds comments only"),
        ("c.json", '{"a": 1,\n "b" 2}', "codec.damaged", "not JSON at line 2, column 6: "),
        ("c.json", "[1]", "config.not-a-mapping", "the top level is a list, not a mapping of config fields"),
        ("c.yaml", "- a\n", "config.not-a-mapping", "the top level is a list, not a mapping of config fields"),
        ("c.yaml", "just words\n", "config.not-a-mapping", "the top level is a str, not a mapping of config fields"),
        ("c.toml", " \n\n", "config.empty", "the file is empty"),
        ("c.json", "", "config.empty", "the file is empty"),
        ("c.json", b'{"a": "\xff"}', "config.damaged", "byte 7 is not UTF-8: invalid start byte"),
        ("c.ini", "a = 1", "config.unknown-extension", "the file has the extension '.ini'"),
        ("config", "a = 1", "config.unknown-extension", "the file has no extension"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_it_stumbles(
    name: str, text: str | bytes, rule: str, what: str, tmp_path: Path
) -> None:
    path = write(tmp_path, name, text)
    [found] = refused(path)
    assert found.rule == rule
    assert found.where in (path, f"{path}:$")
    assert found.what.startswith(what)
    assert found.fix
    assert "plan again" not in found.fix


def test_an_empty_file_is_told_every_engine_that_may_be_written(tmp_path: Path) -> None:
    (found,) = refused(write(tmp_path, "c.yaml", ""))
    assert all(engine.__name__ in found.fix for engine in ENGINES)


def test_a_missing_file_and_a_folder_are_findings(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    for path in (str(tmp_path / "absent.toml"), str(tmp_path / "folder.toml")):
        [found] = refused(path)
        assert (found.rule, found.where) == ("config.unreadable", path)


def test_every_key_that_appears_twice_is_a_finding_with_its_lines(tmp_path: Path) -> None:
    text = "engine:\n  kind: DDP\n  kind: FSDP2\naccumulation: 1\nclip: null\naccumulation: 2\n"
    path = write(tmp_path, "c.yaml", text)
    assert [(one.rule, one.where, one.what) for one in refused(path)] == [
        ("config.duplicate-key", f"{path}:$.accumulation", "the key appears twice, in line 4 and in line 6"),
        ("config.duplicate-key", f"{path}:$.engine.kind", "the key appears twice, in line 2 and in line 3"),
    ]
    [found] = refused(write(tmp_path, "c.json", '{"engine": {"kind": "DDP", "kind": "FSDP2"}}'))
    assert (found.rule, found.where) == ("codec.duplicate-key", f"{tmp_path / 'c.json'}:$.engine.kind")
    assert found.what == "the key appears twice, in line 1 and in line 1"


def test_a_value_that_contains_itself_is_a_finding_and_a_shared_one_is_not(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "engine: &e\n  wrap: *e\n")
    assert [(one.rule, one.where) for one in refused(path)] == [("config.recursive", f"{path}:$.engine.wrap")]
    shared = (
        "compile: {kind: CompileBlocks, blocks: &b {kind: WrapBlocks}}\n"
        "checkpointing: {kind: CheckpointBlocks, blocks: *b}\n"
    )
    expected = Config(compile=CompileBlocks(), checkpointing=CheckpointBlocks())
    assert read_config(write(tmp_path, "d.yaml", shared)) == expected


def test_aliases_of_aliases_are_looked_at_once(tmp_path: Path) -> None:
    levels = [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    text = "\n".join(["a0: &a0 [x, x]", *levels])  # 2^60 items, written out
    assert {one.rule for one in refused(write(tmp_path, "c.yaml", text))} == {"config.too-large"}


def test_a_file_of_many_values_is_told_of_aliases_only_where_it_has_them(tmp_path: Path) -> None:
    plain = "".join(f"k{i}: v\n" for i in range(60_000))
    listed = f"a: [{', '.join('1' for _ in range(30_000))}]\n"
    shared = f"a: &a [{', '.join('1' for _ in range(1_000))}]\nb: [{', '.join('*a' for _ in range(100))}]\n"
    for text, what in ((plain, "it has"), (listed, "it has"), (shared, "with every alias written out it has")):
        (found,) = refused(write(tmp_path, "c.yaml", text))
        assert (found.rule, found.what) == ("config.too-large", f"{what} more than 20,000 values")
        assert ("alias" in found.fix) is ("alias" in what)


@pytest.mark.parametrize("name", ["c.yaml", "c.json", "c.toml"])
def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, "[" + "1, " * 700_000 + "1]")
    began = time.process_time()
    (found,) = refused(path)
    assert (found.rule, found.what) == ("config.unreadable", "the file has more than 1,048,576 bytes")
    assert time.process_time() - began < 0.5


def test_a_control_character_is_told_at_its_line_and_column(tmp_path: Path) -> None:
    (found,) = refused(write(tmp_path, "c.yaml", "engine: DDP\n\nab: x\x07y\n"))
    assert found.what == "not YAML at line 3, column 6: the character U+0007 is not allowed"
    assert str(place_of(found, "c.yaml", "x", ".yaml")) == "c.yaml:3:6"


HOSTILE: dict[str, tuple[str, str, str]] = {
    "a key of 50,000 parts": ("c.toml", ".".join("a" * 50_000) + "=1", "config.too-large"),
    "an integer of 5,000 digits": ("c.toml", "a = " + "9" * 5000, "config.damaged"),
    "one in YAML": ("c.yaml", "a: " + "9" * 5000, "config.damaged"),
    "a tag that does not fit": ("c.yaml", "a: !!bool maybe", "config.damaged"),
    "a list as key": ("c.yaml", "? [a, b]\n: 1", "config.damaged"),
    "a key that JSON has not": (
        "c.yaml",
        "engine: {kind: DeepSpeed, config: {? !!binary YQ== : 1}}",
        "config.damaged",
    ),
    "one key often": ("c.yaml", "a: 1\n" * 5000, "config.too-many"),
    "DeepSpeed's own in aliases of aliases": (
        "c.yaml",
        "engine:\n  kind: DeepSpeed\n  config:\n    a0: &a0 [x, x, x, x]\n"
        + "\n".join(f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)),
        "config.too-large",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_small_file_costs_little_and_gives_findings(what: str, tmp_path: Path) -> None:
    name, text, rule = HOSTILE[what]
    began = time.process_time()
    found = refused(write(tmp_path, name, text))
    assert time.process_time() - began < 30
    assert rule in {one.rule for one in found}
    assert len(found) <= 101


def test_a_name_with_a_null_is_unreadable() -> None:
    assert [one.rule for one in refused("a\0.toml")] == ["config.unreadable"]


def test_a_byte_order_mark_and_an_upper_case_extension_are_no_matter(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, "C.JSON", b'\xef\xbb\xbf{"accumulation": 3}')) == Config(accumulation=3)


def test_every_extension_reads_an_empty_mapping_as_the_defaults(tmp_path: Path) -> None:
    for extension in READERS:
        text = "# defaults\n" if extension == ".toml" else "{}"
        assert read_config(write(tmp_path, f"c{extension}", text)) == Config()


def test_options_of_the_compiler_are_written_as_a_table_or_one_by_one(tmp_path: Path) -> None:
    wanted = Config(compile=CompileModel(options={"max_autotune": True, "max_fusion_size": 8}))
    table = "{max_autotune = true, max_fusion_size = 8}"
    pairs = '[{name = "max_autotune", value = true}, {name = "max_fusion_size", value = 8}]'
    for written in (table, pairs):
        path = tmp_path / "options.toml"
        path.write_text(f'compile = {{kind = "CompileModel", options = {written}}}\n')
        assert read_config(str(path)) == wanted
    path.write_text('compile = {kind = "CompileModel", options = {max_autotune = [1]}}\n')
    with pytest.raises(PlanRejected, match=r"options"):
        read_config(str(path))


@pytest.mark.parametrize(("name", "text"), [("a.json", '{"lr": 0.1, "epochs": 3}'), ("b.yaml", "lr: 0.1\nepochs: 3\n")])
def test_a_file_that_is_nobodys_asks_whose_it_is(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(PlanRejected) as caught:
        import_config(file)
    [found] = caught.value.findings
    assert (found.rule, found.where) == ("config.unrecognised", str(file))
    assert found.what.endswith("'lr', 'epochs'")
    assert "--from" in found.fix


def test_so_many_collections_inside_each_other_are_read_and_one_more_is_not() -> None:
    assert composed("[" * DEEPEST + "]" * DEEPEST) is not None
    assert composed("- [1, {a: 2}]\n" * (2 * DEEPEST)) is not None, "beside each other"
    with pytest.raises(RecursionError, match=f"more than {DEEPEST} collections"):
        composed("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1))
