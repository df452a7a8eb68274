"""Metrics of a task's own: what their names may be, and how many there are. Pure; the engine and the service use it."""

from __future__ import annotations

import re

MAX_METRICS = 16
"""In training, and as many in validation. Each is a series in Prometheus and a curve on the job's page."""
MAX_NAME_CHARS = 40
_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9_./-]{{0,{MAX_NAME_CHARS - 1}}}")


def is_metric_name(name: object) -> bool:
    """Whether a task may report a metric of this name: a label in Prometheus, a column of a table, a title."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def suggested_name(name: object) -> str:
    """An allowed name that resembles one that is not."""
    text = re.sub(r"[^A-Za-z0-9_./-]+", "_", str(name))[:MAX_NAME_CHARS].strip("_")
    return text if is_metric_name(text) else f"m_{text}"[:MAX_NAME_CHARS]
