"""The text formats of Prometheus: chooses the one that a scraper wants, and writes a metric and its values as lines.

Tests read the lines with prometheus_client's parsers.

prometheus_client's own generators make an object per sample, which takes most of a second for 1,000 jobs (decision
0030). The two formats differ in the name of a counter's family, and only OpenMetrics has exemplars.
"""

from __future__ import annotations

import gzip
import math
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache

from shoal_service.telemetry.catalogue import Exemplar, Histogram, Kind, Labels, Metric, Value

Exemplars = Mapping[Labels, Exemplar]
"""Exemplars by the labels of their series."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OF_OPENMETRICS = {"application/openmetrics-text": ("", "1.0.0")}
_OF_TEXT = {"text/plain": ("", "0.0.4"), "text/*": ("",), "*/*": ("",)}
"""Media types and versions of an Accept header that mean the text format, the most specific first."""
_GZIP_FROM = 1024
"""Bytes of the smallest body that is compressed."""


def choose_media_type(accept: str) -> str:
    """Choose the format that a scraper's header Accept prefers (RFC 9110, 12.5.1).

    OpenMetrics only if the header names it; the text format if neither is acceptable.
    """
    wanted = _parse_preferences(accept)

    def quality(known: Mapping[str, tuple[str, ...]]) -> float:
        """The most specific entry counts: `text/plain;q=0, */*` refuses the text format."""
        for media_type, versions in known.items():
            of_type = [q for name, version, q in wanted if name == media_type and version in versions]
            if of_type:
                return max(of_type)
        return 0.0

    openmetrics = quality(_OF_OPENMETRICS)
    return OPENMETRICS if openmetrics > 0 and openmetrics >= quality(_OF_TEXT) else TEXT


def compress(body: bytes, accept_encoding: str) -> bytes | None:
    """Compress with gzip. None if the body is small, or the header Accept-Encoding does not allow gzip."""
    wanted = {name: q for name, _, q in _parse_preferences(accept_encoding)}
    if len(body) < _GZIP_FROM or not wanted.get("gzip", wanted.get("*", 0.0)) > 0:
        return None
    return gzip.compress(body, compresslevel=1)


def _parse_preferences(header: str) -> list[tuple[str, str, float]]:
    """Return name, version and quality of each entry of an Accept header, without those that cannot be read."""
    preferences = []
    for entry in header.lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        values = {
            key.strip(): value.strip() for key, _, value in (parameter.partition("=") for parameter in parameters)
        }
        with suppress(ValueError):
            preferences.append((name, values.get("version", "").strip('"'), float(values.get("q", "1"))))
    return preferences


def format_header(metric: Metric, *, openmetrics: bool) -> str:
    """Write the lines with help and type of a metric."""
    name = metric.name.removesuffix("_total") if openmetrics and metric.kind is Kind.COUNTER else metric.name
    text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.kind}\n"


def format_family(
    metric: Metric, rows: Mapping[Labels, Value], *, openmetrics: bool, exemplars: Exemplars | None = None
) -> str:
    """Write all lines of a metric, with exemplars if the format has them."""
    named = (exemplars or {}) if openmetrics else {}
    parts = [format_header(metric, openmetrics=openmetrics)]
    parts += (format_series(metric, labels, value, exemplar=named.get(labels)) for labels, value in rows.items())
    return "".join(parts)


def format_series(metric: Metric, labels: Labels, value: Value, *, exemplar: Exemplar | None = None) -> str:
    """Write the lines of one series. `labels`: in the order of the metric's."""
    pairs = _format_labels(metric.labels, labels)
    if isinstance(value, Histogram):
        return _format_histogram(metric, pairs, value, exemplar)
    braces = f"{{{pairs}}}" if pairs else ""
    suffix = "" if exemplar is None else _format_exemplar(exemplar)
    return f"{metric.name}{braces} {format_number(value)}{suffix}\n"


@lru_cache(maxsize=1 << 17)
def _format_labels(names: Labels, labels: Labels) -> str:
    """Write labels. Cached, because each scrape and each metric with the same labels repeats them."""
    return ",".join(f'{name}="{_escape(label)}"' for name, label in zip(names, labels, strict=True))


def format_number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _format_histogram(metric: Metric, pairs: str, value: Histogram, exemplar: Exemplar | None) -> str:
    counts = (*value.counts, value.count)
    text = _make_template(metric.name, metric.buckets, pairs) % (*counts, value.count, format_number(value.total))
    if exemplar is None:
        return text
    lines = text.split("\n")
    named = bisect_left(metric.buckets, exemplar.value)
    lines[named] += _format_exemplar(exemplar) if counts[named] else ""
    return "\n".join(lines)


@lru_cache(maxsize=1 << 13)
def _make_template(name: str, buckets: tuple[float, ...], pairs: str) -> str:
    """Make the lines of a histogram, with places for the cumulative counts, the count and the sum."""
    pairs = pairs.replace("%", "%%")
    before = f"{pairs}," if pairs else ""
    braces = f"{{{pairs}}}" if pairs else ""
    bounds = [*map(float, buckets), math.inf]
    lines = [f'{name}_bucket{{{before}le="{format_number(bound)}"}} %d\n' for bound in bounds]
    return "".join([*lines, f"{name}_count{braces} %d\n{name}_sum{braces} %s\n"])


def _format_exemplar(exemplar: Exemplar) -> str:
    pairs = ",".join(f'{name}="{_escape(label)}"' for name, label in exemplar.labels.items())
    return f" # {{{pairs}}} {format_number(exemplar.value)} {exemplar.at:.3f}"


def _escape(label: str) -> str:
    if "\\" in label or '"' in label or "\n" in label:
        return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return label
