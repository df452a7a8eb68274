"""The reports of the last steps, kept by every rank and in every snapshot: rank 0 may die before it has told them.

A group that goes on from a snapshot does not do those steps again, so their losses would be missing from the job's
history. The next rank 0, which may be a process that has never trained, tells them again with `Formed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from shoal_workers.contract.messages import StepReport

_NUM_KEPT = 64
"""More than a supervisor that listens is ever behind; one that was away as long as that loses the oldest."""


class Recent:
    """Training thread only."""

    def __init__(self, past: Iterable[StepReport] = ()) -> None:
        self._reports = deque((_flat(report) for report in past), maxlen=_NUM_KEPT)

    def add(self, report: StepReport) -> None:
        self._reports.append(_flat(report))

    def to_json(self) -> list[dict[str, Any]]:
        return list(self._reports)

    @staticmethod
    def parse(values: Iterable[dict[str, Any]]) -> tuple[StepReport, ...]:
        return tuple(StepReport.model_validate(value) for value in values)


def _flat(report: StepReport) -> dict[str, Any]:
    return report.model_dump(exclude={"compute_s"})
