"""How hard the laws are tried: ``HYPOTHESIS_PROFILE`` is ``dev`` (25 examples), ``ci`` (100) or ``nightly`` (5000).

``ci`` draws the same examples each time, so that a change is refused for what it does, and shows what fails as it was
drawn: shrinking takes minutes for each law. The others look further, and shrink.
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings

for name, examples in {"dev": 25, "nightly": 5000}.items():
    settings.register_profile(name, max_examples=examples, deadline=None)
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
