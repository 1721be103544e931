"""What each rule is, by hand: whether it refuses, gives way to an override, and mends the config."""

from __future__ import annotations

from prepkit.findings import Severity
from prepkit.rules import LAW


def _ids(table: dict[str, str]) -> set[str]:
    """Subject to names, as whole ids."""
    return {f"{subject}.{name}" for subject, names in table.items() for name in names.split()}


WARNINGS = _ids(
    {
        "environment": "launcher-flag torch-unknown",
        "mesh": "ddp-alone",
        "sharded": "kept",
        "wrap": "named-twice",
        "blocks": "one-unit nested declared-absent",
        "ties": "undeclared",
        "tensor": "not-read",
        "units": "packed-whole ignored-dtype experts experts-on-old-torch",
        "scheduler": "never-ends",
        "optimizer": "pattern none misses-parameters frozen-parameters",
        "params": "hooks-local",
        "precision": "casts-nothing reduce-dtype-ignored steps-in-16-bit no-master-weights",
        "fp8": "idle-in-eval launcher-flag msamp-deprecated",
        "ddp": "unused-in-static-graph no-batchnorm",
        "fsdp1": "buffer-dtype-ignored frozen-gradients no-shard",
        "deepspeed": "stage-0-16-bit experts turned-off",
        "compile": "dynamic-cut",
        "checkpoint": "cache kept-on-device offload-on-cpu",
        "entry-points": "left-out",
        "loaders": "last-round fewer-than-ranks out-of-order same-data",
        "weights": "tied-twice buffer-not-computed",
        "memory": "may-exceed-device",
        "resume": "accepts-unknown latest-torn nothing-saved other-batch other-clipping other-data other-total-steps "
        "settings-replaced steps-joined",
        "save": "beside-another-run",
        "prove": "unproven same-draws same-samples tokens decay outputs rounded-away",
        "run": "part-in-eval unlike-dtypes checkpointed-twice checkpointed-whole checkpoint-outside "
        "compile-off one-unit backend without-gradient ranks-passes order-lost loss-not-finite buffers-apart "
        "dropout-alike not-read unread-samples ranks-batches scheduler-early micro-batch drift-trained drift-hooks "
        "unsaved-optimizer unused-window adapters-base head-frozen frozen-drops frozen-norms checkpoint-norms "
        "ticked-early eval-mode drops-all rate-zero drift-params drift-rate drift-zeroed drift-counts drift-mode "
        "drift-options drift-still drift-unstepped drift-ticks drift-epoch float16-unscaled compiled-idle recompiled "
        "rests-apart trainer-schedule saves-shards mixes-empty stepped-again samples-mix pads-heeded pads-learned "
        "drops-evaluating shifted loss-bounded parts-overlap shares-overlap reseeded "
        "others-gradients backward-wasted optimizer-anew module-unheld loaded-itself calls-alike rate-squared "
        "samples-placed reseeded-steps not-called target-given best-aliased loaded-overwritten resumed-part "
        "target-trains term-cancels term-constant divergence-negative ratio-one same-batch classes-blended "
        "targets-alike masked-chosen trainer-undivided storage-shared average-follows result-dropped mixed-half "
        "padding-read order-read noise-uniform noise-other time-other samples-rewritten "
        "integers-wrapped fields-mispaired "
        "units-alike norm-momentum layer-repeated state-carried straight-through "
        "clipped-nothing engine-gated autocast-unused adapters-frozen "
        "column-dropped pixels-raw view-permutes cast-to-nothing sums-lost written-away rows-alike drawn-without-graph "
        "none-given moved-apart views-apart schedule-idle ticked-by-pass slope-zero decays-nothing backward-other "
        "loss-divided clipped-late clipped-between gathered-apart unwaited loss-kept pairs-misplaced "
        "skip-kept new-tokens-frozen judged-alike average-itself "
        "term-overwritten average-buffers average-rounds average-stays transform-shared unfrozen-unheld merged-trained "
        "resumed-state resumed-samples samples-apart "
        "average-often autocast-stale adapter-idle cut-otherwise parts-alike result-unused order-ranked mask-inverted "
        "evaluated-training worst-kept refitted",
    }
)
"""What is said, and refuses nothing."""

TOLD = _ids({"apply": "gradient-lost", "checkpoint": "replaced-linear", "deepspeed": "stale-lock"})
"""What calls tell by themselves, and give way to an override."""

NOTES = _ids(
    {
        "units": "mixed-requires-grad",
        "run": "overwritten-ranks maybe-averaged samples-unknown left-out in-order",
        "prove": "limit",
        "scheduler": "undivided",
    }
)
"""What may be meant so, or cannot be seen."""

NEEDED = _ids(
    {
        "environment": "world-size device backend",
        "mesh": "size-below-one two-rests not-world-size ddp-does-not-shard tensor-needs-dtensors tensor-alone",
        "fsdp1": "mesh",
        "sharded": "not-to-plan differs too-late",
        "units": "unused-on-old-torch",
        "tensor": "no-plan not-a-layer named-twice tie-broken",
        "optimizer": "closure newer-torch several empty group-option two unfinished",
        "scheduler": "metric factory",
        "fp8": "engine all-gather msamp-engine msamp-optimizer",
        "ddp": "sync-batchnorm-loses",
        "deepspeed": "not-json removed-key wrong-type wrong-value stage two-places precision loss-scale max-grad-norm "
        "batch no-micro-batch hidden-size auto offload tensor-parallel sequence-parallel msamp mesh zero-init "
        "leaf-modules needs-optimizer two-optimizers two-schedulers unknown-type removed-type missing-key "
        "schedule-alone scheduler-ticks untested-optimizer",
        "loaders": "count foreign already-distributed split-batches",
        "global-batch": "unknown loaders-differ two-places unreachable",
        "weights": "not-filled state-not-sent not-seen unreadable rename shape parts dtype no-initialiser",
        "overrides": "unknown",
        "checkpoint": "folders-differ no-folder no-optimizer other-groups other-model other-state",
        "run": "gradients-waited-for gradients-misplaced whole-state whole-weights",
    }
)
"""Without these nothing can go on: an override does not help."""

MENDED = _ids(
    {
        "environment": "device offload-backend",
        "mesh": "size-below-one two-rests not-world-size single-has-none ddp-does-not-shard tensor-needs-dtensors "
        "tensor-alone nothing-sharded",
        "fsdp1": "mesh mixed-requires-grad unit-in-two-groups partial-state compiled-flat sync-on-cpu offload-on-cpu "
        "buffer-dtype-ignored",
        "model": "already-compiled already-checkpointed",
        "wrap": "empty class-not-found pattern-not-found container size-below-one named-twice",
        "blocks": "none-selected",
        "reshard": "not-a-factor",
        "tensor": "not-read",
        "scheduler": "metric",
        "optimizer": "two",
        "precision": "fp16-trains-fp16 loss-scale float16 casts-nothing reduce-dtype-ignored no-master-weights",
        "fp8": "library-missing library-too-old unsupported-device recipe-on-cpu skip-not-found nothing-to-convert "
        "already-converted tensor-parallel idle-in-eval engine all-gather msamp-engine msamp-optimizer msamp-clip "
        "optimizer-missing msamp-deprecated",
        "ddp": "bucket-size compiled-bucket unused-in-static-graph reentrant-unused hook-dtype powersgd "
        "sync-batchnorm-on-cpu sync-batchnorm-loses no-batchnorm",
        "units": "ignored-not-found unused-on-old-torch experts",
        "xla": "mesh loaders compile",
        "deepspeed": "no-stage master-weights clip mesh leaf-modules experts",
        "compile": "unknown-mode no-backend foreign-backend options unknown-option recompile-limit dynamic-cut "
        "switched-off",
        "checkpoint": "every operator offload-compiled offload-on-cpu kept-on-device cache",
        "entry-points": "unknown",
        "loaders": "count foreign own-iteration already-distributed",
        "values": "accumulation global-batch average-each clip norm-type scheduler-ticks total-steps timeout nesterov",
        "overrides": "unknown",
    }
)
"""What the config alone can mend."""

OURS = tuple(rule for rule in LAW if not rule.id.startswith("loop.") and not rule.told_by)
"""All that a look asks but the rules of the loop, most of which hold by what its events are."""


def test_these_rules_warn_or_note_and_all_others_refuse() -> None:
    assert {rule.id for rule in OURS if rule.severity is Severity.NOTE} == NOTES
    assert {rule.id for rule in OURS if rule.severity is Severity.WARNING} == WARNINGS


def test_these_rules_hold_whatever_is_overridden_and_all_others_give_way() -> None:
    assert {rule.id for rule in OURS if not rule.overridable} == NEEDED


def test_of_what_calls_tell_only_these_rows_give_way() -> None:
    assert {rule.id for rule in LAW if rule.told_by and rule.overridable} == TOLD


def test_these_rules_mend_the_config_and_no_others() -> None:
    assert {rule.id for rule in OURS if rule.repair is not None} == MENDED
