"""Who makes gradients, or weights, those of several ranks: read from wrappers that stand there, and from code."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from attrs import evolve
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from prepkit.facts.run import Averager, DDPFacts, PreparedParam
from prepkit.objects.fsdp2_units import is_unit
from prepkit.objects.names import Site, known_bases
from prepkit.observe.model import dtype_name
from prepkit.observe.prepared.around import codes_of, name_of, names_weights, nodes, nodes_of, own_frames, parsed
from prepkit.ranks.world import ranks_of, world

WEIGHTS = ("param", "state_dict")
"""Words of what gives the weights of a model."""
Covered = dict[int, list[tuple[Averager, int]]]
"""``id`` of a parameter to who averages it, and over how many ranks."""


def prepared_params(model: nn.Module, named: dict[str, nn.Parameter]) -> tuple[PreparedParam, ...]:
    """Every parameter with who averages its gradient; ``named`` holds each once."""
    covered = _covered(model)
    return tuple(_param(name, param, covered.get(id(param), [])) for name, param in named.items())


def _param(name: str, param: nn.Parameter, covered: list[tuple[Averager, int]]) -> PreparedParam:
    everyone = world().size
    by = [*covered]
    if isinstance(param, DTensor) and not any(who == "fsdp2" for who, _ in by):
        by.append(("dtensor", param.device_mesh.size()))
    elif isinstance(param, DTensor):
        by = [(who, param.device_mesh.size() if who == "fsdp2" else ranks) for who, ranks in by]
    if getattr(param, "_post_accumulate_grad_hooks", None) or param._backward_hooks:
        by.append(("hook", everyone))  # the user's own all-reduce may stand in it
    ranks = 1
    for _, over in by:
        ranks *= over
    told = PreparedParam(
        name=name,
        dtype=dtype_name(param.dtype),
        requires_grad=param.requires_grad,
        device=_tensor(param).device.type,
        matrix=param.ndim > 1,
    )
    return evolve(told, averaged_by=tuple(dict.fromkeys(who for who, _ in by)), ranks=min(ranks, everyone))


def _tensor(param: Any) -> Any:
    return getattr(param, "ds_tensor", param)


def _covered(model: nn.Module) -> Covered:
    found: Covered = {}
    for module in model.modules():
        bases = known_bases(type(module))
        match module:
            case DistributedDataParallel():
                _cover(found, _reduced_by(module), "ddp", ranks_of(module.process_group).size)
            case FullyShardedDataParallel():
                held: Any = module._handle
                flat = held.flat_param if held is not None else None
                params = [] if flat is None else [flat, *(flat._params or ())]
                _cover(found, params, "fsdp1", _fsdp1_ranks(module))
            case _ if "DeepSpeedEngine" in bases:
                _cover(found, module.parameters(), "deepspeed", world().size)
            case _ if "FSDPModule" in bases:
                state: Any = module
                for group in _groups(state._get_fsdp_state()):
                    _cover(found, (one.sharded_param for one in group.fsdp_params), "fsdp2", 1)
            case _:
                pass
    return found


def _cover(found: Covered, params: Iterable[nn.Parameter], who: Averager, ranks: int) -> None:
    for param in params:
        if param is not None:
            found.setdefault(id(param), []).append((who, ranks))


def _groups(state: Any) -> list[Any]:
    """Parameter groups of a unit of FSDP2: one, or several in newer torch."""
    groups = getattr(state, "_fsdp_param_groups", None) or (getattr(state, "_fsdp_param_group", None),)
    return [group for group in groups if group is not None]


def _fsdp1_ranks(unit: FullyShardedDataParallel) -> int:
    """Ranks that the unit's gradients come from: its shards, and its replicas unless torch fell back to NO_SHARD."""
    handle: Any = unit._handle
    state: Any = unit
    shards = ranks_of(state.process_group).size
    between = getattr(state, "_inter_node_pg", None)
    hybrid = handle is not None and "HYBRID" in handle._sharding_strategy.name
    return shards * (ranks_of(between).size if hybrid and between is not None else 1)


def _reduced_by(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    return list(getattr(ddp, "_module_parameters", ddp.parameters()))


def ddp_facts(model: nn.Module, first: dict[int, str]) -> tuple[DDPFacts, ...]:
    """Every DDP wrapper with how many parameters its reducer has, and how many of those that it knows train now."""
    return tuple(
        _ddp(path, module, first)
        for path, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
    )


def _ddp(path: str, module: DistributedDataParallel, first: dict[int, str]) -> DDPFacts:
    params = _reduced_by(module)
    return evolve(
        ddp_state(path, module),
        reduced=_in_reducer(module),
        known=sum(param.requires_grad for param in params),
        frozen=tuple(first.get(id(param), "?") for param in params if not param.requires_grad),
        ignored=_ignored(module, first),
    )


def ddp_state(path: str, module: DistributedDataParallel) -> DDPFacts:
    """Return what a wrapper is set to: a few attributes, as a look before a step has time for."""
    return DDPFacts(
        path=path,
        reduced=None,
        known=0,
        averages=bool(module.require_backward_grad_sync),
        joins=bool(getattr(getattr(module, "_join_config", None), "enable", False)),
        hook=", ".join(getattr(hook, "__qualname__", str(hook)) for hook, _ in getattr(module, "_comm_hooks", ())),
        waits=not (module.find_unused_parameters or module.static_graph),
    )


def reduced(module: DistributedDataParallel) -> tuple[nn.Parameter, ...]:
    """What DDP reduces, in the order in which its reducer numbers it (torch ``_build_params_for_reducer``)."""
    told = set(module.parameters_to_ignore)
    found = {
        param: None
        for path, inner in module.module.named_modules()
        for name, param in inner.named_parameters(recurse=False)
        if param.requires_grad and f"{path}.{name}" not in told
    }
    return tuple(found)


def awaited(module: DistributedDataParallel, numbered: Sequence[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """The parameters whose gradients DDP waits for since this rank's last backward that averages. Asks no other rank.

    torch tells their numbers in what it refuses the next forward with (``Reducer::ensure_prior_reduction_finished``).
    ``numbered``: what ``reduced`` gave when the model was wrapped.
    """
    try:
        module._check_reducer_finalized()  # type: ignore[no-untyped-call]  # torch has no types
    except RuntimeError as error:
        told = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
        if told is None:
            raise
        return tuple(numbered[int(at)] for at in told[1].split())
    return ()


def left_waiting(model: nn.Module) -> tuple[nn.Parameter, ...]:
    """What the DDP wrappers of a model wait for on this rank, as ``awaited``, whoever has wrapped it.

    Nothing of one whose parameters were frozen or unfrozen since, as nobody has noted how its reducer numbers them.
    """
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    known = [(module, reduced(module)) for module in wrappers]
    return tuple(param for one, params in known if _in_reducer(one) == len(params) for param in awaited(one, params))


def _ignored(module: DistributedDataParallel, first: dict[int, str]) -> tuple[str, ...]:
    told = set(getattr(module, "parameters_to_ignore", ()))
    return tuple(first[id(param)] for name, param in module.module.named_parameters() if name in told)


def unaveraged(places: list[Site]) -> tuple[str, ...]:
    """Units of FSDP2 with parameters that train, told by ``set_requires_gradient_sync(False)`` to reduce nothing."""
    found: list[str] = []
    for site in places:
        for module in site.stack if site.first else ():
            state: Any = module
            groups = _groups(state._get_fsdp_state()) if is_unit(module) else []
            held = [group for group in groups if any(one.sharded_param.requires_grad for one in group.fsdp_params)]
            if held and not any(getattr(group, "reduce_grads", True) for group in held):
                found.append(site.path)
    return tuple(found)


def _in_reducer(module: DistributedDataParallel) -> int | None:
    ask = getattr(module, "_get_ddp_logging_data", None)  # private; what it tells has been there since torch 1.8
    count = ask().get("num_parameter_tensors") if ask is not None else None
    return int(count) if isinstance(count, int) and count > 0 else None


def averages_weights(reduced: Container[str]) -> str:
    """The line of the caller's files that all-reduces parameters themselves, as local SGD does; empty: there is none.

    ``torch.distributed.algorithms.model_averaging`` counts too; what is summed of gradients does not, nor does a
    function that nobody calls. ``reduced``: lines that have run before the first step, as to begin alike.
    """
    own = own_frames()
    imported = (code.co_filename for one in own for code in codes_of(one.f_globals))
    trees = {file: parsed(file) for file in dict.fromkeys((*(one.f_code.co_filename for one in own), *imported))}
    averaging = {file: calls for file, tree in trees.items() if (calls := _averaging(tree))}
    called = {name_of(one) for tree in trees.values() for one in nodes_of(tree, ast.Call)} if averaging else set()
    for file, calls in averaging.items():
        functions = [one for one in nodes_of(trees[file], ast.FunctionDef) if one.name not in called]
        idle = {id(one) for function in functions for one in ast.walk(function)}
        for call in calls:
            if id(call) not in idle and (line := f"{Path(file).name}:{call.lineno}") not in reduced:
                return line
    return ""


@lru_cache(maxsize=256)
def _averaging(tree: ast.AST) -> tuple[ast.Call, ...]:
    """Once for each tree of ``parsed``, since a program audits itself, and is audited, at many places."""
    return tuple(_averaged_weights(tree))


def _averaged_weights(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield calls that average what a loop over parameters gives, a vector of them all, or what they have moved by.

    Parameters are what a model gives, and what a function of the file is given of it.
    """
    every, handed = nodes(tree), _handed(tree)
    yield from _averaged_moves(every)
    assigned = (one for one in every if isinstance(one, ast.Assign) and names_weights(one.value, "_to_v"))
    rows = {ast.unparse(one.targets[0]) for one in assigned}
    for node in every:
        loops = [node] if isinstance(node, ast.For | ast.AsyncFor) else getattr(node, "generators", [])
        own = handed.get(id(node), set())
        over = [
            one.target
            for one in loops
            if _words(one.iter) & own or any(names_weights(one.iter, word) for word in WEIGHTS)
        ]
        names = {name for target in over for name in _words(target)}
        inside = ast.walk(node) if names else [node]
        for one in inside:
            if isinstance(one, ast.For) and "grad" not in ast.unparse(one.iter):
                names |= _words(one.target) if names & _words(one.iter) else set()
            if isinstance(one, ast.Call) and name_of(one) == "average_parameters":
                yield one
            elif isinstance(one, ast.Call) and name_of(one) == "all_reduce" and one.args:
                given = ast.unparse(one.args[0])
                if re.split(r"\W", given)[0] in names | rows and "grad" not in given:
                    yield one


def _handed(tree: ast.AST) -> dict[int, set[str]]:
    """By the identity of each node of a function: its arguments that it is given parameters of a model for."""
    found: dict[int, set[str]] = {}
    calls = [call for call in nodes_of(tree, ast.Call) if any(names_weights(one, "parameters()") for one in call.args)]
    for function in nodes_of(tree, ast.FunctionDef) if calls else ():
        takes = [one.arg for one in function.args.args]
        takes = takes[takes[:1] == ["self"] :]
        here = (zip(takes, call.args, strict=False) for call in calls if name_of(call) == function.name)
        names = {name for pairs in here for name, given in pairs if names_weights(given, "parameters()")}
        found |= {id(node): names for node in ast.walk(function)} if names else {}
    return found


def _averaged_moves(every: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Yield calls that sum what weights have moved by, one less the other in a loop over both, as DiLoCo does."""
    over = [
        loop for node in every for loop in ([node] if isinstance(node, ast.For) else getattr(node, "generators", []))
    ]
    both = set[str]().union(*(_words(loop.target) for loop in over if names_weights(loop.iter, "param")))
    assigned, moves = [one for one in every if isinstance(one, ast.Assign)], set[str]()
    for node in assigned:
        if any(_is_move(one, both) for one in ast.walk(node.value)) or moves & _said(node.value):
            moves |= {ast.unparse(one) for one in node.targets}
    calls = (one for one in every if isinstance(one, ast.Call) and name_of(one) == "all_reduce" and one.args)
    for call in calls if moves else ():
        if ast.unparse(call.args[0]) in moves and not re.search(r"\b(MAX|MIN)\b", ast.unparse(call)):
            yield call


def _is_move(node: ast.AST, weights: set[str]) -> bool:
    """Return whether an expression is the difference of two weights, by names that loops over weights give them."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)) or "grad" in ast.unparse(node):
        return False
    one, other = _words(node.left) & weights, _words(node.right) & weights
    return bool(one and other and one != other)


def _said(tree: ast.AST) -> set[str]:
    """Names and attributes in an expression, as they are written."""
    return {ast.unparse(one) for one in ast.walk(tree) if isinstance(one, ast.Name | ast.Attribute)}


def _words(tree: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
