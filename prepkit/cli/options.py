"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve, frozen

from prepkit.config import Config
from prepkit.config.optimizer import OPTIMIZERS, OptimizerSpec
from prepkit.facts import Env, LoaderFacts, parse_bytes

if TYPE_CHECKING:
    from prepkit.formats.importers.source import Imported

FILE = click.Path(exists=True, dir_okay=False)
"""A file that is there; click ends the command with exit code 2 where it is not."""

ENGINES = (
    "single",
    "ddp",
    "fsdp1",
    "fsdp2",
    "fsdp2+offload",
    "fsdp2+tensor",
    "tensor",
    "zero1",
    "zero1+offload",
    "zero2",
    "zero2+offload",
    "zero3",
    "zero3+offload",
    "zero3+offload-all",
)
"""Names that ``prepkit sweep`` knows; ``sweep.ENGINES`` has what they stand for."""

MOST = 2**31 - 1
"""Processes that torch counts at most."""

SIZE = "{world_size}"
"""What stands for the world size in the name of a file to write."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
model_option = functools.partial(
    click.option,
    "--model",
    metavar="MODEL",
    help="PKG.MOD:FACTORY, a function that returns it; or a folder with config.json, or ORG/NAME in the hub's cache.",
)
"""A model whose facts are enough."""

object_option = click.option(
    "--model", required=True, metavar="PKG.MOD:FACTORY", help="A function without arguments that returns the model."
)
"""A model that has to be there, to be rehearsed or trained."""

kind_option = click.option(
    "--from", "kind", metavar="LIBRARY", help="Whose config it is; told by its keys if left out."
)


policy_option = click.option(
    "--policy", "policies", type=FILE, multiple=True, help="Rules of a team: a TOML or Python file; may be repeated."
)


@frozen(kw_only=True)
class Cluster:
    """The cluster that a command line declares; None, or no sizes: what is here."""

    sizes: tuple[int, ...] = ()
    device: str | None = None
    per_node: int | None = None
    memory: int | None = None
    host_memory: int | None = None
    torch: str | None = None
    batch_size: int | None = None
    """Samples that a rank reads at once."""
    optimizer: OptimizerSpec | None = None
    """What a config that names no optimizer is taken to ask for."""

    def with_optimizer(self, cfg: Config) -> Config:
        """The config as if it asked for the optimizer of the command line, where it names none of its own."""
        from prepkit.resolve.deepspeed.data import said

        named = cfg.optimizer is not None or "optimizer" in said(cfg.engine)
        return cfg if named or self.optimizer is None else evolve(cfg, optimizer=self.optimizer)

    @property
    def declared_loaders(self) -> tuple[LoaderFacts, ...]:
        """One loader of which the batch size alone is known; none where that is not said."""
        size = self.batch_size
        return () if size is None else (LoaderFacts(batch_size=size, length=None, sampler="sequential"),)

    def filled_by(self, imported: Imported) -> Cluster:
        """The same with what the file itself says, where the command line says nothing.

        An optimizer of the class that the file has takes the file's numbers.
        """
        size, own = self.batch_size or imported.batch_size, imported.optimizer
        optimizer = own if self.optimizer is None or type(own) is type(self.optimizer) else self.optimizer
        return evolve(self, batch_size=size, optimizer=optimizer)

    def envs(
        self, imported: Imported | None = None, started: Mapping[int, int | None] | None = None
    ) -> tuple[Env | None, ...]:
        """One declared environment per world size; ``(None,)``, the environment that is here, when nothing is said.

        What the command line leaves open is as scripts start it, ``started``: all processes to those of a node; and
        else as an imported config declares it.
        """
        options = {"device": self.device, "memory": self.memory, "torch": self.torch, "host_memory": self.host_memory}
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        sizes, each = self.sizes or tuple(started or ()), dict(started or {})
        if imported is not None and imported.world_size is not None:
            sizes = sizes or (imported.world_size,)
            if sizes == (imported.world_size,):
                each.setdefault(imported.world_size, imported.per_node)
            given = ({} if imported.device is None else {"device": imported.device}) | given
        if not given and not sizes and self.per_node is None:
            return (None,)
        return tuple(
            Env.declare(world_size=size, per_node=self.per_node or each.get(size), **given)
            for size in dict.fromkeys(sizes or (1,))
        )


def _bytes(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _optimizer(_: click.Context, __: click.Parameter, name: str | None) -> OptimizerSpec | None:
    made: OptimizerSpec | None = next((spec() for spec in OPTIMIZERS if spec.__name__ == name), None)
    return made


memory_option = click.option("--memory", callback=_bytes, metavar="SIZE", help="Memory of one device, such as 80GiB.")


activations_option = click.option(
    "--activations", callback=_bytes, metavar="SIZE", help="What one micro-batch takes, as pk.activations estimates it."
)


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that declare a cluster, and passes them on as ``cluster``."""

    @functools.wraps(command)
    def run(world_size: tuple[int, ...], **rest: Any) -> None:
        declared = {
            name: rest.pop(name)
            for name in ("device", "per_node", "memory", "host_memory", "torch", "batch_size", "optimizer")
        }
        command(cluster=Cluster(sizes=world_size, **declared), **rest)

    for option in (
        click.option(
            "--optimizer",
            type=click.Choice([spec.__name__ for spec in OPTIMIZERS], case_sensitive=False),
            callback=_optimizer,
            help="As if CONFIG asked for it, with its defaults, where CONFIG names none: memory then counts its state.",
        ),
        click.option(
            "--batch-size", type=click.IntRange(1, MOST), help="Samples that a rank reads at once, for global_batch."
        ),
        click.option("--torch", metavar="VERSION", help="torch version there, such as 2.9."),
        click.option("--host-memory", callback=_bytes, metavar="SIZE", help="Memory of a node, such as 384GB."),
        memory_option,
        click.option("--per-node", type=click.IntRange(1, MOST), help="Processes on one node."),
        click.option("--device", metavar="TYPE", help="Device type, such as cuda or cpu."),
        click.option("--world-size", type=click.IntRange(1, MOST), multiple=True, help="Processes; may be repeated."),
    ):
        run = option(run)
    return run
