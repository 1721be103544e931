"""Global batch = micro batch x accumulation x data-parallel ranks: the third number from two, or the nearest ones."""

from __future__ import annotations

from math import prod

from prepkit.config import Intent
from prepkit.resolve import loaders
from prepkit.resolve.deepspeed.data import drop, put
from prepkit.resolve.deepspeed.flaws import WHERE, Draft

MICRO, STEPS, WHOLE = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


def whole_batch(draft: Draft) -> None:
    """Says of a global batch that it is no multiple of what one rank sees in a step: no number of ranks makes it one.

    Goes on without it, as nothing else about it would be new.
    """
    whole, micro, steps = (draft.get(path) for path in (WHOLE, MICRO, STEPS))
    once = [size for size in (micro, steps) if type(size) is int]
    if type(whole) is not int or type(micro) is not int or min(whole, *once) < 1 or whole % prod(once) == 0:
        return
    shown = f"{micro} x {steps} accumulation" if len(once) > 1 else f"{micro} samples on a rank"
    what = f"`{WHOLE}` is {whole}, no multiple of {shown}: no number of ranks fits."
    draft.flaw(
        "batch", what, f"Write a multiple of {prod(once)} x the ranks, or remove `{WHOLE}`, which is worked out."
    )
    drop(draft.data, WHOLE)


def batches(draft: Draft, ranks: int) -> None:
    """Settles all three numbers for so many data-parallel ranks (DS-5 … DS-13, pain 4)."""
    asked = draft.cfg.global_batch
    accumulation = loaders.accumulation(draft.cfg, loaders.batch(draft.cfg, draft.facts, ranks))
    derived = draft.cfg.accumulation is None and asked is not None
    draft.settle(STEPS, accumulation, "config.global_batch (its accumulation)" if derived else "config.accumulation")
    if asked is not None and asked > 0:
        draft.settle(WHOLE, asked, "config.global_batch")
    for path in (MICRO, STEPS, WHOLE):
        if draft.get(path, 1) < 1 and (path, draft.get(path)) != (STEPS, accumulation):
            draft.flaw("batch", f"`{path}` = {draft.get(path)} makes no batch.", "Write at least 1.")
            put(draft.data, path, 1)
    steps = max(1, draft.get(STEPS))  # config.accumulation has a rule of its own
    whole = draft.get(WHOLE)
    micro = _micro(draft, ranks)
    if micro is None and whole is not None:
        if whole % (steps * ranks):
            _unreachable(draft, whole, None, steps, ranks)
            return
        micro = whole // (steps * ranks)
        draft.fill(MICRO, micro, f"{whole} samples / ({steps} accumulation x {ranks} ranks)")
    if micro is None and draft.cfg.intent is Intent.INFERENCE:
        micro = 1
        draft.fill(MICRO, micro, "nothing is trained, and DeepSpeed asks for a number")
    if micro is None:
        what = f"Nothing says how many samples a rank sees at once: no loader, no `{MICRO}`, no `{WHOLE}`."
        fix = (
            "Pass loaders=[...], or --batch-size 4 on the command line, or write DeepSpeed(micro_batch=4), with your "
            "own number."
        )
        draft.flaw("no-micro-batch", what, fix, "config.engine.micro_batch")
        return
    product = micro * steps * ranks
    if whole not in (None, product):
        _unreachable(draft, whole, micro, steps, ranks)
        return
    draft.fill(WHOLE, product, f"{micro} samples x {steps} accumulation x {ranks} ranks")


def _micro(draft: Draft, ranks: int) -> int | None:
    """The micro batch that engine, JSON or loaders say; disagreements are flaws. None: nobody says."""
    asked = draft.engine.micro_batch
    if asked is not None:
        if asked < 1:
            draft.flaw(
                "batch", f"micro_batch={asked} makes no batch.", "Write at least 1.", "config.engine.micro_batch"
            )
        draft.settle(MICRO, asked, "config.engine.micro_batch")
    sizes = loaders.loader_sizes(draft.cfg, draft.facts, ranks)
    said: int | None = draft.get(MICRO)
    if said is not None:
        if sizes and said not in sizes and (asked is None or asked > 0):
            what = f"`{MICRO}` is {said}, and the loaders give {_listed(sizes)}: DeepSpeed would count wrongly."
            fix = f'Write "auto" or remove it, or build the loader with batch_size={said} (--batch-size {said}).'
            draft.flaw("two-places", what, fix, "config.engine.micro_batch" if asked is not None else WHERE)
        return said
    if draft.facts.loaders and not sizes and draft.cfg.intent is not Intent.INFERENCE:
        where = "loaders[0].batch_size"
        what = f'`{MICRO}` is "auto", but no loader has a batch_size: they make batches of their own.'
        draft.flaw("no-micro-batch", what, "Write DeepSpeed(micro_batch=4) with the size of those batches.", where)
        put(draft.data, MICRO, 1)
        return 1
    if not sizes:
        return None
    size = min(sizes) if draft.engine.micro_batch_of == "smallest" else max(sizes)
    which = f"the {draft.engine.micro_batch_of} of {_listed(sizes)}" if len(set(sizes)) > 1 else "that of the loaders"
    draft.fill(MICRO, size, which)
    return size


def _unreachable(draft: Draft, whole: int, micro: int | None, steps: int, ranks: int) -> None:
    """Names the nearest numbers that multiply, by each of the factors that could change.

    Of ``config.global_batch`` the rules of its own say it, for every engine.
    """
    if draft.cfg.global_batch is not None:
        drop(draft.data, WHOLE)
        return
    one = (micro or 1) * (1 if micro else steps) * ranks
    below, above = whole // one * one, (whole // one + 1) * one
    shown = f"{micro or 'micro'} x {steps} accumulation x {ranks} ranks"
    product = f" = {micro * steps * ranks}" if micro else " for no whole micro batch"
    ways = [size for size in (below, above) if size > 0]
    told = " or ".join(
        f"{size} ({f'accumulation {size // one}' if micro else f'micro batch {size // one}'})" for size in ways
    )
    fix = f"Nearest: {WHOLE} {told}; or remove `{WHOLE}`, which is worked out."
    fitting = [size for size in range(ranks + 1, 2 * ranks + 1) if micro and whole % (micro * size) == 0]
    if micro and fitting:
        fix = f"{fix[:-1]}; or start {fitting[0]} ranks (accumulation {whole // (micro * fitting[0])})."
    draft.flaw("batch", f"`{WHOLE}` is {whole}, but {shown}{product}.", fix)
    drop(draft.data, WHOLE)


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
