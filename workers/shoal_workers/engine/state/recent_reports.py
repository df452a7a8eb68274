"""The reports of the last steps, kept by every rank and in every snapshot, because rank 0 may die before it sent them.

A group that continues from a snapshot does not repeat those steps, so their losses would be missing from the job's
history. The next rank 0, which may be a worker that has never trained, sends them again with `GroupFormed`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import Any

from shoal_workers.contract.worker_reports import StepReport

_NUM_KEPT = 64
"""More steps than a polling supervisor lags behind. If it was away for longer, the oldest reports are lost."""
_MAX_CHARS = 32_000
"""Of all reports together, half of the room that a snapshot has for plain values: with many metrics fewer are kept."""


class Recent:
    """Training thread only."""

    def __init__(self) -> None:
        self._reports: deque[tuple[dict[str, Any], str]] = deque(maxlen=_NUM_KEPT)

    def add(self, report: StepReport) -> None:
        values = _values(report)
        self._reports.append((values, json.dumps(values, allow_nan=False)))
        while sum(len(text) for _, text in self._reports) > _MAX_CHARS:
            self._reports.popleft()

    def values(self) -> list[dict[str, Any]]:
        return [values for values, _ in self._reports]

    def encoded(self, also: StepReport | None = None) -> str:
        """The values as JSON, with one more if given; each report is encoded once."""
        texts = [text for _, text in self._reports]
        if also is not None:
            texts = [*texts, json.dumps(_values(also), allow_nan=False)][-_NUM_KEPT:]
        return f"[{', '.join(texts)}]"

    @staticmethod
    def parse(values: Iterable[dict[str, Any]]) -> tuple[StepReport, ...]:
        return tuple(StepReport.model_validate(value) for value in values)


def _values(report: StepReport) -> dict[str, Any]:
    return report.model_dump(exclude={"compute_s", "data_s", "cpu_wait_s", "saving_s", "validating_s"})
