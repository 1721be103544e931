"""The checkpoints of one prepared run: what goes into them, and what comes out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from attrs import define, field

from prepkit.codec import plan_to_text
from prepkit.codec.attestation import attestation_to_text
from prepkit.facts.saved_run import RunFacts, Said, SavedModule
from prepkit.live.checkpoints import local_state, other_windows, resuming, run_facts, saving, state
from prepkit.live.checkpoints.agreed_folder import agreed_folder
from prepkit.live.checkpoints.contents import Contents
from prepkit.live.checkpoints.failures import CheckpointFailed, on_every_rank
from prepkit.live.checkpoints.metadata import plain_bytes
from prepkit.live.checkpoints.resuming import WholeCheckpoint
from prepkit.live.checkpoints.saving import Snapshot, Writer

Prepared = Any
"""``live.training.prepared.Prepared``, which holds one of these and stands above them."""


@define
class Checkpoints:
    """Saves and resumes one ``Prepared``."""

    modules: tuple[SavedModule, ...]
    """What the modules said of themselves when they were new."""
    config: Said
    writer: Writer = field(factory=Writer)
    _plan_text: str = ""

    def save(self, ready: Prepared, folder: str, *, keep: int, wait: bool) -> None:
        """As ``Prepared.save``."""
        folder = agreed_folder(folder, "written")
        self.writer.save(folder, self.snapshot(ready, folder), keep=keep, wait=wait)

    def check(self, ready: Prepared, folder: str) -> None:
        """As ``Prepared.check_saving``."""
        folder = agreed_folder(folder, "written")
        snapshot = self.snapshot(ready, folder)
        saving.try_folder(folder, snapshot)

    def snapshot(self, ready: Prepared, folder: str) -> Snapshot:
        """All that this rank contributes. Collective. Raises ``CheckpointFailed`` on every rank for what cannot be."""
        failed = f"{folder} could not be written"
        held = on_every_rank(lambda: state.held(ready.model, ready.optimizer), failed)
        own, shared = on_every_rank(lambda: _small(ready, held), failed)
        return Snapshot(
            tensors=held.tensors,
            own=own,
            shared=shared,
            texts=self._texts(ready),
            run=self._facts(ready, held),
            steps=ready.steps,
            epoch=ready.epoch,
        )

    def resume(
        self, ready: Prepared, folder: str, *, accept: Collection[str], only_model: bool, missing_ok: bool
    ) -> bool:
        """As ``Prepared.resume``."""
        folder = agreed_folder(folder, "read")
        self.writer.goes_on_from(folder)
        if missing_ok and resuming.nothing_saved(folder):
            return False
        self.writer.finish()
        source = resuming.open_source(folder)
        settles = not only_model and (ready.optimizer is not None or _nobody_stepped(source))
        only_model = only_model or ready.optimizer is None
        optimizer = None if only_model else ready.optimizer
        here = on_every_rank(lambda: state.held(ready.model, optimizer), f"{source.path} could not be read")
        facts = self._facts(ready, here, only_model=only_model)
        resuming.check(source, facts, (accept,) if isinstance(accept, str) else accept)  # one id is no collection
        with state.filled(ready.model, optimizer, source.names, source.shared.get("groups", [])) as wanted:
            resuming.fill(source, wanted, only_model=only_model)
        if settles:
            _settle(ready, source, facts)
            if not (dist.is_initialized() and dist.get_rank()):
                other_windows.tell(source.path, ready.plan)
        return True

    def _facts(self, ready: Prepared, held: Contents, *, only_model: bool = False) -> RunFacts:
        return run_facts.run_facts(
            engine=type(ready.plan.config.engine).__name__,
            world=dist.get_world_size() if dist.is_initialized() else 1,
            tensors=held.model,
            modules=self.modules,
            config=self.config,
            optimizer=None if only_model else state.stepping(ready.model, ready.optimizer),
            groups=_trained(ready, held),
            scheduler=ready.scheduler,
            scaler=ready.scaler is not None,
            loaders=sum(map(local_state.positioned, ready.loaders)),
        )

    def _texts(self, ready: Prepared) -> dict[str, str]:
        """The plan, and what was verified of it on rank 0."""
        if dist.is_initialized() and dist.get_rank():
            return {}
        self._plan_text = self._plan_text or plan_to_text(ready.plan)
        attested = {} if ready.attestation is None else {"attestation.json": attestation_to_text(ready.attestation)}
        return {"plan.json": self._plan_text, **attested}


def of(model: Any) -> Checkpoints:
    """For a model that has just been prepared."""
    return Checkpoints(modules=run_facts.said_by_modules(model), config=run_facts.said_by_config(model))


def _trained(ready: Prepared, held: Contents) -> tuple[tuple[str, ...], ...]:
    """Who is in which group; frozen parameters, which some engines leave out, are in none."""
    frozen = {param.name for param in ready.plan.facts.model.params if not param.requires_grad}
    return tuple(tuple(name for name in group if name not in frozen) for group in held.members)


def _small(ready: Prepared, held: Contents) -> tuple[bytes, bytes]:
    """What is no tensor of model or optimizer: of this rank alone, and the same on all."""
    shared = {
        "plain": held.plain,
        "groups": held.groups,
        "scheduler": None if ready.scheduler is None else ready.scheduler.state_dict(),
        "scaler": None if ready.scaler is None else ready.scaler.state_dict(),
        "engine": state.engine_state(ready.model),
        "loaders": local_state.on_any_ranks(ready.loaders),
    }
    own = plain_bytes(local_state.of_this_rank(ready.loaders), "the state of the loaders")
    try:
        return own, plain_bytes(shared, "the state beside the tensors")
    except CheckpointFailed:
        for name, value in shared.items():
            plain_bytes(value, f"the state of the {name}")  # raises for the part that it is
        raise


def _nobody_stepped(source: WholeCheckpoint) -> bool:
    """Whether the saved run had no optimizer either: what else it saved is for a run of its kind, and not left out."""
    return source.saved is not None and not source.saved.run.optimizer


def _settle(ready: Prepared, source: WholeCheckpoint, facts: RunFacts) -> None:
    """Puts back all that is no tensor; random states last, as whatever comes before may draw."""
    shared, saved = source.shared, source.saved
    same = saved is not None and saved.run.scheduler == facts.scheduler
    if ready.scheduler is not None and same and shared.get("scheduler") is not None:
        ready.scheduler.load_state_dict(shared["scheduler"])
    if ready.scaler is not None and shared.get("scaler"):
        ready.scaler.load_state_dict(shared["scaler"])
    state.set_engine_state(ready.model, shared.get("engine"))
    if saved is not None:
        ready.steps = saved.steps
        ready.set_epoch(saved.epoch)
    own = source.own or {"loaders": []}
    same_ranks = source.own is not None and saved is not None and saved.run.world_size == facts.world_size
    local_state.set_positions(ready.loaders, own["loaders"], shared.get("loaders", []), same_ranks=same_ranks)
    if source.own is not None:
        local_state.set_random_states(source.own["random"])
