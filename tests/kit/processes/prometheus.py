"""Queries to a real Prometheus, over the time in which it scraped a run."""

import math
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class History:
    """What a Prometheus has scraped between two times."""

    url: str
    start: float
    end: float
    step_s: float = 1.0

    def values(self, expr: str) -> list[float]:
        """Values of all series, at all times; without NaN. A query that Prometheus refuses fails the test."""
        times = {"start": self.start, "end": self.end, "step": self.step_s}
        found = self._get("query_range", query=expr, **times)["result"]
        numbers = [float(value) for series in found for _, value in series["values"]]
        return [number for number in numbers if not math.isnan(number)]

    def labels(self, expr: str, name: str) -> set[str]:
        """The values of a label among the series of a query."""
        times = {"start": self.start, "end": self.end, "step": self.step_s}
        found = self._get("query_range", query=expr, **times)["result"]
        return {series["metric"].get(name, "") for series in found}

    def exemplars(self, metric: str) -> list[dict[str, str]]:
        found = self._get("query_exemplars", query=metric, start=self.start, end=self.end)
        return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    def _get(self, what: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{what}", params=parameters, timeout=60)
        document = answer.json()
        assert document["status"] == "success", (parameters, document)
        return document["data"]
