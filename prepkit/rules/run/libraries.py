"""What a program asks of its libraries, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.libraries import LibraryFacts
from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.rules.rule import Hit, Moment, Rule


def _asked(facts: RunFacts) -> LibraryFacts:
    return facts.window.libraries if facts.window is not None else LibraryFacts()


def _clips_nothing(facts: RunFacts) -> Iterator[Hit]:
    if line := _asked(facts).clipped_past:
        what = f"{line} clips parameters that have no gradient, as the DeepSpeed engine keeps gradients to itself"
        yield Hit("gradients", f"{what}: nothing is clipped.")


def _gates(facts: RunFacts) -> Iterator[Hit]:
    line, times, counts_to = _asked(facts).gated
    if line:
        what = f"{line} went backward {times} times before the engine's first step, and the engine counts to"
        yield Hit("optimizer", f"{what} {counts_to} by itself: engine.step() does not stand behind every backward.")


def _casts_nothing(facts: RunFacts) -> Iterator[Hit]:
    if asked := _asked(facts).uncast:
        what = f"accelerate was asked for mixed_precision={asked!r}, and nothing has run under its autocast"
        yield Hit("model", f"{what}: all is computed in float32.")


def _casts_old(facts: RunFacts) -> Iterator[Hit]:
    for line in _asked(facts).stale_casts:
        what = "Steps are made inside of one region of autocast, which keeps the casts of weights until it is left"
        yield Hit(line, f"{what}: each forward computes with the weights of before the first step.")


def _adapts_nothing(facts: RunFacts) -> Iterator[Hit]:
    for place in _asked(facts).frozen_adapters:
        yield Hit("model", f"`{place}` is in training mode, and all of its adapters are frozen: they learn nothing.")


def _drops(facts: RunFacts) -> Iterator[Hit]:
    for line, column in _asked(facts).dropped:
        what = f"{line} reads the column {column!r}, which the Trainer has left out, as its model's forward does not"
        yield Hit("loaders", f"{what} name it.")


def _moved(facts: RunFacts) -> Iterator[Hit]:
    for line, picture, moved in _asked(facts).moved_apart:
        what = f"`{picture}` and `{moved}` are flipped, turned or cut at random, each by draws of its own"
        yield Hit(line, f"{what}: `{moved}` speaks of other places than those that the model sees.")


def _is_raw(facts: RunFacts) -> Iterator[Hit]:
    for place, most in _asked(facts).raw_pixels:
        yield Hit("model", f"`{place}` is given pixels from 0 to {most:.0f}: nothing has scaled them.")


def _divides_nothing(facts: RunFacts) -> Iterator[Hit]:
    name, line, by = _asked(facts).undivided
    if line:
        what = f"{name} gives a mean of each micro-batch and leaves num_items_in_batch alone, and the Trainer divides"
        fix = "" if name in ("compute_loss", "forward") else "Sum the loss and divide it by num_items_in_batch."
        yield Hit(line, f"{what} nothing where it may be given one: steps are {by} x as large as meant.", fix)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.clipped-nothing",
        summary="What is clipped has gradients.",
        check=_clips_nothing,
        at=(Moment.AUDIT,),
        fix='Write "gradient_clipping": <norm> into the config of DeepSpeed, and leave clip_grad_norm_ out.',
        severity=Severity.WARNING,
        source=("deepspeed gradient_clipping",),
    ),
    Rule(
        id="run.engine-gated",
        summary="A DeepSpeed engine is stepped behind every backward.",
        check=_gates,
        at=(Moment.AUDIT,),
        fix=(
            'Call engine.step() behind every engine.backward(loss), and write "gradient_accumulation_steps" into the '
            "config: the engine steps when it has counted so many."
        ),
        severity=Severity.WARNING,
        source=("deepspeed DeepSpeedEngine.step",),
    ),
    Rule(
        id="run.autocast-unused",
        summary="Something runs in the precision that accelerate is asked for.",
        check=_casts_nothing,
        at=(Moment.AUDIT,),
        fix="Call what accelerator.prepare(model) gives, or write `with accelerator.autocast():` around the forward.",
        severity=Severity.WARNING,
        source=("accelerate Accelerator.autocast",),
    ),
    Rule(
        id="run.autocast-stale",
        summary="No region of autocast goes on over a step.",
        check=_casts_old,
        at=(Moment.AUDIT,),
        fix="Write `with torch.autocast(...):` around the forward and the loss alone, inside of the loop.",
        severity=Severity.WARNING,
        source=("torch autocast cache_enabled",),
    ),
    Rule(
        id="run.adapters-frozen",
        summary="Adapters that are loaded into what trains, train.",
        check=_adapts_nothing,
        at=(Moment.AUDIT,),
        fix="Write PeftModel.from_pretrained(base, folder, is_trainable=True); freeze them by hand where they rest.",
        severity=Severity.WARNING,
        source=("peft PeftModel.from_pretrained",),
    ),
    Rule(
        id="run.trainer-undivided",
        summary="A loss of the program's own is divided by what the Trainer counts.",
        check=_divides_nothing,
        at=(Moment.AUDIT,),
        fix="Sum the loss and divide it by num_items_in_batch, or set trainer.model_accepts_loss_kwargs = False.",
        severity=Severity.WARNING,
        source=("transformers Trainer.training_step",),
    ),
    Rule(
        id="run.column-dropped",
        summary="A column that the program's loss, collator or model reads is in the batch.",
        check=_drops,
        at=(Moment.AUDIT,),
        fix="Write TrainingArguments(remove_unused_columns=False).",
        severity=Severity.WARNING,
        source=("transformers TrainingArguments.remove_unused_columns",),
    ),
    Rule(
        id="run.moved-apart",
        summary="What speaks of places of a picture is moved with it.",
        check=_moved,
        at=(Moment.AUDIT,),
        fix="Draw once and move both by it: give both to one call, or stack them before it and part them behind it.",
        severity=Severity.WARNING,
        source=("albumentations",),
    ),
    Rule(
        id="run.pixels-raw",
        summary="Pixels are scaled before a first convolution without a norm.",
        check=_is_raw,
        at=(Moment.AUDIT,),
        fix="Divide them by 255, and take off the mean and divide by the deviation that the model was trained with.",
        severity=Severity.WARNING,
        source=("torchvision transforms.Normalize",),
    ),
)
"""Reporting order."""
