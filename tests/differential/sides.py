"""A case run by accelerate and by prepkit, in one process of one or two: the same file, model, batches and steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import prepkit as pk
from tests.differential.case import Case, batch, made
from tests.differential.recorder import initialised, recorded
from tests.differential.seen import Seen, Table, of_calls, of_model, of_optimizer

STEPS = 2
DYNAMO = ("capture_scalar_outputs", "skip_fwd_side_effects_in_bwd_under_checkpoint")


def both(rank: int, world: int, case: Case, path: Path) -> tuple[Seen, Seen]:
    """What accelerate did on this rank with the file, and what prepkit did."""
    del world
    warnings.simplefilter("ignore")
    with _launched(path, case):
        theirs = _seen(_by_accelerate, rank, case, path)
    return theirs, _seen(_by_prepkit, rank, case, path)


def _seen(side: Callable[[int, Case, Path], Seen], rank: int, case: Case, path: Path) -> Seen:
    try:
        return side(rank, case, path)
    except pk.PlanRejected as error:
        return Seen(refused=", ".join(sorted({one.rule for one in error.findings if one.severity == "error"})))
    except Exception as error:  # whatever accelerate or what it calls refuses with
        return Seen(refused=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}")


def _trained(rank: int, forward: Callable[[Any], Any], step: Callable[[Any], None], look: Callable[[], Table]) -> Table:
    """The loss before each step and after the last; and what there is to see between the last step and that loss."""
    losses: Table = {}
    table: Table = {}
    for number in range(STEPS + 1):
        if number == STEPS:
            table = look()
        tokens = batch(rank, number)
        logits = forward(tokens)
        loss = cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        losses[f"loss[{number}]"] = loss.item()
        table["output dtype"] = str(logits.dtype)
        if number < STEPS:
            step(loss)
    return table | losses


def _loader() -> DataLoader[Any]:
    """DeepSpeed wants to know how many samples a step has."""
    return DataLoader([batch(0, 0)[0] for _ in range(8)], batch_size=2)


# --- accelerate ------------------------------------------------------------------------------------------------------


def _by_accelerate(rank: int, case: Case, path: Path) -> Seen:
    del path
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    if case.world > 1 and case.engine != "ddp":  # accelerate has none of these engines on CPU: ST-9
        PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}
    accelerator = Accelerator()
    model, optimizer = made(case)
    deepspeed = case.engine.startswith("zero")
    with recorded(model) as calls, initialised() if deepspeed else nullcontext([]) as started:
        loaders = [_loader()] if deepspeed else []
        prepared, bound, *_ = accelerator.prepare(model, optimizer, *loaders)

    def step(loss: torch.Tensor) -> None:
        accelerator.backward(loss)
        bound.step()
        bound.zero_grad()

    table = _trained(rank, prepared, step, lambda: of_model(prepared) | of_optimizer(bound.optimizer, prepared))
    return Seen(table=of_calls(calls + started) | table)


@contextmanager
def _launched(path: Path, case: Case) -> Iterator[None]:
    """The variables that ``accelerate launch --config_file`` sets, and no trace of an earlier run."""
    from accelerate.commands import launch
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import launch as variables

    AcceleratorState._reset_state(reset_partial_state=True)
    before = dict(os.environ)
    if case.world == 1:  # ``accelerate launch`` starts one process as it is
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    args, defaults, precision_said = launch._validate_launch_command(args)
    if case.engine.startswith("zero"):
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_said else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)  # as ``launch_command`` does
        said = variables.prepare_deepspeed_cmd_env(args)[1]
    elif case.world > 1:
        said = variables.prepare_multi_gpu_env(args)
    else:
        said = variables.prepare_simple_launcher_cmd_env(args)[1]
    os.environ.update({key: value for key, value in said.items() if key.startswith(("ACCELERATE_", "FSDP_"))})
    threads = torch.get_num_threads()
    dynamo = {name: getattr(torch._dynamo.config, name) for name in DYNAMO} if case.compiled != "no" else {}
    try:
        yield
    finally:
        for name, value in dynamo.items():  # accelerate sets them for the process: P2-6
            setattr(torch._dynamo.config, name, value)
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


# --- prepkit ---------------------------------------------------------------------------------------------------------


def _by_prepkit(rank: int, case: Case, path: Path) -> Seen:
    config = evolve(pk.import_config(str(path)).config, timeout_s=60.0)
    model, optimizer = made(case)
    deepspeed = case.engine.startswith("zero")
    with recorded(model) as calls, initialised() if deepspeed else nullcontext([]) as started:
        plan = pk.build_plan(config, model, optimizer=optimizer, loaders=[_loader()] if deepspeed else ())
        ready: Any = pk.apply(plan)

    def step(loss: torch.Tensor) -> None:
        ready.backward(loss)
        ready.step()

    table = _trained(
        rank, ready.model, step, lambda: of_model(ready.model) | of_optimizer(ready.optimizer, ready.model)
    )
    ready.close()
    return Seen(table=of_calls(calls + started) | table)
