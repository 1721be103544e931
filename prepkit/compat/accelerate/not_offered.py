"""What is raised for a part of another library's face that is not offered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prepkit.court import found
from prepkit.findings import RunRefused
from prepkit.findings.text import near

PAGE = "docs/from-accelerate.md"
"""The page that has accelerate's calls beside prepkit's."""

BEFORE = "accelerate.before-prepare"
"""Rule of what needs a prepared model."""

OTHERWISE = {
    "unscale_gradients": "leave it out: accelerator.clip_grad_norm_(...) unscales by itself",
    "lomo_backward": "write accelerator.backward(loss), with another optimizer than LOMO",
}
"""Members that scripts use, and what to write in their place."""


_DEEPSPEED = "give Accelerator(config=pk.Config(engine=pk.DeepSpeed(stage=2, micro_batch=4)))"
_COMPILE = "give Accelerator(config=pk.Config(engine=pk.DDP(), compile=pk.CompileModel()))"
ARGUMENTS = {
    "rng_types": "leave it out: every rank draws the order of the data alike",
    "megatron_lm_plugin": "leave it out: Megatron-LM has a loop of its own",
    "deepspeed_plugin": _DEEPSPEED,
    "deepspeed_plugins": _DEEPSPEED,
    "fsdp_plugin": "give Accelerator(config=pk.Config(engine=pk.FSDP2()))",
    "torch_tp_plugin": "give Accelerator(config=pk.Config(engine=pk.TensorParallel(), tp_plan=plan)), a pk.tp.TPPlan",
    "dynamo_backend": _COMPILE,
    "dynamo_plugin": _COMPILE,
    "parallelism_config": "give Accelerator(config=pk.Config(engine=pk.FSDP2(), mesh=pk.Mesh(shard=2)))",
}
"""Arguments of accelerate's ``Accelerator`` that have no place here, and what to write."""


class NotOffered(RunRefused):
    """Something that the script asks of accelerate, and that this face does not do; its finding says what to type.

    ``rule`` is that of prepkit's own loop where the face says in accelerate's words what that has refused.
    """

    def __init__(self, name: str, otherwise: str, rule: str = "accelerate.not-offered") -> None:
        what = f"prepkit.compat.accelerate does not offer {name}"
        super().__init__((found(rule, "accelerator", what, f"{otherwise}. See {PAGE}"),))


def no_options(call: str, options: dict[str, Any]) -> None:
    """Raises ``NotOffered`` for the first of the options that ``call`` was given beside its own."""
    for name in options:
        raise NotOffered(f"{call}({name}=...)", f"leave {name} out")


def refuse_arguments(given: Mapping[str, Any], taken: Sequence[str]) -> None:
    """For what ``Accelerator`` was given beside the arguments that are ``taken``, None apart.

    Raises ``NotOffered`` for one of accelerate's, and ``TypeError`` with near spellings for one that is nobody's.
    """
    for name, value in ((name, value) for name, value in given.items() if value is not None):
        if name == "rng_types" and [str(getattr(one, "value", one)) for one in value] == ["generator"]:
            continue  # which is what it does anyway
        if name in ARGUMENTS:
            raise NotOffered(f"Accelerator({name}=...)", ARGUMENTS[name])
        meant = " or ".join(near(name, (*taken, *ARGUMENTS)))
        raise TypeError(f"Accelerator knows no argument {name!r}{f'; did you mean {meant}?' if meant else ''}")


_ONE_EACH = "add the losses up for one accelerator.backward(loss)"
_WORDS = {
    "loop.cleared-before-step": (
        "optimizer.zero_grad() between accelerator.backward(loss) and optimizer.step()",
        "move it after optimizer.step(), or above the forward",
    ),
    "loop.gradients-gone": (
        "clearing the model between accelerator.backward(loss) and optimizer.step()",
        "move model.zero_grad() after optimizer.step(), or above the forward",
    ),
    "run.steps-nothing": (
        "optimizer.step() where nothing that it steps has a gradient",
        "move zero_grad() after optimizer.step(), or above the forward",
    ),
    "loop.gradients-lost": (
        "clearing the model inside an accumulation window",
        "write optimizer.zero_grad(), which waits for the end of the window",
    ),
    "loop.past-the-wrapper": (
        "two backwards of one forward, or of another method than forward, which DDP does not average",
        f"call model(...) once for each accelerator.backward(loss), or {_ONE_EACH}",
    ),
    "loop.engine-counts-backwards": ("several backwards of a micro-batch under DeepSpeed", _ONE_EACH),
    "loop.backward-twice": ("several backwards of a micro-batch under DeepSpeed", _ONE_EACH),
    "loop.unfinished-window": (
        "save_state and load_state inside an accumulation window, whose gradients are in no checkpoint",
        "write `if accelerator.sync_gradients:` above it, after optimizer.step()",
    ),
    "loop.closure-wanted": ("an optimizer that takes a closure", "write accelerator.ready.step(closure)"),
    "loop.step-without-backward": (
        "optimizer.step() without accelerator.backward(loss) since the last",
        "write accelerator.backward(loss) in the place of loss.backward(), and one step for each",
    ),
}
"""Rules of the loop to what a script for accelerate has done, and what it is to write."""


def as_the_loop(rule: str) -> NotOffered:
    """Return what a rule of the loop refuses, in accelerate's words."""
    return NotOffered(*_WORDS[rule], rule)


@contextmanager
def in_their_words() -> Iterator[None]:
    """Refusals of the loop as ``NotOffered``, in accelerate's calls; others as they are."""
    try:
        yield
    except RunRefused as refused:
        rules = [finding.rule for finding in refused.findings]
        if not rules or not _WORDS.keys() >= set(rules):
            raise
        raise as_the_loop(rules[0]) from refused
