"""Commands about bytes: the page of a plan, and the table over many layouts."""

from __future__ import annotations

import sys

import click
from attrs import evolve

from prepkit.cli import import_and_export as cli_import
from prepkit.cli import options as cli_options
from prepkit.cli import plan_files as cli_model
from prepkit.cli import plan_files as cli_refusal
from prepkit.cli.options import (
    FILE,
    Cluster,
    activations_option,
    as_json,
    cluster_options,
    kind_option,
    memory_option,
    model_option,
)
from prepkit.cli.terminal import say, say_json
from prepkit.findings import PlanRejected


@click.command(short_help="Write one page about one plan, or two.")
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option("-o", "--output", required=True, help="HTML file to write.")
@memory_option
@activations_option
def report(files: tuple[str, ...], output: str, memory: int | None, activations: int | None) -> None:
    """Write one page about a saved plan, or about two side by side. It needs no network and no script."""
    from prepkit.render.report import report as page

    if len(files) > 2:
        raise click.UsageError("a report shows one plan, or two side by side")
    cli_refusal.keep_inputs(files, (output,))
    cli_refusal.write(
        page(tuple(zip(files, cli_refusal.load(files, as_json=False), strict=True)), memory, activations), output
    )
    say(f"wrote {output}", err=True)


@click.command(short_help="Compare engines, meshes and sizes for one model.")
@click.argument("config", type=FILE)
@model_option(required=True)
@cluster_options
@kind_option
@click.option("--engine", "engines", type=click.Choice(cli_options.ENGINES), multiple=True, help="May be repeated.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of a micro-batch on a rank: batch x sequence.")
@click.option("--limit", type=click.IntRange(min=1), default=40, show_default=True, help="Rows to show.")
@as_json
def sweep(
    config: str,
    model: str,
    cluster: Cluster,
    kind: str | None,
    engines: tuple[str, ...],
    tokens: int | None,
    limit: int,
    as_json: bool,
) -> None:
    """Compare world sizes, meshes, engines and ZeRO stages for one model: what fits, what a rank holds and sends."""
    from prepkit.planner import sweep as table

    imported = cli_import.read(config, kind)
    if isinstance(imported, PlanRejected):  # before the model is imported, which may take a minute
        cli_refusal.refuse((imported, PlanRejected((cli_refusal.unasked(config),))), as_json)
    cluster = cluster.filled_by(imported)
    cfg, env = cluster.with_optimizer(imported.config), cluster.envs(imported)[0]
    facts = cli_refusal.attempt(lambda: cli_model.facts(model, env))
    if isinstance(facts, PlanRejected):
        cli_refusal.refuse((facts,), as_json)
    sizes = tuple(dict.fromkeys(cluster.sizes)) or (facts.env.world_size,)
    facts = evolve(facts, loaders=cluster.declared_loaders)
    tables = table.sweep(cfg, facts, sizes, engines or cli_options.ENGINES, tokens)
    if as_json:
        say_json(table.sweep_data(*tables))
    else:
        say(table.sweep_text(*tables, limit))
    sys.exit(0 if any(row.verdict != "does not fit" for row in tables[0]) else 1)
