"""The command line. Exit codes: 0 fine, 1 findings or differences, 2 used wrongly, 3 a script failed, 4 nothing proven.

Heavy modules are imported inside the commands: torch only by those that look at a model.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from attrs import asdict

from prepkit.cli import audit as cli_audit
from prepkit.cli import compare as cli_files
from prepkit.cli import doctor as cli_doctor
from prepkit.cli import gate as cli_gate
from prepkit.cli import import_and_export as cli_import
from prepkit.cli import init as cli_init
from prepkit.cli import plan_files as cli_model
from prepkit.cli import plan_files as cli_refusal
from prepkit.cli import records as cli_records
from prepkit.cli import report_and_sweep as cli_bytes
from prepkit.cli import terminal as cli_terminal
from prepkit.cli.options import (
    FILE,
    MOST,
    SIZE,
    Cluster,
    as_json,
    cluster_options,
    kind_option,
    model_option,
    object_option,
    policy_option,
)
from prepkit.cli.terminal import say, say_json
from prepkit.findings import PlanRejected
from prepkit.version import VERSION

if TYPE_CHECKING:
    from prepkit.cli.verdict import Verdict
    from prepkit.plan import Plan
    from prepkit.plan.attestation import Attestation
    from prepkit.rules.rule import Rule

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="prepkit")
def main() -> None:
    """Plan, look, apply, verify: PyTorch models prepared for training without surprises.

    Exit codes: 0 fine, 1 findings or differences, 2 used wrongly. Of audit also 3, where the script itself failed, and
    of audit --prove and prove 4, where nothing seen is wrong and the window could not be proven.
    """
    cli_terminal.forgive()


# --- plan and check ------------------------------------------------------------------------------------------------


@main.command(short_help="Plan a model's preparation; show or save the plan.")
@click.argument("config", type=FILE)
@model_option(required=True)
@cluster_options
@kind_option
@policy_option
@click.option("-o", "--output", help=f"Plan file to write; {SIZE} in it stands for the world size.")
@as_json
def plan(
    config: str,
    model: str,
    cluster: Cluster,
    kind: str | None,
    policies: tuple[str, ...],
    output: str | None,
    as_json: bool,
) -> None:
    """Plan a model's preparation, for the environment that is here or a declared one, and show or save the plan.

    CONFIG is a file of prepkit, accelerate or DeepSpeed; one that says how many processes it starts is planned for
    as many. What a policy denies is refused, and what it warns of or excepts is recorded in the plan. Nothing is
    written if any of the world sizes is refused.
    """
    from prepkit import codec
    from prepkit.cli.against import verdicts as planned
    from prepkit.cli.check import data_in
    from prepkit.cli.verdict import findings_data, recorded_in, verdicts_text
    from prepkit.render.plan import plan_text

    if output and len(set(cluster.sizes)) > 1 and SIZE not in output:
        raise click.UsageError(f"several world sizes need several files: write {SIZE} into -o, as in plan-{SIZE}.json")
    asked = tuple(output.replace(SIZE, str(size)) for size in cluster.sizes or (1,)) if output else ()
    cli_refusal.keep_inputs((config,), asked)
    policy = cli_refusal.policy(policies, as_json)  # before the model is imported, which may take a minute
    made = cli_refusal.attempt(lambda: planned(config, model, cluster, kind))
    if isinstance(made, PlanRejected):
        cli_refusal.refuse((made,), as_json, data=data_in(config))
    verdicts = tuple(map(partial(recorded_in, policy, config), made))
    plans = tuple((verdict.world_size, verdict.plan) for verdict in verdicts if verdict.plan is not None)
    legal = len(plans) == len(verdicts)
    files = {size: output.replace(SIZE, str(size)) for size, _ in plans} if output and legal else {}
    for size, made_plan in plans:
        if size in files:
            cli_refusal.save(made_plan, files[size])
    if as_json:
        texts = {size: None if files else json.loads(codec.plan_to_text(made_plan)) for size, made_plan in plans}
        entries = [{"world_size": size, "file": files.get(size), "plan": data} for size, data in texts.items()]
        say_json({"plans": entries, "findings": findings_data(verdicts, data_in(config))})
    elif legal and not files:
        say("\n\n".join(plan_text(made_plan) for _, made_plan in plans))
    else:
        parts = (verdicts_text(verdicts), "" if legal else f"no plan was {'written' if output else 'made'}")
        say("\n".join((*filter(None, parts), *(f"wrote {file}" for file in files.values()))), err=True)
    sys.exit(0 if legal else 1)


@main.command("check", short_help="Check configs, launch scripts and plan files against the rules.")
@click.argument("paths", metavar="[PATH ...]", type=click.Path(exists=True), nargs=-1)
@model_option()
@cluster_options
@kind_option
@click.option("--fix", is_flag=True, help="Mend what is safe to mend, before anything is checked.")
@click.option("--diff", "as_diff", is_flag=True, help="Show what --fix would change, and change nothing.")
@as_json
def check_command(
    paths: tuple[str, ...],
    model: str | None,
    cluster: Cluster,
    kind: str | None,
    fix: bool,
    as_diff: bool,
    as_json: bool,
) -> None:
    """Check what lies at each PATH, a file or a folder; without one, here.

    Finds configs of prepkit, accelerate, DeepSpeed, transformers, axolotl, LLaMA-Factory and torchtitan, plan files,
    and the scripts that start them. Without --model every rule is asked that can be asked without one, and what cannot
    be known here is said. Warnings are shown; only errors that are not overridden give exit code 1. --fix removes keys
    without effect, where all that is read stays as it is, mends the spelling of keys that their library refuses, and
    gives values of prepkit's own files, and of DeepSpeed's JSON, the type that they should have, where they can mean
    one thing only.
    """
    from prepkit.cli.against import check_against, tell
    from prepkit.cli.check import check_files, mend_files
    from prepkit.cli.verdict import is_plan

    paths = paths or (".",)
    if fix or as_diff:
        mend_files(paths, cluster, kind, as_diff)
    if model:
        check_against(paths, model, cluster, kind, as_json)
    only = paths[0]
    if len(paths) == 1 and kind is None and (is_plan(only) or not (Path(only).is_file() or Path(only).is_dir())):
        tell((_verdict_on_file(paths[0], cluster, as_json),), as_json, only if as_json else "")
    check_files(paths, cluster, kind, as_json)


def _verdict_on_file(file: str, cluster: Cluster, as_json: bool) -> Verdict:
    from prepkit import codec
    from prepkit.cli.verdict import judge

    loaded = cli_refusal.attempt(lambda: codec.load_plan(file))
    if isinstance(loaded, PlanRejected):
        from prepkit.cli.check import data_in

        cli_refusal.refuse((loaded, PlanRejected((cli_refusal.unasked(file),))), as_json, err=False, data=data_in(file))
    if cluster.envs() != (None,) or cluster.declared_loaders or cluster.optimizer is not None:
        raise click.UsageError("a plan file carries its environment: --world-size and the like go with --model")
    return judge(loaded.config, loaded.facts)


# --- show, diff, rules, rehearse -----------------------------------------------------------------------------------


@main.command(short_help="Show a saved plan or attestation.")
@click.argument("file", type=FILE)
@click.option("--sources", is_flag=True, help="Add the behaviour rows that each step answers.")
@as_json
def show(file: str, as_json: bool, sources: bool) -> None:
    """Show a saved plan or attestation."""
    from prepkit.codec import files as codec_files
    from prepkit.render.text import text_of

    loaded = _files((file,), as_json)[0]
    say(codec_files.to_text(loaded).rstrip("\n") if as_json else text_of(loaded, sources=sources))


@main.command(short_help="Show what turns one saved plan into another, or one revision.")
@click.argument("what", metavar="OLD NEW | BASE..HEAD [PATH ...]", nargs=-1, required=True)
@model_option()
@cluster_options
@click.option("--comment", is_flag=True, help="Of two revisions: print Markdown for a comment on a pull request.")
@as_json
def diff(what: tuple[str, ...], model: str | None, cluster: Cluster, comment: bool, as_json: bool) -> None:
    """Show what turns one saved plan, or attestation, into another; exit code 1 if they differ.

    BASE..HEAD are two revisions of the git repository here, BASE...HEAD begins where the two have parted: of each
    config, script and plan file that changed, memory, traffic between nodes and global batch where a plan can be made,
    and what is trained differently. Plans of configs are made with --model, and for the cluster that is declared.
    """
    from prepkit import codec
    from prepkit.cli import revisions

    if revisions.is_range(what):
        every = revisions.changed(what, revisions.planner(model, cluster), cluster)
        if as_json:
            say_json({"files": revisions.data_of(every)})
        else:
            say(revisions.comment_of(every, what[0]) if comment else revisions.text_of(every))
        sys.exit(1 if every else 0)
    if len(what) != 2 or comment or model:
        raise click.UsageError("give two files that prepkit wrote, or two revisions such as main..HEAD")
    for file in what:
        FILE.convert(file, None, click.get_current_context())
    before, after = _files(what, as_json)
    changes = cli_files.changes(before, after)
    if as_json:
        say_json({"changes": [{"kind": type(change).__name__} | codec.to_data(change) for change in changes]})
    else:
        say(cli_files.told(before, changes))
    sys.exit(1 if changes else 0)


@main.command(short_help="List every rule, or say all about one.")
@click.argument("rule_id", metavar="[ID]", required=False)
@as_json
def rules(rule_id: str | None, as_json: bool) -> None:
    """List every rule, and every reason for which a file, a call or a model is refused; or say all about one."""
    from prepkit.render.text import rule_text, rules_text
    from prepkit.rules import LAW

    known = {rule.id: rule for rule in LAW}
    if rule_id is not None and rule_id not in known:
        from difflib import get_close_matches

        near = get_close_matches(rule_id, known, n=1)
        raise click.UsageError(f"no rule {rule_id!r}; {f'did you mean {near[0]!r}?' if near else 'see: prepkit rules'}")
    chosen = (known[rule_id],) if rule_id else tuple(known.values())
    if as_json:
        say_json({"rules": [_rule_data(rule) for rule in chosen]})
    elif rule_id:
        say(rule_text(known[rule_id], _example(known[rule_id])))
    else:
        say(rules_text(chosen))


@main.command(short_help="Print the JSON Schema of a file, for editors.")
@click.argument("name", type=click.Choice(("config", "plan", "findings", "attestation", "deepspeed", "accelerate")))
def schema(name: str) -> None:
    """Print the JSON Schema (2020-12) of a config, a plan, findings, an attestation, or of DeepSpeed and accelerate."""
    from prepkit.formats.schemas import SCHEMAS

    say_json(SCHEMAS[name]())


@main.command(short_help="Run a plan on a copy of the model without weights.")
@click.argument("file", type=FILE)
@object_option
@click.option("--rank", type=click.IntRange(0, MOST), default=0, show_default=True, help="Whose part to rehearse.")
@as_json
def rehearse(file: str, model: str, rank: int, as_json: bool) -> None:
    """Run a saved plan on a copy of the model without weights, on this machine, and compare what stands there."""
    cli_model.demand_torch("prepkit rehearse")
    from prepkit.applying.rehearse import RehearsalFailed
    from prepkit.applying.rehearse import rehearse as run

    loaded = cli_refusal.load((file,), as_json)[0]
    if rank >= loaded.world_size:
        raise click.UsageError(f"the plan is for ranks 0 to {loaded.world_size - 1}; there is no rank {rank}")
    try:
        outcome = cli_refusal.attempt(lambda: run(loaded, cli_model.build(model), rank=rank))
    except RehearsalFailed as failed:
        raise click.UsageError(f"the rehearsal could not be held: {failed}") from None
    if isinstance(outcome, PlanRejected):
        cli_refusal.refuse((outcome,), as_json)
    if as_json:
        say_json(asdict(outcome) | {"fine": outcome.fine})
    else:
        say(str(outcome))
    sys.exit(0 if outcome.fine else 1)


main.add_command(cli_audit.audit)
main.add_command(cli_gate.gate)
main.add_command(cli_init.init)
main.add_command(cli_doctor.doctor)
main.add_command(cli_records.statement)
main.add_command(cli_records.log)
main.add_command(cli_records.blame)
main.add_command(cli_audit.prove)
main.add_command(cli_audit.bisect)
main.add_command(cli_import.import_command)
main.add_command(cli_import.export_command)
main.add_command(cli_bytes.report)
main.add_command(cli_bytes.sweep)


# --- pieces --------------------------------------------------------------------------------------------------------


def _files(files: tuple[str, ...], as_json: bool) -> tuple[Plan | Attestation, ...]:
    """The plans and attestations in the files; ends the command likewise."""
    return cli_refusal.readable(cli_files.load(files), as_json)


def _rule_data(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "severity": rule.severity.value,
        "summary": rule.summary,
        "fix": rule.fix,
        "at": tuple(moment.name.lower() for moment in rule.at),
        "needs": tuple(need.name.lower() for need in rule.needs),
        "overridable": rule.overridable,
        "repairs": rule.repair is not None,
        "source": rule.source,
        "told_by": rule.told_by,
    }


def _example(rule: Rule) -> str:
    """A call that breaks the rule, where one line does; the reference page has a finding of every other."""
    if rule.id == "memory.exceeds-host":
        return "env=pk.Env.declare(world_size=8, per_node=8, host_memory='1MiB') breaks it"
    if rule.id.startswith("memory."):
        return "pk.fits(plan, memory='1MiB') breaks it, and says what would fit"
    return ""
