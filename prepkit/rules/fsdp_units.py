"""What FSDP2 and FSDP1 ask of the parameters in a unit, and FSDP2 of those that some ranks use and others do not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from prepkit.config import FSDP1, FSDP2, Config, Intent, Mixed
from prepkit.facts import ParamFact
from prepkit.findings import Severity
from prepkit.findings.text import at, count, in_bytes, some
from prepkit.plan.layout import itemsize
from prepkit.resolve.modules import PACKED
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.units import scalars
from prepkit.rules.rule import Hit, Moment, Rule, options, under, with_engine

REDUCES_ZEROS = (2, 13)
"""torch from which ``FSDPModule.set_reduce_scatter_unused_params`` is known to work (pull requests 170667, 183040)."""
_OF_AN_EXPERT = re.compile(r"((?:.*\.)?experts)\.[^.]+\..+")
"""A parameter of one module in a list or dict called ``experts``; experts that are stacked have no such modules."""


def _experts(resolved: Resolved, engine: FSDP2) -> Iterator[Hit]:
    if resolved.facts.env.release >= REDUCES_ZEROS:
        yield from _lists(resolved, engine)


def _experts_on_old_torch(resolved: Resolved, engine: FSDP2) -> Iterator[Hit]:
    if resolved.facts.env.release < REDUCES_ZEROS:
        yield from _lists(resolved, engine)


def _lists(resolved: Resolved, engine: FSDP2) -> Iterator[Hit]:
    if engine.reduce_unused or not resolved.trains or resolved.arrives_sharded:
        return
    if resolved.data_parallel_size == 1:
        return
    whole = set(resolved.unsharded_params)
    params = (p.name for p in resolved.facts.model.params if p.requires_grad and p.name not in whole)
    lists = tuple(dict.fromkeys(found[1] for name in params if (found := _OF_AN_EXPERT.fullmatch(name))))
    if lists:
        what = f"{count(len(lists), 'list')} of experts ({some(lists)}) with parameters of their own: one that no token"
        yield Hit(at(lists[0]), f"{what} of a rank chooses gets no gradient there, and the ranks' reductions differ.")


def _old_torch(resolved: Resolved, engine: FSDP2) -> Iterator[Hit]:
    env = resolved.facts.env
    if engine.reduce_unused and env.release < REDUCES_ZEROS:
        what = f"torch {env.torch} reduces no zeros for parameters without a gradient; fully_shard does from 2.13 on."
        yield Hit("config.engine.reduce_unused", what)


_UNUSED: tuple[Rule, ...] = (
    Rule(
        id="units.unused-on-old-torch",
        summary="Zeros are reduced for parameters without a gradient by a torch that can.",
        check=with_engine(FSDP2, _old_torch),
        fix="Write `pip install 'torch>=2.13'`, or leave reduce_unused out.",
        at=(Moment.PLAN, Moment.ACT),
        overridable=False,
        source=("pain 35", "torch FSDPModule.set_reduce_scatter_unused_params"),
        repair=options(FSDP2, reduce_unused=False),
    ),
    Rule(
        id="units.experts",
        summary="Under FSDP2 ranks whose data choose other experts reduce gradients of the same parameters.",
        check=with_engine(FSDP2, _experts),
        fix="Write FSDP2(reduce_unused=True).",
        severity=Severity.WARNING,
        source=("pain 26", "pain 31", "torch FSDPParamGroup.post_backward"),
        repair=options(FSDP2, reduce_unused=True),
    ),
    Rule(
        id="units.experts-on-old-torch",
        summary="Ranks whose data choose other experts have a torch with which FSDP2 reduces alike, or another engine.",
        check=with_engine(FSDP2, _experts_on_old_torch),
        fix="Write `pip install 'torch>=2.13'` and FSDP2(reduce_unused=True), or "
        "engine=DDP(find_unused_parameters=True).",
        severity=Severity.WARNING,
        source=("pain 26", "pain 31", "torch FSDPParamGroup.post_backward"),
    ),
)
"""Reporting order: the error, then the warnings."""


IGNORES = (2, 7)
"""torch from which ``fully_shard`` takes ``ignored_params``."""
TRAINED_ALONE = (2, 8)
"""torch from which ``fully_shard`` asks for one dtype among what a unit trains, and not among all that it holds."""
_FLOATS = ("float", "bfloat", "complex")
_GATHERED = ("int64", "int32", "int8", "uint8", "bool")
"""What gloo and NCCL gather beside floats, so that FSDP2 shards it: frozen, as integers always are."""
_LOW = frozenset({"bfloat16", "float16"})


def trained_dtype(cfg: Config, param: ParamFact) -> str:
    """Dtype in which a parameter is stored when it is sharded: float32 where it gets master weights."""
    master = (
        param.requires_grad
        and isinstance(cfg.precision, Mixed)
        and cfg.precision.master_weights
        and cfg.intent is Intent.TRAINING
    )
    return "float32" if master and param.dtype in _LOW else param.dtype


def _dtypes(resolved: Resolved) -> dict[str, dict[str, list[str]]]:
    """Unit to dtype to the parameters that must agree in it: under FSDP2 the trainable ones, under FSDP1 all."""
    cfg = resolved.cfg
    names: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    match cfg.engine:
        case FSDP2():
            whole = set(resolved.unsharded_params)
            among_all = resolved.facts.env.release < TRAINED_ALONE
            sharded = (p for p in resolved.facts.model.params if p.name not in whole)
            trainable = tuple(p for p in sharded if p.requires_grad or among_all)
            if len({trained_dtype(cfg, param) for param in trainable}) > 1:
                owner = resolved.unit_of
                for param in trainable:
                    names[owner[param.name]][trained_dtype(cfg, param)].append(param.name)
        case FSDP1():
            if len({param.dtype for param in resolved.facts.model.params}) > 1:
                stored = resolved.stored_dtypes
                for unit, params in resolved.flat_params.items():
                    for param in params:
                        names[unit][stored[param.name]].append(param.name)
        case _:
            pass
    return names


def _mixed_dtypes(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    units = _dtypes(resolved)
    mixed = [unit for unit, dtypes in units.items() if len(dtypes) > 1]
    if not mixed:
        return
    dtypes = sorted(units[mixed[0]].items(), key=lambda item: -len(item[1]))
    shown = " and ".join(f"{name} ({count(len(names), 'parameter')}: {some(names)})" for name, names in dtypes)
    others = f" So do {count(len(mixed) - 1, 'other unit')}." if len(mixed) > 1 else ""
    (most, _), (_, odd), *_ = dtypes
    fix = f"Cast {some(odd)} to {most} before planning."
    trains = any(p.requires_grad for p in facts.model.params if p.name in {n for _, names in dtypes for n in names})
    if trains and {dtype for dtype, _ in dtypes} <= {*_LOW, "float32"}:
        fix = f"Write precision=BF16(), which stores all that is trained in float32, or cast {some(odd)} to {most}."
    old = resolved.engine_traits.makes_dtensors and facts.env.release < TRAINED_ALONE
    if old and not all(
        p.requires_grad for p in facts.model.params if p.name in {n for _, held in dtypes for n in held}
    ):
        alone = 'give what is trained units of its own: wrap=WrapPaths(("...",))'
        fix = f"Write `pip install 'torch>=2.8'`, which asks this of what is trained alone; or {alone}, or cast them."
    if pairs := [name for dtype, held in dtypes if dtype.startswith("complex") for name in held]:
        fix = (  # a cast would drop the imaginary part
            f"Store {some(pairs)} as real numbers, nn.Parameter(torch.view_as_real(w)), and compute with "
            "torch.view_as_complex of it; or write engine=DDP()."
        )
    does = "holds" if old else "trains" if resolved.engine_traits.makes_dtensors else "flattens"
    yield Hit(at(mixed[0]), f"The unit {does} parameters of several dtypes: {shown}.{others}", fix)


def _scalars(resolved: Resolved) -> Iterator[Hit]:
    names = [name for name in scalars(resolved.facts.model) if name not in resolved.ignored_params]
    if names:
        what = f"{some(names)} {'has' if len(names) == 1 else 'have'} no dimension, and FSDP1 flattens none without."
        yield Hit(at(names[0]), what)


def _left_whole(resolved: Resolved) -> Iterator[Hit]:
    packed = set(resolved.packed_params)
    names = [name for name in resolved.unsharded_params if name not in packed]
    if not names or resolved.facts.env.release >= IGNORES or resolved.arrives_sharded:
        return
    what = f"{count(len(names), 'parameter')} to be left whole ({some(names)}): fully_shard can do that from torch 2.7"
    yield Hit(at(names[0]), f"{what} on, this is {resolved.facts.env.torch}.")


def _packed(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    packed = [param for param in facts.model.params if param.cls in PACKED]
    if not resolved.engine_traits.has_units or not (packed or facts.model.quantised):
        return
    if resolved.engine_traits.makes_dtensors and packed and {p.name for p in packed} <= _handled(resolved):
        yield from _not_left_packed(resolved)
        return
    if packed:
        kind, names = packed[0], some([param.name for param in packed])
        what = f"{count(len(packed), 'parameter')} of packed {kind.dtype} values (`{kind.cls}`): {names}"
    else:
        what = f"The model was loaded in {facts.model.quantised}"
    yield Hit(at(packed[0].name if packed else ""), what + "; sharding and casting would change what the bytes mean.")


def _handled(resolved: Resolved) -> set[str]:
    """Names of the parameters that FSDP2 takes as they are: whole, or packed in the dtype that it gathers."""
    return {*resolved.unsharded_params, *resolved.packed_params}


def _not_left_packed(resolved: Resolved) -> Iterator[Hit]:
    """Yield what keeps FSDP2 from leaving packed weights as they are."""
    facts = resolved.facts
    names = resolved.packed_params
    packed = f"{count(len(names), 'packed parameter')} ({some(names)})"
    if facts.env.release < IGNORES and not {*names}.isdisjoint(resolved.unsharded_params):
        what = f"{packed} cannot be left whole: fully_shard can do that from torch 2.7 on, this is {facts.env.torch}."
        yield Hit(at(names[0]), what, "Write `pip install 'torch>=2.7'`, or engine=DDP().")
    elif resolved.cfg.weights is not None:
        what = f"{packed}: packed when the model was loaded, which {type(resolved.cfg.weights).__name__}() does not do."
        yield Hit(at(names[0]), what, "Write weights=None, and give the model with its values on every rank.")


def _packed_whole(resolved: Resolved) -> Iterator[Hit]:
    """4-bit weights that every rank holds whole, where they would be sharded in another storage dtype."""
    names = set(resolved.unsharded_params) - resolved.ignored_params
    whole = [p for p in resolved.facts.model.params if p.name in names and p.cls == "Params4bit"]
    ranks = resolved.axis_size("shard")
    if not whole or ranks == 1 or resolved.arrives_sharded:
        return
    dtypes = resolved.compute_dtypes
    gathered = dtypes.param if dtypes else None
    size = sum(param.numel * itemsize(param.dtype) for param in whole)
    what = f"{count(len(whole), '4-bit weight')} stored as {whole[0].dtype}, {in_bytes(size)} in all"
    where = f" while units are gathered in {gathered}" if gathered else ""
    fix = _STORE.format(gathered or "bfloat16")
    yield Hit(at(whole[0].name), f"{what}, stay whole on each of {ranks} ranks{where}.", fix)


_STORE = (
    "Load the model with BitsAndBytesConfig(bnb_4bit_quant_storage=torch.{0}), of which every rank holds its shards; "
    "leave it so if memory allows."
)


def _integers(resolved: Resolved) -> Iterator[Hit]:
    sharded = resolved.engine_traits.makes_dtensors
    able = (*_FLOATS, *_GATHERED) if sharded else _FLOATS[:2]  # FSDP1 flattens no complex numbers
    left = {*resolved.unsharded_params, *resolved.ignored_params}
    params = (p for p in resolved.facts.model.params if p.cls not in PACKED and p.name not in left)
    odd = [param for param in params if not param.dtype.startswith(able)]
    if resolved.engine_traits.has_units and odd:
        dtypes = ", ".join(sorted({param.dtype for param in odd}))
        names = some([param.name for param in odd])
        does = "no backend gathers" if sharded else "no flat parameter holds"
        yield Hit(at(odd[0].name), f"{count(len(odd), 'parameter')} of {dtypes}, which {does}: {names}.")


def _empty(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.intent is Intent.INFERENCE:
        return
    whole = set(resolved.unsharded_params)
    params = (p for p in resolved.facts.model.params if p.requires_grad and p.name not in whole)
    if names := [param.name for param in params if 0 in param.shape]:
        what = f"{some(names)}: trained, and without elements; torch reduces no empty gradient, and backward fails."
        yield Hit(at(names[0]), what)


def _mixed_requires_grad(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.intent is Intent.INFERENCE:
        return
    owner = resolved.unit_of
    whole = set(resolved.unsharded_params)
    kinds_of: dict[str, set[bool]] = defaultdict(set)
    for param in resolved.facts.model.params:
        if param.name not in whole:
            kinds_of[owner[param.name]].add(param.requires_grad)
    mixed = [unit for unit, kinds in kinds_of.items() if len(kinds) > 1]
    if mixed:
        of = f"{len(mixed)} of {count(len(kinds_of), 'unit')} {'mixes' if len(mixed) == 1 else 'mix'}"
        what = f"{of} frozen and trained parameters ({some([at(unit) for unit in mixed])}): "
        yield Hit(at(mixed[0]), what + "what is frozen is cast, gathered and freed together with what is trained.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="units.mixed-dtypes",
        summary="What a unit trains, or flattens, has one dtype once master weights are made.",
        check=_mixed_dtypes,
        fix="Cast the parameters before planning.",
        source=("pain 8", "torch FSDPParamGroup._init_mp_dtypes"),
    ),
    Rule(
        id="units.scalar",
        summary="Under FSDP1 every parameter has at least one dimension.",
        check=under(FSDP1, _scalars),
        fix="Write engine=FSDP2(), which keeps it whole on every rank and averages its gradient.",
        at=(Moment.PLAN, Moment.ACT),
        source=("F1-49", "torch FlatParamHandle"),
    ),
    Rule(
        id="units.left-whole",
        summary="Parameters without dimensions and those of ignored modules are left whole by a torch that can.",
        check=_left_whole,
        fix="Write `pip install 'torch>=2.7'`, or engine=DDP().",
        source=("M2-7", "torch fully_shard ignored_params"),
    ),
    Rule(
        id="units.packed",
        summary="Packed 4-bit and 8-bit values are frozen under FSDP2, and in no flat parameter of FSDP1.",
        check=_packed,
        fix="Freeze the packed weights and write engine=FSDP2(), or engine=DDP().",
        source=("pain 12", "M2-7"),
    ),
    Rule(
        id="units.packed-whole",
        summary="4-bit weights are stored in the dtype that FSDP2 gathers, and so are sharded.",
        check=_packed_whole,
        fix="Load the model with BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16).",
        severity=Severity.WARNING,
        source=("M2-7", "bitsandbytes Linear4bit"),
    ),
    Rule(
        id="units.integer",
        summary="Where parameters are sharded every parameter holds values that can be gathered.",
        check=_integers,
        fix="Register it as a buffer, which is not sharded: module.register_buffer(name, tensor).",
        at=(Moment.PLAN, Moment.ACT),
        source=("pain 12",),
    ),
    Rule(
        id="units.empty",
        summary="Under FSDP2 every trained parameter has elements.",
        check=under(FSDP2, _empty),
        fix="Freeze it with requires_grad_(False), or leave it out of the model.",
        source=("G-57", "torch _chunk_cat"),
    ),
    Rule(
        id="units.mixed-requires-grad",
        summary="Under FSDP2 a unit is trained whole or frozen whole.",
        check=under(FSDP2, _mixed_requires_grad),
        fix='This is fine for adapters; or give the trained modules units of their own: wrap=WrapPaths(("...",)).',
        severity=Severity.NOTE,
        source=("M2-7", "pain 19"),
    ),
    *_UNUSED,
)
"""Reporting order: the mistake that is most often made first."""
