"""Commands that bring configs in from other libraries, and back."""

from __future__ import annotations

import os
import re
import sys

import click
from attrs import evolve

from prepkit.cli import plan_files as cli_refusal
from prepkit.cli.options import FILE, MOST, as_json, kind_option
from prepkit.cli.terminal import say, say_json
from prepkit.facts import Env
from prepkit.findings import PlanRejected, errors
from prepkit.formats.importers.source import Imported


def read(config: str, kind: str | None) -> Imported | PlanRejected:
    """A config file of any library that there is an importer for, or why it is refused."""
    from prepkit.formats.importers import IMPORTERS, import_config

    if kind is not None and kind not in IMPORTERS:
        raise click.UsageError(f"--from {kind}: there is no such importer; write one of {', '.join(IMPORTERS)}")
    return cli_refusal.attempt(lambda: import_config(config, kind))


def _whole(imported: Imported | PlanRejected) -> Imported | PlanRejected:
    """The same, or why it is refused: a JSON of DeepSpeed in it, which is kept as text, is judged by the rules."""
    from prepkit.rules.deepspeed import DAMAGE
    from prepkit.rules.without_model import ask

    if isinstance(imported, PlanRejected):
        return imported
    said = ask(imported.config, Env.declare(world_size=1), frozenset(), rules=DAMAGE).findings
    return PlanRejected((*imported.notes, *map(imported.worded, said))) if errors(said) else imported


def _left_behind(imported: Imported, text: str, name: str) -> None:
    """Says in one list which keys of the file are not in the text that is made of it."""
    written = set(re.findall(r'^\s*"?([\w-]+)"?:', text, re.MULTILINE))
    keys = [one.key for one in imported.not_preparation if one.key.rpartition(".")[2] not in written]
    if keys:
        say(f"not in {name}, as they are no preparation: {', '.join(dict.fromkeys(keys))}", err=True)


def _variables() -> Imported | PlanRejected:
    from prepkit.formats.importers.accelerate import read_variables

    return cli_refusal.attempt(lambda: read_variables(os.environ))


@click.command("import", short_help="Read another library's config.")
@click.argument("config", type=FILE, required=False)
@kind_option
@click.option(
    "--world-size", "size", type=click.IntRange(1, MOST), help="Processes in all, where CONFIG leaves them open."
)
@click.option("--env", is_flag=True, help="Read the variables that accelerate launch sets, in place of a file.")
@click.option("-o", "--output", help="Config file of prepkit to write: .toml, .yaml or .json.")
@as_json
def import_command(
    config: str | None, kind: str | None, size: int | None, env: bool, output: str | None, as_json: bool
) -> None:
    """Read another library's config, and show, or write, the same as a config of prepkit.

    Every setting says which key, line and column it was read from. Unknown keys, and keys that contradict each other or
    do nothing, are findings.
    """
    from prepkit import codec
    from prepkit.formats.exporters.exported import config_text, settings_of
    from prepkit.render.text import findings_text

    if env == (config is not None):
        raise click.UsageError("give a config file, or --env")
    imported = _whole(_variables() if config is None else read(config, kind))
    if isinstance(imported, PlanRejected):
        cli_refusal.refuse((imported,), as_json)
    if size:
        imported = evolve(imported, config=imported.for_size(size), world_size=size, at={})
    if output:
        text = cli_refusal.attempt(lambda: config_text(imported.config, output))
        if isinstance(text, PlanRejected):
            cli_refusal.refuse((PlanRejected((*imported.notes, *text.findings)),), as_json)
        cli_refusal.write(text, output)
    if as_json:
        say_json(
            {
                "kind": imported.kind,
                "config": settings_of(imported.config),
                "at": {str(one): settings_of(config) for one, config in imported.at.items()},
                "declared": {
                    name: getattr(imported, name)
                    for name in ("world_size", "per_node", "device")
                    if getattr(imported, name) is not None
                },
                "not_preparation": codec.to_data(imported.not_preparation),
                "unchanged": codec.to_data(imported.unchanged),
                "findings": codec.to_data(imported.notes),
            }
        )
        sys.exit(0)
    if output:
        say(findings_text(imported.notes) if imported.notes else "", err=True)
        _left_behind(imported, "", output)
        say(f"wrote {output}", err=True)
    else:
        say(str(imported))


@click.command("export", short_help="Write a config as another library's file.")
@click.argument("config", type=FILE)
@kind_option
@click.option("--to", required=True, metavar="LIBRARY", help="accelerate, deepspeed or transformers.")
@click.option("--world-size", type=click.IntRange(1, MOST), help="Processes in all; else as many as CONFIG says.")
@click.option("--per-node", type=click.IntRange(1, MOST), help="Processes on one machine.")
@click.option("--partial", is_flag=True, help="Leave out, and say, what that library's file cannot say.")
@click.option("-o", "--output", help="File to write; without it the text is printed.")
def export_command(
    config: str,
    kind: str | None,
    to: str,
    world_size: int | None,
    per_node: int | None,
    partial: bool,  # as click calls it
    output: str | None,
) -> None:
    """Write a config, of prepkit or of any library that is imported, as a file of another library.

    The file is read back: each setting that does not come back as it was is named, and nothing is written unless
    --partial is given.
    """
    from prepkit.formats.exporters import EXPORTERS, export_config
    from prepkit.render.text import findings_text

    if to not in EXPORTERS:
        raise click.UsageError(f"--to {to}: there is no such exporter; write one of {', '.join(EXPORTERS)}")
    imported = _whole(read(config, kind))
    if isinstance(imported, PlanRejected):
        cli_refusal.refuse((imported,), as_json=False)
    cli_refusal.keep_inputs((config,), (output,) if output else ())
    size, node = world_size or imported.world_size, per_node or imported.per_node
    try:
        made = cli_refusal.attempt(
            lambda: export_config(
                imported.for_size(size), to, output or "", world_size=size, per_node=node, partial=partial
            )
        )
    except OSError as error:
        raise click.UsageError(f"{output} cannot be written: {error.strerror}") from None
    if isinstance(made, PlanRejected):
        cli_refusal.refuse((made,), as_json=False)
    if made.left_out:
        say(findings_text(made.left_out), err=True)
    _left_behind(imported, made.text, output or f"the file of {to}")
    if output:
        say("\n".join(f"wrote {name}" for name in (output, *(name for name, _ in made.beside))), err=True)
    else:
        say("\n".join((made.text.rstrip("\n"), *(f"# {name}\n{text}" for name, text in made.beside))))
