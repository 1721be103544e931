"""Commands that bring configs in from other libraries."""

from __future__ import annotations

import os
import sys

import click

from prepkit.cli import plan_files as cli_refusal
from prepkit.cli.options import FILE, as_json, kind_option
from prepkit.cli.terminal import say, say_json
from prepkit.findings import PlanRejected
from prepkit.importers.imported import Imported


def read(config: str, kind: str | None) -> Imported | PlanRejected:
    """A config file of any library that there is an importer for, or why it is refused."""
    from prepkit.importers import IMPORTERS, import_config

    if kind is not None and kind not in IMPORTERS:
        raise click.UsageError(f"--from {kind}: there is no such importer; write one of {', '.join(IMPORTERS)}")
    return cli_refusal.attempt(lambda: import_config(config, kind))


def _variables() -> Imported | PlanRejected:
    from prepkit.importers.launcher_variables import read_variables

    return cli_refusal.attempt(lambda: read_variables(os.environ))


@click.command("import")
@click.argument("config", type=FILE, required=False)
@kind_option
@click.option("--env", is_flag=True, help="Read the variables that accelerate launch sets, in place of a file.")
@click.option("-o", "--output", help="Config file of prepkit to write: .toml, .yaml or .json.")
@as_json
def import_command(config: str | None, kind: str | None, env: bool, output: str | None, as_json: bool) -> None:
    """Read another library's config, and show, or write, the same as a config of prepkit.

    Every setting says which key, line and column it was read from. Unknown keys, and keys that contradict each other or
    do nothing, are findings.
    """
    from prepkit import codec
    from prepkit.exporters.native import config_text, settings_of
    from prepkit.render.findings import findings_text

    if env == (config is not None):
        raise click.UsageError("give a config file, or --env")
    imported = _variables() if config is None else read(config, kind)
    if isinstance(imported, PlanRejected):
        cli_refusal.refuse((imported,), as_json)
    if output:
        text = cli_refusal.attempt(lambda: config_text(imported.config, output))
        if isinstance(text, PlanRejected):
            cli_refusal.refuse((text,), as_json)
        cli_refusal.write(text, output)
    if as_json:
        say_json(
            {
                "kind": imported.kind,
                "config": settings_of(imported.config),
                "declared": {
                    name: getattr(imported, name)
                    for name in ("world_size", "per_node", "device")
                    if getattr(imported, name) is not None
                },
                "not_preparation": codec.to_data(imported.not_preparation),
                "findings": codec.to_data(imported.notes),
            }
        )
        sys.exit(0)
    if output:
        say(findings_text(imported.notes) if imported.notes else "", err=True)
        say(f"wrote {output}", err=True)
    else:
        say(str(imported))
