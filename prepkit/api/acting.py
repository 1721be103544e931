"""Calls that act on models, or look at them; torch is imported when they are called."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import evolve

from prepkit.api.given import Given, a_plan, loaders_of
from prepkit.auditing.outcome import Audit
from prepkit.codec import log as log_file
from prepkit.codec.statement import statement_text
from prepkit.facts import Env
from prepkit.findings import Finding, PlanRejected
from prepkit.findings.text import shorter
from prepkit.later import needs_torch, old_objects_left
from prepkit.plan import Plan
from prepkit.rules import found

if TYPE_CHECKING:
    from prepkit.applying.rehearse import Rehearsal
    from prepkit.auditing.watch import Act, DriftWatch
    from prepkit.proving.proof import Proof
    from prepkit.training.prepared import Prepared


Require: TypeAlias = Callable[[bytes], object] | Sequence[str]
"""Who decides whether a plan may be applied: a function of its statement, or the words of a command."""
FILE = "{statement}"
"""Word of a command that stands for a file with the statement."""
SECONDS = 60.0
"""How long a command may take to decide."""


def apply(
    plan: Plan,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] | None = None,
    fingerprint: bool = False,
    prove: int = 0,
    require: Require | None = None,
    log: str | PathLike[str] | None = None,
) -> Prepared:
    """Do what the plan says to the objects that it was built from, or to those given here, and verify the outcome.

    Raises ``PlanRejected`` before anything is touched when the objects are not those of the plan, and
    ``ApplyHalted`` when a step fails: its ``halted`` says what was left as it is and what was undone.
    ``fingerprint``: the attestation has a number for the values of each parameter, the same before and after and on
    every rank. ``prove``: so many of the first windows are recorded, and each is done again by rank 0 in plain torch
    when its step was taken; the others send it tensors, one at a time. Errors raise ``RunRefused`` from
    ``ready.step()`` on every rank, and the attestation has what was asked. Raises ``ValueError`` for no such number.
    ``require``: a plan is refused, on all ranks, unless each rank's ``require`` accepts its in-toto Statement, as
    ``prepkit statement`` writes it: a function of these bytes that returns True, or the words of a command that ends
    with 0, which is given them on its input, or as the file ``{statement}``. ``log``: a file to which rank 0 appends
    what was applied, once it stands there (``PlanRejected`` where that fails); ``prepkit log`` verifies its chain.
    """
    a_plan(plan)
    if isinstance(prove, bool) or not isinstance(prove, int) or prove < 0:
        raise ValueError(f"prove={prove!r:.40} is no number of windows; write prove=1 for the first one")
    needs_torch("pk.apply")
    with old_objects_left():
        from prepkit import planner
        from prepkit.applying.apply import apply as act
        from prepkit.applying.apply import guarded, look
        from prepkit.observe.env import now
        from prepkit.ranks.launcher import rank
        from prepkit.training.prepared import prepared

        given = plan.target or Given(model=None)
        divided = given.loaders if loaders is None else loaders_of(loaders)
        with guarded(plan) as guard:
            today = look(
                plan,
                model=given.model if model is None else model,
                optimizer=given.optimizer if optimizer is None else optimizer,
                scheduler=given.scheduler if scheduler is None else scheduler,
                loaders=divided,
            )
            new = () if today.refusals else planner.since(plan, today.facts)
            log = log if rank() == 0 else None
            applied = act(plan, today, guard, (*new, *_refused(plan, require, log)), fingerprint=fingerprint)
            if log is not None:
                log_file.append(log, plan, applied.attestation, now())
        ready = prepared(applied)
    if prove:
        from prepkit.auditing.script import SCRIPTS
        from prepkit.proving.live import prove_windows

        if not SCRIPTS:  # else prepkit audit runs the program, and proves it where it is asked to
            prove_windows(ready, prove)
    return ready


def audit(
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    env: Env | None = None,
) -> Audit:
    """Find what is wrong with objects that are ready to be trained, whoever prepared them. Changes nothing.

    ``model`` is what the loop calls, wrappers included: DDP, FSDP, a DeepSpeed engine, what accelerate or a Trainer has
    made. ``optimizer`` may be a list. Call it on every rank, before the first step: ranks tell each other a few
    digests. ``env`` None: the process group that is here; with one the rules see that many ranks.

    Raises ``TypeError`` for objects of the wrong kind.
    """
    needs_torch("pk.audit")
    from prepkit.auditing.audit import audit as look

    return look(model, optimizer, scheduler, loaders_of(loaders), env=env)


def fingerprints(weights: Any, *, master_weights: bool = False) -> dict[str, str]:
    """Map each parameter of a model, or of a safetensors file or folder, to a fingerprint of 16 hex digits.

    The same for whole, sharded, flattened, partitioned and exported weights, which are not gathered for it. ``weights``
    is a module, whoever has prepared it, or a path. ``master_weights``: read the float32 master weights of what
    DeepSpeed trains in low precision, which are what is saved and exported. Collective for a model where a process
    group has several ranks. Raises ``ValueError`` where ranks that hold the same of a parameter differ in it, or have
    other parameters;
    ``TypeError`` for anything else.
    """
    needs_torch("pk.fingerprints")
    from prepkit.observe.fingerprints import as_text, of_files

    return of_files(str(weights)) if isinstance(weights, str | PathLike) else as_text(weights, masters=master_weights)


def prove(
    plan: Plan,
    model: Any,
    batches: Sequence[Any],
    *,
    optimizer: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    processes: int = 2,
) -> Proof:
    """Show by numbers that the plan trains the model as plain torch trains it, on a few processes of this machine.

    Each process applies the plan under gloo and trains one window, whose inputs, gradients and weights are recorded;
    then the window is done again on one process with nothing around the model, and both are compared. A plan for
    another cluster, or one that has a scheduler or loaders, is made again for these processes, from its config; its
    warnings, and those of the run, are told here. ``batches``: one per micro-batch of each part that the data is
    divided into, those of the first first: tensor-parallel ranks share a part, and every other rank has its own. A
    mapping's entries are keywords of the model, a tuple's its arguments. ``loss`` is called with the outputs and the
    batch; without it a model returns its loss. Both it and the model are pickled, and hooks of its parameters, whose
    gradients are named and not compared. ``model`` stays as it is.

    Raises ``ValueError`` for too few batches, for one that the model does not take, for a loss that returns no number,
    for what raises where it is called, and for what cannot be pickled; ``TypeError`` for batches that are no list, for
    a loss that does not take both, and for ``processes`` that are no number of them; ``PlanRejected`` where there is no
    such plan for these processes or this model; ``RunRefused`` for what a rule refuses as the window runs, such as a
    loss that is NaN; and ``RuntimeError`` where a process dies.
    """
    a_plan(plan)
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise TypeError(
            f"processes={processes!r:.40} is no number of processes; write processes=2 for two of them here"
        )
    needs_torch("pk.prove")
    from prepkit.api.planning import build_plan
    from prepkit.config import ClipNorm
    from prepkit.court import report
    from prepkit.facts.proof import ClipProof
    from prepkit.observe.env import observe_env
    from prepkit.proving.spawned import Trial, checked_loss, enough, hooks_of, prove_in_processes

    loss = checked_loss(loss)
    cfg, facts = plan.config, plan.facts
    there, more = (facts.env.world_size, facts.env.device), facts.loaders or facts.scheduler or not facts.env.torch
    if there != (processes, "cpu") or more:
        env = Env.declare(world_size=processes, device="cpu", torch=observe_env().torch)
        plan = build_plan(cfg, model, optimizer=optimizer, env=env)
    steps = plan.owners.accumulation_steps
    given, told = enough(batches, processes, plan.data_parallel_size, steps)
    trial = Trial(
        plan=evolve(plan, target=None),
        model=model,
        optimizer=optimizer,
        batches=given,
        told=told,
        loss=loss,
        accumulation=steps,
        clip=ClipProof(most=cfg.clip.max_norm, power=cfg.clip.norm_type) if isinstance(cfg.clip, ClipNorm) else None,
        apply=apply,
        hooks=tuple(hooks_of(model)),
    )
    proof = prove_in_processes(trial, processes)
    report(proof.attestation.warned if proof.attestation is not None else ())
    return proof


def rehearse(plan: Plan, model: Any, *, rank: int = 0) -> Rehearsal:
    """Run the plan with real torch as one rank, on a meta copy in a separate process."""
    a_plan(plan)
    needs_torch("pk.rehearse")
    from prepkit.applying.rehearse import rehearse as run

    return run(plan, model, rank=rank)


def watch(
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    every: int = 100,
    share: float = 0.001,
    act: Act | None = None,
) -> DriftWatch:
    """Look for drift at every ``every``-th optimizer step from now on, and warn of what is found.

    ``model`` and ``optimizer`` are what a loop uses, whoever has prepared them; or ``model`` is a ``Trainer`` of
    transformers or of Lightning, alone, before it trains. On every rank. A look compares as many weights over ranks as
    can be read in ``share`` of the time since the last one, in turn. A rank warns of what it sees, by a
    ``FindingWarning``, each rule and place once; ``act`` is called with it instead, and what that raises ends the
    training. Raises ``TypeError`` for objects of the wrong kind, and ``ValueError`` for ``every`` below 1 and a
    ``share`` that is none.
    """
    needs_torch("pk.watch")
    from prepkit.auditing.watch import watch as begin

    return begin(model, optimizer, scheduler, every=every, share=share, act=act)


# --- who has signed a plan, and the log of what was applied ---------------------------------------------------------


def _refused(plan: Plan, require: Require | None, log: str | PathLike[str] | None) -> Iterator[Finding]:
    """Why the plan may not be applied, or could not be kept. Raises ``TypeError`` for another kind of ``require``."""
    if require is not None and (what := _not_accepted(statement_text(plan).encode(), require)):
        yield found("plan.not-signed", "require", what)
    if log is not None:
        try:
            log_file.check_end(log)
        except PlanRejected as torn:
            yield from torn.findings


def _not_accepted(statement: bytes, require: Require) -> str:
    """Why the statement is not accepted; empty where it is. Whatever goes wrong on the way accepts nothing."""
    if callable(require):
        try:
            answer = require(statement)
        except (Exception, SystemExit) as error:  # whatever it raises, it has not accepted
            return f"{_name(require)} raised {type(error).__name__}: {error}"
        return "" if answer is True else f"{_name(require)} returned {answer!r:.60}, and not True"
    if isinstance(require, str | bytes) or not require or not all(isinstance(word, str) for word in require):
        raise TypeError(
            f"require={require!r:.60} is neither a function nor the words of a command; write "
            'require=("ssh-keygen", "-Y", "verify", ...)'
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "statement.json")
        file.write_bytes(statement)
        words = [str(file) if word == FILE else word for word in require]
        try:
            done = subprocess.run(words, input=statement, capture_output=True, timeout=SECONDS, check=False)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return f"{words[0]} could not decide: {error}"
    if done.returncode == 0:
        return ""
    said = " ".join((done.stderr or done.stdout).decode(errors="backslashreplace").split())
    return f"{words[0]} ended with {done.returncode}: {shorter(said, 200) or 'it said nothing'}"


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
