"""What hangs on parameters, or changes them, where they are sharded or copied over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.config import DDP, FSDP1, FSDP2, DeepSpeed, Single, TensorParallel
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


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


def _attributes_lost(resolved: Resolved) -> Iterator[Hit]:
    engine = resolved.cfg.engine
    if not isinstance(engine, FSDP1) or engine.use_orig_params:
        return
    lost = [(n, key) for n, key in resolved.facts.model.param_attributes if n not in resolved.ignored_params]
    if lost:
        keys = some(list(dict.fromkeys(key for _, key in lost)))
        what = f"{count(len(lost), 'attribute')} set on parameters ({keys}): flat parameters take their place."
        yield Hit("config.engine.use_orig_params", what)


def _self_written(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    gathers = isinstance(cfg.engine, FSDP1 | FSDP2 | DeepSpeed | TensorParallel)
    if isinstance(cfg.engine, Single) or not resolved.trains or not (gathers or facts.env.world_size > 1):
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


RULES: tuple[Rule, ...] = (
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
        source=("pain 1", "P2-8", "torch FSDPParam.sharded_param"),
    ),
    Rule(
        id="params.attributes-lost",
        summary="Attributes set on parameters stay: flat parameters alone have none.",
        check=_attributes_lost,
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
)
"""Reporting order: what would train otherwise, then what is only said."""
