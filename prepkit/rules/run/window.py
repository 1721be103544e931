"""What a script did up to its first step, and what reaches the model from beside its plan."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.window import OddSample
from prepkit.findings import Severity
from prepkit.findings.text import count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule

_TOGETHER = "Give it to build_plan with the other: optimizer=[first, second], and ready.step() steps both."


def _replaced(facts: RunFacts) -> Iterator[Hit]:
    one = facts.stranger
    if one is not None and one.replaced:
        what = f"this {one.name} holds {count(len(one.replaced), 'parameter')} that apply has replaced in the model"
        yield Hit("optimizer", f"{what}, so that it would train nothing: {some(one.replaced)}.")


def _unknown(facts: RunFacts) -> Iterator[Hit]:
    one = facts.stranger
    if one is not None and not one.replaced and one.shared and one.averaged_elsewhere:
        what = f"this {one.name} holds {count(len(one.shared), 'parameter')} of a prepared model, and the plan does"
        fix = "Give it to build_plan in the place of the other, and ready.step() steps it." if one.engine_steps else ""
        yield Hit("optimizer", f"{what} not know it: {some(one.shared)}.", fix)


def _inside_window(facts: RunFacts) -> Iterator[Hit]:
    one = facts.stranger
    if one is not None and not one.replaced and one.shared and one.window:
        what = (
            f"this {one.name} was stepped inside a window of {one.window} micro-batches, and no gradient of this rank "
            "has been averaged with those of the others: the plan has no optimizer, so that nothing ends its windows."
        )
        yield Hit("optimizer", what)


def _unsaved(facts: RunFacts) -> Iterator[Hit]:
    one = facts.stranger
    if one is not None and not one.replaced and one.shared and one.planned and not one.averaged_elsewhere:
        what = f"this {one.name} holds {count(len(one.shared), 'parameter')} of a prepared model, and the plan knows"
        yield Hit(one.name, f"{what} another: what ready.save() writes is the state of that one.")


def _saves_shards(facts: RunFacts) -> Iterator[Hit]:
    by_torch = tuple(place for place in facts.saves_shards if "torch.save(" in place)
    if others := [place for place in facts.saves_shards if place not in by_torch]:
        what = f"{'; '.join(others)} would write this rank's shards: once training is over it is refused."
        yield Hit("model.save_pretrained", what)
    if by_torch:
        what = f"{'; '.join(by_torch)} would write this rank's shards: no load_state_dict takes them later."
        yield Hit("torch.save", what, "Write ready.export(folder) on every rank, or ready.save(folder) to go on from.")


def _mixes_empty(facts: RunFacts) -> Iterator[Hit]:
    for name, line in facts.window.libraries.begun_empty if facts.window is not None else ():
        what = f"nn.init.{name} is given an empty tensor: ZeRO 3 has its part elsewhere, and it stays as it was."
        yield Hit(line, what, "Put it into `with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):`.")
    if facts.mixes_empty:
        what = f"{'; '.join(facts.mixes_empty)} meets empty tensors: ZeRO 3 holds a parameter whole in its own forward."
        yield Hit("model", what)
    if facts.writes_lost:
        what = f"{'; '.join(facts.writes_lost)} writes into what is gathered to be read: DeepSpeed throws it away."
        yield Hit("model", what, "Name a rank whose writes all get: GatheredParameters(weights, modifier_rank=0).")


def _whole_state(facts: RunFacts) -> Iterator[Hit]:
    if facts.whole_state:
        what = f"This state of {count(facts.whole_state, 'parameter')} is of an optimizer that was not sharded."
        yield Hit("optimizer", what)


def _whole_weights(facts: RunFacts) -> Iterator[Hit]:
    if facts.whole_weights:
        what = f"{count(len(facts.whole_weights), 'weight')} of this state are whole, and the model is sharded"
        yield Hit("model", f"{what}: {some(facts.whole_weights)}.")


_BESIDE: tuple[Rule, ...] = (
    Rule(
        id="run.replaced",
        summary="An optimizer that steps holds what the model holds, and not what apply has replaced.",
        check=_replaced,
        at=(Moment.STEP,),
        needs=(Need.OPTIMIZERS,),
        fix=_TOGETHER,
        source=("pain 1",),
    ),
    Rule(
        id="run.unknown-optimizer",
        summary="Gradients that are averaged and cleared for ready.step() are stepped by it alone.",
        check=_unknown,
        at=(Moment.STEP,),
        needs=(Need.OPTIMIZERS,),
        fix=_TOGETHER,
    ),
    Rule(
        id="run.inside-window",
        summary="An optimizer steps gradients that the ranks have averaged.",
        check=_inside_window,
        at=(Moment.STEP,),
        needs=(Need.OPTIMIZERS,),
        fix="Give it to build_plan, or write Config(accumulation=1).",
    ),
    Rule(
        id="run.unsaved-optimizer",
        summary="The state of every optimizer of a prepared model is in its checkpoints.",
        check=_unsaved,
        at=(Moment.STEP,),
        needs=(Need.OPTIMIZERS,),
        fix="Give it to build_plan with the other: optimizer=[first, second], or give this one alone.",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.saves-shards",
        summary="What saves a sharded model writes it whole.",
        check=_saves_shards,
        at=(Moment.FIRST_STEP,),
        cost="reads the files of the program once",
        fix=(
            "Write ready.export(folder) on every rank, or under accelerate's face "
            "save_pretrained(folder, state_dict=accelerator.get_state_dict(model))."
        ),
        severity=Severity.WARNING,
        source=("transformers PreTrainedModel.save_pretrained",),
    ),
    Rule(
        id="run.mixes-empty",
        summary="What writes into weights between steps, as averages of MoCo and clips do, meets them under ZeRO 3.",
        check=_mixes_empty,
        at=(Moment.FIRST_STEP, Moment.AUDIT),
        cost="reads the files of the program once",
        fix=(
            "Put it into `with deepspeed.zero.GatheredParameters([*model.parameters()], modifier_rank=0):`, "
            "behind the step, or choose stage=2, whose weights stay."
        ),
        severity=Severity.WARNING,
        source=("deepspeed partition_parameters.GatheredParameters",),
    ),
    Rule(
        id="run.whole-state",
        summary="The state that a sharded optimizer loads is sharded as it is; torch would fail in its next step.",
        check=_whole_state,
        at=(Moment.LOAD,),
        needs=(Need.STATE,),
        fix=(
            "Write ready.resume(folder), from what ready.save(folder) has written under any engine, or "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with "
            "StateDictOptions(full_state_dict=True), which takes names in the place of numbers."
        ),
        overridable=False,
        stops="torch fails in its next step",
    ),
    Rule(
        id="run.whole-weights",
        summary="The weights that a sharded model loads are sharded as it is.",
        check=_whole_weights,
        at=(Moment.LOAD,),
        needs=(Need.STATE,),
        fix=(
            "Load them before build_plan, or write torch.distributed.checkpoint.state_dict.set_model_state_dict("
            "ready.model, state, options=StateDictOptions(full_state_dict=True)); what ready.save(folder) has written "
            "is read by ready.resume(folder, only_model=True)."
        ),
        overridable=False,
        stops="torch cannot copy whole weights into shards",
    ),
)
"""Reporting order: other optimizers, then what is loaded."""


SCALER = "torch.amp.GradScaler"
SHARDED = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"


def _unscaled(facts: RunFacts) -> Iterator[Hit]:
    seen = facts.window
    if seen is None or seen.scaled or seen.scaler_steps:
        return
    if seen.float16:
        what = f"{some(seen.float16)} ran under an autocast to float16, and no loss was scaled."
        yield Hit("loss", f"{what} Gradients below 6e-8 are zero.")
    for options in seen.float16_units if not seen.float16 else ():
        what = f"Units of FSDP compute in float16, by {options}(param_dtype=torch.float16), and no loss was scaled."
        scaler = SHARDED if options == "MixedPrecision" else SCALER
        how = "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"
        fix = f"Give {options}(param_dtype=torch.bfloat16), or train through {scaler}: {how}."
        yield Hit("loss", f"{what} Gradients below 6e-8 are zero.", fix)


def _scales(facts: RunFacts) -> Iterator[Hit]:
    seen = facts.window
    if seen is not None and seen.scaled and not seen.scaler_steps:
        yield Hit("optimizer", "A loss was scaled by GradScaler.scale(), and the optimizer steps by itself.")
    elif seen is not None and seen.scaler_steps and not seen.scaled:
        what = "GradScaler.step() divides the gradients by a scale with which nobody has multiplied the loss."
        yield Hit("optimizer", what, "Write scaler.scale(loss).backward().")
    elif seen is not None and all(seen.half_scaled):
        scaled, plain = seen.half_scaled
        what = f"Gradients of a scaled loss ({scaled}) and of one that nobody has scaled are added up, and divided"
        yield Hit(plain, f"{what} by the scale: nothing is left of the second.", "Scale every loss of a step.")


def _clipped(facts: RunFacts) -> Iterator[Hit]:
    if facts.window is not None and facts.window.clipped_scaled:
        yield Hit("gradients", "They were clipped while they were scaled, so that nearly nothing is left of them.")
    if facts.window is not None and facts.window.clipped_none:
        what = "They were clipped before there were any: no backward had run."
        yield Hit("gradients", what, "Call clip_grad_norm_ between backward and step.")
    if facts.window is not None and facts.window.clipped_spent:
        what = "What was to be clipped was a generator at its end, as one that has made an optimizer: nothing is."
        yield Hit("gradients", what, "Give it model.parameters() at each step, or a list of what the generator gives.")
    if facts.window is not None and facts.window.clipped_shards:
        what = "torch.nn.utils.clip_grad_norm_ has clipped shards of FSDP1: each rank by the norm of its own part."
        yield Hit("gradients", what, "Call model.clip_grad_norm_(max_norm), a method of the FSDP root, on every rank.")


def _loaded(facts: RunFacts) -> Iterator[Hit]:
    for one in facts.window.loaded if facts.window is not None else ():
        call = "load_state_dict(strict=False)"
        if one.lost:
            what = f"{call} left out {one.lost} of {count(one.given, 'key')} under other names, such as `{one.key}`"
            yield Hit(one.model, f"{what}; the model has `{one.near}`.", milder=True)
        elif one.inside:
            what = f"{call} took none of {count(one.given, 'key')}: the model's, such as `{one.near}`, stand inside"
            yield Hit(one.model, f"{what} `{one.key}`.", f"Write load_state_dict(state[{one.key!r}]).")
        elif not one.given:
            fix = "Look at what chooses the keys; nothing, where there may be none to load."
            yield Hit(one.model, f"{call} was given an empty dict.", fix, milder=True)
        else:
            what = f"{call} took none of {count(one.given, 'key')}, such as `{one.key}`"
            near = f"; the model has `{one.near}`" if one.near else ", none of which the model has"
            yield Hit(one.model, f"{what}{near}.", milder=not one.near)


def _averages(facts: RunFacts) -> Iterator[Hit]:
    seen = facts.window
    for line, one, other in seen.mixed if seen is not None else ():
        what = f"`{one}` and `{other}` are one model, or share all weights: {line} mixes them with themselves."
        yield Hit("model", what)
    told = {name for _, *pair in seen.mixed for name in pair} if seen is not None else set()
    for rests, trains in seen.aliased if seen is not None else ():
        if rests not in told:
            what = f"`{rests}` and `{trains}` are one model: what it says changes with every step."
            yield Hit("model", what, milder=True)
    for line in seen.rebound if seen is not None else ():
        what = f"{line} binds a name, and changes no weight: the average stays as it began."
        yield Hit(
            "model", what, "Write into it: old.mul_(m).add_(new, alpha=1 - m), under torch.no_grad().", milder=True
        )
    for name in seen.never_updated if seen is not None else ():
        what = f"`{name}` was made, and no file of the program calls its update_parameters: it stays as it began."
        yield Hit("model", what, "Call it behind optimizer.step().", milder=True)


def _kept_alive(facts: RunFacts) -> Iterator[Hit]:
    for line, owner in facts.window.kept_alive if facts.window is not None else ():
        what = f"{line} keeps `{owner}.state_dict()`, whose tensors train on, and loads it behind the loop"
        yield Hit("model", f"{what}: these are the last weights, and not the best ones.")


def _overwritten(facts: RunFacts) -> Iterator[Hit]:
    for name, line in facts.window.overwritten if facts.window is not None else ():
        yield Hit(
            name, f"Weights that load_state_dict ({line}) has put there are gone: something has written them anew."
        )


def _unresumed(facts: RunFacts) -> Iterator[Hit]:
    for key, name in facts.window.unresumed if facts.window is not None else ():
        what = f"The checkpoint that the run goes on from has `{key}`, and nobody has loaded it: `{name}` begins anew."
        yield Hit("optimizer", what, f"Write {key} = checkpoint['{key}'] behind the load." if key == name else "")


def _loaded_itself(facts: RunFacts) -> Iterator[Hit]:
    for name, line in facts.window.loaded_itself if facts.window is not None else ():
        what = f"load_state_dict ({line}) was given the living weights of the very model that is to load them, or what"
        yield Hit(name, f"{what} is made of them: it changes nothing, as with weights that were kept without a copy.")


def _idle(facts: RunFacts) -> Iterator[Hit]:
    for name in facts.window.idle if facts.window is not None else ():
        yield Hit("model", f"torch.compile({name}) was called, and the loop calls the {name} that was given to it.")


def _recompiled(facts: RunFacts) -> Iterator[Hit]:
    known = dict(facts.window.recompiled) if facts.window is not None else {}
    for before, now in facts.running:
        known |= dict(now.recompiled) if now.recompiled != before.recompiled else {}
    for name, times in known.items():
        yield Hit(
            "model", f"torch has compiled `{name}` {times} times, which is its limit, and runs it uncompiled now."
        )


def _workers(facts: RunFacts) -> Iterator[Hit]:
    for one in facts.window.workers if facts.window is not None else ():
        what = f"Several of its {one.workers} workers {one.what}."
        fix = f"Write in worker_init_fn: {one.anew}, which is another one in each worker." if one.anew else ""
        yield Hit(f"loader of {one.loader}", what, fix, milder=not one.sure)


def _undivided(facts: RunFacts) -> Iterator[Hit]:
    if facts.window is not None and facts.window.undivided and (facts.accumulation or 1) > 1:
        what = f"loss.backward() in a window of {facts.accumulation} micro-batches, which only accelerate would divide"
        yield Hit("loss", f"{what}: gradients are {facts.accumulation} times what they should be.")


_UNLABEL = "labels.masked_fill(attention_mask == 0, -100), with the tokenizer's attention_mask"
_ODD: dict[OddSample, tuple[str, str]] = {
    "shifted": (
        "Labels are shifted already, and the model shifts them again: it learns the token after next.",
        "Give labels equal to input_ids, with -100 where none count.",
    ),
    "unmasked": (
        "Samples begin with pads, and have no attention_mask: tokens after them attend to them.",
        "",
    ),
    "learned": (
        "Samples end in pads that count as labels: the model learns to give pads.",
        f"Write {_UNLABEL}.",
    ),
    "both": (
        "Samples begin with pads, and have no attention_mask: tokens after them attend to them, and labels count them.",
        f"Give the tokenizer's attention_mask along, and write {_UNLABEL}.",
    ),
    "counted": (
        "Labels count where attention_mask is 0: the model learns to give pads.",
        f"Write {_UNLABEL}.",
    ),
    "endless": (
        "The end of a text is read and is no label, though the token before it is one: the model never learns to end.",
        "Write labels.masked_fill(attention_mask == 0, -100), and not where the pad is, which may be the end.",
    ),
}
MILDER_TEXT = "where pads that are masked count as labels, or an end does not, as where the end of a text is a pad"


def odd(where: str, sample: OddSample) -> Hit:
    """What is wrong in a sample of a causal language model."""
    return Hit(where, *_ODD[sample], milder=sample in ("counted", "endless"))


def _called(facts: RunFacts) -> Iterator[Hit]:
    if facts.window is not None and facts.window.text:
        yield odd("model", facts.window.text)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.scaled-stepped",
        summary="Gradients of a scaled loss are divided by the scale before they are stepped, and no others are.",
        check=_scales,
        at=(Moment.AUDIT,),
        needs=(Need.GRADIENTS,),
        fix="Write scaler.step(optimizer); scaler.update().",
        source=("torch GradScaler",),
    ),
    Rule(
        id="run.clipped-scaled",
        summary="What is clipped are the gradients, by the norm of all of them, and not their scaled multiples.",
        check=_clipped,
        at=(Moment.AUDIT,),
        needs=(Need.GRADIENTS,),
        fix="Call scaler.unscale_(optimizer) before clip_grad_norm_.",
        source=("torch GradScaler.unscale_",),
    ),
    Rule(
        id="run.loaded-nothing",
        summary="A state dict that is loaded has the keys of the model.",
        check=_loaded,
        at=(Moment.AUDIT,),
        fix="Rename the keys, as by removeprefix('module.'), and load with strict=True, or look at what it returns.",
        milder="where other keys were taken, or no key of the model is like one that was given",
        source=("torch Module.load_state_dict",),
    ),
    Rule(
        id="run.best-aliased",
        summary="Weights that are kept for later are a copy.",
        check=_kept_alive,
        at=(Moment.AUDIT,),
        fix="Keep copy.deepcopy(model.state_dict()).",
        severity=Severity.WARNING,
        source=("torch Module.state_dict",),
    ),
    Rule(
        id="run.loaded-overwritten",
        summary="Weights that were loaded are what begins to train.",
        check=_overwritten,
        at=(Moment.AUDIT,),
        fix="Initialise first, or the new layers alone, and load then.",
        severity=Severity.WARNING,
        source=("torch Module.load_state_dict",),
    ),
    Rule(
        id="run.resumed-part",
        summary="A run that goes on has all of its state.",
        check=_unresumed,
        at=(Moment.AUDIT,),
        fix="Write optimizer.load_state_dict(checkpoint[...]), and the same of the scheduler.",
        severity=Severity.WARNING,
        source=("torch Optimizer.load_state_dict",),
    ),
    Rule(
        id="run.loaded-itself",
        summary="What is loaded into a model lies elsewhere.",
        check=_loaded_itself,
        at=(Moment.AUDIT,),
        fix="Keep a copy: copy.deepcopy(model.state_dict()); a model of its own is copy.deepcopy(model).",
        severity=Severity.WARNING,
        source=("torch Module.state_dict",),
    ),
    Rule(
        id="run.average-idle",
        summary="An average of weights, or a model that rests, is apart from what trains, and an average is updated.",
        check=_averages,
        at=(Moment.AUDIT,),
        fix="Write copy.deepcopy(model), or torch.optim.swa_utils.AveragedModel(model), which copies it.",
        milder="where an average is only left as it began, or a model that is to rest has two names",
        source=("torch AveragedModel",),
    ),
    Rule(
        id="run.workers-alike",
        summary="Workers of a loader give other samples, and draw other random numbers.",
        check=_workers,
        at=(Moment.AUDIT,),
        fix=(
            "Divide a stream by torch.utils.data.get_worker_info(), and seed in worker_init_fn with "
            "torch.initial_seed(), which is another one in each worker."
        ),
        milder="where nobody could tell whether the data set draws",
        source=("torch DataLoader worker_init_fn",),
    ),
    Rule(
        id="run.float16-unscaled",
        summary="A loss whose gradients are computed in float16 is scaled.",
        check=_unscaled,
        at=(Moment.AUDIT,),
        needs=(Need.GRADIENTS,),
        fix="Train with torch.bfloat16, or through torch.amp.GradScaler.",
        severity=Severity.WARNING,
        source=("torch.amp",),
    ),
    Rule(
        id="run.undivided",
        summary="The loss of a micro-batch is divided by the number of micro-batches.",
        check=_undivided,
        at=(Moment.AUDIT,),
        fix="Call accelerator.backward(loss).",
        source=("accelerate Accelerator.backward",),
    ),
    Rule(
        id="run.text-odd",
        summary="A causal language model is called with what it takes.",
        check=_called,
        at=(Moment.AUDIT,),
        fix="Give the tokenizer's attention_mask along.",
        milder=MILDER_TEXT,
        source=("transformers ForCausalLMLoss",),
    ),
    Rule(
        id="run.compiled-idle",
        summary="What is compiled is what is called.",
        check=_idle,
        at=(Moment.AUDIT,),
        fix="Write model = torch.compile(model), or model.compile(), which compiles it in place.",
        severity=Severity.WARNING,
        source=("torch.compile",),
    ),
    Rule(
        id="run.recompiled",
        summary="Compiled code serves more than a few steps.",
        check=_recompiled,
        at=(Moment.AUDIT, Moment.DRIFT),
        needs=(Need.BEFORE,),
        fix="See TORCH_LOGS=recompiles: keep counters and names out of forward, and mark sizes that change dynamic.",
        severity=Severity.WARNING,
        source=("torch._dynamo recompile_limit",),
    ),
    *_BESIDE,
)
"""Reporting order: numbers that are wrong, then what is in vain, then what ends early."""
