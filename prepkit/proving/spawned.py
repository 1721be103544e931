"""A plan proven before the cluster: processes under gloo apply it and train one window, which is replayed here."""

from __future__ import annotations

import inspect
import io
import logging
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from prepkit.codec import files
from prepkit.facts.model import ParamHook
from prepkit.facts.proof import ACCELERATED, ClipProof, ProofFacts
from prepkit.findings import FindingWarning
from prepkit.findings.text import count, some
from prepkit.objects import names, param_extras
from prepkit.observe.given import said
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.proving import trial_fails
from prepkit.proving.other_rank import as_one_of
from prepkit.proving.proof import STAND_IN, Proof, found_in, prove_records
from prepkit.proving.record_file import write
from prepkit.proving.recorder import Recorder
from prepkit.proving.tree import tensors_of
from prepkit.rules import due
from prepkit.rules.rule import Moment, answers

ATTESTATION = "attestation.json"
TRIAL = "trial.pt"
"""What every process is given, in a file: sharing memory would move the model, and loses what is made to be sent."""


@frozen(kw_only=True, eq=False)
class Trial:
    """What every process is given."""

    plan: Plan
    model: nn.Module
    optimizer: Any
    batches: tuple[Any, ...]
    """One for each micro-batch of each part of the data: those of the first part first."""
    loss: Callable[[Any, Any], Tensor] | None
    accumulation: int
    clip: ClipProof | None
    apply: Callable[..., Any]
    """``pk.apply``."""
    told: tuple[str, ...] = ()
    """Limits of the proof that are known before."""
    hooks: tuple[tuple[str, ParamHook, Callable[..., Any]], ...] = ()
    """What hangs on parameters, which torch does not pickle with them."""


def prove_in_processes(trial: Trial, processes: int) -> Proof:
    """The proof of one window.

    Raises ``ValueError`` that names which of the things that were given a process cannot work with, ``PlanRejected``
    and ``RunRefused`` as the processes do, ``ProcessDied`` where one of them dies, and what is left, an error of
    prepkit's own, as ``torch.multiprocessing.ProcessRaisedException``.
    """
    with TemporaryDirectory(prefix="prepkit-proof-") as named:
        folder = Path(named)
        _leave(trial, named)
        failure = _failure_of(folder, processes)
        if failure is not None and failure.unproven:
            return found_in(ProofFacts(world=processes, shares=(), unproven=failure.text))
        if failure is not None:
            trial_fails.raise_it(failure)
        with as_one_of(processes):
            proof = prove_records(trial.model, folder, tuple(dict.fromkeys(name for name, _, _ in trial.hooks)))
        attestation = files.load(str(folder / ATTESTATION))
    assert isinstance(attestation, Attestation)
    asked = answers(due(Moment.PROVE), Moment.PROVE, proof.facts)
    return evolve(proof, attestation=evolve(attestation, asked=(*attestation.asked, *asked)))


def needs_accelerator(model: nn.Module, *, synchronised: bool = False) -> str:
    """Return why torch runs no forward of it on a CPU; empty: it does.

    ``synchronised``: whether its batch norms are to be made so.
    """
    kind = nn.modules.batchnorm._BatchNorm if synchronised else nn.SyncBatchNorm
    found = [path for path, one in names.named_modules(model).items() if isinstance(one, kind)]
    if not found:
        return ""
    are = "would become" if synchronised else "is" if len(found) == 1 else "are"
    return f"{some(found)} {are} SyncBatchNorm, {ACCELERATED}, and these processes have none"


def _failure_of(folder: Path, processes: int) -> trial_fails.Failure | None:
    """Runs the processes, and returns why there are no records, where one has left that; None: there are."""
    spawn: Any = start_processes  # which has no types
    log = logging.getLogger("torch.multiprocessing.spawn")  # which tells how it ends the others
    level = log.level
    log.setLevel(logging.ERROR)
    given = (processes, _free_port(), str(folder))
    running = spawn(_run, given, nprocs=processes, join=False, start_method="spawn")
    try:
        while not running.join():
            pass
    except (ProcessExitedException, ProcessRaisedException):
        trial_fails.raise_if_died(folder, [one.exitcode for one in running.processes])
        failure = trial_fails.first_failure(folder)
        if failure is None:
            raise
        return failure
    finally:
        log.setLevel(level)
        for left in running.error_files:  # of tracebacks, which torch leaves behind
            Path(left).unlink(missing_ok=True)
    return None


def _leave(trial: Trial, folder: str) -> None:
    """Write what the processes are given. Raises ``ValueError`` that names what cannot be pickled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "backward hook .* will not be serialized")  # they go beside it
        try:
            torch.save(trial, Path(folder, TRIAL))
        except Exception as error:  # whatever the objects in it raise
            for name in ("loss", "batches", "optimizer", "model"):
                if not _pickles(getattr(trial, name)):
                    what = f"{name}: processes get it by pickle, which does not take it ({error!s:.160})"
                    do = "write its functions and classes at a module's top level, by def and class"
                    raise ValueError(f"{what}; {do}, or prove the real run: pk.apply(plan, prove=1)") from error
            raise


def _pickles(thing: Any) -> bool:
    try:
        torch.save(thing, io.BytesIO())
    except Exception:  # likewise
        return False
    return True


def _run(rank: int, processes: int, port: int, folder: str) -> None:
    """One process: applies, trains a window, and leaves its record."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FindingWarning)  # the attestation has them, and the caller tells them
    with trial_fails.leaving(Path(folder)):
        _one_window(rank, processes, Path(folder))


def _one_window(rank: int, processes: int, folder: Path) -> None:
    stage = trial_fails.Stage(folder, rank)
    stage.enter("the making of model, optimizer, batches and loss from pickle")
    trial = _read(folder)
    model, optimizer = trial.model, trial.optimizer
    params = names.named_parameters(model)
    for name, kind, hook in trial.hooks:
        getattr(params[name], kind)(hook)
    part = rank // (processes // trial.plan.data_parallel_size)  # neighbours share one
    torch.manual_seed(part)  # as ranks that read other samples draw
    stage.enter("pk.apply")
    ready = trial.apply(trial.plan, model=model, optimizer=optimizer)
    ready._looks.divided = True
    recorder = Recorder(root=ready.model, accumulation=trial.accumulation, clip=trial.clip)
    for limit in trial.told:
        recorder.tell(limit)
    with recorder.on():
        for at in range(part * trial.accumulation, (part + 1) * trial.accumulation):
            _micro_batch(trial, ready, recorder, at, stage)
    write(recorder.record(), folder)
    if rank == 0:
        files.save(ready.attestation, str(folder / ATTESTATION))


def _micro_batch(trial: Trial, ready: Any, recorder: Recorder, at: int, stage: trial_fails.Stage) -> None:
    """Forward, loss, backward and step with one batch."""
    batch, of = trial.batches[at], type(trial.model).__name__
    stage.enter(f"the forward of {of} with batches[{at}]")
    with trial_fails.blaming(lambda error: _forward_failed(trial, error, at, stage.folder)):
        outputs = _called(ready.model, batch)
    stage.enter("the loss")
    if trial.loss is None:
        loss = _own_loss(outputs)
    else:
        with trial_fails.blaming(lambda error: _loss_failed(trial.loss, error, outputs, batch)):
            loss = trial.loss(outputs, batch)
        if wrong := _no_loss(loss, trial.loss):
            trial_fails.refuse(wrong)
    if loss is None:
        recorder.tell(STAND_IN)
        every = list(tensors_of(outputs))
        if not every:
            trial_fails.refuse(trial_fails.of_outputs(trial.model, outputs, tensors=False))
        loss = torch.stack([one.float().square().mean() for one in every]).sum()
    if not loss.requires_grad:
        trial_fails.refuse(trial_fails.of_outputs(trial.model, outputs, tensors=True))
    stage.enter("the backward")
    with trial_fails.blaming(lambda error: _behind_failed(trial, "the backward of the loss", error)):
        ready.backward(loss)
    stage.enter("the step")
    with trial_fails.blaming(lambda error: _behind_failed(trial, "the step of the optimizer", error)):
        ready.step()


def _read(folder: Path) -> Trial:
    """What the caller has left."""

    def why(error: Exception) -> str:
        what = "model, optimizer, batches or loss cannot be made from pickle in a new process"
        do = "write their classes and functions at the top level of a module that each process can import"
        return f"{what}, which raised {trial_fails.raised(error)}; {do}, or prove the real run: pk.apply(plan, prove=1)"

    with trial_fails.blaming(why):
        trial: Trial = torch.load(folder / TRIAL, weights_only=False)
    return trial


def _forward_failed(trial: Trial, error: Exception, at: int, folder: Path) -> str:
    """Return why. The same call is made once more, with a model that the plan has not met."""
    batch = trial.batches[at]
    if isinstance(error, TypeError | AttributeError) and next(tensors_of(batch), None) is None:
        return _no_tensors(batch, error)
    plain = _read(folder).model
    alone = trial_fails.alone(plain, lambda model: _called(model, batch))
    return trial_fails.of_forward(error, plain, at, batch, alone=alone, plan=trial.plan)


def _loss_failed(loss: Any, error: Exception, outputs: Any, batch: Any) -> str:
    given = f"called with outputs {trial_fails.looks(outputs)} and batch {trial_fails.looks(batch)}"
    how = "outputs are what the model returned, batch is one of batches: take the labels from there, as batch[1]"
    return f"loss is {_named(loss)}, and raised {trial_fails.raised(error)}, {given}; {how}"


def _behind_failed(trial: Trial, what: str, error: Exception) -> str:
    how = "train one step of this model without the plan; where that is well, prove the plan without its engine"
    return f"{what} raised {trial_fails.raised(error)}; the model is {type(trial.model).__name__}: {how}"


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
    return port


def _called(model: nn.Module, batch: Any) -> Any:
    """A mapping's entries are keywords, a tuple's are arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _own_loss(outputs: Any) -> Tensor | None:
    """The loss that a model returns: alone, as ``loss``, or under that key."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def hooks_of(model: nn.Module) -> Iterator[tuple[str, ParamHook, Callable[..., Any]]]:
    """Yield parameter, kind and function of every hook on a parameter.

    Raises ``ValueError`` for one that cannot be pickled, as whatever the processes are given.
    """
    for name, param in names.named_parameters(model).items():
        for kept, kind in param_extras.HOOKS:
            for hook in (getattr(param, kept, None) or {}).values():
                try:
                    pickle.dumps(hook)
                except Exception as error:  # whatever the objects in it raise
                    which = f"{name}.{kind}({getattr(hook, '__qualname__', hook)!s:.80})"
                    what = f"{which}: processes get hooks by pickle, which does not take this one ({error!s:.120})"
                    do = "make it a function of a module's top level, or prove the real run: pk.apply(plan, prove=1)"
                    raise ValueError(f"{what}; {do}") from error
                yield name, kind, hook


def _no_tensors(batch: Any, error: Exception) -> str:
    """Return what is wrong with a batch without a tensor that the model does not take."""
    how = (
        "a mapping's entries are keywords of the model, a tuple's its arguments: give tensors, as torch.as_tensor(...)"
    )
    return f"batches holds {said(batch)}, which the model does not take ({error!s:.160}); {how}"


def _no_loss(returned: Any, loss: Callable[..., Any]) -> str:
    """Return what is wrong with what a loss function has returned; empty: nothing."""
    if not isinstance(returned, Tensor):
        return f"loss is {_named(loss)}, and returned {said(returned)}; return one number, as a tensor of no dimension"
    if returned.numel() != 1:
        of = f"a tensor of shape {tuple(returned.shape)}"
        return f"loss is {_named(loss)}, and returned {of}; return one number, such as its .mean()"
    if not returned.requires_grad:
        how = "compute it from the outputs, without .item(), .detach() or no_grad()"
        return f"loss is {_named(loss)}, and returned a number that has no gradient; {how}"
    return ""


def checked_loss(loss: Any) -> Any:
    """A loss function, or None. Raises ``TypeError`` for one that does not take outputs and batch."""
    if loss is None:
        return None
    wrong = f"loss is {said(loss)}; give a function of outputs and batch that returns the loss"
    if callable(loss):
        try:
            inspect.signature(loss).bind(None, None)
        except TypeError:
            taken = f"it takes {inspect.signature(loss)}"
            wrong = (
                f"loss is {_named(loss)}, and is called with outputs and batch; {taken}: write def loss(outputs, batch)"
            )
        except ValueError:  # of a function that shows no signature
            return loss
        else:
            return loss
    raise TypeError(wrong)


def _named(function: Any) -> str:
    return f"`{getattr(function, '__qualname__', type(function).__name__)}`"


def enough(batches: Any, processes: int, parts: int, accumulation: int) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """As many batches as a window reads, and what to tell of the others. ``parts``: of the data.

    Raises ``ValueError`` where there are fewer, ``TypeError`` where it is no list of batches.
    """
    if not isinstance(batches, Sequence) or isinstance(batches, str | bytes):
        how = "one batch for each micro-batch of each process, of those that read the same samples of one"
        raise TypeError(f"batches is {said(batches)}; give a list with {how}")
    needed = parts * accumulation
    alike = f", of which each {processes // parts} read the same samples," if parts < processes else ""
    each = f"{processes} processes{alike} with {count(accumulation, 'micro-batch')} a step"
    if len(batches) < needed:
        raise ValueError(f"{each} read {needed} batches, and {len(batches)} were given; give {needed} different ones")
    more = f"of {len(batches)} batches the first {needed} were read: {each}"
    return tuple(batches[:needed]), (more,) if len(batches) > needed else ()
