"""Hypothesis without a deadline: the machine is shared, and a slow example is no failure of a pure function."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
