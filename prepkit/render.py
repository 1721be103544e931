"""Plans, findings, differences and rules as plain text: no colour, no width of a terminal, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, assert_never

from prepkit import codec
from prepkit.config import BF16, FP8, FP16, FSDP2, AsStored, Clip, ClipNorm, ClipValue, Config, DeepSpeed, NoClip
from prepkit.facts import Env, Facts
from prepkit.findings import Finding, errors
from prepkit.plan import Owners, Plan, Planned
from prepkit.render_changes import diff_text
from prepkit.render_layout import aligned, layout_lines
from prepkit.render_memory import memory_lines
from prepkit.render_names import count, in_bytes
from prepkit.render_steps import axes, effect
from prepkit.render_tree import tree_lines

if TYPE_CHECKING:
    from prepkit.rules.rule import Rule  # brings all rules along, which showing a plan needs none of

__all__ = ["diff_text", "findings_text", "plan_text", "rule_text", "rules_text"]

DIGEST = 12
"""Characters shown of a digest."""


def plan_text(plan: Plan) -> str:
    """A plan on one page: what it is for, its steps with their reasons, what every rank will hold, what to mind."""
    sections = (
        tuple(_header(plan)),
        tuple(_steps(plan.steps)),
        tuple(layout_lines(plan)),
        tuple(tree_lines(plan)),
        tuple(memory_lines(plan)),
        tuple(_findings("warnings", plan.warnings)),
        tuple(_findings("overridden (accepted in config.overrides)", plan.overridden)),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def findings_text(findings: tuple[Finding, ...]) -> str:
    """Every finding, and their number at the end."""
    if not findings:
        return "no findings"
    bad = len(errors(findings))
    counts = ((bad, "error"), (len(findings) - bad, "warning"))
    said = ", ".join(count(number, noun) for number, noun in counts if number)
    return "\n".join((*map(str, findings), said))


def rules_text(rules: tuple[Rule, ...]) -> str:
    """One line per rule: id, severity, and what holds when it is silent."""
    return "\n".join(aligned(tuple((rule.id, rule.severity.value, rule.summary) for rule in rules)))


def rule_text(rule: Rule, example: str = "") -> str:
    """All that a rule says of itself; ``example`` is a finding of it, or a line that says how to see one."""
    override = f"yes: overrides = [{rule.id!r}]" if rule.overridable else "no: no plan exists unless it holds"
    rows = (
        ("holds", rule.summary),
        ("fix", rule.fix),
        ("repair", "yes: Rule.repair gives the mended config" if rule.repair else "no: config alone cannot give it"),
        ("override", override),
        ("source", ", ".join(rule.source)),
        ("example", example.replace("\n", "\n" + " " * 12)),
    )
    return "\n".join((f"{rule.severity.value} {rule.id}", *aligned(tuple(row for row in rows if row[1]), indent=2)))


def _header(plan: Plan) -> Iterator[str]:
    made = plan.provenance
    yield f"{type(plan.config.engine).__name__} plan for {count(plan.world_size, 'rank')}"
    optimizer = _optimizer(plan)
    rows = (
        ("model", _model(plan.facts)),
        ("environment", _environment(plan.facts.env)),
        ("assumed", ", ".join(made.assumed) + " (declared, not seen)" if made.assumed else ""),
        ("mesh", axes(plan.mesh)),
        ("precision", _precision(plan.config)),
        ("optimizer", optimizer),
        *_owners(plan.owners),
        ("digest", f"{_digest(codec.plan_digest(plan))} (config {_digest(made.config)}, facts {_digest(made.facts)})"),
        ("made by", f"prepkit {made.prepkit}"),
    )
    yield from aligned(tuple(row for row in rows if row[1]), indent=2)


def _digest(digest: str) -> str:
    """The first hexadecimal digits, without the name of the algorithm."""
    return digest.rpartition(":")[2][:DIGEST]


def _model(facts: Facts) -> str:
    model = facts.model
    trained = sum(param.requires_grad for param in model.params)
    ties = f", {count(len(model.ties), 'tied group')}" if model.ties else ""
    name = model.classes[model.modules[0].cls].name
    params = f"{count(len(model.params), 'parameter')} ({trained:,} trained)"
    return f"{name}, {count(len(model.modules), 'module')}, {params}{ties}"


def _environment(env: Env) -> str:
    said = (
        env.device,
        f"{env.per_node} per node" if env.per_node else "",
        f"{in_bytes(env.memory)} each" if env.memory else "",
        f"torch {env.torch}" if env.torch else "",
    )
    return ", ".join(part for part in said if part)


def _precision(cfg: Config) -> str:
    match cfg.precision:
        case AsStored():
            return "computes as stored"
        case (
            BF16(reduce_dtype=reduce, output_dtype=output, master_weights=master)
            | FP16(reduce_dtype=reduce, output_dtype=output, master_weights=master)
            | FP8(reduce_dtype=reduce, output_dtype=output, master_weights=master)
        ):
            dtype = "float16" if isinstance(cfg.precision, FP16) else "bfloat16"
            stored = "trained parameters stored in float32" if master else "parameters stored as they are"
            if isinstance(cfg.engine, DeepSpeed):
                stored = f"parameters stored in {dtype}"
            reduced = f" reduces in {reduce}," if isinstance(cfg.engine, FSDP2 | DeepSpeed) else ""
            float8 = f"float8 ({type(cfg.precision.backend).__name__}) and " if isinstance(cfg.precision, FP8) else ""
            return f"computes in {float8}{dtype},{reduced} returns {output}, {stored}"
        case _:
            assert_never(cfg.precision)


def _optimizer(plan: Plan) -> str:
    seen = plan.facts.optimizer
    if seen is not None:
        slots = sum(len(group.slots) for group in seen.groups)
        return f"{seen.name}, {count(slots, 'parameter')} in {count(len(seen.groups), 'group')}"
    spec = plan.config.optimizer
    return f"{type(spec).__name__}, created after the model is prepared" if spec is not None else "none"


def _owners(owners: Owners) -> tuple[tuple[str, str], ...]:
    ticks = f", {count(owners.scheduler_ticks, 'tick')} per step"
    return (
        ("accumulation", f"{owners.accumulation}, {count(owners.accumulation_steps, 'micro-batch')} per step"),
        ("clipping", f"{owners.clipping}{_clip(owners.clip)}"),
        ("scheduler", owners.scheduler + (ticks if owners.scheduler != "nobody" else "")),
        ("master weights", owners.master_weights),
        ("loss scaling", owners.loss_scaling if owners.loss_scaling != "nobody" else ""),
    )


def _clip(clip: Clip) -> str:
    match clip:
        case NoClip():
            return ""
        case ClipNorm(max_norm=most, norm_type=kind):
            return f", joint {kind:g}-norm at most {most:g}"
        case ClipValue(max_value=most):
            return f", every element at most {most:g} in size"
        case _:
            assert_never(clip)


def _steps(steps: tuple[Planned, ...]) -> Iterator[str]:
    yield "steps" if steps else "steps: none"
    digits = len(str(len(steps)))
    width = max((len(type(planned.step).__name__) for planned in steps), default=0)
    for number, planned in enumerate(steps, start=1):
        kind = type(planned.step).__name__.ljust(width)
        rows = f"  [{', '.join(planned.rows)}]" if planned.rows else ""
        yield f"  {number:>{digits}}  {kind}  {effect(planned.step)}"
        yield f"  {'':{digits}}  {'':{width}}  because {planned.reason}{rows}"


def _findings(title: str, findings: tuple[Finding, ...]) -> Iterator[str]:
    if findings:
        yield f"{title}: {len(findings)}"
        for finding in findings:
            yield from (f"  {line}" for line in str(finding).splitlines())
