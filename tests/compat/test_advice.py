"""What the face of accelerate does not offer says what to write in its place: each advice, followed to the letter."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from attrs import frozen
from torch.nn import Linear, Module, Sequential
from torch.utils.data import DataLoader

import prepkit as pk
from prepkit.compat import accelerate as face
from prepkit.compat.accelerate import Accelerator, NotOffered
from prepkit.compat.accelerate.not_offered import _WORDS, ARGUMENTS, OTHERWISE
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang

FACE = Path(face.__file__).parent
ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))


def net() -> Sequential:
    torch.manual_seed(3)
    return Sequential(Linear(4, 4), Linear(4, 1))


def sgd(model: Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]  # rows of a tensor


def started(accelerator: Accelerator) -> tuple[Any, Any]:
    """A prepared model with its optimizer."""
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    return model, optimizer


def steps(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Trains a step as a script does, which has to change the model."""
    before = [param.detach().clone() for param in model.parameters()]
    accelerator.backward(model(ROWS).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    assert any(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@contextmanager
def written(advice: str, **given: Any) -> Iterator[Accelerator]:
    """The ``Accelerator`` that an advice writes out, made of its own text."""
    code = re.search(r"Accelerator\(.*\)", advice)
    assert code is not None, advice
    text = re.sub(r";.*", "", code[0])
    accelerator = eval(text, {"pk": pk, "Accelerator": Accelerator, **given})  # of the face's own texts
    yield accelerator
    accelerator.free_memory()


@frozen
class Refused:
    """One refusal: the function that raises it, what a script does, what the advice says, and that, done."""

    where: str
    done: Callable[[Path], Any]
    advice: str
    """A part of it."""
    followed: Callable[[Path], Any]


ROW: dict[str, Refused] = {}


def refused(where: str, advice: str, done: Callable[[Path], Any]) -> Callable[[Callable[[Path], Any]], Any]:
    def told(followed: Callable[[Path], Any]) -> None:
        ROW[followed.__name__] = Refused(where, done, advice, followed)

    return told


def plain() -> Accelerator:
    return Accelerator(cpu=True)


def half() -> Accelerator:
    config = pk.Config(precision=pk.FP16(init_scale=1024.0), overrides=("precision.fp16-unsupported",))
    return Accelerator(cpu=True, config=config)


# --- on one process --------------------------------------------------------------------------------------------------


@refused(
    "Accelerator.prepare",
    "give Accelerator(device_placement=False)",
    lambda _: plain().prepare(net(), device_placement=[False]),
)
def device_placement(_: Path) -> None:
    started(Accelerator(cpu=True, device_placement=False))


@refused("Accelerator._prepare_one", "leave it out", lambda _: plain().prepare_model(net(), device_placement=False))
def options_of_one(_: Path) -> None:
    assert isinstance(plain().prepare_model(net()), Module)


@refused(
    "Accelerator.join_uneven_inputs",
    "even_batches=False))",
    lambda _: plain().join_uneven_inputs([], even_batches=False),
)
def uneven_batches(_: Path) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    with accelerator.join_uneven_inputs([], even_batches=None):
        assert len([*accelerator.prepare(loader())]) == 2


@refused(
    "_precision", "give Accelerator(config=pk.Config(precision=pk.FP8()))", lambda _: Accelerator(mixed_precision="fp8")
)
def eight_bits(_: Path) -> None:
    with written("give Accelerator(config=pk.Config(precision=pk.FP8()))") as accelerator:
        assert accelerator.config.precision == pk.FP8()


@refused(
    "_handled",
    "leave it out; for FP8 give Accelerator",
    lambda _: Accelerator(cpu=True, kwargs_handlers=[SimpleNamespace()]),
)
def handlers(_: Path) -> None:
    steps(accelerator := Accelerator(cpu=True, kwargs_handlers=[]), *started(accelerator))


@refused(
    "_hook",
    "or give Accelerator(config=pk.Config(engine=pk.DDP(hook=pk.ddp.PowerSGDHook(rank=2))))",
    lambda _: Accelerator(
        config=pk.Config(engine=pk.DDP()),
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="batched_power_sgd")],
    ),
)
def batched_hooks(_: Path) -> None:
    with written(ROW["batched_hooks"].advice) as accelerator:
        assert accelerator.config.engine == pk.DDP(hook=pk.ddp.PowerSGDHook(rank=2))
    handler = DistributedDataParallelKwargs(comm_hook="power_sgd")
    assert Accelerator(config=pk.Config(engine=pk.DDP()), kwargs_handlers=[handler]).config.engine.hook is not None  # type: ignore[union-attr]


@refused(
    "prepare_data_loader", "write pk.build_plan(..., loaders=[loader])",
    lambda _: face.prepare_data_loader(loader(), slice_fn_for_dispatch=len),
)  # fmt: skip
def slices(_: Path) -> None:
    model = net()
    ready = pk.apply(pk.build_plan(pk.Config(device="cpu"), model, optimizer=sgd(model), loaders=[loader()]))
    assert len([*ready.loaders[0]]) == 2
    ready.close()


@refused(
    "prepare_data_loader",
    "leave both out",
    lambda _: face.prepare_data_loader(loader(), num_processes=3, process_index=1),
)
def processes(_: Path) -> None:
    assert len([*face.prepare_data_loader(loader())]) == 2


@refused("skip_first_batches", "prepare the loader first", lambda _: face.skip_first_batches(loader(), 1))
def skipped(_: Path) -> None:
    assert len([*face.skip_first_batches(plain().prepare(loader()), 1)]) == 1


def with_options(_: Path) -> None:
    accelerator = plain()
    model, _optimizer = started(accelerator)
    accelerator.backward(model(ROWS).sum(), create_graph=True)


@refused("AcceleratedLoop.backward", "write one forward for each backward, and leave it out", with_options)
def kept_graph(_: Path) -> None:
    steps(accelerator := plain(), *started(accelerator))


def prepared_twice(_: Path) -> None:
    model, _optimizer = started(plain())
    plain().prepare(model, sgd(model))


@refused("Preparation._unprepare", "let it go before: accelerator.free_memory()", prepared_twice)
def let_go_before(_: Path) -> None:
    accelerator = plain()
    model = accelerator.unwrap_model(started(accelerator)[0])
    accelerator.free_memory()
    steps(accelerator, *accelerator.prepare(model, sgd(model)))


def in_part(_: Path) -> None:
    accelerator = half()
    model, _optimizer = started(accelerator)
    accelerator.backward(model(ROWS).sum())
    accelerator.clip_grad_norm_([next(model.parameters())], 1.0)


@refused(
    "AcceleratedLoop._clipped_now", "give model.parameters() of the one model, or write mixed_precision='bf16'", in_part
)
def clipped_in_part(_: Path) -> None:
    for precision in ("fp16", "bf16"):
        accelerator = half() if precision == "fp16" else Accelerator(cpu=True, mixed_precision=precision)
        model, optimizer = started(accelerator)
        accelerator.backward(model(ROWS).sum())
        params = model.parameters() if precision == "fp16" else [next(model.parameters())]
        assert accelerator.clip_grad_norm_(params, 1.0) > 0
        optimizer.step()


def save_with_more(folder: Path) -> None:
    accelerator = plain()
    started(accelerator)
    accelerator.save_state(str(folder / "state"), exclude=())


@refused("no_options", "leave exclude out", save_with_more)
def saved_with_more(folder: Path) -> None:
    accelerator = plain()
    started(accelerator)
    accelerator.load_state(accelerator.save_state(str(folder / "state"), safe_serialization=False))
    accelerator.save_model(accelerator.ready.model, str(folder / "model"), max_shard_size="1GB")


class DummyOptim:
    """As DeepSpeed's examples of accelerate have it."""


@refused(
    "place_of", "give a torch.optim.AdamW and a scheduler of torch", lambda _: plain().prepare(net(), DummyOptim())
)
def dummies(_: Path) -> None:
    model, accelerator = net(), plain()
    optimizer = torch.optim.AdamW(model.parameters())
    prepared = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    steps(accelerator, *prepared[:2])


@refused("reduce", "write mean, sum, max, none", lambda _: face.reduce(ROWS, "median"))
def reductions(_: Path) -> None:
    for word in ("mean", "sum", "max", "none"):
        assert torch.equal(face.reduce(ROWS, word), ROWS)


@refused("Preparation.loop", "call accelerator.prepare(model, ...) first", lambda _: plain().backward(ROWS.sum()))
def before_prepare(_: Path) -> None:
    steps(accelerator := plain(), *started(accelerator))


@refused(
    "synchronize_rng_states",
    "write torch, cuda, or generator and pass one",
    lambda _: face.synchronize_rng_states(["xla"]),
)
def random_states(_: Path) -> None:
    face.synchronize_rng_states(["torch", "generator"], torch.Generator())


def stepped_without_backward(_: Path) -> None:
    accelerator = half()
    model, optimizer = started(accelerator)
    model(ROWS).sum().backward()
    optimizer.step()


@refused(
    "as_the_loop loop.step-without-backward",
    "write accelerator.backward(loss) in the place of loss.backward()",
    stepped_without_backward,
)
def backward_by_hand(_: Path) -> None:
    steps(accelerator := plain(), *started(accelerator))


def sharded() -> Accelerator:
    return Accelerator(cpu=True, config=pk.Config(engine=pk.FSDP2()))


def with_closure(_: Path) -> None:
    accelerator = sharded()
    model, optimizer = started(accelerator)
    optimizer.step(lambda: model(ROWS).sum())


@refused("as_the_loop loop.closure-wanted", "write accelerator.ready.step(closure)", with_closure)
def closures(_: Path) -> None:
    accelerator = sharded()
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model[0].weight.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.optimizer.zero_grad()
        loss: torch.Tensor = model(ROWS).square().mean()
        accelerator.backward(loss)
        return loss

    accelerator.ready.step(closure)
    assert not torch.equal(before, model[0].weight)


def cleared(inside: Callable[[Any, Any], None], accumulation: int = 1, step: int = 1) -> Callable[[Path], None]:
    def done(folder: Path) -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model, optimizer = started(accelerator)
        for at in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(ROWS).sum())
                if at == step:
                    inside(model, optimizer)
                optimizer.step()
                if accumulation == 2 and at == 0 and inside is nothing:
                    accelerator.save_state(str(folder / "state"))

    return done


def nothing(model: Any, optimizer: Any) -> None:
    del model, optimizer


def moved(clear: Callable[[Any, Any], None], accumulation: int = 1) -> None:
    """The clearing behind the step, and above the forward."""
    for above in (True, False):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model, optimizer = started(accelerator)
        before = model[0].weight.detach().clone()
        for _ in range(2):
            with accelerator.accumulate(model):
                if above:
                    clear(model, optimizer)
                accelerator.backward(model(ROWS).sum())
                optimizer.step()
                if not above:
                    clear(model, optimizer)
        assert not torch.equal(before, model[0].weight)


@refused(
    "as_the_loop loop.cleared-before-step",
    "move it after optimizer.step(), or above the forward",
    cleared(lambda _, o: o.zero_grad()),
)
def cleared_before_the_step(_: Path) -> None:
    moved(lambda _, optimizer: optimizer.zero_grad())


@refused(
    "as_the_loop loop.gradients-gone",
    "move model.zero_grad() after optimizer.step(), or above the forward",
    cleared(lambda m, _: m.zero_grad()),
)
def model_cleared(_: Path) -> None:
    moved(lambda model, _: model.zero_grad())


@refused(
    "as_the_loop run.steps-nothing",
    "move zero_grad() after optimizer.step(), or above the forward",
    cleared(lambda m, _: m.zero_grad(), step=0),
)
def cleared_from_the_first_step_on(_: Path) -> None:
    moved(lambda model, _: model.zero_grad())


@refused(
    "as_the_loop loop.unfinished-window",
    "write `if accelerator.sync_gradients:` above it, after optimizer.step()",
    cleared(nothing, 2),
)
def saved_inside(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = started(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(ROWS).sum())
            optimizer.step()
            if accelerator.sync_gradients:
                accelerator.save_state(str(folder / "state"))
    assert (folder / "state").is_dir()


def lost(_: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = started(accelerator)
    for at in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(ROWS).sum())
            optimizer.step()
        if at == 0:
            model.zero_grad()


@refused("as_the_loop loop.gradients-lost", "write optimizer.zero_grad(), which waits for the end of the window", lost)
def lost_inside(_: Path) -> None:
    moved(lambda _, optimizer: optimizer.zero_grad(), 2)


@refused("Accelerator.__getattr__", "unscales by itself", lambda _: plain().unscale_gradients())
def unscaled(_: Path) -> None:
    accelerator = half()
    model, optimizer = started(accelerator)
    accelerator.backward(model(ROWS).sum())
    scale = accelerator.scaler.get_scale()
    assert 0 < accelerator.clip_grad_norm_(model.parameters(), 1.0) < scale
    optimizer.step()


@refused("Accelerator.__getattr__", "write accelerator.backward(loss)", lambda _: plain().lomo_backward(ROWS.sum()))
def lomo(_: Path) -> None:
    steps(accelerator := plain(), *started(accelerator))


@pytest.mark.parametrize("name", ROW)
def test_each_advice_on_one_process_works_as_it_is_written(name: str, tmp_path: Path) -> None:
    row = ROW[name]
    with pytest.raises(NotOffered) as caught:
        row.done(tmp_path)
    assert row.advice in str(caught.value)
    assert raised_by(caught) == row.where
    row.followed(tmp_path)
    plain().end_training()


def raised_by(caught: Any) -> str:
    """The function of the face that raised it, and which rule of the loop it tells."""
    frames = [frame for frame in caught.traceback if Path(str(frame.path)).parent == FACE]
    name: str = frames[-1].frame.code.raw.co_qualname
    rule = caught.value.findings[0].rule
    return f"as_the_loop {rule}" if rule in _WORDS else name


# --- on two ----------------------------------------------------------------------------------------------------------

PLAN = pk.tp.TPPlan((pk.tp.TPLayer("0", "colwise"), pk.tp.TPLayer("1", "rowwise", output_layout="replicate")))
BESIDE = ("rng_types", "megatron_lm_plugin")
"""Arguments whose advice is to leave them out."""


def by_fields(rank: int, world: int) -> list[str]:
    """Trains a step with what is to be given in the place of each argument."""
    del rank, world
    lean()
    trained = []
    for name, advice in ARGUMENTS.items():
        if name in BESIDE:
            continue
        with pytest.raises(NotOffered) as caught:
            Accelerator(cpu=True, **{name: "given"})
        assert advice in str(caught.value)
        with written(advice, plan=PLAN) as accelerator:
            steps(accelerator, *started(accelerator))
        trained.append(name)
    accelerator.end_training()
    return trained


def test_arguments_without_a_place_have_a_field_that_trains(gang2: Gang) -> None:
    for trained in gang2.run_fresh(by_fields, timeout=180):
        assert trained == [name for name in ARGUMENTS if name not in BESIDE]


@pytest.mark.parametrize("name", BESIDE)
def test_arguments_that_are_to_be_left_out_change_nothing(name: str) -> None:
    with pytest.raises(NotOffered, match="leave it out"):
        Accelerator(cpu=True, **{name: ["torch"]})
    steps(accelerator := plain(), *started(accelerator))
    accelerator.end_training()


def across_ranks(rank: int, world: int, folder: str) -> list[str]:
    """The refusals that need ranks or engines; returns who raised them."""
    lean()
    heard = []

    def told(advice: str, done: Callable[[], Any]) -> None:
        with pytest.raises(NotOffered) as caught:
            done()
        assert advice in str(caught.value), str(caught.value)
        heard.append(raised_by(caught))

    # DDP: two backwards of one forward
    accelerator = Accelerator(cpu=True)
    model, _ = started(accelerator)
    told(
        "call model(...) once for each accelerator.backward(loss)",
        lambda: accelerator.backward(model.module(ROWS).sum()),
    )
    accelerator.free_memory()
    steps(accelerator, *started(accelerator))
    accelerator.free_memory()

    # engines that shard: several models; the weights of a hook; a loader alone
    accelerator = Accelerator(cpu=True, config=pk.Config(engine=pk.FSDP2()))
    first, second = net(), net()
    told("each other model to an Accelerator", lambda: accelerator.prepare(first, second, sgd(first)))
    accelerator.free_memory()
    both = [Accelerator(cpu=True, config=pk.Config(engine=pk.FSDP2())) for _ in range(2)]
    for one in both:
        steps(one, *started(one))
    handle = both[0].register_save_state_pre_hook(lambda models, weights, to: weights[0]["0.weight"])
    told("call accelerator.save_model(model, folder)", lambda: both[0].save_state(f"{folder}/state"))
    handle.remove()
    both[0].save_model(both[0].ready.model, f"{folder}/model")
    both[0].save_state(f"{folder}/state")
    for one in both:
        one.free_memory()
    accelerator = Accelerator(cpu=True, config=pk.Config(engine=pk.TensorParallel(), tp_plan=PLAN))
    told("give them to one prepare with the model", lambda: accelerator.prepare(loader()))
    model = net()
    *prepared, data = accelerator.prepare(model, sgd(model), loader())
    assert len([*data]) == 2
    steps(accelerator, *prepared)
    accelerator.free_memory()
    heard += by_deepspeed(told)
    accelerator.end_training()
    return heard


def by_deepspeed(told: Callable[[str, Callable[[], Any]], None]) -> list[str]:
    def deepspeed(clip: Any = None, steps: int = 1) -> tuple[Accelerator, Any, Any]:
        config = pk.Config(engine=pk.DeepSpeed(stage=2, micro_batch=8), clip=clip)
        accelerator = Accelerator(cpu=True, config=config, gradient_accumulation_steps=steps)
        return accelerator, *started(accelerator)

    accelerator, model, optimizer = deepspeed()

    def unsynced() -> None:
        with accelerator.no_sync(model):
            pass

    def twice() -> None:
        for _ in range(2):
            accelerator.backward(model(ROWS).sum())

    told("write gradient_accumulation_steps and `with accelerator.accumulate(model):`", unsynced)
    accelerator.backward(model(ROWS).sum())
    told('write "gradient_clipping": 0.5 into its config', lambda: accelerator.clip_grad_norm_(model.parameters(), 0.5))
    told("write accelerator.clip_grad_norm_(...)", lambda: accelerator.clip_grad_value_(model.parameters(), 0.5))
    accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    assert accelerator.clip_grad_norm_(model.parameters(), float("inf")) > 0, "the engine's norm, though nothing clips"
    told("add the losses up for one accelerator.backward(loss)", twice)
    accelerator.free_memory()
    accelerator, model, optimizer = deepspeed(pk.ClipNorm(0.5))
    accelerator.backward(model(ROWS).sum() + model(ROWS).sum())
    told("write the same number", lambda: accelerator.clip_grad_norm_(model.parameters(), 0.7))
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    accelerator.free_memory()
    accelerator, model, optimizer = deepspeed(steps=2)
    told("write `with accelerator.accumulate(model):`", lambda: accelerator.backward(model(ROWS).sum()))
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(2):
        with accelerator.accumulate(model), accelerator.no_sync(model):
            accelerator.backward(model(ROWS).sum())
            optimizer.step()
    assert any(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    accelerator.free_memory()
    return []


ACROSS = Counter({
    "as_the_loop loop.past-the-wrapper": 1,
    "AcceleratedLoop.step_by_hand": 1,
    "NotGathered.__reduce_ex__": 1,
    "prepared_alone": 1,
    "AcceleratedLoop.no_sync": 1,
    "AcceleratedLoop.clip_value": 1,
    "AcceleratedLoop._clipped_by_engine": 2,
    "AcceleratedLoop.backward": 1,
    "as_the_loop loop.backward-twice": 1,
})  # fmt: skip


def test_each_advice_across_ranks_works_as_it_is_written(gang2: Gang, tmp_path: Path) -> None:
    for heard in gang2.run_fresh(across_ranks, str(tmp_path), timeout=180):
        assert Counter(heard) == ACROSS


NOT_FOLLOWED = {
    "join": "needs a device whose process group a plan alone can start, such as an XLA device",
    "name": "an AttributeError, for `from ... import` of what accelerate has and this face does not; or no accelerate",
    "_tracking": "needs a machine without accelerate, which its advice installs",
}
NOT_MET = {"loop.engine-counts-backwards": "of `more=True`, which no script for accelerate says"}


def sites() -> Counter[str]:
    """The functions of the face that make a ``NotOffered``, and how many each makes."""
    found: Counter[str] = Counter()

    def walk(node: ast.AST, place: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = (*place, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else place
            if isinstance(child, ast.Call) and getattr(child.func, "id", "") == "NotOffered":
                found[".".join(place)] += 1
            walk(child, inner)

    for file in FACE.glob("*.py"):
        walk(ast.parse(file.read_text()), ())
    return found


def test_no_refusal_of_the_face_is_without_one_that_followed_its_advice() -> None:
    followed = Counter(row.where for row in ROW.values()) + ACROSS
    rules = {where.removeprefix("as_the_loop ") for where in followed if where.startswith("as_the_loop ")}
    assert rules | NOT_MET.keys() == _WORDS.keys()
    tables = {"Accelerator.__getattr__": len(OTHERWISE), "refuse_arguments": 1, "as_the_loop": 1}
    for where, count in sites().items():
        if where not in NOT_FOLLOWED:
            assert followed[where] >= count or where in tables, f"{where}: {count} refusals, {followed[where]} followed"
