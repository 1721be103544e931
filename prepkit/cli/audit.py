"""The command that audits a script."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from prepkit.cli import plan_files
from prepkit.cli.options import FILE, as_json, object_option
from prepkit.cli.terminal import say, say_json

if TYPE_CHECKING:
    from prepkit.proving.proof import Proof

UNPROVEN = 4
"""Exit code of audit --prove and of prove where nothing seen is wrong, and a window could not be proven."""
CODES = "PREPKIT_AUDIT_CODES"
"""Variable with the folder into which each process of --torchrun writes its exit code."""
SCRIPT_FAILED = 3
"""Exit code where the script itself failed: 1 says that the audit has found errors, 2 that there was none."""


class OptionsBehind(click.Command):
    """Takes its own options right behind SCRIPT too; from the first other word or ``--`` on they are SCRIPT's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move them in front of SCRIPT."""
        parsed, _, _ = self.make_parser(ctx).parse_args(list(args))
        script, rest = parsed["script"], parsed["arguments"]
        if not isinstance(script, str) or not isinstance(rest, tuple | list) or script.startswith("-"):
            return super().parse_args(ctx, args)
        behind = list(rest)
        before = list(args)[: len(args) - len(behind) - 1]
        options = {name: one for one in self.params if isinstance(one, click.Option) for name in one.opts}
        own: list[str] = []
        while behind and (option := options.get(behind[0].partition("=")[0])):
            words = 1 if option.is_flag or "=" in behind[0] else 2
            own, behind = [*own, *behind[:words]], behind[words:]
        return super().parse_args(ctx, [*before, *own, script, *behind[behind[:1] == ["--"] :]])


@click.command(
    cls=OptionsBehind,
    short_help="Find what is wrong with a script's objects at its first step.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--prove", is_flag=True, help="Take the step too, and compare it with a replay in plain torch.")
@click.option("--keep", metavar="FOLDER", help="With --prove: leave the record there, for prepkit bisect.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Look before each of the first N steps. The last is not taken; with --prove it is, and proven.",
)
@click.option("--torchrun", "processes", type=click.IntRange(1, 64), metavar="N", help="Start it in N processes here.")
@as_json
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def audit(  # an argument for each option
    script: str,
    arguments: tuple[str, ...],
    prove: bool,
    keep: str | None,
    steps: int,
    processes: int | None,
    as_json: bool,
) -> None:
    """Run a training script up to its first optimizer step, and say what is wrong with what stands there.

    SCRIPT is run as python runs it, with the ARGUMENTS behind it; the step itself is not taken, but where another rank
    waits for what this one sends behind it. With --steps 20 it trains on up to its twentieth step, and what changes
    from step to step is looked at before each, as by pk.watch. Options of audit may stand right behind SCRIPT too; what
    follows --, or the first word that audit does not know, is SCRIPT's. With --torchrun 2 it is started in two
    processes of this machine, on the CPU and gloo; on several machines: torchrun ... -m prepkit audit SCRIPT. Only
    errors give exit code 1; a script that fails by itself gives 3. With --prove the first step is taken, or that
    of --steps, and its whole window is done again on rank 0 in plain torch: weights, gradients and the step are
    compared; where nothing is wrong and that could not be done, the exit code is 4.
    """
    plan_files.demand_torch("prepkit audit")
    if keep is not None and not prove:
        raise click.UsageError("--keep leaves the record of a proof: give --prove too")
    if processes:
        kept = () if keep is None else ("--keep", keep)
        _in_processes(
            processes,
            (*["--prove"] * prove, *kept, f"--steps={steps}", *["--json"] * as_json, script, "--", *arguments),
        )
    code = _audited(script, arguments, prove, keep, steps, as_json)
    if _leaves(code) and code in (1, UNPROVEN):
        sys.exit(0)  # every rank has found the same; with another code torchrun ends the others
    sys.exit(code)


def _leaves(code: int) -> bool:
    """Leave an exit code for whoever has started this process among others; False: nobody has."""
    folder = os.environ.get(CODES)
    if folder:
        from prepkit.ranks import launcher

        Path(folder, str(launcher.rank())).write_text(str(code))
    return bool(folder)


def _audited(script: str, arguments: tuple[str, ...], prove: bool, keep: str | None, steps: int, as_json: bool) -> int:
    """Audit in this process, say what is found, and return the exit code."""
    from prepkit import codec
    from prepkit.auditing.looks import ScriptEnded
    from prepkit.auditing.outcome import Audit
    from prepkit.auditing.script import audit_script, empty_passes, leave, without_batches
    from prepkit.findings import errors
    from prepkit.ranks import launcher

    try:
        found: Audit | Proof | None
        with empty_passes() as empty:
            if prove:
                from prepkit.proving.script import prove_script

                found = prove_script(script, arguments, keep, _ends, steps=steps)
            else:
                found = audit_script(script, arguments, _ends, steps=steps)
    except ScriptEnded as ended:
        if ended.audit is not None and launcher.is_main():
            say(str(ended.audit))
        click.echo(str(ended), err=True)
        return SCRIPT_FAILED
    if found is None:
        click.echo(f"Error: {script} ended without an optimizer step, so that there was nothing to audit", err=True)
        click.echo("\n".join(map(str, without_batches(empty))), err=True, nl=bool(empty))
        return 2
    looked = found if isinstance(found, Audit) else found.audit
    every = found.findings if looked is found or looked is None else (*found.findings, *looked.findings)
    if launcher.is_main():
        if as_json:
            unknown = () if looked is None else looked.unasked
            said = {"findings": [codec.to_data(finding) for finding in every], "seconds": found.seconds}
            say_json(said | {"cannot_know": [{"rule": rule, "what": what} for rule, what in unknown]})
        else:
            say(str(found))
    leave()
    if errors(every):
        return 1
    return 0 if isinstance(found, Audit) or not found.unproven else UNPROVEN


def _ends(said: str) -> NoReturn:
    """Say why no rank goes on, and end this process, whose program stands in a call that nobody can break off."""
    sys.stderr.write(f"{said}\n")
    sys.stderr.flush()
    _leaves(SCRIPT_FAILED)
    os._exit(SCRIPT_FAILED)


def _in_processes(count: int, words: tuple[str, ...]) -> NoReturn:
    """Run the audit again in so many processes, and end as the first of them that has something to say.

    torchrun ends with 1 whatever its processes ended with, so that each leaves its exit code in a folder.
    """
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        launched = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
        here = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}  # else it is alone
        env = {**here, **os.environ, CODES: folder}
        done = subprocess.run((*launched, "-m", "prepkit", "audit", *words), env=env, check=False)
        codes = [int(file.read_text()) for file in Path(folder).iterdir()]
    failed = [code for code in codes if code]
    other = [code for code in failed if code != UNPROVEN]  # what is wrong on any rank comes first
    sys.exit(max(other or failed, default=done.returncode and not codes and SCRIPT_FAILED))


@click.command(short_help="Find where two recorded windows part.")
@click.argument("first", type=click.Path(exists=True, file_okay=False))
@click.argument("second", type=click.Path(exists=True, file_okay=False))
@as_json
def bisect(first: str, second: str, as_json: bool) -> None:
    """Compare two windows that prepkit audit --prove --keep FOLDER has left.

    It names the first module that differs, and in it the first operator, forward and then backward. Micro-batches are
    paired by what they were given, so that runs of other engines and other numbers of ranks can be compared. A
    difference gives exit code 1.
    """
    from attrs import asdict

    from prepkit.findings import PlanRejected
    from prepkit.proving.bisect import parting

    try:
        found = parting(Path(first), Path(second))
    except PlanRejected as refused:
        plan_files.refuse((refused,), as_json)
    if as_json:
        say_json(asdict(found))
    else:
        say(str(found))
    sys.exit(1 if found.stage else 0)


def _named(path: str, option: str = "--loss") -> Any:
    """What an option names. Raises ``ValueError`` that names the option, also for what the module behind it raises."""
    from prepkit.applying.rehearse import factory
    from prepkit.proving.trial_fails import raised

    try:
        return factory.named(path)
    except ValueError as error:
        raise ValueError(f"{option} {path}: {error}") from None
    except Exception as error:  # whatever the program's own code raises
        module = path.partition(":")[0]
        how = f'see the whole traceback with: python -c "import {module}"'
        raise ValueError(f"{option} {path}: the module raised {raised(error)}; {how}") from error


def _made(path: str) -> Any:
    """What the function of --batches returns. Raises ``ValueError`` that says why it cannot."""
    from prepkit.observe.given import said
    from prepkit.proving.trial_fails import raised

    make, option = _named(path, "--batches"), f"--batches {path}"
    if not callable(make):
        raise ValueError(f"{option} is {said(make)}; name a function without arguments: def batches(): return [...]")  # noqa: TRY004  # the text that was given is wrong
    try:
        return make()
    except Exception as error:  # likewise
        module, _, name = path.partition(":")
        how = f'see the whole traceback with: python -c "import {module}; {module}.{name}()"'
        raise ValueError(f"{option} raised {raised(error)}; {how}") from error


@click.command(short_help="Show that a plan trains a model as plain torch does.")
@click.argument("plan_file", metavar="PLAN", type=FILE)
@object_option
@click.option("--batches", required=True, metavar="PKG.MOD:FACTORY", help="A function that returns a list of batches.")
@click.option("--loss", metavar="PKG.MOD:FUNCTION", help="A function of outputs and batch that returns the loss.")
@click.option("--processes", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes to start here.")
@as_json
def prove(plan_file: str, model: str, batches: str, loss: str | None, processes: int, as_json: bool) -> None:
    """Apply a plan in a few processes of this machine, train one window, and compare it with a replay in plain torch.

    A batch is what the model is called with: a mapping of keywords, a tuple of arguments, or one argument. There is one
    for each micro-batch of each process; tensor-parallel processes read the same, and count as one. A plan for another
    cluster is made again for these processes. Errors give exit code 1, and a window that could not be proven gives 4.
    """
    plan_files.demand_torch("prepkit prove")
    from prepkit import codec
    from prepkit.api import prove as run
    from prepkit.findings import FindingWarning, PlanRejected, RunRefused
    from prepkit.findings import errors as errors_of
    from prepkit.proving.trial_fails import ProcessDied

    (plan,) = plan_files.load((plan_file,), as_json)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FindingWarning)  # told below: they would point at this command
            made, given = plan_files.build(model, "cpu"), _made(batches)
            proof = run(plan, made, given, loss=_named(loss) if loss else None, processes=processes)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    except ProcessDied as error:
        raise click.ClickException(str(error)) from None
    except (PlanRejected, RunRefused) as refused:
        plan_files.refuse((PlanRejected(refused.findings),), as_json)
    warned = () if proof.attestation is None else proof.attestation.warned
    every = tuple(dict.fromkeys((*proof.findings, *warned)))
    if as_json:
        say_json({"findings": [codec.to_data(finding) for finding in every], "seconds": proof.seconds})
    else:
        say("\n".join((str(proof), *map(str, every[len(proof.findings) :]))))
    if errors_of(proof.findings):
        sys.exit(1)
    sys.exit(UNPROVEN if proof.unproven else 0)
