"""A team's policies: what they deny, warn of and except, in plans and at the gate; and what is wrong with a policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from prepkit import codec
from prepkit.findings import PlanRejected
from prepkit.formats.policy import Policy, judge, read_policies, recorded
from prepkit.predict.said import WHATS, said
from tests.support.command_line import MAKE, run, workplace
from tests.support.plans import ddp_plan, fsdp2_plan

TODAY = date(2026, 11, 25)
DENY = """
[[deny]]
id = "ours.memory"
what = "memory.at_most"
above = "1KiB"
because = "the nodes are small"
owner = "platform"
"""
WARN = """
[[warn]]
id = "ours.engine"
what = "engine"
not_in = ["FSDP2"]
because = "we know it best"
fix = "Write engine = FSDP2."
"""
EXCEPT = """
[[exception]]
rule = "ours.memory"
until = 2026-12-31
owner = "ana"
because = "the new nodes come in December"
"""
RULES = """
from prepkit.rules import Hit, Rule

def check(resolved):
    if resolved.facts.env.world_size > 1:
        yield Hit("env.world_size", f"it is {resolved.facts.env.world_size}")

RULES = (Rule(id="ours.alone", summary="One process.", check=check, fix="Start one."),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from workplace(tmp_path, monkeypatch)


def policy(folder: Path, text: str, name: str = "policy.toml") -> Policy:
    (folder / name).write_text(text)
    return read_policies((name,))


def places(folder: Path, text: str, name: str = "policy.toml") -> list[str]:
    with pytest.raises(PlanRejected) as refused:
        policy(folder, text, name)
    assert {finding.rule for finding in refused.value.findings} == {"policy.broken"}
    return [finding.where for finding in refused.value.findings]


def test_a_threshold_denies_and_warns_and_names_its_line(folder: Path) -> None:
    judged = judge(policy(folder, DENY + WARN), ddp_plan(), TODAY)
    ((denied,), (warned,)) = judged.denied, judged.warned
    assert (denied.rule, denied.where, denied.origin) == (
        "ours.memory",
        "plan.memory.at_most",
        "ours.memory in policy.toml:2:1",
    )
    assert "; it passes where it is at most 1.00 KiB: the nodes are small" in denied.what
    assert (warned.rule, warned.fix) == ("ours.engine", "Write engine = FSDP2.")
    assert judge(policy(folder, WARN), fsdp2_plan(), TODAY).warned == ()


@pytest.mark.parametrize(
    ("line", "breaks"),
    [
        ('what = "world_size"\nabove = 1', True),
        ('what = "world_size"\nabove = 100000', False),
        ('what = "world_size"\nbelow = 2', False),
        ('what = "engine"\nis = "DDP"', True),
        ('what = "engine"\nis_not = "DDP"', False),
        ('what = "engine"\nin = ["FSDP1", "DDP"]', True),
        ('what = "config.engine.kind"\nis = "DDP"', True),
        ('what = "overridden"\nhas = "mesh.not-world-size"', False),
        ('what = "config.clip.max_norm"\nis_not = 1.0', True),  # it does not clip at all
        ('what = "config.clip.max_norm"\nabove = 1', True),  # nobody knows: that is no pass
        ('what = "config.engine"\nis = "DDP"', True),
        ('what = "config.engine"\nis_not = "DDP"', False),
        ('what = "config.optimizer"\nin = ["AdamW"]', True),
        ('what = "config.optimizer"\nhas = "AdamW"', True),
        ('what = "config.optimizer.lr"\nabove = 1e-5', True),
        ('what = "config.optimizer.betas"\nis = [0.9, 0.999]', True),
        ('what = "config.precision"\nis_not = "BF16"', True),  # it has none
        ('what = "config.clip"\nnot_in = ["ClipValue"]', False),
        ('what = "config.engine.static_graph"\nis = true', False),
        ('what = "memory.at_most"\nin = ["1KiB"]', False),
    ],
)
def test_each_test_of_a_threshold_asks_what_it_says(folder: Path, line: str, breaks: bool) -> None:
    judged = judge(policy(folder, f'[[deny]]\nid = "ours.x"\nbecause = "y"\n{line}\n'), ddp_plan(), TODAY)
    assert bool(judged.denied) is breaks


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ('what = "world_size"\nabove = 1', "world_size is at most 1"),
        ('what = "world_size"\nbelow = 64', "world_size is at least 64"),
        ('what = "memory.at_most"\nabove = "1KiB"', "memory.at_most is at most 1.00 KiB"),
        ('what = "engine"\nis = "DDP"', "engine is not 'DDP'"),
        ('what = "engine"\nis_not = "FSDP2"', "engine is 'FSDP2'"),
        ('what = "engine"\nin = ["DDP"]', "engine is none of ['DDP']"),
        ('what = "engine"\nnot_in = ["FSDP2"]', "engine is one of ['FSDP2']"),
    ],
)
def test_a_threshold_that_is_broken_says_what_would_pass(folder: Path, line: str, passes: str) -> None:
    judged = judge(policy(folder, f'[[deny]]\nid = "ours.x"\nbecause = "y"\n{line}\n'), ddp_plan(), TODAY)
    (denied,) = judged.denied
    assert denied.fix == f"Change the config so that {passes}."
    assert denied.what.endswith(f"; it passes where it {passes.partition(' ')[2]}: y")


def test_a_list_that_has_what_it_may_not_have_says_so(folder: Path) -> None:
    text = '[[deny]]\nid = "ours.x"\nbecause = "y"\nwhat = "warnings"\nhas = "optimizer.none"\n'
    (threshold,) = policy(folder, text).thresholds
    ((found),) = threshold.ask({"warnings": ["optimizer.none"]})
    assert found.fix == "Change the config so that warnings does not have 'optimizer.none'."


@pytest.mark.parametrize(("what", "near"), [("memory.atmost", "memory.at_most"), ("shard", "mesh.shard"), ("zzz", "")])
def test_a_policy_about_what_no_plan_says_is_told_so_at_its_line(folder: Path, what: str, near: str) -> None:
    with pytest.raises(PlanRejected) as refused:
        policy(folder, DENY.replace("memory.at_most", what))
    (found,) = refused.value.findings
    assert (found.where, found.what) == ("policy.toml:4:1", f"a plan says no '{what}'")
    assert found.fix == f'Write "{near}".' if near else found.fix.startswith("Write one of engine, ")


def test_each_of_several_optimizers_is_asked_and_true_is_not_one(folder: Path) -> None:
    lines = ('what = "config.optimizer"\nis = "SGD"', 'what = "config.optimizer.lr"\nabove = 0.5')
    values = {"config": {"optimizer": [{"kind": "Muon", "lr": 0.1}, {"kind": "SGD", "lr": 1.0}]}}
    for line in lines:
        (threshold,) = policy(folder, f'[[deny]]\nid = "ours.x"\nbecause = "y"\n{line}\n').thresholds
        assert len(tuple(threshold.ask(values))) == 1
    reshard = '[[deny]]\nid = "ours.x"\nbecause = "y"\nwhat = "config.engine.reshard_after_forward"\nis = 1\n'
    (threshold,) = policy(folder, reshard).thresholds
    assert tuple(threshold.ask({"config": {"engine": {"reshard_after_forward": True}}})) == ()
    assert len(tuple(threshold.ask({"config": {"engine": {"reshard_after_forward": 1}}}))) == 1


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ('what = "config.clipp"\nis = 1', "config has no 'clipp'", 'Write "config.clip".'),
        ('what = "config.presicion"\nin = ["BF16"]', "config has no 'presicion'", 'Write "config.precision".'),
        ('what = "config.precision.knd"\nis = "FP8"', "precision has no 'knd'", 'Write "config.precision.kind".'),
        ('what = "config.engine.stage.x"\nis = 1', "config.engine.stage has no 'x'", 'Write "config.engine.stage"'),
        ('what = "config.engine"\nis = "FSPD2"', "and never 'FSPD2'", 'Write "FSDP2".'),
        ('what = "config.engine"\nin = []', "the list is empty", "Write what it may have."),
        (
            'what = "config.mesh"\nis = "x"',
            "config.mesh is no single value",
            "Ask about one of its settings: replicate",
        ),
        ('what = "config.average_each"\nis = 1', "and never 1", "Write true or false."),
        ('what = "config.precision"\nabove = 8', "and no number", "Write is, is_not, in or not_in."),
        ('what = "engine"\nin = ["DDP", "FSDP3"]', "and never 'FSDP3'", 'Write "FSDP2".'),
        ('what = "world_size"\nis = "8"', "world_size is a whole number, and never '8'", "Write a whole number."),
        ('what = "world_size"\nhas = 8', "world_size is no list", "Write is, or in with a list."),
        ('what = "warnings"\nis = "optimizer.none"', "and never 'optimizer.none'", 'Write has = "optimizer.none".'),
        ('what = "warnings"\nhas = "wrap.clas-not-found"', "no rule wrap.clas-", 'Write "wrap.class-not-found".'),
        ('what = "warnings"\nhas = "mesh.nosuch"', "there is no rule mesh.nosuch", "Write the id of a rule"),
        ('what = "overridden"\nis = ["mesh.nosuch"]', "there is no rule mesh.nosuch", "Write the id of a rule"),
        ('what = "config.overrides"\nhas = ""', "there is no rule ''", "Write the id of a rule"),
        ('what = "config.optimizer"\nis = "Adamw"', "and never 'Adamw'", 'Write "AdamW".'),
        ('what = "optimizer"\nis = "Adamw"', "optimizer is never 'Adamw'", 'Write "AdamW".'),
        ('what = "optimizer"\nnot_in = ["AdamW", ""]', "optimizer is never ''", 'Write "AdamW" or'),
        ('what = "device"\nis = "cudaa"', "device is never 'cudaa'", 'Write "cuda".'),
        ('what = "device"\nis = "gpu"', "device is never 'gpu'", 'Write "cpu" or "cuda" or'),
        ('what = "memory.at_most"\nabove = nan', "the same answer to nan", "Write a finite number."),
        ('what = "world_size"\nabove = inf', "the same answer to inf", "Write a finite number."),
        ('what = "config.clip.max_norm"\nbelow = -inf', "the same answer to -inf", "Write a finite number."),
        ('what = "config.clip.max_norm"\nin = [1.0, nan]', "the same answer to nan", "Write a finite number."),
        ('what = "world_size"\nbelow = 1', "world_size is never below 1", "Write at least 2."),
        ('what = "traffic.sent"\nbelow = 0', "traffic.sent is never below 0", "Write at least 1."),
        ('what = "world_size"\nin = [8, 0]', "world_size is never as low as 0", "Write at least 1."),
        ('what = "memory"\nabove = 8', "a plan says no 'memory'", "Write one of memory.for_certain, memory.at_most"),
    ],
)
def test_what_no_plan_can_break_is_refused_at_its_line(folder: Path, line: str, what: str, fix: str) -> None:
    with pytest.raises(PlanRejected) as refused:
        policy(folder, f'[[deny]]\nid = "ours.x"\nbecause = "y"\n{line}\n')
    (found,) = refused.value.findings
    assert found.where == f"policy.toml:{4 if 'has no' in what or 'says no' in what else 5}:1"
    assert (what in found.what, found.fix.startswith(fix)) == (True, True), found


@pytest.mark.parametrize("text", ["", "\n \n", "# later\n", "deny = []\n", "deny = []\nexception = []\n"])
def test_a_policy_that_asks_nothing_passes_nothing_and_is_told_how_to_ask(folder: Path, text: str) -> None:
    with pytest.raises(PlanRejected) as refused:
        policy(folder, text)
    (found,) = refused.value.findings
    assert (found.rule, found.where) == ("policy.broken", "policy.toml:1:1")
    assert found.what.startswith("it asks nothing")
    assert found.fix.startswith("Write [[deny]]")


def test_names_that_a_team_has_added_may_be_asked_about(folder: Path) -> None:
    ask = '[[deny]]\nid = "memory.ours"\nbecause = "y"\n'
    for line in (
        'what = "optimizer"\nis = "MyAdamW"',
        'what = "optimizer"\nis = "AdamW + Muon"',
        'what = "device"\nis = "tenstorrent"',
        'what = "world_size"\nabove = 0',
        'what = "overridden"\nhas = "memory.ours"',
        'what = "overridden"\nhas = "team.rule"',
    ):
        policy(folder, f"{ask}{line}\n")
    policy(folder, RULES.replace("ours.alone", "mesh.alone"), "rules.py")
    (folder / "policy.toml").write_text(f'{ask}what = "overridden"\nhas = "mesh.alone"\n')
    assert len(read_policies(("policy.toml", "rules.py")).asks) == 2
    assert len(places(folder, f'{ask}what = "overridden"\nhas = "mesh.alone"\n')) == 1


def test_the_paths_that_policies_may_name_are_those_that_a_plan_says() -> None:
    values = said(ddp_plan())
    assert len(set(WHATS)) == len(WHATS)
    assert {path.partition(".")[0] for path in WHATS} | {"config"} == set(values)
    for table in ("mesh", "memory", "traffic"):
        assert {path for path in WHATS if path.startswith(f"{table}.")} == {f"{table}.{name}" for name in values[table]}


def test_what_is_denied_warned_of_and_excepted_is_recorded_in_the_plan(folder: Path) -> None:
    with pytest.raises(PlanRejected) as refused:
        recorded(policy(folder, DENY + WARN), ddp_plan(), TODAY)
    assert "ours.memory" in str(refused.value)
    plan = recorded(policy(folder, DENY + WARN + EXCEPT), ddp_plan(), TODAY)
    again = codec.plan_from_text(codec.plan_to_text(plan))
    assert [finding.rule for finding in again.warnings][-1] == "ours.engine"
    assert again.overridden[-1].rule == "ours.memory"
    assert (
        "excepted until 2026-12-31 by ana: the new nodes come in December (policy.toml:" in again.overridden[-1].origin
    )
    with pytest.raises(PlanRejected):
        recorded(policy(folder, DENY + EXCEPT), ddp_plan(), date(2027, 1, 1))


def test_the_commands_ask_policies_in_toml_and_python(folder: Path) -> None:
    policy(folder, WARN)
    policy(folder, RULES, "rules.py")
    words = ("plan", "single.json", *MAKE, "--world-size", "1", "-o", "out.json", "--policy", "policy.toml")
    assert run(*words, "--policy", "rules.py").exit_code == 0
    assert [finding.rule for finding in codec.load_plan("out.json").warnings][-1] == "ours.engine"
    gate = run("gate", "ddp.json", "--strict", "--policy", "rules.py", "--format", "json")
    assert (gate.exit_code, [one["rule"] for one in json.loads(gate.stdout)["findings"]]) == (1, ["ours.alone"])
    assert run("gate", "one.json", "--strict", "--policy", "rules.py").exit_code == 0


def test_a_broken_policy_passes_nothing_and_names_its_line(folder: Path) -> None:
    assert places(folder, DENY.replace("above", "abov")) == ["policy.toml:5:1", "policy.toml:2:1"]
    assert places(folder, DENY.replace('"1KiB"', '"lots"')) == ["policy.toml:5:1"]
    assert places(folder, DENY.replace('because = "the nodes are small"\n', "")) == ["policy.toml:2:1"]
    assert places(folder, DENY + 'below = "2KiB"\n') == ["policy.toml:2:1"]
    assert places(folder, EXCEPT.replace("2026-12-31", '"2026-12-31"')) == ["policy.toml:4:1"]
    assert places(folder, EXCEPT.replace('owner = "ana"\n', "")) == ["policy.toml:2:1"]
    assert places(folder, "[[denied]]\nid = 1\n") == ["policy.toml:1:1"]
    assert places(folder, "RULES = (1,)", "rules.py") == ["rules.py:1:1"]
    assert places(folder, "RULES = ()", "rules.py") == ["rules.py:1:1"]
    assert places(folder, "RULES = []", "rules.py") == ["rules.py:1:1"]
    assert places(folder, "\nx = 1 / 0\n", "rules.py") == ["rules.py:2:1"]
    assert places(folder, "\n\nx = (\n", "rules.py") == ["rules.py:3:1"]
    assert places(folder, "RULES = ()\nraise SystemExit(0)\n", "rules.py") == ["rules.py:2:1"]
    assert places(folder, "package p", "p.rego") == ["p.rego"]
    (folder / "policy.toml").write_text("# ours\n[[deny]")
    for form in ("text", "json", "junit", "sarif", "github"):
        done = run("gate", "one.json", "fsdp2.toml", "--policy", "policy.toml", "--format", form)
        assert (done.exit_code, "policy.broken" in done.stdout, "policy.toml" in done.stdout) == (1, True, True), form
    assert places(folder, "# ours\n[[deny]") == ["policy.toml:2:7"]
    done = run("gate", "one.json", "--policy", "policy.toml", "--baseline", "known.json", "--write-baseline")
    assert (done.exit_code, (folder / "known.json").exists()) == (1, False)
    assert run("plan", "single.json", *MAKE, "--policy", "policy.toml").exit_code == 1


def test_a_rule_that_raises_passes_nothing(folder: Path) -> None:
    policy(folder, RULES.replace("> 1", "> 'x'"), "rules.py")
    gate = run("gate", "one.json", "--strict", "--policy", "rules.py", "--format", "json")
    (found,) = (one for one in json.loads(gate.stdout)["findings"] if one["severity"] == "error")
    assert (gate.exit_code, found["rule"]) == (1, "policy.broken")
    assert found["where"].endswith("rules.py:5")
    assert run("plan", "single.json", *MAKE, "--policy", "rules.py").exit_code == 1
    policy(folder, RULES.replace("> 1", "> exit(0)"), "rules.py")
    assert run("gate", "one.json", "--strict", "--policy", "rules.py").exit_code == 1


def test_hostile_policies_are_bounded_and_name_no_code(folder: Path) -> None:
    (folder / "policy.toml").write_text("#" * (2**20 + 1))
    with pytest.raises(PlanRejected, match="more than"):
        read_policies(("policy.toml",))
    many = "[[deny]]\n" * 1001
    assert len(places(folder, many)) == 1
    (folder / "ran.py").write_text("raise SystemExit(1)")
    assert places(folder, 'python = ["ran.py"]\n') == ["policy.toml:1:1"]


def test_a_plan_says_every_value_that_policies_are_promised() -> None:
    values = said(ddp_plan())
    assert set(values) == {
        *("engine", "world_size", "per_node", "device", "mesh", "global_batch", "accumulation", "optimizer"),
        *("parameters", "memory", "traffic", "warnings", "overridden", "config"),
    }
    assert 0 < values["memory"]["for_certain"] <= values["memory"]["at_most"]


def test_a_policy_knows_the_optimizer_that_the_config_asks_for(folder: Path) -> None:
    """As well as one that was given; ``prepkit plan`` and ``prepkit gate`` see none but that of the config."""
    json_of = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "optimizer": {"type": "Lion"}}'
    ours = '[[deny]]\nid = "ours.o"\nwhat = "optimizer"\nis_not = "AdamW"\nbecause = "x"\n'
    (folder / "p.toml").write_text(ours)
    for text, named in (
        ('engine = "DDP"\noptimizer = "AdamW"\n', ""),
        ('engine = "DDP"\noptimizer = "SGD"\n', "optimizer is 'SGD'"),
        (f"[engine]\nkind = 'DeepSpeed'\nconfig = '{json_of}'\n", "optimizer is 'Lion'"),
        (f"[engine]\nkind = 'DeepSpeed'\nconfig = '{json_of.replace('Lion', 'adamw')}'\n", ""),
    ):
        (folder / "c.toml").write_text(text)
        done = run("plan", "c.toml", *MAKE, "--world-size", "2", "--device", "cuda", "--policy", "p.toml")
        assert (named in done.stderr, "ours.o" in done.stderr) == (True, bool(named)), done.stderr


def test_a_policy_without_a_plan_is_not_taken_for_passed(folder: Path) -> None:
    policy(folder, DENY)
    words = ("gate", "fsdp2.toml", "--policy", "policy.toml")
    done = run(*words)
    assert done.exit_code == 0
    assert "policy.toml:1:1: error policy.unasked: no plan was judged" in done.stdout
    make = "prepkit plan fsdp2.toml --model PKG.MOD:FACTORY -o plan.json --policy policy.toml"
    assert f"fix: Make one: {make}, then: prepkit gate plan.json --policy policy.toml" in done.stdout
    assert run(*words, "--strict").exit_code == 1
    assert run(*words, "--baseline", "known.json", "--write-baseline").exit_code == 0
    assert run(*words, "--strict", "--baseline", "known.json").exit_code == 1  # what was not asked has not passed
    (folder / "torn.json").write_text((folder / "one.json").read_text()[:-9] + "\n")
    said = run("gate", "torn.json", "--policy", "policy.toml", "--format", "json").stdout
    assert {one["rule"] for one in json.loads(said)["findings"]} >= {"codec.damaged", "policy.unasked"}
    assert "policy.unasked" not in run("gate", "one.json", "fsdp2.toml", "--policy", "policy.toml").stdout
    policy(folder, EXCEPT)
    assert "policy.unasked" not in run(*words).stdout  # exceptions are about files too


def test_an_exception_of_a_rule_that_there_is_not_is_told(folder: Path) -> None:
    policy(folder, DENY + EXCEPT.replace("ours.memory", "ours.memry"))
    said = run("gate", "ddp.json", "--policy", "policy.toml", "--on", "2026-12-30").stdout
    assert "note gate.exception-unused: there is no rule ours.memry, so that its exception excepts nothing" in said
    assert "fix: Write ours.memory." in said
    policy(folder, DENY + EXCEPT.replace("ours.memory", "import.no-effect"))
    said = run("gate", "ddp.json", "--policy", "policy.toml", "--on", "2026-12-30").stdout
    assert "exception-unused" not in said  # it may be about other files than these


DEEPSPEED = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 2.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}
LEFT = DEEPSPEED | {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
TRAINER = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\nbf16: true\nmax_grad_norm: 2.0\n"
ACCELERATE = (
    "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 2\nnum_machines: 1\ndeepspeed_config:\n"
)
KEYS = "  zero_stage: 3\n  offload_optimizer_device: cpu\n  gradient_accumulation_steps: 8\n  gradient_clipping: 2.0\n"
OWN = "precision = 'BF16'\naccumulation = 8\nclip = { kind = 'ClipNorm', max_norm = 2.0 }\n"
WRITTEN = {
    "whole.json": json.dumps(DEEPSPEED),
    "own.toml": f"{OWN}[engine]\nkind = 'DeepSpeed'\nconfig = '{json.dumps(DEEPSPEED)}'\n",
    "trainer.yaml": f"output_dir: o\n{TRAINER}learning_rate: 0.001\ndeepspeed: left.json\n",
    "axolotl.yml": "base_model: m\ndatasets: [{path: d, type: alpaca}]\nmicro_batch_size: 4\n"
    "gradient_accumulation_steps: 8\nbf16: true\nmax_grad_norm: 2.0\nlearning_rate: 0.001\ndeepspeed: left.json\n",
    "accelerate.yaml": f"{ACCELERATE}  deepspeed_config_file: whole.json\n",
    "keys.yaml": f"{ACCELERATE}{KEYS}",
}
"""One training, as six files say it."""


@pytest.mark.parametrize("name", WRITTEN)
def test_a_threshold_binds_whatever_file_says_what_deepspeed_does(folder: Path, name: str) -> None:
    for file, text in {**WRITTEN, "left.json": json.dumps(LEFT)}.items():
        (folder / file).write_text(text)
    tests = {
        "engine.stage": "above = 2",
        "engine.offload_optimizer": 'is = "cpu"',
        "engine.micro_batch": "above = 3",
        "clip.max_norm": "above = 1",
        "optimizer.lr": "above = 1e-4",
        "optimizer": 'is = "AdamW"',
    }
    rows = {f"ours.{what}": f"what = 'config.{what}'\n{test}" for what, test in tests.items()}
    rows["ours.batch"] = "what = 'global_batch'\nabove = 16"
    (folder / "p.toml").write_text(
        "".join(f"[[deny]]\nid = '{one}'\n{row}\nbecause = 'x'\n" for one, row in rows.items())
    )
    cluster = ("--world-size", "2", "--device", "cuda", "--batch-size", "4", "--optimizer", "AdamW")
    done = run("plan", name, *MAKE, *cluster, "--policy", "p.toml", "--json")
    found = {one["rule"]: one["what"] for one in json.loads(done.stdout)["findings"]}
    assert {one for one in found if one.startswith("ours.")} == set(rows), found
    assert found["ours.engine.stage"].startswith("config.engine.stage is 3; ")
    assert found["ours.batch"].startswith("global_batch is 64; ")
