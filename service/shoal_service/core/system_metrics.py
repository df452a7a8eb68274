"""System metrics of a job, by rank: their names and units, and how often they are sampled and rolled up. Pure.

A sample has one value for each metric and rank, as a mean over its interval. Roll-ups are means of samples over ten
seconds, then four times as long, and so on; of each length only the newest are kept, so a job has a bounded number of
them at any age. The supervisor makes samples (`supervisor/reporting/reporter.py`), `store/system_samples.py`
rolls them up, and the route `/system` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from pydantic import Field

from shoal_workers.contract import Frozen, StepPart, WorkerUse

SHORTEST_S = 10.0
"""Seconds between two samples of a job with up to `_RANKS_AT_FULL_PACE` ranks; length of the finest buckets."""
_RANKS_AT_FULL_PACE = 128
FACTOR = 4
LEVELS: tuple[float, ...] = tuple(SHORTEST_S * float(FACTOR**n) for n in range(7))
"""Seconds per bucket of each level: 10 s ... 11.4 h."""
MAX_BUCKETS = 240
"""Buckets of each level that are kept: 40 minutes of the finest, 113 days of the coarsest."""
_DIGITS = ".7g"
"""As many digits as are worth to be sent and stored."""


class SystemMetric(StrEnum):
    """What is measured of each rank."""

    BUSY = "busy"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    SNAPSHOT = "snapshot"
    OTHER = "other"
    CPU_CORES = "cpu_cores"
    MEMORY_BYTES = "memory_bytes"
    GPU_BUSY = "gpu_busy"
    GPU_MEMORY_BYTES = "gpu_memory_bytes"
    GPU_CELSIUS = "gpu_celsius"
    GPU_WATTS = "gpu_watts"
    RECEIVED_BYTES_S = "received_bytes_s"
    SENT_BYTES_S = "sent_bytes_s"
    READ_BYTES_S = "read_bytes_s"
    WRITTEN_BYTES_S = "written_bytes_s"


def busy_share(use: WorkerUse) -> float | None:
    """Share of its time in which the training thread does not wait for other ranks. The straggler has the highest,
    since the others wait for it. None if not known, or a GPU waits in place of the thread."""
    if not use.phases or use.gpu_bytes:
        return None
    return 1.0 - use.phases.get(StepPart.COMMUNICATION, 0.0)


def _part(part: StepPart) -> Callable[[WorkerUse], float | None]:
    return lambda use: use.phases.get(part)


VALUES: Mapping[SystemMetric, Callable[[WorkerUse], float | None]] = {
    SystemMetric.BUSY: busy_share,
    **{SystemMetric(part.value): _part(part) for part in StepPart},
    SystemMetric.CPU_CORES: lambda use: use.cpu_cores,
    SystemMetric.MEMORY_BYTES: lambda use: use.resident_bytes or None,
    SystemMetric.GPU_BUSY: lambda use: use.gpu_busy,
    SystemMetric.GPU_MEMORY_BYTES: lambda use: use.gpu_bytes - use.gpu_free_bytes if use.gpu_bytes else None,
    SystemMetric.GPU_CELSIUS: lambda use: use.gpu_celsius,
    SystemMetric.GPU_WATTS: lambda use: use.gpu_watts,
    SystemMetric.RECEIVED_BYTES_S: lambda use: use.received_bytes_s,
    SystemMetric.SENT_BYTES_S: lambda use: use.sent_bytes_s,
    SystemMetric.READ_BYTES_S: lambda use: use.read_bytes_s,
    SystemMetric.WRITTEN_BYTES_S: lambda use: use.written_bytes_s,
}


class SystemSample(Frozen):
    """One value for each metric and rank."""

    at: float
    """End of the interval, wall-clock time."""
    generation: int
    """The generation at that time. Ranks of another one may be other workers."""
    values: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    """By name of the metric: the value of each rank; null: not measured. A metric that no rank has is left out."""


def pace_s(num_ranks: int) -> float:
    """Seconds between two samples: longer for more ranks, so that a job reports at most so many values a second."""
    return SHORTEST_S * max(1.0, num_ranks / _RANKS_AT_FULL_PACE)


def make_sample(uses: Mapping[int, Sequence[WorkerUse]], *, num_ranks: int, generation: int, at: float) -> SystemSample:
    """Makes a sample of what each rank has measured in the interval."""
    values: dict[str, tuple[float | None, ...]] = {}
    for metric, value in VALUES.items():
        of_ranks = tuple(_mean(map(value, uses.get(rank, ()))) for rank in range(num_ranks))
        if any(rank is not None for rank in of_ranks):
            values[metric.value] = of_ranks
    return SystemSample(at=at, generation=generation, values=values)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(format(sum(known) / len(known), _DIGITS)) if known else None


def bucket_of(at: float, width_s: float) -> int:
    return int(at // width_s)


def level_for(first_at: float, last_at: float) -> float:
    """Seconds per bucket of the finest level that has all buckets from `first_at` to `last_at`."""
    return next(
        (width for width in LEVELS if bucket_of(last_at, width) - bucket_of(first_at, width) < MAX_BUCKETS), LEVELS[-1]
    )
