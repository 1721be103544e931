"""What plans of a config file for a model say; and ``prepkit check --model``: beside that all else that is found."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
from attrs import evolve

from prepkit import codec
from prepkit.cli import import_and_export as cli_import
from prepkit.cli import plan_files as cli_refusal
from prepkit.cli.check import data_in, line_of, lines_in, placed_data, places_in, tells, unknown_in, unknown_lines
from prepkit.cli.examined import Checked, examined
from prepkit.cli.options import Cluster
from prepkit.cli.terminal import say, say_json
from prepkit.cli.verdict import Verdict, findings_data, is_plan, judge, placed, verdicts_text
from prepkit.config import AdamW, Config, LoadWeights
from prepkit.facts import Facts, LoaderFacts
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.formats.found import Found
from prepkit.formats.importers import IMPORTERS
from prepkit.formats.importers.source import Imported
from prepkit.formats.places import FilePlace

OPTIMIZER, SAMPLES = "the optimizer", "the samples that a rank reads at once"
SCRIPTS = {"deepspeed.needs-optimizer": OPTIMIZER, "deepspeed.no-micro-batch": SAMPLES}
"""Rules about what a script gives to the library of a file, which is not wrong without it; and what that is."""
_FROM_SCRIPT = ("optimizer.none",)
"""The same where a plan is made all the same."""


def verdicts(
    config: str,
    model: str,
    cluster: Cluster,
    kind: str | None,
    started: Mapping[int, int | None] | None = None,
    *,
    suppose: bool = False,
) -> tuple[Verdict, ...]:
    """One per world size, each finding with its place in the file.

    The config is read first: a slip of the pen is told in a moment, and importing a model may take a minute.
    ``started``: as scripts start it. ``suppose``: what a script gives is taken to be there.

    Raises ``PlanRejected`` where config or model cannot be had, and a ``UsageError`` for a plan file.
    """
    read = cli_import.read(config, kind)
    refused = read if isinstance(read, PlanRejected) else None
    imported = read.rest if isinstance(read, PlanRejected) else read
    if refused is not None and is_plan(config):
        raise click.UsageError(f"{config} is a plan file: show it, or check it without --model")
    if not isinstance(imported, Imported):
        raise PlanRejected((*(refused.findings if refused else ()), cli_refusal.unasked(config, f"--model {model}")))
    cluster = cluster.filled_by(imported)
    envs, weights = cluster.envs(imported, started), imported.config.weights
    how = weights if isinstance(weights, LoadWeights) else None
    try:
        seen = cli_refusal.facts(model, envs[0], how)
    except PlanRejected as without:
        raise PlanRejected((*(refused.findings if refused else ()), *without.findings)) from None
    theirs = functools.partial(_supposing, seen_to=imported.seen_to)
    asked = judge if imported.kind == "prepkit" or not suppose else theirs
    every = (evolve(seen, env=env or seen.env, loaders=cluster.declared_loaders) for env in envs)
    configs = ((cluster.with_optimizer(imported.for_size(facts.env.world_size)), facts) for facts in every)
    return tuple(placed(asked(cfg, facts), imported, refused) for cfg, facts in configs)


def _supposing(cfg: Config, facts: Facts, seen_to: tuple[str, ...]) -> Verdict:
    """The verdict as it is once the script has given what it gives: which of it is there is not known here.

    ``seen_to``: rules whose harm the library of the file keeps away.
    """
    verdict = judge(cfg, facts)
    missing = tuple(dict.fromkeys(SCRIPTS[one.rule] for one in verdict.findings if one.rule in SCRIPTS))
    if OPTIMIZER in missing:
        cfg = evolve(cfg, optimizer=AdamW())
    if SAMPLES in missing:
        facts = evolve(facts, loaders=(LoaderFacts(batch_size=1, length=None, sampler="sequential"),))
    verdict = judge(cfg, facts) if missing else verdict
    kept_away = {*SCRIPTS, *_FROM_SCRIPT, *(seen_to if verdict.plan is not None else ())}
    findings = tuple(one for one in verdict.findings if one.rule not in kept_away)
    return evolve(verdict, findings=findings, supposed=missing)


def check_against(paths: tuple[str, ...], model: str, cluster: Cluster, kind: str | None, as_json: bool) -> NoReturn:
    """Check what is found as without the model, and plan each config for it, with the sizes that scripts start."""
    if len(paths) == 1 and is_plan(paths[0]):
        raise click.UsageError(f"{paths[0]} is a plan file: show it, or check it without --model")
    checked = _checked(paths, cluster, kind)
    parts = {_real(name) for one in checked for name in one.named}
    every: list[Verdict] = []
    told: list[dict[str, Any]] = []
    wrong = False
    for one in checked:
        part = one.found.kind == "deepspeed" and _real(one.found.path) in parts and not one.sizes
        made = _planned(one, model, cluster, kind, as_json) if one.found.sort == "config" and not part else ()
        more = _beside(one, made)
        every += made
        wrong |= any(finding.severity is Severity.ERROR for _, finding in more)
        if as_json:
            told += findings_data(made, data_in(one.found.path))
            told += [placed_data(*pair) | {"accepted": False, "world_sizes": []} for pair in more]
        elif made or more:
            head = [f"{one.found.path}:"] if len(checked) > 1 else []
            say("\n".join((*head, *(line_of(*pair) for pair in more)))) if head or more else None
            say_verdicts(made, file=one.found.path)
    if not every:
        if not wrong:
            raise click.UsageError(f"there is no config in {', '.join(paths)}")
        say(f"there is no config in {', '.join(paths)} that is planned", err=True)
    if as_json:
        say_json({"findings": told, "cannot_know": _not_known(tuple(every))})
    sys.exit(0 if not wrong and all(verdict.plan is not None for verdict in every) else 1)


def _checked(paths: tuple[str, ...], cluster: Cluster, kind: str | None) -> tuple[Checked, ...]:
    """What is found without the model; and what was named, though nothing else tells it to be a config."""
    once = len(paths) == 1 and not Path(paths[0]).is_dir() and not Path(paths[0]).is_file()  # a pipe, read once
    checked = () if once else tuple(examined(paths, cluster, kind))
    found = {one.found.path for one in checked}
    named = (path for path in paths if path not in found and not Path(path).is_dir())
    return (*checked, *(Checked(found=Found(path=path, sort="config", kind="", why="it was named")) for path in named))


def _planned(one: Checked, model: str, cluster: Cluster, kind: str | None, as_json: bool) -> tuple[Verdict, ...]:
    """What plans of the config say; ends the command where there is no such model."""
    file = one.found.path
    whose = one.found.kind if one.found.kind in IMPORTERS else None
    call = functools.partial(verdicts, file, model, cluster, kind or whose, one.sizes, suppose=True)
    made = cli_refusal.attempt(call)
    if not isinstance(made, PlanRejected):
        return made
    if any(finding.rule == cli_refusal.WRONG for finding in made.findings):
        cli_refusal.refuse((made,), as_json, err=False, line=lines_in(file), data=data_in(file))
    return (Verdict(world_size=1, plan=None, findings=made.findings),)


def _beside(one: Checked, made: tuple[Verdict, ...]) -> tuple[tuple[FilePlace, Finding], ...]:
    """What was found without the model, and is not said of its plans."""
    place = places_in(one.found.path)
    said = {(place(finding), finding.rule) for verdict in made for finding in (*verdict.findings, *verdict.accepted)}
    return tuple(pair for pair in one.findings if (pair[0], pair[1].rule) not in said)


def _real(path: str) -> str:
    return str(Path(path).resolve())


def tell(made: tuple[Verdict, ...], as_json: bool, file: str = "") -> NoReturn:
    """Say what the rules say, and end the command."""
    say_verdicts(made, as_json, file)
    sys.exit(0 if all(verdict.plan is not None for verdict in made) else 1)


def say_verdicts(made: tuple[Verdict, ...], as_json: bool = False, file: str = "") -> None:
    """``file``: the config that they are about, in which each finding has its place."""
    plan = next((verdict.plan for verdict in made if verdict.plan is not None), None)
    if as_json:
        data = data_in(file) if file else codec.to_data
        say_json({"findings": findings_data(made, data), "cannot_know": _not_known(made)})
    elif text := verdicts_text(made, _lines(file)):
        say(text)
    if plan is not None and not as_json:
        from prepkit import planner

        legal = ", ".join(str(verdict.world_size) for verdict in made if verdict.plan is not None)
        supposed = "".join(f", supposing {_SUPPOSED[what]}" for what in _supposed(made))
        say(f"a plan exists for world size {legal}{supposed}")
        if (costs := planner.costs(plan)) is not None:
            say(str(costs))
        unknown = _unknown(made)
        say("\n".join(("cannot know here:", *unknown_lines(unknown))) if unknown else "every rule could be asked")


def _lines(file: str) -> Callable[[Finding], str]:
    """What writes a finding at its place in the file; one about the model has none there."""
    if not file:
        return str
    line = lines_in(file)
    return lambda finding: str(finding) if finding.where.startswith("--model ") else line(finding)


_SUPPOSED = {OPTIMIZER: "AdamW", SAMPLES: "a sample at a time"}
"""What a script gives, and what is supposed of it."""


def _supposed(made: tuple[Verdict, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(what for verdict in made for what in verdict.supposed))


def _unknown(made: tuple[Verdict, ...]) -> Mapping[str, int]:
    """What rules would have to know beside the first plan, and how many; also what that plan supposes."""
    plan = next((verdict.plan for verdict in made if verdict.plan is not None), None)
    supposed = dict.fromkeys(_supposed(made), 1)
    return supposed | ({} if plan is None else dict(unknown_in(plan)))


def _not_known(made: tuple[Verdict, ...]) -> list[dict[str, Any]]:
    """The same as JSON data."""
    return [{"what": what, "rules": count, "tells": tells(what)} for what, count in _unknown(made).items()]
