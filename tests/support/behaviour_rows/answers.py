"""How a row is answered, and answers that many rows share.

An answer is ``rule <id>``, ``step <kind>``, ``test <function>``, ``row <id>`` (answered as that row is), ``deviation
<reason>``, or ``pending <subject>`` where nothing answers yet.
"""

from __future__ import annotations

Answers = tuple[str, ...]

NO_REGISTRY = "deviation there is no registry of prepared objects: apply returns them, and ready.unwrap() the module"

TYPED = "deviation one field of a typed config holds it, so it cannot be said twice or in another type"

ON_ONE_MODULE = "deviation apply takes one model, and the optimizer, scheduler and loaders by name"

NOT_ON_META = "deviation without config.weights apply refuses a model on meta (plan.no-weights): ties stay as they are"
"""F1-4, F1-48, H-13"""

FLAG = "rule environment.launcher-flag"
NO_WRAPPER = "deviation the optimizer and the scheduler stay the objects that they are: nothing is put around them"
LOOP = "test test_two_processes_equal_the_plain_loop"
NO_CONTEXT_PARALLEL = "deviation context and sequence parallelism are not offered: the mesh has no axis for them"
NO_SINGLETON = "deviation there is no process-wide state: each plan and each Prepared has its own"
MOVED = "test test_batches_of_any_make_are_moved"
DIVIDED = "test test_every_kind_of_loader_is_divided_so_that_each_sample_counts_once"

REACHED = "test test_a_setting_reaches_what_the_library_is_given"
"""The row is about settings, each of which has a case in that test."""
