"""The model: state that it carries already, parameters and what hangs on them, ties."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attrs import evolve

from prepkit.config import (
    DDP,
    FSDP1,
    FSDP2,
    CheckpointBlocks,
    Config,
    Intent,
    TensorParallel,
)
from prepkit.config.precision import as_typed
from prepkit.facts import Facts, Mark, ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.resolve.modules import parent, unit_of
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.units import LAZY
from prepkit.rules.rule import Hit, Moment, Rule, with_engine

_WRAPPED: tuple[Mark, ...] = ("ddp", "fsdp1", "fsdp2", "deepspeed", "fabric", "prepared")
_WHOLE = ("Single", "DDP", "XLA")
"""Engines that leave the module whole: it can be taken out of what they put around it."""
_ONE_AXIS = tuple((word,) for word in ("replicate", "shard(0)", "shard(1)"))
_BYPASS = "ACCELERATE_BYPASS_DEVICE_MAP"


def _marked(model: ModelFacts, mark: Mark) -> tuple[str, ...]:
    return tuple(module.path for module in model.modules if mark in module.marks)


def _named(paths: tuple[str, ...]) -> str:
    return some(paths) if paths[0] else "the model itself"


def _wrapped(resolved: Resolved) -> Iterator[Hit]:
    for mark in _WRAPPED:
        stands = mark == "fsdp2" and resolved.arrives_sharded  # is kept as it is
        if stands or not (paths := _marked(resolved.facts.model, mark)):
            continue
        if mark == "prepared" and (carried := resolved.facts.model.prepared):
            engine = carried.partition(",")[0]
            ways = ["what apply returned", f"a model that is built anew: {engine} has changed this one in place"]
            if engine in _WHOLE:
                ways[1:] = ["ready.unwrap(keep_autocast=False, keep_compiled=False)", "a model that is built anew"]
            fix = f"Use {', or '.join(ways)}."
            yield Hit("model", f"prepkit has prepared this model already: it carries {carried}.", fix)
        else:
            yield Hit(at(paths[0]), f"Already {mark}: {_named(paths)}; preparing it again would wrap the wrapper.")


def _autocast(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if paths := _marked(resolved.facts.model, "autocast"):
        does = "promises no cast" if cfg.precision is None else "would add a second"
        asked = f"precision={as_typed(cfg.precision)} {does}"
        yield Hit(at(paths[0]), f"The forward of {_named(paths)} runs under autocast already, and {asked}.")


def _compiled(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.compile is not None and (paths := _marked(resolved.facts.model, "compiled")):
        yield Hit(at(paths[0]), f"Already compiled: {_named(paths)}; config.compile would compile it again.")


def _checkpointed(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if isinstance(resolved.cfg.checkpointing, CheckpointBlocks) and (paths := _marked(facts.model, "checkpointed")):
        yield Hit(at(paths[0]), f"Already checkpointed: {_named(paths)}; everything inside would be recomputed twice.")


def _dtensors(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if resolved.engine_traits.cuts_all_ranks:  # arrives cut, and is only verified
        names = [p.name for p in resolved.facts.model.params if p.cls == "DTensor" and p.placements not in _ONE_AXIS]
        if names:
            what = f"{count(len(names), 'parameter')} lie otherwise than cut over one axis ({some(names)})."
            yield Hit(at(names[0]), what)
        return
    names = [param.name for param in resolved.facts.model.params if param.cls == "DTensor"]
    if names and not resolved.one_process and not resolved.arrives_sharded:
        engine, shown = type(cfg.engine).__name__, f"{count(len(names), 'parameter')} sharded already ({some(names)})"
        cut = resolved.facts.model.architecture.tp_size
        if resolved.engine_traits.takes_sharded and cut:
            what = f"{shown}: transformers has cut the layers over {cut} ranks, and FSDP2 shards whole layers."
            fix = (
                f"Load it without tp_plan and write mesh=Mesh(shard=-1, tensor={cut}): FSDP2 cuts the same layers, by "
                "the model's own plan; or write engine=TensorParallel(), which takes the model as it is."
            )
            yield Hit(at(names[0]), what, fix)
        else:
            yield Hit(at(names[0]), f"{shown}, and {engine} takes plain ones.")


def _device_map(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    spread = facts.model.device_map
    keeps = isinstance(cfg.engine, DDP)  # the others place the model themselves
    if resolved.one_process or len(spread) < 2 or (keeps and cfg.keep_device_map):
        return
    devices = some(tuple(dict.fromkeys(device for _, device in spread)))
    engine = type(cfg.engine).__name__
    what = f"hf_device_map spreads the model over {devices}, and {engine} would do so in each of {facts.env.world_size}"
    fix = "Load the model without device_map, or run one process with engine=Single()."
    said = dict(facts.env.variables).get(_BYPASS)
    if keeps:
        seen = f" prepkit does not obey {_BYPASS}={said}." if said else ""
        fix += f" If each process shall have devices of its own, write keep_device_map=True.{seen}"
    yield Hit("model.hf_device_map", what + " processes.", fix)


def _lazy(resolved: Resolved) -> Iterator[Hit]:
    names = [param.name for param in resolved.facts.model.params if param.cls in LAZY]
    if names:
        yield Hit(at(names[0]), f"{count(len(names), 'parameter')} without a shape yet: {some(names)}.")


def _nothing_trainable(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if resolved.cfg.intent is Intent.TRAINING and not any(param.requires_grad for param in facts.model.params):
        what = f"intent is training, but none of the {count(len(facts.model.params), 'parameter')} requires a gradient."
        yield Hit("model", what)


def _eager(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, compile=None)


def _no_checkpointing(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, checkpointing=None)


# --- parameters ------------------------------------------------------------------------------------------------------


def _replaced(resolved: Resolved) -> frozenset[str]:
    """Names of the parameters in whose place something else takes part in backward."""
    names = {param.name for param in resolved.facts.model.params}
    match resolved.cfg.engine:
        case FSDP2():
            whole = set() if resolved.arrives_sharded else names - set(resolved.unsharded_params)
            return frozenset(whole) | resolved.tp.placements.keys()
        case FSDP1():
            return frozenset(names - resolved.ignored_params)
        case TensorParallel():
            return frozenset(resolved.tp.placements)
        case _:
            return frozenset()


def _hooks_lost(resolved: Resolved) -> Iterator[Hit]:
    replaced = _replaced(resolved) if resolved.facts.model.param_hooks and resolved.trains else ()
    lost = [(name, kind) for name, kind in resolved.facts.model.param_hooks if name in replaced]
    if lost:
        kinds = " and ".join(f"`{kind}`" for kind in dict.fromkeys(kind for _, kind in lost))
        names = list(dict.fromkeys(name for name, _ in lost))
        engine = type(resolved.cfg.engine).__name__
        what = f"{some(names)}: hooks of {kinds}. {engine} puts another tensor in its place, and they would never run."
        yield Hit(at(names[0]), what)


def _hooks_see_own(resolved: Resolved) -> Iterator[Hit]:
    if not resolved.facts.model.param_hooks or not resolved.trains or resolved.data_parallel_size == 1:
        return
    replaced = _replaced(resolved)
    kept = [name for name, _ in resolved.facts.model.param_hooks if name not in replaced]
    if names := list(dict.fromkeys(kept)):
        what = f"{some(names)}: hooks run before gradients are averaged, and see those of their own rank alone."
        yield Hit(at(names[0]), what)


def _attributes_lost(resolved: Resolved, engine: FSDP1) -> Iterator[Hit]:
    if engine.use_orig_params:
        return
    lost = [(n, key) for n, key in resolved.facts.model.param_attributes if n not in resolved.ignored_params]
    if lost:
        keys = some(list(dict.fromkeys(key for _, key in lost)))
        what = f"{count(len(lost), 'attribute')} set on parameters ({keys}): flat parameters take their place."
        yield Hit("config.engine.use_orig_params", what)


def _self_written(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    gathers = resolved.engine_traits.replaces_params
    if resolved.one_process or not resolved.trains or not (gathers or facts.env.world_size > 1):
        return
    if facts.model.self_written:
        (name, how), *others = facts.model.self_written
        also = f" So does {count(len(others), 'other module')}." if others else ""
        lost = "ranks shorten other rows and drift apart" if isinstance(cfg.engine, DDP) else "what it writes is lost"
        path = name.rpartition(".")[0]
        what = f"The forward of `{path}` writes `{name}` ({how}): {lost}.{also}"
        fix = (
            f"Write `model.{path}.max_norm = None` before planning, and shorten what each rank holds of the rows after "
            f"each step(): torch.renorm(rows, 2, 0, {how.partition('=')[2]})."
        )
        yield Hit(at(name), what, fix)


# --- ties ------------------------------------------------------------------------------------------------------------


def apart(paths: tuple[str, ...], model: ModelFacts) -> Iterator[tuple[tuple[str, str], ...]]:
    """Groups of tied parameters that units at these paths would share: per name the unit that it falls into.

    A name in a module that is reachable under an earlier path is passed over: a shared module has one unit.
    """
    if not model.ties or not paths:
        return
    owner = unit_of(paths, model)
    here = {module.path for module in model.modules}
    for group in model.ties:
        places = tuple((name, owner[name]) for name in group if parent(name) in here)
        if len({unit for _, unit in places}) > 1:
            yield places


def _split(resolved: Resolved) -> Iterator[Hit]:
    for places in apart(resolved.units, resolved.facts.model):
        if places[0][0] in resolved.ignored_params:
            continue
        names = some(tuple(name for name, _ in places))
        units = " and ".join(f"`{unit}`" if unit else "the root" for unit in dict.fromkeys(unit for _, unit in places))
        what = f"{names} are one parameter, but fall into the units {units}; a parameter can be sharded once only."
        extra = some(tuple(dict.fromkeys(unit for _, unit in places if unit)))
        fix = f"Leave {extra} out of config.engine.wrap, or write wrap=WrapBlocks(), which keeps ties together."
        yield Hit(at(places[0][0]), what, fix)


def _embeddings(model: ModelFacts) -> tuple[str, str, bool] | None:
    """Weights of the input and output embedding, and whether they are tied; None where one is not to be seen."""
    if model.input_embedding is None or model.output_embedding is None:
        return None
    first, second = (f"{path}.weight" if path else "weight" for path in (model.input_embedding, model.output_embedding))
    names = {param.name for param in model.params}.union(*model.ties)
    if first == second or first not in names or second not in names:
        return None
    return first, second, any({first, second} <= set(group) for group in model.ties)


def _left_untied(embeddings: tuple[str, ...], model: ModelFacts) -> bool:
    """Return whether the model's class ties one of the two, and nothing is tied to it.

    Classes may tie other things, such as two embeddings, and a config that says yes leaves the output as it is.
    """
    tied = set().union(*model.ties)
    return any(_names(key, name) for name in embeddings if name not in tied for key in model.tied_keys)


def _names(key: str, name: str) -> bool:
    """Whether a key of ``_tied_weights_keys``, a regular expression in transformers, is meant for a parameter."""
    try:
        return re.search(key, name) is not None
    except re.error:
        return key == name


def _only_declared(resolved: Resolved) -> Iterator[Hit]:
    model = resolved.facts.model
    pair = _embeddings(model)
    if pair and not pair[2] and model.architecture.tie_word_embeddings and _left_untied(pair[:2], model):
        first, second, _tied = pair
        what = f"model.config.tie_word_embeddings is True, but `{second}` is not `{first}`: each would learn by itself."
        call = "Call model.tie_weights()" if model.has_tie_weights else f"Assign `{first}` to `{second}`"
        yield Hit(at(second), what, f"{call} before planning, or set model.config.tie_word_embeddings = False.")


def _undeclared(resolved: Resolved) -> Iterator[Hit]:
    pair = _embeddings(resolved.facts.model)
    if pair and pair[2] and resolved.facts.model.architecture.tie_word_embeddings is False:
        first, second, _tied = pair
        what = f"`{second}` is `{first}`, but model.config.tie_word_embeddings is False: a reload would untie them."
        yield Hit(at(second), what)


def _without_forward(resolved: Resolved) -> Iterator[Hit]:
    """A container of torch's as the root of a model that is called through a wrapper."""
    cfg, model, traits = resolved.cfg, resolved.facts.model, resolved.engine_traits
    root = next((model.classes[module.cls] for module in model.modules if not module.path), None)
    bare = root is not None and not root.has_forward and root.module == "torch.nn.modules.container"
    if (traits.root_wrapper or traits.has_units) and root is not None and bare and not cfg.entry_points:
        engine = type(cfg.engine).__name__
        what = f"`{root.name}` has no forward, and {engine} acts in the forward of the model that it is given alone."
        yield Hit("model", what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="model.already-wrapped",
        summary="No module is wrapped or prepared already.",
        check=_wrapped,
        fix="Pass the model as it was before it was wrapped, and build it anew if it was sharded in place.",
        at=(Moment.PLAN, Moment.ACT),
        source=("BK-2", "G-20", "G-21", "G-56", "pain 19"),
    ),
    Rule(
        id="model.no-forward",
        summary="The model has a forward that the engine can act in.",
        check=_without_forward,
        fix=(
            "Give it one: make it the attribute of a class(torch.nn.Module) whose forward calls what it holds, such as "
            "self.decoder(self.encoder(x)), and call ready.model(x)."
        ),
        source=("G-8",),
    ),
    Rule(
        id="model.already-autocast",
        summary="No forward runs under autocast already.",
        check=_autocast,
        fix="Pass the model without the autocast patch, and write the precision in config.precision.",
        source=("AMP-1", "G-20"),
    ),
    Rule(
        id="model.already-compiled",
        summary="A model that is to be compiled is not compiled already.",
        check=_compiled,
        fix="Write compile=None, or pass the model uncompiled.",
        at=(Moment.PLAN, Moment.ACT),
        source=("CM-2", "G-46", "G-22"),
        repair=_eager,
    ),
    Rule(
        id="model.already-checkpointed",
        summary="A model that is to be checkpointed is not checkpointed already.",
        check=_checkpointed,
        fix="Write checkpointing=None, or call model.gradient_checkpointing_disable().",
        at=(Moment.PLAN, Moment.ACT),
        source=("pain 21", "G-52"),
        repair=_no_checkpointing,
    ),
    Rule(
        id="model.sharded-parameters",
        summary="DDP and FSDP1 get plain parameters, TensorParallel and FSDP2 also such as they make themselves.",
        check=_dtensors,
        fix="Pass the model before it is sharded.",
        at=(Moment.PLAN, Moment.ACT),
        source=("DDP-2", "H-2", "pain 34"),
    ),
    Rule(
        id="model.device-map",
        summary="A model of several processes is not spread over devices by a device map.",
        check=_device_map,
        fix="Load the model without device_map, or run one process with engine=Single().",
        source=("DM-1", "DM-2", "DM-3", "DM-4", "PR-4", "G-27", "pain 23"),
    ),
    Rule(
        id="model.lazy-parameters",
        summary="Every parameter has a shape.",
        check=_lazy,
        fix="Run one forward on a sample batch before planning, which gives lazy modules their shapes.",
        source=("torch UninitializedParameter", "torch DistributedDataParallel"),
    ),
    Rule(
        id="model.nothing-trainable",
        summary="A model that is trained has a trainable parameter.",
        check=_nothing_trainable,
        fix="Call requires_grad_(True) on what is to be trained, or write intent=Intent.INFERENCE.",
        at=(Moment.PLAN, Moment.ACT),
        source=("DDP-3", "MC-1", "G-23", "G-30", "pain 19"),
    ),
    Rule(
        id="params.self-written",
        summary="No module's own forward writes parameters that ranks gather or copy.",
        check=_self_written,
        fix="Set max_norm = None, and shorten the rows after each step.",
        source=("F1-49", "torch F.embedding max_norm", "torch FSDPParam.free_unsharded_param"),
    ),
    Rule(
        id="params.hooks-lost",
        summary="No parameter that another takes the place of has hooks.",
        check=_hooks_lost,
        fix=(
            "Take them away before planning, or write engine=DDP(). After apply, FSDP2 runs what "
            "register_post_accumulate_grad_hook puts on the parameters of ready.model, with this rank's averaged shard."
        ),
        at=(Moment.PLAN, Moment.ACT),
        source=("pain 1", "P2-8", "torch FSDPParam.sharded_param"),
    ),
    Rule(
        id="params.attributes-lost",
        summary="Attributes set on parameters stay: flat parameters alone have none.",
        check=with_engine(FSDP1, _attributes_lost),
        fix="Leave use_orig_params at True.",
        source=("F1-47", "pain 1"),
    ),
    Rule(
        id="params.hooks-local",
        summary="Hooks of parameters see averaged gradients.",
        check=_hooks_see_own,
        fix="This is fine for what is linear, such as a mask; do what clips, counts or steps after ready.backward().",
        severity=Severity.WARNING,
        source=("pain 16", "torch DistributedDataParallel"),
    ),
    Rule(
        id="ties.split",
        summary="What is sharded keeps every tied parameter in one unit.",
        check=_split,
        fix="Leave the units that share it out of config.engine.wrap.",
        source=("pain 10", "torch FSDPState._validate_no_duplicate_params"),
    ),
    Rule(
        id="ties.only-declared",
        summary="Embeddings that the model's config calls tied are one parameter.",
        check=_only_declared,
        fix="Call model.tie_weights() before planning.",
        source=("pain 10",),
    ),
    Rule(
        id="ties.undeclared",
        summary="Embeddings that are one parameter are called tied by the model's config.",
        check=_undeclared,
        fix="Set model.config.tie_word_embeddings = True, or give the output embedding a weight of its own.",
        severity=Severity.WARNING,
        source=("pain 10",),
    ),
)
