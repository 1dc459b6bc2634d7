"""What every test runs under: the same hypothesis examples on each run."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile(
    "default", derandomize=True, deadline=None, database=None, max_examples=50
)
settings.register_profile("nightly", deadline=None, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
