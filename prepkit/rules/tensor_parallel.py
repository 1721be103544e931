"""Which layers tensor parallelism cuts, and whether they can be cut so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import gcd

from attrs import evolve

from prepkit.config import FSDP2, Config, TensorParallel, TPPlan, TPPlanFromModel
from prepkit.facts import Facts, ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, did_you_mean, some
from prepkit.resolve.modules import PACKED, matcher, parent
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.tensor_parallel import (
    SERVED,
    UNTOUCHED,
    TPModule,
    attention_layers,
    is_parallel,
)
from prepkit.rules.rule import Hit, Moment, Rule, under

_EXAMPLE = 'TPPlan((TPLayer("layers.*.up", "colwise"), TPLayer("layers.*.down", "rowwise")))'
_WORDS = frozenset({"foreach", "fused"})


def _no_plan(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if resolved.tp.planned and not resolved.tp.layers:
        what = (
            "config.tp_plan has no rows" if isinstance(cfg.tp_plan, TPPlan) else "The model brings no plan of its own"
        )
        yield Hit("config.tp_plan", f"{what}, and {resolved.tp.size} tensor ranks would all compute the same.")


def _style(resolved: Resolved) -> Iterator[Hit]:
    if not resolved.tp.planned or not isinstance(resolved.cfg.tp_plan, TPPlanFromModel):
        return
    model = resolved.facts.model
    paths = [module.path for module in model.modules] + [param.name for param in model.params]
    for pattern, style in model.tensor_plan:
        if style in SERVED or style in UNTOUCHED:
            continue
        if any(map(matcher((pattern,)), paths)):  # plans name layers, such as experts, that a config may leave out
            yield Hit(at(pattern), f"The model's plan asks for the style `{style}`, which torch has not.")


def _pattern(resolved: Resolved) -> Iterator[Hit]:
    if not resolved.tp.planned or not isinstance(resolved.cfg.tp_plan, TPPlan):
        return
    paths = [module.path for module in resolved.facts.model.modules if module.path]
    for index, layer in enumerate(resolved.cfg.tp_plan.layers):
        if not any(map(matcher((layer.pattern,)), paths)):
            fix = f"Write the path of a module, with * for one segment.{did_you_mean(layer.pattern, paths)}"
            yield Hit(f"config.tp_plan.layers[{index}]", f"`{layer.pattern}` is the path of no module.", fix)


def _layer(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if not resolved.tp.planned:
        return
    classes = {module.path: facts.model.classes[module.cls].name for module in facts.model.modules}
    flat = _flat(facts.model)
    for layer, group in groupby(resolved.tp.modules, lambda module: module.layer):
        bad = [module for module in group if not _able(module, flat)]
        if bad:
            names, are = some([module.path or "the model itself" for module in bad]), "is" if len(bad) == 1 else "are"
            what = f"{layer.style} takes {_takes(layer.style)}, but {names} {are} of the class"
            yield Hit(at(bad[0].path), f"{what} `{classes[bad[0].path]}`.")


def _flat(model: ModelFacts) -> set[str]:
    """Paths of the modules whose weight has rows and columns, and is not packed; ties count under every name."""
    good = {p.name for p in model.params if p.name.endswith(".weight") and len(p.shape) == 2 and p.cls not in PACKED}
    good.update(*(group for group in model.ties if group[0] in good))
    return {parent(name) for name in good}


def _able(module: TPModule, flat: set[str]) -> bool:
    if module.layer.style in ("colwise", "rowwise"):
        return module.kind in ("linear", "embedding") and module.path in flat
    return module.kind != "other"


def _takes(style: str) -> str:
    if style in ("colwise", "rowwise"):
        return "a Linear or an Embedding with a weight of two dimensions"
    return "a module without modules inside it"


def _twice(resolved: Resolved) -> Iterator[Hit]:
    if not resolved.tp.planned:
        return
    seen: dict[str, str] = {}
    for module in resolved.tp.modules:
        first = seen.setdefault(module.path, module.layer.pattern)
        if first != module.layer.pattern:
            yield Hit(at(module.path), f"Named by two rows: `{first}` and `{module.layer.pattern}`.")


def _sizes(resolved: Resolved) -> dict[str, int]:
    """What the tensor ranks have to divide: every sharded dimension once, and the heads of attentions; name to size."""
    sizes: dict[str, int] = {}
    for param, dim in resolved.tp.sharded_params:
        sizes.setdefault(f"dimension {dim} of `{param.name}`", param.shape[dim])
    model = resolved.facts.model
    if attention_layers(resolved.tp.modules, model):
        heads = {"heads": model.architecture.heads, "kv_heads": model.architecture.kv_heads}
        sizes |= {f"model.config's {name}": number for name, number in heads.items() if number}
    return sizes


def _divides(resolved: Resolved) -> Iterator[Hit]:
    ranks = resolved.tp.size
    if ranks < 1:  # environment.world-size says so
        return
    sizes = _sizes(resolved)
    odd = {name: size for name, size in sizes.items() if size % ranks}
    if not odd:
        return
    common = gcd(*sizes.values())
    valid = [str(number) for number in range(1, min(common, 1024) + 1) if common % number == 0]
    alike: dict[int, list[str]] = {}
    for name, size in odd.items():
        alike.setdefault(size, []).append(name)
    texts = (
        f"{names[0]}{f' ({len(names) - 1} more alike)' * (len(names) > 1)} is {size}" for size, names in alike.items()
    )
    fix = f"Cut over {' or '.join(valid)} ranks: every size in the plan divides by these. Or leave the row out."
    where = "config.mesh.tensor" if resolved.cfg.mesh else "config.engine"
    yield Hit(where, f"{', '.join(texts)}: not to be divided over {ranks} tensor ranks.", fix)


def _uneven(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if not resolved.tp.planned or facts.env.release >= _EVEN_BEFORE:
        return
    parts = resolved.tp.size * resolved.axis_size("shard")
    odd = [param for param, dim in resolved.tp.sharded_params if dim == 0 and param.shape[0] % max(1, parts)]
    if odd:
        first, more = odd[0], f" ({count(len(odd) - 1, 'more parameter')} alike)" if len(odd) > 1 else ""
        what = f"{first.shape[0]} rows of `{first.name}`{more} do not divide by {parts}, tensor ranks times shards"
        what += f", which torch {facts.env.torch} needs."
        yield Hit(at(first.name), what)


_EVEN_BEFORE = (2, 8)
"""torch from which ``fully_shard`` takes what is cut in dimension 0 and does not divide."""


def _ties(resolved: Resolved) -> Iterator[Hit]:
    if not resolved.tp.planned:
        return
    how = resolved.tp.placements
    here = {module.path for module in resolved.facts.model.modules}
    for group in resolved.facts.model.ties:
        lies = {name: how.get(name, "replicate") for name in group if parent(name) in here}
        if len(set(lies.values())) > 1:
            text = ", ".join(f"`{name}` is {word}" for name, word in lies.items())
            yield Hit(at(group[0]), f"One parameter, but {text}: cut so, it would become several.")


def _size(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    size, ranks = facts.model.architecture.tp_size, resolved.tp.size
    if is_parallel(facts.model) and size is None:
        yield Hit("model.tp_size", "The model is cut already, and neither it nor its config says over how many ranks.")
    elif size is not None and size != ranks and (size > 1 or is_parallel(facts.model)):
        yield Hit("model.tp_size", f"The model says tp_size={size}, but {ranks} tensor ranks run.")


def _mixed(resolved: Resolved) -> Iterator[Hit]:
    if not resolved.tp.planned or resolved.facts.optimizer is None:
        return
    how = resolved.tp.placements
    for index, group in enumerate(resolved.facts.optimizer.groups):
        asked = [name for name, value in group.options if name in _WORDS and value is True]
        cut = {name in how for name in group.slots if name}
        if asked and len(cut) == 2:
            what = (
                f"Group {index} mixes layers that are cut with whole parameters, and {asked[0]}=True steps all at once."
            )
            yield Hit("optimizer", what)


def _unread(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if isinstance(cfg.tp_plan, TPPlan) and not resolved.tp.planned:
        arrives = resolved.engine_traits.cuts_all_ranks
        why = "the model arrives cut already" if arrives else "the mesh has no tensor axis"
        yield Hit("config.tp_plan", f"{count(len(cfg.tp_plan.layers), 'row')} without effect: {why}.")


def _from_model(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, tp_plan=TPPlanFromModel())


RULES: tuple[Rule, ...] = (
    Rule(
        id="tensor.no-plan",
        summary="Where there is a tensor axis there is a layer to cut.",
        check=_no_plan,
        fix=f"Write tp_plan={_EXAMPLE} with the paths of your model.",
        overridable=False,
        source=("TP-1", "X-1"),
    ),
    Rule(
        id="tensor.style-unknown",
        summary="Every style in the model's own plan is one of torch's.",
        check=_style,
        fix="Write tp_plan=TPPlan(...) with the rows of the plan that you want; what they leave out stays whole.",
        source=("X-1", "G-33", "SS-6"),
    ),
    Rule(
        id="tensor.pattern-not-found",
        summary="Every row of config.tp_plan names a module.",
        check=_pattern,
        fix="Write the path of a module.",
        source=("torch parallelize_module",),
    ),
    Rule(
        id="tensor.not-a-layer",
        summary="A row names modules that its style can cut.",
        check=_layer,
        fix="Name the linear layers and embeddings inside it, or leave the row out: what no row names stays whole.",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("torch ColwiseParallel", "torch RowwiseParallel", "pain 12"),
    ),
    Rule(
        id="tensor.named-twice",
        summary="No module is named by two rows.",
        check=_twice,
        fix="Leave one of the rows out, or narrow its pattern.",
        overridable=False,
        source=("torch parallelize_module",),
    ),
    Rule(
        id="tensor.not-divisible",
        summary="Heads and all dimensions that are cut divide by the number of tensor ranks.",
        check=_divides,
        fix="Cut over fewer ranks.",
        source=("pain 32",),
    ),
    Rule(
        id="tensor.uneven-shards",
        summary="Before torch 2.8 what is cut in dimension 0 divides by the tensor ranks times the shards.",
        check=under(FSDP2, _uneven),
        fix="Install torch 2.8 or newer, or change the mesh, or leave the row out.",
        source=("torch FSDPParam._init_sharding_spec", "pain 32"),
    ),
    Rule(
        id="tensor.tie-broken",
        summary="A tied parameter is cut alike under all of its names.",
        check=_ties,
        fix='Give them the same cut: a "rowwise" embedding lies as a "colwise" linear layer does.',
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("pain 10",),
    ),
    Rule(
        id="tensor.size-differs",
        summary="A model that arrives cut is cut over as many ranks as run.",
        check=under(TensorParallel, _size),
        fix="Load it with as many tensor ranks as are started, or pass it before it is cut.",
        source=("TP-3", "TP-4", "H-3"),
    ),
    Rule(
        id="tensor.mixed-optimizer",
        summary="An optimizer that steps many parameters at once holds none that lie differently.",
        check=_mixed,
        fix="Build it with foreach=False and fused=False, or with a group for each kind.",
        source=("pain 34",),
    ),
    Rule(
        id="tensor.not-read",
        summary="Rows in config.tp_plan come with a tensor axis.",
        check=_unread,
        fix="Write mesh=Mesh(tensor=...) or engine=TensorParallel(), or leave tensor out.",
        severity=Severity.WARNING,
        source=("PC-11",),
        repair=_from_model,
    ),
)
"""Reporting order: the rows by themselves, then against the model, then what else holds the parameters."""
