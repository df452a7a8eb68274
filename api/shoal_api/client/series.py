"""Reads the series: the one resource with numbers that may not be finite, for which JSON has null."""

from __future__ import annotations

import json
import math

from shoal_service.views import SeriesPoint

_MEASURED = ("loss", "grad_norm")


def parse_series(body: bytes) -> tuple[SeriesPoint, ...]:
    """Points of an answer; a loss or gradient norm that was not finite is NaN again."""
    return tuple(_point(item) for item in json.loads(body)["items"])


def _point(item: dict[str, float | None]) -> SeriesPoint:
    measured = {key: math.nan for key in _MEASURED if item.get(key) is None}
    return SeriesPoint.model_validate(item | measured)
