"""``prepkit init``: a first config for a model and a cluster, with what was chosen, why, and what else may be said."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
from attrs import evolve

from prepkit import planner
from prepkit.cli import plan_files as cli_files
from prepkit.cli.options import MOST, memory_option, model_option
from prepkit.cli.terminal import say
from prepkit.config import BF16, DDP, FSDP2, AdamW, CheckpointBlocks, Config, Mesh, OffloadToCPU
from prepkit.facts import Env, Facts
from prepkit.findings import PlanRejected, errors

_ROOM, _ROOM_RECOMPUTED = 0.7, 0.85
"""Shares of a device's memory that are filled: the rest is left to activations, of which recomputed blocks keep few."""
_UNKNOWN = "nothing says whether it fits, as --memory, that of one device, is not given"
_RATE = 1e-4
_GIB = 1 << 30

_HEAD = """\
# How {model} is prepared for training on {gpus}.
# Check it, plan it, and read what each rank will hold:
#   prepkit check {file} {options}
#   prepkit plan {file} {options} -o plan.json
# Editors complete it: prepkit schema config > prepkit.schema.json
#:schema prepkit.schema.json
"""

_WITHOUT = """\
# Add --memory to both commands, such as --memory 80GiB, with that of one device: nothing says yet whether this fits.
"""

_OPEN = """\
# --- what else is often asked for: take a line's "# " away -----------------------------------------------------------

# Micro-batches per optimizer step; or global_batch = N, samples per optimizer step over all ranks.
# accumulation = 1

# Gradients are clipped to this norm just before the optimizer steps; without it they are not clipped.
# clip = { kind = "ClipNorm", max_norm = 1.0 }

# Each block is compiled by itself, which compiles one block and not a whole model.
# compile = "CompileBlocks"

# Seconds after which a collective that hangs ends the run.
# timeout_s = 600.0

# Optimizer steps in all, which the scheduler should last for.
# total_steps = 10000
"""


@click.command(short_help="Write a first config for a model and a cluster.")
@model_option(required=True)
@click.option("--gpus", type=click.IntRange(1, MOST), required=True, help="Devices of a node.")
@click.option("--nodes", type=click.IntRange(1, MOST), default=1, show_default=True, help="Nodes that are alike.")
@memory_option
@click.option("--device", default="cuda", show_default=True, metavar="TYPE", help="Device type, such as cuda or cpu.")
@click.option("-o", "--output", default="prepkit.toml", show_default=True, help="File to write; none is written over.")
def init(model: str, gpus: int, nodes: int, memory: int | None, device: str, output: str) -> None:
    """Write a config for a model and a cluster, with a comment for each choice; prepkit check finds no error in it.

    The first of these that fits is chosen: whole copies, shards on a node and copies over nodes, shards over all; the
    same with recomputed blocks; with offload. Without --memory nothing says what fits. A file that is there already is
    left as it is.
    """
    if gpus * nodes > MOST:
        raise click.UsageError(f"{nodes} nodes of {gpus} devices are more processes than torch counts")
    if Path(output).suffix.lower() != ".toml":
        raise click.UsageError(f"{output}: a commented config is written as TOML; name it NAME.toml")
    if Path(output).exists():
        raise click.UsageError(f"{output} is there already; name another file with -o")
    env = Env.declare(world_size=gpus * nodes, per_node=gpus, device=device, memory=memory)
    facts = cli_files.attempt(lambda: cli_files.facts(model, env))
    if isinstance(facts, PlanRejected):
        cli_files.refuse((facts,), as_json=False)
    cfg, why = _chosen(facts, nodes)
    options = f"--model {shlex.quote(model)} --world-size {gpus * nodes} --per-node {gpus} --device {device}"
    options += (
        "" if memory is None else f" --memory {memory // _GIB}GiB" if memory % _GIB == 0 else f" --memory {memory}"
    )
    head = {"model": model, "gpus": f"{nodes} x {gpus} {device}", "file": shlex.quote(output), "options": options}
    text = (_HEAD if memory else f"{_HEAD}{_WITHOUT}").format_map(
        {name: _in_one_line(value) for name, value in head.items()}
    )
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.write("\n".join((text, *_settings(cfg, why), _OPEN)))
    except OSError as error:
        raise click.UsageError(f"{output} cannot be written: {error.strerror or error}") from None
    say(f"wrote {output}: {why}", err=True)
    if memory is None:
        say("give --memory, such as 80GiB: here, or to prepkit check, which then says whether it fits", err=True)
    say(f"prepkit check {shlex.quote(output)} {options}")


def _in_one_line(text: str) -> str:
    """The text as a comment holds it: no character of it ends the line."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _chosen(facts: Facts, nodes: int) -> tuple[Config, str]:
    """The first candidate that leaves room for activations, else the smallest; ends the command if none is legal."""
    memory, refused = facts.env.memory, []
    legal: list[tuple[int, Config, str]] = []
    for cfg, why in _candidates(facts, nodes):
        plan = planner.plan(cfg, facts)
        if (rejected := plan.swap().value_or(None)) is not None:
            refused.append(rejected)
            continue
        costs = planner.costs(plan.unwrap())
        if costs is None or memory is None:
            return cfg, f"{why}; {_UNKNOWN if memory is None else 'what it holds there is not predicted'}"
        if costs.ceiling <= (_ROOM if cfg.checkpointing is None else _ROOM_RECOMPUTED) * memory:
            return cfg, why
        legal.append((costs.ceiling, cfg, f"{why}; it leaves little room, or none, for activations"))
    if not legal:
        cli_files.refuse((PlanRejected(tuple(found for one in refused[:1] for found in errors(one))),), as_json=False)
    return min(legal, key=lambda one: one[0])[1:]


def _candidates(facts: Facts, nodes: int) -> Iterator[tuple[Config, str]]:
    """Configs and how each lays the model out: those that send least first, then all again with recomputed blocks."""
    world, per_node = facts.env.world_size, facts.env.per_node or facts.env.world_size
    plain = Config(optimizer=AdamW(lr=_RATE), precision=BF16())
    sharded = evolve(plain, engine=FSDP2())
    ways = [(plain, "all of it on one device") if world == 1 else (evolve(plain, engine=DDP()), _COPIES)]
    if nodes > 1 and per_node > 1:
        local = evolve(sharded, mesh=Mesh(replicate=nodes, shard=per_node))
        ways += [(local, "a copy on each node in shards over its devices, so that little crosses nodes")]
    ways += [(sharded, "shards over all devices")] if world > 1 else []
    yield from ways
    recomputed = CheckpointBlocks()
    yield from ((evolve(cfg, checkpointing=recomputed), f"{why}, each block recomputed") for cfg, why in ways)
    offloaded = evolve(sharded, engine=FSDP2(offload=OffloadToCPU()), checkpointing=recomputed)
    yield offloaded, "shards over all devices, each block recomputed, on the host between uses"


_COPIES = "a whole copy on each device"


def _settings(cfg: Config, why: str) -> Iterator[str]:
    """The lines of what was chosen."""
    yield f"# {why[0].upper()}{why[1:]}."
    name = type(cfg.engine).__name__
    plain = cfg.engine == type(cfg.engine)()
    yield f'engine = "{name}"\n' if plain else f'engine = {{ kind = "{name}", offload = "OffloadToCPU" }}\n'
    if cfg.mesh is not None:
        yield "# Copies over nodes, shards on each."
        yield f"mesh = {{ replicate = {cfg.mesh.replicate}, shard = {cfg.mesh.shard} }}\n"
    yield "# Computed in bfloat16; trained parameters, and the optimizer's state with them, are held in float32."
    yield '# To hold them as they are stored: { kind = "BF16", master_weights = false }.'
    yield 'precision = "BF16"\n'
    if cfg.checkpointing is not None:
        yield "# Each block is computed again in backward, so that its activations are not kept."
        yield 'checkpointing = "CheckpointBlocks"\n'
    yield "# Made after the model is wrapped, from the parameters as they are then. The rate is yours to choose."
    yield f'optimizer = {{ kind = "AdamW", lr = {_RATE} }}\n'
