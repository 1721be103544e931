"""Single layers cut over all ranks, and nothing else (torch ``parallelize_module``): what is not cut is whole."""

from __future__ import annotations

from prepkit.config import Intent
from prepkit.plan import Plan
from prepkit.plan.layout import itemsize
from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Collective, Label, Lifetime, Prediction, Term, Traffic
from prepkit.steps import AutocastForward, CheckpointModules, ParallelizeModules, ParallelStyle, ShardUnits


def predict_tensor(inputs: Inputs) -> Prediction:
    """Bytes of the ``TensorParallel`` engine; its traffic follows the inputs, which a plan does not know."""
    grads = Term(
        category="gradients",
        bytes=inputs.total(trained=True),
        what="of parts and whole parameters",
        lifetime=Lifetime.STEP,
    )
    return Prediction(
        engine=inputs.engine,
        world_size=inputs.world_size,
        tensor=inputs.world_size,
        classes=replicated.one_class(inputs, (*replicated.terms(inputs), *((grads,) if inputs.trains else ()))),
        notes=notes.of_replicated(inputs),
        not_predicted=replicated.not_predicted(inputs),
    )


def cut_traffic(plan: Plan, tokens: int) -> tuple[Traffic, ...] | None:
    """What cut layers send in one micro-batch of so many tokens a rank: activations forward, their gradients backward.

    At most, as recomputation leaves some of it out, and frozen inputs get no gradient. None where a layer works on a
    part of the sequence, or is laid out in a way that is not counted.
    """
    steps = [planned.step for planned in plan.steps if isinstance(planned.step, ParallelizeModules)]
    shapes = {layout.name: layout for layout in plan.layout}
    classes = {one.path: plan.facts.model.classes[one.cls].name for one in plan.facts.model.modules}
    again = [planned.step for planned in plan.steps if isinstance(planned.step, CheckpointModules)]
    recomputed = tuple(f"{path}." for step in again for path in step.paths)
    sent: dict[Collective, list[int]] = {"all-reduce": [], "all-gather": []}
    for step in steps:
        for style in step.styles:
            for path in style.paths:
                if style.style == "replicate" and style.input_layout == style.output_layout == "replicate":
                    continue
                if (layout := shapes.get(f"{path}.weight")) is None or len(layout.shape) != 2:
                    return None
                known = _sent(style, layout.shape, embeds="Embedding" in classes.get(path, ""))
                if known is None:
                    return None
                size = itemsize(_computes_in(plan) or layout.dtype) * tokens
                twice = 1 + path.startswith(recomputed) if recomputed else 1
                for collective, forward, backward in known:
                    trains = plan.config.intent is Intent.TRAINING
                    each = (forward * twice, backward * trains)
                    sent[collective] += [size * width for width in each if width]
    ranks = next((axis.size for axis in plan.mesh if axis.name == "tensor"), plan.world_size)
    return tuple(
        Traffic(
            collective=collective,
            what="activations of cut layers",
            calls=len(every),
            bytes=sum(every),
            ranks=ranks,
            axis="tensor",
            label=Label.BOUNDED,
        )
        for collective, every in sent.items()
        if every
    )


def _sent(
    style: ParallelStyle, shape: tuple[int, ...], *, embeds: bool
) -> tuple[tuple[Collective, int, int], ...] | None:
    """Collective, and elements that a token sends forward and backward; None: not counted."""
    wide, narrow = shape  # of a linear layer what comes out and what goes in; of an embedding words and their width
    match style.style, style.input_layout, style.output_layout:
        case "rowwise", _, "replicate" if embeds:
            return (("all-reduce", narrow, 0),)
        case "rowwise", "features", "replicate":
            return (("all-reduce", wide, 0),)
        case "colwise", "replicate", "features" | "heads" if not embeds:
            return (("all-reduce", 0, narrow),)
        case "colwise", "replicate", "replicate":
            gathered = narrow if embeds else wide
            return (("all-gather", gathered, 0), *(() if embeds else (("all-reduce", 0, narrow),)))
        case _:
            return None


def _computes_in(plan: Plan) -> str | None:
    """The dtype of activations, where a step says one."""
    for planned in plan.steps:
        if isinstance(planned.step, AutocastForward):
            return planned.step.dtype
        if isinstance(planned.step, ShardUnits) and planned.step.param_dtype:
            return planned.step.param_dtype
    return None
