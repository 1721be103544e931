"""The command that audits a script."""

from __future__ import annotations

import sys

import click

from prepkit.cli.options import as_json
from prepkit.cli.plan_files import demand_torch
from prepkit.cli.terminal import say, say_json

SCRIPT_FAILED = 3
"""Exit code where the script itself failed: 1 says that the audit has found errors, 2 that there was none."""


@click.command(
    short_help="Find what is wrong with a script's objects at its first step.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@as_json
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def audit(script: str, arguments: tuple[str, ...], as_json: bool) -> None:
    """Run a training script up to its first optimizer step, and say what is wrong with what stands there.

    SCRIPT is run as python runs it, with the ARGUMENTS behind it; the step itself is not taken. Several processes:
    torchrun --nproc-per-node 2 -m prepkit audit SCRIPT. Only errors give exit code 1; a script that fails by itself
    gives 3.
    """
    demand_torch("prepkit audit")
    from prepkit import codec
    from prepkit.auditing.script import ScriptEnded, audit_script, leave
    from prepkit.findings import errors

    try:
        found = audit_script(script, arguments)
    except ScriptEnded as ended:
        click.echo(str(ended), err=True)
        sys.exit(SCRIPT_FAILED)
    if found is None:
        raise click.UsageError(f"{script} ended without an optimizer step, so that there was nothing to audit")
    if found.facts.rank == 0:
        if as_json:
            say_json({"findings": [codec.to_data(finding) for finding in found.findings], "seconds": found.seconds})
        else:
            say(str(found))
    leave()
    sys.exit(1 if errors(found.findings) else 0)
