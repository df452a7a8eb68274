"""The route for system metrics: one metric of a job's ranks over time, as columns."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Query

from shoal_api.http.json_router import JsonRouter, Reading
from shoal_api.http.parameters import JobId
from shoal_api.http.problems import InvalidRequest
from shoal_service.core.access import Permission
from shoal_service.core.system_metrics import SystemMetric
from shoal_service.store import system_samples
from shoal_service.store.errors import JobNotFound
from shoal_service.views import SystemColumns

_RANKS = re.compile(r"[0-9]{1,7}(-[0-9]{1,7})?(,[0-9]{1,7}(-[0-9]{1,7})?)*")


router = JsonRouter("/v1/jobs/{job_id}", "histories", raises=[JobNotFound])


@router.route(
    "GET /system",
    Permission.JOBS_READ,
    "CPU, memory, GPU, network, disk and step phases of each rank over time",
)
def system(
    tx: Reading,
    job_id: JobId,
    metric: Annotated[
        SystemMetric,
        Query(description="`busy`: share of its time in which a rank waits for no other. A straggler has most."),
    ] = SystemMetric.BUSY,
    ranks: Annotated[
        str, Query(max_length=1000, description="Only these ranks: `0,4-7`. Empty: all ranks.", examples=["0,4-7"])
    ] = "",
    after: Annotated[
        float,
        Query(ge=0, allow_inf_nan=False, description="Only later than this time, in shorter intervals if they fit."),
    ] = 0.0,
) -> SystemColumns:
    """Returns at most 240 intervals at any age of the job. Shares of time are between 0 and 1; other metrics have
    their unit in their name."""
    return system_samples.read(tx, job_id, metric, ranks=ranks_of(ranks), after=after)


def ranks_of(text: str) -> RankSet | None:
    """Return the ranks that `0,4-7` names; None for all. Raises InvalidRequest."""
    if not text:
        return None
    if _RANKS.fullmatch(text) is None:
        raise InvalidRequest(f"ranks is {text!r}. Write numbers and ranges, for example 0,4-7.")
    parts = [tuple(map(int, part.split("-"))) for part in text.split(",")]
    return RankSet([(part[0], part[-1]) for part in parts])


class RankSet:
    """Ranges of ranks. They are not expanded, since a range may be large."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._ranges = ranges

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and any(first <= rank <= last for first, last in self._ranges)
