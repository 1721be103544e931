"""The checkpoints of one prepared run: what goes into them, and what is found, checked and read out of them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.nn import Module

from prepkit.codec import load_plan, plan_to_text
from prepkit.codec.files import attestation_to_text
from prepkit.court import Court
from prepkit.facts.run import RunFacts
from prepkit.facts.saved_run import FolderFacts, ResumeFacts, Said, SavedFacts, SavedModule, SavedRun, SavedWindows
from prepkit.findings import PlanRejected
from prepkit.objects import joint_optimizer, names
from prepkit.observe.prepared.around import saved_in_parts
from prepkit.plan import Plan
from prepkit.ranks.world import world
from prepkit.rules import by_id
from prepkit.rules.rule import Moment, findings_of
from prepkit.saving import contents, files, saved_facts, state, writing
from prepkit.saving import folder as folders
from prepkit.saving.contents import MODEL, Contents, RunParts
from prepkit.saving.failures import CheckpointFailed, failed, on_every_rank, torch_failure
from prepkit.saving.files import MANIFEST, METADATA, PLAN, SHARED, own_file, plain_bytes
from prepkit.saving.planners import LoadPlanner
from prepkit.saving.writing import Snapshot, Writer


@frozen(kw_only=True)
class Resumed:
    """Changes that a resume has made besides those in the objects of the run."""

    steps: int | None = None
    """Optimizer steps that had been taken; None: weights alone were read, or the checkpoint does not know."""
    batches: tuple[tuple[int, int, int], ...] = ()
    """What the loop knew of the micro-batches of its batches."""


@define
class Checkpoints:
    """Saves and resumes one prepared run."""

    modules: tuple[SavedModule, ...]
    """Settings of the modules when they were new."""
    config: Said
    court: Court
    """Of the run: a warning about a folder is reported once."""
    writer: Writer = field(factory=Writer)
    _plan_text: str = ""

    def save(self, run: RunParts, folder: str, *, keep: int, wait: bool) -> None:
        """Write a checkpoint. Collective; see ``Writer.save``. Raises ``RunRefused`` and ``CheckpointFailed``."""
        path = self._folder(folder)
        others = self.writer.others(path)
        self.court.ask(Moment.FOLDER, FolderFacts(folder=path, others=others, steps=run.steps))
        self.writer.save(path, self.snapshot(run, path), keep=keep, wait=wait, spared=others)

    def check(self, run: RunParts, folder: str) -> None:
        """Make the folder; raise now for what would keep ``save`` from working. Collective.

        Warns of a ``save_pretrained`` in the program that will be refused, and of a ``torch.save`` of shards.
        """
        path = self._folder(folder)
        writing.try_folder(path, self.snapshot(run, path))
        self.court.hear(findings_of((by_id()["run.saves-shards"],), RunFacts(saves_shards=saved_in_parts(run.model))))

    def _folder(self, folder: str) -> str:
        """Return the folder that all ranks have given. Collective; raises ``RunRefused``."""
        facts = FolderFacts(given=folders.given(folder))
        self.court.ask(Moment.FOLDER, facts)
        return facts.given[world().rank].path

    def snapshot(self, run: RunParts, folder: str) -> Snapshot:
        """Take all that this rank contributes. Collective. Raises on every rank for what cannot be saved."""
        held = on_every_rank(lambda: state.held(run.model, run.optimizer), writing.NOT_WRITTEN, folder)
        own, shared = on_every_rank(lambda: _small(run, held), writing.NOT_WRITTEN, folder)
        return Snapshot(
            tensors=held.tensors if world().is_first else _without_buffers(run.model, held.tensors),
            own=own,
            shared=shared,
            texts=self._texts(run),
            run=self._facts(run, held, run.optimizer),
            steps=run.steps,
            epoch=run.epoch,
        )

    def resume(
        self, run: RunParts, folder: str, *, accept: Collection[str], only_model: bool, missing_ok: bool
    ) -> Resumed | None:
        """Go on from the newest whole checkpoint in the folder. Collective.

        None: ``missing_ok``, and there is no checkpoint. Raises ``RunRefused`` on every rank for what does not fit,
        before anything is changed, and ``CheckpointFailed`` for what cannot be read.
        """
        accepted = (accept,) if isinstance(accept, str) else tuple(accept)  # one id is no collection
        court = self.court.also_accepting(accepted)
        path = self._folder(folder)
        self.writer.goes_on_from(path)
        if missing_ok and (nothing := nothing_saved(path)):
            court.ask(Moment.RESUME, ResumeFacts(where=str(Path(path).absolute()), nothing=nothing))
            return None
        self.writer.finish()
        return self._read(run, open_source(path), court, accepted, only_model=only_model)

    def _read(
        self, run: RunParts, source: WholeCheckpoint, court: Court, accepted: tuple[str, ...], *, only_model: bool
    ) -> Resumed:
        settles = not only_model and (run.optimizer is not None or _nobody_stepped(source))
        optimizer = None if only_model else run.optimizer
        members = joint_optimizer.members(run.optimizer)
        built = saved_facts.settings(members, run.scheduler)

        def fits() -> ResumeFacts:
            held = state.held(run.model, optimizer)
            facts = ResumeFacts(
                where=str(source.path),
                accepted=accepted,
                torn=source.torn,
                saved=None if source.saved is None else source.saved.run,
                here=self._facts(run, held, optimizer),
            )
            court.ask(Moment.RESUME, facts)
            return facts

        facts = on_every_rank(fits, NOT_READ, source.path)
        with state.filled(run.model, optimizer, source.names, source.shared.get("groups", [])) as wanted:
            found = compared(facts, source, wanted, only_model=optimizer is None)
            court.ask(Moment.RESUME, found)
            fill(source, wanted)
        if not settles:
            return Resumed()
        _settle(run, source, facts)
        after = ResumeFacts(
            before=_saved_windows(source),
            now=saved_facts.windows_of(run.plan),
            joined=tuple(dict.fromkeys(wanted.joined)),
            replaced=saved_facts.replaced(built, saved_facts.settings(members, run.scheduler)),
            other_data=state.other_data(run.loaders, source.shared.get("loaders", [])),
        )
        court.ask(Moment.RESUME, after)
        batches = tuple(map(tuple, source.shared.get("batches", ())))
        return Resumed(steps=None if source.saved is None else source.saved.steps, batches=batches)

    def _facts(self, run: RunParts, held: Contents, optimizer: Any) -> SavedFacts:
        return saved_facts.saved_facts(
            engine=run.plan.run.engine,
            world=world().size,
            tensors=held.model,
            modules=self.modules,
            config=self.config,
            optimizer=state.stepping(run.model, optimizer),
            groups=_trained(run.plan, held),
            scheduler=run.scheduler,
            scaler=run.scaler is not None,
            loaders=sum(map(state.positioned, run.loaders)),
        )

    def _texts(self, run: RunParts) -> dict[str, str]:
        """The plan, and what was verified of it on rank 0."""
        if not world().is_first:
            return {}
        self._plan_text = self._plan_text or plan_to_text(run.plan)
        attested = {} if run.attestation is None else {"attestation.json": attestation_to_text(run.attestation)}
        return {PLAN: self._plan_text, **attested}


def _without_buffers(model: Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """What ranks beside the first one write: torch would take each buffer from any of those that hold it whole."""
    whole = {
        f"{MODEL}{site.path}.{name}" if site.path else f"{MODEL}{name}"
        for site in names.sites(model)
        for name, buffer in site.module._buffers.items()
        if not isinstance(buffer, DTensor)
    }
    return {name: one for name, one in tensors.items() if name not in whole}


def _trained(plan: Plan, held: Contents) -> tuple[tuple[str, ...], ...]:
    """Names in each group; frozen parameters, which some engines leave out, are in none."""
    frozen = {param.name for param in plan.facts.model.params if not param.requires_grad}
    return tuple(tuple(name for name in group if name not in frozen) for group in held.members)


def _small(run: RunParts, held: Contents) -> tuple[bytes, bytes]:
    """All that is no tensor of model or optimizer: of this rank alone, and the same on all."""
    shared = {
        "plain": held.plain,
        "groups": held.groups,
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "engine": state.engine_state(run.model),
        "loaders": state.on_any_ranks(run.loaders),
        "batches": run.batches,
    }
    own = plain_bytes(state.of_this_rank(run.loaders), "the state of the loaders")
    try:
        return own, plain_bytes(shared, "the state beside the tensors")
    except CheckpointFailed:
        for name, value in shared.items():
            plain_bytes(value, f"the state of the {name}")  # raises for the part that it is
        raise


def _nobody_stepped(source: WholeCheckpoint) -> bool:
    """True where the saved run had no optimizer either: all else that it saved is for a run of its kind."""
    return source.saved is not None and not source.saved.run.optimizer


def _saved_windows(source: WholeCheckpoint) -> SavedWindows | None:
    """The windows of the checkpoint's plan, on rank 0; None where it has none that can be read."""
    if not world().is_first or not (source.path / PLAN).is_file():
        return None  # rank 0 alone reports; torch may have written it without prepkit
    try:
        return saved_facts.windows_of(load_plan(source.path / PLAN))
    except PlanRejected:  # of another format: it is a text beside the state, and nothing is read from it
        return None


def _settle(run: RunParts, source: WholeCheckpoint, facts: ResumeFacts) -> None:
    """Put back all that is no tensor; random states last, as whatever comes before may draw."""
    shared, saved = source.shared, source.saved
    same = facts.saved is not None and facts.here is not None and facts.saved.scheduler == facts.here.scheduler
    if run.scheduler is not None and same and shared.get("scheduler") is not None:
        run.scheduler.load_state_dict(shared["scheduler"])
    if run.scaler is not None and shared.get("scaler"):
        run.scaler.load_state_dict(shared["scaler"])
    state.set_engine_state(run.model, shared.get("engine"))
    if saved is not None:
        run.set_epoch(saved.epoch)
    own = source.own or {"loaders": []}
    same_ranks = source.own is not None and saved is not None and saved.run.world_size == world().size
    state.set_positions(run.loaders, own["loaders"], shared.get("loaders", []), same_ranks=same_ranks)
    if source.own is not None:
        state.set_random_states(source.own["random"])


NOT_READ = "checkpoint.not-read"


@frozen(kw_only=True)
class WholeCheckpoint:
    """A checkpoint that is whole, and what is in it."""

    path: Path
    torn: tuple[str, ...] = ()
    """Problems of newer checkpoints in the folder."""
    saved: SavedRun | None
    """None: torch has written it without prepkit, and nobody knows the run that it is of."""
    metadata: Metadata
    shared: dict[str, Any]
    """State that is the same on every rank; empty without a manifest."""
    own: dict[str, Any] | None
    """State of this rank alone; None where fewer ranks were saved."""

    @property
    def names(self) -> dict[str, tuple[int, ...] | None]:
        """Everything that it holds of model and optimizer, and the shapes of tensors."""
        shapes = {name: tuple(one.size) for name, one in files.tensors(self.metadata).items()}
        return {**dict.fromkeys(self.shared.get("plain", {})), **shapes}


def open_source(folder: str) -> WholeCheckpoint:
    """Open the newest whole checkpoint in the folder, its bytes checked. Collective: every rank checks its share.

    Raises ``CheckpointFailed`` on every rank where there is none, and where a byte is not as it was written.
    """
    chosen: Any = on_every_rank(lambda: _choose(folder) if world().is_first else None, NOT_READ, folder)
    path, torn = world().from_first(chosen)
    return evolve(on_every_rank(lambda: _read(path), NOT_READ, path), torn=torn)


def nothing_saved(folder: str) -> str:
    """Why no checkpoint was ever finished in the folder; empty where one was. Collective, by rank 0's word.

    Checkpoints that are there and damaged are something: going on without them would train over them.
    """

    def look() -> str:
        if not world().is_first or not folders.nothing_finished(folder):
            return ""
        return "it holds no finished checkpoint" if Path(folder).exists() else "there is no such folder"

    return world().from_first(on_every_rank(look, NOT_READ, folder))


def _choose(folder: str) -> tuple[Path, tuple[str, ...]]:
    """The first that is whole, and what is wrong with those before it."""
    found, problem = folders.find(folder)
    torn = [f"{Path(folder, folders.LATEST)}: {problem}"] if problem else []
    for path in found:
        if _is_torch_s(path) and str(path) == str(Path(folder)):
            return path, ()
        try:
            files.read_manifest(path)
        except CheckpointFailed as error:
            torn += [f"{finding.where}: {finding.what}" for finding in error.findings]
            continue
        return path, tuple(torn)
    raise failed("checkpoint.not-there", folder, f"it holds no whole checkpoint: {'; '.join(torn)}")


def _is_torch_s(path: Path) -> bool:
    """True where torch has written it without prepkit, and not where one of prepkit's has lost its manifest."""
    ours = any((path / name).exists() for name in (MANIFEST, SHARED, own_file(0)))
    return not ours and (path / METADATA).is_file()


def _read(path: Path) -> WholeCheckpoint:
    if _is_torch_s(path):
        return WholeCheckpoint(path=path, saved=None, metadata=files.read_metadata(path), shared={}, own=None)
    saved = files.read_manifest(path)
    if bad := files.damaged(path, saved):
        before = [str(other) for other in folders.checkpoints(str(path.parent)) if other != path]
        fix = f"Go on from {before[0]}." if before else "Restore the files from a copy."
        raise failed("checkpoint.damaged", path, f"{', '.join(bad)}: not the bytes that were written", fix)
    rank = own_file(world().rank)
    kept = {file.name for file in saved.files}
    return WholeCheckpoint(
        path=path,
        saved=saved,
        metadata=files.read_metadata(path),
        shared=files.read_plain(path / SHARED) if SHARED in kept else {},
        own=files.read_plain(path / rank) if rank in kept else None,
    )


def compared(facts: ResumeFacts, source: WholeCheckpoint, wanted: Contents, *, only_model: bool) -> ResumeFacts:
    """The facts with the names and shapes in which the checkpoint and ``wanted`` differ."""
    stored = files.tensors(source.metadata)
    return evolve(
        facts,
        lacking=tuple(contents.missing(wanted, source.names)),
        unknown=tuple(contents.unknown(wanted, source.names, only_model=only_model)),
        reshaped=tuple(
            f"{name} {list(stored[name].size)}, here {list(one.shape)}"
            for name, one in wanted.tensors.items()
            if name in stored and tuple(stored[name].size) != tuple(one.shape)
        ),
    )


def fill(source: WholeCheckpoint, wanted: Contents) -> None:
    """Read tensors into those of ``wanted``, and all else into its ``plain``. Collective."""
    reader, planner = files.reader(source.path, source.metadata), LoadPlanner()
    tensors = contents.nested(wanted.tensors)

    def alone() -> None:
        """Take the steps that torch's ``load`` takes without a process group, of which it would warn each time."""
        planner.set_up_planner(tensors, source.metadata, is_coordinator=True)
        reader.set_up_storage_reader(source.metadata, True)  # noqa: FBT003 - torch's own signature
        plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        (plan,) = reader.prepare_global_plan(plans)
        reader.read_data(planner.finish_plan(plan), planner).wait()

    if world().running:
        with torch_failure(NOT_READ, source.path):
            load(tensors, storage_reader=reader, planner=planner)
    else:
        on_every_rank(alone, NOT_READ, source.path)
    plain = source.shared.get("plain", {})
    wanted.plain.update({name: plain[name] for name in wanted.plain})
