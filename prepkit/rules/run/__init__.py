"""What is wrong with a prepared model: rules over what apply, or something else, has made of it."""

from __future__ import annotations

from prepkit.rules.rule import Rule
from prepkit.rules.run import (
    applied,
    averaging,
    beginnings,
    copies,
    drift,
    forwards,
    gradients,
    inputs,
    lessons,
    libraries,
    loaders,
    loops,
    modules,
    numbers,
    owners,
    phases,
    ranks,
    shares,
    terms,
    values,
    who_steps,
    window,
    wrappers,
)

AUDIT_RULES: tuple[Rule, ...] = (
    *applied.RULES,
    *who_steps.RULES,
    *modules.RULES,
    *forwards.RULES,
    *values.RULES,
    *beginnings.RULES,
    *inputs.RULES,
    *copies.RULES,
    *terms.RULES,
    *numbers.RULES,
    *wrappers.RULES,
    *averaging.RULES,
    *gradients.RULES,
    *ranks.RULES,
    *loaders.RULES,
    *libraries.RULES,
    *loops.RULES,
    *shares.RULES,
    *lessons.RULES,
    *owners.RULES,
    *phases.RULES,
    *window.RULES,
    *drift.RULES,
    applied.STEPS,
)
"""Every rule about prepared objects in reporting order: a plan, who steps, model, ranks, data, changes, steps."""

INVARIANTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Optimizers step the parameters that the model has, each once, and those that train.",
        (
            *("run.orphans", "run.missed", "run.stepped-twice", "run.nothing-trains"),
            *("run.replaced", "run.unfrozen", "run.frozen", "run.drift-params", "run.drift-trained"),
        ),
    ),
    ("State belongs to parameters that are stepped, and fits them.", ("run.state-lost", "run.state-misfit")),
    (
        "Every parameter that is stepped has a gradient, on all ranks that hold it.",
        (
            *("run.steps-nothing", "run.gradients-waited-for", "run.gradients-on-some-ranks", "run.without-gradient"),
            *("run.left-out", "run.gradients-misplaced", "run.gradients-stale", "run.stepped-again"),
        ),
    ),
    (
        "Gradients of what is replicated are averaged over all data ranks.",
        (
            *(
                "run.not-averaged",
                "run.maybe-averaged",
                "run.averaging-off",
                "run.averaged-over-part",
                "run.ddp-frozen",
            ),
            *("run.gradients-part", "run.inside-window", "run.drift-hooks"),
        ),
    ),
    (
        "Low-precision weights are stepped in float32.",
        ("run.no-master-weights", "run.cast", "run.masters-apart", "run.overwritten"),
    ),
    (
        "Ranks hold one model with the same weights, in the same modes.",
        ("run.ranks-models", "run.ranks-values", "run.ranks-modes", "run.rests-apart"),
    ),
    ("Ranks step alike.", ("run.ranks-optimizers", "run.ranks-schedulers", "run.ranks-state")),
    (
        "Ranks draw alike where they hold parts of one layer, and only there.",
        ("run.dropout-alike", "run.dropout-unlike"),
    ),
    ("Texts are what a causal language model takes.", ("run.samples-odd", "run.text-odd")),
    (
        "Numbers are finite.",
        (
            *("run.nan", "run.infinite", "run.loss-not-finite", "run.gradients-not-finite", "run.state-not-finite"),
            "run.rate-not-finite",
        ),
    ),
)
"""What several rules are about, each of them another way to break it; every other rule is an invariant by itself."""
