"""How hard the laws are tried: ``HYPOTHESIS_PROFILE`` is ``dev`` (25 examples), ``ci`` (100) or ``nightly`` (5000).

``ci`` draws the same examples each time, so that a change is refused for what it does; the others look further.
"""

from __future__ import annotations

import os

from hypothesis import settings

for name, examples in {"dev": 25, "ci": 100, "nightly": 5000}.items():
    settings.register_profile(name, max_examples=examples, deadline=None, derandomize=name == "ci")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
