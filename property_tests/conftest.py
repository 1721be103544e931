"""How hard the laws are tried: ``HYPOTHESIS_PROFILE`` is ``dev`` (25 examples), ``ci`` (60) or ``nightly`` (5000).

``ci`` draws the same examples each time, so that a change is refused for what it does, and shows what fails as it was
drawn: shrinking takes minutes for each law. The others look further, and shrink.

Hypothesis also draws constants that it reads in the modules imported so far, which differ from one worker of xdist to
the next: under ``ci`` it reads none.
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings
from hypothesis.internal.conjecture import providers

for name, examples in {"dev": 25, "nightly": 5000}.items():
    settings.register_profile(name, max_examples=examples, deadline=None)
settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
settings.load_profile(PROFILE)
if PROFILE == "ci":
    providers._get_local_constants = lambda: providers._local_constants
