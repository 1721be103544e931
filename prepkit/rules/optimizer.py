"""The optimizer and its scheduler against the model and the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attrs import evolve

from prepkit.config import Config, DeepSpeed, Intent
from prepkit.config.optimizer import specs
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import count, some
from prepkit.resolve.deepspeed.data import look, said
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def _held(facts: Facts) -> tuple[str, ...]:
    groups = facts.optimizer.groups if facts.optimizer else ()
    return tuple(name for group in groups for name in group.slots if name is not None)


def _foreign(resolved: Resolved) -> Iterator[Hit]:
    for index, group in enumerate(resolved.facts.optimizer.groups if resolved.facts.optimizer else ()):
        if foreign := group.slots.count(None):
            of = f"{foreign} of the {count(len(group.slots), 'tensor')} in group {index}"
            yield Hit(
                f"optimizer.groups[{index}]", f"{of} {'is' if foreign == 1 else 'are'} no parameter of the model."
            )


def _missing(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if facts.optimizer is None or resolved.cfg.intent is not Intent.TRAINING:
        return
    names = set(_held(facts))
    missed = tuple(p.name for p in facts.model.params if p.requires_grad and p.name not in names)
    if missed:
        what = f"{count(len(missed), 'trainable parameter')} in no group, so never updated: {some(missed)}."
        yield Hit("optimizer", what)


def _twice(resolved: Resolved) -> Iterator[Hit]:
    again = tuple(name for name, times in Counter(_held(resolved.facts)).items() if times > 1)
    if again:
        yield Hit("optimizer", f"{some(again)} {'is' if len(again) == 1 else 'are'} held in more than one slot.")


def _frozen(resolved: Resolved) -> Iterator[Hit]:
    names = set(_held(resolved.facts))
    frozen = tuple(p.name for p in resolved.facts.model.params if not p.requires_grad and p.name in names)
    if frozen:
        yield Hit("optimizer", f"{count(len(frozen), 'frozen parameter')} in its groups: {some(frozen)}.")


def _two(resolved: Resolved) -> Iterator[Hit]:
    if resolved.facts.optimizer is not None and resolved.cfg.optimizer:
        given, asked = resolved.facts.optimizer.name, _asked(resolved.cfg)
        yield Hit("config.optimizer", f"{asked} is asked for, and an optimizer `{given}` is given as well.")


def _none(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if cfg.intent is Intent.TRAINING and facts.optimizer is None and not cfg.optimizer and not _section(cfg):
        yield Hit("config.optimizer", "intent is training, but no optimizer is given or asked for.")


def _asked(cfg: Config) -> str:
    """The optimizers of the config in words."""
    return " + ".join(type(spec).__name__ for spec in specs(cfg.optimizer))


def _section(cfg: Config) -> bool:
    """Whether DeepSpeed makes an optimizer from a section of its config."""
    return isinstance(cfg.engine, DeepSpeed) and look(said(cfg.engine), "optimizer") is not None


def _for_inference(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if cfg.intent is Intent.INFERENCE and (facts.optimizer is not None or cfg.optimizer):
        name = facts.optimizer.name if facts.optimizer else _asked(cfg)
        yield Hit("config.intent", f"intent is inference, but there is an optimizer `{name}`.")


def _own_list(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if resolved.engine_traits.replaces_params and facts.optimizer and facts.optimizer.keeps_own_list:
        what = f"`{facts.optimizer.name}` keeps a list of parameters of its own, which cannot follow them into shards."
        yield Hit("optimizer", what)


def _unshardable(resolved: Resolved) -> Iterator[Hit]:
    given = resolved.facts.optimizer
    for member in given.classes if resolved.engine_traits.makes_dtensors and given else ():
        if member.module.partition(".")[0] == "bitsandbytes":
            what = f"`bitsandbytes` `{member.name}` reads raw memory and cannot step sharded parameters."
            yield Hit("optimizer", what)


def _other_scheduler(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    if facts.scheduler and facts.optimizer and not facts.scheduler.drives_optimizer and not facts.scheduler.factory:
        yield Hit(
            "scheduler", f"`{facts.scheduler.name}` drives another optimizer than the `{facts.optimizer.name}` given."
        )


def _lone_scheduler(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if facts.scheduler and not facts.optimizer:
        if facts.scheduler.factory and (cfg.optimizer or _section(cfg)):
            return  # it is called once the optimizer exists
        asked = f"; the {_asked(cfg)} asked for does not exist yet" if cfg.optimizer else ""
        yield Hit("scheduler", f"`{facts.scheduler.name}` is given without its optimizer{asked}.")


def _drop_spec(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, optimizer=None)


RULES: tuple[Rule, ...] = (
    Rule(
        id="optimizer.foreign-parameters",
        summary="Every tensor of the optimizer is a parameter of the model.",
        check=_foreign,
        fix="Build the optimizer from model.parameters() after the last change to it (adapters, dtype, size).",
        source=("pain 1", "G-1", "P2-14"),
    ),
    Rule(
        id="optimizer.held-twice",
        summary="No parameter is in two slots.",
        check=_twice,
        fix="Put every parameter into one group once.",
        source=("G-5", "G-57"),
    ),
    Rule(
        id="optimizer.two",
        summary="The optimizer is given or asked for, not both.",
        check=_two,
        fix="Leave config.optimizer out, or do not pass an optimizer.",
        overridable=False,
        source=("pain 3",),
        repair=_drop_spec,
    ),
    Rule(
        id="optimizer.for-inference",
        summary="Inference comes without an optimizer.",
        check=_for_inference,
        fix="Write intent=Intent.TRAINING, or leave the optimizer out.",
        source=("pain 19", "PR-7"),
    ),
    Rule(
        id="optimizer.keeps-own-list",
        summary="What is sharded or cut is held by the optimizer in its groups and state only.",
        check=_own_list,
        fix="Leave it out and write optimizer=AdamW(...) in the config, or engine=DDP().",
        source=("pain 13", "P2-13"),
    ),
    Rule(
        id="optimizer.cannot-shard",
        summary="Under FSDP2 and TensorParallel the optimizer can step sharded parameters.",
        check=_unshardable,
        fix="Use torch.optim.AdamW or an 8-bit optimizer of torchao, or write engine=DDP().",
        source=("pain 13",),
    ),
    Rule(
        id="scheduler.other-optimizer",
        summary="The scheduler drives the optimizer that is given.",
        check=_other_scheduler,
        fix="Build the scheduler from the optimizer that you pass.",
        source=("W-11", "G-39"),
    ),
    Rule(
        id="scheduler.without-optimizer",
        summary="A scheduler comes with its optimizer.",
        check=_lone_scheduler,
        fix="Pass the optimizer that the scheduler was built from, and leave config.optimizer out.",
        source=("G-39",),
    ),
    Rule(
        id="optimizer.none",
        summary="Training comes with an optimizer.",
        check=_none,
        fix="Pass an optimizer or write optimizer=AdamW(...); write intent=Intent.INFERENCE if nothing is trained.",
        severity=Severity.WARNING,
        source=("PR-7", "PR-21"),
    ),
    Rule(
        id="optimizer.misses-parameters",
        summary="Every trainable parameter is in the optimizer.",
        check=_missing,
        fix="Add them to a group, or freeze them with requires_grad_(False).",
        severity=Severity.WARNING,
        source=("pain 1",),
    ),
    Rule(
        id="optimizer.frozen-parameters",
        summary="Every parameter in the optimizer is trainable.",
        check=_frozen,
        fix="Build the groups from parameters with requires_grad only.",
        severity=Severity.WARNING,
        source=("pain 19",),
    ),
)
"""Reporting order: errors about the parameters, about the engine, about the scheduler; then warnings."""
