"""Parses series and parity reports. JSON has null for a number that is not finite; here it becomes NaN or infinity."""

from __future__ import annotations

import json
import math

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.views import ParityView

_MEASURED = ("loss", "grad_norm")
_LARGEST = ("max_abs_diff", "max_rel_diff")
_COMPARED = {"loss": math.nan, "against": math.nan, "abs_diff": math.inf, "rel_diff": math.inf}


def parse_series(body: bytes) -> tuple[SeriesPoint, ...]:
    """The points of a response. A loss or gradient norm of null becomes NaN."""
    return tuple(_point(item) for item in json.loads(body)["items"])


def parse_parity(body: bytes) -> ParityView:
    """A parity report. A loss of null becomes NaN, a difference of null becomes infinity."""
    report = json.loads(body)
    if report["steps_compared"]:
        report |= {key: math.inf for key in _LARGEST if report[key] is None}
    points = [
        {key: _COMPARED.get(key) if value is None else value for key, value in p.items()} for p in report["points"]
    ]
    return ParityView.model_validate(report | {"points": points})


def _point(item: dict[str, float | None]) -> SeriesPoint:
    measured = {key: math.nan for key in _MEASURED if item.get(key) is None}
    return SeriesPoint.model_validate(item | measured)
