"""Properties are about results, not about speed: a busy machine must not fail them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shoal-service", deadline=None, max_examples=60)
settings.load_profile("shoal-service")
