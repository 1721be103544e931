"""Loaders that are prepared without a model: a plan of nothing but loaders."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from attrs import evolve
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from prepkit.api import apply, build_plan
from prepkit.compat.accelerate import group
from prepkit.compat.accelerate.arguments import launched_config
from prepkit.compat.accelerate.not_offered import BEFORE, NotOffered
from prepkit.compat.accelerate.operations import synchronize_rng_states
from prepkit.config import DDP, FSDP1, FSDP2, Config, DeepSpeed, EachLoader, Intent, Mesh, ShardLoaders, Single
from prepkit.loading.joint_sources import DispatchedSource
from prepkit.loading.loader import Loader
from prepkit.loading.sources import IndexedSource
from prepkit.ranks import launcher
from prepkit.ranks.world import world
from prepkit.resolve.deepspeed.data import tensor_parallel
from prepkit.resolve.engines import engine_of, traits
from prepkit.resolve.loaders import choice
from prepkit.training.prepared import Prepared

_BY_RANK = Single | DDP | FSDP1 | FSDP2 | DeepSpeed
"""Engines under which every rank reads its own part, unless some of them hold parts of one tensor."""


def prepared_alone(config: Config, loaders: list[Any]) -> Prepared:
    """What ``apply`` makes of loaders and a module that nobody uses. Collective where it starts the process group.

    Raises ``PlanRejected``; and ``NotOffered`` for engines that divide the data by what the model is cut into.
    """
    tensor = config.mesh.tensor if isinstance(config.mesh, Mesh) else 1
    if traits(config).own_layout:
        tensor = tensor_parallel(engine_of(config, DeepSpeed))
    if not isinstance(config.engine, _BY_RANK) or tensor != 1:
        what = f"prepare of loaders alone under {type(config.engine).__name__}"
        raise NotOffered(what, "give them to one prepare with the model, which says what data is divided over", BEFORE)
    share_generators(config, loaders)
    engine = Single() if group.is_alone() else DDP()
    alone = Config(engine=engine, device=config.device, timeout_s=config.timeout_s, loaders=config.loaders)
    with torch.random.fork_rng(devices=[]):  # what the script draws next is what it would have drawn
        nobody = torch.nn.Linear(1, 1)
    ready = apply(build_plan(evolve(alone, intent=Intent.INFERENCE), nobody, loaders=loaders), loaders=loaders)
    for index, loader in enumerate(ready.loaders):  # a plan that trains nothing has no windows; the model may
        how = choice(config, index)
        loader.ends_window = isinstance(how, ShardLoaders) and how.ends_window and how.purpose == "training"
    as_accelerate(ready.loaders)
    return ready


def share_generators(config: Config, loaders: Iterable[Any]) -> None:
    """Where several ranks draw by no seed, each sampler gets a generator, and that of rank 0 its state. Collective.

    So does accelerate, at the same place among the numbers that a script draws.
    """
    for index, loader in enumerate(() if group.is_alone() else loaders):
        how = choice(config, index)
        if not isinstance(how, ShardLoaders) or how.draws == "seed" or how.dispatch:
            continue
        batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
        sampler = getattr(batches, "sampler", None)
        if sampler is None or not hasattr(sampler, "generator") or isinstance(loader.dataset, IterableDataset):
            continue
        if sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        synchronize_rng_states(["generator"], sampler.generator)


def by_loader(config: Config, objects: Iterable[Any], asked: Any) -> Config:
    """The config for loaders of which ``asked``, a ``DataLoaderConfiguration`` or None, leaves something open.

    Then rank 0 reads streams for all, and orders by a seed follow from that of torch's generator, as accelerate has it.
    """
    how = config.loaders
    loaders = [one for one in objects if isinstance(one, DataLoader) and not isinstance(one, Loader)]
    if not loaders or not isinstance(how, ShardLoaders):
        return config
    if how.draws == "seed" and getattr(asked, "data_seed", 0) is None:
        how = evolve(how, seed=world().from_first(torch.initial_seed()))
    streams = [isinstance(one.dataset, IterableDataset) and how.to_device for one in loaders]
    if getattr(asked, "dispatch_batches", None) is not None or group.is_alone() or not any(streams):
        return evolve(config, loaders=how)
    return evolve(config, loaders=EachLoader(tuple(evolve(how, dispatch=stream) for stream in streams)))


class AcceleratedLoader(Loader):
    """A prepared loader, and what accelerate's tells of itself."""

    __slots__ = ()

    @property
    def base_dataloader(self) -> Any:
        """The one that it reads."""
        return self.source.loader

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in use is the last of its pass."""
        return self.present is not None and self.present.last

    @property
    def iteration(self) -> int:
        """The number of the pass."""
        return self.epoch

    @property
    def total_dataset_length(self) -> int:
        """Samples on all ranks. Raises ``TypeError`` for a stream without a length."""
        return int(getattr(self.dataset, "total_length", None) or len(self.dataset))

    @property
    def remainder(self) -> int:
        """Samples of a pass beyond whole batches of all ranks; -1 where they are dropped, or nobody knows."""
        if self.drop_last or not self.total_batch_size:
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except TypeError:
            return -1


def as_accelerate(loaders: Iterable[Any]) -> None:
    """Lets them tell what accelerate's tell, and read a batch before the one in use is given, as accelerate's draw.

    Of what rank 0 reads for all the others draw as many random numbers.
    """
    for loader in (loader for loader in loaders if isinstance(loader, Loader)):
        loader.__class__ = AcceleratedLoader
        source = loader.source
        if isinstance(source, DispatchedSource):
            source.draws = True
        inner = getattr(source, "inner", source)  # what rank 0 reads for all
        if isinstance(inner, IndexedSource):  # others do so anyway
            inner.ahead = True


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    **others: Any,
) -> Any:
    """The loader, divided over the ranks. Raises ``NotOffered`` for the rest."""
    for name in (name for name, value in others.items() if value):
        raise NotOffered(f"prepare_data_loader({name}=...)", "write pk.build_plan(..., loaders=[loader])")
    here = (launcher.from_launcher(launcher.WORLD_SIZE, 1) or 1, launcher.from_launcher(launcher.RANK, 0) or 0)
    if (num_processes, process_index) not in ((None, None), here):
        what = f"prepare_data_loader(num_processes={num_processes}, process_index={process_index})"
        raise NotOffered(what, "leave both out: the loader is divided over the ranks that were started")
    config = launched_config()
    loaders = ShardLoaders(
        split_batches=split_batches,
        dispatch=bool(dispatch_batches),
        purpose="training" if even_batches else "evaluation",
        whole_batches=True,
        to_device=put_on_device,
        seed=data_seed or 0,
        draws="seed" if use_seedable_sampler else "sampler",
    )
    config = evolve(config, loaders=loaders, device=config.device if device is None else device.type)
    asked = SimpleNamespace(data_seed=data_seed, dispatch_batches=dispatch_batches)
    return prepared_alone(by_loader(config, [dataloader], asked), [dataloader]).loaders[0]


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The loader, whose next pass begins after so many batches of the epoch; the passes after it are whole.

    Where ``load_state`` has put it after so many already, nothing is left out twice. Raises ``NotOffered`` for a
    loader that was not prepared.
    """
    if not isinstance(dataloader, Loader):
        raise NotOffered(f"skip_first_batches({type(dataloader).__name__})", "prepare the loader first", BEFORE)
    dataloader.skip(num_batches)
    return dataloader
