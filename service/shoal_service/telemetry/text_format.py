"""The text formats of Prometheus: a metric and its values as lines. Tests read them with prometheus_client's parsers.

prometheus_client's own generators make an object per sample, which takes most of a second for 1,000 jobs (decision
0030). The two formats differ in the name of a counter's family, and only OpenMetrics has exemplars.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from shoal_service.telemetry.metric import Exemplar, Histogram, Kind, Labels, Metric, Value

Exemplars = Mapping[Labels, Exemplar]
"""By the labels of the series."""


def header(metric: Metric, *, openmetrics: bool) -> str:
    """Help and type of a family."""
    name = metric.name.removesuffix("_total") if openmetrics and metric.kind is Kind.COUNTER else metric.name
    text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.kind}\n"


def family(
    metric: Metric, rows: Mapping[Labels, Value], *, openmetrics: bool, exemplars: Exemplars | None = None
) -> str:
    """All of a metric. Exemplars are left out where the format has none."""
    named = (exemplars or {}) if openmetrics else {}
    parts = [header(metric, openmetrics=openmetrics)]
    parts += (series(metric, labels, value, exemplar=named.get(labels)) for labels, value in rows.items())
    return "".join(parts)


def series(metric: Metric, labels: Labels, value: Value, *, exemplar: Exemplar | None = None) -> str:
    """The lines of one series; `labels` in the order of the metric's."""
    pairs = _pairs(metric.labels, labels)
    if isinstance(value, Histogram):
        return "".join(_histogram(metric, pairs, value, exemplar))
    braces = f"{{{pairs}}}" if pairs else ""
    return f"{metric.name}{braces} {number(value)}{_exemplar(exemplar)}\n"


@lru_cache(maxsize=1 << 17)
def _pairs(names: Labels, labels: Labels) -> str:
    """Equal in each scrape, and for metrics with the same labels."""
    return ",".join(f'{name}="{_escaped(label)}"' for name, label in zip(names, labels, strict=True))


def number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _histogram(metric: Metric, pairs: str, value: Histogram, exemplar: Exemplar | None) -> Iterable[str]:
    before = f"{pairs}," if pairs else ""
    braces = f"{{{pairs}}}" if pairs else ""
    bounds = [*map(float, metric.buckets), math.inf]
    counts = (*value.counts, value.count)
    named = next((i for i, bound in enumerate(bounds) if exemplar is not None and exemplar.value <= bound), -1)
    for i, (bound, count) in enumerate(zip(bounds, counts, strict=True)):
        words = _exemplar(exemplar) if i == named and count else ""
        yield f'{metric.name}_bucket{{{before}le="{number(bound)}"}} {count}{words}\n'
    yield f"{metric.name}_count{braces} {value.count}\n{metric.name}_sum{braces} {number(value.total)}\n"


def _exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    pairs = ",".join(f'{name}="{_escaped(label)}"' for name, label in exemplar.labels.items())
    return f" # {{{pairs}}} {number(exemplar.value)} {exemplar.at:.3f}"


def _escaped(label: str) -> str:
    if "\\" in label or '"' in label or "\n" in label:
        return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return label
