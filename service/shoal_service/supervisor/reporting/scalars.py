"""The named numbers of a point, as event files and metrics hooks get them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal_service.views import SeriesPoint

_FIELDS = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "world_size")


def scalars(point: SeriesPoint) -> Iterator[tuple[str, float]]:
    """Those that are finite."""
    for name in _FIELDS:
        value = getattr(point, name)
        if value is not None and math.isfinite(value):
            yield name, float(value)
    for nested in ("metrics", "val_metrics"):
        yield from ((f"{nested}/{name}", value) for name, value in getattr(point, nested).items())
