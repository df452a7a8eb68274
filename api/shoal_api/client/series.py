"""Reads the resources with numbers that may not be finite, for which JSON has null: the series, and two compared."""

from __future__ import annotations

import json
import math

from shoal_service.views import ParityView, SeriesPoint

_MEASURED = ("loss", "grad_norm")
_LARGEST = ("max_abs_diff", "max_rel_diff")
_COMPARED = {"loss": math.nan, "against": math.nan, "abs_diff": math.inf, "rel_diff": math.inf}


def parse_series(body: bytes) -> tuple[SeriesPoint, ...]:
    """Points of an answer; a loss or gradient norm that was not finite is NaN again."""
    return tuple(_point(item) for item in json.loads(body)["items"])


def parse_parity(body: bytes) -> ParityView:
    """A report; a loss that was not finite is NaN again, a difference that was not is infinite."""
    report = json.loads(body)
    if report["steps_compared"]:
        report |= {key: math.inf for key in _LARGEST if report[key] is None}
    points = [
        {key: _COMPARED.get(key) if value is None else value for key, value in p.items()} for p in report["points"]
    ]
    return ParityView.model_validate(report | {"points": points})


def _filled(point: dict[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in _COMPARED.items() if point[key] is None}


def _point(item: dict[str, float | None]) -> SeriesPoint:
    measured = {key: math.nan for key in _MEASURED if item.get(key) is None}
    return SeriesPoint.model_validate(item | measured)
