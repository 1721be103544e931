"""A prepared model as facts, whoever has prepared it: what stands there, and what nobody reads. Changes nothing."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, DistributedSampler

from prepkit.facts import Env
from prepkit.facts.run import AdapterFacts, RunFacts, Unread, WrappedModule
from prepkit.formats.models.architecture import peek
from prepkit.objects.joint_optimizer import members
from prepkit.objects.local_part import local
from prepkit.objects.names import Site, first_names, parameters_at, sites
from prepkit.observe.env import observe_env
from prepkit.observe.given import said
from prepkit.observe.model import model_facts
from prepkit.observe.prepared import averaging, fabric, modules
from prepkit.observe.prepared.gradients import as_they_came, gradients
from prepkit.observe.prepared.loaders import language_config, prepared_loader
from prepkit.observe.prepared.modules import rate
from prepkit.observe.prepared.optimizers import (
    accumulation,
    engine_facts,
    inner,
    prepared_optimizer,
    prepared_scheduler,
)
from prepkit.observe.prepared.preparation import preparation
from prepkit.observe.prepared.ranks import compared
from prepkit.ranks.launcher import from_launcher
from prepkit.ranks.world import world
from prepkit.rules.rule import Need

__all__ = ["look", "optimizers_of"]


BEFORE_A_STEP = frozenset(Need) - {Need.GRADIENTS, Need.LOOP, Need.BEFORE}
"""What can be seen of prepared objects that nobody is about to step."""


def look(
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    needs: Collection[Need] = BEFORE_A_STEP,
    env: Env | None = None,
    awaited: Iterable[nn.Parameter] = (),
) -> RunFacts:
    """Observe prepared objects. Draws nothing, and reads values of tensors only for ``VALUES``, ``STATE``, ``RANKS``.

    ``needs``: gather what the rules that are due ask for, and leave the rest at its default; the structure of the model
    is always seen. ``Need.GRADIENTS``: the optimizers are about to step. Collective with ``Need.RANKS``: one exchange.
    ``awaited``: parameters that DDP was given zeros for, as it waited for their gradients on this rank.
    Raises ``TypeError`` for objects of the wrong kind and ``ValueError`` for a model that contains itself.
    """
    optimizers = optimizers_of(optimizer)
    _expect(model, scheduler, loaders)
    around, model, loaders = fabric.autocast_of(model), fabric.module_of(model), [*map(fabric.loader_of, loaders)]
    with torch.no_grad():
        facts, places = _alone(model, optimizers, loaders, needs)
        first = first_names(parameters_at(places))
        here = evolve(observe_env(), world_size=facts.world_size) if env is None else env
        how = preparation(model, places, facts.model, first, optimizers, here, around)
        facts = evolve(facts, preparation=how)
        if scheduler is not None and Need.OPTIMIZERS in needs:
            facts = evolve(facts, scheduler=prepared_scheduler(scheduler, optimizers))
        seen = Need.GRADIENTS in needs and facts.engine is None  # DeepSpeed keeps gradients where nobody sees them
        waited = tuple(first[id(param)] for param in awaited if id(param) in first)
        stepped = [*as_they_came(gradients(model, optimizers), waited)] if seen else None
        if seen or Need.RANKS in needs:
            facts = compared(facts, places, optimizers, stepped, asks=Need.RANKS in needs, awaited=waited)
    return facts if env is None else evolve(facts, world_size=env.world_size)


def _alone(
    model: nn.Module, optimizers: list[Any], loaders: Sequence[Any], needs: Collection[Need]
) -> tuple[RunFacts, list[Any]]:
    """Return what one rank sees by itself."""
    places = sites(model)
    named = parameters_at(places)
    first = first_names(named)
    once = {name: param for name, param in named if first[id(param)] == name}
    dropout = modules.dropping(places)
    ranks = world()
    facts = RunFacts(
        model=model_facts(places, named, first),
        params=averaging.prepared_params(model, once),
        wrapped=modules.wrapped(places),
        ddp=averaging.ddp_facts(model, first),
        units=modules.units(places),
        engine=engine_facts(model),
        training=places[0].module.training,
        evaluating=modules.evaluating(places, dropout) if places[0].module.training else (),
        dropout=dropout,
        drops=modules.drops(model),
        normalised=modules.normalised(places),
        drops_all=modules.dropping_all(places),
        unaveraged=averaging.unaveraged(places),
        elsewhere=modules.elsewhere(places),
        compile_off=_compile_off(),
        accumulation=accumulation(model, *optimizers, *loaders),
        world_size=ranks.size,
        rank=ranks.rank,
        backend=ranks.backend,
    )
    if Need.OPTIMIZERS in needs:
        state = Need.STATE in needs
        facts = evolve(
            facts, optimizers=tuple(prepared_optimizer(one, model, first, state=state) for one in optimizers)
        )
    if Need.LOADERS in needs:
        config = language_config(places[0].module)
        facts = evolve(facts, loaders=tuple(prepared_loader(one, config) for one in loaders))
    inside = with_inside(facts, places, first, values=Need.VALUES in needs)
    facts = evolve(facts, **inside, unread=unread(places, optimizers, loaders))
    facts = evolve(facts, hidden=hidden(places, optimizers), launched=_launched())
    return (_with_values(facts, model, places, once) if Need.VALUES in needs else facts), places


def _launched() -> int:
    """Processes that torchrun or its like says it has started."""
    return (from_launcher(("WORLD_SIZE",), 1) or 1) if from_launcher(("RANK",), 0) is not None else 1


def _with_values(facts: RunFacts, model: nn.Module, places: list[Any], once: dict[str, nn.Parameter]) -> RunFacts:
    """With what is wrong with the numbers in parameters and buffers. Reads each once, and waits for the device."""
    tensors = {**once, **{name: tensor for name, tensor in model.named_buffers() if tensor is not None}}
    return evolve(
        facts,
        nan=modules.with_nan(tensors),
        infinite=modules.infinite(once),
        negative=modules.negative(places),
        zeros=modules.zeros(once),
    )


def optimizers_of(given: Any) -> list[Any]:
    """The optimizers that were given, those of a joint one each. Raises ``TypeError`` for what is none."""
    listed = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    for index, one in enumerate(listed):
        if not (hasattr(inner(one), "param_groups") and hasattr(one, "step")):
            where = f"optimizer[{index}]" if isinstance(given, list | tuple) else "optimizer"
            raise TypeError(f"{where} is {said(one)}; pass an optimizer of torch, accelerate or DeepSpeed")
    each = [member for one in listed for member in (members(one) if isinstance(one, torch.optim.Optimizer) else (one,))]
    return [*{id(inner(one).param_groups): one for one in reversed(each)}.values()][::-1]  # a wrapper shares the groups


def _expect(model: object, scheduler: object, loaders: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {said(model)}; pass the prepared torch.nn.Module, wrappers included")
    if isinstance(scheduler, list | tuple):
        what = f"scheduler is a {type(scheduler).__name__} of {len(scheduler)}"
        raise TypeError(f"{what}; pass one scheduler, and audit again with another: scheduler=schedulers[0]")
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TypeError(f"scheduler is {said(scheduler)}; pass one of torch's, accelerate's, or any with step()")
    if not isinstance(loaders, list | tuple):
        raise TypeError(f"loaders is {said(loaders)}; pass a tuple of loaders: loaders=(loader,)")


def _compile_off() -> bool:
    config = sys.modules.get("torch._dynamo.config")
    return bool(config is not None and getattr(config, "disable", False))


HEADS = re.compile(r"(^|\.)(score|classifier|qa_outputs)(\.|$)")
"""Layers that transformers puts anew on a body for a task."""
NEAR_COPY = 0.25
"""Of the squares of a module's weights, how far a copy may be that follows them; what was drawn apart is two away."""
TASKS = re.compile(r"For(Sequence|Token|Image|Audio\w*)Classification|ForQuestionAnswering|ForMultipleChoice")


def frozen_parts(places: list[Site]) -> tuple[Site, ...]:
    """Outermost modules of which no parameter trains, beside others that do."""
    if not any(param.requires_grad for param in places[0].module.parameters()):
        return ()
    found: list[Site] = []
    for site in places:
        inside = any(site.path.startswith(f"{one.path}.") for one in found)
        params = [] if inside or not site.first or not site.path else [*site.module.parameters()]
        if params and not any(param.requires_grad for param in params):
            found.append(site)
    return tuple(found)


def frozen_drops(places: list[Site], frozen: Iterable[Site]) -> tuple[str, ...]:
    """Those that stand beside what trains, as a teacher or a body under a head does, and drop elements.

    Layers between adapters drop as their model does, and are none of them.
    """
    beside = _beside(places)
    return tuple(
        site.path
        for site in frozen
        if site.path in beside and any(one.training and rate(one) > 0 for one in site.module.modules())
    )


def _beside(places: list[Site]) -> set[str]:
    """Paths of the modules at which the model first branches."""
    module, path = places[0].module, ""
    while len(children := [pair for pair in module.named_children() if any(True for _ in pair[1].parameters())]) == 1:
        module, path = children[0][1], ".".join(filter(None, (path, children[0][0])))
    return {".".join(filter(None, (path, name))) for name, _ in children}


def frozen_norms(places: list[Site], frozen: Iterable[Site], *, values: bool) -> tuple[str, ...]:
    """Those with weights beside a batch norm that goes on to average what it sees.

    Not a copy that follows what trains, as that of MoCo, whose norms are its own; without ``values`` that is one too.
    """
    return tuple(
        site.path
        for site in frozen
        if any(averages(one) for one in site.module.modules())
        and any(param.ndim > 1 for param in site.module.parameters())
        and not (values and any(_follows(site.module, one.module) for one in places if one.first))
    )


def _follows(copy: nn.Module, trained: nn.Module) -> bool:
    """Return whether it is of the class and the shapes of a module that trains, and not far from its weights."""
    if type(copy) is not type(trained) or not any(param.requires_grad for param in trained.parameters()):
        return False
    pairs = [(local(a), local(b)) for a, b in zip(copy.parameters(), trained.parameters(), strict=False) if a.ndim > 1]
    if _shape(copy) != _shape(trained) or not all(modules.readable(one) for pair in pairs for one in pair):
        return False
    apart = sum(float((a.detach().double() - b.detach().double()).square().sum()) for a, b in pairs)
    return apart < NEAR_COPY * sum(float(b.detach().double().square().sum()) for _, b in pairs)


def _in_turn(facts: RunFacts) -> set[str]:
    """What an optimizer steps of which nothing trains now: frozen while another has its turn, as by Lightning."""
    trained = {param.name for param in facts.params if param.requires_grad}
    return {name for one in facts.optimizers if trained.isdisjoint(one.held) for name in one.held}


def averages(module: nn.Module) -> bool:
    """Return whether it is a batch norm that averages what it sees."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.running_mean is not None


def forgetful(places: list[Site]) -> tuple[str, ...]:
    """Checkpoints over dropout that keep no random numbers for their second forward."""
    found = []
    for site in places:
        for module in site.stack if site.first else ():
            told = (value for value in vars(module).values() if isinstance(value, partial))
            if any(one.keywords.get("preserve_rng_state") is False for one in told) and _drops(module):
                found.append(site.path)
    return tuple(dict.fromkeys(found))


def _drops(module: nn.Module) -> bool:
    return any(rate(one) > 0 for one in module.modules())


def renormalised(places: list[Site], wrapped: Iterable[WrappedModule]) -> tuple[str, ...]:
    """Checkpoints over batch norms, which average each batch twice."""
    paths = {one.path for one in wrapped if "checkpointed" in one.wrappers}
    return tuple(
        site.path for site in places if site.first and site.path in paths and any(map(averages, site.module.modules()))
    )


def softmax_before_loss(places: list[Site]) -> str:
    """The softmax at a model's end, where the model holds the cross-entropy that takes another; empty: none."""
    losses = [one for site in places for one in vars(site.module).values() if isinstance(one, nn.CrossEntropyLoss)]
    losses += [site.module for site in places if isinstance(site.module, nn.CrossEntropyLoss)]
    others = [site for site in places if not isinstance(site.module, nn.CrossEntropyLoss)]
    last = others[-1] if others else None
    ends = last is not None and isinstance(last.module, nn.Softmax | nn.Sigmoid)
    return last.path if losses and ends and last is not None else ""


def adapters(places: list[Site]) -> AdapterFacts | None:
    """Adapters of peft; None without one."""
    layers = [
        site for site in places if site.first and "lora_A" in site.module._modules and hasattr(site.module, "scaling")
    ]
    if not layers:
        return None
    live = [site for site in layers if any(p.requires_grad for n, p in site.module.named_parameters() if "lora_" in n)]
    bases = [(site, getattr(site.module, "base_layer", None)) for site in layers]
    root = type(getattr(places[0].module, "base_model", places[0].module))
    inner: Any = getattr(getattr(places[0].module, "base_model", None), "model", None)
    tasked = TASKS.search(type(inner).__name__ if inner is not None else root.__name__)
    return AdapterFacts(
        off=tuple(site.path for site in live if _is_off(site.module)),
        zero=tuple(site.path for site in live if not any(site.module.scaling.values())),  # type: ignore[operator]
        base=tuple(site.path for site, base in bases if isinstance(base, nn.Module) and _weight_trains(base)),
        heads=tuple(_frozen_heads(places) if tasked else _frozen_beside(places, inner)),
    )


def _is_off(layer: Any) -> bool:
    return bool(getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False))


def _weight_trains(base: nn.Module) -> bool:
    weight = getattr(base, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.requires_grad


def _frozen_heads(places: list[Site]) -> Iterator[str]:
    for site in places:
        params = [*site.module.parameters()] if site.first and HEADS.search(site.path) else []
        saved = "modules_to_save" in site.path or "original_module" in site.path
        if params and not saved and not site.module._modules and not any(param.requires_grad for param in params):
            yield site.path


def _frozen_beside(places: list[Site], inner: Any) -> Iterator[str]:
    """Parts that a program has put beside a model of transformers, in a module of its own, and that are frozen."""
    parts = [*inner.children()] if isinstance(inner, nn.Module) else []
    if any(_is_pretrained(one) for one in parts) and not _is_pretrained(inner):
        beside = {id(one) for one in parts if not _is_pretrained(one)}
        for site in places:
            params = [*site.module.parameters()] if site.first and id(site.module) in beside else []
            if params and not any(param.requires_grad for param in params):
                yield site.path


def _is_pretrained(module: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)


def with_inside(facts: RunFacts, places: list[Site], first: dict[int, str], *, values: bool) -> dict[str, Any]:
    """All of it, by field of ``RunFacts``. ``values``: whether weights may be read."""
    turns = _in_turn(facts)
    parts = frozen_parts(places)
    frozen = [site for site in parts if not all(first[id(param)] in turns for param in site.module.parameters())]
    return {
        "frozen_drops": frozen_drops(places, frozen) if places[0].module.training else (),
        "frozen_norms": frozen_norms(places, frozen, values=values),
        "forgetful": forgetful(places),
        "renormalised": renormalised(places, facts.wrapped),
        "softmax": softmax_before_loss(places),
        "adapters": adapters(places),
    }


NEAR = 0.85
"""From which likeness on (``SequenceMatcher.ratio``) a name is taken for another that was mistyped."""
OTHER_WORDS = {"learning_rate": "lr", "wd": "weight_decay", "beta": "betas"}
"""Options of optimizers by the names that other libraries give them."""
_PARAMETER = tuple(
    name for name in dir(nn.Parameter) if name in ("requires_grad", "retains_grad", "grad_fn", "is_leaf")
)
_OWN = frozenset(vars(nn.Module()))


def unread(places: list[Site], optimizers: Iterable[Any], loaders: Iterable[Any]) -> tuple[Unread, ...]:
    """Attributes and options that nobody reads, with the name that was meant."""
    found: list[Unread] = []
    for site in places:
        if site.first:
            found += _of_module(site)
    for at, given in enumerate(optimizers):
        found += _of_optimizer(inner(given), f"optimizer[{at}]" if at else "optimizer")
    for at, loader in enumerate(loaders):
        found += _of_loader(loader, f"loaders[{at}]")
    return tuple(found)


def _near(name: str, known: Iterable[str]) -> str:
    """The known name that it was taken for; empty where it is one, or like none."""
    known = tuple(known)
    if name in known:
        return ""
    alike = ((SequenceMatcher(None, name.lower(), one.lower()).ratio(), one) for one in known)
    ratio, best = max(alike, default=(0.0, ""))
    return best if ratio >= NEAR else ""


def _of_module(site: Site) -> Iterator[Unread]:
    module, where = site.module, f"model.{site.path}" if site.path else "model"
    own = vars(module)
    trained = own.get("requires_grad") is False and any(param.requires_grad for param in module.parameters())
    if trained:
        yield Unread(where=where, name="requires_grad", meant="requires_grad_(False)", sure=True)
    for name, value in own.items():
        if isinstance(value, bool) and name not in _OWN and (meant := _near(name, ("training",))):
            yield Unread(where=where, name=name, meant=meant)
    if type(module).__module__.startswith("torch.nn."):
        settings = [name for name in inspect.signature(type(module)).parameters if len(name) > 3 and name[0] != "_"]
        for name in own.keys() - _OWN - set(getattr(type(module), "__constants__", ())):
            if not name.startswith("_") and name not in settings and (meant := _near(name, settings)):
                yield Unread(where=where, name=name, meant=meant)
    for key, param in module._parameters.items():
        for name in getattr(param, "__dict__", {}):
            if not name.startswith("_") and (meant := _near(name, _PARAMETER)):
                yield Unread(where=f"{where}.{key}", name=name, meant=meant)
    if not site.path:
        yield from _of_config(peek(module, "config"), f"{where}.config")


def _of_config(config: Any, where: str) -> Iterator[Unread]:
    """Those of transformers take any name, and keep it."""
    if "PreTrainedConfig" not in {base.__name__.replace("Pretrained", "PreTrained") for base in type(config).__mro__}:
        return
    try:
        usual = {*vars(type(config)()), *getattr(config, "attribute_map", {})}
    except Exception:  # one that cannot be made without its arguments
        return
    for name in vars(config).keys() - usual:
        if not name.startswith("_") and (meant := _near(name, usual)):
            yield Unread(where=where, name=name, meant=meant)


def _of_optimizer(optimizer: Any, where: str) -> Iterator[Unread]:
    defaults = getattr(optimizer, "defaults", None)
    if not isinstance(defaults, dict):
        return
    for at, group in enumerate(optimizer.param_groups):
        for name in group.keys() - defaults.keys() - {"params"}:
            meant = OTHER_WORDS.get(name, "") or _near(name, defaults)
            if meant in defaults:
                yield Unread(where=f"{where}.param_groups[{at}]", name=name, meant=meant)
    if type(optimizer).__module__.startswith("torch.optim."):
        for name in vars(optimizer).keys() & defaults.keys():
            yield Unread(where=where, name=name, meant=f"param_groups[0]['{name}']")


def _of_loader(loader: Any, where: str) -> Iterator[Unread]:
    if isinstance(loader, DataLoader) and "shuffle" in vars(loader):
        yield Unread(where=where, name="shuffle", meant="DataLoader(..., shuffle=True)")
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        known = (
            "epoch",
            "shuffle",
            "seed",
            "drop_last",
            "num_replicas",
            "rank",
            "dataset",
            "num_samples",
            "total_size",
        )
        for name in vars(sampler):
            if meant := _near(name, known):
                yield Unread(where=f"{where}.sampler", name=name, meant=meant)


def hidden(places: list[Site], optimizers: Iterable[Any]) -> tuple[str, ...]:
    """Places of trained modules and parameters in plain lists, tuples and dicts, which no model knows and nobody steps.

    Not of a copy, such as an average of weights, which has the names and shapes of a module that the model has; nor of
    what has no gradient where others have one, as what a program compares with.
    """
    groups = (group for one in optimizers for group in inner(one).param_groups)
    known = {id(param) for site in places for param in site.module._parameters.values()}
    known |= {id(param) for group in groups for param in group["params"]}
    shapes = {_shape(site.module) for site in places if site.first and site.module._modules}
    begun = any(getattr(one, "grad", None) is not None for site in places for one in site.module._parameters.values())
    found: list[str] = []
    for site in places:
        for name, value in vars(site.module).items() if site.first else ():
            if name in _OWN or not isinstance(value, list | tuple | dict):
                continue
            for key, thing in _inside(value, 2):
                free = [one for one in _params(thing) if one.requires_grad and id(one) not in known]
                learns = any(one.grad is not None or not begun for one in free)
                if _shape(thing) not in shapes and learns:
                    found.append(".".join(filter(None, (site.path, f"{name}{key}"))))
    return tuple(found)


def _inside(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in [*items][:256]:
        if isinstance(one, nn.Module | nn.Parameter):
            yield f"[{key!r}]", one
        elif depth > 1 and isinstance(one, list | tuple | dict):
            yield from ((f"[{key!r}]{rest}", thing) for rest, thing in _inside(one, depth - 1))


def _params(thing: Any) -> list[torch.Tensor]:
    return [thing] if isinstance(thing, nn.Parameter) else [*thing.parameters()]


def _shape(thing: Any) -> Any:
    """Names and shapes, of what ``AveragedModel`` holds as well."""
    if isinstance(thing, nn.Parameter):
        return None
    inside = thing.module if type(thing).__name__ == "AveragedModel" else thing
    return tuple((name, () if is_lazy(param) else tuple(param.shape)) for name, param in inside.named_parameters())
