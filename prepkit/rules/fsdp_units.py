"""What FSDP2 and FSDP1 ask of the parameters in a unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prepkit.config import FSDP1, FSDP2, Config, Intent, KeepWeights, Mixed
from prepkit.facts import ParamFact
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.resolve.modules import PACKED
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule

LAZY = frozenset({"UninitializedParameter"})
"""Classes of parameters that have no shape yet."""
IGNORES = (2, 7)
"""torch from which ``fully_shard`` takes ``ignored_params``."""
_FLOATS = ("float", "bfloat", "complex")
_GATHERED = ("int64", "int32", "int8", "uint8", "bool")
"""What gloo and NCCL gather beside floats, so that FSDP2 shards it: frozen, as integers always are."""
_LOW = frozenset({"bfloat16", "float16"})


def trained_dtype(cfg: Config, param: ParamFact) -> str:
    """Dtype in which a trainable parameter is stored when it is sharded: float32 where it gets master weights."""
    master = isinstance(cfg.precision, Mixed) and cfg.precision.master_weights and cfg.intent is Intent.TRAINING
    return "float32" if master and param.dtype in _LOW else param.dtype


def _dtypes(resolved: Resolved) -> dict[str, dict[str, list[str]]]:
    """Unit to dtype to the parameters that must agree in it: under FSDP2 the trainable ones, under FSDP1 all."""
    cfg = resolved.cfg
    names: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    match cfg.engine:
        case FSDP2():
            trainable = tuple(param for param in resolved.facts.model.params if param.requires_grad)
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
    does = "trains" if isinstance(resolved.cfg.engine, FSDP2) else "flattens"
    yield Hit(at(mixed[0]), f"The unit {does} parameters of several dtypes: {shown}.{others}", fix)


def _scalars(resolved: Resolved) -> Iterator[Hit]:
    names = [p.name for p in resolved.facts.model.params if p.shape == () and p.cls not in LAZY]
    if resolved.engine_traits.has_units and names:
        does = "FSDP2 shards the first one" if isinstance(resolved.cfg.engine, FSDP2) else "FSDP1 flattens none without"
        what = f"{some(names)} {'has' if len(names) == 1 else 'have'} no dimension, and {does}."
        yield Hit(at(names[0]), what)


def _packed(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    packed = [param for param in facts.model.params if param.cls in PACKED]
    if not resolved.engine_traits.has_units or not (packed or facts.model.quantised):
        return
    if isinstance(resolved.cfg.engine, FSDP2) and packed and len(packed) == len(resolved.packed_params):
        yield from _not_left_packed(resolved)
        return
    if packed:
        kind, names = packed[0], some([param.name for param in packed])
        what = f"{count(len(packed), 'parameter')} of packed {kind.dtype} values (`{kind.cls}`): {names}"
    else:
        what = f"The model was loaded in {facts.model.quantised}"
    yield Hit(at(packed[0].name if packed else ""), what + "; sharding and casting would change what the bytes mean.")


def _not_left_packed(resolved: Resolved) -> Iterator[Hit]:
    """What keeps FSDP2 from leaving packed weights as they are."""
    facts = resolved.facts
    names = resolved.packed_params
    packed = f"{count(len(names), 'packed parameter')} ({some(names)})"
    if facts.env.release < IGNORES:
        what = f"{packed} cannot be left whole: fully_shard can do that from torch 2.7 on, this is {facts.env.torch}."
        yield Hit(at(names[0]), what, "Write `pip install 'torch>=2.7'`, or engine=DDP().")
    elif not isinstance(resolved.cfg.weights, KeepWeights):
        what = f"{packed}: packed when the model was loaded, which {type(resolved.cfg.weights).__name__}() does not do."
        yield Hit(at(names[0]), what, "Write weights=KeepWeights(), and give the model with its values on every rank.")


def _integers(resolved: Resolved) -> Iterator[Hit]:
    sharded = isinstance(resolved.cfg.engine, FSDP2)
    able = (*_FLOATS, *_GATHERED) if sharded else _FLOATS[:2]  # FSDP1 flattens no complex numbers
    odd = [p for p in resolved.facts.model.params if not p.dtype.startswith(able) and p.cls not in PACKED]
    if resolved.engine_traits.has_units and odd:
        dtypes = ", ".join(sorted({param.dtype for param in odd}))
        names = some([param.name for param in odd])
        does = "no backend gathers" if sharded else "no flat parameter holds"
        yield Hit(at(odd[0].name), f"{count(len(odd), 'parameter')} of {dtypes}, which {does}: {names}.")


def _empty(resolved: Resolved) -> Iterator[Hit]:
    if not isinstance(resolved.cfg.engine, FSDP2) or resolved.cfg.intent is Intent.INFERENCE:
        return
    names = [p.name for p in resolved.facts.model.params if p.requires_grad and 0 in p.shape]
    if names:
        what = f"{some(names)}: trained, and without elements; torch reduces no empty gradient, and backward fails."
        yield Hit(at(names[0]), what)


def _mixed_requires_grad(resolved: Resolved) -> Iterator[Hit]:
    if not isinstance(resolved.cfg.engine, FSDP2) or resolved.cfg.intent is Intent.INFERENCE:
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
        summary="Where parameters are sharded every parameter has at least one dimension.",
        check=_scalars,
        fix="Give it one element in one dimension: nn.Parameter(torch.zeros(1)).",
        source=("torch _verify_managed_param",),
    ),
    Rule(
        id="units.packed",
        summary="No packed 4-bit or 8-bit values are cut: FSDP2 leaves frozen ones whole, FSDP1 holds none.",
        check=_packed,
        fix="Freeze the packed weights and write engine=FSDP2(), or engine=DDP().",
        source=("pain 12", "M2-7"),
    ),
    Rule(
        id="units.integer",
        summary="Where parameters are sharded every parameter holds values that can be gathered.",
        check=_integers,
        fix="Register it as a buffer, which is not sharded: module.register_buffer(name, tensor).",
        source=("pain 12",),
    ),
    Rule(
        id="units.empty",
        summary="Under FSDP2 every trained parameter has elements.",
        check=_empty,
        fix="Freeze it with requires_grad_(False), or leave it out of the model.",
        source=("G-57", "torch _chunk_cat"),
    ),
    Rule(
        id="units.mixed-requires-grad",
        summary="Under FSDP2 a unit is trained whole or frozen whole.",
        check=_mixed_requires_grad,
        fix='This is fine for adapters; or give the trained modules units of their own: wrap=WrapPaths(("...",)).',
        severity=Severity.WARNING,
        source=("M2-7", "pain 19"),
    ),
)
"""Reporting order: the mistake that is most often made first."""
